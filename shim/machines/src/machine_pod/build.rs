//! Converts an admitted specification into a machine, and rejects unsupported fields by name. Pure.

use super::clock::convert_clock;
use super::cpu::cpu_model;
use super::kernel::convert_kernel;
use super::networks::build_cards;
use super::rejection::{PROBES, SpecRejection, reject_value};
use super::serving::plan_serving;
use super::{credentials, supported};
use crate::MachineSettings;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use nacelle_base::machine::CpuModel;
use nacelle_model::StringMap;
use nacelle_model::machine::{
    Board, Bus, Cache, CloudInit, CloudInitForm, Disk, DiskKind, Filesystem, Firmware, MachineDocument, Processors,
    RunStrategy as MachineRunStrategy, Serving, SmbiosIdentity, WatchdogAction,
};
use nacelle_model::machine_pod::{MachinePod, RequestedDiskSource};
use nacelle_model::pod::{PodConfig, PodName};
use nacelle_vmi::admit::Admitted;
use nacelle_vmi::spec::{self as vmi, HostDiskKind, InstanceSpec, NicModel, Power, RunStrategy};

const BOARD: &str = "spec.domain.machine.type";

/// Returns the unsupported fields.
pub fn unsupported_fields(admitted: &Admitted) -> Vec<String> {
    let fields = supported::find_unsupported(&nacelle_vmi::version::written(admitted.spec()));
    // A whole probe is reported as one field.
    let probe = |field: &str| PROBES.iter().find(|probe| field.starts_with(*probe)).map(|probe| (*probe).to_owned());
    let mut fields: Vec<String> = fields.into_iter().map(|field| probe(&field).unwrap_or(field)).collect();
    fields.dedup();
    fields.into_iter().map(|field| format!("spec.{field}")).collect()
}

/// Returns the first unsupported value among the supported fields.
pub fn first_unsupported_value(admitted: &Admitted) -> Option<SpecRejection> {
    let text = String::new;
    let name = PodName { name: text(), namespace: text(), uid: text(), attempt: 0 };
    let owner = MachineOwner { name: &name, hostname: "", annotations: &StringMap::new() };
    build_machine(admitted, owner, &MachineSettings::default()).err()
}

/// Builds the machine of a pod.
pub fn build(admitted: &Admitted, pod: &PodConfig, machines: &MachineSettings) -> Result<MachinePod, SpecRejection> {
    let fields = unsupported_fields(admitted);
    if !fields.is_empty() {
        return Err(SpecRejection::Fields { fields });
    }
    let owner = MachineOwner { name: &pod.name, hostname: &pod.hostname, annotations: &pod.annotations };
    build_machine(admitted, owner, machines)
}

/// The owner of the machine.
#[derive(Clone, Copy)]
struct MachineOwner<'a> {
    name: &'a PodName,
    hostname: &'a str,
    annotations: &'a StringMap,
}

