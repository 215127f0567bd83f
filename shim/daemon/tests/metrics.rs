//! Tests the metrics of a daemon on simulated pod processes: what is counted, how the server treats its clients, and that a real
//! Prometheus reads them and raises an alert.

mod common;

use common::World;
use nacelle_daemon::metrics::address::MetricsAddress;
use nacelle_daemon::metrics::family::{FAMILIES, FamilyKind, MetricFamily};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

const DASHBOARD: &str = include_str!("../../../docs/examples/monitoring/dashboard.json");
const ALERTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/examples/monitoring/alerts.yaml");

/// Sends a request and returns the response: its status, its headers and its body.
fn request(address: &MetricsAddress, head: &str) -> (u16, String, String) {
    let mut text = String::new();
    let head = format!("{head}\r\nHost: node\r\nConnection: close\r\n\r\n");
    exchange(connect(address), &head, &mut text);
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    (status, head.to_ascii_lowercase(), body.to_owned())
}

/// A connection.
trait Stream: Read + Write {}
impl<S: Read + Write> Stream for S {}

fn connect(address: &MetricsAddress) -> Box<dyn Stream> {
    match address {
        MetricsAddress::Tcp(address) => Box::new(TcpStream::connect(address).unwrap()),
        MetricsAddress::Unix(path) => Box::new(UnixStream::connect(path).unwrap()),
    }
}

fn exchange(mut stream: impl Read + Write, head: &str, into: &mut String) {
    // A server that refuses a long request may close the connection before all of it is sent.
    let _ = stream.write_all(head.as_bytes());
    let _ = stream.read_to_string(into);
}

/// Returns the samples of a scrape by name with labels.
fn scrape(address: &MetricsAddress) -> BTreeMap<String, f64> {
    let (status, head, body) = request(address, "GET /metrics HTTP/1.1");
    assert_eq!(status, 200, "{head}");
    assert!(head.contains("content-type: application/openmetrics-text; version=1.0.0; charset=utf-8"), "{head}");
    assert!(body.ends_with("# EOF\n"), "{body}");
    let samples = body.lines().filter(|line| !line.starts_with('#')).map(|line| line.rsplit_once(' ').unwrap());
    samples.map(|(name, value)| (name.to_owned(), value.parse().unwrap())).collect()
}

/// Waits until the samples have these values: a scrape may have the text of another one half a second ago.
#[track_caller]
fn expect(world: &World, address: &MetricsAddress, expected: &[(&str, f64)]) {
    let mut differing = Vec::new();
    world.eventually(&format!("{expected:?}"), || {
        let samples = scrape(address);
        differing = expected.iter().filter(|(name, value)| samples.get(*name) != Some(value)).collect();
        differing.is_empty()
    });
}

/// Fails if a sample belongs to no family or has other labels than its family, and returns the families without a sample.
fn families_without_samples(samples: &BTreeMap<String, f64>) -> Vec<&'static str> {
    let mut missing: Vec<&str> = FAMILIES.iter().map(|family| family.name).collect();
    for sample in samples.keys() {
        let (name, labels) = sample.split_once('{').unwrap_or((sample, ""));
        let is_of = |family: &&MetricFamily| match family.kind {
            FamilyKind::Histogram => {
                name.strip_prefix(family.name).is_some_and(|suffix| ["_bucket", "_sum", "_count"].contains(&suffix))
            }
            _ => name == family.name,
        };
        let family = FAMILIES.iter().find(is_of).unwrap_or_else(|| panic!("{sample} is of no family"));
        let found =
            labels.trim_end_matches('}').split(',').filter_map(|label| label.split_once('=')).map(|(name, _)| name);
        let found: Vec<&str> = found.filter(|label| *label != "le").collect();
        assert_eq!(found, family.labels, "{sample}");
        missing.retain(|missing| *missing != family.name);
    }
    missing
}

