//! Tests templates of VMs: pods start from one by default, are independent of it and of each other, and boot if there is none.
//! Only engine `kvm` has templates.

use nacelle_e2e::crictl::{RunningContainer, RunningPod};
use nacelle_e2e::node::{NodeOptions, SMALL_VM, engine, handler_config};
use nacelle_e2e::run::run_program;
use nacelle_e2e::{ContainerRequest, PodRequest, TestImage, TestNode, eventually};
use serde_json::json;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The maximum of what a clone with a sleeping container owns, with the heap of a debug build.
const OWNED_KIB: u64 = 20 << 10;

fn skip() -> bool {
    let skipped = engine() != "kvm";
    if skipped {
        println!("skipped: engine {} has no templates", engine());
    }
    skipped
}

fn pod(node: &TestNode, name: &str) -> PodRequest {
    PodRequest::new(name, &node.directory().join("logs"))
}

/// Starts a container that waits.
fn sleeper<'a>(pod: &RunningPod<'a>, image: &str) -> RunningContainer<'a> {
    pod.start(ContainerRequest::sh("sleeper", image, "sleep 3600"))
}

/// Returns the last line of `nacelle templates ls`: how many pods started from a template, and why others did not.
fn counts(node: &TestNode) -> String {
    node.templates(&["ls"]).ok().lines().last().unwrap_or_default().to_owned()
}

/// Returns the directories of the templates that are ready.
fn directories(node: &TestNode) -> BTreeSet<PathBuf> {
    let all = fs::read_dir(node.directory().join("run/templates")).expect("the daemon has made it").flatten();
    all.map(|entry| entry.path()).filter(|path| !path.ends_with("building")).collect()
}

fn only(directories: BTreeSet<PathBuf>) -> PathBuf {
    let all: Vec<_> = directories.into_iter().collect();
    let [only] = &all[..] else { panic!("one template: {all:?}") };
    only.clone()
}

/// Returns whether the pod started from a template, according to its timeline.
fn is_clone(pod: &RunningPod<'_>) -> bool {
    pod.inspect().to_string().contains("machine from its template")
}

fn kib(meminfo: &str, name: &str) -> u64 {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).expect("the line");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

#[test]
fn pods_start_from_a_template_and_are_independent() {
    if skip() {
        return;
    }
    let node = TestNode::with_options(NodeOptions { ipv6: false, ..NodeOptions::default() });
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let template = only(directories(&node));
    let state = fs::read(template.join("state")).unwrap();
    assert!(state.windows(11).any(|name| name == b"working_set"), "what a rehearsal has touched");
    let hosts = ["one", "two", "three"];
    let pods = hosts.map(|name| node.crictl.run_pod(pod(&node, name).set("hostname", json!(name))));
    assert!(pods.iter().all(is_clone));
    assert_eq!(counts(&node), "3 pods started from a template, 0 booted");

    let containers: Vec<_> = pods.iter().map(|pod| sleeper(pod, &image)).collect();
    let sees = |script: &str| containers.iter().map(|container| container.exec(script).ok()).collect::<Vec<_>>();
    assert_eq!(sees("hostname"), hosts);
    // Nothing that must be random is the same in two of them.
    for script in [
        "cat /proc/sys/kernel/random/boot_id",
        "cat /proc/sys/kernel/random/uuid",
        "head -c 16 /dev/urandom | od -tx1",
        "cat /sys/class/net/eth0/address",
        // Where the kernel placed program, stack, heap and vDSO.
        "grep -e stack -e heap -e vdso /proc/self/maps | cut -c-12",
    ] {
        let values = sees(script);
        assert_eq!(values.iter().collect::<BTreeSet<_>>().len(), values.len(), "{script}: {values:?}");
    }
    // The clock is the node's, although the template was built before.
    let now = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let before = now();
    for seen in sees("date +%s") {
        let seen: u64 = seen.parse().unwrap();
        assert!((before.saturating_sub(1)..=now() + 1).contains(&seen), "{before} {seen}");
    }

    // Each owns little beside what it shares; a booted VM owns more than 40 MiB.
    for pid in node.pids_matching("nacelle-pod --dir ") {
        let memory = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
        assert!(kib(&memory, "Anonymous") < OWNED_KIB, "{memory}");
    }

    // What pods have written is in no template.
    let mark = "a secret that only pod one has, 7f3a91";
    containers[0].exec(&format!("echo '{mark}' >/tmp/secret; sync")).ok();
    assert_eq!(run_program("grep", ["-c", mark, template.join("memory").to_str().unwrap()]).stdout.trim(), "0");

    // The template may go while they run.
    assert_eq!(node.templates(&["rm"]).ok().lines().count(), 1);
    assert!(directories(&node).is_empty() && !template.exists());
    assert_eq!(containers[0].exec("cat /tmp/secret").ok(), mark);
    let booted = node.crictl.run_pod(pod(&node, "booted"));
    assert!(!is_clone(&booted));
    assert_eq!(counts(&node), "3 pods started from a template, 1 booted (1 not built yet)");
    node.templates(&["build"]).ok();
    assert!(is_clone(&node.crictl.run_pod(pod(&node, "again"))));
    // Templates outlive the daemon.
    let mut node = node;
    let template = only(directories(&node));
    node.kill();
    node.start();
    assert_eq!(only(directories(&node)), template);
}

