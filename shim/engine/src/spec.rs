//! Defines the specification of a VM, and the check that is required before an engine starts it. It accesses no file and no device.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use nacelle_base::machine::{ConsoleKind, CpuModel, MemoryPages, Topology};
use nacelle_base::net::Mac;
use nacelle_base::share::QUEUES;
use nacelle_base::{Classify, FailureKind};
use nacelle_vmm::machine::BLOCK_MIB;

/// The smallest memory in which the guest kernel and the agent start, in MiB.
pub const MIN_MEMORY_MIB: u32 = 64;
/// The size of a page of the node's hugetlb pool (`MemoryPages::Hugetlb`), in MiB.
pub const HUGE_PAGE_MIB: u32 = 2;
/// The maximum number of vCPUs of a VM.
pub const MAX_VCPUS: u8 = 64;
/// The maximum number of threads of a core.
const MAX_THREADS: u32 = 2;
/// The smallest context id of a guest; vsock reserves the smaller ones.
pub const MIN_GUEST_CID: u32 = 3;
/// The maximum length of a disk's serial number, in bytes (20 in virtio-blk).
pub const MAX_SERIAL: usize = 20;
/// The maximum length of the kernel command line in bytes, without the parameters that the engine adds.
pub const MAX_CMDLINE: usize = 1024;

/// The specification of a VM: plain data that `check` validates.
#[derive(Debug)]
pub struct MachineSpec {
    /// The number of vCPUs, 1 to 64.
    pub vcpus: u8,
    /// The topology of the vCPUs; `None` for cores of one socket.
    pub topology: Option<Topology>,
    /// The CPU model; `None` for all features that the accelerator supports. Engines `kvm` and `host` reject a model.
    pub cpu_model: Option<CpuModel>,
    /// The memory of the guest in MiB, 64 or more.
    pub memory_mib: u32,
    /// The hot-plug memory in MiB, which the guest's kernel does not see at boot and may add while it runs
    /// ([`unused_hotplug_ranges`](crate::unused_hotplug_ranges) returns its address ranges): a multiple of 128; 0 with huge pages. The
    /// node allocates it when it is touched.
    pub hotplug_mib: u32,
    /// The page size that backs the memory.
    pub memory_pages: MemoryPages,
    /// The guest kernel: an uncompressed ELF `vmlinux` with the PVH note.
    pub kernel: PathBuf,
    /// The initramfs (cpio, compressed or not).
    pub initrd: PathBuf,
    /// Kernel parameters besides the engine's own, each without white space.
    pub cmdline: Vec<String>,
    /// The disks: `disks[n]` is `/dev/vda` plus n in the guest, and `Machine::disks()[n]`.
    pub disks: Vec<DiskSpec>,
    /// The network interfaces: `nics[n]` is `eth`n in the guest.
    pub nics: Vec<NicSpec>,
    /// An existing directory of mode 0700 for this machine's sockets. The engine removes what it creates there.
    pub run_dir: PathBuf,
    /// The kind of the console. A virtio console counts as a device.
    pub console: ConsoleKind,
    /// The file for the console's output. It never grows beyond 1 MiB: then its older half is removed.
    pub console_log: PathBuf,
    /// The guest's vsock context id, 3 or more. The device belongs to this process, so two machines may have the same.
    pub guest_cid: u32,
    /// The channels to the file-server process (`nacelle_base::share`), one pair for each share; empty for no share.
    pub shares: Vec<[UnixStream; QUEUES]>,
}

/// A disk of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskSpec {
    /// A read-only disk, empty at first; images are placed on its slot while the guest runs.
    Images {
        /// The serial number that the guest sees (`/sys/block/*/serial`): 1 to 20 bytes of printable ASCII.
        serial: String,
    },
    /// A disk that is empty at first; writable volumes are placed on its slot while the guest runs.
    Volumes {
        /// The serial number, as for `Images`.
        serial: String,
    },
    /// A disk that is a whole file or block device.
    File {
        /// The path of the file or block device, whose length must be a multiple of 512 bytes.
        path: PathBuf,
        /// The guest cannot write to the disk.
        read_only: bool,
        /// The serial number, as for `Images`.
        serial: String,
    },
}

impl DiskSpec {
    /// Returns the serial number that the guest sees.
    pub fn serial(&self) -> &str {
        let (DiskSpec::Images { serial } | DiskSpec::Volumes { serial } | DiskSpec::File { serial, .. }) = self;
        serial
    }
}

