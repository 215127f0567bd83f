//! Tests pods on a network of Debian's CNI plugins.

use nacelle_e2e::node::engine;
use nacelle_e2e::{ContainerRequest, PodRequest, TestImage, TestNode, eventually};
use serde_json::json;

#[test]
fn pods_reach_each_other_and_the_node() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let server = node.crictl.run_pod(
        PodRequest::new("server", node.directory())
            .set("port_mappings", json!([{"protocol": 0, "container_port": 8080, "host_port": 18080}])),
    );
    let client = node.crictl.run_pod(PodRequest::new("client", node.directory()).set(
        "dns_config",
        json!({"servers": ["10.88.0.53"], "searches": ["example.internal"], "options": ["ndots:3"]}),
    ));
    let web = "while :; do printf 'HTTP/1.0 200 OK\\r\\n\\r\\nhello from %s\\n' $(hostname) | nc -l -p 8080; done";
    let web = server.start(ContainerRequest::sh("web", &image, web));
    let shell = client.start(ContainerRequest::sh("shell", &image, "sleep 600"));

    let inside = shell.exec("cat /etc/resolv.conf; ip -o addr show eth0").ok();
    for line in ["nameserver 10.88.0.53", "search example.internal", "options ndots:3", &client.ip()] {
        assert!(inside.contains(line), "{line}: {inside}");
    }
    let addresses = server.inspect()["status"]["network"].clone();
    let v6 = addresses["additionalIps"][0]["ip"].as_str().expect("a second address").to_owned();
    for address in [server.ip(), v6.clone(), "10.88.0.1".into(), "fd00:88::1".into()] {
        let answer = shell.exec(&format!("ping -c 2 -W 30 {address}"));
        assert!(answer.stdout.contains("2 packets received"), "{address}: {answer:?}");
    }
    for address in [server.ip(), v6] {
        node.run_in_netns("ping", &["-c", "1", "-W", "30", &address]).ok();
    }
    let get = format!("http://{}:8080/", server.ip());
    eventually("the pod's web server answers", || {
        node.run_in_netns("curl", &["-s", "-m", "20", &get]).stdout.contains("hello from").then_some(())
    });
    eventually("the server answers on the node's port", || {
        let answer = node.run_in_netns("curl", &["-s", "-m", "20", "http://10.88.0.1:18080/"]);
        answer.stdout.contains("hello from").then_some(())
    });
    assert_eq!(web.status()["state"], "CONTAINER_RUNNING");

    // A megabyte in each direction: with checksums and sizes that offloads could corrupt.
    let digest = "dd if=/dev/zero bs=1024 count=1024 2>/dev/null | md5sum | cut -c1-32";
    // Its input stays open: busybox's nc would close its side at once, and the sender's would then stop in the middle.
    let receiver = "sleep 1000 | nc -l -p 9000 | md5sum | cut -c1-32";
    let receiver = server.start(ContainerRequest::sh("receiver", &image, receiver));
    eventually("the receiver listens", || web.exec("netstat -ltn").stdout.contains(":9000").then_some(()));
    let expected = shell.exec(digest).ok();
    shell.exec(&format!("dd if=/dev/zero bs=1024 count=1024 2>/dev/null | nc {} 9000", server.ip())).ok();
    receiver.wait_for_output(&expected);

    client.remove();
    server.remove();
}

#[test]
fn pods_have_the_requested_sysctls_and_hostname() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let mut sysctls = json!({
        "net.ipv4.ip_unprivileged_port_start": "81", "kernel.shm_rmid_forced": "1", "kernel.domainname": "example.org",
    });
    let request = PodRequest::new("settings", node.directory()).set("hostname", json!("settings-host"));
    if engine() == "host" {
        // The user namespace is the node's.
        let mut refused = request.0.clone();
        refused["linux"]["sysctls"] = json!({"user.max_net_namespaces": "7"});
        let refused = node.crictl.try_call(["runp", &node.crictl.write_input("refused", &refused)]).err();
        assert!(refused.contains("InvalidArgument") && refused.contains("user.max_net_namespaces"), "{refused}");
    } else {
        sysctls["user.max_net_namespaces"] = json!("7");
    }
    let pod = node.crictl.run_pod(request.set("linux", json!({"sysctls": sysctls})));
    let script = "hostname; cat /etc/hostname; cat /proc/sys/net/ipv4/ip_unprivileged_port_start; \
                  cat /proc/sys/kernel/shm_rmid_forced /proc/sys/kernel/domainname; cat /proc/sys/user/max_net_namespaces; \
                  grep settings-host /etc/hosts; echo end";
    let output = pod.start(ContainerRequest::sh("one", &image, script)).wait_for_output("end");
    assert!(output.starts_with("settings-host\nsettings-host\n81\n1\nexample.org\n"), "{output}");
    assert!(engine() == "host" || output.contains("example.org\n7\n"), "{output}");
    pod.remove();
}

