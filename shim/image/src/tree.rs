//! Merges the indexes of an image's layers into a tree. The tree is purely in memory, so no path of a layer can reach anything
//! else; links in paths are followed inside the tree, as tools do that unpack into a directory. Memory is charged to a budget
//! before it is allocated, and each part of a path that is looked up is a step of it.

use crate::budget::{Budget, BudgetError, heap_bytes};
use crate::layer::index::{DeviceNumber, FileAttributes, FileData, IndexError, LayerEntry, LayerEntryKind, LayerIndex};
use crate::wire;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The maximum number of links that are followed for one path; more count as a loop.
const MAX_LINKS: usize = 255;
/// The maximum depth of nested directories.
const MAX_DEPTH: usize = 2048;
/// The bytes of a link's target that are skipped in the time of one look-up.
const BYTES_PER_STEP: usize = 16;
/// The memory in bytes that a name takes in its directory's map in addition to its own bytes: an eleventh of a node of 368 bytes,
/// or more where nodes are half full.
const CHILD_MEMORY: u64 = 80;
/// The memory in bytes that the map of a directory takes with its first name.
const FIRST_CHILD_MEMORY: u64 = 384;

/// The number of an inode in `MergedTree::inodes`; the root is 0.
pub type Ino = usize;

/// A merged tree. Inodes that no directory names any more stay in the list.
#[derive(Debug)]
pub struct MergedTree {
    /// All inodes.
    pub inodes: Vec<Inode>,
    /// The directory that was looked up last, by its path: entries of one directory follow each other. `None` after names have
    /// been removed, because the path may now lead elsewhere.
    last_directory: Option<(Vec<u8>, Ino)>,
}

/// One file of the tree.
#[derive(Debug)]
pub struct Inode {
    /// The owner, the times and the attributes.
    pub meta: FileAttributes,
    /// The kind and content.
    pub body: InodeContent,
}

/// The names of a directory and their inodes.
pub type DirectoryListing<'t> = Vec<(&'t [u8], &'t Inode)>;

/// The kind and content of an inode.
#[derive(Debug)]
pub enum InodeContent {
    /// A directory: names and inodes.
    Directory(BTreeMap<Vec<u8>, Ino>),
    /// A file, with its data in the blob of this layer.
    File {
        /// The layer, counted from the lowest, which is 0.
        layer: usize,
        /// The position of the data in the layer's blob.
        data: FileData,
    },
    /// A symbolic link.
    Symlink(Arc<[u8]>),
    /// A character device.
    Char(DeviceNumber),
    /// A block device.
    Block(DeviceNumber),
    /// A named pipe.
    Fifo,
}

/// Reasons that layers cannot be merged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum TreeError {
    /// An entry conflicts with the layers below it.
    #[error("entry {path:?} of layer {layer} cannot be applied: {why}")]
    Entry {
        /// The layer, counted from the lowest, which is 1.
        layer: usize,
        /// The path of the entry.
        #[serde(deserialize_with = "wire::string")]
        path: String,
        /// The rule that the entry violates.
        #[serde(deserialize_with = "wire::text")]
        why: Cow<'static, str>,
    },
    /// The index of a layer is damaged.
    #[error("the index of layer {layer} is damaged")]
    Index {
        /// The layer, counted from the lowest, which is 1.
        layer: usize,
        /// The reason.
        source: IndexError,
    },
    /// The tree exceeds its budget.
    #[error("the tree of the image cannot be built")]
    Budget(#[from] BudgetError),
}

/// Reasons that an entry of a layer cannot be applied to the tree.
enum ApplyError {
    Rule(&'static str),
    Budget(BudgetError),
}

impl From<&'static str> for ApplyError {
    fn from(rule: &'static str) -> Self {
        ApplyError::Rule(rule)
    }
}

impl From<BudgetError> for ApplyError {
    fn from(error: BudgetError) -> Self {
        ApplyError::Budget(error)
    }
}

impl MergedTree {
    /// Returns a tree with an empty root.
    pub fn new() -> MergedTree {
        let root = Inode {
            meta: FileAttributes { mode: 0o755, ..FileAttributes::default() },
            body: InodeContent::Directory(BTreeMap::new()),
        };
        MergedTree { inodes: vec![root], last_directory: None }
    }

