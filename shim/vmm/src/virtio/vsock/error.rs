//! Defines the errors of the host's side of a vsock device.

use nacelle_base::{Classify, Kind};
use std::path::PathBuf;
use std::time::Duration;

/// A connection could not be made or accepted.
#[derive(Debug, thiserror::Error)]
pub enum VsockError {
    /// The context id is reserved: 0 to 2 or the largest.
    #[error("{cid} cannot be the context id of a guest")]
    Cid {
        /// The context id.
        cid: u32,
    },
    /// The device's thread or a socket pair could not be created.
    #[error("cannot make a vsock device or connection")]
    Resources {
        /// The cause.
        source: std::io::Error,
    },
    /// Another listener uses the port.
    #[error("somebody listens on vsock port {port} already")]
    PortInUse {
        /// The port on the host.
        port: u32,
    },
    /// No process in the guest listens on the port.
    #[error("the guest refuses connections to vsock port {port}")]
    Refused {
        /// The port in the guest.
        port: u32,
    },
    /// The socket that represents a port no longer exists.
    #[error("the socket {} is gone: the pod's run directory was removed while the pod ran; remove the pod and make it again", path.display())]
    Lost {
        /// The path of the socket.
        path: PathBuf,
    },
    /// The device has reached its maximum number of connections.
    #[error("no more than {limit} vsock connections at a time")]
    TooMany {
        /// The maximum.
        limit: usize,
    },
    /// The guest did not answer, or did not connect, within the timeout.
    #[error("nothing came over vsock port {port} for {limit:?}")]
    Timeout {
        /// The port: in the guest for `connect`, on the host for `accept`.
        port: u32,
        /// The timeout.
        limit: Duration,
    },
    /// The device has stopped.
    #[error("the vsock device has stopped")]
    Stopped,
}

impl Classify for VsockError {
    fn kind(&self) -> Kind {
        match self {
            VsockError::Cid { .. } => Kind::Invalid,
            VsockError::Resources { .. } | VsockError::TooMany { .. } => Kind::Exhausted,
            VsockError::PortInUse { .. } => Kind::AlreadyExists,
            VsockError::Refused { .. } | VsockError::Lost { .. } | VsockError::Stopped => Kind::Unavailable,
            VsockError::Timeout { .. } => Kind::Timeout,
        }
    }
}
