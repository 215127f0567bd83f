//! Runs the kubelet process: its configuration, its start and end, its HTTP APIs.

use nacelle_e2e::node::Netns;
use nacelle_e2e::run::{ProgramOutput, run, run_program};
use nacelle_e2e::{TestNode, eventually, path_from_env};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

/// The node's name; the names of static pods end with it.
pub const NODE: &str = "node";
/// The node's address, on an interface of its own.
pub const ADDRESS: &str = "192.0.2.10";
/// The read-only port.
const READ_ONLY_PORT: u16 = 10255;
/// The authenticated port, which this kubelet opens to every client on its loopback interface.
pub const AUTHENTICATED_PORT: u16 = 10250;
const INTERFACE: &str = "node0";

/// A kubelet without an API server: it runs the static pods of a manifest directory.
pub struct Kubelet {
    netns: Netns,
    directory: PathBuf,
    /// The configuration of all cases but those that change it for themselves.
    configuration: Value,
    process: Option<Child>,
    kubeconfig: Option<PathBuf>,
}

impl Kubelet {
    /// Starts kubelet on this node and waits until it is healthy.
    pub fn start(node: &TestNode) -> Self {
        let directory = node.directory().join("kubelet");
        fs::create_dir_all(directory.join("manifests")).expect("the node's directory is writable");
        let configuration = kubelet_configuration(&directory, &node.directory().join("nacelle.sock"));
        for arguments in [
            &["link", "add", INTERFACE, "type", "bridge"][..],
            &["addr", "add", &format!("{ADDRESS}/24"), "dev", INTERFACE],
            &["link", "set", INTERFACE, "up"],
            &["route", "add", "default", "dev", INTERFACE],
        ] {
            node.run_in_netns("ip", arguments).ok();
        }
        for group in cgroup_paths(&directory) {
            fs::create_dir(&group).expect("control groups can be made");
        }
        // One after the other, because controllers that the node does not delegate are not needed. cgroup v1 has no such file.
        for controller in ["cpu", "cpuset", "memory", "pids", "io", "hugetlb"] {
            let _ = fs::write("/sys/fs/cgroup/cgroup.subtree_control", format!("+{controller}"));
        }
        let mut kubelet = Self { netns: node.netns.clone(), directory, configuration, process: None, kubeconfig: None };
        kubelet.restart_with(&[]);
        kubelet
    }

    /// Starts kubelet again after [`kill`](Self::kill).
    pub fn start_process(&mut self) {
        let log = File::options().create(true).append(true).open(self.log_file()).expect("the directory is writable");
        let process = self
            .netns
            .command(path_from_env("KUBELET"))
            .arg(format!("--config={}", self.directory.join("config.yaml").display()))
            .arg(format!("--hostname-override={NODE}"))
            .arg(format!("--node-ip={ADDRESS}"))
            .args(self.kubeconfig.iter().map(|path| format!("--kubeconfig={}", path.display())))
            .arg("--v=2")
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a file can be duplicated"))
            .stderr(log)
            .spawn()
            .expect("nsenter is installed");
        self.process = Some(process);
        eventually("kubelet is healthy", || {
            let ended = self.process.as_mut().and_then(|process| process.try_wait().ok().flatten());
            assert!(ended.is_none(), "kubelet ended: {}", self.log_lines_with(""));
            (self.curl(&["-f", &format!("http://127.0.0.1:{READ_ONLY_PORT}/healthz")]).stdout == "ok").then_some(())
        });
    }

    /// Restarts kubelet with these fields in its configuration, in place of those of the same names.
    pub fn restart_with(&mut self, changes: &[(&str, Value)]) {
        let mut configuration = self.configuration.clone();
        for (name, value) in changes {
            configuration[*name] = value.clone();
        }
        self.kill();
        fs::write(self.directory.join("config.yaml"), configuration.to_string()).expect("the directory is writable");
        self.start_process();
    }

    /// Restarts kubelet with the API server of this kubeconfig.
    pub fn join_cluster(&mut self, kubeconfig: PathBuf) {
        self.kubeconfig = Some(kubeconfig);
        self.kill();
        self.start_process();
    }

