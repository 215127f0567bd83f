//! Keeps the files of the store: their paths, which of them are needed, and their removal. Content is in `configs/`, `layers/` (a
//! `.blob` counts only with its `.idx`) and `trees/`, each named by a digest and never changed; `partial/` holds the downloads of
//! unfinished layers, `work/` files that are not yet visible. The pins are a leaf lock, taken after the catalogue's.

use crate::{FsInfo, ImageError};
use nacelle_base::draft;
use nacelle_base::files::{FileError, at, remove_if_there, write_whole};
use nacelle_model::digest::Digest;
use std::collections::{HashMap, HashSet};
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How long the partial downloads of an unfinished pull are kept for the next one.
const KEEP: Duration = Duration::from_secs(3600);

/// A kind of content, which is also its directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// Image configurations.
    Config,
    /// Layers, by the digest of their unpacked form.
    Layer,
    /// Metadata of images.
    Tree,
    /// Partial downloads of layers in their compressed form.
    Partial,
}

impl Part {
    const ALL: [Part; 4] = [Part::Config, Part::Layer, Part::Tree, Part::Partial];

    fn directory(self) -> &'static str {
        match self {
            Part::Config => "configs",
            Part::Layer => "layers",
            Part::Tree => "trees",
            Part::Partial => "partial",
        }
    }
}

/// Content by kind and digest.
pub type Key = (Part, Digest);

/// A pin protects the content from garbage collection; its lock is held by the caller that creates the content.
pub type Pin = Arc<tokio::sync::Mutex<()>>;

/// The directory of the store.
pub struct StoreDirectory {
    root: PathBuf,
    pins: Mutex<Pins>,
    next: AtomicU64,
    _lock: File,
}

#[derive(Default)]
struct Pins {
    held: HashMap<Key, Weak<tokio::sync::Mutex<()>>>,
    /// Content that no image uses but the next pull may.
    unfinished: HashMap<Key, Instant>,
}

/// A file that is removed on drop unless it is renamed.
pub struct Temporary {
    path: PathBuf,
    /// The file, open for writing.
    pub file: File,
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Err(error) = remove_if_there(&self.path) {
            tracing::warn!(error = %nacelle_base::Chain(&error), "a temporary file stays until the next start");
        }
    }
}

impl StoreDirectory {
    /// Creates missing directories, takes the lock, and removes what a crash left unfinished.
    pub fn open(root: &Path) -> Result<StoreDirectory, ImageError> {
        let make =
            |path: &Path| fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(at("create", path));
        make(root)?;
        let root = root.canonicalize().map_err(at("find", root))?;
        let lock_path = root.join("lock");
        let lock = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&lock_path);
        let lock = lock.map_err(at("open", &lock_path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => return Err(ImageError::Locked { path: root }),
            Err(fs::TryLockError::Error(error)) => return Err(at("lock", &lock_path)(error).into()),
        }
        for part in Part::ALL {
            make(&root.join(part.directory()))?;
        }
        make(&root.join("work"))?;
        let directory = StoreDirectory { root, pins: Mutex::default(), next: AtomicU64::new(0), _lock: lock };
        directory.clear_up()?;
        Ok(directory)
    }

    fn clear_up(&self) -> Result<(), ImageError> {
        draft::remove_stale_drafts(&self.root)?;
        for path in names(&self.root.join("work"))? {
            remove_if_there(&path)?;
        }
        let mut pins = self.pins();
        for part in Part::ALL {
            for path in names(&self.root.join(part.directory()))? {
                let whole = part != Part::Layer || path.with_extension("idx").exists();
                match key_of(part, &path).filter(|_| whole) {
                    Some(key) => drop(pins.unfinished.insert(key, Instant::now())),
                    None => remove_if_there(&path)?,
                }
            }
        }
        Ok(())
    }

    fn pins(&self) -> MutexGuard<'_, Pins> {
        self.pins.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the path of the list of images.
    pub fn catalogue(&self) -> PathBuf {
        self.root.join("index.json")
    }

    /// Returns the store's directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the path of the main file of this content.
    pub fn path(&self, (part, digest): Key) -> PathBuf {
        let extension = match part {
            Part::Config | Part::Partial => "",
            Part::Layer => ".blob",
            Part::Tree => ".erofs",
        };
        self.root.join(part.directory()).join(digest.hex() + extension)
    }

    fn index_path(&self, diff_id: Digest) -> PathBuf {
        self.path((Part::Layer, diff_id)).with_extension("idx")
    }

    /// Protects this content, whether it exists or not, until the pin is dropped.
    pub fn pin(&self, key: Key) -> Pin {
        let mut pins = self.pins();
        if let Some(pin) = pins.held.get(&key).and_then(Weak::upgrade) {
            return pin;
        }
        let pin = Pin::default();
        pins.held.insert(key, Arc::downgrade(&pin));
        pin
    }

    /// Returns whether a layer is complete.
    pub fn has_layer(&self, diff_id: Digest) -> bool {
        self.index_path(diff_id).exists()
    }

