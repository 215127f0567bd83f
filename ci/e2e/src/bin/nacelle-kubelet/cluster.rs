//! Runs the rest of a minimal cluster: etcd, an API server that authorizes every request, the replica set controller, kubectl.
//! There are no other controllers and no scheduler: the cases create the objects that those would create.

use crate::kubelet::{ADDRESS, NODE};
use crate::pods::{ObservedPod, container_status, wait_for};
use nacelle_e2e::node::Netns;
use nacelle_e2e::run::{ProgramOutput, run, run_with_input};
use nacelle_e2e::{TestNode, path_from_env};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

const ETCD: &str = "http://127.0.0.1:2379";
const SERVER: &str = "https://127.0.0.1:6443";
/// The token of an administrator, in a network of its own.
const TOKEN: &str = "only-this-test-has-access";

/// An API server, its store, and a controller.
pub struct TestCluster {
    netns: Netns,
    directory: PathBuf,
    processes: Vec<Child>,
}

impl TestCluster {
    /// Starts all processes and waits until they answer.
    pub fn start(node: &TestNode) -> Self {
        let directory = node.directory().join("cluster");
        fs::create_dir_all(&directory).expect("the node's directory is writable");
        let mut cluster = Self { netns: node.netns.clone(), directory, processes: Vec::new() };
        cluster.spawn("ETCD", |etcd, directory| {
            etcd.arg("--data-dir").arg(directory.join("etcd")).arg("--unsafe-no-fsync").args([
                "--listen-client-urls",
                ETCD,
                "--advertise-client-urls",
                ETCD,
                "--listen-peer-urls",
                "http://127.0.0.1:2380",
            ]);
        });
        let key = cluster.directory.join("tokens.key");
        run(Command::new("openssl").args(["genrsa", "-out"]).arg(&key).arg("2048")).ok();
        let users = cluster.directory.join("users.csv");
        fs::write(&users, format!("{TOKEN},all,all,system:masters\n")).expect("the directory is writable");
        cluster.spawn("APISERVER", |server, directory| {
            server
                .args([&format!("--etcd-servers={ETCD}"), "--bind-address=127.0.0.1", "--secure-port=6443"])
                .arg(format!("--advertise-address={ADDRESS}"))
                .arg(format!("--cert-dir={}", directory.join("certificates").display()))
                .arg(format!("--token-auth-file={}", users.display()))
                .args([
                    "--authorization-mode=AlwaysAllow",
                    "--allow-privileged",
                    "--service-cluster-ip-range=10.96.0.0/16",
                ])
                .args([
                    "--kubelet-preferred-address-types=InternalIP",
                    "--service-account-issuer=https://cluster.example",
                ])
                .arg(format!("--service-account-key-file={}", key.display()))
                .arg(format!("--service-account-signing-key-file={}", key.display()));
        });
        cluster.write_kubeconfig();
        wait_for("the API server is ready", || {
            for process in &mut cluster.processes {
                let ended = process.try_wait().ok().flatten();
                assert!(ended.is_none(), "{ended:?}: {}", cluster.directory.display());
            }
            (cluster.get("/readyz").stdout == "ok").then_some(())
        });
        cluster.spawn("CONTROLLERS", |controllers, directory| {
            controllers.arg(format!("--kubeconfig={}", directory.join("kubeconfig").display())).args([
                "--controllers=replicaset-controller",
                "--leader-elect=false",
                "--bind-address=127.0.0.1",
            ]);
        });
        // The objects that other controllers would create.
        cluster
            .apply(&json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}).to_string());
        let ca = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "kube-root-ca.crt"}, "data": {"ca.crt": "none"},
        });
        cluster.apply(&ca.to_string());
        cluster
    }

    fn spawn(&mut self, name: &str, with: impl FnOnce(&mut Command, &PathBuf)) {
        let log = File::create(self.directory.join(format!("{name}.log"))).expect("the directory is writable");
        let mut command = self.netns.command(path_from_env(name));
        with(&mut command, &self.directory);
        let log_too = log.try_clone().expect("a file can be duplicated");
        let child = command.stdin(Stdio::null()).stdout(log_too).stderr(log).spawn().expect("nsenter is installed");
        self.processes.push(child);
    }

    /// Returns the path of kubelet's kubeconfig.
    pub fn kubeconfig(&self) -> PathBuf {
        self.directory.join("kubeconfig")
    }

    fn write_kubeconfig(&self) {
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "here",
            "clusters": [{"name": "here", "cluster": {"server": SERVER, "insecure-skip-tls-verify": true}}],
            "users": [{"name": "all", "user": {"token": TOKEN}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "all"}}],
        });
        fs::write(self.kubeconfig(), config.to_string()).expect("the directory is writable");
    }

    /// Returns a kubectl command.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.netns.command(path_from_env("KUBECTL"));
        command
            .arg(format!("--kubeconfig={}", self.kubeconfig().display()))
            .args(arguments)
            .env("HOME", &self.directory);
        command
    }

    /// Runs kubectl and returns its output and exit code.
    pub fn kubectl(&self, arguments: &[&str]) -> ProgramOutput {
        run(&mut self.command(arguments))
    }

    /// Applies a manifest.
    #[track_caller]
    pub fn apply(&self, manifest: &str) {
        run_with_input(&mut self.command(&["apply", "-f", "-"]), manifest.as_bytes()).ok();
    }

    /// Sends the API server a GET request.
    fn get(&self, path: &str) -> ProgramOutput {
        let token = format!("Authorization: Bearer {TOKEN}");
        run(self.netns.command("curl").args(["-ksf", "--max-time", "60", "-H", &token, &format!("{SERVER}{path}")]))
    }

    /// Returns an object, if it exists.
    pub fn object(&self, path: &str) -> Option<Value> {
        serde_json::from_str(&self.get(path).stdout).ok()
    }

    /// Returns the Node object.
    pub fn node_object(&self) -> Option<Value> {
        self.object(&format!("/api/v1/nodes/{NODE}"))
    }

    /// Creates the pod of a manifest and binds it to the node.
    #[track_caller]
    pub fn create_pod(&self, name: &str, manifest: &str) -> ApiPod<'_> {
        let pod = ApiPod { cluster: self, name: name.to_owned() };
        self.apply(manifest);
        self.bind_pod(name).ok();
        pod
    }

    /// Binds a pod to the node. A pod that is bound already is rejected.
    pub fn bind_pod(&self, name: &str) -> ProgramOutput {
        let binding = json!({
            "apiVersion": "v1", "kind": "Binding", "metadata": {"name": name},
            "target": {"apiVersion": "v1", "kind": "Node", "name": NODE},
        });
        let path = format!("/api/v1/namespaces/default/pods/{name}/binding");
        run_with_input(&mut self.command(&["create", "--raw", &path, "-f", "-"]), binding.to_string().as_bytes())
    }
}

