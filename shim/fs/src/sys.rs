//! Owns: the system calls of this crate that have no safe wrapper: making processes.
#![allow(unsafe_code)] // reason: neither fork nor clone has a safe wrapper in nix or std.

use nacelle_base::retry::retry_interrupted;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, getpid};
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;

/// Makes a second process of this one; none: this is it. There must be one thread only.
pub(crate) fn fork() -> io::Result<Option<Pid>> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other("there is a second thread"));
    }
    // SAFETY: there is no other thread, as was just seen, so nobody holds a lock that the child would wait for: it may do
    // whatever this process may.
    match unsafe { nix::unistd::fork() }? {
        ForkResult::Parent { child } => Ok(Some(child)),
        ForkResult::Child => Ok(None),
    }
}

/// Ends a process that [`fork`] has made.
pub(crate) fn exit(code: i32) -> ! {
    // SAFETY: ends the process; nothing of the parent's, of which this is a copy, is run or flushed.
    unsafe { libc::_exit(code) }
}

/// A user namespace with these maps of users and groups (user_namespaces(7)). It needs the rights on all of the numbers.
pub(crate) fn user_namespace(users: &str, groups: &str) -> io::Result<OwnedFd> {
    // A namespace is somebody's: of a process that lives until this one refers to it.
    let holder = hold_user_namespace()?;
    let made = (|| {
        for (file, map) in [("uid_map", users), ("gid_map", groups)] {
            fs::write(format!("/proc/{holder}/{file}"), map)?;
        }
        Ok(File::open(format!("/proc/{holder}/ns/user"))?.into())
    })();
    kill(holder, Signal::SIGKILL).and_then(|()| retry_interrupted(|| waitpid(holder, None)))?;
    made
}

/// A process in a new user namespace, which waits to be killed. Any thread may ask for it, and ends after it.
fn hold_user_namespace() -> io::Result<Pid> {
    let (parent, flags, none) =
        (getpid().as_raw(), libc::c_long::from(libc::CLONE_NEWUSER | libc::SIGCHLD), 0 as libc::c_long);
    // SAFETY: as fork: without CLONE_VM and with no stack given, the child goes on with a copy of this memory. There it makes
    // nothing but the system calls below, which take no lock and touch no memory, and it never returns.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, none, none, none, none) };
    if pid == 0 {
        // SAFETY: these calls touch no memory of ours.
        unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            while libc::getppid() == parent {
                libc::pause();
            }
            libc::_exit(0)
        }
    }
    match i32::try_from(pid) {
        Ok(pid) if pid > 0 => Ok(Pid::from_raw(pid)),
        _ => Err(io::Error::last_os_error()),
    }
}
