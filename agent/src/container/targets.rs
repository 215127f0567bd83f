//! Finds where the mounts of a container and its working directory lie in its root, through the links of the image, and makes
//! what is missing there, as runc does. Nothing outside the root is reached, whatever the links say.
//!
//! libcontainer mounts at the paths that come out of this, which have no links: it refuses a link that leads to nothing. No
//! process of the container exists yet, and no volume is mounted yet: what a mount will show is left as it is.

use nacelle_base::retry::retry_interrupted;
use nacelle_base::{Classify, Kind};
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat, readlinkat};
use nix::sys::stat::{Mode, SFlag, fstatat, mkdirat};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use super::root::{Owner, give, open_in, open_root};

/// Links that are followed for one path, as in the kernel.
pub(super) const MAX_LINKS: usize = 40;
/// What libcontainer mounts or fills by path, so that these may be no links.
const PLAIN: [&str; 3] = ["dev", "proc", "sys"];

/// What something needs to be to be mounted on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// A directory.
    Directory,
    /// Any other file.
    File,
}

/// A path of the specification that cannot be used in this image.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the fields are what the message prints")]
pub enum TargetError {
    #[error("cannot prepare the {purpose} {} in the container's root: {}", asked.display(), at.display())]
    Path { purpose: &'static str, asked: PathBuf, at: PathBuf, source: io::Error },
    #[error("the device {} lies in the volume at {}: choose a path that is in no volume", device.display(), volume.display())]
    InVolume { device: PathBuf, volume: PathBuf },
}

impl Classify for TargetError {
    fn kind(&self) -> Kind {
        match self {
            TargetError::InVolume { .. } => Kind::Invalid,
            TargetError::Path { source, .. } => match source.raw_os_error() {
                Some(libc::ENOTDIR | libc::EISDIR | libc::EEXIST | libc::ELOOP | libc::ENAMETOOLONG | libc::EINVAL) => {
                    Kind::Invalid
                }
                _ => match Kind::from(source.kind()) {
                    Kind::Exhausted => Kind::Exhausted,
                    _ => Kind::Internal,
                },
            },
        }
    }
}

/// What a name in a directory of the root is.
enum Entry {
    Missing,
    Link(PathBuf),
    Directory,
    File,
}

/// The root of a container that is being prepared.
pub struct Targets {
    root: OwnedFd,
    owner: Owner,
    /// Where something will be mounted, without links, in order.
    mounted: Vec<PathBuf>,
}

impl Targets {
    /// Of this root; what is made in it is this owner's.
    pub fn open(root: &Path, owner: Owner) -> Result<Targets, TargetError> {
        let (asked, at) = (root.to_owned(), root.to_owned());
        let opened =
            open_root(root).map_err(|error| TargetError::Path { purpose: "root", asked, at, source: error.source });
        Ok(Targets { root: opened?, owner, mounted: Vec::new() })
    }

    /// Checks that /dev, /proc and /sys are directories, or missing.
    pub fn check_plain(&self) -> Result<(), TargetError> {
        for name in PLAIN {
            let at = Path::new("/").join(name);
            let plain = match self.look(Path::new("/"), OsStr::new(name)) {
                Ok(Entry::Missing | Entry::Directory) => Ok(()),
                Ok(Entry::Link(_) | Entry::File) => Err(Errno::ENOTDIR),
                Err(error) => Err(error),
            };
            plain.map_err(|error| failed("mount target", &at, &at, error))?;
        }
        Ok(())
    }

    /// Where the next mount of the specification goes. The path has no links, and is there unless another mount covers it.
    pub fn mount(&mut self, destination: &Path, shape: Shape) -> Result<PathBuf, TargetError> {
        let place = self.prepare("mount target", destination, shape)?;
        if place == Path::new("/") {
            // It would become the container's root.
            return Err(failed("mount target", destination, &place, Errno::EINVAL));
        }
        self.mounted.push(place.clone());
        Ok(place)
    }

    /// Checks the path of a device, after all mounts: libcontainer makes it by its path, which in a volume others change.
    pub fn device(&self, device: &Path) -> Result<(), TargetError> {
        match self.cover(device) {
            Some(volume) if volume != Path::new("/dev") => {
                Err(TargetError::InVolume { device: device.to_owned(), volume: volume.to_owned() })
            }
            _ => Ok(()),
        }
    }

