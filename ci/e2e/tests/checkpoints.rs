//! Tests CheckpointPod: a running pod is saved, and runs on whatever happens. Only engine `kvm` saves running pods.

use nacelle_e2e::cri::{self, CriClient, CriPod, checkpoint, container_config};
use nacelle_e2e::node::{NodeOptions, engine};
use nacelle_e2e::run::{block_on, run_program};
use nacelle_e2e::{TestImage, TestNode, eventually};
use nacelle_proto::cri::Mount;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tonic::{Code, Status};

const LIMIT: Duration = Duration::from_secs(120);

/// Counts in its output, in a file on the scratch disk, and in memory, where a mark is too that is nowhere else.
const COUNTER: &str = "mark=$(head -c 12 /dev/urandom | od -An -tx1 | tr -d ' \n'); i=0; \
    echo mark $mark; while :; do i=$((i + 1)); echo $i; echo $i >>/count; usleep 20000; done";

/// A node with a pod whose container counts.
struct World {
    node: TestNode,
    image: String,
    client: CriClient,
    pod: CriPod,
    container: String,
}

impl World {
    async fn new() -> World {
        let node = TestNode::with_options(NodeOptions { ipv6: false, ..NodeOptions::default() });
        let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
        let mut client = CriClient::new(node.channel());
        let pod = CriPod::run(&mut client, "saved", node.directory()).await.expect("a pod");
        let counter = container_config("counter", &image, &["sh", "-c", COUNTER]);
        let container = pod.start_container(&mut client, counter).await.expect("a container");
        let world = World { node, image, client, pod, container };
        world.counts_on();
        world
    }

    /// Returns the lines of the log without the time, stream and tag.
    fn lines(&self) -> Vec<String> {
        let log = fs::read_to_string(self.node.directory().join("saved/counter.log")).unwrap_or_default();
        log.lines().filter_map(|line| Some(line.splitn(4, ' ').nth(3)?.to_owned())).collect()
    }

    /// Checks that the container counts on, and that no number is missing in its log.
    fn counts_on(&self) {
        let before = self.lines().len();
        eventually("the container counts on", || (self.lines().len() > before + 3).then_some(()));
        let numbers = self.lines().into_iter().skip(1).enumerate();
        numbers.for_each(|(index, number)| assert_eq!(number, (index + 1).to_string()));
    }

    /// Returns a new empty directory.
    fn output(&self, name: &str) -> PathBuf {
        let path = self.node.directory().join(name);
        fs::create_dir(&path).expect("the node's directory is writable");
        path
    }

    async fn save(&mut self, output: &Path, limit: Duration) -> Result<(), Status> {
        checkpoint(&mut self.client, &self.pod, &[&self.container], output, limit).await
    }

    async fn remove(mut self) {
        self.pod.remove(&mut self.client).await.expect("to remove the pod");
        assert_eq!(self.node.leaked(), Vec::<String>::new());
    }
}

