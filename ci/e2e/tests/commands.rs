//! Tests the interface of `nacelle` for people and programs: formats, exit codes, errors, completions and man pages.

use nacelle_e2e::crictl::RunningPod;
use nacelle_e2e::run::{ProgramOutput, run, run_program, run_with_input};
use nacelle_e2e::{ContainerRequest, PodRequest, TestImage, TestNode, eventually};
use serde_json::{Value, json};
use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};

fn nacelle(arguments: &[&str]) -> ProgramOutput {
    run_program(nacelle_e2e::path_from_env("NACELLE_BIN"), arguments)
}

#[test]
fn commands_print_json_and_yaml_and_have_exit_codes() {
    let mut node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "app:1");
    let pod = node.crictl.run_pod(PodRequest::new("listed", node.directory()));
    let secret = json!([{"key": "PASSWORD", "value": "s3cret"}]);
    pod.start(ContainerRequest::sh("main", &image, "exec sleep 1000").set("envs", secret));
    // The cause is named once.
    let container = pod.create(ContainerRequest::new("wrong", &image, &["/nosuch"]));
    let refused = node.crictl.try_call(["start", &container.id]).err();
    let cause = "cannot run \"/nosuch\": No such file or directory";
    // crictl reports the error twice.
    assert!(refused.matches(cause).count() <= 2 && refused.contains("NotFound"), "{refused}");
    for (arguments, pointer) in [
        (&["check"][..], "/findings/0/severity"),
        (&["image", "pull", &image], "/id"),
        (&["image", "ls"], "/0/sizeBytes"),
        (&["image", "list"], "/0/tags/0"),
        (&["image", "verify"], "/readBytes"),
        (&["pods"], "/pods/0/cost/memoryBytes"),
        (&["top", "--interval", "100ms"], "/pods/0/cost/cpuMilli"),
        (&["pods", "--timeline", &pod.id], "/start/0/durationSeconds"),
        (&["templates", "ls"], "/startedPods"),
        (&["log"], "/filter"),
        (&["vm", "ls"], ""),
    ] {
        let json = node.nacelle(&[arguments, &["-o", "json"]].concat());
        let value: Value = serde_json::from_str(&json.stdout).unwrap_or_else(|error| panic!("{error}: {json:?}"));
        assert!(value.pointer(pointer).is_some(), "{arguments:?} {pointer}: {value}");
        let yaml = node.nacelle(&[arguments, &["--output", "yaml"]].concat());
        let key = pointer.rsplit('/').find(|part| part.parse::<u32>().is_err()).unwrap_or_default();
        assert!(yaml.stdout.contains(key) && !yaml.stdout.starts_with('{'), "{yaml:?}");
        assert_eq!(node.nacelle(arguments).code, json.code);
    }
    let started = node.nacelle(&["pods", "-o", "json"]).ok();
    assert!(started.contains("\"createdAt\": \"20"), "{started}");

    for (arguments, code, words) in [
        (&["image", "rm", "nosuch"][..], 3, "image nosuch does not exist"),
        (&["image", "pull", "127.0.0.1:1/nosuch:1"], 5, "nacelle: "),
        (&["vm", "rm", "nosuch"], 3, "NotFound"),
        (&["vm", "delete", "nosuch"], 3, "NotFound"),
        (&["templates", "rm", "0123456789abcdef"], 3, "NotFound"),
        (&["pods", "--timeline", "nosuch"], 3, "NotFound"),
        (&["check", "--jail", "nosuch"], 3, "does not exist"),
        (&["image", "ls", "-o", "xml"], 2, "yaml"),
    ] {
        let failed = node.nacelle(arguments);
        assert!(failed.code == code && failed.stderr.contains(words), "{arguments:?}: {failed:?}");
    }
    check_bundle(&node, &pod.id);
    let shell = check_shell(&node, &pod);
    pod.remove();
    if let Some(mut shell) = shell {
        // It has not kept the pod from being stopped.
        assert!(!shell.wait().expect("it is ours").success());
    }
    let removed = node.nacelle(&["image", "remove", &image, "nosuch"]);
    assert!(removed.code == 3 && !node.nacelle(&["image", "ls"]).ok().contains("app:1"), "{removed:?}");

    // Another user may not use the socket, nor the image store in its place.
    let own = node.directory().join("nacelle");
    fs::copy(nacelle_e2e::path_from_env("NACELLE_BIN"), &own).expect("the node's directory is writable");
    fs::set_permissions(node.directory(), fs::Permissions::from_mode(0o755)).expect("it is ours");
    let (own, config) = (own.display().to_string(), node.directory().join("config.toml").display().to_string());
    for arguments in [&["pods"][..], &["image", "ls"], &["log"]] {
        let user = ["--reuid=65534", "--regid=65534", "--clear-groups", &own];
        let denied = run_program("setpriv", [&user[..], arguments, &["--config", &config]].concat());
        assert!(denied.code == 4 && denied.stderr.contains("permission denied"), "{denied:?}");
    }
    let valid = nacelle(&["config", "check", &config]);
    assert_eq!(valid.ok(), format!("{config}: valid"));

    // A command that follows a stream ends with the daemon, whether that is killed or asked to stop.
    for kills in [true, false] {
        let mut watch = Command::new(nacelle_e2e::path_from_env("NACELLE_BIN"));
        watch.args(["vm", "watch", "--config", &config]).stdout(Stdio::null()).stderr(Stdio::piped());
        let watch = watch.spawn().expect("nacelle can be started");
        // The path with which the socket was bound, before it had its name.
        let bound = node.directory().join(".nacelle.sock").display().to_string();
        // The state of a connected socket is 03 (proc_net_unix(5)).
        let is_connection = |line: &str| line.contains(&bound) && line.split_whitespace().nth(5) == Some("03");
        eventually("the watch is connected", || {
            let sockets = std::fs::read_to_string("/proc/net/unix").expect("/proc is mounted");
            sockets.lines().any(is_connection).then_some(())
        });
        if kills {
            node.kill();
            node.start();
        } else {
            assert!(node.terminate());
        }
        let ended = watch.wait_with_output().expect("it is ours");
        let error = String::from_utf8_lossy(&ended.stderr);
        assert!(ended.status.code() == Some(5) && error.contains("the connection to the daemon is lost"), "{ended:?}");
    }
    // The end of the node checks that nothing is left.
    node.start();
}

