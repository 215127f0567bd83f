//! Simulates a guest's driver of a network device, without a VM or a transport.

use crate::host::Host;
use crate::testing::{Driver, QUEUE_BYTES};
use nacelle_vmm::net::{Net, NetConfig, open_vhost};
use nacelle_vmm::{Device, Interrupt, Memory, Ring};
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use virtio_queue::{Queue, QueueState};
use vm_memory::{Bytes, GuestAddress};

/// The timeout of every wait in a test.
pub const LIMIT: Duration = Duration::from_secs(60);
/// The size of the header before a frame in a queue.
pub const HEADER: usize = 12;
/// An EtherType for experiments.
pub const FRAME_TYPE: [u8; 2] = [0x88, 0xb5];
pub const MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];

const QUEUE_SIZE: u16 = 128;
const BUFFERS: u64 = 1 << 20;
const BUFFER: u64 = 128 << 10;

/// The destination of the interrupts.
struct TestInterrupt {
    queues: Vec<EventFd>,
    config: EventFd,
}

impl Interrupt for TestInterrupt {
    fn notify_queue(&self, index: u16) {
        self.queues[usize::from(index)].write(1).unwrap();
    }

    fn notify_config(&self) {
        self.config.write(1).unwrap();
    }

    fn interrupt_eventfd(&self, index: u16) -> Option<OwnedFd> {
        self.queues[usize::from(index)].as_fd().try_clone_to_owned().ok()
    }
}

pub struct NetGuest {
    pub by: ServedBy,
    pub memory: Arc<Memory>,
    pub device: Box<dyn Device>,
    pub host: Host,
    pub queues: Vec<Driver>,
    kicks: Vec<EventFd>,
    line: Arc<TestInterrupt>,
}

/// The server of the queues: threads of this process or the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServedBy {
    Threads,
    Kernel,
}

/// Prints why a test cannot run here.
fn skipped(why: impl std::fmt::Display) {
    println!("skipped: {why}");
}

/// Returns a tap in a namespace, or prints that none can be created here.
pub fn host(queues: usize) -> Option<Host> {
    Host::new(queues).map_err(|error| skipped(format!("no tap in a namespace here: {error}"))).ok()
}

/// Runs the test with each server of queues that is available here.
pub fn each(pairs: usize, test: impl Fn(&dyn Fn() -> NetGuest)) {
    if host(1).is_none() {
        return;
    }
    for by in [ServedBy::Threads, ServedBy::Kernel] {
        if by == ServedBy::Kernel && open_vhost(1).unwrap().is_empty() {
            skipped("the part with vhost-net: this node has none");
            continue;
        }
        test(&|| NetGuest::new(by, pairs));
    }
}

fn event() -> EventFd {
    EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK).unwrap()
}

impl NetGuest {
    /// Creates a device with this many pairs and all its queues stopped.
    pub fn new(by: ServedBy, pairs: usize) -> NetGuest {
        let host = Host::new(pairs).unwrap();
        let taps = host.taps.iter().map(|tap| tap.try_clone().unwrap()).collect();
        let vhost = if by == ServedBy::Kernel { open_vhost(pairs).unwrap() } else { Vec::new() };
        let device = Net::new(NetConfig { taps, mac: MAC, mtu: 1500, vhost }).unwrap().device();
        let count = device.queue_sizes().len();
        let memory = Arc::new(Memory::from_ranges(&[(GuestAddress(0), 32 << 20)]).unwrap());
        let line = TestInterrupt { queues: (0..count).map(|_| event()).collect(), config: event() };
        let kicks = (0..count).map(|_| event()).collect();
        let mut guest = NetGuest { by, memory, device, host, queues: Vec::new(), kicks, line: Arc::new(line) };
        guest.queues = guest.fresh_queues();
        guest
    }

    fn fresh_queues(&self) -> Vec<Driver> {
        self.memory.write_slice(&vec![0; self.kicks.len() * QUEUE_BYTES as usize], GuestAddress(0)).unwrap();
        let driver = |index| Driver::new(self.memory.clone(), index as u64 * QUEUE_BYTES, QUEUE_SIZE);
        (0..self.kicks.len()).map(driver).collect()
    }

    /// Negotiates these features and starts all queues, as a driver does.
    pub fn set_up(&mut self, features: u64) {
        self.device.acknowledge(features & self.device.features());
        for index in 0..self.queues.len() {
            let (desc_table, avail_ring, used_ring) = self.queues[index].addresses();
            let size = QUEUE_SIZE;
            let addresses = QueueState { desc_table, avail_ring, used_ring, ..QueueState::default() };
            self.start(index, QueueState { max_size: size, size, ready: true, event_idx_enabled: true, ..addresses });
        }
    }

    pub fn start(&mut self, index: usize, state: QueueState) {
        let queue = Queue::try_from(state).unwrap();
        let kick = self.kicks[index].as_fd().try_clone_to_owned().unwrap();
        let ring = Ring::new(index as u16, queue, self.memory.clone(), kick, self.line.clone()).unwrap();
        self.device.start(ring).unwrap();
    }

