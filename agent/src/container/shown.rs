//! Owns: what a container of a user namespace is shown of images and of the node: copies of mounts on which the owners of
//! files are numbers of that namespace, in a folder of the container's until it has them mounted.
//! May use: `root`'s error, `sys`, `userns`.

use libcontainer::oci_spec::runtime::Mount;
use nix::mount::{MsFlags, mount};
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use super::root::{RootError, at};
use crate::boot::mounts::of_node;
use crate::userns::UserNs;
use crate::{paths, sys};

/// The option, of the runtime specification, of a mount on which owners are shown so.
const OPTION: &str = "idmap";

/// The agent's sysfs, which is shown without the control groups that are mounted on it.
pub const SYS: &str = "/sys";

/// The folder of a container. What is in it is somebody else's: it is unmounted before anything is removed.
pub fn folder(id: &str) -> PathBuf {
    Path::new(paths::BUNDLES).join(id).join("shown")
}

/// Shows what lies at `source` at a place of the container; with `mapped`, its owners as numbers inside.
pub fn show(id: &str, users: &UserNs, source: &Path, mapped: bool, name: &str) -> Result<PathBuf, RootError> {
    let what = "show the container, with the owners of its user namespace,";
    let folder = folder(id);
    if !folder.exists() {
        fs::create_dir_all(&folder).map_err(at("make", &folder))?;
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        mount(Some("tmpfs"), &folder, Some("tmpfs"), flags, Some("mode=755,size=64k"))
            .map_err(at("mount a tmpfs at", &folder))?;
    }
    let copy =
        sys::copy_mount(source, source != Path::new(SYS), mapped.then(|| users.as_fd())).map_err(at(what, source))?;
    let place = folder.join(name);
    let copy = File::from(copy);
    let is_folder = copy.metadata().map_err(at("look at", source))?.is_dir();
    let made = if is_folder { fs::create_dir(&place) } else { File::create_new(&place).map(drop) };
    made.and_then(|()| sys::place_mount(&copy, &place)).map_err(at(what, source))?;
    Ok(place)
}

/// Has these mounts come from such places, where they are of images, of the node, or the agent's sysfs.
pub fn mounts(id: &str, users: &UserNs, mounts: &mut [Mount]) -> Result<(), RootError> {
    for (number, mount) in mounts.iter_mut().enumerate() {
        let Some(source) = mount.source().clone() else { continue };
        let of_image = source.starts_with(paths::IMAGES);
        let shown = of_image || source.starts_with(of_node(Path::new("/"))) || source == Path::new(SYS);
        if mount.typ().as_deref() != Some("bind") || !shown {
            continue;
        }
        let mut options = mount.options().clone().unwrap_or_default();
        let asked = options.iter().any(|option| option == OPTION);
        options.retain(|option| option != OPTION);
        let place = show(id, users, &source, of_image || asked, &number.to_string())?;
        mount.set_source(Some(place)).set_options(Some(options));
    }
    Ok(())
}

/// Takes all of it away; what is not there is no failure.
pub fn clear(id: &str) -> io::Result<()> {
    super::root::unmount(&folder(id)).map_err(|error| error.source)
}
