//! Owns: what can go wrong in a pod process, and the form in which it is told to several waiters.

use crate::devices::DeviceError;
use crate::guest_values::Bounded;
use crate::images::ImageError;
use crate::log::LogError;
use crate::record::{Phase, RecordError};
use crate::scratch::ScratchError;
use crate::spec::SpecError;
use crate::state::{ContainerEvent, ContainerState, InvalidTransition};
use nacelle_base::files::FileError;
use nacelle_base::push::Why;
use nacelle_base::task::TaskError;
use nacelle_base::{Chain, Classify, Kind};
use nacelle_engine::{BlockError, EngineError, LinkError};
use nacelle_net::NetError;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// A failure of the pod process.
#[derive(Debug, thiserror::Error)]
pub enum PodError {
    /// The specification.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// Which process serves the pod is not known, or it is another.
    #[error(transparent)]
    Identity(#[from] crate::identity::IdentityError),
    /// The daemon has not started this process for this directory.
    #[error("{}/process.json does not name this process: only the daemon starts one for a pod", dir.display())]
    NotNamed {
        /// The run directory.
        dir: PathBuf,
    },
    /// state.json.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// Another file in the run directory.
    #[error(transparent)]
    File(#[from] FileError),
    /// The process cannot shut itself in.
    #[error(transparent)]
    Jail(#[from] nacelle_jail::JailError),
    /// No process for the volumes of the node.
    #[error(transparent)]
    Share(#[from] nacelle_fs::ShareError),
    /// The scratch disk.
    #[error("cannot make the scratch disk")]
    Scratch(#[from] ScratchError),
    /// Tap or namespace.
    #[error("cannot make the pod's network")]
    Net(#[from] NetError),
    /// The machine cannot be as specified.
    #[error("the machine cannot be made")]
    Machine(#[from] nacelle_engine::SpecError),
    /// The engine did not start or stop it.
    #[error("the engine failed")]
    Engine(#[from] EngineError),
    /// An image or a device cannot be placed on its disk.
    #[error("cannot place {key} on the machine's disk")]
    Place {
        /// The image, or the device's path.
        key: String,
        /// Why.
        source: BlockError,
    },
    /// A request names an image that cannot be.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A device of the node that a container cannot have.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A container's log file.
    #[error(transparent)]
    Log(#[from] LogError),
    /// A connection with the guest.
    #[error("cannot {what}")]
    Link {
        /// "hear the guest's agent", "connect to the agent".
        what: &'static str,
        /// Why.
        source: LinkError,
    },
    /// A stream with the guest broke.
    #[error("cannot {what}")]
    Stream {
        /// "read the agent's hello".
        what: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The agent sent something that is no message, or too long a one.
    #[error("the agent's {what} is not a message of this protocol")]
    Garbled {
        /// "hello", "report".
        what: &'static str,
    },
    /// The agent speaks another protocol.
    #[error("the agent speaks protocol {got}; this program knows 1")]
    Protocol {
        /// The agent's.
        got: u32,
    },
    /// The guest could not be configured. The text is the agent's.
    #[error("the guest could not be configured: {message}")]
    Guest {
        /// The agent's error message.
        message: Bounded<String>,
    },
    /// The agent answered a request with an error. The text is the agent's.
    #[error("the agent cannot {what}: {message}")]
    Agent {
        /// The request.
        what: &'static str,
        /// What it says about the kind.
        kind: Kind,
        /// The agent's error message.
        message: Bounded<String>,
    },
    /// A volume of the node could not be read, to be pushed.
    #[error("cannot push the volume {path}: {text}")]
    Unread {
        /// On the node.
        path: String,
        /// What it means.
        why: Why,
        /// Why.
        text: String,
    },
    /// The guest does not take a volume.
    #[error("cannot push the volume {path}")]
    Untaken {
        /// On the node.
        path: String,
        /// Why.
        source: Box<PodError>,
    },
    /// There is nobody who could read it.
    #[error("cannot push the volume {path}: the process for volumes of the node is gone")]
    NoReader {
        /// On the node.
        path: String,
    },
    /// The machine has ended.
    #[error("the machine is gone: {why}")]
    Died {
        /// How the VM ended, and the end of its console.
        why: Bounded<String>,
    },
    /// A wait was too long.
    #[error("could not {what} within {limit:?}")]
    TooSlow {
        /// The wait.
        what: &'static str,
        /// The limit.
        limit: Duration,
    },
    /// A request that is wrong in itself.
    #[error("{field} is {value:?}: {rule}")]
    Field {
        /// The field's name.
        field: &'static str,
        /// Its value.
        value: String,
        /// What it must be.
        rule: &'static str,
    },
    /// The pod is not in the state for this.
    #[error("the pod is {phase:?}{failure}")]
    Phase {
        /// Its phase.
        phase: Phase,
        /// ": " and why it failed, or nothing.
        failure: String,
    },
    /// No such container.
    #[error("the pod has no container {id}")]
    NoContainer {
        /// The id.
        id: String,
    },
    /// The container is not in the state for this.
    #[error("container {id}")]
    Container {
        /// The container.
        id: String,
        /// Its state and the event.
        source: InvalidTransition<ContainerState, ContainerEvent>,
    },
    /// The pod is configured, or being configured, with another network.
    #[error("the pod is being configured with another network already")]
    OtherNetwork,
    /// Work on a thread of the runtime did not finish.
    #[error(transparent)]
    Task(#[from] TaskError),
    /// A thread could not be created.
    #[error("cannot run {what}")]
    Thread {
        /// Its purpose.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The process is on its way out.
    #[error("the pod process is ending")]
    Ending,
}

impl Classify for PodError {
    fn kind(&self) -> Kind {
        match self {
            PodError::Spec(error) => error.kind(),
            PodError::Identity(error) => error.kind(),
            PodError::Record(error) => error.kind(),
            PodError::File(error) => error.kind(),
            PodError::Jail(error) => error.kind(),
            PodError::Share(error) => error.kind(),
            PodError::Scratch(error) => error.kind(),
            PodError::Net(error) => error.kind(),
            PodError::Machine(error) => error.kind(),
            PodError::Engine(error) => error.kind(),
            PodError::Place { source, .. } => source.kind(),
            PodError::Image(error) => error.kind(),
            PodError::Device(error) => error.kind(),
            PodError::Log(error) => error.kind(),
            PodError::Link { source, .. } => source.kind(),
            PodError::Agent { kind, .. } => *kind,
            PodError::Unread { why, .. } => match why {
                Why::Changed => Kind::Unavailable,
                Why::TooMuch => Kind::Exhausted,
                Why::Odd => Kind::Conflict,
                Why::Missing => Kind::NotFound,
                Why::Failed => Kind::Internal,
            },
            PodError::Untaken { source, .. } => source.kind(),
            PodError::NoReader { .. } => Kind::Unavailable,
            PodError::TooSlow { .. } => Kind::Timeout,
            PodError::Field { .. } => Kind::Invalid,
            PodError::NoContainer { .. } => Kind::NotFound,
            PodError::Container { source, .. } => source.kind(),
            PodError::Phase { .. } | PodError::OtherNetwork | PodError::NotNamed { .. } => Kind::Conflict,
            PodError::Stream { .. } | PodError::Died { .. } | PodError::Ending => Kind::Unavailable,
            PodError::Task(error) => error.kind(),
            PodError::Thread { .. } => Kind::Exhausted,
            PodError::Garbled { .. } | PodError::Protocol { .. } | PodError::Guest { .. } => Kind::Internal,
        }
    }
}

/// A failure as everybody who waits for it is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What it means.
    pub kind: Kind,
    /// The error and its causes on one line.
    pub message: String,
}

impl From<PodError> for Failure {
    fn from(error: PodError) -> Self {
        Failure { kind: error.kind(), message: Chain(&error).to_string() }
    }
}

impl From<Failure> for tonic::Status {
    fn from(failure: Failure) -> Self {
        crate::codes::refuse(failure.kind, failure.message)
    }
}

/// Text of a less trusted process, made fit for messages: on one line, without control characters, at most `max_chars` long.
pub fn printable(text: &str, max_chars: usize) -> String {
    text.chars().take(max_chars).map(|c| if c.is_control() { ' ' } else { c }).collect::<String>().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_others_is_cut_and_plain() {
        assert_eq!(printable("a\nb\u{1b}[0m\0", 5), "a b [0".trim_end_matches('0'));
        assert_eq!(printable(&"é".repeat(9), 3), "ééé");
    }

    #[test]
    fn a_failure_has_all_causes() {
        let error = PodError::Container {
            id: "c".into(),
            source: InvalidTransition { state: ContainerState::Exited, event: ContainerEvent::Start },
        };
        let failure = Failure::from(error);
        assert_eq!(failure.message, "container c: Start is not possible in state Exited");
        assert_eq!(failure.kind, Kind::Conflict);
    }
}