/// A network interface of a VM.
#[derive(Debug)]
pub struct NicSpec {
    /// An open tap with `IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`.
    pub tap: OwnedFd,
    /// Further queues of the same tap, at most 7; then all have `IFF_MULTI_QUEUE`. An engine that serves only one queue closes them.
    pub more_queues: Vec<OwnedFd>,
    /// A packet socket that receives the guest's DHCP requests (`nacelle_net::tap::open_dhcp_socket`), for the engine that answers them.
    pub dhcp: Option<OwnedFd>,
    /// The MAC address that the guest uses.
    pub mac: Mac,
    /// The MTU in bytes, 68 to 65535.
    pub mtu: u32,
}

/// The limits of an engine for one VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The maximum number of vCPUs.
    pub vcpus: u8,
    /// The maximum number of disks and network interfaces together.
    pub devices: usize,
    /// The engine supports named CPU models.
    pub cpu_models: bool,
}

/// A specification is invalid.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// There are no vCPUs or too many.
    #[error("cannot create a VM with {got} vCPUs: this engine supports 1 to {max}")]
    Vcpus {
        /// The requested number.
        got: u8,
        /// The maximum of this engine.
        max: u8,
    },
    /// The topology does not match the number of vCPUs.
    #[error(
        "cannot create a VM with {} sockets of {} cores of {} threads: the product must be {vcpus}, its number of vCPUs, with at most 2 threads per core", .topology.sockets,
        .topology.cores, .topology.threads
    )]
    Topology {
        /// The requested topology.
        topology: Topology,
        /// The requested number of vCPUs.
        vcpus: u8,
    },
    /// The engine does not support the CPU model, or a name is invalid.
    #[error("cannot create a VM with CPU model {got:?}: {rule}")]
    CpuModel {
        /// The requested model.
        got: CpuModel,
        /// The rule that it violates.
        rule: &'static str,
    },
    /// The memory is too small.
    #[error("cannot create a VM with {got_mib} MiB of memory: the guest needs {min_mib} or more")]
    Memory {
        /// The requested memory.
        got_mib: u32,
        /// The minimum.
        min_mib: u32,
    },
    /// The memory is not a multiple of the huge page size.
    #[error("cannot back {got_mib} MiB of memory with huge pages: it must be a multiple of {step_mib} MiB")]
    HugePages {
        /// The requested memory.
        got_mib: u32,
        /// The size of a page.
        step_mib: u32,
    },
    /// The hot-plug memory is not a multiple of the hot-plug block size, or is not allowed with huge pages.
    #[error(
        "cannot provide {got_mib} MiB of hot-plug memory: it must be a multiple of {step_mib} MiB, or 0 with huge pages"
    )]
    HotplugMemory {
        /// The requested hot-plug memory.
        got_mib: u32,
        /// The size of a hot-plug block.
        step_mib: u32,
    },
    /// The VM has too many devices.
    #[error("cannot create a VM with {disks} disks and {nics} network interfaces: this engine supports {max} devices")]
    Devices {
        /// The number of disks.
        disks: usize,
        /// The number of network interfaces.
        nics: usize,
        /// The maximum of both together.
        max: usize,
    },
    /// A path is relative, is not UTF-8, or contains a NUL byte.
    #[error("{what} {path:?} is invalid: it must be an absolute path in UTF-8")]
    Path {
        /// The field: "kernel", "initrd", "disk", "run_dir", "console_log".
        what: &'static str,
        /// The path.
        path: PathBuf,
    },
    /// The sockets in the run directory would have names longer than Linux allows.
    #[error("run_dir {path:?} is too long ({got} bytes): the maximum is {max}, so that the paths of its sockets fit")]
    RunDirTooLong {
        /// The run directory.
        path: PathBuf,
        /// The length of its path in bytes.
        got: usize,
        /// The maximum.
        max: usize,
    },
    /// A kernel parameter is empty, or contains white space, quotes or control characters.
    #[error("kernel parameter {parameter:?} is invalid: it must be one word of printable ASCII without quotes")]
    CmdlineParameter {
        /// The parameter.
        parameter: String,
    },
    /// The kernel command line is too long.
    #[error("the kernel parameters are too long ({got} bytes): the maximum is {max}")]
    CmdlineTooLong {
        /// The length in bytes, with one space between two parameters.
        got: usize,
        /// The maximum.
        max: usize,
    },
    /// A serial number is invalid for virtio-blk, or is not unique.
    #[error("disk serial {serial:?} is invalid: it must be 1 to {max} bytes of printable ASCII, and unique")]
    Serial {
        /// The serial number.
        serial: String,
        /// The maximum length.
        max: usize,
    },
    /// A MAC address is not unique, or is not a unicast address.
    #[error("MAC address {} is invalid: it must be a unicast address, and unique", hex(.mac))]
    Mac {
        /// The address.
        mac: Mac,
    },
    /// The MTU is not possible for IP over Ethernet.
    #[error("MTU {got} is invalid: it must be {min} to {max} bytes")]
    Mtu {
        /// The requested MTU.
        got: u32,
        /// The minimum.
        min: u32,
        /// The maximum.
        max: u32,
    },
    /// The context id is reserved.
    #[error("guest CID {got} is invalid: it must be {min} to {max}")]
    GuestCid {
        /// The requested id.
        got: u32,
        /// The minimum.
        min: u32,
        /// The maximum.
        max: u32,
    },
}

