//! Contains one harness function per parser of bytes that a guest, the author of a disk image or QEMU writes. ci/fuzz calls them;
//! the tests below feed them random bytes and the committed corpus (`tests/corpus/TARGET/*`). A harness fails by a panic or by
//! never ending.

use crate::dhcp::{Lease, MAX_MESSAGE};
use crate::guest_agent::{MAX_OUTPUT, parse_exec_status};
use crate::json_lines::{MAX_QUEUED_EVENTS, MAX_QUEUED_REPLIES, printable, read_lines};
use crate::qcow2::{Format, HEADER, MAX_SIZE, detect_format};
use crate::snapshots::snapshots_of_node;
use nacelle_proto::agent::BootConfig;
use nacelle_proto::common::{Dns, Interface, Route};
use serde_json::Value;
use tokio::sync::mpsc;

/// The maximum line length of the harness.
const MAX_LINE: u64 = 4096;
/// The length of the Ethernet, IP and UDP headers.
const PACKET_HEADERS: usize = 42;
/// The length of the fixed part of a DHCP message.
const DHCP_HEADER: usize = 240;
/// The hardware address of the harness's card.
const CARD: [u8; 6] = [2, 0, 0, 0, 0, 0xab];

/// A pod with addresses, routes and names.
fn network() -> BootConfig {
    let route = |destination: &str, gateway: &str| Route {
        destination: destination.to_owned(),
        gateway: gateway.to_owned(),
        interface: "eth0".to_owned(),
        ..Route::default()
    };
    BootConfig {
        hostname: "db".to_owned(),
        interfaces: vec![Interface {
            name: "eth0".to_owned(),
            mac: Vec::new(),
            mtu: 1450,
            addresses: vec!["10.1.0.5/24".to_owned()],
            ..Interface::default()
        }],
        routes: vec![route("0.0.0.0/0", "10.1.0.1"), route("10.9.128.0/17", "10.7.0.1")],
        dns: Some(Dns {
            servers: vec!["10.96.0.10".to_owned()],
            searches: vec!["a.svc".to_owned(), "s".repeat(60)],
            options: Vec::new(),
        }),
        ..BootConfig::default()
    }
}

/// A frame of the guest to the DHCP server. An answer has the headers and options that a client can parse, goes to this card or
/// to broadcast, and is not a request itself.
pub fn dhcp(data: &[u8]) {
    let lease = Lease::new(&network(), 0, CARD).expect("an address");
    let Some(answer) = lease.reply_to(data) else { return };
    assert!((PACKET_HEADERS + 300..=PACKET_HEADERS + MAX_MESSAGE).contains(&answer.len()), "{}", answer.len());
    assert!(answer.starts_with(&CARD) || answer.starts_with(&[0xff; 6]), "{answer:?}");
    let (_, message) = answer.split_at(PACKET_HEADERS);
    // The answer is for this request.
    assert!(data.windows(4).any(|part| message.get(4..8) == Some(part)));
    let mut options = message.get(DHCP_HEADER..).expect("options");
    let mut kind = None;
    while let [code @ 1..=254, length, rest @ ..] = options {
        let (value, rest) = rest.split_at_checked(usize::from(*length)).expect("an option is not cut");
        if *code == 53 {
            kind = value.first().copied();
        }
        options = rest;
    }
    assert!(matches!(kind, Some(2 | 5 | 6)) && options.first() == Some(&255), "{kind:?} {options:?}");
    assert_eq!(lease.reply_to(&answer), None);
}

/// The beginning of a disk image.
pub fn qcow2(data: &[u8]) {
    let head = data.get(..HEADER.min(data.len())).unwrap_or_default();
    if let Ok(Format::Qcow2 { size }) = detect_format(head) {
        assert!((1..=MAX_SIZE).contains(&size));
        let backing = head.get(8..16).expect("a head");
        assert_eq!(backing, [0; 8], "it has a backing file");
    }
}

/// The output of QEMU's monitor or of a guest agent, parsed as the result of a command and as a list of snapshots.
pub fn json_lines(data: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let (reply_sender, mut replies) = mpsc::channel(MAX_QUEUED_REPLIES);
    let (event_sender, mut events) = mpsc::channel(MAX_QUEUED_EVENTS);
    runtime.block_on(read_lines(data, MAX_LINE, "the peer", reply_sender, event_sender));
    while let Ok(event) = events.try_recv() {
        assert_printable(&event.name);
        assert_printable(&printable(&event.data.to_string()));
    }
    while let Ok(answer) = replies.try_recv() {
        if let Some(message) = answer.get("error").and_then(|error| error.get("desc")).and_then(Value::as_str) {
            assert_printable(&printable(message));
        }
        let Some(value) = answer.get("return") else { continue };
        if let Ok(outcome) = parse_exec_status(value) {
            assert!(outcome.stdout.len() <= MAX_OUTPUT && outcome.stderr.len() <= MAX_OUTPUT);
        }
        drop(snapshots_of_node(value, "disk-0"));
    }
}

/// Asserts that a text fits into a line of a log.
fn assert_printable(text: &str) {
    assert!(text.chars().count() <= 300 && !text.chars().any(char::is_control), "{text:?}");
}

/// A harness.
pub type Target = fn(&[u8]);

/// All harnesses by the names of their corpora.
pub const TARGETS: [(&str, Target); 3] = [("dhcp", dhcp), ("qcow2", qcow2), ("lines", json_lines)];

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::corpus::{read_corpus, run_corpora, run_mutated_corpora};
    use proptest::prelude::*;

    fn corpus(name: &str) -> Vec<Vec<u8>> {
        read_corpus(env!("CARGO_MANIFEST_DIR"), name)
    }

    #[test]
    fn the_corpus() {
        run_corpora(env!("CARGO_MANIFEST_DIR"), &TARGETS);
    }

    #[test]
    fn the_mutated_corpus() {
        run_mutated_corpora(env!("CARGO_MANIFEST_DIR"), &TARGETS, 256);
    }

    #[test]
    fn the_corpus_has_requests_and_qcow2_headers() {
        let lease = Lease::new(&network(), 0, CARD).unwrap();
        assert!(corpus("dhcp").iter().filter(|frame| lease.reply_to(frame).is_some()).count() >= 3);
        assert!(corpus("qcow2").iter().any(|head| matches!(detect_format(head), Ok(Format::Qcow2 { .. }))));
    }

    proptest! {
        #[test]
        fn random_bytes(data in prop::collection::vec(any::<u8>(), 0..400)) {
            TARGETS.iter().for_each(|(_, target)| target(&data));
        }
    }
}
