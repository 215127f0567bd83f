//! Measures how much each container has written to its root: the blocks and inodes of its writable layer on the scratch disk.
//!
//! A tree that is too big or too deep to be walked counts as the whole disk, so that a container cannot hide what it has written. There
//! is one walk at a time, on a blocking thread; the lock on the figures is held for look-ups only.

use nacelle_base::retry::retry_interrupted;
use nix::dir::Dir;
use nix::fcntl::{AtFlags, OFlag, open, openat};
use nix::sys::stat::{FileStat, Mode, fstat, fstatat};
use nix::sys::statvfs::statvfs;
use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::paths;

/// The most files of one container that are counted.
const MAX_FILES: u64 = 200_000;
/// The deepest directory that is walked. Each level takes a descriptor.
const MAX_DEPTH: usize = 256;
/// A figure is measured again after this time, or after so many times the duration of its measurement.
const MAX_AGE: (Duration, u32) = (Duration::from_secs(1), 20);

/// The size of a writable layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct LayerSize {
    /// The bytes of its blocks.
    pub bytes: u64,
    /// The number of files and directories.
    pub inodes: u64,
}

/// A size and the time of its measurement.
#[derive(Clone, Copy, Debug)]
pub struct MeasuredLayer {
    /// The measured size.
    pub size: LayerSize,
    /// The end of the walk.
    pub at: Instant,
    duration: Duration,
}

#[derive(Default)]
struct MeasureState {
    sizes: HashMap<String, MeasuredLayer>,
    walking: bool,
}

/// The sizes of the writable layers of all containers.
#[derive(Default)]
pub struct Layers(Mutex<MeasureState>);

impl Layers {
    fn lock(&self) -> MutexGuard<'_, MeasureState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the last size of each container that has one.
    pub fn sizes(&self) -> HashMap<String, MeasuredLayer> {
        self.lock().sizes.clone()
    }

    /// Measures those of these containers whose sizes are old, unless a walk runs already. Forgets all other containers. Blocks.
    pub fn measure_stale(&self, ids: &[String]) {
        let stale: Vec<&String> = {
            let mut state = self.lock();
            if state.walking {
                return;
            }
            state.sizes.retain(|id, _| ids.contains(id));
            let fresh = |old: &MeasuredLayer| old.at.elapsed() < MAX_AGE.0.max(old.duration.saturating_mul(MAX_AGE.1));
            let stale: Vec<_> = ids.iter().filter(|id| !state.sizes.get(*id).is_some_and(fresh)).collect();
            state.walking = !stale.is_empty();
            stale
        };
        if stale.is_empty() {
            return;
        }
        let _walking = WalkGuard(self);
        for id in stale {
            let start = Instant::now();
            // A container that has just been removed has no size.
            if let Ok(size) = measure_container(&paths::upper_layer(id), &paths::anonymous_volumes(id)) {
                let at = Instant::now();
                self.lock().sizes.insert(id.clone(), MeasuredLayer { size, at, duration: at.duration_since(start) });
            }
        }
    }
}

/// Resets `MeasureState::walking` when the walk ends, also by a panic.
struct WalkGuard<'a>(&'a Layers);

impl Drop for WalkGuard<'_> {
    fn drop(&mut self) {
        self.0.lock().walking = false;
    }
}

/// Starts [`Layers::measure_stale`], and waits at most `limit` for its end.
pub async fn measure_stale_within(layers: &Arc<Layers>, ids: Vec<String>, limit: Duration) {
    let layers = Arc::clone(layers);
    let walk = tokio::task::spawn_blocking(move || layers.measure_stale(&ids));
    // A walk that takes longer continues, for the next request.
    let _ = tokio::time::timeout(limit, walk).await;
}

/// Measures the writable layer of a container, and the volumes that its image declares if there are any.
fn measure_container(layer: &Path, volumes: &Path) -> io::Result<LayerSize> {
    let layer = measure(layer)?;
    let volumes = match measure(volumes) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(layer),
        other => other?,
    };
    Ok(LayerSize {
        bytes: layer.bytes.saturating_add(volumes.bytes),
        inodes: layer.inodes.saturating_add(volumes.inodes),
    })
}

/// Measures a directory with everything in it. Links are not followed, and a file with several names counts once.
fn measure(directory: &Path) -> io::Result<LayerSize> {
    let mut walk = Walk { size: LayerSize::default(), seen: HashSet::new() };
    let root = retry_interrupted(|| open(directory, OPEN_DIRECTORY, Mode::empty()))?;
    walk.add(&fstat(&root)?);
    if walk.add_below(root)? {
        return Ok(walk.size);
    }
    let disk = statvfs(directory)?;
    let blocks = disk.blocks().saturating_sub(disk.blocks_free());
    let inodes = disk.files().saturating_sub(disk.files_free());
    Ok(LayerSize { bytes: blocks.saturating_mul(disk.fragment_size()), inodes })
}

