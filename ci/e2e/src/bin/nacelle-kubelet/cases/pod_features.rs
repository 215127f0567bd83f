//! Tests pods that start and run: probes, init containers, users, names, the network.

use super::CaseResult;
use crate::fixture::KubeletFixture;
use crate::pods::{ObservedPod, StaticPod, container_status, example, has_condition, wait_for};

/// Returns a pod with one container that waits; `spec` and `main` are further lines for the two, with their indentation.
pub fn waiting(name: &str, spec: &str, main: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: default}}\nspec:\n{spec}  \
         terminationGracePeriodSeconds: 5\n  containers:\n  - name: main\n    image: busybox:1.36\n    \
         command: [sh, -c, \"trap 'exit 0' TERM; sleep 1000000 & wait\"]\n{main}"
    )
}

pub fn web_server_with_probes(fixture: &KubeletFixture) -> CaseResult {
    let pod = StaticPod::example(fixture, "web");
    let status = pod.wait_until_ready();
    let address = status["status"]["podIP"].as_str().expect("a Ready pod has an address").to_owned();
    let get = |url: &str| fixture.node.run_in_netns("curl", &["-sf", "--max-time", "20", url]);
    assert_eq!(get(&format!("http://{address}:8080/")).ok(), "hello from web-node");
    let first = container_status(&status, "web").clone();
    assert_eq!(first["restartCount"], 0);

    // Not ready while the page is missing, and the container is not restarted for it.
    pod.run("web", &["mv", "/www/index.html", "/www/away"]);
    pod.wait_until("it is not Ready", |pod| (!has_condition(pod, "Ready")).then_some(()));
    pod.run("web", &["mv", "/www/away", "/www/index.html"]);
    let again = pod.wait_until_ready();
    assert_eq!(container_status(&again, "web")["containerID"], first["containerID"]);

    // After a failed liveness probe there is another container, of the same pod.
    pod.run("web", &["rm", "/www/alive"]);
    let second = pod.wait_until("it was restarted", |pod| {
        let web = container_status(pod, "web");
        (web["restartCount"] == 1 && has_condition(pod, "Ready")).then(|| pod.clone())
    });
    assert_eq!(container_status(&second, "web")["lastState"]["terminated"]["containerID"], first["containerID"]);
    assert_eq!(second["status"]["podIP"], address.as_str());
    assert_eq!(get(&format!("http://{address}:8080/")).ok(), "hello from web-node");
    pod.remove();
    assert_ne!(get(&format!("http://{address}:8080/")).code, 0, "the server answers after its end");
    CaseResult::Passed
}

pub fn init_container_and_sidecar(fixture: &KubeletFixture) -> CaseResult {
    let pod = StaticPod::example(fixture, "init-and-sidecar");
    let status = pod.wait_until_ready();
    wait_for("all containers have written their lines", || (pod.log("main") == "prepared\nclock\nmain").then_some(()));
    let prepare = &container_status(&status, "prepare")["state"]["terminated"];
    assert_eq!((&prepare["exitCode"], &prepare["reason"]), (&0.into(), &"Completed".into()));
    assert_eq!(container_status(&status, "clock")["ready"], true);

    // A sidecar that ends is restarted; the main container is not affected.
    let main = container_status(&status, "main")["containerID"].clone();
    pod.try_run("clock", &["kill", "1"]);
    let after = pod.wait_until("the sidecar came again", |pod| {
        let clock = container_status(pod, "clock");
        (clock["restartCount"] == 1 && clock["ready"] == true).then(|| pod.clone())
    });
    assert_eq!(container_status(&after, "main")["containerID"], main);
    pod.remove();
    CaseResult::Passed
}

pub fn changed_manifest(fixture: &KubeletFixture) -> CaseResult {
    let manifest = |word: &str| waiting("changes", "", &format!("    env: [{{name: WORD, value: {word}}}]\n"));
    let pod = StaticPod::new(fixture, "changes", &manifest("first"));
    let first = pod.wait_until_ready();
    assert_eq!(pod.shell("main", "echo $WORD", b"").stdout, "first\n");
    pod.write_manifest(&manifest("second"));
    pod.wait_until("it is another pod", |now| {
        let other = now["metadata"]["uid"] != first["metadata"]["uid"];
        (other && has_condition(now, "Ready")).then_some(())
    });
    assert_eq!(pod.shell("main", "echo $WORD", b"").stdout, "second\n");
    let name = pod.full_name();
    wait_for("one pod is left", || {
        let pods = fixture.node.crictl.call(["pods", "-q", "--state", "Ready", "--name", &name]);
        (pods.lines().count() == 1).then_some(())
    });
    pod.remove();
    CaseResult::Passed
}

