//! Owns: machines that outlive their pods on their way to another node: out of what this node keeps of one into an artifact, and back.
//! May use: the image store (artifacts), `vms`. Threads: tasks of the runtime; files are read and written on blocking threads.

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

/// Where an artifact lies, and how to get there.
#[derive(Clone, Debug, Default)]
pub struct Place {
    /// A reference as of an image, or `oci:/FOLDER:TAG`.
    pub name: String,
    /// For the registry.
    pub auth: Option<Auth>,
    /// By http, also if the configuration does not say so.
    pub plain_http: bool,
}

/// Why a machine does not get there.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// The registry, or the artifact.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The machines of this node.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// A pod has it.
    #[error(transparent)]
    Lifecycle(#[from] LifecycleError),
    /// A file of the machine.
    #[error(transparent)]
    File(#[from] FileError),
    /// What the artifact says of the machine.
    #[error("{name} is no machine that can be taken")]
    Document {
        /// The artifact.
        name: String,
        /// Why.
        source: DocumentError,
    },
    /// A disk of it.
    #[error("disk {disk} cannot be taken: {rule}")]
    Disk {
        /// Its name.
        disk: String,
        /// Why.
        rule: &'static str,
    },
    /// What its disks lie over.
    #[error("the machine's disk lies over image {id}, which is not in the store of this node: pull {} first", names.join(" or "))]
    NoImage {
        /// Its id.
        id: Digest,
        /// What it is called elsewhere.
        names: Vec<String>,
    },
    /// It runs, and does not stand still to be copied.
    #[error("the machine cannot be copied while it runs: {words}")]
    NotHeld {
        /// Its keeper's.
        words: String,
    },
    /// There is no room.
    #[error("the machine's files have {needed} bytes and the disk of {path} has {free}", path = path.display())]
    NoSpace {
        /// Where they would be.
        path: PathBuf,
        /// Bytes.
        needed: u64,
        /// Bytes.
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

/// What is being done, for whoever waits. Clones are the same.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    /// Bytes of this step, and whether somebody waits.
    pub moved: Moved,
    step: Arc<(Mutex<String>, AtomicU64)>,
}

impl Progress {
    /// A new step with so many bytes; 0: nobody knows.
    fn begin(&self, step: String, bytes: u64) {
        *self.step.0.lock().unwrap_or_else(PoisonError::into_inner) = step;
        self.step.1.store(bytes, Ordering::Relaxed);
        self.moved.set(0);
    }

    /// The step, its bytes so far and all.
    pub fn now(&self) -> (String, u64, u64) {
        let step = self.step.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        (step, self.moved.bytes(), self.step.1.load(Ordering::Relaxed))
    }
}

/// A folder that goes with this value, unless it is kept.
struct Folder {
    path: PathBuf,
    kept: bool,
}

impl Folder {
    /// A new one. Blocks.
    fn make(path: PathBuf) -> Result<Folder, FileError> {
        use nacelle_base::files::at;
        use std::os::unix::fs::DirBuilderExt;
        std::fs::DirBuilder::new().mode(0o700).create(&path).map_err(at("create", &path))?;
        Ok(Folder { path, kept: false })
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn keep(mut self) {
        self.kept = true;
    }

    /// Waits until it is gone. What is left then, the next daemon removes.
    async fn remove(mut self) {
        self.kept = true;
        let path = std::mem::take(&mut self.path);
        if let Err(error) = run_blocking("remove a directory", move || gone(&path)).await {
            tracing::warn!("{}", Chain(&error));
        }
    }
}

impl Drop for Folder {
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
