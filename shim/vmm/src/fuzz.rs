//! Provides one harness function per parser of bytes that a guest or a front end writes. ci/fuzz calls them; the tests below
//! feed them random bytes and the committed corpus (`tests/corpus/TARGET/*`). A harness reports a failure only by a panic.

use crate::testing::{Driver, QUEUE_BYTES};
use crate::transport::mmio;
use crate::transport::vhost_user::harness;
use crate::virtio::balloon::{self, Balloon};
use crate::virtio::block::{self, Slot};
use crate::virtio::console::{self, VirtioConsole};
use crate::virtio::net;
use crate::virtio::ring::Ring;
use crate::virtio::rng;
use crate::virtio::vsock::{HOST_CID, Muxer, PacketHeader};
use crate::virtio::{Device, Interrupt, Memory};
use nacelle_base::retry::retry_interrupted;
use nix::sys::epoll::{Epoll, EpollCreateFlags};
use nix::sys::eventfd::EventFd;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use virtio_queue::{Queue, QueueState};
use vm_memory::{Bytes, GuestAddress};

/// The size of a harness's guest memory, in bytes.
const MEMORY: usize = 0x20000;
/// The address of the buffers of well-formed requests.
const BUFFERS: u64 = 0x10000;
/// The number of descriptors of a queue.
const SIZE: u16 = 16;
/// The CID of the vsock harness's guest, and the port on which its host listens.
const CID: u32 = 3;
const PORT: u32 = 1024;

struct NoInterrupt;

impl Interrupt for NoInterrupt {
    fn notify_queue(&self, _index: u16) {}
    fn notify_config(&self) {}
}

pub(crate) fn memory() -> Arc<Memory> {
    Arc::new(Memory::from_ranges(&[(GuestAddress(0), MEMORY)]).expect("memory"))
}

/// Returns the device's side of a driver's queue.
pub(crate) fn ring(driver: &Driver, index: u16) -> Ring {
    let (desc_table, avail_ring, used_ring) = driver.addresses();
    let size = driver.size();
    let state = QueueState {
        max_size: size,
        next_avail: 0,
        next_used: 0,
        event_idx_enabled: index % 2 == 1,
        size,
        ready: true,
        desc_table,
        avail_ring,
        used_ring,
    };
    ring_from(driver.memory.clone(), index, state)
}

/// Returns a queue that continues from `state` and whose interrupts are dropped.
pub(crate) fn ring_from(memory: Arc<Memory>, index: u16, state: QueueState) -> Ring {
    let queue = Queue::try_from(state).expect("a queue");
    let kick = EventFd::new().expect("an eventfd").into();
    Ring::new(index, queue, memory, kick, Arc::new(NoInterrupt)).expect("a ring")
}

/// Returns a queue whose descriptors and rings consist of these bytes, valid or not.
fn malformed_queue(data: &[u8], index: u16) -> Ring {
    let driver = Driver::new(memory(), u64::from(index) * QUEUE_BYTES, SIZE);
    // The available ring comes first in the bytes, because it decides whether the device reads any descriptor.
    let (available, descriptors) = data.split_at(data.len().min(4 + 2 * usize::from(SIZE)));
    let (table, ring_at, _) = driver.addresses();
    driver.memory.write_slice(available, GuestAddress(ring_at)).expect("memory");
    let descriptors = descriptors.get(..0x2000).unwrap_or(descriptors);
    driver.memory.write_slice(descriptors, GuestAddress(table)).expect("memory");
    ring(&driver, index)
}

/// Returns a queue with one request made of these bytes: two lengths, then the data that the device reads.
fn well_formed_queue(data: &[u8]) -> Ring {
    let mut driver = Driver::new(memory(), 0, SIZE);
    let (lengths, bytes) = data.split_at(data.len().min(4));
    let number = |at: usize| u32::from(lengths.get(at).copied().unwrap_or(0));
    let bytes = bytes.get(..0x4000).unwrap_or(bytes);
    driver.memory.write_slice(bytes, GuestAddress(BUFFERS)).expect("memory");
    let cut = (number(0) % 32).min(bytes.len() as u32);
    let writable = number(1) | number(2) << 8;
    driver.submit(&[
        (BUFFERS, cut, false),
        (BUFFERS + u64::from(cut), bytes.len() as u32 - cut, false),
        (BUFFERS + 0x8000, writable % 0x4000, true),
        (BUFFERS + 0xc000, number(3), true),
    ]);
    ring(&driver, 0)
}

