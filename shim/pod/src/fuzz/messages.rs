//! Defines the fuzz harness for all messages of agent.proto and pod.proto, in both directions: a message takes no more memory than the
//! scan before its decoding has estimated, and the values of a guest are bounded.

use super::is_text;
use crate::guest_values::FromGuest;
use nacelle_base::allocations::measure;
use nacelle_proto::wire::{self, Shaped};
use nacelle_proto::{agent, common, pod};
use prost::Message;
use std::time::Duration;

/// The memory in bytes of the scan itself, and of an error.
const SCAN_MEMORY: usize = 4 << 10;
/// The hot-plug memory of the VM in the harness, in bytes.
const RESERVE: u64 = 1 << 30;

type Check = fn(&[u8]);

/// The types of all messages. The first byte of an input selects one.
const CHECKS: [Check; 49] = [
    // From the guest to the pod process.
    agent_hello,
    boot_report,
    stream_opened,
    created_container,
    wait_response,
    memory_response,
    status,
    only_decode::<agent::StatsResponse>,
    only_decode::<agent::ListContainersResponse>,
    only_decode::<common::Empty>,
    // From the pod process to the daemon.
    only_decode::<pod::ConfigureResponse>,
    only_decode::<pod::PodState>,
    only_decode::<pod::ExecSyncResponse>,
    only_decode::<pod::ExecEvent>,
    only_decode::<pod::StatsResponse>,
    only_decode::<pod::StreamOpened>,
    // From the pod process to the agent.
    only_decode::<agent::BootConfig>,
    only_decode::<agent::CreateContainerRequest>,
    only_decode::<agent::ExecRequest>,
    only_decode::<agent::WriteVolumeRequest>,
    only_decode::<agent::Tree>,
    only_decode::<agent::StreamOpen>,
    only_decode::<agent::SetMemoryRequest>,
    only_decode::<agent::AttachImageRequest>,
    only_decode::<agent::AttachDeviceRequest>,
    only_decode::<agent::SignalRequest>,
    only_decode::<agent::WaitRequest>,
    only_decode::<agent::RenewRequest>,
    only_decode::<common::UpdateContainerRequest>,
    // From the daemon to the pod process.
    only_decode::<pod::ConfigureRequest>,
    only_decode::<pod::CreateContainerRequest>,
    only_decode::<pod::StopContainerRequest>,
    only_decode::<pod::ExecSyncRequest>,
    only_decode::<pod::ExecRequest>,
    only_decode::<pod::StreamOpen>,
    only_decode::<pod::SetMemoryRequest>,
    // Added later: their numbers come last, so that those of the corpus stay.
    only_decode::<agent::ClockReading>,
    only_decode::<agent::FollowClockRequest>,
    only_decode::<agent::SetSocketsRequest>,
    only_decode::<pod::HelloResponse>,
    hold_response,
    only_decode::<agent::HoldRequest>,
    only_decode::<agent::ReleaseRequest>,
    only_decode::<pod::CheckpointRequest>,
    only_decode::<pod::CheckpointResponse>,
    restore_response,
    only_decode::<agent::RestoreRequest>,
    read_volume_response,
    only_decode::<agent::ReadVolumeRequest>,
];

/// Decodes one message: the number of its type and its bytes.
pub fn agent_messages(data: &[u8]) {
    let Some((number, message)) = data.split_first() else { return };
    if let Some(check) = CHECKS.get(usize::from(*number)) {
        check(message);
    }
}

/// Decodes a message and compares the cost with the estimate.
fn decode<M: Message + Shaped + Default>(bytes: &[u8]) -> Option<M> {
    let estimate = wire::scan(M::shape(), bytes, usize::MAX).ok();
    let (decoded, cost) = measure(|| wire::decode::<M>(bytes));
    let memory = estimate.map_or(0, |estimate| estimate.memory);
    assert!(estimate.is_none_or(|estimate| estimate.steps <= bytes.len()), "{estimate:?}");
    // A list that grows takes half of its memory again while it is copied.
    assert!(cost.peak <= memory + memory / 2 + SCAN_MEMORY, "{cost:?}, {estimate:?}");
    let decoded = decoded.ok()?;
    assert!(estimate.is_some() && cost.kept <= memory, "{cost:?}, {estimate:?}");
    Some(decoded)
}

