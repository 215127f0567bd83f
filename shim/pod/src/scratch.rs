//! Creates the scratch disk of a pod, a sparse copy of an ext4 template that is created once per size, and the disk of a
//! volume, which may outlive the pod's VM.
//!
//! All functions block, so they must not run on the async runtime: a few milliseconds, or a run of mkfs.ext4 for the first
//! template of a size and for volumes.

use nacelle_base::draft::Draft;
use nacelle_base::files::{FileError, at, remove_if_there, remove_tree_if_there};
use nacelle_base::retry::retry_interrupted;
use nacelle_base::{Classify, FailureKind, PodId};
use rustix::fs::ioctl_ficlone;
use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A part of a template's name; must change whenever [`FORMAT`] does, so that old templates are not used.
const FORMAT_VERSION: u32 = 1;
/// The disk is removed with the pod, so it has no journal. The holes are zeros already, so the guest's kernel must not write them.
const FORMAT: &[&str] = &[
    "-q",
    "-F",
    "-m",
    "0",
    "-b",
    "4096",
    "-O",
    "^has_journal,^resize_inode,extent,sparse_super2",
    "-E",
    "assume_storage_prezeroed=1,nodiscard,packed_meta_blocks=1",
    "-L",
    "scratch",
];
/// The disk may be mounted after a VM that was killed, so it has a journal. After an error it is remounted read-only.
const VOLUME_FORMAT: &[&str] = &[
    "-q",
    "-F",
    "-m",
    "0",
    "-b",
    "4096",
    "-e",
    "remount-ro",
    "-O",
    "has_journal,^resize_inode,extent,sparse_super2",
    "-E",
    "assume_storage_prezeroed=1,nodiscard,packed_meta_blocks=1",
    "-L",
    "volume",
];
/// The minimum and maximum size of a volume's journal in MiB; in between it is 1/64 of the volume.
const JOURNAL_MIB: (u64, u64) = (4, 64);

/// The prefix of the names of pods' disks.
pub(crate) const DISK_PREFIX: &str = "pod-";
/// The prefix of the names of the directories of pods without a guest.
pub(crate) const DIRECTORY_PREFIX: &str = "host-";

/// A scratch disk cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum ScratchError {
    /// A file cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// mkfs.ext4 could not be started.
    #[error("cannot start mkfs.ext4; install it (Debian package e2fsprogs)")]
    Start {
        /// The cause.
        source: io::Error,
    },
    /// mkfs.ext4 failed.
    #[error("mkfs.ext4 cannot format a disk of {bytes} bytes: {message}")]
    Format {
        /// The size of the disk in bytes.
        bytes: u64,
        /// The error output.
        message: String,
        /// The file system of the disk is full.
        is_full: bool,
    },
}

impl Classify for ScratchError {
    fn kind(&self) -> FailureKind {
        match self {
            ScratchError::File(error) => error.kind(),
            ScratchError::Start { .. } => FailureKind::Unavailable,
            ScratchError::Format { is_full: true, .. } => FailureKind::Exhausted,
            ScratchError::Format { .. } => FailureKind::Internal,
        }
    }
}

/// Creates the template of this size unless it exists, and returns its path. Any number of processes may call it at once;
/// the daemon calls it before the first pod needs the template.
pub fn create_template(directory: &Path, size_mib: u64) -> Result<PathBuf, ScratchError> {
    let path = directory.join(format!("scratch-v{FORMAT_VERSION}-{size_mib}.ext4"));
    if path.exists() {
        return Ok(path);
    }
    create_directory(directory)?;
    let draft = Draft::create(&path)?;
    format_ext4(&draft.file, draft.path(), size_mib.saturating_mul(1 << 20), FORMAT)?;
    draft.commit()?;
    Ok(path)
}

/// Creates the directory of templates and disks unless it exists.
pub fn create_directory(directory: &Path) -> Result<(), FileError> {
    DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(at("create", directory))
}

/// Creates the disk of a volume atomically, replacing an existing one. `draft` is a temporary path in the same directory
/// that no other process uses.
pub fn create_volume_disk(path: &Path, draft: &Path, bytes: u64) -> Result<(), ScratchError> {
    remove_if_there(draft)?;
    let journal = format!("size={}", (bytes >> 26).clamp(JOURNAL_MIB.0, JOURNAL_MIB.1));
    let options = [VOLUME_FORMAT, &["-J", &journal]].concat();
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(draft).map_err(at("create", draft))?;
    let created = format_ext4(&file, draft, bytes, &options)
        .and_then(|()| Ok(fs::rename(draft, path).map_err(at("write", path))?));
    if created.is_err() {
        // The caller needs the first error.
        let _ = remove_if_there(draft);
    }
    created
}

/// Returns whether less than one MiB is free on the file system of a file. mkfs.ext4 reports a full disk as text only.
fn is_full(file: &File) -> bool {
    nix::sys::statvfs::fstatvfs(file).is_ok_and(|found| found.blocks_available() * found.fragment_size() < 1 << 20)
}

fn format_ext4(file: &File, path: &Path, bytes: u64, options: &[&str]) -> Result<(), ScratchError> {
    file.set_len(bytes).map_err(at("resize", path))?;
    // mkfs.ext4 lies in a directory that is not in the PATH of every user.
    let path_variable = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let output =
        Command::new("mkfs.ext4").env("PATH", path_variable).args(options).arg(path).stdin(Stdio::null()).output();
    let output = output.map_err(|source| ScratchError::Start { source })?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr).trim().chars().take(500).collect();
        return Err(ScratchError::Format { bytes, message, is_full: is_full(file) });
    }
    Ok(file.sync_all().map_err(at("write", path))?)
}

