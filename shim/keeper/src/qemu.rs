//! Builds QEMU's command line for a whole VM: board, firmware, disks, cards, screen. The functions are pure.

mod cards;
mod host_devices;
mod hotplug_slots;
mod iothreads;
mod shares;
mod timers;

pub use cards::NetworkCard;
pub use hotplug_slots::{block_nodes, device_id, root_port};

use crate::disk::{BackingRange, DiskFiles, KernelFiles, PreparedDisk};
use crate::hotplug_list::HotplugDisk;
use nacelle_engine::Accelerator;
use nacelle_model::machine::{
    Board, Bus, Cache, CardModel, DiskKind, DiskSource, Firmware, MachineDocument, Processors, SmbiosIdentity,
    WatchdogAction,
};
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};

/// The port name that the guest agent looks for.
pub const AGENT_PORT: &str = "org.qemu.guest_agent.0";
/// The id of the character device behind that port.
pub const AGENT_CHARDEV: &str = "agent";
/// The CPU model under emulation: see the same constant of `nacelle-engine`.
const EMULATED_CPU: &str = "max,erms=off,fsrm=off";

/// The block node with the firmware's program.
const EFI_CODE_NODE: &str = "efi-code";

/// The input of the command line.
#[derive(Debug)]
pub struct QemuConfig<'a> {
    /// The description of the VM.
    pub document: &'a MachineDocument,
    /// The accelerator.
    pub accelerator: Accelerator,
    /// The disks.
    pub disks: &'a [PreparedDisk],
    /// The hot-plugged disks with their files.
    pub hotplug: &'a [(HotplugDisk, PathBuf)],
    /// The sockets of the vhost-user-fs devices.
    pub shares: Vec<PathBuf>,
    /// The firmware's program and its variables; `None` for the board's own firmware.
    pub firmware: Option<(&'a Path, &'a DiskFiles)>,
    /// The kernel of a direct boot.
    pub kernel: Option<&'a KernelFiles>,
    /// A kernel parameter about the TSC, for emulation on a board without a timer to calibrate it.
    pub clock: Option<String>,
    /// The network cards with their taps.
    pub cards: Vec<NetworkCard>,
    /// The path of the VNC socket.
    pub screen: Option<PathBuf>,
    /// QEMU's end of the monitor's socket pair.
    pub monitor: RawFd,
    /// QEMU's end of the serial console.
    pub console: RawFd,
    /// QEMU's end of the guest agent's channel.
    pub agent: RawFd,
}

/// The value of an option. Commas in values are doubled, as QEMU requires.
struct Opt(String);

impl Opt {
    fn new(head: impl std::fmt::Display) -> Opt {
        Opt(head.to_string())
    }

    fn set(mut self, key: &str, value: impl std::fmt::Display) -> Opt {
        let value = value.to_string().replace(',', ",,");
        self.0.push_str(&format!(",{key}={value}"));
        self
    }

    fn set_if<T: std::fmt::Display>(self, key: &str, value: Option<T>) -> Opt {
        match value {
            Some(value) => self.set(key, value),
            None => self,
        }
    }
}

/// The arguments so far.
struct QemuArgs {
    words: Vec<String>,
    /// The free slots for virtio devices, on a board with virtio-mmio.
    free_slots: Option<usize>,
}

impl QemuArgs {
    fn flag(&mut self, name: &str) {
        self.words.push(format!("-{name}"));
    }

    fn add(&mut self, name: &str, value: Opt) {
        self.flag(name);
        self.words.push(value.0);
    }

    fn device(&mut self, value: Opt) {
        self.add("device", value);
    }

    /// Returns the beginning of a virtio device. The guest finds the first device first, which with virtio-mmio is in the last
    /// slot.
    fn virtio(&mut self, kind: &str) -> Opt {
        match &mut self.free_slots {
            None => Opt::new(format!("{kind}-pci")),
            Some(free) => {
                // The daemon has counted the devices, so the slots suffice.
                *free = free.saturating_sub(1);
                Opt::new(format!("{kind}-device")).set("bus", format!("virtio-mmio-bus.{free}"))
            }
        }
    }
}

