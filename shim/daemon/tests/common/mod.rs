//! Simulates a node without VMs: the real daemon, with its real stores and its real client of pod processes, on scripted pod
//! processes and networks. Each step that the daemon takes on this node is counted, and can be made to fail or to hang. The
//! simulation has a runtime of its own, so that a test can kill a daemon by dropping the daemon's runtime.

#![allow(dead_code, reason = "each test file uses a part of it")]

pub mod checkpoints;
pub mod image;
pub mod pods;
pub mod saved;

use nacelle_base::PodId;
use nacelle_base::machine::{EngineKind, MemoryPages};
use nacelle_base::net::{Interface, PodNetwork};
use nacelle_daemon::config::{Config, Handler, TemplateScope};
use nacelle_daemon::lifecycle::services::Networks;
use nacelle_daemon::lifecycle::{EngineChoice, Events};
use nacelle_daemon::metrics::address::MetricsAddress;
use nacelle_daemon::server::{self, DaemonSetup};
use nacelle_daemon::supervision::Supervisor;
use nacelle_net::{Attachment, CniError, KnownPods, NetError, PodRef};
use nacelle_pod::spec::Accelerator;
use nacelle_proto::cri;
use nacelle_proto::cri::image_service_client::ImageServiceClient;
use nacelle_proto::cri::runtime_service_client::RuntimeServiceClient;
use nacelle_proto::node::node_client::NodeClient;
use nacelle_proto::vm::machines_client::MachinesClient;
use nacelle_store::CommitObserver;
use pods::FakePods;
use std::collections::BTreeSet;
use std::future::Future;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::runtime::Runtime;
use tonic::Status;
use tonic::transport::Channel;

/// Time limit of every wait, generous for slow and busy machines.
pub const LIMIT: Duration = Duration::from_secs(60);

/// A handler whose VMs need more huge pages than any node has.
pub const HUGE_HANDLER: &str = "huge";

/// A handler whose pods may set the resources of their VMs.
pub const SHAPE_HANDLER: &str = "shaped";

