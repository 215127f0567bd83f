//! Tests image volumes, in which containers see further images, and volumes of the node; and what is rejected.

use nacelle_e2e::cri::container_config;
use nacelle_e2e::node::{NodeOptions, engine};
use nacelle_e2e::run::{block_on, run_program};
use nacelle_e2e::{ContainerRequest, CriClient, PodRequest, TestArtifact, TestImage, TestNode};
use nacelle_proto::cri;
use serde_json::{Value, json};
use sha2::Digest as _;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Returns an image with some files.
fn volume_image() -> TestImage {
    TestImage::busybox().with_layer(|layer| {
        layer.add_directory("conf", 0o755);
        layer.add_file("conf/app", b"of the volume", 0o644);
        layer.add_directory("conf/deep", 0o755);
        layer.add_file("conf/deep/er", b"deeper", 0o644);
        layer.add_symlink("current", "/conf/deep");
        layer.add_symlink("out", "../../../../run/nacelle");
    })
}

fn image_mount(at: &str, image: &str, sub_path: &str) -> Value {
    json!({"container_path": at, "image": {"image": image}, "image_sub_path": sub_path, "readonly": true})
}

/// Returns the mounts in ContainerStatus; crictl's own types may lack fields of ours.
fn mounts_of(node: &TestNode, container_id: &str) -> Vec<cri::Mount> {
    block_on(async {
        let request = cri::ContainerStatusRequest { container_id: container_id.to_owned(), verbose: false };
        let answer = CriClient::new(node.channel()).container_status(request).await.unwrap();
        answer.into_inner().status.unwrap().mounts
    })
}

/// Creates a container with these mounts, or returns the error. crictl's own types may lack fields of ours.
fn create_with_mounts(node: &TestNode, pod: &str, image: &str, mounts: Vec<cri::Mount>) -> Result<String, String> {
    let container = container_config("c", image, &["sleep", "600"]);
    let config = cri::ContainerConfig { log_path: String::new(), mounts, ..container };
    block_on(async {
        let pod_sandbox_id = pod.to_owned();
        let request = cri::CreateContainerRequest { pod_sandbox_id, config: Some(config), sandbox_config: None };
        let answer = CriClient::new(node.channel()).create_container(request).await;
        answer
            .map(|answer| answer.into_inner().container_id)
            .map_err(|status| format!("{:?}: {}", status.code(), status.message()))
    })
}

fn image_disk_usage(node: &TestNode) -> u64 {
    let info = node.crictl.call_json(["imagefsinfo", "-o", "json"]);
    let text = info["status"]["imageFilesystems"][0]["usedBytes"]["value"].as_str().map(str::to_owned);
    text.and_then(|text| text.parse().ok()).expect("the use of the disk")
}

#[test]
fn image_volumes_are_mounted_and_kept_while_in_use() {
    let mut node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let volume = node
        .push_and_pull(&volume_image().with_layer(|layer| layer.add_file("weight", &[7; 3 << 20], 0o644)), "data:1");
    let volume_id =
        node.crictl.call_json(["inspecti", "-o", "json", &volume])["status"]["id"].as_str().unwrap().to_owned();
    let (one_id, two_id) = {
        let pod = node.crictl.run_pod(PodRequest::new("volumes", node.directory()));
        let mounts = json!([
            // Below the next mount, and listed before it: they are mounted in the order of their depth.
            image_mount("/mnt/all/conf/deep", &volume, "bin"),
            image_mount("/mnt/all", &volume, ""),
            // Over an existing directory, with a link in the sub-path.
            image_mount("/var", &volume, "current"),
            image_mount("/self", &image, ""),
        ]);
        let one = pod.start(ContainerRequest::sh("one", &image, "echo up; sleep 600").set("mounts", mounts));
        one.wait_for_output("up");
        let output = one.exec("cat /mnt/all/conf/app; echo; ls /mnt/all/conf/deep/busybox; cat /var/er; echo").ok();
        assert_eq!(output, "of the volume\n/mnt/all/conf/deep/busybox\ndeeper");
        assert_eq!(one.exec("/self/bin/busybox echo runs").ok(), "runs");
        for path in ["/mnt/all/x", "/mnt/all/conf/app", "/var/x", "/self/x"] {
            let refused = one.exec(&format!("echo x >{path}")).err();
            assert!(refused.contains("Read-only file system"), "{path}: {refused}");
        }
        let flags = one.exec("grep -E ' (/mnt/all|/var|/self) ' /proc/mounts | cut -d' ' -f3,4").ok();
        assert_eq!(flags.lines().count(), 3, "{flags}");
        for line in flags.lines() {
            assert!(line.starts_with("erofs ro,nosuid,nodev") && !line.contains("noexec"), "{line}");
        }
        let two = pod.start(
            ContainerRequest::sh("two", &volume, "cat /again/app; echo; sleep 600")
                .set("mounts", json!([image_mount("/again", &volume_id, "conf")]))
                .set("linux", json!({"security_context": {"readonly_rootfs": true}})),
        );
        two.wait_for_output("of the volume");
        (one.id.clone(), two.id.clone())
    };
    let reported = mounts_of(&node, &one_id);
    assert_eq!(reported.len(), 4, "{reported:?}");
    let var = reported.iter().find(|mount| mount.container_path == "/var").expect("it is reported");
    assert!(var.readonly && var.host_path.is_empty() && var.image_sub_path == "current", "{var:?}");
    let spec = var.image.as_ref().expect("it is an image's");
    assert_eq!((spec.image.as_str(), spec.image_ref.as_str()), (volume.as_str(), volume_id.as_str()));

    // The image is removed while containers see it: it leaves the list but stays visible, also after a restart of the daemon.
    let before = image_disk_usage(&node);
    node.crictl.call(["rmi", &volume]);
    node.kill();
    node.start();
    assert_ne!(node.crictl.try_call(["inspecti", &volume]).code, 0);
    assert_eq!(mounts_of(&node, &one_id), reported);
    let exec = |id: &str, script: &str| node.crictl.call(["exec", "--sync", id, "/bin/sh", "-c", script]);
    assert_eq!(exec(&one_id, "dd if=/mnt/all/weight bs=65536 2>/dev/null | wc -c"), (3 << 20).to_string());
    node.crictl.call(["rm", "--force", &one_id]);
    assert_eq!(exec(&two_id, "cat /again/deep/er"), "deeper");
    assert!(image_disk_usage(&node) + (1 << 20) > before, "its files are needed");
    node.crictl.call(["rm", "--force", &two_id]);
    nacelle_e2e::eventually("the image's files go with its last user", || {
        (image_disk_usage(&node) + (2 << 20) < before).then_some(())
    });
}

