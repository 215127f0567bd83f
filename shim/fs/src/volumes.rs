//! Implements the daemon's side: mounts volumes of the node into the file-server process, and unmounts them. The process
//! itself mounts nothing, and the pod process has no influence.
//!
//! Each call enters the other mount namespace on a short-lived thread of its own. The calls block.

use crate::error::ShareError;
use crate::process::{COPIED_IN_ROOT, SHARE_ROOT, WRITABLE_ROOT};
use nacelle_base::mounts::{self, MountChange};
use nacelle_base::share::DIRECTORY;
use nacelle_base::user_namespace::create_user_namespace;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The process that holds a pod's volumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VolumeTarget {
    /// The file-server process: the guest finds the n-th volume of a container at `CONTAINER/n` below the share's root.
    Share,
    /// The file-server process, for copied-in volumes and socket volumes: the n-th of a container is at the path `CONTAINER/n`, which the
    /// guest cannot reach. Copies that were made stay when the volumes are unmounted.
    CopiedIn,
    /// The agent of a pod without a guest, which finds the volumes at the same path as in a guest: `nacelle_base::share::DIRECTORY`.
    Agent,
}

/// One directory or file of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeToMount {
    /// The path, without symbolic links.
    pub path: PathBuf,
    /// The write access of the pod.
    pub access: VolumeAccess,
    /// The propagation of later mounts below the volume.
    pub propagation: Propagation,
    /// Reading files of the volume itself does not update their access times.
    pub no_access_times: bool,
    /// The mapping of file owners; it does not apply to mounts below the volume.
    pub owners: Option<Owners>,
}

/// The write access of a pod to a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VolumeAccess {
    /// The volume and all mounts below it are writable.
    ReadWrite,
    /// Only mounts below the volume are writable.
    ReadOnly,
    /// Nothing is writable (mount_setattr(2) with `AT_RECURSIVE`).
    RecursiveReadOnly,
}

/// The propagation of mounts that are made below a volume later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Propagation {
    /// No mount is propagated.
    Private,
    /// Mounts of the node are propagated to the volume.
    FromNode,
    /// Mounts are propagated in both directions.
    BothWays,
}

/// The mapping of file owners: files of the users 0 to `count` - 1 of the node appear as files of `first` to `first + count - 1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owners {
    /// `first` and `count` of user ids.
    pub users: (u32, u32),
    /// `first` and `count` of group ids.
    pub groups: (u32, u32),
}

impl VolumeTarget {
    /// Returns the directory in which the volumes are mounted, and the one in which mount points are created.
    fn directories(self) -> (&'static Path, &'static Path) {
        let (root, mount_points) = match self {
            VolumeTarget::Share => (SHARE_ROOT, WRITABLE_ROOT),
            VolumeTarget::CopiedIn => (COPIED_IN_ROOT, COPIED_IN_ROOT),
            VolumeTarget::Agent => (DIRECTORY, DIRECTORY),
        };
        (Path::new(root), Path::new(mount_points))
    }

    /// Returns the mount attributes of all volumes. Device nodes are disabled where there is a guest, because a device
    /// number means another device there.
    fn mount_attributes(self) -> u64 {
        match self {
            VolumeTarget::Share => libc::MOUNT_ATTR_NODEV,
            VolumeTarget::CopiedIn => libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NOEXEC,
            VolumeTarget::Agent => 0,
        }
    }
}

/// Mounts the volumes of a container in the process of this pidfd: all, or none.
pub fn mount_volumes(
    process: BorrowedFd,
    target: VolumeTarget,
    container: &str,
    volumes: &[VolumeToMount],
) -> Result<(), ShareError> {
    let mounts = volumes.iter().map(|volume| clone_mounts(volume, target)).collect::<Result<Vec<_>, _>>()?;
    let result = run_in_mount_namespace(process, || {
        let mut mounted = Ok(());
        for (number, (volume, (mount, directory))) in volumes.iter().zip(&mounts).enumerate() {
            let relative_path = Path::new(container).join(number.to_string());
            mounted = attach_mount(target, mount.as_fd(), *directory, &relative_path)
                .map_err(volume_error("mount", &volume.path));
            if mounted.is_err() {
                // The caller needs the first error.
                let _ = unmount_container_volumes(target, container);
                break;
            }
        }
        mounted
    });
    result
        .map_err(|source| ShareError::Step { what: "enter the mount namespace of the file-server process", source })?
}

/// Unmounts the volumes of a container; succeeds if it has none. Files that the guest has open stay open for it, and mounts
/// that containers have propagated to the node stay there.
pub fn unmount_volumes(process: BorrowedFd, target: VolumeTarget, container: &str) -> Result<(), ShareError> {
    let unmounted = run_in_mount_namespace(process, || unmount_container_volumes(target, container))
        .and_then(|unmounted| unmounted);
    unmounted.map_err(|source| ShareError::Unmount { container: container.to_owned(), source })
}

fn volume_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ShareError {
    let path = path.to_owned();
    move |source| ShareError::Volume { what, path, source }
}

