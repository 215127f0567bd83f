//! Lists the fields of a specification that container pods honour. The daemon turns them into the shape of the pod's VM.

use nacelle_vmi::admit::Admitted;

/// The fields of a specification that take effect in a container pod, or that state what holds anyway.
const SUPPORTED_FIELDS: [&str; 14] = [
    "spec.architecture",
    "spec.domain.cpu.sockets",
    "spec.domain.cpu.cores",
    "spec.domain.cpu.threads",
    "spec.domain.cpu.dedicatedCpuPlacement",
    "spec.domain.cpu.model",
    "spec.domain.cpu.features[].name",
    "spec.domain.cpu.features[].policy",
    "spec.domain.memory.guest",
    "spec.domain.memory.hugepages.pageSize",
    "spec.domain.firmware.kernelBoot.kernelArgs",
    "spec.domain.firmware.kernelBoot.container.image",
    "spec.domain.firmware.kernelBoot.container.kernelPath",
    "spec.domain.devices.rng",
];
/// Returns whether a container pod honours this field. The path has no indices of list entries.
pub fn supports_field(path: &str) -> bool {
    SUPPORTED_FIELDS.contains(&path)
}

/// Returns why a container pod does not honour this field, where a reason is known.
pub fn unsupported_reason(field: &str) -> Option<&'static str> {
    field
        .starts_with("spec.domain.firmware.kernelBoot.container.initrdPath")
        .then_some("the initramfs is Nacelle's, because it contains the agent")
}

/// Removes the indices of list entries from the path of a field.
fn without_indices(path: &str) -> String {
    path.split('[').enumerate().fold(String::new(), |all, (n, part)| match part.split_once(']') {
        Some((_, rest)) if n > 0 => all + "[]" + rest,
        _ => all + part,
    })
}

/// Returns the fields that a container pod does not honour, each with the annotation that sets it.
pub fn unsupported_fields(admitted: &Admitted) -> Vec<String> {
    let fields = admitted.fields().into_iter().filter(|(path, _)| !supports_field(&without_indices(path)));
    fields.map(|(path, from)| from.map_or_else(|| path.clone(), |from| format!("{path} (from {from})"))).collect()
}
