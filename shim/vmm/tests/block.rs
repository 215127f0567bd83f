//! Tests the block device behind its vhost-user server, driven as QEMU drives it.

#[allow(dead_code, reason = "each test file uses a part of it")]
mod guest;

use guest::disk::{DISCARD, FLUSH, READ, SERIAL, WRITE, ZEROES, request};
use guest::{FrontEnd, LIMIT, REGION, SECOND, connect, eventually};
use nacelle_base::machine::{Extent, ImageDisk};
use nacelle_vmm::block::{BlockError, Slot};
use nix::fcntl::SealFlag;
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

fn file(dir: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

fn extent(path: &Path, offset: u64, length: u64) -> Extent {
    Extent { path: path.to_owned(), offset, length }
}

fn capacity(front_end: &mut FrontEnd) -> u64 {
    u64::from_le_bytes(front_end.config(60)[..8].try_into().unwrap())
}

#[test]
fn an_image_of_several_files_appears_while_the_guest_runs() {
    let dir = tempfile::tempdir().unwrap();
    let one = file(dir.path(), "one", &[1; 4096]);
    let two = file(dir.path(), "two", &[[2; 512], [3; 512], [4; 512]].concat());
    let slot = Slot::read_only("images").unwrap();
    let mut front_end = FrontEnd::new(slot.device(), 1);
    assert_eq!(capacity(&mut front_end), 0);
    assert_eq!(request(&mut front_end, READ, 0, &[], 512).0, 1, "nothing is there");

    let image = ImageDisk { extents: vec![extent(&one, 1024, 1024), extent(&two, 512, 1024)] };
    slot.place(1 << 20, &image).unwrap();
    front_end.wait_config_change();
    assert_eq!(capacity(&mut front_end), (2 << 20) / 512);
    std::fs::remove_file(&one).unwrap();

    let (status, bytes) = request(&mut front_end, READ, 2048 - 1, &[], 3072);
    assert_eq!(status, 0);
    let expected = [&[0; 512][..], &[1; 1024], &[3; 512], &[4; 512], &[0; 512]].concat();
    assert!(bytes == expected, "hole, first file, second file, hole");

    assert_eq!(request(&mut front_end, WRITE, 2048, &[9; 512], 0).0, 1, "it is read-only");
    assert_eq!(request(&mut front_end, READ, 4096, &[], 512).0, 1, "beyond the end");
    assert_eq!(request(&mut front_end, READ, 4095, &[], 1024).0, 1, "half beyond the end");
    assert_eq!(request(&mut front_end, READ, u64::MAX, &[], 512).0, 1, "far beyond the end");
    assert_eq!(request(&mut front_end, READ, 0, &[], 500).0, 1, "not whole sectors");
    assert_eq!(request(&mut front_end, 77, 0, &[], 512).0, 2, "an unknown request");

    assert!(slot.unplace(1 << 20));
    assert!(!slot.unplace(1 << 20));
    let (status, bytes) = request(&mut front_end, READ, 2048, &[], 1024);
    assert_eq!((status, bytes), (0, vec![0; 1024]));
    slot.place(1 << 20, &ImageDisk { extents: vec![extent(&two, 0, 512)] }).unwrap();
    assert_eq!(request(&mut front_end, READ, 2048, &[], 512), (0, vec![2; 512]));
    assert_eq!(slot.capacity(), 2 << 20, "it does not shrink");
}

#[test]
fn writable_volumes_are_written_and_grow() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (file(dir.path(), "one", &[1; 64 << 10]), file(dir.path(), "two", &[2; 4096]));
    let open = |path: &Path| std::fs::File::options().read(true).write(true).open(path).unwrap();
    let slot = Slot::volumes("volumes").unwrap();
    let mut front_end = FrontEnd::new(slot.device(), 1);
    let (first, second) = (1 << 20, 2 << 20);
    slot.place_volume(first, open(&one), 64 << 10, true, &one).unwrap();
    front_end.wait_config_change();
    slot.place_volume(second, std::fs::File::open(&two).unwrap(), 4096, false, &two).unwrap();
    front_end.wait_config_change();
    assert_eq!(capacity(&mut front_end), (3 << 20) / 512);
    let sector = |at: u64| at / 512;

    assert_eq!(request(&mut front_end, WRITE, sector(first) + 8, &[9; 1024], 0).0, 0);
    assert_eq!(request(&mut front_end, FLUSH, 0, &[], 0).0, 0);
    assert_eq!(std::fs::read(&one).unwrap()[4096..5120], [9; 1024]);
    assert_eq!(request(&mut front_end, READ, sector(first) + 9, &[], 1024), (0, [[9; 512], [1; 512]].concat()));
    let whole = sector(first + (64 << 10));
    for (at, what) in [(sector(second), "only read"), (0, "nothing there"), (whole - 1, "half beyond it")] {
        assert_eq!(request(&mut front_end, WRITE, at, &[9; 1024], 0).0, 1, "{what}");
    }
    assert_eq!(request(&mut front_end, READ, sector(second), &[], 512), (0, vec![2; 512]));
    let range = |sector: u64, sectors: u32| [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &[0; 4]].concat();
    assert_eq!(request(&mut front_end, DISCARD, 0, &range(sector(first) + 8, 8), 0).0, 0);
    assert_eq!(request(&mut front_end, ZEROES, 0, &range(sector(first) + 16, 8), 0).0, 0);
    assert_eq!(std::fs::read(&one).unwrap()[4096..12 << 10], [0; 8192]);
    for kind in [DISCARD, ZEROES] {
        assert_eq!(request(&mut front_end, kind, 0, &range(sector(second), 8), 0).0, 1, "only read");
        assert_eq!(request(&mut front_end, kind, 0, &range(whole - 8, 16), 0).0, 1, "half beyond it");
    }

    // The second volume is writable from now on and has grown.
    open(&two).set_len(8192).unwrap();
    slot.place_volume(second, open(&two), 8192, true, &two).unwrap();
    assert_eq!(request(&mut front_end, WRITE, sector(second) + 7, &[7; 1024], 0).0, 0);
    assert_eq!(std::fs::read(&two).unwrap()[3584..4608], [7; 1024]);
    let onto = slot.place_volume(second + 4096, open(&one), 512, true, &one);
    assert!(matches!(onto, Err(BlockError::Overlap { .. })), "{onto:?}");
    let long = slot.place_volume(8 << 20, open(&two), 16384, true, &two);
    assert!(matches!(long, Err(BlockError::TooShort { .. })), "{long:?}");
    assert!(matches!(slot.place(0, &ImageDisk::default()), Err(BlockError::Empty { .. })));
    assert!(slot.unplace(first) && !slot.unplace(first));
    assert_eq!(request(&mut front_end, WRITE, sector(first), &[9; 512], 0).0, 1, "it was taken away");
    assert_eq!(request(&mut front_end, READ, sector(first), &[], 512), (0, vec![0; 512]));
}

