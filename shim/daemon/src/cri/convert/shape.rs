//! Converts the VM specification in a container pod's annotations into `VmShape`. Fields that a container pod's VM cannot have
//! are rejected one by one.

use crate::config::Handler;
use nacelle_base::machine::{CpuModel, EngineKind, MemoryPages, Topology};
use nacelle_base::{Classify, FailureKind};
use nacelle_engine::{MAX_CMDLINE, MAX_VCPUS};
use nacelle_image::Reference;
use nacelle_machines::machine_pod::{self, SpecRejection};
use nacelle_machines::supported::container_pod;
use nacelle_model::digest::Digest;
use nacelle_model::pod::{OwnKernel, PodConfig, VmShape};
use nacelle_pod::spec::MIN_MEMORY_MIB;
use nacelle_vmi::admit::Admitted;

const CPU: &str = "spec.domain.cpu";
const MODEL: &str = "spec.domain.cpu.model";
const MEMORY: &str = "spec.domain.memory.guest";
const ARGS: &str = "spec.domain.firmware.kernelBoot.kernelArgs";
const KERNEL_IMAGE: &str = "spec.domain.firmware.kernelBoot.container.image";
const PAGES: &str = "spec.domain.memory.hugepages.pageSize";
/// The largest number of rejected fields that an error lists.
const MAX_LISTED_FIELDS: usize = 20;

/// Why a VM cannot have this shape.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// The pod has no VM.
    #[error(
        "config.annotations configure a VM, but the pod has none: its engine is host, because of its handler or because it uses namespaces of the node"
    )]
    NoMachine,
    /// The specification contains fields that do not apply to the VM of a container pod.
    #[error(
        "config.annotations set {fields}, which this version of Nacelle does not support for the VM of a container pod (docs/user/vm/container-pods.md): remove them"
    )]
    UnsupportedFields {
        /// The fields' paths, and the annotations that set them.
        fields: String,
    },
    /// The number of vCPUs or their topology is invalid.
    #[error("config.annotations: {0}")]
    Processor(#[from] SpecRejection),
    /// This node cannot provide the value.
    #[error("config.annotations: {field} is {value}: {why}")]
    NotHere {
        /// The field's path.
        field: &'static str,
        /// The value.
        value: String,
        /// The reason and the advice.
        why: &'static str,
    },
    /// The value breaks a rule.
    #[error("config.annotations: {field} is {value}: {rule}")]
    Bad {
        /// The field's path.
        field: &'static str,
        /// The value.
        value: String,
        /// The rule.
        rule: String,
    },
}

impl Classify for ShapeError {
    fn kind(&self) -> FailureKind {
        match self {
            ShapeError::Processor(refused) => refused.kind(),
            ShapeError::NoMachine | ShapeError::Bad { .. } => FailureKind::Invalid,
            ShapeError::UnsupportedFields { .. } | ShapeError::NotHere { .. } => FailureKind::Unsupported,
        }
    }
}

fn bad<T>(field: &'static str, value: impl ToString, rule: String) -> Result<T, ShapeError> {
    Err(ShapeError::Bad { field, value: value.to_string(), rule })
}

/// Returns the shape that a specification gives to the VM of a pod of this handler on this engine.
pub fn shape(
    admitted: &Admitted,
    pod: &PodConfig,
    handler: &Handler,
    engine: EngineKind,
) -> Result<VmShape, ShapeError> {
    if engine == EngineKind::Host {
        return Err(ShapeError::NoMachine);
    }
    let unsupported = container_pod::unsupported_fields(admitted);
    if !unsupported.is_empty() {
        let why =
            |field: &String| container_pod::unsupported_reason(field).map(|why| format!(": {why}")).unwrap_or_default();
        let fields: Vec<_> =
            unsupported.iter().take(MAX_LISTED_FIELDS).map(|field| format!("{field}{}", why(field))).collect();
        return Err(ShapeError::UnsupportedFields { fields: fields.join(", ") });
    }
    let memory_pages = memory_pages(admitted)?;
    let cpu_model = cpu_model(admitted, engine)?;
    Ok(VmShape {
        processors: processors(admitted, pod, engine)?,
        pinned: admitted
            .explicit_spec()
            .domain
            .cpu
            .as_ref()
            .is_some_and(|cpu| cpu.dedicated_cpu_placement == Some(true)),
        cpu_model,
        memory_mib: memory(admitted, pod, memory_pages.unwrap_or(handler.memory_pages), handler.memory_mib)?,
        memory_pages,
        kernel_args: kernel_args(admitted, handler)?,
        kernel: kernel(admitted)?,
    })
}