fn build_machine(
    admitted: &Admitted,
    pod: MachineOwner<'_>,
    machines: &MachineSettings,
) -> Result<MachinePod, SpecRejection> {
    let spec = admitted.spec();
    let strategy = run_strategy(admitted)?;
    if spec.architecture.is_some_and(|architecture| architecture != vmi::Architecture::Amd64) {
        return reject_value("spec.architecture", format!("{:?}", spec.architecture), "this node is an amd64");
    }
    let domain = &spec.domain;
    let devices = &domain.devices;
    for (field, asked) in [
        ("autoattachSerialConsole", devices.autoattach_serial_console),
        ("logSerialConsole", devices.log_serial_console),
    ] {
        if asked == Some(false) {
            return reject_value(
                format!("spec.domain.devices.{field}"),
                false,
                "the console is the container's output",
            );
        }
    }
    if domain.features.as_ref().and_then(|features| features.acpi.as_ref()).is_some_and(|acpi| !acpi.on()) {
        return reject_value("spec.domain.features.acpi.enabled", false, "without it there is no power button");
    }
    if domain
        .features
        .as_ref()
        .and_then(|features| features.apic.as_ref())
        .is_some_and(|apic| apic.enabled == Some(false))
    {
        return reject_value("spec.domain.features.apic.enabled", false, "every processor has one");
    }
    let board = convert_board(domain)?;
    if board == Board::Microvm {
        check_microvm(spec)?;
    }
    let processors = convert_processors(domain.cpu.as_ref())?;
    let (hugepages, largest_pages) = convert_hugepages(domain)?;
    let serving = plan_serving(spec, processors.count(), board)?;
    let cards = build_cards(spec, pod.annotations, &pod.name.namespace, processors.count())?;
    Ok(MachineDocument {
        name: format!("{}/{}", pod.name.namespace, pod.name.name),
        processors,
        memory_mib: guest_memory_mib(domain)?,
        hugepages,
        largest_pages,
        board,
        firmware: convert_firmware(domain, machines, admitted.name().is_some())?,
        kernel: convert_kernel(spec)?,
        clock: convert_clock(domain, board)?,
        identity: smbios_identity(domain),
        disks: convert_disks(spec, serving, admitted.ssh_keys(), pod)?,
        filesystems: convert_filesystems(spec)?,
        cards,
        host_devices: Vec::new(),
        credentials: credentials::access_credentials(spec),
        screen: devices.autoattach_graphics_device == Some(true),
        tablet: has_tablet(devices)?,
        random: devices.rng.is_some(),
        balloon: devices.autoattach_mem_balloon != Some(false),
        watchdog: devices.watchdog.as_ref().and_then(|watchdog| watchdog.i6300esb.as_ref()).map(|card| {
            match card.action {
                Some(vmi::WatchdogAction::Shutdown) => WatchdogAction::Shutdown,
                Some(vmi::WatchdogAction::Poweroff) => WatchdogAction::Poweroff,
                Some(vmi::WatchdogAction::Reset) | None => WatchdogAction::Reset,
            }
        }),
        ends_at_reboot: domain.reboot_policy == Some(vmi::RebootPolicy::Terminate),
        paused: admitted.power() == Power::Paused || spec.start_strategy.is_some(),
        strategy,
        keep: None,
    })
}

/// Returns the run strategy of a persistent VM; `None` for a machine that ends with its pod.
fn run_strategy(admitted: &Admitted) -> Result<Option<MachineRunStrategy>, SpecRejection> {
    let off = admitted.power() == Power::Off;
    if admitted.name().is_none() {
        if off {
            return reject_value(
                "vm.nacelle.dev/power",
                "off",
                "only a persistent VM can be off: set vm.nacelle.dev/name",
            );
        }
        return match admitted.run_strategy() {
            None | Some(RunStrategy::Always) => Ok(None),
            Some(other) => {
                let instead = "the pod's restartPolicy applies to a VM without a name: set vm.nacelle.dev/name, or remove the annotation";
                reject_value("vm.nacelle.dev/run-strategy", format!("{other:?}"), instead)
            }
        };
    }
    Ok(Some(match admitted.run_strategy() {
        _ if off => MachineRunStrategy::Halted,
        Some(RunStrategy::RerunOnFailure) => MachineRunStrategy::RerunOnFailure,
        Some(RunStrategy::Once) => MachineRunStrategy::Once,
        Some(RunStrategy::Manual) => MachineRunStrategy::Manual,
        Some(RunStrategy::Halted) => MachineRunStrategy::Halted,
        Some(RunStrategy::Always) | None => MachineRunStrategy::Always,
    }))
}

fn convert_processors(cpu: Option<&vmi::Cpu>) -> Result<Processors, SpecRejection> {
    let cpu = cpu.cloned().unwrap_or_default();
    let or_one = |part: Option<u32>| part.unwrap_or(1);
    let CpuModel { name: model, features, strict } = cpu_model(&cpu)?;
    // The CPUs themselves follow from the container's CPU list.
    let pins = (cpu.dedicated_cpu_placement == Some(true)).then(Vec::new);
    let (sockets, cores, threads) = (or_one(cpu.sockets), or_one(cpu.cores), or_one(cpu.threads));
    Ok(Processors { sockets, cores, threads, model, features, strict, pins })
}

