//! Tests the daemon under a service manager: it is ready when it answers, sends watchdog notifications, and a restart is
//! invisible to clients.

use nacelle_e2e::{Container, Image, Manager, Node, Pod, eventually};
use std::os::unix::net::UnixStream;
use std::time::Duration;

const WATCHDOG: Duration = Duration::from_secs(4);

/// Returns the value after "NAME=" in a notification.
fn value<'a>(said: &'a str, name: &str) -> &'a str {
    said.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('=')).unwrap_or_default()
}

#[test]
fn a_restart_under_a_service_manager_is_a_pause() {
    let mut node = Node::new();
    let image = node.image(&Image::busybox(), "busybox:1");
    assert!(node.end());
    let manager = Manager::new(node.directory(), WATCHDOG);
    node.start_by(&manager);
    let said = manager.hears_of("READY=1");
    assert_eq!(value(&said, "STATUS"), "serving CRI; pods: 0");

    let id = {
        let pod = node.crictl.run_pod(Pod::new("survivor", node.directory()));
        pod.start(Container::sh("alive", &image, "trap 'exit 0' TERM; while :; do sleep 0.1; done")).id.clone()
    };
    assert_eq!(value(&manager.hears_of("STATUS=serving CRI; pods: 1"), "WATCHDOG"), "1");
    let environment = |pid: i32| std::fs::read_to_string(format!("/proc/{pid}/environ")).unwrap_or_default();
    for pid in node.processes("nacelle-pod ") {
        let variables = environment(pid);
        assert!(!variables.contains("NOTIFY_SOCKET") && !variables.contains("LISTEN_"), "{variables}");
    }

    // After a kill, clients that connect while there is no daemon wait for the next one.
    let machines = node.machines();
    node.kill();
    let mut call = node.crictl.spawn(["exec", "--sync", &id, "true"]);
    assert!(call.try_wait().unwrap().is_none());
    manager.forgets();
    node.start_by(&manager);
    let said = manager.hears_of("READY=1");
    assert_eq!(value(&said, "STATUS"), "serving CRI; pods: 1");
    assert!(call.wait().unwrap().success(), "{}", node.crictl.complaints());
    assert_eq!(node.machines(), machines);

    // A stopped daemon is silent, and sends notifications as soon as it continues.
    manager.hears_of("WATCHDOG=1");
    let signal = |name: &str| nacelle_e2e::run::call("kill", [name, &node.daemon_pid().to_string()]).ok();
    signal("-STOP");
    manager.forgets();
    assert_eq!(manager.hears(WATCHDOG), None);
    signal("-CONT");
    manager.hears_of("WATCHDOG=1");

    // On SIGTERM it sends a notification, and leaves the socket to the manager, which owns it.
    assert!(node.end());
    manager.hears_of("STOPPING=1");
    UnixStream::connect(node.directory().join("nacelle.sock")).unwrap();
    assert_eq!(node.machines(), machines);
    node.start_by(&manager);
    assert_eq!(node.crictl.call(["exec", "--sync", &id, "echo", "alive"]), "alive");
}

#[test]
fn a_socket_that_is_not_the_configured_one_is_refused() {
    let mut node = Node::new();
    assert!(node.end());
    let elsewhere = tempfile::tempdir_in(node.directory()).unwrap();
    let manager = Manager::new(elsewhere.path(), WATCHDOG);
    let mut daemon = node.spawn_by(&manager);
    assert!(!daemon.wait().unwrap().success());
    let log = node.log();
    let complaint = format!("hands over {}/nacelle.sock, and paths.socket is", elsewhere.path().display());
    assert!(log.contains(&complaint), "{log}");
    node.start();
    eventually("it serves without a manager", || (node.crictl.try_call(["version"]).code == 0).then_some(()));
}