impl QemuConfig<'_> {
    /// Returns the descriptors that QEMU must inherit.
    pub fn inherited(&self) -> Vec<RawFd> {
        let taps = self.cards.iter().flat_map(|card| card.taps.iter().copied());
        let disks = self.disks.iter().filter_map(|ready| match &ready.files {
            DiskFiles::Device { file, .. } | DiskFiles::Memory(file) => Some(file.as_raw_fd()),
            _ => None,
        });
        taps.chain(disks).chain([self.monitor, self.console, self.agent]).collect()
    }

    /// Returns the arguments after the program's name.
    pub fn args(&self) -> Vec<String> {
        let document = self.document;
        let mut args = QemuArgs { words: Vec::with_capacity(96), free_slots: document.board.places() };
        for flag in ["nodefaults", "no-user-config"] {
            args.flag(flag);
        }
        args.add("name", Opt::new(format!("guest={}", document.name.replace(',', ",,"))));
        self.add_board(&mut args);
        self.add_channels(&mut args);
        add_smbios(&mut args, &document.identity);
        iothreads::add_iothreads(&mut args, document);
        for (n, ready) in self.disks.iter().enumerate() {
            add_disk(&mut args, n, ready, document);
        }
        hotplug_slots::add_slots(&mut args, document.board, self.hotplug);
        shares::add_filesystems(&mut args, document, &self.shares);
        cards::add_cards(&mut args, &self.cards, document.board);
        host_devices::add_devices(&mut args, document);
        if document.random {
            let random = args.virtio("virtio-rng");
            args.device(random);
        }
        if document.balloon {
            let balloon = args.virtio("virtio-balloon").set("id", "balloon");
            args.device(balloon.set("free-page-reporting", "on").set("deflate-on-oom", "on"));
        }
        if let Some(action) = document.watchdog {
            args.device(Opt::new("i6300esb"));
            let word = match action {
                WatchdogAction::Reset => "reset",
                WatchdogAction::Shutdown => "shutdown",
                WatchdogAction::Poweroff => "poweroff",
            };
            args.add("action", Opt::new(format!("watchdog={word}")));
        }
        self.add_screen(&mut args);
        if document.ends_at_reboot {
            args.flag("no-reboot");
        }
        if document.paused {
            args.flag("S");
        }
        args.words
    }

    fn add_board(&self, args: &mut QemuArgs) {
        let document = self.document;
        let (board, unused) = match document.board {
            Board::Q35 => (Opt::new("q35"), "vmport"),
            Board::Pc => (Opt::new("pc"), "vmport"),
            // Without ACPI there is no power button. With it, the kernel needs no parameters to find the devices.
            Board::Microvm => (Opt::new("microvm").set("acpi", "on").set("ioapic2", "on"), "auto-kernel-cmdline"),
        };
        if document.board == Board::Microvm {
            args.add("global", Opt::new("virtio-mmio.force-legacy=off"));
        }
        let unused = [unused, "usb", "dump-guest-core", "mem-merge"];
        let board = unused.iter().fold(board, |option, key| option.set(key, "off"));
        let board = timers::set_board_timers(board.set("memory-backend", "ram"), &document.clock);
        let board = match &self.firmware {
            Some((code, variables)) => {
                add_file_node(args, "efi-file", code, true, Cache::Writeback);
                args.add(
                    "blockdev",
                    Opt::new("driver=raw")
                        .set("node-name", EFI_CODE_NODE)
                        .set("file", "efi-file")
                        .set("read-only", "on"),
                );
                let variables = add_disk_nodes(args, "efi", variables, Cache::Writeback, false);
                let board = match document.firmware {
                    Firmware::Efi { secure: true, .. } => {
                        args.add(
                            "global",
                            Opt::new("driver=cfi.pflash01").set("property", "secure").set("value", "on"),
                        );
                        // A VM that resumes from S3 would skip the verification of secure boot.
                        args.add("global", Opt::new("ICH9-LPC.disable_s3=1"));
                        board.set("smm", "on")
                    }
                    Firmware::Efi { .. } | Firmware::Bios {} => board,
                };
                board.set("pflash0", EFI_CODE_NODE).set("pflash1", variables)
            }
            None => board,
        };
        args.add("machine", board);
        self.add_kernel(args);
        // One thread for all emulated vCPUs: with several, one may still run code that another has patched.
        let (accel, cpu) = match self.accelerator {
            Accelerator::Kvm => ("kvm", "host"),
            Accelerator::Tcg => ("tcg,thread=single", EMULATED_CPU),
        };
        args.add("accel", Opt::new(accel));
        let Processors { sockets, cores, threads, model, features, strict, pins: _ } = &document.processors;
        let cpu = Opt::new(model.as_deref().unwrap_or(cpu));
        let cpu = features.iter().fold(cpu, |cpu, (name, there)| cpu.set(name, if *there { "on" } else { "off" }));
        let cpu = if document.clock.no_kvm_clock { cpu.set("kvmclock", "off") } else { cpu };
        args.add("cpu", if *strict { cpu.set("enforce", "on") } else { cpu });
        let count = Opt::new(document.processors.count());
        args.add("smp", count.set("sockets", sockets).set("cores", cores).set("threads", threads));
        shares::add_memory(args, document);
        timers::add_timers(args, &document.clock, self.accelerator);
        let denied = ["elevateprivileges", "spawn", "resourcecontrol", "obsolete"];
        args.add("sandbox", denied.iter().fold(Opt::new("on"), |option, key| option.set(key, "deny")));
    }

    fn add_kernel(&self, args: &mut QemuArgs) {
        let (Some(files), Some(kernel)) = (self.kernel, &self.document.kernel) else { return };
        args.add("kernel", Opt::new(files.kernel.display()));
        if let Some(initrd) = &files.initrd {
            args.add("initrd", Opt::new(initrd.display()));
        }
        let parameters = self.clock.iter().chain(Some(&kernel.arguments).filter(|words| !words.is_empty()));
        let parameters: Vec<&str> = parameters.map(String::as_str).collect();
        if !parameters.is_empty() {
            args.add("append", Opt::new(parameters.join(" ")));
        }
    }

    /// Adds monitor, console and guest agent channel.
    fn add_channels(&self, args: &mut QemuArgs) {
        for (id, fd) in [("monitor", self.monitor), ("console", self.console), (AGENT_CHARDEV, self.agent)] {
            args.add("chardev", Opt::new("socket").set("id", id).set("fd", fd));
        }
        args.add("mon", Opt::new("monitor").set("mode", "control"));
        args.add("serial", Opt::new("chardev:console"));
        let ports = args.virtio("virtio-serial").set("id", "ports");
        args.device(ports);
        // QEMU reports that the guest opens or closes a port (VSERPORT_CHANGE) only if the port has an id.
        let port = Opt::new("virtserialport").set("bus", "ports.0").set("id", "agent-port");
        args.device(port.set("chardev", AGENT_CHARDEV).set("name", AGENT_PORT));
        args.device(Opt::new("pvpanic"));
    }

    fn add_screen(&self, args: &mut QemuArgs) {
        match &self.screen {
            Some(socket) => {
                args.device(Opt::new("VGA"));
                args.add("display", Opt::new(format!("vnc=unix:{}", socket.display())));
            }
            None => args.add("display", Opt::new("none")),
        }
        if self.document.tablet {
            args.device(Opt::new("qemu-xhci").set("id", "usb"));
            args.device(Opt::new("usb-tablet").set("bus", "usb.0"));
        }
    }
}

