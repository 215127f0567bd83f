//! Passes the guest's requests as bytes to the file-server process, and its answers to the guest. If that process ends or sends
//! an invalid answer, this and every later request of the guest fails with an I/O error.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::FsMetrics;
use super::shared_queue::{SharedQueueOffer, wait_while_shared};
use crate::sys;
use crate::virtio::buffers::{MemoryRanges, RequestBuffers};
use crate::virtio::queue_thread::StopSignal;
use crate::virtio::{Memory, Ring};
use nacelle_base::retry::{self, retry_interrupted};
use nacelle_base::share::{MAX_MESSAGE, REPLY_HEADER, REQUEST_HEADER};
use nacelle_base::{guest_error, guest_warn};
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
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
/// The size of `struct fuse_out_header`, which is an answer without payload.
const OUT_HEADER: usize = 16;
/// The field `unique` in `struct fuse_in_header`: the id of the request, which the answer repeats.
const UNIQUE: std::ops::Range<usize> = 8..16;

/// The maximum size of a request that is sent ahead of its turn.
const MAX_EARLY_REQUEST: usize = 8 << 10;
/// The maximum number of bytes of such requests in flight. The stream accepts that many at once, even while the other process
/// waits for this process to read an answer.
const MAX_EARLY_BYTES: usize = 32 << 10;
/// The maximum number of memory slices in one call.
const MAX_SLICES: usize = 1024;

/// The connection to the file-server process. Requests are sent, and their answers received, in the order of
/// [`send_early`](FileServerConnection::send_early); short requests are sent while earlier answers are still outstanding.
#[derive(Debug)]
pub(super) struct FileServerConnection {
    /// `None` after a failure of the stream.
    stream: Option<UnixStream>,
    /// The requests that were begun but not finished.
    progress: VecDeque<SendProgress>,
    metrics: Arc<FsMetrics>,
}

/// The progress of a request.
#[derive(Clone, Copy, Debug)]
enum SendProgress {
    /// The whole request was sent, with this many bytes.
    Sent(usize),
    /// This many bytes were sent; the rest follows in turn.
    Partial(usize),
}

impl FileServerConnection {
    /// Creates a connection over a connected stream.
    pub fn new(stream: UnixStream, metrics: Arc<FsMetrics>) -> io::Result<FileServerConnection> {
        stream.set_nonblocking(true)?;
        Ok(FileServerConnection { stream: Some(stream), progress: VecDeque::new(), metrics })
    }

    /// Shares the queue with the other process, if its memory is shared memory. Returns whether it did. No request may be in flight.
    pub fn share_queue(&mut self, ring: &Ring) -> bool {
        let Some((stream, offer)) = self.stream.as_ref().zip(SharedQueueOffer::from_ring(ring)) else { return false };
        match offer.send(stream) {
            Ok(()) => true,
            Err(error) => {
                self.disconnect(&error);
                false
            }
        }
    }

    /// Waits until a shared queue must stop, and takes it back. After a failure this process serves the queue.
    pub fn wait_while_shared(&mut self, ring: &mut Ring, stop: &StopSignal) {
        let Some(stream) = &self.stream else { return };
        if let Err(error) = wait_while_shared(ring, stream, stop) {
            self.disconnect(&error);
        }
    }

    /// Closes the connection. From now on every request of the guest fails with an I/O error.
    fn disconnect(&mut self, error: &io::Error) {
        if self.stream.take().is_some() {
            guest_error!(
                "the connection to the file-server process failed, all file requests of the guest fail from now on: {error}"
            );
        }
    }

    /// Sends a request if that does not block. The caller must [`exchange`](FileServerConnection::exchange) all requests in the same order.
    pub fn send_early(&mut self, memory: &Memory, buffers: &RequestBuffers) {
        let progress = self.try_send_early(memory, buffers).unwrap_or(SendProgress::Partial(0));
        self.progress.push_back(progress);
    }

