//! Starts a further process in a container: AppArmor profile, namespaces, terminal, limits, user, capabilities, seccomp filter, cgroup,
//! exec.
//!
//! The child of the zygote stays in the agent's namespaces and waits with a deadline. The *step* enters the container with the agent's
//! rights, still in the agent's PID namespace, where no process of the container can see it unless the container uses the node's. It
//! resolves paths in the container, gives up all rights and forks the *program's process*. That is the only one in the container's PID
//! namespace, and from its first instant it has the container's root, user and capabilities and nothing of the agent's (but see
//! [`Loader::Program`]). The container can stop or kill it; then the exec fails.
//!
//! The step enters the container's cgroup last: with a CPU limit of a few millicores its work would take seconds there, most of all the
//! seccomp filter. The cgroup's device rules do not hold for it until then, so it opens no path of the container but with O_PATH, and
//! `ptmx` of a devpts.
//!
//! A process in the guest takes the same path, but its step enters no container: it makes a root directory (`guest_root`), and it keeps the
//! rights of the agent.

use libcontainer::oci_spec::runtime::{Capability, LinuxCapabilities, PosixRlimitType, Process};
use libcontainer::syscall::syscall::create_syscall;
use libcontainer::{capabilities, seccomp};
use nacelle_base::retry::{Timed, retry_interrupted, retry_transient};
use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use nix::poll::PollFlags;
use nix::sched::CloneFlags;
use nix::sys::prctl;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, socketpair};
use nix::unistd::{Gid, Pid, Uid};
use std::convert::Infallible;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use super::exec_message::{ExecMessage, ExecStage, FailedTask};
use super::executor::{exec_error_kind, find_program, to_c_strings};
use super::guest_root::enter_guest_root;
use super::message::{ExecCommand, ExecTarget, Refusal, RefusalKind};
use super::process::CreatedProcess;
use super::wire::{receive_with_descriptors, send_with_descriptors};
use crate::rootfs::RootDir;
use crate::sys;
use crate::userns::become_root;

/// The time in which the program must run: less than the agent waits for the zygote's answer.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// The message after which the program's process continues.
const CONTINUE: [u8; 1] = *b"!";

/// The process that loads the container's seccomp filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Loader {
    /// The step, outside of the container's CPU limit. The program's process never has CAP_SYS_ADMIN, which loading takes without
    /// no_new_privs.
    Step,
    /// The program's process: the filter forbids the step to write or to fork, or its child to wait or to make a session. Without
    /// no_new_privs it keeps CAP_SYS_ADMIN until the filter is loaded, and never where a container could trace it meanwhile.
    Program,
}

/// Reasons an attempt made no process.
enum AttemptError {
    /// The container's filter may have forbidden the step to fork, or its child to wait for `CONTINUE` or to make a session.
    Filtered(Refusal),
    /// The step was killed, by the filter or by something that a further attempt does not change.
    Killed(Refusal),
    Other(Refusal),
}

/// The descriptors of a request.
struct ExecDescriptors {
    /// A pidfd of the container's first process; `None` for a process in the guest.
    container: Option<OwnedFd>,
    /// Stdin, stdout and stderr; empty with a terminal.
    stdio: Vec<OwnedFd>,
}

/// Starts the process. `fds` are, for a container, a pidfd of its first process, then stdin, stdout and stderr, unless it has a
/// terminal.
pub(super) fn start_exec(request: &ExecCommand, fds: Vec<OwnedFd>) -> Result<CreatedProcess, Refusal> {
    let mut fds = fds.into_iter();
    let container = if matches!(request.target, ExecTarget::Container { .. }) { fds.next() } else { None };
    let fds = ExecDescriptors { container, stdio: fds.collect() };
    let made = match attempt_exec(request, &fds, Loader::Step) {
        Err(AttemptError::Filtered(refusal)) if loads_with_capability(request) && request.may_be_traced => {
            let hint = "the container's seccomp profile lets no process be made once it is loaded, and a container with CAP_SYS_PTRACE \
                        could take the right to load it later; allow fork, read and setsid in the profile, or set no_new_privs";
            let message = format!("{}; {hint}", refusal.message);
            Err(AttemptError::Other(Refusal { message, kind: RefusalKind::Unusable }))
        }
        Err(AttemptError::Filtered(first)) if request.seccomp.is_some() => {
            tracing::debug!(error = first.message, "a command is started again, with its filter loaded last");
            attempt_exec(request, &fds, Loader::Program)
        }
        made => made,
    };
    made.map_err(|(AttemptError::Filtered(refusal) | AttemptError::Killed(refusal) | AttemptError::Other(refusal))| {
        refusal
    })
}

