//! Tests the pod process as a process: start, reconnection, identity, kill -9, SIGTERM. This program is its own pod process
//! (see common/harness.rs): `process --dir DIR` serves on the fake engine.

mod common;

use common::{LIMIT, cgroup, eventually, exited, fake_machine_spec, harness, network, spec, until};
use nacelle_base::FailureKind;
use nacelle_model::process::{PodProcess, ProcessIdentity};
use nacelle_pod::client::{self, ClientError, PodClient};
use nacelle_pod::identity;
use nacelle_pod::record::{self, Phase};
use nacelle_pod::spec::{JailSpec, Seccomp};
use nacelle_proto::pod;
use std::collections::BTreeMap;
use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::task::Poll;
use std::time::{Duration, Instant};

const GRACE: Duration = Duration::from_secs(60);
/// The user of jailed processes.
const USER: u32 = 70_001;

fn main() -> ExitCode {
    harness::main(&[
        ("a_pod_outlives_its_client", || Box::pin(reconnect(RunDir::new()))),
        ("a_killed_pod_process_is_cleaned_up", || Box::pin(kill_and_clean_up(RunDir::new()))),
        ("a_cancelled_start_leaks_nothing", || Box::pin(cancel_start(RunDir::new()))),
        ("a_process_waits_for_its_admission", || Box::pin(wait_for_admission(RunDir::new()))),
        ("sigterm_stops_the_pod", || Box::pin(send_sigterm(RunDir::new()))),
        ("a_process_with_a_reused_pid_is_not_killed", || Box::pin(reuse_pid(RunDir::new()))),
        ("a_failed_start_has_its_reason", || Box::pin(fail_to_start(RunDir::new()))),
        ("only_one_process_serves_a_pod", || Box::pin(start_second_process(RunDir::new()))),
        ("a_jailed_pod_serves_and_is_cleaned_up", || Box::pin(serve_in_jail(RunDir::new()))),
        ("files_of_a_jailed_machine_pod_stay_roots", || Box::pin(map_owners(RunDir::new()))),
        ("a_forbidden_system_call_is_reported", || Box::pin(call_forbidden_syscall(RunDir::new()))),
        ("a_jailed_process_cannot_choose_what_the_daemon_kills", || Box::pin(name_foreign_processes(RunDir::new()))),
        ("a_jailed_process_cannot_hide_from_the_daemon", || Box::pin(hide_identity(RunDir::new()))),
        ("no_file_of_a_jailed_process_prevents_its_cleanup", || Box::pin(write_unusable_state())),
        ("a_symbolic_link_as_socket_is_not_followed", || Box::pin(replace_sockets(RunDir::new()))),
        ("a_pod_without_run_directory_is_cleaned_up", || Box::pin(remove_run_directory(RunDir::new()))),
    ])
}

/// Admits every process.
async fn admit(_started: PodProcess) -> Result<(), ClientError> {
    Ok(())
}

/// A run directory; dropping it ends the process that serves it.
struct RunDir {
    root: tempfile::TempDir,
    dir: PathBuf,
}

impl RunDir {
    fn new() -> RunDir {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("run");
        std::fs::create_dir(&dir).unwrap();
        std::fs::create_dir(root.path().join("logs")).unwrap();
        std::fs::write(root.path().join("blob"), vec![b'e'; 8192]).unwrap();
        RunDir { root, dir }
    }

    async fn spawn(&self) -> PodClient {
        let exe = std::env::current_exe().unwrap();
        client::spawn(&exe, &self.dir, &spec(self.root.path()), admit).await.unwrap()
    }

    /// Starts a process that enters its jail.
    async fn spawn_jailed(&self) -> PodClient {
        let mut spec = spec(self.root.path());
        let cgroup = Some(cgroup(self.root.path()));
        spec.jail = Some(JailSpec { seccomp: Seccomp::Kill, image_layers: None, cgroup, user: Some(USER) });
        client::spawn(&std::env::current_exe().unwrap(), &self.dir, &spec, admit).await.unwrap()
    }

