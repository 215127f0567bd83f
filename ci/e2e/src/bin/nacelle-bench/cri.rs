//! Implements a CRI client, so that the measurement includes no client program.

use nacelle_e2e::collector::traced;
use nacelle_e2e::cri::{container_config, pod_config};
use nacelle_proto::cri;
use nacelle_proto::cri::image_service_client::ImageServiceClient;
use nacelle_proto::cri::runtime_service_client::RuntimeServiceClient;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tonic::transport::Channel;

/// A client of a runtime's socket.
pub struct RuntimeClient {
    runtime: tokio::runtime::Runtime,
    pods: RuntimeServiceClient<Channel>,
    images: ImageServiceClient<Channel>,
    logs: PathBuf,
    /// The parent cgroup of the pods.
    pub cgroup_parent: String,
    /// The flags of the trace of which each request is a part: 1 if the client records it, else 0. `None`: there is no trace.
    pub trace_flags: Option<u8>,
    next: u32,
}

/// A pod and its configuration.
pub struct BenchPod {
    pub id: String,
    config: cri::PodSandboxConfig,
}

impl RuntimeClient {
    /// Connects to `socket`. Log files go below `logs`, whose last component distinguishes this client's pods from those of
    /// others.
    pub fn connect(socket: &Path, logs: &Path) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let path = socket.to_owned();
        let channel = runtime.block_on(async {
            tonic::transport::Endpoint::from_static("http://cri").connect_with_connector_lazy(tower::service_fn(
                move |_| {
                    let path = path.clone();
                    async move { tokio::net::UnixStream::connect(path).await.map(hyper_util::rt::TokioIo::new) }
                },
            ))
        });
        Self {
            runtime,
            pods: RuntimeServiceClient::new(channel.clone()).max_decoding_message_size(64 << 20),
            images: ImageServiceClient::new(channel),
            logs: logs.to_owned(),
            cgroup_parent: String::new(),
            trace_flags: None,
            next: 0,
        }
    }

    /// Returns a request with the client's trace.
    fn request<T>(&mut self, message: T) -> tonic::Request<T> {
        self.next += 1;
        let trace = u128::from(self.next);
        match self.trace_flags {
            Some(flags) => traced(message, trace, flags),
            None => tonic::Request::new(message),
        }
    }

    fn unique_name(&mut self, what: &str) -> String {
        self.next += 1;
        let directory = self.logs.file_name().unwrap_or_default().to_string_lossy();
        format!("{what}-{directory}-{}", self.next)
    }

    /// Calls RunPodSandbox; returns the pod and the duration in milliseconds.
    pub fn run_pod(&mut self) -> (BenchPod, f64) {
        self.run_pod_with("", false)
    }

    /// Like `run_pod`, with a handler, and with `privileged` for privileged containers.
    pub fn run_pod_with(&mut self, handler: &str, privileged: bool) -> (BenchPod, f64) {
        let name = self.unique_name("pod");
        let security = cri::LinuxSandboxSecurityContext { privileged, ..Default::default() };
        let directory = self.logs.join(&name);
        std::fs::create_dir_all(&directory).expect("the bench's directory is writable");
        let config = cri::PodSandboxConfig {
            linux: Some(cri::LinuxPodSandboxConfig {
                security_context: Some(security),
                cgroup_parent: self.cgroup_parent.clone(),
                ..Default::default()
            }),
            ..pod_config("bench", &name, &self.logs)
        };
        let runtime_handler = handler.to_owned();
        let request = self.request(cri::RunPodSandboxRequest { config: Some(config.clone()), runtime_handler });
        let start = Instant::now();
        let answer = self.runtime.block_on(self.pods.run_pod_sandbox(request)).expect("RunPodSandbox");
        (BenchPod { id: answer.into_inner().pod_sandbox_id, config }, milliseconds(start))
    }

    /// Calls UpdatePodSandboxResources with the resources of the pod's containers together; returns the duration in milliseconds.
    pub fn resize(&mut self, pod: &BenchPod, cpus: i64, memory: i64) -> f64 {
        let (cpu_period, cpu_quota) = (100_000, cpus * 100_000);
        let containers =
            cri::LinuxContainerResources { cpu_period, cpu_quota, memory_limit_in_bytes: memory, ..Default::default() };
        let request = cri::UpdatePodSandboxResourcesRequest {
            pod_sandbox_id: pod.id.clone(),
            resources: Some(containers),
            ..Default::default()
        };
        let start = Instant::now();
        self.runtime.block_on(self.pods.update_pod_sandbox_resources(request)).expect("UpdatePodSandboxResources");
        milliseconds(start)
    }

    /// Calls StopPodSandbox and RemovePodSandbox.
    pub fn remove_pod(&mut self, pod: &BenchPod) {
        let stop = self.request(cri::StopPodSandboxRequest { pod_sandbox_id: pod.id.clone() });
        self.runtime.block_on(self.pods.stop_pod_sandbox(stop)).expect("StopPodSandbox");
        let remove = self.request(cri::RemovePodSandboxRequest { pod_sandbox_id: pod.id.clone() });
        self.runtime.block_on(self.pods.remove_pod_sandbox(remove)).expect("RemovePodSandbox");
    }

    /// Calls CreateContainer and StartContainer; returns the id, and the milliseconds until the first byte in the log.
    pub fn start(&mut self, pod: &BenchPod, image: &str, command: &[&str]) -> (String, f64) {
        self.start_with_volumes(pod, image, command, &[], None)
    }

    /// Like `start`, with directories of the node and their paths in the container, or privileged with a device of the node.
    pub fn start_with_volumes(
        &mut self,
        pod: &BenchPod,
        image: &str,
        command: &[&str],
        directories: &[(&Path, &str)],
        device: Option<&str>,
    ) -> (String, f64) {
        let name = self.unique_name("container");
        let log = Path::new(&pod.config.log_directory).join(format!("{name}.log"));
        let security = cri::LinuxContainerSecurityContext { privileged: device.is_some(), ..Default::default() };
        let config = cri::ContainerConfig {
            mounts: directories.iter().map(|(directory, at)| directory_mount(directory, at)).collect(),
            devices: device.into_iter().map(device_request).collect(),
            linux: Some(cri::LinuxContainerConfig { security_context: Some(security), ..Default::default() }),
            ..container_config(&name, image, command)
        };
        let request = self.request(cri::CreateContainerRequest {
            pod_sandbox_id: pod.id.clone(),
            config: Some(config),
            sandbox_config: Some(pod.config.clone()),
        });
        let start = Instant::now();
        let answer = self.runtime.block_on(self.pods.create_container(request)).expect("CreateContainer");
        let id = answer.into_inner().container_id;
        let request = self.request(cri::StartContainerRequest { container_id: id.clone() });
        self.runtime.block_on(self.pods.start_container(request)).expect("StartContainer");
        while std::fs::metadata(&log).map_or(0, |log| log.len()) == 0 {
            std::thread::sleep(Duration::from_micros(200));
            assert!(start.elapsed() < Duration::from_secs(120), "no output in {}", log.display());
        }
        (id, milliseconds(start))
    }

    /// Calls ExecSync; returns the duration in milliseconds.
    pub fn exec(&mut self, container: &str, command: &[&str]) -> f64 {
        let start = Instant::now();
        self.exec_output(container, command);
        milliseconds(start)
    }

    /// Calls ExecSync; returns the output.
    pub fn exec_output(&mut self, container: &str, command: &[&str]) -> String {
        let request = self.request(cri::ExecSyncRequest {
            container_id: container.to_owned(),
            cmd: command.iter().map(|word| (*word).to_owned()).collect(),
            timeout: 600,
        });
        let answer = self.runtime.block_on(self.pods.exec_sync(request)).expect("ExecSync").into_inner();
        assert_eq!(answer.exit_code, 0, "{}", String::from_utf8_lossy(&answer.stderr));
        String::from_utf8_lossy(&answer.stdout).into_owned()
    }

    /// Returns the statistics in a verbose PodSandboxStatus.
    pub fn accounts(&mut self, pod: &BenchPod) -> serde_json::Value {
        self.info(pod, "accounts")
    }

    /// Returns the steps of a pod's start, of Nacelle, and their milliseconds; those with one name together.
    pub fn start_steps(&mut self, pod: &BenchPod) -> BTreeMap<String, f64> {
        let mut durations = BTreeMap::new();
        for step in self.info(pod, "info")["timeline"].as_array().expect("the steps of the start") {
            let name = step["what"].as_str().expect("a name");
            *durations.entry(name.to_owned()).or_default() += step["micros"].as_f64().expect("a duration") / 1000.0;
        }
        durations
    }

    /// Returns a part of a verbose PodSandboxStatus.
    fn info(&mut self, pod: &BenchPod, part: &str) -> serde_json::Value {
        let request = cri::PodSandboxStatusRequest { pod_sandbox_id: pod.id.clone(), verbose: true };
        let answer = self.runtime.block_on(self.pods.pod_sandbox_status(request)).expect("PodSandboxStatus");
        serde_json::from_str(&answer.into_inner().info[part]).expect("JSON")
    }

    /// Returns the memory of PodSandboxStats in bytes; NaN if there is none.
    pub fn memory_usage(&mut self, pod: &BenchPod) -> f64 {
        let request = cri::PodSandboxStatsRequest { pod_sandbox_id: pod.id.clone() };
        let answer = self.runtime.block_on(self.pods.pod_sandbox_stats(request)).expect("PodSandboxStats");
        let memory = answer.into_inner().stats.and_then(|stats| stats.linux?.memory?.usage_bytes);
        memory.map_or(f64::NAN, |bytes| bytes.value as f64)
    }

    /// Calls PullImage; returns the duration in milliseconds.
    pub fn pull(&mut self, image: &str) -> f64 {
        let spec = cri::ImageSpec { image: image.to_owned(), ..Default::default() };
        let request = cri::PullImageRequest { image: Some(spec), ..Default::default() };
        let start = Instant::now();
        self.runtime.block_on(self.images.pull_image(request)).expect("PullImage");
        milliseconds(start)
    }

    /// Calls RemoveImage.
    pub fn remove_image(&mut self, image: &str) {
        let spec = cri::ImageSpec { image: image.to_owned(), ..Default::default() };
        let request = cri::RemoveImageRequest { image: Some(spec) };
        self.runtime.block_on(self.images.remove_image(request)).expect("RemoveImage");
    }
}

fn directory_mount(directory: &Path, at: &str) -> cri::Mount {
    cri::Mount { host_path: directory.display().to_string(), container_path: at.to_owned(), ..Default::default() }
}

fn device_request(path: &str) -> cri::Device {
    cri::Device { container_path: path.to_owned(), host_path: path.to_owned(), permissions: "rwm".into() }
}

/// Returns the milliseconds since `start`.
pub fn milliseconds(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1000.0
}
