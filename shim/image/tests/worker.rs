//! Tests the workers of the image store from outside: their jail, their end, and what the daemon does if one has been taken over. This
//! program is its own hostile worker: started under a name `fake-TARGET-ATTACK`, it attacks the daemon. Needs root.

#[path = "store/common/mod.rs"]
#[allow(dead_code, reason = "the other test program uses the rest")]
mod common;

use common::server::{Reply, Server, honest};
use common::{Image, Packing, Tar, image, noise, reopen, store_config};
use nacelle_base::descriptors::receive_with_descriptors;
use nacelle_base::pidfd::{pidfd_open, pidfd_signal};
use nacelle_base::test_program::{Test, run_tests_as_root};
use nacelle_base::{Chain, Classify, FailureKind};
use nacelle_image::{ImageError, ImageStore, ImageStoreConfig, Reference, RegistryConfig};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde_json::json;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

const TESTS: [Test; 9] = [
    ("workers_have_nothing_but_their_streams", workers_have_only_streams),
    ("a_worker_that_lies_gives_no_layer", liars_give_no_layer),
    ("a_worker_that_lies_finds_no_file", liars_find_no_file),
    ("a_worker_that_makes_a_forbidden_call_is_named", forbidden_calls_are_named),
    ("a_pull_that_is_dropped_ends_its_workers", dropped_pulls_end_their_workers),
    ("a_worker_that_is_killed_fails_its_pull_only", killed_workers_fail_their_pull),
    ("workers_end_with_a_daemon_that_is_killed", workers_end_with_the_daemon),
    ("a_missing_program_is_named", missing_programs_are_named),
    ("nothing_is_left_after_pulls", no_process_is_left),
];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    let name = Path::new(&args[0]).file_name().unwrap().to_str().unwrap();
    if let Some(attack) = name.strip_prefix("fake-") {
        let (target, attack) = attack.split_once('-').unwrap();
        return run_hostile_worker(Path::new(&args[0]), target, attack, args[1..].to_vec());
    }
    if let [_, verb, directory, host] = args.as_slice()
        && verb == "victim"
    {
        return run_victim(Path::new(directory), host);
    }
    run_tests_as_root(&TESTS)
}

/// Reports to the daemon.
fn report(message: &serde_json::Value) {
    let bytes = serde_json::to_vec(message).unwrap();
    // The daemon may have closed the channel.
    let _ = rustix::net::send(std::io::stderr(), &bytes, rustix::net::SendFlags::NOSIGNAL);
}

