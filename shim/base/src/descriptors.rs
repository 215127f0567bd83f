//! Sends and receives file descriptors with the bytes of Unix sockets (unix(7), `SCM_RIGHTS`). A received descriptor is an
//! `OwnedFd` with close-on-exec set.

use crate::retry::retry_interrupted;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

/// The maximum number of descriptors that one call receives.
pub const MAX_DESCRIPTORS: usize = 32;

/// Receives bytes and the descriptors that come with them; returns the number of bytes. Fails with `InvalidData` if there
/// are more descriptors than [`MAX_DESCRIPTORS`], or more than this process may have open; then all received descriptors
/// are closed.
pub fn receive_with_descriptors(socket: impl AsFd, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    receive(socket, bytes, RecvFlags::empty())
}

/// Like [`receive_with_descriptors`], but never blocks: fails with `WouldBlock` if no byte is available.
pub fn try_receive_with_descriptors(socket: impl AsFd, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    receive(socket, bytes, RecvFlags::DONTWAIT)
}

fn receive(socket: impl AsFd, bytes: &mut [u8], flags: RecvFlags) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let (mut descriptors, flags) = (Vec::new(), flags | RecvFlags::CMSG_CLOEXEC);
    let (count, returned) = retry_interrupted(|| {
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = recvmsg(&socket, &mut [IoSliceMut::new(bytes)], &mut control, flags)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(of_message) = message {
                descriptors.extend(of_message);
            }
        }
        Ok::<_, rustix::io::Errno>((received.bytes, received.flags))
    })?;
    // The kernel rounds the buffer size up to whole words, so one more descriptor may fit.
    if returned.contains(ReturnFlags::CTRUNC) || descriptors.len() > MAX_DESCRIPTORS {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok((count, descriptors))
}

/// Receives the descriptor that comes with the next byte of a socket. Fails with `InvalidData` if there is not exactly one.
pub fn receive_descriptor(socket: impl AsFd) -> io::Result<OwnedFd> {
    let (_, mut descriptors) = receive_with_descriptors(socket, &mut [0])?;
    let only = descriptors.pop().filter(|_| descriptors.is_empty());
    only.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Sends bytes, and a descriptor with the first of them; returns the number of bytes that were sent.
pub fn send_with_descriptor(socket: impl AsFd, bytes: &[u8], descriptor: impl AsFd) -> io::Result<usize> {
    let descriptors = [descriptor.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    Ok(retry_interrupted(|| sendmsg(&socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::socket::{ControlMessage, MsgFlags};
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_descriptor_is_received_with_a_byte() {
        let (near, far) = UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        file.set_len(7).unwrap();
        assert_eq!(try_receive_with_descriptors(&far, &mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert_eq!(send_with_descriptor(&near, &[0], &file).unwrap(), 1);
        assert_eq!(File::from(receive_descriptor(&far).unwrap()).metadata().unwrap().len(), 7);
        drop(near);
        assert_eq!(receive_descriptor(&far).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn rejected_descriptors_are_closed() {
        let send = |socket: &UnixStream, count| {
            let (_near, far) = UnixStream::pair().unwrap();
            let all = vec![far.as_raw_fd(); count];
            let rights = [ControlMessage::ScmRights(&all)];
            let (parts, flags) = ([IoSlice::new(b"abc")], MsgFlags::empty());
            let sent = nix::sys::socket::sendmsg::<()>(socket.as_raw_fd(), &parts, &rights, flags, None);
            assert_eq!(sent.unwrap(), 3);
            _near
        };
        // A read at the other end returns when the last descriptor of its peer is closed.
        let is_closed = |near: &UnixStream| {
            near.set_nonblocking(true).unwrap();
            matches!(io::Read::read(&mut &*near, &mut [0]), Ok(0))
        };
        let (near, far) = UnixStream::pair().unwrap();
        let mut bytes = [0; 3];
        let sent = send(&near, MAX_DESCRIPTORS);
        let (count, descriptors) = receive_with_descriptors(&far, &mut bytes).unwrap();
        assert_eq!((count, &bytes, descriptors.len()), (3, b"abc", MAX_DESCRIPTORS));
        assert!(!is_closed(&sent));
        drop(descriptors);
        assert!(is_closed(&sent));
        for count in [MAX_DESCRIPTORS + 1, 100] {
            let sent = send(&near, count);
            assert!(receive_with_descriptors(&far, &mut bytes).is_err_and(|e| e.kind() == io::ErrorKind::InvalidData));
            assert!(is_closed(&sent), "{count}");
        }
        let sent = send(&near, 2);
        assert_eq!(receive_descriptor(&far).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert!(is_closed(&sent));
    }
}
