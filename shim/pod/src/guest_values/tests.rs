//! Feeds oversized and random values of a guest to every function that bounds them.

use super::*;
use nacelle_engine::ExitKind;
use nacelle_proto::common::SetMemoryResponse;
use proptest::prelude::*;

fn is_text(text: &str, max_chars: usize) -> bool {
    text.chars().count() <= max_chars && !text.contains(char::is_control)
}

fn hello(agent_version: &str, kernel_release: &str) -> Bounded<agent::AgentHello> {
    let (agent_version, kernel_release) = (agent_version.to_owned(), kernel_release.to_owned());
    FromGuest(agent::AgentHello { protocol: 1, agent_version, kernel_release, ..Default::default() }).bound()
}

#[test]
fn boot_times_of_a_guest_are_bounded() {
    let steps = |started_nanos, sent_nanos| {
        let hello = agent::AgentHello { started_nanos, sent_nanos, ..Default::default() };
        FromGuest(hello).bound().boot_steps(10_000_000, Duration::from_millis(8)).map(|step| (step.at, step.micros))
    };
    assert_eq!(steps(4_000_000, 5_000_000), [(5_000_000, 4_000), (9_000_000, 1_000)]);
    assert_eq!(steps(u64::MAX, u64::MAX), [(2_000_000, 8_000), (10_000_000, 0)]);
    assert_eq!(steps(u64::MAX, 0), [(10_000_000, 0), (10_000_000, 0)]);
}

#[test]
fn values_within_the_bounds_are_passed_on() {
    let step = TimelineStep { what: "kernel".into(), at: 1, micros: 2, failed: false };
    let response = hello("1.2", "6.12.0").into_response(vec![step], true).into_inner();
    assert_eq!((response.agent_version.as_str(), response.kernel_release.as_str()), ("1.2", "6.12.0"));
    assert_eq!(response.steps, [pod::BootStep { name: "kernel".into(), started_at: 1, micros: 2 }]);
    assert!(response.from_template);
    let user = CreateContainerResponse { uid: 1, gid: 2, supplemental_groups: (0..1024).collect() };
    assert_eq!(FromGuest(user.clone()).bound().into_inner(), user);
    assert!(FromGuest(agent::BootReport::default()).bound().is_ok());
    assert!(FromGuest(agent::StreamOpened::default()).bound().is_ok());
    assert!(FromGuest(agent::WaitResponse { exit: None }).bound().is_none());
    let exit = agent::Exit { code: 3, oom_killed: true, finished_at_unix_nanos: 5, guest_out_of_memory: true };
    let exit = FromGuest(agent::WaitResponse { exit: Some(exit) }).bound().unwrap();
    assert_eq!((exit.code, exit.oom_killed, exit.guest_out_of_memory), (3, true, true));
    assert_eq!(*exit.finished_at.bound_time(5, 6), 5);
    let memory = |bytes, allowed| FromGuest(SetMemoryResponse { bytes }).bound(allowed);
    assert_eq!((memory(1, 1..=3).unwrap().bytes, memory(3, 1..=3).unwrap().bytes), (1, 3));
}

#[test]
fn oversized_values_are_shortened_or_rejected() {
    let long = "é\n".repeat(100_000);
    let response = hello(&long, &long).into_response(Vec::new(), false);
    assert!(is_text(&response.agent_version, 128) && is_text(&response.kernel_release, 128));
    assert_eq!(response.agent_version.chars().count(), 127, "a blank at the end is removed");
    let report = FromGuest(agent::BootReport { error: long.clone() }).bound().unwrap_err();
    let opened = FromGuest(agent::StreamOpened { error: long.clone() }).bound().unwrap_err();
    let status = tonic::Status::internal(&long);
    let status = FromGuest(&status).bound_message();
    for message in [report, opened, status] {
        assert!(is_text(&message, 1024) && message.chars().count() == 1023);
    }
    let exit = describe_exit(&MachineExit { how: ExitKind::Shutdown, console_tail: long });
    assert!(is_text(&exit, 2 * 2048 + 100), "{}", exit.len());
    let user = CreateContainerResponse { uid: u32::MAX, gid: 0, supplemental_groups: (0..200_000).collect() };
    let user = FromGuest(user).bound();
    assert_eq!((user.uid, user.supplemental_groups.len(), user.supplemental_groups[1023]), (u32::MAX, 1024, 1023));
    for time in [i64::MIN, 4, 7, i64::MAX] {
        assert_eq!(*FromGuest(time).bound_time(5, 6), 6);
    }
    for bytes in [0, 4, u64::MAX] {
        let refused = FromGuest(SetMemoryResponse { bytes }).bound(1..=3).unwrap_err();
        assert!(refused.to_string().contains(&format!("{bytes} bytes, where 1 of 3")), "{refused}");
    }
    let mut output = CommandOutput::default();
    for _ in 0..20 {
        output.append(&vec![7; 1 << 20]);
    }
    assert_eq!(output.0.len(), MAX_OUTPUT);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_text_of_a_guest_is_bounded(text in prop::collection::vec(any::<char>(), 0..3000)) {
        let text: String = text.into_iter().collect();
        let response = hello(&text, &text).into_response(Vec::new(), false);
        prop_assert!(is_text(&response.agent_version, 128) && is_text(&response.kernel_release, 128));
        let report = FromGuest(agent::BootReport { error: text.clone() }).bound();
        prop_assert_eq!(report.is_ok(), text.is_empty());
        prop_assert!(report.err().is_none_or(|message| is_text(&message, 1024)));
        let exit = describe_exit(&MachineExit { how: ExitKind::Killed, console_tail: text });
        prop_assert!(is_text(&exit, 2 * 2048 + 100));
    }

    #[test]
    fn any_user_of_a_guest_is_bounded(uid: u32, groups in prop::collection::vec(any::<u32>(), 0..5000)) {
        let user = CreateContainerResponse { uid, gid: uid, supplemental_groups: groups.clone() };
        let user = FromGuest(user).bound();
        prop_assert_eq!(&user.supplemental_groups[..], &groups[..groups.len().min(1024)]);
    }

    #[test]
    fn any_times_and_sizes_of_a_guest_are_bounded(time: i64, started: u64, sent: u64, bytes: u64) {
        prop_assert!((3..=9).contains(&*FromGuest(time).bound_time(3, 9)));
        let hello = agent::AgentHello { started_nanos: started, sent_nanos: sent, ..Default::default() };
        let steps = FromGuest(hello).bound().boot_steps(1 << 40, Duration::from_secs(60));
        prop_assert!(steps.iter().map(|step| step.micros).sum::<u64>() <= 60_000_000);
        let set = FromGuest(SetMemoryResponse { bytes }).bound(1 << 20..=1 << 40);
        prop_assert!(set.map_or(true, |set| (1 << 20..=1 << 40).contains(&set.bytes)));
    }
}
