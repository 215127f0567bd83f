//! Tests which changes UpdateContainerResources and UpdatePodSandboxResources make, reject and record, on simulated pod
//! processes.

mod common;

use common::{Daemon, SHAPE_HANDLER, World, container_config, pod_config};
use nacelle_proto::cri;
use std::collections::BTreeSet;
use tonic::{Code, Status};

async fn update(daemon: &mut Daemon, id: &str, linux: cri::LinuxContainerResources) -> Result<(), Status> {
    let container_id = id.to_owned();
    let request = cri::UpdateContainerResourcesRequest { container_id, linux: Some(linux), ..Default::default() };
    daemon.cri.update_container_resources(request).await.map(drop)
}

async fn create(
    daemon: &mut Daemon,
    pod: &str,
    name: &str,
    resources: cri::LinuxContainerResources,
) -> Result<String, Status> {
    let mut config = container_config(name);
    config.linux.as_mut().unwrap().resources = Some(resources);
    let request =
        cri::CreateContainerRequest { pod_sandbox_id: pod.to_owned(), config: Some(config), sandbox_config: None };
    daemon.cri.create_container(request).await.map(|made| made.into_inner().container_id)
}

async fn limits(daemon: &mut Daemon, id: &str) -> cri::LinuxContainerResources {
    daemon.status(id).await.unwrap().resources.unwrap().linux.unwrap()
}

