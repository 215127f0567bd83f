//! Tests what a jailed process can access and what not, from inside and from outside. This program is its own prisoner:
//! `jail prisoner PROFILE MODE USER DIRECTORY` enters the jail of a pod process and `jail worker MODE USER` that of a worker; both execute
//! commands from standard input. Needs root.
#![allow(unsafe_code, reason = "system calls with forbidden arguments have no safe wrapper")]

use landlock::{CompatLevel, Compatible, Ruleset, RulesetAttr, Scope};
use nacelle_base::{Classify, FailureKind};
use nacelle_jail::{
    Access, JailPlan, Mode, NetworkAccess, Profile, ResourceLimits, ThreadKind, VisiblePath, WorkerJail, cgroup,
};
use nix::libc;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, ExitStatus, Stdio};

type Test = (&'static str, fn());

const TESTS: [Test; 11] = [
    ("a_prisoner_reaches_no_process_of_the_node", no_process_of_the_node),
    ("a_prisoner_has_nothing_but_its_places", nothing_but_its_places),
    ("a_prisoner_has_no_rights", no_rights),
    ("a_prisoner_has_a_user_of_its_own", user_of_its_own),
    ("files_of_root_are_the_prisoners_by_an_idmapped_mount", idmapped_files),
    ("every_thread_is_filtered", every_thread_is_filtered),
    ("what_is_forbidden_kills", what_is_forbidden_kills),
    ("a_process_that_spawns_still_can", spawns),
    ("a_worker_has_nothing_but_its_descriptors", worker_has_only_descriptors),
    ("a_worker_may_only_transform_bytes", worker_calls_are_filtered),
    ("a_worker_ends_with_the_thread_that_started_it", worker_ends_with_its_parent),
];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    if let [_, verb, profile, mode, user, directory] = args.as_slice()
        && verb == "prisoner"
    {
        return run_jailed_process(profile, mode, user.parse().ok(), Path::new(directory));
    }
    if let [_, verb, mode, user] = args.as_slice()
        && verb == "worker"
    {
        return run_jailed_worker(mode, user);
    }
    nacelle_base::test_program::run_tests_as_root(&TESTS)
}

/// The kinds whose threads a prisoner starts.
const KINDS: [ThreadKind; 5] =
    [ThreadKind::Blocking, ThreadKind::Vcpu, ThreadKind::Queue, ThreadKind::Vsock, ThreadKind::Log];

/// The user of the prisoners that have one.
const USER: u32 = 70_001;

fn run_jailed_process(profile: &str, mode: &str, user: Option<u32>, directory: &Path) -> ExitCode {
    nacelle_jail::close_inherited().unwrap();
    // That of the pod process.
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o027));
    let visible_path =
        |path: PathBuf, access| VisiblePath { path, visible_as: None, access, is_required: true, is_idmapped: false };
    let idmapped = |name: &str, access| VisiblePath { is_idmapped: true, ..visible_path(directory.join(name), access) };
    let mut visible_paths = vec![
        visible_path(directory.join("run"), Access::Write),
        visible_path(directory.join("images"), Access::Read),
        visible_path(directory.join("disks/disk"), Access::Take),
        idmapped("keep", Access::Write),
        idmapped("store", Access::Read),
        visible_path("/dev/null".into(), Access::Device),
        VisiblePath { visible_as: Some("/else/where".into()), ..visible_path(directory.join("shown"), Access::Device) },
        VisiblePath { is_required: false, ..visible_path("/dev/none".into(), Access::Device) },
    ];
    let profile = if profile == "spawns" { Profile::StartsPrograms } else { Profile::InProcess };
    if profile == Profile::StartsPrograms {
        for name in ["/usr", "/bin", "/lib", "/lib64"] {
            visible_paths.push(VisiblePath { is_required: false, ..visible_path(name.into(), Access::Execute) });
        }
    }
    let seccomp = match mode {
        "kill" => Mode::Kill,
        _ => Mode::Off,
    };
    let group = PathBuf::from(format!("nacelle/{}", directory.file_name().unwrap().to_str().unwrap()));
    let plan = JailPlan {
        visible_paths,
        mount_point: directory.join("run"),
        cgroup: Some(group),
        user,
        network: NetworkAccess::None,
        signals_earlier_children: false,
        limits: ResourceLimits { locked_bytes: 0, open_files: Some(500), threads: user.map(|_user| 50) },
        seccomp,
        profile,
    };
    if let Err(error) = nacelle_jail::enter(plan) {
        println!("{}", nacelle_base::Chain(&error));
        return ExitCode::FAILURE;
    }
    let filtered = std::sync::Arc::new(std::sync::Barrier::new(KINDS.len() + 1));
    for kind in KINDS {
        let filtered = filtered.clone();
        let builder = std::thread::Builder::new().name(format!("{kind:?}"));
        let idle = move || {
            filtered.wait();
            let (_keep, never) = std::sync::mpsc::channel::<()>();
            let _ = never.recv();
        };
        nacelle_jail::spawn(kind, builder, idle).unwrap();
    }
    filtered.wait();
    println!("in");
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let (verb, rest) = line.split_once(' ').unwrap_or((&line, ""));
        let answer = match verb {
            "read" => fs::read_to_string(rest).map_err(|error| error.kind()),
            "write" => fs::write(rest, "x").map(|()| "written".to_owned()).map_err(|error| error.kind()),
            "list" => fs::read_dir(rest).map_err(|error| error.kind()).map(|entries| {
                let mut names: Vec<_> =
                    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
                names.sort();
                names.join(" ")
            }),
            "run" => {
                Command::new(rest).output().map(|output| format!("{:?}", output.status.code())).map_err(|e| e.kind())
            }
            "thread" => Ok(perform_on(rest)),
            "abstract" => SocketAddr::from_abstract_name(rest)
                .and_then(|address| UnixStream::connect_addr(&address))
                .map(|_connected| String::new())
                .map_err(|error| error.kind()),
            "signal-child" => {
                let mut child = Command::new(rest).arg("60").spawn().unwrap();
                child.kill().and_then(|()| child.wait()).map(|status| format!("{status}")).map_err(|error| error.kind())
            }
            _ => Ok(perform(verb)),
        };
        println!("{answer:?}");
    }
    ExitCode::SUCCESS
}