    async fn run(&self, client: &PodClient, id: &str, script: &str) {
        let request = pod::CreateContainerRequest {
            id: id.into(),
            oci_spec: script.into(),
            image_key: "image".into(),
            image: vec![pod::Extent {
                path: self.root.path().join("blob").to_str().unwrap().into(),
                offset: 0,
                length: 8192,
            }],
            ..Default::default()
        };
        client.create_container(request).await.unwrap();
        client.start_container(id).await.unwrap();
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        harness::end(&self.dir);
    }
}

/// Sends a signal to a process that this test started.
fn signal(identity: &ProcessIdentity, signal: nix::sys::signal::Signal) {
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(identity.pid), signal).unwrap();
}

async fn reconnect(run_dir: RunDir) {
    let first = run_dir.spawn().await;
    first.configure(network()).await.unwrap();
    run_dir.run(&first, "a", "hold").await;
    let pid = nix::unistd::Pid::from_raw(first.identity().pid);
    assert_eq!(nix::unistd::getsid(Some(pid)).unwrap(), pid, "a session of its own");
    let inherited =
        std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().map(|fd| std::fs::read_link(fd.unwrap().path()));
    let inherited: Vec<_> =
        inherited.flatten().filter(|path| path.starts_with(run_dir.root.path().join("blob"))).collect();
    assert!(inherited.len() <= 1, "{inherited:?}");
    let identity = first.identity().clone();
    drop(first);

    let second = client::connect(&run_dir.dir).await.unwrap();
    assert_eq!(second.identity(), &identity);
    let state = second.state().await.unwrap();
    assert_eq!(state.containers[0].phase(), pod::ContainerPhase::Running);
    second.stop_container("a", GRACE).await.unwrap();
    assert_eq!(exited(&second, "a").await.exit_code, 143);
    second.stop(GRACE).await.unwrap();
    second.wait_for_exit().await.unwrap();
    assert!(matches!(client::connect(&run_dir.dir).await, Err(ClientError::NotRunning { .. })));
    // There is nothing to clean up, and the exit code is still known.
    let record = client::clean_up(&run_dir.dir, None).await.unwrap().unwrap();
    assert_eq!((record.phase, record.containers[0].exit_code), (Phase::Stopped, 143));
}

async fn kill_and_clean_up(run_dir: RunDir) {
    let client = run_dir.spawn().await;
    client.configure(network()).await.unwrap();
    run_dir.run(&client, "done", "exit:7").await;
    exited(&client, "done").await;
    run_dir.run(&client, "running", "hold").await;
    signal(client.identity(), nix::sys::signal::Signal::SIGKILL);
    client.wait_for_exit().await.unwrap();
    let before = record::read(&run_dir.dir).unwrap().unwrap();
    assert_eq!((before.phase, before.containers[0].exit_code), (Phase::Ready, 7));
    for _ in 0..2 {
        let record = client::clean_up(&run_dir.dir, None).await.unwrap().unwrap();
        assert_eq!(record.phase, Phase::Stopped);
        let codes: Vec<u32> = record.containers.iter().map(|container| container.exit_code).collect();
        assert_eq!(codes, [7, 255]);
        assert!(record.containers[1].message.contains("died"));
    }
    assert!(!run_dir.dir.join("jail/pod.sock").exists());
    let disks = std::fs::read_dir(run_dir.root.path().join("templates")).into_iter().flatten().flatten();
    let disks: Vec<_> = disks.filter(|file| file.file_name().to_string_lossy().starts_with("pod-")).collect();
    assert!(disks.is_empty(), "{disks:?}");

    // A pod without a run directory has leaked nothing.
    assert!(client::clean_up(&run_dir.root.path().join("none"), None).await.unwrap().is_none());

    // A process that still runs is killed.
    let client = run_dir.spawn().await;
    client.configure(network()).await.unwrap();
    client::clean_up(&run_dir.dir, None).await.unwrap();
    assert!(!identity::is_alive(client.identity()).unwrap());
}

