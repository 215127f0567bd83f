//! Imports a VM: checks its configuration before anything is created, writes its verified files to a directory without a record,
//! and finally adds the record, with which the VM exists. The next daemon removes a directory without a record.

use super::document::{ExportedFile, ExportedVm, FileKind, MAX_BYTES, MAX_FILES, VM_ARTIFACT};
use super::files::inspect_qcow2;
use super::{ArtifactLocation, Progress, TransferError, WorkDirectory};
use crate::runtime::PodRuntime;
use crate::vms::{self, VmLock};
use nacelle_base::files::{FileError, at, write_whole};
use nacelle_base::task::{TaskError, run_blocking};
use nacelle_image::{Artifacts, Descriptor};
use nacelle_keeper::HOTPLUG_LIST;
use nacelle_model::digest::Digest;
use nacelle_model::record::VmRecord;
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The VM that an import creates.
#[derive(Clone, Debug)]
pub struct ImportTarget {
    /// The namespace of the new VM.
    pub namespace: String,
    /// The name of the new VM.
    pub name: String,
    /// The new VM gets another identity than the exported one.
    pub new_identity: bool,
}

/// The result of an import.
#[derive(Debug)]
pub struct Imported {
    /// The VM.
    pub record: VmRecord,
    /// The artifact's digest.
    pub digest: Digest,
    /// Snapshots in its disks.
    pub snapshots: Vec<String>,
}

/// Imports a VM. Dropping the future cancels the import and leaves nothing.
pub async fn import(
    runtime: &Arc<dyn PodRuntime>,
    target: &ImportTarget,
    location: ArtifactLocation,
    progress: &Progress,
) -> Result<Imported, TransferError> {
    let (vms, images) = (runtime.vms(), runtime.images());
    let artifacts = images.artifacts(&location.name, location.auth, location.plain_http)?;
    let id = vms::id(&target.namespace, &target.name);
    let lock = vms.lock_new_name(&id, "imported").await?;
    progress.begin("reading the artifact's configuration".to_owned(), 0);
    let artifact = artifacts.fetch_artifact(&VM_ARTIFACT, MAX_FILES, MAX_BYTES).await?;
    let invalid = |source| TransferError::InvalidArtifact { name: artifacts.name(), source };
    let exported = ExportedVm::from_json(&artifact.config, artifact.layers.len()).map_err(invalid)?;
    let fresh = vms::new_record(&target.namespace, &target.name)?;
    let record = exported.to_record(fresh, target.new_identity).map_err(invalid)?;
    vms.check_new(&record)?;
    if let Some(image) = &exported.image {
        // From here on the image stays in the store.
        lock.keep_image(image.id);
        if images.status(&image.id.to_string())?.is_none() {
            return Err(TransferError::NoImage { id: image.id, names: image.names.clone() });
        }
    }
    let path = vms.directory(&record);
    let needed = exported.size();
    let directory = run_blocking("create the directory of the VM", move || create_with_space(path, needed)).await??;
    let fetched = fetch_files(&artifacts, &exported, &artifact.layers, directory.path(), progress).await;
    if let Err(error) = fetched {
        directory.remove().await;
        return Err(error);
    }
    progress.begin("recording the VM".to_owned(), 0);
    let record = tokio::spawn(add_record(Arc::clone(runtime), record, directory, lock))
        .await
        .map_err(|error| TaskError::new("record the imported VM", error))??;
    tracing::info!(vm = record.id, artifact = artifacts.name(), digest = %artifact.digest, "imported a persistent VM");
    Ok(Imported { record, digest: artifact.digest, snapshots: exported.snapshots })
}

/// Adds the record. Runs to its end even if no caller waits: a partial result would be a VM without files.
async fn add_record(
    runtime: Arc<dyn PodRuntime>,
    record: VmRecord,
    directory: WorkDirectory,
    lock: VmLock,
) -> Result<VmRecord, TransferError> {
    match runtime.vms().add(record.clone()).await {
        Ok(()) => directory.keep(),
        Err(error) => {
            directory.remove().await;
            return Err(error.into());
        }
    }
    drop(lock);
    Ok(record)
}

/// Creates a directory, if its file system has `needed` free bytes. Blocks.
fn create_with_space(path: PathBuf, needed: u64) -> Result<WorkDirectory, TransferError> {
    let directory = WorkDirectory::create(path)?;
    let stat = nix::sys::statvfs::statvfs(directory.path());
    let stat = stat.map_err(|errno| at("measure", directory.path())(errno.into()))?;
    let free = stat.blocks_available() * stat.fragment_size();
    match needed > free {
        true => Err(TransferError::NoSpace { path: directory.path().to_owned(), needed, free }),
        false => Ok(directory),
    }
}

/// Fetches the files into the directory and verifies them.
async fn fetch_files(
    artifacts: &Artifacts,
    exported: &ExportedVm,
    layers: &[Descriptor],
    directory: &Path,
    progress: &Progress,
) -> Result<(), TransferError> {
    for (file, layer) in exported.files.iter().zip(layers) {
        progress.begin(format!("fetching {}", file.kind.description()), file.size);
        let path = directory.join(file.kind.file_name());
        let created = path.clone();
        let to = run_blocking("create a file of the VM", move || {
            let opened = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&created);
            opened.map_err(at("create", &created))
        });
        artifacts.fetch_file(layer, &file.content(), to.await??, &path, &progress.moved).await?;
        if let Some(bytes) = file.kind.virtual_size() {
            let reject = |rule| TransferError::Disk { disk: file.kind.description(), rule };
            let inspect = move || inspect_qcow2(&std::fs::File::open(&path).map_err(at("open", &path))?, &path);
            let (found, _) = run_blocking("inspect a disk of the VM", inspect).await??.map_err(reject)?;
            if found != bytes {
                return Err(reject("its virtual size differs from the artifact's configuration"));
            }
        }
    }
    let (exported, directory) = (exported.clone(), directory.to_owned());
    Ok(run_blocking("write the metadata files of the VM", move || write_metadata(&exported, &directory)).await??)
}

/// Writes the files that the keeper expects beside the disks. Blocks.
fn write_metadata(exported: &ExportedVm, directory: &Path) -> Result<(), FileError> {
    let image = exported.image.as_ref().map(|image| image.id.to_string());
    for file in &exported.files {
        if let (FileKind::Disk { name, over_image: true, .. }, Some(image)) = (&file.kind, &image) {
            write_whole(&directory.join(format!("{name}.image")), image.as_bytes())?;
        }
    }
    let added = exported.added_disks();
    if !added.is_empty() {
        let text = serde_json::to_vec(&added).map_err(|error| at("write", directory)(error.into()))?;
        write_whole(&directory.join(HOTPLUG_LIST), &text)?;
    }
    if exported.secure_boot {
        write_whole(&directory.join("efi-secure"), b"")?;
    }
    std::fs::File::open(directory).and_then(|directory| directory.sync_all()).map_err(at("write", directory))
}

impl ExportedFile {
    fn content(&self) -> nacelle_image::FileContent {
        nacelle_image::FileContent { digest: self.digest, size: self.size }
    }
}
