//! Defines the host's handle to a balloon, which sets its target size and reads its statistics. The lock `statistics` is held
//! only briefly.

use super::BalloonMetrics;
use super::device::BalloonDevice;
use crate::virtio::Device;
use crate::virtio::worker::DeviceNotifier;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// A balloon in a guest's memory. Clones are handles to the same balloon.
#[derive(Clone, Debug, Default)]
pub struct Balloon(Arc<BalloonInner>);

/// The state that handle and device share.
#[derive(Debug, Default)]
pub(crate) struct BalloonInner {
    /// The number of pages that the host requests, and the number that the guest reports.
    pub(super) target: AtomicU32,
    pub(super) actual: AtomicU32,
    pub(super) metrics: BalloonMetrics,
    /// Whether the statistics queue has been negotiated.
    pub(super) statistics_negotiated: AtomicBool,
    statistics_requested: AtomicBool,
    statistics: Mutex<Option<Statistics>>,
    pub(super) notifier: Arc<DeviceNotifier>,
}

/// The statistics that a guest's kernel reports about its memory (VIRTIO 1.2, 5.5.6.4), in bytes or in events since boot. They
/// are not verified: use them for display, not for limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Bytes swapped in.
    pub swapped_in: Option<u64>,
    /// Bytes swapped out.
    pub swapped_out: Option<u64>,
    /// Page faults that needed I/O.
    pub major_faults: Option<u64>,
    /// Page faults that needed no I/O.
    pub minor_faults: Option<u64>,
    /// Unused bytes.
    pub free: Option<u64>,
    /// Total memory in bytes.
    pub total: Option<u64>,
    /// Bytes that programs could allocate without swapping.
    pub available: Option<u64>,
    /// Bytes of the page cache.
    pub caches: Option<u64>,
}

impl Statistics {
    /// Parses entries of a tag and a value, without padding. Unknown tags and an incomplete entry at the end are skipped.
    pub(super) fn parse(bytes: &[u8]) -> Statistics {
        let mut all = Statistics::default();
        let (entries, _rest) = bytes.as_chunks::<10>();
        for [t0, t1, value @ ..] in entries {
            let field = match u16::from_le_bytes([*t0, *t1]) {
                0 => &mut all.swapped_in,
                1 => &mut all.swapped_out,
                2 => &mut all.major_faults,
                3 => &mut all.minor_faults,
                4 => &mut all.free,
                5 => &mut all.total,
                6 => &mut all.available,
                7 => &mut all.caches,
                _ => continue,
            };
            *field = Some(u64::from_le_bytes(*value));
        }
        all
    }
}

impl Balloon {
    /// Creates an empty balloon.
    pub fn new() -> Balloon {
        Balloon::default()
    }

    /// Sets the number of pages of 4 KiB that the guest should have in the balloon. The guest complies as far and as soon as it can.
    pub fn set_target(&self, pages: u32) {
        self.0.target.store(pages, Ordering::SeqCst);
        self.0.notifier.notify_config();
    }

    /// Returns the requested number of pages of 4 KiB.
    pub fn target(&self) -> u32 {
        self.0.target.load(Ordering::SeqCst)
    }

    /// Returns the number of pages of 4 KiB that the guest reports to be in the balloon.
    pub fn actual(&self) -> u32 {
        self.0.actual.load(Ordering::SeqCst)
    }

    /// Requests new statistics from the guest, which arrive at some later time.
    pub fn request_statistics(&self) {
        self.0.statistics_requested.store(true, Ordering::SeqCst);
        self.0.notifier.wake_thread();
    }

    /// Returns the last statistics of the guest, if any. The guest sends the first ones unasked.
    pub fn statistics(&self) -> Option<Statistics> {
        *self.0.statistics()
    }

    /// Returns the counters.
    pub fn metrics(&self) -> &BalloonMetrics {
        &self.0.metrics
    }

    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn inner(&self) -> &BalloonInner {
        &self.0
    }

    /// Returns the device for a transport.
    pub fn device(&self) -> Box<dyn Device> {
        Box::new(BalloonDevice::new(self.0.clone()))
    }
}

impl BalloonInner {
    fn statistics(&self) -> MutexGuard<'_, Option<Statistics>> {
        self.statistics.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(super) fn set_statistics(&self, statistics: Statistics) {
        *self.statistics() = Some(statistics);
    }

    /// Returns and clears whether statistics have been requested.
    pub(super) fn take_statistics_request(&self) -> bool {
        self.statistics_requested.swap(false, Ordering::SeqCst)
    }
}
