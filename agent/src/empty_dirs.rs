//! Creates emptyDir volumes in the guest, a tmpfs, a hugetlbfs or the ext4 of a partition each, and the parts of them that containers
//! see. They exist until the pod ends.
//!
//! Containers write there, so no link in a volume is followed. A disk may have been written by others before: the kernel decides whether
//! it can be mounted.

use nacelle_base::mounts;
use nacelle_base::retry::retry_transient;
use nacelle_base::{Classify, FailureKind};
use nacelle_proto::agent::EmptyDir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, openat2};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::{FchmodatFlags, Mode, fchmodat, mkdirat};
use nix::unistd::{Gid, Uid, chown, fchownat};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::image::{DiskError, GuestDisks};
use crate::paths;

/// The directory of a disk that is the volume. Files of the file system itself, such as lost+found, are beside it.
const VOLUME_DIRECTORY: &str = "volume";
/// The name of that directory while it is made.
const DRAFT_DIRECTORY: &str = "draft";

/// Reasons a container does not get its emptyDir volume.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the fields are what the message prints")]
pub enum EmptyDirError {
    #[error(
        "invalid volume name {name:?}: 1 to 128 letters, digits, '_', '-' and '.' are allowed, not starting with '.'"
    )]
    Name { name: String },
    #[error("invalid subPath {sub_path:?}: only names other than . and .. are allowed")]
    SubPath { sub_path: String },
    #[error(
        "cannot create the volume {path} in the guest: it has files on the node, which the guest would not see; create them from a container"
    )]
    Occupied { path: String },
    #[error("cannot use subPath {sub_path:?} of the volume {path}: it is not a directory, or leads out of the volume")]
    NoDirectory { sub_path: String, path: String },
    #[error(transparent)]
    Disk(#[from] DiskError),
    #[error(
        "cannot mount the disk of the volume {path}: if its file on the node is damaged, what is in it is lost; remove the pod, or \
         that file"
    )]
    Damaged { path: String, source: io::Error },
    #[error("the guest has no huge pages of {bytes} bytes, which the volume {path} needs")]
    NoPages { bytes: u64, path: String },
    #[error("cannot {what} the volume {path}")]
    Io { what: &'static str, path: String, source: io::Error },
}

impl Classify for EmptyDirError {
    fn kind(&self) -> FailureKind {
        match self {
            EmptyDirError::Name { .. } | EmptyDirError::SubPath { .. } => FailureKind::Invalid,
            EmptyDirError::Occupied { .. } | EmptyDirError::NoDirectory { .. } | EmptyDirError::Damaged { .. } => {
                FailureKind::Conflict
            }
            EmptyDirError::NoPages { .. } => FailureKind::Unsupported,
            EmptyDirError::Disk(source) => source.kind(),
            EmptyDirError::Io { source, .. } => source.kind().into(),
        }
    }
}

/// The emptyDir volumes of the pod.
#[derive(Debug, Default)]
pub struct EmptyDirVolumes {
    mounted: Mutex<BTreeSet<String>>,
}

/// The source of a container's mount of an emptyDir volume.
#[derive(Debug)]
pub enum EmptyDirSource {
    /// The path of the whole volume.
    Whole(PathBuf),
    /// A detached mount of a subPath of the volume.
    SubPath(OwnedFd),
}

impl EmptyDirVolumes {
    /// Returns the source of a mount. Creates the volume, and the subPath, if they do not exist.
    pub fn prepare(&self, request: &EmptyDir, disks: &GuestDisks) -> Result<EmptyDirSource, EmptyDirError> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        let name = &request.name;
        if !(1..=128).contains(&name.len()) || name.starts_with('.') || !name.chars().all(is_plain) {
            return Err(EmptyDirError::Name { name: name.chars().take(140).collect() });
        }
        let on_disk = request.partition != 0;
        let point = Path::new(paths::EMPTY_DIRS).join(name);
        let root = if on_disk { point.join(VOLUME_DIRECTORY) } else { point.clone() };
        let mut mounted = self.mounted.lock().unwrap_or_else(PoisonError::into_inner);
        if !mounted.contains(name) {
            if on_disk {
                mount_disk(request, &disks.device_path(request.partition)?, &point)?;
            } else if request.has_node_files {
                return Err(EmptyDirError::Occupied { path: request.path.clone() });
            } else {
                mount_memory(request, &point).map_err(|error| match error.raw_os_error() {
                    // The page size is the only option that a kernel may not support.
                    Some(libc::EINVAL | libc::ENODEV) if request.page_bytes > 0 => {
                        EmptyDirError::NoPages { bytes: request.page_bytes, path: request.path.clone() }
                    }
                    _ => io_error("create", request)(error),
                })?;
            }
            mounted.insert(name.clone());
        }
        drop(mounted);
        if request.sub_path.is_empty() {
            return Ok(EmptyDirSource::Whole(root));
        }
        let sub_path = open_sub_path(&root, request)?;
        let path = format!("/proc/self/fd/{}", sub_path.as_raw_fd());
        mounts::clone_tree(Path::new(&path), false)
            .map(EmptyDirSource::SubPath)
            .map_err(io_error("mount a subPath of", request))
    }
}

