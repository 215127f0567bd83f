//! Defines the devices of a VM: disks, interfaces, file systems and the rest. The doc comments of the fields are descriptions in
//! the OpenAPI schema.

use super::{Empty, Rng, document, words};

document! {
    /// Devices.
    pub struct Devices {
        /// Disks, each over the volume of its name.
        pub disks: Vec<Disk>,
        /// Network interfaces, each on the network of its name.
        pub interfaces: Vec<Interface>,
        /// Shared directories, each over the volume of its name.
        pub filesystems: Vec<Filesystem>,
        /// Keyboards and the like.
        pub inputs: Vec<Input>,
        /// A watchdog.
        pub watchdog: Option<Watchdog>,
        /// A random source.
        pub rng: Option<Rng>,
        /// A screen, which VNC shows.
        pub autoattach_graphics_device: Option<bool>,
        /// A serial console.
        pub autoattach_serial_console: Option<bool>,
        /// The console is the pod's log.
        pub log_serial_console: Option<bool>,
        /// A balloon, by which the guest gives memory back.
        pub autoattach_mem_balloon: Option<bool>,
        /// An interface on the pod's network where none is named.
        pub autoattach_pod_interface: Option<bool>,
        /// A tablet.
        pub autoattach_input_device: Option<bool>,
        /// Sockets between guest and node.
        #[serde(rename = "autoattachVSOCK")]
        pub autoattach_vsock: Option<bool>,
        /// Disks have a queue for each processor.
        pub block_multi_queue: Option<bool>,
        /// Interfaces have a queue for each processor.
        #[serde(rename = "networkInterfaceMultiqueue")]
        pub network_interface_multiqueue: Option<bool>,
        /// No disks are added or taken while the machine runs.
        pub disable_hotplug: Option<bool>,
    }

    /// A disk: as one of `disk`, `cdrom` and `lun`.
    pub struct Disk {
        /// Its name, which is its volume's.
        pub name: String,
        /// A hard disk.
        pub disk: Option<DiskTarget>,
        /// A drive with a disc.
        pub cdrom: Option<CdRomTarget>,
        /// A SCSI unit.
        pub lun: Option<LunTarget>,
        /// Its place in the order of booting, from 1.
        pub boot_order: Option<u32>,
        /// Its serial number.
        pub serial: String,
        /// How the node caches it.
        pub cache: Option<Cache>,
        /// How the node reads and writes it.
        pub io: Option<Io>,
        /// A thread of its own.
        #[serde(rename = "dedicatedIOThread")]
        pub dedicated_io_thread: Option<bool>,
        /// The sizes of its blocks.
        pub block_size: Option<BlockSize>,
        /// Several machines may write to it.
        pub shareable: Option<bool>,
        /// What the guest sees of the node's errors.
        pub error_policy: Option<ErrorPolicy>,
        /// A word by which the guest finds it.
        pub tag: String,
    }

    /// A hard disk.
    pub struct DiskTarget {
        /// Where it is plugged in.
        pub bus: Option<Bus>,
        /// The guest cannot write.
        pub readonly: Option<bool>,
    }

    /// A drive with a disc.
    pub struct CdRomTarget {
        /// Where it is plugged in.
        pub bus: Option<Bus>,
        /// The guest cannot write.
        pub readonly: Option<bool>,
        /// Whether its tray is open.
        pub tray: Option<Tray>,
    }

    /// A SCSI unit.
    pub struct LunTarget {
        /// Where it is plugged in.
        pub bus: Option<Bus>,
        /// The guest cannot write.
        pub readonly: Option<bool>,
    }

    /// The sizes of a disk's blocks: one of these.
    pub struct BlockSize {
        /// As said here.
        pub custom: Option<CustomBlockSize>,
        /// As the volume has them.
        pub match_volume: Option<super::FeatureState>,
    }

    /// Sizes in bytes.
    pub struct CustomBlockSize {
        /// What the guest counts in.
        pub logical: Option<u32>,
        /// What the disk writes at once.
        pub physical: Option<u32>,
    }

    /// A network interface: bound by `bridge` or `masquerade`.
    pub struct Interface {
        /// Its name, which is its network's.
        pub name: String,
        /// The card that the guest sees.
        pub model: Option<NicModel>,
        /// The guest has the pod's own address.
        pub bridge: Option<Empty>,
        /// The guest has an address of its own behind the pod's.
        pub masquerade: Option<Empty>,
        /// Its hardware address.
        pub mac_address: String,
        /// Its place in the order of booting, from 1.
        pub boot_order: Option<u32>,
        /// Ports that lead to the guest; all, if none is named.
        pub ports: Vec<InterfacePort>,
        /// What the guest is told by DHCP.
        pub dhcp_options: Option<DhcpOptions>,
        /// Whether the cable is in.
        pub state: Option<LinkState>,
        /// A word by which the guest finds it.
        pub tag: String,
    }

    /// A port.
    pub struct InterfacePort {
        /// Its name.
        pub name: String,
        /// TCP or UDP.
        pub protocol: Option<Protocol>,
        /// Its number.
        pub port: Option<i32>,
    }

    /// What the guest is told by DHCP.
    pub struct DhcpOptions {
        /// Time servers.
        pub ntp_servers: Vec<String>,
    }

    /// A shared directory.
    pub struct Filesystem {
        /// Its name, which is its volume's and the guest's tag.
        pub name: String,
        /// By virtio-fs.
        pub virtiofs: Option<Empty>,
    }

    /// A keyboard or the like.
    pub struct Input {
        /// Its name.
        pub name: String,
        /// What it is.
        #[serde(rename = "type")]
        pub kind: Option<InputKind>,
        /// Where it is plugged in.
        pub bus: Option<InputBus>,
    }

    /// A watchdog.
    pub struct Watchdog {
        /// Its name.
        pub name: String,
        /// The card that the guest sees.
        pub i6300esb: Option<WatchdogCard>,
    }

    /// What a watchdog does.
    pub struct WatchdogCard {
        /// When it barks.
        pub action: Option<WatchdogAction>,
    }
}

