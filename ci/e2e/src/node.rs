//! Provides a node for a test: directories, a network namespace with a CNI configuration, a daemon that can be killed and started
//! again. Dropping it removes everything and, unless the test panics already, fails the test if something is leaked.

use crate::census::Census;
use crate::crictl::Crictl;
use crate::manager::ServiceManager;
use crate::registry::{RegistryKind, TestRegistry};
use crate::run::{ProgramOutput, eventually, run, run_program};
use serde_json::{Value, json};
use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use tonic::transport::{Channel, Endpoint};

/// A named network namespace, removed with its last handle.
#[derive(Clone)]
pub struct Netns(Arc<NetnsName>);

struct NetnsName(String);

impl Drop for NetnsName {
    fn drop(&mut self) {
        run_program("ip", ["netns", "delete", &self.0]);
    }
}

impl Netns {
    fn new(name: &str) -> Self {
        run_program("ip", ["netns", "add", name]).ok();
        let netns = Self(Arc::new(NetnsName(name.to_owned())));
        run(netns.command("ip").args(["link", "set", "lo", "up"])).ok();
        netns
    }

    /// Opens this network namespace, for a thread of the test that enters it.
    pub fn open(&self) -> File {
        File::open(format!("/run/netns/{}", self.0.0)).expect("the namespace has a name")
    }

    /// Returns a command that will run in this network namespace (and in the test machine's mount namespace).
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{}", self.0.0)).arg("--").arg(program);
        command
    }
}

/// The mounted file system of the daemon's data. Dropping this unmounts it.
struct NodeDisk {
    image: PathBuf,
    root: PathBuf,
}

impl NodeDisk {
    /// Makes an ext4 of this size in the node's directory and mounts it.
    fn create(directory: &Path, mib: u32, mkfs_arguments: &[&str]) -> NodeDisk {
        let disk = NodeDisk { image: directory.join("disk.ext4"), root: directory.join("root") };
        run_program("truncate", [format!("--size={mib}M").as_ref(), disk.image.as_os_str()]).ok();
        run(Command::new("mkfs.ext4").arg("-q").args(mkfs_arguments).arg(&disk.image)).ok();
        disk.mount();
        disk
    }

    fn mount(&self) {
        run_program("mount", [OsStr::new("-o"), "loop".as_ref(), self.image.as_os_str(), self.root.as_os_str()]).ok();
    }
}

impl Drop for NodeDisk {
    fn drop(&mut self) {
        run_program("umount", [&self.root]);
    }
}

/// The settings of a node that a test can change before the daemon starts.
pub struct NodeOptions {
    /// Lines at the end of the daemon's configuration file.
    pub extra: String,
    /// The kind of the registry next to the daemon, on port 5000.
    pub registry: RegistryKind,
    /// The size in MiB of a file system for the daemon's data, if they have one of their own.
    pub disk_mib: Option<u32>,
    /// Further arguments of the `mkfs.ext4` that makes this file system.
    pub mkfs_arguments: &'static [&'static str],
    /// Whether pods also have an IPv6 address; Debian's plugins then wait one to two seconds for duplicate address detection.
    pub ipv6: bool,
    /// Lines of the section `network` of the daemon's configuration file.
    pub network: String,
    /// Files that are missing for the daemon. Its mounts are then invisible to the test.
    pub missing: Vec<PathBuf>,
    /// The names of further interfaces of pods, as Multus creates them: the n-th on a bridge of its own, 10.88.n.0/24.
    pub further: Vec<String>,
    /// The daemon's program; its other programs are in the same directory. `None`: `NACELLE_BIN`.
    pub program: Option<PathBuf>,
}

impl Default for NodeOptions {
    fn default() -> Self {
        Self {
            extra: String::new(),
            registry: RegistryKind::Http,
            disk_mib: None,
            mkfs_arguments: &[],
            ipv6: true,
            network: String::new(),
            missing: Vec::new(),
            further: Vec::new(),
            program: None,
        }
    }
}

