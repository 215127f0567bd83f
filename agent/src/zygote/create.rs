//! Makes a container with libcontainer, in a child of the zygote. The container's first process outlives the child and becomes the
//! agent's.

use libcontainer::container::builder::ContainerBuilder;
use libcontainer::syscall::syscall::SyscallType;
use nacelle_base::retry::retry_interrupted;
use nix::sys::socket::MsgFlags;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::executor::ContainerProgram;
use super::late_mounts;
use super::message::{CreateCommand, MAX_REPORT, Refusal, RefusalKind};
use super::process::CreatedProcess;
use super::wire::receive_with_descriptors;
use crate::rootfs::check_proc_mounts;
use crate::{log, paths, sys};

/// The most of libcontainer's log of a failure that a refusal contains, in bytes. The innermost cause comes first.
const MAX_CAUSE: usize = 1024;
/// The most of that log that is read, in bytes.
const MAX_LOG: usize = 8192;

/// Makes the container. `stdio` are stdin, stdout and stderr of its first process, or nothing if it has a terminal.
pub(super) fn create_container(request: &CreateCommand, stdio: Vec<OwnedFd>) -> Result<CreatedProcess, Refusal> {
    let (reason, report) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC | nix::fcntl::OFlag::O_NONBLOCK)
        .map_err(|error| Refusal::internal("create a pipe", &error))?;
    let (causes, copy) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC | nix::fcntl::OFlag::O_NONBLOCK)
        .map_err(|error| Refusal::internal("create a pipe", &error))?;
    log::copy_errors_of_libcontainer(copy);
    let bundle = Path::new(paths::BUNDLES).join(&request.id);
    let failed = |error: libcontainer::error::LibcontainerError| {
        let mut report = [0; MAX_REPORT];
        let length = retry_interrupted(|| nix::unistd::read(&reason, &mut report)).unwrap_or(0);
        // libcontainer's own error repeats this reason in each of its steps.
        if let Some(refusal) = Refusal::from_report(report.get(..length).unwrap_or_default()) {
            return refusal;
        }
        let mut refusal = Refusal::internal("create the container", &error);
        let mut buffer = [0; MAX_LOG];
        if let Ok(length @ 1..) = retry_interrupted(|| nix::unistd::read(&causes, &mut buffer)) {
            if is_unusable_mount(&String::from_utf8_lossy(buffer.get(..length).unwrap_or_default())) {
                refusal.kind = RefusalKind::Unusable;
            }
            let description = String::from_utf8_lossy(buffer.get(..length.min(MAX_CAUSE)).unwrap_or_default());
            refusal.message =
                format!("{}; libcontainer: {}", refusal.message, description.trim_end().replace('\n', "; "));
        }
        refusal
    };
    let mut builder = ContainerBuilder::new(request.id.clone(), SyscallType::default())
        .with_executor(ContainerProgram { report: Arc::new(report) })
        .with_root_path(paths::CONTAINERS)
        .map_err(failed)?;
    let mut console = None;
    if request.tty {
        let path = bundle.join("console");
        console =
            Some(UnixListener::bind(&path).map_err(|error| Refusal::internal("listen for the terminal", &error))?);
        builder = builder.with_console_socket(Some(path));
    } else {
        let mut stdio = stdio.into_iter();
        if let (Some(stdin), Some(stdout), Some(stderr)) = (stdio.next(), stdio.next(), stdio.next()) {
            builder = builder.with_stdin(stdin).with_stdout(stdout).with_stderr(stderr);
        }
    }
    let container = builder.as_init(&bundle).with_systemd(false).with_detach(true).build().map_err(failed)?;
    let pid = container.pid().map(|pid| pid.as_raw()).ok_or_else(|| Refusal {
        message: "cannot create the container: it has no process".to_owned(),
        kind: RefusalKind::Internal,
    })?;
    let terminal = console.map(receive_terminal).transpose();
    let terminal = terminal.map_err(|error| Refusal::internal("receive the container's terminal", &error))?;
    // Opened while this process still sees the agent's /proc, and read when all mounts are made.
    let mounts = File::open(format!("/proc/{pid}/mountinfo"));
    let mounts = mounts.map_err(|error| Refusal::internal("open the container's mounts", &error))?;
    late_mounts::mount_late(pid, &request.late).map_err(|error| {
        let refusal = Refusal::internal("mount over the container's /dev", &error);
        if error.is_of_request() { Refusal { kind: RefusalKind::Unusable, ..refusal } } else { refusal }
    })?;
    check_mounts_in_proc(mounts, &request.in_proc)?;
    // The PID stays the process's own as long as this process, its parent, has not reaped it.
    Ok(CreatedProcess { pid, pidfd: sys::pidfd_open(pid).ok(), terminal })
}

/// Returns whether libcontainer's log says that a path of the specification is in the way of a mount: in a volume that was mounted
/// before, for instance, which only libcontainer sees.
fn is_unusable_mount(log: &str) -> bool {
    let numbers = [libc::ENOTDIR, libc::ELOOP, libc::ENAMETOOLONG, libc::EROFS];
    let mut mounts = log.lines().filter(|line| line.starts_with("failed to mount ") || line.contains("prepare rootfs"));
    mounts.any(|line| numbers.iter().any(|number| line.contains(&format!("code: {number},"))))
}

/// Checks the mounts in the container's /proc before the container's program starts: links in volumes, which containers of the pod can
/// make at any time, may have led a mount there. `mounts` is the mountinfo of the container's first process.
fn check_mounts_in_proc(mut mounts: File, allowed: &[PathBuf]) -> Result<(), Refusal> {
    let mut mountinfo = String::new();
    mounts.read_to_string(&mut mountinfo).map_err(|error| Refusal::internal("read the container's mounts", &error))?;
    check_proc_mounts(&mountinfo, allowed).map_err(|error| Refusal {
        message: format!("cannot create the container: {error}"),
        kind: RefusalKind::Unusable,
    })
}

fn receive_terminal(console: UnixListener) -> io::Result<OwnedFd> {
    // The container's first process has connected and sent before `build` returned.
    let (peer, _) = console.accept()?;
    receive_with_descriptors(&peer, MsgFlags::empty())?.1.pop().ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_obstacle_in_the_way_of_a_mount_is_of_the_request() {
        let mount = "failed to mount Mount { destination: \"/v/inside\" }: cannot re-open with O_DIRECTORY\n";
        let rootfs = |code: i32| {
            format!(
                "{mount}failed to prepare rootfs err=Mount(Pathrs(OsError {{ source: Os {{ code: {code}, kind: Other }} }}))\n"
            )
        };
        for (log, expected) in [
            (rootfs(libc::ENOTDIR), true),
            (rootfs(libc::EROFS), true),
            (rootfs(libc::EIO), false),
            (rootfs(200), false),
            (mount.to_owned(), false),
            ("failed to apply the cgroup err=Os { code: 30, kind: ReadOnlyFilesystem }\n".to_owned(), false),
            (String::new(), false),
        ] {
            assert_eq!(is_unusable_mount(&log), expected, "{log}");
        }
    }
}
