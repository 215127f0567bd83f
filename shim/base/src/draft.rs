//! Writes files under a temporary name (drafts) and renames them when they are complete. A draft is locked with flock by
//! the process that writes it, so that `remove_stale_drafts` can distinguish the leaked drafts of a killed process from those that are
//! still being written.
//!
//! The writer locks a new draft and then checks that its name still refers to it. The sweeper removes a draft only while it
//! holds the draft's lock. So a draft is never removed while its writer uses it.

use crate::file_error::{FileError, at};
use crate::removal::remove_if_there;
use crate::retry::retry_interrupted;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, openat, unlinkat};
use rustix::io::Errno;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// The maximum number of names that are tried. A name that is in use belongs to a killed process that had the same pid.
const ATTEMPTS: u32 = 10_000;
/// How many levels of directories below its root a sweep visits.
const SWEEP_DEPTH: u32 = 3;

/// A file that is removed on drop unless it is [committed](Draft::commit).
#[derive(Debug)]
pub struct Draft {
    target: PathBuf,
    path: PathBuf,
    /// The file, open for reading and writing, created empty with mode 0600.
    pub file: File,
    committed: bool,
}

impl Draft {
    /// Creates an empty draft of `target`, in the same directory.
    pub fn create(target: &Path) -> Result<Draft, FileError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        for _ in 0..ATTEMPTS {
            let mut name = target.file_name().unwrap_or_default().to_owned();
            name.push(format!(".tmp.{}.{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
            let path = target.with_file_name(name);
            let file = match OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                other => other.map_err(at("create", &path))?,
            };
            match file.try_lock() {
                Ok(()) => {}
                // A concurrent sweep holds the lock, and removes this draft.
                Err(fs::TryLockError::WouldBlock) => continue,
                Err(fs::TryLockError::Error(error)) => {
                    // The caller needs the first error, not this one.
                    let _ = remove_if_there(&path);
                    return Err(at("lock", &path)(error));
                }
            }
            let draft = Draft { target: target.to_owned(), path, file, committed: false };
            if draft.has_its_name() {
                return Ok(draft);
            }
        }
        Err(at("create a draft of", target)(io::ErrorKind::AlreadyExists.into()))
    }

    /// Returns the draft's temporary path, for a program that writes the file by name.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Syncs the file and renames it to its target, replacing an existing file. After a crash the target has the old or the
    /// new content.
    pub fn commit(mut self) -> Result<(), FileError> {
        let renamed = self.file.sync_all().and_then(|()| fs::rename(&self.path, &self.target));
        self.committed = renamed.is_ok();
        renamed
            .and_then(|()| match self.target.parent() {
                Some(directory) if !directory.as_os_str().is_empty() => File::open(directory)?.sync_all(),
                _ => Ok(()),
            })
            .map_err(at("write", &self.target))
    }

    /// Returns whether the draft's name still refers to its file.
    fn has_its_name(&self) -> bool {
        match (self.file.metadata(), fs::symlink_metadata(&self.path)) {
            (Ok(own), Ok(named)) => (own.dev(), own.ino()) == (named.dev(), named.ino()),
            _ => false,
        }
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // A file that cannot be removed is removed by the next sweep.
        if !self.committed
            && let Err(error) = remove_if_there(&self.path)
        {
            tracing::warn!(error = %crate::Chain(&error), "cannot remove a draft; the next start removes it");
        }
    }
}

/// Returns whether a file of this name is a draft: `NAME.tmp.PID.NUMBER`.
fn is_draft(name: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let mut parts = name.rsplitn(4, '.');
    let (count, pid, mark, rest) = (parts.next(), parts.next(), parts.next(), parts.next());
    count.is_some_and(number) && pid.is_some_and(number) && mark == Some("tmp") && rest.is_some()
}

