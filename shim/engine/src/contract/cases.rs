//! Defines the contract tests, one function for each behaviour.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::thread;
use std::time::Duration;

use nacelle_base::machine::{Extent, ImageDisk};

use super::test_vm::{
    LONG, PORT, ProcessResources, TestVm, TestedEngine, eventually, fnv1a, is_stopped, read_all, send_command, spec,
};
use crate::machine::{ExitKind, MachineStatus, StopMode};
use crate::{DiskSpec, EngineError, LinkError, SpecError};

const MIB: u64 = 1 << 20;

fn image_disk() -> DiskSpec {
    DiskSpec::Images { serial: "images".into() }
}

/// A started guest connects to the host, answers commands and has the specified resources.
pub fn a_started_guest_connects_and_has_its_resources(tested: &dyn TestedEngine) {
    let vm = TestVm::start(tested, vec![image_disk()], |_| ());
    assert_eq!(vm.machine.status(), MachineStatus::Running);
    assert_eq!(vm.machine.disks().len(), 1);
    assert_eq!(vm.query("cpus"), "1");
    let mib: u32 = vm.query("memory").parse().expect("a number");
    assert!((64..=128).contains(&mib), "{mib} MiB");
    if tested.reads_disks() {
        assert_eq!(vm.query("hwrng").len(), 32, "16 random bytes");
        assert_eq!(vm.query("serial 0"), "images");
    }
}

/// The guest has the specified number of vCPUs, even if that is more than the node has.
pub fn several_vcpus(tested: &dyn TestedEngine) {
    for vcpus in [2, 4] {
        let vm = TestVm::start(tested, vec![], |spec| spec.vcpus = vcpus);
        assert_eq!(vm.query("cpus"), vcpus.to_string());
    }
}

/// A guest that powers off within its grace period ends with `Shutdown`.
pub fn a_guest_that_powers_off_has_shut_down(tested: &dyn TestedEngine) {
    let vm = TestVm::start(tested, vec![], |_| ());
    send_command(&vm.connect(), "poweroff");
    let exit = vm.machine.stop(StopMode::Shutdown { grace: LONG }).expect("to stop");
    assert_eq!(exit.how, ExitKind::Shutdown, "{exit:?}");
    assert_eq!(vm.machine.status(), MachineStatus::Exited(exit));
}

/// A kernel panic is reported as such, and the console contains the reason.
pub fn a_kernel_panic_is_reported(tested: &dyn TestedEngine) {
    let vm = TestVm::start(tested, vec![], |_| ());
    send_command(&vm.connect(), "panic");
    let exit = vm.machine.wait(LONG).expect("an end");
    assert_eq!(exit.how, ExitKind::Panicked, "{exit:?}");
    for words in ["contract: about to panic", "Attempted to kill init!"] {
        assert!(exit.console_tail.contains(words), "{}", exit.console_tail);
    }
    let log = fs::read_to_string(vm.directory.path().join("console.log")).expect("the console's log");
    assert!(log.contains("Attempted to kill init!"), "{log}");
}

/// A killed VM stays ended, and every method reports that, however often it is called.
pub fn a_kill_is_final(tested: &dyn TestedEngine) {
    let vm = TestVm::start(tested, vec![], |_| ());
    let open = vm.connect();
    let exit = vm.machine.stop(StopMode::Kill).expect("to stop");
    assert_eq!(exit.how, ExitKind::Killed, "{exit:?}");
    for how in [StopMode::Kill, StopMode::Shutdown { grace: LONG }] {
        assert_eq!(vm.machine.stop(how).expect("to stop again"), exit);
    }
    assert_eq!(vm.machine.wait(LONG), Some(exit.clone()));
    assert_eq!(vm.machine.status(), MachineStatus::Exited(exit));
    assert!(is_stopped(&vm.link.connect(PORT, LONG)));
    assert!(is_stopped(&vm.link.listen(2000)));
    if let Some(pausable) = vm.machine.as_pausable() {
        assert!(matches!(pausable.pause(), Err(EngineError::Ended { .. })));
        assert!(matches!(pausable.resume(), Err(EngineError::Ended { .. })));
    }
    assert!(read_all(&open).is_empty(), "an open connection ends with the machine");
}

