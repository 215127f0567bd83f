//! Defines the traits that every engine implements, and their plain types. All calls block at most as long as their
//! timeout; `lib.rs` describes the use by threads.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use nacelle_vmm::snapshot::{PageTracker, SavedPages, Snapshot, SnapshotFiles};

use crate::{CheckedSpec, EngineError, EngineKind, Limits, LinkError, Slot, Touched};

/// The host's vsock port to which a guest connects when it has booted. The port is open before the guest runs, so that no
/// connection comes too early.
pub const BOOT_PORT: u32 = 1024;

/// An engine, which starts machines.
pub trait Engine: Send + Sync {
    /// Returns the kind of the engine (for the fake: the kind that it stands for).
    fn kind(&self) -> EngineKind;

    /// Returns the limits of one machine of this engine, for `MachineSpec::check`.
    fn limits(&self) -> Limits;

    /// Starts a machine and returns when its first vCPU may run. The guest is not ready then; it connects to the boot port
    /// when it is. A failed start leaks nothing.
    ///
    /// The host's [`BOOT_PORT`] is open from the start: the connection of a guest waits for `link().listen(BOOT_PORT)`.
    fn start(&self, spec: CheckedSpec) -> Result<Box<dyn Machine>, EngineError>;

    /// Returns the interface to restore machines from snapshots, if the engine supports it.
    fn as_restorer(&self) -> Option<&dyn Restorer> {
        None
    }
}

/// An engine that can restore a saved machine.
pub trait Restorer {
    /// Starts a machine as [`Engine::start`] does, from whose snapshots machines with more devices can be restored.
    fn start_template(&self, spec: CheckedSpec) -> Result<Box<dyn Machine>, EngineError>;

    /// Restores the machine that was saved (see [`Snapshottable::save`], [`read_snapshot`](crate::read_snapshot())), with disks,
    /// interfaces and a console of its own. The `spec` must have the same number of vCPUs, the same memory, and disks and interfaces
    /// of the same kinds in the same order as the saved machine; its kernel, initrd and parameters are not used, because
    /// the guest runs already. If the saved machine was started as a template, the `spec` may have more hot-plug memory, and further
    /// devices behind the saved ones: the guest must then bind its driver to their windows. The agent does so when it is configured,
    /// and not later. The content of the files must not change as long as the machine lives; any number of
    /// machines may be restored from them.
    ///
    /// The machine is paused: [`Pausable::resume`] runs it, after the images of its disks were placed again. Its guest then
    /// finds its connections reset and its listening ports open, its clock at the time of the snapshot, and the same random
    /// numbers as every other machine of this snapshot: the caller must set its time and add entropy before anything else.
    fn restore(&self, spec: CheckedSpec, saved: Snapshot) -> Result<Box<dyn Machine>, EngineError>;

    /// Restores a machine as [`restore`](Restorer::restore) does, in small pages, for [`Snapshottable::record_working_set`].
    fn restore_in_small_pages(&self, spec: CheckedSpec, saved: Snapshot) -> Result<Box<dyn Machine>, EngineError>;
}

/// A running guest. Dropping it kills the guest, waits for its end and removes what the engine created.
pub trait Machine: Send + Sync {
    /// Returns the present status.
    fn status(&self) -> MachineStatus;

    /// Waits until the machine has ended; returns `None` after `timeout`. After the end it always returns the same value.
    fn wait(&self, timeout: Duration) -> Option<MachineExit>;

    /// Ends the machine and waits for the end. If the machine has ended already, returns how it ended. After an error the
    /// call may be repeated.
    fn stop(&self, how: StopMode) -> Result<MachineExit, EngineError>;

    /// Returns the link to the guest. It outlives the machine; its calls then fail with `LinkError::Stopped`.
    fn link(&self) -> Arc<dyn GuestLink>;

    /// Returns the disks, in the order of the specification.
    fn disks(&self) -> &[Slot];

    /// Returns the interface to pause the machine, if the engine supports it.
    fn as_pausable(&self) -> Option<&dyn Pausable> {
        None
    }

    /// Returns the interface to release hot-plug memory, if the machine has any.
    fn as_memory_hotplug(&self) -> Option<&dyn MemoryHotplug> {
        None
    }

    /// Returns the interface to save the machine, if the engine supports it.
    fn as_snapshottable(&self) -> Option<&dyn Snapshottable> {
        None
    }
}

/// A machine that can be saved, and restored by its engine's [`Restorer`].
pub trait Snapshottable {
    /// Writes memory and state to the files `to`, which must be empty; the caller must keep the disks' contents. The machine
    /// must be paused, and stays so; afterwards it may be resumed. After an error the files hold no snapshot.
    fn save(&self, to: &SnapshotFiles) -> Result<(), EngineError>;

