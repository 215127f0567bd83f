//! Tests disks of machine pods that belong to the node: claims (block devices and files), files of the node, volumes that kubelet
//! writes; their locks, what persists, what is rejected, and the state after all processes around them were killed.

use nacelle_e2e::machine::{annotated_pod, boot_disk, machine_container, machine_node, push_boot_image};
use nacelle_e2e::run::run_program;
use nacelle_e2e::{ContainerRequest, PodRequest, TestNode, eventually};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Cursor, Read};
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};

/// A loop device over a bootable disk. Dropping it detaches it.
struct BlockClaim {
    file: PathBuf,
    device: String,
}

impl BlockClaim {
    fn new(node: &TestNode) -> BlockClaim {
        let file = node.directory().join("block.raw");
        fs::write(&file, boot_disk()).expect("the directory is there");
        let device = run_program("losetup", ["--find", "--show", &file.display().to_string()]).ok();
        BlockClaim { file, device }
    }

    /// Returns how often the disk has booted, as seen on the node.
    fn boot_count(&self) -> u8 {
        run_program("sync", [&self.device]).ok();
        fs::read(&self.device).expect("root reads it")[512]
    }
}

impl Drop for BlockClaim {
    fn drop(&mut self) {
        run_program("losetup", ["--detach", &self.device]);
        assert!(self.file.exists(), "nothing removes a claim");
    }
}

fn pod_with_disks(node: &TestNode, name: &str, disks: &str) -> PodRequest {
    annotated_pod(node, name, &[("kind", "machine"), ("memory", "64Mi"), ("disks", disks)])
}

fn container_with_device(image: &str, attempt: u32, device: &str, permissions: &str) -> ContainerRequest {
    let device = json!({"host_path": device, "container_path": "/dev/nacelle/root", "permissions": permissions});
    machine_container(image, attempt).set("devices", json!([device]))
}

fn container_with_mounts(image: &str, attempt: u32, mounts: &[(&str, &Path, bool)]) -> ContainerRequest {
    let mount = |(name, host, readonly): &(&str, &Path, bool)| json!({"host_path": host, "container_path": format!("/run/nacelle/vm/{name}"), "readonly": readonly});
    machine_container(image, attempt).set("mounts", Value::Array(mounts.iter().map(mount).collect()))
}

#[test]
fn a_block_claim_has_one_vm_and_keeps_its_data() {
    let node = machine_node();
    let image = push_boot_image(&node);
    let block = BlockClaim::new(&node);
    let written = "root=claim:system,boot=1";
    let first = node.crictl.run_pod_with_handler("vm", pod_with_disks(&node, "first", written));
    let running = first.start(container_with_device(&image, 0, &block.device, "mrw"));
    running.wait_for_output("boot 1\n");
    assert_eq!(block.boot_count(), 1);

    let second = node.crictl.run_pod_with_handler("vm", pod_with_disks(&node, "second", written));
    for read_only in [false, true] {
        let disks = if read_only { "root=claim:system,boot=1,readonly" } else { written };
        let other = node
            .crictl
            .run_pod_with_handler("vm", pod_with_disks(&node, if read_only { "reader" } else { "writer" }, disks));
        let error = other.try_create(container_with_device(&image, 0, &block.device, "mrw")).err();
        for words in ["FailedPrecondition", "disk root", &block.device, "in use by another VM"] {
            assert!(error.contains(words), "{words:?} in {error}");
        }
        other.remove();
    }
    node.crictl.call(["stop", "--timeout", "60", &running.id]);
    assert_eq!(running.wait_for_exit()["exitCode"], 0);
    // After a restart of the container, and in another pod, the written data are still there.
    let again = first.start(container_with_device(&image, 1, &block.device, "rw"));
    again.wait_for_output("boot 2\n");
    node.crictl.call(["stop", "--timeout", "0", &again.id]);
    again.wait_for_exit();
    let next = second.start(container_with_device(&image, 0, &block.device, "mrw"));
    next.wait_for_output("boot 3\n");
    first.remove();
    second.remove();
    assert_eq!(block.boot_count(), 3);

    // Readers share it, and change nothing.
    let read = "root=claim:system,boot=1,readonly";
    let readers =
        ["left", "right"].map(|name| node.crictl.run_pod_with_handler("vm", pod_with_disks(&node, name, read)));
    let running = readers.each_ref().map(|pod| pod.start(container_with_device(&image, 0, &block.device, "r")));
    running.iter().for_each(|machine| drop(machine.wait_for_output("boot 4\n")));
    assert_eq!(block.boot_count(), 3);
    drop(running);
    readers.into_iter().for_each(nacelle_e2e::crictl::RunningPod::remove);
    eventually("nothing is left", || node.leaked().is_empty().then_some(()));
}

