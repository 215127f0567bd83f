//! Owns: the machine itself: memory, kernel, processors, interrupt controllers, the bus, and how it runs and ends.
//! May use: KVM. Knows which devices there are only as [`crate::Device`].
//! Threads: one `vcpuN` for each processor; every handle may be used from any thread.
//!
//! ```no_run
//! use nacelle_vmm::machine::{Builder, Config};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = Config { kernel: "/boot/vmlinux".into(), ..Config::default() };
//! let machine = Builder::new(config)?.start()?;
//! let exit = machine.wait(std::time::Duration::from_secs(60));
//! # Ok(()) }
//! ```

mod boot;
mod builder;
mod bus;
mod cpuid;
mod error;
mod fit;
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

pub use builder::Builder;
pub use bus::BusDevice;
pub use error::Error;
pub use handle::{Exit, Machine};
pub use kernel::{KernelError, check_kernel};
pub use layout::{BLOCK_MIB, FIRST_GSI, MAX_DEVICES, WINDOW_SIZE, WINDOWS, end, made_mib, reserve};
pub use legacy::SerialState;
pub use memory::MemoryError;
pub use state::{MachineState, VcpuState, VmState};

use std::path::PathBuf;

/// The most virtual processors of a machine.
pub const MAX_VCPUS: u8 = 64;

/// Takes what the guest writes to its serial port, on the thread of the vCPU that writes; must not block.
pub type Console = Box<dyn FnMut(&[u8]) + Send>;

/// What a machine shall be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Virtual processors, 1 to [`MAX_VCPUS`].
    pub vcpus: u8,
    /// Guest memory in MiB, at least 16.
    pub memory_mib: u32,
    /// Memory beside it that the guest's kernel is not told of, and may add while it runs: whole blocks of [`BLOCK_MIB`]. Where it
    /// lies, [`reserve`] says.
    pub reserve_mib: u32,
    /// What lies under the guest's memory.
    pub backing: Backing,
    /// The size of the host's pages there.
    pub pages: HostPages,
    /// The guest kernel: an uncompressed ELF `vmlinux`, or a bzImage.
    pub kernel: PathBuf,
    /// The initial file system.
    pub initrd: Option<PathBuf>,
    /// Kernel parameters, one word each. What the machine needs itself (its devices, how to reset) is added.
    pub cmdline: Vec<String>,
}

impl Default for Config {
    /// One processor, 128 MiB of private memory and no kernel.
    fn default() -> Config {
        Config {
            vcpus: 1,
            memory_mib: 128,
            reserve_mib: 0,
            backing: Backing::Private,
            pages: HostPages::Transparent,
            kernel: PathBuf::new(),
            initrd: None,
            cmdline: Vec::new(),
        }
    }
}

/// What lies under a guest's memory. Private memory with huge pages is the fastest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backing {
    /// Anonymous memory of this process alone.
    #[default]
    Private,
    /// A memfd that other processes can map (vhost-user devices).
    Shared,
}

/// The size of the host's pages under a guest's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostPages {
    /// 2 MiB where the host has transparent huge pages for such memory, 4 KiB elsewhere.
    #[default]
    Transparent,
    /// 4 KiB, also where the host would give transparent huge pages.
    Small,
    /// 2 MiB from the host's hugetlb pool, all taken when the machine is made. A file of saved memory must be one of hugetlbfs, and its
    /// pages are copied when they are written.
    Hugetlb,
}
