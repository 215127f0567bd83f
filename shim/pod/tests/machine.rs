//! Tests a pod process with real parts: the engine that fits this node, the guest's kernel, the agent, a network namespace.
//! Needs root, QEMU where KVM does not run guests on hardware, mkfs.erofs, busybox, ip, and NACELLE_KERNEL and
//! NACELLE_INITRD as `guest/build all` prints them.

mod common;

use common::harness;
use nacelle_base::machine::{ConsoleKind, EngineKind};
use nacelle_net::{NetNs, netns};
use nacelle_pod::client::{self, PodClient};
use nacelle_pod::record::Phase;
use nacelle_pod::spec::{Accelerator, EngineSpec, JailSpec, NetworkSpec, PodSpec, Seccomp};
use nacelle_proto::common::{Dns, Interface, Route};
use nacelle_proto::pod;
use serde_json::json;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(180);
const GRACE: Duration = Duration::from_secs(30);
const MAC: [u8; 6] = [0x0a, 0x58, 0, 0, 0, 2];

fn main() -> ExitCode {
    harness::main(&[
        ("a_pod_runs_in_a_real_vm", || Box::pin(run_pod())),
        ("killing_the_pod_process_ends_the_vm", || Box::pin(kill_pod_process())),
    ])
}

/// Returns kernel and initrd, or the reason why the test cannot run.
fn guest_files() -> Result<(PathBuf, PathBuf), String> {
    let file = |name: &str| std::env::var_os(name).map(PathBuf::from).ok_or(format!("{name} is not set"));
    if !nix::unistd::geteuid().is_root() {
        return Err("not root".into());
    }
    if !Path::new("/dev/net/tun").exists() {
        return Err("no /dev/net/tun".into());
    }
    let qemu = (engine() == EngineKind::Qemu).then_some("qemu-system-x86_64");
    for program in qemu.into_iter().chain(["mkfs.erofs", "busybox", "ip"]) {
        path_of(program).ok_or(format!("{program} is not installed"))?;
    }
    Ok((file("NACELLE_KERNEL")?, file("NACELLE_INITRD")?))
}

/// Returns the engine that fits this node.
fn engine() -> EngineKind {
    static ENGINE: OnceLock<EngineKind> = OnceLock::new();
    *ENGINE.get_or_init(|| nacelle_engine::default_engine(&nacelle_engine::probe_kvm()))
}

fn path_of(program: &str) -> Option<PathBuf> {
    let output = Command::new("sh").args(["-c", &format!("command -v {program}")]).output().ok()?;
    fs::canonicalize(String::from_utf8_lossy(&output.stdout).trim()).ok()
}

