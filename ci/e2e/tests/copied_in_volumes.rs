//! Tests volumes that kubelet writes for its pods (configMap, secret and the like), with the test in place of kubelet: a VM has
//! copies of them, which are updated quickly and atomically.

use nacelle_e2e::node::engine;
use nacelle_e2e::{ContainerRequest, PodRequest, TestImage, TestNode, eventually};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A volume in kubelet's directory of a pod.
struct KubeletVolume(PathBuf);

impl KubeletVolume {
    fn new(node: &TestNode, plugin: &str, name: &str) -> KubeletVolume {
        let directory = node.directory().join("kubelet/pods/0d3c/volumes").join(plugin).join(name);
        fs::create_dir_all(&directory).expect("the node's directory is writable");
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o777)).expect("it is ours");
        KubeletVolume(directory)
    }

    /// Writes these files as kubelet does: a new directory, one rename, then the visible links.
    fn write(&self, stamp: &str, files: &[(String, String)]) {
        let ours = "the volume is ours";
        let old = fs::read_link(self.0.join("..data")).ok();
        let data = self.0.join(stamp);
        fs::create_dir(&data).expect(ours);
        for (name, text) in files {
            fs::write(data.join(name), text).expect(ours);
            fs::set_permissions(data.join(name), fs::Permissions::from_mode(0o440)).expect(ours);
            chown(data.join(name), Some(0), Some(2000)).expect(ours);
        }
        symlink(stamp, self.0.join("..data_tmp")).expect(ours);
        fs::rename(self.0.join("..data_tmp"), self.0.join("..data")).expect(ours);
        let names: BTreeSet<&str> = files.iter().map(|(name, _)| name.as_str()).collect();
        for name in &names {
            if fs::symlink_metadata(self.0.join(name)).is_err() {
                symlink(format!("..data/{name}"), self.0.join(name)).expect(ours);
            }
        }
        for entry in fs::read_dir(&self.0).expect(ours) {
            let name = entry.expect(ours).file_name().into_string().expect("plain names");
            if !name.starts_with("..") && !names.contains(name.as_str()) {
                fs::remove_file(self.0.join(name)).expect(ours);
            }
        }
        if let Some(old) = old {
            fs::remove_dir_all(self.0.join(old)).expect(ours);
        }
    }

    fn mount(&self, place: &str) -> Value {
        json!({"host_path": self.0, "container_path": place, "readonly": true})
    }
}

fn files(files: &[(&str, &str)]) -> Vec<(String, String)> {
    files.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect()
}

/// Prints changes in /conf, and whether it ever sees files of two states together.
const WATCH_SCRIPT: &str = r#"
while :; do
    sleep 0.02
    one= two=
    cd -P /conf/..data && { read -r one <a; read -r two <b; }
    [ -n "$one" ] && [ -n "$two" ] || continue
    [ "$one" = "$two" ] || echo "mixed $one $two"
    [ "$one" = "$last" ] || echo "now $one"
    last=$one
done 2>/dev/null
"#;

/// Returns how long it takes until the container prints this.
fn wait_for_line(log: &Path, words: &str) -> Duration {
    let begin = Instant::now();
    eventually(words, || fs::read_to_string(log).is_ok_and(|text| text.contains(words)).then(|| begin.elapsed()))
}

