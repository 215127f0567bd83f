//! Owns: limits that change while a container runs, as its guest has them.

use nacelle_e2e::{Container, Image, Node, Pod};
use serde_json::json;

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