#[test]
fn the_files_of_an_artifact_are_mounted_and_it_is_no_image_to_run() {
    const TYPE: &str = "application/vnd.example.model.v1";
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let weights: Vec<u8> = (0..3u32 << 20).map(|n| (n % 251) as u8).collect();
    let model = TestArtifact::new(TYPE)
        .with_file("model.bin", &weights)
        .with_file("run.sh", b"#!/bin/sh\necho runs\n")
        .with_file("docs/en/readme", b"read me");
    let (name, digest) = node.registry.push_artifact(&model, "models/one:1");
    let before = image_disk_usage(&node);
    node.crictl.call(["pull", &name]);
    let status = node.crictl.call_json(["inspecti", "-o", "json", &name]);
    assert_eq!(status["status"]["id"], digest.as_str(), "{status}");
    assert_eq!(status["status"]["repoTags"], json!([name]), "{status}");
    assert_eq!(status["status"]["repoDigests"], json!([format!("127.0.0.1:5000/models/one@{digest}")]), "{status}");
    assert_eq!(status["info"]["artifactType"], TYPE, "{status}");
    assert!(node.crictl.call(["images", "-q"]).contains(&digest));

    let pod = node.crictl.run_pod(PodRequest::new("artifact", node.directory()));
    // kubelet mounts what PullImage returned.
    let mounts = json!([image_mount("/models", &digest, ""), image_mount("/docs", &name, "docs")]);
    let container = pod.start(ContainerRequest::sh("c", &image, "sleep 600").set("mounts", mounts));
    let expected = hex::encode(sha2::Sha256::digest(&weights));
    assert_eq!(container.exec("sha256sum /models/model.bin | cut -d' ' -f1").ok(), expected);
    let output = container.exec("cat /models/docs/en/readme; echo; cat /docs/en/readme; echo; ls /models").ok();
    assert_eq!(output, "read me\nread me\ndocs\nmodel.bin\nrun.sh");
    assert_eq!(container.exec("stat -c '%a %u %g %Y' /models/model.bin").ok(), "444 0 0 0");
    for refused in ["echo x >/models/x", "echo x >/models/model.bin", "rm /docs/en/readme"] {
        let error = container.exec(refused).err();
        assert!(error.contains("Read-only file system"), "{refused}: {error}");
    }
    assert!(container.exec("/models/run.sh").err().contains("Permission denied"));

    let own = pod.try_create(ContainerRequest::sh("own", &name, "true")).err();
    assert!(own.contains("InvalidArgument") && own.contains(TYPE) && own.contains(&name), "{own}");
    let file = json!([image_mount("/mnt", &digest, "model.bin")]);
    let file = pod.try_create(ContainerRequest::sh("file", &image, "true").set("mounts", file)).err();
    assert!(file.contains("desc = ImageVolumeMountFailed: "), "{file}");
    let hostile = TestArtifact::new(TYPE).with_file("../../etc/cron.d/x", b"x");
    let (hostile, _) = node.registry.push_artifact(&hostile, "models/bad:1");
    let refused = node.crictl.try_call(["pull", &hostile]).err();
    assert!(refused.contains("InvalidArgument") && refused.contains("../../etc/cron.d/x"), "{refused}");

    node.crictl.call(["rmi", &name]);
    assert!(!node.crictl.call(["images", "-q"]).contains(&digest));
    assert_eq!(container.exec("cat /docs/en/readme").ok(), "read me");
    pod.remove();
    nacelle_e2e::eventually("the files go with their last user", || {
        (image_disk_usage(&node) < before + (1 << 20)).then_some(())
    });
}

