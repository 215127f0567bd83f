//! Owns: the host's handle to a console: where output goes, what waits to be read.
//! Threads: `sink` is held while it takes bytes, by the device's thread or (emergency writes) a vCPU's; the other
//! locks for moments only.

use super::Metrics;
use super::device::ConsoleDevice;
use crate::virtio::Device;
use crate::virtio::worker::Way;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// Takes what a guest prints. It must not block for long (the guest waits meanwhile) nor keep all of it.
pub type Sink = Box<dyn FnMut(&[u8]) + Send>;

/// The most bytes of input that wait for the guest.
pub const INPUT_BYTES: usize = 4096;

/// A console with one port, which Linux calls hvc0. Clones are handles to the same one.
#[derive(Clone, Debug)]
pub struct Console(Arc<Shared>);

/// What handle and device share.
pub(crate) struct Shared {
    pub(super) metrics: Metrics,
    sink: Mutex<Sink>,
    input: Mutex<VecDeque<u8>>,
    size: AtomicU32,
    pub(super) way: Arc<Way>,
}

impl Console {
    /// A console whose output goes to `sink`.
    pub fn new(sink: Sink) -> Console {
        Console(Arc::new(Shared {
            metrics: Metrics::default(),
            sink: Mutex::new(sink),
            input: Mutex::default(),
            size: AtomicU32::new(0),
            way: Arc::default(),
        }))
    }

    /// Types `bytes`; returns how many of them fitted. Try again later with the rest: the guest reads slowly.
    pub fn input(&self, bytes: &[u8]) -> usize {
        let mut input = lock(&self.0.input);
        let taken = bytes.len().min(INPUT_BYTES.saturating_sub(input.len()));
        input.extend(bytes.iter().take(taken));
        drop(input);
        self.0.way.ring();
        taken
    }

    /// Tells the guest how large the terminal is, in characters.
    pub fn resize(&self, columns: u16, rows: u16) {
        self.0.set_size(columns, rows);
        self.0.way.config_changed();
    }

    /// What it has done.
    pub fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn shared(&self) -> &Shared {
        &self.0
    }

    /// The device for a transport.
    pub fn device(&self) -> Box<dyn Device> {
        Box::new(ConsoleDevice::new(self.0.clone()))
    }
}

impl Shared {
    pub(super) fn set_size(&self, columns: u16, rows: u16) {
        self.size.store(u32::from(columns) | u32::from(rows) << 16, Ordering::SeqCst);
    }

    /// Columns and rows, as the configuration space has them.
    pub(super) fn size(&self) -> [u8; 4] {
        self.size.load(Ordering::SeqCst).to_le_bytes()
    }

    /// The next input, at most `room` bytes; `None` if there is none.
    pub(super) fn next_input(&self, room: usize) -> Option<Vec<u8>> {
        let mut input = lock(&self.input);
        let count = input.len().min(room);
        (!input.is_empty()).then(|| input.drain(..count).collect())
    }

    /// Takes what the guest has printed.
    pub(super) fn print(&self, bytes: &[u8]) {
        self.metrics.output_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        lock(&self.sink)(bytes);
    }
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("metrics", &self.metrics).finish_non_exhaustive()
    }
}
