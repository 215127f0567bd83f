//! Tests the vsock device behind its vhost-user server, with a simulated guest.

#[allow(dead_code, reason = "each test file uses a part of it")]
mod guest;

use guest::{FrontEnd, LIMIT, eventually};
use nacelle_vmm::vsock::{BACKLOG, MAX_CONNECTIONS, Vsock, VsockError, WINDOW};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use vhost::VhostBackend;
use vm_memory::{Bytes, GuestAddress};

const CID: u32 = 7;
const RX: usize = 0;
const TX: usize = 1;

const REQUEST: u16 = 1;
const RESPONSE: u16 = 2;
const RST: u16 = 3;
const SHUTDOWN: u16 = 4;
const RW: u16 = 5;
const CREDIT_UPDATE: u16 = 6;
const CREDIT_REQUEST: u16 = 7;

/// The guest's receive window in these tests.
const GUEST_WINDOW: u32 = 64 << 10;

/// The fields of a packet that the tests check.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Packet {
    src_cid: u64,
    dst_cid: u64,
    host: u32,
    guest: u32,
    kind: u16,
    op: u16,
    flags: u32,
    buf_alloc: u32,
    fwd_cnt: u32,
    payload: Vec<u8>,
}

/// Returns a packet of the guest on the connection `host`, `guest`.
fn packet(host: u32, guest: u32, op: u16) -> Packet {
    Packet {
        src_cid: CID.into(),
        dst_cid: 2,
        host,
        guest,
        kind: 1,
        op,
        flags: 0,
        buf_alloc: GUEST_WINDOW,
        fwd_cnt: 0,
        payload: Vec::new(),
    }
}

struct VsockGuest {
    front_end: FrontEnd,
    tx_at: u64,
}

impl VsockGuest {
    fn new(vsock: &Vsock) -> VsockGuest {
        let mut front_end = FrontEnd::new(vsock.device(), 2);
        let tx_at = front_end.allocate(128 << 10);
        let mut guest = VsockGuest { front_end, tx_at };
        for _ in 0..60 {
            let at = guest.front_end.allocate(4096);
            guest.offer_buffer(at);
        }
        guest.front_end.queues[RX].kick();
        guest
    }

    /// Provides a buffer to the device, in two pieces: header with a little data, and data.
    fn offer_buffer(&mut self, at: u64) {
        self.front_end.queues[RX].driver.submit(&[(at, 64, true), (at + 64, 4096 - 64, true)]);
    }

    /// Sends a packet, with `length` in its header regardless of its payload.
    fn send_as(&mut self, packet: &Packet, length: u32) {
        let mut bytes = Vec::new();
        bytes.extend(packet.src_cid.to_le_bytes());
        bytes.extend(packet.dst_cid.to_le_bytes());
        bytes.extend(packet.guest.to_le_bytes());
        bytes.extend(packet.host.to_le_bytes());
        bytes.extend(length.to_le_bytes());
        bytes.extend(packet.kind.to_le_bytes());
        bytes.extend(packet.op.to_le_bytes());
        bytes.extend(packet.flags.to_le_bytes());
        bytes.extend(packet.buf_alloc.to_le_bytes());
        bytes.extend(packet.fwd_cnt.to_le_bytes());
        bytes.extend(&packet.payload);
        self.front_end.memory.write_slice(&bytes, GuestAddress(self.tx_at)).unwrap();
        // Three pieces, split within header and payload.
        let whole = bytes.len() as u32;
        let (one, two) = (20, (whole - 20) / 2);
        let at = self.tx_at;
        let pieces = [
            (at, one, false),
            (at + u64::from(one), two, false),
            (at + u64::from(one + two), whole - one - two, false),
        ];
        let queue = &mut self.front_end.queues[TX];
        queue.driver.submit(&pieces);
        queue.kick();
        queue.wait_used();
    }

    fn send(&mut self, packet: &Packet) {
        self.send_as(packet, packet.payload.len() as u32);
    }

    fn receive(&mut self) -> Packet {
        let (head, length) = self.front_end.queues[RX].wait_used();
        self.parse(head, length)
    }

    /// Returns the next packet, if there is one.
    fn try_receive(&mut self) -> Option<Packet> {
        let (head, length) = self.front_end.queues[RX].driver.take_used()?;
        Some(self.parse(head, length))
    }

