//! Tests all devices together under a real QEMU with a real guest kernel, in emulation. Skipped if QEMU, a kernel or a C
//! compiler is missing.

use nacelle_base::machine::{Extent, ImageDisk};
use nacelle_vmm::block::Slot;
use nacelle_vmm::rng::Rng;
use nacelle_vmm::vhost_user;
use nacelle_vmm::vsock::{Vsock, VsockError, VsockListener};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The timeout of every wait: an emulated guest on a busy node is slow.
const LIMIT: Duration = Duration::from_secs(180);

const MIB: usize = 1 << 20;

/// Returns the kernel of NACELLE_KERNEL, or the newest that `guest/build kernel` has left in the cache.
fn kernel() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("NACELLE_KERNEL") {
        return Some(path.into());
    }
    let cache = match std::env::var_os("NACELLE_CACHE") {
        Some(path) => PathBuf::from(path),
        None => PathBuf::from(std::env::var_os("HOME")?).join(".cache/nacelle"),
    };
    let built = std::fs::read_dir(cache.join("guest")).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let named = built.filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("kernel-")));
    let kernels = named.map(|path| path.join("vmlinux")).filter(|path| path.is_file());
    kernels.max_by_key(|path| std::fs::metadata(path).and_then(|meta| meta.modified()).ok())
}

fn has(program: &str) -> bool {
    let tried = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    tried.is_ok_and(|status| status.success())
}

/// Returns an archive (cpio, newc) with `/init`, and with /dev/console for its output.
fn initramfs(init: &[u8]) -> Vec<u8> {
    let mut archive = Vec::new();
    let mut add = |name: &str, mode: u32, device: (u32, u32), body: &[u8]| {
        let fields = [1, mode, 0, 0, 1, 0, body.len() as u32, 0, 0, device.0, device.1, name.len() as u32 + 1, 0];
        archive.extend(b"070701");
        fields.iter().for_each(|field| archive.extend(format!("{field:08x}").bytes()));
        archive.extend(name.bytes().chain([0]));
        archive.resize(archive.len().next_multiple_of(4), 0);
        archive.extend(body);
        archive.resize(archive.len().next_multiple_of(4), 0);
    };
    add("dev", 0o040755, (0, 0), &[]);
    add("dev/console", 0o020600, (5, 1), &[]);
    add("init", 0o100755, (0, 0), init);
    add("TRAILER!!!", 0, (0, 0), &[]);
    archive
}

fn sum(bytes: &[u8]) -> String {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    format!("{:016x}", bytes.iter().fold(0xcbf2_9ce4_8422_2325, step))
}

/// A QEMU process that ends with the test.
struct Qemu {
    child: Child,
    console: PathBuf,
}

impl Qemu {
    fn start(dir: &Path, kernel: &Path, devices: &[(&str, &str)]) -> Qemu {
        let console = dir.join("console");
        let mut command = Command::new("qemu-system-x86_64");
        command
            .args(["-M", "microvm,acpi=off,accel=tcg,pit=on,pic=on,rtc=on,isa-serial=on,memory-backend=mem"])
            .args(["-object", "memory-backend-memfd,id=mem,size=128M,share=on", "-cpu", "max", "-m", "128M"])
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
            .args(["-global", "virtio-mmio.force-legacy=off"])
            .args(["-append", "console=ttyS0 quiet panic=-1", "-kernel"])
            .arg(kernel)
            .arg("-initrd")
            .arg(dir.join("initramfs"))
            .arg("-serial")
            .arg(format!("file:{}", console.display()));
        for (name, device) in devices {
            let path = dir.join(format!("{name}.sock"));
            command.args(["-chardev", &format!("socket,id={name},path={}", path.display())]);
            command.args(["-device", &format!("{device},chardev={name}")]);
        }
        let log = std::fs::File::create(dir.join("qemu.log")).unwrap();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap();
        Qemu { child, console }
    }

    /// Accepts the first connection of the guest.
    fn first(&mut self, listener: &VsockListener) -> UnixStream {
        let start = Instant::now();
        loop {
            match listener.accept(Duration::from_millis(100)) {
                Ok(stream) => return stream,
                Err(VsockError::Timeout { .. }) => {}
                Err(error) => panic!("{error}"),
            }
            assert!(self.child.try_wait().unwrap().is_none(), "the machine has ended");
            assert!(start.elapsed() < LIMIT, "the guest does not connect");
        }
    }

