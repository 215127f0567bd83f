//! Opens paths beneath an open root directory, follows links in it, and reads single files of it.

use nacelle_base::retry::{retry_interrupted, retry_transient};
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, open, openat2, readlinkat};
use nix::sys::stat::{Mode, SFlag, fstatat};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use super::error::{RootError, RootPathError, root_error};

/// The most links that are followed for one path, as in the kernel.
const MAX_LINKS: usize = 40;
/// The most that `read_file` returns, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// An open directory that is, or becomes, the root of a container.
#[derive(Debug)]
pub struct RootDir(OwnedFd);

/// The file that a name in a directory refers to.
pub(super) enum RootEntry {
    Missing,
    /// A symbolic link, and its text.
    Link(PathBuf),
    Directory,
    /// Anything else.
    File,
}

/// The way in which [`follow_links`] continues after a part of a path.
pub(super) enum PathStep {
    /// Continue below it.
    Enter,
    /// Continue at the target of a link.
    Follow(PathBuf),
}

impl RootDir {
    /// Opens the directory at a path of the caller's own root.
    pub fn open(path: &Path) -> nix::Result<RootDir> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        retry_interrupted(|| open(path, flags, Mode::empty())).map(RootDir)
    }

    /// Opens a path beneath the root: links, also absolute ones, and `..` stay in it. A link of /proc to a file of a process fails
    /// with ELOOP.
    pub fn open_beneath(&self, path: &Path, flags: OFlag) -> nix::Result<OwnedFd> {
        let how = OpenHow::new()
            .flags(flags | OFlag::O_CLOEXEC)
            .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
        retry_transient(|| openat2(&self.0, path, how))
    }

    /// Opens a directory for use as `dirfd`. `path` has no links.
    pub(super) fn open_directory(&self, path: &Path) -> nix::Result<OwnedFd> {
        self.open_beneath(path, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW)
    }

    /// Returns what `name` is in a directory, whose path has no links.
    pub(super) fn look_up(&self, directory: &Path, name: &OsStr) -> nix::Result<RootEntry> {
        let directory = self.open_directory(directory)?;
        match fstatat(&directory, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
            Err(Errno::ENOENT) => Ok(RootEntry::Missing),
            Err(error) => Err(error),
            Ok(stat) => Ok(match SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT {
                SFlag::S_IFLNK => RootEntry::Link(readlinkat(&directory, name)?.into()),
                SFlag::S_IFDIR => RootEntry::Directory,
                _ => RootEntry::File,
            }),
        }
    }
}

/// Follows a path from the root, and returns the absolute path that it leads to, without links and `..`.
///
/// `visit` receives each part that is not `..`: the path of its directory, the part, and whether it is the last one known so
/// far. It decides whether the part is a link, and may make what is missing.
/// `purpose` and `requested` are for the error, which names the part that failed.
pub(super) fn follow_links(
    purpose: &'static str,
    requested: &Path,
    mut visit: impl FnMut(&Path, &OsStr, bool) -> nix::Result<PathStep>,
) -> Result<PathBuf, RootPathError> {
    let mut directory_path = PathBuf::from("/");
    // The parts that are still to be followed, the next one last.
    let mut rest: Vec<OsString> = Vec::new();
    push_parts(&mut rest, requested);
    let mut links = 0;
    while let Some(part) = rest.pop() {
        if part == ".." {
            directory_path.pop();
            continue;
        }
        let next = directory_path.join(&part);
        let failed = |error| RootPathError::prepare(purpose, requested, &next, error);
        match visit(&directory_path, &part, rest.is_empty()).map_err(failed)? {
            PathStep::Enter => directory_path = next,
            PathStep::Follow(target) => {
                links += 1;
                if links > MAX_LINKS {
                    return Err(failed(Errno::ELOOP));
                }
                if target.is_absolute() {
                    directory_path = PathBuf::from("/");
                }
                push_parts(&mut rest, &target);
            }
        }
    }
    Ok(directory_path)
}

/// Puts the parts of a path on top of those that are still to be followed.
fn push_parts(rest: &mut Vec<OsString>, path: &Path) {
    let parts: Vec<OsString> = path
        .components()
        .filter(|part| matches!(part, Component::Normal(_) | Component::ParentDir))
        .map(|part| part.as_os_str().to_owned())
        .collect();
    rest.extend(parts.into_iter().rev());
}

/// Returns the text of a file in a root, at most the first MiB; empty if there is no such file or it is no regular file.
pub fn read_file(root: &Path, path: &str) -> Result<String, RootError> {
    let directory = RootDir::open(root).map_err(root_error("open", root))?;
    let found = match directory.open_beneath(Path::new(path), OFlag::O_PATH) {
        Ok(fd) => File::from(fd),
        Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) => return Ok(String::new()),
        Err(error) => return Err(root_error("open", root.join(path))(error)),
    };
    // Checked before it is opened for reading: opening a device may have effects.
    if !found.metadata().map_err(root_error("inspect", path))?.is_file() {
        return Ok(String::new());
    }
    let file = File::open(format!("/proc/self/fd/{}", found.as_raw_fd()));
    let file = file.map_err(root_error("open", root.join(path)))?;
    let mut bytes = Vec::new();
    file.take(MAX_FILE).read_to_end(&mut bytes).map_err(root_error("read", path))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns the absolute path, without links, of a path in a root, and whether a directory is there; `None` if nothing is there.
pub fn find(root: &Path, path: &Path) -> Result<Option<(PathBuf, bool)>, RootError> {
    let directory = RootDir::open(root).map_err(root_error("open", root))?;
    // An empty path means the root itself.
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let found = match directory.open_beneath(path, OFlag::O_PATH) {
        Ok(found) => File::from(found),
        Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) => return Ok(None),
        Err(error) => return Err(root_error("open", path)(error)),
    };
    let whole = fs::read_link(format!("/proc/self/fd/{}", found.as_raw_fd())).map_err(root_error("find", path))?;
    let is_directory = found.metadata().map_err(root_error("inspect", path))?.is_dir();
    Ok(Some((whole, is_directory)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn files_are_found_inside_the_root_only() {
        let outer = tempfile::tempdir().unwrap();
        let root = outer.path().join("root");
        fs::create_dir_all(root.join("etc")).unwrap();
        fs::write(outer.path().join("secret"), "outside").unwrap();
        fs::write(root.join("etc/real"), "inside").unwrap();
        symlink("/etc/real", root.join("etc/passwd")).unwrap();
        symlink("../../secret", root.join("etc/group")).unwrap();
        symlink("loop", root.join("etc/loop")).unwrap();
        nix::unistd::mkfifo(&root.join("etc/fifo"), Mode::S_IRWXU).unwrap();
        assert_eq!(read_file(&root, "/etc/passwd").unwrap(), "inside");
        for missing in ["/etc/group", "/etc/loop", "/etc/none", "/etc", "/etc/fifo", "/etc/real/x"] {
            assert_eq!(read_file(&root, missing).unwrap(), "", "{missing}");
        }
    }
}
