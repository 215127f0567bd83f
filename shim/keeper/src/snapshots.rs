//! Takes, loads and deletes snapshots of a VM: its disks, memory and devices at one moment, in the files of its disks (QEMU's QMP
//! reference: snapshot-save, snapshot-load and snapshot-delete).

use crate::error::KeeperError;
use crate::json_lines::printable;
use crate::vm::PodVm;
use serde_json::{Value, json};
use std::time::Duration;

/// The interval of job queries: the first, and the longest.
const POLL_INTERVAL: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(500));
/// The maximum length of a name.
const MAX_NAME: usize = 64;
/// The maximum number of snapshots of a VM: each is an entry in its disks' tables.
const MAX_SNAPSHOTS: usize = 100;

/// A snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmSnapshot {
    /// The snapshot's name.
    pub name: String,
    /// The time of the snapshot in seconds since 1970.
    pub taken_at: i64,
    /// The size of memory and devices in bytes.
    pub bytes: u64,
}

/// Takes a snapshot. The VM is paused meanwhile.
pub async fn save(vm: &PodVm, name: &str) -> Result<(), KeeperError> {
    let _lock = vm.lock_snapshots()?;
    let existing = list(vm).await?;
    if existing.iter().any(|snapshot| snapshot.name == name) {
        let rule = "a snapshot has this name: delete it, or choose another name";
        return Err(KeeperError::InvalidField { field: "name", value: name.to_owned(), rule });
    }
    if existing.len() >= MAX_SNAPSHOTS {
        let rule = "the VM has 100 snapshots: delete some";
        return Err(KeeperError::InvalidField { field: "name", value: name.to_owned(), rule });
    }
    run_job(vm, "snapshot-save", name, true).await
}

/// Loads a snapshot.
pub async fn load(vm: &PodVm, name: &str) -> Result<(), KeeperError> {
    let _lock = vm.lock_snapshots()?;
    require_snapshot(vm, name).await?;
    run_job(vm, "snapshot-load", name, true).await?;
    vm.qemu()?.credentials.forget().await;
    // The snapshot may be of a paused VM; the VM is resumed in any case.
    vm.execute("cont", Value::Null).await.map(drop)
}

/// Deletes a snapshot. Succeeds if there is no such snapshot.
pub async fn delete(vm: &PodVm, name: &str) -> Result<(), KeeperError> {
    let _lock = vm.lock_snapshots()?;
    if require_snapshot(vm, name).await.is_err() {
        return Ok(());
    }
    run_job(vm, "snapshot-delete", name, false).await
}

async fn require_snapshot(vm: &PodVm, name: &str) -> Result<(), KeeperError> {
    match list(vm).await?.iter().any(|snapshot| snapshot.name == name) {
        true => Ok(()),
        false => Err(KeeperError::NoSnapshot { name: printable(name) }),
    }
}

/// Returns all snapshots, the oldest first.
pub async fn list(vm: &PodVm) -> Result<Vec<VmSnapshot>, KeeperError> {
    let nodes = vm.execute("query-named-block-nodes", json!({ "flat": true })).await?;
    let Some(first) = vm.snapshot_nodes().await.into_iter().next() else { return Ok(Vec::new()) };
    Ok(snapshots_of_node(&nodes, &first))
}

pub(crate) fn snapshots_of_node(nodes: &Value, name: &str) -> Vec<VmSnapshot> {
    let named = |node: &&Value| node.get("node-name").and_then(Value::as_str) == Some(name);
    let node = nodes.as_array().into_iter().flatten().find(named);
    let all = node.and_then(|node| node.pointer("/image/snapshots")).and_then(Value::as_array);
    let one = |entry: &Value| {
        Some(VmSnapshot {
            name: entry.get("name")?.as_str()?.to_owned(),
            taken_at: entry.get("date-sec")?.as_i64()?,
            bytes: entry.get("vm-state-size")?.as_u64()?,
        })
    };
    all.into_iter().flatten().filter_map(one).collect()
}

async fn run_job(vm: &PodVm, command: &'static str, name: &str, with_memory: bool) -> Result<(), KeeperError> {
    let is_plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    // QEMU's own ids of snapshots are numbers, so a name must not be a number.
    let number = name.bytes().all(|b| b.is_ascii_digit());
    if name.is_empty() || name.len() > MAX_NAME || number || !name.bytes().all(is_plain) {
        let rule = "1 to 64 letters, digits, '-', '_' or '.' are expected, and not digits alone";
        return Err(KeeperError::InvalidField { field: "name", value: printable(name), rule });
    }
    if with_memory && !vm.document.filesystems.is_empty() {
        let hint = "it has file systems (spec.domain.devices.filesystems), whose open files are part of no snapshot; run it without \
                    them";
        return Err(KeeperError::Unsupported { what: "take or restore snapshots", hint });
    }
    let nodes = vm.snapshot_nodes().await;
    let Some(first) = nodes.first() else {
        let hint = "it has no writable disk of its own that can contain them";
        return Err(KeeperError::Unsupported { what: "take snapshots", hint });
    };
    let id = format!("{command}-{name}");
    let mut arguments = json!({ "job-id": id, "tag": name, "devices": nodes });
    if with_memory {
        arguments["vmstate"] = json!(first);
    }
    vm.execute(command, arguments).await?;
    let mut interval = POLL_INTERVAL.0;
    let error = loop {
        let jobs = vm.execute("query-jobs", Value::Null).await?;
        let ours = |job: &&Value| job.get("id").and_then(Value::as_str) == Some(&id);
        let Some(job) = jobs.as_array().into_iter().flatten().find(ours) else { return Ok(()) };
        if job.get("status").and_then(Value::as_str) == Some("concluded") {
            break job.get("error").and_then(Value::as_str).map(printable);
        }
        tokio::time::sleep(interval).await;
        interval = (interval * 2).min(POLL_INTERVAL.1);
    };
    vm.execute("job-dismiss", json!({ "id": id })).await?;
    match error {
        Some(message) => Err(KeeperError::Rejected { peer: "QEMU", command: command.to_owned(), message }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshots_are_those_of_the_first_disk() {
        let entry = |name: &str| json!({ "id": "1", "name": name, "date-sec": 5, "vm-state-size": 9 });
        let nodes = json!([
            { "node-name": "top-0", "image": {} },
            { "node-name": "disk-0", "image": { "snapshots": [entry("a"), { "name": 3 }, entry("b")] } },
        ]);
        let names: Vec<_> = snapshots_of_node(&nodes, "disk-0").into_iter().map(|snapshot| snapshot.name).collect();
        assert_eq!(names, ["a", "b"]);
        assert!(snapshots_of_node(&nodes, "disk-1").is_empty() && snapshots_of_node(&Value::Null, "disk-0").is_empty());
    }
}
