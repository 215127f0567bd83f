//! Owns: the file-system device (virtio-fs; VIRTIO 1.2, 5.11): its requests go as bytes over a stream to another process,
//! which has the files, and its answers come back; or that process serves the queues itself, in memory that is shared with
//! it. Here is nothing that opens a file. docs/contributor/devices/fs.md.
//! Threads: one a queue. Requests are answered one after the other; short ones are passed on ahead of that.

#[cfg(test)]
pub(crate) mod borrower;
mod channel;
mod device;
mod lend;
mod metrics;
mod part;
#[cfg(test)]
mod tests;

pub use device::Fs;
pub use metrics::Metrics;
