//! Defines the states of pods and containers as pure tables, without clock and I/O. docs/contributor/state-machines.md shows them printed;
//! a test holds the page to these tables.
//!
//! ```text
//! pod         Booting ──booted──▶ Ready ──stop, VM exited──▶ Stopping ──cleaned up──▶ Stopped ──remove──▶ Removing ─▶ (forgotten)
//!                └──stop, boot failed───────────────────▶   │  ▲
//!                                            cleanup failed ▼  │ stop, remove
//!                                                         Unclean
//!
//! container   Creating ──created──▶ Created ──start──▶ Starting ──started──▶ Running ──exited──▶ Exited
//!              │    │                  │                   └──start failed─────────────────────────▲
//!              │    └──create failed after reply───────────────────────────────────────────────────┘
//!              └──create failed──┐     └──remove (as from every state)──▶ Removing ─▶ (forgotten)
//!                                └───────────────────────────────────────────▲
//! ```
//!
//! A container that could not be created is removed (`CreateFailed`) as long as no client knows it. If the reply to
//! CreateContainer was sent before (`CreateFailedAfterReply`), the container is Exited without having started.
//!
//! Every event has three outcomes: another state and an action; the same state and the action `Nothing`; a refusal. The pod
//! process has tables of its own (`nacelle_pod::state`), in which the same event has the same name.

use serde::{Deserialize, Serialize};

/// The state of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PodState {
    /// The VM and the network of the pod are being created.
    Booting,
    /// The pod can have containers.
    Ready,
    /// The pod's resources are being released.
    Stopping,
    /// Some resources could not be released; the next stop tries again.
    Unclean,
    /// All resources are released; the records are still there.
    Stopped,
    /// The records are being removed.
    Removing,
}

/// An event of a pod: a participle for what has happened, an imperative for what a client requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PodEvent {
    /// The VM and the network are ready.
    Booted,
    /// The VM or the network could not be created.
    BootFailed,
    /// The VM, or the pod process with it, exited without a request.
    VmExited,
    /// Stop the pod.
    Stop,
    /// Stop the pod and remove its records.
    Remove,
    /// All resources of the pod are released.
    CleanedUp,
    /// Some resources of the pod could not be released.
    CleanupFailed,
    /// The records of the pod are removed.
    Forgotten,
    /// The records of the pod could not be removed.
    ForgetFailed,
}

/// The action that follows an event of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PodAction {
    /// Nothing.
    Nothing,
    /// Cancel the start of the VM, which ends with `BootFailed` or `Booted`.
    CancelBoot,
    /// Release the pod's resources.
    CleanUp,
    /// Remove the pod's directory and records.
    Forget,
}

/// The state of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ContainerState {
    /// The guest creates the container.
    Creating,
    /// The container can be started.
    Created,
    /// The guest starts the container.
    Starting,
    /// The container's first process runs.
    Running,
    /// The first process has exited, or never started.
    Exited,
    /// The container and its records are being removed.
    Removing,
}

/// An event of a container: a participle for what has happened, an imperative for what a client requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ContainerEvent {
    /// The guest has created the container.
    Created,
    /// The container could not be created, and no client knows it.
    CreateFailed,
    /// The container could not be created, after CreateContainer was answered with its id.
    CreateFailedAfterReply,
    /// Start the container.
    Start,
    /// The container's first process runs.
    Started,
    /// The container could not be started.
    StartFailed,
    /// The first process has exited.
    Exited,
    /// Stop the container.
    Stop,
    /// Stop the container and remove its records.
    Remove,
    /// The guest could not remove the container, whose first process has ended.
    RemoveFailed,
    /// The guest could not remove the container, and did not report that its first process has ended.
    RemoveFailedRunning,
}

/// The action that follows an event of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ContainerAction {
    /// Nothing.
    Nothing,
    /// Have the guest start the container.
    Start,
    /// Have the guest stop the container.
    Stop,
    /// Have the guest remove the container, then remove its records.
    Remove,
}

