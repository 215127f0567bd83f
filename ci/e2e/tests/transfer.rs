//! Tests the transfer of persistent VMs through a registry: a stopped one without a pod, a running one with its memory; what is
//! rejected, and what is left after interruptions.

use nacelle_e2e::machine::{annotated_pod, machine_container, machine_node, push_boot_image};
use nacelle_e2e::registry::{LOGIN, RegistryKind, TestRegistry};
use nacelle_e2e::run::{ProgramOutput, run_program};
use nacelle_e2e::{PodRequest, TestNode, eventually};
use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::process::{Child, Command, Stdio};

/// Returns a pod that is a run of a VM.
fn persistent_vm_pod(node: &TestNode, image: &str, name: &str) -> PodRequest {
    let disks = format!("root=image:{image},boot=1;data=empty:1Mi");
    annotated_pod(node, name, &[("kind", "machine"), ("memory", "64Mi"), ("disks", &disks), ("name", name)])
}

/// Returns the arguments of `nacelle vm` for this node.
fn vm_arguments(node: &TestNode, words: &[&str]) -> Vec<String> {
    let config = node.directory().join("config.toml").display().to_string();
    let all = [&["vm"], words, &["--namespace", "e2e", "--config", &config]].concat();
    all.into_iter().map(str::to_owned).collect()
}

fn run_vm_command(node: &TestNode, arguments: &[&str]) -> ProgramOutput {
    run_program(nacelle_e2e::path_from_env("NACELLE_BIN"), vm_arguments(node, arguments))
}

fn describe(node: &TestNode, name: &str) -> Value {
    node.nacelle_json(&["vm", "describe", name, "--namespace", "e2e"])
}

/// Returns the number of directories of VMs and of operations on them.
fn count_machine_directories(node: &TestNode) -> usize {
    fs::read_dir(node.directory().join("root/machines")).expect("it is there").count()
}

#[test]
fn a_vm_moves_through_a_registry() {
    let mut node = machine_node();
    let image = push_boot_image(&node);
    let reference = format!("{}/machines/db:1", node.registry.host());
    let (known, unplugged) = {
        let first = node.crictl.run_pod_with_handler("vm", persistent_vm_pod(&node, &image, "db"));
        // A pod holds the VM, and it does not run.
        let refused = run_vm_command(&node, &["export", "db", &reference]).err();
        first.start(machine_container(&image, 0)).wait_for_output("boot 1\n");
        first.remove();
        (describe(&node, "db"), refused)
    };
    assert!(unplugged.contains("FailedPrecondition"), "{unplugged}");
    let digest = |output: &str| output.split_whitespace().last().unwrap_or_default().to_owned();
    let first = digest(&run_vm_command(&node, &["export", "db", &reference]).ok());
    assert!(first.starts_with("sha256:"), "{first}");
    // The daemon is killed during the export, or just before or after it.
    let mut child = spawn_vm_command(&node, &["export", "db", &reference]);
    node.kill();
    child.wait().expect("it is ours");
    node.start();
    assert_eq!(count_machine_directories(&node), 1, "nothing is left");
    assert_eq!(
        digest(&run_vm_command(&node, &["export", "db", &reference]).ok()),
        first,
        "the same machine, the same artifact"
    );
    let skopeo =
        node.run_in_netns("skopeo", &["inspect", "--raw", "--tls-verify=false", &format!("docker://{reference}")]).ok();
    let manifest: Value = serde_json::from_str(&skopeo).expect("it is JSON");
    assert_eq!(manifest["artifactType"], "application/vnd.nacelle.machine.v1", "{manifest}");
    assert_eq!(manifest["layers"].as_array().map(Vec::len), Some(2), "{manifest}");
    for (output, words) in [
        (run_vm_command(&node, &["export", "no", &reference]), "NotFound"),
        (run_vm_command(&node, &["export", "db", "A b"]), "InvalidArgument"),
        (run_vm_command(&node, &["export", "db", "127.0.0.1:1/a:1"]), "Unavailable"),
        (run_vm_command(&node, &["import", &reference, "db"]), "AlreadyExists"),
        (run_vm_command(&node, &["import", &reference, "other"]), "FailedPrecondition"),
        (run_vm_command(&node, &["import", &reference, "Db"]), "InvalidArgument"),
        (run_vm_command(&node, &["import", &image, "other"]), "InvalidArgument"),
        (run_vm_command(&node, &["import", &format!("{}/machines/no:1", node.registry.host()), "other"]), "NotFound"),
    ] {
        let error = output.err();
        assert!(error.contains(words), "{words} in {error}");
    }

    // To a node that has neither the VM nor its image.
    run_vm_command(&node, &["delete", "db"]).ok();
    node.crictl.call(["rmi", &image]);
    let refused = run_vm_command(&node, &["import", &reference, "db"]).err();
    assert!(
        refused.contains("FailedPrecondition") && refused.contains("pull 127.0.0.1:5000/boot@sha256:"),
        "{refused}"
    );
    assert_eq!(count_machine_directories(&node), 0);
    node.crictl.call(["pull", &image]);
    let by_digest = format!("{}/machines/db@{first}", node.registry.host());
    run_vm_command(&node, &["import", &by_digest, "db"]).ok();
    let moved = describe(&node, "db");
    assert_eq!((&moved["uuid"], &moved["mac"]), (&known["uuid"], &known["mac"]));
    run_vm_command(&node, &["import", &reference, "twin", "--new-identity"]).ok();
    assert_ne!(describe(&node, "twin")["uuid"], known["uuid"]);
    // The image stays with the VM.
    node.crictl.call(["rmi", &image]);
    node.crictl.call(["pull", &image]);
    for name in ["db", "twin"] {
        let pod = node.crictl.run_pod_with_handler("vm", persistent_vm_pod(&node, &image, name));
        pod.start(machine_container(&image, 0)).wait_for_output("boot 2\n");
        pod.remove();
        run_vm_command(&node, &["delete", name]).ok();
    }
    assert_eq!(count_machine_directories(&node), 0);
}

