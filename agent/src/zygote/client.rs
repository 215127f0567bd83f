//! Forks the zygote and sends it requests: the agent's side.
//!
//! `Zygote::call` blocks and is for blocking threads; any number may run at once.

use nacelle_base::retry::Timed;
use nix::poll::PollFlags;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, socketpair};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::child;
use super::error::ZygoteError;
use super::message::{ZygoteReply, ZygoteRequest};
use super::process::NewProcess;
use super::wire::{ACKNOWLEDGED, receive_with_descriptors, send_with_descriptors};
use crate::{frame, sys};

/// The longest time from a request to its answer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);

/// The agent's connection to the zygote.
#[derive(Debug)]
pub struct Zygote {
    pub(super) control: OwnedFd,
}

impl Zygote {
    /// Forks the zygote, which closes its copies of the descriptors `mine`. The caller must have one thread.
    pub fn fork(mine: &[&OwnedFd]) -> io::Result<Zygote> {
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
        match sys::fork()? {
            None => {
                drop(ours);
                for fd in mine {
                    // Their owners in this process never run: `run` does not return.
                    let _ = nix::unistd::close(fd.as_raw_fd());
                }
                child::run(theirs)
            }
            Some(_) => Ok(Zygote { control: ours }),
        }
    }

    /// Forks another zygote in place of this one, which ends: a process that has its socket could ask it for any process.
    pub fn replace(self, mine: &[&OwnedFd]) -> io::Result<Zygote> {
        drop(self);
        Zygote::fork(mine)
    }

    /// Sends a request with descriptors to a child of the zygote, and waits for the process at most a minute.
    pub fn call(&self, request: &ZygoteRequest, fds: &[&OwnedFd]) -> Result<NewProcess, ZygoteError> {
        self.call_within(REQUEST_TIMEOUT, request, fds)
    }

    pub(super) fn call_within(
        &self,
        limit: Duration,
        request: &ZygoteRequest,
        fds: &[&OwnedFd],
    ) -> Result<NewProcess, ZygoteError> {
        let connection_failed = |source| ZygoteError::Talk { source };
        let (ours, theirs) = UnixStream::pair().map_err(connection_failed)?;
        let mut child = Timed::new(&ours, limit);
        let mut all = vec![theirs.as_raw_fd()];
        all.extend(fds.iter().map(|fd| fd.as_raw_fd()));
        let send = || send_with_descriptors(&self.control, b"!", &all, MsgFlags::MSG_DONTWAIT);
        Timed::new(&self.control, limit).when_ready(PollFlags::POLLOUT, send).map_err(connection_failed)?;
        drop(theirs);
        frame::write_bytes(&mut child, &serde_json::to_vec(request)?, frame::MAX_ZYGOTE)?;
        let receive = || receive_with_descriptors(&ours, MsgFlags::MSG_DONTWAIT);
        let (first, received) = child.when_ready(PollFlags::POLLIN, receive).map_err(connection_failed)?;
        let reply = frame::read_bytes(&mut io::Cursor::new(first).chain(&mut child), frame::MAX_ZYGOTE)?;
        let reply = serde_json::from_slice(&reply)?;
        let (pid, pidfd) = match reply {
            ZygoteReply::Created { pid, pidfd } => (pid, pidfd),
            ZygoteReply::Refused(refusal) => return Err(refusal.into()),
        };
        let mut received = received.into_iter();
        let pidfd = if pidfd { received.next() } else { None };
        let made = NewProcess { pid, pidfd, terminal: received.next() };
        child.write_all(&ACKNOWLEDGED).map_err(connection_failed)?;
        Ok(made)
    }
}
