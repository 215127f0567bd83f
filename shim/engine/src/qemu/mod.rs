//! Owns: the engine that runs machines in QEMU's microvm.
//! May use: `vmm` (its devices reach QEMU over vhost-user), `console`, `ended`. Knows no pod.

mod qmp;

pub use qmp::QmpError;

use std::path::PathBuf;

use nacelle_base::machine::{Extent, ImageDisk};

use crate::{Accelerator, DiskSpec, EngineError, Slot};

/// Where Debian has QEMU.
pub const PROGRAM: &str = "/usr/bin/qemu-system-x86_64";

/// The engine. Cheap to make; holds nothing.
#[derive(Clone, Debug)]
pub struct Qemu {
    program: PathBuf,
    accelerator: Accelerator,
}

impl Qemu {
    /// An engine that runs `program` (see [`PROGRAM`]) with `accelerator` (see [`choose`](crate::choose)).
    pub fn new(program: impl Into<PathBuf>, accelerator: Accelerator) -> Qemu {
        Qemu { program: program.into(), accelerator }
    }
}

pub(crate) fn make_slot(disk: &DiskSpec) -> Result<Slot, EngineError> {
    let failed = |source| EngineError::Disk { serial: disk.serial().to_owned(), source };
    match disk {
        DiskSpec::Growing { serial } => Slot::read_only(serial).map_err(failed),
        DiskSpec::File { path, read_only, serial } => {
            let length =
                file_length(path).map_err(|source| EngineError::File { what: "open", path: path.clone(), source })?;
            if !read_only {
                return Slot::read_write(serial, path, length).map_err(failed);
            }
            let slot = Slot::read_only(serial).map_err(failed)?;
            if length > 0 {
                let extents = vec![Extent { path: path.clone(), offset: 0, length }];
                slot.place(0, &ImageDisk { extents }).map_err(failed)?;
            }
            Ok(slot)
        }
    }
}

/// The length of a file or block device.
fn file_length(path: &std::path::Path) -> std::io::Result<u64> {
    use std::io::Seek;
    std::fs::File::open(path)?.seek(std::io::SeekFrom::End(0))
}
