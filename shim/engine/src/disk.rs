//! Creates the slot of each disk of a VM's specification.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::path::Path;

use nacelle_base::machine::{Extent, ImageDisk};

use crate::{DiskSpec, EngineError, Slot};

/// Creates the slot of a disk in its initial state.
pub(crate) fn create_slot(disk: &DiskSpec) -> Result<Slot, EngineError> {
    let failed = |source| EngineError::Disk { serial: disk.serial().to_owned(), source };
    let (path, read_only, serial) = match disk {
        DiskSpec::Images { serial } => return Slot::read_only(serial).map_err(failed),
        DiskSpec::Volumes { serial } => return Slot::volumes(serial).map_err(failed),
        DiskSpec::File { path, read_only, serial } => (path, read_only, serial),
    };
    let length = length(path).map_err(|source| EngineError::File { what: "open", path: path.clone(), source })?;
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

/// Returns the length of a file or block device in bytes.
fn length(path: &Path) -> io::Result<u64> {
    File::open(path)?.seek(SeekFrom::End(0))
}
