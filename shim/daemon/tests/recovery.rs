//! Tests recovery: a daemon is killed before and after each of its commits, and the next one takes over the node.

mod common;

use common::{Daemon, World};
use nacelle_proto::cri;
use nacelle_store::{CommitObserver, CommitPhase};
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

#[test]
fn running_pods_do_not_notice_and_nothing_is_forgotten() {
    let world = World::new();
    let mut daemon = world.daemon();
    let (pod, runs, ended, created) = world.run(async {
        let pod = daemon.run_pod("a").await.unwrap();
        let runs = daemon.create(&pod, "runs").await.unwrap();
        let ended = daemon.create(&pod, "ended").await.unwrap();
        let created = daemon.create(&pod, "created").await.unwrap();
        daemon.start(&runs).await.unwrap();
        daemon.start(&ended).await.unwrap();
        let cidr = cri::NetworkConfig { pod_cidr: "10.0.0.0/24".into() };
        let config = Some(cri::RuntimeConfig { network_config: Some(cidr) });
        daemon.cri.update_runtime_config(cri::UpdateRuntimeConfigRequest { runtime_config: config }).await.unwrap();
        (pod, runs, ended, created)
    });
    let before = world.run(daemon.pod_status(&pod)).unwrap();
    let alive = world.pods.alive();
    daemon.kill();
    // The next daemon learns of a container that ended while no daemon ran.
    world.pods.only().exit(&ended, 9);
    let mut daemon = world.daemon();
    assert_eq!(world.pods.alive(), alive);
    world.run(async {
        assert_eq!(daemon.pod_status(&pod).await.unwrap(), before);
        assert_eq!(daemon.status(&runs).await.unwrap().state(), cri::ContainerState::ContainerRunning);
        assert_eq!(daemon.status(&created).await.unwrap().state(), cri::ContainerState::ContainerCreated);
        let status = daemon.status(&ended).await.unwrap();
        assert_eq!((status.state(), status.exit_code), (cri::ContainerState::ContainerExited, 9));
        daemon.start(&created).await.unwrap();
        assert_eq!(daemon.exec(&runs, &["x"]).await.unwrap().exit_code, 3);
        assert_eq!(daemon.run_pod("a").await.unwrap(), pod);
    });
    world.pods.only().exit(&runs, 4);
    world.eventually("the next daemon follows the pod", || world.run(daemon.status(&runs)).unwrap().exit_code == 4);
}

#[test]
fn a_user_belongs_to_one_pod_also_after_a_restart() {
    let mut world = World::new();
    // One for image workers, and one for a pod.
    world.user_count = 2;
    let mut daemon = world.daemon();
    let pod = world.run(daemon.run_pod("a")).unwrap();
    daemon.kill();
    let mut daemon = world.daemon();
    world.run(async {
        for stopped in [false, true] {
            if stopped {
                daemon.stop_pod(&pod).await.unwrap();
            }
            let error = daemon.run_pod("b").await.unwrap_err();
            assert_eq!(error.code(), tonic::Code::ResourceExhausted, "{error}");
            assert!(error.message().contains("jail.user_count"), "{error}");
        }
        daemon.remove_pod(&pod).await.unwrap();
        let other = daemon.run_pod("b").await.unwrap();
        daemon.stop_pod(&other).await.unwrap();
        daemon.remove_pod(&other).await.unwrap();
    });
    assert_eq!(world.left(), Vec::<String>::new());
}

#[test]
fn a_pod_that_died_without_a_daemon_is_told() {
    let world = World::new();
    let mut daemon = world.daemon();
    let (pod, a, b) = world.run(async {
        let pod = daemon.run_pod("a").await.unwrap();
        let a = daemon.create(&pod, "a").await.unwrap();
        let b = daemon.create(&pod, "b").await.unwrap();
        daemon.start(&a).await.unwrap();
        daemon.start(&b).await.unwrap();
        (pod, a, b)
    });
    daemon.kill();
    world.pods.only().exit(&a, 5);
    let directory = world.pods.alive().pop().unwrap();
    world.pods.kill(&directory);
    let mut daemon = world.daemon();
    world.run(async {
        assert_eq!(daemon.status(&a).await.unwrap().exit_code, 5);
        assert_eq!(daemon.status(&b).await.unwrap().exit_code, 255);
        assert_eq!(daemon.pod_status(&pod).await.unwrap().state(), cri::PodSandboxState::SandboxNotready);
        daemon.stop_pod(&pod).await.unwrap();
        daemon.remove_pod(&pod).await.unwrap();
    });
    assert_eq!(world.left(), Vec::<String>::new());
}

