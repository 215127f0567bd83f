//! Implements the streaming server of CRI: it accepts the clients of Exec, Attach and PortForward and copies bytes between them
//! and the node. docs/contributor/streaming.md describes the design. The crate depends only on `base` and knows neither pods nor
//! gRPC: the daemon implements [`Guests`].

mod authority;
mod command;
mod forward;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod guests;
mod mux;
mod server;
pub mod spdy;
mod tls;
mod token;
mod websocket;

pub use authority::AuthorityFilter;
pub use guests::{Attach, Exec, Guests, Process, Size};
pub use server::{Config, Server, ServerError};
pub use tls::{Pem, Tls, TlsError};
pub use token::TooMany;
