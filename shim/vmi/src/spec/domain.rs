//! Defines the domain of a VM: CPUs, memory, firmware, clock, features. The doc comments of the fields are descriptions in the
//! OpenAPI schema.

use super::{Devices, document, words};
use crate::Quantity;
use std::collections::BTreeMap;

document! {
    /// The VM.
    pub struct Domain {
        /// vCPUs.
        pub cpu: Option<Cpu>,
        /// Memory.
        pub memory: Option<Memory>,
        /// The board (machine type).
        pub machine: Option<Board>,
        /// The firmware or kernel to boot, and the identity in SMBIOS.
        pub firmware: Option<Firmware>,
        /// The clock and the timers.
        pub clock: Option<Clock>,
        /// CPU and platform features.
        pub features: Option<Features>,
        /// Devices.
        pub devices: Devices,
        /// The resources that the pod requests; they size the VM if no other field does.
        pub resources: Option<Resources>,
        /// The chassis data in SMBIOS.
        pub chassis: Option<Chassis>,
        /// The policy for sharing I/O threads between disks.
        pub io_threads_policy: Option<IoThreadsPolicy>,
        /// The effect of a reboot by the guest.
        pub reboot_policy: Option<RebootPolicy>,
    }

    /// The CPU topology: sockets, cores and threads.
    pub struct Cpu {
        /// The number of cores of a socket.
        pub cores: Option<u32>,
        /// The number of sockets.
        pub sockets: Option<u32>,
        /// The number of threads of a core.
        pub threads: Option<u32>,
        /// The maximum number of sockets, for hot-plugging CPUs.
        pub max_sockets: Option<u32>,
        /// The CPU model: `host-passthrough`, `host-model` or the name of a model.
        pub model: String,
        /// CPU features that are required or disabled.
        pub features: Vec<CpuFeature>,
        /// Each vCPU is pinned to a dedicated CPU of the node.
        pub dedicated_cpu_placement: Option<bool>,
    }

    /// A CPU feature.
    pub struct CpuFeature {
        /// The name.
        pub name: String,
        /// The policy for the feature.
        pub policy: Option<CpuFeaturePolicy>,
    }

    /// Memory.
    pub struct Memory {
        /// The memory that the guest sees.
        pub guest: Option<Quantity>,
        /// The maximum memory, for hot-plugging.
        pub max_guest: Option<Quantity>,
        /// The hugepages of the node that back the memory.
        pub hugepages: Option<Hugepages>,
    }

    /// Hugepages.
    pub struct Hugepages {
        /// The page size: 2Mi or 1Gi.
        pub page_size: String,
    }

    /// The board (machine type).
    pub struct Board {
        /// `microvm`, `q35` or `pc`.
        #[serde(rename = "type")]
        pub kind: String,
    }

    /// Firmware.
    pub struct Firmware {
        /// The UUID of the VM in SMBIOS.
        pub uuid: String,
        /// The serial number of the VM in SMBIOS.
        pub serial: String,
        /// The boot loader.
        pub bootloader: Option<Bootloader>,
        /// A kernel that is booted directly, without firmware.
        pub kernel_boot: Option<KernelBoot>,
    }

    /// The boot loader: one of BIOS and UEFI.
    pub struct Bootloader {
        /// BIOS.
        pub bios: Option<Bios>,
        /// UEFI.
        pub efi: Option<Efi>,
    }

    /// BIOS.
    pub struct Bios {
        /// BIOS messages are printed on the serial console.
        pub use_serial: Option<bool>,
    }

    /// UEFI.
    pub struct Efi {
        /// Secure boot: only signed systems are started.
        pub secure_boot: Option<bool>,
        /// The UEFI variables persist.
        pub persistent: Option<bool>,
    }

    /// A kernel that is booted directly, without firmware.
    pub struct KernelBoot {
        /// The kernel command-line parameters.
        pub kernel_args: String,
        /// The image with the kernel.
        pub container: Option<KernelImage>,
    }

    /// An image with a kernel.
    pub struct KernelImage {
        /// The image.
        pub image: String,
        /// The path of the kernel in the image.
        pub kernel_path: String,
        /// The path of the initramfs in the image.
        pub initrd_path: String,
    }

    /// The clock, in UTC or in a time zone.
    pub struct Clock {
        /// UTC.
        pub utc: Option<Utc>,
        /// The name of the time zone.
        pub timezone: Option<String>,
        /// Timers.
        pub timer: Option<Timers>,
    }

    /// UTC.
    pub struct Utc {
        /// The offset from UTC in seconds.
        pub offset_seconds: Option<i64>,
    }

    /// Timers.
    pub struct Timers {
        /// The High Precision Event Timer (HPET).
        pub hpet: Option<Hpet>,
        /// The KVM clock.
        pub kvm: Option<Timer>,
        /// The Programmable Interval Timer (PIT).
        pub pit: Option<Pit>,
        /// The real-time clock (RTC).
        pub rtc: Option<Rtc>,
    }

    /// A timer without further settings.
    pub struct Timer {
        /// The timer is present.
        pub present: Option<bool>,
    }

    /// The High Precision Event Timer (HPET).
    pub struct Hpet {
        /// The timer is present.
        pub present: Option<bool>,
        /// The policy for late ticks.
        pub tick_policy: Option<TickPolicy>,
    }

    /// The Programmable Interval Timer (PIT).
    pub struct Pit {
        /// The timer is present.
        pub present: Option<bool>,
        /// The policy for late ticks.
        pub tick_policy: Option<TickPolicy>,
    }

    /// The real-time clock (RTC).
    pub struct Rtc {
        /// The timer is present.
        pub present: Option<bool>,
        /// The policy for late ticks.
        pub tick_policy: Option<TickPolicy>,
        /// The time that the clock follows.
        pub track: Option<Track>,
    }

    /// CPU and platform features.
    pub struct Features {
        /// ACPI.
        pub acpi: Option<FeatureState>,
        /// The interrupt controller (APIC).
        pub apic: Option<Apic>,
        /// System Management Mode, which secure boot needs.
        pub smm: Option<FeatureState>,
        /// The KVM signature in CPUID.
        pub kvm: Option<KvmFeature>,
        /// Paravirtualized spin locks.
        pub pvspinlock: Option<FeatureState>,
    }

    /// A feature that can be enabled.
    pub struct FeatureState {
        /// The feature is enabled, which is the default.
        pub enabled: Option<bool>,
    }

    /// The interrupt controller (APIC).
    pub struct Apic {
        /// The feature is enabled, which is the default.
        pub enabled: Option<bool>,
        /// Paravirtualized end of interrupt (EOI).
        pub end_of_interrupt: Option<bool>,
    }

    /// The KVM signature in CPUID.
    pub struct KvmFeature {
        /// The KVM signature is hidden.
        pub hidden: Option<bool>,
    }

    /// The resources that the pod requests.
    pub struct Resources {
        /// The requests.
        pub requests: BTreeMap<String, Quantity>,
        /// The limits.
        pub limits: BTreeMap<String, Quantity>,
    }

    /// The chassis data in SMBIOS.
    pub struct Chassis {
        /// The manufacturer.
        pub manufacturer: String,
        /// The version.
        pub version: String,
        /// The serial number.
        pub serial: String,
        /// The asset tag.
        pub asset: String,
        /// The SKU number.
        pub sku: String,
    }

    /// A virtio random number generator, without further settings.
    pub struct Rng {}
}

words! {
    /// The policy for a CPU feature.
    pub enum CpuFeaturePolicy {
        Force = "force",
        Require = "require",
        Optional = "optional",
        Disable = "disable",
        Forbid = "forbid",
    }

    /// The policy for late ticks.
    pub enum TickPolicy {
        Delay = "delay",
        Catchup = "catchup",
        Merge = "merge",
        Discard = "discard",
    }

    /// The time that a clock follows.
    pub enum Track {
        Guest = "guest",
        Wall = "wall",
    }

    /// The policy for sharing I/O threads between disks.
    pub enum IoThreadsPolicy {
        Shared = "shared",
        Auto = "auto",
    }

    /// The effect of a reboot by the guest.
    pub enum RebootPolicy {
        Reboot = "Reboot",
        Terminate = "Terminate",
    }
}

impl FeatureState {
    /// The feature is enabled, which is the default.
    pub fn on(&self) -> bool {
        self.enabled != Some(false)
    }
}

impl Cpu {
    /// Returns the number of vCPUs; `None` if it overflows.
    pub fn count(&self) -> Option<u32> {
        let one = |part: Option<u32>| part.unwrap_or(1);
        one(self.sockets).checked_mul(one(self.cores))?.checked_mul(one(self.threads))
    }
}