fn names(directory: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(directory).expect("a directory").flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

fn skip() -> bool {
    let skipped = engine() != "kvm";
    if skipped {
        println!("skipped: engine {} saves no running pods", engine());
    }
    skipped
}

#[test]
fn a_pod_runs_on_and_its_checkpoint_is_complete() {
    if skip() {
        return;
    }
    block_on(async {
        let mut world = World::new().await;
        let output = world.output("checkpoint");
        let before = world.lines().len();
        world.save(&output, LIMIT).await.expect("to save the pod");
        let after = world.lines().len();
        let files = ["complete", "memory", "pod", "scratch", "state"];
        assert_eq!(names(&output), files.map(str::to_owned).into());
        for name in files {
            let mode = fs::metadata(output.join(name)).expect("a file").permissions().mode();
            assert_eq!(mode & 0o7777, 0o600, "{name}");
        }
        let manifest = fs::read(output.join("pod")).expect("the manifest");
        let manifest: Value = serde_json::from_slice(&manifest).expect("the manifest is JSON");
        println!("{manifest:#}");
        assert!(manifest["containers"].to_string().contains(&world.container));
        let mark = world.lines()[0].strip_prefix("mark ").expect("the first line").to_owned();
        let found = run_program("grep", ["-c", "--text", &mark, &output.join("memory").display().to_string()]).ok();
        assert_ne!(found.trim(), "0", "the process is in the memory");

        // The scratch disk is that of a moment between, and in order.
        let (scratch, mounted) = (output.join("scratch"), world.output("mounted"));
        println!("{:?}", run_program("e2fsck", ["-fn", &scratch.display().to_string()]));
        run_program("mount", ["-o", "loop,ro", &scratch.display().to_string(), &mounted.display().to_string()]).ok();
        let count = run_program("find", [&mounted.display().to_string(), "-name", "count"]).ok();
        let count = fs::read_to_string(count.trim());
        run_program("umount", [&mounted.display().to_string()]).ok();
        let count = count.expect("the file of the container");
        let numbers: Vec<usize> = count.lines().map(|line| line.parse().expect("a number")).collect();
        assert!(numbers.iter().copied().eq(1..=numbers.len()), "{count}");
        assert!((before.saturating_sub(2)..=after + 1).contains(&numbers.len()), "{before}, {count}, {after}");

        world.counts_on();
        let output = world.output("second");
        world.save(&output, LIMIT).await.expect("to save the pod again");
        assert!(output.join("complete").exists());
        let ran = cri::exec(&mut world.client, &world.container, &["tail", "-n1", "/count"], 10).await.expect("to run");
        assert_eq!(ran.exit_code, 0);
        world.counts_on();
        world.remove().await;
    });
}

#[test]
fn what_cannot_be_saved_is_refused_by_name() {
    if skip() {
        return;
    }
    block_on(async {
        let mut world = World::new().await;
        let output = world.output("checkpoint");
        let refused = async |world: &mut World, ids: &[&str], output: &Path, code: Code, text: &str| {
            let error = checkpoint(&mut world.client, &world.pod, ids, output, LIMIT).await.expect_err("it is refused");
            assert!(error.code() == code && error.message().contains(text), "{error:?}, expected: {text}");
        };
        let id = world.container.clone();
        refused(&mut world, &[], &output, Code::InvalidArgument, "container_ids").await;
        refused(&mut world, &[&id, &id], &output, Code::InvalidArgument, "twice").await;
        refused(&mut world, &["none"], &output, Code::NotFound, "none").await;
        refused(&mut world, &[&id], Path::new("here"), Code::InvalidArgument, "absolute path").await;
        refused(&mut world, &[&id], &output.join("missing"), Code::InvalidArgument, "does not exist").await;
        refused(&mut world, &[&id], Path::new("/dev/shm"), Code::FailedPrecondition, "in memory").await;
        let occupied = world.output("occupied");
        fs::write(occupied.join("file"), "").expect("the directory is writable");
        refused(&mut world, &[&id], &occupied, Code::FailedPrecondition, "not empty").await;
        assert_eq!(names(&occupied), ["file".to_owned()].into());

        let second = container_config("second", &world.image, &["sleep", "600"]);
        let second = world.pod.start_container(&mut world.client, second).await.expect("a container");
        refused(&mut world, &[&id], &output, Code::FailedPrecondition, &second).await;
        let stop = nacelle_proto::cri::StopContainerRequest { container_id: second.clone(), timeout: 0 };
        world.client.stop_container(stop).await.expect("to stop");
        refused(&mut world, &[&id, &second], &output, Code::FailedPrecondition, &second).await;

        let shared = world.output("shared").display().to_string();
        let mount = Mount { container_path: "/data".into(), host_path: shared, ..Mount::default() };
        let mounts = nacelle_proto::cri::ContainerConfig {
            mounts: vec![mount],
            ..container_config("third", &world.image, &["sleep", "600"])
        };
        let third = world.pod.start_container(&mut world.client, mounts).await.expect("a container");
        refused(&mut world, &[&id, &third], &output, Code::FailedPrecondition, "has /data, a volume").await;
        assert_eq!(names(&output), BTreeSet::new());
        world.counts_on();
        world.remove().await;
    });
}

#[test]
fn a_deadline_may_pass_at_any_time() {
    if skip() {
        return;
    }
    block_on(async {
        let mut world = World::new().await;
        let mut outcomes = Vec::new();
        for exponent in 0..=13 {
            let output = world.output(&format!("limit-{exponent}"));
            let limit = Duration::from_millis(1 << exponent);
            let outcome = world.save(&output, limit).await;
            // The caller's own timer may have come first.
            let is_complete = || names(&output).contains("complete");
            let is_empty = || names(&output).is_empty().then_some(());
            match &outcome {
                Ok(()) => assert!(is_complete(), "{limit:?}"),
                Err(error) => {
                    assert!(matches!(error.code(), Code::DeadlineExceeded | Code::Cancelled), "{limit:?}: {error:?}");
                    eventually("the directory is empty again", is_empty);
                }
            }
            outcomes.push((limit, outcome.map_err(|error| error.code())));
            world.counts_on();
        }
        println!("{outcomes:?}");
        assert!(outcomes.first().is_some_and(|(_, outcome)| outcome.is_err()));
        let output = world.output("last");
        world.save(&output, LIMIT).await.expect("to save the pod");
        world.remove().await;
    });
}

#[test]
fn a_pod_survives_the_death_of_the_daemon_and_a_full_disk() {
    if skip() {
        return;
    }
    block_on(async {
        let mut world = World::new().await;
        // A file system that is too small for the memory.
        let (image, small) = (world.node.directory().join("small.img"), world.output("small"));
        fs::File::create(&image).and_then(|file| file.set_len(4 << 20)).expect("the node's directory is writable");
        let (image, target) = (image.display().to_string(), small.display().to_string());
        let run = |program: &str, words: &[&str]| run_program(program, words).ok();
        run("mkfs.ext4", &["-q", "-O", "^has_journal", &image]);
        run("mount", &["-o", "loop", &image, &target]);
        let output = small.join("checkpoint");
        fs::create_dir(&output).expect("the disk is writable");
        let full = world.save(&output, LIMIT).await.expect_err("the disk is full");
        println!("{full}");
        assert!(full.message().contains("No space left"), "{full}");
        assert_eq!(names(&output), BTreeSet::new());
        world.counts_on();
        run("umount", &[&target]);

        // The daemon dies while the pod is saved.
        let output = world.output("killed");
        let (mut client, pod, container) = (world.client.clone(), world.pod.clone(), world.container.clone());
        let saving = {
            let output = output.clone();
            tokio::spawn(async move { checkpoint(&mut client, &pod, &[&container], &output, LIMIT).await })
        };
        eventually("it has begun", || (!names(&output).is_empty()).then_some(()));
        world.node.kill();
        let outcome = saving.await.expect("no panic");
        world.counts_on();
        world.node.start();
        world.client = CriClient::new(world.node.channel());
        let is_complete = names(&output).contains("complete");
        println!("the daemon was killed: {outcome:?}, complete: {is_complete}");
        let output = world.output("after");
        world.save(&output, LIMIT).await.expect("to save the pod");
        world.counts_on();

        // The pod process dies while the pod is saved.
        let output = world.output("dead");
        let (mut client, pod, container) = (world.client.clone(), world.pod.clone(), world.container.clone());
        let saving = {
            let output = output.clone();
            tokio::spawn(async move { checkpoint(&mut client, &pod, &[&container], &output, LIMIT).await })
        };
        eventually("it has begun", || (!names(&output).is_empty()).then_some(()));
        for pid in world.node.vm_pids() {
            run("kill", &["-9", &pid.to_string()]);
        }
        if saving.await.expect("no panic").is_err() {
            assert_eq!(names(&output), BTreeSet::new());
        }
        world.remove().await;
    });
}

#[test]
fn other_engines_refuse_to_save_a_pod() {
    if engine() == "kvm" {
        println!("skipped: engine kvm saves running pods");
        return;
    }
    block_on(async {
        let mut world = World::new().await;
        let output = world.output("checkpoint");
        let refused = world.save(&output, LIMIT).await.expect_err("it is refused");
        println!("{refused}");
        assert_eq!(refused.code(), Code::FailedPrecondition);
        assert!(refused.message().contains("engine"), "{refused}");
        assert_eq!(names(&output), BTreeSet::new());
        // Nor by hand.
        for pod in [world.pod.id.as_str(), "0123456789abc"] {
            let refused = world.node.nacelle(&["checkpoint", "create", pod, "warm"]);
            println!("{}", refused.stderr);
            assert_ne!(refused.code, 0);
        }
        assert_eq!(world.node.nacelle_json(&["checkpoint", "ls"]), serde_json::json!([]));
        assert_eq!(world.node.nacelle(&["checkpoint", "rm", "warm", "--namespace", "e2e"]).code, 3);
        world.counts_on();
        world.remove().await;
    });
}
