//! Determines how the volumes of a container reach it: shared, copied in, memory or a disk of the VM. docs/contributor/volumes.md has
//! the rules.

pub(crate) mod copied_in;
pub(crate) mod device;
mod disk;
mod empty_dir;
mod memory;
pub(crate) mod shared;

use crate::lifecycle::context::Parts;
use crate::lifecycle::context::error::LifecycleError;
use nacelle_base::files::{self, FileError};
use nacelle_base::task::run_blocking_or_panic as blocking;
use nacelle_base::{ContainerId, share};
use nacelle_model::container::ContainerConfig;
use nacelle_model::mount::MountOption;
use nacelle_model::record::{ContainerRecord, PodRecord};
use nacelle_proto::pod as proto;
use std::os::fd::OwnedFd;
use std::path::Path;

/// A volume that is part of the VM, and its disk, if it has one.
pub(crate) type OwnVolume = (proto::EmptyDir, Option<(proto::BlockDevice, OwnedFd)>);

/// Returns which volumes of a container are part of the VM, by their index in the list, with their disks.
pub(crate) async fn own_volumes(
    parts: &Parts,
    pod: &PodRecord,
    record: &ContainerRecord,
    config: &ContainerConfig,
) -> Result<Vec<Option<OwnVolume>>, LifecycleError> {
    let (id, looked) = (record.id.clone(), config.node_volumes.clone());
    let guest = pod.config.kind.has_guest();
    // Owner ids are mapped in a user namespace, which only a share of the node supports.
    let mapped = pod.config.user_namespace.is_some();
    let way = match &pod.config.empty_dirs {
        _ if !guest => disk::Way::Shares("run the pod by a handler whose engine is not host"),
        _ if mapped => disk::Way::Shares("run the pod without a user namespace of its own"),
        None => disk::Way::Shares("the pod was started by an older version of Nacelle; make it anew"),
        Some(rules) => disk::Way::Disks(rules.clone(), parts.pod_dir(&pod.id)),
    };
    blocking(move || {
        let disks = disk::plan(&way, &id, &looked)?;
        let memory = if guest && !mapped { memory::plan(&id, &looked)? } else { Vec::new() };
        let memory = memory.into_iter().chain(std::iter::repeat(None));
        let own = disks.into_iter().zip(memory).map(|(disk, memory)| match disk {
            Some(disk) => Some((disk.volume, Some((disk.device, disk.file)))),
            None => memory.map(|volume| (volume, None)),
        });
        Ok(own.collect())
    })
    .await
}

/// Returns the volumes as the agent finds them: part of the VM, copied in, or shared. A guest's kernel mounts file systems below
/// a shared volume with the flags of that volume: a mark in the request shows where only the volume itself is read-only
/// (`guest/kernel/0009-fuse-device-submounts.patch`). In a user namespace no such flag can be set, so everything below a
/// read-only volume is read-only there.
pub(crate) fn as_found(
    mut config: ContainerConfig,
    id: &ContainerId,
    plan: &[Option<proto::CopiedInVolume>],
    own: &[Option<proto::EmptyDir>],
    marks: bool,
) -> ContainerConfig {
    let mut numbers = 0..;
    for (volume, (plan, own)) in config.node_volumes.iter_mut().zip(plan.iter().zip(own)) {
        if let Some(own) = own {
            volume.host_path.clone_from(&own.source);
        } else if let Some(pushed) = plan {
            volume.host_path = copied_in::in_guest(pushed);
        } else if let Some(number) = numbers.next() {
            volume.host_path = format!("{}/{id}/{number}", share::DIRECTORY);
            if marks && volume.readonly && !volume.recursive_read_only {
                volume.options.insert(MountOption::Nodiratime);
            }
        }
    }
    config
}

/// Resolves symbolic links in the paths of the volumes, which would lead elsewhere where the agent finds them. Creates a
/// directory for a path that does not exist, as kubelet expects.
pub(crate) fn resolve(config: &ContainerConfig) -> Result<ContainerConfig, FileError> {
    let mut config = config.clone();
    for volume in &mut config.node_volumes {
        let path = Path::new(&volume.host_path);
        if !path.exists() {
            std::fs::create_dir_all(path).map_err(files::at("create", path))?;
        }
        let found = path.canonicalize().map_err(files::at("find", path))?;
        let name = found.into_os_string().into_string();
        volume.host_path =
            name.map_err(|_bytes| files::at("name", path)(std::io::ErrorKind::InvalidFilename.into()))?;
    }
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_model::mount::{NodeVolume, Propagation};

    #[test]
    fn volumes_of_the_node_are_found_or_made() {
        let directory = tempfile::tempdir().unwrap();
        let base = directory.path().canonicalize().unwrap();
        std::fs::write(base.join("file"), "").unwrap();
        std::os::unix::fs::symlink("file", base.join("link")).unwrap();
        let mut config = (*nacelle_model::testing::container(1, 1).config).clone();
        let volume = |name: &str| NodeVolume {
            host_path: base.join(name).to_str().unwrap().into(),
            container_path: "/x".into(),
            readonly: false,
            recursive_read_only: false,
            propagation: Propagation::Private,
            id_mapped: false,
            options: [].into(),
        };
        config.node_volumes = vec![volume("link"), volume("new/deep")];
        let resolved = resolve(&config).unwrap();
        let paths: Vec<_> = resolved.node_volumes.iter().map(|volume| volume.host_path.clone()).collect();
        assert_eq!(paths, [base.join("file"), base.join("new/deep")].map(|path| path.to_str().unwrap().to_owned()));
        assert!(base.join("new/deep").is_dir());
        let found = as_found(resolved, &ContainerId::from_bytes([1; 32]), &[None, None], &[None, None], true)
            .node_volumes[0]
            .host_path
            .clone();
        assert_eq!(found, format!("/run/nacelle/volumes/{}/0", "01".repeat(32)));
        config.node_volumes = vec![volume("file/x")];
        assert!(resolve(&config).is_err());
    }
}
