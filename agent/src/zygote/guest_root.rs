//! Makes the root directory of a process that runs in the guest and not in a container: the guest has no programs but the agent, so
//! they come from the image of a container.
//!
//! The image is used as it was pulled, below a layer in memory: what a container has written, such as a program that waits for an
//! operator, is not in it. The root is in a mount namespace of its own, which keeps no other mount of the agent in use, unless the process
//! opens something there itself.

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{chdir, pivot_root};
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use crate::paths;

/// The directory at which the layer in memory is mounted. It is the agent's, and empty.
const WORK: &str = "/tmp";
/// The directories of the guest that the root has, too.
const SHARED: [&str; 3] = ["proc", "sys", "dev"];
/// The files of the pod in /etc.
const ETC_FILES: [&str; 3] = ["hosts", "hostname", "resolv.conf"];
/// The link to the agent's root. By /proc, so that it shows the agent's mounts of the moment without using them.
const GUEST_LINK: (&str, &str) = ("/proc/1/root", "guest");

/// Enters a new mount namespace, whose root is a copy in memory of the image that is mounted at `image`. What the process writes there
/// takes at most a quarter of the guest's memory.
pub(super) fn enter_guest_root(image: &Path) -> io::Result<()> {
    let none = None::<&str>;
    unshare(CloneFlags::CLONE_NEWNS)?;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount(Some("tmpfs"), WORK, Some("tmpfs"), flags, Some("mode=755,size=25%"))?;
    let work = Path::new(WORK);
    let (upper, overlay, root) = (work.join("upper"), work.join("work"), work.join("root"));
    for path in [&upper, &overlay, &root] {
        make_directory(path)?;
    }
    fill_upper_layer(&upper, Path::new(paths::FILES))?;
    let options = format!("lowerdir={},upperdir={},workdir={}", image.display(), upper.display(), overlay.display());
    mount(Some("overlay"), &root, Some("overlay"), flags, Some(options.as_str()))?;
    for name in SHARED {
        let (from, to) = (Path::new("/").join(name), root.join(name));
        mount(Some(&from), &to, none, MsFlags::MS_BIND | MsFlags::MS_REC, none)?;
    }
    chdir(&root)?;
    pivot_root(".", ".")?;
    umount2(".", MntFlags::MNT_DETACH)?;
    Ok(chdir("/")?)
}

/// Makes what the root has besides the image. In the layer and not in the overlay, so that no link of the image is followed.
fn fill_upper_layer(upper: &Path, files: &Path) -> io::Result<()> {
    for name in SHARED.iter().chain(&["etc"]) {
        make_directory(&upper.join(name))?;
    }
    let (target, name) = GUEST_LINK;
    symlink(target, upper.join(name))?;
    for name in ETC_FILES {
        match fs::read(files.join(name)) {
            Ok(content) => fs::write(upper.join("etc").join(name), content)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Makes a directory with mode 755, whatever the umask.
fn make_directory(path: &Path) -> io::Result<()> {
    fs::create_dir(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o755))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layer_has_mount_points_the_link_and_the_files_of_the_pod() {
        let directory = tempfile::tempdir().unwrap();
        let (upper, files) = (directory.path().join("upper"), directory.path().join("files"));
        for path in [&upper, &files] {
            fs::create_dir(path).unwrap();
        }
        fs::write(files.join("hosts"), "127.0.0.1\tlocalhost\n").unwrap();
        fill_upper_layer(&upper, &files).unwrap();
        for name in ["proc", "sys", "dev", "etc"] {
            let mode = fs::symlink_metadata(upper.join(name)).unwrap().permissions().mode();
            assert_eq!(mode, 0o040_755, "{name}");
        }
        assert_eq!(fs::read_link(upper.join("guest")).unwrap(), Path::new("/proc/1/root"));
        assert_eq!(fs::read_to_string(upper.join("etc/hosts")).unwrap(), "127.0.0.1\tlocalhost\n");
        assert!(!upper.join("etc/hostname").exists());
    }
}
