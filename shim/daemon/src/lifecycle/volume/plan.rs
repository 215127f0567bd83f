//! Plans how each volume of a container reaches it. A plan holds everything about one volume from the request to the mount.

use super::host_path::HostPath;
use super::sockets::{self, SocketPlan};
use super::{copied_in, disk, memory, saved};
use crate::lifecycle::context::NodeServices;
use crate::lifecycle::context::error::{LifecycleError, at};
use crate::oci::{GuestPath, VolumeMount};
use nacelle_base::task::run_blocking_or_panic as blocking;
use nacelle_base::{ContainerId, share};
use nacelle_model::mount::NodeVolume;
use nacelle_model::record::{ContainerRecord, PodRecord};
use nacelle_pod::protocol::{PodFeature, PodPeer};
use nacelle_proto::pod as proto;
use std::os::fd::OwnedFd;

/// The way in which a volume of the node reaches its container.
#[derive(Debug)]
pub(crate) enum Delivery {
    /// The directory or file of the node is shared.
    Shared,
    /// The contents are copied into the guest.
    CopiedIn(proto::CopiedInVolume),
    /// The container sees the sockets only, and connects to them.
    Sockets(SocketPlan),
    /// The volume is memory of the VM.
    Memory(proto::EmptyDir),
    /// The volume is a disk of the VM.
    Disk {
        /// The volume on the disk.
        volume: proto::EmptyDir,
        /// The disk, as the pod process receives it.
        device: proto::BlockDevice,
        /// The open file of the disk.
        file: OwnedFd,
    },
}

/// A volume of the node on its way into a container.
#[derive(Debug)]
pub(crate) struct VolumePlan {
    /// The volume as requested.
    pub request: NodeVolume,
    /// The path on the node.
    pub host: HostPath,
    /// The way into the container.
    pub delivery: Delivery,
    /// The path where the agent finds the volume.
    pub guest: GuestPath,
    /// The guest's kernel has to mount what is below the volume writable although the volume is read-only.
    writable_below: bool,
}

impl VolumePlan {
    /// Returns the mount of the volume in the container.
    pub(crate) fn mount(&self) -> VolumeMount<'_> {
        VolumeMount { volume: &self.request, source: &self.guest, writable_below: self.writable_below }
    }

    /// Returns whether the node's directory or file is shared.
    pub(crate) fn is_shared(&self) -> bool {
        matches!(self.delivery, Delivery::Shared)
    }

    /// Returns whether `nacelle-fs` opens the volume for the pod process: its contents are copied into the guest, or its sockets
    /// connected.
    pub(crate) fn is_opened(&self) -> bool {
        matches!(self.delivery, Delivery::CopiedIn(_) | Delivery::Sockets(_))
    }
}

/// What decides on the delivery of a pod's volumes.
struct Rules {
    /// The pod has a guest.
    guest: bool,
    /// The pod process can copy the files that kubelet makes for containers.
    kubelet_files: bool,
    /// The node maps owner ids, which only a share supports: the pod has a user namespace.
    mapped: bool,
    /// The container paths of socket volumes.
    sockets: Vec<String>,
    /// The form of emptyDirs on kubelet's disk.
    empty_dirs: disk::EmptyDirForm,
}

/// Plans the volumes of a container. Creates missing directories of the node and missing disks of volumes.
pub(crate) async fn plan(
    services: &NodeServices,
    peer: &PodPeer,
    pod: &PodRecord,
    record: &ContainerRecord,
) -> Result<Vec<VolumePlan>, LifecycleError> {
    let (guest, mapped) = (pod.config.kind.has_guest(), pod.config.user_namespace.is_some());
    let empty_dirs = match &pod.config.empty_dirs {
        _ if !guest => disk::EmptyDirForm::Shared("run the pod by a handler whose engine is not host"),
        _ if mapped => disk::EmptyDirForm::Shared("run the pod without a user namespace of its own"),
        None => disk::EmptyDirForm::Shared("the pod was started by an older version of Nacelle; make it anew"),
        Some(rules) => disk::EmptyDirForm::Disks(rules.clone(), services.pod_dir(&pod.id)),
    };
    let sockets = pod.config.socket_mounts.clone();
    sockets::check_image_volumes(&sockets, &record.config.volumes)?;
    let kubelet_files = peer.has(PodFeature::KubeletFiles);
    let rules = Rules { guest, kubelet_files, mapped, sockets, empty_dirs };
    let (id, config) = (record.id.clone(), record.config.clone());
    let restored = pod.restored.clone();
    blocking(move || {
        let mut plans = rules.plan(&id, &config.node_volumes)?;
        if let Some(restored) = restored {
            saved::keep_names(&restored, &id, &mut plans)?;
        }
        Ok(plans)
    })
    .await
}

