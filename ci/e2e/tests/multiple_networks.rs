//! Tests pods with several networks: a CNI plugin creates further interfaces, as Multus does, and guests get those that are
//! requested.

use nacelle_e2e::machine::{Debian, annotated_pod, machine_container, machine_node_with, push_boot_image};
use nacelle_e2e::{ContainerRequest, NodeOptions, PodRequest, TestImage, TestNode, eventually};
use serde_json::json;

const NETWORKS: &str = "k8s.v1.cni.cncf.io/networks";
/// The pod's own network, and another one.
const TWO_NETWORKS: &str = "interfaces: [{name: own}, {name: lan}]}}, networks: [{name: own, pod: {}}, {name: lan, multus: {networkName: lan-conf}}]}";

fn node_with_interfaces(further: &[&str]) -> TestNode {
    let further = further.iter().map(|name| (*name).to_owned()).collect();
    machine_node_with(NodeOptions { ipv6: false, further, ..NodeOptions::default() })
}

fn with_networks(mut pod: PodRequest, networks: &str) -> PodRequest {
    pod.0["annotations"][NETWORKS] = json!(networks);
    pod
}

/// Returns the maximum number of further interfaces of a container pod's guest.
fn max_further_interfaces() -> usize {
    if nacelle_e2e::node::engine() == "qemu" { 1 } else { 8 }
}

/// Returns the hardware addresses of the running VM's cards, in their order.
fn macs(node: &TestNode) -> Vec<String> {
    let lines = nacelle_e2e::census::processes(&node.directory().join("run"));
    let (_, line) = lines.into_iter().find(|(_, line)| line.contains(" -netdev ")).expect("the machine runs");
    line.split([' ', ',']).filter(|word| word.starts_with("mac=")).map(str::to_owned).collect()
}