#[test]
fn a_file_claim_survives_the_death_of_the_processes_that_use_it() {
    let mut node = machine_node();
    let image = push_boot_image(&node);
    let directory = node.directory().join("claim");
    fs::create_dir(&directory).expect("the node's directory is there");
    fs::write(directory.join("disk.img"), boot_disk()).expect("the directory is there");
    let disks = "root=claim:system,boot=1";
    let config = pod_with_disks(&node, "first", disks);
    let again = PodRequest(config.0.clone());
    let id = {
        let first = node.crictl.run_pod_with_handler("vm", config);
        first.start(container_with_mounts(&image, 0, &[("root", &directory, false)])).wait_for_output("boot 1\n");
        first.id.clone()
    };
    // The keeper's command line also names QEMU, but not its disks.
    assert_eq!(node.pids_matching("-blockdev").len(), 1, "one machine");
    let pods = node.pids_matching("nacelle-pod --dir ");
    assert_eq!(pods.len(), 1, "one pod");
    run_program("kill", ["-9", &pods[0].to_string()]).ok();
    node.kill();
    eventually("the machine goes with its pod's process", || node.pids_matching("-blockdev").is_empty().then_some(()));
    node.start();
    node.crictl.pod_handle(&id, again).remove();
    eventually("nothing is left", || node.leaked().is_empty().then_some(()));

    let second = node.crictl.run_pod_with_handler("vm", pod_with_disks(&node, "second", disks));
    let running = second.start(container_with_mounts(&image, 0, &[("root", &directory, false)]));
    running.wait_for_output("boot 2\n");
    // The next daemon finds the VM with its disk.
    let third = pod_with_disks(&node, "third", disks);
    let (id, running) = (second.id.clone(), running.id.clone());
    let second = PodRequest(pod_with_disks(&node, "second", disks).0);
    node.kill();
    node.start();
    let third = node.crictl.run_pod_with_handler("vm", third);
    let error = third.try_create(container_with_mounts(&image, 0, &[("root", &directory, false)])).err();
    assert!(error.contains("in use by another VM"), "{error}");
    let state = || node.crictl.call_json(["inspect", "-o", "json", &running])["status"]["state"].clone();
    eventually("the machine is found again", || (state() == "CONTAINER_RUNNING").then_some(()));
    node.crictl.pod_handle(&id, second).remove();
    third.start(container_with_mounts(&image, 1, &[("root", &directory, false)])).wait_for_output("boot 3\n");
    third.remove();
    assert_eq!(fs::read(directory.join("disk.img")).expect("it is there")[512], 3);
}

#[test]
fn host_disks_use_existing_files_and_create_missing_ones() {
    let node = machine_node();
    let image = push_boot_image(&node);
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
    let pod = annotated_pod(&node, "files", &[("kind", "machine"), ("spec", &spec.to_string())]);
    let pod = node.crictl.run_pod_with_handler("vm", pod);
    let mounts: [(&str, &Path, bool); 2] = [("root", &system, false), ("data", &data, false)];
    pod.start(container_with_mounts(&image, 0, &mounts)).wait_for_output("boot 1\n");
    assert_eq!(fs::metadata(&data).expect("it was made").len(), 2 << 20);
    pod.remove();
    assert_eq!(fs::read(&system).expect("it stays")[512], 1);
}