    /// Applies the next layer. Layers are applied lowest first; `layer` counts from 0.
    pub fn apply_layer(&mut self, layer: usize, index: &LayerIndex, budget: &mut Budget) -> Result<(), TreeError> {
        let fail = |path: &[u8], error| match error {
            ApplyError::Rule(why) => {
                let path = String::from_utf8_lossy(path).chars().take(300).collect();
                TreeError::Entry { layer: layer + 1, path, why: why.into() }
            }
            ApplyError::Budget(error) => error.into(),
        };
        let damaged = |source| TreeError::Index { layer: layer + 1, source };
        // Whiteouts apply only to the layers below, wherever they are in the archive, so they are applied first.
        for entry in index.entries() {
            let entry = entry.map_err(damaged)?;
            budget.step(1)?;
            if matches!(entry.kind, LayerEntryKind::Whiteout | LayerEntryKind::Opaque) {
                self.apply_whiteout(&entry, budget)?;
            }
        }
        for entry in index.entries() {
            let LayerEntry { path, meta, kind } = entry.map_err(damaged)?;
            budget.step(1)?;
            self.apply_entry(layer, &path, meta, kind, budget).map_err(|error| fail(&path, error))?;
        }
        Ok(())
    }

    fn children_of(&self, ino: Ino) -> Option<&BTreeMap<Vec<u8>, Ino>> {
        match self.inodes.get(ino).map(|inode| &inode.body) {
            Some(InodeContent::Directory(children)) => Some(children),
            _ => None,
        }
    }

    fn children_of_mut(&mut self, ino: Ino) -> Option<&mut BTreeMap<Vec<u8>, Ino>> {
        match self.inodes.get_mut(ino).map(|inode| &mut inode.body) {
            Some(InodeContent::Directory(children)) => Some(children),
            _ => None,
        }
    }

    fn add_inode(&mut self, meta: FileAttributes, body: InodeContent, budget: &mut Budget) -> Result<Ino, BudgetError> {
        let content = match &body {
            InodeContent::Symlink(target) => heap_bytes(target.len() + 2 * size_of::<usize>()),
            InodeContent::File { data: FileData::Chunks { chunks, .. }, .. } => {
                heap_bytes(chunks.capacity() * size_of::<(u32, u32)>())
            }
            _ => 0,
        };
        budget.charge(xattr_memory(&meta) + content)?;
        if self.inodes.len() == self.inodes.capacity() {
            let more = (self.inodes.len() / 4).max(64);
            budget.charge((more * size_of::<Inode>()) as u64)?;
            self.inodes.reserve_exact(more);
        }
        self.inodes.push(Inode { meta, body });
        Ok(self.inodes.len() - 1)
    }

    /// Gives an inode a name in a directory. An inode that had the name loses it.
    fn set_child(&mut self, directory: Ino, name: &[u8], ino: Ino, budget: &mut Budget) -> Result<(), ApplyError> {
        let children = self.children_of_mut(directory).ok_or("its directory cannot be created")?;
        if let Some(place) = children.get_mut(name) {
            *place = ino;
            self.last_directory = None;
            return Ok(());
        }
        let first = if children.is_empty() { FIRST_CHILD_MEMORY } else { CHILD_MEMORY };
        budget.charge(first + heap_bytes(name.len()))?;
        children.insert(name.to_vec(), ino);
        Ok(())
    }