/// A guest that does not power off in time is killed.
pub fn a_guest_without_grace_is_killed(tested: &dyn TestedEngine) {
    let vm = TestVm::start(tested, vec![], |_| ());
    let exit = vm.machine.stop(StopMode::Shutdown { grace: Duration::from_millis(10) }).expect("to stop");
    assert_eq!(exit.how, ExitKind::Killed, "{exit:?}");
}

/// A VM that is lost ends with `Died`, not with `Shutdown`.
pub fn a_vm_killed_from_outside_has_died(tested: &dyn TestedEngine) {
    let vm = TestVm::start(tested, vec![], |_| ());
    if !tested.kill_from_outside(vm.directory.path()) {
        return println!("skipped: this engine's machines live in the test's own process");
    }
    let exit = vm.machine.wait(LONG).expect("an end");
    assert!(matches!(exit.how, ExitKind::Died { signal: Some(_), .. }), "{exit:?}");
    assert_eq!(vm.machine.stop(StopMode::Kill).expect("to stop what has died"), exit);
}

/// A slot grows while the guest runs; images that are placed can be read, images that were removed cannot.
pub fn an_image_disk_grows_while_the_guest_runs(tested: &dyn TestedEngine) {
    let vm = TestVm::start(tested, vec![image_disk()], |_| ());
    let slot = &vm.machine.disks()[0];
    vm.query_until("size 0", "0");
    let content: Vec<u8> = (0..MIB + 512).map(|n| (n * 7 % 251) as u8).collect();
    let path = vm.directory.path().join("layer");
    fs::write(&path, &content).expect("a file");
    let image = ImageDisk { extents: vec![Extent { path, offset: 0, length: content.len() as u64 }] };
    for (at, size) in [(0, 2 * MIB), (4 * MIB, 6 * MIB)] {
        slot.place(at, &image).expect("to place");
        vm.query_until("size 0", &size.to_string());
    }
    if tested.reads_disks() {
        let sum = |at: u64| vm.query(&format!("sum 0 {at} {}", content.len()));
        let there = format!("{:016x}", fnv1a(&content));
        assert_eq!(sum(0), there);
        assert_eq!(sum(4 * MIB), there);
        assert!(vm.query("fill 0 0 1 512").starts_with("errno "), "an image disk is read-only");
        assert!(slot.unplace(0));
        assert_eq!(sum(0), format!("{:016x}", fnv1a(&vec![0; content.len()])));
        assert_eq!(sum(4 * MIB), there);
    }
}

/// File disks appear in the order of the specification, writable or not as specified.
pub fn file_disks_appear_in_order(tested: &dyn TestedEngine) {
    let files = tempfile::tempdir().expect("a directory for the disks");
    let disk = |name: &str, size: u64, read_only| {
        let path = files.path().join(name);
        fs::File::create(&path).and_then(|file| file.set_len(size)).expect("a file");
        DiskSpec::File { path, read_only, serial: name.into() }
    };
    let disks = vec![disk("first", 3 * MIB, true), disk("second", 5 * MIB, false)];
    let vm = TestVm::start(tested, disks, |_| ());
    assert_eq!(vm.query("size 0"), (3 * MIB).to_string());
    assert_eq!(vm.query("size 1"), (5 * MIB).to_string());
    if tested.reads_disks() {
        assert_eq!([vm.query("serial 0"), vm.query("serial 1")], ["first", "second"]);
        assert!(vm.query("fill 0 0 1 512").starts_with("errno "), "a read-only disk");
        assert_eq!(vm.query(&format!("fill 1 {MIB} 7 4096")), "ok");
        drop(vm);
        let bytes = fs::read(files.path().join("second")).expect("the disk");
        assert!(bytes[MIB as usize..][..4096].iter().all(|byte| *byte == 7));
        assert!(bytes[..MIB as usize].iter().all(|byte| *byte == 0));
    }
}