fn attempt_exec(request: &ExecCommand, fds: &ExecDescriptors, loader: Loader) -> Result<CreatedProcess, AttemptError> {
    let refused = |what, error: &dyn std::error::Error| AttemptError::Other(Refusal::internal(what, error));
    let pair = || socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC);
    let (from_step, of_step) = pair().map_err(|error| refused("create a socket", &error))?;
    let (from_program, of_program) = pair().map_err(|error| refused("create a socket", &error))?;
    let step = match sys::fork().map_err(|error| AttemptError::Other(Refusal::fork_failed("fork", &error)))? {
        Some(pid) => pid,
        None => {
            let Err((task, error)) = run_step(request, fds, (&of_step, of_program), loader);
            send_message(&of_step, ExecMessage::Failed(task, error));
            std::process::exit(1);
        }
    };
    drop((of_step, of_program));
    let deadline = Instant::now() + START_TIMEOUT;
    let mut child = None;
    let made = await_program(request, &from_step, &from_program, deadline, &mut child);
    let failure = match made {
        Ok(made) => {
            // Reaps the step, which has nothing more to do: the agent would take the exit of an orphan for that of a later process with its
            // PID.
            let _ = retry_interrupted(|| nix::sys::wait::waitpid(Pid::from_raw(step), None));
            return Ok(made);
        }
        Err(failure) => failure,
    };
    // Ends the processes of the attempt. The step is this process's child, so its PID is not another's. The program's process ends
    // when its socket is closed, unless the program runs already.
    let _ = nix::sys::signal::kill(Pid::from_raw(step), nix::sys::signal::Signal::SIGKILL);
    if let Some(child) = child {
        let _ = sys::pidfd_signal(child, libc::SIGKILL);
    }
    let status = retry_interrupted(|| nix::sys::wait::waitpid(Pid::from_raw(step), None));
    // A step that exits could not send why: the filter forbids it to write.
    let by_filter = matches!(
        status,
        Ok(nix::sys::wait::WaitStatus::Signaled(_, nix::sys::signal::Signal::SIGSYS, _)
            | nix::sys::wait::WaitStatus::Exited(..))
    );
    Err(match failure {
        AttemptError::Killed(refusal) if by_filter => AttemptError::Filtered(refusal),
        AttemptError::Killed(refusal) => AttemptError::Other(refusal),
        failure => failure,
    })
}