impl Classify for SpecError {
    fn kind(&self) -> FailureKind {
        match self {
            SpecError::Devices { .. } => FailureKind::Exhausted,
            _ => FailureKind::Invalid,
        }
    }
}

/// A validated specification, which engines accept.
#[derive(Debug)]
pub struct CheckedSpec(MachineSpec);

const MTU: std::ops::RangeInclusive<u32> = 68..=65535;
const MAX_GUEST_CID: u32 = u32::MAX - 1;
/// The maximum length of the run directory's path: `sun_path` has 108 bytes with the final zero, 20 of which are reserved
/// for the names of sockets.
const MAX_RUN_DIR: usize = 107 - 20;

impl MachineSpec {
    /// Validates everything that can be checked without access to the node.
    pub fn check(self, limits: &Limits) -> Result<CheckedSpec, SpecError> {
        let max = limits.vcpus.min(MAX_VCPUS);
        if !(1..=max).contains(&self.vcpus) {
            return Err(SpecError::Vcpus { got: self.vcpus, max });
        }
        if let Some(topology) =
            self.topology.filter(|t| t.count() != u32::from(self.vcpus) || !(1..=MAX_THREADS).contains(&t.threads))
        {
            return Err(SpecError::Topology { topology, vcpus: self.vcpus });
        }
        if let Some(model) = &self.cpu_model {
            let rule = match model.find_invalid_name() {
                _ if !limits.cpu_models => Some("this engine passes the node's CPUs to the guest unchanged"),
                Some(_) => Some("a name consists of letters, digits, '-', '_' and '.'"),
                None => None,
            };
            if let Some(rule) = rule {
                return Err(SpecError::CpuModel { got: model.clone(), rule });
            }
        }
        if self.memory_mib < MIN_MEMORY_MIB {
            return Err(SpecError::Memory { got_mib: self.memory_mib, min_mib: MIN_MEMORY_MIB });
        }
        if self.memory_pages == MemoryPages::Hugetlb && !self.memory_mib.is_multiple_of(HUGE_PAGE_MIB) {
            return Err(SpecError::HugePages { got_mib: self.memory_mib, step_mib: HUGE_PAGE_MIB });
        }
        let huge = self.memory_pages == MemoryPages::Hugetlb;
        if !self.hotplug_mib.is_multiple_of(BLOCK_MIB) || (huge && self.hotplug_mib > 0) {
            return Err(SpecError::HotplugMemory { got_mib: self.hotplug_mib, step_mib: BLOCK_MIB });
        }
        let max = limits.devices.saturating_sub(usize::from(self.console == ConsoleKind::Virtio));
        if self.disks.len() + self.nics.len() > max {
            return Err(SpecError::Devices { disks: self.disks.len(), nics: self.nics.len(), max });
        }
        if !(MIN_GUEST_CID..=MAX_GUEST_CID).contains(&self.guest_cid) {
            return Err(SpecError::GuestCid { got: self.guest_cid, min: MIN_GUEST_CID, max: MAX_GUEST_CID });
        }
        self.check_paths()?;
        check_cmdline(&self.cmdline)?;
        check_disks(&self.disks)?;
        check_nics(&self.nics)?;
        Ok(CheckedSpec(self))
    }

    fn check_paths(&self) -> Result<(), SpecError> {
        check_path("kernel", &self.kernel)?;
        check_path("initrd", &self.initrd)?;
        check_path("run_dir", &self.run_dir)?;
        check_path("console_log", &self.console_log)?;
        match self.run_dir.as_os_str().len() {
            got if got > MAX_RUN_DIR => {
                Err(SpecError::RunDirTooLong { path: self.run_dir.clone(), got, max: MAX_RUN_DIR })
            }
            _ => Ok(()),
        }
    }
}

