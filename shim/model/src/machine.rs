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
    /// What it is called, for its QEMU's own title.
    pub name: String,
    /// Its processors.
    pub processors: Processors,
    /// What the guest sees, in MiB.
    pub memory_mib: u64,
    /// Of the node's pool of 2 MiB pages.
    pub hugepages: bool,
    /// Of its pool of 1 GiB pages instead.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub largest_pages: bool,
    /// Its board.
    pub board: Board,
    /// What loads its system.
    pub firmware: Firmware,
    /// A kernel that is started at once, without looking for one on the disks.
    #[serde(default = "no_kernel", skip_serializing_if = "Option::is_none")]
    pub kernel: Option<Kernel<S>>,
    /// Its clock and its timers.
    #[serde(default)]
    pub clock: Clock,
    /// What it is told of itself by SMBIOS; the board `microvm` has none.
    pub identity: SmbiosIdentity,
    /// Its disks, in the order in which the guest finds them.
    pub disks: Vec<Disk<S>>,
    /// Folders of the node that its guest mounts, in the order of the container's volumes for them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub filesystems: Vec<Filesystem>,
    /// Its network cards. The pod process has a tap for each, in this order.
    pub cards: Vec<Card>,
    /// PCI devices of the node that it has to itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub host_devices: Vec<HostDevice>,
    /// Secrets with what the guest agent lets users in by; the daemon reads them, and says what is in them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub credentials: Vec<Credential>,
    /// It has a screen, which VNC shows.
    pub screen: bool,
    /// It has a tablet, so that the pointer of VNC is the guest's.
    pub tablet: bool,
    /// It has a random source.
    pub random: bool,
    /// It has a balloon, by which the guest gives memory back.
    pub balloon: bool,
    /// Its watchdog, if it has one.
    pub watchdog: Option<WatchdogAction>,
    /// A reboot of the guest is its end.
    pub ends_at_reboot: bool,
    /// It stands still until it is told to go on.
    pub paused: bool,
    /// When it runs, if it is one that outlives its pod; none: its end is its container's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strategy: Option<RunStrategy>,
    /// Where it keeps what outlives its pod: what was written to its disks, and the firmware's variables. None: they go with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<PathBuf>,
}

fn no_kernel<S>() -> Option<Kernel<S>> {
    None
}

