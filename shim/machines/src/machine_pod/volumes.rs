//! Finds a machine's disks among the mounts and devices of its container, and opens the files of those on the node. It accesses
//! only files below the paths that the container got. Blocks on files.

use super::credentials::check_mounts;
use super::volume_error::{VOLUMES_DIRECTORY, VolumeError, invalid_field, secret_path};
use nacelle_base::retry::retry_transient;
use nacelle_model::container::{ContainerConfig, ContainerImage};
use nacelle_model::device::DeviceRequest;
use nacelle_model::digest::ImageId;
use nacelle_model::machine::{Credential, Disk, Filesystem, INITRD_SOURCE_KEY, KERNEL_SOURCE_KEY};
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
const BLOCK_VOLUMES_DIRECTORY: &str = "/dev/nacelle";
/// The disk file in a claim's file system, the same as in KubeVirt.
const CLAIM_DISK_FILE: &str = "disk.img";
/// The sector size in bytes: a disk consists of whole sectors.
const SECTOR: u64 = 512;

/// The source of a machine's disk in the container.
#[derive(Debug, PartialEq, Eq)]
pub enum DiskVolume<'a> {
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
pub fn is_disk_device(machine: &MachinePod, path: &str) -> bool {
    let claims = machine.disks.iter().filter(|disk| matches!(disk.source, RequestedDiskSource::Claim { .. }));
    claims.into_iter().any(|disk| Path::new(path) == Path::new(BLOCK_VOLUMES_DIRECTORY).join(&disk.name))
}

/// Returns whether this mount is a disk of the machine.
pub fn is_machine_mount(machine: &MachinePod, path: &str) -> bool {
    let secret = |credential: &Credential| Path::new(path) == secret_path(credential.secret());
    machine.credentials.iter().any(secret)
        || machine.filesystems.iter().any(|one| Path::new(path) == Path::new(VOLUMES_DIRECTORY).join(&one.name))
        || machine.disks.iter().any(|disk| match &disk.source {
            RequestedDiskSource::Claim { .. }
            | RequestedDiskSource::HostDisk { .. }
            | RequestedDiskSource::Files { .. } => Path::new(path) == Path::new(VOLUMES_DIRECTORY).join(&disk.name),
            source => disk_secrets(source).any(|secret| Path::new(path) == secret_path(secret)),
        })
}

/// The name of the image volume with the machine's kernel, if that is not in the container's image.
pub(super) const KERNEL_BOOT: &str = "kernel-boot";

/// Returns whether the image volume at this path is for the machine: for the disk of that name, or for kernel and initramfs.
pub fn is_machine_image_volume(machine: &MachinePod, path: &str) -> bool {
    let at = |name: &str| Path::new(path) == Path::new(VOLUMES_DIRECTORY).join(name);
    let disks = machine.disks.iter().filter(|disk| matches!(disk.source, RequestedDiskSource::Image { .. }));
    disks.into_iter().any(|disk| at(&disk.name)) || (machine.kernel.is_some() && at(KERNEL_BOOT))
}

/// Returns the container path of the image volume for this disk or kernel.
pub fn image_volume_path(name: &str) -> PathBuf {
    Path::new(VOLUMES_DIRECTORY).join(if [KERNEL_SOURCE_KEY, INITRD_SOURCE_KEY].contains(&name) {
        KERNEL_BOOT
    } else {
        name
    })
}

/// Returns the image with this disk or kernel: that of its image volume, otherwise the container's own. `images` are the images
/// of the container's image volumes, in their order.
pub fn image_with_disk<'a>(
    name: &str,
    config: &ContainerConfig,
    images: &'a [ContainerImage],
    own: &'a ContainerImage,
) -> &'a ContainerImage {
    let at = image_volume_path(name);
    let mut volumes = config.volumes.iter().zip(images);
    volumes.find(|(volume, _)| Path::new(&volume.container_path) == at).map_or(own, |(_, image)| image)
}

/// Returns the backing images of the disks that the guest writes to, without duplicates.
pub fn backing_images(
    machine: &MachinePod,
    config: &ContainerConfig,
    images: &[ContainerImage],
    own: &ContainerImage,
) -> Vec<ImageId> {
    let mut backing = Vec::new();
    for disk in
        machine.disks.iter().filter(|disk| matches!(disk.source, RequestedDiskSource::Image { .. }) && !disk.read_only)
    {
        let id = image_with_disk(&disk.name, config, images, own).id;
        if !backing.contains(&id) {
            backing.push(id);
        }
    }
    backing
}

/// Returns the secrets that the disk needs.
fn disk_secrets(source: &RequestedDiskSource) -> impl Iterator<Item = &String> {
    let (optional, list) = match source {
        RequestedDiskSource::CloudInitOf { user, network, keys, .. } => {
            ([user.as_ref(), network.as_ref()], keys.as_slice())
        }
        _ => ([None; 2], [].as_slice()),
    };
    optional.into_iter().flatten().chain(list)
}

