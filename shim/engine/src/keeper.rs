//! Implements the engine of machine pods: it starts a keeper (nacelle-keeper), which runs the machine in a QEMU process of
//! its own and speaks the agent's protocol. The machine is created with the pod's container, not when this engine starts.
//! Each keeper has a warden thread (`process`).

use std::os::fd::AsRawFd;
use std::path::PathBuf;

use crate::agent::{AgentMachine, AgentSockets};
use crate::console::ConsoleLog;
use crate::machine::{Engine, Machine};
use crate::process::Process;
use crate::{Accelerator, CheckedSpec, EngineError, EngineKind, Limits};

/// The maximum number of network interfaces of a pod.
const MAX_NICS: usize = 16;

/// The engine of machine pods.
#[derive(Clone, Debug)]
pub struct KeeperEngine {
    /// The absolute path of the keeper's program.
    pub program: PathBuf,
    /// The absolute path of the QEMU program.
    pub qemu: PathBuf,
    /// The accelerator of QEMU.
    pub accelerator: Accelerator,
    /// An existing directory of the node for disks.
    pub scratch: PathBuf,
}

impl Engine for KeeperEngine {
    fn kind(&self) -> EngineKind {
        EngineKind::Qemu
    }

    fn limits(&self) -> Limits {
        Limits { vcpus: crate::spec::MAX_VCPUS, devices: MAX_NICS, cpu_models: false }
    }

    /// Uses only the network interfaces, the shares, the run directory and the console's file of the specification.
    fn start(&self, spec: CheckedSpec) -> Result<Box<dyn Machine>, EngineError> {
        let spec = spec.into_inner();
        let log = spec.console_log;
        let console =
            ConsoleLog::create(&log).map_err(|source| EngineError::File { what: "open", path: log, source })?;
        let (sockets, inherited_sockets) = AgentSockets::create(&spec.run_dir)?;
        let mut inherited = inherited_sockets.descriptors().to_vec();
        let mut args: Vec<String> = inherited.iter().map(ToString::to_string).collect();
        for nic in &spec.nics {
            let dhcp = nic.dhcp.as_ref().ok_or_else(|| EngineError::Resources {
                what: "the DHCP responder of a network interface",
                source: std::io::ErrorKind::InvalidInput.into(),
            })?;
            let queues = std::iter::once(&nic.tap).chain(&nic.more_queues).map(AsRawFd::as_raw_fd).collect::<Vec<_>>();
            args.push(queues.iter().map(ToString::to_string).collect::<Vec<_>>().join(":"));
            args.push(dhcp.as_raw_fd().to_string());
            inherited.extend(queues.into_iter().chain([dhcp.as_raw_fd()]));
        }
        let shares = spec.shares.len().to_string();
        for stream in spec.shares.iter().flatten().map(AsRawFd::as_raw_fd) {
            args.push(stream.to_string());
            inherited.push(stream);
        }
        let accelerator = match self.accelerator {
            Accelerator::Kvm => "kvm",
            Accelerator::Tcg => "tcg",
        };
        let paths = [&spec.run_dir, &self.scratch, &self.qemu].map(|path| path.display().to_string());
        let args = paths.into_iter().chain([accelerator.to_owned(), shares]).chain(args).collect();
        let (process, warden) = Process::start(&self.program, args, inherited, console, || ())?;
        Ok(Box::new(AgentMachine::new(process, warden, sockets)))
    }
}
