//! Attaches block devices of the node and volume files to the VM: places each in its partition of the volume disk, and
//! reports it to the agent. Block devices that grow on the node grow in the guest.
//!
//! [`crate::device_table`] allocates the partitions. A [`PlacedDevice`] is shared by the tasks of the actor; its lock is held
//! while the disk changes.

use crate::agent::Agent;
use crate::device_table::DeviceError;
use crate::error::PodError;
use nacelle_base::Chain;
use nacelle_base::task::run_blocking;
use nacelle_engine::Slot;
use nacelle_proto::agent as proto;
use std::fs::{File, TryLockError};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The distance in bytes between the beginnings of two devices on the disk: the maximum length, so that each can grow.
const MAX_DEVICE_BYTES: u64 = 1 << 51;
/// The interval at which the sizes of devices are checked.
const SIZE_CHECK_INTERVAL: Duration = Duration::from_secs(3);

/// A device with a partition on the VM's volume disk.
#[derive(Debug)]
pub struct PlacedDevice {
    slot: Slot,
    /// The partition number.
    pub number: u32,
    path: PathBuf,
    /// The device is a file with a volume of the pod, not a block device.
    of_volume: bool,
    current: Mutex<Option<PlacedFile>>,
}

/// The attached file; `None` before it is attached and after it is detached.
#[derive(Debug)]
struct PlacedFile {
    file: File,
    length: u64,
    writable: bool,
}

impl PlacedDevice {
    /// Returns a device that is not attached yet.
    pub fn new(slot: Slot, number: u32, path: &Path, of_volume: bool) -> PlacedDevice {
        PlacedDevice { slot, number, path: path.to_owned(), of_volume, current: Mutex::new(None) }
    }

    /// Returns whether the device can grow.
    pub fn can_grow(&self) -> bool {
        !self.of_volume
    }

    fn lock_file_state(&self) -> MutexGuard<'_, Option<PlacedFile>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn io_error(&self) -> impl Fn(io::Error) -> PodError {
        |source| DeviceError::Io { path: self.path.clone(), source }.into()
    }

    /// Returns the partition's offset in bytes from the start of the disk.
    fn offset(&self) -> u64 {
        MAX_DEVICE_BYTES.saturating_mul(self.number.into())
    }

    /// Places the open file on the disk. Blocks.
    pub fn place_file(&self, file: File, writable: bool) -> Result<(), PodError> {
        let kind = file.metadata().map_err(self.io_error())?.file_type();
        let mut current = self.lock_file_state();
        if self.of_volume {
            if !kind.is_file() {
                return Err(DeviceError::NoFile { path: self.path.clone() }.into());
            }
            if current.is_some() {
                // The volume was placed before, and has been locked since.
                return Ok(());
            }
            self.lock(&file)?;
        } else if !kind.is_block_device() {
            return Err(DeviceError::NoDevice { path: self.path.clone() }.into());
        }
        let length = byte_length(&file).map_err(self.io_error())?;
        self.place(&file, length, writable)?;
        *current = Some(PlacedFile { file, length, writable });
        Ok(())
    }

    /// Locks the file for this process, until the last copy of this descriptor is closed.
    fn lock(&self, file: &File) -> Result<(), PodError> {
        match file.try_lock() {
            Ok(()) => Ok(()),
            Err(TryLockError::WouldBlock) => Err(DeviceError::InUse { path: self.path.clone() }.into()),
            Err(TryLockError::Error(source)) => Err(self.io_error()(source)),
        }
    }

    fn place(&self, file: &File, length: u64, writable: bool) -> Result<(), PodError> {
        if !(1..=MAX_DEVICE_BYTES).contains(&length) {
            return Err(DeviceError::Length { path: self.path.clone(), length }.into());
        }
        let file = file.try_clone().map_err(self.io_error())?;
        let placed = self.slot.place_volume(self.offset(), file, length, writable, &self.path);
        placed.map_err(|source| PodError::Place { key: self.path.display().to_string(), source })
    }

    /// Checks whether the device has grown, and grows the partition. Blocks.
    fn follow_growth(&self) -> Result<(), PodError> {
        let mut current = self.lock_file_state();
        let Some(PlacedFile { file, length, writable }) = current.as_mut() else { return Ok(()) };
        let length_now = byte_length(file).map_err(self.io_error())?;
        if length_now > *length {
            self.place(file, length_now, *writable)?;
            *length = length_now;
        }
        Ok(())
    }

    /// Returns the agent's request for the current state; `None` if the device is not attached.
    fn attach_request(&self) -> Option<proto::AttachDeviceRequest> {
        let current = self.lock_file_state();
        let PlacedFile { length, writable, .. } = current.as_ref()?;
        let (offset, length, writable) = (self.offset(), *length, *writable);
        Some(proto::AttachDeviceRequest { partition: self.number, offset, length, writable })
    }

    /// Removes the device from the disk and closes it. Blocks until the disk no longer uses it.
    pub fn remove_from_disk(&self) {
        let removed = self.lock_file_state().take();
        self.slot.unplace(self.offset());
        drop(removed);
    }
}

