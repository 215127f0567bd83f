//! Defines a persistent VM (KubeVirt's VirtualMachine): its run strategy, its instance type, and the template of its runs. The
//! doc comments of the fields are descriptions in the OpenAPI schema.

use super::{InstanceSpec, document, words};
use std::collections::BTreeMap;

document! {
    /// A machine that outlives its runs.
    pub struct VirtualMachine {
        /// Name, labels, annotations.
        pub metadata: Metadata,
        /// What it shall be.
        pub spec: VirtualMachineSpec,
    }

    /// Who an object is.
    pub struct Metadata {
        /// Its name.
        pub name: String,
        /// Its namespace.
        pub namespace: String,
        /// Its UID.
        pub uid: String,
        /// Labels.
        pub labels: BTreeMap<String, String>,
        /// Annotations.
        pub annotations: BTreeMap<String, String>,
    }

    /// What a machine shall be.
    pub struct VirtualMachineSpec {
        /// When it runs.
        pub run_strategy: Option<RunStrategy>,
        /// What sizes it.
        pub instancetype: Option<Matcher>,
        /// What it is like where nothing is said.
        pub preference: Option<Matcher>,
        /// A run of it.
        pub template: Template,
    }

    /// The name of an instance type or a preference.
    pub struct Matcher {
        /// Its name.
        pub name: String,
        /// Its kind; there is one space of names here, so this only says which it was in the cluster.
        pub kind: String,
    }

    /// A run.
    pub struct Template {
        /// Labels and annotations of the pod.
        pub metadata: Metadata,
        /// The run.
        pub spec: InstanceSpec,
    }
}

words! {
    /// When a machine runs.
    pub enum RunStrategy {
        Always = "Always",
        RerunOnFailure = "RerunOnFailure",
        Once = "Once",
        Manual = "Manual",
        Halted = "Halted",
    }

    /// What a pod's machine shall do now.
    pub enum Power {
        On = "on",
        Off = "off",
        Paused = "paused",
    }

    /// What a pod is.
    pub enum SpecKind {
        Container = "container",
        Machine = "machine",
    }
}
