//! Tests pods without a guest (engine `host`): their access to the node, their isolation, and leaks.

use nacelle_e2e::census::mounts;
use nacelle_e2e::node::NodeOptions;
use nacelle_e2e::run::{block_on, eventually, run_program};
use nacelle_e2e::{ContainerRequest, CriClient, PodRequest, TestImage, TestNode, path_from_env};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// Returns whether this node can run such pods; prints the reason if not.
fn can_run_without_guest() -> bool {
    let release = run_program("uname", ["-r"]).ok();
    let mut numbers = release.split('.').map(|number| number.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let erofs =
        fs::read_to_string("/proc/filesystems").unwrap_or_default().lines().any(|line| line.ends_with("\terofs"));
    let agent = path_from_env("NACELLE_BIN").with_file_name("nacelle-agent");
    let mounts_images = version >= (6, 12) || version >= (6, 1) && Path::new("/dev/loop-control").exists();
    let missing = match (mounts_images, erofs, agent.exists()) {
        (false, ..) => format!("Linux {release} is older than 6.1, or older than 6.12 and without loop devices"),
        (_, false, _) => "the kernel has no EROFS".to_owned(),
        (.., false) => format!("{} is not there", agent.display()),
        _ => return true,
    };
    println!("skipped: {missing}");
    false
}

fn namespace_options(options: Value) -> Value {
    json!({"security_context": {"namespace_options": options}})
}

/// Returns the daemon's namespace of this kind.
fn node_namespace(node: &TestNode, kind: &str) -> String {
    let path = format!("/proc/{}/ns/{kind}", node.daemon_pid());
    fs::read_link(path).expect("the daemon runs").display().to_string()
}

#[test]
fn a_pod_without_a_guest_has_namespaces_of_its_own() {
    if !can_run_without_guest() {
        return;
    }
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node
        .crictl
        .run_pod_with_handler("host", PodRequest::new("own", node.directory()).set("hostname", json!("own-name")));
    let container =
        pod.start(ContainerRequest::sh("c", &image, "trap 'exit 7' TERM; echo up; while :; do sleep 1; done"));
    container.wait_for_output("up");
    let stdout_of = |script: &str| container.exec(script).ok();
    assert_eq!(stdout_of("uname -r"), run_program("uname", ["-r"]).ok(), "the node's kernel");
    assert_eq!(stdout_of("hostname"), "own-name");
    for kind in ["net", "ipc", "uts", "mnt", "pid", "cgroup"] {
        assert_ne!(stdout_of(&format!("readlink /proc/self/ns/{kind}")), node_namespace(&node, kind), "{kind}");
    }
    let address = pod.ip();
    assert!(stdout_of("ip -o addr show eth0").contains(&address), "{address}");
    assert!(stdout_of("ip -o addr show lo").contains("127.0.0.1"));
    assert!(stdout_of("cat /etc/hosts").contains(&format!("{address}\town-name")));
    // Only the pod's own processes and files are visible.
    assert!(stdout_of("ls /proc | grep -c '^[0-9]'").parse::<u32>().expect("a number") < 10);
    assert_eq!(container.exec("ls -d /node /run/nacelle 2>/dev/null").stdout, "");
    stdout_of("touch /written && echo x >/dev/null");
    let group = nacelle_e2e::census::cgroups(node.directory());
    assert!(group.iter().any(|group| group.join("pod").join(&container.id).is_dir()), "{group:?}");

    let second = pod.start(ContainerRequest::sh("d", &image, "cat /written; sleep 600"));
    assert_eq!(second.exec("ls /written").code, 1, "what one container writes another does not see");
    node.crictl.call(["stop", "--timeout", "60", &container.id]);
    assert_eq!(container.status()["exitCode"], 7);
    assert_eq!(second.exec("echo still here").ok(), "still here");
    pod.remove();
    assert_eq!(node.leaked(), Vec::<String>::new());
    let scratch = fs::read_dir(node.directory().join("root/scratch")).map(|entries| entries.count());
    assert_eq!(scratch.unwrap_or(0), 0, "what containers wrote is gone");
}

#[test]
fn a_killed_pod_process_without_a_guest_leaves_nothing() {
    if !can_run_without_guest() {
        return;
    }
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node.crictl.run_pod_with_handler("host", PodRequest::new("killed", node.directory()));
    let marker = format!("sleep 60{}", std::process::id());
    let container = pod.start(ContainerRequest::sh("c", &image, &format!("{marker} & {marker} & echo up; wait")));
    container.wait_for_output("up");
    assert!(node.pids_matching("nacelle-agent --host ").len() > 1, "the agent and its zygote");
    for pid in node.pids_matching("nacelle-pod --dir ") {
        run_program("kill", ["-9", &pid.to_string()]).ok();
    }
    let ended = container.wait_for_exit();
    assert_eq!(ended["exitCode"], 255, "{ended}");
    eventually("its processes are gone", || {
        let gone =
            node.pids_matching("nacelle-agent --host ").is_empty() && run_program("pgrep", ["-f", &marker]).code == 1;
        gone.then_some(())
    });
    // The node's census on drop finds other leaks: mounts, cgroups, files.
}

#[test]
fn pods_with_host_namespaces_run_without_a_guest_if_allowed() {
    if !can_run_without_guest() {
        return;
    }
    let extra = "[sandbox]\nhost_namespaces = \"run-on-host\"\n".to_owned();
    let node = TestNode::with_options(NodeOptions { extra, ..NodeOptions::default() });
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    for (field, kind) in [("network", "net"), ("pid", "pid"), ("ipc", "ipc")] {
        let options = namespace_options(json!({field: 2}));
        let mut config = PodRequest::new(field, node.directory());
        config.0["linux"]["security_context"] = options["security_context"].clone();
        // The default handler, whose engine uses VMs.
        let pod = node.crictl.run_pod(config);
        let answer = &pod.inspect()["status"]["linux"]["namespaces"]["options"][field];
        assert_eq!(answer, "NODE", "{field}");
        let container = pod.start(ContainerRequest::sh("c", &image, "echo up; sleep 600").set("linux", options));
        container.wait_for_output("up");
        let own = |kind: &str| container.exec(&format!("readlink /proc/self/ns/{kind}")).ok();
        for each in ["net", "pid", "ipc"] {
            assert_eq!(own(each) == node_namespace(&node, each), each == kind, "{field}: {each}");
        }
        if field == "pid" {
            let daemon = node.daemon_pid();
            assert!(container.exec(&format!("cat /proc/{daemon}/comm")).ok().contains("nacelle"));
        }
        pod.remove();
        assert_eq!(node.leaked(), Vec::<String>::new());
    }
    // A pod with its own network cannot have a container with the node's.
    let pod = node.crictl.run_pod_with_handler("host", PodRequest::new("own", node.directory()));
    let refused = pod
        .try_create(ContainerRequest::sh("c", &image, "true").set("linux", namespace_options(json!({"network": 2}))));
    let refused = refused.err();
    assert!(refused.contains("FailedPrecondition") && refused.contains("namespace of its own"), "{refused}");
    pod.remove();
}

#[test]
fn the_nodes_network_goes_with_a_user_namespace() {
    if !can_run_without_guest() {
        return;
    }
    let extra = "[sandbox]\nhost_namespaces = \"run-on-host\"\n".to_owned();
    let node = TestNode::with_options(NodeOptions { extra, ..NodeOptions::default() });
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let ids = json!([{"container_id": 0, "host_id": 196_608, "length": 65_536}]);
    let users = json!({"mode": 0, "uids": ids, "gids": ids});
    let mut options = namespace_options(json!({"network": 2, "userns_options": users}));
    options["security_context"]["capabilities"] = json!({"add_capabilities": ["NET_ADMIN", "SYS_ADMIN"]});
    let mut config = PodRequest::new("mapped", node.directory());
    config.0["linux"]["security_context"] =
        json!({"namespace_options": options["security_context"]["namespace_options"]});
    let pod = node.crictl.run_pod(config);
    let container = pod.start(ContainerRequest::sh("c", &image, "echo up; sleep 600").set("linux", options));
    container.wait_for_output("up");
    let own = |kind: &str| container.exec(&format!("readlink /proc/self/ns/{kind}")).ok();
    for (kind, is_node) in [("net", true), ("user", false), ("pid", false), ("ipc", false)] {
        assert_eq!(own(kind) == node_namespace(&node, kind), is_node, "{kind}");
    }
    let map = container.exec("cat /proc/self/uid_map").ok();
    assert_eq!(map.split_whitespace().collect::<Vec<_>>(), ["0", "196608", "65536"]);
    // The interfaces of the node are visible and its alone.
    container.exec("test -d /sys/class/net/lo && ip link show lo && touch /made && test -O /made").ok();
    for refused in ["ip link set lo mtu 1400", "echo 1 >/proc/sys/net/ipv4/ip_forward", "touch /sys/x"] {
        assert_ne!(container.exec(refused).code, 0, "{refused}");
    }
    pod.remove();
    let features = |node: &TestNode| {
        let request = nacelle_proto::cri::StatusRequest { verbose: false };
        let answer = block_on(async { CriClient::new(node.channel()).status(request).await }).unwrap();
        answer.into_inner().features.unwrap().user_namespaces_host_network
    };
    assert!(features(&node));
    assert_eq!(node.leaked(), Vec::<String>::new());
    drop(node);
    assert!(!features(&TestNode::new()), "a node without such pods announces them");
}

#[test]
fn pods_with_host_namespaces_are_refused_by_default() {
    let node = TestNode::new();
    let pod = PodRequest::new("a", node.directory()).set("linux", namespace_options(json!({"network": 2})));
    let file = node.crictl.write_input("pod", &pod.0);
    let answer = node.crictl.try_call(["runp", "--runtime", "host", &file]).err();
    assert!(answer.contains("FailedPrecondition") && answer.contains("run-on-host"), "{answer}");
    assert_eq!(node.leaked(), Vec::<String>::new());
}

/// A directory of the node on a mount of its own; dropping it removes it and all mounts below.
struct BindMount(PathBuf);

impl BindMount {
    fn new(node: &TestNode, name: &str, propagation: &str) -> BindMount {
        let directory = node.directory().join(name);
        fs::create_dir(&directory).expect("the node's directory is writable");
        run_program("mount", ["--bind".as_ref(), directory.as_os_str(), directory.as_os_str()]).ok();
        let mounted = BindMount(directory);
        run_program("mount", [propagation.as_ref(), mounted.0.as_os_str()]).ok();
        mounted
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for BindMount {
    fn drop(&mut self) {
        let taken = run_program("umount", ["--lazy".as_ref(), self.0.as_os_str()]);
        if taken.code != 0 {
            eprintln!("{}: {}", self.0.display(), taken.stderr);
        }
    }
}

fn privileged_options() -> Value {
    json!({"security_context": {"privileged": true}})
}

fn privileged_pod(node: &TestNode, name: &str) -> PodRequest {
    let mut pod = PodRequest::new(name, node.directory());
    pod.0["linux"]["security_context"] = privileged_options()["security_context"].clone();
    pod
}

/// Returns a container that sees a directory of the node with bidirectional propagation, with host-to-container propagation, and
/// with none.
fn propagation_container(image: &str, directory: &BindMount) -> ContainerRequest {
    let way =
        |at: &str, propagation: u8| json!({"host_path": directory.0, "container_path": at, "propagation": propagation});
    let mounts = json!([way("/both", 2), way("/heard", 1), way("/alone", 0)]);
    ContainerRequest::sh("c", image, "echo up; sleep 600").set("linux", privileged_options()).set("mounts", mounts)
}

#[test]
fn mount_propagation_works_in_both_directions() {
    if !can_run_without_guest() {
        return;
    }
    let extra = "[sandbox]\nprivileged = \"run-on-host\"\n".to_owned();
    let node = TestNode::with_options(NodeOptions { extra, ..NodeOptions::default() });
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let shared = BindMount::new(&node, "shared", "--make-shared");
    // The default handler, whose engine uses VMs.
    let pod = node.crictl.run_pod(privileged_pod(&node, "both"));
    let before = mounts(node.directory());
    let container = pod.start(propagation_container(&image, &shared));
    container.wait_for_output("up");
    let stdout_of = |script: &str| container.exec(script).ok();
    assert_eq!(stdout_of("uname -r"), run_program("uname", ["-r"]).ok(), "the node's kernel");
    let reported = container.status()["mounts"].to_string();
    assert!(reported.contains("BIDIRECTIONAL") && reported.contains("HOST_TO_CONTAINER"), "{reported}");

    stdout_of("mkdir /both/inner && mount -t tmpfs inner /both/inner && echo of the pod >/both/inner/file");
    assert_eq!(fs::read_to_string(shared.path("inner/file")).expect("the node sees it"), "of the pod\n");
    assert_eq!(stdout_of("cat /heard/inner/file; ls /alone/inner"), "of the pod");
    let outer = shared.path("outer");
    fs::create_dir(&outer).expect("the directory is writable");
    run_program("mount", ["-t".as_ref(), "tmpfs".as_ref(), "outer".as_ref(), outer.as_os_str()]).ok();
    fs::write(outer.join("file"), "of the node\n").expect("the mount is writable");
    assert_eq!(stdout_of("cat /both/outer/file /heard/outer/file; ls /alone/outer"), "of the node\nof the node");
    stdout_of("mkdir /heard/own && mount -t tmpfs own /heard/own && touch /heard/own/file");
    assert!(!shared.path("own/file").exists(), "a host-to-container mount does not propagate to the node");
    run_program("umount", [&outer]).ok();
    assert_eq!(stdout_of("ls /both/outer /heard/outer | grep -c file || true"), "0");

    // The container's mounts on the node stay; nothing else does.
    node.crictl.call(["rm", "-f", &container.id]);
    assert_eq!(fs::read_to_string(shared.path("inner/file")).expect("it is the node's now"), "of the pod\n");
    run_program("umount", [shared.path("inner")]).ok();
    assert_eq!(mounts(node.directory()), before);
    pod.remove();
    drop(shared);
    assert_eq!(node.leaked(), Vec::<String>::new());
}

#[test]
fn host_path_volumes_can_cover_dev_and_parts_of_sys() {
    if !can_run_without_guest() {
        return;
    }
    let node = TestNode::new();
    let image = node
        .push_and_pull(&TestImage::busybox().with_layer(|layer| layer.add_symlink("to-proc", "/proc")), "busybox:1");
    let pod = node.crictl.run_pod_with_handler("host", privileged_pod(&node, "over-dev"));
    let log = node.directory().join("termination-log");
    fs::write(&log, "from the node").expect("written");
    let mount = |at: &str, of: &Path| json!({"container_path": at, "host_path": of.display().to_string()});
    // The mounts of a CSI driver with kubelet's file for the termination message, and of a CNI plugin.
    let last_words = format!("/dev/nacelle-e2e-{}", std::process::id());
    let mounts = [mount("/dev", Path::new("/dev")), mount(&last_words, &log), mount("/sys", Path::new("/sys"))];
    let driver = ContainerRequest::sh("driver", &image, "trap 'exit 0' TERM; echo up; while :; do sleep 1; done");
    let driver =
        pod.start(driver.set("mounts", json!(mounts)).set("linux", privileged_options()).set("tty", json!(true)));
    driver.wait_for_output("up");
    let stdout_of = |script: &str| driver.exec(script).ok();
    assert_eq!(stdout_of("stat -c %d /dev"), run_program("stat", ["-c", "%d", "/dev"]).ok(), "it is the node's");
    assert_eq!(stdout_of(&format!("cat {last_words} && echo . >/dev/null")), "from the node");
    assert_eq!(stdout_of("ls /dev | sort"), run_program("sh", ["-c", "ls /dev | sort"]).ok());
    let node_ptmx = run_program("stat", ["-c", "%F %t:%T", "/dev/ptmx"]).ok();
    let terminal =
        node.crictl.call_in_terminal(["exec", "-it", &driver.id, "/bin/sh", "-c", "echo at a terminal; tty"]).ok();
    assert!(terminal.contains("at a terminal"), "{terminal}");

    let mounts = [mount("/sys/fs", Path::new("/sys/fs")), mount("/sys/kernel", node.directory())];
    let agent = ContainerRequest::sh("agent", &image, "echo up; sleep 600").set("mounts", json!(mounts));
    let agent = pod.start(agent);
    agent.wait_for_output("up");
    let found = agent.exec("stat -c %d /sys/fs/cgroup; stat -c %d /sys/kernel").ok();
    let expected = run_program("stat", ["-c", "%d", "/sys/fs/cgroup", &node.directory().display().to_string()]).ok();
    assert_eq!(found, expected);

    let wrong =
        |at: &str| ContainerRequest::sh("wrong", &image, "true").set("mounts", json!([mount(at, node.directory())]));
    for (at, why) in [("/proc/sys", "only a few of its files"), ("/sys/none-such", "where nothing can be created")] {
        let refused = pod.try_create(wrong(at)).err();
        assert!(refused.contains("InvalidArgument") && refused.contains(why), "{at}: {refused}");
    }
    // The image's links are resolved after the creation was answered, so the error comes at the start.
    let linked = pod.create(wrong("/to-proc/sys"));
    let refused = node.crictl.try_call(["start", &linked.id]).err();
    assert!(refused.contains("InvalidArgument") && refused.contains("leads to /proc/sys"), "{refused}");
    // The same for a link in the volume that a container has at /dev, where another container may have put it.
    let devices = node.directory().join("devices");
    fs::create_dir(&devices).expect("a directory");
    std::os::unix::fs::symlink("/proc/sys", devices.join("to-proc")).expect("a link");
    let mounts = json!([mount("/dev", &devices), mount("/dev/to-proc", node.directory())]);
    let linked = pod.create(ContainerRequest::sh("late", &image, "true").set("mounts", mounts));
    let refused = node.crictl.try_call(["start", &linked.id]).err();
    assert!(refused.contains("InvalidArgument") && refused.contains("/proc/sys"), "{refused}");
    pod.remove();
    assert_eq!(
        run_program("stat", ["-c", "%F %t:%T", "/dev/ptmx"]).ok(),
        node_ptmx,
        "the node's devices are as they were"
    );
    fs::remove_file(&last_words).expect("the place of a mount in the node's /dev stays, as with other runtimes");
}

#[test]
fn failed_or_orphaned_volumes_leave_no_mounts() {
    if !can_run_without_guest() {
        return;
    }
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let (shared, alone) =
        (BindMount::new(&node, "shared", "--make-shared"), BindMount::new(&node, "alone", "--make-private"));
    // Allowed by its handler, without a policy.
    let pod = node.crictl.run_pod_with_handler("host", privileged_pod(&node, "killed"));
    let all = || {
        let table = fs::read_to_string("/proc/self/mountinfo").expect("/proc is mounted");
        let volumes = table.lines().filter(|line| line.contains("/run/nacelle/volumes")).count();
        // The network namespace belongs to the pod: it goes when the pod is known to have ended.
        let netns = node.directory().join("netns");
        let others: Vec<_> =
            mounts(node.directory()).into_iter().filter(|point| !Path::new(point).starts_with(&netns)).collect();
        (others, volumes)
    };
    let before = all();
    for propagation in [1, 2] {
        let volume = |directory: &BindMount, at: &str, propagation: u8| json!({"host_path": directory.0, "container_path": at, "propagation": propagation});
        let mounts = json!([volume(&shared, "/good", 2), volume(&alone, "/bad", propagation)]);
        let refused = pod.try_create(
            ContainerRequest::sh("r", &image, "true").set("linux", privileged_options()).set("mounts", mounts),
        );
        let refused = refused.err();
        assert!(refused.contains("FailedPrecondition") && refused.contains("is not shared"), "{refused}");
    }
    // A container that fails later, when its volumes are mounted already.
    let mut user = privileged_options();
    user["security_context"]["run_as_username"] = json!("unknown-user");
    pod.try_create(propagation_container(&image, &shared).set("linux", user)).err();
    assert_eq!(all(), before);
    let container = pod.start(propagation_container(&image, &shared));
    container.wait_for_output("up");
    assert_eq!(all(), before);
    for pid in node.pids_matching("nacelle-pod --dir ") {
        run_program("kill", ["-9", &pid.to_string()]).ok();
    }
    container.wait_for_exit();
    eventually("its processes are gone", || node.pids_matching("nacelle-agent --host ").is_empty().then_some(()));
    assert_eq!(all(), before);
    pod.remove();
    drop((shared, alone));
    assert_eq!(node.leaked(), Vec::<String>::new());
}

const APPARMOR_PARSER: &str = "/usr/sbin/apparmor_parser";

/// A profile of AppArmor that forbids to write to a directory. It is loaded into the kernel until it is dropped.
struct LoadedProfile {
    name: String,
    file: PathBuf,
}

impl LoadedProfile {
    fn load(node: &TestNode, denied: &str) -> LoadedProfile {
        let name = format!("nacelle-e2e-{}", node.daemon_pid());
        let file = node.directory().join("profile");
        let rules = format!("capability,\nfile,\nnetwork,\nsignal,\ndeny {denied}/** w,\n");
        fs::write(&file, format!("profile {name} flags=(attach_disconnected) {{\n{rules}}}\n")).unwrap();
        run_program(APPARMOR_PARSER, ["--replace", "--skip-cache", "--quiet", file.to_str().unwrap()]).ok();
        LoadedProfile { name, file }
    }
}

impl Drop for LoadedProfile {
    fn drop(&mut self) {
        run_program(APPARMOR_PARSER, ["--remove", "--quiet", self.file.to_str().unwrap()]);
    }
}

#[test]
fn apparmor_confines_containers_and_their_commands() {
    if !can_run_without_guest() {
        return;
    }
    let enabled = fs::read_to_string("/sys/module/apparmor/parameters/enabled").is_ok_and(|text| text.starts_with('Y'));
    if !enabled || !Path::new(APPARMOR_PARSER).exists() {
        println!("skipped: this node has no AppArmor, or no apparmor_parser");
        return;
    }
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node.crictl.run_pod_with_handler("host", PodRequest::new("confined", node.directory()));
    let loaded = LoadedProfile::load(&node, "/tmp");
    let request = |name: &str, profile: Value| {
        let script = "cat /proc/self/attr/current; touch /tmp/first && echo made; echo end; sleep 600";
        ContainerRequest::sh(name, &image, script).set("linux", json!({"security_context": {"apparmor": profile}}))
    };
    let own = format!("{} (enforce)", loaded.name);
    let default = "nacelle-default (enforce)";
    for (name, profile, label, writes) in [
        ("unset", Value::Null, default, true),
        ("default", json!({"profile_type": 0}), default, true),
        ("unconfined", json!({"profile_type": 1}), "unconfined", true),
        ("own", json!({"profile_type": 2, "localhost_ref": loaded.name}), own.as_str(), false),
    ] {
        let container = pod.start(request(name, profile));
        let first = container.wait_for_output("end");
        assert!(first.contains(label) && first.contains("made") == writes, "{name}: {first}");
        let command = container.exec("cat /proc/self/attr/current; touch /tmp/second && echo made; true").ok();
        assert!(command.contains(label) && command.contains("made") == writes, "{name}: {command}");
    }
    let missing = json!({"profile_type": 2, "localhost_ref": "nacelle-e2e-missing"});
    let refused = pod.try_create(request("missing", missing)).err();
    for words in ["FailedPrecondition", "nacelle-e2e-missing", "is not loaded on this node"] {
        assert!(refused.contains(words), "{words}: {refused}");
    }

    let plain = pod.start(request("plain", Value::Null));
    plain.wait_for_output("end");
    let sockets = "syslogd -n -O /tmp/log & sleep 1; logger marked; sleep 1; grep -o marked /tmp/log; kill $!";
    assert_eq!(plain.exec(sockets).ok(), "marked", "a UNIX socket is made, bound and connected");

    // The default profile denies a mount to a container with CAP_SYS_ADMIN; its processes signal each other.
    let admin = ContainerRequest::sh("admin", &image, "sleep 600 & kill $! && echo killed; sleep 600")
        .set("linux", json!({"security_context": {"capabilities": {"add_capabilities": ["SYS_ADMIN"]}}}));
    let admin = pod.start(admin);
    admin.wait_for_output("killed");
    let mount = admin.exec("mount -t tmpfs none /tmp");
    assert!(mount.code != 0 && mount.stderr.to_lowercase().contains("permission denied"), "{mount:?}");
    pod.remove();
}
