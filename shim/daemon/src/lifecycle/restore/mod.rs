//! Restores pods from checkpoints: by RestorePod, which names all containers at once, or by RunPodSandbox with the name of a checkpoint,
//! after which each container continues when it is created. The checks before a pod exists or a container continues are here: the files,
//! the manifest, and whether the request fits what was saved. `node::restore` then runs the pod and creates its containers as other
//! requests do.

mod compare;
mod error;
mod images;
mod source;
mod volumes;

pub use error::{Incompatibility, PodRestoreError};
pub use source::read as read_checkpoint;

use super::context::error::at;
use super::context::{NodeServices, new_id};
use super::pod::size;
use crate::config::Handler;
use nacelle_base::machine::EngineKind;
use nacelle_base::task::run_blocking_or_panic as blocking;
use nacelle_base::{ContainerId, PodId};
use nacelle_model::checkpoint::{CheckpointManifest, SavedContainer};
use nacelle_model::container::{ContainerConfig, ContainerImage};
use nacelle_model::pod::PodConfig;
use nacelle_model::record::{RestoredFrom, WaitingContainer};
use nacelle_model::resources::{PodResources, Resources, VmResources};
use nacelle_pod::spec::{CheckpointBase, CheckpointedContainer, PodSpec};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tokio::time::Instant;

/// A new pod that continues from a checkpoint.
#[derive(Clone, Debug)]
pub struct PodToRestore {
    /// The absolute path of the directory with the checkpoint.
    pub checkpoint: PathBuf,
    /// The pod as requested.
    pub config: PodConfig,
    /// The name of its handler.
    pub handler: String,
    /// Its engine.
    pub engine: EngineKind,
}

/// A request to restore a pod.
#[derive(Clone, Debug)]
pub struct RestoreOrder {
    /// The new pod.
    pub pod: PodToRestore,
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
}

