//! Recovers the pods of earlier daemons at the start of a daemon: record and live process together determine how each pod
//! continues (`plan`, a pure function), and resources without a record are removed.

use super::Node;
use super::users::PodUsers;
use crate::lifecycle::actor;
use crate::lifecycle::actor::announce::Announced;
use crate::lifecycle::actor::message::{Begin, Message};
use crate::lifecycle::actor::table::{Handle, Table, send_request};
use crate::lifecycle::checkpoint::Checkpoints;
use crate::lifecycle::context::text::clip;
use crate::lifecycle::context::{NodeServices, unix_nanos};
use crate::metrics::EventCounters;
use crate::metrics::labels::{ExitReason, RecoveryOutcome, VmEndCause};
use nacelle_base::task::run_blocking_or_panic as blocking;
use nacelle_base::{Chain, PodId};
use nacelle_model::record::{ContainerRecord, PodRecord, RestoredFrom};
use nacelle_model::state::{ContainerState, PodState};
use nacelle_pod::client::{ClientError, PodClient};
use nacelle_pod::protocol::{PodFeature, PodFeatureSet};
use nacelle_proto::pod as proto;
use nacelle_store::Contents;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// The store's key of the node's pod CIDRs.
pub(super) const POD_CIDRS: &str = "pod_cidrs";

/// The state of a pod's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// The process responds.
    Alive,
    /// The process exists and does not respond.
    Silent,
    /// The process is gone.
    Dead,
}

/// The recovery of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// The pod continues unchanged.
    Adopt,
    /// The pod process is searched for.
    Search,
    /// The pod process ended meanwhile: its last record is read, and the pod's resources are released.
    Lost,
    /// The pod's resources are released.
    Undo,
    /// The pod's resources are released and its record is removed: no client knows the pod.
    Discard,
    /// Nothing is to be done.
    Rest,
}

/// Returns the recovery of a pod in this state.
pub fn plan(state: PodState, was_ready: bool, found: Found) -> Plan {
    match (state, found) {
        // No client received the id: kubelet repeats its request.
        (PodState::Booting | PodState::Removing, _) => Plan::Discard,
        (PodState::Stopping | PodState::Unclean | PodState::Stopped, _) if !was_ready => Plan::Discard,
        (PodState::Stopping | PodState::Unclean, _) => Plan::Undo,
        (PodState::Stopped, _) => Plan::Rest,
        (PodState::Ready, Found::Alive) => Plan::Adopt,
        (PodState::Ready, Found::Silent) => Plan::Search,
        (PodState::Ready, Found::Dead) => Plan::Lost,
    }
}

/// The recovery of a container of an adopted pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContainerPlan {
    /// In this state; the report of the pod process adds the rest.
    As(ContainerState),
    /// The guest creates the container again: a client may know its id.
    Make,
    /// The interrupted removal continues.
    Remove,
    /// The pod process does not know the container: it ended in an unknown way.
    Lost,
}

/// Returns how a container in this state continues. `phase` is its phase according to the pod process, `None` if that does not
/// know it.
pub fn container_plan(state: ContainerState, phase: Option<proto::ContainerPhase>) -> ContainerPlan {
    match (state, phase) {
        (ContainerState::Creating, _) => ContainerPlan::Make,
        (ContainerState::Removing, _) => ContainerPlan::Remove,
        (ContainerState::Starting, Some(proto::ContainerPhase::Created)) => ContainerPlan::As(ContainerState::Created),
        (ContainerState::Created | ContainerState::Starting | ContainerState::Running, None) => ContainerPlan::Lost,
        (state, _) => ContainerPlan::As(state),
    }
}

/// Returns how a container continues if there is no pod process to ask. No container may stay in a state that an effect would
/// have to end.
pub fn container_plan_unasked(state: ContainerState) -> ContainerPlan {
    match state {
        ContainerState::Creating => ContainerPlan::Lost,
        ContainerState::Removing => ContainerPlan::Remove,
        ContainerState::Starting => ContainerPlan::As(ContainerState::Created),
        state => ContainerPlan::As(state),
    }
}

/// Time to recover all pods before the daemon serves; slower recoveries continue while it serves.
const LIMIT: Duration = Duration::from_secs(150);

