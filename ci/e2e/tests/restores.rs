//! Tests RestorePod: pods that continue from the checkpoint of another pod. Only engine `kvm` restores pods.

use nacelle_e2e::cri::{self, CriClient, CriPod, checkpoint, container_config, pod_config, restore};
use nacelle_e2e::node::{FROM_CHECKPOINT, NodeOptions, engine};
use nacelle_e2e::run::{block_on, run_program};
use nacelle_e2e::{TestImage, TestNode, eventually};
use nacelle_proto::cri::{
    ContainerConfig, ContainerState, ContainerStatusRequest, DnsConfig, ListContainersRequest, ListPodSandboxRequest,
    Mount, PodSandboxConfig, PodSandboxStatusRequest, RemoveContainerRequest, RunPodSandboxRequest,
    StartContainerRequest, StopContainerRequest,
};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tonic::{Code, Status};

const LIMIT: Duration = Duration::from_secs(120);

/// Counts in its output, in a file on the scratch disk, and in an emptyDir in memory. Each line has a mark that is in the memory of this
/// process alone. Beside that it keeps a connection to another pod, and notes its end.
const COUNTER: &str = "mark=$(head -c 12 /dev/urandom | od -An -tx1 | tr -d ' \n'); i=0; mkfifo /fifo; \
    (sleep 1000000 >/fifo & nc $PEER 7000 </fifo >/dev/null; echo ended >/connection) & \
    while :; do i=$((i + 1)); echo $mark $i; echo $i >>/count; echo $i >/memory/count; usleep 20000; done";

/// Prints the number in the emptyDir. The file is empty while the counter writes it.
const MEMORY_COUNT: &str = "until read count </memory/count; do :; done; echo $count";

/// Serves a page.
const SERVER: &str = "mkdir /www; echo page >/www/index.html; exec httpd -f -p 8080 -h /www";

/// The volumes of one pod, with the test in place of kubelet: an emptyDir in memory, a configMap, the hosts of the pod, and the termination
/// log of the counter. Dropping them unmounts the emptyDir.
struct Volumes {
    memory: PathBuf,
    settings: PathBuf,
    hosts: PathBuf,
    log: PathBuf,
}

impl Volumes {
    fn new(node: &TestNode, uid: &str, setting: &str) -> Volumes {
        let pod = node.directory().join("kubelet/pods").join(uid);
        let (volumes, hosts, log) =
            (pod.join("volumes"), pod.join("etc-hosts"), pod.join("containers/counter/0a1b2c3d"));
        let memory = volumes.join("kubernetes.io~empty-dir/memory");
        let settings = volumes.join("kubernetes.io~configmap/settings");
        // kubelet never uses the name of such a directory twice.
        let data = format!("..{uid}");
        for directory in [&memory, &settings.join(&data), &pod.join("containers/counter")] {
            fs::create_dir_all(directory).expect("the node's directory is writable");
        }
        for (file, text) in [(&hosts, format!("10.99.0.9 {setting}\n")), (&log, String::new())] {
            fs::write(file, text).expect("the volume is ours");
        }
        run_program("mount", ["-t", "tmpfs", "none", &memory.display().to_string()]).ok();
        fs::write(settings.join(&data).join("key"), setting).expect("the volume is ours");
        symlink(&data, settings.join("..data")).expect("the volume is ours");
        symlink("..data/key", settings.join("key")).expect("the volume is ours");
        Volumes { memory, settings, hosts, log }
    }

    /// Returns the mounts that several containers have.
    fn mounts(&self) -> Vec<Mount> {
        vec![
            mount(&self.memory, "/memory", false),
            mount(&self.settings, "/settings", true),
            mount(&self.hosts, "/kubelet-hosts", false),
        ]
    }
}

fn mount(host: &Path, container_path: &str, readonly: bool) -> Mount {
    Mount {
        host_path: host.display().to_string(),
        container_path: container_path.to_owned(),
        readonly,
        ..Mount::default()
    }
}

impl Drop for Volumes {
    fn drop(&mut self) {
        let done = run_program("umount", [&self.memory]);
        assert!(std::thread::panicking() || done.code == 0, "{done:?}");
    }
}

