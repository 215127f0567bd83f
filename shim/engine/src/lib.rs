//! Runs the VM of a pod: the engine trait and its implementations (KVM, QEMU, keeper, host, fake), checked VM
//! specifications, and the probe of KVM. It knows no pods, images, CNI or agents. Inside Nacelle the crate depends on
//! `base`, `jail`, `vmm`.
//!
//! Everything here blocks and must not be called on the async runtime (use `spawn_blocking`). Any number of threads may use
//! a `Machine` and its `GuestLink` at once; no call holds a lock while it waits for the guest, so `status` and `stop`
//! return while another thread waits.
//!
//! `MachineSpec { .. }.check(&engine.limits())?` is the only way to create a [`CheckedSpec`]; `engine.start(spec)?` returns
//! as soon as the vCPUs can run (not when the guest is ready); `machine.link()` connects to the guest over vsock;
//! `machine.disks()` are the slots in the order of the specification; dropping the machine kills it and leaks nothing.

mod agent;
mod console;
#[cfg(feature = "contract")]
pub mod contract;
mod disk;
mod error;
mod exit_latch;
#[cfg(feature = "fake")]
pub mod fake;
pub mod host;
mod initrd_check;
pub mod keeper;
mod kernel_check;
pub mod kvm;
mod link;
mod machine;
pub mod probe;
mod process;
pub mod program;
pub mod qemu;
mod spec;

pub use console::log_tail;
pub use error::{EngineError, LinkError};
pub use initrd_check::{InitrdError, check_initrd};
pub use kernel_check::{KernelError, check_kernel};
pub use machine::{
    BOOT_PORT, Engine, ExitKind, GuestLink, LinkListener, Machine, MachineExit, MachineStatus, MemoryHotplug, Pausable,
    PauseSteps, Restorer, RunningSaveReport, Snapshottable, StepFailed, StopMode,
};
pub use nacelle_base::machine::EngineKind;
pub use nacelle_vmm::block::{BlockError, CopiedDisk, DiskCopy, OpenExtent, PreparedCopy, Slot};
pub use nacelle_vmm::machine::{BLOCK_MIB, unused_hotplug_ranges};
pub use nacelle_vmm::snapshot::{
    MEMORY_FILE, PageTracker, STATE_FILE, SavedPages, Snapshot, SnapshotDirectory, SnapshotError, SnapshotFiles,
    Touched, VERSION as SNAPSHOT_VERSION, fill_holes, read_files as read_snapshot,
};
pub use probe::{Accelerator, KvmVerdict, choose_accelerator, default_engine, probe_kvm};
pub use spec::{CheckedSpec, DiskSpec, Limits, MAX_CMDLINE, MAX_VCPUS, MachineSpec, NicSpec, SpecError};