fn serve(mut ring: Ring, mut handle: impl FnMut(&Memory, crate::virtio::ring::Request) -> u32) {
    let memory = ring.memory().clone();
    for _ in 0..2 {
        ring.disable_kicks();
        while let Some(request) = ring.pop() {
            let head = request.head;
            let written = handle(&memory, request);
            ring.complete(head, written);
            ring.notify_guest();
        }
        ring.enable_kicks();
    }
}

/// Fuzzes descriptors and rings.
pub fn queue(data: &[u8]) {
    serve(malformed_queue(data, 0), |memory, mut request| {
        let buffers = &mut request.buffers;
        let _ = buffers.readable.read(memory, &mut [0; 64]);
        let back = buffers.writable.split_back(1);
        if buffers.writable.len() < MEMORY {
            let _ = buffers.writable.zero(memory);
        }
        back.map_or(0, |_| 1)
    });
}

/// Fuzzes requests to a block device: a writable disk, and one with a hole and a file.
pub fn block(data: &[u8]) {
    thread_local! {
        static SLOTS: [Slot; 3] = slots();
    }
    SLOTS.with(|slots| {
        for slot in slots {
            let handle = |memory: &Memory, request| {
                let begun = block::try_serve(slot.inner(), memory, request);
                begun.unwrap_or_else(|rest| block::serve(slot.inner(), memory, &rest))
            };
            serve(well_formed_queue(data), handle);
            serve(malformed_queue(data, 1), handle);
        }
    });
}

fn slots() -> [Slot; 3] {
    use nacelle_base::machine::{Extent, ImageDisk};
    use std::os::fd::AsRawFd;
    let file = harness::memfd(1 << 20);
    let path = std::path::PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let writable = Slot::read_write("writable", &path, 1 << 20).expect("a slot");
    let placed = Slot::read_only("placed").expect("a slot");
    // A writable and a read-only volume lie next to each other.
    let volumes = Slot::volumes("volumes").expect("a slot");
    for (at, write) in [(1024, true), (9216, false)] {
        let volume = std::fs::File::options().read(true).write(write).open(&path).expect("the file is ours");
        volumes.place_volume(at, volume, 8192, write, &path).expect("a volume");
    }
    let image = ImageDisk { extents: vec![Extent { path, offset: 512, length: 4096 }] };
    placed.place(1024, &image).expect("an image");
    [writable, placed, volumes]
}

/// Fuzzes requests for entropy.
pub fn entropy(data: &[u8]) {
    let metrics = rng::RngMetrics::default();
    serve(well_formed_queue(data), |memory, request| rng::fill(&metrics, memory, request));
    serve(malformed_queue(data, 0), |memory, request| rng::fill(&metrics, memory, request));
}

/// Fuzzes the page lists of a balloon on each of its queues, then writes to the configuration space.
pub fn balloon(data: &[u8]) {
    let balloon = Balloon::new();
    let mut device = balloon.device();
    device.acknowledge(device.features());
    let inner = balloon.inner();
    for index in 0..4 {
        serve(well_formed_queue(data), |memory, request| balloon::serve(inner, index, memory, request).unwrap_or(0));
        serve(malformed_queue(data, index), |memory, request| {
            balloon::serve(inner, index, memory, request).unwrap_or(0)
        });
    }
    configure(&mut *device, data);
}

/// Fuzzes the console: output, input and writes to the configuration space.
pub fn console(data: &[u8]) {
    let console = VirtioConsole::new(Box::new(|bytes| assert!(!bytes.is_empty())));
    for index in 0..2 {
        console.input(data);
        let inner = console.inner();
        serve(well_formed_queue(data), |memory, request| console::serve(inner, index, memory, request).unwrap_or(0));
        serve(malformed_queue(data, index), |memory, request| {
            console::serve(inner, index, memory, request).unwrap_or(0)
        });
    }
    configure(&mut *console.device(), data);
}

