//! Measures file systems with fio: in our pods, in containerd's containers on the same disk, and in plain QEMU with Debian's
//! virtiofsd.

use crate::containerd::Containerd;
use crate::cri::{BenchPod, RuntimeClient};
use crate::median;
use nacelle_e2e::node::{NodeOptions, engine, handler_config};
use nacelle_e2e::run::run_program;
use nacelle_e2e::{TestImage, TestNode, eventually, path_from_env};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The benchmarks: the name, fio's options, and the figure of fio's result.
const JOBS: [(&str, &str, &str); 7] = [
    ("read, MB/s", "--rw=read --bs=128k --size=64m", "read.bw_bytes"),
    ("random reads of 4 KiB, /s", "--rw=randread --bs=4k --size=64m --runtime=4", "read.iops"),
    ("write and flush, MB/s", "--rw=write --bs=128k --size=64m --end_fsync=1", "write.bw_bytes"),
    ("writes of 4 KiB, each flushed, /s", "--rw=randwrite --bs=4k --size=8m --fsync=1 --runtime=4", "write.iops"),
    ("files made, /s", "--ioengine=filecreate --filesize=4k --nrfiles=2000", "read.iops"),
    ("stat, /s", "--ioengine=filestat --filesize=4k --nrfiles=2000", "read.iops"),
    ("files removed, /s", "--ioengine=filedelete --filesize=4k --nrfiles=2000", "read.iops"),
];

/// The directories in a container that are measured.
const DIRECTORIES: [(&str, &str); 4] =
    [("/own", "root"), ("/shared", "volume"), ("/empty", "emptyDir"), ("/block", "block volume")];

/// The handler whose emptyDirs are disks of VMs.
const DISK_HANDLER: &str = "disks";

/// Separates the results of the jobs in the output of a guest.
const JOB_SEPARATOR: &str = "=====";
/// The time limit of a VM for all jobs.
const VM_LIMIT: Duration = Duration::from_secs(600);

/// Runs the jobs `runs` times, alternating between all directories, or only on our volume and in plain QEMU. Returns
/// `[{"runtime", "operation", "p50", "samples"}, ...]`.
pub fn measure(runs: usize, only_volumes: bool) -> Value {
    let node =
        TestNode::with_options(NodeOptions { ipv6: false, extra: disk_handler_config(), ..NodeOptions::default() });
    let fio = fio_files();
    let image = node.registry.push(&fio_image(&fio), "fio:1");
    let shared = |name: &str| {
        let directory = node.directory().join(name);
        fs::create_dir(&directory).expect("the node's directory is writable");
        directory
    };
    let directories = [shared("ours"), shared("containerd's"), shared("qemu's")];
    let (containerd, mut theirs) = Containerd::start(&node);
    let mut ours = RuntimeClient::connect(&node.directory().join("nacelle.sock"), &node.directory().join("logs"));
    let disks = ["ours.raw", "containerd's.raw"].map(|name| LoopDisk::new(&node.directory().join(name)));
    // The path of an emptyDir of kubelet: a disk of the VM, which containerd does not have.
    let empty = node.directory().join("pods/p/volumes/kubernetes.io~empty-dir/empty");
    fs::create_dir_all(&empty).expect("the node's directory is writable");
    let shared = [(directories[0].as_path(), "/shared"), (&empty, "/empty")];
    let (our_pod, our_container) = start_pod(&mut ours, &image, DISK_HANDLER, &shared, &disks[0]);
    let (their_pod, their_container) = start_pod(&mut theirs, &image, "", &[(&directories[1], "/shared")], &disks[1]);
    let machine = (engine() != "host").then(|| QemuGuest::new(&node, &fio, &directories[2]));
    let mut samples: BTreeMap<(String, usize), Vec<f64>> = BTreeMap::new();
    let mut add = |runtime: String, output: &str| {
        for (job, figure) in parse_results(output).into_iter().enumerate() {
            samples.entry((runtime.clone(), job)).or_default().push(figure);
        }
    };
    // The first run of each does not count.
    for run in 0..=runs {
        for (directory, what) in
            DIRECTORIES.into_iter().filter(|(directory, _)| !only_volumes || *directory == "/shared")
        {
            let name = |who: &str| format!("{who}, {what}");
            let both = [
                (&mut ours, &our_container, format!("nacelle {}", engine())),
                (&mut theirs, &their_container, "containerd".to_owned()),
            ];
            for (cri, container, who) in
                both.into_iter().take(if only_volumes || directory == "/empty" { 1 } else { 2 })
            {
                let output = cri.exec_output(container, &["/bin/sh", "-c", &fio_script(directory)]);
                if run > 0 {
                    add(name(&who), &output);
                }
            }
        }
        if let Some(machine) = &machine {
            let output = machine.run();
            if run > 0 {
                add("qemu, Debian's virtiofsd".to_owned(), &output);
            }
        }
    }
    ours.remove_pod(&our_pod);
    theirs.remove_pod(&their_pod);
    drop(containerd);
    let row = |((runtime, job), samples): ((String, usize), Vec<f64>)| json!({"runtime": runtime, "operation": JOBS[job].0, "p50": median(&samples), "samples": samples});
    samples.into_iter().map(row).collect()
}

