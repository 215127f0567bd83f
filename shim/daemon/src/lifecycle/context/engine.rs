//! Resolves the engine of a pod: which program runs the VM, or that the pod has none.

use crate::config::EngineSetting;
use nacelle_base::machine::EngineKind;
use nacelle_model::pod::PodKind;
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
    /// Returns the engine of a pod of this kind whose handler has this setting. Called once for a pod, when its request is checked.
    pub(crate) fn resolve(&self, setting: EngineSetting, kind: &PodKind) -> EngineKind {
        if kind.has_guest() { setting.or(self.fitting) } else { EngineKind::Host }
    }

    /// Returns the description of the engine for the pod process. Called once for a pod, when it boots.
    pub(crate) fn spec(&self, engine: EngineKind, kind: &PodKind) -> EngineSpec {
        match (engine, kind) {
            (EngineKind::Host, _) => EngineSpec::Host { agent: self.agent.clone(), shares: kind.node_namespaces() },
            (engine, PodKind::Machine { machine, .. }) => EngineSpec::Keeper {
                program: self.keeper.clone(),
                qemu: self.qemu.clone(),
                accelerator: if engine == EngineKind::Kvm { Accelerator::Kvm } else { self.accelerator },
                keep: machine.keep.clone(),
                shares: machine.filesystems.len(),
            },
            (EngineKind::Kvm, _) => EngineSpec::Kvm {},
            (EngineKind::Qemu, _) => EngineSpec::Qemu { binary: self.qemu.clone(), accelerator: self.accelerator },
        }
    }
}
