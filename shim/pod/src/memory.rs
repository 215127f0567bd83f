//! Resizes the memory of a running VM: first in the guest, then on the node, one change at a time.
//!
//! Each change is a task that is never cancelled, because memory that is released late may be in use again.

use crate::actor::Able;
use crate::error::PodError;
use crate::guest_values::Bounded;
use crate::spec::PodSpec;
use nacelle_base::Chain;
use nacelle_base::task::{TaskError, run_blocking};
use nacelle_engine::Machine;
use nacelle_proto::common::SetMemoryResponse;
use std::sync::Arc;
use tokio::sync::Semaphore;

/// Serializes the changes.
pub struct Memory(Arc<Semaphore>);

impl Default for Memory {
    fn default() -> Memory {
        Memory(Arc::new(Semaphore::new(1)))
    }
}

/// Checks that the VM's memory reserve has so many bytes.
pub fn check(spec: &PodSpec, asked: u64) -> Result<(), PodError> {
    let most = u64::from(spec.reserved_memory_mib.unwrap_or(0)) << 20;
    let rule = "no more than the machine has in reserve is allowed";
    if asked > most {
        Err(PodError::Field { field: "bytes", value: format!("{asked} of {most}"), rule })
    } else {
        Ok(())
    }
}

impl Memory {
    /// Brings `asked` bytes of the reserve into use; returns how many are in use then.
    pub async fn set(
        &self,
        spec: Arc<PodSpec>,
        able: Able,
        asked: u64,
    ) -> Result<Bounded<SetMemoryResponse>, PodError> {
        let turn = Arc::clone(&self.0);
        let change = tokio::spawn(async move {
            let _turn = turn.acquire_owned().await;
            change(&spec, able, asked).await
        });
        change.await.unwrap_or_else(|error| Err(TaskError::new("resize the memory of the VM", error).into()))
    }
}

async fn change(
    spec: &PodSpec,
    Able { agent, machine }: Able,
    asked: u64,
) -> Result<Bounded<SetMemoryResponse>, PodError> {
    let reserve_mib = spec.reserved_memory_mib.unwrap_or(0);
    let places = nacelle_engine::reserve(spec.memory_mib, reserve_mib, 0);
    let most = u64::from(reserve_mib) << 20;
    let used = agent.set_memory(&places, asked).await?.bound(asked..=most)?;
    // If the guest uses more than it reports, it loses that memory, not the node.
    release_unused_reserve(machine, u32::try_from(used.bytes.div_ceil(1 << 20)).unwrap_or(u32::MAX)).await;
    Ok(used)
}

/// Releases what the engine has written to the reserve before the guest's kernel ran: the initial file system may lie there.
pub async fn clear(machine: Arc<dyn Machine>) {
    release_unused_reserve(machine, 0).await;
}

/// Releases the node's memory of the unused reserve. A failure is only logged, because the guest does not use that memory.
async fn release_unused_reserve(machine: Arc<dyn Machine>, used_mib: u32) {
    let release = move || machine.as_reserve().map(|reserve| reserve.release_unused(used_mib));
    match run_blocking("release unused memory of the VM", release).await {
        Ok(Some(Err(error))) => tracing::warn!(used_mib, "{}", Chain(&error)),
        Err(error) => tracing::warn!(used_mib, "{}", Chain(&error)),
        Ok(Some(Ok(())) | None) => {}
    }
}
