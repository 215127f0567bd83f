//! Owns: starting a further process in a container, in a child of the zygote: cgroup, namespaces, terminal, limits,
//! user, capabilities, seccomp, exec. The container's own filter and limits hold for it too.

use libcontainer::oci_spec::runtime::{PosixRlimitType, Process};
use libcontainer::syscall::syscall::create_syscall;
use libcontainer::{capabilities, seccomp};
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sched::CloneFlags;
use nix::unistd::{Gid, Uid};
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use super::child::{become_root, defect};
use super::executor::{c_strings, find, why};
use super::{Exec, Made, Refusal, Why};
use crate::sys;

/// What failed in the process to be, as it comes through the pipe: a step and an error number.
const STEPS: [&str; 9] = [
    "make a session with the terminal",
    "set the resource limits",
    "enter the working directory",
    "set the groups and the user",
    "set no_new_privs",
    "load the seccomp filter",
    "set the capabilities",
    "find the program",
    "run the program",
];

pub(super) fn exec(request: &Exec, fds: Vec<OwnedFd>) -> Result<Made, Refusal> {
    let mut fds = fds.into_iter();
    let pidfd = fds.next().ok_or_else(|| defect("enter the container", &Errno::EBADF))?;
    let mut stdio: Vec<OwnedFd> = fds.collect();
    let score = request.process.oom_score_adj().unwrap_or(0);
    fs::write("/proc/self/oom_score_adj", score.to_string()).map_err(|error| defect("set oom_score_adj", &error))?;
    let join = |cgroup: &str| fs::write(format!("{cgroup}/cgroup.procs"), "0");
    let joined = match (join(&request.cgroup), &request.init_cgroup) {
        (Err(error), Some(cgroup)) if error.raw_os_error() == Some(libc::EBUSY) => join(cgroup),
        (joined, _) => joined,
    };
    joined.map_err(|error| defect("enter the container's cgroup", &error))?;
    let mut namespaces = CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWPID;
    namespaces.set(CloneFlags::CLONE_NEWCGROUP, request.cgroup_namespace);
    namespaces.set(CloneFlags::CLONE_NEWUSER, request.user_namespace);
    nix::sched::setns(&pidfd, namespaces).map_err(|error| defect("enter the container's namespaces", &error))?;
    if request.user_namespace {
        become_root().map_err(|error| defect("become root in the container's user namespace", &error))?;
    }
    drop(pidfd);
    // Until it runs the program, nobody in the container may look into it; exec ends that.
    nix::sys::prctl::set_dumpable(false).map_err(|error| defect("hide from the container", &error))?;

    let mut terminal = None;
    if request.process.terminal().unwrap_or(false) {
        let (master, slave) = open_terminal(request).map_err(|error| defect("open a terminal", &error))?;
        terminal = Some(master);
        stdio = vec![slave];
    }
    let (reason, report) = nix::unistd::pipe2(OFlag::O_CLOEXEC).map_err(|error| defect("make a pipe", &error))?;
    let pid = match sys::fork().map_err(|error| defect("fork", &error))? {
        Some(pid) => pid,
        None => {
            let (step, error) = become_program(request, &stdio, terminal.is_some());
            let code = (error as i32).to_le_bytes();
            // The parent takes silence for success, but then it sees the exit code.
            let _ = nix::unistd::write(&report, &[&[step][..], &code].concat());
            std::process::exit(if why(error) == Why::NoSuchProgram { 127 } else { 126 });
        }
    };
    drop(report);
    let mut bytes = [0; 5];
    match nix::unistd::read(&reason, &mut bytes) {
        Ok(0) => Ok(Made { pid, terminal }),
        Ok(_) => {
            let [step, a, b, c, d] = bytes;
            let error = Errno::from_raw(i32::from_le_bytes([a, b, c, d]));
            let what = STEPS.get(usize::from(step)).copied().unwrap_or("start");
            let name = request.process.args().iter().flatten().next().cloned().unwrap_or_default();
            Err(Refusal { message: format!("cannot {what} {name:?}: {}", error.desc()), why: why(error) })
        }
        Err(error) => Err(defect("learn whether the program runs", &error)),
    }
}

/// A new terminal of the container's own devpts: its master and its slave.
fn open_terminal(request: &Exec) -> io::Result<(OwnedFd, OwnedFd)> {
    let master = nix::fcntl::open(
        "/dev/pts/ptmx",
        OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW,
        nix::sys::stat::Mode::empty(),
    )?;
    let devpts = nix::sys::statfs::FsType(0x1cd1);
    if nix::sys::statfs::fstatfs(&master)?.filesystem_type() != devpts {
        return Err(io::Error::from(Errno::ENOTTY));
    }
    let slave = sys::open_pty_peer(&master)?;
    nix::unistd::fchown(&slave, Some(Uid::from_raw(request.process.user().uid())), None)?;
    let (columns, rows) = request.size;
    if columns != 0 && rows != 0 {
        sys::set_window_size(&master, columns, rows)?;
    }
    Ok((master, slave))
}

