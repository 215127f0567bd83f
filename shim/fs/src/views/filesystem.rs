//! Implements FUSE operations of the guest: each one is passed to virtiofsd with the inode of the best view.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::Views;
use super::nameless;
use super::nodes::{Boundary, NodeId, Opened, ROOT_DEVICE, ROOT_INODE, View, ViewState};
use super::resolve::{impersonate_caller, require_mount_id};
use nacelle_base::retry::retry_interrupted;
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags, makedev, open, statx};
use std::ffi::CStr;
use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;
use virtiofsd::filesystem::{
    Context, Entry, Extensions, FileSystem, FsOptions, GetxattrReply, ListxattrReply, OpenOptions, SetattrValid,
    SetxattrFlags, ZeroCopyReader, ZeroCopyWriter,
};
use virtiofsd::fuse::{Attr, SetattrIn};
use virtiofsd::passthrough::PassthroughFs;

impl FileSystem for Views {
    type Inode = u64;
    type Handle = u64;
    type DirIter = <PassthroughFs as FileSystem>::DirIter;

    fn init(&self, capable: FsOptions) -> io::Result<FsOptions> {
        let options = self.inner.init(capable)?;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let root = retry_interrupted(|| open(&*self.root, flags, Mode::empty()))?;
        let status = statx(&root, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS | StatxFlags::MNT_ID);
        let status = require_mount_id(status).ok_or_else(|| io::Error::from_raw_os_error(libc::EIO))?;
        let mount = status.stx_mnt_id;
        let flags = self.mounts.table().flags(mount).ok_or_else(|| io::Error::from_raw_os_error(libc::EIO))?;
        let device = (makedev(status.stx_dev_major, status.stx_dev_minor), flags.mapped);
        // virtiofsd's server agrees to this one by itself.
        let sends_groups = capable.contains(FsOptions::CREATE_SUPP_GROUP);
        let has_acls = options.contains(FsOptions::POSIX_ACL);
        let mut state = self.state();
        *state = ViewState { last_number: ROOT_INODE, sends_groups, has_acls, ..ViewState::default() };
        let view = View { inner: ROOT_INODE, fd: root.as_raw_fd(), mount, flags, open: 0 };
        state.root = Some(root);
        state.insert(ROOT_INODE, device, (ROOT_DEVICE, status.stx_ino), view);
        Ok(options)
    }

    fn destroy(&self) {
        *self.state() = ViewState::default();
        self.inner.destroy();
    }

