//! Serves a virtqueue that the device in the pod process shares with this process: requests are read, answered and
//! completed in place in guest memory, in their order. The guest may change its memory at any time; that may break only its
//! own requests.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use crate::server::{Buffer, Completion, Memory, QUEUE_SIZE, Region, Server};
use nacelle_base::retry::retry_interrupted;
use nacelle_base::share::SharedVirtqueue;
use nacelle_base::{guest_error, guest_warn};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use virtio_queue_of_virtiofsd::desc::split::Descriptor;
use virtio_queue_of_virtiofsd::{DescriptorChain, Error, Queue, QueueOwnedT, QueueT};
use vm_memory_of_virtiofsd::{FileOffset, GuestAddress, GuestMemory, MmapRegion};

/// The number of requests that are served before other queues get a turn.
const BATCH: usize = 32;
/// The maximum number of buffers of a request; Linux uses fewer than the virtqueue has descriptors.
const MAX_BUFFERS: usize = QUEUE_SIZE as usize - 2;

/// A shared virtqueue.
pub(crate) struct ServedVirtqueue {
    queue: Queue,
    /// The guest's memory.
    guest: Memory,
    /// The guest's memory, and this process's own memory behind it.
    all: Memory,
    kick: OwnedFd,
    call: OwnedFd,
    broken: bool,
}

/// The buffers of a request.
#[derive(Default)]
struct Buffers {
    readable: Vec<Buffer>,
    writable: Vec<Buffer>,
}

impl ServedVirtqueue {
    /// Sets up the virtqueue with these descriptors: its kick, its call, and the files of the guest's memory.
    pub fn new(shared: &SharedVirtqueue, fds: Vec<OwnedFd>, own_region: Arc<Region>) -> io::Result<ServedVirtqueue> {
        let mut fds = VecDeque::from(fds);
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, "the message is not a valid shared virtqueue");
        let (kick, call) = fds.pop_front().zip(fds.pop_front()).ok_or_else(invalid)?;
        if fds.len() != shared.regions.len() {
            return Err(invalid());
        }
        let mut regions = Vec::with_capacity(fds.len() + 1);
        for (region, fd) in shared.regions.iter().zip(fds) {
            regions.push(Arc::new(map_region(region, fd)?));
        }
        let memory = |regions| Memory::from_arc_regions(regions).map_err(io::Error::other);
        let guest = memory(regions.clone())?;
        regions.push(own_region);
        let all = memory(regions)?;
        let mut queue = Queue::new(shared.size).map_err(io::Error::other)?;
        queue.set_size(shared.size);
        queue.set_event_idx(shared.event_idx);
        queue.try_set_desc_table_address(GuestAddress(shared.descriptors)).map_err(io::Error::other)?;
        queue.try_set_avail_ring_address(GuestAddress(shared.available)).map_err(io::Error::other)?;
        queue.try_set_used_ring_address(GuestAddress(shared.used)).map_err(io::Error::other)?;
        queue.set_next_avail(shared.next_avail);
        queue.set_ready(true);
        if !queue.is_valid(&guest) {
            return Err(invalid());
        }
        let used = queue.used_idx(&guest, Ordering::Acquire).map_err(io::Error::other)?;
        queue.set_next_used(used.0);
        Ok(ServedVirtqueue { queue, guest, all, kick, call, broken: false })
    }

    /// Returns the next index of the available ring: all requests before it are completed.
    pub fn next_avail(&self) -> u16 {
        self.queue.next_avail()
    }

    /// Reads the kick eventfd.
    pub fn read_kick(&mut self) {
        match retry_interrupted(|| nix::unistd::read(&self.kick, &mut [0; 8])) {
            Ok(1..) | Err(Errno::EAGAIN) => {}
            Ok(_) | Err(_) => self.mark_broken(&"cannot read its kick eventfd"),
        }
    }

    /// Serves up to [`BATCH`] requests. Returns true if there are more; otherwise the guest's next request kicks.
    pub fn serve(&mut self, server: &mut Server) -> bool {
        match self.try_serve(server) {
            Ok(more) => more,
            Err(error) => {
                self.mark_broken(&error);
                false
            }
        }
    }

    fn try_serve(&mut self, server: &mut Server) -> Result<bool, Error> {
        if self.broken {
            return Ok(false);
        }
        self.queue.disable_notification(&self.guest)?;
        let mut unnotified = false;
        for _ in 0..BATCH {
            let Some(chain) = self.queue.iter(&self.guest)?.next() else {
                if unnotified {
                    self.notify_guest()?;
                }
                return self.queue.enable_notification(&self.guest);
            };
            let head = chain.head_index();
            let completion = match collect_buffers(&self.guest, chain) {
                Some(Buffers { readable, writable }) => server.serve_in_place(&self.all, &readable, &writable),
                None => {
                    tracing::debug!("the guest sent an invalid descriptor chain");
                    Completion { bytes: 0, awaited: true }
                }
            };
            self.queue.add_used(&self.guest, head, completion.bytes)?;
            // The completion of a request without a waiter is signalled together with the next one.
            unnotified = !completion.awaited;
            if completion.awaited {
                self.notify_guest()?;
            }
        }
        if unnotified {
            self.notify_guest()?;
        }
        Ok(true)
    }

    /// Interrupts the guest after completions, unless it has disabled that.
    fn notify_guest(&mut self) -> Result<(), Error> {
        if !self.queue.needs_notification(&self.guest)? {
            return Ok(());
        }
        match retry_interrupted(|| nix::unistd::write(&self.call, &1u64.to_ne_bytes())) {
            Ok(_) | Err(Errno::EAGAIN) => {} // EAGAIN: a call is pending already
            Err(error) => guest_error!("cannot interrupt the guest: {error}"),
        }
        Ok(())
    }

    /// Stops serving the virtqueue.
    fn mark_broken(&mut self, reason: &dyn std::fmt::Display) {
        if !std::mem::replace(&mut self.broken, true) {
            guest_warn!("the guest broke its virtqueue for file requests, which is no longer served: {reason}");
        }
    }

    /// Returns whether the virtqueue is no longer served because the guest broke it.
    pub fn is_broken(&self) -> bool {
        self.broken
    }
}

