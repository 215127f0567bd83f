//! Builds QEMU's command line from a typed description of the VM. It performs no I/O.

use std::os::fd::RawFd;
use std::path::{Path, PathBuf};

use nacelle_base::machine::{ConsoleKind, CpuModel, MemoryPages, Topology};
use nacelle_base::net::Mac;
use nacelle_base::share;
use nacelle_vmm::machine::{memory_end, total_mib};

use crate::Accelerator;
use crate::console;
use crate::spec::hex;

/// The number of virtio-mmio devices of a microvm without ACPI.
pub(super) const MAX_DEVICES: usize = 8;

/// The kernel parameters of every VM: no output on the console, and a reset at each end, which QEMU turns into its own exit
/// (`-no-reboot`); the others as with engine `kvm`.
const CMDLINE: [&str; 6] =
    ["quiet", "reboot=t", "panic=-1", "noreplace-smp", "page_reporting.page_reporting_order=10", "percpu_alloc=page"];

/// All CPU features that QEMU can emulate, except fast string moves (ERMS, FSRM): emulated they move byte by byte, and a
/// guest that sees these features uses them to copy and clear its pages.
const EMULATED_CPU: &str = "max,erms=off,fsrm=off";

/// The description of a VM.
#[derive(Debug)]
pub(super) struct MicroVm<'a> {
    pub accelerator: Accelerator,
    pub topology: Topology,
    pub cpu_model: Option<&'a CpuModel>,
    pub memory_mib: u32,
    /// The hot-plug memory, which the kernel does not use at boot.
    pub hotplug_mib: u32,
    pub memory_pages: MemoryPages,
    pub console: ConsoleKind,
    pub kernel: &'a Path,
    pub initrd: &'a Path,
    /// The kernel parameters of the accelerator.
    pub timer_parameters: &'a [String],
    pub cmdline: &'a [String],
    /// The devices, at most `MAX_DEVICES`, in the order in which the guest finds them.
    pub devices: Vec<QemuDevice>,
    /// The monitor (QMP): one end of a socket pair.
    pub qmp: RawFd,
}

/// A virtio device.
#[derive(Debug)]
pub(super) enum QemuDevice {
    /// A device of Nacelle, over vhost-user.
    VhostUser { kind: VhostKind, name: String, socket: PathBuf },
    /// QEMU's network device over an open tap.
    Net { tap: RawFd, mac: Mac, mtu: u32 },
    /// QEMU's virtio console, on the same output as the serial port.
    Console,
    /// QEMU's balloon, by which the guest reports free pages.
    Balloon,
}

/// The kind of a vhost-user device.
#[derive(Clone, Copy, Debug)]
pub(super) enum VhostKind {
    Block,
    Vsock,
    Rng,
    Fs,
}

impl VhostKind {
    /// Adds the device properties that QEMU itself needs; the vhost back end serves the rest.
    fn add_required_options(self, option: QemuOption) -> QemuOption {
        match self {
            VhostKind::Fs => option.set("tag", share::TAG).set("queue-size", share::QUEUE_SIZE),
            VhostKind::Block | VhostKind::Vsock | VhostKind::Rng => option,
        }
    }

    /// Returns QEMU's name of the front end.
    fn driver(self) -> &'static str {
        match self {
            VhostKind::Block => "vhost-user-blk",
            VhostKind::Vsock => "vhost-user-vsock-device",
            VhostKind::Rng => "vhost-user-rng",
            VhostKind::Fs => "vhost-user-fs-device",
        }
    }
}

/// An option's value: `driver,key=value,key=value`, with commas in values doubled, as QEMU requires.
struct QemuOption(String);

impl QemuOption {
    fn new(head: &str) -> QemuOption {
        QemuOption(head.to_owned())
    }

    fn set(mut self, key: &str, value: impl std::fmt::Display) -> QemuOption {
        let value = value.to_string().replace(',', ",,");
        self.0.push_str(&format!(",{key}={value}"));
        self
    }
}

