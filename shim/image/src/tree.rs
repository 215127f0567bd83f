//! Owns: the tree of an image: its layers' indexes, applied one over the other. Purely in memory, so no
//! path of a layer can reach anything else; links in paths are followed inside the tree, as the tools do that
//! unpack into a folder.
//! May use: `layer::index`.

use crate::layer::index::{Data, Device, Entry, LayerIndex, Meta, What};
use std::collections::{BTreeMap, VecDeque};

/// Links that are followed for one path; then it counts as a loop.
const MAX_LINKS: usize = 255;
/// Folders in one another.
const MAX_DEPTH: usize = 2048;

/// The number of an inode in `Tree::inodes`; the root is 0.
pub type Ino = usize;

/// A merged tree. Inodes that no folder names any more stay in the list.
#[derive(Debug)]
pub struct Tree {
    /// All inodes.
    pub inodes: Vec<Inode>,
}

/// One file of the tree.
#[derive(Debug)]
pub struct Inode {
    /// Owner, times, attributes.
    pub meta: Meta,
    /// What it is.
    pub body: Body,
}

/// What an inode is.
#[derive(Debug)]
pub enum Body {
    /// A folder: names and inodes.
    Folder(BTreeMap<Vec<u8>, Ino>),
    /// A file, with its data in the blob of this layer.
    File {
        /// The layer, counted from the lowest.
        layer: usize,
        /// Where in its blob.
        data: Data,
    },
    /// A symbolic link.
    Symlink(Vec<u8>),
    /// A character device.
    Char(Device),
    /// A block device.
    Block(Device),
    /// A named pipe.
    Fifo,
}

/// Why layers do not make a tree.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("entry {path:?} of layer {layer} cannot be applied: {why}")]
pub struct TreeError {
    /// The layer, counted from the lowest, which is 1.
    pub layer: usize,
    /// The entry.
    pub path: String,
    /// The rule it breaks.
    pub why: &'static str,
}