/// An event that is refused in this state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} is not possible: the {whose} is {state}")]
pub struct InvalidTransition {
    /// The event.
    pub what: &'static str,
    /// "pod" or "container".
    pub whose: &'static str,
    /// The state it is in.
    pub state: &'static str,
}

impl PodState {
    /// All states.
    pub const ALL: [PodState; 6] = [
        PodState::Booting,
        PodState::Ready,
        PodState::Stopping,
        PodState::Unclean,
        PodState::Stopped,
        PodState::Removing,
    ];

    fn name(self) -> &'static str {
        match self {
            PodState::Booting => "booting",
            PodState::Ready => "ready",
            PodState::Stopping => "stopping",
            PodState::Unclean => "unclean",
            PodState::Stopped => "stopped",
            PodState::Removing => "being removed",
        }
    }

    /// Returns the next state and the action.
    pub fn step(self, event: PodEvent) -> Result<(PodState, PodAction), InvalidTransition> {
        use PodAction::*;
        use PodEvent as Event;
        use PodState::*;
        Ok(match (self, event) {
            (Booting, Event::Booted) => (Ready, Nothing),
            (Booting, Event::BootFailed) => (Stopping, CleanUp),
            (Booting, Event::Stop | Event::Remove) => (Stopping, CancelBoot),
            // The start was cancelled, or completed too late: its resources are released.
            (Stopping, Event::Booted | Event::BootFailed) => (Stopping, CleanUp),
            (Ready, Event::Stop | Event::Remove | Event::VmExited) => (Stopping, CleanUp),
            (Stopping, Event::CleanedUp) => (Stopped, Nothing),
            (Stopping, Event::CleanupFailed) => (Unclean, Nothing),
            (Unclean, Event::Stop | Event::Remove) => (Stopping, CleanUp),
            (Stopped, Event::Remove) => (Removing, Forget),
            (Removing, Event::Forgotten) => (Removing, Nothing),
            (Removing, Event::ForgetFailed) => (Stopped, Nothing),
            // The pod is in this state already, or on the way to it.
            (Stopping | Stopped | Removing, Event::Stop) | (Stopping | Removing, Event::Remove) => (self, Nothing),
            (Booting | Stopping | Unclean | Stopped | Removing, Event::VmExited) => (self, Nothing),
            (state, event) => return Err(refused(event.name(), "pod", state.name())),
        })
    }
}

impl PodEvent {
    /// All events.
    pub const ALL: [PodEvent; 9] = [
        PodEvent::Booted,
        PodEvent::BootFailed,
        PodEvent::VmExited,
        PodEvent::Stop,
        PodEvent::Remove,
        PodEvent::CleanedUp,
        PodEvent::CleanupFailed,
        PodEvent::Forgotten,
        PodEvent::ForgetFailed,
    ];

    fn name(self) -> &'static str {
        match self {
            PodEvent::Booted => "booted",
            PodEvent::BootFailed => "boot failed",
            PodEvent::VmExited => "VM exited",
            PodEvent::Stop => "stop",
            PodEvent::Remove => "remove",
            PodEvent::CleanedUp => "cleaned up",
            PodEvent::CleanupFailed => "cleanup failed",
            PodEvent::Forgotten => "forgotten",
            PodEvent::ForgetFailed => "forget failed",
        }
    }
}

impl ContainerState {
    /// All states.
    pub const ALL: [ContainerState; 6] = [
        ContainerState::Creating,
        ContainerState::Created,
        ContainerState::Starting,
        ContainerState::Running,
        ContainerState::Exited,
        ContainerState::Removing,
    ];

