//! Tests PCI devices of the node that are passed through to machine pods by VFIO: a network card of the test node, behind its
//! IOMMU, with which a VM sends and receives. `ci/node` gives a node both with NODE_IOMMU=1.

use nacelle_e2e::crictl::RunningPod;
use nacelle_e2e::machine::{Debian, annotated_pod, machine_container, machine_node_with};
use nacelle_e2e::run::run_program;
use nacelle_e2e::{ContainerRequest, NodeOptions, PodRequest, TestImage, TestNode, cpio, eventually};
use serde_json::json;
use sha2::{Digest, Sha256};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::thread::{JoinHandle, spawn};

/// The hardware addresses of the node's two cards, which are on one wire: the one that the node keeps, and the one for VMs.
const NODE_MAC: &str = "52:54:00:6e:63:01";
const VM_MAC: &str = "52:54:00:6e:63:02";
/// The node's address on the wire, and a VM's.
const NODE: &str = "10.77.0.1";
const MACHINE: &str = "10.77.0.2";
/// The number of bytes in each direction.
const LENGTH: usize = 4 << 20;

/// Returns the network interface with this hardware address.
fn find_interface(mac: &str) -> Option<PathBuf> {
    let all = fs::read_dir("/sys/class/net").expect("it is there");
    let mut all = all.map(|entry| entry.expect("it is readable").path());
    all.find(|path| fs::read_to_string(path.join("address")).is_ok_and(|text| text.trim() == mac))
}

/// The card for VMs: its address, and its IOMMU group.
struct PassedCard {
    device: PathBuf,
    group: String,
}

impl PassedCard {
    /// Returns `None` on another node. The card has the node's own driver at first, as on every node.
    fn find() -> Option<PassedCard> {
        let device = match find_interface(VM_MAC) {
            Some(interface) => {
                fs::canonicalize(interface.join("device")).expect("it has a device").parent()?.to_owned()
            }
            // An earlier test has bound it.
            None => {
                let all = fs::read_dir("/sys/bus/pci/drivers/vfio-pci").ok()?;
                let mut all = all.filter_map(|entry| fs::canonicalize(entry.ok()?.path()).ok());
                all.find(|path| path.join("iommu_group").exists())?
            }
        };
        let group = fs::read_link(device.join("iommu_group")).ok()?;
        Some(PassedCard { device, group: group.file_name()?.to_str()?.to_owned() })
    }

    fn vfio_path(&self) -> String {
        format!("/dev/vfio/{}", self.group)
    }

    /// Binds the card to a driver as an administrator does: docs/contributor/devices/pci.md.
    fn bind(&self, driver: &str) {
        let address = self.device.file_name().expect("it has one").to_str().expect("it is text");
        if driver == "vfio-pci" {
            run_program("modprobe", [driver]).ok();
        }
        fs::write(self.device.join("driver_override"), driver).expect("it is writable");
        let _none = fs::write(self.device.join("driver/unbind"), address);
        fs::write("/sys/bus/pci/drivers_probe", address).expect("it is writable");
        let bound = fs::canonicalize(self.device.join("driver")).expect("it has a driver");
        assert!(bound.ends_with(driver), "{}", bound.display());
    }
}

/// The first process in the guest: it loads Debian's drivers, and prints a line for each successful step.
const INIT_SCRIPT: &str = r#"#!/busybox sh
for kind in devtmpfs:dev proc:proc sysfs:sys; do /busybox mount -t ${kind%:*} none /${kind#*:}; done
while [ -z "$name" ]; do
    # Devices of PCI bring forth virtio's.
    /busybox modprobe -q -a $(/busybox cat /sys/bus/pci/devices/*/modalias /sys/bus/virtio/devices/*/modalias)
    for card in /sys/class/net/*; do
        [ "$(/busybox cat $card/address)" = VM_MAC ] && name=${card##*/}
    done
done 2>/dev/null
echo "card $name"
/busybox ip link set lo up
/busybox ip address add MACHINE/24 dev $name
/busybox ip link set $name up
/busybox ping -c 3 -W 30 NODE >/dev/null && echo "ping answered"
/busybox nc NODE 7701 </dev/null >/got
echo "got $(/busybox sha256sum </got)"
/busybox nc NODE 7702 </got >/dev/null
while :; do /busybox sleep 1; done
"#;

