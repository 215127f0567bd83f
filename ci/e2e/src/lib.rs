//! Provides the harness of the end-to-end tests: a node of its own for each test (network namespace, CNI configuration, registry,
//! daemon) on which the real crictl runs pods in real VMs, and a census that finds leaked resources.
//!
//! The parts come from the environment, as `ci/test` sets it: `NACELLE_BIN`, `NACELLE_KERNEL`, `NACELLE_INITRD`, `CRICTL`,
//! `NACELLE_FSX`, `NACELLE_PJDFSTEST`; `NACELLE_TEST_ENGINE` is the engine of the pods (`qemu` if unset).

pub mod census;
pub mod collector;
pub mod cpio;
pub mod cri;
pub mod crictl;
pub mod failure_answer;
pub mod failure_page;
pub mod image;
pub mod machine;
pub mod manager;
pub mod node;
pub mod registry;
pub mod run;

pub use cri::{CriClient, CriPod};
pub use crictl::{ContainerRequest, PodRequest};
pub use image::{TestArtifact, TestImage};
pub use manager::ServiceManager;
pub use node::{NodeOptions, TestNode};
pub use run::{ProgramOutput, eventually};

use std::path::PathBuf;

/// Returns the path of a part that `ci/test` must have provided.
///
/// # Panics
/// If the variable is not set, because the tests were not started by `ci/test`.
pub fn path_from_env(variable: &str) -> PathBuf {
    match std::env::var_os(variable) {
        Some(path) => path.into(),
        None => panic!("{variable} is not set; run ci/test, or see its last part for what it sets"),
    }
}
