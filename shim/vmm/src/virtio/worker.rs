//! Runs one thread that serves all queues of a small device. The thread exists while a queue is served.

use super::ring::{Request, Ring};
use super::{DeviceKind, Interrupt, Memory, StartError};
use nacelle_base::guest_error;
use nacelle_base::retry;
use nacelle_jail::ThreadKind;
use nix::poll::{PollFd, PollFlags};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::io;
use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, Sender, SyncSender, TryRecvError, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use virtio_queue::QueueState;

/// The number of requests of one queue that are served before the other queues get their turn.
const BATCH: usize = 64;

/// The queues of a device, served by a thread that runs while at least one of them is started.
#[derive(Debug)]
pub(crate) struct ServedQueues {
    device: DeviceKind,
    count: u16,
    running: u32,
    worker: Option<QueueWorker>,
    notifier: Arc<DeviceNotifier>,
}

/// The channel from a device's handle to its guest and its thread, while a queue is served.
#[derive(Default)]
pub(crate) struct DeviceNotifier(Mutex<Option<(Arc<dyn Interrupt>, WakeEvent)>>);

impl DeviceNotifier {
    /// Makes the thread retry requests that it could not serve before.
    pub fn wake_thread(&self) {
        if let Some((_, wake)) = &*self.lock() {
            wake.signal();
        }
    }

    /// Notifies the guest that the configuration space has changed.
    pub fn notify_config(&self) {
        let interrupt = self.lock().as_ref().map(|(interrupt, _)| interrupt.clone());
        if let Some(interrupt) = interrupt {
            interrupt.notify_config();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<(Arc<dyn Interrupt>, WakeEvent)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for DeviceNotifier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceNotifier").field("open", &self.lock().is_some()).finish()
    }
}

/// The thread and the channel to it.
#[derive(Debug)]
struct QueueWorker {
    commands: Option<Sender<QueueCommand>>,
    wake: WakeEvent,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
enum QueueCommand {
    Add(Ring),
    Remove(u16, SyncSender<Option<QueueState>>),
}

/// Wakes the thread.
#[derive(Clone, Debug)]
struct WakeEvent(Arc<EventFd>);

impl WakeEvent {
    fn signal(&self) {
        if let Err(error) = self.0.write(1) {
            guest_error!("cannot wake a queue's thread: {error}");
        }
    }

    fn clear(&self) {
        // Fails if the eventfd was not written.
        let _ = self.0.read();
    }
}

impl ServedQueues {
    /// Creates the value, with no queue started, for a device with queues of these sizes (at most 32). `notifier` is open while a
    /// queue is served.
    pub fn new(device: DeviceKind, queue_sizes: &[u16], notifier: Arc<DeviceNotifier>) -> ServedQueues {
        ServedQueues { device, count: queue_sizes.len() as u16, running: 0, worker: None, notifier }
    }

    /// Serves one more queue: `handle` is called with the queue's number for each request. It returns the number of bytes
    /// written to the guest, or `None` if the request must wait: then it is the queue's next request after a kick or a wake-up.
    /// The `handle` of the queue that was started first serves all of them.
    pub fn start(
        &mut self,
        ring: Ring,
        handle: impl FnMut(u16, &Memory, Request) -> Option<u32> + Send + 'static,
    ) -> Result<(), StartError> {
        let interrupt = ring.interrupt().clone();
        let (device, index) = (self.device, ring.index());
        if index >= self.count {
            return Err(StartError::NoSuchQueue { device, index });
        }
        if self.running & 1 << index != 0 {
            return Err(StartError::Running { device, index });
        }
        let worker = match &mut self.worker {
            Some(worker) => worker,
            none => {
                let worker = QueueWorker::start(&device.to_string(), handle);
                none.insert(worker.map_err(|source| StartError::Thread { device, index, source })?)
            }
        };
        self.running |= 1 << index;
        worker.send(QueueCommand::Add(ring));
        *self.notifier.lock() = Some((interrupt, worker.wake.clone()));
        Ok(())
    }

