//! Defines version v1alpha1: CPUs are cores, disks in images are registry disks, and a VM runs or does not. The doc comments of
//! the fields are descriptions in the OpenAPI schema.

use crate::Quantity;
use crate::spec::{
    self as v1, Board, Claim, CloudInit, ConfigMap, ContainerDisk, Disk, EmptyDisk, HostDisk, Hugepages, Interface,
    KernelBoot, Matcher, Metadata, Network, Rng, RunStrategy, Secret, document,
};

document! {
    /// A persistent VM.
    pub struct VirtualMachine {
        /// Name, labels, annotations.
        pub metadata: Metadata,
        /// The desired state.
        pub spec: VirtualMachineSpec,
    }

    /// The desired state of a persistent VM.
    pub struct VirtualMachineSpec {
        /// The VM runs.
        pub running: Option<bool>,
        /// The instance type.
        pub instancetype: Option<Matcher>,
        /// The template of a run.
        pub template: Template,
    }

    /// The template of a run.
    pub struct Template {
        /// Labels and annotations of the pod.
        pub metadata: Metadata,
        /// The specification of the run.
        pub spec: InstanceSpec,
    }

    /// One run of a VM.
    pub struct InstanceSpec {
        /// The VM.
        pub domain: Domain,
        /// The volumes of the disks.
        pub volumes: Vec<Volume>,
        /// The networks of the interfaces.
        pub networks: Vec<Network>,
        /// The grace period of the guest for its shutdown, in seconds.
        pub termination_grace_period_seconds: Option<i64>,
    }

    /// The VM.
    pub struct Domain {
        /// vCPUs.
        pub cpu: Option<Cpu>,
        /// Memory.
        pub memory: Option<Memory>,
        /// The board (machine type).
        pub machine: Option<Board>,
        /// The identity in SMBIOS, and the kernel to boot.
        pub firmware: Option<Firmware>,
        /// Devices.
        pub devices: Devices,
    }

    /// vCPUs.
    pub struct Cpu {
        /// The number.
        pub cores: Option<u32>,
        /// The model.
        pub model: String,
    }

    /// Memory.
    pub struct Memory {
        /// The memory that the guest sees.
        pub guest: Option<Quantity>,
        /// The hugepages of the node that back the memory.
        pub hugepages: Option<Hugepages>,
    }

    /// The identity in SMBIOS, and the kernel to boot.
    pub struct Firmware {
        /// The UUID.
        pub uuid: String,
        /// The serial number.
        pub serial: String,
        /// A kernel that is booted directly, without firmware.
        pub kernel_boot: Option<KernelBoot>,
    }

    /// Devices.
    pub struct Devices {
        /// Disks.
        pub disks: Vec<Disk>,
        /// Network interfaces.
        pub interfaces: Vec<Interface>,
        /// A virtio random number generator.
        pub rng: Option<Rng>,
        /// A display.
        pub autoattach_graphics_device: Option<bool>,
    }

    /// A volume: its name and one source.
    pub struct Volume {
        /// The name.
        pub name: String,
        /// A disk in an image: `containerDisk` of v1.
        pub registry_disk: Option<ContainerDisk>,
        /// A PersistentVolumeClaim.
        pub persistent_volume_claim: Option<Claim>,
        /// An empty disk.
        pub empty_disk: Option<EmptyDisk>,
        /// A disk image in a file of the node.
        pub host_disk: Option<HostDisk>,
        /// A disk for cloud-init.
        pub cloud_init_no_cloud: Option<CloudInit>,
        /// A disk with the files of a ConfigMap.
        pub config_map: Option<ConfigMap>,
        /// A disk with the files of a Secret.
        pub secret: Option<Secret>,
    }
}

impl From<&v1::VirtualMachine> for VirtualMachine {
    fn from(new: &v1::VirtualMachine) -> VirtualMachine {
        let running =
            |strategy| matches!(strategy, RunStrategy::Always | RunStrategy::RerunOnFailure | RunStrategy::Once);
        VirtualMachine {
            metadata: new.metadata.clone(),
            spec: VirtualMachineSpec {
                running: new.spec.run_strategy.map(running),
                instancetype: new.spec.instancetype.clone(),
                template: Template {
                    metadata: new.spec.template.metadata.clone(),
                    spec: InstanceSpec::from(&new.spec.template.spec),
                },
            },
        }
    }
}

