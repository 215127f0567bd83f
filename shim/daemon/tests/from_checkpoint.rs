//! Tests pods that name a checkpoint in an annotation, on simulated pod processes: each container continues when it is created.

mod common;

use common::saved::{Saved, with_volume};
use common::{Daemon, SHAPE_HANDLER, container_config, pod_config};
use nacelle_proto::cri;
use nix::mount::{MsFlags, mount, umount};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;
use tonic::{Code, Status};

const ANNOTATION: &str = "vm.nacelle.dev/from-checkpoint";

/// Puts the checkpoint where pods of the namespace can name it.
fn publish(saved: &Saved) -> PathBuf {
    let namespace = saved.world.config().paths.checkpoints().join("default");
    fs::create_dir_all(&namespace).unwrap();
    let copied =
        std::process::Command::new("cp").args(["-a", "--sparse=always"]).arg(saved.path()).arg(&namespace).status();
    assert!(copied.unwrap().success());
    namespace.join("checkpoint")
}

fn from(checkpoint: &str, name: &str) -> cri::RunPodSandboxRequest {
    let mut config = pod_config(name);
    config.annotations.insert(ANNOTATION.into(), checkpoint.into());
    cri::RunPodSandboxRequest { config: Some(config), runtime_handler: String::new() }
}

async fn run(daemon: &mut Daemon, request: cri::RunPodSandboxRequest) -> Result<String, Status> {
    Ok(daemon.cri.run_pod_sandbox(request).await?.into_inner().pod_sandbox_id)
}

async fn is_ready(daemon: &mut Daemon, pod: &str) -> bool {
    daemon.pod_status(pod).await.unwrap().state() == cri::PodSandboxState::SandboxReady
}

async fn remove(daemon: &mut Daemon, pod: &str) {
    daemon.stop_pod(pod).await.unwrap();
    daemon.remove_pod(pod).await.unwrap();
}

/// Returns the ids under which the saved containers wait, in the order `a`, `b`.
fn waiting(saved: &Saved, pod: &str) -> [String; 2] {
    let base = saved.world.pods.of(pod).spec.checkpoint.clone().unwrap();
    let id_of =
        |saved_id: &String| base.containers.iter().find(|it| it.saved_id.as_str() == saved_id).unwrap().id.to_string();
    [id_of(&saved.ids[0]), id_of(&saved.ids[1])]
}

