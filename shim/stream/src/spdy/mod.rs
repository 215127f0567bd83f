//! Owns: SPDY/3.1, as far as clients of CRI speak it: streams over one connection, opened by the peer.
//! The protocol: "SPDY Protocol - Draft 3.1" of the Chromium project; sections are named by its numbers.

mod connection;
pub mod frame;
pub mod headers;

pub(crate) use connection::{Connection, Stream};