/// Enters the jail of a worker and executes commands from standard input.
fn run_jailed_worker(mode: &str, user: &str) -> ExitCode {
    let seccomp = if mode == "kill" { Mode::Kill } else { Mode::Off };
    let (address_space, cpu_seconds, file_size) = (1 << 30, 600, 4096);
    let jail = WorkerJail { seccomp, user: user.parse().ok(), address_space, cpu_seconds, file_size };
    if let Err(error) = nacelle_jail::confine_worker(jail) {
        println!("{}", nacelle_base::Chain(&error));
        return ExitCode::FAILURE;
    }
    println!("in");
    for line in std::io::stdin().lines() {
        println!("{:?}", perform_in_worker(&line.unwrap()));
    }
    ExitCode::SUCCESS
}

/// Makes a call for which the filter may kill a worker.
fn perform_in_worker(what: &str) -> Result<(), String> {
    let at = i64::from(libc::AT_FDCWD);
    match what {
        "nothing" => Ok(()),
        "allocate" => {
            std::hint::black_box(vec![1u8; 64 << 20]);
            Ok(())
        }
        "random" => raw_call([libc::SYS_getrandom, 0, 0, 0]),
        "write" => raw_call([libc::SYS_write, 1, 0, 0]),
        "open" => raw_call([libc::SYS_openat, at, 0, 0]),
        "old-open" => raw_call([libc::SYS_open, 0, 0, 0]),
        "stat" => raw_call([libc::SYS_newfstatat, at, 0, 0]),
        "socket" => raw_call([libc::SYS_socket, libc::AF_INET.into(), libc::SOCK_STREAM.into(), 0]),
        "clone" => raw_call([libc::SYS_clone, 0, 0, 0]),
        "clone3" => raw_call([libc::SYS_clone3, 0, 0, 0]),
        "fork" => raw_call([libc::SYS_fork, 0, 0, 0]),
        "execve" => raw_call([libc::SYS_execve, 0, 0, 0]),
        "kill" => raw_call([libc::SYS_kill, 1, 0, 0]),
        "signal-other" => raw_call([libc::SYS_tgkill, 1, 1, 0]),
        "ptrace" => raw_call([libc::SYS_ptrace, libc::PTRACE_TRACEME.into(), 0, 0]),
        "limits" => raw_call([libc::SYS_prlimit64, 0, libc::RLIMIT_AS.into(), 0]),
        "parent-death" => raw_call([libc::SYS_prctl, libc::PR_SET_PDEATHSIG.into(), 0, 0]),
        "user" => raw_call([libc::SYS_setuid, 0, 0, 0]),
        "unshare" => raw_call([libc::SYS_unshare, libc::CLONE_NEWUSER.into(), 0, 0]),
        "ioctl" => raw_call([libc::SYS_ioctl, 0, libc::FIONREAD.try_into().unwrap(), 0]),
        "io-uring" => raw_call([libc::SYS_io_uring_setup, 1, 0, 0]),
        "x32" => raw_call([0x4000_0000 | libc::SYS_getpid, 0, 0, 0]),
        "code" => raw_call([libc::SYS_mprotect, 0, 4096, libc::PROT_EXEC.into()]),
        other => Err(format!("what is {other}?")),
    }
}

