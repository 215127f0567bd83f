//! Tests machine pods with dedicated CPUs: QEMU's threads keep their affinity, whatever happens to VM and daemon.

use nacelle_e2e::machine::{annotated_pod, machine_container, machine_node, push_boot_image};
use nacelle_e2e::{ContainerRequest, TestNode, eventually};
use serde_json::json;
use std::fs;

/// Returns the affinities of QEMU's threads: each CPU list, and the number of threads that have it.
fn thread_affinities(node: &TestNode) -> Vec<String> {
    let machines = node.pids_matching("-blockdev");
    let [machine] = machines.as_slice() else { return Vec::new() };
    let threads = fs::read_dir(format!("/proc/{machine}/task")).into_iter().flatten().flatten();
    let lists = threads.filter_map(|thread| {
        let status = fs::read_to_string(thread.path().join("status")).ok()?;
        Some(status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?.trim().to_owned())
    });
    lists.collect()
}

fn container_on_cpus(image: &str, attempt: u32, processors: &str) -> ContainerRequest {
    machine_container(image, attempt).set("linux", json!({"resources": {"cpuset_cpus": processors}}))
}

#[test]
fn dedicated_vcpus_keep_their_affinity() {
    let mut node = machine_node();
    let online = fs::read_to_string("/sys/devices/system/cpu/online").expect("the node says it");
    if online.trim() == "0" {
        println!("skipped: this node has one processor");
        return;
    }
    let image = push_boot_image(&node);
    let spec = |cores: u32| {
        let spec = json!({
            "domain": {
                "cpu": { "cores": cores, "dedicatedCpuPlacement": true },
                "memory": { "guest": "64Mi" },
                "devices": { "disks": [{ "name": "root", "disk": {}, "bootOrder": 1 }] },
            },
            "volumes": [{ "name": "root", "containerDisk": { "image": image } }],
        });
        spec.to_string()
    };
    let of =
        |name: &str, cores| annotated_pod(&node, name, &[("kind", "machine"), ("name", name), ("spec", &spec(cores))]);
    let many = node.crictl.run_pod_with_handler("vm", of("many", 2));
    for processors in ["", "1"] {
        let error = many.try_create(container_on_cpus(&image, 0, processors)).err();
        assert!(
            error.contains("config.linux.resources.cpuset_cpus") && error.contains("dedicatedCpuPlacement"),
            "{error}"
        );
    }
    let machine = many.start(container_on_cpus(&image, 0, "0-1"));
    let error = node.crictl.try_call(["update", "--cpuset-cpus", "1", &machine.id]).err();
    assert!(error.contains("1 CPUs of the node") && error.contains("its VM has 2 vCPUs"), "{error}");
    many.remove();
    let (pod, id) = {
        let pod = node.crictl.run_pod_with_handler("vm", of("one", 1));
        let machine = pod.start(container_on_cpus(&image, 0, "0-1"));
        machine.wait_for_output("boot 1\n");
        (pod.id.clone(), machine.id.clone())
    };
    // The vCPU thread has the first CPU, the others both.
    let stays = |node: &TestNode, when: &str| {
        let found = eventually(when, || {
            let found = thread_affinities(node);
            found.iter().any(|list| list == "0").then_some(found)
        });
        assert!(found.iter().any(|list| list == "0-1"), "{when}: {found:?}");
    };
    let vm = |node: &TestNode, words: &[&str]| {
        node.crictl.try_call([&["exec", "--sync", &id, "@vm"], words].concat()).ok();
    };
    stays(&node, "at first");
    vm(&node, &["pause"]);
    vm(&node, &["unpause"]);
    stays(&node, "after it was paused");
    vm(&node, &["snapshot", "now"]);
    vm(&node, &["restore", "now"]);
    stays(&node, "after it was restored");
    node.kill();
    node.start();
    eventually("the machine is found again", || {
        (node.crictl.try_call(["exec", "--sync", &id, "@vm", "status"]).code == 0).then_some(())
    });
    stays(&node, "with the next daemon");
    let before = node.pids_matching("-blockdev");
    vm(&node, &["power-off"]);
    eventually("QEMU starts anew", || {
        let now = node.pids_matching("-blockdev");
        (now.len() == 1 && now != before).then_some(())
    });
    stays(&node, "in the next QEMU");
    // An update as by kubelet's CPU manager.
    node.crictl.call(["update", "--cpuset-cpus", "1", &id]);
    let moved = |node: &TestNode, when: &str| {
        eventually(when, || {
            let found = thread_affinities(node);
            (!found.is_empty() && found.iter().all(|list| list == "1")).then_some(())
        });
    };
    moved(&node, "on another one");
    let before = node.pids_matching("-blockdev");
    vm(&node, &["power-off"]);
    eventually("QEMU starts anew there", || {
        let now = node.pids_matching("-blockdev");
        (now.len() == 1 && now != before).then_some(())
    });
    moved(&node, "the next QEMU there");
    node.crictl.call(["update", "--cpuset-cpus", "0-1", &id]);
    stays(&node, "on the first again");
    node.crictl.call(["rmp", "--force", &pod]);
}