async fn cancel_start(run_dir: RunDir) {
    let exe = std::env::current_exe().unwrap();
    let spec = spec(run_dir.root.path());
    // The future is dropped while the process is being started: the process is recorded, and ends by itself.
    drop_when(client::spawn(&exe, &run_dir.dir, &spec, admit), || true).await;
    eventually("the process is recorded", || identity::read(&run_dir.dir).unwrap().is_some()).await;
    let first = identity::read(&run_dir.dir).unwrap().unwrap();
    eventually("a process that was not admitted has ended", || !identity::is_alive(&first).unwrap()).await;
    // The future is dropped after the admission: the cleanup ends the process.
    let admitted = std::cell::Cell::new(false);
    let admit = |_started| {
        admitted.set(true);
        async { Ok(()) }
    };
    drop_when(client::spawn(&exe, &run_dir.dir, &spec, admit), || admitted.get()).await;
    let second = identity::read(&run_dir.dir).unwrap().unwrap();
    assert_ne!(first, second);
    client::clean_up(&run_dir.dir, None).await.unwrap();
    assert!(!identity::is_alive(&second).unwrap());
}

/// Polls a start until it is pending while the condition is true, and drops it there.
async fn drop_when(start: impl Future<Output = Result<PodClient, ClientError>>, condition: impl Fn() -> bool) {
    let mut start = std::pin::pin!(start);
    std::future::poll_fn(|context| match start.as_mut().poll(context) {
        Poll::Ready(result) => panic!("the start ended before it was dropped: {result:?}"),
        Poll::Pending if condition() => Poll::Ready(()),
        Poll::Pending => Poll::Pending,
    })
    .await;
}

async fn wait_for_admission(run_dir: RunDir) {
    let (exe, spec) = (std::env::current_exe().unwrap(), spec(run_dir.root.path()));
    let socket = nacelle_pod::SOCKET_FILE.in_jail(&nacelle_pod::jail_dir(&run_dir.dir));
    // The admission fails: the process is gone, and nothing has happened.
    let mut refused_pid = 0;
    let refused = client::spawn(&exe, &run_dir.dir, &spec, |started| {
        refused_pid = started.identity.pid;
        let cgroup = "a.slice/b.scope".into();
        async move { Err(ClientError::Cgroup { cgroup, kind: FailureKind::Unavailable, source: "no such service".into() }) }
    });
    let refused = refused.await.unwrap_err();
    assert_eq!(refused.to_string(), "cannot move the pod process into the cgroup a.slice/b.scope");
    assert!(!Path::new(&format!("/proc/{refused_pid}")).exists());
    // The future is dropped while the process waits for its admission: the process ends by itself.
    let held_pid = std::cell::Cell::new(0);
    let never = |started: PodProcess| {
        held_pid.set(started.identity.pid);
        std::future::pending()
    };
    drop_when(client::spawn(&exe, &run_dir.dir, &spec, never), || held_pid.get() != 0).await;
    assert_eq!(identity::read(&run_dir.dir).unwrap().unwrap().pid, held_pid.get());
    let alive = || identity::read(&run_dir.dir).unwrap().is_some_and(|process| identity::is_alive(&process).unwrap());
    eventually("a process whose start was dropped has ended", || !alive()).await;
    assert!(!socket.exists());
    // The process serves only after its admission.
    let admit = |_started| async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(!socket.exists());
        Ok(())
    };
    let pod = client::spawn(&exe, &run_dir.dir, &spec, admit).await.unwrap();
    assert!(identity::is_alive(pod.identity()).unwrap());
}

async fn send_sigterm(run_dir: RunDir) {
    let client = run_dir.spawn().await;
    client.configure(network()).await.unwrap();
    run_dir.run(&client, "a", "hold").await;
    signal(client.identity(), nix::sys::signal::Signal::SIGTERM);
    client.wait_for_exit().await.unwrap();
    let record = record::read(&run_dir.dir).unwrap().unwrap();
    assert_eq!((record.phase, record.containers[0].exit_code), (Phase::Stopped, 143));
}

async fn reuse_pid(run_dir: RunDir) {
    // A process with the same pid and another start time.
    let mut other = std::process::Command::new("sleep").arg("600").spawn().unwrap();
    let pid = i32::try_from(other.id()).unwrap();
    let own = identity::of_this_process().unwrap();
    let foreign = ProcessIdentity { pid, start_time: own.start_time.wrapping_sub(1), boot_id: own.boot_id };
    identity::write(&foreign, &run_dir.dir).unwrap();
    assert!(matches!(client::connect(&run_dir.dir).await, Err(ClientError::NotRunning { .. })));
    assert!(client::clean_up(&run_dir.dir, None).await.unwrap().is_none());
    assert!(other.try_wait().unwrap().is_none(), "the process was killed");
    other.kill().unwrap();
    other.wait().unwrap();
}

