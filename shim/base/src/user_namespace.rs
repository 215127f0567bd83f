//! Creates user namespaces for idmapped mounts (mount_setattr(2)). No process runs in them.
#![allow(unsafe_code)] // reason: clone without a stack has no safe wrapper in rustix, nix or std.

use crate::pidfd::{pid_in_proc, pidfd_open};
use crate::retry::retry_interrupted;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::{Pid, getpid};
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;

/// Creates a user namespace with these maps of users and groups (user_namespaces(7)). The caller needs privileges over all of the ids,
/// and /proc, which may be that of a PID namespace above the caller's.
pub fn create_user_namespace(users: &str, groups: &str) -> io::Result<OwnedFd> {
    // A namespace exists only while a process or a descriptor refers to it: here a child, until this process has opened it.
    let holder = spawn_holder()?;
    let namespace = (|| {
        // The number of the child in this process's PID namespace may be that of another process in /proc.
        let number = pid_in_proc(&pidfd_open(holder.as_raw())?)?;
        for (file, map) in [("uid_map", users), ("gid_map", groups)] {
            fs::write(format!("/proc/{number}/{file}"), map)?;
        }
        Ok(File::open(format!("/proc/{number}/ns/user"))?.into())
    })();
    kill(holder, Signal::SIGKILL).and_then(|()| retry_interrupted(|| waitpid(holder, None)))?;
    namespace
}

/// Starts a process in a new user namespace, which waits to be killed. Any thread may call it; the process ends when the
/// calling thread does.
fn spawn_holder() -> io::Result<Pid> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn a_namespace_is_created_in_a_pid_namespace_of_its_own_too() {
        const INSIDE: &str = "NACELLE_TEST_IN_PID_NAMESPACE";
        if !nix::unistd::geteuid().is_root() {
            return println!("skipped: not root");
        }
        let inode = |file: File| file.metadata().unwrap().ino();
        let created = inode(create_user_namespace("0 70001 1", "0 70001 1").unwrap().into());
        assert_ne!(created, inode(File::open("/proc/self/ns/user").unwrap()));
        if std::env::var_os(INSIDE).is_some() {
            // The number of the child is that of another process in /proc, which stays as it is.
            assert_eq!(getpid().as_raw(), 1);
            return;
        }
        let name = "user_namespace::tests::a_namespace_is_created_in_a_pid_namespace_of_its_own_too";
        let mut again = std::process::Command::new("unshare");
        again.args(["--pid", "--fork", "--kill-child"]).arg(std::env::current_exe().unwrap());
        let inside = again.args(["--exact", name, "--nocapture"]).env(INSIDE, "yes").output().unwrap();
        let text = String::from_utf8_lossy(&inside.stdout);
        assert!(
            inside.status.success() && text.contains("1 passed"),
            "{text}{}",
            String::from_utf8_lossy(&inside.stderr)
        );
    }

    #[test]
    fn an_invalid_map_creates_no_namespace() {
        if !nix::unistd::geteuid().is_root() {
            return println!("skipped: not root");
        }
        assert_eq!(create_user_namespace("x", "0 70001 1").unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }
}
