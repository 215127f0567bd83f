//! Defines what all pods of a node share: configuration, stores, services, events and the limits of time. It also holds the types
//! that every other part of the lifecycle uses (errors, views, requests with a time limit). Nothing in here knows an actor.

pub mod boot_files;
pub(crate) mod engine;
pub(crate) mod error;
pub mod events;
pub(crate) mod request;
pub mod services;
pub(crate) mod text;
pub(crate) mod view;

use crate::config::Config;
use crate::lifecycle::template::Templates;
use crate::metrics::EventCounters;
use engine::EngineChoice;
use events::Events;
use ipnet::IpNet;
use nacelle_base::PodId;
use nacelle_base::lock::PathLock;
use nacelle_machines::vms::Vms;
use nacelle_model::process::PodProcess;
use nacelle_model::record::PodRecord;
use nacelle_pod::client::{ClientError, PodClient};
use nacelle_pod::protocol::PodFeature;
use nacelle_pod::record::SavedPodState;
use nacelle_store::Store;
use services::{Networks, Pods};
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

pub use nacelle_base::timeline::unix_nanos;

/// The state and the services that all pods of a node share.
pub struct NodeServices {
    /// The configuration.
    pub config: Config,
    /// The engines.
    pub engine: EngineChoice,
    /// The state store.
    pub store: Store,
    /// The image store.
    pub images: nacelle_image::ImageStore,
    /// The persistent VMs.
    pub vms: Vms,
    /// The templates of VMs.
    pub(crate) templates: Templates,
    /// The pod processes.
    pub pods: Arc<dyn Pods>,
    /// The networks.
    pub networks: Arc<dyn Networks>,
    /// The node's pod CIDRs.
    pub cidrs: RwLock<Vec<IpNet>>,
    /// The events of pods and containers.
    pub events: Events,
    /// The counts of events for metrics.
    pub counters: EventCounters,
    /// Locks that keep other daemons out of this daemon's directories.
    pub locks: Vec<PathLock>,
}

impl NodeServices {
    /// Returns the run directory of a pod. It belongs to the daemon; the pod process writes in a part of it
    /// (`nacelle_pod::jail_dir`).
    pub fn pod_dir(&self, id: &PodId) -> PathBuf {
        self.config.paths.pods().join(id.short())
    }

    /// Ends what is left of the pod process of this run directory, which the store knows as `stored`. This works even if the
    /// directory was lost, for example with all of `/run`. If neither is known, there was no process.
    pub(crate) async fn clean_up(
        &self,
        dir: &std::path::Path,
        stored: Option<&PodProcess>,
    ) -> Result<Option<SavedPodState>, ClientError> {
        match tokio::fs::try_exists(dir).await {
            Ok(false) if stored.is_none() => Ok(None),
            // If this cannot be determined, the cleanup returns the reason.
            _ => self.pods.clean_up(dir, stored).await,
        }
    }

    /// Connects to the process of a pod. What the store says of a process from before the protocol had versions counts.
    ///
    /// # Errors
    /// `ClientError::NotRunning` if the process has ended; others if it does not respond.
    pub(crate) async fn connect(&self, pod: &PodRecord) -> Result<PodClient, ClientError> {
        let mut client = self.pods.connect(&self.pod_dir(&pod.id)).await?;
        if pod.applies_profiles {
            // The first version with profiles had these features already.
            let recorded = [PodFeature::AnonymousVolumes, PodFeature::ApparmorProfiles, PodFeature::DetachedExec]
                .into_iter()
                .collect();
            client.add_recorded_features(recorded);
        }
        Ok(client)
    }

    pub(crate) fn pod_cidrs(&self) -> Vec<IpNet> {
        self.cidrs.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the time limit for a response of a pod process, in addition to what the request itself allows.
    pub(crate) fn request_timeout(&self) -> Duration {
        self.config.sandbox.pod_request_timeout
    }

    /// Returns the time limit for one step of a pod's teardown.
    pub(crate) fn teardown_timeout(&self) -> Duration {
        self.config.sandbox.teardown_timeout
    }
}

/// Returns the random bytes of a new id.
pub(crate) fn new_id() -> [u8; 32] {
    let mut bytes = [0; 32];
    // Linux provides random bytes to every process after its boot; without them nothing here could be named.
    nacelle_base::random::fill(&mut bytes).expect("the kernel gives random bytes");
    bytes
}
