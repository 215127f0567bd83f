//! Computes the announced states of pods and containers, and the events that follow from a change of them. Pure: no clock, no
//! I/O. Lists, statuses and events all use these states, so an event never contradicts a list.

use crate::lifecycle::context::events::EventKind;
use nacelle_base::ContainerId;
use nacelle_model::record::{ContainerRecord, PodRecord};
use nacelle_model::state::{ContainerState, PodState};
use std::collections::BTreeMap;

/// The announced state of a container or a pod. A ready pod is running, and has exited when it is no longer ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AnnouncedState {
    /// The container exists.
    Created,
    /// The container runs, or the pod is ready.
    Running,
    /// The container has ended, or the pod is no longer ready.
    Exited,
}

/// Returns the announced state of a pod; `None` for a pod that boots, or that is cleaned up before it was ready.
pub fn pod(pod: &PodRecord) -> Option<AnnouncedState> {
    match pod.state {
        PodState::Booting => None,
        PodState::Unclean => Some(AnnouncedState::Exited),
        _ if !pod.was_ready => None,
        PodState::Ready => Some(AnnouncedState::Running),
        PodState::Stopping | PodState::Stopped | PodState::Removing => Some(AnnouncedState::Exited),
    }
}

/// Returns the announced state of a container; `None` for a container whose creation was never reported to a client.
pub fn container(container: &ContainerRecord) -> Option<AnnouncedState> {
    match container.state {
        ContainerState::Creating | ContainerState::Removing if !container.is_known() => None,
        ContainerState::Creating | ContainerState::Created | ContainerState::Starting => Some(AnnouncedState::Created),
        ContainerState::Running => Some(AnnouncedState::Running),
        ContainerState::Exited => Some(AnnouncedState::Exited),
        // CRI has no state for a removal: the container keeps its last one.
        ContainerState::Removing if container.finished_at != 0 => Some(AnnouncedState::Exited),
        ContainerState::Removing if container.started_at != 0 => Some(AnnouncedState::Running),
        ContainerState::Removing => Some(AnnouncedState::Created),
    }
}

/// The states of a pod and its containers that events have announced.
#[derive(Debug, Default)]
pub(crate) struct Announced {
    pod: Option<AnnouncedState>,
    containers: BTreeMap<ContainerId, AnnouncedState>,
}

impl Announced {
    /// Returns the announced states for a pod with these records.
    pub(crate) fn of(pod: &PodRecord, containers: &[ContainerRecord]) -> Announced {
        let mut announced = Announced::default();
        announced.due(pod, containers.iter());
        announced
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
            self.pod = Some(AnnouncedState::Created);
        }
        if self.pod == Some(AnnouncedState::Created) && is == Some(AnnouncedState::Running) {
            due.push((EventKind::Started, record.id.to_string()));
            self.pod = Some(AnnouncedState::Running);
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
        let all_ended = self.containers.values().all(|state| *state == AnnouncedState::Exited);
        if is == Some(AnnouncedState::Exited) && self.pod != Some(AnnouncedState::Exited) && (given_up || all_ended) {
            due.push((EventKind::Stopped, record.id.to_string()));
            self.pod = Some(AnnouncedState::Exited);
        }
        due
    }

