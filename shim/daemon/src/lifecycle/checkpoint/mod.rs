//! Saves running pods to directories of the node (CheckpointPod). The pod process writes state, memory and scratch disk to files that the
//! daemon has created; the daemon adds the manifest, and last the marker that makes the checkpoint complete. Whatever fails, the pod runs
//! on and the daemon removes its files.

mod directory;
mod error;
mod manifest;
mod progress;
mod refusal;

pub use error::CheckpointError;
pub(crate) use progress::{CheckpointClaim, CheckpointStop, Checkpoints};
pub(crate) use refusal::CheckpointRefusal;

use super::context::view::View;
use super::context::{NodeServices, new_id, unix_nanos};
use directory::CheckpointDirectory;
use manifest::SavedPod;
use nacelle_base::task::run_blocking_or_panic as blocking;
use nacelle_base::{Chain, ContainerId};
use nacelle_model::checkpoint::{MEMORY_FILE, SCRATCH_FILE, STATE_FILE, SavedFileSizes};
use nacelle_model::digest::{Digest, ImageId};
use nacelle_pod::client::{CheckpointWriters, ClientError, PodClient};
use nacelle_pod::protocol::PodFeature;
use nacelle_pod::spec::PodSpec;
use nacelle_proto::pod as proto;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use tokio::time::Instant;

/// A request to save a pod.
#[derive(Clone, Debug)]
pub struct CheckpointOrder {
    /// The id of the pod or its beginning.
    pub pod: String,
    /// The absolute path of the directory for the files: it exists and is empty.
    pub output: PathBuf,
    /// The ids of all running containers or their beginnings.
    pub containers: Vec<String>,
    /// The time at which the caller gives up.
    pub limit: Instant,
}

/// A pod that is to be saved, with its checked containers.
pub(crate) struct PodCheckpoint {
    /// What all pods share.
    pub services: Arc<NodeServices>,
    /// The pod as it was when the containers were checked.
    pub view: Arc<View>,
    /// The client of its process.
    pub client: PodClient,
    /// The run directory of its process.
    pub pod_dir: PathBuf,
    /// The directory for the files.
    pub output: PathBuf,
    /// The ids of its running containers.
    pub containers: BTreeSet<ContainerId>,
    /// Keeps other checkpoints of the pod away until all files are complete or removed.
    pub claim: CheckpointClaim,
    /// The reason to stop early.
    pub stop: CheckpointStop,
}

/// Saves a pod. When this returns, the containers run, and the directory has a complete checkpoint or is empty. It must not be cancelled:
/// `stop` makes it end early.
pub(crate) async fn save(job: PodCheckpoint) -> Result<(), CheckpointError> {
    let PodCheckpoint { services, view, client, pod_dir, output, containers, claim: _claim, stop } = job;
    client.require(PodFeature::Checkpoint)?;
    stop.check(&view.pod.id)?;
    let (began, created_at, pod) = (Instant::now(), unix_nanos(), view.pod.clone());
    let (spec, directory, files) = blocking(move || {
        let spec = PodSpec::read(&pod_dir).map_err(ClientError::from)?;
        refusal::check_spec(&pod.id, &spec)?;
        let mut directory = CheckpointDirectory::open(&output)?;
        let files = CheckpointWriters {
            state: directory.create(STATE_FILE)?,
            memory: directory.create(MEMORY_FILE)?,
            scratch: directory.create(SCRATCH_FILE)?,
        };
        Ok::<_, CheckpointError>((spec, directory, files))
    })
    .await?;
    let id = hex::encode(&new_id()[..16]);
    let ids = containers.iter().map(ToString::to_string).collect();
    let saved = client.checkpoint(&id, ids, files, stop.wait()).await;
    let layouts = match &saved {
        Ok(reply) => find_layouts(&services, &reply.images).await,
        Err(_) => BTreeMap::new(),
    };
    let finished = blocking(move || {
        let pod = &view.pod.id;
        if let (Err(error), Some(_)) = (&saved, stop.cause()) {
            tracing::debug!(%pod, "a checkpoint was stopped: {}", Chain(error));
        }
        stop.check(pod)?;
        let saved =
            SavedPod { id, created_at, view: &view, containers: &containers, spec: &spec, layouts, reply: saved? };
        let files = SavedFileSizes {
            state: directory.seal(STATE_FILE, || stop.check(pod))?,
            memory: directory.seal(MEMORY_FILE, || stop.check(pod))?,
            scratch: directory.seal(SCRATCH_FILE, || stop.check(pod))?,
        };
        let manifest = saved.manifest(files)?.encode()?;
        directory.complete(&manifest, || stop.check(pod))?;
        let proto::CheckpointResponse {
            frozen_micros, paused_micros, private_pages, paused_pages, scratch_bytes, ..
        } = saved.reply;
        let ms = began.elapsed().as_millis();
        tracing::info!(
            %pod, ms, frozen_micros, paused_micros, private_pages, paused_pages, scratch_bytes, "the pod was saved"
        );
        Ok(())
    });
    finished.await
}

/// Returns how the images are laid out on the image disk, as far as the node has them. A pod process may name any.
async fn find_layouts(services: &NodeServices, images: &[proto::PlacedImage]) -> BTreeMap<ImageId, Digest> {
    let mut layouts = BTreeMap::new();
    for image in images.iter().take(manifest::MAX_IMAGES) {
        let Ok(id) = image.image_key.parse::<ImageId>() else { continue };
        match services.images.layout(&id).await {
            Ok(layout) => drop(layouts.insert(id, layout)),
            Err(error) => tracing::info!(image = %id, "an image of a saved pod has no layout: {}", Chain(&error)),
        }
    }
    layouts
}
