//! Tests the file-system device with a driver and a file-server process that can both break any rule.

use super::Fs;
use crate::virtio::scripted::Scripted;
use crate::virtio::{Device, DeviceKind};
use nacelle_base::share::{MAX_MESSAGE, REPLY_HEADER, REQUEST_HEADER};
use nix::sys::socket::{setsockopt, sockopt};
use proptest::prelude::*;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use vm_memory::{Bytes, GuestAddress};

const AT: u64 = 0x20000;
const ROOM: u64 = 0x40000;
const MEMORY: usize = 0x400000;

/// Returns a device and the other ends of its streams.
fn fs() -> (Fs, [UnixStream; 2]) {
    let (first, its) = UnixStream::pair().unwrap();
    let (second, theirs) = UnixStream::pair().unwrap();
    (Fs::new([first, second]).unwrap(), [its, theirs])
}

fn scripted(fs: Fs) -> Scripted {
    Scripted::new(fs.device(), &[(GuestAddress(0), MEMORY)])
}

/// Receives a request. Returns its bytes and the maximum length of its answer.
fn take(stream: &mut UnixStream) -> (Vec<u8>, usize) {
    let mut header = [0; REQUEST_HEADER];
    stream.read_exact(&mut header).unwrap();
    let number = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap()) as usize;
    let mut request = vec![0; number(0)];
    stream.read_exact(&mut request).unwrap();
    (request, number(4))
}

fn answer(stream: &mut UnixStream, length: u32, bytes: &[u8]) -> io::Result<()> {
    assert_eq!(REPLY_HEADER, 4);
    stream.write_all(&length.to_le_bytes())?;
    stream.write_all(bytes)
}

/// Reads an error answer: length, error number and the id of the request.
fn refusal(machine: &Scripted) -> (u32, i32, u64) {
    let read = |at| GuestAddress(ROOM + at);
    let memory = &machine.memory;
    (memory.read_obj(read(0)).unwrap(), memory.read_obj(read(4)).unwrap(), memory.read_obj(read(8)).unwrap())
}

fn refused(number: u64) -> (u32, i32, u64) {
    (16, -libc::EIO, number)
}

#[test]
fn the_driver_finds_the_tag_and_one_queue_for_requests() {
    let (fs, _ends) = fs();
    assert_eq!((fs.kind(), fs.queue_sizes()), (DeviceKind::Fs, &[128, 128][..]));
    let mut config = [0xff; 48];
    fs.read_config(0, &mut config);
    assert_eq!(&config[..8], b"nacelle\0");
    assert_eq!(config[8..], [[0; 28].as_slice(), &[1, 0, 0, 0], &[0; 8]].concat());
}

#[test]
fn requests_and_answers_cross_whole() {
    let (fs, [first, mut second]) = fs();
    let metrics = fs.metrics();
    let mut machine = scripted(fs);
    let request: Vec<u8> = (0..70_000u32).map(|number| number as u8).collect();
    machine.memory.write_slice(&request, GuestAddress(AT)).unwrap();
    let other = thread::spawn(move || {
        let taken = take(&mut second);
        answer(&mut second, 5, b"hello").unwrap();
        let without = take(&mut second);
        answer(&mut second, 0, b"").unwrap();
        (taken, without)
    });
    machine.drivers[1].submit(&[
        (AT, 60_000, false),
        (AT + 60_000, 10_000, false),
        (ROOM, 3, true),
        (ROOM + 8, 9, true),
    ]);
    machine.start(1);
    assert_eq!(machine.wait(1), 5);
    machine.stop(1);
    let mut bytes = [0; 10];
    machine.memory.read_slice(&mut bytes, GuestAddress(ROOM)).unwrap();
    assert_eq!(&bytes, b"hel\0\0\0\0\0lo");
    // Some requests have no answer.
    assert_eq!(machine.request(1, &[(AT, 40, false)]), 0);
    let (taken, without) = other.join().unwrap();
    assert!(taken.0 == request, "70,000 bytes");
    assert_eq!((taken.1, without.0.len(), without.1), (12, 40, 0));
    assert_eq!((metrics.requests.load(Relaxed), metrics.failed.load(Relaxed)), (2, 0));
    drop(first);
}

#[test]
fn short_requests_do_not_wait_for_the_answers_to_others() {
    let (fs, [_first, mut second]) = fs();
    let metrics = fs.metrics();
    let mut machine = scripted(fs);
    // A long request among short ones is sent after all earlier ones were answered, and so are the later ones.
    let lengths: [u32; 5] = [40, 50, 60_000, 40, 70];
    for length in lengths {
        machine.drivers[1].submit(&[(AT, length, false), (ROOM, 1, true)]);
    }
    let other = thread::spawn(move || {
        let mut taken: Vec<usize> = (0..2).map(|_| take(&mut second).0.len()).collect();
        second.set_nonblocking(true).unwrap();
        let early = second.read(&mut [0]).unwrap_err().kind();
        second.set_nonblocking(false).unwrap();
        (0..2).for_each(|_| answer(&mut second, 1, b"!").unwrap());
        for _ in 0..3 {
            taken.push(take(&mut second).0.len());
            answer(&mut second, 1, b"!").unwrap();
        }
        (taken, early)
    });
    machine.start(1);
    (0..lengths.len()).for_each(|_| assert_eq!(machine.wait(1), 1));
    let (taken, early) = other.join().unwrap();
    assert_eq!(taken, lengths.map(|length| length as usize));
    assert_eq!(early, io::ErrorKind::WouldBlock);
    assert_eq!((metrics.requests.load(Relaxed), metrics.failed.load(Relaxed)), (5, 0));
}

