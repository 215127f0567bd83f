//! Plays, in tests, the file-server process at the other end of the stream, as far as it receives shared queues.

use nacelle_base::retry::retry_interrupted;
use nacelle_base::share::{REQUEST_HEADER, SHARE_VIRTQUEUE, SharedVirtqueue};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use std::io::{IoSliceMut, Read};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;

/// Reads the next two numbers. Returns `None` at the end of the stream.
pub fn header(stream: &mut UnixStream) -> Option<[u32; 2]> {
    let mut header = [0; REQUEST_HEADER];
    stream.read_exact(&mut header).ok()?;
    Some([0, 4].map(|at| u32::from_le_bytes(header[at..at + 4].try_into().unwrap())))
}

/// Receives a shared queue. Returns its description and the number of descriptors that come with it, or `None` at the end of the stream.
pub fn receive_shared_queue(stream: &mut UnixStream) -> Option<(SharedVirtqueue, usize)> {
    let [kind, length] = header(stream)?;
    assert_eq!(kind, SHARE_VIRTQUEUE);
    let mut bytes = vec![0; length as usize];
    let mut control = nix::cmsg_space!([RawFd; 32]);
    let (received, fds) = retry_interrupted(|| {
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let received = recvmsg::<()>(stream.as_raw_fd(), &mut parts, Some(&mut control), MsgFlags::empty())?;
        let fds = received.cmsgs()?.map(|message| match message {
            ControlMessageOwned::ScmRights(fds) => fds.len(),
            _ => 0,
        });
        let fds = fds.sum();
        Ok::<_, nix::errno::Errno>((received.bytes, fds))
    })
    .unwrap();
    assert_eq!(received, bytes.len());
    Some((SharedVirtqueue::decode(&bytes).unwrap(), fds))
}
