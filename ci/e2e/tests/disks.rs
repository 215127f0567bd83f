//! Tests emptyDir volumes on kubelet's disk that are disks of VMs, with the test in place of kubelet: their limits, which
//! containers see them, their content after a sandbox ends or dies, and what is rejected.

use nacelle_e2e::node::{NodeOptions, SMALL_VM, engine, handler_config};
use nacelle_e2e::run::run_program;
use nacelle_e2e::{ContainerRequest, PodRequest, TestImage, TestNode, eventually};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

const LIMITS_ANNOTATION: &str = "vm.nacelle.dev/empty-dir-limits";
const DISK_FILE: &str = "nacelle-volume.ext4";

/// Returns a node with the handlers "disks", whose emptyDirs default to 32 MiB, and "shares".
fn node_with_disk_volumes() -> TestNode {
    let allowed = format!("{SMALL_VM}allowed_annotations = [{LIMITS_ANNOTATION:?}]\n");
    let disks = handler_config("disks", &format!("{allowed}empty_dir = \"disk\"\nempty_dir_mib = 32\n"));
    let extra = disks + &handler_config("shares", &allowed);
    TestNode::with_options(NodeOptions { extra, ..NodeOptions::default() })
}

/// Kubelet's directory of a pod.
struct PodDirectory(PathBuf);

impl PodDirectory {
    fn new(node: &TestNode, uid: &str) -> PodDirectory {
        PodDirectory(node.directory().join("kubelet/pods").join(uid))
    }

    /// Creates a volume as kubelet does, for the pod's group.
    fn volume(&self, name: &str) -> PathBuf {
        let directory = self.0.join("volumes/kubernetes.io~empty-dir").join(name);
        fs::create_dir_all(&directory).expect("the node's directory is writable");
        chown(&directory, None, Some(2000)).expect("it is ours");
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o2777)).expect("it is ours");
        directory
    }

    /// Mounts a part of a volume as kubelet does for a `subPath`.
    fn part(&self, volume: &Path, part: &str, number: u32) -> BindMount {
        let at = self.0.join("volume-subpaths").join(volume.file_name().unwrap()).join(format!("c/{number}"));
        for directory in [&volume.join(part), &at] {
            fs::create_dir_all(directory).expect("the node's directory is writable");
        }
        run_program("mount", ["--bind".as_ref(), volume.join(part).as_os_str(), at.as_os_str()]).ok();
        BindMount(at)
    }
}

/// A mount on the node.
struct BindMount(PathBuf);

impl Drop for BindMount {
    fn drop(&mut self) {
        // Not lazily: if a VM holds it, this and the test fail.
        let done = run_program("umount", [&self.0]);
        assert!(std::thread::panicking() || done.code == 0, "{done:?}");
    }
}

fn mount(host: &Path, at: &str) -> Value {
    json!({"host_path": host, "container_path": at})
}

/// Returns kubelet's measurement of a volume in KiB.
fn allocated_bytes(volume: &Path) -> u64 {
    fs::metadata(volume.join(DISK_FILE)).map_or(0, |file| file.blocks() / 2) + 4
}

/// Returns the next sandbox of the same pod.
fn next_attempt(pod: &PodRequest, attempt: u32) -> PodRequest {
    let mut next = PodRequest(pod.0.clone());
    next.0["metadata"]["attempt"] = json!(attempt);
    next
}

