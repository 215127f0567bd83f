//! Sets up the mount namespace of the pod process: a new root that contains only the process's files. Only the first thread
//! may call it, while it is the only one, because the other threads share its root.

use nacelle_base::mounts::{self, MountChange};
use nacelle_base::retry::retry_interrupted;
use nacelle_base::user_namespace::create_user_namespace;
use nacelle_base::{Classify, FailureKind};
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, open};
use nix::libc;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::stat::{Mode, SFlag, mknod};
use nix::unistd::{Gid, Uid, UnlinkatFlags, chdir, chown, fchownat, pivot_root, unlinkat};
use std::fs::{self, Metadata, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

/// The access of the process to a file or directory that stays visible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The process may read.
    Read,
    /// The process may read, and execute programs.
    Execute,
    /// The process may read and write.
    Write,
    /// As `Write`; the file also loses its name outside, so that it is freed when the process ends.
    Take,
    /// The path is a device, or a directory with devices.
    Device,
}

/// A file or directory that stays visible to the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VisiblePath {
    /// The absolute path.
    pub path: PathBuf,
    /// The path at which the process sees it, if that differs.
    pub visible_as: Option<PathBuf>,
    /// The access of the process.
    pub access: Access,
    /// If the path is missing, the process cannot work; other paths may be missing on a node.
    pub is_required: bool,
    /// The path becomes an idmapped mount: a process with a user of its own sees root's files in it as its own, and its new files
    /// belong to root on the disk, so that a later process with another user finds them as its own. Files of all other users look
    /// as those of the overflow user. Without a user this has no effect.
    pub is_idmapped: bool,
}

impl VisiblePath {
    fn visible_path(&self) -> &Path {
        self.visible_as.as_deref().unwrap_or(&self.path)
    }
}

/// The mount namespace cannot be set up.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what} {}", path.display())]
pub struct MountNamespaceError {
    /// The step: "open", "bind-mount", "map the owners of files in", "create a device node for", "change the owner of", "remove",
    /// "leave".
    pub what: &'static str,
    /// The path.
    pub path: PathBuf,
    /// The cause.
    pub source: io::Error,
}

impl Classify for MountNamespaceError {
    /// Returns `Unsupported` if the kernel, a file system or the node excludes idmapped mounts, so that a repetition fails too.
    fn kind(&self) -> FailureKind {
        match (self.what, self.source.raw_os_error()) {
            // The file system cannot be mapped, or belongs to another user namespace; the kernel is older than 5.12.
            (MAP_OWNERS, Some(libc::EINVAL | libc::EPERM | libc::ENOSYS)) => FailureKind::Unsupported,
            // Without user namespaces on the node it stays so; otherwise too many exist at the moment.
            (MAP_OWNERS, Some(libc::ENOSPC)) if !allows_user_namespaces() => FailureKind::Unsupported,
            (MAP_OWNERS, Some(libc::ENOSPC)) => FailureKind::Exhausted,
            _ => FailureKind::Internal,
        }
    }
}

/// Returns whether the node's `user.max_user_namespaces` is above 0. An unreadable value counts as such.
fn allows_user_namespaces() -> bool {
    fs::read_to_string("/proc/sys/user/max_user_namespaces").map_or(true, |limit| limit.trim() != "0")
}

fn failed<E: Into<io::Error>>(what: &'static str, path: &Path) -> impl FnOnce(E) -> MountNamespaceError {
    let path = path.to_owned();
    move |source| MountNamespaceError { what, path, source: source.into() }
}

/// The step of errors of idmapped mounts.
const MAP_OWNERS: &str = "map the owners of files in";

/// An opened path that will be mounted in the new root.
struct OpenedPath {
    spec: VisiblePath,
    /// The target of a symbolic link, which is recreated as a link.
    link: Option<PathBuf>,
    handle: Option<OwnedFd>,
    is_directory: bool,
    /// The number of a character device.
    device: Option<libc::dev_t>,
    /// The parent directory, if the name must be removed.
    parent: Option<OwnedFd>,
}

