//! Converts errors into gRPC statuses for the VM service.

use nacelle_base::{Chain, Classify, FailureKind};
use nacelle_proto::status::one_line_status;
use std::error::Error;
use tonic::Status;

/// Returns the status of an error: its kind determines the code, and the message contains all its causes.
pub(crate) fn error_status<E: Error + Classify>(error: E) -> Status {
    rejection(error.kind(), &Chain(&error).to_string())
}

/// Returns the status of a rejected request.
pub(crate) fn rejection(kind: FailureKind, message: &str) -> Status {
    one_line_status(kind.grpc_code(), message)
}
