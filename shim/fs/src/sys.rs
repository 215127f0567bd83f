//! Wraps the system calls of this crate that have no safe wrapper: fork and clone.
#![allow(unsafe_code)] // reason: neither fork nor clone has a safe wrapper in nix or std.

use nacelle_base::retry::retry_interrupted;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, getpid};
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;

/// Forks this process; returns `None` in the child. Fails if the process has more than one thread.
pub(crate) fn fork() -> io::Result<Option<Pid>> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other("the process has more than one thread"));
    }
    // SAFETY: there is no other thread, as was just checked, so no thread holds a lock that the child would wait for: the
    // child may do whatever this process may.
    match unsafe { nix::unistd::fork() }? {
        ForkResult::Parent { child } => Ok(Some(child)),
        ForkResult::Child => Ok(None),
    }
}

/// Ends a process that [`fork`] has created.
pub(crate) fn exit(code: i32) -> ! {
    // SAFETY: ends the process; no exit handler or buffer of the parent, of which this is a copy, is run or flushed.
    unsafe { libc::_exit(code) }
}

/// Creates a user namespace with these maps of users and groups (user_namespaces(7)). The caller needs privileges over all of the ids.
pub(crate) fn create_user_namespace(users: &str, groups: &str) -> io::Result<OwnedFd> {
    // A namespace exists only while a process or a descriptor refers to it: here a child, until this process has opened it.
    let holder = spawn_user_namespace_holder()?;
    let namespace = (|| {
        for (file, map) in [("uid_map", users), ("gid_map", groups)] {
            fs::write(format!("/proc/{holder}/{file}"), map)?;
        }
        Ok(File::open(format!("/proc/{holder}/ns/user"))?.into())
    })();
    kill(holder, Signal::SIGKILL).and_then(|()| retry_interrupted(|| waitpid(holder, None)))?;
    namespace
}

/// Starts a process in a new user namespace, which waits to be killed. Any thread may call it; the process ends when the
/// calling thread does.
fn spawn_user_namespace_holder() -> io::Result<Pid> {
    let (parent, flags, none) =
        (getpid().as_raw(), libc::c_long::from(libc::CLONE_NEWUSER | libc::SIGCHLD), 0 as libc::c_long);
    // SAFETY: as fork: without CLONE_VM and with no stack given, the child continues on a copy of this memory. There it
    // makes only the system calls below, which take no lock and touch no memory, and it never returns.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, none, none, none, none) };
    if pid == 0 {
        // SAFETY: these calls touch no memory of this process.
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
