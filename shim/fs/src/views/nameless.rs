//! Files without a name (O_TMPFILE). virtiofsd reaches a file by its name only, so requests about these are answered here, until the
//! guest gives the file a name (FUSE_LINK).
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::nodes::View;
use super::resolve::{require_mount_id, stat_fd};
use crate::mounts::MountId;
use nacelle_base::retry::retry_interrupted;
use rustix::fs::{
    AtFlags, FallocateFlags, Gid, Mode, OFlags, SeekFrom, StatxFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, Uid,
    XattrFlags, fallocate, fchmod, fchown, fgetxattr, flistxattr, fremovexattr, fsetxattr, ftruncate, futimens, linkat,
    makedev, openat, seek, statx,
};
use rustix::process::umask;
use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use virtiofsd::filesystem::{
    Context, GetxattrReply, ListxattrReply, SetattrValid, SetxattrFlags, ZeroCopyReader, ZeroCopyWriter,
};
use virtiofsd::fuse::{Attr, SetattrIn};
use virtiofsd::oslib::WritevFlags;
use virtiofsd::passthrough::credentials::{UnixCredentials, drop_effective_cap};
use virtiofsd::soft_idmap::{GuestGid, GuestUid, HostGid, HostUid, Id};

/// The largest value, and the longest list of names, of extended attributes on Linux in bytes (`XATTR_SIZE_MAX`, `XATTR_LIST_MAX`).
const MAX_XATTR_BYTES: usize = 1 << 16;
const POSIX_ACL_ACCESS: &[u8] = b"system.posix_acl_access";
/// `O_TMPFILE` without `O_DIRECTORY`, which it contains.
const TMPFILE_BIT: u32 = (libc::O_TMPFILE & !libc::O_DIRECTORY) as u32;
/// The flags of an open request that the node does not get: nothing is created, the guest has resolved the name, and O_APPEND is applied to
/// each write, because the guest may change it. The memory that is read and written need not be aligned.
const NOT_FORWARDED: u32 = (libc::O_CREAT
    | libc::O_EXCL
    | libc::O_NOFOLLOW
    | libc::O_DIRECTORY
    | libc::O_APPEND
    | libc::O_NOATIME
    | libc::O_DIRECT
    | libc::O_PATH) as u32
    | TMPFILE_BIT;

/// Returns whether the flags of a creation request ask for a file without a name.
pub(super) fn is_requested(flags: u32) -> bool {
    flags & libc::O_TMPFILE as u32 == libc::O_TMPFILE as u32
}

/// The parameters of a creation request.
pub(super) struct Creation {
    pub flags: u32,
    pub mode: u32,
    pub umask: u32,
    /// The caller's supplementary groups; `None` if the guest's kernel does not send them.
    pub groups: Option<Vec<GuestGid>>,
}

/// The files of a server that are open without virtiofsd, and their limit.
pub(super) struct NamelessFiles {
    limit: usize,
    /// Each open file has a clone.
    counter: Arc<()>,
}

/// A file that was created without a name, or is open since it had none.
pub(super) struct NamelessFile {
    file: File,
    _counted: Arc<()>,
}

impl NamelessFiles {
    pub fn new(limit: usize) -> NamelessFiles {
        NamelessFiles { limit, counter: Arc::new(()) }
    }

    /// Opens a file unless there are too many (ENFILE).
    fn open(&self, own_fds: &File, fd: &str, flags: u32, mode: u32) -> io::Result<Arc<NamelessFile>> {
        let counted = self.counter.clone();
        if Arc::strong_count(&self.counter) > self.limit.saturating_add(1) {
            return Err(io::Error::from_raw_os_error(libc::ENFILE));
        }
        let flags = OFlags::from_bits_retain(flags) | OFlags::CLOEXEC;
        let file = retry_interrupted(|| openat(own_fds, fd, flags, Mode::from_raw_mode(mode & 0o7777)))?;
        Ok(Arc::new(NamelessFile { file: file.into(), _counted: counted }))
    }

    /// Creates a file without a name in a directory, whose descriptor is `fd`, as the calling process of the guest.
    pub fn create(&self, own_fds: &File, fd: &str, ctx: Context, creation: Creation) -> io::Result<Arc<NamelessFile>> {
        let Creation { flags, mode, umask: mask, groups } = creation;
        let (uid, gid) = (HostUid::from(ctx.uid.into_inner()), HostGid::from(ctx.gid.into_inner()));
        let known = groups.is_some();
        // For root virtiofsd would set the groups and never take them back.
        let groups = if uid.is_root() && gid.is_root() { Vec::new() } else { groups.unwrap_or_default() };
        let groups = groups.into_iter().map(|gid| HostGid::from(gid.into_inner())).collect();
        let exclusive = flags & libc::O_EXCL as u32;
        let flags = (flags & !NOT_FORWARDED) | exclusive | libc::O_TMPFILE as u32;
        let _caller = UnixCredentials::new(uid, gid).supplementary_gid(known, groups).set()?;
        // The node's kernel applies it unless the directory has a default ACL. This process has one thread.
        let before = umask(Mode::from_raw_mode(mask & 0o777));
        let created = self.open(own_fds, fd, flags, mode);
        umask(before);
        created
    }

