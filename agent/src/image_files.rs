//! Mounts an image from files of the node. Linux 6.12 and newer mount EROFS from files; older kernels, and those without
//! EROFS_FS_BACKED_BY_FILE, get a loop device for each file, which the kernel releases with the mount.

use crate::sys;
use nacelle_base::random;
use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The number of attempts to get a loop device, which another process may take or remove meanwhile.
const ATTEMPTS: u32 = 100;
/// The unit of the pause between two attempts, which has a random length: agents that start together do not meet again. Their
/// process ids may be the same, each in its namespace.
const PAUSE: Duration = Duration::from_millis(1);

/// Mounts the image of these files, the tree and its layers, read-only on a directory. `devices` is the node's /dev.
pub(crate) fn mount_files(tree: &Path, layers: &[PathBuf], point: &Path, devices: &Path) -> io::Result<()> {
    match sys::mount_erofs(tree, layers, point) {
        Err(error) if error.raw_os_error() == Some(libc::ENOTBLK) => mount_by_loop(tree, layers, point, devices),
        result => result,
    }
}

fn mount_by_loop(tree: &Path, layers: &[PathBuf], point: &Path, devices: &Path) -> io::Result<()> {
    // The mount keeps the devices when this function closes them.
    let tree = LoopDevice::attach(tree, devices)?;
    let layers = layers.iter().map(|layer| LoopDevice::attach(layer, devices)).collect::<io::Result<Vec<_>>>()?;
    let paths: Vec<_> = layers.iter().map(|layer| layer.path.clone()).collect();
    sys::mount_erofs(&tree.path, &paths, point)
}

/// A loop device with a file. The kernel releases it when it is closed and not mounted.
struct LoopDevice {
    path: PathBuf,
    _open: File,
}

impl LoopDevice {
    fn attach(path: &Path, devices: &Path) -> io::Result<LoopDevice> {
        let file = File::open(path)?;
        let control = OpenOptions::new().read(true).write(true).open(devices.join("loop-control"))?;
        let mut attempt = 0;
        loop {
            attempt += 1;
            let path = devices.join(format!("loop{}", sys::find_free_loop_device(&control)?));
            let attached = File::open(&path).and_then(|device| {
                sys::configure_loop_device(&device, &file)?;
                Ok(LoopDevice { path, _open: device })
            });
            let lost = [libc::EBUSY, libc::ENOENT, libc::ENXIO, libc::ENODEV];
            match attached {
                Err(error)
                    if attempt < ATTEMPTS && error.raw_os_error().is_some_and(|number| lost.contains(&number)) =>
                {
                    let mut units = [0];
                    random::fill(&mut units)?;
                    std::thread::sleep(PAUSE * (1 + u32::from(units[0] % 16)));
                }
                result => return result,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::mount::umount;
    use std::process::Command;

    /// Returns the files of the node's loop devices.
    fn backing_files() -> Vec<String> {
        let devices = std::fs::read_dir("/sys/block").unwrap().filter_map(Result::ok);
        devices.filter_map(|device| std::fs::read_to_string(device.path().join("loop/backing_file")).ok()).collect()
    }

    #[test]
    fn a_loop_device_lives_as_long_as_its_mount() {
        let has_loop = OpenOptions::new().read(true).write(true).open("/dev/loop-control").is_ok();
        if !has_loop || !nix::unistd::geteuid().is_root() || Command::new("mkfs.erofs").arg("--help").output().is_err()
        {
            println!("skipped: this needs root, loop devices and mkfs.erofs");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let (source, image, point) =
            (directory.path().join("s"), directory.path().join("i"), directory.path().join("p"));
        std::fs::create_dir(&source).unwrap();
        std::fs::create_dir(&point).unwrap();
        std::fs::write(source.join("file"), "content").unwrap();
        let made = Command::new("mkfs.erofs").arg("--quiet").args([&image, &source]).status().unwrap();
        assert!(made.success());
        mount_by_loop(&image, &[], &point, Path::new("/dev")).unwrap();
        assert_eq!(std::fs::read_to_string(point.join("file")).unwrap(), "content");
        let name = image.to_str().unwrap().to_owned();
        let is_attached = || backing_files().iter().any(|file| file.trim() == name);
        assert!(is_attached(), "{:?}", backing_files());
        umount(&point).unwrap();
        assert!(!is_attached(), "{:?}", backing_files());
        // Nothing stays of a file that is no image.
        std::fs::write(&image, [0; 8192]).unwrap();
        let error = mount_by_loop(&image, &[], &point, Path::new("/dev")).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{error}");
        assert!(!is_attached(), "{:?}", backing_files());
        let missing = directory.path().join("missing");
        let error = mount_by_loop(&missing, &[], &point, Path::new("/dev")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