/// Writes these bytes to the configuration space, each piece preceded by its offset and length, and reads it back.
fn configure(device: &mut dyn Device, mut data: &[u8]) {
    while let [offset, length, rest @ ..] = data {
        let (bytes, later) = rest.split_at(usize::from(*length % 9).min(rest.len()));
        device.write_config(u32::from(*offset % 16), bytes);
        device.read_config(u32::from(*offset), &mut [0; 8]);
        data = later;
    }
}

/// Fuzzes vsock packets: first arbitrary queues, then packets whose headers are made of these bytes.
pub fn packets(data: &[u8]) {
    let epoll = || Arc::new(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).expect("epoll"));
    let mut muxer = Muxer::new(CID, epoll(), Arc::default());
    for index in 0..3 {
        *muxer.ring(index).expect("a queue") = Some(malformed_queue(data, index));
    }
    muxer.run();
    muxer.handle_restore();
    muxer.run();

    let mut muxer = Muxer::new(CID, epoll(), Arc::default());
    let (incoming, accepted) = sync_channel(4);
    muxer.listen(PORT, incoming);
    let (answer, _connected) = sync_channel(1);
    muxer.connect(PORT, 0, answer);
    let memory = memory();
    let mut drivers = [0, 1].map(|index| Driver::new(memory.clone(), index * QUEUE_BYTES, SIZE));
    for (index, driver) in drivers.iter().enumerate() {
        *muxer.ring(index as u16).expect("a queue") = Some(ring(driver, index as u16));
    }
    let mut streams = Vec::new();
    for bytes in data.chunks(HEADER_BYTES) {
        let [rx, tx] = &mut drivers;
        while rx.free() >= 2 {
            rx.submit(&[(BUFFERS + 0x2000, 50, true), (BUFFERS + 0x3000, 1000, true)]);
        }
        let header = packet(bytes);
        memory.write_slice(&header.encode(), GuestAddress(BUFFERS)).expect("memory");
        tx.submit(&[(BUFFERS, 44, false), (BUFFERS + 44, u32::from(bytes.get(12).copied().unwrap_or(0)), false)]);
        muxer.run();
        while rx.take_used().is_some() || tx.take_used().is_some() {}
        streams.extend(accepted.try_iter());
    }
    muxer.handle_driver_reset();
    muxer.reset_transport();
    muxer.run();
}

const HEADER_BYTES: usize = 13;

/// Returns a header that is likely to pass the first checks: most fields take few values, some take any.
fn packet(bytes: &[u8]) -> PacketHeader {
    let byte = |at: usize| u32::from(bytes.get(at).copied().unwrap_or(0));
    let some = |at: usize, usual: u32| if byte(at) < 200 { usual } else { byte(at) << (byte(at) % 25) };
    PacketHeader {
        src_cid: some(0, CID).into(),
        dst_cid: some(1, HOST_CID as u32).into(),
        src_port: if byte(2) < 100 { byte(2) % 4 } else { PORT },
        dst_port: if byte(2) < 100 { PORT } else { 1 << 30 },
        length: some(3, byte(12)),
        kind: some(4, 1) as u16,
        op: (byte(5) % 10) as u16,
        flags: byte(6),
        buf_alloc: some(7, byte(8) << 8),
        fwd_cnt: some(9, byte(10)),
    }
}

/// Fuzzes the network device: frames from and to the guest, with a socket pair in place of a tap, and commands of the driver.
pub fn frames(data: &[u8]) {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let pair = || socketpair(AddressFamily::Unix, SockType::Datagram, None, flags).expect("sockets");
    for ring in [malformed_queue(data, 1), well_formed_queue(data)] {
        let (tap, _other) = pair();
        let mut sender = net::FrameSender::new(ring, Arc::default());
        while matches!(sender.run(tap.as_fd()), net::NextWait::Nothing) {}
        drop(sender.into_ring());
    }
    let number = |at: usize| usize::from(data.get(at).copied().unwrap_or(0));
    for (ring, mergeable) in [
        (malformed_queue(data, 0), false),
        (malformed_queue(data, 1), true),
        (queue_of_lengths(data), false),
        (queue_of_lengths(data), true),
    ] {
        let (tap, other) = pair();
        for index in 0..8 {
            let bytes = vec![7; 12 + number(index) * (1 + number(index + 8) % 32)];
            let _ = retry_interrupted(|| nix::unistd::write(&other, &bytes)); // the socket is full
        }
        let mut receiver = net::FrameReceiver::new(ring, mergeable, Arc::default());
        while matches!(receiver.run(tap.as_fd()), net::NextWait::Nothing) {}
        receiver.run(tap.as_fd());
        drop(receiver.into_ring());
    }
    net::ControlCommand::parse(data, net::CommandLimits { pairs: 4, offloads: 0x182, mac: true });
}

