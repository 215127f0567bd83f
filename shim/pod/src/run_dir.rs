//! Creates and removes the run directory of a pod. It is a tmpfs of its own: the pod process writes there, may be hostile, and must not
//! fill the node's `/run`.

use nacelle_base::files::{FileError, at, remove_tree_if_there};
use nacelle_base::jailed::{JailedDir, JailedFile};
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The socket of the pod process's gRPC service, in [`jail_dir`]; mode 0600.
pub const SOCKET_FILE: JailedFile = JailedFile::new("pod.sock");

/// The socket of the streams, in [`jail_dir`]; mode 0600.
pub const STREAM_SOCKET_FILE: JailedFile = JailedFile::new("stream.sock");

/// The maximum size in bytes of a run directory: the records of pod process and daemon, `pod.log`, and 1 MiB of console output.
pub const RUN_BYTES: u64 = 32 << 20;

/// The maximum number of files in a run directory.
const RUN_FILES: u64 = 16_384;

/// Returns the part of a pod's run directory that the pod process writes, the only part that it sees in its jail. The rest
/// of the run directory belongs to the daemon, which reads this part through [`jailed`] only.
pub fn jail_dir(dir: &Path) -> PathBuf {
    dir.join("jail")
}

/// Returns the same directory for the daemon: everything in it may be hostile.
pub fn jailed(dir: &Path) -> JailedDir {
    JailedDir::new(jail_dir(dir))
}

/// Creates that directory with mode 0700 in an existing run directory; succeeds if it exists.
pub fn create_jail(dir: &Path) -> Result<(), FileError> {
    let jail = jail_dir(dir);
    DirBuilder::new().mode(0o700).recursive(true).create(&jail).map_err(at("create", &jail))
}

/// Creates a run directory with mode 0700, which is a file system of at most `bytes`, with the part of the pod process in it. Fails if it
/// exists.
pub fn create(dir: &Path, bytes: u64) -> Result<(), FileError> {
    DirBuilder::new().mode(0o700).create(dir).map_err(at("create", dir))?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let options = format!("mode=0700,size={bytes},nr_inodes={RUN_FILES}");
    mount(Some("nacelle"), dir, Some("tmpfs"), flags, Some(options.as_str()))
        .map_err(|errno| at("mount a file system on", dir)(errno.into()))?;
    create_jail(dir)
}

/// Removes a run directory; succeeds if it does not exist.
pub fn remove(dir: &Path) -> Result<(), FileError> {
    if is_mount_point(dir).map_err(at("stat", dir))? {
        let flags = MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW;
        match umount2(dir, flags) {
            // Another removal was faster.
            Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => {}
            Err(errno) => return Err(at("unmount", dir)(errno.into())),
        }
    }
    remove_tree_if_there(dir)
}

/// Returns whether another file system begins here.
pub(crate) fn is_mount_point(dir: &Path) -> io::Result<bool> {
    let device = |path: &Path| match path.symlink_metadata() {
        Ok(metadata) => Ok(Some(metadata.dev())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    };
    let Some(parent) = dir.parent() else { return Ok(false) };
    Ok(device(dir)?.is_some() && device(dir)? != device(parent)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::unistd::geteuid;
    use std::fs;

    #[test]
    fn a_process_fills_its_own_directory_only() {
        if !geteuid().is_root() {
            println!("skipped: only root mounts file systems");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let dir = directory.path().join("pod");
        create(&dir, 1 << 20).unwrap();
        assert_eq!(create(&dir, 1 << 20).unwrap_err().source.kind(), io::ErrorKind::AlreadyExists);
        // The directory is there and stays as it is.
        create_jail(&dir).unwrap();
        let file = jail_dir(&dir).join("large");
        let full = fs::write(&file, vec![7; 2 << 20]).unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::StorageFull);
        fs::remove_file(&file).unwrap();
        let names = (0..2 * RUN_FILES).map(|number| fs::write(jail_dir(&dir).join(number.to_string()), ""));
        let error = names.filter_map(Result::err).next().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        remove(&dir).unwrap();
        assert!(!dir.exists());
        remove(&dir).unwrap();
    }

    #[test]
    fn directories_without_a_file_system_of_their_own_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let dir = directory.path().join("pod");
        fs::create_dir(&dir).unwrap();
        remove(&dir).unwrap();
        fs::create_dir(&dir).unwrap();
        create_jail(&dir).unwrap();
        fs::write(jail_dir(&dir).join("file"), "").unwrap();
        remove(&dir).unwrap();
        assert!(!dir.exists());
    }
}
