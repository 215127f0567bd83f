//! Moves frames between a queue and a tap without an intermediate copy: one readv or writev per frame, directly from or to guest memory.
//! The part of a received frame that exceeds the guest's buffers is kept in a spill buffer until the guest provides more. Each queue has
//! one thread; it waits for the tap while the guest has buffers available, otherwise for the guest.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::tap::Tap;
use super::{HEADER, MAX_FRAME, NetMetrics};
use crate::sys::{read_stream, write_stream};
use crate::virtio::buffers::MemoryRanges;
use crate::virtio::queue_thread::StopSignal;
use crate::virtio::ring::Ring;
use nacelle_base::guest_warn;
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
pub(crate) enum NextWait {
    /// None: the queue can continue after other work.
    Nothing,
    /// Buffers or frames of the guest.
    Guest,
    /// Frames at the tap, or space in it.
    Tap,
    /// The tap does not work, permanently or at present.
    TapFailed(io::Error),
}

/// Receives frames for the guest: reads them from the tap into the buffers of the receive queue.
pub(crate) struct FrameReceiver {
    ring: Ring,
    metrics: Arc<NetMetrics>,
    /// Whether a frame may span several of the guest's buffers (`VIRTIO_NET_F_MRG_RXBUF`).
    mergeable: bool,
    /// The buffers taken from the ring and not returned, and their total size.
    buffers: VecDeque<ReceiveBuffer>,
    capacity: usize,
    /// The expected size of the next frame, from recent frames.
    expected: usize,
    /// The buffer for bytes that do not fit; one byte larger than any frame.
    spill: Box<[u8]>,
    pending: Option<PendingFrame>,
}

/// A buffer for a frame.
struct ReceiveBuffer {
    head: u16,
    memory: MemoryRanges,
}

/// A received frame: its first `in_buffers` bytes are in the guest's buffers, the rest in the spill buffer.
#[derive(Clone, Copy)]
struct PendingFrame {
    length: usize,
    in_buffers: usize,
}

impl FrameReceiver {
    pub(crate) fn new(ring: Ring, mergeable: bool, metrics: Arc<NetMetrics>) -> FrameReceiver {
        FrameReceiver {
            ring,
            metrics,
            mergeable,
            buffers: VecDeque::new(),
            capacity: 0,
            expected: MIN_FRAME,
            spill: vec![0; MAX_FRAME + 1].into_boxed_slice(),
            pending: None,
        }
    }

    /// Receives frames for the guest until none is left, at most one batch.
    pub(crate) fn run(&mut self, tap: BorrowedFd<'_>) -> NextWait {
        let mut need = NextWait::Nothing;
        for _ in 0..BATCH {
            need = self.receive_frame(tap);
            if !matches!(need, NextWait::Nothing) {
                break;
            }
        }
        self.ring.notify_guest();
        need
    }

    /// Returns the ring, with the unused buffers put back. A frame that waits for buffers is dropped.
    pub(crate) fn into_ring(mut self) -> Ring {
        if self.pending.is_some() {
            increment(&self.metrics.receive_drops);
        }
        self.ring.undo_pops(u16::try_from(self.buffers.len()).unwrap_or(u16::MAX));
        self.ring
    }

    fn receive_frame(&mut self, tap: BorrowedFd<'_>) -> NextWait {
        let pending = match self.pending {
            Some(pending) => pending,
            None => match self.read_frame(tap) {
                Ok(Some(pending)) => pending,
                Ok(None) => return NextWait::Guest,
                Err(error) => return self.handle_read_error(error),
            },
        };
        self.pending = None;
        if pending.in_buffers + self.spill.len() <= pending.length {
            guest_warn!(queue = self.ring.index(), "a frame of more than {MAX_FRAME} bytes was dropped");
            increment(&self.metrics.receive_drops);
            return NextWait::Nothing;
        }
        self.take_buffers(pending.length);
        if self.capacity < pending.length {
            let all = !self.mergeable || self.buffers.len() >= usize::from(self.ring.state().size);
            if all {
                increment(&self.metrics.receive_drops);
                return NextWait::Nothing;
            }
            self.pending = Some(pending);
            return NextWait::Guest;
        }
        self.complete_frame(pending);
        NextWait::Nothing
    }

