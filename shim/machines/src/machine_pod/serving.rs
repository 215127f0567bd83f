//! Determines the I/O threads and queues of a machine's disks, and which disks other machines may write to as well. Pure.

use super::build::{Refused, value};
use nacelle_model::machine::{Board, Serving};
use nacelle_vmi::spec::{Bus, Disk, InstanceSpec, IoThreadsPolicy};

/// Returns how the disks are served, in their order.
pub fn serving(spec: &InstanceSpec, processors: u32, board: Board) -> Result<Vec<Serving>, Refused> {
    let domain = &spec.domain;
    let disks = &domain.devices.disks;
    let queues = domain.devices.block_multi_queue == Some(true);
    let alone = |disk: &Disk| disk.dedicated_io_thread == Some(true);
    if board == Board::Microvm {
        let instead =
            "disks of the board microvm have no threads of their own: say spec.domain.machine.type q35, or take it out";
        if let Some(policy) = domain.io_threads_policy {
            return value("spec.domain.ioThreadsPolicy", policy.word(), instead);
        }
        if let Some(n) = disks.iter().position(alone) {
            return value(format!("spec.domain.devices.disks[{n}].dedicatedIOThread"), true, instead);
        }
    }
    let own = u32::try_from(disks.iter().filter(|disk| alone(disk)).count()).unwrap_or(u32::MAX);
    // The shared threads: at most two for each vCPU, including the dedicated threads of disks.
    let together = match domain.io_threads_policy {
        None => 0,
        Some(IoThreadsPolicy::Shared) => 1,
        Some(IoThreadsPolicy::Auto) => processors.saturating_mul(2).saturating_sub(own).max(1),
    };
    let (mut singles, mut turns) = (0..own, (0..together).cycle());
    let one = |(n, disk): (usize, &Disk)| {
        let shared = disk.shareable == Some(true);
        if shared {
            can_be_shared(n, disk, spec)?;
        }
        let virtio = bus(disk).is_none_or(|bus| bus == Bus::Virtio);
        let thread = match alone(disk) {
            true => singles.next(),
            false if virtio => turns.next().map(|turn| turn + own),
            false => None,
        };
        Ok(Serving { thread, queues, shared })
    };
    disks.iter().enumerate().map(one).collect()
}

fn bus(disk: &Disk) -> Option<Bus> {
    let cdrom = disk.cdrom.as_ref().and_then(|target| target.bus);
    cdrom.or(disk.disk.as_ref().and_then(|target| target.bus))
}

/// Only a raw disk can be shared: of other formats each machine caches metadata in its memory.
fn can_be_shared(n: usize, disk: &Disk, spec: &InstanceSpec) -> Result<(), Refused> {
    let volume = spec.volumes.iter().find(|volume| volume.name == disk.name);
    match volume.is_some_and(|volume| volume.persistent_volume_claim.is_some() || volume.host_disk.is_some()) {
        true => Ok(()),
        false => {
            let instead = "only a persistentVolumeClaim or a hostDisk can be other machines', too: take it out";
            value(format!("spec.domain.devices.disks[{n}].shareable"), true, instead)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn told(policy: Value, disks: Value, board: Board) -> Result<Vec<(Option<u32>, bool)>, String> {
        let spec = json!({
            "domain": { "ioThreadsPolicy": policy, "devices": { "disks": disks } },
            "volumes": [{ "name": "c", "persistentVolumeClaim": { "claimName": "c" } }, { "name": "e", "emptyDisk": { "capacity": "1Gi" } }],
        });
        let made = serving(&serde_json::from_value(spec).unwrap(), 1, board);
        let made = made.map_err(|refused| refused.to_string())?;
        Ok(made.into_iter().map(|one| (one.thread, one.shared)).collect())
    }

    #[test]
    fn threads_are_dealt_out() {
        let disk = |more: Value| {
            let mut disk = json!({ "name": "c", "disk": { "bus": "virtio" } });
            disk.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            disk
        };
        let alone = || disk(json!({ "dedicatedIOThread": true }));
        let sata = || disk(json!({ "disk": { "bus": "sata" } }));
        let all = || json!([disk(json!({})), alone(), sata(), disk(json!({})), disk(json!({}))]);
        let threads =
            |policy| told(policy, all(), Board::Q35).unwrap().into_iter().map(|one| one.0).collect::<Vec<_>>();
        assert_eq!(threads(Value::Null), [None, Some(0), None, None, None]);
        assert_eq!(threads(json!("shared")), [Some(1), Some(0), None, Some(1), Some(1)]);
        assert_eq!(threads(json!("auto")), [Some(1), Some(0), None, Some(1), Some(1)]);
        let many = told(json!("auto"), json!([disk(json!({})), disk(json!({})), disk(json!({}))]), Board::Q35).unwrap();
        assert_eq!(many.iter().map(|one| one.0).collect::<Vec<_>>(), [Some(0), Some(1), Some(0)]);
        for (policy, field) in [(json!("auto"), "ioThreadsPolicy"), (Value::Null, "disks[1].dedicatedIOThread")] {
            assert!(told(policy, all(), Board::Microvm).unwrap_err().contains(field), "{field}");
        }
        assert!(told(Value::Null, json!([disk(json!({}))]), Board::Microvm).is_ok());
        let shared = |name| told(Value::Null, json!([{ "name": name, "disk": {}, "shareable": true }]), Board::Q35);
        assert_eq!(shared("c"), Ok(vec![(None, true)]));
        assert!(shared("e").unwrap_err().contains("disks[0].shareable is \"true\""));
    }
}
