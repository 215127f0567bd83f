//! Defines the error of a request to the zygote.

use nacelle_base::{Classify, FailureKind};
use std::io;

use super::message::{Refusal, RefusalKind};
use crate::frame;

/// Reasons the zygote made no process.
#[derive(Debug, thiserror::Error)]
pub enum ZygoteError {
    /// The connection to the zygote or its child failed.
    #[error("the connection to the zygote failed")]
    Talk {
        /// The system call's error.
        source: io::Error,
    },
    /// A frame was invalid or too late.
    #[error("cannot get the zygote's answer")]
    Frame {
        /// The frame's error.
        #[from]
        source: frame::AgentFrameError,
    },
    /// A message is not the expected JSON.
    #[error("cannot write or read a message of the zygote")]
    Json {
        /// The parser's error.
        #[from]
        source: serde_json::Error,
    },
    /// The child refused the request. Its reason says which step failed.
    #[error(transparent)]
    Refused {
        /// The child's reason.
        #[from]
        source: Refusal,
    },
}

impl Classify for ZygoteError {
    fn kind(&self) -> FailureKind {
        match self {
            ZygoteError::Talk { source } if source.kind() == io::ErrorKind::TimedOut => FailureKind::Timeout,
            ZygoteError::Talk { .. } => FailureKind::Unavailable,
            ZygoteError::Frame { source } if source.is_hung_up() => FailureKind::Unavailable,
            ZygoteError::Frame { source: frame::AgentFrameError::TooLong { .. } } => FailureKind::Invalid,
            ZygoteError::Frame { .. } => FailureKind::Timeout,
            ZygoteError::Json { .. } => FailureKind::Internal,
            ZygoteError::Refused { source } => match source.kind {
                RefusalKind::NoSuchProgram => FailureKind::NotFound,
                RefusalKind::Unusable => FailureKind::Invalid,
                RefusalKind::Internal => FailureKind::Internal,
                RefusalKind::Exhausted => FailureKind::Exhausted,
            },
        }
    }
}
