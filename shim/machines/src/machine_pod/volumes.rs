//! Finds a machine's disks among the mounts and devices of its container, and opens the files of those on the node. It accesses
//! only files below the paths that the container got. Blocks on files.

use super::credentials;
use nacelle_base::retry::retry_transient;
use nacelle_base::{Classify, Kind};
use nacelle_model::container::{ContainerConfig, ContainerImage};
use nacelle_model::device::DeviceRequest;
use nacelle_model::digest::ImageId;
use nacelle_model::machine::{Credential, Disk, Filesystem, INITRD, KERNEL};
use nacelle_model::machine_pod::{MachinePod, RequestedDiskSource};
use nacelle_model::mount::{MountOption, NodeVolume, Propagation};
use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use nix::sys::stat::Mode;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The container's directory of block volumes.
const DEVICES: &str = "/dev/nacelle";
/// The container's directory of mounted volumes.
const DIRECTORIES: &str = "/run/nacelle/vm";
/// The disk file in a claim's file system, the same as in KubeVirt.
const IN_CLAIM: &str = "disk.img";
/// The sector size in bytes: a disk consists of whole sectors.
const SECTOR: u64 = 512;

/// Why a volume cannot be a disk.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// A field of the request, or the file that it names, is invalid.
    #[error("{field} is {value:?}: {rule}")]
    Field {
        /// The field's path.
        field: &'static str,
        /// The value.
        value: String,
        /// The rule.
        rule: String,
    },
    /// The container lacks the mount or device.
    #[error("{whose} is {what}, which the container has not: {rule}")]
    Missing {
        /// The user of the volume: "disk data".
        whose: String,
        /// The volume: "claim data".
        what: String,
        /// The expected path.
        rule: String,
    },
    /// The node itself uses the device.
    #[error("disk {disk}: {path} is in use on the node (mounted, or part of another device): stop that first")]
    Busy {
        /// The disk's name.
        disk: String,
        /// The device's path.
        path: String,
    },
    /// A file operation failed.
    #[error("{whose}: cannot {what} {}", path.display())]
    Io {
        /// The user of the volume: "disk data".
        whose: String,
        /// The operation: "open".
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

impl Classify for VolumeError {
    fn kind(&self) -> Kind {
        match self {
            VolumeError::Field { .. } | VolumeError::Missing { .. } => Kind::Invalid,
            VolumeError::Busy { .. } => Kind::Conflict,
            VolumeError::Io { source, .. } => source.kind().into(),
        }
    }
}

/// The source of a machine's disk in the container.
#[derive(Debug, PartialEq, Eq)]
pub enum Place<'a> {
    /// A block device.
    Device(&'a DeviceRequest),
    /// A directory with the disk in it, or the file that is the disk.
    Mount(&'a NodeVolume),
    /// A directory with the files of the disk.
    Files(&'a NodeVolume),
    /// Directories of secrets, by name.
    Secrets(BTreeMap<String, &'a NodeVolume>),
}

/// Returns whether this device is a disk of the machine.
pub fn names_device(machine: &MachinePod, path: &str) -> bool {
    let claims = machine.disks.iter().filter(|disk| matches!(disk.source, RequestedDiskSource::Claim { .. }));
    claims.into_iter().any(|disk| Path::new(path) == Path::new(DEVICES).join(&disk.name))
}

/// Returns whether this mount is a disk of the machine.
pub fn names_mount(machine: &MachinePod, path: &str) -> bool {
    let secret = |credential: &Credential| Path::new(path) == at_secret(credential.secret());
    machine.credentials.iter().any(secret)
        || machine.filesystems.iter().any(|one| Path::new(path) == Path::new(DIRECTORIES).join(&one.name))
        || machine.disks.iter().any(|disk| match &disk.source {
            RequestedDiskSource::Claim { .. }
            | RequestedDiskSource::HostDisk { .. }
            | RequestedDiskSource::Files { .. } => Path::new(path) == Path::new(DIRECTORIES).join(&disk.name),
            wish => secrets(wish).any(|secret| Path::new(path) == at_secret(secret)),
        })
}

/// The name of the image volume with the machine's kernel, if that is not in the container's image.
pub(super) const KERNEL_BOOT: &str = "kernel-boot";

/// Returns whether the image volume at this path is for the machine: for the disk of that name, or for kernel and initramfs.
pub fn names_image(machine: &MachinePod, path: &str) -> bool {
    let at = |name: &str| Path::new(path) == Path::new(DIRECTORIES).join(name);
    let disks = machine.disks.iter().filter(|disk| matches!(disk.source, RequestedDiskSource::Image { .. }));
    disks.into_iter().any(|disk| at(&disk.name)) || (machine.kernel.is_some() && at(KERNEL_BOOT))
}

/// Returns the container path of the image volume for this disk or kernel.
pub fn image_place(name: &str) -> PathBuf {
    Path::new(DIRECTORIES).join(if [KERNEL, INITRD].contains(&name) { KERNEL_BOOT } else { name })
}

/// Returns the image with this disk or kernel: that of its image volume, otherwise the container's own. `images` are the images
/// of the container's image volumes, in their order.
pub fn image_of<'a>(
    name: &str,
    config: &ContainerConfig,
    images: &'a [ContainerImage],
    own: &'a ContainerImage,
) -> &'a ContainerImage {
    let at = image_place(name);
    let mut volumes = config.volumes.iter().zip(images);
    volumes.find(|(volume, _)| Path::new(&volume.container_path) == at).map_or(own, |(_, image)| image)
}

/// Returns the backing images of the disks that the guest writes to, without duplicates.
pub fn images_under(
    machine: &MachinePod,
    config: &ContainerConfig,
    images: &[ContainerImage],
    own: &ContainerImage,
) -> Vec<ImageId> {
    let mut under = Vec::new();
    for disk in
        machine.disks.iter().filter(|disk| matches!(disk.source, RequestedDiskSource::Image { .. }) && !disk.read_only)
    {
        let id = image_of(&disk.name, config, images, own).id;
        if !under.contains(&id) {
            under.push(id);
        }
    }
    under
}

/// Returns the secrets that the disk needs.
fn secrets(wish: &RequestedDiskSource) -> impl Iterator<Item = &String> {
    let (some, many) = match wish {
        RequestedDiskSource::CloudInitOf { user, network, keys, .. } => {
            ([user.as_ref(), network.as_ref()], keys.as_slice())
        }
        _ => ([None; 2], [].as_slice()),
    };
    some.into_iter().flatten().chain(many)
}

pub(super) fn at_secret(name: &str) -> PathBuf {
    Path::new(DIRECTORIES).join(format!("secret-{name}"))
}

/// Checks that the container has the volumes of its machine's disks, in the required form. Accesses no file.
pub fn check_volumes(machine: &MachinePod, config: &ContainerConfig) -> Result<(), VolumeError> {
    credentials::check(machine, config)?;
    machine.disks.iter().try_for_each(|disk| place(disk, config).map(drop))?;
    machine.filesystems.iter().try_for_each(|one| shared(one, config).map(drop))
}

/// Returns the container's mount with the directory of a file system.
pub fn shared<'a>(one: &Filesystem, config: &'a ContainerConfig) -> Result<&'a NodeVolume, VolumeError> {
    let at = Path::new(DIRECTORIES).join(&one.name);
    let mount = config.node_volumes.iter().find(|mount| Path::new(&mount.container_path) == at);
    let mount = mount.ok_or_else(|| VolumeError::Missing {
        whose: format!("file system {}", one.name),
        what: one.what.clone(),
        rule: format!("as a mount at {} it is expected", at.display()),
    })?;
    if mount.propagation == Propagation::BothWays {
        let rule = "mounts of a guest are its own kernel's: the node does not see them";
        return field("config.mounts.propagation", "PROPAGATION_BIDIRECTIONAL", rule);
    }
    // The guest never opens device nodes of the node.
    match mount.options.iter().find(|option| !matches!(option, MountOption::Noatime | MountOption::Nodev)) {
        Some(option) => {
            let rule = "the guest mounts it, and says how: leave it out";
            field("config.mounts.mount_options", option.word(), rule)
        }
        None => Ok(mount),
    }
}

