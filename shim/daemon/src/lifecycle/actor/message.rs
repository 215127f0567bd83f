//! Defines the messages to a pod's actor: requests of callers, results of effects, and events of the pod process.

use crate::lifecycle::container::prepare::Prepared;
use crate::lifecycle::container::remove::RemoveFailure;
use crate::lifecycle::context::error::LifecycleError;
use crate::lifecycle::pod::boot::BootedPod;
use crate::lifecycle::pod::teardown::TornDown;
use crate::lifecycle::restore::{Continuation, PodBase};
use crate::metrics::labels::VmEndCause;
use crate::traces::RequestSpan;
use nacelle_base::machine::EngineKind;
use nacelle_base::{Classify, ContainerId, FailureKind};
use nacelle_model::container::{ContainerConfig, ContainerImage};
use nacelle_model::process::PodProcess;
use nacelle_model::resources::{PodResources, Resources, VmResources};
use nacelle_model::security::ContainerUser;
use nacelle_pod::client::PodClient;
use nacelle_proto::pod as proto;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// The sender of a response. Its receiver may be gone.
pub(crate) type Answer<T> = oneshot::Sender<Result<T, LifecycleError>>;

/// Pause before a request that the pod process did not answer is repeated.
pub(crate) const PAUSE: Duration = Duration::from_millis(100);

pub(crate) enum Message {
    /// Requests of callers.
    WaitReady(Answer<()>),
    Stop(Answer<()>),
    Remove(Answer<()>),
    /// All containers of a restored pod were created.
    CompleteRestore(Answer<()>),
    Create {
        /// How the container continues from the checkpoint of its pod; `None` for a new one.
        continuation: Option<Continuation>,
        config: Box<ContainerConfig>,
        image: ContainerImage,
        volumes: Vec<ContainerImage>,
        span: Option<RequestSpan>,
        answer: Answer<ContainerId>,
    },
    Start(ContainerId, Option<RequestSpan>, Answer<()>),
    Update(ContainerId, Box<Resources>, Answer<()>),
    UpdatePod(Box<PodResources>, Answer<()>),
    StopContainer(ContainerId, Duration, Answer<()>),
    RemoveContainer(ContainerId, Answer<()>),
    /// Results of effects, and events of the pod process.
    Spawned(PodProcess, Answer<()>),
    Booted(Box<Result<BootedPod, LifecycleError>>),
    TornDown(TornDown),
    Forgotten(Result<(), LifecycleError>),
    Found(PodClient),
    Report(proto::PodState),
    Lost,
    Gone(Option<proto::PodState>, VmEndCause),
    CreateAgain(ContainerId),
    Prepared(ContainerId, Result<Box<Prepared>, LifecycleError>),
    Created(ContainerId, Result<ContainerUser, LifecycleError>),
    Started(ContainerId, Result<(), LifecycleError>),
    Stopped(ContainerId, Result<Option<proto::PodState>, LifecycleError>, Stopping),
    StopAgain(ContainerId, Stopping),
    Removed(ContainerId, Result<(), RemoveFailure>),
    RemoveAgain(ContainerId),
    Updated(ContainerId, Box<Resources>, Result<(), LifecycleError>),
    PodUpdated(Box<Option<PodResources>>, Result<VmResources, LifecycleError>),
}

/// A pending request to stop a container.
pub(crate) struct Stopping {
    /// Time after `since` at which the container is killed. CRI sets no upper bound, so the sum may not be a valid `Instant`.
    pub(crate) grace: Duration,
    pub(crate) since: Instant,
    pub(crate) answer: Answer<()>,
    pub(crate) patience: Patience,
}

impl Stopping {
    pub(crate) fn new(grace: Duration, answer: Answer<()>) -> Stopping {
        Stopping { grace, since: Instant::now(), answer, patience: Patience::default() }
    }
}

/// The deadline for repeating a request that the pod process did not answer. The process may have ended, which this task learns
/// only a moment later: the container to stop or remove has then ended with it, and the request has succeeded.
#[derive(Default)]
pub(crate) struct Patience(Option<Instant>);

impl Patience {
    /// Returns whether to retry after this error. `limit` runs from the first error.
    pub(crate) fn lasts(&mut self, error: &LifecycleError, limit: Duration) -> bool {
        let end = *self.0.get_or_insert_with(|| Instant::now() + limit);
        error.kind() == FailureKind::Unavailable && Instant::now() < end
    }
}

/// The initial state of an actor.
pub(crate) enum Begin {
    /// A new pod, which is recorded and then booted with this engine, or continues from a checkpoint.
    New(EngineKind, Option<Box<PodBase>>, Answer<()>),
    /// A pod from the store, with what happened to it while no daemon ran.
    Known(Option<Box<Message>>),
}