fn add_smbios(args: &mut QemuArgs, identity: &SmbiosIdentity) {
    if !identity.uuid.is_empty() {
        args.add("uuid", Opt::new(&identity.uuid));
    }
    let non_empty = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
    if let Some(serial) = non_empty(&identity.serial) {
        args.add("smbios", Opt::new("type=1").set("serial", serial));
    }
    if identity.chassis.iter().any(|text| !text.is_empty()) {
        let keys = ["manufacturer", "version", "serial", "asset", "sku"];
        let pairs = keys.iter().zip(&identity.chassis);
        let case = pairs.fold(Opt::new("type=3"), |case, (key, text)| case.set_if(key, non_empty(text)));
        args.add("smbios", case);
    }
}

/// Returns the number of virtio devices.
pub fn virtio_devices(document: &MachineDocument) -> usize {
    let disks = document.disks.iter().filter(|disk| matches!(disk.bus, Bus::Virtio | Bus::Scsi)).count();
    let cards = document.cards.iter().filter(|card| card.model == CardModel::Virtio).count();
    // And one for the guest agent's port.
    disks + cards + document.filesystems.len() + usize::from(document.random) + usize::from(document.balloon) + 1
}

/// Adds a block node over a file.
fn add_file_node(args: &mut QemuArgs, name: &str, path: &Path, read_only: bool, cache: Cache) {
    // A read-only file is never written, so it needs no lock.
    add_protocol_node(args, "file", name, &path.display().to_string(), (read_only, !read_only), cache);
}

