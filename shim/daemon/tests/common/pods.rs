//! Simulates pod processes without VMs: a sleeping child process for the identity, and a server of pod.proto that keeps
//! containers in memory and records them as the real one does.

use super::Script;
use super::checkpoints::FakeCheckpoints;
use nacelle_base::descriptors::receive_descriptor;
use nacelle_daemon::lifecycle::services::{Admit, Pods};
use nacelle_model::process::PodProcess;
use nacelle_model::process::ProcessIdentity;
use nacelle_pod::MemoryPolicy;
use nacelle_pod::affinity::AffinityError;
use nacelle_pod::client::{self, ClientError, PodClient};
use nacelle_pod::record::{ContainerPhase, Phase, SavedContainerState, SavedPodState};
use nacelle_pod::spec::PodSpec;
use nacelle_pod::template::TemplateSpec;
use nacelle_proto::{common, pod as proto};
use prost::Message;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::sync::watch;
use tokio_stream::wrappers::{UnixListenerStream, WatchStream};
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status};

type Answer<T> = Result<Response<T>, Status>;

struct Process {
    child: Child,
    /// The threads with all connections, which end when this is dropped.
    runtime: tokio::runtime::Runtime,
    pod: Arc<FakePod>,
}

/// All pod processes of a node.
pub struct FakePods {
    script: Arc<Script>,
    processes: Mutex<BTreeMap<PathBuf, Process>>,
    /// The CPUs to which VMs were confined, in order.
    pub confined: Mutex<Vec<BTreeSet<u32>>>,
    /// The numbers of pinned vCPUs in the same requests.
    pub pinned: Mutex<Vec<Option<u32>>>,
    /// The memory policies of VMs, in order.
    pub memory_policies: Mutex<Vec<MemoryPolicy>>,
    /// The kernels with which VMs were started, and the contents of their files at that time.
    pub kernels: Mutex<Vec<(PathBuf, Option<Vec<u8>>)>>,
}

impl FakePods {
    pub fn new(script: Arc<Script>) -> FakePods {
        FakePods {
            script,
            processes: Mutex::default(),
            confined: Mutex::default(),
            pinned: Mutex::default(),
            memory_policies: Mutex::default(),
            kernels: Mutex::default(),
        }
    }

    /// Returns the directories of the running processes.
    pub fn alive(&self) -> Vec<PathBuf> {
        let mut processes = self.processes.lock().unwrap();
        processes.iter_mut().filter_map(|(dir, p)| p.child.try_wait().unwrap().is_none().then(|| dir.clone())).collect()
    }

    /// Returns the only process.
    pub fn only(&self) -> Arc<FakePod> {
        let processes = self.processes.lock().unwrap();
        assert_eq!(processes.len(), 1);
        Arc::clone(&processes.values().next().unwrap().pod)
    }

    /// Returns the process of the pod with this id.
    pub fn of(&self, id: &str) -> Arc<FakePod> {
        let processes = self.processes.lock().unwrap();
        let found = processes.values().find(|process| process.pod.record.lock().unwrap().id.as_str() == id);
        Arc::clone(&found.unwrap().pod)
    }

    /// Kills the process of this directory, as the kernel could.
    pub fn kill(&self, dir: &Path) {
        let mut processes = self.processes.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(mut process) = processes.remove(dir) {
            process.runtime.shutdown_background();
            process.child.kill().unwrap();
            process.child.wait().unwrap();
        }
    }

    pub fn kill_all(&self) {
        // The lock may be poisoned by a failed test.
        let processes = self.processes.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let dirs: Vec<_> = processes.keys().cloned().collect();
        drop(processes);
        dirs.iter().for_each(|dir| self.kill(dir));
    }

