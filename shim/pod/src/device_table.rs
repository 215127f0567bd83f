//! Allocates the partition numbers of the volume disk: which block devices of the node and volume files the containers of a
//! pod use, in which partition, and for how many containers. It performs no I/O; [`crate::devices`] attaches the devices.

use nacelle_base::{Classify, FailureKind};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;

/// The largest partition number; the smallest is 1.
const MAX_DEVICES: u32 = 255;

/// A container cannot have a device.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The VM has no disk for devices.
    #[error("cannot attach block device {path}: a pod without a VM has no disk for devices")]
    NoDisk {
        /// The path on the node.
        path: PathBuf,
    },
    /// All partition numbers are in use.
    #[error(
        "cannot attach block device {path} to container {container}: the pod has no free device slot (maximum {MAX_DEVICES}); use fewer volumeDevices"
    )]
    NoFreeSlot {
        /// The id of the container.
        container: String,
        /// The path on the node.
        path: PathBuf,
    },
    /// The daemon has not offered the device.
    #[error("cannot attach device {path}: the daemon has not offered it for this container")]
    NotOffered {
        /// The path on the node.
        path: PathBuf,
    },
    /// The file is not a block device.
    #[error("cannot attach {path}: it is no block device")]
    NoDevice {
        /// The path on the node.
        path: PathBuf,
    },
    /// The file of a volume is not a regular file.
    #[error("cannot attach the volume file {path}: it is not a regular file")]
    NoFile {
        /// The path on the node.
        path: PathBuf,
    },
    /// Another process has locked the volume: two VMs would write to one file system.
    #[error("cannot attach the volume file {path}: it is in use by another of its sandboxes; stop that one first")]
    InUse {
        /// The path on the node.
        path: PathBuf,
    },
    /// The device is empty, or longer than a partition can be.
    #[error("cannot attach device {path}: it has {length} bytes; 512 bytes to 2 PiB are allowed")]
    Length {
        /// The path on the node.
        path: PathBuf,
        /// The length in bytes.
        length: u64,
    },
    /// The device cannot be read or locked.
    #[error("cannot read or lock device {path}")]
    Io {
        /// The path on the node.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

impl Classify for DeviceError {
    fn kind(&self) -> FailureKind {
        match self {
            DeviceError::NoFreeSlot { .. } => FailureKind::Exhausted,
            DeviceError::NoDisk { .. } => FailureKind::Unsupported,
            DeviceError::NoDevice { .. } | DeviceError::NoFile { .. } => FailureKind::Invalid,
            DeviceError::Length { .. } | DeviceError::NotOffered { .. } | DeviceError::InUse { .. } => {
                FailureKind::Conflict
            }
            DeviceError::Io { source, .. } => source.kind().into(),
        }
    }
}

/// What must be done for a device when a container uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChange {
    /// The device must be placed and attached.
    New,
    /// The device has a partition and must be attached again: it becomes writable, or the last attempt failed.
    Reattach,
    /// The device is attached already.
    Unchanged,
}

struct TableEntry {
    number: u32,
    users: usize,
    writable: bool,
}

/// The devices of one VM, by key. This table performs no I/O.
#[derive(Default)]
pub struct DeviceTable {
    by_key: BTreeMap<String, TableEntry>,
    /// The numbers in use, including those of devices that are being detached.
    numbers_in_use: BTreeSet<u32>,
}

