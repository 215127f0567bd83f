//! Tests the sandbox of the pod process on a node with a real VM, and leaks after it dies.

use nacelle_e2e::machine::{annotated_pod, machine_container, machine_node, push_boot_image};
use nacelle_e2e::node::{NodeOptions, SMALL_VM, engine, handler_config};
use nacelle_e2e::path_from_env;
use nacelle_e2e::run::run;
use nacelle_e2e::{ContainerRequest, PodRequest, TestImage, TestNode, eventually};
use nix::libc;
use nix::sys::ptrace;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// Returns the fields of a status file of /proc.
fn read_proc_status(path: &Path) -> BTreeMap<String, String> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().filter_map(|line| line.split_once(':')).map(|(k, v)| (k.to_owned(), v.trim().to_owned())).collect()
}

/// Returns the /proc directory of the only pod process.
fn pod_process_directory(node: &TestNode) -> PathBuf {
    let pids = node.pids_matching("nacelle-pod --dir ");
    assert_eq!(pids.len(), 1);
    PathBuf::from(format!("/proc/{}", pids[0]))
}

/// Returns what `nacelle check --jail` prints of a pod, with the words of the page for what differs between pods and nodes.
fn report_of_jail(node: &TestNode, pod: &str) -> Vec<String> {
    let program: PathBuf = path_from_env("NACELLE_BIN");
    let config = node.directory().join("config.toml");
    let report = run(Command::new(program).args(["check", "--jail", pod, "--config"]).arg(config)).ok();
    println!("{report}");
    let mut lines: Vec<_> = report.lines().collect();
    assert_eq!(lines.pop(), Some("check: the pod process has what its jail leaves it"));
    let without_number = |line: &str, before: &str, word: &str| {
        let (start, end) = line.split_once(before)?;
        Some(format!("{start}{before}{word}{}", end.trim_start_matches(char::is_numeric)))
    };
    let normalise = |line: &str| {
        let user = without_number(line, "user and group ", "UID");
        // A node whose own limit is lower keeps it.
        let limit = without_number(line, "nofile ", "262144");
        let files = line.split_once("files    ").map(|(start, _)| format!("{start}files    …"));
        user.or(limit).or(files).unwrap_or_else(|| line.to_owned())
    };
    lines.into_iter().map(normalise).collect()
}

/// Returns the first report on the page about the jail, which is that of a VM, or the second one.
fn documented_report(has_vm: bool) -> Vec<String> {
    let page = include_str!("../../../docs/contributor/jail.md");
    let blocks = page.split("```text\n").skip(1).filter(|block| block.starts_with("ok   user"));
    let block = blocks.into_iter().nth(usize::from(!has_vm)).and_then(|block| block.split("```").next());
    block.expect("the page has a report for each").lines().map(str::to_owned).collect()
}

/// Returns the user of a process, which is also its group.
fn only_user(pid: i32) -> u32 {
    let status = read_proc_status(Path::new(&format!("/proc/{pid}/status")));
    let ids = status["Uid"].split_whitespace().chain(status["Gid"].split_whitespace());
    let ids: BTreeSet<&str> = ids.collect();
    assert_eq!(ids.len(), 1, "{ids:?}");
    ids.first().and_then(|id| id.parse().ok()).expect("a number")
}

