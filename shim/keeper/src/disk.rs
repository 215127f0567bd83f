//! Owns: the files of a machine's disks: looked at, made where they are the machine's own, and described for QEMU.
//! May use: `qcow2`, `seed`. Blocks on files.

use crate::error::KeeperError;
use crate::qcow2::{self, Format};
use crate::seed;
use crate::spec::{CloudInit, Disk, Source};
use nacelle_proto::agent::BootConfig;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// A disk whose files are there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ready {
    /// The disk.
    pub disk: Disk,
    /// What it is made of.
    pub files: Files,
}

/// What a disk is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Files {
    /// One file, byte by byte the disk.
    Whole(PathBuf),
    /// What the guest writes, over a piece of a file.
    Over {
        /// A qcow2 file.
        top: PathBuf,
        /// What lies below.
        base: Base,
    },
    /// A piece of a file, which the guest only reads.
    Piece(Base),
}

/// A piece of a file that is never written to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Base {
    /// The file.
    pub file: PathBuf,
    /// Where the piece begins, in bytes.
    pub offset: u64,
    /// Its bytes.
    pub length: u64,
    /// It is a qcow2 file.
    pub qcow2: bool,
}

/// Makes the files of a disk: what is the machine's own in `folder`, what is the pod's in `of_pod`.
pub fn prepare(disk: &Disk, folder: &Path, of_pod: &Path, network: &BootConfig) -> Result<Ready, KeeperError> {
    let files = match &disk.source {
        Source::Image { file, offset, length } => of_image(disk, folder, file, *offset, *length)?,
        Source::Empty { bytes } => Files::Whole(empty(disk, of_pod, *bytes)?),
        Source::CloudInit(data) => Files::Whole(cloud_init(disk, folder, data, network)?),
    };
    Ok(Ready { disk: disk.clone(), files })
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> KeeperError {
    let path = path.to_owned();
    move |source| KeeperError::File { what, path, source }
}

fn of_image(disk: &Disk, folder: &Path, path: &Path, offset: u64, length: u64) -> Result<Files, KeeperError> {
    let mut file = File::open(path).map_err(failed("open", path))?;
    file.seek(SeekFrom::Start(offset)).map_err(failed("read", path))?;
    let mut head = Vec::new();
    let wanted = length.min(qcow2::HEADER as u64);
    file.take(wanted).read_to_end(&mut head).map_err(failed("read", path))?;
    let refused = |rule| KeeperError::Disk { name: disk.name.clone(), rule };
    let format = qcow2::format(&head).map_err(refused)?;
    let base = Base { file: path.to_owned(), offset, length, qcow2: format != Format::Raw };
    if disk.read_only {
        return Ok(Files::Piece(base));
    }
    let size = match format {
        Format::Raw => length,
        Format::Qcow2 { size } => size,
    };
    if size == 0 || size > qcow2::MAX_SIZE {
        return Err(refused("a disk of 1 byte to 4 TiB is expected"));
    }
    let top = folder.join(format!("{}.qcow2", disk.name));
    make(&top)?.write_all(&qcow2::empty(size)).map_err(failed("write", &top))?;
    Ok(Files::Over { top, base })
}

fn empty(disk: &Disk, folder: &Path, bytes: u64) -> Result<PathBuf, KeeperError> {
    let path = folder.join(format!("{}.raw", disk.name));
    let opened = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
    // One that a machine before this one has used is as long already.
    opened.map_err(failed("make", &path))?.set_len(bytes).map_err(failed("size", &path))?;
    Ok(path)
}

fn cloud_init(disk: &Disk, folder: &Path, data: &CloudInit, network: &BootConfig) -> Result<PathBuf, KeeperError> {
    let path = folder.join(format!("{}.seed", disk.name));
    make(&path)?.write_all(&seed::disk(data, network)?).map_err(failed("write", &path))?;
    Ok(path)
}

/// A copy of the variables of a machine that never ran.
pub fn variables(from: &Path, folder: &Path) -> Result<PathBuf, KeeperError> {
    let path = folder.join("efi-variables");
    let mut source = File::open(from).map_err(failed("open", from))?;
    std::io::copy(&mut source, &mut make(&path)?).map_err(failed("copy", from))?;
    Ok(path)
}

/// A new file; one of an earlier attempt is made anew.
fn make(path: &Path) -> Result<File, KeeperError> {
    let opened = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path);
    opened.map_err(failed("make", path))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::spec::{Bus, Cache, DiskKind};

    pub(crate) fn sample(name: &str, source: Source) -> Disk {
        Disk {
            name: name.into(),
            kind: DiskKind::Disk,
            bus: Bus::Virtio,
            read_only: false,
            boot_order: None,
            serial: String::new(),
            cache: Cache::Writeback,
            block_size: None,
            source,
        }
    }

    #[test]
    fn a_disk_in_an_image_has_what_is_written_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let blob = folder.path().join("blob");
        let inner = qcow2::empty(1 << 30);
        std::fs::write(&blob, [vec![7; 4096], inner.clone()].concat()).unwrap();
        let piece = |offset, length| Source::Image { file: blob.clone(), offset, length };
        let ready = prepare(
            &sample("root", piece(4096, inner.len() as u64)),
            folder.path(),
            folder.path(),
            &BootConfig::default(),
        );
        let Files::Over { top, base } = ready.unwrap().files else { panic!("it can be written") };
        assert!(base.qcow2);
        let head = std::fs::read(top).unwrap();
        assert_eq!(qcow2::format(&head[..qcow2::HEADER]), Ok(Format::Qcow2 { size: 1 << 30 }));
        let raw = Disk { read_only: true, ..sample("root", piece(0, 4096)) };
        let ready = prepare(&raw, folder.path(), folder.path(), &BootConfig::default()).unwrap();
        assert!(matches!(ready.files, Files::Piece(Base { qcow2: false, .. })));
    }

    #[test]
    fn an_empty_disk_takes_no_room() {
        use std::os::unix::fs::MetadataExt;
        let folder = tempfile::tempdir().unwrap();
        let disk = sample("data", Source::Empty { bytes: 1 << 20 });
        let Files::Whole(path) = prepare(&disk, folder.path(), folder.path(), &BootConfig::default()).unwrap().files
        else {
            panic!("it is one file")
        };
        let data = std::fs::metadata(path).unwrap();
        assert_eq!((data.len(), data.blocks(), data.mode() & 0o777), (1 << 20, 0, 0o600));
        std::fs::write(folder.path().join("data.raw"), "kept").unwrap();
        prepare(&disk, folder.path(), folder.path(), &BootConfig::default()).unwrap();
        let again = std::fs::read(folder.path().join("data.raw")).unwrap();
        assert_eq!((again.len(), &again[..4]), (1 << 20, &b"kept"[..]));
    }
}
