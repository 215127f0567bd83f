//! Runs a guest of thirteen bytes in kernel mode, whose speed distinguishes hardware virtualization from an interpreter. A
//! guest must stay on one thread.
#![allow(unsafe_code)] // reason: guest memory is a mapping that is given to KVM, and both take unsafe calls.

use nacelle_base::guest_warn;
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use kvm_bindings::{kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};

const MEMORY: NonZeroUsize = NonZeroUsize::new(64 << 10).unwrap();
const TABLES: [usize; 3] = [0x1000, 0x2000, 0x3000];
const CODE_AT: usize = 0x4000;
/// `mov ecx, 100000; again: dec ecx; jnz again; out 0x10, al; jmp start`.
const CODE: [u8; 13] = [0xb9, 0xa0, 0x86, 0x01, 0x00, 0xff, 0xc9, 0x75, 0xfc, 0xe6, 0x10, 0xeb, 0xf3];
const PORT: u16 = 0x10;

/// The probe's guest cannot run.
#[derive(Debug, thiserror::Error)]
pub enum TinyError {
    /// `/dev/kvm` cannot be opened.
    #[error("cannot open /dev/kvm")]
    Open {
        /// The cause.
        source: kvm_ioctls::Error,
    },
    /// KVM has an unsupported API version.
    #[error("KVM has API version {got}, but version 12 is needed")]
    Version {
        /// The version that KVM reports.
        got: i32,
    },
    /// Memory for the guest cannot be mapped.
    #[error("cannot map memory for the probe's guest")]
    Map {
        /// The cause.
        source: nix::Error,
    },
    /// A call to KVM failed.
    #[error("KVM cannot {what}")]
    Call {
        /// The operation that KVM should perform.
        what: &'static str,
        /// The cause.
        source: kvm_ioctls::Error,
    },
    /// The guest exited other than by its write to the port.
    #[error("the probe's guest exited unexpectedly: {exit}")]
    Exit {
        /// The exit as KVM reports it.
        exit: String,
    },
}

/// A mapping that outlives the guest that uses it.
struct Mapping(NonNull<libc::c_void>);

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `TinyGuest::new` with this length; the guest that used it is dropped before it, and no reference
        // into it exists.
        if let Err(error) = unsafe { munmap(self.0, MEMORY.get()) } {
            guest_warn!(%error, "cannot unmap the memory of the probe's guest");
        }
    }
}

/// The probe's guest. The order of the fields is the order in which they are dropped.
pub struct TinyGuest {
    vcpu: VcpuFd,
    _vm: VmFd,
    _memory: Mapping,
}

fn kvm_call(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> TinyError {
    move |source| TinyError::Call { what, source }
}

impl TinyGuest {
    /// Creates a guest that is ready to run.
    pub fn new() -> Result<TinyGuest, TinyError> {
        let kvm = Kvm::new().map_err(|source| TinyError::Open { source })?;
        match kvm.get_api_version() {
            12 => {}
            got => return Err(TinyError::Version { got }),
        }
        let vm = kvm.create_vm().map_err(kvm_call("create a VM"))?;
        let (protection, flags) = (ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_PRIVATE);
        // SAFETY: an anonymous mapping at an address of the kernel's choice touches nothing that exists.
        let memory = unsafe { mmap_anonymous(None, MEMORY, protection, flags) }
            .map(Mapping)
            .map_err(|source| TinyError::Map { source })?;
        // SAFETY: the mapping has this length, is readable and writable, and nothing else refers to it yet.
        write_guest_memory(unsafe { std::slice::from_raw_parts_mut(memory.0.as_ptr().cast::<u8>(), MEMORY.get()) });
        let region = kvm_userspace_memory_region {
            memory_size: MEMORY.get() as u64,
            userspace_addr: memory.0.as_ptr().addr() as u64,
            ..Default::default()
        };
        // SAFETY: the region is the mapping, which lives as long as the VM does.
        unsafe { vm.set_user_memory_region(region) }.map_err(kvm_call("register memory"))?;
        let vcpu = vm.create_vcpu(0).map_err(kvm_call("create a vCPU"))?;
        enter_long_mode(&vcpu)?;
        Ok(TinyGuest { vcpu, _vm: vm, _memory: memory })
    }

    /// Runs the loop once and returns the time that it took.
    pub fn run(&mut self) -> Result<Duration, TinyError> {
        let start = Instant::now();
        loop {
            match self.vcpu.run() {
                Ok(VcpuExit::IoOut(PORT, _)) => return Ok(start.elapsed()),
                Ok(exit) => return Err(TinyError::Exit { exit: format!("{exit:?}") }),
                Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {}
                Err(source) => return Err(TinyError::Call { what: "run the vCPU", source }),
            }
        }
    }
}

/// Writes page tables that map the first 2 MiB one to one, and the code.
fn write_guest_memory(memory: &mut [u8]) {
    const PRESENT_WRITABLE: u64 = 0x3;
    const LARGE: u64 = 0x80;
    let [top, middle, bottom] = TABLES;
    let mut entry = |at: usize, value: u64| memory[at..at + 8].copy_from_slice(&value.to_le_bytes());
    entry(top, middle as u64 | PRESENT_WRITABLE);
    entry(middle, bottom as u64 | PRESENT_WRITABLE);
    entry(bottom, PRESENT_WRITABLE | LARGE);
    memory[CODE_AT..CODE_AT + CODE.len()].copy_from_slice(&CODE);
}

fn enter_long_mode(vcpu: &VcpuFd) -> Result<(), TinyError> {
    let mut sregs = vcpu.get_sregs().map_err(kvm_call("read registers"))?;
    let flat = kvm_segment { limit: u32::MAX, present: 1, s: 1, g: 1, ..Default::default() };
    let data = kvm_segment { selector: 0x10, type_: 3, db: 1, ..flat };
    sregs.cs = kvm_segment { selector: 0x8, type_: 11, l: 1, ..flat };
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.cr3 = TABLES[0] as u64;
    sregs.cr4 = 1 << 5; // PAE
    sregs.cr0 = 1 << 31 | 1 << 4 | 1; // PG, ET, PE
    sregs.efer = 1 << 10 | 1 << 8; // LMA, LME
    vcpu.set_sregs(&sregs).map_err(kvm_call("write registers"))?;
    let mut regs = vcpu.get_regs().map_err(kvm_call("read registers"))?;
    (regs.rip, regs.rflags) = (CODE_AT as u64, 0x2);
    vcpu.set_regs(&regs).map_err(kvm_call("write registers"))
}
