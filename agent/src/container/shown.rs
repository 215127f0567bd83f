//! Owns: what a container of a user namespace is shown of images: copies of mounts on which the owners of files are numbers
//! of that namespace, in a folder of the container's until it has them mounted; and of the agent's sysfs. Parts of the
//! machine's own volumes wait there, too.
//! May use: `root`'s error, `userns`. Volumes of the node come with their owners mapped, if they shall be.

use libcontainer::oci_spec::runtime::Mount;
use nacelle_base::mounts::{self, Change};
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use crate::paths;
use crate::rootfs::{RootError, root_error};
use crate::userns::UserNs;

/// The agent's sysfs, which is shown without the control groups that are mounted on it.
pub const SYS: &str = "/sys";

/// The folder of a container. What is in it is somebody else's: it is unmounted before anything is removed.
pub fn folder(id: &str) -> PathBuf {
    Path::new(paths::BUNDLES).join(id).join("shown")
}

/// Shows what lies at `source` at a place of the container, its owners as numbers inside. The agent's sysfs has no owners
/// but root.
pub fn show(id: &str, users: &UserNs, source: &Path, name: &str) -> Result<PathBuf, RootError> {
    let what = "show the container, with the owners of its user namespace,";
    let folder = make_folder(id)?;
    let of_image = source != Path::new(SYS);
    let copy = mounts::copy(source, of_image).map_err(root_error(what, source))?;
    if of_image {
        let mapped = Change { users: Some(users.as_fd()), ..Change::default() };
        mounts::change(&copy, false, &mapped).map_err(root_error(what, source))?;
    }
    let place = folder.join(name);
    let copy = File::from(copy);
    let is_folder = copy.metadata().map_err(root_error("look at", source))?.is_dir();
    let made = if is_folder { fs::create_dir(&place) } else { File::create_new(&place).map(drop) };
    made.and_then(|()| mounts::place(&copy, &place)).map_err(root_error(what, source))?;
    Ok(place)
}

/// Keeps a folder's mount that lies nowhere yet at a place of the container, until that has mounted it.
pub fn keep(id: &str, mount: impl AsFd, name: &str) -> Result<PathBuf, RootError> {
    let place = make_folder(id)?.join(name);
    let kept = fs::create_dir(&place).and_then(|()| mounts::place(mount, &place));
    kept.map_err(root_error("show the container", &place))?;
    Ok(place)
}

/// The container's folder, on a tmpfs of its own.
fn make_folder(id: &str) -> Result<PathBuf, RootError> {
    let folder = folder(id);
    if !folder.exists() {
        fs::create_dir_all(&folder).map_err(root_error("make", &folder))?;
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        mount(Some("tmpfs"), &folder, Some("tmpfs"), flags, Some("mode=755,size=64k"))
            .map_err(root_error("mount a tmpfs at", &folder))?;
    }
    Ok(folder)
}

/// Has these mounts come from such places, where they are of images, or the agent's sysfs.
pub fn of_mounts(id: &str, users: &UserNs, mounts: &mut [Mount]) -> Result<(), RootError> {
    for (number, mount) in mounts.iter_mut().enumerate() {
        let Some(source) = mount.source().clone() else { continue };
        let shown = source.starts_with(paths::IMAGES) || source == Path::new(SYS);
        if mount.typ().as_deref() == Some("bind") && shown {
            mount.set_source(Some(show(id, users, &source, &number.to_string())?));
        }
    }
    Ok(())
}

/// Takes all of it away; what is not there is no failure.
pub fn clear(id: &str) -> io::Result<()> {
    unmount(&folder(id)).map_err(|error| error.source)
}

/// Unmounts whatever is mounted at a path, with all below it.
pub(super) fn unmount(path: &Path) -> Result<(), RootError> {
    loop {
        match umount2(path, MntFlags::MNT_DETACH) {
            Ok(()) => {}
            Err(Errno::EINVAL | Errno::ENOENT) => return Ok(()),
            Err(error) => return Err(root_error("unmount", path)(error)),
        }
    }
}
