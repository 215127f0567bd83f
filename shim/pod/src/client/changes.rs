//! Follows the state of a pod: from its process, or, if that has another major version of the protocol, from the record that it
//! writes.

use super::{ClientError, PodClient};
use crate::record::{self, SavedPodState};
use nacelle_base::Chain;
use nacelle_base::task::run_blocking_or_panic;
use nacelle_proto::pod as proto;
use std::time::Duration;

/// The pause between two looks at the record of an incompatible process.
const RECORD_PAUSE: Duration = Duration::from_secs(1);

/// The state of a pod, now and after every change; it ends with the process.
#[derive(Debug)]
pub struct PodStateChanges(Source);

#[derive(Debug)]
enum Source {
    Process(Box<tonic::Streaming<proto::PodState>>),
    Record(Box<RecordFollower>),
}

impl PodStateChanges {
    pub(super) fn of_process(stream: tonic::Streaming<proto::PodState>) -> Self {
        PodStateChanges(Source::Process(Box::new(stream)))
    }

    pub(super) fn of_record(client: PodClient) -> Self {
        PodStateChanges(Source::Record(Box::new(RecordFollower { client, last: None, warned: false })))
    }

    /// Returns the next state, or `None` when the process has ended. Intermediate states may be missed, but never the last one.
    ///
    /// # Errors
    /// The connection broke, or the process cannot be waited for.
    pub async fn message(&mut self) -> Result<Option<proto::PodState>, ClientError> {
        match &mut self.0 {
            Source::Process(stream) => Ok(stream.message().await?),
            Source::Record(follower) => follower.next().await,
        }
    }
}

#[derive(Debug)]
struct RecordFollower {
    client: PodClient,
    last: Option<SavedPodState>,
    /// The record was unreadable, which is logged once.
    warned: bool,
}

impl RecordFollower {
    async fn next(&mut self) -> Result<Option<proto::PodState>, ClientError> {
        loop {
            match read_record(&self.client).await {
                Ok(record) if record.is_some() && record != self.last => {
                    self.last = record;
                    return Ok(self.last.as_ref().map(Into::into));
                }
                Ok(_) => {}
                Err(error) if !self.warned => {
                    self.warned = true;
                    let (dir, error) = (self.client.dir.display(), Chain(&error));
                    tracing::warn!(%dir, %error, "cannot follow the containers of an incompatible pod process; they keep their last state");
                }
                Err(_) => {}
            }
            tokio::select! {
                ended = self.client.wait_for_end() => return ended.map(|()| None),
                () = tokio::time::sleep(RECORD_PAUSE) => {}
            }
        }
    }
}

/// Reads the record of the process; returns `None` if there is none yet.
pub(super) async fn read_record(client: &PodClient) -> Result<Option<SavedPodState>, ClientError> {
    let dir = client.dir.clone();
    Ok(run_blocking_or_panic(move || record::read(&dir)).await?)
}
