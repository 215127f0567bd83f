//! Owns: what happens between processes: start, reconnection, identity, kill -9, SIGTERM. This program is its own pod
//! process (see common/harness.rs): `process --dir DIR` serves on the fake engine.

mod common;

use common::{LIMIT, cgroup, exited, harness, network, spec, until};
use nacelle_base::Kind;
use nacelle_pod::client::{self, ClientError, PodClient};
use nacelle_pod::identity::Identity;
use nacelle_pod::record::{self, Phase};
use nacelle_pod::spec::{JailSpec, Seccomp};
use nacelle_proto::pod;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

const GRACE: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    harness::main(&[
        ("a_pod_outlives_its_client", || Box::pin(outlives(Place::new()))),
        ("kill_9_is_cleared_away", || Box::pin(killed(Place::new()))),
        ("a_start_that_is_given_up_leaves_nothing", || Box::pin(given_up(Place::new()))),
        ("a_held_process_waits_for_its_group", || Box::pin(held(Place::new()))),
        ("sigterm_stops_the_pod", || Box::pin(terminated(Place::new()))),
        ("a_foreign_process_is_left_alone", || Box::pin(foreign(Place::new()))),
        ("what_does_not_start_says_why", || Box::pin(no_start(Place::new()))),
        ("one_process_serves_a_pod", || Box::pin(served_once(Place::new()))),
        ("a_jailed_pod_serves_and_is_cleared_away", || Box::pin(jailed(Place::new()))),
        ("a_forbidden_system_call_is_told_as_such", || Box::pin(forbidden(Place::new()))),
    ])
}

/// A run directory; dropping it ends whatever serves there.
struct Place {
    root: tempfile::TempDir,
    dir: PathBuf,
}

impl Place {
    fn new() -> Place {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("run");
        std::fs::create_dir(&dir).unwrap();
        std::fs::create_dir(root.path().join("logs")).unwrap();
        std::fs::write(root.path().join("blob"), vec![b'e'; 8192]).unwrap();
        Place { root, dir }
    }

    async fn spawn(&self) -> PodClient {
        let exe = std::env::current_exe().unwrap();
        client::spawn(&exe, &self.dir, &spec(self.root.path())).await.unwrap()
    }

