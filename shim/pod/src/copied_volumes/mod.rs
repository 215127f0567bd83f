//! Copies volumes of the node into the guest (configMap, secret, projected, downwardAPI, and files that kubelet makes for containers).
//! For each volume that kubelet updates, one task copies it for every container that mounts it, and again after every change, until the
//! pod ends. Files of the whole pod are copied for every container. Other copies belong to one container and are made once. The daemon
//! is not involved after the creation of a container.
//!
//! docs/contributor/volumes.md describes the whole. The tasks run on the async runtime; [`CopiedVolumes`] is cheap to clone.

use crate::agent::Agent;
use crate::error::{Failure, PodError};
use crate::file_server_channel::{FileServerChannel, OpenVolume};
use crate::text::printable;
use nacelle_base::Chain;
use nacelle_base::copied_in::{CopyInFailure, CopyInKind, CopyInMessage, CopyInRequest};
use nacelle_proto::{agent as proto, pod, wire};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

/// The number of parts that are read ahead of the guest.
const READ_AHEAD: usize = 2;
/// How often a volume that changes while it is read is read again, and the pause before each attempt.
const REREAD: (u32, Duration) = (50, Duration::from_millis(20));
/// The first and the longest pause after a copy that failed.
const RETRY_PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// The maximum length of an error text of the file-server process that is passed on.
const MAX_TEXT: usize = 1024;

/// A request of a container for a volume, and the channel for the reply.
type CopyRequest = (pod::CopiedInVolume, oneshot::Sender<Result<(), Failure>>);

/// The copied-in volumes of the pod.
#[derive(Clone, Default)]
pub struct CopiedVolumes {
    channel: Option<FileServerChannel>,
    /// The tasks of the volumes that containers have in common.
    common: Arc<Mutex<BTreeMap<String, mpsc::UnboundedSender<CopyRequest>>>>,
}

impl CopiedVolumes {
    /// Creates the client of the file-server process at the other end of this channel, if there is one.
    pub fn new(channel: Option<FileServerChannel>) -> CopiedVolumes {
        CopiedVolumes { channel, common: Arc::default() }
    }

    /// Copies the present content of this volume into the guest.
    pub async fn copy_in(&self, agent: &Agent, volume: &pod::CopiedInVolume) -> Result<(), Failure> {
        let no_server = || Failure::from(PodError::NoFileServer { path: volume.path.clone() });
        let channel = self.channel.clone().ok_or_else(no_server)?;
        let mut copier = VolumeCopier { agent: agent.clone(), channel, name: volume.name.clone() };
        if is_own(volume) {
            let (opened, outcome) = copier.open_and_copy(volume).await;
            copier.channel.close(&opened).await;
            return outcome.map_err(Failure::from);
        }
        let (sender, outcome) = oneshot::channel();
        {
            let mut common = self.common.lock().unwrap_or_else(PoisonError::into_inner);
            let requests = common.entry(volume.name.clone()).or_insert_with(|| {
                let (requests, received) = mpsc::unbounded_channel();
                tokio::spawn(copier.copy_on_change(received));
                requests
            });
            requests.send((volume.clone(), sender)).map_err(|_task_has_ended| no_server())?;
        }
        outcome.await.unwrap_or_else(|_task_has_ended| Err(no_server()))
    }

    /// Removes a container's own copies from the guest, after the container is gone.
    pub fn remove_copies(&self, agent: Agent, volumes: &[pod::CopiedInVolume]) {
        let names: Vec<String> =
            volumes.iter().filter(|volume| is_own(volume)).map(|volume| volume.name.clone()).collect();
        if names.is_empty() {
            return;
        }
        tokio::spawn(async move {
            for name in names {
                if let Err(error) = agent.remove_copied_volume(&name).await {
                    tracing::warn!("cannot remove the copy of a volume from the guest: {}", Chain(&error));
                }
            }
        });
    }
}

/// Returns whether the copy belongs to one container.
fn is_own(volume: &pod::CopiedInVolume) -> bool {
    !volume.is_live && !volume.is_of_pod
}

/// Copies one volume.
struct VolumeCopier {
    agent: Agent,
    channel: FileServerChannel,
    name: String,
}

impl VolumeCopier {
    /// Opens the volume and copies it. The caller must close the volume.
    async fn open_and_copy(&mut self, volume: &pod::CopiedInVolume) -> (OpenVolume, Result<(), PodError>) {
        let opened = self.channel.allocate();
        let kind = if volume.is_live { CopyInKind::Live } else { CopyInKind::Once };
        let request = CopyInRequest::Open { id: opened.id, kind, path: volume.server_path.clone() };
        let outcome = match self.channel.call(request).await {
            Some(CopyInMessage::Done { .. }) => self.copy(&opened, &volume.path, true).await,
            other => Err(read_error(&volume.path, other)),
        };
        (opened, outcome)
    }

