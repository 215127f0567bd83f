//! Owns: the admission server of a cluster: the API server asks it whether pods and machines are right before they are stored,
//! and it answers with the code that stands behind RunPodSandbox. docs/reference/vm-admission.md (Admission) is the map.
//! May use: `vmi`, `stream` (its TLS), what this version honours. Needs no node, no daemon and no API server of its own.
//!
//! A review goes text -> `review` -> `verdict` -> `review` -> text; `server` does the talking.

mod certificate;
pub mod manifests;
mod review;
mod server;
mod verdict;

pub use server::{AdmissionError, Options, Server};
pub use verdict::Policy;

#[cfg(test)]
mod tests;
