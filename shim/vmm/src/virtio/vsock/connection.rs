//! Implements the state of one connection: the credit of both sides, the data that waits to be written to the host's end, and
//! the next packet for the guest. It does not access queues.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::packet::{Op, PacketHeader, SHUT_RECEIVE, SHUT_SEND, STREAM};
use super::{HOST_CID, VsockError, WINDOW};
use crate::sys;
use crate::virtio::Memory;
use crate::virtio::buffers::{ChainError, MemoryRanges};
use nacelle_base::retry;
use nix::poll::{PollFd, PollFlags};
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::SyncSender;
use std::time::Instant;
use vm_memory::Permissions;

/// The key of a connection: the ports at both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ConnectionKey {
    pub host: u32,
    pub guest: u32,
}

/// A connection request of the host that the guest has not answered.
#[derive(Debug)]
pub(super) struct PendingConnect {
    /// The number by which the caller can cancel the request.
    pub id: u64,
    /// The end of the socket pair that the caller receives.
    pub end: UnixStream,
    pub result_sender: SyncSender<Result<UnixStream, VsockError>>,
}

/// The next packet of a connection for the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NextPacket {
    Nothing,
    /// A packet without payload.
    Control {
        op: u16,
        flags: u32,
    },
    /// A data packet with at most this many bytes.
    Data {
        max_bytes: u32,
    },
}

/// The result of taking data from the guest.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ReceiveResult {
    /// The data is written or waits.
    Accepted,
    /// The guest exceeded its credit.
    CreditExceeded,
}

#[derive(Debug)]
pub(super) struct VsockConnection {
    pub key: ConnectionKey,
    pub stream: UnixStream,
    pub pending: Option<PendingConnect>,
    /// Whether the connection is in the queue of those with packets for the guest.
    pub queued: bool,

    // From the host to the guest.
    /// Whether the host's end may have bytes for the guest.
    pub readable: bool,
    /// Whether the host's end is closed in both directions and takes no more data.
    pub hung_up: bool,
    host_eof: bool,
    sent: u32,
    guest_window: u32,
    guest_forwarded: u32,
    credit_requested: bool,

    // From the guest to the host.
    /// Whether the host's end may accept bytes.
    pub writable: bool,
    waiting: VecDeque<u8>,
    forwarded: u32,
    reported_forwarded: u32,
    /// Whether the host's end accepts no more data; data from the guest is discarded.
    write_closed: bool,

    /// The directions that the guest has shut down, as in the flags of a packet.
    guest_shutdown: u32,
    /// The directions that this side has shut down, as far as the guest has been notified.
    host_shutdown: u32,
    /// Whether the guest has reset the connection and must receive no more packets for it.
    pub reset: bool,
    first_packet: Option<u16>,
    credit_update_due: bool,
    write_shut: bool,
}

impl VsockConnection {
    /// Creates a connection that the guest requested.
    pub(super) fn from_guest(key: ConnectionKey, stream: UnixStream) -> VsockConnection {
        VsockConnection::new(key, stream, None, Op::RESPONSE)
    }

    /// Creates a connection that the host requests.
    pub(super) fn from_host(key: ConnectionKey, stream: UnixStream, pending: PendingConnect) -> VsockConnection {
        VsockConnection::new(key, stream, Some(pending), Op::REQUEST)
    }

    fn new(
        key: ConnectionKey,
        stream: UnixStream,
        pending: Option<PendingConnect>,
        first_packet: u16,
    ) -> VsockConnection {
        VsockConnection {
            key,
            stream,
            pending,
            queued: false,
            readable: false,
            hung_up: false,
            host_eof: false,
            sent: 0,
            guest_window: 0,
            guest_forwarded: 0,
            credit_requested: false,
            writable: false,
            waiting: VecDeque::new(),
            forwarded: 0,
            reported_forwarded: 0,
            write_closed: false,
            guest_shutdown: 0,
            host_shutdown: 0,
            reset: false,
            first_packet: Some(first_packet),
            credit_update_due: false,
            write_shut: false,
        }
    }

    /// Returns whether the guest has been sent the connection's first packet.
    pub(super) fn is_announced(&self) -> bool {
        self.first_packet.is_none()
    }

    /// Sends the request again, after the guest's driver was reset.
    pub(super) fn request_again(&mut self) {
        self.first_packet = Some(Op::REQUEST);
    }

    /// Records the guest's buffer space, which every packet contains.
    pub(super) fn update_credit(&mut self, header: &PacketHeader) {
        self.guest_window = header.buf_alloc;
        self.guest_forwarded = header.fwd_cnt;
        self.credit_requested &= self.guest_credit() == 0;
    }