#[test]
fn invalid_volumes_are_refused_and_leave_nothing() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let volume = node.push_and_pull(&volume_image(), "data:1");
    let pod = node.crictl.run_pod(PodRequest::new("refused", node.directory()));
    let with = |key: &str, value: Value| {
        let mut mount = image_mount("/mnt", &volume, "");
        mount[key] = value;
        mount
    };
    // kubelet looks for this reason only at the beginning of the message.
    let reason = "desc = ImageVolumeMountFailed: ";
    let rows = [
        (image_mount("/mnt", &volume, "none"), reason, "at /mnt has no "),
        (image_mount("/mnt", &volume, "out"), reason, "at /mnt has no "),
        (image_mount("/mnt", &volume, "conf/app"), reason, "is no directory"),
        (image_mount("/etc/passwd", &volume, ""), reason, "/etc/passwd is not a directory"),
        (image_mount("/mnt", &volume, "/conf"), "InvalidArgument", "image_sub_path"),
        (image_mount("/mnt", &volume, "conf/../.."), "InvalidArgument", "image_sub_path"),
        (image_mount("/proc/self", &volume, ""), "InvalidArgument", "container_path"),
        (image_mount("mnt", &volume, ""), "InvalidArgument", "container_path"),
        (image_mount("/mnt", "127.0.0.1:5000/none:1", ""), "NotFound", "none:1"),
        (with("readonly", json!(false)), "InvalidArgument", "readonly"),
        (with("host_path", json!("/etc")), "InvalidArgument", "host_path"),
    ];
    for (mount, code, words) in rows {
        // A valid mount first: its placement must be cleaned up.
        let mounts = json!([image_mount("/good", &volume, "conf"), mount]);
        let refused = pod.try_create(ContainerRequest::sh("one", &image, "true").set("mounts", mounts)).err();
        assert!(refused.contains(code) && refused.contains(words), "{code}, {words}: {refused}");
    }
    assert_eq!(node.crictl.call(["ps", "-aq"]), "");
    // Rejected requests leave nothing that blocks a later one.
    let mounts = json!([image_mount("/good", &volume, "conf")]);
    pod.start(ContainerRequest::sh("one", &image, "cat /good/app").set("mounts", mounts))
        .wait_for_output("of the volume");
    pod.remove();
}

/// Options with which changes on the node are visible at once.
fn options_without_cache() -> NodeOptions {
    NodeOptions { extra: "[sandbox]\nvolume_cache_ttl = \"0s\"\n".to_owned(), ..NodeOptions::default() }
}

#[test]
fn changes_on_the_node_become_visible_in_the_guest() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let directory = node.directory().join("shared");
    fs::create_dir(&directory).expect("the node's directory is writable");
    let write =
        |name: &str, text: &str| fs::write(directory.join(name), text).expect("the node's directory is writable");
    write("one", "first");
    let pod = node.crictl.run_pod(PodRequest::new("volumes", node.directory()));
    let mounts = json!([{"host_path": directory, "container_path": "/all"}]);
    let container = pod.start(ContainerRequest::sh("c", &image, "sleep 600").set("mounts", mounts));
    assert_eq!(container.exec("cat /all/one").ok(), "first");
    write("one", "second, and longer");
    write("two", "new");
    nacelle_e2e::eventually("the change is seen", || {
        (container.exec("cat /all/one /all/two").stdout == "second, and longernew").then_some(())
    });
    fs::remove_file(directory.join("one")).expect("it is ours");
    nacelle_e2e::eventually("it is gone", || (container.exec("ls /all").ok() == "two").then_some(()));
    // A container's own changes are visible to it and to the node at once.
    container.exec("mv /all/two /all/three && echo more >>/all/three && rm /all/three && echo x >/all/four").ok();
    assert_eq!(container.exec("ls /all").ok(), "four");
    assert_eq!(fs::read_to_string(directory.join("four")).expect("it is there"), "x\n");
    pod.remove();
    assert_eq!(node.leaked(), Vec::<String>::new());
}

