//! Owns: the images of the pod, mounted as EROFS: partitions of the image disk that come and go while the machine runs, or
//! files of the node; the scratch disk; block devices of the node, which are partitions, too; and the volumes of the node.
//! Threads: `Disks` serialises; its methods block and are for blocking threads.

use nacelle_base::{Classify, Kind, share};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::{paths, sys};

/// How long the disk may take to grow: the host has told the kernel, which reads the new size on its own time.
const GROWTH: Duration = Duration::from_secs(40);

/// How long the kernel may hold an image after its last container is gone: it takes namespaces down when it likes.
const RELEASE: Duration = Duration::from_secs(10);

/// Why a disk could not be used.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the fields are what the message prints")]
pub enum DiskError {
    #[error("{number} is no partition number: 1 to 255 are")]
    Number { number: u32 },
    #[error("offset {offset} and length {length} are not multiples of 4096 above 0")]
    Shape { offset: u64, length: u64 },
    #[error("image {number} is attached already, {there}")]
    Taken { number: u8, there: Source },
    #[error("an image needs at least one file")]
    NoFiles,
    #[error("offset {offset} and length {length} of a device are not multiples of 512 above 0")]
    DeviceShape { offset: u64, length: u64 },
    #[error("device {number} is attached already, at offset {offset}")]
    DeviceTaken { number: u8, offset: u64 },
    #[error("there is no device at partition {number}")]
    NoDevice { number: u32 },
    #[error("device {number} is in use")]
    DeviceBusy { number: u8 },
    #[error("there is no image at partition {number}")]
    NoImage { number: u32 },
    #[error("{number} is no disk of this machine")]
    NoDisk { number: u32 },
    #[error("the disk {disk} has {have} bytes and did not grow to {need}")]
    TooSmall { disk: String, have: u64, need: u64 },
    #[error("cannot {what} {}", path.display())]
    Io { what: &'static str, path: PathBuf, source: io::Error },
    #[error("image {number} is in use")]
    Busy { number: u8 },
}

impl Classify for DiskError {
    fn kind(&self) -> Kind {
        match self {
            DiskError::Number { .. } | DiskError::Shape { .. } | DiskError::DeviceShape { .. } | DiskError::NoFiles => {
                Kind::Invalid
            }
            DiskError::Taken { .. } | DiskError::DeviceTaken { .. } => Kind::AlreadyExists,
            DiskError::NoImage { .. } | DiskError::NoDevice { .. } | DiskError::NoDisk { .. } => Kind::NotFound,
            DiskError::TooSmall { .. } => Kind::Timeout,
            DiskError::Busy { .. } | DiskError::DeviceBusy { .. } => Kind::Conflict,
            DiskError::Io { .. } => Kind::Internal,
        }
    }
}

fn at<E: Into<io::Error>>(what: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(E) -> DiskError {
    let path = path.into();
    move |source| DiskError::Io { what, path, source: source.into() }
}

fn taken(number: u8, there: &Source) -> DiskError {
    DiskError::Taken { number, there: there.clone() }
}

/// The kernel's name of a virtio disk: 0 is "vda".
fn disk_name(number: u32) -> Result<String, DiskError> {
    let letter = u8::try_from(number).ok().filter(|number| *number < 26).map(|number| char::from(b'a' + number));
    letter.map(|letter| format!("vd{letter}")).ok_or(DiskError::NoDisk { number })
}

/// Where an image is mounted.
fn mount_point(number: u8) -> PathBuf {
    Path::new(paths::IMAGES).join(number.to_string())
}

fn number_of(partition: u32) -> Result<u8, DiskError> {
    u8::try_from(partition).ok().filter(|number| *number != 0).ok_or(DiskError::Number { number: partition })
}

/// Where an image lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// On the image disk: bytes from its start, and its length.
    Disk(u64, u64),
    /// In files of the node: its tree, and the layers that the tree points into.
    Files(Vec<PathBuf>),
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Source::Disk(offset, length) => write!(f, "at offset {offset} with length {length}"),
            Source::Files(files) => write!(f, "from {} files", files.len()),
        }
    }
}

/// A block device of the node, as a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Device {
    offset: u64,
    length: u64,
    writable: bool,
}