async fn fail_to_start(run_dir: RunDir) {
    let bad = client::spawn(Path::new("/none/nacelle"), &run_dir.dir, &spec(run_dir.root.path()), admit).await;
    assert!(matches!(bad, Err(ClientError::Start { .. })));
    let ended = client::spawn(Path::new("/bin/false"), &run_dir.dir, &spec(run_dir.root.path()), admit).await;
    assert!(matches!(ended, Err(ClientError::EndedBeforeReply { .. })), "{ended:?}");
    let mut wrong = spec(run_dir.root.path());
    wrong.vcpus = 0;
    assert!(matches!(
        client::spawn(Path::new("/bin/false"), &run_dir.dir, &wrong, admit).await,
        Err(ClientError::Spec(_))
    ));
    assert!(matches!(client::connect(&run_dir.dir).await, Err(ClientError::NotRunning { .. })));
}

async fn start_second_process(run_dir: RunDir) {
    let client = run_dir.spawn().await;
    let exe = std::env::current_exe().unwrap();
    let mut second =
        std::process::Command::new(exe).arg("--dir").arg(&run_dir.dir).stdin(Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(&mut second.stdin.take().unwrap(), b"\n").unwrap();
    let deadline = Instant::now() + LIMIT;
    let status = loop {
        match second.try_wait().unwrap() {
            Some(status) => break status,
            None => assert!(Instant::now() < deadline),
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    };
    assert!(!status.success());
    until(&client, "the first process still serves", |_| true).await;
    client.stop(GRACE).await.unwrap();
    client.wait_for_exit().await.unwrap();
}

/// Returns the fields of a status file of /proc.
fn status(path: &Path) -> BTreeMap<String, String> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().filter_map(|line| line.split_once(':')).map(|(k, v)| (k.to_owned(), v.trim().to_owned())).collect()
}

async fn serve_in_jail(run_dir: RunDir) {
    if !nix::unistd::geteuid().is_root() {
        return println!("skipped: not root");
    }
    let client = run_dir.spawn_jailed().await;
    client.configure(network()).await.unwrap();
    let log = run_dir.root.path().join("logs/a/0.log");
    let request = pod::CreateContainerRequest {
        id: "a".into(),
        oci_spec: "big:20000;hold".into(),
        image_key: "image".into(),
        image: vec![pod::Extent {
            path: run_dir.root.path().join("blob").to_str().unwrap().into(),
            offset: 0,
            length: 8192,
        }],
        ..Default::default()
    };
    client.create_container(request).await.unwrap();
    let open_log = || nacelle_pod::client::open_log(&run_dir.root.path().join("logs"), &log).unwrap();
    client.set_log("a", open_log()).await.unwrap();
    client.start_container("a").await.unwrap();
    let written = || std::fs::read_to_string(&log).is_ok_and(|text| text.contains("xxx"));
    until(&client, "the log is written", |_| written()).await;
    // Renames the log as kubelet does.
    std::fs::rename(&log, log.with_extension("old")).unwrap();
    client.set_log("a", open_log()).await.unwrap();
    let process = PathBuf::from(format!("/proc/{}", client.identity().pid));
    // It is process 1 of its own PID namespace; so is the process beside it that serves files its second one.
    let numbers = |pid: i32| status(Path::new(&format!("/proc/{pid}/status")))["NSpid"].clone();
    let pid = client.identity().pid;
    assert_eq!(numbers(pid), format!("{pid}\t1"));
    let beside: serde_json::Value =
        serde_json::from_slice(&std::fs::read(run_dir.dir.join("share.json")).unwrap()).unwrap();
    let beside = i32::try_from(beside["pid"].as_i64().unwrap()).unwrap();
    assert_eq!(numbers(beside), format!("{beside}\t2"));
    // Processes that are started later are in the node's namespace.
    let mut later = std::process::Command::new("sleep").arg("600").spawn().unwrap();
    let later_pid = i32::try_from(later.id()).unwrap();
    assert_eq!(numbers(later_pid), later_pid.to_string());
    later.kill().unwrap();
    later.wait().unwrap();
    // It has images and logs as open files, and sees none by a name.
    let seen_as = |path: &Path| process.join("root").join(path.strip_prefix("/").unwrap());
    assert!(seen_as(&nacelle_pod::jail_dir(&run_dir.dir)).exists());
    for hidden in ["blob", "logs"] {
        assert!(!seen_as(&run_dir.root.path().join(hidden)).exists(), "{hidden}");
    }
    let mut threads = 0;
    for task in std::fs::read_dir(process.join("task")).unwrap() {
        // A thread that has ended meanwhile is skipped.
        let path = task.unwrap().path().join("status");
        if !path.exists() {
            continue;
        }
        let status = status(&path);
        assert_eq!((status["NoNewPrivs"].as_str(), status["Seccomp"].as_str()), ("1", "2"), "{}", status["Name"]);
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(status[set].trim_start_matches('0'), "", "{} {set}", status["Name"]);
        }
        let ids = status["Uid"].split_whitespace().chain(status["Gid"].split_whitespace());
        assert_eq!(ids.filter(|id| *id == USER.to_string()).count(), 8, "{}", status["Name"]);
        assert_eq!(status["Groups"], "");
        threads += 1;
    }
    assert!(threads > 2);
    // The file server acts with the ids of the files' owners.
    assert_eq!(status(&PathBuf::from(format!("/proc/{beside}/status")))["Uid"], "0\t0\t0\t0");
    let mounts = std::fs::read_to_string(process.join("mountinfo")).unwrap();
    let points: Vec<&str> = mounts.lines().filter_map(|line| line.split(' ').nth(4)).collect();
    let own = run_dir.root.path().to_str().unwrap();
    let known = ["/usr", "/bin", "/sbin", "/lib", "/etc/", "/dev/null", "/dev/urandom", own];
    for point in points {
        assert!(point == "/" || known.iter().any(|known| point.starts_with(known)), "{point}");
    }
    let group = nacelle_jail::cgroup::directories(&cgroup(run_dir.root.path()));
    let there = group.iter().filter(|directory| directory.exists()).count();
    println!("control groups: {there}");

    signal(client.identity(), nix::sys::signal::Signal::SIGKILL);
    client.wait_for_exit().await.unwrap();
    // Nothing of a PID namespace outlives its process 1. The kernel reports the end of that one a moment before /proc forgets the others.
    let deadline = Instant::now() + Duration::from_secs(5);
    while Path::new(&format!("/proc/{beside}")).exists() {
        assert!(Instant::now() < deadline, "the file server outlives the pod process");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let record = client::clean_up(&run_dir.dir, None).await.unwrap().unwrap();
    assert_eq!(record.containers[0].message, "the pod process died of signal 9");
    assert!(group.iter().all(|directory| !directory.exists()), "{group:?}");
    let disks = std::fs::read_dir(run_dir.root.path().join("templates")).unwrap().flatten();
    assert_eq!(disks.filter(|file| file.file_name().to_string_lossy().starts_with("pod-")).count(), 0);
}

async fn map_owners(run_dir: RunDir) {
    if !nix::unistd::geteuid().is_root() {
        return println!("skipped: not root");
    }
    if let Err(error) = nacelle_pod::check_idmapped_mounts([run_dir.root.path()], USER) {
        return println!("skipped: {error}: {}", error.source);
    }
    let [keep, images] = ["keep", "images"].map(|name| run_dir.root.path().join(name));
    for directory in [&keep, &images] {
        std::fs::create_dir(directory).unwrap();
        std::fs::set_permissions(directory, Permissions::from_mode(0o700)).unwrap();
        std::fs::write(directory.join("old"), "old").unwrap();
        std::fs::set_permissions(directory.join("old"), Permissions::from_mode(0o600)).unwrap();
    }
    let mut spec = spec(run_dir.root.path());
    spec.engine = fake_machine_spec(keep.clone());
    let (image_layers, cgroup) = (Some(images.clone()), Some(cgroup(run_dir.root.path())));
    spec.jail = Some(JailSpec { seccomp: Seccomp::Kill, image_layers, cgroup, user: Some(USER) });
    let scratch = spec.scratch_file();
    let client = client::spawn(&std::env::current_exe().unwrap(), &run_dir.dir, &spec, admit).await.unwrap();
    let process = PathBuf::from(format!("/proc/{}", client.identity().pid));
    let ids = status(&process.join("status"));
    assert_eq!([&ids["Uid"], &ids["Gid"]], [&[USER.to_string().as_str(); 4].join("\t"); 2]);
    let seen = |path: &Path| process.join("root").join(path.strip_prefix("/").unwrap());
    {
        let _acting = ActingUser::new();
        for old in [keep.join("old"), images.join("old")] {
            assert_eq!(std::fs::read_to_string(seen(&old)).unwrap(), "old");
            assert!(std::fs::read(&old).is_err(), "outside of the jail it is root's");
        }
        for new in [keep.join("new"), scratch.join("new")] {
            std::fs::write(seen(&new), "new").unwrap();
        }
        let sealed = std::fs::write(seen(&images.join("old")), "new").unwrap_err();
        assert_eq!(sealed.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
        assert_eq!(std::fs::read_dir(process.join("root/dev/vfio")).unwrap().count(), 0);
    }
    for path in [&keep.join("old"), &keep.join("new"), &scratch.join("new"), &scratch, &run_dir.dir.join("vfio")] {
        let file = std::fs::metadata(path).unwrap();
        assert_eq!((file.uid(), file.gid()), (0, 0), "{}", path.display());
    }
    signal(client.identity(), nix::sys::signal::Signal::SIGKILL);
    client.wait_for_exit().await.unwrap();
    client::clean_up(&run_dir.dir, None).await.unwrap();
    assert!(!scratch.exists() && keep.join("new").exists(), "a persistent VM outlives its pod");
}

async fn call_forbidden_syscall(run_dir: RunDir) {
    let client = run_dir.spawn().await;
    client.configure(network()).await.unwrap();
    run_dir.run(&client, "a", "hold").await;
    // Sends the signal that the kernel sends.
    signal(client.identity(), nix::sys::signal::Signal::SIGSYS);
    client.wait_for_exit().await.unwrap();
    let record = client::clean_up(&run_dir.dir, None).await.unwrap().unwrap();
    assert_eq!(record.failure, "the pod process died of a system call that its seccomp filter forbids");
}

/// Writes what the process of this pod can write, wherever it can: in the run directory as the process sees it.
fn write_as(client: &PodClient, dir: &Path, name: &str, write: impl Fn(&Path)) {
    let seen = PathBuf::from(format!("/proc/{}/root{}", client.identity().pid, dir.display()));
    let _acting = ActingUser::new();
    for part in [seen.clone(), seen.join("jail")] {
        // Where the process cannot write, the attack has failed already.
        let _ = std::fs::remove_file(part.join(name));
        if std::fs::write(part.join("probe"), "").is_ok() {
            std::fs::remove_file(part.join("probe")).unwrap();
            write(&part.join(name));
        }
    }
}

/// While it lives, this thread accesses files as the user of jailed processes, without root's rights on files.
struct ActingUser;

impl ActingUser {
    fn new() -> ActingUser {
        nix::unistd::setfsgid(USER.into());
        nix::unistd::setfsuid(USER.into());
        ActingUser
    }
}

impl Drop for ActingUser {
    fn drop(&mut self) {
        nix::unistd::setfsuid(0.into());
        nix::unistd::setfsgid(0.into());
    }
}

/// Another process in a cgroup of its own, if the node allows that.
struct Victim {
    child: std::process::Child,
    group: PathBuf,
}

impl Victim {
    fn new(root: &Path) -> Victim {
        let child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let group = Path::new("nacelle").join(format!("victim-{}", root.file_name().unwrap().display()));
        for directory in nacelle_jail::cgroup::directories(&group) {
            if std::fs::create_dir_all(&directory).is_ok() {
                let _ = std::fs::write(directory.join("cgroup.procs"), child.id().to_string());
            }
        }
        Victim { child, group }
    }

    fn lives(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    fn groups(&self) -> usize {
        nacelle_jail::cgroup::directories(&self.group).iter().filter(|directory| directory.exists()).count()
    }

    /// Returns its identity as `process.json` contains it.
    fn identity(&self) -> ProcessIdentity {
        let pid = i32::try_from(self.child.id()).unwrap();
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let start_time = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap().parse().unwrap();
        ProcessIdentity { pid, start_time, ..identity::of_this_process().unwrap() }
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = nacelle_jail::cgroup::remove(&self.group);
    }
}

async fn name_foreign_processes(run_dir: RunDir) {
    if !nix::unistd::geteuid().is_root() {
        return println!("skipped: not root");
    }
    let mut victim = Victim::new(run_dir.root.path());
    let groups = victim.groups();
    // The directory of another pod, which has no guest.
    let mut foreign = spec(run_dir.root.path());
    foreign.id = nacelle_base::PodId::from_bytes([7; 32]);
    foreign.engine = nacelle_pod::spec::EngineSpec::Host { agent: "/none".into(), shares: Default::default() };
    foreign.jail =
        Some(JailSpec { seccomp: Seccomp::Kill, image_layers: None, cgroup: Some(victim.group.clone()), user: None });
    let others = foreign.scratch_file();
    std::fs::create_dir_all(&others).unwrap();
    std::fs::write(others.join("data"), "another pod's").unwrap();
    let (spec, identity) = (serde_json::to_vec(&foreign).unwrap(), serde_json::to_vec(&victim.identity()).unwrap());

    let client = run_dir.spawn_jailed().await;
    client.configure(network()).await.unwrap();
    let own = client.identity().clone();
    for (name, content) in [("spec.json", &spec), ("process.json", &identity), ("share.json", &identity)] {
        write_as(&client, &run_dir.dir, name, |path| std::fs::write(path, content).unwrap());
    }
    client::clean_up(&run_dir.dir, None).await.unwrap();
    assert!(victim.lives(), "a process was killed that only the jailed process has named");
    assert_eq!(victim.groups(), groups, "a control group was removed that only the jailed process has named");
    assert!(others.join("data").exists(), "a directory was removed that only the jailed process has named");
    assert!(!identity::is_alive(&own).unwrap());
    let group = nacelle_jail::cgroup::directories(&cgroup(run_dir.root.path()));
    assert!(group.iter().all(|directory| !directory.exists()), "its own group is gone: {group:?}");
}

async fn hide_identity(run_dir: RunDir) {
    if !nix::unistd::geteuid().is_root() {
        return println!("skipped: not root");
    }
    let client = run_dir.spawn_jailed().await;
    client.configure(network()).await.unwrap();
    let own = client.identity().clone();
    let wrong = ProcessIdentity { start_time: own.start_time + 1, ..own.clone() };
    write_as(&client, &run_dir.dir, "process.json", |path| {
        std::fs::write(path, serde_json::to_vec(&wrong).unwrap()).unwrap()
    });
    // Without its specification the daemon would not know its cgroup.
    write_as(&client, &run_dir.dir, "spec.json", |path| std::fs::write(path, "{}").unwrap());
    assert!(client::connect(&run_dir.dir).await.is_ok(), "the process is still found");
    client::clean_up(&run_dir.dir, None).await.unwrap();
    assert!(!identity::is_alive(&own).unwrap(), "the process still runs");
    let group = nacelle_jail::cgroup::directories(&cgroup(run_dir.root.path()));
    assert!(group.iter().all(|directory| !directory.exists()), "its group is gone: {group:?}");
}

/// Ends the test program if a test hangs, even in a system call.
struct Watched(#[expect(dead_code, reason = "what counts is when it is dropped")] std::sync::mpsc::Sender<()>);

impl Watched {
    fn new(what: &'static str) -> Watched {
        let (end, ended) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            if ended.recv_timeout(LIMIT) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                eprintln!("no end within {LIMIT:?}: {what}");
                std::process::exit(1);
            }
        });
        Watched(end)
    }
}

async fn write_unusable_state() {
    if !nix::unistd::geteuid().is_root() {
        return println!("skipped: not root");
    }
    type Write = fn(&Path);
    let kinds: [(&str, Write); 8] = [
        ("3 GiB without blocks", |path| std::fs::File::create(path).unwrap().set_len(3 << 30).unwrap()),
        ("a FIFO", |path| nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).unwrap()),
        ("a link to /etc/shadow", |path| std::os::unix::fs::symlink("/etc/shadow", path).unwrap()),
        ("a link to itself", |path| std::os::unix::fs::symlink("state.json", path).unwrap()),
        ("a directory", |path| std::fs::create_dir(path).unwrap()),
        ("garbage", |path| std::fs::write(path, [0xff; 4096]).unwrap()),
        ("20,000 files beside a directory", |path| {
            std::fs::create_dir(path).unwrap();
            (0..20_000)
                .for_each(|number| drop(std::fs::File::create(path.with_file_name(number.to_string())).unwrap()));
        }),
        ("deep JSON", |path| std::fs::write(path, "[".repeat(1 << 19)).unwrap()),
    ];
    for (what, write) in kinds {
        let run_dir = RunDir::new();
        let client = run_dir.spawn_jailed().await;
        client.configure(network()).await.unwrap();
        let own = client.identity().clone();
        write_as(&client, &run_dir.dir, "state.json", write);
        signal(client.identity(), nix::sys::signal::Signal::SIGKILL);
        client.wait_for_exit().await.unwrap();
        let before = memory();
        let watched = Watched::new(what);
        assert_eq!(client::clean_up(&run_dir.dir, None).await.unwrap(), None, "{what}");
        drop(watched);
        assert!(memory() < before + (64 << 20), "{what}: {} bytes more", memory() - before);
        assert!(!identity::is_alive(&own).unwrap(), "{what}");
        // The same for the whole run directory.
        nacelle_base::files::remove_tree_if_there(&run_dir.dir).unwrap();
        assert!(!run_dir.dir.exists() && Path::new("/etc/shadow").exists(), "{what}");
    }
}

