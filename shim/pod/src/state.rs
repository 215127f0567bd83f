//! Owns: what may happen to a pod and to a container, as two tables without effects. docs/contributor/state-machines.md shows
//! the same tables; a test compares.
//!
//! ```text
//! pod:        Booting --GuestReady--> Ready --Stop | MachineGone--> Stopping --Unwound--> Stopped
//!                `------BootFailed | MachineGone | Stop------------->'
//!
//! container:  Creating --Made--> Created --Start--> Starting --Started--> Running --Ended--> Exited
//!                |                  |                  `----StartFailed--------------------->'  |
//!             MakeFailed            `--Remove--> Removing <-------------Remove------------------'
//!                v                                   `--Removed--> Gone
//!               Gone                                 `--RemoveFailed--> Exited
//! ```

use nacelle_base::{Classify, Kind};
use std::fmt::Debug;

/// A pod. Its phases are those of the record.
pub use crate::record::Phase as Pod;

/// What can be asked of a pod or happen to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodAsk {
    /// The agent has reported that the guest is configured.
    GuestReady,
    /// Machine, agent or network did not come up.
    BootFailed,
    /// The machine has ended by itself.
    MachineGone,
    /// Somebody wants it to end.
    Stop,
    /// The machine is gone and everything is given back.
    Unwound,
}

/// What must be done now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodAct {
    /// Nothing.
    Nothing,
    /// Stop the containers, shut the guest down, give everything back.
    TakeDown,
    /// Kill what is left of the machine, give everything back.
    Unwind,
}

/// A container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Container {
    /// Not there.
    Gone,
    /// The agent makes it.
    Creating,
    /// Made, not started.
    Created,
    /// The agent starts it.
    Starting,
    /// Its first process runs.
    Running,
    /// Its first process has ended, or never began.
    Exited,
    /// The agent removes it.
    Removing,
}

/// What can be asked of a container or happen to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContainerAsk {
    /// Somebody wants it to exist.
    Create,
    /// The agent has made it.
    Made,
    /// The agent could not make it.
    MakeFailed,
    /// Somebody wants it to run.
    Start,
    /// The agent has started it.
    Started,
    /// The agent could not start it.
    StartFailed,
    /// Its first process has ended.
    Ended,
    /// The machine is gone, and the container with it.
    Lost,
    /// Somebody wants it to end.
    Stop,
    /// Somebody wants it gone.
    Remove,
    /// The agent has removed it.
    Removed,
    /// The agent could not remove it.
    RemoveFailed,
}

/// What must be done now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContainerAct {
    /// Nothing: it is so already, or the news are only recorded.
    Nothing,
    /// Wait together with whoever asked first.
    Join,
    /// Attach the image and have the agent make it.
    Make,
    /// Open its streams and have the agent start it.
    Start,
    /// Stop signal, grace, SIGKILL.
    Stop,
    /// Have the agent remove it, and the image with its last user.
    Remove,
}

/// A request that this state does not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{ask:?} is not possible in state {state:?}")]
pub struct Refused<S: Debug, A: Debug> {
    /// The state, which stays.
    pub state: S,
    /// What was asked.
    pub ask: A,
}

impl<S: Debug, A: Debug> Classify for Refused<S, A> {
    fn kind(&self) -> Kind {
        Kind::Conflict
    }
}

/// The table of pods.
pub fn pod(state: Pod, ask: PodAsk) -> Result<(Pod, PodAct), Refused<Pod, PodAsk>> {
    use {Pod::*, PodAct::*, PodAsk::*};
    Ok(match (state, ask) {
        (Booting, GuestReady) => (Ready, Nothing),
        (Booting | Ready, Stop) => (Stopping, TakeDown),
        (Booting, BootFailed) | (Booting | Ready, MachineGone) => (Stopping, Unwind),
        (Stopping, Unwound) => (Stopped, Nothing),
        // The boot was overtaken by the end.
        (Stopping | Stopped, GuestReady | BootFailed | MachineGone | Stop) => (state, Nothing),
        (Ready, GuestReady | BootFailed) | (Booting | Ready | Stopped, Unwound) => {
            return Err(Refused { state, ask });
        }
    })
}

