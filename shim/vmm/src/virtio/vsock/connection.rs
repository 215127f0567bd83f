//! Implements the state of one connection: the credit of both sides, the data that waits to be written to the host's end, and
//! the next packet for the guest. It does not access queues.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::packet::{Header, Op, SHUT_RECEIVE, SHUT_SEND, STREAM};
use super::{HOST_CID, VsockError, WINDOW};
use crate::sys;
use crate::virtio::Memory;
use crate::virtio::pieces::{BadChain, Pieces};
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
pub(super) struct Key {
    pub host: u32,
    pub guest: u32,
}

/// A connection request of the host that the guest has not answered.
#[derive(Debug)]
pub(super) struct Wanted {
    /// The number by which the caller can cancel the request.
    pub id: u64,
    /// The end of the socket pair that the caller receives.
    pub end: UnixStream,
    pub answer: SyncSender<Result<UnixStream, VsockError>>,
}

/// The next packet of a connection for the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Nothing,
    /// A packet without payload.
    Control {
        op: u16,
        flags: u32,
    },
    /// A data packet with at most this many bytes.
    Data {
        most: u32,
    },
}

/// The result of taking data from the guest.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Taken {
    /// The data is written or waits.
    Well,
    /// The guest exceeded its credit.
    TooMuch,
}

#[derive(Debug)]
pub(super) struct Connection {
    pub key: Key,
    pub stream: UnixStream,
    pub wanted: Option<Wanted>,
    /// Whether the connection is in the queue of those with packets for the guest.
    pub queued: bool,

    // From the host to the guest.
    /// Whether the host's end may have bytes for the guest.
    pub readable: bool,
    /// Whether the host's end is closed in both directions and takes no more data.
    pub hung_up: bool,
    end_seen: bool,
    sent: u32,
    guest_window: u32,
    guest_taken: u32,
    credit_asked: bool,

    // From the guest to the host.
    /// Whether the host's end may accept bytes.
    pub writable: bool,
    waiting: VecDeque<u8>,
    taken: u32,
    taken_told: u32,
    /// Whether the host's end accepts no more data; data from the guest is discarded.
    deaf: bool,

    /// The directions that the guest has shut down, as in the flags of a packet.
    guest_shut: u32,
    /// The directions that this side has shut down, as far as the guest has been notified.
    host_shut: u32,
    /// Whether the guest has reset the connection and must receive no more packets for it.
    pub reset: bool,
    hello: Option<u16>,
    update_due: bool,
    ended: bool,
}

impl Connection {
    /// Creates a connection that the guest requested.
    pub(super) fn accepted(key: Key, stream: UnixStream) -> Connection {
        Connection::new(key, stream, None, Op::RESPONSE)
    }

    /// Creates a connection that the host requests.
    pub(super) fn asked(key: Key, stream: UnixStream, wanted: Wanted) -> Connection {
        Connection::new(key, stream, Some(wanted), Op::REQUEST)
    }

    fn new(key: Key, stream: UnixStream, wanted: Option<Wanted>, hello: u16) -> Connection {
        Connection {
            key,
            stream,
            wanted,
            queued: false,
            readable: false,
            hung_up: false,
            end_seen: false,
            sent: 0,
            guest_window: 0,
            guest_taken: 0,
            credit_asked: false,
            writable: false,
            waiting: VecDeque::new(),
            taken: 0,
            taken_told: 0,
            deaf: false,
            guest_shut: 0,
            host_shut: 0,
            reset: false,
            hello: Some(hello),
            update_due: false,
            ended: false,
        }
    }

    /// Returns whether the guest has been sent the connection's first packet.
    pub(super) fn is_known(&self) -> bool {
        self.hello.is_none()
    }

    /// Sends the request again, after the guest's driver was reset.
    pub(super) fn ask_again(&mut self) {
        self.hello = Some(Op::REQUEST);
    }

    /// Records the guest's buffer space, which every packet contains.
    pub(super) fn credit(&mut self, header: &Header) {
        self.guest_window = header.buf_alloc;
        self.guest_taken = header.fwd_cnt;
        self.credit_asked &= self.room() == 0;
    }

    /// Returns the number of bytes that the guest's buffer can take; 0 if the guest's numbers are inconsistent.
    fn room(&self) -> u32 {
        self.guest_window.saturating_sub(self.sent.wrapping_sub(self.guest_taken))
    }

    /// Returns the next packet for the guest.
    pub(super) fn next(&self) -> Next {
        let control = |op, flags| Next::Control { op, flags };
        if let Some(op) = self.hello {
            return control(op, 0);
        }
        if self.wanted.is_some() || self.reset {
            return Next::Nothing;
        }
        if self.update_due {
            return control(Op::CREDIT_UPDATE, 0);
        }
        let shut = self.shut();
        if shut & !self.host_shut != 0 {
            return control(Op::SHUTDOWN, shut);
        }
        if self.readable && !self.end_seen && self.guest_shut & SHUT_RECEIVE == 0 {
            match self.room() {
                0 if self.credit_asked => {}
                0 => return control(Op::CREDIT_REQUEST, 0),
                most => return Next::Data { most },
            }
        }
        Next::Nothing
    }

    /// Returns the directions that are shut down on the host.
    fn shut(&self) -> u32 {
        let silent = self.end_seen || self.guest_shut & SHUT_RECEIVE != 0;
        let deaf = self.deaf || (silent && self.hung_up);
        (if silent { SHUT_SEND } else { 0 }) | (if deaf { SHUT_RECEIVE } else { 0 })
    }

