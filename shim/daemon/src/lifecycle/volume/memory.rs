//! Determines which volumes of the node are emptyDirs, and which of them are memory of the pod's VM instead of a share: those of
//! medium Memory and HugePages. docs/contributor/volumes.md has the rules. Reads the node's directories and mounts, and changes
//! nothing.

use super::empty_dir::{DIRECTORY, kind, named, occupied};
use super::host_path::HostPath;
use crate::lifecycle::context::error::LifecycleError;
use nacelle_base::ContainerId;
use nacelle_model::mount::{NodeVolume, Propagation};
use nacelle_proto::pod as proto;
use nix::sys::statfs::{HUGETLBFS_MAGIC, TMPFS_MAGIC, statfs};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Returns the memory volume that a volume of the node becomes, the `index`th of the container; `None` for other volumes.
pub(super) fn plan(
    id: &ContainerId,
    index: usize,
    volume: &NodeVolume,
    host: &HostPath,
) -> Result<Option<proto::EmptyDir>, LifecycleError> {
    let Some((name, root, part)) = found(host.as_path()) else { return Ok(None) };
    if volume.propagation != Propagation::Private {
        return Err(LifecycleError::OwnPropagation { path: host.as_str().to_owned() });
    }
    let (Ok(whole), Ok(seen), Ok(size)) = (fs::metadata(&root), fs::metadata(host.as_path()), statfs(&root)) else {
        return Ok(None);
    };
    let block = u64::try_from(size.block_size()).unwrap_or(0);
    Ok(Some(proto::EmptyDir {
        name: super::copied_in::called(super::saved::IN_MEMORY, &name, &root),
        path: root.display().to_string(),
        source: format!("{DIRECTORY}/{id}.{index}"),
        bytes: size.blocks().saturating_mul(block),
        // The block size of a hugetlbfs is its page size.
        page_bytes: if size.filesystem_type() == HUGETLBFS_MAGIC { block } else { 0 },
        mode: whole.mode() & 0o7777,
        uid: whole.uid(),
        gid: whole.gid(),
        has_node_files: occupied(&root),
        sub_path_mode: seen.mode() & 0o7777,
        sub_path_uid: seen.uid(),
        sub_path_gid: seen.gid(),
        sub_path: part,
    }))
}

/// Returns the name of a mounted volume, its directory, and the mounted part of it (empty for all of it).
fn found(path: &Path) -> Option<(String, PathBuf, String)> {
    let (name, root) = named(path)?;
    kind(&root).filter(|kind| [TMPFS_MAGIC, HUGETLBFS_MAGIC].contains(kind))?;
    if path == root { Some((name, root, String::new())) } else { part(path, &root).map(|part| (name, root, part)) }
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

#[cfg(test)]
mod tests {
    use super::super::empty_dir::PLUGIN;
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
}