/// Performs an action for which a filter may kill the process.
fn perform(what: &str) -> String {
    let done = match what {
        "inet" => std::net::UdpSocket::bind("127.0.0.1:0").map(drop).map_err(|error| error.to_string()),
        "unshare" => nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).map_err(|error| error.to_string()),
        "unix" => std::os::unix::net::UnixStream::pair().map(drop).map_err(|error| error.to_string()),
        // A guest that enables a virtqueue causes the same: a vCPU thread, which may not start threads, requests one.
        "queue" => nacelle_jail::spawn(ThreadKind::Queue, std::thread::Builder::new(), || perform("nothing"))
            .map(|thread| drop(thread.join().unwrap()))
            .map_err(|error| error.to_string()),
        "nothing" => Ok(()),
        // A signal without effect, to itself and to another process.
        "signal-own" => nix::sys::signal::raise(nix::sys::signal::Signal::SIGCONT).map_err(|error| error.to_string()),
        "signal-other" => {
            nix::sys::signal::kill(nix::unistd::Pid::from_raw(1), None).map_err(|error| error.to_string())
        }
        "become-root" => nix::unistd::setresuid(0.into(), 0.into(), 0.into()).map_err(|error| error.to_string()),
        "open" => fs::File::open("/dev/null").map(drop).map_err(|error| error.to_string()),
        // The attacks below call the kernel directly, because no library wraps them with these arguments.
        "signal-receiver" => raw_call([libc::SYS_fcntl, 0, 8, 1]),
        "signal-number" => raw_call([libc::SYS_fcntl, 0, 10, 9]),
        "socket-signal-receiver" => raw_call([libc::SYS_ioctl, 0, 0x8901, 0]),
        "limits-of-others" => raw_call([libc::SYS_prlimit64, 2, 7, 0]),
        "own-limits" => raw_call([libc::SYS_prlimit64, 0, 7, 0]),
        "user-namespace" => raw_call([libc::SYS_clone, libc::CLONE_NEWUSER.into(), 0, 0]),
        "clone3" => raw_call([libc::SYS_clone3, 0, 0, 0]),
        "x32" => raw_call([0x4000_0000 | libc::SYS_getpid, 0, 0, 0]),
        "io-uring" => raw_call([libc::SYS_io_uring_setup, 1, 0, 0]),
        "vsock" => raw_call([libc::SYS_socket, libc::AF_VSOCK.into(), libc::SOCK_STREAM.into(), 0]),
        "setuid-file" => raw_call([libc::SYS_fchmod, 0, 0o4755, 0]),
        "setgid-file" => raw_call([libc::SYS_fchmodat, libc::AT_FDCWD.into(), 0, 0o2755]),
        "plain-file" => raw_call([libc::SYS_fchmod, 0, 0o600, 0]),
        "fifo" => raw_call([libc::SYS_mknodat, libc::AT_FDCWD.into(), 0, (libc::S_IFIFO | 0o600).into()]),
        "directory" => raw_call([libc::SYS_mkdir, 0, 0o700, 0]),
        "shorten-log" => raw_call([libc::SYS_ftruncate, 2, 0, 0]),
        "shorten-other" => raw_call([libc::SYS_ftruncate, 1, 0, 0]),
        "tkill" => raw_call([libc::SYS_tkill, 2, 0, 0]),
        "priority-of-others" => raw_call([libc::SYS_setpriority, 0, 1, 0]),
        "scheduler-of-others" => raw_call([libc::SYS_sched_setattr, 2, 0, 0]),
        "affinity-of-others" => raw_call([libc::SYS_sched_setaffinity, 2, 0, 0]),
        "queued-signal" => raw_call([libc::SYS_rt_sigqueueinfo, 2, 0, 0]),
        "many-threads" => {
            let idle = || std::thread::Builder::new().spawn(|| std::thread::sleep(std::time::Duration::from_secs(60)));
            (0..100).try_for_each(|_| idle().map(drop)).map_err(|error| error.to_string())
        }
        "spawn" => {
            std::thread::Builder::new().spawn(|| ()).map(|t| t.join().unwrap()).map_err(|error| error.to_string())
        }
        other => Err(format!("what is {other}?")),
    };
    format!("{done:?}")
}

/// Calls the kernel with a number and three arguments.
fn raw_call([number, first, second, third]: [i64; 4]) -> Result<(), String> {
    // SAFETY: none of the calls of the callers uses memory: the arguments that are addresses are null, for which the kernel returns EFAULT or
    // does nothing. A child of clone has a copy of this process's memory, and the filter forbids it anyway.
    let result = unsafe { libc::syscall(number, first, second, third, 0) };
    nix::errno::Errno::result(result).map(drop).map_err(|errno| errno.to_string())
}

