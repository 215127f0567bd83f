//! Merges the indexes of an image's layers into a tree. The tree is purely in memory, so no path of a layer can reach anything
//! else; links in paths are followed inside the tree, as tools do that unpack into a directory. Memory is charged to a budget
//! before it is allocated, and each part of a path that is looked up is a step of it.

use crate::budget::{Budget, BudgetError, heap};
use crate::layer::index::{Data, Device, Entry, IndexError, LayerIndex, Meta, What};
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
const CHILD: u64 = 80;
/// The memory in bytes that the map of a directory takes with its first name.
const FIRST_CHILD: u64 = 384;

/// The number of an inode in `Tree::inodes`; the root is 0.
pub type Ino = usize;

/// A merged tree. Inodes that no directory names any more stay in the list.
#[derive(Debug)]
pub struct Tree {
    /// All inodes.
    pub inodes: Vec<Inode>,
    /// The directory that was looked up last, by its path: entries of one directory follow each other. `None` after names have
    /// been removed, because the path may now lead elsewhere.
    last: Option<(Vec<u8>, Ino)>,
}

/// One file of the tree.
#[derive(Debug)]
pub struct Inode {
    /// The owner, the times and the attributes.
    pub meta: Meta,
    /// The kind and content.
    pub body: Body,
}

/// The names of a directory and their inodes.
pub type Listing<'t> = Vec<(&'t [u8], &'t Inode)>;

/// The kind and content of an inode.
#[derive(Debug)]
pub enum Body {
    /// A directory: names and inodes.
    Directory(BTreeMap<Vec<u8>, Ino>),
    /// A file, with its data in the blob of this layer.
    File {
        /// The layer, counted from the lowest, which is 0.
        layer: usize,
        /// The position of the data in the layer's blob.
        data: Data,
    },
    /// A symbolic link.
    Symlink(Arc<[u8]>),
    /// A character device.
    Char(Device),
    /// A block device.
    Block(Device),
    /// A named pipe.
    Fifo,
}

