//! Defines the host's handle to a vsock device.

use super::device::VsockDevice;
use super::worker::{VsockCommand, VsockThread};
use super::{BACKLOG, HOST_CID, VsockError, VsockMetrics};
use crate::virtio::Device;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

/// A vsock device. Clones are handles to the same device. Its thread ends when the last of the handles, listeners and the
/// [`device`](Vsock::device) is dropped.
#[derive(Clone, Debug)]
pub struct Vsock {
    guest_cid: u32,
    thread: Arc<VsockThread>,
    metrics: Arc<VsockMetrics>,
    next_id: Arc<AtomicU64>,
}

impl Vsock {
    /// Creates a device for the guest with context id `guest_cid` (3 or more).
    pub fn new(guest_cid: u32) -> Result<Vsock, VsockError> {
        if u64::from(guest_cid) <= HOST_CID || guest_cid == u32::MAX {
            return Err(VsockError::Cid { cid: guest_cid });
        }
        let metrics = Arc::<VsockMetrics>::default();
        let thread =
            VsockThread::start(guest_cid, metrics.clone()).map_err(|source| VsockError::Resources { source })?;
        Ok(Vsock { guest_cid, thread: Arc::new(thread), metrics, next_id: Arc::default() })
    }

    /// Connects to `port` in the guest. Blocks the calling thread for at most `limit`, also while the guest's driver is not initialized
    /// yet. The stream is one end of a socket pair, in blocking mode; `shutdown` and closing have the usual meaning for sockets.
    pub fn connect(&self, port: u32, limit: Duration) -> Result<UnixStream, VsockError> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (reply, result) = sync_channel(1);
        self.thread.send(VsockCommand::Connect { port, id, reply })?;
        match result.recv_timeout(limit) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => {
                self.thread.send(VsockCommand::CancelConnect(id))?;
                Err(VsockError::Timeout { port, limit })
            }
            // The request was dropped without an answer: the transport was reset or the device has stopped.
            Err(RecvTimeoutError::Disconnected) => Err(VsockError::Stopped),
        }
    }

    /// Accepts connections of the guest to `port` of the host until the listener is dropped.
    pub fn listen(&self, port: u32) -> Result<VsockListener, VsockError> {
        let (incoming, connections) = sync_channel(BACKLOG);
        let (reply, result) = sync_channel(1);
        self.thread.send(VsockCommand::Listen { port, incoming, reply })?;
        match result.recv() {
            Ok(true) => Ok(VsockListener { port, connections, thread: self.thread.clone() }),
            Ok(false) => Err(VsockError::PortInUse { port }),
            Err(_thread_ended) => Err(VsockError::Stopped),
        }
    }

    /// Closes all connections and notifies the guest of that (as after the restore of a snapshot). Listeners stay. Callers that
    /// wait in [`connect`](Vsock::connect) get [`VsockError::Stopped`].
    pub fn reset_transport(&self) -> Result<(), VsockError> {
        self.thread.send(VsockCommand::ResetTransport)
    }

    /// Returns the context id of the guest.
    pub fn guest_cid(&self) -> u32 {
        self.guest_cid
    }

    /// Returns the counters.
    pub fn metrics(&self) -> &VsockMetrics {
        &self.metrics
    }

    /// Returns the device for a transport. Call it once.
    pub fn device(&self) -> Box<dyn Device> {
        Box::new(VsockDevice::new(self.guest_cid, self.thread.clone()))
    }
}

/// A port of the host to which the guest may connect.
#[derive(Debug)]
pub struct VsockListener {
    port: u32,
    connections: Receiver<UnixStream>,
    thread: Arc<VsockThread>,
}

impl VsockListener {
    /// Returns the next connection. Blocks the calling thread for at most `limit`.
    pub fn accept(&self, limit: Duration) -> Result<UnixStream, VsockError> {
        self.connections.recv_timeout(limit).map_err(|error| match error {
            RecvTimeoutError::Timeout => VsockError::Timeout { port: self.port, limit },
            RecvTimeoutError::Disconnected => VsockError::Stopped,
        })
    }

    /// Returns the port.
    pub fn port(&self) -> u32 {
        self.port
    }
}

impl Drop for VsockListener {
    fn drop(&mut self) {
        // Fails only if the device has stopped before.
        let _ = self.thread.send(VsockCommand::StopListening(self.port));
    }
}