#[test]
fn a_pod_whose_run_directory_is_lost_is_ended_before_it_is_said_to_be() {
    let world = World::new();
    let mut daemon = world.daemon();
    let (pod, container) = world.run(async {
        let pod = daemon.run_pod("a").await.unwrap();
        let container = daemon.create(&pod, "a").await.unwrap();
        daemon.start(&container).await.unwrap();
        (pod, container)
    });
    daemon.kill();
    let directory = world.pods.alive().pop().unwrap();
    nacelle_pod::run_dir::remove(&directory).unwrap();
    let mut daemon = world.daemon();
    assert_eq!(world.pods.alive(), Vec::<std::path::PathBuf>::new());
    world.run(async {
        assert_eq!(daemon.pod_status(&pod).await.unwrap().state(), cri::PodSandboxState::SandboxNotready);
        assert_eq!(daemon.status(&container).await.unwrap().exit_code, 255);
        daemon.remove_pod(&pod).await.unwrap();
    });
    // The process is lost while the daemon runs, together with the directory around its own: the next pod gets a directory all
    // the same.
    std::fs::remove_dir_all(directory.parent().unwrap()).unwrap();
    world.run(async {
        let next = daemon.run_pod("b").await.unwrap();
        daemon.remove_pod(&next).await.unwrap();
    });
    assert_eq!(world.left(), Vec::<String>::new());
}

#[test]
fn a_container_that_the_guest_still_makes_is_made_anew() {
    let world = World::new();
    let mut daemon = world.daemon();
    let pod = world.run(daemon.run_pod("a")).unwrap();
    world.script.hang_at("create");
    let id = world.run(daemon.create(&pod, "c")).unwrap();
    world.eventually("the guest is asked", || world.script.seen("create"));
    daemon.kill();
    world.script.conflict("remove", 3);
    world.script.release();
    let mut daemon = world.daemon();
    world.run(async {
        let ids: Vec<_> = daemon.containers().await.into_iter().map(|container| container.id).collect();
        assert_eq!(ids, std::slice::from_ref(&id));
        assert_eq!(daemon.create(&pod, "c").await.unwrap(), id);
        daemon.start(&id).await.unwrap();
        daemon.remove_pod(&pod).await.unwrap();
    });
    assert_eq!(world.left(), Vec::<String>::new());
}

#[test]
fn what_was_half_made_or_half_removed_does_not_outlive_its_machine() {
    for verb in ["create", "remove"] {
        let world = World::new();
        let mut daemon = world.daemon();
        let pod = world.run(daemon.run_pod("a")).unwrap();
        let mut id = String::new();
        if verb == "remove" {
            id = world.run(daemon.create(&pod, "c")).unwrap();
            world.run(daemon.start(&id)).unwrap();
        }
        world.script.hang_at(verb);
        let mut other = Daemon { runtime: None, cri: daemon.cri.clone(), images: daemon.images.clone() };
        let (container, of) = (id.clone(), pod.clone());
        let asked = world.spawn(async move {
            match verb {
                "remove" => other.remove(&container).await,
                _ => other.create(&of, "c").await.map(drop),
            }
        });
        world.eventually("the guest is asked", || world.script.seen(verb));
        daemon.kill();
        asked.abort();
        world.script.release();
        world.pods.alive().iter().for_each(|directory| world.pods.kill(directory));
        let mut daemon = world.daemon();
        world.run(async {
            let states: Vec<_> = daemon.containers().await.iter().map(cri::Container::state).collect();
            // A client may know the id.
            let known = if verb == "create" { vec![cri::ContainerState::ContainerExited] } else { vec![] };
            assert_eq!(states, known, "{verb}");
            if verb == "remove" {
                daemon.remove(&id).await.unwrap();
            }
            daemon.stop_pod(&pod).await.unwrap();
            daemon.remove_pod(&pod).await.unwrap();
        });
        assert_eq!(world.left(), Vec::<String>::new(), "{verb}");
    }
}

/// Removes the files of the state store whose names begin like this, once the daemon has closed it.
fn remove_store(world: &World, prefix: &str) {
    let store = world.config().paths.store();
    world.eventually("the store is closed", || nacelle_store::Store::open(&store, None).is_ok());
    let files = std::fs::read_dir(&world.config().paths.root).unwrap().map(|entry| entry.unwrap().path());
    let wanted = |path: &std::path::PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with(prefix);
    let files: Vec<_> = files.filter(wanted).collect();
    assert!(!files.is_empty());
    files.iter().for_each(|path| std::fs::remove_file(path).unwrap());
}

#[test]
fn what_belongs_to_no_record_is_removed() {
    let world = World::new();
    let mut daemon = world.daemon();
    world.run(daemon.run_pod("a")).unwrap();
    daemon.kill();
    remove_store(&world, "state.");
    assert_eq!(world.left().len(), 4);
    let mut daemon = world.daemon();
    assert_eq!(world.left(), Vec::<String>::new());
    assert!(world.run(daemon.pods()).is_empty());
}

