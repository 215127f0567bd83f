//! Owns: whether the end of a file has anything to do on the node. A file system that keeps its files on another machine writes
//! back what is left, and tells of errors, when a file is closed (`flush` of Linux's `file_operations`); one on the node's own
//! disk or memory does nothing, and a guest need not ask for it.

use nix::fcntl::{OFlag, openat};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::Mode;
use std::cell::Cell;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::AsFd;

/// Those of Linux 6.12 that are known to do nothing then.
const NOTHING_TO_DO: [&str; 6] = ["ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs"];
/// A table that is longer is not looked at: some 64k mounts.
const MAX_TABLE: u64 = 16 << 20;

/// The mounts that this process sees from its root.
pub(crate) struct Ends {
    /// `mountinfo` (proc_pid_mountinfo(5)), which tells those who poll it of changes.
    mounts: File,
    /// None: not looked at since a change.
    spared: Cell<Option<bool>>,
}

impl Ends {
    /// From now on, and from this root. `own_fds` is this process's `/proc/self/fd`.
    pub fn new(own_fds: impl AsFd) -> io::Result<Ends> {
        let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
        let mounts = openat(own_fds, "../mountinfo", flags, Mode::empty())?;
        Ok(Ends { mounts: mounts.into(), spared: Cell::new(None) })
    }

    /// Whether no file of any mount has anything to do at its end.
    pub fn are_nothing(&self) -> bool {
        let mut changed = [PollFd::new(self.mounts.as_fd(), PollFlags::POLLPRI)];
        if poll(&mut changed, PollTimeout::ZERO) != Ok(0) {
            self.spared.set(None);
        }
        self.spared.get().unwrap_or_else(|| {
            let spared = self.look().unwrap_or(false);
            self.spared.set(Some(spared));
            spared
        })
    }

    fn look(&self) -> io::Result<bool> {
        let mut table = Vec::new();
        (&self.mounts).rewind()?;
        let length = (&self.mounts).take(MAX_TABLE).read_to_end(&mut table)? as u64;
        Ok(length < MAX_TABLE && all_spared(&table))
    }
}

/// Whether all mounts of a table are of a kind that has nothing to do.
fn all_spared(table: &[u8]) -> bool {
    let mut lines = table.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).peekable();
    lines.peek().is_some()
        && lines.all(|line| {
            // Fields that may be missing end with a dash; the kind comes next.
            let mut fields = line.split(|byte| *byte == b' ').skip(6).skip_while(|field| *field != b"-").skip(1);
            fields.next().is_some_and(|kind| NOTHING_TO_DO.iter().any(|known| known.as_bytes() == kind))
        })
}

#[cfg(test)]
mod tests {
    use super::all_spared;

    #[test]
    fn one_mount_of_another_kind_is_enough() {
        let root = "30 1 0:26 / / ro,nosuid - tmpfs nacelle rw,size=1024k\n";
        let disk = "31 30 254:1 /data /c/0 rw,relatime master:1 shared:2 - ext4 /dev/vda1 rw\n";
        let far = "32 30 0:55 / /c/1 rw - nfs4 server:/tmpfs rw\n";
        let named = "33 30 0:56 / /c/2\\040-\\040ext4 rw - fuse.ext4 ext4 rw\n";
        let spared = |lines: &[&str]| all_spared(lines.concat().as_bytes());
        assert!(spared(&[root]));
        assert!(spared(&[root, disk]));
        assert!(!spared(&[root, disk, far]));
        assert!(!spared(&[named, root]));
        assert!(!spared(&[]));
        assert!(!spared(&[root, "31 30 254:1\n"]));
        assert!(!spared(&[root, "31 30 254:1 / / rw shared:2 -\n"]));
    }
}
