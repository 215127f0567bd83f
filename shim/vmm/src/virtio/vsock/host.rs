//! Owns: the host's handle to a vsock device.

use super::VsockError;
use crate::Device;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// A vsock device. Clones are handles to the same device; its thread ends with the last of them, its
/// listeners and its [`device`](Vsock::device).
#[derive(Clone, Debug)]
pub struct Vsock {}

impl Vsock {
    /// A device for the guest with context id `guest_cid` (3 or more).
    pub fn new(guest_cid: u32) -> Result<Vsock, VsockError> {
        let _ = guest_cid;
        unimplemented!()
    }

    /// Connects to `port` in the guest and waits at most `limit` for its answer; blocks the calling thread.
    /// Before the guest's driver is up the request waits. The stream is one end of a socket pair, in blocking
    /// mode; `shutdown` and closing mean what they mean for a socket.
    pub fn connect(&self, port: u32, limit: Duration) -> Result<UnixStream, VsockError> {
        let _ = (port, limit);
        unimplemented!()
    }

    /// Takes connections that the guest makes to `port` of the host, until the listener is dropped.
    pub fn listen(&self, port: u32) -> Result<Listener, VsockError> {
        let _ = port;
        unimplemented!()
    }

    /// The device for a transport. Meant to be called once.
    pub fn device(&self) -> Box<dyn Device> {
        unimplemented!()
    }
}

/// A port of the host on which the guest may connect.
#[derive(Debug)]
pub struct Listener {}

impl Listener {
    /// The next connection; waits at most `limit`, blocking the calling thread.
    pub fn accept(&self, limit: Duration) -> Result<UnixStream, VsockError> {
        let _ = limit;
        unimplemented!()
    }

    /// The port.
    pub fn port(&self) -> u32 {
        unimplemented!()
    }
}
