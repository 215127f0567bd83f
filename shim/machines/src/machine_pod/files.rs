//! Reads the files that kubelet has written from ConfigMaps, Secrets and the pod's own fields into a container's mounts, for
//! disks of a machine. Their number and size are bounded, and the only symbolic link that is followed is the one that kubelet
//! swaps at an update. Blocks on files.

use super::volume_error::{VolumeError, invalid_field};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use nacelle_base::retry::{retry_interrupted, retry_transient};
use nacelle_model::container::ContainerConfig;
use nacelle_model::machine::{CloudInit, Disk, DiskSource, FilesDisk};
use nacelle_model::machine_pod::RequestedDiskSource;
use nacelle_model::mount::NodeVolume;
use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2, readlinkat};
use nix::sys::stat::Mode;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The container path of the downward API volume with the pod's annotations.
pub(super) const ANNOTATIONS_PATH: &str = "/run/nacelle/pod";
/// The file with the annotations in that volume.
const ANNOTATIONS_FILE: &str = "annotations";
/// kubelet's link to the directory with the current files.
const DATA_LINK: &str = "..data";
/// The largest size of all files of a disk, in bytes.
const MAX_BYTES: usize = 4 << 20;
/// The largest number of files of a disk.
const MAX_FILES: usize = 1000;
/// The largest depth of directories.
const MAX_DEPTH: usize = 8;
/// The longest file name in bytes.
const MAX_FILE_NAME: usize = 255;
/// The keys of cloud-init data in secrets, the same as in KubeVirt.
const USER_DATA: [&str; 2] = ["userdata", "userData"];
const NETWORK_DATA: [&str; 2] = ["networkdata", "networkData"];

type VolumeFiles = BTreeMap<String, Vec<u8>>;

/// Returns the source of a disk with the files of a volume.
pub fn files_disk_source(disk: &Disk<RequestedDiskSource>, mount: &NodeVolume) -> Result<DiskSource, VolumeError> {
    let RequestedDiskSource::Files { what, label, expected } = &disk.source else {
        return invalid_field("config.mounts.host_path", &mount.host_path, "the disk has no volume with files");
    };
    let files = read_volume(&disk.name, mount)?;
    if let Some(path) = expected.iter().find(|path| !files.contains_key(*path)) {
        let rule = format!("disk {} is {what}, and there is no file {path:?} in it", disk.name);
        return invalid_field("config.mounts.host_path", &mount.host_path, rule);
    }
    let files = files.into_iter().map(|(path, bytes)| (path, STANDARD.encode(bytes))).collect();
    Ok(DiskSource::Files(FilesDisk { label: label.clone(), files }))
}

/// Returns cloud-init data, including that in these secrets.
pub fn cloud_init_disk_source(
    disk: &Disk<RequestedDiskSource>,
    mounts: &BTreeMap<String, &NodeVolume>,
) -> Result<DiskSource, VolumeError> {
    let RequestedDiskSource::CloudInitOf { data, user, network, keys } = &disk.source else {
        return invalid_field("config.mounts.container_path", &disk.name, "the disk has no secrets");
    };
    let mut secrets = BTreeMap::new();
    for (name, mount) in mounts {
        secrets.insert(name.as_str(), (*mount, read_volume(&disk.name, mount)?));
    }
    let text = |secret: &str, keys: [&str; 2]| {
        let Some((mount, files)) = secrets.get(secret) else {
            return invalid_field("config.mounts.container_path", secret, "the secret is not mounted");
        };
        let invalid = |rule: String| invalid_field("config.mounts.host_path", &mount.host_path, rule);
        match keys.iter().find_map(|key| files.get(*key)).map(|bytes| std::str::from_utf8(bytes)) {
            Some(Ok(text)) => Ok(text.to_owned()),
            Some(Err(_)) => {
                invalid(format!("disk {}: the cloud-init data of secret {secret} is not UTF-8 text", disk.name))
            }
            None => invalid(format!("disk {}: secret {secret} has neither {} nor {}", disk.name, keys[0], keys[1])),
        }
    };
    let mut data: CloudInit = data.clone();
    if let Some(secret) = user {
        data.user_data = text(secret, USER_DATA)?;
    }
    if let Some(secret) = network {
        data.network_data = Some(text(secret, NETWORK_DATA)?);
    }
    for secret in keys {
        let Some((mount, files)) = secrets.get(secret.as_str()) else { continue };
        for (name, bytes) in files {
            let Some(keys) = parse_public_keys(bytes) else {
                let rule =
                    format!("disk {}: {name} of secret {secret} contains a line that is not a public key", disk.name);
                return invalid_field("config.mounts.host_path", &mount.host_path, rule);
            };
            data.keys.extend(keys);
        }
    }
    Ok(DiskSource::CloudInit(data))
}

