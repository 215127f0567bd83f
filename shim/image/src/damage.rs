//! Describes damage of stored files, and keeps what a verification has found: the file `health.json` of the store, which survives a
//! restart. A missing or unreadable `health.json` means only that damage has to be found again.

use crate::directory::ContentKey;
use nacelle_base::files::{at, remove_if_there, write_whole};
use nacelle_model::digest::Digest;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

const FORMAT_VERSION: u64 = 1;

/// Damage of a stored file. The text completes the sentence "FILE …".
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum FileDamage {
    /// The file does not exist.
    #[error("is missing")]
    Missing,
    /// The file has another length.
    #[error("has {found} bytes instead of {expected}")]
    Length {
        /// The actual length in bytes.
        found: u64,
        /// The recorded length in bytes.
        expected: u64,
    },
    /// The content of the file is not what was written.
    #[error("has the digest {found} instead of {expected}")]
    Content {
        /// The actual digest.
        found: Digest,
        /// The recorded digest.
        expected: Digest,
    },
    /// The file has no fs-verity, with which it was written: another program has replaced it.
    #[error("has lost its fs-verity: it is not the file that was written")]
    VerityLost,
    /// The file has fs-verity for another content than the one that was written.
    #[error("has the fs-verity digest {found} instead of {expected}")]
    Verity {
        /// The actual fs-verity digest.
        found: Digest,
        /// The recorded fs-verity digest.
        expected: Digest,
    },
    /// The file has fs-verity, and the running kernel cannot read such files. They are sound again under a kernel that can.
    #[error("cannot be read: it has fs-verity, which the running kernel does not support")]
    VerityUnsupported,
    /// The checksum that the file itself contains does not match.
    #[error("does not match the checksum at its end")]
    Checksum,
    /// The disk cannot read the file, or it is not of the right form.
    #[error("cannot be read: {why}")]
    Unreadable {
        /// The reason.
        why: String,
    },
}

impl FileDamage {
    /// Returns whether a look at the file without reading it finds the damage again, so that it need not be recorded.
    pub fn is_visible(&self) -> bool {
        matches!(
            self,
            FileDamage::Missing
                | FileDamage::Length { .. }
                | FileDamage::VerityLost
                | FileDamage::Verity { .. }
                | FileDamage::VerityUnsupported
        )
    }

    /// Returns the damage that an error of reading a file proves; `None` if the error says nothing about the file.
    pub fn from_read_error(error: &io::Error) -> Option<FileDamage> {
        let is_damage = match error.raw_os_error() {
            Some(number) => matches!(number, libc::EIO | libc::EUCLEAN | libc::EBADMSG | libc::EISDIR),
            None => matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof),
        };
        match error.kind() {
            io::ErrorKind::NotFound => Some(FileDamage::Missing),
            // Of open; no file system answers so to a read of a regular file.
            _ if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Some(FileDamage::VerityUnsupported),
            _ if is_damage => Some(FileDamage::Unreadable { why: error.to_string() }),
            _ => None,
        }
    }
}

/// A damaged file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DamagedFile {
    /// The path of the file.
    pub path: PathBuf,
    /// Its damage.
    pub damage: FileDamage,
}

impl fmt::Display for DamagedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.path.display(), self.damage)
    }
}

/// One damaged file of an image, as a verification reports it. A file of several images is reported for each of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageDamage {
    /// The id of the image.
    pub image: String,
    /// The names of the image: its tags, or its digest references if it has no tag.
    pub names: Vec<String>,
    /// The path of the file.
    pub path: PathBuf,
    /// Its damage.
    pub damage: FileDamage,
    /// Whether the file has been repaired since.
    pub repaired: bool,
    /// The reason that a repair has failed.
    pub repair_error: Option<String>,
}

/// The result of a verification.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageVerification {
    /// The number of images.
    pub images: u64,
    /// The number of files.
    pub files: u64,
    /// The number of bytes that were read.
    pub bytes: u64,
    /// The number of sound files that have fs-verity.
    pub verity_files: u64,
    /// The damaged files, by image.
    pub damaged: Vec<ImageDamage>,
}

/// The known damage of the store's content. Reading it never waits for the disk.
#[derive(Debug)]
pub struct DamageRecord {
    path: PathBuf,
    state: Mutex<DamageState>,
    /// Held while the file is written.
    writer: Mutex<()>,
}

#[derive(Clone, Debug, Default)]
struct DamageState {
    damaged: BTreeMap<ContentKey, DamagedFile>,
    verified: Option<u64>,
}

#[derive(Serialize, Deserialize)]
struct HealthFile {
    version: u64,
    /// When the last verification of all images ended, in seconds since 1970.
    #[serde(default)]
    verified: Option<u64>,
    #[serde(default)]
    damaged: Vec<HealthEntry>,
}

#[derive(Serialize, Deserialize)]
struct HealthEntry {
    content: ContentKey,
    path: PathBuf,
    damage: FileDamage,
}

