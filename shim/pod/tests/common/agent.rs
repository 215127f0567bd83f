//! Implements an agent for guests of the fake engine. A container's "OCI specification" is a script of words separated by
//! ';': `out:TEXT`, `err:TEXT`, `big:BYTES`, `cat` (copies its input to its output), `exit:CODE`, `hold` (until a signal),
//! `stubborn` (until SIGKILL).

use nacelle_engine::ExitKind;
use nacelle_engine::fake::GuestHandle;
use nacelle_proto::{agent as proto, common};
use prost::Message;
use proto::agent_server::{Agent, AgentServer};
use std::collections::{BTreeMap, HashMap};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use tokio::sync::watch;
use tonic::{Code, Request, Response, Status};

/// The failure of one request.
#[derive(Clone, Debug)]
pub enum RpcFault {
    /// The agent never replies.
    Hang,
    /// The agent replies late.
    Wait(std::time::Duration),
    /// The VM dies.
    Die,
    /// The agent replies with an error.
    Refuse(Code, String),
}

/// The failure of the handshake.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum BootFault {
    /// The handshake succeeds.
    #[default]
    Success,
    /// The agent never connects.
    Silent,
    /// The agent sends these bytes as its hello.
    Hello(Vec<u8>),
    /// The agent reports this error.
    Report(String),
    /// The agent sends these bytes as its report.
    RawReport(Vec<u8>),
    /// The VM dies instead of a hello.
    Die,
}

type ProcessStreams = HashMap<i32, Arc<UnixStream>>;

struct Process {
    script: String,
    started: bool,
    exit: watch::Sender<Option<proto::Exit>>,
    signals: watch::Sender<u32>,
    streams: ProcessStreams,
}

/// The state that agent and tests share.
#[derive(Default)]
pub struct FakeAgent {
    pub boot: Mutex<BootFault>,
    pub faults: Mutex<BTreeMap<&'static str, RpcFault>>,
    pub calls: Mutex<Vec<String>>,
    pub config: Mutex<Option<proto::BootConfig>>,
    pub images: Mutex<BTreeMap<u32, (u64, u64)>>,
    pub devices: Mutex<BTreeMap<u32, proto::AttachDeviceRequest>>,
    pub volumes: Mutex<Vec<proto::ImageVolume>>,
    pub opened: Mutex<Vec<proto::StreamOpen>>,
    pub stats: Mutex<proto::StatsResponse>,
    /// How far the guest's clock is ahead of the node's, in nanoseconds.
    pub clock_ahead: Mutex<i64>,
    /// The token of the Hold that was not released.
    pub holder: Mutex<Option<Vec<u8>>>,
    /// The end of all copied-in files.
    pub volume_end: Mutex<Vec<u8>>,
    /// The last request to become another pod.
    pub restored: Mutex<Option<proto::RestoreRequest>>,
    processes: Mutex<BTreeMap<(String, String), Process>>,
    guest: Mutex<Option<GuestHandle>>,
}

impl FakeAgent {
    pub fn fault(&self, method: &'static str, fault: RpcFault) {
        self.faults.lock().unwrap().insert(method, fault);
    }

    pub fn calls_of(&self, method: &str) -> usize {
        self.calls.lock().unwrap().iter().filter(|call| call.as_str() == method).count()
    }

    pub fn die(&self) {
        let guest = self.guest.lock().unwrap().clone().unwrap();
        guest.print("Kernel panic - not syncing: on request\n");
        guest.end(ExitKind::Panicked);
    }

    /// Returns the capacity of a disk of the VM in bytes.
    pub fn disk_capacity(&self, disk: usize) -> u64 {
        self.guest.lock().unwrap().as_ref().unwrap().disks[disk].capacity()
    }

    fn add(&self, id: &str, exec_id: &str, script: String) {
        let process = Process {
            script,
            started: false,
            exit: watch::channel(None).0,
            signals: watch::channel(0).0,
            streams: ProcessStreams::new(),
        };
        self.processes.lock().unwrap().insert((id.into(), exec_id.into()), process);
    }

