//! Prepares the files of a VM's disks: validates them, locks those that other VMs could use, creates those that are the VM's own,
//! and describes them for QEMU. All functions block on files.

use crate::error::KeeperError;
use crate::qcow2::{self, Format};
use crate::seed;
use crate::sys::{self, Lock};
use nacelle_base::files::{remove_if_there, write_whole};
use nacelle_model::machine::{Disk, DiskSource, Kernel};
use nacelle_proto::agent::BootConfig;
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The maximum size of a kernel or initial file system in bytes.
const MAX_KERNEL: u64 = 512 << 20;

/// A disk whose files exist.
#[derive(Debug)]
pub struct PreparedDisk {
    /// The disk.
    pub disk: Disk,
    /// The disk's files.
    pub files: DiskFiles,
}

/// The files of a disk.
#[derive(Debug)]
pub enum DiskFiles {
    /// A qcow2 overlay for the guest's writes, over a piece of a file.
    Overlay {
        /// The overlay, a qcow2 file.
        top: PathBuf,
        /// The base of the overlay.
        base: BackingRange,
    },
    /// A qcow2 file with the whole disk.
    Qcow2(PathBuf),
    /// A piece of a file; the guest only reads it.
    ImageRange(BackingRange),
    /// A file in memory with the raw disk. Its content is never written to a disk of the node.
    Memory(File),
    /// A raw block device or file of the node. It is locked for as long as it is open, here or in QEMU.
    Device {
        /// The open file, writable if the guest may write.
        file: File,
        /// Whether it is a block device.
        block: bool,
    },
}

/// The kernel and the initial file system of a direct boot, copied to files of their own.
#[derive(Debug)]
pub struct KernelFiles {
    /// The kernel.
    pub kernel: PathBuf,
    /// The initial file system.
    pub initrd: Option<PathBuf>,
}

/// A piece of a file that is never written to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingRange {
    /// The file.
    pub file: PathBuf,
    /// The start of the piece in bytes.
    pub offset: u64,
    /// The length of the piece in bytes.
    pub length: u64,
    /// Whether the file is qcow2.
    pub qcow2: bool,
}

/// The directories for the files of disks.
#[derive(Clone, Copy, Debug)]
pub struct DiskDirectories<'a> {
    /// The VM's own directory: removed with the VM.
    pub own: &'a Path,
    /// The pod's directory: removed with the pod.
    pub pod: &'a Path,
    /// The directory of a persistent VM, which is kept.
    pub keep: Option<&'a Path>,
}

/// Creates the files of a disk. A disk that was handed over is taken from `handed_over` by its name.
pub fn prepare_disk(
    disk: &Disk,
    directories: DiskDirectories,
    network: &BootConfig,
    handed_over: &mut BTreeMap<String, File>,
) -> Result<PreparedDisk, KeeperError> {
    let directory = directories.own;
    let files = match &disk.source {
        DiskSource::Image { image, file, offset, length } => {
            let base = open_base(disk, file, *offset, *length)?;
            match directories.keep {
                _ if disk.read_only => DiskFiles::ImageRange(base.0),
                Some(keep) => reuse_overlay(disk, keep, image, base)?,
                None => create_overlay(directory, disk, base)?,
            }
        }
        DiskSource::Empty { bytes } => {
            let path = directories.keep.unwrap_or(directories.pod).join(format!("{}.qcow2", disk.name));
            create_empty_disk(&disk.name, &path, *bytes)?;
            DiskFiles::Qcow2(path)
        }
        DiskSource::Device { path } => lock_device(disk, path, handed_over.remove(&disk.name))?,
        DiskSource::Files(files) => DiskFiles::Memory(create_memory_file(&seed::files_disk(files)?)?),
        DiskSource::CloudInit(data) => DiskFiles::Memory(create_memory_file(&seed::cloud_init_disk(data, network)?)?),
    };
    Ok(PreparedDisk { disk: disk.clone(), files })
}

