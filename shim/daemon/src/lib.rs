//! Owns: the daemon of a node: CRI on a unix socket, pods and containers, their records, and the commands of the
//! program. docs/contributor/architecture.md is the map.
//! May use: `proto`, `base`, `engine` (its probe), `image`, `net`, `stream`, `pod` (specification and client), `keeper` (document), `vmi`.

pub mod accounting;
mod cdi;
pub mod cli;
pub mod config;
mod credentials;
pub mod cri;
mod deadline;
mod follow;
pub mod grpc_connection;
mod hugepages;
pub mod lifecycle;
mod node_service;
pub mod oci;
mod power;
pub mod profile;
pub mod program;
pub mod server;
mod signals;
pub mod socket;
mod streaming;
pub mod supervision;
mod sys;
mod systemd;
mod transfer;
mod vm_service;