    async fn start(&self, dir: &Path, spec: &PodSpec, admit: Admit) -> Result<(), ClientError> {
        nacelle_pod::create_jail(dir).unwrap();
        // Like the real process, it waits for a line of input, and ends without it.
        let mut waits = Command::new("sh");
        waits.args(["-c", "read word && exec sleep 3600"]).stdin(Stdio::piped()).stdout(Stdio::null());
        let mut child = waits.spawn().unwrap();
        nacelle_pod::identity::write(&identity(&child), dir).unwrap();
        let cgroup = spec.jail.as_ref().and_then(|jail| jail.cgroup.clone());
        let started = PodProcess { identity: identity(&child), cgroup, scratch: spec.scratch_file() };
        if let Err(error) = admit(started).await {
            child.kill().unwrap();
            child.wait().unwrap();
            return Err(error);
        }
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"\n").unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let pod = Arc::new(FakePod::new(Arc::clone(&self.script), dir, spec, pid));
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let entered = runtime.enter();
        let listener =
            tokio::net::UnixListener::bind(nacelle_pod::SOCKET_FILE.in_jail(&nacelle_pod::jail_dir(dir))).unwrap();
        let streams = nacelle_pod::STREAM_SOCKET_FILE.in_jail(&nacelle_pod::jail_dir(dir));
        runtime.spawn(receive_offers(tokio::net::UnixListener::bind(streams).unwrap(), Arc::clone(&pod)));
        let service = proto::pod_server::PodServer::new(Service(Arc::clone(&pod))).max_encoding_message_size(64 << 20);
        let serving = nacelle_proto::server::builder()
            .add_service(service)
            .serve_with_incoming(UnixListenerStream::new(listener));
        runtime.spawn(async move { drop(serving.await) });
        drop(entered);
        self.processes.lock().unwrap().insert(dir.to_owned(), Process { child, runtime, pod });
        Ok(())
    }
}

/// Accepts the files of images and checkpoints, and logs, to each of which it writes a line; keeps each connection until the daemon closes
/// it.
async fn receive_offers(listener: tokio::net::UnixListener, pod: Arc<FakePod>) {
    while let Ok((mut connection, _)) = listener.accept().await {
        let pod = Arc::clone(&pod);
        tokio::spawn(async move {
            let length = connection.read_u32_le().await.unwrap();
            let mut bytes = vec![0; usize::try_from(length).unwrap()];
            connection.read_exact(&mut bytes).await.unwrap();
            let open = proto::StreamOpen::decode(bytes.as_slice()).unwrap();
            let count = match open.stream() {
                common::Stream::Image => open.descriptors,
                common::Stream::Log => 1,
                common::Stream::Checkpoint => 3,
                other => panic!("unexpected: {other:?}"),
            };
            let mut files = Vec::new();
            for _ in 0..count {
                let received = connection.async_io(Interest::READABLE, || receive_descriptor(&connection)).await;
                let mut file = std::fs::File::from(received.unwrap());
                assert!(file.metadata().unwrap().is_file());
                if open.stream() == common::Stream::Log {
                    std::io::Write::write_all(&mut file, format!("the log of {}\n", open.id).as_bytes()).unwrap();
                }
                files.push(file);
            }
            let is_checkpoint = open.stream() == common::Stream::Checkpoint;
            let offer = is_checkpoint.then(|| pod.checkpoints.offer(open.name, std::mem::take(&mut files)));
            drop(files);
            // An empty message: the stream is open.
            connection.write_u32_le(0).await.unwrap();
            let _ = connection.read(&mut [0]).await;
            drop(offer);
        });
    }
}

impl Drop for FakePods {
    fn drop(&mut self) {
        self.kill_all();
    }
}

fn identity(child: &Child) -> ProcessIdentity {
    let pid = i32::try_from(child.id()).unwrap();
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let start_time = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap().parse().unwrap();
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap().trim().to_owned();
    ProcessIdentity { pid, start_time, boot_id }
}

