//! Defines the fuzz harnesses for what a guest's agent, a pod process and a file-server process send, and for the output of containers.
//! ci/fuzz calls them; the tests below run the committed corpus (`tests/corpus/TARGET/*`). A harness fails by a panic, or by a cost that
//! does not follow from the input.

mod messages;

use crate::agent::read_guest_frame;
use crate::guest_values::{FromGuest, StatisticsBounds};
use crate::log::{LogSplitter, LogStream, MAX_TEXT};
use crate::record;
use crate::socket_volumes::read_header;
use messages::agent_messages;
use nacelle_base::allocations::AllocationLimit;
use nacelle_base::copied_in::{CopyInMessage, CopyInRequest};
use nacelle_base::sockets;
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
            let answer = hello.bound().into_response(Vec::new(), false);
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

/// Reads the bytes as the record of a pod process, which the daemon reads when the process has ended. The record is the same when it is
/// written and read again.
pub fn record(data: &[u8]) {
    // The values are kept until the version is known: two bytes can become an element of a list that doubles.
    let limit = AllocationLimit { base: 4 << 10, per_byte: 200, base_count: 20, count_per_byte: 2 };
    let Ok(mut saved) = limit.enforce(data.len(), || record::parse(data, "test".into())) else { return };
    let written = record::encode(&saved).expect("it is JSON");
    assert_eq!(record::parse(&written, "test".into()).expect("it was accepted before"), saved);
    saved.mark_lost("gone", 9);
    saved.mark_oom_killed();
    let state = pod::PodState::from(&saved);
    assert!(state.phase() == pod::Phase::Stopped && state.containers.len() <= data.len());
    assert!(state.containers.iter().all(|container| container.phase() == pod::ContainerPhase::Exited));
}

/// Decodes the bytes as a message about a copied-in volume, in both directions, and the part of a volume in it.
pub fn copied_in(data: &[u8]) {
    let limit = AllocationLimit { base: 0, per_byte: 1, base_count: 1, count_per_byte: 0 };
    let (request, message) = (
        limit.enforce(data.len(), || CopyInRequest::decode(data)),
        limit.enforce(data.len(), || CopyInMessage::decode(data)),
    );
    assert!(request.is_none_or(|request| request.encode() == data));
    if let Some(message) = message {
        assert_eq!(message.encode(), data);
        if let CopyInMessage::Part { tree, .. } = message {
            drop(wire::decode::<agent::Tree>(&tree));
        }
    }
}

/// Reads the bytes as the header of a connection to a socket of the node. A header that is read is the one that was sent.
pub fn socket_header(data: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let limit = AllocationLimit { base: 256, per_byte: 1, base_count: 4, count_per_byte: 0 };
    let mut stream = data;
    let read = limit.enforce(data.len(), || runtime.block_on(read_header(&mut stream)));
    let Ok(header) = read else { return };
    assert!(header.name.is_empty() || sockets::is_name(&header.name));
    let encoded = header.encode().expect("it was read");
    assert!(data.starts_with(&encoded) && stream.len() == data.len() - encoded.len());
}

/// Writes the output of a container to its log, in two pieces. The log contains all of it and nothing else.
pub fn output(data: &[u8]) {
    const TIME: &str = "2024-01-02T03:04:05.000000006Z";
    let middle = data.first().map_or(0, |first| usize::from(*first) * data.len() / 256);
    let (first, second) = data.split_at(middle);
    // Each line becomes an entry of its own, in a buffer that doubles.
    let limit = AllocationLimit { base: 2 * MAX_TEXT, per_byte: 200, base_count: 40, count_per_byte: 0 };
    let log = limit.enforce(data.len(), || {
        let (mut splitter, mut log) = (LogSplitter::new(LogStream::Stderr), Vec::new());
        splitter.push(first, TIME, &mut log);
        splitter.push(second, TIME, &mut log);
        splitter.finish(TIME, &mut log);
        log
    });
    let mut text = Vec::new();
    let mut entries = log.split(|byte| *byte == b'\n').collect::<Vec<_>>();
    assert_eq!(entries.pop(), Some([].as_slice()), "the last entry has no end");
    for entry in entries {
        let entry = entry.strip_prefix(format!("{TIME} stderr ").as_bytes()).expect("time and stream");
        let (tag, line) = entry.split_at_checked(2).expect("a tag");
        assert!(matches!(tag, b"F " | b"P ") && line.len() <= MAX_TEXT);
        text.extend_from_slice(line);
        if tag == b"F " {
            text.push(b'\n');
        }
    }
    assert_eq!(text, data);
}

/// A fuzz harness.
pub type Target = fn(&[u8]);

/// All harnesses by the names of their corpora.
pub const TARGETS: [(&str, Target); 7] = [
    ("statistics", statistics),
    ("handshake", handshake),
    ("agent_messages", agent_messages),
    ("record", record),
    ("copied_in", copied_in),
    ("socket_header", socket_header),
    ("output", output),
];

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::allocations::CountingAllocator;
    use nacelle_base::corpus::{run_corpora, run_mutated_corpora};

    #[global_allocator]
    static ALLOCATOR: CountingAllocator = CountingAllocator;

    #[test]
    fn the_corpus() {
        run_corpora(env!("CARGO_MANIFEST_DIR"), &TARGETS);
    }

    #[test]
    fn the_mutated_corpus() {
        run_mutated_corpora(env!("CARGO_MANIFEST_DIR"), &TARGETS, 512);
    }
}
