//! Runs a pod process on a thread of the test, with the fake engine, and creates a client for it.

#![allow(dead_code, reason = "each test program uses a part of this")]

pub mod agent;
pub mod harness;

use agent::FakeAgent;
use nacelle_base::PodId;
use nacelle_engine::Engine;
use nacelle_engine::fake::{FailureScript, FakeEngine, GuestHandle};
use nacelle_pod::client::{self, ClientError, PodClient};
use nacelle_pod::identity;
use nacelle_pod::record::{self, SavedPodState};
use nacelle_pod::spec::{Accelerator, EngineSpec, PodSpec, ScratchSpec, Timeouts, VERSION};
use nacelle_proto::pod;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub const LIMIT: Duration = Duration::from_secs(60);

/// Returns a specification for the fake engine.
pub fn spec(root: &Path) -> PodSpec {
    PodSpec {
        version: VERSION,
        id: PodId::from_bytes([9; 32]),
        engine: fake_engine_spec(),
        vcpus: 1,
        reserved_vcpus: Some(4),
        topology: None,
        cpu_model: None,
        memory_mib: 64,
        reserved_memory_mib: Some(512),
        memory_pages: Default::default(),
        console: Default::default(),
        kernel: "/none/vmlinux".into(),
        initrd: "/none/initrd".into(),
        kernel_args: vec![],
        template: None,
        checkpoint: None,
        network: None,
        hostname: "pod-name".into(),
        sysctls: Default::default(),
        shared_pid: false,
        user_namespace: None,
        shm_bytes: 0,
        volume_cache_seconds: 0,
        has_sockets: false,
        scratch: ScratchSpec { size_mib: 16, templates: root.join("templates") },
        disk_limits: None,
        timeouts: Timeouts { shutdown_ms: 60_000, ..Timeouts::default() },
        jail: None,
    }
}

/// Returns the engine that specifications name when the test uses the fake one.
pub fn fake_engine_spec() -> EngineSpec {
    EngineSpec::Qemu { binary: "/fake".into(), accelerator: Accelerator::Tcg }
}

/// Returns the engine that specifications of machine pods name when the test uses the fake one.
pub fn fake_machine_spec(keep: PathBuf) -> EngineSpec {
    let (program, qemu, accelerator) = ("/usr/bin/env".into(), "/fake".into(), Accelerator::Tcg);
    EngineSpec::Keeper { program, qemu, accelerator, keep: Some(keep), shares: 0 }
}

/// Returns the path of a cgroup that only this test uses.
pub fn cgroup(root: &Path) -> PathBuf {
    Path::new("nacelle").join(root.file_name().unwrap())
}

/// Returns an engine whose guests run the fake agent.
pub fn engine(agent_state: &Arc<FakeAgent>) -> FakeEngine {
    let agent_state = Arc::clone(agent_state);
    FakeEngine::new(move |guest: GuestHandle| agent::guest(&agent_state, &guest))
}

/// A pod process and its environment.
pub struct PodFixture {
    pub root: tempfile::TempDir,
    pub dir: PathBuf,
    pub agent: Arc<FakeAgent>,
    process: Option<JoinHandle<std::process::ExitCode>>,
}

impl PodFixture {
    /// Creates a fixture whose pod has not begun.
    pub fn new() -> PodFixture {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("run");
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::create_dir_all(root.path().join("logs")).unwrap();
        std::fs::write(root.path().join("blob"), vec![b'e'; 3 << 20]).unwrap();
        PodFixture { dir, root, agent: Arc::default(), process: None }
    }

    /// Starts the pod process as a thread.
    pub async fn boot(&mut self, change: impl FnOnce(&mut PodSpec), script: FailureScript) -> PodClient {
        let engine = engine(&self.agent).with_script(script);
        self.boot_on(engine, change).await
    }

