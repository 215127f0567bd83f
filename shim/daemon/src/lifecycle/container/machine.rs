//! Prepares the container of a machine pod on the node: builds the machine's document and opens those of its disks that are files
//! or devices of the node. The directories of its file systems are shared with the pod, because a pod process sees none.

use super::extents;
use crate::lifecycle::context::NodeServices;
use crate::lifecycle::context::error::{LifecycleError, at};
use crate::lifecycle::context::request::ask;
use crate::lifecycle::volume::device;
use crate::lifecycle::volume::shared::{detach_all, shared};
use nacelle_base::task::run_blocking_or_panic as blocking;
use nacelle_machines::machine_pod::{self, DiskVolume, PassthroughDevices, SourceError};
use nacelle_model::container::ContainerConfig;
use nacelle_model::machine::DiskSource;
use nacelle_model::machine_pod::MachinePod;
use nacelle_model::record::{ContainerRecord, PodRecord};
use nacelle_pod::client::{Offer, PodClient};
use nacelle_pod::share::VolumeTarget;
use nacelle_proto::pod as proto;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

/// The first signal to a machine that is to stop: any signal but SIGKILL presses its power button.
const POWER_BUTTON: u32 = 15;
/// The step's name for errors.
const STEP: &str = "find the disks and devices of the machine";

/// What the container's volumes provide for the machine's disks; disks without a volume are not in it.
#[derive(Default)]
struct VolumeDisks {
    /// Disks that are sent to the pod process, with their open files.
    disks: Vec<(proto::Disk, OwnedFd)>,
    /// The sources of the disks that have a volume, by the disk's name.
    sources: BTreeMap<String, DiskSource>,
}

/// Returns the request to the pod process, the disks that were sent to it already, and the PCI devices that it gets once it has
/// created the machine.
pub(crate) async fn prepare(
    services: &NodeServices,
    client: &PodClient,
    pod: &PodRecord,
    machine: &MachinePod,
    record: &ContainerRecord,
) -> Result<(proto::CreateContainerRequest, Vec<Offer>, PassthroughDevices), LifecycleError> {
    share(services, pod, machine, record).await?;
    let prepared = without_directories(services, client, machine, record).await;
    if prepared.is_err() {
        detach_all(services, pod, record).await;
    }
    prepared
}

/// Shares the directories of the machine's file systems with the pod, in the order of the machine's document.
async fn share(
    services: &NodeServices,
    pod: &PodRecord,
    machine: &MachinePod,
    record: &ContainerRecord,
) -> Result<(), LifecycleError> {
    if machine.filesystems.is_empty() {
        return Ok(());
    }
    let (filesystems, config) = (machine.filesystems.clone(), Arc::clone(&record.config));
    let found = blocking(move || {
        let found = filesystems
            .iter()
            .map(|one| machine_pod::resolve_directory(one, machine_pod::filesystem_mount(one, &config)?));
        found.collect::<Result<Vec<_>, _>>()
    });
    let found = found.await.map_err(|error| at(STEP)(SourceError::Volume(error)))?;
    let volumes = found.iter().map(|volume| shared(volume, Path::new(&volume.host_path), &pod.config)).collect();
    let attached =
        services.pods.attach(&services.pod_dir(&pod.id), VolumeTarget::Share, record.id.as_str(), volumes).await;
    attached.map_err(at("share the directories of the machine's file systems with the pod"))
}

async fn without_directories(
    services: &NodeServices,
    client: &PodClient,
    machine: &MachinePod,
    record: &ContainerRecord,
) -> Result<(proto::CreateContainerRequest, Vec<Offer>, PassthroughDevices), LifecycleError> {
    let (mut machine, config) = (machine.clone(), Arc::clone(&record.config));
    let (machine, passed, VolumeDisks { disks, sources }) = blocking(move || {
        let passed =
            PassthroughDevices::find(&config.devices).map_err(|error| at(STEP)(SourceError::Passthrough(error)))?;
        machine.host_devices = passed.devices();
        let found = open(&machine, &config)?;
        Ok::<_, LifecycleError>((machine, passed, found))
    })
    .await?;
    let config = &record.config;
    let root = services.images.rootfs(&record.image.id).await.map_err(at("read the image of the container"))?;
    let document = machine_pod::build_document(&machine, record, &services.images, sources).await;
    let mut request = proto::CreateContainerRequest {
        id: record.id.to_string(),
        oci_spec: document.map_err(at(STEP))?,
        image_key: record.image.id.to_string(),
        image: extents(&root.disk),
        // The keeper has no image disk.
        images_by_path: true,
        tty: config.tty,
        stdin: config.stdin,
        stdin_once: config.stdin_once,
        stop_signal: config.stop_signal.unwrap_or(POWER_BUTTON),
        ..Default::default()
    };
    let mut offers = Vec::with_capacity(disks.len());
    for (disk, file) in disks {
        let call = client.offer_device(record.id.as_str(), &disk.name, file);
        offers.push(ask("hand a disk over to the pod", services.request_timeout(), call).await?);
        request.disks.push(disk);
    }
    Ok((request, offers, passed))
}

/// Passes the PCI devices to a machine that is created and has not started.
pub(crate) async fn pass(
    services: &NodeServices,
    pod: &PodRecord,
    passed: PassthroughDevices,
) -> Result<(), LifecycleError> {
    let (dir, user) = (services.pod_dir(&pod.id), pod.user);
    let placed = blocking(move || passed.create_nodes(&dir, user)).await;
    placed.map_err(|error| at("give the machine its PCI devices")(SourceError::Passthrough(error)))
}

/// Opens the files and devices of the machine's disks and reads their properties.
fn open(machine: &MachinePod, config: &ContainerConfig) -> Result<VolumeDisks, LifecycleError> {
    let failed = |error| at(STEP)(SourceError::Volume(error));
    let mut found = VolumeDisks::default();
    for disk in &machine.disks {
        let (path, file) = match machine_pod::find_disk_volume(disk, config).map_err(failed)? {
            None => continue,
            Some(DiskVolume::Device(device)) => {
                let mut device = device.clone();
                if disk.read_only {
                    device.permissions = "r".to_owned();
                }
                let (message, file) = device::open_block(&device)?;
                machine_pod::check_unused(disk, &device).map_err(failed)?;
                (message.path, file)
            }
            Some(DiskVolume::Mount(mount)) => {
                let (path, file) = machine_pod::open_disk_file(disk, mount).map_err(failed)?;
                (path.display().to_string(), file.into())
            }
            Some(DiskVolume::Files(mount)) => {
                let source = machine_pod::files_disk_source(disk, mount).map_err(failed)?;
                found.sources.insert(disk.name.clone(), source);
                continue;
            }
            Some(DiskVolume::Secrets(mounts)) => {
                let source = machine_pod::cloud_init_disk_source(disk, &mounts).map_err(failed)?;
                found.sources.insert(disk.name.clone(), source);
                continue;
            }
        };
        found.sources.insert(disk.name.clone(), DiskSource::Device { path: path.clone() });
        found.disks.push((proto::Disk { name: disk.name.clone(), path }, file));
    }
    Ok(found)
}
