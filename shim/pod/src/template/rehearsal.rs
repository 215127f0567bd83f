//! Rehearses the start of a pod in a VM restored from a new template: that its agent greets, that it can be configured and runs a
//! container, and which pages all this touches. A template from which no VM continues would fail each pod.

use super::build::{machine_spec, pausable};
use super::spec::TemplateSpec;
use crate::agent::{self, Agent, ExitWatch};
use crate::boot::{accept_hello, configure};
use crate::error::PodError;
use crate::machine::{IMAGE_DISK, MAX_MTU, SCRATCH_DISK, VOLUME_DISK, random_mac, tap_queues};
use crate::{images, scratch};
use nacelle_base::files::at;
use nacelle_base::machine::{Extent, ImageDisk};
use nacelle_engine::kvm::KvmEngine;
use nacelle_engine::{
    DiskSpec, Engine, EngineError, Machine, NicSpec, Restorer, Snapshot, SnapshotFiles, StopMode, Touched,
};
use nacelle_net::{NetNs, Tap, tap};
use nacelle_proto::agent as proto;
use nacelle_proto::common::{Interface, Route};
use nix::sched::{CloneFlags, unshare};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::sync::watch;

/// The size of the scratch disk in MiB. A pod's is larger, which the guest does not notice before it writes.
const SCRATCH_MIB: u64 = 64;

/// The name of the image in the directory of the template, which the daemon writes.
pub const IMAGE_FILE: &str = "rehearsal.erofs";
/// The absolute path of the program in the image, which runs until it is killed.
pub const PROGRAM: &str = "/idle";
/// The image's place on the image disk and its partition.
const IMAGE_OFFSET: u64 = images::ALIGNMENT;
const PARTITION: u32 = 1;
/// The ids of the container that every pod has, and of one more, which stands for what pods do besides.
const CONTAINERS: [(&str, Touched); 2] = [("first", Touched::Early), ("second", Touched::Later)];

const ENDED: EngineError = EngineError::Ended { what: "measure the memory of" };

/// What the VM has besides what the template has: made before the process is jailed.
pub(super) struct RehearsalDevices {
    scratch: PathBuf,
    image: PathBuf,
    tap: Tap,
}

impl RehearsalDevices {
    /// Creates a scratch disk in the directory of the template, and a tap in a network namespace that ends with it.
    pub(super) fn create(spec: &TemplateSpec, dir: &Path) -> Result<RehearsalDevices, PodError> {
        let queues = tap_queues(spec.shape.vcpus);
        let create_tap = || -> Result<Tap, PodError> {
            unshare(CloneFlags::CLONE_NEWNET)
                .map_err(|errno| PodError::Thread { what: "create a network namespace", source: errno.into() })?;
            let here = NetNs::open(Path::new("/proc/thread-self/ns/net"))?;
            Ok(tap::create_multi_queue(&here, "nacelle0", queues)?)
        };
        // The namespace is that of a thread, which ends here.
        let tap = std::thread::scope(|scope| scope.spawn(create_tap).join())
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok(RehearsalDevices { scratch: scratch::create_template(dir, SCRATCH_MIB)?, image: dir.join(IMAGE_FILE), tap })
    }

    /// Returns the paths of the files that the process takes into its jail.
    pub(super) fn files(&self) -> [PathBuf; 2] {
        [self.scratch.clone(), self.image.clone()]
    }
}

/// Restores the template in `files`, rehearses, and records the working set in `files`.
pub(super) fn rehearse(
    engine: &KvmEngine,
    runtime: &Runtime,
    spec: &TemplateSpec,
    dir: &Path,
    devices: RehearsalDevices,
    files: &SnapshotFiles,
    saved: Snapshot,
) -> Result<(), PodError> {
    let RehearsalDevices { scratch, image, tap: Tap { fd: tap, more_queues, .. } } = devices;
    let mut machine = machine_spec(spec, dir);
    machine.disks = vec![
        DiskSpec::Images { serial: "images".into() },
        DiskSpec::File { path: scratch, read_only: false, serial: "scratch".into() },
        DiskSpec::Volumes { serial: "volumes".into() },
    ];
    machine.nics = vec![NicSpec { tap, more_queues, dhcp: None, mac: random_mac()?, mtu: MAX_MTU }];
    let vm = engine.restore_in_small_pages(machine.check(&engine.limits())?, saved)?;
    pausable(&*vm)?.resume()?;
    let limit = spec.boot();
    let measured = runtime.block_on(async {
        let rehearsal = rehearse_pod(spec, &*vm, &image, files);
        tokio::time::timeout(limit, rehearsal).await
    });
    let measured = measured.unwrap_or(Err(PodError::TooSlow { what: "start a pod from the template", limit }));
    // How the VM has ended explains more than the missing answer.
    measured.map_err(|error| match vm.wait(Duration::ZERO) {
        Some(exit) => PodError::Died { why: crate::guest_values::describe_exit(&exit) },
        None => error,
    })?;
    vm.stop(StopMode::Kill)?;
    Ok(())
}

