//! Manages the block devices of the node and the volume files that the containers of a pod use: which of them are on the
//! VM's volume disk, in which partition, and for how many containers. Block devices that grow on the node grow in the
//! guest.
//!
//! The actor owns the table [`Devices`]. A [`Placed`] is shared with the effects; its lock is held while the disk changes.

use crate::agent::Agent;
use crate::error::PodError;
use nacelle_base::task::run_blocking;
use nacelle_base::{Chain, Classify, Kind};
use nacelle_engine::Slot;
use nacelle_proto::agent as proto;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, TryLockError};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The largest partition number; the smallest is 1.
const MOST: u32 = 255;
/// The distance in bytes between the beginnings of two devices on the disk: the maximum length, so that each can grow.
const REGION: u64 = 1 << 51;
/// The interval at which the sizes of devices are checked.
const LOOK: Duration = Duration::from_secs(3);

/// A container cannot have a device.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The VM has no disk for devices.
    #[error("device {path}: a pod without a machine has no disk for devices")]
    NoDisk {
        /// The path on the node.
        path: PathBuf,
    },
    /// All partition numbers are in use.
    #[error("the pod has no room for device {path}: {MOST} devices are attached")]
    NoRoom {
        /// The path on the node.
        path: PathBuf,
    },
    /// The daemon has not offered the device.
    #[error("device {path} was not handed over")]
    NotOffered {
        /// The path on the node.
        path: PathBuf,
    },
    /// The file is not a block device.
    #[error("{path} is no block device")]
    NoDevice {
        /// The path on the node.
        path: PathBuf,
    },
    /// The file of a volume is not a regular file.
    #[error("{path}, in which a volume of the pod lies, is no file")]
    NoFile {
        /// The path on the node.
        path: PathBuf,
    },
    /// Another process has locked the volume: two VMs would write to one file system.
    #[error("{path}, in which a volume of the pod lies, is in use by another of its sandboxes: stop that one first")]
    InUse {
        /// The path on the node.
        path: PathBuf,
    },
    /// The device is empty, or longer than a partition can be.
    #[error("device {path} has {length} bytes; more than none, and at most 2 PiB, are needed")]
    Length {
        /// The path on the node.
        path: PathBuf,
        /// The length in bytes.
        length: u64,
    },
    /// The device cannot be read or locked.
    #[error("cannot use device {path}")]
    Io {
        /// The path on the node.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

impl Classify for DeviceError {
    fn kind(&self) -> Kind {
        match self {
            DeviceError::NoRoom { .. } => Kind::Exhausted,
            DeviceError::NoDisk { .. } => Kind::Unsupported,
            DeviceError::NoDevice { .. } | DeviceError::NoFile { .. } => Kind::Invalid,
            DeviceError::Length { .. } | DeviceError::NotOffered { .. } | DeviceError::InUse { .. } => Kind::Conflict,
            DeviceError::Io { source, .. } => source.kind().into(),
        }
    }
}

/// What must be done when a container gets a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The device must be placed and attached.
    New,
    /// The device has a partition and must be attached again: it becomes writable, or the last attempt failed.
    Again,
    /// The device is attached already.
    Nothing,
}

struct Entry {
    number: u32,
    users: usize,
    writable: bool,
}

/// The devices of one VM, by key. This table performs no I/O.
#[derive(Default)]
pub struct Devices {
    by_key: BTreeMap<String, Entry>,
    /// The numbers in use, including those of devices that are being detached.
    taken: BTreeSet<u32>,
}

impl Devices {
    /// Checks that there are free numbers for the keys that are new; otherwise returns a key that has none.
    pub fn room<'a>(&self, keys: impl Iterator<Item = &'a str>) -> Result<(), &'a str> {
        let new: BTreeSet<&str> = keys.filter(|key| !self.by_key.contains_key(*key)).collect();
        let free = usize::try_from(MOST).unwrap_or_default() - self.taken.len();
        new.into_iter().nth(free).map_or(Ok(()), Err)
    }

    /// Counts one more user of a device; returns `None` if no number is free. `failed`: the last attempt to attach the device failed.
    pub fn acquire(&mut self, key: &str, writable: bool, failed: bool) -> Option<(u32, Change)> {
        if let Some(entry) = self.by_key.get_mut(key) {
            entry.users += 1;
            let change = if failed || (writable && !entry.writable) { Change::Again } else { Change::Nothing };
            entry.writable = writable || (entry.writable && !failed);
            return Some((entry.number, change));
        }
        let number = (1..=MOST).find(|number| !self.taken.contains(number))?;
        self.taken.insert(number);
        self.by_key.insert(key.to_owned(), Entry { number, users: 1, writable });
        Some((number, Change::New))
    }

    /// Counts one user less; returns the number if that was the last. The number stays in use until [`Devices::free`].
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
        self.taken.remove(&number);
    }
}

/// A device with a partition on the VM's volume disk.
#[derive(Debug)]
pub struct Placed {
    slot: Slot,
    /// The partition number.
    pub number: u32,
    path: PathBuf,
    /// The device is a file with a volume of the pod, not a block device.
    of_volume: bool,
    now: Mutex<Option<Now>>,
}

