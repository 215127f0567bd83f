//! Delivers a device's interrupts to the guest: the interrupt's eventfd and the bits of InterruptStatus. The threads of the
//! devices, of the host and of the vCPUs use it; it takes no lock and never blocks.

use crate::sys;
use crate::virtio::Interrupt;
use nacelle_base::guest_error;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use vmm_sys_util::eventfd::EventFd;

/// A bit of InterruptStatus: the used ring of a queue has grown.
pub(super) const USED: u32 = 1;
/// A bit of InterruptStatus: the configuration space has changed, or the device needs a reset.
pub(super) const CONFIG: u32 = 2;

#[derive(Debug)]
pub(super) struct MmioInterrupt {
    irq: EventFd,
    status: AtomicU32,
    generation: AtomicU32,
    /// The driver has set DRIVER_OK, so it may be interrupted.
    enabled: AtomicBool,
    needs_reset: AtomicBool,
}

impl MmioInterrupt {
    pub(super) fn new(irq: EventFd) -> MmioInterrupt {
        MmioInterrupt {
            irq,
            status: AtomicU32::new(0),
            generation: AtomicU32::new(0),
            enabled: AtomicBool::new(false),
            needs_reset: AtomicBool::new(false),
        }
    }

    /// Returns InterruptStatus as the guest reads it. The bit for queues is set as long as the device is live, because other
    /// sources (vhost-net) interrupt too and because acknowledgements of this bit may not reach this process. As a result the
    /// driver checks its queues also on a configuration interrupt, which the specification allows.
    pub(super) fn status(&self) -> u32 {
        self.pending() | if self.enabled.load(Ordering::Acquire) { USED } else { 0 }
    }

    /// Returns the bits that the guest has not acknowledged, without [`USED`].
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

    /// Records that the configuration space has changed since the guest read it.
    pub(super) fn next_generation(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
    }

    /// Allows interrupts.
    pub(super) fn enable(&self) {
        self.enabled.store(true, Ordering::Release);
    }

    /// Disables interrupts, after the driver has reset the device or failed. The queues must have stopped before.
    pub(super) fn disable(&self) {
        self.enabled.store(false, Ordering::Release);
        self.needs_reset.store(false, Ordering::Release);
        self.status.store(0, Ordering::Release);
    }

    /// Restores the saved state.
    pub(super) fn restore(&self, pending: u32, generation: u32, enabled: bool, needs_reset: bool) {
        self.status.store(pending & !USED, Ordering::Release);
        self.generation.store(generation, Ordering::Release);
        self.needs_reset.store(needs_reset, Ordering::Release);
        self.enabled.store(enabled, Ordering::Release);
    }

    /// Sends one more interrupt, because one may have been lost while the VM was paused. A spurious interrupt does no harm.
    pub(super) fn resend(&self) {
        self.write_eventfd();
    }

    fn raise_status_bit(&self, bit: u32) {
        if self.enabled.load(Ordering::Acquire) {
            self.status.fetch_or(bit, Ordering::AcqRel);
            self.write_eventfd();
        }
    }

    fn write_eventfd(&self) {
        if self.enabled.load(Ordering::Acquire)
            && let Err(error) = self.irq.write(1)
        {
            guest_error!("cannot interrupt a guest: {error}");
        }
    }
}

impl Interrupt for MmioInterrupt {
    fn notify_queue(&self, _index: u16) {
        self.write_eventfd();
    }

    fn notify_config(&self) {
        self.next_generation();
        self.raise_status_bit(CONFIG);
    }

    fn report_broken(&self, _index: u16) {
        self.needs_reset.store(true, Ordering::Release);
        self.raise_status_bit(CONFIG);
    }

    fn interrupt_eventfd(&self, _index: u16) -> Option<OwnedFd> {
        let copied = sys::duplicate(&self.irq);
        copied.inspect_err(|error| guest_error!("cannot copy an interrupt: {error}")).ok()
    }
}