    /// Returns the number of bytes that the guest's buffer can take; 0 if the guest's numbers are inconsistent.
    fn guest_credit(&self) -> u32 {
        self.guest_window.saturating_sub(self.sent.wrapping_sub(self.guest_forwarded))
    }

    /// Returns the next packet for the guest.
    pub(super) fn next_packet(&self) -> NextPacket {
        let control = |op, flags| NextPacket::Control { op, flags };
        if let Some(op) = self.first_packet {
            return control(op, 0);
        }
        if self.pending.is_some() || self.reset {
            return NextPacket::Nothing;
        }
        if self.credit_update_due {
            return control(Op::CREDIT_UPDATE, 0);
        }
        let shut = self.shutdown_flags();
        if shut & !self.host_shutdown != 0 {
            return control(Op::SHUTDOWN, shut);
        }
        if self.readable && !self.host_eof && self.guest_shutdown & SHUT_RECEIVE == 0 {
            match self.guest_credit() {
                0 if self.credit_requested => {}
                0 => return control(Op::CREDIT_REQUEST, 0),
                max_bytes => return NextPacket::Data { max_bytes },
            }
        }
        NextPacket::Nothing
    }

    /// Returns the directions that are shut down on the host.
    fn shutdown_flags(&self) -> u32 {
        let read_closed = self.host_eof || self.guest_shutdown & SHUT_RECEIVE != 0;
        let write_closed = self.write_closed || (read_closed && self.hung_up);
        (if read_closed { SHUT_SEND } else { 0 }) | (if write_closed { SHUT_RECEIVE } else { 0 })
    }

    /// Returns the header of a packet, and records the packet as sent.
    pub(super) fn build_header(&mut self, guest_cid: u64, op: u16, flags: u32, length: u32) -> PacketHeader {
        match op {
            Op::REQUEST | Op::RESPONSE => self.first_packet = None,
            Op::SHUTDOWN => self.host_shutdown |= flags,
            Op::CREDIT_REQUEST => self.credit_requested = true,
            _ => {}
        }
        self.sent = self.sent.wrapping_add(length);
        self.credit_update_due = false;
        self.reported_forwarded = self.forwarded;
        PacketHeader {
            src_cid: HOST_CID,
            dst_cid: guest_cid,
            src_port: self.key.host,
            dst_port: self.key.guest,
            length,
            kind: STREAM,
            op,
            flags,
            buf_alloc: WINDOW,
            fwd_cnt: self.forwarded,
        }
    }

    /// Schedules a credit update, which the guest has requested.
    pub(super) fn schedule_credit_update(&mut self) {
        self.credit_update_due = true;
    }

    /// Reads from the host's end into guest memory. Returns 0 if there is no data at present or the end is reached; see
    /// [`next_packet`](Self::next_packet).
    pub(super) fn read(&mut self, memory: &Memory, buffer: &MemoryRanges) -> Result<u32, ChainError> {
        let slices = buffer.slices(memory, Permissions::Write)?;
        match sys::read_stream(self.stream.as_fd(), &slices) {
            Ok(0) => {
                self.host_eof = true;
                // Checks now whether both directions are closed, because the event for it may arrive later.
                let mut state = [PollFd::new(self.stream.as_fd(), PollFlags::empty())];
                let found = retry::poll(&mut state, Some(Instant::now())).unwrap_or(0) > 0;
                self.hung_up |= found && state.iter().any(|state| state.any().unwrap_or(false));
            }
            Ok(count) => return Ok(u32::try_from(count).unwrap_or(0)), // at most the guest's window
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.readable = false,
            Err(_) => {
                self.host_eof = true;
                self.hung_up = true;
            }
        }
        Ok(0)
    }

    /// Takes data from the guest: writes as much as the host's end accepts, and keeps the rest.
    pub(super) fn receive(&mut self, memory: &Memory, mut payload: MemoryRanges) -> Result<ReceiveResult, ChainError> {
        if self.guest_shutdown & SHUT_SEND != 0 || self.waiting.len() + payload.len() > WINDOW as usize {
            return Ok(ReceiveResult::CreditExceeded);
        }
        if self.waiting.is_empty() && self.writable && !self.write_closed {
            let sent = sys::send_stream(self.stream.as_fd(), &payload.slices(memory, Permissions::Read)?);
            let count = self.record_write(sent);
            payload.split_front(count);
        }
        if self.write_closed {
            self.forwarded = self.forwarded.wrapping_add(u32::try_from(payload.len()).unwrap_or(0));
        } else if !payload.is_empty() {
            let mut bytes = vec![0; payload.len()]; // at most WINDOW
            payload.read(memory, &mut bytes)?;
            self.waiting.extend(bytes);
        }
        self.schedule_update_if_due();
        Ok(ReceiveResult::Accepted)
    }

