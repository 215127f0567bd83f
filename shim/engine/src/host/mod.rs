//! Owns: the engine that has no guest: the agent itself, in namespaces of the node, is the machine. It shares the node's
//! kernel: what a VM keeps apart is kept apart by namespaces, control groups, capabilities and filters only.
//! May use: `process`, `console`, `ended`. Knows no pod.
//! Threads: per machine the warden (`process`).

mod spawn;

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nacelle_base::{Chain, files};

use crate::console::Console;
use crate::machine::{BOOT_PORT, Engine, GuestLink, Incoming, Machine, MachineExit, MachineStatus, Stop};
use crate::process::{Process, Warden};
use crate::{CheckedSpec, EngineError, EngineKind, Limits, LinkError, Slot, ended};

/// The agent's ports that have a socket in the machine's folder, and its name.
const SOCKETS: [(u32, &str); 2] = [(1025, "agent.sock"), (1026, "agent-streams.sock")];

/// What an agent without a guest is started with.
#[derive(Clone, Debug)]
pub struct HostSpec<'a> {
    /// Its program, absolute.
    pub program: &'a Path,
    /// A folder of mode 0700 that exists and belongs to this machine: sockets.
    pub run_dir: &'a Path,
    /// A folder of the node for what containers write; it is there.
    pub scratch: &'a Path,
    /// The file of its network namespace; none: the node's.
    pub netns: Option<&'a Path>,
    /// Its PID namespace is the node's. Its containers' processes then outlive it if it is killed: they are to be killed
    /// by their control group.
    pub node_pid: bool,
    /// Its IPC namespace is the node's.
    pub node_ipc: bool,
}

/// The engine of one machine: its agent runs already, and waits for the first word. So it can be made while the process
/// still has the rights that it takes, and started after they were given up.
pub struct Host {
    pid: u32,
    waiting: Mutex<Option<Waiting>>,
}

struct Waiting {
    child: Option<Child>,
    boot: Option<UnixStream>,
    sockets: Sockets,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take()
            && let Err(error) = child.kill().and_then(|()| child.wait())
        {
            tracing::error!(%error, "an agent is left behind");
        }
    }
}

/// The sockets in the machine's folder; they go with this.
struct Sockets(PathBuf);

impl Sockets {
    fn path(&self, port: u32) -> Option<PathBuf> {
        SOCKETS.iter().find(|(known, _)| *known == port).map(|(_, name)| self.0.join(name))
    }

    fn listen(&self, (_, name): (u32, &str)) -> Result<UnixListener, EngineError> {
        let path = self.0.join(name);
        UnixListener::bind(&path).map_err(|source| EngineError::File { what: "listen on", path, source })
    }
}

impl Drop for Sockets {
    fn drop(&mut self) {
        for (_, name) in SOCKETS {
            if let Err(error) = files::remove_if_there(&self.0.join(name)) {
                tracing::warn!("{}", Chain(&error));
            }
        }
    }
}

impl Host {
    /// Starts the agent. To be called by the process's first thread, while it is the only one: the agent ends with it.
    /// It inherits the control group, which is the root of those that it makes: nobody may be in it when it is told to
    /// go on.
    pub fn new(spec: &HostSpec) -> Result<Host, EngineError> {
        let (boot, theirs) =
            UnixStream::pair().map_err(|source| EngineError::Resources { what: "the agent's socket", source })?;
        let sockets = Sockets(spec.run_dir.to_owned());
        let [rpc, streams] = SOCKETS;
        let (rpc, streams) = (sockets.listen(rpc)?, sockets.listen(streams)?);
        let inherited = [theirs.as_raw_fd(), rpc.as_raw_fd(), streams.as_raw_fd()];
        let mut command = Command::new(spec.program);
        command.arg("--host").args([spec.run_dir, spec.scratch]).args(inherited.map(|fd| fd.to_string()));
        let shared = [("network", spec.netns.is_none()), ("pid", spec.node_pid), ("ipc", spec.node_ipc)];
        command.args(shared.iter().filter(|(_, shared)| *shared).map(|(word, _)| word));
        command.env_clear().current_dir("/").process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = spawn::spawn(command, spec.netns, !spec.node_pid, inherited);
        let child = child.map_err(|source| EngineError::Spawn { program: spec.program.to_owned(), source })?;
        let pid = child.id();
        Ok(Host { pid, waiting: Mutex::new(Some(Waiting { child: Some(child), boot: Some(boot), sockets })) })
    }

