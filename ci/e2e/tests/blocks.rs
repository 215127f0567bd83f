//! Tests block devices of the node in containers: which containers can read and write them, the effects on the node, how long
//! they are held, and what is rejected.

use nacelle_e2e::node::engine;
use nacelle_e2e::run::run_program;
use nacelle_e2e::{ContainerRequest, PodRequest, TestImage, TestNode, eventually};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// A loop device over a sparse file. Dropping it detaches it.
struct LoopDisk {
    file: PathBuf,
    device: String,
}

impl LoopDisk {
    fn new(directory: &Path, name: &str, mib: u32) -> LoopDisk {
        LoopDisk::with_mkfs_options(directory, name, mib, &[])
    }

    fn with_mkfs_options(directory: &Path, name: &str, mib: u32, options: &[&str]) -> LoopDisk {
        let file = directory.join(name);
        run_program("truncate", [format!("--size={mib}M").as_ref(), file.as_os_str()]).ok();
        let words = ["--find", "--show"].iter().chain(options).map(|word| (*word).to_owned());
        let device = run_program("losetup", words.chain([file.display().to_string()])).ok();
        LoopDisk { file, device }
    }

    /// Returns the loop devices of the file.
    fn devices(&self) -> String {
        run_program("losetup", ["--associated".as_ref(), self.file.as_os_str()]).ok()
    }

    /// Returns the first bytes of the device on the node.
    fn read_start(&self, count: usize) -> String {
        run_program("head", ["-c", &count.to_string(), &self.device]).ok()
    }
}

impl Drop for LoopDisk {
    fn drop(&mut self) {
        run_program("chown", ["root:disk", &self.device]);
        run_program("chmod", ["660", &self.device]);
        run_program("losetup", ["--detach", &self.device]);
    }
}

fn device_request(host: impl AsRef<Path>, at: &str, permissions: &str) -> Value {
    json!({"host_path": host.as_ref(), "container_path": at, "permissions": permissions})
}

#[test]
fn containers_share_a_block_device_of_the_node() {
    let mut node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let disk = LoopDisk::new(node.directory(), "disk.raw", 16);
    run_program("chown", ["3:6", &disk.device]).ok();
    run_program("chmod", ["640", &disk.device]).ok();
    // Kubelet passes a link to the device.
    let link = node.directory().join("the-disk");
    std::os::unix::fs::symlink(&disk.device, &link).unwrap();
    let with = |name: &str, devices: Value| ContainerRequest::sh(name, &image, "sleep 600").set("devices", devices);

    let pod_id = {
        let pod = node.crictl.run_pod(PodRequest::new("blocks", node.directory()));
        let reader = pod.start(with("reader", json!([device_request(&link, "/dev/data", "r")])));
        let writer = pod.start(with("writer", json!([device_request(&disk.device, "/dev/disks/data", "rwm")])));
        let plain = pod.start(with("plain", json!([])));
        assert_eq!(reader.exec("stat -c '%F %a %u %g' /dev/data").ok(), "block special file 640 3 6");
        assert_eq!(reader.exec("wc -c </dev/data").ok(), (16 << 20).to_string());
        let denied = reader.exec("echo x | dd of=/dev/data conv=notrunc");
        assert!(denied.code != 0 && denied.stderr.contains("not permitted"), "{denied:?}");
        writer.exec("echo written by the pod | dd of=/dev/disks/data conv=notrunc,fsync").ok();
        assert_eq!(disk.read_start(18), "written by the pod");
        assert_eq!(reader.exec("head -c 18 /dev/data").ok(), "written by the pod");
        // A container that did not request the device cannot open it by its number either.
        let number = reader.exec("stat -c '%t %T' /dev/data").ok();
        let mknod = "set -- $(printf '%d %d' 0x${0% *} 0x${0#* }); mknod /disk b $1 $2 && head -c 1 /disk";
        let denied = node.crictl.try_call(["exec", "--sync", &plain.id, "sh", "-c", mknod, &number]);
        assert!(denied.code != 0 && denied.stderr.contains("not permitted"), "{denied:?}");
        // Discards in the guest reach the node's disk.
        let blocks = || std::os::unix::fs::MetadataExt::blocks(&fs::metadata(&disk.file).unwrap());
        let before = blocks();
        writer.exec("dd if=/dev/urandom of=/dev/disks/data bs=1M seek=4 count=4 conv=notrunc,fsync").ok();
        assert!(blocks() >= before + (4 << 11), "{} {before}", blocks());
        writer.exec("blkdiscard -o 4194304 -l 4194304 /dev/disks/data").ok();
        eventually("the discarded space is released", || (blocks() <= before + 64).then_some(()));
        pod.id.clone()
    };

    // The daemon is not involved.
    node.kill();
    node.start();
    let containers = node.crictl.call_json(["ps", "-o", "json"]);
    let id = |name: &str| {
        let all = containers["containers"].as_array().unwrap();
        all.iter().find(|one| one["metadata"]["name"] == name).unwrap()["id"].as_str().unwrap().to_owned()
    };
    let run = |id: &str, script: &str| node.crictl.call(["exec", "--sync", id, "sh", "-c", script]);
    run(&id("writer"), "echo after the daemon | dd of=/dev/disks/data conv=notrunc");
    node.crictl.call(["rm", "--force", &id("writer")]);
    // No process flushed the data; closing the last writable descriptor in the guest did.
    node.crictl.call(["rm", "--force", &id("reader")]);
    eventually("the node sees what was written", || (disk.read_start(16) == "after the daemon").then_some(()));

    // A grown disk grows in the container.
    let pod = node.crictl.pod_handle(&pod_id, PodRequest::new("blocks", node.directory()));
    let again = pod.start(with("again", json!([device_request(&link, "/dev/data", "mrw")])));
    assert_eq!(again.exec("head -c 16 /dev/data").ok(), "after the daemon");
    run_program("truncate", ["--size=24M".as_ref(), disk.file.as_os_str()]).ok();
    run_program("losetup", ["--set-capacity", &disk.device]).ok();
    let size = (24 << 20).to_string();
    eventually("the container sees that its disk has grown", || {
        (again.exec("wc -c </dev/data").ok() == size).then_some(())
    });
    again.exec("echo at the end | dd of=/dev/data bs=1M seek=23 conv=notrunc,fsync").ok();
    run_program("losetup", ["--detach", &disk.device]).ok();
    // A VM holds the device open; without a guest it is only named.
    let held = engine() != "host";
    assert_eq!(disk.devices().contains(&disk.device), held, "as long as a container has it");
    pod.remove();
    eventually("the loop device is detached", || disk.devices().is_empty().then_some(()));
    let bytes = fs::read(&disk.file).unwrap();
    assert_eq!(&bytes[23 << 20..][..10], b"at the end");
}

