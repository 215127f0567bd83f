//! Keeps the table of the guest's nodes: for each file its views, its device number, its last parent, and the open handles.
//! It performs no I/O, except that a file without a name is closed with its node and its last handle.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::nameless::NamelessFile;
use crate::mounts::{MountFlags, MountId, MountTable};
use std::collections::HashMap;
use std::ffi::CString;
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;
use virtiofsd::filesystem::Entry;

/// The inode of the share's root, for the guest and for virtiofsd.
pub(super) const ROOT_INODE: u64 = 1;
/// The device number of the share's root.
pub(super) const ROOT_DEVICE: u16 = 0;
/// A node's number contains its device above these bits.
pub(super) const DEVICE_SHIFT: u32 = 48;
/// The maximum number of directories above a node that are searched for a better view.
pub(super) const MAX_DEPTH: usize = 256;

/// virtiofsd counts its handles from 0 on and never comes this far.
const NAMELESS_HANDLE: u64 = 1 << 63;

/// An inode number of virtiofsd.
pub(super) type VirtiofsdInode = u64;
/// An inode number of the guest.
pub(super) type NodeId = u64;

#[derive(Default)]
pub(super) struct ViewState {
    /// The descriptor of the share's root.
    pub root: Option<OwnedFd>,
    pub nodes: HashMap<NodeId, FileNode>,
    pub by_key: HashMap<(u16, u64), NodeId>,
    pub by_inode: HashMap<VirtiofsdInode, NodeId>,
    /// The node of each open file, and what has it open, by handle.
    pub handles: HashMap<u64, (NodeId, Opened)>,
    /// The number of handles of files that had no name when they were opened.
    pub nameless_handles: u64,
    pub devices: HashMap<(u64, bool), GuestDevice>,
    pub last_number: NodeId,
    /// The guest's kernel sends the groups of a process that creates a file.
    pub sends_groups: bool,
    /// The guest's kernel knows the node's ACLs.
    pub has_acls: bool,
    /// A counter that changes with each further view that is found for a node.
    pub changes: u64,
}

pub(super) struct GuestDevice {
    pub number: u16,
    pub nodes: usize,
}

/// What has a file open.
#[derive(Clone)]
pub(super) enum Opened {
    /// virtiofsd, by this inode.
    ByInode(VirtiofsdInode),
    /// This process itself: the file had no name.
    Nameless(Arc<NamelessFile>),
}

/// A file as long as it has no name.
#[derive(Clone)]
pub(super) struct Nameless {
    pub file: Arc<NamelessFile>,
    pub mount: MountId,
    /// The directory in which it was created.
    pub directory: NodeId,
}

/// A file of the node.
pub(super) struct FileNode {
    pub device: (u64, bool),
    pub key: (u16, u64),
    /// The number of lookups of the guest that it has not forgotten.
    pub lookups: u64,
    /// One view or more, or none as long as the file has no name. The first was the best one when the others were last searched.
    pub views: Vec<View>,
    pub nameless: Option<Nameless>,
    /// The directory in which the file was found last, and its name there; `None` across mounts.
    pub parent: Option<(NodeId, CString)>,
    /// The generation of the mount table and the value of `changes` when views were last searched.
    pub searched_at: (u64, u64),
}

/// A file as it is reached through one mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct View {
    pub inner: VirtiofsdInode,
    /// The descriptor that this process opened when virtiofsd first found the file. That of a directory is the one by which virtiofsd
    /// holds it.
    pub fd: RawFd,
    pub mount: MountId,
    pub flags: MountFlags,
    /// The number of open files.
    pub open: usize,
}

/// The rank of a view; the greatest is the best.
pub(super) type Rank = (bool, bool, bool);

impl View {
    pub fn rank(&self, table: &MountTable) -> Rank {
        let now = table.flags(self.mount);
        let flags = now.unwrap_or(self.flags);
        (now.is_some(), flags.writable, flags.access_times)
    }
}

/// The result of a lookup in a directory.
pub(super) struct LookupResult {
    pub entry: Entry,
    pub fd: RawFd,
    pub device: (u64, bool),
    pub mount: MountId,
    pub flags: MountFlags,
    pub boundary: Boundary,
}

