//! Owns: what can go wrong for the host's side of a vsock device.

use nacelle_base::{Classify, Kind};
use std::path::PathBuf;
use std::time::Duration;

/// A connection could not be made or taken.
#[derive(Debug, thiserror::Error)]
pub enum VsockError {
    /// Context ids 0 to 2 and the largest are taken.
    #[error("{cid} cannot be the context id of a guest")]
    Cid {
        /// The one given.
        cid: u32,
    },
    /// The device's thread or a socket pair could not be made.
    #[error("cannot make a vsock device or connection")]
    Resources {
        /// Why not.
        source: std::io::Error,
    },
    /// Somebody listens there.
    #[error("somebody listens on vsock port {port} already")]
    PortInUse {
        /// The port on the host.
        port: u32,
    },
    /// The guest answered that nobody listens.
    #[error("the guest refuses connections to vsock port {port}")]
    Refused {
        /// The port in the guest.
        port: u32,
    },
    /// The socket that stands for a port is not there any more.
    #[error("the socket {} is gone: the pod's run directory was removed while the pod ran; remove the pod and make it again", path.display())]
    Lost {
        /// The socket.
        path: PathBuf,
    },
    /// The device has as many connections as it may.
    #[error("no more than {limit} vsock connections at a time")]
    TooMany {
        /// The limit.
        limit: usize,
    },
    /// The guest did not answer, or nobody connected, within the time allowed.
    #[error("nothing came over vsock port {port} for {limit:?}")]
    Timeout {
        /// The port: in the guest for `connect`, on the host for `accept`.
        port: u32,
        /// The time allowed.
        limit: Duration,
    },
    /// The device is gone.
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
