//! Tests containers that share a PID namespace and try to leave their root through our processes: by the working directory of an
//! exec or of another container, with every kind of link to a process's root.

use nacelle_e2e::crictl::{RunningContainer, RunningPod};
use nacelle_e2e::node::engine;
use nacelle_e2e::{ContainerRequest, PodRequest, TestImage, TestNode, eventually};
use serde_json::{Value, json};
use std::process::Child;

/// Stops the first process that is a container being created, and prints its PID.
const STOP_CONTAINER_DURING_CREATION: &str = "while :; do for p in /proc/[0-9]*; do read -r c <$p/comm && case $c in youki*) \
                    kill -STOP ${p#/proc/} && echo caught ${p#/proc/} && exec sleep 6000;; esac; done 2>/dev/null; done";
/// Prints ESCAPED if the agent's files are in the working directory or above it.
const ESCAPE_PROBE: &str =
    "d=.; for i in 1 2 3 4 5 6 7 8; do [ -e $d/run/nacelle ] && echo ESCAPED; d=$d/..; done; echo looked";

/// How the containers of a pod share a PID namespace.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PidNamespaceSharing {
    Pod,
    Target,
}

fn pid_namespace_options(mode: i32, target: &str) -> Value {
    json!({"security_context": {
        "namespace_options": {"pid": mode, "target_id": target},
        "capabilities": {"add_capabilities": ["SYS_ADMIN"]},
    }})
}

struct Scene<'a> {
    pod: RunningPod<'a>,
    /// Its execs work in /tmp/w, which the attacker controls.
    victim: RunningContainer<'a>,
    attacker: RunningContainer<'a>,
    /// The victim's process in the attacker's namespace.
    victim_proc: String,
    linux: Value,
}

impl<'a> Scene<'a> {
    fn new(node: &'a TestNode, image: &str, sharing: PidNamespaceSharing) -> Scene<'a> {
        let mut pod = PodRequest::new("confined", node.directory());
        pod.0["linux"]["security_context"] =
            json!({"namespace_options": {"pid": i32::from(sharing == PidNamespaceSharing::Target)}});
        let pod = node.crictl.run_pod(pod);
        let own = pid_namespace_options(i32::from(sharing == PidNamespaceSharing::Target), "");
        let victim = ContainerRequest::sh("victim", image, "mkdir -p /tmp/w; echo victim; exec sleep 6001");
        let victim = pod.start(victim.set("working_dir", json!("/tmp/w")).set("linux", own.clone()));
        victim.wait_for_output("victim");
        let linux = if sharing == PidNamespaceSharing::Target { pid_namespace_options(3, &victim.id) } else { own };
        let attacker = pod
            .start(ContainerRequest::sh("attacker", image, STOP_CONTAINER_DURING_CREATION).set("linux", linux.clone()));
        let find = "for p in /proc/[0-9]*; do case $(tr '\\0' ' ' <$p/cmdline) in 'sleep 6001 ') echo $p;; esac; done";
        let victim_proc = eventually("the attacker sees the victim", || {
            Some(attacker.exec(find).ok().trim().to_owned()).filter(|path| path.starts_with("/proc/"))
        });
        Scene { pod, victim, attacker, victim_proc, linux }
    }

    /// Makes the attacker run a script that replaces the victim's /tmp/w ($w).
    fn run_as_attacker(&self, script: &str) {
        let script = format!("w={}/root/tmp/w; {script}", self.victim_proc);
        self.attacker.exec(&script).ok();
    }

    fn link_work_directory(&self, to: &str) {
        self.run_as_attacker(&format!("rm -rf $w; ln -s {to} $w; readlink $w"));
    }
}

/// Creates a third container; returns the PID of its process, which the attacker has stopped.
fn start_stopped_container<'a>(
    node: &'a TestNode,
    scene: &Scene<'a>,
    image: &str,
) -> (RunningContainer<'a>, Child, String) {
    let bait = scene.pod.create(ContainerRequest::sh("bait", image, "sleep 6002").set("linux", scene.linux.clone()));
    let start = node.crictl.spawn(["start", &bait.id]);
    let output = scene.attacker.wait_for_output("caught ");
    let number =
        output.lines().find_map(|line| line.strip_prefix("caught ")).expect("it is the line's beginning").to_owned();
    (bait, start, number)
}

