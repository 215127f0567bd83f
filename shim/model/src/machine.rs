//! Defines the machine of a machine pod: the document that takes the place of an OCI runtime specification for the keeper. The daemon
//! creates it from checked annotations; the keeper starts QEMU from it.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

/// The machine of a machine pod. `S` describes the contents of its disks: [`DiskSource`] for the keeper,
/// [`RequestedDiskSource`](crate::machine_pod::RequestedDiskSource) before the daemon has resolved images and volumes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineDocument<S = DiskSource> {
    /// The name of the machine, used as the title of its QEMU process.
    pub name: String,
    /// The vCPUs.
    pub processors: Processors,
    /// The memory of the guest in MiB.
    pub memory_mib: u64,
    /// The memory is backed by 2 MiB pages of the node's hugetlb pool.
    pub hugepages: bool,
    /// The memory is backed by 1 GiB pages instead.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub largest_pages: bool,
    /// The machine type.
    pub board: Board,
    /// The firmware.
    pub firmware: Firmware,
    /// A kernel for direct boot, without a boot loader on the disks.
    #[serde(default = "no_kernel", skip_serializing_if = "Option::is_none")]
    pub kernel: Option<Kernel<S>>,
    /// The clock and the timers.
    #[serde(default)]
    pub clock: Clock,
    /// The identity in SMBIOS; the board `microvm` has none.
    pub identity: SmbiosIdentity,
    /// The disks, in the order in which the guest finds them.
    pub disks: Vec<Disk<S>>,
    /// Directories of the node that the guest mounts by virtio-fs, in the order of the container's volumes for them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub filesystems: Vec<Filesystem>,
    /// The network cards. The pod process has a tap for each, in this order.
    pub cards: Vec<Card>,
    /// PCI devices of the node that are passed through.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub host_devices: Vec<HostDevice>,
    /// Secrets with SSH keys and passwords that the guest agent installs; the daemon reads them and sends their contents to the keeper.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub credentials: Vec<Credential>,
    /// The VM has a display, which VNC serves.
    pub screen: bool,
    /// The VM has a USB tablet, so that VNC and guest agree on the pointer's position.
    pub tablet: bool,
    /// The VM has a virtio random number generator.
    pub random: bool,
    /// The VM has a memory balloon, by which the guest returns memory.
    pub balloon: bool,
    /// The action of the watchdog; `None` for no watchdog.
    pub watchdog: Option<WatchdogAction>,
    /// The VM ends when the guest reboots.
    pub ends_at_reboot: bool,
    /// The VM is created paused.
    pub paused: bool,
    /// The run strategy of a persistent VM; `None` if the VM ends with its container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strategy: Option<RunStrategy>,
    /// The directory of the persistent state: writes to the disks, and the firmware's variables. `None` if they are removed
    /// with the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<PathBuf>,
}

fn no_kernel<S>() -> Option<Kernel<S>> {
    None
}

impl<S> MachineDocument<S> {
    /// Returns the same machine with the disk sources that `find` returns; it is called with the name of the disk, or with
    /// [`KERNEL_SOURCE_KEY`] or [`INITRD_SOURCE_KEY`].
    pub fn with<T, E>(&self, mut find: impl FnMut(&str, &S) -> Result<T, E>) -> Result<MachineDocument<T>, E> {
        let kernel = self.kernel.as_ref().map(|kernel| {
            Ok(Kernel {
                kernel: find(KERNEL_SOURCE_KEY, &kernel.kernel)?,
                initrd: kernel.initrd.as_ref().map(|initrd| find(INITRD_SOURCE_KEY, initrd)).transpose()?,
                arguments: kernel.arguments.clone(),
            })
        });
        let kernel = kernel.transpose()?;
        let disk = |disk: &Disk<S>| {
            Ok(Disk {
                name: disk.name.clone(),
                kind: disk.kind,
                bus: disk.bus,
                read_only: disk.read_only,
                boot_order: disk.boot_order,
                serial: disk.serial.clone(),
                cache: disk.cache,
                block_size: disk.block_size,
                serving: disk.serving,
                source: find(&disk.name, &disk.source)?,
            })
        };
        Ok(MachineDocument {
            name: self.name.clone(),
            processors: self.processors.clone(),
            memory_mib: self.memory_mib,
            hugepages: self.hugepages,
            largest_pages: self.largest_pages,
            board: self.board,
            firmware: self.firmware.clone(),
            kernel,
            clock: self.clock,
            identity: self.identity.clone(),
            disks: self.disks.iter().map(disk).collect::<Result<_, E>>()?,
            filesystems: self.filesystems.clone(),
            cards: self.cards.clone(),
            host_devices: self.host_devices.clone(),
            credentials: self.credentials.clone(),
            screen: self.screen,
            tablet: self.tablet,
            random: self.random,
            balloon: self.balloon,
            watchdog: self.watchdog,
            ends_at_reboot: self.ends_at_reboot,
            paused: self.paused,
            strategy: self.strategy,
            keep: self.keep.clone(),
        })
    }
}

