//! Owns: the way down: containers, guest, machine, and what was taken for them, in this order.

use crate::agent::Agent;
use crate::error::PodError;
use crate::machine;
use crate::spec::Timeouts;
use crate::stops::Outcome;
use nacelle_base::Chain;
use nacelle_base::task::run_blocking;
use nacelle_base::undo::{Left, UndoStack};
use nacelle_engine::{Machine, Stop};
use std::sync::Arc;

/// Waits for the stops of containers (id and outcome). What does not stop goes down with the machine.
pub async fn containers(stops: Vec<(String, Outcome)>) {
    for (id, outcome) in stops {
        if let Err(failure) = outcome.wait().await {
            tracing::warn!(container = id, "{}", failure.message);
        }
    }
}

/// Ends the machine: with an agent it may shut down first. Then gives everything back; returns what could not be.
pub async fn machine(
    machine: Arc<dyn Machine>,
    agent: Option<Agent>,
    undo: UndoStack,
    timeouts: &Timeouts,
) -> Vec<Left> {
    let mut how = Stop::Kill;
    if let Some(agent) = agent {
        match agent.shutdown(timeouts.shutdown()).await {
            // The answer may be lost with the guest: the machine says how it is.
            Ok(()) | Err(PodError::Agent { .. }) => how = Stop::Shutdown { grace: timeouts.shutdown() },
            Err(error) => tracing::warn!("{}", Chain(&error)),
        }
    }
    let stopped = machine::stop(machine, how).await;
    let unwound = run_blocking("release the pod's resources", move || undo.unwind()).await;
    let mut left = unwound.unwrap_or_default();
    if let Err(error) = stopped {
        left.push(Left { what: "machine", why: Chain(&error).to_string() });
    }
    left
}
