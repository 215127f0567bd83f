//! Measures what metrics and traces cost: the duration of CRI requests, and the CPU time that the daemon spends for them.
//!
//! Each setting that needs a configuration of its own has a daemon of its own; all of them run at the same time and are measured
//! alternately. The CPU time includes what a request leaves for later: spans are sent up to a second after it.

use crate::cri::{BenchPod, RuntimeClient, milliseconds};
use crate::{BenchResult, median};
use nacelle_e2e::collector::{TraceCollector, tracing_config};
use nacelle_e2e::node::NodeOptions;
use nacelle_e2e::{TestImage, TestNode};
use nix::time::{ClockId, clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// How many times a command runs in each run.
const EXECS: usize = 9;
/// After this time the daemon has sent its spans.
const QUIET: Duration = Duration::from_millis(2500);
/// The time between requests, also of settings without scrapes. The daemon computes its figures anew for a scrape after half a second.
const PAUSE: Duration = Duration::from_millis(600);
/// The numbers of pods with which scrapes are measured.
const POD_COUNTS: [usize; 2] = [1, 10];

/// What a request is measured with: its name in the result, the daemon that serves it, the flags of the client's trace, and whether a
/// scrape begins together with each request.
struct Setting {
    name: &'static str,
    daemon: usize,
    trace_flags: Option<u8>,
    scraped: bool,
}

const SETTINGS: [Setting; 5] = [
    Setting { name: "off", daemon: 0, trace_flags: None, scraped: false },
    Setting { name: "metrics", daemon: 1, trace_flags: None, scraped: false },
    Setting { name: "metrics, with a scrape", daemon: 1, trace_flags: None, scraped: true },
    Setting { name: "tracing, not sampled", daemon: 2, trace_flags: Some(0), scraped: false },
    Setting { name: "tracing, sampled", daemon: 2, trace_flags: Some(1), scraped: false },
];

/// A daemon with a client, a pod, and a container in it.
struct ObservedDaemon {
    node: TestNode,
    cri: RuntimeClient,
    pod: BenchPod,
    container: String,
    image: String,
    scrape_socket: PathBuf,
    _directory: TempDir,
}

impl ObservedDaemon {
    /// Starts a daemon. `config` receives the path of a socket for metrics.
    fn start(config: impl Fn(&Path) -> String) -> ObservedDaemon {
        let directory = tempfile::tempdir().expect("the directory for temporary files is writable");
        let scrape_socket = directory.path().join("metrics.sock");
        let node = TestNode::with_options(NodeOptions {
            extra: config(&scrape_socket),
            ipv6: false,
            ..NodeOptions::default()
        });
        let mut cri = RuntimeClient::connect(&node.directory().join("nacelle.sock"), &node.directory().join("logs"));
        let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
        let pod = cri.run_pod().0;
        let (container, _) = cri.start(&pod, &image, &["/bin/sh", "-c", "echo here; sleep 100000"]);
        cri.exec(&container, &["/bin/true"]);
        ObservedDaemon { node, cri, pod, container, image, scrape_socket, _directory: directory }
    }

    /// Returns the CPU time of the daemon in milliseconds, with that of threads that have ended.
    fn cpu_time(&self) -> f64 {
        let pid = Pid::from_raw(self.node.daemon_pid().cast_signed());
        let clock: ClockId = clock_getcpuclockid(pid).expect("the daemon runs");
        Duration::from(clock_gettime(clock).expect("the daemon runs")).as_secs_f64() * 1000.0
    }

    /// Scrapes in a thread.
    fn start_scrape(&self) -> JoinHandle<usize> {
        let socket = self.scrape_socket.clone();
        std::thread::spawn(move || scrape(&socket))
    }

    /// Measures one request; returns its result and the milliseconds that it took.
    fn measure<T>(&mut self, setting: &Setting, request: impl FnOnce(&mut Self) -> (T, f64)) -> (T, f64) {
        std::thread::sleep(PAUSE);
        let scrape = setting.scraped.then(|| self.start_scrape());
        let measured = request(self);
        if let Some(scrape) = scrape {
            scrape.join().expect("the daemon answers a scrape");
        }
        measured
    }

    /// Measures commands in the pod, and a pod from its start to its end.
    fn measure_all(&mut self, setting: &Setting) -> Sample {
        self.cri.trace_flags = setting.trace_flags;
        std::thread::sleep(QUIET);
        let before = self.cpu_time();
        let execs: Vec<f64> = (0..EXECS)
            .map(|_| self.measure(setting, |daemon| ((), daemon.cri.exec(&daemon.container, &["/bin/true"]))).1)
            .collect();
        std::thread::sleep(QUIET);
        let after_execs = self.cpu_time();
        let (pod, ready) = self.measure(setting, |daemon| daemon.cri.run_pod());
        let image = self.image.clone();
        let (_, first_byte) = self.measure(setting, |daemon| daemon.cri.start(&pod, &image, &["/bin/echo", "first"]));
        self.cri.remove_pod(&pod);
        std::thread::sleep(QUIET);
        let after_pod = self.cpu_time();
        self.cri.trace_flags = None;
        [
            ("exec", median(&execs)),
            ("ready", ready),
            ("first-byte", first_byte),
            ("daemon's CPU time for an exec", (after_execs - before) / EXECS as f64),
            ("daemon's CPU time for a pod", after_pod - after_execs),
        ]
    }

    /// Measures scrapes with this number of pods.
    fn measure_scrapes(&mut self, pods: usize, runs: usize) -> Value {
        let others: Vec<BenchPod> = (1..pods)
            .map(|_| {
                let pod = self.cri.run_pod().0;
                self.cri.start(&pod, &self.image, &["/bin/sh", "-c", "echo here; sleep 100000"]);
                pod
            })
            .collect();
        let (mut times, mut cpu_times, mut bytes) = (Vec::new(), Vec::new(), 0);
        for _ in 0..runs {
            std::thread::sleep(PAUSE);
            let (before, start) = (self.cpu_time(), Instant::now());
            bytes = scrape(&self.scrape_socket);
            times.push(milliseconds(start));
            cpu_times.push(self.cpu_time() - before);
        }
        others.iter().for_each(|pod| self.cri.remove_pod(pod));
        json!({"scrape with pods": pods, "ms": median(&times), "daemon's CPU time": median(&cpu_times), "bytes": bytes})
    }
}

/// What is measured in one run: names and milliseconds.
type Sample = [(&'static str, f64); 5];

/// Scrapes the daemon that serves its metrics on this socket; returns the number of bytes.
fn scrape(socket: &Path) -> usize {
    let mut stream = UnixStream::connect(socket).expect("the daemon serves metrics");
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n").expect("the daemon reads");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("the daemon answers");
    assert!(text.starts_with("HTTP/1.1 200 "), "{text}");
    text.len()
}

/// Measures all settings. The samples are those of ExecSync, with a sampled trace and with neither metrics nor traces; the details have
/// everything, as medians in milliseconds.
pub fn measure(runs: usize) -> BenchResult {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let mut daemons = [
        ObservedDaemon::start(|_| String::new()),
        ObservedDaemon::start(|socket| format!("[metrics]\naddress = \"unix:{}\"\n", socket.display())),
        ObservedDaemon::start(|_| tracing_config()),
    ];
    let collector = TraceCollector::start(&daemons[2].node, &runtime);
    let mut samples: BTreeMap<(usize, &str), Vec<f64>> = BTreeMap::new();
    // The first run fills the page cache and connects the daemon to the collector.
    for run in 0..=runs {
        for (number, setting) in SETTINGS.iter().enumerate() {
            let sample = daemons[setting.daemon].measure_all(setting);
            for (what, value) in sample.into_iter().filter(|_| run > 0) {
                samples.entry((number, what)).or_default().push(value);
            }
        }
    }
    let mut rows: Vec<Value> = SETTINGS
        .iter()
        .enumerate()
        .map(|(number, setting)| {
            let medians = samples.iter().filter(|((of, _), _)| *of == number);
            let medians: BTreeMap<_, _> = medians.map(|((_, what), values)| (*what, median(values))).collect();
            json!({"setting": setting.name, "medians": medians})
        })
        .collect();
    rows.extend(POD_COUNTS.map(|pods| daemons[1].measure_scrapes(pods, runs)));
    assert!(!collector.spans().is_empty(), "no span has arrived");
    for daemon in &mut daemons {
        daemon.cri.remove_pod(&daemon.pod);
    }
    let of = |number| samples[&(number, "exec")].clone();
    BenchResult {
        ours: of(SETTINGS.len() - 1),
        peers: of(0),
        details: rows.into(),
        ..BenchResult::new("ms", "neither metrics nor traces")
    }
}
