//! Tests volumes of a CSI driver, and runs the driver's process (`ci/kubelet.d/driver`).

use super::CaseResult;
use super::cluster::{claim, cluster};
use super::pod_features::waiting;
use crate::cluster::TestCluster;
use crate::disk::LoopDisk;
use crate::fixture::KubeletFixture;
use crate::kubelet::NODE;
use crate::pods::{ObservedPod, wait_for};
use nacelle_e2e::path_from_env;
use nacelle_e2e::run::run_program;
use serde_json::{Value, json};
use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command};

/// The driver's name; kubelet keeps volumes apart by it.
const DRIVER: &str = "disks.example";

/// The CSIDriver and StorageClass: volumes need no attachment to the node, and can be expanded.
const REGISTERED: &str = "apiVersion: storage.k8s.io/v1\nkind: CSIDriver\nmetadata: {name: disks.example}\n\
    spec: {attachRequired: false, podInfoOnMount: false, fsGroupPolicy: File, volumeLifecycleModes: [Persistent]}\n\
    ---\napiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {name: driven}\n\
    provisioner: disks.example\nallowVolumeExpansion: true\n";

/// The driver's process, until this is dropped.
struct Driver(Child);

impl Driver {
    /// Starts a driver with these volumes; kubelet finds it by itself.
    fn start(volumes: &[(&str, &LoopDisk)], log: &Path) -> Self {
        let log = File::create(log).expect("the node's directory is writable");
        let pairs = volumes.iter().map(|(name, disk)| format!("{name}={}", disk.device()));
        Self(
            Command::new(path_from_env("CSI_DRIVER"))
                .arg(DRIVER)
                .args(pairs)
                .stderr(log)
                .spawn()
                .expect("ci/kubelet built it"),
        )
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.0.kill().expect("the driver is our child");
        self.0.wait().expect("the driver is our child");
        // kubelet forgets a plugin whose socket is gone.
        let _ = fs::remove_file(Path::new("/var/lib/kubelet/plugins_registry").join(format!("{DRIVER}-reg.sock")));
    }
}

/// Returns a volume of the driver and a claim to it.
fn volume(name: &str, mode: &str) -> String {
    let common = "accessModes: [ReadWriteOnce], storageClassName: driven";
    format!(
        "apiVersion: v1\nkind: PersistentVolume\nmetadata: {{name: {name}}}\n\
         spec: {{capacity: {{storage: 32Mi}}, {common}, volumeMode: {mode}, persistentVolumeReclaimPolicy: Retain, \
         claimRef: {{namespace: default, name: {name}}}, csi: {{driver: {DRIVER}, volumeHandle: {name}}}}}\n\
         ---\napiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: {name}, namespace: default}}\n\
         spec: {{{common}, volumeMode: {mode}, volumeName: {name}, resources: {{requests: {{storage: 32Mi}}}}}}\n"
    )
}

/// Requests 64 MiB, and acts as the external resizer: the volume has grown and the node must follow.
fn request_expansion(cluster: &TestCluster, name: &str) {
    let patch = |kind: &str, patch: Value, further: &[&str]| {
        let patch = patch.to_string();
        cluster.kubectl(&[&["patch", kind, name, "--type=merge", "-p", &patch][..], further].concat()).ok();
    };
    let size = json!({"storage": "64Mi"});
    patch("pvc", json!({"spec": {"resources": {"requests": size}}}), &[]);
    patch("pv", json!({"spec": {"capacity": size}}), &[]);
    let pending = json!({"type": "FileSystemResizePending", "status": "True"});
    let status = json!({
        "conditions": [pending], "allocatedResources": size, "allocatedResourceStatuses": {"storage": "NodeResizePending"},
    });
    patch("pvc", json!({"status": status}), &["--subresource=status"]);
}

/// Returns whether the process has `CAP_SYS_RESOURCE`, which ext4 requires for resizing a mounted file system (fs/ext4/ioctl.c).
fn may_grow_ext4() -> bool {
    let status = fs::read_to_string("/proc/self/status").expect("proc is mounted");
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:")).expect("it has capabilities");
    u64::from_str_radix(set.trim(), 16).expect("a number in base 16") & (1 << 24) != 0
}

/// Returns kubelet's statistics of the bytes of the pod's volume.
fn volume_statistics(cluster: &TestCluster, pod: &str, volume: &str) -> Option<Value> {
    let summary = cluster.kubectl(&["get", "--raw", "/api/v1/nodes/node/proxy/stats/summary"]).ok();
    let summary: Value = serde_json::from_str(&summary).expect("kubelet answers in JSON");
    let pods = summary["pods"].as_array()?.iter().find(|one| one["podRef"]["name"] == pod)?;
    pods["volume"].as_array()?.iter().find(|one| one["name"] == volume).cloned()
}

