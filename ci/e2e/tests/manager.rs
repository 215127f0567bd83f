//! Tests the daemon under a service manager: it is ready when it answers, sends watchdog notifications, and a restart is
//! invisible to clients.

use nacelle_e2e::{ContainerRequest, PodRequest, ServiceManager, TestImage, TestNode, eventually};
use std::os::unix::net::UnixStream;
use std::time::Duration;

const WATCHDOG: Duration = Duration::from_secs(4);

/// Returns the value after "NAME=" in a notification.
fn notification_value<'a>(output: &'a str, name: &str) -> &'a str {
    output.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('=')).unwrap_or_default()
}

#[test]
fn a_restart_under_a_service_manager_only_delays_requests() {
    let mut node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    assert!(node.terminate());
    let manager = ServiceManager::new(node.directory(), WATCHDOG);
    node.start_with_manager(&manager);
    let output = manager.wait_for_notification("READY=1");
    assert_eq!(notification_value(&output, "STATUS"), "serving CRI; pods: 0");

    let id = {
        let pod = node.crictl.run_pod(PodRequest::new("survivor", node.directory()));
        pod.start(ContainerRequest::sh("alive", &image, "trap 'exit 0' TERM; while :; do sleep 0.1; done")).id.clone()
    };
    assert_eq!(notification_value(&manager.wait_for_notification("STATUS=serving CRI; pods: 1"), "WATCHDOG"), "1");
    let environment = |pid: i32| std::fs::read_to_string(format!("/proc/{pid}/environ")).unwrap_or_default();
    for pid in node.pids_matching("nacelle-pod --dir ") {
        let variables = environment(pid);
        assert!(!variables.contains("NOTIFY_SOCKET") && !variables.contains("LISTEN_"), "{variables}");
    }

    // After a kill, clients that connect while there is no daemon wait for the next one.
    let machines = node.vm_pids();
    node.kill();
    let mut call = node.crictl.spawn(["exec", "--sync", &id, "true"]);
    assert!(call.try_wait().unwrap().is_none());
    manager.discard_notifications();
    node.start_with_manager(&manager);
    let output = manager.wait_for_notification("READY=1");
    assert_eq!(notification_value(&output, "STATUS"), "serving CRI; pods: 1");
    assert!(call.wait().unwrap().success(), "{}", node.crictl.spawned_stderr());
    assert_eq!(node.vm_pids(), machines);

    // A stopped daemon is silent, and sends notifications as soon as it continues.
    manager.wait_for_notification("WATCHDOG=1");
    let signal = |name: &str| nacelle_e2e::run::run_program("kill", [name, &node.daemon_pid().to_string()]).ok();
    signal("-STOP");
    manager.discard_notifications();
    assert_eq!(manager.receive_notification(WATCHDOG), None);
    signal("-CONT");
    manager.wait_for_notification("WATCHDOG=1");

    // On SIGTERM it sends a notification, and leaves the socket to the manager, which owns it.
    assert!(node.terminate());
    manager.wait_for_notification("STOPPING=1");
    UnixStream::connect(node.directory().join("nacelle.sock")).unwrap();
    assert_eq!(node.vm_pids(), machines);
    node.start_with_manager(&manager);
    assert_eq!(node.crictl.call(["exec", "--sync", &id, "echo", "alive"]), "alive");
}

#[test]
fn a_socket_that_is_not_the_configured_one_is_refused() {
    let mut node = TestNode::new();
    assert!(node.terminate());
    let elsewhere = tempfile::tempdir_in(node.directory()).unwrap();
    let manager = ServiceManager::new(elsewhere.path(), WATCHDOG);
    let mut daemon = node.spawn_with_manager(&manager);
    assert!(!daemon.wait().unwrap().success());
    let log = node.log();
    let complaint = format!("passes the socket {}/nacelle.sock, but paths.socket is", elsewhere.path().display());
    assert!(log.contains(&complaint), "{log}");
    node.start();
    eventually("it serves without a manager", || (node.crictl.try_call(["version"]).code == 0).then_some(()));
}
