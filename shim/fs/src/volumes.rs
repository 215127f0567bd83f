//! Owns: the daemon's hand: mounting volumes of the node in the process that has them, and taking them back. The process
//! itself mounts nothing, and the pod process has no say.
//! Threads: each call enters the other mount namespace on a thread of its own, which ends with it. They block.

use crate::error::ShareError;
use crate::room::{PLACES, SHOWN};
use crate::sys::{self, Hears};
use nix::mount::{MntFlags, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// One folder or file of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    /// Its path, without links.
    pub path: PathBuf,
    /// It cannot be written; what is mounted below it can.
    pub read_only: bool,
    /// Nor can that.
    pub all_read_only: bool,
    /// What the node mounts below it later is seen.
    pub hears_node: bool,
}

/// Mounts the volumes of a container in the process behind this handle: the n-th at `ID/n` below the share's root. If one
/// cannot be mounted, none is.
pub fn attach(process: BorrowedFd, container: &str, volumes: &[Volume]) -> Result<(), ShareError> {
    let trees = volumes.iter().map(copy).collect::<Result<Vec<_>, _>>()?;
    let done = inside(process, || {
        let mut done = Ok(());
        for (number, (volume, (tree, folder))) in volumes.iter().zip(&trees).enumerate() {
            let place = Path::new(container).join(number.to_string());
            done = mount(tree.as_fd(), *folder, &place).map_err(failed("mount", &volume.path));
            if done.is_err() {
                // The error that came first is the one that matters.
                let _ = take_back(container);
                break;
            }
        }
        done
    });
    done.map_err(|source| ShareError::Step { what: "be entered", source })?
}

/// Takes the volumes of a container back; one that has none is no failure. What the guest has open stays open for it.
pub fn detach(process: BorrowedFd, container: &str) -> Result<(), ShareError> {
    let taken = inside(process, || take_back(container)).and_then(|taken| taken);
    taken.map_err(|source| ShareError::Detach { container: container.to_owned(), source })
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ShareError {
    let path = path.to_owned();
    move |source| ShareError::Volume { what, path, source }
}

/// A copy of a volume's mounts, and whether it is a folder.
fn copy(volume: &Volume) -> Result<(OwnedFd, bool), ShareError> {
    let tree = sys::copy_tree(&volume.path).map_err(failed("open", &volume.path))?;
    let metadata = File::from(tree.try_clone().map_err(failed("open", &volume.path))?).metadata();
    let folder = metadata.map_err(failed("open", &volume.path))?.is_dir();
    let hears = if volume.hears_node { Hears::Node } else { Hears::Nothing };
    let set = sys::set(tree.as_fd(), volume.read_only, volume.all_read_only, hears);
    set.map_err(failed("mount", &volume.path))?;
    Ok((tree, folder))
}

fn mount(tree: BorrowedFd, folder: bool, place: &Path) -> io::Result<()> {
    let place_for_it = Path::new(PLACES).join(place);
    let made = if folder { &*place_for_it } else { place_for_it.parent().unwrap_or(&place_for_it) };
    DirBuilder::new().recursive(true).mode(0o755).create(made)?;
    if !folder {
        File::create(&place_for_it)?;
    }
    sys::mount_tree(tree, &Path::new(SHOWN).join(place))
}

fn take_back(container: &str) -> io::Result<()> {
    let shown = Path::new(SHOWN).join(container);
    let places = match fs::read_dir(&shown) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        places => places?.collect::<Result<Vec<_>, _>>()?,
    };
    for place in places {
        match umount2(&place.path(), MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
            Ok(()) | Err(nix::Error::EINVAL) => {} // nothing is mounted there
            Err(error) => return Err(error.into()),
        }
    }
    // Only empty places are left: nothing is mounted where they are seen from here.
    fs::remove_dir_all(Path::new(PLACES).join(container))
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
