//! Owns: whole machines, booted with a real kernel. Skipped where KVM does not run guest kernels on the processor, or
//! where there is no kernel, or neither a C compiler nor what one has left in the cache.

use nacelle_vmm::machine::tiny::TinyGuest;
use nacelle_vmm::machine::{Backing, Builder, Config, Exit, Machine};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// How long a test waits for anything.
const LIMIT: Duration = Duration::from_secs(120);

/// What a machine needs that is the same for all of them.
struct Pieces {
    kernel: PathBuf,
    initrd: PathBuf,
}

/// `None`, and says why, where machines cannot run.
fn pieces() -> Option<Pieces> {
    let found = (|| {
        let cache = cache()?;
        let kernel = kernel(&cache)?;
        // Even if no machine runs here: one in a test node, which has no compiler, sees this cache.
        let initrd = initrd(&cache)?;
        let mut best = Duration::MAX;
        let mut tiny = TinyGuest::new().map_err(|error| error.to_string())?;
        for _ in 0..5 {
            best = best.min(tiny.run().map_err(|error| error.to_string())?);
        }
        match best < Duration::from_millis(15) {
            true => Ok(Pieces { kernel, initrd }),
            false => Err(format!("KVM interprets guest kernels (probe: {best:?})")),
        }
    })();
    found.inspect_err(|why: &String| eprintln!("skipped: {why}")).ok()
}

fn cache() -> Result<PathBuf, String> {
    match (std::env::var_os("NACELLE_CACHE"), std::env::var_os("HOME")) {
        (Some(cache), _) => Ok(PathBuf::from(cache).join("guest")),
        (None, Some(home)) => Ok(PathBuf::from(home).join(".cache/nacelle/guest")),
        (None, None) => Err("no cache: neither NACELLE_CACHE nor HOME is set".to_owned()),
    }
}

/// NACELLE_KERNEL, or the newest that `guest/build kernel` has left in the cache.
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

/// An initramfs with `machine_guest/init.c` as its init, made once.
fn initrd(cache: &Path) -> Result<PathBuf, String> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let source = include_bytes!("machine_guest/init.c");
    let sum = source.iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3));
    let path = cache.join(format!("machine-test-{sum:016x}.cpio"));
    if path.is_file() {
        return Ok(path);
    }
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

/// What a guest has written to its console so far.
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

    /// Waits until the console has said `text`, beyond its first `from` bytes.
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

#[test]
fn a_kernel_boots_and_resets() {
    let Some(pieces) = pieces() else { return };
    let begin = Instant::now();
    let (machine, console) = boot(config(&pieces, &["do=memory"]));
    console.expect("up after", 0);
    eprintln!("{:?}: {}", begin.elapsed(), console.text());
    let exit = machine.wait(LIMIT);
    assert_eq!(exit, Some(Exit::Reset), "{}", console.text());
    assert_eq!(machine.wait(Duration::ZERO), exit, "always the same answer");
    assert_eq!(machine.kill().unwrap(), Exit::Reset, "killed after its end");
    assert!(console.text().contains("memory good"), "{}", console.text());
}