#[test]
fn volume_updates_are_fast_and_atomic_with_or_without_a_daemon() {
    let mut node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let machine = engine() != "host";
    let conf = KubeletVolume::new(&node, "kubernetes.io~configmap", "conf");
    conf.write("..1", &files(&[("a", "one"), ("b", "one"), ("gone", "soon")]));
    let part = node.directory().join("kubelet/pods/0d3c/volume-subpaths/conf/c/0");
    fs::create_dir_all(part.parent().expect("it has one")).expect("the node's directory is writable");
    fs::write(&part, "a part").expect("the node's directory is writable");
    let (id, second, log) = {
        let pod = node.crictl.run_pod(PodRequest::new("pushed", node.directory()));
        let single = json!({"host_path": part, "container_path": "/etc/part", "readonly": true});
        let mounts = json!([conf.mount("/conf"), conf.mount("/again"), single]);
        let one = pod.start(ContainerRequest::sh("one", &image, WATCH_SCRIPT).set("mounts", mounts));
        one.wait_for_output("now one");
        assert_eq!(one.exec("cat /conf/a /again/b /conf/gone /etc/part").ok(), "oneonesoona part");
        assert_eq!(one.exec("stat -L -c '%a %u %g' /conf /conf/a").ok(), "777 0 0\n440 0 2000");
        assert_eq!(one.exec("readlink /conf/a; readlink /conf/..data").ok(), "..data/a\n..1");
        for write in ["echo x >/conf/a", "touch /conf/new", "rm /conf/..data", "echo x >/etc/part"] {
            let refused = one.exec(write).err();
            assert!(refused.contains("Read-only file system"), "{write}: {refused}");
        }
        let kinds = one.exec("grep -E ' (/conf|/again|/etc/part) ' /proc/mounts | cut -d' ' -f1,3").ok();
        if machine {
            assert_eq!(kinds, ["pushed tmpfs"; 3].join("\n"));
            let share = node.pids_matching("nacelle-fs ").first().copied().expect("it is there");
            let mounts = fs::read_to_string(format!("/proc/{share}/mountinfo")).expect("it runs");
            assert!(!mounts.contains("kubelet"), "nothing is shared: {mounts}");
        }
        let two =
            pod.start(ContainerRequest::sh("two", &image, "sleep 600").set("mounts", json!([conf.mount("/mine")])));
        let inode = two.exec("stat -L -c %i /mine/a").ok();
        assert_eq!(one.exec("stat -L -c %i /conf/a /again/a").ok(), format!("{inode}\n{inode}"), "there is one copy");
        (one.id.clone(), two.id.clone(), one.log.clone())
    };
    let exec = |node: &TestNode, id: &str, script: &str| {
        node.crictl.try_call(["exec", "--sync", id, "/bin/sh", "-c", script]).ok()
    };
    let mut times = Vec::new();
    for n in 2..7 {
        let text = format!("state-{n}");
        conf.write(&format!("..{n}"), &files(&[("a", &text), ("b", &text), ("new", "came")]));
        times.push(wait_for_line(&log, &format!("now {text}\n")));
    }
    times.sort();
    println!("changes were seen after {times:?}");
    assert!(times[2] < Duration::from_secs(1), "{times:?}");
    assert_eq!(exec(&node, &id, "ls -A /conf"), "..6\n..data\na\nb\nnew");
    assert_eq!(exec(&node, &second, "cat /mine/b /mine/new"), "state-6came");
    assert_eq!(exec(&node, &id, "cat /etc/part"), "a part");
    // Only the pod's own processes are involved.
    node.kill();
    conf.write("..7", &files(&[("a", "alone"), ("b", "alone")]));
    wait_for_line(&log, "now alone\n");
    node.start();
    conf.write("..8", &files(&[("a", "after"), ("b", "after")]));
    wait_for_line(&log, "now after\n");
    let output = fs::read_to_string(&log).expect("it is there");
    assert!(!output.contains("mixed"), "{output}");
    for id in [&id, &second] {
        node.crictl.call(["rm", "-f", id]);
    }
    let pod = node.crictl.call(["pods", "-q"]);
    node.crictl.call(["stopp", pod.trim()]);
    node.crictl.call(["rmp", pod.trim()]);
    assert_eq!(node.leaked(), Vec::<String>::new());
}

#[test]
fn ten_thousand_files_fit_a_volume_and_special_files_are_refused() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let many = KubeletVolume::new(&node, "kubernetes.io~secret", "many");
    let mut all: Vec<_> = (0..10_000).map(|n| (format!("key-{n}"), format!("secret {n}\n"))).collect();
    many.write("..1", &all);
    let pod = node.crictl.run_pod(PodRequest::new("many", node.directory()));
    let begin = Instant::now();
    let container =
        pod.start(ContainerRequest::sh("c", &image, "sleep 600").set("mounts", json!([many.mount("/many")])));
    println!("a container with 10,000 files was there after {:?}", begin.elapsed());
    assert_eq!(container.exec("ls /many | wc -l; cat /many/key-0 /many/key-9999").ok(), "10000\nsecret 0\nsecret 9999");
    let room = |what: &str| container.exec(what).ok().split_whitespace().last().map(str::to_owned);
    let used = "df -k /many | tail -n 1 | tr -s ' ' | cut -d' ' -f3";
    let before = room(used);
    all[9_999].1 = "changed\n".to_owned();
    all.remove(0);
    let begin = Instant::now();
    many.write("..2", &all);
    let written = begin.elapsed();
    eventually("the change", || (container.exec("cat /many/key-9999").ok() == "changed").then_some(()));
    println!("one of them was changed after {:?}, of which writing took {written:?}", begin.elapsed());
    eventually("a key goes", || (container.exec("ls /many | wc -l").ok() == "9999").then_some(()));
    if engine() != "host" {
        let number = |text: Option<String>| text.and_then(|text| text.parse::<u64>().ok()).expect("a number");
        let (before, after) = (number(before), number(room(used)));
        assert!(after <= before + 64, "files that are the same take no room twice: {before} and {after} KiB");
        for (name, code, words) in
            [("fifo", "FailedPrecondition", "neither file"), ("huge", "ResourceExhausted", "bytes")]
        {
            let odd = KubeletVolume::new(&node, "kubernetes.io~projected", name);
            odd.write("..1", &files(&[("a", "one")]));
            let file = odd.0.join("..1/odd");
            match name {
                "fifo" => drop(node.run_in_netns("mkfifo", &[&file.display().to_string()]).ok()),
                _ => drop(node.run_in_netns("truncate", &["--size=1T", &file.display().to_string()]).ok()),
            }
            // The error comes from the creation or, if that was answered before the guest had the volume, from the start.
            let config = ContainerRequest::sh(name, &image, "true").set("mounts", json!([odd.mount("/odd")]));
            let created = pod.try_create(config);
            let refused = match created.code {
                0 => node.crictl.try_call(["start", created.stdout.trim()]).err(),
                _ => created.err(),
            };
            assert!(refused.contains(code) && refused.contains(words), "{name}: {refused}");
            assert!(refused.contains(&odd.0.display().to_string()), "{refused}");
        }
        assert_eq!(container.exec("cat /many/key-9999").ok(), "changed");
    }
    pod.remove();
    assert_eq!(node.leaked(), Vec::<String>::new());
}