/// Waits for the end of the step, then until the program runs, which closes the socket of the program's process.
fn await_program(
    request: &ExecCommand,
    from_step: &OwnedFd,
    from_program: &OwnedFd,
    deadline: Instant,
    child: &mut Option<OwnedFd>,
) -> Result<CreatedProcess, AttemptError> {
    let (mut pid, mut terminal) = (None, None);
    let connection_lost = |error: io::Error| {
        let name = request.process.args().iter().flatten().next().cloned().unwrap_or_default();
        let message = match error.kind() {
            io::ErrorKind::TimedOut => format!(
                "cannot run the program {name:?}: its process did not start the program within {} s; a process of the container \
                 may have stopped it",
                START_TIMEOUT.as_secs()
            ),
            _ => format!("cannot determine whether the program {name:?} runs: {error}"),
        };
        AttemptError::Other(Refusal { message, kind: RefusalKind::Internal })
    };
    while let Some((message, fds)) = next_message(from_step, deadline).map_err(connection_lost)? {
        match message {
            ExecMessage::Terminal => terminal = fds.into_iter().next(),
            ExecMessage::Process(number) => {
                *child = sys::pidfd_open(number).ok();
                pid = Some(number);
            }
            // EAGAIN and ENOMEM do not come from a filter: a limit on processes or memory is reached.
            ExecMessage::Failed(ExecStage::Fork, error) if !matches!(error, Errno::EAGAIN | Errno::ENOMEM) => {
                return Err(AttemptError::Filtered(refusal_for(request, ExecStage::Fork, error)));
            }
            ExecMessage::Failed(task, error) => return Err(AttemptError::Other(refusal_for(request, task, error))),
            ExecMessage::Session => return Err(connection_lost(io::ErrorKind::InvalidData.into())),
        }
    }
    // The step has ended without a message: the filter killed it, or the container ended.
    let killed = || {
        AttemptError::Killed(Refusal::internal("run a process in the container: it was killed before", &Errno::ESRCH))
    };
    let pid = pid.ok_or_else(killed)?;
    if child.is_none() {
        return Err(AttemptError::Filtered(Refusal::internal(
            "open the process in the container: it has ended",
            &Errno::ESRCH,
        )));
    }
    // The program's process can be killed now, so it may continue. If it has ended already, its message has the reason.
    let _ = send_with_descriptors(from_program, &CONTINUE, &[], MsgFlags::empty());
    let first = match next_message(from_program, deadline) {
        // The process has ended before it read `CONTINUE`.
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => None,
        first => first.map_err(connection_lost)?,
    };
    match first {
        Some((ExecMessage::Session, _)) => {}
        Some((ExecMessage::Failed(ExecStage::Session, error), _)) => {
            return Err(AttemptError::Filtered(refusal_for(request, ExecStage::Session, error)));
        }
        Some((ExecMessage::Failed(task, error), _)) => {
            return Err(AttemptError::Other(refusal_for(request, task, error)));
        }
        Some(_) => return Err(connection_lost(io::ErrorKind::InvalidData.into())),
        None => {
            let killed = Refusal::internal(
                "create a session for a process in the container: it was killed before",
                &Errno::ESRCH,
            );
            return Err(AttemptError::Filtered(killed));
        }
    }
    match next_message(from_program, deadline).map_err(connection_lost)? {
        None => Ok(CreatedProcess { pid, pidfd: child.take(), terminal }),
        Some((ExecMessage::Failed(task, error), _)) => Err(AttemptError::Other(refusal_for(request, task, error))),
        Some(_) => Err(connection_lost(io::ErrorKind::InvalidData.into())),
    }
}

/// Receives the next message; `None` if all processes that could send one have ended.
fn next_message(from: &OwnedFd, deadline: Instant) -> io::Result<Option<(ExecMessage, Vec<OwnedFd>)>> {
    let socket = Timed::new(from, deadline.saturating_duration_since(Instant::now()));
    let (bytes, fds) =
        socket.when_ready(PollFlags::POLLIN, || receive_with_descriptors(from, MsgFlags::MSG_DONTWAIT))?;
    if bytes.is_empty() {
        return Ok(None);
    }
    let message = ExecMessage::parse(&bytes).ok_or(io::ErrorKind::InvalidData)?;
    Ok(Some((message, fds)))
}

fn send_message(to: &OwnedFd, message: ExecMessage) {
    // write(2), which filters allow. If the message is lost, the end of the socket replaces it.
    let _ = retry_interrupted(|| nix::unistd::write(to, &message.bytes()));
}

fn refusal_for(request: &ExecCommand, task: ExecStage, error: Errno) -> Refusal {
    let process = &request.process;
    let name = match task {
        ExecStage::Directory => process.cwd().display().to_string(),
        ExecStage::Profile => process.apparmor_profile().clone().unwrap_or_default(),
        _ => process.args().iter().flatten().next().cloned().unwrap_or_default(),
    };
    let kind = match task {
        ExecStage::Fork if error == Errno::EAGAIN => RefusalKind::Exhausted,
        ExecStage::Profile
        | ExecStage::Cgroup
        | ExecStage::Namespaces
        | ExecStage::GuestRoot
        | ExecStage::Terminal
        | ExecStage::Stdio
        | ExecStage::Fork
        | ExecStage::Session => RefusalKind::Internal,
        _ => exec_error_kind(error),
    };
    let hint = match (task, error) {
        (ExecStage::Directory, Errno::EXDEV) => "it leads out of the container's root",
        (ExecStage::Directory, Errno::ELOOP) => "a loop of links, or a link of /proc to the files of a process",
        (ExecStage::Profile, Errno::ENOENT) => "it is no longer loaded on the node",
        (ExecStage::Fork, Errno::EAGAIN) => {
            "a limit on processes is reached: pids.max of the container, the pod or the node, or RLIMIT_NPROC"
        }
        _ => error.desc(),
    };
    Refusal { message: format!("cannot {} {name:?}: {hint}", task.description()), kind }
}

fn to_errno(error: io::Error) -> Errno {
    Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO))
}

