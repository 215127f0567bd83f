//! Tests RestorePod on simulated pod processes: a pod continues with all of its containers, or nothing of it remains.

mod common;

use common::saved::{Saved, with_volume};
use common::{Daemon, container_config, pod_config};
use nacelle_proto::cri;
use nix::mount::umount;
use std::time::Duration;
use tonic::{Code, Request, Status};

/// Longer than any restore of a simulated VM.
const GENEROUS: Duration = Duration::from_secs(50);

fn request_of(saved: &Saved, name: &str) -> cri::RestorePodRequest {
    cri::RestorePodRequest {
        checkpoint_path: saved.path().display().to_string(),
        config: Some(pod_config(name)),
        container_configs: vec![with_volume("a", &saved.volume(name)), container_config("b")],
        ..Default::default()
    }
}

async fn restore(daemon: &mut Daemon, request: cri::RestorePodRequest) -> Result<cri::RestorePodResponse, Status> {
    restore_within(daemon, request, GENEROUS).await
}

async fn restore_within(
    daemon: &mut Daemon,
    request: cri::RestorePodRequest,
    limit: Duration,
) -> Result<cri::RestorePodResponse, Status> {
    let mut request = Request::new(request);
    request.set_timeout(limit);
    daemon.cri.restore_pod(request).await.map(tonic::Response::into_inner)
}

