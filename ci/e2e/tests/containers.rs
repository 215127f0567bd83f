//! Tests the options of containers, and how containers end.

use nacelle_e2e::crictl::RunningContainer;
use nacelle_e2e::failure_answer::check_exit;
use nacelle_e2e::node::{NodeOptions, engine};
use nacelle_e2e::{ContainerRequest, PodRequest, TestImage, TestNode, eventually};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

#[test]
fn exit_codes_and_reasons_are_reported() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(PodRequest::new("ends", node.directory()));
    let good = pod.start(ContainerRequest::sh("good", &image, "echo done"));
    let bad = pod.start(ContainerRequest::sh("bad", &image, "exit 42"));
    let killed = pod.start(ContainerRequest::sh("killed", &image, "kill -9 $$"));
    let polite = pod.start(ContainerRequest::sh(
        "polite",
        &image,
        "trap 'exit 7' TERM; echo ready; while :; do sleep 0.1; done",
    ));
    assert_eq!(good.wait_for_exit()["exitCode"], 0);
    assert_eq!(good.wait_for_exit()["reason"], "Completed");
    assert_eq!(bad.wait_for_exit()["exitCode"], 42);
    assert_eq!(bad.wait_for_exit()["reason"], "Error");
    // The first process of a PID namespace survives its own SIGKILL: the shell continues and exits with 0.
    let code = killed.wait_for_exit()["exitCode"].as_i64();
    assert!(code == Some(0) || code == Some(137), "{code:?}");
    polite.wait_for_output("ready");
    node.crictl.call(["stop", "--timeout", "60", &polite.id]);
    assert_eq!(polite.wait_for_exit()["exitCode"], 7);

    let missing = pod.create(ContainerRequest::new("missing", &image, &["/no/such/program"]));
    let refused = node.crictl.try_call(["start", &missing.id]).err();
    assert!(refused.contains("NotFound") && refused.contains("/no/such/program"), "{refused}");
    let status = missing.wait_for_exit();
    assert_eq!((&status["reason"], &status["exitCode"]), (&json!("StartError"), &json!(128)), "{status}");
    assert!(status["message"].as_str().unwrap_or_default().contains("/no/such/program"), "{status}");
    pod.remove();
}

#[test]
fn a_container_out_of_memory_dies_alone() {
    if !nacelle_e2e::node::supports_limits() {
        println!("skipped: this node's cgroup v2 limits nothing, and containers without a guest have no other");
        return;
    }
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(PodRequest::new("oom", node.directory()));
    let neighbour = pod.start(ContainerRequest::sh("neighbour", &image, "echo here; sleep 600"));
    let limits = json!({"resources": {"memory_limit_in_bytes": 16 << 20, "memory_swap_limit_in_bytes": 16 << 20}});
    let hungry = pod.start(ContainerRequest::sh("hungry", &image, "tail /dev/zero").set("linux", limits.clone()));
    check_exit("container out of memory", &hungry.wait_for_exit());
    assert_eq!(neighbour.status()["state"], "CONTAINER_RUNNING");
    assert_eq!(neighbour.exec("echo alive").ok(), "alive");
    // A child that the limit kills makes the container OOM-killed; the exit code remains that of its first process.
    let parent = ContainerRequest::sh("parent", &image, "tail /dev/zero; exit 3");
    let status = pod.start(parent.set("linux", limits)).wait_for_exit();
    assert_eq!((&status["reason"], &status["exitCode"]), (&json!("OOMKilled"), &json!(3)), "{status}");
    // Without a limit of its own: all memory of the VM.
    if nacelle_e2e::node::engine() != "host" {
        let status = pod.start(ContainerRequest::sh("greedy", &image, "tail /dev/zero")).wait_for_exit();
        check_exit("guest out of memory", &status);
        assert_eq!(neighbour.status()["state"], "CONTAINER_RUNNING");
    }
    pod.remove();
}

