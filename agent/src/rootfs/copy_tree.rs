//! Copies a directory with everything below it: contents, owners, modes, times, links, device files, and extended attributes of
//! users, access lists and capabilities.
//!
//! Neither tree may change meanwhile: a path that was used once may be used again. Numbers of files and depth are bounded,
//! because the source is a part of an image. The number of bytes is bounded by the target's file system.

use nacelle_base::retry::retry_interrupted;
use nacelle_base::{Classify, FailureKind};
use rustix::fs::{AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, Stat, Timespec, Timestamps, Uid, XattrFlags};
use rustix::io::Errno;
use rustix::path::Arg;
use std::collections::HashMap;
use std::ffi::{CStr, CString, OsStr};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The most files that the trees of one [`CopyBudget`] have.
pub const MAX_FILES: u32 = 200_000;
/// The most directories within each other. Each level takes two descriptors.
const MAX_DEPTH: usize = 256;
/// The largest list of a file's attributes, and the largest attribute, as in the kernel, in bytes.
const MAX_ATTRIBUTE: usize = 64 << 10;

/// Reasons a tree cannot be copied.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the fields are what the message prints")]
pub enum CopyError {
    #[error("there are more than {most} files and directories")]
    TooMany { most: u32 },
    #[error("{}: there are more than {MAX_DEPTH} directories within each other", at.display())]
    TooDeep { at: PathBuf },
    #[error("cannot copy {}", at.display())]
    Io { at: PathBuf, source: io::Error },
}

impl Classify for CopyError {
    fn kind(&self) -> FailureKind {
        match self {
            CopyError::TooMany { .. } | CopyError::TooDeep { .. } => FailureKind::Invalid,
            CopyError::Io { source, .. } => match source.raw_os_error() {
                // A name with all its directories is too long.
                Some(libc::ENAMETOOLONG) => FailureKind::Invalid,
                _ => match FailureKind::from(source.kind()) {
                    FailureKind::Exhausted => FailureKind::Exhausted,
                    _ => FailureKind::Internal,
                },
            },
        }
    }
}

/// The number of files that may still be copied.
#[derive(Debug)]
pub struct CopyBudget {
    most: u32,
    left: u32,
}

impl Default for CopyBudget {
    fn default() -> CopyBudget {
        CopyBudget::of(MAX_FILES)
    }
}

impl CopyBudget {
    /// Allows this number of files.
    pub fn of(most: u32) -> CopyBudget {
        CopyBudget { most, left: most }
    }

    fn take_one(&mut self) -> Result<(), CopyError> {
        self.left = self.left.checked_sub(1).ok_or(CopyError::TooMany { most: self.most })?;
        Ok(())
    }
}

/// A directory whose entries are being copied.
struct Level {
    source: OwnedFd,
    entries: Dir,
    target: OwnedFd,
    stat: Stat,
    /// The path below the root of the trees.
    path: PathBuf,
}

/// Copies the directory `source` with everything below it to `target`, which must not exist. An incomplete copy is left after an
/// error.
pub fn copy_tree(source: impl AsFd, target: &Path, budget: &mut CopyBudget) -> Result<(), CopyError> {
    let failed = |at: &Path| {
        let at = at.to_owned();
        move |error: Errno| CopyError::Io { at, source: error.into() }
    };
    let root = open_directory(&source, c".").map_err(failed(target))?;
    budget.take_one()?;
    rustix::fs::mkdir(target, Mode::RWXU).map_err(failed(target))?;
    let copy = open_at(CWD, target, DIRECTORY).map_err(failed(target))?;
    // The first path of each file with several names.
    let mut linked: HashMap<(u64, u64), PathBuf> = HashMap::new();
    let mut levels = vec![enter(root, copy, PathBuf::new()).map_err(failed(target))?];
    let target_root = open_at(CWD, target, DIRECTORY).map_err(failed(target))?;
    while let Some(level) = levels.last_mut() {
        let Some(entry) = level.entries.next() else {
            let done = levels.pop();
            // Only now: entries change a directory's times, and its mode may forbid them.
            done.map_or(Ok(()), |level| copy_attributes(&level).map_err(failed(&level.path)))?;
            continue;
        };
        let entry = entry.map_err(failed(&level.path))?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        budget.take_one()?;
        let path = level.path.join(OsStr::from_bytes(name.to_bytes()));
        let stat = rustix::fs::statat(&level.source, name, AtFlags::SYMLINK_NOFOLLOW).map_err(failed(&path))?;
        if is_type(&stat, FileType::Directory) {
            if levels.len() == MAX_DEPTH {
                return Err(CopyError::TooDeep { at: path });
            }
            let Some(level) = levels.last() else { break };
            let below = (|| {
                rustix::fs::mkdirat(&level.target, name, Mode::RWXU)?;
                enter(open_directory(&level.source, name)?, open_directory(&level.target, name)?, path.clone())
            })();
            levels.push(below.map_err(failed(&path))?);
            continue;
        }
        if stat.st_nlink > 1 {
            let file = (stat.st_dev, stat.st_ino);
            if let Some(first) = linked.get(&file) {
                rustix::fs::linkat(&target_root, first, &level.target, name, AtFlags::empty())
                    .map_err(failed(&path))?;
                continue;
            }
            linked.insert(file, path.clone());
        }
        copy_file(level, name, &stat).map_err(|source| CopyError::Io { at: path, source })?;
    }
    Ok(())
}

