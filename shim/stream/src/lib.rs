//! Implements the streaming server of CRI: it accepts the clients of Exec, Attach and PortForward and copies bytes between them
//! and the node. docs/contributor/streaming.md describes the design. The crate depends only on `base` and knows neither pods nor
//! gRPC: the daemon implements [`StreamBackend`].

mod authority;
mod backend;
mod command;
mod forward;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod mux;
mod pending;
mod server;
mod sessions;
pub mod spdy;
mod tls;
mod token;
mod websocket;

pub use authority::AuthorityFilter;
pub use backend::{Attach, Exec, ProcessStreams, StreamBackend, TerminalSize};
pub use server::{ServerError, StreamingConfig, StreamingServer};
pub use sessions::{SessionCount, SessionKind};
pub use tls::{Pem, Tls, TlsError};
pub use token::TooManyTokens;