/// Runs the step, which exits when the program's process exists; returns only if a task failed.
fn run_step(
    request: &ExecCommand,
    fds: &ExecDescriptors,
    (of_step, of_program): (&OwnedFd, OwnedFd),
    loader: Loader,
) -> Result<Infallible, FailedTask> {
    let process = &request.process;
    let score = process.oom_score_adj().unwrap_or(0);
    fs::write("/proc/self/oom_score_adj", score.to_string()).map_err(|error| (ExecStage::Limits, to_errno(error)))?;
    if let Some(profile) = process.apparmor_profile() {
        // Takes effect when the program runs; a forked process has it, too. /proc is the agent's until the namespaces are entered.
        fs::write("/proc/self/attr/apparmor/exec", format!("exec {profile}"))
            .map_err(|error| (ExecStage::Profile, to_errno(error)))?;
    }
    let cgroup = TargetCgroup::open(request).map_err(|error| (ExecStage::Cgroup, to_errno(error)))?;
    match &request.target {
        ExecTarget::Container { user_namespace, cgroup_namespace } => {
            let pidfd = fds.container.as_ref().ok_or((ExecStage::Namespaces, Errno::EBADF))?;
            let mut namespaces = CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWPID;
            namespaces.set(CloneFlags::CLONE_NEWCGROUP, *cgroup_namespace);
            namespaces.set(CloneFlags::CLONE_NEWUSER, *user_namespace);
            nix::sched::setns(pidfd, namespaces).map_err(|error| (ExecStage::Namespaces, error))?;
            if *user_namespace {
                become_root().map_err(|error| (ExecStage::Namespaces, to_errno(error)))?;
            }
        }
        ExecTarget::Guest { image } => {
            enter_guest_root(image).map_err(|error| (ExecStage::GuestRoot, to_errno(error)))?;
        }
    }
    let tty = process.terminal().unwrap_or(false);
    if tty {
        let (master, slave) = open_terminal(request).map_err(|error| (ExecStage::Terminal, to_errno(error)))?;
        send_with_descriptors(of_step, &ExecMessage::Terminal.bytes(), &[master.as_raw_fd()], MsgFlags::empty())
            .map_err(|error| (ExecStage::Terminal, error))?;
        connect_stdio(&[slave]).map_err(|error| (ExecStage::Stdio, to_errno(error)))?;
    } else {
        connect_stdio(&fds.stdio).map_err(|error| (ExecStage::Stdio, to_errno(error)))?;
    }
    // The program's process must not have other descriptors, such as the agent's connection or its log. The caller owns some of them,
    // but exits without dropping them.
    let mut kept = vec![of_step.as_raw_fd(), of_program.as_raw_fd()];
    kept.extend(cgroup.files().map(AsRawFd::as_raw_fd));
    sys::close_all_but(&kept).map_err(|error| (ExecStage::Stdio, to_errno(error)))?;
    drop_to_container_rights(request, loader)?;
    // By write(2), which filters allow. The files are closed before the program's process exists.
    cgroup.enter().map_err(|error| (ExecStage::Cgroup, error))?;
    match sys::fork().map_err(|error| (ExecStage::Fork, to_errno(error)))? {
        Some(pid) => {
            send_message(of_step, ExecMessage::Process(pid));
            std::process::exit(0)
        }
        None => {
            // Only the step reports the PID.
            let _ = nix::unistd::close(of_step.as_raw_fd());
            let mut word = [0; CONTINUE.len()];
            if retry_interrupted(|| nix::unistd::read(&of_program, &mut word)) != Ok(CONTINUE.len()) {
                std::process::exit(126);
            }
            let (task, error) = become_program(request, tty, loader, &of_program);
            send_message(&of_program, ExecMessage::Failed(task, error));
            std::process::exit(if exec_error_kind(error) == RefusalKind::NoSuchProgram { 127 } else { 126 });
        }
    }
}

/// The cgroup that the step enters when it has given up its rights. The kernel checks those with which the files were opened
/// (`__cgroup_procs_write` in kernel/cgroup/cgroup.c, since Linux 5.16).
struct TargetCgroup {
    /// `cgroup.procs` of the container's cgroup.
    container: OwnedFd,
    /// That of the cgroup of the container's first process, if it made one: the container's then takes no processes.
    init: Option<OwnedFd>,
}