const OPEN_DIRECTORY: OFlag = OFlag::O_DIRECTORY.union(OFlag::O_NOFOLLOW).union(OFlag::O_CLOEXEC);

struct Walk {
    size: LayerSize,
    /// Inodes of files with several names.
    seen: HashSet<u64>,
}

impl Walk {
    fn add(&mut self, found: &FileStat) {
        if !is_directory(found) && found.st_nlink > 1 && !self.seen.insert(found.st_ino) {
            return;
        }
        let bytes = u64::try_from(found.st_blocks).unwrap_or(0).saturating_mul(512);
        self.size.bytes = self.size.bytes.saturating_add(bytes);
        self.size.inodes += 1;
    }

    /// Adds everything below a directory; returns false if it is too much. Files that are removed meanwhile are not counted.
    fn add_below(&mut self, directory: OwnedFd) -> io::Result<bool> {
        let entries = Dir::from_fd(directory.try_clone()?)?.into_iter();
        let mut open = vec![(directory, entries)];
        while let Some((directory, entries)) = open.last_mut() {
            let Some(Ok(entry)) = entries.next() else {
                open.pop();
                continue;
            };
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let Ok(found) = fstatat(&*directory, name, AtFlags::AT_SYMLINK_NOFOLLOW) else { continue };
            self.add(&found);
            if self.size.inodes >= MAX_FILES {
                return Ok(false);
            }
            if is_directory(&found)
                && let Ok(below) = retry_interrupted(|| openat(&*directory, name, OPEN_DIRECTORY, Mode::empty()))
            {
                if open.len() == MAX_DEPTH {
                    return Ok(false);
                }
                let entries = Dir::from_fd(below.try_clone()?)?.into_iter();
                open.push((below, entries));
            }
        }
        Ok(true)
    }
}

fn is_directory(found: &FileStat) -> bool {
    found.st_mode & libc::S_IFMT == libc::S_IFDIR
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_tree_is_counted_and_links_are_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("upper");
        fs::create_dir_all(root.join("a/b")).unwrap();
        fs::write(directory.path().join("outside"), vec![1; 1 << 20]).unwrap();
        let before = measure(&root).unwrap();
        assert_eq!(before.inodes, 3);
        fs::write(root.join("a/b/file"), vec![1; 256 << 10]).unwrap();
        fs::hard_link(root.join("a/b/file"), root.join("a/again")).unwrap();
        std::os::unix::fs::symlink(directory.path(), root.join("link")).unwrap();
        // File systems that allocate late know the blocks after a sync.
        fs::File::open(root.join("a/b/file")).unwrap().sync_all().unwrap();
        let after = measure(&root).unwrap();
        assert_eq!(after.inodes, 5);
        let grown = after.bytes - before.bytes;
        assert!((256 << 10..512 << 10).contains(&grown), "{grown}");
        assert!(measure(&root.join("none")).is_err());
        let volumes = root.join("a");
        let both = measure_container(&root, &volumes).unwrap();
        assert_eq!(both.inodes, after.inodes + measure(&volumes).unwrap().inodes);
        assert_eq!(measure_container(&root, &root.join("none")).unwrap().inodes, after.inodes);
        assert!(measure_container(&root.join("none"), &root).is_err());
    }

    #[test]
    fn a_tree_that_is_too_deep_counts_as_the_whole_disk() {
        let directory = tempfile::tempdir().unwrap();
        let mut deep = directory.path().join("upper");
        let root = deep.clone();
        (0..MAX_DEPTH - 1).for_each(|_| deep.push("d"));
        fs::create_dir_all(&deep).unwrap();
        assert_eq!(measure(&root).unwrap().inodes, u64::try_from(MAX_DEPTH).unwrap());
        fs::create_dir(deep.join("d")).unwrap();
        let whole = statvfs(&root).unwrap();
        let used = (whole.blocks() - whole.blocks_free()) * whole.fragment_size();
        // Other processes write to the disk meanwhile.
        assert!(measure(&root).unwrap().bytes > used / 2);
    }

    #[test]
    fn sizes_of_removed_containers_are_forgotten() {
        let layers = Layers::default();
        let measured = MeasuredLayer { size: LayerSize::default(), at: Instant::now(), duration: Duration::ZERO };
        layers.lock().sizes.insert("gone".into(), measured);
        layers.lock().sizes.insert("here".into(), measured);
        layers.measure_stale(&["here".into(), "none".into()]);
        assert_eq!(layers.sizes().into_keys().collect::<Vec<_>>(), ["here"]);
        assert!(!layers.lock().walking);
    }
}
