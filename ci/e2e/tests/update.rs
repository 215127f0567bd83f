//! Tests changes of limits while a container runs, as seen in the guest.

use nacelle_e2e::node::{NodeOptions, SMALL_VM, engine, handler_config};
use nacelle_e2e::run::block_on;
use nacelle_e2e::{ContainerRequest, PodRequest, TestImage, TestNode, eventually};
use nacelle_proto::cri;
use nacelle_proto::cri::runtime_service_client::RuntimeServiceClient;
use serde_json::json;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Instant;

#[test]
fn limits_can_be_raised_and_lowered_before_and_after_the_start() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(PodRequest::new("limits", node.directory()));
    let resources =
        json!({"memory_limit_in_bytes": 32 << 20, "cpu_period": 100_000, "cpu_quota": 50_000, "cpu_shares": 512});
    let container =
        pod.create(ContainerRequest::sh("c", &image, "sleep 600").set("linux", json!({"resources": resources})));
    let read = "cd /sys/fs/cgroup; cat memory.max cpu.max cpu.weight";
    node.crictl.call(["update", "--cpu-quota", "20000", "--cpu-share", "1024", &container.id]);
    node.crictl.call(["start", &container.id]);
    let values = |text: String| text.lines().map(str::to_owned).collect::<Vec<_>>();
    let now = values(container.exec(read).ok());
    assert_eq!(now, ["33554432", "20000 100000", "100"]);

    node.crictl.call(["update", "--memory", &(48 << 20).to_string(), "--cpu-quota", "80000", &container.id]);
    assert_eq!(values(container.exec(read).ok()), ["50331648", "80000 100000", "100"]);
    node.crictl.call(["update", "--memory", &(24 << 20).to_string(), &container.id]);
    assert_eq!(values(container.exec(read).ok()), ["25165824", "80000 100000", "100"]);

    // Page cache is reclaimed, here of a file that was only read.
    node.crictl.call(["update", "--memory", &(100 << 20).to_string(), &container.id]);
    let cached = "awk '$1 == \"file\" { print $2 }' /sys/fs/cgroup/memory.stat";
    container.exec("dd if=/dev/zero of=/cached bs=1M count=64 2>/dev/null && sync && cat /cached >/dev/null").ok();
    let before: u64 = container.exec(cached).ok().parse().expect("a number");
    assert!(before > 24 << 20, "{before}");
    node.crictl.call(["update", "--memory", &(24 << 20).to_string(), &container.id]);
    assert_eq!(values(container.exec(read).ok()), ["25165824", "80000 100000", "100"]);

    // A limit below the usage is rejected, and the other limits stay unchanged.
    let refused = node.crictl.try_call(["update", "--memory", "4096", "--cpu-quota", "1000", &container.id]).err();
    assert!(refused.contains("are in use"), "{refused}");
    assert_eq!(values(container.exec(read).ok()), ["25165824", "80000 100000", "100"]);
    let shown = container.status()["resources"]["linux"].clone();
    assert_eq!((&shown["cpuQuota"], &shown["memoryLimitInBytes"]), (&json!("80000"), &json!("25165824")));
    pod.remove();
}

/// Returns the CPUs on which the threads of these processes and of their descendants may run.
fn thread_affinities(pids: Vec<i32>) -> BTreeSet<String> {
    let (mut pids, mut lists, mut at) = (pids, BTreeSet::new(), 0);
    while let Some(pid) = pids.get(at).copied() {
        at += 1;
        for thread in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
            let read = |name: &str| fs::read_to_string(thread.path().join(name)).unwrap_or_default();
            pids.extend(read("children").split_whitespace().filter_map(|pid| pid.parse::<i32>().ok()));
            let status = read("status");
            let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
            // Kernel threads that belong to the process keep their own.
            let name = read("comm");
            lists.extend(
                list.filter(|_| !name.starts_with("iou-") && !name.starts_with("kvm-"))
                    .map(|list| list.trim().to_owned()),
            );
        }
    }
    lists
}

#[test]
fn a_cpuset_of_the_node_is_honoured() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let online = fs::read_to_string("/sys/devices/system/cpu/online").expect("Linux says so");
    let first = online.trim().split(['-', ',']).next().expect("there is one").to_owned();
    let all = thread_affinities(vec![i32::try_from(node.daemon_pid()).expect("a pid")]);
    let pod = node.crictl.run_pod(PodRequest::new("processors", node.directory()));
    let resources = json!({"resources": {"cpuset_cpus": first}});
    let refused = json!({"resources": {"cpuset_cpus": "1023"}});
    let refused = pod.try_create(ContainerRequest::sh("x", &image, "true").set("linux", refused)).err();
    assert!(refused.contains("InvalidArgument") && refused.contains("online"), "{refused}");
    let container = pod.start(ContainerRequest::sh("c", &image, "sleep 600").set("linux", resources));
    assert_eq!(container.status()["resources"]["linux"]["cpusetCpus"], json!(first));
    if engine() == "host" {
        // If the node lacks the controller, the container runs without the limit, as with others.
        match container.exec("cat /sys/fs/cgroup/cpuset.cpus") {
            output if output.code == 0 => assert_eq!(output.ok(), first),
            _ => println!("skipped: no cpuset controller of cgroup v2"),
        }
        return pod.remove();
    }
    let machine = || thread_affinities(node.pids_matching("nacelle-pod --dir "));
    assert_eq!(machine(), BTreeSet::from([first.clone()]));
    // A container without CPU pinning shares the VM.
    let other = pod.start(ContainerRequest::sh("d", &image, "sleep 600"));
    assert_eq!(machine(), BTreeSet::from([first.clone()]));
    node.crictl.call(["rm", "-f", &container.id]);
    eventually("the machine may run anywhere", || (machine() == all).then_some(()));
    node.crictl.call(["update", "--cpuset-cpus", &first, &other.id]);
    assert_eq!(machine(), BTreeSet::from([first]));
    pod.remove();
}