impl Rules {
    fn plan(&self, id: &ContainerId, volumes: &[NodeVolume]) -> Result<Vec<VolumePlan>, LifecycleError> {
        // All paths exist before the first disk is created.
        let hosts: Result<Vec<_>, _> = volumes.iter().map(|volume| HostPath::resolve(&volume.host_path)).collect();
        let hosts = hosts.map_err(at("find the volumes of the container on the node"))?;
        // The volumes that are shared and those that are opened for the pod process are numbered, each from zero.
        let (mut shared, mut opened) = (0, 0);
        let mut plans = Vec::with_capacity(volumes.len());
        for (index, (volume, host)) in volumes.iter().zip(hosts).enumerate() {
            let delivery = self.delivery(id, index, opened, volume, &host)?;
            let guest = match &delivery {
                Delivery::Shared => format!("{}/{id}/{shared}", share::DIRECTORY),
                Delivery::CopiedIn(copy) => copied_in::in_guest(copy),
                Delivery::Sockets(plan) => plan.guest.clone(),
                Delivery::Memory(volume) | Delivery::Disk { volume, .. } => volume.source.clone(),
            };
            let is_shared = matches!(delivery, Delivery::Shared);
            shared += usize::from(is_shared);
            opened += usize::from(matches!(delivery, Delivery::CopiedIn(_) | Delivery::Sockets(_)));
            // A guest's kernel mounts file systems below a shared volume with the flags of that volume, so a mark says where only
            // the volume itself is read-only. In a user namespace the agent cannot set such a flag: everything below a read-only
            // volume is read-only there.
            let markable = is_shared && self.guest && !self.mapped;
            // The agent alone creates sockets.
            let readonly = volume.readonly || matches!(delivery, Delivery::Sockets(_));
            plans.push(VolumePlan {
                request: NodeVolume { readonly, ..volume.clone() },
                host,
                delivery,
                guest: GuestPath::new(guest),
                writable_below: markable && volume.readonly && !volume.recursive_read_only,
            });
        }
        Ok(plans)
    }

