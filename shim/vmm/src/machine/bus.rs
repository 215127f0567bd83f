//! Routes an access to a port or to an address outside memory to the device at that address. The threads of all vCPUs call it
//! concurrently.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use crate::mmio::{EmptyWindow, Transport};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A device with registers. The threads of the vCPUs call it, several at once; it must not block.
pub trait BusDevice: Send + Sync {
    /// Handles a read of `data.len()` bytes (1, 2, 4 or 8) at `offset` into the device's range.
    fn read(&self, offset: u64, data: &mut [u8]);

    /// Handles a write of `data.len()` bytes (1, 2, 4 or 8) at `offset` into the device's range.
    fn write(&self, offset: u64, data: &[u8]);
}

impl BusDevice for Transport {
    fn read(&self, offset: u64, data: &mut [u8]) {
        Transport::read(self, offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        Transport::write(self, offset, data);
    }
}

impl BusDevice for EmptyWindow {
    fn read(&self, offset: u64, data: &mut [u8]) {
        EmptyWindow::read(*self, offset, data);
    }

    fn write(&self, _offset: u64, _data: &[u8]) {}
}

/// The devices of one address space. It does not change after the guest has started.
#[derive(Default)]
pub(super) struct DeviceBus {
    /// Length and device by first address. The ranges do not overlap.
    ranges: BTreeMap<u64, (u64, Arc<dyn BusDevice>)>,
}

impl DeviceBus {
    /// Inserts a device at `start`. The caller ensures that ranges do not overlap.
    pub fn insert(&mut self, start: u64, length: u64, device: Arc<dyn BusDevice>) {
        self.ranges.insert(start, (length, device));
    }

    /// Returns the device at `address` and the offset into its range. The whole access must lie in the range.
    fn find(&self, address: u64, length: usize) -> Option<(u64, &dyn BusDevice)> {
        let (start, (range, device)) = self.ranges.range(..=address).next_back()?;
        let offset = address - start;
        let end = offset.checked_add(length as u64)?;
        (end <= *range).then_some((offset, &**device))
    }

    /// Handles a read of the guest. Without a device at the address, it returns all ones.
    pub fn read(&self, address: u64, data: &mut [u8]) {
        match self.find(address, data.len()) {
            Some((offset, device)) => device.read(offset, data),
            None => data.fill(0xff),
        }
    }

    /// Handles a write of the guest. Without a device at the address, it is ignored.
    pub fn write(&self, address: u64, data: &[u8]) {
        if let Some((offset, device)) = self.find(address, data.len()) {
            device.write(offset, data);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::Mutex;

    /// Records the last access.
    #[derive(Default)]
    struct AccessRecorder(Mutex<Option<(u64, usize)>>);

    impl BusDevice for AccessRecorder {
        fn read(&self, offset: u64, data: &mut [u8]) {
            *self.0.lock().unwrap() = Some((offset, data.len()));
            data.fill(0x5a);
        }

        fn write(&self, offset: u64, data: &[u8]) {
            *self.0.lock().unwrap() = Some((offset, data.len()));
        }
    }

    proptest! {
        #[test]
        fn accesses_reach_the_device_of_their_range(
            address in prop_oneof![0u64..0x60, Just(u64::MAX), Just(u64::MAX - 3), any::<u64>()],
            width in prop_oneof![Just(1usize), Just(2), Just(4), Just(8)],
        ) {
            let recorders: [Arc<AccessRecorder>; 2] = Default::default();
            let mut bus = DeviceBus::default();
            for (recorder, start) in recorders.iter().zip([0x10, 0x30]) {
                bus.insert(start, 0x10, recorder.clone());
            }
            let mut data = vec![0; width];
            bus.read(address, &mut data);
            let within = |start: u64| address >= start && address <= start + 0x10 - width as u64;
            let want = if within(0x10) || within(0x30) { 0x5a } else { 0xff };
            prop_assert!(data.iter().all(|byte| *byte == want));
            for (recorder, start) in recorders.iter().zip([0x10, 0x30]) {
                let seen = recorder.0.lock().unwrap().take();
                prop_assert_eq!(seen, within(start).then(|| (address - start, width)));
            }
            bus.write(address, &data);
            for (recorder, start) in recorders.iter().zip([0x10, 0x30]) {
                prop_assert_eq!(recorder.0.lock().unwrap().is_some(), within(start));
            }
        }
    }
}
