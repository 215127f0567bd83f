//! Tests verbs of VMs that transfer much data, and effects without a verb: memory dumps, the power state from annotations, added
//! disks.

use nacelle_e2e::machine::{annotated_pod, machine_container, machine_node, push_boot_image};
use nacelle_e2e::run::{ProgramOutput, run, run_program};
use nacelle_e2e::{PodRequest, TestNode, eventually};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Returns a pod that is a run of the VM `db`.
fn persistent_vm_pod(node: &TestNode, image: &str, strategy: &str) -> PodRequest {
    let disks = format!("root=image:{image},boot=1;data=empty:1Mi");
    let annotations =
        [("kind", "machine"), ("memory", "64Mi"), ("disks", &disks), ("name", "db"), ("run-strategy", strategy)];
    annotated_pod(node, "db", &annotations)
}

/// Returns the arguments of `nacelle vm` for this node.
fn vm_arguments<'a>(arguments: &[&'a str], config: &'a str) -> Vec<&'a str> {
    [&["vm"], arguments, &["--namespace", "e2e", "--config", config]].concat()
}

fn run_vm_command(node: &TestNode, arguments: &[&str]) -> ProgramOutput {
    let config = node.directory().join("config.toml").display().to_string();
    run_program(nacelle_e2e::path_from_env("NACELLE_BIN"), vm_arguments(arguments, &config))
}

/// Returns QEMU's state of the VM.
fn qemu_state(node: &TestNode, machine: &str) -> String {
    let status = node.crictl.try_call(["exec", "--sync", machine, "@vm", "status"]).stdout;
    serde_json::from_str::<Value>(&status).unwrap_or_default()["qemu"].as_str().unwrap_or_default().to_owned()
}

/// Starts a dump whose output is not read.
fn spawn_stalled_dump(node: &TestNode, machine: &str) -> Child {
    let config = node.directory().join("config.toml").display().to_string();
    let mut command = Command::new(nacelle_e2e::path_from_env("NACELLE_BIN"));
    let command =
        command.args(vm_arguments(&["memory-dump", "db"], &config)).stdout(Stdio::piped()).stderr(Stdio::null());
    let child = command.spawn().expect("it can be started");
    eventually("the VM is paused", || (qemu_state(node, machine) == "save-vm").then_some(()));
    child
}

