//! Saves and restores a VM whose guest consists of a few instructions instead of a kernel, so that the test runs on any KVM,
//! even one that interprets kernel mode.

use nacelle_base::{Classify, FailureKind};
use nacelle_vmm::DeviceKind;
use nacelle_vmm::balloon::Balloon;
use nacelle_vmm::machine::{Error, MemoryBacking, VmBuilder, VmConfig, VmExit, VmHandle};
use nacelle_vmm::rng::Rng;
use nacelle_vmm::snapshot::{self, PageTracker, SnapshotDirectory, SnapshotError};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use vm_memory::{Bytes, GuestAddress};

/// A timeout longer than anything takes on a slow and busy node.
const LIMIT: Duration = Duration::from_secs(120);

/// The address of the guest's counter, in memory that is zero at first.
const COUNTER: u32 = 0x20_0000;

/// Returns the guest's code. It counts in a register and in memory, and sends both counters to the serial port in a loop. It
/// has no interrupt table but enables interrupts, so any interrupt would end it.
fn code() -> Vec<u8> {
    let [a, b, c, d] = COUNTER.to_le_bytes();
    let code: [&[u8]; 9] = [
        &[0xfb],                         // sti
        &[0x66, 0xba, 0xf8, 0x03],       // mov dx, 0x3f8
        &[0x31, 0xc9],                   // xor ecx, ecx
        &[0x88, 0xc8, 0xee],             // again: mov al, cl; out dx, al
        &[0xff, 0xc1],                   // inc ecx
        &[0x8a, 0x04, 0x25, a, b, c, d], // mov al, [COUNTER]
        &[0xee],                         // out dx, al
        &[0xfe, 0x04, 0x25, a, b, c, d], // inc byte [COUNTER]
        &[0xeb, 0xea],                   // jmp again
    ];
    code.concat()
}

/// Returns the bytes that the guest sends after its first `from` bytes.
fn expected(from: usize, length: usize) -> Vec<u8> {
    (from..from + length).map(|at| (at / 2) as u8).collect()
}

/// Writes an ELF image with one segment and returns its path.
fn kernel(directory: &Path) -> PathBuf {
    const AT: u64 = 0x10_0000;
    let code = code();
    let mut elf = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0\x01\0\0\0".to_vec();
    elf.extend(AT.to_le_bytes());
    elf.extend(64_u64.to_le_bytes()); // program headers
    elf.extend([0; 12]);
    for half in [64_u16, 56, 1, 64, 0, 0] {
        elf.extend(half.to_le_bytes());
    }
    elf.extend([1, 0, 0, 0, 5, 0, 0, 0]); // PT_LOAD, readable and executable
    for word in [0x1000, AT, AT, code.len() as u64, code.len() as u64, 0x1000] {
        elf.extend(word.to_le_bytes());
    }
    elf.resize(0x1000, 0);
    elf.extend(code);
    let path = directory.join("kernel");
    std::fs::write(&path, elf).unwrap();
    path
}

/// The guest's output on its serial port so far.
#[derive(Clone, Default)]
struct Output(Arc<Mutex<Vec<u8>>>);

impl Output {
    /// Attaches the output to the VM's serial port.
    fn listen(&self, builder: &mut VmBuilder) {
        let output = self.0.clone();
        builder.serial(Box::new(move |bytes| output.lock().unwrap().extend(bytes))).unwrap();
    }

    fn get(&self) -> Vec<u8> {
        self.0.lock().unwrap().clone()
    }

