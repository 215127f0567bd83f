//! Provides the directory of templates: a file system of its own in memory, so that templates cannot fill the node's `/run`.

use crate::run_dir::is_mount_point;
use nacelle_base::files::{FileError, at};
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

/// The maximum number of files: three for each template.
const MAX_FILES: u64 = 4096;

/// Creates the directory with mode 0700 as a file system of at most `bytes`, or changes the size of an existing one. Its large files have
/// huge pages where the node has them, so that a clone maps those of which it only reads at once.
pub fn create_directory(directory: &Path, bytes: u64) -> Result<(), FileError> {
    DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(at("create", directory))?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let options = format!("mode=0700,size={bytes},nr_inodes={MAX_FILES}");
    let is_there = is_mount_point(directory).map_err(at("stat", directory))?;
    let flags = if is_there { flags | MsFlags::MS_REMOUNT } else { flags };
    let mounted = |options: &str| mount(Some("nacelle"), directory, Some("tmpfs"), flags, Some(options));
    let mounted = match mounted(&format!("{options},huge=within_size")) {
        // The node's kernel has no huge pages for such files.
        Err(Errno::EINVAL) => mounted(&options),
        mounted => mounted,
    };
    mounted.map_err(|errno| at("mount a file system on", directory)(errno.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::mount::umount;
    use nix::unistd::geteuid;
    use std::fs;
    use std::io;

    #[test]
    fn the_directory_of_templates_is_limited() {
        if !geteuid().is_root() {
            println!("skipped: only root mounts file systems");
            return;
        }
        let parent = tempfile::tempdir().unwrap();
        let directory = parent.path().join("templates");
        create_directory(&directory, 4 << 20).unwrap();
        fs::write(directory.join("kept"), "text").unwrap();
        let large = vec![7; 12 << 20];
        let error = fs::write(directory.join("large"), &large).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        // The next daemon has another limit.
        create_directory(&directory, 32 << 20).unwrap();
        assert_eq!(fs::read_to_string(directory.join("kept")).unwrap(), "text");
        fs::write(directory.join("large"), &large).unwrap();
        umount(&directory).unwrap();
    }
}