fn spec(board: &str) -> String {
    json!({ "domain": { "machine": { "type": board } } }).to_string()
}

/// Returns a VM with a direct kernel boot and a disk for snapshots.
fn machine_pod(node: &TestNode, name: &str, image: &str, board: &str) -> PodRequest {
    let parts = [("kernel-image", image), ("kernel", "/boot/vmlinuz"), ("initrd", "/boot/first.img")];
    let line = ("kernel-args", "rdinit=/first console=ttyS0 quiet net.ifnames=0 mitigations=off");
    let spec = spec(board);
    let disks = ("disks", "data=empty:1Mi");
    let machine = [("kind", "machine"), ("memory", "256Mi"), disks, line, ("spec", spec.as_str())];
    annotated_pod(node, name, &[&machine[..], &parts].concat())
}

fn push_init_image(node: &TestNode, debian: &Debian) -> String {
    let first = INIT_SCRIPT.replace("VM_MAC", VM_MAC).replace("MACHINE", MACHINE).replace("NODE", NODE);
    let mut initrd = debian.read_file("initrd.img");
    initrd.extend(cpio::archive(&[("first", first.as_bytes(), 0o755)]));
    let image = TestImage::busybox().with_layer(|layer| {
        layer.add_file("boot/vmlinuz", &debian.read_file("vmlinuz"), 0o440);
        layer.add_file("boot/first.img", &initrd, 0o440)
    });
    node.push_and_pull(&image, "first:1")
}

fn with_devices(container: ContainerRequest, devices: &[&str]) -> ContainerRequest {
    let device = |path: &&str| json!({ "host_path": path, "container_path": path, "permissions": "mrw" });
    container.set("devices", devices.iter().map(device).collect())
}

/// Sends `sent` to the VM over the wire, and returns the bytes that the VM sends.
fn exchange_bytes(sent: Vec<u8>) -> JoinHandle<Vec<u8>> {
    let [gives, takes] = [7701, 7702].map(|port| TcpListener::bind((NODE, port)).expect("the card has its address"));
    spawn(move || {
        gives.accept().expect("the machine calls").0.write_all(&sent).expect("it takes all");
        let mut got = vec![0; LENGTH];
        takes.accept().expect("the machine calls").0.read_exact(&mut got).expect("it gives all");
        got
    })
}

fn check_refusal(pod: &RunningPod<'_>, container: ContainerRequest, words: &str) {
    let error = pod.try_create(container).err();
    assert!(error.contains(words), "{words:?} in {error}");
}