impl LookupResult {
    fn view(&self) -> View {
        View { inner: self.entry.inode, fd: self.fd, mount: self.mount, flags: self.flags, open: 0 }
    }
}

/// The boundary between a directory and one of its entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Boundary {
    /// Both are on the mount through which the directory was reached, and on one device.
    None,
    /// Both are on one mount, but on different devices, as at a subvolume of Btrfs.
    Device,
    /// Both are on different mounts.
    Mount,
}

impl Boundary {
    pub fn between((from, parent_device): (View, (u64, bool)), mount: MountId, device: (u64, bool)) -> Boundary {
        match mount == from.mount {
            false => Boundary::Mount,
            true if device != parent_device => Boundary::Device,
            true => Boundary::None,
        }
    }
}

impl ViewState {
    pub fn find_view(&self, inner: VirtiofsdInode) -> Option<(&FileNode, View)> {
        let node = self.nodes.get(self.by_inode.get(&inner)?)?;
        Some((node, *node.views.iter().find(|view| view.inner == inner)?))
    }

    /// Returns a node and the directories above it, as they were found last, up to the root of a mount.
    pub fn ancestors(&self, node: NodeId) -> Vec<NodeId> {
        let above = |id: &NodeId| Some(self.nodes.get(id)?.parent.as_ref()?.0);
        std::iter::successors(Some(node), above).take(MAX_DEPTH).collect()
    }

    /// Returns all views of a node and of the directories above it.
    pub fn views_of_path(&self, node: NodeId) -> impl Iterator<Item = &View> {
        self.ancestors(node).into_iter().filter_map(|id| self.nodes.get(&id)).flat_map(|node| &node.views)
    }

    /// Returns all views of the directories above a node, without those of the node itself.
    pub fn views_of_ancestors(&self, node: NodeId) -> impl Iterator<Item = &View> {
        self.ancestors(node).into_iter().skip(1).filter_map(|id| self.nodes.get(&id)).flat_map(|node| &node.views)
    }

    /// Returns the key of what was found, if its device has a number.
    pub fn node_key(&self, found: &LookupResult) -> Option<(u16, u64)> {
        Some((self.devices.get(&found.device)?.number, found.entry.attr.ino))
    }

    /// Adds the view by which a node was found, unless it is known.
    pub fn add_view(&mut self, id: NodeId, found: &LookupResult) -> Option<View> {
        let view = found.view();
        let node = self.nodes.get_mut(&id)?;
        if let Some(known) = node.views.iter().find(|known| known.inner == view.inner) {
            return Some(*known);
        }
        node.views.push(view);
        // It has been found by a name.
        node.nameless = None;
        self.by_inode.insert(view.inner, id);
        self.changes += 1;
        Some(view)
    }

    /// Returns the node of what was found; `None` if all device numbers are in use.
    pub fn add_node(&mut self, found: &LookupResult) -> Option<NodeId> {
        let number = self.device_number(found.device)?;
        let key = (number, found.entry.attr.ino);
        if let Some(id) = self.by_key.get(&key).copied() {
            self.add_view(id, found)?;
            return Some(id);
        }
        let id = self.next_id(number);
        self.insert(id, found.device, key, found.view());
        Some(id)
    }

    /// Adds the node of a file that was created without a name and whose inode number on the node is `ino`; `None` if all device numbers
    /// are in use.
    pub fn add_nameless(&mut self, device: (u64, bool), ino: u64, nameless: Nameless) -> Option<NodeId> {
        let number = self.device_number(device)?;
        let id = self.next_id(number);
        self.insert_node(id, device, (number, ino), None, Some(nameless));
        Some(id)
    }

    fn next_id(&mut self, device: u16) -> NodeId {
        self.last_number += 1;
        u64::from(device) << DEVICE_SHIFT | self.last_number
    }

    pub fn insert(&mut self, id: NodeId, device: (u64, bool), key: (u16, u64), view: View) {
        self.by_inode.insert(view.inner, id);
        self.insert_node(id, device, key, Some(view), None);
    }