pub fn a_missing_image(fixture: &KubeletFixture) -> CaseResult {
    let manifest = waiting("missing-image", "", "").replace("busybox:1.36", "nowhere:7");
    let pod = StaticPod::new(fixture, "missing-image", &manifest);
    pod.wait_until("it says why", |pod| {
        let waiting = &container_status(pod, "main")["state"]["waiting"];
        let why = waiting["reason"].as_str()?;
        let backs_off = why == "ImagePullBackOff" && waiting["message"].as_str()?.contains("nowhere:7");
        backs_off.then_some(())
    });
    // The pod starts once the image exists.
    fixture.node.registry.push(&nacelle_e2e::TestImage::busybox(), "library/nowhere:7");
    pod.wait_until_ready();
    pod.remove();
    CaseResult::Passed
}

pub fn host_network(fixture: &KubeletFixture) -> CaseResult {
    let pod = StaticPod::example(fixture, "host-network");
    let status = pod.wait_until_ready();
    assert!(pod.log("agent").contains("cni0") || pod.run("agent", &["ip", "link"]).contains("lo"));
    let here = |program: &str, arguments: &[&str]| fixture.node.run_in_netns(program, arguments).ok();
    assert_eq!(pod.run("agent", &["readlink", "/proc/self/ns/net"]), here("readlink", &["/proc/self/ns/net"]));
    assert_eq!(status["status"]["podIP"], status["status"]["hostIP"]);
    pod.remove();
    CaseResult::Passed
}

pub fn restricted(fixture: &KubeletFixture) -> CaseResult {
    let pod = StaticPod::example(fixture, "restricted");
    pod.wait_until_ready();
    let says = |script: &str| pod.shell("main", script, b"");
    assert_eq!(says("id -u; id -g; id -G").stdout, "1000\n1000\n1000 2000 3000\n");
    assert_eq!(says("touch /data/file && stat -c %g /data/file").stdout, "2000\n");
    assert_ne!(says("touch /file").code(), Some(0));
    let status = says("grep -E '^(CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status").stdout;
    let values: Vec<&str> = status.lines().filter_map(|line| line.split_whitespace().nth(1)).collect();
    assert_eq!(values, ["0000000000000000", "0000000000000000", "1", "2"], "{status}");
    pod.remove();
    CaseResult::Passed
}

pub fn user_namespace(fixture: &KubeletFixture) -> CaseResult {
    let pod = StaticPod::example(fixture, "user-namespace");
    pod.wait_until_ready();
    // Ready only means that the container was started.
    wait_for("it has made its file", || (pod.try_run("main", &["stat", "/data/mine"]).code == 0).then_some(()));
    let map = pod.log("main");
    let numbers: Vec<u64> = map.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    assert!(matches!(numbers[..], [0, outside, 65536] if outside >= 65536), "{map}");
    assert_eq!(pod.shell("main", "id -u; stat -c %u /data/mine", b"").stdout, "0\n0\n");
    pod.remove();
    CaseResult::Passed
}

pub fn downward_api_and_hostname(fixture: &KubeletFixture) -> CaseResult {
    let pod = StaticPod::example(fixture, "itself");
    let status = pod.wait_until_ready();
    let says = |script: &str| pod.shell("main", script, b"").stdout;
    let address = status["status"]["podIP"].as_str().expect("a Ready pod has an address");
    assert_eq!(says("hostname; echo $POD $ADDRESS $CPUS"), format!("known\nitself-node {address} 20\n"));
    assert_eq!(says("cat /about/labels; echo; cat /about/memory"), "app=\"itself\"\ntier=\"test\"\n48");
    let hosts = says("cat /etc/hosts");
    assert!(hosts.contains("192.0.2.7\tdatabase.example") && hosts.contains(&format!("{address}\tknown")), "{hosts}");
    let resolver = says("cat /etc/resolv.conf");
    for line in ["nameserver 192.0.2.53", "search example", "options ndots:3"] {
        assert!(resolver.contains(line), "{line}: {resolver}");
    }
    let processes = says("ps -o args");
    assert!(processes.contains("sleep 1000000") && processes.contains("sleep 2000000"), "{processes}");
    pod.remove();
    CaseResult::Passed
}

/// Returns the example with another directory of the node.
pub fn with_directory(name: &str, from: &str, to: &std::path::Path) -> String {
    example(name).replace(from, &to.display().to_string())
}