impl AsFd for ServedVirtqueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.kick.as_fd()
    }
}

/// Maps a region of guest memory. Accepts only files that are sealed against shrinking, because an access beyond the end of
/// the file would kill this process.
fn map_region(region: &nacelle_base::share::SharedRegion, fd: OwnedFd) -> io::Result<Region> {
    let nacelle_base::share::SharedRegion { address, length, offset } = *region;
    let invalid =
        || io::Error::new(io::ErrorKind::InvalidData, "a region of the shared virtqueue is not sealed guest memory");
    let file = File::from(fd);
    let seals = SealFlag::from_bits_retain(fcntl(&file, FcntlArg::F_GET_SEALS)?);
    let end = offset.checked_add(length).ok_or_else(invalid)?;
    if !seals.contains(SealFlag::F_SEAL_SHRINK) || file.metadata()?.len() < end {
        return Err(invalid());
    }
    let size = usize::try_from(length).map_err(io::Error::other)?;
    let mapped = MmapRegion::from_file(FileOffset::new(file, offset), size).map_err(io::Error::other)?;
    Region::new(mapped, GuestAddress(address)).ok_or_else(invalid)
}

/// Returns the buffers of a descriptor chain, after checking that the chain ends, is in order and lies in guest memory.
fn collect_buffers(guest: &Memory, chain: DescriptorChain<&Memory>) -> Option<Buffers> {
    let mut buffers = Buffers::default();
    let mut last: Option<Descriptor> = None;
    for descriptor in chain {
        last = Some(descriptor);
        let (address, length) = (descriptor.addr(), descriptor.len());
        if !guest.check_range(address, length as usize) {
            return None;
        }
        let list = if descriptor.is_write_only() {
            &mut buffers.writable
        } else if buffers.writable.is_empty() {
            &mut buffers.readable
        } else {
            return None;
        };
        if length > 0 {
            list.push((address.0, length));
        }
        if buffers.readable.len() + buffers.writable.len() > MAX_BUFFERS {
            return None;
        }
    }
    last.filter(|last| !last.has_next()).map(|_| buffers)
}