#[test]
fn users_limits_and_other_settings_take_effect() {
    let node = TestNode::new();
    let image = node.push_and_pull(
        &TestImage::busybox().with_config("User", json!("app")).with_config("WorkingDir", json!("/work")),
        "app:1",
    );
    let pod = node.crictl.run_pod(PodRequest::new("spec", node.directory()));
    let own = pod.start(
        ContainerRequest::sh("own", &image, "id; pwd; echo $GREETING; echo $PATH; touch /x || echo refused")
            .set("envs", json!([{"key": "GREETING", "value": "hello there"}])),
    );
    own.wait_for_exit();
    let output = own.output();
    assert!(output.contains("uid=1000(app) gid=1000(app) groups=1000(app),2000(extra)"), "{output}");
    assert!(output.contains("/work\nhello there\n/bin\n"), "{output}");
    assert!(output.contains("refused"), "{output}");

    let linux = json!({
        "resources": {"memory_limit_in_bytes": 64 << 20, "cpu_period": 100_000, "cpu_quota": 50_000, "cpu_shares": 512},
        "security_context": {
            "run_as_user": {"value": 1234}, "run_as_group": {"value": 4321}, "supplemental_groups": [77],
            "readonly_rootfs": true, "no_new_privs": true,
            "capabilities": {"drop_capabilities": ["ALL"]}, "masked_paths": ["/proc/kcore"],
        },
    });
    let script = "id; cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/cpu.max; \
                  grep -E 'CapEff|NoNewPrivs|Seccomp:' /proc/self/status; touch /tmp/x 2>/dev/null || echo read-only; \
                  for name in hosts hostname resolv.conf; do grep -cE \" /etc/$name [^ ]+ ro,\" /proc/self/mounts; done; \
                  echo inspected; sleep 600";
    let strict = pod.start(ContainerRequest::sh("strict", &image, script).set("linux", linux));
    let output = strict.wait_for_output("inspected");
    assert!(output.contains("read-only\n1\n1\n1\n"), "{output}");
    assert!(output.contains("uid=1234 gid=4321 groups=77,4321") || output.contains("groups=4321,77"), "{output}");
    if nacelle_e2e::node::supports_limits() {
        assert!(output.contains("67108864\n50000 100000"), "{output}");
    }
    assert!(output.contains("CapEff:\t0000000000000000"), "{output}");
    assert!(output.contains("NoNewPrivs:\t1"), "{output}");
    assert_eq!(strict.exec("id -u; grep NoNewPrivs /proc/self/status").ok(), "1234\nNoNewPrivs:\t1");
    if nacelle_e2e::node::engine() != "host" {
        // As on kubelet's nodes: programs can map more memory than a small VM has.
        assert_eq!(strict.exec("cat /proc/sys/vm/overcommit_memory").ok(), "1");
    }
    pod.remove();
}

#[test]
fn groups_capabilities_and_paths_follow_the_security_context() {
    let node = TestNode::new();
    let image = node.push_and_pull(
        &TestImage::busybox().with_layer(|layer| {
            layer.add_file("etc/secret", b"secret", 0o644);
            layer.add_directory("hidden", 0o755);
            layer.add_file("hidden/file", b"hidden", 0o644);
            layer.add_directory("kept", 0o777);
            // Busybox keeps the rights of a setuid file for this applet; its shell runs the plain one unless given a path.
            layer.add_file("bin/ping", &fs::read("/bin/busybox").unwrap(), 0o4755);
        }),
        "groups:1",
    );
    let mut pod = PodRequest::new("groups", node.directory());
    let sysctls = [("kernel.shm_rmid_forced", "1"), ("fs.mqueue.msg_max", "100"), ("net/ipv4/ip_forward", "1")];
    pod.0["linux"]["sysctls"] = sysctls.iter().map(|(key, value)| ((*key).to_owned(), json!(value))).collect();
    let pod = node.crictl.run_pod(pod);
    // `app` (1000) is in group 2000 of the image.
    for (policy, groups) in [(0, "1000 2000 3000"), (1, "1000 3000")] {
        let linux = json!({"security_context": {
            "run_as_user": {"value": 1000}, "supplemental_groups": [3000], "supplemental_groups_policy": policy,
        }});
        let name = format!("policy-{policy}");
        let one = pod.start(ContainerRequest::sh(&name, &image, "id -G; sleep 600").set("linux", linux));
        one.wait_for_output(&format!("{groups}\n"));
        assert_eq!(one.exec("id -G").ok(), groups);
        let user = one.status()["user"]["linux"].take();
        let number = |value: &Value| value.as_str().and_then(|text| text.parse().ok()).or(value.as_u64());
        let reported = user["supplementalGroups"].as_array().unwrap().iter().filter_map(number);
        assert_eq!(reported.map(|group| group.to_string()).collect::<Vec<_>>().join(" "), groups, "{user}");
        assert_eq!((number(&user["uid"]), number(&user["gid"])), (Some(1000), Some(1000)), "{user}");
    }
    // A setuid program gives a user root's rights in the container if the container has them and allows it.
    for (name, no_new_privs, drop, pings) in [
        ("setuid", false, json!([]), true),
        ("dropped", false, json!(["NET_RAW"]), false),
        ("kept", true, json!([]), false),
    ] {
        let linux = json!({"security_context": {
            "run_as_user": {"value": 1000}, "no_new_privs": no_new_privs, "capabilities": {"drop_capabilities": drop},
        }});
        let one = pod.start(ContainerRequest::sh(name, &image, "sleep 600").set("linux", linux));
        let output = one.exec("/bin/ping -c 1 127.0.0.1 2>&1 && echo answered || echo none").ok();
        let expected = if pings { "answered" } else { "permission denied" };
        assert!(output.contains(expected), "{name}: {output}");
    }
    let linux = json!({"security_context": {
        "masked_paths": ["/etc/secret", "/hidden", "/not/there"], "readonly_paths": ["/kept", "/nor/there"],
    }});
    let script = "cat /etc/secret; ls /hidden; touch /kept/x 2>&1; touch /hidden/x 2>&1; touch /tmp/x && echo written";
    let one = pod.start(ContainerRequest::sh("paths", &image, &format!("{script}; sleep 600")).set("linux", linux));
    let refused = |path: &str| format!("touch: {path}: Read-only file system");
    let expected = format!("{}\n{}\nwritten", refused("/kept/x"), refused("/hidden/x"));
    assert_eq!(one.wait_for_output("written").trim(), expected);
    assert_eq!(one.exec(script).ok(), expected);
    let files = sysctls.map(|(key, _)| format!("/proc/sys/{}", key.replace('.', "/"))).join(" ");
    assert_eq!(one.exec(&format!("cat {files}")).ok(), sysctls.map(|(_, value)| value).join("\n"));
    pod.remove();
}

