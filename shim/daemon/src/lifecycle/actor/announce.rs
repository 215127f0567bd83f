//! Computes the announced states of pods and containers, and the events that follow from a change of them. Pure: no clock, no
//! I/O. Lists, statuses and events all use these states, so an event never contradicts a list.

use crate::lifecycle::context::events::EventKind;
use nacelle_base::ContainerId;
use nacelle_model::record::{ContainerRecord, PodRecord};
use nacelle_model::state::{ContainerState, PodState};
use std::collections::BTreeMap;

/// The announced state of a container or a pod. A ready pod is running, and has exited when it is no longer ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Shown {
    /// The container exists.
    Created,
    /// The container runs, or the pod is ready.
    Running,
    /// The container has ended, or the pod is no longer ready.
    Exited,
}

/// Returns the announced state of a pod; `None` for a pod that boots, or that is cleaned up before it was ready.
pub fn pod(pod: &PodRecord) -> Option<Shown> {
    match pod.state {
        PodState::Booting => None,
        PodState::Unclean => Some(Shown::Exited),
        _ if !pod.was_ready => None,
        PodState::Ready => Some(Shown::Running),
        PodState::Stopping | PodState::Stopped | PodState::Removing => Some(Shown::Exited),
    }
}

/// Returns the announced state of a container; `None` for a container whose creation was never reported to a client.
pub fn container(container: &ContainerRecord) -> Option<Shown> {
    match container.state {
        ContainerState::Creating | ContainerState::Removing if !container.is_known() => None,
        ContainerState::Creating | ContainerState::Created | ContainerState::Starting => Some(Shown::Created),
        ContainerState::Running => Some(Shown::Running),
        ContainerState::Exited => Some(Shown::Exited),
        // CRI has no state for a removal: the container keeps its last one.
        ContainerState::Removing if container.finished_at != 0 => Some(Shown::Exited),
        ContainerState::Removing if container.started_at != 0 => Some(Shown::Running),
        ContainerState::Removing => Some(Shown::Created),
    }
}

/// The states of a pod and its containers that events have announced.
#[derive(Debug, Default)]
pub(crate) struct Told {
    pod: Option<Shown>,
    containers: BTreeMap<ContainerId, Shown>,
}

impl Told {
    /// Returns the announced states for a pod with these records.
    pub(crate) fn of(pod: &PodRecord, containers: &[ContainerRecord]) -> Told {
        let mut told = Told::default();
        told.due(pod, containers.iter());
        told
    }

    /// Returns whether the pod has been announced.
    pub(crate) fn is_known(&self) -> bool {
        self.pod.is_some()
    }

    /// Returns the due events for the change to these records, in order, and marks them as announced.
    ///
    /// A pod that never was ready and a container whose creation never completed are not announced, even if they are listed
    /// because their cleanup failed. A pod stops after its containers.
    pub(crate) fn due<'a>(
        &mut self,
        record: &PodRecord,
        records: impl Iterator<Item = &'a ContainerRecord> + Clone,
    ) -> Vec<(EventKind, String)> {
        let mut due = Vec::new();
        let is = pod(record).filter(|_| record.was_ready || self.pod.is_some());
        if self.pod.is_none() && is.is_some() {
            due.push((EventKind::Created, record.id.to_string()));
            self.pod = Some(Shown::Created);
        }
        if self.pod == Some(Shown::Created) && is == Some(Shown::Running) {
            due.push((EventKind::Started, record.id.to_string()));
            self.pod = Some(Shown::Running);
        }
        for record in records.clone() {
            self.container_due(record, &mut due);
        }
        self.containers.retain(|id, _| {
            let stays = records.clone().any(|record| record.id == *id);
            if !stays {
                due.push((EventKind::Deleted, id.to_string()));
            }
            stays
        });
        let given_up = matches!(record.state, PodState::Unclean | PodState::Stopped | PodState::Removing);
        let all_ended = self.containers.values().all(|shown| *shown == Shown::Exited);
        if is == Some(Shown::Exited) && self.pod != Some(Shown::Exited) && (given_up || all_ended) {
            due.push((EventKind::Stopped, record.id.to_string()));
            self.pod = Some(Shown::Exited);
        }
        due
    }

    fn container_due(&mut self, record: &ContainerRecord, due: &mut Vec<(EventKind, String)>) {
        let known = self.containers.get(&record.id).copied();
        let Some(is) = container(record).filter(|_| record.is_known() || known.is_some()) else { return };
        let mut tell = |kind| due.push((kind, record.id.to_string()));
        if known.is_none() {
            tell(EventKind::Created);
        }
        // A container that ended before its running state was published has run all the same.
        let ran = is == Shown::Running || (is == Shown::Exited && record.started_at != 0);
        if known < Some(Shown::Running) && ran {
            tell(EventKind::Started);
        }
        if known < Some(Shown::Exited) && is == Shown::Exited {
            tell(EventKind::Stopped);
        }
        self.containers.insert(record.id.clone(), known.map_or(is, |known| known.max(is)));
    }
}

#[cfg(test)]
mod tests {
    use super::EventKind::{Created, Deleted, Started, Stopped};
    use super::*;
    use nacelle_model::testing as records;
    use proptest::prelude::*;

