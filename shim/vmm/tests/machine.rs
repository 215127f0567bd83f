//! Boots whole VMs with a real kernel. The tests are skipped if KVM does not run guest kernels on the CPU, if no kernel is
//! found, or if the initramfs is neither in the cache nor can be built for lack of a C compiler.

use nacelle_base::{Classify, Kind};
use nacelle_vmm::balloon::Balloon;
use nacelle_vmm::block::Slot;
use nacelle_vmm::machine::tiny::TinyGuest;
use nacelle_vmm::machine::{Backing, Builder, Config, Error, Exit, MAX_DEVICES, Machine};
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

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The files that all VMs use.
struct Pieces {
    kernel: PathBuf,
    initrd: PathBuf,
    _alone: MutexGuard<'static, ()>,
}

/// Returns the files, or prints a reason and returns `None` if VMs cannot run here.
fn pieces() -> Option<Pieces> {
    static FOUND: OnceLock<Result<(PathBuf, PathBuf), String>> = OnceLock::new();
    let alone = alone();
    match FOUND.get_or_init(find) {
        Ok((kernel, initrd)) => Some(Pieces { kernel: kernel.clone(), initrd: initrd.clone(), _alone: alone }),
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
struct Console(Arc<(Mutex<Vec<u8>>, Condvar)>);

impl Console {
    fn sink(&self) -> nacelle_vmm::machine::Console {
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
        let mut said = self.0.0.lock().unwrap();
        while !String::from_utf8_lossy(said.get(from..).unwrap_or_default()).contains(text) {
            assert!(Instant::now() < give_up, "no {text:?} in {}", String::from_utf8_lossy(&said));
            said = self.0.1.wait_timeout(said, Duration::from_secs(1)).unwrap().0;
        }
    }

    fn length(&self) -> usize {
        self.0.0.lock().unwrap().len()
    }
}

fn config(pieces: &Pieces, words: &[&str]) -> Config {
    Config {
        kernel: pieces.kernel.clone(),
        initrd: Some(pieces.initrd.clone()),
        cmdline: ["console=ttyS0", "quiet"].iter().chain(words).map(|word| (*word).to_owned()).collect(),
        ..Config::default()
    }
}

fn boot(config: Config) -> (Machine, Console) {
    let console = Console::default();
    let mut builder = Builder::new(config).unwrap();
    builder.serial(console.sink()).unwrap();
    (builder.start().unwrap(), console)
}

/// Boots a VM and waits for the guest's init.
fn up(config: Config) -> (Machine, Console) {
    let (machine, console) = boot(config);
    console.expect("up after", 0);
    (machine, console)
}

fn end_of(machine: &Machine, console: &Console) -> Exit {
    machine.wait(LIMIT).unwrap_or_else(|| panic!("the machine does not end:\n{}", console.text()))
}

/// Waits until this process has no vCPU thread and no KVM descriptor. A joined thread may remain visible for a moment.
fn nothing_is_left() {
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
    let Some(pieces) = pieces() else { return };
    let (machine, console) = up(config(&pieces, &["do=memory"]));
    let exit = machine.wait(LIMIT);
    assert_eq!(exit, Some(Exit::Reset), "{}", console.text());
    assert_eq!(machine.wait(Duration::ZERO), exit, "always the same answer");
    assert_eq!(machine.kill().unwrap(), Exit::Reset, "killed after its end");
    assert!(matches!(machine.pause(), Err(Error::Ended { exit: Exit::Reset })));
    assert!(console.text().contains("memory good"), "{}", console.text());
    drop(machine);
    nothing_is_left();
}

#[test]
fn every_processor_comes_up() {
    let Some(pieces) = pieces() else { return };
    for vcpus in [1, 2, 4] {
        let (machine, console) = boot(Config { vcpus, ..config(&pieces, &["do=tour"]) });
        assert_eq!(end_of(&machine, &console), Exit::Reset);
        let text = console.text();
        assert!(text.contains(&format!("toured {vcpus} CPUs")), "{vcpus} vCPUs: {text}");
    }
}

#[test]
fn each_end_is_told_apart() {
    let Some(pieces) = pieces() else { return };
    // A panic requests a reset; the console shows the reason.
    let (machine, console) = boot(Config { vcpus: 2, ..config(&pieces, &["do=panic", "panic=-1"]) });
    assert_eq!(end_of(&machine, &console), Exit::Reset);
    assert!(console.text().contains("Kernel panic"), "{}", console.text());
    drop(machine);

    let (machine, console) = boot(Config { vcpus: 2, ..config(&pieces, &["do=reset", "reboot=t"]) });
    let exit = end_of(&machine, &console);
    assert!(matches!(&exit, Exit::TripleFault { what } if what.starts_with("vCPU ")), "{exit}");
    drop(machine);

    // A guest that is halted for ever, and one whose vCPUs never leave user mode.
    for (word, sign) in [("do=halt", "up after"), ("do=spin", "spinning")] {
        let (machine, console) = boot(Config { vcpus: 2, ..config(&pieces, &[word]) });
        console.expect(sign, 0);
        assert_eq!(machine.wait(Duration::from_millis(300)), None, "{}", console.text());
        assert_eq!(machine.kill().unwrap(), Exit::Killed);
        assert_eq!(machine.wait(Duration::ZERO), Some(Exit::Killed));
        drop(machine);
        nothing_is_left();
    }
}

#[test]
fn a_paused_machine_stands_still() {
    let Some(pieces) = pieces() else { return };
    for vcpus in [1, 3] {
        let (machine, console) = boot(Config { vcpus, ..config(&pieces, &["do=count"]) });
        console.expect("count 3 ", 0);
        for _ in 0..5 {
            machine.pause().unwrap();
            machine.pause().unwrap();
            let said = console.length();
            std::thread::sleep(Duration::from_millis(200));
            assert_eq!(console.length(), said, "a paused guest has spoken");
            machine.resume().unwrap();
            machine.resume().unwrap();
            console.expect("count", said);
        }
        machine.pause().unwrap();
        assert_eq!(machine.kill().unwrap(), Exit::Killed, "a paused machine can be killed");
    }
}

#[test]
fn devices_work_behind_their_windows() {
    let Some(pieces) = pieces() else { return };
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let bytes: Vec<u8> = (0..1u32 << 20).map(|at| (at * 7 % 251) as u8).collect();
    file.write_all(&bytes).unwrap();
    let sum = bytes.iter().fold(0u32, |sum, byte| sum.wrapping_add(u32::from(*byte)));
    for backing in [Backing::Private, Backing::Shared] {
        let console = Console::default();
        let mut builder = Builder::new(Config { vcpus: 2, backing, ..config(&pieces, &["do=disk"]) }).unwrap();
        builder.serial(console.sink()).unwrap();
        // Takes the other windows, so that the disk gets the last window and interrupt.
        for _ in 1..MAX_DEVICES {
            builder.attach(Rng::new().device()).unwrap();
        }
        let slot = Slot::read_write("disk", file.path(), 1 << 20).unwrap();
        builder.attach(slot.device()).unwrap();
        assert!(matches!(builder.attach(Rng::new().device()), Err(Error::Devices { max: MAX_DEVICES })));
        let machine = builder.start().unwrap();
        assert_eq!(end_of(&machine, &console), Exit::Reset);
        assert!(console.text().contains(&format!("disk sum {sum}")), "{}", console.text());
    }
}

#[test]
fn a_kernel_speaks_over_hvc0_and_gives_memory_back() {
    let Some(pieces) = pieces() else { return };
    let said = Console::default();
    let mut builder = Builder::new(Config {
        cmdline: vec!["quiet".into(), "console=hvc0".into(), "do=free".into()],
        ..config(&pieces, &[])
    })
    .unwrap();
    let balloon = Balloon::new();
    builder.attach(nacelle_vmm::console::Console::new(said.sink()).device()).unwrap();
    builder.attach(balloon.device()).unwrap();
    let machine = builder.start().unwrap();
    said.expect("memory good", 0);
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
    balloon.ask_statistics();
    wait("statistics", &|| balloon.statistics().and_then(|statistics| statistics.total).is_some());
    assert_eq!((metrics.refused.load(Relaxed), metrics.failed.load(Relaxed)), (0, 0));
    assert_eq!(machine.kill().unwrap(), Exit::Killed);
}

#[test]
fn memory_may_be_large_and_lie_anywhere() {
    let Some(pieces) = pieces() else { return };
    // The kernel's memory map does not contain the reserve.
    for (memory_mib, reserve_mib, backing) in [
        (64, 0, Backing::Private),
        (131, 1024, Backing::Shared),
        (3100, 0, Backing::Private),
        (200, 4096, Backing::Private),
    ] {
        let (machine, console) = boot(Config { memory_mib, reserve_mib, backing, ..config(&pieces, &[]) });
        assert_eq!(end_of(&machine, &console), Exit::Reset);
        let text = console.text();
        let mib: u32 = text.split(" and ").nth(1).and_then(|rest| rest.split(' ').next()?.parse().ok()).unwrap();
        assert!(mib <= memory_mib && mib > memory_mib * 3 / 5, "{memory_mib}: {text}");
    }
}

#[test]
fn a_kernel_with_only_a_pvh_entry_boots() {
    let Some(pieces) = pieces() else { return };
    let copy = tempfile::NamedTempFile::new().unwrap();
    std::fs::copy(&pieces.kernel, copy.path()).unwrap();
    // The field e_entry of the ELF header.
    copy.as_file().write_all_at(&[0; 8], 24).unwrap();
    let (machine, console) = boot(Config { kernel: copy.path().to_owned(), vcpus: 2, ..config(&pieces, &["do=tour"]) });
    assert_eq!(end_of(&machine, &console), Exit::Reset);
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
    let Some(pieces) = pieces() else { return };
    let Some(kernel) = bzimage() else {
        eprintln!("skipped: no bzImage: neither NACELLE_BZIMAGE nor a test node's kernel in the cache");
        return;
    };
    // A distribution's kernel may ignore the table of CPUs.
    let config = config(&pieces, &["do=memory"]);
    let (machine, console) = boot(Config { kernel, memory_mib: 512, ..config });
    assert_eq!(end_of(&machine, &console), Exit::Reset, "{}", console.text());
    assert!(console.text().contains("memory good"), "{}", console.text());
}

#[test]
fn a_saved_machine_goes_on_where_it_stood() {
    let Some(pieces) = pieces() else { return };
    for vcpus in [1, 2, 4] {
        let (machine, console) = boot(Config { vcpus, ..config(&pieces, &["do=count"]) });
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
            let console = Console::default();
            let mut builder = saved.builder().unwrap();
            builder.serial(console.sink()).unwrap();
            let machine = builder.restore(saved.state()).unwrap();
            assert_eq!(machine.wait(Duration::from_millis(50)), None);
            assert_eq!(console.length(), 0, "it stands still until it is resumed");
            machine.resume().unwrap();
            console.expect(&format!("count {} at", last + 20), 0);
            let (later, then) = last_count(&console.text());
            assert!(later >= last + 19 && then > at && then < at + 60_000, "{last} at {at}: {}", console.text());
            assert_eq!(machine.kill().unwrap(), Exit::Killed);
        }
    }
}

#[test]
fn restored_machines_draw_random_numbers_of_their_own() {
    let Some(pieces) = pieces() else { return };
    let (machine, console) = boot(config(&pieces, &["do=draw"]));
    console.expect("draw ", 0);
    assert!(console.text().contains("generation id: watched"), "an old kernel? {}", console.text());
    machine.pause().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join("saved");
    snapshot::save(&machine, &place).unwrap();
    // The saved VM continues; two others start from the saved state.
    let said = console.length();
    machine.resume().unwrap();
    let mut drawn = vec![draws(&console, said)];
    drop(machine);
    for _ in 0..2 {
        let saved = snapshot::open(&place).unwrap();
        let console = Console::default();
        let mut builder = saved.builder().unwrap();
        builder.serial(console.sink()).unwrap();
        let machine = builder.restore(saved.state()).unwrap();
        machine.resume().unwrap();
        drawn.push(draws(&console, 0));
    }
    let mut all: Vec<_> = drawn.concat();
    let count = all.len();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), count, "drawn twice: {drawn:?}");
}

/// Returns the first numbers that a drawing guest prints, behind the first `from` bytes and the line that they end in.
fn draws(console: &Console, from: usize) -> Vec<String> {
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
fn what_cannot_be_is_refused() {
    let _alone = alone();
    if TinyGuest::new().is_err() {
        eprintln!("skipped: no KVM");
        return;
    }
    let refused = |config: Config| Builder::new(config).and_then(Builder::start).err().expect("refused");
    for vcpus in [0, 65] {
        let error = refused(Config { vcpus, ..Config::default() });
        assert!(matches!(error, Error::Vcpus { .. }) && error.kind() == Kind::Invalid, "{error}");
    }
    let error = refused(Config { memory_mib: 1, ..Config::default() });
    assert!(matches!(error, Error::Memory { mib: 1, .. }) && error.kind() == Kind::Invalid, "{error}");
    let missing = refused(Config { kernel: "/does/not/exist".into(), ..Config::default() });
    assert_eq!(missing.kind(), Kind::NotFound, "{missing}");
    let nonsense = refused(Config { kernel: "/proc/self/exe".into(), ..Config::default() });
    assert_eq!(nonsense.kind(), Kind::Invalid, "{nonsense}");
    nothing_is_left();
}
