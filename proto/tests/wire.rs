//! Measures the cost of hostile messages: the memory that decoding takes in a process of its own, and the steps of the scan, both
//! compared with the size of the message.

use nacelle_proto::wire::{self, MAX_EXTRA_MEMORY, MAX_LARGE_MESSAGE, MAX_MESSAGE, MessageError, Shape, Shaped, scan};
use nacelle_proto::{agent, common, pod};
use proptest::prelude::*;
use prost::Message;
use std::process::Command;

/// Returns a field of this number with these bytes.
fn field(number: u8, content: &[u8]) -> Vec<u8> {
    let mut bytes = vec![number << 3 | 2];
    prost::encoding::encode_varint(content.len() as u64, &mut bytes);
    [bytes, content.to_vec()].concat()
}

/// Returns messages of about `size` bytes that maximize memory.
fn hostile(name: &str, size: usize) -> Vec<u8> {
    let fill = |piece: &[u8]| piece.repeat(size / piece.len());
    match name {
        "empty containers" => fill(&[0x1a, 0]),
        "containers with an empty text" => fill(&[0x1a, 2, 0x42, 0]),
        "lists of numbers in lists" => fill(&[0x1a, 3, 0x5a, 1, 1]),
        "numbers, one by one" => field(3, &[0x58, 1].repeat(size / 2)),
        "numbers, packed" => field(3, &field(11, &vec![1; size])),
        "one long text" => field(2, &vec![b'x'; size]),
        other => panic!("no input {other}"),
    }
}

const INPUTS: [&str; 6] = [
    "empty containers",
    "containers with an empty text",
    "lists of numbers in lists",
    "numbers, one by one",
    "numbers, packed",
    "one long text",
];

/// Returns the peak memory of this process in bytes.
fn peak() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}

/// Not a test of its own: the child process of `the_memory_of_a_message_follows_its_size`.
#[test]
fn decode_in_a_process() {
    let Ok(input) = std::env::var("WIRE_INPUT") else { return };
    let (name, size) = input.split_once('/').unwrap();
    let bytes = hostile(name, size.parse().unwrap());
    let before = peak();
    let decoded = wire::decode::<pod::PodState>(&bytes);
    println!("peak {} {}", peak() - before, if decoded.is_ok() { "decoded" } else { "refused" });
}

#[test]
fn the_memory_of_a_message_follows_its_size() {
    for name in INPUTS {
        for size in [1 << 10, 16 << 10, 128 << 10, MAX_MESSAGE - 64] {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "decode_in_a_process", "--nocapture"]).env("WIRE_INPUT", format!("{name}/{size}"));
            let output = command.output().unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            let said = text.split("peak ").nth(1).unwrap_or_else(|| panic!("{text}"));
            let peak: usize = said.split_whitespace().next().unwrap().parse().unwrap();
            println!("{name}, {size} bytes: {said}");
            // The peak includes the pages of the decoder itself.
            assert!(peak <= size + MAX_EXTRA_MEMORY + (2 << 20), "{name}, {size} bytes: {said}");
        }
    }
}

#[test]
fn steps_follow_the_size() {
    for name in INPUTS {
        for size in [1 << 10, 64 << 10, 1 << 20] {
            let bytes = hostile(name, size);
            let cost = scan(pod::PodState::shape(), &bytes, usize::MAX).unwrap();
            assert!(cost.steps <= bytes.len(), "{name}: {cost:?}");
        }
    }
}

#[test]
fn a_message_of_empty_elements_is_rejected_before_decoding() {
    let empty = |count| [0x1a, 0].repeat(count);
    assert_eq!(wire::decode::<pod::PodState>(&empty(1000)).unwrap().containers.len(), 1000);
    let refused = wire::decode::<pod::PodState>(&empty(MAX_MESSAGE / 2)).unwrap_err();
    assert!(matches!(refused, MessageError::TooLarge { name: "nacelle.pod.v1.PodState", .. }), "{refused}");
    let refused = wire::decode::<pod::PodState>(&empty(20 << 20)).unwrap_err();
    assert!(matches!(refused, MessageError::TooLong { limit: MAX_MESSAGE, .. }), "{refused}");
    assert_eq!(tonic::Status::from(refused).code(), tonic::Code::ResourceExhausted);
    // The only long response.
    let full = pod::ExecSyncResponse { stdout: vec![7; 16 << 20], stderr: vec![8; 16 << 20], exit_code: 1 };
    let bytes = full.encode_to_vec();
    assert!(bytes.len() < MAX_LARGE_MESSAGE && wire::decode::<pod::ExecSyncResponse>(&bytes).unwrap() == full);
}

#[test]
fn shared_messages_have_the_limits_of_the_packages_that_use_them() {
    let limits = common::Limit { file: "memory.max".into(), value: "x".repeat(MAX_MESSAGE) };
    let update = common::UpdateContainerRequest { limits: vec![limits], ..Default::default() };
    let refused = wire::decode::<common::UpdateContainerRequest>(&update.encode_to_vec()).unwrap_err();
    assert!(matches!(refused, MessageError::TooLong { limit: MAX_MESSAGE, .. }), "{refused}");
    let empty_limits = [0x12, 0].repeat(MAX_MESSAGE / 2);
    let refused = wire::decode::<common::UpdateContainerRequest>(&empty_limits).unwrap_err();
    assert!(
        matches!(refused, MessageError::TooLarge { limit, .. } if limit == MAX_MESSAGE + MAX_EXTRA_MEMORY),
        "{refused}"
    );
}

