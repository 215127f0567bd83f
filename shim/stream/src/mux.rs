//! Implements the streams of a shared connection, whatever its protocol: readers with bounded queues, writers that wait for the
//! connection and for the peer's window, and the timeout of an idle connection. A window's lock is held only for arithmetic.

use bytes::Bytes;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

/// The maximum size of one chunk in bytes.
pub(crate) const CHUNK: usize = 16 << 10;
/// The chunks that may wait for the reader of a stream before the connection is no longer read.
pub(crate) const MAX_QUEUED_CHUNKS: usize = 4;
/// The bytes that are read before a window update is sent to the peer.
pub(crate) const WINDOW_UPDATE_THRESHOLD: usize = 32 << 10;
/// The messages that may wait to be written to a connection.
pub(crate) const MAX_QUEUED_MESSAGES: usize = 16;

/// The connection or the stream has ended.
#[derive(Debug, thiserror::Error)]
#[error("the client has closed the stream")]
pub(crate) struct StreamClosed;

/// A message to the writer of a connection.
pub(crate) enum OutgoingMessage {
    /// A complete frame of the protocol.
    Frame(Vec<u8>),
    /// The reply that a stream was opened.
    Opened(u32),
    /// Bytes of a stream.
    Data {
        /// The stream.
        id: u32,
        /// Whether the stream ends after these bytes.
        last: bool,
        /// At most [`CHUNK`] bytes.
        bytes: Bytes,
    },
    /// The reader of a stream has read this many bytes of it.
    WindowUpdate(u32, u32),
    /// The last message of the connection.
    End,
}

/// Ends a connection and records that bytes have moved on it; shared by everything that belongs to the connection.
#[derive(Clone, Debug, Default)]
pub(crate) struct ConnectionLifetime {
    /// Cancelled when the connection has ended or must end.
    pub closed: CancellationToken,
    activity: Arc<AtomicU64>,
}

impl ConnectionLifetime {
    /// Records that bytes have moved.
    pub fn record_activity(&self) {
        self.activity.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends the connection when no byte has moved for this time.
    pub fn close_when_idle(&self, idle: Duration) {
        let life = self.clone();
        tokio::spawn(async move {
            loop {
                let before = life.activity.load(Ordering::Relaxed);
                tokio::select! {
                    () = life.closed.cancelled() => return,
                    () = tokio::time::sleep(idle) => {}
                }
                if life.activity.load(Ordering::Relaxed) == before {
                    tracing::info!("closing a streaming connection that was idle for {} s", idle.as_secs());
                    life.closed.cancel();
                }
            }
        });
    }
}

/// The number of bytes that the peer accepts. Most peers never send window updates; only TCP limits how much is sent to them.
#[derive(Debug)]
pub(crate) struct Window {
    state: Mutex<WindowState>,
    more: Notify,
}

#[derive(Debug)]
struct WindowState {
    enforced: bool,
    bytes: i64,
}

impl Window {
    /// Returns a window of the initial size of the peer or of the protocol. `enforced` means that the peer is known to send
    /// updates.
    pub fn new(enforced: bool, bytes: i64) -> Window {
        Window { state: Mutex::new(WindowState { enforced, bytes }), more: Notify::new() }
    }

    fn lock_state(&self) -> MutexGuard<'_, WindowState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies an update of the peer, which grows or shrinks the window.
    pub fn change(&self, by: i64) {
        let mut state = self.lock_state();
        state.enforced = true;
        state.bytes = state.bytes.saturating_add(by);
        self.more.notify_waiters();
    }

    /// Waits until the window is open, and takes up to `wanted` bytes of it.
    pub async fn take(&self, wanted: usize) -> usize {
        loop {
            let opened = self.more.notified();
            tokio::pin!(opened);
            // No change is missed from here on.
            opened.as_mut().enable();
            {
                let mut state = self.lock_state();
                let most = i64::try_from(wanted).unwrap_or(i64::MAX);
                let granted = if state.enforced { state.bytes.min(most) } else { most };
                if granted > 0 {
                    state.bytes = state.bytes.saturating_sub(granted);
                    return usize::try_from(granted).unwrap_or(wanted);
                }
            }
            opened.await;
        }
    }
}

/// The reading half of a stream.
pub(crate) struct Reader {
    chunks: mpsc::Receiver<Bytes>,
    out: mpsc::Sender<OutgoingMessage>,
    id: u32,
    /// Bytes that were read and not yet reported to the peer.
    owed: usize,
}

impl Reader {
    /// Returns a reader, and the sender of its bytes.
    pub fn new(id: u32, out: mpsc::Sender<OutgoingMessage>) -> (Reader, mpsc::Sender<Bytes>) {
        let (sender, chunks) = mpsc::channel(MAX_QUEUED_CHUNKS);
        (Reader { chunks, out, id, owed: 0 }, sender)
    }