impl DeviceTable {
    /// Checks that there are free numbers for the keys that are new; otherwise returns the first key for which there is none.
    pub fn check_capacity<'a>(&self, keys: impl Iterator<Item = &'a str>) -> Result<(), &'a str> {
        let new: BTreeSet<&str> = keys.filter(|key| !self.by_key.contains_key(*key)).collect();
        let free = usize::try_from(MAX_DEVICES).unwrap_or_default() - self.numbers_in_use.len();
        new.into_iter().nth(free).map_or(Ok(()), Err)
    }

    /// Counts one more user of a device; returns `None` if no number is free. `failed`: the last attempt to attach the device failed.
    pub fn acquire(&mut self, key: &str, writable: bool, failed: bool) -> Option<(u32, DeviceChange)> {
        if let Some(entry) = self.by_key.get_mut(key) {
            entry.users += 1;
            let change =
                if failed || (writable && !entry.writable) { DeviceChange::Reattach } else { DeviceChange::Unchanged };
            entry.writable = writable || (entry.writable && !failed);
            return Some((entry.number, change));
        }
        let number = (1..=MAX_DEVICES).find(|number| !self.numbers_in_use.contains(number))?;
        self.numbers_in_use.insert(number);
        self.by_key.insert(key.to_owned(), TableEntry { number, users: 1, writable });
        Some((number, DeviceChange::New))
    }

    /// Counts one user less; returns the number if that was the last. The number stays in use until [`DeviceTable::free`].
    pub fn release(&mut self, key: &str) -> Option<u32> {
        let entry = self.by_key.get_mut(key)?;
        entry.users = entry.users.saturating_sub(1);
        if entry.users > 0 {
            return None;
        }
        self.by_key.remove(key).map(|entry| entry.number)
    }

    /// Makes the number available again.
    pub fn free(&mut self, number: u32) {
        self.numbers_in_use.remove(&number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_device_is_placed_once_and_becomes_writable_once() {
        let mut devices = DeviceTable::default();
        assert_eq!(devices.acquire("8:0", false, false), Some((1, DeviceChange::New)));
        assert_eq!(devices.acquire("8:0", false, false), Some((1, DeviceChange::Unchanged)));
        assert_eq!(devices.acquire("8:0", true, false), Some((1, DeviceChange::Reattach)));
        assert_eq!(devices.acquire("8:0", true, false), Some((1, DeviceChange::Unchanged)));
        // After a failure the device is attached again, with the access that is requested now.
        assert_eq!(devices.acquire("8:9", false, false), Some((2, DeviceChange::New)));
        assert_eq!(devices.acquire("8:9", true, false), Some((2, DeviceChange::Reattach)));
        assert_eq!(devices.acquire("8:9", false, true), Some((2, DeviceChange::Reattach)));
        assert_eq!(devices.acquire("8:9", true, false), Some((2, DeviceChange::Reattach)));
        assert_eq!([(); 4].map(|()| devices.release("8:9")), [None, None, None, Some(2)]);
        devices.free(2);
        assert_eq!(devices.acquire("8:1", true, false), Some((2, DeviceChange::New)));
        assert_eq!(devices.acquire("8:1", true, false), Some((2, DeviceChange::Unchanged)));
        assert_eq!([(); 4].map(|()| devices.release("8:0")), [None, None, None, Some(1)]);
        assert_eq!(devices.release("8:0"), None);
        // A device that is being detached is neither shared nor free.
        assert_eq!(devices.acquire("8:0", false, false), Some((3, DeviceChange::New)));
        devices.free(1);
        assert_eq!(devices.acquire("8:2", false, false), Some((1, DeviceChange::New)));
    }

    #[test]
    fn partition_numbers_run_out() {
        let mut devices = DeviceTable::default();
        let keys: Vec<String> = (0..=MAX_DEVICES).map(|n| format!("8:{n}")).collect();
        let all = || keys.iter().map(String::as_str);
        assert_eq!(devices.check_capacity(all()), Err("8:99"));
        assert_eq!(devices.check_capacity(all().skip(1).chain(all().skip(1))), Ok(()));
        for key in all().skip(1) {
            devices.acquire(key, true, false).unwrap();
        }
        assert_eq!(
            (devices.check_capacity(all().skip(1)), devices.check_capacity(all().take(1))),
            (Ok(()), Err("8:0"))
        );
        assert_eq!(devices.acquire("8:0", true, false), None);
        assert_eq!(
            DeviceError::NoFreeSlot { container: "c".into(), path: "/dev/x".into() }.kind(),
            FailureKind::Exhausted
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn no_two_devices_have_one_number(steps in prop::collection::vec((any::<bool>(), 0u8..6), 1..60)) {
            let mut devices = DeviceTable::default();
            let mut users: BTreeMap<u8, (u32, usize)> = BTreeMap::new();
            for (acquire, key) in steps {
                if acquire {
                    let (number, change) = devices.acquire(&key.to_string(), true, false).unwrap();
                    prop_assert_eq!(change == DeviceChange::New, !users.contains_key(&key));
                    users.entry(key).or_insert((number, 0)).1 += 1;
                } else if let Some((number, count)) = users.get_mut(&key) {
                    *count -= 1;
                    let last = (*count == 0).then_some(*number);
                    prop_assert_eq!(devices.release(&key.to_string()), last);
                    if let Some(number) = last {
                        users.remove(&key);
                        devices.free(number);
                    }
                }
                let numbers: BTreeSet<u32> = users.values().map(|(number, _)| *number).collect();
                prop_assert_eq!(numbers.len(), users.len());
            }
        }
    }
}
