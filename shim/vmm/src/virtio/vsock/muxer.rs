//! Manages all connections of a device and processes its three queues. It runs on the device's thread, which must call
//! [`Muxer::run`] after every event.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::connection::{ConnectionKey, NextPacket, PendingConnect, ReceiveResult, VsockConnection};
use super::packet::{HEADER, MAX_PAYLOAD, Op, PacketHeader, SHUT_RECEIVE, SHUT_SEND, STREAM};
use super::{EVENT, HOST_CID, MAX_CONNECTIONS, RX, TX, VsockError, VsockMetrics};
use crate::virtio::Ring;
use crate::virtio::buffers::{ChainError, MemoryRanges};
use crate::virtio::ring::Request;
use nacelle_base::guest_warn;
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
    metrics: Arc<VsockMetrics>,
    epoll: Arc<Epoll>,
    rings: [Option<Ring>; 3],
    connections: HashMap<ConnectionKey, VsockConnection>,
    listeners: HashMap<u32, SyncSender<UnixStream>>,
    replies: VecDeque<PacketHeader>,
    ready: VecDeque<ConnectionKey>,
    next_port: u32,
    reset_notice: ResetNotice,
}

/// The progress of notifying the guest that all its connections are closed. No other packet is sent to the guest before it has
/// processed the notification, because its driver would drop connections made meanwhile.
#[derive(Debug, PartialEq, Eq)]
enum ResetNotice {
    /// No notification is due.
    None,
    /// The notification waits for a buffer in the event queue.
    Due,
    /// The notification is in a buffer. The guest has processed it when it has made a buffer with the index `next_index` available.
    Sent { next_index: u16 },
}

impl ConnectionKey {
    /// Returns the number that identifies the connection to epoll.
    fn token(self) -> u64 {
        u64::from(self.host) << 32 | u64::from(self.guest)
    }

    fn from_token(token: u64) -> ConnectionKey {
        ConnectionKey { host: (token >> 32) as u32, guest: token as u32 } // the two halves
    }
}

