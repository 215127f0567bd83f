//! Tests the file systems of containers with fsx and pjdfstest: the root file system, a directory of the node, a block device of
//! the node and a directory in the guest's memory. `ci/lib.sh` (need_fs_tests) builds both; docs/contributor/volumes.md has the
//! results.

use nacelle_e2e::node::engine;
use nacelle_e2e::run::run_program;
use nacelle_e2e::{ContainerRequest, PodRequest, TestImage, TestNode, eventually, path_from_env};
use serde_json::json;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;

/// Returns the number of fsx operations on a file, and the pjdfstest tests to run (their names; empty for all). There are fewer
/// where a file request takes milliseconds, as in the emulated node: the guest's kernel and `nacelle-fs` are the same under both
/// engines.
fn test_extent() -> (u32, &'static str) {
    if engine() == "kvm" { (300, "open rename") } else { (3000, "") }
}

/// The directories of the suites.
const DIRECTORIES: [&str; 4] = ["/own", "/shared", "/block", "/dev/shm"];

/// All file operations of Linux; `invalidate` needs only msync.
const FSX: &str = "flen = 262144\n[opsize]\nmax = 65536\n[weights]\nclose_open = 1.0\ninvalidate = 1.0\nmapread = 5.0\n\
    mapwrite = 5.0\nread = 5.0\nwrite = 5.0\ntruncate = 3.0\nfsync = 0.5\nfdatasync = 0.5\nposix_fallocate = 1.0\n\
    punch_hole = 1.0\nsendfile = 2.0\nposix_fadvise = 1.0\ncopy_file_range = 2.0\n";

const PJDFSTEST: &str = "[features]\nposix_fallocate = {}\nrename_ctime = {}\nutime_now = {}\nutimensat = {}\n\
    [settings]\nnaptime = 0.02\nallow_remount = false\n[dummy_auth]\nentries = [[\"nobody\", \"nobody\"], [\"app\", \"app\"]]\n";

/// Returns whether a failure is known.
fn is_known_failure(place: &str, test: &str) -> bool {
    // The suite makes devices 0:0, which are an overlay's whiteouts: the file systems of containers do not show them.
    let whiteout = place == "/own" && test.ends_with("::char");
    // A VM cannot create devices on a directory of the node (docs/contributor/devices/fs.md).
    let device = place == "/shared" && engine() != "host" && (test.ends_with("::block") || test.ends_with("::char"));
    // The suite runs a copy of `sleep` under another name, at which busybox exits at once; the same check without it is below.
    let busybox = test.ends_with("::etxtbsy");
    whiteout || device || busybox
}

/// A loop device, by its name from losetup.
struct LoopDevice(String);

impl Drop for LoopDevice {
    fn drop(&mut self) {
        run_program("losetup", ["--detach", &self.0]);
    }
}

