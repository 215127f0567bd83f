//! Keeps the files of the store: their paths, which of them are needed, and their removal. Content is in `configs/`, `layers/` and
//! `trees/`, each file named by a digest. A layer's `.blob` counts only with its `.idx`. Its `.origins` lists the registries that have
//! delivered it and is the only file that changes. `partial/` holds the downloads of unfinished layers, `work/` files that are not yet
//! visible. The `.sum` of a layer or of metadata has the digests of the files (`crate::sums`). Blobs, indexes and metadata get
//! fs-verity before they become visible (`crate::store_verity`). The pins are a leaf lock, taken after the catalogue's.

use crate::store_verity::StoreVerity;
use crate::sums::{ContentSums, FileSum, sum_path};
use crate::{FsInfo, ImageError};
use nacelle_base::draft;
use nacelle_base::files::{FileError, at, remove_if_there};
use nacelle_model::digest::Digest;
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How long the partial downloads of an unfinished pull are kept for the next one.
const LEFTOVER_RETENTION: Duration = Duration::from_secs(3600);

/// A kind of content, which is also its directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ContentKind {
    /// Image configurations.
    Config,
    /// Layers, by the digest of their unpacked form.
    Layer,
    /// Metadata of images.
    Tree,
    /// Partial downloads of layers in their compressed form, by the digest of their origin.
    Partial,
}

/// The directory of layers below the store's. Machine pods see it, and could hold any lock in it that the daemon takes.
pub const LAYERS: &str = "layers";

impl ContentKind {
    /// All kinds.
    pub const ALL: [ContentKind; 4] =
        [ContentKind::Config, ContentKind::Layer, ContentKind::Tree, ContentKind::Partial];

    fn directory_name(self) -> &'static str {
        match self {
            ContentKind::Config => "configs",
            ContentKind::Layer => LAYERS,
            ContentKind::Tree => "trees",
            ContentKind::Partial => "partial",
        }
    }
}

/// Content by kind and digest.
pub type ContentKey = (ContentKind, Digest);

/// A pin protects the content from garbage collection. Its lock is held by the caller that creates or removes the content, so that a
/// verification skips it meanwhile. Order of the locks: layer, partial download; layer, metadata. The lock of a configuration is taken
/// with no other. The catalogue is not changed under the lock of metadata or of a configuration.
pub type Pin = Arc<tokio::sync::Mutex<()>>;

/// The directory of the store.
pub struct StoreDirectory {
    root: PathBuf,
    pins: Mutex<PinTable>,
    next: AtomicU64,
    verity: StoreVerity,
    _lock: File,
}

#[derive(Default)]
struct PinTable {
    held: HashMap<ContentKey, Weak<tokio::sync::Mutex<()>>>,
    /// Content that no image uses but the next pull may.
    unfinished: HashMap<ContentKey, Instant>,
}

/// The path of a file that is removed on drop, unless the file was renamed.
struct TemporaryPath(PathBuf);

/// A file that is written. It is removed on drop.
pub struct TemporaryFile {
    path: TemporaryPath,
    /// The file, open for writing.
    pub file: File,
}

impl TemporaryFile {
    /// Returns the file's path.
    pub fn path(&self) -> &Path {
        &self.path.0
    }
}

/// A file of which all bytes are on the disk and which is never written again. It is removed on drop unless it is renamed.
pub struct FinishedFile {
    path: TemporaryPath,
    sum: FileSum,
}

impl FinishedFile {
    /// Returns the file's sum.
    pub fn sum(&self) -> FileSum {
        self.sum
    }

    /// Gives the file its final name. The caller syncs the directory.
    fn rename(self, path: &Path) -> Result<(), FileError> {
        fs::rename(&self.path.0, path).map_err(at("rename", path))
    }
}

/// Syncs the names in the directory of a file.
fn sync_directory_of(path: &Path) -> Result<(), FileError> {
    let directory = path.parent().unwrap_or(path);
    File::open(directory).and_then(|directory| directory.sync_all()).map_err(at("sync", directory))
}

impl Drop for TemporaryPath {
    fn drop(&mut self) {
        if let Err(error) = remove_if_there(&self.0) {
            tracing::warn!(error = %nacelle_base::Chain(&error), "cannot remove a temporary file; the next start removes it");
        }
    }
}