/// Starts a privileged pod with one container that has these directories and mounts the disk; returns the pod and the container's id.
fn start_pod(
    cri: &mut RuntimeClient,
    image: &str,
    handler: &str,
    directories: &[(&Path, &str)],
    LoopDisk(device): &LoopDisk,
) -> (BenchPod, String) {
    cri.pull(image);
    let pod = cri.run_pod_with(handler, true).0;
    let command = format!("mkdir /own /block && mount -t ext4 {device} /block && echo here; sleep 100000");
    let container = cri.start_with_volumes(&pod, image, &["/bin/sh", "-c", &command], directories, Some(device)).0;
    (pod, container)
}

/// Returns the script that runs all jobs in a directory and prints fio's results. It drops the files from the caches of the
/// system where it runs.
fn fio_script(directory: &str) -> String {
    JOBS.iter().fold(format!("cd {directory} && rm -rf job && mkdir job && cd job"), |script, (_, options, _)| {
        format!(
            "{script}; sync; echo {JOB_SEPARATOR}; fio --name=job --thread --ioengine=psync {options} --output-format=json 2>&1; echo {JOB_SEPARATOR}"
        )
    })
}

/// Returns the figures of all jobs from the output of the script.
fn parse_results(output: &str) -> Vec<f64> {
    let answers: Vec<&str> = output.split(JOB_SEPARATOR).skip(1).step_by(2).collect();
    assert_eq!(answers.len(), JOBS.len(), "{output}");
    let figure = |(answer, (name, _, path)): (&str, &(&str, &str, &str))| {
        // Warnings may precede the JSON.
        let json = answer.find('{').and_then(|start| answer.get(start..)).unwrap_or_default();
        let parsed: Value = serde_json::from_str(json).unwrap_or_else(|error| panic!("{name}: {error}: {answer}"));
        let value = path.split('.').fold(&parsed["jobs"][0], |value, key| &value[key]).as_f64();
        let value = value.filter(|value| *value > 0.0).unwrap_or_else(|| panic!("{name}: no {path}: {answer}"));
        if path.ends_with("bw_bytes") { value / 1e6 } else { value }
    };
    answers.into_iter().zip(&JOBS).map(figure).collect()
}

/// Returns fio and its libraries: their paths in a root, and their contents. `NACELLE_FIO` is a directory with such a root.
fn fio_files() -> Vec<(String, Vec<u8>)> {
    let root = path_from_env("NACELLE_FIO");
    let found = run_program("find", [root.as_os_str(), "-type".as_ref(), "f".as_ref()]).ok();
    let files = found.lines().map(|file| {
        let path = Path::new(file).strip_prefix(&root).expect("it lies there");
        (path.to_str().expect("UTF-8").to_owned(), fs::read(file).expect("it can be read"))
    });
    files.collect()
}

fn fio_image(files: &[(String, Vec<u8>)]) -> TestImage {
    TestImage::busybox().with_layer(|layer| {
        for (path, bytes) in files {
            layer.add_file(path, bytes, 0o755);
        }
        layer.add_symlink("bin/fio", "/usr/bin/fio");
    })
}

/// Returns the configuration of [`DISK_HANDLER`].
fn disk_handler_config() -> String {
    handler_config(DISK_HANDLER, "empty_dir = \"disk\"\nempty_dir_mib = 512\n")
}

/// A loop device with a file system. Dropping it detaches it.
struct LoopDisk(String);

impl LoopDisk {
    fn new(file: &Path) -> LoopDisk {
        run_program("truncate", ["--size=512M".as_ref(), file.as_os_str()]).ok();
        run_program("mkfs.ext4", ["-q".as_ref(), file.as_os_str()]).ok();
        LoopDisk(run_program("losetup", ["--find".as_ref(), "--show".as_ref(), file.as_os_str()]).ok())
    }
}

impl Drop for LoopDisk {
    fn drop(&mut self) {
        run_program("losetup", ["--detach", &self.0]);
    }
}

