//! Moves frames between a queue and a tap without an intermediate copy: one readv or writev per frame, directly from or to guest memory.
//! The part of a received frame that exceeds the guest's buffers is kept in a spill buffer until the guest provides more. Each queue has
//! one thread; it waits for the tap while the guest has buffers available, otherwise for the guest.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::tap::Tap;
use super::{HEADER, MAX_FRAME, Metrics};
use crate::guest_warn;
use crate::sys::{read_stream, write_stream};
use crate::virtio::pieces::Pieces;
use crate::virtio::queue_thread::Stop;
use crate::virtio::ring::Ring;
use nacelle_base::retry;
use nix::poll::{PollFd, PollFlags};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use vm_memory::{Permissions, VolatileSlice};

/// The number of frames between two checks for a stop request and an interrupt.
const BATCH: usize = 64;

/// The maximum number of slices of guest memory in one call; the kernel accepts 1024.
const MAX_SLICES: usize = 1000;

/// The minimum frame size: header, addresses and type.
const MIN_FRAME: usize = HEADER + 14;

/// The offset of `num_buffers` in the header, which the tap does not fill in (Virtio 1.2, 5.1.6).
const NUM_BUFFERS: usize = 10;

/// The event to wait for before the next step.
#[derive(Debug)]
pub(crate) enum Need {
    /// None: the queue can continue after other work.
    Turn,
    /// Buffers or frames of the guest.
    Guest,
    /// Frames at the tap, or space in it.
    Tap,
    /// The tap does not work, permanently or at present.
    Parked(io::Error),
}

/// The guest's side of received frames.
pub(crate) struct Receiver {
    ring: Ring,
    metrics: Arc<Metrics>,
    /// Whether a frame may span several of the guest's buffers (`VIRTIO_NET_F_MRG_RXBUF`).
    mergeable: bool,
    /// The buffers taken from the ring and not returned, and their total size.
    rooms: VecDeque<Room>,
    capacity: usize,
    /// The expected size of the next frame, from recent frames.
    expected: usize,
    /// The buffer for bytes that do not fit; one byte larger than any frame.
    spill: Box<[u8]>,
    held: Option<Held>,
}

/// A buffer for a frame.
struct Room {
    head: u16,
    pieces: Pieces,
}

/// A received frame: its first `placed` bytes are in the guest's buffers, the rest in the spill buffer.
#[derive(Clone, Copy)]
struct Held {
    length: usize,
    placed: usize,
}

impl Receiver {
    pub(crate) fn new(ring: Ring, mergeable: bool, metrics: Arc<Metrics>) -> Receiver {
        Receiver {
            ring,
            metrics,
            mergeable,
            rooms: VecDeque::new(),
            capacity: 0,
            expected: MIN_FRAME,
            spill: vec![0; MAX_FRAME + 1].into_boxed_slice(),
            held: None,
        }
    }

    /// Receives frames for the guest until none is left, at most one batch.
    pub(crate) fn run(&mut self, tap: BorrowedFd<'_>) -> Need {
        let mut need = Need::Turn;
        for _ in 0..BATCH {
            need = self.step(tap);
            if !matches!(need, Need::Turn) {
                break;
            }
        }
        self.ring.signal();
        need
    }

    /// Returns the ring, with the unused buffers put back. A frame that waits for buffers is dropped.
    pub(crate) fn into_ring(mut self) -> Ring {
        if self.held.is_some() {
            count(&self.metrics.receive_drops);
        }
        self.ring.unpop_many(u16::try_from(self.rooms.len()).unwrap_or(u16::MAX));
        self.ring
    }

    fn step(&mut self, tap: BorrowedFd<'_>) -> Need {
        let held = match self.held {
            Some(held) => held,
            None => match self.read(tap) {
                Ok(Some(held)) => held,
                Ok(None) => return Need::Guest,
                Err(error) => return self.failed(error),
            },
        };
        self.held = None;
        if held.placed + self.spill.len() <= held.length {
            guest_warn!(queue = self.ring.index(), "a frame of more than {MAX_FRAME} bytes was dropped");
            count(&self.metrics.receive_drops);
            return Need::Turn;
        }
        self.provide(held.length);
        if self.capacity < held.length {
            let all = !self.mergeable || self.rooms.len() >= usize::from(self.ring.state().size);
            if all {
                count(&self.metrics.receive_drops);
                return Need::Turn;
            }
            self.held = Some(held);
            return Need::Guest;
        }
        self.deliver(held);
        Need::Turn
    }

