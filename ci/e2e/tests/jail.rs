//! Owns: what the process of a pod has and has not, on a node with a real machine, and what is left when it dies.

use nacelle_e2e::{Container, Image, Node, Pod, eventually};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The fields of a status file of /proc.
fn status(path: &Path) -> BTreeMap<String, String> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().filter_map(|line| line.split_once(':')).map(|(k, v)| (k.to_owned(), v.trim().to_owned())).collect()
}

/// The process of the only pod.
fn process(node: &Node) -> PathBuf {
    let pids = node.processes("nacelle-pod ");
    assert_eq!(pids.len(), 1);
    PathBuf::from(format!("/proc/{}", pids[0]))
}

#[test]
fn the_process_of_a_pod_has_no_rights_and_no_files_but_its_own() {
    let node = Node::new();
    let image = node.image(&Image::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(Pod::new("jailed", node.folder()));
    let container = pod.start(Container::sh("c", &image, "echo up; sleep 600"));
    container.says("up");
    let process = process(&node);
    let mut threads = 0;
    for task in fs::read_dir(process.join("task")).expect("it runs").flatten() {
        let status = status(&task.path().join("status"));
        // One that has ended meanwhile has no status.
        let Some(name) = status.get("Name") else { continue };
        assert_eq!((status["NoNewPrivs"].as_str(), status["Seccomp"].as_str()), ("1", "2"), "{name}");
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(status[set].trim_start_matches('0'), "", "{name} {set}");
        }
        threads += 1;
    }
    assert!(threads > 4, "{threads}");
    // The daemon's store, other pods and the node are not there.
    let root = process.join("root");
    let folder = |name: &str| root.join(node.folder().strip_prefix("/").expect("absolute")).join(name);
    assert!(folder("root/images").is_dir());
    assert_eq!(fs::read_dir(folder("root/scratch")).expect("its disk").count(), 1, "its own disk, and no template");
    for gone in ["root/state.redb", "root/cni", "config.toml", "nacelle.sock", "netns"] {
        assert!(!folder(gone).exists(), "{gone}");
    }
    for gone in ["proc/self", "sys/kernel", "etc/passwd", "var/lib", "boot", "dev/net/tun"] {
        assert!(!root.join(gone).exists(), "{gone}");
    }
    assert!(fs::write(folder("root/images/x"), "").is_err());
    let groups = nacelle_e2e::census::cgroups(node.folder());
    for group in &groups {
        let members = fs::read_to_string(group.join("cgroup.procs")).expect("a control group");
        assert!(members.lines().any(|pid| process.ends_with(pid)), "{}: {members}", group.display());
    }
    println!("{threads} threads, {} control groups", groups.len());
}

#[test]
fn a_process_that_its_filter_kills_is_reported_as_such_and_leaves_nothing() {
    let node = Node::new();
    let image = node.image(&Image::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(Pod::new("killed", node.folder()));
    let container = pod.start(Container::sh("c", &image, "echo up; sleep 600"));
    container.says("up");
    let process = process(&node);
    let pid = process.file_name().and_then(|pid| pid.to_str()?.parse().ok()).expect("a number");
    // As the kernel does it at a system call that is not on the list.
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGSYS).expect("it runs");
    eventually("the container has ended", || {
        let status = &node.crictl.json(["inspect", &container.id])["status"];
        (status["state"] == "CONTAINER_EXITED").then(|| {
            assert_eq!(status["exitCode"], 255);
            let message = status["message"].as_str().unwrap_or_default();
            assert!(message.contains("a system call that its filter forbids"), "{message}");
        })
    });
    assert!(!process.exists());
    // The node's census, when it is dropped, finds what is left: processes, taps, mounts, control groups, files.
}