/// What `nacelle-tcp-probe` prints of a connection.
struct Secrets {
    /// In units of 64 ns.
    isn: u32,
    cookie: u32,
}

fn secrets(container: &RunningContainer<'_>) -> Vec<Secrets> {
    let output = container.exec("/bin/probe").ok();
    let line = |line: &str| {
        let numbers: Vec<u32> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
        let [isn, cookie] = numbers[..] else { panic!("{output}") };
        Secrets { isn, cookie }
    };
    let lines: Vec<_> = output.lines().map(line).collect();
    assert_eq!(lines.len(), 4, "{output}");
    lines
}

/// Sequence numbers and SYN cookies of two clones follow from secrets of their own: for the same addresses and ports, at the same
/// time, they are unrelated. In one VM they are related, which shows that the comparison would notice it.
#[test]
fn secrets_of_tcp_are_unrelated_in_two_clones() {
    if skip() {
        return;
    }
    let node = TestNode::with_options(NodeOptions { ipv6: false, ..NodeOptions::default() });
    let probe = env!("CARGO_BIN_EXE_nacelle-tcp-probe");
    let image = TestImage::busybox().with_layer(|layer| layer.add_program(Path::new(probe), "bin/probe"));
    let image = node.push_and_pull(&image, "probe:1");
    let cookies = json!({"sysctls": {"net.ipv4.tcp_syncookies": "2"}});
    let pods = ["one", "two"].map(|name| node.crictl.run_pod(pod(&node, name).set("linux", cookies.clone())));
    assert!(pods.iter().all(is_clone));
    let raw = json!({"security_context": {"capabilities": {"add_capabilities": ["NET_RAW"]}}});
    let containers: Vec<_> = pods
        .iter()
        .map(|pod| pod.start(ContainerRequest::sh("probe", &image, "sleep 3600").set("linux", raw.clone())))
        .collect();
    // Within a second of each other, and in all four connections.
    let same_isn = |one: &[Secrets], other: &[Secrets]| {
        let near = |(one, other): (&Secrets, &Secrets)| one.isn.wrapping_sub(other.isn).cast_signed().abs() < 1 << 24;
        one.iter().zip(other).all(near)
    };
    let equal = |one: &[Secrets], other: &[Secrets], of: fn(&Secrets) -> u32| {
        one.iter().map(of).zip(other.iter().map(of)).filter(|(one, other)| one == other).count()
    };
    // A cookie has the minute in which it was made: the three probes are in the same one if the first and the last agree.
    let in_one_minute = || {
        let [first, other, last] = [0, 1, 0].map(|number| secrets(&containers[number]));
        (equal(&first, &last, |secrets| secrets.cookie) == 4).then_some((first, other, last))
    };
    let (first, other, last) = eventually("three probes in one minute", in_one_minute);
    assert!(same_isn(&first, &last), "the clock of one VM explains the difference");
    for ours in [&first, &last] {
        assert!(!same_isn(ours, &other), "sequence numbers");
        assert_eq!(equal(ours, &other, |secrets| secrets.cookie), 0, "cookies");
    }
}

