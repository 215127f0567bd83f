//! Tests socket volumes: containers in a VM connect to UNIX sockets that listen on the node.

use nacelle_e2e::crictl::{RunningContainer, RunningPod};
use nacelle_e2e::node::{NodeOptions, SMALL_VM, engine, handler_config};
use nacelle_e2e::{ContainerRequest, PodRequest, TestImage, TestNode, eventually};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

const CLIENT: &str = env!("CARGO_BIN_EXE_nacelle-socket-client");
const ANNOTATION: &str = "vm.nacelle.dev/sockets";
const FIRST_NODE_ID: u32 = 196_608;
/// The maximum number of connections of a pod.
const MAX_CONNECTIONS: usize = 128;

fn node_with_sockets() -> (TestNode, String) {
    let handler = handler_config("sockets", &format!("{SMALL_VM}allowed_annotations = [{ANNOTATION:?}]\n"));
    let node = TestNode::with_options(NodeOptions { extra: handler, ..NodeOptions::default() });
    let image = TestImage::busybox().with_layer(|layer| layer.add_program(Path::new(CLIENT), "bin/client"));
    let image = node.push_and_pull(&image, "client:1");
    (node, image)
}

/// A server of the node: it replies with its name and what it has read, when the client has ended its direction.
struct Server {
    path: PathBuf,
    /// The texts that clients have sent, and the processes and users that have connected.
    asked: Arc<Mutex<Vec<(String, Pid, u32)>>>,
}

impl Server {
    fn start(path: &Path, name: &'static str, mode: u32) -> Server {
        let listener = UnixListener::bind(path).expect("the node's directory is writable");
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("it is ours");
        let asked = Arc::<Mutex<Vec<_>>>::default();
        let answers = Arc::clone(&asked);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, answers) = (stream.expect("a connection"), Arc::clone(&answers));
                let mut text = String::new();
                if (&stream).read_to_string(&mut text).is_err() {
                    continue;
                }
                if text == "end" {
                    return;
                }
                let (pid, user) = peer(&stream);
                answers.lock().unwrap().push((text.clone(), pid, user));
                let _ = (&stream).write_all(format!("{name}:{text}").as_bytes());
            }
        });
        Server { path: path.to_owned(), asked }
    }

    /// Closes the listening socket, and leaves its file, as a server that has crashed.
    fn crash(&self) {
        UnixStream::connect(&self.path).and_then(|mut stream| stream.write_all(b"end")).expect("it listens");
        eventually("the server has ended", || UnixStream::connect(&self.path).err());
    }

    fn stop(self) {
        self.crash();
        fs::remove_file(&self.path).expect("it is there");
    }
}

/// Returns the process that has connected, and its user.
fn peer(stream: &UnixStream) -> (Pid, u32) {
    let peer = rustix::net::sockopt::socket_peercred(stream).expect("a UNIX socket has them");
    (Pid::from_raw(peer.pid.as_raw_nonzero().get()), peer.uid.as_raw())
}

fn pod<'a>(node: &'a TestNode, name: &str, paths: &str, linux: &Value) -> RunningPod<'a> {
    let mut request = PodRequest::new(name, node.directory()).set("annotations", json!({ANNOTATION: paths}));
    if let Some(context) = linux.get("security_context") {
        request.0["linux"]["security_context"] = context.clone();
    }
    node.crictl.run_pod_with_handler("sockets", request)
}

fn start<'a>(pod: &RunningPod<'a>, name: &str, image: &str, mounts: Value, linux: &Value) -> RunningContainer<'a> {
    let request = ContainerRequest::sh(name, image, "sleep 1000").set("mounts", mounts).set("linux", linux.clone());
    pod.start(request)
}