    /// The agent's process, a child of this one.
    pub fn pid(&self) -> u32 {
        self.pid
    }
}

impl Engine for Host {
    fn kind(&self) -> EngineKind {
        EngineKind::Host
    }

    /// There are no devices, and a processor is the node's.
    fn limits(&self) -> Limits {
        Limits { vcpus: crate::spec::MAX_VCPUS, devices: 0 }
    }

    /// Of the spec only the console's file counts. It can be started once.
    fn start(&self, spec: CheckedSpec) -> Result<Box<dyn Machine>, EngineError> {
        let log = spec.into_inner().console_log;
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut waiting = waiting.ok_or(EngineError::Ended { what: "start" })?;
        let console = Console::open(&log).map_err(|source| EngineError::File { what: "open", path: log, source })?;
        let child = waiting.child.take().ok_or(EngineError::Ended { what: "start" })?;
        let (process, warden) = Process::adopt(child, console, || ())?;
        let link = Arc::new(Link { boot: Mutex::new(waiting.boot.take()), process: Arc::clone(&process), waiting });
        Ok(Box::new(HostMachine { process, warden: Some(warden), link }))
    }
}

/// The agent's sockets.
struct Link {
    boot: Mutex<Option<UnixStream>>,
    process: Arc<Process>,
    waiting: Waiting,
}

impl GuestLink for Link {
    fn connect(&self, port: u32, _timeout: Duration) -> Result<UnixStream, LinkError> {
        let living = || match self.process.ended.get() {
            Some(_) => Err(LinkError::Stopped),
            None => Ok(()),
        };
        living()?;
        let refused = LinkError::Refused { port };
        let Some(path) = self.waiting.sockets.path(port) else { return Err(refused) };
        match UnixStream::connect(path) {
            Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound) => {
                living()?;
                Err(refused)
            }
            other => other.map_err(|source| LinkError::Resources { source }),
        }
    }

    /// There is nothing but the one connection that the agent was started with.
    fn listen(&self, port: u32) -> Result<Box<dyn Incoming>, LinkError> {
        let boot = self.boot.lock().unwrap_or_else(PoisonError::into_inner).take();
        match boot.filter(|_| port == BOOT_PORT) {
            Some(boot) => Ok(Box::new(Boot(Mutex::new(Some(boot))))),
            None => Err(LinkError::PortInUse { port }),
        }
    }
}

struct Boot(Mutex<Option<UnixStream>>);

impl Incoming for Boot {
    fn accept(&self, _timeout: Duration) -> Result<UnixStream, LinkError> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take().ok_or(LinkError::Stopped)
    }
}

struct HostMachine {
    process: Arc<Process>,
    warden: Option<Warden>,
    link: Arc<Link>,
}

impl Machine for HostMachine {
    fn status(&self) -> MachineStatus {
        self.process.ended.status(false)
    }

    fn wait(&self, timeout: Duration) -> Option<MachineExit> {
        self.process.ended.wait(timeout)
    }

    fn stop(&self, how: Stop) -> Result<MachineExit, EngineError> {
        self.process.ended.stop(how, self.process.pid(), || {
            self.process.kill();
            Ok(())
        })
    }

    fn link(&self) -> Arc<dyn GuestLink> {
        Arc::<Link>::clone(&self.link)
    }

    fn disks(&self) -> &[Slot] {
        &[]
    }
}

impl Drop for HostMachine {
    fn drop(&mut self) {
        ended::dropped(self.stop(Stop::Kill), self.warden.take());
    }
}
