//! Tests CheckpointPod on simulated pod processes: what is refused changes nothing, and whatever happens, a directory has a complete
//! checkpoint or no file of one.

mod common;

use common::{Daemon, World, image};
use nacelle_base::machine::EngineKind;
use nacelle_model::checkpoint::{CheckpointManifest, SavedFileSizes};
use nacelle_proto::{cri, pod as proto};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tonic::{Code, Request, Status};

/// Longer than any checkpoint of a simulated VM.
const GENEROUS: Duration = Duration::from_secs(50);

/// Directories on a disk, each empty.
struct Outputs(tempfile::TempDir);

impl Outputs {
    fn new() -> Outputs {
        Outputs(tempfile::tempdir_in("/var/tmp").unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        let path = self.0.path().join(name);
        fs::create_dir_all(&path).unwrap();
        path
    }
}

fn names(path: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        path.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn world() -> World {
    let mut world = World::new();
    world.fitting = EngineKind::Kvm;
    world
}

fn request(pod: &str, containers: &[&str], output: &Path, limit: Duration) -> Request<cri::CheckpointPodRequest> {
    let mut request = Request::new(cri::CheckpointPodRequest {
        pod_sandbox_id: pod.to_owned(),
        output_path: output.to_str().unwrap().to_owned(),
        container_ids: containers.iter().map(|id| (*id).to_owned()).collect(),
        options: [].into(),
    });
    request.set_timeout(limit);
    request
}

async fn save(daemon: &mut Daemon, pod: &str, containers: &[&str], output: &Path) -> Result<(), Status> {
    daemon.cri.checkpoint_pod(request(pod, containers, output, GENEROUS)).await.map(drop)
}

/// Runs a pod with one running container; returns both ids.
async fn run(daemon: &mut Daemon, name: &str) -> (String, String) {
    let pod = daemon.run_pod(name).await.unwrap();
    let container = daemon.create(&pod, "c").await.unwrap();
    daemon.start(&container).await.unwrap();
    (pod, container)
}

#[test]
fn a_running_pod_is_saved_and_runs_on() {
    let (world, outputs) = (world(), Outputs::new());
    let mut daemon = world.daemon();
    world.run(async {
        let (pod, container) = run(&mut daemon, "a").await;
        let created = daemon.create(&pod, "created").await.unwrap();
        let fake = world.pods.of(&pod);
        let key = fake.made.lock().unwrap()[0].image_key.clone();
        {
            let mut reply = fake.checkpoints.reply.lock().unwrap();
            reply.images = vec![proto::PlacedImage { image_key: key.clone(), partition: 1, offset: 0, length: 4096 }];
            reply.undrained = vec![container.clone(); 2];
        }
        let output = outputs.path("one");
        save(&mut daemon, &pod, &[&container], &output).await.unwrap();
        assert_eq!(names(&output), ["complete", "memory", "pod", "scratch", "state"]);
        for name in names(&output) {
            assert_eq!(fs::metadata(output.join(name)).unwrap().permissions().mode() & 0o777, 0o600);
        }
        assert_eq!(fs::read(output.join("complete")).unwrap(), b"");
        let saved = CheckpointManifest::decode(&fs::read(output.join("pod")).unwrap()).unwrap();
        assert_eq!((saved.pod_id.as_str(), saved.pod.name.name.as_str()), (pod.as_str(), "a"));
        assert_eq!(saved.handler, "small");
        let [one] = saved.containers.as_slice() else { panic!("{:?}", saved.containers) };
        assert_eq!((one.id.as_str(), one.config.image.as_str()), (container.as_str(), image::NAME));
        assert_eq!((saved.other_containers[0].as_str(), saved.undrained[0].as_str()), (&*created, &*container));
        assert_eq!((saved.other_containers.len(), saved.undrained.len()), (1, 1));
        assert_eq!(saved.images[0].image.to_string(), key);
        let length = |name: &str| fs::metadata(output.join(name)).unwrap().len();
        let (state, memory, scratch) = (length("state"), length("memory"), length("scratch"));
        assert_eq!(saved.files, SavedFileSizes { state, memory, scratch });
        assert_eq!((state, scratch), (5, saved.vm.scratch_mib << 20));
        assert_eq!(fake.checkpoints.requests.lock().unwrap()[0].container_ids, [container.as_str()]);
        assert_eq!(daemon.status(&container).await.unwrap().state(), cri::ContainerState::ContainerRunning);

        let error = save(&mut daemon, &pod, &[&container], &output).await.unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition);
        assert!(error.message().contains("it is not empty"), "{error}");
        assert_eq!(names(&output).len(), 5);
        // Beginnings of ids, and a client without a time limit.
        let mut request = request(&pod[..10], &[&container[..10]], &outputs.path("two"), GENEROUS);
        request.metadata_mut().remove("grpc-timeout");
        daemon.cri.checkpoint_pod(request).await.unwrap();
        assert_eq!(names(&outputs.path("two")).len(), 5);
    });
}

#[test]
fn refusals_change_nothing() {
    let (world, outputs) = (world(), Outputs::new());
    let mut daemon = world.daemon();
    world.run(async {
        let (pod, container) = run(&mut daemon, "a").await;
        let (_, of_other) = run(&mut daemon, "b").await;
        let created = daemon.create(&pod, "created").await.unwrap();
        let (unknown, output, full) = ("ab".repeat(32), outputs.path("out"), outputs.path("full"));
        fs::write(full.join("file"), "").unwrap();
        let (c, part) = (container.as_str(), &container[..20]);
        let gone = outputs.0.path().join("none");
        let memory = PathBuf::from("/dev/shm");
        let rows: [(&str, &[&str], &Path, Code, &str); 11] = [
            (&unknown, &[c], &output, Code::NotFound, "pod abab"),
            (&pod, &[&unknown], &output, Code::NotFound, "container abab"),
            (&pod, &[&of_other], &output, Code::InvalidArgument, "which belongs to pod "),
            (&pod, &[c, part], &output, Code::InvalidArgument, " twice"),
            (&pod, &[], &output, Code::InvalidArgument, "container_ids is empty"),
            (&pod, &[c, &created], &output, Code::FailedPrecondition, "does not run"),
            (&pod, &[c], Path::new("out"), Code::InvalidArgument, "an absolute path without .. is needed"),
            (&pod, &[c], &gone, Code::InvalidArgument, "it does not exist"),
            (&pod, &[c], &full.join("file"), Code::InvalidArgument, "it is not a directory"),
            (&pod, &[c], &full, Code::FailedPrecondition, "it is not empty"),
            (&pod, &[c], &memory, Code::FailedPrecondition, "it is in memory"),
        ];
        for (pod, containers, path, code, expected) in rows {
            let error = save(&mut daemon, pod, containers, path).await.unwrap_err();
            assert_eq!(error.code(), code, "{error}");
            assert!(error.message().contains(expected), "{expected}: {error}");
        }
        daemon.start(&created).await.unwrap();
        let error = save(&mut daemon, &pod, &[c], &output).await.unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition);
        assert!(error.message().contains(&format!("container {created} runs and is not in container_ids")), "{error}");
        // Too short to clean up in time.
        let hurried = request(&pod, &[c, &created], &output, Duration::from_millis(150));
        assert_eq!(daemon.cri.checkpoint_pod(hurried).await.unwrap_err().code(), Code::DeadlineExceeded);
        daemon.stop_pod(&pod).await.unwrap();
        let error = save(&mut daemon, &pod, &[c], &output).await.unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition);
        assert!(error.message().contains("is not ready"), "{error}");
    });
    assert!(names(&outputs.path("out")).is_empty() && names(&outputs.path("full")) == ["file"]);
    assert!(!world.script.seen("checkpoint"));
}