impl StoreDirectory {
    /// Creates missing directories and takes the lock. The caller calls `remove_leftovers` next.
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
        for kind in ContentKind::ALL {
            make(&root.join(kind.directory_name()))?;
        }
        make(&root.join("work"))?;
        let verity = StoreVerity::probe(&root.join("work/probe"));
        Ok(StoreDirectory { root, pins: Mutex::default(), next: AtomicU64::new(0), verity, _lock: lock })
    }

    /// Removes what a crash left unfinished. `live` is the content of all images, whose files stay even if some are missing.
    pub fn remove_leftovers(&self, live: &HashSet<ContentKey>) -> Result<(), ImageError> {
        draft::remove_stale_drafts(&self.root)?;
        for path in list_paths(&self.root.join("work"))? {
            remove_if_there(&path)?;
        }
        let mut pins = self.pins();
        for kind in ContentKind::ALL {
            for path in list_paths(&self.root.join(kind.directory_name()))? {
                let whole = kind != ContentKind::Layer || path.with_extension("idx").exists();
                match parse_key(kind, &path).filter(|key| whole || live.contains(key)) {
                    Some(key) => drop(pins.unfinished.insert(key, Instant::now())),
                    None => remove_if_there(&path)?,
                }
            }
        }
        Ok(())
    }

    fn pins(&self) -> MutexGuard<'_, PinTable> {
        self.pins.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the path of the list of images.
    pub fn catalogue_path(&self) -> PathBuf {
        self.root.join("index.json")
    }

    /// Returns the path of the record of damaged content.
    pub fn health_path(&self) -> PathBuf {
        self.root.join("health.json")
    }

    /// Returns the store's directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns whether files of this store get fs-verity.
    pub fn verity(&self) -> &StoreVerity {
        &self.verity
    }

    /// Returns the path of the main file of this content.
    pub fn path(&self, (kind, digest): ContentKey) -> PathBuf {
        let extension = match kind {
            ContentKind::Config | ContentKind::Partial => "",
            ContentKind::Layer => ".blob",
            ContentKind::Tree => ".erofs",
        };
        self.root.join(kind.directory_name()).join(digest.hex() + extension)
    }

    /// Returns the path of a layer's index.
    pub fn index_path(&self, diff_id: Digest) -> PathBuf {
        self.path((ContentKind::Layer, diff_id)).with_extension("idx")
    }

    /// Returns the path of the list of a layer's origins.
    pub fn origins_path(&self, diff_id: Digest) -> PathBuf {
        self.path((ContentKind::Layer, diff_id)).with_extension("origins")
    }

    /// Returns the path of the sums of this content, which is a layer or metadata.
    pub fn sums_path(&self, key: ContentKey) -> PathBuf {
        self.path(key).with_extension("sum")
    }

    /// Protects this content, whether it exists or not, until the pin is dropped.
    pub fn pin(&self, key: ContentKey) -> Pin {
        let mut pins = self.pins();
        if let Some(pin) = pins.held.get(&key).and_then(Weak::upgrade) {
            return pin;
        }
        let pin = Pin::default();
        pins.held.insert(key, Arc::downgrade(&pin));
        pin
    }

    /// Creates an empty temporary file.
    pub fn create_temporary(&self) -> Result<TemporaryFile, FileError> {
        let path = self.root.join("work").join(self.next.fetch_add(1, Ordering::Relaxed).to_string());
        let file =
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path).map_err(at("create", &path))?;
        Ok(TemporaryFile { path: TemporaryPath(path), file })
    }

    /// Ends the writing of a file: syncs it, enables fs-verity and computes its sum. No other process has it open for writing any more. Blocks.
    pub fn finish(&self, temporary: TemporaryFile) -> Result<FinishedFile, FileError> {
        let TemporaryFile { path, file } = temporary;
        file.sync_all().map_err(at("sync", &path.0))?;
        drop(file);
        let verity = self.verity.enable(&path.0)?;
        let sum = FileSum { verity, ..sum_path(&path.0)? };
        Ok(FinishedFile { path, sum })
    }

    /// Makes a layer of its blob and its index. Replaces a damaged layer; open files of that one stay readable.
    pub fn commit_layer(
        &self,
        diff_id: Digest,
        blob: FinishedFile,
        index: FinishedFile,
        sums: &ContentSums,
    ) -> Result<(), FileError> {
        let key = (ContentKind::Layer, diff_id);
        let (path, sums_path, index_path) = (self.path(key), self.sums_path(key), self.index_path(diff_id));
        // A blob without index is not a layer, so the index goes first and comes last.
        let removed = remove_if_there(&index_path);
        let renamed = removed.and_then(|()| blob.rename(&path)).and_then(|()| sums.write(&sums_path));
        let kept = renamed.and_then(|()| index.rename(&index_path)).and_then(|()| sync_directory_of(&path));
        if kept.is_err() {
            for path in [&index_path, &sums_path, &path] {
                remove_if_there(path)?;
            }
        }
        // Kept until an image uses it.
        self.pins().unfinished.insert(key, Instant::now());
        kept
    }

    /// Makes a file the metadata of an image. Replaces damaged metadata; an open file of those stays readable.
    pub fn commit_tree(&self, tree: Digest, metadata: FinishedFile) -> Result<(), FileError> {
        let (path, sums_path) = (self.path((ContentKind::Tree, tree)), self.sums_path((ContentKind::Tree, tree)));
        let sums = ContentSums::new(metadata.sum, None);
        // Sums of other metadata would say that these are damaged.
        remove_if_there(&sums_path)?;
        metadata.rename(&path)?;
        sums.write(&sums_path)?;
        sync_directory_of(&path)
    }

    /// Removes metadata that do not fit their layers any more.
    pub fn remove_tree(&self, tree: Digest) -> Result<(), FileError> {
        let key = (ContentKind::Tree, tree);
        remove_if_there(&self.path(key))?;
        remove_if_there(&self.sums_path(key))
    }

    /// Returns the lengths in bytes of a layer's index and blob.
    pub fn layer_lengths(&self, diff_id: Digest) -> Result<(u64, u64), FileError> {
        let length = |path: &Path| Ok(fs::metadata(path).map_err(at("read", path))?.len());
        Ok((length(&self.index_path(diff_id))?, length(&self.path((ContentKind::Layer, diff_id)))?))
    }

    /// Opens a layer's index, and returns its path too.
    pub fn open_index(&self, diff_id: Digest) -> Result<(File, PathBuf), FileError> {
        let path = self.index_path(diff_id);
        Ok((File::open(&path).map_err(at("open", &path))?, path))
    }

    /// Opens a partial download, and returns its length.
    pub fn open_partial(&self, name: Digest) -> Result<(File, u64), FileError> {
        let key = (ContentKind::Partial, name);
        let path = self.path(key);
        let opened = OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(&path);
        let file = opened.map_err(at("open", &path))?;
        let length = file.metadata().map_err(at("read", &path))?.len();
        self.pins().unfinished.insert(key, Instant::now());
        Ok((file, length))
    }

    /// Returns the disk usage of this content in bytes.
    pub fn disk_usage_of(&self, key: ContentKey) -> u64 {
        let of = |path: &Path| fs::metadata(path).map_or(0, |metadata| metadata.blocks() * 512);
        let index = if key.0 == ContentKind::Layer { of(&self.index_path(key.1)) } else { 0 };
        of(&self.path(key)) + index
    }

    /// Stops protecting what unfinished pulls have left: the disk is full.
    pub fn forget_unfinished(&self) {
        self.pins().unfinished.clear();
    }

    /// Removes all content that is not in `live`, not pinned and not a recent leftover of a pull. The caller holds the
    /// catalogue's lock, so that nothing becomes live meanwhile. Returns the paths that the caller must pass to `delete_files`.
    pub fn detach_unneeded(&self, live: &HashSet<ContentKey>) -> Result<Vec<PathBuf>, FileError> {
        let mut pins = self.pins();
        pins.held.retain(|_, pin| pin.strong_count() > 0);
        pins.unfinished.retain(|key, since| !live.contains(key) && since.elapsed() < LEFTOVER_RETENTION);
        let mut detached = Vec::new();
        for kind in ContentKind::ALL {
            let mut paths = list_paths(&self.root.join(kind.directory_name()))?;
            paths.sort();
            // An index is removed before its blob: a blob without index is not a layer.
            for path in paths.into_iter().rev() {
                let Some(key) = parse_key(kind, &path) else { continue };
                if live.contains(&key) || pins.held.contains_key(&key) || pins.unfinished.contains_key(&key) {
                    continue;
                }
                let new_path = self.root.join("work").join(self.next.fetch_add(1, Ordering::Relaxed).to_string());
                fs::rename(&path, &new_path).map_err(at("rename", &path))?;
                detached.push(new_path);
            }
        }
        Ok(detached)
    }

    /// Records that no image needs this content any more, so that it is not kept for a pull either.
    pub fn unprotect(&self, keys: impl IntoIterator<Item = ContentKey>) {
        let mut pins = self.pins();
        for key in keys {
            pins.unfinished.remove(&key);
        }
    }

    /// Returns the disk usage of the store.
    pub fn measure_usage(&self) -> Result<FsInfo, FileError> {
        let mut info = FsInfo { path: self.root.clone(), used_bytes: 0, inodes_used: 0 };
        let directories = ContentKind::ALL.iter().map(|kind| self.root.join(kind.directory_name()));
        for directory in directories.chain([self.root.join("work"), self.root.clone()]) {
            for path in list_paths(&directory)? {
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
    pub fn free_bytes(&self) -> Result<u64, FileError> {
        let stat = nix::sys::statvfs::statvfs(&self.root).map_err(|errno| at("measure", &self.root)(errno.into()))?;
        Ok(stat.blocks_available() * stat.fragment_size())
    }
}

/// Removes the files that `detach_unneeded` returned.
pub fn delete_files(paths: Vec<PathBuf>) -> Result<(), FileError> {
    paths.iter().try_for_each(|path| remove_if_there(path))
}

fn list_paths(directory: &Path) -> Result<Vec<PathBuf>, FileError> {
    let entries = fs::read_dir(directory).map_err(at("read", directory))?;
    entries.map(|entry| entry.map(|entry| entry.path()).map_err(at("read", directory))).collect()
}

fn parse_key(kind: ContentKind, path: &Path) -> Option<ContentKey> {
    let name = path.file_name()?.to_str()?;
    Some((kind, Digest::from_hex(name.split('.').next()?)?))
}
