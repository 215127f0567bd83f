//! Owns: what devices keep over a save and restore, and why one cannot go on from it.

use super::{DeviceKind, balloon, block, console, net, vsock};
use nacelle_base::{Classify, Kind};
use serde::{Deserialize, Serialize};

/// The state of a device, without its queues (those are the transport's) and without what the host gave it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceState {
    /// Of a balloon.
    Balloon(balloon::State),
    /// Of a file-system device: nothing. Files that the guest had open are not open again.
    Fs,
    /// Of a disk.
    Block(block::State),
    /// Of a console.
    Console(console::State),
    /// Of a network interface.
    Net(net::State),
    /// Of an entropy source: nothing.
    Rng,
    /// Of a socket device.
    Vsock(vsock::State),
}

impl DeviceState {
    /// The device that it belongs to.
    pub fn kind(&self) -> DeviceKind {
        match self {
            DeviceState::Balloon(_) => DeviceKind::Balloon,
            DeviceState::Fs => DeviceKind::Fs,
            DeviceState::Block(_) => DeviceKind::Block,
            DeviceState::Console(_) => DeviceKind::Console,
            DeviceState::Net(_) => DeviceKind::Net,
            DeviceState::Rng => DeviceKind::Rng,
            DeviceState::Vsock(_) => DeviceKind::Vsock,
        }
    }

    /// The error of a `device` that was given this state of another kind.
    pub(crate) fn wrong(&self, device: DeviceKind) -> StateError {
        StateError::Kind { device, state: self.kind() }
    }
}

/// A device cannot go on from a saved state.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// It is the state of another sort of device.
    #[error("a {device} device cannot go on as a {state} device")]
    Kind {
        /// The device.
        device: DeviceKind,
        /// What the state is of.
        state: DeviceKind,
    },
    /// The device is not as the guest knows it.
    #[error("the guest knows a {device} device with {what} {saved}, it has {here}")]
    Differs {
        /// The device.
        device: DeviceKind,
        /// What differs.
        what: &'static str,
        /// What it was.
        saved: String,
        /// What it is.
        here: String,
    },
}

impl StateError {
    /// The error for a property that is not as it was.
    pub(crate) fn differs(
        device: DeviceKind,
        what: &'static str,
        saved: impl ToString,
        here: impl ToString,
    ) -> StateError {
        StateError::Differs { device, what, saved: saved.to_string(), here: here.to_string() }
    }
}

impl Classify for StateError {
    fn kind(&self) -> Kind {
        match self {
            StateError::Kind { .. } => Kind::Invalid,
            StateError::Differs { .. } => Kind::Conflict,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_survive_being_written() {
        let block = block::State { serial: "images".into(), read_only: true, capacity: 1 << 20 };
        let states = [
            DeviceState::Balloon(balloon::State { target: 512, actual: 7 }),
            DeviceState::Block(block),
            DeviceState::Console(console::State { columns: 80, rows: 25 }),
            DeviceState::Net(net::State { mac: [2, 0, 0, 0, 0, 1], max_pairs: 4, pairs: 2, offloads: 0x182 }),
            DeviceState::Rng,
            DeviceState::Fs,
            DeviceState::Vsock(vsock::State { guest_cid: 3 }),
        ];
        for state in states {
            let written = serde_json::to_vec(&state).unwrap();
            assert_eq!(serde_json::from_slice::<DeviceState>(&written).unwrap(), state);
        }
    }
}
