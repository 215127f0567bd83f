//! Owns: which volumes of the node are emptyDirs, and which are memory of the pod's machine instead of a share: those of medium
//! Memory and HugePages. docs/contributor/volumes.md has the rules. Looks at the node's folders and mounts, changes nothing.

use super::error::LifecycleError;
use nacelle_base::ContainerId;
use nacelle_model::mount::{NodeVolume, Propagation};
use nacelle_proto::pod as proto;
use nix::sys::statfs::{FsType, HUGETLBFS_MAGIC, TMPFS_MAGIC, statfs};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// kubelet's folder of such volumes, and of those on its disk.
const PLUGIN: &str = "kubernetes.io~empty-dir";
/// Where the agent is told that a volume of the machine's own comes from; it knows better.
pub(super) const FOLDER: &str = "/run/nacelle/empty-dirs";
/// Folders of a volume on the node that are looked through: kubelet makes one for each `subPath`.
const MOST: usize = 4096;

/// What a machine makes of a container's volumes, by their place in the list; none for those that are none of its memory. The
/// paths are without links.
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
            source: format!("{FOLDER}/{id}.{number}"),
            bytes: size.blocks().saturating_mul(block),
            // A hugetlbfs has pages for blocks.
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

/// The name of the volume, its folder, and which part of it is meant (all of it: empty).
fn found(path: &Path) -> Option<(String, PathBuf, String)> {
    let (name, root) = named(path)?;
    kind(&root).filter(|kind| [TMPFS_MAGIC, HUGETLBFS_MAGIC].contains(kind))?;
    if path == root { Some((name, root, String::new())) } else { part(path, &root).map(|part| (name, root, part)) }
}

/// The emptyDir that this is, or is a part of, by kubelet's names: its name, and its folder.
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

/// The kind of file system that is mounted at a folder, if one is.
pub(super) fn kind(folder: &Path) -> Option<FsType> {
    let device = |path: &Path| fs::symlink_metadata(path).ok().filter(fs::Metadata::is_dir).map(|found| found.dev());
    let mounted = device(folder)? != device(folder.parent()?)?;
    let kind = statfs(folder).ok()?.filesystem_type();
    mounted.then_some(kind)
}

/// Which folder of a volume is mounted at this path, as the node's kernel says.
fn part(path: &Path, root: &Path) -> Option<String> {
    let wanted = fs::metadata(path).ok().filter(|found| found.is_dir())?.dev();
    (fs::metadata(root).ok()?.dev() == wanted).then_some(())?;
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    // The last one lies on top.
    let folder = mounts.lines().rev().find_map(|line| {
        let mut words = line.split(' ').skip(3);
        let (folder, at) = (words.next()?, words.next()?);
        (at == path.to_str()?).then(|| folder.to_owned())
    })?;
    // A name with a space or the like is written with digits here, and no name that a container should be able to guess.
    (!folder.contains('\\')).then(|| folder.trim_start_matches('/').to_owned())
}

/// Whether the node's copy has anything but folders.
pub(super) fn occupied(root: &Path) -> bool {
    let (mut folders, mut looked) = (vec![root.to_owned()], 0);
    while let Some(folder) = folders.pop() {
        looked += 1;
        let Ok(entries) = fs::read_dir(&folder) else { return true };
        for entry in entries {
            match entry.and_then(|entry| Ok((entry.file_type()?.is_dir(), entry.path()))) {
                Ok((true, path)) if looked + folders.len() < MOST => folders.push(path),
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
    fn a_folder_that_is_no_mount_is_shared() {
        let node = tempfile::tempdir().unwrap();
        let folder = node.path().join("pods/uid/volumes").join(PLUGIN).join("scratch");
        fs::create_dir_all(&folder).unwrap();
        assert_eq!(found(&folder), None);
        assert_eq!(found(&node.path().join("pods/uid/volume-subpaths/scratch/c/0")), None);
        assert_eq!(found(Path::new("/dev/shm")), None);
        assert_eq!(kind(Path::new("/proc")), Some(nix::sys::statfs::PROC_SUPER_MAGIC));
    }

    #[test]
    fn folders_alone_are_nothing() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("a/b")).unwrap();
        assert!(!occupied(folder.path()));
        fs::write(folder.path().join("a/b/c"), "").unwrap();
        assert!(occupied(folder.path()) && occupied(&folder.path().join("none")));
    }
}