#[test]
fn a_clone_has_all_memory_and_devices_of_its_pod() {
    if skip() {
        return;
    }
    let large = handler_config("large", "memory_mib = 128\nmax_memory_mib = 1024\nscratch_mib = 512\n");
    let node = TestNode::with_options(NodeOptions { extra: large, ipv6: false, ..NodeOptions::default() });
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let plain = node.crictl.run_pod(pod(&node, "plain"));
    let plain_container = sleeper(&plain, &image);
    let base = kib(&plain_container.exec("cat /proc/meminfo").ok(), "MemTotal");

    // 128 MiB of the template, and for 300 MiB three blocks of 128 MiB.
    let mut limited = pod(&node, "limited");
    limited.0["linux"]["resources"] = json!({"memory_limit_in_bytes": 300 << 20});
    let pod_with_limit = node.crictl.run_pod_with_handler("large", limited);
    assert!(is_clone(&pod_with_limit));
    let volume = node.directory().join("volume");
    fs::create_dir(&volume).unwrap();
    let container = ContainerRequest::sh("limited", &image, "sleep 3600")
        .set("linux", json!({"resources": {"memory_limit_in_bytes": 300 << 20}}))
        .set("mounts", json!([{"host_path": volume, "container_path": "/volume"}]));
    let container = pod_with_limit.start(container);
    let total = kib(&container.exec("cat /proc/meminfo").ok(), "MemTotal");
    let added = total - base;
    // The kernel keeps 1.6 % of it for page descriptors.
    assert!((375 << 10..=384 << 10).contains(&added), "{added}");
    // All of it can be used: more than the template has, by one process.
    let hold = "dd if=/dev/zero bs=260M count=1 | (dd bs=1 count=1 of=/dev/null; awk '/MemAvailable/ {print $2}' /proc/meminfo)";
    let available: u64 = container.exec(&format!("{hold} 2>/dev/null")).ok().parse().expect("a number");
    assert!(available + (260 << 10) < total, "{available} of {total}");
    // The kernel has derived its limits from the memory of the template.
    let in_proportion = |file: &str| {
        let of = |container: &RunningContainer<'_>| -> u64 {
            container.exec(&format!("cut -f1 {file}")).ok().trim().parse().expect("a number")
        };
        let (small, large) = (of(&plain_container), of(&container));
        let (got, expected) = (large * 100 / small, total * 100 / base);
        assert!(got.abs_diff(expected) <= 3, "{file}: {large} instead of {small}, {got} % instead of {expected} %");
    };
    for file in ["kernel/threads-max", "fs/file-max", "net/ipv4/tcp_mem", "user/max_user_namespaces"] {
        in_proportion(&format!("/proc/sys/{file}"));
    }
    let processes = |container: &RunningContainer<'_>| container.exec("ulimit -u").ok();
    assert_ne!(processes(&plain_container), processes(&container));
    container.exec("echo shared >/volume/file").ok();
    assert_eq!(fs::read_to_string(volume.join("file")).unwrap(), "shared\n");
    // Memory that is plugged in later lies behind it.
    node.crictl.call(["update", "--memory", &(500_u64 << 20).to_string(), &container.id]);
    let grown = kib(&container.exec("cat /proc/meminfo").ok(), "MemTotal");
    assert!((250 << 10..=256 << 10).contains(&(grown - total)), "{grown} {total}");
}

#[test]
fn a_damaged_template_is_built_again() {
    if skip() {
        return;
    }
    let node = TestNode::with_options(NodeOptions { ipv6: false, ..NodeOptions::default() });
    let template = only(directories(&node));
    for damage in [
        |path: &Path| fs::write(path.join("state"), "no state").unwrap(),
        |path: &Path| {
            fs::File::options().write(true).open(path.join("memory")).unwrap().set_len(1 << 20).unwrap();
        },
    ] {
        damage(&template);
        let booted = node.crictl.run_pod(pod(&node, "booted"));
        assert!(!is_clone(&booted));
        booted.remove();
        assert!(directories(&node).is_empty());
        node.templates(&["build"]).ok();
        let clone = node.crictl.run_pod(pod(&node, "clone"));
        assert!(is_clone(&clone));
        clone.remove();
    }
    assert_eq!(counts(&node), "2 pods started from a template, 2 booted (2 the template could not be used)");
}