/// Removes from this directory the disks that cancelled starts have leaked, and the directories of pods that are not in
/// `keep`. The caller ensures that no pod is starting. Templates stay; [`nacelle_base::draft::remove_stale_drafts`] removes their drafts.
pub fn remove_disks(directory: &Path, keep: &BTreeSet<PodId>) -> Result<(), FileError> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other.map_err(at("read", directory))?,
    };
    for entry in entries {
        let entry = entry.map_err(at("read", directory))?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(DISK_PREFIX) {
            remove_if_there(&entry.path())?;
        }
        if let Some(id) = name.strip_prefix(DIRECTORY_PREFIX)
            && !keep.iter().any(|kept| kept.as_str() == id)
        {
            remove_tree_if_there(&entry.path())?;
        }
    }
    Ok(())
}

/// Copies a template to a new file: with shared blocks if the file system supports that, otherwise without the holes.
pub fn copy_template(template: &Path, to: &Path) -> Result<(), ScratchError> {
    let source = File::open(template).map_err(at("open", template))?;
    let target = OpenOptions::new().write(true).create_new(true).mode(0o600).open(to).map_err(at("create", to))?;
    let copied =
        retry_interrupted(|| ioctl_ficlone(&target, &source)).or_else(|_unsupported| copy_data(&source, &target));
    if copied.is_err() {
        // The caller needs the first error.
        let _ = remove_if_there(to);
    }
    Ok(copied.map_err(at("write", to))?)
}

fn copy_data(mut source: &File, target: &File) -> io::Result<()> {
    use nix::errno::Errno;
    use nix::unistd::{Whence, lseek};
    let length = source.metadata()?.len();
    target.set_len(length)?;
    let mut at: i64 = 0;
    loop {
        let start = match lseek(source, at, Whence::SeekData) {
            Err(Errno::ENXIO) => return Ok(()),
            other => other?,
        };
        let end = lseek(source, start, Whence::SeekHole)?;
        let from = u64::try_from(start).map_err(io::Error::other)?;
        let count = u64::try_from(end - start).map_err(io::Error::other)?;
        source.seek(SeekFrom::Start(from))?;
        let mut out = target;
        out.seek(SeekFrom::Start(from))?;
        io::copy(&mut source.take(count), &mut out)?;
        at = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn a_copy_has_the_holes_and_the_bytes_of_its_template() {
        let directory = tempfile::tempdir().unwrap();
        let template = create_template(&directory.path().join("templates"), 64).unwrap();
        assert_eq!(super::create_template(&directory.path().join("templates"), 64).unwrap(), template);
        let to = directory.path().join("scratch.ext4");
        copy_template(&template, &to).unwrap();
        assert!(fs::read(&template).unwrap() == fs::read(&to).unwrap());
        let metadata = fs::metadata(&to).unwrap();
        assert_eq!(metadata.len(), 64 << 20);
        assert!(metadata.blocks() * 512 < 4 << 20, "{} KiB", metadata.blocks() / 2);
        assert!(copy_template(&template, &to).is_err(), "an existing file is not overwritten");
        assert_eq!(fs::read_dir(directory.path().join("templates")).unwrap().count(), 1);
        let check =
            Command::new("fsck.ext4").env("PATH", "/usr/sbin:/sbin").args(["-n", "-f"]).arg(&to).output().unwrap();
        assert!(check.status.success(), "{}", String::from_utf8_lossy(&check.stdout));
    }

    #[test]
    fn disks_of_cancelled_starts_are_removed_and_templates_stay() {
        let directory = tempfile::tempdir().unwrap();
        let (kept, gone) = (PodId::from_bytes([1; 32]), PodId::from_bytes([2; 32]));
        let keep = BTreeSet::from([kept.clone()]);
        remove_disks(&directory.path().join("none"), &keep).unwrap();
        for name in ["pod-ab.ext4", "scratch-v1-64.ext4"] {
            fs::write(directory.path().join(name), "").unwrap();
        }
        for id in [&kept, &gone] {
            fs::create_dir_all(directory.path().join(format!("host-{id}/c"))).unwrap();
        }
        remove_disks(directory.path(), &keep).unwrap();
        let left =
            fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        assert_eq!(left.collect::<BTreeSet<_>>(), ["scratch-v1-64.ext4".into(), format!("host-{kept}")].into());
    }

    #[test]
    fn the_disk_of_a_volume_is_sparse_and_has_a_journal() {
        let directory = tempfile::tempdir().unwrap();
        let (path, draft) = (directory.path().join("volume"), directory.path().join("draft"));
        // The draft of a process that was killed.
        fs::write(&draft, "half").unwrap();
        for bytes in [(16 << 20) - (256 << 10), 4 << 40] {
            create_volume_disk(&path, &draft, bytes).unwrap();
            let metadata = fs::metadata(&path).unwrap();
            assert_eq!(metadata.len(), bytes);
            assert!(metadata.blocks() * 512 < (bytes >> 12).max(1 << 20), "{} KiB", metadata.blocks() / 2);
            let output = Command::new("dumpe2fs").env("PATH", "/usr/sbin:/sbin").arg("-h").arg(&path).output().unwrap();
            let superblock = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(superblock.contains("has_journal") && superblock.contains("Remount read-only"), "{superblock}");
        }
        assert!(create_volume_disk(&path, &draft, 0).is_err());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_failed_template_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        assert!(create_template(directory.path(), 0).is_err());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