#[test]
fn a_pod_process_has_no_capabilities_and_only_its_own_files() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(PodRequest::new("jailed", node.directory()));
    let container = pod.start(ContainerRequest::sh("c", &image, "echo up; sleep 600"));
    container.wait_for_output("up");
    let process = pod_process_directory(&node);
    let mut threads = 0;
    for task in fs::read_dir(process.join("task")).expect("it runs").flatten() {
        let status = read_proc_status(&task.path().join("status"));
        // A process that has ended meanwhile has no status.
        let Some(name) = status.get("Name") else { continue };
        assert_eq!((status["NoNewPrivs"].as_str(), status["Seccomp"].as_str()), ("1", "2"), "{name}");
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(status[set].trim_start_matches('0'), "", "{name} {set}");
        }
        threads += 1;
    }
    assert!(threads > 4, "{threads}");
    let numbers = read_proc_status(&process.join("status"))["NSpid"].clone();
    if engine() != "host" {
        assert_eq!(numbers.split_whitespace().nth(1), Some("1"), "process 1 of a PID namespace of its own: {numbers}");
    }
    // Its user belongs to no other pod, and its files belong to that user.
    let other = node.crictl.run_pod(PodRequest::new("other", node.directory()));
    let users: BTreeSet<u32> = node.pids_matching("nacelle-pod --dir ").iter().map(|pid| only_user(*pid)).collect();
    if engine() == "host" {
        assert_eq!(users, BTreeSet::from([0]));
    } else {
        assert_eq!((users.len(), users.contains(&0)), (2, false), "{users:?}");
        let jails = fs::read_dir(node.directory().join("run/pods")).expect("run directories").flatten();
        let owners = jails.map(|pod| fs::metadata(pod.path().join("jail")).expect("its directory").uid());
        assert_eq!(owners.collect::<BTreeSet<u32>>(), users);
    }
    other.remove();
    assert_eq!(report_of_jail(&node, &pod.id), documented_report(engine() != "host"));
    // The daemon's store, other pods and the node are invisible.
    let root = process.join("root");
    let directory = |name: &str| root.join(node.directory().strip_prefix("/").expect("absolute")).join(name);
    let disks = fs::read_dir(directory("root/scratch")).map_or(0, Iterator::count);
    assert_eq!(disks, usize::from(engine() != "host"), "its own disk if it has a VM, and no template");
    for gone in ["root/images", "root/state.redb", "root/cni", "config.toml", "nacelle.sock", "netns"] {
        assert!(!directory(gone).exists(), "{gone}");
    }
    let log_directory = fs::read_dir(node.directory()).expect("the node's directory").flatten();
    let log_directory =
        log_directory.map(|entry| entry.path()).find(|path| path.to_string_lossy().contains("/jailed-"));
    let log_directory = log_directory.expect("the container has a log");
    assert!(!root.join(log_directory.strip_prefix("/").expect("absolute")).exists());
    for gone in ["proc/self", "sys/kernel", "etc/passwd", "var/lib", "boot", "dev/net/tun"] {
        assert!(!root.join(gone).exists(), "{gone}");
    }
    let groups = nacelle_e2e::census::cgroups(node.directory());
    for group in &groups {
        let members = processes_of_cgroup(group);
        assert!(members.iter().any(|pid| process.ends_with(pid)), "{}: {members:?}", group.display());
    }
    println!("{threads} threads, {} control groups", groups.len());
}

/// Returns the pids in a cgroup and its children: without a VM, the agent and the pod process are in children of the pod's cgroup.
fn processes_of_cgroup(group: &Path) -> Vec<String> {
    let members = fs::read_to_string(group.join("cgroup.procs")).expect("a control group");
    let children = fs::read_dir(group).expect("a control group").flatten().map(|entry| entry.path());
    let below = children.filter(|path| path.is_dir()).flat_map(|child| processes_of_cgroup(&child));
    members.lines().map(str::to_owned).chain(below).collect()
}

#[test]
fn the_processes_of_a_machine_pod_have_a_user_of_their_own() {
    if engine() == "host" {
        println!("skipped: engine host has no machine pods");
        return;
    }
    let node = machine_node();
    let image = push_boot_image(&node);
    let disks = format!("root=image:{image},boot=1;data=empty:1Mi");
    let vm = [("kind", "machine"), ("memory", "64Mi"), ("disks", disks.as_str()), ("name", "db")];
    let mut users = BTreeSet::new();
    for run in 1..=2 {
        let pod = node.crictl.run_pod_with_handler("vm", annotated_pod(&node, "db", &vm));
        let container = pod.start(machine_container(&image, run - 1));
        container.wait_for_output(&format!("boot {run}\n"));
        let [process, keeper, qemu] = ["nacelle-pod --dir ", "nacelle-keeper ", " -uuid "].map(|word| {
            let pids = node.pids_matching(word);
            assert_eq!(pids.len(), 1, "{word}");
            pids[0]
        });
        let user = only_user(process);
        assert_eq!((only_user(keeper), only_user(qemu)), (user, user));
        assert_ne!(user, 0);
        users.insert(user);
        for pid in [process, keeper, qemu] {
            assert_eq!(read_proc_status(Path::new(&format!("/proc/{pid}/status")))["Groups"], "", "{pid}");
        }
        // QEMU's own filter would end it.
        for pid in [process, keeper] {
            let returned = call_setuid_root(nix::unistd::Pid::from_raw(pid)).expect("it can be traced");
            assert_eq!((returned, only_user(pid)), (-i64::from(libc::EPERM), user));
        }
        assert_eq!(report_of_jail(&node, &pod.id)[0], "ok   user     user and group UID, no other groups");
        // The files that it writes stay root's, because the VM outlives its user; its sockets are its own.
        let root = node.directory().join("root");
        let files = files_below(&root.join("machines")).into_iter().chain(files_below(&root.join("scratch")));
        let files: Vec<PathBuf> = files.collect();
        assert!(files.iter().any(|path| path.ends_with("root.qcow2")), "{files:?}");
        for path in &files {
            let file = fs::symlink_metadata(path).expect("the VM keeps it");
            assert_eq!((file.uid(), file.gid()), (0, 0), "{}", path.display());
        }
        // Of the image store it sees the layers, and neither its list nor its lock, which it could hold.
        let images = root.join("images");
        let seen = images.strip_prefix("/").expect("an absolute path");
        for pid in [process, keeper, qemu] {
            let seen = fs::read_dir(PathBuf::from(format!("/proc/{pid}/root")).join(seen)).expect("it sees layers");
            let names: Vec<_> = seen.map(|entry| entry.expect("it is readable").file_name()).collect();
            assert_eq!(names, ["layers"], "{pid}");
        }
        let jail = fs::read_dir(node.directory().join("run/pods")).expect("run directories").flatten().next();
        let jail = files_below(&jail.expect("that of the pod").path().join("jail"));
        assert!(!jail.is_empty() && jail.iter().all(|path| fs::symlink_metadata(path).is_ok_and(|f| f.uid() == user)));
        pod.remove();
    }
    println!("users of two runs of the VM: {users:?}");
}

