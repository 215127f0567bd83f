//! Defines the error of a socket volume.

use nacelle_base::sockets::MAX_SOCKETS;
use nacelle_base::{Classify, FailureKind};
use std::io;

/// Reasons creating, changing or removing a socket volume fails.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the fields are what the message prints")]
pub enum SocketVolumeError {
    #[error(
        "invalid volume name {name:?}: 1 to 128 letters, digits, '_', '-' and '.' are allowed, not starting with '.'"
    )]
    Name { name: String },
    #[error(
        "invalid socket volume: a token, and a socket or a directory with at most {MAX_SOCKETS} sockets are expected"
    )]
    Content,
    #[error("cannot {what} the socket volume {name}")]
    Io { what: &'static str, name: String, source: io::Error },
}

impl Classify for SocketVolumeError {
    fn kind(&self) -> FailureKind {
        match self {
            SocketVolumeError::Name { .. } | SocketVolumeError::Content => FailureKind::Invalid,
            SocketVolumeError::Io { source, .. } => match FailureKind::from(source.kind()) {
                FailureKind::Exhausted => FailureKind::Exhausted,
                _ => FailureKind::Internal,
            },
        }
    }
}
