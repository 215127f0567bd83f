//! Manages all connections of a device and processes its three queues. It runs on the device's thread, which must call
//! [`Muxer::run`] after every event.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::connection::{Connection, Key, Next, Taken, Wanted};
use super::packet::{HEADER, Header, MAX_PAYLOAD, Op, SHUT_RECEIVE, SHUT_SEND, STREAM};
use super::{EVENT, HOST_CID, MAX_CONNECTIONS, Metrics, RX, TX, VsockError};
use crate::guest_warn;
use crate::virtio::Ring;
use crate::virtio::pieces::{BadChain, Pieces};
use crate::virtio::ring::Request;
use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{SyncSender, TrySendError};

/// The maximum number of resets that wait for a buffer of the guest. At the maximum, no more packets are taken from the guest.
const MAX_REPLIES: usize = 256;

/// The number of packets in each direction before other events are processed.
const BUDGET: usize = 256;

/// The first port that the host connects from; lower ports are for listeners.
const FIRST_PORT: u32 = 1 << 30;

/// The event that notifies the guest that all its connections are closed.
const TRANSPORT_RESET: u32 = 0;

/// The connections and queues of a device.
#[derive(Debug)]
pub(crate) struct Muxer {
    guest_cid: u64,
    metrics: Arc<Metrics>,
    epoll: Arc<Epoll>,
    rings: [Option<Ring>; 3],
    connections: HashMap<Key, Connection>,
    listeners: HashMap<u32, SyncSender<UnixStream>>,
    replies: VecDeque<Header>,
    ready: VecDeque<Key>,
    next_port: u32,
    notice: Notice,
}

/// The progress of notifying the guest that all its connections are closed. No other packet is sent to the guest before it has
/// processed the notification, because its driver would drop connections made meanwhile.
#[derive(Debug, PartialEq, Eq)]
enum Notice {
    /// No notification is due.
    None,
    /// The notification waits for a buffer in the event queue.
    Due,
    /// The notification is in a buffer. The guest has processed it when it has made a buffer with the index `offered` available.
    Given { offered: u16 },
}

impl Key {
    /// Returns the number that identifies the connection to epoll.
    fn token(self) -> u64 {
        u64::from(self.host) << 32 | u64::from(self.guest)
    }

    fn from_token(token: u64) -> Key {
        Key { host: (token >> 32) as u32, guest: token as u32 } // the two halves
    }
}

impl Muxer {
    pub(crate) fn new(guest_cid: u32, epoll: Arc<Epoll>, metrics: Arc<Metrics>) -> Muxer {
        Muxer {
            guest_cid: guest_cid.into(),
            metrics,
            epoll,
            rings: [None, None, None],
            connections: HashMap::new(),
            listeners: HashMap::new(),
            replies: VecDeque::new(),
            ready: VecDeque::new(),
            next_port: FIRST_PORT,
            notice: Notice::None,
        }
    }

    /// Returns the slot of a queue, or `None` if no queue has this number.
    pub(crate) fn ring(&mut self, index: u16) -> Option<&mut Option<Ring>> {
        self.rings.get_mut(usize::from(index))
    }

    /// Accepts connections to `port` from now on. Returns `false` if the port is in use.
    pub(crate) fn listen(&mut self, port: u32, incoming: SyncSender<UnixStream>) -> bool {
        match self.listeners.entry(port) {
            Entry::Occupied(_) => false,
            Entry::Vacant(place) => {
                place.insert(incoming);
                true
            }
        }
    }

    /// Stops accepting connections to `port`.
    pub(super) fn unlisten(&mut self, port: u32) {
        self.listeners.remove(&port);
    }

    /// Requests a connection from the guest. The result is sent to `answer`.
    pub(crate) fn connect(&mut self, port: u32, id: u64, answer: SyncSender<Result<UnixStream, VsockError>>) {
        match self.ask(port) {
            Ok((key, ours, end)) => {
                self.connections.insert(key, Connection::asked(key, ours, Wanted { id, end, answer }));
                self.enqueue(key);
            }
            // The receiver may have been dropped meanwhile.
            Err(error) => drop(answer.try_send(Err(error))),
        }
    }

