//! Runs many commands and container starts concurrently in one pod and allows no error: `NACELLE_TEST_EXECS` commands (200
//! by default) by `NACELLE_TEST_CLIENTS` clients (8 by default). Each client replaces its container after every 50 commands.
//!
//! `NACELLE_TEST_EXECS=100000 NACELLE_TEST_ENGINE=host cargo test -p nacelle-e2e --test execs -- --nocapture` is the long run.

use nacelle_e2e::cri::{container_config, exec};
use nacelle_e2e::run::WAIT_LIMIT;
use nacelle_e2e::{CriClient, CriPod, NodeOptions, TestImage, TestNode};
use nacelle_proto::cri;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// The number of commands that a client runs in one container.
const PER_CONTAINER: u64 = 50;

/// Returns the value of a numeric environment variable.
fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{variable} is no number")))
}

/// A client with one container at a time, in the pod that all clients share.
struct Client {
    cri: CriClient,
    number: u64,
    pod: CriPod,
    image: String,
    /// The number of commands that are still to be run by any client.
    left: Arc<AtomicU64>,
    errors: Vec<String>,
    execs: u64,
    starts: u64,
}

impl Client {
    async fn start(&mut self) -> Result<String, tonic::Status> {
        self.starts += 1;
        let name = format!("client{}-{}", self.number, self.starts);
        let container = container_config(&name, &self.image, &["sleep", "86400"]);
        self.pod.start_container(&mut self.cri, container).await
    }

    async fn exec(&mut self, container_id: &str, number: u64) -> Result<(), tonic::Status> {
        let answer = exec(&mut self.cri, container_id, &["echo", &number.to_string()], 600).await?;
        let stdout = String::from_utf8_lossy(&answer.stdout).into_owned();
        if answer.exit_code != 0 || stdout != format!("{number}\n") {
            let stderr = String::from_utf8_lossy(&answer.stderr).into_owned();
            return Err(tonic::Status::unknown(format!("exit code {}: {stdout:?} {stderr:?}", answer.exit_code)));
        }
        Ok(())
    }

    fn record_error(&mut self, what: &str, error: &tonic::Status) {
        let text = format!("{what} by client {}: {:?}: {}", self.number, error.code(), error.message());
        println!("{text}");
        self.errors.push(text);
    }

    /// Takes one command from the remaining number.
    fn take_number(&self) -> Option<u64> {
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).ok()
    }

    async fn run(mut self) -> Client {
        let mut number = self.take_number();
        while number.is_some() {
            let container_id = match self.start().await {
                Ok(container_id) => container_id,
                Err(error) => {
                    self.record_error("container start", &error);
                    number = self.take_number();
                    continue;
                }
            };
            for _ in 0..PER_CONTAINER {
                let Some(taken) = number else { break };
                self.execs += 1;
                if let Err(error) = self.exec(&container_id, taken).await {
                    self.record_error("command", &error);
                }
                number = self.take_number();
            }
            if let Err(error) = self.cri.remove_container(cri::RemoveContainerRequest { container_id }).await {
                self.record_error("removal", &error);
            }
        }
        self
    }
}

#[test]
fn a_command_ends_when_its_caller_disconnects() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let mut cri = CriClient::new(node.channel());
        let pod = CriPod::run(&mut cri, "gone", &node.directory().join("logs")).await.expect("the pod starts");
        let left = Arc::default();
        let mut client = Client { cri, number: 0, pod, image, left, errors: Vec::new(), execs: 0, starts: 0 };
        let container_id = client.start().await.expect("it starts");
        let mut running = JoinSet::new();
        for number in 0..80_u64 {
            let (mut cri, container_id) = (client.cri.clone(), container_id.clone());
            running.spawn(async move {
                let requested = exec(&mut cri, &container_id, &["sleep", "4321"], 0);
                tokio::time::sleep(Duration::from_millis(number * 7)).await;
                // Some are cancelled before they start, some while they start, some while they run.
                let _ = tokio::time::timeout(Duration::from_millis(number * 5 % 200), requested).await;
            });
        }
        running.join_all().await;
        let count = || async {
            let count = ["sh", "-c", "ps | grep -c '[s]leep 4321' || true"];
            let answer = exec(&mut client.cri.clone(), &container_id, &count, 60).await.expect("ps runs");
            String::from_utf8_lossy(&answer.stdout).trim().to_owned()
        };
        let start = Instant::now();
        let mut left = count().await;
        while left != "0" {
            assert!(start.elapsed() < WAIT_LIMIT, "{left} commands run that no caller knows");
            tokio::time::sleep(Duration::from_millis(200)).await;
            left = count().await;
        }
        let pod_sandbox_id = client.pod.id.clone();
        client.cri.remove_pod_sandbox(cri::RemovePodSandboxRequest { pod_sandbox_id }).await.expect("it is removed");
    });
}

#[test]
fn no_command_and_no_container_start_fails() {
    let (execs, clients) = (number("NACELLE_TEST_EXECS", 200), number("NACELLE_TEST_CLIENTS", 8));
    let extra = "[sandbox]\nboot_timeout = \"15m\"\npod_request_timeout = \"10m\"\n".to_owned();
    let node = TestNode::with_options(NodeOptions { ipv6: false, extra, ..NodeOptions::default() });
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let (done, took) = runtime.block_on(async {
        let mut cri = CriClient::new(node.channel());
        let pod = CriPod::run(&mut cri, "execs", &node.directory().join("logs")).await.expect("the pod starts");
        let (start, left) = (Instant::now(), Arc::new(AtomicU64::new(execs)));
        let mut running = JoinSet::new();
        for number in 0..clients {
            let client = Client {
                cri: CriClient::new(node.channel()),
                number,
                pod: pod.clone(),
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
        cri.remove_pod_sandbox(cri::RemovePodSandboxRequest { pod_sandbox_id: pod.id }).await.expect("it is removed");
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