#[test]
fn a_localhost_seccomp_profile_applies_to_every_process_of_its_container() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let write = |name: &str, profile: Value| {
        let file = node.directory().join(name);
        fs::write(&file, profile.to_string()).unwrap();
        file
    };
    let file = write(
        "profile.json",
        json!({
            "defaultAction": "SCMP_ACT_ALLOW",
            "syscalls": [
                {"names": ["chmod", "fchmod", "fchmodat", "fchmodat2"], "action": "SCMP_ACT_ERRNO"},
                {"names": ["sethostname"], "action": "SCMP_ACT_ERRNO", "errnoRet": 95,
                 "includes": {"caps": ["CAP_SYS_ADMIN"], "minKernel": "5.10"}},
                {"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "excludes": {"arches": ["amd64"]}},
            ],
        }),
    );
    let linux = |file: &Path| {
        json!({"security_context": {
            "seccomp": {"profile_type": 2, "localhost_ref": file},
            "capabilities": {"add_capabilities": ["SYS_ADMIN"]},
        }})
    };
    let pod = node.crictl.run_pod(PodRequest::new("seccomp", node.directory()));
    let script = "grep Seccomp: /proc/self/status; chmod 755 /tmp 2>&1; hostname other 2>&1; mkdir /x && echo made";
    let container = ContainerRequest::sh("one", &image, &format!("{script}; sleep 600")).set("linux", linux(&file));
    let one = pod.start(container);
    let expected =
        "Seccomp:\t2\nchmod: /tmp: Operation not permitted\nhostname: sethostname: Operation not supported\nmade";
    assert_eq!(one.wait_for_output("made").trim(), expected);
    // The container keeps its filter, also for commands, even if the file is removed.
    fs::remove_file(&file).unwrap();
    let again = script.replace("/x", "/y");
    assert_eq!(one.exec(&again).ok(), expected);

    // A filter does not prevent a command from starting, only the command's own calls.
    let sleep = |name: &str, security: Value| {
        let container =
            ContainerRequest::sh(name, &image, "").set("command", json!(["sleep", "600"])).set("args", json!([]));
        container.set("linux", json!({"security_context": security}))
    };
    for (name, call, action) in [
        ("refused", "setsid", "SCMP_ACT_ERRNO"),
        ("killed", "setsid", "SCMP_ACT_KILL_PROCESS"),
        ("unread", "read", "SCMP_ACT_ERRNO"),
    ] {
        let profile = json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": [call], "action": action}]});
        let file = write(&format!("{name}.json"), profile);
        for no_new_privs in [false, true] {
            let mut security = linux(&file)["security_context"].take();
            security["no_new_privs"] = json!(no_new_privs);
            let container = pod.start(sleep(&format!("{name}-{no_new_privs}"), security));
            for _ in 0..5 {
                assert_eq!(container.exec("echo runs").ok(), "runs", "{name} {no_new_privs}");
            }
        }
    }
    // Calls that seem to succeed and are not made leave a command no more capabilities than the container.
    let pretended = json!({"names": ["capset", "prctl"], "action": "SCMP_ACT_ERRNO", "errnoRet": 0});
    let pretended = write("pretended.json", json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [pretended]}));
    let security = json!({"seccomp": {"profile_type": 2, "localhost_ref": pretended}, "no_new_privs": true});
    let container = pod.start(sleep("pretended", security));
    let plain = pod.start(sleep("plain", json!({})));
    let capabilities = |container: &RunningContainer| container.exec("grep ^Cap /proc/self/status").ok();
    assert_eq!(capabilities(&container), capabilities(&plain));
    // A filter that only the command's own process can load is not used where a container could trace the process meanwhile.
    let no_fork = json!({"names": ["fork", "vfork", "clone", "clone3"], "action": "SCMP_ACT_ERRNO"});
    let no_fork = write("no-fork.json", json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [no_fork]}));
    for (name, capabilities, traced) in [("untraced", json!([]), false), ("traced", json!(["SYS_PTRACE"]), true)] {
        let security = json!({
            "seccomp": {"profile_type": 2, "localhost_ref": no_fork},
            "capabilities": {"add_capabilities": capabilities},
        });
        let container = ContainerRequest::sh(name, &image, "")
            .set("command", json!(["sleep", "600"]))
            .set("args", json!([]))
            .set("linux", json!({"security_context": security}));
        let done = pod.start(container).exec("grep Seccomp: /proc/self/status");
        match traced {
            false => assert_eq!(done.ok(), "Seccomp:\t2"),
            true => assert!(done.code != 0 && done.stderr.contains("CAP_SYS_PTRACE"), "{done:?}"),
        }
    }

    let notify = write("notify.json", json!({"defaultAction": "SCMP_ACT_NOTIFY"}));
    let broken = write("broken.json", json!(["no profile"]));
    for (file, code, words) in [
        (file.as_path(), "InvalidArgument", "No such file"),
        (node.directory(), "InvalidArgument", "is not a regular file"),
        (broken.as_path(), "InvalidArgument", "is no profile"),
        (notify.as_path(), "Unimplemented", "SCMP_ACT_NOTIFY"),
        (Path::new("profile.json"), "InvalidArgument", "absolute path"),
    ] {
        let refused = pod.try_create(ContainerRequest::sh("two", &image, "true").set("linux", linux(file))).err();
        assert!(refused.contains(code) && refused.contains(words), "{code}, {words}: {refused}");
    }
    pod.remove();
}

