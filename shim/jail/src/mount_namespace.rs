//! Sets up the mount namespace of the pod process: a new root that contains only the process's files. Only the first thread
//! may call it, while it is the only one, because the other threads share its root.

use nacelle_base::retry::retry_interrupted;
use nix::fcntl::{OFlag, open};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, chdir, pivot_root, unlinkat};
use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

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
pub struct Place {
    /// The absolute path.
    pub path: PathBuf,
    /// The path at which the process sees it, if that differs.
    pub shown: Option<PathBuf>,
    /// The access of the process.
    pub access: Access,
    /// If the path is missing, the process cannot work; other paths may be missing on a node.
    pub needed: bool,
}

impl Place {
    fn name(&self) -> &Path {
        self.shown.as_deref().unwrap_or(&self.path)
    }
}

/// The mount namespace cannot be set up.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what} {}", path.display())]
pub struct WallError {
    /// The step: "open", "show", "remove", "leave".
    pub what: &'static str,
    /// The path.
    pub path: PathBuf,
    /// The cause.
    pub source: io::Error,
}

fn failed<E: Into<io::Error>>(what: &'static str, path: &Path) -> impl FnOnce(E) -> WallError {
    let path = path.to_owned();
    move |source| WallError { what, path, source: source.into() }
}

/// An opened place that will be mounted in the new root.
struct Source {
    place: Place,
    /// The target of a symbolic link, which is recreated as a link.
    link: Option<PathBuf>,
    handle: Option<OwnedFd>,
    directory: bool,
    /// The parent directory, if the name must be removed.
    parent: Option<OwnedFd>,
}

/// Replaces the root by one that contains only these places. `scaffold` is a directory on which the new root is mounted
/// while it is built; it may be one of the places.
pub(crate) fn build(mut places: Vec<Place>, scaffold: &Path) -> Result<(), WallError> {
    let root = Path::new("/");
    unshare(CloneFlags::CLONE_NEWNS).map_err(failed("leave", root))?;
    mount(None::<&str>, root, None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
        .map_err(failed("leave", root))?;
    // A place inside another place is mounted after it.
    places.sort_by_key(|place| place.name().components().count());
    let sources: Vec<Source> =
        places.into_iter().map(find).collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect();
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("nacelle"), scaffold, Some("tmpfs"), flags, Some("mode=0755,size=1m"))
        .map_err(failed("make a root on", scaffold))?;
    for source in &sources {
        show(source, scaffold)?;
    }
    for source in &sources {
        if let (Some(parent), Some(name)) = (&source.parent, source.place.path.file_name()) {
            unlinkat(parent, name, UnlinkatFlags::NoRemoveDir).map_err(failed("remove", &source.place.path))?;
        }
    }
    drop(sources);
    mount(
        None::<&str>,
        scaffold,
        None::<&str>,
        flags | MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY,
        None::<&str>,
    )
    .map_err(failed("close", scaffold))?;
    // The old root is now stacked on the new one, and is unmounted.
    chdir(scaffold).map_err(failed("enter", scaffold))?;
    pivot_root(".", ".").map_err(failed("leave", root))?;
    umount2(".", MntFlags::MNT_DETACH).map_err(failed("leave", root))?;
    chdir(root).map_err(failed("enter", root))
}

/// Opens a place; returns `None` if it is missing and not needed.
fn find(place: Place) -> Result<Option<Source>, WallError> {
    let metadata = match fs::symlink_metadata(&place.path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && !place.needed => return Ok(None),
        other => other.map_err(failed("open", &place.path))?,
    };
    // Programs refer to each other through symbolic links (such as /lib); all other links are resolved.
    if metadata.is_symlink() && place.access == Access::Execute {
        let link = fs::read_link(&place.path).map_err(failed("open", &place.path))?;
        return Ok(Some(Source { place, link: Some(link), handle: None, directory: false, parent: None }));
    }
    let metadata = fs::metadata(&place.path).map_err(failed("open", &place.path))?;
    let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
    let handle =
        |path: &Path| retry_interrupted(|| open(path, flags, Mode::empty())).map_err(failed("open", &place.path));
    let parent = place.path.parent().filter(|_| place.access == Access::Take).map(&handle).transpose()?;
    let own = Some(handle(&place.path)?);
    Ok(Some(Source { place, link: None, handle: own, directory: metadata.is_dir(), parent }))
}

/// Mounts a place below the new root.
fn show(source: &Source, scaffold: &Path) -> Result<(), WallError> {
    let path = source.place.name();
    let target = scaffold.join(path.strip_prefix("/").unwrap_or(path));
    let failed = |error: io::Error| failed("show", path)(error);
    if let Some(parent) = target.parent() {
        DirBuilder::new().recursive(true).mode(0o755).create(parent).map_err(failed)?;
    }
    if let Some(link) = &source.link {
        return std::os::unix::fs::symlink(link, &target).map_err(failed);
    }
    let Some(handle) = &source.handle else { return Ok(()) };
    // The mount point may exist already inside another place.
    if source.directory {
        DirBuilder::new().recursive(true).mode(0o755).create(&target).map_err(failed)?;
    } else if !target.exists() {
        fs::File::create(&target).map_err(failed)?;
    }
    let from = format!("/proc/self/fd/{}", handle.as_raw_fd());
    let nothing = None::<&str>;
    mount(Some(from.as_str()), &target, nothing, MsFlags::MS_BIND, nothing).map_err(|error| failed(error.into()))?;
    let all = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let flags = match source.place.access {
        Access::Read => all | MsFlags::MS_RDONLY,
        Access::Execute => MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_RDONLY,
        Access::Write | Access::Take => all,
        // The process must not change the directory itself. Device nodes stay writable on a read-only mount.
        Access::Device if source.directory => MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC | MsFlags::MS_RDONLY,
        Access::Device => MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC,
    };
    mount(nothing, &target, nothing, flags | MsFlags::MS_REMOUNT | MsFlags::MS_BIND, nothing)
        .map_err(|error| failed(error.into()))
}
