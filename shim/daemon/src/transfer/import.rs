//! Imports a VM: checks its document before anything is created, writes its verified files to a directory without a record, and
//! finally adds the record, with which the VM exists. The next daemon removes a directory without a record.

use super::document::{Document, File, Kept, MACHINE, MOST_BYTES, MOST_FILES};
use super::export::look;
use super::{Place, Progress, TransferError, WorkDirectory};
use crate::lifecycle::Node;
use nacelle_base::files::{FileError, at, write_whole};
use nacelle_base::task::{TaskError, run_blocking};
use nacelle_image::{Artifacts, Descriptor};
use nacelle_keeper::HOTPLUG_LIST;
use nacelle_machines::vms::{self, Busy};
use nacelle_model::digest::Digest;
use nacelle_model::record::VmRecord;
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The parameters of an import.
#[derive(Clone, Debug)]
pub struct Import {
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
pub async fn import(node: &Node, asked: &Import, place: Place, progress: &Progress) -> Result<Imported, TransferError> {
    let parts = node.parts();
    let artifacts = parts.images.artifacts(&place.name, place.auth, place.plain_http)?;
    let id = vms::id(&asked.namespace, &asked.name);
    let ours = parts.vms.reserve(&id, "imported").await?;
    progress.begin("looking at what it is".to_owned(), 0);
    let found = artifacts.find(&MACHINE, MOST_FILES, MOST_BYTES).await?;
    let wrong = |source| TransferError::Document { name: artifacts.name(), source };
    let document = Document::read(&found.config, found.layers.len()).map_err(wrong)?;
    let fresh = vms::new_record(&asked.namespace, &asked.name)?;
    let record = document.record(fresh, asked.new_identity).map_err(wrong)?;
    parts.vms.check_new(&record)?;
    if let Some(image) = &document.image {
        // From here on the image is kept.
        ours.need(image.id);
        if parts.images.status(&image.id.to_string())?.is_none() {
            return Err(TransferError::NoImage { id: image.id, names: image.names.clone() });
        }
    }
    let path = parts.vms.directory(&record);
    let needed = document.size();
    let directory = run_blocking("create the directory of the VM", move || room(path, needed)).await??;
    let brought = bring(&artifacts, &document, &found.layers, directory.path(), progress).await;
    if let Err(error) = brought {
        directory.remove().await;
        return Err(error);
    }
    progress.begin("making it known".to_owned(), 0);
    let record = tokio::spawn(add(node.clone(), record, directory, ours))
        .await
        .map_err(|error| TaskError::new("record the imported VM", error))??;
    tracing::info!(machine = record.id, artifact = artifacts.name(), digest = %found.digest, "imported");
    Ok(Imported { record, digest: found.digest, snapshots: document.snapshots })
}

/// Runs to its end even if no caller waits: a partial result would be a VM without files.
async fn add(node: Node, record: VmRecord, directory: WorkDirectory, ours: Busy) -> Result<VmRecord, TransferError> {
    let added = node.parts().vms.add(record.clone()).await;
    match added {
        Ok(()) => directory.keep(),
        Err(error) => {
            directory.remove().await;
            return Err(error.into());
        }
    }
    drop(ours);
    Ok(record)
}

/// Creates a directory, if its file system has `needed` free bytes. Blocks.
fn room(path: PathBuf, needed: u64) -> Result<WorkDirectory, TransferError> {
    let directory = WorkDirectory::make(path)?;
    let stat = nix::sys::statvfs::statvfs(directory.path());
    let stat = stat.map_err(|errno| at("measure", directory.path())(errno.into()))?;
    let free = stat.blocks_available() * stat.fragment_size();
    match needed > free {
        true => Err(TransferError::NoSpace { path: directory.path().to_owned(), needed, free }),
        false => Ok(directory),
    }
}

async fn bring(
    artifacts: &Artifacts,
    document: &Document,
    layers: &[Descriptor],
    directory: &Path,
    progress: &Progress,
) -> Result<(), TransferError> {
    for (file, layer) in document.files.iter().zip(layers) {
        progress.begin(format!("bringing {}", file.kept.what()), file.size);
        let path = directory.join(file.kept.file());
        let made = path.clone();
        let to = run_blocking("create a file of the VM", move || {
            let opened = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&made);
            opened.map_err(at("create", &made))
        });
        artifacts.fetch(layer, &file.content(), to.await??, &path, &progress.moved).await?;
        if let Some(bytes) = file.kept.qcow2() {
            let refused = |rule| TransferError::Disk { disk: file.kept.what(), rule };
            let look = move || look(&std::fs::File::open(&path).map_err(at("open", &path))?, &path);
            let (found, _) = run_blocking("inspect a disk of the VM", look).await??.map_err(refused)?;
            if found != bytes {
                return Err(refused("it has another size than is said"));
            }
        }
    }
    let (document, directory) = (document.clone(), directory.to_owned());
    Ok(run_blocking("write the marks of the VM", move || marks(&document, &directory)).await??)
}

/// Writes the marks that the keeper expects beside the files. Blocks.
fn marks(document: &Document, directory: &Path) -> Result<(), FileError> {
    let image = document.image.as_ref().map(|image| image.id.to_string());
    for file in &document.files {
        if let (Kept::Disk { name, over_image: true, .. }, Some(image)) = (&file.kept, &image) {
            write_whole(&directory.join(format!("{name}.image")), image.as_bytes())?;
        }
    }
    let added = document.added();
    if !added.is_empty() {
        let text = serde_json::to_vec(&added).map_err(|error| at("write", directory)(error.into()))?;
        write_whole(&directory.join(HOTPLUG_LIST), &text)?;
    }
    if document.secure_boot {
        write_whole(&directory.join("efi-secure"), b"")?;
    }
    std::fs::File::open(directory).and_then(|directory| directory.sync_all()).map_err(at("write", directory))
}

impl File {
    fn content(&self) -> nacelle_image::Content {
        nacelle_image::Content { digest: self.digest, size: self.size }
    }
}