#[test]
fn a_pod_continues_with_all_its_containers() {
    let (saved, mut daemon) = Saved::new();
    let world = &saved.world;
    world.run(async {
        let before = world.script.steps().len();
        let restored = restore(&mut daemon, request_of(&saved, "new")).await.unwrap();
        let steps = world.script.steps().split_off(before);
        let at = |name: &str| steps.iter().position(|step| *step == name).unwrap();
        assert!(at("configure") < at("join"), "nothing of the saved pod reaches the network: {steps:?}");
        let names: Vec<_> = restored.restored_containers.iter().map(|container| container.name.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
        let ids: Vec<_> = restored.restored_containers.iter().map(|container| container.container_id.clone()).collect();
        for id in &ids {
            assert!(!saved.ids.contains(id));
            assert_eq!(daemon.status(id).await.unwrap().state(), cri::ContainerState::ContainerCreated);
        }
        let fake = world.pods.of(&restored.pod_sandbox_id);
        let base = fake.spec.checkpoint.clone().unwrap();
        assert_eq!((&base.directory, fake.spec.template.is_none()), (&saved.path(), true));
        assert_eq!((base.booted_mib, fake.spec.memory_mib), (fake.spec.memory_mib, base.booted_mib));
        let pairs: Vec<_> = base.containers.iter().map(|it| (it.saved_id.to_string(), it.id.to_string())).collect();
        assert_eq!(pairs, [(saved.ids[0].clone(), ids[0].clone()), (saved.ids[1].clone(), ids[1].clone())]);
        assert_eq!(base.images.iter().map(|it| it.is_used).collect::<Vec<_>>(), [true, false]);

        // The volume of the new pod has the name that the guest knows, also for a container that is created later.
        let later = with_volume("later", &saved.volume("new"));
        daemon.create_from(&restored.pod_sandbox_id, later).await.unwrap();
        world.eventually("three containers", || fake.made.lock().unwrap().len() == 3);
        let names: Vec<Vec<String>> = {
            let made = fake.made.lock().unwrap();
            made.iter().map(|request| request.empty_dirs.iter().map(|it| it.name.clone()).collect()).collect()
        };
        let name = "memory.cache.0000000000000001".to_owned();
        assert_eq!(names, [vec![name.clone()], vec![], vec![name]]);

        // Repeated, it returns the same; another checkpoint or pod of that name does not.
        let again = restore(&mut daemon, request_of(&saved, "new")).await.unwrap();
        assert_eq!(again, restored);
        let mut other = request_of(&saved, "new");
        other.config.as_mut().unwrap().hostname = "other".into();
        assert_eq!(restore(&mut daemon, other).await.unwrap_err().code(), Code::AlreadyExists);
        for id in &ids {
            daemon.start(id).await.unwrap();
        }
        // A second pod of the same checkpoint.
        let second = restore(&mut daemon, request_of(&saved, "second")).await.unwrap();
        assert_ne!(second.pod_sandbox_id, restored.pod_sandbox_id);
        for pod in [restored.pod_sandbox_id, second.pod_sandbox_id] {
            daemon.stop_pod(&pod).await.unwrap();
            daemon.remove_pod(&pod).await.unwrap();
        }
    });
    saved.nothing_left();
}

type Change = fn(&mut cri::RestorePodRequest);

#[test]
fn what_does_not_fit_is_refused_before_a_pod_exists() {
    let (saved, mut daemon) = Saved::new();
    let world = &saved.world;
    let changes: [(Change, Code, &str); 12] = [
        (|request| request.checkpoint_path.clear(), Code::InvalidArgument, "checkpoint_path is missing"),
        (|request| request.checkpoint_path = "a".into(), Code::InvalidArgument, "an absolute path"),
        (|request| request.checkpoint_path.push_str("/none"), Code::NotFound, "it does not exist"),
        (|request| request.options = [("x".into(), String::new())].into(), Code::InvalidArgument, "options has \"x\""),
        (|request| request.config = None, Code::InvalidArgument, "config"),
        (
            |request| request.runtime_handler = common::SHAPE_HANDLER.into(),
            Code::FailedPrecondition,
            "handler is shaped",
        ),
        (|request| drop(request.container_configs.pop()), Code::FailedPrecondition, "lacks the container \"b\""),
        (
            |request| request.container_configs.push(container_config("c")),
            Code::FailedPrecondition,
            "has no container \"c\"",
        ),
        (
            |request| request.container_configs.push(container_config("b")),
            Code::InvalidArgument,
            "the container \"b\" twice",
        ),
        (|request| request.container_configs[1].command.clear(), Code::FailedPrecondition, "its command is [] now"),
        (
            |request| request.container_configs[0].mounts.clear(),
            Code::FailedPrecondition,
            "at /cache in the checkpoint only",
        ),
        (
            |request| {
                let sysctls = &mut request.config.as_mut().unwrap().linux.get_or_insert_default().sysctls;
                sysctls.insert("net.ipv4.ip_forward".into(), "1".into());
            },
            Code::FailedPrecondition,
            "the pod's sysctls",
        ),
    ];
    world.run(async {
        let spawned = || world.script.steps().iter().filter(|step| **step == "spawn").count();
        let before = spawned();
        for (change, code, text) in changes {
            let mut request = request_of(&saved, "new");
            change(&mut request);
            let error = restore(&mut daemon, request).await.unwrap_err();
            assert!(error.code() == code && error.message().contains(text), "{error:?}, expected {text}");
            assert!(daemon.pods().await.is_empty());
        }
        assert_eq!(spawned(), before);
    });
    saved.nothing_left();
}

#[test]
fn a_failure_removes_everything() {
    let (saved, mut daemon) = Saved::new();
    let world = &saved.world;
    world.run(async {
        for step in ["netns", "spawn", "setup", "configure", "join", "create"] {
            world.script.fail_named(step, 1);
            let error = restore(&mut daemon, request_of(&saved, "new")).await.unwrap_err();
            assert!(error.message().contains(step), "{step}: {error}");
            assert!(daemon.pods().await.is_empty(), "{step}");
            world.script.calm();
        }
        // A volume that is no longer in memory is found when its container is prepared.
        umount(&saved.volume("new")).unwrap();
        let error = restore(&mut daemon, request_of(&saved, "new")).await.unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition);
        assert!(error.message().contains("/cache is not in the checkpoint"), "{error}");
        assert!(daemon.pods().await.is_empty());
    });
    saved.nothing_left();
}

#[test]
fn the_failure_of_a_later_container_removes_the_earlier_ones() {
    let (saved, mut daemon) = Saved::new();
    let world = &saved.world;
    world.run(async {
        let before = world.script.steps().len();
        let restored = restore(&mut daemon, request_of(&saved, "new")).await.unwrap();
        let steps = world.script.steps().split_off(before);
        let second = steps.iter().enumerate().filter(|(_, step)| **step == "create").nth(1).unwrap().0 + 1;
        daemon.stop_pod(&restored.pod_sandbox_id).await.unwrap();
        daemon.remove_pod(&restored.pod_sandbox_id).await.unwrap();
        let before = world.script.steps().len();
        world.script.fail_at(second);
        let error = restore(&mut daemon, request_of(&saved, "new")).await.unwrap_err();
        assert!(error.message().contains("create"), "{error}");
        let steps = world.script.steps().split_off(before);
        assert_eq!(steps.iter().filter(|step| **step == "create").count(), 2, "{steps:?}");
        assert!(daemon.pods().await.is_empty());
        world.script.calm();
    });
    saved.nothing_left();
}

