//! Determines which volumes of the node are copied into a VM instead of shared: those that kubelet writes for the VM's pod
//! (configMap, secret, projected, downwardAPI), and the files that it makes for containers (/etc/hosts, termination logs).
//! docs/contributor/volumes.md has the rules. Reads the node's directories, and changes nothing.

use super::host_path::HostPath;
use nacelle_base::ContainerId;
use nacelle_base::copied_in::{DATA, DIRECTORY};
use nacelle_base::files::{FileError, at};
use nacelle_model::mount::{NodeVolume, Propagation};
use nacelle_proto::pod as proto;
use siphasher::sip::SipHasher13;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::hash::Hasher;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Component, Path};

/// Directories of kubelet's volume plugins that write a volume once and then replace it as a whole.
const PLUGINS: [(&str, &str); 4] = [
    ("kubernetes.io~configmap", "configmap"),
    ("kubernetes.io~secret", "secret"),
    ("kubernetes.io~projected", "projected"),
    ("kubernetes.io~downward-api", "downward-api"),
];
/// The largest /etc/hosts that is copied, in bytes.
const MAX_HOSTS: u64 = 1 << 20;
/// The largest part of a volume's name, in bytes, that its name in the guest contains.
const MAX_NAME: usize = 64;

/// The kind of copy.
#[derive(Clone, Debug, PartialEq, Eq)]
enum CopyMode {
    /// The whole volume under this name, with later changes.
    Live(String),
    /// A file or directory of a volume, as it is now.
    Once,
    /// The pod's /etc/hosts under this name, as it is now, for all containers.
    Hosts(String),
    /// An empty file, whose end is returned when the container has exited.
    TerminationLog,
}

/// Returns the copy request for a volume, the `number`th that is copied into the container; `None` for a volume that is shared. `files`:
/// the pod process can copy the files that kubelet makes for containers.
pub(super) fn plan(
    id: &ContainerId,
    number: usize,
    volume: &NodeVolume,
    host: &HostPath,
    files: bool,
) -> Option<proto::CopiedInVolume> {
    let mode = copy_mode(volume, host).or_else(|| if files { file_mode(volume, host) } else { None })?;
    Some(proto::CopiedInVolume {
        is_live: matches!(mode, CopyMode::Live(_)),
        is_of_pod: matches!(mode, CopyMode::Hosts(_)),
        is_returned: mode == CopyMode::TerminationLog,
        name: match mode {
            CopyMode::Live(name) | CopyMode::Hosts(name) => name,
            CopyMode::Once | CopyMode::TerminationLog => format!("{id}.{number}"),
        },
        server_path: format!("{id}/{number}"),
        path: host.as_str().to_owned(),
    })
}

/// Returns the path of the copy in the guest.
pub(super) fn in_guest(volume: &proto::CopiedInVolume) -> String {
    format!("{DIRECTORY}/{}", volume.name)
}

fn copy_mode(volume: &NodeVolume, host: &HostPath) -> Option<CopyMode> {
    if !volume.readonly || volume.propagation != Propagation::Private {
        return None;
    }
    let path = host.as_path();
    let names: Vec<&str> = path.iter().map(|name| name.to_str().unwrap_or_default()).collect();
    match names.as_slice() {
        [.., "pods", _pod, "volumes", plugin, name] => {
            let (_, short) = PLUGINS.iter().find(|(directory, _)| directory == plugin)?;
            is_written_by_kubelet(path).then(|| CopyMode::Live(called(short, name, path)))
        }
        [.., "pods", _pod, "volume-subpaths", name, _container, _number] => {
            let pod = path.ancestors().nth(4)?;
            let of = |plugin: &str| pod.join("volumes").join(plugin).join(name);
            PLUGINS.iter().any(|(plugin, _)| is_written_by_kubelet(&of(plugin))).then_some(CopyMode::Once)
        }
        _ => None,
    }
}