#[test]
fn a_file_system_on_a_block_device_is_mounted_in_a_container() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let (one, two) = (
        LoopDisk::new(node.directory(), "one.raw", 16),
        LoopDisk::with_mkfs_options(node.directory(), "two.raw", 16, &["-r"]),
    );
    run_program("mkfs.ext4", ["-q", &one.device]).ok();
    let mut config = PodRequest::new("mounts", node.directory());
    config.0["linux"]["security_context"] = json!({"privileged": true});
    let pod = node.crictl.run_pod(config);
    let security = json!({"security_context": {"privileged": true}});
    let devices =
        json!([device_request(&one.device, "/dev/xvda", "rw"), device_request(&two.device, "/dev/xvdb", "r")]);
    let sleep = ContainerRequest::sh("c", &image, "sleep 600").set("devices", devices);
    let container = pod.start(sleep.set("linux", security));
    container.exec("mkdir /mnt && mount -t ext4 /dev/xvda /mnt && echo kept >/mnt/file && umount /mnt").ok();
    // Even a privileged container cannot write to a read-only device.
    assert_ne!(container.exec("echo x | dd of=/dev/xvdb conv=notrunc").code, 0);
    pod.remove();
    let mnt = node.directory().join("mnt");
    fs::create_dir(&mnt).unwrap();
    run_program("mount", [one.device.as_ref(), mnt.as_os_str()]).ok();
    let kept = fs::read_to_string(mnt.join("file"));
    run_program("umount", [&mnt]).ok();
    assert_eq!(kept.unwrap(), "kept\n");
}

#[test]
fn unusable_block_devices_are_refused() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(PodRequest::new("refusing", node.directory()));
    let refused = |host: &Path, permissions: &str, code: &str, word: &str| {
        let requested = ContainerRequest::sh("c", &image, "true")
            .set("devices", json!([device_request(host, "/dev/x", permissions)]));
        let answer = pod.try_create(requested).err();
        assert!(answer.contains(code) && answer.contains(word), "{answer}");
        assert!(answer.contains(host.to_str().unwrap()), "{answer}");
    };
    let file = node.directory().join("file");
    fs::write(&file, "").unwrap();
    refused(&file, "rw", "InvalidArgument", "neither a device");
    refused(&node.directory().join("none"), "rw", "InvalidArgument", "neither a device");
    if engine() != "host" {
        refused("/dev/ptmx".as_ref(), "rw", "Unimplemented", "only block devices reach a VM");
        let read_only = LoopDisk::with_mkfs_options(node.directory(), "read-only.raw", 1, &["-r"]);
        refused(read_only.device.as_ref(), "rw", "FailedPrecondition", "cannot be opened to read and write");
        let gone = LoopDisk::new(node.directory(), "gone.raw", 1);
        run_program("losetup", ["--detach", &gone.device]).ok();
        refused(gone.device.as_ref(), "rw", "FailedPrecondition", "nothing is behind it");
        assert_eq!(node.crictl.call(["ps", "-aq"]), "");
    }
    pod.remove();
}
