//! Owns: what a transport keeps over a save and restore, and why it cannot go on from it.

use super::shared::SharedPage;
use crate::virtio::{DeviceKind, DeviceState, StateError};
use nacelle_base::{Classify, Kind};
use serde::{Deserialize, Serialize};

/// The state of a transport and its device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportState {
    /// What the driver has written.
    pub registers: Registers,
    /// Interrupts that the driver has not acknowledged.
    pub interrupts: u32,
    /// ConfigGeneration.
    pub generation: u32,
    /// The configuration space as the driver knows it, without the zeros at its end.
    pub config: Vec<u8>,
    /// The configuration space has changed since the driver read it, and the driver was not told.
    pub config_untold: bool,
    /// What is in the memory that the device shares with its driver.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shared: Vec<SharedPage>,
    /// The device's own.
    pub device: DeviceState,
}

/// The registers that keep what the driver writes to them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registers {
    /// Status.
    pub status: u32,
    /// The features of words 0 and 1 that the driver has accepted.
    pub features: u64,
    /// The driver has accepted features of words that do not exist.
    pub excess_features: bool,
    /// DeviceFeaturesSel.
    pub device_features_select: u32,
    /// DriverFeaturesSel.
    pub driver_features_select: u32,
    /// QueueSel.
    pub queue_select: u32,
    /// SHMSel.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub shared_select: u32,
    /// Each queue's.
    pub queues: Vec<QueueRegisters>,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// What the driver has written for one queue, and how far the device has come with it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueRegisters {
    /// QueueSize, whatever the driver wrote.
    pub size: u32,
    /// QueueDesc: where the descriptors lie.
    pub descriptors: u64,
    /// QueueDriver: where the available ring lies.
    pub available: u64,
    /// QueueDevice: where the used ring lies.
    pub used: u64,
    /// QueueReady; then size and addresses are valid.
    pub ready: bool,
    /// The next entry of the available ring that the device looks at.
    pub next_available: u16,
    /// The next entry of the used ring that the device writes.
    pub next_used: u16,
}

/// A transport cannot go on from a saved state.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The state makes no sense, or none with this device and memory.
    #[error("the saved state of a {device} device's transport has {what} {value:#x}")]
    Invalid {
        /// The device.
        device: DeviceKind,
        /// What is wrong.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// The device cannot go on from its part.
    #[error("cannot restore a device")]
    Device(#[from] StateError),
}

impl Classify for RestoreError {
    fn kind(&self) -> Kind {
        match self {
            RestoreError::Invalid { .. } => Kind::Invalid,
            RestoreError::Device(source) => source.kind(),
        }
    }
}
