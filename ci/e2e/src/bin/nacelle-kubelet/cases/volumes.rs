//! Tests volumes.

use super::CaseResult;
use super::pod_features::{waiting, with_directory};
use crate::fixture::KubeletFixture;
use crate::pods::{ObservedPod, StaticPod};
use std::fs;

pub fn empty_dir_volumes(fixture: &KubeletFixture) -> CaseResult {
    let pod = StaticPod::example(fixture, "scratch");
    pod.wait_until_ready();
    let reader = |script: &str| pod.shell("reader", script, b"");
    // Ready only means that both containers were started.
    let words = || reader("cat /disk/word /memory/word").stdout;
    crate::pods::wait_for("the writer's words", || (words() == "on disk\nin memory\n").then_some(()));
    assert_ne!(reader("touch /disk/file").code(), Some(0), "a read-only volume");
    // A write of one container is visible to the other, also in a subPath.
    assert_eq!(reader("echo mine >/seen/part").code(), Some(0));
    assert_eq!(pod.run("writer", &["cat", "/disk/sub/part"]), "mine");
    // The limit of the in-memory volume is that of the file system.
    let full = reader("dd if=/dev/zero of=/memory/much bs=1M count=16");
    assert!(full.code() != Some(0) && full.stderr.contains("No space left"), "{full:?}");
    pod.remove();
    CaseResult::Passed
}

pub fn huge_pages(fixture: &KubeletFixture) -> CaseResult {
    // The huge pages that the node offers to pods: kubelet admits no pod beyond them.
    let pool = fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages").unwrap_or_default();
    if pool.trim().parse().unwrap_or(0) < 4 {
        return CaseResult::Skipped("the node has no four huge pages in its pool");
    }
    let controllers = fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").unwrap_or_default();
    if nacelle_e2e::node::engine() == "host" && !controllers.contains("hugetlb") {
        return CaseResult::Skipped("without machines containers have no limits on a node with cgroup v1");
    }
    let pod = StaticPod::example(fixture, "huge-pages");
    pod.wait_until_ready();
    let shell = |container: &str, script: &str| pod.shell(container, script, b"");
    crate::pods::wait_for("the owner's file", || {
        (shell("other", "stat -c %s /pages/file").stdout == "4194304\n").then_some(())
    });
    // HUGETLBFS_MAGIC, whose name busybox does not know.
    assert_eq!(shell("owner", "stat -f -c '%t %S' /pages").stdout, "958458f6 2097152\n");
    if nacelle_e2e::node::engine() != "host" {
        assert_eq!(shell("owner", "awk '/^HugePages_Total/ {print $2}' /proc/meminfo").stdout, "4\n");
    }
    // A container without a limit gets none, and one with a limit gets no more than that.
    assert_ne!(shell("other", "fallocate -l 2M /pages/other").code(), Some(0));
    assert_eq!(shell("owner", "rm -f /pages/other && fallocate -l 4M /pages/more").code(), Some(0));
    assert_ne!(shell("owner", "fallocate -l 2M /pages/too-much").code(), Some(0));
    pod.remove();
    CaseResult::Passed
}

pub fn host_path_volumes(fixture: &KubeletFixture) -> CaseResult {
    let directory = fixture.directory("data");
    fs::write(directory.join("from-node"), "word of the node\n").expect("writable");
    let pod = StaticPod::new(fixture, "node-directory", &with_directory("node-directory", "/srv/data", &directory));
    pod.wait_until_ready();
    let main = |script: &str| pod.shell("main", script, b"");
    crate::pods::wait_for("the pod's word is on the node", || {
        let word = fs::read_to_string(directory.join("from-pod")).unwrap_or_default();
        (word == "word of the node\n").then_some(())
    });
    fs::write(directory.join("later"), "later\n").expect("writable");
    assert_eq!(main("cat /data/later /data-ro/later").stdout, "later\nlater\n");
    assert_ne!(main("touch /data-ro/file").code(), Some(0));
    assert_eq!(main("echo deep >/part/file").code(), Some(0));
    assert_eq!(fs::read_to_string(directory.join("part/of/it/file")).expect("it is there"), "deep\n");
    assert_eq!(main("cat /etc/os-release").stdout, fs::read_to_string("/etc/os-release").expect("Debian"));
    pod.remove();
    assert_eq!(fs::read_to_string(directory.join("from-pod")).expect("it stays"), "word of the node\n");
    CaseResult::Passed
}

pub fn image_volume(fixture: &KubeletFixture) -> CaseResult {
    let image =
        nacelle_e2e::TestImage::busybox().with_layer(|layer| layer.add_file("model/weights", b"0 1 1 2 3 5", 0o644));
    fixture.node.registry.push(&image, "library/model:1");
    let volume = "  volumes: [{name: model, image: {reference: \"model:1\", pullPolicy: IfNotPresent}}]\n";
    let mounts = "    volumeMounts:\n    - {name: model, mountPath: /image}\n    \
                  - {name: model, mountPath: /model, subPath: model}\n";
    let pod = StaticPod::new(fixture, "image-volume", &waiting("image-volume", volume, mounts));
    pod.wait_until_ready();
    assert_eq!(pod.run("main", &["cat", "/image/model/weights", "/model/weights"]), "0 1 1 2 3 50 1 1 2 3 5");
    assert_ne!(pod.try_run("main", &["touch", "/image/file"]).code, 0);
    pod.remove();
    CaseResult::Passed
}
