//! Owns: what gives a pod its kernel: the engine trait, checked machine specs, the probe of KVM, QEMU, a fake.
//! May use: `base`, `vmm`. Knows nothing of pods, images, CNI or agents.
//! Threads: everything here blocks and is to be called off the async runtime (`spawn_blocking`). A `Machine` and its
//! `GuestLink` may be shared and used from any number of threads at once; no call holds a lock while it waits for the
//! guest, so `status` and `stop` answer while another thread waits.
//!
//! In short: `MachineSpec { .. }.check(&engine.limits())?` is the only way to a [`CheckedSpec`]; `engine.start(spec)?`
//! returns as soon as the guest's processors can run (not when it is ready); `machine.link()` talks to it over vsock;
//! `machine.disks()` are the slots in the order of the spec; dropping the machine kills it and leaves nothing behind.

mod agent;
mod console;
pub mod contract;
mod disk;
mod ended;
mod error;
pub mod fake;
pub mod host;
pub mod keeper;
mod kernel;
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
pub use kernel::{KernelError, check_kernel};
pub use machine::{
    BOOT_PORT, Engine, ExitKind, GuestLink, Incoming, Machine, MachineExit, MachineStatus, Pausable, Reserve, Restorer,
    Snapshottable, Stop,
};
pub use nacelle_base::machine::EngineKind;
pub use nacelle_vmm::block::{BlockError, Slot};
pub use nacelle_vmm::machine::{BLOCK_MIB, reserve};
pub use probe::{Accelerator, KvmVerdict, choose, fitting, probe};
pub use spec::{CheckedSpec, DiskSpec, Limits, MAX_CMDLINE, MAX_VCPUS, MachineSpec, NicSpec, SpecError};
