//! Removes files and directory trees. A jailed process or a container may have filled a tree, so its removal follows no
//! symbolic link and uses bounded stack and descriptors.

use crate::file_error::{FileError, at};
use crate::retry::retry_interrupted;
use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags, openat, renameat, unlinkat};
use rustix::io::Errno;
use std::ffi::CStr;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

/// Removes a file; succeeds if it does not exist.
pub fn remove_if_there(path: &Path) -> Result<(), FileError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.map_err(at("remove", path)),
    }
}

/// Removes a directory with its contents; succeeds if it does not exist. Follows no symbolic link. Neither the stack nor
/// the number of open files grows with the depth of the tree, which a jailed process or a container may have created.
pub fn remove_tree_if_there(path: &Path) -> Result<(), FileError> {
    remove_tree(path).map_err(at("remove", path))
}

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

fn remove_tree(path: &Path) -> io::Result<()> {
    let top = match retry_interrupted(|| openat(CWD, path, DIRECTORY, Mode::empty())) {
        Err(Errno::NOENT) => return Ok(()),
        // The name belongs to something that is not a directory, which is removed.
        Err(Errno::NOTDIR | Errno::LOOP) => return Ok(unlinkat(CWD, path, AtFlags::empty())?),
        other => other?,
    };
    let mut moved = 0_u64;
    // Deeper directories are moved up, so that everything is removed from one directory, which is read until it is empty.
    while remove_entries(&top, |name| {
        let inner = retry_interrupted(|| openat(&top, name, DIRECTORY, Mode::empty()))?;
        remove_entries(&inner, |name| {
            loop {
                moved += 1;
                match renameat(&inner, name, &top, format!(".{moved}")) {
                    // Another entry has this name; rename would have replaced an empty directory.
                    Err(Errno::NOTEMPTY | Errno::EXIST | Errno::NOTDIR) => {}
                    other => return Ok(other?),
                }
            }
        })?;
        match unlinkat(&top, name, AtFlags::REMOVEDIR) {
            Err(Errno::NOENT | Errno::NOTEMPTY) => Ok(()),
            other => Ok(other?),
        }
    })? {}
    match unlinkat(CWD, path, AtFlags::REMOVEDIR) {
        Err(Errno::NOENT) => Ok(()),
        other => Ok(other?),
    }
}

/// Removes the entries that one call can remove, and calls `not_empty` for directories that are not empty. Returns false if
/// the directory was empty.
fn remove_entries(dir: &OwnedFd, mut not_empty: impl FnMut(&CStr) -> io::Result<()>) -> io::Result<bool> {
    let mut any = false;
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        any = true;
        match unlinkat(dir, name, AtFlags::empty()) {
            Err(Errno::ISDIR) => {}
            Err(Errno::NOENT) => continue,
            other => {
                other?;
                continue;
            }
        }
        match unlinkat(dir, name, AtFlags::REMOVEDIR) {
            Err(Errno::NOTEMPTY | Errno::EXIST) => not_empty(name)?,
            Err(Errno::NOENT) => {}
            other => other?,
        }
    }
    Ok(any)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removing_twice_is_fine() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        fs::write(&path, "").unwrap();
        remove_if_there(&path).unwrap();
        remove_if_there(&path).unwrap();
        remove_tree_if_there(&directory.path().join("none")).unwrap();
    }

    #[test]
    fn a_tree_of_any_depth_and_shape_is_removed_and_nothing_beyond_it() {
        let directory = tempfile::tempdir().unwrap();
        let (tree, kept) = (directory.path().join("tree"), directory.path().join("kept"));
        fs::create_dir(&tree).unwrap();
        fs::create_dir(&kept).unwrap();
        fs::write(kept.join("file"), "").unwrap();
        std::os::unix::fs::symlink(&kept, tree.join("link")).unwrap();
        // The names that the removal itself uses for moved directories.
        for name in [".1/full", ".2", ".4/a/b"] {
            fs::create_dir_all(tree.join(name)).unwrap();
        }
        fs::write(tree.join(".3"), "").unwrap();
        // The tree is deeper than a path can be long, than files can be open, and than a recursion on a stack of 2 MiB allows.
        let mut here = openat(CWD, &tree, DIRECTORY, Mode::empty()).unwrap();
        for _ in 0..20_000 {
            rustix::fs::mkdirat(&here, "d", Mode::from_raw_mode(0o700)).unwrap();
            here = openat(&here, "d", DIRECTORY, Mode::empty()).unwrap();
            rustix::fs::symlinkat("/", &here, "root").unwrap();
        }
        drop(here);
        remove_tree_if_there(&tree).unwrap();
        assert!(fs::symlink_metadata(&tree).is_err() && kept.join("file").exists());
        // If the path is a symbolic link, the link is removed and its target stays.
        std::os::unix::fs::symlink(&kept, &tree).unwrap();
        remove_tree_if_there(&tree).unwrap();
        assert!(fs::symlink_metadata(&tree).is_err() && kept.join("file").exists());
    }
}
