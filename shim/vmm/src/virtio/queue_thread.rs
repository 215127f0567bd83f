//! Runs a thread that serves one queue: requests that need no waiting at once, the others one after the other. The thread waits
//! for a kick or for [`QueueThread::stop`].

use super::Memory;
use super::ring::{Request, Ring};
use nacelle_base::guest_error;
use nacelle_base::retry;
use nacelle_jail::ThreadKind;
use nix::poll::{PollFd, PollFlags};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};
use virtio_queue::QueueState;

/// The maximum number of requests that are begun before the guest is notified of completed ones.
const BATCH: usize = 64;
/// The maximum number of requests that wait at a time; further requests stay in the ring.
const MAX_WAITING: usize = 32;
/// The number of polls of an empty queue before the thread asks the guest for kicks again (some microseconds). The guest's next
/// request often arrives within them, and then needs neither a kick, which is a vCPU exit, nor the wake-up of a thread.
const MAX_EMPTY_POLLS: usize = 256;

/// A running thread and the queue that it serves.
#[derive(Debug)]
pub(crate) struct QueueThread {
    stop: Arc<StopSignal>,
    thread: JoinHandle<Ring>,
}

/// The request that a thread stops. Its descriptor is readable from then on, and also after a [`wake`](QueueThread::wake).
#[derive(Debug)]
pub(crate) struct StopSignal {
    requested: AtomicBool,
    wake: EventFd,
}

impl StopSignal {
    /// Returns whether the thread must stop and return its ring.
    pub(crate) fn is_requested(&self) -> bool {
        self.requested.load(Ordering::Acquire)
    }

    /// Clears wake-ups. A request to stop remains.
    pub(crate) fn clear(&self) {
        let _ = self.wake.read(); // it may have been read already
    }
}

impl AsFd for StopSignal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

impl QueueThread {
    /// Starts a thread that serves requests with [`serve`].
    pub(crate) fn start<Rest>(
        name: &str,
        ring: Ring,
        begin: impl FnMut(&Memory, Request) -> Result<u32, Rest> + Send + 'static,
        finish: impl FnMut(&Memory, Rest) -> u32 + Send + 'static,
    ) -> io::Result<QueueThread> {
        QueueThread::run(name, ThreadKind::Queue, ring, |ring, stop| serve(ring, stop, begin, finish))
    }

    /// Starts a thread that runs `serve` until it is asked to stop.
    pub(crate) fn run(
        name: &str,
        kind: ThreadKind,
        ring: Ring,
        serve: impl FnOnce(Ring, &StopSignal) -> Ring + Send + 'static,
    ) -> io::Result<QueueThread> {
        let wake = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let stop = Arc::new(StopSignal { requested: AtomicBool::new(false), wake });
        let thread_stop = stop.clone();
        let thread =
            nacelle_jail::spawn(kind, Builder::new().name(name.to_owned()), move || serve(ring, &thread_stop))?;
        Ok(QueueThread { stop, thread })
    }

    /// Wakes the thread if it waits, so that it checks its state again.
    pub(crate) fn wake(&self) {
        if let Err(error) = self.stop.wake.write(1) {
            guest_error!("cannot wake a queue's thread: {error}");
        }
    }

    /// Waits for the requests in flight and returns the queue's state, or `None` if the thread has panicked.
    pub(crate) fn stop(self) -> Option<QueueState> {
        self.stop.requested.store(true, Ordering::Release);
        self.wake();
        match self.thread.join() {
            Ok(ring) => Some(ring.into_state()),
            Err(_) => {
                guest_error!("a queue's thread has panicked");
                None
            }
        }
    }
}

/// Serves requests until asked to stop. `begin` performs a request if that needs no waiting, and returns the number of bytes
/// written to the guest; otherwise `finish` performs it and may block. Waiting requests are finished one after the other, while
/// requests that need no waiting overtake them. Notifications of the guest are batched, but sent before each wait.
pub(crate) fn serve<Rest>(
    mut ring: Ring,
    stop: &StopSignal,
    mut begin: impl FnMut(&Memory, Request) -> Result<u32, Rest>,
    mut finish: impl FnMut(&Memory, Rest) -> u32,
) -> Ring {
    let memory = ring.memory().clone();
    let mut waiting = VecDeque::new();
    loop {
        ring.disable_kicks();
        loop {
            let stopping = stop.is_requested();
            let mut begun = 0;
            while !stopping
                && begun < BATCH
                && waiting.len() < MAX_WAITING
                && let Some(request) = ring.pop()
            {
                begun += 1;
                let head = request.head;
                match begin(&memory, request) {
                    Ok(written) => ring.complete(head, written),
                    Err(rest) => waiting.push_back((head, rest)),
                }
            }
            ring.notify_guest();
            if let Some((head, rest)) = waiting.pop_front() {
                let written = finish(&memory, rest);
                ring.complete(head, written);
            } else if stopping {
                ring.enable_kicks();
                return ring;
            } else if begun == 0 && !poll_briefly(&ring, stop) {
                break;
            }
        }
        if ring.enable_kicks() {
            continue;
        }
        wait(&mut ring, stop);
    }
}

/// Polls briefly for a request or the request to stop.
fn poll_briefly(ring: &Ring, stop: &StopSignal) -> bool {
    (0..MAX_EMPTY_POLLS).any(|_| {
        std::hint::spin_loop();
        ring.has_pending() || stop.is_requested()
    })
}

