//! Lists the hot-plugged disks of a VM, which it has in addition to those of its specification. A new disk is empty, and
//! persists until it or the VM is removed. The list is stored in the directory of the files; `hotplug` changes it while the VM runs.

use crate::disk;
use crate::error::KeeperError;
use crate::qcow2::MAX_SIZE;
use nacelle_base::files::write_whole;
use nacelle_base::json;
use nacelle_base::task::run_blocking;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The maximum number of hot-plugged disks of a VM.
pub const SLOTS: u8 = 8;
/// The list of the hot-plugged disks, in the directory of their files.
pub const HOTPLUG_LIST: &str = "added.json";
/// The maximum size of the list in bytes.
const MAX_LIST_BYTES: u64 = 64 << 10;
/// The maximum length of a name: a serial number of virtio has 20 bytes.
const MAX_NAME: usize = 20;

/// A hot-plugged disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HotplugDisk {
    /// The disk's name, which is also its serial number.
    pub name: String,
    /// The disk's slot, less than [`SLOTS`].
    #[serde(rename = "place")]
    pub slot: u8,
    /// The disk's size in bytes.
    pub bytes: u64,
}

impl HotplugDisk {
    /// Returns the name of the disk's file. No disk of a specification has a dot in its name.
    pub fn file(&self) -> String {
        format!("{}.added.qcow2", self.name)
    }
}

/// The hot-plugged disks of a VM.
#[derive(Debug)]
pub struct HotplugDisks {
    directory: PathBuf,
    /// The disks in the order in which they were added.
    pub all: Vec<HotplugDisk>,
}

impl HotplugDisks {
    /// Loads the hot-plugged disks of a VM that has their files in this directory. Blocks.
    pub fn load(directory: &Path) -> Result<HotplugDisks, KeeperError> {
        let path = directory.join(HOTPLUG_LIST);
        let mut text = Vec::new();
        match File::open(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            opened => {
                let file = opened.map_err(KeeperError::file("open", &path))?;
                file.take(MAX_LIST_BYTES).read_to_end(&mut text).map_err(KeeperError::file("read", &path))?;
            }
        }
        let all = if text.is_empty() { Vec::new() } else { parse_hotplug_list(&text)? };
        let disks = HotplugDisks { directory: directory.to_owned(), all };
        for disk in &disks.all {
            disk::create_empty_disk(&disk.name, &disks.file(disk), disk.bytes)?;
        }
        Ok(disks)
    }

    /// Returns the disks and their files for QEMU's command line.
    pub fn with_files(&self) -> Vec<(HotplugDisk, PathBuf)> {
        self.all.iter().map(|disk| (disk.clone(), self.file(disk))).collect()
    }

    /// Returns the path of a disk's file.
    pub fn file(&self, disk: &HotplugDisk) -> PathBuf {
        self.directory.join(disk.file())
    }

    /// Stores the list.
    pub async fn save(&self) -> Result<(), KeeperError> {
        let (path, text) = (self.directory.join(HOTPLUG_LIST), serde_json::to_vec(&self.all).unwrap_or_default());
        run_blocking("save the list of hot-plugged disks", move || write_whole(&path, &text))
            .await?
            .map_err(KeeperError::StateFile)
    }
}

/// Parses the list, which this program has written.
pub fn parse_hotplug_list(text: &[u8]) -> Result<Vec<HotplugDisk>, KeeperError> {
    let all: Vec<HotplugDisk> = json::read(text).map_err(|source| KeeperError::InvalidDocument { source })?;
    let is_valid = |(n, disk): (usize, &HotplugDisk)| {
        let others = all.iter().take(n);
        is_name(&disk.name)
            && disk.slot < SLOTS
            && (1..=MAX_SIZE).contains(&disk.bytes)
            && others.into_iter().all(|other| other.name != disk.name && other.slot != disk.slot)
    };
    if all.iter().enumerate().all(is_valid) {
        return Ok(all);
    }
    let value = String::from_utf8_lossy(text).chars().take(200).collect();
    Err(KeeperError::InvalidField { field: HOTPLUG_LIST, value, rule: "the file is damaged: remove it" })
}

/// Returns whether a hot-plugged disk may have this name.
pub fn is_name(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_of_hotplugged_disks_is_validated() {
        let directory = tempfile::tempdir().unwrap();
        assert!(HotplugDisks::load(directory.path()).unwrap().all.is_empty());
        let disk = |name: &str, slot| HotplugDisk { name: name.into(), slot, bytes: 1 << 20 };
        let write = |all: &[HotplugDisk]| {
            std::fs::write(directory.path().join(HOTPLUG_LIST), serde_json::to_vec(all).unwrap()).unwrap();
            HotplugDisks::load(directory.path())
        };
        let disks = write(&[disk("a", 0), disk("b", 3)]).unwrap();
        // A missing file is created again.
        assert!(disks.with_files().iter().all(|(_, file)| file.exists()));
        for invalid in [
            [disk("a", 0), disk("a", 1)],
            [disk("a", 0), disk("b", 0)],
            [disk("a", 0), disk("b", SLOTS)],
            [disk("a", 0), disk("../b", 1)],
        ] {
            assert!(write(&invalid).is_err(), "{invalid:?}");
        }
        let stored = r#"[{"name":"a","place":7,"bytes":512}]"#;
        assert_eq!(parse_hotplug_list(stored.as_bytes()).unwrap()[0].slot, 7, "the stored name of the field is kept");
        std::fs::write(directory.path().join(HOTPLUG_LIST), "{}").unwrap();
        assert!(HotplugDisks::load(directory.path()).is_err());
    }
}
