//! Converts failures into gRPC statuses, for all RPCs: the kind determines the code, and the message is the error with all its
//! causes on one line.

use crate::lifecycle::lead_with_reason;
use nacelle_base::{Chain, Classify, FailureKind};
use nacelle_proto::status::one_line_status;
use std::error::Error;
use tonic::Status;

/// Returns the status of a failure.
pub fn status<E: Error + Classify>(error: E) -> Status {
    refuse(error.kind(), &Chain(&error).to_string())
}

/// Returns the status of a failed CreateContainer: a reason that kubelet knows is at its beginning.
pub fn creation_status<E: Error + Classify>(error: E) -> Status {
    refuse(error.kind(), &lead_with_reason(&Chain(&error).to_string()))
}

/// Returns the status of a rejected request.
pub fn refuse(kind: FailureKind, message: &str) -> Status {
    one_line_status(kind.grpc_code(), message)
}

/// Returns the status of an RPC that is not implemented yet.
pub fn not_yet(rpc: &str) -> Status {
    refuse(
        FailureKind::Unsupported,
        &format!("{rpc} is not implemented by this version of Nacelle; see docs/reference/cri-coverage.md"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use tonic::Code;

    #[test]
    fn each_kind_has_its_code_and_a_message_is_one_line() {
        for (kind, code) in [
            (FailureKind::NotFound, Code::NotFound),
            (FailureKind::Invalid, Code::InvalidArgument),
            (FailureKind::AlreadyExists, Code::AlreadyExists),
            (FailureKind::Conflict, Code::FailedPrecondition),
            (FailureKind::Exhausted, Code::ResourceExhausted),
            (FailureKind::Unavailable, Code::Unavailable),
            (FailureKind::Timeout, Code::DeadlineExceeded),
            (FailureKind::Unsupported, Code::Unimplemented),
            (FailureKind::Denied, Code::PermissionDenied),
            (FailureKind::Internal, Code::Internal),
        ] {
            assert_eq!(refuse(kind, "x").code(), code);
        }
        let status = refuse(FailureKind::Internal, &"a\nb".repeat(5000));
        assert!(!status.message().contains('\n') && status.message().len() <= 4000);
    }
}
