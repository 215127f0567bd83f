//! Defines the state of a transport that survives save and restore, and the errors of restoring it.

use super::shared::SharedPage;
use crate::virtio::{DeviceKind, DeviceState, StateError};
use nacelle_base::{Classify, FailureKind};
use serde::{Deserialize, Serialize};

/// The state of a transport and its device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportState {
    /// The registers as the driver has written them.
    pub registers: Registers,
    /// The interrupts that the driver has not acknowledged.
    pub interrupts: u32,
    /// The register ConfigGeneration.
    pub generation: u32,
    /// The configuration space as last compared, without trailing zeros.
    pub config: Vec<u8>,
    /// The configuration space has changed since the driver read it, and the driver has not been notified.
    #[serde(rename = "config_untold")]
    pub config_change_pending: bool,
    /// The non-zero pages of the device's shared memory region (VIRTIO 1.2, section 2.10).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shared: Vec<SharedPage>,
    /// The state of the device itself.
    pub device: DeviceState,
}

/// The registers that retain the values that the driver writes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registers {
    /// The register Status.
    pub status: u32,
    /// The features of words 0 and 1 that the driver has accepted.
    pub features: u64,
    /// The driver has accepted features of words that do not exist.
    pub excess_features: bool,
    /// The register DeviceFeaturesSel.
    pub device_features_select: u32,
    /// The register DriverFeaturesSel.
    pub driver_features_select: u32,
    /// The register QueueSel.
    pub queue_select: u32,
    /// The register SHMSel.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub shared_select: u32,
    /// The registers of each queue.
    pub queues: Vec<QueueRegisters>,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// The registers of one queue, and the position of the device in it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueRegisters {
    /// The register QueueNum, not validated.
    pub size: u32,
    /// The register QueueDesc: the address of the descriptor table.
    pub descriptors: u64,
    /// The register QueueDriver: the address of the available ring.
    pub available: u64,
    /// The register QueueDevice: the address of the used ring.
    pub used: u64,
    /// The register QueueReady. If set, size and addresses are valid.
    pub ready: bool,
    /// The index of the next entry of the available ring that the device reads.
    pub next_available: u16,
    /// The index of the next entry of the used ring that the device writes.
    pub next_used: u16,
}

/// A transport cannot be restored from a saved state.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The state is invalid in itself, or for this device and memory.
    #[error("the saved state of a {device} device's transport has {what} {value:#x}")]
    Invalid {
        /// The device.
        device: DeviceKind,
        /// The invalid property.
        what: &'static str,
        /// The value of the property.
        value: u64,
    },
    /// The device rejected its part of the state.
    #[error("cannot restore a device")]
    Device(#[from] StateError),
}

impl Classify for RestoreError {
    fn kind(&self) -> FailureKind {
        match self {
            RestoreError::Invalid { .. } => FailureKind::Invalid,
            RestoreError::Device(source) => source.kind(),
        }
    }
}
