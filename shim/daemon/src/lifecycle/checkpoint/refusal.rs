//! Lists the pods that cannot be saved, with the reasons. The pod process checks what depends on the containers' volumes and on the guest.

use super::error::CheckpointError;
use nacelle_base::machine::MemoryPages;
use nacelle_base::{ContainerId, PodId};
use nacelle_pod::spec::{EngineSpec, PodSpec};

/// Why a pod cannot be saved.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CheckpointRefusal {
    /// The containers run on the node itself.
    #[error("it has no VM (engine host)")]
    NoVm,
    /// The pod is a machine pod.
    #[error("it is a machine pod; use nacelle vm snapshot")]
    MachinePod,
    /// The engine cannot save a VM that goes on to run.
    #[error("engine qemu cannot save a running VM; use a handler with engine kvm")]
    Qemu,
    /// The memory is in huge pages of the node's pool.
    #[error("the memory of its VM is in reserved huge pages; use a handler with memory_pages = \"transparent\"")]
    ReservedHugePages,
    /// The pod has a user namespace.
    #[error("it has a user namespace")]
    UserNamespace,
    /// A container of the checkpoint from which the pod continues is still frozen.
    #[error("its container {name:?} has not continued from the checkpoint of the pod")]
    Waiting {
        /// The container's name.
        name: String,
    },
    /// A container runs that is not to be saved.
    #[error("container {id} runs and is not in container_ids; all running containers are saved together")]
    NotSelected {
        /// The container's id.
        id: ContainerId,
    },
}

/// Checks that the VM with this specification can be saved. Its template does not matter: all memory is saved.
pub(super) fn check_spec(pod: &PodId, spec: &PodSpec) -> Result<(), CheckpointError> {
    let why = match &spec.engine {
        EngineSpec::Host { .. } => CheckpointRefusal::NoVm,
        EngineSpec::Keeper { .. } => CheckpointRefusal::MachinePod,
        EngineSpec::Qemu { .. } => CheckpointRefusal::Qemu,
        EngineSpec::Kvm {} if spec.memory_pages != MemoryPages::Transparent => CheckpointRefusal::ReservedHugePages,
        EngineSpec::Kvm {} if spec.user_namespace.is_some() => CheckpointRefusal::UserNamespace,
        EngineSpec::Kvm {} => return Ok(()),
    };
    Err(CheckpointError::Refused { pod: pod.clone(), why })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn only_a_vm_of_engine_kvm_with_transparent_memory_can_be_saved() {
        let pod = PodId::from_bytes([1; 32]);
        let outcome = |key: &str, value: Value| {
            let mut spec = json!({
                "version": 1, "id": pod, "engine": { "kind": "kvm" }, "vcpus": 1, "memory_mib": 128, "kernel": "/k", "initrd": "/i",
                "hostname": "web", "scratch": { "size_mib": 64, "templates": "/t" },
            });
            spec[key] = value;
            match check_spec(&pod, &serde_json::from_value(spec).unwrap()) {
                Ok(()) => None,
                Err(CheckpointError::Refused { why, .. }) => Some(why),
                Err(error) => panic!("{error}"),
            }
        };
        let qemu = json!({ "kind": "qemu", "binary": "/q", "accelerator": "kvm" });
        let keeper = json!({ "kind": "keeper", "program": "/p", "qemu": "/q", "accelerator": "kvm" });
        let host = json!({ "kind": "host", "agent": "/a" });
        let users = {
            let range = json!({ "first": 100_000, "count": 65_536 });
            json!({ "users": range, "groups": range })
        };
        for (key, value, expected) in [
            ("template", json!({ "directory": "/t", "memory_mib": 64 }), None),
            ("template", Value::Null, None),
            ("engine", host, Some(CheckpointRefusal::NoVm)),
            ("engine", keeper, Some(CheckpointRefusal::MachinePod)),
            ("engine", qemu, Some(CheckpointRefusal::Qemu)),
            ("memory_pages", json!("hugetlb"), Some(CheckpointRefusal::ReservedHugePages)),
            ("user_namespace", users, Some(CheckpointRefusal::UserNamespace)),
        ] {
            assert_eq!(outcome(key, value.clone()), expected, "{key}: {value}");
        }
    }
}