#[test]
fn containers_connect_to_servers_of_the_node_and_follow_their_restarts() {
    if engine() == "host" {
        return;
    }
    let (mut node, image) = node_with_sockets();
    let directory = node.directory().join("sockets");
    fs::create_dir(&directory).expect("the node's directory is writable");
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).expect("it is ours");
    let path = directory.join("server.sock");
    let server = Server::start(&path, "first", 0o660);
    let single = Server::start(&node.directory().join("single.sock"), "single", 0o666);
    let _outside = Server::start(&node.directory().join("outside.sock"), "outside", 0o666);
    fs::write(directory.join("file"), "").expect("it is ours");
    symlink("../outside.sock", directory.join("link.sock")).expect("it is ours");
    let none = json!({});
    let ids = {
        let pod = pod(&node, "sockets", "/run/node/,/run/single.sock", &none);
        let mounts = json!([
            {"host_path": directory, "container_path": "/run/node"},
            {"host_path": single.path, "container_path": "/run/single.sock"},
        ]);
        let container = start(&pod, "client", &image, mounts.clone(), &none);
        let ask = |text: &str| container.exec(&format!("/bin/client ask /run/node/server.sock {text}"));
        assert_eq!(ask("hello").ok(), "first:hello");
        let (text, file_server, user) = server.asked.lock().unwrap()[0].clone();
        let name = fs::read_to_string(format!("/proc/{file_server}/comm")).expect("the process lives");
        assert_eq!((text.as_str(), name.trim(), user), ("hello", "nacelle-fs", 0));
        assert_eq!(container.exec("/bin/client ask /run/single.sock a").ok(), "single:a");
        // The server sees the user of the container's process.
        assert_eq!(container.exec("su app -c '/bin/client ask /run/single.sock b'").ok(), "single:b");
        assert_eq!(single.asked.lock().unwrap().last().map(|(_, _, user)| *user), Some(1000));
        // Only sockets of the directory itself exist, with their modes.
        assert_eq!(
            container.exec("ls /run/node; stat -c '%F %a %u %g' /run/node/server.sock").ok(),
            "server.sock\nsocket 660 0 0"
        );
        assert!(container.exec("touch /run/node/new").err().contains("Read-only file system"));
        // The guest's kernel checks the mode.
        let refused = container.exec("su app -c '/bin/client ask /run/node/server.sock b'").err();
        assert!(refused.contains("Permission denied"), "{refused}");
        assert_eq!(container.exec("su app -c '/bin/client ask /run/single.sock b'").ok(), "single:b");
        // Bytes of any number pass in both directions.
        let long = "for n in $(seq 14); do x=$x$x$n; done; /bin/client ask /run/node/server.sock $x | wc -c";
        let expected = container.exec("for n in $(seq 14); do x=$x$x$n; done; echo first:$x | wc -c").ok();
        assert_eq!(container.exec(long).ok(), expected);
        // A server that does not answer closes the connection; one that has gone has no socket; a new one is found.
        server.crash();
        let lost = ask("lost");
        assert_eq!(lost.stdout, "", "{}", lost.stderr);
        fs::remove_file(&path).expect("it is there");
        eventually("the socket goes with its server", || {
            (container.exec("ls /run/node").ok().is_empty()).then_some(())
        });
        assert!(ask("gone").err().contains("No such file"));
        let server = Server::start(&path, "second", 0o600);
        eventually("the new server is found", || (ask("again").stdout.trim() == "second:again").then_some(()));
        assert_eq!(container.exec("stat -c %a /run/node/server.sock").ok(), "600");
        container.exec("/bin/client repeat /run/node/server.sock alone >/dev/null 2>&1 </dev/null &").ok();
        eventually("the client repeats", || {
            server.asked.lock().unwrap().iter().find(|asked| asked.0 == "alone").cloned()
        });
        server.stop();
        [container.id.clone(), pod.id.clone()]
    };

    // No daemon is needed.
    node.kill();
    let server = Server::start(&path, "third", 0o666);
    eventually("the server is reached while no daemon runs", || server.asked.lock().unwrap().last().cloned());
    node.start();
    let [container, pod] = ids;
    let exec = |script: &str| node.crictl.try_call(["exec", "--sync", &container, "/bin/sh", "-c", script]);
    exec("killall client").ok();
    assert_eq!(exec("/bin/client ask /run/node/server.sock later").ok(), "third:later");
    // A pod has a limit. The server serves one after the other, so that all are open.
    let count = MAX_CONNECTIONS + 3;
    assert_eq!(exec(&format!("/bin/client many /run/node/server.sock {count} 3")).ok(), format!("3 of {count} closed"));
    eventually("connections are available again", || {
        (exec("/bin/client ask /run/node/server.sock x").stdout.trim() == "third:x").then_some(())
    });

    // A second container of the pod has sockets of its own, and they go with it.
    let pod = node.crictl.pod_handle(&pod, PodRequest::new("sockets", node.directory()));
    let mounts = json!([{"host_path": directory, "container_path": "/run/node", "readonly": true}]);
    let second = start(&pod, "second", &image, mounts, &none);
    assert_eq!(second.exec("/bin/client ask /run/node/server.sock y").ok(), "third:y");
    let second_id = second.id.clone();
    node.crictl.call(["rm", "--force", &second_id]);
    assert_eq!(exec("/bin/client ask /run/node/server.sock z").ok(), "third:z");

    // Without its file server the pod runs on, and connects nothing.
    let (_, file_server, _) = server.asked.lock().unwrap().last().cloned().expect("it was asked");
    kill(file_server, Signal::SIGKILL).expect("it lives");
    eventually("the file server has ended", || {
        exec("/bin/client ask /run/node/server.sock a || echo failed")
            .stdout
            .lines()
            .all(|line| !line.contains("third"))
            .then_some(())
    });
    assert_eq!(exec("echo alive").ok(), "alive");
    pod.remove();
    assert_eq!(node.leaked(), Vec::<String>::new());
}