/// Replaces the root by one that contains only these paths. `mount_point` is a directory on which the new root is mounted
/// while it is built; it may be one of the paths. What the process may write, and its devices, belong to `user` if there is one:
/// idmapped paths only as the process sees them.
pub(crate) fn enter_new_root(
    mut paths: Vec<VisiblePath>,
    mount_point: &Path,
    user: Option<u32>,
) -> Result<(), MountNamespaceError> {
    let root = Path::new("/");
    unshare(CloneFlags::CLONE_NEWNS).map_err(failed("leave", root))?;
    mount(None::<&str>, root, None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
        .map_err(failed("leave", root))?;
    // A path inside another one is mounted after it.
    paths.sort_by_key(|path_spec| path_spec.visible_path().components().count());
    // Created here, because there is no /proc in the new root.
    let idmapped = paths.iter().find(|path_spec| path_spec.is_idmapped).zip(user);
    let owner_map = idmapped.map(|(first, user)| create_owner_map(&first.path, user)).transpose()?;
    let sources: Vec<OpenedPath> =
        paths.into_iter().map(open_path).collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect();
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("nacelle"), mount_point, Some("tmpfs"), flags, Some("mode=0755,size=1m"))
        .map_err(failed("mount a new root on", mount_point))?;
    for source in &sources {
        bind_path(source, mount_point, user, owner_map.as_ref().map(AsFd::as_fd))?;
    }
    for source in &sources {
        if let (Some(parent), Some(name)) = (&source.parent, source.spec.path.file_name()) {
            unlinkat(parent, name, UnlinkatFlags::NoRemoveDir).map_err(failed("remove", &source.spec.path))?;
        }
    }
    drop(sources);
    mount(
        None::<&str>,
        mount_point,
        None::<&str>,
        flags | MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY,
        None::<&str>,
    )
    .map_err(failed("make read-only", mount_point))?;
    // The old root is now stacked on the new one, and is unmounted.
    chdir(mount_point).map_err(failed("enter", mount_point))?;
    pivot_root(".", ".").map_err(failed("leave", root))?;
    umount2(".", MntFlags::MNT_DETACH).map_err(failed("leave", root))?;
    chdir(root).map_err(failed("enter", root))
}

/// Checks that idmapped mounts can give root's files in these directories to a user. Attaches no mount, and may be called by any thread.
pub fn check_idmapped_mounts<'a>(
    directories: impl IntoIterator<Item = &'a Path>,
    user: u32,
) -> Result<(), MountNamespaceError> {
    let mut owner_map = None;
    for directory in directories {
        let owner_map = match &owner_map {
            Some(owner_map) => owner_map,
            None => owner_map.insert(create_owner_map(directory, user)?),
        };
        clone_idmapped(directory, owner_map.as_fd()).map_err(failed(MAP_OWNERS, directory))?;
    }
    Ok(())
}

/// Creates a user namespace that maps root to `user` in an idmapped mount, and no other user. `path` is for the error.
fn create_owner_map(path: &Path, user: u32) -> Result<OwnedFd, MountNamespaceError> {
    let map = format!("0 {user} 1");
    create_user_namespace(&map, &map).map_err(failed(MAP_OWNERS, path))
}

/// Copies the mount at a path as an idmapped one. The copy is not attached.
fn clone_idmapped(path: &Path, owner_map: BorrowedFd) -> io::Result<OwnedFd> {
    let tree = mounts::clone_tree(path, false)?;
    let change = MountChange { user_namespace: Some(owner_map), ..MountChange::default() };
    mounts::change_attributes(&tree, false, &change)?;
    Ok(tree)
}

/// Opens a path; returns `None` if it is missing and not required.
fn open_path(path_spec: VisiblePath) -> Result<Option<OpenedPath>, MountNamespaceError> {
    let metadata = match fs::symlink_metadata(&path_spec.path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && !path_spec.is_required => return Ok(None),
        other => other.map_err(failed("open", &path_spec.path))?,
    };
    // Programs refer to each other through symbolic links (such as /lib); all other links are resolved.
    if metadata.is_symlink() && path_spec.access == Access::Execute {
        let link = fs::read_link(&path_spec.path).map_err(failed("open", &path_spec.path))?;
        return Ok(Some(OpenedPath {
            spec: path_spec,
            link: Some(link),
            handle: None,
            is_directory: false,
            device: None,
            parent: None,
        }));
    }
    let metadata = fs::metadata(&path_spec.path).map_err(failed("open", &path_spec.path))?;
    let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
    let handle =
        |path: &Path| retry_interrupted(|| open(path, flags, Mode::empty())).map_err(failed("open", &path_spec.path));
    let parent = path_spec.path.parent().filter(|_| path_spec.access == Access::Take).map(&handle).transpose()?;
    let own = Some(handle(&path_spec.path)?);
    let (is_directory, device) = (metadata.is_dir(), character_device(&metadata));
    Ok(Some(OpenedPath { spec: path_spec, link: None, handle: own, is_directory, device, parent }))
}