/// A node with a daemon, a registry and crictl.
pub struct TestNode {
    /// Runs crictl against this node's daemon.
    pub crictl: Crictl,
    /// The registry.
    pub registry: TestRegistry,
    /// The node's network namespace.
    pub netns: Netns,
    directory: PathBuf,
    daemon: Option<Child>,
    /// The daemon's program.
    program: PathBuf,
    disk: Option<NodeDisk>,
    missing: Vec<PathBuf>,
    before: Census,
    // The last field: it is removed last.
    _temporary: tempfile::TempDir,
}

impl TestNode {
    /// Returns a node as kubelet would find it.
    pub fn new() -> Self {
        Self::with_options(NodeOptions::default())
    }

    /// Returns a node with these options.
    pub fn with_options(options: NodeOptions) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let prefix = format!("nacelle-e2e-{}-{}-", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let parent = std::env::var_os("NACELLE_TEST_DIRECTORY").unwrap_or_else(|| "/var/tmp".into());
        let temporary = tempfile::Builder::new().prefix(&prefix).tempdir_in(parent);
        let temporary = temporary.expect("the directory for the node's directory is writable");
        let directory = temporary.path().to_owned();
        for part in ["root", "run", "cni", "netns", "logs"] {
            fs::create_dir(directory.join(part)).expect("the node's directory is writable");
        }
        // The directory's name has a random part: nothing that an earlier program left is in the way.
        let netns = Netns::new(directory.file_name().and_then(OsStr::to_str).expect("the name is text"));
        let disk = options.disk_mib.map(|mib| NodeDisk::create(&directory, mib, options.mkfs_arguments));
        fs::write(directory.join("cni/10-e2e.conflist"), cni_config(&directory, &options))
            .expect("the node's directory is writable");
        let registry = TestRegistry::start(&netns, &directory, options.registry, 5000);
        fs::write(directory.join("config.toml"), daemon_config(&directory, &registry, &options))
            .expect("the directory is writable");
        let crictl = Crictl::new(&directory, &netns, &directory.join("nacelle.sock"));
        let before = Census::collect(&directory, &netns);
        let mut node = Self {
            crictl,
            registry,
            netns,
            directory,
            daemon: None,
            program: options.program.unwrap_or_else(|| crate::path_from_env("NACELLE_BIN")),
            disk,
            missing: options.missing,
            before,
            _temporary: temporary,
        };
        node.start();
        node
    }

    /// Starts the daemon and waits until it answers.
    pub fn start(&mut self) {
        let [program, words @ ..] = &self.command_line();
        let mut command = match self.missing.is_empty() {
            true => self.netns.command(program),
            false => self.command_without_files(program),
        };
        command.args(words).stdin(Stdio::null());
        self.daemon = Some(self.spawn(command));
        self.wait_until_answering();
        let config = fs::read_to_string(self.directory.join("config.toml")).unwrap_or_default();
        if engine() == "kvm" && !config.contains("templates = ") {
            // Otherwise the first pods would boot beside the template.
            self.templates(&["build"]).ok();
        }
    }

    /// Returns a command that will run in a mount namespace without the missing files.
    fn command_without_files(&self, program: &OsStr) -> Command {
        let layers = self.directory.join("missing");
        fs::create_dir(&layers).expect("the node's directory is writable");
        let mut command = self.netns.command("unshare");
        command.args(["--mount", "--propagation", "slave", "sh", "-c", HIDE_FILES, "sh"]).arg(layers);
        command.args(&self.missing).arg("--").arg(program);
        command
    }

    /// Runs `nacelle templates`.
    pub fn templates(&self, arguments: &[&str]) -> ProgramOutput {
        self.nacelle(&[&["templates"], arguments].concat())
    }

