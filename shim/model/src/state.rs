//! Defines the states of pods and containers as pure tables, without clock and I/O. docs/contributor/state-machines.md shows them printed;
//! a test holds the page to these tables.
//!
//! ```text
//! pod         Booting ──up──▶ Ready ──stop, gone──▶ Stopping ──undone──▶ Stopped ──remove──▶ Removing ─▶ (forgotten)
//!                └──stop, boot failed──────────────▶   │  ▲
//!                                          undo failed ▼  │ stop, remove
//!                                                    Unclean
//!
//! container   Creating ──made──▶ Created ──start──▶ Starting ──started──▶ Running ──exit──▶ Exited
//!              │    │               │                   └──start failed───────────────────────▲
//!              │    └──not made─────┼─────────────────────────────────────────────────────────┘
//!              └──failed──┐         └──remove (as from every state)──▶ Removing ─▶ (forgotten)
//!                         └───────────────────────────────────────────────▲
//! ```
//!
//! A container that could not be made is undone (`MakeFailed`) if nobody knows it, and has ended without a start (`NotMade`)
//! if whoever asked for it was answered already.
//!
//! Every ask has three answers: go on to a state and act; it is already so (same state, act `Nothing`); refused.

use serde::{Deserialize, Serialize};

/// The state of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PodState {
    /// Its machine and its network are being made.
    Booting,
    /// Containers can be made.
    Ready,
    /// What was taken is being given back.
    Stopping,
    /// Something could not be given back; the next stop tries again.
    Unclean,
    /// Nothing is left but what is known of it.
    Stopped,
    /// It is being forgotten.
    Removing,
}

/// What happens to a pod, or is asked of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PodEvent {
    /// Machine and network are there.
    Up,
    /// They could not be made.
    BootFailed,
    /// The machine ended by itself.
    Gone,
    /// Stop it.
    Stop,
    /// Stop and forget it.
    Remove,
    /// All was given back.
    Undone,
    /// Something was not.
    UndoFailed,
    /// Its records are gone.
    Forgotten,
    /// They are not.
    ForgetFailed,
}

/// What must be done with a pod now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PodAction {
    /// Nothing.
    Nothing,
    /// Tell the start of the machine to give up; it answers with `BootFailed` or `Up`.
    CancelBoot,
    /// Give back what was taken.
    Undo,
    /// Remove folder and records.
    Forget,
}

/// The state of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ContainerState {
    /// The guest makes it.
    Creating,
    /// It can be started.
    Created,
    /// The guest starts it.
    Starting,
    /// It runs.
    Running,
    /// It ended.
    Exited,
    /// It is being forgotten.
    Removing,
}

/// What happens to a container, or is asked of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ContainerEvent {
    /// The guest has made it.
    Made,
    /// It could not be made, and nobody knows it.
    MakeFailed,
    /// It could not be made, though it counts as created.
    NotMade,
    /// Start it.
    Start,
    /// It runs.
    Started,
    /// It could not be started.
    StartFailed,
    /// It ended.
    Exit,
    /// Stop it.
    Stop,
    /// Stop and forget it.
    Remove,
    /// The guest could not remove it.
    RemoveFailed,
}

/// What must be done with a container now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ContainerAction {
    /// Nothing.
    Nothing,
    /// Have the guest start it.
    Start,
    /// Have the guest stop it.
    Stop,
    /// Have the guest remove it, then forget it.
    Remove,
}

/// What is not possible in this state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} is not possible: the {whose} is {state}")]
pub struct InvalidTransition {
    /// What was asked.
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

