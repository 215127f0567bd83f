//! Starts the agent of a pod that has no guest, with its namespaces and inherited descriptors. Only the process's first
//! thread may call it, while it is the only one, because for a moment the children of this process get another PID
//! namespace.
#![allow(unsafe_code)] // reason: `pre_exec`, and prctl and fcntl in it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};

use nix::sched::{CloneFlags, setns, unshare};

/// Starts the command in the network namespace of a file, and with `own_pids` as the first process of a new PID namespace.
/// It inherits these descriptors, with their numbers, and is killed when the calling thread ends.
pub(super) fn spawn(
    mut command: Command,
    netns: Option<&Path>,
    own_pids: bool,
    inherited: [RawFd; 3],
) -> io::Result<Child> {
    let netns = netns.map(File::open).transpose()?;
    let in_child = move || {
        // SAFETY: prctl with these arguments touches no memory of this process.
        if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) } == -1 {
            return Err(io::Error::last_os_error());
        }
        if let Some(netns) = &netns {
            setns(netns, CloneFlags::CLONE_NEWNET)?;
        }
        for fd in inherited {
            // SAFETY: F_SETFD on a descriptor that the parent holds open for the child; touches no memory.
            if unsafe { libc::fcntl(fd, libc::F_SETFD, 0) } == -1 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: between fork and exec only async-signal-safe calls are made: prctl, setns, fcntl. The closure allocates
    // nothing. If the parent dies before the first of them, the agent notices it: its handshake gets no reply.
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
            // The caller needs the first error; the agent cannot be used.
            let _ = child.kill().and_then(|()| child.wait());
            Err(error.into())
        }
        (child, _) => child,
    }
}