/// Checks that a bundle has the pod's timeline, is its owner's only, and contains no environment of a container.
fn check_bundle(node: &TestNode, pod: &str) {
    let path = node.directory().join("bundle.tar.gz");
    let archive = path.display().to_string();
    assert_eq!(node.nacelle(&["debug", "bundle", "-o", &archive]).ok(), archive);
    assert_eq!(fs::metadata(&path).expect("it was written").permissions().mode() & 0o777, 0o600);
    let files = run_program("tar", ["-tzf", &archive]).ok();
    for name in ["version.json", "config.toml", "check.txt", "pods.json", "images.json", "templates.json"] {
        assert!(files.lines().any(|file| file == format!("nacelle-debug/{name}")), "{name}: {files}");
    }
    assert!(files.contains(&format!("timelines/{pod}.json")), "{files}");
    let content = run_program("tar", ["-xzOf", &archive]).ok();
    assert!(content.contains("durationSeconds") && !content.contains("s3cret"));
    assert_eq!(node.nacelle(&["debug", "bundle", "-o", &archive]).code, 1, "an existing file is kept");
}

/// Checks `nacelle shell` with a pod whose container `main` sleeps. Returns a command that still runs.
fn check_shell(node: &TestNode, pod: &RunningPod) -> Option<Child> {
    let shell = |arguments: &[&str]| run_with_input(&mut node.shell_command(arguments), b"typed");
    let in_guest = |script: &str| shell(&[&pod.id[..12], "--", "/bin/sh", "-c", script]);
    if nacelle_e2e::node::engine() == "host" {
        let refused = in_guest("true");
        assert!(refused.code == 1 && refused.stderr.contains("the pod has no guest"), "{refused:?}");
        return None;
    }
    let image = node.push_and_pull(&TestImage::busybox(), "app:1");
    let bare = TestImage::busybox().with_layer(|layer| layer.add_file("bin/.wh.sh", b"", 0o644));
    let bare = node.push_and_pull(&bare, "bare:1");
    let second = pod.start(ContainerRequest::sh("second", &image, "touch /planted; echo up; exec sleep 1001"));
    let bare = pod.start(ContainerRequest::new("bare", &bare, &["sleep", "1002"]));
    second.wait_for_output("up");

    // The guest's processes, mounts, interfaces and messages, and no file that a container has written.
    let root = format!("/guest/run/nacelle/b/{}/rootfs", second.id);
    let script = format!(
        "cat; echo; ps -o args | grep -c '[s]leep 100[012]'; grep -c ' /run/nacelle/b/.*/rootfs overlay' /proc/1/mounts; \
         ls {root}/planted; ls /planted; ip -o addr show eth0 | grep -c 'inet {}/'; dmesg | grep -c 'Linux version'; \
         cat /sys/fs/cgroup/pod/{}/cgroup.procs | wc -l; grep CapEff /proc/self/status; exit 7",
        pod.ip(),
        bare.id
    );
    let output = in_guest(&script);
    let expected = format!("typed\n3\n3\n{root}/planted\n1\n1\n1\nCapEff:\t000001ffffffffff");
    assert_eq!((output.code, output.stdout.as_str()), (7, expected.as_str()), "{output:?}");
    assert!(output.stderr.contains("/planted: No such file"), "{output:?}");
    let log = node.log();
    let event = log.lines().find(|line| line.contains("an operator runs a command in the guest"));
    assert!(event.is_some_and(|event| event.contains(&pod.id) && event.contains("listed")), "{log}");

    for (arguments, words) in [
        (&["--container", "bare"][..], &["no \"/bin/sh\"", "container bare", "with --container"][..]),
        (&["-c", "third"], &["no container \"third\"; it has main, wrong, second, bare"]),
    ] {
        let refused = shell(&[&[&*pod.id], arguments].concat());
        assert!(refused.code == 3 && words.iter().all(|word| refused.stderr.contains(word)), "{refused:?}");
    }
    assert_eq!(shell(&[&pod.id, "-c", "bare", "--", "cat"]).ok(), "typed");

    let size = "while [ \"$(stty size)\" != \"33 77\" ]; do sleep 0.1; done; tty; exit 3";
    let in_terminal = node.shell_command(&[&pod.id, "--", "sh", "-c", size]);
    let words = [in_terminal.get_program()].into_iter().chain(in_terminal.get_args());
    let quoted: Vec<String> = words.map(|word| format!("'{}'", word.to_string_lossy())).collect();
    let line = format!("stty cols 77 rows 33; exec {}", quoted.join(" "));
    let terminal = run(Command::new("script").args(["-qec", &line, "/dev/null"]));
    assert!(terminal.code == 3 && terminal.stdout.contains("/dev/pts/"), "{terminal:?}");

    // A command ends with its client, with the container whose image it uses, and with the pod; its children end with it.
    let spawn = |arguments: &[&str]| {
        let mut command = node.shell_command(&[&[&*pod.id], arguments].concat());
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("nacelle can be started")
    };
    let mut of_client = spawn(&["--", "sh", "-c", "sleep 4321 & wait"]);
    let mut of_container = spawn(&["-c", "bare", "--", "sleep", "4322"]);
    let of_pod = spawn(&["--", "sleep", "4323"]);
    let running =
        || in_guest("ps -o args | grep '^sleep 432' | sort; ls -d /sys/fs/cgroup/guest-shells/*/exec-* | wc -l").stdout;
    let all = "sleep 4321\nsleep 4322\nsleep 4323\n4";
    eventually("the commands run", || (running() == all).then_some(()));
    of_client.kill().and_then(|()| of_client.wait()).expect("it is ours");
    node.crictl.call(["rm", "--force", &bare.id]);
    assert_eq!(of_container.wait().expect("it is ours").code(), Some(137));
    eventually("the commands have ended", || (running() == "sleep 4323\n2").then_some(()));
    Some(of_pod)
}

