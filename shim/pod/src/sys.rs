//! Owns: the system calls that have no safe wrapper: a child in a session of its own, process handles, and descriptors that
//! are handed over.
//! Threads: `detach` runs its closure between fork and exec, where only async-signal-safe calls are allowed.

#![allow(unsafe_code, reason = "pre_exec, close_range and the pidfd calls have no safe wrapper in nix or std")]

use nacelle_base::retry::retry_interrupted;
use nix::errno::Errno;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// The child becomes leader of a new session and inherits no descriptor but its standard streams.
pub(crate) fn detach(command: &mut tokio::process::Command) {
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

/// A handle on the process that has this pid now; none if there is none, or if the number is a thread's: then the process
/// that had it is gone.
pub(crate) fn pidfd_open(pid: i32) -> io::Result<Option<OwnedFd>> {
    // SAFETY: pidfd_open takes two integers and touches no memory.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0u32) };
    if fd < 0 {
        let error = io::Error::last_os_error();
        // pidfd_open(2): EINVAL (since Linux 6.15 ENOENT) for what leads no thread group, which a process that is being reaped
        // does not either.
        let gone = matches!(error.raw_os_error(), Some(libc::ESRCH | libc::EINVAL | libc::ENOENT));
        return if gone { Ok(None) } else { Err(error) };
    }
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made this descriptor for us and nobody else knows it.
    Ok(Some(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// Sends a signal to the process behind the handle; one that is gone is no failure.
pub(crate) fn pidfd_send(pidfd: &OwnedFd, signal: i32) -> io::Result<()> {
    // SAFETY: the descriptor is open; a null siginfo is allowed and means "as kill(2)".
    let rc = unsafe {
        libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), signal, std::ptr::null::<libc::siginfo_t>(), 0u32)
    };
    if rc == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::ESRCH) { Ok(()) } else { Err(error) }
}

/// Lets the runtime wait until the handle is readable: until its process has ended.
pub(crate) fn readable(pidfd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd is open and answers with the same descriptor for as long as it lives.
    unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }.map_err(Into::into)
}

/// Takes the descriptor that comes with the next byte of a socket; `InvalidData` if there is none.
pub(crate) fn receive(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut space = nix::cmsg_space!([RawFd; 1]);
    let found = retry_interrupted(|| {
        let mut byte = [0; 1];
        let mut parts = [io::IoSliceMut::new(&mut byte)];
        let received = recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC)?;
        Ok::<_, Errno>(received.cmsgs()?.find_map(|message| match message {
            ControlMessageOwned::ScmRights(descriptors) => descriptors.first().copied(),
            _ => None,
        }))
    })?;
    let found = found.ok_or(io::ErrorKind::InvalidData)?;
    // SAFETY: the kernel made this number for this process in the recvmsg call, the only one for which there was room; nobody
    // else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(found) })
}

/// Sends a descriptor with one byte.
pub(crate) fn hand_over(socket: BorrowedFd<'_>, descriptor: BorrowedFd<'_>) -> io::Result<()> {
    let descriptors = [descriptor.as_raw_fd()];
    let rights = [ControlMessage::ScmRights(&descriptors)];
    let flags = MsgFlags::MSG_NOSIGNAL;
    retry_interrupted(|| sendmsg::<()>(socket.as_raw_fd(), &[io::IoSlice::new(&[0])], &rights, flags, None))?;
    Ok(())
}

/// Makes `target` share all blocks of `source`, where the file system can do that.
pub(crate) fn clone_file(source: &File, target: &File) -> io::Result<()> {
    // SAFETY: both descriptors are open; FICLONE takes a descriptor as its argument and touches no memory.
    retry_interrupted(|| match unsafe { libc::ioctl(target.as_raw_fd(), libc::FICLONE, source.as_raw_fd()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    })
}