/// A pod with the containers `counter` and `server`.
struct Counting {
    pod: CriPod,
    containers: BTreeMap<String, String>,
    volumes: Volumes,
}

/// A node with a checkpoint of a pod, which runs on, and whose counter has a connection to a second pod.
struct World {
    node: TestNode,
    image: String,
    client: CriClient,
    peer: CriPod,
    peer_address: String,
    saved: Counting,
    checkpoint: PathBuf,
}

impl World {
    async fn new() -> World {
        let node = TestNode::with_options(NodeOptions { ipv6: false, ..NodeOptions::default() });
        let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
        let mut client = CriClient::new(node.channel());
        let peer = CriPod::run(&mut client, "peer", node.directory()).await.expect("a pod");
        let echo = container_config("echo", &image, &["nc", "-ll", "-p", "7000", "-e", "cat"]);
        peer.start_container(&mut client, echo).await.expect("a container");
        let peer_address = address(&mut client, &peer).await;

        let pod = CriPod::run(&mut client, "saved", node.directory()).await.expect("a pod");
        let volumes = Volumes::new(&node, "saved", "old");
        let mut containers = BTreeMap::new();
        for config in configs(&image, &peer_address, &volumes) {
            let name = config.metadata.as_ref().expect("a name").name.clone();
            let id = pod.start_container(&mut client, config).await.expect("a container");
            containers.insert(name, id);
        }
        let checkpoint = node.directory().join("checkpoint");
        let saved = Counting { pod, containers, volumes };
        let mut world = World { node, image, client, peer, peer_address, saved, checkpoint };
        eventually("the counter has a connection", || (world.numbers("saved").len() > 20).then_some(()));
        world.page_of(&world.saved.pod.clone()).await;
        let path = world.checkpoint.clone();
        let saved = world.saved.pod.clone();
        let ids: Vec<String> = world.saved.containers.values().cloned().collect();
        world.save(&saved, &ids, &path).await.expect("to save the pod");
        world
    }

    async fn save(&mut self, pod: &CriPod, ids: &[String], output: &Path) -> Result<(), Status> {
        fs::create_dir(output).expect("the node's directory is writable");
        let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
        checkpoint(&mut self.client, pod, &ids, output, LIMIT).await
    }

    /// Returns the configuration of a pod that continues from the checkpoint.
    fn pod_config(&self, name: &str) -> PodSandboxConfig {
        let servers = vec!["10.99.0.7".to_owned()];
        PodSandboxConfig {
            hostname: name.to_owned(),
            dns_config: Some(DnsConfig { servers, ..DnsConfig::default() }),
            ..pod_config("e2e", name, self.node.directory())
        }
    }

    /// Restores the pod from a checkpoint under this name.
    async fn restore(&mut self, from: &Path, name: &str) -> Result<Counting, Status> {
        let volumes = Volumes::new(&self.node, name, name);
        let configs = configs(&self.image, &self.peer_address, &volumes);
        let config = self.pod_config(name);
        let (pod, containers) = restore(&mut self.client, from, "", config, &configs, LIMIT).await?;
        Ok(Counting { pod, containers, volumes })
    }

    /// Runs a pod that names a checkpoint, as kubelet does: an init container runs to its end before the others are created and started.
    async fn run_from(&mut self, checkpoint: &str, name: &str) -> Counting {
        let mut config = self.pod_config(name);
        config.annotations.insert(FROM_CHECKPOINT.to_owned(), checkpoint.to_owned());
        let volumes = Volumes::new(&self.node, name, name);
        let run = RunPodSandboxRequest { config: Some(config.clone()), runtime_handler: String::new() };
        let id = self.client.run_pod_sandbox(run).await.expect("a pod").into_inner().pod_sandbox_id;
        let pod = CriPod { id, config };
        let init = ContainerConfig {
            mounts: vec![mount(&volumes.settings, "/settings", true)],
            log_path: "init.log".to_owned(),
            ..container_config("init", &self.image, &["sh", "-c", "cat /settings/key; ls /memory"])
        };
        pod.start_container(&mut self.client, init).await.expect("a new container");
        let log = self.node.directory().join(name).join("init.log");
        eventually("the init container ends", || fs::read_to_string(&log).ok().filter(|log| log.contains("/memory")));
        let mut containers = BTreeMap::new();
        for config in configs(&self.image, &self.peer_address, &volumes) {
            let name = config.metadata.as_ref().expect("a name").name.clone();
            let id = pod.start_container(&mut self.client, config).await.expect("a container");
            containers.insert(name, id);
        }
        Counting { pod, containers, volumes }
    }

