//! Attaches the disks of the pod: images mounted as EROFS, from partitions of the image disk or from files of the node; the scratch disk;
//! block devices of the node as partitions of the volume disk; and the file system of volumes that the node shares.
//!
//! `GuestDisks` serialises its operations, which block and are for blocking threads.

use nacelle_base::retry::retry_interrupted;
use nacelle_base::{Classify, FailureKind, share};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::image_files::mount_files;
use crate::{paths, sys};

/// The time in which a disk must reach its new size: the kernel reads it some time after the host has changed it.
const GROWTH_TIMEOUT: Duration = Duration::from_secs(40);

/// The time in which the kernel must release an image after its last container was removed: it destroys mount namespaces later.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(10);

/// Reasons an operation on a disk fails.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the fields are what the message prints")]
pub enum DiskError {
    #[error("invalid partition number {number}: 1 to 255 are allowed")]
    Number { number: u32 },
    #[error("offset {offset} and length {length} are not multiples of 4096 above 0")]
    InvalidRange { offset: u64, length: u64 },
    #[error("cannot attach image {number}: it is already attached {attached_source}")]
    AlreadyAttached { number: u8, attached_source: ImageSource },
    #[error("an image needs at least one file")]
    NoFiles,
    #[error("offset {offset} and length {length} of a device are not multiples of 512 above 0")]
    InvalidDeviceRange { offset: u64, length: u64 },
    #[error("cannot attach device {number}: it is already attached at offset {offset}")]
    DeviceAlreadyAttached { number: u8, offset: u64 },
    #[error("there is no device at partition {number}")]
    NoDevice { number: u32 },
    #[error("cannot detach device {number}: it is in use")]
    DeviceBusy { number: u8 },
    #[error("there is no image at partition {number}")]
    NoImage { number: u32 },
    #[error("this VM has no disk {number}")]
    NoDisk { number: u32 },
    #[error("the disk {disk} has {have} bytes and did not grow to {need}")]
    TooSmall { disk: String, have: u64, need: u64 },
    #[error("cannot {what} {}", path.display())]
    Io { what: &'static str, path: PathBuf, source: io::Error },
    #[error("cannot detach image {number}: it is in use")]
    Busy { number: u8 },
}

impl Classify for DiskError {
    fn kind(&self) -> FailureKind {
        match self {
            DiskError::Number { .. }
            | DiskError::InvalidRange { .. }
            | DiskError::InvalidDeviceRange { .. }
            | DiskError::NoFiles => FailureKind::Invalid,
            DiskError::AlreadyAttached { .. } | DiskError::DeviceAlreadyAttached { .. } => FailureKind::AlreadyExists,
            DiskError::NoImage { .. } | DiskError::NoDevice { .. } | DiskError::NoDisk { .. } => FailureKind::NotFound,
            DiskError::TooSmall { .. } => FailureKind::Timeout,
            DiskError::Busy { .. } | DiskError::DeviceBusy { .. } => FailureKind::Conflict,
            DiskError::Io { .. } => FailureKind::Internal,
        }
    }
}

fn io_error<E: Into<io::Error>>(what: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(E) -> DiskError {
    let path = path.into();
    move |source| DiskError::Io { what, path, source: source.into() }
}

fn already_attached(number: u8, attached_source: &ImageSource) -> DiskError {
    DiskError::AlreadyAttached { number, attached_source: attached_source.clone() }
}

/// Returns the kernel's name of a virtio disk: 0 is "vda".
fn disk_name(number: u32) -> Result<String, DiskError> {
    let letter = u8::try_from(number).ok().filter(|number| *number < 26).map(|number| char::from(b'a' + number));
    letter.map(|letter| format!("vd{letter}")).ok_or(DiskError::NoDisk { number })
}

/// Returns the mount point of an image.
fn mount_point(number: u8) -> PathBuf {
    Path::new(paths::IMAGES).join(number.to_string())
}

fn check_partition(partition: u32) -> Result<u8, DiskError> {
    u8::try_from(partition).ok().filter(|number| *number != 0).ok_or(DiskError::Number { number: partition })
}

/// The location of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageSource {
    /// A partition of the image disk: its offset and its length in bytes.
    Disk(u64, u64),
    /// Files of the node: the file with the tree, and those with the layers that the tree refers to.
    Files(Vec<PathBuf>),
}

impl std::fmt::Display for ImageSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ImageSource::Disk(offset, length) => write!(f, "at offset {offset} with length {length}"),
            ImageSource::Files(files) => write!(f, "from {} files", files.len()),
        }
    }
}