impl TargetCgroup {
    fn open(request: &ExecCommand) -> io::Result<TargetCgroup> {
        let open = |cgroup: &String| fs::File::options().write(true).open(format!("{cgroup}/cgroup.procs"));
        // The first process may have left its cgroup, and removed it.
        let init = request.init_cgroup.as_ref().and_then(|cgroup| open(cgroup).ok());
        Ok(TargetCgroup { container: open(&request.cgroup)?.into(), init: init.map(OwnedFd::from) })
    }

    fn files(&self) -> impl Iterator<Item = &OwnedFd> {
        [&self.container].into_iter().chain(&self.init)
    }

    fn enter(self) -> Result<(), Errno> {
        // A filter may let a call seem to succeed that is not made: it returns 0.
        let join = |file: &OwnedFd| match retry_interrupted(|| nix::unistd::write(file, b"0"))? {
            1 => Ok(()),
            _ => Err(Errno::EIO),
        };
        match (join(&self.container), &self.init) {
            (Err(Errno::EBUSY), Some(init)) => join(init),
            (joined, _) => joined,
        }
    }
}

/// Opens a new terminal of the container's devpts, and returns its master and its slave.
fn open_terminal(request: &ExecCommand) -> io::Result<(OwnedFd, OwnedFd)> {
    let directory = OFlag::O_PATH | OFlag::O_DIRECTORY;
    let terminals = RootDir::open(Path::new("/"))?.open_beneath(Path::new("/dev/pts"), directory)?;
    let devpts = nix::sys::statfs::FsType(0x1cd1);
    if nix::sys::statfs::fstatfs(&terminals)?.filesystem_type() != devpts {
        return Err(io::Error::from(Errno::ENOTTY));
    }
    // No process can make a file of a devpts, and nothing that is mounted over this one is opened.
    let how = OpenHow::new()
        .flags(OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_XDEV | ResolveFlag::RESOLVE_NO_SYMLINKS);
    let master = retry_transient(|| openat2(&terminals, "ptmx", how))?;
    let slave = sys::open_pty_peer(&master)?;
    nix::unistd::fchown(&slave, Some(Uid::from_raw(request.process.user().uid())), None)?;
    let (columns, rows) = request.size;
    if columns != 0 && rows != 0 {
        sys::set_window_size(&master, columns, rows)?;
    }
    Ok((master, slave))
}

/// Changes to a directory beneath the root. Links of /proc to directories of processes are refused.
fn enter_directory(path: &Path) -> nix::Result<()> {
    let directory = RootDir::open(Path::new("/"))?.open_beneath(path, OFlag::O_PATH | OFlag::O_DIRECTORY)?;
    nix::unistd::fchdir(&directory)
}

/// Does everything that takes rights, and gives them up until the container's own remain. No path of the container is resolved
/// afterwards.
fn drop_to_container_rights(request: &ExecCommand, loader: Loader) -> Result<(), FailedTask> {
    let process = &request.process;
    let at = |task| move |error: Errno| (task, error);
    let refused = |_: libcontainer::syscall::SyscallError| (ExecStage::Capabilities, Errno::last());
    let syscall = create_syscall();
    set_limits(process).map_err(|error| (ExecStage::Limits, to_errno(error)))?;
    // Tried as the agent first, and again as the user: either may lack the permission.
    let mut entered = enter_directory(process.cwd());
    if let Some(umask) = process.user().umask() {
        nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(umask));
    }
    if process.no_new_privileges().unwrap_or(false) {
        prctl::set_no_new_privs().map_err(at(ExecStage::NoNewPrivileges))?;
    }
    let groups: Vec<Gid> = process.user().additional_gids().iter().flatten().map(|gid| Gid::from_raw(*gid)).collect();
    nix::unistd::setgroups(&groups).map_err(at(ExecStage::User))?;
    let (uid, gid) = (Uid::from_raw(process.user().uid()), Gid::from_raw(process.user().gid()));
    prctl::set_keepcaps(true).map_err(at(ExecStage::User))?;
    nix::unistd::setresgid(gid, gid, gid).map_err(at(ExecStage::User))?;
    nix::unistd::setresuid(uid, uid, uid).map_err(at(ExecStage::User))?;
    prctl::set_keepcaps(false).map_err(at(ExecStage::User))?;
    // A change of the user sets the dumpable flag to the node's `fs.suid_dumpable`, which may be any.
    prctl::set_dumpable(false).map_err(at(ExecStage::User))?;
    if entered.is_err() {
        // A user other than root has no effective capabilities now.
        entered = enter_directory(process.cwd());
    }
    entered.map_err(at(ExecStage::Directory))?;
    match sys::is_beneath_root() {
        Ok(true) => {}
        Ok(false) => return Err((ExecStage::Directory, Errno::EXDEV)),
        Err(error) => return Err((ExecStage::Directory, to_errno(error))),
    }
    capabilities::reset_effective(syscall.as_ref()).map_err(refused)?;
    if loader == Loader::Step && loads_with_capability(request) {
        load_filter(request)?;
    }
    if let Some(wanted) = process.capabilities() {
        let to_load = loader == Loader::Program && loads_with_capability(request);
        let kept = if to_load { with_sys_admin(wanted) } else { wanted.clone() };
        capabilities::drop_privileges(&kept, syscall.as_ref()).map_err(refused)?;
    }
    // Last where it takes no capability: a filter may let calls seem to succeed that are not made, such as those above.
    if loader == Loader::Step && !loads_with_capability(request) {
        load_filter(request)?;
    }
    Ok(())
}

