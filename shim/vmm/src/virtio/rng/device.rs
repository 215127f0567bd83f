//! Implements [`Device`] for the entropy device.

use super::metrics::RngMetrics;
use super::worker;
use crate::virtio::queue_thread::QueueThread;
use crate::virtio::{COMMON_FEATURES, Device, DeviceKind, DeviceState, Memory, Ring, StartError, StateError};
use std::convert::Infallible;
use std::sync::Arc;
use virtio_queue::QueueState;

/// The entropy device.
#[derive(Debug, Default)]
pub struct Rng {
    metrics: Arc<RngMetrics>,
    thread: Option<QueueThread>,
}

impl Rng {
    /// Creates a device.
    pub fn new() -> Rng {
        Rng::default()
    }

    /// Returns the counters, which remain readable after the device has been passed to a transport.
    pub fn metrics(&self) -> Arc<RngMetrics> {
        self.metrics.clone()
    }

    /// Returns the device for a transport.
    pub fn device(self) -> Box<dyn Device> {
        Box::new(self)
    }
}

impl Device for Rng {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Rng
    }

    fn features(&self) -> u64 {
        COMMON_FEATURES
    }

    fn queue_sizes(&self) -> &[u16] {
        &[256]
    }

    fn read_config(&self, _offset: u32, data: &mut [u8]) {
        data.fill(0);
    }

    fn start(&mut self, ring: Ring) -> Result<(), StartError> {
        let (device, index) = (self.kind(), ring.index());
        if index != 0 {
            return Err(StartError::NoSuchQueue { device, index });
        }
        if self.thread.is_some() {
            return Err(StartError::Running { device, index });
        }
        let metrics = self.metrics.clone();
        let fill = move |memory: &Memory, request| Ok::<u32, Infallible>(worker::fill(&metrics, memory, request));
        let thread = QueueThread::start("rng", ring, fill, |_, never| match never {})
            .map_err(|source| StartError::Thread { device, index, source })?;
        self.thread = Some(thread);
        Ok(())
    }

    fn stop(&mut self, index: u16) -> Option<QueueState> {
        if index == 0 { self.thread.take()?.stop() } else { None }
    }

    fn reset(&mut self) {
        self.stop(0);
    }

    fn save(&self) -> DeviceState {
        DeviceState::Rng
    }

    fn restore(&mut self, state: DeviceState) -> Result<(), StateError> {
        match state {
            DeviceState::Rng => Ok(()),
            other => Err(other.wrong(self.kind())),
        }
    }
}

impl Drop for Rng {
    fn drop(&mut self) {
        self.reset();
    }
}