    fn parse(&mut self, head: u16, length: u32) -> Packet {
        let memory = self.front_end.memory.clone();
        let at: u64 = memory.read_obj(GuestAddress(16 * u64::from(head))).unwrap();
        let mut bytes = vec![0; length as usize];
        memory.read_slice(&mut bytes, GuestAddress(at)).unwrap();
        self.offer_buffer(at);
        self.front_end.queues[RX].kick();
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let u16_at = |at: usize| u16::from_le_bytes(bytes[at..at + 2].try_into().unwrap());
        assert_eq!(u32_at(24) as usize, bytes.len() - 44, "the length in the header");
        Packet {
            src_cid: u64_at(0),
            dst_cid: u64_at(8),
            host: u32_at(16),
            guest: u32_at(20),
            kind: u16_at(28),
            op: u16_at(30),
            flags: u32_at(32),
            buf_alloc: u32_at(36),
            fwd_cnt: u32_at(40),
            payload: bytes.split_off(44),
        }
    }

    /// Returns the next packet that is not about credit.
    fn receive_other(&mut self) -> Packet {
        loop {
            let packet = self.receive();
            if !matches!(packet.op, CREDIT_UPDATE | CREDIT_REQUEST) {
                return packet;
            }
        }
    }

    /// Answers the request of a host that connects to `port`.
    fn accept(&mut self, port: u32) -> Packet {
        let request = self.receive_other();
        assert_eq!((request.op, request.guest, request.kind), (REQUEST, port, 1));
        assert_eq!((request.src_cid, request.dst_cid), (2, CID.into()));
        self.send(&packet(request.host, port, RESPONSE));
        request
    }

    /// Connects from `from` to the host's `port`.
    fn connect(&mut self, port: u32, from: u32) -> Packet {
        self.send(&packet(port, from, REQUEST));
        self.receive_other()
    }
}

/// Returns a device, its guest, and a connection that the host has made to port 5000.
fn connected() -> (Vsock, VsockGuest, UnixStream, u32) {
    let vsock = Vsock::new(CID).unwrap();
    let mut guest = VsockGuest::new(&vsock);
    let caller = vsock.clone();
    let thread = std::thread::spawn(move || caller.connect(5000, LIMIT).unwrap());
    let host = guest.accept(5000).host;
    let stream = thread.join().unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.set_write_timeout(Some(LIMIT)).unwrap();
    (vsock, guest, stream, host)
}

fn pattern(length: usize, seed: usize) -> Vec<u8> {
    (0..length).map(|at| ((at * 31 + at / 251 + seed) % 256) as u8).collect()
}

#[test]
fn data_passes_in_both_directions() {
    const BYTES: usize = 10 << 20;
    let (vsock, mut guest, mut stream, host) = connected();
    let mut writer = stream.try_clone().unwrap();
    let sender = std::thread::spawn(move || {
        writer.write_all(&pattern(BYTES, 1)).unwrap();
        writer.shutdown(Shutdown::Write).unwrap();
    });
    let receiver = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        assert!(bytes == pattern(BYTES, 1), "what came back is what was sent");
    });
    // The guest echoes, with as much data in flight as the host's credit allows.
    let mut echo = VecDeque::new();
    let (mut sent, mut allowed, mut ended) = (0u32, 0u32, false);
    let start = Instant::now();
    while !ended || !echo.is_empty() {
        assert!(start.elapsed() < 4 * LIMIT, "stuck after {sent} bytes");
        let idle = echo.is_empty() || allowed == sent;
        let came = if idle { Some(guest.receive()) } else { guest.try_receive() };
        if let Some(came) = came {
            allowed = came.fwd_cnt.wrapping_add(came.buf_alloc);
            match came.op {
                RW => echo.extend(came.payload),
                SHUTDOWN => {
                    assert_eq!(came.flags, 2, "it sends no more, but receives");
                    ended = true;
                }
                op => assert!(op == CREDIT_UPDATE || op == CREDIT_REQUEST, "{op}"),
            }
        }
        let count = echo.len().min(allowed.wrapping_sub(sent) as usize).min(60000);
        if count > 0 {
            let mut data = packet(host, 5000, RW);
            data.payload = echo.drain(..count).collect();
            sent = sent.wrapping_add(count as u32);
            data.fwd_cnt = sent;
            guest.send(&data);
        }
    }
    let mut end = packet(host, 5000, SHUTDOWN);
    (end.flags, end.fwd_cnt) = (3, sent);
    guest.send(&end);
    sender.join().unwrap();
    receiver.join().unwrap();
    assert_eq!(guest.receive_other().op, RST, "both are done");
    assert_eq!(vsock.metrics().to_guest_bytes.load(std::sync::atomic::Ordering::Relaxed), BYTES as u64);
    assert_eq!(vsock.metrics().from_guest_bytes.load(std::sync::atomic::Ordering::Relaxed), BYTES as u64);
}