/// Does what a worker might that an image has taken over, if this is the kind of worker that the test is about. Other kinds are honest.
fn run_hostile_worker(own_path: &Path, target: &str, attack: &str, arguments: Vec<String>) -> ExitCode {
    let output = File::from(std::io::stdout().as_fd().try_clone_to_owned().unwrap());
    let into_pipe = output.metadata().unwrap().file_type().is_fifo();
    let is_target = match target {
        "decompress" | "find" => into_pipe,
        "index" => !into_pipe,
        // The first worker that writes a file reads the tar.
        _ => !into_pipe && File::create_new(own_path.with_file_name("indexed")).is_err(),
    };
    if !is_target {
        return nacelle_image::run_worker_program(arguments.into_iter());
    }
    let ready = json!({"Ready": {"version": 1}});
    match attack {
        "exit" => return ExitCode::from(3),
        "silent" => stay(),
        "old" => report(&json!({"Ready": {"version": 7}})),
        "early" => report(&json!({"Done": "Decompressed"})),
        "flood" => loop {
            // Longer than any message may be.
            let sent = rustix::net::send(std::io::stderr(), &[b' '; 100_000], rustix::net::SendFlags::NOSIGNAL);
            if sent.is_err() {
                return ExitCode::FAILURE;
            }
        },
        "jailed" => {
            let (seccomp, limit) = (nacelle_jail::Mode::Kill, 1 << 30);
            let jail = nacelle_jail::WorkerJail {
                seccomp,
                user: None,
                address_space: limit,
                cpu_seconds: 60,
                file_size: limit,
            };
            nacelle_jail::confine_worker(jail).unwrap();
            report(&ready);
            let _ = File::open("/etc/passwd");
        }
        _ => {}
    }
    report(&ready);
    let mut message = vec![0; 65536];
    let (_, mut descriptors) = receive_with_descriptors(std::io::stderr(), &mut message).unwrap();
    let blob = descriptors.pop().map(File::from);
    let indexed = |blob: u64, index: u64| json!({"Done": {"Indexed": {"blob_length": blob, "index_length": index, "entries": 1}}});
    match attack {
        "stay" => stay(),
        "ready-twice" => report(&ready),
        "huge-memory" => report(&json!({"Reserve": {"bytes": 1u64 << 63}})),
        "odd-memory" => report(&json!({"Reserve": {"bytes": 1}})),
        "all-memory" => loop {
            report(&json!({"Reserve": {"bytes": 1 << 20}}));
        },
        "take-memory" => {
            let mut taken = vec![1u8; 2 << 30];
            taken.fill(2);
            report(&json!({"Failed": {"Worker": "it has got 2 GiB of memory"}}));
        }
        "no-source" => report(&json!({"Failed": {"Layer": {"Source": {"os": 5, "kind": null, "text": ""}}}})),
        "cancelled" => report(&json!({"Failed": {"Layer": {"Budget": "Cancelled"}}})),
        "long-text" => report(&json!({"Failed": {"Worker": format!("\u{1b}[2Jx{}", "y".repeat(10_000))}})),
        "close" => {
            rustix::stdio::dup2_stderr(File::open("/dev/null").unwrap()).unwrap();
            stay();
        }
        "unread" => report(&indexed(0, 60)),
        "foreign-length" | "nothing-written" | "large" | "decompressed" => {
            std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink()).unwrap();
            match attack {
                "foreign-length" => report(&indexed(4096, 60)),
                "nothing-written" => report(&indexed(0, 0)),
                "large" => {
                    let (blob, length) = (blob.unwrap(), 8 << 20);
                    blob.write_all_at(&vec![7; length], 0).unwrap();
                    // Far outside of what it may write at all.
                    assert!(blob.write_all_at(b"x", 1 << 50).is_err());
                    output.write_all_at(&[0; 60], 0).unwrap();
                    report(&indexed(length as u64, 60));
                }
                _ => report(&json!({"Done": "Decompressed"})),
            }
        }
        // Not all of the content.
        "short" => {
            (&output).write_all(&[0; 1024]).unwrap();
            std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink()).unwrap();
            report(&json!({"Done": "Decompressed"}));
        }
        "endless" => loop {
            if (&output).write_all(&[0; 65536]).is_err() {
                return ExitCode::FAILURE;
            }
        },
        "foreign-layer" => {
            std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink()).unwrap();
            output.write_all_at(&[0; 4096], 0).unwrap();
            report(&json!({"Done": {"Merged": {"length": 4096, "used": [1], "steps": 1}}}));
        }
        "outside" | "unknown-layer" | "slash" | "garbage" | "twice" | "many" | "other-result" => {
            std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink()).unwrap();
            let found = |name: &str, layer: usize, size: u64| {
                json!({"name": name, "layer": layer, "data": {"Flat": {"size": size, "block": 1}}}).to_string() + "\n"
            };
            let lines = match attack {
                "outside" => found("f", 0, 1 << 40),
                "unknown-layer" => found("f", 1, 1),
                "slash" => found("../f", 0, 1),
                "garbage" => "{}\n".to_owned(),
                "twice" => found("f", 0, 1).repeat(2),
                "many" => found("f", 0, 1).repeat(5000),
                _ => String::new(),
            };
            (&output).write_all(lines.as_bytes()).unwrap();
            report(
                &json!({"Done": if attack == "other-result" { json!("Decompressed") } else { json!({"Found": true}) }}),
            );
        }
        other => panic!("no attack {other}"),
    }
    stay()
}

/// Stays until it is killed.
fn stay() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(600));
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn sample(packing: Packing) -> Image {
    image(&[(Tar::new().file("f", 0o644, &noise(3_000_000)).done(), packing)])
}

fn config(host: &str) -> ImageStoreConfig {
    let special = RegistryConfig { http: true, ..RegistryConfig::default() };
    ImageStoreConfig { registries: [(host.to_owned(), special)].into(), ..store_config() }
}

fn reference(host: &str) -> Reference {
    Reference::parse(&format!("{host}/x:t")).unwrap()
}