/// Adds a block node with any protocol driver that takes a file name; whether it is read-only, and whether QEMU locks the file.
fn add_protocol_node(
    args: &mut QemuArgs,
    driver: &str,
    name: &str,
    path: &str,
    (read_only, locking): (bool, bool),
    cache: Cache,
) {
    let on = |yes: bool| if yes { "on" } else { "off" };
    let node = Opt::new(format!("driver={driver}")).set("node-name", name).set("filename", path);
    let node = node.set("read-only", on(read_only)).set("auto-read-only", "off").set("locking", on(locking));
    let node = if read_only { node } else { node.set("discard", "unmap") };
    let node = if cache == Cache::None { node.set("cache.direct", "on").set("aio", "threads") } else { node };
    args.add("blockdev", node);
}

fn add_backing_nodes(args: &mut QemuArgs, n: &str, base: &BackingRange) -> String {
    let [inner, piece, disk] = ["file", "piece", "base"].map(|part| format!("{part}-{n}"));
    add_file_node(args, &inner, &base.file, true, Cache::Writeback);
    let node = Opt::new("driver=raw").set("node-name", &piece).set("file", inner).set("read-only", "on");
    args.add("blockdev", node.set("offset", base.offset).set("size", base.length));
    if !base.qcow2 {
        return piece;
    }
    let node = Opt::new("driver=qcow2").set("node-name", &disk).set("file", piece).set("read-only", "on");
    args.add("blockdev", node);
    disk
}

/// Passes an inherited descriptor to QEMU as a descriptor set of this number.
fn add_fd_set(args: &mut QemuArgs, n: &str, file: &File) {
    args.add("add-fd", Opt::new(format!("fd={}", file.as_raw_fd())).set("set", n));
}

/// Adds the block nodes of a disk and returns the name of the top one.
fn add_disk_nodes(args: &mut QemuArgs, n: &str, files: &DiskFiles, cache: Cache, read_only: bool) -> String {
    let [inner, whole] = ["top", "disk"].map(|part| format!("{part}-{n}"));
    let format = match files {
        DiskFiles::ImageRange(base) => return add_backing_nodes(args, n, base),
        DiskFiles::Memory(file) => {
            add_fd_set(args, n, file);
            add_protocol_node(args, "file", &inner, &format!("/dev/fdset/{n}"), (false, false), Cache::Writeback);
            Opt::new("driver=raw")
        }
        DiskFiles::Device { file, block } => {
            add_fd_set(args, n, file);
            let driver = if *block { "host_device" } else { "file" };
            add_protocol_node(args, driver, &inner, &format!("/dev/fdset/{n}"), (read_only, true), cache);
            // The format is fixed: if QEMU probed it, the guest could write a header that leads to other files.
            Opt::new("driver=raw")
        }
        DiskFiles::Qcow2(path) => {
            add_file_node(args, &inner, path, read_only, cache);
            Opt::new("driver=qcow2")
        }
        DiskFiles::Overlay { top, base } => {
            let base = add_backing_nodes(args, n, base);
            add_file_node(args, &inner, top, read_only, cache);
            Opt::new("driver=qcow2").set("backing", base)
        }
    };
    let node = format.set("node-name", &whole).set("file", inner);
    args.add("blockdev", if read_only { node.set("read-only", "on") } else { node.set("discard", "unmap") });
    whole
}

/// Returns the nodes of which a snapshot can be taken: all writable qcow2 nodes.
pub fn snapshot_nodes(
    disks: &[PreparedDisk],
    hotplug: &[(HotplugDisk, PathBuf)],
    firmware: Option<&DiskFiles>,
) -> Vec<String> {
    let own = |files: &DiskFiles| matches!(files, DiskFiles::Qcow2(_) | DiskFiles::Overlay { .. });
    let disks = disks.iter().enumerate().filter(|(_, ready)| own(&ready.files) && !ready.disk.read_only);
    let firmware = firmware.filter(|files| own(files)).map(|_| "disk-efi".to_owned());
    let hotplug = hotplug.iter().map(|(disk, _)| block_nodes(disk)).map(|[_, whole]| whole);
    disks.map(|(n, _)| format!("disk-{n}")).chain(hotplug).chain(firmware).collect()
}

