//! Tests the daemon's log: what it says of requests and ends, how its filter is changed, and that no secret is in it.

use nacelle_e2e::run::run_program;
use nacelle_e2e::{ContainerRequest, PodRequest, TestImage, TestNode, census, eventually};
use serde_json::json;
use std::fs;

/// Waits for a line of the log with all of these words.
fn wait_for_line(node: &TestNode, words: &[&str]) {
    eventually(&format!("a line with {words:?}"), || {
        node.log().lines().any(|line| words.iter().all(|word| line.contains(word))).then_some(())
    });
}

#[test]
fn the_filter_changes_while_the_daemon_runs() {
    let node = TestNode::new();
    wait_for_line(&node, &["nacelle starts", env!("CARGO_PKG_VERSION"), "config.toml"]);
    assert_eq!(node.nacelle(&["log"]).ok(), "info");
    let refused = node.crictl.try_call(["stop", "0123456789ab"]);
    assert!(!node.log().contains("rpc="), "requests that succeed are at level debug: {refused:?} {}", node.log());

    assert_eq!(node.nacelle(&["log", "debug"]).ok(), "debug");
    let pod = node.crictl.run_pod(PodRequest::new("seen", node.directory()));
    wait_for_line(&node, &["DEBUG request", "RunPodSandbox", "code=Ok", "name=\"seen\"", &pod.id]);
    for library in ["h2::", "hyper", "Connection{"] {
        assert!(!node.log().contains(library), "{library} {}", node.log());
    }
    let wrong = node.nacelle(&["log", "debg"]);
    assert!(wrong.stderr.contains("\"debg\"") && wrong.stderr.contains("warn"), "{wrong:?}");
    assert_eq!(node.nacelle(&["log"]).ok(), "debug");

    // The configuration is read again: the filter changes, and what needs a restart is named.
    let path = node.directory().join("config.toml");
    let original = fs::read_to_string(&path).expect("the configuration is there");
    let hang_up = || run_program("kill", ["-HUP", &node.daemon_pid().to_string()]).ok();
    fs::write(&path, format!("{original}\n[log]\nfilter = \"warn,nacelle_daemon=info\"\n[machines]\n"))
        .expect("writable");
    hang_up();
    wait_for_line(&node, &["read again"]);
    assert_eq!(node.nacelle(&["log"]).ok(), "warn,nacelle_daemon=info");
    fs::write(&path, format!("default_handler = \"gone\"\n{original}")).expect("writable");
    hang_up();
    wait_for_line(&node, &["ERROR", "not used", "default_handler"]);
    fs::write(&path, original).expect("writable");
    assert_eq!(node.nacelle(&["log"]).ok(), "warn,nacelle_daemon=info", "an invalid configuration changes nothing");
    pod.remove();
}

#[test]
fn ends_have_their_reasons_and_no_secret_is_logged() {
    const SECRET: &str = "correct-horse-battery";
    let node = TestNode::new();
    node.nacelle(&["log", "trace"]).ok();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(PodRequest::new("secrets", node.directory()));
    let container = pod.start(
        ContainerRequest::sh("fails", &image, &format!(": {SECRET}; sleep 1; exit 7"))
            .set("envs", json!([{"key": "TOKEN", "value": SECRET}]))
            .set("annotations", json!({"example.com/token": SECRET})),
    );
    let other = pod.start(ContainerRequest::sh("runs", &image, "sleep 600"));
    other.exec(&format!("echo {SECRET} >/dev/null")).ok();
    node.crictl.try_call(["pull", "--creds", &format!("me:{SECRET}"), "127.0.0.1:1/none:1"]).err();
    wait_for_line(
        &node,
        &["container", &container.id, "name=\"fails\"", "to=Exited", "exit_code=7", "oom_killed=false"],
    );
    wait_for_line(&node, &["WARN request failed", "PullImage", "127.0.0.1:1/none:1"]);
    pod.remove();
    let logs = [vec![node.directory().join("daemon.log")], census::pod_logs(node.directory())].concat();
    for log in logs {
        let text = fs::read(&log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
        let line = text.lines().find(|line| line.contains(SECRET));
        assert_eq!(line, None, "{}", log.display());
    }
}