/// Resolves the directory of a file system on the node.
pub fn directory(one: &Filesystem, mount: &NodeVolume) -> Result<NodeVolume, VolumeError> {
    let path = Path::new(&mount.host_path);
    let failed = |source| VolumeError::Io {
        whose: format!("file system {}", one.name),
        what: "find",
        path: path.to_owned(),
        source,
    };
    let found = path.canonicalize().map_err(failed)?;
    match found.to_str() {
        Some(name) if found.is_dir() => Ok(NodeVolume { host_path: name.to_owned(), ..mount.clone() }),
        _ => field("config.mounts.host_path", &mount.host_path, format!("file system {} needs a directory", one.name)),
    }
}

/// Returns the source of the disk in the container; `None` for a disk without a volume.
pub fn place<'a>(
    disk: &Disk<RequestedDiskSource>,
    config: &'a ContainerConfig,
) -> Result<Option<Place<'a>>, VolumeError> {
    let (device_at, mount_at) = (Path::new(DEVICES).join(&disk.name), Path::new(DIRECTORIES).join(&disk.name));
    let device = config.devices.iter().find(|device| Path::new(&device.container_path) == device_at);
    let mount = config.node_volumes.iter().find(|mount| Path::new(&mount.container_path) == mount_at);
    let whose = || format!("disk {}", disk.name);
    let missing = |what: String, rule: String| VolumeError::Missing { whose: whose(), what, rule };
    let (device_at, mount_at) = (device_at.display(), mount_at.display());
    let found = match &disk.source {
        RequestedDiskSource::Claim { claim } => {
            let what = format!("claim {claim}");
            match (device, mount) {
                (Some(device), None) => Place::Device(device),
                (None, Some(mount)) => Place::Mount(mount),
                (None, None) => {
                    let rule = format!("as a block device at {device_at} or as a mount at {mount_at} it is expected");
                    return Err(missing(what, rule));
                }
                (Some(device), Some(_)) => {
                    let rule = format!("disk {} is this or the mount at {mount_at}, not both", disk.name);
                    return field("config.devices.container_path", &device.container_path, rule);
                }
            }
        }
        RequestedDiskSource::HostDisk { path, .. } => {
            let rule = format!("as a mount at {mount_at} it is expected");
            let mount = mount.ok_or_else(|| missing(format!("file {path} of the node"), rule))?;
            if Path::new(&mount.host_path) != Path::new(path) {
                let rule = format!("the mount for disk {} must be of {path:?}, as hostDisk.path says", disk.name);
                return field("config.mounts.host_path", &mount.host_path, rule);
            }
            Place::Mount(mount)
        }
        RequestedDiskSource::Files { what, .. } => {
            let rule = format!("as a mount at {mount_at} it is expected");
            return Ok(Some(Place::Files(mount.ok_or_else(|| missing(what.clone(), rule))?)));
        }
        RequestedDiskSource::CloudInitOf { .. } => {
            let found = secrets(&disk.source).map(|secret| {
                let at = at_secret(secret);
                let mount = config.node_volumes.iter().find(|mount| Path::new(&mount.container_path) == at);
                let rule = format!("as a mount at {} it is expected", at.display());
                Ok((secret.clone(), mount.ok_or_else(|| missing(format!("of secret {secret}"), rule))?))
            });
            return found.collect::<Result<_, VolumeError>>().map(|mounts| Some(Place::Secrets(mounts)));
        }
        RequestedDiskSource::Image { .. } | RequestedDiskSource::Empty { .. } | RequestedDiskSource::CloudInit(_) => {
            return Ok(None);
        }
    };
    let rule = || format!("disk {} is written to: make it writable, or the disk read-only", disk.name);
    match found {
        Place::Device(device) if !disk.read_only && !device.permissions.contains('w') => {
            field("config.devices.permissions", &device.permissions, rule())
        }
        Place::Mount(mount) if !disk.read_only && mount.readonly => field("config.mounts.readonly", "true", rule()),
        found => Ok(Some(found)),
    }
}

