//! Reads the mount table of this process: through which mounts a file can be reached, with which flags, and whether closing
//! a file has any effect on the node. A network file system writes back data and returns errors when a file is closed
//! (`flush` of Linux's `file_operations`); one on the node's own disk or memory does nothing, so that the guest need not
//! send a request. The table is read again only after the kernel has reported a change of it.

use nacelle_base::guest_warn;
use nacelle_base::retry::{self, retry_interrupted};
use nix::fcntl::{OFlag, openat};
use nix::poll::{PollFd, PollFlags};
use nix::sys::stat::Mode;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The file systems of Linux 6.12 that do nothing when a file is closed.
const NO_FLUSH_FILESYSTEMS: [&str; 6] = ["ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs"];
/// The maximum size of the table in bytes: some 64k mounts.
const MAX_TABLE: u64 = 16 << 20;

/// The identifier of a mount, as statx(2) and the mount table contain it.
pub(crate) type MountId = u64;

/// The flags of a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MountFlags {
    pub writable: bool,
    /// Reading a file updates its access time.
    pub access_times: bool,
    /// The mount is idmapped.
    pub mapped: bool,
}

/// The mounts that this process sees below its root, at the time when the table was read.
#[derive(Debug, Default)]
pub(crate) struct MountTable {
    /// A number that no other table of this process has.
    pub generation: u64,
    mounts: HashMap<MountId, MountFlags>,
    /// The mounts that have another mount below them, at any depth of directories.
    parents: Vec<MountId>,
    /// Closing a file does nothing on any mount.
    flush_needless: bool,
}

impl MountTable {
    /// Returns the flags of a mount, or `None` if it is not mounted any more.
    pub fn flags(&self, mount: MountId) -> Option<MountFlags> {
        self.mounts.get(&mount).copied()
    }

    /// Returns whether something is mounted below this mount.
    pub fn is_parent(&self, mount: MountId) -> bool {
        self.parents.binary_search(&mount).is_ok()
    }

    /// Returns a table of these mounts.
    #[cfg(test)]
    pub fn from_mounts(mounts: &[(MountId, MountFlags)]) -> MountTable {
        MountTable { mounts: mounts.iter().copied().collect(), ..MountTable::default() }
    }

    fn parse(table: &[u8], generation: u64) -> MountTable {
        let mut result = MountTable { generation, flush_needless: true, ..MountTable::default() };
        for line in table.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            // The optional fields of proc_pid_mountinfo(5) end with a dash; the type of the file system follows.
            let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
            let number = |index: usize| std::str::from_utf8(fields.get(index)?).ok()?.parse::<MountId>().ok();
            let fs_type = fields.iter().skip(6).skip_while(|field| **field != b"-").nth(1);
            result.flush_needless &=
                fs_type.is_some_and(|fs_type| NO_FLUSH_FILESYSTEMS.iter().any(|known| known.as_bytes() == *fs_type));
            let (Some(mount), Some(parent), Some(options)) = (number(0), number(1), fields.get(5)) else { continue };
            let has = |option: &[u8]| options.split(|byte| *byte == b',').any(|one| one == option);
            let flags = MountFlags { writable: !has(b"ro"), access_times: !has(b"noatime"), mapped: has(b"idmapped") };
            result.mounts.insert(mount, flags);
            result.parents.push(parent);
        }
        result.flush_needless &= !result.mounts.is_empty();
        result.parents.sort_unstable();
        result.parents.dedup();
        result
    }
}

/// The mount table, which is read again after changes.
pub(crate) struct Mounts {
    /// `mountinfo`, which signals changes to poll(2).
    file: File,
    table: Mutex<CachedTable>,
}

#[derive(Default)]
struct CachedTable {
    table: Option<Arc<MountTable>>,
    /// A change was signalled and could not be read; the kernel does not signal it again.
    change_missed: bool,
    /// The table was compared with the node's for the present request.
    is_current: bool,
}