    fn insert_node(
        &mut self,
        id: NodeId,
        device: (u64, bool),
        key: (u16, u64),
        view: Option<View>,
        nameless: Option<Nameless>,
    ) {
        self.devices.entry(device).or_insert(GuestDevice { number: key.0, nodes: 0 }).nodes += 1;
        self.by_key.insert(key, id);
        let views = view.into_iter().collect();
        self.nodes.insert(id, FileNode { device, key, lookups: 0, views, nameless, parent: None, searched_at: (0, 0) });
    }

    /// Returns the number of a device: its own, or the lowest free one.
    pub fn device_number(&self, device: (u64, bool)) -> Option<u16> {
        if let Some(known) = self.devices.get(&device) {
            return Some(known.number);
        }
        let mut taken: Vec<u16> = self.devices.values().map(|device| device.number).collect();
        taken.sort_unstable();
        let free = (ROOT_DEVICE..=u16::MAX).zip(&taken).find(|(number, taken)| number != *taken);
        free.map_or_else(|| u16::try_from(taken.len()).ok(), |(number, _)| Some(number))
    }

    /// Removes a node; returns its views, which the caller must forget.
    pub fn remove(&mut self, id: NodeId) -> Vec<View> {
        let Some(node) = self.nodes.remove(&id) else { return Vec::new() };
        self.by_key.remove(&node.key);
        if let Some(device) = self.devices.get_mut(&node.device) {
            device.nodes -= 1;
            if device.nodes == 0 {
                self.devices.remove(&node.device);
            }
        }
        node.views
    }

    pub fn add_handle(&mut self, node: NodeId, inner: VirtiofsdInode, handle: u64) {
        self.handles.insert(handle, (node, Opened::ByInode(inner)));
        self.add_open_count(node, inner, 1);
    }

    /// Adds the handle of a file that had no name when it was opened.
    pub fn add_nameless_handle(&mut self, node: NodeId, file: Arc<NamelessFile>) -> u64 {
        self.nameless_handles += 1;
        let handle = NAMELESS_HANDLE | self.nameless_handles;
        self.handles.insert(handle, (node, Opened::Nameless(file)));
        handle
    }

    pub fn remove_handle(&mut self, handle: u64) {
        if let Some((node, Opened::ByInode(inner))) = self.handles.remove(&handle) {
            self.add_open_count(node, inner, -1);
        }
    }

    pub fn add_open_count(&mut self, node: NodeId, inner: VirtiofsdInode, by: isize) {
        let views = self.nodes.get_mut(&node).map(|node| &mut node.views);
        if let Some(view) = views.into_iter().flatten().find(|view| view.inner == inner) {
            view.open = view.open.saturating_add_signed(by);
        }
    }

    pub fn opened(&self, node: NodeId, handle: u64) -> io::Result<Opened> {
        let opened = self.handles.get(&handle).filter(|(owner, _)| *owner == node);
        opened.map(|(_, opened)| opened.clone()).ok_or_else(ebadf)
    }

    /// As `opened`, for directories, which always have a name.
    pub fn inode_of_handle(&self, node: NodeId, handle: u64) -> io::Result<VirtiofsdInode> {
        match self.opened(node, handle)? {
            Opened::ByInode(inner) => Ok(inner),
            Opened::Nameless(_) => Err(ebadf()),
        }
    }
}