/// Returns how a file is copied that kubelet makes for a container, which may write to it.
fn file_mode(volume: &NodeVolume, host: &HostPath) -> Option<CopyMode> {
    let path = host.as_path();
    let metadata = fs::symlink_metadata(path).ok().filter(|metadata| metadata.is_file())?;
    if volume.propagation != Propagation::Private {
        return None;
    }
    let names: Vec<&str> = path.iter().map(|name| name.to_str().unwrap_or_default()).collect();
    match names.as_slice() {
        [.., "pods", _pod, name @ "etc-hosts"] if metadata.len() <= MAX_HOSTS => {
            Some(CopyMode::Hosts(called("file", name, path)))
        }
        [.., "pods", _pod, "containers", _container, log] if is_termination_log(log) && metadata.len() == 0 => {
            Some(CopyMode::TerminationLog)
        }
        _ => None,
    }
}

/// Returns whether kubelet gives such names to termination logs: a random number of 32 bits.
fn is_termination_log(name: &str) -> bool {
    name.len() == 8 && name.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

/// Opens the file to which the end of its copy is returned. Blocks.
pub(crate) fn open_returned(path: &Path) -> Result<File, FileError> {
    let file = OpenOptions::new().write(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path);
    let file = file.map_err(at("open", path))?;
    match file.metadata().map_err(at("inspect", path))?.is_file() {
        true => Ok(file),
        false => Err(at("open", path)(io::ErrorKind::InvalidInput.into())),
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

/// Returns a name that is readable and, by its hash, unique among the volumes of the pod. Containers share a volume by this name, also
/// those that a later version of the daemon creates: it must stay the same.
pub(super) fn called(short: &str, name: &str, path: &Path) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '-' || c == '.' { c } else { '_' };
    let name: String = name.chars().take(MAX_NAME).map(plain).collect();
    format!("{short}.{name}.{:016x}", stable_hash(path))
}

/// Returns SipHash-1-3 with key 0 of the components of an absolute path, followed by the sum of their lengths, rotated right by two bits
/// after each addition. This equals `Path::hash` with `DefaultHasher` in Rust 1.95, of which the names in running pods were made; a later
/// release may change it.
fn stable_hash(path: &Path) -> u64 {
    let mut hasher = SipHasher13::new();
    let mut lengths = 0_u64;
    for component in path.components() {
        if matches!(component, Component::RootDir | Component::CurDir) {
            continue;
        }
        let name = component.as_os_str().as_bytes();
        lengths = lengths.wrapping_add(name.len() as u64).rotate_right(2);
        hasher.write(name);
    }
    hasher.write(&lengths.to_le_bytes());
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    #[test]
    fn names_stay_those_of_earlier_versions() {
        let pod = "/var/lib/kubelet/pods/3a7c1f9e-0d51-4b0c-9c57-6d5f0a1b2c3d/volumes/kubernetes.io~empty-dir";
        assert_eq!(called("disk", "cache", Path::new(&format!("{pod}/cache"))), "disk.cache.f3a21f2b2d59ec71");
        let settings = Path::new("/var/lib/kubelet/pods/u/volumes/kubernetes.io~configmap/settings");
        assert_eq!(called("configmap", "settings", settings), "configmap.settings.4365ff2ed8a087da");
        assert_eq!(called("memory", "c", Path::new("/a/./b//c/")), "memory.c.da512403de630c20");
        assert_eq!(called("memory", "c", Path::new("/a/b/c")), "memory.c.da512403de630c20");
        let bytes = OsStr::from_bytes(b"/a/../\xff");
        assert_eq!(called("memory", "c", Path::new(bytes)), "memory.c.06d22cfe612c6b4b");
    }

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

    fn mode(volume: &NodeVolume) -> Option<CopyMode> {
        copy_mode(volume, &HostPath::of(Path::new(&volume.host_path)))
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
    fn what_kubelet_writes_for_a_pod_is_copied_in() {
        let node = tempfile::tempdir().unwrap();
        let pod = node.path().join("pods/uid");
        for (plugin, short) in PLUGINS {
            let directory = written(&pod, plugin);
            let Some(CopyMode::Live(name)) = mode(&volume(&directory)) else { panic!("{plugin} is not copied in") };
            assert!(name.starts_with(&format!("{short}.conf.")) && name.len() < 128, "{name}");
        }
        let other = written(&node.path().join("pods/other"), PLUGINS[0].0);
        let first = pod.join("volumes").join(PLUGINS[0].0).join("conf");
        assert_ne!(mode(&volume(&other)), mode(&volume(&first)), "each has its name");
        let part = pod.join("volume-subpaths/conf/c/0");
        fs::create_dir_all(part.parent().unwrap()).unwrap();
        fs::write(&part, "value").unwrap();
        assert_eq!(mode(&volume(&part)), Some(CopyMode::Once));
    }

    #[test]
    fn files_that_kubelet_makes_for_containers_are_copied_in() {
        let node = tempfile::tempdir().unwrap();
        let pod = node.path().join("pods/uid");
        let log = pod.join("containers/c/0a1b2c3d");
        fs::create_dir_all(log.parent().unwrap()).unwrap();
        let hosts = pod.join("etc-hosts");
        for file in [&hosts, &log] {
            fs::write(file, "").unwrap();
        }
        let id = ContainerId::from_bytes([1; 32]);
        let of = |volume: &NodeVolume| plan(&id, 3, volume, &HostPath::of(Path::new(&volume.host_path)), true);
        let writable = |path: &Path| NodeVolume { readonly: false, ..volume(path) };
        let copy = of(&writable(&hosts)).unwrap();
        assert!(copy.is_of_pod && !copy.is_live && !copy.is_returned && copy.name.starts_with("file.etc-hosts."));
        let copy = of(&writable(&log)).unwrap();
        assert!(copy.is_returned && !copy.is_of_pod && copy.name == format!("{id}.3"));
        assert!(open_returned(&log).is_ok() && open_returned(&pod).is_err());
        let old = plan(&id, 3, &writable(&hosts), &HostPath::of(&hosts), false);
        assert_eq!(old, None, "an older pod process");

        let both_ways = NodeVolume { propagation: Propagation::BothWays, ..writable(&hosts) };
        assert_eq!(of(&both_ways), None);
        for other in ["containers/c/0A1b2c3d", "containers/c/0a1b2c3", "containers/0a1b2c3d", "hosts", "c/etc-hosts"] {
            let path = pod.join(other);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "").unwrap();
            assert_eq!(of(&writable(&path)), None, "{other}");
        }
        fs::write(&log, "from before").unwrap();
        assert_eq!(of(&writable(&log)), None, "not empty");
        fs::remove_file(&log).unwrap();
        symlink(&hosts, &log).unwrap();
        assert!(of(&writable(&log)).is_none() && open_returned(&log).is_err(), "a link");
        fs::remove_file(&hosts).unwrap();
        fs::create_dir(&hosts).unwrap();
        assert_eq!(of(&writable(&hosts)), None, "a directory");
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
            assert_eq!(mode(&changed), None, "{}", changed.host_path);
        }
        // Not as kubelet writes: a file beside the link, a link to another place, and no link.
        fs::write(directory.join("file"), "").unwrap();
        assert_eq!(mode(&volume(&directory)), None);
        let directory = written(&pod, "kubernetes.io~secret");
        for to in ["../../elsewhere", "/etc", "..", "key", "..data"] {
            fs::remove_file(directory.join(DATA)).unwrap();
            symlink(to, directory.join(DATA)).unwrap();
            assert_eq!(mode(&volume(&directory)), None, "{to}");
        }
        fs::remove_file(directory.join(DATA)).unwrap();
        assert_eq!(mode(&volume(&directory)), None);
    }
}