#[test]
fn commands_without_a_daemon() {
    let directory = tempfile::tempdir().expect("there is a directory for temporary files");
    let config = directory.path().join("config.toml");
    let write = |text: &str| fs::write(&config, text).expect("it is ours");
    let path = config.display().to_string();
    write("[sandbox]\nboot_timeout = 30\n[images.registries.\"r.example\"]\nca_file = \"/nonexistent/ca.pem\"\n");
    let report = nacelle(&["config", "check", &path, "-o", "json"]);
    let value: Value = serde_json::from_str(&report.stdout).expect("it is JSON");
    assert!(report.code == 1 && value["errors"].as_array().is_some_and(|errors| errors.len() == 2), "{value}");
    assert_eq!((&value["errors"][0]["line"], &value["errors"][1]["line"]), (&2.into(), &4.into()));
    let serve = nacelle(&["serve", "--config", &path]);
    assert!(serve.code == 1 && serve.stderr.contains("line 2, column 16: sandbox.boot_timeout"), "{serve:?}");
    assert!(serve.stderr.contains("pulls from a registry will fail: images.registries"), "{serve:?}");
    let default = nacelle(&["config", "default"]).ok();
    assert!(default.contains("#memory_mib = 256"), "{default}");
    write(&default);
    assert_eq!(nacelle(&["config", "check", &path]).ok(), format!("{path}: valid"));

    write(&format!("[paths]\nsocket = \"{}/socket\"\n", directory.path().display()));
    let alone = nacelle(&["pods", "--config", &path]);
    assert!(alone.code == 5 && alone.stderr.contains("is it running?"), "{alone:?}");

    // The reader of the output ends early.
    for arguments in [&["vm", "schema"][..], &["completion", "bash"]] {
        let mut command = Command::new(nacelle_e2e::path_from_env("NACELLE_BIN"));
        let command = command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("nacelle can be started");
        drop(child.stdout.take());
        let mut errors = String::new();
        child.stderr.take().expect("it is a pipe").read_to_string(&mut errors).expect("it is text");
        assert_eq!((child.wait().expect("it is ours").code(), errors.as_str()), (Some(141), ""));
    }

    let script = directory.path().join("completion");
    fs::write(&script, nacelle(&["completion", "bash"]).ok()).expect("it is ours");
    let complete =
        "source \"$0\"; COMP_WORDS=(nacelle image l) COMP_CWORD=2; _nacelle nacelle l image; echo ${COMPREPLY[*]}";
    assert_eq!(run_program("bash", ["-c", complete, &script.display().to_string()]).ok(), "load ls");
    nacelle(&["man", &directory.path().display().to_string()]).ok();
    assert!(directory.path().join("nacelle-image-ls.1").exists());

    for program in ["nacelle-pod", "nacelle-keeper", "nacelle-unpack", "nacelle-agent"] {
        let program_path = nacelle_e2e::path_from_env("NACELLE_BIN").with_file_name(program);
        assert!(run_program(&program_path, ["--version"]).ok().starts_with(&format!("{program} ")));
        assert!(run_program(&program_path, ["--help"]).ok().contains("Nacelle starts this program"));
    }
    assert_eq!(nacelle(&["--version"]).ok(), nacelle(&["version"]).ok());
}
