//! Resolves image volumes: the directory of an image that a container sees, and its mount point in the container.
//!
//! libcontainer only mounts what is found here. The image cannot change, and no process of the container exists yet.

use libcontainer::oci_spec::runtime::{Mount, MountBuilder};
use nacelle_base::{Classify, FailureKind};
use nacelle_proto::agent::ImageVolume;
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

use crate::rootfs::{self, EntryKind, MountPoints, Owner, RootPathError};

/// Mounts of the container itself into which a link must not lead a volume.
const RESERVED_TARGETS: [&str; 2] = ["proc", "sys"];

/// Reasons an image volume cannot be mounted. Each text begins with the reason that kubelet knows.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the fields are what the message prints")]
pub enum ImageVolumeError {
    #[error("ImageVolumeMountFailed: the image of the volume at {} has no {sub_path:?}", at.display())]
    Missing { at: PathBuf, sub_path: String },
    #[error("ImageVolumeMountFailed: {sub_path:?} in the image of the volume at {} is no directory", at.display())]
    NoDirectory { at: PathBuf, sub_path: String },
    #[error(
        "ImageVolumeMountFailed: the sub-path {sub_path:?} of the volume at {} is not one: a relative path without .. is",
        at.display()
    )]
    SubPath { at: PathBuf, sub_path: String },
    #[error("ImageVolumeMountFailed: the mount path {} is not below /", at.display())]
    Path { at: PathBuf },
    #[error("ImageVolumeMountFailed: the container's {} is not a directory, or leads to none", at.display())]
    Occupied { at: PathBuf, source: Box<RootPathError> },
    #[error("ImageVolumeMountFailed: cannot create the container's {}", at.display())]
    Place { at: PathBuf, source: Box<RootPathError> },
    #[error("ImageVolumeMountFailed: {} leads to {}, a file system of the container's own", at.display(), to.display())]
    Reserved { at: PathBuf, to: PathBuf },
    #[error("ImageVolumeMountFailed: cannot inspect {sub_path:?} in the image of the volume at {}", at.display())]
    Look { at: PathBuf, sub_path: String, source: io::Error },
}

impl Classify for ImageVolumeError {
    fn kind(&self) -> FailureKind {
        match self {
            ImageVolumeError::Look { .. } => FailureKind::Internal,
            ImageVolumeError::Place { source, .. } => source.kind(),
            _ => FailureKind::Invalid,
        }
    }
}

/// Returns the mount of a volume, whose image is mounted at `image`, and makes its mount point in the root, owned by `owner`.
pub fn prepare_mount(root: &Path, image: &Path, volume: &ImageVolume, owner: Owner) -> Result<Mount, ImageVolumeError> {
    let source = find_source(image, volume)?;
    prepare_mount_point(root, Path::new(&volume.container_path), owner)?;
    // The builder fails only if a part is missing, and none is.
    let noexec = volume.noexec.then_some("noexec");
    let options: Vec<_> = ["bind", "ro", "nosuid", "nodev"].into_iter().chain(noexec).map(str::to_owned).collect();
    let mount = MountBuilder::default().source(source).destination(&volume.container_path).typ("bind").options(options);
    mount.build().map_err(|_missing| ImageVolumeError::Path { at: (&volume.container_path).into() })
}

/// Returns the path of the volume's directory in the image, without links.
fn find_source(image: &Path, volume: &ImageVolume) -> Result<PathBuf, ImageVolumeError> {
    let (at, sub_path) = (PathBuf::from(&volume.container_path), volume.sub_path.clone());
    let path = Path::new(&sub_path);
    if path.is_absolute() || path.components().any(|part| part.as_os_str() == OsStr::new("..")) {
        return Err(ImageVolumeError::SubPath { at, sub_path });
    }
    match rootfs::find(image, path) {
        Ok(Some((found, true))) => Ok(found),
        Ok(Some((_, false))) => Err(ImageVolumeError::NoDirectory { at, sub_path }),
        Ok(None) => Err(ImageVolumeError::Missing { at, sub_path }),
        Err(source) => Err(ImageVolumeError::Look { at, sub_path, source: source.source }),
    }
}

