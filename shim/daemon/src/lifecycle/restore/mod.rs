//! Restores pods from checkpoints (RestorePod). The checks before a pod exists are here: the files, the manifest, and whether the request
//! fits what was saved. `node::restore` then runs the pod and creates its containers as other requests do.

mod compare;
mod error;
mod images;
mod source;
mod volumes;

pub use error::{Incompatibility, PodRestoreError};

use super::context::error::at;
use super::context::{NodeServices, new_id};
use super::pod::size;
use crate::config::Handler;
use nacelle_base::machine::EngineKind;
use nacelle_base::{ContainerId, PodId};
use nacelle_model::container::{ContainerConfig, ContainerImage};
use nacelle_model::digest::{Digest, ImageId};
use nacelle_model::pod::PodConfig;
use nacelle_model::record::RestoredFrom;
use nacelle_model::resources::{PodResources, Resources, VmResources};
use nacelle_pod::spec::{CheckpointBase, CheckpointedContainer, PodSpec};
use std::path::PathBuf;
use tokio::time::Instant;

/// A request to restore a pod.
#[derive(Clone, Debug)]
pub struct RestoreOrder {
    /// The absolute path of the directory with the checkpoint.
    pub checkpoint: PathBuf,
    /// The new pod.
    pub config: PodConfig,
    /// The name of its handler.
    pub handler: String,
    /// Its engine.
    pub engine: EngineKind,
    /// Its containers: those of the checkpoint.
    pub containers: Vec<ContainerToRestore>,
    /// The time at which the caller gives up.
    pub limit: Instant,
}

/// A container that continues.
#[derive(Clone, Debug)]
pub struct ContainerToRestore {
    /// The container as requested.
    pub config: ContainerConfig,
    /// The image of the root file system.
    pub image: ContainerImage,
    /// The images of the image volumes, in the order of the volumes.
    pub volumes: Vec<ContainerImage>,
}

/// A restored pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestoredPod {
    /// The pod's id.
    pub id: PodId,
    /// The names and ids of its containers.
    pub containers: Vec<(String, ContainerId)>,
}

/// What a pod continues from, checked against its request.
#[derive(Clone, Debug)]
pub(crate) struct PodBase {
    /// The part for the pod process.
    checkpoint: CheckpointBase,
    /// The memory of the VM without its reserve in MiB.
    memory_mib: u32,
    /// The part for the record of the pod.
    pub restored: RestoredFrom,
    /// The limits of the saved pod, if they changed after its request.
    pub resources: Option<PodResources>,
    /// How the images of the containers are laid out.
    layouts: Vec<(ImageId, Option<Digest>)>,
}

impl PodBase {
    /// Checks that this node has the images as the guest has mounted them. Another version of Nacelle may lay the same image out otherwise.
    pub async fn check_images(&self, services: &NodeServices) -> Result<(), PodRestoreError> {
        for (image, saved) in &self.layouts {
            let here = services.images.layout(image).await.map_err(at("find the layout of an image"))?;
            if *saved != Some(here) {
                let saved = saved.map_or_else(|| "unknown".to_owned(), |saved| saved.to_string());
                let what = format!("the layout of image {image}");
                return Err(Incompatibility::Setting { what, saved, here: here.to_string() }.into());
            }
        }
        Ok(())
    }

    /// Makes the specification of a new pod that of one which continues.
    pub fn apply(&self, spec: &mut PodSpec) {
        spec.memory_mib = self.memory_mib;
        spec.checkpoint = Some(self.checkpoint.clone());
    }

    /// Returns the resources of the VM that continues, of one with these resources at its creation: it has the memory and, unless its number
    /// of vCPUs is fixed, the vCPUs that the last resize of the saved pod gave it.
    pub fn resized(&self, created: VmResources, config: &PodConfig, handler: &Handler) -> VmResources {
        let memory = created.least_memory.saturating_add(self.checkpoint.reserve_used_bytes);
        let created = VmResources { memory: memory.min(created.memory_bound()), ..created };
        let Some(resources) = self.resources.as_ref().filter(|_| size::grows(config)) else { return created };
        let Resources { cpu_period, cpu_quota, .. } = resources.containers;
        let limits = Resources { cpu_period, cpu_quota, ..Resources::default() };
        // Limits that the VM cannot have were refused by the saved pod.
        size::wanted(created, handler.vcpus, &limits).unwrap_or(created)
    }
}

