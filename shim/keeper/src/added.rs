//! Hot-plugs and unplugs disks of a VM in addition to those of its specification. They are empty at first, and persist until they
//! are removed or the VM is. The commands are those of QEMU's QMP reference (blockdev-add, device_add, device_del); the ports are
//! described in its docs/pcie.txt.

use crate::disk;
use crate::error::KeeperError;
use crate::live::Live;
use crate::machine::Machine;
use crate::qcow2::{self, MAX_SIZE};
use crate::qemu;
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

/// The maximum number of added disks of a VM.
pub const PLACES: u8 = 8;
/// The list of the added disks, in the directory of their files.
pub const LIST: &str = "added.json";
/// The maximum size of the list in bytes.
const LIST_BYTES: u64 = 64 << 10;
/// The maximum length of a name: a serial number of virtio has 20 bytes.
const MAX_NAME: usize = 20;
/// Disk sizes are multiples of this number of bytes.
const SECTOR: u64 = 512;
/// The time that the guest has to release a disk.
const LETS_GO: Duration = Duration::from_secs(30);
/// The interval of the checks whether the guest has released a disk.
const LOOK: Duration = Duration::from_millis(100);

/// An added disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Added {
    /// The disk's name, which is also its serial number.
    pub name: String,
    /// The disk's slot, less than [`PLACES`].
    pub place: u8,
    /// The disk's size in bytes.
    pub bytes: u64,
}

impl Added {
    /// Returns the name of the disk's file. No disk of a specification has a dot in its name.
    pub fn file(&self) -> String {
        format!("{}.added.qcow2", self.name)
    }
}

/// The added disks of a VM.
#[derive(Debug)]
pub struct Disks {
    directory: PathBuf,
    all: Vec<Added>,
}

impl Disks {
    /// Loads the added disks of a VM that has their files in this directory. Blocks.
    pub fn load(directory: &Path) -> Result<Disks, KeeperError> {
        let path = directory.join(LIST);
        let mut text = Vec::new();
        match File::open(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            opened => {
                let file = opened.map_err(KeeperError::file("open", &path))?;
                file.take(LIST_BYTES).read_to_end(&mut text).map_err(KeeperError::file("read", &path))?;
            }
        }
        let all = if text.is_empty() { Vec::new() } else { read(&text)? };
        let disks = Disks { directory: directory.to_owned(), all };
        for disk in &disks.all {
            disk::empty(&disk.name, &disks.file(disk), disk.bytes)?;
        }
        Ok(disks)
    }

    /// Returns the disks and their files for QEMU's command line.
    pub fn known(&self) -> Vec<(Added, PathBuf)> {
        self.all.iter().map(|disk| (disk.clone(), self.file(disk))).collect()
    }

    fn file(&self, disk: &Added) -> PathBuf {
        self.directory.join(disk.file())
    }

    async fn save(&self) -> Result<(), KeeperError> {
        let (path, text) = (self.directory.join(LIST), serde_json::to_vec(&self.all).unwrap_or_default());
        run_blocking("save the list of added disks", move || write_whole(&path, &text))
            .await?
            .map_err(KeeperError::Mark)
    }
}

/// Parses the list, which this program has written.
pub fn read(text: &[u8]) -> Result<Vec<Added>, KeeperError> {
    let all: Vec<Added> = json::read(text).map_err(|source| KeeperError::Document { source })?;
    let right = |(n, disk): (usize, &Added)| {
        let others = all.iter().take(n);
        is_name(&disk.name)
            && disk.place < PLACES
            && (1..=MAX_SIZE).contains(&disk.bytes)
            && others.into_iter().all(|other| other.name != disk.name && other.place != disk.place)
    };
    if all.iter().enumerate().all(right) {
        return Ok(all);
    }
    let value = String::from_utf8_lossy(text).chars().take(200).collect();
    Err(KeeperError::Field { field: LIST, value, rule: "it was not written by a keeper: remove it" })
}

fn is_name(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(plain)
}

