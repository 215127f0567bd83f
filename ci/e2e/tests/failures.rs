//! Causes the failures of docs/operator/failures.md, and compares what crictl and the log report with the page. The page is the source
//! of the expected texts.

mod failures {
    pub mod failing_disk;
    pub mod guest_files;
    pub mod plugins;
    pub mod registry;
}

use failures::registry::FailingRegistry;
use failures::{failing_disk, guest_files, plugins, registry};
use nacelle_e2e::failure_answer::{check_daemon, check_end, check_request, try_run_pod};
use nacelle_e2e::failure_page;
use nacelle_e2e::node::{NodeOptions, engine};
use nacelle_e2e::run::{eventually, run, run_program};
use nacelle_e2e::{ContainerRequest, PodRequest, TestImage, TestNode, path_from_env};
use serde_json::json;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Rows whose failure another test causes: the row, the file of the test and its name.
const ELSEWHERE: [(&str, &str, &str); 8] = [
    ("container out of memory", include_str!("containers.rs"), "a_container_out_of_memory_dies_alone"),
    ("guest out of memory", include_str!("containers.rs"), "a_container_out_of_memory_dies_alone"),
    (
        "pod's cgroup or node out of memory",
        include_str!("pressure.rs"),
        "the_oom_killer_ends_vms_in_the_order_of_their_qos_classes",
    ),
    (
        "command in progress when the pod's cgroup or node is out of memory, engine kvm",
        include_str!("pressure.rs"),
        "the_oom_killer_ends_vms_in_the_order_of_their_qos_classes",
    ),
    ("CRI socket in use", include_str!("two_daemons.rs"), "a_second_daemon_takes_nothing_from_the_first"),
    ("disk of the image store full", include_str!("images.rs"), "a_full_disk_fails_the_pull_and_nothing_else"),
    (
        "disk of the image store full during a pull",
        include_str!("images.rs"),
        "a_full_disk_fails_the_pull_and_nothing_else",
    ),
    ("damaged image", include_str!("images.rs"), "damaged_images_are_found_named_and_repaired"),
];

/// Rows that the tests of this file cause.
const HERE: [&[&str]; 8] = [
    &guest_files::ROWS,
    &guest_files::MISSING_ON_THE_NODE,
    &plugins::ROWS,
    &registry::ROWS,
    &ENDS,
    &STARTS,
    &DISKS,
    &failing_disk::ROWS,
];

const ENDS: [&str; 9] = [
    "QEMU killed",
    "agent killed, engine host",
    "pod process killed",
    "kernel panic of the guest, or the end of its agent",
    "command in progress when QEMU is killed",
    "command in progress when the agent is killed, engine host",
    "command in progress when the pod process is killed",
    "command after the end",
    "container after the end",
];
const STARTS: [&str; 5] = [
    "QEMU killed while it starts",
    "agent killed while it starts, engine host",
    "pod process killed while it starts",
    "QEMU killed while the plugins run",
    "agent killed while the plugins run, engine host",
];
const DISKS: [&str; 4] = [
    "disk of `paths.root` full",
    "disk of the scratch disks full",
    "state root without permission",
    "state root is read-only",
];

/// How often a process is killed at different moments of a pod's start.
const KILLS: u64 = 4;

/// Returns the name of a row about the process of the VM, or of the agent where pods have no VM.
fn of_engine(vm: &'static str, host: &'static str) -> &'static str {
    if engine() == "host" { host } else { vm }
}

#[test]
fn each_row_of_the_page_has_a_test() {
    let here: Vec<_> = HERE.concat();
    for row in failure_page::rows() {
        let elsewhere = ELSEWHERE.iter().any(|(failure, ..)| *failure == row.failure);
        assert!(here.contains(&row.failure) != elsewhere, "{:?} has one test", row.failure);
    }
    for (failure, file, test) in ELSEWHERE {
        failure_page::row(failure);
        assert!(file.contains(&format!("fn {test}()")), "{failure}: there is no test {test}");
        assert!(
            file.contains(&format!("\"{failure}\"")),
            "{failure}: the test {test} does not compare its text with the page"
        );
    }
    here.into_iter().for_each(|failure| drop(failure_page::row(failure)));
}