    fn wait(&mut self) {
        let start = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            assert!(start.elapsed() < LIMIT, "the machine does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        // Fails if QEMU has already exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let console = std::fs::read(&self.console).unwrap_or_default();
            let log = std::fs::read(self.console.with_file_name("qemu.log")).unwrap_or_default();
            eprintln!("qemu:\n{}console:\n{}", String::from_utf8_lossy(&log), String::from_utf8_lossy(&console));
        }
    }
}

/// Sets a flag when dropped, also when the test fails.
struct OnDrop<'f>(&'f AtomicBool);

impl Drop for OnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// The connection to the guest's init.
struct GuestInit(BufReader<UnixStream>);

impl GuestInit {
    fn query(&mut self, command: &str) -> String {
        self.0.get_mut().write_all(format!("{command}\n").as_bytes()).unwrap();
        let mut answer = String::new();
        self.0.read_line(&mut answer).unwrap();
        assert!(answer.ends_with('\n'), "{command}: the guest is gone");
        answer.trim_end().to_owned()
    }

    /// Waits until the guest has the new size of a disk.
    fn wait_size(&mut self, serial: &str, bytes: usize) {
        let (start, sectors) = (Instant::now(), (bytes / 512).to_string());
        loop {
            let size = self.query(&format!("size {serial}"));
            if size == sectors {
                return;
            }
            assert!(start.elapsed() < LIMIT, "{serial} has {size} sectors, not {sectors}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn a_linux_guest_uses_every_device() {
    let Some(kernel) = kernel() else {
        return println!("skipped: no guest kernel (guest/build kernel makes one)");
    };
    if let Some(missing) = ["qemu-system-x86_64", "gcc"].into_iter().find(|program| !has(program)) {
        return println!("skipped: no {missing}");
    }
    let dir = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/qemu_guest/init.c");
    let init = dir.path().join("init");
    let compiled = Command::new("gcc").args(["-O1", "-static", "-o"]).args([&init, &source]).status().unwrap();
    assert!(compiled.success());
    std::fs::write(dir.path().join("initramfs"), initramfs(&std::fs::read(&init).unwrap())).unwrap();

    let scratch_path = dir.path().join("scratch");
    std::fs::write(&scratch_path, []).unwrap();
    let images = Slot::read_only("images").unwrap();
    let scratch = Slot::read_write("scratch", &scratch_path, 8 * MIB as u64).unwrap();
    let early = Slot::read_only("early").unwrap();
    let vsock = Vsock::new(3).unwrap();
    let listener = vsock.listen(1024).unwrap();
    let devices = [
        ("images", images.device()),
        ("scratch", scratch.device()),
        ("early", early.device()),
        ("vsock", vsock.device()),
        ("rng", Rng::new().device()),
    ];
    let servers = devices.map(|(name, device)| {
        let listener = UnixListener::bind(dir.path().join(format!("{name}.sock"))).unwrap();
        vhost_user::serve(device, listener).unwrap()
    });
    let mut qemu = Qemu::start(
        dir.path(),
        &kernel,
        &[
            ("images", "vhost-user-blk"),
            ("scratch", "vhost-user-blk"),
            ("early", "vhost-user-blk"),
            ("vsock", "vhost-user-vsock-device"),
            ("rng", "vhost-user-rng"),
        ],
    );
    let content: Vec<u8> = (0..3 * MIB).map(|at| (at * 7 + at / 509) as u8).collect();
    let blob = dir.path().join("blob");
    std::fs::write(&blob, &content).unwrap();
    // One disk grows continuously while QEMU starts and the guest boots. The guest must end up with its final size.
    let (up, growing) = (AtomicBool::new(false), Extent { path: blob.clone(), offset: 0, length: 512 });
    let (stream, grown) = std::thread::scope(|scope| {
        let grower = scope.spawn(|| {
            let mut places = 0;
            while !up.load(Ordering::Acquire) || places == 0 {
                early.place((places * MIB) as u64, &ImageDisk { extents: vec![growing.clone()] }).unwrap();
                places += 1;
                std::thread::sleep(Duration::from_millis(5));
            }
            places * MIB
        });
        let over = OnDrop(&up);
        let stream = qemu.first(&listener);
        drop(over);
        (stream, grower.join().unwrap())
    });
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let mut guest = GuestInit(BufReader::new(stream));
    guest.wait_size("early", grown);
    assert_eq!(guest.query(&format!("sum early {} 512", grown - MIB)), sum(&content[..512]));

    // A disk that is empty at first and grows.
    assert_eq!(guest.query("size images"), "0");
    let half = |offset: usize| Extent { path: blob.clone(), offset: offset as u64, length: 3 * MIB as u64 / 2 };
    images.place(MIB as u64, &ImageDisk { extents: vec![half(3 * MIB / 2), half(0)] }).unwrap();
    guest.wait_size("images", 4 * MIB);
    let swapped = [&content[3 * MIB / 2..], &content[..3 * MIB / 2]].concat();
    assert_eq!(guest.query(&format!("sum images {MIB} {}", 3 * MIB)), sum(&swapped));
    assert_eq!(guest.query(&format!("sum images 0 {MIB}")), sum(&vec![0; MIB]));
    assert_eq!(guest.query(&format!("part images {MIB} {} 1", 3 * MIB)), "added");
    assert_eq!(guest.query(&format!("sum images 0 {} 1", 3 * MIB)), sum(&swapped));
    assert!(guest.query(&format!("fill images 0 {MIB} 1")).starts_with("failed"), "it is read-only");
    images.place(8 * MIB as u64, &ImageDisk { extents: vec![half(0)] }).unwrap();
    guest.wait_size("images", 10 * MIB);
    assert_eq!(guest.query(&format!("sum images {} 512", 8 * MIB)), sum(&content[..512]));

    // A writable disk.
    assert_eq!(guest.query("size scratch"), (8 * MIB / 512).to_string());
    assert_eq!(guest.query(&format!("fill scratch {MIB} {} 77", 4 * MIB)), "filled");
    let file = std::fs::File::open(&scratch_path).unwrap();
    let mut written = vec![0; 4 * MIB];
    file.read_exact_at(&mut written, MIB as u64).unwrap();
    assert!(written.iter().all(|byte| *byte == 77));
    let before = file.metadata().unwrap().blocks();
    assert_eq!(guest.query(&format!("discard scratch {MIB} {}", 2 * MIB)), "done");
    assert!(file.metadata().unwrap().blocks() < before);
    assert_eq!(guest.query(&format!("zero scratch {} {MIB}", 3 * MIB)), "done");
    file.read_exact_at(&mut written, MIB as u64).unwrap();
    assert!(written[..3 * MIB].iter().all(|byte| *byte == 0) && written[3 * MIB..].iter().all(|byte| *byte == 77));
    scratch.resize(16 * MIB as u64).unwrap();
    guest.wait_size("scratch", 16 * MIB);

    // Entropy.
    let (one, two) = (guest.query("random"), guest.query("random"));
    assert!(one.len() == 32 && two.len() == 32 && one != two, "{one} {two}");

    // Connections into the guest: 2 MiB through an echo and back, with both ends of data passed on.
    let mut echo = vsock.connect(5000, LIMIT).unwrap();
    echo.set_read_timeout(Some(LIMIT)).unwrap();
    let mut writer = echo.try_clone().unwrap();
    let sent = swapped[..2 * MIB].to_vec();
    let sender = std::thread::spawn(move || {
        writer.write_all(&sent).unwrap();
        writer.shutdown(Shutdown::Write).unwrap();
    });
    let mut back = Vec::new();
    echo.read_to_end(&mut back).unwrap();
    sender.join().unwrap();
    assert!(back == swapped[..2 * MIB]);
    assert!(matches!(vsock.connect(5001, LIMIT), Err(VsockError::Refused { port: 5001 })));
    for _ in 0..20 {
        let mut one = vsock.connect(5000, LIMIT).unwrap();
        one.set_read_timeout(Some(LIMIT)).unwrap();
        one.write_all(b"ping").unwrap();
        let mut pong = [0; 4];
        one.read_exact(&mut pong).unwrap();
        assert_eq!(&pong, b"ping");
    }

    // The end: init reboots when its commands end, and QEMU exits.
    guest.0.get_mut().shutdown(Shutdown::Write).unwrap();
    qemu.wait();
    let mut rest = String::new();
    guest.0.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "");
    servers.into_iter().for_each(vhost_user::VhostUserServer::stop);
}