fn run(program: &str, args: &[&str]) {
    let output = Command::new(program).args(args).output().unwrap();
    assert!(output.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A network namespace for the pod and one for its peer, connected by a veth pair: eth0 in the pod's, 10.88.7.1 in the peer's.
struct Net {
    pod: PathBuf,
    peer: PathBuf,
}

impl Net {
    fn new(root: &Path) -> Net {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let tag = format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = |name: &str| root.join(format!("{name}-{tag}"));
        let net = Net { pod: path("pod"), peer: path("peer") };
        let (pod, peer) = (netns::create(&net.pod).unwrap(), netns::create(&net.peer).unwrap());
        let peer_link = format!(
            "/proc/{}/fd/{}",
            std::process::id(),
            std::os::fd::AsRawFd::as_raw_fd(&std::os::fd::AsFd::as_fd(&peer))
        );
        Self::ip(&pod, &format!("link add eth0 address 0a:58:00:00:00:02 type veth peer name eth0 netns {peer_link}"));
        Self::ip(&peer, "addr add 10.88.7.1/24 dev eth0");
        Self::ip(&peer, "link set eth0 up");
        net
    }

    fn ip(netns: &NetNs, words: &str) {
        let words: Vec<&str> = words.split(' ').collect();
        nacelle_net::run_in(netns, || run("ip", &words)).unwrap();
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        for path in [&self.pod, &self.peer] {
            if let Err(error) = netns::remove(path) {
                println!("{error}");
            }
        }
    }
}

struct TestPod {
    dir: PathBuf,
    net: Net,
    image: PathBuf,
    root: tempfile::TempDir,
}

impl Drop for TestPod {
    fn drop(&mut self) {
        harness::end(&self.dir);
    }
}

impl TestPod {
    fn new() -> TestPod {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("run");
        fs::create_dir(&dir).unwrap();
        let net = Net::new(root.path());
        let image = make_image(root.path());
        TestPod { dir, net, image, root }
    }

    async fn spawn(&self, (kernel, initrd): (PathBuf, PathBuf), console: ConsoleKind) -> PodClient {
        let mut spec: PodSpec = common::spec(self.root.path());
        (spec.console, spec.kernel_args) = (console, vec!["loglevel=6".into()]);
        spec.engine = match engine() {
            EngineKind::Kvm => EngineSpec::Kvm {},
            EngineKind::Qemu | EngineKind::Host => {
                let binary = path_of("qemu-system-x86_64").unwrap();
                EngineSpec::Qemu { binary, accelerator: Accelerator::Tcg }
            }
        };
        (spec.kernel, spec.initrd, spec.memory_mib, spec.scratch.size_mib) = (kernel, initrd, 192, 10_240);
        spec.network =
            Some(NetworkSpec { netns: self.net.pod.clone(), interfaces: vec!["eth0".into()], queues: vec![] });
        spec.jail = Some(JailSpec {
            seccomp: Seccomp::Kill,
            image_layers: None,
            cgroup: Some(common::cgroup(self.root.path())),
            user: Some(70_001),
        });
        let admit = |_started| std::future::ready(Ok(()));
        client::spawn(&std::env::current_exe().unwrap(), &self.dir, &spec, admit).await.unwrap()
    }

    async fn configure(&self, client: &PodClient) -> pod::ConfigureResponse {
        let request = pod::ConfigureRequest {
            interfaces: vec![Interface {
                name: "eth0".into(),
                mac: MAC.to_vec(),
                mtu: 1400,
                addresses: vec!["10.88.7.2/24".into()],
                ..Interface::default()
            }],
            routes: vec![Route {
                destination: "0.0.0.0/0".into(),
                gateway: "10.88.7.1".into(),
                interface: "eth0".into(),
                ..Route::default()
            }],
            dns: Some(Dns { servers: vec!["10.88.7.1".into()], searches: vec![], options: vec![] }),
        };
        nacelle_net::tap::connect(&NetNs::open(&self.net.pod).unwrap(), &nacelle_pod::tap_name(0), "eth0").unwrap();
        match client.configure(request).await {
            Ok(answer) => answer,
            Err(error) => panic!("{error}; log: {}", self.log()),
        }
    }

    async fn create(&self, client: &PodClient, id: &str, script: &str) {
        let length = fs::metadata(&self.image).unwrap().len();
        let request = pod::CreateContainerRequest {
            id: id.into(),
            oci_spec: oci_spec(script),
            image_key: "busybox".into(),
            image: vec![pod::Extent { path: self.image.to_str().unwrap().into(), offset: 0, length }],
            ..Default::default()
        };
        if let Err(error) = client.create_container(request).await {
            panic!("{error}; log: {}", self.log());
        }
        let logs = self.root.path().join("logs");
        client.set_log(id, nacelle_pod::client::open_log(&logs, &logs.join(id)).unwrap()).await.unwrap();
        if let Err(error) = client.start_container(id).await {
            panic!("{error}; log: {}", self.log());
        }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.join("pod.log")).unwrap_or_default()
            + &fs::read_to_string(self.dir.join("jail/console.log")).unwrap_or_default()
    }
}

fn make_image(directory: &Path) -> PathBuf {
    let root = directory.join("image");
    for name in ["bin", "etc", "proc", "dev", "sys", "tmp"] {
        fs::create_dir_all(root.join(name)).unwrap();
    }
    fs::copy(path_of("busybox").unwrap(), root.join("bin/busybox")).unwrap();
    fs::set_permissions(root.join("bin/busybox"), fs::Permissions::from_mode(0o755)).unwrap();
    for applet in ["sh", "cat", "echo", "sleep", "ping", "ip", "uname", "hostname", "dd", "seq", "df"] {
        symlink("busybox", root.join("bin").join(applet)).unwrap();
    }
    let image = directory.join("image.erofs");
    run("mkfs.erofs", &["--quiet", "--all-root", image.to_str().unwrap(), root.to_str().unwrap()]);
    let length = fs::metadata(&image).unwrap().len().next_multiple_of(4096);
    fs::OpenOptions::new().write(true).open(&image).unwrap().set_len(length).unwrap();
    image
}

fn oci_spec(script: &str) -> Vec<u8> {
    let capabilities = json!(["CAP_NET_RAW"]);
    let spec = json!({
        "ociVersion": "1.2.0",
        "process": {
            "args": ["/bin/sh", "-c", script], "cwd": "/", "env": ["PATH=/bin"], "user": { "uid": 0, "gid": 0 },
            "capabilities": { "bounding": capabilities, "effective": capabilities, "permitted": capabilities }
        },
        "root": { "path": "rootfs" },
        "mounts": [
            { "destination": "/proc", "type": "proc", "source": "proc" },
            { "destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"] },
            { "destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"] }
        ],
        "linux": { "namespaces": [{ "type": "pid" }, { "type": "ipc" }, { "type": "uts" }, { "type": "mount" }, { "type": "network" }] }
    });
    spec.to_string().into_bytes()
}