#[test]
fn a_guest_that_does_not_read_exerts_back_pressure() {
    let (_vsock, mut guest, stream, host) = connected();
    let mut writer = stream.try_clone().unwrap();
    let sender = std::thread::spawn(move || writer.write_all(&pattern(1 << 20, 2)).unwrap());
    let mut got = Vec::new();
    while got.len() < GUEST_WINDOW as usize {
        let came = guest.receive();
        assert_eq!(came.op, RW);
        got.extend(came.payload);
    }
    assert_eq!(got.len(), GUEST_WINDOW as usize, "not a byte more than it has room for");
    assert_eq!(guest.receive().op, CREDIT_REQUEST);
    assert!(!sender.is_finished());
    assert_eq!(guest.try_receive(), None);
    while got.len() < 1 << 20 {
        let mut update = packet(host, 5000, CREDIT_UPDATE);
        update.fwd_cnt = got.len() as u32;
        guest.send(&update);
        let until = (got.len() + GUEST_WINDOW as usize).min(1 << 20);
        while got.len() < until {
            let came = guest.receive();
            match came.op {
                RW => got.extend(came.payload),
                op => assert_eq!(op, CREDIT_REQUEST),
            }
        }
    }
    sender.join().unwrap();
    assert!(got == pattern(1 << 20, 2));
}

#[test]
fn a_host_that_does_not_read_exerts_back_pressure() {
    let (_vsock, mut guest, mut stream, host) = connected();
    let data = pattern(8 << 20, 3);
    let mut sent = 0;
    // Sends until the host gives no more credit: its socket's buffer and the window are full.
    let mut request = packet(host, 5000, CREDIT_REQUEST);
    let mut allowed = WINDOW;
    loop {
        let room = allowed.wrapping_sub(sent as u32) as usize;
        if room == 0 {
            guest.send(&request);
            let update = guest.receive();
            assert_eq!((update.op, update.buf_alloc), (CREDIT_UPDATE, WINDOW));
            if update.fwd_cnt.wrapping_add(WINDOW) == allowed {
                break;
            }
            allowed = update.fwd_cnt.wrapping_add(WINDOW);
            continue;
        }
        let count = room.min(50000);
        let mut more = packet(host, 5000, RW);
        more.payload = data[sent..sent + count].to_vec();
        guest.send(&more);
        sent += count;
        assert!(sent < 4 << 20, "the host takes everything");
    }
    // When the host reads, it gives credit again.
    let mut got = vec![0; sent];
    stream.read_exact(&mut got).unwrap();
    assert!(got == data[..sent]);
    request.flags = 0;
    eventually("credit", || {
        guest.send(&request);
        let update = guest.receive();
        update.op == CREDIT_UPDATE && update.fwd_cnt == sent as u32
    });
    // A guest that exceeds its credit loses only this connection.
    let mut more = packet(host, 5000, RW);
    more.payload = vec![1; 60000];
    let start = Instant::now();
    loop {
        guest.send(&more);
        if guest.try_receive().is_some_and(|answer| answer.op == RST) {
            break;
        }
        assert!(start.elapsed() < LIMIT, "the guest may send for ever");
    }
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).unwrap();
    assert!(rest.iter().all(|byte| *byte == 1) && rest.len() < 4 << 20);
}

