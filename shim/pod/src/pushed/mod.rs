//! Copies volumes of the node into the guest (configMap, secret, projected, downwardAPI). For each volume that kubelet
//! updates, one task copies it for every container that mounts it, and again after every change, until the pod ends; other
//! copies belong to one container and are made once. The daemon is not involved after the creation of a container.
//!
//! docs/contributor/volumes.md describes the whole. The tasks run on the async runtime; [`Pushed`] is cheap to clone.

mod room;

use crate::agent::Agent;
use crate::error::{Failure, PodError, printable};
use nacelle_base::Chain;
use nacelle_base::push::{CopyInFailure, CopyInMessage, CopyInRequest};
use nacelle_proto::{agent as proto, pod, wire};
use room::{Room, Volume};
use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

/// The number of parts that are read ahead of the guest.
const AHEAD: usize = 2;
/// How often a volume that changes while it is read is read again, and the pause before each attempt.
const AGAIN: (u32, Duration) = (50, Duration::from_millis(20));
/// The first and the longest pause after a copy that failed.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// The maximum length of an error text of the file-server process that is passed on.
const MAX_TEXT: usize = 1024;

/// A request of a container for a volume, and the channel for the reply.
type Wish = (pod::PushedVolume, oneshot::Sender<Result<(), Failure>>);

/// The copied-in volumes of the pod.
#[derive(Clone, Default)]
pub struct Pushed {
    room: Option<Room>,
    live: Arc<Mutex<BTreeMap<String, mpsc::UnboundedSender<Wish>>>>,
}

impl Pushed {
    /// Creates the client of the file-server process at the other end of this stream, if there is one; each reply may take `limit`.
    pub fn new(stream: Option<UnixStream>, limit: Duration) -> Pushed {
        let room = stream.map(|stream| Room::new(stream, limit)).transpose();
        let room = room.unwrap_or_else(|error| {
            tracing::error!("no volume will be pushed: {}", Chain(&error));
            None
        });
        Pushed { room, live: Arc::default() }
    }

    /// Copies the present content of this volume into the guest.
    pub async fn bring(&self, agent: &Agent, volume: &pod::PushedVolume) -> Result<(), Failure> {
        let gone = || Failure::from(PodError::NoReader { path: volume.path.clone() });
        let room = self.room.clone().ok_or_else(gone)?;
        let mut push = Push { agent: agent.clone(), room, name: volume.name.clone() };
        if !volume.live {
            let (opened, done) = push.first(volume).await;
            push.room.close(&opened).await;
            return done.map_err(Failure::from);
        }
        let (tell, told) = oneshot::channel();
        {
            let mut live = self.live.lock().unwrap_or_else(PoisonError::into_inner);
            let wishes = live.entry(volume.name.clone()).or_insert_with(|| {
                let (wishes, wished) = mpsc::unbounded_channel();
                tokio::spawn(push.follow(wished));
                wishes
            });
            wishes.send((volume.clone(), tell)).map_err(|_task_is_gone| gone())?;
        }
        told.await.unwrap_or_else(|_task_is_gone| Err(gone()))
    }

    /// Removes a container's own copies from the guest, after the container is gone.
    pub fn drop_copies(&self, agent: Agent, volumes: &[pod::PushedVolume]) {
        let names: Vec<String> =
            volumes.iter().filter(|volume| !volume.live).map(|volume| volume.name.clone()).collect();
        if names.is_empty() {
            return;
        }
        tokio::spawn(async move {
            for name in names {
                if let Err(error) = agent.drop_volume(&name).await {
                    tracing::warn!("a copy stays in the guest: {}", Chain(&error));
                }
            }
        });
    }
}

/// The copying of one volume.
struct Push {
    agent: Agent,
    room: Room,
    name: String,
}

impl Push {
    /// Opens the volume and copies it. The caller must close the volume.
    async fn first(&mut self, volume: &pod::PushedVolume) -> (Volume, Result<(), PodError>) {
        let opened = self.room.number();
        let ask = CopyInRequest::Open { id: opened.id, live: volume.live, path: volume.place.clone() };
        let done = match self.room.ask(ask).await {
            Some(CopyInMessage::Done { .. }) => self.push(&opened, &volume.path, true).await,
            other => Err(unread(&volume.path, other)),
        };
        (opened, done)
    }