#[test]
fn a_pod_with_a_user_namespace_is_refused() {
    if engine() == "host" {
        return;
    }
    let (node, _image) = node_with_sockets();
    let mapping = json!([{"container_id": 0, "host_id": FIRST_NODE_ID, "length": 65_536}]);
    let users = json!({"mode": 0, "uids": mapping, "gids": mapping});
    let mut request = PodRequest::new("mapped", node.directory());
    request.0["annotations"] = json!({ANNOTATION: "/run/node"});
    request.0["linux"]["security_context"] = json!({"namespace_options": {"userns_options": users}});
    let file = node.crictl.write_input("pod", &request.0);
    let refused = node.crictl.try_call(["runp", "--runtime", "sockets", &file]).err();
    assert!(refused.contains("FailedPrecondition") && refused.contains("hostUsers"), "{refused}");
    assert_eq!(node.leaked(), Vec::<String>::new());
}

#[test]
fn sockets_are_reached_only_with_the_annotation() {
    if engine() == "host" {
        return;
    }
    let (node, image) = node_with_sockets();
    let directory = node.directory().join("sockets");
    fs::create_dir(&directory).expect("the node's directory is writable");
    let _server = Server::start(&directory.join("server.sock"), "node", 0o666);
    fs::write(directory.join("file"), "").expect("it is ours");
    let none = json!({});
    let mount = |path: &Path| json!([{"host_path": path, "container_path": "/run/node"}]);

    let with = pod(&node, "with", "/run/node,/run/other", &none);
    let empty = node.directory().join("pods/uid/volumes/kubernetes.io~empty-dir/scratch");
    fs::create_dir_all(&empty).expect("the node's directory is writable");
    for (path, why) in [(directory.join("file"), "neither a directory nor a UNIX socket"), (empty, "emptyDir")] {
        let request = ContainerRequest::sh("refused", &image, "true").set("mounts", mount(&path));
        let refused = with.try_create(request).err();
        assert!(refused.contains("FailedPrecondition") && refused.contains(ANNOTATION), "{refused}");
        assert!(refused.contains(why) && refused.contains("/run/node"), "{refused}");
    }
    // A mount at another path is shared, as without the annotation.
    let elsewhere = json!([{"host_path": directory, "container_path": "/elsewhere"}]);
    let container = start(&with, "elsewhere", &image, elsewhere, &none);
    let refused = container.exec("/bin/client ask /elsewhere/server.sock a").err();
    assert!(refused.contains("Connection refused"), "{refused}");
    assert_eq!(container.exec("ls /elsewhere").ok(), "file\nserver.sock");
    with.remove();

    let without = node.crictl.run_pod_with_handler("sockets", PodRequest::new("without", node.directory()));
    let container = start(&without, "client", &image, mount(&directory), &none);
    let refused = container.exec("/bin/client ask /run/node/server.sock a").err();
    assert!(refused.contains("Connection refused"), "{refused}");
    without.remove();

    for (handler, paths) in
        [("nacelle", "/run/node"), ("sockets", "run/node"), ("sockets", "/a/../b"), ("sockets", "/a,/a")]
    {
        let request = PodRequest::new("refused", node.directory()).set("annotations", json!({ANNOTATION: paths}));
        let file = node.crictl.write_input("refused", &request.0);
        let refused = node.crictl.try_call(["runp", "--runtime", handler, &file]).err();
        assert!(refused.contains("InvalidArgument") && refused.contains(ANNOTATION), "{handler} {paths}: {refused}");
    }
    assert_eq!(node.leaked(), Vec::<String>::new());
}
