//! Defines the host's handle to a console: the sink of its output and the queue of its input. The lock `sink` is held during a
//! call of the sink, by the device's thread or (emergency writes) a vCPU's thread; the other locks are held only briefly.

use super::ConsoleMetrics;
use super::device::ConsoleDevice;
use crate::virtio::Device;
use crate::virtio::worker::DeviceNotifier;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// Receives the guest's output. It must not block for long, because the guest waits meanwhile, and must not store an unlimited amount.
pub type ConsoleSink = Box<dyn FnMut(&[u8]) + Send>;

/// The maximum number of input bytes that wait for the guest.
pub const INPUT_BYTES: usize = 4096;

/// A console with one port, which Linux calls hvc0. Clones are handles to the same console.
#[derive(Clone, Debug)]
pub struct VirtioConsole(Arc<ConsoleInner>);

/// The state that handle and device share.
pub(crate) struct ConsoleInner {
    pub(super) metrics: ConsoleMetrics,
    sink: Mutex<ConsoleSink>,
    input: Mutex<VecDeque<u8>>,
    size: AtomicU32,
    pub(super) notifier: Arc<DeviceNotifier>,
}

impl VirtioConsole {
    /// Creates a console whose output goes to `sink`.
    pub fn new(sink: ConsoleSink) -> VirtioConsole {
        VirtioConsole(Arc::new(ConsoleInner {
            metrics: ConsoleMetrics::default(),
            sink: Mutex::new(sink),
            input: Mutex::default(),
            size: AtomicU32::new(0),
            notifier: Arc::default(),
        }))
    }

    /// Queues `bytes` as input. Returns the number of bytes that fitted; the caller should retry later with the rest.
    pub fn input(&self, bytes: &[u8]) -> usize {
        let mut input = lock(&self.0.input);
        let accepted = bytes.len().min(INPUT_BYTES.saturating_sub(input.len()));
        input.extend(bytes.iter().take(accepted));
        drop(input);
        self.0.notifier.wake_thread();
        accepted
    }

    /// Reports the size of the terminal to the guest, in characters.
    pub fn resize(&self, columns: u16, rows: u16) {
        self.0.set_size(columns, rows);
        self.0.notifier.notify_config();
    }

    /// Returns the counters.
    pub fn metrics(&self) -> &ConsoleMetrics {
        &self.0.metrics
    }

    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn inner(&self) -> &ConsoleInner {
        &self.0
    }

    /// Returns the device for a transport.
    pub fn device(&self) -> Box<dyn Device> {
        Box::new(ConsoleDevice::new(self.0.clone()))
    }
}

impl ConsoleInner {
    pub(super) fn set_size(&self, columns: u16, rows: u16) {
        self.size.store(u32::from(columns) | u32::from(rows) << 16, Ordering::SeqCst);
    }

    /// Returns columns and rows in the encoding of the configuration space.
    pub(super) fn size(&self) -> [u8; 4] {
        self.size.load(Ordering::SeqCst).to_le_bytes()
    }

    /// Takes the next input, at most `max_bytes` bytes. Returns `None` if there is none.
    pub(super) fn next_input(&self, max_bytes: usize) -> Option<Vec<u8>> {
        let mut input = lock(&self.input);
        let count = input.len().min(max_bytes);
        (!input.is_empty()).then(|| input.drain(..count).collect())
    }

    /// Passes the guest's output to the sink.
    pub(super) fn print(&self, bytes: &[u8]) {
        self.metrics.output_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        lock(&self.sink)(bytes);
    }
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl std::fmt::Debug for ConsoleInner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ConsoleInner").field("metrics", &self.metrics).finish_non_exhaustive()
    }
}