    fn failed(&mut self, error: io::Error) -> Need {
        match error.raw_os_error() {
            Some(libc::EAGAIN) => Need::Tap,
            Some(libc::EINTR) => Need::Turn,
            // The kernel could not write the frame, or has no header for it, and has dropped it.
            Some(libc::EFAULT | libc::EINVAL) => {
                count(&self.metrics.receive_drops);
                Need::Turn
            }
            _ => Need::Parked(error),
        }
    }

    /// Takes buffers of the guest until they have `wanted` bytes, or one buffer if a frame must fit into one. Afterwards the
    /// first buffer, if any, is large enough for a header.
    fn provide(&mut self, wanted: usize) {
        while self.capacity < wanted && (self.mergeable || self.rooms.is_empty()) {
            let Some((head, buffers)) = self.ring.pop_any() else { break };
            // An invalid chain counts as an empty buffer and is returned in order.
            let pieces = buffers.map(|buffers| buffers.writable).unwrap_or_default();
            if self.rooms.is_empty() && pieces.len() < HEADER {
                self.ring.done(head, 0);
                continue;
            }
            self.capacity = self.capacity.saturating_add(pieces.len());
            self.rooms.push_back(Room { head, pieces });
        }
    }

    /// Reads a frame. Returns `None` if the guest has no buffer for it.
    fn read(&mut self, tap: BorrowedFd<'_>) -> io::Result<Option<Held>> {
        self.provide(self.expected);
        if self.rooms.is_empty() {
            return Ok(None);
        }
        let memory = self.ring.memory().clone();
        let mut slices = Vec::with_capacity(self.rooms.len() + 1);
        let mut offered = 0;
        for room in &self.rooms {
            // The pieces were checked when they were taken.
            room.pieces.add_slices(&memory, Permissions::Write, &mut slices).map_err(io::Error::other)?;
            offered += room.pieces.len();
            if offered >= self.expected || slices.len() >= MAX_SLICES {
                break;
            }
        }
        slices.truncate(MAX_SLICES);
        let offered: usize = slices.iter().map(VolatileSlice::len).sum();
        slices.push(VolatileSlice::from(&mut *self.spill));
        let length = read_stream(tap, &slices)?;
        if length < HEADER {
            return Err(io::ErrorKind::UnexpectedEof.into()); // the tap does not prepend a header
        }
        // Long frames arrive in sequences; a short one between them has little effect.
        self.expected = length.max(self.expected - self.expected.saturating_sub(length) / 16);
        Ok(Some(Held { length, placed: length.min(offered) }))
    }

    /// Completes a frame that fits into the taken buffers, and returns these to the guest.
    fn deliver(&mut self, held: Held) {
        let spilt = held.length - held.placed;
        let mut used = Vec::new();
        let mut left = held.length;
        for room in &self.rooms {
            let here = room.pieces.len().min(left);
            left -= here;
            used.push((room.head, here as u32)); // at most MAX_FRAME
            if left == 0 {
                break;
            }
        }
        let count_of = u16::try_from(used.len()).unwrap_or(u16::MAX); // at most the queue's size
        if let Some(rest) = self.spill.get(..spilt) {
            write_at(&self.ring, &self.rooms, held.placed, rest);
        }
        write_at(&self.ring, &self.rooms, NUM_BUFFERS, &count_of.to_le_bytes());
        self.ring.done_together(&used);
        for room in self.rooms.drain(..used.len().min(self.rooms.len())) {
            self.capacity -= room.pieces.len();
        }
        self.first_has_room();
        count(&self.metrics.received);
        self.metrics.received_bytes.fetch_add(held.length as u64, Ordering::Relaxed);
    }

    /// Returns buffers from the front that are too small for a header.
    fn first_has_room(&mut self) {
        while let Some(room) = self.rooms.front()
            && room.pieces.len() < HEADER
        {
            self.ring.done(room.head, 0);
            self.capacity -= room.pieces.len();
            self.rooms.pop_front();
        }
    }
}

/// Writes to the buffers as if they were contiguous, from byte `at` on.
fn write_at(ring: &Ring, rooms: &VecDeque<Room>, at: usize, bytes: &[u8]) {
    let (mut skip, mut rest) = (at, bytes);
    for room in rooms {
        if rest.is_empty() {
            return;
        }
        if skip < room.pieces.len() {
            // The pieces were checked when they were taken.
            let written = room.pieces.write_at(ring.memory(), skip, rest).unwrap_or_default();
            rest = rest.get(written..).unwrap_or_default();
        }
        skip = skip.saturating_sub(room.pieces.len());
    }
}

