//! Tests exec, attach and port-forward through the streaming server with the real crictl and real VMs.

use nacelle_e2e::run::feed;
use nacelle_e2e::{Container, Image, Node, Pod, eventually};
use serde_json::json;
use sha2::{Digest, Sha256};

/// Ends when the terminal has the size of crictl's, or after some minutes.
const WAIT_FOR_SIZE: &str =
    "i=0; while [ \"$(stty size)\" != \"33 77\" ] && [ $i -lt 900 ]; do i=$((i+1)); sleep 0.1; done; stty size; ";

#[test]
fn commands_have_streams_codes_and_terminals() {
    let node = Node::new();
    let image = node.image(&Image::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(Pod::new("streams", node.directory()));
    let container = pod.start(Container::sh("one", &image, "sleep 600"));
    let exec = |flags: &str, script: &str, input: &[u8]| {
        let flags = flags.split_whitespace();
        let all = ["exec"].into_iter().chain(flags).chain([&*container.id, "/bin/sh", "-c", script]);
        node.crictl.feed(all, input)
    };
    let said = exec("", "echo out; echo err >&2", b"");
    // crictl prints warnings of its own.
    assert_eq!((said.code, &*said.stdout, said.stderr.lines().last()), (0, "out", Some("err")), "{said:?}");
    assert!(exec("", "exit 5", b"").err().contains("exit code 5"));
    let missing = node.crictl.feed(["exec", &container.id, "/no/such/program"], b"").err();
    assert!(missing.contains("/no/such/program"), "{missing}");

    // The input arrives, and ends.
    assert_eq!(exec("-i", "wc -c; echo done", b"some input").ok(), "10\ndone");
    let much: Vec<u8> = (0..3_000_000_u32).map(|n| b'a' + u8::try_from(n % 26).unwrap_or(0)).collect();
    let back = exec("-i", "cat", &much).ok();
    assert!(back.as_bytes() == much, "{} bytes of {}", back.len(), much.len());
    let web = ["--transport", "websocket"].into_iter().chain(["-i", &*container.id, "/bin/sh", "-c", "wc -c; exit 6"]);
    let web = node.crictl.feed(["exec"].into_iter().chain(web), b"over a websocket");
    assert!(web.stdout == "16" && web.stderr.contains("exit code 6"), "{web:?}");
    // A command that does not read its input still ends.
    assert_eq!(exec("-i", "echo early", &much).ok(), "early");

    let script = format!("{WAIT_FOR_SIZE} tty; exit 3");
    let terminal = node.crictl.in_terminal(["exec", "-it", &container.id, "/bin/sh", "-c", &script]);
    assert!(terminal.stdout.contains("33 77") && terminal.stdout.contains("/dev/pts/"), "{terminal:?}");
    assert!(terminal.code != 0 && terminal.stdout.contains("exit code 3"), "{terminal:?}");
    pod.remove();
}

#[test]
fn a_command_ends_with_its_client() {
    let node = Node::new();
    let image = node.image(&Image::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(Pod::new("ends", node.directory()));
    let container = pod.start(Container::sh("one", &image, "sleep 600"));
    let mut client = node.crictl.spawn(["exec", &container.id, "/bin/sleep", "333"]);
    eventually("the command runs", || container.exec("ps").ok().contains("sleep 333").then_some(()));
    client.kill().unwrap();
    client.wait().unwrap();
    eventually("the command is gone", || (!container.exec("ps").ok().contains("sleep 333")).then_some(()));

    node.crictl.call(["stop", "--timeout", "0", &container.id]);
    let stopped = node.crictl.feed(["exec", &container.id, "/bin/true"], b"").err();
    assert!(stopped.contains("FailedPrecondition"), "{stopped}");
    let unknown = node.crictl.feed(["exec", "0123456789ab", "/bin/true"], b"").err();
    assert!(unknown.contains("NotFound") || unknown.contains("not found"), "{unknown}");
    pod.remove();
}

#[test]
fn a_container_is_attached_to() {
    let node = Node::new();
    let image = node.image(&Image::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(Pod::new("attached", node.directory()));
    let script = "while read line; do echo got $line; done; echo over; exit 4";
    let once = Container::sh("once", &image, script).set("stdin", json!(true)).set("stdin_once", json!(true));
    let once = pod.start(once);
    // The input ends with the client, and with it the container: all of its output arrives.
    assert_eq!(node.crictl.feed(["attach", "-i", &once.id], b"a\nb\n").ok(), "got a\ngot b\nover");
    assert_eq!(once.exited()["exitCode"], 4);
    assert_eq!(once.output(), "got a\ngot b\nover\n");

    let open = pod.start(Container::sh("open", &image, script).set("stdin", json!(true)));
    for line in ["first", "second"] {
        node.crictl.feed(["attach", "-i", &open.id], format!("{line}\n").as_bytes()).ok();
        open.says(&format!("got {line}"));
    }
    assert_eq!(open.status()["state"], "CONTAINER_RUNNING");

    let terminal = Container::sh("terminal", &image, WAIT_FOR_SIZE).set("stdin", json!(true)).set("tty", json!(true));
    let terminal = pod.start(terminal);
    let refused = node.crictl.feed(["attach", "-i", &terminal.id], b"").err();
    assert!(refused.contains("InvalidArgument"), "{refused}");
    let said = node.crictl.in_terminal(["attach", "-it", &terminal.id]);
    assert!(said.stdout.contains("33 77"), "{said:?}");
    terminal.exited();
    pod.remove();
}

#[test]
fn ports_are_forwarded() {
    let node = Node::new();
    let image = node.image(&Image::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(Pod::new("ports", node.directory()));
    pod.start(Container::sh("down", &image, "exec nc -ll -p 7001 -e seq 1 200000"));
    pod.start(Container::sh("up", &image, "exec nc -ll -p 7002 -e sha256sum"));
    let speak = |port: &str, bytes: &[u8]| feed(node.netns.command("busybox").args(["nc", "127.0.0.1", port]), bytes);
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
        let refused = || node.crictl.complaints().matches("refused").count();
        let before = refused();
        speak(none, b"x");
        eventually("nobody answers on a port", || (refused() > before).then_some(()));
        client.kill().unwrap();
        client.wait().unwrap();
    }
    pod.remove();
}
