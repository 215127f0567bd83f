//! Owns: the kernel that a pod brings for its machine: from an image of the store, which is pulled if it is not there, into the
//! pod's folder, where it lies until the machine has it.
//! Threads: the file's work is on threads of the pool.

use super::Parts;
use super::boot::blocking;
use super::error::{LifecycleError, at};
use nacelle_base::files::{self, FileError};
use nacelle_base::machine::EngineKind;
use nacelle_base::{Classify, Kind};
use nacelle_engine::{KernelError, check_kernel};
use nacelle_image::{Copied, ImageError, Reference};
use nacelle_model::digest::ImageId;
use nacelle_model::pod::OwnKernel;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// The largest kernel: /run is memory.
const MOST: u64 = 128 << 20;
/// Its name.
const FILE: &str = "kernel";
const STEP: &str = "bring the kernel of the pod's machine";

/// Why there is no kernel.
#[derive(Debug, thiserror::Error)]
pub enum OwnKernelError {
    /// Nobody has brought the image, and the node cannot get it.
    #[error(
        "image {image} is not on this node, and cannot be pulled without credentials of the pod's: bring it there (crictl pull {image})"
    )]
    Pull {
        /// The image.
        image: String,
        /// Why.
        source: ImageError,
    },
    /// The image is named by its id, by which nothing is pulled.
    #[error("image {image} is not on this node: bring it there, or name it by a reference")]
    NotHere {
        /// The id.
        image: String,
    },
    /// The image cannot be read.
    #[error("image {image} cannot be read")]
    Image {
        /// The image.
        image: String,
        /// Why.
        source: ImageError,
    },
    /// It has no such file.
    #[error("image {image} has no file {path:?} (links are not followed to it)")]
    NoFile {
        /// The image.
        image: String,
        /// The path.
        path: String,
    },
    /// The file is too large.
    #[error("{path:?} of image {image} has {size} bytes, and a kernel {MOST} at most")]
    TooLarge {
        /// The image.
        image: String,
        /// The path.
        path: String,
        /// Its bytes.
        size: u64,
    },
    /// The file is no kernel for the machine.
    #[error("{path:?} of image {image} is no kernel for this machine")]
    NoKernel {
        /// The image.
        image: String,
        /// The path.
        path: String,
        /// Why.
        source: KernelError,
    },
    /// The pod's folder cannot take it.
    #[error(transparent)]
    File(#[from] FileError),
}

impl Classify for OwnKernelError {
    fn kind(&self) -> Kind {
        match self {
            OwnKernelError::Pull { source, .. } | OwnKernelError::Image { source, .. } => source.kind(),
            OwnKernelError::NotHere { .. } | OwnKernelError::NoFile { .. } => Kind::Conflict,
            OwnKernelError::TooLarge { .. } => Kind::Invalid,
            OwnKernelError::NoKernel { source, .. } => source.kind(),
            OwnKernelError::File(source) => source.kind(),
        }
    }
}

/// Where the kernel lies: in the part of the run directory that the pod process sees. It is put there before that process begins.
pub(super) fn file(dir: &Path) -> PathBuf {
    nacelle_pod::jail_dir(dir).join(FILE)
}

/// Puts the kernel there. From then on the image is not needed.
pub(super) async fn bring(
    parts: &Parts,
    dir: &Path,
    kernel: &OwnKernel,
    engine: EngineKind,
    memory_mib: u32,
    cancel: &CancellationToken,
) -> Result<(), LifecycleError> {
    let limit = Duration::from_secs(parts.config.sandbox.boot_seconds);
    let id = tokio::select! {
        () = cancel.cancelled() => return Err(LifecycleError::Cancelled),
        found = timeout(limit, image(parts, &kernel.image)) => found,
    };
    let id =
        id.map_err(|_elapsed| LifecycleError::TooSlow { step: "pull the image of the machine's kernel", limit })?;
    copy(parts, &id.map_err(at(STEP))?, dir, kernel, engine, memory_mib).await.map_err(at(STEP))
}

/// The image, if need be out of a registry. Others who pull the same one share the pull.
async fn image(parts: &Parts, name: &str) -> Result<ImageId, OwnKernelError> {
    let known = parts.images.status(name);
    let known = known.map_err(|source| OwnKernelError::Image { image: name.to_owned(), source })?;
    if let Some(known) = known {
        return Ok(known.id);
    }
    let reference = Reference::parse(name).ok().filter(|_| name.parse::<ImageId>().is_err());
    let reference = reference.ok_or_else(|| OwnKernelError::NotHere { image: name.to_owned() })?;
    let pulled = parts.images.pull(&reference, None).await;
    pulled.map_err(|source| OwnKernelError::Pull { image: name.to_owned(), source })
}

async fn copy(
    parts: &Parts,
    id: &ImageId,
    dir: &Path,
    kernel: &OwnKernel,
    engine: EngineKind,
    memory_mib: u32,
) -> Result<(), OwnKernelError> {
    let to = file(dir);
    let made = move || {
        let open = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&to);
        let open = open.map_err(files::at("create", &to))?;
        let copied = open.try_clone().map_err(files::at("create", &to))?;
        Ok::<(File, File), FileError>((open, copied))
    };
    let (open, copied) = blocking(made).await?;
    let (image, path) = (kernel.image.clone(), kernel.path.clone());
    match parts.images.copy_file(id, &path, MOST, copied).await {
        Ok(Copied::All(_)) => {}
        Ok(Copied::Missing) => return Err(OwnKernelError::NoFile { image, path }),
        Ok(Copied::TooLarge(size)) => return Err(OwnKernelError::TooLarge { image, path, size }),
        Err(source) => return Err(OwnKernelError::Image { image, source }),
    }
    let checked = blocking(move || check_kernel(&open, memory_mib, engine)).await;
    checked.map_err(|source| OwnKernelError::NoKernel { image, path, source })
}

/// Takes it away again, once the machine has it: the folder is memory.
pub(super) async fn forget(dir: &Path) -> Result<(), FileError> {
    let jailed = nacelle_pod::jailed(dir);
    blocking(move || jailed.remove(FILE)).await
}
