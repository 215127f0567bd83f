//! Owns: a thread that serves one queue; in the simple case one request after the other.
//! Threads: itself; it waits for a kick or for [`QueueThread::stop`].

use super::Memory;
use super::ring::{Request, Ring};
use nacelle_jail::ThreadKind;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};
use virtio_queue::QueueState;

/// A running thread and the queue that it serves.
#[derive(Debug)]
pub(crate) struct QueueThread {
    stop: Arc<Stop>,
    thread: JoinHandle<Ring>,
}

/// The wish that a thread ends: its descriptor is readable from then on. It also becomes readable by a
/// [`nudge`](QueueThread::nudge).
#[derive(Debug)]
pub(crate) struct Stop {
    asked: AtomicBool,
    wake: EventFd,
}

impl Stop {
    /// Whether the thread is to give its ring back.
    pub(crate) fn asked(&self) -> bool {
        self.asked.load(Ordering::Acquire)
    }

    /// Takes note of nudges. The wish to stop stays.
    pub(crate) fn heard(&self) {
        let _ = self.wake.read(); // it may have been read already
    }
}

impl AsFd for Stop {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

impl QueueThread {
    /// Starts a thread that calls `handle` for each request; it returns the bytes it wrote to the guest.
    pub(crate) fn start(
        name: &str,
        ring: Ring,
        handle: impl FnMut(&Memory, Request) -> u32 + Send + 'static,
    ) -> io::Result<QueueThread> {
        QueueThread::run(name, ThreadKind::Queue, ring, |ring, stop| serve(ring, stop, handle))
    }

    /// Starts a thread that serves the ring in its own way, until it is asked to stop.
    pub(crate) fn run(
        name: &str,
        kind: ThreadKind,
        ring: Ring,
        serve: impl FnOnce(Ring, &Stop) -> Ring + Send + 'static,
    ) -> io::Result<QueueThread> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let stop = Arc::new(Stop { asked: AtomicBool::new(false), wake });
        let seen = stop.clone();
        let thread = nacelle_jail::spawn(kind, Builder::new().name(name.to_owned()), move || serve(ring, &seen))?;
        Ok(QueueThread { stop, thread })
    }

    /// Wakes the thread if it waits, to look around.
    pub(crate) fn nudge(&self) {
        if let Err(error) = self.stop.wake.write(1) {
            tracing::error!("cannot wake a queue's thread: {error}");
        }
    }

    /// Waits for the request in flight and takes the queue back.
    pub(crate) fn stop(self) -> Option<QueueState> {
        self.stop.asked.store(true, Ordering::Release);
        self.nudge();
        match self.thread.join() {
            Ok(ring) => Some(ring.into_state()),
            Err(_) => {
                tracing::error!("a queue's thread has panicked");
                None
            }
        }
    }
}

/// Serves requests one after the other until asked to stop.
pub(crate) fn serve(mut ring: Ring, stop: &Stop, mut handle: impl FnMut(&Memory, Request) -> u32) -> Ring {
    let memory = ring.memory().clone();
    loop {
        ring.quiet();
        loop {
            if stop.asked() {
                ring.rearm();
                return ring;
            }
            let Some(request) = ring.pop() else { break };
            let head = request.head;
            let written = handle(&memory, request);
            ring.done(head, written);
            ring.signal();
        }
        if ring.rearm() {
            continue;
        }
        wait(&mut ring, stop);
    }
}

/// Waits for a kick (unless the ring is broken) or the wish to stop.
fn wait(ring: &mut Ring, stop: &Stop) {
    let mut events = vec![PollFd::new(stop.as_fd(), PollFlags::POLLIN)];
    if !ring.is_broken() {
        events.push(PollFd::new(ring.as_fd(), PollFlags::POLLIN));
    }
    let found = poll(&mut events, PollTimeout::NONE);
    let kicked = found.is_ok() && events.get(1).is_some_and(|event| event.any().unwrap_or(true));
    if kicked {
        ring.kicked();
    }
}