#[test]
fn a_disk_is_written_flushed_discarded_and_zeroed() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(dir.path(), "scratch", &[]);
    let slot = Slot::read_write("scratch", &path, 1 << 20).unwrap();
    let mut front_end = FrontEnd::new(slot.device(), 1);
    assert_eq!(capacity(&mut front_end), 2048);
    let data: Vec<u8> = (0..64 << 10).map(|byte: u32| (byte % 251) as u8).collect();
    assert_eq!(request(&mut front_end, WRITE, 128, &data, 0).0, 0);
    assert_eq!(request(&mut front_end, FLUSH, 0, &[], 0).0, 0);
    assert_eq!(request(&mut front_end, READ, 128, &[], 64 << 10), (0, data.clone()));
    let mut on_disk = vec![0; 64 << 10];
    std::fs::File::open(&path).unwrap().read_exact_at(&mut on_disk, 64 << 10).unwrap();
    assert!(on_disk == data);

    let range = |sector: u64, sectors: u32, flags: u32| {
        [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
    };
    let before = std::fs::metadata(&path).unwrap().blocks();
    assert_eq!(request(&mut front_end, DISCARD, 0, &range(128, 64, 0), 0).0, 0);
    assert!(std::fs::metadata(&path).unwrap().blocks() < before, "the discarded blocks are released");
    assert_eq!(request(&mut front_end, ZEROES, 0, &[range(192, 8, 1), range(200, 8, 0)].concat(), 0).0, 0);
    let (status, bytes) = request(&mut front_end, READ, 128, &[], 64 << 10);
    let zero = 80 * 512;
    assert!(status == 0 && bytes[..zero].iter().all(|byte| *byte == 0) && bytes[zero..] == data[zero..]);

    assert_eq!(request(&mut front_end, DISCARD, 0, &range(128, 64, 1), 0).0, 2, "a flag that discards do not have");
    assert_eq!(request(&mut front_end, ZEROES, 0, &range(2040, 9, 0), 0).0, 1, "beyond the end");
    assert_eq!(request(&mut front_end, ZEROES, 0, &range(u64::MAX, 9, 0), 0).0, 1, "far beyond the end");
    assert_eq!(request(&mut front_end, DISCARD, 0, &range(0, 1, 0)[..15], 0).0, 1, "half a range");
    assert_eq!(request(&mut front_end, DISCARD, 0, &vec![0; 16 * 33], 0).0, 1, "too many ranges");
    let (status, serial) = request(&mut front_end, SERIAL, 0, &[], 20);
    assert_eq!((status, &serial[..]), (0, &b"scratch\0\0\0\0\0\0\0\0\0\0\0\0\0"[..]));

    slot.resize(2 << 20).unwrap();
    front_end.wait_config_change();
    assert_eq!(capacity(&mut front_end), 4096);
    assert_eq!(request(&mut front_end, WRITE, 4095, &[7; 512], 0).0, 0);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 2 << 20);
    assert_eq!(slot.metrics().writes.load(Ordering::Relaxed), 2);
    assert_eq!(slot.metrics().failures.load(Ordering::Relaxed), 5);
}

