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

/// The exit codes of a pod process that could not start are this number and the gRPC code of the failure's kind.
const FIRST_EXIT_CODE: u8 = 64;

/// Returns the exit code by which a pod process reports the kind of its failure.
pub fn exit_code(kind: FailureKind) -> u8 {
    u8::try_from(kind.grpc_code()).map_or(1, |code| FIRST_EXIT_CODE + code)
}

/// Returns the kind that an exit code of a pod process reports, if it reports one.
pub fn kind_of_exit_code(code: i32) -> Option<FailureKind> {
    FailureKind::ALL.into_iter().find(|kind| i32::from(exit_code(*kind)) == code)
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
            assert_eq!(kind_of_exit_code(exit_code(each).into()), Some(each));
        }
        assert_eq!(kind_of_exit_code(1), None);
        assert_eq!(kind(&tonic::Status::cancelled("Timeout expired")), FailureKind::Timeout);
        assert_eq!(kind(&tonic::Status::unknown("transport error")), FailureKind::Unavailable);
    }
}