fn add_disk(args: &mut QemuArgs, n: usize, ready: &PreparedDisk, document: &MachineDocument) {
    let (disk, cache, count) = (&ready.disk, ready.disk.cache, document.processors.count());
    // A disk in memory is read-only where the bus supports that, so that it does not prevent snapshots.
    let seed = matches!(disk.source, DiskSource::CloudInit(_) | DiskSource::Files(_)) && disk.bus != Bus::Sata;
    let node = add_disk_nodes(args, &n.to_string(), &ready.files, cache, disk.read_only || seed);
    let name = format!("d-{}", disk.name);
    let cdrom = disk.kind == DiskKind::Cdrom;
    let device = match disk.bus {
        Bus::Virtio => args.virtio("virtio-blk"),
        Bus::Sata => {
            let port = match document.board {
                Board::Pc => format!("ide.{}", n / 2),
                Board::Q35 | Board::Microvm => format!("ide.{n}"),
            };
            Opt::new(if cdrom { "ide-cd" } else { "ide-hd" }).set("bus", port)
        }
        Bus::Scsi => {
            let controller = args.virtio("virtio-scsi").set("id", format!("scsi{n}"));
            args.device(iothreads::set_controller_queues(controller, disk, count));
            Opt::new(if cdrom { "scsi-cd" } else { "scsi-hd" }).set("bus", format!("scsi{n}.0"))
        }
        Bus::Usb => {
            args.device(Opt::new("qemu-xhci").set("id", format!("xhci{n}")));
            Opt::new("usb-storage").set("bus", format!("xhci{n}.0"))
        }
    };
    let serial = Some(&disk.serial).filter(|serial| !serial.is_empty());
    let device = device.set("id", name).set("drive", node).set_if("serial", serial);
    let device = iothreads::set_disk_properties(device, disk, count).set_if("bootindex", disk.boot_order);
    let device = match disk.block_size {
        Some((logical, physical)) => device.set("logical_block_size", logical).set("physical_block_size", physical),
        None => device,
    };
    let through = if cache == Cache::Writethrough { Some("off") } else { None };
    args.device(if cdrom { device } else { device.set_if("write-cache", through) });
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::disk::tests::sample;
    use nacelle_model::machine::{Clock, Disk, DiskSource, Filesystem, Kernel};

    pub(crate) fn document() -> MachineDocument {
        MachineDocument {
            name: "web, one".into(),
            processors: Processors {
                sockets: 1,
                cores: 2,
                threads: 1,
                model: None,
                features: vec![("avx".into(), false)],
                strict: true,
                pins: None,
            },
            memory_mib: 1024,
            hugepages: false,
            largest_pages: false,
            board: Board::Q35,
            firmware: Firmware::Bios {},
            kernel: None,
            clock: Clock::default(),
            identity: SmbiosIdentity { serial: "a,b".into(), ..SmbiosIdentity::default() },
            disks: vec![],
            filesystems: vec![],
            cards: vec![],
            host_devices: vec![],
            credentials: Vec::new(),
            screen: true,
            tablet: false,
            random: true,
            balloon: true,
            watchdog: Some(WatchdogAction::Reset),
            ends_at_reboot: false,
            paused: false,
            strategy: None,
            keep: None,
        }
    }

    fn args(document: &MachineDocument, disks: &[PreparedDisk]) -> Vec<String> {
        let variables = DiskFiles::Qcow2("/vars".into());
        let kernel = KernelFiles { kernel: "/k,1".into(), initrd: Some("/i".into()) };
        let machine = QemuConfig {
            document,
            accelerator: Accelerator::Tcg,
            disks,
            hotplug: &[],
            shares: document.filesystems.iter().map(|one| format!("/run/{}", one.name).into()).collect(),
            firmware: document.kernel.is_none().then_some((Path::new("/code"), &variables)),
            kernel: document.kernel.is_some().then_some(&kernel),
            clock: Some("tsc_early_khz=1".into()),
            cards: vec![NetworkCard {
                taps: vec![7],
                model: CardModel::Virtio,
                mac: [2, 0, 0, 0, 0, 1],
                mtu: 1450,
                boot_order: None,
            }],
            screen: document.screen.then(|| "/run/screen.sock".into()),
            monitor: 8,
            console: 9,
            agent: 10,
        };
        assert!(machine.inherited().starts_with(&[7]) && machine.inherited().ends_with(&[8, 9, 10]));
        assert_eq!(machine.inherited().len(), 4 + values(&machine.args(), "-add-fd").len());
        machine.args()
    }

    fn values<'a>(args: &'a [String], name: &str) -> Vec<&'a str> {
        args.windows(2).filter(|pair| pair[0] == name).map(|pair| pair[1].as_str()).collect()
    }

    #[test]
    fn each_part_of_a_vm_has_its_arguments() {
        let args = args(&document(), &[]);
        assert_eq!(values(&args, "-name"), ["guest=web,, one"]);
        assert_eq!(values(&args, "-accel"), ["tcg,thread=single"]);
        assert_eq!(values(&args, "-cpu"), ["max,erms=off,fsrm=off,avx=off,enforce=on"]);
        assert_eq!(values(&args, "-smp"), ["2,sockets=1,cores=2,threads=1"]);
        assert_eq!(values(&args, "-smbios"), ["type=1,serial=a,,b"]);
        assert_eq!(values(&args, "-display"), ["vnc=unix:/run/screen.sock"]);
        assert_eq!(values(&args, "-action"), ["watchdog=reset"]);
        assert!(values(&args, "-machine")[0].ends_with(",pflash0=efi-code,pflash1=disk-efi"), "{args:?}");
        assert_eq!(values(&args, "-blockdev").len(), 4);
        let cards: Vec<_> = values(&args, "-device").into_iter().filter(|device| device.contains("net")).collect();
        let places: Vec<_> =
            values(&args, "-device").into_iter().filter(|device| device.contains("root-port")).collect();
        assert_eq!(places.len(), 8);
        assert_eq!(places[7], "pcie-root-port,id=place7,bus=pcie.0,chassis=8,addr=1c.7");
        assert_eq!(cards, ["virtio-net-pci,netdev=net0,mac=02:00:00:00:00:01,host_mtu=1450,romfile="]);
    }

    #[test]
    fn a_board_without_pci_uses_virtio_mmio() {
        let source = || DiskSource::Empty { bytes: 512 };
        let kernel = Kernel { kernel: source(), initrd: Some(source()), arguments: "root=/dev/vda a=b,c".into() };
        let watchdog = None;
        let document =
            MachineDocument { board: Board::Microvm, kernel: Some(kernel), screen: false, watchdog, ..document() };
        let disks = ["one", "two"]
            .map(|name| PreparedDisk { disk: sample(name, source()), files: DiskFiles::Qcow2("/f".into()) });
        let args = args(&document, &disks);
        let board = "microvm,acpi=on,ioapic2=on,auto-kernel-cmdline=off,usb=off,dump-guest-core=off,mem-merge=off,memory-backend=ram";
        assert_eq!(values(&args, "-machine"), [board]);
        let started = ["-kernel", "-initrd", "-append"].map(|name| values(&args, name).concat());
        assert_eq!(started, ["/k,1", "/i", "tsc_early_khz=1 root=/dev/vda a=b,c"]);
        let devices = values(&args, "-device");
        let places = devices.iter().filter_map(|device| device.split_once("bus=virtio-mmio-bus."));
        let places: Vec<_> = places.map(|(head, place)| format!("{head}{}", &place[..2])).collect();
        let expected = [
            "virtio-serial-device,23",
            "virtio-blk-device,22",
            "virtio-blk-device,21",
            "virtio-net-device,20",
            "virtio-rng-device,19",
            "virtio-balloon-device,18",
        ];
        assert_eq!(places, expected);
        assert!(!devices.iter().any(|device| device.contains("-pci") || device.contains("romfile")), "{devices:?}");
    }

    #[test]
    fn shared_directories_require_shared_memory() {
        let filesystems = vec![Filesystem { name: "settings".into(), what: "configMap c".into() }];
        let document = MachineDocument { filesystems, ..document() };
        let arguments = args(&document, &[]);
        assert_eq!(values(&arguments, "-object"), ["memory-backend-memfd,id=ram,size=1024M,share=on"]);
        assert!(values(&arguments, "-chardev").contains(&"socket,id=share0,path=/run/settings"), "{arguments:?}");
        let device = "vhost-user-fs-pci,chardev=share0,tag=settings,queue-size=128";
        assert!(values(&arguments, "-device").contains(&device), "{arguments:?}");
        for (largest_pages, size) in [(false, "2M"), (true, "1G")] {
            let arguments = args(&MachineDocument { hugepages: true, largest_pages, ..document.clone() }, &[]);
            let ram =
                format!("memory-backend-memfd,id=ram,size=1024M,share=on,hugetlb=on,hugetlbsize={size},prealloc=on");
            assert_eq!(values(&arguments, "-object"), [ram]);
        }
    }

    #[test]
    fn an_overlay_over_a_range_of_an_image_file() {
        let base = BackingRange { file: "/blob".into(), offset: 4096, length: 8192, qcow2: true };
        let files = DiskFiles::Overlay { top: "/top".into(), base };
        let mut disk = sample("root", DiskSource::Empty { bytes: 512 });
        disk.boot_order = Some(1);
        let args = args(&document(), &[PreparedDisk { disk, files }]);
        assert_eq!(
            values(&args, "-blockdev")[4..],
            [
                "driver=file,node-name=file-0,filename=/blob,read-only=on,auto-read-only=off,locking=off",
                "driver=raw,node-name=piece-0,file=file-0,read-only=on,offset=4096,size=8192",
                "driver=qcow2,node-name=base-0,file=piece-0,read-only=on",
                "driver=file,node-name=top-0,filename=/top,read-only=off,auto-read-only=off,locking=on,discard=unmap",
                "driver=qcow2,backing=base-0,node-name=disk-0,file=top-0,discard=unmap",
            ]
        );
        assert!(values(&args, "-device").contains(&"virtio-blk-pci,id=d-root,drive=disk-0,bootindex=1"), "{args:?}");
    }

    #[test]
    fn a_node_device_is_inherited_and_always_raw() {
        let blockdevs = |block, read_only| {
            let disk = Disk { read_only, ..sample("data", DiskSource::Device { path: "/x".into() }) };
            let file = std::fs::File::open("/dev/null").unwrap();
            let fd = file.as_raw_fd();
            let args = args(&document(), &[PreparedDisk { disk, files: DiskFiles::Device { file, block } }]);
            assert_eq!(values(&args, "-add-fd"), [format!("fd={fd},set=0")]);
            values(&args, "-blockdev").into_iter().skip(4).map(str::to_owned).collect::<Vec<_>>()
        };
        let inner = "node-name=top-0,filename=/dev/fdset/0";
        assert_eq!(
            blockdevs(true, false),
            [
                &format!("driver=host_device,{inner},read-only=off,auto-read-only=off,locking=on,discard=unmap"),
                "driver=raw,node-name=disk-0,file=top-0,discard=unmap",
            ]
        );
        assert_eq!(
            blockdevs(false, true),
            [
                &format!("driver=file,{inner},read-only=on,auto-read-only=off,locking=on"),
                "driver=raw,node-name=disk-0,file=top-0,read-only=on",
            ]
        );
    }

    #[test]
    fn each_bus_has_its_devices() {
        let on = |bus, kind| {
            let mut disk = sample("a", DiskSource::Empty { bytes: 512 });
            (disk.bus, disk.kind, disk.cache) = (bus, kind, Cache::None);
            let args = args(&document(), &[PreparedDisk { disk, files: DiskFiles::Qcow2("/f".into()) }]);
            assert!(values(&args, "-blockdev")[4].ends_with(",cache.direct=on,aio=threads"));
            values(&args, "-device").into_iter().find(|device| device.contains("id=d-a")).unwrap().to_owned()
        };
        assert_eq!(on(Bus::Sata, DiskKind::Cdrom), "ide-cd,bus=ide.0,id=d-a,drive=disk-0");
        assert_eq!(on(Bus::Scsi, DiskKind::Disk), "scsi-hd,bus=scsi0.0,id=d-a,drive=disk-0");
        assert_eq!(on(Bus::Usb, DiskKind::Disk), "usb-storage,bus=xhci0.0,id=d-a,drive=disk-0");
    }
}
