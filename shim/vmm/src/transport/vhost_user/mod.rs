//! Owns: the vhost-user server: one device behind one unix socket, driven by another process (the front end).
//! May use: the [`Device`] trait.
//! Threads: one per server; it reads the front end's messages and starts and stops the device's queues.

use crate::virtio::Device;
use nacelle_base::{Classify, Kind};
use std::os::unix::net::UnixListener;

/// A vhost-user server could not be started.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The thread or its wake-up could not be made.
    #[error("cannot start the vhost-user server of a {device} device")]
    Start {
        /// The device that was to be served.
        device: crate::DeviceKind,
        /// Why not.
        source: std::io::Error,
    },
}

impl Classify for ServeError {
    fn kind(&self) -> Kind {
        match self {
            ServeError::Start { .. } => Kind::Exhausted,
        }
    }
}

/// A running vhost-user server. Dropping it stops it.
#[derive(Debug)]
pub struct Server {}

impl Server {
    /// Ends the connection, stops the device's queues and joins the thread.
    pub fn stop(self) {}
}

/// Serves `device` to one front end at a time on `listener`. After a front end has gone (or was sent away
/// because of a message that makes no sense), the device is reset and the next one is accepted.
pub fn serve(device: Box<dyn Device>, listener: UnixListener) -> Result<Server, ServeError> {
    let _ = (device, listener);
    Ok(Server {})
}