    fn run(self: &Arc<Self>, id: &str, exec_id: &str) {
        let key = (id.to_owned(), exec_id.to_owned());
        let agent = Arc::clone(self);
        std::thread::spawn(move || {
            let (script, mut signals) = {
                let processes = agent.processes.lock().unwrap();
                let process = &processes[&key];
                (process.script.clone(), process.signals.subscribe())
            };
            let stream = |kind: common::Stream| loop {
                // As in the real agent, output waits in a pipe until a client reads.
                let processes = agent.processes.lock().unwrap();
                match processes.get(&key) {
                    None => return None,
                    Some(process) => {
                        if let Some(stream) = process.streams.get(&(kind as i32)) {
                            return Some(Arc::clone(stream));
                        }
                    }
                }
                drop(processes);
                std::thread::sleep(std::time::Duration::from_millis(1));
            };
            let write = |kind, bytes: &[u8]| {
                if let Some(stream) = stream(kind) {
                    let _ = (&*stream).write_all(bytes);
                }
            };
            let mut code = 0;
            for word in script.split(';') {
                let (verb, rest) = word.split_once(':').unwrap_or((word, ""));
                match verb {
                    "out" => write(common::Stream::Stdout, rest.as_bytes()),
                    "err" => write(common::Stream::Stderr, rest.as_bytes()),
                    "big" => write(common::Stream::Stdout, &vec![b'x'; rest.parse().unwrap()]),
                    "cat" => {
                        if let (Some(from), Some(to)) = (stream(common::Stream::Stdin), stream(common::Stream::Stdout))
                        {
                            let _ = std::io::copy(&mut &*from, &mut &*to);
                        }
                    }
                    "exit" => code = rest.parse().unwrap(),
                    "hold" | "stubborn" => {
                        let enough = |signal: &u32| *signal == 9 || (*signal > 0 && verb == "hold");
                        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
                        code = runtime.block_on(async { signals.wait_for(enough).await.map_or(137, |s| 128 + *s) });
                    }
                    _ => {}
                }
            }
            if let Some(process) = agent.processes.lock().unwrap().get_mut(&key) {
                for stream in process.streams.values() {
                    let _ = stream.shutdown(std::net::Shutdown::Both);
                }
                let exit =
                    proto::Exit { code, oom_killed: false, finished_at_unix_nanos: 7, guest_out_of_memory: false };
                process.exit.send_replace(Some(exit));
            }
        });
    }
}

#[derive(Clone)]
struct Service(Arc<FakeAgent>);

impl Service {
    /// Returns how many streams a container has; the caller may poll it.
    fn connected(&self, id: &str) -> Result<usize, Status> {
        let processes = self.0.processes.lock().unwrap();
        let process = processes.get(&(id.to_owned(), String::new()));
        Ok(process.ok_or_else(|| Status::not_found("no such container"))?.streams.len())
    }

    async fn apply_fault(&self, method: &'static str) -> Result<(), Status> {
        self.0.calls.lock().unwrap().push(method.to_owned());
        let fault = self.0.faults.lock().unwrap().get(method).cloned();
        match fault {
            None => Ok(()),
            Some(RpcFault::Hang) => std::future::pending().await,
            Some(RpcFault::Wait(time)) => {
                tokio::time::sleep(time).await;
                Ok(())
            }
            Some(RpcFault::Die) => {
                self.0.die();
                std::future::pending().await
            }
            Some(RpcFault::Refuse(code, message)) => Err(Status::new(code, message)),
        }
    }
}

type RpcResult<T> = Result<Response<T>, Status>;

fn empty() -> RpcResult<common::Empty> {
    Ok(Response::new(common::Empty {}))
}

#[tonic::async_trait]
impl Agent for Service {
    async fn attach_image(&self, request: Request<proto::AttachImageRequest>) -> RpcResult<common::Empty> {
        self.apply_fault("attach").await?;
        let request = request.into_inner();
        if request.offset + request.length > self.0.disk_capacity(0) {
            return Err(Status::failed_precondition("the disk ends before the image"));
        }
        self.0.images.lock().unwrap().insert(request.partition, (request.offset, request.length));
        empty()
    }

