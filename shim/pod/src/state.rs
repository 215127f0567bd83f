//! Defines the states of the pod and its containers in the pod process as two tables without effects.
//! docs/contributor/state-machines.md shows the same tables; a test compares. The daemon has tables of its own
//! (`nacelle_model::state`), in which the same event has the same name.
//!
//! ```text
//! pod:        Booting --Booted--> Ready --Stop | VmExited--> Stopping --CleanedUp--> Stopped
//!                `----BootFailed | VmExited | Stop------------>'
//!
//! container:  Creating --Created--> Created --Start--> Starting --Started--> Running --Exited--> Exited
//!                |                     |                  `----StartFailed---------------------->'  |
//!             CreateFailed             `--Remove--> Removing <--------------Remove------------------'
//!                v                                      `--Removed--> Gone
//!               Gone                                    |--RemoveFailed--> Exited
//!                                                       `--RemoveFailedRunning--> Running
//! ```

use crate::record::Phase;
use nacelle_base::{Classify, FailureKind};
use std::fmt::Debug;

/// An event of the pod: a participle for what has happened, an imperative for what a client requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodEvent {
    /// The agent has reported that the guest is configured.
    Booted,
    /// The VM, the agent or the network did not start.
    BootFailed,
    /// The VM exited without a request.
    VmExited,
    /// Stop the pod.
    Stop,
    /// The VM has exited and all resources of the pod are released.
    CleanedUp,
}

/// The action that follows an event of the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodAction {
    /// Nothing.
    Nothing,
    /// Stop the containers, shut the guest down, release all resources.
    ShutDown,
    /// Kill what is left of the VM, release all resources.
    CleanUp,
}

/// The state of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ContainerState {
    /// The container does not exist.
    Gone,
    /// The agent creates the container.
    Creating,
    /// The container can be started.
    Created,
    /// The agent starts the container.
    Starting,
    /// The container's first process runs.
    Running,
    /// The first process has exited, or never started.
    Exited,
    /// The agent removes the container.
    Removing,
}

/// An event of a container: a participle for what has happened, an imperative for what a client requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContainerEvent {
    /// Create the container.
    Create,
    /// The agent has created the container.
    Created,
    /// The agent could not create the container.
    CreateFailed,
    /// Start the container.
    Start,
    /// The container's first process runs.
    Started,
    /// The container could not be started.
    StartFailed,
    /// The first process has exited.
    Exited,
    /// The VM has exited, and the container with it.
    Lost,
    /// Stop the container.
    Stop,
    /// Remove the container.
    Remove,
    /// The agent has removed the container.
    Removed,
    /// The agent could not remove the container, whose first process has ended or never ran.
    RemoveFailed,
    /// The agent could not remove the container, and did not report that its first process has ended.
    RemoveFailedRunning,
}

/// The action that follows an event of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContainerAction {
    /// Nothing.
    Nothing,
    /// Wait for the result of the earlier request of this kind.
    Join,
    /// Attach the image and have the agent create the container.
    Create,
    /// Open the container's streams and have the agent start it.
    Start,
    /// Send the stop signal, and SIGKILL after the grace period.
    Stop,
    /// Have the agent remove the container, and detach the image if no other container uses it.
    Remove,
}

/// An event that is refused in this state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{event:?} is not possible in state {state:?}")]
pub struct InvalidTransition<S: Debug, E: Debug> {
    /// The state, which stays.
    pub state: S,
    /// The event.
    pub event: E,
}

impl<S: Debug, E: Debug> Classify for InvalidTransition<S, E> {
    fn kind(&self) -> FailureKind {
        FailureKind::Conflict
    }
}

impl Phase {
    /// Returns the next state of the pod and the action.
    pub fn step(self, event: PodEvent) -> Result<(Phase, PodAction), InvalidTransition<Phase, PodEvent>> {
        use Phase::*;
        use PodAction::*;
        use PodEvent as Event;
        Ok(match (self, event) {
            (Booting, Event::Booted) => (Ready, Nothing),
            (Booting | Ready, Event::Stop) => (Stopping, ShutDown),
            (Booting, Event::BootFailed) | (Booting | Ready, Event::VmExited) => (Stopping, CleanUp),
            (Stopping, Event::CleanedUp) => (Stopped, Nothing),
            // The pod ended before its boot completed.
            (Stopping | Stopped, Event::Booted | Event::BootFailed | Event::VmExited | Event::Stop) => (self, Nothing),
            (Ready, Event::Booted | Event::BootFailed) | (Booting | Ready | Stopped, Event::CleanedUp) => {
                return Err(InvalidTransition { state: self, event });
            }
        })
    }
}