const DIRECTORY: OFlags = OFlags::DIRECTORY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Opens a file; a new one is the owner's alone.
fn open_at(directory: impl AsFd, path: impl Arg + Copy, flags: OFlags) -> Result<OwnedFd, Errno> {
    retry_interrupted(|| rustix::fs::openat(&directory, path, flags, Mode::RUSR | Mode::WUSR))
}

fn open_directory(directory: impl AsFd, name: &CStr) -> Result<OwnedFd, Errno> {
    open_at(directory, name, DIRECTORY)
}

fn enter(source: OwnedFd, target: OwnedFd, path: PathBuf) -> Result<Level, Errno> {
    let (entries, stat) = (Dir::read_from(&source)?, rustix::fs::fstat(&source)?);
    Ok(Level { source, entries, target, stat, path })
}

fn is_type(stat: &Stat, kind: FileType) -> bool {
    FileType::from_raw_mode(stat.st_mode) == kind
}

/// Copies a file that is not a directory.
fn copy_file(level: &Level, name: &CStr, stat: &Stat) -> io::Result<()> {
    let target = &level.target;
    let (uid, gid) = owner(stat);
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => {
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let mut source = File::from(open_at(&level.source, name, flags)?);
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let mut copy = File::from(open_at(target, name, flags)?);
            io::copy(&mut source, &mut copy)?;
            rustix::fs::fchown(&copy, uid, gid)?;
            rustix::fs::fchmod(&copy, Mode::from_raw_mode(stat.st_mode))?;
            // After the owner, whose change removes capabilities.
            copy_extended_attributes(&source, &copy)?;
            rustix::fs::futimens(&copy, &times(stat))?;
        }
        FileType::Symlink => {
            let text: CString = rustix::fs::readlinkat(&level.source, name, Vec::new())?;
            rustix::fs::symlinkat(&text, target, name)?;
            rustix::fs::chownat(target, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)?;
            rustix::fs::utimensat(target, name, &times(stat), AtFlags::SYMLINK_NOFOLLOW)?;
        }
        kind => {
            rustix::fs::mknodat(target, name, kind, Mode::from_raw_mode(stat.st_mode), stat.st_rdev)?;
            rustix::fs::chownat(target, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)?;
            // The mode at the creation was less the umask. The file is no link, which this call would follow.
            rustix::fs::chmodat(target, name, Mode::from_raw_mode(stat.st_mode), AtFlags::empty())?;
            rustix::fs::utimensat(target, name, &times(stat), AtFlags::SYMLINK_NOFOLLOW)?;
        }
    }
    Ok(())
}

/// Gives the copy of a directory the owner, mode, extended attributes and times of its source.
fn copy_attributes(level: &Level) -> Result<(), Errno> {
    let (uid, gid) = owner(&level.stat);
    rustix::fs::fchown(&level.target, uid, gid)?;
    rustix::fs::fchmod(&level.target, Mode::from_raw_mode(level.stat.st_mode))?;
    copy_extended_attributes(&level.source, &level.target)?;
    rustix::fs::futimens(&level.target, &times(&level.stat))
}

fn owner(stat: &Stat) -> (Option<Uid>, Option<Gid>) {
    (Some(Uid::from_raw(stat.st_uid)), Some(Gid::from_raw(stat.st_gid)))
}

fn times(stat: &Stat) -> Timestamps {
    let time = |seconds, nanoseconds| Timespec { tv_sec: seconds, tv_nsec: nanoseconds };
    let nanoseconds = |number| i64::try_from(number).unwrap_or(0);
    Timestamps {
        last_access: time(stat.st_atime, nanoseconds(stat.st_atime_nsec)),
        last_modification: time(stat.st_mtime, nanoseconds(stat.st_mtime_nsec)),
    }
}

