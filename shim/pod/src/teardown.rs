//! Owns: the way down: containers, guest, machine, and what was taken for them, in this order.

use crate::agent::Agent;
use crate::container;
use crate::error::PodError;
use crate::machine::{self, blocking};
use crate::record::PodRecord;
use crate::spec::Timeouts;
use nacelle_base::Chain;
use nacelle_base::undo::{Left, UndoStack};
use nacelle_engine::{Machine, Stop};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Stops containers (id and stop signal) all at once. What does not stop goes down with the machine.
pub async fn containers(
    agent: &Agent,
    published: &watch::Receiver<PodRecord>,
    running: Vec<(String, u32)>,
    grace: Duration,
    timeouts: &Timeouts,
) {
    let mut stops = JoinSet::new();
    for (id, signal) in running {
        let (agent, published, limit) = (agent.clone(), published.clone(), timeouts.shutdown());
        stops.spawn(async move {
            let stopped = container::stop(agent, published, &id, signal, grace, limit).await;
            if let Err(error) = stopped {
                tracing::warn!(container = id, "{}", Chain(&error));
            }
        });
    }
    while stops.join_next().await.is_some() {}
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
    let unwound = blocking("the undoing", move || undo.unwind()).await;
    let mut left = unwound.unwrap_or_default();
    if let Err(error) = stopped {
        left.push(Left { what: "machine", why: Chain(&error).to_string() });
    }
    left
}