    fn handle_read_error(&mut self, error: io::Error) -> NextWait {
        match error.raw_os_error() {
            Some(libc::EAGAIN) => NextWait::Tap,
            Some(libc::EINTR) => NextWait::Nothing,
            // The kernel could not write the frame, or has no header for it, and has dropped it.
            Some(libc::EFAULT | libc::EINVAL) => {
                increment(&self.metrics.receive_drops);
                NextWait::Nothing
            }
            _ => NextWait::TapFailed(error),
        }
    }

    /// Takes buffers of the guest until they have `wanted` bytes, or one buffer if a frame must fit into one. Afterwards the
    /// first buffer, if any, is large enough for a header.
    fn take_buffers(&mut self, wanted: usize) {
        while self.capacity < wanted && (self.mergeable || self.buffers.is_empty()) {
            let Some((head, buffers)) = self.ring.pop_with_error() else { break };
            // An invalid chain counts as an empty buffer and is returned in order.
            let memory = buffers.map(|buffers| buffers.writable).unwrap_or_default();
            if self.buffers.is_empty() && memory.len() < HEADER {
                self.ring.complete(head, 0);
                continue;
            }
            self.capacity = self.capacity.saturating_add(memory.len());
            self.buffers.push_back(ReceiveBuffer { head, memory });
        }
    }

    /// Reads a frame. Returns `None` if the guest has no buffer for it.
    fn read_frame(&mut self, tap: BorrowedFd<'_>) -> io::Result<Option<PendingFrame>> {
        self.take_buffers(self.expected);
        if self.buffers.is_empty() {
            return Ok(None);
        }
        let memory = self.ring.memory().clone();
        let mut slices = Vec::with_capacity(self.buffers.len() + 1);
        let mut offered = 0;
        for buffer in &self.buffers {
            // The pieces were checked when they were taken.
            buffer.memory.add_slices(&memory, Permissions::Write, &mut slices).map_err(io::Error::other)?;
            offered += buffer.memory.len();
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
        Ok(Some(PendingFrame { length, in_buffers: length.min(offered) }))
    }

    /// Completes a frame that fits into the taken buffers, and returns these to the guest.
    fn complete_frame(&mut self, pending: PendingFrame) {
        let spilled = pending.length - pending.in_buffers;
        let mut used = Vec::new();
        let mut left = pending.length;
        for buffer in &self.buffers {
            let here = buffer.memory.len().min(left);
            left -= here;
            used.push((buffer.head, here as u32)); // at most MAX_FRAME
            if left == 0 {
                break;
            }
        }
        let buffer_count = u16::try_from(used.len()).unwrap_or(u16::MAX); // at most the queue's size
        if let Some(rest) = self.spill.get(..spilled) {
            write_at(&self.ring, &self.buffers, pending.in_buffers, rest);
        }
        write_at(&self.ring, &self.buffers, NUM_BUFFERS, &buffer_count.to_le_bytes());
        self.ring.complete_together(&used);
        for buffer in self.buffers.drain(..used.len().min(self.buffers.len())) {
            self.capacity -= buffer.memory.len();
        }
        self.drop_short_buffers();
        increment(&self.metrics.received);
        self.metrics.received_bytes.fetch_add(pending.length as u64, Ordering::Relaxed);
    }

    /// Returns buffers from the front that are too small for a header.
    fn drop_short_buffers(&mut self) {
        while let Some(buffer) = self.buffers.front()
            && buffer.memory.len() < HEADER
        {
            self.ring.complete(buffer.head, 0);
            self.capacity -= buffer.memory.len();
            self.buffers.pop_front();
        }
    }
}

/// Writes to the buffers as if they were contiguous, from byte `at` on.
fn write_at(ring: &Ring, buffers: &VecDeque<ReceiveBuffer>, at: usize, bytes: &[u8]) {
    let (mut skip, mut rest) = (at, bytes);
    for buffer in buffers {
        if rest.is_empty() {
            return;
        }
        if skip < buffer.memory.len() {
            // The pieces were checked when they were taken.
            let written = buffer.memory.write_at(ring.memory(), skip, rest).unwrap_or_default();
            rest = rest.get(written..).unwrap_or_default();
        }
        skip = skip.saturating_sub(buffer.memory.len());
    }
}

/// Sends the guest's frames: takes them from the transmit queue and writes them to the tap.
pub(crate) struct FrameSender {
    ring: Ring,
    metrics: Arc<NetMetrics>,
}

impl FrameSender {
    pub(crate) fn new(ring: Ring, metrics: Arc<NetMetrics>) -> FrameSender {
        FrameSender { ring, metrics }
    }