    /// Returns the directory at this path, with links followed inside the root. Creates missing directories if `make`, otherwise
    /// returns `None` for them.
    fn find_directory(&mut self, path: &[u8], create: bool, budget: &mut Budget) -> Result<Option<Ino>, ApplyError> {
        if let Some((last_directory, ino)) = &self.last_directory
            && last_directory == path
        {
            return Ok(Some(*ino));
        }
        let mut ancestors: Vec<Ino> = Vec::new();
        let mut at: Ino = 0;
        let mut links = Vec::new();
        let mut followed = 0;
        let mut rest = PathComponents { text: PathText::Path(path), at: 0 };
        loop {
            let before = rest.at;
            let part = rest.next();
            budget.step(((rest.at - before) / BYTES_PER_STEP) as u64)?;
            let Some((start, end)) = part else {
                match links.pop() {
                    Some(outer) => rest = outer,
                    None => break,
                }
                continue;
            };
            budget.step(1)?;
            let part = rest.text.get(start, end);
            if part == b".." {
                at = ancestors.pop().unwrap_or(0);
                continue;
            }
            let child = self.children_of(at).and_then(|children| children.get(part)).copied();
            let child = match child.and_then(|child| self.inodes.get(child).map(|inode| (child, &inode.body))) {
                Some((child, InodeContent::Directory(_))) => child,
                Some((_, InodeContent::Symlink(target))) => {
                    followed += 1;
                    if followed > MAX_LINKS {
                        return Err("its path leads through too many links".into());
                    }
                    if target.starts_with(b"/") {
                        at = 0;
                        ancestors.clear();
                    }
                    let target = PathComponents { text: PathText::Link(Arc::clone(target)), at: 0 };
                    links.push(std::mem::replace(&mut rest, target));
                    continue;
                }
                Some(_) => return Err("its path leads through something that is not a directory".into()),
                None if create => {
                    if part.len() > crate::layer::MAX_NAME {
                        return Err("its path leads to a name longer than 255 bytes".into());
                    }
                    let body = InodeContent::Directory(BTreeMap::new());
                    let new =
                        self.add_inode(FileAttributes { mode: 0o755, ..FileAttributes::default() }, body, budget)?;
                    self.set_child(at, part, new, budget)?;
                    new
                }
                None => return Ok(None),
            };
            ancestors.push(at);
            at = child;
            if ancestors.len() > MAX_DEPTH {
                return Err("its path has more than 2048 nested directories".into());
            }
        }
        self.last_directory = Some((path.to_vec(), at));
        Ok(Some(at))
    }

    /// Returns the entries of a directory by its path from the root, with links followed; `None` if there is no such directory.
    pub fn list_directory(
        &mut self,
        path: &str,
        budget: &mut Budget,
    ) -> Result<Option<DirectoryListing<'_>>, BudgetError> {
        let directory = match self.find_directory(path.as_bytes(), false, budget) {
            Err(ApplyError::Budget(error)) => return Err(error),
            Err(ApplyError::Rule(_)) | Ok(None) => return Ok(None),
            Ok(Some(directory)) => directory,
        };
        let Some(children) = self.children_of(directory) else { return Ok(None) };
        budget.charge(children.len() as u64 * 3 * size_of::<&[u8]>() as u64)?;
        let named = children.iter().filter_map(|(name, ino)| Some((name.as_slice(), self.inodes.get(*ino)?)));
        Ok(Some(named.collect()))
    }

    fn apply_whiteout(&mut self, entry: &LayerEntry, budget: &mut Budget) -> Result<(), BudgetError> {
        let (parents, name) = split_parent(&entry.path);
        let directory = if entry.kind == LayerEntryKind::Opaque { entry.path.as_slice() } else { parents };
        match self.find_directory(directory, false, budget) {
            Err(ApplyError::Budget(error)) => return Err(error),
            // The layers below have nothing here. If they have a link or file in place of the opaque directory, the directory of
            // this layer replaces it.
            Err(ApplyError::Rule(_)) | Ok(None) => {}
            Ok(Some(directory)) => {
                if let Some(children) = self.children_of_mut(directory) {
                    if entry.kind == LayerEntryKind::Opaque {
                        children.clear();
                    } else {
                        children.remove(name);
                    }
                }
                self.last_directory = None;
            }
        }
        Ok(())
    }

    fn apply_entry(
        &mut self,
        layer: usize,
        path: &[u8],
        mut meta: FileAttributes,
        kind: LayerEntryKind,
        budget: &mut Budget,
    ) -> Result<(), ApplyError> {
        let body = match kind {
            LayerEntryKind::Whiteout | LayerEntryKind::Opaque => return Ok(()),
            LayerEntryKind::Hardlink(target) => {
                let ino = self.find_link_target(&target, budget)?;
                return self.link_at_path(path, ino, budget);
            }
            LayerEntryKind::Directory => match self.existing_directory(path, budget)? {
                Some(directory) => {
                    budget.charge(xattr_memory(&meta))?;
                    if let Some(inode) = self.inodes.get_mut(directory) {
                        let before = std::mem::replace(&mut inode.meta, meta);
                        budget.refund(xattr_memory(&before));
                    }
                    return Ok(());
                }
                None => InodeContent::Directory(BTreeMap::new()),
            },
            LayerEntryKind::File(data) => InodeContent::File { layer, data },
            LayerEntryKind::Symlink(target) => {
                // As symlink(2) makes them: archives may say otherwise, and programs compare.
                meta.mode = 0o777;
                InodeContent::Symlink(target.into())
            }
            LayerEntryKind::Char(device) => InodeContent::Char(device),
            LayerEntryKind::Block(device) => InodeContent::Block(device),
            LayerEntryKind::Fifo => InodeContent::Fifo,
        };
        let ino = self.add_inode(meta, body, budget)?;
        self.link_at_path(path, ino, budget)
    }

    /// Returns the directory that has exactly this path. Its last part is not followed.
    fn existing_directory(&mut self, path: &[u8], budget: &mut Budget) -> Result<Option<Ino>, ApplyError> {
        if path.is_empty() {
            return Ok(Some(0));
        }
        let (parents, name) = split_parent(path);
        let parent = self.find_directory(parents, true, budget)?;
        let child = parent.and_then(|parent| self.children_of(parent)).and_then(|children| children.get(name)).copied();
        Ok(child.filter(|&child| self.children_of(child).is_some()))
    }

    fn find_link_target(&mut self, path: &[u8], budget: &mut Budget) -> Result<Ino, ApplyError> {
        let (parents, name) = split_parent(path);
        let parent = self.find_directory(parents, false, budget)?;
        let target =
            parent.and_then(|parent| self.children_of(parent)).and_then(|children| children.get(name)).copied();
        let target = target.ok_or("the file that it links to does not exist")?;
        if self.children_of(target).is_some() { Err("it is a hard link to a directory".into()) } else { Ok(target) }
    }

    /// Gives an inode a name. An inode that had the name loses it.
    fn link_at_path(&mut self, path: &[u8], ino: Ino, budget: &mut Budget) -> Result<(), ApplyError> {
        let (parents, name) = split_parent(path);
        if name.is_empty() {
            return Err("the root is not a directory".into());
        }
        let parent = self.find_directory(parents, true, budget)?.ok_or("its directory cannot be created")?;
        self.set_child(parent, name, ino, budget)
    }
}

