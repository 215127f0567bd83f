//! Tests disks of machine pods that belong to the node: claims (block devices and files), files of the node, volumes that kubelet
//! writes; their locks, what persists, what is rejected, and the state after all processes around them were killed.

use nacelle_e2e::machine::{annotated, boot_disk, boot_image, container, node};
use nacelle_e2e::run::call;
use nacelle_e2e::{Container, Node, Pod, eventually};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Cursor, Read};
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};

/// A loop device over a bootable disk. Dropping it detaches it.
struct Block {
    file: PathBuf,
    device: String,
}

impl Block {
    fn new(node: &Node) -> Block {
        let file = node.directory().join("block.raw");
        fs::write(&file, boot_disk()).expect("the directory is there");
        let device = call("losetup", ["--find", "--show", &file.display().to_string()]).ok();
        Block { file, device }
    }

    /// Returns how often the disk has booted, as seen on the node.
    fn boots(&self) -> u8 {
        call("sync", [&self.device]).ok();
        fs::read(&self.device).expect("root reads it")[512]
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        call("losetup", ["--detach", &self.device]);
        assert!(self.file.exists(), "nothing removes a claim");
    }
}

fn pod(node: &Node, name: &str, disks: &str) -> Pod {
    annotated(node, name, &[("kind", "machine"), ("memory", "64Mi"), ("disks", disks)])
}

fn on_device(image: &str, attempt: u32, device: &str, permissions: &str) -> Container {
    let device = json!({"host_path": device, "container_path": "/dev/nacelle/root", "permissions": permissions});
    container(image, attempt).set("devices", json!([device]))
}

fn on_mount(image: &str, attempt: u32, mounts: &[(&str, &Path, bool)]) -> Container {
    let mount = |(name, host, readonly): &(&str, &Path, bool)| json!({"host_path": host, "container_path": format!("/run/nacelle/vm/{name}"), "readonly": readonly});
    container(image, attempt).set("mounts", Value::Array(mounts.iter().map(mount).collect()))
}

#[test]
fn a_block_claim_is_one_machines_and_keeps_what_it_wrote() {
    let node = node();
    let image = boot_image(&node);
    let block = Block::new(&node);
    let written = "root=claim:system,boot=1";
    let first = node.crictl.run_pod_of("vm", pod(&node, "first", written));
    let running = first.start(on_device(&image, 0, &block.device, "mrw"));
    running.says("boot 1\n");
    assert_eq!(block.boots(), 1);

    let second = node.crictl.run_pod_of("vm", pod(&node, "second", written));
    for read_only in [false, true] {
        let disks = if read_only { "root=claim:system,boot=1,readonly" } else { written };
        let other = node.crictl.run_pod_of("vm", pod(&node, if read_only { "reader" } else { "writer" }, disks));
        let told = other.try_create(on_device(&image, 0, &block.device, "mrw")).err();
        for words in ["FailedPrecondition", "disk root", &block.device, "in use by another VM"] {
            assert!(told.contains(words), "{words:?} in {told}");
        }
        other.remove();
    }
    node.crictl.call(["stop", "--timeout", "60", &running.id]);
    assert_eq!(running.exited()["exitCode"], 0);
    // After a restart of the container, and in another pod, the written data are still there.
    let again = first.start(on_device(&image, 1, &block.device, "rw"));
    again.says("boot 2\n");
    node.crictl.call(["stop", "--timeout", "0", &again.id]);
    again.exited();
    let next = second.start(on_device(&image, 0, &block.device, "mrw"));
    next.says("boot 3\n");
    first.remove();
    second.remove();
    assert_eq!(block.boots(), 3);

    // Readers share it, and change nothing.
    let read = "root=claim:system,boot=1,readonly";
    let readers = ["left", "right"].map(|name| node.crictl.run_pod_of("vm", pod(&node, name, read)));
    let running = readers.each_ref().map(|pod| pod.start(on_device(&image, 0, &block.device, "r")));
    running.iter().for_each(|machine| drop(machine.says("boot 4\n")));
    assert_eq!(block.boots(), 3);
    drop(running);
    readers.into_iter().for_each(nacelle_e2e::crictl::RunningPod::remove);
    eventually("nothing is left", || node.left().is_empty().then_some(()));
}

