//! Provides a node with Nacelle and a kubelet, and checks it at the end.

use crate::cluster::TestCluster;
use crate::kubelet::Kubelet;
use crate::pods::{has_condition, wait_for};
use nacelle_e2e::node::{NodeOptions, handler_config};
use nacelle_e2e::{TestImage, TestNode, eventually};
use std::fs;
use std::path::PathBuf;

/// The image of almost all examples; a registry on loopback serves it in place of Docker's.
const EXAMPLE_IMAGE: &str = "library/busybox:1.36";

/// The annotations of the machine pods in docs/examples.
const ANNOTATIONS: [&str; 6] = ["kind", "name", "memory", "disks", "run-strategy", "power"];

/// A node whose kubelet runs its pods on Nacelle.
pub struct KubeletFixture {
    /// Nacelle, the registry, the network.
    pub node: TestNode,
    /// kubelet.
    pub kubelet: Kubelet,
    /// The cluster, once the node has joined it.
    pub cluster: Option<TestCluster>,
}

impl KubeletFixture {
    /// Starts everything and waits until kubelet is healthy.
    pub fn new() -> Self {
        let mirror = |host: &str| format!("[images.registries.{host:?}]\nmirrors = [\"http://127.0.0.1:5000\"]\n\n");
        let policy = "[sandbox]\nhost_namespaces = \"run-on-host\"\n\n";
        let disks = handler_config(
            "disks",
            "memory_mib = 128\nempty_dir = \"disk\"\n\
             allowed_annotations = [\"vm.nacelle.dev/empty-dir-limits\", \"vm.nacelle.dev/spec\", \"vm.nacelle.dev/applied\"]\n",
        );
        let allowed: Vec<String> = ANNOTATIONS.iter().map(|name| format!("vm.nacelle.dev/{name}")).collect();
        let machines = handler_config("machines", &format!("allowed_annotations = {allowed:?}\n"));
        let growing = handler_config("growing", "memory_mib = 128\nmax_vcpus = 3\nmax_memory_mib = 448\n");
        let extra =
            [policy.to_owned(), disks, machines, growing, mirror("docker.io"), mirror("registry.k8s.io")].concat();
        let node = TestNode::with_options(NodeOptions { extra, ipv6: false, ..NodeOptions::default() });
        node.registry.push(&TestImage::busybox(), EXAMPLE_IMAGE);
        let kubelet = Kubelet::start(&node);
        Self { node, kubelet, cluster: None }
    }

    /// Starts a cluster, and restarts kubelet as its node.
    pub fn join_cluster(&mut self) {
        let cluster = TestCluster::start(&self.node);
        self.kubelet.join_cluster(cluster.kubeconfig());
        wait_for("the node is Ready", || has_condition(&cluster.node_object()?, "Ready").then_some(()));
        self.cluster = Some(cluster);
    }

    /// Creates an empty directory of the node for pods.
    pub fn directory(&self, name: &str) -> PathBuf {
        let directory = self.node.directory().join(name);
        fs::create_dir_all(&directory).expect("the node's directory is writable");
        directory
    }

    /// Copies the logs of both daemons to the directory `KUBELET_LOGS`.
    fn keep_logs(&self) {
        let Some(directory) = std::env::var_os("KUBELET_LOGS").map(PathBuf::from) else { return };
        let engine = nacelle_e2e::node::engine();
        for (log, name) in [("kubelet/kubelet.log", "kubelet"), ("daemon.log", "daemon")] {
            let kept =
                fs::copy(self.node.directory().join(log), directory.join(format!("kubelet-{engine}-{name}.log")));
            kept.expect("the directory for logs is writable");
        }
    }

    /// Stops kubelet after it has cleaned up all pods, and checks what it left.
    pub fn finish(self, keep: bool, all_passed: bool) {
        if keep {
            let (directory, pid) = (self.node.directory().display(), self.node.daemon_pid());
            eprintln!("kept: {directory}, daemon {pid}, kubelet {}; end with ctrl-c, or kill this", self.kubelet.pid());
            loop {
                std::thread::park();
            }
        }
        if all_passed {
            eventually("kubelet has removed all pods", || {
                let pods = self.node.crictl.call(["pods", "-q"]);
                (pods.is_empty()).then_some(())
            });
            eventually("kubelet has removed all pods' directories", || {
                let pods = fs::read_dir("/var/lib/kubelet/pods").expect("kubelet made it").count();
                (pods == 0).then_some(())
            });
        }
        self.keep_logs();
        drop(self.kubelet);
        drop(self.cluster);
        // Dropping the node fails if anything of a pod is leaked.
        drop(self.node);
    }
}
