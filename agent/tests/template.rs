//! Tests saving a VM while its agent waits for the configuration, and VMs restored from it; and saving and restoring a configured VM.
//!
//! The test needs a KVM that runs guests on hardware, and is skipped without.

#[allow(dead_code, reason = "each test file uses a part of it")]
mod machine;

use machine::{Guest, LIMIT, config, console, furnish, handshake, needs, place, spec};
use nacelle_agent::frame;
use nacelle_engine::kvm::KvmEngine;
use nacelle_engine::{Engine, KvmVerdict, Machine, Restorer, probe_kvm};
use nacelle_proto::agent::{AgentHello, BootConfig, BootReport, RenewRequest};
use nacelle_proto::common::Empty;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use tempfile::TempDir;

fn save(machine: &dyn Machine, to: &Path) {
    machine.as_pausable().unwrap().pause().unwrap();
    machine.as_snapshottable().unwrap().save(to).unwrap();
}

/// Restores a VM from a snapshot, paused, in a directory of its own with a copy of the scratch disk.
fn restore(from: &Path, files: &TempDir, vcpus: u8) -> (Box<dyn Machine>, TempDir) {
    let directory = tempfile::tempdir().unwrap();
    for name in ["scratch", "image.erofs"] {
        fs::copy(files.path().join(name), directory.path().join(name)).unwrap();
    }
    let engine = KvmEngine::new();
    let spec = spec(needs().unwrap(), directory.path(), vcpus, Vec::new());
    (engine.restore(spec.check(&engine.limits()).unwrap(), from).unwrap(), directory)
}

/// Returns what a container of this guest sees: the host name, the time in seconds, a random UUID.
async fn look(guest: &mut Guest, id: &str) -> (String, i64, String) {
    let script = "hostname; busybox date +%s; cat /proc/sys/kernel/random/uuid";
    let (output, exit) = guest.run(id, script, |_, _| ()).await;
    let lines: Vec<_> = output.lines().collect();
    let [name, seconds, uuid] = lines[..] else { panic!("{exit:?} {output}") };
    (name.to_owned(), seconds.parse().unwrap(), uuid.to_owned())
}

async fn template(vcpus: u8) {
    let directory = tempfile::tempdir().unwrap();
    furnish(directory.path());
    let engine = KvmEngine::new();
    let spec = spec(needs().unwrap(), directory.path(), vcpus, Vec::new());
    let original = engine.start(spec.check(&engine.limits()).unwrap()).unwrap();
    let accepted = original.link().listen(1024).unwrap().accept(LIMIT);
    let mut host = accepted.unwrap_or_else(|error| panic!("no guest: {error}; {}", console(directory.path())));
    host.set_read_timeout(Some(LIMIT)).unwrap();
    let hello: AgentHello = frame::read(&mut host).unwrap();
    let dir = directory.path().join("template");
    save(&*original, &dir);

    // Two clones run at the same time, and the original continues with its connection.
    let named = |name: &str, seconds: i64| BootConfig {
        hostname: name.into(),
        time_unix_nanos: seconds * 1_000_000_000,
        entropy: name.bytes().cycle().take(32).collect(),
        ..config()
    };
    let mut guests = Vec::new();
    for (name, seconds) in [("one", 1_950_000_000), ("two", 2_000_000_000)] {
        let (machine, files) = restore(&dir, &directory, vcpus);
        machine.as_pausable().unwrap().resume().unwrap();
        let (anew, report) = handshake(&*machine.link(), &named(name, seconds), files.path());
        assert_eq!(report.error, "");
        assert_eq!(anew.kernel_release, hello.kernel_release);
        assert_eq!(anew.started_nanos, hello.started_nanos, "it has not booted again");
        assert!(anew.sent_nanos > hello.sent_nanos, "the clock continues where it was saved");
        guests.push((name, seconds, Guest::of(machine, files, anew, true).await));
    }
    original.as_pausable().unwrap().resume().unwrap();
    frame::write(&mut host, &named("original", 1_900_000_000)).unwrap();
    assert_eq!(frame::read::<BootReport>(&mut host).unwrap().error, "");
    guests.push(("original", 1_900_000_000, Guest::of(original, directory, hello, true).await));

    let mut seen = BTreeSet::new();
    for (name, seconds, guest) in &mut guests {
        let (hostname, now, uuid) = look(guest, "c1").await;
        assert_eq!(hostname, *name);
        assert!((*seconds..*seconds + 10_000).contains(&now), "{now}");
        seen.insert(uuid);
    }
    assert_eq!(seen.len(), guests.len(), "each has its own random numbers");

    // A configured VM keeps its containers, and receives a new generation after each restore.
    let (_, _, guest) = guests.swap_remove(0);
    drop(guests);
    let dir = guest.directory.path().join("again");
    save(&*guest.machine, &dir);
    for seconds in [2_100_000_000_i64, 2_200_000_000] {
        let (machine, files) = restore(&dir, &guest.directory, vcpus);
        place(&*machine, &files.path().join("image.erofs"), 0);
        machine.as_pausable().unwrap().resume().unwrap();
        let mut clone = Guest::of(machine, files, guest.hello.clone(), false).await;
        let renew = RenewRequest {
            generation: seconds.to_le_bytes().to_vec(),
            time_unix_nanos: seconds * 1_000_000_000,
            entropy: seconds.to_le_bytes().repeat(4),
        };
        clone.agent.renew(renew).await.unwrap();
        let containers = clone.agent.list_containers(Empty {}).await.unwrap().into_inner().containers;
        assert!(matches!(&containers[..], [only] if only.id == "c1" && only.exit.is_some()), "{containers:?}");
        let (hostname, now, uuid) = look(&mut clone, "c2").await;
        assert_eq!(hostname, "one");
        assert!((seconds..seconds + 10_000).contains(&now), "{now}");
        assert!(seen.insert(uuid), "its own random numbers");
    }
}

#[test]
fn a_vm_restored_from_a_template_is_configured_anew() {
    let usable = match probe_kvm() {
        KvmVerdict::Hardware { .. } => needs().map(drop),
        verdict => Err(verdict.to_string()),
    };
    if let Err(why) = usable {
        return println!("skipped: {why}");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        for vcpus in [1, 2] {
            template(vcpus).await;
        }
    });
}