#[test]
fn commands_run_in_a_container_with_a_large_environment() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(PodRequest::new("large", node.directory()));
    let envs: Vec<Value> = (0..7000).map(|n| json!({"key": format!("V{n}"), "value": "x".repeat(150)})).collect();
    let one = pod.start(ContainerRequest::sh("one", &image, "sleep 600").set("envs", json!(envs)));
    assert_eq!(one.exec("echo ${#V6999}").ok(), "150");
    pod.remove();
}

#[test]
fn containers_can_use_more_images_than_the_vm_has_disks() {
    let node = TestNode::new();
    let pod = node.crictl.run_pod(PodRequest::new("many", node.directory()));
    let mut containers = Vec::new();
    for number in 0..7 {
        let image =
            TestImage::busybox().with_layer(|layer| layer.add_file("who", format!("image {number}").as_bytes(), 0o644));
        let image = node.push_and_pull(&image, &format!("many{number}:1"));
        containers.push(
            pod.start(
                ContainerRequest::sh("c", &image, "cat /who; echo; sleep 600")
                    .set("metadata", json!({"name": format!("c{number}"), "attempt": 0}))
                    .set("log_path", json!(format!("{number}.log"))),
            ),
        );
    }
    for (number, container) in containers.iter().enumerate() {
        container.wait_for_output(&format!("image {number}"));
    }
    // After a removal, the slot is used again.
    node.crictl.call(["rm", "--force", &containers[2].id]);
    let image = TestImage::busybox().with_layer(|layer| layer.add_file("who", b"the late one", 0o644));
    let image = node.push_and_pull(&image, "late:1");
    pod.start(ContainerRequest::sh("late", &image, "cat /who")).wait_for_output("the late one");
    assert_eq!(containers[3].exec("cat /who").ok(), "image 3");
    pod.remove();
}

#[test]
fn an_exec_is_killed_at_its_timeout() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(PodRequest::new("exec", node.directory()));
    let container = pod.start(ContainerRequest::sh("one", &image, "sleep 600"));
    let answer = node.crictl.try_call(["exec", "--sync", "--timeout", "2", &container.id, "/bin/sleep", "555"]).err();
    assert!(answer.contains("DeadlineExceeded"), "{answer}");
    eventually("the exec's process is gone", || (!container.exec("ps").ok().contains("sleep 555")).then_some(()));
    let missing = node.crictl.try_call(["exec", "--sync", &container.id, "/no/such/program"]).err();
    assert!(missing.contains("/no/such/program"), "{missing}");
    let big = container.exec("dd if=/dev/zero bs=1024 count=1024 2>/dev/null | tr '\\0' x").ok();
    assert_eq!(big.len(), 1 << 20);
    pod.remove();
}

