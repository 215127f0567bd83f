//! Tests rejected requests: the right code, a message that says what to do, and no side effects.

use nacelle_e2e::node::engine;
use nacelle_e2e::run::run_program;
use nacelle_e2e::{ContainerRequest, PodRequest, TestImage, TestNode};
use serde_json::json;
use std::fs;

#[test]
fn invalid_pods_are_refused_before_anything_is_created() {
    let node = TestNode::new();
    let refuse = |pod: PodRequest, extra: &[&str], code: &str, words: &[&str]| {
        let file = node.crictl.write_input("pod", &pod.0);
        let answer = node.crictl.try_call([&["runp"], extra, &[&file]].concat()).err();
        assert!(answer.contains(code), "{code}: {answer}");
        for word in words {
            assert!(answer.contains(word), "{word:?}: {answer}");
        }
        // The directory of its logs is the test's own.
        assert_eq!(node.leaked(), Vec::<String>::new(), "{answer}");
    };
    let pod = |name: &str| PodRequest::new(name, node.directory());
    refuse(pod("a"), &["--runtime", "nonsense"], "InvalidArgument", &["nonsense", "other"]);
    refuse(pod("a").set("hostname", json!("no host name")), &[], "InvalidArgument", &["hostname"]);
    let host = json!({"security_context": {"namespace_options": {"network": 2}}});
    refuse(pod("a").set("linux", host), &[], "FailedPrecondition", &["host"]);
    refuse(
        pod("a").set("linux", json!({"sysctls": {"kernel.core_pattern": "|/x"}})),
        &[],
        "InvalidArgument",
        &["kernel.core_pattern"],
    );
    assert_eq!(node.crictl.call(["pods", "-q"]), "");
}

#[test]
fn invalid_containers_are_refused_and_the_pod_keeps_running() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(PodRequest::new("refusing", node.directory()));
    let refuse = |container: ContainerRequest, code: &str, words: &[&str]| {
        let answer = pod.try_create(container).err();
        assert!(answer.contains(code), "{code}: {answer}");
        for word in words {
            assert!(answer.contains(word), "{word:?}: {answer}");
        }
    };
    let sleep = || ContainerRequest::sh("c", &image, "sleep 600");
    refuse(ContainerRequest::sh("c", "127.0.0.1:5000/none:1", "true"), "NotFound", &["127.0.0.1:5000/none:1"]);
    refuse(sleep().set("log_path", json!("../../escape.log")), "InvalidArgument", &["log_path"]);
    if engine() != "host" {
        let mount = json!([{"host_path": "/etc", "container_path": "/host", "propagation": 2}]);
        let words = ["propagation", "whose engine is host (this node has: host)", "run-on-host"];
        refuse(sleep().set("mounts", mount), "FailedPrecondition", &words);
    }
    let device = json!([{"host_path": "/dev/fuse", "container_path": "/dev/fuse", "permissions": "x"}]);
    refuse(sleep().set("devices", device), "InvalidArgument", &["permissions"]);
    let capability = json!({"security_context": {"capabilities": {"add_capabilities": ["FLY"]}}});
    refuse(sleep().set("linux", capability), "InvalidArgument", &["FLY"]);
    let user = json!({"security_context": {"run_as_username": "unknown-user"}});
    refuse(sleep().set("linux", user), "InvalidArgument", &["unknown-user"]);

    assert_eq!(node.crictl.call(["ps", "-aq"]), "");
    let container = pod.start(sleep());
    assert_eq!(container.exec("echo alive").ok(), "alive");
    let again = pod.try_create(sleep()).err();
    assert!(again.contains("AlreadyExists") && again.contains(&container.id), "{again}");
    pod.remove();
}

#[test]
fn unknown_ids_are_not_found_and_removing_them_succeeds() {
    let node = TestNode::new();
    let unknown_id = "0123456789abcdef".repeat(4);
    for arguments in [["inspectp", &unknown_id], ["inspect", &unknown_id], ["start", &unknown_id]] {
        let answer = node.crictl.try_call(arguments).err();
        assert!(answer.contains("NotFound") || answer.contains("not found"), "{arguments:?}: {answer}");
    }
    let answer = node.crictl.try_call(["exec", "--sync", &unknown_id, "true"]).err();
    assert!(answer.contains("NotFound"), "{answer}");
    let answer = node.crictl.try_call(["pull", "127.0.0.1:5000/none:1"]).err();
    assert!(answer.contains("127.0.0.1:5000/none:1"), "{answer}");
    let answer = node.crictl.try_call(["pull", "Not/A Reference"]).err();
    assert!(answer.contains("InvalidArgument"), "{answer}");
    assert_eq!(node.leaked(), Vec::<String>::new());
}

#[test]
fn an_invalid_configuration_is_refused_with_its_line() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("config.toml");
    fs::write(&file, "[paths]\nroot = \"/nowhere\"\nrot = \"/typo\"\n").unwrap();
    let binary = nacelle_e2e::path_from_env("NACELLE_BIN");
    let answer = run_program(&binary, ["serve".as_ref(), "--config".as_ref(), file.as_os_str()]);
    assert_ne!(answer.code, 0);
    let output = answer.stdout + &answer.stderr;
    for word in ["rot", "line 3", "config.toml"] {
        assert!(output.contains(word), "{word}: {output}");
    }
    assert!(run_program(&binary, ["version"]).ok().contains("nacelle"));
}
