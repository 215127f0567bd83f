//! Converts an admitted specification into a machine, and rejects unsupported fields by name. Pure.

use super::clock::clock;
use super::cpu::cpu_model;
use super::kernel::kernel;
use super::networks::cards;
use super::serving::serving;
use super::{credentials, honoured};
use crate::MachineSettings;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use nacelle_base::machine::CpuModel;
use nacelle_base::{Classify, Kind};
use nacelle_model::StringMap;
use nacelle_model::machine::{
    Board, Bus, Cache, CloudInit, CloudInitForm, Disk, DiskKind, Filesystem, Firmware, MachineDocument, Processors,
    RunStrategy as Runs, Serving, SmbiosIdentity, WatchdogAction,
};
use nacelle_model::machine_pod::{MachinePod, RequestedDiskSource};
use nacelle_model::pod::{PodConfig, PodName};
use nacelle_vmi::admit::Admitted;
use nacelle_vmi::spec::{self as vmi, HostDiskKind, InstanceSpec, NicModel, Power, RunStrategy};

/// Probes that kubelet runs and the runtime ignores.
const PROBES: [&str; 2] = ["livenessProbe", "readinessProbe"];
const BOARD: &str = "spec.domain.machine.type";

/// Why a valid specification cannot be run by this version.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The specification contains unsupported fields.
    #[error(
        "this version of Nacelle does not run machines with {}: take them out (docs/reference/vm-fields.md){}",
        fields.join(", "),
        fields.iter().find_map(|field| reason(field)).map(|why| format!("; {why}")).unwrap_or_default()
    )]
    Fields {
        /// The fields' paths.
        fields: Vec<String>,
    },
    /// The value is not supported.
    #[error("{field} is {value:?}, which this version of Nacelle does not run: {instead}")]
    Value {
        /// The field's path.
        field: String,
        /// The value.
        value: String,
        /// A supported alternative.
        instead: &'static str,
    },
    /// A required field is missing.
    #[error("{field} is missing: {rule}")]
    Missing {
        /// The field's path.
        field: &'static str,
        /// The reason.
        rule: &'static str,
    },
    /// A value breaks a rule that only the conversion checks.
    #[error("{field} is wrong: {rule}")]
    Wrong {
        /// The field's path.
        field: String,
        /// The broken rule.
        rule: &'static str,
    },
}

impl Refused {
    /// Returns the field of the rejected value, with which the error text begins.
    pub fn field(&self) -> &str {
        match self {
            Refused::Fields { .. } => "",
            Refused::Missing { field, .. } => field,
            Refused::Value { field, .. } | Refused::Wrong { field, .. } => field,
        }
    }
}

impl Classify for Refused {
    fn kind(&self) -> Kind {
        match self {
            Refused::Fields { .. } | Refused::Value { .. } => Kind::Unsupported,
            Refused::Missing { .. } | Refused::Wrong { .. } => Kind::Invalid,
        }
    }
}

pub(super) fn value<T>(field: impl Into<String>, value: impl ToString, instead: &'static str) -> Result<T, Refused> {
    Err(Refused::Value { field: field.into(), value: value.to_string(), instead })
}

/// Returns the unsupported fields.
pub fn not_honoured(admitted: &Admitted) -> Vec<String> {
    let fields = honoured::others(&nacelle_vmi::version::written(admitted.spec()));
    // A whole probe is reported as one field.
    let probe = |field: &str| PROBES.iter().find(|probe| field.starts_with(*probe)).map(|probe| (*probe).to_owned());
    let mut fields: Vec<String> = fields.into_iter().map(|field| probe(&field).unwrap_or(field)).collect();
    fields.dedup();
    fields.into_iter().map(|field| format!("spec.{field}")).collect()
}

/// Returns why the field is not supported, where a reason is known.
pub fn reason(field: &str) -> Option<&'static str> {
    let probe = field.strip_prefix("spec.").is_some_and(|field| PROBES.contains(&field));
    probe.then_some(
        "kubelet asks probes, and a runtime cannot tell it what came of them: they are the pod's container's (nacelle vm convert puts them there)",
    )
}