#[test]
fn a_log_is_reopened_where_kubelet_moved_it() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(PodRequest::new("logs", node.directory()));
    let container =
        pod.start(ContainerRequest::sh("one", &image, "i=0; while :; do echo line $i; i=$((i+1)); sleep 0.05; done"));
    container.wait_for_output("line 3");
    let moved = container.log.with_extension("rotated");
    fs::rename(&container.log, &moved).unwrap();
    node.crictl.call(["logs", "--reopen", &container.id]);
    container.wait_for_output("line");
    node.crictl.call(["stop", "--timeout", "0", &container.id]);
    let all = fs::read_to_string(&moved).unwrap() + &fs::read_to_string(&container.log).unwrap();
    let numbers: Vec<u32> = all.lines().filter_map(|line| line.rsplit(' ').next()?.parse().ok()).collect();
    let expected: Vec<u32> = (0..u32::try_from(numbers.len()).unwrap()).collect();
    assert_eq!(numbers, expected, "a line is lost or doubled");
    pod.remove();
}

#[test]
fn devices_have_the_requested_permissions() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let mut config = PodRequest::new("devices", node.directory());
    config.0["linux"]["security_context"] = json!({"privileged": true});
    let pod = node.crictl.run_pod(config);
    let device = |host: &str, at: &str, permissions: &str| json!({"host_path": host, "container_path": at, "permissions": permissions});
    let with = |name: &str, devices: Value| ContainerRequest::sh(name, &image, "sleep 600").set("devices", devices);
    let refused = |host: &str| pod.try_create(with("x", json!([device(host, "/dev/x", "rwm")]))).err();
    let denied = |output: nacelle_e2e::ProgramOutput, what: &str| {
        assert!(output.code != 0 && output.stderr.contains("not permitted"), "{what}: {output:?}");
    };
    let on_host = engine() == "host";
    if !on_host || Path::new("/dev/net/tun").exists() {
        let requested = json!([device("/dev/net/tun", "/dev/tun", "rw"), device("/dev/net/tun", "/dev/net/tun", "rw")]);
        let container = pod.start(with("tun", requested));
        let numbers = container.exec("stat -c '%F %t %T' /dev/tun /dev/net/tun | uniq").ok();
        assert_eq!(numbers, "character special file a c8");
        // The device rules of the container apply at open.
        assert_eq!(container.exec("exec 3<>/dev/tun && echo opened").ok(), "opened");
        let plain = pod.start(with("plain", json!([])));
        assert_ne!(plain.exec("ls /dev/tun").code, 0);
        denied(plain.exec("mknod /tun c 10 200 && exec 3<>/tun"), "a device that was not requested");
    } else {
        println!("skipped: this node has no /dev/net/tun");
    }
    if on_host {
        let read_only = pod.start(with("read", json!([device("/dev/kmsg", "/dev/log", "r")])));
        denied(read_only.exec("echo x >/dev/log"), "a device to be read");
        let none = refused("/dev/none");
        assert!(none.contains("InvalidArgument") && none.contains("/dev/none"), "{none}");
        let security = json!({"security_context": {"privileged": true}});
        let privileged = pod.start(ContainerRequest::sh("all", &image, "sleep 600").set("linux", security));
        assert_eq!(privileged.exec("stat -c '%t %T' /dev/kmsg").ok(), "1 b");
        privileged.exec("test -c /dev/pts/ptmx && test -c /dev/ptmx && echo x >/dev/null").ok();
    } else {
        for host in ["/dev/kmsg", "/dev/kvm", "/dev"] {
            let none = refused(host);
            assert!(none.contains("Unimplemented") && none.contains(host), "{none}");
        }
    }
    // By number: a device plugin may use a path of its own. In a VM they are the guest's.
    let names = ["null", "zero", "full", "random", "urandom", "tty"];
    let links: Vec<_> = names.iter().map(|name| node.directory().join(format!("the-{name}"))).collect();
    let requested = names.iter().zip(&links).map(|(name, link)| {
        std::os::unix::fs::symlink(format!("/dev/{name}"), link).expect("the node's directory is writable");
        device(&link.display().to_string(), &format!("/dev/my/{name}"), "rw")
    });
    let requested: Vec<Value> = requested.chain([device("/dev/null", "/dev/null", "rw")]).collect();
    let container = pod.start(with("linked", json!(requested)));
    let numbers = container.exec("cd /dev/my; stat -c '%n %t %T' *; stat -c '%t %T' /dev/null").ok();
    assert_eq!(numbers, "full 1 7\nnull 1 3\nrandom 1 8\ntty 5 0\nurandom 1 9\nzero 1 5\n1 3");
    let modes: Vec<String> = ["full", "zero"]
        .iter()
        .map(|name| format!("{:o}", fs::metadata(format!("/dev/{name}")).expect("the node has it").mode() & 0o777))
        .collect();
    assert_eq!(container.exec("stat -c %a /dev/my/full /dev/my/zero").ok(), modes.join("\n"));
    assert_eq!(
        container.exec("head -c 3 /dev/my/zero | wc -c; echo x >/dev/my/null && echo written").ok(),
        "3\nwritten"
    );
    pod.remove();
}

