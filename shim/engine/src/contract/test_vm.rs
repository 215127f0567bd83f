//! Provides what the contract tests use: a VM with its run directory, commands to its guest, counts of leaked resources.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::machine::{BOOT_PORT, Engine, GuestLink, Machine};
use crate::{
    CheckedSpec, DiskSpec, EngineError, LinkError, MachineSpec, SnapshotDirectory, SnapshotFiles, Touched,
    read_snapshot,
};

/// A limit that nothing reaches even on a slow and busy node; only a BUG does.
pub(super) const LONG: Duration = Duration::from_secs(120);
/// The vsock port on which the guest listens.
pub(super) const PORT: u32 = 1025;

/// An engine under test and its environment.
pub trait TestedEngine {
    /// Returns the engine.
    fn engine(&self) -> Box<dyn Engine>;
    /// Returns the path of a kernel for the engine.
    fn kernel(&self) -> PathBuf;
    /// Returns the path of the initramfs with the guest of this suite.
    fn initrd(&self) -> PathBuf;
    /// Kills the VM with this run directory from outside. Returns false if that is impossible because the VM runs in this
    /// process; the engine's own tests then cover it.
    fn kill_from_outside(&self, run_dir: &Path) -> bool;
    /// Returns whether the guests read and write their disks (the fake's see only their size).
    fn reads_disks(&self) -> bool;
}

/// A VM under test. Dropping it kills the VM first, then removes its run directory.
pub struct TestVm {
    /// The VM.
    pub machine: Box<dyn Machine>,
    /// The link to its guest.
    pub link: Arc<dyn GuestLink>,
    /// The run directory.
    pub directory: TempDir,
}

/// Waits for the lock of the suite: tests that count processes and descriptors cannot run concurrently.
pub fn lock_suite() -> MutexGuard<'static, ()> {
    static SUITE_LOCK: Mutex<()> = Mutex::new(());
    // A test that panicked has dropped its VM.
    SUITE_LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the specification of a VM of 128 MiB with one vCPU and these disks.
pub fn spec(tested: &dyn TestedEngine, directory: &Path, disks: Vec<DiskSpec>) -> MachineSpec {
    MachineSpec {
        vcpus: 1,
        topology: None,
        cpu_model: None,
        memory_mib: 128,
        hotplug_mib: 0,
        memory_pages: Default::default(),
        console: Default::default(),
        kernel: tested.kernel(),
        initrd: tested.initrd(),
        cmdline: Vec::new(),
        disks,
        nics: Vec::new(),
        run_dir: directory.to_owned(),
        console_log: directory.join("console.log"),
        guest_cid: 3,
        shares: Vec::new(),
    }
}

impl TestVm {
    /// Starts a VM, whose specification `change` may modify, and waits for the hello.
    pub fn start(tested: &dyn TestedEngine, disks: Vec<DiskSpec>, change: impl FnOnce(&mut MachineSpec)) -> TestVm {
        TestVm::start_with(tested, disks, change, |engine, spec| engine.start(spec))
    }

    /// Starts a template without disks and waits for the hello.
    pub fn start_template(tested: &dyn TestedEngine, change: impl FnOnce(&mut MachineSpec)) -> TestVm {
        let start =
            |engine: &dyn Engine, spec| engine.as_restorer().expect("an engine that restores").start_template(spec);
        TestVm::start_with(tested, Vec::new(), change, start)
    }

    fn start_with(
        tested: &dyn TestedEngine,
        disks: Vec<DiskSpec>,
        change: impl FnOnce(&mut MachineSpec),
        start: impl FnOnce(&dyn Engine, CheckedSpec) -> Result<Box<dyn Machine>, EngineError>,
    ) -> TestVm {
        let directory = tempfile::tempdir().expect("a directory for the machine");
        let mut spec = spec(tested, directory.path(), disks);
        change(&mut spec);
        let engine = tested.engine();
        let machine = start(&*engine, spec.check(&engine.limits()).expect("a good spec")).expect("a machine");
        let link = machine.link();
        let incoming = link.listen(BOOT_PORT).expect("a port for the hello");
        match incoming.accept(LONG) {
            Ok(hello) => assert_eq!(read_all(&hello), b"hello\n"),
            Err(error) => panic!("no hello: {error}; {:?}", machine.wait(Duration::ZERO)),
        }
        TestVm { machine, link, directory }
    }

    /// Restores a VM of this shape from a snapshot; it is paused.
    pub fn restore(
        tested: &dyn TestedEngine,
        from: &Path,
        disks: Vec<DiskSpec>,
        vcpus: u8,
    ) -> Result<TestVm, EngineError> {
        TestVm::restore_with(tested, from, disks, |spec| spec.vcpus = vcpus)
    }

