//! Tests a second daemon on a node: it starts only if it shares nothing with the first one, and otherwise changes nothing.

use nacelle_e2e::failure_answer::check_daemon;
use nacelle_e2e::run::run;
use nacelle_e2e::{ContainerRequest, PodRequest, TestImage, TestNode, path_from_env};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

/// Starts a second daemon, with directories of its own except those that `shared` names ("socket", "run", "netns"), and returns
/// the error with which it ends.
fn error_of_second_daemon(node: &TestNode, shared: &[(&str, &Path)]) -> String {
    let own = node.directory().join("second");
    let path = |name: &str| {
        let of = shared.iter().find(|(other, _)| *other == name);
        of.map_or_else(|| own.join(name), |(_, path)| (*path).to_owned())
    };
    let text = format!(
        "[paths]\nroot = {:?}\nrun = {:?}\nsocket = {:?}\n[network]\ncni_conf_dir = {:?}\nnetns_dir = {:?}\n",
        path("root"),
        path("run"),
        path("socket"),
        node.directory().join("cni"),
        path("netns"),
    );
    let config = node.directory().join("second.toml");
    fs::write(&config, text).unwrap();
    // A daemon that starts all the same is ended by timeout(1), with another exit code.
    let mut command = node.netns.command("timeout");
    let ended = run(command
        .args(["--signal=TERM", "40"])
        .arg(path_from_env("NACELLE_BIN"))
        .args(["serve", "--config"])
        .arg(config));
    assert_eq!(ended.code, 1, "{ended:?}");
    ended.stderr.lines().last().unwrap_or_default().to_owned()
}

#[test]
fn a_second_daemon_takes_nothing_from_the_first() {
    let mut node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let id = {
        let pod = node.crictl.run_pod(PodRequest::new("first", node.directory()));
        let container = pod.start(ContainerRequest::sh("c", &image, "echo up; sleep 1000"));
        container.wait_for_output("up");
        container.id.clone()
    };
    let works =
        |node: &TestNode| assert_eq!(node.crictl.call(["exec", "--sync", &id, "echo", "works"]).trim(), "works");

    let socket = node.directory().join("nacelle.sock");
    let inode = fs::metadata(&socket).unwrap().ino();
    let error = error_of_second_daemon(&node, &[("socket", &socket)]);
    check_daemon("CRI socket in use", &error);
    assert!(error.contains(&socket.display().to_string()), "{error}");
    assert_eq!(fs::metadata(&socket).unwrap().ino(), inode);
    assert!(!node.directory().join("second").exists(), "it has made nothing");

    let error = error_of_second_daemon(&node, &[("run", &node.directory().join("run"))]);
    assert!(error.contains("paths.run") && error.contains("another daemon uses that directory"), "{error}");
    let error = error_of_second_daemon(&node, &[("netns", &node.directory().join("netns"))]);
    assert!(error.contains("network.netns_dir"), "{error}");
    let error = error_of_second_daemon(&node, &[("root", &node.directory().join("root"))]);
    assert!(error.contains("state.redb"), "{error}");
    works(&node);

    let foreign = node.directory().join("foreign.sock");
    let listener = UnixListener::bind(&foreign).unwrap();
    let inode = fs::metadata(&foreign).unwrap().ino();
    let error = error_of_second_daemon(&node, &[("socket", &foreign)]);
    assert!(error.contains("another program listens there"), "{error}");
    assert_eq!(fs::metadata(&foreign).unwrap().ino(), inode);
    UnixStream::connect(&foreign).unwrap();
    drop(listener);
    let file = node.directory().join("file.sock");
    fs::write(&file, "precious").unwrap();
    let error = error_of_second_daemon(&node, &[("socket", &file)]);
    assert!(error.contains("a regular file has that name"), "{error}");
    assert_eq!(fs::read(&file).unwrap(), b"precious");

    // At its end the daemon removes only its own socket, not one that has replaced it.
    fs::remove_file(&socket).unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    assert!(node.terminate());
    UnixStream::connect(&socket).unwrap();
    drop(listener);
    // The socket is stale now: the next daemon replaces it.
    node.start();
    works(&node);
    assert!(node.terminate());
    assert!(!socket.exists());
    node.start();
}

#[test]
fn partial_files_of_a_killed_daemon_are_removed_by_the_next_one() {
    let mut node = TestNode::new();
    node.kill();
    let root = node.directory().join("root");
    let drafts =
        ["cni/a.json.tmp.77.1", "cni/a.tmp.1.0", "images/index.json.tmp.1.2", "scratch/scratch-v1-64.ext4.tmp.9.9"];
    for draft in drafts {
        fs::create_dir_all(root.join(draft).parent().unwrap()).unwrap();
        fs::write(root.join(draft), "half").unwrap();
    }
    node.start();
    assert_eq!(drafts.into_iter().filter(|draft| root.join(draft).exists()).collect::<Vec<_>>(), Vec::<&str>::new());
}