fn written(world: &World) -> Vec<String> {
    let updates = world.pods.only().updates.lock().unwrap().split_off(0);
    let of = |update: nacelle_proto::common::UpdateContainerRequest| {
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

        // A change that the guest rejects has no effect.
        world.script.conflict("update", 1);
        let error = update(&mut daemon, &id, cri::LinuxContainerResources { memory_limit_in_bytes: 1, ..none() }).await;
        let error = error.unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
        assert_eq!(limits(&mut daemon, &id).await, now);
        // Unsupported changes are rejected by name.
        for (wrong, code, word) in [
            (
                cri::LinuxContainerResources { cpuset_cpus: "0-".into(), ..none() },
                Code::InvalidArgument,
                "linux.cpuset_cpus",
            ),
            (cri::LinuxContainerResources { cpu_shares: -1, ..none() }, Code::InvalidArgument, "linux.cpu_shares"),
        ] {
            let error = update(&mut daemon, &id, wrong).await.unwrap_err();
            assert!(error.code() == code && error.message().contains(word), "{error}");
        }
        assert_eq!(update(&mut daemon, "0123", none()).await.unwrap_err().code(), Code::NotFound);
        assert!(written(&world).is_empty());
        // Concurrent changes are applied one after the other, and none is lost.
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

#[test]
fn a_machine_runs_where_its_containers_may() {
    let world = World::new();
    let mut daemon = world.daemon();
    let online = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
    let mut numbers = online.trim().split(['-', ',']);
    let first = numbers.next().unwrap().to_owned();
    let last = numbers.next_back().unwrap_or(&first).to_owned();
    let on = |list: &str| cri::LinuxContainerResources { cpuset_cpus: list.into(), ..Default::default() };
    let set = |lists: &[&str]| lists.iter().map(|list| list.parse::<u32>().unwrap()).collect::<BTreeSet<_>>();
    let applied = || world.pods.confined.lock().unwrap().last().cloned().unwrap_or_default();
    let shares = || cri::LinuxContainerResources { cpu_shares: 5, ..Default::default() };
    let other = world.run(async {
        let pod = daemon.run_pod("a").await.unwrap();
        let mut create = async |name: &str, list: &str| create(&mut daemon, &pod, name, on(list)).await;
        let one = create("one", &first).await.unwrap();
        assert_eq!(applied(), set(&[&first]));
        let other = create("other", "").await.unwrap();
        assert_eq!(applied(), set(&[&first]), "it runs where the others do");
        let two = create("two", &last).await.unwrap();
        assert_eq!(applied(), set(&[&first, &last]));
        let error = create("three", "1023").await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        assert!(error.message().contains("cpuset_cpus is \"1023\""), "{error}");
        // The guest gets no CPU list.
        for made in world.pods.only().made.lock().unwrap().iter() {
            assert!(!String::from_utf8_lossy(&made.oci_spec).contains("cpus\":"), "{}", made.id);
        }
        update(&mut daemon, &one, on(&last)).await.unwrap();
        assert_eq!(applied(), set(&[&last]));
        assert_eq!(written(&world), [" None"]);
        assert_eq!(limits(&mut daemon, &one).await.cpuset_cpus, last);

        // A rejected change has no effect. Each further request waits for the work that the last one has left.
        world.script.conflict("update", 1);
        assert!(update(&mut daemon, &one, on(&first)).await.is_err());
        update(&mut daemon, &other, shares()).await.unwrap();
        assert_eq!(applied(), set(&[&last]));
        world.script.conflict("confine", usize::from(first != last));
        assert_eq!(update(&mut daemon, &one, on(&first)).await.is_err(), first != last);
        update(&mut daemon, &one, on(&last)).await.unwrap();
        assert_eq!((applied(), limits(&mut daemon, &one).await.cpuset_cpus), (set(&[&last]), last.clone()));

        let request = cri::UpdatePodSandboxResourcesRequest {
            pod_sandbox_id: pod.clone(),
            resources: Some(on(&first)),
            ..Default::default()
        };
        assert_eq!(daemon.cri.update_pod_sandbox_resources(request).await.unwrap_err().code(), Code::Unimplemented);
        daemon.start(&two).await.unwrap();
        daemon.stop(&two).await.unwrap();
        daemon.cri.remove_container(cri::RemoveContainerRequest { container_id: one }).await.unwrap();
        update(&mut daemon, &other, shares()).await.unwrap();
        assert_eq!(applied(), set(&[]), "anywhere");
        update(&mut daemon, &other, on(&first)).await.unwrap();
        other
    });
    daemon.kill();
    world.pods.confined.lock().unwrap().clear();
    let mut daemon = world.daemon();
    world.run(async {
        // It is unknown whether the last daemon applied this change.
        update(&mut daemon, &other, shares()).await.unwrap();
        assert_eq!(applied(), set(&[&first]));
    });
}

#[test]
fn the_vm_may_swap_what_its_containers_may() {
    let world = World::new();
    let mut daemon = world.daemon();
    let swap = |bytes: &str| cri::LinuxContainerResources {
        unified: [("memory.swap.max".to_owned(), bytes.to_owned())].into(),
        ..Default::default()
    };
    let applied = || world.pods.memory_policies.lock().unwrap().iter().map(|p| p.swap_max).collect::<Vec<_>>();
    let one = world.run(async {
        let pod = daemon.run_pod("a").await.unwrap();
        let mut create = async |name: &str, resources| create(&mut daemon, &pod, name, resources).await;
        let one = create("one", swap("5")).await.unwrap();
        assert_eq!(applied(), [5]);
        let two = create("two", swap("0")).await.unwrap();
        assert_eq!(applied(), [5], "no more than before: nothing is written");
        let any = create("any", cri::LinuxContainerResources::default()).await.unwrap();
        assert_eq!(applied(), [5, u64::MAX]);
        daemon.cri.remove_container(cri::RemoveContainerRequest { container_id: any }).await.unwrap();
        update(&mut daemon, &two, swap("7")).await.unwrap();
        assert_eq!(applied(), [5, u64::MAX, 5, 12]);
        world.script.conflict("set memory policy", 1);
        assert!(update(&mut daemon, &two, swap("8")).await.is_err());
        update(&mut daemon, &one, swap("5")).await.unwrap();
        assert_eq!(applied().last(), Some(&12), "what the failed change may have written does not stay");
        one
    });
    daemon.kill();
    world.pods.memory_policies.lock().unwrap().clear();
    let mut daemon = world.daemon();
    world.run(update(&mut daemon, &one, swap("5"))).unwrap();
    assert_eq!(applied(), [12], "it is not known what the last daemon has written");
}

#[test]
fn a_vm_has_the_lowest_oom_score_of_its_containers() {
    let world = World::new();
    let mut daemon = world.daemon();
    let score = |oom_score_adj| cri::LinuxContainerResources { oom_score_adj, ..Default::default() };
    let applied =
        || world.pods.memory_policies.lock().unwrap().iter().map(|policy| policy.oom_score_adj).collect::<Vec<_>>();
    world.run(async {
        let pod = daemon.run_pod("a").await.unwrap();
        let mut create = async |name: &str, resources| create(&mut daemon, &pod, name, resources).await;
        create("one", score(900)).await.unwrap();
        let lowest = create("lowest", score(300)).await.unwrap();
        create("highest", score(1000)).await.unwrap();
        assert_eq!(applied(), [900, 300]);
        update(&mut daemon, &lowest, score(200)).await.unwrap();
        daemon.cri.remove_container(cri::RemoveContainerRequest { container_id: lowest }).await.unwrap();
    });
    world.eventually("the score follows", || applied() == [900, 300, 200, 900]);
}

#[test]
fn processors_of_a_machine_have_those_of_its_containers_to_themselves() {
    let online = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
    if !online.starts_with("0-") {
        eprintln!("skipped: this node has not two processors");
        return;
    }
    let world = World::new();
    let mut daemon = world.daemon();
    let on = |list: &str| cri::LinuxContainerResources { cpuset_cpus: list.into(), ..Default::default() };
    let count = || world.pods.confined.lock().unwrap().len();
    let last = || {
        let (sets, pinned) = (world.pods.confined.lock().unwrap(), world.pods.pinned.lock().unwrap());
        (sets.last().cloned().unwrap_or_default().into_iter().collect::<Vec<_>>(), pinned.last().copied().flatten())
    };
    let both = world.run(async {
        let said = [("cpus", "2"), ("cpu-pinning", "true")];
        let annotations = said.map(|(name, value)| (format!("vm.nacelle.dev/{name}"), value.to_owned())).into();
        let config = cri::PodSandboxConfig { annotations, ..pod_config("a") };
        let request = cri::RunPodSandboxRequest { config: Some(config), runtime_handler: SHAPE_HANDLER.into() };
        let pod = daemon.cri.run_pod_sandbox(request).await.unwrap().into_inner().pod_sandbox_id;
        let mut create = async |name: &str, list: &str| create(&mut daemon, &pod, name, on(list)).await;
        let few = |error: Status| {
            assert_eq!(error.code(), Code::InvalidArgument, "{error}");
            for words in ["cpuset_cpus is \"1\"", "1 CPUs of the node", "its VM has 2 vCPUs", "dedicatedCpuPlacement"] {
                assert!(error.message().contains(words), "{words} in {error}");
            }
        };
        let anywhere = create("anywhere", "").await.unwrap();
        assert_eq!(count(), 0, "it runs where it ran");
        few(create("few", "1").await.unwrap_err());
        assert_eq!(count(), 0, "nothing happened");
        let both = create("both", "0-1").await.unwrap();
        assert_eq!(last(), (vec![0, 1], Some(2)));
        let one = create("one", "0").await.unwrap();
        let before = count();
        update(&mut daemon, &both, on("1")).await.unwrap();
        // Together the containers still have both CPUs.
        few(update(&mut daemon, &one, on("1")).await.unwrap_err());
        assert_eq!((count(), limits(&mut daemon, &one).await.cpuset_cpus.as_str()), (before, "0"), "nothing happened");
        // A removed container takes its CPU with it: the VM runs on the others, without pinning.
        daemon.cri.remove_container(cri::RemoveContainerRequest { container_id: one }).await.unwrap();
        let shares = cri::LinuxContainerResources { cpu_shares: 5, ..Default::default() };
        update(&mut daemon, &anywhere, shares).await.unwrap();
        assert_eq!(last(), (vec![1], None));
        update(&mut daemon, &both, on("0-1")).await.unwrap();
        assert_eq!(last(), (vec![0, 1], Some(2)));
        both
    });
    daemon.kill();
    world.pods.confined.lock().unwrap().clear();
    world.pods.pinned.lock().unwrap().clear();
    let mut daemon = world.daemon();
    let shares = cri::LinuxContainerResources { cpu_shares: 7, ..Default::default() };
    world.run(update(&mut daemon, &both, shares)).unwrap();
    assert_eq!(last(), (vec![0, 1], Some(2)), "whether the last daemon came to it is not known");
}

async fn update_pod(daemon: &mut Daemon, id: &str, memory: i64, quota: i64) -> Result<(), Status> {
    let limits = |memory_limit_in_bytes, cpu_quota| cri::LinuxContainerResources {
        memory_limit_in_bytes,
        cpu_quota,
        cpu_period: 100_000,
        ..Default::default()
    };
    let request = cri::UpdatePodSandboxResourcesRequest {
        pod_sandbox_id: id.to_owned(),
        overhead: Some(limits(1 << 20, 0)),
        resources: Some(limits(memory, quota)),
    };
    daemon.cri.update_pod_sandbox_resources(request).await.map(drop)
}

async fn said(daemon: &mut Daemon, id: &str) -> serde_json::Value {
    let request = cri::PodSandboxStatusRequest { pod_sandbox_id: id.to_owned(), verbose: true };
    let info = daemon.cri.pod_sandbox_status(request).await.unwrap().into_inner().info;
    serde_json::from_str::<serde_json::Value>(&info["info"]).unwrap()
}

#[test]
fn what_a_pod_may_have_is_recorded_if_its_machine_holds_it() {
    let world = World::new();
    let mut daemon = world.daemon();
    let pod = world.run(async {
        let pod = daemon.run_pod("a").await.unwrap();
        let machine = said(&mut daemon, &pod).await["machine"].clone();
        let (memory, vcpus) = (machine["memory"].as_i64().unwrap(), machine["max_vcpus"].as_i64().unwrap());
        assert!(memory > 1 << 20 && vcpus >= 1, "{machine}");
        assert!(said(&mut daemon, &pod).await["resources"].is_null());
        update_pod(&mut daemon, &pod[..12], memory, vcpus * 100_000).await.unwrap();
        // Unset limits stay, and an impossible change has no effect.
        update_pod(&mut daemon, &pod, 0, 50_000).await.unwrap();
        let before = said(&mut daemon, &pod).await["resources"].clone();
        assert_eq!(
            (&before["containers"]["memory_limit"], &before["containers"]["cpu_quota"]),
            (&memory.into(), &50_000.into())
        );
        assert_eq!(before["overhead"]["memory_limit"], 1 << 20);
        for (memory, quota, word) in [(memory + 1, 0, "bytes of memory"), (0, vcpus * 100_000 + 100, "CPUs")] {
            let error = update_pod(&mut daemon, &pod, memory, quota).await.unwrap_err();
            assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
            assert!(error.message().contains(word) && error.message().contains("recreate the pod"), "{error}");
        }
        assert_eq!(update_pod(&mut daemon, "ffff", 1, 0).await.unwrap_err().code(), Code::NotFound);
        assert_eq!(said(&mut daemon, &pod).await["resources"], before);
        pod
    });
    drop(daemon);
    let mut daemon = world.daemon();
    world.run(async {
        let known = said(&mut daemon, &pod).await;
        assert_eq!(known["resources"]["containers"]["cpu_quota"], 50_000, "{known}");
        assert!(known["machine"]["memory"].as_i64().unwrap() > 1 << 20);
        daemon.stop_pod(&pod).await.unwrap();
        assert_eq!(update_pod(&mut daemon, &pod, 1, 0).await.unwrap_err().code(), Code::FailedPrecondition);
    });
}

#[test]
fn what_kubelet_reads_from_an_unlimited_control_group_is_no_limit() {
    // memory.limit_in_bytes of cgroup v1, and kubelet's value for memory.max of v2; cpu.cfs_quota_us is -1 in both.
    for unlimited in [9_223_372_036_854_771_712, -1] {
        let world = World::new();
        let mut daemon = world.daemon();
        world.run(async {
            let pod = daemon.run_pod("a").await.unwrap();
            let machine = said(&mut daemon, &pod).await["machine"].clone();
            update_pod(&mut daemon, &pod, machine["memory"].as_i64().unwrap(), 100_000).await.unwrap();
            update_pod(&mut daemon, &pod, unlimited, -1).await.unwrap();
            let now = said(&mut daemon, &pod).await;
            assert_eq!(now["resources"]["containers"]["memory_limit"], -1, "{now}");
            assert_eq!((&now["machine"]["memory"], &now["machine"]["vcpus"]), (&machine["memory"], &1.into()));

            let limit = |memory_limit_in_bytes| cri::LinuxContainerResources {
                memory_limit_in_bytes,
                memory_swap_limit_in_bytes: unlimited,
                ..Default::default()
            };
            let mut config = container_config("c");
            config.linux.as_mut().unwrap().resources = Some(limit(unlimited));
            let request =
                cri::CreateContainerRequest { pod_sandbox_id: pod.clone(), config: Some(config), sandbox_config: None };
            let id = daemon.cri.create_container(request).await.unwrap().into_inner().container_id;
            update(&mut daemon, &id, limit(1 << 20)).await.unwrap();
            update(&mut daemon, &id, limit(unlimited)).await.unwrap();
            assert_eq!(written(&world), ["memory.max=1048576 None", "memory.max=max None"]);
            assert_eq!(limits(&mut daemon, &id).await.memory_limit_in_bytes, -1);

            // A pod created with this value is like a pod without a limit.
            let mut config = pod_config("b");
            config.linux.get_or_insert_default().resources = Some(limit(unlimited));
            let request = cri::RunPodSandboxRequest { config: Some(config), runtime_handler: String::new() };
            let other = daemon.cri.run_pod_sandbox(request).await.unwrap().into_inner().pod_sandbox_id;
            assert_eq!(said(&mut daemon, &other).await["machine"], machine);
        });
    }
}

#[test]
fn a_machine_gets_the_processors_that_its_pod_may_use() {
    let world = World::new();
    let mut daemon = world.daemon();
    let applied = || std::mem::take(&mut *world.pods.only().processors.lock().unwrap());
    let pod = world.run(async {
        let pod = daemon.run_pod("a").await.unwrap();
        let size = async |daemon: &mut Daemon| {
            let machine = said(daemon, &pod).await["machine"].clone();
            (machine["vcpus"].as_u64().unwrap(), machine["max_vcpus"].as_u64().unwrap())
        };
        assert_eq!(size(&mut daemon).await, (1, 4));
        for (quota, vcpus) in [(250_000, 3), (400_000, 4), (50_000, 1), (200_000, 2)] {
            update_pod(&mut daemon, &pod, 0, quota).await.unwrap();
            assert_eq!((applied(), size(&mut daemon).await), (vec![vcpus], (vcpus.into(), 4)));
        }
        // A change beyond the bound, or one that the guest rejects, has no effect.
        let before = said(&mut daemon, &pod).await["resources"].clone();
        let error = update_pod(&mut daemon, &pod, 0, 400_001).await.unwrap_err();
        assert!(error.code() == Code::FailedPrecondition && error.message().contains("4 CPUs"), "{error}");
        assert!(applied().is_empty());
        world.script.conflict("processors", 1);
        let error = update_pod(&mut daemon, &pod, 0, 300_000).await.unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
        assert_eq!((said(&mut daemon, &pod).await["resources"].clone(), size(&mut daemon).await), (before, (2, 4)));
        // Concurrent changes are applied one after the other.
        let mut other = Daemon { runtime: None, cri: daemon.cri.clone(), images: daemon.images.clone() };
        let (one, two) =
            tokio::join!(update_pod(&mut daemon, &pod, 0, 300_000), update_pod(&mut other, &pod, 0, 400_000),);
        one.and(two).unwrap();
        let last = applied();
        assert_eq!(last.len(), 2);
        assert_eq!(size(&mut daemon).await.0, u64::from(last[1]));
        update_pod(&mut daemon, &pod, 0, 300_000).await.unwrap();
        pod
    });
    daemon.kill();
    let mut daemon = world.daemon();
    world.run(async {
        assert_eq!(said(&mut daemon, &pod).await["machine"]["vcpus"], 3);
        applied();
        // The size that the daemon has recorded is requested again: the response to the last request may have been lost.
        update_pod(&mut daemon, &pod, 0, 300_000).await.unwrap();
        assert_eq!(applied(), [3]);
    });
}

#[test]
fn a_machine_gets_the_memory_that_its_pod_may_use() {
    let world = World::new();
    let mut daemon = world.daemon();
    let applied = || std::mem::take(&mut *world.pods.only().memory.lock().unwrap());
    let pod = world.run(async {
        let request = cri::RunPodSandboxRequest { config: Some(pod_config("a")), runtime_handler: "other".into() };
        let pod = daemon.cri.run_pod_sandbox(request).await.unwrap().into_inner().pod_sandbox_id;
        let size = async |daemon: &mut Daemon| {
            let machine = said(daemon, &pod).await["machine"].clone();
            (machine["memory"].as_u64().unwrap() >> 20, machine["max_memory"].as_u64().unwrap() >> 20)
        };
        assert_eq!(size(&mut daemon).await, (256, 1024));
        for (mib, now) in [(257, 384), (1024, 1024), (500, 512), (1, 256), (600, 640), (0, 640)] {
            update_pod(&mut daemon, &pod, mib << 20, 0).await.unwrap();
            // The vCPUs are resized first, and their number does not change.
            assert_eq!((applied(), size(&mut daemon).await), (vec![now - 256], (now, 1024)), "{mib}");
        }
        // A change beyond the bound, or one that the guest rejects, has no effect.
        let before = said(&mut daemon, &pod).await["resources"].clone();
        let error = update_pod(&mut daemon, &pod, (1 << 30) + 1, 0).await.unwrap_err();
        assert!(error.code() == Code::FailedPrecondition && error.message().contains("1073741824 bytes"), "{error}");
        assert!(applied().is_empty());
        world.script.conflict("memory", 1);
        world.pods.only().processors.lock().unwrap().clear();
        let error = update_pod(&mut daemon, &pod, 300 << 20, 300_000).await.unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
        assert_eq!(*world.pods.only().processors.lock().unwrap(), [3, 1], "and back again");
        let known = said(&mut daemon, &pod).await;
        assert_eq!((known["resources"].clone(), &known["machine"]["vcpus"]), (before, &1.into()));
        assert_eq!(size(&mut daemon).await, (640, 1024));
        pod
    });
    daemon.kill();
    let mut daemon = world.daemon();
    world.run(async {
        assert_eq!(said(&mut daemon, &pod).await["machine"]["memory"], 640 << 20);
        applied();
        update_pod(&mut daemon, &pod, 300 << 20, 0).await.unwrap();
        assert_eq!(applied(), [128]);
    });
}

#[test]
fn a_machine_gets_the_memory_that_its_containers_may_use_where_nobody_speaks_of_the_pod() {
    let world = World::new();
    let mut daemon = world.daemon();
    let applied = || std::mem::take(&mut *world.pods.only().memory.lock().unwrap());
    let memory = |mib: i64| cri::LinuxContainerResources { memory_limit_in_bytes: mib << 20, ..Default::default() };
    world.run(async {
        let request = cri::RunPodSandboxRequest { config: Some(pod_config("a")), runtime_handler: "other".into() };
        let pod = daemon.cri.run_pod_sandbox(request).await.unwrap().into_inner().pod_sandbox_id;
        let mut made = Vec::new();
        for name in ["one", "two"] {
            let mut config = container_config(name);
            config.linux.get_or_insert_default().resources = Some(memory(100));
            made.push(daemon.create_from(&pod, config).await.unwrap());
        }
        let size = async |daemon: &mut Daemon| said(daemon, &pod).await["machine"]["memory"].as_u64().unwrap() >> 20;
        // A limit that fits has no effect, a larger one grows the VM, and none of these shrinks it.
        for (mib, now, asked) in
            [(156, 256, vec![]), (157, 384, vec![128]), (50, 384, vec![]), (1 << 20, 1024, vec![768])]
        {
            update(&mut daemon, &made[0], memory(mib)).await.unwrap();
            assert_eq!((applied(), size(&mut daemon).await), (asked, now), "{mib}");
        }
        update_pod(&mut daemon, &pod, 300 << 20, 0).await.unwrap();
        assert_eq!((applied(), size(&mut daemon).await), (vec![128], 384));
        // The limits of the pod take precedence.
        update(&mut daemon, &made[0], memory(2000)).await.unwrap();
        assert_eq!((applied(), size(&mut daemon).await), (vec![], 384));
        assert_eq!(said(&mut daemon, &pod).await["resources"]["containers"]["memory_limit"], 300 << 20);
    });
}

#[test]
fn a_container_keeps_its_limit_where_the_machine_cannot_grow() {
    let world = World::new();
    let mut daemon = world.daemon();
    let memory = |mib: i64| cri::LinuxContainerResources { memory_limit_in_bytes: mib << 20, ..Default::default() };
    world.run(async {
        let request = cri::RunPodSandboxRequest { config: Some(pod_config("a")), runtime_handler: "other".into() };
        let pod = daemon.cri.run_pod_sandbox(request).await.unwrap().into_inner().pod_sandbox_id;
        let mut config = container_config("one");
        config.linux.get_or_insert_default().resources = Some(memory(100));
        let one = daemon.create_from(&pod, config).await.unwrap();
        world.script.conflict("memory", 1);
        assert_eq!(update(&mut daemon, &one, memory(300)).await.unwrap_err().code(), Code::FailedPrecondition);
        assert!(world.pods.only().updates.lock().unwrap().is_empty());
        let known = said(&mut daemon, &pod).await;
        assert_eq!((&known["machine"]["memory"], &known["resources"]), (&(256 << 20).into(), &serde_json::Value::Null));
        update(&mut daemon, &one, memory(300)).await.unwrap();
        assert_eq!(said(&mut daemon, &pod).await["machine"]["memory"], 384 << 20);
    });
}
