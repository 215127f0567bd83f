//! Implements the pod process's side of the channel to the file-server process (`nacelle-fs`) for copied-in volumes and
//! socket volumes: requests, replies in the same order, and notifications that a volume has changed. The file-server process also serves a
//! guest's requests, so it is not trusted: messages are bounded, and waits have limits.
//!
//! Two tasks read and write the channel; a [`FileServerChannel`] is cheap to clone.
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

use crate::agent::tokio_stream_of;
use crate::error::PodError;
use nacelle_base::Chain;
use nacelle_base::copied_in::{CopyInMessage, CopyInRequest, MAX_COPY_IN_MESSAGE};
use nacelle_base::descriptors::send_with_descriptor;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{Notify, mpsc, oneshot};

#[derive(Default)]
struct ChannelState {
    /// The senders for the outstanding replies, in the order of the requests.
    reply_senders: VecDeque<oneshot::Sender<CopyInMessage>>,
    /// The notifiers of the open volumes, by number.
    change_notifiers: BTreeMap<u32, Arc<Notify>>,
    closed: bool,
}

struct PendingCall {
    request: CopyInRequest,
    /// The descriptor that comes with the request.
    descriptor: Option<OwnedFd>,
    reply: oneshot::Sender<CopyInMessage>,
}

/// The channel to the file-server process.
#[derive(Clone)]
pub struct FileServerChannel {
    state: Arc<Mutex<ChannelState>>,
    calls: mpsc::UnboundedSender<PendingCall>,
    next_id: Arc<AtomicU32>,
    limit: Duration,
}

/// A volume that is open for reading. The caller must close it.
pub struct OpenVolume {
    /// The number of the volume on this channel.
    pub id: u32,
    /// Notifies that the volume has changed.
    pub changed: Arc<Notify>,
}

fn lock(state: &Mutex<ChannelState>) -> MutexGuard<'_, ChannelState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FileServerChannel {
    /// Creates the channel on this stream; each reply may take `limit`.
    pub fn new(stream: std::os::unix::net::UnixStream, limit: Duration) -> Result<FileServerChannel, PodError> {
        let (read, write) = tokio_stream_of(stream)?.into_split();
        let state = Arc::<Mutex<ChannelState>>::default();
        let (calls, received) = mpsc::unbounded_channel();
        tokio::spawn(write_requests(write, received, Arc::clone(&state)));
        tokio::spawn(read_replies(read, Arc::clone(&state)));
        Ok(FileServerChannel { state, calls, next_id: Arc::default(), limit })
    }

    /// Sends a request and waits for the reply; returns `None` after the limit, or if the channel is closed.
    pub async fn call(&self, request: CopyInRequest) -> Option<CopyInMessage> {
        self.call_with_descriptor(request, None).await
    }

    /// Like [`FileServerChannel::call`], with a descriptor for the file-server process.
    pub async fn call_with_descriptor(
        &self,
        request: CopyInRequest,
        descriptor: Option<OwnedFd>,
    ) -> Option<CopyInMessage> {
        let (sender, reply) = oneshot::channel();
        self.calls.send(PendingCall { request, descriptor, reply: sender }).ok()?;
        tokio::time::timeout(self.limit, reply).await.ok()?.ok()
    }

    /// Allocates the number of a volume, and its notifier.
    pub fn allocate(&self) -> OpenVolume {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let changed = Arc::<Notify>::default();
        lock(&self.state).change_notifiers.insert(id, Arc::clone(&changed));
        OpenVolume { id, changed }
    }

    /// Closes a volume.
    pub async fn close(&self, volume: &OpenVolume) {
        lock(&self.state).change_notifiers.remove(&volume.id);
        // Without a reply the process is gone, and the volume closed with it.
        let _ = self.call(CopyInRequest::Close { id: volume.id }).await;
    }
}

async fn write_requests(
    mut stream: OwnedWriteHalf,
    mut received: mpsc::UnboundedReceiver<PendingCall>,
    state: Arc<Mutex<ChannelState>>,
) {
    while let Some(PendingCall { request, descriptor, reply }) = received.recv().await {
        {
            let mut state = lock(&state);
            if state.closed {
                continue;
            }
            state.reply_senders.push_back(reply);
        }
        let message = request.encode();
        let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
        let bytes = [length.to_le_bytes().as_slice(), &message].concat();
        let written = async {
            let sent = match descriptor {
                Some(descriptor) => {
                    let stream: &UnixStream = stream.as_ref();
                    stream.async_io(Interest::WRITABLE, || send_with_descriptor(stream, &bytes, &descriptor)).await?
                }
                None => 0,
            };
            stream.write_all(bytes.get(sent..).unwrap_or_default()).await
        };
        if let Err(error) = written.await {
            tracing::warn!("cannot send a request to the file-server process: {error}");
            return;
        }
    }
}

async fn read_replies(mut stream: OwnedReadHalf, state: Arc<Mutex<ChannelState>>) {
    let error = loop {
        let reply = match read_reply(&mut stream).await {
            Ok(reply) => reply,
            Err(error) => break error,
        };
        let mut state = lock(&state);
        if let CopyInMessage::Changed { id } = reply {
            if let Some(notifier) = state.change_notifiers.get(&id) {
                notifier.notify_one();
            }
        } else if let Some(sender) = state.reply_senders.pop_front() {
            // The requester may have stopped waiting.
            let _ = sender.send(reply);
        }
    };
    tracing::warn!(
        "the channel to the file-server process has closed; volumes are no longer copied into the guest: {}",
        Chain(&error)
    );
    let mut state = lock(&state);
    state.closed = true;
    state.reply_senders.clear();
}

