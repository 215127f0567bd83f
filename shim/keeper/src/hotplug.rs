//! Hot-plugs and unplugs disks of a VM in addition to those of its specification. They are empty at first, and persist until they
//! are removed or the VM is. The commands are those of QEMU's QMP reference (blockdev-add, device_add, device_del); the ports are
//! described in its docs/pcie.txt.

use crate::disk;
use crate::error::KeeperError;
use crate::qcow2::{self, MAX_SIZE};
use crate::qemu;
use crate::qemu_process::QemuProcess;
use crate::vm::PodVm;
use nacelle_base::files::{remove_if_there, write_whole};
use nacelle_base::json;
use nacelle_base::task::run_blocking;
use nacelle_model::machine::Board;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The maximum number of hot-plugged disks of a VM.
pub const SLOTS: u8 = 8;
/// The list of the hot-plugged disks, in the directory of their files.
pub const HOTPLUG_LIST: &str = "added.json";
/// The maximum size of the list in bytes.
const MAX_LIST_BYTES: u64 = 64 << 10;
/// The maximum length of a name: a serial number of virtio has 20 bytes.
const MAX_NAME: usize = 20;
/// Disk sizes are multiples of this number of bytes.
const SECTOR: u64 = 512;
/// The time that the guest has to release a disk.
const UNPLUG_TIMEOUT: Duration = Duration::from_secs(30);
/// The interval of the checks whether the guest has released a disk.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// A hot-plugged disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HotplugDisk {
    /// The disk's name, which is also its serial number.
    pub name: String,
    /// The disk's slot, less than [`SLOTS`].
    #[serde(rename = "place")]
    pub slot: u8,
    /// The disk's size in bytes.
    pub bytes: u64,
}

impl HotplugDisk {
    /// Returns the name of the disk's file. No disk of a specification has a dot in its name.
    pub fn file(&self) -> String {
        format!("{}.added.qcow2", self.name)
    }
}

/// The hot-plugged disks of a VM.
#[derive(Debug)]
pub struct HotplugDisks {
    directory: PathBuf,
    all: Vec<HotplugDisk>,
}

impl HotplugDisks {
    /// Loads the hot-plugged disks of a VM that has their files in this directory. Blocks.
    pub fn load(directory: &Path) -> Result<HotplugDisks, KeeperError> {
        let path = directory.join(HOTPLUG_LIST);
        let mut text = Vec::new();
        match File::open(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            opened => {
                let file = opened.map_err(KeeperError::file("open", &path))?;
                file.take(MAX_LIST_BYTES).read_to_end(&mut text).map_err(KeeperError::file("read", &path))?;
            }
        }
        let all = if text.is_empty() { Vec::new() } else { parse_hotplug_list(&text)? };
        let disks = HotplugDisks { directory: directory.to_owned(), all };
        for disk in &disks.all {
            disk::create_empty_disk(&disk.name, &disks.file(disk), disk.bytes)?;
        }
        Ok(disks)
    }

    /// Returns the disks and their files for QEMU's command line.
    pub fn with_files(&self) -> Vec<(HotplugDisk, PathBuf)> {
        self.all.iter().map(|disk| (disk.clone(), self.file(disk))).collect()
    }

    fn file(&self, disk: &HotplugDisk) -> PathBuf {
        self.directory.join(disk.file())
    }

    async fn save(&self) -> Result<(), KeeperError> {
        let (path, text) = (self.directory.join(HOTPLUG_LIST), serde_json::to_vec(&self.all).unwrap_or_default());
        run_blocking("save the list of hot-plugged disks", move || write_whole(&path, &text))
            .await?
            .map_err(KeeperError::StateFile)
    }
}

/// Parses the list, which this program has written.
pub fn parse_hotplug_list(text: &[u8]) -> Result<Vec<HotplugDisk>, KeeperError> {
    let all: Vec<HotplugDisk> = json::read(text).map_err(|source| KeeperError::InvalidDocument { source })?;
    let is_valid = |(n, disk): (usize, &HotplugDisk)| {
        let others = all.iter().take(n);
        is_name(&disk.name)
            && disk.slot < SLOTS
            && (1..=MAX_SIZE).contains(&disk.bytes)
            && others.into_iter().all(|other| other.name != disk.name && other.slot != disk.slot)
    };
    if all.iter().enumerate().all(is_valid) {
        return Ok(all);
    }
    let value = String::from_utf8_lossy(text).chars().take(200).collect();
    Err(KeeperError::InvalidField { field: HOTPLUG_LIST, value, rule: "the file is damaged: remove it" })
}

fn is_name(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(plain)
}

