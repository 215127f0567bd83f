//! Owns: pods on a network made by Debian's CNI plugins.

use nacelle_e2e::{Container, Image, Node, Pod, eventually};
use serde_json::json;

#[test]
fn pods_reach_each_other_and_the_node() {
    let node = Node::new();
    let image = node.image(&Image::busybox(), "busybox:1");
    let server = node.crictl.run_pod(
        Pod::new("server", node.folder())
            .set("port_mappings", json!([{"protocol": 0, "container_port": 8080, "host_port": 18080}])),
    );
    let client = node.crictl.run_pod(Pod::new("client", node.folder()).set(
        "dns_config",
        json!({"servers": ["10.88.0.53"], "searches": ["example.internal"], "options": ["ndots:3"]}),
    ));
    let web = "while :; do printf 'HTTP/1.0 200 OK\\r\\n\\r\\nhello from %s\\n' $(hostname) | nc -l -p 8080; done";
    let web = server.start(Container::sh("web", &image, web));
    let shell = client.start(Container::sh("shell", &image, "sleep 600"));

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
        node.run("ping", &["-c", "1", "-W", "30", &address]).ok();
    }
    let get = format!("http://{}:8080/", server.ip());
    eventually("the pod's web server answers", || {
        node.run("curl", &["-s", "-m", "20", &get]).stdout.contains("hello from").then_some(())
    });
    eventually("the server answers on the node's port", || {
        let answer = node.run("curl", &["-s", "-m", "20", "http://10.88.0.1:18080/"]);
        answer.stdout.contains("hello from").then_some(())
    });
    assert_eq!(web.status()["state"], "CONTAINER_RUNNING");

    // A megabyte each way: the checksums and sizes that offloads could spoil.
    let digest = "dd if=/dev/zero bs=1024 count=1024 2>/dev/null | md5sum | cut -c1-32";
    // Its input stays open: busybox's nc would close its side at once, and the sender's would then stop in the middle.
    let receiver = "sleep 1000 | nc -l -p 9000 | md5sum | cut -c1-32";
    let receiver = server.start(Container::sh("receiver", &image, receiver));
    eventually("the receiver listens", || web.exec("netstat -ltn").stdout.contains(":9000").then_some(()));
    let expected = shell.exec(digest).ok();
    shell.exec(&format!("dd if=/dev/zero bs=1024 count=1024 2>/dev/null | nc {} 9000", server.ip())).ok();
    receiver.says(&expected);

    client.remove();
    server.remove();
}

#[test]
fn pods_see_the_sysctls_and_the_name_they_asked_for() {
    let node = Node::new();
    let image = node.image(&Image::busybox(), "busybox:1");
    let pod = Pod::new("settings", node.folder())
        .set("hostname", json!("settings-host"))
        .set("linux", json!({"sysctls": {"net.ipv4.ip_unprivileged_port_start": "81", "kernel.shm_rmid_forced": "1"}}));
    let pod = node.crictl.run_pod(pod);
    let script = "hostname; cat /etc/hostname; cat /proc/sys/net/ipv4/ip_unprivileged_port_start; \
                  cat /proc/sys/kernel/shm_rmid_forced; grep settings-host /etc/hosts; echo end";
    let said = pod.start(Container::sh("one", &image, script)).says("end");
    assert!(said.starts_with("settings-host\nsettings-host\n81\n1\n"), "{said}");
    pod.remove();
}