    fn name(self) -> &'static str {
        match self {
            ContainerState::Creating => "being created",
            ContainerState::Created => "created",
            ContainerState::Starting => "being started",
            ContainerState::Running => "running",
            ContainerState::Exited => "exited",
            ContainerState::Removing => "being removed",
        }
    }

    /// Returns the next state and the action.
    pub fn step(self, event: ContainerEvent) -> Result<(ContainerState, ContainerAction), InvalidTransition> {
        use ContainerAction as Action;
        use ContainerEvent as Event;
        use ContainerState::*;
        Ok(match (self, event) {
            (Creating, Event::Created) => (Created, Action::Nothing),
            (Creating, Event::CreateFailed) => (Removing, Action::Remove),
            (Creating, Event::CreateFailedAfterReply) => (Exited, Action::Nothing),
            // The container is started once it is created.
            (Creating, Event::Start) => (Creating, Action::Nothing),
            (Created, Event::Start) => (Starting, Action::Start),
            // A watch may report the start before the reply to the request does.
            (Created | Starting, Event::Started) => (Running, Action::Nothing),
            (Starting, Event::StartFailed) => (Exited, Action::Nothing),
            (Created | Starting | Running, Event::Exited) => (Exited, Action::Nothing),
            (Starting | Running, Event::Stop) => (self, Action::Stop),
            // The container is removed once the guest has replied: the guest must not create a container that has no record.
            (Creating, Event::Remove) => (Removing, Action::Nothing),
            (Removing, Event::Created | Event::CreateFailed) => (Removing, Action::Remove),
            (Removing, Event::Remove) => (Removing, Action::Nothing),
            (Created | Starting | Running | Exited, Event::Remove) => (Removing, Action::Remove),
            (Removing, Event::RemoveFailed) => (Exited, Action::Nothing),
            (Removing, Event::RemoveFailedRunning) => (Running, Action::Nothing),
            // The container is in this state already, or the event comes too late to matter.
            (Starting | Running, Event::Start) => (self, Action::Nothing),
            (Creating | Created | Exited | Removing, Event::Stop) => (self, Action::Nothing),
            (Running | Exited | Removing, Event::Started) => (self, Action::Nothing),
            (Created | Running | Exited | Removing, Event::StartFailed) => (self, Action::Nothing),
            (Creating | Exited | Removing, Event::Exited) => (self, Action::Nothing),
            (state, event) => return Err(refused(event.name(), "container", state.name())),
        })
    }
}

impl ContainerEvent {
    /// All events.
    pub const ALL: [ContainerEvent; 11] = [
        ContainerEvent::Created,
        ContainerEvent::CreateFailed,
        ContainerEvent::CreateFailedAfterReply,
        ContainerEvent::Start,
        ContainerEvent::Started,
        ContainerEvent::StartFailed,
        ContainerEvent::Exited,
        ContainerEvent::Stop,
        ContainerEvent::Remove,
        ContainerEvent::RemoveFailed,
        ContainerEvent::RemoveFailedRunning,
    ];

    fn name(self) -> &'static str {
        match self {
            ContainerEvent::Created => "created",
            ContainerEvent::CreateFailed => "create failed",
            ContainerEvent::CreateFailedAfterReply => "create failed after reply",
            ContainerEvent::Start => "start",
            ContainerEvent::Started => "started",
            ContainerEvent::StartFailed => "start failed",
            ContainerEvent::Exited => "exited",
            ContainerEvent::Stop => "stop",
            ContainerEvent::Remove => "remove",
            ContainerEvent::RemoveFailed => "remove failed",
            ContainerEvent::RemoveFailedRunning => "remove failed, running",
        }
    }
}