#[test]
fn only_a_pod_process_that_can_save_a_vm_is_asked() {
    let (world, outputs) = (world(), Outputs::new());
    let mut daemon = world.daemon();
    let (pod, container) = world.run(run(&mut daemon, "a"));
    *world.pods.only().hello.lock().unwrap() = None;
    daemon.kill();
    let mut daemon = world.daemon();
    let output = outputs.path("out");
    let error = world.run(save(&mut daemon, &pod, &[&container], &output)).unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert!(error.message().contains("lacks the feature checkpoint"), "{error}");

    let of_qemu = World::new();
    let mut daemon = of_qemu.daemon();
    let (pod, container) = of_qemu.run(run(&mut daemon, "a"));
    let error = of_qemu.run(save(&mut daemon, &pod, &[&container], &output)).unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert!(error.message().contains("engine qemu cannot save a running VM"), "{error}");
    assert!(names(&output).is_empty());
    assert!(!world.script.seen("checkpoint") && !of_qemu.script.seen("checkpoint"));
}

#[test]
fn a_checkpoint_is_complete_or_absent() {
    let (world, outputs) = (world(), Outputs::new());
    let mut daemon = world.daemon();
    let output = outputs.path("out");
    let (pod, container) = world.run(run(&mut daemon, "a"));
    let fake = world.pods.only();
    let mut fails = |code: Code, expected: &str| {
        let error = world.run(save(&mut daemon, &pod, &[&container], &output)).unwrap_err();
        assert_eq!(error.code(), code, "{error}");
        assert!(error.message().contains(expected), "{expected}: {error}");
        assert!(names(&output).is_empty(), "{expected}");
    };
    world.script.fail_named("checkpoint", 1);
    fails(Code::Internal, "scripted checkpoint");
    world.script.conflict("checkpoint", 1);
    fails(Code::FailedPrecondition, "checkpoint is not possible now");

    // What no VM of this pod has.
    let good = fake.checkpoints.reply.lock().unwrap().clone();
    let placed = |image_key: &str, partition, offset, length| {
        vec![proto::PlacedImage { image_key: image_key.to_owned(), partition, offset, length }]
    };
    let key = format!("sha256:{}", "0".repeat(64));
    for (reply, expected) in [
        (proto::CheckpointResponse { booted_mib: 1, ..good.clone() }, "1 and 0 MiB of memory"),
        (proto::CheckpointResponse { added_mib: u32::MAX, ..good.clone() }, "MiB of memory"),
        (proto::CheckpointResponse { reserve_bytes: u64::MAX, ..good.clone() }, "bytes of a reserve"),
        (proto::CheckpointResponse { images: placed("../x", 1, 0, 1), ..good.clone() }, "placement of image ../x"),
        (proto::CheckpointResponse { images: placed(&key, 256, 0, 1), ..good.clone() }, "placement of image"),
        (proto::CheckpointResponse { images: placed(&key, 1, u64::MAX, 1), ..good.clone() }, "placement of image"),
        (
            proto::CheckpointResponse { images: vec![placed(&key, 1, 0, 1)[0].clone(); 256], ..good.clone() },
            "256 images",
        ),
        (proto::CheckpointResponse { undrained: vec!["x\n".into()], ..good.clone() }, "an unknown container x "),
    ] {
        *fake.checkpoints.reply.lock().unwrap() = reply;
        fails(Code::Internal, expected);
    }
    *fake.checkpoints.reply.lock().unwrap() = good;
    let memory = std::mem::replace(&mut *fake.checkpoints.memory.lock().unwrap(), 4096);
    fails(Code::Internal, "its file memory has 4096 bytes, expected ");
    *fake.checkpoints.memory.lock().unwrap() = memory;

    fake.checkpoints.keeps_files.store(true, Ordering::SeqCst);
    fails(Code::Internal, "its file state is still open for writing");
    fake.checkpoints.keeps_files.store(false, Ordering::SeqCst);
    fake.checkpoints.close_files();

    world.run(save(&mut daemon, &pod, &[&container], &output)).unwrap();
    assert_eq!(names(&output).len(), 5);
}

