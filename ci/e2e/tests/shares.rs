//! Tests file systems of machine pods: directories of the node that a guest with a system of its own (Debian) mounts by
//! virtio-fs: what it sees and may do, through restarts of guest, QEMU and container, and after the file-server process is
//! killed.

use nacelle_e2e::machine::{Debian, annotated_pod, machine_container, machine_node, push_boot_image};
use nacelle_e2e::run::run_program;
use nacelle_e2e::{ContainerRequest, PodRequest, TestNode, eventually};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// The directories of a VM: a ConfigMap's, which kubelet writes, and a claim.
struct Directories {
    settings: PathBuf,
    data: PathBuf,
}

impl Directories {
    fn new(node: &TestNode) -> Directories {
        let [settings, data] = ["settings", "data"].map(|name| node.directory().join(name));
        fs::create_dir_all(&data).expect("the node's directory is there");
        fs::create_dir(&settings).expect("the node's directory is there");
        fs::write(node.directory().join("secret"), "of the node").expect("the node's directory is there");
        symlink("../secret", data.join("up")).expect("the directory is there");
        let directories = Directories { settings, data };
        directories.write_settings("first");
        symlink("..data/greeting", directories.settings.join("greeting")).expect("the directory is there");
        directories
    }

    /// Writes as kubelet does: into a new directory, which is then swapped in.
    fn write_settings(&self, text: &str) {
        let inner = self.settings.join(format!("..{text}"));
        fs::create_dir(&inner).expect("the directory is there");
        fs::write(inner.join("greeting"), text).expect("the directory is there");
        let link = self.settings.join("..data_tmp");
        symlink(inner.file_name().expect("it has one"), &link).expect("the directory is there");
        fs::rename(link, self.settings.join("..data")).expect("the directory is there");
    }

    fn container(&self, image: &str, attempt: u32) -> ContainerRequest {
        let mount = |name: &str, host: &Path, readonly: bool| json!({"host_path": host, "container_path": format!("/run/nacelle/vm/{name}"), "readonly": readonly});
        let mounts = json!([mount("settings", &self.settings, true), mount("data", &self.data, false)]);
        machine_container(image, attempt).set("mounts", mounts)
    }
}

fn machine_pod(node: &TestNode, spec: &Value) -> PodRequest {
    annotated_pod(node, "shares", &[("kind", "machine"), ("name", "shares"), ("spec", &spec.to_string())])
}

fn spec_with_filesystems(board: &str, root: &str) -> Value {
    json!({
        "domain": {
            "machine": { "type": board },
            "memory": { "guest": "768Mi" },
            "devices": {
                "disks": [{ "name": "root", "disk": {}, "bootOrder": 1 }],
                "filesystems": [{ "name": "settings", "virtiofs": {} }, { "name": "data", "virtiofs": {} }],
            },
        },
        "volumes": [
            { "name": "root", "containerDisk": { "image": root } },
            { "name": "settings", "configMap": { "name": "settings" } },
            { "name": "data", "persistentVolumeClaim": { "claimName": "data" } },
        ],
    })
}

/// Mounts the directories in the guest.
const MOUNT: &str = "mkdir -p /s /d && mount -t virtiofs settings /s && mount -t virtiofs data /d";

#[test]
fn a_guest_mounts_directories_of_the_node_with_virtio_pci() {
    check_shares_in_debian("q35");
}

#[test]
fn a_guest_mounts_directories_of_the_node_with_virtio_mmio() {
    check_shares_in_debian("microvm");
}

