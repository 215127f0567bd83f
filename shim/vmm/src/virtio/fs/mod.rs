//! Implements the file-system device (virtio-fs; VIRTIO 1.2, 5.11). Its requests are sent as bytes over a stream to the file-server
//! process, which returns the answers; or that process serves the queues itself, in shared memory. No code here opens a file. See
//! docs/contributor/devices/fs.md. Each queue has a thread, which answers requests one after the other; short requests are sent ahead.

mod connection;
mod device;
#[cfg(test)]
pub(crate) mod file_server_peer;
mod metrics;
mod shared_queue;
#[cfg(test)]
mod tests;
mod volume;

pub use device::Fs;
pub use metrics::FsMetrics;