    fn ask(&mut self, guest: u32) -> Result<(Key, UnixStream, UnixStream), VsockError> {
        if self.connections.len() >= MAX_CONNECTIONS {
            return Err(VsockError::TooMany { limit: MAX_CONNECTIONS });
        }
        let key = loop {
            let key = Key { host: self.next_port, guest };
            self.next_port = self.next_port.checked_add(1).filter(|port| *port < u32::MAX).unwrap_or(FIRST_PORT);
            if !self.connections.contains_key(&key) {
                break key;
            }
        };
        let (ours, end) = pair()?;
        Ok((key, ours, end))
    }

    /// Cancels a connection request whose caller no longer waits.
    pub(super) fn give_up(&mut self, id: u64) {
        let is_it = |connection: &Connection| connection.wanted.as_ref().is_some_and(|wanted| wanted.id == id);
        if let Some(key) = self.connections.values().find(|one| is_it(one)).map(|one| one.key) {
            self.remove(key, true);
        }
    }

    /// Handles a reset of the guest's driver: closes its connections, and requests the unanswered ones again.
    pub(crate) fn forget(&mut self) {
        self.notice = Notice::None;
        self.connections.retain(|_, connection| connection.wanted.is_some());
        self.connections.values_mut().for_each(Connection::ask_again);
        let connections = &self.connections;
        self.ready.retain(|key| connections.contains_key(key));
        self.replies.clear();
        let keys: Vec<Key> = self.connections.keys().copied().collect();
        keys.into_iter().for_each(|key| self.enqueue(key));
    }

    /// Drops all connections, including unanswered requests, and notifies the guest.
    pub(crate) fn reset_transport(&mut self) {
        self.connections.clear();
        self.forget();
        if matches!(self.ring(EVENT), Some(Some(_))) {
            self.notice = Notice::Due;
            self.tell();
        }
    }

    /// Handles a restore: the guest knows connections that no longer exist. Connections that the host requested meanwhile are
    /// made after the guest has been notified.
    pub(crate) fn restored(&mut self) {
        self.forget();
        // The new port is far from those of the old connections: the guest keeps their sockets until their owners close them,
        // and would mistake a new connection between the same ports for an old one.
        let mut random = [0; 4];
        if nacelle_base::random::fill(&mut random).is_ok() {
            self.next_port = FIRST_PORT | u32::from_le_bytes(random) >> 2;
        }
        self.notice = Notice::Due;
    }

    /// Notifies the guest that its connections are closed, if that is due. Returns `true` if other packets may be sent.
    fn tell(&mut self) -> bool {
        if self.notice == Notice::None {
            return true;
        }
        let Some(Some(ring)) = self.rings.get_mut(usize::from(EVENT)) else { return false };
        if let Notice::Given { offered } = self.notice {
            if ring.await_more() != offered {
                self.notice = Notice::None;
            }
            return self.notice == Notice::None;
        }
        let mut request = ring.pop();
        if request.is_none() && ring.rearm() {
            request = ring.pop();
        }
        if let Some(request) = request {
            self.notice = Notice::Given { offered: ring.await_more() };
            let written = request.buffers.writable.write(ring.memory(), &TRANSPORT_RESET.to_le_bytes());
            ring.done(request.head, written.map_or(0, |_| 4));
            ring.signal();
        }
        false
    }

    /// Handles a kick.
    pub(super) fn kicked(&mut self, index: u16) {
        if let Some(Some(ring)) = self.rings.get_mut(usize::from(index)) {
            ring.kicked();
            if ring.is_broken() {
                let _ = self.epoll.delete(&*ring); // it may have been removed already
            }
        }
    }

    /// Handles epoll events of a connection's host end.
    pub(super) fn stirred(&mut self, token: u64, flags: EpollFlags) {
        let key = Key::from_token(token);
        let Some(connection) = self.connections.get_mut(&key) else { return };
        let gone = flags.intersects(EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR);
        connection.hung_up |= gone;
        connection.readable |= gone || flags.intersects(EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP);
        connection.writable |= gone || flags.contains(EpollFlags::EPOLLOUT);
        connection.flush();
        self.after(key);
    }