#[test]
fn exports_use_plain_http_credentials_and_layouts_as_requested() {
    let mut node = machine_node();
    let image = push_boot_image(&node);
    let plain = TestRegistry::start(&node.netns, node.directory(), RegistryKind::Http, 5001);
    let secret = TestRegistry::start(&node.netns, node.directory(), RegistryKind::HttpsWithPassword, 5002);
    let mut config = fs::File::options().append(true).open(node.directory().join("config.toml")).expect("it is there");
    write!(config, "\n[images.registries.{:?}]\nca_file = {:?}\n", secret.host(), secret.ca_file())
        .expect("it is writable");
    node.kill();
    node.start();
    let pod = node.crictl.run_pod_with_handler("vm", persistent_vm_pod(&node, &image, "db"));
    pod.start(machine_container(&image, 0)).wait_for_output("boot 1\n");
    pod.remove();

    let to = format!("{}/a/b/db:1", plain.host());
    assert!(
        run_vm_command(&node, &["export", "db", &to]).err().contains("Unavailable"),
        "plain HTTP is not the default"
    );
    run_vm_command(&node, &["export", "db", &to, "--plain-http"]).ok();
    let to = format!("{}/db:1", secret.host());
    let refused = run_vm_command(&node, &["export", "db", &to]).err();
    assert!(refused.contains("PermissionDenied"), "{refused}");
    let file = node.directory().join("auth.json");
    let auths = json!({ "auths": { secret.host(): { "username": LOGIN.0, "password": LOGIN.1 } } });
    fs::write(&file, auths.to_string()).expect("the node's directory is writable");
    let file = file.display().to_string();
    run_vm_command(&node, &["export", "db", &to, "--authfile", &file]).ok();
    let layout = format!("oci:{}:db", node.directory().join("layout").display());
    run_vm_command(&node, &["export", "db", &layout]).ok();
    run_vm_command(&node, &["delete", "db"]).ok();
    run_vm_command(&node, &["import", &to, "db", "--authfile", &file]).ok();
    run_vm_command(&node, &["delete", "db"]).ok();
    run_vm_command(&node, &["import", &layout, "db"]).ok();
    run_vm_command(&node, &["delete", "db"]).ok();
}

fn spawn_vm_command(node: &TestNode, arguments: &[&str]) -> Child {
    let mut command = Command::new(nacelle_e2e::path_from_env("NACELLE_BIN"));
    let command =
        command.args(vm_arguments(node, arguments)).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().expect("it can be started")
}

/// Returns QEMU's state of the VM.
fn qemu_state(node: &TestNode, machine: &str) -> String {
    let status = node.crictl.try_call(["exec", "--sync", machine, "@vm", "status"]).stdout;
    serde_json::from_str::<Value>(&status).unwrap_or_default()["qemu"].as_str().unwrap_or_default().to_owned()
}

/// Returns the byte of the guest's memory in which the program on the disk counts its boots.
fn boot_count_in_memory(node: &TestNode) -> u8 {
    const COUNT: u64 = 0x8000;
    let file = node.directory().join("memory");
    run_vm_command(node, &["memory-dump", "db", "--output", &file.display().to_string()]).ok();
    let dump = fs::read(&file).expect("it is there");
    let eight = |at: usize| u64::from_le_bytes(dump[at..at + 8].try_into().expect("eight bytes"));
    let two = |at: usize| usize::from(u16::from_le_bytes(dump[at..at + 2].try_into().expect("two bytes")));
    let (table, size, entries) = (usize::try_from(eight(32)).expect("it is in the file"), two(54), two(56));
    let segments = (0..entries).map(|n| table + n * size).filter(|at| dump[*at] == 1);
    let mut offsets = segments.filter_map(|at| {
        let (offset, physical, length) = (eight(at + 8), eight(at + 24), eight(at + 32));
        (physical..physical + length).contains(&COUNT).then(|| offset + COUNT - physical)
    });
    let offset = offsets.next().expect("the guest has memory there");
    dump[usize::try_from(offset).expect("it is in the file")]
}

