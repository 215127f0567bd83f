//! Provides a disk of the node for pods: a loop device over a file.

use crate::pods::wait;
use crate::world::World;
use nacelle_e2e::run::call;
use std::path::PathBuf;

/// The disk. It exists until [`detach`](Self::detach), or until the case has failed.
pub struct Disk {
    file: PathBuf,
    device: String,
}

impl Disk {
    /// Creates a disk of this many MiB.
    #[track_caller]
    pub fn new(world: &World, name: &str, mib: u32) -> Self {
        let file = world.node.directory().join(format!("{name}.raw"));
        call("truncate", [format!("--size={mib}M").as_ref(), file.as_os_str()]).ok();
        let device = call("losetup", ["--find".as_ref(), "--show".as_ref(), file.as_os_str()]).ok();
        Self { file, device }
    }

    /// Returns the path of the block device.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// Grows the disk to this many MiB.
    #[track_caller]
    pub fn grow(&self, mib: u32) {
        call("truncate", [format!("--size={mib}M").as_ref(), self.file.as_os_str()]).ok();
        call("losetup", ["--set-capacity", &self.device]).ok();
    }

    /// Removes the disk after kubelet has released it.
    #[track_caller]
    pub fn detach(self) {
        wait("kubelet has let go of the device", || {
            call("losetup", ["--detach", &self.device]);
            let of = call("losetup", ["--associated".as_ref(), self.file.as_os_str()]).stdout;
            (!of.contains(&self.device)).then_some(())
        });
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The kernel detaches it when the last descriptor is closed.
            call("losetup", ["--detach", &self.device]);
        }
    }
}