/// Checks that the container has the volumes of its machine's disks, in the required form. Accesses no file.
pub fn check_volumes(machine: &MachinePod, config: &ContainerConfig) -> Result<(), VolumeError> {
    check_mounts(machine, config)?;
    machine.disks.iter().try_for_each(|disk| find_disk_volume(disk, config).map(drop))?;
    machine.filesystems.iter().try_for_each(|one| filesystem_mount(one, config).map(drop))
}

/// Returns the container's mount with the directory of a file system.
pub fn filesystem_mount<'a>(one: &Filesystem, config: &'a ContainerConfig) -> Result<&'a NodeVolume, VolumeError> {
    let at = Path::new(VOLUMES_DIRECTORY).join(&one.name);
    let mount = config.node_volumes.iter().find(|mount| Path::new(&mount.container_path) == at);
    let mount = mount.ok_or_else(|| VolumeError::Missing {
        user: format!("file system {}", one.name),
        volume: one.what.clone(),
        rule: format!("it is expected as a mount at {}", at.display()),
    })?;
    if mount.propagation == Propagation::BothWays {
        let rule = "the guest's kernel makes its mounts, which the node does not see";
        return invalid_field("config.mounts.propagation", "PROPAGATION_BIDIRECTIONAL", rule);
    }
    // The guest never opens device nodes of the node.
    match mount.options.iter().find(|option| !matches!(option, MountOption::Noatime | MountOption::Nodev)) {
        Some(option) => {
            let rule = "the guest mounts it with options of its own: remove this one";
            invalid_field("config.mounts.mount_options", option.word(), rule)
        }
        None => Ok(mount),
    }
}

/// Resolves the directory of a file system on the node.
pub fn resolve_directory(one: &Filesystem, mount: &NodeVolume) -> Result<NodeVolume, VolumeError> {
    let path = Path::new(&mount.host_path);
    let failed = |source| VolumeError::Io {
        user: format!("file system {}", one.name),
        operation: "find",
        path: path.to_owned(),
        source,
    };
    let found = path.canonicalize().map_err(failed)?;
    match found.to_str() {
        Some(name) if found.is_dir() => Ok(NodeVolume { host_path: name.to_owned(), ..mount.clone() }),
        _ => invalid_field(
            "config.mounts.host_path",
            &mount.host_path,
            format!("file system {} needs a directory", one.name),
        ),
    }
}

/// Returns the source of the disk in the container; `None` for a disk without a volume.
pub fn find_disk_volume<'a>(
    disk: &Disk<RequestedDiskSource>,
    config: &'a ContainerConfig,
) -> Result<Option<DiskVolume<'a>>, VolumeError> {
    let (device_at, mount_at) =
        (Path::new(BLOCK_VOLUMES_DIRECTORY).join(&disk.name), Path::new(VOLUMES_DIRECTORY).join(&disk.name));
    let device = config.devices.iter().find(|device| Path::new(&device.container_path) == device_at);
    let mount = config.node_volumes.iter().find(|mount| Path::new(&mount.container_path) == mount_at);
    let user = || format!("disk {}", disk.name);
    let missing = |volume: String, rule: String| VolumeError::Missing { user: user(), volume, rule };
    let (device_at, mount_at) = (device_at.display(), mount_at.display());
    let found = match &disk.source {
        RequestedDiskSource::Claim { claim } => {
            let what = format!("claim {claim}");
            match (device, mount) {
                (Some(device), None) => DiskVolume::Device(device),
                (None, Some(mount)) => DiskVolume::Mount(mount),
                (None, None) => {
                    let rule = format!("it is expected as a block device at {device_at} or as a mount at {mount_at}");
                    return Err(missing(what, rule));
                }
                (Some(device), Some(_)) => {
                    let rule = format!("disk {} is this or the mount at {mount_at}, not both", disk.name);
                    return invalid_field("config.devices.container_path", &device.container_path, rule);
                }
            }
        }
        RequestedDiskSource::HostDisk { path, .. } => {
            let rule = format!("it is expected as a mount at {mount_at}");
            let mount = mount.ok_or_else(|| missing(format!("file {path} of the node"), rule))?;
            if Path::new(&mount.host_path) != Path::new(path) {
                let rule = format!("the mount for disk {} must be of {path:?}, as hostDisk.path says", disk.name);
                return invalid_field("config.mounts.host_path", &mount.host_path, rule);
            }
            DiskVolume::Mount(mount)
        }
        RequestedDiskSource::Files { what, .. } => {
            let rule = format!("it is expected as a mount at {mount_at}");
            return Ok(Some(DiskVolume::Files(mount.ok_or_else(|| missing(what.clone(), rule))?)));
        }
        RequestedDiskSource::CloudInitOf { .. } => {
            let found = disk_secrets(&disk.source).map(|secret| {
                let at = secret_path(secret);
                let mount = config.node_volumes.iter().find(|mount| Path::new(&mount.container_path) == at);
                let rule = format!("it is expected as a mount at {}", at.display());
                Ok((secret.clone(), mount.ok_or_else(|| missing(format!("of secret {secret}"), rule))?))
            });
            return found.collect::<Result<_, VolumeError>>().map(|mounts| Some(DiskVolume::Secrets(mounts)));
        }
        RequestedDiskSource::Image { .. } | RequestedDiskSource::Empty { .. } | RequestedDiskSource::CloudInit(_) => {
            return Ok(None);
        }
    };
    let rule = || format!("disk {} is written to: make it writable, or the disk read-only", disk.name);
    match found {
        DiskVolume::Device(device) if !disk.read_only && !device.permissions.contains('w') => {
            invalid_field("config.devices.permissions", &device.permissions, rule())
        }
        DiskVolume::Mount(mount) if !disk.read_only && mount.readonly => {
            invalid_field("config.mounts.readonly", "true", rule())
        }
        found => Ok(Some(found)),
    }
}