/// A container that continues, with its id in the new pod.
pub(crate) struct PlannedContainer {
    pub id: ContainerId,
    pub container: ContainerToRestore,
}

/// Checks a request against its checkpoint, and chooses the ids of the containers. Changes nothing. Blocks.
pub(crate) fn plan(
    order: &RestoreOrder,
    handler: &Handler,
) -> Result<(PodBase, Vec<PlannedContainer>), PodRestoreError> {
    compare::check_engine(order, handler)?;
    let manifest = source::read(&order.checkpoint)?;
    compare::check(&manifest, order, handler)?;
    let pairs = compare::pair(&manifest, &order.containers)?;
    let planned: Vec<_> = pairs
        .iter()
        .map(|(_, container)| PlannedContainer {
            id: ContainerId::from_bytes(new_id()),
            container: (*container).clone(),
        })
        .collect();
    let restored = RestoredFrom {
        checkpoint: manifest.id.clone(),
        containers: planned.iter().map(|planned| planned.id.clone()).collect(),
        volumes: volumes::names(&pairs)?,
        is_complete: false,
    };
    let containers = pairs
        .iter()
        .zip(&planned)
        .map(|((saved, _), planned)| CheckpointedContainer { saved_id: saved.id.clone(), id: planned.id.clone() });
    let images = images::images(&manifest)?;
    let vm = &manifest.vm;
    let checkpoint = CheckpointBase {
        directory: order.checkpoint.clone(),
        booted_mib: vm.booted_mib,
        reserve_used_bytes: vm.reserve_used_bytes,
        containers: containers.collect(),
        images: images.placed,
    };
    let memory_mib = vm.booted_mib.saturating_add(vm.added_mib);
    let (resources, layouts) = (manifest.pod_resources, images.layouts);
    Ok((PodBase { checkpoint, memory_mib, restored, resources, layouts }, planned))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resized_vm_continues_with_its_present_resources() {
        let handler = Handler { vcpus: 1, max_vcpus: Some(8), ..Handler::default() };
        let config = (*nacelle_model::testing::pod(1).config).clone();
        let (least, block) = (256 << 20, 128 << 20);
        let created =
            VmResources { vcpus: 1, max_vcpus: 8, memory: least, least_memory: least, max_memory: least + 4 * block };
        let base = |reserve_used_bytes, cpu_quota| PodBase {
            checkpoint: CheckpointBase {
                directory: "/c".into(),
                booted_mib: 256,
                reserve_used_bytes,
                containers: Vec::new(),
                images: Vec::new(),
            },
            memory_mib: 256,
            restored: RestoredFrom {
                checkpoint: "c".into(),
                containers: [].into(),
                volumes: [].into(),
                is_complete: false,
            },
            resources: Some(PodResources {
                containers: Resources { cpu_period: 100_000, cpu_quota, memory_limit: 1 << 50, ..Resources::default() },
                overhead: Resources::default(),
            }),
            layouts: Vec::new(),
        };
        let found = |base: &PodBase| {
            let found = base.resized(created, &config, &handler);
            assert_eq!(VmResources { vcpus: 1, memory: least, ..found }, created, "the bounds stay");
            (found.vcpus, (found.memory - least) / block)
        };
        assert_eq!(found(&base(0, 0)), (1, 0));
        assert_eq!(found(&base(2 * block, 350_000)), (4, 2));
        assert_eq!(found(&base(u64::MAX, 900_000)), (1, 4), "more than the VM can have");
        assert_eq!(found(&PodBase { resources: None, ..base(block, 350_000) }), (1, 1));
    }
}
