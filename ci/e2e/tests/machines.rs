//! Tests machine pods with crictl: pods whose container is a VM with a disk of its own. Most of them boot a disk of one sector,
//! which reports its state on the console; one boots Debian.

use nacelle_e2e::machine::{Debian, annotated_pod, boot_disk, machine_container, machine_node, push_boot_image};
use nacelle_e2e::run::ProgramOutput;
use nacelle_e2e::{ContainerRequest, PodRequest, TestImage, TestNode, eventually};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

fn machine_pod(node: &TestNode, image: &str) -> PodRequest {
    let disks = format!("root=image:{image},boot=1;data=empty:1Mi");
    annotated_pod(node, "machine", &[("kind", "machine"), ("memory", "64Mi"), ("disks", &disks)])
}

#[test]
fn a_vm_boots_from_its_image_and_stops_by_its_power_button() {
    let node = machine_node();
    let image = push_boot_image(&node);
    let pod = node.crictl.run_pod_with_handler("vm", machine_pod(&node, &image));
    let first = pod.start(machine_container(&image, 0).set("stdin", json!(true)));
    first.wait_for_output("boot 1\n");
    // Input goes to the VM's console; "r" resets it: the same VM, with what it wrote.
    let attached = node.crictl.call_with_input(["attach", "-i", &first.id], b"hellor");
    assert_eq!(attached.code, 0, "{attached:?}");
    first.wait_for_output("hello");
    first.wait_for_output("boot 2\n");
    assert_eq!(first.status()["state"], "CONTAINER_RUNNING");

    let status = node.crictl.try_call(["exec", "--sync", &first.id, "@vm", "status"]).ok();
    let status: Value = serde_json::from_str(&status).unwrap();
    assert_eq!((&status["phase"], &status["agentConnected"]), (&json!("Running"), &json!(false)), "{status}");
    let vm = |verb: &str| node.crictl.try_call(["exec", "--sync", &first.id, "@vm", verb]);
    for _ in 0..2 {
        vm("pause").ok();
        assert!(vm("status").ok().contains("\"Paused\""));
    }
    for _ in 0..2 {
        vm("unpause").ok();
        assert!(vm("status").ok().contains("\"Running\""));
    }
    let picture = vm("screenshot");
    assert_eq!(picture.code, 0, "{}", picture.stderr);
    assert!(picture.stdout.contains("PNG"), "a picture");
    assert!(vm("fly").err().contains("power-button"));
    // There is no guest agent that could do it.
    for refused in [first.exec("true").err(), vm("guest-ping").err()] {
        assert!(refused.contains("the guest agent"), "{refused}");
    }

    node.crictl.call(["stop", "--timeout", "60", &first.id]);
    let ended = first.wait_for_exit();
    assert_eq!((&ended["exitCode"], &ended["reason"]), (&json!(0), &json!("Completed")), "{ended}");
    first.wait_for_output("pressed\n");

    // The next container is a new VM: its own disk is as in the image.
    let second = pod.start(machine_container(&image, 1));
    second.wait_for_output("boot 1\n");
    let both = pod.try_create(machine_container(&image, 2));
    node.crictl.call(["stop", "--timeout", "0", &second.id]);
    assert_eq!(second.wait_for_exit()["exitCode"], 137);
    drop(both);
    pod.remove();
}

#[test]
fn a_vm_outlives_the_daemon_and_ends_with_its_pod() {
    let mut node = machine_node();
    let image = push_boot_image(&node);
    let config = machine_pod(&node, &image);
    let again = PodRequest(config.0.clone());
    let (pod, id) = {
        let pod = node.crictl.run_pod_with_handler("vm", config);
        let running = pod.start(machine_container(&image, 0).set("stdin", json!(true)));
        running.wait_for_output("boot 1\n");
        (pod.id.clone(), running.id.clone())
    };
    node.kill();
    node.start();
    let state =
        |node: &TestNode, id: &str| node.crictl.call_json(["inspect", "-o", "json", id])["status"]["state"].clone();
    eventually("the machine is found again", || (state(&node, &id) == "CONTAINER_RUNNING").then_some(()));
    assert_eq!(node.crictl.call_with_input(["attach", "-i", &id], b"q").code, 0);
    eventually("the machine has ended", || (state(&node, &id) == "CONTAINER_EXITED").then_some(()));
    let pod = node.crictl.pod_handle(&pod, again);
    let console = pod.inspect()["info"]["console"].to_string();
    assert!(console.contains("boot 1"), "the flight recorder has it: {console}");
    pod.remove();
}

