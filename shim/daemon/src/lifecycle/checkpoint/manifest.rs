//! Builds the manifest of a checkpoint. The pod process, whose reply and whose files are in it, is not trusted: they are checked against the
//! specification of the pod.

use super::error::CheckpointError;
use crate::lifecycle::context::text::clip;
use crate::lifecycle::context::view::View;
use crate::lifecycle::template::node_cpu;
use nacelle_base::ContainerId;
use nacelle_model::checkpoint::{
    CheckpointManifest, MEMORY_FILE, SCRATCH_FILE, STATE_FILE, SavedContainer, SavedFileSizes, SavedImagePlacement,
    SavedVm, SavedVolume, VERSION,
};
use nacelle_model::digest::{Digest, ImageId};
use nacelle_model::record::ContainerRecord;
use nacelle_pod::spec::PodSpec;
use nacelle_proto::pod as proto;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

/// The largest state of vCPUs and devices in bytes.
const MAX_STATE: u64 = 64 << 20;
/// The largest number of images on an image disk.
pub(super) const MAX_IMAGES: usize = 255;
/// The bound of positions on an image disk in bytes.
const MAX_DISK: u64 = 1 << 46;

/// A pod whose VM is in the files.
pub(super) struct SavedPod<'a> {
    /// The id of the checkpoint.
    pub id: String,
    /// The time of the request in nanoseconds since 1970.
    pub created_at: i64,
    pub view: &'a View,
    /// The ids of the containers that ran.
    pub containers: &'a BTreeSet<ContainerId>,
    pub spec: &'a PodSpec,
    /// The layouts of the images that the node has.
    pub layouts: BTreeMap<ImageId, Digest>,
    pub reply: proto::CheckpointResponse,
}