/// A ramfs, which has no idmapped mounts, on a directory of the node.
struct Ramfs(PathBuf);

impl Ramfs {
    fn mount(directory: PathBuf) -> Ramfs {
        run(Command::new("mount").args(["-t", "ramfs", "-o", "mode=0700", "ramfs"]).arg(&directory)).ok();
        Ramfs(directory)
    }
}

impl Drop for Ramfs {
    fn drop(&mut self) {
        // Lazily, because the pod of a failed test still runs.
        let unmounted = run(Command::new("umount").arg("--lazy").arg(&self.0));
        if unmounted.code != 0 {
            eprintln!("cannot unmount {}: {}", self.0.display(), unmounted.stderr);
        }
    }
}

#[test]
fn a_machine_pod_without_idmapped_mounts_is_root_and_says_so() {
    if engine() == "host" {
        println!("skipped: engine host has no machine pods");
        return;
    }
    let node = machine_node();
    let image = push_boot_image(&node);
    let ramfs = Ramfs::mount(node.directory().join("root/scratch"));
    let disks = format!("root=image:{image},boot=1");
    let vm = annotated_pod(&node, "vm", &[("kind", "machine"), ("memory", "64Mi"), ("disks", disks.as_str())]);
    let pod = node.crictl.run_pod_with_handler("vm", vm);
    pod.start(machine_container(&image, 0)).wait_for_output("boot 1\n");
    let users = node.pids_matching("nacelle-").into_iter().chain(node.pids_matching(" -uuid ")).map(only_user);
    assert_eq!(users.collect::<BTreeSet<u32>>(), BTreeSet::from([0]));
    assert_eq!(report_of_jail(&node, &pod.id)[0], documented_report(false)[0]);
    let pods = fs::read_dir(node.directory().join("run/pods")).expect("run directories").flatten();
    let logs = pods.map(|pod| fs::read_to_string(pod.path().join("pod.log")).expect("a log")).collect::<String>();
    for log in [logs, node.log()] {
        assert!(log.contains("root, without capabilities"), "{log}");
    }
    let config = node.directory().join("config.toml");
    let check = run(Command::new(path_from_env("NACELLE_BIN")).args(["check", "--config"]).arg(config));
    let note = check.stdout.lines().find(|line| line.starts_with("note owners")).unwrap_or_default();
    assert!(note.contains("map the owners of files in") && note.contains("/root/scratch"), "{}", check.stdout);
    pod.remove();
    drop(ramfs);
}

/// Returns all files and directories below a directory.
fn files_below(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).expect("a directory").flatten().map(|entry| entry.path());
    entries
        .flat_map(|path| if path.is_dir() { files_below(&path) } else { Vec::new() }.into_iter().chain([path]))
        .collect()
}

