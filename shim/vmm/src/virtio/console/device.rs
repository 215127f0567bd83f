//! Implements [`Device`] for the console (VIRTIO 1.2, 5.3): one port, its size, and emergency writes.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::ConsoleState;
use super::handle::ConsoleInner;
use super::requests::serve;
use crate::virtio::worker::ServedQueues;
use crate::virtio::{COMMON_FEATURES, Device, DeviceKind, DeviceState, Ring, StartError, StateError, read_config};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use virtio_queue::QueueState;

/// The sizes of the input and the output queue.
const QUEUES: &[u16] = &[64, 64];

const SIZE: u64 = 1 << 0;
const EMERGENCY_WRITE: u64 = 1 << 2;

/// The offset of the emergency-write register, to which the driver, or a kernel without a driver yet, writes single characters.
const EMERGENCY: u32 = 8;

#[derive(Debug)]
pub(super) struct ConsoleDevice {
    inner: Arc<ConsoleInner>,
    queues: ServedQueues,
}

impl ConsoleDevice {
    pub fn new(inner: Arc<ConsoleInner>) -> ConsoleDevice {
        let queues = ServedQueues::new(DeviceKind::Console, QUEUES, inner.notifier.clone());
        ConsoleDevice { inner, queues }
    }
}

impl Device for ConsoleDevice {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Console
    }

    fn features(&self) -> u64 {
        COMMON_FEATURES | SIZE | EMERGENCY_WRITE
    }

    fn queue_sizes(&self) -> &'static [u16] {
        QUEUES
    }

    fn read_config(&self, offset: u32, data: &mut [u8]) {
        // One port; the emergency-write register reads as 0.
        let [c0, c1, r0, r1] = self.inner.size();
        read_config(&[c0, c1, r0, r1, 1, 0, 0, 0, 0, 0, 0, 0], offset, data);
    }

    fn write_config(&mut self, offset: u32, data: &[u8]) {
        if let (EMERGENCY, Some(character)) = (offset, data.first()) {
            self.inner.metrics.emergency_bytes.fetch_add(1, Ordering::Relaxed);
            self.inner.print(&[*character]);
        }
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
    }

    fn save(&self) -> DeviceState {
        let [c0, c1, r0, r1] = self.inner.size();
        DeviceState::Console(ConsoleState { columns: u16::from_le_bytes([c0, c1]), rows: u16::from_le_bytes([r0, r1]) })
    }

    fn restore(&mut self, state: DeviceState) -> Result<(), StateError> {
        let DeviceState::Console(ConsoleState { columns, rows }) = state else { return Err(state.wrong(self.kind())) };
        self.inner.set_size(columns, rows);
        Ok(())
    }
}

impl Drop for ConsoleDevice {
    fn drop(&mut self) {
        self.reset();
    }
}