/// A hundred simultaneous connections in both directions carry their own bytes and end independently.
pub fn a_hundred_connections_are_independent(tested: &dyn TestedEngine) {
    let vm = TestVm::start(tested, vec![], |_| ());
    let streams: Vec<_> = (0..100).map(|_| vm.connect()).collect();
    for (n, stream) in streams.iter().enumerate() {
        send_command(stream, "echo");
        (&*stream).write_all(&vec![n as u8; 1000 + n]).expect("to write");
        stream.shutdown(Shutdown::Write).expect("to end");
    }
    for (n, stream) in streams.iter().enumerate() {
        assert_eq!(read_all(stream), vec![n as u8; 1000 + n], "connection {n}");
    }
    let incoming = vm.link.listen(3000).expect("a port");
    assert!(matches!(vm.link.listen(3000), Err(LinkError::PortInUse { port: 3000 })));
    for _ in 0..10 {
        assert_eq!(vm.query("call 3000"), "ok");
        assert_eq!(read_all(&incoming.accept(LONG).expect("a call")), b"called\n");
    }
    drop(incoming);
    eventually("the port to be free again", || vm.link.listen(3000).is_ok());
}

/// Much more data than all buffers hold passes without loss while the other side reads late.
pub fn a_slow_reader_exerts_back_pressure(tested: &dyn TestedEngine) {
    let vm = TestVm::start(tested, vec![], |_| ());
    let stream = vm.connect();
    send_command(&stream, "echo");
    let sent: Vec<u8> = (0..4 * MIB).map(|n| (n * 31 % 253) as u8).collect();
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            (&stream).write_all(&sent).expect("to write");
            stream.shutdown(Shutdown::Write).expect("to end");
        });
        // Other connections make progress meanwhile.
        assert_eq!(vm.query("cpus"), "1");
        assert_eq!(fnv1a(&read_all(&stream)), fnv1a(&sent));
        writer.join().expect("the writer");
    });
}

/// A connection to a port without a listener is refused at once, on both sides; accept ends at its timeout.
pub fn ports_without_a_listener_refuse_connections(tested: &dyn TestedEngine) {
    let vm = TestVm::start(tested, vec![], |_| ());
    assert!(matches!(vm.link.connect(4000, LONG), Err(LinkError::Refused { port: 4000 })));
    assert!(vm.query("call 4001").starts_with("errno "));
    let incoming = vm.link.listen(4002).expect("a port");
    let nothing = incoming.accept(Duration::from_millis(10));
    assert!(matches!(nothing, Err(LinkError::Timeout { port: 4002, .. })), "{nothing:?}");
}

/// A paused guest does nothing and keeps its state.
pub fn a_paused_vm_does_nothing(tested: &dyn TestedEngine) {
    let vm = TestVm::start(tested, vec![], |_| ());
    let Some(pausable) = vm.machine.as_pausable() else { return };
    let stream = vm.connect();
    send_command(&stream, "echo");
    for _ in 0..2 {
        pausable.pause().expect("to pause");
        assert_eq!(vm.machine.status(), MachineStatus::Paused);
    }
    if tested.reads_disks() {
        (&stream).write_all(b"x").expect("to write");
        stream.set_read_timeout(Some(Duration::from_millis(200))).expect("a time limit");
        let answer = (&stream).read(&mut [0; 1]);
        assert!(matches!(&answer, Err(error) if error.kind() == ErrorKind::WouldBlock), "{answer:?}");
    }
    for _ in 0..2 {
        pausable.resume().expect("to resume");
        assert_eq!(vm.machine.status(), MachineStatus::Running);
    }
    (&stream).write_all(b"y").expect("to write");
    stream.shutdown(Shutdown::Write).expect("to end");
    assert_eq!(read_all(&stream).last(), Some(&b'y'));
    assert_eq!(vm.query("cpus"), "1");
    pausable.pause().expect("to pause");
    assert_eq!(vm.machine.stop(StopMode::Kill).expect("to stop").how, ExitKind::Killed);
}