/// Returns the memory in whole MiB, as QEMU counts it.
fn guest_memory_mib(domain: &vmi::Domain) -> Result<u64, SpecRejection> {
    let requested = domain.memory.as_ref().and_then(|memory| memory.guest.as_ref());
    let mib = requested.and_then(|guest| guest.bytes()).map(|bytes| bytes.div_ceil(1 << 20));
    mib.ok_or(SpecRejection::Missing {
        field: "spec.domain.memory.guest",
        rule: "a machine pod must set the memory of its VM",
    })
}

/// Returns whether huge pages back the memory, and whether they are of the largest size.
fn convert_hugepages(domain: &vmi::Domain) -> Result<(bool, bool), SpecRejection> {
    match domain.memory.as_ref().and_then(|memory| memory.hugepages.as_ref()).map(|pages| pages.page_size.as_str()) {
        None => Ok((false, false)),
        Some("2Mi") => Ok((true, false)),
        Some("1Gi") => Ok((true, true)),
        Some(other) => reject_value("spec.domain.memory.hugepages.pageSize", other, "2Mi and 1Gi are supported"),
    }
}

fn convert_board(domain: &vmi::Domain) -> Result<Board, SpecRejection> {
    let kind = domain.machine.as_ref().map_or("q35", |board| board.kind.as_str());
    match kind {
        "q35" => Ok(Board::Q35),
        "pc" => Ok(Board::Pc),
        "microvm" if domain.firmware.as_ref().is_some_and(|firmware| firmware.kernel_boot.is_some()) => {
            Ok(Board::Microvm)
        }
        other => reject_value(BOARD, other, "a machine pod's board is q35 or pc, or, with kernelBoot, microvm"),
    }
}

/// Rejects what the microvm board lacks: PCI, SMBIOS tables and a screen.
fn check_microvm(spec: &InstanceSpec) -> Result<(), SpecRejection> {
    let instead = "the board microvm, which is the default with kernelBoot, does not have it: set spec.domain.machine.type to q35, or remove the field";
    let reject = |field: String, what: &dyn ToString| reject_value(field, what.to_string(), instead);
    let devices = &spec.domain.devices;
    for (n, disk) in devices.disks.iter().enumerate() {
        let cdrom = disk.cdrom.as_ref().and_then(|target| target.bus);
        let bus = cdrom.or(disk.disk.as_ref().and_then(|target| target.bus));
        if let Some(bus @ (vmi::Bus::Sata | vmi::Bus::Usb)) = bus {
            return reject(format!("spec.domain.devices.disks[{n}].bus"), &format!("{bus:?}").to_lowercase());
        }
    }
    for (n, interface) in devices.interfaces.iter().enumerate() {
        if let Some(model) = interface.model.filter(|model| *model != NicModel::Virtio) {
            let field = format!("spec.domain.devices.interfaces[{n}].model");
            return reject(field, &format!("{model:?}").to_lowercase());
        }
    }
    if devices.autoattach_graphics_device == Some(true) {
        return reject("spec.domain.devices.autoattachGraphicsDevice".into(), &true);
    }
    if has_tablet(devices)? {
        return reject("spec.domain.devices.inputs".into(), &"tablet");
    }
    if let Some(watchdog) = &devices.watchdog {
        return reject("spec.domain.devices.watchdog".into(), &watchdog.name);
    }
    let smbios = smbios_identity(&spec.domain);
    for (field, text) in
        [("firmware.uuid", &smbios.uuid), ("firmware.serial", &smbios.serial), ("chassis", &smbios.chassis.concat())]
    {
        if !text.is_empty() {
            return reject(format!("spec.domain.{field}"), text);
        }
    }
    // The guest agent's port, the random source and the balloon; the keeper reserves its own slots.
    let count = devices.disks.len() + devices.filesystems.len() + devices.interfaces.len() + 3;
    match Board::Microvm.places().is_some_and(|places| count > places) {
        true => reject("spec.domain.devices.disks".into(), &count),
        false => Ok(()),
    }
}