/// A server that delivers the beginning of each layer and then nothing.
fn stalling(image: &Image) -> Server {
    let image = image.clone();
    Server::start(move |asked| {
        let mut reply = honest(&image, asked);
        if asked.path.contains(&image.layers[0]) {
            reply.body.truncate(300_000);
            reply.stall = true;
        }
        reply
    })
}

fn serving(image: &Image) -> Server {
    let image = image.clone();
    Server::start(move |asked| match honest(&image, asked) {
        reply if reply.status == 200 || reply.status == 206 => reply,
        _ => Reply::status(404),
    })
}

fn files(directory: &Path) -> Vec<String> {
    let parts = ["configs", "layers", "trees", "work"];
    let names = parts.iter().flat_map(|part| fs::read_dir(directory.join(part)).unwrap());
    names.map(|entry| entry.unwrap().path().display().to_string()).collect()
}

/// Returns the pids of the workers of this process.
fn workers_of(parent: u32) -> Vec<i32> {
    let processes =
        fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    let is_worker = |pid: &i32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let Some((_, rest)) = stat.split_once(") ") else { return false };
        let mut words = rest.split(' ').skip(1);
        stat.contains("(unpack-worker)") && words.next() == Some(&parent.to_string())
    };
    processes.filter(is_worker).collect()
}

/// Waits until a condition holds, for a minute at most.
fn eventually<T>(what: &str, mut get: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match get() {
            Some(value) => return value,
            None if Instant::now() > deadline => panic!("not after a minute: {what}"),
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// Waits for the workers of a process, and returns their pids and handles: the process that decompresses, and that which reads the tar.
fn await_workers(parent: u32) -> Vec<(i32, OwnedFd)> {
    // A worker that is in its jail gets its job at once.
    let has_job = |pid: &i32| field(&format!("/proc/{pid}/status"), "Seccomp", 0) == "2";
    let pids = eventually("two workers", || {
        Some(workers_of(parent)).filter(|pids| pids.len() == 2 && pids.iter().all(has_job))
    });
    let mut workers: Vec<_> = pids.into_iter().map(|pid| (pid, pidfd_open(pid).unwrap())).collect();
    workers.sort_by_key(|(pid, _)| fs::read_link(format!("/proc/{pid}/fd/1")).unwrap().starts_with("/"));
    workers
}

/// Returns a word of the line of a file that begins with this name.
fn field(path: &str, name: &str, word: usize) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
    line.trim_start_matches(':').split_whitespace().nth(word).unwrap_or_default().to_owned()
}

fn await_end(workers: &[(i32, OwnedFd)]) {
    for (pid, pidfd) in workers {
        let mut fds = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
        let ended = poll(&mut fds, PollTimeout::try_from(Duration::from_secs(60)).unwrap()).unwrap();
        assert_eq!(ended, 1, "worker {pid} still runs");
    }
}

fn workers_have_only_streams() {
    let (image, directory) = (sample(Packing::Gzip), tempfile::tempdir().unwrap());
    for user in [None, Some(54321)] {
        let server = stalling(&image);
        let mut config = config(&server.host());
        config.worker.user = user;
        let runtime = runtime();
        let store = reopen(directory.path(), &config);
        let name = reference(&server.host());
        let pull = runtime.spawn(async move { store.pull(&name, None).await });
        let workers = await_workers(std::process::id());
        for (place, (pid, _)) in workers.iter().enumerate() {
            let status = format!("/proc/{pid}/status");
            // They wait for input, in their jail.
            eventually("the filter is installed", || (field(&status, "Seccomp", 0) == "2").then_some(()));
            for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
                assert_eq!(field(&status, set, 0).trim_start_matches('0'), "", "{set}");
            }
            assert_eq!(
                (field(&status, "NoNewPrivs", 0), field(&status, "Threads", 0)),
                ("1".to_owned(), "1".to_owned())
            );
            // It is process 1 of its namespace.
            assert_eq!(field(&status, "NSpid", 1), "1");
            assert_eq!(field(&status, "Uid", 1), user.unwrap_or(0).to_string());
            for namespace in ["net", "ipc", "uts", "cgroup", "mnt", "pid"] {
                let of = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/{namespace}")).unwrap();
                assert_ne!(of(&pid.to_string()), of("self"), "{namespace}");
            }
            assert_eq!(fs::read_dir(format!("/proc/{pid}/root/")).unwrap().count(), 0);
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap();
            assert_eq!(String::from_utf8_lossy(&environment), "");
            // The streams, and the blob when the job has arrived.
            let work = directory.path().canonicalize().unwrap().join("work");
            let expected: &[&str] =
                if place == 0 { &["pipe", "pipe", "socket"] } else { &["pipe", "file", "socket", "file"] };
            eventually("the descriptors are those of the job", || {
                let entries = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().map(|entry| entry.unwrap());
                let descriptors = entries.map(|entry| {
                    let target = fs::read_link(entry.path()).unwrap_or_default();
                    let kind = if target.starts_with(&work) { "file" } else { target.to_str().unwrap() };
                    (entry.file_name(), kind.split(':').next().unwrap().to_owned())
                });
                let kinds: Vec<_> = descriptors.collect::<BTreeMap<_, _>>().into_values().collect();
                (kinds == expected).then_some(())
            });
            let limits = format!("/proc/{pid}/limits");
            assert_eq!(field(&limits, "Max core file size", 0), "0");
            assert_eq!(field(&limits, "Max open files", 1), "16");
            let number = |name: &str| field(&limits, name, 0).parse::<u64>().unwrap();
            assert_eq!(number("Max file size") == 0, place == 0);
            // The limit of another user's process cannot be lowered without CAP_SYS_RESOURCE, which tests may lack.
            let most = if user.is_none() { 200 } else { 500 };
            let lowered = || (number("Max address space") < most << 20).then_some(());
            eventually("the address space is limited", lowered);
            assert!(number("Max cpu time") < 6000, "{}", number("Max cpu time"));
        }
        pull.abort();
        assert!(runtime.block_on(pull).unwrap_err().is_cancelled());
        await_end(&workers);
    }
}