/// A plain QEMU microvm with an unpatched kernel. Each boot runs the jobs once on a directory of the node, over Debian's
/// virtiofsd.
struct QemuGuest {
    directory: PathBuf,
    shared: PathBuf,
}

impl QemuGuest {
    fn new(node: &TestNode, files: &[(String, Vec<u8>)], shared: &Path) -> QemuGuest {
        let directory = node.directory().join("qemu");
        let root = directory.join("root");
        let write = |path: &str, bytes: &[u8]| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().expect("it has one")).expect("the node's directory is writable");
            fs::write(&path, bytes).expect("the node's directory is writable");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("it is ours");
        };
        for (path, bytes) in files {
            write(path, bytes);
        }
        write("bin/busybox", &fs::read("/bin/busybox").expect("busybox-static is installed"));
        for directory in ["proc", "sys", "dev", "tmp", "shared"] {
            fs::create_dir(root.join(directory)).expect("the node's directory is writable");
        }
        let init = format!(
            "#!/bin/busybox sh\n/bin/busybox --install -s /bin\nmount -t proc p /proc\nmount -t devtmpfs d /dev\necho 1 >/proc/sys/vm/overcommit_memory\n\
             mkdir /dev/shm\nmount -t tmpfs s /dev/shm\nmount -t tmpfs t /tmp\nmount -t virtiofs shared /shared || reboot -f\n\
             export PATH=/bin:/usr/bin\n({})\nsync\nreboot -f\n",
            fio_script("/shared")
        );
        write("init", init.as_bytes());
        let disk = directory.join("disk");
        run_program("mkfs.ext4", ["-q".as_ref(), "-d".as_ref(), root.as_os_str(), disk.as_os_str(), "200M".as_ref()])
            .ok();
        QemuGuest { directory, shared: shared.to_owned() }
    }

    /// Boots the VM and returns its output.
    fn run(&self) -> String {
        let socket = self.directory.join("fs.sock");
        // A socket of an earlier run.
        let _ = fs::remove_file(&socket);
        let log = |name: &str| File::create(self.directory.join(name)).expect("the node's directory is writable");
        let mut server = Command::new("/usr/lib/qemu/virtiofsd");
        server
            .arg(format!("--socket-path={}", socket.display()))
            .arg("-o")
            .arg(format!("source={}", self.shared.display()));
        let server = server.stdin(Stdio::null()).stdout(log("fs.out")).stderr(log("fs.err")).spawn();
        let mut server = KillOnDrop(server.expect("Debian's QEMU has virtiofsd"));
        eventually("virtiofsd listens", || socket.exists().then_some(()));
        let accel = if engine() == "kvm" { "kvm" } else { "tcg" };
        let mut machine = Command::new("qemu-system-x86_64");
        machine.args(["-M", &format!("microvm,acpi=off,pit=on,pic=on,isa-serial=on,accel={accel},memory-backend=ram")]);
        machine.args([
            "-cpu",
            "max",
            "-m",
            "256",
            "-smp",
            "1",
            "-object",
            "memory-backend-memfd,id=ram,size=256M,share=on",
        ]);
        machine.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-serial", "stdio"]);
        machine.args(["-global", "virtio-mmio.force-legacy=false"]);
        machine.arg("-chardev").arg(format!("socket,id=fs,path={}", socket.display()));
        machine.args(["-device", "vhost-user-fs-device,chardev=fs,tag=shared"]);
        machine.arg("-drive").arg(format!("id=disk,file={},format=raw,if=none", self.directory.join("disk").display()));
        machine.args(["-device", "virtio-blk-device,drive=disk", "-append"]);
        machine.arg("console=ttyS0 quiet reboot=t panic=-1 root=/dev/vda rw init=/init");
        machine.arg("-kernel").arg(path_from_env("NACELLE_PLAIN_KERNEL"));
        machine.stdin(Stdio::null()).stdout(log("console")).stderr(log("qemu.err"));
        let mut machine = KillOnDrop(machine.spawn().expect("QEMU is installed"));
        let start = Instant::now();
        while machine.0.try_wait().expect("QEMU is our child").is_none() {
            assert!(start.elapsed() < VM_LIMIT, "the guest does not end; see {}", self.directory.display());
            std::thread::sleep(Duration::from_millis(50));
        }
        server.0.wait().expect("virtiofsd is our child, and ends with QEMU");
        let console = fs::read_to_string(self.directory.join("console")).expect("the node's directory is readable");
        console.replace('\r', "")
    }
}

/// A child that is killed when this is dropped.
struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
