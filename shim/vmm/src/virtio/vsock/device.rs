//! Implements [`Device`] for the vsock device.

use super::VsockState;
use super::worker::{VsockCommand, VsockThread};
use crate::virtio::{COMMON_FEATURES, Device, DeviceKind, DeviceState, Ring, StartError, StateError, read_config};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use virtio_queue::QueueState;

/// The device of a [`Vsock`](super::Vsock).
#[derive(Debug)]
pub(super) struct VsockDevice {
    guest_cid: u32,
    thread: Arc<VsockThread>,
}

impl VsockDevice {
    pub(super) fn new(guest_cid: u32, thread: Arc<VsockThread>) -> VsockDevice {
        VsockDevice { guest_cid, thread }
    }
}

impl Device for VsockDevice {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Vsock
    }

    fn features(&self) -> u64 {
        COMMON_FEATURES
    }

    fn queue_sizes(&self) -> &[u16] {
        &[256, 256, 256]
    }

    fn read_config(&self, offset: u32, data: &mut [u8]) {
        read_config(&u64::from(self.guest_cid).to_le_bytes(), offset, data);
    }

    fn start(&mut self, ring: Ring) -> Result<(), StartError> {
        let (device, index) = (self.kind(), ring.index());
        let thread_ended = || StartError::Thread { device, index, source: io::ErrorKind::BrokenPipe.into() };
        let (reply, result) = sync_channel(1);
        self.thread.send(VsockCommand::Start(ring, reply)).map_err(|_stopped| thread_ended())?;
        result.recv().unwrap_or_else(|_thread_ended| Err(thread_ended()))
    }

    fn stop(&mut self, index: u16) -> Option<QueueState> {
        let (reply, result) = sync_channel(1);
        self.thread.send(VsockCommand::Stop(index, reply)).ok()?;
        result.recv().ok()?
    }

    fn reset(&mut self) {
        for index in 0..=super::EVENT {
            self.stop(index);
        }
        let (reply, done) = sync_channel(1);
        if self.thread.send(VsockCommand::ResetDriver(reply)).is_ok() {
            let _ = done.recv(); // fails if the thread has ended, and all connections with it
        }
    }

    fn save(&self) -> DeviceState {
        DeviceState::Vsock(VsockState { guest_cid: self.guest_cid })
    }

    fn restore(&mut self, state: DeviceState) -> Result<(), StateError> {
        match state {
            DeviceState::Vsock(VsockState { guest_cid }) if guest_cid != self.guest_cid => {
                Err(StateError::differs(self.kind(), "guest_cid", guest_cid, self.guest_cid))
            }
            DeviceState::Vsock(_) => {
                // Fails only if the thread has ended; then no queue can be started either.
                let _ = self.thread.send(VsockCommand::Restore);
                Ok(())
            }
            other => Err(other.wrong(self.kind())),
        }
    }
}

impl Drop for VsockDevice {
    fn drop(&mut self) {
        self.reset();
    }
}