fn check_shares_in_debian(board: &str) {
    let Some(debian) = Debian::from_env() else {
        println!("skipped: NACELLE_DISK_IMAGE is not set: ci/disk-image makes the disk of Debian");
        return;
    };
    let node = machine_node();
    let image = debian.push_image(&node);
    let directories = Directories::new(&node);
    let mut spec = spec_with_filesystems(board, &image);
    spec["domain"]["firmware"] = json!({ "kernelBoot": {
        "container": { "image": image, "kernelPath": "/boot/vmlinuz", "initrdPath": "/boot/initrd.img" },
        "kernelArgs": debian.command_line(),
    } });
    let pod = node.crictl.run_pod_with_handler("vm", machine_pod(&node, &spec));
    let first = pod.start(directories.container(&image, 0));
    let answers = || eventually("the guest agent answers", || (first.exec("true").code == 0).then_some(()));
    answers();
    assert_eq!(first.exec(&format!("{MOUNT}; cat /s/greeting")).ok(), "first");
    directories.write_settings("second");
    eventually("the guest sees what kubelet writes", || {
        (first.exec("cat /s/greeting").stdout == "second").then_some(())
    });
    let refused = first.exec("touch /s/new 2>&1 | cat").ok();
    assert!(refused.contains("Read-only file system"), "{refused}");
    first.exec("echo guest >/d/of-guest && dd if=/dev/zero of=/d/large bs=1M count=8 conv=fsync").ok();
    assert_eq!(fs::read_to_string(directories.data.join("of-guest")).expect("the guest has written it"), "guest\n");
    assert_eq!(fs::metadata(directories.data.join("large")).expect("the guest has written it").len(), 8 << 20);
    fs::write(directories.data.join("of-node"), "node").expect("the directory is there");
    eventually("the guest sees what the node writes", || (first.exec("cat /d/of-node").stdout == "node").then_some(()));
    // Links out of the directory lead nowhere in the guest, and devices of the node are inaccessible.
    assert_eq!(first.exec("cat /d/up").code, 1);
    assert_eq!(first.exec("mknod /d/null c 1 3").code, 1);
    let vm = |words: &[&str]| node.crictl.try_call([&["exec", "--sync", &first.id, "@vm"], words].concat());
    let error = vm(&["snapshot", "now"]).err();
    assert!(error.contains("file systems"), "{error}");
    // First the guest reboots in the same QEMU; then QEMU is restarted.
    vm(&["reset"]).ok();
    eventually("the guest starts anew", || (first.exec("test ! -e /s/greeting").code == 0).then_some(()));
    assert_eq!(first.exec(&format!("{MOUNT}; cat /s/greeting /d/of-node")).ok(), "secondnode");
    vm(&["power-off"]).ok();
    eventually("the machine starts anew", || (first.exec("test ! -e /s/greeting").code == 0).then_some(()));
    assert_eq!(first.exec(&format!("{MOUNT}; cat /s/greeting /d/of-node")).ok(), "secondnode");
    // The next container has a new view of the same directories.
    node.crictl.call(["stop", "--timeout", "0", &first.id]);
    first.wait_for_exit();
    let second = pod.start(directories.container(&image, 1));
    node.crictl.call(["rm", &first.id]);
    eventually("the guest agent answers", || (second.exec("true").code == 0).then_some(()));
    assert_eq!(second.exec(&format!("{MOUNT}; cat /s/greeting /d/of-node")).ok(), "secondnode");
    // Without the file-server process the guest gets errors, and continues.
    let of_files = node.pids_matching("nacelle-fs");
    let [of_files] = of_files.as_slice() else { panic!("one process has them: {of_files:?}") };
    run_program("kill", ["-9", &of_files.to_string()]).ok();
    let read = "timeout 20 cat /d/large 2>&1 >/dev/null | cat";
    eventually("the guest gets an I/O error", || second.exec(read).stdout.contains("Input/output error").then_some(()));
    assert_eq!(second.exec("hostname >/root/still && cat /root/still").code, 0);
    pod.remove();
    eventually("nothing is left", || node.leaked().is_empty().then_some(()));
    assert_eq!(fs::read_to_string(directories.data.join("of-guest")).expect("the claim stays"), "guest\n");
}

#[test]
fn invalid_shared_directories_are_refused_and_shares_end_with_their_processes() {
    let mut node = machine_node();
    let image = push_boot_image(&node);
    let directories = Directories::new(&node);
    let spec = spec_with_filesystems("q35", &image);
    let pod = machine_pod(&node, &spec);
    let again = PodRequest(pod.0.clone());
    let pod = node.crictl.run_pod_with_handler("vm", pod);
    let mount = |host: &Path| json!({"host_path": host, "container_path": "/run/nacelle/vm/settings"});
    let data = json!({"host_path": directories.data, "container_path": "/run/nacelle/vm/data"});
    let with = |settings: Value| machine_container(&image, 0).set("mounts", json!([settings, data.clone()]));
    let option = |key: &str, value: Value| {
        let mut mount = mount(&directories.settings);
        mount[key] = value;
        mount
    };
    for (container, words) in [
        (machine_container(&image, 0), "file system settings is configMap settings, which the container does not have"),
        (with(mount(&directories.settings.join("greeting"))), "file system settings needs a directory"),
        (with(mount(&directories.settings.join("nowhere"))), "file system settings: cannot find"),
        (with(option("propagation", json!(2))), "config.mounts.propagation"),
    ] {
        let error = pod.try_create(container).err();
        assert!(error.contains(words), "{words:?} in {error}");
    }
    let id = {
        pod.start(directories.container(&image, 0)).wait_for_output("boot 1\n");
        pod.id.clone()
    };
    assert_eq!(node.pids_matching("nacelle-fs").len(), 1);
    // The keeper dies: the VM and its file-server process end.
    let keepers = node.pids_matching("nacelle-keeper");
    let [keeper] = keepers.as_slice() else { panic!("one keeper: {keepers:?}") };
    run_program("kill", ["-9", &keeper.to_string()]).ok();
    let gone = |word: &str| eventually(word, || node.pids_matching(word).is_empty().then_some(()));
    gone("-blockdev");
    gone("nacelle-fs");
    drop(pod);
    node.crictl.call(["rmp", "--force", &id]);
    // All processes die.
    let id = {
        let pod = node.crictl.run_pod_with_handler("vm", machine_pod(&node, &spec));
        pod.start(directories.container(&image, 0)).wait_for_output("boot 2\n");
        pod.id.clone()
    };
    node.kill();
    let pods = node.pids_matching("nacelle-pod --dir ");
    assert_eq!(pods.len(), 1, "one pod");
    run_program("kill", ["-9", &pods[0].to_string()]).ok();
    for word in ["-blockdev", "nacelle-fs"] {
        eventually(word, || node.pids_matching(word).is_empty().then_some(()));
    }
    node.start();
    node.crictl.pod_handle(&id, again).remove();
    eventually("nothing is left", || node.leaked().is_empty().then_some(()));
    assert!(directories.data.join("up").is_symlink() && directories.settings.join("greeting").exists());
}
