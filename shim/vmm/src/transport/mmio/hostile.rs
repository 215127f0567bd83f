//! Tests real devices behind registers with drivers that break the rules of queues, reset the device with requests in flight,
//! or flood it, and with devices that are saved and restored.

use super::harness::*;
use super::{TransportState, reg};
use crate::testing::{Driver, INDIRECT, NEXT, WRITE};
use crate::transport::vhost_user::harness::memfd;
use crate::virtio::block::Slot;
use crate::virtio::rng::Rng;
use crate::virtio::vsock::{HOST_CID, Op, PacketHeader, Vsock, VsockError};
use crate::virtio::{Device, Memory};
use proptest::prelude::*;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use vm_memory::{Bytes, GuestAddress};

/// Returns a disk of 1 MiB.
fn disk() -> Slot {
    let file = memfd(1 << 20);
    Slot::read_write("disk", format!("/proc/self/fd/{}", file.as_raw_fd()).as_ref(), 1 << 20).unwrap()
}

/// Writes a block request at `at` and submits it: 512 bytes in or out, followed by the status byte.
fn submit(driver: &mut Driver, at: u64, kind: u32, sector: u64) -> u16 {
    driver.memory.write_obj(kind, GuestAddress(at)).unwrap();
    driver.memory.write_obj(sector, GuestAddress(at + 8)).unwrap();
    driver.memory.write_obj(0xffu8, GuestAddress(at + 16)).unwrap();
    driver.submit(&[(at, 16, false), (at + 512, 512, kind == 0), (at + 16, 1, true)])
}

#[test]
fn a_disk_is_read_and_written_and_grows() {
    let slot = disk();
    let mut guest = MmioGuest::new(slot.device());
    guest.start();
    assert_eq!(u64::from_le_bytes(guest.config(0)), 2048);
    guest.memory.write_slice(&[7; 512], GuestAddress(BUFFERS + 512)).unwrap();
    submit(&mut guest.queues[0], BUFFERS, 1, 5);
    guest.kick(0);
    assert_eq!(guest.wait_used(0).1, 1);
    assert_eq!(guest.wait_interrupt(), 1);
    guest.memory.write_slice(&[0; 512], GuestAddress(BUFFERS + 512)).unwrap();
    guest.queues[0].want_next_interrupt();
    submit(&mut guest.queues[0], BUFFERS, 0, 5);
    guest.kick(0);
    assert_eq!(guest.wait_used(0).1, 513);
    assert_eq!(guest.memory.read_obj::<[u8; 32]>(GuestAddress(BUFFERS + 512)).unwrap(), [7; 32]);
    assert_eq!(guest.wait_interrupt(), 1);
    let generation = guest.get(reg::CONFIG_GENERATION);
    slot.resize(2 << 20).unwrap();
    assert_eq!(guest.wait_interrupt(), 3);
    assert_eq!(u64::from_le_bytes(guest.config(0)), 4096);
    assert_ne!(guest.get(reg::CONFIG_GENERATION), generation);
}