#[test]
fn a_file_claim_survives_the_death_of_all_that_had_it() {
    let mut node = node();
    let image = boot_image(&node);
    let directory = node.directory().join("claim");
    fs::create_dir(&directory).expect("the node's directory is there");
    fs::write(directory.join("disk.img"), boot_disk()).expect("the directory is there");
    let disks = "root=claim:system,boot=1";
    let config = pod(&node, "first", disks);
    let again = Pod(config.0.clone());
    let id = {
        let first = node.crictl.run_pod_of("vm", config);
        first.start(on_mount(&image, 0, &[("root", &directory, false)])).says("boot 1\n");
        first.id.clone()
    };
    // The keeper's command line also names QEMU, but not its disks.
    assert_eq!(node.processes("-blockdev").len(), 1, "one machine");
    let pods = node.processes("nacelle-pod ");
    assert_eq!(pods.len(), 1, "one pod");
    call("kill", ["-9", &pods[0].to_string()]).ok();
    node.kill();
    eventually("the machine goes with its pod's process", || node.processes("-blockdev").is_empty().then_some(()));
    node.start();
    node.crictl.pod(&id, again).remove();
    eventually("nothing is left", || node.left().is_empty().then_some(()));

    let second = node.crictl.run_pod_of("vm", pod(&node, "second", disks));
    let running = second.start(on_mount(&image, 0, &[("root", &directory, false)]));
    running.says("boot 2\n");
    // The next daemon finds the VM with its disk.
    let third = pod(&node, "third", disks);
    let (id, running) = (second.id.clone(), running.id.clone());
    let second = Pod(pod(&node, "second", disks).0);
    node.kill();
    node.start();
    let third = node.crictl.run_pod_of("vm", third);
    let told = third.try_create(on_mount(&image, 0, &[("root", &directory, false)])).err();
    assert!(told.contains("in use by another VM"), "{told}");
    let state = || node.crictl.json(["inspect", "-o", "json", &running])["status"]["state"].clone();
    eventually("the machine is found again", || (state() == "CONTAINER_RUNNING").then_some(()));
    node.crictl.pod(&id, second).remove();
    third.start(on_mount(&image, 1, &[("root", &directory, false)])).says("boot 3\n");
    third.remove();
    assert_eq!(fs::read(directory.join("disk.img")).expect("it is there")[512], 3);
}

#[test]
fn files_of_the_node_are_disks_and_are_made_where_they_shall_be() {
    let node = node();
    let image = boot_image(&node);
    let [system, data] = ["system.img", "data.img"].map(|name| node.directory().join(name));
    fs::write(&system, boot_disk()).expect("the node's directory is there");
    let spec = json!({
        "domain": {
            "memory": { "guest": "64Mi" },
            "devices": { "disks": [{ "name": "root", "disk": {}, "bootOrder": 1 }, { "name": "data", "disk": { "bus": "scsi" } }] },
        },
        "volumes": [
            { "name": "root", "hostDisk": { "path": system, "type": "Disk" } },
            { "name": "data", "hostDisk": { "path": data, "type": "DiskOrCreate", "capacity": "2Mi" } },
        ],
    });
    let pod = annotated(&node, "files", &[("kind", "machine"), ("spec", &spec.to_string())]);
    let pod = node.crictl.run_pod_of("vm", pod);
    let mounts: [(&str, &Path, bool); 2] = [("root", &system, false), ("data", &data, false)];
    pod.start(on_mount(&image, 0, &mounts)).says("boot 1\n");
    assert_eq!(fs::metadata(&data).expect("it was made").len(), 2 << 20);
    pod.remove();
    assert_eq!(fs::read(&system).expect("it stays")[512], 1);
}