    /// A process that shuts itself in.
    async fn spawn_jailed(&self) -> PodClient {
        let mut spec = spec(self.root.path());
        let images = vec![self.root.path().join("blob")];
        let cgroup = Some(cgroup(self.root.path()));
        spec.jail = Some(JailSpec { seccomp: Seccomp::Kill, images, cgroup });
        client::spawn(&std::env::current_exe().unwrap(), &self.dir, &spec).await.unwrap()
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

impl Drop for Place {
    fn drop(&mut self) {
        harness::end(&self.dir);
    }
}

/// Signals a process that this test started.
fn signal(identity: &Identity, signal: nix::sys::signal::Signal) {
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(identity.pid), signal).unwrap();
}

async fn outlives(place: Place) {
    let first = place.spawn().await;
    first.configure(network()).await.unwrap();
    place.run(&first, "a", "hold").await;
    let pid = nix::unistd::Pid::from_raw(first.identity().pid);
    assert_eq!(nix::unistd::getsid(Some(pid)).unwrap(), pid, "a session of its own");
    let inherited =
        std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().map(|fd| std::fs::read_link(fd.unwrap().path()));
    let inherited: Vec<_> =
        inherited.flatten().filter(|path| path.starts_with(place.root.path().join("blob"))).collect();
    assert!(inherited.len() <= 1, "{inherited:?}");
    let identity = first.identity().clone();
    drop(first);

    let second = client::connect(&place.dir).await.unwrap();
    assert_eq!(second.identity(), &identity);
    let state = second.state().await.unwrap();
    assert_eq!(state.containers[0].phase(), pod::ContainerPhase::Running);
    second.stop_container("a", GRACE).await.unwrap();
    assert_eq!(exited(&second, "a").await.exit_code, 143);
    second.stop(GRACE).await.unwrap();
    second.ended().await.unwrap();
    assert!(matches!(client::connect(&place.dir).await, Err(ClientError::Gone { .. })));
    // Nothing is left to be cleared away, and the exit code is still known.
    let record = client::clean_up(&place.dir).await.unwrap().unwrap();
    assert_eq!((record.phase, record.containers[0].exit_code), (Phase::Stopped, 143));
}

async fn killed(place: Place) {
    let client = place.spawn().await;
    client.configure(network()).await.unwrap();
    place.run(&client, "done", "exit:7").await;
    exited(&client, "done").await;
    place.run(&client, "running", "hold").await;
    signal(client.identity(), nix::sys::signal::Signal::SIGKILL);
    client.ended().await.unwrap();
    let before = record::read(&place.dir).unwrap().unwrap();
    assert_eq!((before.phase, before.containers[0].exit_code), (Phase::Ready, 7));
    for _ in 0..2 {
        let record = client::clean_up(&place.dir).await.unwrap().unwrap();
        assert_eq!(record.phase, Phase::Stopped);
        let codes: Vec<u32> = record.containers.iter().map(|container| container.exit_code).collect();
        assert_eq!(codes, [7, 255]);
        assert!(record.containers[1].message.contains("died"));
    }
    assert!(!place.dir.join("pod.sock").exists());
    let disks = std::fs::read_dir(place.root.path().join("templates")).into_iter().flatten().flatten();
    let disks: Vec<_> = disks.filter(|file| file.file_name().to_string_lossy().starts_with("pod-")).collect();
    assert!(disks.is_empty(), "{disks:?}");

    // A pod without a folder has left nothing.
    assert!(client::clean_up(&place.root.path().join("none")).await.unwrap().is_none());

    // One that still runs is killed.
    let client = place.spawn().await;
    client.configure(network()).await.unwrap();
    client::clean_up(&place.dir).await.unwrap();
    assert!(!client.identity().is_alive().unwrap());
}

async fn given_up(place: Place) {
    let exe = std::env::current_exe().unwrap();
    let spec = spec(place.root.path());
    // Once through the start, then dropped.
    let given_up = tokio::time::timeout(Duration::from_millis(1), client::spawn(&exe, &place.dir, &spec)).await;
    if let Ok(client) = given_up {
        client.unwrap();
    }
    let identity = Identity::read(&place.dir).unwrap().unwrap();
    client::clean_up(&place.dir).await.unwrap();
    assert!(!identity.is_alive().unwrap());
}

async fn held(place: Place) {
    let (exe, spec) = (std::env::current_exe().unwrap(), spec(place.root.path()));
    // Refused: it is gone, and nothing has happened.
    let mut refused_pid = 0;
    let refused = client::spawn_held(&exe, &place.dir, &spec, |pid| {
        refused_pid = pid;
        let group = "a.slice/b.scope".into();
        async move { Err(ClientError::Group { group, kind: Kind::Unavailable, source: "nobody there".into() }) }
    });
    let refused = refused.await.unwrap_err();
    assert_eq!(refused.to_string(), "the pod process cannot be put into the control group a.slice/b.scope");
    assert!(!Path::new(&format!("/proc/{refused_pid}")).exists());
    // Given up: it ends by itself.
    let given_up = client::spawn_held(&exe, &place.dir, &spec, |_pid| std::future::pending());
    assert!(tokio::time::timeout(Duration::from_millis(500), given_up).await.is_err());
    let deadline = Instant::now() + LIMIT;
    while Identity::read(&place.dir).unwrap().is_some_and(|identity| identity.is_alive().unwrap()) {
        assert!(Instant::now() < deadline, "a process that was given up does not end");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert!(!place.dir.join(nacelle_pod::SOCKET_FILE).exists());
    // Admitted: only then does it serve.
    let socket = place.dir.join(nacelle_pod::SOCKET_FILE);
    let admit = |_pid| async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(!socket.exists());
        Ok(())
    };
    let pod = client::spawn_held(&exe, &place.dir, &spec, admit).await.unwrap();
    assert!(pod.identity().is_alive().unwrap());
}

async fn terminated(place: Place) {
    let client = place.spawn().await;
    client.configure(network()).await.unwrap();
    place.run(&client, "a", "hold").await;
    signal(client.identity(), nix::sys::signal::Signal::SIGTERM);
    client.ended().await.unwrap();
    let record = record::read(&place.dir).unwrap().unwrap();
    assert_eq!((record.phase, record.containers[0].exit_code), (Phase::Stopped, 143));
}

async fn foreign(place: Place) {
    // A process that has the pid, but not the start time.
    let mut other = std::process::Command::new("sleep").arg("600").spawn().unwrap();
    let pid = i32::try_from(other.id()).unwrap();
    let own = Identity::own().unwrap();
    Identity { pid, start_time: own.start_time.wrapping_sub(1), boot_id: own.boot_id }.write(&place.dir).unwrap();
    assert!(matches!(client::connect(&place.dir).await, Err(ClientError::Gone { .. })));
    assert!(client::clean_up(&place.dir).await.unwrap().is_none());
    assert!(other.try_wait().unwrap().is_none(), "it lives");
    other.kill().unwrap();
    other.wait().unwrap();
}

async fn no_start(place: Place) {
    let bad = client::spawn(Path::new("/none/nacelle"), &place.dir, &spec(place.root.path())).await;
    assert!(matches!(bad, Err(ClientError::Start { .. })));
    let ended = client::spawn(Path::new("/bin/false"), &place.dir, &spec(place.root.path())).await;
    assert!(matches!(ended, Err(ClientError::EndedAtOnce { .. })), "{ended:?}");
    let mut wrong = spec(place.root.path());
    wrong.vcpus = 0;
    assert!(matches!(client::spawn(Path::new("/bin/false"), &place.dir, &wrong).await, Err(ClientError::Spec(_))));
    assert!(matches!(client::connect(&place.dir).await, Err(ClientError::Gone { .. })));
}

async fn served_once(place: Place) {
    let client = place.spawn().await;
    let exe = std::env::current_exe().unwrap();
    let mut second = std::process::Command::new(exe).arg("--dir").arg(&place.dir).spawn().unwrap();
    let deadline = Instant::now() + LIMIT;
    let status = loop {
        match second.try_wait().unwrap() {
            Some(status) => break status,
            None => assert!(Instant::now() < deadline),
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    };
    assert!(!status.success());
    until(&client, "the first goes on", |_| true).await;
    client.stop(GRACE).await.unwrap();
    client.ended().await.unwrap();
}

/// The fields of a status file of /proc.
fn status(path: &Path) -> BTreeMap<String, String> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().filter_map(|line| line.split_once(':')).map(|(k, v)| (k.to_owned(), v.trim().to_owned())).collect()
}

async fn jailed(place: Place) {
    if !nix::unistd::geteuid().is_root() {
        return println!("skipped: not root");
    }
    let client = place.spawn_jailed().await;
    client.configure(network()).await.unwrap();
    let log = place.root.path().join("logs/a/0.log");
    let request = pod::CreateContainerRequest {
        id: "a".into(),
        oci_spec: "big:20000;hold".into(),
        image_key: "image".into(),
        image: vec![pod::Extent {
            path: place.root.path().join("blob").to_str().unwrap().into(),
            offset: 0,
            length: 8192,
        }],
        log_path: log.to_str().unwrap().into(),
        ..Default::default()
    };
    client.create_container(request.clone()).await.unwrap();
    client.start_container("a").await.unwrap();
    let written = || std::fs::read_to_string(&log).is_ok_and(|text| text.contains("xxx"));
    until(&client, "the log is written", |_| written()).await;
    // Rotated as kubelet does it.
    std::fs::rename(&log, log.with_extension("old")).unwrap();
    client.reopen_log("a").await.unwrap();
    assert!(log.exists());
    // What is not among its places is not there for it.
    let other = place.root.path().join("other");
    std::fs::write(&other, vec![b'e'; 8192]).unwrap();
    let mut foreign = pod::CreateContainerRequest { id: "b".into(), image_key: "other".into(), ..request };
    foreign.image[0].path = other.to_str().unwrap().into();
    assert_eq!(common::kind(client.create_container(foreign).await), nacelle_base::Kind::NotFound);

    let process = PathBuf::from(format!("/proc/{}", client.identity().pid));
    let mut threads = 0;
    for task in std::fs::read_dir(process.join("task")).unwrap() {
        // One that ends meanwhile is not looked at.
        let path = task.unwrap().path().join("status");
        if !path.exists() {
            continue;
        }
        let status = status(&path);
        assert_eq!((status["NoNewPrivs"].as_str(), status["Seccomp"].as_str()), ("1", "2"), "{}", status["Name"]);
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(status[set].trim_start_matches('0'), "", "{} {set}", status["Name"]);
        }
        threads += 1;
    }
    assert!(threads > 2);
    let mounts = std::fs::read_to_string(process.join("mountinfo")).unwrap();
    let points: Vec<&str> = mounts.lines().filter_map(|line| line.split(' ').nth(4)).collect();
    let own = place.root.path().to_str().unwrap();
    let known = ["/usr", "/bin", "/sbin", "/lib", "/etc/", "/dev/null", "/dev/urandom", own];
    for point in points {
        assert!(point == "/" || known.iter().any(|known| point.starts_with(known)), "{point}");
    }
    let group = nacelle_jail::cgroup::folders(&cgroup(place.root.path()));
    let there = group.iter().filter(|folder| folder.exists()).count();
    println!("control groups: {there}");

    signal(client.identity(), nix::sys::signal::Signal::SIGKILL);
    client.ended().await.unwrap();
    let record = client::clean_up(&place.dir).await.unwrap().unwrap();
    assert_eq!(record.containers[0].message, "the pod process died of signal 9");
    assert!(group.iter().all(|folder| !folder.exists()), "{group:?}");
    let disks = std::fs::read_dir(place.root.path().join("templates")).unwrap().flatten();
    assert_eq!(disks.filter(|file| file.file_name().to_string_lossy().starts_with("pod-")).count(), 0);
}

async fn forbidden(place: Place) {
    let client = place.spawn().await;
    client.configure(network()).await.unwrap();
    place.run(&client, "a", "hold").await;
    // As the kernel does it.
    signal(client.identity(), nix::sys::signal::Signal::SIGSYS);
    client.ended().await.unwrap();
    let record = client::clean_up(&place.dir).await.unwrap().unwrap();
    assert_eq!(record.failure, "the pod process died of a system call that its filter forbids");
}