#[test]
fn requests_fail_with_their_cause() {
    let files = tempfile::tempdir().expect("the directory for temporary files is writable");
    // Pod processes have users of their own.
    fs::set_permissions(files.path(), fs::Permissions::from_mode(0o755)).expect("it is ours");
    let extra = guest_files::handlers(files.path()) + &registry::config();
    let network = "plugin_timeout = \"2s\"\n".to_owned();
    let node = TestNode::with_options(NodeOptions { extra, network, ipv6: false, ..NodeOptions::default() });
    let failing_registry = FailingRegistry::start(&node.netns);
    std::thread::scope(|scope| {
        for failure in registry::ROWS {
            scope.spawn(|| registry::check(&node, failure));
        }
        if engine() != "host" {
            guest_files::check(&node);
        }
    });
    drop(failing_registry);
    plugins::check(&node);
}

/// Kills these processes, and waits for none of them.
fn kill(pids: &[i32]) {
    for pid in pids {
        run_program("kill", ["-9", &pid.to_string()]);
    }
}

/// The process that a test kills.
#[derive(Clone, Copy, PartialEq)]
enum Victim {
    Vm,
    PodProcess,
}

impl Victim {
    fn pids(self, node: &TestNode) -> Vec<i32> {
        match self {
            Victim::Vm => node.vm_pids(),
            Victim::PodProcess => node.pids_matching("nacelle-pod --dir "),
        }
    }
}

/// Runs a pod, and kills a process of it some time after it appears. The pod is removed if it became ready before that.
fn kill_during_start(node: &TestNode, victim: Victim, after: Duration, failure: &str, after_kill: impl FnOnce()) {
    let output = std::thread::scope(|scope| {
        let request = scope.spawn(|| try_run_pod(node, ""));
        let mut victims = Vec::new();
        while victims.is_empty() && !request.is_finished() {
            victims = victim.pids(node);
        }
        // The test varies the time of the kill.
        std::thread::sleep(after);
        kill(&victim.pids(node));
        after_kill();
        request.join().expect("no panic")
    });
    match output.code {
        // A process that is killed as soon as it appears has no ready pod.
        0 if !after.is_zero() => drop(node.crictl.call(["rmp", "--force", &output.stdout])),
        _ => check_request(node, failure, &output),
    }
}