#[test]
fn pods_survive_the_loss_of_the_database() {
    for damage in ["removed", "overwritten"] {
        let world = World::new();
        let mut daemon = world.daemon();
        let (pods, container) = world.run(async {
            let mut pods = Vec::new();
            for name in ["a", "b", "c"] {
                pods.push(daemon.run_pod(name).await.unwrap());
            }
            let container = daemon.create(&pods[0], "c").await.unwrap();
            daemon.start(&container).await.unwrap();
            let gone = daemon.run_pod("gone").await.unwrap();
            daemon.remove_pod(&gone).await.unwrap();
            (pods, container)
        });
        let before = world.run(daemon.pod_status(&pods[0])).unwrap();
        let alive = world.pods.alive();
        daemon.kill();
        match damage {
            "removed" => remove_store(&world, "state.redb"),
            _ => {
                remove_store(&world, "state.redb");
                std::fs::write(world.config().paths.store(), "no database").unwrap();
            }
        }
        let mut daemon = world.daemon();
        assert_eq!(world.pods.alive(), alive, "{damage}");
        world.run(async {
            let mut found: Vec<_> = daemon.pods().await.into_iter().map(|pod| pod.id).collect();
            found.sort();
            let mut expected = pods.clone();
            expected.sort();
            assert_eq!(found, expected, "{damage}");
            assert_eq!(daemon.pod_status(&pods[0]).await.unwrap(), before, "{damage}");
            assert_eq!(daemon.exec(&container, &["x"]).await.unwrap().exit_code, 3);
            for pod in &pods {
                daemon.stop_pod(pod).await.unwrap();
                daemon.remove_pod(pod).await.unwrap();
            }
        });
        assert_eq!(world.left(), Vec::<String>::new(), "{damage}");
    }
}

/// Runs a life cycle with every operation. Ends early when the daemon does.
async fn live(daemon: &mut Daemon) -> Result<(), tonic::Status> {
    let pod = daemon.run_pod("a").await?;
    let a = daemon.create(&pod, "a").await?;
    let b = daemon.create(&pod, "b").await?;
    daemon.start(&a).await?;
    daemon.start(&b).await?;
    daemon.stop(&a).await?;
    daemon.remove(&a).await?;
    daemon.stop_pod(&pod).await?;
    daemon.remove_pod(&pod).await
}

/// Kills the daemon at this commit; returns `true` if the life cycle ended before it.
fn killed_at(commit: u64, phase: CommitPhase) -> bool {
    let world = World::new();
    let cut = Arc::new(AtomicBool::new(false));
    let observer: CommitObserver = {
        let cut = Arc::clone(&cut);
        Box::new(move |number, current| {
            if number == commit && current == phase {
                cut.store(true, Ordering::SeqCst);
                return ControlFlow::Break(());
            }
            ControlFlow::Continue(())
        })
    };
    let daemon = world.daemon_observed(Some(observer));
    let mut speaker = Daemon { runtime: None, cri: daemon.cri.clone(), images: daemon.images.clone() };
    let life = world.spawn(async move { live(&mut speaker).await });
    world.eventually("the life or the daemon ends", || life.is_finished() || cut.load(Ordering::SeqCst));
    let over = !cut.load(Ordering::SeqCst);
    daemon.kill();
    life.abort();

    let mut daemon = world.daemon();
    let place = format!("commit {commit}, {phase:?}");
    let known = || -> BTreeSet<String> {
        let containers = world.pods.only().record.lock().unwrap().containers.clone();
        containers.into_iter().map(|container| container.id).collect()
    };
    let (pods, containers) = world.run(async {
        let pods = daemon.pods().await;
        let ready = pods.iter().filter(|pod| pod.state() == cri::PodSandboxState::SandboxReady).count();
        assert_eq!(world.pods.alive().len(), ready, "{place}: {:?}", world.left());
        assert_eq!(world.networks.netns.lock().unwrap().len(), ready, "{place}");
        let containers = daemon.containers().await;
        for container in &containers {
            assert!(pods.iter().any(|pod| pod.id == container.pod_sandbox_id), "{place}");
            if container.state() == cri::ContainerState::ContainerRunning {
                assert!(known().contains(&container.id), "{place}");
            }
        }
        let ready = (ready == 1).then(|| containers.into_iter().map(|container| container.id).collect::<BTreeSet<_>>());
        (pods, ready)
    });
    if let Some(containers) = containers {
        // Containers that the guest was still creating are created again.
        world.eventually("the guest has the containers that the daemon knows", || known() == containers);
    }
    world.run(async {
        // The same life cycle again, by a client that does not know how far the last one came.
        for pod in pods {
            daemon.stop_pod(&pod.id).await.unwrap();
            daemon.remove_pod(&pod.id).await.unwrap();
        }
        live(&mut daemon).await.unwrap();
    });
    assert_eq!(world.left(), Vec::<String>::new(), "{place}");
    over
}

#[test]
fn killed_before_or_after_any_commit_nothing_is_lost_or_leaked() {
    let next = AtomicU64::new(1);
    let last = Mutex::new(u64::MAX);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let commit = next.fetch_add(1, Ordering::SeqCst);
                    if commit > *last.lock().unwrap() || commit > 200 {
                        return;
                    }
                    if killed_at(commit, CommitPhase::Before) | killed_at(commit, CommitPhase::After) {
                        let mut last = last.lock().unwrap();
                        *last = commit.min(*last);
                        return;
                    }
                }
            });
        }
    });
    let last = *last.lock().unwrap();
    assert!((10..200).contains(&last), "a life has so many commits: {last}");
}
