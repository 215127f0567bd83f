//! Implements [`Device`] for the file-system device.

use super::channel::Channel;
use super::metrics::Metrics;
use super::part::show;
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
const TAG_ROOM: usize = 36;
/// The size of the memory that the device shares with its driver: the minimum that Nacelle's guest kernel accepts, enough for
/// some requests of 496 KiB and many small ones.
const SHARED_BYTES: u64 = 2 << 20;

/// The file-system device. It has one queue for high-priority requests and one for the others.
#[derive(Debug)]
pub struct Fs {
    metrics: Arc<Metrics>,
    lends: bool,
    /// Locked by a queue's thread while it runs.
    channels: [Arc<Mutex<Channel>>; QUEUES],
    threads: [Option<QueueThread>; QUEUES],
}

impl Fs {
    /// Creates a device whose requests are answered at the other ends of these streams, one per queue.
    pub fn new(streams: [UnixStream; QUEUES]) -> io::Result<Fs> {
        let metrics = Arc::new(Metrics::default());
        let [first, second] = streams;
        let channel = |stream| Ok::<_, io::Error>(Arc::new(Mutex::new(Channel::new(stream, metrics.clone())?)));
        let channels = [channel(first)?, channel(second)?];
        Ok(Fs { metrics, lends: false, channels, threads: [None, None] })
    }

    /// Creates a device for one part of the volumes (`nacelle_base::share::volume_name`). The process at the other ends must support
    /// parts. Blocks until it has confirmed that the part exists.
    pub fn of_part(streams: [UnixStream; QUEUES], part: &str) -> io::Result<Fs> {
        let [first, _] = &streams;
        show(first, part)?;
        Fs::new(streams)
    }

    /// Shares queues with the process at the other ends, which then serves them directly, if they lie in shared memory: the
    /// guest's own or the device's ([`Device::shared_memory`]). That process receives this memory.
    pub fn lending(mut self) -> Fs {
        self.lends = true;
        self
    }

    /// Returns the counters, which remain readable after the device has been passed to a transport.
    pub fn metrics(&self) -> Arc<Metrics> {
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
        if self.lends { SHARED_BYTES } else { 0 }
    }

    fn read_config(&self, offset: u32, data: &mut [u8]) {
        let mut config = TAG.as_bytes().to_vec();
        config.resize(TAG_ROOM, 0);
        config.extend(1u32.to_le_bytes());
        read_config(&config, offset, data);
    }

    fn start(&mut self, ring: Ring) -> Result<(), StartError> {
        let (device, index) = (self.kind(), ring.index());
        let slot = self.threads.get_mut(usize::from(index)).zip(self.channels.get(usize::from(index)));
        let Some((thread, channel)) = slot else { return Err(StartError::NoSuchQueue { device, index }) };
        if thread.is_some() {
            return Err(StartError::Running { device, index });
        }
        let channel = Arc::clone(channel);
        let lends = self.lends;
        let work = move |mut ring, stop: &_| {
            let mut channel = channel.lock().unwrap_or_else(PoisonError::into_inner);
            if lends && channel.lend(&ring) {
                channel.hold(&mut ring, stop);
            }
            let channel = RefCell::new(channel);
            let begin = |memory: &Memory, request: Request| {
                channel.borrow_mut().begin(memory, &request.buffers);
                Err::<u32, Request>(request)
            };
            serve(ring, stop, begin, |memory, request| channel.borrow_mut().finish(memory, &request.buffers, stop))
        };
        let name = if index == 0 { "fs-first" } else { "fs" };
        let started = QueueThread::run(name, ThreadKind::Share, ring, work);
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
