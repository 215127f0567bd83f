//! A container's root file system: the overlay of image and scratch, and the few files that the agent reads inside, always
//! resolved within the root.

use nacelle_base::retry::{retry_interrupted, retry_transient};
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, open, openat2};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::Mode;
use nix::unistd::{Gid, Uid, fchownat};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use super::shown;
use crate::paths;
use crate::userns::UserNs;

/// No file that the agent reads in an image is longer.
const MAX_FILE: u64 = 1 << 20;

/// Whose is what the agent makes inside a root; none: the agent's own.
pub type Owner = Option<(Uid, Gid)>;

pub(super) fn give(parent: &OwnedFd, name: &OsStr, owner: Owner) -> nix::Result<()> {
    let Some((uid, gid)) = owner else { return Ok(()) };
    fchownat(parent, name, Some(uid), Some(gid), AtFlags::AT_SYMLINK_NOFOLLOW)
}

/// A container's root could not be made, used or removed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what} {}", path.display())]
pub struct RootError {
    /// What was attempted.
    pub what: &'static str,
    /// With what.
    pub path: PathBuf,
    /// Why.
    pub source: io::Error,
}

pub(super) fn at<E: Into<io::Error>>(what: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(E) -> RootError {
    let path = path.into();
    move |source| RootError { what, path, source: source.into() }
}

/// Where a container's root is mounted.
pub fn mount_point(id: &str) -> PathBuf {
    Path::new(paths::BUNDLES).join(id).join("rootfs")
}

fn scratch(id: &str) -> PathBuf {
    Path::new(paths::SCRATCH).join(id)
}

/// What a container writes to its root.
pub fn upper(id: &str) -> PathBuf {
    scratch(id).join("upper")
}

/// Mounts the root of a container: what it writes goes to its own folder on the scratch disk. In a user namespace the
/// image's owners are numbers of it.
pub fn make(id: &str, image: &Path, users: Option<&UserNs>) -> Result<PathBuf, RootError> {
    let shown = users.map(|users| shown::show(id, users, image, "image")).transpose()?;
    let image = shown.as_deref().unwrap_or(image);
    let folder = scratch(id);
    let (upper, work) = (upper(id), folder.join("work"));
    let root = mount_point(id);
    for path in [&upper, &work, &root] {
        fs::create_dir_all(path).map_err(at("make", path))?;
    }
    // The root's own mode and owner are the image's.
    let original = fs::metadata(image).map_err(at("look at", image))?;
    fs::set_permissions(&upper, original.permissions()).map_err(at("set the mode of", &upper))?;
    let (uid, gid) = (std::os::unix::fs::MetadataExt::uid(&original), std::os::unix::fs::MetadataExt::gid(&original));
    nix::unistd::chown(&upper, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid))).map_err(at("chown", &upper))?;
    // Volatile: the disk does not outlive the machine, so nothing on it must be synced.
    let options =
        format!("lowerdir={},upperdir={},workdir={},volatile", image.display(), upper.display(), work.display());
    mount(Some("overlay"), &root, Some("overlay"), MsFlags::empty(), Some(options.as_str()))
        .map_err(at("mount the overlay at", &root))?;
    Ok(root)
}

/// Unmounts a container's root and removes what it wrote; what is not there is no failure.
pub fn remove(id: &str) -> Result<(), RootError> {
    unmount(&shown::folder(id))?;
    unmount(&mount_point(id))?;
    for path in [scratch(id), Path::new(paths::BUNDLES).join(id), Path::new(paths::CONTAINERS).join(id)] {
        match fs::remove_dir_all(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => other.map_err(at("remove", &path))?,
        }
    }
    Ok(())
}

/// Unmounts whatever is mounted at a path, with all below it.
pub(super) fn unmount(path: &Path) -> Result<(), RootError> {
    loop {
        match umount2(path, MntFlags::MNT_DETACH) {
            Ok(()) => {}
            Err(Errno::EINVAL | Errno::ENOENT) => return Ok(()),
            Err(error) => return Err(at("unmount", path)(error)),
        }
    }
}

/// Opens a path beneath a root, whatever links on the way to it say; a link of /proc to another process's is refused.
pub(crate) fn open_in(root: &OwnedFd, path: &Path, flags: OFlag) -> nix::Result<OwnedFd> {
    let how = OpenHow::new()
        .flags(flags | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    retry_transient(|| openat2(root, path, how))
}

pub(crate) fn open_root(root: &Path) -> Result<OwnedFd, RootError> {
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    retry_interrupted(|| open(root, flags, Mode::empty())).map_err(at("open", root))
}

/// The text of a file inside the root; empty if there is none or it is no plain file. At most 1 MiB of it.
pub fn read_file(root: &Path, path: &str) -> Result<String, RootError> {
    let directory = open_root(root)?;
    let found = match open_in(&directory, Path::new(path), OFlag::O_PATH) {
        Ok(fd) => File::from(fd),
        Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) => return Ok(String::new()),
        Err(error) => return Err(at("open", root.join(path))(error)),
    };
    // Looked at before it is opened: opening a device may do things.
    if !found.metadata().map_err(at("look at", path))?.is_file() {
        return Ok(String::new());
    }
    let file = File::open(format!("/proc/self/fd/{}", found.as_raw_fd())).map_err(at("open", root.join(path)))?;
    let mut bytes = Vec::new();
    file.take(MAX_FILE).read_to_end(&mut bytes).map_err(at("read", path))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// What a path inside the root is, without links, and whether it is a folder; none if there is nothing.
pub fn find(root: &Path, path: &Path) -> Result<Option<(PathBuf, bool)>, RootError> {
    let directory = open_root(root)?;
    // Without a path, the root itself.
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let found = match open_in(&directory, path, OFlag::O_PATH) {
        Ok(found) => File::from(found),
        Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) => return Ok(None),
        Err(error) => return Err(at("open", path)(error)),
    };
    let whole = fs::read_link(format!("/proc/self/fd/{}", found.as_raw_fd())).map_err(at("find", path))?;
    let folder = found.metadata().map_err(at("look at", path))?.is_dir();
    Ok(Some((whole, folder)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn files_are_found_inside_the_root_only() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("root");
        fs::create_dir_all(root.join("etc")).unwrap();
        fs::write(folder.path().join("secret"), "outside").unwrap();
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