#[test]
fn cdi_devices_apply_their_specifications() {
    let directory = tempfile::tempdir().expect("there is a directory for such");
    let extra = format!("[sandbox]\ncdi_dirs = [{:?}]\n", directory.path());
    let node = TestNode::with_options(NodeOptions { extra, ..NodeOptions::default() });
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let of_node = node.directory().join("driver");
    fs::create_dir(&of_node).expect("the node's directory is writable");
    fs::write(of_node.join("lib"), "of the driver").expect("the node's directory is writable");
    let edits = json!({
        "env": ["CDI_TEST=a=b"],
        "mounts": [{"hostPath": of_node, "containerPath": "/driver", "options": ["ro", "rbind", "nosuid"]}],
        "additionalGids": [4444],
    });
    let kmsg = json!({"deviceNodes": [{"path": "/dev/kmsg"}]});
    let nic = json!({"netDevices": [{"hostInterfaceName": "eth7", "name": "a"}]});
    let hooked = json!({"hooks": [{"hookName": "createContainer", "path": "/bin/true"}]});
    let devices: Vec<Value> = [("driver", edits), ("kmsg", kmsg), ("hooked", hooked), ("nic", nic)]
        .into_iter()
        .map(|(name, edits)| json!({"name": name, "containerEdits": edits}))
        .collect();
    let spec = json!({"cdiVersion": "1.1.0", "kind": "nacelle.test/thing", "devices": devices});
    fs::write(directory.path().join("thing.json"), spec.to_string()).expect("the directory is ours");
    // As the Go library writes them.
    let yaml = "---\ncdiVersion: 0.7.0\nkind: nacelle.test/node\ndevices:\n    - name: \"0\"\n      containerEdits:\n        \
                deviceNodes:\n            - path: /dev/one\n              hostPath: /dev/zero\n              fileMode: 416\n              \
                permissions: rw\n              uid: 1000\n              gid: 44\n            - path: /dev/two\n              \
                type: c\n              major: 1\n              minor: 7\n              permissions: none\n            - path: \
                /dev/three\n              type: p\ncontainerEdits:\n    env:\n        - CDI_NODES=yes\n";
    fs::write(directory.path().join("node.yaml"), yaml).expect("the directory is ours");
    let pod = node.crictl.run_pod(PodRequest::new("cdi", node.directory()));
    let with = |name: &str| {
        let device = json!([{"name": format!("nacelle.test/thing={name}")}]);
        ContainerRequest::sh("c", &image, "sleep 600").set("CDI_devices", device)
    };
    let refuse = |name: &str, code: &str, word: &str| {
        let refused = pod.try_create(with(name)).err();
        assert!(refused.contains(code) && refused.contains(word), "{name}: {refused}");
    };
    refuse("none", "InvalidArgument", "nacelle.test/thing=none");
    refuse("hooked", "Unimplemented", "the createContainer hook");
    refuse("nic", "Unimplemented", "eth7");
    if engine() != "host" {
        refuse("kmsg", "Unimplemented", "/dev/kmsg");
    }
    let annotated = with("driver").set("CDI_devices", json!([]));
    let annotated = annotated.set("annotations", json!({"cdi.k8s.io/plugin": "nacelle.test/thing=driver"}));
    let container = pod.start(annotated.set("metadata", json!({"name": "annotated", "attempt": 0})));
    assert_eq!(container.exec("echo $CDI_TEST").ok(), "a=b");
    let container = pod.start(with("driver"));
    let output = container.exec("echo $CDI_TEST; cat /driver/lib; echo; id -G; touch /driver/x 2>&1 | tail -1").ok();
    let lines: Vec<&str> = output.lines().collect();
    assert_eq!(lines[..2], ["a=b", "of the driver"], "{output}");
    assert!(lines[2].split(' ').any(|group| group == "4444") && output.contains("Read-only"), "{output}");
    let nodes = with("driver").set("CDI_devices", json!([{"name": "nacelle.test/node=0"}]));
    let container = pod.start(nodes.set("metadata", json!({"name": "nodes", "attempt": 0})));
    let format =
        "stat -c '%n %F %a %u %g %t %T' /dev/one /dev/two /dev/three; echo $CDI_NODES; head -c 2 /dev/one | wc -c";
    let expected = "/dev/one character special file 640 1000 44 1 5\n/dev/two character special file 666 0 0 1 7\n\
                    /dev/three fifo 666 0 0 0 0\nyes\n2";
    assert_eq!(container.exec(format).ok(), expected);
    pod.remove();
}

