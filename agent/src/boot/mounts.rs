//! Makes the agent's own mounts: a tmpfs as root, which pivot_root accepts, and the kernel's file systems in it.
//!
//! For a pod on the node the same is made over the pod's directory; the node's files are below `/node` there.

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use nix::unistd::{chdir, chroot, mkdir, pivot_root};
use std::path::Path;

use super::error::BootError;
use crate::paths;

const ROOT: &str = "/.root";
/// The devices that the agent and its containers use: name and minor number of major 1, then one of major 5.
const DEVICES: [(&str, u64, u64); 6] =
    [("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9), ("tty", 5, 0)];

fn make_directory(path: &str) -> Result<(), BootError> {
    match mkdir(path, Mode::from_bits_truncate(0o755)) {
        Ok(()) | Err(nix::Error::EEXIST) => Ok(()),
        Err(source) => Err(BootError::Directory { path: path.to_owned(), source }),
    }
}

fn mount_new(kind: &'static str, path: &str, flags: MsFlags, data: &str) -> Result<(), BootError> {
    make_directory(path)?;
    mount(Some(kind), path, Some(kind), flags, Some(data).filter(|data| !data.is_empty()))
        .map_err(|source| BootError::Mount { kind, path: path.to_owned(), source })
}

const PLAIN: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NOEXEC);

/// Makes the mounts that the handshake needs: the new root, /dev, /proc and /sys. Switches to the new root.
pub fn switch_root() -> Result<(), BootError> {
    mount_new("tmpfs", ROOT, MsFlags::MS_NOSUID, "mode=755")?;
    mount_new("devtmpfs", &format!("{ROOT}/dev"), PLAIN, "mode=755")?;
    mount_new("proc", &format!("{ROOT}/proc"), PLAIN | MsFlags::MS_NODEV, "")?;
    mount_new("sysfs", &format!("{ROOT}/sys"), PLAIN | MsFlags::MS_NODEV, "")?;
    let moved = || {
        chdir(ROOT)?;
        mount(Some("."), "/", None::<&Path>, MsFlags::MS_MOVE, None::<&Path>)?;
        chroot(".")?;
        chdir("/")
    };
    moved().map_err(|source| BootError::SwitchRoot { source })
}

/// Mounts the cgroups on /sys, where containers and the agent expect them.
pub fn mount_cgroups() -> Result<(), BootError> {
    mount_new("cgroup2", paths::CGROUP, PLAIN | MsFlags::MS_NODEV, "")
}

/// Unmounts /sys: the pod may get a network namespace of its own, whose sysfs is another one.
pub fn unmount_sysfs() -> Result<(), BootError> {
    let path = "/sys";
    umount2(path, MntFlags::MNT_DETACH).map_err(|source| BootError::Unmount { path, source })
}

/// Makes a root of the pod's own on the node, over the pod's directory, and switches to it. The caller is in a mount namespace of
/// its own, which receives later mounts of the node and propagates none to it.
pub fn switch_root_on_node(directory: &Path) -> Result<(), BootError> {
    let none = None::<&str>;
    let switch = || {
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_SLAVE, none)?;
        mount(Some("nacelle"), directory, Some("tmpfs"), MsFlags::MS_NOSUID, Some("mode=755"))?;
        chdir(directory)?;
        let node = paths::NODE.trim_start_matches('/');
        mkdir(node, Mode::from_bits_truncate(0o700))?;
        pivot_root(".", node)?;
        chdir("/")
    };
    switch().map_err(|source| BootError::SwitchRoot { source })?;
    mount_new("tmpfs", "/dev", MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC, "mode=755,size=64k")?;
    for (name, major, minor) in DEVICES {
        let path = format!("/dev/{name}");
        mknod(path.as_str(), SFlag::S_IFCHR, Mode::from_bits_truncate(0o666), makedev(major, minor))
            .map_err(|source| BootError::Device { path, source })?;
    }
    mount_new("proc", "/proc", PLAIN | MsFlags::MS_NODEV, "")
}

/// Mounts a directory, with everything mounted in it, at another path.
pub fn bind_mount(from: &Path, to: &Path) -> Result<(), BootError> {
    let failed = |source| BootError::Mount { kind: "a directory of the node", path: to.display().to_string(), source };
    mount(Some(from), to, None::<&str>, MsFlags::MS_BIND | MsFlags::MS_REC, None::<&str>).map_err(failed)
}

/// Makes the mounts that containers need. With the node's IPC namespace, /dev/shm is the node's, too. `shm_bytes` is the size of
/// /dev/shm; 0: 64 MiB.
pub fn mount_for_containers(shm_bytes: u64, node_ipc: bool) -> Result<(), BootError> {
    let plain = PLAIN | MsFlags::MS_NODEV;
    mount_new("sysfs", "/sys", plain, "")?;
    mount_cgroups()?;
    mount_new("tmpfs", "/run", MsFlags::MS_NOSUID | MsFlags::MS_NODEV, "mode=755")?;
    mount_new("devpts", "/dev/pts", PLAIN, "newinstance,ptmxmode=0666,mode=0620,gid=5")?;
    mount_new("mqueue", "/dev/mqueue", plain, "")?;
    for path in ["/tmp", paths::RUN, paths::IMAGES, paths::SCRATCH, paths::CONTAINERS] {
        make_directory(path)?;
    }
    make_directory(paths::BUNDLES)?;
    make_directory(paths::FILES)?;
    if node_ipc {
        make_directory("/dev/shm")?;
        return bind_mount(&paths::node_path(Path::new("/dev/shm")), Path::new("/dev/shm"));
    }
    let size = if shm_bytes == 0 { 64 << 20 } else { shm_bytes };
    mount_new("tmpfs", "/dev/shm", plain, &format!("mode=1777,size={size}"))
}