#[test]
fn a_vm_has_a_network_card_of_the_node() {
    let (Some(card), Some(debian)) = (PassedCard::find(), Debian::from_env()) else {
        println!(
            "skipped: no card to give away: NODE_IOMMU=1 ci/node makes a node with one; NACELLE_DISK_IMAGE says where Debian is"
        );
        return;
    };
    let near = find_interface(NODE_MAC).expect("a node with one card has the other");
    let near = near.file_name().and_then(|name| name.to_str()).expect("it is text");
    run_program("ip", ["address", "replace", &format!("{NODE}/24"), "dev", near]).ok();
    run_program("ip", ["link", "set", near, "up"]).ok();

    let specifications = tempfile::tempdir().expect("a directory");
    let nodes = json!([{ "path": "/dev/vfio/vfio" }, { "path": card.vfio_path() }]);
    let devices = json!([{ "name": "card", "containerEdits": { "deviceNodes": nodes } }]);
    let output = json!({ "cdiVersion": "0.6.0", "kind": "nacelle.test/pci", "devices": devices });
    fs::write(specifications.path().join("pci.json"), output.to_string()).expect("the directory is writable");
    let extra = format!("[sandbox]\ncdi_dirs = [{:?}]\n", specifications.path());
    let node = machine_node_with(NodeOptions { extra, ..NodeOptions::default() });
    let image = push_init_image(&node, &debian);
    let pod = node.crictl.run_pod_with_handler("vm", machine_pod(&node, "card", &image, "q35"));

    // While the node's own driver is bound, and for a device that is none.
    card.bind("virtio-pci");
    let asked_as = |attempt, path: &str| with_devices(machine_container(&image, attempt), &["/dev/vfio/vfio", path]);
    let requested = |path: &str| asked_as(0, path);
    check_refusal(&pod, requested(&card.vfio_path()), "bind the device to vfio-pci");
    check_refusal(&pod, requested("/dev/vfio/4000000"), "no PCI device in this IOMMU group");
    check_refusal(&pod, requested("/dev/vfio/devices/vfio0"), "/dev/vfio/NUMBER");
    card.bind("vfio-pci");

    // By its group, and the next one by its CDI name.
    let by_name = machine_container(&image, 1).set("CDI_devices", json!([{ "name": "nacelle.test/pci=card" }]));
    for wanted in [requested(&card.vfio_path()), by_name] {
        let sent: Vec<u8> = (0..LENGTH).map(|n| (n.wrapping_mul(2_654_435_761) >> 7) as u8).collect();
        let heard = exchange_bytes(sent.clone());
        let machine = pod.start(wanted);
        machine.wait_for_output("card eth");
        machine.wait_for_output("ping answered\n");
        machine.wait_for_output(&format!("got {}", hex::encode(Sha256::digest(&sent))));
        assert!(heard.join().expect("all went over the wire") == sent, "what came back is what was sent");
        check_locked_memory(&node);
        // The state of the card cannot be saved.
        let kept = node.crictl.try_call(["exec", "--sync", &machine.id, "@vm", "snapshot", "one"]).err();
        assert!(kept.contains("VFIO"), "{kept}");
        // A second VM is rejected, and the first one keeps the card.
        check_refusal(&pod, asked_as(7, &card.vfio_path()), "a machine pod has only one");
        assert!(vfio_group_is_visible(&node, &pod.id, &card.group), "QEMU finds it when it starts again");
        // No other process can open the group meanwhile.
        let taken = fs::File::open(card.vfio_path()).expect_err("a group has one holder");
        assert_eq!(taken.raw_os_error(), Some(16), "{taken}");
        node.crictl.call(["stop", "--timeout", "0", &machine.id]);
        assert_eq!(machine.wait_for_exit()["exitCode"], 137);
        eventually("the card is free again", || fs::File::open(card.vfio_path()).is_ok().then_some(()));
    }
    pod.remove();

    // Pods that cannot have the card.
    let pod = node.crictl.run_pod_with_handler("vm", machine_pod(&node, "microvm", &image, "microvm"));
    check_refusal(&pod, requested(&card.vfio_path()), "microvm has no PCI");
    pod.remove();
    let pod = node.crictl.run_pod(PodRequest::new("containers", node.directory()));
    check_refusal(
        &pod,
        with_devices(ContainerRequest::sh("plain", &image, "true"), &[&card.vfio_path()]),
        "a machine pod",
    );
    pod.remove();
    card.bind("virtio-pci");
}

/// Returns whether the VM's processes see the group.
fn vfio_group_is_visible(node: &TestNode, pod: &str, group: &str) -> bool {
    let pods = fs::read_dir(node.directory().join("run/pods")).expect("the daemon's directory is there");
    let directories = pods.map(|entry| entry.expect("it is readable").path());
    let mut of_pod = directories
        .filter(|directory| directory.file_name().is_some_and(|name| pod.starts_with(&*name.to_string_lossy())));
    of_pod.any(|directory| directory.join("vfio").join(group).exists())
}

/// The card can access only the VM's memory: the locked memory is bounded.
fn check_locked_memory(node: &TestNode) {
    let limits: Vec<String> = node
        .pids_matching("qemu")
        .into_iter()
        .filter_map(|pid| fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("limits")).ok())
        .filter_map(|text| text.lines().find(|line| line.starts_with("Max locked memory")).map(str::to_owned))
        .collect();
    let most = ((256 + 128) << 20).to_string();
    assert!(limits.iter().any(|line| line.contains(&most)), "{limits:?}");
}
