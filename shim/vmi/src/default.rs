//! Sets the defaults of a specification.

use crate::Quantity;
use crate::annotations::PodSettings;
use crate::spec::{
    Board, Bus, CloudInit, Cpu, CpuFeaturePolicy, Disk, DiskTarget, Domain, Empty, InputBus, InstanceSpec, Interface,
    Memory, Network, NicModel, Probe, Protocol, Rng, RunStrategy, SpecKind, Volume, WatchdogAction,
};

/// The default time that a guest has after the power button, in seconds.
const GRACE_SECONDS: i64 = 30;

/// Sets the defaults. Invalid values stay: the rules are checked afterwards.
pub fn fill(spec: &mut InstanceSpec, settings: &mut PodSettings) {
    let kind = *settings.kind.get_or_insert(SpecKind::Container);
    if kind == SpecKind::Machine {
        settings.run_strategy.get_or_insert(RunStrategy::Always);
        machine(spec, settings);
    }
    processors(&mut spec.domain);
    memory(&mut spec.domain);
    disks(spec);
    for interface in &mut spec.domain.devices.interfaces {
        card(interface);
    }
    for network in &mut spec.networks {
        if network.pod.is_none() && network.multus.is_none() {
            network.pod = Some(Empty {});
        }
    }
    for probe in [&mut spec.liveness_probe, &mut spec.readiness_probe].into_iter().flatten() {
        times(probe);
    }
}

fn machine(spec: &mut InstanceSpec, settings: &PodSettings) {
    spec.termination_grace_period_seconds.get_or_insert(GRACE_SECONDS);
    let direct = spec.domain.firmware.as_ref().is_some_and(|firmware| firmware.kernel_boot.is_some());
    spec.domain.machine.get_or_insert_with(|| Board { kind: if direct { "microvm" } else { "q35" }.to_owned() });
    if let Some(efi) = spec.domain.firmware.as_mut().and_then(|firmware| firmware.bootloader.as_mut()?.efi.as_mut()) {
        // The default of KubeVirt.
        efi.secure_boot.get_or_insert(true);
        efi.persistent.get_or_insert(false);
    }
    if !settings.ssh_keys.is_empty() && !spec.volumes.iter().any(|volume| volume.cloud_init().is_some()) {
        let data = CloudInit { user_data: "#cloud-config\n".to_owned(), ..CloudInit::default() };
        let name = "cloud-init".to_owned();
        spec.volumes.push(Volume { name: name.clone(), cloud_init_no_cloud: Some(data), ..Volume::default() });
        spec.domain.devices.disks.push(Disk { name, ..Disk::default() });
    }
    let devices = &mut spec.domain.devices;
    devices.rng.get_or_insert(Rng {});
    devices.autoattach_serial_console.get_or_insert(true);
    devices.log_serial_console.get_or_insert(true);
    devices.autoattach_graphics_device.get_or_insert(!direct);
    let alone = devices.interfaces.is_empty() && spec.networks.is_empty();
    if alone && devices.autoattach_pod_interface != Some(false) {
        let name = "default".to_owned();
        devices.interfaces.push(Interface { name: name.clone(), ..Interface::default() });
        spec.networks.push(Network { name, pod: Some(Empty {}), multus: None });
    }
    for input in &mut devices.inputs {
        input.bus.get_or_insert(InputBus::Usb);
    }
    if let Some(card) = devices.watchdog.as_mut().and_then(|watchdog| watchdog.i6300esb.as_mut()) {
        card.action.get_or_insert(WatchdogAction::Reset);
    }
}

fn processors(domain: &mut Domain) {
    let asked = domain.resources.as_ref().and_then(|resources| {
        let cpu = resources.requests.get("cpu").or(resources.limits.get("cpu"))?;
        u32::try_from(cpu.milli()?.div_ceil(1000)).ok().filter(|cpus| *cpus > 0)
    });
    let cpu = domain.cpu.get_or_insert_with(Cpu::default);
    let unsaid = cpu.cores.is_none() && cpu.sockets.is_none() && cpu.threads.is_none();
    cpu.sockets.get_or_insert(if unsaid { asked.unwrap_or(1) } else { 1 });
    cpu.cores.get_or_insert(1);
    cpu.threads.get_or_insert(1);
    for feature in &mut cpu.features {
        feature.policy.get_or_insert(CpuFeaturePolicy::Require);
    }
}

fn memory(domain: &mut Domain) {
    let asked: Option<Quantity> = domain
        .resources
        .as_ref()
        .and_then(|resources| resources.requests.get("memory").or(resources.limits.get("memory")).cloned());
    if let Some(asked) = asked {
        domain.memory.get_or_insert_with(Memory::default).guest.get_or_insert(asked);
    }
}

fn disks(spec: &mut InstanceSpec) {
    for disk in &mut spec.domain.devices.disks {
        if disk.disk.is_none() && disk.cdrom.is_none() && disk.lun.is_none() {
            disk.disk = Some(DiskTarget::default());
        }
        if let Some(target) = &mut disk.disk {
            target.bus.get_or_insert(Bus::Virtio);
            target.readonly.get_or_insert(false);
        }
        if let Some(target) = &mut disk.cdrom {
            target.bus.get_or_insert(Bus::Sata);
            target.readonly.get_or_insert(true);
        }
        if let Some(target) = &mut disk.lun {
            target.bus.get_or_insert(Bus::Scsi);
            target.readonly.get_or_insert(false);
        }
    }
}

fn card(interface: &mut Interface) {
    interface.model.get_or_insert(NicModel::Virtio);
    if interface.bridge.is_none() && interface.masquerade.is_none() {
        interface.bridge = Some(Empty {});
    }
    for port in &mut interface.ports {
        port.protocol.get_or_insert(Protocol::Tcp);
    }
}

fn times(probe: &mut Probe) {
    probe.timeout_seconds.get_or_insert(1);
    probe.period_seconds.get_or_insert(10);
    probe.success_threshold.get_or_insert(1);
    probe.failure_threshold.get_or_insert(3);
}