    /// Returns `None` if the request must wait for its turn, when its errors are detected too.
    fn try_send_early(&mut self, memory: &Memory, buffers: &RequestBuffers) -> Option<SendProgress> {
        let in_flight = self.progress.iter().try_fold(0, |sum, progress| match progress {
            SendProgress::Sent(bytes) => Some(sum + bytes),
            SendProgress::Partial(_) => None,
        })?;
        let length = REQUEST_HEADER + buffers.readable.len();
        if length > MAX_EARLY_REQUEST || in_flight + length > MAX_EARLY_BYTES {
            return None;
        }
        let mut header = request_header(buffers).ok()?;
        let request = message_slices(memory, &mut header, &buffers.readable, Permissions::Read).ok()?;
        let sent =
            sys::write_stream(self.stream.as_ref()?.as_fd(), request.get(..MAX_SLICES).unwrap_or(&request)).ok()?;
        Some(if sent == length { SendProgress::Sent(length) } else { SendProgress::Partial(sent) })
    }

    /// Sends a request, unless that was done before, and receives its answer. Returns the number of bytes written to the guest.
    pub fn exchange(&mut self, memory: &Memory, buffers: &RequestBuffers, stop: &StopSignal) -> u32 {
        let progress = self.progress.pop_front().unwrap_or(SendProgress::Partial(0));
        let written = match self.receive_reply(progress, memory, buffers, stop) {
            Ok(answer) => {
                self.metrics.requests.fetch_add(1, Ordering::Relaxed);
                Ok(answer)
            }
            Err(error) => {
                self.metrics.failed.fetch_add(1, Ordering::Relaxed);
                if error.kind() != io::ErrorKind::InvalidInput {
                    self.disconnect(&error);
                }
                self.reply_io_error(memory, buffers)
            }
        };
        written.ok().and_then(|written| u32::try_from(written).ok()).unwrap_or(0)
    }

    /// Receives the answer into the guest's buffers. Returns its length in bytes.
    fn receive_reply(
        &mut self,
        progress: SendProgress,
        memory: &Memory,
        buffers: &RequestBuffers,
        stop: &StopSignal,
    ) -> io::Result<usize> {
        let stream = self.stream.as_ref().ok_or(io::ErrorKind::NotConnected);
        let mut io = StreamIo::new(stop);
        if let SendProgress::Partial(sent) = progress {
            // After a partial request the stream is unusable.
            let fatal = |bad| if sent == 0 { bad } else { io::Error::other(bad) };
            let mut header = request_header(buffers).map_err(fatal)?;
            let request = message_slices(memory, &mut header, &buffers.readable, Permissions::Read).map_err(fatal)?;
            io.send_slices(stream?, &request, sent)?;
        }
        let mut header = [0; REPLY_HEADER];
        let answer =
            message_slices(memory, &mut header, &buffers.writable, Permissions::Write).map_err(io::Error::other)?;
        // No other answer can arrive, so header and payload can be read together.
        let is_last = self.progress.is_empty();
        io.receive_message(stream?, &answer, max_reply_bytes(buffers), is_last)
    }

    /// Answers the request with an I/O error, if the guest's buffers are large enough for it.
    fn reply_io_error(&mut self, memory: &Memory, buffers: &RequestBuffers) -> io::Result<usize> {
        let mut request = [0; UNIQUE.end];
        let received = buffers.readable.read(memory, &mut request).map_err(io::Error::other)?;
        if received < request.len() || buffers.writable.len() < OUT_HEADER {
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
fn request_header(buffers: &RequestBuffers) -> io::Result<[u8; REQUEST_HEADER]> {
    let length = buffers.readable.len();
    if length > MAX_MESSAGE {
        guest_warn!(length, "the guest sent a file-system request that is too long");
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let [length, max_length] = [length, max_reply_bytes(buffers)].map(|number| u32::try_from(number).unwrap_or(0)); // at most MAX_MESSAGE
    Ok((u64::from(length) | u64::from(max_length) << 32).to_le_bytes())
}

/// Returns a header followed by the guest's buffers for its payload.
fn message_slices<'m>(
    memory: &'m Memory,
    header: &'m mut [u8],
    pieces: &MemoryRanges,
    access: Permissions,
) -> io::Result<Vec<VolatileSlice<'m>>> {
    let mut slices = vec![VolatileSlice::from(header)];
    let added = pieces.add_slices(memory, access, &mut slices);
    added.map_err(|bad| io::Error::new(io::ErrorKind::InvalidInput, bad))?;
    Ok(slices)
}

/// Returns the bytes `from` to `to` of some slices, limited to the number of slices that one call accepts.
fn slice_range<'m>(slices: &[VolatileSlice<'m>], from: usize, to: usize) -> Vec<VolatileSlice<'m>> {
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
fn max_reply_bytes(buffers: &RequestBuffers) -> usize {
    buffers.writable.len().min(MAX_MESSAGE)
}

