//! Gives containers the sockets of volumes of the node. For each volume one task keeps the sockets of the guest equal to those of the node;
//! what the guest connects is relayed (`relay`). The daemon is not involved after the creation of a container.
//!
//! docs/contributor/volumes.md describes the whole. The tasks run on the async runtime; [`SocketVolumes`] is cheap to clone.
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

mod relay;

#[cfg(any(test, feature = "fuzz"))]
pub use relay::read_header;

use crate::agent::Agent;
use crate::error::{Failure, PodError};
use crate::file_server_channel::{FileServerChannel, OpenVolume};
use crate::machine;
use crate::text::printable;
use nacelle_base::Chain;
use nacelle_base::copied_in::{CopyInKind, CopyInMessage, CopyInRequest};
use nacelle_base::sockets::{PORT, SocketHeader, SocketToken, TOKEN};
use nacelle_engine::GuestLink;
use nacelle_proto::{agent as proto, pod, wire};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{oneshot, watch};

/// The pause after the sockets were listed, so that a directory in which other files change all the time is not always read.
const LIST_PAUSE: Duration = Duration::from_millis(100);
/// The first and the longest pause after a failure to change the guest's sockets.
const RETRY_PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// The maximum length of an error text of the file-server process that is passed on.
const MAX_TEXT: usize = 1024;

/// A volume whose sockets a container has. Dropping it removes them from the guest.
struct AttachedVolume {
    token: SocketToken,
    /// The number of the volume on the channel to the file-server process.
    id: u32,
    /// Closes the channel to the task that follows the volume.
    _closing: oneshot::Sender<()>,
    /// Closes the channels to the connections of the volume.
    connections: watch::Sender<()>,
}

/// The socket volumes of the pod.
#[derive(Clone, Default)]
pub struct SocketVolumes {
    channel: Option<FileServerChannel>,
    attached: Arc<Mutex<BTreeMap<String, AttachedVolume>>>,
}