#[test]
fn a_running_vm_is_exported_with_its_memory() {
    let mut node = machine_node();
    let image = push_boot_image(&node);
    let reference = format!("{}/machines/db:live", node.registry.host());
    let (pod, id, log) = {
        let pod = node.crictl.run_pod_with_handler("vm", persistent_vm_pod(&node, &image, "db"));
        let machine = pod.start(machine_container(&image, 0).set("stdin", json!(true)));
        machine.wait_for_output("boot 1\n");
        (pod.id.clone(), machine.id.clone(), machine.log.clone())
    };
    let says = |log: &std::path::Path, text: &str, times: usize| {
        let stdout_of = || fs::read_to_string(log).unwrap_or_default().matches(text).count() >= times;
        eventually(&format!("the machine says {text:?}"), || stdout_of().then_some(()));
    };
    let running =
        |node: &TestNode, id: &str| eventually("it runs", || (qemu_state(node, id) == "running").then_some(()));
    let nothing = |node: &TestNode| {
        let snapshots = || node.nacelle_json(&["vm", "snapshots", "db", "--namespace", "e2e"]);
        eventually("its snapshot is gone", || (snapshots() == json!([])).then_some(()));
        eventually("nothing is left", || (count_machine_directories(node) == 1).then_some(()));
    };
    run_vm_command(&node, &["reset", "db"]).ok();
    says(&log, "boot 2", 1);
    let output = run_vm_command(&node, &["export", "db", &reference]).ok();
    let snapshot = output.split_whitespace().last().unwrap_or_default().to_owned();
    assert!(output.contains("sha256:") && snapshot.starts_with("exported-"), "{output}");
    running(&node, &id);
    nothing(&node);
    let known = describe(&node, "db");
    // The VM continues: input is echoed, and it has its own disk.
    node.crictl.call_with_input(["attach", "-i", &id], b"hellor");
    says(&log, "hello", 1);
    says(&log, "boot 3", 1);
    // A paused VM stays paused.
    run_vm_command(&node, &["pause", "db"]).ok();
    let layout = format!("oci:{}:db", node.directory().join("layout").display());
    run_vm_command(&node, &["export", "db", &layout]).ok();
    assert_eq!(qemu_state(&node, &id), "paused");
    run_vm_command(&node, &["unpause", "db"]).ok();
    // The daemon is killed during the export.
    let mut child = spawn_vm_command(&node, &["export", "db", &reference.replace(":live", ":killed")]);
    eventually("it is under way", || {
        (qemu_state(&node, &id) != "running" || child.try_wait().is_ok_and(|end| end.is_some())).then_some(())
    });
    node.kill();
    child.wait().expect("it is ours");
    node.start();
    running(&node, &id);
    nothing(&node);
    // The client disconnects.
    let mut child = spawn_vm_command(&node, &["export", "db", &reference.replace(":live", ":gone")]);
    eventually("it is under way", || {
        (qemu_state(&node, &id) != "running" || child.try_wait().is_ok_and(|end| end.is_some())).then_some(())
    });
    child.kill().expect("it is ours");
    child.wait().expect("it is ours");
    running(&node, &id);
    nothing(&node);
    node.crictl.call(["rmp", "--force", &pod]);
    run_vm_command(&node, &["delete", "db"]).ok();

    let output = run_vm_command(&node, &["import", &reference, "db"]).ok();
    assert!(output.contains(&snapshot), "{output}");
    assert_eq!(describe(&node, "db")["uuid"], known["uuid"]);
    let pod = node.crictl.run_pod_with_handler("vm", persistent_vm_pod(&node, &image, "db"));
    let machine = pod.start(machine_container(&image, 0));
    // Its disk is as at that moment.
    machine.wait_for_output("boot 3\n");
    assert_eq!(boot_count_in_memory(&node), 3);
    run_vm_command(&node, &["restore", "db", &snapshot]).ok();
    assert_eq!(boot_count_in_memory(&node), 2, "its memory is as it was at that moment");
    run_vm_command(&node, &["reset", "db"]).ok();
    says(&machine.log, "boot 3", 2);
    // The VM continues from node to node.
    run_vm_command(&node, &["delete-snapshot", "db", &snapshot]).ok();
    run_vm_command(&node, &["export", "db", &reference]).ok();
    pod.remove();
    run_vm_command(&node, &["delete", "db"]).ok();
}
