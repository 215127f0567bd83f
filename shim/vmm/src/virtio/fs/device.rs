//! Owns: the file-system device as a transport sees it.

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

/// The bytes that the configuration space has for the tag; the number of request queues follows.
const TAG_ROOM: usize = 36;
/// What it shares with its driver: the least that our guests' kernel takes, some requests of 496 KiB and many small ones.
const SHARED_BYTES: u64 = 2 << 20;

/// The file-system device. Its queues are for requests of high priority, and for the others.
#[derive(Debug)]
pub struct Fs {
    metrics: Arc<Metrics>,
    lends: bool,
    /// A queue's thread holds its own while it runs.
    channels: [Arc<Mutex<Channel>>; QUEUES],
    threads: [Option<QueueThread>; QUEUES],
}

impl Fs {
    /// A device whose requests are answered at the other ends of these streams, one for each queue.
    pub fn new(streams: [UnixStream; QUEUES]) -> io::Result<Fs> {
        let metrics = Arc::new(Metrics::default());
        let [first, second] = streams;
        let channel = |stream| Ok::<_, io::Error>(Arc::new(Mutex::new(Channel::new(stream, metrics.clone())?)));
        let channels = [channel(first)?, channel(second)?];
        Ok(Fs { metrics, lends: false, channels, threads: [None, None] })
    }

    /// A device that shows one part of the volumes (`nacelle_base::share::part`); the process at the other ends must be one that
    /// shows parts. Blocks until it has said that the part is there.
    pub fn of_part(streams: [UnixStream; QUEUES], part: &str) -> io::Result<Fs> {
        let [first, _] = &streams;
        show(first, part)?;
        Fs::new(streams)
    }

    /// The same; queues that lie in memory that can be shared, the guest's own or the device's ([`Device::shared_memory`]), are
    /// served by the process at the other ends itself, which gets that memory, too.
    pub fn lending(mut self) -> Fs {
        self.lends = true;
        self
    }

    /// What it has done; stays readable after the device is given away.
    pub fn metrics(&self) -> Arc<Metrics> {
        self.metrics.clone()
    }

    /// The device for a transport.
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