    /// Returns the ring.
    pub(crate) fn into_ring(self) -> Ring {
        self.ring
    }

    /// Sends frames of the guest until none is left, at most one batch.
    pub(crate) fn run(&mut self, tap: BorrowedFd<'_>) -> NextWait {
        let memory = self.ring.memory().clone();
        let mut need = NextWait::Nothing;
        for _ in 0..BATCH {
            let Some(request) = self.ring.pop() else {
                need = NextWait::Guest;
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
                    increment(&self.metrics.sent);
                    self.metrics.sent_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.ring.undo_pop();
                    need = NextWait::Tap;
                    break;
                }
                // The kernel rejects the header, or the interface is down: the frame is dropped.
                Err(error) => {
                    guest_warn!(queue = self.ring.index(), bytes = frame.len(), "a frame was dropped: {error}");
                    increment(&self.metrics.send_drops);
                }
            }
            self.ring.complete(request.head, 0);
        }
        self.ring.notify_guest();
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

/// Serves a receive queue until asked to stop. `on_removed` is called when the interface no longer exists.
pub(super) fn receive(
    ring: Ring,
    stop: &StopSignal,
    tap: &Tap,
    mergeable: bool,
    metrics: Arc<NetMetrics>,
    on_removed: impl Fn(),
) -> Ring {
    let mut receiver = FrameReceiver::new(ring, mergeable, metrics);
    receiver.ring.disable_kicks();
    while !stop.is_requested() {
        match receiver.run(tap.as_fd()) {
            NextWait::Nothing => {}
            NextWait::Tap => wait(stop, Some((tap.as_fd(), PollFlags::POLLIN))),
            NextWait::Guest => {
                if !receiver.ring.enable_kicks() {
                    wait_kick(stop, &mut receiver.ring);
                }
                receiver.ring.disable_kicks();
            }
            NextWait::TapFailed(error) => {
                if tap.is_attached() {
                    guest_warn!("a network interface no longer exists: {error}");
                    on_removed();
                }
                wait(stop, None);
            }
        }
    }
    receiver.into_ring()
}

/// Serves a transmit queue until asked to stop.
pub(super) fn transmit(ring: Ring, stop: &StopSignal, tap: &Tap, metrics: Arc<NetMetrics>) -> Ring {
    let mut sender = FrameSender::new(ring, metrics);
    sender.ring.disable_kicks();
    while !stop.is_requested() {
        match sender.run(tap.as_fd()) {
            NextWait::Nothing => {}
            NextWait::Tap => wait(stop, Some((tap.as_fd(), PollFlags::POLLOUT))),
            NextWait::Guest | NextWait::TapFailed(_) => {
                if !sender.ring.enable_kicks() {
                    wait_kick(stop, &mut sender.ring);
                }
                sender.ring.disable_kicks();
            }
        }
    }
    sender.into_ring()
}

/// Waits for a kick, unless the ring is broken.
fn wait_kick(stop: &StopSignal, ring: &mut Ring) {
    let kick = if ring.is_broken() { None } else { Some((ring.as_fd(), PollFlags::POLLIN)) };
    wait(stop, kick);
    if !ring.is_broken() {
        ring.clear_kick();
    }
}

/// Waits for `other`, for a wake-up or for the request to stop.
fn wait(stop: &StopSignal, other: Option<(BorrowedFd<'_>, PollFlags)>) {
    let mut events = vec![PollFd::new(stop.as_fd(), PollFlags::POLLIN)];
    events.extend(other.map(|(fd, flags)| PollFd::new(fd, flags)));
    // After a failure the caller checks its state again.
    let _ = retry::poll(&mut events, None);
    if !stop.is_requested() && events.first().is_some_and(|event| event.any().unwrap_or(true)) {
        stop.clear();
    }
}

fn increment(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}