#[test]
fn what_a_claim_cannot_be_is_refused_and_changes_nothing() {
    let node = node();
    let image = boot_image(&node);
    let block = Block::new(&node);
    let [empty, linked, odd] = ["empty", "linked", "odd"].map(|name| {
        let directory = node.directory().join(name);
        fs::create_dir(&directory).expect("the node's directory is there");
        directory
    });
    symlink(&block.file, linked.join("disk.img")).expect("the directory is there");
    fs::write(odd.join("disk.img"), [0; 700]).expect("the directory is there");
    let pod = node.crictl.run_pod_of("vm", pod(&node, "refused", "root=claim:system,boot=1"));
    let both = on_device(&image, 0, &block.device, "rw");
    let mount = json!({"host_path": empty, "container_path": "/run/nacelle/vm/root"});
    let elsewhere = json!({"host_path": block.device, "container_path": "/dev/nacelle/other", "permissions": "rw"});
    for (container, words) in [
        (container(&image, 0), "disk root is claim system, which the container has not"),
        (on_device(&image, 0, &block.device, "r"), "config.devices.permissions is \"r\""),
        (on_device(&image, 0, "/dev/null", "rw"), "config.devices.host_path is \"/dev/null\""),
        (on_device(&image, 0, &block.file.display().to_string(), "rw"), "config.devices.host_path"),
        (both.set("mounts", json!([mount])), "not both"),
        (container(&image, 0).set("devices", json!([elsewhere])), "none of the specification's"),
        (on_mount(&image, 0, &[("root", &empty, false)]), "there is no file disk.img"),
        (on_mount(&image, 0, &[("root", &linked, false)]), "disk.img is a link"),
        (on_mount(&image, 0, &[("root", &odd, false)]), "disk.img has 700 bytes"),
        (on_mount(&image, 0, &[("root", &odd, true)]), "config.mounts.readonly is \"true\""),
        (on_mount(&image, 0, &[("root", &block.file, false)]), "needs a directory"),
    ] {
        let told = pod.try_create(container).err();
        assert!(told.contains(words) || told.contains(&words.replace('"', "\\\"")), "{words:?} in {told}");
    }
    // As a mounted file system of the node would hold the device.
    let held = File::options().read(true).custom_flags(nix::fcntl::OFlag::O_EXCL.bits()).open(&block.device);
    let told = pod.try_create(on_device(&image, 0, &block.device, "rw")).err();
    assert!(told.contains("FailedPrecondition") && told.contains("in use on the node"), "{told}");
    drop(held.expect("nobody else has it"));
    assert!(fs::read_dir(&empty).expect("it is there").next().is_none(), "nothing is made in a claim");
    pod.start(on_device(&image, 0, &block.device, "rw")).says("boot 1\n");
    pod.remove();
}

