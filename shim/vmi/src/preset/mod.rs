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
    /// A size that machines have by name (KubeVirt's VirtualMachineInstancetype).
    pub struct Instancetype {
        /// Its name.
        pub metadata: Metadata,
        /// The size.
        pub spec: InstancetypeSpec,
    }

    /// A size.
    pub struct InstancetypeSpec {
        /// Processors.
        pub cpu: InstancetypeCpu,
        /// Memory.
        pub memory: InstancetypeMemory,
    }

    /// Processors of a size.
    pub struct InstancetypeCpu {
        /// How many.
        pub guest: Option<u32>,
        /// The model.
        pub model: String,
        /// Each has a processor of the node to itself.
        #[serde(rename = "dedicatedCPUPlacement")]
        pub dedicated_cpu_placement: Option<bool>,
        /// How many sockets there may be while the machine runs.
        pub max_sockets: Option<u32>,
    }

    /// Memory of a size.
    pub struct InstancetypeMemory {
        /// What the guest sees.
        pub guest: Option<Quantity>,
        /// How much it may be while the machine runs.
        pub max_guest: Option<Quantity>,
        /// Large pages of the node under it.
        pub hugepages: Option<Hugepages>,
    }

    /// What machines are like where nothing is said (KubeVirt's VirtualMachinePreference).
    pub struct Preference {
        /// Its name.
        pub metadata: Metadata,
        /// What it says.
        pub spec: PreferenceSpec,
    }

    /// What a preference says.
    pub struct PreferenceSpec {
        /// Processors.
        pub cpu: PreferenceCpu,
        /// Devices.
        pub devices: PreferenceDevices,
        /// Firmware.
        pub firmware: PreferenceFirmware,
        /// The kind of board.
        pub machine: PreferenceMachine,
        /// What a machine must at least have.
        pub requirements: Requirements,
        /// How long the guest has after the power button, in seconds.
        pub preferred_termination_grace_period_seconds: Option<i64>,
    }

    /// Processors of a preference.
    pub struct PreferenceCpu {
        /// What an instance type's processors are.
        #[serde(rename = "preferredCPUTopology")]
        pub preferred_cpu_topology: Option<Topology>,
    }

    /// Devices of a preference.
    pub struct PreferenceDevices {
        /// Where disks are plugged in.
        pub preferred_disk_bus: Option<Bus>,
        /// Where drives are plugged in.
        pub preferred_cdrom_bus: Option<Bus>,
        /// How the node caches disks.
        pub preferred_disk_cache: Option<Cache>,
        /// The card that the guest sees.
        pub preferred_interface_model: Option<NicModel>,
        /// Whether there is a screen.
        pub preferred_autoattach_graphics_device: Option<bool>,
    }

    /// Firmware of a preference.
    pub struct PreferenceFirmware {
        /// UEFI.
        pub preferred_efi: Option<Efi>,
    }

    /// The kind of board of a preference.
    pub struct PreferenceMachine {
        /// `microvm`, `q35` or `pc`.
        pub preferred_machine_type: String,
    }

    /// What a machine must at least have.
    pub struct Requirements {
        /// Processors.
        pub cpu: RequiredCpu,
        /// Memory.
        pub memory: RequiredMemory,
    }

    /// Processors that there must be.
    pub struct RequiredCpu {
        /// How many.
        pub guest: Option<u32>,
    }

    /// Memory that there must be.
    pub struct RequiredMemory {
        /// How much.
        pub guest: Option<Quantity>,
    }

    /// A part of a domain that pods may name (KubeVirt's VirtualMachineInstancePreset).
    pub struct Preset {
        /// Its name.
        pub metadata: Metadata,
        /// What it says.
        pub spec: PresetSpec,
    }

    /// What a preset says.
    pub struct PresetSpec {
        /// The part.
        pub domain: Domain,
    }
}

words! {
    /// What an instance type's processors are.
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
            causes.required(Rule("catalogue-name"), format!("{at}.metadata.name"), "must name it");
        }
        causes.done()
    }
}