/// Makes the mount point if it is missing, and checks that no link leads it to a mount of the container itself.
fn prepare_mount_point(root: &Path, at: &Path, owner: Owner) -> Result<(), ImageVolumeError> {
    let plain = at.is_absolute() && at.components().count() > 1;
    if !plain || at.components().any(|part| part.as_os_str() == OsStr::new("..")) {
        return Err(ImageVolumeError::Path { at: at.to_owned() });
    }
    let place =
        MountPoints::open(root, owner).and_then(|points| points.prepare_path("mount target", at, EntryKind::Directory));
    let place = place.map_err(|source| match source.kind() {
        FailureKind::Invalid => ImageVolumeError::Occupied { at: at.to_owned(), source: Box::new(source) },
        _ => ImageVolumeError::Place { at: at.to_owned(), source: Box::new(source) },
    })?;
    let inside = place.strip_prefix("/").unwrap_or(&place);
    if inside.as_os_str().is_empty() || RESERVED_TARGETS.iter().any(|reserved| inside.starts_with(reserved)) {
        return Err(ImageVolumeError::Reserved { at: at.to_owned(), to: Path::new("/").join(inside) });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    fn volume(sub_path: &str, at: &str) -> ImageVolume {
        ImageVolume { partition: 1, sub_path: sub_path.into(), container_path: at.into(), noexec: false }
    }

    struct Pair {
        outer: tempfile::TempDir,
        image: PathBuf,
        root: PathBuf,
    }

    fn pair() -> Pair {
        let outer = tempfile::tempdir().unwrap();
        // Paths that are found have no links.
        let base = outer.path().canonicalize().unwrap();
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
        Pair { outer, image, root }
    }

    #[test]
    fn directories_of_the_image_are_found_and_nothing_else() {
        let Pair { outer: _kept, image, root } = pair();
        for (sub_path, found) in [
            ("", ""),
            (".", ""),
            ("etc", "etc"),
            ("etc/deep/", "etc/deep"),
            // Links lead where they would if the image were a root.
            ("absolute/deep", "etc/deep"),
            ("up", "data"),
        ] {
            let mount = prepare_mount(&root, &image, &volume(sub_path, "/mnt"), None).unwrap();
            assert_eq!(mount.source().as_deref(), Some(image.join(found).components().as_path()), "{sub_path}");
            assert_eq!(mount.options().as_deref().unwrap(), ["bind", "ro", "nosuid", "nodev"]);
        }
        let mount = prepare_mount(&root, &image, &ImageVolume { noexec: true, ..volume("", "/mnt") }, None).unwrap();
        assert_eq!(mount.options().as_deref().unwrap(), ["bind", "ro", "nosuid", "nodev", "noexec"]);
        for sub_path in ["none", "etc/none", "out", "out/x", "loop", "etc/passwd/x"] {
            let error = prepare_mount(&root, &image, &volume(sub_path, "/mnt"), None).unwrap_err();
            assert!(matches!(error, ImageVolumeError::Missing { .. }), "{sub_path}: {error}");
            assert_eq!(error.kind(), FailureKind::Invalid);
        }
        let error = prepare_mount(&root, &image, &volume("etc/passwd", "/mnt"), None).unwrap_err();
        assert!(matches!(error, ImageVolumeError::NoDirectory { .. }), "{error}");
        for sub_path in ["/etc", "../root", "etc/../etc", ".."] {
            let error = prepare_mount(&root, &image, &volume(sub_path, "/mnt"), None).unwrap_err();
            assert!(matches!(error, ImageVolumeError::SubPath { .. }), "{sub_path}: {error}");
            assert!(error.to_string().starts_with("ImageVolumeMountFailed: "), "{error}");
        }
    }

    #[test]
    fn an_image_mount_point_is_created_inside_the_root_file_system() {
        let Pair { outer, image, root } = pair();
        for (at, made) in [
            ("/a/b", "a/b"),
            ("/real", "real"),
            ("/etc/link", "real"),
            ("/etc/link/x", "real/x"),
            ("/dangling", "new/below"),
        ] {
            prepare_mount(&root, &image, &volume("etc", at), None).unwrap();
            assert!(root.join(made).is_dir(), "{at}");
        }
        for at in ["/file", "/file/below"] {
            let error = prepare_mount(&root, &image, &volume("", at), None).unwrap_err();
            assert!(matches!(error, ImageVolumeError::Occupied { .. }), "{at}: {error:?}");
        }
        for at in ["/to-proc", "/to-proc/x", "/to-root", "/proc/1"] {
            let error = prepare_mount(&root, &image, &volume("", at), None).unwrap_err();
            assert!(matches!(error, ImageVolumeError::Reserved { .. }), "{at}: {error}");
        }
        for at in ["/", "relative", "/a/../..", ""] {
            let error = prepare_mount(&root, &image, &volume("", at), None).unwrap_err();
            assert!(matches!(error, ImageVolumeError::Path { .. }), "{at}: {error}");
        }
        assert!(!outer.path().join("below").exists() && !outer.path().join("new").exists());
    }
}