/// Replica sets whose pods have the label `app` with the name of the set.
impl TestCluster {
    /// Returns the names of the live pods of a set.
    pub fn members(&self, set: &str) -> BTreeSet<String> {
        let path = format!("/api/v1/namespaces/default/pods?labelSelector=app%3D{set}");
        let pods = self.object(&path).unwrap_or_default();
        let living =
            pods["items"].as_array().into_iter().flatten().filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
        living.filter_map(|pod| pod["metadata"]["name"].as_str().map(str::to_owned)).collect()
    }

    /// Binds the pods of a set in place of a scheduler until the set has this number of them, all Ready, and returns their names.
    #[track_caller]
    pub fn wait_for_members(&self, set: &str, wanted: u64) -> BTreeSet<String> {
        wait_for(&format!("{wanted} pods of {set} are Ready"), || {
            for name in self.members(set) {
                self.bind_pod(&name);
            }
            let object = self.object(&format!("/apis/apps/v1/namespaces/default/replicasets/{set}"))?;
            let (found, status) = (self.members(set), &object["status"]);
            (status["readyReplicas"] == wanted && status["replicas"] == wanted && found.len() as u64 == wanted)
                .then_some(found)
        })
    }

    /// Removes the pods of a set, and the set.
    #[track_caller]
    pub fn delete_set(&self, set: &str) {
        self.kubectl(&["scale", "replicaset", set, "--replicas=0"]).ok();
        wait_for("all are gone", || self.members(set).is_empty().then_some(()));
        self.kubectl(&["delete", "replicaset", set]).ok();
    }
}

impl Drop for TestCluster {
    fn drop(&mut self) {
        for process in self.processes.iter_mut().rev() {
            // It may have ended already.
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// A pod of the API server; dropping this deletes it.
pub struct ApiPod<'c> {
    cluster: &'c TestCluster,
    name: String,
}

impl ObservedPod for ApiPod<'_> {
    fn name(&self) -> &str {
        &self.name
    }

    /// Returns the pod from the API server.
    fn object(&self) -> Option<Value> {
        self.cluster.object(&format!("/api/v1/namespaces/default/pods/{}", self.name))
    }
}

impl ApiPod<'_> {
    /// Waits until a container of the pod waits for this reason, and returns the message.
    #[track_caller]
    pub fn wait_for_reason(&self, name: &str, reason: &str) -> String {
        self.wait_until(reason, |pod| {
            let waiting = &container_status(pod, name)["state"]["waiting"];
            (waiting["reason"] == reason).then(|| waiting["message"].as_str().unwrap_or_default().to_owned())
        })
    }

    /// Runs a shell script in the pod's first container by `kubectl exec` and returns the output. Panics if it fails.
    #[track_caller]
    pub fn shell(&self, script: &str) -> String {
        self.try_shell(script).ok()
    }

    /// Like `shell`, but returns the failure.
    pub fn try_shell(&self, script: &str) -> ProgramOutput {
        self.cluster.kubectl(&["exec", &self.name, "--", "sh", "-c", script])
    }

    /// Deletes the pod and waits until it is gone.
    #[track_caller]
    pub fn delete(self) {
        self.cluster.kubectl(&["delete", "pod", &self.name, "--timeout=240s"]).ok();
    }
}

impl Drop for ApiPod<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let described = self.cluster.kubectl(&["describe", "pod", &self.name]);
            eprintln!("--- {}{}", described.stdout, described.stderr);
        }
        self.cluster.kubectl(&["delete", "pod", &self.name, "--ignore-not-found", "--wait=false"]);
    }
}