fn convert_firmware(domain: &vmi::Domain, machines: &MachineSettings, named: bool) -> Result<Firmware, SpecRejection> {
    let loader = domain.firmware.as_ref().and_then(|firmware| firmware.bootloader.as_ref());
    let Some(efi) = loader.and_then(|loader| loader.efi.as_ref()) else { return Ok(Firmware::Bios {}) };
    if efi.persistent == Some(true) && !named {
        let instead =
            "only a persistent VM keeps its firmware variables: set vm.nacelle.dev/name, or set this to false";
        return reject_value("spec.domain.firmware.bootloader.efi.persistent", true, instead);
    }
    let secure = efi.secure_boot == Some(true);
    if secure && convert_board(domain)? != Board::Q35 {
        let instead = "only the board q35 supports it: set spec.domain.machine.type to q35, or this to false (vm.nacelle.dev/firmware: efi)";
        return reject_value("spec.domain.firmware.bootloader.efi.secureBoot", true, instead);
    }
    let (code, variables) = match secure {
        true => (&machines.efi_secure_code, &machines.efi_secure_variables),
        false => (&machines.efi_code, &machines.efi_variables),
    };
    Ok(Firmware::Efi { code: code.clone(), variables: variables.clone(), secure })
}

fn smbios_identity(domain: &vmi::Domain) -> SmbiosIdentity {
    let firmware = domain.firmware.clone().unwrap_or_default();
    let case = domain.chassis.clone().unwrap_or_default();
    SmbiosIdentity {
        uuid: firmware.uuid,
        serial: firmware.serial,
        chassis: [case.manufacturer, case.version, case.serial, case.asset, case.sku],
    }
}

fn has_tablet(devices: &vmi::Devices) -> Result<bool, SpecRejection> {
    for (n, input) in devices.inputs.iter().enumerate() {
        if input.kind != Some(vmi::InputKind::Tablet) || input.bus != Some(vmi::InputBus::Usb) {
            let instead = "a tablet on bus usb is supported";
            return reject_value(format!("spec.domain.devices.inputs[{n}]"), &input.name, instead);
        }
    }
    Ok(!devices.inputs.is_empty() || devices.autoattach_input_device == Some(true))
}

fn convert_disks(
    spec: &InstanceSpec,
    serving: Vec<Serving>,
    keys: &[String],
    pod: MachineOwner<'_>,
) -> Result<Vec<Disk<RequestedDiskSource>>, SpecRejection> {
    let disks = spec.domain.devices.disks.iter().enumerate().zip(serving);
    disks.map(|((n, disk), serving)| Ok(Disk { serving, ..convert_disk(n, disk, spec, keys, pod)? })).collect()
}

