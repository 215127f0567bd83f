//! Tests emptyDir volumes of medium Memory and HugePages, and limits of huge pages, with the test in place of kubelet: in a VM
//! they use its own memory.

use nacelle_e2e::crictl::RunningPod;
use nacelle_e2e::node::{NodeOptions, engine, handler_config};
use nacelle_e2e::run::{block_on, run_program};
use nacelle_e2e::{ContainerRequest, PodRequest, TestImage, TestNode};
use nacelle_proto::cri;
use nacelle_proto::cri::runtime_service_client::RuntimeServiceClient;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};

/// A mount in kubelet's directory of a pod. Dropping it unmounts it.
struct Mounted(PathBuf);

impl Mounted {
    /// Creates a volume as kubelet does: the medium's file system over the volume's directory, for the pod's group.
    fn new(node: &TestNode, name: &str, kind: &str, options: &str) -> Mounted {
        let directory = Mounted::pod(node).join("volumes/kubernetes.io~empty-dir").join(name);
        fs::create_dir_all(&directory).expect("the node's directory is writable");
        run_program("mount", ["-t", kind, "-o", options, "none", directory.to_str().unwrap()]).ok();
        chown(&directory, None, Some(2000)).expect("it is ours");
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o2777)).expect("it is ours");
        Mounted(directory)
    }

    /// Mounts a part of this volume as kubelet does for a `subPath`.
    fn part(&self, node: &TestNode, part: &str, number: u32) -> Mounted {
        let name = self.0.file_name().unwrap();
        let at = Mounted::pod(node).join("volume-subpaths").join(name).join(format!("c/{number}"));
        for directory in [&self.0.join(part), &at] {
            fs::create_dir_all(directory).expect("the node's directory is writable");
        }
        run_program("mount", ["--bind".as_ref(), self.0.join(part).as_os_str(), at.as_os_str()]).ok();
        Mounted(at)
    }

    fn pod(node: &TestNode) -> PathBuf {
        node.directory().join("kubelet/pods/0d3c")
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Not lazily: if a VM holds it, this and the test fail.
        let done = run_program("umount", [&self.0]);
        assert!(std::thread::panicking() || done.code == 0, "{done:?}");
    }
}

fn mount(host: &Path, at: &str) -> Value {
    json!({"host_path": host, "container_path": at})
}

/// Returns the error of an invalid container, at its creation, or at its start if only the guest can detect it.
fn creation_error(node: &TestNode, pod: &RunningPod, container: ContainerRequest) -> String {
    let made = pod.try_create(container);
    if made.code == 0 { node.crictl.try_call(["start", made.stdout.trim()]).err() } else { made.err() }
}

#[test]
fn an_empty_dir_in_memory_uses_guest_memory() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let volume = Mounted::new(&node, "cache", "tmpfs", "size=4m");
    let (part, again) = (volume.part(&node, "deep/part", 0), volume.part(&node, "trap", 1));
    let guest = engine() != "host";
    {
        let pod = node.crictl.run_pod(PodRequest::new("memory", node.directory()));
        let with = |name: &str, mounts: Value| ContainerRequest::sh(name, &image, "sleep 600").set("mounts", mounts);
        let one = pod.start(with("one", json!([mount(&volume.0, "/cache")])));
        let two = pod.start(with("two", json!([mount(&volume.0, "/same"), mount(&part.0, "/part")])));
        assert_eq!(one.exec("stat -f -c %T /cache").ok(), "tmpfs");
        assert_eq!(one.exec("stat -c '%a %g' /cache").ok(), "2777 2000");
        one.exec("echo word >/cache/file && mkdir -p /cache/deep/part && echo in it >/cache/deep/part/file").ok();
        assert_eq!(two.exec("cat /same/file /part/file").ok(), "word\nin it");
        two.exec("echo back >/part/file").ok();
        assert_eq!(one.exec("cat /cache/deep/part/file").ok(), "back");
        assert_eq!(volume.0.join("file").exists(), !guest, "the node's has no part in it");
        let full = one.exec("dd if=/dev/zero of=/cache/much bs=1M count=8");
        assert!(full.code != 0 && full.stderr.contains("No space left"), "{full:?}");
        let room = two.exec("df -k /same | tail -1 | awk '{print $2}'").ok();
        assert_eq!(room, "4096");

        if guest {
            // Read-only for one container; and a part that a container has replaced by a link is rejected.
            let read = json!([{"host_path": volume.0, "container_path": "/cache", "readonly": true}]);
            let reader = pod.start(with("reader", read));
            assert_eq!(reader.exec("cat /cache/file").ok(), "word");
            assert_ne!(reader.exec("touch /cache/x").code, 0);
            one.exec("rm -rf /cache/trap && ln -s / /cache/trap").ok();
            let answer = creation_error(&node, &pod, with("trapped", json!([mount(&again.0, "/trap")])));
            assert!(answer.contains("FailedPrecondition") && answer.contains("leads out"), "{answer}");
        }
        // A container that is created again finds the earlier content.
        node.crictl.call(["rm", "--force", &one.id]);
        let one = pod
            .start(ContainerRequest::sh("one", &image, "sleep 600").set("mounts", json!([mount(&volume.0, "/cache")])));
        assert_eq!(one.exec("cat /cache/file").ok(), "word");
        pod.remove();
    }
    drop((part, again, volume));
}

