//! Defines which namespaces a pod shares with the node, and its user namespace.

use serde::{Deserialize, Serialize};

/// The namespaces of the node that a pod without a guest uses in place of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NodeNamespaces {
    /// The pod uses the node's network namespace.
    pub network: bool,
    /// The pod uses the node's PID namespace.
    pub pid: bool,
    /// The pod uses the node's IPC namespace.
    pub ipc: bool,
}

impl NodeNamespaces {
    /// Returns whether the pod shares no namespace with the node.
    pub fn none(&self) -> bool {
        *self == NodeNamespaces::default()
    }
}

/// The user namespace of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UserNamespace {
    /// The mapping of user ids.
    pub users: IdRange,
    /// The mapping of group ids.
    pub groups: IdRange,
}

/// A contiguous mapping of ids: id 0 of the user namespace is `first` outside of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IdRange {
    /// The id outside of the namespace to which 0 is mapped.
    pub first: u32,
    /// The number of ids in the mapping.
    pub count: u32,
}
