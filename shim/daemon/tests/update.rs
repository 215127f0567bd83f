//! Owns: what UpdateContainerResources changes, refuses and remembers, on scripted pod processes.

mod common;

use common::{Daemon, World, container_config};
use nacelle_proto::cri;
use tonic::{Code, Status};

async fn update(daemon: &mut Daemon, id: &str, linux: cri::LinuxContainerResources) -> Result<(), Status> {
    let container_id = id.to_owned();
    let request = cri::UpdateContainerResourcesRequest { container_id, linux: Some(linux), ..Default::default() };
    daemon.cri.update_container_resources(request).await.map(drop)
}

async fn limits(daemon: &mut Daemon, id: &str) -> cri::LinuxContainerResources {
    daemon.status(id).await.unwrap().resources.unwrap().linux.unwrap()
}

fn written(world: &World) -> Vec<String> {
    let updates = world.pods.only().updates.lock().unwrap().split_off(0);
    let of = |update: nacelle_proto::pod::UpdateContainerRequest| {
        let limits: Vec<_> = update.limits.iter().map(|limit| format!("{}={}", limit.file, limit.value)).collect();
        format!("{} {:?}", limits.join(","), update.oom_score_adj)
    };
    updates.into_iter().map(of).collect()
}

#[test]
fn limits_change_before_and_after_the_start_and_are_remembered() {
    let world = World::new();
    let mut daemon = world.daemon();
    let none = cri::LinuxContainerResources::default;
    let id = world.run(async {
        let pod = daemon.run_pod("a").await.unwrap();
        let mut config = container_config("c");
        config.linux.as_mut().unwrap().resources =
            Some(cri::LinuxContainerResources { cpu_period: 20_000, cpu_quota: 10_000, oom_score_adj: 5, ..none() });
        let request =
            cri::CreateContainerRequest { pod_sandbox_id: pod.clone(), config: Some(config), sandbox_config: None };
        let id = daemon.cri.create_container(request).await.unwrap().into_inner().container_id;
        update(&mut daemon, &id, cri::LinuxContainerResources { cpu_quota: 5_000, ..none() }).await.unwrap();
        assert_eq!(written(&world), ["cpu.max=5000 20000 None"]);
        daemon.start(&id).await.unwrap();
        let more = cri::LinuxContainerResources { memory_limit_in_bytes: 1 << 20, oom_score_adj: 9, ..none() };
        update(&mut daemon, &id[..12], more).await.unwrap();
        assert_eq!(written(&world), ["memory.max=1048576 Some(9)"]);
        let now = limits(&mut daemon, &id).await;
        assert_eq!((now.cpu_quota, now.cpu_period, now.memory_limit_in_bytes), (5_000, 20_000, 1 << 20));
        assert_eq!(now.oom_score_adj, 9);

        // What the guest refuses changes nothing.
        world.script.conflict("update", 1);
        let error = update(&mut daemon, &id, cri::LinuxContainerResources { memory_limit_in_bytes: 1, ..none() }).await;
        let error = error.unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
        assert_eq!(limits(&mut daemon, &id).await, now);
        // What cannot be honoured is refused by name.
        for (wrong, code, word) in [
            (
                cri::LinuxContainerResources { cpuset_cpus: "0".into(), ..none() },
                Code::Unimplemented,
                "linux.cpuset_cpus",
            ),
            (cri::LinuxContainerResources { cpu_shares: -1, ..none() }, Code::InvalidArgument, "linux.cpu_shares"),
        ] {
            let error = update(&mut daemon, &id, wrong).await.unwrap_err();
            assert!(error.code() == code && error.message().contains(word), "{error}");
        }
        assert_eq!(update(&mut daemon, "0123", none()).await.unwrap_err().code(), Code::NotFound);
        assert!(written(&world).is_empty());
        // Several at once are taken one after the other, and none is lost.
        let mut other = Daemon { runtime: None, cri: daemon.cri.clone(), images: daemon.images.clone() };
        let (quota, period) = tokio::join!(
            update(&mut daemon, &id, cri::LinuxContainerResources { cpu_quota: 7_000, ..none() }),
            update(&mut other, &id, cri::LinuxContainerResources { cpu_period: 70_000, ..none() }),
        );
        quota.and(period).unwrap();
        assert_eq!(written(&world).pop().unwrap(), "cpu.max=7000 70000 None");
        id
    });
    daemon.kill();
    let mut daemon = world.daemon();
    world.run(async {
        let now = limits(&mut daemon, &id).await;
        assert_eq!((now.cpu_quota, now.cpu_period, now.memory_limit_in_bytes), (7_000, 70_000, 1 << 20));
        daemon.stop(&id).await.unwrap();
        let error = update(&mut daemon, &id, cri::LinuxContainerResources { cpu_quota: 1_000, ..none() }).await;
        assert_eq!(error.unwrap_err().code(), Code::FailedPrecondition);
    });
}