#[test]
fn invalid_machine_pods_are_refused_before_they_are_created() {
    let node = machine_node();
    let image = push_boot_image(&node);
    let run = |annotations: &[(&str, &str)]| {
        let file = node.crictl.write_input("pod", &annotated_pod(&node, "refused", annotations).0);
        node.crictl.try_call(["runp", "--runtime", "vm", &file]).err()
    };
    let machine = [("kind", "machine"), ("memory", "64Mi")];
    let disk = ("disks", "root=image:a.example/a:1");
    for (error, words) in [
        (run(&machine[..1]), "spec.domain.memory.guest: Required value"),
        (run(&machine), "there is nothing to boot"),
        (run(&[machine[0], machine[1], disk, ("firmware", "efi-secure"), ("machine", "pc")]), "secureBoot"),
        (run(&[machine[0], machine[1], disk, ("power", "off")]), "started again"),
        (run(&[machine[0], machine[1], disk, ("cpus", "0")]), "domain.cpu"),
        (run(&[("memory", "64Mi"), ("cloud-init", "#cloud-config")]), "cloud"),
    ] {
        assert!(error.contains(words), "{words:?} in {error}");
    }
    let other = annotated_pod(&node, "other", &[machine[0], machine[1], ("disks", "root=image:nowhere.example/a:1")]);
    let pod = node.crictl.run_pod_with_handler("vm", other);
    for (container, words) in [
        (machine_container(&image, 0), "another one"),
        (ContainerRequest::sh("machine", &image, "true"), "config.command"),
        (
            machine_container(&image, 0)
                .set("mounts", json!([{"host_path": node.directory(), "container_path": "/data"}])),
            "config.mounts.container_path",
        ),
    ] {
        let error = pod.try_create(container).err();
        assert!(error.contains(words), "{words:?} in {error}");
    }
    pod.remove();
}

/// Returns a pod that is a run of the VM `db`.
fn persistent_vm_pod(node: &TestNode, image: &str, more: &[(&str, &str)]) -> PodRequest {
    let disks = format!("root=image:{image},boot=1;data=empty:1Mi");
    let all = [("kind", "machine"), ("memory", "64Mi"), ("disks", disks.as_str()), ("name", "db")];
    // The last value of an annotation counts.
    annotated_pod(node, "db", &[&all[..], more].concat())
}

/// Returns the identity arguments of QEMU.
fn identity_arguments(node: &TestNode) -> Vec<String> {
    let lines = nacelle_e2e::census::processes(&node.directory().join("run"));
    let (_, line) = lines.into_iter().find(|(_, line)| line.contains(" -uuid ")).expect("the machine runs");
    let words: Vec<&str> = line.split([' ', ',']).collect();
    let uuid = words.windows(2).find(|pair| pair[0] == "-uuid").expect("it has one")[1];
    let mac = words.iter().find(|word| word.starts_with("mac=")).expect("it has one");
    vec![uuid.to_owned(), (*mac).to_owned()]
}

fn vm_phase(node: &TestNode, id: &str) -> String {
    let status = node.crictl.try_call(["exec", "--sync", id, "@vm", "status"]).ok();
    let status: Value = serde_json::from_str(&status).expect("it is JSON");
    status["phase"].as_str().unwrap_or_default().to_owned()
}