/// Whether loading the filter takes CAP_SYS_ADMIN: only a process with no_new_privs may load one without.
fn loads_with_capability(request: &ExecCommand) -> bool {
    request.seccomp.is_some() && !request.process.no_new_privileges().unwrap_or(false)
}

/// Returns the capabilities with CAP_SYS_ADMIN, which loading a filter without no_new_privs takes.
fn with_sys_admin(wanted: &LinuxCapabilities) -> LinuxCapabilities {
    let mut kept = wanted.clone();
    let and_admin = |set: &Option<std::collections::HashSet<Capability>>| {
        Some(set.iter().flatten().copied().chain([Capability::SysAdmin]).collect())
    };
    kept.set_effective(and_admin(wanted.effective())).set_permitted(and_admin(wanted.permitted()));
    kept
}

fn load_filter(request: &ExecCommand) -> Result<(), FailedTask> {
    let Some(filter) = &request.seccomp else { return Ok(()) };
    seccomp::initialize_seccomp(filter).map(drop).map_err(|_no_number| (ExecStage::Filter, Errno::EINVAL))
}

/// Executes the program in this process, which has the container's rights; returns only if a task failed.
fn become_program(request: &ExecCommand, tty: bool, loader: Loader, of_program: &OwnedFd) -> FailedTask {
    let process = &request.process;
    let prepared = || {
        nix::unistd::setsid().map_err(|error| (ExecStage::Session, error))?;
        if tty {
            sys::take_terminal().map_err(|error| (ExecStage::Session, to_errno(error)))?;
        }
        send_message(of_program, ExecMessage::Session);
        if loader == Loader::Program {
            load_filter(request)?;
            if let Some(wanted) = process.capabilities().as_ref().filter(|_| loads_with_capability(request)) {
                let refused = |_: libcontainer::syscall::SyscallError| (ExecStage::Capabilities, Errno::last());
                capabilities::drop_privileges(wanted, create_syscall().as_ref()).map_err(refused)?;
            }
        }
        let env = process.env().as_deref().unwrap_or_default();
        let args = process.args().as_deref().unwrap_or_default();
        let name = args.first().map(String::as_str).unwrap_or_default();
        let found = find_program(name, env).and_then(|path| Ok((path, to_c_strings(args)?, to_c_strings(env)?)));
        found.map_err(|error| (ExecStage::Find, error))
    };
    match prepared() {
        Err(failed) => failed,
        Ok((path, args, env)) => (ExecStage::Run, sys::execve(&path, &args, &env)),
    }
}