/// Copies kernel and initial file system out of their image, because QEMU reads only whole files.
pub fn copy_kernel(kernel: &Kernel, directory: &Path) -> Result<KernelFiles, KeeperError> {
    Ok(KernelFiles {
        kernel: copy_boot_file(&kernel.kernel, directory, "kernel")?,
        initrd: kernel.initrd.as_ref().map(|initrd| copy_boot_file(initrd, directory, "initrd")).transpose()?,
    })
}

fn copy_boot_file(source: &DiskSource, directory: &Path, name: &str) -> Result<PathBuf, KeeperError> {
    let invalid = |rule| KeeperError::Disk { name: name.to_owned(), rule };
    let DiskSource::Image { file: from, offset, length, .. } = source else {
        return Err(invalid("a file of an image is expected"));
    };
    if *length > MAX_KERNEL {
        return Err(invalid("the maximum is 512 MiB"));
    }
    let to = directory.join(name);
    let mut range = File::open(from).map_err(KeeperError::file("open", from))?;
    range.seek(SeekFrom::Start(*offset)).map_err(KeeperError::file("read", from))?;
    let mut file = create_file(&to)?;
    let copied = std::io::copy(&mut range.take(*length), &mut file).map_err(KeeperError::file("write", &to))?;
    if copied == 0 || copied != *length {
        return Err(invalid("the image is shorter than the file"));
    }
    Ok(to)
}

/// Returns the disk in an image, and its size for the guest in bytes.
fn open_base(disk: &Disk, path: &Path, offset: u64, length: u64) -> Result<(BackingRange, u64), KeeperError> {
    let mut file = File::open(path).map_err(KeeperError::file("open", path))?;
    file.seek(SeekFrom::Start(offset)).map_err(KeeperError::file("read", path))?;
    let mut head = Vec::new();
    let lock = length.min(qcow2::HEADER as u64);
    file.take(lock).read_to_end(&mut head).map_err(KeeperError::file("read", path))?;
    let invalid = |rule| KeeperError::Disk { name: disk.name.clone(), rule };
    let format = qcow2::detect_format(&head).map_err(invalid)?;
    let base = BackingRange { file: path.to_owned(), offset, length, qcow2: format != Format::Raw };
    let size = match format {
        Format::Raw => length,
        Format::Qcow2 { size } => size,
    };
    if size == 0 || size > qcow2::MAX_SIZE {
        return Err(invalid("a disk of 1 byte to 4 TiB is expected"));
    }
    Ok((base, size))
}

/// Returns the disk with a new overlay.
fn create_overlay(directory: &Path, disk: &Disk, (base, size): (BackingRange, u64)) -> Result<DiskFiles, KeeperError> {
    let top = directory.join(format!("{}.qcow2", disk.name));
    let mut file = create_file(&top)?;
    file.write_all(&qcow2::empty_image(size))
        .and_then(|()| file.sync_all())
        .map_err(KeeperError::file("write", &top))?;
    Ok(DiskFiles::Overlay { top, base })
}

/// Returns the disk with its earlier overlay if the image is the same, otherwise with a new one.
fn reuse_overlay(disk: &Disk, keep: &Path, image: &str, base: (BackingRange, u64)) -> Result<DiskFiles, KeeperError> {
    let (top, mark) = (keep.join(format!("{}.qcow2", disk.name)), keep.join(format!("{}.image", disk.name)));
    let same = std::fs::read_to_string(&mark).is_ok_and(|before| before == image);
    if same && top.exists() {
        return Ok(DiskFiles::Overlay { top, base: base.0 });
    }
    let files = create_overlay(keep, disk, base)?;
    // Written last: the mark means that the overlay is complete.
    write_whole(&mark, image.as_bytes()).map_err(KeeperError::StateFile)?;
    Ok(files)
}

