//! Finds the view by which a request is answered, and adds the files that virtiofsd has found or created to the table of nodes.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::Views;
use super::nameless::{Creation, directory_fd};
use super::nodes::{
    Boundary, LookupResult, Nameless, NodeId, Opened, ROOT_DEVICE, ROOT_INODE, View, ViewState, VirtiofsdInode, ebadf,
};
use crate::mounts::{MountFlags, MountId, MountTable};
use nacelle_base::guest_error;
use rustix::fs::{AtFlags, Statx, StatxFlags, statx};
use std::cmp::Reverse;
use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::Ordering;
use virtiofsd::filesystem::{Context, Entry, Extensions, FileSystem, OpenOptions};
use virtiofsd::fuse::ATTR_SUBMOUNT;
use virtiofsd::passthrough::credentials::{UnixCredentials, UnixCredentialsGuard};
use virtiofsd::passthrough::stat::{self, StatExt};
use virtiofsd::soft_idmap::{HostGid, HostUid, Id};

impl Views {
    /// Returns the number of the descriptor that this process opens next. virtiofsd keeps one descriptor of each new inode:
    /// the first that it opens.
    pub(super) fn next_fd(&self) -> io::Result<RawFd> {
        Ok(rustix::io::dup(&self.own_fds)?.as_raw_fd())
    }

    /// Determines device, mount and flags of an entry that virtiofsd found in a directory that is reached through `from`.
    /// If the inode is new to this process, `fd` is its descriptor. The caller keeps the reference that virtiofsd counted
    /// for the entry if the inode is new.
    pub(super) fn identify(
        &self,
        ctx: Context,
        state: &ViewState,
        parent: (View, (u64, bool)),
        entry: Entry,
        fd: RawFd,
    ) -> io::Result<LookupResult> {
        let (from, _) = parent;
        if let Some((node, view)) = state.find_view(entry.inode) {
            self.inner.forget(ctx, entry.inode, 1);
            let (mount, flags, device) = (view.mount, view.flags, node.device);
            return Ok(LookupResult {
                entry,
                fd: view.fd,
                device,
                mount,
                flags,
                boundary: Boundary::between(parent, mount, device),
            });
        }
        // Without the way through /proc, for which the kernel would keep an entry of each file.
        let known = stat::statx(&fd, None).ok().filter(|status| status.st.st_ino == entry.attr.ino);
        let found = known.and_then(|StatExt { st, mnt_id: mount }| {
            let flags = if mount == from.mount { Some(from.flags) } else { self.flags_of_mount(mount) }?;
            Some(((st.st_dev, flags.mapped), mount, flags))
        });
        let Some((device, mount, flags)) = found else {
            self.inner.forget(ctx, entry.inode, 1);
            guest_error!("BUG: the mount of a file that the guest has looked up is unknown");
            return Err(io::Error::from_raw_os_error(libc::EIO));
        };
        Ok(LookupResult { entry, fd, device, mount, flags, boundary: Boundary::between(parent, mount, device) })
    }

    /// Returns the flags of a mount, which may be newer than the table of the request.
    fn flags_of_mount(&self, mount: MountId) -> Option<MountFlags> {
        self.mounts.table().flags(mount).or_else(|| {
            self.mounts.expire();
            self.mounts.table().flags(mount)
        })
    }

    /// Looks a name up through one view of a directory.
    pub(super) fn lookup_through(
        &self,
        ctx: Context,
        state: &ViewState,
        parent: NodeId,
        from: View,
        name: &CStr,
    ) -> io::Result<LookupResult> {
        let device = state.nodes.get(&parent).ok_or_else(ebadf)?.device;
        let fd = self.next_fd()?;
        let entry = self.inner.lookup(ctx, from.inner, name)?;
        self.identify(ctx, state, (from, device), entry, fd)
    }