    async fn detach_image(&self, request: Request<proto::DetachImageRequest>) -> RpcResult<common::Empty> {
        self.apply_fault("detach").await?;
        self.0.images.lock().unwrap().remove(&request.into_inner().partition);
        empty()
    }

    async fn attach_device(&self, request: Request<proto::AttachDeviceRequest>) -> RpcResult<common::Empty> {
        self.apply_fault("attach device").await?;
        let request = request.into_inner();
        if request.offset + request.length > self.0.disk_capacity(2) {
            return Err(Status::failed_precondition("the disk ends before the device"));
        }
        self.0.devices.lock().unwrap().insert(request.partition, request);
        empty()
    }

    async fn detach_device(&self, request: Request<proto::DetachDeviceRequest>) -> RpcResult<common::Empty> {
        self.apply_fault("detach device").await?;
        self.0.devices.lock().unwrap().remove(&request.into_inner().partition);
        empty()
    }

    async fn create_container(
        &self,
        request: Request<proto::CreateContainerRequest>,
    ) -> RpcResult<common::CreateContainerResponse> {
        self.apply_fault("create").await?;
        let request = request.into_inner();
        for partition in request.volumes.iter().map(|volume| volume.partition).chain([request.partition]) {
            if !self.0.images.lock().unwrap().contains_key(&partition) {
                return Err(Status::failed_precondition("no such image"));
            }
        }
        self.0.volumes.lock().unwrap().extend(request.volumes);
        let response = common::CreateContainerResponse { uid: 1, gid: 2, supplemental_groups: vec![3] };
        if self.0.processes.lock().unwrap().contains_key(&(request.id.clone(), String::new())) {
            return Ok(Response::new(response));
        }
        let spec = String::from_utf8(request.oci_spec).unwrap();
        // A script, or a specification whose hostname is one.
        let script = serde_json::from_str::<serde_json::Value>(&spec).ok();
        let script = script.and_then(|spec| Some(spec.get("hostname")?.as_str()?.to_owned()));
        self.0.add(&request.id, "", script.unwrap_or(spec));
        Ok(Response::new(response))
    }