#[test]
fn directories_and_files_of_the_node_are_volumes() {
    let node = TestNode::with_options(options_without_cache());
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let directory = node.directory().join("shared");
    fs::create_dir(&directory).expect("the node's directory is writable");
    let write = |path: &Path, text: &str| fs::write(path, text).expect("the node's directory is writable");
    write(&directory.join("from-node"), "of the node");
    write(&node.directory().join("secret"), "not for pods");
    std::os::unix::fs::symlink("../secret", directory.join("link")).expect("the node's directory is writable");
    let of_node =
        |of: &Path, at: &str, readonly: bool| json!({"host_path": of, "container_path": at, "readonly": readonly});
    let pod = node.crictl.run_pod(PodRequest::new("volumes", node.directory()));
    let file = directory.join("from-node");
    let mounts =
        json!([of_node(&directory, "/rw", false), of_node(&directory, "/ro", true), of_node(&file, "/etc/one", true)]);
    let container = pod.start(ContainerRequest::sh("c", &image, "sleep 600").set("mounts", mounts.clone()));
    assert_eq!(container.exec("cat /ro/from-node /etc/one").ok(), "of the nodeof the node");
    container.exec("echo back >/rw/from-pod && chown 1234:5678 /rw/from-pod && chmod 600 /rw/from-pod").ok();
    assert_eq!(fs::read_to_string(directory.join("from-pod")).expect("the pod has written"), "back\n");
    let written = fs::metadata(directory.join("from-pod")).expect("the pod has written");
    assert_eq!((written.uid(), written.gid(), written.mode()), (1234, 5678, 0o100600));
    for written in ["/ro/from-pod", "/ro/new", "/etc/one"] {
        assert_ne!(container.exec(&format!("echo over >{written}")).code, 0, "{written} is read-only");
    }
    // A change on the node is visible at once.
    write(&file, "changed");
    assert_eq!(container.exec("cat /rw/from-node /etc/one").ok(), "changedchanged");
    container.exec("dd if=/dev/zero of=/rw/big bs=1M count=3 2>/dev/null && sync").ok();
    assert_eq!(fs::metadata(directory.join("big")).expect("the pod has written").len(), 3 << 20);
    assert_eq!(container.exec("dd if=/ro/big bs=1M 2>/dev/null | wc -c").ok(), (3 << 20).to_string());
    // Only the volumes are there.
    for out in ["/rw/../secret", "/rw/link"] {
        assert_ne!(container.exec(&format!("cat {out}")).code, 0, "{out}");
    }
    // As in other runtimes, a missing directory is created. Two containers have separate volumes.
    let none = directory.join("none");
    let mounts = json!([of_node(&none, "/none", false), of_node(&directory, "/all", false)]);
    let later = pod.start(ContainerRequest::sh("d", &image, "sleep 600").set("mounts", mounts));
    later.exec("touch /none/made && test -f /all/none/made").ok();
    assert!(none.join("made").is_file(), "{none:?}");
    node.crictl.call(["rm", "-f", &later.id]);
    assert_eq!(container.exec("ls /rw/none").ok(), "made");
    if let Some(share) = node.pids_matching("nacelle-fs ").first() {
        // The file-server process is killed: the pod gets errors, continues, and can be removed.
        run_program("kill", ["-9", &share.to_string()]).ok();
        let error = container.exec("cat /rw/from-node").err();
        assert!(error.contains("I/O error") || error.contains("Input/output error"), "{error}");
        assert_eq!(container.exec("echo lives").ok(), "lives");
    } else {
        assert_eq!(engine(), "host");
    }
    pod.remove();
    assert_eq!(fs::read_to_string(directory.join("from-pod")).expect("what was written stays"), "back\n");
    assert_eq!(node.leaked(), Vec::<String>::new());
}

/// Returns the number of open files of a process with this name, without O_PATH descriptors.
fn open_files(pid: i32, name: &str) -> usize {
    const O_PATH: u32 = 0o10_000_000;
    let all = fs::read_dir(format!("/proc/{pid}/fd")).expect("it lives").flatten();
    let is_open = |number: &str| {
        let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).ok()?;
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:"))?;
        Some(u32::from_str_radix(flags.trim(), 8).ok()? & O_PATH == 0)
    };
    let open = all.filter(|entry| fs::read_link(entry.path()).is_ok_and(|to| to.ends_with(name)));
    open.filter(|entry| entry.file_name().to_str().and_then(is_open) == Some(true)).count()
}