impl MicroVm<'_> {
    /// Returns the file descriptors that QEMU must inherit.
    pub fn inherited_descriptors(&self) -> Vec<RawFd> {
        let taps = self.devices.iter().filter_map(|device| match device {
            QemuDevice::Net { tap, .. } => Some(*tap),
            QemuDevice::VhostUser { .. } | QemuDevice::Console | QemuDevice::Balloon => None,
        });
        taps.chain([self.qmp]).collect()
    }

    /// Returns the CPU model; `all` if the specification names none.
    fn cpu_option(&self, all: &str) -> String {
        let Some(model) = self.cpu_model else { return all.to_owned() };
        let cpu = QemuOption::new(model.name.as_deref().unwrap_or(all));
        let set =
            |cpu: QemuOption, (name, enabled): &(String, bool)| cpu.set(name, if *enabled { "on" } else { "off" });
        let cpu = model.features.iter().fold(cpu, set);
        if model.strict { cpu.set("enforce", "on").0 } else { cpu.0 }
    }

    /// Returns the arguments without the program's name.
    pub fn args(&self) -> Vec<String> {
        let mut args = Vec::with_capacity(48);
        let mut add = |name: &str, value: Option<String>| {
            args.push(format!("-{name}"));
            args.extend(value);
        };
        for flag in ["nodefaults", "no-user-config", "no-reboot"] {
            add(flag, None);
        }
        // QEMU names its threads; nacelle-pod recognizes the vCPU threads by these names.
        add("name", Some("debug-threads=on".to_owned()));
        let on = |option: QemuOption, keys: &[&str]| keys.iter().fold(option, |option, key| option.set(key, "on"));
        let off = |option: QemuOption, keys: &[&str]| keys.iter().fold(option, |option, key| option.set(key, "off"));
        let machine = on(QemuOption::new("microvm"), &["pit", "pic", "rtc", "isa-serial", "auto-kernel-cmdline"]);
        let machine = off(machine, &["acpi", "graphics", "usb", "mem-merge", "dump-guest-core", "x-option-roms"]);
        add("machine", Some(machine.set("memory-backend", "ram").0));
        // One thread emulates all vCPUs: with several, one may still execute code that another has patched.
        let (accel, cpu) = match self.accelerator {
            Accelerator::Kvm => ("kvm", "host"),
            Accelerator::Tcg => ("tcg,thread=single", EMULATED_CPU),
        };
        add("accel", Some(accel.to_owned()));
        add("cpu", Some(self.cpu_option(cpu)));
        let Topology { sockets, cores, threads } = self.topology;
        let smp = QemuOption::new(&self.topology.count().to_string());
        add("smp", Some(smp.set("sockets", sockets).set("cores", cores).set("threads", threads).0));
        let memory = format!("{}M", total_mib(self.memory_mib, self.hotplug_mib));
        add("m", Some(memory.clone()));
        let backend = QemuOption::new("memory-backend-memfd").set("id", "ram").set("size", memory).set("share", "on");
        // All pages are allocated at the start, because a page that is missing later kills QEMU.
        let backend = match self.memory_pages {
            MemoryPages::Transparent => backend,
            MemoryPages::Hugetlb => on(backend, &["hugetlb", "prealloc"]).set("hugetlbsize", "2M"),
        };
        add("object", Some(backend.0));
        let denied = ["elevateprivileges", "spawn", "resourcecontrol", "obsolete"];
        add("sandbox", Some(denied.iter().fold(QemuOption::new("on"), |option, key| option.set(key, "deny")).0));
        add("display", Some("none".to_owned()));
        let output = QemuOption::new("stdio").set("id", "console").set("signal", "off");
        add("chardev", Some(if self.console == ConsoleKind::Virtio { on(output, &["mux"]) } else { output }.0));
        add("serial", Some("chardev:console".to_owned()));
        add("chardev", Some(QemuOption::new("socket").set("id", "qmp").set("fd", self.qmp).0));
        add("mon", Some("qmp,mode=control".to_owned()));
        add("global", Some("virtio-mmio.force-legacy=off".to_owned()));
        add("kernel", Some(self.kernel.display().to_string()));
        add("initrd", Some(self.initrd.display().to_string()));
        let parameters = console::kernel_parameters(self.console).iter().chain(&CMDLINE).copied();
        let parameters = parameters.chain(self.timer_parameters.iter().chain(self.cmdline).map(String::as_str));
        // QEMU's memory map contains the hot-plug memory. This parameter keeps the kernel from using it at boot; it can be added later.
        let boot_limit = (self.hotplug_mib > 0).then(|| format!("mem={}M", memory_end(self.memory_mib) >> 20));
        let parameters = parameters.chain(boot_limit.as_deref());
        add("append", Some(parameters.collect::<Vec<_>>().join(" ")));
        // The guest finds the device with the last number first.
        for (device, bus_number) in self.devices.iter().zip((0..MAX_DEVICES).rev()) {
            for (name, option) in device.options(bus_number) {
                add(name, Some(option.0));
            }
        }
        args
    }
}