impl Muxer {
    pub(crate) fn new(guest_cid: u32, epoll: Arc<Epoll>, metrics: Arc<VsockMetrics>) -> Muxer {
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
            reset_notice: ResetNotice::None,
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
            Entry::Vacant(slot) => {
                slot.insert(incoming);
                true
            }
        }
    }

    /// Stops accepting connections to `port`.
    pub(super) fn unlisten(&mut self, port: u32) {
        self.listeners.remove(&port);
    }

    /// Requests a connection from the guest. The result is sent to `result_sender`.
    pub(crate) fn connect(&mut self, port: u32, id: u64, result_sender: SyncSender<Result<UnixStream, VsockError>>) {
        match self.new_host_connection(port) {
            Ok((key, ours, end)) => {
                self.connections
                    .insert(key, VsockConnection::from_host(key, ours, PendingConnect { id, end, result_sender }));
                self.enqueue(key);
            }
            // The receiver may have been dropped meanwhile.
            Err(error) => drop(result_sender.try_send(Err(error))),
        }
    }

    fn new_host_connection(&mut self, guest: u32) -> Result<(ConnectionKey, UnixStream, UnixStream), VsockError> {
        if self.connections.len() >= MAX_CONNECTIONS {
            return Err(VsockError::TooMany { limit: MAX_CONNECTIONS });
        }
        let key = loop {
            let key = ConnectionKey { host: self.next_port, guest };
            self.next_port = self.next_port.checked_add(1).filter(|port| *port < u32::MAX).unwrap_or(FIRST_PORT);
            if !self.connections.contains_key(&key) {
                break key;
            }
        };
        let (ours, end) = socket_pair()?;
        Ok((key, ours, end))
    }

    /// Cancels a connection request whose caller no longer waits.
    pub(super) fn cancel_connect(&mut self, id: u64) {
        let has_id = |connection: &VsockConnection| connection.pending.as_ref().is_some_and(|pending| pending.id == id);
        if let Some(key) = self.connections.values().find(|one| has_id(one)).map(|one| one.key) {
            self.remove(key, true);
        }
    }

    /// Handles a reset of the guest's driver: closes its connections, and requests the unanswered ones again.
    pub(crate) fn handle_driver_reset(&mut self) {
        self.reset_notice = ResetNotice::None;
        self.connections.retain(|_, connection| connection.pending.is_some());
        self.connections.values_mut().for_each(VsockConnection::request_again);
        let connections = &self.connections;
        self.ready.retain(|key| connections.contains_key(key));
        self.replies.clear();
        let keys: Vec<ConnectionKey> = self.connections.keys().copied().collect();
        keys.into_iter().for_each(|key| self.enqueue(key));
    }

    /// Drops all connections, including unanswered requests, and notifies the guest.
    pub(crate) fn reset_transport(&mut self) {
        self.connections.clear();
        self.handle_driver_reset();
        if matches!(self.ring(EVENT), Some(Some(_))) {
            self.reset_notice = ResetNotice::Due;
            self.notify_transport_reset();
        }
    }

    /// Handles a restore: the guest knows connections that no longer exist. Connections that the host requested meanwhile are
    /// made after the guest has been notified.
    pub(crate) fn handle_restore(&mut self) {
        self.handle_driver_reset();
        // The new port is far from those of the old connections: the guest keeps their sockets until their owners close them,
        // and would mistake a new connection between the same ports for an old one.
        let mut random = [0; 4];
        if nacelle_base::random::fill(&mut random).is_ok() {
            self.next_port = FIRST_PORT | u32::from_le_bytes(random) >> 2;
        }
        self.reset_notice = ResetNotice::Due;
    }

    /// Notifies the guest that its connections are closed, if that is due. Returns `true` if other packets may be sent.
    fn notify_transport_reset(&mut self) -> bool {
        if self.reset_notice == ResetNotice::None {
            return true;
        }
        let Some(Some(ring)) = self.rings.get_mut(usize::from(EVENT)) else { return false };
        if let ResetNotice::Sent { next_index } = self.reset_notice {
            if ring.enable_kick_for_next() != next_index {
                self.reset_notice = ResetNotice::None;
            }
            return self.reset_notice == ResetNotice::None;
        }
        let mut request = ring.pop();
        if request.is_none() && ring.enable_kicks() {
            request = ring.pop();
        }
        if let Some(request) = request {
            self.reset_notice = ResetNotice::Sent { next_index: ring.enable_kick_for_next() };
            let written = request.buffers.writable.write(ring.memory(), &TRANSPORT_RESET.to_le_bytes());
            ring.complete(request.head, written.map_or(0, |_| 4));
            ring.notify_guest();
        }
        false
    }

    /// Handles a kick.
    pub(super) fn handle_kick(&mut self, index: u16) {
        if let Some(Some(ring)) = self.rings.get_mut(usize::from(index)) {
            ring.clear_kick();
            if ring.is_broken() {
                let _ = self.epoll.delete(&*ring); // it may have been removed already
            }
        }
    }

    /// Handles epoll events of a connection's host end.
    pub(super) fn handle_socket_event(&mut self, token: u64, flags: EpollFlags) {
        let key = ConnectionKey::from_token(token);
        let Some(connection) = self.connections.get_mut(&key) else { return };
        let closed = flags.intersects(EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR);
        connection.hung_up |= closed;
        connection.readable |= closed || flags.intersects(EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP);
        connection.writable |= closed || flags.contains(EpollFlags::EPOLLOUT);
        connection.flush();
        self.update_connection(key);
    }

    /// Processes the queues until no work is left. Returns `true` if there is more work after the budget is used up.
    pub(crate) fn run(&mut self) -> bool {
        let mut budget = BUDGET;
        loop {
            let more = self.receive_packets(&mut budget);
            self.send_packets(&mut budget);
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
    fn receive_packets(&mut self, budget: &mut usize) -> bool {
        let Some(mut ring) = self.take_ring(TX) else { return false };
        ring.disable_kicks();
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
            self.handle_tx_request(&ring, request);
            ring.complete(head, 0);
        }
        if some {
            ring.notify_guest();
        }
        let more = full || (*budget > 0 && ring.enable_kicks());
        self.put_ring(ring);
        more
    }

    fn handle_tx_request(&mut self, ring: &Ring, request: Request) {
        match self.parse_packet(ring, request) {
            Ok(Some((header, payload))) => {
                if let Err(error) = self.handle_packet(ring, header, payload) {
                    self.report_bad_packet(format_args!("{error}"));
                }
            }
            Ok(None) => {}
            Err(error) => self.report_bad_packet(format_args!("{error}")),
        }
    }

    fn report_bad_packet(&self, what: std::fmt::Arguments<'_>) {
        self.metrics.bad_packets.fetch_add(1, Ordering::Relaxed);
        guest_warn!(cid = self.guest_cid, "the guest sent a vsock packet with {what}");
    }

    /// Parses a packet. Packets for other destinations or of other types are answered or dropped here.
    fn parse_packet(
        &mut self,
        ring: &Ring,
        request: Request,
    ) -> Result<Option<(PacketHeader, MemoryRanges)>, ChainError> {
        let mut payload = request.buffers.readable;
        let Some(head) = payload.split_front(HEADER) else {
            self.report_bad_packet(format_args!("an incomplete header"));
            return Ok(None);
        };
        let mut bytes = [0; HEADER];
        head.read(ring.memory(), &mut bytes)?;
        let header = PacketHeader::parse(&bytes);
        if header.src_cid != self.guest_cid || header.dst_cid != HOST_CID {
            self.report_bad_packet(format_args!("the context ids {} to {}", header.src_cid, header.dst_cid));
            return Ok(None);
        }
        let whole = usize::try_from(header.length).ok().filter(|_| header.length <= MAX_PAYLOAD);
        let Some(payload) = whole.and_then(|length| payload.split_front(length)) else {
            self.report_bad_packet(format_args!(
                "a payload of {} bytes, of which {} are present",
                header.length,
                payload.len()
            ));
            self.reject(&header);
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
    fn reject(&mut self, header: &PacketHeader) {
        self.remove(ConnectionKey { host: header.dst_port, guest: header.src_port }, false);
        if header.op != Op::RST {
            self.replies.push_back(header.reset());
        }
    }

    fn handle_packet(&mut self, ring: &Ring, header: PacketHeader, payload: MemoryRanges) -> Result<(), ChainError> {
        let key = ConnectionKey { host: header.dst_port, guest: header.src_port };
        let Some(connection) = self.connections.get_mut(&key) else {
            match header.op {
                Op::REQUEST => self.accept_connection(key, &header),
                _ => self.reject(&header),
            }
            return Ok(());
        };
        connection.update_credit(&header);
        let is_pending = connection.pending.is_some();
        match header.op {
            Op::RESPONSE if is_pending => {
                self.complete_connect(key, &header);
                return Ok(());
            }
            Op::RST => {
                connection.reset = true;
                connection.record_guest_shutdown(SHUT_SEND | SHUT_RECEIVE);
                if is_pending {
                    self.remove(key, false);
                    return Ok(());
                }
            }
            _ if is_pending => {
                self.reject(&header);
                return Ok(());
            }
            Op::RW => {
                let count = payload.len();
                if connection.receive(ring.memory(), payload)? == ReceiveResult::CreditExceeded {
                    self.report_bad_packet(format_args!("more data than its credit"));
                    self.reject(&header);
                    return Ok(());
                }
                self.metrics.from_guest_bytes.fetch_add(count as u64, Ordering::Relaxed);
            }
            Op::SHUTDOWN => connection.record_guest_shutdown(header.flags),
            Op::CREDIT_UPDATE => {}
            Op::CREDIT_REQUEST => connection.schedule_credit_update(),
            op => {
                self.report_bad_packet(format_args!("operation {op} on a connection"));
                self.reject(&header);
                return Ok(());
            }
        }
        self.update_connection(key);
        Ok(())
    }

    fn accept_connection(&mut self, key: ConnectionKey, header: &PacketHeader) {
        let full = self.connections.len() >= MAX_CONNECTIONS;
        let Some(listener) = self.listeners.get(&key.host).filter(|_| !full && key.host != u32::MAX) else {
            return self.reject(header);
        };
        let Ok((ours, end)) = socket_pair() else { return self.reject(header) };
        match listener.try_send(end) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => return self.reject(header),
            Err(TrySendError::Disconnected(_)) => {
                self.listeners.remove(&key.host);
                return self.reject(header);
            }
        }
        let mut connection = VsockConnection::from_guest(key, ours);
        connection.update_credit(header);
        self.connections.insert(key, connection);
        self.watch_connection(key);
    }

    fn complete_connect(&mut self, key: ConnectionKey, header: &PacketHeader) {
        let Some(pending) = self.connections.get_mut(&key).and_then(|connection| connection.pending.take()) else {
            return;
        };
        if pending.result_sender.try_send(Ok(pending.end)).is_err() {
            return self.reject(header);
        }
        self.watch_connection(key);
    }

    fn watch_connection(&mut self, key: ConnectionKey) {
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
    fn update_connection(&mut self, key: ConnectionKey) {
        let Some(connection) = self.connections.get_mut(&key) else { return };
        if connection.finish_shutdown() {
            connection.discard_unread();
            let send_reset = connection.must_send_reset();
            self.remove(key, send_reset);
        } else if connection.next_packet() != NextPacket::Nothing {
            self.enqueue(key);
        }
    }

    fn enqueue(&mut self, key: ConnectionKey) {
        if let Some(connection) = self.connections.get_mut(&key)
            && !std::mem::replace(&mut connection.queued, true)
        {
            self.ready.push_back(key);
        }
    }

    /// Removes a connection. The host's end reads the end of data; a caller that waits for the connection gets [`VsockError::Refused`].
    fn remove(&mut self, key: ConnectionKey, notify_guest: bool) {
        let Some(mut connection) = self.connections.remove(&key) else { return };
        if connection.queued {
            // Otherwise a guest that connects and resets, and takes no packets, would make the list grow without bound.
            self.ready.retain(|other| *other != key);
        }
        if let Some(pending) = connection.pending.take() {
            drop(pending.result_sender.try_send(Err(VsockError::Refused { port: key.guest })));
        }
        if notify_guest && connection.is_announced() {
            self.replies.push_back(connection.build_header(self.guest_cid, Op::RST, 0, 0));
        }
    }

    /// Fills the guest's receive buffers with pending packets.
    fn send_packets(&mut self, budget: &mut usize) {
        if !self.notify_transport_reset() {
            return;
        }
        let Some(mut ring) = self.take_ring(RX) else { return };
        let mut some = false;
        while *budget > 0 && (!self.replies.is_empty() || !self.ready.is_empty()) {
            let Some(mut request) = ring.pop() else {
                if ring.enable_kicks() {
                    continue;
                }
                break;
            };
            let head = request.head;
            *budget -= 1;
            let Some(buffer) = request.buffers.writable.split_front(HEADER) else {
                self.report_bad_packet(format_args!("a buffer too small for a header"));
                ring.complete(head, 0);
                some = true;
                continue;
            };
            match self.next_packet(&ring, request.buffers.writable) {
                Some(header) => {
                    let written = buffer.write(ring.memory(), &header.encode());
                    let length = u32::try_from(HEADER).unwrap_or(0).saturating_add(header.length);
                    ring.complete(head, written.map_or(0, |_| length));
                    some = true;
                }
                None => ring.undo_pop(),
            }
        }
        if some {
            ring.notify_guest();
        }
        self.put_ring(ring);
    }

    /// Returns the header of the next packet for the guest, after writing its payload to `buffer`. Returns `None` if there is no
    /// packet to send.
    fn next_packet(&mut self, ring: &Ring, mut buffer: MemoryRanges) -> Option<PacketHeader> {
        if let Some(reply) = self.replies.pop_front() {
            return Some(reply);
        }
        let key = self.ready.pop_front()?;
        let connection = self.connections.get_mut(&key)?;
        connection.queued = false;
        let header = match connection.next_packet() {
            NextPacket::Nothing => None,
            NextPacket::Control { op, flags } => Some(connection.build_header(self.guest_cid, op, flags, 0)),
            NextPacket::Data { max_bytes } => {
                let count = buffer.len().min(max_bytes.min(MAX_PAYLOAD) as usize);
                let buffer = buffer.split_front(count).unwrap_or_default();
                match connection.read(ring.memory(), &buffer) {
                    Ok(0) => None,
                    Ok(count) => {
                        self.metrics.to_guest_bytes.fetch_add(count.into(), Ordering::Relaxed);
                        Some(connection.build_header(self.guest_cid, Op::RW, 0, count))
                    }
                    Err(error) => {
                        self.report_bad_packet(format_args!("{error}"));
                        self.remove(key, true);
                        None
                    }
                }
            }
        };
        self.update_connection(key);
        header
    }

    /// Takes a ring out of the muxer, so that the ring and the connections can be borrowed together.
    fn take_ring(&mut self, index: u16) -> Option<Ring> {
        self.ring(index)?.take()
    }

    fn put_ring(&mut self, ring: Ring) {
        if let Some(slot) = self.ring(ring.index()) {
            *slot = Some(ring);
        }
    }
}

fn socket_pair() -> Result<(UnixStream, UnixStream), VsockError> {
    let make = || {
        let (ours, end) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        Ok((ours, end))
    };
    make().map_err(|source| VsockError::Resources { source })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "tests")]
    use super::*;
    use crate::fuzz::{memory, ring};
    use crate::testing::Driver;
    use nix::sys::epoll::EpollCreateFlags;
    use std::sync::mpsc::sync_channel;
    use vm_memory::{Bytes, GuestAddress};

    #[test]
    fn resets_without_received_packets_use_no_memory() {
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
                let header = PacketHeader {
                    src_cid: 3,
                    dst_cid: HOST_CID,
                    src_port: 1,
                    dst_port: 1024,
                    kind: STREAM,
                    op,
                    ..PacketHeader::default()
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