fn refused(what: &'static str, whose: &'static str, state: &'static str) -> InvalidTransition {
    InvalidTransition { what, whose, state }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fmt::Write;

    fn table<S: std::fmt::Debug + Copy, E: std::fmt::Debug + Copy, A: std::fmt::Debug>(
        states: &[S],
        events: &[E],
        step: impl Fn(S, E) -> Result<(S, A), InvalidTransition>,
    ) -> String {
        let mut text = String::from("|");
        states.iter().for_each(|state| write!(text, " | {state:?}").unwrap());
        text.push_str(" |\n|---|");
        states.iter().for_each(|_| text.push_str("---|"));
        for &event in events {
            write!(text, "\n| **{event:?}**").unwrap();
            for &state in states {
                match step(state, event) {
                    Ok((next, action)) => match (format!("{next:?}"), format!("{action:?}")) {
                        (next, action) if action == "Nothing" && next == format!("{state:?}") => write!(text, " | ·"),
                        (next, action) if action == "Nothing" => write!(text, " | {next}"),
                        (next, action) => write!(text, " | {next}, *{action}*"),
                    },
                    Err(_) => write!(text, " | –"),
                }
                .unwrap();
            }
            text.push_str(" |");
        }
        text
    }

    #[test]
    fn the_page_shows_these_tables() {
        let page = include_str!("../../../docs/contributor/state-machines.md");
        let pods = table(&PodState::ALL, &PodEvent::ALL, PodState::step);
        assert!(page.contains(&pods), "docs/contributor/state-machines.md must show:\n{pods}");
        let containers = table(&ContainerState::ALL, &ContainerEvent::ALL, ContainerState::step);
        assert!(page.contains(&containers), "docs/contributor/state-machines.md must show:\n{containers}");
    }

    #[test]
    fn stop_and_remove_are_refused_only_where_nothing_is_left_to_do() {
        for state in PodState::ALL {
            assert!(state.step(PodEvent::Stop).is_ok(), "{state:?}");
            assert!(state.step(PodEvent::Remove).is_ok(), "{state:?}");
        }
        for state in ContainerState::ALL {
            assert!(state.step(ContainerEvent::Stop).is_ok(), "{state:?}");
            assert!(state.step(ContainerEvent::Remove).is_ok(), "{state:?}");
            assert!(state.step(ContainerEvent::Exited).is_ok(), "{state:?}: the guest may report this at any time");
        }
    }

    #[test]
    fn a_refusal_says_what_and_why() {
        let refused = ContainerState::Exited.step(ContainerEvent::Start).unwrap_err();
        assert_eq!(refused.to_string(), "start is not possible: the container is exited");
    }

    proptest! {
        /// In whatever order events arrive: the resources of a pod are released before it is Stopped and never while its
        /// start still acquires some, and a pod that left Ready does not return to it.
        #[test]
        fn a_pod_releases_its_resources(events in proptest::collection::vec(0..5usize, 0..40)) {
            let mut state = PodState::Booting;
            let mut starting = true;
            let mut cleaning = false;
            let mut taken = true;
            let mut was_down = false;
            for event in events {
                // Only the events that are possible in the present situation.
                let event = match event {
                    0 if starting => PodEvent::Booted,
                    1 if starting => PodEvent::BootFailed,
                    0 if cleaning => PodEvent::CleanedUp,
                    1 if cleaning => PodEvent::CleanupFailed,
                    2 => PodEvent::Stop,
                    3 => PodEvent::Remove,
                    _ => PodEvent::VmExited,
                };
                match event {
                    PodEvent::Booted | PodEvent::BootFailed => starting = false,
                    PodEvent::CleanedUp => { cleaning = false; taken = false; }
                    PodEvent::CleanupFailed => cleaning = false,
                    _ => {}
                }
                let (next, action) = state.step(event).unwrap();
                match action {
                    PodAction::CleanUp => {
                        prop_assert!(!starting && !cleaning, "{state:?} {event:?}");
                        cleaning = true;
                    }
                    PodAction::CancelBoot => prop_assert!(starting),
                    PodAction::Forget => prop_assert!(!taken),
                    PodAction::Nothing => {}
                }
                was_down |= next != PodState::Booting && next != PodState::Ready;
                prop_assert!(!was_down || next != PodState::Ready);
                prop_assert!(next != PodState::Stopped || !taken);
                prop_assert!(next != PodState::Unclean || !cleaning);
                state = next;
            }
        }

        #[test]
        fn a_container_never_comes_back(events in proptest::collection::vec(0..ContainerEvent::ALL.len(), 0..40)) {
            let rank = |state| ContainerState::ALL.iter().position(|each| *each == state).unwrap();
            let mut state = ContainerState::Creating;
            for event in events {
                let event = ContainerEvent::ALL[event];
                if let Ok((next, _)) = state.step(event) {
                    let is_kept = matches!(event, ContainerEvent::RemoveFailed | ContainerEvent::RemoveFailedRunning);
                    prop_assert!(rank(next) >= rank(state) || (state == ContainerState::Removing && is_kept));
                    state = next;
                }
            }
        }
    }
}
