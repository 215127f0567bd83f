//! Owns: limits that change while a container runs, as its guest has them.

use nacelle_e2e::node::{Options, engine};
use nacelle_e2e::{Container, Image, Node, Pod, eventually};
use nacelle_proto::cri;
use nacelle_proto::cri::runtime_service_client::RuntimeServiceClient;
use serde_json::json;
use std::collections::BTreeSet;
use std::fs;

#[test]
fn limits_change_both_ways_before_and_after_the_start() {
    let node = Node::new();
    let image = node.image(&Image::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(Pod::new("limits", node.folder()));
    let resources =
        json!({"memory_limit_in_bytes": 32 << 20, "cpu_period": 100_000, "cpu_quota": 50_000, "cpu_shares": 512});
    let container = pod.create(Container::sh("c", &image, "sleep 600").set("linux", json!({"resources": resources})));
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

    // Less than it uses is refused, and so changes nothing else.
    let refused = node.crictl.try_call(["update", "--memory", "4096", "--cpu-quota", "1000", &container.id]).err();
    assert!(refused.contains("are in use"), "{refused}");
    assert_eq!(values(container.exec(read).ok()), ["25165824", "80000 100000", "100"]);
    let shown = container.status()["resources"]["linux"].clone();
    assert_eq!((&shown["cpuQuota"], &shown["memoryLimitInBytes"]), (&json!("80000"), &json!("25165824")));
    pod.remove();
}

/// The processors on which the threads of these processes, and of what they have started, may run.
fn allowed(pids: Vec<i32>) -> BTreeSet<String> {
    let (mut pids, mut lists, mut at) = (pids, BTreeSet::new(), 0);
    while let Some(pid) = pids.get(at).copied() {
        at += 1;
        for thread in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
            let read = |name: &str| fs::read_to_string(thread.path().join(name)).unwrap_or_default();
            pids.extend(read("children").split_whitespace().filter_map(|pid| pid.parse::<i32>().ok()));
            let status = read("status");
            let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
            // Threads of the kernel's that belong to the process keep their own.
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
fn processors_of_the_node_are_kept_to() {
    let node = Node::new();
    let image = node.image(&Image::busybox(), "busybox:1");
    let online = fs::read_to_string("/sys/devices/system/cpu/online").expect("Linux says so");
    let first = online.trim().split(['-', ',']).next().expect("there is one").to_owned();
    let all = allowed(vec![i32::try_from(node.daemon_pid()).expect("a pid")]);
    let pod = node.crictl.run_pod(Pod::new("processors", node.folder()));
    let resources = json!({"resources": {"cpuset_cpus": first}});
    let refused = json!({"resources": {"cpuset_cpus": "1023"}});
    let refused = pod.try_create(Container::sh("x", &image, "true").set("linux", refused)).err();
    assert!(refused.contains("InvalidArgument") && refused.contains("online"), "{refused}");
    let container = pod.start(Container::sh("c", &image, "sleep 600").set("linux", resources));
    assert_eq!(container.status()["resources"]["linux"]["cpusetCpus"], json!(first));
    if engine() == "host" {
        // Where the node has no such controller the container runs without, as it does with other limits.
        match container.exec("cat /sys/fs/cgroup/cpuset.cpus") {
            said if said.code == 0 => assert_eq!(said.ok(), first),
            _ => println!("skipped: no cpuset controller of cgroup v2"),
        }
        return pod.remove();
    }
    let machine = || allowed(node.processes("nacelle-pod "));
    assert_eq!(machine(), BTreeSet::from([first.clone()]));
    // Another that may run anywhere shares the machine.
    let other = pod.start(Container::sh("d", &image, "sleep 600"));
    assert_eq!(machine(), BTreeSet::from([first.clone()]));
    node.crictl.call(["rm", "-f", &container.id]);
    eventually("the machine may run anywhere", || (machine() == all).then_some(()));
    node.crictl.call(["update", "--cpuset-cpus", &first, &other.id]);
    assert_eq!(machine(), BTreeSet::from([first]));
    pod.remove();
}

/// kubelet's word of what a pod may have, which crictl cannot say.
fn resize(node: &Node, pod: &str, cpu_quota: i64) -> Result<(), tonic::Status> {
    let resources = cri::LinuxContainerResources { cpu_period: 100_000, cpu_quota, ..Default::default() };
    let pod_sandbox_id = pod.to_owned();
    let request = cri::UpdatePodSandboxResourcesRequest { pod_sandbox_id, overhead: None, resources: Some(resources) };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        RuntimeServiceClient::new(node.channel()).update_pod_sandbox_resources(request).await.map(drop)
    })
}

#[test]
fn a_machine_has_the_processors_that_its_pod_may_use() {
    if engine() == "host" {
        println!("skipped: without a machine processors are the node's");
        return;
    }
    let [kernel, initrd] = ["NACELLE_KERNEL", "NACELLE_INITRD"].map(nacelle_e2e::part);
    let extra = format!(
        "[handlers.grows]\nengine = {:?}\nkernel = {kernel:?}\ninitrd = {initrd:?}\nmemory_mib = 128\nscratch_mib = 512\n\
         max_vcpus = 3\n",
        engine()
    );
    let mut node = Node::with(Options { extra, ..Options::default() });
    let image = node.image(&Image::busybox(), "busybox:1");
    let limits = json!({"resources": {"cpu_period": 100_000, "cpu_quota": 100_000}});
    let asked = Pod::new("grows", &node.folder().join("logs")).set("linux", limits);
    let again = Pod(asked.0.clone());
    let id = {
        let pod = node.crictl.run_pod_of("grows", asked);
        let container = pod.start(Container::sh("main", &image, "sleep 1000"));
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
        // What runs later sees it, too.
        let later = pod.start(Container::sh("later", &image, "echo it has $(nproc); sleep 1000"));
        later.says("it has 2");
        let refused = resize(&node, &pod.id, 300_001).unwrap_err();
        assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
        assert!(refused.message().contains("3 CPUs") && refused.message().contains("3001 thousandths"), "{refused}");
        size(2);
        pod.id.clone()
    };
    node.kill();
    node.start();
    let pod = node.crictl.pod(&id, again);
    eventually("the pod is found", || (pod.inspect()["status"]["state"] == "SANDBOX_READY").then_some(()));
    assert_eq!(pod.inspect()["info"]["machine"]["vcpus"], 2);
    resize(&node, &id, 100_000).unwrap();
    let container = pod.start(Container::sh("last", &image, "sleep 1000"));
    assert_eq!(container.exec("nproc").ok().trim(), "1");
    pod.remove();
}
