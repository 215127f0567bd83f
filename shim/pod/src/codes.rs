//! Owns: the one place where kinds of failure become gRPC statuses and back.

use nacelle_base::{Chain, Classify, Kind};
use std::error::Error;

/// The status for an error: its kind's code, and the error with its causes on one line.
pub fn status<E: Error + Classify>(error: &E) -> tonic::Status {
    refuse(error.kind(), Chain(error).to_string())
}

/// The status for a refusal without an error type behind it.
pub fn refuse(kind: Kind, message: impl Into<String>) -> tonic::Status {
    tonic::Status::new(tonic::Code::from_i32(kind.grpc_code()), message)
}

/// What a status means.
pub fn kind(status: &tonic::Status) -> Kind {
    // tonic's own deadline answers with Cancelled.
    match status.code() {
        tonic::Code::Cancelled => Kind::Timeout,
        code => Kind::from_grpc_code(code.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_survives_the_wire() {
        for each in Kind::ALL {
            assert_eq!(kind(&refuse(each, "x")), each);
        }
        assert_eq!(kind(&tonic::Status::cancelled("Timeout expired")), Kind::Timeout);
    }
}
