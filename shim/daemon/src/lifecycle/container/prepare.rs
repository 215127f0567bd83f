//! Prepares a container on the node: finds its devices, shares its volumes with the pod, and builds the request to the pod process.

use super::extents;
use super::machine;
use crate::lifecycle::context::NodeServices;
use crate::lifecycle::context::error::{LifecycleError, at};
use crate::lifecycle::context::request::ask;
use crate::lifecycle::volume::copied_in;
use crate::lifecycle::volume::device::{self, BlockDevice};
use crate::lifecycle::volume::plan::{self, Delivery, VolumePlan};
use crate::lifecycle::volume::shared::{self, detach_all};
use crate::oci::{self, DeviceNode, VolumeMount};
use nacelle_base::task::run_blocking_or_panic as blocking;
use nacelle_machines::machine_pod::{self, PassthroughDevices};
use nacelle_model::container::ContainerConfig;
use nacelle_model::mount::MountOption;
use nacelle_model::pod::PodKind;
use nacelle_model::record::{ContainerRecord, PodRecord};
use nacelle_model::security::PidMode;
use nacelle_pod::client::{Offer, PodClient};
use nacelle_pod::protocol::{PodFeature, PodFeatureSet};
use nacelle_proto::pod as proto;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The step in which a pod process of another version refuses a container.
const CREATE: &str = "create the container";

/// A container that is completely prepared on the node, with its volumes shared: only the guest's part is left.
pub(crate) struct Prepared {
    pub(super) request: proto::CreateContainerRequest,
    pub(super) client: PodClient,
    /// Block devices, disks and files that were sent to the pod process already.
    pub(super) offers: Vec<Offer>,
    /// The PCI devices of a machine pod's machine.
    pub(super) passed: Option<PassthroughDevices>,
    /// A volume is mounted in `/sys`, whose paths only the kernel of the containers knows.
    pub(super) in_sysfs: bool,
}

impl Prepared {
    /// Returns the number of the container's stop signal.
    pub(crate) fn stop_signal(&self) -> u32 {
        self.request.stop_signal
    }

    /// Returns whether the creation can no longer fail because of the request: it depends neither on the contents of images
    /// (names of users, paths in volumes) nor on the VM (device slots, paths in sysfs).
    pub(crate) fn is_certain(&self) -> bool {
        let numbers = |user: &str| user.chars().all(|c| c.is_ascii_digit() || c == ':');
        self.request.devices.is_empty()
            && self.request.disks.is_empty()
            && !self.in_sysfs
            && self.passed.as_ref().is_none_or(PassthroughDevices::is_empty)
            && numbers(&self.request.user)
            && self.request.volumes.iter().all(|volume| volume.sub_path.is_empty())
            && self.request.anonymous_volumes.is_empty()
    }
}

/// Prepares the container on the node. On failure its volumes are detached.
pub(crate) async fn prepare(
    services: &NodeServices,
    client: PodClient,
    pod: &PodRecord,
    record: &ContainerRecord,
) -> Result<Prepared, LifecycleError> {
    let needed = match &record.config.apparmor {
        Some(_) => PodFeature::ApparmorProfiles.into(),
        None => PodFeatureSet::BASE,
    };
    client.require(needed).map_err(at(CREATE))?;
    if let PodKind::Machine { machine, vm } = &pod.config.kind {
        if let Some(vm) = vm {
            // Recorded before a disk refers to the images: they are kept as long as the disk.
            let images = machine_pod::backing_images(machine, &record.config, &record.volumes, &record.image);
            services.vms.set_images(vm, images).await.map_err(at("keep the images of the machine"))?;
        }
        let (request, offers, passed) = machine::prepare(services, &client, pod, machine, record).await?;
        return Ok(Prepared { request, client, offers, passed: Some(passed), in_sysfs: false });
    }
    let (config, nodes, blocks) = devices(pod, record).await?;
    let plans = plan::plan(services, client.peer(), pod, record).await?;
    let prepared = async {
        shared::attach(services, pod, record, &plans).await?;
        let mounts: Vec<_> = plans.iter().map(VolumePlan::mount).collect();
        let mut request = request(services, pod, record, &config, &nodes, &mounts).await?;
        let mut offered = blocks;
        for plan in plans {
            match plan.delivery {
                Delivery::Shared => {}
                Delivery::CopiedIn(copy) => request.copied_in_volumes.push(copy),
                Delivery::Sockets(plan) => request.socket_volumes.push(plan.volume),
                Delivery::Memory(volume) => request.empty_dirs.push(volume),
                Delivery::Disk { volume, device, file } => {
                    request.empty_dirs.push(volume);
                    offered.push((device, file));
                }
            }
        }
        request.devices.extend(offered.iter().map(|(device, _)| device.clone()));
        client.check(&request).map_err(at(CREATE))?;
        let mut offered: Vec<(String, OwnedFd)> =
            offered.into_iter().map(|(device, file)| (device.container_path, file)).collect();
        for copy in request.copied_in_volumes.iter().filter(|copy| copy.is_returned) {
            let path = PathBuf::from(&copy.path);
            let file = blocking(move || copied_in::open_returned(&path)).await;
            offered.push((copy.name.clone(), file.map_err(at("open a file for the container's end"))?.into()));
        }
        let mut offers = Vec::with_capacity(offered.len());
        for (name, file) in offered {
            let call = client.offer_device(record.id.as_str(), &name, file);
            offers.push(ask("hand a file over to the pod", services.request_timeout(), call).await?);
        }
        Ok((request, offers))
    };
    let in_sysfs =
        record.config.node_volumes.iter().any(|volume| Path::new(&volume.container_path).starts_with("/sys"));
    match prepared.await {
        Ok((request, offers)) => Ok(Prepared { request, client, offers, passed: None, in_sysfs }),
        Err(error) => {
            detach_all(services, pod, record).await;
            Err(error)
        }
    }
}

