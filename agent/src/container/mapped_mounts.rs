//! Copies mounts for a container to mount: images with owners mapped into the pod's user namespace, the agent's sysfs, and parts of
//! emptyDir volumes.
//!
//! The copies are below the container's bundle, on a tmpfs of their own, until the container has mounted them. Volumes of the node
//! come with their owners mapped already, if they are to be.

use libcontainer::oci_spec::runtime::Mount;
use nacelle_base::mounts::{self, MountChange};
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use crate::paths;
use crate::rootfs::{RootError, root_error};
use crate::userns::UserNs;

/// The agent's sysfs. Its copy is without the cgroup file system that is mounted in it.
pub const SYS: &str = "/sys";

/// Returns the directory of a container's copies. It must be unmounted before it is removed: the files in the copies belong to
/// images and volumes.
pub fn copies_directory(id: &str) -> PathBuf {
    Path::new(paths::BUNDLES).join(id).join("shown")
}

/// Copies the mount at `source` to the container's directory as `name`, with owners mapped into the user namespace. Owners of the
/// agent's sysfs are not mapped: all its files belong to root.
pub fn copy_mount(id: &str, users: &UserNs, source: &Path, name: &str) -> Result<PathBuf, RootError> {
    let action = "mount in the container, with the owners of its user namespace,";
    let directory = make_directory(id)?;
    let of_image = source != Path::new(SYS);
    let copy = mounts::clone_tree(source, of_image).map_err(root_error(action, source))?;
    if of_image {
        let mapped = MountChange { user_namespace: Some(users.as_fd()), ..MountChange::default() };
        mounts::change_attributes(&copy, false, &mapped).map_err(root_error(action, source))?;
    }
    let target = directory.join(name);
    let copy = File::from(copy);
    let is_directory = copy.metadata().map_err(root_error("inspect", source))?.is_dir();
    let created = if is_directory { fs::create_dir(&target) } else { File::create_new(&target).map(drop) };
    created.and_then(|()| mounts::attach(&copy, &target)).map_err(root_error(action, source))?;
    Ok(target)
}

/// Attaches a detached mount of a directory to the container's directory as `name`.
pub fn attach_mount(id: &str, mount: impl AsFd, name: &str) -> Result<PathBuf, RootError> {
    let target = make_directory(id)?.join(name);
    let result = fs::create_dir(&target).and_then(|()| mounts::attach(mount, &target));
    result.map_err(root_error("mount in the container", &target))?;
    Ok(target)
}

/// Returns the container's directory, which it makes, on a tmpfs, if it is missing.
fn make_directory(id: &str) -> Result<PathBuf, RootError> {
    let directory = copies_directory(id);
    if !directory.exists() {
        fs::create_dir_all(&directory).map_err(root_error("create", &directory))?;
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        mount(Some("tmpfs"), &directory, Some("tmpfs"), flags, Some("mode=755,size=64k"))
            .map_err(root_error("mount a tmpfs at", &directory))?;
    }
    Ok(directory)
}

/// Replaces the sources of bind mounts of images and of the agent's sysfs by copies with mapped owners.
pub fn map_sources(id: &str, users: &UserNs, mounts: &mut [Mount]) -> Result<(), RootError> {
    for (number, mount) in mounts.iter_mut().enumerate() {
        let Some(source) = mount.source().clone() else { continue };
        let needs_copy = source.starts_with(paths::IMAGES) || source == Path::new(SYS);
        if mount.typ().as_deref() == Some("bind") && needs_copy {
            mount.set_source(Some(copy_mount(id, users, &source, &number.to_string())?));
        }
    }
    Ok(())
}

/// Unmounts all copies of a container. Succeeds if there are none.
pub fn unmount_copies(id: &str) -> Result<(), RootError> {
    unmount_all(&copies_directory(id))
}

/// Unmounts everything that is mounted at and below a path.
pub(super) fn unmount_all(path: &Path) -> Result<(), RootError> {
    loop {
        match umount2(path, MntFlags::MNT_DETACH) {
            Ok(()) => {}
            Err(Errno::EINVAL | Errno::ENOENT) => return Ok(()),
            Err(error) => return Err(root_error("unmount", path)(error)),
        }
    }
}
