//! Makes the guest of a restored VM that of this pod. There is no boot handshake: the agent serves from the first moment, and holds the
//! containers frozen. It owns no resource that needs cleanup, so its future may be dropped at any point.

use super::spec::CheckpointBase;
use crate::agent::{Agent, ExitWatch};
use crate::boot::{NetworkWatch, ReadyGuest, wait_for_network};
use crate::error::PodError;
use crate::machine::random;
use crate::spec::PodSpec;
use nacelle_base::FailureKind;
use nacelle_base::timeline::Timeline;
use nacelle_engine::GuestLink;
use nacelle_proto::agent as proto;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// The pause between two attempts to reach the agent.
const RETRY_PAUSE: Duration = Duration::from_millis(20);
/// The length of the identity of a restore in bytes.
const GENERATION_BYTES: usize = 16;
/// The number of fresh random bytes for the guest.
const ENTROPY_BYTES: usize = 64;

/// A VM that was restored from a checkpoint and runs.
pub struct RestoredVm {
    /// The link to the guest.
    pub link: Arc<dyn GuestLink>,
    /// Reports how the VM has ended.
    pub exit_watch: ExitWatch,
}

/// Renews the guest at once, because the lease of its hold runs; then waits for the network, and gives the guest its new identity. Its
/// containers stay frozen until they are started.
pub async fn adopt_guest(
    spec: &PodSpec,
    base: &CheckpointBase,
    vm: RestoredVm,
    network: NetworkWatch,
    timeline: &Timeline,
) -> Result<ReadyGuest, PodError> {
    let RestoredVm { link, exit_watch } = vm;
    let agent = Agent::new(link, exit_watch, spec.timeouts.call());
    timeline.measure("guest renewed", renew(&agent, spec.timeouts.boot())).await?;
    let network = wait_for_network(network).await?;
    let request = proto::RestoreRequest {
        hostname: spec.hostname.clone(),
        interfaces: network.interfaces.clone(),
        routes: network.routes.clone(),
        dns: network.dns.clone(),
        containers: base.containers.iter().map(proto::RestoredContainer::from).collect(),
    };
    let limit = spec.timeouts.configure();
    let restored = timeline.measure("guest restored", agent.restore(request, limit)).await?.bound();
    tracing::info!(kernel = restored.kernel_release, "the guest continues from its checkpoint");
    Ok(ReadyGuest { agent, response: restored.into_response(timeline.steps()) })
}

/// Sends the first request. The guest may drop the first connections, while its driver closes those of the saved pod.
async fn renew(agent: &Agent, limit: Duration) -> Result<(), PodError> {
    let (mut generation, mut entropy) = (vec![0; GENERATION_BYTES], vec![0; ENTROPY_BYTES]);
    random(&mut generation)?;
    random(&mut entropy)?;
    let end = Instant::now() + limit;
    loop {
        let (generation, entropy) = (generation.clone(), entropy.clone());
        let request = proto::RenewRequest { generation, time_unix_nanos: crate::now_nanos(), entropy };
        match agent.renew(request).await {
            Err(PodError::Agent { kind: FailureKind::Unavailable, .. }) if Instant::now() < end => {
                tokio::time::sleep(RETRY_PAUSE).await;
            }
            other => return other,
        }
    }
}