    fn container_due(&mut self, record: &ContainerRecord, due: &mut Vec<(EventKind, String)>) {
        let known = self.containers.get(&record.id).copied();
        let Some(is) = container(record).filter(|_| record.is_known() || known.is_some()) else { return };
        let mut push = |kind| due.push((kind, record.id.to_string()));
        if known.is_none() {
            push(EventKind::Created);
        }
        // A container that ended before its running state was published has run all the same.
        let ran = is == AnnouncedState::Running || (is == AnnouncedState::Exited && record.started_at != 0);
        if known < Some(AnnouncedState::Running) && ran {
            push(EventKind::Started);
        }
        if known < Some(AnnouncedState::Exited) && is == AnnouncedState::Exited {
            push(EventKind::Stopped);
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
    fn due(
        announced: &mut Announced,
        pod: &PodRecord,
        containers: &[ContainerRecord],
    ) -> Vec<(EventKind, &'static str)> {
        let short = |id: String| if id == pod.id.as_str() { "p" } else { "c" };
        announced.due(pod, containers.iter()).into_iter().map(|(kind, id)| (kind, short(id))).collect()
    }

    #[test]
    fn a_life_cycle_is_announced_in_order_and_once() {
        let announced = &mut Announced::default();
        let mut pod = ready();
        pod.state = PodState::Booting;
        assert_eq!(due(announced, &pod, &[]), []);
        pod.state = PodState::Ready;
        assert_eq!(due(announced, &pod, &[]), [(Created, "p"), (Started, "p")]);
        let mut new = in_state(ContainerState::Creating);
        new.user = None;
        assert_eq!(due(announced, &pod, &[new]), []);
        for (state, events) in [
            (ContainerState::Created, &[(Created, "c")][..]),
            (ContainerState::Starting, &[]),
            (ContainerState::Running, &[(Started, "c")]),
            (ContainerState::Removing, &[]),
            (ContainerState::Exited, &[(Stopped, "c")]),
        ] {
            assert_eq!(due(announced, &pod, &[in_state(state)]), events, "{state:?}");
            assert_eq!(due(announced, &pod, &[in_state(state)]), [], "{state:?}");
        }
        assert_eq!(due(announced, &pod, &[]), [(Deleted, "c")]);
        pod.state = PodState::Stopping;
        assert_eq!(due(announced, &pod, &[]), [(Stopped, "p")]);
        pod.state = PodState::Stopped;
        assert_eq!(due(announced, &pod, &[]), []);
    }

    #[test]
    fn a_pod_stops_after_its_containers_or_when_its_cleanup_fails() {
        for (last, containers, events) in [
            (PodState::Stopping, in_state(ContainerState::Exited), &[(Stopped, "c"), (Stopped, "p")][..]),
            (PodState::Unclean, in_state(ContainerState::Running), &[(Stopped, "p")]),
        ] {
            let mut pod = ready();
            let announced = &mut Announced::of(&pod, &[in_state(ContainerState::Running)]);
            pod.state = PodState::Stopping;
            assert_eq!(due(announced, &pod, &[in_state(ContainerState::Running)]), []);
            pod.state = last;
            assert_eq!(due(announced, &pod, &[containers]), events);
        }
    }

    #[test]
    fn a_container_never_seen_running_is_announced_completely() {
        let pod = ready();
        let announced = &mut Announced::of(&pod, &[in_state(ContainerState::Created)]);
        assert_eq!(due(announced, &pod, &[in_state(ContainerState::Exited)]), [(Started, "c"), (Stopped, "c")]);
        let mut never_ran = in_state(ContainerState::Exited);
        never_ran.started_at = 0;
        let announced = &mut Announced::of(&pod, &[]);
        assert_eq!(due(announced, &pod, &[never_ran]), [(Created, "c"), (Stopped, "c")]);
    }

    #[test]
    fn a_failed_start_is_not_announced() {
        let announced = &mut Announced::default();
        let mut pod = ready();
        pod.was_ready = false;
        for state in PodState::ALL.into_iter().filter(|state| *state != PodState::Ready) {
            pod.state = state;
            assert_eq!(due(announced, &pod, &[]), [], "{state:?}");
        }
        assert!(!announced.is_known());
        let pod = ready();
        let announced = &mut Announced::of(&pod, &[]);
        for state in [ContainerState::Creating, ContainerState::Removing, ContainerState::Exited] {
            let mut never_made = in_state(state);
            never_made.user = None;
            assert_eq!(due(announced, &pod, &[never_made]), [], "{state:?}");
        }
        assert_eq!(due(announced, &pod, &[]), []);
    }

    proptest! {
        /// For any sequence of states, each event is announced at most once, in the order of a life cycle.
        #[test]
        fn events_follow_the_life_cycle(steps in proptest::collection::vec((0..6usize, 0..7usize), 0..40)) {
            let mut announced = Announced::default();
            let mut lives: BTreeMap<String, Vec<EventKind>> = BTreeMap::new();
            for (pod_state, state) in steps {
                let mut pod = ready();
                pod.state = PodState::ALL[pod_state];
                let containers: Vec<_> = ContainerState::ALL.get(state).map(|state| in_state(*state)).into_iter().collect();
                for (kind, id) in announced.due(&pod, containers.iter()) {
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
