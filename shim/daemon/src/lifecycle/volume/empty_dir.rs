//! Recognizes emptyDirs by kubelet's naming scheme of directories, and looks into them.

use nix::sys::statfs::{FsType, statfs};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// kubelet's directory of emptyDirs of all media.
pub(super) const PLUGIN: &str = "kubernetes.io~empty-dir";

/// The directory of placeholder sources in mounts of volumes that are part of the VM; the agent replaces them by the volumes.
pub(super) const DIRECTORY: &str = "/run/nacelle/empty-dirs";

/// The largest number of directories of a volume that are searched: kubelet creates one for each `subPath`.
pub(super) const MOST: usize = 4096;

/// Returns name and directory of the emptyDir at this path, or around it, by kubelet's naming scheme.
pub(super) fn named(path: &Path) -> Option<(String, PathBuf)> {
    let names: Vec<&str> = path.iter().map(|name| name.to_str().unwrap_or_default()).collect();
    match names.as_slice() {
        [.., "pods", _pod, "volumes", PLUGIN, name] => Some(((*name).to_owned(), path.to_owned())),
        [.., "pods", _pod, "volume-subpaths", name, _container, _number] => {
            let pod = path.ancestors().nth(4).unwrap_or(path);
            Some(((*name).to_owned(), pod.join("volumes").join(PLUGIN).join(name)))
        }
        _ => None,
    }
}

/// Returns the type of the file system that is mounted at a directory, or `None` if the directory is not a mount point.
pub(super) fn kind(directory: &Path) -> Option<FsType> {
    let device = |path: &Path| fs::symlink_metadata(path).ok().filter(fs::Metadata::is_dir).map(|found| found.dev());
    let mounted = device(directory)? != device(directory.parent()?)?;
    let kind = statfs(directory).ok()?.filesystem_type();
    mounted.then_some(kind)
}

/// Returns whether the node's copy contains anything but directories.
pub(super) fn occupied(root: &Path) -> bool {
    let (mut directories, mut looked) = (vec![root.to_owned()], 0);
    while let Some(directory) = directories.pop() {
        looked += 1;
        let Ok(entries) = fs::read_dir(&directory) else { return true };
        for entry in entries {
            match entry.and_then(|entry| Ok((entry.file_type()?.is_dir(), entry.path()))) {
                Ok((true, path)) if looked + directories.len() < MOST => directories.push(path),
                _ => return true,
            }
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_alone_are_nothing() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir_all(directory.path().join("a/b")).unwrap();
        assert!(!occupied(directory.path()));
        fs::write(directory.path().join("a/b/c"), "").unwrap();
        assert!(occupied(directory.path()) && occupied(&directory.path().join("none")));
    }
}