    /// Runs a command of `nacelle` with the node's configuration.
    pub fn nacelle(&self, arguments: &[&str]) -> ProgramOutput {
        let mut command = Command::new(&self.program);
        command.args(arguments).arg("--config").arg(self.directory.join("config.toml"));
        run(&mut command)
    }

    /// Returns a command of this node's `nacelle shell`, with its arguments.
    pub fn shell_command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(["shell", "--config"]).arg(self.directory.join("config.toml")).args(arguments);
        command
    }

    /// Runs a command of this node's `nacelle` that has to succeed, and returns its output as programs read it.
    pub fn nacelle_json(&self, arguments: &[&str]) -> Value {
        let output = self.nacelle(&[arguments, &["--output", "json"]].concat()).ok();
        serde_json::from_str(&output).expect("it is JSON")
    }

    /// Like `start`, by a service manager.
    pub fn start_with_manager(&mut self, manager: &ServiceManager) {
        self.daemon = Some(self.spawn_with_manager(manager));
        self.wait_until_answering();
    }

    /// Starts a daemon by a service manager and leaves it to the caller.
    pub fn spawn_with_manager(&self, manager: &ServiceManager) -> Child {
        self.spawn(manager.command_with_socket(|program| self.netns.command(program), &self.command_line()))
    }

    /// Returns the daemon's command line.
    fn command_line(&self) -> [OsString; 4] {
        let config = self.directory.join("config.toml");
        [self.program.clone().into(), "serve".into(), "--config".into(), config.into()]
    }

    fn spawn(&self, mut command: Command) -> Child {
        let log = File::options().create(true).append(true).open(self.directory.join("daemon.log")).expect("writable");
        command.stdout(log.try_clone().expect("a file can be duplicated")).stderr(log);
        command.spawn().expect("nsenter is installed")
    }

    fn wait_until_answering(&mut self) {
        eventually("the daemon answers", || {
            let ended = self.daemon.as_mut().and_then(|daemon| daemon.try_wait().ok().flatten());
            assert!(ended.is_none(), "the daemon ended: {}", self.log());
            (self.crictl.try_call(["version"]).code == 0).then_some(())
        });
    }

    /// Sends the daemon SIGTERM, waits for its end, and returns whether it exited cleanly.
    pub fn terminate(&mut self) -> bool {
        run_program("kill", ["-TERM", &self.daemon_pid().to_string()]).ok();
        let daemon = self.daemon.take();
        daemon.is_some_and(|mut daemon| daemon.wait().expect("the daemon is our child").success())
    }

    /// Stops the daemon and starts another program in its place, as an upgrade or a downgrade does.
    pub fn replace_daemon(&mut self, program: &Path) {
        assert!(self.terminate(), "the daemon exits cleanly: {}", self.log());
        self.program = program.to_owned();
        self.start();
    }

    /// Stops the daemon, lets `change` change the unmounted file system of its data, and starts the daemon again. No pod may run.
    pub fn change_disk(&mut self, change: impl FnOnce(&Path)) {
        assert!(self.terminate(), "the daemon exits cleanly: {}", self.log());
        let disk = self.disk.as_ref().expect("the node has a disk of its own");
        run_program("umount", [&disk.root]).ok();
        change(&disk.image);
        disk.mount();
        self.start();
    }

    /// Kills the daemon with SIGKILL and waits for its end.
    pub fn kill(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            daemon.kill().expect("the daemon is our child");
            daemon.wait().expect("the daemon is our child");
        }
    }

    /// Returns a new connection to the daemon, for CRI without crictl. Must be called in a tokio runtime.
    pub fn channel(&self) -> Channel {
        let socket = self.directory.join("nacelle.sock");
        Endpoint::from_static("http://nacelle").connect_with_connector_lazy(tower::service_fn(move |_| {
            let socket = socket.clone();
            async move { tokio::net::UnixStream::connect(socket).await.map(hyper_util::rt::TokioIo::new) }
        }))
    }

    /// Returns the PID of the daemon. nsenter has become the daemon by exec.
    pub fn daemon_pid(&self) -> u32 {
        self.daemon.as_ref().map_or(0, Child::id)
    }

    /// Returns the daemon's log.
    pub fn log(&self) -> String {
        fs::read_to_string(self.directory.join("daemon.log")).unwrap_or_default()
    }

    /// Returns the node's directory, with `root`, `run`, `cni`, `netns`, `logs`.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns the resources on the node that did not exist before the daemon started.
    pub fn leaked(&self) -> Vec<String> {
        Census::collect(&self.directory, &self.netns).added_since(&self.before)
    }

    /// Returns the PIDs of the VMs of pods: the QEMU processes, with our own VMM the pod processes, without guests the agents.
    pub fn vm_pids(&self) -> Vec<i32> {
        self.pids_matching(match engine().as_str() {
            "qemu" => "qemu",
            "host" => "nacelle-agent --host ",
            _ => "nacelle-pod --dir ",
        })
    }

    /// Returns the PIDs of the processes whose command line names this node's run directory and `word`.
    pub fn pids_matching(&self, word: &str) -> Vec<i32> {
        crate::census::processes(&self.directory.join("run"))
            .into_iter()
            .filter(|(_, line)| line.contains(word))
            .map(|(pid, _)| pid)
            .collect()
    }

    /// Pushes an image and pulls it; returns its reference.
    pub fn push_and_pull(&self, image: &crate::TestImage, name: &str) -> String {
        let reference = self.registry.push(image, name);
        self.crictl.call(["pull", &reference]);
        reference
    }

    /// Runs a command in the node's network namespace.
    pub fn run_in_netns(&self, program: &str, arguments: &[&str]) -> ProgramOutput {
        run(self.netns.command(program).args(arguments))
    }
}