/// Returns the public keys in a file, one per line; `None` if it contains anything else.
pub(super) fn parse_public_keys(bytes: &[u8]) -> Option<Vec<String>> {
    let is_key = |line: &&str| line.split_whitespace().count() >= 2 && !line.contains(char::is_control);
    let lines = std::str::from_utf8(bytes).ok()?.lines().map(str::trim);
    let lines: Vec<&str> = lines.filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    lines.iter().all(is_key).then(|| lines.into_iter().map(str::to_owned).collect())
}

/// Returns the container's mount with the annotations of its pod, if there is one.
pub fn annotations_mount(config: &ContainerConfig) -> Option<&NodeVolume> {
    config.node_volumes.iter().find(|mount| mount.container_path == ANNOTATIONS_PATH)
}

/// Returns the present value of a pod's annotation; `None` if the pod lacks it. Characters that kubelet escapes with a backslash
/// stay escaped.
pub fn read_annotation(mount: &NodeVolume, key: &str) -> Result<Option<String>, VolumeError> {
    let Some(bytes) = read_volume(ANNOTATIONS_FILE, mount)?.remove(ANNOTATIONS_FILE) else {
        let rule = format!("there is no file {ANNOTATIONS_FILE} in it: fieldPath metadata.annotations writes one");
        return invalid_field("config.mounts.host_path", &mount.host_path, rule);
    };
    // Written by FormatMap in Kubernetes' pkg/fieldpath: a line KEY="VALUE" for each, with Go's quoting.
    let text = String::from_utf8_lossy(&bytes);
    let value = |line: &str| Some(line.strip_prefix(key)?.strip_prefix("=\"")?.strip_suffix('"')?.to_owned());
    Ok(text.lines().find_map(value))
}

/// Reads all files; the result is keyed by path.
pub(super) fn read_volume(disk: &str, mount: &NodeVolume) -> Result<VolumeFiles, VolumeError> {
    match read_once(disk, mount) {
        // kubelet has replaced the files meanwhile.
        Err(VolumeError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => read_once(disk, mount),
        read => read,
    }
}

fn read_once(disk: &str, mount: &NodeVolume) -> Result<VolumeFiles, VolumeError> {
    let path = Path::new(&mount.host_path);
    let reader = VolumeReader { disk, mount };
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let directory = retry_interrupted(|| open(path, flags, Mode::empty())).map_err(|errno| match errno {
        Errno::ENOTDIR => reader.invalid("a directory is expected".to_owned()),
        errno => reader.failed("open", path, errno),
    })?;
    let directory = match readlinkat(&directory, DATA_LINK) {
        Ok(target) => {
            let name = target.as_bytes();
            if name.len() <= 2 || !name.starts_with(b"..") || name.contains(&b'/') {
                return Err(reader.invalid(format!("{DATA_LINK} leads out of the volume")));
            }
            let opened = reader.open(directory.as_fd(), &target, path)?;
            opened.ok_or_else(|| reader.invalid(format!("{DATA_LINK} leads to a link")))?
        }
        // The directory was not written by kubelet.
        Err(Errno::ENOENT) => directory,
        Err(errno) => return Err(reader.failed("read", &path.join(DATA_LINK), errno)),
    };
    let mut found = VolumeFiles::new();
    reader.walk(directory, "", MAX_DEPTH, &mut found)?;
    let mut seen = BTreeSet::new();
    if let Some(twice) = found.keys().find(|path| !seen.insert(path.to_lowercase())) {
        return Err(reader.invalid(format!(
            "two files are named {twice:?} apart from upper and lower case, which FAT does not distinguish"
        )));
    }
    Ok(found)
}

struct VolumeReader<'a> {
    disk: &'a str,
    mount: &'a NodeVolume,
}

