//! Checks which settings a pod of each kind may use: the VM of a container pod can be configured but not replaced.

use crate::annotations::{PREFIX, PodSettings, field};
use crate::cause::{Causes, Rule};
use crate::names::{LABEL_RULE, SUBDOMAIN_RULE, is_dns_label, is_dns_subdomain};
use crate::spec::{InstanceSpec, Power, RunStrategy, SpecKind};

/// Checks all of these settings.
pub fn check(spec: &InstanceSpec, settings: &PodSettings, kind: SpecKind, causes: &mut Causes) {
    if settings.name.as_deref().is_some_and(|name| !is_dns_subdomain(name)) {
        causes.invalid(Rule("vm-name"), field("name"), &settings.name, SUBDOMAIN_RULE);
    }
    for preset in settings.presets.iter().filter(|preset| !is_dns_label(preset)) {
        causes.invalid(Rule("preset-name"), field("presets"), preset, LABEL_RULE);
    }
    match kind {
        SpecKind::Container => container(spec, settings, causes),
        SpecKind::Machine => machine(spec, settings, causes),
    }
}

/// Checks a container pod, whose VM runs Nacelle's own system.
fn container(spec: &InstanceSpec, settings: &PodSettings, causes: &mut Causes) {
    let only = format!("is for machine pods ({PREFIX}kind: machine): in a container pod containers run in the machine");
    let domain = &spec.domain;
    let devices = &domain.devices;
    let bootloader = domain.firmware.as_ref().is_some_and(|firmware| firmware.bootloader.is_some());
    for (at, said) in [
        ("spec.domain.firmware.bootloader", bootloader),
        ("spec.domain.machine", domain.machine.is_some()),
        ("spec.domain.clock", domain.clock.is_some()),
        ("spec.domain.features", domain.features.is_some()),
        ("spec.domain.chassis", domain.chassis.is_some()),
        ("spec.domain.resources", domain.resources.is_some()),
        ("spec.domain.rebootPolicy", domain.reboot_policy.is_some()),
        ("spec.domain.devices.filesystems", !devices.filesystems.is_empty()),
        ("spec.domain.devices.inputs", !devices.inputs.is_empty()),
        ("spec.domain.devices.watchdog", devices.watchdog.is_some()),
        ("spec.domain.devices.autoattachGraphicsDevice", devices.autoattach_graphics_device.is_some()),
        ("spec.livenessProbe", spec.liveness_probe.is_some()),
        ("spec.readinessProbe", spec.readiness_probe.is_some()),
        ("spec.accessCredentials", !spec.access_credentials.is_empty()),
        ("spec.startStrategy", spec.start_strategy.is_some()),
        ("spec.evictionStrategy", spec.eviction_strategy.is_some()),
        ("spec.terminationGracePeriodSeconds", spec.termination_grace_period_seconds.is_some()),
    ] {
        if said {
            causes.forbidden(Rule("container-field"), at, &only);
        }
    }
    for (name, said) in [
        ("name", settings.name.is_some()),
        ("machine-id", settings.machine_id.is_some()),
        ("run-strategy", settings.run_strategy.is_some()),
        ("power", settings.power.is_some()),
        ("ssh-keys", !settings.ssh_keys.is_empty()),
    ] {
        if said {
            causes.forbidden(Rule("container-wish"), field(name), &only);
        }
    }
    for (index, disk) in devices.disks.iter().enumerate() {
        let at = format!("spec.domain.devices.disks[{index}]");
        if disk.cdrom.is_some() || disk.lun.is_some() {
            causes.forbidden(Rule("container-disk"), &at, "in a container pod disks are plain: disk");
        }
        if disk.boot_order.is_some() {
            let message = "in a container pod nothing boots from a disk";
            causes.forbidden(Rule("container-boot"), format!("{at}.bootOrder"), message);
        }
    }
    let plain = ["persistentVolumeClaim", "emptyDisk", "hostDisk"];
    for (index, volume) in spec.volumes.iter().enumerate() {
        for source in volume.sources().into_iter().filter(|source| !plain.contains(source)) {
            let at = format!("spec.volumes[{index}].{source}");
            let message = format!("in a container pod volumes of machines are {}", plain.join(", "));
            causes.forbidden(Rule("container-volume"), at, message);
        }
    }
}

/// Checks a machine pod: it needs something to boot, and consistent strategies.
fn machine(spec: &InstanceSpec, settings: &PodSettings, causes: &mut Causes) {
    let direct = spec.domain.firmware.as_ref().is_some_and(|firmware| firmware.kernel_boot.is_some());
    let data =
        |source: &&str| !source.starts_with("cloudInit") && !["configMap", "secret", "downwardAPI"].contains(source);
    let disk = spec.domain.devices.disks.iter().any(|disk| {
        let volume = spec.volumes.iter().find(|volume| volume.name == disk.name);
        // Other rules report a volume without a source.
        volume.is_none_or(|volume| volume.sources().is_empty() || volume.sources().iter().any(data))
    });
    if !direct && !disk {
        let message = "there is nothing to boot: a disk over a containerDisk, persistentVolumeClaim, hostDisk or emptyDisk, or spec.domain.firmware.kernelBoot";
        causes.required(Rule("machine-boot"), "spec.domain.devices.disks", message);
    }
    let named = settings.name.is_some();
    if let Some(expected) = settings.machine_id.as_ref().filter(|_| !named) {
        let message = format!("only a persistent VM has a machine id: set {PREFIX}name");
        causes.invalid(Rule("machine-id-name"), field("machine-id"), &expected.id, message);
    }
    if let Some(strategy @ (RunStrategy::Manual | RunStrategy::Halted)) = settings.run_strategy
        && !named
    {
        let message = format!("only a machine with a name ({PREFIX}name) can be there without running");
        causes.invalid(Rule("strategy-name"), field("run-strategy"), strategy, message);
    }
    match (settings.power, settings.run_strategy) {
        (
            Some(Power::Off),
            Some(strategy @ (RunStrategy::Always | RunStrategy::RerunOnFailure | RunStrategy::Once)),
        ) => {
            let message = format!("{PREFIX}run-strategy is {}: the machine would be started again", strategy.word());
            causes.invalid(Rule("power-off"), field("power"), Power::Off, message);
        }
        (Some(power @ (Power::On | Power::Paused)), Some(RunStrategy::Halted)) => {
            let message = format!("{PREFIX}run-strategy is Halted: the machine is off");
            causes.invalid(Rule("power-on"), field("power"), power, message);
        }
        _ => {}
    }
}
