//! Tests containers that share a PID namespace and try to leave their root through our processes: by the working directory of an
//! exec or of another container, with every kind of link to a process's root.

use nacelle_e2e::crictl::{RunningContainer, RunningPod};
use nacelle_e2e::node::engine;
use nacelle_e2e::{Container, Image, Node, Pod, eventually};
use serde_json::{Value, json};
use std::process::Child;

/// Stops the first process that is a container being created, and prints its PID.
const HUNT: &str = "while :; do for p in /proc/[0-9]*; do read -r c <$p/comm && case $c in youki*) \
                    kill -STOP ${p#/proc/} && echo caught ${p#/proc/} && exec sleep 6000;; esac; done 2>/dev/null; done";
/// Prints ESCAPED if the agent's files are in the working directory or above it.
const PROBE: &str =
    "d=.; for i in 1 2 3 4 5 6 7 8; do [ -e $d/run/nacelle ] && echo ESCAPED; d=$d/..; done; echo looked";

/// How the containers of a pod share a PID namespace.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sharing {
    Pod,
    Target,
}

fn pid(mode: i32, target: &str) -> Value {
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
    seen: String,
    linux: Value,
}

impl<'a> Scene<'a> {
    fn new(node: &'a Node, image: &str, sharing: Sharing) -> Scene<'a> {
        let mut pod = Pod::new("confined", node.directory());
        pod.0["linux"]["security_context"] =
            json!({"namespace_options": {"pid": i32::from(sharing == Sharing::Target)}});
        let pod = node.crictl.run_pod(pod);
        let own = pid(i32::from(sharing == Sharing::Target), "");
        let victim = Container::sh("victim", image, "mkdir -p /tmp/w; echo victim; exec sleep 6001");
        let victim = pod.start(victim.set("working_dir", json!("/tmp/w")).set("linux", own.clone()));
        victim.says("victim");
        let linux = if sharing == Sharing::Target { pid(3, &victim.id) } else { own };
        let attacker = pod.start(Container::sh("attacker", image, HUNT).set("linux", linux.clone()));
        let find = "for p in /proc/[0-9]*; do case $(tr '\\0' ' ' <$p/cmdline) in 'sleep 6001 ') echo $p;; esac; done";
        let seen = eventually("the attacker sees the victim", || {
            Some(attacker.exec(find).ok().trim().to_owned()).filter(|path| path.starts_with("/proc/"))
        });
        Scene { pod, victim, attacker, seen, linux }
    }

    /// Makes the attacker run a script that replaces the victim's /tmp/w ($w).
    fn make(&self, script: &str) {
        let script = format!("w={}/root/tmp/w; {script}", self.seen);
        self.attacker.exec(&script).ok();
    }

    fn link(&self, to: &str) {
        self.make(&format!("rm -rf $w; ln -s {to} $w; readlink $w"));
    }
}

/// Creates a third container; returns the PID of its process, which the attacker has stopped.
fn bait<'a>(node: &'a Node, scene: &Scene<'a>, image: &str) -> (RunningContainer<'a>, Child, String) {
    let bait = scene.pod.create(Container::sh("bait", image, "sleep 6002").set("linux", scene.linux.clone()));
    let start = node.crictl.spawn(["start", &bait.id]);
    let said = scene.attacker.says("caught ");
    let number =
        said.lines().find_map(|line| line.strip_prefix("caught ")).expect("it is the line's beginning").to_owned();
    (bait, start, number)
}

