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
const REPLY_AT: u64 = 0x40000;
const MEMORY: usize = 0x400000;

/// Returns a device and the other ends of its streams.
fn fs() -> (Fs, [UnixStream; 2]) {
    let (first, first_peer) = UnixStream::pair().unwrap();
    let (second, second_peer) = UnixStream::pair().unwrap();
    (Fs::new([first, second]).unwrap(), [first_peer, second_peer])
}

fn scripted(fs: Fs) -> Scripted {
    Scripted::new(fs.device(), &[(GuestAddress(0), MEMORY)])
}

/// Receives a request. Returns its bytes and the maximum length of its answer.
fn receive_request(stream: &mut UnixStream) -> (Vec<u8>, usize) {
    let mut header = [0; REQUEST_HEADER];
    stream.read_exact(&mut header).unwrap();
    let number = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap()) as usize;
    let mut request = vec![0; number(0)];
    stream.read_exact(&mut request).unwrap();
    (request, number(4))
}

fn send_reply(stream: &mut UnixStream, length: u32, bytes: &[u8]) -> io::Result<()> {
    assert_eq!(REPLY_HEADER, 4);
    stream.write_all(&length.to_le_bytes())?;
    stream.write_all(bytes)
}

/// Reads an error answer: length, error number and the id of the request.
fn error_reply(machine: &Scripted) -> (u32, i32, u64) {
    let read = |at| GuestAddress(REPLY_AT + at);
    let memory = &machine.memory;
    (memory.read_obj(read(0)).unwrap(), memory.read_obj(read(4)).unwrap(), memory.read_obj(read(8)).unwrap())
}