#[test]
fn a_slot_grows_while_requests_are_in_flight() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(dir.path(), "image", &[5; 1 << 20]);
    let image = ImageDisk { extents: vec![extent(&path, 0, 1 << 20)] };
    let slot = Slot::read_only("images").unwrap();
    slot.place(0, &image).unwrap();
    let mut front_end = FrontEnd::new(slot.device(), 1);
    let done = Arc::new(AtomicBool::new(false));
    let (changer, finished) = (slot.clone(), done.clone());
    let thread = std::thread::spawn(move || {
        for place in 1..200u64 {
            changer.place(place << 20, &image).unwrap();
            if place % 2 == 0 {
                assert!(changer.unplace((place - 1) << 20));
            }
        }
        finished.store(true, Ordering::Release);
    });
    // Sixteen requests at a time, until the slot no longer changes.
    let base = front_end.allocate(16 * 8192);
    let memory = front_end.memory.clone();
    let mut rounds = 0;
    while !done.load(Ordering::Acquire) || rounds < 10 {
        rounds += 1;
        for number in 0..16 {
            let at = base + number * 8192;
            memory.write_obj(READ, GuestAddress(at)).unwrap();
            memory.write_obj(number, GuestAddress(at + 8)).unwrap();
            memory.write_obj([0u8; 32], GuestAddress(at + 4096)).unwrap();
            front_end.queues[0].driver.submit(&[(at, 16, false), (at + 4096, 512, true), (at + 64, 1, true)]);
        }
        front_end.queues[0].kick();
        for _ in 0..16 {
            front_end.queues[0].wait_used();
        }
        for number in 0..16 {
            let at = base + number * 8192;
            assert_eq!(memory.read_obj::<u8>(GuestAddress(at + 64)).unwrap(), 0);
            assert_eq!(memory.read_obj::<[u8; 32]>(GuestAddress(at + 4096)).unwrap(), [5; 32]);
        }
    }
    thread.join().unwrap();
    front_end.wait_config_change();
    assert_eq!(capacity(&mut front_end), (200 << 20) / 512);
    let last_step = (200 << 20) / 512 - 1;
    assert_eq!(request(&mut front_end, READ, last_step, &[], 512), (0, vec![5; 512]));
}

