//! Implements the pod process's side of the channel to the file-server process (`nacelle-fs`) for copied-in volumes:
//! requests, replies in the same order, and notifications that a volume has changed. The file-server process also serves a
//! guest's requests, so it is not trusted: messages are bounded, and waits have limits.
//!
//! Two tasks read and write the channel; a [`Room`] is cheap to clone.
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

use crate::agent::tokio_stream_of;
use crate::error::PodError;
use nacelle_base::Chain;
use nacelle_base::push::{CopyInMessage, CopyInRequest, MAX_COPY_IN_MESSAGE};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{Notify, mpsc, oneshot};

#[derive(Default)]
struct State {
    /// The senders for the outstanding replies, in the order of the requests.
    waiting: VecDeque<oneshot::Sender<CopyInMessage>>,
    /// The notifiers of the open volumes, by number.
    watching: BTreeMap<u32, Arc<Notify>>,
    over: bool,
}

type Question = (CopyInRequest, oneshot::Sender<CopyInMessage>);

/// The channel to the file-server process.
#[derive(Clone)]
pub struct Room {
    state: Arc<Mutex<State>>,
    questions: mpsc::UnboundedSender<Question>,
    next: Arc<AtomicU32>,
    limit: Duration,
}

/// A volume that is open for reading. The caller must close it.
pub struct Volume {
    /// The number of the volume on this channel.
    pub id: u32,
    /// Notifies that the volume has changed.
    pub changed: Arc<Notify>,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Room {
    /// Creates the channel on this stream; each reply may take `limit`.
    pub fn new(stream: UnixStream, limit: Duration) -> Result<Room, PodError> {
        let (read, write) = tokio_stream_of(stream)?.into_split();
        let state = Arc::<Mutex<State>>::default();
        let (questions, asked) = mpsc::unbounded_channel();
        tokio::spawn(write_all(write, asked, Arc::clone(&state)));
        tokio::spawn(listen(read, Arc::clone(&state)));
        Ok(Room { state, questions, next: Arc::default(), limit })
    }

    /// Sends a request and waits for the reply; returns `None` after the limit, or if the channel is closed.
    pub async fn ask(&self, ask: CopyInRequest) -> Option<CopyInMessage> {
        let (tell, told) = oneshot::channel();
        self.questions.send((ask, tell)).ok()?;
        tokio::time::timeout(self.limit, told).await.ok()?.ok()
    }

    /// Allocates the number of a volume, and its notifier.
    pub fn number(&self) -> Volume {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let changed = Arc::<Notify>::default();
        lock(&self.state).watching.insert(id, Arc::clone(&changed));
        Volume { id, changed }
    }

    /// Closes a volume.
    pub async fn close(&self, volume: &Volume) {
        lock(&self.state).watching.remove(&volume.id);
        // Without a reply the process is gone, and the volume closed with it.
        let _ = self.ask(CopyInRequest::Close { id: volume.id }).await;
    }
}

async fn write_all(mut stream: OwnedWriteHalf, mut asked: mpsc::UnboundedReceiver<Question>, state: Arc<Mutex<State>>) {
    while let Some((ask, tell)) = asked.recv().await {
        {
            let mut state = lock(&state);
            if state.over {
                continue;
            }
            state.waiting.push_back(tell);
        }
        let word = ask.encode();
        let length = u32::try_from(word.len()).unwrap_or(u32::MAX);
        if let Err(error) = stream.write_all(&[length.to_le_bytes().as_slice(), &word].concat()).await {
            tracing::warn!("the process for volumes hears nothing: {error}");
            return;
        }
    }
}

async fn listen(mut stream: OwnedReadHalf, state: Arc<Mutex<State>>) {
    let why = loop {
        let told = match hear(&mut stream).await {
            Ok(told) => told,
            Err(error) => break error,
        };
        let mut state = lock(&state);
        if let CopyInMessage::Changed { id } = told {
            if let Some(watching) = state.watching.get(&id) {
                watching.notify_one();
            }
        } else if let Some(waiting) = state.waiting.pop_front() {
            // The requester may have stopped waiting.
            let _ = waiting.send(told);
        }
    };
    tracing::warn!("volumes are not pushed any more: {}", Chain(&why));
    let mut state = lock(&state);
    state.over = true;
    state.waiting.clear();
}

async fn hear(stream: &mut OwnedReadHalf) -> io::Result<CopyInMessage> {
    let length = usize::try_from(stream.read_u32_le().await?).unwrap_or(usize::MAX);
    if length > MAX_COPY_IN_MESSAGE {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut word = vec![0; length];
    stream.read_exact(&mut word).await?;
    CopyInMessage::decode(&word).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    /// The other end of the channel: reads requests, and sends what the test prescribes.
    struct Other(UnixStream);

    impl Other {
        fn asked(&mut self) -> CopyInRequest {
            let mut length = [0; 4];
            self.0.read_exact(&mut length).unwrap();
            let mut word = vec![0; u32::from_le_bytes(length) as usize];
            self.0.read_exact(&mut word).unwrap();
            CopyInRequest::decode(&word).unwrap()
        }

        fn says(&mut self, told: &CopyInMessage) {
            let word = told.encode();
            let length = u32::try_from(word.len()).unwrap().to_le_bytes();
            self.0.write_all(&[length.as_slice(), &word].concat()).unwrap();
        }
    }

    fn room(limit: Duration) -> (Room, Other) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (Room::new(ours, limit).unwrap(), Other(theirs))
    }

    const LONG: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn answers_come_to_those_who_asked_and_news_to_those_who_watch() {
        let (room, mut other) = room(LONG);
        let (one, two) = (room.number(), room.number());
        let answering = std::thread::spawn(move || {
            let asked = [other.asked(), other.asked()];
            other.says(&CopyInMessage::Changed { id: 1 });
            other.says(&CopyInMessage::Changed { id: 9 });
            for ask in asked {
                let CopyInRequest::Next { id } = ask else { panic!("{ask:?}") };
                other.says(&CopyInMessage::Part { id, last: true, tree: vec![] });
            }
            other
        });
        let asked =
            tokio::join!(room.ask(CopyInRequest::Next { id: one.id }), room.ask(CopyInRequest::Next { id: two.id }));
        let part = |id| Some(CopyInMessage::Part { id, last: true, tree: vec![] });
        assert_eq!(asked, (part(one.id), part(two.id)));
        tokio::time::timeout(LONG, two.changed.notified()).await.unwrap();
        assert!(tokio::time::timeout(Duration::from_millis(1), one.changed.notified()).await.is_err());
        drop(answering.join().unwrap());
        assert_eq!(room.ask(CopyInRequest::Close { id: 0 }).await, None, "nobody answers any more");
    }

    #[tokio::test]
    async fn nobody_waits_for_ever() {
        let (room, mut other) = room(Duration::from_millis(50));
        assert_eq!(room.ask(CopyInRequest::Next { id: 0 }).await, None);
        // The late reply is not taken for the reply to the next request.
        let late = std::thread::spawn(move || {
            for id in 0..2 {
                other.asked();
                other.says(&CopyInMessage::Done { id });
            }
            other
        });
        let (room, _other) = (Room { limit: LONG, ..room }, late);
        assert_eq!(room.ask(CopyInRequest::Next { id: 1 }).await, Some(CopyInMessage::Done { id: 1 }));
    }

    #[tokio::test]
    async fn what_is_no_word_ends_it() {
        for bytes in [&[255; 4][..], &[0; 4], &[1, 0, 0, 0, 77], &[6, 0, 0, 0, 3, 0, 0, 0, 0, 99]] {
            let (room, mut other) = room(LONG);
            other.0.write_all(bytes).unwrap();
            assert_eq!(room.ask(CopyInRequest::Next { id: 0 }).await, None, "{bytes:?}");
        }
    }
}