#[test]
fn a_vm_keeps_running_during_memory_dumps_with_any_reader() {
    let mut node = machine_node();
    let image = push_boot_image(&node);
    let (pod, id, log) = {
        let pod = node.crictl.run_pod_with_handler("vm", persistent_vm_pod(&node, &image, "Halted"));
        let machine = pod.start(machine_container(&image, 0));
        (pod.id.clone(), machine.id.clone(), machine.log.clone())
    };
    let directory = node.directory().join("dumps");
    fs::create_dir(&directory).expect("the node's directory is writable");
    let file = directory.join("memory");
    let output = file.display().to_string();
    let names = || fs::read_dir(&directory).expect("it is there").count();
    assert!(run_vm_command(&node, &["memory-dump", "db", "--output", &output]).err().contains("is stopped"));
    assert!(run_vm_command(&node, &["memory-dump", "no", "--output", &output]).err().contains("NotFound"));
    assert_eq!(names(), 0, "nothing is left of a dump that was none");
    run_vm_command(&node, &["start", "db"]).ok();
    let says = |text: &str| fs::read_to_string(&log).unwrap_or_default().contains(text);
    eventually("it has booted", || says("boot 1").then_some(()));

    let running = |node: &TestNode| eventually("it goes on", || (qemu_state(node, &id) == "running").then_some(()));
    run_vm_command(&node, &["memory-dump", "db", "--output", &output]).ok();
    let dump = fs::read(&file).expect("it is there");
    assert!(dump.starts_with(b"\x7fELF") && dump.len() > 64 << 20, "{} bytes", dump.len());
    assert!(dump.windows(8).any(|bytes| bytes == b"pressed\n"), "the guest's program is in it");
    running(&node);
    run_vm_command(&node, &["memory-dump", "db", "--format", "kdump-zlib", "--output", &output]).ok();
    let dump = fs::read(&file).expect("it is there");
    assert!(dump.starts_with(b"makedumpfile") && dump.len() < 32 << 20, "{} bytes", dump.len());
    assert_eq!(names(), 1, "nothing is left beside it");
    let refused = node.crictl.try_call(["exec", "--sync", &id, "@vm", "memory-dump"]).err();
    assert!(refused.contains("16 MiB"), "{refused}");
    let streamed = node.crictl.try_call(["exec", &id, "@vm", "memory-dump", "elf"]).ok();
    assert!(streamed.starts_with("\u{7f}ELF") && streamed.len() > 64 << 20, "{} bytes", streamed.len());
    let unknown = node.crictl.try_call(["exec", &id, "@vm", "memory-dump", "minidump"]).err();
    assert!(unknown.contains("kdump-zlib"), "{unknown}");
    running(&node);

    // A client reads nothing, and then disconnects.
    let mut reader = spawn_stalled_dump(&node, &id);
    let second = run_vm_command(&node, &["memory-dump", "db", "--output", &output]).err();
    assert!(second.contains("dump"), "{second}");
    let mut head = [0; 4];
    reader.stdout.as_mut().expect("it is a pipe").read_exact(&mut head).expect("it has begun");
    assert_eq!(&head, b"\x7fELF");
    reader.kill().expect("it is ours");
    reader.wait().expect("it is ours");
    running(&node);
    // The daemon is killed meanwhile.
    let mut reader = spawn_stalled_dump(&node, &id);
    node.kill();
    node.start();
    running(&node);
    let mut rest = Vec::new();
    reader.stdout.take().expect("it is a pipe").read_to_end(&mut rest).expect("a pipe can be read");
    assert!(!reader.wait().expect("it is ours").success(), "half a dump is none");
    run_vm_command(&node, &["memory-dump", "db", "--output", &output]).ok();
    running(&node);
    node.crictl.call(["rmp", "--force", &pod]);
}

/// Returns the phase of the VM from its status verb.
fn vm_phase(node: &TestNode, machine: &str) -> String {
    let status = node.crictl.try_call(["exec", "--sync", machine, "@vm", "status"]).stdout;
    serde_json::from_str::<Value>(&status).unwrap_or_default()["phase"].as_str().unwrap_or_default().to_owned()
}

/// Writes the annotations of a pod as kubelet does: a new directory, and a link that is swapped.
fn write_annotations(directory: &Path, power: &str) {
    let count = fs::read_dir(directory).expect("it is there").count();
    let name = format!("..2026_11_23_{count}");
    fs::create_dir(directory.join(&name)).expect("it is new");
    let text = format!("app=\"say \\\"hello\\\"\"\nvm.nacelle.dev/power=\"{power}\"\n");
    fs::write(directory.join(&name).join("annotations"), text).expect("it can be written");
    symlink(&name, directory.join("..data_tmp")).expect("it is new");
    fs::rename(directory.join("..data_tmp"), directory.join("..data")).expect("it can be swapped");
}