/// Counts steps, and lets selected ones fail or hang.
#[derive(Default)]
pub struct Script {
    count: AtomicUsize,
    names: Mutex<Vec<&'static str>>,
    fail: Mutex<BTreeSet<usize>>,
    fail_named: Mutex<Vec<(&'static str, usize)>>,
    conflict: Mutex<Option<(&'static str, usize)>>,
    hang: Mutex<Option<&'static str>>,
    released: tokio::sync::Notify,
}

impl Script {
    /// Runs one step, which fails or hangs if the script says so.
    pub async fn step(&self, name: &'static str) -> Result<(), &'static str> {
        let number = self.count.fetch_add(1, Ordering::SeqCst) + 1;
        self.names.lock().unwrap().push(name);
        while *self.hang.lock().unwrap() == Some(name) {
            self.released.notified().await;
        }
        let named = {
            let mut named = self.fail_named.lock().unwrap();
            match named.iter_mut().find(|(which, left)| *which == name && *left > 0) {
                Some((_, left)) => {
                    *left -= 1;
                    true
                }
                None => false,
            }
        };
        if named || self.fail.lock().unwrap().contains(&number) {
            return Err(name);
        }
        Ok(())
    }

    /// Restarts the count at one, and lets only the step with this number fail.
    pub fn fail_at(&self, number: usize) {
        self.count.store(0, Ordering::SeqCst);
        *self.fail.lock().unwrap() = BTreeSet::from([number]);
    }

    /// Lets the next `times` steps of this name fail.
    pub fn fail_named(&self, name: &'static str, times: usize) {
        *self.fail_named.lock().unwrap() = vec![(name, times)];
    }

    /// Lets the next step of each of these names fail.
    pub fn fail_once_each(&self, names: &[&'static str]) {
        *self.fail_named.lock().unwrap() = names.iter().map(|name| (*name, 1)).collect();
    }

    /// Rejects the next `times` requests of this name with a conflict.
    pub fn conflict(&self, name: &'static str, times: usize) {
        *self.conflict.lock().unwrap() = Some((name, times));
    }

    /// Returns whether a request of this name is to be rejected with a conflict.
    pub fn conflicts(&self, name: &'static str) -> bool {
        match self.conflict.lock().unwrap().as_mut() {
            Some((which, left)) if *which == name && *left > 0 => {
                *left -= 1;
                true
            }
            _ => false,
        }
    }

    pub fn hang_at(&self, name: &'static str) {
        *self.hang.lock().unwrap() = Some(name);
    }

    pub fn release(&self) {
        *self.hang.lock().unwrap() = None;
        self.released.notify_waiters();
    }

    /// Clears all failures; returns the number of steps until now.
    pub fn calm(&self) -> usize {
        self.fail.lock().unwrap().clear();
        self.fail_named.lock().unwrap().clear();
        self.count.load(Ordering::SeqCst)
    }

    /// Returns the names of all steps, in their order.
    pub fn steps(&self) -> Vec<&'static str> {
        self.names.lock().unwrap().clone()
    }

    pub fn seen(&self, name: &'static str) -> bool {
        self.names.lock().unwrap().contains(&name)
    }
}

/// Simulated networks.
pub struct FakeNetworks {
    script: Arc<Script>,
    /// Existing network namespaces.
    pub netns: Mutex<BTreeSet<PodId>>,
    /// Existing attachments.
    pub attached: Mutex<BTreeSet<PodId>>,
}

fn broken(name: &'static str) -> NetError {
    NetError::NoInterface { name: format!("scripted {name}") }
}

#[tonic::async_trait]
impl Networks for FakeNetworks {
    async fn create_netns(&self, id: &PodId) -> Result<PathBuf, NetError> {
        self.script.step("netns").await.map_err(broken)?;
        self.netns.lock().unwrap().insert(id.clone());
        Ok(PathBuf::from("/run/netns/fake"))
    }

    async fn setup(&self, pod: &PodRef) -> Result<Attachment, NetError> {
        // Attached before the step: a plugin that fails may leave something.
        self.attached.lock().unwrap().insert(pod.id.clone());
        self.script.step("setup").await.map_err(broken)?;
        let interface = Interface {
            name: "eth0".into(),
            mac: [2, 0, 0, 0, 0, 1],
            mtu: 1500,
            addresses: vec!["10.1.2.3/24".parse().unwrap(), "fd00::3/64".parse().unwrap()],
            neighbours: vec![],
        };
        let network = PodNetwork { interfaces: vec![interface], routes: vec![] };
        let ips = network.ips().collect();
        Ok(Attachment { network, dns: nacelle_model::network::DnsConfig::default(), ips })
    }

    async fn connect_taps(&self, _: &PodId, pairs: Vec<(String, String)>) -> Result<(), NetError> {
        assert_eq!(pairs, [("nacelle0".to_owned(), "eth0".to_owned())]);
        self.script.step("join").await.map_err(broken)
    }

    async fn release(&self, id: &PodId, _: Duration) -> Result<Option<CniError>, NetError> {
        self.script.step("teardown").await.map_err(broken)?;
        self.attached.lock().unwrap().remove(id);
        self.netns.lock().unwrap().remove(id);
        Ok(None)
    }

    async fn retry_owed_deletes(&self, _: Duration) {}

    async fn status(&self) -> Result<(), NetError> {
        self.script.step("status").await.map_err(broken)
    }

    async fn gc(&self, known: &KnownPods<'_>, _: Duration) -> Result<(), NetError> {
        let keep = known();
        self.attached.lock().unwrap().retain(|id| keep.contains(id));
        self.netns.lock().unwrap().retain(|id| keep.contains(id));
        Ok(())
    }
}

/// The simulated node.
pub struct World {
    pub root: tempfile::TempDir,
    pub script: Arc<Script>,
    pub pods: Arc<FakePods>,
    pub networks: Arc<FakeNetworks>,
    runtime: Runtime,
    /// `jail.user_count` of its daemons.
    pub user_count: u32,
    /// `network.gc_interval` of its daemons.
    pub gc_interval: Duration,
    /// The engine of handlers that name none.
    pub fitting: EngineKind,
    /// `metrics.address` of its daemons.
    pub metrics: Option<MetricsAddress>,
}

/// A daemon on the node.
pub struct Daemon {
    pub runtime: Option<Runtime>,
    pub cri: RuntimeServiceClient<Channel>,
    pub images: ImageServiceClient<Channel>,
}

async fn connect(socket: PathBuf) -> Channel {
    loop {
        let path = socket.clone();
        let connector = tower::service_fn(move |_: tonic::transport::Uri| {
            let path = path.clone();
            async move {
                let stream = tokio::net::UnixStream::connect(path).await?;
                Ok::<_, std::io::Error>(hyper_util::rt::TokioIo::new(stream))
            }
        });
        let endpoint = tonic::transport::Endpoint::from_static("http://nacelle");
        match endpoint.connect_with_connector(connector).await {
            Ok(channel) => break channel,
            Err(_not_yet) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    }
}

impl World {
    /// Creates a node with an image and no daemon.
    pub fn new() -> World {
        let root = tempfile::tempdir().unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let script = Arc::new(Script::default());
        let pods = Arc::new(FakePods::new(Arc::clone(&script)));
        let networks =
            Arc::new(FakeNetworks { script: Arc::clone(&script), netns: Mutex::default(), attached: Mutex::default() });
        let Config { jail, network, .. } = Config::default();
        let (user_count, gc_interval) = (jail.user_count, network.gc_interval);
        let fitting = EngineKind::Qemu;
        let world = World { root, script, pods, networks, runtime, user_count, gc_interval, fitting, metrics: None };
        image::load(&world);
        world
    }

    pub fn config(&self) -> Config {
        let mut config = Config::default();
        config.paths.root = self.root.path().join("root");
        config.paths.run = self.root.path().join("run");
        config.paths.socket = self.root.path().join("s.sock");
        config.network.netns_dir = self.root.path().join("netns");
        config.default_handler = "small".into();
        // They are in a file system of their own, which would stay mounted.
        config.sandbox.templates = TemplateScope::Off;
        config.jail.user_count = self.user_count;
        config.network.gc_interval = self.gc_interval;
        config.metrics.address.clone_from(&self.metrics);
        let allowed_annotations = vec!["vm.nacelle.dev/cpus".into(), "vm.nacelle.dev/from-checkpoint".into()];
        let handler = Handler { allowed_annotations, max_vcpus: Some(4), ..Handler::default() };
        let huge = Handler { memory_pages: MemoryPages::Hugetlb, memory_mib: 16 << 20, ..Handler::default() };
        let names = ["kernel-image", "kernel", "initrd", "cpus", "cpu-pinning"];
        let allowed_annotations = names.map(|name| format!("vm.nacelle.dev/{name}")).into();
        let shaped = Handler { allowed_annotations, ..Handler::default() };
        let other = Handler { max_memory_mib: Some(1024), ..handler.clone() };
        let handlers = [("small", handler), ("other", other), (HUGE_HANDLER, huge), (SHAPE_HANDLER, shaped)];
        config.handlers = handlers.map(|(name, handler)| (name.to_owned(), handler)).into();
        config
    }

    pub fn daemon(&self) -> Daemon {
        self.daemon_observed(None)
    }

    pub fn daemon_observed(&self, observer: Option<CommitObserver>) -> Daemon {
        self.start(observer, Events::default())
    }

    pub fn daemon_telling(&self, events: Events) -> Daemon {
        self.start(None, events)
    }

    fn start(&self, observer: Option<CommitObserver>, events: Events) -> Daemon {
        let config = self.config();
        let socket = config.paths.socket.clone();
        let setup = DaemonSetup {
            config,
            engine: EngineChoice {
                fitting: self.fitting,
                agent: "/usr/bin/nacelle-agent".into(),
                keeper: "/usr/bin/nacelle-keeper".into(),
                qemu: "/usr/bin/qemu".into(),
                accelerator: Accelerator::Tcg,
            },
            pods: Arc::clone(&self.pods) as _,
            networks: Arc::clone(&self.networks) as _,
            unpack: env!("CARGO_BIN_EXE_nacelle-unpack").into(),
            pod_program: env!("CARGO_BIN_EXE_nacelle-pod").into(),
            observer,
            events,
        };
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let (serving, served) = tokio::sync::oneshot::channel();
        runtime.spawn(async move {
            let mut supervisor = Supervisor::default();
            let claim = server::claim(&setup.config, &mut supervisor).await.expect("the socket is free");
            let node = server::open(setup).await.expect("the daemon starts");
            let (log, _) = nacelle_daemon::log::LogControl::new(nacelle_daemon::log::LogFilter::default());
            let _ = serving.send(());
            server::serve(node, supervisor, claim, log, std::future::pending()).await.expect("the daemon serves");
        });
        let channel = self.run(async move {
            served.await.expect("the daemon starts");
            connect(socket).await
        });
        let cri = RuntimeServiceClient::new(channel.clone()).max_decoding_message_size(64 << 20);
        Daemon { runtime: Some(runtime), cri, images: ImageServiceClient::new(channel) }
    }

    /// Returns a client of the running daemon's machine service.
    pub fn machines(&self) -> MachinesClient<Channel> {
        MachinesClient::new(self.run(connect(self.config().paths.socket)))
    }

    /// Returns a client of the running daemon's service for the commands of the node.
    pub fn node(&self) -> NodeClient<Channel> {
        NodeClient::new(self.run(connect(self.config().paths.socket)))
    }

    /// Runs a future on the node's runtime, for at most `LIMIT`.
    #[track_caller]
    pub fn run<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime.block_on(async { tokio::time::timeout(LIMIT, work).await }).expect("it takes too long")
    }

    pub fn spawn<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> tokio::task::JoinHandle<T> {
        self.runtime.spawn(work)
    }

    /// Waits until the condition holds.
    #[track_caller]
    pub fn eventually(&self, what: &str, mut so: impl FnMut() -> bool) {
        let deadline = std::time::Instant::now() + LIMIT;
        while !so() {
            assert!(std::time::Instant::now() < deadline, "never: {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Returns what exists on this node: processes, namespaces, attachments and directories.
    pub fn left(&self) -> Vec<String> {
        let mut left: Vec<String> = self.pods.alive().iter().map(|dir| format!("process {}", dir.display())).collect();
        left.extend(self.networks.netns.lock().unwrap().iter().map(|id| format!("netns {id}")));
        left.extend(self.networks.attached.lock().unwrap().iter().map(|id| format!("attachment {id}")));
        let directories = std::fs::read_dir(self.config().paths.pods());
        left.extend(
            directories.into_iter().flatten().map(|entry| format!("directory {}", entry.unwrap().path().display())),
        );
        left
    }
}

impl Drop for World {
    /// A killed daemon may hold the pods for a moment longer than the test runs. Their run directories are file systems of their own,
    /// which would stay.
    fn drop(&mut self) {
        self.pods.kill_all();
        let pods = std::fs::read_dir(self.root.path().join("run/pods")).into_iter().flatten().flatten();
        pods.for_each(|pod| drop(nacelle_pod::run_dir::remove(&pod.path())));
    }
}

impl Daemon {
    /// Kills the daemon like SIGKILL: when this returns, none of its work continues and its socket is closed. Work that blocks has
    /// five seconds to end.
    pub fn kill(mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(5));
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

pub fn pod_config(name: &str) -> cri::PodSandboxConfig {
    cri::PodSandboxConfig {
        metadata: Some(cri::PodSandboxMetadata {
            name: name.into(),
            uid: format!("uid-{name}"),
            namespace: "default".into(),
            attempt: 0,
        }),
        linux: Some(cri::LinuxPodSandboxConfig::default()),
        ..Default::default()
    }
}

pub fn container_config(name: &str) -> cri::ContainerConfig {
    cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: name.into(), attempt: 0 }),
        image: Some(cri::ImageSpec { image: image::NAME.into(), ..Default::default() }),
        command: vec!["/bin/true".into()],
        linux: Some(cri::LinuxContainerConfig::default()),
        ..Default::default()
    }
}

/// Short forms of CRI's RPCs.
impl Daemon {
    pub async fn run_pod(&mut self, name: &str) -> Result<String, Status> {
        let request = cri::RunPodSandboxRequest { config: Some(pod_config(name)), runtime_handler: String::new() };
        Ok(self.cri.run_pod_sandbox(request).await?.into_inner().pod_sandbox_id)
    }

    pub async fn stop_pod(&mut self, id: &str) -> Result<(), Status> {
        let request = cri::StopPodSandboxRequest { pod_sandbox_id: id.into() };
        self.cri.stop_pod_sandbox(request).await.map(drop)
    }

    pub async fn remove_pod(&mut self, id: &str) -> Result<(), Status> {
        let request = cri::RemovePodSandboxRequest { pod_sandbox_id: id.into() };
        self.cri.remove_pod_sandbox(request).await.map(drop)
    }

    pub async fn pods(&mut self) -> Vec<cri::PodSandbox> {
        self.cri.list_pod_sandbox(cri::ListPodSandboxRequest::default()).await.unwrap().into_inner().items
    }

    pub async fn create(&mut self, pod: &str, name: &str) -> Result<String, Status> {
        self.create_from(pod, container_config(name)).await
    }

    /// Creates a container whose user has a name. Only the guest can look it up, so the response comes after the guest has
    /// created the container.
    pub async fn create_named(&mut self, pod: &str, name: &str) -> Result<String, Status> {
        let mut config = container_config(name);
        let linux = config.linux.get_or_insert_default();
        linux.security_context.get_or_insert_default().run_as_username = "app".into();
        self.create_from(pod, config).await
    }

    pub async fn create_from(&mut self, pod: &str, config: cri::ContainerConfig) -> Result<String, Status> {
        let request =
            cri::CreateContainerRequest { pod_sandbox_id: pod.into(), config: Some(config), sandbox_config: None };
        Ok(self.cri.create_container(request).await?.into_inner().container_id)
    }

    pub async fn start(&mut self, id: &str) -> Result<(), Status> {
        self.cri.start_container(cri::StartContainerRequest { container_id: id.into() }).await.map(drop)
    }

    pub async fn stop(&mut self, id: &str) -> Result<(), Status> {
        self.cri.stop_container(cri::StopContainerRequest { container_id: id.into(), timeout: 1 }).await.map(drop)
    }

    pub async fn remove(&mut self, id: &str) -> Result<(), Status> {
        self.cri.remove_container(cri::RemoveContainerRequest { container_id: id.into() }).await.map(drop)
    }

    pub async fn status(&mut self, id: &str) -> Result<cri::ContainerStatus, Status> {
        let request = cri::ContainerStatusRequest { container_id: id.into(), verbose: false };
        Ok(self.cri.container_status(request).await?.into_inner().status.unwrap())
    }

    pub async fn pod_status(&mut self, id: &str) -> Result<cri::PodSandboxStatus, Status> {
        let request = cri::PodSandboxStatusRequest { pod_sandbox_id: id.into(), verbose: true };
        Ok(self.cri.pod_sandbox_status(request).await?.into_inner().status.unwrap())
    }

    pub async fn containers(&mut self) -> Vec<cri::Container> {
        self.cri.list_containers(cri::ListContainersRequest::default()).await.unwrap().into_inner().containers
    }

    pub async fn exec(&mut self, id: &str, cmd: &[&str]) -> Result<cri::ExecSyncResponse, Status> {
        let cmd = cmd.iter().map(|word| (*word).to_owned()).collect();
        let request = cri::ExecSyncRequest { container_id: id.into(), cmd, timeout: 5 };
        Ok(self.cri.exec_sync(request).await?.into_inner())
    }
}