impl Tree {
    /// Applies the layers, lowest first.
    pub fn merge<'a>(layers: impl IntoIterator<Item = &'a LayerIndex>) -> Result<Tree, TreeError> {
        let root = Inode { meta: Meta { mode: 0o755, ..Meta::default() }, body: Body::Folder(BTreeMap::new()) };
        let mut tree = Tree { inodes: vec![root] };
        for (layer, index) in layers.into_iter().enumerate() {
            let fail = |entry: &Entry, why| TreeError {
                layer: layer + 1,
                path: String::from_utf8_lossy(&entry.path).chars().take(300).collect(),
                why,
            };
            // Whiteouts are about the layers below only, wherever in the archive they stand: so they come first.
            for entry in index.entries.iter().filter(|entry| matches!(entry.what, What::Whiteout | What::Opaque)) {
                tree.take_away(entry).map_err(|why| fail(entry, why))?;
            }
            for entry in &index.entries {
                tree.apply(layer, entry).map_err(|why| fail(entry, why))?;
            }
        }
        Ok(tree)
    }

    fn folder(&self, ino: Ino) -> Option<&BTreeMap<Vec<u8>, Ino>> {
        match self.inodes.get(ino).map(|inode| &inode.body) {
            Some(Body::Folder(children)) => Some(children),
            _ => None,
        }
    }

    fn folder_mut(&mut self, ino: Ino) -> Option<&mut BTreeMap<Vec<u8>, Ino>> {
        match self.inodes.get_mut(ino).map(|inode| &mut inode.body) {
            Some(Body::Folder(children)) => Some(children),
            _ => None,
        }
    }

    fn add(&mut self, meta: Meta, body: Body) -> Ino {
        self.inodes.push(Inode { meta, body });
        self.inodes.len() - 1
    }

    /// The folder at these parts, with links followed inside the root. A folder that is missing is made if
    /// `make`; otherwise the answer is none.
    fn find_folder<'p>(
        &mut self,
        parts: impl Iterator<Item = &'p [u8]>,
        make: bool,
    ) -> Result<Option<Ino>, &'static str> {
        let mut todo: VecDeque<Vec<u8>> = parts.map(<[u8]>::to_vec).collect();
        let mut above: Vec<Ino> = Vec::new();
        let mut at: Ino = 0;
        let mut links = 0;
        while let Some(part) = todo.pop_front() {
            match part.as_slice() {
                b"" | b"." => continue,
                b".." => {
                    at = above.pop().unwrap_or(0);
                    continue;
                }
                _ => {}
            }
            let child = self.folder(at).and_then(|children| children.get(&part)).copied();
            let child = match child.and_then(|child| self.inodes.get(child).map(|inode| (child, &inode.body))) {
                Some((child, Body::Folder(_))) => child,
                Some((_, Body::Symlink(target))) => {
                    links += 1;
                    if links > MAX_LINKS {
                        return Err("its path leads through too many links");
                    }
                    if target.starts_with(b"/") {
                        at = 0;
                        above.clear();
                    }
                    for part in target.split(|&byte| byte == b'/').rev() {
                        todo.push_front(part.to_vec());
                    }
                    continue;
                }
                Some(_) => return Err("its path leads through something that is no folder"),
                None if make => {
                    if part.len() > crate::layer::MAX_NAME {
                        return Err("its path leads to a name longer than 255 bytes");
                    }
                    let new = self.add(Meta { mode: 0o755, ..Meta::default() }, Body::Folder(BTreeMap::new()));
                    self.folder_mut(at).and_then(|children| children.insert(part, new));
                    new
                }
                None => return Ok(None),
            };
            above.push(at);
            at = child;
            if above.len() > MAX_DEPTH {
                return Err("its path has more than 2048 folders in one another");
            }
        }
        Ok(Some(at))
    }

    /// What a folder has, by its path from the root, links followed; none if there is no such folder.
    pub fn list(&mut self, path: &str) -> Option<Vec<(&[u8], &Inode)>> {
        let folder = self.find_folder(path.as_bytes().split(|&byte| byte == b'/'), false).ok()??;
        let children = self.folder(folder)?.iter();
        Some(children.filter_map(|(name, ino)| Some((name.as_slice(), self.inodes.get(*ino)?))).collect())
    }

    fn take_away(&mut self, entry: &Entry) -> Result<(), &'static str> {
        if entry.what == What::Opaque {
            // A link or file at the folder's place: the folder comes in this layer and replaces it.
            if let Ok(Some(folder)) = self.find_folder(entry.path.split(|&byte| byte == b'/'), false) {
                self.folder_mut(folder).map(BTreeMap::clear);
            }
            return Ok(());
        }
        let (parents, name) = split(&entry.path);
        match self.find_folder(parents.split(|&byte| byte == b'/'), false) {
            Ok(Some(folder)) => {
                self.folder_mut(folder).and_then(|children| children.remove(name));
                Ok(())
            }
            // Nothing can be there.
            _ => Ok(()),
        }
    }

    fn apply(&mut self, layer: usize, entry: &Entry) -> Result<(), &'static str> {
        let body = match &entry.what {
            What::Whiteout | What::Opaque => return Ok(()),
            What::Hardlink(target) => {
                let ino = self.link_target(target)?;
                return self.place(&entry.path, ino);
            }
            What::Folder => match self.existing_folder(&entry.path)? {
                Some(folder) => {
                    if let Some(inode) = self.inodes.get_mut(folder) {
                        inode.meta = entry.meta.clone();
                    }
                    return Ok(());
                }
                None => Body::Folder(BTreeMap::new()),
            },
            What::File(data) => Body::File { layer, data: data.clone() },
            What::Symlink(target) => Body::Symlink(target.clone()),
            What::Char(device) => Body::Char(*device),
            What::Block(device) => Body::Block(*device),
            What::Fifo => Body::Fifo,
        };
        let ino = self.add(entry.meta.clone(), body);
        self.place(&entry.path, ino)
    }

    /// The folder that has exactly this path, its last part not followed.
    fn existing_folder(&mut self, path: &[u8]) -> Result<Option<Ino>, &'static str> {
        if path.is_empty() {
            return Ok(Some(0));
        }
        let (parents, name) = split(path);
        let parent = self.find_folder(parents.split(|&byte| byte == b'/'), true)?;
        let child = parent.and_then(|parent| self.folder(parent)).and_then(|children| children.get(name)).copied();
        Ok(child.filter(|&child| self.folder(child).is_some()))
    }

    fn link_target(&mut self, path: &[u8]) -> Result<Ino, &'static str> {
        let (parents, name) = split(path);
        let parent = self.find_folder(parents.split(|&byte| byte == b'/'), false)?;
        let target = parent.and_then(|parent| self.folder(parent)).and_then(|children| children.get(name)).copied();
        let target = target.ok_or("the file that it links to is not there")?;
        if self.folder(target).is_some() { Err("it links to a folder") } else { Ok(target) }
    }

    /// Gives an inode a name; what had the name loses it.
    fn place(&mut self, path: &[u8], ino: Ino) -> Result<(), &'static str> {
        let (parents, name) = split(path);
        if name.is_empty() {
            return Err("the root is not a folder");
        }
        let parent = self.find_folder(parents.split(|&byte| byte == b'/'), true)?;
        let children = parent.and_then(|parent| self.folder_mut(parent)).ok_or("its folder cannot be made")?;
        children.insert(name.to_vec(), ino);
        Ok(())
    }
}

/// Parents and last part of a clean path.
fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|&byte| byte == b'/') {
        Some(at) => (path.get(..at).unwrap_or_default(), path.get(at + 1..).unwrap_or_default()),
        None => (&[], path),
    }
}

#[cfg(test)]
#[path = "tree_tests.rs"]
mod tests;