/// The context id of a guest is private to it: two VMs may have the same.
pub fn two_vms_may_have_the_same_cid(tested: &dyn TestedEngine) {
    let one = TestVm::start(tested, vec![], |_| ());
    let other = TestVm::start(tested, vec![], |spec| spec.vcpus = 2);
    assert_eq!([one.query("cpus"), other.query("cpus")], ["1", "2"]);
    one.machine.stop(StopMode::Kill).expect("to stop");
    assert_eq!(other.query("cpus"), "2");
}

/// A thread that waits for the guest returns when the VM ends, long before its timeout.
pub fn waiting_calls_return_when_the_vm_ends(tested: &dyn TestedEngine) {
    let vm = TestVm::start(tested, vec![], |_| ());
    let incoming = vm.link.listen(5000).expect("a port");
    thread::scope(|scope| {
        let accept = scope.spawn(move || (incoming.accept(Duration::from_secs(3600)), incoming));
        let wait = scope.spawn(|| vm.machine.wait(Duration::from_secs(3600)));
        let exit = vm.machine.stop(StopMode::Kill).expect("to stop");
        let (accepted, incoming) = accept.join().expect("the accepting thread");
        assert!(is_stopped(&accepted));
        assert!(is_stopped(&incoming.accept(LONG)));
        assert_eq!(wait.join().expect("the waiting thread"), Some(exit));
    });
}

/// A start that fails reports the cause and leaks nothing.
pub fn a_failed_start_leaks_nothing(tested: &dyn TestedEngine) {
    let before = ProcessResources::count().expect("to count");
    let directory = tempfile::tempdir().expect("a directory");
    let engine = tested.engine();
    let limits = engine.limits();
    let disks = (0..=limits.devices).map(|n| DiskSpec::Images { serial: format!("disk{n}") }).collect();
    let error = spec(tested, directory.path(), disks).check(&limits).expect_err("too many disks");
    assert_eq!(error, SpecError::Devices { disks: limits.devices + 1, nics: 0, max: limits.devices });

    let missing = directory.path().join("missing");
    let disk = DiskSpec::File { path: missing.clone(), read_only: true, serial: "missing".into() };
    let checked = spec(tested, directory.path(), vec![image_disk(), disk]).check(&limits).expect("a good spec");
    let error = engine.start(checked).err().expect("a disk that is not there");
    assert!(matches!(&error, EngineError::File { path, .. } if *path == missing), "{error:?}");

    let mut no_log = spec(tested, directory.path(), vec![image_disk()]);
    no_log.console_log = directory.path().join("missing/console.log");
    let error = engine.start(no_log.check(&limits).expect("a good spec")).err().expect("no place for the log");
    assert!(matches!(&error, EngineError::File { what: "open", .. }), "{error:?}");
    assert_only_the_log_remains(directory.path());
    drop(directory);
    before.wait_until_restored();
}

/// Dropping a running VM releases its process, descriptors and sockets.
pub fn dropping_a_vm_leaks_nothing(tested: &dyn TestedEngine) {
    let before = ProcessResources::count().expect("to count");
    for _ in 0..2 {
        let vm = TestVm::start(tested, vec![image_disk()], |_| ());
        let open = vm.connect();
        let TestVm { machine, link, directory } = vm;
        drop(machine);
        assert!(is_stopped(&link.connect(PORT, LONG)));
        assert!(read_all(&open).is_empty());
        assert_only_the_log_remains(directory.path());
    }
    before.wait_until_restored();
}

fn assert_only_the_log_remains(directory: &std::path::Path) {
    let names: Vec<_> =
        fs::read_dir(directory).expect("a directory").map(|entry| entry.expect("an entry").file_name()).collect();
    assert!(names.iter().all(|name| name == "console.log"), "{names:?}");
}
