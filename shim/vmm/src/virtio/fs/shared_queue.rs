//! Shares a queue with the file-server process, if it lies in shared memory. That process then serves the queue in place,
//! without a copy and without this process in between. See docs/contributor/devices/fs.md.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::connection::StreamIo;
use crate::virtio::Ring;
use crate::virtio::queue_thread::StopSignal;
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
pub(super) struct SharedQueueOffer<'r> {
    description: SharedVirtqueue,
    call: OwnedFd,
    ring: &'r Ring,
    files: Vec<RawFd>,
}

impl<'r> SharedQueueOffer<'r> {
    /// Returns `None` if the queue does not lie in shared memory, or if the transport has no eventfd to interrupt the guest.
    pub fn from_ring(ring: &'r Ring) -> Option<SharedQueueOffer<'r>> {
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
        let call = ring.interrupt().interrupt_eventfd(ring.index())?;
        let description = SharedVirtqueue {
            size: state.size,
            event_idx: state.event_idx_enabled,
            next_avail: state.next_avail,
            descriptors: state.desc_table,
            available: state.avail_ring,
            used: state.used_ring,
            regions,
        };
        Some(SharedQueueOffer { description, call, ring, files })
    }

    /// Sends the queue to the other process. The stream accepts the few bytes at once, because nothing else is in flight.
    pub fn send(self, stream: &UnixStream) -> io::Result<()> {
        let description = self.description.encode();
        let length = u32::try_from(description.len()).unwrap_or(0); // at most MAX_SHARED_VIRTQUEUE
        let header = [SHARE_VIRTQUEUE, length].map(u32::to_le_bytes).concat();
        let fds: Vec<RawFd> =
            [self.ring.as_fd().as_raw_fd(), self.call.as_raw_fd()].into_iter().chain(self.files).collect();
        let flags = MsgFlags::MSG_NOSIGNAL;
        let rights = [ControlMessage::ScmRights(&fds)];
        let parts = [IoSlice::new(&description)];
        let sent = retry_interrupted(|| nix::unistd::write(stream, &header))?
            + retry_interrupted(|| sendmsg::<()>(stream.as_raw_fd(), &parts, &rights, flags, None))?;
        if sent == header.len() + description.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }
}

/// Waits until the queue must stop, takes it back, and sets the position in `ring`. After an error the position is the one that
/// the other process has left in the used ring.
pub(super) fn wait_while_shared(ring: &mut Ring, stream: &UnixStream, stop: &StopSignal) -> io::Result<()> {
    let reclaimed = wait_for_stop(stream, stop).and_then(|()| reclaim_queue(stream, stop));
    match &reclaimed {
        Ok(next_avail) => ring.set_next_available(*next_avail),
        Err(_) => {
            ring.continue_after_used();
            // The other process may have ended before it notified the guest of returned requests.
            ring.interrupt().notify_queue(ring.index());
        }
    }
    reclaimed.map(|_next| ())
}

/// Fails if the other process has ended or sends unsolicited data.
fn wait_for_stop(stream: &UnixStream, stop: &StopSignal) -> io::Result<()> {
    while !stop.is_requested() {
        let mut events = [PollFd::new(stop.as_fd(), PollFlags::POLLIN), PollFd::new(stream.as_fd(), PollFlags::POLLIN)];
        retry::poll(&mut events, None)?;
        stop.clear();
        match retry_interrupted(|| nix::unistd::read(stream, &mut [0])) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => return Err(io::Error::new(io::ErrorKind::InvalidData, "an unsolicited reply")),
            Err(Errno::EAGAIN) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Requests the queue back. Returns the next index of the available ring.
fn reclaim_queue(stream: &UnixStream, stop: &StopSignal) -> io::Result<u16> {
    let mut io = StreamIo::new(stop);
    io.send(stream, &[UNSHARE_VIRTQUEUE, 0].map(u32::to_le_bytes).concat())?;
    let mut next = [0; REPLY_HEADER];
    io.receive(stream, &mut next)?;
    let next = u16::try_from(u32::from_le_bytes(next));
    next.map_err(|_wide| io::Error::new(io::ErrorKind::InvalidData, "an invalid ring index"))
}
