//! Defines instance types, preferences and presets, and the catalogue of them. `apply` merges them into a specification. The doc
//! comments in this file are descriptions in the OpenAPI schema.

mod apply;
mod built_in;

pub use apply::{Applied, apply};

use crate::Quantity;
use crate::cause::{Causes, Rule};
use crate::spec::{Bus, Cache, Domain, Efi, Hugepages, Metadata, NicModel, document, words};
use crate::version::typed;
use serde_json::Value;
use std::collections::BTreeMap;

document! {
    /// An instance type: a named size of VMs (KubeVirt's VirtualMachineInstancetype).
    pub struct Instancetype {
        /// The name.
        pub metadata: Metadata,
        /// The size.
        pub spec: InstancetypeSpec,
    }

    /// The size of an instance type.
    pub struct InstancetypeSpec {
        /// vCPUs.
        pub cpu: InstancetypeCpu,
        /// Memory.
        pub memory: InstancetypeMemory,
    }

    /// The vCPUs of an instance type.
    pub struct InstancetypeCpu {
        /// The number.
        pub guest: Option<u32>,
        /// The model.
        pub model: String,
        /// Each vCPU is pinned to a dedicated CPU of the node.
        #[serde(rename = "dedicatedCPUPlacement")]
        pub dedicated_cpu_placement: Option<bool>,
        /// The maximum number of sockets, for hot-plugging CPUs.
        pub max_sockets: Option<u32>,
    }

    /// The memory of an instance type.
    pub struct InstancetypeMemory {
        /// The memory that the guest sees.
        pub guest: Option<Quantity>,
        /// The maximum memory, for hot-plugging.
        pub max_guest: Option<Quantity>,
        /// The hugepages of the node that back the memory.
        pub hugepages: Option<Hugepages>,
    }

    /// A preference: defaults for unset fields (KubeVirt's VirtualMachinePreference).
    pub struct Preference {
        /// The name.
        pub metadata: Metadata,
        /// The content.
        pub spec: PreferenceSpec,
    }

    /// The content of a preference.
    pub struct PreferenceSpec {
        /// vCPUs.
        pub cpu: PreferenceCpu,
        /// Devices.
        pub devices: PreferenceDevices,
        /// Firmware.
        pub firmware: PreferenceFirmware,
        /// The board (machine type).
        pub machine: PreferenceMachine,
        /// The minimum requirements of a VM.
        pub requirements: Requirements,
        /// The grace period of the guest for its shutdown, in seconds.
        pub preferred_termination_grace_period_seconds: Option<i64>,
    }

    /// The CPU preferences.
    pub struct PreferenceCpu {
        /// The meaning of the CPU count of an instance type.
        #[serde(rename = "preferredCPUTopology")]
        pub preferred_cpu_topology: Option<Topology>,
    }

    /// The device preferences.
    pub struct PreferenceDevices {
        /// The bus of disks.
        pub preferred_disk_bus: Option<Bus>,
        /// The bus of CD-ROM drives.
        pub preferred_cdrom_bus: Option<Bus>,
        /// The cache mode of disks.
        pub preferred_disk_cache: Option<Cache>,
        /// The device model that the guest sees.
        pub preferred_interface_model: Option<NicModel>,
        /// A display is attached.
        pub preferred_autoattach_graphics_device: Option<bool>,
    }

    /// The firmware preferences.
    pub struct PreferenceFirmware {
        /// UEFI.
        pub preferred_efi: Option<Efi>,
    }

    /// The board preference.
    pub struct PreferenceMachine {
        /// `microvm`, `q35` or `pc`.
        pub preferred_machine_type: String,
    }

    /// The minimum requirements of a VM.
    pub struct Requirements {
        /// vCPUs.
        pub cpu: RequiredCpu,
        /// Memory.
        pub memory: RequiredMemory,
    }

    /// The required vCPUs.
    pub struct RequiredCpu {
        /// The number.
        pub guest: Option<u32>,
    }

    /// The required memory.
    pub struct RequiredMemory {
        /// The amount.
        pub guest: Option<Quantity>,
    }

    /// A preset: domain fields that pods can reference by name (KubeVirt's VirtualMachineInstancePreset).
    pub struct Preset {
        /// The name.
        pub metadata: Metadata,
        /// The content.
        pub spec: PresetSpec,
    }

    /// The content of a preset.
    pub struct PresetSpec {
        /// The domain fields.
        pub domain: Domain,
    }
}

words! {
    /// The meaning of the CPU count of an instance type.
    pub enum Topology {
        Cores = "cores",
        Sockets = "sockets",
        Threads = "threads",
    }
}

/// The kinds of documents in a catalogue.
const KINDS: &[&str] = &[
    "VirtualMachineInstancetype",
    "VirtualMachineClusterInstancetype",
    "VirtualMachinePreference",
    "VirtualMachineClusterPreference",
    "VirtualMachineInstancePreset",
];

/// The instance types, preferences and presets that specifications can name.
#[derive(Clone, Debug, PartialEq)]
pub struct Catalogue {
    /// The instance types by name.
    pub instancetypes: BTreeMap<String, InstancetypeSpec>,
    /// The preferences by name.
    pub preferences: BTreeMap<String, PreferenceSpec>,
    /// The presets by name.
    pub presets: BTreeMap<String, PresetSpec>,
}

impl Default for Catalogue {
    /// Returns the built-in catalogue.
    fn default() -> Catalogue {
        Catalogue { instancetypes: built_in::instancetypes(), preferences: BTreeMap::new(), presets: BTreeMap::new() }
    }
}

impl Catalogue {
    /// Adds a document. It replaces a built-in entry of the same name; a duplicate of another document is rejected.
    pub fn add(&mut self, mut document: Value, at: &str) -> Result<(), Causes> {
        let mut causes = Causes::default();
        let kind = document["kind"].as_str().unwrap_or_default().to_owned();
        if let Some(fields) = document.as_object_mut() {
            fields.remove("apiVersion");
            fields.remove("kind");
        }
        let name = match kind.trim_start_matches("VirtualMachine").trim_start_matches("Cluster") {
            "Instancetype" => {
                let (one, wrong) = typed::<Instancetype>(document, "");
                causes.extend(wrong);
                self.instancetypes.insert(one.metadata.name.clone(), one.spec);
                one.metadata.name
            }
            "Preference" => {
                let (one, wrong) = typed::<Preference>(document, "");
                causes.extend(wrong);
                self.preferences.insert(one.metadata.name.clone(), one.spec);
                one.metadata.name
            }
            "InstancePreset" => {
                let (one, wrong) = typed::<Preset>(document, "");
                causes.extend(wrong);
                self.presets.insert(one.metadata.name.clone(), one.spec);
                one.metadata.name
            }
            _ => {
                causes.unsupported(Rule("catalogue-kind"), format!("{at}.kind"), kind, KINDS);
                return Err(causes);
            }
        };
        if name.is_empty() {
            causes.required(Rule("catalogue-name"), format!("{at}.metadata.name"), "must have a name");
        }
        causes.into_result()
    }
}
