//! Boots whole VMs with a real kernel. The tests are skipped if KVM does not run guest kernels on the CPU, if no kernel is
//! found, or if the initramfs is neither in the cache nor can be built for lack of a C compiler.

use nacelle_base::{Classify, FailureKind};
use nacelle_vmm::balloon::Balloon;
use nacelle_vmm::block::Slot;
use nacelle_vmm::machine::tiny::TinyGuest;
use nacelle_vmm::machine::{Error, MAX_DEVICES, MemoryBacking, VmBuilder, VmConfig, VmExit, VmHandle};
use nacelle_vmm::rng::Rng;
use nacelle_vmm::snapshot;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The timeout of every wait in a test.
const LIMIT: Duration = Duration::from_secs(300);

/// The tests check for leaks of their own VMs, so they run one after the other.
static ALONE: Mutex<()> = Mutex::new(());

fn lock_suite() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The files that all VMs use.
struct GuestFiles {
    kernel: PathBuf,
    initrd: PathBuf,
    _suite_lock: MutexGuard<'static, ()>,
}

/// Returns the files, or prints a reason and returns `None` if VMs cannot run here.
fn guest_files() -> Option<GuestFiles> {
    static FOUND: OnceLock<Result<(PathBuf, PathBuf), String>> = OnceLock::new();
    let lock_suite = lock_suite();
    match FOUND.get_or_init(find) {
        Ok((kernel, initrd)) => {
            Some(GuestFiles { kernel: kernel.clone(), initrd: initrd.clone(), _suite_lock: lock_suite })
        }
        Err(why) => {
            eprintln!("skipped: {why}");
            None
        }
    }
}

/// Returns kernel and initramfs, if KVM runs guests here.
fn find() -> Result<(PathBuf, PathBuf), String> {
    let cache = cache()?;
    let kernel = kernel(&cache)?;
    let initrd = initrd(&cache)?;
    let mut best = Duration::MAX;
    let mut tiny = TinyGuest::new().map_err(|error| error.to_string())?;
    for _ in 0..5 {
        best = best.min(tiny.run().map_err(|error| error.to_string())?);
    }
    match best < Duration::from_millis(15) {
        true => Ok((kernel, initrd)),
        false => Err(format!("KVM interprets guest kernels (probe: {best:?})")),
    }
}

fn cache() -> Result<PathBuf, String> {
    match (std::env::var_os("NACELLE_CACHE"), std::env::var_os("HOME")) {
        (Some(cache), _) => Ok(PathBuf::from(cache).join("guest")),
        (None, Some(home)) => Ok(PathBuf::from(home).join(".cache/nacelle/guest")),
        (None, None) => Err("no cache: neither NACELLE_CACHE nor HOME is set".to_owned()),
    }
}

/// Returns the kernel of NACELLE_KERNEL, or the newest that `guest/build kernel` has left in the cache.
fn kernel(cache: &Path) -> Result<PathBuf, String> {
    if let Some(path) = std::env::var_os("NACELLE_KERNEL") {
        return Ok(path.into());
    }
    let built = std::fs::read_dir(cache).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let named = built.filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("kernel-")));
    let kernels = named.map(|path| path.join("vmlinux")).filter(|path| path.is_file());
    let newest = kernels.max_by_key(|path| std::fs::metadata(path).and_then(|meta| meta.modified()).ok());
    newest.ok_or_else(|| "no kernel: guest/build kernel makes one".to_owned())
}

/// Builds the initramfs, so that a node without a compiler finds it in the cache.
#[test]
fn the_suites_guest_is_made() {
    initrd(&cache().unwrap()).unwrap();
}

/// Returns an initramfs with `machine_guest/init.c` as its init, built once.
fn initrd(cache: &Path) -> Result<PathBuf, String> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let source = include_bytes!("machine_guest/init.c");
    let sum = source
        .iter()
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3));
    let path = cache.join(format!("machine-test-{sum:016x}.cpio"));
    if path.is_file() {
        return Ok(path);
    }
    std::fs::create_dir_all(cache).map_err(|error| format!("no cache: {error}"))?;
    let work = tempfile::tempdir_in(cache).map_err(|error| format!("no place to build a guest: {error}"))?;
    let binary = work.path().join("init");
    let mut compiler = Command::new("gcc");
    compiler.args(["-O1", "-static", "-pthread", "-o"]).arg(&binary).arg(here.join("tests/machine_guest/init.c"));
    match compiler.status() {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("the guest's init does not compile: {status}"),
        Err(error) => return Err(format!("no C compiler: {error}")),
    }
    let packed = Command::new(here.join("../../guest/mkinitramfs")).arg(&binary).output();
    let packed = packed.map_err(|error| format!("cannot pack an initramfs: {error}"))?;
    assert!(packed.status.success(), "{}", String::from_utf8_lossy(&packed.stderr));
    let archive = work.path().join("archive");
    std::fs::write(&archive, packed.stdout).unwrap();
    std::fs::rename(&archive, &path).unwrap();
    Ok(path)
}