#[tonic::async_trait]
impl Pods for FakePods {
    async fn spawn(&self, dir: &Path, spec: &PodSpec, admit: Admit) -> Result<PodClient, ClientError> {
        spec.write(dir)?;
        self.kernels.lock().unwrap().push((spec.kernel.clone(), std::fs::read(&spec.kernel).ok()));
        if let Err(step) = self.script.step("spawn").await {
            return Err(ClientError::Rejected {
                kind: nacelle_base::FailureKind::Internal,
                message: format!("scripted {step}"),
            });
        }
        self.start(dir, spec, admit).await?;
        client::connect(dir).await
    }

    async fn build_template(&self, _dir: &Path, _spec: &TemplateSpec, _limit: Duration) -> Result<(), ClientError> {
        Err(ClientError::NotRunning { dir: PathBuf::new() })
    }

    async fn confine(&self, dir: &Path, processors: BTreeSet<u32>, pinned: Option<u32>) -> Result<(), AffinityError> {
        if self.script.conflicts("confine") {
            return Err(AffinityError::Gone { dir: dir.to_owned() });
        }
        self.confined.lock().unwrap().push(processors);
        self.pinned.lock().unwrap().push(pinned);
        Ok(())
    }

    async fn set_memory_policy(&self, _group: &Path, policy: MemoryPolicy) -> Result<(), ClientError> {
        if self.script.conflicts("set memory policy") {
            return Err(ClientError::NotRunning { dir: PathBuf::new() });
        }
        self.memory_policies.lock().unwrap().push(policy);
        Ok(())
    }

    async fn clean_up(&self, dir: &Path, stored: Option<&PodProcess>) -> Result<Option<SavedPodState>, ClientError> {
        if let Err(step) = self.script.step("clean up").await {
            return Err(ClientError::Rejected {
                kind: nacelle_base::FailureKind::Internal,
                message: format!("scripted {step}"),
            });
        }
        self.kill(dir);
        client::clean_up(dir, stored).await
    }
}

/// One pod process.
pub struct FakePod {
    script: Arc<Script>,
    dir: PathBuf,
    pid: i32,
    /// Its specification.
    pub spec: PodSpec,
    pub record: Mutex<SavedPodState>,
    changes: watch::Sender<proto::PodState>,
    /// Its reply to Hello; `None` if it does not implement that.
    pub hello: Mutex<Option<proto::HelloResponse>>,
    /// The creation requests that it got.
    pub made: Mutex<Vec<proto::CreateContainerRequest>>,
    /// The update requests that it got.
    pub updates: Mutex<Vec<common::UpdateContainerRequest>>,
    /// The numbers of vCPUs that were requested.
    pub processors: Mutex<Vec<u32>>,
    /// The amounts of hot-plugged memory that were requested, in MiB.
    pub memory: Mutex<Vec<u64>>,
    pub configured: Mutex<Option<proto::ConfigureRequest>>,
    pub exec: Mutex<Option<Result<proto::ExecSyncResponse, Status>>>,
    /// The statistics of its containers; `None`: the request hangs.
    pub stats: Mutex<Option<proto::StatsResponse>>,
    pub checkpoints: FakeCheckpoints,
}

fn now() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    i64::try_from(since.as_nanos()).unwrap()
}

impl FakePod {
    fn new(script: Arc<Script>, dir: &Path, spec: &PodSpec, pid: i32) -> FakePod {
        let record = SavedPodState::new(spec.id.clone());
        record.write(dir).unwrap();
        let (changes, _) = watch::channel(proto::PodState::from(&record));
        FakePod {
            script,
            dir: dir.to_owned(),
            pid,
            spec: spec.clone(),
            record: Mutex::new(record),
            changes,
            hello: Mutex::new(Some(nacelle_pod::protocol::hello())),
            made: Mutex::default(),
            updates: Mutex::default(),
            processors: Mutex::default(),
            memory: Mutex::default(),
            configured: Mutex::default(),
            exec: Mutex::default(),
            stats: Mutex::new(Some(proto::StatsResponse::default())),
            checkpoints: FakeCheckpoints::new(spec),
        }
    }