#[test]
fn a_template_from_which_no_pod_starts_is_removed() {
    if skip() {
        return;
    }
    let node = TestNode::with_options(NodeOptions { ipv6: false, ..NodeOptions::default() });
    let template = only(directories(&node));
    // All of the kernel's memory is zeros: the clone never says a word.
    let memory = fs::File::options().write(true).open(template.join("memory")).unwrap();
    let length = memory.metadata().unwrap().len();
    memory.set_len(0).unwrap();
    memory.set_len(length).unwrap();
    for _ in 0..2 {
        assert!(directories(&node).contains(&template));
        let request = node.crictl.write_input("pod", &pod(&node, "fails").0);
        assert!(node.crictl.try_call(["runp", &request]).err().contains("boot the machine of the pod"));
    }
    assert!(directories(&node).is_empty());
    assert!(!is_clone(&node.crictl.run_pod(pod(&node, "booted"))));
}

#[test]
fn templates_that_take_too_much_are_removed() {
    if skip() {
        return;
    }
    let settings = "[sandbox]\ntemplates = \"node\"\ntemplates_max_mib = 60\n";
    let extra = handler_config("two", &format!("{SMALL_VM}vcpus = 2\n")) + settings;
    let mut node = TestNode::with_options(NodeOptions { extra, ipv6: false, ..NodeOptions::default() });
    // Each takes more than half. The daemon builds both, and the last one stays.
    eventually("two builds", || (node.log().matches("built a template").count() == 2).then_some(()));
    let last = eventually("one is removed", || Some(directories(&node)).filter(|all| all.len() == 1));
    let more = node.templates(&["build", "nacelle"]);
    assert_eq!(more.code, 0, "{more:?}");
    let last = only(last);
    eventually("one is removed", || {
        (directories(&node).len() == 1 && !directories(&node).contains(&last)).then_some(())
    });
    let config = node.directory().join("config.toml");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, text.replace("templates = \"node\"", "templates = \"off\"")).unwrap();
    node.kill();
    node.start();
    assert!(directories(&node).is_empty());
    assert!(!is_clone(&node.crictl.run_pod(pod(&node, "booted"))));
    assert!(counts(&node).starts_with("0 pods started from a template, 0 booted"));
    assert!(node.templates(&["build"]).err().contains("there is no template to build"));
}

#[test]
fn a_replaced_kernel_gets_a_template_of_its_own() {
    if skip() {
        return;
    }
    let own = tempfile::tempdir().unwrap();
    let kernel = own.path().join("vmlinux");
    fs::copy(nacelle_e2e::path_from_env("NACELLE_KERNEL"), &kernel).unwrap();
    let other = handler_config("upgraded", &format!("{SMALL_VM}vcpus = 2\n"));
    let original = format!("{:?}", nacelle_e2e::path_from_env("NACELLE_KERNEL"));
    let extra = other.replace(&original, &format!("{kernel:?}"));
    let mut node = TestNode::with_options(NodeOptions { extra, ipv6: false, ..NodeOptions::default() });
    let before = directories(&node);
    assert_eq!(before.len(), 2);
    let run = |node: &TestNode, name: &str| {
        let pod = node.crictl.run_pod_with_handler("upgraded", pod(node, name));
        let cloned = is_clone(&pod);
        pod.remove();
        cloned
    };
    assert!(run(&node, "before"));
    // As a package manager does it.
    let new = own.path().join("vmlinux.new");
    fs::copy(&kernel, &new).unwrap();
    fs::rename(&new, &kernel).unwrap();
    assert!(!run(&node, "between"));
    node.templates(&["build", "upgraded"]).ok();
    assert!(run(&node, "after"));
    let after = directories(&node);
    assert_eq!((after.len(), before.intersection(&after).count()), (2, 1), "{before:?} {after:?}");
    // A daemon that finds an old one at its start removes it.
    fs::copy(&kernel, &new).unwrap();
    fs::rename(&new, &kernel).unwrap();
    node.kill();
    node.start();
    let anew = directories(&node);
    assert_eq!((anew.len(), after.intersection(&anew).count()), (2, 1), "{after:?} {anew:?}");
}