impl Node {
    /// Recovers the pods in the store and cleans up the node.
    pub async fn recover(services: NodeServices, contents: Contents) -> Node {
        let cidrs = contents.settings.get(POD_CIDRS).map(String::as_str).unwrap_or_default();
        let cidrs = cidrs.split(',').filter_map(|cidr| cidr.parse().ok()).collect();
        *services.cidrs.write().unwrap_or_else(PoisonError::into_inner) = cidrs;
        let times = contents.containers.iter().flat_map(|c| [c.created_at, c.started_at, c.finished_at]);
        if let Some(last) = times.chain(contents.pods.iter().map(|pod| pod.created_at)).max() {
            services.events.go_on_after(last);
        }
        // Before any pod is recovered, because requests may come while the recovery continues.
        let users = PodUsers::new(&services.config.jail, contents.pods.iter().filter_map(|pod| pod.user));
        let table = Arc::new(Table::new(users));
        let node = Node { services: Arc::new(services), table, checkpoints: Checkpoints::default() };
        remove_orphans(&node.services, &contents.pods).await;
        let mut containers: BTreeMap<PodId, Vec<ContainerRecord>> = BTreeMap::new();
        for container in contents.containers {
            containers.entry(container.pod.clone()).or_default().push(container);
        }
        let mut work = JoinSet::new();
        for pod in contents.pods {
            let containers = containers.remove(&pod.id).unwrap_or_default();
            let node = node.clone();
            work.spawn(async move { node.take_over(pod, containers).await });
        }
        if timeout(LIMIT, async { while work.join_next().await.is_some() {} }).await.is_err() {
            tracing::warn!("the recovery of some pods takes long; it continues while the daemon serves");
        }
        work.detach_all();
        node.table.collect_images(&node.services);
        node
    }

    async fn take_over(&self, mut pod: PodRecord, mut containers: Vec<ContainerRecord>) {
        // The states that the earlier daemon has announced.
        let announced = Announced::of(&pod, &containers);
        let (found, client, last) = look(&self.services, &pod).await;
        let plan = match &pod.restored {
            // No client received the ids: its containers, of which some may not be there, must not run.
            Some(restored) if !restored.is_complete => Plan::Discard,
            // What of the container has continued is not known, and it must not start anew.
            Some(restored) if pod.state == PodState::Ready && containers.iter().any(|it| continues(restored, it)) => {
                Plan::Undo
            }
            _ => plan(pod.state, pod.was_ready, found),
        };
        tracing::info!(pod = %pod.id, state = ?pod.state, ?found, ?plan, "found again");
        let counters = &self.services.counters;
        counters.count_recovery(outcome(plan));
        if let (Plan::Adopt, Some(client), Some(state)) = (plan, &client, &last) {
            let known: BTreeSet<&str> = containers.iter().map(|container| container.id.as_str()).collect();
            let unknown = state.containers.iter().map(|reported| reported.id.as_str()).filter(|id| !known.contains(id));
            end_unrecorded_containers(&self.services, &pod.id, client, unknown).await;
        }
        let (mut remove, mut make) = (Vec::new(), Vec::new());
        for container in &mut containers {
            let how = match (plan, &last) {
                (Plan::Adopt, Some(state)) => {
                    let reported = state.containers.iter().find(|reported| reported.id == container.id.as_str());
                    container_plan(container.state, reported.map(proto::ContainerState::phase))
                }
                _ => container_plan_unasked(container.state),
            };
            match how {
                ContainerPlan::As(state) => container.state = state,
                ContainerPlan::Make => {
                    container.answered = true;
                    make.push(container.id.clone());
                }
                ContainerPlan::Remove => {
                    lose(container, "the daemon ended while it was removed", counters);
                    remove.push(container.id.clone());
                }
                ContainerPlan::Lost => lose(container, "the pod process does not know the container", counters),
            }
        }
        let first = match plan {
            Plan::Adopt => client.map(Message::Found),
            Plan::Search => Some(Message::Lost),
            Plan::Lost => Some(Message::Gone(last.clone(), VmEndCause::Unobserved)),
            Plan::Undo | Plan::Discard => {
                // The state is that after a failed cleanup: a request to stop the pod tries again.
                pod.state = PodState::Unclean;
                None
            }
            Plan::Rest => None,
        };
        pod.was_ready &= plan != Plan::Discard;
        let inbox = self.enter(pod.clone(), containers, announced, first);
        let id = pod.id.as_str();
        let done = match plan {
            Plan::Adopt => {
                for id in make {
                    // The inbox is closed if the pod is gone already.
                    let _ = inbox.send(Message::CreateAgain(id)).await;
                }
                catch_up(&inbox, last).await;
                Ok(())
            }
            Plan::Undo => self.stop_pod(id).await,
            Plan::Discard => self.remove_pod(id).await,
            Plan::Lost => {
                // Answered after the loss has been handled.
                let _ = send_request(&inbox, Message::WaitReady).await;
                Ok(())
            }
            Plan::Search | Plan::Rest => Ok(()),
        };
        if let Err(error) = done {
            tracing::error!(pod = %pod.id, "cannot recover the pod: {}", Chain(&error));
        }
        // The removal of a pod includes its containers; a pod that is being searched for cannot be asked.
        for id in remove.into_iter().filter(|_| !matches!(plan, Plan::Discard | Plan::Search)) {
            if let Err(error) = self.remove(id.as_str()).await {
                tracing::error!(pod = %pod.id, container = %id, "cannot remove the container: {}", Chain(&error));
            }
        }
    }