/// A block device of the node, which is a partition of the volume disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct VolumePartition {
    offset: u64,
    length: u64,
    writable: bool,
}

/// The VM's disks, or on the node their replacements.
#[derive(Debug)]
pub struct GuestDisks {
    image_disk: u32,
    scratch_disk: u32,
    volume_disk: u32,
    attached: Mutex<HashMap<u8, ImageSource>>,
    devices: Mutex<HashMap<u8, VolumePartition>>,
    scratch_mounted: Mutex<bool>,
    share_mounted: Mutex<bool>,
}

impl GuestDisks {
    /// The disks of a VM, by their numbers: 0 is the first. `volume_disk` 0: there is none.
    pub fn new(image_disk: u32, scratch_disk: u32, volume_disk: u32) -> GuestDisks {
        GuestDisks {
            image_disk,
            scratch_disk,
            volume_disk,
            attached: Mutex::default(),
            devices: Mutex::default(),
            scratch_mounted: Mutex::default(),
            share_mounted: Mutex::default(),
        }
    }

    /// The disks of a pod on the node: there is none, and the scratch directory is mounted already.
    pub fn on_node() -> GuestDisks {
        GuestDisks { scratch_mounted: Mutex::new(true), share_mounted: Mutex::new(true), ..GuestDisks::new(0, 0, 0) }
    }

    /// Mounts an image from files of the node. Succeeds without effect if it is mounted from the same files.
    pub fn attach_files(&self, partition: u32, files: Vec<PathBuf>) -> Result<(), DiskError> {
        let number = check_partition(partition)?;
        let mut attached = self.attached.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(attached_source) = attached.get(&number) {
            return if *attached_source == ImageSource::Files(files) {
                Ok(())
            } else {
                Err(already_attached(number, attached_source))
            };
        }
        let (tree, layers) = files.split_first().ok_or(DiskError::NoFiles)?;
        let layers: Vec<PathBuf> = layers.iter().map(|layer| paths::node_path(layer)).collect();
        let point = mount_point(number);
        fs::create_dir_all(&point)
            .and_then(|()| mount_files(&paths::node_path(tree), &layers, &point, &paths::node_path(Path::new("/dev"))))
            .map_err(io_error("mount the image", tree))?;
        attached.insert(number, ImageSource::Files(files));
        Ok(())
    }

