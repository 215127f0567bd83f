//! Provides what the tests of the VM engines share: the kernel, the guest, a tap, huge pages, a console, a process that is killed.

mod death;
mod huge;
mod tap;
mod virtio_console;

pub use death::kill_process_with_a_vm;
pub use huge::a_vm_allocates_and_releases_huge_pages;
pub use virtio_console::a_virtio_console_logs_all_messages_in_order;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nacelle_engine::NicSpec;
use nacelle_engine::contract::{TestVm, TestedEngine, fnv1a, lock_suite};

/// A limit that nothing reaches even on a slow and busy node.
pub const LONG: Duration = Duration::from_secs(120);

/// Returns the guest's kernel: `NACELLE_KERNEL`, or the newest result of `guest/build kernel`.
pub fn kernel() -> Result<PathBuf, String> {
    let missing = "no guest kernel (NACELLE_KERNEL, guest/build kernel)";
    find_kernel().filter(|path| path.exists()).ok_or(missing.into())
}

fn find_kernel() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("NACELLE_KERNEL") {
        return Some(path.into());
    }
    let cache = match std::env::var_os("NACELLE_CACHE") {
        Some(cache) => PathBuf::from(cache),
        None => PathBuf::from(std::env::var_os("HOME")?).join(".cache/nacelle"),
    };
    let kernels = fs::read_dir(cache.join("guest")).ok()?.filter_map(|entry| {
        let path = entry.ok()?.path().join("vmlinux");
        Some((fs::metadata(&path).ok()?.modified().ok()?, path))
    });
    kernels.max().map(|(_, path)| path)
}

fn output(command: &mut Command) -> Result<Vec<u8>, String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    match output.status.success() {
        true => Ok(output.stdout),
        false => Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr))),
    }
}

/// Returns the guest of the suite. It is built once for each version of its sources and kept in the target directory, so
/// that a node without a compiler can use it.
pub fn initrd() -> Result<PathBuf, String> {
    static INITRD: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let build = || {
        let text = |error: std::io::Error| error.to_string();
        let key =
            [include_bytes!("../guest/init.c").as_slice(), include_bytes!("../../../../guest/mkinitramfs")].concat();
        let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("contract-{:016x}.cpio", fnv1a(&key)));
        if kept.exists() {
            return Ok(kept);
        }
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let (source, pack) = (here.join("tests/guest/init.c"), here.join("../../guest/mkinitramfs"));
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).map_err(text)?;
        let (init, initrd) = (directory.path().join("init"), directory.path().join("initrd"));
        output(Command::new("cc").args(["-static", "-O1", "-pthread", "-o"]).arg(&init).arg(source))?;
        fs::write(&initrd, output(Command::new(pack).arg(&init))?).map_err(text)?;
        fs::rename(initrd, &kept).map_err(text)?;
        Ok(kept)
    };
    INITRD.get_or_init(build).clone()
}

/// What the guest sends arrives at the tap, and the guest sees the specified MAC address and MTU. The tap has a queue for each vCPU.
pub fn the_guest_uses_the_tap(tested: Option<Box<impl TestedEngine + Send + 'static>>, vcpus: u8) {
    let _suite_lock = lock_suite();
    let Some(tested) = tested else { return };
    // The test has a thread of its own, because it leaves the network namespace of this process.
    let test = move || {
        let taps = match tap::tap_in_new_namespace("tap0", vcpus.into()) {
            Ok(taps) => taps,
            Err(why) => return println!("skipped: no tap: {why}"),
        };
        let mut taps = taps.into_iter();
        let (tap, more_queues) = (taps.next().expect("one for each"), taps.collect());
        let nic = NicSpec { tap, more_queues, dhcp: None, mac: [0x52, 0x54, 0, 0x12, 0x34, 0x56], mtu: 1400 };
        let vm = TestVm::start(&*tested, vec![], |spec| {
            spec.vcpus = vcpus;
            spec.nics.push(nic);
        });
        assert_eq!(vm.query("nic"), "52:54:00:12:34:56 mtu 1400 sent 60");
        let until = Instant::now() + LONG;
        while tap::frames_received("tap0") == 0 {
            assert!(Instant::now() < until, "the frame has not come out of the tap");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    std::thread::spawn(test).join().unwrap();
}