/// A way to break the rules of queue 0, and whether it breaks the queue permanently or only fails the request.
type QueueViolation = (&'static str, bool, fn(&mut Driver));

const VIOLATIONS: [QueueViolation; 9] = [
    ("a loop", false, |driver| {
        driver.describe(0, BUFFERS, 1, NEXT, 1);
        driver.describe(1, BUFFERS, 1, NEXT, 0);
        driver.offer(0);
    }),
    ("a next out of range", false, |driver| {
        driver.describe(0, BUFFERS, 1, NEXT, u16::MAX);
        driver.offer(0);
    }),
    ("a buffer outside memory", false, |driver| {
        driver.describe(0, u64::MAX - 10, 100, WRITE, 0);
        driver.offer(0);
    }),
    ("a buffer that ends outside memory", false, |driver| {
        driver.describe(0, MEMORY as u64 - 1, u32::MAX, WRITE, 0);
        driver.offer(0);
    }),
    ("an indirect table outside memory", false, |driver| {
        driver.describe(0, 1 << 40, 32, INDIRECT, 0);
        driver.offer(0);
    }),
    ("a buffer that is the queue itself", false, |driver| {
        let (descriptors, available, used) = driver.addresses();
        driver.describe(3, descriptors, 64, NEXT, 4);
        driver.describe(4, available, 4, NEXT, 5);
        // Outside the part of the used ring that the test reads.
        driver.describe(5, used + 0x800, 64, WRITE, 0);
        driver.offer(3);
    }),
    ("a head out of range", true, |driver| driver.offer(9999)),
    ("more requests than there is room for", true, |driver| driver.set_available(0x4000)),
    ("an index that runs backwards", true, |driver| driver.set_available(u16::MAX)),
];

#[test]
fn a_broken_queue_harms_only_its_guest() {
    let memory = || Arc::new(Memory::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap());
    for (what, fatal, trick) in VIOLATIONS {
        for device in devices() {
            let mut guest = MmioGuest::with_memory(memory(), device);
            let Some(queue) = immediate_queue(guest.transport.kind()) else { continue };
            guest.start();
            trick(&mut guest.queues[queue]);
            guest.kick(queue);
            if fatal {
                eventually(what, || guest.status() == LIVE | NEEDS_RESET);
                eventually("an interrupt", || guest.get(reg::INTERRUPT_STATUS) & 2 != 0);
            } else {
                eventually(what, || guest.queues[queue].count_used() == 1);
                assert_eq!(guest.status(), LIVE, "{what}");
                guest.queues[queue].submit(&[(BUFFERS, 16, false), (BUFFERS + 16, 1, true)]);
                guest.kick(queue);
                guest.wait_used(queue);
            }
            // After a reset the queue works again.
            guest.start();
            guest.queues[queue].submit(&[(BUFFERS, 16, false), (BUFFERS + 16, 1, true)]);
            guest.kick(queue);
            guest.wait_used(queue);
        }
    }
}

#[test]
fn a_reset_in_mid_flight_leaves_memory_alone() {
    let mut guest = MmioGuest::new(disk().device());
    for round in 0..50u64 {
        guest.start();
        for request in 0..40 {
            submit(&mut guest.queues[0], BUFFERS + request * 1024, (request % 2) as u32, (request + round) % 2048);
        }
        guest.kick(0);
        for _ in 0..round * 20 {
            std::hint::spin_loop();
        }
        guest.set(reg::STATUS, 0);
        let everything = || {
            let mut bytes = vec![0; MEMORY];
            guest.memory.read_slice(&mut bytes, GuestAddress(0)).unwrap();
            bytes
        };
        let before = everything();
        guest.kick(0);
        std::thread::yield_now();
        assert_eq!((guest.status(), guest.get(reg::INTERRUPT_STATUS)), (0, 0));
        assert!(everything() == before, "memory was written after a reset");
    }
    guest.start();
    submit(&mut guest.queues[0], BUFFERS, 0, 0);
    guest.kick(0);
    assert_eq!(guest.wait_used(0).1, 513);
}

#[test]
fn a_flood_of_notifications_is_handled() {
    for device in devices() {
        let mut guest = MmioGuest::new(device);
        let Some(queue) = immediate_queue(guest.transport.kind()) else { continue };
        for index in 0..1000 {
            guest.kick(index);
        }
        guest.start();
        for round in 0..20_000 {
            guest.kick(round % 8);
            guest.set(reg::INTERRUPT_ACK, round as u32);
        }
        guest.queues[queue].submit(&[(BUFFERS, 16, false), (BUFFERS + 16, 1, true)]);
        guest.kick(queue);
        guest.wait_used(queue);
    }
}

/// Runs `work` repeatedly on a thread until `stop` is set.
fn run_concurrently(stop: &Arc<AtomicBool>, mut work: impl FnMut() + Send + 'static) -> JoinHandle<()> {
    let stop = stop.clone();
    std::thread::spawn(move || {
        while !stop.load(Ordering::Relaxed) {
            work();
            std::thread::yield_now();
        }
    })
}

#[test]
fn pauses_saves_resets_and_resizes_may_be_concurrent() {
    let slot = disk();
    let mut guest = MmioGuest::new(slot.device());
    let stop = Arc::new(AtomicBool::new(false));
    let transport = guest.transport.clone();
    // Pauses a limited number of times, because requests are served only between pauses.
    let pauser = std::thread::spawn(move || {
        for _ in 0..300 {
            transport.pause();
            assert_eq!(transport.save().registers.queues.len(), 1);
            transport.resume().unwrap();
            std::thread::sleep(Duration::from_micros(200));
        }
    });
    let transport = guest.transport.clone();
    let reader = run_concurrently(&stop, move || {
        let mut bytes = [0; 8];
        transport.read(reg::CONFIG, &mut bytes);
        transport.read(reg::INTERRUPT_STATUS, &mut bytes[..4]);
        transport.write(reg::INTERRUPT_ACK, &bytes[..4]);
    });
    let mut size = 1 << 20;
    let resizer = run_concurrently(&stop, move || {
        size = (size + 512) % (2 << 20);
        slot.resize(size).unwrap();
    });
    let mut rounds = 0;
    while rounds < 10 || !pauser.is_finished() {
        rounds += 1;
        guest.start();
        for request in 0..8 {
            submit(&mut guest.queues[0], BUFFERS + request * 1024, 0, 0);
        }
        guest.kick(0);
        // A request beyond the disk's current end is returned too.
        (0..8).for_each(|_| _ = guest.wait_used(0));
    }
    stop.store(true, Ordering::Relaxed);
    [pauser, reader, resizer].into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn conflicting_accesses_of_vcpus_harm_only_their_device() {
    for device in devices() {
        let mut guest = MmioGuest::new(device);
        let processors: Vec<_> = (1..=3u64)
            .map(|seed| {
                let mut another_vcpu = guest.another_vcpu();
                std::thread::spawn(move || {
                    let mut number = seed;
                    for _ in 0..1500 {
                        // Any pseudo-random numbers suffice (Knuth's constants); they are the same in each run.
                        number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                        let [op, place, value, ..] = (number >> 24).to_le_bytes();
                        // Only the host may save, and not concurrently with others.
                        if op % 16 < 14 {
                            perform_access(&mut another_vcpu, op, place, value);
                        }
                    }
                })
            })
            .collect();
        processors.into_iter().for_each(|thread| thread.join().unwrap());
        guest.start();
        if let Some(queue) = immediate_queue(guest.transport.kind()) {
            guest.queues[queue].submit(&[(BUFFERS, 16, false), (BUFFERS + 16, 1, true)]);
            guest.kick(queue);
            guest.wait_used(queue);
        }
    }
}

/// Saves a guest's device, serializes the state, and restores it in another device over the same memory.
fn restore_elsewhere(guest: MmioGuest, device: Box<dyn Device>) -> MmioGuest {
    let written = serde_json::to_vec(&guest.transport.save()).unwrap();
    let MmioGuest { memory, queues, transport, .. } = guest;
    drop(transport);
    let state: TransportState = serde_json::from_slice(&written).unwrap();
    let moved = MmioGuest::with_memory(memory, device);
    moved.transport.restore(&state).unwrap();
    assert_eq!(moved.transport.save(), state);
    MmioGuest { queues, ..moved }
}

#[test]
fn a_restored_disk_continues() {
    let slot = disk();
    let mut guest = MmioGuest::new(slot.device());
    guest.start();
    for round in 0..100u64 {
        let sector = round % 2000;
        guest.memory.write_slice(&[round as u8; 512], GuestAddress(BUFFERS + 512)).unwrap();
        submit(&mut guest.queues[0], BUFFERS, 1, sector);
        guest.kick(0);
        if round % 3 == 0 {
            guest.wait_used(0);
            submit(&mut guest.queues[0], BUFFERS, 0, sector);
        }
        guest.transport.pause();
        // This request is not handled before the save, and its kick is lost.
        submit(&mut guest.queues[0], BUFFERS + 1024, 0, sector);
        guest = restore_elsewhere(guest, slot.device());
        guest.transport.resume().unwrap();
        guest.wait_used(0);
        assert_eq!(guest.wait_used(0).1, 513);
        let read: [u8; 32] = guest.memory.read_obj(GuestAddress(BUFFERS + 1024 + 512)).unwrap();
        assert_eq!(read, [round as u8; 32]);
    }
    // The same disk, at least as large as before.
    guest.transport.pause();
    let state = guest.transport.save();
    drop(guest);
    for other in [Slot::read_only("disk").unwrap(), Slot::read_only("other").unwrap()] {
        assert!(MmioGuest::new(other.device()).transport.restore(&state).is_err());
    }
    slot.resize(4 << 20).unwrap();
    let guest = MmioGuest::new(slot.device());
    guest.transport.restore(&state).unwrap();
    slot.resize(512).unwrap();
    assert!(guest.transport.restore(&state).is_err());
}

#[test]
fn an_unhandled_interrupt_is_sent_again() {
    let mut guest = MmioGuest::new(Rng::new().device());
    guest.start();
    guest.queues[0].submit(&[(BUFFERS, 16, true)]);
    guest.kick(0);
    guest.wait_used(0);
    let guest = restore_elsewhere(guest, Rng::new().device());
    assert!(guest.irq.read().is_err());
    guest.transport.resume().unwrap();
    assert_eq!(guest.wait_interrupt(), 1);
}

const CID: u32 = 5;
const RX: usize = 0;
const TX: usize = 1;
const EVENT: usize = 2;
/// The addresses of the guest's packet and of the buffers for incoming packets and events.
const OUT: u64 = BUFFERS;
const IN: u64 = BUFFERS + 0x1000;
const NEWS: u64 = BUFFERS + 0x8000;

/// Returns a vsock guest with buffers in all its queues.
fn socket_guest(vsock: &Vsock) -> MmioGuest {
    let mut guest = MmioGuest::new(vsock.device());
    guest.start();
    for buffer in 0..4 {
        guest.queues[RX].submit(&[(IN + buffer * 0x400, 0x400, true)]);
        guest.memory.write_obj(u32::MAX, GuestAddress(NEWS + buffer * 4)).unwrap();
        guest.queues[EVENT].submit(&[(NEWS + buffer * 4, 4, true)]);
    }
    guest.kick(RX);
    guest.kick(EVENT);
    guest
}

fn send(guest: &mut MmioGuest, op: u16, guest_port: u32, host_port: u32) {
    let header = PacketHeader {
        src_cid: CID.into(),
        dst_cid: HOST_CID,
        src_port: guest_port,
        dst_port: host_port,
        kind: 1,
        op,
        buf_alloc: 4096,
        ..PacketHeader::default()
    };
    guest.memory.write_slice(&header.encode(), GuestAddress(OUT)).unwrap();
    guest.queues[TX].submit(&[(OUT, 44, false)]);
    guest.kick(TX);
    guest.wait_used(TX);
}

/// Returns the next packet for the guest and offers its buffer again.
fn receive(guest: &mut MmioGuest) -> PacketHeader {
    let (head, length) = guest.wait_used(RX);
    assert_eq!(length, 44);
    let (descriptors, ..) = guest.queues[RX].addresses();
    let at: u64 = guest.memory.read_obj(GuestAddress(descriptors + 16 * u64::from(head))).unwrap();
    let mut bytes = [0; 44];
    guest.memory.read_slice(&mut bytes, GuestAddress(at)).unwrap();
    guest.queues[RX].submit(&[(at, 0x400, true)]);
    guest.kick(RX);
    PacketHeader::parse(&bytes)
}

/// Connects the guest to `port` and accepts the connection on the host.
fn connect(guest: &mut MmioGuest, vsock: &crate::virtio::vsock::VsockListener, from: u32) -> UnixStream {
    send(guest, Op::REQUEST, from, vsock.port());
    assert_eq!(receive(guest).op, Op::RESPONSE);
    vsock.accept(LIMIT).unwrap()
}

#[test]
fn a_restored_guest_first_receives_the_transport_reset() {
    let vsock = Vsock::new(CID).unwrap();
    let listener = vsock.listen(1024).unwrap();
    let mut guest = socket_guest(&vsock);
    let mut old = connect(&mut guest, &listener, 77);
    guest.transport.save();

    // In the other process, the host listens and connects before the guest runs again.
    let other = Vsock::new(CID).unwrap();
    let listener = other.listen(1024).unwrap();
    let mut guest = restore_elsewhere(guest, other.device());
    drop((vsock, other.clone()));
    old.set_read_timeout(Some(LIMIT)).unwrap();
    assert_eq!(old.read(&mut [0]).unwrap(), 0, "the host's end is over");
    let caller = other.clone();
    let thread = std::thread::spawn(move || caller.connect(9, LIMIT));
    guest.transport.resume().unwrap();

    assert_eq!(guest.wait_used(EVENT).1, 4);
    assert_eq!(guest.memory.read_obj::<u32>(GuestAddress(NEWS)).unwrap(), 0);
    // A packet of the guest on its lost connection is answered, but only after the guest has seen the transport reset.
    send(&mut guest, Op::CREDIT_REQUEST, 77, 1024);
    assert_eq!(guest.queues[RX].take_used(), None);
    guest.queues[EVENT].want_next_interrupt();
    guest.queues[EVENT].submit(&[(NEWS, 4, true)]);
    guest.kick(EVENT);
    let seen = [receive(&mut guest), receive(&mut guest)];
    let asked = seen.iter().map(|header| header.src_port).max().unwrap();
    assert!(asked > 1 << 30, "not a port of before");
    let mut seen = seen.map(|header| (header.op, header.dst_port));
    seen.sort();
    assert_eq!(seen, [(Op::REQUEST, 9), (Op::RST, 77)]);
    assert_eq!(guest.queues[EVENT].take_used(), None, "notified once");
    // The host's port is still open, and so is the guest's.
    connect(&mut guest, &listener, 78);
    send(&mut guest, Op::RST, 9, asked);
    assert!(matches!(thread.join().unwrap(), Err(VsockError::Refused { port: 9 })));
}

#[test]
fn the_transport_reset_waits_for_an_event_buffer() {
    for event_index in [0, 1 << 29] {
        let vsock = Vsock::new(CID).unwrap();
        let mut guest = MmioGuest::new(vsock.device());
        guest.negotiate(1 << 32 | event_index);
        guest.queues = (0..3).map(|index| guest.ready(index, 16)).collect();
        guest.set_status_bit(DRIVER_OK);
        guest.queues[RX].submit(&[(IN, 0x400, true)]);
        let mut guest = restore_elsewhere(guest, vsock.device());
        guest.transport.resume().unwrap();
        let caller = vsock.clone();
        let thread = std::thread::spawn(move || caller.connect(9, LIMIT));
        guest.queues[EVENT].submit(&[(NEWS, 4, true)]);
        guest.kick(EVENT);
        guest.wait_used(EVENT);
        assert_eq!(guest.queues[RX].take_used(), None);
        guest.queues[EVENT].submit(&[(NEWS, 4, true)]);
        guest.kick(EVENT);
        assert_eq!(receive(&mut guest).op, Op::REQUEST);
        // A driver that resets the device has no connections that could be lost.
        guest.transport.pause();
        let mut guest = restore_elsewhere(guest, vsock.device());
        guest.transport.resume().unwrap();
        guest.start();
        guest.queues[RX].submit(&[(IN, 0x400, true)]);
        guest.kick(RX);
        let asked = receive(&mut guest);
        assert_eq!(asked.op, Op::REQUEST);
        assert_eq!(guest.queues[EVENT].take_used(), None);
        send(&mut guest, Op::RST, 9, asked.src_port);
        assert!(thread.join().unwrap().is_err());
    }
}

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop_oneof![3 => 0..20u8, 1 => any::<u8>(), 1 => 0x80..0xb0u8];
    prop::collection::vec(byte, 0..400)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_accesses_to_each_device(data in bytes()) {
        for device in devices() {
            registers(device, &data);
        }
    }
}
