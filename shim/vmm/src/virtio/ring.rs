//! Owns: a queue with all that serving it takes: memory, kick, interrupt; and what happens when the guest's
//! driver breaks its rules: a bad chain is given back empty, a bad ring is served no more.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::pieces::Buffers;
use super::{Interrupt, Memory};
use crate::guest_warn;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use virtio_queue::{Queue, QueueOwnedT, QueueState, QueueT};

/// A queue that is handed to a device.
pub struct Ring {
    index: u16,
    queue: Queue,
    memory: Arc<Memory>,
    kick: OwnedFd,
    interrupt: Arc<dyn Interrupt>,
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
        Ok(Ring { index, queue, memory, kick, interrupt, broken: false })
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

    /// What is left when the ring is served no more.
    pub fn into_state(self) -> QueueState {
        self.queue.state()
    }

    /// The next request, or `None` if there is none (or the ring is broken). Chains that make no sense are given
    /// back with no bytes written and skipped.
    pub(crate) fn pop(&mut self) -> Option<Request> {
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
            match Buffers::collect(memory, chain) {
                Ok(buffers) => return Some(Request { head, buffers }),
                Err(error) => {
                    guest_warn!(queue = self.index, head, "the guest sent {error}");
                    self.done(head, 0);
                    self.signal();
                }
            }
        }
        None
    }

    /// Puts a request back, so that it is the next one again. Only for the one popped last and not done.
    pub(crate) fn unpop(&mut self) {
        self.queue.go_to_previous_position();
    }

    /// Gives a request back to the guest with `written` bytes in its writable buffers.
    pub(crate) fn done(&mut self, head: u16, written: u32) {
        if !self.broken
            && let Err(error) = self.queue.add_used(&*self.memory, head, written)
        {
            self.breaks(&error);
        }
    }

    /// Interrupts the guest if it wants to know of what was given back.
    pub(crate) fn signal(&mut self) {
        match self.queue.needs_notification(&*self.memory) {
            Ok(true) => self.interrupt.queue(self.index),
            Ok(false) => {}
            Err(error) => self.breaks(&error),
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
        match nix::unistd::read(&self.kick, &mut [0; 8]) {
            Ok(1..) | Err(Errno::EAGAIN | Errno::EINTR) => {}
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
