//! Keeps the names that volumes have in the guest of a restored pod. They were made for the paths on the node of the pod that was saved.

use super::copied_in::in_guest;
use super::empty_dir::named;
use super::plan::{Delivery, VolumePlan};
use crate::lifecycle::context::error::LifecycleError;
use crate::oci::GuestPath;
use nacelle_base::ContainerId;
use nacelle_model::record::RestoredFrom;
use std::path::Path;

/// The beginning of the names of emptyDirs in memory.
pub(super) const IN_MEMORY: &str = "memory";

/// Returns what identifies a volume of the node that has this name in a guest: for an emptyDir its directory, of which containers may have
/// parts, otherwise the path. `path` is without symbolic links.
pub(crate) fn volume_key(path: &Path, name_in_guest: &str) -> String {
    let directory = named(path).filter(|_| is_in_memory(name_in_guest)).map(|(_, directory)| directory);
    directory.as_deref().unwrap_or(path).display().to_string()
}

/// Returns whether this is the name of an emptyDir in memory, and not that of a copied-in volume.
fn is_in_memory(name_in_guest: &str) -> bool {
    name_in_guest.strip_prefix(IN_MEMORY).is_some_and(|rest| rest.starts_with('.'))
}

/// Gives the volumes the names that the restored guest has for them. A container that continues has only volumes that are in the guest, and
/// are of the same kind there. The copy of a part of a volume belongs to one container: a later one gets a copy of its own.
pub(super) fn keep_names(
    restored: &RestoredFrom,
    container: &ContainerId,
    plans: &mut [VolumePlan],
) -> Result<(), LifecycleError> {
    let continues = restored.containers.contains(container);
    for plan in plans {
        let key = match &plan.delivery {
            Delivery::CopiedIn(_) => plan.host.as_str(),
            Delivery::Memory(volume) => volume.path.as_str(),
            Delivery::Shared | Delivery::Sockets(_) | Delivery::Disk { .. } => "",
        };
        match (restored.volumes.get(key), &mut plan.delivery) {
            (Some(name), Delivery::CopiedIn(copy))
                if !is_in_memory(name) && (continues || copy.is_live || copy.is_of_pod) =>
            {
                copy.name.clone_from(name);
                plan.guest = GuestPath::new(in_guest(copy));
            }
            (Some(name), Delivery::Memory(volume)) if is_in_memory(name) => volume.name.clone_from(name),
            _ if continues => {
                return Err(LifecycleError::NotInCheckpoint { path: plan.request.container_path.clone() });
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_dir_is_known_by_its_directory_and_others_by_their_path() {
        let pod = "/var/lib/kubelet/pods/u";
        let key = |path: &str, name: &str| volume_key(Path::new(&format!("{pod}/{path}")), name);
        let cache = format!("{pod}/volumes/kubernetes.io~empty-dir/cache");
        assert_eq!(key("volumes/kubernetes.io~empty-dir/cache", "memory.cache.1"), cache);
        assert_eq!(key("volume-subpaths/cache/web/0", "memory.cache.1"), cache);
        assert_eq!(key("volume-subpaths/conf/web/0", "0a1b.0"), format!("{pod}/volume-subpaths/conf/web/0"));
        let conf = "volumes/kubernetes.io~configmap/conf";
        assert_eq!(key(conf, "configmap.conf.1"), format!("{pod}/{conf}"));
    }
}