fn no_exec_leaves_the_container(sharing: Sharing) {
    let node = Node::new();
    let image = node.image(&Image::busybox(), "busybox:1");
    let scene = Scene::new(&node, &image, sharing);
    let (bait, mut start, number) = bait(&node, &scene, &image);
    // The stopped process is killed after a minute, in which an emulated VM achieves less.
    let fast = engine() == "host";
    let stays = |what: &str| {
        let said = scene.victim.exec(PROBE);
        assert!(!said.stdout.contains("ESCAPED"), "{what}: {}{}", said.stdout, said.stderr);
        said
    };
    // The process's root is not reachable from the container itself either.
    for name in ["root", "cwd", "fd/0", "fd/3", "mem", "exe"] {
        let script =
            format!("ls /proc/{number}/{name}/ || head -c 1 /proc/{number}/{name} || readlink /proc/{number}/{name}");
        let said = scene.attacker.exec(&script);
        assert!(said.code != 0 && said.stdout.is_empty(), "{name}: {}", said.stdout);
    }
    // A kernel may show the environment to a process with CAP_SYS_ADMIN (docs/contributor/security.md): it is empty.
    let said = scene.attacker.exec(&format!("tr -d '\\0' </proc/{number}/environ"));
    assert_eq!(said.stdout, "", "environ: {}", said.stderr);
    for to in ["root", "cwd", "root/tmp", "task/$n/root"]
        .map(|name| format!("/proc/{number}/{}", name.replace("$n", &number)))
    {
        scene.link(&to);
        let said = stays(&to);
        assert!(said.code != 0 && said.stderr.contains("working directory"), "{to}: {} {}", said.stdout, said.stderr);
    }
    for to in ["/proc/self/cwd", "/proc/self/root", "/proc/thread-self/cwd", "/proc/1/root"] {
        scene.link(to);
        stays(to);
    }
    for fd in if fast { 0..24 } else { 3..6 } {
        scene.link(&format!("/proc/{number}/fd/{fd}"));
        assert_ne!(stays(&format!("fd {fd}")).code, 0);
    }
    // A procfs that the victim itself mounted elsewhere.
    scene.link("/tmp");
    for mount in ["mount --bind /proc /mnt", "mount -t proc proc /mnt"] {
        let mounted = scene.victim.exec(&format!("mkdir -p /mnt && {mount} && ls -d /mnt/{number}"));
        assert_eq!(mounted.ok(), format!("/mnt/{number}"), "{mount}");
        scene.link(&format!("/mnt/{number}/root"));
        assert_ne!(stays(mount).code, 0);
        scene.link("/tmp");
        scene.victim.exec("umount /mnt").ok();
    }
    // The directory and the link swap places while execs resolve the path.
    let race = "rm -rf $w; mkdir $w; ln -s /proc/NUMBER/root $w.l; (while :; do mv $w $w.d; mv $w.l $w; mv $w $w.l; \
                mv $w.d $w; done) >/dev/null 2>&1 & echo racing";
    scene.make(&race.replace("NUMBER", &number));
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
    assert_eq!(bait.exited()["state"], "CONTAINER_EXITED");
    assert_eq!(scene.attacker.exec("echo alive").ok(), "alive");
    scene.pod.remove();
    assert_eq!(node.left(), Vec::<String>::new());
}

#[test]
fn no_exec_leaves_the_container_by_a_process_of_the_pods_pid_namespace() {
    no_exec_leaves_the_container(Sharing::Pod);
}

#[test]
fn no_exec_leaves_the_container_by_a_process_of_the_targets_pid_namespace() {
    no_exec_leaves_the_container(Sharing::Target);
}

#[test]
fn no_container_begins_outside_its_root() {
    let node = Node::new();
    let image = node.image(&Image::busybox(), "busybox:1");
    let scene = Scene::new(&node, &image, Sharing::Pod);
    let (_bait, mut start, number) = bait(&node, &scene, &image);
    let link = format!("/proc/{number}/root");
    let own = node.image(&Image::busybox().layer(|layer| layer.symlink("w", &link)), "begins:1");
    let container =
        Container::sh("begins", &own, PROBE).set("working_dir", json!("/w")).set("linux", scene.linux.clone());
    let container = scene.pod.create(container);
    let refused = node.crictl.try_call(["start", &container.id]).err();
    assert!(refused.contains("working directory") || refused.contains("chdir"), "{refused}");
    assert!(!container.output().contains("ESCAPED"));
    scene.attacker.exec(&format!("kill -KILL {number}")).ok();
    assert!(!eventually("the start ends", || start.try_wait().expect("it is our child")).success());
    scene.pod.remove();
}

#[test]
fn a_container_that_may_trace_sees_no_other_in_the_making() {
    let node = Node::new();
    let image = node.image(&Image::busybox(), "busybox:1");
    let mut pod = Pod::new("traced", node.directory());
    pod.0["linux"]["security_context"] = json!({"namespace_options": {"pid": 0}});
    let pod = node.crictl.run_pod(pod);
    let mut linux = pid(0, "");
    linux["security_context"]["capabilities"] = json!({"add_capabilities": ["SYS_PTRACE"]});
    let spy =
        "echo looking; while :; do for p in /proc/[0-9]*; do [ -e $p/root/run/nacelle ] && echo ESCAPED $p; done; done";
    let spy = pod.start(Container::sh("spy", &image, spy).set("linux", linux));
    spy.says("looking");
    for number in 0..5 {
        let other = pod.start(Container::sh(&format!("other-{number}"), &image, "echo made; sleep 600"));
        other.says("made");
        assert_eq!(other.exec("echo well").ok(), "well");
    }
    // The container keeps running.
    assert_eq!(spy.exec("echo alive").ok(), "alive");
    assert!(!spy.output().contains("ESCAPED"), "{}", spy.output());
    pod.remove();
}
