//! Checks the rules of the domain: CPUs, memory, firmware, clock.

use crate::annotations::PodSettings;
use crate::cause::{Causes, Rule};
use crate::names::{ABSOLUTE_PATH_RULE, IMAGE_RULE, is_absolute_path, is_image_reference, is_printable};
use crate::spec::{Bootloader, Domain, Firmware, InstanceSpec, KernelBoot, SpecKind};

const CPU: &str = "spec.domain.cpu";
const MEMORY: &str = "spec.domain.memory";
const FIRMWARE: &str = "spec.domain.firmware";
/// The maximum number of vCPUs of any engine.
const MAX_CPUS: u32 = 255;
/// The minimum memory of a VM that boots, in bytes.
const MIN_MEMORY: u64 = 32 << 20;
/// The maximum memory of any engine, in bytes.
const MAX_MEMORY: u64 = 4 << 40;
const MIB: u64 = 1 << 20;
/// The maximum length of a kernel command line.
const MAX_COMMAND_LINE: usize = 2000;
const BOARDS: &[&str] = &["microvm", "q35", "pc"];

/// Checks the vCPUs.
pub fn processors(domain: &Domain, causes: &mut Causes) {
    let Some(cpu) = &domain.cpu else { return };
    for (part, count) in [("cores", cpu.cores), ("sockets", cpu.sockets), ("threads", cpu.threads)] {
        if count == Some(0) {
            causes.invalid(Rule("cpu-part-zero"), format!("{CPU}.{part}"), 0, "must be at least 1");
        }
    }
    let count = cpu.count();
    if count.is_none_or(|count| count > MAX_CPUS) {
        let message =
            format!("sockets, cores and threads result in so many vCPUs, and at most {MAX_CPUS} are possible");
        let count = count.map_or_else(|| "more than 4294967295".to_owned(), |count| count.to_string());
        causes.invalid(Rule("cpu-count"), CPU, count, message);
    }
    if cpu.threads.is_some_and(|threads| threads > 2) {
        causes.invalid(Rule("cpu-threads"), format!("{CPU}.threads"), cpu.threads, "a core has at most 2 threads");
    }
    if let Some(most) = cpu.max_sockets {
        let at = format!("{CPU}.maxSockets");
        if most < cpu.sockets.unwrap_or(1) {
            let message = format!("must be at least {CPU}.sockets, which is {}", cpu.sockets.unwrap_or(1));
            causes.invalid(Rule("cpu-max-sockets"), at, most, message);
        } else if most.saturating_mul(cpu.cores.unwrap_or(1)).saturating_mul(cpu.threads.unwrap_or(1)) > MAX_CPUS {
            let message = format!("would result in more than {MAX_CPUS} vCPUs");
            causes.invalid(Rule("cpu-max-count"), at, most, message);
        }
    }
    let word = |text: &str| text.len() <= 64 && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
    if !word(&cpu.model) {
        let message = "must be host-passthrough, host-model or the name of a model";
        causes.invalid(Rule("cpu-model"), format!("{CPU}.model"), &cpu.model, message);
    }
    let mut seen: Vec<&str> = Vec::new();
    for (index, feature) in cpu.features.iter().enumerate() {
        let at = format!("{CPU}.features[{index}].name");
        let name = feature.name.as_str();
        if name.is_empty() {
            causes.required(Rule("cpu-feature-name"), at, "must have a name");
        } else if !word(name) {
            causes.invalid(
                Rule("cpu-feature-form"),
                at,
                name,
                "must be the name of a CPU feature, as in /proc/cpuinfo",
            );
        } else if seen.contains(&name) {
            causes.duplicate(Rule("cpu-feature-twice"), at, name, "must occur only once");
        }
        seen.push(name);
    }
}

/// Checks the memory.
pub fn memory(domain: &Domain, kind: SpecKind, causes: &mut Causes) {
    let memory = domain.memory.as_ref();
    let Some(guest) = memory.and_then(|memory| memory.guest.as_ref()) else {
        if kind == SpecKind::Machine {
            let message = "the memory of a VM must be set: here, in resources or by an instance type";
            causes.required(Rule("memory-missing"), format!("{MEMORY}.guest"), message);
        }
        return check_max_guest_and_hugepages(domain, None, causes);
    };
    let at = format!("{MEMORY}.guest");
    match guest.bytes() {
        None => causes.invalid(Rule("memory-whole"), at, guest, "must be a whole number of bytes"),
        Some(bytes) if bytes < MIN_MEMORY => causes.invalid(Rule("memory-least"), at, guest, "must be at least 32Mi"),
        Some(bytes) if bytes > MAX_MEMORY => causes.invalid(Rule("memory-most"), at, guest, "must be at most 4Ti"),
        Some(bytes) => {
            if bytes % MIB != 0 {
                causes.invalid(Rule("memory-mib"), at, guest, "must be whole mebibytes");
            }
            check_max_guest_and_hugepages(domain, Some(bytes), causes);
        }
    }
}

