//! Owns: a machine on its way in: what it says it is, checked before anything is made; its files, verified, in a folder that nobody knows;
//! and at last its record, with which it is there. A folder without a record is removed when the next daemon starts.

use super::document::{Document, File, Kept, MACHINE, MOST_BYTES, MOST_FILES};
use super::export::look;
use super::{Folder, Place, Progress, TransferError};
use crate::lifecycle::Node;
use nacelle_base::files::{FileError, at, write_whole};
use nacelle_base::task::{TaskError, run_blocking};
use nacelle_image::{Artifacts, Descriptor};
use nacelle_keeper::ADDED;
use nacelle_machines::vms::{self, Busy};
use nacelle_model::digest::Digest;
use nacelle_model::record::VmRecord;
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// What shall be made of an artifact.
#[derive(Clone, Debug)]
pub struct Import {
    /// Its namespace.
    pub namespace: String,
    /// What it is called here.
    pub name: String,
    /// It becomes another machine than the one that was exported.
    pub new_identity: bool,
}

/// What has become of it.
#[derive(Debug)]
pub struct Imported {
    /// The machine.
    pub record: VmRecord,
    /// The artifact's.
    pub digest: Digest,
    /// Snapshots in its disks.
    pub snapshots: Vec<String>,
}

/// Imports a machine. Dropping the future ends it, and nothing of it stays.
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
        // From now on it stays.
        ours.need(image.id);
        if parts.images.status(&image.id.to_string())?.is_none() {
            return Err(TransferError::NoImage { id: image.id, names: image.names.clone() });
        }
    }
    let path = parts.vms.folder(&record);
    let needed = document.size();
    let folder = run_blocking("create the directory of the VM", move || room(path, needed)).await??;
    let brought = bring(&artifacts, &document, &found.layers, folder.path(), progress).await;
    if let Err(error) = brought {
        folder.remove().await;
        return Err(error);
    }
    progress.begin("making it known".to_owned(), 0);
    let record = tokio::spawn(add(node.clone(), record, folder, ours))
        .await
        .map_err(|error| TaskError::new("record the imported VM", error))??;
    tracing::info!(machine = record.id, artifact = artifacts.name(), digest = %found.digest, "imported");
    Ok(Imported { record, digest: found.digest, snapshots: document.snapshots })
}

/// To its end, even if nobody waits for it any more: half of it would be a machine without files.
async fn add(node: Node, record: VmRecord, folder: Folder, ours: Busy) -> Result<VmRecord, TransferError> {
    let added = node.parts().vms.add(record.clone()).await;
    match added {
        Ok(()) => folder.keep(),
        Err(error) => {
            folder.remove().await;
            return Err(error.into());
        }
    }
    drop(ours);
    Ok(record)
}

/// The folder, where there is room for so many bytes. Blocks.
fn room(path: PathBuf, needed: u64) -> Result<Folder, TransferError> {
    let folder = Folder::make(path)?;
    let stat = nix::sys::statvfs::statvfs(folder.path());
    let stat = stat.map_err(|errno| at("measure", folder.path())(errno.into()))?;
    let free = stat.blocks_available() * stat.fragment_size();
    match needed > free {
        true => Err(TransferError::NoSpace { path: folder.path().to_owned(), needed, free }),
        false => Ok(folder),
    }
}

async fn bring(
    artifacts: &Artifacts,
    document: &Document,
    layers: &[Descriptor],
    folder: &Path,
    progress: &Progress,
) -> Result<(), TransferError> {
    for (file, layer) in document.files.iter().zip(layers) {
        progress.begin(format!("bringing {}", file.kept.what()), file.size);
        let path = folder.join(file.kept.file());
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
    let (document, folder) = (document.clone(), folder.to_owned());
    Ok(run_blocking("write the marks of the VM", move || marks(&document, &folder)).await??)
}

/// What the keeper looks for beside the files. Blocks.
fn marks(document: &Document, folder: &Path) -> Result<(), FileError> {
    let image = document.image.as_ref().map(|image| image.id.to_string());
    for file in &document.files {
        if let (Kept::Disk { name, over_image: true, .. }, Some(image)) = (&file.kept, &image) {
            write_whole(&folder.join(format!("{name}.image")), image.as_bytes())?;
        }
    }
    let added = document.added();
    if !added.is_empty() {
        let text = serde_json::to_vec(&added).map_err(|error| at("write", folder)(error.into()))?;
        write_whole(&folder.join(ADDED), &text)?;
    }
    if document.secure_boot {
        write_whole(&folder.join("efi-secure"), b"")?;
    }
    std::fs::File::open(folder).and_then(|folder| folder.sync_all()).map_err(at("write", folder))
}

impl File {
    fn content(&self) -> nacelle_image::Content {
        nacelle_image::Content { digest: self.digest, size: self.size }
    }
}