#[test]
fn the_largest_real_messages_are_decoded() {
    let state = pod::PodState {
        containers: (0..1000u32)
            .map(|n| pod::ContainerState {
                id: format!("{n:064}"),
                message: "x".repeat(200),
                supplemental_groups: vec![n; 16],
                ..Default::default()
            })
            .collect(),
        ..Default::default()
    };
    assert_eq!(wire::decode::<pod::PodState>(&state.encode_to_vec()).unwrap(), state);
    let usage = |n: u64| common::ContainerUsage {
        id: format!("{n:064}"),
        usage: Some(common::Usage { cpu_nanos: n, memory_bytes: n, ..Default::default() }),
        details: Some(common::Details { disks: vec![common::DiskUsage::default(); 8], ..Default::default() }),
        ..Default::default()
    };
    let stats = agent::StatsResponse { containers: (0..500).map(usage).collect(), ..Default::default() };
    assert_eq!(wire::decode::<agent::StatsResponse>(&stats.encode_to_vec()).unwrap(), stats);
}

#[test]
fn a_map_or_text_of_another_type_is_rejected() {
    // The number of `sysctls` with each type of a number, and bytes that prost would read as further interfaces.
    for (kind, skipped) in [(0, 1), (1, 8), (5, 4)] {
        let message = [vec![7 << 3 | kind, 0], [0x12, 0].repeat(4)].concat();
        let scanned = scan(agent::BootConfig::shape(), message.get(..1 + skipped).unwrap(), usize::MAX);
        assert!(matches!(scanned, Err(MessageError::Damaged { .. })), "{kind}: {scanned:?}");
        assert!(wire::decode::<agent::BootConfig>(&message).is_err(), "{kind}");
        let hostname = [1 << 3 | kind, 0, 0, 0, 0, 0, 0, 0, 0];
        assert!(scan(agent::BootConfig::shape(), &hostname, usize::MAX).is_err(), "{kind}");
    }
}

#[test]
fn messages_inside_each_other_end() {
    // A shape that contains itself, as none of ours does.
    static ENDLESS: Shape = Shape { name: "endless", size: 8, fields: &[(1, wire::Field::Message(&ENDLESS))] };
    let mut bytes = Vec::new();
    for _ in 0..100 {
        bytes = field(1, &bytes);
    }
    assert!(matches!(scan(&ENDLESS, &bytes, usize::MAX), Err(MessageError::Damaged { .. })));
}

#[test]
fn the_first_element_of_a_list_takes_the_room_of_four() {
    static ELEMENT: Shape = Shape { name: "element", size: 100, fields: &[] };
    static LIST: Shape = Shape { name: "list", size: 24, fields: &[(1, wire::Field::Message(&ELEMENT))] };
    let memory = |count| scan(&LIST, &field(1, b"").repeat(count), usize::MAX).unwrap().memory;
    assert_eq!([memory(1), memory(2), memory(5)], [424, 624, 1224]);
}

#[test]
fn entries_of_maps_count() {
    let entry = field(1, b"");
    let of = |count: usize| field(2, &entry).repeat(count);
    // The shape of any message with a map: its entries have no size of their own in Rust.
    static MAP: Shape = Shape { name: "map", size: 8, fields: &[(2, wire::Field::Message(&ENTRY))] };
    static ENTRY: Shape = Shape { name: "entry", size: 128, fields: &[(1, wire::Field::Text)] };
    let cost = |count| scan(&MAP, &of(count), usize::MAX).unwrap().memory;
    assert!(cost(1000) >= 1000 * 256 && cost(2000) > cost(1000));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn decodable_messages_pass_the_scan(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let cost = scan(pod::PodState::shape(), &bytes, usize::MAX);
        if let Ok(cost) = &cost {
            prop_assert!(cost.steps <= bytes.len());
        }
        if pod::PodState::decode(bytes.as_slice()).is_ok() {
            // Groups, which are older than these contracts, are the only thing that prost skips.
            let group = matches!(cost, Err(MessageError::Damaged { why: "it has a group or an unknown type", .. }));
            prop_assert!(cost.is_ok() || group, "{:?}", cost);
        }
    }

    #[test]
    fn messages_come_back(ids in prop::collection::vec("[a-z0-9]{0,64}", 0..40), groups in prop::collection::vec(any::<u32>(), 0..40)) {
        let containers = ids.into_iter().map(|id| pod::ContainerState {
            id, supplemental_groups: groups.clone(), ..Default::default()
        });
        let state = pod::PodState { containers: containers.collect(), ..Default::default() };
        prop_assert_eq!(wire::decode::<pod::PodState>(&state.encode_to_vec()).unwrap(), state);
    }
}