impl SavedPod<'_> {
    /// Returns the manifest for files of these sizes.
    ///
    /// # Errors
    /// The reply of the pod process is invalid, or a file has another length than the VM.
    pub(super) fn manifest(&self, files: SavedFileSizes) -> Result<CheckpointManifest, CheckpointError> {
        let SavedPod { view, containers, .. } = self;
        let vm = self.vm()?;
        check_files(&vm, files)?;
        let (saved, other): (Vec<_>, Vec<_>) =
            view.containers.values().partition(|record| containers.contains(&record.id));
        Ok(CheckpointManifest {
            version: VERSION,
            id: self.id.clone(),
            nacelle_version: env!("CARGO_PKG_VERSION").to_owned(),
            created_at: self.created_at,
            pod_id: view.pod.id.clone(),
            handler: view.pod.handler.clone(),
            pod: view.pod.config.clone(),
            pod_resources: view.pod.resources.clone(),
            vm,
            containers: saved.into_iter().map(|record| self.container(record)).collect::<Result<_, _>>()?,
            other_containers: other.into_iter().map(|record| record.id.clone()).collect(),
            images: self.images()?,
            undrained: self.undrained()?,
            files,
        })
    }

    fn vm(&self) -> Result<SavedVm, CheckpointError> {
        let SavedPod { spec, reply, view, .. } = self;
        let proto::CheckpointResponse { booted_mib, added_mib, reserve_bytes, .. } = *reply;
        // A VM from a template gets the rest of its memory in whole blocks.
        let usable = u64::from(booted_mib) + u64::from(added_mib);
        let wanted = u64::from(spec.memory_mib);
        if !(wanted..wanted + u64::from(nacelle_engine::BLOCK_MIB)).contains(&usable) {
            return Err(invalid(format!("{booted_mib} and {added_mib} MiB of memory, and its VM has {wanted}")));
        }
        let reserve_mib = spec.reserved_memory_mib.unwrap_or(0);
        if reserve_bytes > u64::from(reserve_mib) << 20 {
            return Err(invalid(format!("{reserve_bytes} bytes of a reserve of {reserve_mib} MiB")));
        }
        Ok(SavedVm {
            state_version: nacelle_engine::SNAPSHOT_VERSION,
            node_cpu: node_cpu(),
            vcpus: spec.vcpus,
            max_vcpus: spec.max_vcpus(),
            topology: spec.topology,
            cpu_model: spec.cpu_model.clone(),
            booted_mib,
            added_mib,
            reserve_mib,
            reserve_used_bytes: reserve_bytes,
            scratch_mib: spec.scratch.size_mib,
            console: spec.console,
            interfaces: spec.network.iter().flat_map(|network| network.interfaces.clone()).collect(),
            kernel: spec.kernel.clone(),
            kernel_release: view.pod.kernel_release.clone(),
            kernel_args: spec.kernel_args.clone(),
        })
    }

    fn images(&self) -> Result<Vec<SavedImagePlacement>, CheckpointError> {
        let images = &self.reply.images;
        if images.len() > MAX_IMAGES {
            return Err(invalid(format!("{} images", images.len())));
        }
        let placement = |image: &proto::PlacedImage| {
            let proto::PlacedImage { image_key, partition, offset, length } = image;
            let fits = (1..=255).contains(partition) && *offset < MAX_DISK && *length < MAX_DISK;
            let image = image_key.parse().ok().filter(|_| fits);
            let image = image.ok_or_else(|| invalid(format!("an invalid placement of image {}", clip(image_key))))?;
            let layout = self.layouts.get(&image).copied();
            Ok(SavedImagePlacement { image, partition: *partition, offset: *offset, length: *length, layout })
        };
        images.iter().map(placement).collect()
    }

    /// Returns a container with its volumes in the VM.
    fn container(&self, record: &ContainerRecord) -> Result<SavedContainer, CheckpointError> {
        let mut volumes = Vec::with_capacity(record.config.node_volumes.len());
        for volume in &record.config.node_volumes {
            let path = &volume.container_path;
            let is_it = |saved: &&proto::VolumeInGuest| {
                saved.container_id == record.id.as_str() && saved.container_path == *path
            };
            let found = self.reply.volumes.iter().find(is_it);
            let saved = found.map(|saved| SavedVolume { container_path: path.clone(), name: saved.name.clone() });
            let saved = saved.filter(SavedVolume::is_valid);
            volumes.push(saved.ok_or_else(|| invalid(format!("no name of the volume at {path} in the guest")))?);
        }
        Ok(record.saved(volumes))
    }

    fn undrained(&self) -> Result<Vec<ContainerId>, CheckpointError> {
        let known = |id: &String| {
            let found = self.containers.iter().find(|container| container.as_str() == id);
            found.cloned().ok_or_else(|| invalid(format!("output of an unknown container {}", clip(id))))
        };
        // Without repetitions it is no longer than the list of containers.
        let undrained = self.reply.undrained.iter().map(known).collect::<Result<BTreeSet<_>, _>>()?;
        Ok(undrained.into_iter().collect())
    }
}

/// Checks that the files have the lengths that a VM like this has.
fn check_files(vm: &SavedVm, files: SavedFileSizes) -> Result<(), CheckpointError> {
    let exactly = |mib: u64| mib << 20..=mib << 20;
    let memory = u64::from(vm.booted_mib) + u64::from(vm.added_mib) + u64::from(vm.reserve_mib);
    let rows: [(_, _, RangeInclusive<u64>); 3] = [
        (STATE_FILE, files.state, 1..=MAX_STATE),
        (MEMORY_FILE, files.memory, exactly(memory)),
        (SCRATCH_FILE, files.scratch, exactly(vm.scratch_mib)),
    ];
    for (name, found, allowed) in rows {
        if !allowed.contains(&found) {
            let expected = match allowed.start() == allowed.end() {
                true => allowed.start().to_string(),
                false => format!("{} to {}", allowed.start(), allowed.end()),
            };
            return Err(CheckpointError::Length { name, found, expected });
        }
    }
    Ok(())
}

fn invalid(what: String) -> CheckpointError {
    CheckpointError::Reply { what }
}
