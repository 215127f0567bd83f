//! Boots VMs for tests: an image with busybox, a scratch disk, the handshake, the agent's client.

pub mod snapshot;

use hyper_util::rt::TokioIo;
use nacelle_agent::frame;
use nacelle_base::machine::{Extent, ImageDisk};
use nacelle_engine::qemu::QemuEngine;
use nacelle_engine::{Accelerator, DiskSpec, Engine, GuestLink, Machine, MachineExit, MachineSpec, NicSpec};
use nacelle_proto::agent::agent_client::AgentClient;
use nacelle_proto::agent::{
    AgentHello, AttachImageRequest, BootConfig, BootReport, CreateContainerRequest, Exit, StreamOpen, WaitRequest,
};
use nacelle_proto::common::{ContainerRef, Stream};
use serde_json::{Value, json};
use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::sync::{Mutex, OwnedMutexGuard};
use tonic::transport::{Channel, Endpoint, Uri};

/// Longer than anything takes on a slow and busy machine.
pub const LIMIT: Duration = Duration::from_secs(120);
const MIB: u64 = 1 << 20;

/// A VM whose agent has reported itself ready.
pub struct Guest {
    pub machine: Box<dyn Machine>,
    pub link: Arc<dyn GuestLink>,
    pub agent: AgentClient<Channel>,
    pub hello: AgentHello,
    pub directory: TempDir,
    // Dropped last. One VM runs at a time: an emulated one fills a CPU. Clones of one VM share its turn.
    _turn: Option<OwnedMutexGuard<()>>,
}

/// A VM after the handshake, ready or not.
struct Raw {
    machine: Box<dyn Machine>,
    link: Arc<dyn GuestLink>,
    hello: AgentHello,
    directory: TempDir,
    turn: OwnedMutexGuard<()>,
}

/// Returns the guest image that a test needs, or why the test must be skipped.
pub fn needs() -> Result<(PathBuf, PathBuf), String> {
    let file = |name: &str| match std::env::var_os(name) {
        Some(path) => Ok(PathBuf::from(path)),
        None => Err(format!("{name} is not set (guest/build all prints it)")),
    };
    for program in ["qemu-system-x86_64", "mkfs.erofs", "mkfs.ext4", "busybox"] {
        let found = Command::new("sh").args(["-c", &format!("command -v {program}")]).output();
        if !found.is_ok_and(|output| output.status.success()) {
            return Err(format!("{program} is not installed"));
        }
    }
    Ok((file("NACELLE_KERNEL")?, file("NACELLE_INITRD")?))
}

