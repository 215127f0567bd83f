//! Restores a pod as a task that ends by itself: runs the pod, creates its containers, and removes everything if one of that fails. Finds
//! what a pod continues from that names a checkpoint in RunPodSandbox.

use super::{NewPodRequest, Node};
use crate::config::Handler;
use crate::lifecycle::actor::message::Message;
use crate::lifecycle::context::error::LifecycleError;
use crate::lifecycle::restore::{
    self, ContainerToRestore, PlannedContainer, PodBase, PodRestoreError, PodToRestore, RestoreOrder, RestoredPod,
};
use crate::traces::RequestSpan;
use nacelle_base::task::{TaskError, run_blocking_or_panic as blocking};
use nacelle_base::{Chain, PodId};
use nacelle_model::state::{ContainerState, PodState};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

/// The time before the limit of the caller at which a restore is stopped, so that its remains are removed before the answer: a tenth of the
/// limit, between these.
const MARGINS: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(2));

/// The reasons to stop a restore early.
struct RestoreStop {
    /// The caller has gone.
    cancelled: CancellationToken,
    /// The time at which the restore must stop to answer in time.
    end: Instant,
}

impl RestoreStop {
    /// Fails if the restore must stop.
    fn check(&self) -> Result<(), PodRestoreError> {
        let (why, is_deadline) = match self.cancelled.is_cancelled() {
            true => ("its caller has gone", false),
            false if Instant::now() < self.end => return Ok(()),
            false => ("the time limit of the request has passed", true),
        };
        Err(PodRestoreError::Stopped { why, is_deadline })
    }

    /// Returns the reason when the restore must stop.
    async fn wait(&self) -> PodRestoreError {
        loop {
            tokio::select! {
                () = self.cancelled.cancelled() => {}
                () = sleep_until(self.end) => {}
            }
            if let Err(stopped) = self.check() {
                return stopped;
            }
        }
    }
}

impl Node {
    /// Restores a pod with all containers of its checkpoint. They are created, and run when they are started. On failure, at the limit, and
    /// soon after this future is dropped, nothing of the pod remains. A repeated request for a pod that was restored returns the same.
    pub async fn restore_pod(&self, order: RestoreOrder) -> Result<RestoredPod, PodRestoreError> {
        let cancelled = CancellationToken::new();
        // Dropped with this future.
        let _guard = cancelled.clone().drop_guard();
        let node = self.clone();
        let restored = RequestSpan::spawn(async move { node.restore(order, cancelled).await }).await;
        restored.map_err(|error| TaskError::new("restore the pod", error))?
    }

    async fn restore(&self, order: RestoreOrder, cancelled: CancellationToken) -> Result<RestoredPod, PodRestoreError> {
        let left = order.limit.saturating_duration_since(Instant::now());
        let end = order.limit.checked_sub((left / 10).clamp(MARGINS.0, MARGINS.1)).unwrap_or_else(Instant::now);
        let handler = self.handler_of(&order.pod)?;
        let (order, planned) = blocking(move || {
            let planned = restore::plan(&order, &handler);
            (order, planned)
        })
        .await;
        let (base, containers) = planned?;
        if let Some(known) = self.find_restored(&order, &base) {
            return Ok(known);
        }
        let stop = RestoreStop { cancelled, end };
        tokio::select! {
            biased;
            stopped = stop.wait() => return Err(stopped),
            checked = base.check_images(&self.services) => checked?,
        }
        let began = Instant::now();
        let (answer, ready) = oneshot::channel();
        let has_user = self.can_have_user(&order.pod.config, order.pod.engine).await?;
        // The checks above may have taken all of the time.
        stop.check()?;
        let PodToRestore { checkpoint, config, handler, engine } = order.pod;
        let base = Some(Box::new(base));
        let (id, _) = self.place(NewPodRequest { config, handler, engine, has_user, base }, answer)?;
        let outcome = tokio::select! {
            outcome = self.create_restored(&id, ready, containers) => outcome.map_err(PodRestoreError::from),
            stopped = stop.wait() => Err(stopped),
        };
        match outcome {
            Ok(restored) => {
                let (ms, checkpoint) = (began.elapsed().as_millis(), checkpoint.display());
                tracing::info!(pod = %id, %checkpoint, ms, "the pod was restored");
                Ok(restored)
            }
            Err(error) => {
                if let Err(second) = self.remove_pod(id.as_str()).await {
                    tracing::error!(pod = %id, "cannot remove a pod that was not restored: {}", Chain(&second));
                }
                Err(error)
            }
        }
    }

    /// Returns what a pod continues from that names a checkpoint; `None` if it exists already.
    pub(super) async fn find_base(&self, pod: PodToRestore) -> Result<Option<Box<PodBase>>, PodRestoreError> {
        if self.table.rows().names.contains_key(&pod.config.name) {
            return Ok(None);
        }
        let handler = self.handler_of(&pod)?;
        let planned = blocking(move || restore::plan_pod(&pod, &handler)).await?;
        Ok(Some(Box::new(planned)))
    }

    fn handler_of(&self, pod: &PodToRestore) -> Result<Handler, LifecycleError> {
        let missing = || LifecycleError::NotFound { what: "handler", id: pod.handler.clone() };
        self.services.config.handler(&pod.handler).map(|(_, handler)| handler.clone()).ok_or_else(missing)
    }

    /// Returns the pod of this name if it was restored from the same checkpoint by the same request.
    fn find_restored(&self, order: &RestoreOrder, base: &PodBase) -> Option<RestoredPod> {
        let views = self.table.views();
        let view = views.iter().find(|view| view.pod.config.name == order.pod.config.name)?;
        let restored = view.pod.restored.as_ref()?;
        let is_same = restored.is_complete
            && view.pod.state == PodState::Ready
            && restored.checkpoint == base.restored.checkpoint
            && *view.pod.config == order.pod.config;
        if !is_same {
            return None;
        }
        let wanted = |ContainerToRestore { config, .. }: &ContainerToRestore| {
            let records = restored.containers.iter().filter_map(|id| view.containers.get(id));
            let found = records.into_iter().find(|record| *record.config == *config)?;
            Some((config.name.clone(), found.id.clone()))
        };
        let containers = order.containers.iter().map(wanted).collect::<Option<Vec<_>>>()?;
        Some(RestoredPod { id: view.pod.id.clone(), containers })
    }

    async fn create_restored(
        &self,
        id: &PodId,
        ready: oneshot::Receiver<Result<(), LifecycleError>>,
        containers: Vec<PlannedContainer>,
    ) -> Result<RestoredPod, LifecycleError> {
        ready.await.map_err(|_dropped| self.table.explain(id, LifecycleError::Ended))??;
        let (_, handle) = self.table.find(id.as_str())?;
        let mut created = Vec::with_capacity(containers.len());
        for PlannedContainer { continuation, container } in containers {
            let ContainerToRestore { config, image, volumes } = container;
            let (name, config, span) = (config.name.clone(), Box::new(config), RequestSpan::current());
            let continuation = Some(continuation);
            let create = |answer| Message::Create { continuation, config, image, volumes, span, answer };
            created.push((name, self.table.ask(&handle, create).await?));
        }
        let is_created =
            |id| handle.view.borrow().containers.get(id).is_some_and(|it| it.state == ContainerState::Created);
        if !created.iter().all(|(_, id)| is_created(id)) {
            return Err(LifecycleError::Ended);
        }
        self.table.ask(&handle, Message::CompleteRestore).await?;
        Ok(RestoredPod { id: id.clone(), containers: created })
    }
}