#[test]
fn a_stream_that_takes_half_a_request_gets_the_rest() {
    let (first, _its) = UnixStream::pair().unwrap();
    let (second, mut theirs) = UnixStream::pair().unwrap();
    // The minimum that Linux allows: less than one of these requests at a time.
    setsockopt(&second, sockopt::SndBuf, &1).unwrap();
    let mut machine = scripted(Fs::new([first, second]).unwrap());
    let request: Vec<u8> = (0..6_000u32).map(|number| number as u8).collect();
    machine.memory.write_slice(&request, GuestAddress(AT)).unwrap();
    for _ in 0..4 {
        machine.drivers[1].submit(&[(AT, 6_000, false), (ROOM, 1, true)]);
    }
    machine.start(1);
    let other = thread::spawn(move || {
        for _ in 0..4 {
            assert!(take(&mut theirs).0 == request, "6,000 bytes");
            answer(&mut theirs, 1, b"!").unwrap();
        }
    });
    (0..4).for_each(|_| assert_eq!(machine.wait(1), 1));
    other.join().unwrap();
}

#[test]
fn without_the_other_process_there_is_an_error_for_the_guest() {
    let (fs, [_first, second]) = fs();
    let mut machine = scripted(fs);
    drop(second);
    for number in [7u64, 8] {
        machine.memory.write_obj(number, GuestAddress(AT + 8)).unwrap();
        assert_eq!(machine.request(1, &[(AT, 40, false), (ROOM, 100, true)]), 16);
        assert_eq!(refusal(&machine), refused(number));
    }
    assert_eq!(machine.request(1, &[(AT, 40, false)]), 0);
    assert_eq!(machine.request(1, &[(AT, 40, false), (ROOM, 15, true)]), 0);
    assert_eq!(machine.request(1, &[(AT, 15, false), (ROOM, 100, true)]), 0);
}

#[test]
fn a_request_that_is_too_long_is_refused_alone() {
    let (fs, [_first, mut second]) = fs();
    let mut machine = scripted(fs);
    let half = u32::try_from(MAX_MESSAGE / 2 + 1).unwrap();
    machine.memory.write_obj(9u64, GuestAddress(8)).unwrap();
    assert_eq!(machine.request(1, &[(0, half, false), (0, half, false), (ROOM, 16, true)]), 16);
    let other = thread::spawn(move || {
        take(&mut second);
        answer(&mut second, 1, b"!").unwrap();
    });
    assert_eq!(machine.request(1, &[(AT, 40, false), (ROOM, 16, true)]), 1);
    other.join().unwrap();
}

#[test]
fn a_queue_stops_though_no_answer_comes() {
    let (fs, [_first, mut second]) = fs();
    let mut machine = scripted(fs);
    machine.memory.write_obj(3u64, GuestAddress(AT + 8)).unwrap();
    machine.drivers[1].submit(&[(AT, 40, false), (ROOM, 100, true)]);
    machine.start(1);
    take(&mut second);
    machine.stop(1);
    assert_eq!(machine.wait(1), 16);
    assert_eq!(refusal(&machine), refused(3));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn whatever_is_answered_stays_in_its_room(
        length in prop_oneof![0..200u32, any::<u32>()], bytes in proptest::collection::vec(any::<u8>(), 0..200), room in 0..100u32,
    ) {
        let (fs, [_first, mut second]) = fs();
        let mut machine = scripted(fs);
        let (said, told) = (length, bytes.clone());
        let other = thread::spawn(move || {
            take(&mut second);
            answer(&mut second, said, &told)
        });
        let written = machine.request(1, &[(AT, 40, false), (ROOM, room, true)]);
        let sent = other.join().unwrap();
        let whole = length <= room && length as usize <= bytes.len();
        let refusal = if room < 16 { 0 } else { 16 };
        // The device may close the stream after an invalid length, before all bytes are sent.
        prop_assert!(sent.is_ok() || !whole, "{:?}", sent);
        // Surplus bytes are detected if they arrive together with the answer; otherwise they corrupt the next one.
        let more = bytes.len() > length as usize;
        prop_assert!(if whole { written == length || more && written == refusal } else { written == refusal }, "{}", written);
        let mut behind = [0; 300];
        machine.memory.read_slice(&mut behind, GuestAddress(ROOM + u64::from(room))).unwrap();
        prop_assert!(behind.iter().all(|byte| *byte == 0));
    }
}