fn convert_disk(
    n: usize,
    disk: &vmi::Disk,
    spec: &InstanceSpec,
    keys: &[String],
    pod: MachineOwner<'_>,
) -> Result<Disk<RequestedDiskSource>, SpecRejection> {
    let path = |field: &str| format!("spec.domain.devices.disks[{n}].{field}");
    let (kind, bus, read_only) = match (&disk.disk, &disk.cdrom) {
        (_, Some(target)) => {
            if target.tray == Some(vmi::Tray::Open) {
                return reject_value(path("cdrom.tray"), "open", "leave it closed");
            }
            if target.readonly == Some(false) {
                return reject_value(path("cdrom.readonly"), false, "a CD-ROM is read-only");
            }
            (DiskKind::Cdrom, target.bus, true)
        }
        (target, None) => {
            let target = target.clone().unwrap_or_default();
            (DiskKind::Disk, target.bus, target.readonly == Some(true))
        }
    };
    let bus = match bus {
        Some(vmi::Bus::Sata) => Bus::Sata,
        Some(vmi::Bus::Scsi) => Bus::Scsi,
        Some(vmi::Bus::Usb) => Bus::Usb,
        Some(vmi::Bus::Virtio) | None => Bus::Virtio,
    };
    let cache = match disk.cache {
        Some(vmi::Cache::None) => Cache::None,
        // The node's page cache would miss the writes of other machines.
        None if disk.shareable == Some(true) => Cache::None,
        Some(vmi::Cache::Writethrough) => Cache::Writethrough,
        Some(vmi::Cache::Writeback) | None => Cache::Writeback,
    };
    let sizes = disk.block_size.as_ref().and_then(|size| size.custom.as_ref());
    let volume = spec
        .volumes
        .iter()
        .find(|volume| volume.name == disk.name)
        .ok_or(SpecRejection::Missing { field: "spec.volumes[]", rule: "each disk has a volume of its name" })?;
    Ok(Disk {
        name: disk.name.clone(),
        kind,
        bus,
        read_only: read_only
            || volume.persistent_volume_claim.as_ref().is_some_and(|claim| claim.read_only == Some(true)),
        boot_order: disk.boot_order,
        serial: disk.serial.clone(),
        cache,
        serving: Serving::default(),
        block_size: sizes.map(|custom| (custom.logical.unwrap_or(512), custom.physical.unwrap_or(512))),
        source: disk_source(volume, spec, keys, pod)?,
    })
}

fn disk_source(
    volume: &vmi::Volume,
    spec: &InstanceSpec,
    keys: &[String],
    pod: MachineOwner<'_>,
) -> Result<RequestedDiskSource, SpecRejection> {
    if let Some(disk) = &volume.container_disk {
        return Ok(RequestedDiskSource::Image { image: disk.image.clone(), path: disk.path.clone() });
    }
    if let Some(disk) = &volume.empty_disk {
        let bytes = disk.capacity.as_ref().and_then(|capacity| capacity.bytes());
        let rule = "an empty disk has a size";
        let bytes = bytes.ok_or(SpecRejection::Missing { field: "spec.volumes[].emptyDisk.capacity", rule })?;
        return Ok(RequestedDiskSource::Empty { bytes: bytes.next_multiple_of(512) });
    }
    if let Some(claim) = &volume.persistent_volume_claim {
        return Ok(RequestedDiskSource::Claim { claim: claim.claim_name.clone() });
    }
    if let Some(disk) = &volume.host_disk {
        let bytes = disk.capacity.as_ref().and_then(|capacity| capacity.bytes());
        let create =
            bytes.map(|bytes| bytes.next_multiple_of(512)).filter(|_| disk.kind == Some(HostDiskKind::DiskOrCreate));
        return Ok(RequestedDiskSource::HostDisk { path: disk.path.clone(), create });
    }
    if let Some(source) = files_source(volume)? {
        return Ok(source);
    }
    let Some((form, data)) = volume.cloud_init() else {
        let sources = volume.sources().join(", ");
        let instead = "containerDisk, persistentVolumeClaim, hostDisk, emptyDisk, configMap, secret, downwardAPI and cloud-init are supported";
        return reject_value(format!("spec.volumes[{}]", volume.name), sources, instead);
    };
    let text = |plain: &str, coded: &str, field: &str| {
        if coded.is_empty() {
            return Ok(plain.to_owned());
        }
        let invalid = || SpecRejection::Invalid {
            field: format!("spec.volumes[{}].{form}.{field}Base64", volume.name),
            rule: "text in base64 is expected",
        };
        let bytes = STANDARD.decode(coded.trim()).map_err(|_error| invalid())?;
        String::from_utf8(bytes).map_err(|_error| invalid())
    };
    let network = text(&data.network_data, &data.network_data_base64, "networkData")?;
    let secret = |reference: &Option<vmi::LocalReference>| reference.as_ref().map(|secret| secret.name.clone());
    let (user, network_secret) = (secret(&data.secret_ref), secret(&data.network_data_secret_ref));
    let key_secrets = public_key_secrets(spec, form);
    let data = CloudInit {
        form: if form == "cloudInitNoCloud" { CloudInitForm::NoCloud } else { CloudInitForm::ConfigDrive },
        instance: format!("{}-{}", pod.name.name, pod.name.uid),
        hostname: pod.hostname.to_owned(),
        keys: keys.to_vec(),
        user_data: text(&data.user_data, &data.user_data_base64, "userData")?,
        network_data: Some(network).filter(|network| !network.is_empty()),
    };
    if user.is_none() && network_secret.is_none() && key_secrets.is_empty() {
        return Ok(RequestedDiskSource::CloudInit(data));
    }
    Ok(RequestedDiskSource::CloudInitOf { data, user, network: network_secret, keys: key_secrets })
}