impl From<&VirtualMachine> for v1::VirtualMachine {
    fn from(old: &VirtualMachine) -> v1::VirtualMachine {
        let strategy = |running| if running { RunStrategy::Always } else { RunStrategy::Halted };
        v1::VirtualMachine {
            metadata: old.metadata.clone(),
            spec: v1::VirtualMachineSpec {
                run_strategy: old.spec.running.map(strategy),
                instancetype: old.spec.instancetype.clone(),
                preference: None,
                template: v1::Template {
                    metadata: old.spec.template.metadata.clone(),
                    spec: v1::InstanceSpec::from(&old.spec.template.spec),
                },
            },
        }
    }
}

impl From<&v1::InstanceSpec> for InstanceSpec {
    fn from(new: &v1::InstanceSpec) -> InstanceSpec {
        let domain = &new.domain;
        let cpu = |cpu: &v1::Cpu| Cpu { cores: cpu.cores, model: cpu.model.clone() };
        let memory = |memory: &v1::Memory| Memory { guest: memory.guest.clone(), hugepages: memory.hugepages.clone() };
        let firmware = |firmware: &v1::Firmware| Firmware {
            uuid: firmware.uuid.clone(),
            serial: firmware.serial.clone(),
            kernel_boot: firmware.kernel_boot.clone(),
        };
        InstanceSpec {
            domain: Domain {
                cpu: domain.cpu.as_ref().map(cpu),
                memory: domain.memory.as_ref().map(memory),
                machine: domain.machine.clone(),
                firmware: domain.firmware.as_ref().map(firmware),
                devices: Devices {
                    disks: domain.devices.disks.clone(),
                    interfaces: domain.devices.interfaces.clone(),
                    rng: domain.devices.rng.clone(),
                    autoattach_graphics_device: domain.devices.autoattach_graphics_device,
                },
            },
            volumes: new.volumes.iter().map(Volume::from).collect(),
            networks: new.networks.clone(),
            termination_grace_period_seconds: new.termination_grace_period_seconds,
        }
    }
}

impl From<&InstanceSpec> for v1::InstanceSpec {
    fn from(old: &InstanceSpec) -> v1::InstanceSpec {
        let domain = &old.domain;
        let cpu = |cpu: &Cpu| v1::Cpu { cores: cpu.cores, model: cpu.model.clone(), ..v1::Cpu::default() };
        let memory = |memory: &Memory| v1::Memory {
            guest: memory.guest.clone(),
            hugepages: memory.hugepages.clone(),
            ..v1::Memory::default()
        };
        let firmware = |firmware: &Firmware| v1::Firmware {
            uuid: firmware.uuid.clone(),
            serial: firmware.serial.clone(),
            kernel_boot: firmware.kernel_boot.clone(),
            ..v1::Firmware::default()
        };
        v1::InstanceSpec {
            domain: v1::Domain {
                cpu: domain.cpu.as_ref().map(cpu),
                memory: domain.memory.as_ref().map(memory),
                machine: domain.machine.clone(),
                firmware: domain.firmware.as_ref().map(firmware),
                devices: v1::Devices {
                    disks: domain.devices.disks.clone(),
                    interfaces: domain.devices.interfaces.clone(),
                    rng: domain.devices.rng.clone(),
                    autoattach_graphics_device: domain.devices.autoattach_graphics_device,
                    ..v1::Devices::default()
                },
                ..v1::Domain::default()
            },
            volumes: old.volumes.iter().map(v1::Volume::from).collect(),
            networks: old.networks.clone(),
            termination_grace_period_seconds: old.termination_grace_period_seconds,
            ..v1::InstanceSpec::default()
        }
    }
}

impl From<&v1::Volume> for Volume {
    fn from(new: &v1::Volume) -> Volume {
        Volume {
            name: new.name.clone(),
            registry_disk: new.container_disk.clone(),
            persistent_volume_claim: new.persistent_volume_claim.clone(),
            empty_disk: new.empty_disk.clone(),
            host_disk: new.host_disk.clone(),
            cloud_init_no_cloud: new.cloud_init_no_cloud.clone(),
            config_map: new.config_map.clone(),
            secret: new.secret.clone(),
        }
    }
}

impl From<&Volume> for v1::Volume {
    fn from(old: &Volume) -> v1::Volume {
        v1::Volume {
            name: old.name.clone(),
            container_disk: old.registry_disk.clone(),
            persistent_volume_claim: old.persistent_volume_claim.clone(),
            empty_disk: old.empty_disk.clone(),
            host_disk: old.host_disk.clone(),
            cloud_init_no_cloud: old.cloud_init_no_cloud.clone(),
            config_map: old.config_map.clone(),
            secret: old.secret.clone(),
            ..v1::Volume::default()
        }
    }
}
