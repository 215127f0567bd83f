//! Tests failures: of each step of a start, of a cleanup and of a container's creation; pod processes that send false reports,
//! hang and die; clients that disconnect.

mod common;

use common::{World, pod_config};
use nacelle_base::PodId;
use nacelle_proto::{cri, node, pod};
use proptest::prelude::*;
use std::time::Duration;
use tonic::{Code, Status};

/// Also while pods are being created, which are known from before they have a network.
#[test]
fn networks_without_a_pod_are_released_while_the_daemon_serves() {
    let mut world = World::new();
    world.gc_interval = Duration::from_millis(1);
    let mut daemon = world.daemon();
    let mut pods = Vec::new();
    for number in 0..20_u8 {
        let orphan = PodId::from_bytes([number; 32]);
        world.networks.attached.lock().unwrap().insert(orphan.clone());
        pods.push(world.run(daemon.run_pod(&format!("pod-{number}"))).unwrap());
        world.eventually("the network without a pod is gone", || {
            !world.networks.attached.lock().unwrap().contains(&orphan)
        });
    }
    let attached: Vec<String> = world.networks.attached.lock().unwrap().iter().map(ToString::to_string).collect();
    pods.sort();
    assert_eq!(attached, pods);
    for pod in pods {
        world.run(daemon.remove_pod(&pod)).unwrap();
    }
    assert_eq!(world.left(), Vec::<String>::new());
}

#[test]
fn a_start_that_fails_at_any_step_leaves_nothing() {
    let world = World::new();
    let mut daemon = world.daemon();
    for step in 1.. {
        assert!(step < 20, "the start has an end");
        world.script.fail_at(step);
        let ran = world.run(daemon.run_pod("a"));
        let steps = world.script.calm();
        match ran {
            Err(error) => {
                assert!(error.message().contains("scripted"), "step {step}: {error}");
                let pods = world.run(daemon.pods());
                if let Some(pod) = pods.first() {
                    // The failing step belongs to the cleanup: the error is reported, and the next attempt succeeds.
                    world.run(daemon.remove_pod(&pod.id)).unwrap();
                }
                assert_eq!(world.left(), Vec::<String>::new(), "step {step}");
                assert!(world.run(daemon.pods()).is_empty());
            }
            Ok(pod) => {
                assert!(step > steps && step > 4, "all of {steps} steps were made to fail");
                world.run(daemon.remove_pod(&pod)).unwrap();
                break;
            }
        }
    }
    assert_eq!(world.left(), Vec::<String>::new());
}

/// Its taps are gone with it.
#[test]
fn a_vm_that_ends_before_it_is_joined_to_its_network_is_the_cause() {
    let world = World::new();
    let mut daemon = world.daemon();
    world.script.fail_once_each(&["join", "configure"]);
    let error = world.run(daemon.run_pod("a")).unwrap_err();
    assert!(error.message().contains("scripted configure") && !error.message().contains("join"), "{error}");
    assert_eq!(world.left(), Vec::<String>::new());
    world.script.fail_once_each(&["join"]);
    let error = world.run(daemon.run_pod("a")).unwrap_err();
    assert!(error.message().contains("join the machine of the pod to its network"), "{error}");
    assert_eq!(world.left(), Vec::<String>::new());
}

#[test]
fn a_machine_in_huge_pages_that_the_node_has_not_is_refused_before_anything_is_made() {
    let world = World::new();
    let mut daemon = world.daemon();
    let request =
        cri::RunPodSandboxRequest { config: Some(pod_config("a")), runtime_handler: common::HUGE_HANDLER.into() };
    let error = world.run(daemon.cri.run_pod_sandbox(request)).unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted, "{error}");
    for words in ["8388608", "hugepages-2048kB/nr_hugepages"] {
        assert!(error.message().contains(words), "{error}");
    }
    assert!(!world.script.seen("netns") && !world.script.seen("spawn"));
    assert_eq!(world.left(), Vec::<String>::new());
    assert!(world.run(daemon.pods()).is_empty());
}

