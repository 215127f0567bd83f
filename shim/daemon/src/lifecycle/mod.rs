//! Finds, creates and controls the pods of this node. Each pod is an actor (`actor/`), which runs the effects in `pod/`, `container/`
//! and `volume/` as tasks of their own; `checkpoint/` saves running pods, `restore/` checks what continues from that; `node/` passes requests to the actors. All of them use `context/`, which uses none of them. It
//! knows nothing of CRI.

mod actor;
mod checkpoint;
mod container;
mod context;
mod node;
mod pod;
mod restore;
pub(crate) mod template;
mod volume;

pub use actor::announce;
pub use checkpoint::{CheckpointError, CheckpointOrder};
pub use context::boot_files::{BootFileError, BootFiles};
pub use context::engine::EngineChoice;
pub(crate) use context::error::at;
pub use context::error::{LifecycleError, StepError};
pub use context::events::{self, Event, EventKind, Events};
pub(crate) use context::request::ask;
pub use context::services;
pub(crate) use context::text::lead_with_reason;
pub use context::view::View;
pub use context::{NodeServices, unix_nanos};
pub use node::Node;
pub use node::recover;
pub(crate) use node::running::Running;
pub use restore::{
    ContainerToRestore, Incompatibility, PodRestoreError, PodToRestore, RestoreOrder, RestoredPod, read_checkpoint,
};