/// The table of containers.
pub fn container(
    state: Container,
    ask: ContainerAsk,
) -> Result<(Container, ContainerAct), Refused<Container, ContainerAsk>> {
    use {Container::*, ContainerAct as Act, ContainerAsk::*};
    Ok(match (state, ask) {
        (Gone, Create) => (Creating, Act::Make),
        (Creating, Create) => (Creating, Act::Join),
        (Created | Starting | Running | Exited, Create) => (state, Act::Nothing),
        (Creating, Made) => (Created, Act::Nothing),
        (Creating, MakeFailed) => (Gone, Act::Nothing),

        (Created, Start) => (Starting, Act::Start),
        (Starting, Start) => (Starting, Act::Join),
        (Running, Start) => (Running, Act::Nothing),
        (Starting, Started) => (Running, Act::Nothing),
        (Starting, StartFailed) => (Exited, Act::Nothing),

        (Running, Ended) => (Exited, Act::Nothing),
        (Created | Starting | Running, Lost) => (Exited, Act::Nothing),
        // A reply that comes after the loss or the removal changes nothing.
        (Gone | Exited | Removing, Made | MakeFailed | Started | StartFailed | Ended) => (state, Act::Nothing),
        // What is in flight will fail by itself.
        (Gone | Creating | Exited | Removing, Lost) => (state, Act::Nothing),

        (Starting | Running, Stop) => (state, Act::Stop),
        (Gone | Created | Exited | Removing, Stop) => (state, Act::Nothing),

        (Created | Running | Exited, Remove) => (Removing, Act::Remove),
        (Removing, Remove) => (Removing, Act::Join),
        (Gone, Remove) => (Gone, Act::Nothing),
        (Removing, Removed) => (Gone, Act::Nothing),
        (Removing, RemoveFailed) => (Exited, Act::Nothing),

        _ => return Err(Refused { state, ask }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PODS: [Pod; 4] = [Pod::Booting, Pod::Ready, Pod::Stopping, Pod::Stopped];
    const POD_ASKS: [PodAsk; 5] =
        [PodAsk::GuestReady, PodAsk::BootFailed, PodAsk::MachineGone, PodAsk::Stop, PodAsk::Unwound];
    const CONTAINERS: [Container; 7] = {
        use Container::*;
        [Gone, Creating, Created, Starting, Running, Exited, Removing]
    };
    const CONTAINER_ASKS: [ContainerAsk; 12] = {
        use ContainerAsk::*;
        [Create, Made, MakeFailed, Start, Started, StartFailed, Ended, Lost, Stop, Remove, Removed, RemoveFailed]
    };

    fn row<S: Debug, A: Debug, T: Debug, E>(state: S, ask: A, answer: Result<(S, T), E>) -> String {
        match answer {
            Ok((next, act)) => format!("| {state:?} | {ask:?} | {next:?} | {act:?} |\n"),
            Err(_) => format!("| {state:?} | {ask:?} | refused | |\n"),
        }
    }

    #[test]
    fn the_document_shows_these_tables() {
        let document = include_str!("../../../docs/contributor/state-machines.md");
        let mut pods = String::new();
        for (state, ask) in PODS.into_iter().flat_map(|state| POD_ASKS.map(|ask| (state, ask))) {
            pods += &row(state, ask, pod(state, ask));
        }
        let mut containers = String::new();
        for (state, ask) in CONTAINERS.into_iter().flat_map(|state| CONTAINER_ASKS.map(|ask| (state, ask))) {
            containers += &row(state, ask, container(state, ask));
        }
        assert!(document.contains(&pods), "docs/contributor/state-machines.md needs this table:\n{pods}");
        assert!(document.contains(&containers), "docs/contributor/state-machines.md needs this table:\n{containers}");
    }

    #[test]
    fn stopping_a_pod_is_never_refused() {
        for state in PODS {
            assert!(pod(state, PodAsk::Stop).is_ok(), "{state:?}");
        }
    }

    #[test]
    fn losing_the_machine_is_never_refused() {
        for state in CONTAINERS {
            let (next, _) = container(state, ContainerAsk::Lost).unwrap();
            assert!(!matches!(next, Container::Created | Container::Starting | Container::Running));
        }
    }

    #[test]
    fn what_was_asked_can_be_asked_again() {
        use ContainerAsk::*;
        for state in CONTAINERS {
            for ask in [Create, Start, Stop, Remove] {
                if let Ok((next, _)) = container(state, ask) {
                    let again = container(next, ask);
                    assert!(again.is_ok(), "{state:?} {ask:?} {next:?}");
                    assert_eq!(again.unwrap().0, next);
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn a_stopped_pod_stays_stopped(asks in prop::collection::vec(0..POD_ASKS.len(), 0..24)) {
            let mut state = Pod::Booting;
            for ask in asks {
                if let Ok((next, act)) = pod(state, POD_ASKS[ask]) {
                    prop_assert!(state != Pod::Stopped || next == Pod::Stopped);
                    // Things are given back exactly on the way into Stopping.
                    prop_assert_eq!(act != PodAct::Nothing, state != Pod::Stopping && next == Pod::Stopping);
                    state = next;
                }
            }
        }

        #[test]
        fn a_container_runs_at_most_once(asks in prop::collection::vec(0..CONTAINER_ASKS.len(), 0..40)) {
            let (mut state, mut starts) = (Container::Gone, 0);
            for ask in asks {
                if let Ok((next, act)) = container(state, CONTAINER_ASKS[ask]) {
                    starts += usize::from(act == ContainerAct::Start);
                    if next == Container::Gone {
                        starts = 0;
                    }
                    prop_assert!(starts <= 1);
                    state = next;
                }
            }
        }
    }
}
