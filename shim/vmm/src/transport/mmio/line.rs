//! Owns: the way from a device to the guest: the interrupt's eventfd and the bits that say what it is for.
//! Threads: used from the devices' threads, the host's and the virtual processors'; holds no lock and never waits.

use crate::sys;
use crate::virtio::Interrupt;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use vmm_sys_util::eventfd::EventFd;

/// In InterruptStatus: the used ring of a queue has grown.
pub(super) const USED: u32 = 1;
/// In InterruptStatus: the configuration space has changed, or the device needs a reset.
pub(super) const CONFIG: u32 = 2;

#[derive(Debug)]
pub(super) struct Line {
    irq: EventFd,
    status: AtomicU32,
    generation: AtomicU32,
    /// The driver has said DRIVER_OK: it may be interrupted.
    live: AtomicBool,
    needs_reset: AtomicBool,
}

impl Line {
    pub(super) fn new(irq: EventFd) -> Line {
        Line {
            irq,
            status: AtomicU32::new(0),
            generation: AtomicU32::new(0),
            live: AtomicBool::new(false),
            needs_reset: AtomicBool::new(false),
        }
    }

    /// InterruptStatus as the guest reads it. The bit for queues is set as long as the device is live, because others
    /// interrupt too (vhost-net), and because acknowledging it need not reach us: for a configuration interrupt the
    /// driver looks at its queues once more than it needs to, which the specification lets it.
    pub(super) fn status(&self) -> u32 {
        self.pending() | if self.live.load(Ordering::Acquire) { USED } else { 0 }
    }

    /// The bits that the guest has not acknowledged, without [`USED`].
    pub(super) fn pending(&self) -> u32 {
        self.status.load(Ordering::Acquire)
    }

    pub(super) fn acknowledge(&self, bits: u32) {
        self.status.fetch_and(!bits, Ordering::AcqRel);
    }

    pub(super) fn needs_reset(&self) -> bool {
        self.needs_reset.load(Ordering::Acquire)
    }

    pub(super) fn generation(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }

    /// The configuration space has changed since the guest looked at it.
    pub(super) fn next_generation(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
    }

    /// From now on the driver may be interrupted.
    pub(super) fn open(&self) {
        self.live.store(true, Ordering::Release);
    }

    /// The driver has begun anew, or failed: it is not interrupted. The queues have stopped before.
    pub(super) fn close(&self) {
        self.live.store(false, Ordering::Release);
        self.needs_reset.store(false, Ordering::Release);
        self.status.store(0, Ordering::Release);
    }

    /// Goes on from what was saved.
    pub(super) fn restore(&self, pending: u32, generation: u32, live: bool, needs_reset: bool) {
        self.status.store(pending & !USED, Ordering::Release);
        self.generation.store(generation, Ordering::Release);
        self.needs_reset.store(needs_reset, Ordering::Release);
        self.live.store(live, Ordering::Release);
    }

    /// Interrupts once more: an interrupt may have been on its way while the machine stood still. One too many does no
    /// harm.
    pub(super) fn remind(&self) {
        self.fire();
    }

    fn raise(&self, bit: u32) {
        if self.live.load(Ordering::Acquire) {
            self.status.fetch_or(bit, Ordering::AcqRel);
            self.fire();
        }
    }

    fn fire(&self) {
        if self.live.load(Ordering::Acquire)
            && let Err(error) = self.irq.write(1)
        {
            tracing::error!("cannot interrupt a guest: {error}");
        }
    }
}

impl Interrupt for Line {
    fn queue(&self, _index: u16) {
        self.fire();
    }

    fn config(&self) {
        self.next_generation();
        self.raise(CONFIG);
    }

    fn broken(&self, _index: u16) {
        self.needs_reset.store(true, Ordering::Release);
        self.raise(CONFIG);
    }

    fn eventfd(&self, _index: u16) -> Option<OwnedFd> {
        let copied = sys::duplicate(&self.irq);
        copied.inspect_err(|error| tracing::error!("cannot copy an interrupt: {error}")).ok()
    }
}
