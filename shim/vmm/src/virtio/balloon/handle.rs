//! Owns: the host's handle to a balloon: how much the guest should give, and what it says.
//! Threads: `statistics` is held for moments only.

use super::Metrics;
use super::device::BalloonDevice;
use crate::virtio::Device;
use crate::virtio::worker::Way;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// A balloon in a guest's memory. Clones are handles to the same one.
#[derive(Clone, Debug, Default)]
pub struct Balloon(Arc<Shared>);

/// What handle and device share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// Pages that the host wants in the balloon, and that the guest says are.
    pub(super) target: AtomicU32,
    pub(super) actual: AtomicU32,
    pub(super) metrics: Metrics,
    /// Whether the driver uses the statistics queue.
    pub(super) statistics_agreed: AtomicBool,
    wish: AtomicBool,
    statistics: Mutex<Option<Statistics>>,
    pub(super) way: Arc<Way>,
}

/// What a guest's kernel says of its memory (VIRTIO 1.2, 5.5.6.4), in bytes or events since its start. Only the
/// guest's word: fit for display, not for limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Bytes swapped in.
    pub swapped_in: Option<u64>,
    /// Bytes swapped out.
    pub swapped_out: Option<u64>,
    /// Page faults that needed I/O.
    pub major_faults: Option<u64>,
    /// Page faults that did not.
    pub minor_faults: Option<u64>,
    /// Unused bytes.
    pub free: Option<u64>,
    /// All bytes.
    pub total: Option<u64>,
    /// Bytes that programs could have without swapping.
    pub available: Option<u64>,
    /// Bytes of the page cache.
    pub caches: Option<u64>,
}

impl Statistics {
    /// Entries of a tag and a value, without padding; unknown tags and what is left over are skipped.
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
    /// An empty balloon.
    pub fn new() -> Balloon {
        Balloon::default()
    }

    /// Asks the guest to have `pages` pages of 4 KiB in the balloon. It does so as well as it can, when it can.
    pub fn set_target(&self, pages: u32) {
        self.0.target.store(pages, Ordering::SeqCst);
        self.0.way.config_changed();
    }

    /// Pages of 4 KiB that the guest should have in the balloon.
    pub fn target(&self) -> u32 {
        self.0.target.load(Ordering::SeqCst)
    }

    /// Pages of 4 KiB that it says are in there.
    pub fn actual(&self) -> u32 {
        self.0.actual.load(Ordering::SeqCst)
    }

    /// Asks the guest for news of its memory; they come when they come.
    pub fn ask_statistics(&self) {
        self.0.wish.store(true, Ordering::SeqCst);
        self.0.way.ring();
    }

    /// The last news of the guest's memory; it tells once without being asked.
    pub fn statistics(&self) -> Option<Statistics> {
        *self.0.statistics()
    }

    /// What it has done.
    pub fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn shared(&self) -> &Shared {
        &self.0
    }

    /// The device for a transport.
    pub fn device(&self) -> Box<dyn Device> {
        Box::new(BalloonDevice::new(self.0.clone()))
    }
}

impl Shared {
    fn statistics(&self) -> MutexGuard<'_, Option<Statistics>> {
        self.statistics.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(super) fn heard(&self, statistics: Statistics) {
        *self.statistics() = Some(statistics);
    }

    /// Whether somebody has asked for news since the last time.
    pub(super) fn take_wish(&self) -> bool {
        self.wish.swap(false, Ordering::SeqCst)
    }
}