    /// Changes the pod, records it and notifies the watchers.
    pub fn change(&self, change: impl FnOnce(&mut SavedPodState)) {
        let mut record = self.record.lock().unwrap();
        change(&mut record);
        // The directory may be gone: the process lives a little longer than its pod.
        let _ = record.write(&self.dir);
        self.changes.send_replace(proto::PodState::from(&*record));
    }

    /// Sends the watchers a state that was never recorded.
    pub fn lie(&self, state: proto::PodState) {
        self.changes.send_replace(state);
    }

    pub fn exit(&self, id: &str, code: u32) {
        self.change(|record| {
            let container = record.containers.iter_mut().find(|c| c.id == id).expect("the container is there");
            container.phase = ContainerPhase::Exited;
            container.exit_code = code;
            container.finished_at = now();
        });
    }

    pub(super) async fn step(&self, name: &'static str) -> Result<(), Status> {
        if self.script.conflicts(name) {
            return Err(Status::failed_precondition(format!("{name} is not possible now")));
        }
        self.script.step(name).await.map_err(|name| Status::internal(format!("scripted {name}")))
    }
}

struct Service(Arc<FakePod>);

#[tonic::async_trait]
impl proto::pod_server::Pod for Service {
    async fn hello(&self, _: Request<common::Empty>) -> Answer<proto::HelloResponse> {
        let hello = self.0.hello.lock().unwrap().clone();
        hello.map(Response::new).ok_or_else(|| Status::unimplemented(""))
    }

    async fn configure(&self, request: Request<proto::ConfigureRequest>) -> Answer<proto::ConfigureResponse> {
        self.0.step("configure").await?;
        *self.0.configured.lock().unwrap() = Some(request.into_inner());
        self.0.change(|record| record.phase = Phase::Ready);
        Ok(Response::new(proto::ConfigureResponse {
            kernel_release: "6.12-fake".into(),
            agent_version: "1".into(),
            steps: vec![],
            from_template: false,
        }))
    }

    async fn state(&self, _: Request<common::Empty>) -> Answer<proto::PodState> {
        Ok(Response::new(self.0.changes.borrow().clone()))
    }

    type WatchStream = std::pin::Pin<Box<dyn Stream<Item = Result<proto::PodState, Status>> + Send>>;

    async fn watch(&self, _: Request<common::Empty>) -> Answer<Self::WatchStream> {
        Ok(Response::new(Box::pin(WatchStream::new(self.0.changes.subscribe()).map(Ok))))
    }

    async fn create_container(
        &self,
        request: Request<proto::CreateContainerRequest>,
    ) -> Answer<common::CreateContainerResponse> {
        let request = request.into_inner();
        self.0.made.lock().unwrap().push(request.clone());
        self.0.step("create").await?;
        self.0.change(|record| {
            record.containers.push(SavedContainerState {
                id: request.id.clone(),
                phase: ContainerPhase::Created,
                created_at: now(),
                started_at: 0,
                finished_at: 0,
                exit_code: 0,
                oom_killed: false,
                message: String::new(),
                uid: 0,
                gid: 0,
                supplemental_groups: vec![],
            });
        });
        Ok(Response::new(common::CreateContainerResponse { uid: 7, gid: 8, supplemental_groups: vec![9] }))
    }

    async fn start_container(&self, request: Request<common::ContainerRef>) -> Answer<common::Empty> {
        self.0.step("start").await?;
        let id = request.into_inner().id;
        self.0.change(|record| {
            for container in record.containers.iter_mut().filter(|c| c.id == id) {
                container.phase = ContainerPhase::Running;
                container.started_at = now();
            }
        });
        Ok(Response::new(common::Empty {}))
    }

