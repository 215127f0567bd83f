//! Shares volumes of the node with a pod, and detaches them.

use super::plan::VolumePlan;
use crate::lifecycle::context::NodeServices;
use crate::lifecycle::context::error::{LifecycleError, at};
use nacelle_base::Chain;
use nacelle_model::container::ContainerConfig;
use nacelle_model::mount::{MountOption, NodeVolume, Propagation};
use nacelle_model::namespace::{IdRange, UserNamespace};
use nacelle_model::pod::{PodConfig, PodKind};
use nacelle_model::record::{ContainerRecord, PodRecord};
use nacelle_pod::share::{self as shares, Owners, VolumeAccess, VolumeTarget, VolumeToMount};
use std::path::Path;

/// Returns which process mounts the volumes of a pod.
pub(crate) fn mounting_process(pod: &PodRecord) -> VolumeTarget {
    if pod.config.kind.has_guest() { VolumeTarget::Share } else { VolumeTarget::Agent }
}

/// Returns the processes that may hold volumes of a container.
pub(crate) fn mounting_processes(pod: &PodRecord, config: &ContainerConfig) -> &'static [VolumeTarget] {
    match &pod.config.kind {
        _ if config.node_volumes.is_empty() => &[],
        PodKind::Machine { machine, .. } if machine.filesystems.is_empty() => &[],
        PodKind::Machine { .. } => &[VolumeTarget::Share],
        PodKind::Containers { .. } => &[VolumeTarget::Share, VolumeTarget::CopiedIn],
        PodKind::Host { .. } => &[VolumeTarget::Agent],
    }
}

/// Returns the request to the process that mounts the volume.
pub(crate) fn shared(volume: &NodeVolume, host: &Path, pod: &PodConfig) -> VolumeToMount {
    let range = |range: IdRange| (range.first, range.count);
    let owners = |users: UserNamespace| Owners { users: range(users.users), groups: range(users.groups) };
    VolumeToMount {
        path: host.to_owned(),
        access: match (volume.readonly, volume.recursive_read_only) {
            (_, true) => VolumeAccess::RecursiveReadOnly,
            (true, false) => VolumeAccess::ReadOnly,
            (false, false) => VolumeAccess::ReadWrite,
        },
        no_access_times: volume.options.contains(&MountOption::Noatime),
        propagation: match volume.propagation {
            Propagation::Private => shares::Propagation::Private,
            Propagation::FromNode => shares::Propagation::FromNode,
            Propagation::BothWays => shares::Propagation::BothWays,
        },
        owners: pod.user_namespace.filter(|_| volume.id_mapped).map(owners),
    }
}

/// Hands the volumes of a container that are shared, copied in or have sockets to the processes that mount or open them.
pub(crate) async fn attach(
    services: &NodeServices,
    pod: &PodRecord,
    record: &ContainerRecord,
    plans: &[VolumePlan],
) -> Result<(), LifecycleError> {
    let shared_volumes = plans.iter().filter(|plan| plan.is_shared()).collect();
    let opened = plans.iter().filter(|plan| plan.is_opened()).collect();
    for (process, plans) in [(mounting_process(pod), shared_volumes), (VolumeTarget::CopiedIn, opened)] {
        let plans: Vec<&VolumePlan> = plans;
        let volumes: Vec<_> =
            plans.into_iter().map(|plan| shared(&plan.request, plan.host.as_path(), &pod.config)).collect();
        if !volumes.is_empty() {
            let attached = services.pods.attach(&services.pod_dir(&pod.id), process, record.id.as_str(), volumes).await;
            attached.map_err(at("share the volumes of the container with the pod"))?;
        }
    }
    Ok(())
}

/// Detaches the volumes of a container whose creation failed.
pub(crate) async fn detach_all(services: &NodeServices, pod: &PodRecord, record: &ContainerRecord) {
    for process in mounting_processes(pod, &record.config) {
        detach_from(services, pod, record, *process).await;
    }
}

pub(crate) async fn detach_from(
    services: &NodeServices,
    pod: &PodRecord,
    record: &ContainerRecord,
    process: VolumeTarget,
) {
    if let Err(error) = services.pods.detach(&services.pod_dir(&pod.id), process, record.id.as_str()).await {
        tracing::warn!(container = %record.id, "cannot detach the volumes of the container: {}", Chain(&error));
    }
}