/// Waits until kubelet has registered the driver.
fn wait_until_registered(cluster: &TestCluster) {
    wait_for("kubelet knows the driver", || {
        let node = cluster.object(&format!("/apis/storage.k8s.io/v1/csinodes/{NODE}"))?;
        node["spec"]["drivers"].as_array()?.iter().any(|one| one["name"] == DRIVER).then_some(())
    });
}

/// Returns the manifest of a pod with both volumes.
fn driven_pod(name: &str) -> String {
    let spec = "  securityContext: {fsGroup: 2000}\n  volumes:\n\
                \x20 - {name: files, persistentVolumeClaim: {claimName: driven-files}}\n\
                \x20 - {name: disk, persistentVolumeClaim: {claimName: driven-disk}}\n";
    let main = "    volumeMounts:\n    - {name: files, mountPath: /files}\n    - {name: files, mountPath: /part, subPath: part}\n\
                \x20   - {name: files, mountPath: /seen, readOnly: true}\n\
                \x20   volumeDevices: [{name: disk, devicePath: /dev/data}]\n";
    waiting(name, spec, main)
}

pub fn csi_volumes(fixture: &KubeletFixture) -> CaseResult {
    let cluster = cluster(fixture);
    let [files, disk] = ["driven-files", "driven-disk"].map(|name| LoopDisk::new(fixture, name, 32));
    run_program("mkfs.ext4", ["-q", files.device()]).ok();
    let volumes = [("driven-files", &files), ("driven-disk", &disk)];
    let driver = Driver::start(&volumes, &fixture.node.directory().join("driver.log"));
    cluster.apply(REGISTERED);
    wait_until_registered(cluster);
    claim(cluster, &volume("driven-files", "Filesystem"), "driven-files");
    claim(cluster, &volume("driven-disk", "Block"), "driven-disk");
    let sizes = "df -k /files | awk 'NR == 2 {print $2}'; blockdev --getsize64 /dev/data";
    let sizes_of = |text: &str| {
        let mut lines = text.lines().map(|line| line.parse::<u64>().expect("a size"));
        (lines.next().expect("of the files"), lines.next().expect("of the disk"))
    };

    let pod = cluster.create_pod("driven", &driven_pod("driven"));
    pod.wait_until_ready();
    pod.shell("echo first >/part/file; echo first | dd of=/dev/data conv=notrunc,fsync");
    assert_eq!(pod.shell("cat /seen/part/file; stat -c '%a %g' /files"), "first\n2775 2000");
    assert_ne!(pod.try_shell("touch /seen/other").code, 0);
    let (room, size) = sizes_of(&pod.shell(sizes));
    assert!(room < 32 << 10 && size == 32 << 20, "{room} {size}");
    // The figures by which kubelet warns and evicts.
    let reported = wait_for("kubelet has the statistics of the driver", || {
        volume_statistics(cluster, "driven", "files")?["capacityBytes"].as_u64()
    });
    assert_eq!(reported, room << 10);

    // Both grow while the pod runs; without the capability for ext4 only the disk grows.
    let grow = &volumes[usize::from(!may_grow_ext4())..];
    for (name, disk) in grow {
        disk.grow(64);
        request_expansion(cluster, name);
    }
    wait_for("the pod sees what has grown", || {
        let (now, size) = sizes_of(&pod.shell(sizes));
        ((now > room + (16 << 10) || !may_grow_ext4()) && size == 64 << 20).then_some(())
    });
    for (name, _) in grow {
        wait_for("the claim reports it", || {
            let claim = cluster.object(&format!("/api/v1/namespaces/default/persistentvolumeclaims/{name}"))?;
            (claim["status"]["capacity"]["storage"] == "64Mi").then_some(())
        });
    }
    pod.delete();

    // Another pod finds the data of the first one.
    let pod = cluster.create_pod("driven-again", &driven_pod("driven-again"));
    pod.wait_until_ready();
    assert_eq!(pod.shell("cat /part/file; head -c 5 /dev/data"), "first\nfirst");
    pod.delete();
    cluster.kubectl(&["delete", "pvc,pv", "driven-files", "driven-disk", "--wait=false"]).ok();
    files.detach();
    disk.detach();
    cluster.kubectl(&["delete", "csidriver,storageclass", DRIVER, "driven", "--ignore-not-found", "--wait=false"]).ok();
    drop(driver);
    CaseResult::Passed
}