fn character_device(metadata: &Metadata) -> Option<libc::dev_t> {
    metadata.file_type().is_char_device().then(|| metadata.rdev())
}

/// Bind-mounts a path below the new root. With `owner_map`, idmapped paths are mounted with it.
fn bind_path(
    source: &OpenedPath,
    mount_point: &Path,
    user: Option<u32>,
    owner_map: Option<BorrowedFd>,
) -> Result<(), MountNamespaceError> {
    let path = source.spec.visible_path();
    let relative = path.strip_prefix("/").unwrap_or(path);
    let target = mount_point.join(relative);
    let failed = |error: io::Error| failed("bind-mount", path)(error);
    create_directories(mount_point, relative.parent().unwrap_or(Path::new(""))).map_err(failed)?;
    if let Some(link) = &source.link {
        return std::os::unix::fs::symlink(link, &target).map_err(failed);
    }
    let Some(handle) = &source.handle else { return Ok(()) };
    let node = match (source.device, user) {
        // A node of its own, because the node's device may belong to root only.
        (Some(device), Some(user)) if source.spec.access == Access::Device => {
            create_device_node(&target, device, user).map_err(self::failed("create a device node for", path))?
        }
        _ => None,
    };
    // The mount point may exist already inside another path.
    if source.is_directory {
        create_directories(mount_point, relative).map_err(failed)?;
    } else if !target.exists() {
        fs::File::create(&target).map_err(failed)?;
    }
    let owner_map = owner_map.filter(|_| source.spec.is_idmapped);
    if let (Some(user), Access::Write | Access::Take, None) = (user, source.spec.access, owner_map) {
        let (owner, group) = (Some(Uid::from_raw(user)), Some(Gid::from_raw(user)));
        fchownat(handle, "", owner, group, AtFlags::AT_EMPTY_PATH)
            .map_err(|errno| self::failed("change the owner of", path)(errno))?;
    }
    let handle = node.as_ref().unwrap_or(handle);
    let from = format!("/proc/self/fd/{}", handle.as_raw_fd());
    let none = None::<&str>;
    match owner_map {
        Some(owner_map) => clone_idmapped(Path::new(&from), owner_map)
            .map_err(self::failed(MAP_OWNERS, path))
            .and_then(|tree| mounts::attach(&tree, &target).map_err(failed))?,
        None => {
            mount(Some(from.as_str()), &target, none, MsFlags::MS_BIND, none).map_err(|error| failed(error.into()))?
        }
    }
    let restricted = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let flags = match source.spec.access {
        Access::Read => restricted | MsFlags::MS_RDONLY,
        Access::Execute => MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_RDONLY,
        Access::Write | Access::Take => restricted,
        // The process must not change the directory itself. Device nodes stay writable on a read-only mount.
        Access::Device if source.is_directory => MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC | MsFlags::MS_RDONLY,
        Access::Device => MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC,
    };
    mount(none, &target, none, flags | MsFlags::MS_REMOUNT | MsFlags::MS_BIND, none)
        .map_err(|error| failed(error.into()))
}

/// Creates the directories of `path` below `root` that are missing. Every user may enter them, whatever the umask is.
fn create_directories(root: &Path, path: &Path) -> io::Result<()> {
    let mut directory = root.to_owned();
    for component in path.components().filter(|component| matches!(component, Component::Normal(_))) {
        directory.push(component);
        match fs::create_dir(&directory) {
            Ok(()) => fs::set_permissions(&directory, Permissions::from_mode(0o755))?,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Creates the node of a character device that only `user` may open. Returns a handle for its mount, or `None` in a user namespace, where
/// there are no new devices: the mode of the existing one decides then.
fn create_device_node(path: &Path, device: libc::dev_t, user: u32) -> io::Result<Option<OwnedFd>> {
    match mknod(path, SFlag::S_IFCHR, Mode::S_IRUSR | Mode::S_IWUSR, device) {
        Err(Errno::EPERM) => {
            tracing::warn!(path = %path.display(), "cannot create a device node of its own: the mode of the node's device decides");
            return Ok(None);
        }
        created => created?,
    }
    chown(path, Some(Uid::from_raw(user)), Some(Gid::from_raw(user)))?;
    let flags = OFlag::O_PATH | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW;
    Ok(Some(retry_interrupted(|| open(path, flags, Mode::empty()))?))
}
