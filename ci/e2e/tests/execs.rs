//! Runs many commands and container starts at once in one pod and allows no error: `NACELLE_TEST_EXECS` commands (200 without
//! it) by `NACELLE_TEST_CLIENTS` clients (8 without it). Each client replaces its container after every 50 commands.
//!
//! `NACELLE_TEST_EXECS=100000 NACELLE_TEST_ENGINE=host cargo test -p nacelle-e2e --test execs -- --nocapture` is the long run.

use nacelle_e2e::run::LIMIT;
use nacelle_e2e::{Image, Node, Options};
use nacelle_proto::cri;
use nacelle_proto::cri::runtime_service_client::RuntimeServiceClient;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use tonic::transport::Channel;

/// Commands that a client runs in one container.
const PER_CONTAINER: u64 = 50;

/// The value of an environment variable that is a number.
fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{variable} is no number")))
}

/// One client: it has a container at a time, in the pod that all clients share.
struct Client {
    cri: RuntimeServiceClient<Channel>,
    number: u64,
    pod: String,
    config: cri::PodSandboxConfig,
    image: String,
    /// Commands that are still to be run by any client.
    left: Arc<AtomicU64>,
    errors: Vec<String>,
    execs: u64,
    starts: u64,
}

impl Client {
    async fn start(&mut self) -> Result<String, tonic::Status> {
        self.starts += 1;
        let name = format!("client{}-{}", self.number, self.starts);
        let container = cri::ContainerConfig {
            metadata: Some(cri::ContainerMetadata { name: name.clone(), attempt: 0 }),
            image: Some(cri::ImageSpec { image: self.image.clone(), ..Default::default() }),
            command: ["sleep", "86400"].map(str::to_owned).to_vec(),
            log_path: format!("{name}.log"),
            ..Default::default()
        };
        let create = cri::CreateContainerRequest {
            pod_sandbox_id: self.pod.clone(),
            config: Some(container),
            sandbox_config: Some(self.config.clone()),
        };
        let container_id = self.cri.create_container(create).await?.into_inner().container_id;
        self.cri.start_container(cri::StartContainerRequest { container_id: container_id.clone() }).await?;
        Ok(container_id)
    }

    async fn exec(&mut self, container_id: &str, number: u64) -> Result<(), tonic::Status> {
        let cmd = ["echo".to_owned(), number.to_string()].to_vec();
        let request = cri::ExecSyncRequest { container_id: container_id.to_owned(), cmd, timeout: 600 };
        let answer = self.cri.exec_sync(request).await?.into_inner();
        let stdout = String::from_utf8_lossy(&answer.stdout).into_owned();
        if answer.exit_code != 0 || stdout != format!("{number}\n") {
            let stderr = String::from_utf8_lossy(&answer.stderr).into_owned();
            return Err(tonic::Status::unknown(format!("exit code {}: {stdout:?} {stderr:?}", answer.exit_code)));
        }
        Ok(())
    }

    fn note(&mut self, what: &str, error: &tonic::Status) {
        let text = format!("{what} by client {}: {:?}: {}", self.number, error.code(), error.message());
        println!("{text}");
        self.errors.push(text);
    }

    /// Takes a command off the number that is left.
    fn take(&self) -> Option<u64> {
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).ok()
    }

    async fn run(mut self) -> Client {
        let mut number = self.take();
        while number.is_some() {
            let container_id = match self.start().await {
                Ok(container_id) => container_id,
                Err(error) => {
                    self.note("container start", &error);
                    number = self.take();
                    continue;
                }
            };
            for _ in 0..PER_CONTAINER {
                let Some(taken) = number else { break };
                self.execs += 1;
                if let Err(error) = self.exec(&container_id, taken).await {
                    self.note("command", &error);
                }
                number = self.take();
            }
            if let Err(error) = self.cri.remove_container(cri::RemoveContainerRequest { container_id }).await {
                self.note("removal", &error);
            }
        }
        self
    }
}

/// A pod that all clients share: its id and its configuration.
async fn run_pod(node: &Node, name: &str) -> (String, cri::PodSandboxConfig) {
    let config = cri::PodSandboxConfig {
        metadata: Some(cri::PodSandboxMetadata {
            name: name.to_owned(),
            uid: name.to_owned(),
            namespace: "e2e".to_owned(),
            attempt: 0,
        }),
        log_directory: node.folder().join("logs").join(name).display().to_string(),
        ..Default::default()
    };
    let run = cri::RunPodSandboxRequest { config: Some(config.clone()), runtime_handler: String::new() };
    let pod = RuntimeServiceClient::new(node.channel()).run_pod_sandbox(run).await.expect("the pod starts");
    (pod.into_inner().pod_sandbox_id, config)
}