    async fn stop_container(&self, request: Request<proto::StopContainerRequest>) -> Answer<common::Empty> {
        self.0.step("stop").await?;
        let id = request.into_inner().id;
        let running = |c: &SavedContainerState| c.id == id && c.phase == ContainerPhase::Running;
        if self.0.record.lock().unwrap().containers.iter().any(running) {
            self.0.exit(&id, 137);
        }
        Ok(Response::new(common::Empty {}))
    }

    async fn remove_container(&self, request: Request<common::ContainerRef>) -> Answer<common::Empty> {
        self.0.step("remove").await?;
        let id = request.into_inner().id;
        self.0.change(|record| record.containers.retain(|container| container.id != id));
        Ok(Response::new(common::Empty {}))
    }

    async fn update_container(&self, request: Request<common::UpdateContainerRequest>) -> Answer<common::Empty> {
        self.0.step("update").await?;
        self.0.updates.lock().unwrap().push(request.into_inner());
        Ok(Response::new(common::Empty {}))
    }

    async fn set_processors(&self, request: Request<common::SetProcessorsRequest>) -> Answer<common::Empty> {
        self.0.step("processors").await?;
        self.0.processors.lock().unwrap().push(request.into_inner().count);
        Ok(Response::new(common::Empty {}))
    }

    async fn set_memory(&self, request: Request<proto::SetMemoryRequest>) -> Answer<common::SetMemoryResponse> {
        self.0.step("memory").await?;
        let bytes = request.into_inner().bytes;
        self.0.memory.lock().unwrap().push(bytes >> 20);
        Ok(Response::new(common::SetMemoryResponse { bytes }))
    }

    async fn exec_sync(&self, _: Request<proto::ExecSyncRequest>) -> Answer<proto::ExecSyncResponse> {
        self.0.step("exec").await?;
        match self.0.exec.lock().unwrap().take() {
            Some(answer) => answer.map(Response::new),
            None => Ok(Response::new(proto::ExecSyncResponse { stdout: b"out".into(), stderr: vec![], exit_code: 3 })),
        }
    }

    type ExecStream = tokio_stream::Empty<Result<proto::ExecEvent, Status>>;

    async fn exec(&self, _: Request<proto::ExecRequest>) -> Answer<Self::ExecStream> {
        Err(Status::unavailable("these pods have no streams"))
    }

    type StartGuestShellStream = tokio_stream::Empty<Result<proto::ExecEvent, Status>>;

    async fn start_guest_shell(&self, _: Request<proto::ExecRequest>) -> Answer<Self::StartGuestShellStream> {
        Err(Status::unavailable("these pods have no streams"))
    }

    async fn resize(&self, _: Request<common::ResizeRequest>) -> Answer<common::Empty> {
        Err(Status::unavailable("these pods have no terminals"))
    }

    async fn stats(&self, _: Request<common::Empty>) -> Answer<proto::StatsResponse> {
        let stats = self.0.stats.lock().unwrap().clone();
        match stats {
            Some(stats) => Ok(Response::new(stats)),
            None => std::future::pending().await,
        }
    }

    async fn checkpoint(&self, request: Request<proto::CheckpointRequest>) -> Answer<proto::CheckpointResponse> {
        let (pod, request) = (Arc::clone(&self.0), request.into_inner());
        // A daemon that disconnects does not end it: the end of the offer does.
        let saved = tokio::spawn(async move { pod.checkpoints.save(&pod, request).await });
        saved.await.unwrap().map(Response::new)
    }

    async fn stop(&self, _: Request<proto::StopRequest>) -> Answer<common::Empty> {
        self.0.step("pod stop").await?;
        self.0.change(|record| {
            for container in record.containers.iter_mut().filter(|c| c.phase != ContainerPhase::Exited) {
                container.phase = ContainerPhase::Exited;
                container.exit_code = 137;
                container.finished_at = now();
            }
            record.phase = Phase::Stopped;
        });
        // The child has not been waited for yet, so its process id is not reused.
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.0.pid), nix::sys::signal::Signal::SIGKILL).unwrap();
        Ok(Response::new(common::Empty {}))
    }
}