    /// Finds a path in the root and makes what is missing; what a mount covers is left alone. Returns it without links.
    pub fn prepare(&self, purpose: &'static str, asked: &Path, shape: Shape) -> Result<PathBuf, TargetError> {
        let mut place = PathBuf::from("/");
        // What is still to be walked, the next part last.
        let mut rest: Vec<OsString> = Vec::new();
        push(&mut rest, asked);
        let mut links = 0;
        while let Some(part) = rest.pop() {
            if part == ".." {
                place.pop();
                continue;
            }
            let next = place.join(&part);
            let failed = |error| failed(purpose, asked, &next, error);
            if self.cover(&next).is_some() {
                place = next;
                continue;
            }
            let last = rest.is_empty();
            match self.look(&place, &part).map_err(failed)? {
                Entry::Link(target) => {
                    links += 1;
                    if links > MAX_LINKS {
                        return Err(failed(Errno::ELOOP));
                    }
                    if target.is_absolute() {
                        place = PathBuf::from("/");
                    }
                    push(&mut rest, &target);
                    continue;
                }
                Entry::Directory if last && shape == Shape::File => return Err(failed(Errno::EISDIR)),
                Entry::File if !last || shape == Shape::Directory => return Err(failed(Errno::ENOTDIR)),
                Entry::Directory | Entry::File => {}
                Entry::Missing => {
                    let shape = if last { shape } else { Shape::Directory };
                    self.make(&place, &part, shape).map_err(failed)?;
                }
            }
            place = next;
        }
        Ok(place)
    }

    /// The last mount that covers a path.
    fn cover(&self, path: &Path) -> Option<&Path> {
        self.mounted.iter().rev().find(|mounted| path.starts_with(mounted)).map(PathBuf::as_path)
    }

    fn directory(&self, place: &Path) -> nix::Result<OwnedFd> {
        open_in(&self.root, place, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW)
    }

    fn look(&self, place: &Path, name: &OsStr) -> nix::Result<Entry> {
        let directory = self.directory(place)?;
        match fstatat(&directory, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
            Err(Errno::ENOENT) => Ok(Entry::Missing),
            Err(error) => Err(error),
            Ok(stat) => Ok(match SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT {
                SFlag::S_IFLNK => Entry::Link(readlinkat(&directory, name)?.into()),
                SFlag::S_IFDIR => Entry::Directory,
                _ => Entry::File,
            }),
        }
    }