#[test]
fn invalid_claims_are_refused_without_effect() {
    let node = machine_node();
    let image = push_boot_image(&node);
    let block = BlockClaim::new(&node);
    let [empty, linked, odd] = ["empty", "linked", "odd"].map(|name| {
        let directory = node.directory().join(name);
        fs::create_dir(&directory).expect("the node's directory is there");
        directory
    });
    symlink(&block.file, linked.join("disk.img")).expect("the directory is there");
    fs::write(odd.join("disk.img"), [0; 700]).expect("the directory is there");
    let pod = node.crictl.run_pod_with_handler("vm", pod_with_disks(&node, "refused", "root=claim:system,boot=1"));
    let both = container_with_device(&image, 0, &block.device, "rw");
    let mount = json!({"host_path": empty, "container_path": "/run/nacelle/vm/root"});
    let elsewhere = json!({"host_path": block.device, "container_path": "/dev/nacelle/other", "permissions": "rw"});
    for (container, words) in [
        (machine_container(&image, 0), "disk root is claim system, which the container does not have"),
        (container_with_device(&image, 0, &block.device, "r"), "config.devices.permissions is \"r\""),
        (container_with_device(&image, 0, "/dev/null", "rw"), "config.devices.host_path is \"/dev/null\""),
        (container_with_device(&image, 0, &block.file.display().to_string(), "rw"), "config.devices.host_path"),
        (both.set("mounts", json!([mount])), "not both"),
        (machine_container(&image, 0).set("devices", json!([elsewhere])), "the specification has no disk at this path"),
        (container_with_mounts(&image, 0, &[("root", &empty, false)]), "there is no file disk.img"),
        (container_with_mounts(&image, 0, &[("root", &linked, false)]), "disk.img is a link"),
        (container_with_mounts(&image, 0, &[("root", &odd, false)]), "disk.img has 700 bytes"),
        (container_with_mounts(&image, 0, &[("root", &odd, true)]), "config.mounts.readonly is \"true\""),
        (container_with_mounts(&image, 0, &[("root", &block.file, false)]), "needs a directory"),
    ] {
        let error = pod.try_create(container).err();
        assert!(error.contains(words) || error.contains(&words.replace('"', "\\\"")), "{words:?} in {error}");
    }
    // As a mounted file system of the node would hold the device.
    let held = File::options().read(true).custom_flags(nix::fcntl::OFlag::O_EXCL.bits()).open(&block.device);
    let error = pod.try_create(container_with_device(&image, 0, &block.device, "rw")).err();
    assert!(error.contains("FailedPrecondition") && error.contains("in use on the node"), "{error}");
    drop(held.expect("no other process has locked it"));
    assert!(fs::read_dir(&empty).expect("it is there").next().is_none(), "nothing is made in a claim");
    pod.start(container_with_device(&image, 0, &block.device, "rw")).wait_for_output("boot 1\n");
    pod.remove();
}

