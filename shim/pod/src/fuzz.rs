//! Defines one fuzz harness for each reply of a guest's agent that is bounded by its own code. ci/fuzz calls them; the
//! tests below run the committed corpus (`tests/corpus/TARGET/*`). A harness fails only by a panic.

use crate::agent::read_guest_frame;
use crate::guest_values::{FromGuest, StatisticsBounds};
use nacelle_proto::{agent, common, pod, wire};
use prost::Message;
use std::collections::BTreeSet;
use std::time::Duration;

/// The memory of the VM in the harness, in bytes.
const MEMORY: u64 = 1 << 27;
const DISK: u64 = 1 << 29;

/// Decodes and bounds a Stats reply. Whatever the guest sends, the figures that are passed on are possible for this VM, and
/// each name occurs once.
pub fn statistics(data: &[u8]) {
    let Ok(answer) = wire::decode::<agent::StatsResponse>(data) else { return };
    let containers = BTreeSet::from(["a", "b"].map(str::to_owned));
    let bounds =
        StatisticsBounds { memory: MEMORY, disk: DISK, containers: containers.clone(), interface: Some("eth0") };
    let checked = FromGuest::new(answer).bound(bounds).into_inner();
    assert!(checked.used_bytes.is_none_or(|used| used <= MEMORY));
    assert_unique(checked.containers.iter().map(|container| &container.id), 2);
    assert_unique(checked.interfaces.iter().map(|interface| &interface.name), 64);
    for container in &checked.containers {
        assert!(containers.contains(&container.id));
        container.usage.iter().for_each(assert_usage);
        let details = container.details.iter();
        for details in details {
            assert_unique(details.disks.iter().map(|disk| &disk.device), 32);
            assert_unique(details.hugepages.iter().map(|pages| &pages.size), 32);
            assert!(details.hugepages.iter().all(|pages| pages.bytes <= MEMORY));
            let counts = [details.descriptors, details.sockets, details.open_files_limit.unwrap_or(0)];
            assert!(counts.into_iter().all(is_count));
        }
        assert!(container.layer.is_none_or(|layer| layer.bytes <= DISK && is_count(layer.age_ms)));
    }
    checked.pod.iter().for_each(assert_usage);
    assert!(checked.scratch.as_ref().is_none_or(|scratch| scratch.bytes <= DISK && is_count(scratch.inodes)));
    // The daemon's client reads the bounded reply.
    assert_eq!(wire::decode::<pod::StatsResponse>(&checked.encode_to_vec()).as_ref().ok(), Some(&checked));
}

fn is_count(number: u64) -> bool {
    i64::try_from(number).is_ok()
}

fn assert_usage(usage: &common::Usage) {
    let bytes = [
        usage.memory_bytes,
        usage.anonymous_bytes,
        usage.inactive_file_bytes,
        usage.cached_bytes,
        usage.mapped_bytes,
        usage.kernel_bytes,
        usage.peak_bytes,
    ];
    assert!(bytes.into_iter().all(|bytes| bytes <= MEMORY));
    let counts = [
        usage.cpu_nanos,
        usage.user_nanos,
        usage.system_nanos,
        usage.throttled_nanos,
        usage.memory_limit_bytes.unwrap_or(0),
        usage.threads_limit.unwrap_or(0),
    ];
    assert!(counts.into_iter().all(is_count));
    let pressures = [usage.cpu_pressure, usage.memory_pressure, usage.io_pressure].into_iter().flatten();
    for stall in pressures.flat_map(|pressure| [pressure.some, pressure.full]).flatten() {
        assert!(is_count(stall.total_nanos) && stall.avg10.max(stall.avg60).max(stall.avg300) <= 10_000);
    }
}

fn assert_unique<'a>(names: impl Iterator<Item = &'a String>, limit: usize) {
    let names: Vec<_> = names.collect();
    assert!(names.len() <= limit && names.iter().collect::<BTreeSet<_>>().len() == names.len(), "{names:?}");
    assert!(names.iter().all(|name| !name.is_empty() && name.chars().all(|c| c.is_ascii_graphic())), "{names:?}");
}

fn is_text(text: &str, max_chars: usize) -> bool {
    text.chars().count() <= max_chars && !text.contains(char::is_control)
}

/// Decodes the framed messages of the boot handshake: an AgentHello, a BootReport, and the reply for a port.
pub fn handshake(data: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    runtime.block_on(async {
        let limit = Duration::from_secs(60);
        let (mut hello, mut report, mut opened) = (data, data, data);
        if let Ok(hello) = read_guest_frame::<agent::AgentHello>(&mut hello, "hello", limit).await {
            let answer = hello.bound().into_response(Vec::new());
            assert!(is_text(&answer.kernel_release, 128) && is_text(&answer.agent_version, 128));
        }
        if let Ok(report) = read_guest_frame::<agent::BootReport>(&mut report, "report", limit).await {
            assert!(report.bound().err().is_none_or(|error| is_text(&error, 1024)));
        }
        if let Ok(opened) = read_guest_frame::<agent::StreamOpened>(&mut opened, "answer for a port", limit).await {
            assert!(opened.bound().err().is_none_or(|error| is_text(&error, 1024)));
        }
    });
}

/// A fuzz harness.
pub type Target = fn(&[u8]);

/// All harnesses by the names of their corpora.
pub const TARGETS: [(&str, Target); 2] = [("statistics", statistics), ("handshake", handshake)];

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::corpus::run_corpora;

    #[test]
    fn the_corpus() {
        run_corpora(env!("CARGO_MANIFEST_DIR"), &TARGETS);
    }
}
