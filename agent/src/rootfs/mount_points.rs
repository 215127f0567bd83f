//! Finds where mounts, the working directory and devices of a container lie in its root, and makes what is missing there.
//!
//! libcontainer refuses a link that leads to nothing, so it gets the paths that come out of this, which have no links. Links of
//! the image are followed as runc follows them. Below an earlier mount nothing is looked at or made: the mount hides the
//! image's entries, and its own are not visible yet.

use nacelle_base::retry::retry_interrupted;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat};
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::{Gid, Uid, fchownat};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use super::error::RootPathError;
use super::root_dir::{PathStep, RootDir, RootEntry, follow_links};

/// Directories that libcontainer mounts on or fills by their paths, so that they may not be links.
const RESERVED_DIRECTORIES: [&str; 3] = ["dev", "proc", "sys"];

/// The owner of what the agent makes in a root; `None`: the agent's own user.
pub type Owner = Option<(Uid, Gid)>;

/// The kind of file that the end of a path must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// A directory.
    Directory,
    /// Any other file.
    File,
}

/// The mount points of a container that is being prepared, in the order in which they are mounted.
pub struct MountPoints {
    root: RootDir,
    owner: Owner,
    /// Paths without links.
    mounted: Vec<PathBuf>,
}

impl MountPoints {
    /// Opens a root in which nothing is mounted yet. What is made in it gets this owner.
    pub fn open(root: &Path, owner: Owner) -> Result<MountPoints, RootPathError> {
        let opened = RootDir::open(root).map_err(|error| RootPathError::prepare("root", root, root, error));
        Ok(MountPoints { root: opened?, owner, mounted: Vec::new() })
    }

    /// Checks that /dev, /proc and /sys are directories or missing.
    pub fn check_reserved_directories(&self) -> Result<(), RootPathError> {
        for name in RESERVED_DIRECTORIES {
            let at = Path::new("/").join(name);
            let plain = match self.root.look_up(Path::new("/"), OsStr::new(name)) {
                Ok(RootEntry::Missing | RootEntry::Directory) => Ok(()),
                Ok(RootEntry::Link(_) | RootEntry::File) => Err(Errno::ENOTDIR),
                Err(error) => Err(error),
            };
            plain.map_err(|error| RootPathError::prepare("mount target", &at, &at, error))?;
        }
        Ok(())
    }

    /// Returns the path without links at which the next mount of the specification is made. It exists unless an earlier mount
    /// covers it.
    pub fn add_mount(&mut self, destination: &Path, kind: EntryKind) -> Result<PathBuf, RootPathError> {
        let directory_path = self.prepare_path("mount target", destination, kind)?;
        if directory_path == Path::new("/") {
            // The mount would become the container's root.
            return Err(RootPathError::prepare("mount target", destination, &directory_path, Errno::EINVAL));
        }
        self.mounted.push(directory_path.clone());
        Ok(directory_path)
    }

    /// Checks the path of a device, after all mounts were added. libcontainer makes the device by its path, which in a volume
    /// another container can change.
    pub fn check_device(&self, device: &Path) -> Result<(), RootPathError> {
        match self.covering_mount(device) {
            Some(volume) if volume != Path::new("/dev") => {
                Err(RootPathError::DeviceInVolume { device: device.to_owned(), volume: volume.to_owned() })
            }
            _ => Ok(()),
        }
    }

    /// Returns a path without links, and makes what is missing of it, its end as `kind`. What an earlier mount covers is neither
    /// looked at nor made. `purpose` is for the error.
    pub fn prepare_path(
        &self,
        purpose: &'static str,
        requested: &Path,
        kind: EntryKind,
    ) -> Result<PathBuf, RootPathError> {
        follow_links(purpose, requested, |directory_path, part, is_last| {
            if self.covering_mount(&directory_path.join(part)).is_some() {
                return Ok(PathStep::Enter);
            }
            match self.root.look_up(directory_path, part)? {
                RootEntry::Link(target) => return Ok(PathStep::Follow(target)),
                RootEntry::Directory if is_last && kind == EntryKind::File => return Err(Errno::EISDIR),
                RootEntry::File if !is_last || kind == EntryKind::Directory => return Err(Errno::ENOTDIR),
                RootEntry::Directory | RootEntry::File => {}
                RootEntry::Missing => {
                    let kind = if is_last { kind } else { EntryKind::Directory };
                    self.make_entry(directory_path, part, kind)?;
                }
            }
            Ok(PathStep::Enter)
        })
    }