#[test]
fn a_builder_ends_with_its_daemon() {
    if skip() {
        return;
    }
    let mut node = TestNode::with_options(NodeOptions { ipv6: false, ..NodeOptions::default() });
    node.templates(&["rm"]).ok();
    let mut build = std::process::Command::new(nacelle_e2e::path_from_env("NACELLE_BIN"));
    build.args(["templates", "build", "--config"]).arg(node.directory().join("config.toml"));
    let mut build = build.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null()).spawn().unwrap();
    let builders = |node: &TestNode| node.pids_matching("nacelle-pod --template ");
    eventually("a builder", || (!builders(&node).is_empty()).then_some(()));
    node.kill();
    build.wait().unwrap();
    eventually("no builder", || builders(&node).is_empty().then_some(()));
    node.start();
    only(directories(&node));
    let all = fs::read_dir(node.directory().join("run/templates")).unwrap().count();
    assert_eq!(all, 1, "what was not complete is gone");

    // A builder that is killed leaves nothing, and the next attempt succeeds, although pods would wait for it.
    node.templates(&["rm"]).ok();
    let killed = std::thread::scope(|scope| {
        let built = scope.spawn(|| node.templates(&["build"]));
        let pid = eventually("a builder", || builders(&node).first().copied());
        run_program("kill", ["-9", &pid.to_string()]).ok();
        built.join().unwrap()
    });
    assert!(killed.err().contains("cannot be built"));
    assert!(node.templates(&["ls"]).ok().contains("failed: "));
    assert_eq!(fs::read_dir(node.directory().join("run/templates")).unwrap().count(), 0);
    node.templates(&["build"]).ok();
    assert!(is_clone(&node.crictl.run_pod(pod(&node, "clone"))));
}

/// The process of a clone is killed at eight moments from its start on: the pod fails, or has become ready and is so no more, and nothing is
/// left of it.
#[test]
fn a_clone_whose_process_is_killed_leaves_nothing() {
    if skip() {
        return;
    }
    let node = TestNode::with_options(NodeOptions { ipv6: false, ..NodeOptions::default() });
    let template = only(directories(&node));
    let mut failed = 0;
    for round in 0..8u64 {
        let name = format!("killed-{round}");
        let request = node.crictl.write_input(&name, &pod(&node, &name).0);
        let started = std::thread::scope(|scope| {
            let started = scope.spawn(|| node.crictl.try_call(["runp", &request]));
            let pid = eventually("its process", || node.pids_matching("nacelle-pod --dir").first().copied());
            std::thread::sleep(Duration::from_millis(40 * round));
            // It may have ended by itself.
            run_program("kill", ["-9", &pid.to_string()]);
            started.join().unwrap()
        });
        failed += usize::from(started.code != 0);
        eventually("it is not ready", || node.crictl.call(["pods", "-q", "--state", "ready"]).is_empty().then_some(()));
        node.crictl.call(["rmp", "--all", "--force"]);
        assert_eq!(node.leaked(), Vec::<String>::new(), "{round}: {started:?}");
    }
    assert!(failed > 0, "none was killed before it was ready");
    // The template is not to blame.
    assert_eq!(only(directories(&node)), template);
    assert!(is_clone(&node.crictl.run_pod(pod(&node, "clone"))));
}

#[test]
fn namespaces_share_a_template_only_if_configured() {
    if skip() {
        return;
    }
    let extra = "[sandbox]\ntemplates = \"namespace\"\n".to_owned();
    let node = TestNode::with_options(NodeOptions { extra, ipv6: false, ..NodeOptions::default() });
    let run = |namespace: &str, name: &str| {
        let mut request = pod(&node, name);
        request.0["metadata"]["namespace"] = json!(namespace);
        let pod = node.crictl.run_pod(request);
        let cloned = is_clone(&pod);
        pod.remove();
        cloned
    };
    let built = |count: usize| eventually("templates", || (directories(&node).len() == count).then_some(()));
    assert!(!run("red", "one"));
    built(1);
    assert!(run("red", "two"));
    assert!(!run("blue", "one"));
    built(2);
    assert!(run("blue", "two") && run("red", "three"));
    let listed = node.templates(&["ls"]).ok();
    assert!(listed.contains(" red ") && listed.contains(" blue "), "{listed}");
}
