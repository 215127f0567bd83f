//! Determines which volumes of the node are emptyDirs, and which of them are memory of the pod's VM instead of a share: those of
//! medium Memory and HugePages. docs/contributor/volumes.md has the rules. Reads the node's directories and mounts, and changes
//! nothing.

use super::error::LifecycleError;
use nacelle_base::ContainerId;
use nacelle_model::mount::{NodeVolume, Propagation};
use nacelle_proto::pod as proto;
use nix::sys::statfs::{FsType, HUGETLBFS_MAGIC, TMPFS_MAGIC, statfs};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// kubelet's directory of emptyDirs of all media.
const PLUGIN: &str = "kubernetes.io~empty-dir";
/// The directory of placeholder sources in mounts of volumes that are part of the VM; the agent replaces them by the volumes.
pub(super) const DIRECTORY: &str = "/run/nacelle/empty-dirs";
/// The largest number of directories of a volume that are searched: kubelet creates one for each `subPath`.
const MOST: usize = 4096;

/// Returns the memory volume for each of a container's volumes, by its index in the list; `None` for other volumes. The paths
/// must be free of symbolic links.
pub(super) fn plan(id: &ContainerId, volumes: &[NodeVolume]) -> Result<Vec<Option<proto::EmptyDir>>, LifecycleError> {
    let planned = volumes.iter().enumerate().map(|(number, volume)| {
        let Some((name, root, part)) = found(Path::new(&volume.host_path)) else { return Ok(None) };
        if volume.propagation != Propagation::Private {
            return Err(LifecycleError::OwnPropagation { path: volume.host_path.clone() });
        }
        let looked = |path: &Path| fs::metadata(path).ok();
        let (Some(whole), Some(seen), Ok(size)) = (looked(&root), looked(Path::new(&volume.host_path)), statfs(&root))
        else {
            return Ok(None);
        };
        let block = u64::try_from(size.block_size()).unwrap_or(0);
        Ok(Some(proto::EmptyDir {
            name: super::pushed::called("memory", &name, &root),
            path: root.display().to_string(),
            source: format!("{DIRECTORY}/{id}.{number}"),
            bytes: size.blocks().saturating_mul(block),
            // The block size of a hugetlbfs is its page size.
            page_bytes: if size.filesystem_type() == HUGETLBFS_MAGIC { block } else { 0 },
            mode: whole.mode() & 0o7777,
            uid: whole.uid(),
            gid: whole.gid(),
            occupied: occupied(&root),
            part_mode: seen.mode() & 0o7777,
            part_uid: seen.uid(),
            part_gid: seen.gid(),
            part,
        }))
    });
    planned.collect()
}

/// Returns the name of a mounted volume, its directory, and the mounted part of it (empty for all of it).
fn found(path: &Path) -> Option<(String, PathBuf, String)> {
    let (name, root) = named(path)?;
    kind(&root).filter(|kind| [TMPFS_MAGIC, HUGETLBFS_MAGIC].contains(kind))?;
    if path == root { Some((name, root, String::new())) } else { part(path, &root).map(|part| (name, root, part)) }
}

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

/// Returns which directory of a volume is mounted at this path, according to the kernel's mount table.
fn part(path: &Path, root: &Path) -> Option<String> {
    let wanted = fs::metadata(path).ok().filter(|found| found.is_dir())?.dev();
    (fs::metadata(root).ok()?.dev() == wanted).then_some(())?;
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    // The last mount covers the earlier ones.
    let directory = mounts.lines().rev().find_map(|line| {
        let mut words = line.split(' ').skip(3);
        let (directory, at) = (words.next()?, words.next()?);
        (at == path.to_str()?).then(|| directory.to_owned())
    })?;
    // The kernel escapes spaces and the like as octal numbers. Such names are rejected: a container could choose the escaped
    // name.
    (!directory.contains('\\')).then(|| directory.trim_start_matches('/').to_owned())
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
    fn a_directory_that_is_no_mount_is_shared() {
        let node = tempfile::tempdir().unwrap();
        let directory = node.path().join("pods/uid/volumes").join(PLUGIN).join("scratch");
        fs::create_dir_all(&directory).unwrap();
        assert_eq!(found(&directory), None);
        assert_eq!(found(&node.path().join("pods/uid/volume-subpaths/scratch/c/0")), None);
        assert_eq!(found(Path::new("/dev/shm")), None);
        assert_eq!(kind(Path::new("/proc")), Some(nix::sys::statfs::PROC_SUPER_MAGIC));
    }

    #[test]
    fn directories_alone_are_nothing() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir_all(directory.path().join("a/b")).unwrap();
        assert!(!occupied(directory.path()));
        fs::write(directory.path().join("a/b/c"), "").unwrap();
        assert!(occupied(directory.path()) && occupied(&directory.path().join("none")));
    }
}
