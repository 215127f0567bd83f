//! Implements the daemon's side: mounts volumes of the node into the file-server process, and unmounts them. The process
//! itself mounts nothing, and the pod process has no influence.
//!
//! Each call enters the other mount namespace on a short-lived thread of its own. The calls block.

use crate::error::ShareError;
use crate::room::{PLACES, PUSHED, SHOWN};
use crate::sys;
use nacelle_base::mounts::{self, Change};
use nacelle_base::share::DIRECTORY;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The process that holds a pod's volumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taker {
    /// The file-server process: the guest finds the n-th volume of a container at `CONTAINER/n` below the share's root.
    Share,
    /// The file-server process, for copied-in volumes: the n-th of a container is at the place `CONTAINER/n`, which the
    /// guest cannot reach. Copies that were made stay when the volumes are unmounted.
    Pushed,
    /// The agent of a pod without a guest, which finds the volumes at the same path as in a guest: `nacelle_base::share::DIRECTORY`.
    Agent,
}

/// One directory or file of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
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

impl Taker {
    /// Returns the directory in which the volumes are mounted, and the one in which mount points are created.
    fn directories(self) -> (&'static Path, &'static Path) {
        let (shown, places) = match self {
            Taker::Share => (SHOWN, PLACES),
            Taker::Pushed => (PUSHED, PUSHED),
            Taker::Agent => (DIRECTORY, DIRECTORY),
        };
        (Path::new(shown), Path::new(places))
    }

    /// Returns the mount attributes of all volumes. Device nodes are disabled where there is a guest, because a device
    /// number means another device there.
    fn attributes(self) -> u64 {
        match self {
            Taker::Share => libc::MOUNT_ATTR_NODEV,
            Taker::Pushed => libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NOEXEC,
            Taker::Agent => 0,
        }
    }
}

/// Mounts the volumes of a container in the process of this pidfd: all, or none.
pub fn attach(process: BorrowedFd, taker: Taker, container: &str, volumes: &[Volume]) -> Result<(), ShareError> {
    let trees = volumes.iter().map(|volume| copy(volume, taker)).collect::<Result<Vec<_>, _>>()?;
    let done = inside(process, || {
        let mut done = Ok(());
        for (number, (volume, (tree, directory))) in volumes.iter().zip(&trees).enumerate() {
            let place = Path::new(container).join(number.to_string());
            done = place_tree(taker, tree.as_fd(), *directory, &place).map_err(failed("mount", &volume.path));
            if done.is_err() {
                // The caller needs the first error.
                let _ = take_back(taker, container);
                break;
            }
        }
        done
    });
    done.map_err(|source| ShareError::Step { what: "be entered", source })?
}