    /// Returns the next bytes, or `None` when the peer has ended the stream or the connection has ended.
    pub async fn next(&mut self) -> Option<Bytes> {
        let chunk = self.chunks.recv().await?;
        self.owed += chunk.len();
        if self.owed >= WINDOW_UPDATE_THRESHOLD {
            let count = u32::try_from(std::mem::take(&mut self.owed)).unwrap_or(u32::MAX);
            // A connection without a writer is about to end.
            let _ = self.out.send(OutgoingMessage::WindowUpdate(self.id, count)).await;
        }
        Some(chunk)
    }
}

/// The writing half of a stream.
pub(crate) struct Writer {
    out: mpsc::Sender<OutgoingMessage>,
    id: u32,
    windows: Vec<Arc<Window>>,
    /// Cancelled when this half has ended, by us or by a reset of the peer: the connection then forgets the stream.
    ended: CancellationToken,
}

impl Writer {
    /// Returns a writer that respects these windows.
    pub fn new(
        id: u32,
        out: mpsc::Sender<OutgoingMessage>,
        windows: Vec<Arc<Window>>,
        ended: CancellationToken,
    ) -> Writer {
        Writer { out, id, windows, ended }
    }

    /// Sends bytes, as fast as the peer accepts them.
    pub async fn send(&self, mut bytes: Bytes) -> Result<(), StreamClosed> {
        while !bytes.is_empty() {
            let mut count = bytes.len().min(CHUNK);
            let mut taken = Vec::with_capacity(self.windows.len());
            for window in &self.windows {
                let granted = window.take(count).await;
                taken.push((window, granted));
                count = count.min(granted);
            }
            if self.ended.is_cancelled() {
                return Err(StreamClosed);
            }
            for (window, granted) in taken {
                window.lock_state().bytes += i64::try_from(granted - count).unwrap_or(0);
            }
            let chunk = bytes.split_to(count);
            self.out
                .send(OutgoingMessage::Data { id: self.id, last: false, bytes: chunk })
                .await
                .map_err(|_closed| StreamClosed)?;
        }
        Ok(())
    }

    /// Cancelled when this half has ended: by [`Writer::finish`], or by a reset of the peer, which ends the whole stream.
    pub fn ended(&self) -> CancellationToken {
        self.ended.clone()
    }

    /// Ends this half of the stream.
    pub async fn finish(self) {
        // If the connection has ended, the stream has ended too.
        let _ = self.out.send(OutgoingMessage::Data { id: self.id, last: true, bytes: Bytes::new() }).await;
        self.ended.cancel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run<T>(test: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async { tokio::time::timeout(Duration::from_secs(60), test).await.expect("within a minute") })
    }

    #[test]
    fn an_unannounced_window_does_not_block_output() {
        run(async {
            let window = Window::new(false, 10);
            assert_eq!(window.take(100).await, 100);
            // The peer sends its first update after it has read everything: all bytes sent so far count.
            window.change(95);
            assert_eq!(window.take(100).await, 5);
        });
    }

    #[test]
    fn a_closed_window_opens_with_the_peers_word() {
        run(async {
            let window = Arc::new(Window::new(true, 3));
            assert_eq!(window.take(5).await, 3);
            let waiting = tokio::spawn({
                let window = Arc::clone(&window);
                async move { window.take(5).await }
            });
            tokio::task::yield_now().await;
            assert!(!waiting.is_finished());
            window.change(4);
            assert_eq!(waiting.await.unwrap(), 4);
        });
    }

    #[test]
    fn a_writer_takes_no_more_of_one_window_than_the_other_gives() {
        run(async {
            let (out, mut written) = mpsc::channel(MAX_QUEUED_MESSAGES);
            let windows = vec![Arc::new(Window::new(true, 10)), Arc::new(Window::new(true, 4))];
            let writer = Writer::new(1, out, windows.clone(), CancellationToken::new());
            let sending = tokio::spawn(async move { writer.send(Bytes::from_static(b"0123456789")).await });
            let Some(OutgoingMessage::Data { bytes, last: false, .. }) = written.recv().await else { panic!("data") };
            assert_eq!(bytes, "0123");
            windows[1].change(100);
            let Some(OutgoingMessage::Data { bytes, .. }) = written.recv().await else { panic!("data") };
            assert_eq!(bytes, "456789");
            sending.await.unwrap().unwrap();
            assert_eq!(windows[0].lock_state().bytes, 0);
        });
    }

    #[test]
    fn an_idle_connection_is_ended() {
        run(async {
            let life = ConnectionLifetime::default();
            life.close_when_idle(Duration::from_millis(5));
            life.closed.cancelled().await;
        });
    }
}
