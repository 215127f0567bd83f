//! Handles a pod's annotations about VMs. Before anything is created, they are checked with the code of `nacelle vm validate`;
//! they make the pod a machine pod, or shape the VM of its containers. Fields that this version does not support are rejected by
//! name.

use super::convert::{EMPTY_DIR_LIMITS, FROM_CHECKPOINT, SOCKETS, shape};
use super::status::{refuse, status};
use crate::config::{Config, Handler};
use nacelle_base::FailureKind;
use nacelle_base::machine::EngineKind;
use nacelle_machines::machine_pod;
use nacelle_machines::multus::{self, NETWORKS};
use nacelle_model::StringMap;
use nacelle_model::machine_pod::MachinePod;
use nacelle_model::pod::{PodConfig, VmShape};
use nacelle_vmi::admit;
use nacelle_vmi::annotations::PREFIX;
use nacelle_vmi::annotations::machine_id::ExpectedMachineId;
use nacelle_vmi::preset::Catalogue;
use nacelle_vmi::spec::SpecKind;
use tonic::Status;

/// The largest error text in bytes: gRPC sends it in a header of limited size.
const MAX_MESSAGE: usize = 3500;
/// Annotations that other modules implement; see docs/contributor/volumes.md and docs/user/checkpoints.md.
const OTHER_MODULES: [&str; 3] = [EMPTY_DIR_LIMITS, FROM_CHECKPOINT, SOCKETS];

/// The request in a pod's annotations.
#[derive(Debug)]
pub(super) enum VmRequest {
    /// The pod's container is a machine.
    Machine {
        /// The specification of the machine.
        machine: Box<MachinePod>,
        /// The persistent VM of which the pod is a run.
        vm: Option<PersistentVmRequest>,
    },
    /// The pod's containers run in a VM of this shape.
    Shape(VmShape),
}

/// The persistent VM that a pod names.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PersistentVmRequest {
    /// The VM's name in the pod's namespace.
    pub name: String,
    /// The machine id that the VM must have.
    pub machine_id: Option<ExpectedMachineId>,
}

/// Returns the request in a pod's annotations; `None` without annotations about VMs.
pub(super) fn vm_request(
    pod: &PodConfig,
    config: &Config,
    handler: &Handler,
    engine: EngineKind,
) -> Result<Option<VmRequest>, Status> {
    let annotations = &pod.annotations;
    let ours = annotations.iter().filter(|(key, _)| key.starts_with(PREFIX) && !OTHER_MODULES.contains(&key.as_str()));
    let mut ours: StringMap = ours.map(|(key, value)| (key.clone(), value.clone())).collect();
    if ours.is_empty() {
        return Ok(None);
    }
    // No settings of the VM, but rejected in a machine pod.
    for key in [FROM_CHECKPOINT, SOCKETS] {
        ours.extend(annotations.get(key).map(|value| (key.to_owned(), value.clone())));
    }
    let admitted = admit::pod(&ours, &Catalogue::default()).map_err(|causes| {
        refuse(FailureKind::Invalid, &format!("config.annotations: {}", causes.brief(MAX_MESSAGE)))
    })?;
    let Some(admitted) = admitted else { return Ok(None) };
    if admitted.kind() == SpecKind::Machine {
        if !pod.kind.has_guest() {
            let message = "config.annotations: a machine pod needs a handler whose engine is not host, and no namespace of the node";
            return Err(refuse(FailureKind::Invalid, message));
        }
        if pod.user_namespace.is_some() {
            let message = "config.linux.security_context.namespace_options.userns_options: a machine pod's guest has its own users";
            return Err(refuse(FailureKind::Invalid, message));
        }
        if let Some(name) = pod.sysctls.keys().next() {
            let message = format!("config.linux.sysctls has {name:?}: a machine pod's guest sets its own sysctls");
            return Err(refuse(FailureKind::Invalid, &message));
        }
        let machine = machine_pod::build(&admitted, pod, &config.machines).map_err(status)?;
        let machine_id = admitted.machine_id().cloned();
        let vm = admitted.name().map(|name| PersistentVmRequest { name: name.to_owned(), machine_id });
        return Ok(Some(VmRequest::Machine { machine: Box::new(machine), vm }));
    }
    shape(&admitted, pod, handler, engine).map(|shape| Some(VmRequest::Shape(shape))).map_err(status)
}