    /// The next state, and what must be done.
    pub fn step(self, ask: PodEvent) -> Result<(PodState, PodAction), InvalidTransition> {
        use PodAction::*;
        use PodEvent as Ask;
        use PodState::*;
        Ok(match (self, ask) {
            (Booting, Ask::Up) => (Ready, Nothing),
            (Booting, Ask::BootFailed) => (Stopping, Undo),
            (Booting, Ask::Stop | Ask::Remove) => (Stopping, CancelBoot),
            // The start gave up, or came too late: what it took is given back.
            (Stopping, Ask::Up | Ask::BootFailed) => (Stopping, Undo),
            (Ready, Ask::Stop | Ask::Remove | Ask::Gone) => (Stopping, Undo),
            (Stopping, Ask::Undone) => (Stopped, Nothing),
            (Stopping, Ask::UndoFailed) => (Unclean, Nothing),
            (Unclean, Ask::Stop | Ask::Remove) => (Stopping, Undo),
            (Stopped, Ask::Remove) => (Removing, Forget),
            (Removing, Ask::Forgotten) => (Removing, Nothing),
            (Removing, Ask::ForgetFailed) => (Stopped, Nothing),
            // Already so, or on its way.
            (Stopping | Stopped | Removing, Ask::Stop) | (Stopping | Removing, Ask::Remove) => (self, Nothing),
            (Booting | Stopping | Unclean | Stopped | Removing, Ask::Gone) => (self, Nothing),
            (state, ask) => return Err(refused(ask.name(), "pod", state.name())),
        })
    }
}

impl PodEvent {
    /// All asks.
    pub const ALL: [PodEvent; 9] = [
        PodEvent::Up,
        PodEvent::BootFailed,
        PodEvent::Gone,
        PodEvent::Stop,
        PodEvent::Remove,
        PodEvent::Undone,
        PodEvent::UndoFailed,
        PodEvent::Forgotten,
        PodEvent::ForgetFailed,
    ];

    fn name(self) -> &'static str {
        match self {
            PodEvent::Up => "up",
            PodEvent::BootFailed => "boot failed",
            PodEvent::Gone => "gone",
            PodEvent::Stop => "stop",
            PodEvent::Remove => "remove",
            PodEvent::Undone => "undone",
            PodEvent::UndoFailed => "undo failed",
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

    /// The next state, and what must be done.
    pub fn step(self, ask: ContainerEvent) -> Result<(ContainerState, ContainerAction), InvalidTransition> {
        use ContainerAction as Act;
        use ContainerEvent as Ask;
        use ContainerState::*;
        Ok(match (self, ask) {
            (Creating, Ask::Made) => (Created, Act::Nothing),
            (Creating, Ask::MakeFailed) => (Removing, Act::Remove),
            (Creating, Ask::NotMade) => (Exited, Act::Nothing),
            // Started when it is made.
            (Creating, Ask::Start) => (Creating, Act::Nothing),
            (Created, Ask::Start) => (Starting, Act::Start),
            // A watch may tell of the start before the answer to the ask does.
            (Created | Starting, Ask::Started) => (Running, Act::Nothing),
            (Starting, Ask::StartFailed) => (Exited, Act::Nothing),
            (Created | Starting | Running, Ask::Exit) => (Exited, Act::Nothing),
            (Starting | Running, Ask::Stop) => (self, Act::Stop),
            // Removed when the guest has answered: it must not make what is forgotten.
            (Creating, Ask::Remove) => (Removing, Act::Nothing),
            (Removing, Ask::Made | Ask::MakeFailed) => (Removing, Act::Remove),
            (Removing, Ask::Remove) => (Removing, Act::Nothing),
            (Created | Starting | Running | Exited, Ask::Remove) => (Removing, Act::Remove),
            (Removing, Ask::RemoveFailed) => (Exited, Act::Nothing),
            // Already so, or too late to matter.
            (Starting | Running, Ask::Start) => (self, Act::Nothing),
            (Creating | Created | Exited | Removing, Ask::Stop) => (self, Act::Nothing),
            (Running | Exited | Removing, Ask::Started) => (self, Act::Nothing),
            (Created | Running | Exited | Removing, Ask::StartFailed) => (self, Act::Nothing),
            (Creating | Exited | Removing, Ask::Exit) => (self, Act::Nothing),
            (state, ask) => return Err(refused(ask.name(), "container", state.name())),
        })
    }
}

impl ContainerEvent {
    /// All asks.
    pub const ALL: [ContainerEvent; 10] = [
        ContainerEvent::Made,
        ContainerEvent::MakeFailed,
        ContainerEvent::NotMade,
        ContainerEvent::Start,
        ContainerEvent::Started,
        ContainerEvent::StartFailed,
        ContainerEvent::Exit,
        ContainerEvent::Stop,
        ContainerEvent::Remove,
        ContainerEvent::RemoveFailed,
    ];