/// The clock and the timers; unset values have QEMU's defaults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Clock {
    /// The VM has a high precision event timer.
    pub hpet: Option<bool>,
    /// The VM has a programmable interval timer.
    pub pit: Option<bool>,
    /// The tick policy of the interval timer: late ticks are discarded if true, delayed if false. No effect with emulation.
    pub pit_discards: Option<bool>,
    /// The real-time clock catches up late ticks.
    pub rtc_catches_up: bool,
    /// The real-time clock stops while the guest is paused.
    pub rtc_is_guests: bool,
    /// The guest does not see the KVM clock.
    pub no_kvm_clock: bool,
}

/// The vCPUs and their topology.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Processors {
    /// The number of sockets.
    pub sockets: u32,
    /// The number of cores in a socket.
    pub cores: u32,
    /// The number of threads in a core.
    pub threads: u32,
    /// The name of a QEMU CPU model; `None` for all features that the accelerator supports.
    pub model: Option<String>,
    /// CPU features that are added to the model (true) or removed from it (false).
    pub features: Vec<(String, bool)>,
    /// The start fails if a feature is missing.
    pub strict: bool,
    /// The CPUs of the node to which the vCPUs are pinned, in the order of the vCPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pins: Option<Vec<u32>>,
}

impl Processors {
    /// Returns the number of vCPUs.
    pub fn count(&self) -> u32 {
        self.sockets.saturating_mul(self.cores).saturating_mul(self.threads)
    }
}

/// A machine type of QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Board {
    /// The type with PCI Express and SATA.
    Q35,
    /// The type with PCI and IDE.
    Pc,
    /// The type without PCI, which has virtio-mmio devices only.
    Microvm,
}

impl Board {
    /// Returns the maximum number of virtio devices; `None` if there is no limit.
    pub const fn places(self) -> Option<usize> {
        match self {
            Board::Q35 | Board::Pc => None,
            Board::Microvm => Some(24),
        }
    }
}

/// A PCI device of the node that is passed through by VFIO.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostDevice {
    /// The PCI address on the node: "0000:3b:00.1" (domain, bus, device, function).
    pub address: String,
}

/// The maximum number of passed-through devices of one VM.
pub const MOST_HOST_DEVICES: usize = 16;

/// Returns whether the text is a PCI address in the kernel's format.
pub fn is_pci_address(text: &str) -> bool {
    let hex = |part: &str, least, most| {
        (least..=most).contains(&part.len())
            && part.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
    };
    let parts: Vec<&str> = text.split([':', '.']).collect();
    let [domain, bus, device, function] = parts.as_slice() else { return false };
    // The domain numbers of virtual host bridges have more digits than those of PCI.
    hex(domain, 4, 8)
        && hex(bus, 2, 2)
        && hex(device, 2, 2)
        && matches!(function.as_bytes(), [b'0'..=b'7'])
        && text.rfind(':') < text.find('.')
}

/// The firmware.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Firmware {
    /// SeaBIOS.
    Bios {},
    /// UEFI.
    Efi {
        /// The path of the firmware image.
        code: PathBuf,
        /// The path of the variables template, which a new VM gets a copy of.
        variables: PathBuf,
        /// Secure boot: the firmware starts signed systems only, and variables are writable only in system management mode.
        #[serde(default)]
        secure: bool,
    },
}

/// The name with which [`MachineDocument::with`] requests the kernel's source. No disk has this name, because of the slash.
pub const KERNEL_SOURCE_KEY: &str = "/kernel";
/// The name with which [`MachineDocument::with`] requests the initramfs' source.
pub const INITRD_SOURCE_KEY: &str = "/initrd";