impl Default for TestNode {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for TestNode {
    fn drop(&mut self) {
        let failing = std::thread::panicking();
        if failing {
            let log = self.log();
            let tail: Vec<_> = log.lines().rev().take(60).collect();
            eprintln!("--- the end of the daemon's log");
            tail.iter().rev().for_each(|line| eprintln!("{line}"));
            for file in crate::census::pod_logs(&self.directory) {
                eprintln!("--- {}", file.display());
                eprintln!("{}", fs::read_to_string(&file).unwrap_or_default());
            }
        }
        let mut leaked = Vec::new();
        if self.daemon.is_some() && engine() == "kvm" {
            // How many of the pods were clones is a figure of the whole suite.
            println!("templates: {}", self.templates(&["ls"]).stdout.lines().last().unwrap_or_default());
        }
        if self.daemon.is_some() {
            self.crictl.try_call(["rmp", "--all", "--force"]);
            let end = crate::run::wait_end();
            loop {
                leaked = self.leaked();
                if leaked.is_empty() || failing || std::time::Instant::now() > end {
                    break;
                }
                std::thread::sleep(std::time::Duration::from_millis(100));
            }
        }
        self.kill();
        for (pid, _) in crate::census::processes(&self.directory) {
            run_program("kill", ["-9", &pid.to_string()]);
        }
        for mount in crate::census::mounts(&self.directory).iter().rev() {
            run_program("umount", ["--lazy", mount]);
        }
        crate::census::remove_cgroup_parent(&self.directory);
        assert!(failing || leaked.is_empty(), "resources remain on the node after all pods were removed: {leaked:#?}");
    }
}

/// Removes files in layers over their directories, then executes the command behind `--`.
const HIDE_FILES: &str = r#"set -e; layers=$1; shift; mount -t tmpfs none "$layers"
while [ "$1" != -- ]; do
    over=$(dirname "$1"); layer=$layers/$(basename "$1"); mkdir -p "$layer/upper" "$layer/work"
    mount -t overlay none -o "lowerdir=$over,upperdir=$layer/upper,workdir=$layer/work" "$over"
    rm "$1"; shift
done; shift; exec "$@""#;

/// Returns the engine of all pods: `NACELLE_TEST_ENGINE`, or QEMU, which runs everywhere.
pub fn engine() -> String {
    std::env::var("NACELLE_TEST_ENGINE").unwrap_or_else(|_| "qemu".to_owned())
}

/// Returns whether containers can have limits: a guest always supports them; without a guest the node must delegate its
/// controllers to cgroup v2.
pub fn supports_limits() -> bool {
    let here = || fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").unwrap_or_default().contains("memory");
    engine() != "host" || here()
}

/// Debian's plugins, and one that delegates to them for several interfaces.
const PLUGINS: [&str; 3] =
    ["/opt/cni/bin", "/usr/lib/cni", concat!(env!("CARGO_MANIFEST_DIR"), "/../../shim/net/tests/plugins")];

/// Writes the configuration of Debian's plugins, with hostPort.
fn cni_config(directory: &Path, options: &NodeOptions) -> String {
    let data = directory.join("leases");
    let mut ranges = vec![json!([{"subnet": "10.88.0.0/24"}])];
    let mut routes = vec![json!({"dst": "0.0.0.0/0"})];
    if options.ipv6 {
        ranges.push(json!([{"subnet": "fd00:88::/64"}]));
        routes.push(json!({"dst": "::/0"}));
    }
    let bridge = json!({
        "type": if options.further.is_empty() { "bridge" } else { "nacelle-several" }, "further": options.further.join(" "),
        "bridge": "cni0", "isGateway": true, "ipMasq": false, "hairpinMode": true,
        "ipam": {"type": "host-local", "dataDir": data, "ranges": ranges, "routes": routes},
    });
    let portmap = json!({"type": "portmap", "capabilities": {"portMappings": true}, "snat": true});
    json!({"cniVersion": "1.0.0", "name": "e2e", "plugins": [bridge, portmap]}).to_string()
}

/// The default VM settings of tests.
pub const SMALL_VM: &str = "memory_mib = 128\nscratch_mib = 512\n";

/// The annotation with the checkpoint from which a pod continues; the default handler allows it.
pub const FROM_CHECKPOINT: &str = "vm.nacelle.dev/from-checkpoint";

/// Returns the configuration of a handler with the engine under test; `more` are further lines.
pub fn handler_config(name: &str, more: &str) -> String {
    let [kernel, initrd] = ["NACELLE_KERNEL", "NACELLE_INITRD"].map(crate::path_from_env);
    format!("[handlers.{name}]\nengine = {:?}\nkernel = {kernel:?}\ninitrd = {initrd:?}\n{more}\n", engine())
}

fn daemon_config(directory: &Path, registry: &TestRegistry, options: &NodeOptions) -> String {
    let path = |name: &str| directory.join(name).display().to_string();
    let mut text = format!(
        "[paths]\nroot = {:?}\nrun = {:?}\nsocket = {:?}\n\n[network]\ncni_conf_dir = {:?}\nnetns_dir = {:?}\ncni_bin_dirs = {PLUGINS:?}\n{}\n",
        path("root"),
        path("run"),
        path("nacelle.sock"),
        path("cni"),
        path("netns"),
        options.network,
    );
    text += &handler_config("nacelle", &format!("{SMALL_VM}allowed_annotations = [{FROM_CHECKPOINT:?}]\n"));
    text += &handler_config("other", SMALL_VM);
    text += "[handlers.host]\nengine = \"host\"\n\n";
    let special = match options.registry {
        RegistryKind::Http => "http = true".to_owned(),
        RegistryKind::HttpsWithPassword => format!("ca_file = {:?}", registry.ca_file()),
    };
    writeln!(text, "[images.registries.{:?}]\n{special}\n\n{}", registry.host(), options.extra).expect("a String");
    text
}