/// The guest's console output so far.
#[derive(Clone, Default)]
struct TestConsole(Arc<(Mutex<Vec<u8>>, Condvar)>);

impl TestConsole {
    fn sink(&self) -> nacelle_vmm::machine::SerialSink {
        let to = self.0.clone();
        Box::new(move |bytes| {
            to.0.lock().unwrap().extend(bytes);
            to.1.notify_all();
        })
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.0.lock().unwrap()).into_owned()
    }

    /// Waits until the console output contains `text` behind its first `from` bytes.
    fn expect(&self, text: &str, from: usize) {
        let give_up = Instant::now() + LIMIT;
        let mut output = self.0.0.lock().unwrap();
        while !String::from_utf8_lossy(output.get(from..).unwrap_or_default()).contains(text) {
            assert!(Instant::now() < give_up, "no {text:?} in {}", String::from_utf8_lossy(&output));
            output = self.0.1.wait_timeout(output, Duration::from_secs(1)).unwrap().0;
        }
    }

    fn length(&self) -> usize {
        self.0.0.lock().unwrap().len()
    }
}

fn config(guest_files: &GuestFiles, words: &[&str]) -> VmConfig {
    VmConfig {
        kernel: guest_files.kernel.clone(),
        initrd: Some(guest_files.initrd.clone()),
        cmdline: ["console=ttyS0", "quiet"].iter().chain(words).map(|word| (*word).to_owned()).collect(),
        ..VmConfig::default()
    }
}

fn boot(config: VmConfig) -> (VmHandle, TestConsole) {
    let console = TestConsole::default();
    let mut builder = VmBuilder::new(config).unwrap();
    builder.serial(console.sink()).unwrap();
    (builder.start().unwrap(), console)
}

/// Boots a VM and waits for the guest's init.
fn boot_until_up(config: VmConfig) -> (VmHandle, TestConsole) {
    let (machine, console) = boot(config);
    console.expect("up after", 0);
    (machine, console)
}

fn wait_exit(machine: &VmHandle, console: &TestConsole) -> VmExit {
    machine.wait(LIMIT).unwrap_or_else(|| panic!("the machine does not end:\n{}", console.text()))
}

