//! Owns: the engine that has no guest: the agent itself, in namespaces of the node, is the machine. It shares the node's
//! kernel: what a VM keeps apart is kept apart by namespaces, control groups, capabilities and filters only.
//! May use: `process`, `console`, `ended`. Knows no pod.
//! Threads: per machine the warden (`process`).

mod spawn;

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use crate::agent::{AgentMachine, Ends};
use crate::console::Console;
use crate::machine::{Engine, Machine};
use crate::process::Process;
use crate::{CheckedSpec, EngineError, EngineKind, Limits};

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
    ends: Option<Ends>,
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

impl Host {
    /// Starts the agent. To be called by the process's first thread, while it is the only one: the agent ends with it.
    /// It inherits the control group, which is the root of those that it makes: nobody may be in it when it is told to
    /// go on.
    pub fn new(spec: &HostSpec) -> Result<Host, EngineError> {
        let (ends, theirs) = Ends::make(spec.run_dir)?;
        let inherited = theirs.numbers();
        let mut command = Command::new(spec.program);
        command.arg("--host").args([spec.run_dir, spec.scratch]).args(inherited.map(|fd| fd.to_string()));
        let shared = [("network", spec.netns.is_none()), ("pid", spec.node_pid), ("ipc", spec.node_ipc)];
        command.args(shared.iter().filter(|(_, shared)| *shared).map(|(word, _)| word));
        command.env_clear().current_dir("/").process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = spawn::spawn(command, spec.netns, !spec.node_pid, inherited);
        let child = child.map_err(|source| EngineError::Spawn { program: spec.program.to_owned(), source })?;
        let pid = child.id();
        Ok(Host { pid, waiting: Mutex::new(Some(Waiting { child: Some(child), ends: Some(ends) })) })
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
        Limits { vcpus: crate::spec::MAX_VCPUS, devices: 0, cpu_models: false }
    }

    /// Of the spec only the console's file counts. It can be started once.
    fn start(&self, spec: CheckedSpec) -> Result<Box<dyn Machine>, EngineError> {
        let log = spec.into_inner().console_log;
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut waiting = waiting.ok_or(EngineError::Ended { what: "start" })?;
        let console = Console::open(&log).map_err(|source| EngineError::File { what: "open", path: log, source })?;
        let (Some(child), Some(ends)) = (waiting.child.take(), waiting.ends.take()) else {
            return Err(EngineError::Ended { what: "start" });
        };
        let (process, warden) = Process::adopt(child, console, || ())?;
        Ok(Box::new(AgentMachine::new(process, warden, ends)))
    }
}
