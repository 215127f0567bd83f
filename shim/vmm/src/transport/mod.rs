//! Owns: the ways in which a machine reaches a device.
//! May use: the [`Device`](crate::Device) trait; knows no particular device.

pub mod mmio;
pub mod vhost_user;
