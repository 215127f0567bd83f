//! Defines the state that devices save and restore, and the errors of restoring it.

use super::{DeviceKind, balloon, block, console, net, vsock};
use nacelle_base::{Classify, FailureKind};
use serde::{Deserialize, Serialize};

/// The state of a device, without its queues (the transport saves them) and without the resources that the host provided.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceState {
    /// The state of a balloon.
    Balloon(balloon::BalloonState),
    /// The state of a file-system device, which is empty. Files that the guest had open are not reopened.
    Fs,
    /// The state of a block device.
    Block(block::BlockState),
    /// The state of a console.
    Console(console::ConsoleState),
    /// The state of a network interface.
    Net(net::NetState),
    /// The state of an entropy source, which is empty.
    Rng,
    /// The state of a socket device.
    Vsock(vsock::VsockState),
}

impl DeviceState {
    /// Returns the kind of device that the state belongs to.
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

    /// Returns the error for a `device` that received this state of another kind.
    pub(crate) fn wrong(&self, device: DeviceKind) -> StateError {
        StateError::FailureKind { device, state: self.kind() }
    }
}

/// A device cannot be restored from a saved state.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The state belongs to another kind of device.
    #[error("a {device} device cannot go on as a {state} device")]
    FailureKind {
        /// The kind of the device.
        device: DeviceKind,
        /// The kind that the state belongs to.
        state: DeviceKind,
    },
    /// A property of the device differs from the saved one.
    #[error("the guest knows a {device} device with {what} {saved}, it has {here}")]
    Differs {
        /// The kind of the device.
        device: DeviceKind,
        /// The property.
        what: &'static str,
        /// The saved value.
        saved: String,
        /// The value of this device.
        here: String,
    },
}

impl StateError {
    /// Returns the error for a property that differs.
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
    fn kind(&self) -> FailureKind {
        match self {
            StateError::FailureKind { .. } => FailureKind::Invalid,
            StateError::Differs { .. } => FailureKind::Conflict,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_survive_being_written() {
        let block = block::BlockState { serial: "images".into(), read_only: true, capacity: 1 << 20 };
        let states = [
            DeviceState::Balloon(balloon::BalloonState { target: 512, actual: 7 }),
            DeviceState::Block(block),
            DeviceState::Console(console::ConsoleState { columns: 80, rows: 25 }),
            DeviceState::Net(net::NetState { mac: [2, 0, 0, 0, 0, 1], max_pairs: 4, pairs: 2, offloads: 0x182 }),
            DeviceState::Rng,
            DeviceState::Fs,
            DeviceState::Vsock(vsock::VsockState { guest_cid: 3 }),
        ];
        for state in states {
            let written = serde_json::to_vec(&state).unwrap();
            assert_eq!(serde_json::from_slice::<DeviceState>(&written).unwrap(), state);
        }
    }
}