/// Parses NAME=SIZE, with a size in bytes or with Ki, Mi, Gi or Ti.
fn parse_volume(volume: &str) -> Result<(String, u64), KeeperError> {
    let invalid = |rule| KeeperError::InvalidField { field: "volume", value: format!("{volume:?}"), rule };
    let (name, size) = volume.split_once('=').ok_or_else(|| invalid("NAME=SIZE is expected, as data=1Gi"))?;
    if !is_name(name) {
        return Err(invalid("a name of 1 to 20 lower-case letters, digits and '-' is expected"));
    }
    let digits = size.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match size.get(digits.len()..) {
        Some("") => Some(1u64),
        Some("Ki") => Some(1 << 10),
        Some("Mi") => Some(1 << 20),
        Some("Gi") => Some(1 << 30),
        Some("Ti") => Some(1 << 40),
        _ => None,
    };
    let plain = digits.bytes().all(|b| b.is_ascii_digit());
    let number = digits.parse::<u64>().ok().filter(|_| plain);
    let bytes = number.zip(unit).and_then(|(number, unit)| number.checked_mul(unit));
    match bytes {
        Some(bytes) if (1..=MAX_SIZE).contains(&bytes) && bytes % SECTOR == 0 => Ok((name.to_owned(), bytes)),
        _ => Err(invalid("a multiple of 512 bytes is expected, at most 4Ti")),
    }
}

/// Checks whether NAME=SIZE is a valid disk.
pub fn check_volume(volume: &str) -> Result<(), KeeperError> {
    parse_volume(volume).map(drop)
}

/// Adds an empty disk. Succeeds if the disk exists with this size.
pub async fn add(vm: Arc<PodVm>, volume: String) -> Result<(), KeeperError> {
    let (name, bytes) = parse_volume(&volume)?;
    if vm.document.board == Board::Microvm {
        let hint = "its board has no hot-plug slots; use q35 or pc";
        return Err(KeeperError::Unsupported { what: "hot-plug disks", hint });
    }
    let invalid = |rule| KeeperError::InvalidField { field: "volume", value: format!("{volume:?}"), rule };
    if vm.document.disks.iter().any(|disk| disk.name == name) {
        return Err(invalid("a disk of the specification has this name"));
    }
    let mut disks = vm.hotplug.lock().await;
    match disks.all.iter().find(|disk| disk.name == name) {
        Some(disk) if disk.bytes == bytes => return Ok(()),
        Some(_) => return Err(invalid("a disk of this name exists with a different size")),
        None => {}
    }
    let free = (0..SLOTS).find(|slot| disks.all.iter().all(|disk| disk.slot != *slot));
    let slot = free.ok_or_else(|| invalid("the VM has no free hot-plug slot (maximum 8): remove a disk first"))?;
    let disk = HotplugDisk { name, slot, bytes };
    let file = disks.file(&disk);
    let (name, new_file) = (disk.name.clone(), file.clone());
    let create = move || {
        remove_if_there(&new_file)
            .map_err(KeeperError::StateFile)
            .and_then(|()| disk::create_empty_disk(&name, &new_file, bytes))
    };
    run_blocking("create a disk", create).await??;
    // Recorded first: a recorded disk exists at the next start, even if this attempt fails.
    disks.all.push(disk.clone());
    let result = match (disks.save().await, vm.qemu()) {
        (Err(error), _) => Err(error),
        (Ok(()), Ok(qemu)) => plug(&qemu, vm.document.board, &disk, &file).await,
        // The VM is stopped.
        (Ok(()), Err(_)) => Ok(()),
    };
    if result.is_err() {
        disks.all.retain(|other| other.name != disk.name);
        // The first error is returned.
        let _ = disks.save().await;
        let _ = run_blocking("remove a disk", move || remove_if_there(&file)).await;
    }
    result
}