words! {
    /// Where a disk is plugged in.
    pub enum Bus {
        Virtio = "virtio",
        Sata = "sata",
        Scsi = "scsi",
        Usb = "usb",
    }

    /// Whether a tray is open.
    pub enum Tray {
        Open = "open",
        Closed = "closed",
    }

    /// How the node caches a disk.
    pub enum Cache {
        None = "none",
        Writethrough = "writethrough",
        Writeback = "writeback",
    }

    /// How the node reads and writes a disk.
    pub enum Io {
        Native = "native",
        Default = "default",
        Threads = "threads",
    }

    /// What the guest sees of the node's errors.
    pub enum ErrorPolicy {
        Stop = "stop",
        Ignore = "ignore",
        Report = "report",
        Enospace = "enospace",
    }

    /// The card that the guest sees.
    pub enum NicModel {
        Virtio = "virtio",
        E1000 = "e1000",
        E1000e = "e1000e",
        Igb = "igb",
        Ne2kPci = "ne2k_pci",
        Pcnet = "pcnet",
        Rtl8139 = "rtl8139",
    }

    /// Whether the cable is in.
    pub enum LinkState {
        Up = "up",
        Down = "down",
    }

    /// The protocol of a port.
    pub enum Protocol {
        Tcp = "TCP",
        Udp = "UDP",
    }

    /// Kinds of input devices.
    pub enum InputKind {
        Tablet = "tablet",
        Keyboard = "keyboard",
    }

    /// Where an input device is plugged in.
    pub enum InputBus {
        Virtio = "virtio",
        Usb = "usb",
    }

    /// What a watchdog does when it barks.
    pub enum WatchdogAction {
        Poweroff = "poweroff",
        Reset = "reset",
        Shutdown = "shutdown",
    }
}

impl Disk {
    /// The bus that it names, if it names one.
    pub fn bus(&self) -> Option<Bus> {
        let disk = self.disk.as_ref().and_then(|disk| disk.bus);
        let cdrom = self.cdrom.as_ref().and_then(|cdrom| cdrom.bus);
        disk.or(cdrom).or(self.lun.as_ref().and_then(|lun| lun.bus))
    }
}