    /// Processes the queues until no work is left. Returns `true` if there is more work after the budget is used up.
    pub(crate) fn run(&mut self) -> bool {
        let mut budget = BUDGET;
        loop {
            let more = self.receive(&mut budget);
            self.send(&mut budget);
            if budget == 0 {
                return true;
            }
            // If the replies are still full, the guest must provide a buffer for them (and a kick) first.
            if !more || self.replies.len() >= MAX_REPLIES {
                return false;
            }
        }
    }

    /// Takes packets from the guest. Returns `true` if there may be more after sending.
    fn receive(&mut self, budget: &mut usize) -> bool {
        let Some(mut ring) = self.take_ring(TX) else { return false };
        ring.quiet();
        let mut some = false;
        let mut full = false;
        while *budget > 0 {
            full = self.replies.len() >= MAX_REPLIES;
            if full {
                break;
            }
            let Some(request) = ring.pop() else { break };
            *budget -= 1;
            some = true;
            let head = request.head;
            self.packet(&ring, request);
            ring.done(head, 0);
        }
        if some {
            ring.signal();
        }
        let more = full || (*budget > 0 && ring.rearm());
        self.put_ring(ring);
        more
    }

    fn packet(&mut self, ring: &Ring, request: Request) {
        match self.parse(ring, request) {
            Ok(Some((header, payload))) => {
                if let Err(error) = self.handle(ring, header, payload) {
                    self.bad(format_args!("{error}"));
                }
            }
            Ok(None) => {}
            Err(error) => self.bad(format_args!("{error}")),
        }
    }

    fn bad(&self, what: std::fmt::Arguments<'_>) {
        self.metrics.bad_packets.fetch_add(1, Ordering::Relaxed);
        guest_warn!(cid = self.guest_cid, "the guest sent a vsock packet with {what}");
    }

    /// Parses a packet. Packets for other destinations or of other types are answered or dropped here.
    fn parse(&mut self, ring: &Ring, request: Request) -> Result<Option<(Header, Pieces)>, BadChain> {
        let mut payload = request.buffers.readable;
        let Some(head) = payload.take_front(HEADER) else {
            self.bad(format_args!("no whole header"));
            return Ok(None);
        };
        let mut bytes = [0; HEADER];
        head.read(ring.memory(), &mut bytes)?;
        let header = Header::parse(&bytes);
        if header.src_cid != self.guest_cid || header.dst_cid != HOST_CID {
            self.bad(format_args!("the context ids {} to {}", header.src_cid, header.dst_cid));
            return Ok(None);
        }
        let whole = usize::try_from(header.length).ok().filter(|_| header.length <= MAX_PAYLOAD);
        let Some(payload) = whole.and_then(|length| payload.take_front(length)) else {
            self.bad(format_args!("{} bytes of payload, {} of them there", header.length, payload.len()));
            self.refuse(&header);
            return Ok(None);
        };
        if header.kind != STREAM {
            if header.op != Op::RST {
                self.replies.push_back(header.reset());
            }
            return Ok(None);
        }
        Ok(Some((header, payload)))
    }

    /// Answers a packet with a reset, and ends the connection that it belongs to, if any.
    fn refuse(&mut self, header: &Header) {
        self.remove(Key { host: header.dst_port, guest: header.src_port }, false);
        if header.op != Op::RST {
            self.replies.push_back(header.reset());
        }
    }

