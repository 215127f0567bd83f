//! Tests saving a VM while its agent waits for the configuration, and VMs restored from it; and saving and restoring a configured VM.
//!
//! The test needs a KVM that runs guests on hardware, and is skipped without.

#[allow(dead_code, reason = "each test file uses a part of it")]
mod machine;

use machine::snapshot::{self, needs_kvm, save};
use machine::{Guest, LIMIT, config, console, furnish, handshake, needs, place, spec};
use nacelle_agent::frame;
use nacelle_engine::kvm::KvmEngine;
use nacelle_engine::{Engine, Machine, NicSpec, Restorer};
use nacelle_net::{NetNs, tap};
use nacelle_proto::agent::{AgentHello, BootConfig, RenewRequest};
use nacelle_proto::common::{Empty, Interface};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use tempfile::TempDir;

/// Restores a VM from a snapshot as `snapshot::restore` does, with a network card. `mac` is the last byte of its MAC address.
fn restore(from: &Path, files: &TempDir, vcpus: u8, mac: u8) -> (Box<dyn Machine>, TempDir) {
    let here = NetNs::open(Path::new("/proc/thread-self/ns/net")).unwrap();
    let tap = tap::create(&here, &format!("clone{mac}")).unwrap().fd;
    let nic = NicSpec { tap, more_queues: Vec::new(), dhcp: None, mac: [2, 0, 0, 0, 0, mac], mtu: 1400 };
    snapshot::restore(from, files.path(), vcpus, vec![nic])
}

/// What a container of a guest sees.
struct View {
    hostname: String,
    /// The time in seconds.
    now: i64,
    uuid: String,
    /// `ip -o addr` and `ip -o link` of the interface.
    network: String,
}

async fn look(guest: &mut Guest, id: &str) -> View {
    let script = "hostname; busybox date +%s; cat /proc/sys/kernel/random/uuid; ip -o addr show dev eth0; ip -o link show dev eth0";
    let (output, exit) = guest.run(id, script, |_, _| ()).await;
    let lines: Vec<_> = output.splitn(4, '\n').collect();
    let [hostname, seconds, uuid, network] = lines[..] else { panic!("{exit:?} {output}") };
    let now = seconds.parse().unwrap();
    View { hostname: hostname.to_owned(), now, uuid: uuid.to_owned(), network: network.to_owned() }
}

async fn template(vcpus: u8) {
    let directory = tempfile::tempdir().unwrap();
    furnish(directory.path());
    let engine = KvmEngine::new();
    // The template has neither disks nor interfaces: its clones get them.
    let mut spec = spec(needs().unwrap(), directory.path(), vcpus, Vec::new());
    spec.disks.clear();
    let original = engine.start_template(spec.check(&engine.limits()).unwrap()).unwrap();
    let accepted = original.link().listen(1024).unwrap().accept(LIMIT);
    let mut host = accepted.unwrap_or_else(|error| panic!("no guest: {error}; {}", console(directory.path())));
    host.set_read_timeout(Some(LIMIT)).unwrap();
    let hello: AgentHello = frame::read(&mut host).unwrap();
    let dir = directory.path().join("template");
    save(&*original, &dir);
    drop(original);

    // Three clones run at the same time, also when the template is gone.
    let named = |name: &str, seconds: i64, number: u8| BootConfig {
        hostname: name.into(),
        interfaces: vec![Interface {
            name: "eth0".into(),
            mac: vec![2, 0, 0, 0, 0, number],
            mtu: 1400,
            addresses: vec![format!("10.3.0.{number}/24")],
            ..Interface::default()
        }],
        time_unix_nanos: seconds * 1_000_000_000,
        entropy: name.bytes().cycle().take(32).collect(),
        ..config()
    };
    let mut guests = Vec::new();
    for (number, name, seconds) in [(1, "one", 1_950_000_000), (2, "two", 2_000_000_000), (3, "three", 1_900_000_000)] {
        let (machine, files) = restore(&dir, &directory, vcpus, number);
        machine.as_pausable().unwrap().resume().unwrap();
        let (anew, report) = handshake(&*machine.link(), &named(name, seconds, number), files.path());
        assert_eq!(report.error, "");
        assert_eq!(anew.kernel_release, hello.kernel_release);
        assert_eq!(anew.started_nanos, hello.started_nanos, "it has not booted again");
        assert!(anew.sent_nanos > hello.sent_nanos, "the clock continues where it was saved");
        guests.push((number, name, seconds, Guest::of(machine, files, anew, true).await));
    }
    fs::remove_dir_all(&dir).unwrap();

    let mut seen = BTreeSet::new();
    for (number, name, seconds, guest) in &mut guests {
        let view = look(guest, "c1").await;
        assert_eq!(view.hostname, *name);
        assert!((*seconds..*seconds + 10_000).contains(&view.now), "{}", view.now);
        for part in [format!("10.3.0.{number}/24"), format!("02:00:00:00:00:0{number}"), "mtu 1400".to_owned()] {
            assert!(view.network.contains(&part), "{}", view.network);
        }
        seen.insert(view.uuid);
    }
    assert_eq!(seen.len(), guests.len(), "each has its own random numbers");

    // A configured VM keeps its containers, and receives a new generation after each restore.
    let (.., guest) = guests.swap_remove(0);
    drop(guests);
    let dir = guest.directory.path().join("again");
    save(&*guest.machine, &dir);
    for seconds in [2_100_000_000_i64, 2_200_000_000] {
        let (machine, files) = restore(&dir, &guest.directory, vcpus, 9);
        place(&*machine, &files.path().join("image.erofs"), 0);
        machine.as_pausable().unwrap().resume().unwrap();
        let mut clone = Guest::of(machine, files, guest.hello.clone(), false).await;
        let renew = RenewRequest {
            generation: seconds.to_le_bytes().repeat(2),
            time_unix_nanos: seconds * 1_000_000_000,
            entropy: seconds.to_le_bytes().repeat(4),
        };
        clone.agent.renew(renew).await.unwrap();
        let containers = clone.agent.list_containers(Empty {}).await.unwrap().into_inner().containers;
        assert!(matches!(&containers[..], [only] if only.id == "c1" && only.exit.is_some()), "{containers:?}");
        let view = look(&mut clone, "c2").await;
        assert_eq!(view.hostname, "one");
        assert!((seconds..seconds + 10_000).contains(&view.now), "{}", view.now);
        assert!(seen.insert(view.uuid), "its own random numbers");
    }
}

#[test]
fn a_vm_restored_from_a_template_is_configured_anew() {
    if let Err(why) = needs_kvm() {
        return println!("skipped: {why}");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        for vcpus in [1, 2] {
            template(vcpus).await;
        }
    });
}
