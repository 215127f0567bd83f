//! Implements SPDY/3.1 as far as clients of CRI use it: streams over one connection, opened by the peer. The protocol is "SPDY
//! Protocol - Draft 3.1" of the Chromium project; comments cite its sections by number.

mod connection;
pub mod frame;
pub mod headers;

pub(crate) use connection::{Connection, Stream};
