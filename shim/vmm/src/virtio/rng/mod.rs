//! Owns: the virtio entropy device: random bytes from the host's kernel.

mod device;
pub use device::Rng;