/// A kernel for direct boot (Linux boot protocol, Documentation/arch/x86/boot.rst).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kernel<S = DiskSource> {
    /// The kernel image.
    pub kernel: S,
    /// The initramfs.
    pub initrd: Option<S>,
    /// The kernel command line.
    pub arguments: String,
}

/// The identity of the VM in the SMBIOS tables. Empty values are not set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SmbiosIdentity {
    /// The system UUID.
    pub uuid: String,
    /// The system serial number.
    pub serial: String,
    /// The chassis: manufacturer, version, serial number, asset tag, SKU number.
    pub chassis: [String; 5],
}

/// A disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk<S = DiskSource> {
    /// The name of the disk: letters, digits, '-'; unique in the VM.
    pub name: String,
    /// The type of drive that the guest sees.
    pub kind: DiskKind,
    /// The bus to which the disk is attached.
    pub bus: Bus,
    /// The guest cannot write.
    pub read_only: bool,
    /// The position in the boot order, from 1.
    pub boot_order: Option<u32>,
    /// The serial number; empty for none.
    pub serial: String,
    /// The cache mode.
    pub cache: Cache,
    /// The logical and the physical block size in bytes.
    pub block_size: Option<(u32, u32)>,
    /// The I/O thread, the queues and the sharing of the disk.
    #[serde(default, skip_serializing_if = "Serving::usual")]
    pub serving: Serving,
    /// The contents.
    pub source: S,
}

/// The I/O thread, the queues and the sharing of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Serving {
    /// The number of the QEMU I/O thread, from 0; `None` for the main thread. Only for virtio.
    pub thread: Option<u32>,
    /// The disk has one queue for each vCPU.
    pub queues: bool,
    /// Other VMs may write to the disk at the same time, if they set this too. Only for the source [`DiskSource::Device`].
    pub shared: bool,
}

impl Serving {
    /// Returns whether all values are the defaults.
    fn usual(&self) -> bool {
        *self == Serving::default()
    }
}

/// A directory of the node that the guest mounts by virtio-fs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Filesystem {
    /// The name and virtio-fs tag: letters, digits, '-'; unique in the VM.
    pub name: String,
    /// The source for messages: "configMap settings".
    pub what: String,
}

/// The type of a drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DiskKind {
    /// A hard disk.
    Disk,
    /// A CD-ROM in its drive.
    Cdrom,
}

/// The bus of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Bus {
    /// A virtio block device.
    Virtio,
    /// A SATA port, or an IDE port of board `pc`.
    Sata,
    /// A unit of a virtio SCSI controller.
    Scsi,
    /// A USB stick.
    Usb,
}

/// The cache mode of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cache {
    /// Writes are cached until the guest flushes.
    Writeback,
    /// Each write reaches the disk before it completes.
    Writethrough,
    /// The node's page cache is bypassed.
    None,
}

/// The contents of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum DiskSource {
    /// A disk in an image. Writes are discarded with the VM; those of a persistent VM are kept as long as the image stays the same.
    Image {
        /// The id of the image.
        image: String,
        /// The file that contains the disk.
        file: PathBuf,
        /// The offset of the disk in the file, in bytes.
        offset: u64,
        /// The length in bytes, a multiple of 512.
        length: u64,
    },
    /// An empty disk that exists as long as the pod, so that a restarted container finds its contents.
    Empty {
        /// The size in bytes, a multiple of 512.
        bytes: u64,
    },
    /// A raw block device or file of the node. The keeper has received its descriptor under the disk's name. No other VM uses it
    /// at the same time, unless all open it read-only.
    Device {
        /// The path on the node, for messages.
        path: String,
    },
    /// A file system with these files.
    Files(FilesDisk),
    /// Data for cloud-init.
    CloudInit(CloudInit),
}

/// A FAT file system with files.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FilesDisk {
    /// The label of the file system: at most 11 bytes.
    pub label: String,
    /// The contents of the files in base64, by path.
    pub files: BTreeMap<String, String>,
}

impl fmt::Debug for FilesDisk {
    /// Leaves out the contents, which may be secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FilesDisk").field("label", &self.label).field("files", &self.files.keys()).finish()
    }
}