/// Replaces the node's CNI configuration.
fn configure(node: &TestNode, plugins: serde_json::Value) {
    let text = json!({"cniVersion": "1.0.0", "name": "own", "plugins": plugins}).to_string();
    std::fs::write(node.directory().join("cni/10-e2e.conflist"), text).unwrap();
}

#[test]
fn a_pod_is_removed_without_its_cni_plugin_and_del_is_retried() {
    let mut node = TestNode::new();
    let directory = node.directory().to_owned();
    let bridge = json!({
        "type": "bridge", "bridge": "cni0", "isGateway": true,
        "ipam": {"type": "host-local", "dataDir": directory.join("leases"), "ranges": [[{"subnet": "10.88.0.0/24"}]]},
    });
    configure(&node, json!([bridge, {"type": "nacelle-fake", "dir": directory, "tag": "fake", "del": "broken"}]));
    std::fs::write(directory.join("broken"), "").unwrap();
    let pod = node.crictl.run_pod(PodRequest::new("owing", &directory));
    pod.remove();
    // Everything on the node is gone; only the plugins are called again.
    eventually("nothing is left", || node.leaked().is_empty().then_some(()));
    let check = |node: &TestNode| {
        let config = directory.join("config.toml").display().to_string();
        let bin = nacelle_e2e::path_from_env("NACELLE_BIN").display().to_string();
        ["check", "pods"].map(|command| node.run_in_netns(&bin, &[command, "--config", &config]).stdout)
    };
    for output in check(&node) {
        assert!(output.contains("its CNI DEL from network \"own\" has failed"), "{output}");
    }
    assert!(node.log().contains("the CNI DEL of the pod is owed"), "{}", node.log());
    // The next daemon starts all the same, and knows the pending DEL.
    node.kill();
    node.start();
    eventually("the plugin is called again", || check(&node)[1].contains(" times, will be retried)").then_some(()));
    std::fs::remove_file(directory.join("broken")).unwrap();
    std::fs::write(directory.join("cni/20-other.conf"), "").unwrap();
    eventually("the plugin has released the pod's address", || {
        let left = std::fs::read_dir(directory.join("root/cni")).unwrap().count();
        (left == 0).then_some(())
    });
    assert!(!check(&node)[1].contains("CNI DEL"));
}

#[test]
fn permanent_neighbours_and_host_routes_reach_the_guest() {
    let node = TestNode::new();
    configure(&node, json!([{"type": "nacelle-routed", "mtu": 65535}]));
    for address in ["10.80.9.9/32", "fd80:9::9/128"] {
        node.run_in_netns("ip", &["addr", "add", address, "dev", "lo"]).ok();
    }
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(PodRequest::new("routed", node.directory()));
    assert_eq!(pod.ip(), "10.80.7.5");
    let shell = pod.start(ContainerRequest::sh("shell", &image, "sleep 600"));
    let neighbours = shell.exec("ip neigh show").ok();
    let permanent = |ip: &str| neighbours.lines().any(|line| line.starts_with(ip) && line.ends_with("PERMANENT"));
    assert!(permanent("169.254.1.1 ") && permanent("fe80::1 "), "{neighbours}");
    for address in ["10.80.9.9", "fd80:9::9"] {
        let answer = shell.exec(&format!("ping -c 2 -W 30 {address}"));
        assert!(answer.stdout.contains("2 packets received"), "{address}: {answer:?}");
    }
    let routes = shell.exec("ip route show").ok();
    let far = routes.lines().find(|line| line.starts_with("10.81.0.0/16")).unwrap_or_default();
    for part in ["via 169.254.1.1", "metric 7", "src 10.80.7.5"] {
        assert!(far.contains(part), "{part}: {routes}");
    }
    let mtu = shell.exec("cat /sys/class/net/eth0/mtu").ok();
    if nacelle_e2e::node::engine() == "host" {
        assert_eq!(mtu, "65535");
    } else {
        // The largest MTU of a tap; the log has both numbers.
        assert_eq!(mtu, "65521");
        let log = node.log();
        let warned = log.lines().any(|line| line.contains("mtu=65535") && line.contains("guest_mtu=65521"));
        assert!(warned, "{log}");
    }
    drop(shell);
    pod.remove();
}