fn run(program: &str, args: &[&str]) {
    let output = Command::new(program).args(args).output().expect("to run a program");
    assert!(output.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn path_of(program: &str) -> PathBuf {
    let output = Command::new("sh").args(["-c", &format!("command -v {program}")]).output().expect("a shell");
    fs::canonicalize(String::from_utf8_lossy(&output.stdout).trim()).expect("a program")
}

/// An image with busybox and the accounts that tests look up.
fn make_image(directory: &Path) {
    let root = directory.join("image");
    for name in ["bin", "etc", "proc", "dev", "sys", "tmp", "root"] {
        fs::create_dir_all(root.join(name)).expect("a directory");
    }
    fs::copy(path_of("busybox"), root.join("bin/busybox")).expect("busybox");
    fs::set_permissions(root.join("bin/busybox"), fs::Permissions::from_mode(0o755)).expect("a mode");
    let applets =
        "sh cat echo id sleep env ps kill head tail stty mknod mount true ls grep mkdir ip hostname stat dd wc uname";
    for applet in applets.split(' ') {
        symlink("busybox", root.join("bin").join(applet)).expect("a link");
    }
    fs::write(root.join("etc/passwd"), "root:x:0:0::/root:/bin/sh\nweb:x:101:102::/srv:/bin/sh\n").expect("accounts");
    fs::write(root.join("etc/group"), "root:x:0:\nweb:x:102:\nlog:x:4:web\n").expect("groups");
    // Distributions with a resolver of their own have such a link, to a file that does not exist.
    symlink("../run/resolver/stub.conf", root.join("etc/resolv.conf")).expect("a link");
    fs::write(root.join("bin/broken"), "neither a script nor a program").expect("a file");
    fs::set_permissions(root.join("bin/broken"), fs::Permissions::from_mode(0o755)).expect("a mode");
    let image = directory.join("image.erofs");
    run("mkfs.erofs", &["--quiet", "--all-root", &image.display().to_string(), &root.display().to_string()]);
}

impl Guest {
    /// Boots a VM and attaches the image as partition 1. Prints why and returns `None` if the test must be skipped.
    pub async fn boot(change: impl FnOnce(&mut BootConfig)) -> Option<Guest> {
        Guest::boot_with(Vec::new(), change).await
    }

    /// Boots a VM with network interfaces.
    pub async fn boot_with(nics: Vec<NicSpec>, change: impl FnOnce(&mut BootConfig)) -> Option<Guest> {
        let (guest, report) = Guest::shake_hands(nics, change).await?;
        assert_eq!(report.error, "", "{}", console(guest.directory.path()));
        let Raw { machine, link, hello, directory, turn } = guest;
        let mut agent = connect(Arc::clone(&link)).await;
        let length = place(&*machine, &directory.path().join("image.erofs"), 0);
        agent
            .attach_image(AttachImageRequest { partition: 1, offset: 0, length, files: vec![] })
            .await
            .expect("an image");
        Some(Guest { machine, link, agent, hello, directory, _turn: Some(turn) })
    }

    /// Boots a VM that reports a failure, and waits until it has ended.
    pub async fn fail(change: impl FnOnce(&mut BootConfig)) -> Option<(BootReport, MachineExit)> {
        let (guest, report) = Guest::shake_hands(Vec::new(), change).await?;
        let exit = guest.machine.wait(LIMIT);
        Some((report, exit.unwrap_or_else(|| panic!("no end; {}", console(guest.directory.path())))))
    }

    async fn shake_hands(nics: Vec<NicSpec>, change: impl FnOnce(&mut BootConfig)) -> Option<(Raw, BootReport)> {
        // ci/test runs these tests outside of nodes, in which the guest would be emulated twice.
        let is_in_node = std::env::var_os("NODE_ENDED").is_some();
        let files = match needs() {
            Ok(files) if !is_in_node => files,
            Ok(_) => {
                println!("skipped: QEMU is emulated in a node");
                return None;
            }
            Err(why) => {
                println!("skipped: {why}");
                return None;
            }
        };
        static TURN: LazyLock<Arc<Mutex<()>>> = LazyLock::new(Arc::default);
        let turn = Arc::clone(&TURN).lock_owned().await;
        let directory = tempfile::tempdir().expect("a directory");
        furnish(directory.path());
        let spec = spec(files, directory.path(), 1, nics);
        let engine = QemuEngine::new("qemu-system-x86_64", Accelerator::Tcg);
        let machine = engine.start(spec.check(&engine.limits()).expect("a good spec")).expect("a machine");
        let link = machine.link();
        let mut config = config();
        change(&mut config);
        let (hello, report) = handshake(&*link, &config, directory.path());
        Some((Raw { machine, link, hello, directory, turn }, report))
    }

    /// A configured VM in a furnished directory. With `attach`, places the image and attaches it as partition 1.
    pub async fn of(machine: Box<dyn Machine>, directory: TempDir, hello: AgentHello, attach: bool) -> Guest {
        let link = machine.link();
        let mut agent = connect(Arc::clone(&link)).await;
        if attach {
            let length = place(&*machine, &directory.path().join("image.erofs"), 0);
            agent
                .attach_image(AttachImageRequest { partition: 1, offset: 0, length, files: vec![] })
                .await
                .expect("an image");
        }
        Guest { machine, link, agent, hello, directory, _turn: None }
    }

    /// Creates a container that runs a shell script. `change` may change its specification.
    pub async fn create(
        &mut self,
        id: &str,
        script: &str,
        change: impl FnOnce(&mut Value, &mut CreateContainerRequest),
    ) {
        let (mut spec, mut request) = container(id, script);
        change(&mut spec, &mut request);
        request.oci_spec = spec.to_string().into_bytes();
        let made = self.agent.create_container(request).await;
        made.unwrap_or_else(|error| panic!("{error}; {}", console(self.directory.path())));
    }

    /// Creates and starts a container, and returns all its output and its exit.
    pub async fn run(
        &mut self,
        id: &str,
        script: &str,
        change: impl FnOnce(&mut Value, &mut CreateContainerRequest),
    ) -> (String, Exit) {
        self.create(id, script, change).await;
        self.start(id).await;
        let output = self.output(id, "", Stream::Stdout).await;
        (output, self.end(id, "").await)
    }

    pub async fn start(&mut self, id: &str) {
        self.agent.start_container(ContainerRef { id: id.into() }).await.expect("to start");
    }

    /// Waits until a process has ended.
    pub async fn end(&mut self, id: &str, exec_id: &str) -> Exit {
        let deadline = Instant::now() + LIMIT;
        loop {
            let request = WaitRequest { id: id.into(), exec_id: exec_id.into(), timeout_ms: 10_000 };
            if let Some(exit) = self.agent.wait(request).await.expect("to wait").into_inner().exit {
                return exit;
            }
            assert!(Instant::now() < deadline, "{id} {exec_id} does not end");
        }
    }

    /// Connects to a stream of a process.
    pub fn stream(&self, id: &str, exec_id: &str, stream: Stream) -> UnixStream {
        let mut connection = self.link.connect(1026, LIMIT).expect("a stream");
        connection.set_read_timeout(Some(LIMIT)).expect("a limit");
        let stream = stream.into();
        let open = StreamOpen { id: id.into(), exec_id: exec_id.into(), stream, ..Default::default() };
        frame::write(&mut connection, &open).expect("a preamble");
        connection
    }

    /// Reads a stream to its end.
    pub async fn output(&self, id: &str, exec_id: &str, stream: Stream) -> String {
        let mut connection = self.stream(id, exec_id, stream);
        let read = tokio::task::spawn_blocking(move || {
            let mut text = Vec::new();
            connection.read_to_end(&mut text).map(|_| String::from_utf8_lossy(&text).into_owned())
        });
        read.await.expect("a thread").expect("to read to the end")
    }

    /// Writes a text to a stdin and closes it.
    pub fn input(&self, id: &str, exec_id: &str, text: &str) {
        let mut connection = self.stream(id, exec_id, Stream::Stdin);
        connection.write_all(text.as_bytes()).expect("to write");
        connection.shutdown(Shutdown::Write).expect("to close");
    }

    /// Reads a stream until it contains `said`.
    pub fn read_until(&self, connection: &mut UnixStream, said: &str) -> String {
        let mut text = Vec::new();
        let mut byte = [0];
        while !String::from_utf8_lossy(&text).contains(said) {
            let read = connection.read(&mut byte).expect("to read");
            assert_eq!(read, 1, "the end before {said:?}: {:?}", String::from_utf8_lossy(&text));
            text.push(byte[0]);
        }
        String::from_utf8_lossy(&text).into_owned()
    }
}

/// Makes the disks of a VM in its directory.
pub fn furnish(directory: &Path) {
    let scratch = directory.join("scratch");
    fs::File::create(&scratch).and_then(|file| file.set_len(256 * MIB)).expect("a scratch disk");
    run("mkfs.ext4", &["-q", "-F", "-O", "^has_journal", &scratch.display().to_string()]);
    make_image(directory);
}

/// Returns the specification of a VM in a furnished directory.
pub fn spec((kernel, initrd): (PathBuf, PathBuf), directory: &Path, vcpus: u8, nics: Vec<NicSpec>) -> MachineSpec {
    MachineSpec {
        vcpus,
        topology: None,
        cpu_model: None,
        memory_mib: 256,
        hotplug_mib: 0,
        memory_pages: Default::default(),
        console: Default::default(),
        kernel,
        initrd,
        cmdline: Vec::new(),
        disks: vec![
            DiskSpec::Images { serial: "images".into() },
            DiskSpec::File { path: directory.join("scratch"), read_only: false, serial: "scratch".into() },
        ],
        nics,
        run_dir: directory.to_owned(),
        console_log: directory.join("console.log"),
        guest_cid: 3,
        shares: Vec::new(),
    }
}

/// Returns the usual configuration of a guest.
pub fn config() -> BootConfig {
    BootConfig {
        hostname: "pod".into(),
        time_unix_nanos: 1_900_000_000_000_000_000,
        entropy: vec![7; 32],
        scratch_disk: 1,
        ..BootConfig::default()
    }
}

/// Returns the text of the console, for messages.
pub fn console(directory: &Path) -> String {
    fs::read_to_string(directory.join("console.log")).unwrap_or_default()
}

/// Places an image file on the image disk and returns its length in whole pages.
pub fn place(machine: &dyn Machine, image: &Path, at: u64) -> u64 {
    let length = fs::metadata(image).expect("an image").len().next_multiple_of(4096);
    fs::OpenOptions::new().write(true).open(image).and_then(|file| file.set_len(length)).expect("whole pages");
    let extents = vec![Extent { path: image.to_owned(), offset: 0, length }];
    machine.disks()[0].place(at, &ImageDisk { extents }).expect("to place an image");
    length
}

/// Does the host's side of the handshake, after a first connection that is closed in the middle of it.
pub fn handshake(link: &dyn GuestLink, config: &BootConfig, directory: &Path) -> (AgentHello, BootReport) {
    let incoming = link.listen(1024).expect("a port");
    let deadline = Instant::now() + LIMIT;
    let greeted = || loop {
        let guest = incoming.accept(LIMIT);
        let mut host = guest.unwrap_or_else(|error| panic!("no guest: {error}; {}", console(directory)));
        host.set_read_timeout(Some(LIMIT)).expect("a limit");
        match frame::read::<AgentHello>(&mut host) {
            Ok(hello) => return (host, hello),
            // On a busy node the guest gives a connection up before it is accepted, and connects again.
            Err(error) if error.is_hung_up() && Instant::now() < deadline => println!("a connection was given up"),
            Err(error) => panic!("no hello: {error}; {}", console(directory)),
        }
    };
    let (gone, first) = greeted();
    drop(gone);
    let (mut host, hello) = greeted();
    assert_eq!(first.kernel_release, hello.kernel_release);
    assert!(first.sent_nanos < hello.sent_nanos, "a hello of its own: {first:?} {hello:?}");
    frame::write(&mut host, config).expect("to answer");
    (hello, frame::read(&mut host).expect("a report"))
}

async fn connect(link: Arc<dyn GuestLink>) -> AgentClient<Channel> {
    let connector = tower::service_fn(move |_: Uri| {
        let link = Arc::clone(&link);
        async move {
            let stream = tokio::task::spawn_blocking(move || link.connect(1025, LIMIT)).await?;
            let stream = stream.map_err(std::io::Error::other)?;
            stream.set_nonblocking(true)?;
            Ok::<_, std::io::Error>(TokioIo::new(tokio::net::UnixStream::from_std(stream)?))
        }
    });
    let endpoint = Endpoint::from_static("http://agent").timeout(LIMIT);
    AgentClient::new(endpoint.connect_with_connector(connector).await.expect("the agent"))
}

/// Returns the specification of an ordinary container, as the daemon writes it.
pub fn container(id: &str, script: &str) -> (Value, CreateContainerRequest) {
    let capabilities =
        json!(["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_KILL", "CAP_MKNOD", "CAP_SETGID", "CAP_SETUID"]);
    let spec = json!({
        "ociVersion": "1.2.0",
        "process": {
            "args": ["/bin/sh", "-c", script], "cwd": "/", "env": ["PATH=/bin"], "user": { "uid": 0, "gid": 0 },
            "capabilities": { "bounding": capabilities, "effective": capabilities, "permitted": capabilities }
        },
        "root": { "path": "rootfs" },
        "mounts": [
            { "destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"] },
            { "destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755", "size=65536k"] },
            { "destination": "/dev/pts", "type": "devpts", "source": "devpts", "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"] },
            { "destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["nosuid", "noexec", "nodev", "mode=1777"] },
            { "destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue", "options": ["nosuid", "noexec", "nodev"] },
            { "destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"] },
            { "destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["nosuid", "noexec", "nodev", "relatime", "ro"] }
        ],
        "linux": {
            "namespaces": [{ "type": "pid" }, { "type": "ipc" }, { "type": "uts" }, { "type": "mount" }, { "type": "network" }, { "type": "cgroup" }],
            "resources": { "devices": [{ "allow": false, "access": "rwm" }] },
            "maskedPaths": ["/proc/kcore", "/proc/keys", "/sys/firmware"],
            "readonlyPaths": ["/proc/sys", "/proc/irq", "/proc/bus"]
        }
    });
    (spec, CreateContainerRequest { id: id.into(), partition: 1, ..CreateContainerRequest::default() })
}
