//! The daemon of a node: serves CRI on a unix socket, runs pods and containers, keeps their records, and implements the commands
//! of the binary. docs/contributor/architecture.md gives an overview. It uses `proto`, `base`, `engine` (its probe), `image`,
//! `net`, `stream`, `pod` (specification and client), `keeper` (document) and `vmi`.

pub mod accounting;
mod apparmor;
mod bounded_log;
mod cdi;
pub mod cli;
pub mod config;
pub mod cri;
mod deadline;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
pub mod grpc_connection;
mod guest_port;
mod guest_shell;
mod hugepages;
pub mod lifecycle;
pub mod log;
mod machines;
pub mod metrics;
pub mod monitoring;
mod node_service;
pub mod oci;
pub mod profile;
pub mod program;
pub mod server;
mod signals;
pub mod socket;
mod streaming;
pub mod supervision;
mod sys;
mod systemd;
pub mod traces;
mod user_range;