#[test]
fn the_power_state_follows_the_annotations_that_kubelet_writes() {
    let mut node = machine_node();
    let image = push_boot_image(&node);
    let directory = node.directory().join("annotations");
    fs::create_dir(&directory).expect("the node's directory is writable");
    write_annotations(&directory, "on");
    let mount = json!([{"host_path": directory, "container_path": "/run/nacelle/pod", "readonly": true}]);
    let (pod, id, log) = {
        let pod = node.crictl.run_pod_with_handler("vm", persistent_vm_pod(&node, &image, "Always"));
        let machine = pod.start(machine_container(&image, 0).set("mounts", mount));
        (pod.id.clone(), machine.id.clone(), machine.log.clone())
    };
    let says = |text: &str| fs::read_to_string(&log).unwrap_or_default().contains(text);
    let becomes = |node: &TestNode, wanted: &str| {
        eventually(&format!("it is {wanted}"), || (vm_phase(node, &id) == wanted).then_some(()));
    };
    eventually("it has booted", || says("boot 1").then_some(()));
    write_annotations(&directory, "off");
    becomes(&node, "Stopped");
    write_annotations(&directory, "paused");
    becomes(&node, "Paused");
    write_annotations(&directory, "on");
    becomes(&node, "Running");
    eventually("it has booted again", || says("boot 2").then_some(()));
    write_annotations(&directory, "paused");
    becomes(&node, "Paused");

    // An invalid value changes nothing: the state that a verb has set stays. The test waits for the logged error, so the value
    // has been processed.
    run_vm_command(&node, &["unpause", "db"]).ok();
    let says_in_log = |node: &TestNode, text: &str, times: usize| {
        eventually(text, || (node.log().matches(text).count() >= times).then_some(()));
    };
    write_annotations(&directory, "sideways");
    says_in_log(&node, "the annotation is \"sideways\"", 1);
    assert_eq!(vm_phase(&node, &id), "Running");
    // The same after a restart of the daemon: a value takes effect once.
    write_annotations(&directory, "paused");
    let follows = "power=\"paused\"";
    let before = node.log().matches(follows).count();
    node.kill();
    node.start();
    says_in_log(&node, follows, before + 1);
    assert_eq!(vm_phase(&node, &id), "Running");
    // A value that is set while there is no daemon is applied by the next one.
    node.kill();
    write_annotations(&directory, "off");
    node.start();
    becomes(&node, "Stopped");
    write_annotations(&directory, "on");
    becomes(&node, "Running");
    node.crictl.call(["rmp", "--force", &pod]);
}

#[test]
fn the_daemon_serves_console_and_vnc() {
    let node = machine_node();
    let image = push_boot_image(&node);
    let pod = node.crictl.run_pod_with_handler("vm", persistent_vm_pod(&node, &image, "Always"));
    // The container has no stdin.
    let machine = pod.start(machine_container(&image, 0));
    machine.wait_for_output("boot 1\n");
    let config = node.directory().join("config.toml").display().to_string();
    let start = |arguments: &[&str]| {
        let mut command = Command::new(nacelle_e2e::path_from_env("NACELLE_BIN"));
        let command = command.args(vm_arguments(arguments, &config)).stdin(Stdio::piped()).stdout(Stdio::piped());
        command.spawn().expect("it can be started")
    };
    let shell = run(&mut node.shell_command(&[&pod.id]));
    assert!(
        shell.code == 1 && shell.stderr.contains("it is a machine pod") && shell.stderr.contains("vm console"),
        "{shell:?}"
    );
    let mut console = start(&["console", "db"]);
    console.stdin.as_mut().expect("it is a pipe").write_all(b"hello").expect("it is read");
    let mut heard = [0; 5];
    console.stdout.as_mut().expect("it is a pipe").read_exact(&mut heard).expect("it prints");
    assert_eq!(&heard, b"hello", "the guest repeats what is typed");
    // The end of the input is not the end of the output.
    drop(console.stdin.take());
    run_vm_command(&node, &["restart", "db"]).ok();
    let mut output = String::new();
    let mut byte = [0];
    while !output.contains("boot 2") {
        console.stdout.as_mut().expect("it is a pipe").read_exact(&mut byte).expect("it prints");
        output.push(char::from(byte[0]));
    }
    let mut screens = start(&["vnc", "db"]);
    let mut line = String::new();
    BufReader::new(screens.stdout.take().expect("it is a pipe")).read_line(&mut line).expect("it says where");
    let address = line.trim().strip_prefix("vnc://").expect("it is an address").to_owned();
    for _ in 0..2 {
        let mut viewer = TcpStream::connect(&address).expect("it listens");
        let mut version = [0; 12];
        viewer.read_exact(&mut version).expect("the server speaks first");
        assert_eq!(&version, b"RFB 003.008\n");
    }
    screens.kill().and_then(|()| screens.wait()).expect("it is ours");
    assert!(run_vm_command(&node, &["vnc", "missing"]).err().contains("NotFound"));
    run_vm_command(&node, &["stop", "db"]).ok();
    eventually("it is off", || (vm_phase(&node, &machine.id) == "Stopped").then_some(()));
    assert!(!run_vm_command(&node, &["vnc", "db"]).err().is_empty(), "there is no screen");
    // The console stays, and ends with the VM's process.
    assert!(console.try_wait().expect("it is ours").is_none());
    pod.remove();
    assert!(console.wait().expect("it is ours").code().is_some());
}