/// Returns the configuration of a store whose workers attack. `programs` is a directory for the program of this name.
fn hostile_config(host: &str, programs: &Path, target: &str, attack: &str) -> ImageStoreConfig {
    let program = programs.join(format!("fake-{target}-{attack}"));
    std::os::unix::fs::symlink(std::env::current_exe().unwrap(), &program).unwrap();
    let mut hostile = config(host);
    hostile.worker.program = program;
    hostile.worker.stall_timeout = Duration::from_secs(2);
    hostile
}

/// Pulls with a hostile worker. Returns the error. The store has nothing afterwards, and can pull with an honest worker.
fn attacked(target: &str, attack: &str) -> ImageError {
    let image = sample(if target == "decompress" { Packing::Gzip } else { Packing::Plain });
    let (server, directory) = (serving(&image), tempfile::tempdir().unwrap());
    let programs = tempfile::tempdir().unwrap();
    let mut hostile = hostile_config(&server.host(), programs.path(), target, attack);
    (hostile.max_layer_bytes, hostile.max_layer_entries) = (3 << 20, 100);
    let (runtime, name) = (runtime(), reference(&server.host()));
    let store = reopen(directory.path(), &hostile);
    let error = runtime.block_on(store.pull(&name, None)).unwrap_err();
    assert!(store.list().is_empty(), "{target} {attack}");
    // A layer that an honest worker has read stays for the next pull, as after any other failure.
    let left = files(directory.path());
    assert!(
        left.is_empty() || target == "merge" && left.iter().all(|path| path.contains("/layers/")),
        "{target} {attack}: {left:?}"
    );
    drop(store);
    let store = reopen(directory.path(), &config(&server.host()));
    assert_eq!(runtime.block_on(store.pull(&name, None)).unwrap().to_string(), image.config, "{target} {attack}");
    error
}