fn check_path(what: &'static str, path: &Path) -> Result<(), SpecError> {
    match path.to_str() {
        Some(text) if path.is_absolute() && !text.contains('\0') => Ok(()),
        _ => Err(SpecError::Path { what, path: path.to_owned() }),
    }
}

fn check_cmdline(parameters: &[String]) -> Result<(), SpecError> {
    let plain = |byte: u8| byte.is_ascii_graphic() && byte != b'"' && byte != b'\'';
    if let Some(parameter) = parameters.iter().find(|parameter| parameter.is_empty() || !parameter.bytes().all(plain)) {
        return Err(SpecError::CmdlineParameter { parameter: parameter.clone() });
    }
    match parameters.iter().map(|parameter| parameter.len() + 1).sum::<usize>().saturating_sub(1) {
        got if got > MAX_CMDLINE => Err(SpecError::CmdlineTooLong { got, max: MAX_CMDLINE }),
        _ => Ok(()),
    }
}

fn check_disks(disks: &[DiskSpec]) -> Result<(), SpecError> {
    let mut seen = HashSet::new();
    for disk in disks {
        if let DiskSpec::File { path, .. } = disk {
            check_path("disk", path)?;
        }
        let serial = disk.serial();
        let valid = (1..=MAX_SERIAL).contains(&serial.len()) && serial.bytes().all(|byte| byte.is_ascii_graphic());
        if !valid || !seen.insert(serial) {
            return Err(SpecError::Serial { serial: serial.to_owned(), max: MAX_SERIAL });
        }
    }
    Ok(())
}

fn check_nics(nics: &[NicSpec]) -> Result<(), SpecError> {
    let mut seen = HashSet::new();
    for nic in nics {
        let group = nic.mac[0] & 1 == 1;
        if group || nic.mac == [0; 6] || !seen.insert(nic.mac) {
            return Err(SpecError::Mac { mac: nic.mac });
        }
        if !MTU.contains(&nic.mtu) {
            return Err(SpecError::Mtu { got: nic.mtu, min: *MTU.start(), max: *MTU.end() });
        }
    }
    Ok(())
}

impl CheckedSpec {
    pub(crate) fn into_inner(self) -> MachineSpec {
        self.0
    }
}