/// Returns the container's configuration as its kernel can apply it, its device nodes, and the block devices of the node that the
/// VM gets.
async fn devices(
    pod: &PodRecord,
    record: &ContainerRecord,
) -> Result<(ContainerConfig, Vec<DeviceNode>, Vec<BlockDevice>), LifecycleError> {
    let mut config = (*record.config).clone();
    if pod.config.kind.has_guest() {
        // CPU numbers of the node mean nothing in the guest.
        config.resources = config.resources.in_guest();
        let asked = Arc::clone(&record.config);
        let of_guest = blocking(move || device::of_guest(&asked)).await?;
        return Ok((config, of_guest.nodes, of_guest.blocks));
    }
    // No device nodes can be created in a user namespace.
    let privileged = (config.privileged && pod.config.user_namespace.is_none()).then_some(Path::new("/dev"));
    let (config, nodes) = blocking(move || device::of_node(&config, privileged).map(|nodes| (config, nodes))).await?;
    Ok((config, nodes, Vec::new()))
}

/// Builds the creation request for the pod process.
async fn request(
    services: &NodeServices,
    pod: &PodRecord,
    record: &ContainerRecord,
    config: &ContainerConfig,
    devices: &[DeviceNode],
    mounts: &[VolumeMount<'_>],
) -> Result<proto::CreateContainerRequest, LifecycleError> {
    let root = services.images.rootfs(&record.image.id).await.map_err(at("read the image of the container"))?;
    let spec = oci::spec(&pod.config, config, &root.config, &pod.kernel_release, devices, mounts);
    let spec = spec.map_err(at("describe the container"))?;
    let stop_signal = oci::stop_signal(config, &root.config).map_err(at("describe the container"))?;
    let anonymous_volumes = oci::anonymous_volumes(config, &root.config).map_err(at("describe the container"))?;
    let mut volumes = Vec::with_capacity(record.volumes.len());
    for (volume, image) in config.volumes.iter().zip(&record.volumes) {
        let root =
            services.images.rootfs(&image.id).await.map_err(at("read the image of a volume of the container"))?;
        volumes.push(proto::ImageVolume {
            image_key: image.id.to_string(),
            image: extents(&root.disk),
            sub_path: volume.sub_path.clone(),
            container_path: volume.container_path.clone(),
            noexec: volume.options.contains(&MountOption::Noexec),
        });
    }
    Ok(proto::CreateContainerRequest {
        id: record.id.to_string(),
        oci_spec: spec,
        image_key: record.image.id.to_string(),
        image: extents(&root.disk),
        images_by_path: !pod.config.kind.has_guest(),
        user: oci::user(config, &root.config),
        merge_image_groups: !config.run_as.strict,
        tty: config.tty,
        stdin: config.stdin,
        stdin_once: config.stdin_once,
        stop_signal,
        pid_of: match &config.pid {
            PidMode::Of(target) => target.clone(),
            PidMode::Pod | PidMode::Own => String::new(),
        },
        own_pid_namespace: config.pid == PidMode::Own,
        volumes,
        copied_in_volumes: Vec::new(),
        devices: Vec::new(),
        empty_dirs: Vec::new(),
        disks: Vec::new(),
        anonymous_volumes,
        socket_volumes: Vec::new(),
    })
}
