//! Tests one volume in several containers of a pod: a directory, a part of it and its parent are one file system for all of them,
//! as on one kernel, also where one of them cannot write, and in a user namespace. Engine `host` is the reference.

use nacelle_e2e::crictl::{RunningContainer, RunningPod};
use nacelle_e2e::{ContainerRequest, PodRequest, TestImage, TestNode, eventually};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

const PROBE: &str = env!("CARGO_BIN_EXE_nacelle-volume-probe");
const FIRST_NODE_ID: u32 = 196_608;

/// A directory of the node, a part of it, and its parent.
struct Volume {
    parent: PathBuf,
    whole: PathBuf,
    part: PathBuf,
}

impl Volume {
    fn new(directory: &Path) -> Volume {
        let parent = directory.join("parent");
        let (whole, part) = (parent.join("whole"), parent.join("whole/part"));
        fs::create_dir_all(&part).expect("the node's directory is writable");
        for path in [&parent, &whole, &part] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o777)).expect("it is ours");
        }
        fs::write(whole.join("file"), "one").expect("it is ours");
        Volume { parent, whole, part }
    }
}

/// A container, and the path of the part in it.
struct VolumeView<'a> {
    container: RunningContainer<'a>,
    part: &'static str,
}

impl<'a> VolumeView<'a> {
    fn new(
        pod: &RunningPod<'a>,
        container: ContainerRequest,
        source: &Path,
        mount: &Value,
        part: &'static str,
    ) -> VolumeView<'a> {
        let mut mounts = mount.clone();
        mounts["host_path"] = json!(source);
        mounts["container_path"] = json!("/v");
        VolumeView { container: pod.start(container.set("mounts", json!([mounts]))), part }
    }

    fn exec(&self, script: &str) -> String {
        self.container.exec(&format!("cd {} && {script}", self.part)).ok()
    }

    /// Runs the probe: this container holds, the other one meets.
    fn check_probe(&self, other: &VolumeView, read_only: &str) {
        let hold = format!("/bin/probe hold {} {read_only} </dev/null >/tmp/held 2>&1 &", self.part);
        self.container.exec(&format!("rm -f /tmp/held; {hold}")).ok();
        let held = || self.container.exec("cat /tmp/held").ok();
        eventually("it holds all", || (held() == "ready").then_some(()));
        let met = other.container.exec(&format!("/bin/probe meet {} {read_only}", other.part));
        let refused = if read_only.is_empty() { "" } else { "event: read-only\n" };
        let expected = format!("flock: held\nfcntl: held\nmap: seen\n{refused}done");
        assert_eq!(met.stdout, expected, "{} meets {}: {}\n{}", other.part, self.part, met.stderr, held());
        eventually("it has met", || held().ends_with("done").then_some(()));
        let more = if read_only.is_empty() { "map: answered\nevent: event\n" } else { "" };
        assert_eq!(held(), format!("ready\nsocket: hello\nfifo: through\n{more}done"));
    }
}

/// Checks that a file without a name is one of this container alone until it has a name, and then one of both.
fn check_nameless(one: &VolumeView, other: &VolumeView) {
    let seen = one.exec("/bin/probe nameless .");
    let expected = "created: 0 links, 14 bytes\nbefore: 0 names\nopened again: without a name\nlinked: 1 names\n\
        one inode: true, 1 links, mode 640\nthrough its name: mapped! a name later\nexclusive: Some(Os { code: 2, \
        kind: NotFound, message: \"No such file or directory\" })\nclosed: 4096 bytes";
    assert_eq!(seen, expected);
    assert_eq!(other.exec("head -c 7 named && stat -c :%a:%u:%g named"), "mapped!:640:0:0");
    assert_eq!(one.exec("stat -c %d:%i named"), other.exec("stat -c %d:%i named"));
    other.exec("rm named");
    assert!(!one.exec("ls").contains("named"));
}

/// Checks that writes, new files and renames of one container are visible to the other at once.
fn check_coherence(one: &VolumeView, other: &VolumeView) {
    for round in 0..5 {
        one.exec("echo -n one >torn");
        assert_eq!(other.exec("cat torn"), "one");
        one.exec("echo -n twotwo >torn");
        assert_eq!(other.exec("cat torn"), "twotwo");
        one.exec(&format!("echo {round} >new && mv new renamed"));
        assert_eq!(other.exec("test ! -e new && cat renamed"), round.to_string());
        other.exec("rm renamed");
        assert!(!one.exec("ls").contains("renamed"));
    }
    assert_eq!(one.exec("stat -c %d:%i torn"), other.exec("stat -c %d:%i torn"));
}