    fn ready() -> PodRecord {
        records::pod(1)
    }

    fn in_state(state: ContainerState) -> ContainerRecord {
        let mut record = records::container(2, 1);
        record.state = state;
        record.finished_at = if state == ContainerState::Exited { 8 } else { 0 };
        record.started_at = if matches!(state, ContainerState::Created | ContainerState::Starting) { 0 } else { 7 };
        record
    }

    /// Returns the due events; "p" is the pod and "c" the container.
    fn due(told: &mut Told, pod: &PodRecord, containers: &[ContainerRecord]) -> Vec<(EventKind, &'static str)> {
        let short = |id: String| if id == pod.id.as_str() { "p" } else { "c" };
        told.due(pod, containers.iter()).into_iter().map(|(kind, id)| (kind, short(id))).collect()
    }

    #[test]
    fn a_life_is_told_in_its_order_and_once() {
        let told = &mut Told::default();
        let mut pod = ready();
        pod.state = PodState::Booting;
        assert_eq!(due(told, &pod, &[]), []);
        pod.state = PodState::Ready;
        assert_eq!(due(told, &pod, &[]), [(Created, "p"), (Started, "p")]);
        let mut new = in_state(ContainerState::Creating);
        new.user = None;
        assert_eq!(due(told, &pod, &[new]), []);
        for (state, events) in [
            (ContainerState::Created, &[(Created, "c")][..]),
            (ContainerState::Starting, &[]),
            (ContainerState::Running, &[(Started, "c")]),
            (ContainerState::Removing, &[]),
            (ContainerState::Exited, &[(Stopped, "c")]),
        ] {
            assert_eq!(due(told, &pod, &[in_state(state)]), events, "{state:?}");
            assert_eq!(due(told, &pod, &[in_state(state)]), [], "{state:?}");
        }
        assert_eq!(due(told, &pod, &[]), [(Deleted, "c")]);
        pod.state = PodState::Stopping;
        assert_eq!(due(told, &pod, &[]), [(Stopped, "p")]);
        pod.state = PodState::Stopped;
        assert_eq!(due(told, &pod, &[]), []);
    }

    #[test]
    fn a_pod_stops_after_its_containers_or_when_that_cannot_be() {
        for (last, containers, events) in [
            (PodState::Stopping, in_state(ContainerState::Exited), &[(Stopped, "c"), (Stopped, "p")][..]),
            (PodState::Unclean, in_state(ContainerState::Running), &[(Stopped, "p")]),
        ] {
            let mut pod = ready();
            let told = &mut Told::of(&pod, &[in_state(ContainerState::Running)]);
            pod.state = PodState::Stopping;
            assert_eq!(due(told, &pod, &[in_state(ContainerState::Running)]), []);
            pod.state = last;
            assert_eq!(due(told, &pod, &[containers]), events);
        }
    }

    #[test]
    fn one_that_was_never_seen_to_run_is_told_whole() {
        let pod = ready();
        let told = &mut Told::of(&pod, &[in_state(ContainerState::Created)]);
        assert_eq!(due(told, &pod, &[in_state(ContainerState::Exited)]), [(Started, "c"), (Stopped, "c")]);
        let mut never_ran = in_state(ContainerState::Exited);
        never_ran.started_at = 0;
        let told = &mut Told::of(&pod, &[]);
        assert_eq!(due(told, &pod, &[never_ran]), [(Created, "c"), (Stopped, "c")]);
    }

    #[test]
    fn what_was_undone_is_not_told_of() {
        let told = &mut Told::default();
        let mut pod = ready();
        pod.was_ready = false;
        for state in PodState::ALL.into_iter().filter(|state| *state != PodState::Ready) {
            pod.state = state;
            assert_eq!(due(told, &pod, &[]), [], "{state:?}");
        }
        assert!(!told.is_known());
        let pod = ready();
        let told = &mut Told::of(&pod, &[]);
        for state in [ContainerState::Creating, ContainerState::Removing, ContainerState::Exited] {
            let mut never_made = in_state(state);
            never_made.user = None;
            assert_eq!(due(told, &pod, &[never_made]), [], "{state:?}");
        }
        assert_eq!(due(told, &pod, &[]), []);
    }

    proptest! {
        /// For any sequence of states, each event is announced at most once, in the order of a life cycle.
        #[test]
        fn a_life_goes_one_way(steps in proptest::collection::vec((0..6usize, 0..7usize), 0..40)) {
            let mut told = Told::default();
            let mut lives: BTreeMap<String, Vec<EventKind>> = BTreeMap::new();
            for (pod_state, state) in steps {
                let mut pod = ready();
                pod.state = PodState::ALL[pod_state];
                let containers: Vec<_> = ContainerState::ALL.get(state).map(|state| in_state(*state)).into_iter().collect();
                for (kind, id) in told.due(&pod, containers.iter()) {
                    let life = lives.entry(id).or_default();
                    // Container ids never repeat in practice; here a repeated id starts a new life cycle.
                    if life.last() == Some(&Deleted) {
                        life.clear();
                    }
                    prop_assert_eq!(life.is_empty(), kind == Created);
                    prop_assert!(life.last().is_none_or(|last| *last < kind), "{:?} then {:?}", life, kind);
                    life.push(kind);
                }
            }
        }
    }
}
