//! Moves persistent VMs to other nodes: exports a VM's data into an OCI artifact, and imports it. It uses the image store
//! (artifacts) and `vms`. It runs in tasks of the runtime; files are read and written on the blocking pool.

mod document;
mod export;
mod import;
mod live;

pub use export::export;
pub use import::{Import, import};

use crate::lifecycle::LifecycleError;
use document::DocumentError;
use nacelle_base::files::{FileError, remove_tree_if_there};
use nacelle_base::task::{TaskError, run_blocking};
use nacelle_base::{Chain, Classify, Kind};
use nacelle_image::{Auth, ImageError, Moved};
use nacelle_machines::vms::VmError;
use nacelle_model::digest::Digest;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The location of an artifact, and how to access it.
#[derive(Clone, Debug, Default)]
pub struct Place {
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
    /// A pod holds the VM.
    #[error(transparent)]
    Lifecycle(#[from] LifecycleError),
    /// A file operation failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// The artifact's document is invalid.
    #[error("{name} is no machine that can be taken")]
    Document {
        /// The artifact.
        name: String,
        /// The cause.
        source: DocumentError,
    },
    /// A disk of the VM is rejected.
    #[error("disk {disk} cannot be taken: {rule}")]
    Disk {
        /// The disk's name.
        disk: String,
        /// The broken rule.
        rule: &'static str,
    },
    /// The backing image of the VM's disks is missing.
    #[error("the machine's disk lies over image {id}, which is not in the store of this node: pull {} first", names.join(" or "))]
    NoImage {
        /// The image id.
        id: Digest,
        /// The image's names on the exporting node.
        names: Vec<String>,
    },
    /// The running VM could not be paused for the copy.
    #[error("the machine cannot be copied while it runs: {words}")]
    NotHeld {
        /// The keeper's error text.
        words: String,
    },
    /// The file system lacks the space.
    #[error("the machine's files have {needed} bytes and the disk of {path} has {free}", path = path.display())]
    NoSpace {
        /// The directory.
        path: PathBuf,
        /// Bytes that are needed.
        needed: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// A task of the runtime did not finish.
    #[error(transparent)]
    Task(#[from] TaskError),
}

impl Classify for TransferError {
    fn kind(&self) -> Kind {
        match self {
            TransferError::Image(error) => error.kind(),
            TransferError::Vm(error) => error.kind(),
            TransferError::Lifecycle(error) => error.kind(),
            TransferError::File(error) => error.kind(),
            TransferError::Document { .. } | TransferError::Disk { .. } => Kind::Invalid,
            TransferError::NoImage { .. } | TransferError::NotHeld { .. } => Kind::Conflict,
            TransferError::NoSpace { .. } => Kind::Exhausted,
            TransferError::Task(error) => error.kind(),
        }
    }
}

/// The progress of an operation, for its observers. Clones share the state.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    /// The bytes of this step that were moved, and the flag of cancellation.
    pub moved: Moved,
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
    pub fn now(&self) -> (String, u64, u64) {
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
    fn make(path: PathBuf) -> Result<WorkDirectory, FileError> {
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
        if let Err(error) = run_blocking("remove a directory", move || gone(&path)).await {
            tracing::warn!("{}", Chain(&error));
        }
    }
}

impl Drop for WorkDirectory {
    fn drop(&mut self) {
        if !self.kept {
            let path = std::mem::take(&mut self.path);
            match tokio::runtime::Handle::try_current() {
                Ok(runtime) => drop(runtime.spawn_blocking(move || gone(&path))),
                Err(_none) => gone(&path),
            }
        }
    }
}

fn gone(path: &Path) {
    if let Err(error) = remove_tree_if_there(path) {
        tracing::warn!("{}", Chain(&error));
    }
}