/// The attached file; `None` before it is attached and after it is detached.
#[derive(Debug)]
struct Now {
    file: File,
    length: u64,
    writable: bool,
}

impl Placed {
    /// Returns a device that is not attached yet.
    pub fn new(slot: Slot, number: u32, path: &Path, of_volume: bool) -> Placed {
        Placed { slot, number, path: path.to_owned(), of_volume, now: Mutex::new(None) }
    }

    /// Returns whether the device can grow.
    pub fn grows(&self) -> bool {
        !self.of_volume
    }

    fn now(&self) -> MutexGuard<'_, Option<Now>> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self) -> impl Fn(io::Error) -> PodError {
        |source| DeviceError::Io { path: self.path.clone(), source }.into()
    }

    /// Returns the partition's offset in bytes from the start of the disk.
    fn offset(&self) -> u64 {
        REGION.saturating_mul(self.number.into())
    }

    /// Places the open file on the disk. Blocks.
    pub fn show(&self, file: File, writable: bool) -> Result<(), PodError> {
        let kind = file.metadata().map_err(self.failed())?.file_type();
        let mut now = self.now();
        if self.of_volume {
            if !kind.is_file() {
                return Err(DeviceError::NoFile { path: self.path.clone() }.into());
            }
            if now.is_some() {
                // The volume was placed before, and has been locked since.
                return Ok(());
            }
            self.lock(&file)?;
        } else if !kind.is_block_device() {
            return Err(DeviceError::NoDevice { path: self.path.clone() }.into());
        }
        let length = end(&file).map_err(self.failed())?;
        self.place(&file, length, writable)?;
        *now = Some(Now { file, length, writable });
        Ok(())
    }

    /// Locks the file for this process, until the last copy of this descriptor is closed.
    fn lock(&self, file: &File) -> Result<(), PodError> {
        match file.try_lock() {
            Ok(()) => Ok(()),
            Err(TryLockError::WouldBlock) => Err(DeviceError::InUse { path: self.path.clone() }.into()),
            Err(TryLockError::Error(source)) => Err(self.failed()(source)),
        }
    }

    fn place(&self, file: &File, length: u64, writable: bool) -> Result<(), PodError> {
        if !(1..=REGION).contains(&length) {
            return Err(DeviceError::Length { path: self.path.clone(), length }.into());
        }
        let file = file.try_clone().map_err(self.failed())?;
        let placed = self.slot.place_volume(self.offset(), file, length, writable, &self.path);
        placed.map_err(|source| PodError::Place { key: self.path.display().to_string(), source })
    }

    /// Checks whether the device has grown, and grows the partition. Blocks.
    fn look(&self) -> Result<(), PodError> {
        let mut now = self.now();
        let Some(Now { file, length, writable }) = now.as_mut() else { return Ok(()) };
        let longer = end(file).map_err(self.failed())?;
        if longer > *length {
            self.place(file, longer, *writable)?;
            *length = longer;
        }
        Ok(())
    }

    /// Returns the agent's request for the current state; `None` if the device is not attached.
    fn told(&self) -> Option<proto::AttachDeviceRequest> {
        let now = self.now();
        let Now { length, writable, .. } = now.as_ref()?;
        let (offset, length, writable) = (self.offset(), *length, *writable);
        Some(proto::AttachDeviceRequest { partition: self.number, offset, length, writable })
    }

    /// Removes the device from the disk and closes it. Blocks until the disk no longer uses it.
    pub fn take_away(&self) {
        let gone = self.now().take();
        self.slot.unplace(self.offset());
        drop(gone);
    }
}

/// Returns the length by seeking, because the metadata of block devices have no length; rounded down to sectors of 512 bytes.
fn end(mut file: &File) -> io::Result<u64> {
    Ok(file.seek(SeekFrom::End(0))? & !511)
}

/// Places a device on the disk and calls the agent to make a partition of it, or to make it writable.
pub async fn attach(agent: &Agent, placed: &Arc<Placed>, file: File, writable: bool) -> Result<(), PodError> {
    let shown = Arc::clone(placed);
    run_blocking("attach a block device", move || shown.show(file, writable)).await??;
    let told = placed.told().ok_or(PodError::Ending)?;
    agent.attach_device(told).await
}

/// Reports to the guest whenever a device has grown; never returns unless the size cannot be read. Retries failed reports.
pub async fn watch(agent: Agent, placed: Arc<Placed>) {
    let mut known = placed.told();
    loop {
        tokio::time::sleep(LOOK).await;
        let looked = Arc::clone(&placed);
        let looked = run_blocking("read the size of a block device", move || looked.look()).await;
        let looked = looked.map_err(PodError::from).flatten();
        if let Err(error) = looked {
            tracing::warn!("a device is not looked at any more: {}", Chain(&error));
            return;
        }
        // Another task may have made the device writable, and reported its length too.
        let told = placed.told();
        if told.map(|told| told.length) == known.map(|known| known.length) {
            continue;
        }
        if let Some(request) = told {
            match agent.attach_device(request).await {
                Ok(()) => tracing::info!(device = %placed.path.display(), "has grown"),
                Err(error) => {
                    tracing::warn!("the guest is not told of a device that has grown: {}", Chain(&error));
                    continue;
                }
            }
        }
        known = told;
    }
}