    async fn start(&mut self, pod: &Counting, name: &str) {
        let container_id = pod.containers[name].clone();
        self.client.start_container(StartContainerRequest { container_id }).await.expect("to start");
    }

    async fn state(&mut self, pod: &Counting, name: &str) -> ContainerState {
        let container_id = pod.containers[name].clone();
        let status = self.client.container_status(ContainerStatusRequest { container_id, verbose: false }).await;
        status.expect("its status").into_inner().status.expect("a status").state()
    }

    /// Runs a script in a container.
    async fn sh(&mut self, id: &str, script: &str) -> String {
        let output = cri::exec(&mut self.client, id, &["sh", "-c", script], 20).await.expect("to run");
        let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        assert_eq!(output.exit_code, 0, "{script}: {text} {}", String::from_utf8_lossy(&output.stderr));
        text
    }

    /// Returns the lines of the log of a pod's counter: the mark and the number. A log without a line is empty.
    fn numbers(&self, pod: &str) -> Vec<(String, u64)> {
        let log = fs::read_to_string(self.node.directory().join(pod).join("counter.log")).unwrap_or_default();
        let line = |line: &str| {
            let mut words = line.split(' ').skip(3);
            Some((words.next()?.to_owned(), words.next()?.parse().ok()?))
        };
        log.lines().filter_map(line).collect()
    }

    /// Checks that the counter of a pod counts on, without a gap.
    fn counts_on(&self, pod: &str) {
        let before = self.numbers(pod).len();
        eventually("it counts on", || (self.numbers(pod).len() > before + 3).then_some(()));
        let numbers = self.numbers(pod);
        for pair in numbers.windows(2) {
            assert_eq!((&pair[0].0, pair[0].1 + 1), (&pair[1].0, pair[1].1), "{pod}");
        }
    }

    async fn page_of(&mut self, pod: &CriPod) {
        let url = format!("http://{}:8080/", address(&mut self.client, pod).await);
        eventually("the page", || {
            self.node.run_in_netns("curl", &["-s", "-m", "20", &url]).stdout.contains("page").then_some(())
        });
    }

    async fn pods(&mut self) -> Vec<String> {
        let pods = self.client.list_pod_sandbox(ListPodSandboxRequest::default()).await.expect("the pods").into_inner();
        let mut names: Vec<_> = pods.items.into_iter().filter_map(|pod| Some(pod.metadata?.name)).collect();
        names.sort();
        names
    }

    async fn remove(mut self, others: Vec<Counting>) {
        let World { saved, peer, .. } = self;
        for Counting { pod, volumes, .. } in others.into_iter().chain([saved]) {
            pod.remove(&mut self.client).await.expect("to remove the pod");
            drop(volumes);
        }
        peer.remove(&mut self.client).await.expect("to remove the pod");
        assert_eq!(self.node.leaked(), Vec::<String>::new());
    }
}

/// Returns the containers of the pod that is saved.
fn configs(image: &str, peer: &str, volumes: &Volumes) -> Vec<ContainerConfig> {
    let peer = nacelle_proto::cri::KeyValue { key: "PEER".to_owned(), value: peer.into() };
    let counter = ContainerConfig {
        mounts: [volumes.mounts(), vec![mount(&volumes.log, "/dev/termination-log", false)]].concat(),
        envs: vec![peer],
        ..container_config("counter", image, &["sh", "-c", COUNTER])
    };
    let server = ContainerConfig {
        mounts: vec![mount(&volumes.hosts, "/kubelet-hosts", false)],
        ..container_config("server", image, &["sh", "-c", SERVER])
    };
    vec![counter, server]
}

async fn address(client: &mut CriClient, pod: &CriPod) -> String {
    let request = PodSandboxStatusRequest { pod_sandbox_id: pod.id.clone(), verbose: false };
    let status = client.pod_sandbox_status(request).await.expect("its status").into_inner().status;
    status.and_then(|status| status.network).expect("a network").ip
}

