//! Handles the actor's requests for block devices of the node, disk files and files of images: those that were offered and wait for
//! their container, and the devices that containers use.

use super::{EffectEvent, PodActor, Reply, report, send_reply};
use crate::container::{AttachOutcome, DeviceAttachment, DeviceUse};
use crate::device_table::{DeviceChange, DeviceError};
use crate::devices::{self, PlacedDevice};
use crate::error::{Failure, PodError};
use crate::returned_files::ReturnedFile;
use nacelle_base::Chain;
use nacelle_engine::Slot;
use nacelle_proto::pod;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::watch;
use tokio::task::AbortHandle;

/// What the daemon offers to a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OfferKind {
    /// A device, by its path in the container, a disk, by its name, or a file that is returned, by the name of its volume; one file.
    Device,
    /// An image, by its key; the files of its extents.
    Image,
    /// A checkpoint, by its name; its three files. For no container.
    Checkpoint,
}

/// Open files that the daemon offers for a container.
pub struct OfferedFiles {
    /// The kind.
    pub kind: OfferKind,
    /// The id of the container.
    pub id: String,
    /// The path, name or key.
    pub name: String,
    /// The files.
    pub files: Vec<File>,
}

/// A device that containers use.
pub(super) struct AttachedDevice {
    placed: Arc<PlacedDevice>,
    outcome: AttachOutcome,
    size_watcher: AbortHandle,
}

impl PodActor {
    /// Keeps the offer until its container is created, or until it is withdrawn by the number in the reply.
    pub(super) fn keep_offer(&mut self, offer: OfferedFiles, reply: Reply<u64>) {
        self.last_offer += 1;
        self.offers.insert(self.last_offer, offer);
        send_reply(reply, Ok(self.last_offer));
    }

    pub(super) fn find_offer(&self, kind: OfferKind, id: &str, name: &str) -> Option<u64> {
        // The newest offer counts: a daemon that was killed may have left an older one.
        let mut all = self.offers.iter().rev();
        let matches = |offer: &OfferedFiles| offer.kind == kind && offer.id == id && offer.name == name;
        all.find(|(_, offer)| matches(offer)).map(|(number, _)| *number)
    }

    /// Checks whether a container can have the devices that it requests. Changes nothing.
    pub(super) fn check_devices(&self, request: &pod::CreateContainerRequest) -> Result<Option<Slot>, Failure> {
        let Some(first) = request.devices.first() else { return Ok(None) };
        let path = |device: &pod::BlockDevice| PathBuf::from(&device.path);
        for device in &request.devices {
            if self.find_offer(OfferKind::Device, &request.id, &device.container_path).is_none() {
                return Err(PodError::from(DeviceError::NotOffered { path: path(device) }).into());
            }
        }
        let keys = request.devices.iter().map(|device| device.key.as_str());
        if let Err(key) = self.devices.check_capacity(keys) {
            let device = request.devices.iter().find(|device| device.key == key).unwrap_or(first);
            return Err(PodError::from(no_free_slot(&request.id, device)).into());
        }
        let slot = self.volume_disk();
        slot.map(Some).ok_or_else(|| PodError::from(DeviceError::NoDisk { path: path(first) }).into())
    }

    /// Takes the disks that a container requests, by name: all of them, or none.
    pub(super) fn take_offered_disks(
        &mut self,
        request: &pod::CreateContainerRequest,
    ) -> Result<Vec<(String, File)>, Failure> {
        let mut numbers = Vec::with_capacity(request.disks.len());
        for disk in &request.disks {
            let number =
                self.find_offer(OfferKind::Device, &request.id, &disk.name).filter(|number| !numbers.contains(number));
            let none = || PodError::from(DeviceError::NotOffered { path: PathBuf::from(&disk.path) });
            numbers.push(number.ok_or_else(none)?);
        }
        let offers = numbers.into_iter().filter_map(|number| self.offers.remove(&number));
        Ok(offers.filter_map(|mut offer| Some((offer.name, offer.files.pop()?))).collect())
    }

    /// Takes the files of the node that get the end of a copy: all of them, or none.
    pub(super) fn take_returned_files(
        &mut self,
        request: &pod::CreateContainerRequest,
    ) -> Result<Vec<ReturnedFile>, Failure> {
        let mut found = Vec::new();
        for volume in request.copied_in_volumes.iter().filter(|volume| volume.is_returned) {
            let path = PathBuf::from(&volume.path);
            let Some(number) = self.find_offer(OfferKind::Device, &request.id, &volume.name) else {
                return Err(PodError::from(DeviceError::NotOffered { path }).into());
            };
            found.push((number, path));
        }
        let take = |(number, path)| {
            let OfferedFiles { name: volume, mut files, .. } = self.offers.remove(&number)?;
            Some(ReturnedFile { volume, file: files.pop()?, path })
        };
        Ok(found.into_iter().filter_map(take).collect())
    }

