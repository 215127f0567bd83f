//! Defines a persistent VM (KubeVirt's VirtualMachine): its run strategy, its instance type, and the template of its runs. The
//! doc comments of the fields are descriptions in the OpenAPI schema.

use super::{InstanceSpec, document, words};
use std::collections::BTreeMap;

document! {
    /// A persistent VM.
    pub struct VirtualMachine {
        /// Name, labels, annotations.
        pub metadata: Metadata,
        /// The desired state.
        pub spec: VirtualMachineSpec,
    }

    /// The metadata of an object.
    pub struct Metadata {
        /// The name.
        pub name: String,
        /// The namespace.
        pub namespace: String,
        /// The UID.
        pub uid: String,
        /// Labels.
        pub labels: BTreeMap<String, String>,
        /// Annotations.
        pub annotations: BTreeMap<String, String>,
    }

    /// The desired state of a persistent VM.
    pub struct VirtualMachineSpec {
        /// The run strategy.
        pub run_strategy: Option<RunStrategy>,
        /// The instance type.
        pub instancetype: Option<Matcher>,
        /// The preference.
        pub preference: Option<Matcher>,
        /// The pod template of a VirtualMachine; each start creates a pod from it.
        pub template: Template,
    }

    /// The name of an instance type or a preference.
    pub struct Matcher {
        /// The name.
        pub name: String,
        /// The kind; names are unique across kinds here, so it is only kept for KubeVirt.
        pub kind: String,
    }

    /// The pod template of a VirtualMachine; each start creates a pod from it.
    pub struct Template {
        /// Labels and annotations of the pod.
        pub metadata: Metadata,
        /// The specification of the VM instance.
        pub spec: InstanceSpec,
    }
}

words! {
    /// The run strategy of a persistent VM.
    pub enum RunStrategy {
        Always = "Always",
        RerunOnFailure = "RerunOnFailure",
        Once = "Once",
        Manual = "Manual",
        Halted = "Halted",
    }

    /// The requested power state of a VM.
    pub enum Power {
        On = "on",
        Off = "off",
        Paused = "paused",
    }

    /// Selects between a container pod and a machine pod.
    pub enum SpecKind {
        Container = "container",
        Machine = "machine",
    }
}
