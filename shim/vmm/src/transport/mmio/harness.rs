//! Simulates a guest's driver at the level of registers, for the tests and the fuzz harness. It can follow the specification or break it.

use super::{Transport, reg};
use crate::testing::{Driver, QUEUE_BYTES};
use crate::virtio::balloon::Balloon;
use crate::virtio::block::Slot;
use crate::virtio::console::VirtioConsole;
use crate::virtio::rng::Rng;
use crate::virtio::vsock::Vsock;
use crate::virtio::{COMMON_FEATURES, Device, DeviceKind, Memory};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vm_memory::GuestAddress;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// The size of guest memory in bytes. The queues lie at its start.
pub(crate) const MEMORY: usize = 1 << 20;
/// The address from which no memory belongs to a queue.
pub(crate) const BUFFERS: u64 = 16 * QUEUE_BYTES;
/// The timeout of every wait.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

pub(crate) const ACKNOWLEDGE: u32 = 1;
pub(crate) const DRIVER: u32 = 2;
pub(crate) const DRIVER_OK: u32 = 4;
pub(crate) const FEATURES_OK: u32 = 8;
pub(crate) const NEEDS_RESET: u32 = 64;
pub(crate) const FAILED: u32 = 128;
pub(crate) const LIVE: u32 = ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK;

/// Polls a condition until it holds; panics after [`LIMIT`].
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < LIMIT, "waited {LIMIT:?} for {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// A guest with one device.
pub(crate) struct MmioGuest {
    pub memory: Arc<Memory>,
    pub transport: Arc<Transport>,
    pub irq: EventFd,
    pub queues: Vec<Driver>,
}

impl MmioGuest {
    pub(crate) fn new(device: Box<dyn Device>) -> MmioGuest {
        let memory = Arc::new(Memory::from_ranges(&[(GuestAddress(0), MEMORY)]).expect("memory"));
        MmioGuest::with_memory(memory, device)
    }

    /// Returns another vCPU of the same guest.
    pub(crate) fn another_vcpu(&self) -> MmioGuest {
        let (memory, transport) = (self.memory.clone(), self.transport.clone());
        MmioGuest { memory, transport, irq: self.irq.try_clone().expect("a copy"), queues: Vec::new() }
    }

    /// Creates a guest with this memory, which an earlier guest may have used.
    pub(crate) fn with_memory(memory: Arc<Memory>, device: Box<dyn Device>) -> MmioGuest {
        let irq = EventFd::new(EFD_NONBLOCK).expect("an eventfd");
        let ours = irq.try_clone().expect("a copy");
        let transport = Transport::new(device, memory.clone(), ours).expect("a transport");
        MmioGuest { memory, transport, irq, queues: Vec::new() }
    }

