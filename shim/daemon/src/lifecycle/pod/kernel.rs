//! Provides the kernel that a pod brings for its VM: pulls its image if the store lacks it, and copies the kernel into the pod's
//! directory, where it lies until the VM has loaded it. File operations run on the blocking pool.

use crate::lifecycle::context::NodeServices;
use crate::lifecycle::context::error::{LifecycleError, MAX_KERNEL_BYTES, OwnKernelError, at};
use nacelle_base::files::{self, FileError};
use nacelle_base::machine::EngineKind;
use nacelle_base::task::run_blocking_or_panic as blocking;
use nacelle_engine::check_kernel;
use nacelle_image::{CopyOutcome, ImageError, Reference};
use nacelle_model::digest::ImageId;
use nacelle_model::pod::OwnKernel;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// The file's name in the pod's directory.
const FILE: &str = "kernel";
const STEP: &str = "bring the kernel of the pod's machine";

/// Returns the path of the kernel: in the part of the run directory that the pod process sees. It is written before that process
/// begins.
pub(crate) fn file(dir: &Path) -> PathBuf {
    nacelle_pod::jail_dir(dir).join(FILE)
}

/// Copies the kernel into the pod's directory. From then on the image is not needed.
pub(crate) async fn bring(
    services: &NodeServices,
    dir: &Path,
    kernel: &OwnKernel,
    engine: EngineKind,
    memory_mib: u32,
    cancel: &CancellationToken,
) -> Result<(), LifecycleError> {
    let limit = services.config.sandbox.boot_timeout;
    let id = tokio::select! {
        () = cancel.cancelled() => return Err(LifecycleError::Cancelled),
        found = timeout(limit, image(services, &kernel.image)) => found,
    };
    let id =
        id.map_err(|_elapsed| LifecycleError::TooSlow { step: "pull the image of the machine's kernel", limit })?;
    copy(services, &id.map_err(at(STEP))?, dir, kernel, engine, memory_mib).await.map_err(at(STEP))
}

/// Returns the id of the image, which is pulled if it is missing or damaged. Concurrent pulls of the same image are shared.
async fn image(services: &NodeServices, name: &str) -> Result<ImageId, OwnKernelError> {
    let known = match services.images.find_sound(name).await {
        Err(ImageError::Damaged { .. }) => None,
        known => known.map_err(|source| OwnKernelError::Image { image: name.to_owned(), source })?,
    };
    if let Some(known) = known {
        return Ok(known.id);
    }
    let reference = Reference::parse(name).ok().filter(|_| name.parse::<ImageId>().is_err());
    let reference = reference.ok_or_else(|| OwnKernelError::NotHere { image: name.to_owned() })?;
    let pulled = services.images.pull(&reference, None).await;
    pulled.map_err(|source| OwnKernelError::Pull { image: name.to_owned(), source })
}

async fn copy(
    services: &NodeServices,
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
    match services.images.copy_file_from_image(id, &path, MAX_KERNEL_BYTES, copied).await {
        Ok(CopyOutcome::All(_)) => {}
        Ok(CopyOutcome::Missing) => return Err(OwnKernelError::NoFile { image, path }),
        Ok(CopyOutcome::TooLarge(size)) => return Err(OwnKernelError::TooLarge { image, path, size }),
        Err(source) => return Err(OwnKernelError::Image { image, source }),
    }
    let checked = blocking(move || check_kernel(&open, memory_mib, engine)).await;
    checked.map_err(|source| OwnKernelError::NoKernel { image, path, source })
}

/// Removes the copy once the VM has loaded the kernel: the directory is memory.
pub(crate) async fn forget(dir: &Path) -> Result<(), FileError> {
    let jailed = nacelle_pod::jailed(dir);
    blocking(move || jailed.remove(FILE)).await
}