/// Data for cloud-init.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CloudInit {
    /// The data source.
    pub form: CloudInitForm,
    /// The instance id: when it changes, cloud-init treats the VM as a new one.
    pub instance: String,
    /// The guest's host name.
    pub hostname: String,
    /// Public SSH keys.
    pub keys: Vec<String>,
    /// The user data of the specification.
    pub user_data: String,
    /// The network data of the specification; `None` to derive it from the pod's network.
    pub network_data: Option<String>,
}

/// The cloud-init data source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CloudInitForm {
    /// The data source NoCloud.
    NoCloud,
    /// The data source ConfigDrive (OpenStack's), version 2.
    ConfigDrive,
}

/// The run strategy of a persistent VM, as in KubeVirt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunStrategy {
    /// The VM is restarted whenever it has ended.
    Always,
    /// The VM is restarted only if it has failed.
    RerunOnFailure,
    /// The VM runs once.
    Once,
    /// The VM runs when a client starts it.
    Manual,
    /// The VM does not run until a client starts it.
    Halted,
}

/// A network card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Card {
    /// The pod's interface to which the card is connected.
    #[serde(default = "first_interface", skip_serializing_if = "is_first_interface")]
    pub interface: String,
    /// The model of the card.
    pub model: CardModel,
    /// The MAC address; `None` for that of the pod's interface.
    pub mac: Option<[u8; 6]>,
    /// The position in the boot order, from 1.
    pub boot_order: Option<u32>,
    /// The number of queue pairs; more than one only with virtio.
    #[serde(default = "one_queue", skip_serializing_if = "is_one_queue")]
    pub queues: u32,
}

/// A Secret with credentials of the guest's users.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Credential {
    /// Public keys of SSH.
    Keys {
        /// The name of the Secret.
        secret: String,
        /// The users that get the keys.
        users: Vec<String>,
    },
    /// Passwords; the keys of the Secret are the user names.
    Passwords {
        /// The name of the Secret.
        secret: String,
    },
}

impl Credential {
    /// Returns the name of the Secret.
    pub fn secret(&self) -> &str {
        let (Credential::Keys { secret, .. } | Credential::Passwords { secret }) = self;
        secret
    }
}

/// SSH keys and passwords that the guest agent installs while the machine runs.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Credentials {
    /// Public SSH keys by user.
    pub keys: BTreeMap<String, Vec<String>>,
    /// Passwords by user.
    pub passwords: BTreeMap<String, String>,
}

impl fmt::Debug for Credentials {
    /// Leaves out the passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let users: Vec<_> = self.passwords.keys().collect();
        f.debug_struct("Credentials").field("keys", &self.keys).field("passwords of", &users).finish()
    }
}

/// The directory with the VFIO device nodes of a machine pod, in the daemon's part of the pod's run directory.
pub const VFIO_DIR: &str = "vfio";

/// The interface that CNI creates for every pod.
pub const INTERFACE: &str = "eth0";

/// The port at which a machine pod with a screen serves it (VNC, RFC 6143).
pub const SCREEN_PORT: u16 = 5900;

fn first_interface() -> String {
    INTERFACE.to_owned()
}

fn one_queue() -> u32 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
fn is_one_queue(queues: &u32) -> bool {
    *queues == 1
}

fn is_first_interface(name: &str) -> bool {
    name == INTERFACE
}

/// A model of network card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CardModel {
    /// Virtio.
    Virtio,
    /// Intel 82540EM.
    E1000,
    /// Intel 82574L.
    E1000e,
    /// Realtek 8139.
    Rtl8139,
}

/// The action of a watchdog that the guest has not triggered in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WatchdogAction {
    /// The VM is reset.
    Reset,
    /// The power button is pressed.
    Shutdown,
    /// The VM is stopped.
    Poweroff,
}

#[cfg(test)]
mod tests {
    use super::is_pci_address;

    #[test]
    fn addresses_are_as_the_kernel_writes_them() {
        assert!(["0000:3b:00.1", "10000:e1:00.0"].into_iter().all(is_pci_address));
        let wrong = ["", "3b:00.1", "0000:3b:00.8", "0000:3B:00.1", "0000.3b:00:1", "0000:3b:00.1,x=y", "../a:3b:00.1"];
        assert!(!wrong.into_iter().any(is_pci_address));
    }
}