/// Parses NAME=SIZE, with a size in bytes or with Ki, Mi, Gi or Ti.
fn wanted(what: &str) -> Result<(String, u64), KeeperError> {
    let wrong = |rule| KeeperError::Field { field: "volume", value: format!("{what:?}"), rule };
    let (name, size) = what.split_once('=').ok_or_else(|| wrong("NAME=SIZE is expected, as data=1Gi"))?;
    if !is_name(name) {
        return Err(wrong("a name of 1 to 20 small letters, digits and '-' is expected"));
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
        _ => Err(wrong("a size of whole 512 bytes is expected, at most 4Ti")),
    }
}

/// Checks whether NAME=SIZE is a valid disk.
pub fn check(what: &str) -> Result<(), KeeperError> {
    wanted(what).map(drop)
}

/// Adds an empty disk. Succeeds if the disk exists with this size.
pub async fn add(machine: Arc<Machine>, what: String) -> Result<(), KeeperError> {
    let (name, bytes) = wanted(&what)?;
    if machine.document.board == Board::Microvm {
        let hint = "its board has no places but for those of its specification; q35 and pc have";
        return Err(KeeperError::Unsupported { what: "get disks while it is there", hint });
    }
    let taken = |rule| KeeperError::Field { field: "volume", value: format!("{what:?}"), rule };
    if machine.document.disks.iter().any(|disk| disk.name == name) {
        return Err(taken("a disk of the specification has this name"));
    }
    let mut disks = machine.added.lock().await;
    match disks.all.iter().find(|disk| disk.name == name) {
        Some(disk) if disk.bytes == bytes => return Ok(()),
        Some(_) => return Err(taken("a disk of this name is there, with another size")),
        None => {}
    }
    let free = (0..PLACES).find(|place| disks.all.iter().all(|disk| disk.place != *place));
    let place = free.ok_or_else(|| taken("eight disks were added, and there is place for no more: remove one"))?;
    let disk = Added { name, place, bytes };
    let file = disks.file(&disk);
    let (name, made) = (disk.name.clone(), file.clone());
    let create =
        move || remove_if_there(&made).map_err(KeeperError::Mark).and_then(|()| disk::empty(&name, &made, bytes));
    run_blocking("create a disk", create).await??;
    // Recorded first: a recorded disk exists at the next start, even if this attempt fails.
    disks.all.push(disk.clone());
    let done = match (disks.save().await, machine.live()) {
        (Err(error), _) => Err(error),
        (Ok(()), Ok(live)) => plug(&live, machine.document.board, &disk, &file).await,
        // The VM is stopped.
        (Ok(()), Err(_)) => Ok(()),
    };
    if done.is_err() {
        disks.all.retain(|other| other.name != disk.name);
        // The first error is returned.
        let _ = disks.save().await;
        let _ = run_blocking("remove a disk", move || remove_if_there(&file)).await;
    }
    done
}