/// Performs an action on a thread of a kind: "KIND WHAT".
fn perform_on(words: &str) -> String {
    let (kind, what) = words.split_once(' ').unwrap();
    let kind = ThreadKind::ALL.into_iter().find(|known| format!("{known:?}") == kind).unwrap();
    let what = what.to_owned();
    nacelle_jail::spawn(kind, std::thread::Builder::new(), move || perform(&what)).unwrap().join().unwrap()
}

/// A prisoner and the files outside of its jail.
struct Jail {
    directory: tempfile::TempDir,
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Jail {
    fn new(profile: &str, mode: &str) -> Jail {
        Jail::with_user(profile, mode, None)
    }

    fn with_user(profile: &str, mode: &str, user: Option<u32>) -> Jail {
        let directory = tempfile::tempdir().unwrap();
        for name in ["run", "images", "disks", "shown", "keep", "store", "other"] {
            fs::create_dir(directory.path().join(name)).unwrap();
            fs::write(directory.path().join(name).join("file"), name).unwrap();
        }
        Jail::in_directory(directory, profile, mode, user)
    }

    /// Starts a prisoner whose places exist.
    fn in_directory(directory: tempfile::TempDir, profile: &str, mode: &str, user: Option<u32>) -> Jail {
        fs::write(directory.path().join("disks/disk"), "disk").unwrap();
        let inherited = fs::File::open("/dev/null").unwrap();
        nix::fcntl::fcntl(&inherited, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty())).unwrap();
        assert!(inherited.as_raw_fd() > 2);
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["prisoner", profile, mode, &user.map_or("root".to_owned(), |user| user.to_string())])
            .arg(directory.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // It is allowed to shorten its log: not that of this program.
            .stderr(tempfile::tempfile().unwrap())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        let mut jail = Jail { directory, child, input, output };
        assert_eq!(jail.line().as_deref(), Some("in"));
        jail
    }

    fn path(&self, name: &str) -> String {
        self.directory.path().join(name).to_str().unwrap().to_owned()
    }

    fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        let count = self.output.read_line(&mut line).unwrap();
        (count > 0).then(|| line.trim_end().to_owned())
    }

    /// Returns the prisoner's answer; `None` if the command killed it.
    fn request(&mut self, what: &str) -> Option<String> {
        writeln!(self.input.as_ref().unwrap(), "{what}").unwrap();
        self.line()
    }

    fn proc(&self, file: &str) -> String {
        fs::read_to_string(format!("/proc/{}/{file}", self.child.id())).unwrap()
    }

    /// Returns the status files of its threads, by name.
    fn threads(&self) -> BTreeMap<String, BTreeMap<String, String>> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        let tasks = tasks.map(|task| fields(&fs::read_to_string(task.unwrap().path().join("status")).unwrap()));
        tasks.map(|fields| (fields["Name"].clone(), fields)).collect()
    }

    fn group(&self) -> PathBuf {
        Path::new("nacelle").join(self.directory.path().file_name().unwrap())
    }

    fn end(&mut self) -> ExitStatus {
        self.input = None;
        self.child.wait().unwrap()
    }
}

impl Drop for Jail {
    fn drop(&mut self) {
        // The process may have ended before.
        let _ = self.child.kill();
        let _ = self.child.wait();
        cgroup::remove(&self.group()).unwrap();
        assert!(cgroup::directories(&self.group()).iter().all(|directory| !directory.exists()));
    }
}

fn fields(status: &str) -> BTreeMap<String, String> {
    status.lines().filter_map(|line| line.split_once(':')).map(|(k, v)| (k.to_owned(), v.trim().to_owned())).collect()
}