    /// Adds a pod to the table and starts its actor.
    fn enter(
        &self,
        pod: PodRecord,
        containers: Vec<ContainerRecord>,
        announced: Announced,
        first: Option<Message>,
    ) -> mpsc::Sender<Message> {
        let (id, name) = (pod.id.clone(), pod.config.name.clone());
        let (actor, inbox, view) =
            actor::new(Arc::clone(&self.services), Arc::clone(&self.table), pod, containers, announced);
        let mut rows = self.table.rows();
        rows.names.insert(name, id.clone());
        rows.pods.insert(id, Handle { inbox: inbox.clone(), view });
        tokio::spawn(actor.run(Begin::Known(first.map(Box::new))));
        inbox
    }
}

/// Returns whether the daemon ended while this container continued from the checkpoint of its pod.
fn continues(restored: &RestoredFrom, container: &ContainerRecord) -> bool {
    container.state == ContainerState::Creating && restored.containers.contains(&container.id)
}

/// Marks a container as ended whose fate can no longer be learned.
fn lose(container: &mut ContainerRecord, why: &str, counters: &EventCounters) {
    container.state = ContainerState::Exited;
    if container.finished_at == 0 {
        container.finished_at = unix_nanos();
        container.exit_code = i32::try_from(nacelle_pod::record::LOST).unwrap_or(i32::MAX);
        container.message = why.to_owned();
        counters.count_container_exit(ExitReason::of(container));
    }
}

/// Returns how a recovery counts.
fn outcome(plan: Plan) -> RecoveryOutcome {
    match plan {
        Plan::Adopt => RecoveryOutcome::Adopted,
        Plan::Search => RecoveryOutcome::Silent,
        Plan::Lost => RecoveryOutcome::Lost,
        Plan::Undo => RecoveryOutcome::CleanedUp,
        Plan::Discard => RecoveryOutcome::Discarded,
        Plan::Rest => RecoveryOutcome::Stopped,
    }
}

/// Ends containers that run in an adopted pod and have no record, which a store that was restored or imported may lack: a client
/// does not know them, and may start a second instance. A pod process can name any containers; all of them have one time limit.
async fn end_unrecorded_containers(
    services: &NodeServices,
    pod: &PodId,
    client: &PodClient,
    unknown: impl Iterator<Item = &str>,
) {
    let end_all = async {
        for container in unknown {
            let ended = async {
                client.stop_container(container, Duration::ZERO).await?;
                client.remove_container(container).await
            };
            let container = clip(container);
            match ended.await {
                Ok(()) => tracing::warn!(%pod, container, "ended a container without a record"),
                Err(error) => {
                    let error = Chain(&error);
                    tracing::error!(%pod, container, %error, "cannot end a container without a record; it ends with the pod");
                }
            }
        }
    };
    if timeout(services.request_timeout(), end_all).await.is_err() {
        tracing::error!(%pod, "cannot end all containers without a record in time; they end with the pod");
    }
}

/// Sends the report of an adopted pod's process to its actor.
async fn catch_up(inbox: &mpsc::Sender<Message>, state: Option<proto::PodState>) {
    if let Some(state) = state {
        // The inbox is closed if the pod is gone already.
        let _ = inbox.send(Message::Report(state)).await;
        let _ = send_request(inbox, Message::WaitReady).await;
    }
}

/// Returns the state of a pod's process, its client, and its current or last report.
async fn look(services: &NodeServices, pod: &PodRecord) -> (Found, Option<PodClient>, Option<proto::PodState>) {
    let dir = services.pod_dir(&pod.id);
    match services.connect(pod).await {
        Ok(client) => {
            log_other_version(pod, &client);
            match timeout(services.request_timeout(), client.state()).await {
                Ok(Ok(state)) => (Found::Alive, Some(client), Some(state)),
                // The containers keep the states of the store.
                Ok(Err(ClientError::Protocol(_))) => (Found::Alive, Some(client), None),
                Ok(Err(_)) | Err(_) => (Found::Silent, None, None),
            }
        }
        Err(ClientError::NotRunning { .. }) => match services.clean_up(&dir, pod.process.as_ref()).await {
            Ok(last) => (Found::Dead, None, last.as_ref().map(Into::into)),
            Err(error) => {
                tracing::warn!(pod = %pod.id, "cannot read what is left of it: {}", Chain(&error));
                (Found::Dead, None, None)
            }
        },
        Err(error) => {
            tracing::warn!(pod = %pod.id, "the pod process is silent: {}", Chain(&error));
            (Found::Silent, None, None)
        }
    }
}