fn check_max_guest_and_hugepages(domain: &Domain, guest: Option<u64>, causes: &mut Causes) {
    let Some(memory) = &domain.memory else { return };
    if let Some(most) = &memory.max_guest {
        let at = format!("{MEMORY}.maxGuest");
        match (most.bytes(), guest) {
            (Some(bytes), Some(guest)) if bytes < guest => {
                let message = format!("must be at least {MEMORY}.guest, which is {guest} bytes");
                causes.invalid(Rule("memory-max-less"), at, most, message);
            }
            (Some(bytes), _) if bytes > MAX_MEMORY => {
                causes.invalid(Rule("memory-max-most"), at, most, "must be at most 4Ti");
            }
            (None, _) => causes.invalid(Rule("memory-max-whole"), at, most, "must be a whole number of bytes"),
            _ => {}
        }
    }
    let Some(pages) = &memory.hugepages else { return };
    let at = format!("{MEMORY}.hugepages.pageSize");
    let size = match pages.page_size.as_str() {
        "" => return causes.required(Rule("hugepages-missing"), at, "must be 2Mi or 1Gi"),
        "2Mi" => 2 * MIB,
        "1Gi" => 1 << 30,
        other => return causes.unsupported(Rule("hugepages-size"), at, other, &["2Mi", "1Gi"]),
    };
    if guest.is_some_and(|guest| guest % size != 0) {
        let message = format!("{MEMORY}.guest must be a whole number of pages of {}", pages.page_size);
        causes.invalid(Rule("hugepages-fit"), at, &pages.page_size, message);
    }
}

/// Checks the resources that the pod requests of the node.
pub fn resources(domain: &Domain, causes: &mut Causes) {
    let Some(resources) = &domain.resources else { return };
    let at = "spec.domain.resources";
    for (what, list) in [("requests", &resources.requests), ("limits", &resources.limits)] {
        for (name, quantity) in list {
            let at = format!("{at}.{what}[{name}]");
            if name != "cpu" && name != "memory" {
                let message = "only cpu and memory are resources of a VM; set others on the container";
                causes.forbidden(Rule("resources-name"), at, message);
            } else if !quantity.positive() {
                causes.invalid(Rule("resources-positive"), at, quantity, "must be more than zero");
            }
        }
    }
    for (name, limit) in &resources.limits {
        let request = resources.requests.get(name);
        if let Some(request) = request.filter(|request| request.milli() > limit.milli()) {
            let message = format!("must be at least the request, which is {request}");
            causes.invalid(Rule("resources-limit"), format!("{at}.limits[{name}]"), limit, message);
        }
    }
    let guest = domain.memory.as_ref().and_then(|memory| memory.guest.as_ref()?.bytes());
    let limit = resources.limits.get("memory");
    if let (Some(guest), Some(limit)) = (guest, limit)
        && limit.bytes().is_some_and(|limit| limit < guest)
    {
        let message = format!("must be at least {MEMORY}.guest, which is {guest} bytes");
        causes.invalid(Rule("resources-guest"), format!("{at}.limits[memory]"), limit, message);
    }
}

/// Checks board, firmware and kernel.
pub fn firmware(spec: &InstanceSpec, settings: &PodSettings, causes: &mut Causes) {
    let domain = &spec.domain;
    let board = domain.machine.as_ref().map(|board| board.kind.as_str());
    let at = "spec.domain.machine.type";
    match board {
        Some("") => causes.required(Rule("machine-missing"), at, "must be microvm, q35 or pc"),
        Some(board) if !BOARDS.contains(&board) => causes.unsupported(Rule("machine-type"), at, board, BOARDS),
        _ => {}
    }
    if let Some(chassis) = &domain.chassis {
        for (name, text) in [
            ("manufacturer", &chassis.manufacturer),
            ("version", &chassis.version),
            ("serial", &chassis.serial),
            ("asset", &chassis.asset),
            ("sku", &chassis.sku),
        ] {
            if !is_printable(text) || text.len() > 128 {
                let message = "must be at most 128 printable ASCII characters";
                causes.invalid(Rule("chassis-text"), format!("spec.domain.chassis.{name}"), text, message);
            }
        }
    }
    let Some(firmware) = &domain.firmware else { return };
    identity(firmware, causes);
    if let (Some(_), Some(_)) = (&firmware.bootloader, &firmware.kernel_boot) {
        let message = "a directly booted kernel has no boot loader: set one of bootloader and kernelBoot";
        causes.forbidden(Rule("kernel-and-bootloader"), format!("{FIRMWARE}.bootloader"), message);
    } else if firmware.bootloader.is_some() && board == Some("microvm") {
        let message = "the board microvm has no firmware: use q35 or pc";
        causes.invalid(Rule("microvm-bootloader"), at, "microvm", message);
    }
    if let Some(loader) = &firmware.bootloader {
        bootloader(loader, domain, settings, causes);
    }
    if let Some(kernel) = &firmware.kernel_boot {
        kernel_boot(kernel, settings.kind, causes);
    }
}

