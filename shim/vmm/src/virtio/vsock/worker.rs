//! Runs the thread of a vsock device, which waits for kicks, for the host's ends of connections and for commands.

use super::muxer::Muxer;
use super::{VsockError, VsockMetrics};
use crate::virtio::{DeviceKind, Ring, StartError};
use nacelle_base::guest_error;
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
const NOT_A_CONNECTION: u64 = (u32::MAX as u64) << 32;
const WAKE: u64 = NOT_A_CONNECTION | u32::MAX as u64;

/// A command for the thread.
pub(super) enum VsockCommand {
    Start(Ring, SyncSender<Result<(), StartError>>),
    Stop(u16, SyncSender<Option<QueueState>>),
    ResetDriver(SyncSender<()>),
    ResetTransport,
    Restore,
    Connect { port: u32, id: u64, reply: SyncSender<Result<UnixStream, VsockError>> },
    CancelConnect(u64),
    Listen { port: u32, incoming: SyncSender<UnixStream>, reply: SyncSender<bool> },
    StopListening(u32),
    Quit,
}

/// The channel to the thread. Dropping the last reference ends the thread.
#[derive(Debug)]
pub(super) struct VsockThread {
    commands: Sender<VsockCommand>,
    wake: Arc<EventFd>,
}

impl VsockThread {
    /// Starts the thread.
    pub(super) fn start(guest_cid: u32, metrics: Arc<VsockMetrics>) -> io::Result<VsockThread> {
        let epoll = Arc::new(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?);
        let wake = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?);
        epoll.add(&*wake, EpollEvent::new(EpollFlags::EPOLLIN, WAKE))?;
        let (commands, inbox) = channel();
        let muxer = Muxer::new(guest_cid, epoll.clone(), metrics);
        let worker = VsockWorker { muxer, epoll, wake: wake.clone(), inbox };
        nacelle_jail::spawn(ThreadKind::Vsock, Builder::new().name("vsock".to_owned()), move || worker.run())?;
        Ok(VsockThread { commands, wake })
    }

    /// Sends a command to the thread. Fails if the thread has ended.
    pub(super) fn send(&self, command: VsockCommand) -> Result<(), VsockError> {
        self.commands.send(command).map_err(|_thread_ended| VsockError::Stopped)?;
        self.wake.write(1).map(drop).map_err(|error| VsockError::Resources { source: error.into() })
    }
}

impl Drop for VsockThread {
    fn drop(&mut self) {
        // Fails only if the thread has ended before.
        let _ = self.send(VsockCommand::Quit);
    }
}

struct VsockWorker {
    muxer: Muxer,
    epoll: Arc<Epoll>,
    wake: Arc<EventFd>,
    inbox: Receiver<VsockCommand>,
}

impl VsockWorker {
    fn run(mut self) {
        let mut events = [EpollEvent::empty(); 64];
        let mut more = false;
        loop {
            let limit = if more { EpollTimeout::ZERO } else { EpollTimeout::NONE };
            let count = match retry_interrupted(|| self.epoll.wait(&mut events, limit)) {
                Ok(count) => count,
                Err(error) => {
                    guest_error!("a vsock device cannot wait: {error}");
                    return;
                }
            };
            for event in events.iter().take(count) {
                match event.data() {
                    WAKE => {
                        let _ = self.wake.read(); // it may have been read already
                    }
                    token if token & NOT_A_CONNECTION == NOT_A_CONNECTION => self.muxer.handle_kick(token as u16), // the number of a queue
                    token => self.muxer.handle_socket_event(token, event.events()),
                }
            }
            while let Ok(command) = self.inbox.try_recv() {
                if matches!(command, VsockCommand::Quit) {
                    return;
                }
                self.execute(command);
            }
            more = self.muxer.run();
        }
    }

    fn execute(&mut self, command: VsockCommand) {
        // The requester may have stopped waiting; then the answer is dropped.
        match command {
            VsockCommand::Start(ring, reply) => drop(reply.send(self.start(ring))),
            VsockCommand::Stop(index, reply) => drop(reply.send(self.stop(index))),
            VsockCommand::ResetDriver(reply) => {
                self.muxer.handle_driver_reset();
                let _ = reply.send(());
            }
            VsockCommand::ResetTransport => self.muxer.reset_transport(),
            VsockCommand::Restore => self.muxer.handle_restore(),
            VsockCommand::Connect { port, id, reply } => self.muxer.connect(port, id, reply),
            VsockCommand::CancelConnect(id) => self.muxer.cancel_connect(id),
            VsockCommand::Listen { port, incoming, reply } => drop(reply.send(self.muxer.listen(port, incoming))),
            VsockCommand::StopListening(port) => self.muxer.unlisten(port),
            VsockCommand::Quit => {}
        }
    }

    fn start(&mut self, ring: Ring) -> Result<(), StartError> {
        let (device, index) = (DeviceKind::Vsock, ring.index());
        let slot = self.muxer.ring(index).ok_or(StartError::NoSuchQueue { device, index })?;
        if slot.is_some() {
            return Err(StartError::Running { device, index });
        }
        self.epoll
            .add(&ring, EpollEvent::new(EpollFlags::EPOLLIN, NOT_A_CONNECTION | u64::from(index)))
            .map_err(|error| StartError::Thread { device, index, source: error.into() })?;
        *slot = Some(ring);
        Ok(())
    }

    fn stop(&mut self, index: u16) -> Option<QueueState> {
        let ring = self.muxer.ring(index)?.take()?;
        let _ = self.epoll.delete(&ring); // a broken ring is no longer registered
        Some(ring.into_state())
    }
}
