//! Owns: the ends of streams that share one connection, whatever its protocol: readers with bounded queues, writers
//! that wait for the connection and for the peer's window, and the watch over an idle connection.
//! Threads: any. A window's lock is held for arithmetic only.

use bytes::Bytes;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

/// The most bytes of one chunk.
pub(crate) const CHUNK: usize = 16 << 10;
/// Chunks that wait for the reader of a stream, before the connection is not read any more.
pub(crate) const QUEUE: usize = 4;
/// Bytes that are taken before the peer is told so.
pub(crate) const TELL: usize = 32 << 10;
/// What waits to be written to a connection.
pub(crate) const OUT: usize = 16;

/// The connection has ended, or this stream of it.
#[derive(Debug, thiserror::Error)]
#[error("the client has ended the stream")]
pub(crate) struct Gone;

/// What a connection's writer writes.
pub(crate) enum Out {
    /// Something of the protocol's own, ready made.
    Frame(Vec<u8>),
    /// The answer to a stream that was opened.
    Opened(u32),
    /// Bytes of a stream; `last` ends it.
    Data {
        /// The stream.
        id: u32,
        /// Nothing comes after.
        last: bool,
        /// At most [`CHUNK`].
        bytes: Bytes,
    },
    /// So many bytes of a stream were taken by its reader.
    Taken(u32, u32),
    /// The last of all.
    End,
}

/// What all that concerns one connection shares.
#[derive(Clone, Debug, Default)]
pub(crate) struct Life {
    /// Cancelled when the connection has ended, or shall.
    pub gone: CancellationToken,
    moved: Arc<AtomicU64>,
}

impl Life {
    /// Bytes have moved.
    pub fn moved(&self) {
        self.moved.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends the connection when nothing has moved for so long.
    pub fn watch(&self, idle: Duration) {
        let life = self.clone();
        tokio::spawn(async move {
            loop {
                let before = life.moved.load(Ordering::Relaxed);
                tokio::select! {
                    () = life.gone.cancelled() => return,
                    () = tokio::time::sleep(idle) => {}
                }
                if life.moved.load(Ordering::Relaxed) == before {
                    tracing::info!("a streaming connection was idle for {} s: it is ended", idle.as_secs());
                    life.gone.cancel();
                }
            }
        });
    }
}

/// How many bytes the peer still takes. Peers that never speak of windows (most) are held back by TCP alone.
#[derive(Debug)]
pub(crate) struct Window {
    state: Mutex<Left>,
    more: Notify,
}

#[derive(Debug)]
struct Left {
    enforced: bool,
    bytes: i64,
}

impl Window {
    /// A window of the size that the peer has told, or the protocol's.
    pub fn new(enforced: bool, bytes: i64) -> Window {
        Window { state: Mutex::new(Left { enforced, bytes }), more: Notify::new() }
    }

    fn left(&self) -> MutexGuard<'_, Left> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The peer speaks of windows, and this one grows or shrinks.
    pub fn change(&self, by: i64) {
        let mut left = self.left();
        left.enforced = true;
        left.bytes = left.bytes.saturating_add(by);
        self.more.notify_waiters();
    }

    /// Waits until it is open and takes up to `wanted` bytes of it.
    pub async fn take(&self, wanted: usize) -> usize {
        loop {
            let opened = self.more.notified();
            tokio::pin!(opened);
            // From here on a change is not missed.
            opened.as_mut().enable();
            {
                let mut left = self.left();
                let most = i64::try_from(wanted).unwrap_or(i64::MAX);
                let granted = if left.enforced { left.bytes.min(most) } else { most };
                if granted > 0 {
                    left.bytes = left.bytes.saturating_sub(granted);
                    return usize::try_from(granted).unwrap_or(wanted);
                }
            }
            opened.await;
        }
    }
}

/// The end from which a stream's bytes are read.
pub(crate) struct Reader {
    chunks: mpsc::Receiver<Bytes>,
    out: mpsc::Sender<Out>,
    id: u32,
    /// Taken, and not told.
    owed: usize,
}

impl Reader {
    /// A reader, and where its bytes are put.
    pub fn new(id: u32, out: mpsc::Sender<Out>) -> (Reader, mpsc::Sender<Bytes>) {
        let (sender, chunks) = mpsc::channel(QUEUE);
        (Reader { chunks, out, id, owed: 0 }, sender)
    }