impl VolumeReader<'_> {
    fn invalid(&self, rule: String) -> VolumeError {
        let rule = format!("disk {}: {rule}", self.disk);
        VolumeError::Field { field: "config.mounts.host_path", value: self.mount.host_path.clone(), rule }
    }

    fn failed(&self, operation: &'static str, path: &Path, errno: impl Into<io::Error>) -> VolumeError {
        VolumeError::Io { user: format!("disk {}", self.disk), operation, path: path.to_owned(), source: errno.into() }
    }

    /// Opens an entry of a directory; `None` if it is a symbolic link.
    fn open(&self, directory: impl AsFd, name: &OsStr, path: &Path) -> Result<Option<OwnedFd>, VolumeError> {
        let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
        let resolve = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS;
        match retry_transient(|| openat2(&directory, name, OpenHow::new().flags(flags).resolve(resolve))) {
            Ok(opened) => Ok(Some(opened)),
            Err(Errno::ELOOP) => Ok(None),
            Err(errno) => Err(self.failed("open", &path.join(name), errno)),
        }
    }

    fn walk(&self, directory: OwnedFd, above: &str, depth: usize, found: &mut VolumeFiles) -> Result<(), VolumeError> {
        let path = Path::new(&self.mount.host_path).join(above);
        let failed = |errno| self.failed("read", &path, errno);
        let how = OpenHow::new().flags(OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC);
        let listed = retry_transient(|| openat2(&directory, ".", how));
        let mut names = Vec::new();
        for entry in Dir::from_fd(listed.map_err(failed)?).map_err(failed)?.iter() {
            let entry = entry.map_err(failed)?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes()).to_owned();
            if name != "." && name != ".." {
                names.push(name);
            }
            if names.len() > MAX_FILES {
                return Err(self.invalid(format!("more than {MAX_FILES} files")));
            }
        }
        for name in names {
            let valid = name.to_str().filter(|name| is_fat_name(name));
            let Some(valid) = valid else {
                return Err(self.invalid(format!("a FAT file system cannot hold the name {name:?}")));
            };
            let inner = if above.is_empty() { valid.to_owned() } else { format!("{above}/{valid}") };
            let opened = self.open(directory.as_fd(), &name, &path)?;
            let file =
                File::from(opened.ok_or_else(|| self.invalid(format!("{inner:?} is a link, which is not followed")))?);
            let metadata = file.metadata().map_err(|error| self.failed("stat", &path.join(&name), error))?;
            if metadata.is_dir() {
                let Some(depth) = depth.checked_sub(1) else {
                    return Err(self.invalid(format!("more than {MAX_DEPTH} nested directories")));
                };
                self.walk(file.into(), &inner, depth, found)?;
                continue;
            }
            if !metadata.is_file() {
                return Err(self.invalid(format!("{inner:?} is neither a regular file nor a directory")));
            }
            let left = MAX_BYTES.saturating_sub(found.values().map(Vec::len).sum());
            let mut bytes = Vec::new();
            let limit = u64::try_from(left).unwrap_or_default() + 1;
            let read = file.take(limit).read_to_end(&mut bytes);
            read.map_err(|error| self.failed("read", &path.join(&name), error))?;
            if bytes.len() > left || found.len() >= MAX_FILES {
                return Err(self.invalid(format!("more than {MAX_FILES} files, or {} MiB of them", MAX_BYTES >> 20)));
            }
            found.insert(inner, bytes);
        }
        Ok(())
    }
}

