//! Owns: the harness of the end-to-end tests: a node of one's own (network namespace, CNI configuration,
//! registry, daemon) in which the real crictl runs pods in real machines, and a census that finds what is left.
//!
//! The parts come from the environment, as `ci/test` sets it: `NACELLE_BIN`, `NACELLE_KERNEL`,
//! `NACELLE_INITRD`, `CRICTL`, `NACELLE_FSX`, `NACELLE_PJDFSTEST`; `NACELLE_TEST_ENGINE` is the engine of the pods (`qemu`
//! without it).

pub mod census;
pub mod cpio;
pub mod cri;
pub mod crictl;
pub mod image;
pub mod machine;
pub mod manager;
pub mod node;
pub mod registry;
pub mod run;

pub use cri::{Cri, CriPod};
pub use crictl::{Container, Pod};
pub use image::Image;
pub use manager::Manager;
pub use node::{Node, Options};
pub use run::{Output, eventually};

use std::path::PathBuf;

/// A part that `ci/test` must have provided.
///
/// # Panics
/// When the variable is not set: then the tests were not started by `ci/test`.
pub fn part(variable: &str) -> PathBuf {
    match std::env::var_os(variable) {
        Some(path) => path.into(),
        None => panic!("{variable} is not set; run ci/test, or see its last part for what it sets"),
    }
}