#[test]
fn the_file_server_closes_files_and_maps_only_the_virtqueues() {
    let node = TestNode::new();
    if engine() == "host" {
        return; // there is no such process
    }
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let directory = node.directory().join("shared");
    fs::create_dir(&directory).expect("the node's directory is writable");
    let pod = node.crictl.run_pod(PodRequest::new("seen", node.directory()));
    let mounts = json!([{"host_path": directory, "container_path": "/rw"}]);
    let script =
        "exec 3>/rw/held; echo opened; while [ ! -e /rw/go ]; do sleep 0.2; done; exec 3>&-; echo closed; sleep 600";
    let container = pod.start(ContainerRequest::sh("c", &image, script).set("mounts", mounts));
    container.wait_for_output("opened");
    let share = node.pids_matching("nacelle-fs ").first().copied().expect("it is there");
    assert_eq!(open_files(share, "held"), 1);
    let ahead = container.exec("cat /sys/class/bdi/*/read_ahead_kb").ok();
    assert!(ahead.lines().any(|kib| kib == "496"), "{ahead}");
    fs::write(directory.join("go"), "").expect("the node's directory is writable");
    container.wait_for_output("closed");
    // The guest's close() does not wait for this.
    nacelle_e2e::eventually("it is closed here, too", || (open_files(share, "held") == 0).then_some(()));
    // The process accesses the virtqueues directly: in the memory of a QEMU guest, or else in a shared memory file for them.
    let maps = fs::read_to_string(format!("/proc/{share}/maps")).expect("it lives");
    let address = |text: &str| u64::from_str_radix(text, 16).expect("an address");
    let guests =
        maps.lines().filter(|line| line.contains("/memfd:")).filter_map(|line| line.split_once(' ')?.0.split_once('-'));
    let sizes: Vec<u64> = guests.map(|(start, end)| address(end) - address(start)).collect();
    assert!(!sizes.is_empty(), "{maps}");
    if engine() == "kvm" {
        assert!(sizes.iter().all(|size| *size == 2 << 20), "{maps}");
    }
    pod.remove();
    assert_eq!(node.leaked(), Vec::<String>::new());
}

/// Returns an ACL as the extended attribute has it (linux/posix_acl_xattr.h): tags, permissions and ids of its entries.
fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let entry = |(tag, bits, id): &(u16, u16, u32)| {
        [tag.to_le_bytes().to_vec(), bits.to_le_bytes().to_vec(), id.to_le_bytes().to_vec()].concat()
    };
    [2u32.to_le_bytes().to_vec(), entries.iter().flat_map(entry).collect()].concat()
}

#[test]
fn acls_of_volumes_are_enforced_kept_and_inherited() {
    const OWNER: u16 = 0x01;
    const USER: u16 = 0x02;
    const GROUP: u16 = 0x04;
    const MASK: u16 = 0x10;
    const OTHER: u16 = 0x20;
    const NONE: u32 = u32::MAX;
    const ACCESS: &str = "system.posix_acl_access";
    let node = TestNode::with_options(options_without_cache());
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let directory = node.directory().join("shared");
    let set = |name: &str, kind: &str, acl: &[u8]| {
        rustix::fs::setxattr(directory.join(name), kind, acl, rustix::fs::XattrFlags::empty())
    };
    let read = |name: &str| {
        let mut bytes = [0; 256];
        let length = rustix::fs::getxattr(directory.join(name), ACCESS, &mut bytes).expect("the file has an ACL");
        bytes[..length].to_vec()
    };
    fs::create_dir_all(directory.join("inherited")).expect("the node's directory is writable");
    fs::write(directory.join("secret"), "of the node").expect("the node's directory is writable");
    let reader = [(OWNER, 6, NONE), (USER, 4, 1000), (GROUP, 0, NONE), (MASK, 4, NONE), (OTHER, 0, NONE)];
    if set("secret", ACCESS, &acl(&reader)).is_err() {
        println!("skipped: the file system of the tests has no ACLs");
        return;
    }
    fs::set_permissions(directory.join("inherited"), fs::Permissions::from_mode(0o777)).expect("it is ours");
    let defaults = [(OWNER, 7, NONE), (USER, 6, 1000), (GROUP, 5, NONE), (MASK, 7, NONE), (OTHER, 0, NONE)];
    set("inherited", "system.posix_acl_default", &acl(&defaults)).expect("the file system has ACLs");
    let pod = node.crictl.run_pod(PodRequest::new("acls", node.directory()));
    let run_as = |id: u32| {
        let user = json!({"security_context": {"run_as_user": {"value": id}, "run_as_group": {"value": id}}});
        let mounts = json!([{"host_path": directory, "container_path": "/all"}]);
        let sleeps = ContainerRequest::sh(&format!("u{id}"), &image, "sleep 600");
        pod.start(sleeps.set("mounts", mounts).set("linux", user))
    };
    let [root, reads, other] = [0, 1000, 1001].map(run_as);
    assert_eq!(reads.exec("cat /all/secret").ok(), "of the node");
    assert!(reads.exec("echo x >>/all/secret").err().contains("Permission denied"));
    assert!(other.exec("cat /all/secret").err().contains("Permission denied"));

    // chmod in the guest changes the mask of the node's ACL, and then the kernel of the guest knows the new one.
    root.exec("chmod 660 /all/secret").ok();
    let masked = [(OWNER, 6, NONE), (USER, 4, 1000), (GROUP, 0, NONE), (MASK, 6, NONE), (OTHER, 0, NONE)];
    assert_eq!(read("secret"), acl(&masked));
    // So does an ACL that the node changes.
    let writer = [(OWNER, 6, NONE), (USER, 6, 1000), (GROUP, 0, NONE), (MASK, 6, NONE), (OTHER, 0, NONE)];
    set("secret", ACCESS, &acl(&writer)).expect("the file system has ACLs");
    reads.exec("echo ', and more' >>/all/secret").ok();

    // A default ACL takes the place of the umask, for whom it names too.
    other.exec("umask 077; echo x >/all/inherited/file; mkdir /all/inherited/directory").ok();
    let inherited = [(OWNER, 6, NONE), (USER, 6, 1000), (GROUP, 5, NONE), (MASK, 6, NONE), (OTHER, 0, NONE)];
    assert_eq!(read("inherited/file"), acl(&inherited));
    assert_eq!(read("inherited/directory"), acl(&defaults));
    assert_eq!(reads.exec("cat /all/inherited/file").ok(), "x");
    // Without one the umask counts.
    root.exec("umask 027; echo x >/all/plain; mkdir /all/plain-directory").ok();
    for (name, mode) in [("plain", 0o640), ("plain-directory", 0o750)] {
        assert_eq!(fs::metadata(directory.join(name)).expect("it was made").mode() & 0o7777, mode, "{name}");
    }
    pod.remove();
    assert_eq!(node.leaked(), Vec::<String>::new());
}

