//! Sends and receives the messages between the daemon and a worker on a socket that keeps their boundaries (SOCK_SEQPACKET). A message
//! of the other side has a maximum size and is decoded as hostile.

use super::protocol::{WorkerReport, WorkerRequest};
use crate::budget::{BudgetError, Cancel, MemorySource};
use crate::wire::clean_text;
use nacelle_base::descriptors::{receive_with_descriptors, send_with_descriptor};
use nacelle_base::json;
use nacelle_base::retry::retry_interrupted;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::File;
use std::io;
#[cfg(test)]
use std::os::fd::AsFd;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// The maximum size of a message in bytes.
const MAX_MESSAGE: usize = 64 << 10;
/// The maximum number of JSON values of a message: the numbers of 1000 layers, and its fields.
const MAX_VALUES: usize = 2000;

/// The daemon's end of the channel to a worker.
#[derive(Debug)]
pub struct DaemonChannel(OwnedFd);

/// The reason that nothing was received.
#[derive(Debug)]
pub enum ReceiveError {
    /// Nothing was received within the time limit.
    Timeout,
    /// The worker has closed its end.
    Closed,
    /// The message is too long or has no valid content; its beginning. The standard library writes messages on standard error.
    Invalid(String),
    /// The system call failed.
    Io(io::Error),
}

/// Returns both ends of a new channel. The daemon waits at most `wait` for a message.
pub fn channel_pair(wait: Duration) -> io::Result<(DaemonChannel, OwnedFd)> {
    let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
    set_socket_timeout(&ours, Timeout::Recv, Some(wait))?;
    Ok((DaemonChannel(ours), theirs))
}

impl DaemonChannel {
    /// Receives a message.
    pub fn receive(&self) -> Result<WorkerReport, ReceiveError> {
        let mut buffer = vec![0; MAX_MESSAGE + 1];
        // Without space for them, the kernel discards descriptors that a worker sends.
        match retry_interrupted(|| recv(&self.0, &mut *buffer, RecvFlags::empty())).map_err(io::Error::from) {
            Ok((0, _)) => Err(ReceiveError::Closed),
            Ok((length, _)) => {
                let bytes = buffer.get(..length).unwrap_or_default();
                decode(bytes).ok_or_else(|| ReceiveError::Invalid(clean_text(&String::from_utf8_lossy(bytes))))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(ReceiveError::Timeout),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Err(ReceiveError::Closed),
            Err(error) => Err(ReceiveError::Io(error)),
        }
    }

    /// Sends a message, with a descriptor if there is one. Never blocks: a worker that does not read its answers is at fault.
    pub fn send(&self, request: &WorkerRequest, descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let bytes = serde_json::to_vec(request)?;
        match descriptor {
            // The first message, for which the socket has space.
            Some(descriptor) => send_with_descriptor(&self.0, &bytes, descriptor)?,
            None => retry_interrupted(|| send(&self.0, &bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT))?,
        };
        Ok(())
    }
}

/// A worker's end of the channel to the daemon.
#[derive(Debug)]
pub enum WorkerChannel {
    /// Standard error, as the daemon starts workers.
    StandardError,
    /// A socket, in tests.
    #[cfg(test)]
    Socket(OwnedFd),
}

impl WorkerChannel {
    fn socket(&self) -> BorrowedFd<'_> {
        match self {
            WorkerChannel::StandardError => rustix::stdio::stderr(),
            #[cfg(test)]
            WorkerChannel::Socket(socket) => socket.as_fd(),
        }
    }

    /// Sends a message.
    pub fn send(&self, report: &WorkerReport) -> io::Result<()> {
        let bytes = encode(report)?;
        retry_interrupted(|| send(self.socket(), &bytes, SendFlags::NOSIGNAL))?;
        Ok(())
    }

    /// Receives a message, and the file that comes with it.
    pub fn receive(&self) -> io::Result<(WorkerRequest, Option<File>)> {
        let mut buffer = vec![0; MAX_MESSAGE];
        let (length, mut descriptors) = receive_with_descriptors(self.socket(), &mut buffer)?;
        let request = decode(buffer.get(..length).unwrap_or_default()).ok_or(io::ErrorKind::InvalidData)?;
        Ok((request, descriptors.pop().map(File::from)))
    }
}

fn encode(message: &impl Serialize) -> io::Result<Vec<u8>> {
    Ok(serde_json::to_vec(message)?)
}

pub(super) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    if bytes.len() > MAX_MESSAGE {
        return None;
    }
    json::read_limited(bytes, MAX_VALUES).ok()
}

/// The memory of a worker: the daemon's.
#[derive(Debug)]
pub struct DaemonMemory(pub Arc<WorkerChannel>);

impl MemorySource for DaemonMemory {
    fn reserve(&self, bytes: u64, _: &Cancel) -> Result<(), BudgetError> {
        let granted = self.0.send(&WorkerReport::Reserve { bytes }).and_then(|()| self.0.receive());
        match granted {
            Ok((WorkerRequest::Granted, _)) => Ok(()),
            // The daemon has ended, or is about to end this process.
            _ => Err(BudgetError::Cancelled),
        }
    }

    /// A worker keeps its memory until it ends: only then is it certain that it is free.
    fn release(&self, _: u64) -> bool {
        false
    }
}
