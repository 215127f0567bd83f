//! Mounts and removes the root file system of a container: an overlay of its image and its directory on the scratch disk.
//!
//! Paths in the root are resolved by `rootfs`, not here.

use nix::mount::{MsFlags, mount};
use nix::unistd::{Gid, Uid};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::mapped_mounts;
use crate::paths;
use crate::rootfs::{RootError, root_error};
use crate::userns::UserNs;

/// Returns the mount point of a container's root.
pub fn mount_point(id: &str) -> PathBuf {
    Path::new(paths::BUNDLES).join(id).join("rootfs")
}

/// Mounts the root of a container, an overlay whose writable layer is on the scratch disk, and returns the mount point. With a user
/// namespace, the owners of the image are mapped into it.
pub fn mount_root(id: &str, image: &Path, users: Option<&UserNs>) -> Result<PathBuf, RootError> {
    let mapped = users.map(|users| mapped_mounts::copy_mount(id, users, image, "image")).transpose()?;
    let image = mapped.as_deref().unwrap_or(image);
    let (upper, work) = (paths::upper_layer(id), paths::scratch_directory(id).join("work"));
    let root = mount_point(id);
    for path in [&upper, &work, &root] {
        fs::create_dir_all(path).map_err(root_error("create", path))?;
    }
    // The root directory has the mode and the owner of the image's.
    let original = fs::metadata(image).map_err(root_error("inspect", image))?;
    fs::set_permissions(&upper, original.permissions()).map_err(root_error("set the mode of", &upper))?;
    let (uid, gid) = (std::os::unix::fs::MetadataExt::uid(&original), std::os::unix::fs::MetadataExt::gid(&original));
    nix::unistd::chown(&upper, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))
        .map_err(root_error("chown", &upper))?;
    // Volatile: the disk does not outlive the VM, so nothing on it needs to be synced.
    let options =
        format!("lowerdir={},upperdir={},workdir={},volatile", image.display(), upper.display(), work.display());
    mount(Some("overlay"), &root, Some("overlay"), MsFlags::empty(), Some(options.as_str()))
        .map_err(root_error("mount the overlay at", &root))?;
    Ok(root)
}

/// Unmounts a container's root, and removes what the container wrote and its bundle. Succeeds if there are none.
pub fn remove_root(id: &str) -> Result<(), RootError> {
    mapped_mounts::unmount_all(&mapped_mounts::copies_directory(id))?;
    mapped_mounts::unmount_all(&mount_point(id))?;
    for path in
        [paths::scratch_directory(id), Path::new(paths::BUNDLES).join(id), Path::new(paths::CONTAINERS).join(id)]
    {
        match fs::remove_dir_all(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => other.map_err(root_error("remove", &path))?,
        }
    }
    Ok(())
}