fn identity(firmware: &Firmware, causes: &mut Causes) {
    if !firmware.uuid.is_empty() && !uuid(&firmware.uuid) {
        let message = "must be a UUID: 8-4-4-4-12 hexadecimal digits";
        causes.invalid(Rule("uuid"), format!("{FIRMWARE}.uuid"), &firmware.uuid, message);
    }
    if !is_printable(&firmware.serial) || firmware.serial.len() > 128 {
        let message = "must be at most 128 printable ASCII characters";
        causes.invalid(Rule("firmware-serial"), format!("{FIRMWARE}.serial"), &firmware.serial, message);
    }
}

fn uuid(text: &str) -> bool {
    let lengths: Vec<usize> = text.split('-').map(str::len).collect();
    lengths == [8, 4, 4, 4, 12] && text.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-')
}

fn bootloader(loader: &Bootloader, domain: &Domain, settings: &PodSettings, causes: &mut Causes) {
    let at = format!("{FIRMWARE}.bootloader");
    match (&loader.bios, &loader.efi) {
        (Some(_), Some(_)) => causes.forbidden(Rule("bootloader-both"), at, "must be one of bios and efi"),
        (None, None) => causes.required(Rule("bootloader-none"), at, "must be one of bios and efi"),
        (None, Some(efi)) => {
            let smm = domain.features.as_ref().and_then(|features| features.smm.as_ref());
            if efi.secure_boot == Some(true) && !smm.is_some_and(|smm| smm.on()) {
                let message = "is the default, and needs spec.domain.features.smm: set that, or secureBoot: false";
                causes.invalid(Rule("secure-boot-smm"), format!("{at}.efi.secureBoot"), true, message);
            }
            if efi.persistent == Some(true) && settings.name.is_none() {
                let message = "only a persistent VM (vm.nacelle.dev/name) keeps its variables";
                causes.invalid(Rule("efi-persistent"), format!("{at}.efi.persistent"), true, message);
            }
        }
        (Some(_), None) => {}
    }
}

fn kernel_boot(kernel: &KernelBoot, kind: Option<SpecKind>, causes: &mut Causes) {
    let at = format!("{FIRMWARE}.kernelBoot");
    let args = &kernel.kernel_args;
    if args.len() > MAX_COMMAND_LINE || !is_printable(args) {
        let message = format!("must be at most {MAX_COMMAND_LINE} printable ASCII characters on one line");
        causes.invalid(Rule("kernel-args"), format!("{at}.kernelArgs"), args, message);
    }
    let at = format!("{at}.container");
    let Some(container) = &kernel.container else {
        // The VM of a container pod has a kernel already, which accepts parameters.
        if kind == Some(SpecKind::Container) && !args.is_empty() {
            return;
        }
        return causes.required(Rule("kernel-container"), at, "must say the image with the kernel");
    };
    if container.image.is_empty() {
        causes.required(Rule("kernel-image-missing"), format!("{at}.image"), "must say the image with the kernel");
    } else if !is_image_reference(&container.image) {
        causes.invalid(Rule("kernel-image"), format!("{at}.image"), &container.image, IMAGE_RULE);
    }
    if container.kernel_path.is_empty() {
        causes.required(
            Rule("kernel-path-missing"),
            format!("{at}.kernelPath"),
            "must say where in the image the kernel is",
        );
    }
    for (name, path) in [("kernelPath", &container.kernel_path), ("initrdPath", &container.initrd_path)] {
        if !path.is_empty() && !is_absolute_path(path) {
            causes.invalid(Rule("kernel-path"), format!("{at}.{name}"), path, ABSOLUTE_PATH_RULE);
        }
    }
}

/// Checks the clock.
pub fn clock(domain: &Domain, causes: &mut Causes) {
    let Some(clock) = &domain.clock else { return };
    let at = "spec.domain.clock";
    match (&clock.utc, &clock.timezone) {
        (Some(_), Some(_)) => causes.forbidden(Rule("clock-both"), at, "must be one of utc and timezone"),
        (Some(utc), None) => {
            // The maximum offset of a real-time clock in seconds: a day more than any time zone.
            const MOST: u64 = 36 * 3600;
            if utc.offset_seconds.is_some_and(|offset| offset.unsigned_abs() > MOST) {
                let message = format!("must be between -{MOST} and {MOST}");
                causes.invalid(Rule("clock-offset"), format!("{at}.utc.offsetSeconds"), utc.offset_seconds, message);
            }
        }
        (None, Some(zone)) => {
            let part =
                |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"_+-".contains(&b));
            if zone.len() > 64 || !zone.split('/').all(part) {
                let message = "must be the name of a time zone, as Europe/Berlin";
                causes.invalid(Rule("clock-zone"), format!("{at}.timezone"), zone, message);
            }
        }
        (None, None) => {}
    }
    let Some(pit) = clock.timer.as_ref().and_then(|timer| timer.pit.as_ref()) else { return };
    if pit.tick_policy == Some(crate::spec::TickPolicy::Merge) {
        let message = "the interval timer cannot merge ticks: delay, catchup and discard are possible";
        causes.invalid(Rule("clock-pit"), format!("{at}.timer.pit.tickPolicy"), "merge", message);
    }
}