#[test]
fn unprivileged_programs_can_use_low_ports_and_ping() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(PodRequest::new("ports", node.directory()));
    let user = json!({"security_context": {"run_as_user": {"value": 1000}, "run_as_group": {"value": 1000}}});
    let container = pod.start(ContainerRequest::sh("c", &image, "sleep 600").set("linux", user));
    let stdout_of = |script: &str| container.exec(script).ok();
    assert_eq!(stdout_of("cd /proc/sys/net/ipv4; cat ip_unprivileged_port_start"), "0");
    assert_eq!(stdout_of("cat /proc/sys/net/ipv4/ping_group_range | tr '\\t' ' '"), "0 2147483647");
    // The client may end before the greeting arrives: the server greets again, and the client retries.
    let server = "(for n in 1 2 3 4 5; do echo hello | nc -l -p 80; done) >/dev/null 2>&1 &";
    let client = "n=0; until nc 127.0.0.1 80 </dev/null 2>/dev/null | grep hello; do \
                  n=$((n + 1)); [ $n -lt 300 ] || exit 1; sleep 0.2; done";
    assert_eq!(stdout_of(&format!("id -u; {server} {client}")), "1000\nhello");
    pod.remove();
}

#[test]
fn mounts_and_the_working_directory_follow_the_symlinks_of_the_image() {
    let node = TestNode::new();
    let image = node.push_and_pull(
        &TestImage::busybox().with_layer(|layer| {
            // All of these links lead to nothing in the image.
            layer.add_symlink("var/run", "/run");
            layer.add_symlink("etc/resolv.conf", "../run/systemd/resolve/stub-resolv.conf");
            layer.add_symlink("etc/hosts", "/etc/second");
            layer.add_symlink("etc/second", "../../../third");
            layer.add_symlink("work", "/opt/app/work");
            layer.add_symlink("conf", "/run/conf");
        }),
        "links:1",
    );
    let volume = node.directory().join("volume");
    fs::create_dir(&volume).unwrap();
    fs::write(volume.join("token"), "secret").unwrap();
    let mount = |at: &str, from: &Path| json!({"container_path": at, "host_path": from});
    let mounts = json!([
        mount("/var/run/secrets/kubernetes.io/serviceaccount", &volume),
        mount("/conf", &volume.join("token")),
        mount("/work/deep", &volume),
    ]);
    let pod = node.crictl.run_pod(PodRequest::new("links", node.directory()));
    let script = "pwd -P; cat /var/run/secrets/kubernetes.io/serviceaccount/token /run/conf /opt/app/work/deep/token; echo; \
                  grep -c localhost /etc/hosts /third; readlink /var/run; readlink /etc/hosts; test -s /run/systemd/resolve/stub-resolv.conf";
    let container =
        ContainerRequest::sh("links", &image, "sleep 600").set("mounts", mounts).set("working_dir", json!("/work"));
    let container = pod.start(container);
    let output = container.exec(script).ok();
    let lines: Vec<&str> = output.lines().collect();
    assert_eq!(lines.first().copied(), Some("/opt/app/work"), "{output}");
    assert_eq!(lines.get(1).copied(), Some("secretsecretsecret"), "{output}");
    assert!(lines.iter().skip(2).take(2).all(|line| !line.ends_with(":0")), "{output}");
    assert_eq!(lines.get(4..), Some(&["/run", "/etc/second"][..]), "{output}");
    pod.remove();
}