fn connect_stdio(stdio: &[OwnedFd]) -> io::Result<()> {
    for target in 0..3_usize {
        let source = stdio.get(target).or(stdio.last());
        let source = source.map(AsFd::as_fd).ok_or(Errno::EBADF)?;
        match target {
            0 => nix::unistd::dup2_stdin(source)?,
            1 => nix::unistd::dup2_stdout(source)?,
            _ => nix::unistd::dup2_stderr(source)?,
        }
    }
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> ExecCommand {
        let process = serde_json::json!({ "args": ["/bin/x"], "cwd": "/w", "user": { "uid": 0, "gid": 0 } });
        ExecCommand {
            process: serde_json::from_value(process).unwrap(),
            seccomp: None,
            may_be_traced: false,
            target: ExecTarget::Container { user_namespace: false, cgroup_namespace: false },
            cgroup: String::new(),
            init_cgroup: None,
            size: (0, 0),
        }
    }

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap()
    }

    #[test]
    fn messages_are_read_as_they_were_written() {
        let failures = ExecStage::ALL.map(|task| ExecMessage::Failed(task, Errno::ENAMETOOLONG));
        let others =
            [ExecMessage::Terminal, ExecMessage::Process(1), ExecMessage::Process(0x003f_ffff), ExecMessage::Session];
        for message in others.iter().chain(&failures) {
            assert_eq!(ExecMessage::parse(&message.bytes()), Some(*message));
        }
        for other in [&[0; 3][..], &[0; 5], &[250, 0, 0, 0], &[]] {
            assert_eq!(ExecMessage::parse(other), None, "{other:?}");
        }
    }

    /// Runs `await_program` on these messages. `program`: the messages of the program's process, which then closes its socket; `None`: it
    /// keeps the socket open.
    fn awaited(step: &[ExecMessage], program: Option<&[ExecMessage]>) -> Result<CreatedProcess, AttemptError> {
        let ((from_step, of_step), (from_program, of_program)) = (pair(), pair());
        step.iter().for_each(|message| send_message(&of_step, *message));
        drop(of_step);
        let stopped = match program {
            None => Some(of_program),
            Some(messages) => {
                messages.iter().for_each(|message| send_message(&of_program, *message));
                drop(of_program);
                None
            }
        };
        let deadline = Instant::now() + Duration::from_millis(50);
        let made = await_program(&request(), &from_step, &from_program, deadline, &mut None);
        drop(stopped);
        made
    }

    fn message(made: Result<CreatedProcess, AttemptError>) -> String {
        match made {
            Err(AttemptError::Other(refusal)) => refusal.message,
            Err(AttemptError::Filtered(refusal)) => format!("filtered: {}", refusal.message),
            Err(AttemptError::Killed(refusal)) => format!("killed: {}", refusal.message),
            Ok(made) => made.pid.to_string(),
        }
    }

    #[test]
    fn each_outcome_of_an_exec_is_reported() {
        let own = i32::try_from(std::process::id()).unwrap();
        let process = ExecMessage::Process(own);
        assert_eq!(message(awaited(&[process], Some(&[ExecMessage::Session]))), own.to_string());
        // A process without a pidfd is not started.
        let gone = ExecMessage::Process(0x003f_ffff);
        assert!(message(awaited(&[gone], Some(&[]))).contains("it has ended"));
        let missing = ExecMessage::Failed(ExecStage::Find, Errno::ENOENT);
        let said = message(awaited(&[process], Some(&[ExecMessage::Session, missing])));
        assert_eq!(said, "cannot find the program \"/bin/x\": No such file or directory");
        let outside = ExecMessage::Failed(ExecStage::Directory, Errno::ELOOP);
        assert!(message(awaited(&[outside], Some(&[]))).contains("the working directory \"/w\": "));
        // A process that was stopped holds its socket open.
        assert!(message(awaited(&[process], None)).contains("may have stopped it"));
        assert!(message(awaited(&[], Some(&[]))).starts_with("killed: "));
        let full = message(awaited(&[ExecMessage::Failed(ExecStage::Fork, Errno::EAGAIN)], Some(&[])));
        assert!(full.starts_with("cannot fork") && full.contains("limit on processes"), "{full}");
        let said = message(awaited(&[ExecMessage::Failed(ExecStage::Fork, Errno::EPERM)], Some(&[])));
        assert_eq!(said, "filtered: cannot fork the process of \"/bin/x\": Operation not permitted");
        // Only the step may report a PID.
        for wrong in [&[ExecMessage::Process(1)][..], &[ExecMessage::Session, ExecMessage::Session]] {
            assert!(message(awaited(&[process], Some(wrong))).contains("cannot determine"));
        }
        assert!(message(awaited(&[ExecMessage::Session], Some(&[]))).contains("cannot determine"));
        // A filter that forbids setsid(2) returns an error or kills the process.
        let said = message(awaited(&[process], Some(&[ExecMessage::Failed(ExecStage::Session, Errno::EPERM)])));
        assert_eq!(said, "filtered: cannot create a session for \"/bin/x\": Operation not permitted");
        assert!(message(awaited(&[process], Some(&[]))).starts_with("filtered: "));
    }
}
