//! Defines the state of a block device that is saved and restored, and checks it against a slot.

use super::extent_map::MAX_CAPACITY;
use super::slot::SlotInner;
use crate::virtio::{DeviceKind, StateError};
use serde::{Deserialize, Serialize};

/// The properties of a block device that the guest knows. The content of the disk is not part of the state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockState {
    /// The serial number.
    pub serial: String,
    /// Whether the disk is read-only for the guest.
    pub read_only: bool,
    /// The capacity in bytes.
    pub capacity: u64,
}

impl BlockState {
    pub(super) fn of(inner: &SlotInner) -> BlockState {
        let view = inner.view();
        BlockState { serial: inner.serial.clone(), read_only: view.is_read_only(), capacity: view.capacity() }
    }

    /// Checks that a slot can take the role of the saved one: the same disk, and a file at least as large as before. A slot for
    /// placed ranges can be enlarged to its old size; its ranges read as zeros until they are placed again.
    pub(super) fn check(&self, inner: &SlotInner) -> Result<(), StateError> {
        let here = BlockState::of(inner);
        let differs = |what, saved: &dyn ToString, now: &dyn ToString| {
            Err(StateError::differs(DeviceKind::Block, what, saved.to_string(), now.to_string()))
        };
        if self.serial != here.serial {
            return differs("serial", &self.serial, &here.serial);
        }
        if self.read_only != here.read_only {
            return differs("read_only", &self.read_only, &here.read_only);
        }
        let most = if inner.view().extents().is_some() { MAX_CAPACITY } else { here.capacity };
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
        let state = BlockState { serial: slot.serial().to_owned(), read_only, capacity };
        slot.device().restore(DeviceState::Block(state))
    }

    #[test]
    fn an_image_disk_is_restored_with_its_old_capacity() {
        let slot = Slot::read_only("images").unwrap();
        restore(&slot, true, 3 << 20).unwrap();
        assert_eq!(slot.capacity(), 3 << 20);
        restore(&slot, true, 1 << 20).unwrap();
        assert_eq!(slot.capacity(), 3 << 20);
        assert!(matches!(restore(&slot, true, u64::MAX), Err(StateError::Differs { what: "capacity", .. })));
        assert!(matches!(restore(&slot, false, 0), Err(StateError::Differs { what: "read_only", .. })));
    }

    #[test]
    fn a_restored_file_must_not_be_smaller() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let slot = Slot::read_write("scratch", file.path(), 4096).unwrap();
        restore(&slot, false, 4096).unwrap();
        assert!(matches!(restore(&slot, false, 8192), Err(StateError::Differs { what: "capacity", .. })));
        assert_eq!(slot.capacity(), 4096);
    }
}
