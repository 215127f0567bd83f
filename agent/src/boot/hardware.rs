//! Binds the driver to devices that the VM did not have when its kernel looked for them. A VM that was restored from a template has its
//! disks, network interfaces and shares in windows that were empty when the template booted.

use std::fs;
use std::io;
use std::path::Path;

use super::error::BootError;

/// The devices of the platform bus: one directory for each window that the kernel command line announced.
const DEVICES: &str = "/sys/bus/platform/devices";
/// Writing the name of a device here probes it, as the kernel does at its boot. ENODEV: the driver does not want it.
const BIND: &str = "/sys/bus/platform/drivers/virtio-mmio/bind";

/// Binds the driver to each window with a device that has none yet, in the order of the windows, which determines the numbers of disks
/// and interfaces. The first empty window ends it: devices lie in the first ones.
pub(super) fn adopt_devices() -> Result<(), BootError> {
    adopt(Path::new(DEVICES), |name| fs::write(BIND, name))
}

fn adopt(devices: &Path, bind: impl Fn(&str) -> io::Result<()>) -> Result<(), BootError> {
    for number in 0.. {
        let name = format!("virtio-mmio.{number}");
        let device = devices.join(&name);
        if !device.exists() {
            break;
        }
        if device.join("driver").exists() {
            continue;
        }
        match bind(&name) {
            Ok(()) => {}
            // The window has no device.
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => break,
            Err(source) => return Err(BootError::Bind { name, source }),
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use std::cell::RefCell;

    /// Returns a directory with as many windows, of which the first `bound` have a driver.
    fn windows(all: usize, bound: usize) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for number in 0..all {
            let window = directory.path().join(format!("virtio-mmio.{number}"));
            fs::create_dir_all(if number < bound { window.join("driver") } else { window }).unwrap();
        }
        directory
    }

    #[test]
    fn new_devices_are_bound_in_order_until_an_empty_window() {
        let directory = windows(12, 3);
        let seen = RefCell::new(Vec::new());
        let bind = |name: &str| {
            seen.borrow_mut().push(name.to_owned());
            if name == "virtio-mmio.11" { Err(io::Error::from_raw_os_error(libc::ENODEV)) } else { Ok(()) }
        };
        adopt(directory.path(), bind).unwrap();
        let expected: Vec<_> = (3..12).map(|number| format!("virtio-mmio.{number}")).collect();
        assert_eq!(*seen.borrow(), expected, "in the order of the numbers, not of the names");
    }

    #[test]
    fn a_device_that_cannot_be_bound_is_an_error() {
        let directory = windows(2, 1);
        let error = adopt(directory.path(), |_| Err(io::Error::from_raw_os_error(libc::ENOMEM))).unwrap_err();
        assert!(matches!(&error, BootError::Bind { name, .. } if name == "virtio-mmio.1"), "{error}");
        adopt(windows(0, 0).path(), |_| panic!("there is no window")).unwrap();
    }
}
