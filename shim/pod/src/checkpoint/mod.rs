//! Saves the running pod: its VM, and its scratch disk, to files that the daemon has opened.
//!
//! The happy path: most of the memory is copied while the pod runs; the agent freezes all containers; the VM is paused, and saved with what it
//! has written meanwhile; it is resumed, and the agent releases the containers; the rest is written while the pod runs again. Whatever
//! fails, the VM is resumed and the containers are released before [`CheckpointJob::run`] returns.
//!
//! Easy to get wrong: the work is not stopped by dropping its future, but by its stop flag, and its caller must wait for the end.

mod hold;
mod refusal;

pub use refusal::{check_container, volumes_in_guest};

use crate::actor::ActorMessage;
use crate::agent::Agent;
use crate::error::PodError;
use crate::guest_values::Bounded;
use crate::memory::{MemoryLayout, MemoryResizer};
use crate::spec::{EngineSpec, PodSpec};
use hold::HoldSteps;
use nacelle_base::machine::MemoryPages;
use nacelle_base::task::run_blocking;
use nacelle_engine::{BlockError, EngineError, Machine, PageTracker, Slot, SnapshotError, SnapshotFiles};
use nacelle_proto::pod;
use std::collections::BTreeSet;
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::mpsc;

/// Opens the files that show which pages the VM will have written, if its engine can save it while it runs. Must be called before the
/// jail, which has no /proc, and before the VM exists.
pub fn open_tracker(spec: &PodSpec) -> Option<PageTracker> {
    if !matches!(spec.engine, EngineSpec::Kvm {}) || spec.memory_pages != MemoryPages::Transparent {
        return None;
    }
    let opened = PageTracker::open();
    opened.inspect_err(|error| tracing::warn!("the pod cannot be saved: cannot track writes to memory: {error}")).ok()
}

/// How often the stop flag is read during a wait.
const STOP_POLL: Duration = Duration::from_millis(20);

/// The number of files of a checkpoint: state, memory and scratch disk, in this order.
pub const FILES: u32 = 3;

/// The files of a checkpoint, empty and open for writing.
pub struct CheckpointTarget {
    /// For the VM.
    snapshot: SnapshotFiles,
    /// For the scratch disk.
    scratch: File,
}

impl CheckpointTarget {
    /// Returns `None` unless these are the files of a checkpoint, by their number.
    pub fn new(files: Vec<File>) -> Option<CheckpointTarget> {
        let [state, memory, scratch] = files.try_into().ok()?;
        // This process has no name for them.
        let directory = "the checkpoint".into();
        Some(CheckpointTarget { snapshot: SnapshotFiles { directory, state, memory, pagemap: None }, scratch })
    }
}

/// The pod that is saved.
pub struct PodToSave {
    /// The agent of the guest.
    pub agent: Agent,
    /// The VM.
    pub machine: Arc<dyn Machine>,
    /// The scratch disk.
    pub scratch: Slot,
    /// The ids of the containers that the caller expects to run.
    pub expected: BTreeSet<String>,
    /// Resizes the memory.
    pub resizer: MemoryResizer,
    /// The actor, which knows the containers and the images on the image disk.
    pub actor: mpsc::UnboundedSender<ActorMessage>,
    /// Makes the checkpoint fail soon when it becomes true.
    pub stop: Arc<AtomicBool>,
}

/// The work of saving a pod.
pub struct CheckpointJob {
    /// The pod.
    pub pod: PodToSave,
    /// The files.
    pub target: CheckpointTarget,
    /// Tracks the writes of the VM.
    pub tracker: Arc<PageTracker>,
    /// The layout of the VM's memory.
    pub memory: MemoryLayout,
}

/// What a pod without unsavable volumes and devices has at the moment.
pub struct SavablePod {
    /// The ids of all containers.
    pub containers: BTreeSet<String>,
    /// The images on the image disk.
    pub images: Vec<pod::PlacedImage>,
    /// The volumes inside the VM, of all containers that have not ended.
    pub volumes: Vec<pod::VolumeInGuest>,
}

impl CheckpointJob {
    /// Saves the pod. When this returns, the VM runs and its containers are released.
    pub async fn run(self) -> Result<Bounded<pod::CheckpointResponse>, PodError> {
        let runtime = Handle::current();
        run_blocking("save the pod", move || self.save(&runtime)).await?
    }

    fn save(self, runtime: &Handle) -> Result<Bounded<pod::CheckpointResponse>, PodError> {
        let CheckpointJob { pod, target, tracker, memory } = self;
        let snapshottable = pod.machine.as_snapshottable().ok_or(PodError::NoSavableVm)?;
        let mut steps = HoldSteps::new(&pod, runtime, target.scratch)?;
        let saved = snapshottable.save_running(&target.snapshot, &tracker, &pod.stop, &mut steps);
        let figures = pod::CheckpointResponse {
            booted_mib: memory.booted_mib,
            added_mib: memory.added_mib,
            ..pod::CheckpointResponse::default()
        };
        steps.finish(saved, figures).map_err(|error| if is_stop(&error) { PodError::CheckpointStopped } else { error })
    }
}

/// Returns whether a part of the work has ended because of the stop flag.
fn is_stop(error: &PodError) -> bool {
    matches!(
        error,
        PodError::Engine(EngineError::Snapshot { source: SnapshotError::Stopped, .. })
            | PodError::CopyScratch { source: BlockError::CopyStopped { .. } }
    )
}

/// Completes soon after the flag has become true.
async fn wait_for(stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        tokio::time::sleep(STOP_POLL).await;
    }
}
