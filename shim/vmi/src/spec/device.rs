//! Defines the devices of a VM: disks, interfaces, file systems and the rest. The doc comments of the fields are descriptions in
//! the OpenAPI schema.

use super::{Empty, Rng, document, words};

document! {
    /// Devices.
    pub struct Devices {
        /// The disks, each backed by the volume of the same name.
        pub disks: Vec<Disk>,
        /// The network interfaces, each on the network of the same name.
        pub interfaces: Vec<Interface>,
        /// The shared directories, each backed by the volume of the same name.
        pub filesystems: Vec<Filesystem>,
        /// The input devices.
        pub inputs: Vec<Input>,
        /// A watchdog.
        pub watchdog: Option<Watchdog>,
        /// A virtio random number generator.
        pub rng: Option<Rng>,
        /// A display, which VNC shows.
        pub autoattach_graphics_device: Option<bool>,
        /// A serial console.
        pub autoattach_serial_console: Option<bool>,
        /// The serial console is written to the container's log.
        pub log_serial_console: Option<bool>,
        /// A memory balloon, by which the guest releases memory.
        pub autoattach_mem_balloon: Option<bool>,
        /// A default interface on the pod's network, if no interface is listed.
        pub autoattach_pod_interface: Option<bool>,
        /// A tablet as pointing device.
        pub autoattach_input_device: Option<bool>,
        /// A vsock device.
        #[serde(rename = "autoattachVSOCK")]
        pub autoattach_vsock: Option<bool>,
        /// Each disk has a queue for each vCPU.
        pub block_multi_queue: Option<bool>,
        /// Each interface has a queue for each vCPU.
        #[serde(rename = "networkInterfaceMultiqueue")]
        pub network_interface_multiqueue: Option<bool>,
        /// Hot-plugging of disks is disabled.
        pub disable_hotplug: Option<bool>,
    }

    /// A disk: one of `disk`, `cdrom` and `lun`.
    pub struct Disk {
        /// The name, which is also the name of the volume.
        pub name: String,
        /// A hard disk.
        pub disk: Option<DiskTarget>,
        /// A CD-ROM drive.
        pub cdrom: Option<CdRomTarget>,
        /// A SCSI LUN.
        pub lun: Option<LunTarget>,
        /// The position in the boot order, from 1.
        pub boot_order: Option<u32>,
        /// The serial number.
        pub serial: String,
        /// The cache mode on the node.
        pub cache: Option<Cache>,
        /// The I/O mode on the node.
        pub io: Option<Io>,
        /// The disk has a dedicated I/O thread.
        #[serde(rename = "dedicatedIOThread")]
        pub dedicated_io_thread: Option<bool>,
        /// The block size.
        pub block_size: Option<BlockSize>,
        /// Several VMs may write to the disk.
        pub shareable: Option<bool>,
        /// The policy for I/O errors of the node.
        pub error_policy: Option<ErrorPolicy>,
        /// A tag by which the guest identifies the device.
        pub tag: String,
    }

    /// A hard disk.
    pub struct DiskTarget {
        /// The bus.
        pub bus: Option<Bus>,
        /// The guest cannot write to it.
        pub readonly: Option<bool>,
    }

    /// A CD-ROM drive.
    pub struct CdRomTarget {
        /// The bus.
        pub bus: Option<Bus>,
        /// The guest cannot write to it.
        pub readonly: Option<bool>,
        /// The state of the tray.
        pub tray: Option<Tray>,
    }

    /// A SCSI LUN.
    pub struct LunTarget {
        /// The bus.
        pub bus: Option<Bus>,
        /// The guest cannot write to it.
        pub readonly: Option<bool>,
    }

    /// The block size of a disk: one of custom and matchVolume.
    pub struct BlockSize {
        /// Custom block sizes.
        pub custom: Option<CustomBlockSize>,
        /// The block sizes of the volume.
        pub match_volume: Option<super::FeatureState>,
    }

    /// Sizes in bytes.
    pub struct CustomBlockSize {
        /// The logical block size.
        pub logical: Option<u32>,
        /// The physical block size.
        pub physical: Option<u32>,
    }

    /// A network interface with the binding `bridge` or `masquerade`.
    pub struct Interface {
        /// The name, which is also the name of the network.
        pub name: String,
        /// The device model that the guest sees.
        pub model: Option<NicModel>,
        /// The guest has the address of the pod.
        pub bridge: Option<Empty>,
        /// The guest has a private address behind that of the pod (NAT).
        pub masquerade: Option<Empty>,
        /// The MAC address.
        pub mac_address: String,
        /// The position in the boot order, from 1.
        pub boot_order: Option<u32>,
        /// The ports that are forwarded to the guest; all if none is listed.
        pub ports: Vec<InterfacePort>,
        /// The DHCP options for the guest.
        pub dhcp_options: Option<DhcpOptions>,
        /// The link state.
        pub state: Option<LinkState>,
        /// A tag by which the guest identifies the device.
        pub tag: String,
    }

    /// A port.
    pub struct InterfacePort {
        /// The name.
        pub name: String,
        /// TCP or UDP.
        pub protocol: Option<Protocol>,
        /// The port number.
        pub port: Option<i32>,
    }

    /// The DHCP options for the guest.
    pub struct DhcpOptions {
        /// The NTP servers.
        pub ntp_servers: Vec<String>,
    }

    /// A shared directory.
    pub struct Filesystem {
        /// The name, which is also the name of the volume and the tag in the guest.
        pub name: String,
        /// The directory is shared by virtio-fs.
        pub virtiofs: Option<Empty>,
    }

    /// An input device.
    pub struct Input {
        /// The name.
        pub name: String,
        /// The kind.
        #[serde(rename = "type")]
        pub kind: Option<InputKind>,
        /// The bus.
        pub bus: Option<InputBus>,
    }

    /// A watchdog.
    pub struct Watchdog {
        /// The name.
        pub name: String,
        /// The device model that the guest sees.
        pub i6300esb: Option<WatchdogCard>,
    }

    /// An i6300ESB watchdog.
    pub struct WatchdogCard {
        /// The action when the watchdog expires.
        pub action: Option<WatchdogAction>,
    }
}