fn skip() -> bool {
    let skipped = engine() != "kvm";
    if skipped {
        println!("skipped: engine {} restores no pods", engine());
    }
    skipped
}

#[test]
fn a_pod_continues_as_several_others() {
    if skip() {
        return;
    }
    block_on(async {
        let mut world = World::new().await;
        let checkpoint = world.checkpoint.clone();
        let copy = world.restore(&checkpoint, "copy").await.expect("to restore the pod");
        assert_eq!(copy.containers.keys().collect::<Vec<_>>(), world.saved.containers.keys().collect::<Vec<_>>());
        assert!(copy.containers.values().all(|id| !world.saved.containers.values().any(|saved| saved == id)));
        // Nothing runs before it is started.
        for name in ["counter", "server"] {
            assert_eq!(world.state(&copy, name).await, ContainerState::ContainerCreated, "{name}");
        }
        world.start(&copy, "server").await;
        world.page_of(&copy.pod).await;
        assert_eq!(world.state(&copy, "server").await, ContainerState::ContainerRunning);
        assert_eq!(world.state(&copy, "counter").await, ContainerState::ContainerCreated);
        assert_eq!(world.numbers("copy"), []);

        // It counts on from the moment of the checkpoint: in memory, on the disk, and in the volume in memory.
        world.start(&copy, "counter").await;
        world.counts_on("copy");
        world.counts_on("saved");
        let (first, saved) = (world.numbers("copy")[0].clone(), world.numbers("saved"));
        let before = (first.0.clone(), first.1 - 1);
        assert!(saved.contains(&before), "{first:?}");
        let counter = copy.containers["counter"].clone();
        let count = world.sh(&counter, "cat /count").await;
        let numbers: Vec<u64> = count.lines().map(|line| line.parse().expect("a number")).collect();
        assert!(numbers.iter().copied().eq(1..=numbers.len() as u64), "{count}");
        let in_memory: u64 = world.sh(&counter, MEMORY_COUNT).await.parse().expect("a number");
        assert!(in_memory >= first.1);

        // It has another identity.
        let (old, new) = {
            let saved = world.saved.pod.clone();
            (address(&mut world.client, &saved).await, address(&mut world.client, &copy.pod).await)
        };
        assert_ne!(old, new);
        let addresses = world.sh(&counter, "ip addr").await;
        assert!(addresses.contains(&format!(" {new}/")) && !addresses.contains(&format!(" {old}/")), "{addresses}");
        assert_eq!(world.sh(&counter, "hostname; cat /etc/hostname").await, "copy\ncopy");
        assert!(world.sh(&counter, "cat /etc/resolv.conf").await.contains("nameserver 10.99.0.7"));
        assert!(world.sh(&counter, "cat /etc/hosts").await.contains(&format!("{new}\tcopy")));
        assert_eq!(world.sh(&counter, "cat /settings/key").await, "copy");
        for id in copy.containers.values() {
            assert_eq!(world.sh(id, "cat /kubelet-hosts").await, "10.99.0.9 copy");
        }
        world.sh(&counter, "echo last words of $(hostname) >/dev/termination-log").await;
        let peer = world.peer_address.clone();
        world.sh(&counter, &format!("echo to the peer | timeout 10 nc -w 5 {peer} 7000 | grep peer")).await;

        // The connection of the saved pod is closed in the copy, and goes on in the saved pod.
        eventually("the connection ends", || {
            let log = world.numbers("copy").len();
            (log > 30).then_some(())
        });
        assert_eq!(world.sh(&counter, "cat /connection").await, "ended");
        let saved = world.saved.containers["counter"].clone();
        assert_eq!(world.sh(&saved, "ls /connection 2>/dev/null || echo none").await, "none");

        // A container that is created later has the same volumes.
        let later = ContainerConfig {
            mounts: copy.volumes.mounts(),
            ..container_config("later", &world.image, &["sleep", "1000000"])
        };
        let later = copy.pod.start_container(&mut world.client, later).await.expect("a container");
        let seen: u64 = world.sh(&later, MEMORY_COUNT).await.parse().expect("a number");
        assert!(seen > in_memory);
        assert_eq!(world.sh(&later, "cat /settings/key /kubelet-hosts").await, "copy10.99.0.9 copy");

        // Another one from the same checkpoint has nothing in common with the first but what was saved.
        let second = world.restore(&checkpoint, "second").await.expect("to restore the pod again");
        for name in ["counter", "server"] {
            world.start(&second, name).await;
        }
        world.counts_on("second");
        assert_eq!(world.numbers("second")[0], first);
        let random = "od -An -tx1 -N16 /dev/urandom; cat /proc/sys/kernel/random/uuid";
        let [one, other] = [&copy, &second].map(|pod| pod.containers["server"].clone());
        assert_ne!(world.sh(&one, random).await, world.sh(&other, random).await);
        let clock: i64 = world.sh(&one, "date +%s").await.parse().expect("a time");
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("a time").as_secs();
        assert!(clock.abs_diff(i64::try_from(now).expect("a time")) < 5, "{clock} {now}");

        // Its containers end as others do.
        let container_id = counter.clone();
        world.client.stop_container(StopContainerRequest { container_id, timeout: 0 }).await.expect("to stop");
        assert_eq!(world.state(&copy, "counter").await, ContainerState::ContainerExited);
        let logs = [&copy, &second, &world.saved].map(|pod| fs::read_to_string(&pod.volumes.log).expect("the log"));
        assert_eq!(logs, ["last words of copy\n", "", ""]);
        world.client.remove_container(RemoveContainerRequest { container_id: counter }).await.expect("to remove");
        world.page_of(&copy.pod).await;
        world.counts_on("second");
        world.remove(vec![copy, second]).await;
    });
}

