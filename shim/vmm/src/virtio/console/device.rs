//! Implements [`Device`] for the console (VIRTIO 1.2, 5.3): one port, its size, and emergency writes.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::State;
use super::handle::Shared;
use super::requests::serve;
use crate::virtio::worker::Served;
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
    shared: Arc<Shared>,
    served: Served,
}

impl ConsoleDevice {
    pub fn new(shared: Arc<Shared>) -> ConsoleDevice {
        let served = Served::none(DeviceKind::Console, QUEUES, shared.way.clone());
        ConsoleDevice { shared, served }
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
        let [c0, c1, r0, r1] = self.shared.size();
        read_config(&[c0, c1, r0, r1, 1, 0, 0, 0, 0, 0, 0, 0], offset, data);
    }

    fn write_config(&mut self, offset: u32, data: &[u8]) {
        if let (EMERGENCY, Some(character)) = (offset, data.first()) {
            self.shared.metrics.emergency_bytes.fetch_add(1, Ordering::Relaxed);
            self.shared.print(&[*character]);
        }
    }

    fn start(&mut self, ring: Ring) -> Result<(), StartError> {
        let shared = self.shared.clone();
        self.served.start(ring, move |index, memory, request| serve(&shared, index, memory, request))
    }

    fn stop(&mut self, index: u16) -> Option<QueueState> {
        self.served.stop(index)
    }

    fn reset(&mut self) {
        self.served.reset();
    }

    fn save(&self) -> DeviceState {
        let [c0, c1, r0, r1] = self.shared.size();
        DeviceState::Console(State { columns: u16::from_le_bytes([c0, c1]), rows: u16::from_le_bytes([r0, r1]) })
    }

    fn restore(&mut self, state: DeviceState) -> Result<(), StateError> {
        let DeviceState::Console(State { columns, rows }) = state else { return Err(state.wrong(self.kind())) };
        self.shared.set_size(columns, rows);
        Ok(())
    }
}

impl Drop for ConsoleDevice {
    fn drop(&mut self) {
        self.reset();
    }
}
