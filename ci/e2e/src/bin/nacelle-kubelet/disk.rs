//! Provides a disk of the node for pods: a loop device over a file.

use crate::fixture::KubeletFixture;
use crate::pods::wait_for;
use nacelle_e2e::run::run_program;
use std::path::PathBuf;

/// The disk. It exists until [`detach`](Self::detach), or until the case has failed.
pub struct LoopDisk {
    file: PathBuf,
    device: String,
}

impl LoopDisk {
    /// Creates a disk of this many MiB.
    #[track_caller]
    pub fn new(fixture: &KubeletFixture, name: &str, mib: u32) -> Self {
        let file = fixture.node.directory().join(format!("{name}.raw"));
        run_program("truncate", [format!("--size={mib}M").as_ref(), file.as_os_str()]).ok();
        let device = run_program("losetup", ["--find".as_ref(), "--show".as_ref(), file.as_os_str()]).ok();
        Self { file, device }
    }

    /// Returns the path of the block device.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// Grows the disk to this many MiB.
    #[track_caller]
    pub fn grow(&self, mib: u32) {
        run_program("truncate", [format!("--size={mib}M").as_ref(), self.file.as_os_str()]).ok();
        run_program("losetup", ["--set-capacity", &self.device]).ok();
    }

    /// Removes the disk after kubelet has released it.
    #[track_caller]
    pub fn detach(self) {
        wait_for("kubelet has released the device", || {
            run_program("losetup", ["--detach", &self.device]);
            let of = run_program("losetup", ["--associated".as_ref(), self.file.as_os_str()]).stdout;
            (!of.contains(&self.device)).then_some(())
        });
    }
}

impl Drop for LoopDisk {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The kernel detaches it when the last descriptor is closed.
            run_program("losetup", ["--detach", &self.device]);
        }
    }
}