#[test]
fn a_restored_pod_is_saved_and_restored_again() {
    if skip() {
        return;
    }
    block_on(async {
        let mut world = World::new().await;
        let checkpoint = world.checkpoint.clone();
        let copy = world.restore(&checkpoint, "copy").await.expect("to restore the pod");
        for name in ["counter", "server"] {
            world.start(&copy, name).await;
        }
        world.counts_on("copy");
        // Saved under a name, as by hand.
        let created = world.node.nacelle_json(&["checkpoint", "create", &copy.pod.id, "counting"]);
        let again = PathBuf::from(created["path"].as_str().expect("its path"));
        assert_eq!((&created["namespace"], &created["problem"]), (&"e2e".into(), &serde_json::Value::Null));
        world.counts_on("copy");
        // The files of the first checkpoint are not needed any more.
        fs::remove_dir_all(&checkpoint).expect("to remove the checkpoint");
        let last = world.restore(&again, "last").await.expect("to restore the restored pod");
        world.start(&last, "counter").await;
        world.counts_on("last");
        let first = world.numbers("last")[0].clone();
        assert!(world.numbers("copy").contains(&(first.0, first.1 - 1)));
        let counter = last.containers["counter"].clone();
        assert_eq!(world.sh(&counter, "hostname; cat /settings/key").await, "last\nlast");
        let in_memory: u64 = world.sh(&counter, MEMORY_COUNT).await.parse().expect("a number");
        assert!(in_memory >= first.1);
        // One that was never started ends with its pod. A daemon that is killed finds both again.
        world.node.kill();
        world.node.start();
        world.client = CriClient::new(world.node.channel());
        assert_eq!(world.state(&last, "server").await, ContainerState::ContainerCreated);
        world.start(&last, "server").await;
        world.page_of(&last.pod).await;
        world.counts_on("last");
        world.counts_on("copy");

        // A pod that names the checkpoint in its annotation.
        let named = world.run_from("counting", "named").await;
        world.counts_on("named");
        assert_eq!(world.numbers("named")[0], world.numbers("last")[0]);
        world.page_of(&named.pod).await;
        let counter = named.containers["counter"].clone();
        assert_eq!(world.sh(&counter, "hostname; cat /settings/key").await, "named\nnamed");
        world.node.nacelle(&["checkpoint", "rm", "counting", "--namespace", "e2e"]).ok();
        assert!(!again.exists());
        world.remove(vec![copy, last, named]).await;
    });
}