/// The node's sysfs has no ACLs: getxattr(2) of one fails with EOPNOTSUPP there.
#[test]
fn file_systems_without_acls_are_readable_by_users_that_do_not_own_them() {
    let node = TestNode::with_options(options_without_cache());
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(PodRequest::new("sysfs", node.directory()));
    let user = json!({"security_context": {"run_as_user": {"value": 1000}, "run_as_group": {"value": 1000}}});
    let mounts = json!([{"host_path": "/sys/kernel", "container_path": "/node", "readonly": true}]);
    let sleeps = ContainerRequest::sh("reads", &image, "sleep 600");
    let container = pod.start(sleeps.set("mounts", mounts).set("linux", user));
    assert!(!container.exec("ls /node/mm").ok().is_empty());
    assert!(!container.exec("cat /node/mm/transparent_hugepage/enabled").ok().is_empty());
    // getfacl(1) finds none, and cp -p copies none.
    container.exec("cp -p /node/mm/transparent_hugepage/enabled /tmp/copy").ok();
    pod.remove();
    assert_eq!(node.leaked(), Vec::<String>::new());
}

#[test]
fn existing_volume_paths_are_opened_and_not_created() {
    let node = TestNode::with_options(options_without_cache());
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let directory = node.directory().join("shared");
    let mode =
        |path: &Path, mode: u32| fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("it is ours");
    let write = |name: &str, bits: u32| {
        fs::write(directory.join(name), "of the node\n").expect("the node's directory is writable");
        mode(&directory.join(name), bits);
    };
    let text = |name: &str| fs::read_to_string(directory.join(name)).expect("it is there");
    fs::create_dir_all(directory.join("closed")).expect("the node's directory is writable");
    mode(&directory, 0o777);
    for (name, bits) in [("secret", 0o600), ("open", 0o666), ("closed/open", 0o666)] {
        write(name, bits);
    }
    std::os::unix::fs::symlink("target", directory.join("dangling")).expect("the node's directory is writable");
    let pod = node.crictl.run_pod(PodRequest::new("created", node.directory()));
    let mounts = json!([
        {"host_path": directory, "container_path": "/all"}, {"host_path": directory, "container_path": "/ro", "readonly": true},
    ]);
    let user = json!({"security_context": {"run_as_user": {"value": 1000}, "run_as_group": {"value": 1000}}});
    let sleeps = ContainerRequest::sh("c", &image, "sleep 600").set("mounts", mounts).set("linux", user);
    let container = pod.start(sleeps);
    // The shell opens with O_CREAT, and also with O_EXCL after `set -C`.
    for (script, why) in [
        ("echo x >>/all/secret", "Permission denied"),
        ("echo x >/all/closed/new", "Permission denied"),
        ("set -C; echo x >/all/open", "File exists"),
        ("echo x >/all/closed", "Is a directory"),
        ("echo x >>/ro/open", "Read-only file system"),
        ("echo x >/ro/new", "Read-only file system"),
        ("echo x >/all/none/new", "No such file"),
    ] {
        let refused = container.exec(script).err().replace("nonexistent directory", "No such file");
        assert!(refused.contains(why), "{script}: {refused}");
    }
    assert_eq!((text("secret"), text("open")), ("of the node\n".to_owned(), "of the node\n".to_owned()));
    container
        .exec("echo more >>/all/open; echo more >>/all/closed/open; echo y >/all/dangling; set -C; echo x >/all/made")
        .ok();
    assert_eq!(
        (text("open"), text("closed/open")),
        ("of the node\nmore\n".to_owned(), "of the node\nmore\n".to_owned())
    );
    assert_eq!((text("made"), text("target")), ("x\n".to_owned(), "y\n".to_owned()));
    assert_eq!(fs::metadata(directory.join("target")).expect("it was made").uid(), 1000);
    // A file that did not exist a moment ago, and one that exists again.
    container.exec("test ! -e /all/later").ok();
    write("later", 0o666);
    container.exec("echo more >>/all/later && rm /all/later && echo last >>/all/later").ok();
    assert_eq!(text("later"), "last\n");
    // The permissions follow the node, also while files are created.
    container.exec("echo 1 >/all/one").ok();
    mode(&directory, 0o755);
    assert!(container.exec("echo 2 >/all/two").err().contains("Permission denied"));
    pod.remove();
    assert_eq!(node.leaked(), Vec::<String>::new());
}