impl DamageRecord {
    /// Reads the record. Blocks.
    pub fn open(path: &Path) -> DamageRecord {
        let mut state = DamageState::default();
        let read = std::fs::read(path).and_then(|bytes| Ok(serde_json::from_slice::<HealthFile>(&bytes)?));
        match read {
            Ok(file) if file.version == FORMAT_VERSION => {
                state.verified = file.verified;
                let damaged = file.damaged.into_iter();
                state.damaged = damaged
                    .map(|entry| (entry.content, DamagedFile { path: entry.path, damage: entry.damage }))
                    .collect();
            }
            Ok(HealthFile { version, .. }) => {
                tracing::warn!(path = %path.display(), version, "ignoring a record of damaged images of another version");
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "cannot read which images are damaged; nacelle image verify finds them again");
            }
        }
        DamageRecord { path: path.to_owned(), state: Mutex::new(state), writer: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, DamageState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the known damage of this content.
    pub fn get(&self, key: &ContentKey) -> Option<DamagedFile> {
        self.state().damaged.get(key).cloned()
    }

    /// Returns whether any of this content is known to be damaged.
    pub fn contains_any(&self, keys: impl IntoIterator<Item = ContentKey>) -> bool {
        let state = self.state();
        !state.damaged.is_empty() && keys.into_iter().any(|key| state.damaged.contains_key(&key))
    }

    /// Sets or clears the damage of this content. Returns whether that is a change. Blocks if it is.
    pub fn set(&self, key: ContentKey, damage: Option<DamagedFile>) -> bool {
        let mut state = self.state();
        let after = damage.clone();
        let before = match damage {
            Some(damage) => state.damaged.insert(key, damage),
            None => state.damaged.remove(&key),
        };
        drop(state);
        let is_hidden = |file: &Option<DamagedFile>| file.as_ref().is_some_and(|file| !file.damage.is_visible());
        if before != after && (is_hidden(&before) || is_hidden(&after)) {
            self.save();
        }
        before != after
    }

    /// Forgets the damage of all other content. Blocks if there is any.
    pub fn retain(&self, live: &HashSet<ContentKey>) {
        let mut state = self.state();
        let before = state.damaged.len();
        state.damaged.retain(|key, _| live.contains(key));
        let changed = state.damaged.len() != before;
        drop(state);
        if changed {
            self.save();
        }
    }

    /// Returns when the last verification of all images ended, in seconds since 1970.
    pub fn verified(&self) -> Option<u64> {
        self.state().verified
    }

    /// Records the end of a verification of all images. Blocks.
    pub fn set_verified(&self, seconds: u64) {
        self.state().verified = Some(seconds);
        self.save();
    }

    /// Writes the record. Damage that is visible is not written: the next start finds it.
    fn save(&self) {
        let _writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let DamageState { damaged, verified } = self.state().clone();
        let hidden = damaged.into_iter().filter(|(_, file)| !file.damage.is_visible());
        let damaged: Vec<HealthEntry> =
            hidden.map(|(content, file)| HealthEntry { content, path: file.path, damage: file.damage }).collect();
        let saved = if damaged.is_empty() && verified.is_none() {
            remove_if_there(&self.path)
        } else {
            let bytes = serde_json::to_vec(&HealthFile { version: FORMAT_VERSION, verified, damaged });
            let bytes = bytes.map_err(|error| at("write", &self.path)(error.into()));
            bytes.and_then(|bytes| write_whole(&self.path, &bytes))
        };
        if let Err(error) = saved {
            let error = nacelle_base::Chain(&error);
            tracing::warn!(%error, "cannot record which images are damaged; a restart forgets them");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::directory::ContentKind;

    fn damaged(damage: FileDamage) -> DamagedFile {
        DamagedFile { path: "/images/layers/x.blob".into(), damage }
    }

    #[test]
    fn hidden_damage_survives_a_restart_and_visible_damage_is_found_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("health.json");
        let record = DamageRecord::open(&path);
        let (one, two) = ((ContentKind::Layer, Digest([1; 32])), (ContentKind::Tree, Digest([2; 32])));
        let content = FileDamage::Content { found: Digest([3; 32]), expected: Digest([4; 32]) };
        assert!(record.set(one, Some(damaged(content.clone()))));
        assert!(!record.set(one, Some(damaged(content.clone()))), "it is no news");
        assert!(record.set(two, Some(damaged(FileDamage::Missing))));
        assert!(record.contains_any([two]) && !record.contains_any([(ContentKind::Config, Digest([1; 32]))]));
        record.set_verified(7);
        let record = DamageRecord::open(&path);
        assert_eq!(record.get(&one), Some(damaged(content)));
        assert_eq!((record.get(&two), record.verified()), (None, Some(7)));
        record.retain(&HashSet::from([two]));
        assert_eq!(DamageRecord::open(&path).get(&one), None);
    }

    #[test]
    fn a_sound_store_has_no_file_and_a_damaged_file_is_ignored() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("health.json");
        let key = (ContentKind::Layer, Digest([1; 32]));
        let record = DamageRecord::open(&path);
        record.set(key, Some(damaged(FileDamage::Checksum)));
        assert!(path.exists());
        assert!(record.set(key, None));
        assert!(!path.exists());
        for text in ["", "{", r#"{"version":2,"damaged":[]}"#, r#"{"version":1,"damaged":[{}]}"#] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(DamageRecord::open(&path).verified(), None, "{text}");
        }
    }

    #[test]
    fn only_errors_of_the_disk_are_damage() {
        let of = |number| FileDamage::from_read_error(&io::Error::from_raw_os_error(number));
        assert_eq!(of(libc::ENOENT), Some(FileDamage::Missing));
        assert!(matches!(of(libc::EIO), Some(FileDamage::Unreadable { .. })));
        for number in [libc::EMFILE, libc::ENOMEM, libc::EACCES, libc::EINTR] {
            assert_eq!(of(number), None, "{number}");
        }
    }
}
