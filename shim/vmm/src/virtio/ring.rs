//! Owns: a queue with all that serving it takes: memory, kick, interrupt.

use super::{Interrupt, Memory};
use std::sync::Arc;
use virtio_queue::Queue;
use vmm_sys_util::eventfd::EventFd;

/// A queue that is handed to a device.
pub struct Ring {
    index: u16,
    queue: Queue,
    memory: Arc<Memory>,
    kick: EventFd,
    interrupt: Arc<dyn Interrupt>,
}

impl Ring {
    /// Puts a ring together. `queue` is ready and lies in `memory`; `kick` becomes readable when the guest has
    /// added buffers (level, not edge; a non-blocking one is not needed).
    pub fn new(index: u16, queue: Queue, memory: Arc<Memory>, kick: EventFd, interrupt: Arc<dyn Interrupt>) -> Ring {
        Ring { index, queue, memory, kick, interrupt }
    }

    /// Which queue of the device this is.
    pub fn index(&self) -> u16 {
        self.index
    }
}
