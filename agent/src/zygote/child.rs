//! Owns: the zygote's side: the loop that forks a child per request, and what a child does with its request.
//! Threads: one per process, always.

use nacelle_base::Chain;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::CloneFlags;
use nix::unistd::{Gid, Uid, chdir};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use super::{Answer, Made, Refusal, Request, Why, answer, create, exec, receive_with};
use crate::{frame, paths, sys};

/// Serves until the agent is gone.
pub(super) fn run(control: OwnedFd) -> ! {
    // The programs of containers inherit these dispositions and limits.
    let set = sys::set_signal(libc::SIGPIPE, false)
        .and_then(|()| sys::set_signal(libc::SIGCHLD, true))
        .and_then(|()| sys::limit_files(1024, 1 << 19));
    if let Err(error) = set {
        tracing::error!(%error, "the zygote cannot set up its signals");
    }
    while let Ok((_, fds)) = receive_with(&control) {
        match sys::fork() {
            Ok(None) => {
                // What enters a container must not have it.
                drop(control);
                let code = if serve(fds).is_ok() { 0 } else { 1 };
                std::process::exit(code);
            }
            Ok(Some(_)) => {}
            Err(error) => tracing::error!(%error, "the zygote cannot fork"),
        }
    }
    std::process::exit(0);
}

fn serve(fds: Vec<OwnedFd>) -> Result<(), super::ZygoteError> {
    let talk = |source| super::ZygoteError::Talk { source };
    // libcontainer and exec wait for their own children.
    sys::set_signal(libc::SIGCHLD, false).map_err(talk)?;
    let mut fds = fds.into_iter();
    let Some(peer) = fds.next() else { return Ok(()) };
    let mut peer = UnixStream::from(peer);
    let request = serde_json::from_slice(&frame::read_bytes(&mut peer)?)?;
    let made = match request {
        Request::Create(request) => create::create(&request, fds.collect()),
        Request::Exec(request) => exec::exec(&request, fds.collect()),
        Request::Pause { user_namespace } => pause(user_namespace),
    };
    match made {
        Ok(Made { pid, terminal }) => answer(&mut peer, &Answer::Made(pid), terminal.as_ref()),
        Err(refusal) => answer(&mut peer, &Answer::Refused(refusal), None),
    }
}

/// A refusal for a step that should not fail.
pub(super) fn defect(what: &str, error: &dyn std::error::Error) -> Refusal {
    Refusal { message: format!("cannot {what}: {}", Chain(error)), why: Why::Defect }
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
    match sys::fork().map_err(|error| defect("fork the holder of the pod's PID namespace", &error))? {
        Some(pid) => Ok(Made { pid, terminal: None }),
        None => {
            let quiet =
                sys::set_signal(libc::SIGCHLD, true).and_then(|()| sys::close_all(0)).and_then(|()| become_nobody());
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
    Ok(nix::sys::prctl::set_no_new_privs()?)
}