/// Reasons that layers cannot be merged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TreeError {
    /// An entry conflicts with the layers below it.
    #[error("entry {path:?} of layer {layer} cannot be applied: {why}")]
    Entry {
        /// The layer, counted from the lowest, which is 1.
        layer: usize,
        /// The path of the entry.
        path: String,
        /// The rule that the entry violates.
        why: &'static str,
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

/// Reasons that an entry cannot be applied.
enum Wrong {
    Rule(&'static str),
    Budget(BudgetError),
}

impl From<&'static str> for Wrong {
    fn from(rule: &'static str) -> Self {
        Wrong::Rule(rule)
    }
}

impl From<BudgetError> for Wrong {
    fn from(error: BudgetError) -> Self {
        Wrong::Budget(error)
    }
}

impl Tree {
    /// Returns a tree with an empty root.
    pub fn new() -> Tree {
        let root = Inode { meta: Meta { mode: 0o755, ..Meta::default() }, body: Body::Directory(BTreeMap::new()) };
        Tree { inodes: vec![root], last: None }
    }

    /// Applies the next layer. Layers are applied lowest first; `layer` counts from 0.
    pub fn apply(&mut self, layer: usize, index: &LayerIndex, budget: &mut Budget) -> Result<(), TreeError> {
        let fail = |path: &[u8], wrong| match wrong {
            Wrong::Rule(why) => {
                let path = String::from_utf8_lossy(path).chars().take(300).collect();
                TreeError::Entry { layer: layer + 1, path, why }
            }
            Wrong::Budget(error) => error.into(),
        };
        let damaged = |source| TreeError::Index { layer: layer + 1, source };
        // Whiteouts apply only to the layers below, wherever they are in the archive, so they are applied first.
        for entry in index.entries() {
            let entry = entry.map_err(damaged)?;
            budget.step(1)?;
            if matches!(entry.what, What::Whiteout | What::Opaque) {
                self.take_away(&entry, budget)?;
            }
        }
        for entry in index.entries() {
            let Entry { path, meta, what } = entry.map_err(damaged)?;
            budget.step(1)?;
            self.apply_entry(layer, &path, meta, what, budget).map_err(|wrong| fail(&path, wrong))?;
        }
        Ok(())
    }

    fn directory(&self, ino: Ino) -> Option<&BTreeMap<Vec<u8>, Ino>> {
        match self.inodes.get(ino).map(|inode| &inode.body) {
            Some(Body::Directory(children)) => Some(children),
            _ => None,
        }
    }

    fn directory_mut(&mut self, ino: Ino) -> Option<&mut BTreeMap<Vec<u8>, Ino>> {
        match self.inodes.get_mut(ino).map(|inode| &mut inode.body) {
            Some(Body::Directory(children)) => Some(children),
            _ => None,
        }
    }

    fn add(&mut self, meta: Meta, body: Body, budget: &mut Budget) -> Result<Ino, BudgetError> {
        let content = match &body {
            Body::Symlink(target) => heap(target.len() + 2 * size_of::<usize>()),
            Body::File { data: Data::Chunks { chunks, .. }, .. } => heap(chunks.capacity() * size_of::<(u32, u32)>()),
            _ => 0,
        };
        budget.charge(of_xattrs(&meta) + content)?;
        if self.inodes.len() == self.inodes.capacity() {
            let more = (self.inodes.len() / 4).max(64);
            budget.charge((more * size_of::<Inode>()) as u64)?;
            self.inodes.reserve_exact(more);
        }
        self.inodes.push(Inode { meta, body });
        Ok(self.inodes.len() - 1)
    }

    /// Gives an inode a name in a directory. An inode that had the name loses it.
    fn name(&mut self, directory: Ino, name: &[u8], ino: Ino, budget: &mut Budget) -> Result<(), Wrong> {
        let children = self.directory_mut(directory).ok_or("its directory cannot be created")?;
        if let Some(place) = children.get_mut(name) {
            *place = ino;
            self.last = None;
            return Ok(());
        }
        let first = if children.is_empty() { FIRST_CHILD } else { CHILD };
        budget.charge(first + heap(name.len()))?;
        children.insert(name.to_vec(), ino);
        Ok(())
    }

    /// Returns the directory at this path, with links followed inside the root. Creates missing directories if `make`, otherwise
    /// returns `None` for them.
    fn find_directory(&mut self, path: &[u8], make: bool, budget: &mut Budget) -> Result<Option<Ino>, Wrong> {
        if let Some((last, ino)) = &self.last
            && last == path
        {
            return Ok(Some(*ino));
        }
        let mut above: Vec<Ino> = Vec::new();
        let mut at: Ino = 0;
        let mut links = Vec::new();
        let mut followed = 0;
        let mut rest = Parts { text: Text::Path(path), at: 0 };
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
                at = above.pop().unwrap_or(0);
                continue;
            }
            let child = self.directory(at).and_then(|children| children.get(part)).copied();
            let child = match child.and_then(|child| self.inodes.get(child).map(|inode| (child, &inode.body))) {
                Some((child, Body::Directory(_))) => child,
                Some((_, Body::Symlink(target))) => {
                    followed += 1;
                    if followed > MAX_LINKS {
                        return Err("its path leads through too many links".into());
                    }
                    if target.starts_with(b"/") {
                        at = 0;
                        above.clear();
                    }
                    let target = Parts { text: Text::Link(Arc::clone(target)), at: 0 };
                    links.push(std::mem::replace(&mut rest, target));
                    continue;
                }
                Some(_) => return Err("its path leads through something that is not a directory".into()),
                None if make => {
                    if part.len() > crate::layer::MAX_NAME {
                        return Err("its path leads to a name longer than 255 bytes".into());
                    }
                    let body = Body::Directory(BTreeMap::new());
                    let new = self.add(Meta { mode: 0o755, ..Meta::default() }, body, budget)?;
                    self.name(at, part, new, budget)?;
                    new
                }
                None => return Ok(None),
            };
            above.push(at);
            at = child;
            if above.len() > MAX_DEPTH {
                return Err("its path has more than 2048 nested directories".into());
            }
        }
        self.last = Some((path.to_vec(), at));
        Ok(Some(at))
    }

    /// Returns the entries of a directory by its path from the root, with links followed; `None` if there is no such directory.
    pub fn list(&mut self, path: &str, budget: &mut Budget) -> Result<Option<Listing<'_>>, BudgetError> {
        let directory = match self.find_directory(path.as_bytes(), false, budget) {
            Err(Wrong::Budget(error)) => return Err(error),
            Err(Wrong::Rule(_)) | Ok(None) => return Ok(None),
            Ok(Some(directory)) => directory,
        };
        let Some(children) = self.directory(directory) else { return Ok(None) };
        budget.charge(children.len() as u64 * 3 * size_of::<&[u8]>() as u64)?;
        let named = children.iter().filter_map(|(name, ino)| Some((name.as_slice(), self.inodes.get(*ino)?)));
        Ok(Some(named.collect()))
    }

    fn take_away(&mut self, entry: &Entry, budget: &mut Budget) -> Result<(), BudgetError> {
        let (parents, name) = split(&entry.path);
        let directory = if entry.what == What::Opaque { entry.path.as_slice() } else { parents };
        match self.find_directory(directory, false, budget) {
            Err(Wrong::Budget(error)) => return Err(error),
            // The layers below have nothing here. If they have a link or file in place of the opaque directory, the directory of
            // this layer replaces it.
            Err(Wrong::Rule(_)) | Ok(None) => {}
            Ok(Some(directory)) => {
                if let Some(children) = self.directory_mut(directory) {
                    if entry.what == What::Opaque {
                        children.clear();
                    } else {
                        children.remove(name);
                    }
                }
                self.last = None;
            }
        }
        Ok(())
    }

    fn apply_entry(
        &mut self,
        layer: usize,
        path: &[u8],
        meta: Meta,
        what: What,
        budget: &mut Budget,
    ) -> Result<(), Wrong> {
        let body = match what {
            What::Whiteout | What::Opaque => return Ok(()),
            What::Hardlink(target) => {
                let ino = self.link_target(&target, budget)?;
                return self.place(path, ino, budget);
            }
            What::Directory => match self.existing_directory(path, budget)? {
                Some(directory) => {
                    budget.charge(of_xattrs(&meta))?;
                    if let Some(inode) = self.inodes.get_mut(directory) {
                        let before = std::mem::replace(&mut inode.meta, meta);
                        budget.refund(of_xattrs(&before));
                    }
                    return Ok(());
                }
                None => Body::Directory(BTreeMap::new()),
            },
            What::File(data) => Body::File { layer, data },
            What::Symlink(target) => Body::Symlink(target.into()),
            What::Char(device) => Body::Char(device),
            What::Block(device) => Body::Block(device),
            What::Fifo => Body::Fifo,
        };
        let ino = self.add(meta, body, budget)?;
        self.place(path, ino, budget)
    }

    /// Returns the directory that has exactly this path. Its last part is not followed.
    fn existing_directory(&mut self, path: &[u8], budget: &mut Budget) -> Result<Option<Ino>, Wrong> {
        if path.is_empty() {
            return Ok(Some(0));
        }
        let (parents, name) = split(path);
        let parent = self.find_directory(parents, true, budget)?;
        let child = parent.and_then(|parent| self.directory(parent)).and_then(|children| children.get(name)).copied();
        Ok(child.filter(|&child| self.directory(child).is_some()))
    }

    fn link_target(&mut self, path: &[u8], budget: &mut Budget) -> Result<Ino, Wrong> {
        let (parents, name) = split(path);
        let parent = self.find_directory(parents, false, budget)?;
        let target = parent.and_then(|parent| self.directory(parent)).and_then(|children| children.get(name)).copied();
        let target = target.ok_or("the file that it links to is not there")?;
        if self.directory(target).is_some() { Err("it is a hard link to a directory".into()) } else { Ok(target) }
    }

    /// Gives an inode a name. An inode that had the name loses it.
    fn place(&mut self, path: &[u8], ino: Ino, budget: &mut Budget) -> Result<(), Wrong> {
        let (parents, name) = split(path);
        if name.is_empty() {
            return Err("the root is not a directory".into());
        }
        let parent = self.find_directory(parents, true, budget)?.ok_or("its directory cannot be created")?;
        self.name(parent, name, ino, budget)
    }
}

/// Returns the memory that the attributes of an inode take.
fn of_xattrs(meta: &Meta) -> u64 {
    let texts = meta.xattrs.iter().map(|(name, value)| heap(name.len()) + heap(value.len())).sum::<u64>();
    heap(meta.xattrs.capacity() * size_of::<(Vec<u8>, Vec<u8>)>()) + texts
}

/// A path that is followed: an entry's, or the target of a link.
enum Text<'p> {
    Path(&'p [u8]),
    Link(Arc<[u8]>),
}

impl Text<'_> {
    fn whole(&self) -> &[u8] {
        match self {
            Text::Path(path) => path,
            Text::Link(target) => target,
        }
    }

    fn get(&self, start: usize, end: usize) -> &[u8] {
        self.whole().get(start..end).unwrap_or_default()
    }
}

/// The remaining parts of a path.
struct Parts<'p> {
    text: Text<'p>,
    at: usize,
}

impl Parts<'_> {
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
fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|&byte| byte == b'/') {
        Some(at) => (path.get(..at).unwrap_or_default(), path.get(at + 1..).unwrap_or_default()),
        None => (&[], path),
    }
}

#[cfg(test)]
#[path = "tree_tests.rs"]
pub(crate) mod tests;