fn io_error<E: Into<io::Error>>(what: &'static str, request: &EmptyDir) -> impl FnOnce(E) -> EmptyDirError {
    let path = request.path.clone();
    move |source| EmptyDirError::Io { what, path, source: source.into() }
}

/// Mounts a tmpfs or a hugetlbfs with the mode and the owner of the node's directory, no larger than the guest's memory. A hugetlbfs
/// without a size is limited by the containers' limits of huge pages only.
fn mount_memory(request: &EmptyDir, root: &Path) -> io::Result<()> {
    let total = nix::sys::sysinfo::sysinfo()?.ram_total();
    fs::create_dir_all(root)?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    let (mode, page_size) = (request.mode & 0o7777, request.page_bytes);
    let (kind, options) = match request.bytes {
        bytes if page_size == 0 => ("tmpfs", format!("mode={mode:o},size={}", bytes.min(total).max(4096))),
        0 => ("hugetlbfs", format!("mode={mode:o},pagesize={page_size}")),
        bytes => ("hugetlbfs", format!("mode={mode:o},pagesize={page_size},size={}", bytes.min(total).max(page_size))),
    };
    mount(Some("memory"), root, Some(kind), flags, Some(options.as_str()))?;
    chown(root, Some(Uid::from_raw(request.uid)), Some(Gid::from_raw(request.gid)))?;
    // hugetlbfs ignores the set-group-id bit of its mode option.
    fs::set_permissions(root, fs::Permissions::from_mode(mode))
}

/// Mounts a disk, and creates the volume's directory on a new one, with the mode and the owner of the node's directory.
fn mount_disk(request: &EmptyDir, device: &Path, point: &Path) -> Result<(), EmptyDirError> {
    fs::create_dir_all(point).map_err(io_error("create a mount point for", request))?;
    mount(Some(device), point, Some("ext4"), MsFlags::MS_NODEV, Some("discard"))
        .map_err(|error| EmptyDirError::Damaged { path: request.path.clone(), source: error.into() })?;
    let result = create_volume(request, point);
    if result.is_err() {
        // The first error is the one to report. The next container tries again.
        let _ = umount2(point, MntFlags::MNT_DETACH);
    }
    result
}

/// Creates the volume's directory on a mounted disk, unless there is one. Earlier users of the disk may have left anything in it.
fn create_volume(request: &EmptyDir, point: &Path) -> Result<(), EmptyDirError> {
    let volume = point.join(VOLUME_DIRECTORY);
    match fs::symlink_metadata(&volume) {
        Ok(metadata) if metadata.is_dir() => return Ok(()),
        Ok(_) => {
            let source = io::ErrorKind::NotADirectory.into();
            return Err(EmptyDirError::Damaged { path: request.path.clone(), source });
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(io_error("look for", request)(error)),
    }
    let draft = point.join(DRAFT_DIRECTORY);
    let result = match fs::remove_dir(&draft) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => fs::create_dir(&draft),
    };
    result
        .and_then(|()| Ok(chown(&draft, Some(Uid::from_raw(request.uid)), Some(Gid::from_raw(request.gid)))?))
        .and_then(|()| fs::set_permissions(&draft, fs::Permissions::from_mode(request.mode & 0o7777)))
        .and_then(|()| fs::rename(&draft, &volume))
        .map_err(io_error("create", request))
}

/// Opens a directory by one name. Links and mounts are not followed.
fn open_directory(at: &OwnedFd, name: &OsStr) -> nix::Result<OwnedFd> {
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let resolve = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_XDEV;
    retry_transient(|| openat2(at, name, OpenHow::new().flags(flags).resolve(resolve)))
}

