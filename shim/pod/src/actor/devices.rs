//! Handles the actor's requests for block devices of the node and for disk files: those that were offered and wait for
//! their container, and those that containers use.

use super::{Actor, News, Reply, send, tell};
use crate::container::{Attached, DeviceAttach, DeviceUse};
use crate::devices::{self, Change, DeviceError, Placed};
use crate::error::{Failure, PodError};
use nacelle_base::Chain;
use nacelle_engine::Slot;
use nacelle_proto::pod;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::watch;
use tokio::task::AbortHandle;

/// A device or disk that the daemon offers for a container.
pub struct Offer {
    /// The id of the container.
    pub id: String,
    /// The device's path in the container, or the name of a disk.
    pub device: String,
    /// The open device or file.
    pub file: File,
}

/// A device that containers use.
pub(super) struct Held {
    placed: Arc<Placed>,
    attached: Attached,
    watcher: AbortHandle,
}

impl Actor {
    /// Keeps the offer until its container is created, or until it is withdrawn by the number in the reply.
    pub(super) fn offer(&mut self, offer: Offer, reply: Reply<u64>) {
        self.offered += 1;
        self.offers.insert(self.offered, offer);
        tell(reply, Ok(self.offered));
    }

    fn offer_of(&self, id: &str, device: &str) -> Option<u64> {
        // The newest offer counts: a daemon that was killed may have left an older one.
        let mut all = self.offers.iter().rev();
        let fits = |offer: &Offer| offer.id == id && offer.device == device;
        all.find(|(_, offer)| fits(offer)).map(|(number, _)| *number)
    }

    /// Checks whether a container can have the devices that it requests. Changes nothing.
    pub(super) fn check_devices(&self, request: &pod::CreateContainerRequest) -> Result<Option<Slot>, Failure> {
        let Some(first) = request.devices.first() else { return Ok(None) };
        let path = |device: &pod::BlockDevice| PathBuf::from(&device.path);
        for device in &request.devices {
            if self.offer_of(&request.id, &device.container_path).is_none() {
                return Err(PodError::from(DeviceError::NotOffered { path: path(device) }).into());
            }
        }
        let keys = request.devices.iter().map(|device| device.key.as_str());
        if let Err(key) = self.devices.room(keys) {
            let device = request.devices.iter().find(|device| device.key == key).unwrap_or(first);
            return Err(PodError::from(DeviceError::NoRoom { path: path(device) }).into());
        }
        let slot = self.volume_disk();
        slot.map(Some).ok_or_else(|| PodError::from(DeviceError::NoDisk { path: path(first) }).into())
    }

    /// Takes the disks that a container requests, by name: all of them, or none.
    pub(super) fn take_disks(&mut self, request: &pod::CreateContainerRequest) -> Result<Vec<(String, File)>, Failure> {
        let mut numbers = Vec::with_capacity(request.disks.len());
        for disk in &request.disks {
            let number = self.offer_of(&request.id, &disk.name).filter(|number| !numbers.contains(number));
            let none = || PodError::from(DeviceError::NotOffered { path: PathBuf::from(&disk.path) });
            numbers.push(number.ok_or_else(none)?);
        }
        let offers = numbers.into_iter().filter_map(|number| self.offers.remove(&number));
        Ok(offers.map(|offer| (offer.device, offer.file)).collect())
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
                Some(found) => uses.push(found),
                None => {
                    // `check_devices` has excluded this; nothing was attached yet.
                    for done in request.devices.iter().take(uses.len()) {
                        self.forget_device(&done.key);
                    }
                    return Err(PodError::from(DeviceError::NoRoom { path: PathBuf::from(&device.path) }).into());
                }
            }
        }
        Ok(uses)
    }

    fn acquire_device(&mut self, slot: Option<&Slot>, id: &str, device: &pod::BlockDevice) -> Option<DeviceUse> {
        let (slot, agent) = (slot?.clone(), self.agent.clone()?);
        let file = self.offer_of(id, &device.container_path).and_then(|number| self.offers.remove(&number))?.file;
        let held = self.held.get(&device.key);
        let failed = held.is_some_and(|held| matches!(*held.attached.borrow(), Some(Err(_))));
        let (number, change) = self.devices.acquire(&device.key, device.writable, failed)?;
        let (tell, attached) = watch::channel(None);
        let attach = |placed, before| DeviceAttach { placed, file, writable: device.writable, before, tell };
        if change == Change::New {
            let placed = Arc::new(Placed::new(slot, number, Path::new(&device.path), device.of_volume));
            let (watched, mut ready) = (Arc::clone(&placed), attached.clone());
            let watcher = tokio::spawn(async move {
                let known = ready.wait_for(Option::is_some).await.map(|outcome| matches!(*outcome, Some(Ok(()))));
                if known.unwrap_or(false) && watched.grows() {
                    devices::watch(agent, watched).await;
                }
            });
            let held =
                Held { placed: Arc::clone(&placed), attached: attached.clone(), watcher: watcher.abort_handle() };
            self.held.insert(device.key.clone(), held);
            return Some(DeviceUse { number, attach: Some(attach(placed, None)), attached });
        }
        let held = self.held.get_mut(&device.key)?;
        if change == Change::Nothing {
            return Some(DeviceUse { number, attach: None, attached: held.attached.clone() });
        }
        let before = std::mem::replace(&mut held.attached, attached.clone());
        let attach = attach(Arc::clone(&held.placed), Some(before).filter(|_| !failed));
        Some(DeviceUse { number, attach: Some(attach), attached })
    }

    /// Removes one user of a device whose attachment has not begun.
    pub(super) fn forget_device(&mut self, key: &str) {
        if let Some(number) = self.devices.release(key) {
            self.devices.free(number);
            if let Some(held) = self.held.remove(key) {
                held.watcher.abort();
            }
        }
    }

    /// Removes one user of a device; when the last is gone, detaches the device from the VM.
    pub(super) fn release_device(&mut self, key: &str) {
        let Some(number) = self.devices.release(key) else { return };
        let Some(held) = self.held.remove(key) else { return self.devices.free(number) };
        held.watcher.abort();
        let (agent, own) = (self.agent.clone(), self.own.clone());
        tokio::spawn(async move {
            match devices::detach(agent, held.placed).await {
                Ok(()) => send(&own, News::DeviceDetached(number)),
                Err(error) => tracing::warn!("a device stays attached: {}", Chain(&error)),
            }
        });
    }
}