words! {
    /// The bus of a disk.
    pub enum Bus {
        Virtio = "virtio",
        Sata = "sata",
        Scsi = "scsi",
        Usb = "usb",
    }

    /// The state of a tray.
    pub enum Tray {
        Open = "open",
        Closed = "closed",
    }

    /// The cache mode of a disk.
    pub enum Cache {
        None = "none",
        Writethrough = "writethrough",
        Writeback = "writeback",
    }

    /// The I/O mode of a disk.
    pub enum Io {
        Native = "native",
        Default = "default",
        Threads = "threads",
    }

    /// The policy for I/O errors of the node.
    pub enum ErrorPolicy {
        Stop = "stop",
        Ignore = "ignore",
        Report = "report",
        Enospace = "enospace",
    }

    /// The device model that the guest sees.
    pub enum NicModel {
        Virtio = "virtio",
        E1000 = "e1000",
        E1000e = "e1000e",
        Igb = "igb",
        Ne2kPci = "ne2k_pci",
        Pcnet = "pcnet",
        Rtl8139 = "rtl8139",
    }

    /// The link state.
    pub enum LinkState {
        Up = "up",
        Down = "down",
    }

    /// The protocol of a port.
    pub enum Protocol {
        Tcp = "TCP",
        Udp = "UDP",
    }

    /// The kind of an input device.
    pub enum InputKind {
        Tablet = "tablet",
        Keyboard = "keyboard",
    }

    /// The bus of an input device.
    pub enum InputBus {
        Virtio = "virtio",
        Usb = "usb",
    }

    /// The action when a watchdog expires.
    pub enum WatchdogAction {
        Poweroff = "poweroff",
        Reset = "reset",
        Shutdown = "shutdown",
    }
}

impl Disk {
    /// Returns the bus, if one is set.
    pub fn bus(&self) -> Option<Bus> {
        let disk = self.disk.as_ref().and_then(|disk| disk.bus);
        let cdrom = self.cdrom.as_ref().and_then(|cdrom| cdrom.bus);
        disk.or(cdrom).or(self.lun.as_ref().and_then(|lun| lun.bus))
    }
}
