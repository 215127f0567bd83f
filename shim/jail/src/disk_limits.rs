//! Limits what a cgroup reads from and writes to a disk of the node, by cgroup v2's `io.max`. The functions block.

use crate::cgroup::{CGROUP_ROOT, directories, enable_controllers};
use nacelle_base::disk_limits::DiskLimits;
use nacelle_base::{Classify, FailureKind};
use nix::sys::stat::{major, minor};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The directory with a link for each block device, named by its number.
const BLOCK_DEVICES: &str = "/sys/dev/block";

/// The file of a cgroup that limits disks.
const LIMIT_FILE: &str = "io.max";

/// Reasons that a disk is not limited.
#[derive(Debug, thiserror::Error)]
pub enum DiskLimitError {
    /// The disk of a file system cannot be found.
    #[error("cannot find the disk of {}", path.display())]
    Find {
        /// A path on the file system.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file system is on no disk, or on several.
    #[error(
        "the file system of {} is not on one block device (device {major}:{minor}): disk_limits need ext4 or XFS there",
        path.display()
    )]
    NotOneDisk {
        /// A path on the file system.
        path: PathBuf,
        /// The major number of the file system's device.
        major: u64,
        /// The minor number.
        minor: u64,
    },
    /// The cgroup cannot be created.
    #[error("cannot create the cgroup {}", path.display())]
    CreateGroup {
        /// Its directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The node limits no disks.
    #[error("{} does not exist: disk_limits need cgroup v2 with the controller \"io\"", file.display())]
    NoLimitFile {
        /// The file that would set the limit.
        file: PathBuf,
    },
    /// The node has no cgroup v2, or not its controller.
    #[error("the controller \"io\" is not in {}: disk_limits need cgroup v2 with it", file.display())]
    NoController {
        /// The file that would name it.
        file: PathBuf,
    },
    /// The limit was refused.
    #[error("cannot limit the disk {disk}: {} refused \"{line}\"", file.display())]
    Refused {
        /// The number of the disk.
        disk: String,
        /// The file of the limit.
        file: PathBuf,
        /// What was written.
        line: String,
        /// The cause.
        source: io::Error,
    },
}

/// Returns the number ("8:0") of the disk on which a file system is, given a path on it. The disk of a partition is the whole disk,
/// because only whole disks can be limited.
fn find_disk(path: &Path) -> Result<String, DiskLimitError> {
    let failed = |source| DiskLimitError::Find { path: path.to_owned(), source };
    let device = fs::metadata(path).map_err(failed)?.dev();
    let (major, minor) = (major(device), minor(device));
    whole_disk(Path::new(BLOCK_DEVICES), &format!("{major}:{minor}"))
        .map_err(failed)?
        .ok_or_else(|| DiskLimitError::NotOneDisk { path: path.to_owned(), major, minor })
}

impl Classify for DiskLimitError {
    fn kind(&self) -> FailureKind {
        match self {
            DiskLimitError::Find { .. } | DiskLimitError::CreateGroup { .. } | DiskLimitError::Refused { .. } => {
                FailureKind::Internal
            }
            DiskLimitError::NotOneDisk { .. }
            | DiskLimitError::NoLimitFile { .. }
            | DiskLimitError::NoController { .. } => FailureKind::Conflict,
        }
    }
}

/// Checks whether this node can limit the disk on which the file system of `path` is. Returns its number.
pub fn check_disk_limits(path: &Path) -> Result<String, DiskLimitError> {
    let controllers = Path::new(CGROUP_ROOT).join("cgroup.controllers");
    let text = fs::read_to_string(&controllers).unwrap_or_default();
    match text.split_whitespace().any(|controller| controller == "io") {
        true => find_disk(path),
        false => Err(DiskLimitError::NoController { file: controllers }),
    }
}

/// Returns the number of the whole disk of a block device, or `None` if there is no such device.
fn whole_disk(devices: &Path, device: &str) -> io::Result<Option<String>> {
    let directory = match fs::canonicalize(devices.join(device)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        found => found?,
    };
    if !directory.join("partition").exists() {
        return Ok(Some(device.to_owned()));
    }
    let disk = directory.parent().unwrap_or(&directory).join("dev");
    Ok(Some(fs::read_to_string(disk)?.trim().to_owned()))
}

/// Limits what a cgroup and its children read from and write to the disk of the file system of `path`. Creates the cgroup if it is
/// missing. Limits that are `None` are removed.
pub fn limit_disk(group: &Path, path: &Path, limits: &DiskLimits) -> Result<(), DiskLimitError> {
    let disk = find_disk(path)?;
    // With cgroup v1 there are several, and none has the file. A path out of the hierarchy has none.
    let no_group = || DiskLimitError::NoLimitFile { file: group.join(LIMIT_FILE) };
    let directory = directories(group).into_iter().next().ok_or_else(no_group)?;
    fs::create_dir_all(&directory).map_err(|source| DiskLimitError::CreateGroup { path: directory.clone(), source })?;
    enable_controllers(group);
    let file = directory.join(LIMIT_FILE);
    if !file.exists() {
        return Err(DiskLimitError::NoLimitFile { file });
    }
    let line = format_limits(&disk, limits);
    fs::write(&file, &line).map_err(|source| DiskLimitError::Refused { disk, file, line, source })
}

/// Returns the line for `io.max` (cgroup-v2.rst, "IO Interface Files").
fn format_limits(disk: &str, limits: &DiskLimits) -> String {
    let number = |limit: Option<u64>| limit.map_or("max".to_owned(), |limit| limit.to_string());
    format!(
        "{disk} rbps={} wbps={} riops={} wiops={}",
        number(limits.read_bytes_per_second),
        number(limits.write_bytes_per_second),
        number(limits.reads_per_second),
        number(limits.writes_per_second)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_partition_is_limited_with_its_disk() {
        let root = tempfile::tempdir().unwrap();
        let (devices, disk) = (root.path().join("dev"), root.path().join("devices/vda"));
        fs::create_dir_all(disk.join("vda1")).unwrap();
        fs::create_dir(&devices).unwrap();
        fs::write(disk.join("dev"), "254:0\n").unwrap();
        fs::write(disk.join("vda1/partition"), "1\n").unwrap();
        symlink("../devices/vda", devices.join("254:0")).unwrap();
        symlink("../devices/vda/vda1", devices.join("254:1")).unwrap();
        for (device, expected) in [("254:0", Some("254:0")), ("254:1", Some("254:0")), ("0:42", None)] {
            assert_eq!(whole_disk(&devices, device).unwrap().as_deref(), expected, "{device}");
        }
    }

    #[test]
    fn a_file_system_without_a_disk_is_named() {
        let error = find_disk(Path::new("/proc")).unwrap_err().to_string();
        assert!(error.starts_with("the file system of /proc is not on one block device (device 0:"), "{error}");
        assert!(matches!(find_disk(Path::new("/none")), Err(DiskLimitError::Find { .. })));
    }

    #[test]
    fn limits_that_are_not_set_are_removed() {
        let limits =
            DiskLimits { write_bytes_per_second: Some(1 << 20), reads_per_second: Some(5), ..DiskLimits::default() };
        assert_eq!(format_limits("8:0", &limits), "8:0 rbps=max wbps=1048576 riops=5 wiops=max");
    }
}