/// Returns the peak memory of this process in bytes.
fn memory() -> u64 {
    let status = status(Path::new("/proc/self/status"));
    status["VmHWM"].trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

async fn replace_sockets(run_dir: RunDir) {
    if !nix::unistd::geteuid().is_root() {
        return println!("skipped: not root");
    }
    let client = run_dir.spawn_jailed().await;
    client.configure(network()).await.unwrap();
    let other = run_dir.root.path().join("other.sock");
    let listener = std::os::unix::net::UnixListener::bind(&other).unwrap();
    listener.set_nonblocking(true).unwrap();
    for name in ["pod.sock", "stream.sock"] {
        write_as(&client, &run_dir.dir, name, |path| std::os::unix::fs::symlink(&other, path).unwrap());
    }
    assert!(client::connect(&run_dir.dir).await.is_err());
    let open = pod::StreamOpen { id: "a".into(), ..Default::default() };
    assert!(client.open_stream(open).await.is_err());
    assert!(listener.accept().is_err(), "the daemon has connected to what a link leads to");
    client::clean_up(&run_dir.dir, None).await.unwrap();
    assert!(other.exists(), "what the link leads to was removed");
}

async fn remove_run_directory(run_dir: RunDir) {
    let mut stored = None;
    let admit = |started: PodProcess| {
        stored = Some(started);
        async { Ok(()) }
    };
    let mut spec = spec(run_dir.root.path());
    spec.jail = Some(JailSpec {
        seccomp: Seccomp::Kill,
        image_layers: None,
        cgroup: Some(cgroup(run_dir.root.path())),
        user: Some(USER),
    });
    if !nix::unistd::geteuid().is_root() {
        spec.jail = None;
    }
    let client = client::spawn(&std::env::current_exe().unwrap(), &run_dir.dir, &spec, admit).await.unwrap();
    client.configure(network()).await.unwrap();
    run_dir.run(&client, "a", "hold").await;
    // Simulates a tmpfs that was mounted again.
    std::fs::remove_dir_all(&run_dir.dir).unwrap();
    assert!(matches!(client::connect(&run_dir.dir).await, Err(ClientError::NotRunning { .. })));
    let stored = stored.unwrap();
    assert_eq!(stored.identity, *client.identity());
    for _ in 0..2 {
        assert!(client::clean_up(&run_dir.dir, Some(&stored)).await.unwrap().is_none());
        assert!(!identity::is_alive(&stored.identity).unwrap(), "the process still runs after the cleanup");
    }
    let group = nacelle_jail::cgroup::directories(&cgroup(run_dir.root.path()));
    assert!(group.iter().all(|directory| !directory.exists()), "{group:?}");
}
