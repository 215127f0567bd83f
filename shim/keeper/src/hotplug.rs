//! Hot-plugs and unplugs disks of a VM while it runs, by the commands of QEMU's QMP reference (blockdev-add, device_add, device_del);
//! the ports are described in its docs/pcie.txt. `hotplug_list` has the list of these disks.

use crate::disk;
use crate::error::KeeperError;
use crate::hotplug_list::{HotplugDisk, SLOTS, is_name};
use crate::qcow2::{self, MAX_SIZE};
use crate::qemu;
use crate::qemu_process::QemuProcess;
use crate::vm::PodVm;
use nacelle_base::files::remove_if_there;
use nacelle_base::task::run_blocking;
use nacelle_model::machine::Board;
use serde_json::{Value, json};
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Disk sizes are multiples of this number of bytes.
const SECTOR: u64 = 512;
/// The time that the guest has to release a disk.
const UNPLUG_TIMEOUT: Duration = Duration::from_secs(30);
/// The interval of the checks whether the guest has released a disk.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

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
}