#[test]
fn mount_options_restrict_a_volume() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let directory = node.directory().join("shared");
    fs::create_dir(&directory).expect("the node's directory is writable");
    let (script, read) = (directory.join("script"), directory.join("read"));
    fs::write(&script, "#!/bin/sh\necho runs\n").expect("the node's directory is writable");
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("it is ours");
    fs::write(&read, "some").expect("the node's directory is writable");
    // The last read precedes the last write: the next read would update the access time.
    let long_ago = fs::FileTimes::new().set_accessed(SystemTime::UNIX_EPOCH + Duration::from_secs(1 << 30));
    let set = fs::File::options().write(true).open(&read).and_then(|file| file.set_times(long_ago));
    set.expect("it is ours");
    let mount = |at: &str, options: &[&str]| cri::Mount {
        container_path: at.to_owned(),
        host_path: directory.display().to_string(),
        mount_options: options.iter().map(|option| (*option).to_owned()).collect(),
        ..Default::default()
    };
    let of_image = |at: &str, options: &[&str]| cri::Mount {
        host_path: String::new(),
        image: Some(cri::ImageSpec { image: image.clone(), ..Default::default() }),
        image_sub_path: "bin".to_owned(),
        readonly: true,
        ..mount(at, options)
    };
    let requested = ["noexec", "nosuid", "nodev", "noatime"];
    let mounts = vec![
        mount("/all", &requested),
        mount("/ro", &["ro", "nosuid"]),
        of_image("/image", &[]),
        of_image("/image-noexec", &["noexec"]),
    ];
    let pod = node.crictl.run_pod(PodRequest::new("options", node.directory()));
    let refused = create_with_mounts(&node, &pod.id, &image, vec![mount("/x", &["noexec", "uid=0"])]).unwrap_err();
    assert!(refused.contains("InvalidArgument") && refused.contains("mount_options is \"uid=0\""), "{refused}");
    let id = create_with_mounts(&node, &pod.id, &image, mounts).expect("all of this is possible");
    node.crictl.call(["start", &id]);
    let exec = |script: &str| node.crictl.try_call(["exec", "--sync", &id, "/bin/sh", "-c", script]);
    assert_eq!(exec("cat /all/read; echo x >/all/new && sh /all/script").ok(), "someruns");
    let accessed = fs::metadata(&read).expect("it is ours").atime();
    assert_eq!(accessed, 1 << 30, "reading changes no times");
    for (program, runs) in [
        ("/all/script", false),
        ("/ro/script", true),
        ("/image-noexec/busybox true", false),
        ("/image/busybox true", true),
    ] {
        let output = exec(program);
        assert_eq!(output.code == 0, runs, "{program}: {output:?}");
    }
    let refused = exec("echo x >/ro/new").err();
    assert!(refused.contains("Read-only file system"), "{refused}");
    let flags = exec("grep ' /all ' /proc/mounts | cut -d' ' -f4").ok();
    for option in &requested {
        assert!(flags.split(',').any(|flag| flag == *option), "{option}: {flags}");
    }
    let reported = mounts_of(&node, &id);
    let of = |at: &str| reported.iter().find(|mount| mount.container_path == at).expect("it is reported");
    assert_eq!(of("/all").mount_options, ["nosuid", "nodev", "noexec", "noatime"]);
    assert!(of("/ro").readonly && of("/ro").mount_options == ["nosuid"]);
    assert_eq!(of("/image-noexec").mount_options, ["noexec"]);
    pod.remove();
    assert_eq!(node.leaked(), Vec::<String>::new());
}