/// Waits for a kick (unless the ring is broken) or the request to stop.
fn wait(ring: &mut Ring, stop: &StopSignal) {
    let mut events = vec![PollFd::new(stop.as_fd(), PollFlags::POLLIN)];
    if !ring.is_broken() {
        events.push(PollFd::new(ring.as_fd(), PollFlags::POLLIN));
    }
    let found = retry::poll(&mut events, None);
    let kicked = found.is_ok() && events.get(1).is_some_and(|event| event.any().unwrap_or(true));
    if kicked {
        ring.clear_kick();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Driver;
    use crate::virtio::Interrupt;
    use crate::virtio::scripted::eventually;
    use std::sync::atomic::AtomicU32;
    use std::sync::mpsc::{Sender, channel};
    use virtio_queue::Queue;
    use vm_memory::{Bytes, GuestAddress};

    const SIZE: u16 = 128;
    /// The buffer of a request that waits, and that of one that does not.
    const WAITS: (u64, u32, bool) = (0x10000, 1, false);
    const QUICK: (u64, u32, bool) = (0x10001, 1, false);

    #[derive(Default)]
    struct InterruptCount(AtomicU32);

    impl Interrupt for InterruptCount {
        fn notify_queue(&self, _index: u16) {
            self.0.fetch_add(1, Ordering::AcqRel);
        }

        fn notify_config(&self) {}
    }

    /// Serves the requests that the driver has made available; requests that wait do so until the test permits them to finish.
    fn serve_all(driver: &Driver) -> (QueueThread, Arc<InterruptCount>, Sender<()>) {
        let (desc_table, avail_ring, used_ring) = driver.addresses();
        let state = QueueState {
            max_size: SIZE,
            size: SIZE,
            ready: true,
            desc_table,
            avail_ring,
            used_ring,
            next_avail: 0,
            next_used: 0,
            event_idx_enabled: false,
        };
        let interrupts = Arc::<InterruptCount>::default();
        let queue = Queue::try_from(state).unwrap();
        let kick = EventFd::new().unwrap().into();
        let ring = Ring::new(0, queue, driver.memory.clone(), kick, interrupts.clone()).unwrap();
        driver.memory.write_slice(&[1, 0], GuestAddress(WAITS.0)).unwrap();
        let (permit, permits) = channel();
        let begin = |memory: &Memory, request: Request| {
            let mut byte = [0xff];
            request.buffers.readable.read(memory, &mut byte).unwrap();
            if byte == [0] { Ok(7) } else { Err(request) }
        };
        let finish = move |_: &Memory, _: Request| {
            permits.recv().unwrap();
            8
        };
        (QueueThread::start("test", ring, begin, finish).unwrap(), interrupts, permit)
    }

    #[test]
    fn completed_requests_overtake_waiting_ones() {
        let mut driver = Driver::new(crate::fuzz::memory(), 0, SIZE);
        let heads = [WAITS, QUICK, WAITS, QUICK].map(|buffer| driver.submit(&[buffer]));
        let (thread, interrupts, permit) = serve_all(&driver);
        let wait_for_interrupts = |times| eventually("an interrupt", || interrupts.0.load(Ordering::Acquire) == times);
        wait_for_interrupts(1);
        assert_eq!([(); 3].map(|()| driver.take_used()), [Some((heads[1], 7)), Some((heads[3], 7)), None]);
        for (n, head) in [(2, heads[0]), (3, heads[2])] {
            permit.send(()).unwrap();
            wait_for_interrupts(n);
            assert_eq!([(); 2].map(|()| driver.take_used()), [Some((head, 8)), None]);
        }
        let state = thread.stop().unwrap();
        assert_eq!((state.next_avail, state.next_used), (4, 4));
    }

    #[test]
    fn a_queue_of_waiting_requests_is_served_completely() {
        let mut driver = Driver::new(crate::fuzz::memory(), 0, SIZE);
        let requests = u16::try_from(2 * MAX_WAITING + 2 * BATCH).unwrap().min(SIZE);
        for n in 0..requests {
            driver.submit(&[if n % 3 == 0 { QUICK } else { WAITS }]);
        }
        let (thread, interrupts, permit) = serve_all(&driver);
        (0..requests).for_each(|_| permit.send(()).unwrap());
        let mut used = 0;
        eventually("all requests", || {
            used += driver.count_used();
            used == requests
        });
        let state = thread.stop().unwrap();
        assert_eq!((state.next_avail, state.next_used), (requests, requests));
        assert!(interrupts.0.load(Ordering::Acquire) > 0);
    }

    #[test]
    fn a_stopped_thread_leaves_no_request_unfinished() {
        for round in 0..20 {
            let mut driver = Driver::new(crate::fuzz::memory(), 0, SIZE);
            for _ in 0..SIZE {
                driver.submit(&[WAITS]);
            }
            let (thread, interrupts, permit) = serve_all(&driver);
            (0..SIZE).for_each(|_| permit.send(()).unwrap());
            if round % 2 == 0 {
                eventually("the first request", || driver.count_used() > 0);
            }
            let state = thread.stop().unwrap();
            assert_eq!(state.next_avail, state.next_used);
            assert_eq!(driver.taken().wrapping_add(driver.count_used()), state.next_used);
            assert!(state.next_used == 0 || interrupts.0.load(Ordering::Acquire) > 0);
        }
    }
}
