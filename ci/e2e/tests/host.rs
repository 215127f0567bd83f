//! Owns: pods without a guest (engine `host`): what they have of the node, what they have not, and what is left of them.

use nacelle_e2e::node::Options;
use nacelle_e2e::run::{call, eventually};
use nacelle_e2e::{Container, Image, Node, Pod, part};
use serde_json::{Value, json};
use std::fs;

/// Whether this node can run such pods; if not, says why.
fn possible() -> bool {
    let release = call("uname", ["-r"]).ok();
    let mut numbers = release.split('.').map(|number| number.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let erofs =
        fs::read_to_string("/proc/filesystems").unwrap_or_default().lines().any(|line| line.ends_with("\terofs"));
    let agent = part("NACELLE_BIN").with_file_name("nacelle-agent");
    let missing = match (version >= (6, 12), erofs, agent.exists()) {
        (false, ..) => format!("Linux {release} mounts no EROFS from files, 6.12 does"),
        (_, false, _) => "the kernel has no EROFS".to_owned(),
        (.., false) => format!("{} is not there", agent.display()),
        _ => return true,
    };
    println!("skipped: {missing}");
    false
}

fn namespaces(options: Value) -> Value {
    json!({"security_context": {"namespace_options": options}})
}

/// The namespace of this kind of the node's daemon.
fn of_node(node: &Node, kind: &str) -> String {
    let path = format!("/proc/{}/ns/{kind}", node.daemon_pid());
    fs::read_link(path).expect("the daemon runs").display().to_string()
}

#[test]
fn a_pod_without_a_guest_has_namespaces_of_its_own() {
    if !possible() {
        return;
    }
    let node = Node::new();
    let image = node.image(&Image::busybox(), "busybox:1");
    let pod = node.crictl.run_pod_of("host", Pod::new("own", node.folder()).set("hostname", json!("own-name")));
    let container = pod.start(Container::sh("c", &image, "trap 'exit 7' TERM; echo up; while :; do sleep 1; done"));
    container.says("up");
    let said = |script: &str| container.exec(script).ok();
    assert_eq!(said("uname -r"), call("uname", ["-r"]).ok(), "the node's kernel");
    assert_eq!(said("hostname"), "own-name");
    for kind in ["net", "ipc", "uts", "mnt", "pid", "cgroup"] {
        assert_ne!(said(&format!("readlink /proc/self/ns/{kind}")), of_node(&node, kind), "{kind}");
    }
    let address = pod.ip();
    assert!(said("ip -o addr show eth0").contains(&address), "{address}");
    assert!(said("ip -o addr show lo").contains("127.0.0.1"));
    assert!(said("cat /etc/hosts").contains(&format!("{address}\town-name")));
    // The pod's own processes and files, and nothing of the node's.
    assert!(said("ls /proc | grep -c '^[0-9]'").parse::<u32>().expect("a number") < 10);
    assert_eq!(container.exec("ls -d /node /run/nacelle 2>/dev/null").stdout, "");
    said("touch /written && echo x >/dev/null");
    let group = nacelle_e2e::census::cgroups(node.folder());
    assert!(group.iter().any(|group| group.join("pod").join(&container.id).is_dir()), "{group:?}");

    let second = pod.start(Container::sh("d", &image, "cat /written; sleep 600"));
    assert_eq!(second.exec("ls /written").code, 1, "what one container writes another does not see");
    node.crictl.call(["stop", "--timeout", "60", &container.id]);
    assert_eq!(container.status()["exitCode"], 7);
    assert_eq!(second.exec("echo still here").ok(), "still here");
    pod.remove();
    assert_eq!(node.left(), Vec::<String>::new());
    let scratch = fs::read_dir(node.folder().join("root/scratch")).map(|entries| entries.count());
    assert_eq!(scratch.unwrap_or(0), 0, "what containers wrote is gone");
}

#[test]
fn nothing_is_left_when_the_process_of_such_a_pod_is_killed() {
    if !possible() {
        return;
    }
    let node = Node::new();
    let image = node.image(&Image::busybox(), "busybox:1");
    let pod = node.crictl.run_pod_of("host", Pod::new("killed", node.folder()));
    let marker = format!("sleep 60{}", std::process::id());
    let container = pod.start(Container::sh("c", &image, &format!("{marker} & {marker} & echo up; wait")));
    container.says("up");
    assert!(node.processes("nacelle-agent --host ").len() > 1, "the agent and its zygote");
    for pid in node.processes("nacelle-pod ") {
        call("kill", ["-9", &pid.to_string()]).ok();
    }
    let ended = container.exited();
    assert_eq!(ended["exitCode"], 255, "{ended}");
    eventually("its processes are gone", || {
        let gone = node.processes("nacelle-agent --host ").is_empty() && call("pgrep", ["-f", &marker]).code == 1;
        gone.then_some(())
    });
    // The node's census, when it is dropped, finds what else is left: mounts, control groups, files.
}

#[test]
fn pods_with_namespaces_of_the_node_run_without_a_guest_where_that_is_allowed() {
    if !possible() {
        return;
    }
    let extra = "[sandbox]\nhost_namespaces = \"run-on-host\"\n".to_owned();
    let node = Node::with(Options { extra, ..Options::default() });
    let image = node.image(&Image::busybox(), "busybox:1");
    for (field, kind) in [("network", "net"), ("pid", "pid"), ("ipc", "ipc")] {
        let options = namespaces(json!({field: 2}));
        let mut config = Pod::new(field, node.folder());
        config.0["linux"]["security_context"] = options["security_context"].clone();
        // The default handler, whose engine makes machines.
        let pod = node.crictl.run_pod(config);
        let answer = &pod.inspect()["status"]["linux"]["namespaces"]["options"][field];
        assert_eq!(answer, "NODE", "{field}");
        let container = pod.start(Container::sh("c", &image, "echo up; sleep 600").set("linux", options));
        container.says("up");
        let own = |kind: &str| container.exec(&format!("readlink /proc/self/ns/{kind}")).ok();
        for each in ["net", "pid", "ipc"] {
            assert_eq!(own(each) == of_node(&node, each), each == kind, "{field}: {each}");
        }
        if field == "pid" {
            let daemon = node.daemon_pid();
            assert!(container.exec(&format!("cat /proc/{daemon}/comm")).ok().contains("nacelle"));
        }
        pod.remove();
        assert_eq!(node.left(), Vec::<String>::new());
    }
    // One that has its own network has no container with the node's.
    let pod = node.crictl.run_pod_of("host", Pod::new("own", node.folder()));
    let refused = pod.try_create(Container::sh("c", &image, "true").set("linux", namespaces(json!({"network": 2}))));
    let refused = refused.err();
    assert!(refused.contains("FailedPrecondition") && refused.contains("namespace of its own"), "{refused}");
    pod.remove();
}

#[test]
fn pods_with_namespaces_of_the_node_are_refused_without_that_leave() {
    let node = Node::new();
    let pod = Pod::new("a", node.folder()).set("linux", namespaces(json!({"network": 2})));
    let file = node.crictl.file("pod", &pod.0);
    let answer = node.crictl.try_call(["runp", "--runtime", "host", &file]).err();
    assert!(answer.contains("FailedPrecondition") && answer.contains("run-on-host"), "{answer}");
    assert_eq!(node.left(), Vec::<String>::new());
}
