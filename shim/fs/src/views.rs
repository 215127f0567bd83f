//! Makes each file of the node one inode for the guest, through however many mounts it is reached.
//!
//! A pod's volumes are mounts; a directory, a part of it and its parent may all be volumes of containers of the pod. virtiofsd has an
//! inode for each mount through which it reaches a file, which is called a view here. The guest gets one inode (a node) with all
//! views of it: its key is the device and the inode number on the node, and the bits of its number above [`DEVICE_SHIFT`] name the
//! device, by which the guest's kernel knows which mounts are one file system. A request is answered by the view that allows most, so
//! the node refuses a write where no container of the pod may write the file; what one container may not write while another may, the
//! guest's kernel refuses. Views whose owners are mapped are another device: the same file has other owners there.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use crate::mounts::{MountFlags, MountId, MountTable, Mounts};
use rustix::fs::{AtFlags, CWD, Statx, StatxFlags, makedev, statx};
use std::cmp::Reverse;
use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use virtiofsd::filesystem::{
    Context, Entry, Extensions, FileSystem, FsOptions, GetxattrReply, ListxattrReply, OpenOptions, SetattrValid,
    SetxattrFlags, ZeroCopyReader, ZeroCopyWriter,
};
use virtiofsd::fuse::{ATTR_SUBMOUNT, Attr, SetattrIn};
use virtiofsd::passthrough::PassthroughFs;
use virtiofsd::passthrough::credentials::{UnixCredentials, UnixCredentialsGuard};
use virtiofsd::soft_idmap::{HostGid, HostUid, Id};

/// The inode of the share's root, for the guest and for virtiofsd.
const ROOT: u64 = 1;
/// The device number of the share's root.
const OWN_DEVICE: u16 = 0;
/// A node's number contains its device above these bits.
const DEVICE_SHIFT: u32 = 48;
/// The maximum number of directories above a node that are searched for a better view.
const MAX_DEPTH: usize = 256;

/// An inode number of virtiofsd.
type Inner = u64;
/// An inode number of the guest.
type NodeId = u64;

/// virtiofsd's file system, with one inode for each file.
pub(crate) struct Views {
    inner: PassthroughFs,
    root: CString,
    /// This process's `/proc/self/fd`.
    own_fds: File,
    mounts: Arc<Mounts>,
    /// The guest's kernel mounts volumes that are not directories too.
    mounts_files: Arc<AtomicBool>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    nodes: HashMap<NodeId, Node>,
    by_key: HashMap<(u16, u64), NodeId>,
    by_inner: HashMap<Inner, NodeId>,
    /// The node and the inode of each open file, by handle.
    handles: HashMap<u64, (NodeId, Inner)>,
    devices: HashMap<(u64, bool), Device>,
    last: NodeId,
    /// A counter that changes with each further view that is found for a node.
    changes: u64,
}

struct Device {
    number: u16,
    nodes: usize,
}

/// A file of the node.
struct Node {
    device: (u64, bool),
    key: (u16, u64),
    /// The number of lookups of the guest that it has not forgotten.
    lookups: u64,
    /// One view or more. The first was the best one when the others were last searched.
    views: Vec<View>,
    /// The directory in which the file was found last, and its name there; `None` across mounts.
    parent: Option<(NodeId, CString)>,
    /// The generation of the mount table and the value of `changes` when views were last searched.
    looked: (u64, u64),
}

/// A file as it is reached through one mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct View {
    inner: Inner,
    mount: MountId,
    flags: MountFlags,
    /// The number of open files.
    open: usize,
}

/// The rank of a view; the greatest is the best.
type Rank = (bool, bool, bool);

impl View {
    fn rank(&self, table: &MountTable) -> Rank {
        let now = table.flags(self.mount);
        let flags = now.unwrap_or(self.flags);
        (now.is_some(), flags.writable, flags.access_times)
    }
}

/// The result of a lookup in a directory.
struct Found {
    entry: Entry,
    device: (u64, bool),
    mount: MountId,
    flags: MountFlags,
    boundary: Boundary,
}

/// The boundary between a directory and one of its entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Boundary {
    /// Both are on the mount through which the directory was reached, and on one device.
    None,
    /// Both are on one mount, but on different devices, as at a subvolume of Btrfs.
    Device,
    /// Both are on different mounts.
    Mount,
}

impl Boundary {
    fn between((from, parent_device): (View, (u64, bool)), mount: MountId, device: (u64, bool)) -> Boundary {
        match mount == from.mount {
            false => Boundary::Mount,
            true if device != parent_device => Boundary::Device,
            true => Boundary::None,
        }
    }
}

