//! Owns: the CNI runtime: which network, which plugins, in which order, and what they answered.

mod error;
mod types;

pub use error::CniError;
pub use types::{Bandwidth, Dns, PodRef, PortMapping, Protocol};
