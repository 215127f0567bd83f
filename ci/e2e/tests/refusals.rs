//! Tests rejected requests: the right code, a message that says what to do, and no side effects.

use nacelle_e2e::node::engine;
use nacelle_e2e::run::call;
use nacelle_e2e::{Container, Image, Node, Pod};
use serde_json::json;
use std::fs;

#[test]
fn pods_that_cannot_be_are_refused_before_anything_exists() {
    let node = Node::new();
    let refuse = |pod: Pod, extra: &[&str], code: &str, words: &[&str]| {
        let file = node.crictl.file("pod", &pod.0);
        let answer = node.crictl.try_call([&["runp"], extra, &[&file]].concat()).err();
        assert!(answer.contains(code), "{code}: {answer}");
        for word in words {
            assert!(answer.contains(word), "{word:?}: {answer}");
        }
        // The directory of its logs is the test's own.
        assert_eq!(node.left(), Vec::<String>::new(), "{answer}");
    };
    let pod = |name: &str| Pod::new(name, node.directory());
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
fn containers_that_cannot_be_are_refused_and_the_pod_lives() {
    let node = Node::new();
    let image = node.image(&Image::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(Pod::new("refusing", node.directory()));
    let refuse = |container: Container, code: &str, words: &[&str]| {
        let answer = pod.try_create(container).err();
        assert!(answer.contains(code), "{code}: {answer}");
        for word in words {
            assert!(answer.contains(word), "{word:?}: {answer}");
        }
    };
    let sleep = || Container::sh("c", &image, "sleep 600");
    refuse(Container::sh("c", "127.0.0.1:5000/none:1", "true"), "NotFound", &["127.0.0.1:5000/none:1"]);
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
    let user = json!({"security_context": {"run_as_username": "nobody-here"}});
    refuse(sleep().set("linux", user), "InvalidArgument", &["nobody-here"]);

    assert_eq!(node.crictl.call(["ps", "-aq"]), "");
    let container = pod.start(sleep());
    assert_eq!(container.exec("echo alive").ok(), "alive");
    let again = pod.try_create(sleep()).err();
    assert!(again.contains("AlreadyExists") && again.contains(&container.id), "{again}");
    pod.remove();
}

#[test]
fn names_that_do_not_exist_are_not_found_and_removing_them_is_fine() {
    let node = Node::new();
    let nobody = "0123456789abcdef".repeat(4);
    for arguments in [["inspectp", &nobody], ["inspect", &nobody], ["start", &nobody]] {
        let answer = node.crictl.try_call(arguments).err();
        assert!(answer.contains("NotFound") || answer.contains("not found"), "{arguments:?}: {answer}");
    }
    let answer = node.crictl.try_call(["exec", "--sync", &nobody, "true"]).err();
    assert!(answer.contains("NotFound"), "{answer}");
    let answer = node.crictl.try_call(["pull", "127.0.0.1:5000/none:1"]).err();
    assert!(answer.contains("127.0.0.1:5000/none:1"), "{answer}");
    let answer = node.crictl.try_call(["pull", "Not/A Reference"]).err();
    assert!(answer.contains("InvalidArgument"), "{answer}");
    assert_eq!(node.left(), Vec::<String>::new());
}

#[test]
fn a_configuration_with_a_mistake_is_refused_with_its_line() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("config.toml");
    fs::write(&file, "[paths]\nroot = \"/nowhere\"\nrot = \"/typo\"\n").unwrap();
    let binary = nacelle_e2e::part("NACELLE_BIN");
    let answer = call(&binary, ["serve".as_ref(), "--config".as_ref(), file.as_os_str()]);
    assert_ne!(answer.code, 0);
    let said = answer.stdout + &answer.stderr;
    for word in ["rot", "line 3", "config.toml"] {
        assert!(said.contains(word), "{word}: {said}");
    }
    assert!(call(&binary, ["version"]).ok().contains("nacelle"));
}