/// The guest's side of sent frames.
pub(crate) struct Sender {
    ring: Ring,
    metrics: Arc<Metrics>,
}

impl Sender {
    pub(crate) fn new(ring: Ring, metrics: Arc<Metrics>) -> Sender {
        Sender { ring, metrics }
    }

    /// Returns the ring.
    pub(crate) fn into_ring(self) -> Ring {
        self.ring
    }

    /// Sends frames of the guest until none is left, at most one batch.
    pub(crate) fn run(&mut self, tap: BorrowedFd<'_>) -> Need {
        let memory = self.ring.memory().clone();
        let mut need = Need::Turn;
        for _ in 0..BATCH {
            let Some(request) = self.ring.pop() else {
                need = Need::Guest;
                break;
            };
            let frame = &request.buffers.readable;
            let sent = if (MIN_FRAME..=MAX_FRAME).contains(&frame.len()) {
                match frame.slices(&memory, Permissions::Read) {
                    Ok(slices) if slices.len() <= MAX_SLICES => send(tap, &slices),
                    _ => Err(io::ErrorKind::InvalidInput.into()),
                }
            } else {
                Err(io::ErrorKind::InvalidInput.into())
            };
            match sent {
                Ok(bytes) => {
                    count(&self.metrics.sent);
                    self.metrics.sent_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.ring.unpop();
                    need = Need::Tap;
                    break;
                }
                // The kernel rejects the header, or the interface is down: the frame is dropped.
                Err(error) => {
                    guest_warn!(queue = self.ring.index(), bytes = frame.len(), "a frame was dropped: {error}");
                    count(&self.metrics.send_drops);
                }
            }
            self.ring.done(request.head, 0);
        }
        self.ring.signal();
        need
    }
}

/// Writes one whole frame to the tap.
fn send(tap: BorrowedFd<'_>, slices: &[VolatileSlice<'_>]) -> io::Result<usize> {
    loop {
        match write_stream(tap, slices) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

/// Serves a receive queue until asked to stop. `gone` is called when the interface no longer exists.
pub(super) fn receive(
    ring: Ring,
    stop: &Stop,
    tap: &Tap,
    mergeable: bool,
    metrics: Arc<Metrics>,
    gone: impl Fn(),
) -> Ring {
    let mut receiver = Receiver::new(ring, mergeable, metrics);
    receiver.ring.quiet();
    while !stop.asked() {
        match receiver.run(tap.as_fd()) {
            Need::Turn => {}
            Need::Tap => wait(stop, Some((tap.as_fd(), PollFlags::POLLIN))),
            Need::Guest => {
                if !receiver.ring.rearm() {
                    wait_kick(stop, &mut receiver.ring);
                }
                receiver.ring.quiet();
            }
            Need::Parked(error) => {
                if tap.is_attached() {
                    tracing::warn!("a network interface is gone: {error}");
                    gone();
                }
                wait(stop, None);
            }
        }
    }
    receiver.into_ring()
}

/// Serves a transmit queue until asked to stop.
pub(super) fn transmit(ring: Ring, stop: &Stop, tap: &Tap, metrics: Arc<Metrics>) -> Ring {
    let mut sender = Sender::new(ring, metrics);
    sender.ring.quiet();
    while !stop.asked() {
        match sender.run(tap.as_fd()) {
            Need::Turn => {}
            Need::Tap => wait(stop, Some((tap.as_fd(), PollFlags::POLLOUT))),
            Need::Guest | Need::Parked(_) => {
                if !sender.ring.rearm() {
                    wait_kick(stop, &mut sender.ring);
                }
                sender.ring.quiet();
            }
        }
    }
    sender.into_ring()
}

/// Waits for a kick, unless the ring is broken.
fn wait_kick(stop: &Stop, ring: &mut Ring) {
    let kick = if ring.is_broken() { None } else { Some((ring.as_fd(), PollFlags::POLLIN)) };
    wait(stop, kick);
    if !ring.is_broken() {
        ring.kicked();
    }
}

/// Waits for `other`, for a nudge or for the request to stop.
fn wait(stop: &Stop, other: Option<(BorrowedFd<'_>, PollFlags)>) {
    let mut events = vec![PollFd::new(stop.as_fd(), PollFlags::POLLIN)];
    events.extend(other.map(|(fd, flags)| PollFd::new(fd, flags)));
    // After a failure the caller checks its state again.
    let _ = retry::poll(&mut events, None);
    if !stop.asked() && events.first().is_some_and(|event| event.any().unwrap_or(true)) {
        stop.heard();
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}
