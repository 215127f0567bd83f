//! Mounts what a container has at and below `/dev`, in its mount namespace, after libcontainer has made the container and before its
//! program starts.
//!
//! The caller is a child of the zygote with one thread, which stays in that namespace.

use libcontainer::oci_spec::runtime::Mount;
use nacelle_base::mounts::{self, MountChange};
use nix::fcntl::OFlag;
use nix::sched::CloneFlags;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use crate::rootfs::{EntryKind, MountPoints, RootDir};

/// Makes the mounts in the mount namespace of the container's first process. No program of the container runs yet that could change
/// its paths.
pub(super) fn mount_late(pid: i32, late: &[Mount]) -> io::Result<()> {
    if late.is_empty() {
        return Ok(());
    }
    // The sources are paths of the agent's mount namespace.
    let copies = late.iter().map(copy_source).collect::<io::Result<Vec<_>>>()?;
    nix::sched::setns(File::open(format!("/proc/{pid}/ns/mnt"))?, CloneFlags::CLONE_NEWNS)?;
    for (mount, copy) in late.iter().zip(copies) {
        let copy = File::from(copy);
        let kind = if copy.metadata()?.is_dir() { EntryKind::Directory } else { EntryKind::File };
        // Mounted volumes may be shared with running containers: links that these make there must not lead out of this root.
        let points = MountPoints::open(Path::new("/"), None).map_err(io::Error::other)?;
        let at = points.prepare_path("mount target", mount.destination(), kind).map_err(io::Error::other)?;
        let target = RootDir::open(Path::new("/"))?.open_beneath(&at, OFlag::O_PATH)?;
        mounts::attach_to_fd(&copy, &target)?;
    }
    Ok(())
}

/// Returns a detached copy of the source of a mount, with the options of the mount.
fn copy_source(mount: &Mount) -> io::Result<OwnedFd> {
    let source = mount.source().as_deref().ok_or(io::ErrorKind::InvalidInput)?;
    let has = |word: &str| mount.options().iter().flatten().any(|option| option == word);
    let copy = mounts::clone_tree(source, has("rbind"))?;
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
    if attributes != 0 {
        mounts::change_attributes(&copy, false, &MountChange { attributes, clear, ..MountChange::default() })?;
    }
    if has("rro") {
        mounts::change_attributes(
            &copy,
            true,
            &MountChange { attributes: libc::MOUNT_ATTR_RDONLY, ..MountChange::default() },
        )?;
    }
    Ok(copy)
}
