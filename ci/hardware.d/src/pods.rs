//! Runs whole pods without a daemon and without a network: the real pod process with its jail, VM and agent, and a container in
//! it.

use crate::undo::{self, UndoGuard};
use anyhow::Context;
use nacelle_base::PodId;
use nacelle_pod::client::{self, PodClient};
use nacelle_pod::spec::{EngineSpec, JailSpec, PodSpec, ScratchSpec, Seccomp, Timeouts, VERSION};
use nacelle_proto::pod;
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The memory of a pod's guest in MiB.
pub const MEMORY_MIB: u32 = 128;
/// The size of the scratch disk in MiB. The bundle has a template of it, so that the host needs no mkfs.
pub const SCRATCH_MIB: u64 = 1024;
/// The user of the pod processes, the first that the daemon gives to pods by default.
const USER: u32 = 0x7000_0001;
/// The name of the container.
const CONTAINER: &str = "container";

/// The parts of pods.
#[derive(Clone, Debug)]
pub struct PodFactory {
    /// The path of the pod process's program.
    pub program: PathBuf,
    pub kernel: PathBuf,
    /// The initramfs with the agent.
    pub initrd: PathBuf,
    /// An EROFS file system with a shell.
    pub image: PathBuf,
    /// The directory of the scratch disks and their templates, on a disk file system.
    pub scratch: PathBuf,
    /// The parent of the pods' directories, with a short path.
    pub run: PathBuf,
}

/// A pod that is ready. Dropping it kills it.
pub struct MeasuredPod {
    pub client: PodClient,
    /// The milliseconds from the start of the process to a configured guest.
    pub ready: f64,
    _guard: UndoGuard,
}

impl MeasuredPod {
    /// Returns the PID of the pod process.
    pub fn pid(&self) -> u32 {
        self.client.identity().pid.unsigned_abs()
    }
}

impl PodFactory {
    /// Starts a pod and waits until its guest is configured.
    pub async fn start(&self) -> anyhow::Result<MeasuredPod> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = self.run.join(number.to_string());
        fs::create_dir(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let spec = self.spec(number);
        let path = dir.clone();
        let guard = undo::register(move || remove_pod(&path));
        let begun = Instant::now();
        let started = client::spawn(&self.program, &dir, &spec, |_started| async { Ok(()) }).await;
        let configured = match started {
            Ok(client) => client.configure(pod::ConfigureRequest::default()).await.map(|_answer| client),
            Err(error) => Err(error),
        };
        let ready = begun.elapsed().as_secs_f64() * 1e3;
        let client =
            configured.with_context(|| format!("a pod is not ready; its logs end with: {}", log_tail(&dir)))?;
        Ok(MeasuredPod { client, ready, _guard: guard })
    }

    /// Creates and starts a container that sleeps.
    pub async fn start_container(&self, pod: &MeasuredPod) -> anyhow::Result<()> {
        let length =
            fs::metadata(&self.image).with_context(|| format!("cannot read the image {}", self.image.display()))?.len();
        let path = self.image.to_str().context("the path of the image is not UTF-8")?.to_owned();
        let request = pod::CreateContainerRequest {
            id: CONTAINER.to_owned(),
            oci_spec: oci_spec(),
            image_key: "image".to_owned(),
            image: vec![pod::Extent { path, offset: 0, length }],
            ..Default::default()
        };
        pod.client.create_container(request).await.context("cannot create the container")?;
        pod.client.start_container(CONTAINER).await.context("cannot start the container")
    }

    fn spec(&self, number: u64) -> PodSpec {
        let mut id = [0; 32];
        id[..8].copy_from_slice(&number.to_be_bytes());
        id[8..12].copy_from_slice(&std::process::id().to_be_bytes());
        PodSpec {
            version: VERSION,
            id: PodId::from_bytes(id),
            engine: EngineSpec::Kvm {},
            vcpus: 1,
            reserved_vcpus: None,
            topology: None,
            cpu_model: None,
            memory_mib: MEMORY_MIB,
            reserved_memory_mib: None,
            memory_pages: Default::default(),
            console: Default::default(),
            kernel: self.kernel.clone(),
            initrd: self.initrd.clone(),
            kernel_args: Vec::new(),
            template: None,
            checkpoint: None,
            network: None,
            hostname: format!("pod-{number}"),
            sysctls: Default::default(),
            shared_pid: false,
            user_namespace: None,
            shm_bytes: 0,
            scratch: ScratchSpec { size_mib: SCRATCH_MIB, templates: self.scratch.clone() },
            disk_limits: None,
            volume_cache_seconds: 0,
            has_sockets: false,
            timeouts: Timeouts::default(),
            jail: Some(JailSpec { seccomp: Seccomp::Kill, image_layers: None, cgroup: None, user: Some(USER) }),
        }
    }
}

/// Runs a command in the pod's container to its end; returns the milliseconds from the request to the answer.
pub async fn exec(pod: &MeasuredPod, command: &str) -> anyhow::Result<f64> {
    let begun = Instant::now();
    let limit = Some(Duration::from_secs(60));
    let answer = pod.client.exec_sync(CONTAINER, vec![command.to_owned()], limit).await?;
    let took = begun.elapsed();
    anyhow::ensure!(answer.exit_code == 0, "{command} ended with {}", answer.exit_code);
    Ok(took.as_secs_f64() * 1e3)
}

/// Removes everything of a pod. May be called from any thread.
fn remove_pod(dir: &Path) {
    let path = dir.to_owned();
    // The caller may be a thread of a runtime, which must not block on another one.
    let cleaned = std::thread::spawn(move || -> anyhow::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(client::clean_up(&path, None))?;
        fs::remove_dir_all(&path)?;
        Ok(())
    });
    if let Ok(Err(error)) = cleaned.join() {
        eprintln!("the pod in {} is not cleaned up: {error:#}", dir.display());
    }
}

/// Returns the ends of a pod's logs.
fn log_tail(dir: &Path) -> String {
    let last_kib = |text: Vec<u8>| String::from_utf8_lossy(&text[text.len().saturating_sub(1024)..]).into_owned();
    let log = fs::read(dir.join(client::LOG_FILE)).unwrap_or_default();
    // The console is at most 1 MiB (docs/contributor/pod-process.md).
    let console = nacelle_pod::jailed(dir).read(nacelle_pod::CONSOLE_FILE, 2 << 20);
    last_kib(log) + &last_kib(console.ok().flatten().unwrap_or_default())
}

fn oci_spec() -> Vec<u8> {
    let mount = |destination: &str, kind: &str| json!({"destination": destination, "type": kind, "source": kind});
    let namespaces = ["pid", "ipc", "uts", "mount", "network"].map(|kind| json!({"type": kind}));
    let spec = json!({
        "ociVersion": "1.2.0",
        "process": {
            "args": ["/bin/sleep", "1000000"], "cwd": "/", "env": ["PATH=/bin"], "user": {"uid": 0, "gid": 0},
            "capabilities": {"bounding": [], "effective": [], "permitted": []},
        },
        "root": {"path": "rootfs"},
        "mounts": [mount("/proc", "proc"), mount("/dev", "tmpfs")],
        "linux": {"namespaces": namespaces},
    });
    spec.to_string().into_bytes()
}
