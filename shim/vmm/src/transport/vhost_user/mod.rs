//! Implements the vhost-user server: one device behind one unix socket, driven by another process (the front end). It uses only the
//! [`Device`] trait. Each server has one thread, which reads the front end's messages and starts and stops the device's queues.

mod interrupt;
mod memory;
mod session;
mod wire;

#[cfg(any(test, feature = "fuzz"))]
pub(crate) mod harness;

use crate::virtio::{Device, DeviceKind, Memory};
use nacelle_base::retry;
use nacelle_base::{Chain, Classify, FailureKind};
use nacelle_base::{guest_error, guest_warn};
use nacelle_jail::ThreadKind;
use nix::poll::{PollFd, PollFlags};
use nix::sys::eventfd::{EfdFlags, EventFd};
use session::VhostUserSession;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// The time after which a front end that does not read a reply is disconnected.
const WRITE_LIMIT: Duration = Duration::from_secs(10);

/// A vhost-user server could not be started.
#[derive(Debug, thiserror::Error)]
pub enum VhostUserServerError {
    /// The thread or its eventfd could not be created.
    #[error("cannot start the vhost-user server of a {device} device")]
    Start {
        /// The kind of the device.
        device: DeviceKind,
        /// The cause.
        source: io::Error,
    },
}

impl Classify for VhostUserServerError {
    fn kind(&self) -> FailureKind {
        match self {
            VhostUserServerError::Start { .. } => FailureKind::Exhausted,
        }
    }
}

/// The memory of the current front end, if any.
type CurrentMemory = Arc<Mutex<Weak<Memory>>>;

/// A running vhost-user server. Dropping it stops it.
#[derive(Debug)]
pub struct VhostUserServer {
    stop: Arc<EventFd>,
    current_memory: CurrentMemory,
    thread: Option<JoinHandle<()>>,
}

impl VhostUserServer {
    /// Returns the guest's memory, if a front end has shared it. The caller must not keep the reference: it keeps the memory mapped.
    pub fn memory(&self) -> Option<Arc<Memory>> {
        self.current_memory.lock().unwrap_or_else(PoisonError::into_inner).upgrade()
    }

    /// Closes the connection, stops the device's queues and joins the thread.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for VhostUserServer {
    fn drop(&mut self) {
        if let Err(error) = self.stop.write(1) {
            guest_error!("cannot wake a vhost-user server: {error}");
        }
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            guest_error!("BUG: a vhost-user server has panicked");
        }
    }
}

/// Serves `device` to one front end at a time on `listener`. When a front end disconnects, or is disconnected because of an
/// invalid message, the device is reset and the next connection is accepted.
pub fn serve(device: Box<dyn Device>, listener: UnixListener) -> Result<VhostUserServer, VhostUserServerError> {
    let kind = device.kind();
    let start = |source| VhostUserServerError::Start { device: kind, source };
    listener.set_nonblocking(true).map_err(start)?;
    let stop =
        EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK).map_err(|error| start(error.into()))?;
    let stop = Arc::new(stop);
    let current_memory = CurrentMemory::default();
    let (thread_stop, thread_memory) = (stop.clone(), current_memory.clone());
    let thread = nacelle_jail::spawn(ThreadKind::VhostUser, Builder::new().name(format!("vhost-{kind}")), move || {
        serve_front_ends(device, &listener, &thread_stop, &thread_memory);
    })
    .map_err(start)?;
    Ok(VhostUserServer { stop, current_memory, thread: Some(thread) })
}

fn serve_front_ends(
    mut device: Box<dyn Device>,
    listener: &UnixListener,
    stop: &EventFd,
    current_memory: &CurrentMemory,
) {
    while wait_readable(listener, stop) {
        match listener.accept() {
            Ok((stream, _)) => {
                if let Err(error) = serve_front_end(device.as_mut(), stream, stop, current_memory) {
                    guest_warn!(device = %device.kind(), "disconnected a vhost-user front end: {}", Chain(&error));
                }
                device.reset();
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                guest_warn!(device = %device.kind(), "cannot accept a connection of a vhost-user front end: {error}");
                // Most likely no descriptor is free: retries a little later, unless the server is stopped.
                let later = Instant::now() + Duration::from_millis(100);
                let stopped = retry::poll(&mut [PollFd::new(stop.as_fd(), PollFlags::POLLIN)], Some(later));
                if stopped.is_ok_and(|events| events > 0) {
                    return;
                }
            }
        }
    }
}

fn serve_front_end(
    device: &mut dyn Device,
    stream: UnixStream,
    stop: &EventFd,
    current_memory: &CurrentMemory,
) -> Result<(), wire::VhostUserProtocolError> {
    stream.set_nonblocking(false)?;
    stream.set_write_timeout(Some(WRITE_LIMIT))?;
    let mut session = VhostUserSession::new(device);
    while let Some(message) = wire::receive(&stream, || wait_readable(&stream, stop))? {
        let header = message.header;
        let reply = session.handle(wire::parse(message)?)?;
        *current_memory.lock().unwrap_or_else(PoisonError::into_inner) = session.memory();
        wire::send_reply(&stream, header, reply, session.replies_on_request())?;
    }
    Ok(())
}

/// Waits until `fd` is readable. Returns `false` if the server is being stopped.
fn wait_readable(fd: &impl AsFd, stop: &EventFd) -> bool {
    loop {
        let mut events = [PollFd::new(stop.as_fd(), PollFlags::POLLIN), PollFd::new(fd.as_fd(), PollFlags::POLLIN)];
        if let Err(error) = retry::poll(&mut events, None) {
            guest_error!("a vhost-user server cannot wait: {error}");
            return false;
        }
        let [stopped, readable] = events.map(|event| event.any().unwrap_or(true));
        if stopped {
            return false;
        }
        if readable {
            return true;
        }
    }
}
