//! Owns: the daemon's hand: mounting volumes of the node in the process that has them, and taking them back. The process
//! itself mounts nothing, and the pod process has no say.
//! Threads: each call enters the other mount namespace on a thread of its own, which ends with it. They block.

use crate::error::ShareError;
use crate::room::{PLACES, PUSHED, SHOWN};
use crate::sys;
use nacelle_base::mounts::{self, Change};
use nacelle_base::share::FOLDER;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Which process has a pod's volumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taker {
    /// The one that answers a guest: the n-th volume of a container is `CONTAINER/n` below the share's root.
    Share,
    /// The same, for volumes that the pod process pushes: the n-th of a container is at the place `CONTAINER/n`, and nowhere
    /// for the guest. What is read stays read when they are taken back.
    Pushed,
    /// The agent of a pod without a guest, which finds them where a guest does: in `nacelle_base::share::FOLDER`.
    Agent,
}

/// One folder or file of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    /// Its path, without links.
    pub path: PathBuf,
    /// Whether the pod may write to it.
    pub access: VolumeAccess,
    /// What becomes of later mounts below it.
    pub propagation: Propagation,
    /// Reading the volume itself changes no times of it.
    pub no_access_times: bool,
    /// Its owners are others there than on the node; those of what is mounted below it are not.
    pub owners: Option<Owners>,
}

/// Whether a pod may write to a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VolumeAccess {
    /// To the volume and to what is mounted below it.
    ReadWrite,
    /// To what is mounted below it only.
    ReadOnly,
    /// To nothing in it (mount_setattr(2) with `AT_RECURSIVE`).
    RecursiveReadOnly,
}

/// Who sees what is mounted below a volume later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Propagation {
    /// Whoever has mounted it.
    Private,
    /// Of the node's mounts also the volume.
    FromNode,
    /// Both, whoever has mounted it.
    BothWays,
}

/// Owners are shown shifted: the files of the node's users 0 to `count` - 1 are those of `first` to `first + count - 1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owners {
    /// `first` and `count` of users.
    pub users: (u32, u32),
    /// And of groups.
    pub groups: (u32, u32),
}

impl Taker {
    /// Where the volumes are seen, and where places for them are made.
    fn folders(self) -> (&'static Path, &'static Path) {
        let (shown, places) = match self {
            Taker::Share => (SHOWN, PLACES),
            Taker::Pushed => (PUSHED, PUSHED),
            Taker::Agent => (FOLDER, FOLDER),
        };
        (Path::new(shown), Path::new(places))
    }

    /// A device's number means another device in a guest.
    fn attributes(self) -> u64 {
        match self {
            Taker::Share => libc::MOUNT_ATTR_NODEV,
            Taker::Pushed => libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NOEXEC,
            Taker::Agent => 0,
        }
    }
}

/// Mounts the volumes of a container in the process behind this handle. If one cannot be mounted, none is.
pub fn attach(process: BorrowedFd, taker: Taker, container: &str, volumes: &[Volume]) -> Result<(), ShareError> {
    let trees = volumes.iter().map(|volume| copy(volume, taker)).collect::<Result<Vec<_>, _>>()?;
    let done = inside(process, || {
        let mut done = Ok(());
        for (number, (volume, (tree, folder))) in volumes.iter().zip(&trees).enumerate() {
            let place = Path::new(container).join(number.to_string());
            done = place_tree(taker, tree.as_fd(), *folder, &place).map_err(failed("mount", &volume.path));
            if done.is_err() {
                // The error that came first is the one that matters.
                let _ = take_back(taker, container);
                break;
            }
        }
        done
    });
    done.map_err(|source| ShareError::Step { what: "be entered", source })?
}

/// Takes the volumes of a container back; one that has none is no failure. What the guest has open stays open for it, and
/// what containers have mounted on the node stays there.
pub fn detach(process: BorrowedFd, taker: Taker, container: &str) -> Result<(), ShareError> {
    let taken = inside(process, || take_back(taker, container)).and_then(|taken| taken);
    taken.map_err(|source| ShareError::Detach { container: container.to_owned(), source })
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ShareError {
    let path = path.to_owned();
    move |source| ShareError::Volume { what, path, source }
}

/// A copy of a volume's mounts, and whether it is a folder.
fn copy(volume: &Volume, taker: Taker) -> Result<(OwnedFd, bool), ShareError> {
    check(volume)?;
    let tree = mounts::copy(&volume.path, true).map_err(failed("open", &volume.path))?;
    let metadata = File::from(tree.try_clone().map_err(failed("open", &volume.path))?).metadata();
    let folder = metadata.map_err(failed("open", &volume.path))?.is_dir();
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
    Ok((tree, folder))
}

/// Refuses a volume whose mounts nobody tells the pod, or that the pod cannot tell anybody.
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

/// Where the mount that a path lies on is mounted, and whether it is shared, and a slave (proc_pid_mountinfo(5)).
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

fn place_tree(taker: Taker, tree: BorrowedFd, folder: bool, place: &Path) -> io::Result<()> {
    let (shown, places) = taker.folders();
    let place_for_it = places.join(place);
    make_folder(places)?;
    make_folder(place_for_it.parent().unwrap_or(places))?;
    if folder {
        make_folder(&place_for_it)?;
    } else {
        File::create(&place_for_it)?;
    }
    mounts::place(tree, &shown.join(place))
}

/// Makes a folder that everybody may walk through, whatever this process's umask is.
fn make_folder(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made.and_then(|()| fs::set_permissions(path, Permissions::from_mode(0o755))),
    }
}

fn take_back(taker: Taker, container: &str) -> io::Result<()> {
    let (shown, places) = taker.folders();
    let volumes = match fs::read_dir(shown.join(container)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        volumes => volumes?.collect::<Result<Vec<_>, _>>()?,
    };
    let places = places.join(container);
    for volume in volumes {
        let (at, none) = (volume.path(), None::<&str>);
        // The node's mounts below it shall not go with it.
        let alone = mount(none, &at, none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none);
        match alone.and_then(|()| umount2(&at, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW)) {
            Ok(()) | Err(nix::Error::EINVAL) => {} // nothing is mounted there
            Err(error) => return Err(error.into()),
        }
        let place = places.join(volume.file_name());
        // Never more than the place itself: if something were mounted there all the same, it would be the node's.
        if volume.file_type()?.is_dir() { fs::remove_dir(place)? } else { fs::remove_file(place)? }
    }
    fs::remove_dir(places)
}

/// Does something in the mount namespace of a process.
fn inside<T: Send>(process: BorrowedFd, work: impl FnOnce() -> T + Send) -> io::Result<T> {
    let enter = || {
        // Its own root and working directory, which entering changes.
        unshare(CloneFlags::CLONE_FS)?;
        setns(process, CloneFlags::CLONE_NEWNS)
    };
    std::thread::scope(|scope| {
        let entered = move || Ok(enter().map(|()| work())?);
        let thread = std::thread::Builder::new().name("volumes".into()).spawn_scoped(scope, entered)?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
