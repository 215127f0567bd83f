//! Runs the thread of a vsock device, which waits for kicks, for the host's ends of connections and for commands.

use super::muxer::Muxer;
use super::{Metrics, VsockError};
use crate::virtio::{DeviceKind, Ring, StartError};
use nacelle_base::retry::retry_interrupted;
use nacelle_jail::ThreadKind;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel};
use std::thread::Builder;
use virtio_queue::QueueState;

/// The upper half of the epoll tokens of everything other than connections. No port of the host has this number.
const OURS: u64 = (u32::MAX as u64) << 32;
const WAKE: u64 = OURS | u32::MAX as u64;

/// A command for the thread.
pub(super) enum Command {
    Start(Ring, SyncSender<Result<(), StartError>>),
    Stop(u16, SyncSender<Option<QueueState>>),
    Forget(SyncSender<()>),
    ResetTransport,
    Restored,
    Connect { port: u32, id: u64, answer: SyncSender<Result<UnixStream, VsockError>> },
    GiveUp(u64),
    Listen { port: u32, incoming: SyncSender<UnixStream>, answer: SyncSender<bool> },
    Unlisten(u32),
    Quit,
}

/// The channel to the thread. Dropping the last reference ends the thread.
#[derive(Debug)]
pub(super) struct Control {
    commands: Sender<Command>,
    wake: Arc<EventFd>,
}

impl Control {
    /// Starts the thread.
    pub(super) fn start(guest_cid: u32, metrics: Arc<Metrics>) -> io::Result<Control> {
        let epoll = Arc::new(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?);
        let wake = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?);
        epoll.add(&*wake, EpollEvent::new(EpollFlags::EPOLLIN, WAKE))?;
        let (commands, inbox) = channel();
        let muxer = Muxer::new(guest_cid, epoll.clone(), metrics);
        let worker = Worker { muxer, epoll, wake: wake.clone(), inbox };
        nacelle_jail::spawn(ThreadKind::Vsock, Builder::new().name("vsock".to_owned()), move || worker.run())?;
        Ok(Control { commands, wake })
    }

    /// Sends a command to the thread. Fails if the thread has ended.
    pub(super) fn send(&self, command: Command) -> Result<(), VsockError> {
        self.commands.send(command).map_err(|_gone| VsockError::Stopped)?;
        self.wake.write(1).map(drop).map_err(|error| VsockError::Resources { source: error.into() })
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // Fails only if the thread has ended before.
        let _ = self.send(Command::Quit);
    }
}

struct Worker {
    muxer: Muxer,
    epoll: Arc<Epoll>,
    wake: Arc<EventFd>,
    inbox: Receiver<Command>,
}

impl Worker {
    fn run(mut self) {
        let mut events = [EpollEvent::empty(); 64];
        let mut more = false;
        loop {
            let limit = if more { EpollTimeout::ZERO } else { EpollTimeout::NONE };
            let count = match retry_interrupted(|| self.epoll.wait(&mut events, limit)) {
                Ok(count) => count,
                Err(error) => {
                    tracing::error!("a vsock device cannot wait: {error}");
                    return;
                }
            };
            for event in events.iter().take(count) {
                match event.data() {
                    WAKE => {
                        let _ = self.wake.read(); // it may have been read already
                    }
                    token if token & OURS == OURS => self.muxer.kicked(token as u16), // the number of a queue
                    token => self.muxer.stirred(token, event.events()),
                }
            }
            while let Ok(command) = self.inbox.try_recv() {
                if matches!(command, Command::Quit) {
                    return;
                }
                self.obey(command);
            }
            more = self.muxer.run();
        }
    }

    fn obey(&mut self, command: Command) {
        // The requester may have stopped waiting; then the answer is dropped.
        match command {
            Command::Start(ring, answer) => drop(answer.send(self.start(ring))),
            Command::Stop(index, answer) => drop(answer.send(self.stop(index))),
            Command::Forget(answer) => {
                self.muxer.forget();
                let _ = answer.send(());
            }
            Command::ResetTransport => self.muxer.reset_transport(),
            Command::Restored => self.muxer.restored(),
            Command::Connect { port, id, answer } => self.muxer.connect(port, id, answer),
            Command::GiveUp(id) => self.muxer.give_up(id),
            Command::Listen { port, incoming, answer } => drop(answer.send(self.muxer.listen(port, incoming))),
            Command::Unlisten(port) => self.muxer.unlisten(port),
            Command::Quit => {}
        }
    }

    fn start(&mut self, ring: Ring) -> Result<(), StartError> {
        let (device, index) = (DeviceKind::Vsock, ring.index());
        let place = self.muxer.ring(index).ok_or(StartError::NoSuchQueue { device, index })?;
        if place.is_some() {
            return Err(StartError::Running { device, index });
        }
        self.epoll
            .add(&ring, EpollEvent::new(EpollFlags::EPOLLIN, OURS | u64::from(index)))
            .map_err(|error| StartError::Thread { device, index, source: error.into() })?;
        *place = Some(ring);
        Ok(())
    }

    fn stop(&mut self, index: u16) -> Option<QueueState> {
        let ring = self.muxer.ring(index)?.take()?;
        let _ = self.epoll.delete(&ring); // a broken ring is no longer registered
        Some(ring.into_state())
    }
}
