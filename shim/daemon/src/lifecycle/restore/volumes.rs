//! Finds the names that the volumes of a restored pod have in its guest. A name follows from the path on the node, which is another one in
//! each pod; the guest keeps the name that the volume had in the first one.

use super::ContainerToRestore;
use super::error::{Incompatibility, PodRestoreError};
use crate::lifecycle::volume::volume_key;
use nacelle_base::files::at;
use nacelle_model::checkpoint::{SavedContainer, SavedVolume};
use std::collections::BTreeMap;
use std::path::Path;

/// Returns the names in the guest by the volumes on the node: those that are known from other containers of the pod, and those of this one,
/// whose volumes must all be inside the saved VM. Blocks.
pub(super) fn names(
    known: BTreeMap<String, String>,
    saved: &SavedContainer,
    wanted: &ContainerToRestore,
) -> Result<BTreeMap<String, String>, PodRestoreError> {
    let mut keys: BTreeMap<String, String> = known.iter().map(|(key, name)| (name.clone(), key.clone())).collect();
    let mut names = known;
    for volume in &wanted.config.node_volumes {
        let is_it = |saved: &&SavedVolume| saved.container_path == volume.container_path && saved.is_valid();
        let in_guest = saved.guest_volumes.iter().find(is_it);
        let in_guest = in_guest.ok_or_else(|| Incompatibility::Volume {
            name: wanted.config.name.clone(),
            path: volume.container_path.clone(),
            is_saved: false,
        })?;
        let path = Path::new(&volume.host_path);
        let path = path.canonicalize().map_err(at("find", path))?;
        let key = volume_key(&path, &in_guest.name);
        let other_key = keys.insert(in_guest.name.clone(), key.clone()).filter(|known| *known != key);
        let other_name = names.insert(key, in_guest.name.clone()).filter(|known| *known != in_guest.name);
        if other_key.or(other_name).is_some() {
            let (name, path) = (wanted.config.name.clone(), volume.container_path.clone());
            return Err(Incompatibility::SharedVolume { name, path }.into());
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_model::container::ContainerConfig;
    use nacelle_model::mount::{NodeVolume, Propagation};
    use nacelle_model::testing::container;

    /// Returns a saved container with the volumes `/0`, `/1`, … of these names, and the request for it with these paths.
    fn pair(names: &[&str], paths: &[&Path]) -> (SavedContainer, ContainerToRestore) {
        let in_guest = names.iter().enumerate();
        let in_guest = in_guest.map(|(n, name)| nacelle_model::checkpoint::SavedVolume {
            container_path: format!("/{n}"),
            name: (*name).to_owned(),
        });
        let saved = container(2, 1).saved(in_guest.collect());
        let volume = |(n, path): (usize, &&Path)| NodeVolume {
            host_path: path.display().to_string(),
            container_path: format!("/{n}"),
            readonly: true,
            recursive_read_only: false,
            propagation: Propagation::Private,
            id_mapped: false,
            options: [].into(),
        };
        let node_volumes = paths.iter().enumerate().map(volume).collect();
        let config = ContainerConfig { node_volumes, ..(*saved.config).clone() };
        let (image, volumes) = (saved.image.clone(), saved.volumes.clone());
        (saved, ContainerToRestore { config, image, volumes })
    }

    #[test]
    fn volumes_are_shared_between_the_same_mounts_as_in_the_checkpoint() {
        let node = tempfile::tempdir().unwrap();
        let [one, two] = ["one", "two"].map(|name| node.path().canonicalize().unwrap().join(name));
        for path in [&one, &two] {
            std::fs::create_dir(path).unwrap();
        }
        let names_of = |pairs: &[(SavedContainer, ContainerToRestore)]| {
            pairs.iter().try_fold(BTreeMap::new(), |known, (saved, wanted)| names(known, saved, wanted))
        };
        let refused = |pairs: &[(SavedContainer, ContainerToRestore)]| {
            matches!(
                names_of(pairs),
                Err(PodRestoreError::Incompatible(Incompatibility::SharedVolume { path, .. })) if path == "/1" || path == "/0"
            )
        };
        let (a, b) = ("configmap.a.1", "configmap.b.2");
        let found = names_of(&[pair(&[a, b], &[&one, &two]), pair(&[b], &[&two])]).unwrap();
        let expected = [(&one, a), (&two, b)].map(|(path, name)| (path.display().to_string(), name.to_owned()));
        assert_eq!(found, BTreeMap::from(expected));
        assert!(refused(&[pair(&[a, b], &[&one, &one])]), "one volume in place of two");
        assert!(refused(&[pair(&[a], &[&one]), pair(&[a], &[&two])]), "two volumes in place of one");
        let unknown = names_of(&[pair(&[], &[&one])]).unwrap_err().to_string();
        assert!(unknown.contains("at /0 that is not in the checkpoint"), "{unknown}");
    }
}