impl Mounts {
    /// Opens the mount table of this process with its present root. `own_proc` is this process's `/proc/self`, which is closed.
    pub fn new(own_proc: OwnedFd) -> io::Result<Mounts> {
        let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
        let file = retry_interrupted(|| openat(&own_proc, "mountinfo", flags, Mode::empty()))?.into();
        Ok(Mounts { file, table: Mutex::default() })
    }

    /// Makes the next [`table`](Mounts::table) look for changes. Must be called before each request of the guest, and when a request has
    /// found a mount that is not in the table.
    pub fn expire(&self) {
        self.lock().is_current = false;
    }

    /// Returns the table as it was when it was first needed after [`expire`](Mounts::expire). If it cannot be read, returns the last one,
    /// or an empty one.
    pub fn table(&self) -> Arc<MountTable> {
        let mut cached = self.lock();
        if let Some(table) = cached.table.as_ref().filter(|_| cached.is_current) {
            return table.clone();
        }
        cached.is_current = true;
        let mut changed = [PollFd::new(self.file.as_fd(), PollFlags::POLLPRI)];
        let unchanged = matches!(retry::poll(&mut changed, Some(Instant::now())), Ok(0));
        if let Some(table) = cached.table.as_ref().filter(|_| unchanged && !cached.change_missed) {
            return table.clone();
        }
        let generation = cached.table.as_ref().map_or(1, |table| table.generation + 1);
        match self.read() {
            Ok(read) => {
                cached.change_missed = false;
                cached.table.insert(Arc::new(MountTable::parse(&read, generation))).clone()
            }
            Err(error) => {
                guest_warn!("cannot read the mount table: {error}");
                cached.change_missed = true;
                cached.table.clone().unwrap_or_default()
            }
        }
    }

    /// Returns whether closing a file does nothing on any mount.
    pub fn is_flush_needless(&self) -> bool {
        self.table().flush_needless
    }

    fn lock(&self) -> MutexGuard<'_, CachedTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read(&self) -> io::Result<Vec<u8>> {
        let mut table = Vec::new();
        (&self.file).rewind()?;
        let length = (&self.file).take(MAX_TABLE).read_to_end(&mut table)? as u64;
        if length < MAX_TABLE { Ok(table) } else { Err(io::ErrorKind::FileTooLarge.into()) }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    const ROOT: &str = "30 1 0:26 / / ro,nosuid - tmpfs nacelle rw,size=1024k\n";
    const DISK: &str = "31 30 254:1 /data /c/0 rw,relatime master:1 shared:2 - ext4 /dev/vda1 ro\n";
    const BELOW: &str = "32 31 0:55 / /c/0/x ro,noatime,idmapped - nfs4 server:/tmpfs rw\n";

    fn parse(lines: &[&str]) -> MountTable {
        MountTable::parse(lines.concat().as_bytes(), 1)
    }

    #[test]
    fn flushes_are_needed_if_one_mount_has_another_type() {
        let named = "32 30 0:56 / /c/2\\040-\\040ext4 rw - fuse.ext4 ext4 rw\n";
        let is_flush_needless = |lines: &[&str]| parse(lines).flush_needless;
        assert!(is_flush_needless(&[ROOT]));
        assert!(is_flush_needless(&[ROOT, DISK]));
        assert!(!is_flush_needless(&[ROOT, DISK, BELOW]));
        assert!(!is_flush_needless(&[named, ROOT]));
        assert!(!is_flush_needless(&[]));
        assert!(!is_flush_needless(&[ROOT, "31 30 254:1\n"]));
        assert!(!is_flush_needless(&[ROOT, "31 30 254:1 / / rw shared:2 -\n"]));
    }

    #[test]
    fn flags_are_those_of_the_mount_and_not_of_its_file_system() {
        let table = parse(&[ROOT, DISK, BELOW, "no mount\n"]);
        let flags = |writable, access_times, mapped| Some(MountFlags { writable, access_times, mapped });
        assert_eq!(table.flags(30), flags(false, true, false));
        assert_eq!(table.flags(31), flags(true, true, false));
        assert_eq!(table.flags(32), flags(false, false, true));
        assert_eq!(table.flags(1), None);
        assert!(table.is_parent(30) && table.is_parent(31) && !table.is_parent(32));
    }
}