/// Checks and locks the file or block device that the daemon handed over for a disk.
fn lock_device(disk: &Disk, path: &str, file: Option<File>) -> Result<DiskFiles, KeeperError> {
    let invalid = |rule| KeeperError::Disk { name: disk.name.clone(), rule };
    let file = file.ok_or_else(|| invalid("the daemon did not hand it over"))?;
    let kind = file.metadata().map_err(KeeperError::file("inspect", Path::new(path)))?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err(invalid("a file or a block device is expected"));
    }
    if sys::is_writable(&file).map_err(KeeperError::file("inspect", Path::new(path)))? == disk.read_only {
        return Err(invalid("it must be open for writing, unless the guest only reads it"));
    }
    let lock = match (disk.serving.shared, disk.read_only) {
        (true, _) => Lock::SharedWriters,
        (false, true) => Lock::SharedReaders,
        (false, false) => Lock::Exclusive,
    };
    if !sys::lock_file(&file, lock).map_err(KeeperError::file("lock", Path::new(path)))? {
        return Err(KeeperError::InUse { name: disk.name.clone(), path: path.to_owned() });
    }
    Ok(DiskFiles::Device { file, block: kind.is_block_device() })
}

/// Creates an empty disk. Keeps the file of an earlier run if it has this size.
pub fn create_empty_disk(name: &str, path: &Path, bytes: u64) -> Result<(), KeeperError> {
    if bytes == 0 || bytes > qcow2::MAX_SIZE {
        return Err(KeeperError::Disk { name: name.to_owned(), rule: "a disk of 1 byte to 4 TiB is expected" });
    }
    let mut head = Vec::new();
    let read = File::open(path).and_then(|file| file.take(qcow2::HEADER as u64).read_to_end(&mut head));
    if read.is_ok() && qcow2::detect_format(&head) == Ok(Format::Qcow2 { size: bytes }) {
        return Ok(());
    }
    let mut file = create_file(path)?;
    let written = file.write_all(&qcow2::empty_image(bytes)).and_then(|()| file.sync_all());
    written.map_err(KeeperError::file("write", path))
}

fn create_memory_file(bytes: &[u8]) -> Result<File, KeeperError> {
    let failed = |source: std::io::Error| KeeperError::Resource { what: "create a disk in memory", source };
    let fd = memfd_create("nacelle-disk", MFdFlags::MFD_CLOEXEC).map_err(|errno| failed(errno.into()))?;
    let mut file = File::from(fd);
    file.write_all(bytes).map_err(failed)?;
    Ok(file)
}

/// Returns the firmware's variables: a copy of the template below, and an overlay with the guest's changes above. An existing
/// overlay is kept if it is of the same kind: `secure` variables contain keys.
pub fn prepare_efi_variables(
    from: &Path,
    secure: bool,
    directories: DiskDirectories,
) -> Result<DiskFiles, KeeperError> {
    let directory = directories.keep.unwrap_or(directories.own);
    let (first, top) = (directory.join("efi-variables"), directory.join("efi-variables.qcow2"));
    let length = |path: &Path| std::fs::metadata(path).map(|data| data.len());
    let new = length(from).map_err(KeeperError::file("open", from))?;
    // A copy, because the firmware's own file changes with its package. A truncated copy is created again.
    let mark = directory.join("efi-secure");
    if !top.exists() || length(&first).ok() != Some(new) || mark.exists() != secure {
        // Removed first: a crash from here on must not leave an overlay that does not match.
        for path in [&top, &mark] {
            remove_if_there(path).map_err(KeeperError::StateFile)?;
        }
        let mut source = File::open(from).map_err(KeeperError::file("open", from))?;
        let mut copy = create_file(&first)?;
        std::io::copy(&mut source, &mut copy).and_then(|_| copy.sync_all()).map_err(KeeperError::file("copy", from))?;
        let mut file = create_file(&top)?;
        let written = file.write_all(&qcow2::empty_image(new)).and_then(|()| file.sync_all());
        written.map_err(KeeperError::file("write", &top))?;
        if secure {
            write_whole(&mark, b"").map_err(KeeperError::StateFile)?;
        }
    }
    Ok(DiskFiles::Overlay { top, base: BackingRange { file: first, offset: 0, length: new, qcow2: false } })
}