/// Turns this process into the program; returns only with the step (of `STEPS`) and the error.
fn become_program(request: &Exec, stdio: &[OwnedFd], terminal: bool) -> (u8, Errno) {
    let process = &request.process;
    match prepare(request, stdio, terminal) {
        Err(failed) => failed,
        Ok(()) => {
            let env = process.env().as_deref().unwrap_or_default();
            let args = process.args().as_deref().unwrap_or_default();
            let name = args.first().map(String::as_str).unwrap_or_default();
            let found = find(name, env).and_then(|path| Ok((path, c_strings(args)?, c_strings(env)?)));
            match found {
                Err(error) => (7, error),
                Ok((path, args, env)) => (8, sys::execve(&path, &args, &env)),
            }
        }
    }
}

fn prepare(request: &Exec, stdio: &[OwnedFd], terminal: bool) -> Result<(), (u8, Errno)> {
    let process = &request.process;
    let io_error = |step| move |error: io::Error| (step, Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO)));
    let at = |step| move |error: Errno| (step, error);
    connect_stdio(stdio, terminal).map_err(io_error(0))?;
    set_limits(process).map_err(io_error(1))?;
    // As whoever may enter it: the agent before the user is set, the user after.
    let entered = nix::unistd::chdir(process.cwd());
    if let Some(umask) = process.user().umask() {
        nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(umask));
    }
    let no_new_privs = process.no_new_privileges().unwrap_or(false);
    if no_new_privs {
        nix::sys::prctl::set_no_new_privs().map_err(at(4))?;
    }
    let filter = || match &request.seccomp {
        Some(filter) => seccomp::initialize_seccomp(filter).map(drop).map_err(|error| {
            tracing::error!(%error, "cannot load the seccomp filter of an exec");
            (5, Errno::EINVAL)
        }),
        None => Ok(()),
    };
    let syscall = create_syscall();
    let groups: Vec<Gid> = process.user().additional_gids().iter().flatten().map(|gid| Gid::from_raw(*gid)).collect();
    nix::unistd::setgroups(&groups).map_err(at(3))?;
    let refused = |step| move |_: libcontainer::syscall::SyscallError| (step, Errno::last());
    let (uid, gid) = (Uid::from_raw(process.user().uid()), Gid::from_raw(process.user().gid()));
    nix::sys::prctl::set_keepcaps(true).map_err(at(3))?;
    nix::unistd::setresgid(gid, gid, gid).map_err(at(3))?;
    nix::unistd::setresuid(uid, uid, uid).map_err(at(3))?;
    nix::sys::prctl::set_keepcaps(false).map_err(at(3))?;
    capabilities::reset_effective(syscall.as_ref()).map_err(refused(6))?;
    if !no_new_privs {
        // Loading a filter takes privileges, which go with the next step.
        filter()?;
    }
    if let Some(wanted) = process.capabilities() {
        capabilities::drop_privileges(wanted, syscall.as_ref()).map_err(refused(6))?;
    }
    if entered.is_err() {
        nix::unistd::chdir(process.cwd()).map_err(at(2))?;
    }
    if no_new_privs {
        filter()?;
    }
    Ok(())
}

fn connect_stdio(stdio: &[OwnedFd], terminal: bool) -> io::Result<()> {
    nix::unistd::setsid()?;
    for target in 0..3_usize {
        let source = stdio.get(target).or(stdio.last());
        let source = source.map(AsFd::as_fd).ok_or(Errno::EBADF)?;
        match target {
            0 => nix::unistd::dup2_stdin(source)?,
            1 => nix::unistd::dup2_stdout(source)?,
            _ => nix::unistd::dup2_stderr(source)?,
        }
    }
    if terminal {
        sys::take_terminal()?;
    }
    sys::close_all_on_exec()
}

fn set_limits(process: &Process) -> io::Result<()> {
    for limit in process.rlimits().iter().flatten() {
        sys::set_rlimit(rlimit_number(limit.typ()), limit.soft(), limit.hard())?;
    }
    Ok(())
}

fn rlimit_number(kind: PosixRlimitType) -> u32 {
    match kind {
        PosixRlimitType::RlimitCpu => libc::RLIMIT_CPU,
        PosixRlimitType::RlimitFsize => libc::RLIMIT_FSIZE,
        PosixRlimitType::RlimitData => libc::RLIMIT_DATA,
        PosixRlimitType::RlimitStack => libc::RLIMIT_STACK,
        PosixRlimitType::RlimitCore => libc::RLIMIT_CORE,
        PosixRlimitType::RlimitRss => libc::RLIMIT_RSS,
        PosixRlimitType::RlimitNproc => libc::RLIMIT_NPROC,
        PosixRlimitType::RlimitNofile => libc::RLIMIT_NOFILE,
        PosixRlimitType::RlimitMemlock => libc::RLIMIT_MEMLOCK,
        PosixRlimitType::RlimitAs => libc::RLIMIT_AS,
        PosixRlimitType::RlimitLocks => libc::RLIMIT_LOCKS,
        PosixRlimitType::RlimitSigpending => libc::RLIMIT_SIGPENDING,
        PosixRlimitType::RlimitMsgqueue => libc::RLIMIT_MSGQUEUE,
        PosixRlimitType::RlimitNice => libc::RLIMIT_NICE,
        PosixRlimitType::RlimitRtprio => libc::RLIMIT_RTPRIO,
        PosixRlimitType::RlimitRttime => libc::RLIMIT_RTTIME,
    }
}
