//! Owns: image volumes: which folder of an image a container sees, and the place in the container where it does. Both
//! are resolved here, inside the image and inside the root; libcontainer only mounts what was found.
//! May use: `root`, `targets`. The image cannot change, and the root has no process yet.

use libcontainer::oci_spec::runtime::{Mount, MountBuilder};
use nacelle_base::{Classify, Kind};
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

use crate::rootfs::{self, EntryKind, MountPoints, Owner, RootPathError};

/// File systems of the container's own that a link must not lead a volume into.
const RESERVED: [&str; 2] = ["proc", "sys"];

/// An image that a container sees at a path of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    /// Its image.
    pub partition: u32,
    /// The folder of it that is seen; empty: all of it.
    pub sub_path: String,
    /// Where.
    pub container_path: PathBuf,
    /// Nothing is run from there.
    pub noexec: bool,
}

/// Why an image volume cannot be mounted. It begins with the word by which kubelet and people know this failure.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the fields are what the message prints")]
pub enum VolumeError {
    #[error("ImageVolumeMountFailed: the image of the volume at {} has no {sub_path:?}", at.display())]
    Missing { at: PathBuf, sub_path: String },
    #[error("ImageVolumeMountFailed: {sub_path:?} in the image of the volume at {} is no folder", at.display())]
    NoFolder { at: PathBuf, sub_path: String },
    #[error(
        "ImageVolumeMountFailed: the sub-path {sub_path:?} of the volume at {} is not one: a relative path without .. is",
        at.display()
    )]
    SubPath { at: PathBuf, sub_path: String },
    #[error("ImageVolumeMountFailed: {} is no path below / for a volume", at.display())]
    Path { at: PathBuf },
    #[error("ImageVolumeMountFailed: the container's {} is not a folder, or leads to none", at.display())]
    Occupied { at: PathBuf, source: Box<RootPathError> },
    #[error("ImageVolumeMountFailed: cannot make the container's {}", at.display())]
    Place { at: PathBuf, source: Box<RootPathError> },
    #[error("ImageVolumeMountFailed: {} leads to {}, a file system of the container's own", at.display(), to.display())]
    Reserved { at: PathBuf, to: PathBuf },
    #[error("ImageVolumeMountFailed: cannot look at {sub_path:?} in the image of the volume at {}", at.display())]
    Look { at: PathBuf, sub_path: String, source: io::Error },
}

impl Classify for VolumeError {
    fn kind(&self) -> Kind {
        match self {
            VolumeError::Look { .. } => Kind::Internal,
            VolumeError::Place { source, .. } => source.kind(),
            _ => Kind::Invalid,
        }
    }
}

/// The mount of a volume of the image that is mounted at `image`, into the root of a container; makes its place there,
/// as this owner's.
pub fn prepare(root: &Path, image: &Path, volume: &Volume, owner: Owner) -> Result<Mount, VolumeError> {
    let source = source(image, volume)?;
    make_place(root, &volume.container_path, owner)?;
    // Built of checked parts: the builder knows no other failure than a missing one.
    let noexec = volume.noexec.then_some("noexec");
    let options: Vec<_> = ["bind", "ro", "nosuid", "nodev"].into_iter().chain(noexec).map(str::to_owned).collect();
    let mount = MountBuilder::default().source(source).destination(&volume.container_path).typ("bind").options(options);
    mount.build().map_err(|_missing| VolumeError::Path { at: volume.container_path.clone() })
}

/// The folder of the image, without links.
fn source(image: &Path, volume: &Volume) -> Result<PathBuf, VolumeError> {
    let (at, sub_path) = (volume.container_path.clone(), volume.sub_path.clone());
    let path = Path::new(&sub_path);
    if path.is_absolute() || path.components().any(|part| part.as_os_str() == OsStr::new("..")) {
        return Err(VolumeError::SubPath { at, sub_path });
    }
    match rootfs::find(image, path) {
        Ok(Some((found, true))) => Ok(found),
        Ok(Some((_, false))) => Err(VolumeError::NoFolder { at, sub_path }),
        Ok(None) => Err(VolumeError::Missing { at, sub_path }),
        Err(source) => Err(VolumeError::Look { at, sub_path, source: source.source }),
    }
}