/// A change of a request, and the code and a part of the message with which it is refused.
type Refusal<'a> = (&'a str, fn(&mut PodSandboxConfig, &mut Vec<ContainerConfig>), Code, &'a str);

#[test]
fn what_cannot_continue_is_refused_by_name() {
    if skip() {
        return;
    }
    block_on(async {
        let mut world = World::new().await;
        let volumes = Volumes::new(&world.node, "copy", "copy");
        let checkpoint = world.checkpoint.clone();
        let refusals: [Refusal; 9] = [
            ("a missing container", |_, all| drop(all.pop()), Code::FailedPrecondition, "server"),
            (
                "another container",
                |_, all| {
                    let image = all[0].image.clone().expect("an image").image;
                    all.push(container_config("more", &image, &["true"]));
                },
                Code::FailedPrecondition,
                "more",
            ),
            ("another command", |_, all| all[0].command = vec!["true".into()], Code::FailedPrecondition, "command"),
            ("a terminal", |_, all| all[1].tty = true, Code::FailedPrecondition, "tty"),
            (
                "another directory",
                |_, all| all[0].mounts[0].container_path = "/elsewhere".into(),
                Code::FailedPrecondition,
                "/elsewhere",
            ),
            (
                "a volume that is shared",
                |_, all| all[0].mounts[0].host_path = "/tmp".into(),
                Code::FailedPrecondition,
                "/memory",
            ),
            (
                "another image",
                |_, all| all[0].image.as_mut().expect("an image").image = "none.example/none".into(),
                Code::NotFound,
                "none.example",
            ),
            (
                "another size",
                |config, _| {
                    let resources = nacelle_proto::cri::LinuxContainerResources {
                        memory_limit_in_bytes: 1 << 30,
                        ..Default::default()
                    };
                    config.linux.get_or_insert_default().resources = Some(resources);
                },
                Code::FailedPrecondition,
                "memory",
            ),
            ("no name", |config, _| config.metadata = None, Code::InvalidArgument, "metadata"),
        ];
        for (what, change, code, text) in refusals {
            let (mut config, mut all) =
                (world.pod_config("copy"), configs(&world.image, &world.peer_address, &volumes));
            change(&mut config, &mut all);
            let refused = restore(&mut world.client, &checkpoint, "", config, &all, LIMIT).await;
            let error = refused.map(drop).expect_err(what);
            println!("{what}: {error}");
            assert!(error.code() == code && error.message().contains(text), "{what}: {error:?}, expected {text}");
            assert_eq!(world.pods().await, ["peer", "saved"], "{what}");
        }

        // Files that are not a whole checkpoint.
        let hide = |name: &str| fs::rename(checkpoint.join(name), world.node.directory().join(name));
        let put_back = |name: &str| fs::rename(world.node.directory().join(name), checkpoint.join(name));
        let all = configs(&world.image, &world.peer_address, &volumes);
        for name in ["complete", "pod", "state", "memory", "scratch"] {
            hide(name).expect("to hide a file");
            let config = world.pod_config("copy");
            let refused = restore(&mut world.client, &checkpoint, "", config, &all, LIMIT).await;
            let error = refused.map(drop).expect_err(name);
            println!("without {name}: {error}");
            assert_eq!(error.code(), Code::FailedPrecondition, "{name}: {error}");
            put_back(name).expect("to put a file back");
        }
        // A state that another program has written: the VM does not start.
        let state = fs::read(checkpoint.join("state")).expect("the state");
        let mut damaged = state.clone();
        let middle = damaged.len() / 2;
        damaged[middle] ^= 0x55;
        fs::write(checkpoint.join("state"), &damaged).expect("the file is ours");
        let config = world.pod_config("copy");
        let refused = restore(&mut world.client, &checkpoint, "", config, &all, LIMIT).await.map(drop);
        println!("damaged: {}", refused.expect_err("the state is damaged"));
        fs::write(checkpoint.join("state"), &state).expect("the file is ours");
        assert_eq!(world.pods().await, ["peer", "saved"]);
        world.counts_on("saved");
        drop(volumes);
        let copy = world.restore(&checkpoint, "good").await.expect("to restore the pod");
        world.remove(vec![copy]).await;
    });
}