/// Copies the attributes that belong to the file's content and rights, as far as the target's file system has such.
fn copy_extended_attributes(source: impl AsFd, target: impl AsFd) -> Result<(), Errno> {
    let mut names = vec![0; MAX_ATTRIBUTE];
    let length = match rustix::fs::flistxattr(&source, &mut names) {
        Err(Errno::NOTSUP) => return Ok(()),
        other => other?,
    };
    let mut value = Vec::new();
    for name in names.get(..length).unwrap_or_default().split_inclusive(|byte| *byte == 0) {
        let Ok(name) = CStr::from_bytes_with_nul(name) else { continue };
        let text = name.to_bytes();
        let copied =
            text.starts_with(b"user.") || text.starts_with(b"system.posix_acl_") || text == b"security.capability";
        if !copied {
            continue;
        }
        value.resize(MAX_ATTRIBUTE, 0);
        let length = rustix::fs::fgetxattr(&source, name, &mut value)?;
        match rustix::fs::fsetxattr(&target, name, value.get(..length).unwrap_or_default(), XattrFlags::empty()) {
            Ok(()) | Err(Errno::NOTSUP) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
    use std::time::{Duration, SystemTime};

    fn copy(source: &Path, target: &Path, budget: &mut CopyBudget) -> Result<(), CopyError> {
        copy_tree(File::open(source).unwrap(), target, budget)
    }

    #[test]
    fn a_copy_has_the_contents_owners_modes_links_and_attributes() {
        let directory = tempfile::tempdir().unwrap();
        let (source, target) = (directory.path().join("a"), directory.path().join("b"));
        fs::create_dir_all(source.join("sub/empty")).unwrap();
        fs::write(source.join("sub/file"), vec![7; 300_000]).unwrap();
        fs::hard_link(source.join("sub/file"), source.join("again")).unwrap();
        symlink("../outside", source.join("link")).unwrap();
        nix::unistd::mkfifo(&source.join("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        if nix::unistd::geteuid().is_root() {
            std::os::unix::fs::chown(source.join("sub/file"), Some(33), Some(44)).unwrap();
            std::os::unix::fs::lchown(source.join("link"), Some(5), Some(6)).unwrap();
        }
        fs::set_permissions(source.join("sub/file"), PermissionsExt::from_mode(0o4710)).unwrap();
        fs::set_permissions(source.join("fifo"), PermissionsExt::from_mode(0o666)).unwrap();
        let file = File::open(source.join("sub/file")).unwrap();
        let has_attributes = rustix::fs::fsetxattr(&file, c"user.note", b"text", XattrFlags::empty()).is_ok();
        let old = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        file.set_modified(old).unwrap();
        fs::set_permissions(source.join("sub"), PermissionsExt::from_mode(0o3751)).unwrap();
        File::open(source.join("sub")).unwrap().set_modified(old).unwrap();

        copy(&source, &target, &mut CopyBudget::default()).unwrap();
        for path in ["", "sub", "sub/empty", "sub/file", "again", "link", "fifo"] {
            let [of, is] = [&source, &target].map(|root| fs::symlink_metadata(root.join(path)).unwrap());
            assert_eq!((is.mode(), is.uid(), is.gid()), (of.mode(), of.uid(), of.gid()), "{path}");
            assert_eq!((is.mtime(), is.mtime_nsec()), (of.mtime(), of.mtime_nsec()), "{path}");
        }
        assert_eq!(fs::read(target.join("sub/file")).unwrap(), vec![7; 300_000]);
        assert_eq!(fs::read_link(target.join("link")).unwrap(), Path::new("../outside"));
        let inode = |path: &str| fs::metadata(target.join(path)).unwrap().ino();
        assert_eq!(inode("sub/file"), inode("again"));
        assert_ne!(inode("sub/file"), fs::metadata(source.join("again")).unwrap().ino());
        assert!(fs::metadata(target.join("fifo")).unwrap().file_type().is_fifo());
        if has_attributes {
            let mut value = [0; 16];
            let copied = File::open(target.join("sub/file")).unwrap();
            assert_eq!(rustix::fs::fgetxattr(&copied, c"user.note", &mut value).unwrap(), 4);
        }
    }

    #[test]
    fn a_tree_that_is_too_large_or_too_deep_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let source = directory.path().join("a");
        fs::create_dir_all(source.join("sub")).unwrap();
        fs::write(source.join("sub/file"), "").unwrap();
        copy(&source, &directory.path().join("three"), &mut CopyBudget::of(3)).unwrap();
        let error = copy(&source, &directory.path().join("two"), &mut CopyBudget::of(2)).unwrap_err();
        assert!(matches!(error, CopyError::TooMany { most: 2 }) && error.kind() == FailureKind::Invalid, "{error}");
        let mut deep = source.clone();
        (0..MAX_DEPTH).for_each(|_| deep.push("d"));
        fs::create_dir_all(&deep).unwrap();
        let error = copy(&source, &directory.path().join("deep"), &mut CopyBudget::default()).unwrap_err();
        assert!(matches!(error, CopyError::TooDeep { .. }) && error.kind() == FailureKind::Invalid, "{error}");
        let error = copy(&source, &directory.path().join("three"), &mut CopyBudget::default()).unwrap_err();
        assert_eq!(error.to_string(), format!("cannot copy {}", directory.path().join("three").display()));
    }
}
