//! Owns: how much each container has written to its root: the blocks and inodes of its upper folder on the scratch disk.
//! A tree that is too big or too deep to be walked counts as the whole disk: hiding makes a container's figure bigger.
//! Threads: one walk at a time, on a blocking thread; the figures are behind a lock that is held for look-ups only.

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

/// Files of one container that are looked at.
const MAX_FILES: u64 = 200_000;
/// Folders below each other; each is a descriptor.
const MAX_DEPTH: usize = 256;
/// A figure is renewed after this time, or after so many times what its measuring took.
const REST: (Duration, u32) = (Duration::from_secs(1), 20);

/// What a container has written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Size {
    /// Bytes of its blocks.
    pub bytes: u64,
    /// Files and folders.
    pub inodes: u64,
}

/// A figure and when it was taken.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    /// The figure.
    pub size: Size,
    /// When the walk ended.
    pub at: Instant,
    took: Duration,
}

#[derive(Default)]
struct State {
    known: HashMap<String, Measured>,
    walking: bool,
}

/// The figures of all containers.
#[derive(Default)]
pub struct Layers(Mutex<State>);

impl Layers {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The last figure of each container that has one.
    pub fn known(&self) -> HashMap<String, Measured> {
        self.lock().known.clone()
    }

    /// Measures those of these containers whose figures are old, unless somebody does already; forgets others. Blocks.
    pub fn renew(&self, ids: &[String]) {
        let due: Vec<&String> = {
            let mut state = self.lock();
            if state.walking {
                return;
            }
            state.known.retain(|id, _| ids.contains(id));
            let fresh = |old: &Measured| old.at.elapsed() < REST.0.max(old.took.saturating_mul(REST.1));
            let due: Vec<_> = ids.iter().filter(|id| !state.known.get(*id).is_some_and(fresh)).collect();
            state.walking = !due.is_empty();
            due
        };
        if due.is_empty() {
            return;
        }
        let _walking = Walking(self);
        for id in due {
            let began = Instant::now();
            // One that has just been removed has no figure.
            if let Ok(size) = size(&paths::upper_layer_of(id)) {
                let at = Instant::now();
                self.lock().known.insert(id.clone(), Measured { size, at, took: at.duration_since(began) });
            }
        }
    }
}

/// Ends with the walk, however it ends.
struct Walking<'a>(&'a Layers);

impl Drop for Walking<'_> {
    fn drop(&mut self) {
        self.0.lock().walking = false;
    }
}

/// Starts [`Layers::renew`] and waits for it for a while.
pub async fn renew_within(layers: &Arc<Layers>, ids: Vec<String>, limit: Duration) {
    let layers = Arc::clone(layers);
    let walk = tokio::task::spawn_blocking(move || layers.renew(&ids));
    // A walk that takes longer goes on, for whoever asks next.
    let _ = tokio::time::timeout(limit, walk).await;
}

/// The size of a folder with all that is in it; links are not followed, and a file with several names counts once.
fn size(folder: &Path) -> io::Result<Size> {
    let mut walk = Walk { size: Size::default(), seen: HashSet::new() };
    let root = retry_interrupted(|| open(folder, FOLDER, Mode::empty()))?;
    walk.add(&fstat(&root)?);
    if walk.all_below(root)? {
        return Ok(walk.size);
    }
    let disk = statvfs(folder)?;
    let blocks = disk.blocks().saturating_sub(disk.blocks_free());
    let inodes = disk.files().saturating_sub(disk.files_free());
    Ok(Size { bytes: blocks.saturating_mul(disk.fragment_size()), inodes })
}

const FOLDER: OFlag = OFlag::O_DIRECTORY.union(OFlag::O_NOFOLLOW).union(OFlag::O_CLOEXEC);

struct Walk {
    size: Size,
    /// Files with several names.
    seen: HashSet<u64>,
}

impl Walk {
    fn add(&mut self, found: &FileStat) {
        if !is_folder(found) && found.st_nlink > 1 && !self.seen.insert(found.st_ino) {
            return;
        }
        let bytes = u64::try_from(found.st_blocks).unwrap_or(0).saturating_mul(512);
        self.size.bytes = self.size.bytes.saturating_add(bytes);
        self.size.inodes += 1;
    }

    /// Adds what is below a folder; false if it is too much. What goes meanwhile is not counted.
    fn all_below(&mut self, folder: OwnedFd) -> io::Result<bool> {
        let entries = Dir::from_fd(folder.try_clone()?)?.into_iter();
        let mut open = vec![(folder, entries)];
        while let Some((folder, entries)) = open.last_mut() {
            let Some(Ok(entry)) = entries.next() else {
                open.pop();
                continue;
            };
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let Ok(found) = fstatat(&*folder, name, AtFlags::AT_SYMLINK_NOFOLLOW) else { continue };
            self.add(&found);
            if self.size.inodes >= MAX_FILES {
                return Ok(false);
            }
            if is_folder(&found)
                && let Ok(below) = retry_interrupted(|| openat(&*folder, name, FOLDER, Mode::empty()))
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

fn is_folder(found: &FileStat) -> bool {
    found.st_mode & libc::S_IFMT == libc::S_IFDIR
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_tree_is_counted_and_links_are_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("upper");
        fs::create_dir_all(root.join("a/b")).unwrap();
        fs::write(folder.path().join("outside"), vec![1; 1 << 20]).unwrap();
        let before = size(&root).unwrap();
        assert_eq!(before.inodes, 3);
        fs::write(root.join("a/b/file"), vec![1; 256 << 10]).unwrap();
        fs::hard_link(root.join("a/b/file"), root.join("a/again")).unwrap();
        std::os::unix::fs::symlink(folder.path(), root.join("link")).unwrap();
        // File systems that allocate late know the blocks after a sync.
        fs::File::open(root.join("a/b/file")).unwrap().sync_all().unwrap();
        let after = size(&root).unwrap();
        assert_eq!(after.inodes, 5);
        let grown = after.bytes - before.bytes;
        assert!((256 << 10..512 << 10).contains(&grown), "{grown}");
        assert!(size(&root.join("none")).is_err());
    }

    #[test]
    fn what_is_too_deep_counts_as_the_whole_disk() {
        let folder = tempfile::tempdir().unwrap();
        let mut deep = folder.path().join("upper");
        let root = deep.clone();
        (0..MAX_DEPTH - 1).for_each(|_| deep.push("d"));
        fs::create_dir_all(&deep).unwrap();
        assert_eq!(size(&root).unwrap().inodes, u64::try_from(MAX_DEPTH).unwrap());
        fs::create_dir(deep.join("d")).unwrap();
        let whole = statvfs(&root).unwrap();
        let used = (whole.blocks() - whole.blocks_free()) * whole.fragment_size();
        // Others write to the disk meanwhile.
        assert!(size(&root).unwrap().bytes > used / 2);
    }

    #[test]
    fn figures_of_containers_that_are_gone_are_forgotten() {
        let layers = Layers::default();
        let measured = Measured { size: Size::default(), at: Instant::now(), took: Duration::ZERO };
        layers.lock().known.insert("gone".into(), measured);
        layers.lock().known.insert("here".into(), measured);
        layers.renew(&["here".into(), "none".into()]);
        assert_eq!(layers.known().into_keys().collect::<Vec<_>>(), ["here"]);
        assert!(!layers.lock().walking);
    }
}