impl SocketVolumes {
    /// Creates the client of the file-server process at the other end of this channel, if there is one that connects sockets.
    pub fn new(channel: Option<FileServerChannel>) -> SocketVolumes {
        SocketVolumes { channel, attached: Arc::default() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, AttachedVolume>> {
        self.attached.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts to accept the guest's connections to sockets of the node.
    pub fn serve(&self, link: &dyn GuestLink) {
        match link.listen(PORT) {
            Ok(listener) => drop(tokio::spawn(relay::accept(listener, self.clone()))),
            Err(error) => {
                tracing::error!("containers of this pod cannot connect to sockets of the node: {}", Chain(&error));
            }
        }
    }

    /// Creates the sockets of this volume in the guest, and keeps them equal to those of the node until the volume is detached.
    pub async fn attach(&self, agent: &Agent, volume: &pod::SocketVolume) -> Result<(), Failure> {
        let no_server = || PodError::NoFileServer { path: volume.path.clone() };
        let channel = self.channel.clone().ok_or_else(no_server)?;
        let mut token = [0; TOKEN];
        machine::random(&mut token)?;
        let mut follower = SocketFollower {
            agent: agent.clone(),
            opened: channel.allocate(),
            channel,
            name: volume.name.clone(),
            path: volume.path.clone(),
            token: SocketToken::new(token),
            sockets: None,
        };
        if let Err(error) = follower.open(volume).await {
            tokio::spawn(follower.close());
            return Err(error.into());
        }
        let (closing, closed) = oneshot::channel();
        let attached = AttachedVolume {
            token: follower.token,
            id: follower.opened.id,
            _closing: closing,
            connections: watch::Sender::new(()),
        };
        tokio::spawn(follower.follow(closed));
        self.lock().insert(volume.name.clone(), attached);
        Ok(())
    }

    /// Removes the sockets of a container's volumes from the guest and ends their connections, after the container is gone.
    pub fn detach(&self, volumes: &[pod::SocketVolume]) {
        let mut attached = self.lock();
        for volume in volumes {
            attached.remove(&volume.name);
        }
    }

    /// Connects to the socket that a header names. Returns the socket, which is non-blocking, and a channel that closes when its volume
    /// is detached.
    async fn connect(&self, header: SocketHeader) -> io::Result<(OwnedFd, watch::Receiver<()>)> {
        use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
        let found = self
            .lock()
            .values()
            .find(|volume| volume.token == header.token)
            .map(|volume| (volume.id, volume.connections.subscribe()));
        let ((id, detached), channel) = found.zip(self.channel.as_ref()).ok_or(io::ErrorKind::NotFound)?;
        // Created here, because the file-server process cannot. It can be connected to paths only: the abstract sockets that it could name
        // are those of the pod's own network namespace.
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
        let request = CopyInRequest::Connect { id, client: header.client, name: header.name };
        match channel.call_with_descriptor(request, Some(socket.try_clone()?)).await {
            Some(CopyInMessage::Done { .. }) => Ok((socket, detached)),
            Some(CopyInMessage::Failed { text, .. }) => Err(io::Error::other(printable(&text, MAX_TEXT))),
            _ => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }
}

/// Keeps the sockets of one volume in the guest equal to those of the node.
struct SocketFollower {
    agent: Agent,
    channel: FileServerChannel,
    name: String,
    path: String,
    token: SocketToken,
    opened: OpenVolume,
    /// The sockets that the guest has.
    sockets: Option<proto::Tree>,
}

impl SocketFollower {
    async fn open(&mut self, volume: &pod::SocketVolume) -> Result<(), PodError> {
        let path = volume.server_path.clone();
        let request = CopyInRequest::Open { id: self.opened.id, kind: CopyInKind::Sockets, path };
        match self.channel.call(request).await {
            Some(CopyInMessage::Done { .. }) => self.update().await,
            other => Err(self.read_error(other)),
        }
    }

    /// Lists the sockets of the node, and changes those of the guest if they differ.
    async fn update(&mut self) -> Result<(), PodError> {
        let tree = match self.channel.call(CopyInRequest::Begin { id: self.opened.id, full: true }).await {
            Some(CopyInMessage::Part { tree, .. }) => tree,
            other => return Err(self.read_error(other)),
        };
        let no_server = || PodError::NoFileServer { path: self.path.clone() };
        let tree: proto::Tree = wire::decode(&tree).map_err(|_malformed| no_server())?;
        if tree.entries.is_empty() {
            // This would remove the volume.
            return Err(no_server());
        }
        if self.sockets.as_ref() == Some(&tree) {
            return Ok(());
        }
        let (name, token) = (self.name.clone(), self.token.as_bytes().to_vec());
        let request = proto::SetSocketsRequest { name, token, tree: Some(tree.clone()) };
        match self.agent.set_sockets(request).await {
            Ok(()) => self.sockets = Some(tree),
            Err(error @ (PodError::Died { .. } | PodError::Ending)) => return Err(error),
            Err(source) => {
                return Err(PodError::VolumeRejected { path: self.path.clone(), source: Box::new(source) });
            }
        }
        Ok(())
    }

    fn read_error(&self, reply: Option<CopyInMessage>) -> PodError {
        let path = self.path.clone();
        match reply {
            Some(CopyInMessage::Failed { reason, text, .. }) => {
                PodError::SocketsUnreadable { path, why: reason, text: printable(&text, MAX_TEXT) }
            }
            _ => PodError::NoFileServer { path },
        }
    }

    /// Follows the node until the volume is detached, and then removes the sockets from the guest.
    async fn follow(mut self, mut closed: oneshot::Receiver<()>) {
        let mut pause: Option<Duration> = None;
        loop {
            let changed = Arc::clone(&self.opened.changed);
            let change = async {
                match pause {
                    None => changed.notified().await,
                    // A failed change is repeated after the pause, or earlier if the volume changes again.
                    Some(pause) => drop(tokio::time::timeout(pause, changed.notified()).await),
                }
            };
            tokio::select! {
                _ = &mut closed => break,
                () = change => {}
            }
            match self.update().await {
                Ok(()) => pause = None,
                // The VM has ended.
                Err(PodError::Died { .. } | PodError::Ending) => return,
                Err(PodError::NoFileServer { .. }) => {
                    // No change will be reported any more.
                    let _ = closed.await;
                    break;
                }
                Err(error) => {
                    tracing::warn!("cannot change the sockets of a volume in the guest; retrying: {}", Chain(&error));
                    pause = Some(pause.map_or(RETRY_PAUSE.0, |pause| (pause * 2).min(RETRY_PAUSE.1)));
                }
            }
            tokio::time::sleep(LIST_PAUSE).await;
        }
        self.close().await;
    }

    /// Closes the volume, and removes its sockets from the guest.
    async fn close(self) {
        self.channel.close(&self.opened).await;
        let request = proto::SetSocketsRequest { name: self.name, token: self.token.as_bytes().to_vec(), tree: None };
        if let Err(error) = self.agent.set_sockets(request).await {
            tracing::warn!("cannot remove the sockets of a volume from the guest: {}", Chain(&error));
        }
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