impl<S> MachineDocument<S> {
    /// The same machine, with the sources that `find` knows by the name of what has them: a disk's, or [`KERNEL`] and [`INITRD`].
    pub fn with<T, E>(&self, mut find: impl FnMut(&str, &S) -> Result<T, E>) -> Result<MachineDocument<T>, E> {
        let kernel = self.kernel.as_ref().map(|kernel| {
            Ok(Kernel {
                kernel: find(KERNEL, &kernel.kernel)?,
                initrd: kernel.initrd.as_ref().map(|initrd| find(INITRD, initrd)).transpose()?,
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

/// Clock and timers; where nothing is said they are as QEMU has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Clock {
    /// Whether there is a high precision event timer.
    pub hpet: Option<bool>,
    /// Whether there is an interval timer.
    pub pit: Option<bool>,
    /// Ticks of the interval timer that came too late are forgotten; else they come later. Where the machine is emulated there are none.
    pub pit_discards: Option<bool>,
    /// Ticks of the real-time clock that came too late are made up for.
    pub rtc_catches_up: bool,
    /// The real-time clock stands still when the guest does.
    pub rtc_is_guests: bool,
    /// The guest is not shown KVM's clock.
    pub no_kvm_clock: bool,
}

/// Processors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Processors {
    /// Sockets.
    pub sockets: u32,
    /// Cores of each.
    pub cores: u32,
    /// Threads of each of these.
    pub threads: u32,
    /// A model that QEMU knows; none: all that the accelerator can.
    pub model: Option<String>,
    /// Abilities that are there or are not, beside the model's.
    pub features: Vec<(String, bool)>,
    /// Without one of them there is no machine.
    pub strict: bool,
    /// Each has one of the node's to itself: these, in their order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pins: Option<Vec<u32>>,
}

impl Processors {
    /// How many virtual processors that is.
    pub fn count(&self) -> u32 {
        self.sockets.saturating_mul(self.cores).saturating_mul(self.threads)
    }
}

/// A board.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Board {
    /// PCI Express, SATA.
    Q35,
    /// PCI, IDE.
    Pc,
    /// No PCI: virtio devices in memory, and nothing that is no such device.
    Microvm,
}

impl Board {
    /// How many virtio devices it has room for; none: it has as many as one likes.
    pub const fn places(self) -> Option<usize> {
        match self {
            Board::Q35 | Board::Pc => None,
            Board::Microvm => Some(24),
        }
    }
}

/// A PCI device of the node, by VFIO.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostDevice {
    /// Where it is on the node: "0000:3b:00.1" (domain, bus, device, function).
    pub address: String,
}

/// The most of them that a machine has places for.
pub const MOST_HOST_DEVICES: usize = 16;

/// Whether this is how the kernel writes where a PCI device is.
pub fn is_pci_address(text: &str) -> bool {
    let hex = |part: &str, least, most| {
        (least..=most).contains(&part.len())
            && part.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
    };
    let parts: Vec<&str> = text.split([':', '.']).collect();
    let [domain, bus, device, function] = parts.as_slice() else { return false };
    // Domains that a host bridge makes up have more digits than PCI's own.
    hex(domain, 4, 8)
        && hex(bus, 2, 2)
        && hex(device, 2, 2)
        && matches!(function.as_bytes(), [b'0'..=b'7'])
        && text.rfind(':') < text.find('.')
}

/// What loads the system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Firmware {
    /// SeaBIOS.
    Bios {},
    /// UEFI.
    Efi {
        /// Its program.
        code: PathBuf,
        /// The variables of a machine that never ran.
        variables: PathBuf,
        /// It starts signed systems only; nobody but this program, in the board's system management mode, writes its variables.
        #[serde(default)]
        secure: bool,
    },
}

/// By this name [`MachineDocument::with`] asks for the kernel: no disk has it, because of the slash.
pub const KERNEL: &str = "/kernel";
/// By this one for its initial file system.
pub const INITRD: &str = "/initrd";

/// A kernel that is started at once (Linux' boot protocol, Documentation/arch/x86/boot.rst).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kernel<S = DiskSource> {
    /// The kernel.
    pub kernel: S,
    /// Its initial file system.
    pub initrd: Option<S>,
    /// Its command line.
    pub arguments: String,
}

/// What the firmware's tables say of the machine. Empty: nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SmbiosIdentity {
    /// Its UUID.
    pub uuid: String,
    /// Its serial number.
    pub serial: String,
    /// Of the case: who made it, version, serial number, asset tag, number in stock.
    pub chassis: [String; 5],
}

/// A disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk<S = DiskSource> {
    /// Its name: letters, digits, '-'; once in a machine.
    pub name: String,
    /// What it is for the guest.
    pub kind: DiskKind,
    /// Where it is plugged in.
    pub bus: Bus,
    /// The guest cannot write.
    pub read_only: bool,
    /// Its place in the order of booting, from 1.
    pub boot_order: Option<u32>,
    /// Its serial number; empty: none.
    pub serial: String,
    /// How the node caches it.
    pub cache: Cache,
    /// What the guest counts in and what it writes at once, in bytes.
    pub block_size: Option<(u32, u32)>,
    /// How it is served beside that.
    #[serde(default, skip_serializing_if = "Serving::usual")]
    pub serving: Serving,
    /// What is on it.
    pub source: S,
}

/// How a disk is served, and to whom.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Serving {
    /// By this thread of QEMU's, from 0; none: by its main one. For virtio alone.
    pub thread: Option<u32>,
    /// With a queue for each processor.
    pub queues: bool,
    /// Other machines may write to it, too, that say the same. For what is the node's alone.
    pub shared: bool,
}

impl Serving {
    /// Whether nothing is said.
    fn usual(&self) -> bool {
        *self == Serving::default()
    }
}