/// Removes a disk and all data on it. Succeeds if there is no such disk.
pub async fn remove(vm: Arc<PodVm>, name: String) -> Result<(), KeeperError> {
    if vm.document.disks.iter().any(|disk| disk.name == name) {
        let hint = "it is part of the VM's specification";
        return Err(KeeperError::Unsupported { what: "remove this disk", hint });
    }
    let mut disks = vm.hotplug.lock().await;
    let Some(disk) = disks.all.iter().find(|disk| disk.name == name).cloned() else { return Ok(()) };
    let file = disks.file(&disk);
    let path = file.clone();
    if run_blocking("list the snapshots of a disk", move || count_snapshots(&path)).await? > 0 {
        return Err(KeeperError::WrongState {
            what: "remove the disk",
            state: "has it in snapshots: delete those first",
        });
    }
    if let Ok(qemu) = vm.qemu() {
        match unplug(&qemu, &disk).await {
            // The VM has ended meanwhile.
            Ok(()) | Err(KeeperError::Disconnected { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    disks.all.retain(|other| other.name != disk.name);
    disks.save().await?;
    run_blocking("remove a disk", move || remove_if_there(&file)).await?.map_err(KeeperError::StateFile)
}

/// Returns the hot-plugged disks as JSON.
pub async fn list(vm: &PodVm) -> Value {
    let disks = vm.hotplug.lock().await;
    disks.all.iter().map(|disk| json!({ "name": disk.name, "bytes": disk.bytes })).collect()
}

/// Returns the number of snapshots in a disk's file. Blocks.
fn count_snapshots(file: &Path) -> u32 {
    let mut head = Vec::new();
    let read = File::open(file).and_then(|file| file.take(qcow2::HEADER as u64).read_to_end(&mut head));
    read.map_or(0, |_| qcow2::snapshots(&head))
}

/// Plugs a disk. The guest finds it at once, or when it is resumed.
async fn plug(qemu: &QemuProcess, board: Board, disk: &HotplugDisk, file: &Path) -> Result<(), KeeperError> {
    let [inner, whole] = qemu::block_nodes(disk);
    let protocol = json!({
        "driver": "file", "node-name": inner, "filename": file, "discard": "unmap", "auto-read-only": false,
    });
    qemu.execute("blockdev-add", protocol).await?;
    let format = json!({ "driver": "qcow2", "node-name": whole, "file": inner, "discard": "unmap" });
    let mut result = qemu.execute("blockdev-add", format).await;
    if result.is_ok() {
        let mut device = json!({
            "driver": "virtio-blk-pci", "id": qemu::device_id(disk), "drive": whole, "serial": disk.name,
        });
        if let Some(port) = qemu::root_port(board, disk.slot) {
            device["bus"] = json!(port);
        }
        result = qemu.execute("device_add", device).await;
    }
    if result.is_err() {
        close_file(qemu, disk).await;
    }
    result.map(drop)
}

/// Requests the guest to release the disk, and waits until it has.
async fn unplug(qemu: &QemuProcess, disk: &HotplugDisk) -> Result<(), KeeperError> {
    let device = qemu::device_id(disk);
    let until = Instant::now() + UNPLUG_TIMEOUT;
    if is_plugged(qemu, &device).await? {
        match qemu.execute("device_del", json!({ "id": device })).await {
            // An earlier request is pending.
            Err(KeeperError::Rejected { message, .. }) if message.contains("in the process of unplug") => {}
            result => drop(result?),
        }
    }
    while is_plugged(qemu, &device).await? {
        if Instant::now() > until {
            let command = format!("the release of disk {} (it may still release it later)", disk.name);
            return Err(KeeperError::Timeout { peer: "the guest", command, limit: UNPLUG_TIMEOUT });
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    close_file(qemu, disk).await;
    Ok(())
}

async fn is_plugged(qemu: &QemuProcess, device: &str) -> Result<bool, KeeperError> {
    let all = qemu.execute("qom-list", json!({ "path": "/machine/peripheral" })).await?;
    let named = |entry: &Value| entry.get("name").and_then(Value::as_str) == Some(device);
    Ok(all.as_array().into_iter().flatten().any(named))
}

/// Makes QEMU close the disk's file. An error means that QEMU does not have it, which is just as good.
async fn close_file(qemu: &QemuProcess, disk: &HotplugDisk) {
    let [inner, whole] = qemu::block_nodes(disk);
    for node in [whole, inner] {
        if let Err(error) = qemu.execute("blockdev-del", json!({ "node-name": node })).await {
            tracing::debug!(disk = disk.name, "{error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_has_a_name_and_a_size() {
        for (volume, bytes) in
            [("data=1Gi", 1 << 30), ("a-1=512", 512), ("x=4Ti", 4 << 40), ("twenty-letters-long0=1Mi", 1 << 20)]
        {
            assert_eq!(parse_volume(volume).unwrap().1, bytes, "{volume}");
        }
        for volume in [
            "",
            "data",
            "=1Gi",
            "data=",
            "data=Gi",
            "data=1G",
            "data=1.5Gi",
            "data=+1Gi",
            "data=-1",
            "data=0",
            "data=513",
            "Data=1Gi",
            "da.ta=1Gi",
            "../x=1Gi",
            "data=5Ti",
            "data=99999999999999999999",
            "data=18446744073709551615Ti",
            "twenty-one-letters-xy=1Mi",
        ] {
            assert!(parse_volume(volume).is_err(), "{volume}");
        }
    }

    #[test]
    fn the_list_of_hotplugged_disks_is_validated() {
        let directory = tempfile::tempdir().unwrap();
        assert!(HotplugDisks::load(directory.path()).unwrap().all.is_empty());
        let disk = |name: &str, slot| HotplugDisk { name: name.into(), slot, bytes: 1 << 20 };
        let write = |all: &[HotplugDisk]| {
            std::fs::write(directory.path().join(HOTPLUG_LIST), serde_json::to_vec(all).unwrap()).unwrap();
            HotplugDisks::load(directory.path())
        };
        let disks = write(&[disk("a", 0), disk("b", 3)]).unwrap();
        // A missing file is created again.
        assert!(disks.with_files().iter().all(|(_, file)| file.exists()));
        for invalid in [
            [disk("a", 0), disk("a", 1)],
            [disk("a", 0), disk("b", 0)],
            [disk("a", 0), disk("b", SLOTS)],
            [disk("a", 0), disk("../b", 1)],
        ] {
            assert!(write(&invalid).is_err(), "{invalid:?}");
        }
        let stored = r#"[{"name":"a","place":7,"bytes":512}]"#;
        assert_eq!(parse_hotplug_list(stored.as_bytes()).unwrap()[0].slot, 7, "the stored name of the field is kept");
        std::fs::write(directory.path().join(HOTPLUG_LIST), "{}").unwrap();
        assert!(HotplugDisks::load(directory.path()).is_err());
    }
}