    /// Returns the last mount that covers a path.
    fn covering_mount(&self, path: &Path) -> Option<&Path> {
        self.mounted.iter().rev().find(|mounted| path.starts_with(mounted)).map(PathBuf::as_path)
    }

    fn make_entry(&self, directory_path: &Path, name: &OsStr, kind: EntryKind) -> nix::Result<()> {
        let directory = self.root.open_directory(directory_path)?;
        match kind {
            EntryKind::Directory => mkdirat(&directory, name, Mode::from_bits_truncate(0o755))?,
            EntryKind::File => {
                let flags = OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
                drop(retry_interrupted(|| openat(&directory, name, flags, Mode::from_bits_truncate(0o644)))?);
            }
        }
        let Some((uid, gid)) = self.owner else { return Ok(()) };
        fchownat(&directory, name, Some(uid), Some(gid), AtFlags::AT_SYMLINK_NOFOLLOW)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::{Classify, FailureKind};
    use std::fs;
    use std::os::unix::fs::symlink;

    struct Tree {
        outer: tempfile::TempDir,
        root: PathBuf,
    }

    fn tree() -> Tree {
        let outer = tempfile::tempdir().unwrap();
        let root = outer.path().join("root");
        for path in ["etc", "var", "proc", "data/here"] {
            fs::create_dir_all(root.join(path)).unwrap();
        }
        fs::write(root.join("file"), "kept").unwrap();
        Tree { outer, root }
    }

    fn mount_points(tree: &Tree) -> MountPoints {
        MountPoints::open(&tree.root, None).unwrap()
    }

    fn error(result: Result<PathBuf, RootPathError>) -> (i32, String) {
        match result.unwrap_err() {
            error @ RootPathError::Prepare { .. } => {
                assert_eq!(error.kind(), FailureKind::Invalid, "{error}");
                let RootPathError::Prepare { source, at, .. } = error else { unreachable!() };
                (source.raw_os_error().unwrap(), at.display().to_string())
            }
            error => panic!("{error}"),
        }
    }

    #[test]
    fn a_dangling_link_is_followed_and_its_target_is_created() {
        let tree = tree();
        symlink("/run", tree.root.join("var/run")).unwrap();
        symlink("../run/systemd/stub.conf", tree.root.join("etc/resolv.conf")).unwrap();
        symlink("/etc/second", tree.root.join("etc/first")).unwrap();
        symlink("third", tree.root.join("etc/second")).unwrap();
        for (requested, kind, directory_path) in [
            (
                "/var/run/secrets/kubernetes.io/serviceaccount",
                EntryKind::Directory,
                "/run/secrets/kubernetes.io/serviceaccount",
            ),
            ("/var/run/one", EntryKind::File, "/run/one"),
            ("/etc/resolv.conf", EntryKind::File, "/run/systemd/stub.conf"),
            ("/etc/first", EntryKind::Directory, "/etc/third"),
            ("/etc/../data/./here", EntryKind::Directory, "/data/here"),
            ("/new/deep/file", EntryKind::File, "/new/deep/file"),
            ("/file", EntryKind::File, "/file"),
        ] {
            let found = mount_points(&tree).add_mount(Path::new(requested), kind).unwrap();
            assert_eq!(found, Path::new(directory_path), "{requested}");
            let made = tree.root.join(directory_path.trim_start_matches('/'));
            assert_eq!(made.is_dir(), kind == EntryKind::Directory, "{requested}");
            assert!(made.exists(), "{requested}");
            // Once more, now that it is there.
            assert_eq!(mount_points(&tree).add_mount(Path::new(requested), kind).unwrap(), Path::new(directory_path));
        }
        assert_eq!(fs::read(tree.root.join("file")).unwrap(), b"kept");
    }

    #[test]
    fn nothing_is_created_outside_the_root() {
        let tree = tree();
        let outside = tree.outer.path().join("outside");
        symlink("../../../outside", tree.root.join("etc/up")).unwrap();
        symlink(&outside, tree.root.join("etc/absolute")).unwrap();
        symlink("/proc/self/root", tree.root.join("etc/magic")).unwrap();
        for requested in ["/etc/up", "/etc/absolute/below", "/../outside", "/etc/magic/outside"] {
            mount_points(&tree).add_mount(Path::new(requested), EntryKind::Directory).unwrap();
        }
        assert!(!outside.exists());
        assert!(tree.root.join("outside").is_dir() && tree.root.join("proc/self/root/outside").is_dir());
    }

    #[test]
    fn an_obstacle_is_named_in_the_error() {
        let tree = tree();
        symlink("loop", tree.root.join("etc/loop")).unwrap();
        symlink("/file", tree.root.join("etc/to-file")).unwrap();
        symlink("/", tree.root.join("etc/to-root")).unwrap();
        let long = format!("/data/{}", "n".repeat(300));
        for (requested, kind, errno, at) in [
            ("/file", EntryKind::Directory, libc::ENOTDIR, "/file"),
            ("/file/below", EntryKind::File, libc::ENOTDIR, "/file"),
            ("/etc/to-file", EntryKind::Directory, libc::ENOTDIR, "/file"),
            ("/data", EntryKind::File, libc::EISDIR, "/data"),
            ("/etc/loop", EntryKind::File, libc::ELOOP, "/etc/loop"),
            ("/etc/loop/below", EntryKind::Directory, libc::ELOOP, "/etc/loop"),
            (long.as_str(), EntryKind::Directory, libc::ENAMETOOLONG, long.as_str()),
            ("/etc/to-root", EntryKind::Directory, libc::EINVAL, "/"),
        ] {
            assert_eq!(
                error(mount_points(&tree).add_mount(Path::new(requested), kind)),
                (errno, at.to_owned()),
                "{requested}"
            );
        }
        for name in ["dev", "sys"] {
            symlink("/data", tree.root.join(name)).unwrap();
            assert_eq!(mount_points(&tree).check_reserved_directories().unwrap_err().kind(), FailureKind::Invalid);
            fs::remove_file(tree.root.join(name)).unwrap();
        }
        mount_points(&tree).check_reserved_directories().unwrap();
    }

    #[test]
    fn paths_below_a_mount_are_not_created_in_the_image() {
        let tree = tree();
        symlink("/data", tree.root.join("link")).unwrap();
        symlink("/etc/elsewhere", tree.root.join("data/inner")).unwrap();
        let mut points = mount_points(&tree);
        assert_eq!(points.add_mount(Path::new("/dev"), EntryKind::Directory).unwrap(), Path::new("/dev"));
        assert_eq!(points.add_mount(Path::new("/link"), EntryKind::Directory).unwrap(), Path::new("/data"));
        for (requested, directory_path) in [("/link/inner", "/data/inner"), ("/data/new/deep", "/data/new/deep")] {
            assert_eq!(
                points.add_mount(Path::new(requested), EntryKind::Directory).unwrap(),
                Path::new(directory_path)
            );
        }
        assert!(!tree.root.join("data/new").exists() && !tree.root.join("etc/elsewhere").exists());
        points.add_mount(Path::new("/dev/volume"), EntryKind::Directory).unwrap();
        points.check_device(Path::new("/dev/sda")).unwrap();
        let refused = points.check_device(Path::new("/dev/volume/sda")).unwrap_err();
        assert!(matches!(&refused, RootPathError::DeviceInVolume { .. }), "{refused}");
        assert_eq!(refused.kind(), FailureKind::Invalid);
    }
}