#[test]
fn a_shareable_claim_is_writable_by_several_vms_only() {
    let node = machine_node();
    let image = push_boot_image(&node);
    let block = BlockClaim::new(&node);
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
    let pod = |name: &str, shareable| annotated_pod(&node, name, &[("kind", "machine"), ("spec", &spec(shareable))]);
    let on_device = |attempt| container_with_device(&image, attempt, &block.device, "mrw");
    let first = node.crictl.run_pod_with_handler("vm", pod("first", true));
    let running = first.start(on_device(0));
    running.wait_for_output("boot 1\n");
    let machines = node.pids_matching("-blockdev");
    let [machine] = machines.as_slice() else { panic!("one machine: {machines:?}") };
    let cmdline = fs::read_to_string(format!("/proc/{machine}/cmdline")).expect("it runs");
    for words in
        ["iothread,id=thread0", "iothread=thread0", "iothread=thread1", "num-queues=1", "num_queues=1", "share-rw=on"]
    {
        assert!(cmdline.contains(words), "{words} in {cmdline}");
    }
    // A second VM writes at the same time, and each reads the other's data.
    let second = node.crictl.run_pod_with_handler("vm", pod("second", true));
    second.start(on_device(0)).wait_for_output("boot 2\n");
    assert_eq!(running.status()["state"], "CONTAINER_RUNNING");
    let third = node.crictl.run_pod_with_handler("vm", pod("third", false));
    let refused = third.try_create(on_device(0)).err();
    assert!(refused.contains("in use by another VM") && refused.contains("shareable"), "{refused}");
    [first, second].into_iter().for_each(nacelle_e2e::crictl::RunningPod::remove);
    third.start(on_device(1)).wait_for_output("boot 3\n");
    let fourth = node.crictl.run_pod_with_handler("vm", pod("fourth", true));
    assert!(fourth.try_create(on_device(0)).err().contains("in use by another VM"));
    [third, fourth].into_iter().for_each(nacelle_e2e::crictl::RunningPod::remove);
}

/// Returns a directory as kubelet makes it of a ConfigMap or a Secret.
fn write_config_volume(node: &TestNode, name: &str, files: &[(&str, &str)]) -> PathBuf {
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
fn config_volumes_become_disks_in_memory() {
    let node = machine_node();
    let image = push_boot_image(&node);
    let settings = write_config_volume(&node, "settings", &[("Some.Setting_with-a_long.name", "on"), ("b", "2")]);
    let secret = write_config_volume(&node, "secret", &[("password", "s3cr3t-one")]);
    let fields = write_config_volume(&node, "fields", &[("labels", "app=web")]);
    let user = write_config_volume(&node, "user", &[("userdata", "#cloud-config\n# s3cr3t-two\n")]);
    let keys = write_config_volume(&node, "keys", &[("me", "ssh-ed25519 AAAA me\n")]);
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
    let of = |name: &str, volume_label: &str| {
        annotated_pod(&node, name, &[("kind", "machine"), ("spec", &label(volume_label))])
    };
    let file = node.crictl.write_input("pod", &of("long", "twelve-bytes").0);
    let error = node.crictl.try_call(["runp", "--runtime", "vm", &file]).err();
    assert!(error.contains("volumeLabel") && error.contains("at most 11"), "{error}");

    let pod = node.crictl.run_pod_with_handler("vm", of("files", "Settings"));
    let all: [(&str, &Path, bool); 5] = [
        ("settings", &settings, true),
        ("secret", &secret, true),
        ("fields", &fields, true),
        ("secret-user", &user, true),
        ("secret-keys", &keys, true),
    ];
    for (without, words) in [(1, "disk secret is secret mine"), (4, "disk init is of secret keys")] {
        let some: Vec<_> = all.iter().enumerate().filter(|(n, _)| *n != without).map(|(_, mount)| *mount).collect();
        let error = pod.try_create(container_with_mounts(&image, 0, &some)).err();
        assert!(error.contains(words) && error.contains("InvalidArgument"), "{words:?} in {error}");
    }
    let running = pod.start(container_with_mounts(&image, 0, &all));
    running.wait_for_output("boot 1\n");
    let machines = node.pids_matching("-blockdev");
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
    let found = run_program("grep", ["-rl".as_ref(), "s3cr3t".as_ref(), node.directory().as_os_str()]).stdout;
    let found: Vec<_> =
        found.lines().filter(|path| ![&secret, &user].iter().any(|from| Path::new(path).starts_with(from))).collect();
    assert!(found.is_empty(), "{found:?}");
    pod.remove();
    eventually("nothing is left", || node.leaked().is_empty().then_some(()));
}