#[test]
fn an_obstacle_to_a_mount_is_named() {
    let node = TestNode::new();
    let stolen = node.directory().join("stolen");
    fs::create_dir(&stolen).unwrap();
    let image = node.push_and_pull(
        &TestImage::busybox().with_layer(|layer| {
            layer.add_file("file", b"", 0o644);
            layer.add_directory("directory", 0o755);
            layer.add_symlink("loop", "loop");
            layer.add_symlink("to-root", "/");
        }),
        "way:1",
    );
    let volume = node.directory().join("volume");
    fs::create_dir(&volume).unwrap();
    fs::write(volume.join("inside"), "").unwrap();
    let mount = |at: &str, from: &Path| json!({"container_path": at, "host_path": from});
    let pod = node.crictl.run_pod(PodRequest::new("way", node.directory()));
    let refused = |name: &str, image: &str, mounts: Value, cwd: &str| {
        let container = ContainerRequest::sh(name, image, "true").set("mounts", mounts).set("working_dir", json!(cwd));
        let made = pod.try_create(container);
        if made.code != 0 {
            return made.stderr;
        }
        node.crictl.try_call(["start", &made.stdout]).err()
    };
    let long = format!("/directory/{}", "n".repeat(300));
    for (name, at, from, errno) in [
        ("over-file", "/file", &volume, "Not a directory"),
        ("below-file", "/file/x", &volume, "Not a directory"),
        ("over-directory", "/directory", &volume.join("inside"), "Is a directory"),
        ("loop", "/loop/x", &volume, "Too many levels of symbolic links"),
        ("long", long.as_str(), &volume, "File name too long"),
        ("root", "/to-root", &volume, "Invalid argument"),
    ] {
        let output = refused(name, &image, json!([mount(at, from)]), "/");
        assert!(output.contains("InvalidArgument"), "{name}: {output}");
        assert!(output.contains("mount target") && output.contains(at) && output.contains(errno), "{name}: {output}");
    }
    let output = refused("cwd", &image, json!([]), "/file/x");
    assert!(output.contains("InvalidArgument") && output.contains("working directory /file/x"), "{output}");
    // An error that only libcontainer can detect keeps its cause.
    let output = refused("nested", &image, json!([mount("/v", &volume), mount("/v/inside", &volume)]), "/");
    assert!(output.contains("InvalidArgument") && output.contains("/v/inside"), "{output}");
    assert!(output.contains("with O_DIRECTORY"), "{output}");
    // Mounts at and below /dev, which a VM does not allow, are made after libcontainer's.
    if engine() == "host" {
        let output = refused("late", &image, json!([mount("/dev", &volume), mount("/dev/inside", &volume)]), "/");
        assert!(output.contains("InvalidArgument") && output.contains("/dev/inside"), "{output}");
        assert!(output.contains("Not a directory"), "{output}");
    }
    // A link that another container put into the volume does not lead a later mount over the masks of /proc.
    std::os::unix::fs::symlink("/proc/sys", volume.join("to-proc")).unwrap();
    let output = refused("to-proc", &image, json!([mount("/v", &volume), mount("/v/to-proc", &volume)]), "/");
    assert!(output.contains("InvalidArgument") && output.contains("/proc/sys"), "{output}");
    // libcontainer fills /dev by path, from the agent's root.
    let to = format!("/node{}", stolen.display());
    let image = node.push_and_pull(
        &TestImage::busybox().with_layer(|layer| {
            layer.add_directory(to.trim_start_matches('/'), 0o755);
            layer.add_symlink("dev", &to);
        }),
        "dev:1",
    );
    let output = refused("dev", &image, json!([]), "/");
    assert_eq!(fs::read_dir(&stolen).unwrap().count(), 0, "the node's files are as they were");
    assert!(
        output.contains("InvalidArgument") && output.contains("/dev") && output.contains("Not a directory"),
        "{output}"
    );
    pod.remove();
}

#[test]
fn the_clock_of_a_vm_follows_the_nodes() {
    if engine() == "host" {
        println!("skipped: without a VM the clock is the node's");
        return;
    }
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let mut config = PodRequest::new("clock", node.directory());
    config.0["linux"]["security_context"] = json!({"privileged": true});
    let pod = node.crictl.run_pod(config);
    let security = json!({"security_context": {"privileged": true}});
    let container = pod.start(ContainerRequest::sh("c", &image, "sleep 600").set("linux", security));
    let deviation = || {
        let guest: i64 = container.exec("busybox date +%s").ok().parse().expect("it is a number");
        let node = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("it is after 1970").as_secs();
        guest - i64::try_from(node).expect("it is before the end of time")
    };
    assert!(deviation().abs() < 5, "{}", deviation());
    // The clocks are compared once a minute.
    container.exec("busybox date -s @1000000000").ok();
    assert!(deviation().abs() > 1_000_000, "{}", deviation());
    let until = Instant::now() + Duration::from_secs(75);
    while deviation().abs() >= 5 {
        assert!(Instant::now() < until, "{}", deviation());
        std::thread::sleep(Duration::from_secs(1));
    }
    pod.remove();
}