/// Returns whether a FAT file system can hold this name.
fn is_fat_name(name: &str) -> bool {
    let is_forbidden = |c: char| c.is_control() || "\"*/:<>?\\|".contains(c);
    name.len() <= MAX_FILE_NAME && !name.contains(is_forbidden) && !name.ends_with(['.', ' '])
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::{Classify, FailureKind};
    use nacelle_model::machine::{Bus, Cache, CloudInitForm, DiskKind};
    use nacelle_model::mount::Propagation;
    use std::fs;
    use std::os::unix::fs::symlink;

    fn disk(source: RequestedDiskSource) -> Disk<RequestedDiskSource> {
        Disk {
            name: "data".into(),
            kind: DiskKind::Disk,
            bus: Bus::Virtio,
            read_only: false,
            boot_order: None,
            serial: String::new(),
            cache: Cache::Writeback,
            block_size: None,
            serving: Default::default(),
            source,
        }
    }

    fn mount(host: &Path) -> NodeVolume {
        NodeVolume {
            host_path: host.display().to_string(),
            container_path: "/run/nacelle/vm/data".into(),
            readonly: true,
            recursive_read_only: false,
            propagation: Propagation::Private,
            id_mapped: false,
            options: [].into(),
        }
    }

    /// Writes files as kubelet does.
    fn written(directory: &Path, files: &[(&str, &str)]) {
        let inner = directory.join("..2026_11_23_05_00_00.1");
        fs::create_dir_all(&inner).unwrap();
        for (path, text) in files {
            let path = inner.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        symlink("..2026_11_23_05_00_00.1", directory.join(DATA_LINK)).unwrap();
        for (path, _) in files {
            let first = path.split('/').next().unwrap();
            let _ = symlink(Path::new(DATA_LINK).join(first), directory.join(first));
        }
    }

    #[test]
    fn annotations_are_read_from_the_latest_update() {
        let directory = tempfile::tempdir().unwrap();
        let key = "vm.nacelle.dev/power";
        let text =
            "a=\"vm.nacelle.dev/power=\\\"off\\\"\"\nvm.nacelle.dev/power=\"paused\"\nvm.nacelle.dev/power-x=\"on\"";
        written(directory.path(), &[("annotations", text)]);
        let found = |key| read_annotation(&mount(directory.path()), key).unwrap();
        assert_eq!(found(key).as_deref(), Some("paused"));
        assert_eq!(found("vm.nacelle.dev/powe"), None);
        // An update: a new directory, and the link is swapped.
        let next = directory.path().join("..2026_11_23_05_00_00.2");
        fs::create_dir(&next).unwrap();
        fs::write(next.join("annotations"), "vm.nacelle.dev/power=\"off\"\n").unwrap();
        symlink("..2026_11_23_05_00_00.2", directory.path().join("..data_tmp")).unwrap();
        fs::rename(directory.path().join("..data_tmp"), directory.path().join(DATA_LINK)).unwrap();
        assert_eq!(found(key).as_deref(), Some("off"));
        fs::remove_file(next.join("annotations")).unwrap();
        let error = read_annotation(&mount(directory.path()), key).unwrap_err();
        assert!(
            error
                .to_string()
                .ends_with("there is no file annotations in it: fieldPath metadata.annotations writes one")
        );
    }

    #[test]
    fn files_of_kubelet_are_put_on_the_disk() {
        let directory = tempfile::tempdir().unwrap();
        written(directory.path(), &[("a.txt", "A"), ("deep/b", "B")]);
        let source = |expected: &str| RequestedDiskSource::Files {
            what: "configMap c".into(),
            label: "L".into(),
            expected: vec![expected.into()],
        };
        let DiskSource::Files(found) = files_disk_source(&disk(source("deep/b")), &mount(directory.path())).unwrap()
        else {
            panic!("they are files")
        };
        let expected = [("a.txt".to_owned(), STANDARD.encode("A")), ("deep/b".to_owned(), STANDARD.encode("B"))];
        assert_eq!((found.label.as_str(), found.files), ("L", expected.into()));
        let error = files_disk_source(&disk(source("labels")), &mount(directory.path())).unwrap_err();
        assert!(error.kind() == FailureKind::Invalid && error.to_string().contains("no file \"labels\""), "{error}");
    }

    #[test]
    fn oversized_volumes_and_links_are_rejected() {
        let error_of = |make: &dyn Fn(&Path)| {
            let directory = tempfile::tempdir().unwrap();
            make(directory.path());
            let error = read_volume("data", &mount(directory.path())).unwrap_err();
            assert_eq!(error.kind(), FailureKind::Invalid, "{error}");
            error.to_string()
        };
        for (make, words) in [
            (&(|at: &Path| symlink("/etc", at.join(DATA_LINK)).unwrap()) as &dyn Fn(&Path), "leads out of the volume"),
            (&|at| symlink("..", at.join(DATA_LINK)).unwrap(), "leads out of the volume"),
            (&|at| symlink("/etc/passwd", at.join("a")).unwrap(), "\"a\" is a link"),
            (
                &|at| {
                    symlink("..x", at.join(DATA_LINK)).unwrap();
                    symlink("/etc", at.join("..x")).unwrap();
                },
                "leads to a link",
            ),
            (&|at| nix::unistd::mkfifo(&at.join("a"), Mode::S_IRWXU).unwrap(), "neither a regular file"),
            (&|at| fs::write(at.join("a:b"), "").unwrap(), "cannot hold the name"),
            (&|at| fs::write(at.join("a."), "").unwrap(), "cannot hold the name"),
            (
                &|at| ["a", "A"].iter().for_each(|name| fs::write(at.join(name), "").unwrap()),
                "apart from upper and lower case",
            ),
            (&|at| fs::write(at.join("a"), vec![0; MAX_BYTES + 1]).unwrap(), "4 MiB of them"),
            (&|at| (0..=MAX_FILES).for_each(|n| fs::write(at.join(n.to_string()), "").unwrap()), "1000 files"),
            (&|at| fs::create_dir_all(at.join("a/".repeat(MAX_DEPTH + 1))).unwrap(), "nested directories"),
        ] {
            let error = error_of(make);
            assert!(error.contains(words), "{words}: {error}");
        }
        let error = read_volume("data", &mount(Path::new("/etc/passwd"))).unwrap_err();
        assert!(
            error.kind() == FailureKind::Invalid && error.to_string().contains("a directory is expected"),
            "{error}"
        );
        assert_eq!(read_volume("data", &mount(Path::new("/nowhere"))).unwrap_err().kind(), FailureKind::NotFound);
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("a"), vec![1; MAX_BYTES]).unwrap();
        assert_eq!(read_volume("data", &mount(directory.path())).unwrap()["a"].len(), MAX_BYTES);
    }

    #[test]
    fn cloud_init_data_is_read_from_secrets() {
        let [data, keys] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        written(data.path(), &[("userData", "#cloud-config\n"), ("networkdata", "version: 2\n")]);
        written(keys.path(), &[("one", "ssh-ed25519 AAAA me\n# mine\n"), ("two", "\nssh-rsa BBBB you\n")]);
        let source = |user: Option<&str>, network: Option<&str>| RequestedDiskSource::CloudInitOf {
            data: CloudInit {
                form: CloudInitForm::NoCloud,
                instance: "i".into(),
                hostname: "h".into(),
                keys: vec!["ssh-dss CCCC they".into()],
                user_data: "said".into(),
                network_data: None,
            },
            user: user.map(str::to_owned),
            network: network.map(str::to_owned),
            keys: vec!["k".into()],
        };
        let [in_data, in_keys] = [data.path(), keys.path()].map(mount);
        let mounts = BTreeMap::from([("d".to_owned(), &in_data), ("k".to_owned(), &in_keys)]);
        let of = |wish| match cloud_init_disk_source(&disk(wish), &mounts) {
            Ok(DiskSource::CloudInit(data)) => Ok(data),
            Ok(other) => panic!("{other:?}"),
            Err(error) => Err(error.to_string()),
        };
        let found = of(source(Some("d"), Some("d"))).unwrap();
        assert_eq!(
            (found.user_data.as_str(), found.network_data.as_deref()),
            ("#cloud-config\n", Some("version: 2\n"))
        );
        assert_eq!(found.keys, ["ssh-dss CCCC they", "ssh-ed25519 AAAA me", "ssh-rsa BBBB you"]);
        assert_eq!(of(source(None, None)).unwrap().user_data, "said");
        let error = of(source(Some("k"), None)).unwrap_err();
        assert!(error.contains("secret k has neither userdata nor userData"), "{error}");
        fs::write(keys.path().join(DATA_LINK).join("two"), "-----BEGIN").unwrap();
        let error = of(source(None, None)).unwrap_err();
        assert!(error.contains("two of secret k contains a line that is not a public key"), "{error}");
    }
}