pub(super) fn ebadf() -> io::Error {
    io::Error::from_raw_os_error(libc::EBADF)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use super::*;
    use std::time::Duration;
    use virtiofsd::fuse::Attr;

    const PLAIN: MountFlags = MountFlags { writable: true, access_times: true, mapped: false };

    fn found(inner: VirtiofsdInode, device: u64, ino: u64, mount: MountId, flags: MountFlags) -> LookupResult {
        let time = Duration::ZERO;
        let attr = Attr { ino, ..Attr::default() };
        let entry = Entry { inode: inner, generation: 0, attr, attr_timeout: time, entry_timeout: time };
        LookupResult { entry, fd: -1, device: (device, flags.mapped), mount, flags, boundary: Boundary::None }
    }

    fn state() -> ViewState {
        let mut state = ViewState { last_number: ROOT_INODE, ..ViewState::default() };
        let view = View { inner: ROOT_INODE, fd: -1, mount: 1, flags: PLAIN, open: 0 };
        state.insert(ROOT_INODE, (7, false), (ROOT_DEVICE, 1), view);
        state
    }

    #[test]
    fn a_node_is_identified_by_device_inode_and_idmapping() {
        let mut state = state();
        let mapped = MountFlags { mapped: true, ..PLAIN };
        let first = state.add_node(&found(10, 8, 5, 2, PLAIN)).unwrap();
        assert_eq!(state.add_node(&found(11, 8, 5, 3, PLAIN)), Some(first));
        assert_eq!(state.add_node(&found(11, 8, 5, 3, PLAIN)), Some(first), "the same view");
        assert_eq!(state.nodes[&first].views.iter().map(|view| view.mount).collect::<Vec<_>>(), [2, 3]);
        let other = [found(12, 8, 6, 2, PLAIN), found(13, 9, 5, 4, PLAIN), found(14, 8, 5, 5, mapped)];
        let other = other.map(|found| state.add_node(&found).unwrap());
        assert_eq!([first, other[0], other[1], other[2]].map(|node| node >> DEVICE_SHIFT), [1, 1, 2, 3]);
        assert_eq!(state.nodes.len(), 5);
        assert_eq!(state.find_view(11).map(|(node, view)| (node.key, view.mount)), Some(((1, 5), 3)));
    }

    #[test]
    fn a_node_and_its_device_number_are_freed_with_the_last_lookup() {
        let mut state = state();
        let (one, two) = (found(10, 8, 5, 2, PLAIN), found(11, 8, 6, 2, PLAIN));
        let (first, second) = (state.add_node(&one).unwrap(), state.add_node(&two).unwrap());
        let third = state.add_node(&found(12, 9, 5, 3, PLAIN)).unwrap();
        assert_eq!(state.remove(first).len(), 1);
        assert!(state.remove(first).is_empty());
        assert_eq!(state.device_number((8, false)), Some(1), "another node has it");
        assert_eq!(state.remove(second).len(), 1);
        assert_eq!(state.device_number((10, false)), Some(1));
        assert_eq!(third >> DEVICE_SHIFT, 2);
        let again = state.add_node(&one).unwrap();
        assert!(again != first && again >> DEVICE_SHIFT == 1, "no number is used twice");
    }

    #[test]
    fn the_best_view_is_mounted_first_and_writable_second() {
        let table = MountTable::from_mounts(&[(2, MountFlags { writable: false, ..PLAIN }), (3, PLAIN)]);
        let view =
            |mount, writable| View { inner: mount, fd: -1, mount, flags: MountFlags { writable, ..PLAIN }, open: 0 };
        let unmounted = view(4, true).rank(&table);
        // The present flags of a mount count, not those at the time of the lookup.
        let (read, write) = (view(2, true).rank(&table), view(3, false).rank(&table));
        assert!(unmounted < read && read < write);
    }

    #[test]
    fn ancestors_follow_the_last_lookup_and_are_bounded() {
        let mut state = state();
        let nodes: Vec<_> = (0..3).map(|n| state.add_node(&found(10 + n, 8, n + 2, 2, PLAIN)).unwrap()).collect();
        for (at, node) in nodes.iter().enumerate() {
            state.nodes.get_mut(node).unwrap().parent = Some((nodes[(at + 1) % 3], c"name".into()));
        }
        assert_eq!(state.ancestors(nodes[0]).len(), MAX_DEPTH);
        state.remove(nodes[2]);
        assert_eq!(state.ancestors(nodes[0]), [nodes[0], nodes[1], nodes[2]]);
        assert_eq!(state.views_of_path(nodes[0]).count(), 2);
    }

    #[test]
    fn a_handle_keeps_the_inode_by_which_it_was_opened() {
        let mut state = state();
        let node = state.add_node(&found(10, 8, 5, 2, PLAIN)).unwrap();
        state.add_handle(node, 10, 77);
        assert_eq!(state.inode_of_handle(node, 77).ok(), Some(10));
        assert!(state.inode_of_handle(ROOT_INODE, 77).is_err() && state.inode_of_handle(node, 78).is_err());
        assert_eq!(state.nodes[&node].views[0].open, 1);
        state.remove_handle(77);
        state.remove_handle(77);
        assert_eq!(state.nodes[&node].views[0].open, 0);
        assert!(state.inode_of_handle(node, 77).is_err());
    }
}
