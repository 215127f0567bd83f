//! Converts kinds of failure to gRPC statuses and back; no other module does.

use nacelle_base::{Chain, Classify, FailureKind};
use std::error::Error;

/// Returns the status of an error: its kind's code, and the error with its causes on one line.
pub fn status<E: Error + Classify>(error: &E) -> tonic::Status {
    refuse(error.kind(), Chain(error).to_string())
}

/// Returns the status of a refusal that has no error type.
pub fn refuse(kind: FailureKind, message: impl Into<String>) -> tonic::Status {
    tonic::Status::new(tonic::Code::from_i32(kind.grpc_code()), message)
}

/// Returns the kind of failure that a status means.
pub fn kind(status: &tonic::Status) -> FailureKind {
    match status.code() {
        // tonic reports its own deadline as Cancelled.
        tonic::Code::Cancelled => FailureKind::Timeout,
        // The servers of Nacelle never send Unknown; tonic reports it when the connection ends before the reply.
        tonic::Code::Unknown => FailureKind::Unavailable,
        code => FailureKind::from_grpc_code(code.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_survives_the_wire() {
        for each in FailureKind::ALL {
            assert_eq!(kind(&refuse(each, "x")), each);
        }
        assert_eq!(kind(&tonic::Status::cancelled("Timeout expired")), FailureKind::Timeout);
        assert_eq!(kind(&tonic::Status::unknown("transport error")), FailureKind::Unavailable);
    }
}
