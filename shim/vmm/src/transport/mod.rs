//! Contains the transports, through which a guest or a front end drives a device. They use only the [`Device`](crate::Device)
//! trait and know no particular device.

pub mod mmio;
pub mod vhost_user;