#[test]
fn a_claim_that_is_shareable_is_written_by_several_machines_and_by_no_other() {
    let node = node();
    let image = boot_image(&node);
    let block = Block::new(&node);
    let spec = |shareable: bool| {
        let spec = json!({
            "domain": {
                "memory": { "guest": "64Mi" },
                "ioThreadsPolicy": "auto",
                "devices": {
                    "blockMultiQueue": true,
                    "disks": [
                        { "name": "root", "disk": {}, "bootOrder": 1, "shareable": shareable },
                        { "name": "own", "disk": {}, "dedicatedIOThread": true }, { "name": "scsi", "disk": { "bus": "scsi" } },
                    ],
                },
            },
            "volumes": [
                { "name": "root", "persistentVolumeClaim": { "claimName": "system" } },
                { "name": "own", "emptyDisk": { "capacity": "1Mi" } }, { "name": "scsi", "emptyDisk": { "capacity": "1Mi" } },
            ],
        });
        spec.to_string()
    };
    let pod = |name: &str, shareable| annotated(&node, name, &[("kind", "machine"), ("spec", &spec(shareable))]);
    let on_device = |attempt| on_device(&image, attempt, &block.device, "mrw");
    let first = node.crictl.run_pod_of("vm", pod("first", true));
    let running = first.start(on_device(0));
    running.says("boot 1\n");
    let machines = node.processes("-blockdev");
    let [machine] = machines.as_slice() else { panic!("one machine: {machines:?}") };
    let told = fs::read_to_string(format!("/proc/{machine}/cmdline")).expect("it runs");
    for words in
        ["iothread,id=thread0", "iothread=thread0", "iothread=thread1", "num-queues=1", "num_queues=1", "share-rw=on"]
    {
        assert!(told.contains(words), "{words} in {told}");
    }
    // A second VM writes at the same time, and each reads the other's data.
    let second = node.crictl.run_pod_of("vm", pod("second", true));
    second.start(on_device(0)).says("boot 2\n");
    assert_eq!(running.status()["state"], "CONTAINER_RUNNING");
    let third = node.crictl.run_pod_of("vm", pod("third", false));
    let refused = third.try_create(on_device(0)).err();
    assert!(refused.contains("in use by another VM") && refused.contains("shareable"), "{refused}");
    [first, second].into_iter().for_each(nacelle_e2e::crictl::RunningPod::remove);
    third.start(on_device(1)).says("boot 3\n");
    let fourth = node.crictl.run_pod_of("vm", pod("fourth", true));
    assert!(fourth.try_create(on_device(0)).err().contains("in use by another VM"));
    [third, fourth].into_iter().for_each(nacelle_e2e::crictl::RunningPod::remove);
}

/// Returns a directory as kubelet makes it of a ConfigMap or a Secret.
fn projected(node: &Node, name: &str, files: &[(&str, &str)]) -> PathBuf {
    let directory = node.directory().join(name);
    let inner = directory.join("..2026_11_23_05_00_00.1");
    fs::create_dir_all(&inner).expect("the node's directory is there");
    symlink("..2026_11_23_05_00_00.1", directory.join("..data")).expect("the directory is there");
    for (file, text) in files {
        fs::write(inner.join(file), text).expect("the directory is there");
        symlink(Path::new("..data").join(file), directory.join(file)).expect("the directory is there");
    }
    directory
}

/// Returns the in-memory file systems that are disks of a VM, by their labels, with their files.
fn disks_in_memory(qemu: i32) -> BTreeMap<String, BTreeMap<String, String>> {
    let all = fs::read_dir(format!("/proc/{qemu}/fd")).expect("it runs").flatten();
    let ours = all.filter(|entry| {
        fs::read_link(entry.path()).is_ok_and(|link| link.display().to_string().contains("memfd:nacelle-disk"))
    });
    ours.map(|entry| {
        let bytes = fs::read(entry.path()).expect("root reads it");
        let system =
            fatfs::FileSystem::new(Cursor::new(bytes), fatfs::FsOptions::new()).expect("it is a FAT file system");
        let files = system.root_dir().iter().flatten().filter(fatfs::DirEntry::is_file);
        let read = files.map(|file| {
            let mut text = String::new();
            file.to_file().read_to_string(&mut text).expect("it is text");
            (file.file_name(), text)
        });
        (system.volume_label(), read.collect())
    })
    .collect()
}

