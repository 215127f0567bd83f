//! Determines which volumes of the node are copied into a VM instead of shared: those that kubelet writes for the VM's pod
//! (configMap, secret, projected, downwardAPI). docs/contributor/volumes.md has the rules. Reads the node's directories, and
//! changes nothing.

use nacelle_base::ContainerId;
use nacelle_base::copied_in::{DATA, DIRECTORY};
use nacelle_model::mount::{NodeVolume, Propagation};
use nacelle_proto::pod as proto;
use std::ffi::OsStr;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Directories of kubelet's volume plugins that write a volume once and then replace it as a whole.
const PLUGINS: [(&str, &str); 4] = [
    ("kubernetes.io~configmap", "configmap"),
    ("kubernetes.io~secret", "secret"),
    ("kubernetes.io~projected", "projected"),
    ("kubernetes.io~downward-api", "downward-api"),
];
/// The largest part of a volume's name, in bytes, that its name in the guest contains.
const SHOWN: usize = 64;

/// The kind of copy.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Way {
    /// The whole volume under this name, with later changes.
    Live(String),
    /// A file or directory of a volume, as it is now.
    Copy,
}

/// Returns the copy request for each of a container's volumes, by its index in the list; `None` for shared volumes. The paths
/// must be free of symbolic links.
pub(crate) fn plan(id: &ContainerId, volumes: &[NodeVolume]) -> Vec<Option<proto::CopiedInVolume>> {
    let mut count = 0;
    let planned = volumes.iter().map(|volume| {
        let way = way(volume)?;
        let number = count;
        count += 1;
        Some(proto::CopiedInVolume {
            is_live: matches!(way, Way::Live(_)),
            name: match way {
                Way::Live(name) => name,
                Way::Copy => format!("{id}.{number}"),
            },
            server_path: format!("{id}/{number}"),
            path: volume.host_path.clone(),
        })
    });
    planned.collect()
}

/// Returns the path of the copy in the guest.
pub(crate) fn in_guest(volume: &proto::CopiedInVolume) -> String {
    format!("{DIRECTORY}/{}", volume.name)
}

fn way(volume: &NodeVolume) -> Option<Way> {
    if !volume.readonly || volume.propagation != Propagation::Private {
        return None;
    }
    let path = Path::new(&volume.host_path);
    let names: Vec<&str> = path.iter().map(|name| name.to_str().unwrap_or_default()).collect();
    match names.as_slice() {
        [.., "pods", _pod, "volumes", plugin, name] => {
            let (_, short) = PLUGINS.iter().find(|(directory, _)| directory == plugin)?;
            is_written_by_kubelet(path).then(|| Way::Live(called(short, name, path)))
        }
        [.., "pods", _pod, "volume-subpaths", name, _container, _number] => {
            let pod = path.ancestors().nth(4)?;
            let of = |plugin: &str| pod.join("volumes").join(plugin).join(name);
            PLUGINS.iter().any(|(plugin, _)| is_written_by_kubelet(&of(plugin))).then_some(Way::Copy)
        }
        _ => None,
    }
}

/// Returns whether this directory has a link [`DATA`] to a sibling directory, and otherwise only links and such directories.
fn is_written_by_kubelet(volume: &Path) -> bool {
    let is_data = |name: &OsStr| name.as_bytes().starts_with(b"..") && name.len() > 2 && name != DATA;
    let Ok(data) = fs::read_link(volume.join(DATA)) else { return false };
    if data.components().count() != 1 || !is_data(data.as_os_str()) {
        return false;
    }
    let Ok(names) = fs::read_dir(volume) else { return false };
    let mut names = names.map(|name| name.and_then(|name| Ok((name.file_name(), name.file_type()?.is_symlink()))));
    names.all(|name| name.is_ok_and(|(name, link)| link || is_data(&name)))
}