#[test]
fn an_empty_dir_on_a_disk_of_the_vm_has_a_quota() {
    if engine() == "host" {
        println!("skipped: without a guest such volumes are directories of the node");
        return;
    }
    let mut node = node_with_disk_volumes();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let directory = PodDirectory::new(&node, "0d3c");
    let (volume, other) = (directory.volume("scratch"), directory.volume("other"));
    let neighbours = PodDirectory::new(&node, "0e4d").volume("scratch");
    let (part, trap) = (directory.part(&volume, "deep/part", 0), directory.part(&volume, "trap", 1));
    let with = |name: &str, mounts: Value| ContainerRequest::sh(name, &image, "sleep 600").set("mounts", mounts);
    let requested =
        PodRequest::new("disk", node.directory()).set("annotations", json!({LIMITS_ANNOTATION: "scratch=16Mi"}));
    let (pod_id, one_id) = {
        let pod = node.crictl.run_pod_with_handler("disks", next_attempt(&requested, 0));
        let neighbour = node.crictl.run_pod_with_handler("disks", PodRequest::new("neighbour", node.directory()));
        let one = pod.start(with("one", json!([mount(&volume, "/cache"), mount(&other, "/other")])));
        let two = pod.start(with("two", json!([mount(&volume, "/same"), mount(&part.0, "/part")])));
        let far = neighbour.start(with("far", json!([mount(&neighbours, "/cache")])));

        // It contains only the part that kubelet has created, has kubelet's mode, and is the same for all containers.
        assert_eq!(one.exec("stat -c '%a %g' /cache; ls -A /cache").ok(), "2777 2000\ndeep");
        one.exec("echo word >/cache/file && mkdir -p /cache/deep/part && echo in it >/cache/deep/part/file").ok();
        assert_eq!(two.exec("cat /same/file /part/file; stat -c %g /same/file").ok(), "word\nin it\n2000");
        two.exec("echo back >/part/file").ok();
        assert_eq!(one.exec("cat /cache/deep/part/file").ok(), "back");
        assert!(!volume.join("file").exists(), "the node sees a file with a disk");
        assert_eq!(fs::metadata(volume.join(DISK_FILE)).unwrap().mode() & 0o777, 0o600);

        // The limit affects no other volume, and kubelet does not see it exceeded.
        let full = one.exec("dd if=/dev/zero of=/cache/much bs=1M count=32");
        assert!(full.code != 0 && full.stderr.contains("No space left"), "{full:?}");
        for (who, script) in [(&one, "/other/x"), (&far, "/cache/x"), (&one, "/x")] {
            who.exec(&format!("dd if=/dev/zero of={script} bs=1M count=12 && sync")).ok();
        }
        let room = allocated_bytes(&volume);
        assert!((8 << 10..=16 << 10).contains(&room), "{room} KiB");
        assert_eq!(one.exec("df -m /other | tail -1 | awk '{print ($2 > 20 && $2 < 32)}'").ok(), "1");
        // Deleted data are released on the node.
        one.exec("rm /cache/much && sync").ok();
        eventually("the discarded space is released", || (allocated_bytes(&volume) < 3 << 10).then_some(()));
        assert_eq!(two.exec("cat /same/file").ok(), "word");

        // A part that a container has replaced by a link is rejected; and the volume can be read-only for one container.
        one.exec("rm -rf /cache/trap && ln -s / /cache/trap").ok();
        let refused = pod.try_create(with("trapped", json!([mount(&trap.0, "/trap")]))).err();
        assert!(refused.contains("FailedPrecondition") && refused.contains("leads out"), "{refused}");
        let read = json!([{"host_path": volume, "container_path": "/cache", "readonly": true}]);
        let reader = pod.start(with("reader", read));
        assert_eq!(reader.exec("cat /cache/file").ok(), "word");
        assert_ne!(reader.exec("touch /cache/x").code, 0);
        neighbour.remove();
        (pod.id.clone(), one.id.clone())
    };

    // The daemon is not involved; and no second VM gets the disk.
    node.kill();
    node.start();
    let pod = node.crictl.pod_handle(&pod_id, next_attempt(&requested, 0));
    node.crictl.call(["rm", "--force", &one_id]);
    let one = pod.start(with("one", json!([mount(&volume, "/cache")])));
    assert_eq!(one.exec("cat /cache/file").ok(), "word");
    let second = node.crictl.run_pod_with_handler("disks", next_attempt(&requested, 1));
    let refused = second.try_create(with("c", json!([mount(&volume, "/cache")]))).err();
    assert!(refused.contains("FailedPrecondition") && refused.contains("another of its sandboxes"), "{refused}");

    // A stopped sandbox leaves all written data to the next one, even of another handler.
    one.exec("echo of the first >/cache/first").ok();
    pod.remove();
    let sleeper = second.start(with("c", json!([mount(&volume, "/cache")])));
    assert_eq!(sleeper.exec("cat /cache/file /cache/first").ok(), "word\nof the first");
    // A sandbox that dies leaves the data that were synced.
    sleeper.exec("echo kept >/cache/second && sync && echo lost, perhaps >/cache/third").ok();
    for pid in node.pids_matching("nacelle-pod --dir ") {
        run_program("kill", ["-9", &pid.to_string()]);
    }
    eventually("the pod is not ready", || (second.inspect()["status"]["state"] == "SANDBOX_NOTREADY").then_some(()));
    second.remove();
    let third = node.crictl.run_pod_with_handler("shares", next_attempt(&requested, 2).set("annotations", json!({})));
    let last = third.start(with("c", json!([mount(&volume, "/cache"), mount(&part.0, "/part")])));
    assert_eq!(last.exec("cat /cache/first /cache/second /part/file").ok(), "of the first\nkept\nback");
    third.remove();
    drop((part, trap));
    fs::remove_dir_all(&directory.0).expect("no process uses its files");
}

