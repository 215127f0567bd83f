//! Determines the I/O threads and queues of a machine's disks, and which disks other machines may write to as well. Pure.

use super::rejection::{SpecRejection, reject_value};
use nacelle_model::machine::{Board, Serving};
use nacelle_vmi::spec::{Bus, Disk, InstanceSpec, IoThreadsPolicy};

/// Returns how the disks are served, in their order.
pub fn plan_serving(spec: &InstanceSpec, processors: u32, board: Board) -> Result<Vec<Serving>, SpecRejection> {
    let domain = &spec.domain;
    let disks = &domain.devices.disks;
    let queues = domain.devices.block_multi_queue == Some(true);
    let has_own_thread = |disk: &Disk| disk.dedicated_io_thread == Some(true);
    if board == Board::Microvm {
        let instead =
            "disks of the board microvm have no I/O threads: set spec.domain.machine.type to q35, or remove the field";
        if let Some(policy) = domain.io_threads_policy {
            return reject_value("spec.domain.ioThreadsPolicy", policy.word(), instead);
        }
        if let Some(n) = disks.iter().position(has_own_thread) {
            return reject_value(format!("spec.domain.devices.disks[{n}].dedicatedIOThread"), true, instead);
        }
    }
    let own_threads = u32::try_from(disks.iter().filter(|disk| has_own_thread(disk)).count()).unwrap_or(u32::MAX);
    // The shared threads: at most two for each vCPU, including the dedicated threads of disks.
    let shared_threads = match domain.io_threads_policy {
        None => 0,
        Some(IoThreadsPolicy::Shared) => 1,
        Some(IoThreadsPolicy::Auto) => processors.saturating_mul(2).saturating_sub(own_threads).max(1),
    };
    let (mut own_ids, mut shared_ids) = (0..own_threads, (0..shared_threads).cycle());
    let plan_disk = |(n, disk): (usize, &Disk)| {
        let shared = disk.shareable == Some(true);
        if shared {
            check_shareable(n, disk, spec)?;
        }
        let virtio = disk_bus(disk).is_none_or(|bus| bus == Bus::Virtio);
        let thread = match has_own_thread(disk) {
            true => own_ids.next(),
            false if virtio => shared_ids.next().map(|id| id + own_threads),
            false => None,
        };
        Ok(Serving { thread, queues, shared })
    };
    disks.iter().enumerate().map(plan_disk).collect()
}

fn disk_bus(disk: &Disk) -> Option<Bus> {
    let cdrom = disk.cdrom.as_ref().and_then(|target| target.bus);
    cdrom.or(disk.disk.as_ref().and_then(|target| target.bus))
}

/// Only a raw disk can be shared: of other formats each machine caches metadata in its memory.
fn check_shareable(n: usize, disk: &Disk, spec: &InstanceSpec) -> Result<(), SpecRejection> {
    let volume = spec.volumes.iter().find(|volume| volume.name == disk.name);
    match volume.is_some_and(|volume| volume.persistent_volume_claim.is_some() || volume.host_disk.is_some()) {
        true => Ok(()),
        false => {
            let instead = "only a persistentVolumeClaim or a hostDisk can be shared with other VMs: remove shareable";
            reject_value(format!("spec.domain.devices.disks[{n}].shareable"), true, instead)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn plan(policy: Value, disks: Value, board: Board) -> Result<Vec<(Option<u32>, bool)>, String> {
        let spec = json!({
            "domain": { "ioThreadsPolicy": policy, "devices": { "disks": disks } },
            "volumes": [{ "name": "c", "persistentVolumeClaim": { "claimName": "c" } }, { "name": "e", "emptyDisk": { "capacity": "1Gi" } }],
        });
        let planned = plan_serving(&serde_json::from_value(spec).unwrap(), 1, board);
        let planned = planned.map_err(|error| error.to_string())?;
        Ok(planned.into_iter().map(|one| (one.thread, one.shared)).collect())
    }

    #[test]
    fn io_threads_are_assigned_to_disks() {
        let disk = |more: Value| {
            let mut disk = json!({ "name": "c", "disk": { "bus": "virtio" } });
            disk.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            disk
        };
        let own = || disk(json!({ "dedicatedIOThread": true }));
        let sata = || disk(json!({ "disk": { "bus": "sata" } }));
        let all = || json!([disk(json!({})), own(), sata(), disk(json!({})), disk(json!({}))]);
        let threads =
            |policy| plan(policy, all(), Board::Q35).unwrap().into_iter().map(|one| one.0).collect::<Vec<_>>();
        assert_eq!(threads(Value::Null), [None, Some(0), None, None, None]);
        assert_eq!(threads(json!("shared")), [Some(1), Some(0), None, Some(1), Some(1)]);
        assert_eq!(threads(json!("auto")), [Some(1), Some(0), None, Some(1), Some(1)]);
        let many = plan(json!("auto"), json!([disk(json!({})), disk(json!({})), disk(json!({}))]), Board::Q35).unwrap();
        assert_eq!(many.iter().map(|one| one.0).collect::<Vec<_>>(), [Some(0), Some(1), Some(0)]);
        for (policy, field) in [(json!("auto"), "ioThreadsPolicy"), (Value::Null, "disks[1].dedicatedIOThread")] {
            assert!(plan(policy, all(), Board::Microvm).unwrap_err().contains(field), "{field}");
        }
        assert!(plan(Value::Null, json!([disk(json!({}))]), Board::Microvm).is_ok());
        let shared = |name| plan(Value::Null, json!([{ "name": name, "disk": {}, "shareable": true }]), Board::Q35);
        assert_eq!(shared("c"), Ok(vec![(None, true)]));
        assert!(shared("e").unwrap_err().contains("disks[0].shareable is \"true\""));
    }
}
