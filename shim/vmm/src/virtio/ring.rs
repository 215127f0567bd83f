//! Combines a queue with the memory, kick and interrupt that serving it takes, and enforces its rules: an invalid chain is
//! returned to the guest unprocessed, and a broken ring is no longer served.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::buffers::{ChainError, RequestBuffers};
use super::{Interrupt, Memory};
use nacelle_base::guest_warn;
use nacelle_base::retry::retry_interrupted;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use virtio_queue::{Error, Queue, QueueOwnedT, QueueState, QueueT};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryError};

/// `VIRTQ_AVAIL_F_NO_INTERRUPT`.
const NO_INTERRUPT: u16 = 1;

/// A queue that a transport passes to a device.
pub struct Ring {
    index: u16,
    queue: Queue,
    memory: Arc<Memory>,
    kick: OwnedFd,
    interrupt: Arc<dyn Interrupt>,
    /// The number of requests returned since the guest was last notified.
    unnotified: u16,
    broken: bool,
}

/// One request of the guest.
#[derive(Debug)]
pub(crate) struct Request {
    /// The index of the first descriptor, for [`Ring::complete`].
    pub head: u16,
    /// The buffers of the request.
    pub buffers: RequestBuffers,
}

impl Ring {
    /// Creates a ring. `queue` must be ready and lie in `memory`. `kick` becomes readable when the guest has added buffers (an
    /// eventfd); it is made non-blocking.
    pub fn new(
        index: u16,
        queue: Queue,
        memory: Arc<Memory>,
        kick: OwnedFd,
        interrupt: Arc<dyn Interrupt>,
    ) -> io::Result<Ring> {
        let flags = OFlag::from_bits_retain(fcntl(&kick, FcntlArg::F_GETFL)?);
        fcntl(&kick, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        Ok(Ring { index, queue, memory, kick, interrupt, unnotified: 0, broken: false })
    }

    /// Returns the number of the queue in its device.
    pub fn index(&self) -> u16 {
        self.index
    }

    /// Returns the memory that holds the queue.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Returns the means to notify the guest.
    pub fn interrupt(&self) -> &Arc<dyn Interrupt> {
        &self.interrupt
    }

    /// Returns the addresses of the queue and the position in it.
    pub(crate) fn state(&self) -> QueueState {
        self.queue.state()
    }

    /// Sets the position after another component has served the queue up to this index of the available ring and has returned
    /// all requests that it took.
    pub(crate) fn set_next_available(&mut self, next_avail: u16) {
        self.queue.set_next_avail(next_avail);
        match self.queue.used_idx(&*self.memory, Ordering::Acquire) {
            Ok(used) => self.queue.set_next_used(used.0),
            Err(error) => self.mark_broken(&error),
        }
    }

    /// Sets the position after another component has served the queue in order and has ended: the next request is the first
    /// that was not returned.
    pub(crate) fn continue_after_used(&mut self) {
        match self.queue.used_idx(&*self.memory, Ordering::Acquire) {
            Ok(used) => self.set_next_available(used.0),
            Err(error) => self.mark_broken(&error),
        }
    }

    /// Kicks the queue, as the guest does.
    pub(crate) fn kick(&self) -> io::Result<()> {
        match retry_interrupted(|| nix::unistd::write(&self.kick, &1u64.to_ne_bytes())) {
            Ok(_) | Err(Errno::EAGAIN) => Ok(()), // a full counter is a kick too
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the state of a queue that is no longer served.
    pub fn into_state(self) -> QueueState {
        self.state()
    }

    /// Returns the next request, or `None` if there is none or the ring is broken. Invalid chains are returned to the guest
    /// with no bytes written, and skipped.
    pub(crate) fn pop(&mut self) -> Option<Request> {
        loop {
            let (head, buffers) = self.pop_with_error()?;
            match buffers {
                Ok(buffers) => return Some(Request { head, buffers }),
                Err(_invalid) => {
                    self.complete(head, 0);
                    self.notify_guest();
                }
            }
        }
    }

    /// Returns the next request, or the error in its chain. The caller must return an invalid chain to the guest in order, with
    /// no bytes written.
    pub(crate) fn pop_with_error(&mut self) -> Option<(u16, Result<RequestBuffers, ChainError>)> {
        while !self.broken {
            let memory = &*self.memory;
            let chain = match self.queue.iter(memory) {
                Ok(mut chains) => chains.next(),
                Err(error) => {
                    self.mark_broken(&error);
                    return None;
                }
            };
            let Some(chain) = chain else {
                // Either the queue is empty, or the ring itself cannot be read.
                let next = self.queue.next_avail();
                match self.queue.avail_idx(memory, Ordering::Acquire) {
                    Ok(index) if index.0 == next => return None,
                    Ok(_) if self.queue.iter(memory).is_ok_and(|mut chains| chains.next().is_some()) => {
                        self.queue.go_to_previous_position();
                        continue;
                    }
                    _ => self.mark_broken(&"the available ring cannot be read"),
                }
                return None;
            };
            let head = chain.head_index();
            let buffers = RequestBuffers::collect(memory, chain);
            if let Err(error) = &buffers {
                guest_warn!(queue = self.index, head, "the guest sent {error}");
            }
            return Some((head, buffers));
        }
        None
    }

    /// Returns whether [`pop`](Ring::pop) would find an entry. The check is cheap.
    pub(crate) fn has_pending(&self) -> bool {
        let next = self.queue.next_avail();
        !self.broken && self.queue.avail_idx(&*self.memory, Ordering::Acquire).is_ok_and(|index| index.0 != next)
    }

    /// Makes the last popped request the next one again. It must not be done yet.
    pub(crate) fn undo_pop(&mut self) {
        self.queue.go_to_previous_position();
    }

    /// Makes the last `count` popped requests the next ones again. None of them may be done yet.
    pub(crate) fn undo_pops(&mut self, count: u16) {
        self.queue.set_next_avail(self.queue.next_avail().wrapping_sub(count));
    }

    /// Returns a request to the guest, with `written` bytes in its writable buffers.
    pub(crate) fn complete(&mut self, head: u16, written: u32) {
        self.complete_together(&[(head, written)]);
    }

    /// Returns several requests at once: the guest sees all of them or none.
    pub(crate) fn complete_together(&mut self, used: &[(u16, u32)]) {
        if !self.broken
            && let Err(error) = self.write_used(used)
        {
            self.mark_broken(&error);
        }
    }

    /// Writes the entries behind the index of the used ring and then moves the index (Virtio 1.2, 2.7.8).
    fn write_used(&mut self, used: &[(u16, u32)]) -> Result<(), Error> {
        let (ring, size) = (GuestAddress(self.queue.used_ring()), self.queue.size().max(1));
        if used.iter().any(|(head, _)| *head >= size) {
            return Err(Error::InvalidDescriptorIndex);
        }
        let mut next = self.queue.next_used();
        for (head, written) in used {
            let slot = ring.unchecked_add(4 + 8 * u64::from(next % size)); // the queue was checked to lie in memory
            let element = u64::from(*head) | u64::from(*written) << 32; // le32 id, le32 len
            self.memory.write_obj(element.to_le(), slot).map_err(Error::GuestMemory)?;
            next = next.wrapping_add(1);
            self.unnotified = self.unnotified.saturating_add(1);
        }
        self.memory.store(next.to_le(), ring.unchecked_add(2), Ordering::Release).map_err(Error::GuestMemory)?;
        self.queue.set_next_used(next);
        Ok(())
    }

    /// Interrupts the guest if it requested a notification of the returned buffers.
    pub(crate) fn notify_guest(&mut self) {
        let completed = std::mem::take(&mut self.unnotified);
        if completed == 0 || self.broken {
            return;
        }
        match self.wants_interrupt(completed) {
            Ok(true) => self.interrupt.notify_queue(self.index),
            Ok(false) => {}
            Err(error) => self.mark_broken(&error),
        }
    }

    /// Returns whether the guest requested an interrupt within the last `completed` buffers (Virtio 1.2, 2.7.7 and 2.7.10).
    fn wants_interrupt(&self, completed: u16) -> Result<bool, GuestMemoryError> {
        let available = GuestAddress(self.queue.avail_ring());
        // The returned buffers must be visible before the request for a notification is read; otherwise both sides could wait.
        fence(Ordering::SeqCst);
        if self.queue.event_idx_enabled() {
            let at = available.unchecked_add(4 + 2 * u64::from(self.queue.size()));
            let event = u16::from_le(self.memory.load(at, Ordering::Relaxed)?);
            Ok(self.queue.next_used().wrapping_sub(event).wrapping_sub(1) < completed)
        } else {
            let flags = u16::from_le(self.memory.load(available, Ordering::Relaxed)?);
            Ok(flags & NO_INTERRUPT == 0)
        }
    }

    /// Asks the guest not to kick, because the queue is being polled.
    pub(crate) fn disable_kicks(&mut self) {
        if !self.broken
            && let Err(error) = self.queue.disable_notification(&*self.memory)
        {
            self.mark_broken(&error);
        }
    }

    /// Asks the guest to kick again. Returns `true` if a request has arrived meanwhile, so that the caller must look again.
    pub(crate) fn enable_kicks(&mut self) -> bool {
        if self.broken {
            return false;
        }
        match self.queue.enable_notification(&*self.memory) {
            Ok(more) => more,
            Err(error) => {
                self.mark_broken(&error);
                false
            }
        }
    }

    /// Asks the guest for a kick when it adds a request to those already available, whether popped or not. Returns the index of
    /// that next request.
    pub(crate) fn enable_kick_for_next(&mut self) -> u16 {
        let next = self.queue.next_avail();
        if self.broken {
            return next;
        }
        let mut available = next;
        // If the guest keeps adding requests, no kick is needed to notice them.
        for _ in 0..16 {
            let more = self.queue.avail_idx(&*self.memory, Ordering::Acquire).and_then(|index| {
                available = index.0;
                self.queue.set_next_avail(available);
                self.queue.enable_notification(&*self.memory)
            });
            match more {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    self.mark_broken(&error);
                    break;
                }
            }
        }
        self.queue.set_next_avail(next);
        available
    }

    /// Clears a kick. If the descriptor cannot be read, the ring is broken, so that no thread waits for it.
    pub(crate) fn clear_kick(&mut self) {
        match retry_interrupted(|| nix::unistd::read(&self.kick, &mut [0; 8])) {
            Ok(1..) | Err(Errno::EAGAIN) => {}
            Ok(_) | Err(_) => self.mark_broken(&"the kick descriptor cannot be read"),
        }
    }

    /// Marks the ring as broken: it is no longer served, and the guest is asked to reset the device.
    fn mark_broken(&mut self, why: &dyn std::fmt::Display) {
        if !std::mem::replace(&mut self.broken, true) {
            guest_warn!(queue = self.index, "the guest broke a queue: {why}");
            self.interrupt.report_broken(self.index);
        }
    }

    /// Returns whether the guest broke the ring, so that it is no longer served.
    pub(crate) fn is_broken(&self) -> bool {
        self.broken
    }
}

impl AsFd for Ring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.kick.as_fd()
    }
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").field("index", &self.index).field("broken", &self.broken).finish_non_exhaustive()
    }
}