#[test]
fn in_memory_volumes_that_a_guest_cannot_see_are_refused() {
    if engine() == "host" {
        println!("skipped: without a guest such volumes are the node's");
        return;
    }
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let volume = Mounted::new(&node, "filled", "tmpfs", "size=4m");
    fs::write(volume.0.join("file"), "of the node").unwrap();
    let pod = node.crictl.run_pod(PodRequest::new("refusing", node.directory()));
    let with = |name: &str, mount: Value| ContainerRequest::sh(name, &image, "true").set("mounts", json!([mount]));
    let answer = creation_error(&node, &pod, with("filled", mount(&volume.0, "/cache")));
    assert!(answer.contains("FailedPrecondition") && answer.contains("has files on the node"), "{answer}");
    let both = json!({"host_path": volume.0, "container_path": "/cache", "propagation": 1});
    let answer = creation_error(&node, &pod, with("propagated", both));
    assert!(answer.contains("Unimplemented") && answer.contains("propagation"), "{answer}");
    pod.remove();
}

/// Updates the huge page limit of a container as kubelet does, which crictl cannot.
fn update_huge_page_limit(node: &TestNode, container: &str, mib: u64) -> Result<(), tonic::Status> {
    let limit = cri::HugepageLimit { page_size: "2MB".into(), limit: mib << 20 };
    let linux = cri::LinuxContainerResources { hugepage_limits: vec![limit], ..Default::default() };
    let request = cri::UpdateContainerResourcesRequest {
        container_id: container.to_owned(),
        linux: Some(linux),
        ..Default::default()
    };
    block_on(async { RuntimeServiceClient::new(node.channel()).update_container_resources(request).await.map(drop) })
}

