//! Exports a VM: compresses its files one by one next to the VMs' directories, sends each and removes the compressed copy, and
//! finally sends the document. A stopped VM is locked during the export and does not change; a running one is copied first and
//! continues to run.

use super::document::{Document, File, Image, Kept, MACHINE};
use super::{Place, Progress, TransferError, WorkDirectory, live};
use crate::lifecycle::{Node, now};
use nacelle_base::files::{FileError, at, remove_if_there};
use nacelle_base::jailed::JailedDir;
use nacelle_base::retry::retry_interrupted;
use nacelle_base::task::run_blocking;
use nacelle_image::{Artifacts, pack};
use nacelle_keeper::qcow2::{self, Format};
use nacelle_keeper::{HOTPLUG_LIST, HotplugDisk, parse_hotplug_list};
use nacelle_model::digest::Digest;
use nacelle_model::record::VmRecord;
use std::collections::BTreeSet;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The largest list of hot-plugged disks in bytes.
const LIST: u64 = 64 << 10;
/// The largest mark file with an image id in bytes.
const MARK: u64 = 128;
/// The largest part of a qcow2 snapshot table that is read, in bytes.
const TABLE: u64 = 1 << 20;

/// The result of an export.
#[derive(Debug)]
pub struct Exported {
    /// The artifact's digest.
    pub digest: Digest,
    /// The snapshot that holds the memory of a running VM.
    pub snapshot: Option<String>,
}

/// The files of a VM before they are read.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Listed {
    /// The directory.
    pub dir: JailedDir,
    /// The files' purposes and names.
    pub files: Vec<(Kept, String)>,
    pub secure_boot: bool,
    pub snapshots: Vec<String>,
}

/// Exports a VM, which runs in this container, or is stopped. Dropping the future cancels the export and leaves nothing on this
/// node.
pub async fn export(
    node: &Node,
    vm: &str,
    container: Option<String>,
    place: Place,
    progress: &Progress,
) -> Result<Exported, TransferError> {
    let parts = node.parts();
    let artifacts = parts.images.artifacts(&place.name, place.auth, place.plain_http)?;
    let (record, ours) = match container {
        None => node.lend_vm(vm, "exported")?,
        // The VM's pod holds it; the lock keeps a second export away.
        Some(_) => (parts.vms.known(vm)?, parts.vms.take(vm, "exported")?),
    };
    let work = parts.vms.work_directory();
    let work = run_blocking("create a work directory", move || WorkDirectory::make(work)).await??;
    let done = async {
        let snapshot = container.is_some().then(|| format!("exported-{}", now() / 1_000_000_000));
        let listed = match (container, &snapshot) {
            (Some(container), Some(snapshot)) => {
                progress.begin("copying the machine as it is".to_owned(), 0);
                live::copy(node, container, &record, snapshot, &work).await?
            }
            _ => {
                let (dir, of) = (JailedDir::new(parts.vms.directory(&record)), record.clone());
                run_blocking("list the files of the VM", move || list(&dir, &of)).await??
            }
        };
        // Copied files need no lock any more; a VM whose own files are sent must not change.
        let ours = Some(ours).filter(|_| snapshot.is_none());
        let digest = send(node, &record, listed, &work, &artifacts, progress).await?;
        drop(ours);
        Ok(Exported { digest, snapshot })
    };
    let done = done.await;
    work.remove().await;
    if let Ok(Exported { digest, .. }) = &done {
        tracing::info!(machine = vm, artifact = artifacts.name(), %digest, "exported");
    }
    done
}

async fn send(
    node: &Node,
    record: &VmRecord,
    listed: Listed,
    work: &WorkDirectory,
    artifacts: &Artifacts,
    progress: &Progress,
) -> Result<Digest, TransferError> {
    let Listed { dir, files, secure_boot, snapshots } = listed;
    let (mut described, mut layers) = (Vec::new(), Vec::new());
    for (n, (kept, name)) in files.into_iter().enumerate() {
        let (to, moved) = (work.path().join(format!("{n}.zst")), progress.moved.clone());
        let (from, of) = (dir.clone(), name.clone());
        let (source, size) = run_blocking("open a file of the VM", move || opened(&from, &of)).await??;
        progress.begin(format!("compressing {}", kept.what()), size);
        let packed =
            run_blocking("compress a file of the VM", move || pack(source, Path::new(&name), &to, &moved)).await??;
        progress.begin(format!("sending {}", kept.what()), packed.blob.size);
        artifacts.put(&packed, &progress.moved).await?;
        let sent = packed.path;
        run_blocking("remove a file that was sent", move || remove_if_there(&sent)).await??;
        layers.push((packed.blob, format!("{}.zst", kept.file())));
        described.push(File { kept, size: packed.content.size, digest: packed.content.digest });
    }
    let (namespace, name) = record.id.split_once('/').unwrap_or_default();
    let over = described.iter().any(|file| matches!(file.kept, Kept::Disk { over_image: true, .. }));
    let image = record.image.filter(|_| over).map(|id| Image { id, names: names(node, id) });
    let document = Document {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        uuid: record.uuid.clone(),
        mac: record.mac.map(|byte| format!("{byte:02x}")).join(":"),
        created_at: record.created_at,
        image,
        secure_boot,
        snapshots,
        files: described,
    };
    let wrong = |source| TransferError::Document { name: artifacts.name(), source };
    let document = document.write().map_err(wrong)?;
    progress.begin("sending what it is".to_owned(), 0);
    Ok(artifacts.publish(&MACHINE, document, layers).await?)
}