/// Returns the CPU model; `None` for all features of the node's CPUs.
fn cpu_model(admitted: &Admitted, engine: EngineKind) -> Result<Option<CpuModel>, ShapeError> {
    let Some(cpu) = &admitted.explicit_spec().domain.cpu else { return Ok(None) };
    let model = machine_pod::cpu_model(cpu)?;
    if model == CpuModel::default() {
        return Ok(None);
    }
    if engine == EngineKind::Qemu {
        return Ok(Some(model));
    }
    let why = "engine kvm passes the node's CPU model through: engine qemu supports CPU models and disabling features";
    Err(match (model.name, model.features.first()) {
        (None, Some((name, _))) => {
            ShapeError::NotHere { field: "spec.domain.cpu.features[0].name", value: name.clone(), why }
        }
        (name, _) => ShapeError::NotHere { field: MODEL, value: name.unwrap_or_default(), why },
    })
}

fn processors(admitted: &Admitted, pod: &PodConfig, engine: EngineKind) -> Result<Option<Topology>, ShapeError> {
    let Some(cpu) = &admitted.explicit_spec().domain.cpu else { return Ok(None) };
    if cpu.sockets.or(cpu.cores).or(cpu.threads).is_none() {
        return Ok(None);
    }
    let one = |part: Option<u32>| part.unwrap_or(1);
    let topology = Topology { sockets: one(cpu.sockets), cores: one(cpu.cores), threads: one(cpu.threads) };
    let Topology { sockets, cores, threads } = topology;
    let value = format!("{sockets} sockets of {cores} cores of {threads} threads");
    let count = topology.count();
    if count > MAX_VCPUS.into() {
        return bad(CPU, value, format!("that is {count} vCPUs, and a VM has at most {MAX_VCPUS}"));
    }
    if let Some(milli) = pod.cpu_limit_milli.filter(|milli| *milli > u64::from(count) * 1000) {
        let rule = format!("the CPU limits of the containers are {milli}m together, which is more");
        return bad(CPU, value, rule);
    }
    let why = match engine {
        EngineKind::Kvm if sockets > 1 || threads > 1 => {
            "engine kvm supports only cores of one socket: set the number of cores"
        }
        // QEMU's firmware requires CPU numbers without gaps.
        EngineKind::Qemu if sockets > 1 && !cores.is_power_of_two() => {
            "with more than one socket, engine qemu needs cores that are a power of two"
        }
        _ => return Ok(Some(topology)),
    };
    Err(ShapeError::NotHere { field: CPU, value, why })
}

/// Returns the VM's total memory in MiB. It includes the memory of its kernel and agent, and the containers' limits must fit
/// beside the handler's share, as in a VM without a shape.
fn memory(admitted: &Admitted, pod: &PodConfig, pages: MemoryPages, own: u64) -> Result<Option<u64>, ShapeError> {
    let Some(guest) = admitted.explicit_spec().domain.memory.as_ref().and_then(|memory| memory.guest.as_ref()) else {
        return Ok(None);
    };
    let mib = guest.bytes().unwrap_or(0) >> 20;
    let least = match pod.memory_limit {
        Some(limit) => limit.div_ceil(1 << 20).saturating_add(own),
        None => MIN_MEMORY_MIB.into(),
    };
    if mib < least {
        let why = match pod.memory_limit {
            Some(limit) => format!(
                "the memory limits of the containers are {limit} bytes together, and the handler reserves memory_mib = {own} for the VM itself"
            ),
            None => "smaller VMs do not start".to_owned(),
        };
        return bad(MEMORY, guest, format!("{least}Mi are needed: {why}"));
    }
    if let Some((limit, overhead)) = pod.memory_limit.zip(pod.overhead_memory) {
        let most = limit.saturating_add(overhead);
        if mib << 20 > most {
            let rule = format!(
                "the pod may use {most} bytes on the node, which are its containers' limits and its RuntimeClass's overhead: \
                 raise the limits"
            );
            return bad(MEMORY, guest, rule);
        }
    }
    if pages == MemoryPages::Hugetlb && !mib.is_multiple_of(2) {
        return bad(MEMORY, guest, "it is backed by huge pages of 2Mi: a multiple of 2Mi is needed".to_owned());
    }
    Ok(Some(mib))
}