    fn make(&self, place: &Path, name: &OsStr, shape: Shape) -> nix::Result<()> {
        let directory = self.directory(place)?;
        match shape {
            Shape::Directory => mkdirat(&directory, name, Mode::from_bits_truncate(0o755))?,
            Shape::File => {
                let flags = OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
                drop(retry_interrupted(|| openat(&directory, name, flags, Mode::from_bits_truncate(0o644)))?);
            }
        }
        give(&directory, name, self.owner)
    }
}

fn failed(purpose: &'static str, asked: &Path, at: &Path, error: Errno) -> TargetError {
    TargetError::Path { purpose, asked: asked.to_owned(), at: at.to_owned(), source: error.into() }
}

/// Puts the parts of a path on top of what is still to be walked.
fn push(rest: &mut Vec<OsString>, path: &Path) {
    let parts: Vec<OsString> = path
        .components()
        .filter(|part| matches!(part, Component::Normal(_) | Component::ParentDir))
        .map(|part| part.as_os_str().to_owned())
        .collect();
    rest.extend(parts.into_iter().rev());
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    struct Tree {
        folder: tempfile::TempDir,
        root: PathBuf,
    }

    fn tree() -> Tree {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("root");
        for path in ["etc", "var", "proc", "data/here"] {
            fs::create_dir_all(root.join(path)).unwrap();
        }
        fs::write(root.join("file"), "kept").unwrap();
        Tree { folder, root }
    }

    fn targets(tree: &Tree) -> Targets {
        Targets::open(&tree.root, None).unwrap()
    }

    fn error(result: Result<PathBuf, TargetError>) -> (i32, String) {
        match result.unwrap_err() {
            error @ TargetError::Path { .. } => {
                assert_eq!(error.kind(), Kind::Invalid, "{error}");
                let TargetError::Path { source, at, .. } = error else { unreachable!() };
                (source.raw_os_error().unwrap(), at.display().to_string())
            }
            error => panic!("{error}"),
        }
    }

    #[test]
    fn a_link_to_nothing_is_followed_and_what_it_names_is_made() {
        let tree = tree();
        symlink("/run", tree.root.join("var/run")).unwrap();
        symlink("../run/systemd/stub.conf", tree.root.join("etc/resolv.conf")).unwrap();
        symlink("/etc/second", tree.root.join("etc/first")).unwrap();
        symlink("third", tree.root.join("etc/second")).unwrap();
        for (asked, shape, place) in [
            (
                "/var/run/secrets/kubernetes.io/serviceaccount",
                Shape::Directory,
                "/run/secrets/kubernetes.io/serviceaccount",
            ),
            ("/var/run/one", Shape::File, "/run/one"),
            ("/etc/resolv.conf", Shape::File, "/run/systemd/stub.conf"),
            ("/etc/first", Shape::Directory, "/etc/third"),
            ("/etc/../data/./here", Shape::Directory, "/data/here"),
            ("/new/deep/file", Shape::File, "/new/deep/file"),
            ("/file", Shape::File, "/file"),
        ] {
            let found = targets(&tree).mount(Path::new(asked), shape).unwrap();
            assert_eq!(found, Path::new(place), "{asked}");
            let made = tree.root.join(place.trim_start_matches('/'));
            assert_eq!(made.is_dir(), shape == Shape::Directory, "{asked}");
            assert!(made.exists(), "{asked}");
            // Once more, now that it is there.
            assert_eq!(targets(&tree).mount(Path::new(asked), shape).unwrap(), Path::new(place));
        }
        assert_eq!(fs::read(tree.root.join("file")).unwrap(), b"kept");
    }

    #[test]
    fn nothing_is_made_outside_the_root() {
        let tree = tree();
        let outside = tree.folder.path().join("outside");
        symlink("../../../outside", tree.root.join("etc/up")).unwrap();
        symlink(&outside, tree.root.join("etc/absolute")).unwrap();
        symlink("/proc/self/root", tree.root.join("etc/magic")).unwrap();
        for asked in ["/etc/up", "/etc/absolute/below", "/../outside", "/etc/magic/outside"] {
            targets(&tree).mount(Path::new(asked), Shape::Directory).unwrap();
        }
        assert!(!outside.exists());
        assert!(tree.root.join("outside").is_dir() && tree.root.join("proc/self/root/outside").is_dir());
    }

    #[test]
    fn what_is_in_the_way_is_named() {
        let tree = tree();
        symlink("loop", tree.root.join("etc/loop")).unwrap();
        symlink("/file", tree.root.join("etc/to-file")).unwrap();
        symlink("/", tree.root.join("etc/to-root")).unwrap();
        let long = format!("/data/{}", "n".repeat(300));
        for (asked, shape, errno, at) in [
            ("/file", Shape::Directory, libc::ENOTDIR, "/file"),
            ("/file/below", Shape::File, libc::ENOTDIR, "/file"),
            ("/etc/to-file", Shape::Directory, libc::ENOTDIR, "/file"),
            ("/data", Shape::File, libc::EISDIR, "/data"),
            ("/etc/loop", Shape::File, libc::ELOOP, "/etc/loop"),
            ("/etc/loop/below", Shape::Directory, libc::ELOOP, "/etc/loop"),
            (long.as_str(), Shape::Directory, libc::ENAMETOOLONG, long.as_str()),
            ("/etc/to-root", Shape::Directory, libc::EINVAL, "/"),
        ] {
            assert_eq!(error(targets(&tree).mount(Path::new(asked), shape)), (errno, at.to_owned()), "{asked}");
        }
        for name in ["dev", "sys"] {
            symlink("/data", tree.root.join(name)).unwrap();
            assert_eq!(targets(&tree).check_plain().unwrap_err().kind(), Kind::Invalid);
            fs::remove_file(tree.root.join(name)).unwrap();
        }
        targets(&tree).check_plain().unwrap();
    }

    #[test]
    fn what_a_mount_covers_is_not_the_images() {
        let tree = tree();
        symlink("/data", tree.root.join("link")).unwrap();
        symlink("/etc/elsewhere", tree.root.join("data/inner")).unwrap();
        let mut targets = targets(&tree);
        assert_eq!(targets.mount(Path::new("/dev"), Shape::Directory).unwrap(), Path::new("/dev"));
        assert_eq!(targets.mount(Path::new("/link"), Shape::Directory).unwrap(), Path::new("/data"));
        for (asked, place) in [("/link/inner", "/data/inner"), ("/data/new/deep", "/data/new/deep")] {
            assert_eq!(targets.mount(Path::new(asked), Shape::Directory).unwrap(), Path::new(place));
        }
        assert!(!tree.root.join("data/new").exists() && !tree.root.join("etc/elsewhere").exists());
        targets.mount(Path::new("/dev/volume"), Shape::Directory).unwrap();
        targets.device(Path::new("/dev/sda")).unwrap();
        let refused = targets.device(Path::new("/dev/volume/sda")).unwrap_err();
        assert!(matches!(&refused, TargetError::InVolume { .. }), "{refused}");
        assert_eq!(refused.kind(), Kind::Invalid);
    }
}