/// Returns a name that is readable and, by its hash, unique among the volumes of the pod.
pub(crate) fn called(short: &str, name: &str, path: &Path) -> String {
    let mut hasher = DefaultHasher::new();
    path.hash(&mut hasher);
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '-' || c == '.' { c } else { '_' };
    let name: String = name.chars().take(SHOWN).map(plain).collect();
    format!("{short}.{name}.{:016x}", hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    fn volume(path: &Path) -> NodeVolume {
        NodeVolume {
            host_path: path.display().to_string(),
            container_path: "/v".into(),
            readonly: true,
            recursive_read_only: false,
            propagation: Propagation::Private,
            id_mapped: false,
            options: BTreeSet::new(),
        }
    }

    /// Creates a volume as kubelet writes it, below a pod's directory.
    fn written(pod: &Path, plugin: &str) -> PathBuf {
        let directory = pod.join("volumes").join(plugin).join("conf");
        fs::create_dir_all(directory.join("..2026_11_22")).unwrap();
        fs::write(directory.join("..2026_11_22/key"), "value").unwrap();
        symlink("..2026_11_22", directory.join(DATA)).unwrap();
        symlink("..data/key", directory.join("key")).unwrap();
        directory
    }

    #[test]
    fn what_kubelet_writes_for_a_pod_is_pushed() {
        let node = tempfile::tempdir().unwrap();
        let pod = node.path().join("pods/uid");
        for (plugin, short) in PLUGINS {
            let directory = written(&pod, plugin);
            let Some(Way::Live(name)) = way(&volume(&directory)) else { panic!("{plugin} is not pushed") };
            assert!(name.starts_with(&format!("{short}.conf.")) && name.len() < 128, "{name}");
        }
        let other = written(&node.path().join("pods/other"), PLUGINS[0].0);
        let first = pod.join("volumes").join(PLUGINS[0].0).join("conf");
        assert_ne!(way(&volume(&other)), way(&volume(&first)), "each has its name");
        let part = pod.join("volume-subpaths/conf/c/0");
        fs::create_dir_all(part.parent().unwrap()).unwrap();
        fs::write(&part, "value").unwrap();
        assert_eq!(way(&volume(&part)), Some(Way::Copy));
    }

    #[test]
    fn everything_else_is_shared() {
        let node = tempfile::tempdir().unwrap();
        let pod = node.path().join("pods/uid");
        let directory = written(&pod, "kubernetes.io~configmap");
        for changed in [
            NodeVolume { readonly: false, ..volume(&directory) },
            NodeVolume { propagation: Propagation::FromNode, ..volume(&directory) },
            volume(&directory.join("..data")),
            volume(&written(&pod, "kubernetes.io~empty-dir")),
            volume(&written(&pod, "kubernetes.io~csi")),
            volume(&node.path().join("pods/uid/volume-subpaths/data/c/0")),
            volume(&pod.join("etc-hosts")),
            volume(&pod.join("containers/c/0a1b2c3d")),
            volume(&node.path().join("none")),
            volume(Path::new("/")),
        ] {
            assert_eq!(way(&changed), None, "{}", changed.host_path);
        }
        // Not as kubelet writes: a file beside the link, a link to another place, and no link.
        fs::write(directory.join("file"), "").unwrap();
        assert_eq!(way(&volume(&directory)), None);
        let directory = written(&pod, "kubernetes.io~secret");
        for to in ["../../elsewhere", "/etc", "..", "key", "..data"] {
            fs::remove_file(directory.join(DATA)).unwrap();
            symlink(to, directory.join(DATA)).unwrap();
            assert_eq!(way(&volume(&directory)), None, "{to}");
        }
        fs::remove_file(directory.join(DATA)).unwrap();
        assert_eq!(way(&volume(&directory)), None);
    }

    #[test]
    fn numbers_are_those_of_pushed_volumes_only() {
        let node = tempfile::tempdir().unwrap();
        let pod = node.path().join("pods/uid");
        let (first, second) = (written(&pod, PLUGINS[0].0), written(&pod, PLUGINS[1].0));
        let id = ContainerId::from_bytes([1; 32]);
        let planned = plan(&id, &[volume(Path::new("/srv")), volume(&first), volume(Path::new("/x")), volume(&second)]);
        let places: Vec<_> =
            planned.iter().map(|volume| volume.as_ref().map(|volume| volume.server_path.clone())).collect();
        let place = |n: u8| Some(format!("{id}/{n}"));
        assert_eq!(places, [None, place(0), None, place(1)]);
    }
}