#[test]
fn what_cannot_be_given_back_is_told_and_tried_again() {
    for what in ["teardown", "clean up"] {
        let world = World::new();
        let mut daemon = world.daemon();
        world.run(async {
            let pod = daemon.run_pod("a").await.unwrap();
            world.script.fail_named(what, 2);
            let error = daemon.stop_pod(&pod).await.unwrap_err();
            assert!(error.message().contains("scripted"), "{error}");
            let status = cri::PodSandboxStatusRequest { pod_sandbox_id: pod.clone(), verbose: true };
            let status = daemon.cri.pod_sandbox_status(status).await.unwrap().into_inner();
            assert_eq!(status.status.unwrap().state(), cri::PodSandboxState::SandboxNotready);
            assert!(status.info["info"].contains("scripted"), "{:?}", status.info);
            assert!(daemon.remove_pod(&pod).await.is_err());
            daemon.remove_pod(&pod).await.unwrap();
        });
        assert_eq!(world.left(), Vec::<String>::new());
    }
}

#[test]
fn what_cannot_be_given_back_after_a_failed_start_is_kept_for_the_next_daemon_too() {
    let world = World::new();
    let mut daemon = world.daemon();
    world.run(async {
        world.script.fail_named("teardown", 1);
        world.script.hang_at("configure");
        let mut other = common::Daemon { runtime: None, cri: daemon.cri.clone(), images: daemon.images.clone() };
        let run = tokio::spawn(async move { other.run_pod("a").await });
        while !world.script.seen("configure") {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        // Stopped during the boot: the start is cancelled, and the cleanup fails once.
        let id = {
            let directory = world.pods.alive().pop().unwrap();
            directory.file_name().unwrap().to_str().unwrap().to_owned()
        };
        assert!(daemon.stop_pod(&id).await.is_err());
        assert_eq!(run.await.unwrap().unwrap_err().code(), Code::FailedPrecondition);
        assert_eq!(daemon.pods().await.len(), 1);
    });
    world.script.release();
    daemon.kill();
    let mut daemon = world.daemon();
    assert!(world.run(daemon.pods()).is_empty());
    assert_eq!(world.left(), Vec::<String>::new());
}

#[test]
fn a_container_that_cannot_be_made_is_not_there_and_one_that_cannot_start_has_ended() {
    let world = World::new();
    let mut daemon = world.daemon();
    world.run(async {
        let pod = daemon.run_pod("a").await.unwrap();
        world.script.fail_named("create", 1);
        let error = daemon.create_named(&pod, "c").await.unwrap_err();
        assert!(error.message().contains("scripted create"), "{error}");
        assert!(daemon.containers().await.is_empty());
        let id = daemon.create(&pod, "c").await.unwrap();
        world.script.fail_named("start", 1);
        let error = daemon.start(&id).await.unwrap_err();
        assert!(error.message().contains("scripted start"), "{error}");
        let status = daemon.status(&id).await.unwrap();
        assert_eq!((status.state(), status.reason.as_str()), (cri::ContainerState::ContainerExited, "StartError"));
        assert_ne!(status.exit_code, 0);
        assert!(status.message.contains("scripted start"), "{}", status.message);
        world.script.fail_named("remove", 1);
        assert!(daemon.remove(&id).await.is_err());
        daemon.remove(&id).await.unwrap();
        assert!(daemon.containers().await.is_empty());
        let id = daemon.create(&pod, "d").await.unwrap();
        daemon.start(&id).await.unwrap();
        for (step, request) in [("stop", true), ("remove", false)] {
            world.script.fail_named(step, 1);
            assert!(if request { daemon.stop(&id).await } else { daemon.remove(&id).await }.is_err(), "{step}");
            let status = daemon.status(&id).await.unwrap();
            assert_eq!((status.state(), status.finished_at), (cri::ContainerState::ContainerRunning, 0), "{step}");
        }
        // The pod process removed it, but its answer was lost.
        world.pods.only().change(|record| record.containers.retain(|container| container.id != id));
        daemon.stop(&id).await.unwrap();
        let status = daemon.status(&id).await.unwrap();
        assert_eq!((status.state(), status.exit_code), (cri::ContainerState::ContainerExited, 255));
    });
}

#[test]
fn no_container_is_created_from_a_damaged_image_and_the_cause_names_the_file() {
    let world = World::new();
    let mut daemon = world.daemon();
    let directory = world.config().paths.images();
    world.run(async {
        let pod = daemon.run_pod("a").await.unwrap();
        let find = || cri::ImageStatusRequest {
            image: Some(cri::ImageSpec { image: common::image::NAME.into(), ..Default::default() }),
            verbose: true,
        };
        for part in ["configs", "trees", "layers"] {
            let entries = std::fs::read_dir(directory.join(part)).unwrap().map(|entry| entry.unwrap().path());
            let mut files = entries.filter(|path| path.extension().is_none_or(|end| end == "erofs" || end == "idx"));
            let path = files.next().unwrap();
            let content = std::fs::read(&path).unwrap();
            let damages = [Some(&content[..content.len() / 2]), None];
            for damaged in damages {
                match damaged {
                    Some(short) => std::fs::write(&path, short).unwrap(),
                    None => std::fs::remove_file(&path).unwrap(),
                }
                let error = daemon.create(&pod, "c").await.unwrap_err();
                assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
                let what = match damaged {
                    Some(short) => format!("has {} bytes instead of {}", short.len(), content.len()),
                    None => "is missing".to_owned(),
                };
                let message = format!("{} {what}; pull the image again", path.display());
                assert!(error.message().contains(&message), "{error}");
                // kubelet pulls an image that is absent.
                assert!(daemon.images.image_status(find()).await.unwrap().into_inner().image.is_none());
                std::fs::write(&path, &content).unwrap();
                assert!(daemon.images.image_status(find()).await.unwrap().into_inner().image.is_some());
            }
        }
        assert!(daemon.containers().await.is_empty());
        daemon.create(&pod, "c").await.unwrap();
    });
}

/// What the command prints is what the daemon has found.
#[test]
fn the_daemon_verifies_images_on_demand() {
    let world = World::new();
    let mut daemon = world.daemon();
    let layers = world.config().paths.images().join("layers");
    let mut node = world.node();
    world.run(async {
        let mut verify = async |images: &[&str], repair| {
            let images = images.iter().map(|image| (*image).to_owned()).collect();
            node.verify_images(node::VerifyImagesRequest { images, repair }).await.map(tonic::Response::into_inner)
        };
        let report = verify(&[], false).await.unwrap();
        assert!(report.images == 1 && report.files == 4 && report.bytes > 0 && report.damaged.is_empty(), "{report:?}");
        let mut entries = std::fs::read_dir(&layers).unwrap().map(|entry| entry.unwrap().path());
        let blob = entries.find(|path| path.extension().is_some_and(|end| end == "blob")).unwrap();
        let mut content = std::fs::read(&blob).unwrap();
        content[0] ^= 1;
        std::fs::write(&blob, content).unwrap();
        let report = verify(&[common::image::NAME], false).await.unwrap();
        let [damage] = report.damaged.as_slice() else { panic!("{report:?}") };
        assert_eq!(
            (&damage.path, &damage.names[..]),
            (&blob.display().to_string(), &[common::image::NAME.to_owned()][..])
        );
        assert!(damage.damage.starts_with("has the digest sha256:"), "{damage:?}");
        assert!(!damage.repaired && damage.repair_error.is_empty(), "{damage:?}");
        assert_eq!(verify(&["none:1"], false).await.unwrap_err().code(), Code::NotFound);
        let pod = daemon.run_pod("a").await.unwrap();
        let error = daemon.create(&pod, "c").await.unwrap_err();
        assert!(
            error.code() == Code::FailedPrecondition && error.message().contains(".blob has the digest"),
            "{error}"
        );
    });
}

#[test]
fn a_dead_machine_is_told_and_its_pod_can_be_removed() {
    let world = World::new();
    let mut daemon = world.daemon();
    let (pod, id) = world.run(async {
        let pod = daemon.run_pod("a").await.unwrap();
        let id = daemon.create(&pod, "c").await.unwrap();
        daemon.start(&id).await.unwrap();
        (pod, id)
    });
    let directory = world.pods.alive().pop().unwrap();
    world.pods.kill(&directory);
    world.eventually("the container has ended", || {
        world.run(daemon.status(&id)).unwrap().state() == cri::ContainerState::ContainerExited
    });
    let status = world.run(daemon.status(&id)).unwrap();
    assert_eq!((status.exit_code, status.reason.as_str()), (255, "Error"));
    world.eventually("the pod is not ready", || {
        world.run(daemon.pod_status(&pod)).unwrap().state() == cri::PodSandboxState::SandboxNotready
    });
    world.run(daemon.stop_pod(&pod)).unwrap();
    world.run(daemon.remove_pod(&pod)).unwrap();
    assert_eq!(world.left(), Vec::<String>::new());
}

#[test]
fn a_machine_that_says_that_it_ended_is_taken_down() {
    let world = World::new();
    let mut daemon = world.daemon();
    let pod = world.run(daemon.run_pod("a")).unwrap();
    world.pods.only().change(|record| record.mark_lost("kernel panic", 0));
    world.eventually("the machine is taken down", || world.pods.alive().is_empty());
    world.eventually("the pod says why", || {
        let request = cri::PodSandboxStatusRequest { pod_sandbox_id: pod.clone(), verbose: true };
        let status = world.run(daemon.cri.pod_sandbox_status(request)).unwrap().into_inner();
        status.info["info"].contains("kernel panic")
    });
    world.run(daemon.remove_pod(&pod)).unwrap();
}

#[test]
fn a_guest_that_hangs_keeps_nobody_waiting_but_those_who_asked_it() {
    let world = World::new();
    let mut daemon = world.daemon();
    let pod = world.run(daemon.run_pod("a")).unwrap();
    world.script.hang_at("create");
    let mut other = common::Daemon { runtime: None, cri: daemon.cri.clone(), images: daemon.images.clone() };
    let name = pod.clone();
    let create = world.spawn(async move { other.create_named(&name, "c").await });
    world.eventually("the guest is asked", || world.script.seen("create"));
    world.run(async {
        assert_eq!(daemon.pod_status(&pod).await.unwrap().state(), cri::PodSandboxState::SandboxReady);
        assert!(daemon.containers().await.is_empty());
        daemon.stop_pod(&pod).await.unwrap();
        assert!(create.await.unwrap().is_err());
        daemon.remove_pod(&pod).await.unwrap();
    });
    world.script.release();
    assert_eq!(world.left(), Vec::<String>::new());
}

#[test]
fn a_container_counts_as_created_while_the_guest_makes_it() {
    let world = World::new();
    let mut daemon = world.daemon();
    let pod = world.run(daemon.run_pod("a")).unwrap();
    world.script.hang_at("create");
    let (id, removed) = world.run(async {
        let id = daemon.create(&pod, "c").await.unwrap();
        assert_eq!(daemon.create(&pod, "c").await.unwrap(), id);
        let status = daemon.status(&id).await.unwrap();
        assert_eq!((status.state(), status.user), (cri::ContainerState::ContainerCreated, None));
        assert_eq!(daemon.containers().await.len(), 1);
        daemon.stop(&id).await.unwrap();
        (id, daemon.create(&pod, "removed").await.unwrap())
    });
    // Requests for the container wait for the guest meanwhile.
    let other = || common::Daemon { runtime: None, cri: daemon.cri.clone(), images: daemon.images.clone() };
    let (mut starter, mut changer, mut remover) = (other(), other(), other());
    let (started, changed) = (id.clone(), id.clone());
    let start = world.spawn(async move { starter.start(&started).await });
    let change = world.spawn(async move {
        let linux = Some(cri::LinuxContainerResources { cpu_shares: 77, ..Default::default() });
        let request = cri::UpdateContainerResourcesRequest { container_id: changed, linux, ..Default::default() };
        changer.cri.update_container_resources(request).await.map(drop)
    });
    let remove = world.spawn(async move { remover.remove(&removed).await });
    world.eventually("both are asked of the guest", || world.pods.only().made.lock().unwrap().len() == 2);
    assert!(!start.is_finished() && !change.is_finished() && !remove.is_finished());
    assert!(!world.script.seen("start") && !world.script.seen("update") && !world.script.seen("remove"));
    world.script.release();
    world.run(async {
        start.await.unwrap().unwrap();
        change.await.unwrap().unwrap();
        remove.await.unwrap().unwrap();
        let status = daemon.status(&id).await.unwrap();
        assert_eq!(status.state(), cri::ContainerState::ContainerRunning);
        assert_eq!(status.user.unwrap().linux.unwrap().uid, 7);
        assert_eq!(status.resources.unwrap().linux.unwrap().cpu_shares, 77);
        assert_eq!(daemon.containers().await.len(), 1);
        daemon.remove_pod(&pod).await.unwrap();
    });
    assert_eq!(world.left(), Vec::<String>::new());
}

#[test]
fn one_that_was_created_and_cannot_be_made_has_ended_and_says_why() {
    let world = World::new();
    let mut daemon = world.daemon();
    let pod = world.run(daemon.run_pod("a")).unwrap();
    world.script.hang_at("create");
    world.script.fail_named("create", 1);
    let id = world.run(daemon.create(&pod, "c")).unwrap();
    let mut starter = common::Daemon { runtime: None, cri: daemon.cri.clone(), images: daemon.images.clone() };
    let started = id.clone();
    let start = world.spawn(async move { starter.start(&started).await });
    world.script.release();
    world.run(async {
        for answer in [start.await.unwrap(), daemon.start(&id).await] {
            let error = answer.unwrap_err();
            assert!(error.message().contains("scripted create"), "{error}");
        }
        let status = daemon.status(&id).await.unwrap();
        assert_eq!((status.state(), status.reason.as_str()), (cri::ContainerState::ContainerExited, "StartError"));
        assert_eq!((status.exit_code, status.started_at), (128, 0));
        assert!(status.finished_at >= status.created_at && status.message.contains("scripted create"));
        daemon.remove(&id).await.unwrap();
        let id = daemon.create(&pod, "c").await.unwrap();
        daemon.start(&id).await.unwrap();
        daemon.remove_pod(&pod).await.unwrap();
    });
    assert_eq!(world.left(), Vec::<String>::new());
}

#[test]
fn a_caller_that_goes_away_leaves_a_whole_pod() {
    let world = World::new();
    let mut daemon = world.daemon();
    world.script.hang_at("configure");
    let mut other = common::Daemon { runtime: None, cri: daemon.cri.clone(), images: daemon.images.clone() };
    let run = world.spawn(async move { other.run_pod("a").await });
    world.eventually("the pod boots", || world.script.seen("configure"));
    run.abort();
    world.eventually("the caller is gone", || run.is_finished());
    assert!(world.run(daemon.pods()).is_empty(), "a pod that boots is not shown");
    world.script.release();
    world.eventually("the pod is ready", || world.run(daemon.pods()).len() == 1);
    let pod = world.run(daemon.pods()).remove(0).id;
    assert_eq!(world.run(daemon.run_pod("a")).unwrap(), pod, "asked again, it is the same");
    world.run(daemon.remove_pod(&pod)).unwrap();
    assert_eq!(world.left(), Vec::<String>::new());
}

#[test]
fn a_pod_process_may_answer_with_anything() {
    let world = World::new();
    let mut daemon = world.daemon();
    world.run(async {
        let pod = daemon.run_pod("a").await.unwrap();
        let id = daemon.create(&pod, "c").await.unwrap();
        daemon.start(&id).await.unwrap();
        let fake = world.pods.only();
        let big = pod::ExecSyncResponse { stdout: vec![b'x'; 17 << 20], stderr: vec![], exit_code: i32::MIN };
        *fake.exec.lock().unwrap() = Some(Ok(big));
        let done = daemon.exec(&id, &["x"]).await.unwrap();
        assert_eq!((done.stdout.len(), done.exit_code), (16 << 20, i32::MIN));
        *fake.exec.lock().unwrap() = Some(Err(Status::unknown("first line\nsecond line")));
        let error = daemon.exec(&id, &["x"]).await.unwrap_err();
        // No pod process responds like this, but a closed connection does.
        assert_eq!(error.code(), Code::Unavailable);
        assert!(error.message().contains("first line second line"), "{error}");
        daemon.remove_pod(&pod).await.unwrap();
    });
}

#[test]
fn an_end_is_never_before_its_start() {
    let world = World::new();
    let mut daemon = world.daemon();
    let (pod, id, created_at) = world.run(async {
        let pod = daemon.run_pod("a").await.unwrap();
        let id = daemon.create(&pod, "c").await.unwrap();
        daemon.start(&id).await.unwrap();
        let created_at = daemon.status(&id).await.unwrap().created_at;
        (pod, id, created_at)
    });
    // By the pod's clock the container ended before the response to its start arrived here.
    world.pods.only().change(|record| {
        let container = &mut record.containers[0];
        container.phase = nacelle_pod::record::ContainerPhase::Exited;
        (container.started_at, container.finished_at) = (created_at, created_at);
    });
    world.eventually("the end is reported", || {
        world.run(daemon.status(&id)).unwrap().state() == cri::ContainerState::ContainerExited
    });
    let status = world.run(daemon.status(&id)).unwrap();
    assert!(status.finished_at >= status.started_at, "{status:?}");
    assert!(status.started_at > created_at, "the test would show nothing");
    world.run(daemon.remove_pod(&pod)).unwrap();
}

/// States of a pod; "self" stands for the container.
fn lies() -> impl Strategy<Value = pod::PodState> {
    let ids = prop_oneof![Just("self".to_owned()), Just("no id".to_owned()), Just("ab".repeat(32))];
    let container = (ids, -2..9i32, any::<(i64, i64, i64)>(), any::<u32>(), any::<bool>(), ".{0,40}").prop_map(
        |(id, phase, (created_at, started_at, finished_at), exit_code, oom_killed, message)| pod::ContainerState {
            id,
            phase,
            created_at,
            started_at,
            finished_at,
            exit_code,
            oom_killed,
            message,
            uid: 0,
            gid: 0,
            supplemental_groups: vec![],
        },
    );
    // Phase Stopped would end the pod; this test is about false reports of containers.
    let phase = prop_oneof![Just(0), Just(1), Just(2), Just(3), Just(77)];
    (phase, ".{0,40}", proptest::collection::vec(container, 0..4), ".{0,40}").prop_map(
        |(phase, failure, containers, kernel_release)| pod::PodState { phase, failure, containers, kernel_release },
    )
}

#[test]
fn a_pod_process_may_claim_anything() {
    let world = World::new();
    let daemon = world.daemon();
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 24,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let count = std::sync::atomic::AtomicUsize::new(0);
    runner
        .run(&proptest::collection::vec(lies(), 1..6), |claims| {
            let mut daemon = common::Daemon { runtime: None, cri: daemon.cri.clone(), images: daemon.images.clone() };
            let name = format!("p{}", count.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
            let pod = world.run(daemon.run_pod(&name)).unwrap();
            let id = world.run(daemon.create(&pod, "c")).unwrap();
            world.run(daemon.start(&id)).unwrap();
            let fake = world.pods.only();
            for mut claim in claims {
                for container in claim.containers.iter_mut().filter(|c| c.id == "self") {
                    container.id.clone_from(&id);
                }
                fake.lie(claim);
                let status = world.run(daemon.status(&id)).unwrap();
                prop_assert!(status.finished_at == 0 || status.finished_at >= status.started_at);
                prop_assert!(status.started_at == 0 || status.started_at >= status.created_at);
                prop_assert_eq!(world.run(daemon.containers()).len(), 1);
            }
            world.run(daemon.remove_pod(&pod)).unwrap();
            prop_assert_eq!(world.left(), Vec::<String>::new());
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_name_that_failed_can_be_used_again_at_once() {
    let world = World::new();
    let mut daemon = world.daemon();
    world.run(async {
        world.script.fail_named("configure", 1);
        let request = cri::RunPodSandboxRequest { config: Some(pod_config("a")), runtime_handler: String::new() };
        assert!(daemon.cri.run_pod_sandbox(request.clone()).await.is_err());
        daemon.cri.run_pod_sandbox(request).await.unwrap();
    });
}