#[test]
fn a_restore_that_is_given_up_leaves_nothing() {
    if skip() {
        return;
    }
    block_on(async {
        let mut world = World::new().await;
        let (checkpoint, mut outcomes) = (world.checkpoint.clone(), Vec::new());
        let (mut copies, mut volumes) = (Vec::new(), Vec::new());
        for exponent in [0, 2, 4, 6, 8, 9, 10, 11, 12, 13] {
            let (name, limit) = (format!("limit-{exponent}"), Duration::from_millis(1 << exponent));
            let own = Volumes::new(&world.node, &name, &name);
            let all = configs(&world.image, &world.peer_address, &own);
            let config = world.pod_config(&name);
            let outcome = restore(&mut world.client, &checkpoint, "", config, &all, limit).await;
            outcomes.push((limit, outcome.as_ref().map(drop).map_err(Status::code)));
            match outcome {
                Ok((pod, containers)) => copies.push(Counting { pod, containers, volumes: own }),
                Err(error) => {
                    assert!(matches!(error.code(), Code::DeadlineExceeded | Code::Cancelled), "{limit:?}: {error:?}");
                    let mut waited = 0;
                    while world.pods().await.contains(&name) {
                        waited += 1;
                        assert!(waited < 300, "{name} stays");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                    volumes.push(own);
                }
            }
        }
        println!("{outcomes:?}");
        assert!(outcomes.first().is_some_and(|(_, outcome)| outcome.is_err()));

        // The daemon dies while a pod is restored: what is not complete ends.
        let own = Volumes::new(&world.node, "killed", "killed");
        let all = configs(&world.image, &world.peer_address, &own);
        let (mut client, config, path) = (world.client.clone(), world.pod_config("killed"), checkpoint.clone());
        let restoring = tokio::spawn(async move { restore(&mut client, &path, "", config, &all, LIMIT).await });
        let mut waited = 0;
        while !world.pods().await.contains(&"killed".to_owned()) && waited < 500 {
            waited += 1;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        world.node.kill();
        let outcome = restoring.await.expect("no panic");
        world.node.start();
        world.client = CriClient::new(world.node.channel());
        println!("the daemon was killed: {:?}", outcome.as_ref().map(drop).map_err(Status::code));
        if outcome.is_err() {
            let running = ListContainersRequest::default();
            let all = world.client.list_containers(running).await.expect("the containers").into_inner().containers;
            let pods = world.client.list_pod_sandbox(ListPodSandboxRequest::default()).await.expect("the pods");
            for pod in pods
                .into_inner()
                .items
                .into_iter()
                .filter(|pod| pod.metadata.as_ref().is_some_and(|metadata| metadata.name == "killed"))
            {
                let of_pod = all.iter().filter(|container| container.pod_sandbox_id == pod.id);
                let states: Vec<ContainerState> = of_pod.map(|container| container.state()).collect();
                assert!(!states.contains(&ContainerState::ContainerRunning), "{states:?}");
                let pod = CriPod { id: pod.id, config: world.pod_config("killed") };
                pod.remove(&mut world.client).await.expect("to remove the pod");
            }
        }
        let copy = world.restore(&checkpoint, "after").await.expect("to restore the pod");
        world.start(&copy, "counter").await;
        world.counts_on("after");
        world.counts_on("saved");
        copies.push(copy);
        if let Ok((pod, containers)) = outcome {
            copies.push(Counting { pod, containers, volumes: own });
        } else {
            volumes.push(own);
        }
        drop(volumes);
        world.remove(copies).await;
    });
}

#[test]
fn other_engines_refuse_to_restore_a_pod() {
    if engine() == "kvm" {
        println!("skipped: engine kvm restores pods");
        return;
    }
    block_on(async {
        let node = TestNode::with_options(NodeOptions { ipv6: false, ..NodeOptions::default() });
        let mut client = CriClient::new(node.channel());
        let config = pod_config("e2e", "copy", node.directory());
        let refused = restore(&mut client, node.directory(), "", config, &[], LIMIT).await.map(drop);
        let error = refused.expect_err("it is refused");
        println!("{error}");
        assert_eq!(error.code(), Code::FailedPrecondition, "{error:?}");
        assert!(error.message().contains("engine"), "{error}");
    });
}