/// Opens a directory of the volume. Missing ones are made with the mode and the owner of the node's.
fn open_sub_path(root: &Path, request: &EmptyDir) -> Result<OwnedFd, EmptyDirError> {
    let invalid_sub_path = || EmptyDirError::SubPath { sub_path: request.sub_path.chars().take(200).collect() };
    let root = File::options().read(true).open(root).map_err(io_error("open", request))?;
    let mut directory = OwnedFd::from(root);
    for name in Path::new(&request.sub_path).components() {
        let Component::Normal(name) = name else { return Err(invalid_sub_path()) };
        let mode = Mode::from_bits_truncate(request.sub_path_mode & 0o7777);
        match mkdirat(&directory, name, mode) {
            Ok(()) => {
                let owner = (Some(Uid::from_raw(request.sub_path_uid)), Some(Gid::from_raw(request.sub_path_gid)));
                fchownat(&directory, name, owner.0, owner.1, AtFlags::AT_SYMLINK_NOFOLLOW)
                    .map_err(io_error("set the owner of a subPath of", request))?;
                // Sets the bits that the umask has cleared.
                let opened = open_directory(&directory, name).map_err(io_error("open a subPath of", request))?;
                fchmodat(&opened, ".", mode, FchmodatFlags::FollowSymlink)
                    .map_err(io_error("set the mode of a subPath of", request))?;
            }
            Err(Errno::EEXIST) => {}
            Err(error) => return Err(io_error("create a subPath of", request)(error)),
        }
        directory = open_directory(&directory, name).map_err(|error| match error {
            Errno::ELOOP | Errno::ENOTDIR | Errno::EXDEV => {
                EmptyDirError::NoDirectory { sub_path: request.sub_path.clone(), path: request.path.clone() }
            }
            error => io_error("open a subPath of", request)(error),
        })?;
    }
    Ok(directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(sub_path: &str) -> EmptyDir {
        let (uid, gid) = (nix::unistd::getuid().as_raw(), nix::unistd::getgid().as_raw());
        EmptyDir {
            sub_path: sub_path.into(),
            sub_path_mode: 0o2750,
            sub_path_uid: uid,
            sub_path_gid: gid,
            ..Default::default()
        }
    }

    #[test]
    fn a_subpath_must_be_a_directory_of_the_volume() {
        use std::os::unix::fs::{MetadataExt, symlink};
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let opened = File::from(open_sub_path(root, &request("a/b")).unwrap());
        let result = fs::metadata(root.join("a/b")).unwrap();
        assert_eq!((opened.metadata().unwrap().ino(), result.mode() & 0o7777), (result.ino(), 0o2750));
        open_sub_path(root, &request("a/b")).unwrap();
        symlink("/", root.join("link")).unwrap();
        fs::write(root.join("file"), "").unwrap();
        for (bad, kind) in [
            ("link", FailureKind::Conflict),
            ("link/etc", FailureKind::Conflict),
            ("file", FailureKind::Conflict),
            ("../x", FailureKind::Invalid),
            ("/etc", FailureKind::Invalid),
        ] {
            assert_eq!(open_sub_path(root, &request(bad)).unwrap_err().kind(), kind, "{bad}");
        }
    }

    #[test]
    fn volume_names_are_validated_and_node_files_are_not_hidden() {
        let (volumes, disks) = (EmptyDirVolumes::default(), GuestDisks::on_node());
        for name in ["", ".x", "a/b"] {
            let error = volumes.prepare(&EmptyDir { name: name.into(), ..request("") }, &disks).unwrap_err();
            assert_eq!(error.kind(), FailureKind::Invalid, "{error}");
        }
        let there = EmptyDir { name: "memory.x".into(), path: "/k/x".into(), has_node_files: true, ..request("") };
        let error = volumes.prepare(&there, &disks).unwrap_err();
        assert!(error.kind() == FailureKind::Conflict && error.to_string().contains("/k/x"), "{error}");
        let on_disk = EmptyDir { name: "disk.x".into(), partition: 3, ..request("") };
        assert_eq!(volumes.prepare(&on_disk, &disks).unwrap_err().kind(), FailureKind::NotFound);
    }

    #[test]
    fn a_new_disk_gets_the_nodes_owner_and_mode_and_an_old_one_keeps_its_own() {
        use std::os::unix::fs::{MetadataExt, symlink};
        let directory = tempfile::tempdir().unwrap();
        let point = directory.path();
        let request = EmptyDir { mode: 0o2777, ..request("") };
        // A VM that crashed while it made the volume has left this.
        fs::create_dir(point.join(DRAFT_DIRECTORY)).unwrap();
        create_volume(&request, point).unwrap();
        let mode = || fs::metadata(point.join(VOLUME_DIRECTORY)).unwrap().mode() & 0o7777;
        assert_eq!((mode(), point.join(DRAFT_DIRECTORY).exists()), (0o2777, false));
        create_volume(&EmptyDir { mode: 0o700, ..request.clone() }, point).unwrap();
        assert_eq!(mode(), 0o2777);
        fs::remove_dir(point.join(VOLUME_DIRECTORY)).unwrap();
        symlink("/", point.join(VOLUME_DIRECTORY)).unwrap();
        assert_eq!(create_volume(&request, point).unwrap_err().kind(), FailureKind::Conflict);
    }
}
