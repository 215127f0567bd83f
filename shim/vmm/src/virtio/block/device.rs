//! Implements [`Device`] for a slot: features, configuration space and the one queue.

use super::SECTOR;
use super::slot::SlotInner;
use super::state::BlockState;
use super::worker;
use crate::virtio::queue_thread::QueueThread;
use crate::virtio::{
    COMMON_FEATURES, Device, DeviceKind, DeviceState, Memory, Ring, StartError, StateError, read_config,
};
use std::sync::Arc;
use virtio_queue::QueueState;

const F_SEG_MAX: u64 = 1 << 2;
const F_RO: u64 = 1 << 5;
const F_BLK_SIZE: u64 = 1 << 6;
const F_FLUSH: u64 = 1 << 9;
const F_TOPOLOGY: u64 = 1 << 10;
const F_DISCARD: u64 = 1 << 13;
const F_WRITE_ZEROES: u64 = 1 << 14;

const QUEUE_SIZE: u16 = 256;
/// The maximum number of data segments in a request: the size of a queue less header and status.
const SEG_MAX: u32 = 254;
/// The host's blocks have 2^3 sectors.
const PHYSICAL_EXPONENT: u8 = 3;

/// The maximum number of sectors in one segment of a discard (2 GiB).
pub(super) const MAX_DISCARD_SECTORS: u32 = 1 << 22;
/// The maximum number of sectors in one segment of a write-zeroes (128 MiB).
pub(super) const MAX_ZEROES_SECTORS: u32 = 1 << 18;
/// The maximum number of segments in a discard or write-zeroes.
pub(super) const MAX_RANGES: u32 = 32;

/// The device of a slot.
#[derive(Debug)]
pub(super) struct SlotDevice {
    inner: Arc<SlotInner>,
    thread: Option<QueueThread>,
}

impl SlotDevice {
    pub(super) fn new(inner: Arc<SlotInner>) -> SlotDevice {
        SlotDevice { inner, thread: None }
    }

    /// Returns the configuration space (`struct virtio_blk_config`).
    fn config(&self) -> Vec<u8> {
        let mut config = Vec::with_capacity(60);
        config.extend((self.inner.view().capacity() / SECTOR).to_le_bytes());
        config.extend(0u32.to_le_bytes()); // size_max: not offered
        config.extend(SEG_MAX.to_le_bytes());
        config.extend([0; 4]); // geometry: not offered
        config.extend((SECTOR as u32).to_le_bytes()); // blk_size
        config.extend([PHYSICAL_EXPONENT, 0]); // and the alignment offset
        config.extend(1u16.to_le_bytes()); // min_io_size
        config.extend(0u32.to_le_bytes()); // opt_io_size
        config.extend([1, 0]); // writeback, unused
        config.extend(1u16.to_le_bytes()); // num_queues
        config.extend(MAX_DISCARD_SECTORS.to_le_bytes());
        config.extend(MAX_RANGES.to_le_bytes());
        config.extend((1u32 << PHYSICAL_EXPONENT).to_le_bytes()); // discard_sector_alignment
        config.extend(MAX_ZEROES_SECTORS.to_le_bytes());
        config.extend(MAX_RANGES.to_le_bytes());
        config.extend([1, 0, 0, 0]); // write_zeroes_may_unmap, unused
        config
    }
}

impl Device for SlotDevice {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Block
    }

    fn features(&self) -> u64 {
        let both = COMMON_FEATURES | F_SEG_MAX | F_BLK_SIZE | F_TOPOLOGY | F_FLUSH;
        both | if self.inner.view().is_read_only() { F_RO } else { F_DISCARD | F_WRITE_ZEROES }
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    fn read_config(&self, offset: u32, data: &mut [u8]) {
        read_config(&self.config(), offset, data);
    }

    fn start(&mut self, ring: Ring) -> Result<(), StartError> {
        let (device, index) = (self.kind(), ring.index());
        if index != 0 {
            return Err(StartError::NoSuchQueue { device, index });
        }
        if self.thread.is_some() {
            return Err(StartError::Running { device, index });
        }
        let interrupt = ring.interrupt().clone();
        let (first, last) = (self.inner.clone(), self.inner.clone());
        let name = format!("blk-{}", self.inner.serial);
        let begin = move |memory: &Memory, request| worker::try_serve(&first, memory, request);
        let finish = move |memory: &Memory, job| worker::serve(&last, memory, &job);
        let thread = QueueThread::start(&name, ring, begin, finish).map_err(|source| StartError::Thread {
            device,
            index,
            source,
        })?;
        self.thread = Some(thread);
        self.inner.set_interrupt(Some(interrupt));
        Ok(())
    }

    fn stop(&mut self, index: u16) -> Option<QueueState> {
        if index != 0 {
            return None;
        }
        let thread = self.thread.take()?;
        self.inner.set_interrupt(None);
        thread.stop()
    }

    fn reset(&mut self) {
        self.stop(0);
    }

    fn save(&self) -> DeviceState {
        DeviceState::Block(BlockState::of(&self.inner))
    }

    fn restore(&mut self, state: DeviceState) -> Result<(), StateError> {
        match state {
            DeviceState::Block(state) => {
                state.check(&self.inner)?;
                self.inner.grow(state.capacity);
                Ok(())
            }
            other => Err(other.wrong(self.kind())),
        }
    }
}

impl Drop for SlotDevice {
    fn drop(&mut self) {
        self.reset();
    }
}
