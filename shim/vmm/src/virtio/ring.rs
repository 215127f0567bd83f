//! Owns: a queue with all that serving it takes: memory, kick, interrupt; and what happens when the guest's
//! driver breaks its rules: a bad chain is given back empty, a bad ring is served no more.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::pieces::{BadChain, Buffers};
use super::{Interrupt, Memory};
use crate::guest_warn;
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

/// A queue that is handed to a device.
pub struct Ring {
    index: u16,
    queue: Queue,
    memory: Arc<Memory>,
    kick: OwnedFd,
    interrupt: Arc<dyn Interrupt>,
    /// Requests given back since the guest was told last.
    unsignalled: u16,
    broken: bool,
}

/// One request of the guest.
#[derive(Debug)]
pub(crate) struct Request {
    /// Its number, for [`Ring::done`].
    pub head: u16,
    /// Its buffers.
    pub buffers: Buffers,
}

impl Ring {
    /// Puts a ring together. `queue` is ready and lies in `memory`; `kick` becomes readable when the guest has
    /// added buffers (an eventfd), and is made non-blocking.
    pub fn new(
        index: u16,
        queue: Queue,
        memory: Arc<Memory>,
        kick: OwnedFd,
        interrupt: Arc<dyn Interrupt>,
    ) -> io::Result<Ring> {
        let flags = OFlag::from_bits_retain(fcntl(&kick, FcntlArg::F_GETFL)?);
        fcntl(&kick, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        Ok(Ring { index, queue, memory, kick, interrupt, unsignalled: 0, broken: false })
    }

    /// Which queue of the device this is.
    pub fn index(&self) -> u16 {
        self.index
    }

    /// The memory in which it lies.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// How the guest is told things.
    pub fn interrupt(&self) -> &Arc<dyn Interrupt> {
        &self.interrupt
    }

    /// Where it lies and how far it is served.
    pub(crate) fn state(&self) -> QueueState {
        self.queue.state()
    }

    /// Somebody else has served it up to this index of the available ring, and has given back all that it took.
    pub(crate) fn served_until(&mut self, next_avail: u16) {
        self.queue.set_next_avail(next_avail);
        match self.queue.used_idx(&*self.memory, Ordering::Acquire) {
            Ok(used) => self.queue.set_next_used(used.0),
            Err(error) => self.breaks(&error),
        }
    }

    /// Somebody else has served it, gave requests back in their order, and has gone: the next is the first that is not
    /// given back.
    pub(crate) fn served_in_order(&mut self) {
        match self.queue.used_idx(&*self.memory, Ordering::Acquire) {
            Ok(used) => self.served_until(used.0),
            Err(error) => self.breaks(&error),
        }
    }

    /// Kicks, as the guest does.
    pub(crate) fn kick(&self) -> io::Result<()> {
        match retry_interrupted(|| nix::unistd::write(&self.kick, &1u64.to_ne_bytes())) {
            Ok(_) | Err(Errno::EAGAIN) => Ok(()), // a full counter is a kick too
            Err(error) => Err(error.into()),
        }
    }

    /// What is left when the ring is served no more.
    pub fn into_state(self) -> QueueState {
        self.state()
    }

    /// The next request, or `None` if there is none (or the ring is broken). Chains that make no sense are given
    /// back with no bytes written and skipped.
    pub(crate) fn pop(&mut self) -> Option<Request> {
        loop {
            let (head, buffers) = self.pop_any()?;
            match buffers {
                Ok(buffers) => return Some(Request { head, buffers }),
                Err(_senseless) => {
                    self.done(head, 0);
                    self.signal();
                }
            }
        }
    }

    /// The next request, or what is wrong with it: then it is to be given back with no bytes written, in its turn.
    pub(crate) fn pop_any(&mut self) -> Option<(u16, Result<Buffers, BadChain>)> {
        while !self.broken {
            let memory = &*self.memory;
            let chain = match self.queue.iter(memory) {
                Ok(mut chains) => chains.next(),
                Err(error) => {
                    self.breaks(&error);
                    return None;
                }
            };
            let Some(chain) = chain else {
                // Either nothing is there, or the ring itself cannot be read.
                let next = self.queue.next_avail();
                match self.queue.avail_idx(memory, Ordering::Acquire) {
                    Ok(index) if index.0 == next => return None,
                    Ok(_) if self.queue.iter(memory).is_ok_and(|mut chains| chains.next().is_some()) => {
                        self.queue.go_to_previous_position();
                        continue;
                    }
                    _ => self.breaks(&"its ring cannot be read"),
                }
                return None;
            };
            let head = chain.head_index();
            let buffers = Buffers::collect(memory, chain);
            if let Err(error) = &buffers {
                guest_warn!(queue = self.index, head, "the guest sent {error}");
            }
            return Some((head, buffers));
        }
        None
    }

    /// Whether [`pop`](Ring::pop) would look at something. Costs little.
    pub(crate) fn has_more(&self) -> bool {
        let next = self.queue.next_avail();
        !self.broken && self.queue.avail_idx(&*self.memory, Ordering::Acquire).is_ok_and(|index| index.0 != next)
    }

    /// Puts a request back, so that it is the next one again. Only for the one popped last and not done.
    pub(crate) fn unpop(&mut self) {
        self.queue.go_to_previous_position();
    }

    /// Puts the last `count` requests back. Only for those popped last, and none of them done.
    pub(crate) fn unpop_many(&mut self, count: u16) {
        self.queue.set_next_avail(self.queue.next_avail().wrapping_sub(count));
    }

    /// Gives a request back to the guest with `written` bytes in its writable buffers.
    pub(crate) fn done(&mut self, head: u16, written: u32) {
        self.done_together(&[(head, written)]);
    }

    /// Gives several requests back at once: the guest sees all of them or none.
    pub(crate) fn done_together(&mut self, used: &[(u16, u32)]) {
        if !self.broken
            && let Err(error) = self.publish(used)
        {
            self.breaks(&error);
        }
    }

    /// Fills the used ring behind its index and then moves the index (Virtio 1.2, 2.7.8).
    fn publish(&mut self, used: &[(u16, u32)]) -> Result<(), Error> {
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
            self.unsignalled = self.unsignalled.saturating_add(1);
        }
        self.memory.store(next.to_le(), ring.unchecked_add(2), Ordering::Release).map_err(Error::GuestMemory)?;
        self.queue.set_next_used(next);
        Ok(())
    }

