//! Lists and inspects the files in a VM's directory. The VM's own processes write to the directory: only regular files are read,
//! and their contents are untrusted. Blocks on files.

use super::TransferError;
use super::document::FileKind;
use nacelle_base::files::{FileError, at};
use nacelle_base::jailed::JailedDir;
use nacelle_base::retry::retry_interrupted;
use nacelle_keeper::qcow2::{self, Format};
use nacelle_keeper::{HOTPLUG_LIST, HotplugDisk, parse_hotplug_list};
use nacelle_model::record::VmRecord;
use std::collections::BTreeSet;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The largest list of hot-plugged disks in bytes.
const MAX_ADDED_LIST: u64 = 64 << 10;
/// The largest file with the id of a backing image, in bytes.
const MAX_IMAGE_ID: u64 = 128;
/// The largest part of a qcow2 snapshot table that is read, in bytes.
const MAX_SNAPSHOT_TABLE: u64 = 1 << 20;

/// The files of a VM before they are read.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct VmFiles {
    /// The directory.
    pub dir: JailedDir,
    /// The files' purposes and names.
    pub files: Vec<(FileKind, String)>,
    /// The firmware's variables contain enrolled keys.
    pub secure_boot: bool,
    /// Names of the snapshots in the first disk.
    pub snapshots: Vec<String>,
}

/// Opens a listed file and returns its size. Blocks.
pub(super) fn open_file(dir: &JailedDir, name: &str) -> Result<(std::fs::File, u64), FileError> {
    let failed = |error| at("open", Path::new(name))(error);
    let file = dir.open(name)?.ok_or_else(|| failed(std::io::ErrorKind::NotFound.into()))?;
    let length = file.metadata().map_err(failed)?.len();
    Ok((file, length))
}

/// Lists the files in a VM's directory, sorted by name; disks that the next run would create anew are left out. Blocks.
pub(super) fn list_files(dir: &JailedDir, record: &VmRecord) -> Result<VmFiles, TransferError> {
    // The VM's own processes write to the directory: only regular files are listed.
    let names: BTreeSet<String> = dir.files()?.into_iter().collect();
    let added = read_added_disks(dir)?;
    let (mut files, mut snapshots) = (Vec::new(), Vec::new());
    for name in &names {
        let reject = |disk: &str| {
            let disk = disk.to_owned();
            move |rule| TransferError::Disk { disk, rule }
        };
        let kind = match name.as_str() {
            "efi-variables" if names.contains("efi-variables.qcow2") => FileKind::FirmwareVariables {},
            "efi-variables.qcow2" if names.contains("efi-variables") => {
                FileKind::FirmwareWritten { bytes: inspect_in(dir, name)?.map_err(reject("efi-variables"))?.0 }
            }
            "efi-variables.qcow2" => continue,
            name => {
                if let Some(disk) = added.iter().find(|disk| disk.file() == name).cloned() {
                    let HotplugDisk { name: disk, slot, bytes } = disk;
                    files.push((FileKind::AddedDisk { name: disk, slot, bytes }, name.to_owned()));
                    continue;
                }
                let disk = name.strip_suffix(".qcow2").filter(|disk| !disk.contains('.'));
                let Some(disk) = disk else { continue };
                let over_image = match backing_image(dir, &format!("{disk}.image"))? {
                    Some(image) if record.image.is_some_and(|first| first.to_string() == image) => true,
                    Some(image) if record.more_images.iter().any(|other| other.to_string() == image) => {
                        let rule = "its backing image is not that of the VM's first disk: VMs with several backing images cannot be exported";
                        return Err(reject(disk)(rule));
                    }
                    // The backing image is that of an earlier run.
                    Some(_other) => continue,
                    None => false,
                };
                let (bytes, found) = inspect_in(dir, name)?.map_err(reject(disk))?;
                // QEMU lists the snapshots of the first disk.
                if snapshots.is_empty() {
                    snapshots = found;
                }
                FileKind::Disk { name: disk.to_owned(), bytes, over_image }
            }
        };
        files.push((kind, name.clone()));
    }
    Ok(VmFiles { dir: dir.clone(), files, secure_boot: names.contains("efi-secure"), snapshots })
}

/// Returns the hot-plugged disks.
fn read_added_disks(dir: &JailedDir) -> Result<Vec<HotplugDisk>, TransferError> {
    let Some(text) = dir.read(HOTPLUG_LIST, MAX_ADDED_LIST)? else { return Ok(Vec::new()) };
    let rule = "the list of added disks is invalid";
    parse_hotplug_list(&text).map_err(|_error| TransferError::Disk { disk: HOTPLUG_LIST.to_owned(), rule })
}

/// Returns the backing image of a disk, if it has one.
fn backing_image(dir: &JailedDir, name: &str) -> Result<Option<String>, FileError> {
    Ok(dir.read(name, MAX_IMAGE_ID)?.map(|text| String::from_utf8_lossy(&text).into_owned()))
}

/// Calls [`inspect_qcow2`] for a listed file.
fn inspect_in(dir: &JailedDir, name: &str) -> Result<Result<(u64, Vec<String>), qcow2::Refusal>, FileError> {
    inspect_qcow2(&open_file(dir, name)?.0, Path::new(name))
}

/// Returns the virtual size of a qcow2 disk and the names of its snapshots, or why it is rejected. `path` is for errors. Blocks.
pub(super) fn inspect_qcow2(
    file: &std::fs::File,
    path: &Path,
) -> Result<Result<(u64, Vec<String>), qcow2::Refusal>, FileError> {
    let head = read_at_most(file, 0, qcow2::HEADER as u64).map_err(at("read", path))?;
    let size = match qcow2::detect_format(&head) {
        Ok(Format::Qcow2 { size }) => size,
        Ok(Format::Raw) => return Ok(Err("a qcow2 file is expected")),
        Err(rule) => return Ok(Err(rule)),
    };
    let (table, count) = qcow2::snapshot_table(&head);
    let table = read_at_most(file, table, if count == 0 { 0 } else { MAX_SNAPSHOT_TABLE }).map_err(at("read", path))?;
    Ok(Ok((size, qcow2::snapshot_names(&table, count))))
}

/// Reads at most `max` bytes at an offset.
fn read_at_most(file: &std::fs::File, from: u64, max: u64) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(max).unwrap_or_default()];
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