async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !condition().await {
        assert!(Instant::now() < deadline, "{what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn exited(client: &PodClient, id: &str) -> pod::ContainerState {
    let find = async || client.state().await.unwrap().containers.into_iter().find(|c| c.id == id).unwrap();
    until("the container ends", async || find().await.phase() == pod::ContainerPhase::Exited).await;
    find().await
}

async fn run_pod() {
    let guest_files = match guest_files() {
        Ok(guest_files) => guest_files,
        Err(why) => return println!("skipped: {why}"),
    };
    let test_pod = TestPod::new();
    let begun = Instant::now();
    let client = test_pod.spawn(guest_files, ConsoleKind::Serial).await;
    let answered = begun.elapsed();
    let answer = test_pod.configure(&client).await;
    println!("answered after {answered:?}, ready after {:?}: {answer:?}", begun.elapsed());

    let script = "echo out; echo err >&2; cat /proc/sys/kernel/hostname; exit 7";
    test_pod.create(&client, "first", script).await;
    let end = exited(&client, "first").await;
    assert_eq!((end.exit_code, end.message.as_str()), (7, ""), "{}", test_pod.log());
    let log = fs::read_to_string(test_pod.root.path().join("logs/first")).unwrap();
    let mut texts: Vec<&str> = log.lines().map(|line| line.split_once(' ').unwrap().1).collect();
    texts.sort();
    assert_eq!(texts, ["stderr F err", "stdout F out", "stdout F pod-name"]);

    test_pod.create(&client, "second", "trap 'exit 3' TERM; while true; do sleep 0.1; done").await;
    let exec = async |script: &str| {
        let args = ["/bin/sh", "-c", script].map(str::to_owned).to_vec();
        client.exec_sync("second", args, Some(LIMIT)).await.unwrap()
    };
    let begun = Instant::now();
    let ping = exec("ping -c 1 -W 60 10.88.7.1 && ip addr show eth0 && ip route").await;
    let text = String::from_utf8_lossy(&ping.stdout).into_owned();
    assert_eq!(ping.exit_code, 0, "{text}{}{}", String::from_utf8_lossy(&ping.stderr), test_pod.log());
    assert!(text.contains("10.88.7.2/24") && text.contains("0a:58:00:00:00:02") && text.contains("mtu 1400"), "{text}");
    assert!(text.contains("default via 10.88.7.1"), "{text}");
    println!("exec of ping and ip: {:?}", begun.elapsed());
    let written = exec("dd if=/dev/zero of=/tmp/x bs=1M count=3 2>&1 && df -m / && uname -r").await;
    assert_eq!(written.exit_code, 0, "{}", String::from_utf8_lossy(&written.stdout));
    println!("{}", String::from_utf8_lossy(&written.stdout));
    let late = client.exec_sync("second", vec!["sleep".into(), "600".into()], Some(Duration::from_millis(300))).await;
    assert_eq!(common::kind(late), nacelle_base::FailureKind::Timeout);
    println!("memory of the pod process:\n{}", memory(client.identity().pid));

    test_pod.create(&client, "chatty", "seq 1 20000").await;
    exited(&client, "chatty").await;
    let log = fs::read_to_string(test_pod.root.path().join("logs/chatty")).unwrap();
    assert_eq!(log.lines().count(), 20_000);
    assert!(log.ends_with(" stdout F 20000\n"));

    client.stop_container("second", GRACE).await.unwrap();
    assert_eq!(exited(&client, "second").await.exit_code, 3);
    for id in ["first", "second", "chatty"] {
        client.remove_container(id).await.unwrap();
    }
    test_pod.create(&client, "again", "exit 0").await;
    assert_eq!(exited(&client, "again").await.exit_code, 0);
    let begun = Instant::now();
    client.stop(GRACE).await.unwrap();
    client.wait_for_exit().await.unwrap();
    println!("stopped after {:?}", begun.elapsed());
    let record = nacelle_pod::record::read(&test_pod.dir).unwrap().unwrap();
    assert_eq!((record.phase, record.failure.as_str()), (Phase::Stopped, ""));
    assert_eq!(common::names(&test_pod.dir), ["jail", "pod.log", "process.json", "share.json", "spec.json"]);
    assert_eq!(common::names(&test_pod.dir.join("jail")), ["console.log", "state.json"]);
}

/// Describes the memory of the process besides the guest's.
fn memory(pid: i32) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    status.lines().filter(|line| line.starts_with("Rss") || line.starts_with("Threads")).collect::<Vec<_>>().join("\n")
}

