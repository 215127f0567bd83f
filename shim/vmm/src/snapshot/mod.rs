//! Owns: what a saved machine is on disk: a folder with two files, `state` and `memory`. See docs/snapshots.md.
//! May use: `virtio::Memory`. Knows no KVM: what a machine's state consists of is `machine`'s.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod envelope;
mod error;
mod folder;
mod memory;

#[cfg(test)]
mod tests;

pub use envelope::{MAX_STATE_BYTES, VERSION};
pub use error::SnapshotError;
pub use memory::Layout;

use crate::virtio::Memory;
use folder::Folder;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The name of the file with everything but memory.
pub const STATE_FILE: &str = "state";
/// The name of the file with the guest's memory.
pub const MEMORY_FILE: &str = "memory";

/// Writes a snapshot to `dir`, which must not exist, or be empty. Afterwards it is there, whole and on stable storage,
/// or it is not there at all. The guest must stand still: neither a processor nor a queue may run.
pub fn write(dir: &Path, state: &impl Serialize, memory: &Memory) -> Result<(), SnapshotError> {
    let bytes = envelope::seal(state)?;
    let folder = Folder::begin(dir)?;
    folder.file(MEMORY_FILE, |file| memory::write(file, memory))?;
    folder.file(STATE_FILE, |file| std::io::Write::write_all(&mut &*file, &bytes))?;
    folder.commit()
}

/// A snapshot that was read: its state, and the file from which memory can be mapped.
#[derive(Debug)]
pub struct Saved<S> {
    /// Everything but memory.
    pub state: S,
    path: PathBuf,
    memory: File,
}

/// Reads the snapshot in `dir`, except its memory. `state` may be any bytes: what comes back is a state or an error,
/// and at most [`MAX_STATE_BYTES`] are read.
pub fn read<S: DeserializeOwned>(dir: &Path) -> Result<Saved<S>, SnapshotError> {
    let open = |name: &str| {
        let path = dir.join(name);
        let file = File::open(&path);
        file.map(|file| (file, path.clone())).map_err(|source| SnapshotError::Io { what: "open", path, source })
    };
    let (state, path) = open(STATE_FILE)?;
    let mut bytes = Vec::new();
    let limit = MAX_STATE_BYTES.saturating_add(1);
    let read = state.take(limit).read_to_end(&mut bytes);
    read.map_err(|source| SnapshotError::Io { what: "read", path: path.clone(), source })?;
    let state = envelope::open(&bytes, &path)?;
    let (memory, path) = open(MEMORY_FILE)?;
    Ok(Saved { state, path, memory })
}

impl<S> Saved<S> {
    /// Maps the memory, privately: pages come from the file when they are touched, and what the guest writes stays in
    /// this process. The file must have exactly the length of the layout, and must stay as it is while it is mapped.
    pub fn map(&self, layout: &Layout) -> Result<Memory, SnapshotError> {
        memory::map(&self.memory, &self.path, layout)
    }
}
