//! Stores copied-in volumes (configMap, secret, projected, downwardAPI) on a tmpfs.
//!
//! `draft` writes a volume and swaps it in. Containers see the volumes read-only, but one with many capabilities can change them
//! all the same, so no link in them is followed.

mod claim;
mod draft;
mod error;

pub use draft::VolumeDraft;
pub use error::CopiedInVolumeError;

use claim::{ClaimedNames, VolumeClaim};
use nacelle_base::copied_in;
use nix::mount::{MsFlags, mount};
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// Options of the tmpfs of all volumes: half of the guest's memory and so many files, directories and links at most.
const TMPFS_OPTIONS: &str = "mode=755,size=50%,nr_inodes=262144";

/// The copied-in volumes of the pod.
#[derive(Clone, Debug)]
pub struct CopiedInVolumes {
    directory: PathBuf,
    mounted: Arc<Mutex<bool>>,
    claimed: ClaimedNames,
}

impl Default for CopiedInVolumes {
    fn default() -> CopiedInVolumes {
        CopiedInVolumes {
            directory: copied_in::DIRECTORY.into(),
            mounted: Arc::default(),
            claimed: ClaimedNames::default(),
        }
    }
}

impl CopiedInVolumes {
    /// Volumes in an existing directory, which is not mounted.
    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn in_directory(directory: &std::path::Path) -> CopiedInVolumes {
        CopiedInVolumes {
            directory: directory.to_owned(),
            mounted: Arc::new(Mutex::new(true)),
            claimed: ClaimedNames::default(),
        }
    }

    /// Checks the name, mounts the tmpfs on the first call, and claims the volume.
    fn claim(&self, name: &str) -> Result<VolumeClaim, CopiedInVolumeError> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        if !(1..=128).contains(&name.len()) || name.starts_with('.') || !name.chars().all(is_plain) {
            return Err(CopiedInVolumeError::Name { name: name.chars().take(140).collect() });
        }
        self.mount_once()?;
        self.claimed.claim(name).ok_or_else(|| CopiedInVolumeError::Busy { name: name.to_owned() })
    }

    fn mount_once(&self) -> Result<(), CopiedInVolumeError> {
        let mut mounted = self.mounted.lock().unwrap_or_else(PoisonError::into_inner);
        if *mounted {
            return Ok(());
        }
        let failed = |what| move |source| CopiedInVolumeError::Directory { what, source };
        fs::DirBuilder::new().recursive(true).mode(0o755).create(&self.directory).map_err(failed("create"))?;
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        mount(Some("pushed"), &self.directory, Some("tmpfs"), flags, Some(TMPFS_OPTIONS))
            .map_err(|error| failed("mount")(error.into()))?;
        *mounted = true;
        Ok(())
    }

    /// Begins to write a volume, or its next state.
    pub fn begin(&self, name: &str) -> Result<VolumeDraft, CopiedInVolumeError> {
        VolumeDraft::begin(&self.directory, self.claim(name)?)
    }

    /// Returns the end of a volume that is a file.
    pub fn read_end(&self, name: &str) -> Result<Vec<u8>, CopiedInVolumeError> {
        let claim = self.claim(name)?;
        draft::read_end(&self.directory.join(&claim.name), name)
    }

    /// Removes a volume. Succeeds if there is none of that name.
    pub fn remove(&self, name: &str) -> Result<(), CopiedInVolumeError> {
        let claim = self.claim(name)?;
        draft::remove_tree(&self.directory.join(&claim.name))
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
