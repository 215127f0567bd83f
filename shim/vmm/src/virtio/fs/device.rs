//! Implements [`Device`] for the file-system device.

use super::connection::FileServerConnection;
use super::metrics::FsMetrics;
use super::volume::select_volume;
use crate::virtio::queue_thread::{QueueThread, serve};
use crate::virtio::ring::Request;
use crate::virtio::{
    COMMON_FEATURES, Device, DeviceKind, DeviceState, Memory, Ring, StartError, StateError, read_config,
};
use nacelle_base::share::{QUEUE_SIZE, QUEUES, TAG};
use nacelle_jail::ThreadKind;
use std::cell::RefCell;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use virtio_queue::QueueState;

/// The size of the field `tag` in the configuration space; the number of request queues follows it.
const TAG_BYTES: usize = 36;
/// The size of the memory that the device shares with its driver: the minimum that Nacelle's guest kernel accepts, enough for
/// some requests of 496 KiB and many small ones.
const SHARED_BYTES: u64 = 2 << 20;

/// The file-system device. It has one queue for high-priority requests and one for the others.
#[derive(Debug)]
pub struct Fs {
    metrics: Arc<FsMetrics>,
    shares_queues: bool,
    /// Locked by a queue's thread while it runs.
    connections: [Arc<Mutex<FileServerConnection>>; QUEUES],
    threads: [Option<QueueThread>; QUEUES],
}

impl Fs {
    /// Creates a device whose requests are answered at the other ends of these streams, one per queue.
    pub fn new(streams: [UnixStream; QUEUES]) -> io::Result<Fs> {
        let metrics = Arc::new(FsMetrics::default());
        let [first, second] = streams;
        let connection =
            |stream| Ok::<_, io::Error>(Arc::new(Mutex::new(FileServerConnection::new(stream, metrics.clone())?)));
        let connections = [connection(first)?, connection(second)?];
        Ok(Fs { metrics, shares_queues: false, connections, threads: [None, None] })
    }

    /// Creates a device for one part of the volumes (`nacelle_base::share::volume_name`). The process at the other ends must support
    /// parts. Blocks until it has confirmed that the part exists.
    pub fn for_volume(streams: [UnixStream; QUEUES], volume: &str) -> io::Result<Fs> {
        let [first, _] = &streams;
        select_volume(first, volume)?;
        Fs::new(streams)
    }

    /// Shares queues with the process at the other ends, which then serves them directly, if they lie in shared memory: the
    /// guest's own or the device's ([`Device::shared_memory`]). That process receives this memory.
    pub fn sharing_queues(mut self) -> Fs {
        self.shares_queues = true;
        self
    }

    /// Returns the counters, which remain readable after the device has been passed to a transport.
    pub fn metrics(&self) -> Arc<FsMetrics> {
        self.metrics.clone()
    }

    /// Returns the device for a transport.
    pub fn device(self) -> Box<dyn Device> {
        Box::new(self)
    }
}

impl Device for Fs {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Fs
    }

    fn features(&self) -> u64 {
        COMMON_FEATURES
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE; QUEUES]
    }

    fn shared_memory(&self) -> u64 {
        if self.shares_queues { SHARED_BYTES } else { 0 }
    }

    fn read_config(&self, offset: u32, data: &mut [u8]) {
        let mut config = TAG.as_bytes().to_vec();
        config.resize(TAG_BYTES, 0);
        config.extend(1u32.to_le_bytes());
        read_config(&config, offset, data);
    }

    fn start(&mut self, ring: Ring) -> Result<(), StartError> {
        let (device, index) = (self.kind(), ring.index());
        let slot = self.threads.get_mut(usize::from(index)).zip(self.connections.get(usize::from(index)));
        let Some((thread, connection)) = slot else { return Err(StartError::NoSuchQueue { device, index }) };
        if thread.is_some() {
            return Err(StartError::Running { device, index });
        }
        let connection = Arc::clone(connection);
        let shares_queues = self.shares_queues;
        let serve_ring = move |mut ring, stop: &_| {
            let mut connection = connection.lock().unwrap_or_else(PoisonError::into_inner);
            if shares_queues && connection.share_queue(&ring) {
                connection.wait_while_shared(&mut ring, stop);
            }
            let connection = RefCell::new(connection);
            let begin = |memory: &Memory, request: Request| {
                connection.borrow_mut().send_early(memory, &request.buffers);
                Err::<u32, Request>(request)
            };
            serve(ring, stop, begin, |memory, request| connection.borrow_mut().exchange(memory, &request.buffers, stop))
        };
        let name = if index == 0 { "fs-first" } else { "fs" };
        let started = QueueThread::run(name, ThreadKind::Share, ring, serve_ring);
        *thread = Some(started.map_err(|source| StartError::Thread { device, index, source })?);
        Ok(())
    }

    fn stop(&mut self, index: u16) -> Option<QueueState> {
        self.threads.get_mut(usize::from(index))?.take()?.stop()
    }

    fn reset(&mut self) {
        for thread in self.threads.iter_mut().filter_map(Option::take) {
            thread.stop();
        }
    }

    fn save(&self) -> DeviceState {
        DeviceState::Fs
    }

    fn restore(&mut self, state: DeviceState) -> Result<(), StateError> {
        match state {
            DeviceState::Fs => Ok(()),
            other => Err(other.wrong(self.kind())),
        }
    }
}

impl Drop for Fs {
    fn drop(&mut self) {
        self.reset();
    }
}