/// A folder of the node that the guest mounts by virtio-fs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Filesystem {
    /// Its name, and its tag: letters, digits, '-'; once in a machine.
    pub name: String,
    /// What is in it, for people: "configMap settings".
    pub what: String,
}

/// What a disk is for the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DiskKind {
    /// A hard disk.
    Disk,
    /// A disc in its drive.
    Cdrom,
}

/// Where a disk is plugged in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Bus {
    /// A virtio block device.
    Virtio,
    /// A SATA port; of the older board, an IDE port.
    Sata,
    /// A unit of a virtio SCSI controller.
    Scsi,
    /// A USB stick.
    Usb,
}

/// How the node caches a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cache {
    /// Writes are kept until the guest flushes.
    Writeback,
    /// Each write is on the disk before the guest goes on.
    Writethrough,
    /// The node's memory is not used.
    None,
}

/// What is on a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum DiskSource {
    /// A disk in an image. What the guest writes goes with the machine; one that is kept keeps it as long as the image is the same.
    Image {
        /// Names the image.
        image: String,
        /// The file in which it lies.
        file: PathBuf,
        /// Where it begins there, in bytes.
        offset: u64,
        /// Its bytes, a multiple of 512.
        length: u64,
    },
    /// Zeros at first; it goes with the pod, whose later machines find it as it is.
    Empty {
        /// Its bytes, a multiple of 512.
        bytes: u64,
    },
    /// A block device or file of the node, byte by byte the disk: it was handed over before, under the disk's name. No other machine
    /// has it at a time, unless none of them writes.
    Device {
        /// On the node; for people.
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
    /// Its label: at most 11 bytes.
    pub label: String,
    /// What is in them, in base64, by their paths.
    pub files: BTreeMap<String, String>,
}

impl fmt::Debug for FilesDisk {
    /// Without what is in them: it may be secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FilesDisk").field("label", &self.label).field("files", &self.files.keys()).finish()
    }
}

/// Data for cloud-init.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CloudInit {
    /// In which form.
    pub form: CloudInitForm,
    /// The instance: when it changes, cloud-init takes the machine for a new one.
    pub instance: String,
    /// The guest's host name.
    pub hostname: String,
    /// Public keys of SSH.
    pub keys: Vec<String>,
    /// What the user says.
    pub user_data: String,
    /// What the user says of the network; none: what the pod's network is.
    pub network_data: Option<String>,
}

/// The form of data for cloud-init.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CloudInitForm {
    /// The data source NoCloud.
    NoCloud,
    /// The data source ConfigDrive (OpenStack's), version 2.
    ConfigDrive,
}

/// When a machine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunStrategy {
    /// Always: it runs again, however it has ended.
    Always,
    /// Again only if it has failed.
    RerunOnFailure,
    /// Once.
    Once,
    /// When somebody says so.
    Manual,
    /// Not, until somebody says so.
    Halted,
}

/// A network card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Card {
    /// The pod's interface that it is joined to.
    #[serde(default = "first_interface", skip_serializing_if = "is_first_interface")]
    pub interface: String,
    /// What the guest sees: QEMU's name of a PCI card.
    pub model: CardModel,
    /// Its address; none: that of the pod's interface.
    pub mac: Option<[u8; 6]>,
    /// Its place in the order of booting, from 1.
    pub boot_order: Option<u32>,
    /// So many queues each way; several only of virtio.
    #[serde(default = "one_queue", skip_serializing_if = "is_one_queue")]
    pub queues: u32,
}

/// A secret by which users of the guest get in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Credential {
    /// Public keys of SSH.
    Keys {
        /// The secret.
        secret: String,
        /// Whose they are.
        users: Vec<String>,
    },
    /// Passwords, by the users that are its keys.
    Passwords {
        /// The secret.
        secret: String,
    },
}

impl Credential {
    /// The secret's name.
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

/// The interface that CNI makes for every pod.
pub const INTERFACE: &str = "eth0";

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

/// What a watchdog does when the guest has not answered it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WatchdogAction {
    /// The machine starts anew.
    Reset,
    /// The power button is pressed.
    Shutdown,
    /// The machine ends.
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