#[test]
fn a_resize_before_the_guest_runs_is_reported_later() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(dir.path(), "image", &[5; 4096]);
    let slot = Slot::read_only("images").unwrap();
    let mut front_end = FrontEnd::connected(slot.device());
    assert_eq!(capacity(&mut front_end), 0);
    slot.place(0, &ImageDisk { extents: vec![extent(&path, 0, 4096)] }).unwrap();
    front_end.set_up(1);
    front_end.wait_config_change();
    assert_eq!(capacity(&mut front_end), 2048);
}

#[test]
fn a_stopped_queue_continues_at_its_position() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(dir.path(), "image", &[5; 4096]);
    let slot = Slot::read_only("images").unwrap();
    slot.place(0, &ImageDisk { extents: vec![extent(&path, 0, 4096)] }).unwrap();
    let mut front_end = FrontEnd::new(slot.device(), 1);
    for _ in 0..3 {
        assert_eq!(request(&mut front_end, READ, 0, &[], 512), (0, vec![5; 512]));
    }
    let base = front_end.front.get_vring_base(0).unwrap();
    assert_eq!(base, 3);
    // A request that arrives while the queue is stopped is served when the queue runs again.
    let at = front_end.allocate(8192);
    front_end.memory.write_obj([0u8; 16], GuestAddress(at)).unwrap();
    let queue = &mut front_end.queues[0];
    queue.driver.submit(&[(at, 16, false), (at + 4096, 512, true), (at + 64, 1, true)]);
    queue.kick();
    let mut queue = front_end.queues.remove(0);
    front_end.start(0, &queue, base as u16);
    queue.wait_used();
    assert_eq!(front_end.memory.read_obj::<u8>(GuestAddress(at + 4096)).unwrap(), 5);

    // Sets new memory while the queue runs: the same memory once more, as after a hotplug.
    let regions: Vec<_> =
        front_end.memory.iter().map(|region| VhostUserMemoryRegionInfo::from_guest_region(region).unwrap()).collect();
    front_end.front.set_mem_table(&regions).unwrap();
    front_end.queues.push(queue);
    assert_eq!(request(&mut front_end, READ, 1, &[], 512), (0, vec![5; 512]));
}

#[test]
fn buffers_may_be_in_any_memory_region() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(dir.path(), "image", &[5; 4096]);
    let slot = Slot::read_only("images").unwrap();
    slot.place(0, &ImageDisk { extents: vec![extent(&path, 0, 4096)] }).unwrap();
    let mut front_end = FrontEnd::new(slot.device(), 1);
    let at = front_end.allocate(4096);
    front_end.memory.write_obj([0u8; 16], GuestAddress(at)).unwrap();
    let end = SECOND + REGION - 512;
    front_end.queues[0].driver.submit(&[(at, 16, false), (end, 512, true), (at + 64, 1, true)]);
    front_end.queues[0].kick();
    front_end.queues[0].wait_used();
    assert_eq!(front_end.memory.read_obj::<[u8; 32]>(GuestAddress(end)).unwrap(), [5; 32]);
    // A request beyond the end of memory is returned unprocessed, and the next request is served.
    front_end.queues[0].driver.submit(&[(at, 16, false), (end, 1024, true), (at + 64, 1, true)]);
    front_end.queues[0].kick();
    assert_eq!(front_end.queues[0].wait_used().1, 0);
    assert_eq!(request(&mut front_end, READ, 0, &[], 512), (0, vec![5; 512]));
}

