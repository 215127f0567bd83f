//! Tears a pod down: stops the containers, the guest and the VM, and releases their resources, in this order.

use crate::agent::Agent;
use crate::error::PodError;
use crate::machine;
use crate::spec::Timeouts;
use crate::stops::StopResult;
use nacelle_base::Chain;
use nacelle_base::task::run_blocking;
use nacelle_base::undo::{UndoStack, UnreleasedResource};
use nacelle_engine::{Machine, StopMode};
use std::sync::Arc;

/// Waits for the stops of containers (id and result). A container that does not stop ends with the VM.
pub async fn await_container_stops(stops: Vec<(String, StopResult)>) {
    for (id, outcome) in stops {
        if let Err(failure) = outcome.wait().await {
            tracing::warn!(container = id, "cannot stop the container; it ends with the VM: {}", failure.message);
        }
    }
}

/// Stops the VM; with an agent, the guest shuts down first. Then releases all resources, and returns those that could not be released.
pub async fn stop_vm(
    machine: Arc<dyn Machine>,
    agent: Option<Agent>,
    undo: UndoStack,
    timeouts: &Timeouts,
) -> Vec<UnreleasedResource> {
    let mut how = StopMode::Kill;
    if let Some(agent) = agent {
        match agent.shutdown(timeouts.shutdown()).await {
            // The reply may be lost when the guest powers off; the engine then observes the VM's end.
            Ok(()) | Err(PodError::Agent { .. }) => how = StopMode::Shutdown { grace: timeouts.shutdown() },
            Err(error) => tracing::warn!("cannot shut the guest down; the VM is killed: {}", Chain(&error)),
        }
    }
    let stopped = machine::stop(machine, how).await;
    let unwound = run_blocking("release the pod's resources", move || undo.unwind()).await;
    let mut failures = unwound.unwrap_or_default();
    if let Err(error) = stopped {
        failures.push(UnreleasedResource { what: "VM", reason: Chain(&error).to_string() });
    }
    failures
}