/// Logs that the process of a pod is of another version than this daemon, and what it lacks.
fn log_other_version(pod: &PodRecord, client: &PodClient) {
    let peer = client.peer();
    if peer.is_same_version() {
        return;
    }
    let missing: Vec<_> = peer.missing_features().iter().map(PodFeature::name).collect();
    match peer.require(PodFeatureSet::BASE) {
        Ok(()) => {
            tracing::info!(pod = %pod.id, process = %peer, missing = missing.join(","), "the pod process is of another version");
        }
        Err(error) => tracing::warn!(pod = %pod.id, "{}", Chain(&error)),
    }
}

/// Removes directories, processes and networks that belong to no record. A process is ended with its control group, also if its
/// run directory is lost.
async fn remove_orphans(services: &NodeServices, known: &[PodRecord]) {
    let directories: BTreeSet<PathBuf> = known.iter().map(|pod| services.pod_dir(&pod.id)).collect();
    let pods = services.config.paths.pods();
    let list =
        move || -> std::io::Result<Vec<PathBuf>> { std::fs::read_dir(pods)?.map(|entry| Ok(entry?.path())).collect() };
    let there = match blocking(list).await {
        Ok(there) => there,
        Err(error) => {
            tracing::error!(%error, "cannot list the directories of pods");
            Vec::new()
        }
    };
    for dir in there.into_iter().filter(|dir| !directories.contains(dir)) {
        tracing::warn!(dir = %dir.display(), "a pod without a record is removed");
        match services.clean_up(&dir, None).await {
            Ok(_) => {
                let removed = blocking(move || nacelle_pod::run_dir::remove(&dir)).await;
                if let Err(error) = removed {
                    tracing::error!("cannot remove it: {}", Chain(&error));
                }
            }
            Err(error) => tracing::error!("cannot end its process: {}", Chain(&error)),
        }
    }
    // Those without a directory: before their networks and disks are released.
    services.pods.end_unrecorded(&services.config.paths.pods(), &directories).await;
    let keep: BTreeSet<_> = known.iter().map(|pod| pod.id.clone()).collect();
    // A scratch disk has a name only while its pod starts, and a start ends with its daemon.
    let (scratch, kept) = (services.config.paths.scratch(), keep.clone());
    if let Err(error) = blocking(move || nacelle_pod::scratch::remove_disks(&scratch, &kept)).await {
        tracing::error!("cannot remove the disks of starts that were cut: {}", Chain(&error));
    }
    let known = move || keep.clone();
    if let Err(error) = services.networks.gc(&known, services.teardown_timeout()).await {
        tracing::error!("cannot remove networks without a pod: {}", Chain(&error));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_lives_is_killed_and_nothing_dead_is_kept() {
        for was_ready in [false, true] {
            for state in PodState::ALL {
                for found in [Found::Alive, Found::Silent, Found::Dead] {
                    let plan = plan(state, was_ready, found);
                    if state == PodState::Ready && found != Found::Dead {
                        assert!(matches!(plan, Plan::Adopt | Plan::Search), "{state:?} {found:?}");
                    }
                    if state != PodState::Ready && state != PodState::Stopped {
                        assert!(matches!(plan, Plan::Undo | Plan::Discard), "{state:?} {found:?}");
                    }
                }
            }
        }
        assert_eq!(plan(PodState::Ready, true, Found::Dead), Plan::Lost);
        assert_eq!(plan(PodState::Stopped, true, Found::Dead), Plan::Rest);
        assert_eq!(plan(PodState::Booting, false, Found::Alive), Plan::Discard);
    }

    #[test]
    fn a_container_whose_start_was_cut_is_what_the_pod_says() {
        use proto::ContainerPhase as Phase;
        let starting = |phase| container_plan(ContainerState::Starting, phase);
        assert_eq!(starting(Some(Phase::Created)), ContainerPlan::As(ContainerState::Created));
        assert_eq!(starting(Some(Phase::Running)), ContainerPlan::As(ContainerState::Starting));
        assert_eq!(starting(None), ContainerPlan::Lost);
        for phase in [None, Some(Phase::Created), Some(Phase::Running)] {
            assert_eq!(container_plan(ContainerState::Creating, phase), ContainerPlan::Make);
            assert_eq!(container_plan(ContainerState::Exited, phase), ContainerPlan::As(ContainerState::Exited));
        }
        assert_eq!(
            container_plan(ContainerState::Running, Some(Phase::Exited)),
            ContainerPlan::As(ContainerState::Running)
        );
        for state in ContainerState::ALL {
            if let ContainerPlan::As(state) = container_plan_unasked(state) {
                use ContainerState::{Created, Exited, Running};
                assert!(matches!(state, Created | Running | Exited), "{state:?}: no effect would end it");
            }
        }
    }
}
