//! Defines the state of a block device that is saved and restored, and checks it against a slot.

use super::slot::Shared;
use super::table::MAX_CAPACITY;
use crate::virtio::{DeviceKind, StateError};
use serde::{Deserialize, Serialize};

/// The properties of a block device that the guest knows. The content of the disk is not part of the state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// The serial number.
    pub serial: String,
    /// Whether the disk is read-only for the guest.
    pub read_only: bool,
    /// The capacity in bytes.
    pub capacity: u64,
}

impl State {
    pub(super) fn of(shared: &Shared) -> State {
        let view = shared.view();
        State { serial: shared.serial.clone(), read_only: view.is_read_only(), capacity: view.capacity() }
    }

    /// Checks that a slot can take the role of the saved one: the same disk, and a file at least as large as before. A slot for
    /// placed ranges can be enlarged to its old size; its ranges read as zeros until they are placed again.
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
        let most = if shared.view().table().is_some() { MAX_CAPACITY } else { here.capacity };
        if self.capacity > most {
            return differs("capacity", &self.capacity, &here.capacity);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::virtio::DeviceState;
    use crate::virtio::block::Slot;

    fn restore(slot: &Slot, read_only: bool, capacity: u64) -> Result<(), StateError> {
        let state = State { serial: slot.serial().to_owned(), read_only, capacity };
        slot.device().restore(DeviceState::Block(state))
    }

    #[test]
    fn a_disk_of_images_is_as_large_as_it_was_before_they_are_placed_again() {
        let slot = Slot::read_only("images").unwrap();
        restore(&slot, true, 3 << 20).unwrap();
        assert_eq!(slot.capacity(), 3 << 20);
        restore(&slot, true, 1 << 20).unwrap();
        assert_eq!(slot.capacity(), 3 << 20);
        assert!(matches!(restore(&slot, true, u64::MAX), Err(StateError::Differs { what: "capacity", .. })));
        assert!(matches!(restore(&slot, false, 0), Err(StateError::Differs { what: "read_only", .. })));
    }

    #[test]
    fn a_file_must_be_as_large_as_it_was() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let slot = Slot::read_write("scratch", file.path(), 4096).unwrap();
        restore(&slot, false, 4096).unwrap();
        assert!(matches!(restore(&slot, false, 8192), Err(StateError::Differs { what: "capacity", .. })));
        assert_eq!(slot.capacity(), 4096);
    }
}