    /// Opens a file once more.
    pub fn reopen(
        &self,
        own_fds: &File,
        file: &NamelessFile,
        kill_priv: bool,
        flags: u32,
    ) -> io::Result<Arc<NamelessFile>> {
        let _killed = kill_priv.then(|| drop_effective_cap("FSETID")).transpose()?;
        self.open(own_fds, &file.fd_name(), flags & !NOT_FORWARDED, 0)
    }
}

/// Returns the name in `/proc/self/fd` of the descriptor by which virtiofsd holds a directory, if it is that of this view.
pub(super) fn directory_fd(own_fds: &File, view: View, ino: u64) -> io::Result<String> {
    let name = view.fd.to_string();
    let status = stat_fd(own_fds, &name).filter(|status| status.stx_ino == ino && status.stx_mnt_id == view.mount);
    status.map(|_| name).ok_or_else(|| io::Error::from_raw_os_error(libc::EOPNOTSUPP))
}

impl NamelessFile {
    fn fd_name(&self) -> String {
        self.file.as_raw_fd().to_string()
    }

    /// Returns the file's attributes, its device number and its mount.
    pub fn status(&self) -> io::Result<(Attr, u64, MountId)> {
        let status =
            require_mount_id(statx(&self.file, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS | StatxFlags::MNT_ID));
        let status = status.ok_or_else(|| io::Error::from_raw_os_error(libc::EIO))?;
        let seconds = i64::cast_unsigned;
        let attr = Attr {
            ino: status.stx_ino,
            size: status.stx_size,
            blocks: status.stx_blocks,
            atime: seconds(status.stx_atime.tv_sec),
            mtime: seconds(status.stx_mtime.tv_sec),
            ctime: seconds(status.stx_ctime.tv_sec),
            atimensec: status.stx_atime.tv_nsec,
            mtimensec: status.stx_mtime.tv_nsec,
            ctimensec: status.stx_ctime.tv_nsec,
            mode: status.stx_mode.into(),
            nlink: status.stx_nlink,
            uid: GuestUid::from(status.stx_uid),
            gid: GuestGid::from(status.stx_gid),
            rdev: 0,
            blksize: status.stx_blksize,
            flags: 0,
        };
        Ok((attr, makedev(status.stx_dev_major, status.stx_dev_minor), status.stx_mnt_id))
    }

    /// Gives the file a name in a directory, whose descriptor is `directory`.
    pub fn link(&self, own_fds: &File, directory: &str, name: &CStr) -> io::Result<()> {
        let path = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = retry_interrupted(|| openat(own_fds, directory, path, Mode::empty()))?;
        Ok(linkat(own_fds, self.fd_name(), directory, name, AtFlags::SYMLINK_FOLLOW)?)
    }

    pub fn set_attributes(&self, attr: SetattrIn, valid: SetattrValid) -> io::Result<()> {
        if valid.contains(SetattrValid::MODE) {
            fchmod(&self.file, Mode::from_raw_mode(attr.mode & 0o7777))?;
        }
        if valid.intersects(SetattrValid::UID | SetattrValid::GID) {
            // This number means that the id stays.
            let given = |flag, id: u32| (valid.contains(flag) && id != u32::MAX).then_some(id);
            let uid = given(SetattrValid::UID, attr.uid.into_inner()).map(Uid::from_raw);
            let gid = given(SetattrValid::GID, attr.gid.into_inner()).map(Gid::from_raw);
            fchown(&self.file, uid, gid)?;
        }
        if valid.contains(SetattrValid::SIZE) {
            let killed = valid.contains(SetattrValid::KILL_SUIDGID);
            let _killed = killed.then(|| drop_effective_cap("FSETID")).transpose()?;
            retry_interrupted(|| ftruncate(&self.file, attr.size))?;
        }
        if valid.intersects(SetattrValid::ATIME | SetattrValid::MTIME) {
            let time = |given, now, seconds: u64, nanoseconds: u32| {
                let tv_nsec = match (valid.contains(now), valid.contains(given)) {
                    (true, _) => UTIME_NOW,
                    (false, true) => nanoseconds.into(),
                    (false, false) => UTIME_OMIT,
                };
                Timespec { tv_sec: seconds.cast_signed(), tv_nsec }
            };
            let times = Timestamps {
                last_access: time(SetattrValid::ATIME, SetattrValid::ATIME_NOW, attr.atime, attr.atimensec),
                last_modification: time(SetattrValid::MTIME, SetattrValid::MTIME_NOW, attr.mtime, attr.mtimensec),
            };
            futimens(&self.file, &times)?;
        }
        Ok(())
    }