/// Makes a process call setuid(0) between two instructions of its first thread, and returns the kernel's answer.
fn call_setuid_root(process: nix::unistd::Pid) -> nix::Result<i64> {
    ptrace::attach(process)?;
    nix::sys::wait::waitpid(process, None)?;
    let before = ptrace::getregs(process)?;
    let mut registers = before;
    (registers.rax, registers.rdi) = (libc::SYS_setuid.unsigned_abs(), 0);
    // The two bytes of the instruction by which the thread waits.
    registers.rip -= 2;
    registers.orig_rax = u64::MAX;
    ptrace::setregs(process, registers)?;
    ptrace::step(process, None)?;
    nix::sys::wait::waitpid(process, None)?;
    let returned = ptrace::getregs(process)?.rax.cast_signed();
    ptrace::setregs(process, before)?;
    ptrace::detach(process, None)?;
    Ok(returned)
}

#[test]
fn a_seccomp_kill_of_a_process_is_reported_and_leaves_nothing() {
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(PodRequest::new("killed", node.directory()));
    let container = pod.start(ContainerRequest::sh("c", &image, "echo up; sleep 600"));
    container.wait_for_output("up");
    let process = pod_process_directory(&node);
    let pid = process.file_name().and_then(|pid| pid.to_str()?.parse().ok()).expect("a number");
    make_forbidden_call(nix::unistd::Pid::from_raw(pid)).expect("it can be traced");
    eventually("the container has ended", || {
        let status = &node.crictl.call_json(["inspect", &container.id])["status"];
        (status["state"] == "CONTAINER_EXITED").then(|| {
            assert_eq!(status["exitCode"], 255);
            let message = status["message"].as_str().unwrap_or_default();
            assert!(message.contains("a system call that its seccomp filter forbids"), "{message}");
        })
    });
    assert!(!process.exists());
    // The node's census on drop finds leaks: processes, taps, mounts, cgroups, files.
}

/// Makes a process call unshare(2), which no filter of a pod process allows. Its first thread waits in a system call: it is set back by
/// the two bytes of the instruction and makes another call.
fn make_forbidden_call(process: nix::unistd::Pid) -> nix::Result<()> {
    ptrace::attach(process)?;
    nix::sys::wait::waitpid(process, None)?;
    let mut registers = ptrace::getregs(process)?;
    registers.rax = libc::SYS_unshare.unsigned_abs();
    registers.rip -= 2;
    // The interrupted call is not restarted (arch/x86/kernel/signal.c).
    registers.orig_rax = u64::MAX;
    ptrace::setregs(process, registers)?;
    ptrace::detach(process, None)
}

/// A cgroup of the node with a limit of 0.01 CPU, in the hierarchy of the CPU controller, as kubelet makes one for a pod.
struct ThrottledCgroup(PathBuf);

impl ThrottledCgroup {
    fn new(name: &str) -> ThrottledCgroup {
        let root = Path::new("/sys/fs/cgroup");
        let v2 = root.join("cgroup.controllers").exists();
        let group = if v2 { root.join(name) } else { root.join("cpu").join(name) };
        fs::create_dir(&group).expect("the node's control groups are writable");
        let group = ThrottledCgroup(group);
        let (file, quota) = if v2 { ("cpu.max", "1000 100000") } else { ("cpu.cfs_quota_us", "1000") };
        if v2 {
            fs::write(root.join("cgroup.subtree_control"), "+cpu").expect("the node has the controller");
        }
        fs::write(group.0.join(file), quota).expect("a quota");
        group
    }
}

impl Drop for ThrottledCgroup {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.0) {
            eprintln!("cannot remove {}: {error}", self.0.display());
        }
    }
}

#[test]
fn a_vm_boots_outside_a_cgroup_whose_cpu_quota_would_throttle_it() {
    if engine() == "host" {
        println!("skipped: engine host has no VM that boots");
        return;
    }
    let node = TestNode::new();
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let timed = |pod: PodRequest| {
        let begin = Instant::now();
        let pod = node.crictl.run_pod(pod);
        (pod, begin.elapsed())
    };
    let (plain, usual) = timed(PodRequest::new("plain", node.directory()));
    plain.remove();
    let group = ThrottledCgroup::new(&format!("e2e-small-{}", std::process::id()));
    let name = group.0.file_name().expect("a name").to_string_lossy().into_owned();
    let resources = json!({"cpu_period": 100_000, "cpu_quota": 1000, "cpu_shares": 10});
    let linux = json!({"cgroup_parent": format!("/{name}"), "resources": resources});
    let (pod, took) = timed(PodRequest::new("small", node.directory()).set("linux", linux));
    println!("without a quota: {usual:?}, with one: {took:?}");
    // With 0.01 CPU a boot takes about a hundred times as long. Other work on the node slows it down by less than ten times.
    assert!(took < usual * 10, "{took:?} instead of {usual:?}");
    assert!(node.log().contains("CPU: 10 of 1000 thousandths"), "the log says why");
    // The guest's kernel enforces the container's limit. With that of the pod, its start would take minutes where guests are slow.
    let resources = json!({"cpu_period": 100_000, "cpu_quota": 20_000, "cpu_shares": 10});
    let limited = ContainerRequest::sh("c", &image, "sleep 600").set("linux", json!({"resources": resources}));
    let container = pod.start(limited);
    assert_eq!(container.exec("cat /sys/fs/cgroup/cpu.max").ok(), "20000 100000");
    pod.remove();
}

