//! Tests pods with a user namespace: the users inside of their containers, the visible owners of files, and what is rejected.

use nacelle_e2e::census::{cgroup_parent, cgroups};
use nacelle_e2e::crictl::RunningPod;
use nacelle_e2e::node::engine;
use nacelle_e2e::run::{run, run_program};
use nacelle_e2e::{ContainerRequest, PodRequest, TestImage, TestNode};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

const FIRST_NODE_ID: u32 = 196_608;

fn id_mapping(first: u32) -> Value {
    json!([{"container_id": 0, "host_id": first, "length": 65_536}])
}

/// Returns `user_namespace_options` of a pod or container whose user namespace is mapped to these ids.
fn user_namespace_options(first: u32, own_pid: bool) -> Value {
    let users = json!({"mode": 0, "uids": id_mapping(first), "gids": id_mapping(first)});
    json!({
        "security_context": {
            "namespace_options": {"userns_options": users, "pid": i32::from(own_pid)},
            "capabilities": {"add_capabilities": ["NET_ADMIN", "SYS_ADMIN"]},
            // The values of kubelet.
            "masked_paths": ["/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"],
            "readonly_paths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
        },
    })
}

/// Tests volumes of the node, with its owners and with those of the user namespace. All are on a tmpfs, which supports id-mapped
/// mounts since Linux 6.3.
fn check_host_path_volumes(pod: &RunningPod, image: &str) {
    let release = run_program("uname", ["-r"]).ok();
    if release.starts_with("5.") || ["6.0.", "6.1.", "6.2."].iter().any(|old| release.starts_with(old)) {
        println!("not tested: volumes with mapped owners, which Linux {release} does not have on a tmpfs");
        return;
    }
    let directory = tempfile::tempdir_in("/dev/shm").expect("/dev/shm is writable");
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o700)).expect("it is ours");
    let shared = directory.path().join("shared");
    fs::create_dir(&shared).expect("it is ours");
    fs::write(shared.join("of-root"), "").expect("it is ours");
    let of_node = |at: &str| json!({"container_path": at, "host_path": shared});
    let mut mapped = of_node("/mapped");
    (mapped["uidMappings"], mapped["gidMappings"]) = (id_mapping(FIRST_NODE_ID), id_mapping(FIRST_NODE_ID));
    let mounts = json!([mapped, of_node("/plain")]);
    let container = ContainerRequest::sh("v", image, "sleep 600")
        .set("linux", user_namespace_options(FIRST_NODE_ID, false))
        .set("mounts", mounts);
    let container = pod.start(container);
    assert_eq!(container.exec("stat -c %u /mapped/of-root /plain/of-root").ok(), "0\n65534");
    container.exec("touch /mapped/written /mapped/given && chown 5:6 /mapped/given && mkdir -m 700 /mapped/deep").ok();
    container.exec("echo x >/mapped/of-root && touch /mapped/deep/er && test -O /mapped/deep/er").ok();
    assert_ne!(container.exec("touch /plain/unmapped").code, 0);
    let owner =
        |name: &str| fs::metadata(shared.join(name)).map(|found| (found.uid(), found.gid())).expect("it was made");
    for (name, of) in [("written", (0, 0)), ("given", (5, 6)), ("deep/er", (0, 0))] {
        assert_eq!(owner(name), of, "{name}");
    }
    // A volume that kubelet writes for the pod: a copy, in a VM.
    let conf = directory.path().join("pods/u/volumes/kubernetes.io~configmap/conf");
    fs::create_dir_all(conf.join("..1")).expect("it is ours");
    fs::write(conf.join("..1/key"), "value").expect("it is ours");
    fs::set_permissions(conf.join("..1/key"), fs::Permissions::from_mode(0o400)).expect("it is ours");
    std::os::unix::fs::symlink("..1", conf.join("..data")).expect("it is ours");
    std::os::unix::fs::symlink("..data/key", conf.join("key")).expect("it is ours");
    let mut mount = json!({"container_path": "/conf", "host_path": conf, "readonly": true});
    (mount["uidMappings"], mount["gidMappings"]) = (id_mapping(FIRST_NODE_ID), id_mapping(FIRST_NODE_ID));
    let reader =
        ContainerRequest::sh("r", image, "sleep 600").set("linux", user_namespace_options(FIRST_NODE_ID, false));
    let reader = pod.start(reader.set("mounts", json!([mount])));
    assert_eq!(reader.exec("cat /conf/key; stat -L -c ' %u %g %a' /conf/key").ok(), "value 0 0 400");
    assert_ne!(reader.exec("touch /conf/new || chmod 600 /conf/key").code, 0, "it is read-only");
    let mut other = of_node("/mapped");
    (other["uidMappings"], other["gidMappings"]) = (id_mapping(0), id_mapping(0));
    let other = ContainerRequest::sh("w", image, "true")
        .set("linux", user_namespace_options(FIRST_NODE_ID, false))
        .set("mounts", json!([other]));
    let refused = pod.try_create(other).err();
    assert!(refused.contains("InvalidArgument") && refused.contains("uidMappings"), "{refused}");
}

