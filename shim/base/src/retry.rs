//! Repeats system calls that a signal has interrupted, and bounds blocking calls on sockets by a deadline.
//!
//! Signal handlers run on any thread of a process, so every call that can block may fail with EINTR. `SA_RESTART` does not
//! prevent it: the kernel does not restart poll(2), nor calls on a socket with `SO_RCVTIMEO` or `SO_SNDTIMEO`, which fail with
//! EAGAIN when that time is over. `cargo xtask rules` rejects such calls outside of this module's functions.

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::socket::MsgFlags;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

/// Attempts of [`retry_transient`]. Each fails only if something else happens in the same few microseconds.
const ATTEMPTS: u32 = 1000;

/// An error of a system call.
pub trait SystemError {
    /// The error number; `None` if the error is not one of the kernel.
    fn number(&self) -> Option<i32>;
}

impl SystemError for io::Error {
    fn number(&self) -> Option<i32> {
        match self.raw_os_error() {
            None if self.kind() == io::ErrorKind::Interrupted => Some(libc::EINTR),
            number => number,
        }
    }
}

impl SystemError for Errno {
    fn number(&self) -> Option<i32> {
        Some(*self as i32)
    }
}

impl SystemError for rustix::io::Errno {
    fn number(&self) -> Option<i32> {
        Some(self.raw_os_error())
    }
}

/// Repeats a call for as long as it fails with EINTR. Not for close(2), which has closed the descriptor whatever it returns,
/// nor for connect(2) on TCP, which goes on in the background.
pub fn retry_interrupted<T, E: SystemError>(mut call: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    loop {
        match call() {
            Err(error) if error.number() == Some(libc::EINTR) => {}
            result => return result,
        }
    }
}

/// Repeats a call whose EAGAIN means that it raced, and not that anything is exhausted: openat2(2) with `RESOLVE_BENEATH` or
/// `RESOLVE_IN_ROOT`, if a path has `..` and any process of the node renames or mounts at the same moment; bpf(2) that loads a
/// program, if a signal arrives while the kernel verifies it. After 1,000 attempts the error is EAGAIN.
pub fn retry_transient<T, E: SystemError>(mut call: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    let mut remaining = ATTEMPTS;
    loop {
        remaining = remaining.saturating_sub(1);
        match retry_interrupted(&mut call) {
            Err(error) if remaining > 0 && error.number() == Some(libc::EAGAIN) => std::thread::yield_now(),
            result => return result,
        }
    }
}

/// Waits until a descriptor is ready or the deadline has passed; without a deadline, for as long as it takes. Returns the number
/// of ready descriptors, 0 after the deadline.
pub fn poll(fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> io::Result<usize> {
    loop {
        let remaining = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        match nix::poll::poll(fds, remaining.map_or(PollTimeout::NONE, round_up)) {
            // The maximum timeout of poll(2) may be shorter than the time that is remaining.
            Ok(0) if remaining.is_some_and(|remaining| !remaining.is_zero()) => {}
            Err(Errno::EINTR) => {}
            result => return Ok(usize::try_from(result?).unwrap_or_default()),
        }
    }
}

/// Converts a time to milliseconds, the unit of poll(2), rounded up so that a wait does not end before its deadline.
fn round_up(remaining: Duration) -> PollTimeout {
    let milliseconds = remaining.as_nanos().div_ceil(1_000_000);
    PollTimeout::try_from(milliseconds).unwrap_or(PollTimeout::MAX)
}

/// Converts the error of a call on a socket with `SO_RCVTIMEO` or `SO_SNDTIMEO`: `TimedOut` instead of EAGAIN when the time is over.
pub fn timed_out(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::WouldBlock { io::ErrorKind::TimedOut.into() } else { error }
}

/// A socket whose reads and writes together end at a deadline, with `TimedOut`. Whether the socket itself blocks does not matter.
#[derive(Debug)]
pub struct Timed<'a> {
    socket: BorrowedFd<'a>,
    deadline: Instant,
}

impl<'a> Timed<'a> {
    /// Returns the socket with a deadline `limit` from now.
    pub fn new(socket: &'a impl AsFd, limit: Duration) -> Timed<'a> {
        Timed { socket: socket.as_fd(), deadline: Instant::now() + limit }
    }

    /// Makes a non-blocking call (`MSG_DONTWAIT`) as soon as the socket is ready for it.
    pub fn when_ready<T>(&self, ready: PollFlags, mut call: impl FnMut() -> nix::Result<T>) -> io::Result<T> {
        loop {
            match retry_interrupted(&mut call) {
                Err(Errno::EAGAIN) => {}
                result => return Ok(result?),
            }
            if poll(&mut [PollFd::new(self.socket, ready)], Some(self.deadline))? == 0 {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let socket = self.socket.as_raw_fd();
        self.when_ready(PollFlags::POLLIN, || nix::sys::socket::recv(socket, bytes, MsgFlags::MSG_DONTWAIT))
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let (socket, flags) = (self.socket.as_raw_fd(), MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL);
        self.when_ready(PollFlags::POLLOUT, || nix::sys::socket::send(socket, bytes, flags))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_call_is_repeated_while_signals_interrupt_it() {
        let mut results = vec![Ok(7), Err(Errno::EINTR), Err(Errno::EINTR)];
        assert_eq!(retry_interrupted(|| results.pop().unwrap()), Ok(7));
        let mut results = vec![Err(Errno::EAGAIN), Err(Errno::EINTR)];
        assert_eq!(retry_interrupted(|| results.pop().unwrap()), Err::<(), _>(Errno::EAGAIN));
        let mut results = vec![Ok(1), Err(io::ErrorKind::Interrupted.into()), Err(Errno::EINTR.into())];
        assert_eq!(
            retry_interrupted(|| results.pop().unwrap()).unwrap_or_else(|error: io::Error| panic!("{error}")),
            1
        );
    }

    #[test]
    fn a_racing_call_is_repeated_a_bounded_number_of_times() {
        let mut results = vec![Ok(7), Err(Errno::EAGAIN), Err(Errno::EINTR), Err(Errno::EAGAIN)];
        assert_eq!(retry_transient(|| results.pop().unwrap()), Ok(7));
        let mut count = 0;
        let never = || {
            count += 1;
            Err::<(), _>(Errno::EAGAIN)
        };
        assert_eq!(retry_transient(never), Err(Errno::EAGAIN));
        assert_eq!(count, ATTEMPTS);
    }

    #[test]
    fn socket_calls_fail_with_timed_out_after_the_deadline() {
        let (near, far) = UnixStream::pair().unwrap();
        let limit = Duration::from_millis(50);
        let start = Instant::now();
        let error = Timed::new(&near, limit).read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(start.elapsed() >= limit);
        let error = Timed::new(&near, limit).write_all(&vec![0; 16 << 20]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(near);
        let mut all = Vec::new();
        Timed::new(&far, Duration::from_secs(60)).read_to_end(&mut all).unwrap();
        assert!(!all.is_empty());
        assert_eq!(Timed::new(&far, limit).write(&[1]).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn a_timeout_is_never_rounded_down() {
        assert_eq!(round_up(Duration::ZERO), PollTimeout::ZERO);
        assert_eq!(round_up(Duration::from_nanos(1)), PollTimeout::from(1u8));
        assert_eq!(round_up(Duration::from_millis(9)), PollTimeout::from(9u8));
        assert_eq!(round_up(Duration::MAX), PollTimeout::MAX);
    }
}