#[test]
fn the_directions_are_shut_down_independently() {
    let vsock = Vsock::new(CID).unwrap();
    let mut guest = VsockGuest::new(&vsock);
    let listener = vsock.listen(1024).unwrap();
    assert!(matches!(vsock.listen(1024), Err(VsockError::PortInUse { port: 1024 })));
    let response = guest.connect(1024, 700);
    assert_eq!((response.op, response.host, response.guest, response.buf_alloc), (RESPONSE, 1024, 700, WINDOW));
    let mut stream = listener.accept(LIMIT).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    // The guest sends data and shuts down; the host still answers.
    let mut hello = packet(1024, 700, RW);
    hello.payload = b"hello".to_vec();
    guest.send(&hello);
    let mut end = packet(1024, 700, SHUTDOWN);
    end.flags = 2;
    guest.send(&end);
    let mut got = String::new();
    stream.read_to_string(&mut got).unwrap();
    assert_eq!(got, "hello");
    stream.write_all(b"good bye").unwrap();
    let answer = guest.receive_other();
    assert_eq!((answer.op, &answer.payload[..]), (RW, &b"good bye"[..]));
    drop(stream);
    let over = guest.receive_other();
    assert_eq!((over.op, over.flags), (SHUTDOWN, 3));

    // The host shuts down; the guest still sends, then resets: the host reads the end.
    let (_other, mut guest, mut stream, host) = connected();
    stream.shutdown(Shutdown::Write).unwrap();
    let over = guest.receive_other();
    assert_eq!((over.op, over.flags), (SHUTDOWN, 2));
    let mut last = packet(host, 5000, RW);
    last.payload = b"last words".to_vec();
    guest.send(&last);
    guest.send(&packet(host, 5000, RST));
    let mut got = String::new();
    stream.read_to_string(&mut got).unwrap();
    assert_eq!(got, "last words");

    // The guest closes before it has received everything: the host reads the end, without an error.
    let (_other, mut guest, mut stream, host) = connected();
    let mut full = packet(host, 5000, CREDIT_UPDATE);
    full.buf_alloc = 0;
    guest.send(&full);
    stream.write_all(b"too late").unwrap();
    let mut last = packet(host, 5000, RW);
    (last.buf_alloc, last.payload) = (0, b"last words".to_vec());
    guest.send(&last);
    let mut end = packet(host, 5000, SHUTDOWN);
    end.flags = 3;
    guest.send(&end);
    let mut got = String::new();
    stream.read_to_string(&mut got).unwrap();
    assert_eq!(got, "last words");

    // The guest shuts down receiving: the host cannot write.
    let (_other, mut guest, mut stream, host) = connected();
    let mut deaf = packet(host, 5000, SHUTDOWN);
    deaf.flags = 1;
    guest.send(&deaf);
    eventually("a broken pipe", || stream.write(b"x").is_err());
    drop(vsock);
}

#[test]
fn refused_and_unanswered_connects_have_different_errors() {
    let vsock = Vsock::new(CID).unwrap();
    // Without a guest, no answer arrives.
    let silent = vsock.connect(1, Duration::from_millis(10));
    assert!(matches!(silent, Err(VsockError::Timeout { port: 1, .. })));
    let mut guest = VsockGuest::new(&vsock);
    let caller = vsock.clone();
    let thread = std::thread::spawn(move || caller.connect(9, LIMIT));
    let connect_request = guest.receive_other();
    assert_eq!((connect_request.op, connect_request.guest), (REQUEST, 9), "the one that was given up is not asked for");
    guest.send(&packet(connect_request.host, 9, RST));
    assert!(matches!(thread.join().unwrap(), Err(VsockError::Refused { port: 9 })));
    // A late answer is rejected. (On a slow node a caller may time out before its request was sent.)
    let mut connect_request = None;
    eventually("a request", || {
        assert!(matches!(vsock.connect(9, Duration::from_millis(50)), Err(VsockError::Timeout { .. })));
        connect_request = guest.try_receive();
        connect_request.is_some()
    });
    let connect_request = connect_request.unwrap();
    assert_eq!((connect_request.op, connect_request.guest), (REQUEST, 9));
    let reset = guest.receive_other();
    assert_eq!((reset.op, reset.host), (RST, connect_request.host), "the guest learns that no caller waits");
    guest.send(&packet(connect_request.host, 9, RESPONSE));
    let reset = std::iter::repeat_with(|| guest.receive_other()).find(|packet| packet.host == connect_request.host);
    assert_eq!(reset.unwrap().op, RST);
    for cid in [0, 1, 2, u32::MAX] {
        assert!(matches!(Vsock::new(cid), Err(VsockError::Cid { .. })));
    }
    let listener = vsock.listen(3).unwrap();
    assert!(matches!(listener.accept(Duration::ZERO), Err(VsockError::Timeout { port: 3, .. })));
    drop(listener);
    vsock.listen(3).unwrap();
}