    /// Returns the header of a packet, and records the packet as sent.
    pub(super) fn header(&mut self, guest_cid: u64, op: u16, flags: u32, length: u32) -> Header {
        match op {
            Op::REQUEST | Op::RESPONSE => self.hello = None,
            Op::SHUTDOWN => self.host_shut |= flags,
            Op::CREDIT_REQUEST => self.credit_asked = true,
            _ => {}
        }
        self.sent = self.sent.wrapping_add(length);
        self.update_due = false;
        self.taken_told = self.taken;
        Header {
            src_cid: HOST_CID,
            dst_cid: guest_cid,
            src_port: self.key.host,
            dst_port: self.key.guest,
            length,
            kind: STREAM,
            op,
            flags,
            buf_alloc: WINDOW,
            fwd_cnt: self.taken,
        }
    }

    /// Schedules a credit update, which the guest has requested.
    pub(super) fn tell_credit(&mut self) {
        self.update_due = true;
    }

    /// Reads from the host's end into guest memory. Returns 0 if there is no data at present or the end is reached; see
    /// [`next`](Self::next).
    pub(super) fn read(&mut self, memory: &Memory, room: &Pieces) -> Result<u32, BadChain> {
        let slices = room.slices(memory, Permissions::Write)?;
        match sys::read_stream(self.stream.as_fd(), &slices) {
            Ok(0) => {
                self.end_seen = true;
                // Checks now whether both directions are closed, because the event for it may arrive later.
                let mut state = [PollFd::new(self.stream.as_fd(), PollFlags::empty())];
                let found = retry::poll(&mut state, Some(Instant::now())).unwrap_or(0) > 0;
                self.hung_up |= found && state.iter().any(|state| state.any().unwrap_or(false));
            }
            Ok(count) => return Ok(u32::try_from(count).unwrap_or(0)), // at most the guest's window
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.readable = false,
            Err(_) => {
                self.end_seen = true;
                self.hung_up = true;
            }
        }
        Ok(0)
    }

    /// Takes data from the guest: writes as much as the host's end accepts, and keeps the rest.
    pub(super) fn take(&mut self, memory: &Memory, mut payload: Pieces) -> Result<Taken, BadChain> {
        if self.guest_shut & SHUT_SEND != 0 || self.waiting.len() + payload.len() > WINDOW as usize {
            return Ok(Taken::TooMuch);
        }
        if self.waiting.is_empty() && self.writable && !self.deaf {
            let sent = sys::send_stream(self.stream.as_fd(), &payload.slices(memory, Permissions::Read)?);
            let count = self.wrote(sent);
            payload.take_front(count);
        }
        if self.deaf {
            self.taken = self.taken.wrapping_add(u32::try_from(payload.len()).unwrap_or(0));
        } else if !payload.is_empty() {
            let mut bytes = vec![0; payload.len()]; // at most WINDOW
            payload.read(memory, &mut bytes)?;
            self.waiting.extend(bytes);
        }
        self.plan_update();
        Ok(Taken::Well)
    }

    /// Writes waiting data as far as the host's end accepts it.
    pub(super) fn flush(&mut self) {
        while self.writable && !self.deaf && !self.waiting.is_empty() {
            let (front, _) = self.waiting.as_slices();
            let sent = (&self.stream).write(front);
            let count = self.wrote(sent);
            self.waiting.drain(..count);
        }
        if self.deaf {
            self.taken = self.taken.wrapping_add(u32::try_from(self.waiting.len()).unwrap_or(0));
            self.waiting.clear();
        }
        if self.waiting.is_empty() {
            self.waiting = VecDeque::new();
        }
        self.plan_update();
    }

    /// Records the result of a write to the host's end. Returns the number of bytes written.
    fn wrote(&mut self, outcome: io::Result<usize>) -> usize {
        match outcome {
            Ok(count) => {
                self.taken = self.taken.wrapping_add(u32::try_from(count).unwrap_or(0)); // at most WINDOW
                return count;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.writable = false,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => self.deaf = true,
        }
        0
    }

    /// Schedules a credit update after each quarter of the window, unless another packet has carried the credit meanwhile.
    fn plan_update(&mut self) {
        self.update_due |= self.taken.wrapping_sub(self.taken_told) >= WINDOW / 4;
    }

    /// Records that the guest has shut down these directions (as in the flags of a packet).
    pub(super) fn shut_by_guest(&mut self, sides: u32) {
        self.guest_shut |= sides & (SHUT_SEND | SHUT_RECEIVE);
        if self.guest_shut & SHUT_RECEIVE != 0 {
            // Writers on the host now get EPIPE. The call fails only if the other end is already closed.
            let _ = self.stream.shutdown(Shutdown::Read);
        }
    }

    /// Shuts down the host's end for writing once all data of a guest that has shut down is written. Returns `true` if both
    /// directions are finished.
    pub(super) fn settle(&mut self) -> bool {
        if self.guest_shut & SHUT_SEND != 0 && self.waiting.is_empty() && !self.ended {
            self.ended = true;
            let _ = self.stream.shutdown(Shutdown::Write); // as above
        }
        let both = SHUT_SEND | SHUT_RECEIVE;
        (self.guest_shut == both && (self.waiting.is_empty() || self.deaf)) || self.host_shut == both
    }

    /// Discards data of the host that the guest no longer accepts. If this end were closed with unread bytes, the host would
    /// see a reset instead of the end of data. No new data can arrive, so the loop is bounded by the socket's buffer.
    pub(super) fn drop_unread(&mut self) {
        let mut bytes = [0; 4096];
        while self.guest_shut & SHUT_RECEIVE != 0 && matches!(self.stream.read(&mut bytes), Ok(1..)) {}
    }

    /// Returns whether the guest must be notified of the end of the connection.
    pub(super) fn owes_reset(&self) -> bool {
        !self.reset && self.host_shut != (SHUT_SEND | SHUT_RECEIVE)
    }
}
