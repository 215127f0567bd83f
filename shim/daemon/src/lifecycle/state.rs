//! Owns: what pods and containers may do: pure tables, no clock, no I/O. docs/state-machines.md shows them printed;
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
pub enum Pod {
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
pub enum PodAsk {
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
pub enum PodAct {
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
pub enum Container {
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
pub enum ContainerAsk {
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
pub enum ContainerAct {
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
pub struct Refused {
    /// What was asked.
    pub what: &'static str,
    /// "pod" or "container".
    pub whose: &'static str,
    /// The state it is in.
    pub state: &'static str,
}

impl Pod {
    /// All states.
    pub const ALL: [Pod; 6] = [Pod::Booting, Pod::Ready, Pod::Stopping, Pod::Unclean, Pod::Stopped, Pod::Removing];

    fn name(self) -> &'static str {
        match self {
            Pod::Booting => "booting",
            Pod::Ready => "ready",
            Pod::Stopping => "stopping",
            Pod::Unclean => "unclean",
            Pod::Stopped => "stopped",
            Pod::Removing => "being removed",
        }
    }

    /// The next state, and what must be done.
    pub fn step(self, ask: PodAsk) -> Result<(Pod, PodAct), Refused> {
        use Pod::*;
        use PodAct::*;
        use PodAsk as Ask;
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

impl PodAsk {
    /// All asks.
    pub const ALL: [PodAsk; 9] = [
        PodAsk::Up,
        PodAsk::BootFailed,
        PodAsk::Gone,
        PodAsk::Stop,
        PodAsk::Remove,
        PodAsk::Undone,
        PodAsk::UndoFailed,
        PodAsk::Forgotten,
        PodAsk::ForgetFailed,
    ];

    fn name(self) -> &'static str {
        match self {
            PodAsk::Up => "up",
            PodAsk::BootFailed => "boot failed",
            PodAsk::Gone => "gone",
            PodAsk::Stop => "stop",
            PodAsk::Remove => "remove",
            PodAsk::Undone => "undone",
            PodAsk::UndoFailed => "undo failed",
            PodAsk::Forgotten => "forgotten",
            PodAsk::ForgetFailed => "forget failed",
        }
    }
}

impl Container {
    /// All states.
    pub const ALL: [Container; 6] = [
        Container::Creating,
        Container::Created,
        Container::Starting,
        Container::Running,
        Container::Exited,
        Container::Removing,
    ];

    fn name(self) -> &'static str {
        match self {
            Container::Creating => "being created",
            Container::Created => "created",
            Container::Starting => "being started",
            Container::Running => "running",
            Container::Exited => "exited",
            Container::Removing => "being removed",
        }
    }