fn check_views(node: &TestNode, volume: &Volume, pod: PodRequest, linux: &Value, mount: &Value) {
    let image = TestImage::busybox().with_layer(|layer| layer.add_program(Path::new(PROBE), "bin/probe"));
    let image = node.push_and_pull(&image, "probe:1");
    let pod = node.crictl.run_pod(pod);
    let container = |name: &str| ContainerRequest::sh(name, &image, "sleep 600").set("linux", linux.clone());
    let mut readonly = mount.clone();
    readonly["readonly"] = json!(true);
    // Read-only containers come first: a later writable mount changes the mount in the VM, which was read-only until then.
    let read = VolumeView::new(&pod, container("read"), &volume.whole, &readonly, "/v/part");
    assert_eq!(read.container.exec("cat /v/file").ok(), "one");
    let a = VolumeView::new(&pod, container("a"), &volume.whole, mount, "/v/part");
    let b = VolumeView::new(&pod, container("b"), &volume.part, mount, "/v");
    let c = VolumeView::new(&pod, container("c"), &volume.parent, mount, "/v/whole/part");
    a.container.exec("echo -n two >/v/file").ok();
    assert_eq!(read.container.exec("cat /v/file").ok(), "two");
    assert_eq!(c.container.exec("cat /v/whole/file").ok(), "two");
    for (one, other) in [(&a, &b), (&b, &c), (&c, &a), (&b, &a)] {
        check_coherence(one, other);
        one.check_probe(other, "");
        check_nameless(one, other);
    }
    let refused = read.container.exec(&format!("/bin/probe nameless {}", read.part)).err();
    assert!(refused.contains("ReadOnlyFilesystem"), "{refused}");
    a.check_probe(&read, "ro");
    b.check_probe(&read, "ro");
    let refused = read.container.exec("echo x >/v/file").err();
    assert!(refused.contains("Read-only file system"), "{refused}");
    // A new container without the earlier ones.
    for gone in [a, c] {
        node.crictl.call(["rm", "--force", &gone.container.id]);
    }
    let again = VolumeView::new(&pod, container("again"), &volume.whole, mount, "/v/part");
    check_coherence(&again, &b);
    again.check_probe(&b, "");
    again.check_probe(&read, "ro");
    pod.remove();
    assert_eq!(node.leaked(), Vec::<String>::new());
}

#[test]
fn a_volume_its_sub_path_and_its_parent_are_one_file_system() {
    let node = TestNode::new();
    let volume = Volume::new(node.directory());
    check_views(&node, &volume, PodRequest::new("views", node.directory()), &json!({}), &json!({}));
}

#[test]
fn a_volume_and_its_sub_path_are_one_file_system_in_a_user_namespace() {
    let node = TestNode::new();
    // A file system that supports id-mapped mounts.
    let directory = tempfile::tempdir_in("/dev/shm").expect("/dev/shm is writable");
    let volume = Volume::new(directory.path());
    let mapping = json!([{"container_id": 0, "host_id": FIRST_NODE_ID, "length": 65_536}]);
    let users = json!({"mode": 0, "uids": mapping, "gids": mapping});
    let linux = json!({"security_context": {"namespace_options": {"userns_options": users}}});
    let mount = json!({"uidMappings": mapping, "gidMappings": mapping});
    let pod = PodRequest::new("views", node.directory()).set("linux", linux.clone());
    check_views(&node, &volume, pod, &linux, &mount);
}

#[test]
fn the_node_enforces_read_only_volumes_and_a_file_can_be_a_volume() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let volume = Volume::new(node.directory());
    let pod = node.crictl.run_pod(PodRequest::new("views", node.directory()));
    let container = |name: &str| ContainerRequest::sh(name, &image, "sleep 600");
    let read = VolumeView::new(&pod, container("read"), &volume.parent, &json!({"readonly": true}), "/v/whole/part");
    let file = VolumeView::new(&pod, container("file"), &volume.whole.join("file"), &json!({}), "/");
    assert_eq!(file.exec("cat /v"), "one");
    assert_eq!(read.container.exec("cat /v/whole/file").ok(), "one");
    // A write through one mount is visible through the others.
    file.exec("echo -n twotwo >/v");
    assert_eq!(read.container.exec("cat /v/whole/file").ok(), "twotwo");
    for path in ["/v/whole/file", "/v/whole/new"] {
        let refused = read.container.exec(&format!("echo x >{path}")).err();
        assert!(refused.contains("Read-only file system"), "{refused}");
    }
    assert_eq!(fs::read_to_string(volume.whole.join("file")).expect("it is there"), "twotwo");
    pod.remove();
    assert_eq!(node.leaked(), Vec::<String>::new());
}