#[test]
fn the_end_of_a_vm_is_the_cause_whatever_else_fails() {
    let node = TestNode::with_options(NodeOptions { ipv6: false, ..NodeOptions::default() });
    let kills: u64 = std::env::var("NACELLE_TEST_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(KILLS);
    for number in 0..kills {
        let after = Duration::from_millis(number * 320 / kills);
        let row = of_engine("QEMU killed while it starts", "agent killed while it starts, engine host");
        kill_during_start(&node, Victim::Vm, after, row, || ());
        kill_during_start(&node, Victim::PodProcess, after, "pod process killed while it starts", || ());
    }
    // The taps end with the VM: whether they are joined before or after its end must not matter, nor that the plugin refuses then.
    plugins::wait_for_file(&node);
    for number in 0..kills {
        let row = of_engine("QEMU killed while the plugins run", "agent killed while the plugins run, engine host");
        let go = node.directory().join("go");
        kill_during_start(&node, Victim::Vm, Duration::from_millis(number * 40), row, || {
            let new = go.with_extension("new");
            fs::write(&new, if number % 2 == 0 { "" } else { "refuse" }).expect("the node's directory is writable");
            fs::rename(&new, &go).expect("it was created");
        });
        fs::remove_file(&go).expect("it was created");
    }
    plugins::restore(&node);

    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let rows = [
        (
            Victim::Vm,
            of_engine("QEMU killed", "agent killed, engine host"),
            of_engine(
                "command in progress when QEMU is killed",
                "command in progress when the agent is killed, engine host",
            ),
        ),
        (Victim::PodProcess, "pod process killed", "command in progress when the pod process is killed"),
    ];
    for (victim, end, command) in rows {
        let pod = node.crictl.run_pod(PodRequest::new("running", node.directory()));
        let container = pod.start(ContainerRequest::sh("c", &image, "echo up; sleep 1000"));
        container.wait_for_output("up");
        std::thread::scope(|scope| {
            let exec = scope.spawn(|| container.exec("touch /running; sleep 60"));
            eventually("the command runs", || (container.exec("test -e /running").code == 0).then_some(()));
            kill(&victim.pids(&node));
            check_request(&node, command, &exec.join().expect("no panic"));
        });
        check_end(&node, end, &pod.id, &container.wait_for_exit());
        check_request(&node, "command after the end", &container.exec("true"));
        let late = pod.try_create(ContainerRequest::sh("late", &image, "true"));
        check_request(&node, "container after the end", &late);
        node.crictl.call(["stop", &container.id]);
        pod.remove();
    }
    if engine() != "host" {
        panic_guest(&node, &image);
    }
}

/// Makes the kernel of a guest panic, from a privileged container.
fn panic_guest(node: &TestNode, image: &str) {
    let mut request = PodRequest::new("panics", node.directory());
    let privileged = json!({"privileged": true});
    request.0["linux"]["security_context"] = privileged.clone();
    let pod = node.crictl.run_pod(request);
    let script = "echo 2 >/proc/sys/vm/panic_on_oom && exec tail /dev/zero";
    let container = ContainerRequest::sh("c", image, script).set("linux", json!({"security_context": privileged}));
    let status = pod.start(container).wait_for_exit();
    check_end(node, "kernel panic of the guest, or the end of its agent", &pod.id, &status);
    pod.remove();
}

/// Fills a file system; the result is the file that fills it.
fn fill(directory: &Path) -> PathBuf {
    let file = directory.join("fill");
    // The space of removed files is free when the file system has written their removal, which may be during a pass.
    for _pass in 0..3 {
        run_program("sync", ["--file-system".as_ref(), directory.as_os_str()]).ok();
        let output = format!("of={}", file.display());
        run_program("dd", ["if=/dev/zero", &output, "bs=4096", "oflag=append", "conv=notrunc"]);
    }
    file
}

#[test]
fn a_full_disk_is_the_cause() {
    let node = TestNode::with_options(NodeOptions { disk_mib: Some(24), ipv6: false, ..NodeOptions::default() });
    let root = node.directory().join("root");
    let file = fill(&root);
    check_request(&node, "disk of `paths.root` full", &try_run_pod(&node, ""));
    fs::remove_file(file).expect("it was created");
    if engine() != "host" {
        let scratch = root.join("scratch");
        run_program("mount", ["-t", "tmpfs", "-o", "size=16k", "none", &scratch.display().to_string()]).ok();
        let output = try_run_pod(&node, "");
        run_program("umount", [scratch]).ok();
        check_request(&node, "disk of the scratch disks full", &output);
    }
    let again = try_run_pod(&node, "").ok();
    node.crictl.call(["rmp", "--force", &again]);
}

#[test]
fn an_error_of_the_disk_is_the_cause() {
    match failing_disk::find_loop_devices() {
        Ok(()) => failing_disk::check(),
        Err(why) => println!("skipped: {why}"),
    }
}

#[test]
fn what_the_node_lacks_is_the_cause() {
    if engine() == "host" {
        println!("skipped: pods without a guest need neither QEMU nor KVM");
        return;
    }
    let missing: Vec<PathBuf> = ["/usr/bin/qemu-system-x86_64", "/dev/kvm"].map(PathBuf::from).into();
    let missing = missing.into_iter().filter(|path| path.exists()).collect();
    let extra = guest_files::handler_of_engine("qemu") + &guest_files::handler_of_engine("kvm");
    let node = TestNode::with_options(NodeOptions { extra, missing, ipv6: false, ..NodeOptions::default() });
    for (failure, engine) in guest_files::MISSING_ON_THE_NODE.into_iter().zip(["qemu", "kvm"]) {
        check_request(&node, failure, &try_run_pod(&node, engine));
    }
}

#[test]
fn a_daemon_without_its_root_says_so() {
    let directory = tempfile::tempdir().expect("the directory for temporary files is writable");
    let config = directory.path().join("config.toml");
    let path = |name: &str| directory.path().join(name);
    fs::create_dir(path("root")).expect("it is ours");
    let text =
        format!("[paths]\nroot = {:?}\nrun = {:?}\nsocket = {:?}\n", path("root/a"), path("run"), path("socket"));
    fs::write(&config, text + &format!("[network]\nnetns_dir = {:?}\n", path("netns"))).expect("it is ours");
    // Root may write everywhere but in a read-only file system, and where it lacks the capabilities for it.
    let read_only =
        format!("mount --bind {0} {0} && mount -o remount,bind,ro {0} && exec \"$@\"", path("root").display());
    let unprivileged = format!(
        "chown 1:1 {0} && chmod 700 {0} && exec setpriv --bounding-set -dac_override,-dac_read_search --inh-caps -all \"$@\"",
        path("root").display()
    );
    for (failure, script, code) in
        [("state root is read-only", read_only, 1), ("state root without permission", unprivileged, 4)]
    {
        let mut serve = std::process::Command::new("timeout");
        serve.args(["40", "unshare", "--mount", "sh", "-c", &script, "sh"]).arg(path_from_env("NACELLE_BIN"));
        let ended = run(serve.args(["serve", "--config"]).arg(&config));
        assert_eq!(ended.code, code, "{failure}: {ended:?}");
        check_daemon(failure, &ended.stderr);
    }
}
