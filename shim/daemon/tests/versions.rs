//! Tests that a daemon finds pod processes of other versions: the pod process is replaced by one that reports another version or
//! none while no daemon runs.

mod common;

use common::{Daemon, World, image};
use nacelle_pod::protocol::hello;
use nacelle_proto::{cri, pod as proto};
use tonic::Code;

const REFUSED: &str = "replace the pod";

fn said(major: u32, minor: u32, features: &[&str]) -> Option<proto::HelloResponse> {
    let features = features.iter().map(|name| (*name).to_owned()).collect();
    Some(proto::HelloResponse { major, minor, features, program_version: "9.8.7".into() })
}

/// Ends the daemon, changes what the only pod process reports, and starts the next daemon.
fn restart(world: &World, daemon: Daemon, hello: Option<proto::HelloResponse>) -> Daemon {
    daemon.kill();
    *world.pods.only().hello.lock().unwrap() = hello;
    world.daemon()
}

/// Returns what the verbose status says of the pod's process.
async fn process(daemon: &mut Daemon, pod: &str) -> serde_json::Value {
    let request = cri::PodSandboxStatusRequest { pod_sandbox_id: pod.into(), verbose: true };
    let info = daemon.cri.pod_sandbox_status(request).await.unwrap().into_inner().info;
    let info: serde_json::Value = serde_json::from_str(&info["info"]).unwrap();
    info["process"].clone()
}

async fn create_with_volume(daemon: &mut Daemon, pod: &str, name: &str) -> Result<String, tonic::Status> {
    let mut config = common::container_config(name);
    config.image = Some(cri::ImageSpec { image: image::VOLUME_NAME.into(), ..Default::default() });
    daemon.create_from(pod, config).await
}

#[test]
fn processes_of_the_same_major_version_are_used_as_far_as_both_know() {
    let world = World::new();
    image::load_with_volume(&world);
    let mut daemon = world.daemon();
    let (pod, container) = world.run(async {
        let pod = daemon.run_pod("a").await.unwrap();
        let container = daemon.create(&pod, "runs").await.unwrap();
        daemon.start(&container).await.unwrap();
        assert_eq!(process(&mut daemon, &pod).await["isSameVersion"], true);
        (pod, container)
    });
    let newer = {
        let mut newer = hello();
        newer.minor += 1;
        newer.features.push("teleport".into());
        Some(newer)
    };
    // `None`: it does not implement Hello. What the store knows of it counts.
    for (n, (hello, has_volumes)) in
        [(said(1, 1, &[]), false), (said(1, 7, &["teleport"]), false), (newer, true), (None, true)]
            .into_iter()
            .enumerate()
    {
        daemon = restart(&world, daemon, hello);
        let made = world.pods.only().made.lock().unwrap().len();
        world.run(async {
            assert_eq!(daemon.exec(&container, &["x"]).await.unwrap().exit_code, 3);
            let plain = daemon.create(&pod, &format!("plain-{n}")).await.unwrap();
            daemon.start(&plain).await.unwrap();
            let described = process(&mut daemon, &pod).await;
            assert_eq!((&described["isSameVersion"], &described["isCompatible"]), (&false.into(), &true.into()));
            let created = create_with_volume(&mut daemon, &pod, &format!("volume-{n}")).await;
            if has_volumes {
                daemon.start(&created.unwrap()).await.unwrap();
                return;
            }
            assert!(described["missingFeatures"].as_array().unwrap().contains(&"anonymous-volumes".into()));
            let error = created.unwrap_err();
            assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
            for part in ["anonymous-volumes", "9.8.7", REFUSED] {
                assert!(error.message().contains(part), "{error}");
            }
        });
        let received = world.pods.only().made.lock().unwrap().len() - made;
        assert_eq!(received, 1 + usize::from(has_volumes), "a refused request reached the process");
    }
    world.run(async {
        daemon.stop_pod(&pod).await.unwrap();
        daemon.remove_pod(&pod).await.unwrap();
    });
    assert_eq!(world.left(), Vec::<String>::new());
}

#[test]
fn a_process_of_another_major_version_runs_on_and_can_only_be_stopped() {
    for is_readable in [true, false] {
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
        let fake = world.pods.only();
        if !is_readable {
            let record = nacelle_pod::jail_dir(&world.pods.alive()[0]).join("state.json");
            std::fs::write(record, r#"{"version":"9"}"#).unwrap();
        }
        daemon = restart(&world, daemon, said(2, 0, &["socket-volumes"]));
        world.run(async {
            assert_eq!(daemon.pod_status(&pod).await.unwrap().state(), cri::PodSandboxState::SandboxReady);
            assert_eq!(daemon.status(&a).await.unwrap().state(), cri::ContainerState::ContainerRunning);
            assert_eq!(process(&mut daemon, &pod).await["isCompatible"], false);
            for error in [
                daemon.exec(&a, &["x"]).await.unwrap_err(),
                daemon.create(&pod, "c").await.unwrap_err(),
                daemon.stop(&a).await.unwrap_err(),
                daemon.remove(&b).await.unwrap_err(),
            ] {
                assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
                assert!(error.message().contains("protocol 2.0") && error.message().contains(REFUSED), "{error}");
            }
        });
        if is_readable {
            fake.exit(&a, 7);
            world.eventually("the record is followed", || world.run(daemon.status(&a)).unwrap().exit_code == 7);
        }
        world.run(async {
            assert_eq!(daemon.status(&b).await.unwrap().state(), cri::ContainerState::ContainerRunning);
            daemon.stop_pod(&pod).await.unwrap();
            assert_eq!(daemon.status(&b).await.unwrap().state(), cri::ContainerState::ContainerExited);
            assert_eq!(daemon.pod_status(&pod).await.unwrap().state(), cri::PodSandboxState::SandboxNotready);
            daemon.remove_pod(&pod).await.unwrap();
        });
        assert_eq!(world.left(), Vec::<String>::new());
    }
}

#[test]
fn a_process_that_says_too_much_stays_listed_and_can_be_stopped() {
    let world = World::new();
    let mut daemon = world.daemon();
    let pod = world.run(daemon.run_pod("a")).unwrap();
    let features = vec!["x".repeat(1000); 100];
    daemon = restart(&world, daemon, Some(proto::HelloResponse { features, ..hello() }));
    world.run(async {
        assert_eq!(daemon.pod_status(&pod).await.unwrap().state(), cri::PodSandboxState::SandboxReady);
        assert!(process(&mut daemon, &pod).await.is_null());
        daemon.stop_pod(&pod).await.unwrap();
        daemon.remove_pod(&pod).await.unwrap();
    });
    assert_eq!(world.left(), Vec::<String>::new());
}
