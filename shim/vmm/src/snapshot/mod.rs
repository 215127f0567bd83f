//! Owns: what a saved machine is on disk: a folder with two files, `state` and `memory`. See docs/contributor/snapshots.md.
//! May use: `machine`, which owns what a machine's state consists of.
//!
//! ```no_run
//! use nacelle_vmm::{machine::Machine, rng::Rng, snapshot};
//! # fn save_and_restore(machine: Machine) -> Result<(), Box<dyn std::error::Error>> {
//! machine.pause()?;
//! snapshot::save(&machine, "/var/lib/x/template".as_ref())?;
//! // … in this process or another one:
//! let saved = snapshot::open("/var/lib/x/template".as_ref())?;
//! let mut builder = saved.builder()?;
//! builder.attach(Rng::new().device())?; // the same devices in the same order
//! builder.restore(saved.state())?.resume()?;
//! # Ok(()) }
//! ```
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod envelope;
mod error;
mod folder;
mod memory;

#[cfg(test)]
mod tests;

pub use envelope::{MAX_STATE_BYTES, VERSION};
pub use error::SnapshotError;

use crate::machine::{self, Builder, Config, Machine, MachineState};
use crate::virtio::{DeviceKind, Memory};
use folder::Folder;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

/// The name of the file with everything but memory.
pub const STATE_FILE: &str = "state";
/// The name of the file with the guest's memory.
pub const MEMORY_FILE: &str = "memory";

/// The document in the file `state`, version 1. New fields are optional; anything else is a new version.
#[derive(Debug, Serialize, Deserialize)]
struct Document<S> {
    memory_mib: u32,
    #[serde(default, skip_serializing_if = "is_zero")]
    reserve_mib: u32,
    machine: S,
}

fn is_zero(mib: &u32) -> bool {
    *mib == 0
}

/// A snapshot that was read.
#[derive(Debug)]
pub struct Snapshot<S = MachineState> {
    document: Document<S>,
    memory: File,
}

/// Writes a machine that is paused to `dir`, which must not exist, or be empty. Afterwards the snapshot is there, whole
/// and on stable storage, or it is not there at all. The machine stays as it is.
pub fn save(machine: &Machine, dir: &Path) -> Result<(), SnapshotError> {
    let state = machine.save().map_err(|source| SnapshotError::Machine { source })?;
    let Config { memory_mib, reserve_mib, .. } = *machine.config();
    let document = Document { memory_mib, reserve_mib, machine: state };
    write(dir, &document, machine.memory())
}

/// Reads the snapshot in `dir`, except its memory. Any bytes may lie there: what comes back is a snapshot or an error,
/// and at most [`MAX_STATE_BYTES`] are read.
pub fn open(dir: &Path) -> Result<Snapshot, SnapshotError> {
    read(dir)
}

fn write(dir: &Path, document: &Document<impl Serialize>, memory: &Memory) -> Result<(), SnapshotError> {
    let bytes = envelope::seal(document)?;
    let folder = Folder::begin(dir)?;
    folder.file(MEMORY_FILE, |file| memory::write(file, memory))?;
    folder.file(STATE_FILE, |mut file| file.write_all(&bytes))?;
    folder.commit()
}

fn read<S: DeserializeOwned>(dir: &Path) -> Result<Snapshot<S>, SnapshotError> {
    let open = |name: &str| {
        let path = dir.join(name);
        let file = File::open(&path);
        file.map(|file| (file, path.clone())).map_err(|source| SnapshotError::Io { what: "open", path, source })
    };
    let (state, path) = open(STATE_FILE)?;
    let mut bytes = Vec::new();
    let read = state.take(MAX_STATE_BYTES.saturating_add(1)).read_to_end(&mut bytes);
    read.map_err(|source| SnapshotError::Io { what: "read", path: path.clone(), source })?;
    let document: Document<S> = envelope::open(&bytes, &path)?;

    let (memory, path) = open(MEMORY_FILE)?;
    let expected = u64::from(machine::made_mib(document.memory_mib, document.reserve_mib)) << 20;
    match memory.metadata().map(|file| file.len()) {
        Ok(got) if got == expected => Ok(Snapshot { document, memory }),
        Ok(got) => Err(SnapshotError::Length { path, got, expected }),
        Err(source) => Err(SnapshotError::Io { what: "look at", path, source }),
    }
}

/// For `fuzz`: reads these bytes as a file `state`, and as the document of one that is whole.
#[cfg(any(test, feature = "fuzz"))]
pub(crate) fn harness(data: &[u8]) {
    let whole = envelope::wrap(data).unwrap_or_default();
    for bytes in [data, &whole] {
        if let Ok(document) = envelope::open::<Document<MachineState>>(bytes, Path::new(STATE_FILE)) {
            let again = envelope::seal(&document).unwrap_or_default();
            assert!(envelope::open::<Document<MachineState>>(&again, Path::new(STATE_FILE)).is_ok());
        }
    }
}

impl Snapshot {
    /// The state, for [`Builder::restore`].
    pub fn state(&self) -> &MachineState {
        &self.document.machine
    }

    /// Processors.
    pub fn vcpus(&self) -> usize {
        self.document.machine.vcpus.len()
    }

    /// Memory, in MiB.
    pub fn memory_mib(&self) -> u32 {
        self.document.memory_mib
    }

    /// Memory in reserve, in MiB.
    pub fn reserve_mib(&self) -> u32 {
        self.document.reserve_mib
    }

    /// The devices, in the order in which the builder must get devices like them.
    pub fn devices(&self) -> impl Iterator<Item = DeviceKind> {
        self.document.machine.devices.iter().map(|transport| transport.device.kind())
    }

    /// A builder with the snapshot's memory, mapped privately: pages come from the file when they are touched, and what
    /// the guest writes stays in this process. The file must stay as it is as long as the machine lives.
    pub fn builder(&self) -> Result<Builder, machine::Error> {
        let vcpus = u8::try_from(self.vcpus()).unwrap_or(u8::MAX); // too many for any machine
        let (memory_mib, reserve_mib) = (self.memory_mib(), self.reserve_mib());
        Builder::with_saved_memory(Config { vcpus, memory_mib, reserve_mib, ..Config::default() }, &self.memory)
    }
}