/// Returns the first unsupported value among the supported fields.
pub fn refused_value(admitted: &Admitted) -> Option<Refused> {
    let text = String::new;
    let name = PodName { name: text(), namespace: text(), uid: text(), attempt: 0 };
    let whose = Whose { name: &name, hostname: "", annotations: &StringMap::new() };
    made(admitted, whose, &MachineSettings::default()).err()
}

/// Builds the machine of a pod.
pub fn build(admitted: &Admitted, pod: &PodConfig, machines: &MachineSettings) -> Result<MachinePod, Refused> {
    let fields = not_honoured(admitted);
    if !fields.is_empty() {
        return Err(Refused::Fields { fields });
    }
    let whose = Whose { name: &pod.name, hostname: &pod.hostname, annotations: &pod.annotations };
    made(admitted, whose, machines)
}

/// The owner of the machine.
#[derive(Clone, Copy)]
struct Whose<'a> {
    name: &'a PodName,
    hostname: &'a str,
    annotations: &'a StringMap,
}

fn made(admitted: &Admitted, pod: Whose<'_>, machines: &MachineSettings) -> Result<MachinePod, Refused> {
    let spec = admitted.spec();
    let strategy = strategy(admitted)?;
    if spec.architecture.is_some_and(|architecture| architecture != vmi::Architecture::Amd64) {
        return value("spec.architecture", format!("{:?}", spec.architecture), "this node is an amd64");
    }
    let domain = &spec.domain;
    let devices = &domain.devices;
    for (field, asked) in [
        ("autoattachSerialConsole", devices.autoattach_serial_console),
        ("logSerialConsole", devices.log_serial_console),
    ] {
        if asked == Some(false) {
            return value(format!("spec.domain.devices.{field}"), false, "the console is the container's output");
        }
    }
    if domain.features.as_ref().and_then(|features| features.acpi.as_ref()).is_some_and(|acpi| !acpi.on()) {
        return value("spec.domain.features.acpi.enabled", false, "without it there is no power button");
    }
    if domain
        .features
        .as_ref()
        .and_then(|features| features.apic.as_ref())
        .is_some_and(|apic| apic.enabled == Some(false))
    {
        return value("spec.domain.features.apic.enabled", false, "every processor has one");
    }
    let board = board(domain)?;
    if board == Board::Microvm {
        microvm(spec)?;
    }
    let processors = processors(domain.cpu.as_ref())?;
    let (hugepages, largest_pages) = hugepages(domain)?;
    let serving = serving(spec, processors.count(), board)?;
    let cards = cards(spec, pod.annotations, &pod.name.namespace, processors.count())?;
    Ok(MachineDocument {
        name: format!("{}/{}", pod.name.namespace, pod.name.name),
        processors,
        memory_mib: memory_mib(domain)?,
        hugepages,
        largest_pages,
        board,
        firmware: firmware(domain, machines, admitted.name().is_some())?,
        kernel: kernel(spec)?,
        clock: clock(domain, board)?,
        identity: identity(domain),
        disks: disks(spec, serving, admitted.ssh_keys(), pod)?,
        filesystems: filesystems(spec)?,
        cards,
        host_devices: Vec::new(),
        credentials: credentials::of(spec),
        screen: devices.autoattach_graphics_device == Some(true),
        tablet: tablet(devices)?,
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
fn strategy(admitted: &Admitted) -> Result<Option<Runs>, Refused> {
    let off = admitted.power() == Power::Off;
    if admitted.name().is_none() {
        if off {
            return value("vm.nacelle.dev/power", "off", "only a machine that outlives its pod can be off: name it");
        }
        return match admitted.run_strategy() {
            None | Some(RunStrategy::Always) => Ok(None),
            Some(other) => {
                let instead =
                    "a machine that goes with its pod runs as the pod's restartPolicy says: name it, or leave it out";
                value("vm.nacelle.dev/run-strategy", format!("{other:?}"), instead)
            }
        };
    }
    Ok(Some(match admitted.run_strategy() {
        _ if off => Runs::Halted,
        Some(RunStrategy::RerunOnFailure) => Runs::RerunOnFailure,
        Some(RunStrategy::Once) => Runs::Once,
        Some(RunStrategy::Manual) => Runs::Manual,
        Some(RunStrategy::Halted) => Runs::Halted,
        Some(RunStrategy::Always) | None => Runs::Always,
    }))
}

fn processors(cpu: Option<&vmi::Cpu>) -> Result<Processors, Refused> {
    let cpu = cpu.cloned().unwrap_or_default();
    let one = |part: Option<u32>| part.unwrap_or(1);
    let CpuModel { name: model, features, strict } = cpu_model(&cpu)?;
    // The CPUs themselves follow from the container's CPU list.
    let pins = (cpu.dedicated_cpu_placement == Some(true)).then(Vec::new);
    let (sockets, cores, threads) = (one(cpu.sockets), one(cpu.cores), one(cpu.threads));
    Ok(Processors { sockets, cores, threads, model, features, strict, pins })
}

/// Returns the memory in whole MiB, as QEMU counts it.
fn memory_mib(domain: &vmi::Domain) -> Result<u64, Refused> {
    let said = domain.memory.as_ref().and_then(|memory| memory.guest.as_ref());
    let mib = said.and_then(|guest| guest.bytes()).map(|bytes| bytes.div_ceil(1 << 20));
    mib.ok_or(Refused::Missing { field: "spec.domain.memory.guest", rule: "a machine must say how much memory it has" })
}

/// Returns whether huge pages back the memory, and whether they are of the largest size.
fn hugepages(domain: &vmi::Domain) -> Result<(bool, bool), Refused> {
    match domain.memory.as_ref().and_then(|memory| memory.hugepages.as_ref()).map(|pages| pages.page_size.as_str()) {
        None => Ok((false, false)),
        Some("2Mi") => Ok((true, false)),
        Some("1Gi") => Ok((true, true)),
        Some(other) => value("spec.domain.memory.hugepages.pageSize", other, "2Mi and 1Gi are possible"),
    }
}

fn board(domain: &vmi::Domain) -> Result<Board, Refused> {
    let kind = domain.machine.as_ref().map_or("q35", |board| board.kind.as_str());
    match kind {
        "q35" => Ok(Board::Q35),
        "pc" => Ok(Board::Pc),
        "microvm" if domain.firmware.as_ref().is_some_and(|firmware| firmware.kernel_boot.is_some()) => {
            Ok(Board::Microvm)
        }
        other => value(BOARD, other, "a machine pod's board is q35 or pc, or, with kernelBoot, microvm"),
    }
}

/// Rejects what the microvm board lacks: PCI, SMBIOS tables and a screen.
fn microvm(spec: &InstanceSpec) -> Result<(), Refused> {
    let instead = "the board microvm, which kernelBoot has where none is said, does not have it: say spec.domain.machine.type q35, or take it out";
    let refuse = |field: String, what: &dyn ToString| value(field, what.to_string(), instead);
    let devices = &spec.domain.devices;
    for (n, disk) in devices.disks.iter().enumerate() {
        let cdrom = disk.cdrom.as_ref().and_then(|target| target.bus);
        let bus = cdrom.or(disk.disk.as_ref().and_then(|target| target.bus));
        if let Some(bus @ (vmi::Bus::Sata | vmi::Bus::Usb)) = bus {
            return refuse(format!("spec.domain.devices.disks[{n}].bus"), &format!("{bus:?}").to_lowercase());
        }
    }
    for (n, interface) in devices.interfaces.iter().enumerate() {
        if let Some(model) = interface.model.filter(|model| *model != NicModel::Virtio) {
            let field = format!("spec.domain.devices.interfaces[{n}].model");
            return refuse(field, &format!("{model:?}").to_lowercase());
        }
    }
    if devices.autoattach_graphics_device == Some(true) {
        return refuse("spec.domain.devices.autoattachGraphicsDevice".into(), &true);
    }
    if tablet(devices)? {
        return refuse("spec.domain.devices.inputs".into(), &"tablet");
    }
    if let Some(watchdog) = &devices.watchdog {
        return refuse("spec.domain.devices.watchdog".into(), &watchdog.name);
    }
    let told = identity(&spec.domain);
    for (field, said) in
        [("firmware.uuid", &told.uuid), ("firmware.serial", &told.serial), ("chassis", &told.chassis.concat())]
    {
        if !said.is_empty() {
            return refuse(format!("spec.domain.{field}"), said);
        }
    }
    // The guest agent's port, the random source and the balloon; the keeper reserves its own slots.
    let count = devices.disks.len() + devices.filesystems.len() + devices.interfaces.len() + 3;
    match Board::Microvm.places().is_some_and(|places| count > places) {
        true => refuse("spec.domain.devices.disks".into(), &count),
        false => Ok(()),
    }
}

fn firmware(domain: &vmi::Domain, machines: &MachineSettings, named: bool) -> Result<Firmware, Refused> {
    let loader = domain.firmware.as_ref().and_then(|firmware| firmware.bootloader.as_ref());
    let Some(efi) = loader.and_then(|loader| loader.efi.as_ref()) else { return Ok(Firmware::Bios {}) };
    if efi.persistent == Some(true) && !named {
        let instead = "only a machine that outlives its pod keeps them: name it (vm.nacelle.dev/name), or say false";
        return value("spec.domain.firmware.bootloader.efi.persistent", true, instead);
    }
    let secure = efi.secure_boot == Some(true);
    if secure && board(domain)? != Board::Q35 {
        let instead =
            "only the board q35 can do it: say spec.domain.machine.type q35, or false (vm.nacelle.dev/firmware: efi)";
        return value("spec.domain.firmware.bootloader.efi.secureBoot", true, instead);
    }
    let (code, variables) = match secure {
        true => (&machines.efi_secure_code, &machines.efi_secure_variables),
        false => (&machines.efi_code, &machines.efi_variables),
    };
    Ok(Firmware::Efi { code: code.clone(), variables: variables.clone(), secure })
}

fn identity(domain: &vmi::Domain) -> SmbiosIdentity {
    let firmware = domain.firmware.clone().unwrap_or_default();
    let case = domain.chassis.clone().unwrap_or_default();
    SmbiosIdentity {
        uuid: firmware.uuid,
        serial: firmware.serial,
        chassis: [case.manufacturer, case.version, case.serial, case.asset, case.sku],
    }
}

fn tablet(devices: &vmi::Devices) -> Result<bool, Refused> {
    for (n, input) in devices.inputs.iter().enumerate() {
        if input.kind != Some(vmi::InputKind::Tablet) || input.bus != Some(vmi::InputBus::Usb) {
            let instead = "a tablet on bus usb is possible";
            return value(format!("spec.domain.devices.inputs[{n}]"), &input.name, instead);
        }
    }
    Ok(!devices.inputs.is_empty() || devices.autoattach_input_device == Some(true))
}

fn disks(
    spec: &InstanceSpec,
    serving: Vec<Serving>,
    keys: &[String],
    pod: Whose<'_>,
) -> Result<Vec<Disk<RequestedDiskSource>>, Refused> {
    let disks = spec.domain.devices.disks.iter().enumerate().zip(serving);
    disks.map(|((n, disk), serving)| Ok(Disk { serving, ..one_disk(n, disk, spec, keys, pod)? })).collect()
}

fn one_disk(
    n: usize,
    disk: &vmi::Disk,
    spec: &InstanceSpec,
    keys: &[String],
    pod: Whose<'_>,
) -> Result<Disk<RequestedDiskSource>, Refused> {
    let place = |field: &str| format!("spec.domain.devices.disks[{n}].{field}");
    let (kind, bus, read_only) = match (&disk.disk, &disk.cdrom) {
        (_, Some(target)) => {
            if target.tray == Some(vmi::Tray::Open) {
                return value(place("cdrom.tray"), "open", "leave it closed");
            }
            if target.readonly == Some(false) {
                return value(place("cdrom.readonly"), false, "a disc is read-only");
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
        .ok_or(Refused::Missing { field: "spec.volumes[]", rule: "each disk has a volume of its name" })?;
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
        source: wish(volume, spec, keys, pod)?,
    })
}

fn wish(
    volume: &vmi::Volume,
    spec: &InstanceSpec,
    keys: &[String],
    pod: Whose<'_>,
) -> Result<RequestedDiskSource, Refused> {
    if let Some(disk) = &volume.container_disk {
        return Ok(RequestedDiskSource::Image { image: disk.image.clone(), path: disk.path.clone() });
    }
    if let Some(disk) = &volume.empty_disk {
        let bytes = disk.capacity.as_ref().and_then(|capacity| capacity.bytes());
        let rule = "an empty disk has a size";
        let bytes = bytes.ok_or(Refused::Missing { field: "spec.volumes[].emptyDisk.capacity", rule })?;
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
    if let Some(wish) = files(volume)? {
        return Ok(wish);
    }
    let Some((form, data)) = volume.cloud_init() else {
        let sources = volume.sources().join(", ");
        let instead = "containerDisk, persistentVolumeClaim, hostDisk, emptyDisk, configMap, secret, downwardAPI and cloud-init are possible";
        return value(format!("spec.volumes[{}]", volume.name), sources, instead);
    };
    let text = |plain: &str, coded: &str, field: &str| {
        if coded.is_empty() {
            return Ok(plain.to_owned());
        }
        let wrong = || Refused::Wrong {
            field: format!("spec.volumes[{}].{form}.{field}Base64", volume.name),
            rule: "text in base64 is expected",
        };
        let bytes = STANDARD.decode(coded.trim()).map_err(|_wrong| wrong())?;
        String::from_utf8(bytes).map_err(|_wrong| wrong())
    };
    let network = text(&data.network_data, &data.network_data_base64, "networkData")?;
    let secret = |reference: &Option<vmi::LocalReference>| reference.as_ref().map(|secret| secret.name.clone());
    let (user, secrets) = (secret(&data.secret_ref), secret(&data.network_data_secret_ref));
    let of_keys = key_secrets(spec, form);
    let data = CloudInit {
        form: if form == "cloudInitNoCloud" { CloudInitForm::NoCloud } else { CloudInitForm::ConfigDrive },
        instance: format!("{}-{}", pod.name.name, pod.name.uid),
        hostname: pod.hostname.to_owned(),
        keys: keys.to_vec(),
        user_data: text(&data.user_data, &data.user_data_base64, "userData")?,
        network_data: Some(network).filter(|network| !network.is_empty()),
    };
    if user.is_none() && secrets.is_none() && of_keys.is_empty() {
        return Ok(RequestedDiskSource::CloudInit(data));
    }
    Ok(RequestedDiskSource::CloudInitOf { data, user, network: secrets, keys: of_keys })
}

/// Returns the file systems that the guest mounts.
fn filesystems(spec: &InstanceSpec) -> Result<Vec<Filesystem>, Refused> {
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
                let instead = "persistentVolumeClaim, configMap, secret and downwardAPI are possible";
                value(format!("spec.domain.devices.filesystems[{n}].name"), &one.name, instead)
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
fn files(volume: &vmi::Volume) -> Result<Option<RequestedDiskSource>, Refused> {
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
        return value(field, label, "the disk is a FAT file system: at most 11 letters are possible");
    }
    let label = if label.is_empty() { LABEL.to_owned() } else { label.clone() };
    Ok(Some(RequestedDiskSource::Files { what: format!("{kind} {what}"), label, expected }))
}

/// Returns the Secrets with public keys that get into the guest by this form of cloud-init data.
fn key_secrets(spec: &InstanceSpec, form: &str) -> Vec<String> {
    let keys = spec.access_credentials.iter().filter_map(|credential| credential.ssh_public_key.as_ref());
    let ours = keys.filter(|key| {
        key.propagation_method.as_ref().is_some_and(|way| match form {
            "cloudInitNoCloud" => way.no_cloud.is_some(),
            _ => way.config_drive.is_some(),
        })
    });
    let mut names: Vec<String> =
        ours.filter_map(|key| Some(key.source.as_ref()?.secret.as_ref()?.secret_name.clone())).collect();
    names.sort();
    names.dedup();
    names
}
