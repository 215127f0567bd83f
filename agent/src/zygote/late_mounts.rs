//! Mounts what a container has at and below `/dev`, in its mount namespace, after libcontainer has made the container and before its
//! program starts.
//!
//! The caller is a child of the zygote with one thread, which stays in that namespace.

use libcontainer::oci_spec::runtime::Mount;
use nacelle_base::mounts::{self, MountChange};
use nacelle_base::{Classify, FailureKind};
use nix::fcntl::OFlag;
use nix::sched::CloneFlags;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use crate::rootfs::{EntryKind, MountPoints, RootDir, RootError, RootPathError, root_error};

/// Reasons a late mount cannot be made.
#[derive(Debug, thiserror::Error)]
pub(super) enum LateMountError {
    /// A system call failed.
    #[error(transparent)]
    Root(#[from] RootError),
    /// The mount target is not usable.
    #[error(transparent)]
    Target(#[from] RootPathError),
}

impl LateMountError {
    /// Returns whether the request is the cause, not the agent.
    pub(super) fn is_of_request(&self) -> bool {
        matches!(self, LateMountError::Target(error) if error.kind() == FailureKind::Invalid)
    }
}

/// Makes the mounts in the mount namespace of the container's first process. No program of the container runs yet that could change
/// its paths.
pub(super) fn mount_late(pid: i32, late: &[Mount]) -> Result<(), LateMountError> {
    if late.is_empty() {
        return Ok(());
    }
    // The sources are paths of the agent's mount namespace.
    let copies = late.iter().map(copy_source).collect::<Result<Vec<_>, _>>()?;
    let namespace = PathBuf::from(format!("/proc/{pid}/ns/mnt"));
    let file = File::open(&namespace).map_err(root_error("open", &namespace))?;
    nix::sched::setns(file, CloneFlags::CLONE_NEWNS).map_err(root_error("enter", &namespace))?;
    for (mount, copy) in late.iter().zip(copies) {
        let (copy, destination) = (File::from(copy), mount.destination());
        let metadata = copy.metadata().map_err(root_error("inspect what is mounted at", destination))?;
        let kind = if metadata.is_dir() { EntryKind::Directory } else { EntryKind::File };
        // Mounted volumes may be shared with running containers: links that these make there must not lead out of this root.
        let root = Path::new("/");
        let at = MountPoints::open(root, None)?.prepare_path("mount target", destination, kind)?;
        let target = RootDir::open(root).and_then(|root| root.open_beneath(&at, OFlag::O_PATH));
        let target = target.map_err(root_error("open the mount target", &at))?;
        mounts::attach_to_fd(&copy, &target).map_err(root_error("mount at", destination))?;
    }
    Ok(())
}

/// Returns a detached copy of the source of a mount, with the options of the mount.
fn copy_source(mount: &Mount) -> Result<OwnedFd, RootError> {
    let missing = || root_error("find the source of the mount at", mount.destination())(io::ErrorKind::InvalidInput);
    let source = mount.source().as_deref().ok_or_else(missing)?;
    let has = |word: &str| mount.options().iter().flatten().any(|option| option == word);
    let copy = mounts::clone_tree(source, has("rbind")).map_err(root_error("copy the mount of", source))?;
    let mut attributes = 0;
    for (word, attribute) in [
        ("ro", libc::MOUNT_ATTR_RDONLY),
        ("nosuid", libc::MOUNT_ATTR_NOSUID),
        ("nodev", libc::MOUNT_ATTR_NODEV),
        ("noexec", libc::MOUNT_ATTR_NOEXEC),
        ("noatime", libc::MOUNT_ATTR_NOATIME),
    ] {
        if has(word) {
            attributes |= attribute;
        }
    }
    let clear = if has("noatime") { libc::MOUNT_ATTR__ATIME } else { 0 };
    let set = |recursive, change: MountChange| {
        mounts::change_attributes(&copy, recursive, &change).map_err(root_error("set the mount options of", source))
    };
    if attributes != 0 {
        set(false, MountChange { attributes, clear, ..MountChange::default() })?;
    }
    if has("rro") {
        set(true, MountChange { attributes: libc::MOUNT_ATTR_RDONLY, ..MountChange::default() })?;
    }
    Ok(copy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use libcontainer::oci_spec::runtime::MountBuilder;

    #[test]
    fn a_late_mount_that_fails_is_named() {
        let mount = MountBuilder::default().source("/no/such/source").destination("/dev/x").build().unwrap();
        let error = mount_late(1, &[mount]).unwrap_err();
        assert_eq!(error.to_string(), "cannot copy the mount of /no/such/source");
        assert!(!error.is_of_request());
        let target = MountPoints::open(Path::new("/"), None).unwrap();
        let target = target.prepare_path("mount target", Path::new("/proc/version/x"), EntryKind::File).unwrap_err();
        assert!(LateMountError::from(target).is_of_request());
    }
}