#[test]
fn the_counts_follow_the_life_of_pods() {
    let mut world = World::new();
    let address = MetricsAddress::Unix(world.root.path().join("metrics.sock"));
    world.metrics = Some(address.clone());
    let mut daemon = world.daemon();
    let mut silent = connect(&address);
    let run = |daemon: &mut common::Daemon, name: &str| world.run(daemon.run_pod(name));

    expect(
        &world,
        &address,
        &[
            ("nacelle_pod_starts_total{handler=\"small\",result=\"failed\"}", 0.0),
            ("nacelle_pods{handler=\"small\",state=\"ready\"}", 0.0),
            ("nacelle_vm_ends_total{cause=\"ended\"}", 0.0),
            ("nacelle_images{state=\"sound\"}", 1.0),
            ("nacelle_cni_requests_total{command=\"ADD\",result=\"success\"}", 0.0),
        ],
    );

    let (first, second) = (run(&mut daemon, "first").unwrap(), run(&mut daemon, "second").unwrap());
    world.script.fail_named("setup", 1);
    run(&mut daemon, "third").unwrap_err();
    let container = world.run(async {
        let container = daemon.create(&first, "one").await.unwrap();
        daemon.start(&container).await.unwrap();
        container
    });
    expect(
        &world,
        &address,
        &[
            ("nacelle_pod_starts_total{handler=\"small\",result=\"ready\"}", 2.0),
            ("nacelle_pod_starts_total{handler=\"small\",result=\"failed\"}", 1.0),
            ("nacelle_pod_start_duration_seconds_count{handler=\"small\"}", 2.0),
            ("nacelle_pod_start_phase_duration_seconds_count{handler=\"small\",phase=\"cni_add\"}", 2.0),
            ("nacelle_pods{handler=\"small\",state=\"ready\"}", 2.0),
            ("nacelle_pods{handler=\"other\",state=\"ready\"}", 0.0),
            ("nacelle_containers{state=\"running\"}", 1.0),
            ("nacelle_cri_requests_total{rpc=\"RunPodSandbox\",code=\"OK\"}", 2.0),
            ("nacelle_cri_request_duration_seconds_count{rpc=\"RunPodSandbox\"}", 3.0),
            ("nacelle_cni_requests_total{command=\"ADD\",result=\"success\"}", 2.0),
            ("nacelle_cni_requests_total{command=\"ADD\",result=\"failure\"}", 1.0),
            ("nacelle_cni_requests_total{command=\"DEL\",result=\"success\"}", 1.0),
            ("nacelle_state_store_commits_total{result=\"failure\"}", 0.0),
        ],
    );
    let samples = scrape(&address);
    for name in [
        "nacelle_pod_process_memory_bytes{handler=\"small\"}",
        "nacelle_state_store_commits_total{result=\"success\"}",
        "nacelle_state_store_bytes",
        "nacelle_image_store_bytes",
        "process_open_fds",
        "process_start_time_seconds",
    ] {
        assert!(samples.get(name).is_some_and(|value| *value > 0.0), "{name}: {samples:?}");
    }
    assert!(!samples.keys().any(|name| name.contains("phase=\"other\"")), "{samples:?}");
    assert_eq!(families_without_samples(&samples), ["nacelle_image_pull_duration_seconds"], "nothing was pulled");

    // One container ends by itself, and the process of the other pod is killed.
    world.pods.of(&first).exit(&container, 3);
    let dir = world.config().paths.pods().join(&second[..13]);
    world.pods.kill(&dir);
    expect(
        &world,
        &address,
        &[
            ("nacelle_container_exits_total{reason=\"Error\"}", 1.0),
            ("nacelle_vm_ends_total{cause=\"process_lost\"}", 1.0),
            ("nacelle_pods{handler=\"small\",state=\"ready\"}", 1.0),
            ("nacelle_containers{state=\"exited\"}", 1.0),
        ],
    );

    // A client that sends no request is ended.
    let mut received = String::new();
    silent.read_to_string(&mut received).unwrap();
    assert!(received.is_empty() || received.starts_with("HTTP/1.1 408"), "{received}");

    // The next daemon counts what it finds, and begins at 0 otherwise.
    daemon.kill();
    let daemon = world.daemon();
    expect(
        &world,
        &address,
        &[
            ("nacelle_pods_recovered_total{outcome=\"adopted\"}", 1.0),
            ("nacelle_pods_recovered_total{outcome=\"stopped\"}", 1.0),
            ("nacelle_pod_starts_total{handler=\"small\",result=\"ready\"}", 0.0),
            ("nacelle_pods{handler=\"small\",state=\"ready\"}", 1.0),
        ],
    );

    // The server answers nothing else, and reads no long request.
    assert_eq!(request(&address, "GET / HTTP/1.1").0, 404);
    assert_eq!(request(&address, "GET /metrics/x HTTP/1.1").0, 404);
    let (status, head, _) = request(&address, "POST /metrics HTTP/1.1");
    assert!(status == 405 && head.contains("allow: get"), "{head}");
    let long = format!("GET /metrics HTTP/1.1\r\nX: {}", "x".repeat(1 << 20));
    assert_ne!(request(&address, &long).0, 200);
    let many = format!("GET /metrics HTTP/1.1{}", "\r\nX: 1".repeat(100));
    assert_ne!(request(&address, &many).0, 200);
    assert_eq!(request(&address, "GET /metrics HTTP/1.1").0, 200);
    drop(daemon);
}

/// A Prometheus that is killed when this is dropped.
struct Prometheus(Child);

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns an address of the loopback interface on which no process listens now.
fn free_address() -> SocketAddr {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap()
}