    /// Stops all queues.
    pub fn stop(&mut self) -> Vec<QueueState> {
        (0..self.queues.len()).map(|index| self.device.stop(index as u16).unwrap()).collect()
    }

    /// Resets the device and the driver.
    pub fn reset(&mut self) {
        self.device.reset();
        self.queues = self.fresh_queues();
    }

    pub fn kick(&self, index: usize) {
        self.kicks[index].write(1).unwrap();
    }

    /// Returns the address of buffer `number` of a queue.
    pub fn buffer(&self, index: usize, number: u64) -> u64 {
        BUFFERS + (index as u64 * 32 + number % 32) * BUFFER
    }

    /// Waits for the next request that the device returns on a queue.
    pub fn wait_used(&mut self, index: usize) -> (u16, u32) {
        self.next_used(index, LIMIT).expect("no request came back")
    }

    /// Returns the next request that the device returns on a queue within `limit`.
    pub fn next_used(&mut self, index: usize, limit: Duration) -> Option<(u16, u32)> {
        let start = Instant::now();
        loop {
            if let Some(used) = self.queues[index].take_used() {
                return Some(used);
            }
            self.queues[index].want_next_interrupt();
            if let Some(used) = self.queues[index].take_used() {
                return Some(used);
            }
            if start.elapsed() > limit {
                return None;
            }
            wait(&self.line.queues[index], limit.min(Duration::from_secs(1)));
        }
    }

    pub fn wait_config_change(&self) {
        let start = Instant::now();
        while !wait(&self.line.config, Duration::from_secs(1)) {
            assert!(start.elapsed() < LIMIT, "the configuration did not change");
        }
    }

    pub fn config(&self) -> Vec<u8> {
        let mut config = vec![0xff; 16];
        self.device.read_config(0, &mut config);
        config
    }

    /// Provides a buffer for received frames.
    pub fn provide_buffer(&mut self, index: usize, number: u64, bytes: u32) {
        let at = self.buffer(index, number);
        self.queues[index].submit(&[(at, bytes, true)]);
        self.kick(index);
    }

    /// Sends a frame in pieces of these sizes plus a last piece with the rest, and waits until it is returned.
    pub fn send(&mut self, index: usize, header: [u8; HEADER], frame: &[u8], cuts: &[usize]) -> u32 {
        let bytes = [&header, frame].concat();
        let at = self.buffer(index, 0);
        self.memory.write_slice(&bytes, GuestAddress(at)).unwrap();
        let (mut parts, mut from) = (Vec::new(), 0);
        for cut in cuts.iter().copied().chain([usize::MAX]) {
            let length = cut.min(bytes.len() - from);
            parts.push((at + from as u64, length as u32, false));
            from += length;
        }
        self.queues[index].submit(&parts);
        self.kick(index);
        self.wait_used(index).1
    }

    pub fn read(&self, at: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.memory.read_slice(&mut bytes, GuestAddress(at)).unwrap();
        bytes
    }

    /// Sends a command on the control queue, with space for `reply_bytes` bytes of an answer.
    pub fn command(&mut self, bytes: &[u8], reply_bytes: u32) -> (u32, u8) {
        let index = self.queues.len() - 1;
        self.command_on(index, bytes, reply_bytes)
    }

    pub fn command_on(&mut self, index: usize, bytes: &[u8], reply_bytes: u32) -> (u32, u8) {
        let at = self.buffer(index, 0);
        self.memory.write_slice(bytes, GuestAddress(at)).unwrap();
        self.memory.write_obj(0xeeu8, GuestAddress(at + 0x10000)).unwrap();
        let mut parts = vec![(at, 2, false), (at + 2, bytes.len() as u32 - 2, false)];
        if reply_bytes > 0 {
            parts.push((at + 0x10000, reply_bytes, true));
        }
        self.queues[index].submit(&parts);
        self.kick(index);
        let (_, written) = self.wait_used(index);
        (written, self.read(at + 0x10000, 1)[0])
    }
}

/// Waits until an eventfd is written, and clears it. Returns whether it was written in time.
fn wait(event: &EventFd, limit: Duration) -> bool {
    let timeout = u16::try_from(limit.as_millis()).unwrap();
    poll(&mut [PollFd::new(event.as_fd(), PollFlags::POLLIN)], timeout).unwrap() > 0 && event.read().is_ok()
}

/// Returns a frame to or from the guest, with `length` bytes behind its addresses and type.
pub fn frame(length: usize, seed: u8) -> Vec<u8> {
    let mut frame = [[0xff; 6], MAC].concat();
    frame.extend(FRAME_TYPE);
    frame.extend((0..length).map(|at| (at as u8).wrapping_mul(seed).wrapping_add(seed)));
    frame
}
