//! The root file system of a container: an overlay of its image and its directory on the scratch disk.
//!
//! Paths in the root are resolved by `rootfs`, not here.

use nix::mount::{MsFlags, mount};
use nix::unistd::{Gid, Uid};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::shown;
use crate::paths;
use crate::rootfs::{RootError, root_error};
use crate::userns::UserNs;

/// Where a container's root is mounted.
pub fn mount_point(id: &str) -> PathBuf {
    Path::new(paths::BUNDLES).join(id).join("rootfs")
}

/// Mounts the root of a container: what it writes goes to its own folder on the scratch disk. In a user namespace the
/// image's owners are numbers of it.
pub fn make(id: &str, image: &Path, users: Option<&UserNs>) -> Result<PathBuf, RootError> {
    let shown = users.map(|users| shown::show(id, users, image, "image")).transpose()?;
    let image = shown.as_deref().unwrap_or(image);
    let (upper, work) = (paths::upper_layer_of(id), paths::scratch_of(id).join("work"));
    let root = mount_point(id);
    for path in [&upper, &work, &root] {
        fs::create_dir_all(path).map_err(root_error("make", path))?;
    }
    // The root's own mode and owner are the image's.
    let original = fs::metadata(image).map_err(root_error("look at", image))?;
    fs::set_permissions(&upper, original.permissions()).map_err(root_error("set the mode of", &upper))?;
    let (uid, gid) = (std::os::unix::fs::MetadataExt::uid(&original), std::os::unix::fs::MetadataExt::gid(&original));
    nix::unistd::chown(&upper, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))
        .map_err(root_error("chown", &upper))?;
    // Volatile: the disk does not outlive the machine, so nothing on it must be synced.
    let options =
        format!("lowerdir={},upperdir={},workdir={},volatile", image.display(), upper.display(), work.display());
    mount(Some("overlay"), &root, Some("overlay"), MsFlags::empty(), Some(options.as_str()))
        .map_err(root_error("mount the overlay at", &root))?;
    Ok(root)
}

/// Unmounts a container's root and removes what it wrote; what is not there is no failure.
pub fn remove(id: &str) -> Result<(), RootError> {
    shown::unmount(&shown::folder(id))?;
    shown::unmount(&mount_point(id))?;
    for path in [paths::scratch_of(id), Path::new(paths::BUNDLES).join(id), Path::new(paths::CONTAINERS).join(id)] {
        match fs::remove_dir_all(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => other.map_err(root_error("remove", &path))?,
        }
    }
    Ok(())
}