#[test]
fn a_full_node_fails_only_the_volume() {
    if engine() == "host" {
        println!("skipped: without a guest such volumes are directories of the node");
        return;
    }
    let node = node_with_disk_volumes();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let kubelet = node.directory().join("kubelet");
    fs::create_dir(&kubelet).expect("the node's directory is writable");
    run_program("mount", ["-t", "tmpfs", "-o", "size=24m", "none", kubelet.to_str().unwrap()]).ok();
    let mounted = BindMount(kubelet);
    let volume = PodDirectory::new(&node, "0d3c").volume("scratch");
    let requested =
        PodRequest::new("full", node.directory()).set("annotations", json!({LIMITS_ANNOTATION: "scratch=1Gi"}));
    let with = || ContainerRequest::sh("c", &image, "sleep 600").set("mounts", json!([mount(&volume, "/cache")]));
    let pod = node.crictl.run_pod_with_handler("disks", next_attempt(&requested, 0));
    let container = pod.start(with());
    container.exec("echo word >/cache/first && sync").ok();
    let failed = container.exec("dd if=/dev/zero of=/cache/much bs=1M count=48 conv=fsync");
    assert!(failed.code != 0 && failed.stderr.contains("Input/output error"), "{failed:?}");
    assert_eq!(container.exec("echo word >/file && sync && cat /file").ok(), "word");
    pod.remove();
    // Synced data are intact for the next VM, whether the node has free space or not.
    let pod = node.crictl.run_pod_with_handler("disks", next_attempt(&requested, 1));
    assert_eq!(pod.start(with()).exec("cat /cache/first").ok(), "word");
    pod.remove();
    drop(mounted);
}

#[test]
fn invalid_sizes_and_volumes_are_refused() {
    let node = node_with_disk_volumes();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let directory = PodDirectory::new(&node, "0d3c");
    let refused = |handler: &str, limits: &str, code: &str, words: &str| {
        let pod = PodRequest::new("refused", node.directory()).set("annotations", json!({LIMITS_ANNOTATION: limits}));
        let file = node.crictl.write_input("pod", &pod.0);
        let answer = node.crictl.try_call(["runp", "--runtime", handler, &file]).err();
        assert!(answer.contains(code) && answer.contains(words) && answer.contains(LIMITS_ANNOTATION), "{answer}");
    };
    refused("other", "a=16Mi", "InvalidArgument", "allows []");
    refused("shares", "a=16Mi", "FailedPrecondition", "sizeLimit kubelet enforces");
    let guest = engine() != "host";
    if guest {
        refused("disks", "a=1Mi", "InvalidArgument", "16Mi to 4Ti");
    } else {
        refused("disks", "a=16Mi", "FailedPrecondition", "no VM");
    }

    let pod = node.crictl.run_pod_with_handler("disks", PodRequest::new("refusing", node.directory()));
    let with = |name: &str, mount: Value| ContainerRequest::sh(name, &image, "sleep 600").set("mounts", json!([mount]));
    // A volume with files on the node is shared, even after they are removed.
    let filled = directory.volume("filled");
    fs::write(filled.join("file"), "of the node").unwrap();
    let one = pod.start(with("one", mount(&filled, "/cache")));
    assert_eq!(one.exec("cat /cache/file && rm /cache/file && echo word >/cache/word").ok(), "of the node");
    assert_eq!(fs::read_to_string(filled.join("word")).unwrap(), "word\n");
    fs::remove_file(filled.join("word")).unwrap();
    let two = pod.start(with("two", mount(&filled, "/cache")));
    two.exec("echo of two >/cache/two").ok();
    assert_eq!(one.exec("cat /cache/two").ok(), "of two");
    assert!(!filled.join(DISK_FILE).exists());

    let on_disk = directory.volume("on-disk");
    if !guest {
        // Pods without a guest cannot use a VM's disk.
        pod.start(with("plain", mount(&on_disk, "/cache"))).exec("echo word >/cache/word").ok();
        assert_eq!(fs::read_to_string(on_disk.join("word")).unwrap(), "word\n");
        fs::write(on_disk.join(DISK_FILE), "").unwrap();
        let answer = pod.try_create(with("other", mount(&on_disk, "/cache"))).err();
        assert!(answer.contains("FailedPrecondition") && answer.contains("disk for machines"), "{answer}");
        return pod.remove();
    }
    let refused = |name: &str, mount: Value, code: &str, words: &str| {
        let answer = pod.try_create(with(name, mount)).err();
        assert!(answer.contains(code) && answer.contains(words), "{answer}");
    };
    let propagated = json!({"host_path": on_disk, "container_path": "/cache", "propagation": 1});
    refused("propagated", propagated, "Unimplemented", "propagation");
    // A damaged file system or a link is not a volume; the VM and its other volumes continue.
    for name in ["damaged", "astray"] {
        directory.volume(name);
    }
    fs::write(directory.volume("damaged").join(DISK_FILE), vec![7; 16 << 20]).unwrap();
    refused("damaged", mount(&directory.volume("damaged"), "/cache"), "FailedPrecondition", "damaged");
    std::os::unix::fs::symlink("/dev/zero", directory.volume("astray").join(DISK_FILE)).unwrap();
    let answer = pod.try_create(with("astray", mount(&directory.volume("astray"), "/cache"))).err();
    assert!(answer.contains(DISK_FILE), "{answer}");
    // A volume that is created anew can be used.
    fs::remove_file(directory.volume("damaged").join(DISK_FILE)).unwrap();
    let fresh = pod.start(with("fresh", mount(&directory.volume("damaged"), "/cache")));
    fresh.exec("echo word >/cache/word").ok();
    assert_eq!(one.exec("cat /cache/two").ok(), "of two");
    pod.remove();
}