async fn kill_pod_process() {
    let guest_files = match guest_files() {
        Ok(guest_files) => guest_files,
        Err(why) => return println!("skipped: {why}"),
    };
    let test_pod = TestPod::new();
    let client = test_pod.spawn(guest_files, ConsoleKind::Virtio).await;
    test_pod.configure(&client).await;
    assert!(test_pod.log().contains("console=hvc0"), "the kernel logs its command line: {}", test_pod.log());
    test_pod.create(&client, "running", "while true; do sleep 1; done").await;
    let pid = client.identity().pid;
    let children = fs::read_dir(format!("/proc/{pid}/task"))
        .unwrap()
        .map(|task| fs::read_to_string(task.unwrap().path().join("children")).unwrap_or_default());
    let children: Vec<String> =
        children.collect::<String>().split_whitespace().map(|child| format!("/proc/{child}/cmdline")).collect();
    let qemu = |path: &String| fs::read_to_string(path).is_ok_and(|text| text.contains("qemu"));
    assert_eq!(children.iter().any(qemu), engine() == EngineKind::Qemu, "{children:?}");
    harness::end(&test_pod.dir);
    let record = client::clean_up(&test_pod.dir, None).await.unwrap().unwrap();
    assert_eq!((record.phase, record.containers[0].exit_code), (Phase::Stopped, 255));
    until("QEMU dies with its pod process", async || !children.iter().any(qemu)).await;
}
