//! Stores copied-in volumes (configMap, secret, projected, downwardAPI) on a tmpfs.
//!
//! `draft` writes a volume and swaps it in. Containers see the volumes read-only, but one with many capabilities can change them
//! all the same, so no link in them is followed.

mod busy;
mod draft;
mod error;

pub use draft::Draft;
pub use error::PushError;

use busy::{BusyNames, VolumeClaim};
use nacelle_base::push;
use nix::mount::{MsFlags, mount};
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// Options of the tmpfs of all volumes: half of the guest's memory and so many files, directories and links at most.
const OPTIONS: &str = "mode=755,size=50%,nr_inodes=262144";

/// The copied-in volumes of the pod.
#[derive(Clone, Debug)]
pub struct Volumes {
    directory: PathBuf,
    mounted: Arc<Mutex<bool>>,
    busy: BusyNames,
}

impl Default for Volumes {
    fn default() -> Volumes {
        Volumes { directory: push::DIRECTORY.into(), mounted: Arc::default(), busy: BusyNames::default() }
    }
}

impl Volumes {
    /// Volumes in an existing directory, which is not mounted.
    #[cfg(test)]
    fn below(directory: &std::path::Path) -> Volumes {
        Volumes { directory: directory.to_owned(), mounted: Arc::new(Mutex::new(true)), busy: BusyNames::default() }
    }

    /// Checks the name, mounts the tmpfs on the first call, and claims the volume.
    fn claim(&self, name: &str) -> Result<VolumeClaim, PushError> {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        if !(1..=128).contains(&name.len()) || name.starts_with('.') || !name.chars().all(plain) {
            return Err(PushError::Name { name: name.chars().take(140).collect() });
        }
        self.mount_once()?;
        self.busy.claim(name).ok_or_else(|| PushError::Busy { name: name.to_owned() })
    }

    fn mount_once(&self) -> Result<(), PushError> {
        let mut mounted = self.mounted.lock().unwrap_or_else(PoisonError::into_inner);
        if *mounted {
            return Ok(());
        }
        let failed = |what| move |source| PushError::Directory { what, source };
        fs::DirBuilder::new().recursive(true).mode(0o755).create(&self.directory).map_err(failed("make"))?;
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        mount(Some("pushed"), &self.directory, Some("tmpfs"), flags, Some(OPTIONS))
            .map_err(|error| failed("mount")(error.into()))?;
        *mounted = true;
        Ok(())
    }

    /// Begins to write a volume, or its next state.
    pub fn begin(&self, name: &str) -> Result<Draft, PushError> {
        Draft::begin(&self.directory, self.claim(name)?)
    }

    /// Removes a volume. Succeeds if there is none of that name.
    pub fn remove(&self, name: &str) -> Result<(), PushError> {
        let claim = self.claim(name)?;
        draft::remove_tree(&self.directory.join(&claim.name))
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