/// Returns an image that declares volumes: with content, missing in the image, over a container's own file system, and below another.
fn declaring_image() -> TestImage {
    let volumes =
        json!({"/data": {}, "new/deep": {}, "/sys/fs/cgroup": {}, "/data/sub": {}, "/given": {}, "/link": {}});
    TestImage::busybox().with_config("Volumes", volumes).with_layer(|layer| {
        layer.add_directory("data", 0o1770);
        layer.add_file("data/file", b"of the image", 0o4751);
        layer.add_directory("data/sub", 0o700);
        layer.add_symlink("data/current", "sub");
        layer.add_directory("elsewhere", 0o755);
        layer.add_file("elsewhere/file", b"linked", 0o644);
        layer.add_symlink("link", "/elsewhere");
        layer.add_directory("given", 0o755);
        layer.add_file("given/hidden", b"of the image", 0o644);
    })
}

#[test]
fn volumes_that_an_image_declares_are_writable_and_end_with_their_container() {
    let node = TestNode::new();
    let image = node.push_and_pull(&declaring_image(), "declaring:1");
    let outer = tempfile::tempdir_in("/dev/shm").unwrap();
    let ids = json!([{"container_id": 0, "host_id": 196_608, "length": 65_536}]);
    let users = json!({"mode": 0, "uids": ids, "gids": ids});
    for (name, options) in [("plain", json!({})), ("mapped", json!({"userns_options": users}))] {
        let given = outer.path().join(name);
        fs::create_dir(&given).unwrap();
        fs::set_permissions(&given, PermissionsExt::from_mode(0o777)).unwrap();
        fs::write(given.join("of-node"), "").unwrap();
        let linux =
            |readonly: bool| json!({"security_context": {"readonly_rootfs": readonly, "namespace_options": options}});
        let pod = PodRequest::new(name, node.directory());
        let pod = node.crictl.run_pod(pod.set("linux", linux(false)));
        let container = |name: &str, readonly| {
            // /given is mounted by the request, and another volume is in one that the image declares.
            let mounts = json!([
                {"container_path": "/data/below", "host_path": given, "readonly": true},
                {"container_path": "/given", "host_path": given},
            ]);
            let request = ContainerRequest::sh(name, &image, "echo up; sleep 600");
            let container = pod.start(request.set("linux", linux(readonly)).set("mounts", mounts));
            container.wait_for_output("up");
            container
        };
        let one = container("one", true);
        let state = "cd /data; stat -c '%n %a %u %g' . file sub; cat file; echo; readlink current; ls /link /new/deep";
        let first = "\
            . 1770 0 0\nfile 4751 0 0\nsub 700 0 0\nof the image\nsub\n\
            /link:\nfile\n\n/new/deep:";
        assert_eq!(one.exec(state).ok(), first, "{name}");
        assert_eq!(one.exec("ls /given /data/below").ok(), "/data/below:\nof-node\n\n/given:\nof-node");
        assert_ne!(one.exec("touch /file || touch /data/below/file").code, 0, "the root is writable");
        one.exec(
            "cd /data && echo x >file && touch /data/sub/new /new/deep/file /link/new /elsewhere/too && chown 5 sub",
        )
        .ok();
        one.exec("awk '$5 == \"/sys/fs/cgroup\"' /proc/self/mountinfo | grep -q cgroup2").ok();
        // A container engine in the container cannot use an overlay.
        one.exec("! awk '$5 == \"/data\"' /proc/self/mountinfo | grep -q ' - overlay '").ok();
        // Each container has its own, also the one that replaces the first.
        let two = container("two", false);
        assert_eq!(two.exec(state).ok(), first, "{name}");
        let layer = || {
            let stats = node.crictl.call_json(["stats", "-o", "json", "--id", &two.id]);
            let used = &stats["stats"][0]["writableLayer"]["usedBytes"]["value"];
            used.as_str().and_then(|used| used.parse::<u64>().ok()).unwrap_or(0)
        };
        two.exec("dd if=/dev/zero of=/data/large bs=1M count=8 && sync").ok();
        nacelle_e2e::run::eventually("the volume counts as written", || (layer() > 8 << 20).then_some(()));
        node.crictl.call(["rm", "-f", &one.id]);
        assert_eq!(container("three", true).exec(state).ok(), first, "{name}");
        pod.remove();
        assert!(!given.join("hidden").exists());
    }
    assert_eq!(node.leaked(), Vec::<String>::new());
    let file = TestImage::busybox().with_config("Volumes", json!({"/bin/busybox": {}}));
    let file = node.push_and_pull(&file, "file:1");
    let pod = node.crictl.run_pod(PodRequest::new("file", node.directory()));
    let error = create_with_mounts(&node, &pod.id, &file, vec![]).unwrap_err();
    assert!(error.starts_with("FailedPrecondition") || error.starts_with("InvalidArgument"), "{error}");
    assert!(error.contains("declares the volume /bin/busybox"), "{error}");
}