    async fn start_container(&self, request: Request<common::ContainerRef>) -> RpcResult<common::Empty> {
        self.apply_fault("start").await?;
        let id = request.into_inner().id;
        // Waits for the streams, which the pod process must open before the start; otherwise the test hangs.
        while self.connected(&id)? == 0 {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        let first = {
            let mut processes = self.0.processes.lock().unwrap();
            !std::mem::replace(&mut processes.get_mut(&(id.clone(), String::new())).unwrap().started, true)
        };
        if first {
            self.0.run(&id, "");
        }
        empty()
    }

    async fn signal(&self, request: Request<proto::SignalRequest>) -> RpcResult<common::Empty> {
        let request = request.into_inner();
        self.apply_fault("signal").await?;
        self.0.calls.lock().unwrap().push(format!("signal {}", request.signal));
        if let Some(process) = self.0.processes.lock().unwrap().get(&(request.id, request.exec_id)) {
            process.signals.send_replace(request.signal);
        }
        empty()
    }

    async fn abandon_exec(&self, _: Request<proto::AbandonExecRequest>) -> RpcResult<common::Empty> {
        self.apply_fault("abandon_exec").await?;
        empty()
    }

    async fn wait(&self, request: Request<proto::WaitRequest>) -> RpcResult<proto::WaitResponse> {
        self.apply_fault("wait").await?;
        let request = request.into_inner();
        let exit = self.0.processes.lock().unwrap().get(&(request.id, request.exec_id)).map(|p| p.exit.subscribe());
        let mut exit = exit.ok_or_else(|| Status::not_found("no such process"))?;
        let limit = std::time::Duration::from_millis(request.timeout_ms.into());
        let exit = match tokio::time::timeout(limit, exit.wait_for(Option::is_some)).await {
            Ok(Ok(exit)) => *exit,
            _ => None,
        };
        Ok(Response::new(proto::WaitResponse { exit }))
    }

    async fn write_volume(
        &self,
        request: Request<tonic::Streaming<proto::WriteVolumeRequest>>,
    ) -> RpcResult<common::Empty> {
        self.apply_fault("write_volume").await?;
        let mut parts = request.into_inner();
        while let Some(part) = parts.message().await? {
            if part.complete {
                return empty();
            }
        }
        Err(Status::unavailable("the volume was not sent completely"))
    }

    async fn read_volume(&self, _: Request<proto::ReadVolumeRequest>) -> RpcResult<proto::ReadVolumeResponse> {
        self.apply_fault("read_volume").await?;
        Ok(Response::new(proto::ReadVolumeResponse { end: self.0.volume_end.lock().unwrap().clone() }))
    }

    async fn drop_volume(&self, _: Request<proto::DropVolumeRequest>) -> RpcResult<common::Empty> {
        self.apply_fault("drop").await?;
        empty()
    }

    async fn set_sockets(&self, _: Request<proto::SetSocketsRequest>) -> RpcResult<common::Empty> {
        self.apply_fault("set_sockets").await?;
        empty()
    }

    async fn remove_container(&self, request: Request<common::ContainerRef>) -> RpcResult<common::Empty> {
        self.apply_fault("remove").await?;
        let key = (request.into_inner().id, String::new());
        // The real agent, too, ends the container first, and may fail after that.
        let ended = self.0.processes.lock().unwrap().get(&key).filter(|process| process.started).map(|process| {
            process.signals.send_replace(9);
            process.exit.subscribe()
        });
        if let Some(mut ended) = ended {
            let _ = ended.wait_for(Option::is_some).await;
        }
        self.apply_fault("remove what is left").await?;
        self.0.processes.lock().unwrap().remove(&key);
        empty()
    }

    async fn exec(&self, request: Request<proto::ExecRequest>) -> RpcResult<common::Empty> {
        self.apply_fault("exec").await?;
        let request = request.into_inner();
        let script = request.args.first().cloned().ok_or_else(|| Status::invalid_argument("no command"))?;
        self.0.add(&request.id, &request.exec_id, script);
        self.0.run(&request.id, &request.exec_id);
        empty()
    }

    async fn start_guest_shell(&self, request: Request<proto::ExecRequest>) -> RpcResult<common::Empty> {
        self.apply_fault("start_guest_shell").await?;
        self.exec(request).await
    }

    async fn update_container(&self, request: Request<common::UpdateContainerRequest>) -> RpcResult<common::Empty> {
        let request = request.into_inner();
        match request.limits.first() {
            Some(limit) if limit.file == "refuse.me" => Err(Status::failed_precondition(limit.value.clone())),
            _ if !self.0.processes.lock().unwrap().contains_key(&(request.id, String::new())) => {
                Err(Status::not_found("no such container"))
            }
            _ => empty(),
        }
    }

    async fn set_processors(&self, request: Request<common::SetProcessorsRequest>) -> RpcResult<common::Empty> {
        match request.into_inner().count {
            3 => Err(Status::failed_precondition("processor 2 does not start")),
            _ => empty(),
        }
    }

    async fn set_memory(&self, request: Request<proto::SetMemoryRequest>) -> RpcResult<common::SetMemoryResponse> {
        let proto::SetMemoryRequest { reserve, bytes } = request.into_inner();
        let [proto::MemoryRange { address, bytes: all }] = reserve[..] else { panic!("{reserve:?}") };
        assert_eq!((address, all), (128 << 20, 512 << 20));
        match bytes >> 20 {
            384 => Err(Status::failed_precondition("that memory is in use")),
            // A false reply.
            1 => Ok(Response::new(common::SetMemoryResponse { bytes: 0 })),
            mib => Ok(Response::new(common::SetMemoryResponse { bytes: mib.next_multiple_of(128) << 20 })),
        }
    }

    async fn resize(&self, _: Request<common::ResizeRequest>) -> RpcResult<common::Empty> {
        empty()
    }

    async fn list_containers(&self, _: Request<common::Empty>) -> RpcResult<proto::ListContainersResponse> {
        Ok(Response::new(proto::ListContainersResponse::default()))
    }

    async fn stats(&self, _: Request<common::Empty>) -> RpcResult<proto::StatsResponse> {
        self.apply_fault("stats").await?;
        Ok(Response::new(self.0.stats.lock().unwrap().clone()))
    }

    async fn renew(&self, request: Request<proto::RenewRequest>) -> RpcResult<common::Empty> {
        self.apply_fault("renew").await?;
        let request = request.into_inner();
        assert!(request.generation.len() == 16 && request.entropy.len() >= 32 && request.time_unix_nanos > 0);
        empty()
    }

    async fn sync(&self, _: Request<common::Empty>) -> RpcResult<common::Empty> {
        self.apply_fault("sync").await?;
        empty()
    }

    async fn hold(&self, request: Request<proto::HoldRequest>) -> RpcResult<proto::HoldResponse> {
        // As in the real agent, a Hold that fails or does not return may have frozen the containers.
        *self.0.holder.lock().unwrap() = Some(request.into_inner().token);
        self.apply_fault("hold").await?;
        let processes = self.0.processes.lock().unwrap();
        let runs = |((_, exec_id), process): &(&(String, String), &Process)| {
            exec_id.is_empty() && process.started && process.exit.borrow().is_none()
        };
        let running: Vec<String> = processes.iter().filter(runs).map(|((id, _), _)| id.clone()).collect();
        let foreign = "a container that the pod does not have".to_owned();
        let undrained = running.iter().take(1).cloned().chain([foreign.clone()]).collect();
        let running = running.into_iter().chain([foreign]).collect();
        Ok(Response::new(proto::HoldResponse { running, undrained }))
    }

    async fn release(&self, request: Request<proto::ReleaseRequest>) -> RpcResult<common::Empty> {
        self.apply_fault("release").await?;
        let mut holder = self.0.holder.lock().unwrap();
        assert!(holder.as_ref().is_none_or(|token| *token == request.get_ref().token && token.len() == 16));
        *holder = None;
        empty()
    }

    async fn restore(&self, request: Request<proto::RestoreRequest>) -> RpcResult<proto::RestoreResponse> {
        self.apply_fault("restore").await?;
        let request = request.into_inner();
        for container in &request.containers {
            self.0.add(&container.id, "", "out:continues\n;hold".to_owned());
        }
        *self.0.restored.lock().unwrap() = Some(request);
        let (agent_version, kernel_release) = ("fake".into(), format!("6.12-fake{}", "\n".repeat(1000)));
        Ok(Response::new(proto::RestoreResponse { agent_version, kernel_release }))
    }

    async fn follow_clock(&self, request: Request<proto::FollowClockRequest>) -> RpcResult<proto::ClockReading> {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        let now = i64::try_from(now.as_nanos()).unwrap();
        let mut ahead = self.0.clock_ahead.lock().unwrap();
        // The fake's monotonic clock has the node's time.
        if let Some(reference) = request.into_inner().reference {
            *ahead = reference.unix_nanos - reference.monotonic_nanos;
        }
        Ok(Response::new(proto::ClockReading { monotonic_nanos: now, unix_nanos: now + *ahead }))
    }

    async fn shutdown(&self, _: Request<common::Empty>) -> RpcResult<common::Empty> {
        self.apply_fault("shutdown").await?;
        let guest = self.0.guest.lock().unwrap().clone().unwrap();
        guest.end(ExitKind::Shutdown);
        empty()
    }
}

fn frame(message: &impl Message) -> Vec<u8> {
    let body = message.encode_to_vec();
    [&u32::try_from(body.len()).unwrap().to_le_bytes()[..], &body].concat()
}

fn read_frame<M: Message + Default>(mut stream: &UnixStream) -> Option<M> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).ok()?;
    let mut body = vec![0; u32::from_le_bytes(length) as usize];
    stream.read_exact(&mut body).ok()?;
    M::decode(body.as_slice()).ok()
}

