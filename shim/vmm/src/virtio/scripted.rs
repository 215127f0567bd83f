//! Owns: a device of the tests without a transport: a driver starts and stops its queues by hand.

use super::{Device, Memory};
use crate::fuzz::{ring, ring_from};
use crate::testing::{Driver, QUEUE_BYTES};
use std::sync::Arc;
use std::time::{Duration, Instant};
use virtio_queue::QueueState;
use vm_memory::{Bytes, GuestAddress};

/// How long a test waits for anything.
const LIMIT: Duration = Duration::from_secs(60);

/// Polls a condition until it holds.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < LIMIT, "waited {LIMIT:?} for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A device, its memory and the driver's side of its queues, which lie at the begin of memory.
pub struct Scripted {
    pub memory: Arc<Memory>,
    pub device: Box<dyn Device>,
    pub drivers: Vec<Driver>,
    states: Vec<Option<QueueState>>,
}

impl Scripted {
    /// All features are agreed on, no queue runs. `ranges`: guest memory.
    pub fn new(mut device: Box<dyn Device>, ranges: &[(GuestAddress, usize)]) -> Scripted {
        let memory = Arc::new(Memory::from_ranges(ranges).unwrap());
        device.acknowledge(device.features());
        let count = device.queue_sizes().len();
        let drivers = (0..count as u64).map(|index| Driver::new(memory.clone(), index * QUEUE_BYTES, 16)).collect();
        Scripted { memory, device, drivers, states: vec![None; count] }
    }

    /// Starts a queue from where it was stopped.
    pub fn start(&mut self, index: u16) {
        let at = usize::from(index);
        let ring = match self.states[at].take() {
            Some(state) => ring_from(self.memory.clone(), index, state),
            None => ring(&self.drivers[at], index),
        };
        self.device.start(ring).unwrap();
    }

    /// Stops a queue that runs.
    pub fn stop(&mut self, index: u16) {
        let state = self.device.stop(index);
        assert!(state.is_some(), "queue {index} did not run");
        self.states[usize::from(index)] = state;
    }

    /// A queue that the driver has set up anew.
    pub fn renew(&mut self, index: u16) {
        self.drivers[usize::from(index)] = Driver::new(self.memory.clone(), u64::from(index) * QUEUE_BYTES, 16);
        self.states[usize::from(index)] = None;
        self.memory.write_slice(&[0; QUEUE_BYTES as usize], GuestAddress(u64::from(index) * QUEUE_BYTES)).unwrap();
    }

    /// Waits for the next request that comes back; the bytes that the device says it wrote.
    pub fn wait(&mut self, index: u16) -> u32 {
        let mut used = None;
        eventually("a request to come back", || {
            used = self.drivers[usize::from(index)].take_used();
            used.is_some()
        });
        used.unwrap().1
    }

    /// Puts one request into a queue that does not run and lets the device serve it.
    pub fn request(&mut self, index: u16, buffers: &[(u64, u32, bool)]) -> u32 {
        self.drivers[usize::from(index)].submit(buffers);
        self.start(index);
        let written = self.wait(index);
        self.stop(index);
        written
    }
}