    /// The next bytes; none: the peer has ended the stream, or the connection has ended.
    pub async fn next(&mut self) -> Option<Bytes> {
        let chunk = self.chunks.recv().await?;
        self.owed += chunk.len();
        if self.owed >= TELL {
            let count = u32::try_from(std::mem::take(&mut self.owed)).unwrap_or(u32::MAX);
            // A connection without a writer is about to end.
            let _ = self.out.send(Out::Taken(self.id, count)).await;
        }
        Some(chunk)
    }
}

/// The end to which a stream's bytes are written.
pub(crate) struct Writer {
    out: mpsc::Sender<Out>,
    id: u32,
    windows: Vec<Arc<Window>>,
    /// This end has ended, by us or by the peer's reset: the connection forgets the stream.
    ended: CancellationToken,
}

impl Writer {
    /// A writer that keeps to these windows.
    pub fn new(id: u32, out: mpsc::Sender<Out>, windows: Vec<Arc<Window>>, ended: CancellationToken) -> Writer {
        Writer { out, id, windows, ended }
    }

    /// Sends bytes, as fast as the peer takes them.
    pub async fn send(&self, mut bytes: Bytes) -> Result<(), Gone> {
        while !bytes.is_empty() {
            let mut count = bytes.len().min(CHUNK);
            let mut taken = Vec::with_capacity(self.windows.len());
            for window in &self.windows {
                let granted = window.take(count).await;
                taken.push((window, granted));
                count = count.min(granted);
            }
            if self.ended.is_cancelled() {
                return Err(Gone);
            }
            for (window, granted) in taken {
                window.left().bytes += i64::try_from(granted - count).unwrap_or(0);
            }
            let chunk = bytes.split_to(count);
            self.out.send(Out::Data { id: self.id, last: false, bytes: chunk }).await.map_err(|_closed| Gone)?;
        }
        Ok(())
    }

    /// Cancelled when this end has ended, by [`Writer::finish`] or by the peer, which then has left the whole stream.
    pub fn ended(&self) -> CancellationToken {
        self.ended.clone()
    }

    /// Ends the stream.
    pub async fn finish(self) {
        // If the connection has ended, so has the stream.
        let _ = self.out.send(Out::Data { id: self.id, last: true, bytes: Bytes::new() }).await;
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
    fn a_window_that_nobody_speaks_of_holds_nothing_back() {
        run(async {
            let window = Window::new(false, 10);
            assert_eq!(window.take(100).await, 100);
            // Now the peer speaks of it, having taken it all: what was sent counts.
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
            let (out, mut written) = mpsc::channel(OUT);
            let windows = vec![Arc::new(Window::new(true, 10)), Arc::new(Window::new(true, 4))];
            let writer = Writer::new(1, out, windows.clone(), CancellationToken::new());
            let sending = tokio::spawn(async move { writer.send(Bytes::from_static(b"0123456789")).await });
            let Some(Out::Data { bytes, last: false, .. }) = written.recv().await else { panic!("data") };
            assert_eq!(bytes, "0123");
            windows[1].change(100);
            let Some(Out::Data { bytes, .. }) = written.recv().await else { panic!("data") };
            assert_eq!(bytes, "456789");
            sending.await.unwrap().unwrap();
            assert_eq!(windows[0].left().bytes, 0);
        });
    }

    #[test]
    fn an_idle_connection_is_ended() {
        run(async {
            let life = Life::default();
            life.watch(Duration::from_millis(5));
            life.gone.cancelled().await;
        });
    }
}
