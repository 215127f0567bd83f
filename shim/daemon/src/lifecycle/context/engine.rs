//! Resolves the engine of a pod: which program runs the VM, or that the pod has none.

use crate::config::EngineSetting;
use nacelle_base::machine::EngineKind;
use nacelle_model::pod::PodConfig;
use nacelle_pod::spec::{Accelerator, EngineSpec};
use std::path::PathBuf;

/// The engines of this node.
#[derive(Clone, Debug)]
pub struct EngineChoice {
    /// The engine of handlers that name none.
    pub fitting: EngineKind,
    /// The QEMU binary, for handlers with that engine.
    pub qemu: PathBuf,
    /// QEMU's accelerator.
    pub accelerator: Accelerator,
    /// The agent's binary, for pods without a guest.
    pub agent: PathBuf,
    /// The keeper's binary, for machine pods.
    pub keeper: PathBuf,
}

impl EngineChoice {
    /// Returns the engine of a pod.
    pub(crate) fn spec(&self, setting: EngineSetting, pod: &PodConfig) -> EngineSpec {
        let setting = if pod.needs_host() { EngineSetting::Host } else { setting };
        let shares = pod.node_namespaces;
        let engine = setting.or(self.fitting);
        if pod.machine.is_some() && engine != EngineKind::Host {
            let accelerator = if engine == EngineKind::Kvm { Accelerator::Kvm } else { self.accelerator };
            let keep = pod.machine.as_ref().and_then(|machine| machine.keep.clone());
            let shares = pod.machine.as_ref().map_or(0, |machine| machine.filesystems.len());
            let (program, qemu) = (self.keeper.clone(), self.qemu.clone());
            return EngineSpec::Keeper { program, qemu, accelerator, keep, shares };
        }
        match engine {
            EngineKind::Kvm => EngineSpec::Kvm {},
            EngineKind::Qemu => EngineSpec::Qemu { binary: self.qemu.clone(), accelerator: self.accelerator },
            EngineKind::Host => EngineSpec::Host { agent: self.agent.clone(), shares },
        }
    }
}