#[test]
fn the_file_systems_of_containers_conform_to_posix() {
    let node = TestNode::new();
    let program = |variable: &str| fs::read(path_from_env(variable)).expect("ci/lib.sh built it");
    let (fsx, pjdfstest) = (program("NACELLE_FSX"), program("NACELLE_PJDFSTEST"));
    let image = TestImage::busybox().with_layer(|layer| {
        layer.add_file("bin/fsx", &fsx, 0o755);
        layer.add_file("bin/pjdfstest", &pjdfstest, 0o755);
        layer.add_file("etc/fsx.toml", FSX.as_bytes(), 0o644);
        layer.add_file("etc/pjdfstest.toml", PJDFSTEST.as_bytes(), 0o644);
    });
    let image = node.push_and_pull(&image, "filesystems:1");
    let shared = node.directory().join("shared");
    fs::create_dir(&shared).expect("the node's directory is writable");
    fs::set_permissions(&shared, fs::Permissions::from_mode(0o777)).expect("it is ours");
    let disk = node.directory().join("disk.ext4");
    run_program("truncate", ["--size=64M".as_ref(), disk.as_os_str()]).ok();
    run_program("mkfs.ext4", ["-q".as_ref(), disk.as_os_str()]).ok();
    let disk = LoopDevice(run_program("losetup", ["--find".as_ref(), "--show".as_ref(), disk.as_os_str()]).ok());
    // Privileged, because a third of the tests is about root's rights.
    let pod = PodRequest::new("files", node.directory());
    let pod = node.crictl.run_pod(pod.set("linux", json!({"security_context": {"privileged": true}})));
    let container = pod.start(
        ContainerRequest::sh("c", &image, "sleep 3600")
            .set("mounts", json!([{"host_path": shared, "container_path": "/shared"}]))
            .set("devices", json!([{"host_path": disk.0, "container_path": "/dev/disk", "permissions": "rwm"}]))
            .set("linux", json!({"security_context": {"privileged": true}})),
    );
    container.exec("mkdir -m 777 /own /block && mount -t ext4 /dev/disk /block && chmod 777 /block").ok();
    let mut wrong = Vec::new();
    let (operations, tests) = test_extent();
    for place in DIRECTORIES {
        for seed in ["1", "20261122"] {
            let run =
                format!("cd {place} && fsx -f /etc/fsx.toml -N {} -S {seed} -P {place} {place}/fsx 2>&1", operations);
            let output = container.exec(&run);
            println!("{} fsx {place} {seed}: {}", engine(), output.code);
            if output.code != 0 {
                wrong.push(format!("fsx {place}, seed {seed}: {output:?}"));
            }
        }
        // Programs cannot run from /dev/shm.
        let busy = container.exec(&format!(
            "cp /bin/busybox {place}/; {place}/busybox sleep 5 >/dev/null 2>&1 & sleep 1; echo >>{place}/busybox"
        ));
        if place != "/dev/shm" && !busy.stderr.contains("Text file busy") {
            wrong.push(format!("a program that runs can be written in {place}: {busy:?}"));
        }
        let output = container.exec(&format!("pjdfstest -c /etc/pjdfstest.toml -p {place} {tests} 2>&1; true")).ok();
        println!("{} pjdfstest {place}: {}", engine(), output.lines().last().unwrap_or_default());
        let failed: BTreeSet<&str> = output
            .lines()
            .filter(|line| line.ends_with("FAILED"))
            .filter_map(|line| line.split_whitespace().next())
            .collect();
        assert!(output.contains("Summary: "), "{output}");
        for test in failed.iter().filter(|test| !is_known_failure(place, test)) {
            wrong.push(format!("pjdfstest {place}: {test}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    pod.remove();
    assert_eq!(node.leaked(), Vec::<String>::new());
}

#[test]
fn deleted_files_of_a_root_free_space_in_the_guest_and_on_the_node() {
    if engine() == "host" {
        println!("skipped: without a guest the root is a directory of the node");
        return;
    }
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(PodRequest::new("removing", node.directory()));
    let one = pod.start(ContainerRequest::sh("one", &image, "sleep 600"));
    // The disk's file is unlinked; the process that has it open leads to it.
    let open = |pid| fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten().map(|file| file.path());
    let is_disk =
        |path: &PathBuf| fs::read_link(path).is_ok_and(|file| file.to_string_lossy().contains(".ext4 (deleted)"));
    let disk = node
        .pids_matching("nacelle-pod --dir ")
        .into_iter()
        .flat_map(open)
        .find(is_disk)
        .expect("the pod's disk is open");
    let taken = || fs::metadata(&disk).expect("it stays open").blocks() / 2;
    let before = taken();
    one.exec("dd if=/dev/urandom of=/much bs=1M count=24; mkdir /many; for n in $(seq 300); do echo $n >/many/$n; done; sync").ok();
    assert!(taken() > before + (24 << 10), "{} KiB, {before} before", taken());
    one.exec("rm -r /much /many").ok();
    eventually("the discarded space is released", || (taken() < before + (1 << 10)).then_some(()));

    // Space that the disk is releasing counts as free, even if there is hardly any other. Half a GiB takes minutes where the node
    // is emulated.
    if engine() != "kvm" {
        let round = |pause: &str| {
            format!(
                "for n in $(seq 8); do dd if=/dev/zero of=/much bs=1M count=32 conv=fsync || exit 1; {pause}; rm /much; done"
            )
        };
        one.exec("fallocate -l $(($(df -k / | awk 'END {print $4}') - 40960))k /most").ok();
        for pause in ["true", "sleep 0.$n"] {
            one.exec(&round(pause)).ok();
        }
    }
    pod.remove();
}