#[test]
fn a_vm_has_a_stable_network_card_for_each_network() {
    let node = node_with_interfaces(&["net1", "lan"]);
    let image = push_boot_image(&node);
    let disks = format!("root=image:{image},boot=1");
    let spec = format!("{{domain: {{devices: {{{TWO_NETWORKS}");
    let machine =
        [("kind", "machine"), ("memory", "64Mi"), ("disks", disks.as_str()), ("name", "db"), ("spec", spec.as_str())];
    let named = || annotated_pod(&node, "db", &machine);
    let run = |pod: PodRequest| {
        let pod = node.crictl.run_pod_with_handler("vm", pod);
        pod.start(machine_container(&image, 0)).wait_for_output("boot ");
        let (macs, addresses) = (macs(&node), pod.inspect()["status"]["network"].clone());
        pod.remove();
        assert_eq!(addresses["additionalIps"], json!([]), "the cluster knows the first interface's alone");
        macs
    };
    // The second interface is net1, or that of the pod's annotation.
    let first = run(named());
    assert!(first.len() == 2 && first[0] != first[1], "{first:?}");
    assert_eq!(run(named()), first);
    let other = run(with_networks(named(), r#"[{"name": "lan-conf", "interface": "lan"}]"#));
    assert!(other[0] == first[0] && other[1] != first[1], "{other:?}");
    assert_eq!(run(with_networks(named(), "other/x@lan, lan-conf@net1")), first);

    for (networks, code, words) in [
        // CNI has not created one.
        ("lan-conf@net7", "FailedPrecondition", "no interface net7"),
        ("other/lan-conf", "InvalidArgument", "spec.networks[1].multus.networkName"),
        ("lan-conf@eth0", "InvalidArgument", NETWORKS),
    ] {
        let file = node.crictl.write_input("pod", &with_networks(named(), networks).0);
        let refused = node.crictl.try_call(["runp", "--runtime", "vm", &file]).err();
        assert!(refused.contains(code) && refused.contains(words), "{networks}: {refused}");
    }
    let pods = node.crictl.call_json(["pods", "-o", "json"])["items"].clone();
    assert_eq!(pods, json!([]), "nothing is left of them");
}

#[test]
fn a_container_pod_has_the_networks_of_its_annotation() {
    let node = node_with_interfaces(&["net1", "lan"]);
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let several =
        |networks: &str| PodRequest::new("several", node.directory()).set("annotations", json!({ NETWORKS: networks }));
    let many = vec!["a"; max_further_interfaces() + 1].join(",");
    let refused = node.crictl.try_call(["runp", &node.crictl.write_input("pod", &several(&many).0)]).err();
    assert!(refused.contains("Unimplemented") && refused.contains(NETWORKS), "{refused}");
    // Only the interface that no plugin creates is missing.
    node.crictl.run_pod(several("a@net7")).remove();
    let (networks, expected) = match max_further_interfaces() {
        1 => ("a@lan", vec!["lan"]),
        _ => ("a@lan, b@net7, c@net1", vec!["lan", "net1"]),
    };
    let pod = node.crictl.run_pod(several(networks));
    let shell = pod.start(ContainerRequest::sh("shell", &image, "sleep 600"));
    let inside = shell.exec("ip -o -4 addr show").ok();
    assert!(inside.contains(&format!(" {}/", pod.ip())), "{inside}");
    for name in expected {
        let line = inside.lines().find(|line| line.contains(&format!(" {name} "))).expect(name);
        let subnet = if name == "lan" { "10.88.2." } else { "10.88.1." };
        assert!(line.contains(&format!(" {subnet}")), "{line}");
        assert!(shell.exec(&format!("ping -c 1 -W 30 {subnet}1")).stdout.contains("1 packets received"), "{name}");
        let own = line.split_whitespace().find_map(|word| word.split_once('/')).expect(name).0;
        node.run_in_netns("ping", &["-c", "1", "-W", "30", own]).ok();
    }
    assert!(shell.exec("ping -c 1 -W 30 10.88.0.1").stdout.contains("1 packets received"));
    pod.remove();
}

#[test]
fn debian_communicates_over_all_its_network_cards() {
    let Some(debian) = Debian::from_env() else {
        println!("skipped: NACELLE_DISK_IMAGE is not set: ci/disk-image makes the disk of Debian");
        return;
    };
    let node = node_with_interfaces(&["net1"]);
    let image = debian.push_image(&node);
    let (disks, line) = (format!("root=image:{image},boot=1"), debian.command_line());
    let spec = format!("{{domain: {{devices: {{networkInterfaceMultiqueue: true, {TWO_NETWORKS}");
    let machine = [
        ("kind", "machine"),
        ("memory", "768Mi"),
        ("cpus", "2"),
        ("disks", &disks),
        ("kernel-image", &image),
        ("kernel", "/boot/vmlinuz"),
        ("initrd", "/boot/initrd.img"),
        ("kernel-args", &line),
        ("spec", &spec),
        ("cloud-init", "#cloud-config\n"),
        // The guest requests both addresses by DHCP.
        ("cloud-init-network", "{version: 2, ethernets: {eth0: {dhcp4: true}, eth1: {dhcp4: true}}}"),
    ];
    let pod = node.crictl.run_pod_with_handler("vm", annotated_pod(&node, "debian", &machine));
    let machine = pod.start(machine_container(&image, 0));
    machine.wait_for_output("Debian GNU/Linux 12 ");
    let exec = |script: &str| machine.exec(script);
    eventually("the guest agent answers", || (exec("true").code == 0).then_some(()));
    eventually("both cards have their addresses", || {
        let addresses = exec("ip -o -4 address show").stdout;
        let has = |card: &str, address: &str| {
            addresses.lines().any(|line| line.contains(&format!(" {card} ")) && line.contains(&format!(" {address}/")))
        };
        (has("eth0", &pod.ip()) && has("eth1", "10.88.1.2")).then_some(())
    });
    let both = || {
        for (card, address) in [("eth0", "10.88.0.1"), ("eth1", "10.88.1.1")] {
            exec(&format!("ping -c 1 -W 30 -I {card} {address}")).ok();
        }
        for address in [pod.ip(), "10.88.1.2".to_owned()] {
            node.run_in_netns("ping", &["-c", "1", "-W", "30", &address]).ok();
        }
    };
    both();
    for card in ["eth0", "eth1"] {
        let queues = exec(&format!("ls -d /sys/class/net/{card}/queues/rx-*")).ok();
        assert_eq!(queues.lines().count(), 2, "{queues}");
    }
    let vm = |words: &[&str]| node.crictl.try_call([&["exec", "--sync", &machine.id, "@vm"], words].concat()).ok();
    vm(&["snapshot", "before"]);
    vm(&["restore", "before"]);
    eventually("the guest agent answers", || (exec("true").code == 0).then_some(()));
    both();
    node.crictl.call(["stop", "--timeout", "120", &machine.id]);
    assert_eq!(machine.wait_for_exit()["exitCode"], 0, "it powered itself off");
    pod.remove();
}