/// Removes a disk and all data on it. Succeeds if there is no such disk.
pub async fn remove(machine: Arc<Machine>, name: String) -> Result<(), KeeperError> {
    if machine.document.disks.iter().any(|disk| disk.name == name) {
        let hint = "disks of the specification are there as long as it is";
        return Err(KeeperError::Unsupported { what: "lose this disk", hint });
    }
    let mut disks = machine.added.lock().await;
    let Some(disk) = disks.all.iter().find(|disk| disk.name == name).cloned() else { return Ok(()) };
    let file = disks.file(&disk);
    let looked = file.clone();
    if run_blocking("list the snapshots of a disk", move || snapshots(&looked)).await? > 0 {
        return Err(KeeperError::State { what: "remove the disk", state: "has it in snapshots: delete those first" });
    }
    if let Ok(live) = machine.live() {
        match unplug(&live, &disk).await {
            // The VM has ended meanwhile.
            Ok(()) | Err(KeeperError::Gone { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    disks.all.retain(|other| other.name != disk.name);
    disks.save().await?;
    run_blocking("remove a disk", move || remove_if_there(&file)).await?.map_err(KeeperError::Mark)
}

/// Returns the added disks as JSON.
pub async fn list(machine: &Machine) -> Value {
    let disks = machine.added.lock().await;
    disks.all.iter().map(|disk| json!({ "name": disk.name, "bytes": disk.bytes })).collect()
}

/// Returns the number of snapshots in a disk's file. Blocks.
fn snapshots(file: &Path) -> u32 {
    let mut head = Vec::new();
    let read = File::open(file).and_then(|file| file.take(qcow2::HEADER as u64).read_to_end(&mut head));
    read.map_or(0, |_| qcow2::snapshots(&head))
}

/// Plugs a disk. The guest finds it at once, or when it is resumed.
async fn plug(live: &Live, board: Board, disk: &Added, file: &Path) -> Result<(), KeeperError> {
    let [inner, whole] = qemu::nodes(disk);
    let protocol = json!({
        "driver": "file", "node-name": inner, "filename": file, "discard": "unmap", "auto-read-only": false,
    });
    live.ask("blockdev-add", protocol).await?;
    let format = json!({ "driver": "qcow2", "node-name": whole, "file": inner, "discard": "unmap" });
    let mut done = live.ask("blockdev-add", format).await;
    if done.is_ok() {
        let mut device = json!({
            "driver": "virtio-blk-pci", "id": qemu::device(disk), "drive": whole, "serial": disk.name,
        });
        if let Some(port) = qemu::port(board, disk.place) {
            device["bus"] = json!(port);
        }
        done = live.ask("device_add", device).await;
    }
    if done.is_err() {
        forget(live, disk).await;
    }
    done.map(drop)
}

/// Requests the guest to release the disk, and waits until it has.
async fn unplug(live: &Live, disk: &Added) -> Result<(), KeeperError> {
    let device = qemu::device(disk);
    let until = Instant::now() + LETS_GO;
    if there(live, &device).await? {
        match live.ask("device_del", json!({ "id": device })).await {
            // An earlier request is pending.
            Err(KeeperError::Refused { words, .. }) if words.contains("in the process of unplug") => {}
            asked => drop(asked?),
        }
    }
    while there(live, &device).await? {
        if Instant::now() > until {
            let command = format!("letting go of disk {}; it may still do so", disk.name);
            return Err(KeeperError::TooSlow { whom: "the guest", command, limit: LETS_GO });
        }
        tokio::time::sleep(LOOK).await;
    }
    forget(live, disk).await;
    Ok(())
}

async fn there(live: &Live, device: &str) -> Result<bool, KeeperError> {
    let all = live.ask("qom-list", json!({ "path": "/machine/peripheral" })).await?;
    let named = |entry: &Value| entry.get("name").and_then(Value::as_str) == Some(device);
    Ok(all.as_array().into_iter().flatten().any(named))
}

/// Makes QEMU close the disk's file. An error means that QEMU does not have it, which is just as good.
async fn forget(live: &Live, disk: &Added) {
    let [inner, whole] = qemu::nodes(disk);
    for node in [whole, inner] {
        if let Err(error) = live.ask("blockdev-del", json!({ "node-name": node })).await {
            tracing::debug!(disk = disk.name, "{error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_has_a_name_and_a_size() {
        for (what, bytes) in
            [("data=1Gi", 1 << 30), ("a-1=512", 512), ("x=4Ti", 4 << 40), ("twenty-letters-long0=1Mi", 1 << 20)]
        {
            assert_eq!(wanted(what).unwrap().1, bytes, "{what}");
        }
        for what in [
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
            assert!(wanted(what).is_err(), "{what}");
        }
    }

    #[test]
    fn a_list_is_what_was_written() {
        let directory = tempfile::tempdir().unwrap();
        assert!(Disks::load(directory.path()).unwrap().all.is_empty());
        let disk = |name: &str, place| Added { name: name.into(), place, bytes: 1 << 20 };
        let write = |all: &[Added]| {
            std::fs::write(directory.path().join(LIST), serde_json::to_vec(all).unwrap()).unwrap();
            Disks::load(directory.path())
        };
        let disks = write(&[disk("a", 0), disk("b", 3)]).unwrap();
        // A missing file is created again.
        assert!(disks.known().iter().all(|(_, file)| file.exists()));
        for wrong in [
            [disk("a", 0), disk("a", 1)],
            [disk("a", 0), disk("b", 0)],
            [disk("a", 0), disk("b", PLACES)],
            [disk("a", 0), disk("../b", 1)],
        ] {
            assert!(write(&wrong).is_err(), "{wrong:?}");
        }
        std::fs::write(directory.path().join(LIST), "{}").unwrap();
        assert!(Disks::load(directory.path()).is_err());
    }
}