#[test]
fn a_persistent_vm_outlives_its_pods() {
    let mut node = machine_node();
    let image = push_boot_image(&node);
    let first = node.crictl.run_pod_with_handler("vm", persistent_vm_pod(&node, &image, &[]));
    let machine = first.start(machine_container(&image, 0).set("stdin", json!(true)));
    machine.wait_for_output("boot 1\n");
    let known = identity_arguments(&node);
    // A VM has one run at a time, and the error names the pod that has it.
    let second = node.crictl.write_input("pod", &persistent_vm_pod(&node, &image, &[]).0);
    let refused = node.crictl.try_call(["runp", "--runtime", "vm", &second]).err();
    assert!(refused.contains("FailedPrecondition") && refused.contains(&first.id), "{refused}");
    // The VM powers itself off, and runs again by its run strategy.
    node.crictl.call_with_input(["attach", "-i", &machine.id], b"q");
    machine.wait_for_output("boot 2\n");
    assert_eq!(
        (machine.status()["state"].clone(), identity_arguments(&node)),
        (json!("CONTAINER_RUNNING"), known.clone())
    );
    first.remove();

    let pod = {
        let next = node.crictl.run_pod_with_handler("vm", persistent_vm_pod(&node, &image, &[]));
        next.start(machine_container(&image, 0)).wait_for_output("boot 3\n");
        next.id.clone()
    };
    assert_eq!(identity_arguments(&node), known);
    // Its processes are killed, and the daemon with them.
    node.kill();
    for process in node.pids_matching("") {
        nacelle_e2e::run::run_program("kill", ["-9", &process.to_string()]);
    }
    node.start();
    node.crictl.call(["rmp", "--force", &pod]);
    let last = node.crictl.run_pod_with_handler("vm", persistent_vm_pod(&node, &image, &[]));
    let machine = last.start(machine_container(&image, 0));
    machine.wait_for_output("boot 4\n");
    assert_eq!(identity_arguments(&node), known);
    // Another image means another disk of the same VM.
    last.remove();
    let other = node.push_and_pull(
        &TestImage::busybox()
            .with_layer(|layer| layer.add_file("disk/boot.img", &boot_disk(), 0o440))
            .with_config("Env", json!(["A=b"])),
        "boot:2",
    );
    let last = node.crictl.run_pod_with_handler("vm", persistent_vm_pod(&node, &other, &[]));
    let machine = last.start(machine_container(&other, 0));
    machine.wait_for_output("boot 1\n");
    assert_eq!(identity_arguments(&node), known);
    last.remove();
}

#[test]
fn a_persistent_vm_runs_only_for_pods_that_expect_its_machine_id() {
    const ID: &str = "8b0d4a52-7c1e-4e0b-9a57-3f6f0f7f2d11";
    let mut node = machine_node();
    let image = push_boot_image(&node);
    let new = format!("{ID},new");
    let pod_with = |node: &TestNode, id: &str| persistent_vm_pod(node, &image, &[("machine-id", id)]);
    let refused = |node: &TestNode, id: &str| {
        let file = node.crictl.write_input("pod", &pod_with(node, id).0);
        node.crictl.try_call(["runp", "--runtime", "vm", &file]).err()
    };
    let list = |node: &TestNode| node.nacelle_json(&["vm", "ls"]);
    let unknown = refused(&node, ID);
    assert!(unknown.contains("FailedPrecondition") && unknown.contains("blank disks"), "{unknown}");
    assert!(refused(&node, "a,create").contains("must be ID or ID,new"));
    assert_eq!(list(&node), json!([]), "a refused pod creates nothing");

    for boot in ["boot 1\n", "boot 2\n", "boot 3\n"] {
        let pod = node.crictl.run_pod_with_handler("vm", pod_with(&node, if boot == "boot 3\n" { ID } else { &new }));
        pod.start(machine_container(&image, 0)).wait_for_output(boot);
        assert_eq!(list(&node)[0]["machineId"], ID);
        pod.remove();
        node.kill();
        node.start();
    }
    assert_eq!((&list(&node)[0]["machineId"], &list(&node)[0]["phase"]), (&json!(ID), &json!("Stopped")));
    for other in ["another", "another,new"] {
        let error = refused(&node, other);
        assert!(error.contains("FailedPrecondition") && error.contains(ID), "{error}");
    }
}

