//! Converts failures into gRPC statuses, for all RPCs: the kind determines the code, and the message is the error with all its
//! causes on one line.

use nacelle_base::{Chain, Classify, Kind};
use nacelle_proto::status::one_line_status;
use std::error::Error;
use tonic::Status;

/// Returns the status of a failure.
pub fn status<E: Error + Classify>(error: E) -> Status {
    refuse(error.kind(), &Chain(&error).to_string())
}

/// Returns the status of a rejected request.
pub fn refuse(kind: Kind, message: &str) -> Status {
    one_line_status(kind.grpc_code(), message)
}

/// Returns the status of an RPC that is not implemented yet.
pub fn not_yet(rpc: &str) -> Status {
    refuse(
        Kind::Unsupported,
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
            (Kind::NotFound, Code::NotFound),
            (Kind::Invalid, Code::InvalidArgument),
            (Kind::AlreadyExists, Code::AlreadyExists),
            (Kind::Conflict, Code::FailedPrecondition),
            (Kind::Exhausted, Code::ResourceExhausted),
            (Kind::Unavailable, Code::Unavailable),
            (Kind::Timeout, Code::DeadlineExceeded),
            (Kind::Unsupported, Code::Unimplemented),
            (Kind::Denied, Code::PermissionDenied),
            (Kind::Internal, Code::Internal),
        ] {
            assert_eq!(refuse(kind, "x").code(), code);
        }
        let status = refuse(Kind::Internal, &"a\nb".repeat(5000));
        assert!(!status.message().contains('\n') && status.message().len() <= 4000);
    }
}