impl PodBase {
    /// Checks that this node has the images of all containers as the guest has mounted them.
    pub async fn check_images(&self, services: &NodeServices) -> Result<(), PodRestoreError> {
        for waiting in &self.restored.waiting {
            check_images(services, waiting).await?;
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

/// How a container continues that was checked against its checkpoint.
#[derive(Clone, Debug)]
pub(crate) struct Continuation {
    /// The id of the container, under which it waits.
    pub id: ContainerId,
    /// The names that the volumes of this container and of those before it have in the guest, as in [`RestoredFrom::volumes`].
    pub volumes: BTreeMap<String, String>,
}

/// A container of a request to restore a pod.
pub(crate) struct PlannedContainer {
    pub continuation: Continuation,
    pub container: ContainerToRestore,
}

/// Checks a request with all containers against its checkpoint, and chooses the ids of the containers. Changes nothing. Blocks.
pub(crate) fn plan(
    order: &RestoreOrder,
    handler: &Handler,
) -> Result<(PodBase, Vec<PlannedContainer>), PodRestoreError> {
    let manifest = fitting_manifest(&order.pod, handler)?;
    let pairs = compare::pair(&manifest, &order.containers)?;
    let saved: Vec<_> = pairs.iter().map(|(saved, _)| *saved).collect();
    let base = pod_base(&order.pod.checkpoint, &manifest, &saved, false)?;
    let mut planned: Vec<PlannedContainer> = Vec::with_capacity(pairs.len());
    for (waiting, (saved, container)) in base.restored.waiting.iter().zip(&pairs) {
        let known = planned.last().map(|last| last.continuation.volumes.clone()).unwrap_or_default();
        let continuation = Continuation { id: waiting.id.clone(), volumes: volumes::names(known, saved, container)? };
        planned.push(PlannedContainer { continuation, container: (*container).clone() });
    }
    Ok((base, planned))
}

/// Checks a request for a pod whose containers are created later against its checkpoint, and chooses the ids of the containers. Changes
/// nothing. Blocks.
pub(crate) fn plan_pod(pod: &PodToRestore, handler: &Handler) -> Result<PodBase, PodRestoreError> {
    // The one of the namespace, below that of all checkpoints.
    let parents: Vec<&Path> = pod.checkpoint.ancestors().skip(1).take(2).collect();
    source::check_parents(&parents)?;
    let manifest = fitting_manifest(pod, handler)?;
    let saved: Vec<_> = compare::by_name(&manifest)?.into_values().collect();
    pod_base(&pod.checkpoint, &manifest, &saved, true)
}

/// Checks a new container against the waiting one of its name. `None` if none waits: it is a new one.
pub(crate) async fn plan_container(
    services: &NodeServices,
    restored: &RestoredFrom,
    container: ContainerToRestore,
) -> Result<Option<Continuation>, PodRestoreError> {
    let is_it = |waiting: &&WaitingContainer| waiting.saved.config.name == container.config.name;
    let Some(waiting) = restored.waiting.iter().find(is_it).cloned() else { return Ok(None) };
    check_images(services, &waiting).await?;
    let known = restored.volumes.clone();
    let planned = blocking(move || {
        compare::check_container(&waiting.saved, &container)?;
        let volumes = volumes::names(known, &waiting.saved, &container)?;
        Ok(Some(Continuation { id: waiting.id, volumes }))
    });
    planned.await
}

/// Checks that this node has the images of a container as the guest has mounted them. Another version of Nacelle may lay the same image
/// out otherwise.
async fn check_images(services: &NodeServices, waiting: &WaitingContainer) -> Result<(), PodRestoreError> {
    for (image, saved) in &waiting.layouts {
        let here = services.images.layout(image).await.map_err(at("find the layout of an image"))?;
        if *saved != Some(here) {
            let saved = saved.map_or_else(|| "unknown".to_owned(), |saved| saved.to_string());
            let what = format!("the layout of image {image}");
            return Err(Incompatibility::Setting { what, saved, here: here.to_string() }.into());
        }
    }
    Ok(())
}

/// Reads the manifest of a checkpoint from which the pod can continue on this node.
fn fitting_manifest(pod: &PodToRestore, handler: &Handler) -> Result<CheckpointManifest, PodRestoreError> {
    compare::check_engine(pod, handler)?;
    let manifest = source::read(&pod.checkpoint)?;
    compare::check(&manifest, pod, handler)?;
    Ok(manifest)
}

/// Returns what a pod continues from. All containers of the manifest are in `saved`.
fn pod_base(
    directory: &Path,
    manifest: &CheckpointManifest,
    saved: &[&SavedContainer],
    is_complete: bool,
) -> Result<PodBase, PodRestoreError> {
    let images = images::images(manifest)?;
    let waiting: Vec<WaitingContainer> = saved
        .iter()
        .map(|saved| WaitingContainer {
            id: ContainerId::from_bytes(new_id()),
            saved: (*saved).clone(),
            layouts: images.layouts_of(saved),
        })
        .collect();
    let checkpointed = |waiting: &WaitingContainer| CheckpointedContainer {
        saved_id: waiting.saved.id.clone(),
        id: waiting.id.clone(),
    };
    let vm = &manifest.vm;
    let checkpoint = CheckpointBase {
        directory: directory.to_owned(),
        booted_mib: vm.booted_mib,
        reserve_used_bytes: vm.reserve_used_bytes,
        containers: waiting.iter().map(checkpointed).collect(),
        images: images.placed,
    };
    let restored = RestoredFrom {
        checkpoint: manifest.id.clone(),
        containers: waiting.iter().map(|waiting| waiting.id.clone()).collect(),
        volumes: BTreeMap::new(),
        is_complete,
        waiting,
    };
    let memory_mib = vm.booted_mib.saturating_add(vm.added_mib);
    Ok(PodBase { checkpoint, memory_mib, restored, resources: manifest.pod_resources.clone() })
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
                waiting: Vec::new(),
            },
            resources: Some(PodResources {
                containers: Resources { cpu_period: 100_000, cpu_quota, memory_limit: 1 << 50, ..Resources::default() },
                overhead: Resources::default(),
            }),
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