#[test]
fn packets_without_a_connection_are_reset() {
    let vsock = Vsock::new(CID).unwrap();
    let mut guest = VsockGuest::new(&vsock);
    let _listener = vsock.listen(1024).unwrap();
    for op in [RESPONSE, SHUTDOWN, RW, CREDIT_UPDATE, CREDIT_REQUEST, 0, 99] {
        guest.send(&packet(1024, 1, op));
        let reset = guest.receive();
        assert_eq!((reset.op, reset.host, reset.guest, reset.src_cid), (RST, 1024, 1, 2), "{op}");
    }
    assert_eq!(guest.connect(1025, 1).op, RST, "the port has no listener");
    let mut sequenced = packet(1024, 2, REQUEST);
    sequenced.kind = 2;
    guest.send(&sequenced);
    let reset = guest.receive();
    assert_eq!((reset.op, reset.kind), (RST, 2), "no sequenced packets");
    // Dropped silently: resets, packets of other destinations, less than a header.
    guest.send(&packet(1024, 3, RST));
    for (src, dst) in [(8, 2), (CID.into(), 1), (0, 0), (u64::MAX, 2)] {
        let mut foreign = packet(1024, 3, REQUEST);
        (foreign.src_cid, foreign.dst_cid) = (src, dst);
        guest.send(&foreign);
    }
    let at = guest.tx_at;
    guest.front_end.queues[TX].driver.submit(&[(at, 43, false)]);
    guest.front_end.queues[TX].kick();
    guest.front_end.queues[TX].wait_used();
    // A length larger than the payload, or too large.
    let mut short = packet(1024, 4, RW);
    short.payload = vec![1; 100];
    for length in [101, 70000, u32::MAX] {
        guest.send_as(&short, length);
        assert_eq!(guest.receive().op, RST, "{length}");
    }
    // A buffer that is too small for a header is returned empty.
    assert_eq!(guest.connect(1024, 5).op, RESPONSE);
    // A second request for an existing connection ends it.
    assert_eq!(guest.connect(1024, 5).op, RST);
}

#[test]
fn connections_are_many_but_bounded() {
    // Two descriptors per connection: more than the usual soft limit of 1024.
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    let vsock = Vsock::new(CID).unwrap();
    let mut guest = VsockGuest::new(&vsock);
    let listener = vsock.listen(1024).unwrap();
    let mut streams = Vec::new();
    for from in 0..MAX_CONNECTIONS as u32 {
        assert_eq!(guest.connect(1024, from).op, RESPONSE);
        streams.push(listener.accept(LIMIT).unwrap());
    }
    assert_eq!(guest.connect(1024, 100_000).op, RST, "one too many");
    assert!(matches!(vsock.connect(1, LIMIT), Err(VsockError::TooMany { limit: MAX_CONNECTIONS })));
    // Each stream has its own data.
    for (from, stream) in streams.iter_mut().enumerate() {
        stream.write_all(&(from as u32).to_le_bytes()).unwrap();
    }
    let mut seen = vec![false; streams.len()];
    for _ in 0..streams.len() {
        let came = guest.receive_other();
        assert_eq!((came.op, &came.payload[..]), (RW, &came.guest.to_le_bytes()[..]));
        assert!(!std::mem::replace(&mut seen[came.guest as usize], true));
    }
    drop(streams);
    for _ in 0..MAX_CONNECTIONS {
        let over = guest.receive_other();
        assert_eq!((over.op, over.flags), (SHUTDOWN, 3));
    }
    // The number of connections that are not accepted is bounded too.
    for from in 0..BACKLOG as u32 {
        assert_eq!(guest.connect(1024, 200_000 + from).op, RESPONSE);
    }
    assert_eq!(guest.connect(1024, 300_000).op, RST);
}

