//! Resizes the memory of a running VM: first in the guest, then on the node, one after the other.
//!
//! Each resize is a task that is never cancelled, because memory that is released late may be in use again.

use crate::agent::Agent;
use crate::error::PodError;
use crate::guest_values::Bounded;
use crate::spec::PodSpec;
use nacelle_base::Chain;
use nacelle_base::task::{TaskError, run_blocking};
use nacelle_engine::Machine;
use nacelle_proto::common::SetMemoryResponse;
use std::sync::Arc;
use tokio::sync::Semaphore;

/// A running VM. Callers must not keep it beyond their request.
pub struct RunningVm {
    /// The agent in the guest.
    pub agent: Agent,
    /// The VM.
    pub machine: Arc<dyn Machine>,
}

/// Resizes the memory; concurrent resizes run one after the other.
pub struct MemoryResizer(Arc<Semaphore>);

impl Default for MemoryResizer {
    fn default() -> MemoryResizer {
        MemoryResizer(Arc::new(Semaphore::new(1)))
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
    /// Brings `requested` bytes of the hot-plug memory into use; returns how many are in use then.
    pub async fn set(
        &self,
        spec: Arc<PodSpec>,
        vm: RunningVm,
        requested: u64,
    ) -> Result<Bounded<SetMemoryResponse>, PodError> {
        let serial = Arc::clone(&self.0);
        let task = tokio::spawn(async move {
            let _permit = serial.acquire_owned().await;
            resize(&spec, vm, requested).await
        });
        task.await.unwrap_or_else(|error| Err(TaskError::new("resize the memory of the VM", error).into()))
    }
}

async fn resize(
    spec: &PodSpec,
    RunningVm { agent, machine }: RunningVm,
    requested: u64,
) -> Result<Bounded<SetMemoryResponse>, PodError> {
    let hotplug_mib = spec.reserved_memory_mib.unwrap_or(0);
    let ranges = nacelle_engine::unused_hotplug_ranges(spec.memory_mib, hotplug_mib, 0);
    let maximum = u64::from(hotplug_mib) << 20;
    let used = agent.set_memory(&ranges, requested).await?.bound(requested..=maximum)?;
    // If the guest uses more than it reports, it loses that memory, not the node.
    release_hotplug_memory(machine, u32::try_from(used.bytes.div_ceil(1 << 20)).unwrap_or(u32::MAX)).await;
    Ok(used)
}

/// Releases what the engine has written to the hot-plug memory before the guest's kernel ran: the initial file system may lie there.
pub async fn release_all_hotplug_memory(machine: Arc<dyn Machine>) {
    release_hotplug_memory(machine, 0).await;
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