#[test]
fn invalid_messages_end_only_their_connection() {
    let slot = Slot::read_only("images").unwrap();
    let mut front_end = FrontEnd::connected(slot.device());
    front_end.disconnect();
    let socket = front_end.socket.clone();
    let nonsense: [&[u8]; 5] = [
        &[0xff; 64],
        &[1, 0, 0, 0, 1, 0, 0, 0, 0xff, 0xff, 0, 0],
        &[99, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0],
        &[5, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0],
        &[8, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 77, 0, 0, 0, 8, 0, 0, 0],
    ];
    for bytes in nonsense {
        let mut stream = UnixStream::connect(&socket).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.write_all(bytes).unwrap();
        let mut rest = Vec::new();
        // A unix socket closed with unread bytes ends with a reset. In both cases the stream ends without a reply.
        match stream.read_to_end(&mut rest) {
            Ok(0) => {}
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
            Ok(_) => panic!("{bytes:?} were answered with {rest:?}"),
        }
    }
    let (front, channel) = connect(&socket);
    (front_end.front, front_end.channel) = (front, channel);
    assert_eq!(capacity(&mut front_end), 0);
    // Memory that could shrink is rejected.
    front_end.memory = guest::memory(SealFlag::F_SEAL_GROW);
    let regions: Vec<_> =
        front_end.memory.iter().map(|region| VhostUserMemoryRegionInfo::from_guest_region(region).unwrap()).collect();
    assert!(front_end.front.set_mem_table(&regions).is_err());
}

#[test]
fn a_server_stops_in_any_state() {
    let slot = Slot::read_only("images").unwrap();
    let mut connected = FrontEnd::connected(slot.device());
    connected.server.take().unwrap().stop();
    let mut running = FrontEnd::new(slot.device(), 1);
    running.server.take().unwrap().stop();
    // The front end disconnects within a message.
    let mut half = FrontEnd::connected(slot.device());
    half.disconnect();
    let mut stream = UnixStream::connect(&half.socket).unwrap();
    stream.write_all(&[1, 0]).unwrap();
    half.server.take().unwrap().stop();
    eventually("the end of the connection", || matches!(stream.read(&mut [0; 8]), Ok(0) | Err(_)));
}

#[test]
fn invalid_placements_are_rejected_without_a_change() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(dir.path(), "image", &[5; 4096]);
    let image = |offset, length| ImageDisk { extents: vec![extent(&path, offset, length)] };
    let slot = Slot::read_only("images").unwrap();
    assert!(matches!(slot.place(0, &ImageDisk::default()), Err(BlockError::Empty { at: 0 })));
    assert!(matches!(slot.place(100, &image(0, 512)), Err(BlockError::Unaligned { value: 100, .. })));
    assert!(matches!(slot.place(0, &image(3, 512)), Err(BlockError::Unaligned { value: 3, .. })));
    assert!(matches!(slot.place(u64::MAX - 511, &image(0, 512)), Err(BlockError::Unaligned { .. })));
    assert!(matches!(slot.place(0, &image(4096, 512)), Err(BlockError::TooShort { length: 4096, needed: 4608, .. })));
    let missing = ImageDisk { extents: vec![extent(&dir.path().join("missing"), 0, 512)] };
    assert!(matches!(slot.place(0, &missing), Err(BlockError::Open { .. })));
    assert!(matches!(slot.resize(512), Err(BlockError::WrongKind { slot_kind: "read-only", .. })));
    assert_eq!(slot.capacity(), 0);
    slot.place(4096, &image(0, 4096)).unwrap();
    for at in [512, 4096, 7680] {
        let overlap = slot.place(at, &image(0, 4096));
        assert!(matches!(overlap, Err(BlockError::Overlap { other: 4096, other_length: 4096, .. })), "{at}");
    }
    slot.place(0, &image(0, 4096)).unwrap();
    slot.place(8192, &image(0, 4096)).unwrap();

    assert!(matches!(Slot::read_only(""), Err(BlockError::Serial { .. })));
    assert!(matches!(Slot::read_only("a serial number of many"), Err(BlockError::Serial { .. })));
    assert!(matches!(Slot::read_write("x", &path, 100), Err(BlockError::Unaligned { .. })));
    assert!(matches!(Slot::read_write("x", &dir.path().join("missing"), 512), Err(BlockError::Open { .. })));
    let disk = Slot::read_write("x", &path, 4096).unwrap();
    assert!(matches!(disk.place(0, &image(0, 512)), Err(BlockError::WrongKind { slot_kind: "read-write", .. })));
}
