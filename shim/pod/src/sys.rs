//! Wraps the system calls that have no safe wrapper: starting a child in its own session. `detach` runs its closure
//! between fork and exec, where only async-signal-safe calls are allowed.

#![allow(unsafe_code, reason = "pre_exec and close_range have no safe wrapper in nix or std")]

use std::io;
use std::os::fd::OwnedFd;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::process::{Child, Command};

/// Makes the child the leader of a new session that inherits only its standard streams.
pub(crate) fn detach(command: &mut Command) {
    let steps = || {
        nix::unistd::setsid()?;
        // SAFETY: close_range with CLOEXEC takes three integers, touches no memory and is async-signal-safe.
        match unsafe { libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    // SAFETY: `steps` only makes two system calls and builds an error from errno; it takes no lock and does not
    // allocate.
    unsafe { command.pre_exec(steps) };
}

/// Starts the command as process 1 of a new PID namespace. Blocks for the start. A thread of its own makes the namespace: only the
/// children of that thread are in it, and it has no other.
pub(crate) fn spawn_in_pid_namespace(command: &mut Command) -> io::Result<Child> {
    let runtime = tokio::runtime::Handle::current();
    std::thread::scope(|scope| {
        let start = || {
            let _entered = runtime.enter();
            nacelle_jail::create_child_pid_namespace()?;
            command.spawn()
        };
        let spawned = std::thread::Builder::new().name("pid namespace".into()).spawn_scoped(scope, start)?.join();
        spawned.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Registers a descriptor with the async runtime. A pidfd becomes readable when its process has ended.
pub(crate) fn readable(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd is open and returns the same descriptor for as long as it lives.
    unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) }.map_err(Into::into)
}