/// Removes the drafts in `root` and in the directories below it that no running process writes. Continues after a failure
/// and returns the first one. Blocks.
pub fn remove_stale_drafts(root: &Path) -> Result<(), FileError> {
    // `paths.root` itself may be a symbolic link.
    match retry_interrupted(|| {
        rustix::fs::open(root, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
    }) {
        Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(at("open", root)(error.into())),
        Ok(directory) => remove_stale_below(&directory, root, SWEEP_DEPTH),
    }
}

/// Sweeps an open directory. Jailed processes write in some of these directories, so the sweep follows no symbolic link,
/// and leaves alone any entry with a draft's name that is not a regular file.
fn remove_stale_below(directory: &OwnedFd, path: &Path, depth: u32) -> Result<(), FileError> {
    let mut first = Ok(());
    for entry in Dir::read_from(directory).map_err(|error| at("read", path)(error.into()))? {
        let entry = entry.map_err(|error| at("read", path)(error.into()))?;
        let name = entry.file_name();
        let text = name.to_string_lossy();
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let open = |flags| retry_interrupted(|| openat(directory, name, flags, Mode::empty()));
        if entry.file_type() == FileType::Directory && depth > 0 && text != "." && text != ".." {
            if let Ok(below) = open(flags | OFlags::DIRECTORY) {
                first = first.and(remove_stale_below(&below, &path.join(&*text), depth - 1));
            }
        } else if entry.file_type() == FileType::RegularFile
            && is_draft(&text)
            && let Ok(file) = open(flags).map(File::from)
            && file.try_lock().is_ok()
        {
            // The lock is held until the draft is removed.
            tracing::info!(path = %path.join(&*text).display(), "removing the draft of a killed process");
            match unlinkat(directory, name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(error) => first = first.and(Err(at("remove", &path.join(&*text))(error.into()))),
            }
        }
    }
    first
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::io::Write;

    fn names(directory: &Path) -> BTreeSet<String> {
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn drafts_of_killed_processes_are_removed_and_open_drafts_stay() {
        let directory = tempfile::tempdir().unwrap();
        let below = directory.path().join("machines/one");
        fs::create_dir_all(&below).unwrap();
        let stale = ["a.tmp.7.0", "scratch-v1-64.tmp.12.3", "index.json.tmp.1.2"];
        let other = ["a.json", "tmp.1.2", "a.tmp.x.1", "a.tmp.1", "data.tmp.1.2.qcow2"];
        for name in stale.iter().chain(&other) {
            fs::write(directory.path().join(name), "half").unwrap();
            fs::write(below.join(name), "half").unwrap();
        }
        // An entry that a jailed process creates there must not lead the sweep elsewhere, nor keep it from removing other drafts.
        let outside = tempfile::tempdir().unwrap();
        fs::write(outside.path().join("a.tmp.7.0"), "kept").unwrap();
        std::os::unix::fs::symlink(outside.path(), directory.path().join("linked")).unwrap();
        std::os::unix::fs::symlink(outside.path().join("a.tmp.7.0"), below.join("c.tmp.1.1")).unwrap();
        let mut open_draft = Draft::create(&below.join("b.json")).unwrap();
        open_draft.file.write_all(b"whole").unwrap();
        std::os::unix::fs::symlink("a.json", below.join("link.tmp.1.1")).unwrap();
        remove_stale_drafts(directory.path()).unwrap();
        let draft = open_draft.path().file_name().unwrap().to_str().unwrap().to_owned();
        let mut expected: BTreeSet<String> = other.map(str::to_owned).into();
        expected.extend(["machines".to_owned(), "linked".to_owned()]);
        assert_eq!(names(directory.path()), expected);
        expected.retain(|name| name != "machines" && name != "linked");
        expected.extend(["link.tmp.1.1".to_owned(), "c.tmp.1.1".to_owned(), draft]);
        assert_eq!(names(outside.path()), BTreeSet::from(["a.tmp.7.0".to_owned()]));
        assert_eq!(names(&below), expected);
        open_draft.commit().unwrap();
        assert_eq!(fs::read(below.join("b.json")).unwrap(), b"whole");
        remove_stale_drafts(&directory.path().join("none")).unwrap();
    }

    #[test]
    fn stale_drafts_of_the_same_pid_do_not_prevent_a_new_draft() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("a.json");
        let first = Draft::create(&target).unwrap();
        let number: u64 = first.path().to_str().unwrap().rsplit('.').next().unwrap().parse().unwrap();
        for next in number + 1..number + 50 {
            fs::write(directory.path().join(format!("a.json.tmp.{}.{next}", std::process::id())), "half").unwrap();
        }
        let mut second = Draft::create(&target).unwrap();
        second.file.write_all(b"two").unwrap();
        second.commit().unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"two");
        let path = first.path().to_owned();
        drop(first);
        assert!(!path.exists());
    }
}
