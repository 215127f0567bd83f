//! Tests exec, attach and port-forward through the streaming server with the real crictl and real VMs.

use nacelle_e2e::run::run_with_input;
use nacelle_e2e::{ContainerRequest, PodRequest, TestImage, TestNode, eventually};
use serde_json::json;
use sha2::{Digest, Sha256};
use std::io::Write;
use std::process::Child;

/// Ends when the terminal has the size of crictl's, or after some minutes.
const WAIT_FOR_SIZE: &str =
    "i=0; while [ \"$(stty size)\" != \"33 77\" ] && [ $i -lt 900 ]; do i=$((i+1)); sleep 0.1; done; stty size; ";

#[test]
fn execs_have_streams_exit_codes_and_terminals() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(PodRequest::new("streams", node.directory()));
    let container = pod.start(ContainerRequest::sh("one", &image, "sleep 600"));
    let exec = |flags: &str, script: &str, input: &[u8]| {
        let flags = flags.split_whitespace();
        let all = ["exec"].into_iter().chain(flags).chain([&*container.id, "/bin/sh", "-c", script]);
        node.crictl.call_with_input(all, input)
    };
    let output = exec("", "echo out; echo err >&2", b"");
    // crictl prints warnings of its own.
    assert_eq!((output.code, &*output.stdout, output.stderr.lines().last()), (0, "out", Some("err")), "{output:?}");
    assert!(exec("", "exit 5", b"").err().contains("exit code 5"));
    let missing = node.crictl.call_with_input(["exec", &container.id, "/no/such/program"], b"").err();
    assert!(missing.contains("/no/such/program"), "{missing}");

    // The input arrives, and ends.
    assert_eq!(exec("-i", "wc -c; echo done", b"some input").ok(), "10\ndone");
    let much: Vec<u8> = (0..3_000_000_u32).map(|n| b'a' + u8::try_from(n % 26).unwrap_or(0)).collect();
    let back = exec("-i", "cat", &much).ok();
    assert!(back.as_bytes() == much, "{} bytes of {}", back.len(), much.len());
    let web = ["--transport", "websocket"].into_iter().chain(["-i", &*container.id, "/bin/sh", "-c", "wc -c; exit 6"]);
    let web = node.crictl.call_with_input(["exec"].into_iter().chain(web), b"over a websocket");
    assert!(web.stdout == "16" && web.stderr.contains("exit code 6"), "{web:?}");
    // A command that does not read its input still ends.
    assert_eq!(exec("-i", "echo early", &much).ok(), "early");

    let script = format!("{WAIT_FOR_SIZE} tty; exit 3");
    let terminal = node.crictl.call_in_terminal(["exec", "-it", &container.id, "/bin/sh", "-c", &script]);
    assert!(terminal.stdout.contains("33 77") && terminal.stdout.contains("/dev/pts/"), "{terminal:?}");
    assert!(terminal.code != 0 && terminal.stdout.contains("exit code 3"), "{terminal:?}");
    pod.remove();
}

/// Ends crictl as a user does who closes the window: nothing is sent any more.
fn disconnect(mut client: Child) {
    client.kill().unwrap();
    client.wait().unwrap();
}

#[test]
fn an_exec_runs_on_when_its_client_disconnects() {
    let mut node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod_request = |node: &TestNode| PodRequest::new("ends", node.directory());
    let (pod_id, id) = {
        let pod = node.crictl.run_pod(pod_request(&node));
        (pod.id.clone(), pod.start(ContainerRequest::sh("one", &image, "sleep 600")).id.clone())
    };
    let exec = |node: &TestNode, script: &str| {
        node.crictl.try_call(["exec", "--sync", &id, "/bin/sh", "-c", script]).stdout.trim().to_owned()
    };

    // It reads to the end of its input, and then writes more than all pipes on the way hold.
    let script = "cat >/tmp/input; seq 1 200000; seq 1 200000 >&2; wc -c </tmp/input >/tmp/done";
    let mut client = node.crictl.spawn_with_input(["exec", "-i", &id, "/bin/sh", "-c", script]);
    client.stdin.as_mut().unwrap().write_all(b"typed").unwrap();
    eventually("the command has read its input", || (exec(&node, "cat /tmp/input") == "typed").then_some(()));
    assert_eq!(exec(&node, "cat /tmp/done"), "");
    disconnect(client);
    eventually("the command has ended by itself", || (exec(&node, "cat /tmp/done") == "5").then_some(()));

    // A shell in a terminal reads the end of its input at the prompt.
    let mut client = node.crictl.spawn_in_terminal(["exec", "-it", &id, "/bin/sh"]);
    client.stdin.as_mut().unwrap().write_all(b"echo $$ >/tmp/shell\n").unwrap();
    let shell = eventually("the shell runs", || Some(exec(&node, "cat /tmp/shell")).filter(|pid| !pid.is_empty()));
    let sleeps = format!("grep -q '^State:.S' /proc/{shell}/status && echo sleeps");
    eventually("the shell reads again", || (exec(&node, &sleeps) == "sleeps").then_some(()));
    disconnect(client);
    let lives = format!("test -e /proc/{shell} && echo lives");
    eventually("the shell has ended", || exec(&node, &lives).is_empty().then_some(()));

    // The daemon is a client as well.
    let script = "while [ ! -e /tmp/go ]; do sleep 0.1; done; echo went >/tmp/later";
    let client = node.crictl.spawn(["exec", &id, "/bin/sh", "-c", script]);
    eventually("the command runs", || exec(&node, "ps").contains("/tmp/later").then_some(()));
    node.kill();
    disconnect(client);
    node.start();
    exec(&node, "touch /tmp/go");
    eventually("the command has gone on", || (exec(&node, "cat /tmp/later") == "went").then_some(()));

    // One that never ends ends with its container.
    let client = node.crictl.spawn(["exec", &id, "/bin/sleep", "333"]);
    eventually("the command runs", || exec(&node, "ps").contains("sleep 333").then_some(()));
    disconnect(client);
    let killed = node.crictl.try_call(["exec", "--sync", "--timeout", "1", &id, "/bin/sleep", "444"]);
    assert_ne!(killed.code, 0);
    eventually("the command of ExecSync is gone", || (!exec(&node, "ps").contains("sleep 444")).then_some(()));
    assert!(exec(&node, "ps").contains("sleep 333"));
    node.crictl.call(["stop", "--timeout", "0", &id]);
    let stopped = node.crictl.call_with_input(["exec", &id, "/bin/true"], b"").err();
    assert!(stopped.contains("FailedPrecondition"), "{stopped}");
    let unknown = node.crictl.call_with_input(["exec", "0123456789ab", "/bin/true"], b"").err();
    assert!(unknown.contains("NotFound") || unknown.contains("not found"), "{unknown}");
    node.crictl.pod_handle(&pod_id, pod_request(&node)).remove();
}