/// Runs the guest: handshake, then the services, until the VM is ended.
pub fn guest(agent: &Arc<FakeAgent>, guest: &GuestHandle) -> ExitKind {
    *agent.guest.lock().unwrap() = Some(guest.clone());
    guest.print("booting\n");
    let boot = agent.boot.lock().unwrap().clone();
    if boot == BootFault::Die {
        guest.print("Kernel panic - not syncing: on request\n");
        return ExitKind::Panicked;
    }
    if boot != BootFault::Silent && handshake(agent, guest, &boot).is_none() {
        // The host closed the connection; it will kill the VM.
    }
    let (Ok(()), Ok(())) = (guest.listen(1026), guest.listen(1025)) else { return ExitKind::Killed };
    {
        let (agent, guest) = (Arc::clone(agent), guest.clone());
        std::thread::spawn(move || serve_streams(&agent, &guest));
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (send, connections) = tokio::sync::mpsc::unbounded_channel::<std::io::Result<tokio::net::UnixStream>>();
    let service = AgentServer::new(Service(Arc::clone(agent)));
    let incoming = tokio_stream::wrappers::UnboundedReceiverStream::new(connections);
    runtime.spawn(nacelle_proto::server::builder().add_service(service).serve_with_incoming(incoming));
    while let Ok(stream) = guest.accept(1025) {
        let _in_runtime = runtime.enter();
        let stream = stream.try_clone().unwrap();
        stream.set_nonblocking(true).unwrap();
        let _ = send.send(tokio::net::UnixStream::from_std(stream));
    }
    runtime.shutdown_background();
    ExitKind::Killed
}

fn handshake(agent: &FakeAgent, guest: &GuestHandle, boot: &BootFault) -> Option<()> {
    // The host listens soon after the VM was started, which may be after the first attempt.
    let stream = loop {
        match guest.connect(1024) {
            Ok(stream) => break stream,
            Err(nacelle_engine::LinkError::Refused { .. }) => {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            Err(_) => return None,
        }
    };
    let (agent_version, kernel_release) = ("fake".into(), "6.12-fake".into());
    let hello = proto::AgentHello { protocol: 1, agent_version, kernel_release, started_nanos: 1, sent_nanos: 2 };
    let hello = match boot {
        BootFault::Hello(bytes) => bytes.clone(),
        _ => frame(&hello),
    };
    (&*stream).write_all(&hello).ok()?;
    let config = read_frame(&stream)?;
    *agent.config.lock().unwrap() = Some(config);
    let report = match boot {
        BootFault::Report(error) => frame(&proto::BootReport { error: error.clone() }),
        BootFault::RawReport(bytes) => bytes.clone(),
        _ => frame(&proto::BootReport::default()),
    };
    (&*stream).write_all(&report).ok()
}

fn serve_streams(agent: &FakeAgent, guest: &GuestHandle) {
    while let Ok(stream) = guest.accept(1026) {
        let Some(open) = read_frame::<proto::StreamOpen>(&stream) else { continue };
        agent.opened.lock().unwrap().push(open.clone());
        if open.stream() == common::Stream::Port {
            // Port 7 echoes; all others refuse the connection.
            let error = if open.port == 7 { String::new() } else { "Connection refused\n(os error 111)".into() };
            let _ = (&*stream).write_all(&frame(&proto::StreamOpened { error }));
            if open.port == 7 {
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut &*stream, &mut &*stream);
                    let _ = stream.shutdown(std::net::Shutdown::Write);
                });
            }
            continue;
        }
        if let Some(process) = agent.processes.lock().unwrap().get_mut(&(open.id, open.exec_id)) {
            if process.exit.borrow().is_some() {
                let _ = stream.shutdown(std::net::Shutdown::Both);
            }
            process.streams.insert(open.stream, stream);
        }
    }
}