    /// Adds a partition of the image disk and mounts it. Succeeds without effect if it is mounted from the same offset and length.
    pub fn attach_image(&self, partition: u32, offset: u64, length: u64) -> Result<(), DiskError> {
        let number = check_partition(partition)?;
        let invalid_range = || DiskError::InvalidRange { offset, length };
        let end = offset
            .checked_add(length)
            .filter(|_| length > 0 && offset.is_multiple_of(4096) && length.is_multiple_of(4096));
        let end = end.ok_or_else(invalid_range)?;
        let start = i64::try_from(offset).ok().ok_or_else(invalid_range)?;
        let size = i64::try_from(length).ok().ok_or_else(invalid_range)?;
        let mut attached = self.attached.lock().unwrap_or_else(PoisonError::into_inner);
        match attached.get(&number) {
            Some(attached_source) if *attached_source == ImageSource::Disk(offset, length) => return Ok(()),
            Some(attached_source) => return Err(already_attached(number, attached_source)),
            None => {}
        }
        let disk = disk_name(self.image_disk)?;
        wait_for_size(&disk, end)?;
        let device = Path::new("/dev").join(&disk);
        let file = File::open(&device).map_err(io_error("open", &device))?;
        match sys::add_partition(&file, number, start, size) {
            // A failed attempt has left the partition.
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                sys::delete_partition(&file, number).map_err(io_error("remove a stale partition of", &device))?;
                sys::add_partition(&file, number, start, size).map_err(io_error("add a partition to", &device))?;
            }
            other => other.map_err(io_error("add a partition to", &device))?,
        }
        if let Err(error) = mount_image(&disk, number) {
            // The error of the mount is the one to report. The next attempt replaces a partition that stays.
            let _ = sys::delete_partition(&file, number);
            return Err(error);
        }
        attached.insert(number, ImageSource::Disk(offset, length));
        Ok(())
    }

    /// Unmounts an image and deletes its partition. Succeeds if there is no such image.
    pub fn detach_image(&self, partition: u32) -> Result<(), DiskError> {
        let number = check_partition(partition)?;
        let mut attached = self.attached.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(source) = attached.get(&number) else { return Ok(()) };
        let is_partition = matches!(source, ImageSource::Disk(..));
        let point = mount_point(number);
        match umount2(&point, MntFlags::empty()) {
            Ok(()) | Err(nix::Error::EINVAL | nix::Error::ENOENT) => {}
            Err(nix::Error::EBUSY) => return Err(DiskError::Busy { number }),
            Err(error) => return Err(io_error("unmount", &point)(error)),
        }
        if is_partition {
            self.delete_image_partition(number)?;
        }
        attached.remove(&number);
        Ok(())
    }

    /// Deletes the partition of an unmounted image. Mounts it again if it is in use.
    fn delete_image_partition(&self, number: u8) -> Result<(), DiskError> {
        let disk = disk_name(self.image_disk)?;
        if delete_partition(&disk, number)? {
            return Ok(());
        }
        // A container's overlay still uses it.
        mount_image(&disk, number)?;
        Err(DiskError::Busy { number })
    }

    /// Returns the mount point of an attached image.
    pub fn image_mount_point(&self, partition: u32) -> Result<PathBuf, DiskError> {
        let attached = self.attached.lock().unwrap_or_else(PoisonError::into_inner);
        let number = check_partition(partition)?;
        attached.get(&number).map(|_| mount_point(number)).ok_or(DiskError::NoImage { number: partition })
    }

    fn volume_disk_name(&self) -> Result<String, DiskError> {
        match self.volume_disk {
            0 => Err(DiskError::NoDisk { number: 0 }),
            number => disk_name(number),
        }
    }

    /// Adds a partition of the volume disk for a device of the node, or changes its length, and sets whether it is writable.
    pub fn attach_device(&self, partition: u32, offset: u64, length: u64, writable: bool) -> Result<(), DiskError> {
        let number = check_partition(partition)?;
        let invalid_range = || DiskError::InvalidDeviceRange { offset, length };
        let is_aligned = length > 0 && offset > 0 && offset.is_multiple_of(512) && length.is_multiple_of(512);
        let end = offset
            .checked_add(length)
            .filter(|end| is_aligned && i64::try_from(*end).is_ok())
            .ok_or_else(invalid_range)?;
        let numbers = (i64::try_from(offset).ok(), i64::try_from(length).ok());
        let (Some(start), Some(size)) = numbers else { return Err(invalid_range()) };
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        let existing = devices.get(&number).copied();
        if let Some(attached_source) = existing.filter(|attached_source| attached_source.offset != offset) {
            return Err(DiskError::DeviceAlreadyAttached { number, offset: attached_source.offset });
        }
        let disk = self.volume_disk_name()?;
        wait_for_size(&disk, end)?;
        let disk_file = Path::new("/dev").join(&disk);
        let file = File::open(&disk_file).map_err(io_error("open", &disk_file))?;
        match existing {
            Some(attached_source) if attached_source.length == length => {}
            Some(_) => {
                sys::resize_partition(&file, number, start, size)
                    .map_err(io_error("resize a partition of", &disk_file))?;
            }
            None => {
                sys::add_partition(&file, number, start, size).map_err(io_error("add a partition to", &disk_file))?
            }
        }
        devices.insert(number, VolumePartition { offset, length, writable });
        let node = PathBuf::from(format!("/dev/{disk}{number}"));
        if existing.is_none_or(|attached_source| attached_source.writable != writable) {
            let set = File::open(&node).and_then(|device| sys::set_read_only(&device, !writable));
            set.map_err(io_error("set the access to", &node))?;
        }
        Ok(())
    }

    /// Deletes the partition of a device of the node. Succeeds if there is no such device.
    pub fn detach_device(&self, partition: u32) -> Result<(), DiskError> {
        let number = check_partition(partition)?;
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        if !devices.contains_key(&number) {
            return Ok(());
        }
        if !delete_partition(&self.volume_disk_name()?, number)? {
            return Err(DiskError::DeviceBusy { number });
        }
        devices.remove(&number);
        Ok(())
    }

    /// Returns the file in /dev of an attached device or volume.
    pub fn device_path(&self, partition: u32) -> Result<PathBuf, DiskError> {
        let devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        let number = check_partition(partition)?;
        if !devices.contains_key(&number) {
            return Err(DiskError::NoDevice { number: partition });
        }
        Ok(PathBuf::from(format!("/dev/{}{number}", self.volume_disk_name()?)))
    }

    /// Returns the major and the minor number of an attached device.
    pub fn device_numbers(&self, partition: u32) -> Result<(i64, i64), DiskError> {
        let node = self.device_path(partition)?;
        let rdev = fs::metadata(&node).map_err(io_error("inspect", &node))?.rdev();
        let number = |part: u64| i64::try_from(part).unwrap_or(i64::MAX);
        Ok((number(nix::sys::stat::major(rdev)), number(nix::sys::stat::minor(rdev))))
    }

    /// Mounts the virtiofs with the volumes of the node, once for all containers. The kernel mounts each volume in it when a process
    /// enters it; volumes of one device of the node are one file system. MS_NODEV, because device files there are meant for the node.
    pub fn mount_shared_volumes(&self) -> Result<(), DiskError> {
        let mut mounted = self.share_mounted.lock().unwrap_or_else(PoisonError::into_inner);
        if !*mounted {
            let directory = Path::new(share::DIRECTORY);
            fs::create_dir_all(directory)
                .and_then(|()| {
                    Ok(mount(Some(share::TAG), directory, Some("virtiofs"), MsFlags::MS_NODEV, None::<&str>)?)
                })
                .map_err(io_error("mount the volumes of the node at", directory))?;
            *mounted = true;
            // The volumes are usable without it.
            if let Err(error) = set_read_ahead(directory) {
                tracing::debug!(%error, "cannot set the read-ahead of volumes of the node");
            }
        }
        Ok(())
    }

    /// Writes the dirty pages of the scratch disk to it. Has no effect before the disk is mounted. Blocks.
    pub fn sync_scratch(&self) -> Result<(), DiskError> {
        let path = Path::new(paths::SCRATCH);
        let directory = File::open(path).map_err(io_error("open", path))?;
        retry_interrupted(|| nix::unistd::syncfs(&directory)).map_err(io_error("write the dirty pages of", path))
    }

    /// Mounts the scratch disk, once.
    pub fn mount_scratch(&self) -> Result<(), DiskError> {
        let mut mounted = self.scratch_mounted.lock().unwrap_or_else(PoisonError::into_inner);
        if !*mounted {
            let node = Path::new("/dev").join(disk_name(self.scratch_disk)?);
            let flags = MsFlags::MS_NOATIME;
            // The disk ends with the VM, so its content need not survive a crash.
            mount(Some(&node), paths::SCRATCH, Some("ext4"), flags, Some("discard,nobarrier"))
                .map_err(io_error("mount the scratch disk", &node))?;
            *mounted = true;
        }
        Ok(())
    }
}