    /// The next state, and what must be done.
    pub fn step(self, ask: ContainerAsk) -> Result<(Container, ContainerAct), Refused> {
        use Container::*;
        use ContainerAct as Act;
        use ContainerAsk as Ask;
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

impl ContainerAsk {
    /// All asks.
    pub const ALL: [ContainerAsk; 10] = [
        ContainerAsk::Made,
        ContainerAsk::MakeFailed,
        ContainerAsk::NotMade,
        ContainerAsk::Start,
        ContainerAsk::Started,
        ContainerAsk::StartFailed,
        ContainerAsk::Exit,
        ContainerAsk::Stop,
        ContainerAsk::Remove,
        ContainerAsk::RemoveFailed,
    ];

    fn name(self) -> &'static str {
        match self {
            ContainerAsk::Made => "made",
            ContainerAsk::MakeFailed => "make failed",
            ContainerAsk::NotMade => "not made",
            ContainerAsk::Start => "start",
            ContainerAsk::Started => "started",
            ContainerAsk::StartFailed => "start failed",
            ContainerAsk::Exit => "exit",
            ContainerAsk::Stop => "stop",
            ContainerAsk::Remove => "remove",
            ContainerAsk::RemoveFailed => "remove failed",
        }
    }
}

fn refused(what: &'static str, whose: &'static str, state: &'static str) -> Refused {
    Refused { what, whose, state }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fmt::Write;

    fn table<S: std::fmt::Debug + Copy, A: std::fmt::Debug + Copy, Act: std::fmt::Debug>(
        states: &[S],
        asks: &[A],
        step: impl Fn(S, A) -> Result<(S, Act), Refused>,
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
        let page = include_str!("../../../../docs/state-machines.md");
        let pods = table(&Pod::ALL, &PodAsk::ALL, Pod::step);
        assert!(page.contains(&pods), "docs/state-machines.md must show:\n{pods}");
        let containers = table(&Container::ALL, &ContainerAsk::ALL, Container::step);
        assert!(page.contains(&containers), "docs/state-machines.md must show:\n{containers}");
    }

    #[test]
    fn stop_and_remove_are_refused_only_where_nothing_is_left_to_do() {
        for state in Pod::ALL {
            assert!(state.step(PodAsk::Stop).is_ok(), "{state:?}");
            assert!(state.step(PodAsk::Remove).is_ok(), "{state:?}");
        }
        for state in Container::ALL {
            assert!(state.step(ContainerAsk::Stop).is_ok(), "{state:?}");
            assert!(state.step(ContainerAsk::Remove).is_ok(), "{state:?}");
            assert!(state.step(ContainerAsk::Exit).is_ok(), "{state:?}: the guest may say this at any time");
        }
    }

    #[test]
    fn a_refusal_says_what_and_why() {
        let refused = Container::Exited.step(ContainerAsk::Start).unwrap_err();
        assert_eq!(refused.to_string(), "start is not possible: the container is exited");
    }

    proptest! {
        /// However asks come: what was taken is given back before a pod counts as stopped, never while its start
        /// still takes, and nothing comes back to life.
        #[test]
        fn a_pod_gives_back_what_it_took(asks in proptest::collection::vec(0..5usize, 0..40)) {
            let mut state = Pod::Booting;
            let mut starting = true;
            let mut undoing = false;
            let mut taken = true;
            let mut was_down = false;
            for ask in asks {
                // What can happen depends on what is under way; the model offers only that.
                let ask = match ask {
                    0 if starting => PodAsk::Up,
                    1 if starting => PodAsk::BootFailed,
                    0 if undoing => PodAsk::Undone,
                    1 if undoing => PodAsk::UndoFailed,
                    2 => PodAsk::Stop,
                    3 => PodAsk::Remove,
                    _ => PodAsk::Gone,
                };
                match ask {
                    PodAsk::Up | PodAsk::BootFailed => starting = false,
                    PodAsk::Undone => { undoing = false; taken = false; }
                    PodAsk::UndoFailed => undoing = false,
                    _ => {}
                }
                let (next, act) = state.step(ask).unwrap();
                match act {
                    PodAct::Undo => {
                        prop_assert!(!starting && !undoing, "{state:?} {ask:?}");
                        undoing = true;
                    }
                    PodAct::CancelBoot => prop_assert!(starting),
                    PodAct::Forget => prop_assert!(!taken),
                    PodAct::Nothing => {}
                }
                was_down |= next != Pod::Booting && next != Pod::Ready;
                prop_assert!(!was_down || next != Pod::Ready);
                prop_assert!(next != Pod::Stopped || !taken);
                prop_assert!(next != Pod::Unclean || !undoing);
                state = next;
            }
        }

        #[test]
        fn a_container_never_comes_back(asks in proptest::collection::vec(0..ContainerAsk::ALL.len(), 0..40)) {
            let rank = |state| Container::ALL.iter().position(|each| *each == state).unwrap();
            let mut state = Container::Creating;
            for ask in asks {
                let ask = ContainerAsk::ALL[ask];
                if let Ok((next, _)) = state.step(ask) {
                    prop_assert!(rank(next) >= rank(state) || (state, ask) == (Container::Removing, ContainerAsk::RemoveFailed));
                    state = next;
                }
            }
        }
    }
}
