//! Defines the kinds of failure ([`FailureKind`], [`Classify`]) and prints an error with its causes on one line ([`Chain`]).

use std::error::Error;
use std::fmt;

/// What a failure means to the caller. Each error type maps itself to one of these. The servers choose gRPC codes by the
/// kind; no code parses an error's text to decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FailureKind {
    /// The object that the request names does not exist.
    NotFound,
    /// The request is invalid; a retry does not help.
    Invalid,
    /// An object of that name exists already.
    AlreadyExists,
    /// The request is valid, but not allowed in the present state.
    Conflict,
    /// A limit is reached: disk, memory, slots, connections.
    Exhausted,
    /// A component that the request needs is unavailable at the moment; a retry may help.
    Unavailable,
    /// The deadline has passed.
    Timeout,
    /// Nacelle does not implement this.
    Unsupported,
    /// The given credentials do not permit this.
    Denied,
    /// Any other failure: a BUG of Nacelle or a fault of the node.
    Internal,
}

impl FailureKind {
    /// All kinds, for tables and tests.
    pub const ALL: [FailureKind; 10] = [
        FailureKind::NotFound,
        FailureKind::Invalid,
        FailureKind::AlreadyExists,
        FailureKind::Conflict,
        FailureKind::Exhausted,
        FailureKind::Unavailable,
        FailureKind::Timeout,
        FailureKind::Unsupported,
        FailureKind::Denied,
        FailureKind::Internal,
    ];

    /// Returns the gRPC status code (the number of `google.rpc.Code`) of this kind. It is a number because this crate does
    /// not depend on gRPC; `tonic::Code::from_i32` takes it.
    pub const fn grpc_code(self) -> i32 {
        match self {
            FailureKind::Invalid => 3,
            FailureKind::Timeout => 4,
            FailureKind::NotFound => 5,
            FailureKind::AlreadyExists => 6,
            FailureKind::Denied => 7,
            FailureKind::Exhausted => 8,
            FailureKind::Conflict => 9,
            FailureKind::Unsupported => 12,
            FailureKind::Internal => 13,
            FailureKind::Unavailable => 14,
        }
    }

    /// Returns the kind of a gRPC status code; codes that Nacelle never sends become `Internal`.
    pub fn from_grpc_code(code: i32) -> FailureKind {
        FailureKind::ALL.into_iter().find(|kind| kind.grpc_code() == code).unwrap_or(FailureKind::Internal)
    }
}

impl From<std::io::ErrorKind> for FailureKind {
    fn from(kind: std::io::ErrorKind) -> FailureKind {
        use std::io::ErrorKind as Io;
        match kind {
            Io::NotFound => FailureKind::NotFound,
            Io::AlreadyExists => FailureKind::AlreadyExists,
            Io::StorageFull | Io::QuotaExceeded | Io::FileTooLarge => FailureKind::Exhausted,
            // The node's files are not as the daemon needs them; the operator corrects that.
            Io::ReadOnlyFilesystem | Io::PermissionDenied | Io::NotADirectory | Io::IsADirectory => {
                FailureKind::Conflict
            }
            Io::TimedOut => FailureKind::Timeout,
            Io::ConnectionRefused | Io::ConnectionReset | Io::NotConnected | Io::BrokenPipe => FailureKind::Unavailable,
            _ => FailureKind::Internal,
        }
    }
}

/// Implemented by errors that know what they mean to the caller.
pub trait Classify {
    /// Returns the kind of this failure.
    fn kind(&self) -> FailureKind;
}

/// Prints an error and all its causes on one line: `outer: cause: cause of the cause`.
pub struct Chain<'a>(pub &'a (dyn Error + 'a));

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot open {path}")]
    struct Open {
        path: String,
        source: std::io::Error,
    }

    #[test]
    fn a_chain_prints_every_cause_once() {
        let error = Open { path: "/x".into(), source: std::io::Error::from_raw_os_error(2) };
        assert_eq!(Chain(&error).to_string(), "cannot open /x: No such file or directory (os error 2)");
    }

    #[test]
    fn grpc_codes_are_distinct_and_map_back_to_their_kinds() {
        for kind in FailureKind::ALL {
            assert_eq!(FailureKind::from_grpc_code(kind.grpc_code()), kind);
        }
        assert_eq!(FailureKind::from_grpc_code(2), FailureKind::Internal);
    }

    #[test]
    fn enospc_is_exhausted() {
        assert_eq!(FailureKind::from(std::io::Error::from_raw_os_error(28).kind()), FailureKind::Exhausted);
    }
}
