//! Shares a queue with the file-server process, if it lies in shared memory. That process then serves the queue in place,
//! without a copy and without this process in between. See docs/contributor/devices/fs.md.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::channel::Waiting;
use crate::virtio::Ring;
use crate::virtio::queue_thread::Stop;
use nacelle_base::retry::{self, retry_interrupted};
use nacelle_base::share::{
    MAX_REGIONS, REPLY_HEADER, SHARE_VIRTQUEUE, SharedRegion, SharedVirtqueue, UNSHARE_VIRTQUEUE,
};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion};

/// A queue about to be shared, with its descriptors.
pub(super) struct Loan<'r> {
    lent: SharedVirtqueue,
    call: OwnedFd,
    ring: &'r Ring,
    files: Vec<RawFd>,
}

impl<'r> Loan<'r> {
    /// Returns `None` if the queue does not lie in shared memory, or if the transport has no eventfd to interrupt the guest.
    pub fn of(ring: &'r Ring) -> Option<Loan<'r>> {
        let (mut regions, mut files) = (Vec::new(), Vec::new());
        for region in ring.memory().iter().filter(|region| region.flags() & libc::MAP_SHARED != 0) {
            let Some(file) = region.file_offset() else { continue };
            files.push(file.file().as_raw_fd());
            let (address, length) = (region.start_addr().raw_value(), region.len());
            regions.push(SharedRegion { address, length, offset: file.start() });
        }
        let state = ring.state();
        let inside =
            |at: &u64| regions.iter().any(|region| (region.address..region.address + region.length).contains(at));
        if regions.len() > MAX_REGIONS || ![state.desc_table, state.avail_ring, state.used_ring].iter().all(inside) {
            return None;
        }
        let call = ring.interrupt().eventfd(ring.index())?;
        let lent = SharedVirtqueue {
            size: state.size,
            event_idx: state.event_idx_enabled,
            next_avail: state.next_avail,
            descriptors: state.desc_table,
            available: state.avail_ring,
            used: state.used_ring,
            regions,
        };
        Some(Loan { lent, call, ring, files })
    }

    /// Sends the queue to the other process. The stream accepts the few bytes at once, because nothing else is in flight.
    pub fn send(self, stream: &UnixStream) -> io::Result<()> {
        let lent = self.lent.encode();
        let length = u32::try_from(lent.len()).unwrap_or(0); // at most MAX_SHARED_VIRTQUEUE
        let header = [SHARE_VIRTQUEUE, length].map(u32::to_le_bytes).concat();
        let fds: Vec<RawFd> =
            [self.ring.as_fd().as_raw_fd(), self.call.as_raw_fd()].into_iter().chain(self.files).collect();
        let flags = MsgFlags::MSG_NOSIGNAL;
        let rights = [ControlMessage::ScmRights(&fds)];
        let parts = [IoSlice::new(&lent)];
        let sent = retry_interrupted(|| nix::unistd::write(stream, &header))?
            + retry_interrupted(|| sendmsg::<()>(stream.as_raw_fd(), &parts, &rights, flags, None))?;
        if sent == header.len() + lent.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }
}

/// Waits until the queue must stop, takes it back, and sets the position in `ring`. After an error the position is the one that
/// the other process has left in the used ring.
pub(super) fn hold(ring: &mut Ring, stream: &UnixStream, stop: &Stop) -> io::Result<()> {
    let taken = until_stopped(stream, stop).and_then(|()| take_back(stream, stop));
    match &taken {
        Ok(next_avail) => ring.served_until(*next_avail),
        Err(_) => {
            ring.served_in_order();
            // The other process may have ended before it notified the guest of returned requests.
            ring.interrupt().queue(ring.index());
        }
    }
    taken.map(|_next| ())
}

/// Fails if the other process has ended or sends unsolicited data.
fn until_stopped(stream: &UnixStream, stop: &Stop) -> io::Result<()> {
    while !stop.asked() {
        let mut events = [PollFd::new(stop.as_fd(), PollFlags::POLLIN), PollFd::new(stream.as_fd(), PollFlags::POLLIN)];
        retry::poll(&mut events, None)?;
        stop.heard();
        match retry_interrupted(|| nix::unistd::read(stream, &mut [0])) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => return Err(io::Error::new(io::ErrorKind::InvalidData, "a word without a question")),
            Err(Errno::EAGAIN) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Requests the queue back. Returns the next index of the available ring.
fn take_back(stream: &UnixStream, stop: &Stop) -> io::Result<u16> {
    let mut waiting = Waiting::new(stop);
    waiting.send(stream, &[UNSHARE_VIRTQUEUE, 0].map(u32::to_le_bytes).concat())?;
    let mut next = [0; REPLY_HEADER];
    waiting.receive(stream, &mut next)?;
    let next = u16::try_from(u32::from_le_bytes(next));
    next.map_err(|_wide| io::Error::new(io::ErrorKind::InvalidData, "no index of a ring"))
}