/// Starts a pod with two containers, and records what the VM has touched when each runs.
async fn rehearse_pod(
    spec: &TemplateSpec,
    vm: &dyn Machine,
    image: &Path,
    files: &SnapshotFiles,
) -> Result<(), PodError> {
    let (_exited, exit_watch) = watch::channel(None);
    let agent = start_pod(spec, vm, image, exit_watch).await?;
    for (id, when) in CONTAINERS {
        start_container(&agent, id).await?;
        pausable(vm)?.pause()?;
        vm.as_snapshottable().ok_or(ENDED)?.record_working_set(files, when)?;
        pausable(vm)?.resume()?;
    }
    Ok(())
}

/// Does what a pod process does until the pod is ready, and attaches the image.
async fn start_pod(
    spec: &TemplateSpec,
    vm: &dyn Machine,
    image: &Path,
    exit_watch: ExitWatch,
) -> Result<Agent, PodError> {
    let limit = spec.boot();
    let incoming = vm.link().listen(agent::BOOT_PORT);
    let incoming = incoming.map_err(|source| PodError::Link { what: "listen for the guest's agent", source })?;
    let (mut stream, _hello) = accept_hello(incoming, limit).await?;
    configure(&mut stream, &usual_pod()?, limit).await?;

    let length = std::fs::metadata(image).map_err(at("stat", image))?.len();
    let extents = vec![Extent { path: image.to_owned(), offset: 0, length }];
    let disk = vm.disks().get(IMAGE_DISK).ok_or(EngineError::Ended { what: "place the image of" })?;
    let placed = disk.place(IMAGE_OFFSET, &ImageDisk { extents });
    placed.map_err(|source| PodError::Place { key: image.display().to_string(), source })?;
    let agent = Agent::new(vm.link(), exit_watch, limit);
    let request = proto::AttachImageRequest { partition: PARTITION, offset: IMAGE_OFFSET, length, files: Vec::new() };
    agent.attach_image(request).await?;
    Ok(agent)
}

async fn start_container(agent: &Agent, id: &str) -> Result<(), PodError> {
    let request = proto::CreateContainerRequest {
        id: id.to_owned(),
        oci_spec: usual_container().to_string().into_bytes(),
        partition: PARTITION,
        ..proto::CreateContainerRequest::default()
    };
    agent.create_container(request).await?;
    agent.start_container(id).await
}

/// Returns the specification of a container as most are.
fn usual_container() -> serde_json::Value {
    let capabilities = [
        "CAP_CHOWN",
        "CAP_DAC_OVERRIDE",
        "CAP_FSETID",
        "CAP_FOWNER",
        "CAP_MKNOD",
        "CAP_NET_RAW",
        "CAP_SETGID",
        "CAP_SETUID",
        "CAP_SETFCAP",
        "CAP_SETPCAP",
        "CAP_NET_BIND_SERVICE",
        "CAP_SYS_CHROOT",
        "CAP_KILL",
        "CAP_AUDIT_WRITE",
    ];
    let mount = |to: &str, kind: &str, options: &[&str]| json!({"destination": to, "type": kind, "source": kind, "options": options});
    let namespaces = ["pid", "ipc", "uts", "mount", "network", "cgroup"].map(|kind| json!({"type": kind}));
    json!({
        "ociVersion": "1.2.0",
        "process": {
            "args": [PROGRAM], "cwd": "/", "env": ["PATH=/bin"], "user": {"uid": 0, "gid": 0},
            "capabilities": {"bounding": capabilities, "effective": capabilities, "permitted": capabilities}
        },
        "root": {"path": "rootfs"},
        "mounts": [
            mount("/proc", "proc", &["nosuid", "noexec", "nodev"]),
            mount("/dev", "tmpfs", &["nosuid", "mode=755", "size=65536k"]),
            mount("/dev/pts", "devpts", &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"]),
            mount("/dev/mqueue", "mqueue", &["nosuid", "noexec", "nodev"]),
            mount("/sys", "sysfs", &["nosuid", "noexec", "nodev", "ro"]),
            mount("/sys/fs/cgroup", "cgroup", &["nosuid", "noexec", "nodev", "relatime", "ro"])
        ],
        "linux": {
            "namespaces": namespaces,
            "resources": {"devices": [{"allow": false, "access": "rwm"}]},
            "maskedPaths": ["/proc/kcore", "/proc/keys", "/sys/firmware"],
            "readonlyPaths": ["/proc/sys", "/proc/irq", "/proc/bus"]
        }
    })
}

/// Returns the configuration of a pod as most are: one interface, and nothing special.
fn usual_pod() -> Result<proto::BootConfig, PodError> {
    let mut entropy = vec![0; 64];
    crate::machine::random(&mut entropy)?;
    let number = |disk: usize| u32::try_from(disk).unwrap_or(u32::MAX);
    Ok(proto::BootConfig {
        hostname: "rehearsal".into(),
        interfaces: vec![Interface {
            name: "eth0".into(),
            mac: vec![2, 0, 0, 0, 0, 1],
            mtu: 1500,
            addresses: vec!["192.0.2.2/24".into()],
            neighbours: vec![],
        }],
        routes: vec![Route {
            destination: "0.0.0.0/0".into(),
            gateway: "192.0.2.1".into(),
            interface: "eth0".into(),
            ..Route::default()
        }],
        time_unix_nanos: crate::now_nanos(),
        entropy,
        scratch_disk: number(SCRATCH_DISK),
        image_disk: number(IMAGE_DISK),
        volume_disk: number(VOLUME_DISK),
        ..proto::BootConfig::default()
    })
}