/// As kubelet requests it with NoSwap, LimitedSwap and MemoryQoS.
#[test]
fn a_vm_may_use_as_much_swap_as_its_containers() {
    let node = TestNode::new();
    let controllers = fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").unwrap_or_default();
    if engine() == "host" || !controllers.split_whitespace().any(|controller| controller == "memory") {
        eprintln!("skipped: this needs a VM, and cgroup v2 with the controller memory");
        return;
    }
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let pod = node.crictl.run_pod(PodRequest::new("swap", node.directory()));
    let group = fs::read_to_string(pod_process_directory(&node).join("cgroup")).expect("the pod runs");
    let group = group.trim().rsplit(':').next().expect("a path").to_owned();
    let read = || {
        let files = ["memory.swap.max", "memory.low", "memory.min"];
        files.map(|file| {
            let text =
                fs::read_to_string(format!("/sys/fs/cgroup{group}/{file}")).expect("the node has the controller");
            text.trim().to_owned()
        })
    };
    let start = |name: &str, files: Value| {
        let container = ContainerRequest::sh(name, &image, "sleep 600");
        pod.start(container.set("linux", json!({"resources": {"unified": files}})))
    };
    assert_eq!(read(), ["max", "0", "0"]);
    let none = start("none", json!({"memory.swap.max": "0", "memory.min": "1048576"}));
    assert_eq!(read(), ["0", "0", "1048576"]);
    start("limited", json!({"memory.swap.max": "4194304", "memory.min": "1048576", "memory.low": "2097152"}));
    assert_eq!(read(), ["4194304", "2097152", "2097152"]);
    node.crictl.call(["rm", "-f", &none.id]);
    eventually("the other container's limits are in force", || {
        (read() == ["4194304", "2097152", "1048576"]).then_some(())
    });
    pod.remove();
}

#[test]
fn a_pod_writes_no_faster_than_its_handler_allows_or_does_not_start() {
    let limits = format!("{SMALL_VM}disk_limits = {{ write_bytes_per_second = {} }}\n", 4 << 20);
    // A file system on a disk, which the file system of the test's directory may not be.
    let options =
        NodeOptions { extra: handler_config("slow", &limits), disk_mib: Some(1024), ..NodeOptions::default() };
    let node = TestNode::with_options(options);
    let image = node.push_and_pull(&TestImage::busybox(), "busybox:1");
    let requested = PodRequest::new("slow", node.directory());
    let controllers = fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").unwrap_or_default();
    if !controllers.split_whitespace().any(|controller| controller == "io") {
        let file = node.crictl.write_input("pod", &requested.0);
        let refused = node.crictl.try_call(["runp", "--runtime", "slow", &file]).err();
        assert!(refused.contains("disk_limits need cgroup v2 with the controller"), "{refused}");
        return;
    }
    let pod = node.crictl.run_pod_with_handler("slow", requested);
    let group = fs::read_to_string(pod_process_directory(&node).join("cgroup")).expect("the pod runs");
    let group = group.trim().rsplit(':').next().expect("a path").trim_end_matches("/process").to_owned();
    let limit = fs::read_to_string(format!("/sys/fs/cgroup{group}/io.max")).expect("it has the controller io");
    assert!(limit.trim().ends_with(&format!(" rbps=max wbps={} riops=max wiops=max", 4 << 20)), "{limit:?}");
    let container = pod.start(ContainerRequest::sh("c", &image, "sleep 600"));
    let since = Instant::now();
    container.exec("dd if=/dev/urandom of=/file bs=1M count=24 && sync").ok();
    // Until then the node has them in memory, as those of its own programs.
    run(Command::new("sync").arg("-f").arg(node.directory().join("root"))).ok();
    let took = since.elapsed();
    // The kernel may let through a little more at first.
    assert!(took.as_secs_f64() > 4.0, "24 MiB were written in {took:?}");
}
