//! Implements a machine that is a process of this node which speaks the agent's protocol (agent.proto) over sockets that it
//! inherits. Each machine has a warden thread (`process`).

use nacelle_base::retry::retry_interrupted;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nacelle_base::{Chain, files};

use crate::machine::{BOOT_PORT, GuestLink, LinkListener, Machine, MachineExit, MachineStatus, StopMode};
use crate::process::{MachineProcess, Process, Warden};
use crate::{EngineError, LinkError, Slot};

/// The agent's ports that have a socket in the run directory, and the socket's name.
const SOCKETS: [(u32, &str); 2] = [(1025, "agent.sock"), (1026, "agent-streams.sock")];

/// This process's ends of the sockets.
pub(crate) struct AgentSockets {
    boot: UnixStream,
    files: SocketFiles,
}

/// The agent's ends: handshake, service, streams.
pub(crate) struct InheritedSockets {
    boot: UnixStream,
    rpc: UnixListener,
    streams: UnixListener,
}

impl AgentSockets {
    /// Creates the sockets in this directory. They listen when this returns, so that no connection comes too early.
    pub fn create(run_dir: &Path) -> Result<(AgentSockets, InheritedSockets), EngineError> {
        let (boot, agent_boot) =
            UnixStream::pair().map_err(|source| EngineError::Resources { what: "the agent's socket", source })?;
        let files = SocketFiles(run_dir.to_owned());
        let [rpc, streams] = SOCKETS;
        let (rpc, streams) = (files.listen(rpc)?, files.listen(streams)?);
        Ok((AgentSockets { boot, files }, InheritedSockets { boot: agent_boot, rpc, streams }))
    }
}

impl InheritedSockets {
    /// Returns the descriptors that the agent inherits, in the order of its arguments.
    pub fn descriptors(&self) -> [RawFd; 3] {
        [self.boot.as_raw_fd(), self.rpc.as_raw_fd(), self.streams.as_raw_fd()]
    }
}

/// The sockets in the run directory; removed on drop.
struct SocketFiles(PathBuf);

impl SocketFiles {
    fn path(&self, port: u32) -> Option<PathBuf> {
        SOCKETS.iter().find(|(known, _)| *known == port).map(|(_, name)| self.0.join(name))
    }

    fn listen(&self, (_, name): (u32, &str)) -> Result<UnixListener, EngineError> {
        let path = self.0.join(name);
        UnixListener::bind(&path).map_err(|source| EngineError::File { what: "listen on", path, source })
    }
}

impl Drop for SocketFiles {
    fn drop(&mut self) {
        for (_, name) in SOCKETS {
            if let Err(error) = files::remove_if_there(&self.0.join(name)) {
                tracing::warn!("{}", Chain(&error));
            }
        }
    }
}

/// The link to the process.
struct AgentLink {
    boot: Mutex<Option<UnixStream>>,
    process: Arc<Process>,
    files: SocketFiles,
}

impl GuestLink for AgentLink {
    fn connect(&self, port: u32, _timeout: Duration) -> Result<UnixStream, LinkError> {
        let check_running = || match self.process.ended.get() {
            Some(_) => Err(LinkError::Stopped),
            None => Ok(()),
        };
        check_running()?;
        let refused = LinkError::Refused { port };
        let Some(path) = self.files.path(port) else { return Err(refused) };
        match retry_interrupted(|| UnixStream::connect(&path)) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                check_running()?;
                Err(refused)
            }
            // The socket was created before the process was started, and is not created again.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                check_running()?;
                Err(LinkError::Lost { path })
            }
            other => other.map_err(|source| LinkError::Resources { source }),
        }
    }

    /// Only the boot port can be listened on, once: it is the connection that the process inherited.
    fn listen(&self, port: u32) -> Result<Box<dyn LinkListener>, LinkError> {
        let boot = self.boot.lock().unwrap_or_else(PoisonError::into_inner).take();
        match boot.filter(|_| port == BOOT_PORT) {
            Some(boot) => Ok(Box::new(BootConnection(Mutex::new(Some(boot))))),
            None => Err(LinkError::PortInUse { port }),
        }
    }
}

struct BootConnection(Mutex<Option<UnixStream>>);

impl LinkListener for BootConnection {
    fn accept(&self, _timeout: Duration) -> Result<UnixStream, LinkError> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take().ok_or(LinkError::Stopped)
    }
}

/// The machine that is the agent's process.
pub(crate) struct AgentMachine {
    process: MachineProcess,
    link: Arc<AgentLink>,
}

impl AgentMachine {
    /// Creates the machine of a process that inherited the other ends of these sockets.
    pub fn new(process: Arc<Process>, warden: Warden, sockets: AgentSockets) -> AgentMachine {
        let AgentSockets { boot, files } = sockets;
        let link = Arc::new(AgentLink { boot: Mutex::new(Some(boot)), process: Arc::clone(&process), files });
        AgentMachine { process: MachineProcess::new(process, warden), link }
    }
}

impl Machine for AgentMachine {
    fn status(&self) -> MachineStatus {
        self.process.status(false)
    }

    fn wait(&self, timeout: Duration) -> Option<MachineExit> {
        self.process.wait(timeout)
    }

    fn stop(&self, how: StopMode) -> Result<MachineExit, EngineError> {
        self.process.stop(how)
    }

    fn link(&self) -> Arc<dyn GuestLink> {
        Arc::<AgentLink>::clone(&self.link)
    }

    fn disks(&self) -> &[Slot] {
        &[]
    }
}