    pub fn read<W: ZeroCopyWriter>(&self, mut to: W, size: u32, offset: u64) -> io::Result<usize> {
        to.read_from_file_at(&self.file, size as usize, offset, None)
    }

    /// Writes at `offset`, or at the end if the flags of the open file, as they are now, contain O_APPEND.
    pub fn write<R: ZeroCopyReader>(
        &self,
        mut from: R,
        size: u32,
        offset: u64,
        delayed: bool,
        kill_priv: bool,
        flags: u32,
    ) -> io::Result<usize> {
        let _killed = kill_priv.then(|| drop_effective_cap("FSETID")).transpose()?;
        let append = !delayed && flags & libc::O_APPEND as u32 != 0;
        from.write_to_file_at(&self.file, size as usize, offset, append.then_some(WritevFlags::RWF_APPEND))
    }

    pub fn sync(&self, only_data: bool) -> io::Result<()> {
        if only_data { self.file.sync_data() } else { self.file.sync_all() }
    }

    /// Reports to the node's file system that a descriptor of the guest was closed.
    pub fn flush(&self) -> io::Result<()> {
        Ok(nix::unistd::close(self.file.try_clone()?)?)
    }

    pub fn allocate(&self, mode: u32, offset: u64, length: u64) -> io::Result<()> {
        let mode = FallocateFlags::from_bits_retain(mode);
        Ok(retry_interrupted(|| fallocate(&self.file, mode, offset, length))?)
    }

    /// Finds data or a hole; the guest knows all other positions.
    pub fn seek(&self, offset: u64, whence: u32) -> io::Result<u64> {
        let to = match whence.cast_signed() {
            libc::SEEK_DATA => SeekFrom::Data(offset),
            libc::SEEK_HOLE => SeekFrom::Hole(offset),
            _ => return Err(io::Error::from_raw_os_error(libc::EINVAL)),
        };
        Ok(seek(&self.file, to)?)
    }

    pub fn set_xattr(&self, name: &CStr, value: &[u8], flags: u32, extra: SetxattrFlags) -> io::Result<()> {
        if extra.contains(SetxattrFlags::SETXATTR_ACL_KILL_SGID) && name.to_bytes() == POSIX_ACL_ACCESS {
            let (attr, ..) = self.status()?;
            fchmod(&self.file, Mode::from_raw_mode(attr.mode & 0o7777 & !libc::S_ISGID))?;
        }
        Ok(fsetxattr(&self.file, name, value, XattrFlags::from_bits_retain(flags))?)
    }

    pub fn xattr(&self, name: &CStr, size: u32) -> io::Result<GetxattrReply> {
        let (value, length) = read_sized(self.file.as_fd(), size, |file, buffer| fgetxattr(file, name, buffer))?;
        Ok(value.map_or(GetxattrReply::Count(length), GetxattrReply::Value))
    }

    pub fn xattr_names(&self, size: u32) -> io::Result<ListxattrReply> {
        let (names, length) = read_sized(self.file.as_fd(), size, |file, buffer| flistxattr(file, buffer))?;
        Ok(names.map_or(ListxattrReply::Count(length), ListxattrReply::Names))
    }

    pub fn remove_xattr(&self, name: &CStr) -> io::Result<()> {
        Ok(fremovexattr(&self.file, name)?)
    }
}

/// Reads what the guest has `size` bytes for, or, if that is 0, only its length.
fn read_sized(
    file: BorrowedFd<'_>,
    size: u32,
    read: impl Fn(BorrowedFd<'_>, &mut [u8]) -> rustix::io::Result<usize>,
) -> io::Result<(Option<Vec<u8>>, u32)> {
    let mut buffer = vec![0; MAX_XATTR_BYTES];
    let length = read(file, &mut buffer)?;
    if size != 0 && length > size as usize {
        return Err(io::Error::from_raw_os_error(libc::ERANGE));
    }
    buffer.truncate(length);
    Ok(((size != 0).then_some(buffer), u32::try_from(length).unwrap_or(u32::MAX)))
}