impl Views {
    /// Wraps virtiofsd's file system; `root` is the path of its root directory.
    pub fn new(
        inner: PassthroughFs,
        root: CString,
        own_fds: File,
        mounts: Arc<Mounts>,
        mounts_files: Arc<AtomicBool>,
    ) -> Views {
        Views { inner, root, own_fds, mounts, mounts_files, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of the descriptor that this process opens next. virtiofsd keeps one descriptor of each new inode:
    /// the first that it opens.
    fn next_fd(&self) -> io::Result<String> {
        Ok(rustix::io::dup(&self.own_fds)?.as_raw_fd().to_string())
    }

    /// Determines device, mount and flags of an entry that virtiofsd found in a directory that is reached through `from`.
    /// If the inode is new to this process, `fd` is its descriptor. The caller keeps the reference that virtiofsd counted
    /// for the entry if the inode is new.
    fn identify(
        &self,
        ctx: Context,
        state: &State,
        parent: (View, (u64, bool)),
        entry: Entry,
        fd: &str,
    ) -> io::Result<Found> {
        let (from, _) = parent;
        if let Some((node, view)) = state.view(entry.inode) {
            self.inner.forget(ctx, entry.inode, 1);
            let (mount, flags, device) = (view.mount, view.flags, node.device);
            return Ok(Found { entry, device, mount, flags, boundary: Boundary::between(parent, mount, device) });
        }
        let known = status(&self.own_fds, fd).filter(|status| status.stx_ino == entry.attr.ino);
        let found = known.and_then(|status| {
            let mount = status.stx_mnt_id;
            let flags = if mount == from.mount { Some(from.flags) } else { self.mounts.table().flags(mount) }?;
            let device = (makedev(status.stx_dev_major, status.stx_dev_minor), flags.mapped);
            Some((device, mount, flags))
        });
        let Some((device, mount, flags)) = found else {
            self.inner.forget(ctx, entry.inode, 1);
            tracing::error!("BUG: the mount of a file that the guest has looked up is unknown");
            return Err(io::Error::from_raw_os_error(libc::EIO));
        };
        Ok(Found { entry, device, mount, flags, boundary: Boundary::between(parent, mount, device) })
    }

    /// Looks a name up through one view of a directory.
    fn look(&self, ctx: Context, state: &State, parent: NodeId, from: View, name: &CStr) -> io::Result<Found> {
        let device = state.nodes.get(&parent).ok_or_else(ebadf)?.device;
        let fd = self.next_fd()?;
        let entry = self.inner.lookup(ctx, from.inner, name)?;
        self.identify(ctx, state, (from, device), entry, &fd)
    }

    /// Returns the view of a node through a mount, if it has one or one is found through the directories above it.
    fn reach(&self, ctx: Context, state: &mut State, table: &MountTable, node: NodeId, mount: MountId) -> Option<View> {
        let chain = state.chain(node);
        let through = |state: &State, id| state.nodes.get(&id)?.views.iter().find(|view| view.mount == mount).copied();
        let (above, mut view) = chain.iter().enumerate().find_map(|(at, id)| Some((at, through(state, *id)?)))?;
        for id in chain.get(..above)?.iter().rev() {
            let (parent, name) = state.nodes.get(id)?.parent.clone()?;
            let found = self.look(ctx, state, parent, view, &name).ok()?;
            let inner = found.entry.inode;
            let same = state.key_of(&found) == Some(state.nodes.get(id)?.key);
            if !same || found.mount != mount {
                self.drop_unknown(ctx, state, inner);
                return None;
            }
            view = state.add_view(*id, &found)?;
        }
        if let Some(node) = state.nodes.get_mut(&node) {
            node.views.sort_by_key(|view| Reverse(view.rank(table)));
        }
        Some(view)
    }

    /// Drops the reference to an inode of virtiofsd that belongs to no node.
    fn drop_unknown(&self, ctx: Context, state: &State, inner: Inner) {
        if !state.by_inner.contains_key(&inner) {
            self.inner.forget(ctx, inner, 1);
        }
    }

    /// Returns the best view of a node by the present mount table. Reading the table is a system call, so callers do it
    /// once for each request.
    fn best(&self, ctx: Context, state: &mut State, table: &MountTable, node: NodeId) -> io::Result<View> {
        let known = state.nodes.get(&node).ok_or_else(ebadf)?;
        if known.looked != (table.generation, state.changes) {
            let own = known.views.iter().map(|view| view.rank(table)).max();
            let better = state.mounts_above(node).map(|view| (view.rank(table), view.mount));
            let better = better.filter(|(rank, _)| Some(*rank) > own).max_by_key(|(rank, _)| *rank);
            if let Some((_, mount)) = better {
                self.reach(ctx, state, table, node, mount);
            }
            let changes = state.changes;
            let known = state.nodes.get_mut(&node).ok_or_else(ebadf)?;
            known.views.sort_by_key(|view| Reverse(view.rank(table)));
            known.looked = (table.generation, changes);
            // Views through mounts that are gone would keep those mounts alive.
            let live = known.views.first().is_some_and(|view| table.flags(view.mount).is_some());
            let gone = |view: &View| live && view.open == 0 && table.flags(view.mount).is_none();
            let (old, views) = known.views.iter().partition(|view| gone(view));
            known.views = views;
            self.drop_views(ctx, state, old);
        }
        let best = state.nodes.get(&node).and_then(|node| node.views.first());
        best.copied().ok_or_else(ebadf)
    }

    fn drop_views(&self, ctx: Context, state: &mut State, views: Vec<View>) {
        for view in views {
            state.by_inner.remove(&view.inner);
            self.inner.forget(ctx, view.inner, 1);
        }
    }

    /// Returns virtiofsd's inode by which a request about a node is answered.
    fn through(&self, ctx: Context, node: NodeId) -> io::Result<Inner> {
        Ok(self.best(ctx, &mut self.state(), &self.mounts.table(), node)?.inner)
    }

    /// As `through`; if the request names an open file, returns the inode of that file.
    fn through_handle(&self, ctx: Context, node: NodeId, handle: Option<u64>) -> io::Result<Inner> {
        match handle {
            Some(handle) => self.state().opened(node, handle),
            None => self.through(ctx, node),
        }
    }

    /// Returns the views of two nodes through the same mount, which rename and link need, if both have one.
    fn through_one(&self, ctx: Context, one: NodeId, other: NodeId) -> io::Result<(View, View)> {
        let mut state = self.state();
        let table = self.mounts.table();
        let first = self.best(ctx, &mut state, &table, one)?;
        let second = self.best(ctx, &mut state, &table, other)?;
        if first.mount == second.mount {
            return Ok((first, second));
        }
        let both = [one, other].map(|node| state.views_above(node).copied().collect::<Vec<_>>()).concat();
        let mut mounts: Vec<_> = both.iter().map(|view| (Reverse(view.rank(&table)), view.mount)).collect();
        mounts.sort_unstable();
        mounts.dedup();
        for (_, mount) in mounts {
            let first = self.reach(ctx, &mut state, &table, one, mount);
            let second = self.reach(ctx, &mut state, &table, other, mount);
            if let (Some(first), Some(second)) = (first, second) {
                return Ok((first, second));
            }
        }
        Ok((first, second))
    }

    /// Gives the guest a node for an entry that was found in a directory.
    fn admit(&self, state: &mut State, parent: NodeId, name: &CStr, found: &Found) -> io::Result<Entry> {
        let mut attr = found.entry.attr;
        let directory = attr.mode & libc::S_IFMT == libc::S_IFDIR;
        let volume = state.nodes.get(&parent).is_some_and(|parent| parent.key.0 == OWN_DEVICE);
        let announced = directory || (volume && self.mounts_files.load(Ordering::Relaxed));
        attr.flags &= !ATTR_SUBMOUNT;
        if found.boundary != Boundary::None && announced {
            attr.flags |= ATTR_SUBMOUNT;
        }
        let id = state.admit(found).ok_or_else(|| io::Error::from_raw_os_error(libc::ENFILE))?;
        if let Some(node) = state.nodes.get_mut(&id) {
            node.lookups = node.lookups.saturating_add(1);
            if found.boundary != Boundary::Mount && id != ROOT {
                node.parent = Some((parent, name.to_owned()));
            }
        }
        Ok(Entry { inode: id, attr, ..found.entry })
    }

    /// Gives the guest a node for an entry that was just created in a directory.
    fn admit_made(
        &self,
        ctx: Context,
        parent: (NodeId, View),
        name: &CStr,
        made: Entry,
        fd: &str,
    ) -> io::Result<(Entry, Inner)> {
        let (parent, from) = parent;
        let mut state = self.state();
        let device = state.nodes.get(&parent).ok_or_else(ebadf)?.device;
        let inner = made.inode;
        let found = self.identify(ctx, &state, (from, device), made, fd)?;
        let entry = self.admit(&mut state, parent, name, &found);
        if entry.is_err() {
            self.drop_unknown(ctx, &state, inner);
        }
        Ok((entry?, inner))
    }

    /// Updates the parent of a file after a rename.
    fn renamed(&self, ctx: Context, parent: NodeId, from: View, name: &CStr) {
        let mut state = self.state();
        let Ok(found) = self.look(ctx, &state, parent, from, name) else { return };
        self.drop_unknown(ctx, &state, found.entry.inode);
        let id = state.by_inner.get(&found.entry.inode).copied();
        if let Some(node) = id.and_then(|id| state.nodes.get_mut(&id)).filter(|_| found.boundary != Boundary::Mount) {
            node.parent = Some((parent, name.to_owned()));
        }
    }

    fn forget_node(&self, ctx: Context, node: NodeId, count: u64) {
        let mut state = self.state();
        let Some(known) = state.nodes.get_mut(&node) else { return };
        known.lookups = known.lookups.saturating_sub(count);
        if known.lookups == 0 && node != ROOT {
            let views = state.remove(node);
            self.drop_views(ctx, &mut state, views);
        }
    }

    fn open_with(
        &self,
        ctx: Context,
        node: NodeId,
        open: impl FnOnce(Inner) -> io::Result<(Option<u64>, OpenOptions)>,
    ) -> io::Result<(Option<u64>, OpenOptions)> {
        let mut state = self.state();
        let view = self.best(ctx, &mut state, &self.mounts.table(), node)?;
        let (handle, options) = open(view.inner)?;
        if let Some(handle) = handle {
            state.open(node, view.inner, handle);
        }
        Ok((handle, options))
    }
}

impl State {
    fn view(&self, inner: Inner) -> Option<(&Node, View)> {
        let node = self.nodes.get(self.by_inner.get(&inner)?)?;
        Some((node, *node.views.iter().find(|view| view.inner == inner)?))
    }

    /// Returns a node and the directories above it, as they were found last, up to the root of a mount.
    fn chain(&self, node: NodeId) -> Vec<NodeId> {
        let above = |id: &NodeId| Some(self.nodes.get(id)?.parent.as_ref()?.0);
        std::iter::successors(Some(node), above).take(MAX_DEPTH).collect()
    }

    /// Returns all views of a node and of the directories above it.
    fn views_above(&self, node: NodeId) -> impl Iterator<Item = &View> {
        self.chain(node).into_iter().filter_map(|id| self.nodes.get(&id)).flat_map(|node| &node.views)
    }

    /// Returns the views of the directories only.
    fn mounts_above(&self, node: NodeId) -> impl Iterator<Item = &View> {
        self.chain(node).into_iter().skip(1).filter_map(|id| self.nodes.get(&id)).flat_map(|node| &node.views)
    }

    /// Returns the key of what was found, if its device has a number.
    fn key_of(&self, found: &Found) -> Option<(u16, u64)> {
        Some((self.devices.get(&found.device)?.number, found.entry.attr.ino))
    }

    /// Adds the view by which a node was found, unless it is known.
    fn add_view(&mut self, id: NodeId, found: &Found) -> Option<View> {
        let inner = found.entry.inode;
        let node = self.nodes.get_mut(&id)?;
        if let Some(known) = node.views.iter().find(|view| view.inner == inner) {
            return Some(*known);
        }
        let view = View { inner, mount: found.mount, flags: found.flags, open: 0 };
        node.views.push(view);
        self.by_inner.insert(inner, id);
        self.changes += 1;
        Some(view)
    }

    /// Returns the node of what was found; `None` if all device numbers are in use.
    fn admit(&mut self, found: &Found) -> Option<NodeId> {
        let number = self.device(found.device)?;
        let key = (number, found.entry.attr.ino);
        if let Some(id) = self.by_key.get(&key).copied() {
            self.add_view(id, found)?;
            return Some(id);
        }
        self.last += 1;
        let id = u64::from(number) << DEVICE_SHIFT | self.last;
        self.insert(
            id,
            found.device,
            key,
            View { inner: found.entry.inode, mount: found.mount, flags: found.flags, open: 0 },
        );
        Some(id)
    }

    fn insert(&mut self, id: NodeId, device: (u64, bool), key: (u16, u64), view: View) {
        self.devices.entry(device).or_insert(Device { number: key.0, nodes: 0 }).nodes += 1;
        self.by_inner.insert(view.inner, id);
        self.by_key.insert(key, id);
        self.nodes.insert(id, Node { device, key, lookups: 0, views: vec![view], parent: None, looked: (0, 0) });
    }

    /// Returns the number of a device: its own, or the lowest free one.
    fn device(&self, device: (u64, bool)) -> Option<u16> {
        if let Some(known) = self.devices.get(&device) {
            return Some(known.number);
        }
        let mut taken: Vec<u16> = self.devices.values().map(|device| device.number).collect();
        taken.sort_unstable();
        let free = (OWN_DEVICE..=u16::MAX).zip(&taken).find(|(number, taken)| number != *taken);
        free.map_or_else(|| u16::try_from(taken.len()).ok(), |(number, _)| Some(number))
    }

    /// Removes a node; returns its views, which the caller must forget.
    fn remove(&mut self, id: NodeId) -> Vec<View> {
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

    fn open(&mut self, node: NodeId, inner: Inner, handle: u64) {
        self.handles.insert(handle, (node, inner));
        self.count_open(node, inner, 1);
    }

    fn close(&mut self, handle: u64) {
        if let Some((node, inner)) = self.handles.remove(&handle) {
            self.count_open(node, inner, -1);
        }
    }

    fn count_open(&mut self, node: NodeId, inner: Inner, by: isize) {
        let views = self.nodes.get_mut(&node).map(|node| &mut node.views);
        if let Some(view) = views.into_iter().flatten().find(|view| view.inner == inner) {
            view.open = view.open.saturating_add_signed(by);
        }
    }

    fn opened(&self, node: NodeId, handle: u64) -> io::Result<Inner> {
        let opened = self.handles.get(&handle).filter(|(of, _)| *of == node);
        opened.map(|(_, inner)| *inner).ok_or_else(ebadf)
    }
}

/// Acts as the calling process of the guest until the guard is dropped, if the view is idmapped: there the node creates
/// names only for users that the mapping contains (EOVERFLOW otherwise), while virtiofsd renames and links as the node's
/// root. The guest's kernel has checked the permissions, so root's capabilities are kept.
fn as_caller(ctx: Context, view: View) -> io::Result<Option<UnixCredentialsGuard>> {
    if !view.flags.mapped {
        return Ok(None);
    }
    let (uid, gid) = (HostUid::from(ctx.uid.into_inner()), HostGid::from(ctx.gid.into_inner()));
    let guard = UnixCredentials::new(uid, gid).supplementary_gid(false, Vec::new()).set()?;
    if guard.is_some() {
        virtiofsd::util::add_cap_to_eff("FOWNER").map_err(|error| io::Error::other(error.to_string()))?;
    }
    Ok(guard)
}

fn ebadf() -> io::Error {
    io::Error::from_raw_os_error(libc::EBADF)
}

/// Returns the device, the inode number and the mount of an open file.
fn status(own_fds: &File, fd: &str) -> Option<Statx> {
    complete(statx(own_fds, fd, AtFlags::empty(), StatxFlags::BASIC_STATS | StatxFlags::MNT_ID))
}

fn complete(status: rustix::io::Result<Statx>) -> Option<Statx> {
    status.ok().filter(|status| status.stx_mask & StatxFlags::MNT_ID.bits() != 0)
}

impl FileSystem for Views {
    type Inode = u64;
    type Handle = u64;
    type DirIter = <PassthroughFs as FileSystem>::DirIter;

    fn init(&self, capable: FsOptions) -> io::Result<FsOptions> {
        let options = self.inner.init(capable)?;
        let status = statx(CWD, &*self.root, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::BASIC_STATS | StatxFlags::MNT_ID);
        let status = complete(status).ok_or_else(|| io::Error::from_raw_os_error(libc::EIO))?;
        let mount = status.stx_mnt_id;
        let flags = self.mounts.table().flags(mount).ok_or_else(|| io::Error::from_raw_os_error(libc::EIO))?;
        let device = (makedev(status.stx_dev_major, status.stx_dev_minor), flags.mapped);
        let mut state = self.state();
        *state = State { last: ROOT, ..State::default() };
        state.insert(ROOT, device, (OWN_DEVICE, status.stx_ino), View { inner: ROOT, mount, flags, open: 0 });
        Ok(options)
    }

    fn destroy(&self) {
        *self.state() = State::default();
        self.inner.destroy();
    }

    fn lookup(&self, ctx: Context, parent: NodeId, name: &CStr) -> io::Result<Entry> {
        let mut state = self.state();
        let table = self.mounts.table();
        let best = self.best(ctx, &mut state, &table, parent)?;
        let mut found = vec![self.look(ctx, &state, parent, best, name)];
        // A mount in the view of one container is visible to all of them.
        let mut others: Vec<_> = state.views_above(parent).map(|view| view.mount).collect();
        others.retain(|mount| *mount != best.mount && table.is_parent(*mount) && table.flags(*mount).is_some());
        others.sort_unstable();
        others.dedup();
        for mount in others {
            if let Some(view) = self.reach(ctx, &mut state, &table, parent, mount) {
                found.push(self.look(ctx, &state, parent, view, name));
            }
        }
        let crossing =
            found.iter().position(|found| found.as_ref().is_ok_and(|found| found.boundary != Boundary::None));
        let chosen = found.swap_remove(crossing.unwrap_or(0));
        let entry = chosen.and_then(|chosen| {
            let entry = self.admit(&mut state, parent, name, &chosen);
            if entry.is_err() {
                self.drop_unknown(ctx, &state, chosen.entry.inode);
            }
            entry
        });
        for other in found.into_iter().flatten() {
            let key = state.key_of(&other);
            match &entry {
                Ok(entry) if state.nodes.get(&entry.inode).is_some_and(|node| Some(node.key) == key) => {
                    state.add_view(entry.inode, &other);
                }
                _ => self.drop_unknown(ctx, &state, other.entry.inode),
            }
        }
        entry
    }

    fn forget(&self, ctx: Context, node: NodeId, count: u64) {
        self.forget_node(ctx, node, count);
    }

    fn batch_forget(&self, ctx: Context, requests: Vec<(NodeId, u64)>) {
        for (node, count) in requests {
            self.forget_node(ctx, node, count);
        }
    }

    fn getattr(&self, ctx: Context, node: NodeId, handle: Option<u64>) -> io::Result<(Attr, Duration)> {
        self.inner.getattr(ctx, self.through(ctx, node)?, handle)
    }

    fn setattr(
        &self,
        ctx: Context,
        node: NodeId,
        attr: SetattrIn,
        handle: Option<u64>,
        valid: SetattrValid,
    ) -> io::Result<(Attr, Duration)> {
        self.inner.setattr(ctx, self.through_handle(ctx, node, handle)?, attr, handle, valid)
    }

    fn readlink(&self, ctx: Context, node: NodeId) -> io::Result<Vec<u8>> {
        self.inner.readlink(ctx, self.through(ctx, node)?)
    }

    fn symlink(
        &self,
        ctx: Context,
        target: &CStr,
        parent: NodeId,
        name: &CStr,
        extensions: Extensions,
    ) -> io::Result<Entry> {
        let view = self.best(ctx, &mut self.state(), &self.mounts.table(), parent)?;
        let fd = self.next_fd()?;
        let made = self.inner.symlink(ctx, target, view.inner, name, extensions)?;
        Ok(self.admit_made(ctx, (parent, view), name, made, &fd)?.0)
    }

    fn mknod(
        &self,
        ctx: Context,
        parent: NodeId,
        name: &CStr,
        mode: u32,
        rdev: u32,
        umask: u32,
        extensions: Extensions,
    ) -> io::Result<Entry> {
        let view = self.best(ctx, &mut self.state(), &self.mounts.table(), parent)?;
        let fd = self.next_fd()?;
        let made = self.inner.mknod(ctx, view.inner, name, mode, rdev, umask, extensions)?;
        Ok(self.admit_made(ctx, (parent, view), name, made, &fd)?.0)
    }

    fn mkdir(
        &self,
        ctx: Context,
        parent: NodeId,
        name: &CStr,
        mode: u32,
        umask: u32,
        extensions: Extensions,
    ) -> io::Result<Entry> {
        let view = self.best(ctx, &mut self.state(), &self.mounts.table(), parent)?;
        let fd = self.next_fd()?;
        let made = self.inner.mkdir(ctx, view.inner, name, mode, umask, extensions)?;
        Ok(self.admit_made(ctx, (parent, view), name, made, &fd)?.0)
    }

    fn unlink(&self, ctx: Context, parent: NodeId, name: &CStr) -> io::Result<()> {
        self.inner.unlink(ctx, self.through(ctx, parent)?, name)
    }

    fn rmdir(&self, ctx: Context, parent: NodeId, name: &CStr) -> io::Result<()> {
        self.inner.rmdir(ctx, self.through(ctx, parent)?, name)
    }

    fn rename(
        &self,
        ctx: Context,
        from: NodeId,
        name: &CStr,
        to: NodeId,
        new_name: &CStr,
        flags: u32,
    ) -> io::Result<()> {
        let (old, new) = self.through_one(ctx, from, to)?;
        let as_caller = as_caller(ctx, new)?;
        self.inner.rename(ctx, old.inner, name, new.inner, new_name, flags)?;
        drop(as_caller);
        self.renamed(ctx, to, new, new_name);
        if flags & libc::RENAME_EXCHANGE != 0 {
            self.renamed(ctx, from, old, name);
        }
        Ok(())
    }

    fn link(&self, ctx: Context, node: NodeId, parent: NodeId, name: &CStr) -> io::Result<Entry> {
        let (of, view) = self.through_one(ctx, node, parent)?;
        let fd = self.next_fd()?;
        let as_caller = as_caller(ctx, view)?;
        let made = self.inner.link(ctx, of.inner, view.inner, name)?;
        drop(as_caller);
        Ok(self.admit_made(ctx, (parent, view), name, made, &fd)?.0)
    }

    fn open(&self, ctx: Context, node: NodeId, kill_priv: bool, flags: u32) -> io::Result<(Option<u64>, OpenOptions)> {
        self.open_with(ctx, node, |inner| self.inner.open(ctx, inner, kill_priv, flags))
    }

    fn create(
        &self,
        ctx: Context,
        parent: NodeId,
        name: &CStr,
        mode: u32,
        kill_priv: bool,
        flags: u32,
        umask: u32,
        extensions: Extensions,
    ) -> io::Result<(Entry, Option<u64>, OpenOptions)> {
        let view = self.best(ctx, &mut self.state(), &self.mounts.table(), parent)?;
        let fd = self.next_fd()?;
        let made = self.inner.create(ctx, view.inner, name, mode, kill_priv, flags, umask, extensions)?;
        let (made, handle, options) = made;
        let inode = made.inode;
        let admitted = self.admit_made(ctx, (parent, view), name, made, &fd);
        if let (Err(_), Some(handle)) = (&admitted, handle) {
            // The guest does not get the number of this open file.
            let _ = self.inner.release(ctx, inode, 0, handle, false, false, None);
        }
        let (entry, inner) = admitted?;
        if let Some(handle) = handle {
            self.state().open(entry.inode, inner, handle);
        }
        Ok((entry, handle, options))
    }

    fn read<W: ZeroCopyWriter>(
        &self,
        ctx: Context,
        node: NodeId,
        handle: u64,
        to: W,
        size: u32,
        offset: u64,
        lock_owner: Option<u64>,
        flags: u32,
    ) -> io::Result<usize> {
        let inner = self.state().opened(node, handle)?;
        self.inner.read(ctx, inner, handle, to, size, offset, lock_owner, flags)
    }

    fn write<R: ZeroCopyReader>(
        &self,
        ctx: Context,
        node: NodeId,
        handle: u64,
        from: R,
        size: u32,
        offset: u64,
        lock_owner: Option<u64>,
        delayed_write: bool,
        kill_priv: bool,
        flags: u32,
    ) -> io::Result<usize> {
        let inner = self.state().opened(node, handle)?;
        self.inner.write(ctx, inner, handle, from, size, offset, lock_owner, delayed_write, kill_priv, flags)
    }

    fn flush(&self, ctx: Context, node: NodeId, handle: u64, lock_owner: u64) -> io::Result<()> {
        let inner = self.state().opened(node, handle)?;
        self.inner.flush(ctx, inner, handle, lock_owner)
    }

    fn fsync(&self, ctx: Context, node: NodeId, datasync: bool, handle: u64) -> io::Result<()> {
        let inner = self.state().opened(node, handle)?;
        self.inner.fsync(ctx, inner, datasync, handle)
    }

    fn fallocate(
        &self,
        ctx: Context,
        node: NodeId,
        handle: u64,
        mode: u32,
        offset: u64,
        length: u64,
    ) -> io::Result<()> {
        let inner = self.state().opened(node, handle)?;
        self.inner.fallocate(ctx, inner, handle, mode, offset, length)
    }

    fn release(
        &self,
        ctx: Context,
        node: NodeId,
        flags: u32,
        handle: u64,
        flush: bool,
        flock_release: bool,
        lock_owner: Option<u64>,
    ) -> io::Result<()> {
        let inner = self.state().opened(node, handle)?;
        self.inner.release(ctx, inner, flags, handle, flush, flock_release, lock_owner)?;
        self.state().close(handle);
        Ok(())
    }

    fn statfs(&self, ctx: Context, node: NodeId) -> io::Result<libc::statvfs64> {
        self.inner.statfs(ctx, self.through(ctx, node)?)
    }

    fn setxattr(
        &self,
        ctx: Context,
        node: NodeId,
        name: &CStr,
        value: &[u8],
        flags: u32,
        extra_flags: SetxattrFlags,
    ) -> io::Result<()> {
        self.inner.setxattr(ctx, self.through(ctx, node)?, name, value, flags, extra_flags)
    }

    fn getxattr(&self, ctx: Context, node: NodeId, name: &CStr, size: u32) -> io::Result<GetxattrReply> {
        self.inner.getxattr(ctx, self.through(ctx, node)?, name, size)
    }

    fn listxattr(&self, ctx: Context, node: NodeId, size: u32) -> io::Result<ListxattrReply> {
        self.inner.listxattr(ctx, self.through(ctx, node)?, size)
    }

    fn removexattr(&self, ctx: Context, node: NodeId, name: &CStr) -> io::Result<()> {
        self.inner.removexattr(ctx, self.through(ctx, node)?, name)
    }

    fn opendir(&self, ctx: Context, node: NodeId, flags: u32) -> io::Result<(Option<u64>, OpenOptions)> {
        self.open_with(ctx, node, |inner| self.inner.opendir(ctx, inner, flags))
    }

    fn readdir(&self, ctx: Context, node: NodeId, handle: u64, size: u32, offset: u64) -> io::Result<Self::DirIter> {
        let inner = self.state().opened(node, handle)?;
        self.inner.readdir(ctx, inner, handle, size, offset)
    }

    fn fsyncdir(&self, ctx: Context, node: NodeId, datasync: bool, handle: u64) -> io::Result<()> {
        let inner = self.state().opened(node, handle)?;
        self.inner.fsyncdir(ctx, inner, datasync, handle)
    }

    fn releasedir(&self, ctx: Context, node: NodeId, flags: u32, handle: u64) -> io::Result<()> {
        let inner = self.state().opened(node, handle)?;
        self.inner.releasedir(ctx, inner, flags, handle)?;
        self.state().close(handle);
        Ok(())
    }

    fn access(&self, ctx: Context, node: NodeId, mask: u32) -> io::Result<()> {
        self.inner.access(ctx, self.through(ctx, node)?, mask)
    }

    fn lseek(&self, ctx: Context, node: NodeId, handle: u64, offset: u64, whence: u32) -> io::Result<u64> {
        let inner = self.state().opened(node, handle)?;
        self.inner.lseek(ctx, inner, handle, offset, whence)
    }

    fn copyfilerange(
        &self,
        ctx: Context,
        from: NodeId,
        from_handle: u64,
        from_offset: u64,
        to: NodeId,
        to_handle: u64,
        to_offset: u64,
        length: u64,
        flags: u64,
    ) -> io::Result<usize> {
        let state = self.state();
        let inner = (state.opened(from, from_handle)?, state.opened(to, to_handle)?);
        drop(state);
        let (from, to) = inner;
        self.inner.copyfilerange(ctx, from, from_handle, from_offset, to, to_handle, to_offset, length, flags)
    }

    fn syncfs(&self, ctx: Context, node: NodeId) -> io::Result<()> {
        self.inner.syncfs(ctx, self.through(ctx, node)?)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use super::*;

    const PLAIN: MountFlags = MountFlags { writable: true, access_times: true, mapped: false };

    fn found(inner: Inner, device: u64, ino: u64, mount: MountId, flags: MountFlags) -> Found {
        let time = Duration::ZERO;
        let attr = Attr { ino, ..Attr::default() };
        let entry = Entry { inode: inner, generation: 0, attr, attr_timeout: time, entry_timeout: time };
        Found { entry, device: (device, flags.mapped), mount, flags, boundary: Boundary::None }
    }

    fn state() -> State {
        let mut state = State { last: ROOT, ..State::default() };
        let view = View { inner: ROOT, mount: 1, flags: PLAIN, open: 0 };
        state.insert(ROOT, (7, false), (OWN_DEVICE, 1), view);
        state
    }

    #[test]
    fn a_node_is_a_device_and_an_inode_and_whether_owners_are_mapped() {
        let mut state = state();
        let mapped = MountFlags { mapped: true, ..PLAIN };
        let first = state.admit(&found(10, 8, 5, 2, PLAIN)).unwrap();
        assert_eq!(state.admit(&found(11, 8, 5, 3, PLAIN)), Some(first));
        assert_eq!(state.admit(&found(11, 8, 5, 3, PLAIN)), Some(first), "the same view");
        assert_eq!(state.nodes[&first].views.iter().map(|view| view.mount).collect::<Vec<_>>(), [2, 3]);
        let other = [found(12, 8, 6, 2, PLAIN), found(13, 9, 5, 4, PLAIN), found(14, 8, 5, 5, mapped)];
        let other = other.map(|found| state.admit(&found).unwrap());
        assert_eq!([first, other[0], other[1], other[2]].map(|node| node >> DEVICE_SHIFT), [1, 1, 2, 3]);
        assert_eq!(state.nodes.len(), 5);
        assert_eq!(state.view(11).map(|(node, view)| (node.key, view.mount)), Some(((1, 5), 3)));
    }

    #[test]
    fn a_node_and_the_number_of_its_device_go_with_the_last_lookup() {
        let mut state = state();
        let (one, two) = (found(10, 8, 5, 2, PLAIN), found(11, 8, 6, 2, PLAIN));
        let (first, second) = (state.admit(&one).unwrap(), state.admit(&two).unwrap());
        let third = state.admit(&found(12, 9, 5, 3, PLAIN)).unwrap();
        assert_eq!(state.remove(first).len(), 1);
        assert!(state.remove(first).is_empty());
        assert_eq!(state.device((8, false)), Some(1), "another node has it");
        assert_eq!(state.remove(second).len(), 1);
        assert_eq!(state.device((10, false)), Some(1));
        assert_eq!(third >> DEVICE_SHIFT, 2);
        let again = state.admit(&one).unwrap();
        assert!(again != first && again >> DEVICE_SHIFT == 1, "no number is used twice");
    }

    #[test]
    fn the_best_view_is_one_that_is_mounted_then_one_that_can_be_written() {
        let table = MountTable::of(&[(2, MountFlags { writable: false, ..PLAIN }), (3, PLAIN)]);
        let view = |mount, writable| View { inner: mount, mount, flags: MountFlags { writable, ..PLAIN }, open: 0 };
        let gone = view(4, true).rank(&table);
        // The present flags of a mount count, not those at the time of the lookup.
        let (read, write) = (view(2, true).rank(&table), view(3, false).rank(&table));
        assert!(gone < read && read < write);
    }

    #[test]
    fn directories_above_are_those_of_the_last_lookup_and_end_somewhere() {
        let mut state = state();
        let nodes: Vec<_> = (0..3).map(|n| state.admit(&found(10 + n, 8, n + 2, 2, PLAIN)).unwrap()).collect();
        for (at, node) in nodes.iter().enumerate() {
            state.nodes.get_mut(node).unwrap().parent = Some((nodes[(at + 1) % 3], c"name".into()));
        }
        assert_eq!(state.chain(nodes[0]).len(), MAX_DEPTH);
        state.remove(nodes[2]);
        assert_eq!(state.chain(nodes[0]), [nodes[0], nodes[1], nodes[2]]);
        assert_eq!(state.views_above(nodes[0]).count(), 2);
    }

    #[test]
    fn an_open_file_is_of_the_inode_that_it_was_opened_of() {
        let mut state = state();
        let node = state.admit(&found(10, 8, 5, 2, PLAIN)).unwrap();
        state.open(node, 10, 77);
        assert_eq!(state.opened(node, 77).ok(), Some(10));
        assert!(state.opened(ROOT, 77).is_err() && state.opened(node, 78).is_err());
        assert_eq!(state.nodes[&node].views[0].open, 1);
        state.close(77);
        state.close(77);
        assert_eq!(state.nodes[&node].views[0].open, 0);
        assert!(state.opened(node, 77).is_err());
    }
}