impl QemuDevice {
    /// Returns the options of the back end, if there is one, and of the front end.
    fn options(&self, bus_number: usize) -> Vec<(&'static str, QemuOption)> {
        let bus = format!("virtio-mmio-bus.{bus_number}");
        match self {
            QemuDevice::VhostUser { kind, name, socket } => vec![
                ("chardev", QemuOption::new("socket").set("id", name).set("path", socket.display())),
                (
                    "device",
                    kind.add_required_options(QemuOption::new(kind.driver()).set("chardev", name).set("bus", bus)),
                ),
            ],
            QemuDevice::Balloon => {
                vec![(
                    "device",
                    QemuOption::new("virtio-balloon-device").set("free-page-reporting", "on").set("bus", bus),
                )]
            }
            QemuDevice::Console => vec![
                ("device", QemuOption::new("virtio-serial-device").set("bus", bus)),
                ("device", QemuOption::new("virtconsole").set("chardev", "console")),
            ],
            QemuDevice::Net { tap, mac, mtu } => {
                let name = format!("net{bus_number}");
                let device = QemuOption::new("virtio-net-device").set("netdev", &name).set("mac", hex(mac));
                vec![
                    ("netdev", QemuOption::new("tap").set("id", &name).set("fd", tap).set("vhost", "off")),
                    ("device", device.set("host_mtu", mtu).set("bus", bus)),
                ]
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> MicroVm<'static> {
        MicroVm {
            accelerator: Accelerator::Tcg,
            topology: Topology { sockets: 1, cores: 2, threads: 1 },
            cpu_model: None,
            memory_mib: 128,
            hotplug_mib: 0,
            memory_pages: MemoryPages::Transparent,
            console: ConsoleKind::Serial,
            kernel: Path::new("/k"),
            initrd: Path::new("/i"),
            timer_parameters: &[],
            cmdline: &[],
            devices: vec![
                QemuDevice::VhostUser {
                    kind: VhostKind::Block,
                    name: "disk0".into(),
                    socket: "/run/a,b/disk0.sock".into(),
                },
                QemuDevice::Net { tap: 11, mac: [2, 0, 0, 0, 0, 0xab], mtu: 1450 },
            ],
            qmp: 12,
        }
    }

    fn value<'a>(args: &'a [String], name: &str) -> Vec<&'a str> {
        args.windows(2).filter(|pair| pair[0] == name).map(|pair| pair[1].as_str()).collect()
    }

    #[test]
    fn each_option_is_one_argument() {
        let args = machine().args();
        assert_eq!(value(&args, "-smp"), ["2,sockets=1,cores=2,threads=1"]);
        assert_eq!(value(&args, "-m"), ["128M"]);
        assert_eq!(value(&args, "-name"), ["debug-threads=on"]);
        assert_eq!(value(&args, "-object"), ["memory-backend-memfd,id=ram,size=128M,share=on"]);
        assert_eq!(value(&args, "-cpu"), ["max,erms=off,fsrm=off"]);
        assert_eq!(
            value(&args, "-append"),
            [
                "console=ttyS0 quiet reboot=t panic=-1 noreplace-smp page_reporting.page_reporting_order=10 percpu_alloc=page"
            ]
        );
        assert_eq!(
            value(&args, "-device"),
            [
                "vhost-user-blk,chardev=disk0,bus=virtio-mmio-bus.7",
                "virtio-net-device,netdev=net6,mac=02:00:00:00:00:ab,host_mtu=1450,bus=virtio-mmio-bus.6",
            ]
        );
        assert_eq!(value(&args, "-netdev"), ["tap,id=net6,fd=11,vhost=off"]);
    }

