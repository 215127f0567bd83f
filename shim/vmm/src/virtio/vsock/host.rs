//! Owns: the host's handle to a vsock device.

use super::device::VsockDevice;
use super::worker::{Command, Control};
use super::{BACKLOG, HOST_CID, Metrics, VsockError};
use crate::virtio::Device;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

/// A vsock device. Clones are handles to the same device; its thread ends with the last of them, its
/// listeners and its [`device`](Vsock::device).
#[derive(Clone, Debug)]
pub struct Vsock {
    guest_cid: u32,
    control: Arc<Control>,
    metrics: Arc<Metrics>,
    next_id: Arc<AtomicU64>,
}

impl Vsock {
    /// A device for the guest with context id `guest_cid` (3 or more).
    pub fn new(guest_cid: u32) -> Result<Vsock, VsockError> {
        if u64::from(guest_cid) <= HOST_CID || guest_cid == u32::MAX {
            return Err(VsockError::Cid { cid: guest_cid });
        }
        let metrics = Arc::<Metrics>::default();
        let control = Control::start(guest_cid, metrics.clone()).map_err(|source| VsockError::Resources { source })?;
        Ok(Vsock { guest_cid, control: Arc::new(control), metrics, next_id: Arc::default() })
    }

    /// Connects to `port` in the guest and waits at most `limit` for its answer; blocks the calling thread.
    /// Before the guest's driver is up the request waits. The stream is one end of a socket pair, in blocking
    /// mode; `shutdown` and closing mean what they mean for a socket.
    pub fn connect(&self, port: u32, limit: Duration) -> Result<UnixStream, VsockError> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (answer, result) = sync_channel(1);
        self.control.send(Command::Connect { port, id, answer })?;
        match result.recv_timeout(limit) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => {
                self.control.send(Command::GiveUp(id))?;
                Err(VsockError::Timeout { port, limit })
            }
            // Dropped without an answer: the transport was reset or the device has gone.
            Err(RecvTimeoutError::Disconnected) => Err(VsockError::Stopped),
        }
    }

    /// Takes connections that the guest makes to `port` of the host, until the listener is dropped.
    pub fn listen(&self, port: u32) -> Result<Listener, VsockError> {
        let (incoming, connections) = sync_channel(BACKLOG);
        let (answer, result) = sync_channel(1);
        self.control.send(Command::Listen { port, incoming, answer })?;
        match result.recv() {
            Ok(true) => Ok(Listener { port, connections, control: self.control.clone() }),
            Ok(false) => Err(VsockError::PortInUse { port }),
            Err(_gone) => Err(VsockError::Stopped),
        }
    }

    /// Drops all connections and tells the guest so (as after a snapshot is restored); it keeps its listeners.
    /// Whoever waits in [`connect`](Vsock::connect) gets [`VsockError::Stopped`].
    pub fn reset_transport(&self) -> Result<(), VsockError> {
        self.control.send(Command::ResetTransport)
    }

    /// The context id of the guest.
    pub fn guest_cid(&self) -> u32 {
        self.guest_cid
    }

    /// What it has done.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// The device for a transport. Meant to be called once.
    pub fn device(&self) -> Box<dyn Device> {
        Box::new(VsockDevice::new(self.guest_cid, self.control.clone()))
    }
}

/// A port of the host on which the guest may connect.
#[derive(Debug)]
pub struct Listener {
    port: u32,
    connections: Receiver<UnixStream>,
    control: Arc<Control>,
}

impl Listener {
    /// The next connection; waits at most `limit`, blocking the calling thread.
    pub fn accept(&self, limit: Duration) -> Result<UnixStream, VsockError> {
        self.connections.recv_timeout(limit).map_err(|error| match error {
            RecvTimeoutError::Timeout => VsockError::Timeout { port: self.port, limit },
            RecvTimeoutError::Disconnected => VsockError::Stopped,
        })
    }

    /// The port.
    pub fn port(&self) -> u32 {
        self.port
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // An error means that the device has gone before.
        let _ = self.control.send(Command::Unlisten(self.port));
    }
}