#[test]
fn a_vm_stops_and_starts_by_verbs() {
    let mut node = machine_node();
    let image = push_boot_image(&node);
    let (pod, id, log) = {
        let pod =
            node.crictl.run_pod_with_handler("vm", persistent_vm_pod(&node, &image, &[("run-strategy", "Halted")]));
        let machine = pod.start(machine_container(&image, 0));
        assert!(machine.exec("true").err().contains("is stopped"));
        assert_eq!(machine.status()["state"], "CONTAINER_RUNNING");
        (pod.id.clone(), machine.id.clone(), machine.log.clone())
    };
    let vm = |node: &TestNode, verb: &str| node.crictl.try_call(["exec", "--sync", &id, "@vm", verb]);
    let becomes = |node: &TestNode, wanted: &str| {
        eventually(wanted, || (vm_phase(node, &id) == wanted).then_some(()));
    };
    let says = |text: &str| {
        let stdout_of = || fs::read_to_string(&log).unwrap_or_default().contains(text);
        eventually(&format!("the machine says {text:?}"), || stdout_of().then_some(()));
    };
    becomes(&node, "Stopped");
    for verb in ["pause", "unpause", "reset", "power-button", "power-off", "screenshot", "soft-reboot", "guest-info"] {
        assert!(vm(&node, verb).err().contains("is stopped"), "{verb} of a stopped VM");
    }
    vm(&node, "stop").ok();
    vm(&node, "start").ok();
    says("boot 1");
    vm(&node, "start").ok();
    becomes(&node, "Running");
    // Also by a daemon that was started after the request.
    node.kill();
    node.start();
    eventually("the pod is found", || (vm(&node, "status").code == 0).then_some(()));
    vm(&node, "restart").ok();
    says("pressed");
    says("boot 2");
    becomes(&node, "Running");
    for _ in 0..2 {
        vm(&node, "stop").ok();
        becomes(&node, "Stopped");
    }
    vm(&node, "start").ok();
    says("boot 3");
    vm(&node, "power-off").ok();
    becomes(&node, "Stopped");
    // A stopped VM ends without waiting.
    node.crictl.call(["stop", "--timeout", "60", &id]);
    let state = || node.crictl.call_json(["inspect", "-o", "json", &id])["status"].clone();
    let ended = eventually("it has ended", || Some(state()).filter(|status| status["state"] == "CONTAINER_EXITED"));
    assert_eq!(ended["exitCode"], 0);
    node.crictl.call(["rmp", "--force", &pod]);
}

#[test]
fn a_vm_that_is_killed_repeatedly_keeps_its_disk_and_runs_once() {
    let node = machine_node();
    let image = push_boot_image(&node);
    let pod = node.crictl.run_pod_with_handler("vm", persistent_vm_pod(&node, &image, &[]));
    let machine = pod.start(machine_container(&image, 0));
    machine.wait_for_output("boot 1\n");
    let running = || {
        let lines = nacelle_e2e::census::processes(&node.directory().join("run"));
        lines.into_iter().filter(|(_, line)| line.contains(" -uuid ")).map(|(pid, _)| pid).collect::<Vec<_>>()
    };
    let boots = |output: &str| output.matches("boot ").count();
    for round in 0..20_u64 {
        let [pid] = running()[..] else { panic!("it runs once: {:?}", running()) };
        // At a different moment each time, from before the firmware to after the disk was written.
        std::thread::sleep(std::time::Duration::from_millis(round * 37 % 400));
        nacelle_e2e::run::run_program("kill", ["-9", &pid.to_string()]).ok();
        eventually("it runs again", || {
            // The back-off would grow each time.
            let started = node.crictl.try_call(["exec", "--sync", &machine.id, "@vm", "start"]);
            let running = running();
            (started.code == 0 && !running.is_empty() && running != [pid]).then_some(())
        });
    }
    let before = boots(&machine.output());
    eventually("it has booted", || (boots(&machine.output()) > before).then_some(()));
    // Data that were not flushed may be lost, but nothing else: each boot has found a count that an earlier one has written.
    let output = machine.output();
    // A line may have been truncated.
    let counts: Vec<u8> = output.lines().filter_map(|line| line.rsplit_once("boot ")?.1.bytes().next()).collect();
    assert!(counts.iter().all(|count| (b'1'..=b'1' + 21).contains(count)), "{counts:?}");
    node.crictl.call(["stop", "--timeout", "60", &machine.id]);
    machine.wait_for_exit();
    if let Ok(mut disks) = fs::read_dir(node.directory().join("root/machines")) {
        let disk = disks.next().expect("it keeps its disk").expect("it can be read").path().join("root.qcow2");
        let check = std::process::Command::new("qemu-img").arg("check").arg(&disk).output();
        // Without the program the check is skipped; 3 means leaked clusters.
        let code = check.map_or(Some(0), |check| check.status.code());
        assert!(matches!(code, Some(0 | 3)), "{code:?}");
    }
    pod.remove();
}

/// A running `nacelle vm watch`. Dropping it ends the program.
struct Watch {
    program: Child,
    lines: mpsc::Receiver<String>,
}

impl Watch {
    fn start(program: &Path, config: &str) -> Watch {
        let mut command = Command::new(program);
        let command = command.args(["vm", "watch", "--config", config]).stdout(Stdio::piped());
        let mut program = command.spawn().expect("nacelle can be started");
        let output = BufReader::new(program.stdout.take().expect("its output is a pipe"));
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Watch { program, lines }
    }

    /// Waits for a line with this phase. A change of the status is reported at once, and not by the list every 30 seconds.
    fn wait_for_phase(&mut self, name: &str, phase: &str) {
        self.wait_for(&format!("{name} is {phase}"), |machine| machine["name"] == name && machine["phase"] == phase);
    }