/// Creates a file. Truncates that of an earlier attempt.
fn create_file(path: &Path) -> Result<File, KeeperError> {
    let opened = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path);
    opened.map_err(KeeperError::file("create", path))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use nacelle_base::{Classify, FailureKind};
    use nacelle_model::machine::{Bus, Cache, DiskKind, Serving};

    pub(crate) fn sample(name: &str, source: DiskSource) -> Disk {
        Disk {
            name: name.into(),
            kind: DiskKind::Disk,
            bus: Bus::Virtio,
            read_only: false,
            boot_order: None,
            serial: String::new(),
            cache: Cache::Writeback,
            block_size: None,
            serving: Serving::default(),
            source,
        }
    }

    fn none() -> BTreeMap<String, File> {
        BTreeMap::new()
    }

    fn directories(path: &Path) -> DiskDirectories<'_> {
        DiskDirectories { own: path, pod: path, keep: None }
    }

    #[test]
    fn an_overlay_is_kept_until_the_image_changes() {
        let directory = tempfile::tempdir().unwrap();
        let (blob, keep) = (directory.path().join("blob"), directory.path().join("keep"));
        std::fs::create_dir(&keep).unwrap();
        std::fs::write(&blob, vec![7; 4096]).unwrap();
        let top = |image: &str| {
            let source = DiskSource::Image { image: image.into(), file: blob.clone(), offset: 0, length: 4096 };
            let directories = DiskDirectories { keep: Some(&keep), ..directories(directory.path()) };
            match prepare_disk(&sample("root", source), directories, &BootConfig::default(), &mut none()).unwrap().files
            {
                DiskFiles::Overlay { top, .. } => top,
                other => panic!("{other:?}"),
            }
        };
        std::fs::write(top("a"), "written").unwrap();
        assert_eq!(std::fs::read(top("a")).unwrap(), b"written");
        assert!(std::fs::read(top("b")).unwrap().starts_with(b"QFI"), "another image is another disk");
        let source = directory.path().join("variables");
        std::fs::write(&source, vec![1; 512]).unwrap();
        let variables = |secure| match prepare_efi_variables(
            &source,
            secure,
            DiskDirectories { keep: Some(&keep), ..directories(directory.path()) },
        )
        .unwrap()
        {
            DiskFiles::Overlay { top, .. } => top,
            other => panic!("{other:?}"),
        };
        std::fs::write(variables(false), "kept").unwrap();
        assert_eq!(std::fs::read(variables(false)).unwrap(), b"kept");
        // Variables without keys are useless for secure boot, and vice versa.
        assert!(std::fs::read(variables(true)).unwrap().starts_with(b"QFI"));
        std::fs::write(variables(true), "signed").unwrap();
        assert_eq!(std::fs::read(variables(true)).unwrap(), b"signed");
        assert!(std::fs::read(variables(false)).unwrap().starts_with(b"QFI"));
    }

    #[test]
    fn a_disk_of_an_image_gets_an_overlay() {
        let directory = tempfile::tempdir().unwrap();
        let blob = directory.path().join("blob");
        let inner = qcow2::empty_image(1 << 30);
        std::fs::write(&blob, [vec![7; 4096], inner.clone()].concat()).unwrap();
        let range = |offset, length| DiskSource::Image { image: "a".into(), file: blob.clone(), offset, length };
        let prepared = prepare_disk(
            &sample("root", range(4096, inner.len() as u64)),
            directories(directory.path()),
            &BootConfig::default(),
            &mut none(),
        );
        let DiskFiles::Overlay { top, base } = prepared.unwrap().files else { panic!("it can be written") };
        assert!(base.qcow2);
        let head = std::fs::read(top).unwrap();
        assert_eq!(qcow2::detect_format(&head[..qcow2::HEADER]), Ok(Format::Qcow2 { size: 1 << 30 }));
        let raw = Disk { read_only: true, ..sample("root", range(0, 4096)) };
        let prepared = prepare_disk(&raw, directories(directory.path()), &BootConfig::default(), &mut none()).unwrap();
        assert!(matches!(prepared.files, DiskFiles::ImageRange(BackingRange { qcow2: false, .. })));
    }

    #[test]
    fn an_empty_disk_keeps_its_data_over_runs() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let disk = |bytes| sample("data", DiskSource::Empty { bytes });
        let made = |bytes| match prepare_disk(
            &disk(bytes),
            directories(directory.path()),
            &BootConfig::default(),
            &mut none(),
        )
        .unwrap()
        .files
        {
            DiskFiles::Qcow2(path) => path,
            other => panic!("{other:?}"),
        };
        let path = made(1 << 30);
        assert!(std::fs::metadata(&path).unwrap().len() < 1 << 20, "it takes no room");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let mut used = std::fs::read(&path).unwrap();
        used.extend(b"written");
        std::fs::write(&path, &used).unwrap();
        assert_eq!(std::fs::read(made(1 << 30)).unwrap(), used);
        assert_ne!(std::fs::read(made(1 << 20)).unwrap(), used, "another size is another disk");
        assert!(prepare_disk(&disk(0), directories(directory.path()), &BootConfig::default(), &mut none()).is_err());
    }

    #[test]
    fn a_handed_over_disk_has_one_writer_or_several_readers() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.img");
        std::fs::write(&path, [0; 512]).unwrap();
        let open = |writable| File::options().read(true).write(writable).open(&path).unwrap();
        let source = || DiskSource::Device { path: path.display().to_string() };
        let (written, read) = (sample("data", source()), Disk { read_only: true, ..sample("data", source()) });
        let prepare_with = |disk: &Disk, file: Option<File>| {
            let mut handed_over = file.into_iter().map(|file| ("data".to_owned(), file)).collect();
            prepare_disk(disk, directories(directory.path()), &BootConfig::default(), &mut handed_over)
        };
        for (disk, file, words) in [
            (&written, None, "did not hand it over"),
            (&written, Some(open(false)), "open for writing"),
            (&read, Some(open(true)), "open for writing"),
            (&read, Some(File::open("/dev/null").unwrap()), "a file or a block device"),
        ] {
            let error = prepare_with(disk, file).unwrap_err();
            assert!(error.kind() == FailureKind::Invalid && error.to_string().contains(words), "{error}");
        }
        let first = prepare_with(&written, Some(open(true))).unwrap();
        assert!(matches!(first.files, DiskFiles::Device { block: false, .. }));
        for second in [prepare_with(&written, Some(open(true))), prepare_with(&read, Some(open(false)))] {
            let error = second.unwrap_err();
            assert!(
                error.kind() == FailureKind::Conflict && error.to_string().contains("disk.img is in use"),
                "{error}"
            );
        }
        drop(first);
        let readers = [(); 2].map(|()| prepare_with(&read, Some(open(false))).unwrap());
        assert!(prepare_with(&written, Some(open(true))).is_err());
        drop(readers);
        drop(prepare_with(&written, Some(open(true))).unwrap());
        // Disks marked as shared can be written by several VMs, but not opened by others meanwhile.
        let shared = Disk { serving: Serving { shared: true, ..Serving::default() }, ..sample("data", source()) };
        let writers = [(); 2].map(|()| prepare_with(&shared, Some(open(true))).unwrap());
        for (disk, writable) in [(&written, true), (&read, false)] {
            assert_eq!(prepare_with(disk, Some(open(writable))).unwrap_err().kind(), FailureKind::Conflict);
        }
        drop(writers);
        for (disk, writable) in [(&written, true), (&read, false)] {
            let _other = prepare_with(disk, Some(open(writable))).unwrap();
            assert_eq!(prepare_with(&shared, Some(open(true))).unwrap_err().kind(), FailureKind::Conflict);
        }
    }
}
