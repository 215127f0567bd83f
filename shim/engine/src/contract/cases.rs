//! Defines the contract tests, one function for each behaviour.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::thread;
use std::time::Duration;

use nacelle_base::machine::{Extent, ImageDisk};

use super::bench::{Belongings, Bench, LONG, PORT, World, eventually, fnv, is_stopped, read_all, spec, tell};
use crate::machine::{ExitKind, MachineStatus, Stop};
use crate::{DiskSpec, EngineError, LinkError, SpecError};

const MIB: u64 = 1 << 20;

fn growing() -> DiskSpec {
    DiskSpec::Growing { serial: "images".into() }
}

/// A started guest connects to the host, answers commands and has the specified resources.
pub fn a_guest_says_hello(world: &dyn World) {
    let bench = Bench::start(world, vec![growing()], |_| ());
    assert_eq!(bench.machine.status(), MachineStatus::Running);
    assert_eq!(bench.machine.disks().len(), 1);
    assert_eq!(bench.ask("cpus"), "1");
    let mib: u32 = bench.ask("memory").parse().expect("a number");
    assert!((64..=128).contains(&mib), "{mib} MiB");
    if world.has_disks() {
        assert_eq!(bench.ask("hwrng").len(), 32, "16 random bytes");
        assert_eq!(bench.ask("serial 0"), "images");
    }
}

/// The guest has the specified number of vCPUs, even if that is more than the node has.
pub fn two_and_four_processors(world: &dyn World) {
    for vcpus in [2, 4] {
        let bench = Bench::start(world, vec![], |spec| spec.vcpus = vcpus);
        assert_eq!(bench.ask("cpus"), vcpus.to_string());
    }
}

/// A guest that powers off within its grace period ends with `Shutdown`.
pub fn powering_off_is_a_shutdown(world: &dyn World) {
    let bench = Bench::start(world, vec![], |_| ());
    tell(&bench.connect(), "poweroff");
    let exit = bench.machine.stop(Stop::Shutdown { grace: LONG }).expect("to stop");
    assert_eq!(exit.how, ExitKind::Shutdown, "{exit:?}");
    assert_eq!(bench.machine.status(), MachineStatus::Exited(exit));
}

/// A kernel panic is reported as such, and the console contains the reason.
pub fn a_panic_is_told(world: &dyn World) {
    let bench = Bench::start(world, vec![], |_| ());
    tell(&bench.connect(), "panic");
    let exit = bench.machine.wait(LONG).expect("an end");
    assert_eq!(exit.how, ExitKind::Panicked, "{exit:?}");
    for words in ["contract: about to panic", "Attempted to kill init!"] {
        assert!(exit.console_tail.contains(words), "{}", exit.console_tail);
    }
    let log = fs::read_to_string(bench.directory.path().join("console.log")).expect("the console's log");
    assert!(log.contains("Attempted to kill init!"), "{log}");
}

/// A killed VM stays ended, and every method reports that, however often it is called.
pub fn a_kill_is_final(world: &dyn World) {
    let bench = Bench::start(world, vec![], |_| ());
    let open = bench.connect();
    let exit = bench.machine.stop(Stop::Kill).expect("to stop");
    assert_eq!(exit.how, ExitKind::Killed, "{exit:?}");
    for how in [Stop::Kill, Stop::Shutdown { grace: LONG }] {
        assert_eq!(bench.machine.stop(how).expect("to stop again"), exit);
    }
    assert_eq!(bench.machine.wait(LONG), Some(exit.clone()));
    assert_eq!(bench.machine.status(), MachineStatus::Exited(exit));
    assert!(is_stopped(&bench.link.connect(PORT, LONG)));
    assert!(is_stopped(&bench.link.listen(2000)));
    if let Some(pausable) = bench.machine.as_pausable() {
        assert!(matches!(pausable.pause(), Err(EngineError::Ended { .. })));
        assert!(matches!(pausable.resume(), Err(EngineError::Ended { .. })));
    }
    assert!(read_all(&open).is_empty(), "an open connection ends with the machine");
}

/// A guest that does not power off in time is killed.
pub fn no_grace_is_a_kill(world: &dyn World) {
    let bench = Bench::start(world, vec![], |_| ());
    let exit = bench.machine.stop(Stop::Shutdown { grace: Duration::from_millis(10) }).expect("to stop");
    assert_eq!(exit.how, ExitKind::Killed, "{exit:?}");
}

/// A VM that is lost ends with `Died`, not with `Shutdown`.
pub fn a_lost_machine_has_died(world: &dyn World) {
    let bench = Bench::start(world, vec![], |_| ());
    if !world.lose(bench.directory.path()) {
        return println!("skipped: this engine's machines live in the test's own process");
    }
    let exit = bench.machine.wait(LONG).expect("an end");
    assert!(matches!(exit.how, ExitKind::Died { signal: Some(_), .. }), "{exit:?}");
    assert_eq!(bench.machine.stop(Stop::Kill).expect("to stop what has died"), exit);
}

