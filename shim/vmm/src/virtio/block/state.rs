//! Owns: what a block device keeps over a save and restore, and whether a slot can go on from it.

use super::slot::Shared;
use crate::virtio::{DeviceKind, StateError};
use serde::{Deserialize, Serialize};

/// The state of a block device: what the guest knows of it. Its content is the host's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// The serial number.
    pub serial: String,
    /// Whether the guest may not write.
    pub read_only: bool,
    /// Bytes.
    pub capacity: u64,
}

impl State {
    pub(super) fn of(shared: &Shared) -> State {
        let view = shared.view();
        State { serial: shared.serial.clone(), read_only: view.is_read_only(), capacity: view.capacity() }
    }

    /// Whether a slot is as the guest knows it: the same disk, no smaller than it was.
    pub(super) fn check(&self, shared: &Shared) -> Result<(), StateError> {
        let here = State::of(shared);
        let differs = |what, saved: &dyn ToString, now: &dyn ToString| {
            Err(StateError::differs(DeviceKind::Block, what, saved.to_string(), now.to_string()))
        };
        if self.serial != here.serial {
            return differs("serial", &self.serial, &here.serial);
        }
        if self.read_only != here.read_only {
            return differs("read_only", &self.read_only, &here.read_only);
        }
        if self.capacity > here.capacity {
            return differs("capacity", &self.capacity, &here.capacity);
        }
        Ok(())
    }
}
