//! Implements virtio devices, the transports through which a guest or a front end drives them, and VMs on KVM. Of Nacelle's
//! crates it uses only `nacelle-base` and `nacelle-jail`; it does not know the engines, the pods or QEMU.
//!
//! A device ([`block`], [`vsock`], [`rng`], [`balloon`], [`console`]) is a backend over guest memory and queues and implements
//! [`Device`]. A transport ([`mmio`], [`vhost_user`]) owns the queues and hands each one to the device while it is served.
//!
//! ```no_run
//! use nacelle_vmm::{block::Slot, vhost_user, vsock::Vsock};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let images = Slot::read_only("images")?;
//! let server = vhost_user::serve(images.device(), std::os::unix::net::UnixListener::bind("/run/x/images.sock")?)?;
//! let vsock = Vsock::new(3)?;
//! let agent = vsock.listen(1024)?;
//! // … start the VM, then:
//! images.place(0, &nacelle_base::machine::ImageDisk::default())?;
//! server.stop();
//! # Ok(()) }
//! ```

#[doc(hidden)]
#[cfg(any(test, feature = "fuzz"))]
#[doc(hidden)]
pub mod fuzz;
pub mod hotplug;
pub mod machine;
pub mod snapshot;
pub mod transport;
pub mod virtio;

mod pages;
mod sys;
#[cfg(any(test, feature = "fuzz"))]
#[allow(dead_code, reason = "the tests in tests/ use the rest")]
mod testing;

pub use transport::{mmio, vhost_user};
pub use virtio::{
    Device, DeviceKind, DeviceState, Interrupt, Memory, Ring, StartError, StateError, balloon, block, console, fs, net,
    rng, vsock,
};