    pub(crate) fn get(&self, register: u64) -> u32 {
        let mut bytes = [0xff; 4];
        self.transport.read(register, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    pub(crate) fn set(&self, register: u64, value: u32) {
        self.transport.write(register, &value.to_le_bytes());
    }

    pub(crate) fn config<const N: usize>(&self, offset: u64) -> [u8; N] {
        let mut bytes = [0xff; N];
        self.transport.read(reg::CONFIG + offset, &mut bytes);
        bytes
    }

    pub(crate) fn status(&self) -> u32 {
        self.get(reg::STATUS)
    }

    /// Sets one more bit of the status, as a driver does.
    pub(crate) fn set_status_bit(&self, bit: u32) {
        self.set(reg::STATUS, self.status() & !NEEDS_RESET | bit);
    }

    pub(crate) fn offered(&self) -> u64 {
        let word = |select| {
            self.set(reg::DEVICE_FEATURES_SEL, select);
            u64::from(self.get(reg::DEVICE_FEATURES))
        };
        word(0) | word(1) << 32
    }

    /// Resets the device and negotiates these features.
    pub(crate) fn negotiate(&mut self, features: u64) {
        self.set(reg::STATUS, 0);
        self.queues.clear();
        self.set_status_bit(ACKNOWLEDGE);
        self.set_status_bit(DRIVER);
        for (word, value) in [(0, features as u32), (1, (features >> 32) as u32)] {
            self.set(reg::DRIVER_FEATURES_SEL, word);
            self.set(reg::DRIVER_FEATURES, value);
        }
        self.set_status_bit(FEATURES_OK);
    }

    /// Selects a queue and sets its size and addresses.
    pub(crate) fn set_up_queue(&self, index: u16, size: u32) {
        let base = u64::from(index) * QUEUE_BYTES;
        let (descriptors, available, used) = Driver::new(self.memory.clone(), base, 1).addresses();
        self.set(reg::QUEUE_SEL, index.into());
        self.set(reg::QUEUE_SIZE, size);
        for (register, address) in
            [(reg::QUEUE_DESC_LOW, descriptors), (reg::QUEUE_DRIVER_LOW, available), (reg::QUEUE_DEVICE_LOW, used)]
        {
            self.set(register, address as u32);
            self.set(register + 4, (address >> 32) as u32);
        }
    }

    /// Sets up an empty queue and makes it ready.
    pub(crate) fn ready(&self, index: u16, size: u16) -> Driver {
        let base = u64::from(index) * QUEUE_BYTES;
        vm_memory::Bytes::write_slice(&*self.memory, &[0; QUEUE_BYTES as usize], GuestAddress(base)).expect("memory");
        self.set_up_queue(index, size.into());
        self.set(reg::QUEUE_READY, 1);
        Driver::new(self.memory.clone(), base, size)
    }

    /// Initializes the device as a driver does, with all offered features.
    pub(crate) fn start(&mut self) {
        self.negotiate(self.offered());
        for index in 0.. {
            self.set(reg::QUEUE_SEL, index);
            let max = self.get(reg::QUEUE_SIZE_MAX);
            if max == 0 {
                break;
            }
            assert_eq!(self.get(reg::QUEUE_READY), 0);
            let driver = self.ready(index as u16, max.min(128) as u16);
            assert_eq!(self.get(reg::QUEUE_READY), 1);
            self.queues.push(driver);
        }
        self.set_status_bit(DRIVER_OK);
        assert_eq!(self.status(), LIVE);
    }

    pub(crate) fn kick(&self, queue: usize) {
        self.set(reg::QUEUE_NOTIFY, queue as u32);
    }

    /// Waits for the next request that the device returns on a queue.
    pub(crate) fn wait_used(&mut self, queue: usize) -> (u16, u32) {
        let mut used = None;
        eventually("a request to come back", || {
            used = self.queues[queue].take_used();
            used.is_some()
        });
        used.expect("a request")
    }

    /// Waits for an interrupt, acknowledges it and returns the InterruptStatus.
    pub(crate) fn wait_interrupt(&self) -> u32 {
        eventually("an interrupt", || self.irq.read().is_ok());
        let what = self.get(reg::INTERRUPT_STATUS);
        self.set(reg::INTERRUPT_ACK, what);
        what
    }
}

/// The number of kinds of [`device`].
pub(crate) const DEVICES: u8 = 6;

/// Returns one of the devices that need no resource of the host.
pub(crate) fn device(which: u8) -> Box<dyn Device> {
    match which % DEVICES {
        0 => Rng::new().device(),
        1 => {
            let file = crate::transport::vhost_user::harness::memfd(1 << 20);
            let path = std::path::PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
            Slot::read_write("writable", &path, 1 << 20).expect("a slot").device()
        }
        2 => Slot::read_only("empty").expect("a slot").device(),
        3 => Vsock::new(3).expect("a vsock device").device(),
        4 => Balloon::new().device(),
        _ => VirtioConsole::new(Box::new(|_: &[u8]| {})).device(),
    }
}

/// Returns one device of each kind.
pub(crate) fn devices() -> impl Iterator<Item = Box<dyn Device>> {
    (0..DEVICES).map(device)
}

/// Returns the queue on which a device returns every request at once, if it has one.
pub(crate) fn immediate_queue(kind: DeviceKind) -> Option<usize> {
    match kind {
        DeviceKind::Block | DeviceKind::Rng | DeviceKind::Balloon => Some(0),
        DeviceKind::Vsock | DeviceKind::Console => Some(1),
        _ => None,
    }
}

/// Performs the register accesses that these bytes describe, then checks that the device works for a well-behaved driver.
pub(crate) fn registers(device: Box<dyn Device>, data: &[u8]) {
    let mut guest = MmioGuest::new(device);
    let mut rest = data;
    while let Some(([op, place, value], after)) = rest.split_first_chunk() {
        rest = after;
        perform_access(&mut guest, *op, *place, *value);
    }
    let state = guest.transport.save();
    guest.transport.restore(&state).expect("its own state");
    assert_eq!(guest.transport.save(), state);
    guest.transport.resume().expect("queues");

    guest.start();
    if let Some(queue) = immediate_queue(guest.transport.kind()) {
        guest.queues[queue].submit(&[(BUFFERS, 16, false), (BUFFERS + 16, 1, true)]);
        guest.kick(queue);
        guest.wait_used(queue);
    }
}

const STEPS: [u32; 8] = [0, ACKNOWLEDGE, DRIVER, FEATURES_OK, DRIVER_OK, FAILED, LIVE, u32::MAX];

pub(crate) fn perform_access(guest: &mut MmioGuest, op: u8, place: u8, value: u8) {
    let word = u32::from(value).wrapping_mul([1, 0x101, 0x1000, 0x0101_0101][usize::from(value % 4)]);
    let offset = u64::from(place) * if op & 1 == 0 { 4 } else { 1 };
    match op % 16 {
        0..=3 => guest.set(offset, word),
        4 => drop(guest.get(offset)),
        5 => {
            let mut data = [0; 16];
            guest.transport.read(offset, &mut data[..usize::from(value % 17)]);
        }
        6 => guest.transport.write(offset, &[value; 16][..usize::from(op / 16)]),
        7 => guest.transport.write(reg::CONFIG + offset, &[value; 8][..1 << (op / 64)]),
        8 => guest.set_status_bit(STEPS[usize::from(value % 8)]),
        9 => guest.set(reg::STATUS, word),
        10 => guest.negotiate(COMMON_FEATURES | u64::from(value) << (place % 64)),
        11 => guest.set_up_queue(u16::from(place % 8), 1 << (value % 10)),
        12 => {
            guest.set(reg::QUEUE_SEL, (place % 8).into());
            guest.set(reg::QUEUE_READY, (value % 4).into());
        }
        13 => {
            // Any address below 64 KiB may belong to a queue.
            let at = u64::from(place) << 8 | u64::from(value);
            vm_memory::Bytes::write_slice(&*guest.memory, &[op, value, 0, 0], GuestAddress(at)).expect("memory");
            guest.kick((place % 8).into());
        }
        14 if value.is_multiple_of(2) => guest.transport.pause(),
        14 => guest.transport.resume().expect("queues"),
        _ => {
            let state = guest.transport.save();
            guest.transport.restore(&state).expect("its own state");
            assert_eq!(guest.transport.save(), state);
            guest.transport.resume().expect("queues");
        }
    }
}
