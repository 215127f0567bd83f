//! Owns: what can go wrong with a machine.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use nacelle_base::{Classify, Kind};
use nacelle_vmm::block::BlockError;
use nacelle_vmm::net::NetError;
use nacelle_vmm::vhost_user::ServeError;

use crate::qemu::QmpError;

/// What can go wrong between us and the guest's ports. `Stopped` says that the machine has ended.
pub use nacelle_vmm::vsock::VsockError as LinkError;

/// A machine could not be started, stopped or paused.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A file, folder or socket of the machine.
    #[error("cannot {what} {path}", path = path.display())]
    File {
        /// The operation: "open", "listen on".
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A disk could not be made.
    #[error("cannot make disk {serial}")]
    Disk {
        /// Its serial number.
        serial: String,
        /// Why not.
        source: BlockError,
    },
    /// The vsock device could not be made.
    #[error("cannot make the vsock device of guest {cid}")]
    Vsock {
        /// The guest's context id.
        cid: u32,
        /// Why not.
        source: LinkError,
    },
    /// A network interface could not be made.
    #[error("cannot make network interface {index}")]
    Nic {
        /// Its number.
        index: usize,
        /// Why not.
        source: NetError,
    },
    /// A device could not be served to the engine's process.
    #[error("cannot serve device {device}")]
    Serve {
        /// Its name.
        device: String,
        /// Why not.
        source: ServeError,
    },
    /// A thread, pipe or socket pair could not be made.
    #[error("cannot make {what}")]
    Resources {
        /// What.
        what: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// The engine's program could not be started.
    #[error("cannot start {program}", program = program.display())]
    Spawn {
        /// The program.
        program: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Our own VMM cannot do something with the machine.
    #[error("cannot {what} the machine")]
    Machine {
        /// The verb: "make", "pause".
        what: &'static str,
        /// Why not.
        source: nacelle_vmm::machine::Error,
    },
    /// A snapshot is not one, or cannot be made.
    #[error("cannot {what} the snapshot")]
    Snapshot {
        /// "read", "write".
        what: &'static str,
        /// Why not.
        source: nacelle_vmm::snapshot::SnapshotError,
    },
    /// The engine refused or did not answer.
    #[error("the machine does not {what}")]
    Control {
        /// The verb: "pause".
        what: &'static str,
        /// Why not.
        source: QmpError,
    },
    /// The node's kernel does not take memory back.
    #[error("cannot give memory of the machine back to the node")]
    GiveBack {
        /// Why not.
        source: io::Error,
    },
    /// The machine has ended: this cannot be done with it any more.
    #[error("cannot {what} a machine that has ended")]
    Ended {
        /// The verb.
        what: &'static str,
    },
    /// The machine was killed and is still there.
    #[error("the machine's process {pid} is still there {limit:?} after it was killed")]
    NotEnding {
        /// The process.
        pid: u32,
        /// How long we waited.
        limit: Duration,
    },
    /// The fake engine was told to fail.
    #[error("the script of the fake engine says that it cannot start")]
    Scripted,
}

impl Classify for EngineError {
    fn kind(&self) -> Kind {
        match self {
            EngineError::File { source, .. } => match source.kind().into() {
                // The name is ours or the node's: what is missing is not what the caller of the CRI named.
                Kind::NotFound | Kind::AlreadyExists => Kind::Internal,
                kind => kind,
            },
            EngineError::Disk { source, .. } => source.kind(),
            EngineError::Vsock { source, .. } => source.kind(),
            EngineError::Nic { source, .. } => source.kind(),
            EngineError::Serve { source, .. } => source.kind(),
            EngineError::Machine { source, .. } => source.kind(),
            EngineError::Snapshot { source, .. } => source.kind(),
            EngineError::Resources { .. } => Kind::Exhausted,
            EngineError::Control { source, .. } => source.kind(),
            EngineError::GiveBack { .. } => Kind::Internal,
            EngineError::Ended { .. } => Kind::Conflict,
            EngineError::NotEnding { .. } => Kind::Timeout,
            EngineError::Spawn { .. } | EngineError::Scripted => Kind::Unavailable,
        }
    }
}
