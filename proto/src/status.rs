//! Builds the gRPC statuses of the daemon's services.

use tonic::{Code, Status};

/// The longest message in bytes: gRPC sends it in a header, which clients limit to some kilobytes.
const MAX_MESSAGE: usize = 4000;

/// Returns a status with this code, whose message is on one line and has a bounded length.
pub fn one_line_status(code: i32, message: &str) -> Status {
    let message: String = message.chars().map(|c| if c.is_control() { ' ' } else { c }).take(MAX_MESSAGE).collect();
    Status::new(Code::from_i32(code), message)
}