/// Makes the folder at which a volume is mounted, where missing, and looks where it lies.
fn make_place(root: &Path, at: &Path, owner: Owner) -> Result<(), VolumeError> {
    let plain = at.is_absolute() && at.components().count() > 1;
    if !plain || at.components().any(|part| part.as_os_str() == OsStr::new("..")) {
        return Err(VolumeError::Path { at: at.to_owned() });
    }
    let place =
        MountPoints::open(root, owner).and_then(|points| points.prepare_path("mount target", at, EntryKind::Directory));
    let place = place.map_err(|source| match source.kind() {
        Kind::Invalid => VolumeError::Occupied { at: at.to_owned(), source: Box::new(source) },
        _ => VolumeError::Place { at: at.to_owned(), source: Box::new(source) },
    })?;
    let inside = place.strip_prefix("/").unwrap_or(&place);
    if inside.as_os_str().is_empty() || RESERVED.iter().any(|reserved| inside.starts_with(reserved)) {
        return Err(VolumeError::Reserved { at: at.to_owned(), to: Path::new("/").join(inside) });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    fn volume(sub_path: &str, at: &str) -> Volume {
        Volume { partition: 1, sub_path: sub_path.into(), container_path: at.into(), noexec: false }
    }

    struct Pair {
        folder: tempfile::TempDir,
        image: PathBuf,
        root: PathBuf,
    }

    fn pair() -> Pair {
        let folder = tempfile::tempdir().unwrap();
        // Found paths have no links.
        let base = folder.path().canonicalize().unwrap();
        let (image, root) = (base.join("image"), base.join("root"));
        for path in ["image/etc/deep", "image/data", "root/etc", "root/proc", "root/real", "secret"] {
            fs::create_dir_all(base.join(path)).unwrap();
        }
        fs::write(image.join("etc/passwd"), "").unwrap();
        symlink("/etc", image.join("absolute")).unwrap();
        symlink("../../../secret", image.join("out")).unwrap();
        symlink("../../data", image.join("up")).unwrap();
        symlink("loop", image.join("loop")).unwrap();
        fs::write(root.join("file"), "").unwrap();
        symlink("/proc", root.join("to-proc")).unwrap();
        symlink("/", root.join("to-root")).unwrap();
        symlink("../real", root.join("etc/link")).unwrap();
        symlink("/new/below", root.join("dangling")).unwrap();
        Pair { folder, image, root }
    }

    #[test]
    fn folders_of_the_image_are_found_and_nothing_else() {
        let Pair { folder: _kept, image, root } = pair();
        for (sub_path, found) in [
            ("", ""),
            (".", ""),
            ("etc", "etc"),
            ("etc/deep/", "etc/deep"),
            // Links lead where they would if the image were a root.
            ("absolute/deep", "etc/deep"),
            ("up", "data"),
        ] {
            let mount = prepare(&root, &image, &volume(sub_path, "/mnt"), None).unwrap();
            assert_eq!(mount.source().as_deref(), Some(image.join(found).components().as_path()), "{sub_path}");
            assert_eq!(mount.options().as_deref().unwrap(), ["bind", "ro", "nosuid", "nodev"]);
        }
        let mount = prepare(&root, &image, &Volume { noexec: true, ..volume("", "/mnt") }, None).unwrap();
        assert_eq!(mount.options().as_deref().unwrap(), ["bind", "ro", "nosuid", "nodev", "noexec"]);
        for sub_path in ["none", "etc/none", "out", "out/x", "loop", "etc/passwd/x"] {
            let error = prepare(&root, &image, &volume(sub_path, "/mnt"), None).unwrap_err();
            assert!(matches!(error, VolumeError::Missing { .. }), "{sub_path}: {error}");
            assert_eq!(error.kind(), Kind::Invalid);
        }
        let error = prepare(&root, &image, &volume("etc/passwd", "/mnt"), None).unwrap_err();
        assert!(matches!(error, VolumeError::NoFolder { .. }), "{error}");
        for sub_path in ["/etc", "../root", "etc/../etc", ".."] {
            let error = prepare(&root, &image, &volume(sub_path, "/mnt"), None).unwrap_err();
            assert!(matches!(error, VolumeError::SubPath { .. }), "{sub_path}: {error}");
            assert!(error.to_string().starts_with("ImageVolumeMountFailed: "), "{error}");
        }
    }

    #[test]
    fn its_place_is_made_inside_the_root_and_in_no_other_file_system() {
        let Pair { folder, image, root } = pair();
        for (at, made) in [
            ("/a/b", "a/b"),
            ("/real", "real"),
            ("/etc/link", "real"),
            ("/etc/link/x", "real/x"),
            ("/dangling", "new/below"),
        ] {
            prepare(&root, &image, &volume("etc", at), None).unwrap();
            assert!(root.join(made).is_dir(), "{at}");
        }
        for at in ["/file", "/file/below"] {
            let error = prepare(&root, &image, &volume("", at), None).unwrap_err();
            assert!(matches!(error, VolumeError::Occupied { .. }), "{at}: {error:?}");
        }
        for at in ["/to-proc", "/to-proc/x", "/to-root", "/proc/1"] {
            let error = prepare(&root, &image, &volume("", at), None).unwrap_err();
            assert!(matches!(error, VolumeError::Reserved { .. }), "{at}: {error}");
        }
        for at in ["/", "relative", "/a/../..", ""] {
            let error = prepare(&root, &image, &volume("", at), None).unwrap_err();
            assert!(matches!(error, VolumeError::Path { .. }), "{at}: {error}");
        }
        assert!(!folder.path().join("below").exists() && !folder.path().join("new").exists());
    }
}