/// Returns a queue with writable buffers of these lengths.
fn queue_of_lengths(data: &[u8]) -> Ring {
    let mut driver = Driver::new(memory(), 0, SIZE);
    for pair in data.chunks(2).take(usize::from(SIZE) / 2) {
        let length = |at: usize| u32::from(pair.get(at).copied().unwrap_or(0));
        driver.submit(&[(BUFFERS, length(0), true), (BUFFERS + 0x1000, length(1) * 8, length(1) % 7 != 6)]);
    }
    ring(&driver, 1)
}

/// Fuzzes vhost-user messages. Each consists of a request number, a number of descriptors, a length and the body.
pub fn messages(data: &[u8]) {
    harness::run_messages(data);
}

/// Fuzzes the file `state` of a snapshot.
pub fn snapshot(data: &[u8]) {
    crate::snapshot::harness(data);
}

/// Fuzzes accesses, three bytes each, to the registers of a device that the first byte selects.
pub fn registers(data: &[u8]) {
    if let Some((which, accesses)) = data.split_first() {
        mmio::harness::registers(mmio::harness::device(*which), accesses);
    }
}

/// Fuzzes accesses to ports and addresses that belong to no virtio device.
pub fn ports(data: &[u8]) {
    crate::machine::harness::ports(data);
}

/// Fuzzes the file of a kernel.
pub fn image(data: &[u8]) {
    crate::machine::harness::image(data);
}

/// The type of a harness function.
pub type Target = fn(&[u8]);

/// All harnesses by the names of their corpora.
pub const TARGETS: [(&str, Target); 12] = [
    ("queue", queue),
    ("balloon", balloon),
    ("block", block),
    ("console", console),
    ("entropy", entropy),
    ("frames", frames),
    ("packets", packets),
    ("image", image),
    ("messages", messages),
    ("ports", ports),
    ("registers", registers),
    ("snapshot", snapshot),
];

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::corpus::run_corpora;
    use proptest::prelude::*;

    #[test]
    fn the_corpus() {
        run_corpora(env!("CARGO_MANIFEST_DIR"), &TARGETS);
    }

    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        // Small numbers are common in the formats that the parsers read, so they are common here.
        let byte = prop_oneof![3 => 0..20u8, 1 => any::<u8>(), 2 => Just(0)];
        prop::collection::vec(byte, 0..600)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn random_queues(data in bytes()) {
            queue(&data);
        }

        #[test]
        fn random_balloons(data in bytes()) {
            balloon(&data);
        }

        #[test]
        fn random_consoles(data in bytes()) {
            console(&data);
        }

        #[test]
        fn random_disk_requests(data in bytes()) {
            block(&data);
        }

        #[test]
        fn random_entropy_requests(data in bytes()) {
            entropy(&data);
        }

        #[test]
        fn random_frames(data in bytes()) {
            frames(&data);
        }

        #[test]
        fn random_packets(data in prop_oneof![bytes(), prop::collection::vec(any::<u8>(), 0..600)]) {
            packets(&data);
        }

        #[test]
        fn random_snapshots(data in bytes(), cut in any::<prop::sample::Index>(), byte in any::<u8>()) {
            snapshot(&data);
            let corpus = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/snapshot");
            for good in ["document", "document-2"] {
                let mut good = std::fs::read(corpus.join(good)).unwrap();
                let at = cut.index(good.len());
                good[at] = byte;
                snapshot(&good);
                snapshot(&good[..at]);
            }
        }

        #[test]
        fn random_ports(data in prop::collection::vec(any::<u8>(), 0..600)) {
            ports(&data);
        }

        #[test]
        fn random_messages(data in bytes()) {
            messages(&data);
        }
    }
}