    /// Restores a VM, whose specification `change` may modify, from a snapshot; it is paused.
    pub fn restore_with(
        tested: &dyn TestedEngine,
        from: &Path,
        disks: Vec<DiskSpec>,
        change: impl FnOnce(&mut MachineSpec),
    ) -> Result<TestVm, EngineError> {
        let directory = tempfile::tempdir().expect("a directory for the machine");
        let mut spec = spec(tested, directory.path(), disks);
        change(&mut spec);
        let engine = tested.engine();
        let restorer = engine.as_restorer().expect("an engine that restores");
        let saved = SnapshotFiles::open(from).and_then(read_snapshot);
        let saved = saved.map_err(|source| EngineError::Snapshot { what: "read", source })?;
        let machine = restorer.restore(spec.check(&engine.limits()).expect("a good spec"), saved)?;
        Ok(TestVm { link: machine.link(), machine, directory })
    }

    /// Restores a VM without devices of its own from a snapshot, and records which pages it has touched until it answers, and when it has
    /// answered again.
    pub fn record_working_set(tested: &dyn TestedEngine, of: &Path, change: impl FnOnce(&mut MachineSpec)) {
        let directory = tempfile::tempdir().expect("a directory for the machine");
        let mut spec = spec(tested, directory.path(), Vec::new());
        change(&mut spec);
        let engine = tested.engine();
        let restorer = engine.as_restorer().expect("an engine that restores");
        let spec = spec.check(&engine.limits()).expect("a good spec");
        let files = SnapshotFiles::open_to_complete(of).expect("a snapshot");
        let saved = files.try_clone().and_then(read_snapshot).expect("a snapshot");
        let machine = restorer.restore_in_small_pages(spec, saved).expect("to restore");
        let vm = TestVm { link: machine.link(), machine, directory };
        let (pausable, saver) = (vm.machine.as_pausable(), vm.machine.as_snapshottable());
        for when in [Touched::Early, Touched::Later] {
            pausable.expect("a pausable machine").resume().expect("to resume");
            vm.query("memory");
            pausable.expect("a pausable machine").pause().expect("to pause");
            saver.expect("a machine that can be saved").record_working_set(&files, when).expect("to record");
        }
    }

    /// Saves the VM to a directory, which must be paused.
    pub fn save(&self, to: &Path) -> Result<(), EngineError> {
        let failed = |source| EngineError::Snapshot { what: "write", source };
        let directory = SnapshotDirectory::create(to).map_err(failed)?;
        self.machine.as_snapshottable().expect("a machine that can be saved").save(directory.files())?;
        directory.commit().map_err(failed)
    }

    /// Connects to the guest's port, with timeouts for reading and writing.
    pub fn connect(&self) -> UnixStream {
        let stream = self.link.connect(PORT, LONG).expect("a connection to the guest");
        stream.set_read_timeout(Some(LONG)).expect("a time limit");
        stream.set_write_timeout(Some(LONG)).expect("a time limit");
        stream
    }

    /// Sends a command; returns the guest's answer without the newline.
    pub fn query(&self, command: &str) -> String {
        let stream = self.connect();
        send_command(&stream, command);
        String::from_utf8(read_all(&stream)).expect("text").trim_end().to_owned()
    }

    /// Repeats the command until the guest gives this answer.
    pub fn query_until(&self, command: &str, answer: &str) {
        let mut last = String::new();
        eventually(&format!("the answer {answer:?} to {command:?}"), || {
            last = self.query(command);
            last == answer
        });
    }
}

/// Writes a command.
pub(super) fn send_command(mut stream: &UnixStream, command: &str) {
    stream.write_all(format!("{command}\n").as_bytes()).expect("to write a command");
}

/// Reads to the end of the stream.
pub(super) fn read_all(mut stream: &UnixStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    stream.set_read_timeout(Some(LONG)).expect("a time limit");
    stream.read_to_end(&mut bytes).expect("to read to the end");
    bytes
}

/// Polls until the condition holds.
pub(super) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + LONG;
    while !holds() {
        assert!(Instant::now() < until, "waited for {what} in vain");
        thread::sleep(Duration::from_millis(20));
    }
}

/// Returns whether the result is that of a link to a VM that has ended.
pub(super) fn is_stopped<T>(result: &Result<T, LinkError>) -> bool {
    matches!(result, Err(LinkError::Stopped))
}

/// Computes FNV-1a, 64 bits, as the guest does.
pub fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The open descriptors and children of this process. Threads are not counted, because those of other tests come and go.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ProcessResources {
    descriptors: usize,
    children: BTreeSet<String>,
}

impl ProcessResources {
    pub fn count() -> io::Result<ProcessResources> {
        let mut children = BTreeSet::new();
        for task in fs::read_dir("/proc/self/task")? {
            // A thread may end between the two lines.
            let text = fs::read_to_string(task?.path().join("children")).unwrap_or_default();
            children.extend(text.split_whitespace().map(str::to_owned));
        }
        Ok(ProcessResources { descriptors: fs::read_dir("/proc/self/fd")?.count(), children })
    }

    /// Waits until the process has no more descriptors and children than these.
    pub fn wait_until_restored(&self) {
        let mut now = None;
        let until = Instant::now() + LONG;
        while Instant::now() < until {
            let count = ProcessResources::count().expect("to count");
            if count.descriptors <= self.descriptors && count.children == self.children {
                return;
            }
            now = Some(count);
            thread::sleep(Duration::from_millis(20));
        }
        panic!("left behind: {self:?} before, {now:?} after");
    }
}