    fn handle(&mut self, ring: &Ring, header: Header, payload: Pieces) -> Result<(), BadChain> {
        let key = Key { host: header.dst_port, guest: header.src_port };
        let Some(connection) = self.connections.get_mut(&key) else {
            match header.op {
                Op::REQUEST => self.accept(key, &header),
                _ => self.refuse(&header),
            }
            return Ok(());
        };
        connection.credit(&header);
        let asked = connection.wanted.is_some();
        match header.op {
            Op::RESPONSE if asked => {
                self.established(key, &header);
                return Ok(());
            }
            Op::RST => {
                connection.reset = true;
                connection.shut_by_guest(SHUT_SEND | SHUT_RECEIVE);
                if asked {
                    self.remove(key, false);
                    return Ok(());
                }
            }
            _ if asked => {
                self.refuse(&header);
                return Ok(());
            }
            Op::RW => {
                let count = payload.len();
                if connection.take(ring.memory(), payload)? == Taken::TooMuch {
                    self.bad(format_args!("more data than it may send"));
                    self.refuse(&header);
                    return Ok(());
                }
                self.metrics.from_guest_bytes.fetch_add(count as u64, Ordering::Relaxed);
            }
            Op::SHUTDOWN => connection.shut_by_guest(header.flags),
            Op::CREDIT_UPDATE => {}
            Op::CREDIT_REQUEST => connection.tell_credit(),
            op => {
                self.bad(format_args!("operation {op} on a connection"));
                self.refuse(&header);
                return Ok(());
            }
        }
        self.after(key);
        Ok(())
    }

    fn accept(&mut self, key: Key, header: &Header) {
        let full = self.connections.len() >= MAX_CONNECTIONS;
        let Some(listener) = self.listeners.get(&key.host).filter(|_| !full && key.host != u32::MAX) else {
            return self.refuse(header);
        };
        let Ok((ours, end)) = pair() else { return self.refuse(header) };
        match listener.try_send(end) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => return self.refuse(header),
            Err(TrySendError::Disconnected(_)) => {
                self.listeners.remove(&key.host);
                return self.refuse(header);
            }
        }
        let mut connection = Connection::accepted(key, ours);
        connection.credit(header);
        self.connections.insert(key, connection);
        self.opened(key);
    }

    fn established(&mut self, key: Key, header: &Header) {
        let Some(wanted) = self.connections.get_mut(&key).and_then(|connection| connection.wanted.take()) else {
            return;
        };
        if wanted.answer.try_send(Ok(wanted.end)).is_err() {
            return self.refuse(header);
        }
        self.opened(key);
    }

    fn opened(&mut self, key: Key) {
        self.metrics.connections.fetch_add(1, Ordering::Relaxed);
        let Some(connection) = self.connections.get(&key) else { return };
        let flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT | EpollFlags::EPOLLRDHUP | EpollFlags::EPOLLET;
        if let Err(error) = self.epoll.add(&connection.stream, EpollEvent::new(flags, key.token())) {
            guest_warn!("cannot watch a vsock connection: {error}");
            return self.remove(key, true);
        }
        self.enqueue(key);
    }

    /// Updates a connection after an event: removes it if it is finished, and queues it if it has a packet for the guest.
    fn after(&mut self, key: Key) {
        let Some(connection) = self.connections.get_mut(&key) else { return };
        if connection.settle() {
            connection.drop_unread();
            let owes = connection.owes_reset();
            self.remove(key, owes);
        } else if connection.next() != Next::Nothing {
            self.enqueue(key);
        }
    }

    fn enqueue(&mut self, key: Key) {
        if let Some(connection) = self.connections.get_mut(&key)
            && !std::mem::replace(&mut connection.queued, true)
        {
            self.ready.push_back(key);
        }
    }

    /// Removes a connection. The host's end reads the end of data; a caller that waits for the connection gets [`VsockError::Refused`].
    fn remove(&mut self, key: Key, tell_guest: bool) {
        let Some(mut connection) = self.connections.remove(&key) else { return };
        if connection.queued {
            // Otherwise a guest that connects and resets, and takes no packets, would make the list grow without bound.
            self.ready.retain(|other| *other != key);
        }
        if let Some(wanted) = connection.wanted.take() {
            drop(wanted.answer.try_send(Err(VsockError::Refused { port: key.guest })));
        }
        if tell_guest && connection.is_known() {
            self.replies.push_back(connection.header(self.guest_cid, Op::RST, 0, 0));
        }
    }

    /// Fills the guest's receive buffers with pending packets.
    fn send(&mut self, budget: &mut usize) {
        if !self.tell() {
            return;
        }
        let Some(mut ring) = self.take_ring(RX) else { return };
        let mut some = false;
        while *budget > 0 && (!self.replies.is_empty() || !self.ready.is_empty()) {
            let Some(mut request) = ring.pop() else {
                if ring.rearm() {
                    continue;
                }
                break;
            };
            let head = request.head;
            *budget -= 1;
            let Some(room) = request.buffers.writable.take_front(HEADER) else {
                self.bad(format_args!("a buffer too small for a header"));
                ring.done(head, 0);
                some = true;
                continue;
            };
            match self.next_packet(&ring, request.buffers.writable) {
                Some(header) => {
                    let written = room.write(ring.memory(), &header.encode());
                    let length = u32::try_from(HEADER).unwrap_or(0).saturating_add(header.length);
                    ring.done(head, written.map_or(0, |_| length));
                    some = true;
                }
                None => ring.unpop(),
            }
        }
        if some {
            ring.signal();
        }
        self.put_ring(ring);
    }

    /// Returns the header of the next packet for the guest, after writing its payload to `room`. Returns `None` if there is no
    /// packet to send.
    fn next_packet(&mut self, ring: &Ring, mut room: Pieces) -> Option<Header> {
        if let Some(reply) = self.replies.pop_front() {
            return Some(reply);
        }
        let key = self.ready.pop_front()?;
        let connection = self.connections.get_mut(&key)?;
        connection.queued = false;
        let header = match connection.next() {
            Next::Nothing => None,
            Next::Control { op, flags } => Some(connection.header(self.guest_cid, op, flags, 0)),
            Next::Data { most } => {
                let count = room.len().min(most.min(MAX_PAYLOAD) as usize);
                let room = room.take_front(count).unwrap_or_default();
                match connection.read(ring.memory(), &room) {
                    Ok(0) => None,
                    Ok(count) => {
                        self.metrics.to_guest_bytes.fetch_add(count.into(), Ordering::Relaxed);
                        Some(connection.header(self.guest_cid, Op::RW, 0, count))
                    }
                    Err(error) => {
                        self.bad(format_args!("{error}"));
                        self.remove(key, true);
                        None
                    }
                }
            }
        };
        self.after(key);
        header
    }

    /// Takes a ring out of the muxer, so that the ring and the connections can be borrowed together.
    fn take_ring(&mut self, index: u16) -> Option<Ring> {
        self.ring(index)?.take()
    }

    fn put_ring(&mut self, ring: Ring) {
        if let Some(place) = self.ring(ring.index()) {
            *place = Some(ring);
        }
    }
}