/// Returns the file systems that the guest mounts.
fn convert_filesystems(spec: &InstanceSpec) -> Result<Vec<Filesystem>, SpecRejection> {
    let one = |(n, one): (usize, &vmi::Filesystem)| {
        let volume = spec.volumes.iter().find(|volume| volume.name == one.name);
        let what = volume.and_then(|volume| {
            let claim = volume.persistent_volume_claim.as_ref().map(|claim| format!("claim {}", claim.claim_name));
            let map = volume.config_map.as_ref().map(|map| format!("configMap {}", map.name));
            let secret = volume.secret.as_ref().map(|secret| format!("secret {}", secret.secret_name));
            let fields = volume.downward_api.as_ref().map(|_| format!("downwardAPI {}", volume.name));
            claim.or(map).or(secret).or(fields)
        });
        match what {
            Some(what) => Ok(Filesystem { name: one.name.clone(), what }),
            None => {
                let instead = "persistentVolumeClaim, configMap, secret and downwardAPI are supported";
                reject_value(format!("spec.domain.devices.filesystems[{n}].name"), &one.name, instead)
            }
        }
    };
    spec.domain.devices.filesystems.iter().enumerate().map(one).collect()
}

/// The default label of a disk with files, the same as KubeVirt's.
const LABEL: &str = "cfgdata";
/// The longest label of a FAT file system in bytes.
const LONGEST_LABEL: usize = 11;

/// Returns the source of a disk with files that kubelet writes.
fn files_source(volume: &vmi::Volume) -> Result<Option<RequestedDiskSource>, SpecRejection> {
    let (kind, what, label, expected) = if let Some(map) = &volume.config_map {
        ("configMap", &map.name, &map.volume_label, Vec::new())
    } else if let Some(secret) = &volume.secret {
        ("secret", &secret.secret_name, &secret.volume_label, Vec::new())
    } else if let Some(downward) = &volume.downward_api {
        let expected = downward.fields.iter().map(|file| file.path.clone()).collect();
        ("downwardAPI", &volume.name, &downward.volume_label, expected)
    } else {
        return Ok(None);
    };
    if label.len() > LONGEST_LABEL {
        let field = format!("spec.volumes[{}].{kind}.volumeLabel", volume.name);
        return reject_value(field, label, "the disk is a FAT file system, whose label has at most 11 bytes");
    }
    let label = if label.is_empty() { LABEL.to_owned() } else { label.clone() };
    Ok(Some(RequestedDiskSource::Files { what: format!("{kind} {what}"), label, expected }))
}

/// Returns the Secrets with public keys that get into the guest by this form of cloud-init data.
fn public_key_secrets(spec: &InstanceSpec, form: &str) -> Vec<String> {
    let keys = spec.access_credentials.iter().filter_map(|credential| credential.ssh_public_key.as_ref());
    let of_form = keys.filter(|key| {
        key.propagation_method.as_ref().is_some_and(|method| match form {
            "cloudInitNoCloud" => method.no_cloud.is_some(),
            _ => method.config_drive.is_some(),
        })
    });
    let mut names: Vec<String> =
        of_form.filter_map(|key| Some(key.source.as_ref()?.secret.as_ref()?.secret_name.clone())).collect();
    names.sort();
    names.dedup();
    names
}
