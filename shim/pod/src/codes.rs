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
    match status.code() {
        // tonic's own deadline answers with Cancelled.
        tonic::Code::Cancelled => Kind::Timeout,
        // Our servers send it never; tonic does, when the connection ends before the answer.
        tonic::Code::Unknown => Kind::Unavailable,
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
        assert_eq!(kind(&tonic::Status::unknown("transport error")), Kind::Unavailable);
    }
}