fn io_error(number: u64) -> (u32, i32, u64) {
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
fn requests_and_replies_are_passed_completely() {
    let (fs, [first, mut second]) = fs();
    let metrics = fs.metrics();
    let mut machine = scripted(fs);
    let request: Vec<u8> = (0..70_000u32).map(|number| number as u8).collect();
    machine.memory.write_slice(&request, GuestAddress(AT)).unwrap();
    let other = thread::spawn(move || {
        let received = receive_request(&mut second);
        send_reply(&mut second, 5, b"hello").unwrap();
        let without = receive_request(&mut second);
        send_reply(&mut second, 0, b"").unwrap();
        (received, without)
    });
    machine.drivers[1].submit(&[
        (AT, 60_000, false),
        (AT + 60_000, 10_000, false),
        (REPLY_AT, 3, true),
        (REPLY_AT + 8, 9, true),
    ]);
    machine.start(1);
    assert_eq!(machine.wait(1), 5);
    machine.stop(1);
    let mut bytes = [0; 10];
    machine.memory.read_slice(&mut bytes, GuestAddress(REPLY_AT)).unwrap();
    assert_eq!(&bytes, b"hel\0\0\0\0\0lo");
    // Some requests have no answer.
    assert_eq!(machine.request(1, &[(AT, 40, false)]), 0);
    let (received, without) = other.join().unwrap();
    assert!(received.0 == request, "70,000 bytes");
    assert_eq!((received.1, without.0.len(), without.1), (12, 40, 0));
    assert_eq!((metrics.requests.load(Relaxed), metrics.failed.load(Relaxed)), (2, 0));
    drop(first);
}

#[test]
fn short_requests_are_sent_before_earlier_replies() {
    let (fs, [_first, mut second]) = fs();
    let metrics = fs.metrics();
    let mut machine = scripted(fs);
    // A long request among short ones is sent after all earlier ones were answered, and so are the later ones.
    let lengths: [u32; 5] = [40, 50, 60_000, 40, 70];
    for length in lengths {
        machine.drivers[1].submit(&[(AT, length, false), (REPLY_AT, 1, true)]);
    }
    let other = thread::spawn(move || {
        let mut received: Vec<usize> = (0..2).map(|_| receive_request(&mut second).0.len()).collect();
        second.set_nonblocking(true).unwrap();
        let early = second.read(&mut [0]).unwrap_err().kind();
        second.set_nonblocking(false).unwrap();
        (0..2).for_each(|_| send_reply(&mut second, 1, b"!").unwrap());
        for _ in 0..3 {
            received.push(receive_request(&mut second).0.len());
            send_reply(&mut second, 1, b"!").unwrap();
        }
        (received, early)
    });
    machine.start(1);
    (0..lengths.len()).for_each(|_| assert_eq!(machine.wait(1), 1));
    let (received, early) = other.join().unwrap();
    assert_eq!(received, lengths.map(|length| length as usize));
    assert_eq!(early, io::ErrorKind::WouldBlock);
    assert_eq!((metrics.requests.load(Relaxed), metrics.failed.load(Relaxed)), (5, 0));
}

#[test]
fn partially_sent_requests_are_completed() {
    let (first, _its) = UnixStream::pair().unwrap();
    let (second, mut second_peer) = UnixStream::pair().unwrap();
    // The minimum that Linux allows: less than one of these requests at a time.
    setsockopt(&second, sockopt::SndBuf, &1).unwrap();
    let mut machine = scripted(Fs::new([first, second]).unwrap());
    let request: Vec<u8> = (0..6_000u32).map(|number| number as u8).collect();
    machine.memory.write_slice(&request, GuestAddress(AT)).unwrap();
    for _ in 0..4 {
        machine.drivers[1].submit(&[(AT, 6_000, false), (REPLY_AT, 1, true)]);
    }
    machine.start(1);
    let other = thread::spawn(move || {
        for _ in 0..4 {
            assert!(receive_request(&mut second_peer).0 == request, "6,000 bytes");
            send_reply(&mut second_peer, 1, b"!").unwrap();
        }
    });
    (0..4).for_each(|_| assert_eq!(machine.wait(1), 1));
    other.join().unwrap();
}

#[test]
fn without_the_file_server_requests_fail_with_eio() {
    let (fs, [_first, second]) = fs();
    let mut machine = scripted(fs);
    drop(second);
    for number in [7u64, 8] {
        machine.memory.write_obj(number, GuestAddress(AT + 8)).unwrap();
        assert_eq!(machine.request(1, &[(AT, 40, false), (REPLY_AT, 100, true)]), 16);
        assert_eq!(error_reply(&machine), io_error(number));
    }
    assert_eq!(machine.request(1, &[(AT, 40, false)]), 0);
    assert_eq!(machine.request(1, &[(AT, 40, false), (REPLY_AT, 15, true)]), 0);
    assert_eq!(machine.request(1, &[(AT, 15, false), (REPLY_AT, 100, true)]), 0);
}

#[test]
fn only_the_oversized_request_fails() {
    let (fs, [_first, mut second]) = fs();
    let mut machine = scripted(fs);
    let half = u32::try_from(MAX_MESSAGE / 2 + 1).unwrap();
    machine.memory.write_obj(9u64, GuestAddress(8)).unwrap();
    assert_eq!(machine.request(1, &[(0, half, false), (0, half, false), (REPLY_AT, 16, true)]), 16);
    let other = thread::spawn(move || {
        receive_request(&mut second);
        send_reply(&mut second, 1, b"!").unwrap();
    });
    assert_eq!(machine.request(1, &[(AT, 40, false), (REPLY_AT, 16, true)]), 1);
    other.join().unwrap();
}

#[test]
fn a_queue_stops_without_a_reply() {
    let (fs, [_first, mut second]) = fs();
    let mut machine = scripted(fs);
    machine.memory.write_obj(3u64, GuestAddress(AT + 8)).unwrap();
    machine.drivers[1].submit(&[(AT, 40, false), (REPLY_AT, 100, true)]);
    machine.start(1);
    receive_request(&mut second);
    machine.stop(1);
    assert_eq!(machine.wait(1), 16);
    assert_eq!(error_reply(&machine), io_error(3));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn replies_never_exceed_the_guests_buffers(
        length in prop_oneof![0..200u32, any::<u32>()], bytes in proptest::collection::vec(any::<u8>(), 0..200), max_reply in 0..100u32,
    ) {
        let (fs, [_first, mut second]) = fs();
        let mut machine = scripted(fs);
        let (length_sent, bytes_sent) = (length, bytes.clone());
        let other = thread::spawn(move || {
            receive_request(&mut second);
            send_reply(&mut second, length_sent, &bytes_sent)
        });
        let written = machine.request(1, &[(AT, 40, false), (REPLY_AT, max_reply, true)]);
        let sent = other.join().unwrap();
        let whole = length <= max_reply && length as usize <= bytes.len();
        let error_reply = if max_reply < 16 { 0 } else { 16 };
        // The device may close the stream after an invalid length, before all bytes are sent.
        prop_assert!(sent.is_ok() || !whole, "{:?}", sent);
        // Surplus bytes are detected if they arrive together with the answer; otherwise they corrupt the next one.
        let more = bytes.len() > length as usize;
        prop_assert!(if whole { written == length || more && written == error_reply } else { written == error_reply }, "{}", written);
        let mut behind = [0; 300];
        machine.memory.read_slice(&mut behind, GuestAddress(REPLY_AT + u64::from(max_reply))).unwrap();
        prop_assert!(behind.iter().all(|byte| *byte == 0));
    }
}