    /// Takes the files of an image that a container requests; `None` if they were not offered.
    pub(super) fn take_offered_image(&mut self, id: &str, key: &str) -> Option<Vec<File>> {
        let number = self.find_offer(OfferKind::Image, id, key)?;
        Some(self.offers.remove(&number)?.files)
    }

    /// Counts a container as a user of its devices, which `check_devices` has accepted.
    pub(super) fn acquire_devices(
        &mut self,
        slot: Option<&Slot>,
        request: &pod::CreateContainerRequest,
    ) -> Result<Vec<DeviceUse>, Failure> {
        let mut uses = Vec::with_capacity(request.devices.len());
        for device in &request.devices {
            match self.acquire_device(slot, &request.id, device) {
                Some(device_use) => uses.push(device_use),
                None => {
                    // `check_devices` has excluded this; nothing was attached yet.
                    for done in request.devices.iter().take(uses.len()) {
                        self.cancel_device(&done.key);
                    }
                    return Err(PodError::from(no_free_slot(&request.id, device)).into());
                }
            }
        }
        Ok(uses)
    }

    fn acquire_device(&mut self, slot: Option<&Slot>, id: &str, device: &pod::BlockDevice) -> Option<DeviceUse> {
        let (slot, agent) = (slot?.clone(), self.agent.clone()?);
        let number = self.find_offer(OfferKind::Device, id, &device.container_path)?;
        let file = self.offers.remove(&number)?.files.pop()?;
        let device_in_use = self.attached_devices.get(&device.key);
        let failed = device_in_use.is_some_and(|known| matches!(*known.outcome.borrow(), Some(Err(_))));
        let (number, change) = self.devices.acquire(&device.key, device.writable, failed)?;
        let (sender, outcome) = watch::channel(None);
        let attachment =
            |placed, previous| DeviceAttachment { placed, file, writable: device.writable, previous, sender };
        if change == DeviceChange::New {
            let placed = Arc::new(PlacedDevice::new(slot, number, Path::new(&device.path), device.is_empty_dir));
            let (watched, mut attached) = (Arc::clone(&placed), outcome.clone());
            let size_watcher = tokio::spawn(async move {
                let attached = attached.wait_for(Option::is_some).await.map(|outcome| matches!(*outcome, Some(Ok(()))));
                if attached.unwrap_or(false) && watched.can_grow() {
                    devices::watch_size(agent, watched).await;
                }
            });
            let new = AttachedDevice {
                placed: Arc::clone(&placed),
                outcome: outcome.clone(),
                size_watcher: size_watcher.abort_handle(),
            };
            self.attached_devices.insert(device.key.clone(), new);
            return Some(DeviceUse { number, attachment: Some(attachment(placed, None)), outcome });
        }
        let known = self.attached_devices.get_mut(&device.key)?;
        if change == DeviceChange::Unchanged {
            return Some(DeviceUse { number, attachment: None, outcome: known.outcome.clone() });
        }
        let previous = std::mem::replace(&mut known.outcome, outcome.clone());
        let attachment = attachment(Arc::clone(&known.placed), Some(previous).filter(|_| !failed));
        Some(DeviceUse { number, attachment: Some(attachment), outcome })
    }

    /// Removes one user of a device whose attachment has not begun.
    pub(super) fn cancel_device(&mut self, key: &str) {
        if let Some(number) = self.devices.release(key) {
            self.devices.free(number);
            if let Some(removed) = self.attached_devices.remove(key) {
                removed.size_watcher.abort();
            }
        }
    }

    /// Removes one user of a device; when the last is gone, detaches the device from the VM.
    pub(super) fn release_device(&mut self, key: &str) {
        let Some(number) = self.devices.release(key) else { return };
        let Some(removed) = self.attached_devices.remove(key) else { return self.devices.free(number) };
        removed.size_watcher.abort();
        let (agent, events) = (self.agent.clone(), self.events.clone());
        tokio::spawn(async move {
            match devices::detach(agent, removed.placed).await {
                Ok(()) => report(&events, EffectEvent::DeviceDetached(number)),
                Err(error) => {
                    tracing::warn!("cannot detach a device from the VM; it stays attached: {}", Chain(&error))
                }
            }
        });
    }
}

fn no_free_slot(container: &str, device: &pod::BlockDevice) -> DeviceError {
    DeviceError::NoFreeSlot { container: container.to_owned(), path: PathBuf::from(&device.path) }
}