pub(super) fn field<T>(field: &'static str, value: &str, rule: impl Into<String>) -> Result<T, VolumeError> {
    Err(VolumeError::Field { field, value: value.to_owned(), rule: rule.into() })
}

/// Checks that no process of the node uses the device exclusively: a guest must not write to a device that is mounted or part of
/// another one.
pub fn unused(disk: &Disk<RequestedDiskSource>, device: &DeviceRequest) -> Result<(), VolumeError> {
    if disk.read_only {
        return Ok(());
    }
    let alone = OpenOptions::new().read(true).custom_flags(OFlag::O_EXCL.bits()).open(&device.host_path);
    match alone.map_err(|error| error.raw_os_error().map(Errno::from_raw)) {
        Err(Some(Errno::EBUSY)) => Err(VolumeError::Busy { disk: disk.name.clone(), path: device.host_path.clone() }),
        // The later open that uses the device reports other failures.
        _ => Ok(()),
    }
}

/// Opens the file of a disk in its mount; returns its path too.
pub fn open(disk: &Disk<RequestedDiskSource>, mount: &NodeVolume) -> Result<(PathBuf, File), VolumeError> {
    let mounted = Path::new(&mount.host_path);
    let wrong = |rule: String| field("config.mounts.host_path", &mount.host_path, rule);
    let (directory, name, size) = match (&disk.source, mounted.parent(), mounted.file_name()) {
        (RequestedDiskSource::HostDisk { create, .. }, Some(directory), Some(name)) => {
            (directory, Path::new(name), *create)
        }
        (RequestedDiskSource::HostDisk { .. }, ..) => return wrong("it is to be a file".to_owned()),
        _ => (mounted, Path::new(IN_CLAIM), None),
    };
    let path = directory.join(name);
    let failed = |what, source: io::Error| VolumeError::Io {
        whose: format!("disk {}", disk.name),
        what,
        path: path.clone(),
        source,
    };
    let directory_flags = (OFlag::O_PATH | OFlag::O_DIRECTORY).bits();
    let directory = match OpenOptions::new().read(true).custom_flags(directory_flags).open(directory) {
        Ok(directory) => directory,
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
            return wrong(format!("disk {} needs a directory with the file {IN_CLAIM} in it", disk.name));
        }
        Err(error) => return Err(failed("open the directory of", error)),
    };
    let access = if disk.read_only { OFlag::O_RDONLY } else { OFlag::O_RDWR };
    let made = if size.is_some() && !disk.read_only { OFlag::O_CREAT } else { OFlag::empty() };
    let flags = access | made | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
    let how = OpenHow::new().flags(flags).resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS);
    let how = if made.is_empty() { how } else { how.mode(Mode::S_IRUSR | Mode::S_IWUSR) };
    let name = name.display();
    let file = match retry_transient(|| openat2(&directory, Path::new(&name.to_string()), how)) {
        Ok(file) => File::from(file),
        Err(Errno::ENOENT) => {
            let rule = format!("disk {}: there is no file {name} in it; make one of the disk's size", disk.name);
            return wrong(rule);
        }
        Err(Errno::ELOOP) => return wrong(format!("disk {}: {name} is a link, which nobody follows", disk.name)),
        Err(Errno::EISDIR | Errno::ENXIO) => return wrong(format!("disk {}: {name} is no file", disk.name)),
        Err(errno) => return Err(failed("open", errno.into())),
    };
    let metadata = file.metadata().map_err(|source| failed("look at", source))?;
    if !metadata.is_file() {
        return wrong(format!("disk {}: {name} is no file", disk.name));
    }
    let mut length = metadata.len();
    if let Some(size) = size.filter(|_| length == 0 && !disk.read_only) {
        file.set_len(size).map_err(|source| failed("size", source))?;
        length = size;
    }
    if length == 0 || !length.is_multiple_of(SECTOR) {
        let rule = format!("disk {}: {name} has {length} bytes; whole sectors of {SECTOR} are needed", disk.name);
        return wrong(rule);
    }
    Ok((path, file))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_model::machine::{Bus, Cache, DiskKind};
    use nacelle_model::mount::Propagation;
    use std::io::Read;

    fn disk(source: RequestedDiskSource, read_only: bool) -> Disk<RequestedDiskSource> {
        Disk {
            name: "data".into(),
            kind: DiskKind::Disk,
            bus: Bus::Virtio,
            read_only,
            boot_order: None,
            serial: String::new(),
            cache: Cache::Writeback,
            block_size: None,
            serving: Default::default(),
            source,
        }
    }

    fn claim(read_only: bool) -> Disk<RequestedDiskSource> {
        disk(RequestedDiskSource::Claim { claim: "c".into() }, read_only)
    }

    fn mount(host: &Path, readonly: bool) -> NodeVolume {
        NodeVolume {
            host_path: host.display().to_string(),
            container_path: "/run/nacelle/vm/data".into(),
            readonly,
            recursive_read_only: false,
            propagation: Propagation::Private,
            id_mapped: false,
            options: [].into(),
        }
    }

    fn config(devices: &[&str], mounts: &[NodeVolume]) -> ContainerConfig {
        let mut config = (*nacelle_model::testing::container(1, 1).config).clone();
        let device = |permissions: &&str| DeviceRequest {
            container_path: "/dev/nacelle/data".into(),
            host_path: "/dev/x".into(),
            permissions: (*permissions).into(),
        };
        config.devices = devices.iter().map(device).collect();
        config.node_volumes = mounts.to_vec();
        config
    }

    #[test]
    fn a_claim_is_the_containers_device_or_mount() {
        let [writable, read] = [false, true].map(|readonly| mount(Path::new("/v"), readonly));
        let all = config(&["mrw"], &[]);
        assert_eq!(place(&claim(false), &all).unwrap(), Some(Place::Device(&all.devices[0])));
        let all = config(&[], std::slice::from_ref(&writable));
        assert_eq!(place(&claim(false), &all).unwrap(), Some(Place::Mount(&writable)));
        assert!(place(&disk(RequestedDiskSource::Empty { bytes: 512 }, false), &all).unwrap().is_none());
        for (disk, config, words) in [
            (claim(false), config(&[], &[]), "at /dev/nacelle/data or as a mount at /run/nacelle/vm/data"),
            (claim(false), config(&["rw"], std::slice::from_ref(&writable)), "not both"),
            (claim(false), config(&["r"], &[]), "config.devices.permissions is \"r\""),
            (claim(false), config(&[], std::slice::from_ref(&read)), "config.mounts.readonly is \"true\""),
            (
                disk(RequestedDiskSource::HostDisk { path: "/w".into(), create: None }, false),
                all.clone(),
                "must be of \"/w\"",
            ),
            (
                disk(RequestedDiskSource::HostDisk { path: "/w".into(), create: None }, false),
                config(&["rw"], &[]),
                "file /w of the node",
            ),
        ] {
            let error = place(&disk, &config).unwrap_err();
            assert!(error.kind() == Kind::Invalid && error.to_string().contains(words), "{words}: {error}");
        }
        assert!(place(&claim(true), &config(&["r"], &[])).unwrap().is_some());
        assert!(place(&claim(true), &config(&[], &[read])).unwrap().is_some());
    }

    #[test]
    fn a_file_system_is_the_containers_mount() {
        let one = Filesystem { name: "data".into(), what: "claim c".into() };
        let with = |change: &dyn Fn(&mut NodeVolume)| {
            let mut mount = mount(Path::new("/v"), false);
            change(&mut mount);
            config(&[], &[mount])
        };
        let all = with(&|mount| mount.options = [MountOption::Noatime, MountOption::Nodev].into());
        assert_eq!(shared(&one, &all).unwrap(), &all.node_volumes[0]);
        for (config, words) in [
            (config(&["rw"], &[]), "file system data is claim c, which the container has not: as a mount at /run"),
            (with(&|mount| mount.options = [MountOption::Noexec].into()), "mount_options is \"noexec\""),
            (with(&|mount| mount.propagation = Propagation::BothWays), "PROPAGATION_BIDIRECTIONAL"),
        ] {
            let error = shared(&one, &config).unwrap_err();
            assert!(error.kind() == Kind::Invalid && error.to_string().contains(words), "{words}: {error}");
        }
    }

    #[test]
    fn the_file_of_a_disk_is_a_file_and_beneath_its_mount() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let refused = |disk: &Disk<RequestedDiskSource>, path: &Path, words: &str| {
            let error = open(disk, &mount(path, false)).unwrap_err();
            assert!(error.kind() == Kind::Invalid && error.to_string().contains(words), "{words}: {error}");
        };
        refused(&claim(false), directory.path(), "there is no file disk.img");
        let image = at("disk.img");
        std::fs::write(&image, "").unwrap();
        refused(&claim(false), directory.path(), "disk.img has 0 bytes");
        std::fs::write(&image, [7; 700]).unwrap();
        refused(&claim(false), directory.path(), "whole sectors");
        std::fs::write(&image, [7; 1024]).unwrap();
        refused(&claim(false), &image, "needs a directory");
        for read_only in [false, true] {
            let (path, mut file) = open(&claim(read_only), &mount(directory.path(), read_only)).unwrap();
            let mut all = Vec::new();
            file.read_to_end(&mut all).unwrap();
            assert_eq!((path, all), (image.clone(), vec![7; 1024]));
            assert_eq!(file.set_len(1024).is_ok(), !read_only);
        }
        for (name, words) in [("link", "is a link"), ("pipe", "is no file"), ("directory", "is no file")] {
            let directory = at(name);
            std::fs::create_dir(&directory).unwrap();
            let inner = directory.join("disk.img");
            match name {
                "link" => std::os::unix::fs::symlink(&image, inner).unwrap(),
                "pipe" => nix::unistd::mkfifo(&inner, Mode::S_IRWXU).unwrap(),
                _ => std::fs::create_dir(inner).unwrap(),
            }
            refused(&claim(false), &directory, words);
            if name != "link" {
                refused(&claim(true), &directory, words);
            }
        }
    }

    #[test]
    fn a_file_of_the_node_is_made_where_it_shall_be() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("machine.img");
        let wish = |create| disk(RequestedDiskSource::HostDisk { path: path.display().to_string(), create }, false);
        let error = open(&wish(None), &mount(&path, false)).unwrap_err();
        assert!(error.kind() == Kind::Invalid && error.to_string().contains("no file machine.img"), "{error}");
        let (found, file) = open(&wish(Some(1 << 20)), &mount(&path, false)).unwrap();
        assert_eq!((found, file.metadata().unwrap().len()), (path.clone(), 1 << 20));
        // An existing file keeps its size.
        std::fs::write(&path, [1; 512]).unwrap();
        let (_, file) = open(&wish(Some(1 << 20)), &mount(&path, false)).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 512);
    }
}
