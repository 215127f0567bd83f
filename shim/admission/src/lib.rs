//! The admission webhook server of a cluster. The API server asks it whether pods and machines are valid before they are stored,
//! and it applies the same checks as RunPodSandbox. docs/reference/vm-admission.md (Admission) has an overview. It uses `vmi`,
//! `stream` (for TLS) and the list of fields that this version supports; it needs neither a node, nor a daemon, nor access to the
//! API server.
//!
//! A review passes through text -> `review` -> `verdict` -> `review` -> text; `server` is the transport.

mod certificate;
pub mod manifests;
mod peers;
mod review;
mod server;
mod verdict;

pub use server::{AdmissionError, AdmissionOptions, AdmissionServer, PolicyControl};
pub use verdict::Policy;

#[cfg(test)]
mod tests;