/// Checks that the guest of a container pod has device slots for the networks that its pod requests in addition to the first one.
pub(super) fn check_interface_slots(pod: &PodConfig, engine: EngineKind) -> Result<(), Status> {
    let slots = match engine {
        EngineKind::Kvm => 8,
        EngineKind::Qemu => 1,
        EngineKind::Host => return Ok(()),
    };
    // An invalid annotation is left to the plugins.
    let requested = multus::requested_networks(&pod.annotations, &pod.name.namespace)
        .ok()
        .flatten()
        .map_or(0, |requested| requested.len());
    if requested <= slots {
        return Ok(());
    }
    let message = format!(
        "config.annotations[{NETWORKS:?}] requests {requested} networks, and a VM of this handler's engine has device slots for {slots}"
    );
    Err(refuse(FailureKind::Unsupported, &message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cri::convert::{pod_config, sample};
    use tonic::Code;

    fn rejection(annotations: &[(&str, &str)]) -> Option<(Code, String)> {
        request_of_pod(annotations).err().map(|status| (status.code(), status.message().to_owned()))
    }

    fn request_of_pod(annotations: &[(&str, &str)]) -> Result<Option<VmRequest>, Status> {
        let mut pod =
            pod_config(Some(&sample()), "h", crate::config::EngineSetting::Auto, &Default::default()).unwrap();
        pod.annotations = annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        vm_request(&pod, &Config::default(), &Handler::default(), EngineKind::Kvm)
    }

    #[test]
    fn other_annotations_are_nobodys_business() {
        assert_eq!(
            rejection(&[("example.com/a", "b"), (EMPTY_DIR_LIMITS, "a=1Gi"), (FROM_CHECKPOINT, "a"), (SOCKETS, "/a")]),
            None
        );
    }

    #[test]
    fn all_invalid_fields_are_reported_at_once_and_unsupported_ones_by_name() {
        let spec = r#"{"domain": {"cpu": {"cores": 0}, "devices": {"disks": [{"name": "a", "disk": {"bus": "ide"}}, {"name": "a"}]}}}"#;
        let (code, message) = rejection(&[("vm.nacelle.dev/spec", spec)]).unwrap();
        assert_eq!(code, Code::InvalidArgument);
        for field in
            ["spec.domain.cpu.cores", "spec.domain.devices.disks[0].disk.bus", "spec.domain.devices.disks[1].name"]
        {
            assert!(message.contains(field), "{message}");
        }
        let (code, message) =
            rejection(&[("vm.nacelle.dev/cpus", "2"), ("vm.nacelle.dev/mac", "02:00:00:00:00:01")]).unwrap();
        assert_eq!(code, Code::Unimplemented);
        assert!(
            message.contains("spec.domain.devices.interfaces[0].macAddress (from vm.nacelle.dev/mac)"),
            "{message}"
        );
        assert!(!message.contains("cpus"), "{message}");
    }

    #[test]
    fn what_is_wrong_in_many_places_fits_into_a_status() {
        let disks: String = (0..30).map(|disk| format!("d{disk}=empty:1Gi,bus=ide,cache=some;")).collect();
        let (_, message) = rejection(&[("vm.nacelle.dev/disks", &disks)]).unwrap();
        assert!(message.len() < 4000 && message.ends_with("more: `nacelle vm validate` lists all"), "{message}");
    }

    #[test]
    fn a_machine_pod_is_what_its_annotations_say() {
        let machine = [
            ("vm.nacelle.dev/kind", "machine"),
            ("vm.nacelle.dev/memory", "512Mi"),
            ("vm.nacelle.dev/cpus", "2"),
            ("vm.nacelle.dev/firmware", "efi"),
            ("vm.nacelle.dev/disks", "root=image:a:1,boot=1;data=empty:1Gi,bus=sata"),
            ("vm.nacelle.dev/cloud-init", "#cloud-config\n"),
            (
                "vm.nacelle.dev/ssh-keys",
                "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ1lZDI1NTE5AAAAIJ1lZDI1NTE5AAAAIJ1lZDI1 me",
            ),
        ];
        let Some(VmRequest::Machine { machine, vm }) = request_of_pod(&machine).unwrap() else { panic!("no machine") };
        assert_eq!((vm, machine.strategy), (None, None));
        assert_eq!((machine.memory_mib, machine.processors.count(), machine.cards.len()), (512, 2, 1));
        let disks: Vec<_> = machine.disks.iter().map(|disk| disk.name.as_str()).collect();
        assert_eq!(disks, ["root", "data", "cloud-init"]);
        assert!(machine.screen && machine.random && machine.balloon);
    }

    #[test]
    fn what_no_machine_pod_has_is_refused_by_its_field() {
        let [kind, memory] = [("vm.nacelle.dev/kind", "machine"), ("vm.nacelle.dev/memory", "512Mi")];
        let disk = |disk| ("vm.nacelle.dev/disks", disk);
        let (code, message) = rejection(&[
            kind,
            memory,
            disk("root=image:a:1"),
            ("vm.nacelle.dev/spec", "domain: {cpu: {maxSockets: 2}}"),
        ])
        .unwrap();
        assert_eq!(code, Code::Unimplemented);
        assert!(message.contains("spec.domain.cpu.maxSockets"), "{message}");
        let (code, message) =
            rejection(&[kind, memory, disk("root=image:a:1"), ("vm.nacelle.dev/power", "off")]).unwrap();
        assert_eq!(code, Code::InvalidArgument);
        assert!(message.contains("vm.nacelle.dev/power"), "{message}");
        let (code, message) = rejection(&[kind, memory, disk("root=image:a:1"), (SOCKETS, "/run/spire")]).unwrap();
        assert_eq!(code, Code::InvalidArgument);
        assert!(message.contains(SOCKETS), "{message}");
        let (code, message) = rejection(&[kind]).unwrap();
        assert_eq!(code, Code::InvalidArgument);
        assert!(message.contains("domain.memory.guest"), "{message}");
    }

    #[test]
    fn a_kernel_of_its_own_is_in_its_image() {
        let machine = [
            ("vm.nacelle.dev/kind", "machine"),
            ("vm.nacelle.dev/memory", "512Mi"),
            ("vm.nacelle.dev/disks", "root=image:a:1"),
            ("vm.nacelle.dev/kernel-image", "a:1"),
            ("vm.nacelle.dev/kernel", "/boot/vmlinuz"),
            ("vm.nacelle.dev/kernel-args", "root=/dev/vda"),
        ];
        let Some(VmRequest::Machine { machine: made, .. }) = request_of_pod(&machine).unwrap() else {
            panic!("no machine")
        };
        let kernel = made.kernel.expect("it has one");
        assert_eq!((made.board, made.screen), (nacelle_model::machine::Board::Microvm, false));
        assert_eq!((kernel.arguments.as_str(), kernel.initrd), ("root=/dev/vda", None));
        for (key, value, field) in [
            ("vm.nacelle.dev/graphics", "true", "devices.autoattachGraphicsDevice"),
            ("vm.nacelle.dev/disks", "root=image:a:1;more=empty:1Gi,bus=sata", "devices.disks[1].bus"),
            ("vm.nacelle.dev/serial", "a", "firmware.serial"),
        ] {
            // The last one of two equal keys counts.
            let (code, message) = rejection(&[&machine[..], &[(key, value)]].concat()).unwrap();
            assert!(code == Code::Unimplemented && message.contains(field), "{message}");
            assert!(message.contains("q35"), "{message}");
            let q35 = rejection(&[&machine[..], &[(key, value), ("vm.nacelle.dev/machine", "q35")]].concat());
            assert_eq!(q35, None, "{field}");
        }
        let without = [machine[0], machine[1], machine[2], ("vm.nacelle.dev/machine", "microvm")];
        assert!(rejection(&without).unwrap().1.contains("with kernelBoot"));
    }

    #[test]
    fn a_machine_that_is_named_outlives_its_pod() {
        let named = [
            ("vm.nacelle.dev/kind", "machine"),
            ("vm.nacelle.dev/memory", "512Mi"),
            ("vm.nacelle.dev/disks", "root=image:a:1"),
            ("vm.nacelle.dev/name", "db"),
            ("vm.nacelle.dev/machine-id", "8b0d4a52,new"),
            ("vm.nacelle.dev/run-strategy", "RerunOnFailure"),
        ];
        let Some(VmRequest::Machine { machine, vm }) = request_of_pod(&named).unwrap() else { panic!("no machine") };
        let machine_id = Some(ExpectedMachineId { id: "8b0d4a52".to_owned(), may_create: true });
        assert_eq!(vm, Some(PersistentVmRequest { name: "db".to_owned(), machine_id }));
        assert_eq!(machine.strategy, Some(nacelle_model::machine::RunStrategy::RerunOnFailure));
    }
}