/// Updates the resources of a pod as kubelet does, which crictl cannot.
fn resize(node: &TestNode, pod: &str, cpu_quota: i64) -> Result<(), tonic::Status> {
    update_pod_resources(
        node,
        pod,
        cri::LinuxContainerResources { cpu_period: 100_000, cpu_quota, ..Default::default() },
    )
}

fn update_pod_resources(
    node: &TestNode,
    pod: &str,
    resources: cri::LinuxContainerResources,
) -> Result<(), tonic::Status> {
    let pod_sandbox_id = pod.to_owned();
    let request = cri::UpdatePodSandboxResourcesRequest { pod_sandbox_id, overhead: None, resources: Some(resources) };
    block_on(async { RuntimeServiceClient::new(node.channel()).update_pod_sandbox_resources(request).await.map(drop) })
}

#[test]
fn the_vcpus_of_a_vm_follow_the_cpu_limit_of_its_pod() {
    if engine() == "host" {
        println!("skipped: without a machine processors are the node's");
        return;
    }
    let extra = handler_config("grows", &format!("{SMALL_VM}max_vcpus = 3\n"));
    let mut node = TestNode::with_options(NodeOptions { extra, ..NodeOptions::default() });
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let limits = json!({"resources": {"cpu_period": 100_000, "cpu_quota": 100_000}});
    let requested = PodRequest::new("grows", &node.directory().join("logs")).set("linux", limits);
    let again = PodRequest(requested.0.clone());
    let id = {
        let pod = node.crictl.run_pod_with_handler("grows", requested);
        let container = pod.start(ContainerRequest::sh("main", &image, "sleep 1000"));
        let size = |vcpus: u32| {
            assert_eq!(container.exec("nproc").ok().trim(), vcpus.to_string());
            let machine = pod.inspect()["info"]["machine"].clone();
            assert_eq!((&machine["vcpus"], &machine["max_vcpus"]), (&json!(vcpus), &json!(3)), "{machine}");
        };
        size(1);
        for (quota, vcpus) in [(200_000, 2), (100_000, 1), (250_000, 3), (150_000, 2)] {
            resize(&node, &pod.id, quota).unwrap();
            size(vcpus);
        }
        // Containers that start later see the new size too.
        let later = pod.start(ContainerRequest::sh("later", &image, "echo it has $(nproc); sleep 1000"));
        later.wait_for_output("it has 2");
        let refused = resize(&node, &pod.id, 300_001).unwrap_err();
        assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
        assert!(refused.message().contains("3 CPUs") && refused.message().contains("3001 thousandths"), "{refused}");
        size(2);
        pod.id.clone()
    };
    node.kill();
    node.start();
    let pod = node.crictl.pod_handle(&id, again);
    eventually("the pod is found", || (pod.inspect()["status"]["state"] == "SANDBOX_READY").then_some(()));
    assert_eq!(pod.inspect()["info"]["machine"]["vcpus"], 2);
    resize(&node, &id, 100_000).unwrap();
    let container = pod.start(ContainerRequest::sh("last", &image, "sleep 1000"));
    assert_eq!(container.exec("nproc").ok().trim(), "1");
    pod.remove();
}

/// Returns the node's memory that a VM takes in MiB: of QEMU's memory file, or of the pod process.
fn vm_memory_mib(node: &TestNode) -> u64 {
    let of_file = |pid: i32| {
        let open = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let memory =
            |path: &Path| fs::read_link(path).is_ok_and(|file| file.to_string_lossy().contains("memory-backend"));
        let blocks = open
            .map(|file| file.path())
            .filter(|path| memory(path))
            .map(|path| fs::metadata(path).map_or(0, |file| file.blocks()));
        blocks.max().unwrap_or(0) * 512
    };
    let anonymous = |pid: i32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap_or_default();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0) * 1024
    };
    let bytes: u64 = match engine().as_str() {
        "qemu" => node.pids_matching("qemu-system").into_iter().map(of_file).sum(),
        _ => node.pids_matching("nacelle-pod --dir ").into_iter().map(anonymous).sum(),
    };
    bytes >> 20
}

