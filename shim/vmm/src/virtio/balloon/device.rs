//! Implements [`Device`] for the balloon (VIRTIO 1.2, 5.5).
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::BalloonState;
use super::handle::BalloonInner;
use super::requests::serve;
use crate::virtio::worker::ServedQueues;
use crate::virtio::{COMMON_FEATURES, Device, DeviceKind, DeviceState, Ring, StartError, StateError, read_config};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use virtio_queue::QueueState;

/// The sizes of the inflate, deflate, statistics and reporting queue. Linux sends one request at a time on each.
const QUEUES: &[u16] = &[128, 128, 64, 128];

const STATS_VQ: u64 = 1 << 1;
const DEFLATE_ON_OOM: u64 = 1 << 2;
const REPORTING: u64 = 1 << 5;

/// The offset of `actual`, the number of pages that the driver has put into the balloon.
const ACTUAL: usize = 4;

#[derive(Debug)]
pub(super) struct BalloonDevice {
    inner: Arc<BalloonInner>,
    queues: ServedQueues,
}

impl BalloonDevice {
    pub fn new(inner: Arc<BalloonInner>) -> BalloonDevice {
        let queues = ServedQueues::new(DeviceKind::Balloon, QUEUES, inner.notifier.clone());
        BalloonDevice { inner, queues }
    }

    fn config(&self) -> [u8; 8] {
        let [t0, t1, t2, t3] = self.inner.target.load(Ordering::SeqCst).to_le_bytes();
        let [a0, a1, a2, a3] = self.inner.actual.load(Ordering::SeqCst).to_le_bytes();
        [t0, t1, t2, t3, a0, a1, a2, a3]
    }
}

impl Device for BalloonDevice {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Balloon
    }

    fn features(&self) -> u64 {
        COMMON_FEATURES | STATS_VQ | DEFLATE_ON_OOM | REPORTING
    }

    fn acknowledge(&mut self, features: u64) {
        self.inner.statistics_negotiated.store(features & STATS_VQ != 0, Ordering::SeqCst);
    }

    fn queue_sizes(&self) -> &'static [u16] {
        QUEUES
    }

    fn read_config(&self, offset: u32, data: &mut [u8]) {
        read_config(&self.config(), offset, data);
    }

    fn write_config(&mut self, offset: u32, data: &[u8]) {
        let mut config = self.config();
        let old = config.iter_mut().enumerate().skip(offset as usize);
        for ((at, old), new) in old.zip(data) {
            if at >= ACTUAL {
                *old = *new;
            }
        }
        let [.., a0, a1, a2, a3] = config;
        self.inner.actual.store(u32::from_le_bytes([a0, a1, a2, a3]), Ordering::SeqCst);
    }

    fn start(&mut self, ring: Ring) -> Result<(), StartError> {
        let inner = self.inner.clone();
        self.queues.start(ring, move |index, memory, request| serve(&inner, index, memory, request))
    }

    fn stop(&mut self, index: u16) -> Option<QueueState> {
        self.queues.stop(index)
    }

    fn reset(&mut self) {
        self.queues.reset();
        self.inner.actual.store(0, Ordering::SeqCst);
    }

    fn save(&self) -> DeviceState {
        let pages = |number: &AtomicU32| number.load(Ordering::SeqCst);
        DeviceState::Balloon(BalloonState { target: pages(&self.inner.target), actual: pages(&self.inner.actual) })
    }

    fn restore(&mut self, state: DeviceState) -> Result<(), StateError> {
        let DeviceState::Balloon(BalloonState { target, actual }) = state else { return Err(state.wrong(self.kind())) };
        self.inner.target.store(target, Ordering::SeqCst);
        self.inner.actual.store(actual, Ordering::SeqCst);
        Ok(())
    }
}

impl Drop for BalloonDevice {
    fn drop(&mut self) {
        self.reset();
    }
}
