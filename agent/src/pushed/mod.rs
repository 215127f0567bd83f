//! Owns: volumes that the host pushes: the tmpfs in which they lie, which of them there are, and that each is pushed by one
//! at a time. How one is written and shown is `draft`'s.
//! May use: `draft`. Containers see these folders read-only; one with many rights may change them all the same, so nothing
//! in them is followed.

mod draft;

pub use draft::Draft;

use nacelle_base::push::{FOLDER, MAX_BYTES, MAX_DEPTH, MAX_ENTRIES, MAX_PATH};
use nacelle_base::{Classify, Kind};
use nix::mount::{MsFlags, mount};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// The tmpfs of all of them: at most half of the guest's memory, and so many files, folders and links.
const OPTIONS: &str = "mode=755,size=50%,nr_inodes=262144";

/// Why a volume is not taken.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the fields are what the message prints")]
pub enum PushError {
    #[error("{name:?} is no name of a volume: 1 to 128 letters, digits, '_', '-' and '.' are, not starting with '.'")]
    Name { name: String },
    #[error("the volume {name} is being pushed already")]
    Busy { name: String },
    #[error("the volume {name} was not pushed to its end")]
    Short { name: String },
    #[error("{path:?} is no path in a volume: at most {MAX_PATH} bytes and {MAX_DEPTH} names without . and .. are")]
    Path { path: String },
    #[error("{path:?} comes before the folder that it is in, or for the second time, or is no type that is pushed")]
    Order { path: String },
    #[error("the volume has more than {MAX_ENTRIES} files, folders and links, or {MAX_BYTES} bytes")]
    TooMuch,
    #[error("the volume {name} is there, and is not one that can be pushed again")]
    There { name: String },
    #[error("the volume {name} came without the files that it leads to")]
    NoData { name: String },
    #[error("cannot {what} {path:?} of a volume")]
    Write { what: &'static str, path: String, source: io::Error },
    #[error("no room for {path:?} of a volume: all of them have half of the guest's memory")]
    Full { path: String },
    #[error("cannot {what} the folder of pushed volumes")]
    Folder { what: &'static str, source: io::Error },
}

impl Classify for PushError {
    fn kind(&self) -> Kind {
        match self {
            PushError::Name { .. } | PushError::Path { .. } | PushError::Order { .. } => Kind::Invalid,
            PushError::Busy { .. } | PushError::There { .. } | PushError::NoData { .. } => Kind::Conflict,
            PushError::TooMuch | PushError::Full { .. } => Kind::Exhausted,
            PushError::Short { .. } => Kind::Unavailable,
            PushError::Write { .. } | PushError::Folder { .. } => Kind::Internal,
        }
    }
}

#[derive(Debug, Default)]
struct State {
    mounted: bool,
    /// Being pushed or removed.
    busy: BTreeSet<String>,
}

/// The volumes.
#[derive(Clone, Debug)]
pub struct Volumes {
    folder: PathBuf,
    state: Arc<Mutex<State>>,
}

/// While it is held nobody else touches a volume.
#[derive(Debug)]
struct Turn {
    name: String,
    state: Arc<Mutex<State>>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).busy.remove(&self.name);
    }
}

impl Default for Volumes {
    fn default() -> Volumes {
        Volumes { folder: FOLDER.into(), state: Arc::default() }
    }
}

impl Volumes {
    /// In a folder that is there.
    #[cfg(test)]
    fn below(folder: &std::path::Path) -> Volumes {
        let state = State { mounted: true, ..State::default() };
        Volumes { folder: folder.to_owned(), state: Arc::new(Mutex::new(state)) }
    }

    fn turn(&self, name: &str) -> Result<Turn, PushError> {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        if !(1..=128).contains(&name.len()) || name.starts_with('.') || !name.chars().all(plain) {
            return Err(PushError::Name { name: name.chars().take(140).collect() });
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !state.mounted {
            let failed = |what| move |source| PushError::Folder { what, source };
            fs::DirBuilder::new().recursive(true).mode(0o755).create(&self.folder).map_err(failed("make"))?;
            let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
            mount(Some("pushed"), &self.folder, Some("tmpfs"), flags, Some(OPTIONS))
                .map_err(|error| failed("mount")(error.into()))?;
            state.mounted = true;
        }
        if !state.busy.insert(name.to_owned()) {
            return Err(PushError::Busy { name: name.to_owned() });
        }
        Ok(Turn { name: name.to_owned(), state: Arc::clone(&self.state) })
    }

    /// Begins a volume, or its next state.
    pub fn begin(&self, name: &str) -> Result<Draft, PushError> {
        Draft::begin(&self.folder, self.turn(name)?)
    }

    /// Removes a volume; one that is not there is no failure.
    pub fn remove(&self, name: &str) -> Result<(), PushError> {
        let turn = self.turn(name)?;
        draft::remove(&self.folder.join(&turn.name))
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
