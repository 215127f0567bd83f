//! Owns: the mount namespace of the pod process: a root of its own in which only its files are.
//! Threads: the first one only, while it is the only one: the others share its root.

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

/// What the process may do with something that it still sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read it.
    Read,
    /// Read it and execute programs of it.
    Execute,
    /// Read and write it.
    Write,
    /// The same, and it loses its name outside: it goes with the process.
    Take,
    /// A device, or a folder with some.
    Device,
}

/// A file or folder that the process still sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its name, absolute.
    pub path: PathBuf,
    /// The name under which the process sees it, if that is another one.
    pub shown: Option<PathBuf>,
    /// What may be done with it.
    pub access: Access,
    /// Without it the process cannot work; others may be missing on a node.
    pub needed: bool,
}

impl Place {
    fn name(&self) -> &Path {
        self.shown.as_deref().unwrap_or(&self.path)
    }
}

/// Why there are no walls.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what} {}", path.display())]
pub struct WallError {
    /// "open", "show", "remove", "leave".
    pub what: &'static str,
    /// What it is about.
    pub path: PathBuf,
    /// Why.
    pub source: io::Error,
}

fn failed<E: Into<io::Error>>(what: &'static str, path: &Path) -> impl FnOnce(E) -> WallError {
    let path = path.to_owned();
    move |source| WallError { what, path, source: source.into() }
}

/// Something that is on its way into the new root.
struct Source {
    place: Place,
    /// What a name that is a symbolic link says; it stays one.
    link: Option<PathBuf>,
    handle: Option<OwnedFd>,
    folder: bool,
    /// The folder that has its name, if it is to lose it.
    parent: Option<OwnedFd>,
}

/// Leaves everything behind but these places. `scaffold` is a folder on which the new root is mounted while it is
/// made; it may be one of the places.
pub(crate) fn build(mut places: Vec<Place>, scaffold: &Path) -> Result<(), WallError> {
    let root = Path::new("/");
    unshare(CloneFlags::CLONE_NEWNS).map_err(failed("leave", root))?;
    mount(None::<&str>, root, None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
        .map_err(failed("leave", root))?;
    // What lies in another place comes after it.
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
    // The old root lands on the new one, and is taken off.
    chdir(scaffold).map_err(failed("enter", scaffold))?;
    pivot_root(".", ".").map_err(failed("leave", root))?;
    umount2(".", MntFlags::MNT_DETACH).map_err(failed("leave", root))?;
    chdir(root).map_err(failed("enter", root))
}

/// Opens a place; none if it is missing and may be.
fn find(place: Place) -> Result<Option<Source>, WallError> {
    let metadata = match fs::symlink_metadata(&place.path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && !place.needed => return Ok(None),
        other => other.map_err(failed("open", &place.path))?,
    };
    // Programs find each other through links (/lib is one); other places are what they lead to.
    if metadata.is_symlink() && place.access == Access::Execute {
        let link = fs::read_link(&place.path).map_err(failed("open", &place.path))?;
        return Ok(Some(Source { place, link: Some(link), handle: None, folder: false, parent: None }));
    }
    let metadata = fs::metadata(&place.path).map_err(failed("open", &place.path))?;
    let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
    let handle =
        |path: &Path| retry_interrupted(|| open(path, flags, Mode::empty())).map_err(failed("open", &place.path));
    let parent = place.path.parent().filter(|_| place.access == Access::Take).map(&handle).transpose()?;
    let own = Some(handle(&place.path)?);
    Ok(Some(Source { place, link: None, handle: own, folder: metadata.is_dir(), parent }))
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
    // It is there already if it lies in a place that is.
    if source.folder {
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
        // What is in a folder is somebody else's to say. Devices may be written to all the same.
        Access::Device if source.folder => MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC | MsFlags::MS_RDONLY,
        Access::Device => MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC,
    };
    mount(nothing, &target, nothing, flags | MsFlags::MS_REMOUNT | MsFlags::MS_BIND, nothing)
        .map_err(|error| failed(error.into()))
}
