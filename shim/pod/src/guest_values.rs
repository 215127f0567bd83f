//! Bounds every value that a guest sends, before the rest of the pod process can read it.
//!
//! [`FromGuest`] holds a value as it arrived and hands it out only through the functions of this module, which return [`Bounded`]
//! values; no other module constructs one. Replies of pod.proto with a guest's values are built from `Bounded` values only. The number
//! of bytes in a message is limited earlier, by `nacelle_proto::wire` and [`crate::agent`].
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod statistics;

pub use statistics::StatisticsBounds;

use crate::text::printable;
use nacelle_base::copied_in::MAX_RETURNED;
use nacelle_base::timeline::TimelineStep;
use nacelle_engine::MachineExit;
use nacelle_proto::common::{CreateContainerResponse, SetMemoryResponse};
use nacelle_proto::{agent, pod};
use std::collections::BTreeSet;
use std::fmt;
use std::ops::{Deref, RangeInclusive};
use std::time::Duration;

/// The longest error message of the agent, in characters.
const MAX_ERROR: usize = 1024;
/// The longest kernel release and agent version, in characters.
const MAX_VERSION: usize = 128;
/// The longest part of the console's end that explains why a VM ended, in characters.
const MAX_CONSOLE: usize = 2048;
/// The most supplemental groups of a container's user.
const MAX_GROUPS: usize = 1024;
/// The most bytes of each output stream that ExecSync returns. Further output is dropped.
pub const MAX_OUTPUT: usize = 16 << 20;

/// A value as the guest sent it. It can only be passed on; this module returns it bounded.
pub struct FromGuest<T>(T);

impl<T> FromGuest<T> {
    /// Marks a value that the guest sent.
    pub fn new(value: T) -> FromGuest<T> {
        FromGuest(value)
    }
}

/// A value that a guest sent and this module bounded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bounded<T>(T);

impl<T> Bounded<T> {
    /// Returns the value. Its type no longer shows that it is bounded, so call this only where the value leaves the process.
    pub fn into_inner(self) -> T {
        self.0
    }
}

impl<T> Deref for Bounded<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: fmt::Display> fmt::Display for Bounded<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

fn text(text: &str, max_chars: usize) -> Bounded<String> {
    Bounded(printable(text, max_chars))
}

/// Returns `Err` with the message, unless the message is empty.
fn check_error(message: &str) -> Result<(), Bounded<String>> {
    if message.is_empty() { Ok(()) } else { Err(text(message, MAX_ERROR)) }
}

/// Describes how a VM ended, with the end of its console on the same line.
pub fn describe_exit(exit: &MachineExit) -> Bounded<String> {
    let skip = exit.console_tail.chars().count().saturating_sub(MAX_CONSOLE);
    let console: String = exit.console_tail.trim().chars().skip(skip).collect();
    let console = printable(&console.replace('\n', " | "), MAX_CONSOLE * 2);
    Bounded(if console.is_empty() { exit.how.to_string() } else { format!("{}; console: {console}", exit.how) })
}

impl FromGuest<&tonic::Status> {
    /// Returns the message of a gRPC status.
    pub fn bound_message(self) -> Bounded<String> {
        text(self.0.message(), MAX_ERROR)
    }
}

impl FromGuest<agent::AgentHello> {
    /// Shortens the texts. The times stay as the guest sent them: only [`Bounded::boot_steps`] computes with them.
    pub fn bound(self) -> Bounded<agent::AgentHello> {
        let agent::AgentHello { protocol, agent_version, kernel_release, started_nanos, sent_nanos } = self.0;
        let version = |version: String| printable(&version, MAX_VERSION);
        let (agent_version, kernel_release) = (version(agent_version), version(kernel_release));
        Bounded(agent::AgentHello { protocol, agent_version, kernel_release, started_nanos, sent_nanos })
    }
}