    /// Saves a running machine as [`save`](Snapshottable::save) does a paused one. The machine is paused as briefly as possible: then memory that
    /// it has written meanwhile is copied, and the caller takes its `steps`. It is resumed in every case; if that fails, its error is
    /// returned, otherwise the first one. Fails soon after `stop` has become true, unless the files are being flushed. Nothing else may
    /// pause or resume the machine meanwhile; a paused one is refused. A machine that is stopped keeps its memory until this call has
    /// returned.
    fn save_running(
        &self,
        to: &SnapshotFiles,
        tracker: &PageTracker,
        stop: &AtomicBool,
        steps: &mut dyn PauseSteps,
    ) -> Result<RunningSaveReport, EngineError>;

    /// Records in the files of a snapshot which pages this machine, which was restored from it in small pages, has touched until now.
    /// Machines that are restored later get these pages before they run, which costs less than one by one; of those that were touched
    /// [later](Touched::Later) they get small pages when they need them.
    fn record_working_set(&self, of: &SnapshotFiles, when: Touched) -> Result<(), EngineError>;
}

/// What the caller of [`save_running`](Snapshottable::save_running) does around the pause. A step that fails ends the saving; the caller knows the
/// cause.
pub trait PauseSteps {
    /// Called when most of the memory is copied, before the pause. Whatever makes the pause short belongs here.
    fn before_pause(&mut self) -> Result<(), StepFailed>;

    /// Called in the pause. Must keep the disks' contents.
    fn while_paused(&mut self) -> Result<(), StepFailed>;

    /// Called once after `before_pause`, also if that or anything since has failed, as soon as the machine runs again. The files are
    /// completed afterwards.
    fn after_pause(&mut self);
}

/// For machines without writable disks.
impl PauseSteps for () {
    fn before_pause(&mut self) -> Result<(), StepFailed> {
        Ok(())
    }

    fn while_paused(&mut self) -> Result<(), StepFailed> {
        Ok(())
    }

    fn after_pause(&mut self) {}
}

/// A step of [`PauseSteps`] has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a step of the caller around the pause failed")]
pub struct StepFailed;

/// What saving a running machine took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunningSaveReport {
    /// How long the machine was paused.
    pub pause: Duration,
    /// The private pages of the machine, and those of them that were copied in the pause.
    pub pages: SavedPages,
}

/// A machine with hot-plug memory (`MachineSpec::hotplug_mib`), which its guest's kernel adds and removes while it runs.
pub trait MemoryHotplug {
    /// Releases the memory beyond the first `used_mib` of the hot-plug memory. The guest has removed that memory: its content is lost.
    fn release_unused(&self, used_mib: u32) -> Result<(), EngineError>;
}

/// A machine that can be paused. Both calls may be repeated.
pub trait Pausable {
    /// Stops the vCPUs; memory, disks and connections stay.
    fn pause(&self) -> Result<(), EngineError>;

    /// Resumes the vCPUs.
    fn resume(&self) -> Result<(), EngineError>;
}

/// Connections between the node and the guest: vsock in the guest, Unix streams on the node. Both directions have
/// back-pressure; shutting one half down on one side is the end of the stream on the other. The streams are blocking;
/// `set_nonblocking(true)` prepares them for tokio.
pub trait GuestLink: Send + Sync {
    /// Connects to a port on which the guest listens. If the guest has no listener there, fails at once with
    /// `LinkError::Refused`; a caller that waits for a service must retry.
    fn connect(&self, port: u32, timeout: Duration) -> Result<UnixStream, LinkError>;

    /// Accepts the guest's connections to the host (CID 2) at `port`, until the result is dropped. Connections to a port
    /// without a listener are refused.
    fn listen(&self, port: u32) -> Result<Box<dyn LinkListener>, LinkError>;
}

/// The guest's connections to one port of the host.
pub trait LinkListener: Send {
    /// Returns the next connection. Fails with `LinkError::Timeout` if none comes in time, with `LinkError::Stopped` if the
    /// machine has ended.
    fn accept(&self, timeout: Duration) -> Result<UnixStream, LinkError>;
}

/// The status of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MachineStatus {
    /// The vCPUs run; the guest may still be booting.
    Running,
    /// The machine is paused (`Pausable::pause`).
    Paused,
    /// The machine has ended.
    Exited(MachineExit),
}

/// How a machine must be stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopMode {
    /// The machine is killed at once.
    Kill,
    /// The guest was requested to power off through its agent, because a microvm has no power button; the machine is killed
    /// after `grace`.
    Shutdown {
        /// The time until the machine is killed.
        grace: Duration,
    },
}

/// The end of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineExit {
    /// The kind of the end.
    pub how: ExitKind,
    /// The last lines of the guest's console, at most 8 KiB, without control characters.
    pub console_tail: String,
}

/// The kinds of a machine's end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExitKind {
    /// The guest powered off or rebooted; a reboot ends the machine too.
    Shutdown,
    /// The machine was killed: by `StopMode::Kill`, or after the grace period.
    Killed,
    /// The guest kernel panicked; the console's tail contains the reason.
    Panicked,
    /// The machine was lost: the engine's process ended by itself, or the engine could not run the machine any longer.
    Died {
        /// The exit code of the process, if it had one.
        code: Option<i32>,
        /// The signal that killed it, if one did.
        signal: Option<i32>,
        /// The last lines of the process's messages, or an explanation of the engine.
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