/// Returns the length by seeking, because the metadata of block devices have no length; rounded down to sectors of 512 bytes.
fn byte_length(mut file: &File) -> io::Result<u64> {
    Ok(file.seek(SeekFrom::End(0))? & !511)
}

/// Places a device on the disk and calls the agent to make a partition of it, or to make it writable.
pub async fn attach(agent: &Agent, placed: &Arc<PlacedDevice>, file: File, writable: bool) -> Result<(), PodError> {
    let device = Arc::clone(placed);
    run_blocking("attach a block device", move || device.place_file(file, writable)).await??;
    let request = placed.attach_request().ok_or(PodError::Ending)?;
    agent.attach_device(request).await
}

/// Reports to the guest whenever a device has grown; never returns unless the size cannot be read. Retries failed reports.
pub async fn watch_size(agent: Agent, placed: Arc<PlacedDevice>) {
    let mut reported = placed.attach_request();
    loop {
        tokio::time::sleep(SIZE_CHECK_INTERVAL).await;
        let device = Arc::clone(&placed);
        let checked = run_blocking("read the size of a block device", move || device.follow_growth()).await;
        if let Err(error) = checked.map_err(PodError::from).flatten() {
            tracing::warn!("cannot read the size of a device; the guest will not see it grow: {}", Chain(&error));
            return;
        }
        // Another task may have made the device writable, and reported its length too.
        let current = placed.attach_request();
        if current.map(|request| request.length) == reported.map(|request| request.length) {
            continue;
        }
        if let Some(request) = current {
            match agent.attach_device(request).await {
                Ok(()) => tracing::info!(device = %placed.path.display(), "the device has grown"),
                Err(error) => {
                    tracing::warn!("cannot report to the guest that a device has grown; retrying: {}", Chain(&error));
                    continue;
                }
            }
        }
        reported = current;
    }
}

/// Removes a device without users from the VM. If the agent cannot release it, it stays.
pub async fn detach(agent: Option<Agent>, placed: Arc<PlacedDevice>) -> Result<(), PodError> {
    if let Some(agent) = agent {
        agent.detach_device(placed.number).await?;
    }
    Ok(run_blocking("detach a block device", move || placed.remove_from_disk()).await?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::{Classify, FailureKind};

    #[test]
    fn only_a_block_device_with_bytes_is_placed() {
        let slot = Slot::volumes("volumes").unwrap();
        let placed = PlacedDevice::new(slot.clone(), 1, Path::new("/dev/x"), false);
        let error = placed.place_file(tempfile::tempfile().unwrap(), true).unwrap_err();
        assert!(error.kind() == FailureKind::Invalid && error.to_string().contains("/dev/x"), "{error}");
        let error = placed.place(&tempfile::tempfile().unwrap(), 0, true).unwrap_err();
        assert_eq!(error.kind(), FailureKind::Conflict);
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        placed.place(&file, 4096, true).unwrap();
        assert_eq!((slot.capacity(), placed.attach_request()), (MAX_DEVICE_BYTES + (1 << 20), None));
        placed.remove_from_disk();
        placed.remove_from_disk();
    }

    #[test]
    fn a_volume_file_is_used_by_one_vm_at_a_time() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("volume");
        let open = || File::options().read(true).write(true).create(true).truncate(false).open(&path).unwrap();
        open().set_len(1 << 20).unwrap();
        let placed = |number| PlacedDevice::new(Slot::volumes("volumes").unwrap(), number, &path, true);
        let (first, second) = (placed(1), placed(1));
        first.place_file(open(), true).unwrap();
        first.place_file(open(), true).unwrap();
        assert_eq!(first.attach_request().map(|request| (request.length, request.writable)), Some((1 << 20, true)));
        let error = second.place_file(open(), true).unwrap_err();
        assert!(
            error.kind() == FailureKind::Conflict && error.to_string().contains("another of its sandboxes"),
            "{error}"
        );
        first.remove_from_disk();
        second.place_file(open(), true).unwrap();
        let error = placed(2).place_file(File::open("/dev/null").unwrap(), true).unwrap_err();
        assert_eq!(error.kind(), FailureKind::Invalid);
    }
}