impl Bounded<agent::AgentHello> {
    /// Returns the steps of the boot before the hello, by the guest's clock, which starts with its kernel. `now` is the
    /// node's time in nanoseconds since 1970; no step is longer than `limit`, the time that a boot may take.
    pub fn boot_steps(&self, now: i64, limit: Duration) -> [TimelineStep; 2] {
        let limit = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        let sent = self.sent_nanos.min(limit);
        let started = self.started_nanos.min(sent);
        let step = |what: &str, from: u64, to: u64| TimelineStep {
            what: what.to_owned(),
            at: now.saturating_sub(i64::try_from(sent - from).unwrap_or(i64::MAX)),
            micros: (to - from) / 1000,
            failed: false,
        };
        [step("kernel", 0, started), step("agent", started, sent)]
    }

    /// Returns the reply to Configure, with the steps that the pod process measured.
    pub fn into_response(self, steps: Vec<TimelineStep>, from_template: bool) -> Bounded<pod::ConfigureResponse> {
        let agent::AgentHello { agent_version, kernel_release, .. } = self.0;
        let steps = steps.into_iter().map(boot_step).collect();
        Bounded(pod::ConfigureResponse { kernel_release, agent_version, steps, from_template })
    }
}

impl FromGuest<agent::RestoreResponse> {
    /// Shortens the texts.
    pub fn bound(self) -> Bounded<agent::RestoreResponse> {
        let version = |version: &str| printable(version, MAX_VERSION);
        let (agent_version, kernel_release) = (version(&self.0.agent_version), version(&self.0.kernel_release));
        Bounded(agent::RestoreResponse { agent_version, kernel_release })
    }
}

impl Bounded<agent::RestoreResponse> {
    /// Returns the reply to Configure, with the steps that the pod process measured.
    pub fn into_response(self, steps: Vec<TimelineStep>) -> Bounded<pod::ConfigureResponse> {
        let agent::RestoreResponse { agent_version, kernel_release } = self.0;
        let steps = steps.into_iter().map(boot_step).collect();
        Bounded(pod::ConfigureResponse { kernel_release, agent_version, steps, from_template: false })
    }
}

fn boot_step(step: TimelineStep) -> pod::BootStep {
    pod::BootStep { name: step.what, started_at: step.at, micros: step.micros }
}

impl FromGuest<agent::BootReport> {
    /// Returns `Err` with the agent's message if the guest could not be configured.
    pub fn bound(self) -> Result<(), Bounded<String>> {
        check_error(&self.0.error)
    }
}

impl FromGuest<agent::StreamOpened> {
    /// Returns `Err` with the agent's message if the stream is not open.
    pub fn bound(self) -> Result<(), Bounded<String>> {
        check_error(&self.0.error)
    }
}

impl FromGuest<CreateContainerResponse> {
    /// Drops supplemental groups beyond the limit.
    pub fn bound(self) -> Bounded<CreateContainerResponse> {
        let CreateContainerResponse { uid, gid, mut supplemental_groups } = self.0;
        supplemental_groups.truncate(MAX_GROUPS);
        Bounded(CreateContainerResponse { uid, gid, supplemental_groups })
    }
}

impl FromGuest<agent::ReadVolumeResponse> {
    /// Returns the last bytes, as many as a file of the node gets.
    pub fn bound(self) -> Bounded<Vec<u8>> {
        let mut end = self.0.end;
        let surplus = end.len().saturating_sub(MAX_RETURNED);
        end.drain(..surplus);
        Bounded(end)
    }
}

/// The containers of a pod that is held.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeldContainers {
    /// The ids of those whose process runs.
    pub running: BTreeSet<String>,
    /// The ids of those some of whose output was not read.
    undrained: BTreeSet<String>,
}

impl FromGuest<agent::HoldResponse> {
    /// Drops the ids of containers that the pod does not have.
    pub fn bound(self, known: &BTreeSet<String>) -> Bounded<HeldContainers> {
        let agent::HoldResponse { running, undrained } = self.0;
        let keep = |ids: Vec<String>| ids.into_iter().filter(|id| known.contains(id)).collect();
        Bounded(HeldContainers { running: keep(running), undrained: keep(undrained) })
    }
}