    /// Waits until the guest has sent more than `more` bytes in total.
    fn wait(&self, machine: &VmHandle, more: usize) {
        let deadline = Instant::now() + LIMIT;
        while self.get().len() <= more {
            assert_eq!(machine.exit(), None);
            assert!(Instant::now() < deadline, "{} bytes", self.get().len());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Starts the guest on a VM with a device. Prints a reason and returns `None` if there is no KVM.
fn start(directory: &Path, vcpus: u8) -> Option<(VmHandle, Output)> {
    start_with(VmConfig { vcpus, memory_mib: 16, kernel: kernel(directory), ..VmConfig::default() })
}

fn start_with(config: VmConfig) -> Option<(VmHandle, Output)> {
    let mut builder = match VmBuilder::new(config) {
        Ok(builder) => builder,
        Err(error) => {
            println!("skipped: {}", nacelle_base::Chain(&error));
            return None;
        }
    };
    let output = Output::default();
    output.listen(&mut builder);
    builder.attach(Rng::new().device()).unwrap();
    let machine = builder.start().unwrap();
    output.wait(&machine, 1000);
    Some((machine, output))
}

/// Restores a VM from the snapshot, paused.
fn restore(dir: &Path) -> (VmHandle, Output) {
    let saved = snapshot::open(dir).unwrap();
    let mut builder = saved.builder().unwrap();
    let output = Output::default();
    output.listen(&mut builder);
    builder.attach(Rng::new().device()).unwrap();
    (builder.restore(saved.state()).unwrap(), output)
}

#[test]
fn a_saved_vm_continues_in_each_restored_vm() {
    let directory = tempfile::tempdir().unwrap();
    for vcpus in [1, 2] {
        let Some((machine, output)) = start(directory.path(), vcpus) else { return };
        let dir = directory.path().join(format!("of-{vcpus}"));
        assert!(matches!(snapshot::save(&machine, &dir), Err(SnapshotError::Machine { source: Error::NotPaused })));
        assert!(!dir.exists());
        machine.pause().unwrap();
        snapshot::save(&machine, &dir).unwrap();
        let before = output.get().len();
        assert_eq!(output.get(), expected(0, before));

        let saved = snapshot::open(&dir).unwrap();
        assert_eq!((saved.vcpus(), saved.memory_mib()), (usize::from(vcpus), 16));
        assert_eq!(saved.devices().collect::<Vec<_>>(), [DeviceKind::Rng]);
        // The saved VM and two restored ones continue, all at once.
        let [(one, first), (two, second)] = [restore(&dir), restore(&dir)];
        assert!(first.get().is_empty(), "it is paused");
        for machine in [&machine, &one, &two] {
            machine.resume().unwrap();
        }
        output.wait(&machine, before + 1000);
        assert_eq!(output.get()[before..before + 1000], expected(before, 1000));
        for (machine, output) in [(&one, &first), (&two, &second)] {
            output.wait(machine, 1000);
            assert_eq!(output.get()[..1000], expected(before, 1000));
        }

        // A restored VM is saved again: its untouched pages come from the first snapshot.
        one.pause().unwrap();
        let again = directory.path().join(format!("again-{vcpus}"));
        snapshot::save(&one, &again).unwrap();
        let before = before + first.get().len();
        drop(one);
        let (three, third) = restore(&again);
        three.resume().unwrap();
        third.wait(&three, 1000);
        assert_eq!(third.get()[..1000], expected(before, 1000));
        assert_eq!(three.kill().unwrap(), VmExit::Killed);
    }
}

#[test]
fn mismatched_snapshots_are_rejected() {
    let directory = tempfile::tempdir().unwrap();
    let Some((machine, _)) = start(directory.path(), 1) else { return };
    machine.pause().unwrap();
    let dir = directory.path().join("snapshot");
    snapshot::save(&machine, &dir).unwrap();
    let save_error = snapshot::save(&machine, &dir).unwrap_err();
    assert_eq!(save_error.kind(), FailureKind::AlreadyExists, "{save_error}");
    let saved = snapshot::open(&dir).unwrap();

    let builder = saved.builder().unwrap();
    let error = builder.restore(saved.state()).err().unwrap();
    assert!(matches!(error, Error::Mismatch { what: "devices", saved: 1, here: 0 }), "{error}");
    let mut builder = saved.builder().unwrap();
    builder.attach(Balloon::new().device()).unwrap();
    let error = builder.restore(saved.state()).err().unwrap();
    assert!(matches!(error, Error::Restore { device: DeviceKind::Balloon, .. }), "{error}");
    let mut builder = VmBuilder::new(VmConfig { vcpus: 2, memory_mib: 16, ..VmConfig::default() }).unwrap();
    builder.attach(Rng::new().device()).unwrap();
    let error = builder.restore(saved.state()).err().unwrap();
    assert!(matches!(error, Error::Mismatch { what: "vCPUs", saved: 1, here: 2 }), "{error}");
}

/// A guest that counts in memory is saved while it runs: where a restored VM continues, the saved one was between begin and end of the pause.
#[test]
fn a_running_vm_is_saved_at_the_moment_of_its_pause() {
    let directory = tempfile::tempdir().unwrap();
    let Some((machine, output)) = start(directory.path(), 1) else { return };
    let (tracker, stop) = (PageTracker::open().unwrap(), AtomicBool::new(false));
    let counter = |machine: &VmHandle| machine.memory().read_obj::<u32>(GuestAddress(COUNTER.into())).unwrap();
    let files = SnapshotDirectory::create(&directory.path().join("running")).unwrap();
    let copy = snapshot::begin_save(&machine, files.files(), &tracker, &stop).unwrap();
    let from = counter(&machine);
    eventually(|| counter(&machine) > from);
    machine.pause().unwrap();
    let paused = counter(&machine);
    let captured = copy.capture().unwrap();
    machine.resume().unwrap();
    eventually(|| counter(&machine) > paused);
    captured.finish().unwrap();
    files.commit().unwrap();
    let (restored, _) = restore(&directory.path().join("running"));
    assert_eq!(counter(&restored), paused);
    restored.resume().unwrap();
    eventually(|| counter(&restored) > paused);
    drop((machine, output));

    let shared = VmConfig {
        backing: MemoryBacking::Shared,
        memory_mib: 16,
        kernel: kernel(directory.path()),
        ..VmConfig::default()
    };
    let (machine, _) = start_with(shared).unwrap();
    let files = SnapshotDirectory::create(&directory.path().join("shared")).unwrap();
    let refused = snapshot::begin_save(&machine, files.files(), &tracker, &stop).err().unwrap();
    assert!(matches!(refused, SnapshotError::Untracked), "{refused}");
}

fn eventually(holds: impl Fn() -> bool) {
    let end = Instant::now() + LIMIT;
    while !holds() {
        assert!(Instant::now() < end, "not within {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