#[test]
fn huge_pages_of_a_vm_follow_the_limits_of_its_containers() {
    if engine() == "host" {
        println!("skipped: without a guest huge pages are the node's");
        return;
    }
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let volume = Mounted::new(&node, "huge", "hugetlbfs", "pagesize=2M");
    {
        let pod = node.crictl.run_pod(PodRequest::new("huge", node.directory()));
        let requested = |name: &str, size: &str, mib: u64| {
            // Kubelet also names the sizes that a container has none of.
            let limits = json!([{"page_size": size, "limit": mib << 20}, {"page_size": "1GB", "limit": 0}]);
            let container = ContainerRequest::sh(name, &image, "sleep 600");
            let container = container.set("linux", json!({"resources": {"hugepage_limits": limits}}));
            container.set("mounts", json!([mount(&volume.0, "/huge")]))
        };
        let one = pod.start(requested("one", "2MB", 8));
        let two = pod.start(requested("two", "2MB", 5));
        let pages = || one.exec("awk '/^HugePages_Total/ {print $2}' /proc/meminfo").ok();
        assert_eq!(pages(), "6");
        // HUGETLBFS_MAGIC, whose name busybox does not know.
        assert_eq!(one.exec("stat -f -c '%t %S' /huge; stat -c '%a %g' /huge").ok(), "958458f6 2097152\n2777 2000");
        one.exec("fallocate -l 8M /huge/file").ok();
        assert_eq!(one.exec("cat /sys/fs/cgroup/hugetlb.2MB.current").ok(), (8 << 20).to_string());
        assert_ne!(one.exec("fallocate -l 2M /huge/more").code, 0);
        // A container cannot use the pages of others.
        two.exec("fallocate -l 4M /huge/two").ok();
        update_huge_page_limit(&node, &one.id, 12).unwrap();
        assert_eq!(pages(), "8");
        one.exec("rm -f /huge/more && fallocate -l 4M /huge/more").ok();
        let reported = one.status()["resources"]["linux"]["hugepageLimits"].clone();
        let limit = |size: &str| {
            reported.as_array().unwrap().iter().find(|limit| limit["pageSize"] == size).unwrap()["limit"].clone()
        };
        assert_eq!((limit("2MB"), limit("1GB")), (json!((12 << 20).to_string()), json!("0")), "{reported}");

        let answer = creation_error(&node, &pod, requested("too much", "2MB", 64 << 10));
        assert!(answer.contains("ResourceExhausted") && answer.contains("more memory"), "{answer}");
        let error = update_huge_page_limit(&node, &one.id, 64 << 10).unwrap_err();
        assert_eq!(error.code(), tonic::Code::ResourceExhausted, "{error}");
        let answer = creation_error(&node, &pod, requested("unknown", "64KB", 8));
        assert!(answer.contains("Unimplemented") && answer.contains("2MB"), "{answer}");
        assert_eq!(pages(), "8");
        assert!(!volume.0.join("file").exists(), "the node's has no part in it");

        // A container without a limit gets no pages.
        let zero = pod.start(requested("zero", "2MB", 0));
        assert_ne!(zero.exec("rm /huge/more && fallocate -l 2M /huge/zero").code, 0);
        assert_eq!(zero.exec("cat /sys/fs/cgroup/hugetlb.2MB.max").ok(), "0");
        assert_eq!(pages(), "8");

        two.exec("rm /huge/two").ok();
        node.crictl.call(["rm", "--force", &two.id]);
        assert_eq!(pages(), "6");
        // An ended container holds no pages.
        let three = pod.start(requested("three", "2MB", 4));
        node.crictl.call(["stop", "--timeout", "0", &three.id]);
        let four = pod.start(requested("four", "2MB", 2));
        assert_eq!(pages(), "7");
        four.exec("fallocate -l 2M /huge/four").ok();
        pod.remove();
    }
    drop(volume);
}

#[test]
fn huge_pages_of_one_gibibyte_work_where_the_cpu_supports_them() {
    if engine() == "host" {
        println!("skipped: without a guest huge pages are the node's");
        return;
    }
    let extra = handler_config("large", "memory_mib = 2304\nscratch_mib = 512\n");
    let node = TestNode::with_options(NodeOptions { extra, ..NodeOptions::default() });
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let volume = Mounted::new(&node, "giant", "hugetlbfs", "pagesize=1G");
    {
        let pod = node.crictl.run_pod_with_handler("large", PodRequest::new("giant", node.directory()));
        let look = pod.start(ContainerRequest::sh("look", &image, "sleep 600"));
        let requested = |name: &str, pages: u64| {
            let limits = json!([{"page_size": "1GB", "limit": pages << 30}, {"page_size": "2MB", "limit": 0}]);
            let container = ContainerRequest::sh(name, &image, "sleep 600");
            let container = container.set("linux", json!({"resources": {"hugepage_limits": limits}}));
            container.set("mounts", json!([mount(&volume.0, "/giant")]))
        };
        if look.exec("grep -qw pdpe1gb /proc/cpuinfo").code == 0 {
            let one = pod.start(requested("one", 1));
            assert_eq!(one.exec("stat -f -c '%t %S' /giant").ok(), format!("958458f6 {}", 1 << 30));
            one.exec("fallocate -l 1G /giant/file").ok();
            assert_eq!(one.exec("cat /sys/fs/cgroup/hugetlb.1GB.current").ok(), (1 << 30).to_string());
            assert_ne!(one.exec("fallocate -l 1G /giant/more").code, 0);
            let answer = creation_error(&node, &pod, requested("two", 2));
            assert!(answer.contains("ResourceExhausted") && answer.contains("more memory"), "{answer}");
        } else {
            let answer = creation_error(&node, &pod, requested("one", 1));
            assert!(answer.contains("Unimplemented") && answer.contains("2MB"), "{answer}");
            println!("this processor has none");
        }
        pod.remove();
    }
    drop(volume);
}