/// Removes a device without users from the VM. If the agent cannot release it, it stays.
pub async fn detach(agent: Option<Agent>, placed: Arc<Placed>) -> Result<(), PodError> {
    if let Some(agent) = agent {
        agent.detach_device(placed.number).await?;
    }
    Ok(run_blocking("detach a block device", move || placed.take_away()).await?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_device_is_placed_once_and_becomes_writable_once() {
        let mut devices = Devices::default();
        assert_eq!(devices.acquire("8:0", false, false), Some((1, Change::New)));
        assert_eq!(devices.acquire("8:0", false, false), Some((1, Change::Nothing)));
        assert_eq!(devices.acquire("8:0", true, false), Some((1, Change::Again)));
        assert_eq!(devices.acquire("8:0", true, false), Some((1, Change::Nothing)));
        // After a failure the device is attached again, with the access that is requested now.
        assert_eq!(devices.acquire("8:9", false, false), Some((2, Change::New)));
        assert_eq!(devices.acquire("8:9", true, false), Some((2, Change::Again)));
        assert_eq!(devices.acquire("8:9", false, true), Some((2, Change::Again)));
        assert_eq!(devices.acquire("8:9", true, false), Some((2, Change::Again)));
        assert_eq!([(); 4].map(|()| devices.release("8:9")), [None, None, None, Some(2)]);
        devices.free(2);
        assert_eq!(devices.acquire("8:1", true, false), Some((2, Change::New)));
        assert_eq!(devices.acquire("8:1", true, false), Some((2, Change::Nothing)));
        assert_eq!([(); 4].map(|()| devices.release("8:0")), [None, None, None, Some(1)]);
        assert_eq!(devices.release("8:0"), None);
        // A device that is being detached is neither shared nor free.
        assert_eq!(devices.acquire("8:0", false, false), Some((3, Change::New)));
        devices.free(1);
        assert_eq!(devices.acquire("8:2", false, false), Some((1, Change::New)));
    }

    #[test]
    fn numbers_run_out() {
        let mut devices = Devices::default();
        let keys: Vec<String> = (0..=MOST).map(|n| format!("8:{n}")).collect();
        let all = || keys.iter().map(String::as_str);
        assert_eq!(devices.room(all()), Err("8:99"));
        assert_eq!(devices.room(all().skip(1).chain(all().skip(1))), Ok(()));
        for key in all().skip(1) {
            devices.acquire(key, true, false).unwrap();
        }
        assert_eq!((devices.room(all().skip(1)), devices.room(all().take(1))), (Ok(()), Err("8:0")));
        assert_eq!(devices.acquire("8:0", true, false), None);
        assert_eq!(DeviceError::NoRoom { path: "/dev/x".into() }.kind(), Kind::Exhausted);
    }

    #[test]
    fn only_a_block_device_with_bytes_is_shown() {
        let slot = Slot::volumes("volumes").unwrap();
        let placed = Placed::new(slot.clone(), 1, Path::new("/dev/x"), false);
        let error = placed.show(tempfile::tempfile().unwrap(), true).unwrap_err();
        assert!(error.kind() == Kind::Invalid && error.to_string().contains("/dev/x"), "{error}");
        let error = placed.place(&tempfile::tempfile().unwrap(), 0, true).unwrap_err();
        assert_eq!(error.kind(), Kind::Conflict);
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        placed.place(&file, 4096, true).unwrap();
        assert_eq!((slot.capacity(), placed.told()), (REGION + (1 << 20), None));
        placed.take_away();
        placed.take_away();
    }

    #[test]
    fn the_file_of_a_volume_is_one_machines_at_a_time() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("volume");
        let open = || File::options().read(true).write(true).create(true).truncate(false).open(&path).unwrap();
        open().set_len(1 << 20).unwrap();
        let placed = |number| Placed::new(Slot::volumes("volumes").unwrap(), number, &path, true);
        let (first, second) = (placed(1), placed(1));
        first.show(open(), true).unwrap();
        first.show(open(), true).unwrap();
        assert_eq!(first.told().map(|told| (told.length, told.writable)), Some((1 << 20, true)));
        let error = second.show(open(), true).unwrap_err();
        assert!(error.kind() == Kind::Conflict && error.to_string().contains("another of its sandboxes"), "{error}");
        first.take_away();
        second.show(open(), true).unwrap();
        let error = placed(2).show(File::open("/dev/null").unwrap(), true).unwrap_err();
        assert_eq!(error.kind(), Kind::Invalid);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn no_two_devices_have_one_number(steps in prop::collection::vec((any::<bool>(), 0u8..6), 1..60)) {
            let mut devices = Devices::default();
            let mut users: BTreeMap<u8, (u32, usize)> = BTreeMap::new();
            for (acquire, key) in steps {
                if acquire {
                    let (number, change) = devices.acquire(&key.to_string(), true, false).unwrap();
                    prop_assert_eq!(change == Change::New, !users.contains_key(&key));
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