/// Copies a volume's mounts; also returns whether the volume is a directory.
fn clone_mounts(volume: &VolumeToMount, target: VolumeTarget) -> Result<(OwnedFd, bool), ShareError> {
    check_propagation(volume)?;
    let tree = mounts::clone_tree(&volume.path, true).map_err(volume_error("open", &volume.path))?;
    let metadata = File::from(tree.try_clone().map_err(volume_error("open", &volume.path))?).metadata();
    let directory = metadata.map_err(volume_error("open", &volume.path))?.is_dir();
    let propagation = match volume.propagation {
        Propagation::Private => libc::MS_PRIVATE,
        Propagation::FromNode => libc::MS_SLAVE,
        Propagation::BothWays => 0,
    };
    let (recursive, top) = match volume.access {
        VolumeAccess::ReadWrite => (0, 0),
        VolumeAccess::ReadOnly => (0, libc::MOUNT_ATTR_RDONLY),
        VolumeAccess::RecursiveReadOnly => (libc::MOUNT_ATTR_RDONLY, libc::MOUNT_ATTR_RDONLY),
    };
    let recursive =
        MountChange { attributes: target.mount_attributes() | recursive, propagation, ..MountChange::default() };
    let mut top = MountChange { attributes: top, ..MountChange::default() };
    if volume.no_access_times {
        top.attributes |= libc::MOUNT_ATTR_NOATIME;
        top.clear = libc::MOUNT_ATTR__ATIME;
    }
    let changed =
        mounts::change_attributes(&tree, true, &recursive).and_then(|()| mounts::change_attributes(&tree, false, &top));
    changed.map_err(volume_error("mount", &volume.path))?;
    if let Some(owners) = volume.owners {
        let id_map = |(first, count)| format!("0 {first} {count}");
        let namespace = create_user_namespace(&id_map(owners.users), &id_map(owners.groups));
        let mapped = namespace.and_then(|namespace| {
            mounts::change_attributes(
                &tree,
                false,
                &MountChange { user_namespace: Some(namespace.as_fd()), ..MountChange::default() },
            )
        });
        mapped.map_err(|source| ShareError::Owners { path: volume.path.clone(), source })?;
    }
    Ok((tree, directory))
}

/// Rejects a volume that requires propagation if its mount does not propagate.
fn check_propagation(volume: &VolumeToMount) -> Result<(), ShareError> {
    if volume.propagation == Propagation::Private {
        return Ok(());
    }
    let (mount_point, shared, slave) =
        find_mount_of(&volume.path).map_err(volume_error("find the mount of", &volume.path))?;
    let (allowed, needed) = match volume.propagation {
        Propagation::BothWays => (shared, "shared"),
        _ => (shared || slave, "shared, nor a slave of a shared mount"),
    };
    if allowed { Ok(()) } else { Err(ShareError::NotShared { path: volume.path.clone(), mount_point, needed }) }
}

/// Returns the mount point of the mount that a path lies on, and whether it is shared and whether it is a slave
/// (proc_pid_mountinfo(5)).
fn find_mount_of(path: &Path) -> io::Result<(PathBuf, bool, bool)> {
    let file = File::options().read(true).custom_flags(libc::O_PATH).open(path)?;
    let fdinfo = fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd()))?;
    let id = fdinfo.lines().find_map(|line| line.strip_prefix("mnt_id:")).map(str::trim);
    let mounts = fs::read("/proc/self/mountinfo")?;
    let mounts = String::from_utf8_lossy(&mounts);
    let found = mounts.lines().find(|line| line.split(' ').next() == id).ok_or(io::ErrorKind::NotFound)?;
    let mount_point = found.split(' ').nth(4).unwrap_or_default();
    let has = |tag| found.split(' ').skip(6).take_while(|field| *field != "-").any(|field| field.starts_with(tag));
    Ok((mount_point.into(), has("shared:"), has("master:")))
}

fn attach_mount(target: VolumeTarget, tree: BorrowedFd, directory: bool, relative_path: &Path) -> io::Result<()> {
    let (root, mount_points) = target.directories();
    let mount_point = mount_points.join(relative_path);
    create_directory(mount_points)?;
    create_directory(mount_point.parent().unwrap_or(mount_points))?;
    if directory {
        create_directory(&mount_point)?;
    } else {
        File::create(&mount_point)?;
    }
    mounts::attach(tree, &root.join(relative_path))
}

/// Creates a directory of mode 0755, independent of this process's umask.
fn create_directory(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        created => created.and_then(|()| fs::set_permissions(path, Permissions::from_mode(0o755))),
    }
}

fn unmount_container_volumes(target: VolumeTarget, container: &str) -> io::Result<()> {
    let (root, mount_points) = target.directories();
    let volumes = match fs::read_dir(root.join(container)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        volumes => volumes?.collect::<Result<Vec<_>, _>>()?,
    };
    let mount_points = mount_points.join(container);
    for volume in volumes {
        let (path, none) = (volume.path(), None::<&str>);
        // Unmounting must not propagate to the node's mounts below the volume.
        let made_private = mount(none, &path, none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none);
        match made_private.and_then(|()| umount2(&path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW)) {
            Ok(()) | Err(nix::Error::EINVAL) => {} // nothing is mounted there
            Err(error) => return Err(error.into()),
        }
        let mount_point = mount_points.join(volume.file_name());
        // Removes only the mount point, never recursively: if something were still mounted there, it would be the node's files.
        if volume.file_type()?.is_dir() { fs::remove_dir(mount_point)? } else { fs::remove_file(mount_point)? }
    }
    fs::remove_dir(mount_points)
}

/// Runs a closure in the mount namespace of a process.
fn run_in_mount_namespace<T: Send>(process: BorrowedFd, work: impl FnOnce() -> T + Send) -> io::Result<T> {
    let enter_namespace = || {
        // setns changes root and working directory, so the thread needs its own.
        unshare(CloneFlags::CLONE_FS)?;
        setns(process, CloneFlags::CLONE_NEWNS)
    };
    std::thread::scope(|scope| {
        let run = move || Ok(enter_namespace().map(|()| work())?);
        let thread = std::thread::Builder::new().name("volumes".into()).spawn_scoped(scope, run)?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