#[test]
fn what_kubelet_writes_is_on_disks_in_memory() {
    let node = node();
    let image = boot_image(&node);
    let settings = projected(&node, "settings", &[("Some.Setting_with-a_long.name", "on"), ("b", "2")]);
    let secret = projected(&node, "secret", &[("password", "s3cr3t-one")]);
    let fields = projected(&node, "fields", &[("labels", "app=web")]);
    let user = projected(&node, "user", &[("userdata", "#cloud-config\n# s3cr3t-two\n")]);
    let keys = projected(&node, "keys", &[("me", "ssh-ed25519 AAAA me\n")]);
    let label = |label: &str| {
        json!({
            "domain": {
                "memory": { "guest": "64Mi" },
                "devices": { "disks": [
                    { "name": "root", "disk": {}, "bootOrder": 1 }, { "name": "settings", "cdrom": { "bus": "sata" } },
                    { "name": "secret", "disk": { "readonly": true } }, { "name": "fields", "disk": {} }, { "name": "init", "disk": {} },
                ] },
            },
            "volumes": [
                { "name": "root", "containerDisk": { "image": image } },
                { "name": "settings", "configMap": { "name": "settings", "volumeLabel": label } },
                { "name": "secret", "secret": { "secretName": "mine", "volumeLabel": "SECRET" } },
                { "name": "fields", "downwardAPI": { "fields": [
                    { "path": "labels", "fieldRef": { "fieldPath": "metadata.labels" } },
                ] } },
                { "name": "init", "cloudInitNoCloud": { "secretRef": { "name": "user" } } },
            ],
            "accessCredentials": [{ "sshPublicKey": {
                "source": { "secret": { "secretName": "keys" } }, "propagationMethod": { "noCloud": {} },
            } }],
        })
        .to_string()
    };
    let of =
        |name: &str, volume_label: &str| annotated(&node, name, &[("kind", "machine"), ("spec", &label(volume_label))]);
    let file = node.crictl.file("pod", &of("long", "twelve-bytes").0);
    let told = node.crictl.try_call(["runp", "--runtime", "vm", &file]).err();
    assert!(told.contains("volumeLabel") && told.contains("at most 11"), "{told}");

    let pod = node.crictl.run_pod_of("vm", of("files", "Settings"));
    let all: [(&str, &Path, bool); 5] = [
        ("settings", &settings, true),
        ("secret", &secret, true),
        ("fields", &fields, true),
        ("secret-user", &user, true),
        ("secret-keys", &keys, true),
    ];
    for (without, words) in [(1, "disk secret is secret mine"), (4, "disk init is of secret keys")] {
        let some: Vec<_> = all.iter().enumerate().filter(|(n, _)| *n != without).map(|(_, mount)| *mount).collect();
        let told = pod.try_create(on_mount(&image, 0, &some)).err();
        assert!(told.contains(words) && told.contains("InvalidArgument"), "{words:?} in {told}");
    }
    let running = pod.start(on_mount(&image, 0, &all));
    running.says("boot 1\n");
    let machines = node.processes("-blockdev");
    let [machine] = machines.as_slice() else { panic!("one machine: {machines:?}") };
    let mut disks = disks_in_memory(*machine);
    let of = |files: &[(&str, &str)]| -> BTreeMap<String, String> {
        files.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect()
    };
    let init = disks.remove("CIDATA").expect("cloud-init has its disk");
    assert_eq!(init["user-data"], "#cloud-config\n# s3cr3t-two\n");
    assert!(init["meta-data"].contains("ssh-ed25519 AAAA me"), "{init:?}");
    let expected = [
        ("Settings", of(&[("Some.Setting_with-a_long.name", "on"), ("b", "2")])),
        ("SECRET", of(&[("password", "s3cr3t-one")])),
        ("cfgdata", of(&[("labels", "app=web")])),
    ];
    assert_eq!(disks, expected.map(|(label, files)| (label.to_owned(), files)).into());
    // The secret is on no disk of the node but in its source.
    let found = call("grep", ["-rl".as_ref(), "s3cr3t".as_ref(), node.directory().as_os_str()]).stdout;
    let found: Vec<_> =
        found.lines().filter(|path| ![&secret, &user].iter().any(|from| Path::new(path).starts_with(from))).collect();
    assert!(found.is_empty(), "{found:?}");
    pod.remove();
    eventually("nothing is left", || node.left().is_empty().then_some(()));
}
