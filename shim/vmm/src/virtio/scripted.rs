//! Drives a device in tests without a transport: the test starts and stops its queues itself.

use super::{Device, Memory};
use crate::fuzz::{ring, ring_from};
use crate::testing::{Driver, QUEUE_BYTES};
use std::sync::Arc;
use std::time::{Duration, Instant};
use virtio_queue::QueueState;
use vm_memory::{Bytes, GuestAddress};

/// The timeout of every wait in a test.
const LIMIT: Duration = Duration::from_secs(60);

/// Polls a condition until it holds; panics after [`LIMIT`].
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < LIMIT, "waited {LIMIT:?} for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A device, its memory and the driver's side of its queues, which lie at the start of memory.
pub struct Scripted {
    pub memory: Arc<Memory>,
    pub device: Box<dyn Device>,
    pub drivers: Vec<Driver>,
    states: Vec<Option<QueueState>>,
}

impl Scripted {
    /// Creates a device with all offered features negotiated and no queue running. `ranges` is the guest memory.
    pub fn new(mut device: Box<dyn Device>, ranges: &[(GuestAddress, usize)]) -> Scripted {
        let memory = Arc::new(Memory::from_ranges(ranges).unwrap());
        device.acknowledge(device.features());
        let count = device.queue_sizes().len();
        let drivers = (0..count as u64).map(|index| Driver::new(memory.clone(), index * QUEUE_BYTES, 16)).collect();
        Scripted { memory, device, drivers, states: vec![None; count] }
    }

    /// Starts a queue at the position where it was stopped.
    pub fn start(&mut self, index: u16) {
        let at = usize::from(index);
        let ring = match self.states[at].take() {
            Some(state) => ring_from(self.memory.clone(), index, state),
            None => ring(&self.drivers[at], index),
        };
        self.device.start(ring).unwrap();
    }

    /// Stops a running queue.
    pub fn stop(&mut self, index: u16) {
        let state = self.device.stop(index);
        assert!(state.is_some(), "queue {index} did not run");
        self.states[usize::from(index)] = state;
    }

    /// Replaces a queue with a new, empty one.
    pub fn renew(&mut self, index: u16) {
        self.drivers[usize::from(index)] = Driver::new(self.memory.clone(), u64::from(index) * QUEUE_BYTES, 16);
        self.states[usize::from(index)] = None;
        self.memory.write_slice(&[0; QUEUE_BYTES as usize], GuestAddress(u64::from(index) * QUEUE_BYTES)).unwrap();
    }

    /// Waits for the next returned request. Returns the number of bytes that the device reports as written.
    pub fn wait(&mut self, index: u16) -> u32 {
        let mut used = None;
        eventually("a request to come back", || {
            used = self.drivers[usize::from(index)].take_used();
            used.is_some()
        });
        used.unwrap().1
    }

    /// Puts one request into a stopped queue and lets the device serve it.
    pub fn request(&mut self, index: u16, buffers: &[(u64, u32, bool)]) -> u32 {
        self.drivers[usize::from(index)].submit(buffers);
        self.start(index);
        let written = self.wait(index);
        self.stop(index);
        written
    }
}