#[test]
fn a_guest_that_takes_no_replies_stalls_only_itself() {
    let vsock = Vsock::new(CID).unwrap();
    let mut front_end = FrontEnd::new(vsock.device(), 2);
    let at = front_end.allocate(4096);
    // Packets without a connection, and no buffer for the resets: at some point the device takes no more.
    let mut bytes = vec![0; 44];
    bytes[0] = CID as u8;
    bytes[8] = 2;
    (bytes[28], bytes[30]) = (1, RW as u8);
    front_end.memory.write_slice(&bytes, GuestAddress(at)).unwrap();
    let mut outstanding = 0;
    let mut taken = 0;
    while outstanding < 128 {
        front_end.queues[TX].driver.submit(&[(at, 44, false)]);
        front_end.queues[TX].kick();
        outstanding += 1;
        while front_end.queues[TX].driver.take_used().is_some() {
            outstanding -= 1;
            taken += 1;
        }
        assert!(taken < 100_000, "it is taken for ever");
    }
    // The host's side still works.
    assert!(vsock.listen(5).is_ok());
    // The device continues when it gets buffers.
    let room = front_end.allocate(4096);
    for _ in 0..20 {
        for _ in 0..64 {
            front_end.queues[RX].driver.submit(&[(room, 44, true)]);
        }
        front_end.queues[RX].kick();
        for _ in 0..64 {
            if outstanding == 0 {
                return;
            }
            front_end.queues[RX].wait_used();
            while front_end.queues[TX].driver.take_used().is_some() {
                outstanding -= 1;
            }
        }
    }
    panic!("{outstanding} packets are not taken");
}

#[test]
fn connections_survive_a_pause_but_not_a_new_front_end() {
    let (vsock, mut guest, mut stream, host) = connected();
    let bases = [RX, TX].map(|index| guest.front_end.front.get_vring_base(index).unwrap());
    stream.write_all(b"during the pause").unwrap();
    let queues = std::mem::take(&mut guest.front_end.queues);
    for (index, queue) in queues.iter().enumerate() {
        guest.front_end.start(index, queue, bases[index] as u16);
    }
    guest.front_end.queues = queues;
    let came = guest.receive_other();
    assert_eq!((came.op, came.host, &came.payload[..]), (RW, host, &b"during the pause"[..]));
    // The front end has disconnected, so the host's end is closed.
    guest.front_end.disconnect();
    assert_eq!(stream.read(&mut [0; 8]).unwrap(), 0);
    // A connection requested meanwhile is requested from the next guest.
    let caller = vsock.clone();
    let thread = std::thread::spawn(move || caller.connect(5001, LIMIT).unwrap());
    let (front, channel) = guest::connect(&guest.front_end.socket);
    (guest.front_end.front, guest.front_end.channel) = (front, channel);
    guest.front_end.queues.clear();
    guest.front_end.memory = guest::memory(nix::fcntl::SealFlag::F_SEAL_SHRINK);
    guest.front_end.set_up(2);
    let at = guest.front_end.allocate(8192);
    guest.offer_buffer(at);
    guest.offer_buffer(at + 4096);
    guest.front_end.queues[RX].kick();
    guest.accept(5001);
    thread.join().unwrap();
}

#[test]
fn the_configuration_is_the_context_id() {
    let vsock = Vsock::new(CID).unwrap();
    let mut front_end = FrontEnd::connected(vsock.device());
    assert_eq!(front_end.config(8), u64::from(CID).to_le_bytes());
    assert_eq!(front_end.config(16)[8..], [0; 8]);
}

#[test]
fn a_transport_reset_is_reported_on_the_event_queue() {
    let vsock = Vsock::new(CID).unwrap();
    let mut front_end = FrontEnd::new(vsock.device(), 3);
    let at = front_end.allocate(4096);
    front_end.memory.write_obj(0xffff_ffffu32, GuestAddress(at)).unwrap();
    front_end.queues[2].driver.submit(&[(at, 4, true)]);
    vsock.reset_transport().unwrap();
    assert_eq!(front_end.queues[2].wait_used().1, 4);
    assert_eq!(front_end.memory.read_obj::<u32>(GuestAddress(at)).unwrap(), 0);
    // No caller keeps waiting for an answer.
    let caller = vsock.clone();
    let thread = std::thread::spawn(move || caller.connect(9, 2 * LIMIT));
    eventually("the error to reach the caller", || {
        vsock.reset_transport().unwrap();
        thread.is_finished()
    });
    assert!(matches!(thread.join().unwrap(), Err(VsockError::Stopped)));
}