/// Returns the memory that the attributes of an inode take.
fn xattr_memory(meta: &FileAttributes) -> u64 {
    let texts = meta.xattrs.iter().map(|(name, value)| heap_bytes(name.len()) + heap_bytes(value.len())).sum::<u64>();
    heap_bytes(meta.xattrs.capacity() * size_of::<(Vec<u8>, Vec<u8>)>()) + texts
}

/// A path that is followed: an entry's, or the target of a link.
enum PathText<'p> {
    Path(&'p [u8]),
    Link(Arc<[u8]>),
}

impl PathText<'_> {
    fn whole(&self) -> &[u8] {
        match self {
            PathText::Path(path) => path,
            PathText::Link(target) => target,
        }
    }

    fn get(&self, start: usize, end: usize) -> &[u8] {
        self.whole().get(start..end).unwrap_or_default()
    }
}

/// The remaining parts of a path.
struct PathComponents<'p> {
    text: PathText<'p>,
    at: usize,
}

impl PathComponents<'_> {
    /// Returns the start and end of the next part. Skips empty parts and `.`.
    fn next(&mut self) -> Option<(usize, usize)> {
        let whole = self.text.whole();
        while self.at < whole.len() {
            let start = self.at;
            let rest = whole.get(start..).unwrap_or_default();
            let end = rest.iter().position(|&byte| byte == b'/').map_or(whole.len(), |length| start + length);
            self.at = (end + 1).min(whole.len());
            if !matches!(whole.get(start..end), Some(b"" | b".")) {
                return Some((start, end));
            }
        }
        None
    }
}

/// Splits a clean path into its parent and its last part.
fn split_parent(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|&byte| byte == b'/') {
        Some(at) => (path.get(..at).unwrap_or_default(), path.get(at + 1..).unwrap_or_default()),
        None => (&[], path),
    }
}

#[cfg(test)]
#[path = "tree_tests.rs"]
pub(crate) mod tests;