/// The machine's disks.
#[derive(Debug)]
pub struct Disks {
    image_disk: u32,
    scratch_disk: u32,
    volume_disk: u32,
    attached: Mutex<HashMap<u8, Source>>,
    devices: Mutex<HashMap<u8, Device>>,
    scratch_mounted: Mutex<bool>,
    share_mounted: Mutex<bool>,
}

impl Disks {
    /// The disks by their numbers: 0 is the first. That for volumes: 0 is none.
    pub fn new(image_disk: u32, scratch_disk: u32, volume_disk: u32) -> Disks {
        Disks {
            image_disk,
            scratch_disk,
            volume_disk,
            attached: Mutex::default(),
            devices: Mutex::default(),
            scratch_mounted: Mutex::default(),
            share_mounted: Mutex::default(),
        }
    }

    /// Of a pod without a machine: there is no disk, and scratch is a folder.
    pub fn on_node() -> Disks {
        Disks { scratch_mounted: Mutex::new(true), share_mounted: Mutex::new(true), ..Disks::new(0, 0, 0) }
    }

    /// Mounts an image that lies in files of the node. Said again with the same files it is a success.
    pub fn attach_files(&self, partition: u32, files: Vec<PathBuf>) -> Result<(), DiskError> {
        let number = number_of(partition)?;
        let mut attached = self.attached.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(there) = attached.get(&number) {
            return if *there == Source::Files(files) { Ok(()) } else { Err(taken(number, there)) };
        }
        let (tree, layers) = files.split_first().ok_or(DiskError::NoFiles)?;
        let layers: Vec<PathBuf> = layers.iter().map(|layer| paths::of_node(layer)).collect();
        let point = mount_point(number);
        fs::create_dir_all(&point)
            .and_then(|()| sys::mount_erofs(&paths::of_node(tree), &layers, &point))
            .map_err(at("mount the image", tree))?;
        attached.insert(number, Source::Files(files));
        Ok(())
    }

