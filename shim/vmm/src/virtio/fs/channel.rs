//! Passes the guest's requests as bytes to the file-server process, and its answers to the guest. If that process ends or sends
//! an invalid answer, this and every later request of the guest fails with an I/O error.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::Metrics;
use super::lend::{Loan, hold};
use crate::guest_warn;
use crate::sys;
use crate::virtio::pieces::{Buffers, Pieces};
use crate::virtio::queue_thread::Stop;
use crate::virtio::{Memory, Ring};
use nacelle_base::retry::{self, retry_interrupted};
use nacelle_base::share::{MAX_MESSAGE, REPLY_HEADER, REQUEST_HEADER};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags};
use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use vm_memory::{Permissions, VolatileSlice};

/// The time for which a queue that is being stopped waits for the answer to the request in flight. The node's file system may hang.
const LAST_ANSWER: Duration = Duration::from_secs(5);
/// The size of `struct fuse_out_header`, which is an answer without payload.
const OUT_HEADER: usize = 16;
/// The field `unique` in `struct fuse_in_header`: the id of the request, which the answer repeats.
const UNIQUE: std::ops::Range<usize> = 8..16;

/// The maximum size of a request that is sent ahead of its turn.
const SHORT: usize = 8 << 10;
/// The maximum number of bytes of such requests in flight. The stream accepts that many at once, even while the other process
/// waits for this process to read an answer.
const AHEAD: usize = 32 << 10;
/// The maximum number of memory slices in one call.
const MAX_SLICES: usize = 1024;

/// The channel to the file-server process. Requests are sent, and their answers received, in the order of
/// [`begin`](Channel::begin); short requests are sent while earlier answers are still outstanding.
#[derive(Debug)]
pub(super) struct Channel {
    /// `None` after a failure of the stream.
    stream: Option<UnixStream>,
    /// The requests that were begun but not finished.
    begun: VecDeque<Begun>,
    metrics: Arc<Metrics>,
}

/// The progress of a request.
#[derive(Clone, Copy, Debug)]
enum Begun {
    /// The whole request was sent, with this many bytes.
    Asked(usize),
    /// This many bytes were sent; the rest follows in turn.
    Rest(usize),
}

impl Channel {
    /// Creates a channel over a connected stream.
    pub fn new(stream: UnixStream, metrics: Arc<Metrics>) -> io::Result<Channel> {
        stream.set_nonblocking(true)?;
        Ok(Channel { stream: Some(stream), begun: VecDeque::new(), metrics })
    }

    /// Shares the queue with the other process, if its memory is shared memory. Returns whether it did. No request may be in flight.
    pub fn lend(&mut self, ring: &Ring) -> bool {
        let Some((stream, loan)) = self.stream.as_ref().zip(Loan::of(ring)) else { return false };
        match loan.send(stream) {
            Ok(()) => true,
            Err(error) => {
                self.give_up(&error);
                false
            }
        }
    }

    /// Waits until a shared queue must stop, and takes it back. After a failure this process serves the queue.
    pub fn hold(&mut self, ring: &mut Ring, stop: &Stop) {
        let Some(stream) = &self.stream else { return };
        if let Err(error) = hold(ring, stream, stop) {
            self.give_up(&error);
        }
    }

    /// Closes the channel. From now on every request of the guest fails with an I/O error.
    fn give_up(&mut self, error: &io::Error) {
        if self.stream.take().is_some() {
            tracing::error!("the volumes of the node are out of reach: {error}");
        }
    }

    /// Sends a request if that does not block. The caller must [`finish`](Channel::finish) all requests in the same order.
    pub fn begin(&mut self, memory: &Memory, buffers: &Buffers) {
        let begun = self.ask_ahead(memory, buffers).unwrap_or(Begun::Rest(0));
        self.begun.push_back(begun);
    }

    /// Returns `None` if the request must wait for its turn, when its errors are detected too.
    fn ask_ahead(&mut self, memory: &Memory, buffers: &Buffers) -> Option<Begun> {
        let under_way = self.begun.iter().try_fold(0, |sum, begun| match begun {
            Begun::Asked(bytes) => Some(sum + bytes),
            Begun::Rest(_) => None,
        })?;
        let length = REQUEST_HEADER + buffers.readable.len();
        if length > SHORT || under_way + length > AHEAD {
            return None;
        }
        let mut header = header(buffers).ok()?;
        let request = message(memory, &mut header, &buffers.readable, Permissions::Read).ok()?;
        let sent =
            sys::write_stream(self.stream.as_ref()?.as_fd(), request.get(..MAX_SLICES).unwrap_or(&request)).ok()?;
        Some(if sent == length { Begun::Asked(length) } else { Begun::Rest(sent) })
    }