#[test]
fn files_that_kubelet_makes_for_containers_are_copied_in_and_returned() {
    let mut node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let machine = engine() != "host";
    let directory = node.directory().join("kubelet/pods/0d3c");
    let hosts = directory.join("etc-hosts");
    fs::create_dir_all(directory.join("containers/one")).expect("the node's directory is writable");
    let rewrite = |text: &str| fs::write(&hosts, text).expect("it is ours");
    let new_log = |name: &str| {
        let log = directory.join("containers/one").join(name);
        fs::write(&log, "").expect("it is ours");
        fs::set_permissions(&log, fs::Permissions::from_mode(0o666)).expect("it is ours");
        log
    };
    let mounts = |log: &Path| {
        json!([
            {"host_path": hosts, "container_path": "/etc/hosts"},
            {"host_path": log, "container_path": "/dev/termination-log"},
        ])
    };
    let user = json!({"security_context": {"run_as_user": {"value": 1000}}});
    rewrite("10.9.9.1 one\n");
    let pod = node.crictl.run_pod(PodRequest::new("files", node.directory()));
    let first = new_log("0a1b2c3d");
    let one = pod.start(ContainerRequest::sh("one", &image, "sleep 600").set("mounts", mounts(&first)));
    assert_eq!(one.exec("cat /etc/hosts; cat /dev/termination-log").ok(), "10.9.9.1 one");
    assert_eq!(one.exec("echo 10.9.9.2 more >>/etc/hosts; tail -n 1 /etc/hosts").ok(), "10.9.9.2 more");
    if machine {
        let kinds = one.exec("grep -E ' (/etc/hosts|/dev/termination-log) ' /proc/mounts | cut -d' ' -f1,3").ok();
        assert_eq!(kinds, ["pushed tmpfs"; 2].join("\n"));
        assert_eq!(fs::read_to_string(&hosts).expect("it is there"), "10.9.9.1 one\n");
    }

    // kubelet writes /etc/hosts anew for each container, and all containers of the pod see that.
    rewrite("10.9.9.3 all\n");
    let second = new_log("00000001");
    let script =
        "head -c 5000 /dev/zero | tr '\\0' x >/dev/termination-log; echo the end >>/dev/termination-log; exit 3";
    let two = ContainerRequest::sh("two", &image, script).set("mounts", mounts(&second)).set("linux", user);
    let two = pod.start(two);
    assert_eq!(one.exec("cat /etc/hosts").ok(), "10.9.9.3 all");
    // What the container has written is there when its end is reported.
    assert_eq!(two.wait_for_exit()["exitCode"], 3);
    let end = fs::read_to_string(&second).expect("text");
    assert!(end.ends_with("xthe end\n") && end.len() == if machine { 4096 } else { 5008 }, "{} bytes", end.len());
    node.crictl.call(["rm", &two.id]);
    assert_eq!(one.exec("cat /etc/hosts").ok(), "10.9.9.3 all");

    // Only the pod's own processes are involved.
    let third = new_log("ffffffff");
    let script = "sleep 5; echo alone >/dev/termination-log";
    pod.start(ContainerRequest::sh("three", &image, script).set("mounts", mounts(&third)));
    let (one, pod) = (one.id.clone(), pod.id.clone());
    node.kill();
    eventually("the end of a container", || (fs::read_to_string(&third).ok()? == "alone\n").then_some(()));
    node.start();
    node.crictl.call(["stop", "--timeout", "1", &one]);
    assert_eq!(fs::read_to_string(&first).expect("text"), "");
    node.crictl.call(["rmp", "-f", &pod]);
    assert_eq!(node.leaked(), Vec::<String>::new());
}
