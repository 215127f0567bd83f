//! Provides a test environment: a thread with a network and a mount namespace of its own, which plays the node, so that no
//! bridge, rule or mount affects the test machine. Everything is removed when the thread ends.
#![allow(dead_code, reason = "each test binary uses a part")]

use nacelle_base::PodId;
use nacelle_net::{Attachment, InterfaceUsage, NetConfig, NodeNetworks, PodRef, netns};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use std::future::Future;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Far longer than any step here takes, even on a busy machine.
pub const LIMIT: Duration = Duration::from_secs(60);
const PLUGINS: &str = "/usr/lib/cni";

pub struct World {
    dir: PathBuf,
    pub network: NodeNetworks,
}

/// Runs the test in an environment of its own, or reports why it cannot.
pub fn in_a_world<F: Future<Output = ()>>(needs: &[&str], test: impl FnOnce(World) -> F + Send) {
    if let Some(why) = missing(needs) {
        println!("skipped: {why}");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET).unwrap();
            mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
            mount(Some("tmpfs"), "/run", Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
            ip(&["link", "set", "lo", "up"]);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(test(World::new(dir.path())));
        });
        if let Err(panic) = thread.join() {
            std::panic::resume_unwind(panic);
        }
    });
}

fn missing(needs: &[&str]) -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("not root".to_owned());
    }
    if !Path::new("/dev/net/tun").exists() {
        return Some("no /dev/net/tun".to_owned());
    }
    // The bridge and portmap plugins run iptables, the tests ip.
    for program in ["ip", "iptables"] {
        if std::process::Command::new(program).arg("-V").output().is_err() {
            return Some(format!("no program {program}"));
        }
    }
    if let Some(plugin) = needs.iter().find(|plugin| !Path::new(PLUGINS).join(plugin).exists()) {
        return Some(format!("no CNI plugin {PLUGINS}/{plugin}"));
    }
    if needs.contains(&"host-local") && !Path::new("/proc/sys/net/ipv6").exists() {
        return Some("no IPv6 in this kernel".to_owned());
    }
    // On a thread of its own, because the check changes the namespaces of its thread.
    let allowed = std::thread::spawn(|| unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET)).join().unwrap();
    allowed.err().map(|errno| format!("no namespaces of our own: {errno}"))
}

impl World {
    fn new(dir: &Path) -> World {
        std::fs::create_dir(dir.join("conf")).unwrap();
        World { dir: dir.to_owned(), network: NodeNetworks::new(config(dir)) }
    }

    /// A directory of this environment.
    pub fn dir(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Returns a second daemon's network over the same directories, with another plugin deadline.
    pub fn again(&self, deadline: Duration) -> NodeNetworks {
        NodeNetworks::new(NetConfig { plugin_deadline: deadline, ..config(&self.dir) })
    }

    /// Writes a CNI configuration; `DIR` in it is replaced by the directory of this environment.
    pub fn conf(&self, name: &str, text: &str) {
        let text = text.replace("DIR", self.dir.to_str().unwrap());
        std::fs::write(self.dir.join("conf").join(name), text).unwrap();
    }

    /// Creates the namespace and the network of a new pod.
    pub async fn pod(&self, number: u8) -> (PodRef, Attachment) {
        let pod = pod(number);
        self.network.create_netns(&pod.id).await.unwrap();
        let attachment = self.network.setup(&pod).await.unwrap();
        (pod, attachment)
    }

    /// Returns the names of all files below a directory; empty if it does not exist.
    pub fn files(&self, name: &str) -> Vec<String> {
        let mut names = Vec::new();
        let mut directories = vec![self.dir(name)];
        while let Some(directory) = directories.pop() {
            for entry in std::fs::read_dir(directory).into_iter().flatten() {
                let entry = entry.unwrap();
                if entry.file_type().unwrap().is_dir() {
                    directories.push(entry.path());
                } else {
                    names.push(entry.file_name().into_string().unwrap());
                }
            }
        }
        names.sort();
        names
    }
}

fn config(dir: &Path) -> NetConfig {
    NetConfig {
        conf_dir: dir.join("conf"),
        bin_dirs: vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/plugins"), PLUGINS.into()],
        cache_dir: dir.join("cache"),
        netns_dir: dir.join("netns"),
        plugin_deadline: LIMIT,
    }
}

pub fn pod(number: u8) -> PodRef {
    PodRef {
        id: PodId::from_bytes([number; 32]),
        name: format!("pod-{number}"),
        namespace: "tests".to_owned(),
        uid: format!("uid-{number}"),
        port_mappings: Vec::new(),
        bandwidth: nacelle_model::network::Bandwidth::default(),
        dns: None,
        pod_cidrs: Vec::new(),
        additional_interfaces: Vec::new(),
        usage: InterfaceUsage::GuestNeedsAll,
    }
}

/// Runs ip(8) in this thread's namespace and returns its output.
pub fn ip(args: &[&str]) -> String {
    run("ip", args)
}

/// Runs ip(8) in the namespace of this name.
pub fn ip_in(netns: &Path, args: &[&str]) -> String {
    netns::run_in(&nacelle_net::NetNs::open(netns).unwrap(), || ip(args)).unwrap()
}

pub fn run(program: &str, args: &[&str]) -> String {
    let output = std::process::Command::new(program).args(args).output().unwrap();
    assert!(output.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the names of the interfaces in this thread's namespace.
pub fn links() -> Vec<String> {
    let text = ip(&["-o", "link"]);
    let name = |line: &str| line.split(": ").nth(1).map(|name| name.split('@').next().unwrap().to_owned());
    text.lines().filter_map(name).collect()
}

/// Polls until the condition holds.
pub async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let end = Instant::now() + LIMIT;
    while !condition() {
        assert!(Instant::now() < end, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