    /// Decides on one volume: the `index`th of the container, after `opened` volumes that are opened for the pod process.
    fn delivery(
        &self,
        id: &ContainerId,
        index: usize,
        opened: usize,
        volume: &NodeVolume,
        host: &HostPath,
    ) -> Result<Delivery, LifecycleError> {
        if let Some(plan) = sockets::plan(&self.sockets, id, opened, volume, host)? {
            return Ok(Delivery::Sockets(plan));
        }
        // The copies of files that containers write have no mapped owners.
        let files = self.kubelet_files && !self.mapped;
        let copy = if self.guest { copied_in::plan(id, opened, volume, host, files) } else { None };
        if let Some(copy) = copy {
            return Ok(Delivery::CopiedIn(copy));
        }
        if let Some(disk::Disk { volume, device, file }) = disk::plan(&self.empty_dirs, id, index, volume, host)? {
            return Ok(Delivery::Disk { volume, device, file });
        }
        let memory = if self.guest && !self.mapped { memory::plan(id, index, volume, host)? } else { None };
        Ok(memory.map_or(Delivery::Shared, Delivery::Memory))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_model::mount::Propagation;
    use nacelle_model::record::RestoredFrom;
    use std::path::Path;

    fn volume(path: &Path) -> NodeVolume {
        NodeVolume {
            host_path: path.to_str().unwrap().into(),
            container_path: "/x".into(),
            readonly: true,
            recursive_read_only: false,
            propagation: Propagation::Private,
            id_mapped: false,
            options: [].into(),
        }
    }

    fn rules(guest: bool) -> Rules {
        Rules {
            guest,
            kubelet_files: true,
            mapped: false,
            sockets: Vec::new(),
            empty_dirs: disk::EmptyDirForm::Shared("none"),
        }
    }

    #[test]
    fn volumes_of_the_node_are_found_or_made() {
        let directory = tempfile::tempdir().unwrap();
        let base = directory.path().canonicalize().unwrap();
        std::fs::write(base.join("file"), "").unwrap();
        std::os::unix::fs::symlink("file", base.join("link")).unwrap();
        let id = ContainerId::from_bytes([1; 32]);
        let volumes = [volume(&base.join("link")), volume(&base.join("new/deep"))];
        let plans = rules(true).plan(&id, &volumes).unwrap();
        let hosts: Vec<_> = plans.iter().map(|plan| plan.host.as_path()).collect();
        assert_eq!(hosts, [base.join("file"), base.join("new/deep")]);
        assert!(base.join("new/deep").is_dir());
        let guests: Vec<_> = plans.iter().map(|plan| plan.guest.as_str().to_owned()).collect();
        assert_eq!(guests, [0, 1].map(|number| format!("/run/nacelle/volumes/{id}/{number}")));
        assert!(plans[0].mount().writable_below && plans[0].is_shared());
        assert!(!rules(false).plan(&id, &volumes).unwrap()[0].mount().writable_below);
        assert!(rules(true).plan(&id, &[volume(&base.join("file/x"))]).is_err());
    }

    #[test]
    fn a_restored_pod_keeps_the_names_of_its_volumes() {
        let node = tempfile::tempdir().unwrap();
        let pod = node.path().canonicalize().unwrap().join("pods/uid");
        let conf = pod.join("volumes/kubernetes.io~configmap/conf");
        std::fs::create_dir_all(conf.join("..2026")).unwrap();
        std::os::unix::fs::symlink("..2026", conf.join("..data")).unwrap();
        let part = pod.join("volume-subpaths/conf/c/0");
        std::fs::create_dir_all(&part).unwrap();
        let [continuing, later] = [1, 2].map(|n| ContainerId::from_bytes([n; 32]));
        let saved = |path: &Path, name: &str| (path.display().to_string(), name.to_owned());
        let restored = |volumes: &[(String, String)]| RestoredFrom {
            checkpoint: "c".into(),
            containers: [continuing.clone()].into(),
            volumes: volumes.iter().cloned().collect(),
            is_complete: true,
            waiting: Vec::new(),
        };
        let names = |restored: &RestoredFrom, id: &ContainerId, paths: &[&Path]| {
            let volumes: Vec<_> = paths.iter().map(|path| volume(path)).collect();
            let mut plans = rules(true).plan(id, &volumes).unwrap();
            saved::keep_names(restored, id, &mut plans).map_err(|error| error.to_string())?;
            let guest = |plan: &VolumePlan| plan.guest.as_str().rsplit('/').next().unwrap_or_default().to_owned();
            Ok::<Vec<String>, String>(plans.iter().map(guest).collect())
        };
        let known = restored(&[saved(&conf, "configmap.conf.1"), saved(&part, "0a.3")]);
        assert_eq!(names(&known, &continuing, &[&conf, &part]).unwrap(), ["configmap.conf.1", "0a.3"]);
        // A copy of a part that is made later is not that of another container.
        let own = [format!("{later}.1"), "configmap.conf.1".to_owned()];
        assert_eq!(names(&known, &later, &[&conf, &part]).unwrap(), [own[1].clone(), own[0].clone()]);
        // The guest has no such volume, or one of another kind.
        let shared = node.path().join("shared");
        let in_memory = restored(&[saved(&conf, "memory.conf.1")]);
        for (restored, path) in [(&known, &shared), (&restored(&[]), &conf), (&in_memory, &conf)] {
            let error = names(restored, &continuing, &[path]).unwrap_err();
            assert!(error.contains("at /x is not in the checkpoint"), "{error}");
            assert_ne!(names(restored, &later, &[path]).unwrap(), ["memory.conf.1"]);
        }
    }

    #[test]
    fn shared_and_copied_volumes_are_numbered_apart() {
        let node = tempfile::tempdir().unwrap();
        let pod = node.path().canonicalize().unwrap().join("pods/uid");
        let written = ["configmap", "secret"].map(|plugin| {
            let directory = pod.join(format!("volumes/kubernetes.io~{plugin}/conf"));
            std::fs::create_dir_all(directory.join("..2026")).unwrap();
            std::os::unix::fs::symlink("..2026", directory.join("..data")).unwrap();
            directory
        });
        let id = ContainerId::from_bytes([1; 32]);
        let (a, b) = (node.path().join("a"), node.path().join("b"));
        let volumes = [&a, &written[0], &b, &written[1]].map(|path| volume(path));
        let plans = rules(true).plan(&id, &volumes).unwrap();
        let copies: Vec<_> = plans
            .iter()
            .map(|plan| match &plan.delivery {
                Delivery::CopiedIn(copy) => Some(copy.server_path.clone()),
                _ => None,
            })
            .collect();
        assert_eq!(copies, [None, Some(format!("{id}/0")), None, Some(format!("{id}/1"))]);
        assert_eq!(plans[2].guest.as_str(), format!("/run/nacelle/volumes/{id}/1"));
        // The sockets of a volume are opened by the same process as copied volumes.
        let with_sockets = Rules { sockets: vec!["/sockets".into()], ..rules(true) };
        let writable = NodeVolume { container_path: "/sockets".into(), readonly: false, ..volume(&a) };
        let plans = with_sockets.plan(&id, &[volume(&written[0]), writable, volume(&b), volume(&written[1])]).unwrap();
        let opened: Vec<_> = plans.iter().map(VolumePlan::is_opened).collect();
        assert_eq!(opened, [true, true, false, true]);
        let Delivery::Sockets(sockets) = &plans[1].delivery else { panic!("{:?}", plans[1]) };
        assert_eq!(sockets.volume.server_path, format!("{id}/1"));
        assert!(plans[1].mount().volume.readonly && !plans[1].mount().writable_below);
        let Delivery::CopiedIn(copy) = &plans[3].delivery else { panic!("{:?}", plans[3]) };
        assert_eq!(copy.server_path, format!("{id}/2"));
        // Without a guest everything is shared.
        assert!(rules(false).plan(&id, &volumes).unwrap().iter().all(VolumePlan::is_shared));
    }
}
