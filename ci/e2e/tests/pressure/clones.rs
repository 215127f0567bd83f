//! Runs many pods of engine `kvm`, all clones of one template, that write their memory at the same time.

use nacelle_e2e::census::cgroup_parent;
use nacelle_e2e::cri::{container_config, exec, pod_config};
use nacelle_e2e::{CriClient, CriPod, TestNode};
use nacelle_proto::cri;
use sha2::{Digest, Sha256};
use tokio::task::JoinSet;
use tonic::Status;
use tonic::transport::Channel;

/// How many pods start at a time.
const STARTS: usize = 8;

/// A running clone, with a container that sleeps.
#[derive(Clone)]
pub struct MemoryClone {
    /// Its number, which its data contain.
    pub number: u32,
    pub pod: CriPod,
    pub container: String,
    channel: Channel,
}

impl MemoryClone {
    /// Starts a pod in the cgroup of all pods whose container has this OOM score adjustment.
    async fn start(channel: Channel, mut config: cri::PodSandboxConfig, image: &str, number: u32) -> MemoryClone {
        let mut cri = CriClient::new(channel.clone());
        // Without an overhead, a VM does not share a cgroup that is too small for it.
        let linux = config.linux.get_or_insert_default();
        linux.overhead = Some(cri::LinuxContainerResources { memory_limit_in_bytes: 256 << 20, ..Default::default() });
        let run = cri::RunPodSandboxRequest { config: Some(config.clone()), runtime_handler: String::new() };
        let id = cri.run_pod_sandbox(run).await.expect("a pod starts").into_inner().pod_sandbox_id;
        let pod = CriPod { id, config };
        let mut container = container_config("sleeper", image, &["sleep", "36000"]);
        // The first is a Guaranteed pod, the others are BestEffort.
        let oom_score_adj = if number == 0 { -997 } else { 1000 };
        let resources = cri::LinuxContainerResources { oom_score_adj, ..Default::default() };
        container.linux = Some(cri::LinuxContainerConfig { resources: Some(resources), ..Default::default() });
        let container = pod.start_container(&mut cri, container).await.expect("a container starts");
        MemoryClone { number, pod, container, channel }
    }

    /// Runs a script in the container, which has to succeed, and returns its output.
    ///
    /// # Errors
    /// The daemon's, for instance that the VM has ended.
    pub async fn exec(&self, script: &str) -> Result<String, Status> {
        let output = exec(&mut CriClient::new(self.channel.clone()), &self.container, &["sh", "-c", script], 0).await?;
        let [stdout, stderr] =
            [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
        assert_eq!((output.exit_code, &*stderr), (0, ""), "clone {}: {stdout}", self.number);
        Ok(stdout.trim_end().to_owned())
    }

    /// Returns the script that writes a block of 4 MiB of this clone's own data to its scratch disk. Doubling takes few processes.
    pub fn block_script(&self) -> String {
        let number = self.number;
        format!(
            "set -e; cd /; line='clone {number:09}'; text=\"$line
\"; for i in $(seq 12); do text=$text$text; done; printf %s \"$text\" >block
             for i in $(seq 6); do cat block block >next; mv next block; done"
        )
    }

    /// Returns the script that appends `mib` MiB, a multiple of 4, of such blocks to a file in `/dev/shm`.
    pub fn write_script(&self, mib: u64, file: &str) -> String {
        format!("set -e; for i in $(seq {}); do cat /block; done >>/dev/shm/{file}", mib / 4)
    }

    /// Returns the SHA-256 digest, in hexadecimal, of `mib` MiB of such blocks.
    pub fn digest(&self, mib: u64) -> String {
        let block = format!("clone {:09}\n", self.number).repeat(1 << 18);
        let mut digest = Sha256::new();
        (0..mib / 4).for_each(|_| digest.update(&block));
        digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Starts clones with these numbers, some at a time, in the order of the numbers.
pub async fn start_clones(node: &TestNode, image: &str, numbers: std::ops::Range<u32>) -> Vec<MemoryClone> {
    let mut starts = JoinSet::new();
    let mut clones = Vec::new();
    for number in numbers {
        if starts.len() == STARTS {
            clones.extend(starts.join_next().await.map(|started| started.expect("a pod starts")));
        }
        let mut config = pod_config("e2e", &format!("clone-{number}"), &node.directory().join("logs"));
        config.linux =
            Some(cri::LinuxPodSandboxConfig { cgroup_parent: cgroup_parent(node.directory()), ..Default::default() });
        let (channel, image) = (node.channel(), image.to_owned());
        starts.spawn(async move { MemoryClone::start(channel, config, &image, number).await });
    }
    clones.extend(starts.join_all().await);
    clones.sort_by_key(|one| one.number);
    clones
}

/// Runs a script in all clones at the same time, and returns the results in the order of the clones.
pub async fn exec_in_all(
    clones: &[MemoryClone],
    script: impl Fn(&MemoryClone) -> String,
) -> Vec<Result<String, Status>> {
    let mut execs = JoinSet::new();
    for (place, one) in clones.iter().enumerate() {
        let (one, script) = (one.clone(), script(one));
        execs.spawn(async move { (place, one.exec(&script).await) });
    }
    let mut results = execs.join_all().await;
    results.sort_by_key(|(place, _)| *place);
    results.into_iter().map(|(_, result)| result).collect()
}
