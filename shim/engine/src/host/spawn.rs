//! Owns: starting the agent of a pod that has no guest: its namespaces, what it inherits.
//! Threads: the process's first one, while it is the only one: for a moment its children have another PID namespace.
#![allow(unsafe_code)] // reason: `pre_exec`, and prctl and fcntl in it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};

use nix::sched::{CloneFlags, setns, unshare};

/// Starts the command: in the network namespace of a file, and as the first process of a PID namespace of its own if it
/// shall have one. It inherits these descriptors, with their numbers, and is killed when the calling thread ends.
pub(super) fn spawn(
    mut command: Command,
    netns: Option<&Path>,
    own_pids: bool,
    inherited: [RawFd; 3],
) -> io::Result<Child> {
    let netns = netns.map(File::open).transpose()?;
    let in_child = move || {
        // SAFETY: prctl with these arguments touches no memory of ours.
        if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) } == -1 {
            return Err(io::Error::last_os_error());
        }
        if let Some(netns) = &netns {
            setns(netns, CloneFlags::CLONE_NEWNET)?;
        }
        for fd in inherited {
            // SAFETY: F_SETFD on a descriptor that the parent holds open for us; touches no memory.
            if unsafe { libc::fcntl(fd, libc::F_SETFD, 0) } == -1 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: between fork and exec only async-signal-safe calls are made: prctl, setns, fcntl. The closure allocates
    // nothing. A parent that has died before the first of them is noticed by the agent: nobody answers it.
    unsafe { command.pre_exec(in_child) };
    if !own_pids {
        return command.spawn();
    }
    let own = File::open("/proc/self/ns/pid")?;
    unshare(CloneFlags::CLONE_NEWPID)?;
    let child = command.spawn();
    let back = setns(own.as_fd(), CloneFlags::CLONE_NEWPID);
    match (child, back) {
        (Ok(mut child), Err(error)) => {
            // It is the error that matters; the agent cannot be used.
            let _ = child.kill().and_then(|()| child.wait());
            Err(error.into())
        }
        (child, _) => child,
    }
}