fn pair() -> Result<(UnixStream, UnixStream), VsockError> {
    let make = || {
        let (ours, end) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        Ok((ours, end))
    };
    make().map_err(|source| VsockError::Resources { source })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
    use super::*;
    use crate::fuzz::{memory, ring};
    use crate::testing::Driver;
    use nix::sys::epoll::EpollCreateFlags;
    use std::sync::mpsc::sync_channel;
    use vm_memory::{Bytes, GuestAddress};

    #[test]
    fn a_guest_that_connects_and_resets_and_takes_no_packets_costs_no_memory() {
        const AT: u64 = 0x10000;
        let epoll = Arc::new(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap());
        let mut muxer = Muxer::new(3, epoll, Arc::default());
        let (incoming, accepted) = sync_channel(1);
        assert!(muxer.listen(1024, incoming));
        let memory = memory();
        let mut driver = Driver::new(memory.clone(), 0, 16);
        *muxer.ring(TX).unwrap() = Some(ring(&driver, TX));
        for _ in 0..1000 {
            for op in [Op::REQUEST, Op::RST] {
                let header = Header {
                    src_cid: 3,
                    dst_cid: HOST_CID,
                    src_port: 1,
                    dst_port: 1024,
                    kind: STREAM,
                    op,
                    ..Header::default()
                };
                memory.write_slice(&header.encode(), GuestAddress(AT)).unwrap();
                driver.submit(&[(AT, 44, false)]);
                muxer.run();
                assert!(driver.take_used().is_some());
                assert_eq!(muxer.ready.len(), muxer.connections.len());
            }
            assert!(accepted.try_recv().is_ok());
        }
        assert!(muxer.ready.is_empty() && muxer.replies.is_empty());
    }
}