#[test]
fn user_namespaces_map_container_users_to_other_users_of_the_node() {
    let node = TestNode::new();
    let image = node
        .push_and_pull(&TestImage::busybox().with_layer(|layer| layer.add_file("mine", b"root's", 0o600)), "busybox:1");
    let mut requested = user_namespace_options(FIRST_NODE_ID, false);
    requested["sysctls"] = json!({
        "kernel.shm_rmid_forced": "1", "net.ipv4.ip_unprivileged_port_start": "5", "kernel.domainname": "example.org",
        "user.max_net_namespaces": "7",
    });
    requested["cgroup_parent"] = json!(cgroup_parent(node.directory()));
    let pod = node.crictl.run_pod(PodRequest::new("users", node.directory()).set("linux", requested));
    let refused = pod
        .try_create(ContainerRequest::sh("other", &image, "true").set("linux", user_namespace_options(0, false)))
        .err();
    assert!(refused.contains("InvalidArgument") && refused.contains("its pod's user namespace"), "{refused}");

    let map = format!("0 {FIRST_NODE_ID} 65536");
    let volume = json!([{"container_path": "/volume", "image": {"image": image}, "readonly": true}]);
    let script = "cat /proc/self/uid_map; sleep 60654";
    let one = pod.start(
        ContainerRequest::sh("one", &image, script)
            .set("linux", user_namespace_options(FIRST_NODE_ID, false))
            .set("mounts", volume),
    );
    let stdout_of = |script: &str| one.exec(script).ok();
    let plain = |text: String| text.split_whitespace().collect::<Vec<_>>().join(" ");
    one.wait_for_output("65536");
    assert_eq!(plain(one.output()), map);
    assert_eq!(plain(stdout_of("cat /proc/self/uid_map")), map, "an exec is in it, too");
    assert_eq!(stdout_of("id -u; id -g"), "0\n0");
    assert_eq!(stdout_of("cat /mine /volume/mine"), "root'sroot's");
    let owners = stdout_of("stat -c %u:%g / /mine /volume/mine /etc/hosts /dev/shm /dev/pts/ptmx");
    assert!(owners.lines().all(|line| line == "0:0"), "{owners}");
    stdout_of("echo x >/new && chown 1000:1000 /new && echo x >>/new && echo x >/dev/shm/y && echo x >/dev/null");
    assert_eq!(stdout_of("stat -c %u:%g /new"), "1000:1000");
    assert_ne!(one.exec("chown 65536 /new").code, 0, "there is no such user");
    assert_eq!(stdout_of("cat /proc/sys/kernel/shm_rmid_forced /proc/sys/net/ipv4/ip_unprivileged_port_start"), "1\n5");
    assert_eq!(stdout_of("cat /proc/sys/kernel/domainname /proc/sys/user/max_net_namespaces"), "example.org\n7");
    assert!(stdout_of("grep -c . /proc/mounts && ls /dev/mqueue /sys/class/net").contains("eth0"));
    if engine() == "host" {
        // CNI owns the network; the users of the processes are visible on the node.
        let groups = cgroups(node.directory()).into_iter().map(|group| group.join("pod").join(&one.id));
        let pids: String = groups.filter_map(|group| fs::read_to_string(group.join("cgroup.procs")).ok()).collect();
        let owned = |pid: &str| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            status.lines().any(|line| line.starts_with(&format!("Uid:\t{FIRST_NODE_ID}\t")))
        };
        assert!(pids.split_whitespace().any(owned), "{pids:?}");
    } else {
        stdout_of("ip addr add 127.0.9.9/8 dev lo && hostname other");
        // A command in the guest is outside of the user namespace, and in the network that belongs to it.
        let script =
            "cat /proc/self/uid_map; id -u; cat /mine; ip addr show lo | grep -c 127.0.9.9; ls /guest/run/nacelle/b";
        let output = plain(run(&mut node.shell_command(&[&pod.id, "--", "/bin/sh", "-c", script])).ok());
        assert_eq!(output, format!("0 0 4294967295 0 root's1 {}", one.id));
    }
    check_host_path_volumes(&pod, &image);
    let terminal =
        node.crictl.call_in_terminal(["exec", "-it", &one.id, "/bin/sh", "-c", "tty; echo x >/dev/tty"]).ok();
    assert!(terminal.contains("/dev/pts/0"), "{terminal}");

    // Another user, in a PID namespace of its own, in a working directory that the agent creates, with a terminal.
    let mut requested = user_namespace_options(FIRST_NODE_ID, true);
    requested["security_context"]["run_as_user"] = json!({"value": 1000});
    requested["security_context"]["run_as_group"] = json!({"value": 1000});
    requested["security_context"]["readonly_rootfs"] = json!(true);
    let two = ContainerRequest::sh("two", &image, "id -u; stat -c %u /made; tty; echo x >/dev/stderr; sleep 600");
    let two = two.set("linux", requested).set("working_dir", json!("/made/deep")).set("tty", json!(true));
    let two = pod.start(two);
    two.wait_for_output("/dev/pts/0");
    let lines = two.output();
    assert_eq!(lines.split_whitespace().take(2).collect::<Vec<_>>(), ["1000", "0"], "{lines}");
    assert_eq!(two.exec("id -u; cat /mine 2>/dev/null || echo no").ok(), "1000\nno");
    // In that container's PID namespace, like a debug container.
    let mut requested = user_namespace_options(FIRST_NODE_ID, false);
    let options = &mut requested["security_context"]["namespace_options"];
    (options["pid"], options["target_id"]) = (json!(3), json!(two.id));
    let debug = pod.start(ContainerRequest::sh("debug", &image, "sleep 600").set("linux", requested));
    let namespace = "readlink /proc/self/ns/pid";
    assert_eq!(debug.exec(namespace).ok(), two.exec(namespace).ok());
    pod.remove();
    assert_eq!(node.leaked(), Vec::<String>::new());
}
