//! Owns: the guest's own mounts: a tmpfs as a root that pivot_root accepts, and the kernel's file systems in it.

use nix::mount::{MsFlags, mount};
use nix::unistd::{chdir, chroot, mkdir};
use std::path::Path;

use super::BootError;

const ROOT: &str = "/.root";

fn directory(path: &str) -> Result<(), BootError> {
    match mkdir(path, nix::sys::stat::Mode::from_bits_truncate(0o755)) {
        Ok(()) | Err(nix::Error::EEXIST) => Ok(()),
        Err(source) => Err(BootError::Directory { path: path.to_owned(), source }),
    }
}

fn mounted(kind: &'static str, path: &str, flags: MsFlags, data: &str) -> Result<(), BootError> {
    directory(path)?;
    mount(Some(kind), path, Some(kind), flags, Some(data).filter(|data| !data.is_empty()))
        .map_err(|source| BootError::Mount { kind, path: path.to_owned(), source })
}

const PLAIN: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NOEXEC);

/// The mounts that the handshake needs: the new root, /dev and /proc. The process lives in the new root afterwards.
pub fn first() -> Result<(), BootError> {
    mounted("tmpfs", ROOT, MsFlags::MS_NOSUID, "mode=755")?;
    mounted("devtmpfs", &format!("{ROOT}/dev"), PLAIN, "mode=755")?;
    mounted("proc", &format!("{ROOT}/proc"), PLAIN | MsFlags::MS_NODEV, "")?;
    let moved = || {
        chdir(ROOT)?;
        mount(Some("."), "/", None::<&Path>, MsFlags::MS_MOVE, None::<&Path>)?;
        chroot(".")?;
        chdir("/")
    };
    moved().map_err(|source| BootError::SwitchRoot { source })
}

/// The mounts that containers need.
pub fn rest(shm_bytes: u64) -> Result<(), BootError> {
    let plain = PLAIN | MsFlags::MS_NODEV;
    mounted("sysfs", "/sys", plain, "")?;
    mounted("cgroup2", "/sys/fs/cgroup", plain, "")?;
    mounted("tmpfs", "/run", MsFlags::MS_NOSUID | MsFlags::MS_NODEV, "mode=755")?;
    mounted("devpts", "/dev/pts", PLAIN, "newinstance,ptmxmode=0666,mode=0620,gid=5")?;
    mounted("mqueue", "/dev/mqueue", plain, "")?;
    for path in ["/tmp", crate::paths::RUN, crate::paths::IMAGES, crate::paths::SCRATCH, crate::paths::CONTAINERS] {
        directory(path)?;
    }
    directory(crate::paths::BUNDLES)?;
    directory(crate::paths::FILES)?;
    let size = if shm_bytes == 0 { 64 << 20 } else { shm_bytes };
    mounted("tmpfs", "/dev/shm", plain, &format!("mode=1777,size={size}"))
}
