//! Disks of the node that fail: ext4 on loop devices, shut down by the kernel's ioctl, after which all reads and writes of files fail
//! with EIO as on a broken disk.

use nacelle_e2e::failure_answer::{check_request, try_run_pod};
use nacelle_e2e::node::{NodeOptions, engine};
use nacelle_e2e::run::{eventually, run_program};
use nacelle_e2e::{ContainerRequest, PodRequest, TestImage, TestNode};
use std::fs;
use std::path::{Path, PathBuf};

/// The rows that [`check`] causes.
pub const ROWS: [&str; 6] = [
    "disk of the image store fails during a pull",
    "disk of the image store fails, an image is used",
    "disk of the scratch disks fails",
    "disk of the scratch disks fails, a container is started, engine host",
    "disk of a pod's logs fails",
    "disk of the state store fails",
];

/// Shuts down the file system of the path: EXT4_IOC_SHUTDOWN, which writes what is dirty before.
const SHUT_DOWN: &str = r#"open(my $directory, "<", $ARGV[0]) or die; my $flags = pack("L", 0);
    ioctl($directory, 0x8004587d, $flags) or die "EXT4_IOC_SHUTDOWN: $!""#;

/// A disk of the node with a file system. Dropping it removes it.
struct FailingDisk {
    image: PathBuf,
    at: PathBuf,
    device: String,
}

impl FailingDisk {
    /// Mounts an empty file system at a directory of the node.
    fn mount(node: &TestNode, part: &str) -> FailingDisk {
        let image = node.directory().join(format!("{}.ext4", part.replace('/', "-")));
        let at = node.directory().join(part);
        fs::create_dir_all(&at).expect("the node's directory is writable");
        fs::File::create(&image).and_then(|file| file.set_len(16 << 20)).expect("the node's directory is writable");
        run_program("mkfs.ext4", ["-q".as_ref(), image.as_os_str()]).ok();
        let mut disk = FailingDisk { image, at, device: String::new() };
        disk.attach();
        disk
    }

    fn attach(&mut self) {
        self.device = run_program("losetup", ["--find".as_ref(), "--show".as_ref(), self.image.as_os_str()]).ok();
        run_program("mount", [self.device.as_ref(), self.at.as_os_str()]).ok();
    }

    fn detach(&self) {
        // The daemon has files of it open: the device is released with them.
        run_program("umount", ["--lazy".as_ref(), self.at.as_os_str()]);
        run_program("losetup", ["--detach", &self.device]);
    }

    fn fail(&self) {
        run_program("perl", ["-e".as_ref(), SHUT_DOWN.as_ref(), self.at.as_os_str()]).ok();
    }

    /// Makes the disk work again, with the content that it had.
    fn repair(&mut self) {
        self.detach();
        self.attach();
    }
}

impl Drop for FailingDisk {
    fn drop(&mut self) {
        self.detach();
    }
}

/// Fails with the reason if this machine has no loop device.
pub fn find_loop_devices() -> Result<(), String> {
    let found = run_program("losetup", ["--find"]);
    let is_there = found.code == 0 && Path::new(&found.stdout).exists();
    is_there.then_some(()).ok_or_else(|| format!("no loop device is free: {found:?}"))
}

/// Checks that a container runs. A VM keeps the files of a broken disk open, so its programs may fail.
fn check_running(node: &TestNode, container: &str) {
    let status = node.crictl.call_json(["inspect", "-o", "json", container])["status"].take();
    assert_eq!(status["state"], "CONTAINER_RUNNING", "{status}");
    if engine() == "host" {
        assert_eq!(node.crictl.call(["exec", "--sync", container, "echo", "runs"]).trim(), "runs");
    }
}

/// Makes one disk after the other fail under a daemon, and work again.
pub fn check() {
    let mut node = TestNode::with_options(NodeOptions { ipv6: false, ..NodeOptions::default() });
    node.kill();
    let mut state = FailingDisk::mount(&node, "root");
    let mut images = FailingDisk::mount(&node, "root/images");
    let mut scratch = FailingDisk::mount(&node, "root/scratch");
    let mut logs = FailingDisk::mount(&node, "logs");
    node.start();
    let sound = node.push_and_pull(&TestImage::busybox(), "sound:1");
    let late = TestImage::busybox().with_layer(|layer| layer.add_file("late", &[7; 1 << 20], 0o644));
    let late = node.registry.push(&late, "late:1");
    let pod = node.crictl.run_pod(PodRequest::new("running", &node.directory().join("logs")));
    let container = |name: &str| ContainerRequest::sh(name, &sound, "echo up; while sleep 0.1; do echo more; done");
    let running = pod.start(container("running"));
    running.wait_for_output("up");

    images.fail();
    check_request(&node, "disk of the image store fails during a pull", &node.crictl.try_call(["pull", &late]));
    check_request(&node, "disk of the image store fails, an image is used", &pod.try_create(container("unread")));
    images.repair();
    node.crictl.call(["pull", &late]);
    node.crictl.call(["pull", &sound]);
    pod.start(container("read"));

    logs.fail();
    let unlogged = pod.create(container("unlogged"));
    check_request(&node, "disk of a pod's logs fails", &node.crictl.try_call(["start", &unlogged.id]));
    check_running(&node, &running.id);
    logs.repair();
    pod.start(container("logged")).wait_for_output("up");

    scratch.fail();
    check_request(&node, "disk of the scratch disks fails", &try_run_pod(&node, ""));
    if engine() == "host" {
        // In a VM this is an error of its own disk.
        let unwritable = pod.create(container("unwritable"));
        let output = node.crictl.try_call(["start", &unwritable.id]);
        check_request(&node, "disk of the scratch disks fails, a container is started, engine host", &output);
    }
    scratch.repair();

    state.fail();
    check_request(&node, "disk of the state store fails", &try_run_pod(&node, ""));
    check_running(&node, &running.id);
    state.repair();
    // kubelet tries again, too.
    let id = eventually("a pod runs when the disk works again", || {
        let output = try_run_pod(&node, "");
        (output.code == 0).then_some(output.stdout)
    });
    node.crictl.call(["rmp", "--force", &id]);
    let running = running.id.clone();
    node.kill();
    node.start();
    // The next daemon knows what was recorded.
    check_running(&node, &running);
    // While the disk with their attachments is mounted.
    node.crictl.call(["rmp", "--all", "--force"]);
}