#[test]
fn no_container_starts_before_all_are_created() {
    let (saved, mut daemon) = Saved::new();
    let world = &saved.world;
    world.run(async {
        world.script.hang_at("create");
        let before = world.script.steps().len();
        let mut other = daemon.cri.clone();
        let restoring = restore(&mut daemon, request_of(&saved, "new"));
        let starting = async {
            while !world.script.steps().split_off(before).contains(&"create") {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            // The step hangs a moment after it was noted.
            tokio::time::sleep(Duration::from_millis(200)).await;
            let base = world.pods.only().spec.checkpoint.clone().unwrap();
            let first = base.containers[0].id.to_string();
            let request = cri::StartContainerRequest { container_id: first.clone() };
            let error = other.start_container(request).await.unwrap_err();
            assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
            assert!(error.message().contains("it is being restored"), "{error}");
            world.script.release();
            first
        };
        let (restored, first) = tokio::join!(restoring, starting);
        let restored = restored.unwrap();
        assert!(!world.script.steps().split_off(before).contains(&"start"));
        daemon.start(&first).await.unwrap();
        daemon.stop_pod(&restored.pod_sandbox_id).await.unwrap();
        daemon.remove_pod(&restored.pod_sandbox_id).await.unwrap();
    });
    saved.nothing_left();
}

#[test]
fn a_limit_that_is_too_short_starts_no_pod() {
    let (saved, mut daemon) = Saved::new();
    let world = &saved.world;
    let before = world.script.steps().len();
    for _ in 0..8 {
        // Shorter than the time that is kept for the removal.
        let limit = Duration::from_millis(180);
        let error = world.run(restore_within(&mut daemon, request_of(&saved, "new"), limit)).unwrap_err();
        assert_eq!(error.code(), Code::DeadlineExceeded, "{error}");
    }
    assert_eq!(world.script.steps().split_off(before), Vec::<&str>::new());
    saved.nothing_left();
}

#[test]
fn a_deadline_and_a_vanished_caller_remove_everything() {
    let (saved, mut daemon) = Saved::new();
    let world = &saved.world;
    for step in ["configure", "create"] {
        world.script.hang_at(step);
        let error =
            world.run(restore_within(&mut daemon, request_of(&saved, "new"), Duration::from_secs(3))).unwrap_err();
        assert_eq!(error.code(), Code::DeadlineExceeded, "{step}: {error}");
        world.script.release();
        world.eventually("no pod", || world.pods.alive().is_empty());

        world.script.hang_at(step);
        world.run(async {
            let restoring = restore(&mut daemon, request_of(&saved, "gone"));
            assert!(tokio::time::timeout(Duration::from_secs(2), restoring).await.is_err());
        });
        world.script.release();
        world.eventually("no pod", || world.pods.alive().is_empty());
        world.run(async {
            for _ in 0..600 {
                if daemon.pods().await.is_empty() {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            panic!("a pod remains");
        });
    }
    saved.nothing_left();
}

#[test]
fn a_half_restored_pod_ends_with_its_daemon_and_a_whole_one_does_not() {
    let (saved, mut daemon) = Saved::new();
    let world = &saved.world;
    let whole = world.run(restore(&mut daemon, request_of(&saved, "whole"))).unwrap();
    world.script.hang_at("create");
    world.run(async {
        let restoring = restore(&mut daemon, request_of(&saved, "half"));
        assert!(tokio::time::timeout(Duration::from_millis(500), restoring).await.is_err());
    });
    assert_eq!(world.pods.alive().len(), 2);
    daemon.kill();
    world.script.release();
    let mut daemon = world.daemon();
    world.run(async {
        let pods = daemon.pods().await;
        assert_eq!(pods.iter().map(|pod| pod.id.as_str()).collect::<Vec<_>>(), [whole.pod_sandbox_id.as_str()]);
        for container in &whole.restored_containers {
            let status = daemon.status(&container.container_id).await.unwrap();
            assert_eq!(status.state(), cri::ContainerState::ContainerCreated);
            daemon.start(&container.container_id).await.unwrap();
        }
        assert_eq!(restore(&mut daemon, request_of(&saved, "whole")).await.unwrap(), whole);
        daemon.stop_pod(&whole.pod_sandbox_id).await.unwrap();
        daemon.remove_pod(&whole.pod_sandbox_id).await.unwrap();
    });
    saved.nothing_left();
}