fn check_that_no_exec_escapes(sharing: PidNamespaceSharing) {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let scene = Scene::new(&node, &image, sharing);
    let (bait, mut start, number) = start_stopped_container(&node, &scene, &image);
    // The stopped process is killed after a minute, in which an emulated VM achieves less.
    let fast = engine() == "host";
    let stays = |what: &str| {
        let output = scene.victim.exec(ESCAPE_PROBE);
        assert!(!output.stdout.contains("ESCAPED"), "{what}: {}{}", output.stdout, output.stderr);
        output
    };
    // The process's root is not reachable from the container itself either.
    for name in ["root", "cwd", "fd/0", "fd/3", "mem", "exe"] {
        let script =
            format!("ls /proc/{number}/{name}/ || head -c 1 /proc/{number}/{name} || readlink /proc/{number}/{name}");
        let output = scene.attacker.exec(&script);
        assert!(output.code != 0 && output.stdout.is_empty(), "{name}: {}", output.stdout);
    }
    // A kernel may show the environment to a process with CAP_SYS_ADMIN (docs/contributor/security.md): it is empty.
    let output = scene.attacker.exec(&format!("tr -d '\\0' </proc/{number}/environ"));
    assert_eq!(output.stdout, "", "environ: {}", output.stderr);
    for to in ["root", "cwd", "root/tmp", "task/$n/root"]
        .map(|name| format!("/proc/{number}/{}", name.replace("$n", &number)))
    {
        scene.link_work_directory(&to);
        let output = stays(&to);
        assert!(
            output.code != 0 && output.stderr.contains("working directory"),
            "{to}: {} {}",
            output.stdout,
            output.stderr
        );
    }
    for to in ["/proc/self/cwd", "/proc/self/root", "/proc/thread-self/cwd", "/proc/1/root"] {
        scene.link_work_directory(to);
        stays(to);
    }
    for fd in if fast { 0..24 } else { 3..6 } {
        scene.link_work_directory(&format!("/proc/{number}/fd/{fd}"));
        assert_ne!(stays(&format!("fd {fd}")).code, 0);
    }
    // A procfs that the victim itself mounted elsewhere.
    scene.link_work_directory("/tmp");
    for mount in ["mount --bind /proc /mnt", "mount -t proc proc /mnt"] {
        let mounted = scene.victim.exec(&format!("mkdir -p /mnt && {mount} && ls -d /mnt/{number}"));
        assert_eq!(mounted.ok(), format!("/mnt/{number}"), "{mount}");
        scene.link_work_directory(&format!("/mnt/{number}/root"));
        assert_ne!(stays(mount).code, 0);
        scene.link_work_directory("/tmp");
        scene.victim.exec("umount /mnt").ok();
    }
    // The directory and the link swap places while execs resolve the path.
    let race = "rm -rf $w; mkdir $w; ln -s /proc/NUMBER/root $w.l; (while :; do mv $w $w.d; mv $w.l $w; mv $w $w.l; \
                mv $w.d $w; done) >/dev/null 2>&1 & echo racing";
    scene.run_as_attacker(&race.replace("NUMBER", &number));
    let mut inside = 0;
    let execs = if fast { 40 } else { 5 };
    for _ in 0..execs {
        inside += u32::from(stays("a race").stdout.contains("looked"));
    }
    println!("{inside} of {execs} execs found the directory");
    // The creation fails or succeeds; nothing hangs, and the pod keeps working.
    scene.attacker.exec(&format!("kill -KILL {number}")).ok();
    let ended = eventually("the start of the stopped container ends", || start.try_wait().expect("it is our child"));
    assert!(!ended.success());
    assert_eq!(bait.wait_for_exit()["state"], "CONTAINER_EXITED");
    assert_eq!(scene.attacker.exec("echo alive").ok(), "alive");
    scene.pod.remove();
    assert_eq!(node.leaked(), Vec::<String>::new());
}

#[test]
fn no_exec_escapes_through_a_process_of_the_pods_pid_namespace() {
    check_that_no_exec_escapes(PidNamespaceSharing::Pod);
}

#[test]
fn no_exec_escapes_through_a_process_of_the_targets_pid_namespace() {
    check_that_no_exec_escapes(PidNamespaceSharing::Target);
}

#[test]
fn no_container_starts_outside_its_root() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let scene = Scene::new(&node, &image, PidNamespaceSharing::Pod);
    let (_bait, mut start, number) = start_stopped_container(&node, &scene, &image);
    let link = format!("/proc/{number}/root");
    let own = node.push_and_pull(&TestImage::busybox().with_layer(|layer| layer.add_symlink("w", &link)), "begins:1");
    let container = ContainerRequest::sh("begins", &own, ESCAPE_PROBE)
        .set("working_dir", json!("/w"))
        .set("linux", scene.linux.clone());
    let container = scene.pod.create(container);
    let refused = node.crictl.try_call(["start", &container.id]).err();
    assert!(refused.contains("working directory") || refused.contains("chdir"), "{refused}");
    assert!(!container.output().contains("ESCAPED"));
    scene.attacker.exec(&format!("kill -KILL {number}")).ok();
    assert!(!eventually("the start ends", || start.try_wait().expect("it is our child")).success());
    scene.pod.remove();
}

#[test]
fn a_container_with_ptrace_sees_no_container_during_creation() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let mut pod = PodRequest::new("traced", node.directory());
    pod.0["linux"]["security_context"] = json!({"namespace_options": {"pid": 0}});
    let pod = node.crictl.run_pod(pod);
    let mut linux = pid_namespace_options(0, "");
    linux["security_context"]["capabilities"] = json!({"add_capabilities": ["SYS_PTRACE"]});
    let spy =
        "echo looking; while :; do for p in /proc/[0-9]*; do [ -e $p/root/run/nacelle ] && echo ESCAPED $p; done; done";
    let spy = pod.start(ContainerRequest::sh("spy", &image, spy).set("linux", linux));
    spy.wait_for_output("looking");
    for number in 0..5 {
        let other = pod.start(ContainerRequest::sh(&format!("other-{number}"), &image, "echo made; sleep 600"));
        other.wait_for_output("made");
        assert_eq!(other.exec("echo well").ok(), "well");
    }
    // The container keeps running.
    assert_eq!(spy.exec("echo alive").ok(), "alive");
    assert!(!spy.output().contains("ESCAPED"), "{}", spy.output());
    pod.remove();
}
