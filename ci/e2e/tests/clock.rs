//! Sets the node's clock forward by a day and back while pods run. Only in a test node (`ci/node`), which has a clock of its own.

use nacelle_e2e::crictl::RunningContainer;
use nacelle_e2e::node::engine;
use nacelle_e2e::run::{block_on, run, run_program};
use nacelle_e2e::{ContainerRequest, CriClient, PodRequest, TestImage, TestNode};
use nacelle_proto::cri;
use serde_json::Value;
use std::fs;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

const DAY: i64 = 86_400;
/// How far two clocks may be apart that are the same, in seconds: the node is slow.
const TOLERANCE: i64 = 20;
/// The time in which the clock of a guest follows: they are compared once a minute.
const GUEST_LIMIT: Duration = Duration::from_secs(75);

/// The node's clock. Dropping this sets it right again.
struct NodeClock {
    wall: SystemTime,
    began: Instant,
}

impl NodeClock {
    /// Takes the clock of a test node; `None` on any other machine.
    fn take() -> Option<NodeClock> {
        let is_node = fs::read_to_string("/proc/cmdline").is_ok_and(|text| text.contains("node.work="));
        is_node.then(|| NodeClock { wall: SystemTime::now(), began: Instant::now() })
    }

    /// Sets the clock to a number of seconds after the right time.
    fn set(&self, offset: i64) {
        let right = self.wall + self.began.elapsed();
        let seconds = right.duration_since(UNIX_EPOCH).expect("it is after 1970").as_secs();
        run_program("date", ["--set".to_owned(), format!("@{}", seconds.saturating_add_signed(offset))]).ok();
    }

    /// Waits for a condition by the monotonic clock.
    fn wait(&self, what: &str, limit: Duration, mut condition: impl FnMut() -> bool) {
        let began = Instant::now();
        while !condition() {
            assert!(began.elapsed() < limit, "waited {limit:?} in vain for: {what}");
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

impl Drop for NodeClock {
    fn drop(&mut self) {
        self.set(0);
    }
}

fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("it is after 1970");
    i64::try_from(since.as_secs()).expect("it is before the end of time")
}

/// Returns a number in crictl's JSON, where 64-bit numbers are strings.
fn number(value: &Value) -> i64 {
    value.as_str().and_then(|text| text.parse().ok()).or(value.as_i64()).unwrap_or(0)
}

/// Returns the CPU figures of a container: the time of the measurement in seconds since 1970, and the rate in CPUs.
fn cpu(node: &TestNode, container: &RunningContainer) -> (i64, i64) {
    let all = node.crictl.call_json(["stats", "--all", "--id", &container.id, "-o", "json"]);
    let cpu = &all["stats"][0]["cpu"];
    (number(&cpu["timestamp"]) / 1_000_000_000, number(&cpu["usageNanoCores"]["value"]) / 1_000_000_000)
}

/// Returns the URL of a command that the streaming server runs for the one who connects.
fn exec_url(node: &TestNode, container: &RunningContainer) -> String {
    let cmd = ["echo", "streamed"].map(str::to_owned).into();
    let request = cri::ExecRequest { container_id: container.id.clone(), cmd, stdout: true, ..Default::default() };
    block_on(async {
        let mut cri = CriClient::new(node.channel());
        cri.exec(request).await.expect("the container runs").into_inner().url
    })
}

/// Connects to a URL of the streaming server, and returns the first line of its response.
fn open_stream(node: &TestNode, url: &str) -> String {
    let (host, path) = url.trim_start_matches("http://").split_once('/').expect("a URL has a path");
    let (address, port) = host.rsplit_once(':').expect("a URL has a port");
    let script = format!(
        "exec 3<>/dev/tcp/{address}/{port}; printf 'GET /{path} HTTP/1.1\\r\\nHost: {host}\\r\\nConnection: Upgrade\\r\\n\
         Upgrade: websocket\\r\\nSec-WebSocket-Version: 13\\r\\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\\r\\n\
         Sec-WebSocket-Protocol: v5.channel.k8s.io\\r\\n\\r\\n' >&3; head -n 1 <&3"
    );
    run(node.netns.command("bash").args(["-c", &script])).ok()
}

#[test]
fn pods_and_requests_outlast_steps_of_the_nodes_clock() {
    let Some(clock) = NodeClock::take() else {
        println!("skipped: the clock of this machine is not the test's; ci/node test -p nacelle-e2e --test clock");
        return;
    };
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(PodRequest::new("clock", node.directory()));
    let running = pod.start(ContainerRequest::sh("running", &image, "while :; do :; done"));
    cpu(&node, &running);
    for offset in [DAY, -DAY, 0] {
        let url = exec_url(&node, &running);
        // A request in progress keeps its time limit.
        let script = "rm -f /stepped; touch /began; until [ -e /stepped ]; do sleep 0.1; done; rm /began; echo done";
        let arguments = ["exec", "--sync", "--timeout", "60", &running.id, "sh", "-c", script];
        let crictl = &node.crictl;
        std::thread::scope(|scope| {
            let exec = scope.spawn(move || crictl.call(arguments));
            let begun = ["exec", "--sync", &running.id, "test", "-e", "/began"];
            clock.wait("the command runs", Duration::from_secs(30), || crictl.try_call(begun).code == 0);
            clock.set(offset);
            crictl.call(["exec", "--sync", &running.id, "touch", "/stepped"]);
            assert_eq!(exec.join().expect("no panic").trim(), "done");
        });
        assert!(open_stream(&node, &url).contains("101"), "the URL is valid for its time");
        let slow = node.crictl.try_call(["exec", "--sync", "--timeout", "1", &running.id, "sleep", "60"]);
        assert!(slow.code != 0, "the time limit of a command ends it: {slow:?}");

        // What begins now has the new time, and ends.
        let name = format!("after-{offset}");
        let after = pod.start(ContainerRequest::sh(&name, &image, "echo up"));
        clock.wait("the container ends", Duration::from_secs(60), || after.status()["state"] == "CONTAINER_EXITED");
        let created = after.status()["createdAt"].as_str().unwrap_or_default().to_owned();
        let created: i64 = run_program("date", ["--date", &created, "+%s"]).ok().parse().expect("it is a time");
        assert!((created - now()).abs() < TOLERANCE, "created at {created}, the node has {}", now());
        let (at, cpus) = cpu(&node, &running);
        assert!((at - now()).abs() < TOLERANCE && (0..64).contains(&cpus), "{cpus} CPUs at {at}");
        if engine() != "host" && offset == -DAY {
            let guest = || running.exec("busybox date +%s").ok().parse::<i64>().expect("it is a number");
            clock.wait("the clock of the guest follows", GUEST_LIMIT, || (guest() - now()).abs() < TOLERANCE);
        }
        assert_eq!(pod.inspect()["status"]["state"], "SANDBOX_READY");
        assert_eq!(running.status()["state"], "CONTAINER_RUNNING");
    }
    let events = node.log();
    assert!(!events.contains("BUG"), "{events}");
    pod.remove();
}