/// Waits until this process has no vCPU thread and no KVM descriptor. A joined thread may remain visible for a moment.
fn no_file_is_leaked() {
    let give_up = Instant::now() + LIMIT;
    loop {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
        let descriptors = std::fs::read_dir("/proc/self/fd").unwrap();
        let links = descriptors.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
        let threads: Vec<_> = names.filter(|name| name.starts_with("vcpu")).collect();
        let files: Vec<_> = links.filter(|link| link.to_string_lossy().contains("kvm")).collect();
        if threads.is_empty() && files.is_empty() {
            return;
        }
        assert!(Instant::now() < give_up, "left behind: {threads:?} {files:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_kernel_boots_and_resets() {
    let Some(guest_files) = guest_files() else { return };
    let (machine, console) = boot_until_up(config(&guest_files, &["do=memory"]));
    let exit = machine.wait(LIMIT);
    assert_eq!(exit, Some(VmExit::Reset), "{}", console.text());
    assert_eq!(machine.wait(Duration::ZERO), exit, "always the same answer");
    assert_eq!(machine.kill().unwrap(), VmExit::Reset, "killed after its end");
    assert!(matches!(machine.pause(), Err(Error::Ended { exit: VmExit::Reset })));
    assert!(console.text().contains("memory good"), "{}", console.text());
    drop(machine);
    no_file_is_leaked();
}

#[test]
fn every_vcpu_starts() {
    let Some(guest_files) = guest_files() else { return };
    for vcpus in [1, 2, 4] {
        let (machine, console) = boot(VmConfig { vcpus, ..config(&guest_files, &["do=tour"]) });
        assert_eq!(wait_exit(&machine, &console), VmExit::Reset);
        let text = console.text();
        assert!(text.contains(&format!("toured {vcpus} CPUs")), "{vcpus} vCPUs: {text}");
    }
}

#[test]
fn each_kind_of_exit_is_distinguished() {
    let Some(guest_files) = guest_files() else { return };
    // A panic requests a reset; the console shows the reason.
    let (machine, console) = boot(VmConfig { vcpus: 2, ..config(&guest_files, &["do=panic", "panic=-1"]) });
    assert_eq!(wait_exit(&machine, &console), VmExit::Reset);
    assert!(console.text().contains("Kernel panic"), "{}", console.text());
    drop(machine);

    let (machine, console) = boot(VmConfig { vcpus: 2, ..config(&guest_files, &["do=reset", "reboot=t"]) });
    let exit = wait_exit(&machine, &console);
    assert!(matches!(&exit, VmExit::TripleFault { what } if what.starts_with("vCPU ")), "{exit}");
    drop(machine);

    // A guest that is halted for ever, and one whose vCPUs never leave user mode.
    for (word, sign) in [("do=halt", "up after"), ("do=spin", "spinning")] {
        let (machine, console) = boot(VmConfig { vcpus: 2, ..config(&guest_files, &[word]) });
        console.expect(sign, 0);
        assert_eq!(machine.wait(Duration::from_millis(300)), None, "{}", console.text());
        assert_eq!(machine.kill().unwrap(), VmExit::Killed);
        assert_eq!(machine.wait(Duration::ZERO), Some(VmExit::Killed));
        drop(machine);
        no_file_is_leaked();
    }
}

#[test]
fn a_paused_vm_does_nothing() {
    let Some(guest_files) = guest_files() else { return };
    for vcpus in [1, 3] {
        let (machine, console) = boot(VmConfig { vcpus, ..config(&guest_files, &["do=count"]) });
        console.expect("count 3 ", 0);
        for _ in 0..5 {
            machine.pause().unwrap();
            machine.pause().unwrap();
            let output = console.length();
            std::thread::sleep(Duration::from_millis(200));
            assert_eq!(console.length(), output, "a paused guest has spoken");
            machine.resume().unwrap();
            machine.resume().unwrap();
            console.expect("count", output);
        }
        machine.pause().unwrap();
        assert_eq!(machine.kill().unwrap(), VmExit::Killed, "a paused machine can be killed");
    }
}

#[test]
fn devices_work_in_a_vm() {
    let Some(guest_files) = guest_files() else { return };
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let bytes: Vec<u8> = (0..1u32 << 20).map(|at| (at * 7 % 251) as u8).collect();
    file.write_all(&bytes).unwrap();
    let sum = bytes.iter().fold(0u32, |sum, byte| sum.wrapping_add(u32::from(*byte)));
    for backing in [MemoryBacking::Private, MemoryBacking::Shared] {
        let console = TestConsole::default();
        let mut builder = VmBuilder::new(VmConfig { vcpus: 2, backing, ..config(&guest_files, &["do=disk"]) }).unwrap();
        builder.serial(console.sink()).unwrap();
        // Takes the other windows, so that the disk gets the last window and interrupt.
        for _ in 1..MAX_DEVICES {
            builder.attach(Rng::new().device()).unwrap();
        }
        let slot = Slot::read_write("disk", file.path(), 1 << 20).unwrap();
        builder.attach(slot.device()).unwrap();
        assert!(matches!(builder.attach(Rng::new().device()), Err(Error::Devices { max: MAX_DEVICES })));
        let machine = builder.start().unwrap();
        assert_eq!(wait_exit(&machine, &console), VmExit::Reset);
        assert!(console.text().contains(&format!("disk sum {sum}")), "{}", console.text());
    }
}

#[test]
fn a_kernel_uses_hvc0_and_reports_free_pages() {
    let Some(guest_files) = guest_files() else { return };
    let output = TestConsole::default();
    let mut builder = VmBuilder::new(VmConfig {
        cmdline: vec!["quiet".into(), "console=hvc0".into(), "do=free".into()],
        ..config(&guest_files, &[])
    })
    .unwrap();
    let balloon = Balloon::new();
    builder.attach(nacelle_vmm::console::VirtioConsole::new(output.sink()).device()).unwrap();
    builder.attach(balloon.device()).unwrap();
    let machine = builder.start().unwrap();
    output.expect("memory good", 0);
    let wait = |what: &str, holds: &dyn Fn() -> bool| {
        let give_up = Instant::now() + LIMIT;
        while !holds() {
            assert!(Instant::now() < give_up, "no {what}: {:?}", balloon.metrics());
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    let metrics = balloon.metrics();
    let freed = || metrics.freed_bytes.load(Relaxed);
    wait("report of 32 MiB", &|| freed() >= 32 << 20);
    let reported = freed();
    balloon.set_target(1024);
    wait("inflation", &|| balloon.actual() == 1024);
    assert!(freed() >= reported + (4 << 20));
    balloon.set_target(0);
    wait("deflation", &|| balloon.actual() == 0);
    balloon.request_statistics();
    wait("statistics", &|| balloon.statistics().and_then(|statistics| statistics.total).is_some());
    assert_eq!((metrics.refused.load(Relaxed), metrics.failed.load(Relaxed)), (0, 0));
    assert_eq!(machine.kill().unwrap(), VmExit::Killed);
}

#[test]
fn memory_above_the_device_hole_works() {
    let Some(guest_files) = guest_files() else { return };
    // The kernel's memory map does not contain the hot-plug memory.
    for (memory_mib, hotplug_mib, backing) in [
        (64, 0, MemoryBacking::Private),
        (131, 1024, MemoryBacking::Shared),
        (3100, 0, MemoryBacking::Private),
        (200, 4096, MemoryBacking::Private),
    ] {
        let (machine, console) = boot(VmConfig { memory_mib, hotplug_mib, backing, ..config(&guest_files, &[]) });
        assert_eq!(wait_exit(&machine, &console), VmExit::Reset);
        let text = console.text();
        let mib: u32 = text.split(" and ").nth(1).and_then(|rest| rest.split(' ').next()?.parse().ok()).unwrap();
        assert!(mib <= memory_mib && mib > memory_mib * 3 / 5, "{memory_mib}: {text}");
    }
}

#[test]
fn a_kernel_with_only_a_pvh_entry_boots() {
    let Some(guest_files) = guest_files() else { return };
    let copy = tempfile::NamedTempFile::new().unwrap();
    std::fs::copy(&guest_files.kernel, copy.path()).unwrap();
    // The field e_entry of the ELF header.
    copy.as_file().write_all_at(&[0; 8], 24).unwrap();
    let (machine, console) =
        boot(VmConfig { kernel: copy.path().to_owned(), vcpus: 2, ..config(&guest_files, &["do=tour"]) });
    assert_eq!(wait_exit(&machine, &console), VmExit::Reset);
    assert!(console.text().contains("toured 2 CPUs"), "{}", console.text());
}

/// Returns the kernel of NACELLE_BZIMAGE, or the kernel of the test node (`ci/node setup` leaves it in the cache).
fn bzimage() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("NACELLE_BZIMAGE") {
        return Some(path.into());
    }
    let list = |directory: PathBuf| {
        std::fs::read_dir(directory).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()))
    };
    let mut boot = list(cache().ok()?.with_file_name("node")).map(|node| node.join("kernel/boot"));
    boot.find_map(|boot| {
        list(boot).find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz")))
    })
}

#[test]
fn a_compressed_kernel_unpacks_itself_and_boots() {
    let Some(guest_files) = guest_files() else { return };
    let Some(kernel) = bzimage() else {
        eprintln!("skipped: no bzImage: neither NACELLE_BZIMAGE nor a test node's kernel in the cache");
        return;
    };
    // A distribution's kernel may ignore the table of CPUs.
    let config = config(&guest_files, &["do=memory"]);
    let (machine, console) = boot(VmConfig { kernel, memory_mib: 512, ..config });
    assert_eq!(wait_exit(&machine, &console), VmExit::Reset, "{}", console.text());
    assert!(console.text().contains("memory good"), "{}", console.text());
}

#[test]
fn a_restored_vm_continues_where_it_was_saved() {
    let Some(guest_files) = guest_files() else { return };
    for vcpus in [1, 2, 4] {
        let (machine, console) = boot(VmConfig { vcpus, ..config(&guest_files, &["do=count"]) });
        console.expect("count 5 ", 0);
        assert!(matches!(machine.save(), Err(Error::NotPaused)));
        machine.pause().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("saved");
        snapshot::save(&machine, &place).unwrap();
        drop(machine);
        let (last, at) = last_count(&console.text());
        // Twice: the two VMs do not see each other's changes.
        for _ in 0..2 {
            let saved = snapshot::open(&place).unwrap();
            let console = TestConsole::default();
            let mut builder = saved.builder().unwrap();
            builder.serial(console.sink()).unwrap();
            let machine = builder.restore(saved.state()).unwrap();
            assert_eq!(machine.wait(Duration::from_millis(50)), None);
            assert_eq!(console.length(), 0, "it is paused until it is resumed");
            machine.resume().unwrap();
            console.expect(&format!("count {} at", last + 20), 0);
            let (later, then) = last_count(&console.text());
            assert!(later >= last + 19 && then > at && then < at + 60_000, "{last} at {at}: {}", console.text());
            assert_eq!(machine.kill().unwrap(), VmExit::Killed);
        }
    }
}

#[test]
fn restored_vms_draw_different_random_numbers() {
    let Some(guest_files) = guest_files() else { return };
    let (machine, console) = boot(config(&guest_files, &["do=draw"]));
    console.expect("draw ", 0);
    assert!(console.text().contains("generation id: watched"), "an old kernel? {}", console.text());
    machine.pause().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join("saved");
    snapshot::save(&machine, &place).unwrap();
    // The saved VM continues; two others start from the saved state.
    let output = console.length();
    machine.resume().unwrap();
    let mut drawn = vec![random_numbers(&console, output)];
    drop(machine);
    for _ in 0..2 {
        let saved = snapshot::open(&place).unwrap();
        let console = TestConsole::default();
        let mut builder = saved.builder().unwrap();
        builder.serial(console.sink()).unwrap();
        let machine = builder.restore(saved.state()).unwrap();
        machine.resume().unwrap();
        drawn.push(random_numbers(&console, 0));
    }
    let mut all: Vec<_> = drawn.concat();
    let count = all.len();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), count, "drawn twice: {drawn:?}");
}