    /// Sends a request, unless that was done before, and receives its answer. Returns the number of bytes written to the guest.
    pub fn finish(&mut self, memory: &Memory, buffers: &Buffers, stop: &Stop) -> u32 {
        let begun = self.begun.pop_front().unwrap_or(Begun::Rest(0));
        let written = match self.ask(begun, memory, buffers, stop) {
            Ok(answer) => {
                self.metrics.requests.fetch_add(1, Ordering::Relaxed);
                Ok(answer)
            }
            Err(error) => {
                self.metrics.failed.fetch_add(1, Ordering::Relaxed);
                if error.kind() != io::ErrorKind::InvalidInput {
                    self.give_up(&error);
                }
                self.refuse(memory, buffers)
            }
        };
        written.ok().and_then(|written| u32::try_from(written).ok()).unwrap_or(0)
    }

    /// Receives the answer into the guest's buffers. Returns its length in bytes.
    fn ask(&mut self, begun: Begun, memory: &Memory, buffers: &Buffers, stop: &Stop) -> io::Result<usize> {
        let stream = self.stream.as_ref().ok_or(io::ErrorKind::NotConnected);
        let mut waiting = Waiting::new(stop);
        if let Begun::Rest(sent) = begun {
            // After a partial request the stream is unusable.
            let or_end = |bad| if sent == 0 { bad } else { io::Error::other(bad) };
            let mut header = header(buffers).map_err(or_end)?;
            let request = message(memory, &mut header, &buffers.readable, Permissions::Read).map_err(or_end)?;
            waiting.send_slices(stream?, &request, sent)?;
        }
        let mut header = [0; REPLY_HEADER];
        let answer = message(memory, &mut header, &buffers.writable, Permissions::Write).map_err(io::Error::other)?;
        // No other answer can arrive, so header and payload can be read together.
        let alone = self.begun.is_empty();
        waiting.receive_message(stream?, &answer, room(buffers), alone)
    }

    /// Answers the request with an I/O error, if the guest's buffers are large enough for it.
    fn refuse(&mut self, memory: &Memory, buffers: &Buffers) -> io::Result<usize> {
        let mut request = [0; UNIQUE.end];
        let got = buffers.readable.read(memory, &mut request).map_err(io::Error::other)?;
        if got < request.len() || buffers.writable.len() < OUT_HEADER {
            return Ok(0);
        }
        let mut answer = Vec::with_capacity(OUT_HEADER);
        answer.extend((OUT_HEADER as u32).to_le_bytes());
        answer.extend((-libc::EIO).to_le_bytes());
        answer.extend(request.get(UNIQUE).unwrap_or_default());
        buffers.writable.write(memory, &answer).map_err(io::Error::other)
    }
}

/// Returns the header of a request on the stream.
fn header(buffers: &Buffers) -> io::Result<[u8; REQUEST_HEADER]> {
    let length = buffers.readable.len();
    if length > MAX_MESSAGE {
        guest_warn!(length, "the guest sent a file-system request that is too long");
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let [length, room] = [length, room(buffers)].map(|number| u32::try_from(number).unwrap_or(0)); // at most MAX_MESSAGE
    Ok((u64::from(length) | u64::from(room) << 32).to_le_bytes())
}

/// Returns a header followed by the guest's buffers for its payload.
fn message<'m>(
    memory: &'m Memory,
    header: &'m mut [u8],
    pieces: &Pieces,
    access: Permissions,
) -> io::Result<Vec<VolatileSlice<'m>>> {
    let mut slices = vec![VolatileSlice::from(header)];
    let added = pieces.add_slices(memory, access, &mut slices);
    added.map_err(|bad| io::Error::new(io::ErrorKind::InvalidInput, bad))?;
    Ok(slices)
}

/// Returns the bytes `from` to `to` of some slices, limited to the number of slices that one call accepts.
fn window<'m>(slices: &[VolatileSlice<'m>], from: usize, to: usize) -> Vec<VolatileSlice<'m>> {
    let mut start = 0;
    let cut = slices.iter().filter_map(|slice| {
        let (begin, end) = (from.max(start), to.min(start.saturating_add(slice.len())));
        let part = (begin < end).then(|| slice.subslice(begin - start, end - begin).ok()).flatten();
        start = start.saturating_add(slice.len());
        part
    });
    cut.take(MAX_SLICES).collect()
}