/// Returns a container that holds this much memory until it ends.
fn memory_hog(image: &str, mib: u32) -> ContainerRequest {
    let text = format!(
        "dd if=/dev/zero bs={mib}M count=1 | (dd bs=1 count=1 of=/dev/null; echo it is there; exec sleep 1000)"
    );
    ContainerRequest::sh("hog", image, &text)
}

#[test]
fn the_memory_of_a_vm_follows_the_memory_limit_of_its_pod() {
    if engine() == "host" {
        println!("skipped: without a machine memory is the node's");
        return;
    }
    let extra = handler_config("grows", &format!("{SMALL_VM}max_memory_mib = 704\n"));
    let mut node = TestNode::with_options(NodeOptions { extra, ..NodeOptions::default() });
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let limits = json!({"resources": {"memory_limit_in_bytes": 64 << 20}});
    let requested = PodRequest::new("grows", &node.directory().join("logs")).set("linux", limits);
    let again = PodRequest(requested.0.clone());
    let resize = |node: &TestNode, pod: &str, mib: i64| {
        update_pod_resources(
            node,
            pod,
            cri::LinuxContainerResources { memory_limit_in_bytes: mib << 20, ..Default::default() },
        )
    };
    let (id, born) = {
        let pod = node.crictl.run_pod_with_handler("grows", requested);
        let container = pod.start(ContainerRequest::sh("main", &image, "sleep 1000"));
        let total = || container.exec("awk '/MemTotal/ {print $2}' /proc/meminfo").ok().trim().parse::<u64>().unwrap();
        let born = total();
        // A clone gets what it has beyond its template's 128 MiB in whole blocks.
        let given = if engine() == "kvm" { 256 } else { 192 };
        assert!((100 << 10..given << 10).contains(&born), "{born} KiB of the {given} MiB that it was born with");
        // 64 MiB of them are for containers.
        let size = |mib: u64| {
            assert_eq!(total(), born + ((mib - 64) << 10), "{mib} MiB for containers");
            let machine = pod.inspect()["info"]["machine"].clone();
            assert_eq!(
                (&machine["memory"], &machine["max_memory"]),
                (&json!(mib << 20), &json!(576 << 20)),
                "{machine}"
            );
        };
        size(64);
        for (requested, mib) in [(65, 192), (576, 576), (300, 320), (64, 64), (400, 448), (20, 64)] {
            resize(&node, &pod.id, requested).unwrap();
            size(mib);
        }
        let refused = resize(&node, &pod.id, 577).unwrap_err();
        assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
        assert!(refused.message().contains("603979776 bytes") && refused.message().contains("605028352"), "{refused}");
        size(64);
        // Memory in use stays, and with it all the rest.
        resize(&node, &pod.id, 576).unwrap();
        let hog = pod.start(memory_hog(&image, 350));
        hog.wait_for_output("it is there");
        let (before, full) = (pod.inspect()["info"]["resources"].clone(), vm_memory_mib(&node));
        let refused = resize(&node, &pod.id, 64).unwrap_err();
        assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
        assert!(refused.message().contains("are not in use"), "{refused}");
        size(576);
        assert_eq!(pod.inspect()["info"]["resources"], before);
        // Released memory returns to the node at once.
        node.crictl.call(["rm", "--force", &hog.id]);
        resize(&node, &pod.id, 64).unwrap();
        size(64);
        assert!(vm_memory_mib(&node) + 200 < full, "{} MiB of {full} are still the machine's", vm_memory_mib(&node));
        resize(&node, &pod.id, 192).unwrap();
        (pod.id.clone(), born)
    };
    node.kill();
    node.start();
    let pod = node.crictl.pod_handle(&id, again);
    eventually("the pod is found", || (pod.inspect()["status"]["state"] == "SANDBOX_READY").then_some(()));
    assert_eq!(pod.inspect()["info"]["machine"]["memory"], json!(192 << 20));
    resize(&node, &id, 320).unwrap();
    let container = pod.start(ContainerRequest::sh("last", &image, "sleep 1000"));
    assert_eq!(
        container.exec("awk '/MemTotal/ {print $2}' /proc/meminfo").ok().trim(),
        (born + (256 << 10)).to_string()
    );
    pod.remove();
}

#[test]
fn memory_that_a_guest_no_longer_uses_returns_to_the_node() {
    if engine() == "host" {
        println!("skipped: without a machine memory is the node's");
        return;
    }
    let extra = handler_config("large", "memory_mib = 1280\nscratch_mib = 512\n");
    let node = TestNode::with_options(NodeOptions { extra, ..NodeOptions::default() });
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node.crictl.run_pod_with_handler("large", PodRequest::new("large", node.directory()));
    let hog = pod.start(memory_hog(&image, 1024));
    hog.wait_for_output("it is there");
    let full = vm_memory_mib(&node);
    assert!(full >= 1024, "{full} MiB");
    node.crictl.call(["rm", "--force", &hog.id]);
    let ended = Instant::now();
    eventually("nine tenths of 1 GiB are the node's again", || {
        (full - vm_memory_mib(&node).min(full) > 921).then_some(())
    });
    // The duration depends on other work on the node.
    println!("of {full} MiB {} are left {:?} after the end", vm_memory_mib(&node), ended.elapsed());
    pod.remove();
}