/// Waits for the other process. The wait is limited as soon as the queue must stop.
pub(super) struct StreamIo<'a> {
    stop: &'a StopSignal,
    until: Option<Instant>,
}

impl<'a> StreamIo<'a> {
    pub fn new(stop: &'a StopSignal) -> StreamIo<'a> {
        StreamIo { stop, until: None }
    }

    // These are read(2) and write(2), because the seccomp filter of a queue's thread does not allow recv and send.
    pub fn send(&mut self, stream: &UnixStream, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match retry_interrupted(|| nix::unistd::write(stream, bytes)) {
                Ok(sent) => bytes = bytes.get(sent..).unwrap_or_default(),
                Err(error) => self.wait_or_fail(error, stream, PollFlags::POLLOUT)?,
            }
        }
        Ok(())
    }

    /// Sends the slices without their first `sent` bytes.
    fn send_slices(&mut self, stream: &UnixStream, slices: &[VolatileSlice<'_>], mut sent: usize) -> io::Result<()> {
        loop {
            let rest = slice_range(slices, sent, usize::MAX);
            if rest.is_empty() {
                return Ok(());
            }
            match sys::write_stream(stream.as_fd(), &rest) {
                Ok(now) => sent = sent.saturating_add(now),
                Err(error) => self.wait_or_fail(errno(&error), stream, PollFlags::POLLOUT)?,
            }
        }
    }

    /// Receives a header and a payload of at most `max_length` bytes. Returns the length of the payload. `is_last` means that no other
    /// answer is in flight.
    fn receive_message(
        &mut self,
        stream: &UnixStream,
        slices: &[VolatileSlice<'_>],
        max_length: usize,
        is_last: bool,
    ) -> io::Result<usize> {
        let wrong = |what| io::Error::new(io::ErrorKind::InvalidData, what);
        let (mut received, mut length) = (0, None);
        if is_last {
            // An answer can hardly have arrived yet.
            self.wait_or_fail(Errno::EAGAIN, stream, PollFlags::POLLIN)?;
        }
        loop {
            if length.is_none() && received >= REPLY_HEADER {
                let mut header = [0; REPLY_HEADER];
                slices.first().ok_or(io::ErrorKind::InvalidData)?.copy_to(&mut header);
                let answer = usize::try_from(u32::from_le_bytes(header)).unwrap_or(usize::MAX);
                if answer > max_length {
                    return Err(wrong("a reply that is longer than the guest's buffers"));
                }
                length = Some(answer);
            }
            let until = match length {
                Some(length) if received == REPLY_HEADER + length => return Ok(length),
                Some(length) if received > REPLY_HEADER + length => return Err(wrong("more bytes than one reply")),
                Some(length) => REPLY_HEADER + length,
                None if is_last => REPLY_HEADER + max_length,
                None => REPLY_HEADER,
            };
            match sys::read_stream(stream.as_fd(), &slice_range(slices, received, until)) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(now) => received = received.saturating_add(now),
                Err(error) => self.wait_or_fail(errno(&error), stream, PollFlags::POLLIN)?,
            }
        }
    }

    pub fn receive(&mut self, stream: &UnixStream, mut bytes: &mut [u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match retry_interrupted(|| nix::unistd::read(stream, bytes)) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(received) => bytes = bytes.get_mut(received..).unwrap_or_default(),
                Err(error) => self.wait_or_fail(error, stream, PollFlags::POLLIN)?,
            }
        }
        Ok(())
    }

    /// Waits for the stream if the error is EAGAIN, returns at once if it is EINTR, and fails otherwise.
    fn wait_or_fail(&mut self, error: Errno, stream: &UnixStream, wanted: PollFlags) -> io::Result<()> {
        match error {
            Errno::EAGAIN => {}
            Errno::EINTR => return Ok(()),
            _ => return Err(error.into()),
        }
        let stopping = self.stop.is_requested();
        let deadline = if stopping {
            let until = *self.until.get_or_insert_with(|| Instant::now() + STOP_TIMEOUT);
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
            self.stop.clear();
        }
        Ok(())
    }
}

fn errno(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}