/// Unmounts the volumes of a container; succeeds if it has none. Files that the guest has open stay open for it, and mounts
/// that containers have propagated to the node stay there.
pub fn detach(process: BorrowedFd, taker: Taker, container: &str) -> Result<(), ShareError> {
    let taken = inside(process, || take_back(taker, container)).and_then(|taken| taken);
    taken.map_err(|source| ShareError::Detach { container: container.to_owned(), source })
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ShareError {
    let path = path.to_owned();
    move |source| ShareError::Volume { what, path, source }
}

/// Copies a volume's mounts; also returns whether the volume is a directory.
fn copy(volume: &Volume, taker: Taker) -> Result<(OwnedFd, bool), ShareError> {
    check(volume)?;
    let tree = mounts::copy(&volume.path, true).map_err(failed("open", &volume.path))?;
    let metadata = File::from(tree.try_clone().map_err(failed("open", &volume.path))?).metadata();
    let directory = metadata.map_err(failed("open", &volume.path))?.is_dir();
    let propagation = match volume.propagation {
        Propagation::Private => libc::MS_PRIVATE,
        Propagation::FromNode => libc::MS_SLAVE,
        Propagation::BothWays => 0,
    };
    let (all, own) = match volume.access {
        VolumeAccess::ReadWrite => (0, 0),
        VolumeAccess::ReadOnly => (0, libc::MOUNT_ATTR_RDONLY),
        VolumeAccess::RecursiveReadOnly => (libc::MOUNT_ATTR_RDONLY, libc::MOUNT_ATTR_RDONLY),
    };
    let all = Change { attributes: taker.attributes() | all, propagation, ..Change::default() };
    let mut own = Change { attributes: own, ..Change::default() };
    if volume.no_access_times {
        own.attributes |= libc::MOUNT_ATTR_NOATIME;
        own.without = libc::MOUNT_ATTR__ATIME;
    }
    let set = mounts::change(&tree, true, &all).and_then(|()| mounts::change(&tree, false, &own));
    set.map_err(failed("mount", &volume.path))?;
    if let Some(owners) = volume.owners {
        let map = |(first, count)| format!("0 {first} {count}");
        let users = sys::user_namespace(&map(owners.users), &map(owners.groups));
        let mapped = users.and_then(|users| {
            mounts::change(&tree, false, &Change { users: Some(users.as_fd()), ..Change::default() })
        });
        mapped.map_err(|source| ShareError::Owners { path: volume.path.clone(), source })?;
    }
    Ok((tree, directory))
}

/// Rejects a volume that requires propagation if its mount does not propagate.
fn check(volume: &Volume) -> Result<(), ShareError> {
    if volume.propagation == Propagation::Private {
        return Ok(());
    }
    let (at, shared, slave) = lies_on(&volume.path).map_err(failed("find the mount of", &volume.path))?;
    let (good, needed) = match volume.propagation {
        Propagation::BothWays => (shared, "shared"),
        _ => (shared || slave, "shared, nor a slave of one that is"),
    };
    if good { Ok(()) } else { Err(ShareError::NotShared { path: volume.path.clone(), at, needed }) }
}

/// Returns the mount point of the mount that a path lies on, and whether it is shared and whether it is a slave
/// (proc_pid_mountinfo(5)).
fn lies_on(path: &Path) -> io::Result<(PathBuf, bool, bool)> {
    let file = File::options().read(true).custom_flags(libc::O_PATH).open(path)?;
    let about = fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd()))?;
    let id = about.lines().find_map(|line| line.strip_prefix("mnt_id:")).map(str::trim);
    let mounts = fs::read("/proc/self/mountinfo")?;
    let mounts = String::from_utf8_lossy(&mounts);
    let found = mounts.lines().find(|line| line.split(' ').next() == id).ok_or(io::ErrorKind::NotFound)?;
    let at = found.split(' ').nth(4).unwrap_or_default();
    let has = |tag| found.split(' ').skip(6).take_while(|field| *field != "-").any(|field| field.starts_with(tag));
    Ok((at.into(), has("shared:"), has("master:")))
}

fn place_tree(taker: Taker, tree: BorrowedFd, directory: bool, place: &Path) -> io::Result<()> {
    let (shown, places) = taker.directories();
    let place_for_it = places.join(place);
    make_directory(places)?;
    make_directory(place_for_it.parent().unwrap_or(places))?;
    if directory {
        make_directory(&place_for_it)?;
    } else {
        File::create(&place_for_it)?;
    }
    mounts::place(tree, &shown.join(place))
}

/// Creates a directory of mode 0755, independent of this process's umask.
fn make_directory(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made.and_then(|()| fs::set_permissions(path, Permissions::from_mode(0o755))),
    }
}

fn take_back(taker: Taker, container: &str) -> io::Result<()> {
    let (shown, places) = taker.directories();
    let volumes = match fs::read_dir(shown.join(container)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        volumes => volumes?.collect::<Result<Vec<_>, _>>()?,
    };
    let places = places.join(container);
    for volume in volumes {
        let (at, none) = (volume.path(), None::<&str>);
        // Unmounting must not propagate to the node's mounts below the volume.
        let alone = mount(none, &at, none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none);
        match alone.and_then(|()| umount2(&at, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW)) {
            Ok(()) | Err(nix::Error::EINVAL) => {} // nothing is mounted there
            Err(error) => return Err(error.into()),
        }
        let place = places.join(volume.file_name());
        // Removes only the mount point, never recursively: if something were still mounted there, it would be the node's files.
        if volume.file_type()?.is_dir() { fs::remove_dir(place)? } else { fs::remove_file(place)? }
    }
    fs::remove_dir(places)
}

/// Runs a closure in the mount namespace of a process.
fn inside<T: Send>(process: BorrowedFd, work: impl FnOnce() -> T + Send) -> io::Result<T> {
    let enter = || {
        // setns changes root and working directory, so the thread needs its own.
        unshare(CloneFlags::CLONE_FS)?;
        setns(process, CloneFlags::CLONE_NEWNS)
    };
    std::thread::scope(|scope| {
        let entered = move || Ok(enter().map(|()| work())?);
        let thread = std::thread::Builder::new().name("volumes".into()).spawn_scoped(scope, entered)?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