#[test]
fn attach_connects_to_a_running_container() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(PodRequest::new("attached", node.directory()));
    let script = "while read line; do echo got $line; done; echo over; exit 4";
    let once = ContainerRequest::sh("once", &image, script).set("stdin", json!(true)).set("stdin_once", json!(true));
    let once = pod.start(once);
    // The input ends with the client, and with it the container: all of its output arrives.
    assert_eq!(node.crictl.call_with_input(["attach", "-i", &once.id], b"a\nb\n").ok(), "got a\ngot b\nover");
    assert_eq!(once.wait_for_exit()["exitCode"], 4);
    assert_eq!(once.output(), "got a\ngot b\nover\n");

    let open = pod.start(ContainerRequest::sh("open", &image, script).set("stdin", json!(true)));
    for line in ["first", "second"] {
        node.crictl.call_with_input(["attach", "-i", &open.id], format!("{line}\n").as_bytes()).ok();
        open.wait_for_output(&format!("got {line}"));
    }
    assert_eq!(open.status()["state"], "CONTAINER_RUNNING");

    let terminal =
        ContainerRequest::sh("terminal", &image, WAIT_FOR_SIZE).set("stdin", json!(true)).set("tty", json!(true));
    let terminal = pod.start(terminal);
    let refused = node.crictl.call_with_input(["attach", "-i", &terminal.id], b"").err();
    assert!(refused.contains("InvalidArgument"), "{refused}");
    let output = node.crictl.call_in_terminal(["attach", "-it", &terminal.id]);
    assert!(output.stdout.contains("33 77"), "{output:?}");
    terminal.wait_for_exit();
    pod.remove();
}

#[test]
fn ports_are_forwarded() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(PodRequest::new("ports", node.directory()));
    pod.start(ContainerRequest::sh("down", &image, "exec nc -ll -p 7001 -e seq 1 200000"));
    pod.start(ContainerRequest::sh("up", &image, "exec nc -ll -p 7002 -e sha256sum"));
    let speak =
        |port: &str, bytes: &[u8]| run_with_input(node.netns.command("busybox").args(["nc", "127.0.0.1", port]), bytes);
    let numbers: String = (1..=200_000).map(|number| format!("{number}\n")).collect();
    let sum = hex::encode(Sha256::digest(numbers.as_bytes()));
    for (transport, [down, up, none]) in [("spdy", ["8001", "8002", "8003"]), ("websocket", ["8011", "8012", "8013"])] {
        let ports = [(down, 7001), (up, 7002), (none, 7003)].map(|(near, far)| format!("{near}:{far}"));
        let [first, second, third] = &ports;
        let mut client = node.crictl.spawn(["port-forward", "--transport", transport, &pod.id, first, second, third]);
        eventually("the pod's bytes come whole", || (speak(down, b"").stdout == numbers.trim_end()).then_some(()));
        // The end of our bytes arrives, and the answer comes after it.
        let answer = eventually("the pod answers", || {
            Some(speak(up, numbers.as_bytes()).stdout).filter(|answer| !answer.is_empty())
        });
        assert!(answer.starts_with(&sum), "{answer}");
        let refused = || node.crictl.spawned_stderr().matches("refused").count();
        let before = refused();
        speak(none, b"x");
        eventually("a connection to a port without a listener is refused", || (refused() > before).then_some(()));
        client.kill().unwrap();
        client.wait().unwrap();
    }
    pod.remove();
}