    /// Stops a queue and returns its state, or `None` if it was not running. Afterwards none of its requests is in flight.
    pub fn stop(&mut self, index: u16) -> Option<QueueState> {
        if index >= self.count || self.running & 1 << index == 0 {
            return None;
        }
        self.running &= !(1 << index);
        let (state_sender, state) = sync_channel(1);
        self.worker.as_ref()?.send(QueueCommand::Remove(index, state_sender));
        // An error means that the thread has panicked, which `send` has logged.
        let state = state.recv().ok().flatten();
        if self.running == 0 {
            self.worker = None;
            *self.notifier.lock() = None;
        }
        state
    }

    /// Stops all queues.
    pub fn reset(&mut self) {
        (0..self.count).for_each(|index| _ = self.stop(index));
    }
}

impl QueueWorker {
    fn start(
        name: &str,
        handle: impl FnMut(u16, &Memory, Request) -> Option<u32> + Send + 'static,
    ) -> io::Result<QueueWorker> {
        let wake = WakeEvent(Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?));
        let (commands, inbox) = channel();
        let thread_wake = wake.clone();
        let thread = nacelle_jail::spawn(ThreadKind::Queue, Builder::new().name(name.to_owned()), move || {
            run(&inbox, &thread_wake, handle)
        })?;
        Ok(QueueWorker { commands: Some(commands), wake, thread: Some(thread) })
    }

    fn send(&self, command: QueueCommand) {
        let sent = self.commands.as_ref().map(|commands| commands.send(command));
        if !matches!(sent, Some(Ok(()))) {
            guest_error!("a queue's thread has panicked");
        }
        self.wake.signal();
    }
}

impl Drop for QueueWorker {
    fn drop(&mut self) {
        self.commands = None;
        self.wake.signal();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            guest_error!("a queue's thread has panicked");
        }
    }
}

fn run(inbox: &Receiver<QueueCommand>, wake: &WakeEvent, mut handle: impl FnMut(u16, &Memory, Request) -> Option<u32>) {
    let mut rings: Vec<Ring> = Vec::new();
    loop {
        wake.clear();
        loop {
            match inbox.try_recv() {
                Ok(QueueCommand::Add(ring)) => rings.push(ring),
                Ok(QueueCommand::Remove(index, state_sender)) => {
                    let at = rings.iter().position(|ring| ring.index() == index);
                    let ring = at.map(|at| rings.swap_remove(at));
                    // If the caller no longer waits, the state is not needed.
                    let _ = state_sender.send(ring.map(Ring::into_state));
                }
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return,
            }
        }
        let mut more = false;
        for ring in &mut rings {
            more |= serve(ring, &mut handle);
        }
        if !more {
            wait(&mut rings, wake);
        }
    }
}

/// Serves a batch of requests. Returns `true` if there are more; otherwise the guest kicks for later ones.
fn serve(ring: &mut Ring, handle: &mut impl FnMut(u16, &Memory, Request) -> Option<u32>) -> bool {
    let memory = ring.memory().clone();
    ring.disable_kicks();
    for _ in 0..BATCH {
        let Some(request) = ring.pop() else { return ring.enable_kicks() };
        let head = request.head;
        let Some(written) = handle(ring.index(), &memory, request) else {
            ring.undo_pop();
            ring.enable_kicks();
            return false;
        };
        ring.complete(head, written);
        ring.notify_guest();
    }
    ring.enable_kicks()
}

/// Waits for a kick of a ring that is not broken, or a wake-up.
fn wait(rings: &mut [Ring], wake: &WakeEvent) {
    let watched = rings.iter().filter(|ring| !ring.is_broken());
    let kicks = watched.map(|ring| PollFd::new(ring.as_fd(), PollFlags::POLLIN));
    let mut events: Vec<PollFd<'_>> =
        std::iter::once(PollFd::new(wake.0.as_fd(), PollFlags::POLLIN)).chain(kicks).collect();
    let found = retry::poll(&mut events, None);
    let kicked: Vec<bool> = events.iter().skip(1).map(|event| found.is_ok() && event.any().unwrap_or(true)).collect();
    let watched = rings.iter_mut().filter(|ring| !ring.is_broken());
    watched.zip(kicked).filter(|(_, kicked)| *kicked).for_each(|(ring, _)| ring.clear_kick());
}