    /// Creates an empty temporary file.
    pub fn temporary(&self) -> Result<Temporary, FileError> {
        let path = self.root.join("work").join(self.next.fetch_add(1, Ordering::Relaxed).to_string());
        let file =
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path).map_err(at("create", &path))?;
        Ok(Temporary { path, file })
    }

    /// Makes a layer of its index and a blob that is synced.
    pub fn keep_layer(&self, diff_id: Digest, blob: Temporary, index: &[u8]) -> Result<(), FileError> {
        let path = self.path((Part::Layer, diff_id));
        fs::rename(&blob.path, &path).map_err(at("rename", &path))?;
        let kept = write_whole(&self.index_path(diff_id), index);
        if kept.is_err() {
            remove_if_there(&path)?;
        }
        // Kept until an image uses it.
        self.pins().unfinished.insert((Part::Layer, diff_id), Instant::now());
        kept
    }

    /// Returns the length of a layer's index in bytes.
    pub fn index_length(&self, diff_id: Digest) -> Result<u64, FileError> {
        let path = self.index_path(diff_id);
        Ok(fs::metadata(&path).map_err(at("read", &path))?.len())
    }

    /// Returns a layer's index, as `LayerIndex` reads it, and its path.
    pub fn index(&self, diff_id: Digest) -> Result<(Vec<u8>, PathBuf), FileError> {
        let path = self.index_path(diff_id);
        let bytes = fs::read(&path).map_err(at("read", &path))?;
        Ok((bytes, path))
    }

    /// Opens the partial download of a blob, and returns its length.
    pub fn partial(&self, digest: Digest) -> Result<(File, u64), FileError> {
        let key = (Part::Partial, digest);
        let path = self.path(key);
        let opened = OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(&path);
        let file = opened.map_err(at("open", &path))?;
        let length = file.metadata().map_err(at("read", &path))?.len();
        self.pins().unfinished.insert(key, Instant::now());
        Ok((file, length))
    }

    /// Returns the disk usage of this content in bytes.
    pub fn size(&self, key: Key) -> u64 {
        let of = |path: &Path| fs::metadata(path).map_or(0, |metadata| metadata.blocks() * 512);
        let index = if key.0 == Part::Layer { of(&self.index_path(key.1)) } else { 0 };
        of(&self.path(key)) + index
    }

    /// Drops the leftovers of unfinished pulls from the protection: the disk is full.
    pub fn forget_unfinished(&self) {
        self.pins().unfinished.clear();
    }

    /// Removes all content that is not in `live`, not pinned and not a recent leftover of a pull. The caller holds the
    /// catalogue's lock, so that nothing becomes live meanwhile. Returns the paths that the caller must pass to `delete`.
    pub fn take_away(&self, live: &HashSet<Key>) -> Result<Vec<PathBuf>, FileError> {
        let mut pins = self.pins();
        pins.held.retain(|_, pin| pin.strong_count() > 0);
        pins.unfinished.retain(|key, since| !live.contains(key) && since.elapsed() < KEEP);
        let mut away = Vec::new();
        for part in Part::ALL {
            let mut paths = names(&self.root.join(part.directory()))?;
            paths.sort();
            // An index is removed before its blob: a blob without index is not a layer.
            for path in paths.into_iter().rev() {
                let Some(key) = key_of(part, &path) else { continue };
                if live.contains(&key) || pins.held.contains_key(&key) || pins.unfinished.contains_key(&key) {
                    continue;
                }
                let gone = self.root.join("work").join(self.next.fetch_add(1, Ordering::Relaxed).to_string());
                fs::rename(&path, &gone).map_err(at("rename", &path))?;
                away.push(gone);
            }
        }
        Ok(away)
    }

    /// Records that no image needs this content any more, so that it is not kept for a pull either.
    pub fn release(&self, keys: impl IntoIterator<Item = Key>) {
        let mut pins = self.pins();
        for key in keys {
            pins.unfinished.remove(&key);
        }
    }

    /// Returns the disk usage of the store.
    pub fn info(&self) -> Result<FsInfo, FileError> {
        let mut info = FsInfo { path: self.root.clone(), used_bytes: 0, inodes_used: 0 };
        let directories = Part::ALL.iter().map(|part| self.root.join(part.directory()));
        for directory in directories.chain([self.root.join("work"), self.root.clone()]) {
            for path in names(&directory)? {
                // The file may have been removed since.
                if let Ok(metadata) = fs::symlink_metadata(&path)
                    && metadata.is_file()
                {
                    info.used_bytes += metadata.blocks() * 512;
                    info.inodes_used += 1;
                }
            }
        }
        Ok(info)
    }

    /// Returns the bytes that are free for unprivileged users of the file system.
    pub fn free(&self) -> Result<u64, FileError> {
        let stat = nix::sys::statvfs::statvfs(&self.root).map_err(|errno| at("measure", &self.root)(errno.into()))?;
        Ok(stat.blocks_available() * stat.fragment_size())
    }
}

/// Removes the files that `take_away` returned.
pub fn delete(paths: Vec<PathBuf>) -> Result<(), FileError> {
    paths.iter().try_for_each(|path| remove_if_there(path))
}

fn names(directory: &Path) -> Result<Vec<PathBuf>, FileError> {
    let entries = fs::read_dir(directory).map_err(at("read", directory))?;
    entries.map(|entry| entry.map(|entry| entry.path()).map_err(at("read", directory))).collect()
}

fn key_of(part: Part, path: &Path) -> Option<Key> {
    let name = path.file_name()?.to_str()?;
    Some((part, Digest::from_hex(name.split('.').next()?)?))
}
