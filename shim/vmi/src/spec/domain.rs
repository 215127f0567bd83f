//! Defines the domain of a VM: CPUs, memory, firmware, clock, features. The doc comments of the fields are descriptions in the
//! OpenAPI schema.

use super::{Devices, document, words};
use crate::Quantity;
use std::collections::BTreeMap;

document! {
    /// The machine.
    pub struct Domain {
        /// Processors.
        pub cpu: Option<Cpu>,
        /// Memory.
        pub memory: Option<Memory>,
        /// The kind of board.
        pub machine: Option<Board>,
        /// What runs before the guest's system, and what it is told of the machine.
        pub firmware: Option<Firmware>,
        /// The clock and the timers.
        pub clock: Option<Clock>,
        /// Abilities that can be switched.
        pub features: Option<Features>,
        /// Devices.
        pub devices: Devices,
        /// What the pod asks of the node; the machine is sized by it where nothing else says a size.
        pub resources: Option<Resources>,
        /// What the firmware's tables say of the case.
        pub chassis: Option<Chassis>,
        /// How disks share threads.
        pub io_threads_policy: Option<IoThreadsPolicy>,
        /// What a reboot of the guest is.
        pub reboot_policy: Option<RebootPolicy>,
    }

    /// Processors: sockets with cores with threads.
    pub struct Cpu {
        /// Cores of a socket.
        pub cores: Option<u32>,
        /// Sockets.
        pub sockets: Option<u32>,
        /// Threads of a core.
        pub threads: Option<u32>,
        /// How many sockets there may be while the machine runs.
        pub max_sockets: Option<u32>,
        /// The model: `host-passthrough`, `host-model` or the name of one.
        pub model: String,
        /// Single abilities.
        pub features: Vec<CpuFeature>,
        /// Each virtual processor has a processor of the node to itself.
        pub dedicated_cpu_placement: Option<bool>,
    }

    /// An ability of processors.
    pub struct CpuFeature {
        /// Its name.
        pub name: String,
        /// Whether it must be there.
        pub policy: Option<CpuFeaturePolicy>,
    }

    /// Memory.
    pub struct Memory {
        /// What the guest sees.
        pub guest: Option<Quantity>,
        /// How much it may be while the machine runs.
        pub max_guest: Option<Quantity>,
        /// Large pages of the node under it.
        pub hugepages: Option<Hugepages>,
    }

    /// Large pages.
    pub struct Hugepages {
        /// Their size: 2Mi or 1Gi.
        pub page_size: String,
    }

    /// The kind of board.
    pub struct Board {
        /// `microvm`, `q35` or `pc`.
        #[serde(rename = "type")]
        pub kind: String,
    }

    /// Firmware.
    pub struct Firmware {
        /// The machine's identity in SMBIOS.
        pub uuid: String,
        /// The machine's serial number in SMBIOS.
        pub serial: String,
        /// What loads the system.
        pub bootloader: Option<Bootloader>,
        /// A kernel that is started without firmware.
        pub kernel_boot: Option<KernelBoot>,
    }

    /// What loads the system: one of these.
    pub struct Bootloader {
        /// BIOS.
        pub bios: Option<Bios>,
        /// UEFI.
        pub efi: Option<Efi>,
    }

    /// BIOS.
    pub struct Bios {
        /// It prints on the serial console.
        pub use_serial: Option<bool>,
    }

    /// UEFI.
    pub struct Efi {
        /// Only signed systems.
        pub secure_boot: Option<bool>,
        /// Its variables are kept.
        pub persistent: Option<bool>,
    }

    /// A kernel that is started without firmware.
    pub struct KernelBoot {
        /// Words of its command line.
        pub kernel_args: String,
        /// The image it is in.
        pub container: Option<KernelImage>,
    }

    /// An image with a kernel.
    pub struct KernelImage {
        /// The image.
        pub image: String,
        /// The kernel's path in it.
        pub kernel_path: String,
        /// The initial file system's path in it.
        pub initrd_path: String,
    }

    /// The clock: in UTC or in a time zone.
    pub struct Clock {
        /// UTC.
        pub utc: Option<Utc>,
        /// A time zone, by its name.
        pub timezone: Option<String>,
        /// Timers.
        pub timer: Option<Timers>,
    }

    /// UTC.
    pub struct Utc {
        /// Seconds before or after it.
        pub offset_seconds: Option<i64>,
    }

    /// Timers.
    pub struct Timers {
        /// The high precision event timer.
        pub hpet: Option<Hpet>,
        /// KVM's clock.
        pub kvm: Option<Timer>,
        /// The interval timer.
        pub pit: Option<Pit>,
        /// The real-time clock.
        pub rtc: Option<Rtc>,
    }

    /// A timer with no more to say.
    pub struct Timer {
        /// Whether it is there.
        pub present: Option<bool>,
    }

    /// The high precision event timer.
    pub struct Hpet {
        /// Whether it is there.
        pub present: Option<bool>,
        /// What becomes of ticks that came too late.
        pub tick_policy: Option<TickPolicy>,
    }

    /// The interval timer.
    pub struct Pit {
        /// Whether it is there.
        pub present: Option<bool>,
        /// What becomes of ticks that came too late.
        pub tick_policy: Option<TickPolicy>,
    }

    /// The real-time clock.
    pub struct Rtc {
        /// Whether it is there.
        pub present: Option<bool>,
        /// What becomes of ticks that came too late.
        pub tick_policy: Option<TickPolicy>,
        /// Whose time it follows.
        pub track: Option<Track>,
    }

    /// Abilities that can be switched.
    pub struct Features {
        /// ACPI.
        pub acpi: Option<FeatureState>,
        /// The interrupt controller.
        pub apic: Option<Apic>,
        /// System management mode, which signed boot needs.
        pub smm: Option<FeatureState>,
        /// How KVM shows itself.
        pub kvm: Option<KvmFeature>,
        /// Spin locks that yield.
        pub pvspinlock: Option<FeatureState>,
    }

    /// A switch.
    pub struct FeatureState {
        /// On, if nothing is said.
        pub enabled: Option<bool>,
    }

    /// The interrupt controller.
    pub struct Apic {
        /// On, if nothing is said.
        pub enabled: Option<bool>,
        /// The guest announces the end of interrupts.
        pub end_of_interrupt: Option<bool>,
    }

    /// How KVM shows itself.
    pub struct KvmFeature {
        /// Not at all.
        pub hidden: Option<bool>,
    }

    /// What the pod asks of the node.
    pub struct Resources {
        /// What it needs.
        pub requests: BTreeMap<String, Quantity>,
        /// What it may have.
        pub limits: BTreeMap<String, Quantity>,
    }

    /// What the firmware's tables say of the case.
    pub struct Chassis {
        /// Who made it.
        pub manufacturer: String,
        /// Its version.
        pub version: String,
        /// Its serial number.
        pub serial: String,
        /// Its asset tag.
        pub asset: String,
        /// Its number in stock.
        pub sku: String,
    }

    /// A random source; there is no more to say.
    pub struct Rng {}
}

words! {
    /// Whether an ability must be there.
    pub enum CpuFeaturePolicy {
        Force = "force",
        Require = "require",
        Optional = "optional",
        Disable = "disable",
        Forbid = "forbid",
    }

    /// What becomes of ticks that came too late.
    pub enum TickPolicy {
        Delay = "delay",
        Catchup = "catchup",
        Merge = "merge",
        Discard = "discard",
    }

    /// Whose time a clock follows.
    pub enum Track {
        Guest = "guest",
        Wall = "wall",
    }

    /// How disks share threads.
    pub enum IoThreadsPolicy {
        Shared = "shared",
        Auto = "auto",
    }

    /// What a reboot of the guest is.
    pub enum RebootPolicy {
        Reboot = "Reboot",
        Terminate = "Terminate",
    }
}

impl FeatureState {
    /// On, if nothing is said.
    pub fn on(&self) -> bool {
        self.enabled != Some(false)
    }
}

impl Cpu {
    /// How many virtual processors that is; `None` if nobody can have so many.
    pub fn count(&self) -> Option<u32> {
        let one = |part: Option<u32>| part.unwrap_or(1);
        one(self.sockets).checked_mul(one(self.cores))?.checked_mul(one(self.threads))
    }
}