#[test]
fn a_pod_process_that_dies_leaves_no_files() {
    let (world, outputs) = (world(), Outputs::new());
    let mut daemon = world.daemon();
    let output = outputs.path("out");
    let (pod, container) = world.run(run(&mut daemon, "a"));
    world.script.hang_at("checkpoint");
    let saving = world.spawn({
        let (mut cri, request) = (daemon.cri.clone(), request(&pod, &[&container], &output, GENEROUS));
        async move { cri.checkpoint_pod(request).await.map(drop) }
    });
    world.eventually("the pod process saves", || world.script.seen("checkpoint"));
    assert_eq!(names(&output), ["memory", "scratch", "state"]);
    world.pods.kill(&world.pods.alive()[0]);
    let error = world.run(saving).unwrap().unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "{error}");
    assert!(names(&output).is_empty());
}

#[test]
fn a_deadline_stops_the_checkpoint_and_removes_it_before_the_answer() {
    let (world, outputs) = (world(), Outputs::new());
    let mut daemon = world.daemon();
    let output = outputs.path("out");
    let (pod, container) = world.run(run(&mut daemon, "a"));
    world.script.hang_at("checkpoint");
    let limit = Duration::from_secs(3);
    let began = Instant::now();
    let error = world.run(daemon.cri.checkpoint_pod(request(&pod, &[&container], &output, limit))).unwrap_err();
    assert_eq!(error.code(), Code::DeadlineExceeded);
    assert!(error.message().contains("it was not complete before the time limit of the caller"), "{error}");
    assert!(began.elapsed() < limit, "{:?}", began.elapsed());
    assert!(world.script.seen("checkpoint stopped"));
    assert!(names(&output).is_empty());
    world.script.release();
    world.run(save(&mut daemon, &pod, &[&container], &output)).unwrap();
}