impl ContainerState {
    /// Returns the next state of the container and the action.
    pub fn step(
        self,
        event: ContainerEvent,
    ) -> Result<(ContainerState, ContainerAction), InvalidTransition<ContainerState, ContainerEvent>> {
        use ContainerAction as Action;
        use ContainerEvent as Event;
        use ContainerState::*;
        Ok(match (self, event) {
            (Gone, Event::Create) => (Creating, Action::Create),
            (Creating, Event::Create) => (Creating, Action::Join),
            (Created | Starting | Running | Exited, Event::Create) => (self, Action::Nothing),
            (Creating, Event::Created) => (Created, Action::Nothing),
            (Creating, Event::CreateFailed) => (Gone, Action::Nothing),

            (Created, Event::Start) => (Starting, Action::Start),
            (Starting, Event::Start) => (Starting, Action::Join),
            (Running, Event::Start) => (Running, Action::Nothing),
            (Starting, Event::Started) => (Running, Action::Nothing),
            (Starting, Event::StartFailed) => (Exited, Action::Nothing),

            (Running, Event::Exited) => (Exited, Action::Nothing),
            (Created | Starting | Running, Event::Lost) => (Exited, Action::Nothing),
            // A reply that arrives after the loss or the removal changes nothing.
            (
                Gone | Exited | Removing,
                Event::Created | Event::CreateFailed | Event::Started | Event::StartFailed | Event::Exited,
            ) => (self, Action::Nothing),
            // A request that is in flight will fail by itself.
            (Gone | Creating | Exited | Removing, Event::Lost) => (self, Action::Nothing),

            (Starting | Running, Event::Stop) => (self, Action::Stop),
            (Gone | Created | Exited | Removing, Event::Stop) => (self, Action::Nothing),

            (Created | Running | Exited, Event::Remove) => (Removing, Action::Remove),
            (Removing, Event::Remove) => (Removing, Action::Join),
            (Gone, Event::Remove) => (Gone, Action::Nothing),
            (Removing, Event::Removed) => (Gone, Action::Nothing),
            (Removing, Event::RemoveFailed) => (Exited, Action::Nothing),
            (Removing, Event::RemoveFailedRunning) => (Running, Action::Nothing),

            _ => return Err(InvalidTransition { state: self, event }),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PODS: [Phase; 4] = [Phase::Booting, Phase::Ready, Phase::Stopping, Phase::Stopped];
    const POD_EVENTS: [PodEvent; 5] =
        [PodEvent::Booted, PodEvent::BootFailed, PodEvent::VmExited, PodEvent::Stop, PodEvent::CleanedUp];
    const CONTAINERS: [ContainerState; 7] = {
        use ContainerState::*;
        [Gone, Creating, Created, Starting, Running, Exited, Removing]
    };
    const CONTAINER_EVENTS: [ContainerEvent; 13] = {
        use ContainerEvent::*;
        [
            Create,
            Created,
            CreateFailed,
            Start,
            Started,
            StartFailed,
            Exited,
            Lost,
            Stop,
            Remove,
            Removed,
            RemoveFailed,
            RemoveFailedRunning,
        ]
    };

    fn row<S: Debug, E: Debug, A: Debug, R>(state: S, event: E, outcome: Result<(S, A), R>) -> String {
        match outcome {
            Ok((next, action)) => format!("| {state:?} | {event:?} | {next:?} | {action:?} |\n"),
            Err(_) => format!("| {state:?} | {event:?} | refused | |\n"),
        }
    }

    #[test]
    fn the_document_shows_these_tables() {
        let document = include_str!("../../../docs/contributor/state-machines.md");
        let mut pods = String::new();
        for (state, event) in PODS.into_iter().flat_map(|state| POD_EVENTS.map(|event| (state, event))) {
            pods += &row(state, event, state.step(event));
        }
        let mut containers = String::new();
        for (state, event) in CONTAINERS.into_iter().flat_map(|state| CONTAINER_EVENTS.map(|event| (state, event))) {
            containers += &row(state, event, state.step(event));
        }
        assert!(document.contains(&pods), "docs/contributor/state-machines.md needs this table:\n{pods}");
        assert!(document.contains(&containers), "docs/contributor/state-machines.md needs this table:\n{containers}");
    }

    #[test]
    fn stopping_a_pod_is_never_refused() {
        for state in PODS {
            assert!(state.step(PodEvent::Stop).is_ok(), "{state:?}");
        }
    }

    #[test]
    fn losing_the_machine_is_never_refused() {
        for state in CONTAINERS {
            let (next, _) = state.step(ContainerEvent::Lost).unwrap();
            use ContainerState::*;
            assert!(!matches!(next, Created | Starting | Running));
        }
    }

    #[test]
    fn a_request_can_be_repeated() {
        use ContainerEvent::*;
        for state in CONTAINERS {
            for event in [Create, Start, Stop, Remove] {
                if let Ok((next, _)) = state.step(event) {
                    let again = next.step(event);
                    assert!(again.is_ok(), "{state:?} {event:?} {next:?}");
                    assert_eq!(again.unwrap().0, next);
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn a_stopped_pod_stays_stopped(events in prop::collection::vec(0..POD_EVENTS.len(), 0..24)) {
            let mut state = Phase::Booting;
            for event in events {
                if let Ok((next, action)) = state.step(POD_EVENTS[event]) {
                    prop_assert!(state != Phase::Stopped || next == Phase::Stopped);
                    // Resources are released exactly on the way into Stopping.
                    prop_assert_eq!(action != PodAction::Nothing, state != Phase::Stopping && next == Phase::Stopping);
                    state = next;
                }
            }
        }

        #[test]
        fn a_container_runs_at_most_once(events in prop::collection::vec(0..CONTAINER_EVENTS.len(), 0..40)) {
            let (mut state, mut starts) = (ContainerState::Gone, 0);
            for event in events {
                if let Ok((next, action)) = state.step(CONTAINER_EVENTS[event]) {
                    starts += usize::from(action == ContainerAction::Start);
                    if next == ContainerState::Gone {
                        starts = 0;
                    }
                    prop_assert!(starts <= 1);
                    state = next;
                }
            }
        }
    }
}