    /// Starts the pod process as a thread, with this engine.
    pub async fn boot_on(&mut self, engine: impl Engine + 'static, change: impl FnOnce(&mut PodSpec)) -> PodClient {
        let mut spec = spec(self.root.path());
        change(&mut spec);
        spec.write(&self.dir).unwrap();
        nacelle_pod::create_jail(&self.dir).unwrap();
        identity::write(&identity::of_this_process().unwrap(), &self.dir).unwrap();
        let dir = self.dir.clone();
        self.process = Some(std::thread::spawn(move || nacelle_pod::run_with(&dir, |_| Ok(Arc::new(engine)))));
        let deadline = Instant::now() + LIMIT;
        loop {
            match client::connect(&self.dir).await {
                Ok(client) => return client,
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Creates a fixture with a pod that is ready.
    pub async fn ready() -> (PodFixture, PodClient) {
        PodFixture::ready_with(|_| {}).await
    }

    /// Creates a fixture with a ready pod whose specification `change` modified.
    pub async fn ready_with(change: impl FnOnce(&mut PodSpec)) -> (PodFixture, PodClient) {
        let mut world = PodFixture::new();
        let client = world.boot(change, FailureScript::default()).await;
        client.configure(network()).await.unwrap();
        (world, client)
    }

    /// Returns a request for a container with this script.
    pub fn container(&self, id: &str, script: &str) -> pod::CreateContainerRequest {
        pod::CreateContainerRequest {
            id: id.into(),
            oci_spec: script.into(),
            image_key: "image".into(),
            image: vec![pod::Extent {
                path: self.root.path().join("blob").to_str().unwrap().into(),
                offset: 0,
                length: 8192,
            }],
            ..Default::default()
        }
    }

    /// Returns the path of a container's log.
    pub fn log(&self, id: &str) -> PathBuf {
        self.root.path().join("logs").join(id).join("0.log")
    }

    /// Returns the log without its times.
    pub fn log_text(&self, id: &str) -> String {
        let text = std::fs::read_to_string(self.log(id)).unwrap();
        text.lines().map(|line| line.split_once(' ').unwrap().1.to_owned() + "\n").collect()
    }

    /// Opens the log of a container and sends it to the process.
    pub async fn set_log(&self, client: &PodClient, id: &str) {
        let log = client::open_log(&self.root.path().join("logs"), &self.log(id)).unwrap();
        client.set_log(id, log).await.unwrap();
    }

    /// Creates and starts a container.
    pub async fn run(&self, client: &PodClient, id: &str, script: &str) {
        client.create_container(self.container(id, script)).await.unwrap();
        self.set_log(client, id).await;
        client.start_container(id).await.unwrap();
    }

    /// Returns the record that the process wrote.
    pub fn record(&self) -> SavedPodState {
        record::read(&self.dir).unwrap().unwrap()
    }

    /// Waits for the process to end after a stop; returns its record, and checks that it leaked nothing.
    pub async fn end(mut self) -> SavedPodState {
        let process = self.process.take().unwrap();
        let code = tokio::task::spawn_blocking(move || process.join().unwrap()).await.unwrap();
        assert_eq!(format!("{code:?}"), format!("{:?}", std::process::ExitCode::SUCCESS));
        assert_eq!(names(&self.dir), ["jail", "process.json", "spec.json"]);
        let mut files = names(&nacelle_pod::jail_dir(&self.dir));
        files.retain(|name| name != "console.log");
        assert_eq!(files, ["state.json"]);
        self.record()
    }
}

/// Polls a condition that no event announces; fails with `what` after [`LIMIT`].
pub async fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = std::time::Instant::now() + LIMIT;
    while !condition() {
        assert!(std::time::Instant::now() < deadline, "not within {LIMIT:?}: {what}");
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
}

/// Returns the sorted names in a directory.
pub fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = entries.collect();
    names.sort();
    names
}

pub fn network() -> pod::ConfigureRequest {
    pod::ConfigureRequest { interfaces: vec![], routes: vec![], dns: None }
}

/// Waits until the state of the pod satisfies `wanted`.
pub async fn until(client: &PodClient, what: &str, wanted: impl Fn(&pod::PodState) -> bool) -> pod::PodState {
    let deadline = Instant::now() + LIMIT;
    loop {
        let state = client.state().await.unwrap();
        if wanted(&state) {
            return state;
        }
        assert!(Instant::now() < deadline, "{what}: {state:?}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Waits until a container has exited.
pub async fn exited(client: &PodClient, id: &str) -> pod::ContainerState {
    let has_exited =
        |state: &pod::PodState| state.containers.iter().any(|c| c.id == id && c.phase() == pod::ContainerPhase::Exited);
    let state = until(client, "the container ends", has_exited).await;
    state.containers.into_iter().find(|container| container.id == id).unwrap()
}

/// Returns the kind of a failure.
pub fn kind<T: std::fmt::Debug>(outcome: Result<T, ClientError>) -> nacelle_base::FailureKind {
    nacelle_base::Classify::kind(&outcome.unwrap_err())
}