    /// Copies the volume whenever a container requests it, and, if it is live, whenever it has changed.
    async fn copy_on_change(mut self, mut received: mpsc::UnboundedReceiver<CopyRequest>) {
        let mut current: Option<(OpenVolume, String)> = None;
        let mut pause: Option<Duration> = None;
        loop {
            let changed = current.as_ref().map(|(volume, _)| Arc::clone(&volume.changed));
            let change = async {
                match (changed, pause) {
                    (None, _) => std::future::pending().await,
                    (Some(changed), None) => changed.notified().await,
                    // A failed copy is repeated after the pause, or earlier if the volume changes.
                    (Some(changed), Some(pause)) => drop(tokio::time::timeout(pause, changed.notified()).await),
                }
            };
            tokio::select! {
                request = received.recv() => {
                    let Some((volume, sender)) = request else { return };
                    let (opened, outcome) = self.open_and_copy(&volume).await;
                    let old = if outcome.is_ok() && volume.is_live {
                        pause = None;
                        current.replace((opened, volume.path)).map(|(old, _)| old)
                    } else {
                        Some(opened)
                    };
                    if let Some(old) = old {
                        self.channel.close(&old).await;
                    }
                    // The requester may have stopped waiting.
                    let _ = sender.send(outcome.map_err(Failure::from));
                }
                () = change => {
                    let Some((volume, path)) = &current else { continue };
                    match self.copy(volume, path, pause.is_some()).await {
                        Ok(()) => {
                            tracing::debug!(path, "a changed volume was copied into the guest");
                            pause = None;
                        }
                        // These errors mean that the VM or the file-server process has ended.
                        Err(PodError::Died { .. } | PodError::Ending | PodError::NoFileServer { .. }) => return,
                        Err(error) => {
                            tracing::warn!("cannot copy a changed volume into the guest; retrying: {}", Chain(&error));
                            pause = Some(pause.map_or(RETRY_PAUSE.0, |pause| (pause * 2).min(RETRY_PAUSE.1)));
                        }
                    }
                }
            }
        }
    }

    /// Copies the present content of the volume. If the volume changes meanwhile, it is read again.
    async fn copy(&mut self, volume: &OpenVolume, path: &str, mut full: bool) -> Result<(), PodError> {
        let mut attempts = 0;
        loop {
            match self.copy_once(volume.id, path, full).await {
                Err(PodError::VolumeUnreadable { why: CopyInFailure::Changed, .. }) if attempts < REREAD.0 => {
                    attempts += 1;
                    full = true;
                    tokio::time::sleep(REREAD.1).await;
                }
                other => return other,
            }
        }
    }

    async fn copy_once(&mut self, id: u32, path: &str, full: bool) -> Result<(), PodError> {
        let (send, parts) = mpsc::channel(READ_AHEAD);
        let (copied, read) = tokio::join!(self.agent.copy_in_volume(parts), self.read(id, path, full, send));
        match (copied, read) {
            // The request to the guest broke off because the reading failed.
            (_, Err(error)) => Err(error),
            (Err(error @ (PodError::Died { .. } | PodError::Ending)), _) => Err(error),
            (Err(source), Ok(())) => Err(PodError::VolumeRejected { path: path.to_owned(), source: Box::new(source) }),
            (Ok(()), Ok(())) => Ok(()),
        }
    }

    /// Reads the volume, part by part, as fast as the guest accepts them.
    async fn read(
        &self,
        id: u32,
        path: &str,
        full: bool,
        send: mpsc::Sender<proto::WriteVolumeRequest>,
    ) -> Result<(), PodError> {
        let (mut request, mut name) = (CopyInRequest::Begin { id, full }, self.name.clone());
        loop {
            let (last, tree) = match self.channel.call(request).await {
                Some(CopyInMessage::Part { last, tree, .. }) => (last, tree),
                other => return Err(read_error(path, other)),
            };
            let tree: Result<proto::Tree, _> = wire::decode(&tree);
            let tree = tree.map_err(|_malformed| PodError::NoFileServer { path: path.to_owned() })?;
            let part = proto::WriteVolumeRequest { name: std::mem::take(&mut name), tree: Some(tree), complete: last };
            if send.send(part).await.is_err() || last {
                return Ok(());
            }
            request = CopyInRequest::Next { id };
        }
    }
}

/// Returns the error for a missing or unexpected reply.
fn read_error(path: &str, reply: Option<CopyInMessage>) -> PodError {
    let path = path.to_owned();
    match reply {
        Some(CopyInMessage::Failed { reason, text, .. }) => {
            PodError::VolumeUnreadable { path, why: reason, text: printable(&text, MAX_TEXT) }
        }
        _ => PodError::NoFileServer { path },
    }
}
