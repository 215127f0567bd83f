//! Implements the VM: memory, kernel, vCPUs, interrupt controllers and the bus, and how a VM runs and ends. Uses KVM; knows
//! devices only as [`crate::Device`]. Each vCPU has a thread `vcpuN`; every handle may be used from any thread.
//!
//! ```no_run
//! use nacelle_vmm::machine::{VmBuilder, VmConfig};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = VmConfig { kernel: "/boot/vmlinux".into(), ..VmConfig::default() };
//! let machine = VmBuilder::new(config)?.start()?;
//! let exit = machine.wait(std::time::Duration::from_secs(60));
//! # Ok(()) }
//! ```

mod boot;
mod builder;
mod bus;
mod cpu_compat;
mod cpuid;
mod error;
mod genid;
mod handle;
#[cfg(any(test, feature = "fuzz"))]
pub(crate) mod harness;
mod kernel;
mod layout;
mod legacy;
mod memory;
mod mptable;
mod state;
pub mod tiny;
mod vcpu;

pub use builder::VmBuilder;
pub use bus::BusDevice;
pub use error::Error;
pub use handle::{VmExit, VmHandle};
pub use kernel::{KernelError, check_kernel};
pub use layout::{
    BLOCK_MIB, FIRST_GSI, MAX_DEVICES, WINDOW_SIZE, WINDOWS, memory_end, total_mib, unused_hotplug_ranges,
};
pub use legacy::SerialState;
pub use memory::MemoryError;
pub(crate) use memory::{HUGE_PAGE, find_data};
pub use state::{MachineState, VcpuState, VmState};

use std::path::PathBuf;

/// The maximum number of vCPUs of a VM.
pub const MAX_VCPUS: u8 = 64;

/// Receives what the guest writes to its serial port. It is called on the thread of the writing vCPU and must not block.
pub type SerialSink = Box<dyn FnMut(&[u8]) + Send>;

/// The configuration of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmConfig {
    /// The number of vCPUs, 1 to [`MAX_VCPUS`].
    pub vcpus: u8,
    /// The guest's memory in MiB, at least 16.
    pub memory_mib: u32,
    /// Memory in addition that is not in the guest's memory map; the guest's kernel can hot-add it while it runs. A multiple of
    /// [`BLOCK_MIB`], in MiB. [`unused_hotplug_ranges`] computes its addresses.
    pub hotplug_mib: u32,
    /// The host memory that backs the guest's memory.
    pub backing: MemoryBacking,
    /// The page size of the backing memory.
    pub pages: HostPages,
    /// The guest's kernel: an uncompressed ELF `vmlinux`, or a bzImage.
    pub kernel: PathBuf,
    /// The initramfs.
    pub initrd: Option<PathBuf>,
    /// Whether the kernel command line announces all windows for devices, also those without one: VMs that are restored from this one
    /// may have devices there.
    pub announce_all_windows: bool,
    /// Kernel command-line parameters, one per element. The parameters that the VM itself needs (its devices, how to reset) are added.
    pub cmdline: Vec<String>,
}

impl Default for VmConfig {
    /// Returns a configuration with one vCPU, 128 MiB of private memory and no kernel.
    fn default() -> VmConfig {
        VmConfig {
            vcpus: 1,
            memory_mib: 128,
            hotplug_mib: 0,
            backing: MemoryBacking::Private,
            pages: HostPages::Transparent,
            kernel: PathBuf::new(),
            initrd: None,
            announce_all_windows: false,
            cmdline: Vec::new(),
        }
    }
}

/// The kind of host memory that backs a guest's memory. Private memory with huge pages is the fastest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryBacking {
    /// Anonymous memory, private to this process.
    #[default]
    Private,
    /// A memfd that other processes can map (for vhost-user devices).
    Shared,
}

/// The page size of the host memory that backs a guest's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostPages {
    /// 2 MiB if the host has transparent huge pages for such memory, otherwise 4 KiB.
    #[default]
    Transparent,
    /// 4 KiB, even if the host would use transparent huge pages.
    Small,
    /// 2 MiB from the host's hugetlb pool, all allocated when the VM is created. A file of saved memory must be on hugetlbfs;
    /// its pages are copied on write.
    Hugetlb,
}