/// A slot grows while the guest runs; images that are placed can be read, images that were removed cannot.
pub fn disks_grow_while_the_guest_runs(world: &dyn World) {
    let bench = Bench::start(world, vec![growing()], |_| ());
    let slot = &bench.machine.disks()[0];
    bench.ask_until("size 0", "0");
    let content: Vec<u8> = (0..MIB + 512).map(|n| (n * 7 % 251) as u8).collect();
    let path = bench.directory.path().join("layer");
    fs::write(&path, &content).expect("a file");
    let image = ImageDisk { extents: vec![Extent { path, offset: 0, length: content.len() as u64 }] };
    for (at, size) in [(0, 2 * MIB), (4 * MIB, 6 * MIB)] {
        slot.place(at, &image).expect("to place");
        bench.ask_until("size 0", &size.to_string());
    }
    if world.has_disks() {
        let sum = |at: u64| bench.ask(&format!("sum 0 {at} {}", content.len()));
        let there = format!("{:016x}", fnv(&content));
        assert_eq!(sum(0), there);
        assert_eq!(sum(4 * MIB), there);
        assert!(bench.ask("fill 0 0 1 512").starts_with("errno "), "an image disk is read-only");
        assert!(slot.unplace(0));
        assert_eq!(sum(0), format!("{:016x}", fnv(&vec![0; content.len()])));
        assert_eq!(sum(4 * MIB), there);
    }
}

/// File disks appear in the order of the specification, writable or not as specified.
pub fn files_are_disks(world: &dyn World) {
    let files = tempfile::tempdir().expect("a directory for the disks");
    let disk = |name: &str, size: u64, read_only| {
        let path = files.path().join(name);
        fs::File::create(&path).and_then(|file| file.set_len(size)).expect("a file");
        DiskSpec::File { path, read_only, serial: name.into() }
    };
    let disks = vec![disk("first", 3 * MIB, true), disk("second", 5 * MIB, false)];
    let bench = Bench::start(world, disks, |_| ());
    assert_eq!(bench.ask("size 0"), (3 * MIB).to_string());
    assert_eq!(bench.ask("size 1"), (5 * MIB).to_string());
    if world.has_disks() {
        assert_eq!([bench.ask("serial 0"), bench.ask("serial 1")], ["first", "second"]);
        assert!(bench.ask("fill 0 0 1 512").starts_with("errno "), "a read-only disk");
        assert_eq!(bench.ask(&format!("fill 1 {MIB} 7 4096")), "ok");
        drop(bench);
        let bytes = fs::read(files.path().join("second")).expect("the disk");
        assert!(bytes[MIB as usize..][..4096].iter().all(|byte| *byte == 7));
        assert!(bytes[..MIB as usize].iter().all(|byte| *byte == 0));
    }
}

/// A hundred simultaneous connections in both directions carry their own bytes and end independently.
pub fn hundred_connections(world: &dyn World) {
    let bench = Bench::start(world, vec![], |_| ());
    let streams: Vec<_> = (0..100).map(|_| bench.connect()).collect();
    for (n, stream) in streams.iter().enumerate() {
        tell(stream, "echo");
        (&*stream).write_all(&vec![n as u8; 1000 + n]).expect("to write");
        stream.shutdown(Shutdown::Write).expect("to end");
    }
    for (n, stream) in streams.iter().enumerate() {
        assert_eq!(read_all(stream), vec![n as u8; 1000 + n], "connection {n}");
    }
    let incoming = bench.link.listen(3000).expect("a port");
    assert!(matches!(bench.link.listen(3000), Err(LinkError::PortInUse { port: 3000 })));
    for _ in 0..10 {
        assert_eq!(bench.ask("call 3000"), "ok");
        assert_eq!(read_all(&incoming.accept(LONG).expect("a call")), b"called\n");
    }
    drop(incoming);
    eventually("the port to be free again", || bench.link.listen(3000).is_ok());
}

/// Much more data than all buffers hold passes without loss while the other side reads late.
pub fn a_slow_reader_is_waited_for(world: &dyn World) {
    let bench = Bench::start(world, vec![], |_| ());
    let stream = bench.connect();
    tell(&stream, "echo");
    let sent: Vec<u8> = (0..4 * MIB).map(|n| (n * 31 % 253) as u8).collect();
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            (&stream).write_all(&sent).expect("to write");
            stream.shutdown(Shutdown::Write).expect("to end");
        });
        // Other connections make progress meanwhile.
        assert_eq!(bench.ask("cpus"), "1");
        assert_eq!(fnv(&read_all(&stream)), fnv(&sent));
        writer.join().expect("the writer");
    });
}

/// A connection to a port without a listener is refused at once, on both sides; accept ends at its timeout.
pub fn nobody_listens(world: &dyn World) {
    let bench = Bench::start(world, vec![], |_| ());
    assert!(matches!(bench.link.connect(4000, LONG), Err(LinkError::Refused { port: 4000 })));
    assert!(bench.ask("call 4001").starts_with("errno "));
    let incoming = bench.link.listen(4002).expect("a port");
    let nothing = incoming.accept(Duration::from_millis(10));
    assert!(matches!(nothing, Err(LinkError::Timeout { port: 4002, .. })), "{nothing:?}");
}