/// Returns the names of the added disks.
fn added_volumes(node: &TestNode) -> Vec<String> {
    let list = node.nacelle_json(&["vm", "volumes", "db", "--namespace", "e2e"]);
    list.as_array().expect("a list").iter().map(|one| one["name"].as_str().unwrap_or_default().to_owned()).collect()
}

#[test]
fn hot_plugged_disks_survive_restarts_until_they_are_removed() {
    let mut node = machine_node();
    let image = push_boot_image(&node);
    let (pod, id, log) = {
        let pod = node.crictl.run_pod_with_handler("vm", persistent_vm_pod(&node, &image, "Always"));
        let machine = pod.start(machine_container(&image, 0));
        (pod.id.clone(), machine.id.clone(), machine.log.clone())
    };
    let says = |text: &str| fs::read_to_string(&log).unwrap_or_default().contains(text);
    eventually("it has booted", || says("boot 1").then_some(()));
    for _ in 0..2 {
        run_vm_command(&node, &["add-volume", "db", "extra=1Gi"]).ok();
    }
    for (volume, words) in [
        ("extra=2Gi", "a different size"),
        ("root=1Gi", "of the specification"),
        ("Extra=1Gi", "InvalidArgument: volume is"),
        ("Extra=1Gi", "lower-case letters"),
        ("more=513", "multiple of 512 bytes"),
        ("more=5Ti", "at most 4Ti"),
        ("more=much", "invalid size"),
    ] {
        let error = run_vm_command(&node, &["add-volume", "db", volume]).err();
        assert!(error.contains(words), "{volume}: {error}");
    }
    assert!(run_vm_command(&node, &["add-volume", "missing", "extra=1Gi"]).err().contains("NotFound"));
    assert!(run_vm_command(&node, &["rm-volume", "db", "root"]).err().contains("specification"));
    run_vm_command(&node, &["rm-volume", "db", "no"]).ok();
    run_vm_command(&node, &["snapshot", "db", "with"]).ok();
    let kept = run_vm_command(&node, &["rm-volume", "db", "extra"]).err();
    assert!(kept.contains("in snapshots"), "{kept}");
    run_vm_command(&node, &["restore", "db", "with"]).ok();
    run_vm_command(&node, &["rm-snapshot", "db", "with"]).ok();
    // This guest does not support hot-unplug.
    let held = run_vm_command(&node, &["rm-volume", "db", "extra"]).err();
    assert!(held.contains("the release of disk extra"), "{held}");
    assert_eq!(added_volumes(&node), ["extra"]);
    // The disk is there after a restart of the VM, and of the daemon.
    node.kill();
    node.start();
    run_vm_command(&node, &["restart", "db"]).ok();
    eventually("it has booted again", || says("boot 2").then_some(()));
    assert_eq!(added_volumes(&node), ["extra"]);
    for n in 1..8 {
        run_vm_command(&node, &["add-volume", "db", &format!("extra{n}=512")]).ok();
    }
    assert!(run_vm_command(&node, &["add-volume", "db", "more=512"]).err().contains("no free hot-plug slot"));
    run_vm_command(&node, &["stop", "db"]).ok();
    eventually("it is off", || (vm_phase(&node, &id) == "Stopped").then_some(()));
    for _ in 0..2 {
        run_vm_command(&node, &["rm-volume", "db", "extra"]).ok();
    }
    run_vm_command(&node, &["add-volume", "db", "more=512"]).ok();
    assert_eq!(added_volumes(&node).len(), 8);
    run_vm_command(&node, &["start", "db"]).ok();
    eventually("it has booted with all of them", || says("boot 3").then_some(()));
    node.crictl.call(["rmp", "--force", &pod]);
    run_vm_command(&node, &["rm", "db"]).ok();
}