/// Returns the image's names in registries: those with a digest first.
fn names(node: &Node, id: Digest) -> Vec<String> {
    let known = node.parts().images.list().into_iter().find(|image| image.id == id);
    known.into_iter().flat_map(|image| image.repo_digests.into_iter().chain(image.repo_tags)).take(8).collect()
}

/// Opens a listed file and returns its size. Blocks.
pub(super) fn opened(dir: &JailedDir, name: &str) -> Result<(std::fs::File, u64), FileError> {
    let lost = |error| at("open", Path::new(name))(error);
    let file = dir.open(name)?.ok_or_else(|| lost(std::io::ErrorKind::NotFound.into()))?;
    let length = file.metadata().map_err(lost)?.len();
    Ok((file, length))
}

/// Lists the files in a VM's directory, sorted by name; disks that the next run would create anew are left out. Blocks.
pub(super) fn list(dir: &JailedDir, record: &VmRecord) -> Result<Listed, TransferError> {
    // The VM's own processes write to the directory: only regular files are listed.
    let names: BTreeSet<String> = dir.files()?.into_iter().collect();
    let added = added(dir)?;
    let (mut files, mut snapshots) = (Vec::new(), Vec::new());
    for name in &names {
        let refused = |disk: &str| {
            let disk = disk.to_owned();
            move |rule| TransferError::Disk { disk, rule }
        };
        let kept = match name.as_str() {
            "efi-variables" if names.contains("efi-variables.qcow2") => Kept::FirmwareVariables {},
            "efi-variables.qcow2" if names.contains("efi-variables") => {
                Kept::FirmwareWritten { bytes: look_at(dir, name)?.map_err(refused("efi-variables"))?.0 }
            }
            "efi-variables.qcow2" => continue,
            name => {
                if let Some(disk) = added.iter().find(|disk| disk.file() == name).cloned() {
                    let HotplugDisk { name: disk, slot: place, bytes } = disk;
                    files.push((Kept::AddedDisk { name: disk, place, bytes }, name.to_owned()));
                    continue;
                }
                let disk = name.strip_suffix(".qcow2").filter(|disk| !disk.contains('.'));
                let Some(disk) = disk else { continue };
                let over_image = match mark(dir, &format!("{disk}.image"))? {
                    Some(of) if record.image.is_some_and(|image| image.to_string() == of) => true,
                    Some(of) if record.more_images.iter().any(|image| image.to_string() == of) => {
                        let rule = "it lies over another image than the machine's first disk; of such a machine there is no export";
                        return Err(refused(disk)(rule));
                    }
                    // The disk lies over an image of an earlier run.
                    Some(_other) => continue,
                    None => false,
                };
                let (bytes, found) = look_at(dir, name)?.map_err(refused(disk))?;
                // QEMU lists the snapshots of the first disk.
                if snapshots.is_empty() {
                    snapshots = found;
                }
                Kept::Disk { name: disk.to_owned(), bytes, over_image }
            }
        };
        files.push((kept, name.clone()));
    }
    Ok(Listed { dir: dir.clone(), files, secure_boot: names.contains("efi-secure"), snapshots })
}

/// Returns the hot-plugged disks.
fn added(dir: &JailedDir) -> Result<Vec<HotplugDisk>, TransferError> {
    let Some(text) = dir.read(HOTPLUG_LIST, LIST)? else { return Ok(Vec::new()) };
    let rule = "the list of disks that were added cannot be read";
    parse_hotplug_list(&text).map_err(|_told| TransferError::Disk { disk: HOTPLUG_LIST.to_owned(), rule })
}

/// Returns the backing image of a disk, if it has a mark.
fn mark(dir: &JailedDir, name: &str) -> Result<Option<String>, FileError> {
    Ok(dir.read(name, MARK)?.map(|text| String::from_utf8_lossy(&text).into_owned()))
}

/// Calls [`look`] for a listed file.
fn look_at(dir: &JailedDir, name: &str) -> Result<Result<(u64, Vec<String>), qcow2::Refusal>, FileError> {
    look(&opened(dir, name)?.0, Path::new(name))
}

/// Returns the virtual size of a qcow2 disk and the names of its snapshots, or why it is rejected. `path` is for errors. Blocks.
pub(super) fn look(file: &std::fs::File, path: &Path) -> Result<Result<(u64, Vec<String>), qcow2::Refusal>, FileError> {
    let head = piece(file, 0, qcow2::HEADER as u64).map_err(at("read", path))?;
    let size = match qcow2::detect_format(&head) {
        Ok(Format::Qcow2 { size }) => size,
        Ok(Format::Raw) => return Ok(Err("a qcow2 file is expected")),
        Err(rule) => return Ok(Err(rule)),
    };
    let (table, count) = qcow2::snapshot_table(&head);
    let table = piece(file, table, if count == 0 { 0 } else { TABLE }).map_err(at("read", path))?;
    Ok(Ok((size, qcow2::snapshot_names(&table, count))))
}

/// Reads at most `most` bytes at an offset.
fn piece(file: &std::fs::File, from: u64, most: u64) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(most).unwrap_or_default()];
    let mut filled = 0;
    while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match retry_interrupted(|| file.read_at(rest, from.saturating_add(filled as u64)))? {
            0 => break,
            count => filled += count,
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}