    /// Kills kubelet with SIGKILL.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().expect("kubelet is our child");
            process.wait().expect("kubelet is our child");
        }
    }

    /// Returns kubelet's PID. nsenter has become kubelet by exec.
    pub fn pid(&self) -> u32 {
        self.process.as_ref().map_or(0, Child::id)
    }

    /// Returns the control groups that kubelet has for the pod with this UID: one in v2, or one in each hierarchy of v1.
    pub fn pod_cgroups(&self, uid: &str) -> Vec<PathBuf> {
        let parents = cgroup_paths(&self.directory).into_iter().map(|group| group.join("kubepods"));
        let of_classes = parents.flat_map(|pods| [pods.clone(), pods.join("burstable"), pods.join("besteffort")]);
        of_classes.map(|group| group.join(format!("pod{uid}"))).filter(|group| group.is_dir()).collect()
    }

    /// Returns the directory of the manifests.
    pub fn manifests(&self) -> PathBuf {
        self.directory.join("manifests")
    }

    fn log_file(&self) -> PathBuf {
        self.directory.join("kubelet.log")
    }

    /// Returns the last lines of kubelet's log that contain `word`.
    pub fn log_lines_with(&self, word: &str) -> String {
        let log = fs::read_to_string(self.log_file()).unwrap_or_default();
        let mut lines: Vec<&str> = log.lines().rev().filter(|line| line.contains(word)).take(40).collect();
        lines.reverse();
        lines.join("\n")
    }

    fn curl(&self, arguments: &[&str]) -> ProgramOutput {
        run(self.netns.command("curl").args(["-sS", "--max-time", "120"]).args(arguments))
    }

    /// Sends a GET request to the read-only port.
    #[track_caller]
    pub fn get(&self, path: &str) -> String {
        self.curl(&["-f", &format!("http://127.0.0.1:{READ_ONLY_PORT}{path}")]).ok()
    }

    /// Like `get`, parsed as JSON.
    #[track_caller]
    pub fn get_json(&self, path: &str) -> Value {
        let text = self.get(path);
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// Sends a request with this method and path to the authenticated port.
    pub fn request(&self, method: &str, path: &str) -> ProgramOutput {
        self.curl(&["-k", "--fail-with-body", "-X", method, &format!("https://127.0.0.1:{AUTHENTICATED_PORT}{path}")])
    }

    /// Returns the node's network namespace.
    pub fn netns(&self) -> &Netns {
        &self.netns
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.kill();
        run(self.netns.command("ip").args(["link", "delete", INTERFACE]));
        for group in cgroup_paths(&self.directory) {
            remove_cgroups(&group);
        }
    }
}

/// Returns the cgroups that are the parent of kubelet's pods and of Nacelle's: one in v2, or one in each hierarchy of v1.
fn cgroup_paths(directory: &Path) -> Vec<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    let trees = if root.join("cgroup.controllers").exists() {
        vec![root.to_owned()]
    } else {
        let trees = fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.path());
        // Links lead to a hierarchy that is in the list already.
        trees.filter(|tree| tree.join("cgroup.procs").exists() && !tree.is_symlink()).collect()
    };
    trees.into_iter().map(|tree| tree.join(cgroup_name(directory))).collect()
}

/// Returns the name of the cgroup.
fn cgroup_name(directory: &Path) -> String {
    let node = directory.parent().expect("kubelet's directory lies in the node's");
    nacelle_e2e::census::cgroup_parent(node).trim_start_matches('/').to_owned()
}

/// Removes kubelet's remaining cgroups. They are empty; one that is in use is found by the node's census.
fn remove_cgroups(group: &Path) {
    for entry in fs::read_dir(group).into_iter().flatten().flatten().filter(|entry| entry.path().is_dir()) {
        remove_cgroups(&entry.path());
    }
    let _ = fs::remove_dir(group);
}

/// True if this kubelet is to use its feature gate EventedPLEG. With it kubelet 1.37.2 starts sidecars that run already again and
/// again, with every runtime that sets PodSandboxStatusResponse.timestamp: it takes no container for one of the current sandbox.
pub fn uses_events() -> bool {
    !run_program(path_from_env("KUBELET"), ["--version"]).ok().contains(" v1.37.")
}

/// The configuration of a dedicated node, except for settings that make tests fast and evictions that must not happen.
fn kubelet_configuration(directory: &Path, socket: &Path) -> Value {
    let endpoint = format!("unix://{}", socket.display());
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": endpoint,
        "cgroupRoot": format!("/{}", cgroup_name(directory)),
        "failCgroupV1": false,
        "staticPodPath": directory.join("manifests"),
        "volumePluginDir": directory.join("plugins"),
        "fileCheckFrequency": "1s",
        "syncFrequency": "5s",
        "readOnlyPort": READ_ONLY_PORT,
        "authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": false}},
        "authorization": {"mode": "AlwaysAllow"},
        "failSwapOn": false,
        "serializeImagePulls": false,
        "containerLogMaxSize": "64Ki",
        "containerLogMaxFiles": 3,
        "containerLogMonitorInterval": "3s",
        "evictionHard": {"memory.available": "1Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "crashLoopBackOff": {"maxContainerRestartPeriod": "4s"},
        "featureGates": {"EventedPLEG": uses_events(), "PodAndContainerStatsFromCRI": true, "KubeletCrashLoopBackOffMax": true},
    })
}
