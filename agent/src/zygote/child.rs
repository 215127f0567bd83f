//! Owns: the zygote's side: the loop that forks a child per request, and what a child does with its request.
//! Threads: one per process, always.

use nacelle_base::Chain;
use nacelle_base::retry::Timed;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::CloneFlags;
use nix::sys::socket::MsgFlags;
use nix::unistd::{Gid, Uid, chdir};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::{Answer, Made, Refusal, Request, Why, answer, create, exec, hand_over, receive_with};
use crate::{frame, paths, sys};

/// How long the zygote itself, which does nothing else meanwhile, waits for a request that it has to refuse.
const UNANSWERED: Duration = Duration::from_secs(1);

/// Serves until the agent is gone.
pub(super) fn run(control: OwnedFd) -> ! {
    // The programs of containers inherit these dispositions and limits.
    let set = sys::set_signal(libc::SIGPIPE, false)
        .and_then(|()| sys::set_signal(libc::SIGCHLD, true))
        .and_then(|()| sys::limit_files(1024, 1 << 19));
    if let Err(error) = set {
        tracing::error!(%error, "the zygote cannot set up its signals");
    }
    // Forks inherit it: until it runs a program, no process of a container may look into one of ours.
    if let Err(error) = nix::sys::prctl::set_dumpable(false) {
        tracing::error!(%error, "the zygote cannot hide from containers");
        std::process::exit(1);
    }
    loop {
        // Nothing is received when the agent has ended.
        let fds = match receive_with(&control, MsgFlags::empty()) {
            Ok((bytes, fds)) if !bytes.is_empty() => fds,
            _ => std::process::exit(0),
        };
        match sys::fork() {
            Ok(None) => {
                // What enters a container must not have it.
                drop(control);
                let code = if serve(fds).is_ok() { 0 } else { 1 };
                std::process::exit(code);
            }
            Ok(Some(_)) => {}
            Err(error) => refuse(fds, &error),
        }
    }
}

/// Answers a request for which there is no child.
pub(super) fn refuse(fds: Vec<OwnedFd>, error: &io::Error) {
    let refusal = cannot_fork("fork a child of the zygote", error);
    tracing::error!("{refusal}");
    let Some(peer) = fds.into_iter().next() else { return };
    let mut peer = UnixStream::from(peer);
    // With its request unread, the agent would learn only that its writing has failed. It has begun to write.
    if let Err(error) = frame::read_bytes(&mut Timed::new(&peer, UNANSWERED), frame::MAX_ZYGOTE) {
        tracing::warn!(error = %Chain(&error), "a request that is refused cannot be read");
    }
    if let Err(error) = answer(&mut peer, &Answer::Refused(refusal), &[]) {
        tracing::warn!(error = %Chain(&error), "the refusal does not reach the agent");
    }
}

fn serve(fds: Vec<OwnedFd>) -> Result<(), super::ZygoteError> {
    let talk = |source| super::ZygoteError::Talk { source };
    // libcontainer and exec wait for their own children.
    sys::set_signal(libc::SIGCHLD, false).map_err(talk)?;
    let mut fds = fds.into_iter();
    let Some(peer) = fds.next() else { return Ok(()) };
    let mut peer = UnixStream::from(peer);
    let request = serde_json::from_slice(&frame::read_bytes(&mut peer, frame::MAX_ZYGOTE)?)?;
    let made = match request {
        Request::Create(request) => create::create(&request, fds.collect()),
        Request::Exec(request) => exec::exec(&request, fds.collect()),
        Request::Pause { user_namespace } => pause(user_namespace),
    };
    match made {
        Ok(made) => hand_over(&mut peer, &made),
        Err(refusal) => answer(&mut peer, &Answer::Refused(refusal), &[]),
    }
}

/// A refusal for a step that should not fail.
pub(super) fn defect(what: &str, error: &dyn std::error::Error) -> Refusal {
    Refusal { message: format!("cannot {what}: {}", Chain(error)), why: Why::Defect }
}

/// A refusal for a fork that failed. EAGAIN: a limit on processes is reached, which no repetition lifts.
pub(super) fn cannot_fork(what: &str, error: &io::Error) -> Refusal {
    let mut refusal = defect(what, error);
    if error.raw_os_error() == Some(libc::EAGAIN) {
        refusal.why = Why::Exhausted;
        refusal.message +=
            "; there may be no more processes: pids.max of the container, the pod or the node, or RLIMIT_NPROC";
    }
    refusal
}

/// Holds a PID namespace: its first process, which has nothing to do but let the kernel reap what is orphaned to it.
/// The pod's containers see it as process 1, so it has nothing either that one of them could take from it.
fn pause(user_namespace: bool) -> Result<Made, Refusal> {
    if user_namespace {
        let entered = File::open(paths::USER_NAMESPACE).and_then(|users| {
            nix::sched::setns(users, CloneFlags::CLONE_NEWUSER)?;
            become_root()
        });
        entered.map_err(|error| defect("enter the pod's user namespace", &error))?;
    }
    nix::sched::unshare(CloneFlags::CLONE_NEWPID | CloneFlags::CLONE_NEWNS)
        .map_err(|error| defect("make the pod's PID namespace", &error))?;
    empty_root().map_err(|error| defect("give the pod's PID namespace an empty root", &error))?;
    // Before there is a process that containers could see.
    become_nobody().map_err(|error| defect("give up the rights of the holder of the pod's PID namespace", &error))?;
    match sys::fork().map_err(|error| cannot_fork("fork the holder of the pod's PID namespace", &error))? {
        Some(pid) => Ok(Made { pid, pidfd: sys::pidfd_open(pid).ok(), terminal: None }),
        None => {
            let quiet = sys::set_signal(libc::SIGCHLD, true).and_then(|()| sys::close_all(0));
            if quiet.is_err() {
                std::process::exit(1);
            }
            loop {
                nix::unistd::pause();
            }
        }
    }
}

/// Leaves the agent's mounts for a root without anything in it. The caller is in a mount namespace of its own.
fn empty_root() -> nix::Result<()> {
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC | MsFlags::MS_RDONLY;
    mount(Some("tmpfs"), "/tmp", Some("tmpfs"), flags, Some("mode=555,size=4k"))?;
    chdir("/tmp")?;
    nix::unistd::pivot_root(".", ".")?;
    umount2(".", MntFlags::MNT_DETACH)?;
    chdir("/")
}

/// Becomes the root of the user namespace that this process has just entered, where it is nobody.
pub(super) fn become_root() -> io::Result<()> {
    nix::unistd::setgroups(&[])?;
    nix::unistd::setresgid(Gid::from_raw(0), Gid::from_raw(0), Gid::from_raw(0))?;
    nix::unistd::setresuid(Uid::from_raw(0), Uid::from_raw(0), Uid::from_raw(0))?;
    Ok(())
}

/// Gives up the user and, with it, all privileges.
fn become_nobody() -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(65_534), Gid::from_raw(65_534));
    nix::unistd::setgroups(&[])?;
    nix::unistd::setresgid(gid, gid, gid)?;
    nix::unistd::setresuid(uid, uid, uid)?;
    // With another user comes the node's `fs.suid_dumpable`, which may be any.
    nix::sys::prctl::set_dumpable(false)?;
    Ok(nix::sys::prctl::set_no_new_privs()?)
}