    /// Returns the view of a node through a mount, if it has one or one is found through the directories above it.
    pub(super) fn find_view_on_mount(
        &self,
        ctx: Context,
        state: &mut ViewState,
        table: &MountTable,
        node: NodeId,
        mount: MountId,
    ) -> Option<View> {
        let chain = state.ancestors(node);
        let through =
            |state: &ViewState, id| state.nodes.get(&id)?.views.iter().find(|view| view.mount == mount).copied();
        let (above, mut view) = chain.iter().enumerate().find_map(|(at, id)| Some((at, through(state, *id)?)))?;
        for id in chain.get(..above)?.iter().rev() {
            let (parent, name) = state.nodes.get(id)?.parent.clone()?;
            let found = self.lookup_through(ctx, state, parent, view, &name).ok()?;
            let inner = found.entry.inode;
            let same = state.node_key(&found) == Some(state.nodes.get(id)?.key);
            if !same || found.mount != mount {
                self.forget_unreferenced(ctx, state, inner);
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
    pub(super) fn forget_unreferenced(&self, ctx: Context, state: &ViewState, inner: VirtiofsdInode) {
        if !state.by_inode.contains_key(&inner) {
            self.inner.forget(ctx, inner, 1);
        }
    }

    /// Returns the best view of a node by the present mount table. Reading the table is a system call, so callers do it
    /// once for each request.
    pub(super) fn best_view(
        &self,
        ctx: Context,
        state: &mut ViewState,
        table: &MountTable,
        node: NodeId,
    ) -> io::Result<View> {
        let known = state.nodes.get(&node).ok_or_else(ebadf)?;
        if known.searched_at != (table.generation, state.changes) {
            let own = known.views.iter().map(|view| view.rank(table)).max();
            let better = state.views_of_ancestors(node).map(|view| (view.rank(table), view.mount));
            let better = better.filter(|(rank, _)| Some(*rank) > own).max_by_key(|(rank, _)| *rank);
            if let Some((_, mount)) = better {
                self.find_view_on_mount(ctx, state, table, node, mount);
            }
            let changes = state.changes;
            let known = state.nodes.get_mut(&node).ok_or_else(ebadf)?;
            known.views.sort_by_key(|view| Reverse(view.rank(table)));
            known.searched_at = (table.generation, changes);
            // Views through mounts that are gone would keep those mounts alive.
            let has_mounted_view = known.views.first().is_some_and(|view| table.flags(view.mount).is_some());
            let is_stale = |view: &View| has_mounted_view && view.open == 0 && table.flags(view.mount).is_none();
            let (stale, views) = known.views.iter().partition(|view| is_stale(view));
            known.views = views;
            self.forget_views(ctx, state, stale);
        }
        let best = state.nodes.get(&node).and_then(|node| node.views.first());
        best.copied().ok_or_else(ebadf)
    }

    pub(super) fn forget_views(&self, ctx: Context, state: &mut ViewState, views: Vec<View>) {
        for view in views {
            state.by_inode.remove(&view.inner);
            self.inner.forget(ctx, view.inner, 1);
        }
    }

    /// Returns virtiofsd's inode by which a request about a node is answered.
    pub(super) fn inode_for(&self, ctx: Context, node: NodeId) -> io::Result<VirtiofsdInode> {
        Ok(self.best_view(ctx, &mut self.state(), &self.mounts.table(), node)?.inner)
    }

    /// Returns what has a file open.
    pub(super) fn opened(&self, node: NodeId, handle: u64) -> io::Result<Opened> {
        self.state().opened(node, handle)
    }

    /// Returns by what a request about a node is answered: the open file that it names, or the node's.
    pub(super) fn opened_or_best(&self, ctx: Context, node: NodeId, handle: Option<u64>) -> io::Result<Opened> {
        if let Some(handle) = handle {
            return self.opened(node, handle);
        }
        match self.nameless(node) {
            Some(nameless) => Ok(Opened::Nameless(nameless.file)),
            None => Ok(Opened::ByInode(self.inode_for(ctx, node)?)),
        }
    }

    /// Returns the views of two nodes through the same mount, which rename and link need, if both have one.
    pub(super) fn views_on_same_mount(&self, ctx: Context, one: NodeId, other: NodeId) -> io::Result<(View, View)> {
        let mut state = self.state();
        let table = self.mounts.table();
        let first = self.best_view(ctx, &mut state, &table, one)?;
        let second = self.best_view(ctx, &mut state, &table, other)?;
        if first.mount == second.mount {
            return Ok((first, second));
        }
        let both = [one, other].map(|node| state.views_of_path(node).copied().collect::<Vec<_>>()).concat();
        let mut mounts: Vec<_> = both.iter().map(|view| (Reverse(view.rank(&table)), view.mount)).collect();
        mounts.sort_unstable();
        mounts.dedup();
        for (_, mount) in mounts {
            let first = self.find_view_on_mount(ctx, &mut state, &table, one, mount);
            let second = self.find_view_on_mount(ctx, &mut state, &table, other, mount);
            if let (Some(first), Some(second)) = (first, second) {
                return Ok((first, second));
            }
        }
        Ok((first, second))
    }

    /// Adds the guest's node for an entry that was found in a directory.
    pub(super) fn add_entry(
        &self,
        state: &mut ViewState,
        parent: NodeId,
        name: &CStr,
        found: &LookupResult,
    ) -> io::Result<Entry> {
        let mut attr = found.entry.attr;
        let directory = attr.mode & libc::S_IFMT == libc::S_IFDIR;
        let volume = state.nodes.get(&parent).is_some_and(|parent| parent.key.0 == ROOT_DEVICE);
        let announced = directory || (volume && self.supports_file_submounts.load(Ordering::Relaxed));
        attr.flags &= !ATTR_SUBMOUNT;
        if found.boundary != Boundary::None && announced {
            attr.flags |= ATTR_SUBMOUNT;
        }
        let id = state.add_node(found).ok_or_else(|| io::Error::from_raw_os_error(libc::ENFILE))?;
        if let Some(node) = state.nodes.get_mut(&id) {
            node.lookups = node.lookups.saturating_add(1);
            if found.boundary != Boundary::Mount && id != ROOT_INODE {
                node.parent = Some((parent, name.to_owned()));
            }
        }
        Ok(Entry { inode: id, attr, ..found.entry })
    }

    /// Adds the guest's node for an entry that was just created in a directory.
    pub(super) fn add_created_entry(
        &self,
        ctx: Context,
        parent: (NodeId, View),
        name: &CStr,
        created: Entry,
        fd: RawFd,
    ) -> io::Result<(Entry, VirtiofsdInode)> {
        let (parent, from) = parent;
        let mut state = self.state();
        let device = state.nodes.get(&parent).ok_or_else(ebadf)?.device;
        let inner = created.inode;
        let found = self.identify(ctx, &state, (from, device), created, fd)?;
        let entry = self.add_entry(&mut state, parent, name, &found);
        if entry.is_err() {
            self.forget_unreferenced(ctx, &state, inner);
        }
        Ok((entry?, inner))
    }

    /// Returns a node's file if it has no name.
    pub(super) fn nameless(&self, node: NodeId) -> Option<Nameless> {
        self.state().nodes.get(&node)?.nameless.clone()
    }

    /// Returns whether an extended attribute of the node is none for the guest, as for virtiofsd.
    pub(super) fn hides_xattr(&self, name: &CStr) -> bool {
        is_acl(name) && !self.state().has_acls
    }

    /// Returns whether an extended attribute is an ACL that the guest's kernel enforces.
    pub(super) fn is_known_acl(&self, name: &CStr) -> bool {
        is_acl(name) && self.state().has_acls
    }

    /// Creates a file without a name, which the guest has open, in a directory.
    pub(super) fn create_nameless(
        &self,
        ctx: Context,
        parent: NodeId,
        flags: u32,
        mode: u32,
        umask: u32,
        extensions: Extensions,
    ) -> io::Result<(Entry, u64)> {
        let mut state = self.state();
        let table = self.mounts.table();
        let best = self.best_view(ctx, &mut state, &table, parent)?;
        let directory = state.nodes.get(&parent).ok_or_else(ebadf)?;
        // The mount that has most of the directories above: it may get a name in any of them.
        let equal = || directory.views.iter().filter(|view| view.rank(&table) == best.rank(&table));
        let is_view_of = |id: &NodeId, view: &View| {
            state.nodes.get(id).is_some_and(|above| above.views.iter().any(|other| other.mount == view.mount))
        };
        let ancestors = state.ancestors(parent);
        let view =
            ancestors.iter().rev().find_map(|id| equal().find(|view| is_view_of(id, view))).copied().unwrap_or(best);
        let fd = directory_fd(&self.own_fds, view, directory.key.1)?;
        let groups = state.sends_groups.then_some(extensions.sup_gids);
        let file = self.nameless_files.create(&self.own_fds, &fd, ctx, Creation { flags, mode, umask, groups })?;
        let (attr, device, mount) = file.status()?;
        let nameless = Nameless { file: file.clone(), mount, directory: parent };
        let inode = state.add_nameless((device, view.flags.mapped), attr.ino, nameless);
        let inode = inode.ok_or_else(|| io::Error::from_raw_os_error(libc::ENFILE))?;
        if let Some(node) = state.nodes.get_mut(&inode) {
            node.lookups = 1;
        }
        let handle = state.add_nameless_handle(inode, file);
        let (attr_timeout, entry_timeout) = (self.cache, self.cache);
        Ok((Entry { inode, generation: 0, attr, attr_timeout, entry_timeout }, handle))
    }

    /// Gives a file a name that had none. From then on virtiofsd answers requests about it, except by the handles that are open.
    pub(super) fn link_nameless(
        &self,
        ctx: Context,
        nameless: &Nameless,
        parent: NodeId,
        name: &CStr,
    ) -> io::Result<Entry> {
        let mut state = self.state();
        let table = self.mounts.table();
        // The node links within a mount only.
        let view = self.find_view_on_mount(ctx, &mut state, &table, parent, nameless.mount);
        let view = view.ok_or_else(|| io::Error::from_raw_os_error(libc::EXDEV))?;
        let directory = state.nodes.get(&parent).ok_or_else(ebadf)?;
        let fd = directory_fd(&self.own_fds, view, directory.key.1)?;
        let guard = impersonate_caller(ctx, view)?;
        nameless.file.link(&self.own_fds, &fd, name)?;
        drop(guard);
        let found = self.lookup_through(ctx, &state, parent, view, name)?;
        let entry = self.add_entry(&mut state, parent, name, &found);
        if entry.is_err() {
            self.forget_unreferenced(ctx, &state, found.entry.inode);
        }
        entry
    }

    /// Updates the parent of a file after a rename.
    pub(super) fn update_parent(&self, ctx: Context, parent: NodeId, from: View, name: &CStr) {
        let mut state = self.state();
        let Ok(found) = self.lookup_through(ctx, &state, parent, from, name) else { return };
        self.forget_unreferenced(ctx, &state, found.entry.inode);
        let id = state.by_inode.get(&found.entry.inode).copied();
        if let Some(node) = id.and_then(|id| state.nodes.get_mut(&id)).filter(|_| found.boundary != Boundary::Mount) {
            node.parent = Some((parent, name.to_owned()));
        }
    }

    pub(super) fn forget_node(&self, ctx: Context, node: NodeId, count: u64) {
        let mut state = self.state();
        let Some(known) = state.nodes.get_mut(&node) else { return };
        known.lookups = known.lookups.saturating_sub(count);
        if known.lookups == 0 && node != ROOT_INODE {
            let views = state.remove(node);
            self.forget_views(ctx, &mut state, views);
        }
    }

    pub(super) fn open_and_record(
        &self,
        ctx: Context,
        node: NodeId,
        open: impl FnOnce(VirtiofsdInode) -> io::Result<(Option<u64>, OpenOptions)>,
    ) -> io::Result<(Option<u64>, OpenOptions)> {
        let mut state = self.state();
        let view = self.best_view(ctx, &mut state, &self.mounts.table(), node)?;
        let (handle, options) = open(view.inner)?;
        if let Some(handle) = handle {
            state.add_handle(node, view.inner, handle);
        }
        Ok((handle, options))
    }
}

/// Acts as the calling process of the guest until the guard is dropped, if the view is idmapped: there the node creates
/// names only for users that the mapping contains (EOVERFLOW otherwise), while virtiofsd renames and links as the node's
/// root. The guest's kernel has checked the permissions, so root's capabilities are kept.
pub(super) fn impersonate_caller(ctx: Context, view: View) -> io::Result<Option<UnixCredentialsGuard>> {
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

fn is_acl(xattr: &CStr) -> bool {
    xattr.to_bytes().starts_with(b"system.posix_acl_")
}

/// Returns the device, the inode number and the mount of an open file.
pub(super) fn stat_fd(own_fds: &File, fd: &str) -> Option<Statx> {
    require_mount_id(statx(own_fds, fd, AtFlags::empty(), StatxFlags::BASIC_STATS | StatxFlags::MNT_ID))
}

pub(super) fn require_mount_id(status: rustix::io::Result<Statx>) -> Option<Statx> {
    status.ok().filter(|status| status.stx_mask & StatxFlags::MNT_ID.bits() != 0)
}
