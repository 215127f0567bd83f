//! Lays out the memory of a VM, and resizes that of a running one: first in the guest, then on the node, one after the other.
//!
//! Each resize is a task that is never cancelled, because memory that is released late may be in use again.

use crate::agent::Agent;
use crate::error::PodError;
use crate::guest_values::Bounded;
use crate::spec::PodSpec;
use nacelle_base::Chain;
use nacelle_base::task::{TaskError, run_blocking};
use nacelle_engine::{BLOCK_MIB, Machine};
use nacelle_proto::common::SetMemoryResponse;
use std::ops::Range;
use std::sync::Arc;
use tokio::sync::{Mutex, OwnedMutexGuard};

/// The parts of a VM's memory, in MiB. Those behind the first are hot-plug memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryLayout {
    /// The memory with which the kernel has booted.
    pub booted_mib: u32,
    /// The memory that the kernel uses from its configuration on: what a clone has besides its template's. Whole blocks.
    pub added_mib: u32,
    /// The memory that a resize brings into use. Whole blocks.
    pub reserve_mib: u32,
}

impl MemoryLayout {
    /// Returns the layout of a VM that boots, or of one whose kernel was started with `saved_mib` of memory: that of its template or its
    /// checkpoint.
    pub fn new(spec: &PodSpec, saved_mib: Option<u32>) -> MemoryLayout {
        let booted_mib = saved_mib.unwrap_or(spec.memory_mib);
        let added_mib = spec.memory_mib.saturating_sub(booted_mib).div_ceil(BLOCK_MIB).saturating_mul(BLOCK_MIB);
        MemoryLayout { booted_mib, added_mib, reserve_mib: spec.reserved_memory_mib.unwrap_or(0) }
    }

    /// Returns the size of the hot-plug memory in MiB.
    pub fn hotplug_mib(&self) -> u32 {
        self.added_mib.saturating_add(self.reserve_mib)
    }

    /// Returns all memory that the VM can have in MiB.
    pub fn total_mib(&self) -> u32 {
        self.booted_mib.saturating_add(self.hotplug_mib())
    }

    /// Returns the addresses of the added memory.
    pub fn added(&self) -> Vec<Range<u64>> {
        nacelle_engine::unused_hotplug_ranges(self.booted_mib, self.added_mib, 0)
    }

    /// Returns the addresses of the reserve.
    fn reserve(&self) -> Vec<Range<u64>> {
        nacelle_engine::unused_hotplug_ranges(self.booted_mib, self.hotplug_mib(), self.added_mib)
    }
}

/// A running VM. Callers must not keep it beyond their request.
pub struct RunningVm {
    /// The agent in the guest.
    pub agent: Agent,
    /// The VM.
    pub machine: Arc<dyn Machine>,
    /// The layout of its memory.
    pub memory: MemoryLayout,
}

/// Resizes the memory; concurrent resizes run one after the other. Has the bytes of the reserve that are in use. Clones
/// are handles to the same.
#[derive(Clone)]
pub struct MemoryResizer(Arc<Mutex<u64>>);

/// How much of the reserve is in use. As long as this exists, no resize begins.
pub struct ReserveInUse(OwnedMutexGuard<u64>);

impl ReserveInUse {
    /// Returns the number of bytes.
    pub fn bytes(&self) -> u64 {
        *self.0
    }
}

/// Checks that the VM has so many bytes of hot-plug memory.
pub fn check_request(spec: &PodSpec, requested: u64) -> Result<(), PodError> {
    let maximum = u64::from(spec.reserved_memory_mib.unwrap_or(0)) << 20;
    let rule = "the VM has no more hot-plug memory";
    if requested > maximum {
        Err(PodError::Field { field: "bytes", value: format!("{requested} of {maximum}"), rule })
    } else {
        Ok(())
    }
}

