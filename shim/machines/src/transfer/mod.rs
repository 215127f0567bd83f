//! Moves persistent VMs to other nodes: exports a VM's data into an OCI artifact, and imports it. It uses the image store
//! (artifacts) and [`crate::vms`]. It runs in tasks of the runtime; files are read and written on the blocking pool.

mod document;
mod export;
mod files;
mod import;
mod live;

pub use export::export;
pub use import::{ImportTarget, import};

use crate::runtime::PodRuntimeError;
use crate::vms::VmError;
use document::DocumentError;
use nacelle_base::files::{FileError, remove_tree_if_there};
use nacelle_base::task::{TaskError, run_blocking};
use nacelle_base::{Chain, Classify, FailureKind};
use nacelle_image::{Auth, ImageError, TransferProgress};
use nacelle_model::digest::Digest;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The location of a VM artifact, and how to access it.
#[derive(Clone, Debug, Default)]
pub struct ArtifactLocation {
    /// A reference like an image's, or `oci:/DIRECTORY:TAG`.
    pub name: String,
    /// The credentials for the registry.
    pub auth: Option<Auth>,
    /// Uses plain http, whatever the configuration says.
    pub plain_http: bool,
}

/// Why an export or import failed.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// The registry or the artifact failed.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The persistent VM is not available.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// A pod holds the VM, or its keeper cannot be reached.
    #[error(transparent)]
    Runtime(#[from] PodRuntimeError),
    /// A file operation failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// The artifact's configuration is invalid.
    #[error("{name} is not a valid VM artifact")]
    InvalidArtifact {
        /// The artifact.
        name: String,
        /// The cause.
        source: DocumentError,
    },
    /// A disk of the VM is rejected.
    #[error("cannot transfer disk {disk}: {rule}")]
    Disk {
        /// The disk's name.
        disk: String,
        /// The broken rule.
        rule: &'static str,
    },
    /// The backing image of the VM's disks is missing.
    #[error("the backing image {id} of the VM's disks is not in the image store of this node: pull {} first", names.join(" or "))]
    NoImage {
        /// The image id.
        id: Digest,
        /// The image's names on the exporting node.
        names: Vec<String>,
    },
    /// The running VM could not be paused for the copy, or did not stay paused.
    #[error("cannot copy the running VM: {message}")]
    NotPaused {
        /// The keeper's error text.
        message: String,
    },
    /// The file system lacks the space.
    #[error("the VM's files need {needed} bytes, and the file system of {path} has {free} free", path = path.display())]
    NoSpace {
        /// The directory.
        path: PathBuf,
        /// Bytes that are needed.
        needed: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// A blocking task panicked or was cancelled.
    #[error(transparent)]
    Task(#[from] TaskError),
}

impl Classify for TransferError {
    fn kind(&self) -> FailureKind {
        match self {
            TransferError::Image(error) => error.kind(),
            TransferError::Vm(error) => error.kind(),
            TransferError::Runtime(error) => error.kind(),
            TransferError::File(error) => error.kind(),
            TransferError::InvalidArtifact { .. } | TransferError::Disk { .. } => FailureKind::Invalid,
            TransferError::NoImage { .. } | TransferError::NotPaused { .. } => FailureKind::Conflict,
            TransferError::NoSpace { .. } => FailureKind::Exhausted,
            TransferError::Task(error) => error.kind(),
        }
    }
}

/// The progress of an operation, for its observers. Clones share the state.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    /// The bytes of this step that were moved, and the flag of cancellation.
    pub moved: TransferProgress,
    step: Arc<(Mutex<String>, AtomicU64)>,
}

impl Progress {
    /// Begins a step with this many bytes; 0 if unknown.
    fn begin(&self, step: String, bytes: u64) {
        *self.step.0.lock().unwrap_or_else(PoisonError::into_inner) = step;
        self.step.1.store(bytes, Ordering::Relaxed);
        self.moved.set(0);
    }

    /// Returns the step, its bytes until now, and its total.
    pub fn current(&self) -> (String, u64, u64) {
        let step = self.step.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        (step, self.moved.bytes(), self.step.1.load(Ordering::Relaxed))
    }
}

/// A directory that is removed on drop, unless it is kept.
struct WorkDirectory {
    path: PathBuf,
    kept: bool,
}

impl WorkDirectory {
    /// Creates the directory. Blocks.
    fn create(path: PathBuf) -> Result<WorkDirectory, FileError> {
        use nacelle_base::files::at;
        use std::os::unix::fs::DirBuilderExt;
        std::fs::DirBuilder::new().mode(0o700).create(&path).map_err(at("create", &path))?;
        Ok(WorkDirectory { path, kept: false })
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn keep(mut self) {
        self.kept = true;
    }

    /// Removes the directory. The next daemon removes what could not be removed.
    async fn remove(mut self) {
        self.kept = true;
        let path = std::mem::take(&mut self.path);
        if let Err(error) = run_blocking("remove a directory", move || remove_and_log(&path)).await {
            tracing::warn!("{}", Chain(&error));
        }
    }
}

impl Drop for WorkDirectory {
    fn drop(&mut self) {
        if !self.kept {
            let path = std::mem::take(&mut self.path);
            match tokio::runtime::Handle::try_current() {
                Ok(runtime) => drop(runtime.spawn_blocking(move || remove_and_log(&path))),
                Err(_none) => remove_and_log(&path),
            }
        }
    }
}

fn remove_and_log(path: &Path) {
    if let Err(error) = remove_tree_if_there(path) {
        tracing::warn!("{}", Chain(&error));
    }
}