/// Sets the read-ahead of a mounted file system, and of those within it, to the largest size of a request.
fn set_read_ahead(directory: &Path) -> io::Result<()> {
    let device = fs::metadata(directory)?.dev();
    let (major, minor) = (nix::sys::stat::major(device), nix::sys::stat::minor(device));
    fs::write(format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb"), share::READ_AHEAD_KIB.to_string())
}

/// Mounts the partition of an image. Containers see it through an overlay only.
fn mount_image(disk: &str, number: u8) -> Result<(), DiskError> {
    let point = mount_point(number);
    let node = PathBuf::from(format!("/dev/{disk}{number}"));
    let flags = MsFlags::MS_RDONLY | MsFlags::MS_NODEV | MsFlags::MS_NOSUID;
    fs::create_dir_all(&point)
        .and_then(|()| mount(Some(&node), &point, Some("erofs"), flags, None::<&str>).map_err(io::Error::from))
        .map_err(io_error("mount the image", &node))
}

/// Deletes a partition when it is no longer used. Returns false if it is still used after `RELEASE_TIMEOUT`.
fn delete_partition(disk: &str, number: u8) -> Result<bool, DiskError> {
    let device = Path::new("/dev").join(disk);
    let file = File::open(&device).map_err(io_error("open", &device))?;
    let deadline = Instant::now() + RELEASE_TIMEOUT;
    loop {
        match sys::delete_partition(&file, number).map_err(|error| (error.raw_os_error(), error)) {
            Ok(()) | Err((Some(libc::ENXIO), _)) => return Ok(true),
            Err((Some(libc::EBUSY), _)) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err((Some(libc::EBUSY), _)) => return Ok(false),
            Err((_, error)) => return Err(io_error("remove a partition of", &device)(error)),
        }
    }
}

fn wait_for_size(disk: &str, need: u64) -> Result<(), DiskError> {
    let path = PathBuf::from(format!("/sys/block/{disk}/size"));
    let deadline = Instant::now() + GROWTH_TIMEOUT;
    loop {
        let text = fs::read_to_string(&path).map_err(io_error("read", &path))?;
        let have = text.trim().parse::<u64>().unwrap_or(0).saturating_mul(512);
        if have >= need {
            return Ok(());
        }
        if Instant::now() >= deadline {
            return Err(DiskError::TooSmall { disk: disk.to_owned(), have, need });
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_and_partitions_have_bounds() {
        assert_eq!(disk_name(0).unwrap(), "vda");
        assert_eq!(disk_name(25).unwrap(), "vdz");
        assert!(disk_name(26).is_err());
        let disks = GuestDisks::new(0, 1, 2);
        for (partition, offset, length) in [(0, 0, 4096), (256, 0, 4096), (1, 1, 4096), (1, 0, 0), (1, u64::MAX, 4096)]
        {
            assert_eq!(disks.attach_image(partition, offset, length).unwrap_err().kind(), FailureKind::Invalid);
        }
        for (partition, offset, length) in
            [(0, 512, 512), (256, 512, 512), (1, 0, 512), (1, 512, 0), (1, 512, 100), (1, 512, u64::MAX - 1023)]
        {
            assert_eq!(disks.attach_device(partition, offset, length, true).unwrap_err().kind(), FailureKind::Invalid);
        }
        assert_eq!(disks.device_numbers(3).unwrap_err().kind(), FailureKind::NotFound);
        assert_eq!(GuestDisks::on_node().attach_device(1, 512, 512, true).unwrap_err().kind(), FailureKind::NotFound);
        disks.detach_device(3).unwrap();
        assert_eq!(disks.image_mount_point(3).unwrap_err().kind(), FailureKind::NotFound);
        disks.detach_image(3).unwrap();
    }
}