impl MemoryResizer {
    /// A VM of this specification, of whose memory no resize has begun.
    pub fn new(spec: &PodSpec) -> MemoryResizer {
        let in_use = spec.checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.reserve_used_bytes);
        MemoryResizer(Arc::new(Mutex::new(in_use)))
    }

    /// Brings `requested` bytes of the hot-plug memory into use; returns how many are in use then.
    pub async fn set(&self, vm: RunningVm, requested: u64) -> Result<Bounded<SetMemoryResponse>, PodError> {
        // A caller that has gone while it waits changes nothing.
        let mut in_use = Arc::clone(&self.0).lock_owned().await;
        let task = tokio::spawn(async move {
            // A resize that fails restores what was in use.
            let used = resize(vm, requested).await?;
            *in_use = used.bytes;
            Ok(used)
        });
        task.await.unwrap_or_else(|error| Err(TaskError::new("resize the memory of the VM", error).into()))
    }

    /// Waits for the resizes that have begun, and keeps others waiting.
    pub async fn hold(&self) -> ReserveInUse {
        ReserveInUse(Arc::clone(&self.0).lock_owned().await)
    }
}

async fn resize(
    RunningVm { agent, machine, memory }: RunningVm,
    requested: u64,
) -> Result<Bounded<SetMemoryResponse>, PodError> {
    let maximum = u64::from(memory.reserve_mib) << 20;
    let used = agent.set_memory(&memory.reserve(), requested).await?.bound(requested..=maximum)?;
    // If the guest uses more than it reports, it loses that memory, not the node.
    let used_mib = u32::try_from(used.bytes.div_ceil(1 << 20)).unwrap_or(u32::MAX);
    release_hotplug_memory(machine, memory.added_mib.saturating_add(used_mib)).await;
    Ok(used)
}

/// Releases what the engine has written to the reserve before the guest's kernel ran: the initial file system may lie there.
pub async fn release_reserve(machine: Arc<dyn Machine>, memory: MemoryLayout) {
    release_hotplug_memory(machine, memory.added_mib).await;
}

/// Releases the node's memory behind the unused hot-plug memory. A failure is only logged, because the guest does not use that memory.
async fn release_hotplug_memory(machine: Arc<dyn Machine>, used_mib: u32) {
    let release = move || machine.as_memory_hotplug().map(|memory| memory.release_unused(used_mib));
    match run_blocking("release unused memory of the VM", release).await {
        Ok(Some(Err(error))) => tracing::warn!(used_mib, "{}", Chain(&error)),
        Err(error) => tracing::warn!(used_mib, "{}", Chain(&error)),
        Ok(Some(Ok(())) | None) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::tests::sample;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_clone_adds_what_its_template_lacks() {
        let layout = |memory_mib, reserved_memory_mib, template_mib| {
            MemoryLayout::new(&PodSpec { memory_mib, reserved_memory_mib, ..sample() }, template_mib)
        };
        let mib = |ranges: Vec<Range<u64>>| ranges.iter().map(|range| (range.start / MIB, range.end / MIB)).collect();
        let added = |layout: MemoryLayout| -> Vec<(u64, u64)> { mib(layout.added()) };
        let reserve = |layout: MemoryLayout| -> Vec<(u64, u64)> { mib(layout.reserve()) };

        let booted = layout(300, Some(256), None);
        assert_eq!(booted, MemoryLayout { booted_mib: 300, added_mib: 0, reserve_mib: 256 });
        assert_eq!((added(booted), reserve(booted)), (vec![], vec![(384, 640)]));
        // 256 MiB of the template, and a whole block for the other 44.
        let clone = layout(300, Some(256), Some(256));
        assert_eq!(clone, MemoryLayout { booted_mib: 256, added_mib: 128, reserve_mib: 256 });
        assert_eq!((booted.total_mib(), clone.total_mib()), (556, 640));
        assert_eq!((added(clone), reserve(clone)), (vec![(256, 384)], vec![(384, 640)]));
        let same = layout(256, None, Some(256));
        assert_eq!((same.hotplug_mib(), added(same), reserve(same)), (0, vec![], vec![]));
        // Memory that continues above the hole for devices.
        let large = layout(4096, Some(128), Some(256));
        assert_eq!((added(large), reserve(large)), (vec![(256, 3072), (4096, 5120)], vec![(5120, 5248)]));
    }
}