/// Runs promtool and fails with its output.
fn promtool(arguments: &[&str], input: &str) {
    let mut command = Command::new("promtool");
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let child = command.spawn();
    let mut child = child.unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "promtool {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Returns a rule for each query of the dashboard, for promtool.
fn rules_of_dashboard() -> String {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let queries = panels.iter().flat_map(|panel| panel["targets"].as_array().unwrap());
    let rule = |(n, query): (usize, &Value)| {
        let expression = query["expr"].as_str().unwrap().replace("$instance", ".*");
        json!({"record": format!("query_{n}"), "expr": expression})
    };
    let rules: Vec<Value> = queries.enumerate().map(rule).collect();
    json!({"groups": [{"name": "dashboard", "rules": rules}]}).to_string()
}

/// Converts OpenMetrics to the older format that promtool checks, in which descriptions have the names of their samples.
fn as_prometheus_text(metrics: &str) -> String {
    let lines: Vec<&str> = metrics.lines().collect();
    let kinds: BTreeMap<&str, &str> =
        lines.iter().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' ')).collect();
    let convert = |line: &str| {
        let (keyword, rest) = line.strip_prefix("# ").and_then(|rest| rest.split_once(' '))?;
        let (name, rest) = rest.split_once(' ')?;
        let (suffix, kind) = match kinds.get(name) {
            Some(&"counter") => ("_total", "counter"),
            Some(&"info") => ("_info", "gauge"),
            kind => ("", kind.copied().unwrap_or_default()),
        };
        match keyword {
            "TYPE" => Some(format!("# TYPE {name}{suffix} {kind}\n")),
            "HELP" => Some(format!("# HELP {name}{suffix} {rest}\n")),
            _ => None,
        }
    };
    lines.iter().map(|line| convert(line).unwrap_or_else(|| format!("{line}\n"))).collect()
}

#[test]
fn a_daemon_serves_pods_while_another_program_has_the_address() {
    let mut world = World::new();
    let other = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let taken = other.local_addr().unwrap();
    world.metrics = Some(MetricsAddress::Tcp(taken));
    let mut daemon = world.daemon();
    world.run(daemon.run_pod("served")).unwrap();
    drop(other);
    world.eventually("metrics are served on the address that became free", || TcpStream::connect(taken).is_ok());
    expect(&world, &MetricsAddress::Tcp(taken), &[("nacelle_pods{handler=\"small\",state=\"ready\"}", 1.0)]);
}

#[test]
fn prometheus_reads_the_metrics_and_raises_an_alert() {
    if Command::new("prometheus").arg("--version").output().is_err() {
        println!("skipped: no prometheus (Debian's package prometheus)");
        return;
    }
    promtool(&["check", "rules", ALERTS], "");
    let mut world = World::new();
    let (metrics, web) = (free_address(), free_address());
    let address = MetricsAddress::Tcp(metrics);
    world.metrics = Some(address.clone());
    let mut daemon = world.daemon();
    let pod = world.run(daemon.run_pod("alerted")).unwrap();
    let (_, _, body) = request(&address, "GET /metrics HTTP/1.1");
    promtool(&["check", "metrics"], &as_prometheus_text(&body));

    let directory = world.root.path().join("prometheus");
    std::fs::create_dir(&directory).unwrap();
    let queries = directory.join("dashboard.yml");
    std::fs::write(&queries, rules_of_dashboard()).unwrap();
    promtool(&["check", "rules", queries.to_str().unwrap()], "");
    let config = format!(
        "global: {{scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 500ms}}\nrule_files: [{ALERTS:?}]\n\
         scrape_configs: [{{job_name: nacelle, static_configs: [{{targets: ['{metrics}']}}]}}]\n"
    );
    std::fs::write(directory.join("prometheus.yml"), config).unwrap();
    let _prometheus = start_prometheus(&directory, web);
    let query = |path: &str| match TcpStream::connect(web) {
        Ok(stream) => {
            let mut text = String::new();
            exchange(stream, &format!("GET {path} HTTP/1.0\r\n\r\n"), &mut text);
            text
        }
        Err(_not_yet) => String::new(),
    };
    world.eventually("Prometheus reads the metrics", || {
        query("/api/v1/query?query=nacelle_pods%7Bstate%3D%22ready%22%2Chandler%3D%22small%22%7D").contains(",\"1\"]")
    });
    // Prometheus has the 0 of before.
    let dir = world.config().paths.pods().join(&pod[..13]);
    world.pods.kill(&dir);
    world.eventually("the alert fires", || {
        let alerts = query("/api/v1/alerts");
        alerts.contains("\"alertname\":\"NacelleVmEnded\"") && alerts.contains("\"state\":\"firing\"")
    });
    drop(daemon);
}

fn start_prometheus(directory: &Path, web: SocketAddr) -> Prometheus {
    let log = std::fs::File::create(directory.join("log")).unwrap();
    let mut prometheus = Command::new("prometheus");
    prometheus.current_dir(directory).args(["--config.file=prometheus.yml", "--storage.tsdb.path=data"]);
    prometheus.arg(format!("--web.listen-address={web}")).stdout(Stdio::null()).stderr(log);
    Prometheus(prometheus.spawn().unwrap())
}