#[test]
fn each_container_continues_when_it_is_created() {
    let (saved, mut daemon) = Saved::new();
    let checkpoint = publish(&saved);
    let world = &saved.world;
    let (pod, [a, b]) = world.run(async {
        let pod = run(&mut daemon, from("checkpoint", "new")).await.unwrap();
        let ids = waiting(&saved, &pod);
        // The files are needed for the start alone, also if its request is repeated.
        fs::remove_dir_all(&checkpoint).unwrap();
        assert_eq!(run(&mut daemon, from("checkpoint", "new")).await.unwrap(), pod);

        // One that is not in the checkpoint is new.
        let init = daemon.create(&pod, "init").await.unwrap();
        assert!(!ids.contains(&init));
        daemon.start(&init).await.unwrap();
        let request = cri::CheckpointPodRequest {
            pod_sandbox_id: pod.clone(),
            output_path: saved.path().display().to_string(),
            container_ids: vec![init],
            options: [].into(),
        };
        let error = daemon.cri.checkpoint_pod(request).await.unwrap_err();
        assert!(error.message().contains("\"a\" has not continued"), "{error}");

        // What does not fit changes nothing.
        let other = cri::ContainerConfig { command: vec!["/bin/false".into()], ..container_config("b") };
        let error = daemon.create_from(&pod, other).await.unwrap_err();
        assert!(error.code() == Code::FailedPrecondition && error.message().contains("its command"), "{error}");
        let volume = saved.volume("new");
        umount(&volume).unwrap();
        let error = daemon.create_from(&pod, with_volume("a", &volume)).await.unwrap_err();
        assert!(error.message().contains("/cache is not in the checkpoint"), "{error}");
        mount(Some("none"), &volume, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        assert!(is_ready(&mut daemon, &pod).await);
        for _ in 0..2 {
            assert_eq!(daemon.create(&pod, "b").await.unwrap(), ids[1]);
        }
        daemon.start(&ids[1]).await.unwrap();
        (pod, ids)
    });
    daemon.kill();
    let mut daemon = world.daemon();
    world.run(async {
        assert_eq!(daemon.status(&b).await.unwrap().state(), cri::ContainerState::ContainerRunning);
        assert_eq!(daemon.create_from(&pod, with_volume("a", &saved.volume("new"))).await.unwrap(), a);
        daemon.start(&a).await.unwrap();
        let fake = world.pods.of(&pod);
        let names: Vec<_> = {
            let made = fake.made.lock().unwrap();
            made.iter().flat_map(|request| &request.empty_dirs).map(|volume| volume.name.clone()).collect()
        };
        assert_eq!(names, ["memory.cache.0000000000000001"]);

        // A container that has ended starts anew, as in every pod.
        daemon.stop(&b).await.unwrap();
        let mut again = container_config("b");
        again.metadata.as_mut().unwrap().attempt = 1;
        let second = daemon.create_from(&pod, again).await.unwrap();
        assert!(second != a && second != b);
        daemon.start(&second).await.unwrap();
        remove(&mut daemon, &pod).await;
    });
    saved.nothing_left();
}

#[test]
fn a_checkpoint_that_a_pod_may_not_have_is_refused_before_it_exists() {
    let (saved, mut daemon) = Saved::new();
    let checkpoint = publish(&saved);
    let namespace = checkpoint.parent().unwrap();
    let world = &saved.world;
    world.run(async {
        let mut other = from("checkpoint", "new");
        other.config.as_mut().unwrap().metadata.as_mut().unwrap().namespace = "other".into();
        let mut outside = from("checkpoint", "new");
        outside.config.as_mut().unwrap().metadata.as_mut().unwrap().namespace = "..".into();
        let mut forbidden = from("checkpoint", "new");
        forbidden.runtime_handler = SHAPE_HANDLER.into();
        let mut sysctl = from("checkpoint", "new");
        let sysctls = &mut sysctl.config.as_mut().unwrap().linux.as_mut().unwrap().sysctls;
        sysctls.insert("net.ipv4.ip_forward".into(), "1".into());
        for (request, code, text) in [
            (from("none", "new"), Code::NotFound, "default/none: it does not exist"),
            (other, Code::NotFound, "other: it does not exist"),
            (outside, Code::InvalidArgument, "config.metadata.namespace"),
            (from("../default/checkpoint", "new"), Code::InvalidArgument, "the name of a checkpoint"),
            (forbidden, Code::InvalidArgument, "handler shaped allows"),
            (sysctl, Code::FailedPrecondition, "the pod's sysctls"),
        ] {
            let error = run(&mut daemon, request).await.unwrap_err();
            assert!(error.code() == code && error.message().contains(text), "{error:?}, expected {text}");
        }
        fs::set_permissions(namespace, fs::Permissions::from_mode(0o777)).unwrap();
        let error = run(&mut daemon, from("checkpoint", "new")).await.unwrap_err();
        assert!(error.message().contains("let only root write"), "{error}");
        fs::set_permissions(namespace, fs::Permissions::from_mode(0o700)).unwrap();

        // RestorePod has a checkpoint already.
        let request = cri::RestorePodRequest {
            checkpoint_path: checkpoint.display().to_string(),
            config: from("checkpoint", "new").config,
            container_configs: vec![with_volume("a", &saved.volume("new")), container_config("b")],
            ..Default::default()
        };
        let error = daemon.cri.restore_pod(request).await.unwrap_err();
        assert!(error.code() == Code::InvalidArgument && error.message().contains(ANNOTATION), "{error}");
        assert!(daemon.pods().await.is_empty());
    });
    saved.nothing_left();
}

#[test]
fn a_pod_whose_container_cannot_continue_ends() {
    let (saved, mut daemon) = Saved::new();
    publish(&saved);
    let world = &saved.world;
    world.run(async {
        let pod = run(&mut daemon, from("checkpoint", "new")).await.unwrap();
        world.script.fail_named("create", 1);
        let error = daemon.create(&pod, "b").await.unwrap_err();
        assert!(error.message().contains("create"), "{error}");
        for _ in 0..600 {
            if !is_ready(&mut daemon, &pod).await {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let error = daemon.create(&pod, "b").await.unwrap_err();
        assert!(error.code() == Code::FailedPrecondition && error.message().contains("could not continue"), "{error}");
        remove(&mut daemon, &pod).await;
        // kubelet makes a new sandbox.
        let pod = run(&mut daemon, from("checkpoint", "new")).await.unwrap();
        let [_, b] = waiting(&saved, &pod);
        assert_eq!(daemon.create(&pod, "b").await.unwrap(), b);
        remove(&mut daemon, &pod).await;
    });
    saved.nothing_left();
}

#[test]
fn a_pod_ends_with_the_daemon_that_let_a_container_continue() {
    let (saved, mut daemon) = Saved::new();
    publish(&saved);
    let world = &saved.world;
    let pod = world.run(async {
        let pod = run(&mut daemon, from("checkpoint", "new")).await.unwrap();
        world.script.hang_at("create");
        let creating = daemon.create(&pod, "b");
        assert!(tokio::time::timeout(Duration::from_millis(500), creating).await.is_err());
        pod
    });
    daemon.kill();
    world.script.release();
    let mut daemon = world.daemon();
    world.run(async {
        assert!(!is_ready(&mut daemon, &pod).await);
        assert!(world.pods.alive().is_empty());
        daemon.remove_pod(&pod).await.unwrap();
    });
    saved.nothing_left();
}