/// Formats a MAC address as hexadecimal bytes with colons.
pub(crate) fn hex(mac: &Mac) -> String {
    let [a, b, c, d, e, f] = mac;
    format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpu_model_named(name: &str) -> CpuModel {
        CpuModel { name: Some(name.into()), ..CpuModel::default() }
    }

    const LIMITS: Limits = Limits { vcpus: 8, devices: 3, cpu_models: true };

    fn nic(mac: Mac, mtu: u32) -> NicSpec {
        NicSpec { tap: std::fs::File::open("/dev/null").unwrap().into(), more_queues: vec![], dhcp: None, mac, mtu }
    }

    fn valid_spec() -> MachineSpec {
        MachineSpec {
            vcpus: 8,
            topology: Some(Topology { sockets: 2, cores: 2, threads: 2 }),
            cpu_model: Some(cpu_model_named("EPYC-Rome")),
            memory_mib: MIN_MEMORY_MIB,
            hotplug_mib: 0,
            memory_pages: MemoryPages::Hugetlb,
            kernel: "/boot/vmlinux".into(),
            initrd: "/boot/initrd".into(),
            cmdline: vec!["nacelle.log=debug".into()],
            disks: vec![
                DiskSpec::Images { serial: "images".into() },
                DiskSpec::File { path: "/scratch".into(), read_only: false, serial: "scratch".into() },
            ],
            nics: vec![nic([2, 0, 0, 0, 0, 1], 1500)],
            run_dir: "/run/pod".into(),
            console: ConsoleKind::Serial,
            console_log: "/run/pod/console.log".into(),
            guest_cid: 3,
            shares: Vec::new(),
        }
    }

    #[test]
    fn a_valid_spec_passes() {
        let spec = valid_spec().check(&LIMITS).unwrap();
        assert_eq!(spec.into_inner().vcpus, 8);
    }

    #[test]
    fn each_rule_has_its_error() {
        type BreakRule = fn(&mut MachineSpec);
        let file = |serial: &str| DiskSpec::File { path: "/d".into(), read_only: true, serial: serial.into() };
        let table: Vec<(BreakRule, SpecError)> = vec![
            (|s| s.vcpus = 0, SpecError::Vcpus { got: 0, max: 8 }),
            (|s| s.vcpus = 9, SpecError::Vcpus { got: 9, max: 8 }),
            (
                |s| s.vcpus = 4,
                SpecError::Topology { topology: Topology { sockets: 2, cores: 2, threads: 2 }, vcpus: 4 },
            ),
            (
                |s| s.topology = Some(Topology { sockets: 2, cores: 1, threads: 4 }),
                SpecError::Topology { topology: Topology { sockets: 2, cores: 1, threads: 4 }, vcpus: 8 },
            ),
            (
                |s| s.cpu_model = Some(cpu_model_named("a,b")),
                SpecError::CpuModel {
                    got: cpu_model_named("a,b"),
                    rule: "a name consists of letters, digits, '-', '_' and '.'",
                },
            ),
            (|s| s.memory_mib = 63, SpecError::Memory { got_mib: 63, min_mib: 64 }),
            (|s| s.hotplug_mib = 127, SpecError::HotplugMemory { got_mib: 127, step_mib: 128 }),
            (|s| s.hotplug_mib = 128, SpecError::HotplugMemory { got_mib: 128, step_mib: 128 }),
            (|s| s.memory_mib = 65, SpecError::HugePages { got_mib: 65, step_mib: 2 }),
            (
                |s| s.disks.push(DiskSpec::Images { serial: "more".into() }),
                SpecError::Devices { disks: 3, nics: 1, max: 3 },
            ),
            (|s| s.console = ConsoleKind::Virtio, SpecError::Devices { disks: 2, nics: 1, max: 2 }),
            (|s| s.kernel = "vmlinux".into(), SpecError::Path { what: "kernel", path: "vmlinux".into() }),
            (|s| s.initrd = "i".into(), SpecError::Path { what: "initrd", path: "i".into() }),
            (|s| s.console_log = "c".into(), SpecError::Path { what: "console_log", path: "c".into() }),
            (|s| s.run_dir = "./run".into(), SpecError::Path { what: "run_dir", path: "./run".into() }),
            (
                |s| s.run_dir = format!("/{}", "r".repeat(90)).into(),
                SpecError::RunDirTooLong { path: format!("/{}", "r".repeat(90)).into(), got: 91, max: 87 },
            ),
            (|s| s.cmdline.push("a b".into()), SpecError::CmdlineParameter { parameter: "a b".into() }),
            (|s| s.cmdline.push(String::new()), SpecError::CmdlineParameter { parameter: String::new() }),
            (|s| s.cmdline.push("a\n".into()), SpecError::CmdlineParameter { parameter: "a\n".into() }),
            (
                |s| s.cmdline = vec!["x".repeat(512), "y".repeat(512)],
                SpecError::CmdlineTooLong { got: 1025, max: 1024 },
            ),
            (
                |s| s.disks[1] = DiskSpec::File { path: "d".into(), read_only: true, serial: "s".into() },
                SpecError::Path { what: "disk", path: "d".into() },
            ),
            (|s| s.nics[0].mac = [1, 0, 0, 0, 0, 0], SpecError::Mac { mac: [1, 0, 0, 0, 0, 0] }),
            (|s| s.nics[0].mac = [0; 6], SpecError::Mac { mac: [0; 6] }),
            (|s| s.nics[0].mtu = 67, SpecError::Mtu { got: 67, min: 68, max: 65535 }),
            (|s| s.guest_cid = 2, SpecError::GuestCid { got: 2, min: 3, max: MAX_GUEST_CID }),
        ];
        for (break_rule, expected) in table {
            let mut spec = valid_spec();
            break_rule(&mut spec);
            assert_eq!(spec.check(&LIMITS).unwrap_err(), expected);
        }
        for serial in ["", "with space", "123456789012345678901", "images"] {
            let mut spec = valid_spec();
            spec.disks[1] = file(serial);
            assert_eq!(spec.check(&LIMITS).unwrap_err(), SpecError::Serial { serial: serial.into(), max: MAX_SERIAL });
        }
    }

    #[test]
    fn a_mac_is_used_once() {
        let mut spec = valid_spec();
        spec.disks.clear();
        spec.nics.push(nic([2, 0, 0, 0, 0, 1], 1500));
        let error = spec.check(&LIMITS).unwrap_err();
        assert_eq!(
            error.to_string(),
            "MAC address 02:00:00:00:00:01 is invalid: it must be a unicast address, and unique"
        );
        assert_eq!(error.kind(), FailureKind::Invalid);
    }
}