/// Returns the maximum length of the answer in bytes.
fn room(buffers: &Buffers) -> usize {
    buffers.writable.len().min(MAX_MESSAGE)
}

/// Waits for the other process. The wait is limited as soon as the queue must stop.
pub(super) struct Waiting<'a> {
    stop: &'a Stop,
    until: Option<Instant>,
}

impl<'a> Waiting<'a> {
    pub fn new(stop: &'a Stop) -> Waiting<'a> {
        Waiting { stop, until: None }
    }

    // These are read(2) and write(2), because the seccomp filter of a queue's thread does not allow recv and send.
    pub fn send(&mut self, stream: &UnixStream, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match retry_interrupted(|| nix::unistd::write(stream, bytes)) {
                Ok(sent) => bytes = bytes.get(sent..).unwrap_or_default(),
                Err(error) => self.or_wait(error, stream, PollFlags::POLLOUT)?,
            }
        }
        Ok(())
    }

    /// Sends the slices without their first `sent` bytes.
    fn send_slices(&mut self, stream: &UnixStream, slices: &[VolatileSlice<'_>], mut sent: usize) -> io::Result<()> {
        loop {
            let rest = window(slices, sent, usize::MAX);
            if rest.is_empty() {
                return Ok(());
            }
            match sys::write_stream(stream.as_fd(), &rest) {
                Ok(now) => sent = sent.saturating_add(now),
                Err(error) => self.or_wait(errno(&error), stream, PollFlags::POLLOUT)?,
            }
        }
    }

    /// Receives a header and a payload of at most `room` bytes. Returns the length of the payload. `alone` means that no other
    /// answer is in flight.
    fn receive_message(
        &mut self,
        stream: &UnixStream,
        slices: &[VolatileSlice<'_>],
        room: usize,
        alone: bool,
    ) -> io::Result<usize> {
        let wrong = |what| io::Error::new(io::ErrorKind::InvalidData, what);
        let (mut got, mut length) = (0, None);
        if alone {
            // An answer can hardly have arrived yet.
            self.or_wait(Errno::EAGAIN, stream, PollFlags::POLLIN)?;
        }
        loop {
            if length.is_none() && got >= REPLY_HEADER {
                let mut header = [0; REPLY_HEADER];
                slices.first().ok_or(io::ErrorKind::InvalidData)?.copy_to(&mut header);
                let answer = usize::try_from(u32::from_le_bytes(header)).unwrap_or(usize::MAX);
                if answer > room {
                    return Err(wrong("an answer without room"));
                }
                length = Some(answer);
            }
            let until = match length {
                Some(length) if got == REPLY_HEADER + length => return Ok(length),
                Some(length) if got > REPLY_HEADER + length => return Err(wrong("more than an answer")),
                Some(length) => REPLY_HEADER + length,
                None if alone => REPLY_HEADER + room,
                None => REPLY_HEADER,
            };
            match sys::read_stream(stream.as_fd(), &window(slices, got, until)) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(now) => got = got.saturating_add(now),
                Err(error) => self.or_wait(errno(&error), stream, PollFlags::POLLIN)?,
            }
        }
    }

    pub fn receive(&mut self, stream: &UnixStream, mut bytes: &mut [u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match retry_interrupted(|| nix::unistd::read(stream, bytes)) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(got) => bytes = bytes.get_mut(got..).unwrap_or_default(),
                Err(error) => self.or_wait(error, stream, PollFlags::POLLIN)?,
            }
        }
        Ok(())
    }

    /// Waits for the stream if the error is EAGAIN, returns at once if it is EINTR, and fails otherwise.
    fn or_wait(&mut self, error: Errno, stream: &UnixStream, wanted: PollFlags) -> io::Result<()> {
        match error {
            Errno::EAGAIN => {}
            Errno::EINTR => return Ok(()),
            _ => return Err(error.into()),
        }
        let stopping = self.stop.asked();
        let deadline = if stopping {
            let until = *self.until.get_or_insert_with(|| Instant::now() + LAST_ANSWER);
            if until <= Instant::now() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            Some(until)
        } else {
            None
        };
        let mut events = vec![PollFd::new(stream.as_fd(), wanted)];
        if !stopping {
            events.push(PollFd::new(self.stop.as_fd(), PollFlags::POLLIN));
        }
        retry::poll(&mut events, deadline)?;
        if !stopping {
            self.stop.heard();
        }
        Ok(())
    }
}

fn errno(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}
