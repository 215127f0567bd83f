//! Provides helpers for tests of machine pods: a node that allows them, their annotations, and a disk of one sector that boots
//! and reports its state on the console.

use crate::node::handler_config;
use crate::{ContainerRequest, NodeOptions, PodRequest, TestImage, TestNode};
use serde_json::{Value, json};
use std::path::PathBuf;

/// `tests/machines/boot.s`, assembled.
const BOOT_DISK_HEX: &str = "fa31c08ed88ec08ed0bc007c8816007eba0206b80001efbe9c7ce86400b80102e84f00fe060080b80103e84500a0008004\
    30e85600b00ae85100ba0006eda900017519bafd03eca80174efbaf803ec3c71740f3c727415e83100ebdebea27ce81f00ba0406b80020eff4\
    ebfdb0fee664ebf78a16007eb600b90200bb0080cd13c3ac84c07415e80200ebf688c4bafd03eca82074f8baf80388e0eec3626f6f74200070\
    7265737365640a00";
const ANNOTATIONS: [&str; 18] = [
    "kind",
    "memory",
    "cpus",
    "disks",
    "cloud-init",
    "cloud-init-network",
    "firmware",
    "machine",
    "ssh-keys",
    "spec",
    "name",
    "machine-id",
    "run-strategy",
    "power",
    "kernel-image",
    "kernel",
    "initrd",
    "kernel-args",
];

fn annotation_key(name: &str) -> String {
    format!("vm.nacelle.dev/{name}")
}

/// Returns a node whose handler `vm` allows machine pods.
pub fn machine_node() -> TestNode {
    machine_node_with(NodeOptions::default())
}

/// Like `node`, with further options.
pub fn machine_node_with(options: NodeOptions) -> TestNode {
    let allowed: Vec<String> = ANNOTATIONS.iter().map(|name| annotation_key(name)).collect();
    let extra = options.extra.clone() + &handler_config("vm", &format!("allowed_annotations = {allowed:?}\n"));
    TestNode::with_options(NodeOptions { extra, ..options })
}

/// Returns a disk of 1 MiB that boots.
///
/// # Panics
/// Never: the constant is hexadecimal.
pub fn boot_disk() -> Vec<u8> {
    let hex: String = BOOT_DISK_HEX.split_whitespace().collect();
    let mut disk = hex::decode(hex).expect("it is hexadecimal");
    disk.resize(510, 0);
    disk.extend([0x55, 0xaa]);
    disk.resize(1 << 20, 0);
    disk
}

/// Returns an image with that disk.
pub fn push_boot_image(node: &TestNode) -> String {
    let disk = boot_disk();
    node.push_and_pull(
        &TestImage::busybox().with_layer(|layer| layer.add_file("disk/boot.img", &disk, 0o440)),
        "boot:1",
    )
}

/// The parts of Debian that `ci/disk-image` builds.
pub struct Debian {
    directory: PathBuf,
}

impl Debian {
    /// Returns the directory that the environment names; `None` if Debian cannot run here.
    pub fn from_env() -> Option<Debian> {
        std::env::var_os("NACELLE_DISK_IMAGE").map(|directory| Debian { directory: directory.into() })
    }

    /// Returns one of its files: `disk.qcow2`, `vmlinuz`, `initrd.img`.
    ///
    /// # Panics
    /// If it is missing.
    pub fn read_file(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.directory.join(name)).expect("ci/disk-image has made it")
    }

    /// Returns an image with its disk, its kernel at `/boot/vmlinuz` and its initial file system at `/boot/initrd.img`.
    ///
    /// # Panics
    /// If a part is missing.
    pub fn push_image(&self, node: &TestNode) -> String {
        let image = TestImage::busybox().with_layer(|layer| {
            layer.add_file("disk/disk.qcow2", &self.read_file("disk.qcow2"), 0o440);
            layer.add_file("boot/vmlinuz", &self.read_file("vmlinuz"), 0o440);
            layer.add_file("boot/initrd.img", &self.read_file("initrd.img"), 0o440)
        });
        node.push_and_pull(&image, "debian:1")
    }

    /// Returns its kernel parameters.
    ///
    /// # Panics
    /// If they are not text.
    pub fn command_line(&self) -> String {
        String::from_utf8(self.read_file("cmdline")).expect("it is text").trim().to_owned()
    }
}

/// Returns a pod with annotations of machine pods.
pub fn annotated_pod(node: &TestNode, name: &str, annotations: &[(&str, &str)]) -> PodRequest {
    let all: serde_json::Map<String, Value> =
        annotations.iter().map(|(name, value)| (annotation_key(name), json!(value))).collect();
    PodRequest::new(name, &node.directory().join("logs")).set("annotations", Value::Object(all))
}

/// Returns the container of a machine pod.
pub fn machine_container(image: &str, attempt: u32) -> ContainerRequest {
    ContainerRequest::new("machine", image, &[])
        .set("metadata", json!({"name": "machine", "attempt": attempt}))
        .set("log_path", json!(format!("machine-{attempt}.log")))
}