fn nothing_but_its_places() {
    let mut jail = Jail::new("in-process", "kill");
    let [run, images, disk, other] =
        ["run/file", "images/file", "disks/disk", "other/file"].map(|name| jail.path(name));
    assert_eq!(jail.request(&format!("read {run}")).unwrap(), r#"Ok("run")"#);
    assert_eq!(jail.request(&format!("read {images}")).unwrap(), r#"Ok("images")"#);
    assert_eq!(jail.request(&format!("read {disk}")).unwrap(), r#"Ok("disk")"#);
    assert_eq!(jail.request("read /dev/null").unwrap(), r#"Ok("")"#);
    for gone in [other.as_str(), "/etc/passwd", "/proc/self/status", "/usr/bin/true", "/sys/kernel"] {
        assert_eq!(jail.request(&format!("read {gone}")).unwrap(), "Err(NotFound)", "{gone}");
    }
    assert_eq!(jail.request("list /").unwrap(), format!(r#"Ok("dev else {}")"#, other.split('/').nth(1).unwrap()));
    // A directory with devices has another name inside, and not its own; the prisoner cannot change its entries.
    assert_eq!(jail.request("read /else/where/file").unwrap(), r#"Ok("shown")"#);
    assert_eq!(jail.request("write /else/where/file").unwrap(), "Err(ReadOnlyFilesystem)");
    assert_eq!(jail.request(&format!("read {}", jail.path("shown/file"))).unwrap(), "Err(NotFound)");
    // The prisoner can write to its own files, and to no others.
    assert_eq!(jail.request(&format!("write {run}")).unwrap(), r#"Ok("written")"#);
    assert_eq!(fs::read_to_string(&run).unwrap(), "x");
    assert_eq!(jail.request(&format!("write {disk}")).unwrap(), r#"Ok("written")"#);
    for sealed in [images.as_str(), "/new", "/dev/new"] {
        assert_eq!(jail.request(&format!("write {sealed}")).unwrap(), "Err(ReadOnlyFilesystem)", "{sealed}");
    }
    // A file that was taken has no name outside any more; the mounts of the jail are not visible outside.
    assert!(!Path::new(&disk).exists() && Path::new(&jail.path("disks/file")).exists());
    let mounts = jail.proc("mountinfo");
    for line in mounts.lines() {
        let options = line.split(' ').nth(5).unwrap();
        assert!(options.contains("nosuid") && options.contains("noexec"), "{line}");
        assert!(
            options.contains("nodev") || [" /dev/null ", " /else/where "].iter().any(|place| line.contains(place)),
            "{line}"
        );
    }
    assert_eq!(mounts.lines().count(), 8, "{mounts}");
    assert!(!fs::read_to_string("/proc/self/mountinfo").unwrap().contains(&jail.path("")));
    assert!(jail.end().success());
}

fn no_rights() {
    let mut jail = Jail::new("in-process", "kill");
    for (thread, status) in jail.threads() {
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(status[set].trim_start_matches('0'), "", "{thread} {set}");
        }
        assert_eq!(status["NoNewPrivs"], "1", "{thread}");
    }
    let limits = jail.proc("limits");
    for (name, value) in [("Max core file size", "0"), ("Max locked memory", "0"), ("Max open files", "500")] {
        let limit = limits.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        assert_eq!(limit.split_whitespace().take(2).collect::<Vec<_>>(), [value, value], "{name}");
    }
    // The open descriptors are the standard streams; nothing was inherited.
    let open = fs::read_dir(format!("/proc/{}/fd", jail.child.id())).unwrap().count();
    assert_eq!(open, 3);
    let directories = cgroup::directories(&jail.group());
    if directories.is_empty() {
        println!("no control groups here");
    }
    for directory in directories.iter().filter(|directory| directory.exists()) {
        let members = fs::read_to_string(directory.join("cgroup.procs")).unwrap();
        assert_eq!(members.trim(), jail.child.id().to_string(), "{}", directory.display());
    }
    assert!(jail.end().success());
}

fn user_of_its_own() {
    let mut jail = Jail::with_user("in-process", "kill", Some(USER));
    for (thread, status) in jail.threads() {
        for ids in ["Uid", "Gid"] {
            assert!(status[ids].split_whitespace().all(|id| id == USER.to_string()), "{thread} {ids} {}", status[ids]);
        }
        assert_eq!(status["Groups"], "", "{thread}");
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(status[set].trim_start_matches('0'), "", "{thread} {set}");
        }
        assert_eq!(status["NoNewPrivs"], "1", "{thread}");
    }
    // Its own directory, disk and devices belong to it; the directories on the way to them are open to all.
    let [new, disk, images] = ["run/new", "disks/disk", "images/file"].map(|name| jail.path(name));
    assert_eq!(jail.request(&format!("write {new}")).unwrap(), r#"Ok("written")"#);
    assert_eq!(jail.request(&format!("write {disk}")).unwrap(), r#"Ok("written")"#);
    assert_eq!(jail.request("read /dev/null").unwrap(), r#"Ok("")"#);
    assert_eq!(jail.request("list /dev").unwrap(), r#"Ok("null")"#);
    let owner = |path: &str| fs::metadata(path).map(|found| (found.uid(), found.gid(), found.mode() & 0o7777)).unwrap();
    assert_eq!((owner(&new), owner(&jail.path("run")).0), ((USER, USER, 0o640), USER));
    let seen = format!("/proc/{}/root/dev/null", jail.child.id());
    assert_eq!((owner(&seen), owner("/dev/null").0), ((USER, USER, 0o600), 0));
    assert_eq!(fs::metadata(seen).unwrap().rdev(), fs::metadata("/dev/null").unwrap().rdev());
    // What it may only read stays root's.
    assert_eq!(jail.request(&format!("read {images}")).unwrap(), r#"Ok("images")"#);
    fs::set_permissions(&images, fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(jail.request(&format!("read {images}")).unwrap(), "Err(PermissionDenied)");
    assert_eq!((owner(&images).0, owner(&jail.path("images")).0, owner(&jail.path("shown")).0), (0, 0, 0));
    assert!(jail.end().success());
    let mut jail = Jail::with_user("in-process", "off", Some(USER));
    assert!(jail.request("become-root").unwrap().contains("EPERM"));
    assert!(jail.request("many-threads").unwrap().contains("temporarily unavailable"));
    assert!(jail.end().success());
    // A program that it starts has the same user.
    let mut jail = Jail::with_user("spawns", "kill", Some(USER));
    assert_eq!(jail.request("run /usr/bin/true").unwrap(), r#"Ok("Some(0)")"#);
    assert_eq!(jail.request("signal-child /usr/bin/sleep").unwrap(), r#"Ok("signal: 9 (SIGKILL)")"#);
    assert!(jail.end().success());
}

fn idmapped_files() {
    let owner = |path: &str| fs::metadata(path).map(|data| (data.uid(), data.gid(), data.mode() & 0o7777)).unwrap();
    let protect = |path: &str| fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
    let mut jail = Jail::with_user("in-process", "kill", Some(USER));
    let [file, new, blob, new_blob, foreign] =
        ["keep/file", "keep/new", "store/file", "store/new", "keep/foreign"].map(|name| jail.path(name));
    protect(&file);
    protect(&blob);
    fs::set_permissions(jail.path("keep"), fs::Permissions::from_mode(0o700)).unwrap();
    // The prisoner reads, changes and creates files, which belong to root outside and to the prisoner inside.
    assert_eq!(jail.request(&format!("read {file}")).unwrap(), r#"Ok("keep")"#);
    assert_eq!(jail.request(&format!("write {file}")).unwrap(), r#"Ok("written")"#);
    assert_eq!(jail.request(&format!("write {new}")).unwrap(), r#"Ok("written")"#);
    assert_eq!([owner(&file), owner(&new)], [(0, 0, 0o600), (0, 0, 0o640)]);
    let seen = |path: &str| format!("/proc/{}/root{path}", jail.child.id());
    assert_eq!([owner(&seen(&file)), owner(&seen(&new))], [(USER, USER, 0o600), (USER, USER, 0o640)]);
    assert_eq!(owner(&jail.path("keep")), (0, 0, 0o700));
    // What it may only read it cannot write.
    assert_eq!(jail.request(&format!("read {blob}")).unwrap(), r#"Ok("store")"#);
    for sealed in [&blob, &new_blob] {
        assert_eq!(jail.request(&format!("write {sealed}")).unwrap(), "Err(ReadOnlyFilesystem)");
    }
    // Private files of other users are closed to it, also those that have its id on the disk.
    for other in [USER, 1000] {
        fs::write(&foreign, "foreign").unwrap();
        protect(&foreign);
        std::os::unix::fs::chown(&foreign, Some(other), Some(other)).unwrap();
        assert_eq!(jail.request(&format!("read {foreign}")).unwrap(), "Err(PermissionDenied)", "{other}");
    }
    assert!(jail.end().success());
    // A later prisoner with another user has the same files.
    let directory = std::mem::replace(&mut jail.directory, tempfile::tempdir().unwrap());
    let mut jail = Jail::in_directory(directory, "in-process", "kill", Some(USER + 1));
    for path in [&file, &new] {
        assert_eq!(jail.request(&format!("read {path}")).unwrap(), r#"Ok("x")"#);
        assert_eq!(jail.request(&format!("write {path}")).unwrap(), r#"Ok("written")"#);
    }
    assert_eq!([owner(&file), owner(&new)], [(0, 0, 0o600), (0, 0, 0o640)]);
    assert!(jail.end().success());
    let check = |paths: &[&str]| nacelle_jail::check_idmapped_mounts(paths.iter().map(Path::new), USER);
    check(&[&jail.path("keep"), &jail.path("store")]).unwrap();
    let error = check(&[&jail.path("keep"), &jail.path("missing")]).unwrap_err();
    assert_eq!(error.kind(), FailureKind::Internal);
    let text = error.to_string();
    assert!(text.contains("map the owners of files in") && text.ends_with("/missing"), "{text}");
    // Sysfs is one of the file systems without idmapped mounts.
    let error = check(&["/sys"]).unwrap_err();
    assert_eq!(error.kind(), FailureKind::Unsupported, "{error}: {}", error.source);
}

fn no_process_of_the_node() {
    let name = format!("nacelle-jail-{}", std::process::id());
    let _listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    for profile in ["in-process", "spawns"] {
        let mut jail = Jail::new(profile, "kill");
        for namespace in ["net", "ipc", "uts", "cgroup", "mnt"] {
            let of = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/{namespace}")).unwrap();
            assert_ne!(of(jail.child.id()), of(std::process::id()), "{profile} {namespace}");
        }
        assert_eq!(jail.request(&format!("abstract {name}")).unwrap(), "Err(ConnectionRefused)", "{profile}");
        assert!(jail.end().success());
    }
    // A process that starts programs may signal these, and no others.
    let mut jail = Jail::new("spawns", "kill");
    assert_eq!(jail.request("signal-child /usr/bin/sleep").unwrap(), r#"Ok("signal: 9 (SIGKILL)")"#);
    let scoped = Ruleset::default().set_compatibility(CompatLevel::HardRequirement).scope(Scope::Signal);
    match jail.request("signal-other").unwrap() {
        answer if answer.contains("EPERM") => {}
        answer => assert!(scoped.is_err(), "this kernel has Landlock scopes: {answer}"),
    }
    assert!(jail.end().success());
}

fn every_thread_is_filtered() {
    let jail = Jail::new("in-process", "kill");
    let threads = jail.threads();
    assert_eq!(threads.len(), KINDS.len() + 2, "{:?}", threads.keys());
    for (thread, status) in threads {
        assert_eq!(status["Seccomp"], "2", "{thread}");
        // The process's filter and its guard, and the thread's own.
        let filters = if KINDS.iter().any(|kind| format!("{kind:?}") == thread) { "3" } else { "2" };
        assert_eq!(status["Seccomp_filters"], filters, "{thread}");
    }
    let jail = Jail::new("in-process", "off");
    assert!(jail.threads().values().all(|status| status["Seccomp"] == "0"));
    let jail = Jail::new("spawns", "kill");
    assert!(jail.threads().values().all(|status| status["Seccomp"] == "2"));
}

fn what_is_forbidden_kills() {
    let kills = |profile: &str, what: &str| {
        let mut jail = Jail::new(profile, "kill");
        assert_eq!(jail.request(what), None, "{what}");
        assert_eq!(jail.end().signal(), Some(libc::SIGSYS), "{what}");
    };
    for what in ["inet", "unshare", "run /usr/bin/true", "thread Vcpu open", "thread Vcpu spawn", "thread Vcpu unix"] {
        kills("in-process", what);
    }
    for what in ["thread Queue open", "thread Vsock open", "thread Log unix", "thread Queue spawn", "signal-other"] {
        kills("in-process", what);
    }
    for profile in ["in-process", "spawns"] {
        for what in ["signal-receiver", "signal-number", "limits-of-others", "user-namespace", "x32", "queued-signal"] {
            kills(profile, what);
        }
        for what in ["socket-signal-receiver", "tkill", "priority-of-others", "scheduler-of-others", "vsock"] {
            kills(profile, what);
        }
        for what in ["setuid-file", "setgid-file", "fifo"] {
            kills(profile, what);
        }
        let mut jail = Jail::new(profile, "kill");
        assert!(jail.request("clone3").unwrap().contains("ENOSYS"));
        if profile == "spawns" {
            assert!(jail.request("io-uring").unwrap().contains("ENOSYS"));
        }
        assert!(jail.request("own-limits").unwrap().contains("Ok("));
        assert!(jail.request("plain-file").unwrap().contains("Ok("));
        assert!(jail.end().success());
    }
    kills("in-process", "io-uring");
    kills("in-process", "directory");
    kills("in-process", "thread Log shorten-other");
    // The keeper pins the vCPUs of its QEMU.
    kills("in-process", "affinity-of-others");
    kills("spawns", "unshare");
    kills("spawns", "thread Queue open");
    // Allowed actions do not kill.
    let mut jail = Jail::new("in-process", "kill");
    for thread in ["Vcpu", "NetControl", "Vsock", "Log"] {
        assert!(jail.request(&format!("thread {thread} shorten-log")).is_some(), "{thread}");
    }
    for what in [
        "unix",
        "open",
        "spawn",
        "thread Vsock unix",
        "thread Blocking open",
        "thread Machine spawn",
        "thread Vcpu queue",
        "signal-own",
    ] {
        assert!(jail.request(what).unwrap().contains("Ok("), "{what}");
    }
    assert!(jail.end().success());
}

fn spawns() {
    let mut jail = Jail::new("spawns", "kill");
    assert_eq!(jail.request("run /usr/bin/true").unwrap(), r#"Ok("Some(0)")"#);
    let images = jail.path("images/file");
    assert_eq!(jail.request(&format!("run {images}")).unwrap(), "Err(PermissionDenied)");
    assert!(jail.end().success());
}

/// A worker, and its streams.
struct Worker {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Worker {
    fn new(mode: &str, user: &str) -> Worker {
        let inherited = fs::File::open("/dev/null").unwrap();
        nix::fcntl::fcntl(&inherited, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty())).unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["worker", mode, user])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut worker = Worker { child, input, output };
        assert_eq!(worker.line().as_deref(), Some("in"));
        worker
    }

    fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        let count = self.output.read_line(&mut line).unwrap();
        (count > 0).then(|| line.trim_end().to_owned())
    }

    /// Returns the worker's answer; `None` if the command killed it.
    fn request(&mut self, what: &str) -> Option<String> {
        writeln!(self.input, "{what}").unwrap();
        self.line()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // The process may have ended before.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn worker_has_only_descriptors() {
    for user in ["none", "54321"] {
        let worker = Worker::new("kill", user);
        let pid = worker.child.id();
        let status = fields(&fs::read_to_string(format!("/proc/{pid}/status")).unwrap());
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(status[set].trim_start_matches('0'), "", "{user} {set}");
        }
        assert_eq!((status["NoNewPrivs"].as_str(), status["Seccomp"].as_str()), ("1", "2"));
        assert_eq!(status["Threads"], "1");
        let ids = if user == "none" { ["0"; 4] } else { [user; 4] };
        for field in ["Uid", "Gid"] {
            assert_eq!(status[field].split_whitespace().collect::<Vec<_>>(), ids, "{user} {field}");
        }
        if user != "none" {
            assert_eq!(status["Groups"], "");
        }
        for namespace in ["net", "ipc", "uts", "cgroup", "mnt"] {
            let of = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/{namespace}")).unwrap();
            assert_ne!(of(pid), of(std::process::id()), "{namespace}");
        }
        // The root is empty and cannot be written; there is no other mount.
        assert_eq!(fs::read_dir(format!("/proc/{pid}/root/")).unwrap().count(), 0);
        let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
        let options = mounts.lines().next().unwrap().split(' ').nth(5).unwrap();
        assert!(mounts.lines().count() == 1 && options.starts_with("ro,nosuid,nodev,noexec"), "{mounts}");
        // Below two lines of titles, the only interface is the loopback of the own namespace.
        let interfaces = fs::read_to_string(format!("/proc/{pid}/net/dev")).unwrap();
        assert!(interfaces.lines().count() == 3 && interfaces.contains("lo:"), "{interfaces}");
        assert_eq!(fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count(), 3);
        let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
        for (name, limit) in [
            ("Max core file size", "0"),
            ("Max locked memory", "0"),
            ("Max open files", "16"),
            ("Max address space", "1073741824"),
            ("Max cpu time", "600"),
            ("Max file size", "4096"),
        ] {
            let line = limits.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            assert_eq!(line.split_whitespace().take(2).collect::<Vec<_>>(), [limit; 2], "{name}");
        }
    }
    assert_eq!(fields(&fs::read_to_string("/proc/self/status").unwrap())["Seccomp"], "0");
    let worker = Worker::new("off", "none");
    assert_eq!(fields(&fs::read_to_string(format!("/proc/{}/status", worker.child.id())).unwrap())["Seccomp"], "0");
}

fn worker_calls_are_filtered() {
    let forbidden = [
        "open",
        "old-open",
        "stat",
        "socket",
        "clone",
        "clone3",
        "fork",
        "execve",
        "kill",
        "signal-other",
        "ptrace",
        "limits",
        "parent-death",
        "user",
        "unshare",
        "ioctl",
        "io-uring",
        "x32",
        "code",
    ];
    for what in forbidden {
        let mut worker = Worker::new("kill", "none");
        assert_eq!(worker.request(what), None, "{what}");
        assert_eq!(worker.child.wait().unwrap().signal(), Some(libc::SIGSYS), "{what}");
    }
    let mut worker = Worker::new("kill", "none");
    for what in ["nothing", "allocate", "random", "write"] {
        assert!(worker.request(what).unwrap().contains("Ok("), "{what}");
    }
}

fn worker_ends_with_its_parent() {
    // The parent of a process, for the signal, is the thread that has started it.
    let mut worker = std::thread::spawn(|| Worker::new("kill", "none")).join().unwrap();
    assert_eq!(worker.line(), None);
    assert_eq!(worker.child.wait().unwrap().signal(), Some(libc::SIGKILL));
}