    /// Waits for a line that is accepted.
    fn wait_for(&mut self, what: &str, accepts: impl Fn(&Value) -> bool) {
        let (until, mut seen) = (Instant::now() + Duration::from_secs(15), Vec::new());
        loop {
            let line = self.lines.recv_timeout(until.saturating_duration_since(Instant::now()));
            let line = line.unwrap_or_else(|_late| panic!("{what}, and the watch has only printed {seen:?}"));
            let machine: Value = serde_json::from_str(&line).expect("a line is JSON");
            if accepts(&machine) {
                return;
            }
            seen.push(line);
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.program.kill().and_then(|()| self.program.wait());
    }
}

#[test]
fn the_vm_commands_list_and_control_vms() {
    let node = machine_node();
    let image = push_boot_image(&node);
    let config = node.directory().join("config.toml").display().to_string();
    let program = nacelle_e2e::path_from_env("NACELLE_BIN");
    let vm = |words: &[&str]| {
        let words = [&["vm"], words, &["--config", &config]].concat();
        nacelle_e2e::run::run_program(&program, words)
    };
    let of = |verb: &str, name: &str| vm(&[verb, name, "--namespace", "e2e"]);
    let describe = |name: &str| node.nacelle_json(&["vm", "describe", name, "--namespace", "e2e"]);
    let becomes = |name: &str, phase: &str| {
        eventually(&format!("{name} is {phase}"), || (describe(name)["phase"] == phase).then_some(()));
    };
    assert!(of("pause", "db").err().contains("NotFound"));
    let other = node.crictl.run_pod_with_handler("vm", machine_pod(&node, &image));
    let one = node.crictl.run_pod_with_handler("vm", persistent_vm_pod(&node, &image, &[]));
    becomes("db", "Pending");
    assert!(of("pause", "db").err().contains("FailedPrecondition"));
    other.start(machine_container(&image, 0)).wait_for_output("boot 1\n");
    let db = one.start(machine_container(&image, 0));
    db.wait_for_output("boot 1\n");
    becomes("db", "Running");
    let table = vm(&["ls"]).ok();
    assert!(table.lines().count() == 3 && table.contains("machine") && table.contains("Always"), "{table}");
    assert_eq!(vm(&["list", "--namespace", "empty"]).ok().lines().count(), 1);
    let known = describe("db");
    assert_eq!((&known["outlivesPods"], &known["memoryBytes"]), (&json!(true), &json!(64 << 20)), "{known}");
    assert_eq!(identity_arguments(&node).len(), 2);
    let mut watch = Watch::start(&program, &config);
    watch.wait_for_phase("db", "Running");
    for (verb, phase) in [("pause", "Paused"), ("unpause", "Running"), ("stop", "Stopped"), ("start", "Running")] {
        for _ in 0..2 {
            of(verb, "db").ok();
        }
        becomes("db", phase);
        watch.wait_for_phase("db", phase);
    }
    drop(watch);
    of("restart", "db").ok();
    db.wait_for_output("boot 3\n");
    of("power-off", "db").ok();
    db.wait_for_output("boot 4\n");
    of("reset", "db").ok();
    db.wait_for_output("boot 5\n");
    // The disk has counted five boots, and the memory holds the running program.
    of("snapshot", "db").err();
    let snap = |verb: &str, name: &str| vm(&[verb, "db", name, "--namespace", "e2e"]);
    snap("snapshot", "five").ok();
    assert!(snap("snapshot", "five").err().contains("has this name"));
    assert!(snap("snapshot", "5").err().contains("digits alone"));
    of("reset", "db").ok();
    db.wait_for_output("boot 6\n");
    for _ in 0..2 {
        snap("restore", "five").ok();
    }
    of("reset", "db").ok();
    eventually("the disk is as it was", || (db.output().matches("boot 6\n").count() == 2).then_some(()));
    let listed = of("snapshots", "db").ok();
    assert!(listed.contains("five "), "{listed}");
    assert!(snap("restore", "six").err().contains("no snapshot"));
    for _ in 0..2 {
        snap("rm-snapshot", "five").ok();
    }
    assert_eq!(of("snapshots", "db").ok().lines().count(), 1);
    let picture = node.directory().join("screen.png");
    vm(&["screenshot", "db", "--namespace", "e2e", "--output", &picture.display().to_string()]).ok();
    assert!(fs::read(&picture).expect("it is there").starts_with(b"\x89PNG"));
    // Only a VM that outlives its pods can be stopped.
    assert!(of("stop", "machine").err().contains("make the VM persistent"));
    assert!(of("guest-info", "db").err().contains("the guest agent"));
    assert!(of("rm", "db").err().contains(&one.id), "it is held");
    one.remove();
    assert_eq!((&describe("db")["phase"], &describe("db")["uuid"]), (&json!("Stopped"), &known["uuid"]));
    assert!(of("start", "db").err().contains("has no pod"));
    // Another VM with the same disk content.
    let copy = |to: &str| vm(&["clone", "db", to, "--namespace", "e2e"]);
    copy("twin").ok();
    assert!(copy("twin").err().contains("AlreadyExists"));
    assert!(copy("Twin").err().contains("InvalidArgument"));
    assert_ne!(describe("twin")["uuid"], known["uuid"]);
    let twin = persistent_vm_pod(&node, &image, &[("name", "twin")]);
    let twin = node.crictl.run_pod_with_handler("vm", twin);
    twin.start(machine_container(&image, 0)).wait_for_output("boot 7\n");
    twin.remove();
    of("rm", "twin").ok();
    of("rm", "db").ok();
    let gone = of("rm", "db");
    assert!(gone.code == 3 && gone.stderr.contains("NotFound"), "{gone:?}");
    assert!(of("describe", "db").err().contains("NotFound"));
    assert!(of("rm", "machine").err().contains("delete the pod"));
    let next = node.crictl.run_pod_with_handler("vm", persistent_vm_pod(&node, &image, &[]));
    next.start(machine_container(&image, 0)).wait_for_output("boot 1\n");
    assert_ne!(describe("db")["uuid"], known["uuid"]);
    next.remove();
    of("rm", "db").ok();
    other.remove();
}

/// How Debian is booted.
#[derive(Clone, Copy, PartialEq)]
enum BootMethod {
    Bios,
    /// By UEFI, with secure boot.
    Uefi,
    /// By its kernel directly, without a boot loader.
    Kernel,
}

#[test]
fn debian_boots_by_firmware_bios() {
    check_debian(BootMethod::Bios);
}

/// The variables with the keys of secure boot, of the package ovmf. The test node has none: system management mode in a nested guest
/// breaks its QEMU down (docs/contributor/test-node.md).
const SECURE_BOOT_VARIABLES: &str = "/usr/share/OVMF/OVMF_VARS_4M.ms.fd";

#[test]
fn debian_boots_by_firmware_uefi() {
    if !Path::new(SECURE_BOOT_VARIABLES).exists() {
        println!("skipped: {SECURE_BOOT_VARIABLES} does not exist: the package ovmf is not installed");
        return;
    }
    check_debian(BootMethod::Uefi);
}

#[test]
fn debian_boots_by_its_kernel() {
    check_debian(BootMethod::Kernel);
}

/// Hot-plugs and unplugs a disk while the guest runs, where the board has slots for one.
fn check_hot_plug(node: &TestNode, machine: &str, has_slots: bool, exec: impl Fn(&str) -> ProgramOutput) {
    let vm = |verb: &str, what: &str| node.crictl.try_call(["exec", "--sync", machine, "@vm", verb, what]);
    let added = vm("add-volume", "extra=64Mi");
    if !has_slots {
        assert!(added.err().contains("its board has no hot-plug slots"));
        return;
    }
    added.ok();
    let disk = "/dev/disk/by-id/virtio-extra";
    eventually("the guest has found it", || (exec(&format!("test -b {disk}")).code == 0).then_some(()));
    let written =
        exec(&format!("echo written >{disk} && sync && head -c 7 {disk} && blockdev --getsize64 {disk}")).ok();
    assert_eq!(written.trim(), format!("written{}", 64 << 20));
    for _ in 0..2 {
        vm("rm-volume", "extra").ok();
        assert_eq!(exec(&format!("test -e {disk}")).code, 1, "the guest has let go of it");
    }
}

/// The clock settings for systems that count ticks.
const CLOCK: &str = "domain: {features: {apic: {}}, clock: {utc: {}, timer: {hpet: {present: false}, pit: {tickPolicy: delay}, \
                     rtc: {tickPolicy: catchup}, kvm: {present: false}}}}";

/// A secret with a key for a user that exists and one that does not, and a secret with a password for another.
const CREDENTIALS: &str = "accessCredentials: [{sshPublicKey: {source: {secret: {secretName: keys}}, propagationMethod: {qemuGuestAgent: \
                           {users: [debian, stranger]}}}}, {userPassword: {source: {secret: {secretName: words}}, \
                           propagationMethod: {qemuGuestAgent: {}}}}]";

/// The guest agent installs the credentials of the secrets, and their later changes.
fn check_credentials(node: &TestNode, machine: &str, exec: impl Fn(&str) -> ProgramOutput) {
    let mine = "/home/debian/.ssh/authorized_keys";
    let has = |key: &str| exec(&format!("grep -q {key} {mine}")).code == 0;
    eventually("the first key is there", || has("first@e2e").then_some(()));
    eventually("the password is there", || exec("getent shadow root").stdout.starts_with("root:$").then_some(()));
    let status = || node.crictl.try_call(["exec", "--sync", machine, "@vm", "status"]).ok();
    eventually("the status names the missing user", || status().contains("stranger").then_some(()));
    fs::write(node.directory().join("keys/admins"), "ssh-ed25519 AAAAC3Nz second@e2e\n")
        .expect("the directory is there");
    eventually("the second key is there", || has("second@e2e").then_some(()));
    assert!(!has("first@e2e"), "the first one is not");
    assert!(exec(&format!("grep -vc @e2e {mine}")).ok().trim() != "0", "cloud-init's is");
}

/// Boots Debian from `ci/disk-image`, and tests cloud-init, the guest agent and ssh in it.
fn check_debian(start: BootMethod) {
    let Some(debian) = Debian::from_env() else {
        println!("skipped: NACELLE_DISK_IMAGE is not set: ci/disk-image makes the disk of Debian");
        return;
    };
    if nacelle_e2e::run::run(std::process::Command::new("sh").args(["-c", "command -v ssh-keygen"])).code != 0 {
        println!("skipped: this node has no ssh-keygen");
        return;
    }
    let node = machine_node();
    let image = debian.push_image(&node);
    let ssh = node.directory().join("key");
    nacelle_e2e::run::run_program("ssh-keygen", ["-q", "-t", "ed25519", "-N", "", "-f", &ssh.display().to_string()])
        .ok();
    let key = fs::read_to_string(ssh.with_extension("pub")).expect("ssh-keygen has made it");
    let disks = format!("root=image:{image},boot=1;data=empty:64Mi,serial=data");
    let data = "#cloud-config\nwrite_files: [{path: /etc/nacelle-was-here, content: \"yes\\n\"}]\n";
    let line = debian.command_line();
    let how = match start {
        BootMethod::Bios => vec![("firmware", "bios"), ("spec", CLOCK)],
        BootMethod::Uefi => vec![("firmware", "efi-secure")],
        BootMethod::Kernel => vec![
            ("kernel-image", image.as_str()),
            ("kernel", "/boot/vmlinuz"),
            ("initrd", "/boot/initrd.img"),
            ("kernel-args", &line),
            ("spec", CREDENTIALS),
            // The network configuration that cloud-init would provide comes from DHCP.
            ("cloud-init-network", "{version: 2, ethernets: {eth0: {dhcp4: true}}}"),
        ],
    };
    let machine = [
        ("kind", "machine"),
        ("memory", "768Mi"),
        ("cpus", "2"),
        ("disks", &disks),
        ("cloud-init", data),
        ("ssh-keys", key.trim()),
    ];
    let pod = annotated_pod(&node, "debian", &[&machine[..], &how].concat());
    let pod = node.crictl.run_pod_with_handler("vm", pod.set("hostname", json!("db")));
    let secrets = [("keys", "admins", "ssh-ed25519 AAAAC3Nz first@e2e\n"), ("words", "root", "a word of e2e\n")];
    let mounts = secrets.map(|(secret, file, text)| {
        let directory = node.directory().join(secret);
        fs::create_dir(&directory).expect("the node's directory is writable");
        fs::write(directory.join(file), text).expect("it is");
        json!({"host_path": directory, "container_path": format!("/run/nacelle/vm/secret-{secret}"), "readonly": true})
    });
    let mounts = if start == BootMethod::Kernel { mounts.to_vec() } else { Vec::new() };
    let machine = pod.start(machine_container(&image, 0).set("mounts", json!(mounts)));
    let config = node.directory().join("config.toml").display().to_string();
    let mut watch = Watch::start(&nacelle_e2e::path_from_env("NACELLE_BIN"), &config);
    machine.wait_for_output("Debian GNU/Linux 12 db ttyS0");
    let exec = |script: &str| machine.exec(script);
    eventually("the guest agent answers", || (exec("true").code == 0).then_some(()));
    watch.wait_for("the guest agent is connected", |machine| machine["agentConnected"] == true);
    drop(watch);
    eventually("cloud-init has ended", || (exec("test -e /run/cloud-init/result.json").code == 0).then_some(()));
    assert_eq!(exec("cat /etc/nacelle-was-here; hostname").ok().trim(), "yes\ndb");
    assert!(exec("exit 7").err().contains("exited with 7"));
    node.crictl.try_call(["exec", "--sync", &machine.id, "@vm", "guest-ping"]).ok();
    if start == BootMethod::Kernel {
        check_credentials(&node, &machine.id, |script| exec(script));
    }
    // Secure boot was active: the variable's attributes, and 1.
    let signed = "od -An -tu1 /sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c";
    let signed = exec(&format!("test ! -d /sys/firmware/efi || {signed}")).ok();
    assert_eq!(signed.split_whitespace().last(), (start == BootMethod::Uefi).then_some("1"));
    assert_eq!(exec("ls /sys/bus/pci/devices | grep -q .").code == 0, start != BootMethod::Kernel);
    let addresses = exec("ip -o address show").ok();
    assert!(addresses.contains(&pod.ip()), "the pod's address is the guest's: {addresses}");
    let clocks = exec("cat /sys/devices/system/clocksource/clocksource0/available_clocksource").ok();
    assert_eq!(clocks.contains("hpet"), start == BootMethod::Uefi, "{clocks}");
    // In the order of the specification, and by its serial number.
    assert_eq!(exec("basename $(readlink /dev/disk/by-id/virtio-data)").ok().trim(), "vdb");
    let words = ["-i", &ssh.display().to_string(), "-oStrictHostKeyChecking=no", "-oUserKnownHostsFile=/dev/null"];
    let target = format!("debian@{}", pod.ip());
    let output = node.run_in_netns("ssh", &[&words[..], &[&target, "cat", "/etc/hostname"]].concat());
    assert_eq!(output.stdout.trim(), "db", "{output:?}");
    // The daemon connects to ports of the guest: the pod process has no network of the node.
    let mut forward = node.crictl.spawn(["port-forward", &pod.id, "8022:22"]);
    let read_banner = "sleep 5 | timeout 60 busybox nc 127.0.0.1 8022 | head -n 1";
    eventually("the guest's ssh server answers through the forwarded port", || {
        node.run_in_netns("sh", &["-c", read_banner]).stdout.starts_with("SSH-2.0").then_some(())
    });
    forward.kill().expect("it runs");
    forward.wait().expect("it has ended");
    let picture = node.crictl.try_call(["exec", "--sync", &machine.id, "@vm", "screenshot"]);
    match start {
        BootMethod::Kernel => assert!(picture.err().contains("screen")),
        _ => assert!(picture.code == 0 && picture.stdout.len() > 1000, "{}", picture.stderr),
    }
    check_hot_plug(&node, &machine.id, start != BootMethod::Kernel, |script| exec(script));
    let stats = node.crictl.call_json(["stats", "-o", "json", &machine.id]);
    let memory = stats["stats"][0]["memory"]["workingSetBytes"]["value"].as_str().unwrap_or_default().to_owned();
    let memory: u64 = memory.parse().expect("a number");
    assert!(memory > 64 << 20 && memory < 768 << 20, "{stats}");
    // Disks and memory are as at the time of the snapshot; tested once for each board.
    if start != BootMethod::Uefi {
        let vm = |words: &[&str]| node.crictl.try_call([&["exec", "--sync", &machine.id, "@vm"], words].concat());
        exec("echo before >/run/memory; sync").ok();
        vm(&["snapshot", "before"]).ok();
        exec("echo after >/run/memory; echo after >/root/disk; sync").ok();
        vm(&["restore", "before"]).ok();
        eventually("the guest agent answers", || (exec("true").code == 0).then_some(()));
        assert_eq!(exec("cat /run/memory").ok().trim(), "before");
        assert!(exec("cat /root/disk").err().contains("exited with 1"));
    }
    node.crictl.call(["stop", "--timeout", "120", &machine.id]);
    assert_eq!(machine.wait_for_exit()["exitCode"], 0, "it powered itself off");
    pod.remove();
}
