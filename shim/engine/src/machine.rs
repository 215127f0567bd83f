//! Owns: the traits that every engine implements, and the plain types that they speak of.
//! Threads: see `lib.rs`; all calls block at most as long as their timeout says.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::{CheckedSpec, EngineError, EngineKind, Limits, LinkError, Slot};

/// The host's vsock port on which a guest reports when it has booted. It is open before the guest runs, so that the
/// guest cannot be too early.
pub const BOOT_PORT: u32 = 1024;

/// A way to start machines.
pub trait Engine: Send + Sync {
    /// Which engine this is (for the fake: the one that it stands for).
    fn kind(&self) -> EngineKind;

    /// What one machine of this engine can have; `MachineSpec::check` takes it.
    fn limits(&self) -> Limits;

    /// Starts a machine and returns when its first processor may run. The guest is not ready then: whoever wants to
    /// know listens on the machine's link. If it fails, nothing is left behind.
    ///
    /// The host's [`BOOT_PORT`] is open from the start: a guest that calls there waits for `link().listen(BOOT_PORT)`.
    fn start(&self, spec: CheckedSpec) -> Result<Box<dyn Machine>, EngineError>;

    /// The power to start machines from snapshots, if this engine has it.
    fn as_restorer(&self) -> Option<&dyn Restorer> {
        None
    }
}

/// An engine that can start a machine where another one was saved.
pub trait Restorer {
    /// Makes the machine that was saved to the folder `from` (see [`Snapshottable::save`]), with disks, interfaces and
    /// a console of its own. The `spec` must have as many processors, as much memory, and disks and interfaces of the
    /// same kinds in the same order as the machine saved; its kernel, initrd and parameters are not used: the guest
    /// runs already. The folder must stay as it is as long as the machine lives; any number of machines may come from
    /// one.
    ///
    /// The machine stands still: [`Pausable::resume`] lets it run, after whatever images its disks had were placed
    /// again. Its guest then finds its connections reset and its listening ports open, its clock where it stood, and
    /// random numbers that every other machine of this snapshot has too: whoever restores gives it time and entropy
    /// before anything else.
    fn restore(&self, spec: CheckedSpec, from: &Path) -> Result<Box<dyn Machine>, EngineError>;
}

/// One running guest. Dropping it kills the guest, waits for its end and removes what the engine made.
pub trait Machine: Send + Sync {
    /// How it is, now.
    fn status(&self) -> MachineStatus;

    /// Waits until the machine has ended; `None` after `timeout`. Once it has ended, always the same answer.
    fn wait(&self, timeout: Duration) -> Option<MachineExit>;

    /// Ends the machine and waits for that. A machine that has ended already is a success with the same answer.
    /// An error says that it could not be ended; it may be tried again.
    fn stop(&self, how: Stop) -> Result<MachineExit, EngineError>;

    /// The way to talk to the guest. Outlives the machine; its calls then fail with `LinkError::Stopped`.
    fn link(&self) -> Arc<dyn GuestLink>;

    /// The disks, in the order of the spec.
    fn disks(&self) -> &[Slot];

    /// The power to stand still, if this engine has it.
    fn as_pausable(&self) -> Option<&dyn Pausable> {
        None
    }

    /// The power to do without memory again that it was given from its reserve, if it has one.
    fn as_reserve(&self) -> Option<&dyn Reserve> {
        None
    }

    /// The power to be saved, if this engine has it.
    fn as_snapshottable(&self) -> Option<&dyn Snapshottable> {
        None
    }
}

/// A machine that can be saved, to be started again by its engine's [`Restorer`].
pub trait Snapshottable {
    /// Writes memory and state to the folder `to`, which must not exist, or be empty; the disks' contents are the
    /// caller's to keep. The machine must be paused, and stays so; afterwards it may go on. A folder that is there
    /// afterwards is whole.
    fn save(&self, to: &Path) -> Result<(), EngineError>;
}

/// A machine with memory in reserve (`MachineSpec::reserve_mib`), which its guest's kernel adds and puts out of use while it runs.
pub trait Reserve {
    /// Gives the node back what lies beyond the first `used_mib` of it. The guest has put that out of use: what it had there is lost.
    fn give_back(&self, used_mib: u32) -> Result<(), EngineError>;
}

/// A machine that can stand still. Both calls may be repeated.
pub trait Pausable {
    /// Stops the processors; memory, disks and connections stay.
    fn pause(&self) -> Result<(), EngineError>;

    /// Lets the processors run again.
    fn resume(&self) -> Result<(), EngineError>;
}

/// Connections between the node and the guest: vsock inside, unix streams outside. Bytes flow with back-pressure in
/// both directions; a half that is shut down on one side reads as the end on the other. The streams are ordinary
/// blocking ones; `set_nonblocking(true)` makes them fit for tokio.
pub trait GuestLink: Send + Sync {
    /// Connects to a port on which the guest listens. While the guest answers that nobody listens there, the error is
    /// `LinkError::Refused` at once: whoever waits for a service to come up asks again.
    fn connect(&self, port: u32, timeout: Duration) -> Result<UnixStream, LinkError>;

    /// Takes the guest's connections to the host (CID 2) at `port`, until the result is dropped. A guest that connects
    /// to a port without a listener is refused.
    fn listen(&self, port: u32) -> Result<Box<dyn Incoming>, LinkError>;
}

/// The guest's connections to one port of the host.
pub trait Incoming: Send {
    /// The next connection; `LinkError::Timeout` if none comes in time, `LinkError::Stopped` if the machine has ended.
    fn accept(&self, timeout: Duration) -> Result<UnixStream, LinkError>;
}

/// How a machine is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MachineStatus {
    /// Its processors run (or boot).
    Running,
    /// It stands still after `Pausable::pause`.
    Paused,
    /// It has ended.
    Exited(MachineExit),
}

/// How a machine is to be ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// At once.
    Kill,
    /// The guest has been asked to power off (by whoever talks to its agent: a microvm has no power button); give it
    /// this long, then kill it.
    Shutdown {
        /// The time allowed.
        grace: Duration,
    },
}

/// How a machine has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineExit {
    /// In which way.
    pub how: ExitKind,
    /// The last lines of the guest's console, at most 8 KiB; made printable.
    pub console_tail: String,
}

/// The ways in which a machine ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExitKind {
    /// The guest powered off or rebooted (a machine reboots by being started again).
    Shutdown,
    /// We killed it: `Stop::Kill`, or the grace period was over.
    Killed,
    /// The guest kernel panicked; the console tail says why.
    Panicked,
    /// The machine was lost: the engine's process ended by itself, or the engine could not run it any longer.
    Died {
        /// The exit code of the process, if it had one.
        code: Option<i32>,
        /// The signal that killed it, if one did.
        signal: Option<i32>,
        /// The last lines that the process wrote about itself, or what the engine has to say.
        message: String,
    },
}

impl std::fmt::Display for ExitKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ExitKind::Shutdown => f.write_str("the guest powered off"),
            ExitKind::Killed => f.write_str("the machine was killed"),
            ExitKind::Panicked => f.write_str("the guest kernel panicked"),
            ExitKind::Died { code, signal, message } => {
                f.write_str("the machine died")?;
                if let Some(code) = code {
                    write!(f, " with exit code {code}")?;
                }
                if let Some(signal) = signal {
                    write!(f, " of signal {signal}")?;
                }
                if !message.is_empty() {
                    write!(f, ": {message}")?;
                }
                Ok(())
            }
        }
    }
}