async fn read_reply(stream: &mut OwnedReadHalf) -> io::Result<CopyInMessage> {
    let length = usize::try_from(stream.read_u32_le().await?).unwrap_or(usize::MAX);
    if length > MAX_COPY_IN_MESSAGE {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut message = vec![0; length];
    stream.read_exact(&mut message).await?;
    CopyInMessage::decode(&message).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::descriptors::receive_with_descriptors;
    use nacelle_base::sockets::SocketClient;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    /// The other end of the channel: reads requests, and sends the replies that the test prescribes.
    struct FileServer(UnixStream);

    impl FileServer {
        fn receive(&mut self) -> CopyInRequest {
            let mut length = [0; 4];
            self.0.read_exact(&mut length).unwrap();
            let mut message = vec![0; u32::from_le_bytes(length) as usize];
            self.0.read_exact(&mut message).unwrap();
            CopyInRequest::decode(&message).unwrap()
        }

        fn send(&mut self, reply: &CopyInMessage) {
            let message = reply.encode();
            let length = u32::try_from(message.len()).unwrap().to_le_bytes();
            self.0.write_all(&[length.as_slice(), &message].concat()).unwrap();
        }
    }

    fn channel(limit: Duration) -> (FileServerChannel, FileServer) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (FileServerChannel::new(ours, limit).unwrap(), FileServer(theirs))
    }

    const LONG: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn each_reply_reaches_its_caller_and_each_change_its_volume() {
        let (channel, mut server) = channel(LONG);
        let (one, two) = (channel.allocate(), channel.allocate());
        let serving = std::thread::spawn(move || {
            let requests = [server.receive(), server.receive()];
            server.send(&CopyInMessage::Changed { id: 1 });
            server.send(&CopyInMessage::Changed { id: 9 });
            for request in requests {
                let CopyInRequest::Next { id } = request else { panic!("{request:?}") };
                server.send(&CopyInMessage::Part { id, last: true, tree: vec![] });
            }
            server
        });
        let replies = tokio::join!(
            channel.call(CopyInRequest::Next { id: one.id }),
            channel.call(CopyInRequest::Next { id: two.id })
        );
        let part = |id| Some(CopyInMessage::Part { id, last: true, tree: vec![] });
        assert_eq!(replies, (part(one.id), part(two.id)));
        tokio::time::timeout(LONG, two.changed.notified()).await.unwrap();
        assert!(tokio::time::timeout(Duration::from_millis(1), one.changed.notified()).await.is_err());
        drop(serving.join().unwrap());
        assert_eq!(channel.call(CopyInRequest::Close { id: 0 }).await, None, "the channel is closed");
    }

    #[tokio::test]
    async fn a_descriptor_comes_with_its_request() {
        let (channel, server) = channel(LONG);
        let (near, far) = UnixStream::pair().unwrap();
        let request =
            || CopyInRequest::Connect { id: 1, client: SocketClient::new(1, 2).unwrap(), name: b"name".to_vec() };
        let serving = std::thread::spawn(move || {
            let mut server = server;
            let mut length = [0; 4];
            let (received, mut descriptors) = receive_with_descriptors(&server.0, &mut length).unwrap();
            server.0.read_exact(&mut length[received..]).unwrap();
            let mut message = vec![0; u32::from_le_bytes(length) as usize];
            server.0.read_exact(&mut message).unwrap();
            assert_eq!(CopyInRequest::decode(&message), Some(request()));
            UnixStream::from(descriptors.pop().unwrap()).write_all(b"received").unwrap();
            server.send(&CopyInMessage::Done { id: 1 });
        });
        let reply = channel.call_with_descriptor(request(), Some(far.into())).await;
        assert_eq!(reply, Some(CopyInMessage::Done { id: 1 }));
        serving.join().unwrap();
        let mut text = String::new();
        (&near).read_to_string(&mut text).unwrap();
        assert_eq!(text, "received");
    }

    #[tokio::test]
    async fn a_call_ends_after_its_limit() {
        let (channel, mut server) = channel(Duration::from_millis(50));
        assert_eq!(channel.call(CopyInRequest::Next { id: 0 }).await, None);
        // The late reply is not taken for the reply to the next request.
        let late = std::thread::spawn(move || {
            for id in 0..2 {
                server.receive();
                server.send(&CopyInMessage::Done { id });
            }
            server
        });
        let (channel, _server) = (FileServerChannel { limit: LONG, ..channel }, late);
        assert_eq!(channel.call(CopyInRequest::Next { id: 1 }).await, Some(CopyInMessage::Done { id: 1 }));
    }

    #[tokio::test]
    async fn an_invalid_message_closes_the_channel() {
        for bytes in [&[255; 4][..], &[0; 4], &[1, 0, 0, 0, 77], &[6, 0, 0, 0, 3, 0, 0, 0, 0, 99]] {
            let (channel, mut server) = channel(LONG);
            server.0.write_all(bytes).unwrap();
            assert_eq!(channel.call(CopyInRequest::Next { id: 0 }).await, None, "{bytes:?}");
        }
    }
}