/// Checks that no process of the node uses the device exclusively: a guest must not write to a device that is mounted or part of
/// another one.
pub fn check_unused(disk: &Disk<RequestedDiskSource>, device: &DeviceRequest) -> Result<(), VolumeError> {
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
pub fn open_disk_file(disk: &Disk<RequestedDiskSource>, mount: &NodeVolume) -> Result<(PathBuf, File), VolumeError> {
    let mounted = Path::new(&mount.host_path);
    let invalid = |rule: String| invalid_field("config.mounts.host_path", &mount.host_path, rule);
    let (directory, name, size) = match (&disk.source, mounted.parent(), mounted.file_name()) {
        (RequestedDiskSource::HostDisk { create, .. }, Some(directory), Some(name)) => {
            (directory, Path::new(name), *create)
        }
        (RequestedDiskSource::HostDisk { .. }, ..) => return invalid("a file is expected".to_owned()),
        _ => (mounted, Path::new(CLAIM_DISK_FILE), None),
    };
    let path = directory.join(name);
    let failed = |operation, source: io::Error| VolumeError::Io {
        user: format!("disk {}", disk.name),
        operation,
        path: path.clone(),
        source,
    };
    let directory_flags = (OFlag::O_PATH | OFlag::O_DIRECTORY).bits();
    let directory = match OpenOptions::new().read(true).custom_flags(directory_flags).open(directory) {
        Ok(directory) => directory,
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
            return invalid(format!("disk {} needs a directory with the file {CLAIM_DISK_FILE} in it", disk.name));
        }
        Err(error) => return Err(failed("open the directory of", error)),
    };
    let access = if disk.read_only { OFlag::O_RDONLY } else { OFlag::O_RDWR };
    let create_flag = if size.is_some() && !disk.read_only { OFlag::O_CREAT } else { OFlag::empty() };
    let flags = access | create_flag | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
    let how = OpenHow::new().flags(flags).resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS);
    let how = if create_flag.is_empty() { how } else { how.mode(Mode::S_IRUSR | Mode::S_IWUSR) };
    let name = name.display();
    let file = match retry_transient(|| openat2(&directory, Path::new(&name.to_string()), how)) {
        Ok(file) => File::from(file),
        Err(Errno::ENOENT) => {
            let rule = format!("disk {}: there is no file {name} in it; create one of the disk's size", disk.name);
            return invalid(rule);
        }
        Err(Errno::ELOOP) => return invalid(format!("disk {}: {name} is a link, which is not followed", disk.name)),
        Err(Errno::EISDIR | Errno::ENXIO) => {
            return invalid(format!("disk {}: {name} is not a regular file", disk.name));
        }
        Err(errno) => return Err(failed("open", errno.into())),
    };
    let metadata = file.metadata().map_err(|source| failed("stat", source))?;
    if !metadata.is_file() {
        return invalid(format!("disk {}: {name} is not a regular file", disk.name));
    }
    let mut length = metadata.len();
    if let Some(size) = size.filter(|_| length == 0 && !disk.read_only) {
        file.set_len(size).map_err(|source| failed("set the size of", source))?;
        length = size;
    }
    if length == 0 || !length.is_multiple_of(SECTOR) {
        let rule = format!("disk {}: {name} has {length} bytes; whole sectors of {SECTOR} are needed", disk.name);
        return invalid(rule);
    }
    Ok((path, file))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::{Classify, FailureKind};
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
            ..DeviceRequest::default()
        };
        config.devices = devices.iter().map(device).collect();
        config.node_volumes = mounts.to_vec();
        config
    }

    #[test]
    fn a_claim_is_the_containers_device_or_mount() {
        let [writable, read] = [false, true].map(|readonly| mount(Path::new("/v"), readonly));
        let all = config(&["mrw"], &[]);
        assert_eq!(find_disk_volume(&claim(false), &all).unwrap(), Some(DiskVolume::Device(&all.devices[0])));
        let all = config(&[], std::slice::from_ref(&writable));
        assert_eq!(find_disk_volume(&claim(false), &all).unwrap(), Some(DiskVolume::Mount(&writable)));
        assert!(find_disk_volume(&disk(RequestedDiskSource::Empty { bytes: 512 }, false), &all).unwrap().is_none());
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
            let error = find_disk_volume(&disk, &config).unwrap_err();
            assert!(error.kind() == FailureKind::Invalid && error.to_string().contains(words), "{words}: {error}");
        }
        assert!(find_disk_volume(&claim(true), &config(&["r"], &[])).unwrap().is_some());
        assert!(find_disk_volume(&claim(true), &config(&[], &[read])).unwrap().is_some());
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
        assert_eq!(filesystem_mount(&one, &all).unwrap(), &all.node_volumes[0]);
        for (config, words) in [
            (
                config(&["rw"], &[]),
                "file system data is claim c, which the container does not have: it is expected as a mount at /run",
            ),
            (with(&|mount| mount.options = [MountOption::Noexec].into()), "mount_options is \"noexec\""),
            (with(&|mount| mount.propagation = Propagation::BothWays), "PROPAGATION_BIDIRECTIONAL"),
        ] {
            let error = filesystem_mount(&one, &config).unwrap_err();
            assert!(error.kind() == FailureKind::Invalid && error.to_string().contains(words), "{words}: {error}");
        }
    }

    #[test]
    fn the_file_of_a_disk_is_a_file_and_beneath_its_mount() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let assert_rejected = |disk: &Disk<RequestedDiskSource>, path: &Path, words: &str| {
            let error = open_disk_file(disk, &mount(path, false)).unwrap_err();
            assert!(error.kind() == FailureKind::Invalid && error.to_string().contains(words), "{words}: {error}");
        };
        assert_rejected(&claim(false), directory.path(), "there is no file disk.img");
        let image = at("disk.img");
        std::fs::write(&image, "").unwrap();
        assert_rejected(&claim(false), directory.path(), "disk.img has 0 bytes");
        std::fs::write(&image, [7; 700]).unwrap();
        assert_rejected(&claim(false), directory.path(), "whole sectors");
        std::fs::write(&image, [7; 1024]).unwrap();
        assert_rejected(&claim(false), &image, "needs a directory");
        for read_only in [false, true] {
            let (path, mut file) = open_disk_file(&claim(read_only), &mount(directory.path(), read_only)).unwrap();
            let mut all = Vec::new();
            file.read_to_end(&mut all).unwrap();
            assert_eq!((path, all), (image.clone(), vec![7; 1024]));
            assert_eq!(file.set_len(1024).is_ok(), !read_only);
        }
        for (name, words) in
            [("link", "is a link"), ("pipe", "is not a regular file"), ("directory", "is not a regular file")]
        {
            let directory = at(name);
            std::fs::create_dir(&directory).unwrap();
            let inner = directory.join("disk.img");
            match name {
                "link" => std::os::unix::fs::symlink(&image, inner).unwrap(),
                "pipe" => nix::unistd::mkfifo(&inner, Mode::S_IRWXU).unwrap(),
                _ => std::fs::create_dir(inner).unwrap(),
            }
            assert_rejected(&claim(false), &directory, words);
            if name != "link" {
                assert_rejected(&claim(true), &directory, words);
            }
        }
    }

    #[test]
    fn a_host_disk_is_created_if_its_file_is_missing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("machine.img");
        let host_disk =
            |create| disk(RequestedDiskSource::HostDisk { path: path.display().to_string(), create }, false);
        let error = open_disk_file(&host_disk(None), &mount(&path, false)).unwrap_err();
        assert!(error.kind() == FailureKind::Invalid && error.to_string().contains("no file machine.img"), "{error}");
        let (found, file) = open_disk_file(&host_disk(Some(1 << 20)), &mount(&path, false)).unwrap();
        assert_eq!((found, file.metadata().unwrap().len()), (path.clone(), 1 << 20));
        // An existing file keeps its size.
        std::fs::write(&path, [1; 512]).unwrap();
        let (_, file) = open_disk_file(&host_disk(Some(1 << 20)), &mount(&path, false)).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 512);
    }
}