/// Returns the first numbers that a drawing guest prints, behind the first `from` bytes and the line that they end in.
fn random_numbers(console: &TestConsole, from: usize) -> Vec<String> {
    let give_up = Instant::now() + LIMIT;
    loop {
        let text = console.text().split_off(from);
        let lines = text.split_inclusive('\n').skip(1).filter(|line| line.ends_with('\n'));
        let numbers: Vec<_> = lines.filter_map(|line| line.strip_prefix("draw ")).map(str::to_owned).collect();
        if numbers.len() >= 5 {
            return numbers;
        }
        assert!(Instant::now() < give_up, "too few numbers: {text}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Returns the last complete line of a counting guest: its number and its clock in milliseconds.
fn last_count(text: &str) -> (u64, u64) {
    let line = text.lines().rev().skip(1).find(|line| line.starts_with("count ")).unwrap();
    let words: Vec<_> = line.split(' ').collect();
    (words[1].parse().unwrap(), words[3].trim().parse().unwrap())
}

#[test]
fn invalid_configurations_are_rejected() {
    let _suite_lock = lock_suite();
    if TinyGuest::new().is_err() {
        eprintln!("skipped: no KVM");
        return;
    }
    let refused = |config: VmConfig| VmBuilder::new(config).and_then(VmBuilder::start).err().expect("refused");
    for vcpus in [0, 65] {
        let error = refused(VmConfig { vcpus, ..VmConfig::default() });
        assert!(matches!(error, Error::Vcpus { .. }) && error.kind() == FailureKind::Invalid, "{error}");
    }
    let error = refused(VmConfig { memory_mib: 1, ..VmConfig::default() });
    assert!(matches!(error, Error::Memory { mib: 1, .. }) && error.kind() == FailureKind::Invalid, "{error}");
    let missing = refused(VmConfig { kernel: "/does/not/exist".into(), ..VmConfig::default() });
    assert_eq!(missing.kind(), FailureKind::NotFound, "{missing}");
    let nonsense = refused(VmConfig { kernel: "/proc/self/exe".into(), ..VmConfig::default() });
    assert_eq!(nonsense.kind(), FailureKind::Invalid, "{nonsense}");
    no_file_is_leaked();
}
