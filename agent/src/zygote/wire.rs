//! Sends and receives bytes with descriptors, and hands a new process over to the agent.

use nacelle_base::retry::retry_interrupted;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, UnixAddr, recvmsg, sendmsg};
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use super::error::ZygoteError;
use super::message::ZygoteReply;
use super::process::{CreatedProcess, kill_unclaimed};
use crate::{frame, sys};

/// The agent's confirmation that it has the answer, and with it the process. A child that does not receive it kills the process.
pub(super) const ACKNOWLEDGED: [u8; 1] = *b"!";

/// Sends bytes with descriptors.
pub(super) fn send_with_descriptors(to: impl AsFd, bytes: &[u8], fds: &[i32], flags: MsgFlags) -> nix::Result<()> {
    let rights = [ControlMessage::ScmRights(fds)];
    let rights = if fds.is_empty() { &[][..] } else { &rights[..] };
    let (to, flags) = (to.as_fd().as_raw_fd(), flags | MsgFlags::MSG_NOSIGNAL);
    retry_interrupted(|| sendmsg::<()>(to, &[IoSlice::new(bytes)], rights, flags, None)).map(drop)
}

/// Receives at most 4 bytes, and the descriptors that came with them. No bytes mean the end of the stream.
pub(super) fn receive_with_descriptors(from: impl AsFd, flags: MsgFlags) -> nix::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let (from, flags) = (from.as_fd().as_raw_fd(), flags | MsgFlags::MSG_CMSG_CLOEXEC);
    retry_interrupted(|| {
        let mut bytes = [0; 4];
        let mut space = nix::cmsg_space!([i32; 8]);
        let mut iov = [IoSliceMut::new(&mut bytes)];
        let message = recvmsg::<UnixAddr>(from, &mut iov, Some(&mut space), flags)?;
        let length = message.bytes;
        let mut fds = Vec::new();
        for control in message.cmsgs()? {
            if let ControlMessageOwned::ScmRights(received) = control {
                fds.extend(sys::adopt_descriptors(received));
            }
        }
        Ok((bytes.get(..length).unwrap_or_default().to_vec(), fds))
    })
}

/// Sends a child's answer, with the process's pidfd and its terminal's master.
pub(super) fn send_reply(to: &mut UnixStream, reply: &ZygoteReply, fds: &[&OwnedFd]) -> Result<(), ZygoteError> {
    let connection_failed = |source| ZygoteError::Talk { source };
    let bytes = frame::encode_frame(&serde_json::to_vec(reply)?, frame::MAX_ZYGOTE)?;
    let (first, rest) = bytes.split_at_checked(4).unwrap_or((&bytes, &[]));
    let fds: Vec<i32> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
    send_with_descriptors(&*to, first, &fds, MsgFlags::empty()).map_err(|error| connection_failed(error.into()))?;
    to.write_all(rest).map_err(connection_failed)
}

/// Answers with a process that was made, and waits until the agent confirms it. Kills the process if the agent does not, because it
/// has given up or ended.
pub(super) fn hand_over_process(to: &mut UnixStream, made: &CreatedProcess) -> Result<(), ZygoteError> {
    let fds: Vec<&OwnedFd> = made.pidfd.iter().chain(&made.terminal).collect();
    let result = send_reply(to, &ZygoteReply::Created { pid: made.pid, pidfd: made.pidfd.is_some() }, &fds)
        .and_then(|()| to.read_exact(&mut [0; ACKNOWLEDGED.len()]).map_err(|source| ZygoteError::Talk { source }));
    if result.is_err()
        && let Some(pidfd) = &made.pidfd
    {
        kill_unclaimed(made.pid, pidfd);
    }
    result
}