    #[test]
    fn huge_pages_are_requested_and_allocated_at_the_start() {
        let args = MicroVm { memory_pages: MemoryPages::Hugetlb, ..machine() }.args();
        let backend = "memory-backend-memfd,id=ram,size=128M,share=on,hugetlb=on,prealloc=on,hugetlbsize=2M";
        assert_eq!(value(&args, "-object"), [backend]);
    }

    #[test]
    fn hotplug_memory_is_in_qemus_map_but_not_used_at_boot() {
        for (memory_mib, hotplug_mib, made, word) in
            [(300, 256, "640M", "mem=300M"), (3500, 256, "3840M", "mem=4524M"), (3072, 128, "3200M", "mem=3072M")]
        {
            let args = MicroVm { memory_mib, hotplug_mib, ..machine() }.args();
            assert_eq!(value(&args, "-m"), [made]);
            assert_eq!(value(&args, "-object"), [format!("memory-backend-memfd,id=ram,size={made},share=on")]);
            assert!(value(&args, "-append")[0].ends_with(&format!(" {word}")), "{args:?}");
        }
    }

    #[test]
    fn the_cpu_option_follows_the_specification() {
        let features = vec![("avx2".to_owned(), false), ("aes".to_owned(), true)];
        let named = CpuModel { name: Some("EPYC".into()), features: features.clone(), strict: true };
        let args = MicroVm { cpu_model: Some(&named), ..machine() }.args();
        assert_eq!(value(&args, "-cpu"), ["EPYC,avx2=off,aes=on,enforce=on"]);
        let unnamed = CpuModel { name: None, features, strict: false };
        let args = MicroVm { cpu_model: Some(&unnamed), ..machine() }.args();
        assert_eq!(value(&args, "-cpu"), ["max,erms=off,fsrm=off,avx2=off,aes=on"]);
    }

    #[test]
    fn a_virtio_console_shares_the_output_of_the_serial_port() {
        let args = MicroVm { console: ConsoleKind::Virtio, devices: vec![QemuDevice::Console], ..machine() }.args();
        assert!(value(&args, "-chardev").contains(&"stdio,id=console,signal=off,mux=on"), "{args:?}");
        assert_eq!(value(&args, "-serial"), ["chardev:console"]);
        let devices = ["virtio-serial-device,bus=virtio-mmio-bus.7", "virtconsole,chardev=console"];
        assert_eq!(value(&args, "-device"), devices);
        assert!(value(&args, "-append")[0].starts_with("earlycon=uart8250,io,0x3f8 console=hvc0 "), "{args:?}");
    }

    #[test]
    fn a_balloon_needs_no_backend() {
        let args = MicroVm { devices: vec![QemuDevice::Balloon], ..machine() }.args();
        assert_eq!(value(&args, "-device"), ["virtio-balloon-device,free-page-reporting=on,bus=virtio-mmio-bus.7"]);
    }

    #[test]
    fn the_share_has_its_tag() {
        let share =
            QemuDevice::VhostUser { kind: VhostKind::Fs, name: "share".into(), socket: "/run/share.sock".into() };
        let args = MicroVm { devices: vec![share], ..machine() }.args();
        let device = "vhost-user-fs-device,chardev=share,bus=virtio-mmio-bus.7,tag=nacelle,queue-size=128";
        assert_eq!(value(&args, "-device"), [device]);
    }

    #[test]
    fn commas_in_paths_are_escaped() {
        let args = machine().args();
        assert!(value(&args, "-chardev").contains(&"socket,id=disk0,path=/run/a,,b/disk0.sock"), "{args:?}");
    }

    #[test]
    fn only_taps_and_the_monitor_are_inherited() {
        assert_eq!(machine().inherited_descriptors(), [11, 12]);
    }
}
