//! Finds what a checkpoint cannot hold: volumes and devices of the node that a container has. Finds the volumes that it holds. It performs
//! no I/O.

use crate::error::PodError;
use nacelle_base::{copied_in, json, share};
use nacelle_proto::pod;
use serde::Deserialize;

/// The part of an OCI runtime specification that names volumes.
#[derive(Deserialize)]
struct SpecMounts {
    #[serde(default)]
    mounts: Vec<SpecMount>,
}

#[derive(Deserialize)]
struct SpecMount {
    destination: String,
    #[serde(default)]
    source: String,
}

/// Fails for a container with something that would not be in the checkpoint.
pub fn check_container(request: &pod::CreateContainerRequest) -> Result<(), PodError> {
    match find_unsaved(request) {
        Some(what) => Err(PodError::NotSavable { container: request.id.clone(), what }),
        None => Ok(()),
    }
}

fn find_unsaved(request: &pod::CreateContainerRequest) -> Option<String> {
    if let Some(device) = request.devices.first() {
        return Some(match device.is_empty_dir {
            true => format!("{}, an emptyDir on a disk of the node", device.container_path),
            false => format!("the block device {}", device.path),
        });
    }
    if let Some(disk) = request.disks.first() {
        return Some(format!("the disk {}", disk.path));
    }
    if let Some(volume) = request.socket_volumes.first() {
        return Some(format!("sockets of the node in the volume {}", volume.path));
    }
    let Ok(SpecMounts { mounts }) = json::read(&request.oci_spec) else {
        return Some("an OCI specification without a list of mounts".to_owned());
    };
    let shared = mounts.into_iter().find(|mount| {
        let below = mount.source.strip_prefix(share::DIRECTORY);
        below.is_some_and(|rest| rest.starts_with('/'))
    });
    shared.map(|mount| format!("{}, a volume that it shares with the node", mount.destination))
}

/// Returns the volumes of a container whose content is in the VM.
pub fn volumes_in_guest(request: &pod::CreateContainerRequest) -> Vec<pod::VolumeInGuest> {
    let Ok(SpecMounts { mounts }) = json::read(&request.oci_spec) else { return Vec::new() };
    let name = |source: &str| {
        let empty_dir = request.empty_dirs.iter().find(|volume| volume.source == source);
        let copied = source.strip_prefix(copied_in::DIRECTORY).and_then(|rest| rest.strip_prefix('/'));
        let copied = request.copied_in_volumes.iter().find(|volume| copied == Some(volume.name.as_str()));
        empty_dir.map(|volume| &volume.name).or(copied.map(|volume| &volume.name)).cloned()
    };
    let volume = |mount: SpecMount| {
        let (container_id, name) = (request.id.clone(), name(&mount.source)?);
        Some(pod::VolumeInGuest { container_id, container_path: mount.destination, name })
    };
    mounts.into_iter().filter_map(volume).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn refusal(change: impl FnOnce(&mut pod::CreateContainerRequest)) -> Option<String> {
        let spec = json!({"mounts": [
            {"destination": "/proc", "type": "proc"},
            {"destination": "/etc/app", "source": "/run/nacelle/copied-in/v1"},
            {"destination": "/other", "source": "/run/nacelle/volumes-of-others/x"},
        ]});
        let mut request = pod::CreateContainerRequest {
            id: "web".into(),
            oci_spec: spec.to_string().into_bytes(),
            ..Default::default()
        };
        change(&mut request);
        check_container(&request).err().map(|error| error.to_string())
    }

    #[test]
    fn what_is_of_the_node_is_refused_by_name() {
        assert_eq!(refusal(|_| {}), None);
        assert_eq!(refusal(|request| request.empty_dirs.push(pod::EmptyDir::default())), None);
        assert_eq!(refusal(|request| request.copied_in_volumes.push(pod::CopiedInVolume::default())), None);
        let device = |is_empty_dir| pod::BlockDevice {
            path: "/dev/sdb".into(),
            container_path: "/cache".into(),
            is_empty_dir,
            ..Default::default()
        };
        let socket = pod::SocketVolume { path: "/run/app".into(), ..Default::default() };
        let disk = pod::Disk { path: "/images/root".into(), ..Default::default() };
        let shared = json!({"mounts": [{"destination": "/data", "source": "/run/nacelle/volumes/web/0"}]});
        let cases = [
            ("the block device /dev/sdb", refusal(|request| request.devices.push(device(false)))),
            ("/cache, an emptyDir on a disk of the node", refusal(|request| request.devices.push(device(true)))),
            ("the disk /images/root", refusal(|request| request.disks.push(disk))),
            ("sockets of the node in the volume /run/app", refusal(|request| request.socket_volumes.push(socket))),
            (
                "/data, a volume that it shares with the node",
                refusal(|request| request.oci_spec = shared.to_string().into_bytes()),
            ),
            ("an OCI specification without a list of mounts", refusal(|request| request.oci_spec = b"[".to_vec())),
        ];
        for (what, text) in cases {
            assert_eq!(text, Some(format!("cannot save the pod: container web has {what}")));
        }
    }

    #[test]
    fn volumes_inside_the_vm_are_found_by_their_mounts() {
        let pushed = format!("{}/configmap.conf.1", copied_in::DIRECTORY);
        let spec = json!({"mounts": [
            {"destination": "/proc", "type": "proc"},
            {"destination": "/conf", "source": pushed},
            {"destination": "/other", "source": format!("{}/unknown", copied_in::DIRECTORY)},
            {"destination": "/cache", "source": "/run/nacelle/empty-dirs/0"},
        ]});
        let empty_dir = |source: &str, name: &str| pod::EmptyDir {
            source: source.into(),
            name: name.into(),
            ..pod::EmptyDir::default()
        };
        let copied = pod::CopiedInVolume { name: "configmap.conf.1".into(), ..pod::CopiedInVolume::default() };
        let request = pod::CreateContainerRequest {
            id: "web".into(),
            oci_spec: spec.to_string().into_bytes(),
            empty_dirs: vec![empty_dir("/x", "memory.x.1"), empty_dir("/run/nacelle/empty-dirs/0", "memory.cache.1")],
            copied_in_volumes: vec![copied],
            ..Default::default()
        };
        let volume = |container_path: &str, name: &str| pod::VolumeInGuest {
            container_id: "web".into(),
            container_path: container_path.into(),
            name: name.into(),
        };
        let expected = [volume("/conf", "configmap.conf.1"), volume("/cache", "memory.cache.1")];
        assert_eq!(volumes_in_guest(&request), expected);
    }
}
