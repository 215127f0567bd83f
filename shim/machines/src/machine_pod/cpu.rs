//! Converts the CPU of a specification into QEMU's CPU model, for machine pods and the VMs of container pods. Pure.

use super::rejection::{SpecRejection, reject_value};
use nacelle_base::machine::CpuModel;
use nacelle_vmi::spec::{Cpu, CpuFeaturePolicy};

/// Returns the CPU model and its features; the default is everything that the accelerator supports.
pub fn cpu_model(cpu: &Cpu) -> Result<CpuModel, SpecRejection> {
    let name = Some(&cpu.model).filter(|name| !["", "host-passthrough", "host-model"].contains(&name.as_str()));
    let mut model = CpuModel { name: name.cloned(), ..CpuModel::default() };
    for (n, feature) in cpu.features.iter().enumerate() {
        let is_enabled = match feature.policy {
            Some(CpuFeaturePolicy::Forbid) => {
                let instead = "use disable to remove the feature";
                return reject_value(format!("spec.domain.cpu.features[{n}].policy"), "forbid", instead);
            }
            Some(CpuFeaturePolicy::Disable) => false,
            Some(CpuFeaturePolicy::Optional) => true,
            Some(CpuFeaturePolicy::Force | CpuFeaturePolicy::Require) | None => {
                model.strict = true;
                true
            }
        };
        model.features.push((feature.name.clone(), is_enabled));
    }
    // These names become part of a QEMU argument.
    let rule = "a name consists of letters, digits, '-', '_' and '.'";
    match model.find_invalid_name() {
        Some(name) if model.name.as_deref() == Some(name) => reject_value("spec.domain.cpu.model", name, rule),
        Some(name) => reject_value("spec.domain.cpu.features[].name", name, rule),
        None => Ok(model),
    }
}