#[test]
fn a_caller_that_vanishes_stops_its_checkpoint() {
    let (world, outputs) = (world(), Outputs::new());
    let mut daemon = world.daemon();
    let output = outputs.path("out");
    let (pod, container) = world.run(run(&mut daemon, "a"));
    world.script.hang_at("checkpoint");
    let saving = world.spawn({
        let (mut cri, request) = (daemon.cri.clone(), request(&pod, &[&container], &output, GENEROUS));
        async move { cri.checkpoint_pod(request).await.map(drop) }
    });
    world.eventually("the pod process saves", || world.script.seen("checkpoint"));
    let error = world.run(save(&mut daemon, &pod, &[&container], &outputs.path("other"))).unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert!(error.message().contains("another checkpoint of it is in progress"), "{error}");
    assert!(names(&outputs.path("other")).is_empty());
    saving.abort();
    world.eventually("the checkpoint is stopped", || world.script.seen("checkpoint stopped"));
    world.eventually("the files are removed", || names(&output).is_empty());
    world.script.release();
    // The stopped one may need a moment to end.
    world.eventually("the pod is saved", || world.run(save(&mut daemon, &pod, &[&container], &output)).is_ok());
}

#[test]
fn a_pod_process_that_does_not_stop_is_given_up() {
    let (world, outputs) = (world(), Outputs::new());
    let mut daemon = world.daemon();
    let output = outputs.path("out");
    let (pod, container) = world.run(run(&mut daemon, "a"));
    world.pods.only().checkpoints.ignores_stop.store(true, Ordering::SeqCst);
    world.script.hang_at("checkpoint");
    let limit = Duration::from_secs(1);
    let error = world.run(daemon.cri.checkpoint_pod(request(&pod, &[&container], &output, limit))).unwrap_err();
    // The second is the client's own timer.
    assert!(matches!(error.code(), Code::DeadlineExceeded | Code::Cancelled), "{error}");
    assert_eq!(names(&output), ["memory", "scratch", "state"], "the pod process has ten seconds to stop");
    world.eventually("the files are removed", || names(&output).is_empty());
}

#[test]
fn a_daemon_that_dies_leaves_no_complete_checkpoint_and_stops_it() {
    let (world, outputs) = (world(), Outputs::new());
    let mut daemon = world.daemon();
    let output = outputs.path("out");
    let (pod, container) = world.run(run(&mut daemon, "a"));
    world.script.hang_at("checkpoint");
    let saving = world.spawn({
        let (mut cri, request) = (daemon.cri.clone(), request(&pod, &[&container], &output, GENEROUS));
        async move { cri.checkpoint_pod(request).await.map(drop) }
    });
    world.eventually("the pod process saves", || world.script.seen("checkpoint"));
    daemon.kill();
    world.run(saving).unwrap().unwrap_err();
    world.eventually("the checkpoint is stopped", || world.script.seen("checkpoint stopped"));
    assert!(!output.join("complete").exists());
    world.script.release();
    let mut daemon = world.daemon();
    world.run(save(&mut daemon, &pod, &[&container], &outputs.path("next"))).unwrap();
    assert_eq!(names(&outputs.path("next")).len(), 5);
    world.run(daemon.remove_pod(&pod)).unwrap();
    assert!(world.left().is_empty(), "{:?}", world.left());
}