impl Bounded<HeldContainers> {
    /// Returns the response to Checkpoint, whose other figures the pod process has measured.
    pub fn into_response(self, figures: pod::CheckpointResponse) -> Bounded<pod::CheckpointResponse> {
        Bounded(pod::CheckpointResponse { undrained: self.0.undrained.into_iter().collect(), ..figures })
    }
}

/// How a process in the guest ended.
pub struct GuestExit {
    /// The exit code; 128 + n for signal n. A guest can send any number.
    pub code: u32,
    /// The OOM killer ended the process.
    pub oom_killed: bool,
    /// With `oom_killed`: the guest's memory ran out, not a limit of the container.
    pub guest_out_of_memory: bool,
    /// The time by the guest's clock, in nanoseconds since 1970.
    pub finished_at: FromGuest<i64>,
}

impl FromGuest<agent::WaitResponse> {
    /// Returns `None` while the process runs.
    pub fn bound(self) -> Option<GuestExit> {
        let agent::Exit { code, oom_killed, finished_at_unix_nanos, guest_out_of_memory } = self.0.exit?;
        let finished_at = FromGuest(finished_at_unix_nanos);
        Some(GuestExit { code, oom_killed, guest_out_of_memory, finished_at })
    }
}

impl FromGuest<agent::ClockReading> {
    /// Returns the reading of the guest's clock. Every number is possible: [`crate::clock`] only compares it with the node's time,
    /// and sends the monotonic time back.
    pub fn bound(self) -> Bounded<agent::ClockReading> {
        Bounded(self.0)
    }
}

impl FromGuest<i64> {
    /// Returns the time of the guest's clock, or `latest` if it is not between these times of the node's clock.
    pub fn bound_time(self, earliest: i64, latest: i64) -> Bounded<i64> {
        Bounded(if (earliest..=latest).contains(&self.0) { self.0 } else { latest })
    }
}

/// The agent reports a number of bytes that it cannot have brought into use.
#[derive(Debug, thiserror::Error)]
#[error(
    "the agent reports an impossible amount of reserved memory in use: {reported} bytes, where {requested} of {reserve} were requested"
)]
pub struct MemoryOutOfRange {
    /// The bytes that the agent reports.
    pub reported: u64,
    /// The bytes that were requested, the least that is possible.
    pub requested: u64,
    /// The bytes of all hot-plug memory, the most that is possible.
    pub reserve: u64,
}

impl FromGuest<SetMemoryResponse> {
    /// Fails if the number of bytes is not within `allowed`: from the requested size to all of the hot-plug memory.
    pub fn bound(self, allowed: RangeInclusive<u64>) -> Result<Bounded<SetMemoryResponse>, MemoryOutOfRange> {
        let SetMemoryResponse { bytes } = self.0;
        if allowed.contains(&bytes) {
            return Ok(Bounded(SetMemoryResponse { bytes }));
        }
        Err(MemoryOutOfRange { reported: bytes, requested: *allowed.start(), reserve: *allowed.end() })
    }
}

/// The first [`MAX_OUTPUT`] bytes of an output stream of a command.
#[derive(Default)]
pub struct CommandOutput(Vec<u8>);

impl CommandOutput {
    /// Appends these bytes as far as the limit allows.
    pub fn append(&mut self, bytes: &[u8]) {
        let free = MAX_OUTPUT.saturating_sub(self.0.len()).min(bytes.len());
        self.0.extend_from_slice(bytes.get(..free).unwrap_or_default());
    }

    /// Returns the reply to ExecSync.
    pub fn into_response(self, stderr: CommandOutput, exit: &GuestExit) -> Bounded<pod::ExecSyncResponse> {
        let exit_code = i32::try_from(exit.code).unwrap_or(i32::MAX);
        Bounded(pod::ExecSyncResponse { stdout: self.0, stderr: stderr.0, exit_code })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
mod tests;