fn liars_give_no_layer() {
    let (internal, exhausted) = (FailureKind::Internal, FailureKind::Exhausted);
    for (target, attacks) in [
        ("index", [("unread", "did not read its input"), ("nothing-written", "length of the index")].as_slice()),
        ("index", &[("foreign-length", "length of the blob"), ("cancelled", "cannot have")]),
        (
            "decompress",
            &[("short", "is damaged"), ("unread", "violated the protocol"), ("no-source", "unknown message")],
        ),
        ("merge", &[("foreign-layer", "layers that do not exist"), ("unread", "violated the protocol")]),
        ("merge", &[("exit", "while it merged the layers"), ("no-source", "unknown message")]),
    ] {
        for (attack, text) in attacks {
            let error = attacked(target, attack);
            let chain = Chain(&error).to_string();
            assert!(chain.contains(text), "{target} {attack}: {chain}");
            let kind = if *attack == "short" { FailureKind::Unavailable } else { internal };
            assert_eq!(error.kind(), kind, "{target} {attack}: {chain}");
        }
    }
    for (target, attack, kind, text) in [
        ("decompress", "endless", exhausted, "more than 3145728 bytes"),
        ("index", "large", exhausted, "more than 3145728 bytes"),
    ] {
        let error = attacked(target, attack);
        assert!(error.kind() == kind && Chain(&error).to_string().contains(text), "{attack}: {}", Chain(&error));
    }
    for target in ["decompress", "index"] {
        for (attack, kind, text) in [
            ("exit", internal, "ended with status 3"),
            ("silent", internal, "made no progress for 2 seconds"),
            ("stay", internal, "made no progress for 2 seconds"),
            ("old", internal, "protocol version 7"),
            ("early", internal, "first message"),
            ("flood", internal, "unknown message"),
            ("ready-twice", internal, "ready twice"),
            ("odd-memory", internal, "not a positive multiple of 1 MiB"),
            ("huge-memory", exhausted, "takes more than 268435456 bytes"),
            ("take-memory", internal, "memory allocation"),
            ("long-text", internal, "[2Jxyyy"),
            ("close", internal, "closed its channel"),
        ] {
            let error = attacked(target, attack);
            let chain = Chain(&error).to_string();
            assert!(chain.contains(text), "{target} {attack}: {chain}");
            assert!(chain.len() < 1000 && !chain.contains('\u{1b}'), "{target} {attack}: {chain}");
            assert_eq!(error.kind(), kind, "{target} {attack}: {chain}");
        }
    }
    // It may be the budget that ends this, or the answers that it does not read.
    let error = attacked("index", "all-memory");
    assert!(matches!(error.kind(), FailureKind::Exhausted | FailureKind::Internal), "{}", Chain(&error));
}

fn liars_find_no_file() {
    let (image, directory) = (sample(Packing::Plain), tempfile::tempdir().unwrap());
    let (server, runtime) = (serving(&image), runtime());
    let store = reopen(directory.path(), &config(&server.host()));
    let id = runtime.block_on(store.pull(&reference(&server.host()), None)).unwrap();
    let names: Vec<String> =
        runtime.block_on(store.list_files(&id, "")).unwrap().unwrap().into_iter().map(|file| file.name).collect();
    assert_eq!(names, ["f"]);
    drop(store);
    for (attack, kind, text) in [
        ("outside", FailureKind::Internal, "a file that it reports is invalid"),
        ("unknown-layer", FailureKind::Internal, "a file that it reports is invalid"),
        ("slash", FailureKind::Internal, "a file that it reports is invalid"),
        ("garbage", FailureKind::Internal, "a file that it reports is invalid"),
        ("other-result", FailureKind::Internal, "the result of another job"),
        ("many", FailureKind::Invalid, "has more than 4096 files"),
    ] {
        let programs = tempfile::tempdir().unwrap();
        let store = reopen(directory.path(), &hostile_config(&server.host(), programs.path(), "find", attack));
        let error = runtime.block_on(store.list_files(&id, "")).unwrap_err();
        let chain = Chain(&error).to_string();
        assert!(error.kind() == kind && chain.contains(text), "{attack}: {chain}");
    }
    let programs = tempfile::tempdir().unwrap();
    let store = reopen(directory.path(), &hostile_config(&server.host(), programs.path(), "find", "twice"));
    let error = runtime.block_on(store.copy_file_from_image(&id, "f", 1, tempfile::tempfile().unwrap())).unwrap_err();
    assert!(Chain(&error).to_string().contains("several files of one name"), "{}", Chain(&error));
}

fn forbidden_calls_are_named() {
    for (target, task) in
        [("decompress", "decompressed a layer"), ("index", "read the tar"), ("merge", "merged the layers")]
    {
        let error = attacked(target, "jailed");
        let chain = Chain(&error).to_string();
        assert!(chain.contains("ended by signal 31 (SIGSYS) while it ") && chain.contains(task), "{chain}");
        assert_eq!(error.kind(), FailureKind::Internal);
    }
}