#[test]
fn a_command_whose_caller_goes_away_ends() {
    let node = Node::new();
    let image = node.image(&Image::busybox(), "busybox:1");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let (pod, config) = run_pod(&node, "gone").await;
        let cri = RuntimeServiceClient::new(node.channel());
        let left = Arc::default();
        let mut client = Client { cri, number: 0, pod, config, image, left, errors: Vec::new(), execs: 0, starts: 0 };
        let container_id = client.start().await.expect("it starts");
        let mut running = JoinSet::new();
        for number in 0..80_u64 {
            let (mut cri, container_id) = (client.cri.clone(), container_id.clone());
            running.spawn(async move {
                let cmd = ["sleep", "4321"].map(str::to_owned).to_vec();
                let asked = cri.exec_sync(cri::ExecSyncRequest { container_id, cmd, timeout: 0 });
                tokio::time::sleep(Duration::from_millis(number * 7)).await;
                // Some are given up before they begin, some while they begin, some when they run.
                let _ = tokio::time::timeout(Duration::from_millis(number * 5 % 200), asked).await;
            });
        }
        running.join_all().await;
        let count = || async {
            let cmd = ["sh", "-c", "ps | grep -c '[s]leep 4321' || true"].map(str::to_owned).to_vec();
            let container_id = container_id.clone();
            let request = cri::ExecSyncRequest { container_id, cmd, timeout: 60 };
            let answer = client.cri.clone().exec_sync(request).await.expect("ps runs").into_inner();
            String::from_utf8_lossy(&answer.stdout).trim().to_owned()
        };
        let start = Instant::now();
        let mut left = count().await;
        while left != "0" {
            assert!(start.elapsed() < LIMIT, "{left} commands run that no caller knows");
            tokio::time::sleep(Duration::from_millis(200)).await;
            left = count().await;
        }
        let pod_sandbox_id = client.pod.clone();
        client.cri.remove_pod_sandbox(cri::RemovePodSandboxRequest { pod_sandbox_id }).await.expect("it is removed");
    });
}

#[test]
fn no_command_and_no_container_start_fails() {
    let (execs, clients) = (number("NACELLE_TEST_EXECS", 200), number("NACELLE_TEST_CLIENTS", 8));
    let extra = "[sandbox]\nboot_seconds = 900\nanswer_seconds = 600\n".to_owned();
    let node = Node::with(Options { ipv6: false, extra, ..Options::default() });
    let image = node.image(&Image::busybox(), "busybox:1");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let (done, took) = runtime.block_on(async {
        let (pod, config) = run_pod(&node, "execs").await;
        let mut cri = RuntimeServiceClient::new(node.channel());
        let (start, left) = (Instant::now(), Arc::new(AtomicU64::new(execs)));
        let mut running = JoinSet::new();
        for number in 0..clients {
            let client = Client {
                cri: RuntimeServiceClient::new(node.channel()),
                number,
                pod: pod.clone(),
                config: config.clone(),
                image: image.clone(),
                left: Arc::clone(&left),
                errors: Vec::new(),
                execs: 0,
                starts: 0,
            };
            running.spawn(client.run());
        }
        let done = running.join_all().await;
        let took = start.elapsed();
        cri.remove_pod_sandbox(cri::RemovePodSandboxRequest { pod_sandbox_id: pod }).await.expect("it is removed");
        (done, took)
    });
    let sum = |count: fn(&Client) -> u64| done.iter().map(count).sum::<u64>();
    let (ran, starts) = (sum(|client| client.execs), sum(|client| client.starts));
    let errors: Vec<&String> = done.iter().flat_map(|client| &client.errors).collect();
    let rate = ran as f64 / took.as_secs_f64();
    println!(
        "{}: {ran} commands and {starts} container starts by {clients} clients in {:.0} s ({rate:.1} commands/s), {} errors",
        nacelle_e2e::node::engine(),
        took.as_secs_f64(),
        errors.len()
    );
    assert!(errors.is_empty(), "{errors:#?}");
    assert_eq!(ran, execs);
}