    fn name(self) -> &'static str {
        match self {
            ContainerEvent::Made => "made",
            ContainerEvent::MakeFailed => "make failed",
            ContainerEvent::NotMade => "not made",
            ContainerEvent::Start => "start",
            ContainerEvent::Started => "started",
            ContainerEvent::StartFailed => "start failed",
            ContainerEvent::Exit => "exit",
            ContainerEvent::Stop => "stop",
            ContainerEvent::Remove => "remove",
            ContainerEvent::RemoveFailed => "remove failed",
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

    fn table<S: std::fmt::Debug + Copy, A: std::fmt::Debug + Copy, Act: std::fmt::Debug>(
        states: &[S],
        asks: &[A],
        step: impl Fn(S, A) -> Result<(S, Act), InvalidTransition>,
    ) -> String {
        let mut text = String::from("|");
        states.iter().for_each(|state| write!(text, " | {state:?}").unwrap());
        text.push_str(" |\n|---|");
        states.iter().for_each(|_| text.push_str("---|"));
        for &ask in asks {
            write!(text, "\n| **{ask:?}**").unwrap();
            for &state in states {
                match step(state, ask) {
                    Ok((next, act)) => match (format!("{next:?}"), format!("{act:?}")) {
                        (next, act) if act == "Nothing" && next == format!("{state:?}") => write!(text, " | ·"),
                        (next, act) if act == "Nothing" => write!(text, " | {next}"),
                        (next, act) => write!(text, " | {next}, *{act}*"),
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
            assert!(state.step(ContainerEvent::Exit).is_ok(), "{state:?}: the guest may say this at any time");
        }
    }

    #[test]
    fn a_refusal_says_what_and_why() {
        let refused = ContainerState::Exited.step(ContainerEvent::Start).unwrap_err();
        assert_eq!(refused.to_string(), "start is not possible: the container is exited");
    }

    proptest! {
        /// However asks come: what was taken is given back before a pod counts as stopped, never while its start
        /// still takes, and nothing comes back to life.
        #[test]
        fn a_pod_gives_back_what_it_took(asks in proptest::collection::vec(0..5usize, 0..40)) {
            let mut state = PodState::Booting;
            let mut starting = true;
            let mut undoing = false;
            let mut taken = true;
            let mut was_down = false;
            for ask in asks {
                // What can happen depends on what is under way; the model offers only that.
                let ask = match ask {
                    0 if starting => PodEvent::Up,
                    1 if starting => PodEvent::BootFailed,
                    0 if undoing => PodEvent::Undone,
                    1 if undoing => PodEvent::UndoFailed,
                    2 => PodEvent::Stop,
                    3 => PodEvent::Remove,
                    _ => PodEvent::Gone,
                };
                match ask {
                    PodEvent::Up | PodEvent::BootFailed => starting = false,
                    PodEvent::Undone => { undoing = false; taken = false; }
                    PodEvent::UndoFailed => undoing = false,
                    _ => {}
                }
                let (next, act) = state.step(ask).unwrap();
                match act {
                    PodAction::Undo => {
                        prop_assert!(!starting && !undoing, "{state:?} {ask:?}");
                        undoing = true;
                    }
                    PodAction::CancelBoot => prop_assert!(starting),
                    PodAction::Forget => prop_assert!(!taken),
                    PodAction::Nothing => {}
                }
                was_down |= next != PodState::Booting && next != PodState::Ready;
                prop_assert!(!was_down || next != PodState::Ready);
                prop_assert!(next != PodState::Stopped || !taken);
                prop_assert!(next != PodState::Unclean || !undoing);
                state = next;
            }
        }

        #[test]
        fn a_container_never_comes_back(asks in proptest::collection::vec(0..ContainerEvent::ALL.len(), 0..40)) {
            let rank = |state| ContainerState::ALL.iter().position(|each| *each == state).unwrap();
            let mut state = ContainerState::Creating;
            for ask in asks {
                let ask = ContainerEvent::ALL[ask];
                if let Ok((next, _)) = state.step(ask) {
                    prop_assert!(rank(next) >= rank(state) || (state, ask) == (ContainerState::Removing, ContainerEvent::RemoveFailed));
                    state = next;
                }
            }
        }
    }
}