    /// Adds a partition and mounts it. Said again with the same figures it is a success.
    pub fn attach(&self, partition: u32, offset: u64, length: u64) -> Result<(), DiskError> {
        let number = number_of(partition)?;
        let shape = || DiskError::Shape { offset, length };
        let end = offset
            .checked_add(length)
            .filter(|_| length > 0 && offset.is_multiple_of(4096) && length.is_multiple_of(4096));
        let end = end.ok_or_else(shape)?;
        let start = i64::try_from(offset).ok().ok_or_else(shape)?;
        let size = i64::try_from(length).ok().ok_or_else(shape)?;
        let mut attached = self.attached.lock().unwrap_or_else(PoisonError::into_inner);
        match attached.get(&number) {
            Some(there) if *there == Source::Disk(offset, length) => return Ok(()),
            Some(there) => return Err(taken(number, there)),
            None => {}
        }
        let disk = disk_name(self.image_disk)?;
        wait_for_size(&disk, end)?;
        let device = Path::new("/dev").join(&disk);
        let file = File::open(&device).map_err(at("open", &device))?;
        match sys::add_partition(&file, number, start, size) {
            // Left over from an attempt that failed half-way.
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                sys::delete_partition(&file, number).map_err(at("remove a stale partition of", &device))?;
                sys::add_partition(&file, number, start, size).map_err(at("add a partition to", &device))?;
            }
            other => other.map_err(at("add a partition to", &device))?,
        }
        if let Err(error) = mount_image(&disk, number) {
            // The error that matters is the mount's; a partition that stays is replaced by the next attempt.
            let _ = sys::delete_partition(&file, number);
            return Err(error);
        }
        attached.insert(number, Source::Disk(offset, length));
        Ok(())
    }

    /// Unmounts an image and takes its partition away. One that is not there is a success.
    pub fn detach(&self, partition: u32) -> Result<(), DiskError> {
        let number = number_of(partition)?;
        let mut attached = self.attached.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(source) = attached.get(&number) else { return Ok(()) };
        let on_disk = matches!(source, Source::Disk(..));
        let point = mount_point(number);
        match umount2(&point, MntFlags::empty()) {
            Ok(()) | Err(nix::Error::EINVAL | nix::Error::ENOENT) => {}
            Err(nix::Error::EBUSY) => return Err(DiskError::Busy { number }),
            Err(error) => return Err(at("unmount", &point)(error)),
        }
        if on_disk {
            self.take_away(number)?;
        }
        attached.remove(&number);
        Ok(())
    }

    /// Takes the partition of an image away that is not mounted any more.
    fn take_away(&self, number: u8) -> Result<(), DiskError> {
        let disk = disk_name(self.image_disk)?;
        if delete_partition(&disk, number)? {
            return Ok(());
        }
        // A container's overlay holds it: everything is as before.
        mount_image(&disk, number)?;
        Err(DiskError::Busy { number })
    }

    /// Where the image of a partition is mounted.
    pub fn image(&self, partition: u32) -> Result<PathBuf, DiskError> {
        let attached = self.attached.lock().unwrap_or_else(PoisonError::into_inner);
        let number = number_of(partition)?;
        attached.get(&number).map(|_| mount_point(number)).ok_or(DiskError::NoImage { number: partition })
    }

    fn volume_disk(&self) -> Result<String, DiskError> {
        match self.volume_disk {
            0 => Err(DiskError::NoDisk { number: 0 }),
            number => disk_name(number),
        }
    }

    /// Adds a partition for a device of the node, or lets it grow, and says whether it may be written.
    pub fn attach_device(&self, partition: u32, offset: u64, length: u64, writable: bool) -> Result<(), DiskError> {
        let number = number_of(partition)?;
        let shape = || DiskError::DeviceShape { offset, length };
        let fits = length > 0 && offset > 0 && offset.is_multiple_of(512) && length.is_multiple_of(512);
        let end = offset.checked_add(length).filter(|end| fits && i64::try_from(*end).is_ok()).ok_or_else(shape)?;
        let numbers = (i64::try_from(offset).ok(), i64::try_from(length).ok());
        let (Some(start), Some(size)) = numbers else { return Err(shape()) };
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        let before = devices.get(&number).copied();
        if let Some(there) = before.filter(|there| there.offset != offset) {
            return Err(DiskError::DeviceTaken { number, offset: there.offset });
        }
        let disk = self.volume_disk()?;
        wait_for_size(&disk, end)?;
        let whole = Path::new("/dev").join(&disk);
        let file = File::open(&whole).map_err(at("open", &whole))?;
        match before {
            Some(there) if there.length == length => {}
            Some(_) => {
                sys::resize_partition(&file, number, start, size).map_err(at("resize a partition of", &whole))?;
            }
            None => sys::add_partition(&file, number, start, size).map_err(at("add a partition to", &whole))?,
        }
        devices.insert(number, Device { offset, length, writable });
        let node = PathBuf::from(format!("/dev/{disk}{number}"));
        if before.is_none_or(|there| there.writable != writable) {
            let set = File::open(&node).and_then(|device| sys::set_read_only(&device, !writable));
            set.map_err(at("say who may write to", &node))?;
        }
        Ok(())
    }

    /// Takes a device of the node away. One that is not there is a success.
    pub fn detach_device(&self, partition: u32) -> Result<(), DiskError> {
        let number = number_of(partition)?;
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        if !devices.contains_key(&number) {
            return Ok(());
        }
        if !delete_partition(&self.volume_disk()?, number)? {
            return Err(DiskError::DeviceBusy { number });
        }
        devices.remove(&number);
        Ok(())
    }

    /// The file in /dev of a device or volume that was attached.
    pub fn volume(&self, partition: u32) -> Result<PathBuf, DiskError> {
        let devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        let number = number_of(partition)?;
        if !devices.contains_key(&number) {
            return Err(DiskError::NoDevice { number: partition });
        }
        Ok(PathBuf::from(format!("/dev/{}{number}", self.volume_disk()?)))
    }

    /// Major and minor number of an attached device.
    pub fn device(&self, partition: u32) -> Result<(i64, i64), DiskError> {
        let node = self.volume(partition)?;
        let rdev = fs::metadata(&node).map_err(at("look at", &node))?.rdev();
        let number = |part: u64| i64::try_from(part).unwrap_or(i64::MAX);
        Ok((number(nix::sys::stat::major(rdev)), number(nix::sys::stat::minor(rdev))))
    }

    /// Mounts the volumes of the node, once: those of all containers, also of later ones. The kernel mounts each of them in it
    /// when a process enters it; those of one device of the node are one file system. Device files there are the node's, not this
    /// machine's.
    pub fn share(&self) -> Result<(), DiskError> {
        let mut mounted = self.share_mounted.lock().unwrap_or_else(PoisonError::into_inner);
        if !*mounted {
            let folder = Path::new(share::FOLDER);
            fs::create_dir_all(folder)
                .and_then(|()| Ok(mount(Some(share::TAG), folder, Some("virtiofs"), MsFlags::MS_NODEV, None::<&str>)?))
                .map_err(at("mount the volumes of the node at", folder))?;
            *mounted = true;
            // They can be read without it.
            if let Err(error) = read_ahead(folder) {
                tracing::debug!(%error, "volumes of the node are read ahead as the kernel likes");
            }
        }
        Ok(())
    }

    /// Mounts the scratch disk, once.
    pub fn scratch(&self) -> Result<(), DiskError> {
        let mut mounted = self.scratch_mounted.lock().unwrap_or_else(PoisonError::into_inner);
        if !*mounted {
            let node = Path::new("/dev").join(disk_name(self.scratch_disk)?);
            let flags = MsFlags::MS_NOATIME;
            // It ends with the machine: nothing has to be there after a crash.
            mount(Some(&node), paths::SCRATCH, Some("ext4"), flags, Some("discard,nobarrier"))
                .map_err(at("mount the scratch disk", &node))?;
            *mounted = true;
        }
        Ok(())
    }
}