    /// Interrupts the guest if it wants to know of what was given back.
    pub(crate) fn signal(&mut self) {
        let given = std::mem::take(&mut self.unsignalled);
        if given == 0 || self.broken {
            return;
        }
        match self.wants_signal(given) {
            Ok(true) => self.interrupt.queue(self.index),
            Ok(false) => {}
            Err(error) => self.breaks(&error),
        }
    }

    /// Whether the guest asked for an interrupt within the last `given` buffers (Virtio 1.2, 2.7.7 and 2.7.10).
    fn wants_signal(&self, given: u16) -> Result<bool, GuestMemoryError> {
        let available = GuestAddress(self.queue.avail_ring());
        // What was given back is visible before the wish is read, or both sides could wait.
        fence(Ordering::SeqCst);
        if self.queue.event_idx_enabled() {
            let at = available.unchecked_add(4 + 2 * u64::from(self.queue.size()));
            let event = u16::from_le(self.memory.load(at, Ordering::Relaxed)?);
            Ok(self.queue.next_used().wrapping_sub(event).wrapping_sub(1) < given)
        } else {
            let flags = u16::from_le(self.memory.load(available, Ordering::Relaxed)?);
            Ok(flags & NO_INTERRUPT == 0)
        }
    }

    /// Tells the guest that no kick is needed: the queue is being looked at.
    pub(crate) fn quiet(&mut self) {
        if !self.broken
            && let Err(error) = self.queue.disable_notification(&*self.memory)
        {
            self.breaks(&error);
        }
    }

    /// Asks the guest to kick again. `true`: something came meanwhile, look again.
    pub(crate) fn rearm(&mut self) -> bool {
        if self.broken {
            return false;
        }
        match self.queue.enable_notification(&*self.memory) {
            Ok(more) => more,
            Err(error) => {
                self.breaks(&error);
                false
            }
        }
    }

    /// Asks the guest to kick when it adds a request to those that it has made available, also if they were not
    /// popped yet; returns the index of that next one.
    pub(crate) fn await_more(&mut self) -> u16 {
        let next = self.queue.next_avail();
        if self.broken {
            return next;
        }
        let mut offered = next;
        // A guest that adds requests all the time needs no kick to be seen.
        for _ in 0..16 {
            let more = self.queue.avail_idx(&*self.memory, Ordering::Acquire).and_then(|index| {
                offered = index.0;
                self.queue.set_next_avail(offered);
                self.queue.enable_notification(&*self.memory)
            });
            match more {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    self.breaks(&error);
                    break;
                }
            }
        }
        self.queue.set_next_avail(next);
        offered
    }

    /// Takes note of a kick. A descriptor that cannot be read breaks the ring, so that nobody waits on it.
    pub(crate) fn kicked(&mut self) {
        match retry_interrupted(|| nix::unistd::read(&self.kick, &mut [0; 8])) {
            Ok(1..) | Err(Errno::EAGAIN) => {}
            Ok(_) | Err(_) => self.breaks(&"its kick cannot be read"),
        }
    }

    /// The ring is served no more, and the guest is told to reset the device.
    fn breaks(&mut self, why: &dyn std::fmt::Display) {
        if !std::mem::replace(&mut self.broken, true) {
            guest_warn!(queue = self.index, "the guest broke a queue: {why}");
            self.interrupt.broken(self.index);
        }
    }

    /// Whether the ring is served no more because the guest broke it.
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
