//! Starts the holder of the pod's PID namespace: the first process of the namespace, which ignores SIGCHLD, so that the kernel
//! reaps what is orphaned to it.
//!
//! The pod's containers see the holder as process 1. It has an empty root, no descriptors and no rights, so that none of them
//! can take anything from it.

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::CloneFlags;
use nix::unistd::{Gid, Uid, chdir};
use std::fs::File;
use std::io;

use super::message::Refusal;
use super::process::CreatedProcess;
use crate::{paths, sys, userns};

/// Starts the holder. `user_namespace`: its PID namespace belongs to the pod's user namespace.
pub(super) fn start_holder(user_namespace: bool) -> Result<CreatedProcess, Refusal> {
    if user_namespace {
        let entered = File::open(paths::USER_NAMESPACE).and_then(|users| {
            nix::sched::setns(users, CloneFlags::CLONE_NEWUSER)?;
            userns::become_root()
        });
        entered.map_err(|error| Refusal::internal("enter the pod's user namespace", &error))?;
    }
    nix::sched::unshare(CloneFlags::CLONE_NEWPID | CloneFlags::CLONE_NEWNS)
        .map_err(|error| Refusal::internal("create the pod's PID namespace", &error))?;
    enter_empty_root().map_err(|error| Refusal::internal("give the pod's PID namespace an empty root", &error))?;
    // Before there is a process that containers could see.
    drop_privileges()
        .map_err(|error| Refusal::internal("drop the rights of the holder of the pod's PID namespace", &error))?;
    match sys::fork().map_err(|error| Refusal::fork_failed("fork the holder of the pod's PID namespace", &error))? {
        Some(pid) => Ok(CreatedProcess { pid, pidfd: sys::pidfd_open(pid).ok(), terminal: None }),
        None => {
            let isolated = sys::set_signal(libc::SIGCHLD, true).and_then(|()| sys::close_all(0));
            if isolated.is_err() {
                std::process::exit(1);
            }
            loop {
                nix::unistd::pause();
            }
        }
    }
}

/// Leaves the agent's mounts for an empty root. The caller is in a mount namespace of its own.
fn enter_empty_root() -> nix::Result<()> {
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC | MsFlags::MS_RDONLY;
    mount(Some("tmpfs"), "/tmp", Some("tmpfs"), flags, Some("mode=555,size=4k"))?;
    chdir("/tmp")?;
    nix::unistd::pivot_root(".", ".")?;
    umount2(".", MntFlags::MNT_DETACH)?;
    chdir("/")
}

/// Becomes the unprivileged user 65534, and with that loses all capabilities.
fn drop_privileges() -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(65_534), Gid::from_raw(65_534));
    nix::unistd::setgroups(&[])?;
    nix::unistd::setresgid(gid, gid, gid)?;
    nix::unistd::setresuid(uid, uid, uid)?;
    // A change of the user sets the dumpable flag to the node's `fs.suid_dumpable`, which may be any.
    nix::sys::prctl::set_dumpable(false)?;
    Ok(nix::sys::prctl::set_no_new_privs()?)
}