/// Has the file system that is mounted there, and those within it, read ahead by requests of the largest size.
fn read_ahead(folder: &Path) -> io::Result<()> {
    let device = fs::metadata(folder)?.dev();
    let (major, minor) = (nix::sys::stat::major(device), nix::sys::stat::minor(device));
    fs::write(format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb"), share::READ_AHEAD_KIB.to_string())
}

/// Mounts the partition of an image. Nothing runs from this mount itself: containers see it through an overlay.
fn mount_image(disk: &str, number: u8) -> Result<(), DiskError> {
    let point = mount_point(number);
    let node = PathBuf::from(format!("/dev/{disk}{number}"));
    let flags = MsFlags::MS_RDONLY | MsFlags::MS_NODEV | MsFlags::MS_NOSUID;
    fs::create_dir_all(&point)
        .and_then(|()| mount(Some(&node), &point, Some("erofs"), flags, None::<&str>).map_err(io::Error::from))
        .map_err(at("mount the image", &node))
}

/// Takes a partition away, when nobody holds it any more; whether that was soon enough.
fn delete_partition(disk: &str, number: u8) -> Result<bool, DiskError> {
    let device = Path::new("/dev").join(disk);
    let file = File::open(&device).map_err(at("open", &device))?;
    let deadline = Instant::now() + RELEASE;
    loop {
        match sys::delete_partition(&file, number).map_err(|error| (error.raw_os_error(), error)) {
            Ok(()) | Err((Some(libc::ENXIO), _)) => return Ok(true),
            Err((Some(libc::EBUSY), _)) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err((Some(libc::EBUSY), _)) => return Ok(false),
            Err((_, error)) => return Err(at("remove a partition of", &device)(error)),
        }
    }
}

fn wait_for_size(disk: &str, need: u64) -> Result<(), DiskError> {
    let path = PathBuf::from(format!("/sys/block/{disk}/size"));
    let deadline = Instant::now() + GROWTH;
    loop {
        let text = fs::read_to_string(&path).map_err(at("read", &path))?;
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
        let disks = Disks::new(0, 1, 2);
        for (partition, offset, length) in [(0, 0, 4096), (256, 0, 4096), (1, 1, 4096), (1, 0, 0), (1, u64::MAX, 4096)]
        {
            assert_eq!(disks.attach(partition, offset, length).unwrap_err().kind(), Kind::Invalid);
        }
        for (partition, offset, length) in
            [(0, 512, 512), (256, 512, 512), (1, 0, 512), (1, 512, 0), (1, 512, 100), (1, 512, u64::MAX - 1023)]
        {
            assert_eq!(disks.attach_device(partition, offset, length, true).unwrap_err().kind(), Kind::Invalid);
        }
        assert_eq!(disks.device(3).unwrap_err().kind(), Kind::NotFound);
        assert_eq!(Disks::on_node().attach_device(1, 512, 512, true).unwrap_err().kind(), Kind::NotFound);
        disks.detach_device(3).unwrap();
        assert_eq!(disks.image(3).unwrap_err().kind(), Kind::NotFound);
        disks.detach(3).unwrap();
    }
}