/// A paused guest does nothing and keeps its state.
pub fn a_machine_stands_still(world: &dyn World) {
    let bench = Bench::start(world, vec![], |_| ());
    let Some(pausable) = bench.machine.as_pausable() else { return };
    let stream = bench.connect();
    tell(&stream, "echo");
    for _ in 0..2 {
        pausable.pause().expect("to pause");
        assert_eq!(bench.machine.status(), MachineStatus::Paused);
    }
    if world.has_disks() {
        (&stream).write_all(b"x").expect("to write");
        stream.set_read_timeout(Some(Duration::from_millis(200))).expect("a time limit");
        let answer = (&stream).read(&mut [0; 1]);
        assert!(matches!(&answer, Err(error) if error.kind() == ErrorKind::WouldBlock), "{answer:?}");
    }
    for _ in 0..2 {
        pausable.resume().expect("to resume");
        assert_eq!(bench.machine.status(), MachineStatus::Running);
    }
    (&stream).write_all(b"y").expect("to write");
    stream.shutdown(Shutdown::Write).expect("to end");
    assert_eq!(read_all(&stream).last(), Some(&b'y'));
    assert_eq!(bench.ask("cpus"), "1");
    pausable.pause().expect("to pause");
    assert_eq!(bench.machine.stop(Stop::Kill).expect("to stop").how, ExitKind::Killed);
}

/// The context id of a guest is private to it: two VMs may have the same.
pub fn two_machines_with_one_address(world: &dyn World) {
    let one = Bench::start(world, vec![], |_| ());
    let other = Bench::start(world, vec![], |spec| spec.vcpus = 2);
    assert_eq!([one.ask("cpus"), other.ask("cpus")], ["1", "2"]);
    one.machine.stop(Stop::Kill).expect("to stop");
    assert_eq!(other.ask("cpus"), "2");
}

/// A thread that waits for the guest returns when the VM ends, long before its timeout.
pub fn waiting_ends_with_the_machine(world: &dyn World) {
    let bench = Bench::start(world, vec![], |_| ());
    let incoming = bench.link.listen(5000).expect("a port");
    thread::scope(|scope| {
        let accept = scope.spawn(move || (incoming.accept(Duration::from_secs(3600)), incoming));
        let wait = scope.spawn(|| bench.machine.wait(Duration::from_secs(3600)));
        let exit = bench.machine.stop(Stop::Kill).expect("to stop");
        let (accepted, incoming) = accept.join().expect("who accepts");
        assert!(is_stopped(&accepted));
        assert!(is_stopped(&incoming.accept(LONG)));
        assert_eq!(wait.join().expect("who waits"), Some(exit));
    });
}

/// A start that fails reports the cause and leaks nothing.
pub fn a_bad_start_leaves_nothing(world: &dyn World) {
    let before = Belongings::count().expect("to count");
    let directory = tempfile::tempdir().expect("a directory");
    let engine = world.engine();
    let limits = engine.limits();
    let disks = (0..=limits.devices).map(|n| DiskSpec::Growing { serial: format!("disk{n}") }).collect();
    let error = spec(world, directory.path(), disks).check(&limits).expect_err("too many disks");
    assert_eq!(error, SpecError::Devices { disks: limits.devices + 1, nics: 0, max: limits.devices });

    let missing = directory.path().join("missing");
    let disk = DiskSpec::File { path: missing.clone(), read_only: true, serial: "missing".into() };
    let checked = spec(world, directory.path(), vec![growing(), disk]).check(&limits).expect("a good spec");
    let error = engine.start(checked).err().expect("a disk that is not there");
    assert!(matches!(&error, EngineError::File { path, .. } if *path == missing), "{error:?}");

    let mut no_log = spec(world, directory.path(), vec![growing()]);
    no_log.console_log = directory.path().join("missing/console.log");
    let error = engine.start(no_log.check(&limits).expect("a good spec")).err().expect("no place for the log");
    assert!(matches!(&error, EngineError::File { what: "open", .. }), "{error:?}");
    only_the_log_is_in(directory.path());
    drop(directory);
    before.eventually_again();
}

/// Dropping a running VM releases its process, descriptors and sockets.
pub fn dropping_leaves_nothing(world: &dyn World) {
    let before = Belongings::count().expect("to count");
    for _ in 0..2 {
        let bench = Bench::start(world, vec![growing()], |_| ());
        let open = bench.connect();
        let Bench { machine, link, directory } = bench;
        drop(machine);
        assert!(is_stopped(&link.connect(PORT, LONG)));
        assert!(read_all(&open).is_empty());
        only_the_log_is_in(directory.path());
    }
    before.eventually_again();
}

fn only_the_log_is_in(directory: &std::path::Path) {
    let names: Vec<_> =
        fs::read_dir(directory).expect("a directory").map(|entry| entry.expect("an entry").file_name()).collect();
    assert!(names.iter().all(|name| name == "console.log"), "{names:?}");
}