fn memory_pages(admitted: &Admitted) -> Result<Option<MemoryPages>, ShapeError> {
    let pages = admitted.explicit_spec().domain.memory.as_ref().and_then(|memory| memory.hugepages.as_ref());
    match pages.map(|pages| pages.page_size.as_str()) {
        None => Ok(None),
        Some("2Mi") => Ok(Some(MemoryPages::Hugetlb)),
        Some(size) => {
            let why = "the VM of a container pod supports huge pages of 2Mi only";
            Err(ShapeError::NotHere { field: PAGES, value: size.to_owned(), why })
        }
    }
}

fn kernel_args(admitted: &Admitted, handler: &Handler) -> Result<Vec<String>, ShapeError> {
    let boot = admitted.explicit_spec().domain.firmware.as_ref().and_then(|firmware| firmware.kernel_boot.as_ref());
    let text = boot.map_or("", |boot| boot.kernel_args.as_str());
    if text.contains(['"', '\'']) {
        return bad(ARGS, format!("{text:?}"), "parameters with quotes are not supported".to_owned());
    }
    let words: Vec<String> = text.split_ascii_whitespace().map(str::to_owned).collect();
    let bytes = handler.kernel_args.iter().chain(&words).map(|word| word.len() + 1).sum::<usize>();
    if !words.is_empty() && bytes > MAX_CMDLINE {
        let rule = format!("with the handler's parameters these are {bytes} bytes, and {MAX_CMDLINE} are possible");
        return bad(ARGS, format!("{} bytes", text.len()), rule);
    }
    Ok(words)
}

