//! Defines the errors of the host's side of a vsock device.

use nacelle_base::{Classify, FailureKind};
use std::path::PathBuf;
use std::time::Duration;

/// A connection could not be made or accepted.
#[derive(Debug, thiserror::Error)]
pub enum VsockError {
    /// The context id is reserved: 0 to 2 or the largest.
    #[error("guest context id {cid} is invalid: it must be 3 to 4294967294")]
    Cid {
        /// The context id.
        cid: u32,
    },
    /// The device's thread or a socket pair could not be created.
    #[error("cannot create a vsock device or connection")]
    Resources {
        /// The cause.
        source: std::io::Error,
    },
    /// Another listener uses the port.
    #[error("cannot listen on vsock port {port}: it is in use")]
    PortInUse {
        /// The port on the host.
        port: u32,
    },
    /// No process in the guest listens on the port.
    #[error("the guest refused the connection to vsock port {port}")]
    Refused {
        /// The port in the guest.
        port: u32,
    },
    /// The socket that represents a port no longer exists.
    #[error("the socket {} no longer exists: the pod's run directory was removed while the pod ran; remove the pod and create it again", path.display())]
    Lost {
        /// The path of the socket.
        path: PathBuf,
    },
    /// The device has reached its maximum number of connections.
    #[error("cannot open another vsock connection: the maximum is {limit}")]
    TooMany {
        /// The maximum.
        limit: usize,
    },
    /// The guest did not answer, or did not connect, within the timeout.
    #[error("no connection over vsock port {port} within {limit:?}")]
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
    fn kind(&self) -> FailureKind {
        match self {
            VsockError::Cid { .. } => FailureKind::Invalid,
            VsockError::Resources { .. } | VsockError::TooMany { .. } => FailureKind::Exhausted,
            VsockError::PortInUse { .. } => FailureKind::AlreadyExists,
            VsockError::Refused { .. } | VsockError::Lost { .. } | VsockError::Stopped => FailureKind::Unavailable,
            VsockError::Timeout { .. } => FailureKind::Timeout,
        }
    }
}