    /// Writes waiting data as far as the host's end accepts it.
    pub(super) fn flush(&mut self) {
        while self.writable && !self.write_closed && !self.waiting.is_empty() {
            let (front, _) = self.waiting.as_slices();
            let sent = (&self.stream).write(front);
            let count = self.record_write(sent);
            self.waiting.drain(..count);
        }
        if self.write_closed {
            self.forwarded = self.forwarded.wrapping_add(u32::try_from(self.waiting.len()).unwrap_or(0));
            self.waiting.clear();
        }
        if self.waiting.is_empty() {
            self.waiting = VecDeque::new();
        }
        self.schedule_update_if_due();
    }

    /// Records the result of a write to the host's end. Returns the number of bytes written.
    fn record_write(&mut self, result: io::Result<usize>) -> usize {
        match result {
            Ok(count) => {
                self.forwarded = self.forwarded.wrapping_add(u32::try_from(count).unwrap_or(0)); // at most WINDOW
                return count;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.writable = false,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => self.write_closed = true,
        }
        0
    }

    /// Schedules a credit update after each quarter of the window, unless another packet has carried the credit meanwhile.
    fn schedule_update_if_due(&mut self) {
        self.credit_update_due |= self.forwarded.wrapping_sub(self.reported_forwarded) >= WINDOW / 4;
    }

    /// Records that the guest has shut down these directions (as in the flags of a packet).
    pub(super) fn record_guest_shutdown(&mut self, sides: u32) {
        self.guest_shutdown |= sides & (SHUT_SEND | SHUT_RECEIVE);
        if self.guest_shutdown & SHUT_RECEIVE != 0 {
            // Writers on the host now get EPIPE. The call fails only if the other end is already closed.
            let _ = self.stream.shutdown(Shutdown::Read);
        }
    }

    /// Shuts down the host's end for writing once all data of a guest that has shut down is written. Returns `true` if both
    /// directions are finished.
    pub(super) fn finish_shutdown(&mut self) -> bool {
        if self.guest_shutdown & SHUT_SEND != 0 && self.waiting.is_empty() && !self.write_shut {
            self.write_shut = true;
            let _ = self.stream.shutdown(Shutdown::Write); // as above
        }
        let both = SHUT_SEND | SHUT_RECEIVE;
        (self.guest_shutdown == both && (self.waiting.is_empty() || self.write_closed)) || self.host_shutdown == both
    }

    /// Discards data of the host that the guest no longer accepts. If this end were closed with unread bytes, the host would
    /// see a reset instead of the end of data. No new data can arrive, so the loop is bounded by the socket's buffer.
    pub(super) fn discard_unread(&mut self) {
        let mut bytes = [0; 4096];
        while self.guest_shutdown & SHUT_RECEIVE != 0 && matches!(self.stream.read(&mut bytes), Ok(1..)) {}
    }

    /// Returns whether the guest must be notified of the end of the connection.
    pub(super) fn must_send_reset(&self) -> bool {
        !self.reset && self.host_shutdown != (SHUT_SEND | SHUT_RECEIVE)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    /// Tries all counters around the values at which they wrap or change their sign, with all windows of the same kind: what was sent and
    /// not forwarded, with what may be sent, never exceeds the guest's buffer.
    #[test]
    fn credit_never_exceeds_the_buffer_of_the_guest() {
        let values =
            [0, 1, 2, 3, 0x7fff_fffe, 0x7fff_ffff, 0x8000_0000, 0x8000_0001, u32::MAX - 2, u32::MAX - 1, u32::MAX];
        let (stream, _peer) = UnixStream::pair().unwrap();
        let mut connection = VsockConnection::from_guest(ConnectionKey { host: 1, guest: 2 }, stream);
        for sent in values {
            for forwarded in values {
                for window in values {
                    (connection.sent, connection.guest_forwarded, connection.guest_window) = (sent, forwarded, window);
                    let outstanding = u64::from(sent.wrapping_sub(forwarded));
                    let credit = u64::from(connection.guest_credit());
                    assert!(credit == 0 || outstanding + credit == u64::from(window), "{sent} {forwarded} {window}");
                }
            }
        }
    }
}
