//! Implements the engine without a guest: the machine is the agent itself, in namespaces of the node. It shares the node's
//! kernel, so only namespaces, cgroups, capabilities and seccomp filters isolate it. It knows no pods. Each machine has a
//! warden thread (`process`).

mod spawn;

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use crate::agent::{AgentMachine, AgentSockets};
use crate::console::ConsoleLog;
use crate::machine::{Engine, Machine};
use crate::process::Process;
use crate::{CheckedSpec, EngineError, EngineKind, Limits};

/// The parameters of an agent without a guest.
#[derive(Clone, Debug)]
pub struct HostSpec<'a> {
    /// The absolute path of the agent's program.
    pub program: &'a Path,
    /// An existing directory of mode 0700 for this machine's sockets.
    pub run_dir: &'a Path,
    /// An existing directory of the node for the writable layers of containers.
    pub scratch: &'a Path,
    /// The file of the network namespace; `None` for the node's.
    pub netns: Option<&'a Path>,
    /// The agent uses the node's PID namespace. The processes of containers then outlive a killed agent, and must be killed
    /// by their cgroup.
    pub node_pid: bool,
    /// The agent uses the node's IPC namespace.
    pub node_ipc: bool,
}

/// The engine of one machine, whose agent runs already and waits for the handshake. So it can be created while the process
/// still has the needed rights, and started after they were dropped.
pub struct HostEngine {
    pid: u32,
    waiting: Mutex<Option<WaitingAgent>>,
}

struct WaitingAgent {
    child: Option<Child>,
    sockets: Option<AgentSockets>,
}

impl Drop for WaitingAgent {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take()
            && let Err(error) = child.kill().and_then(|()| child.wait())
        {
            tracing::error!(%error, "an agent process is leaked");
        }
    }
}

impl HostEngine {
    /// Starts the agent. The process's first thread must call this while it is the only one, because the agent ends with
    /// that thread. The agent inherits the cgroup, which becomes the root of the containers' cgroups: no other process may
    /// be in it when the machine starts.
    pub fn new(spec: &HostSpec) -> Result<HostEngine, EngineError> {
        let (sockets, inherited_sockets) = AgentSockets::create(spec.run_dir)?;
        let inherited = inherited_sockets.descriptors();
        let mut command = Command::new(spec.program);
        command.arg("--host").args([spec.run_dir, spec.scratch]).args(inherited.map(|fd| fd.to_string()));
        let shared = [("network", spec.netns.is_none()), ("pid", spec.node_pid), ("ipc", spec.node_ipc)];
        command.args(shared.iter().filter(|(_, shared)| *shared).map(|(word, _)| word));
        command.env_clear().current_dir("/").process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = spawn::spawn(command, spec.netns, !spec.node_pid, inherited);
        let child = child.map_err(|source| EngineError::Spawn { program: spec.program.to_owned(), source })?;
        let pid = child.id();
        Ok(HostEngine { pid, waiting: Mutex::new(Some(WaitingAgent { child: Some(child), sockets: Some(sockets) })) })
    }

    /// Returns the pid of the agent, a child of this process.
    pub fn pid(&self) -> u32 {
        self.pid
    }
}

impl Engine for HostEngine {
    fn kind(&self) -> EngineKind {
        EngineKind::Host
    }

    /// There are no devices, and the CPUs are the node's.
    fn limits(&self) -> Limits {
        Limits { vcpus: crate::spec::MAX_VCPUS, devices: 0, cpu_models: false }
    }

    /// Uses only the console's file of the specification. Succeeds once.
    fn start(&self, spec: CheckedSpec) -> Result<Box<dyn Machine>, EngineError> {
        let log = spec.into_inner().console_log;
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut waiting = waiting.ok_or(EngineError::Ended { what: "start" })?;
        let console =
            ConsoleLog::create(&log).map_err(|source| EngineError::File { what: "open", path: log, source })?;
        let (Some(child), Some(sockets)) = (waiting.child.take(), waiting.sockets.take()) else {
            return Err(EngineError::Ended { what: "start" });
        };
        let (process, warden) = Process::adopt(child, console, || ())?;
        Ok(Box::new(AgentMachine::new(process, warden, sockets)))
    }
}