    /// Copies the volume whenever a container requests it, and whenever it has changed.
    async fn follow(mut self, mut wished: mpsc::UnboundedReceiver<Wish>) {
        let mut current: Option<(Volume, String)> = None;
        let mut pause: Option<Duration> = None;
        loop {
            let changed = current.as_ref().map(|(volume, _)| Arc::clone(&volume.changed));
            let news = async {
                match (changed, pause) {
                    (None, _) => std::future::pending().await,
                    (Some(changed), None) => changed.notified().await,
                    // A failed copy is repeated after the pause, or earlier if the volume changes.
                    (Some(changed), Some(pause)) => drop(tokio::time::timeout(pause, changed.notified()).await),
                }
            };
            tokio::select! {
                wish = wished.recv() => {
                    let Some((volume, tell)) = wish else { return };
                    let (opened, done) = self.first(&volume).await;
                    let old = if done.is_ok() {
                        pause = None;
                        current.replace((opened, volume.path)).map(|(old, _)| old)
                    } else {
                        Some(opened)
                    };
                    if let Some(old) = old {
                        self.room.close(&old).await;
                    }
                    // The requester may have stopped waiting.
                    let _ = tell.send(done.map_err(Failure::from));
                }
                () = news => {
                    let Some((volume, path)) = &current else { continue };
                    match self.push(volume, path, pause.is_some()).await {
                        Ok(()) => {
                            tracing::debug!(path, "a change was pushed");
                            pause = None;
                        }
                        // These errors mean that the VM or the file-server process has ended.
                        Err(PodError::Died { .. } | PodError::Ending | PodError::NoReader { .. }) => return,
                        Err(error) => {
                            tracing::warn!("a change of a volume does not reach the guest: {}", Chain(&error));
                            pause = Some(pause.map_or(RETRY.0, |pause| (pause * 2).min(RETRY.1)));
                        }
                    }
                }
            }
        }
    }

    /// Copies the present content of the volume. If the volume changes meanwhile, it is read again.
    async fn push(&mut self, volume: &Volume, path: &str, mut afresh: bool) -> Result<(), PodError> {
        let mut tries = 0;
        loop {
            match self.push_once(volume.id, path, afresh).await {
                Err(PodError::Unread { why: CopyInFailure::Changed, .. }) if tries < AGAIN.0 => {
                    tries += 1;
                    afresh = true;
                    tokio::time::sleep(AGAIN.1).await;
                }
                other => return other,
            }
        }
    }

    async fn push_once(&mut self, id: u32, path: &str, afresh: bool) -> Result<(), PodError> {
        let (send, parts) = mpsc::channel(AHEAD);
        let (pushed, read) = tokio::join!(self.agent.push_volume(parts), self.read(id, path, afresh, send));
        match (pushed, read) {
            // The request to the guest broke off because the reading failed.
            (_, Err(error)) => Err(error),
            (Err(error @ (PodError::Died { .. } | PodError::Ending)), _) => Err(error),
            (Err(source), Ok(())) => Err(PodError::Untaken { path: path.to_owned(), source: Box::new(source) }),
            (Ok(()), Ok(())) => Ok(()),
        }
    }

    /// Reads the volume, part by part, as fast as the guest accepts them.
    async fn read(
        &self,
        id: u32,
        path: &str,
        afresh: bool,
        send: mpsc::Sender<proto::PushVolumeRequest>,
    ) -> Result<(), PodError> {
        let (mut ask, mut name) = (CopyInRequest::Begin { id, full: afresh }, self.name.clone());
        loop {
            let (last, tree) = match self.room.ask(ask).await {
                Some(CopyInMessage::Part { last, tree, .. }) => (last, tree),
                other => return Err(unread(path, other)),
            };
            let tree: Result<proto::Tree, _> = wire::decode(&tree);
            let tree = tree.map_err(|_wrong| PodError::NoReader { path: path.to_owned() })?;
            let part = proto::PushVolumeRequest { name: std::mem::take(&mut name), tree: Some(tree), whole: last };
            if send.send(part).await.is_err() || last {
                return Ok(());
            }
            ask = CopyInRequest::Next { id };
        }
    }
}

/// Returns the error for a missing or unexpected reply.
fn unread(path: &str, told: Option<CopyInMessage>) -> PodError {
    let path = path.to_owned();
    match told {
        Some(CopyInMessage::Failed { reason, text, .. }) => {
            PodError::Unread { path, why: reason, text: printable(&text, MAX_TEXT) }
        }
        _ => PodError::NoReader { path },
    }
}