    fn lookup(&self, ctx: Context, parent: NodeId, name: &CStr) -> io::Result<Entry> {
        let mut state = self.state();
        let table = self.mounts.table();
        let best = self.best_view(ctx, &mut state, &table, parent)?;
        let mut found = vec![self.lookup_through(ctx, &state, parent, best, name)];
        // A mount in the view of one container is visible to all of them.
        let mut others: Vec<_> = state.views_of_path(parent).map(|view| view.mount).collect();
        others.retain(|mount| *mount != best.mount && table.is_parent(*mount) && table.flags(*mount).is_some());
        others.sort_unstable();
        others.dedup();
        for mount in others {
            if let Some(view) = self.find_view_on_mount(ctx, &mut state, &table, parent, mount) {
                found.push(self.lookup_through(ctx, &state, parent, view, name));
            }
        }
        let crossing =
            found.iter().position(|found| found.as_ref().is_ok_and(|found| found.boundary != Boundary::None));
        let chosen = found.swap_remove(crossing.unwrap_or(0));
        let entry = chosen.and_then(|chosen| {
            let entry = self.add_entry(&mut state, parent, name, &chosen);
            if entry.is_err() {
                self.forget_unreferenced(ctx, &state, chosen.entry.inode);
            }
            entry
        });
        for other in found.into_iter().flatten() {
            let key = state.node_key(&other);
            match &entry {
                Ok(entry) if state.nodes.get(&entry.inode).is_some_and(|node| Some(node.key) == key) => {
                    state.add_view(entry.inode, &other);
                }
                _ => self.forget_unreferenced(ctx, &state, other.entry.inode),
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
        match self.nameless(node) {
            Some(nameless) => Ok((nameless.file.status()?.0, self.cache)),
            None => self.inner.getattr(ctx, self.inode_for(ctx, node)?, handle),
        }
    }

    fn setattr(
        &self,
        ctx: Context,
        node: NodeId,
        attr: SetattrIn,
        handle: Option<u64>,
        valid: SetattrValid,
    ) -> io::Result<(Attr, Duration)> {
        match self.opened_or_best(ctx, node, handle)? {
            Opened::ByInode(inner) => self.inner.setattr(ctx, inner, attr, handle, valid),
            Opened::Nameless(file) => {
                file.set_attributes(attr, valid)?;
                Ok((file.status()?.0, self.cache))
            }
        }
    }

    fn readlink(&self, ctx: Context, node: NodeId) -> io::Result<Vec<u8>> {
        self.inner.readlink(ctx, self.inode_for(ctx, node)?)
    }

    fn symlink(
        &self,
        ctx: Context,
        target: &CStr,
        parent: NodeId,
        name: &CStr,
        extensions: Extensions,
    ) -> io::Result<Entry> {
        let view = self.best_view(ctx, &mut self.state(), &self.mounts.table(), parent)?;
        let fd = self.next_fd()?;
        let created = self.inner.symlink(ctx, target, view.inner, name, extensions)?;
        Ok(self.add_created_entry(ctx, (parent, view), name, created, fd)?.0)
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
        let view = self.best_view(ctx, &mut self.state(), &self.mounts.table(), parent)?;
        let fd = self.next_fd()?;
        let created = self.inner.mknod(ctx, view.inner, name, mode, rdev, umask, extensions)?;
        Ok(self.add_created_entry(ctx, (parent, view), name, created, fd)?.0)
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
        let view = self.best_view(ctx, &mut self.state(), &self.mounts.table(), parent)?;
        let fd = self.next_fd()?;
        let created = self.inner.mkdir(ctx, view.inner, name, mode, umask, extensions)?;
        Ok(self.add_created_entry(ctx, (parent, view), name, created, fd)?.0)
    }

    fn unlink(&self, ctx: Context, parent: NodeId, name: &CStr) -> io::Result<()> {
        self.inner.unlink(ctx, self.inode_for(ctx, parent)?, name)
    }

    fn rmdir(&self, ctx: Context, parent: NodeId, name: &CStr) -> io::Result<()> {
        self.inner.rmdir(ctx, self.inode_for(ctx, parent)?, name)
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
        let (old, new) = self.views_on_same_mount(ctx, from, to)?;
        let guard = impersonate_caller(ctx, new)?;
        self.inner.rename(ctx, old.inner, name, new.inner, new_name, flags)?;
        drop(guard);
        self.update_parent(ctx, to, new, new_name);
        if flags & libc::RENAME_EXCHANGE != 0 {
            self.update_parent(ctx, from, old, name);
        }
        Ok(())
    }

    fn link(&self, ctx: Context, node: NodeId, parent: NodeId, name: &CStr) -> io::Result<Entry> {
        if let Some(nameless) = self.nameless(node) {
            return self.link_nameless(ctx, &nameless, parent, name);
        }
        let (source, view) = self.views_on_same_mount(ctx, node, parent)?;
        let fd = self.next_fd()?;
        let guard = impersonate_caller(ctx, view)?;
        let created = self.inner.link(ctx, source.inner, view.inner, name)?;
        drop(guard);
        Ok(self.add_created_entry(ctx, (parent, view), name, created, fd)?.0)
    }

    fn open(&self, ctx: Context, node: NodeId, kill_priv: bool, flags: u32) -> io::Result<(Option<u64>, OpenOptions)> {
        if let Some(nameless) = self.nameless(node) {
            let file = self.nameless_files.reopen(&self.own_fds, &nameless.file, kill_priv, flags)?;
            return Ok((Some(self.state().add_nameless_handle(node, file)), OpenOptions::empty()));
        }
        self.open_and_record(ctx, node, |inner| self.inner.open(ctx, inner, kill_priv, flags))
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
        if nameless::is_requested(flags) {
            let (entry, handle) = self.create_nameless(ctx, parent, flags, mode, umask, extensions)?;
            return Ok((entry, Some(handle), OpenOptions::empty()));
        }
        let view = self.best_view(ctx, &mut self.state(), &self.mounts.table(), parent)?;
        let fd = self.next_fd()?;
        let created = self.inner.create(ctx, view.inner, name, mode, kill_priv, flags, umask, extensions)?;
        let (created, handle, options) = created;
        let inode = created.inode;
        let admitted = self.add_created_entry(ctx, (parent, view), name, created, fd);
        if let (Err(_), Some(handle)) = (&admitted, handle) {
            // The guest does not get the number of this open file.
            let _ = self.inner.release(ctx, inode, 0, handle, false, false, None);
        }
        let (entry, inner) = admitted?;
        if let Some(handle) = handle {
            self.state().add_handle(entry.inode, inner, handle);
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
        match self.opened(node, handle)? {
            Opened::ByInode(inner) => self.inner.read(ctx, inner, handle, to, size, offset, lock_owner, flags),
            Opened::Nameless(file) => file.read(to, size, offset),
        }
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
        match self.opened(node, handle)? {
            Opened::ByInode(inner) => {
                self.inner.write(ctx, inner, handle, from, size, offset, lock_owner, delayed_write, kill_priv, flags)
            }
            Opened::Nameless(file) => file.write(from, size, offset, delayed_write, kill_priv, flags),
        }
    }

    fn flush(&self, ctx: Context, node: NodeId, handle: u64, lock_owner: u64) -> io::Result<()> {
        match self.opened(node, handle)? {
            Opened::ByInode(inner) => self.inner.flush(ctx, inner, handle, lock_owner),
            Opened::Nameless(file) => file.flush(),
        }
    }

    fn fsync(&self, ctx: Context, node: NodeId, datasync: bool, handle: u64) -> io::Result<()> {
        match self.opened(node, handle)? {
            Opened::ByInode(inner) => self.inner.fsync(ctx, inner, datasync, handle),
            Opened::Nameless(file) => file.sync(datasync),
        }
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
        match self.opened(node, handle)? {
            Opened::ByInode(inner) => self.inner.fallocate(ctx, inner, handle, mode, offset, length),
            Opened::Nameless(file) => file.allocate(mode, offset, length),
        }
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
        if let Opened::ByInode(inner) = self.opened(node, handle)? {
            self.inner.release(ctx, inner, flags, handle, flush, flock_release, lock_owner)?;
        }
        self.state().remove_handle(handle);
        Ok(())
    }

    fn statfs(&self, ctx: Context, node: NodeId) -> io::Result<libc::statvfs64> {
        let node = self.nameless(node).map_or(node, |nameless| nameless.directory);
        self.inner.statfs(ctx, self.inode_for(ctx, node)?)
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
        match self.opened_or_best(ctx, node, None)? {
            Opened::ByInode(inner) => self.inner.setxattr(ctx, inner, name, value, flags, extra_flags),
            Opened::Nameless(_) if self.hides_xattr(name) => Err(io::Error::from_raw_os_error(libc::ENOTSUP)),
            Opened::Nameless(file) => file.set_xattr(name, value, flags, extra_flags),
        }
    }

    fn getxattr(&self, ctx: Context, node: NodeId, name: &CStr, size: u32) -> io::Result<GetxattrReply> {
        let value = match self.opened_or_best(ctx, node, None)? {
            Opened::ByInode(inner) => self.inner.getxattr(ctx, inner, name, size),
            Opened::Nameless(_) if self.hides_xattr(name) => Err(io::Error::from_raw_os_error(libc::ENOTSUP)),
            Opened::Nameless(file) => file.xattr(name, size),
        };
        match value {
            // The guest's kernel asks for the ACL to check permissions, and fails the access with any other error.
            Err(error) if error.raw_os_error() == Some(libc::ENOTSUP) && self.is_known_acl(name) => {
                Err(io::Error::from_raw_os_error(libc::ENODATA))
            }
            value => value,
        }
    }

    fn listxattr(&self, ctx: Context, node: NodeId, size: u32) -> io::Result<ListxattrReply> {
        match self.opened_or_best(ctx, node, None)? {
            Opened::ByInode(inner) => self.inner.listxattr(ctx, inner, size),
            Opened::Nameless(file) => file.xattr_names(size),
        }
    }

    fn removexattr(&self, ctx: Context, node: NodeId, name: &CStr) -> io::Result<()> {
        match self.opened_or_best(ctx, node, None)? {
            Opened::ByInode(inner) => self.inner.removexattr(ctx, inner, name),
            Opened::Nameless(_) if self.hides_xattr(name) => Err(io::Error::from_raw_os_error(libc::ENOTSUP)),
            Opened::Nameless(file) => file.remove_xattr(name),
        }
    }

    fn opendir(&self, ctx: Context, node: NodeId, flags: u32) -> io::Result<(Option<u64>, OpenOptions)> {
        self.open_and_record(ctx, node, |inner| self.inner.opendir(ctx, inner, flags))
    }

    fn readdir(&self, ctx: Context, node: NodeId, handle: u64, size: u32, offset: u64) -> io::Result<Self::DirIter> {
        let inner = self.state().inode_of_handle(node, handle)?;
        self.inner.readdir(ctx, inner, handle, size, offset)
    }

    fn fsyncdir(&self, ctx: Context, node: NodeId, datasync: bool, handle: u64) -> io::Result<()> {
        let inner = self.state().inode_of_handle(node, handle)?;
        self.inner.fsyncdir(ctx, inner, datasync, handle)
    }

    fn releasedir(&self, ctx: Context, node: NodeId, flags: u32, handle: u64) -> io::Result<()> {
        let inner = self.state().inode_of_handle(node, handle)?;
        self.inner.releasedir(ctx, inner, flags, handle)?;
        self.state().remove_handle(handle);
        Ok(())
    }

    fn access(&self, ctx: Context, node: NodeId, mask: u32) -> io::Result<()> {
        self.inner.access(ctx, self.inode_for(ctx, node)?, mask)
    }

    fn lseek(&self, ctx: Context, node: NodeId, handle: u64, offset: u64, whence: u32) -> io::Result<u64> {
        match self.opened(node, handle)? {
            Opened::ByInode(inner) => self.inner.lseek(ctx, inner, handle, offset, whence),
            Opened::Nameless(file) => file.seek(offset, whence),
        }
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
        let (Opened::ByInode(from), Opened::ByInode(to)) =
            (self.opened(from, from_handle)?, self.opened(to, to_handle)?)
        else {
            // The guest's kernel then reads and writes.
            return Err(io::Error::from_raw_os_error(libc::EXDEV));
        };
        self.inner.copyfilerange(ctx, from, from_handle, from_offset, to, to_handle, to_offset, length, flags)
    }

    fn syncfs(&self, ctx: Context, node: NodeId) -> io::Result<()> {
        let node = self.nameless(node).map_or(node, |nameless| nameless.directory);
        self.inner.syncfs(ctx, self.inode_for(ctx, node)?)
    }
}