/// Returns the pod's own kernel. Its image is named as in kubelet.
fn kernel(admitted: &Admitted) -> Result<Option<OwnKernel>, ShapeError> {
    let boot = admitted.explicit_spec().domain.firmware.as_ref().and_then(|firmware| firmware.kernel_boot.as_ref());
    let Some(container) = boot.and_then(|boot| boot.container.as_ref()) else { return Ok(None) };
    let requested = &container.image;
    let image = match Digest::from_hex(requested.strip_prefix("sha256:").unwrap_or(requested)) {
        Some(id) => id.to_string(),
        None => match Reference::parse(requested) {
            Ok(reference) => reference.to_string(),
            Err(error) => return bad(KERNEL_IMAGE, format!("{requested:?}"), error.to_string()),
        },
    };
    Ok(Some(OwnKernel { image, path: container.kernel_path.clone() }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_vmi::admit;
    use nacelle_vmi::preset::Catalogue;

    fn plain() -> PodConfig {
        PodConfig { memory_limit: None, ..(*nacelle_model::testing::pod(1).config).clone() }
    }

    fn shape_of(annotations: &[(&str, &str)], pod: &PodConfig, engine: EngineKind) -> Result<VmShape, ShapeError> {
        let annotations =
            annotations.iter().map(|(name, value)| (format!("vm.nacelle.dev/{name}"), (*value).to_owned())).collect();
        let admitted = admit::pod(&annotations, &Catalogue::default()).unwrap().unwrap();
        let handler = Handler { kernel_args: vec!["a=1".into()], ..Handler::default() };
        shape(&admitted, pod, &handler, engine)
    }

    #[test]
    fn short_names_and_a_document_say_the_same() {
        let short = [
            ("cpus", "4"),
            ("cpu-pinning", "true"),
            ("memory", "512Mi"),
            ("hugepages", "2Mi"),
            ("kernel-args", "x.y=1 z"),
        ];
        let spec = "{domain: {cpu: {cores: 4, dedicatedCpuPlacement: true}, memory: {guest: 512Mi, hugepages: {pageSize: 2Mi}}, devices: {rng: {}}, \
                    firmware: {kernelBoot: {kernelArgs: x.y=1 z}}}, architecture: amd64}";
        let expected = VmShape {
            cpu_model: None,
            processors: Some(Topology::single_socket(4)),
            pinned: true,
            memory_mib: Some(512),
            memory_pages: Some(MemoryPages::Hugetlb),
            kernel_args: vec!["x.y=1".into(), "z".into()],
            kernel: None,
        };
        for said in [&short[..], &[("spec", spec)]] {
            for engine in [EngineKind::Qemu, EngineKind::Kvm] {
                assert_eq!(shape_of(said, &plain(), engine), Ok(expected.clone()));
            }
        }
        let sized = shape_of(&[("instancetype", "u1.medium")], &plain(), EngineKind::Qemu).unwrap();
        assert_eq!((sized.processors, sized.memory_mib), (Some(Topology::single_socket(1)), Some(4096)));
    }

    #[test]
    fn what_is_a_default_is_no_wish() {
        for said in [("kind", "container"), ("cpu-pinning", "false")] {
            assert_eq!(shape_of(&[said], &plain(), EngineKind::Qemu), Ok(VmShape::default()));
        }
        let shape = shape_of(&[("memory", "64Mi")], &plain(), EngineKind::Qemu).unwrap();
        assert_eq!(shape, VmShape { memory_mib: Some(64), ..VmShape::default() });
    }

    #[test]
    fn unsupported_fields_are_named_with_the_annotation_that_sets_them() {
        let spec = "{domain: {cpu: {maxSockets: 2}, devices: {disks: [{name: a}], blockMultiQueue: false}}, volumes: [{name: a, emptyDisk: {capacity: 1Gi}}]}";
        let said = [("spec", spec), ("cpus", "2"), ("mac", "02:00:00:00:00:01")];
        let error = shape_of(&said, &plain(), EngineKind::Qemu).unwrap_err();
        assert_eq!(error.kind(), FailureKind::Unsupported);
        for field in [
            "spec.domain.cpu.maxSockets,",
            "spec.domain.devices.blockMultiQueue",
            "spec.domain.devices.disks[0].name",
            "spec.domain.devices.interfaces[0].macAddress (from vm.nacelle.dev/mac)",
            "spec.volumes[0].emptyDisk.capacity",
        ] {
            assert!(error.to_string().contains(field), "{error}");
        }
        assert!(!error.to_string().contains("cpu.cores"), "{error}");
    }

    #[test]
    fn a_kernel_is_in_an_image_that_is_named_as_kubelet_does_and_brings_no_initial_file_system() {
        let id = "0123456789abcdef".repeat(4);
        let kernel = |image: &str| {
            let said = [("kernel-image", image), ("kernel", "/boot/vmlinux"), ("kernel-args", "quiet")];
            shape_of(&said, &plain(), EngineKind::Kvm)
        };
        for (requested, image) in [
            ("a:1", "docker.io/library/a:1".to_owned()),
            ("abc", "docker.io/library/abc:latest".to_owned()),
            (&format!("r.example/k@sha256:{id}"), format!("r.example/k@sha256:{id}")),
            (&id, format!("sha256:{id}")),
        ] {
            let shape = kernel(requested).unwrap();
            assert_eq!(shape.kernel, Some(OwnKernel { image, path: "/boot/vmlinux".into() }));
            assert_eq!(shape.kernel_args, ["quiet"]);
        }
        let error = kernel("a..b").unwrap_err();
        assert!(error.kind() == FailureKind::Invalid && error.to_string().contains(KERNEL_IMAGE), "{error}");
        let initrd = [("kernel-image", "a:1"), ("kernel", "/vmlinux"), ("initrd", "/initrd")];
        let error = shape_of(&initrd, &plain(), EngineKind::Qemu).unwrap_err();
        assert_eq!(error.kind(), FailureKind::Unsupported);
        let expected = "kernelBoot.container.initrdPath (from vm.nacelle.dev/initrd): the initramfs is Nacelle's";
        assert!(error.to_string().contains(expected) && !error.to_string().contains("kernelPath"), "{error}");
        // A record of an older daemon, and one of this daemon.
        assert_eq!(serde_json::from_str::<VmShape>("{}").unwrap(), VmShape::default());
        let shape = kernel("a:1").unwrap();
        assert_eq!(serde_json::from_value::<VmShape>(serde_json::to_value(&shape).unwrap()).unwrap(), shape);
    }

    #[test]
    fn processors_are_of_a_model_and_have_abilities() {
        let spec = |cpu: &str| format!("{{domain: {{cpu: {cpu}}}}}");
        let on = |cpu: &str, engine: EngineKind| {
            shape_of(&[("spec", &spec(cpu))], &plain(), engine).map(|shape| shape.cpu_model)
        };
        let (qemu, kvm) = (EngineKind::Qemu, EngineKind::Kvm);
        for cpu in ["{model: host-passthrough}", "{model: host-model, cores: 2}", "{cores: 2}"] {
            assert_eq!((on(cpu, qemu), on(cpu, kvm)), (Ok(None), Ok(None)), "{cpu}");
        }
        let cpu = "{model: EPYC-Rome, features: [{name: avx2, policy: disable}, {name: aes, policy: require}]}";
        let features = vec![("avx2".to_owned(), false), ("aes".to_owned(), true)];
        let expected = CpuModel { name: Some("EPYC-Rome".into()), features, strict: true };
        assert_eq!(on(cpu, qemu), Ok(Some(expected)));
        assert_eq!(
            shape_of(&[("cpu-model", "EPYC")], &plain(), qemu).unwrap().cpu_model.unwrap().name.unwrap(),
            "EPYC"
        );
        for (cpu, words) in
            [("{model: EPYC}", "cpu.model is EPYC:"), ("{features: [{name: avx}]}", "features[0].name is avx:")]
        {
            let error = on(cpu, kvm).unwrap_err();
            assert!(error.kind() == FailureKind::Unsupported && error.to_string().contains(words), "{error}");
        }
        let error = on("{features: [{name: avx, policy: forbid}]}", qemu).unwrap_err();
        assert!(error.to_string().contains("features[0].policy is \"forbid\""), "{error}");
    }

    #[test]
    fn what_cannot_be_is_refused_by_field_value_and_rule() {
        let limited = PodConfig { memory_limit: Some(1 << 28), cpu_limit_milli: Some(1500), ..plain() };
        let over = PodConfig { overhead_memory: Some(300 << 20), ..limited.clone() };
        let host = EngineKind::Host;
        let two = "{domain: {cpu: {sockets: 2, cores: 3}}}";
        let odd = "{domain: {cpu: {sockets: 2, threads: 2}}}";
        let long = "x".repeat(1021);
        let kvm = EngineKind::Kvm;
        for (said, pod, engine, kind, words) in [
            (("cpus", "2"), &plain(), host, FailureKind::Invalid, "engine is host"),
            (("cpus", "65"), &plain(), kvm, FailureKind::Invalid, "at most 64"),
            (("cpus", "1"), &limited, kvm, FailureKind::Invalid, "1500m together"),
            (("spec", two), &plain(), EngineKind::Qemu, FailureKind::Unsupported, "power of two"),
            (("spec", odd), &plain(), kvm, FailureKind::Unsupported, "cores of one socket"),
            (("memory", "63Mi"), &plain(), kvm, FailureKind::Invalid, "64Mi are needed"),
            (("memory", "511Mi"), &limited, kvm, FailureKind::Invalid, "512Mi are needed"),
            (("memory", "557Mi"), &over, kvm, FailureKind::Invalid, "583008256 bytes on the node"),
            (("hugepages", "1Gi"), &plain(), kvm, FailureKind::Unsupported, "hugepages.pageSize is 1Gi"),
            (("kernel-args", "a=\"b c\""), &plain(), kvm, FailureKind::Invalid, "quotes"),
            (("kernel-args", long.as_str()), &plain(), kvm, FailureKind::Invalid, "1024 are possible"),
        ] {
            let error = shape_of(&[said], pod, engine).unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(words), "{error}");
        }
        assert_eq!(shape_of(&[("memory", "512Mi")], &limited, kvm).unwrap().memory_mib, Some(512));
        assert_eq!(shape_of(&[("memory", "556Mi")], &over, kvm).unwrap().memory_mib, Some(556));
        assert_eq!(shape_of(&[("spec", odd)], &plain(), EngineKind::Qemu).unwrap().processors.unwrap().count(), 4);
    }
}