fn only_decode<M: Message + Shaped + Default>(bytes: &[u8]) {
    decode::<M>(bytes);
}

fn agent_hello(bytes: &[u8]) {
    let Some(hello) = decode::<agent::AgentHello>(bytes) else { return };
    let hello = FromGuest::new(hello).bound();
    let limit = Duration::from_secs(60);
    for now in [0, i64::MAX, i64::MIN] {
        for step in hello.boot_steps(now, limit) {
            assert!(u128::from(step.micros) <= limit.as_micros() && step.at <= now, "{step:?}");
        }
    }
    let response = hello.into_response(Vec::new(), false);
    assert!(is_text(&response.kernel_release, 128) && is_text(&response.agent_version, 128));
}

fn boot_report(bytes: &[u8]) {
    let bounded = decode::<agent::BootReport>(bytes).map(|report| FromGuest::new(report).bound());
    assert!(bounded.and_then(Result::err).is_none_or(|error| is_text(&error, 1024)));
}

fn stream_opened(bytes: &[u8]) {
    let bounded = decode::<agent::StreamOpened>(bytes).map(|opened| FromGuest::new(opened).bound());
    assert!(bounded.and_then(Result::err).is_none_or(|error| is_text(&error, 1024)));
}

fn created_container(bytes: &[u8]) {
    let Some(created) = decode::<common::CreateContainerResponse>(bytes) else { return };
    assert!(FromGuest::new(created).bound().supplemental_groups.len() <= 1024);
}

fn wait_response(bytes: &[u8]) {
    let Some(exit) = decode::<agent::WaitResponse>(bytes).and_then(|response| FromGuest::new(response).bound()) else {
        return;
    };
    let time = exit.finished_at.bound_time(100, 200);
    assert!((100..=200).contains(&time.into_inner()));
}

fn hold_response(bytes: &[u8]) {
    let Some(held) = decode::<agent::HoldResponse>(bytes) else { return };
    let known = ["a", "b"].map(str::to_owned).into();
    let held = FromGuest::new(held).bound(&known);
    assert!(held.running.is_subset(&known));
    assert!(held.into_response(pod::CheckpointResponse::default()).undrained.len() <= known.len());
}

fn restore_response(bytes: &[u8]) {
    let Some(restored) = decode::<agent::RestoreResponse>(bytes) else { return };
    let response = FromGuest::new(restored).bound().into_response(Vec::new());
    // A character has at most four bytes; one that cannot be printed is replaced by its escape sequence.
    assert!(response.kernel_release.len() + response.agent_version.len() <= 2 * 128 * 10);
}

fn read_volume_response(bytes: &[u8]) {
    let Some(read) = decode::<agent::ReadVolumeResponse>(bytes) else { return };
    assert!(FromGuest::new(read).bound().len() <= 4096);
}

fn memory_response(bytes: &[u8]) {
    let Some(response) = decode::<common::SetMemoryResponse>(bytes) else { return };
    let allowed = 1 << 20..=RESERVE;
    let bounded = FromGuest::new(response).bound(allowed.clone());
    assert!(bounded.is_ok_and(|bounded| allowed.contains(&bounded.bytes)) || !allowed.contains(&response.bytes));
}

/// The message of a gRPC status, which the guest writes into a header.
fn status(bytes: &[u8]) {
    let status = tonic::Status::unknown(String::from_utf8_lossy(bytes));
    assert!(is_text(&FromGuest::new(&status).bound_message(), 1024));
}