fn dropped_pulls_end_their_workers() {
    let (image, directory) = (sample(Packing::Zstd), tempfile::tempdir().unwrap());
    let server = stalling(&image);
    let runtime = runtime();
    let store = reopen(directory.path(), &config(&server.host()));
    let name = reference(&server.host());
    let pull = runtime.spawn({
        let store = store.clone();
        async move { store.pull(&name, None).await }
    });
    let workers = await_workers(std::process::id());
    pull.abort();
    await_end(&workers);
    // They have been waited for, too.
    eventually("no zombie is left", || workers_of(std::process::id()).is_empty().then_some(()));
    eventually("no file is left", || files(directory.path()).is_empty().then_some(()));
    let good = serving(&image);
    drop(store);
    let store = reopen(directory.path(), &config(&good.host()));
    assert_eq!(runtime.block_on(store.pull(&reference(&good.host()), None)).unwrap().to_string(), image.config);
}

fn killed_workers_fail_their_pull() {
    for victim in [0, 1] {
        let (image, directory) = (sample(Packing::Gzip), tempfile::tempdir().unwrap());
        let server = stalling(&image);
        let mut config = config(&server.host());
        // The thread that feeds the workers waits for the registry until then.
        config.progress_timeout = Duration::from_secs(1);
        let runtime = runtime();
        let store = reopen(directory.path(), &config);
        let name = reference(&server.host());
        let pull = runtime.spawn({
            let store = store.clone();
            async move { store.pull(&name, None).await }
        });
        let workers = await_workers(std::process::id());
        pidfd_signal(&workers[victim].1, nix::libc::SIGKILL).unwrap();
        let error = runtime.block_on(pull).unwrap().unwrap_err();
        let chain = Chain(&error).to_string();
        let task = ["decompressed a layer", "read the tar of a layer"][victim];
        assert!(chain.contains(&format!("was killed (SIGKILL) while it {task}")), "{chain}");
        assert_eq!(error.kind(), FailureKind::Exhausted);
        await_end(&workers);
        assert_eq!(files(directory.path()), Vec::<String>::new());
        drop(store);
        let good = serving(&image);
        let store = reopen(directory.path(), &self::config(&good.host()));
        assert_eq!(runtime.block_on(store.pull(&reference(&good.host()), None)).unwrap().to_string(), image.config);
    }
}

/// The process that is killed: it pulls from a server that stalls.
fn run_victim(directory: &Path, host: &str) -> ExitCode {
    let store = ImageStore::open(directory, config(host)).unwrap();
    runtime().block_on(store.pull(&reference(host), None)).unwrap();
    ExitCode::SUCCESS
}

fn workers_end_with_the_daemon() {
    let (server, directory) = (stalling(&sample(Packing::Gzip)), tempfile::tempdir().unwrap());
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["victim", directory.path().to_str().unwrap(), &server.host()])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let workers = await_workers(child.id());
    child.kill().unwrap();
    child.wait().unwrap();
    await_end(&workers);
}

fn missing_programs_are_named() {
    let (server, directory) = (serving(&sample(Packing::Gzip)), tempfile::tempdir().unwrap());
    let mut config = config(&server.host());
    config.worker.program = "/nowhere/nacelle-unpack".into();
    let store = reopen(directory.path(), &config);
    let error = runtime().block_on(store.pull(&reference(&server.host()), None)).unwrap_err();
    let chain = Chain(&error).to_string();
    assert!(chain.contains("cannot start the image worker /nowhere/nacelle-unpack: No such file"), "{chain}");
    assert_eq!(files(directory.path()), Vec::<String>::new());
}

fn no_process_is_left() {
    let (image, directory) = (sample(Packing::Gzip), tempfile::tempdir().unwrap());
    let server = serving(&image);
    let store = reopen(directory.path(), &config(&server.host()));
    runtime().block_on(store.pull(&reference(&server.host()), None)).unwrap();
    let mut own = String::new();
    for task in fs::read_dir("/proc/self/task").unwrap() {
        File::open(task.unwrap().path().join("children")).unwrap().read_to_string(&mut own).unwrap();
    }
    assert_eq!(own.trim(), "", "children of this process");
}
