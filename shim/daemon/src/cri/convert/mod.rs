//! Converts between CRI and the daemon's model: requests become checked values of the model, and records become responses.
//! Besides the services that call these functions, no module of the daemon uses a CRI type.

mod apparmor;
mod checkpoint;
mod container;
mod device;
mod empty_dirs;
pub mod metrics;
mod pod;
pub mod report;
mod resources;
mod selinux;
mod shape;
mod sockets;
pub mod stats;
mod users;
mod volume;

pub use apparmor::requested_apparmor;
pub use checkpoint::{FROM_CHECKPOINT, checkpoint};
pub use container::{NodeParts, container_config, seccomp_profile};
pub use device::{apply_cdi_edits, cdi_names};
pub use empty_dirs::{LIMITS as EMPTY_DIR_LIMITS, empty_dirs};
pub use pod::pod_config;
pub use resources::{pod_resources_change, resources_change};
pub use selinux::{container_label, node_has_selinux, pod_label};
pub use shape::shape;
pub use sockets::{SOCKETS, socket_mounts};
pub use volume::check_guest_volumes;

#[cfg(test)]
pub(crate) use pod::tests::sample;

use nacelle_base::{Classify, FailureKind};
use nacelle_model::StringMap;
use nacelle_proto::cri;
use std::collections::HashMap;

/// Why a field of a request is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FieldError {
    /// The field is missing.
    #[error("{field} is missing")]
    Missing {
        /// The field's path in the request.
        field: &'static str,
    },
    /// The value breaks a rule.
    #[error("{field} is {value:?}: {rule}")]
    Bad {
        /// The field's path in the request.
        field: &'static str,
        /// The value, truncated.
        value: String,
        /// The rule.
        rule: String,
    },
    /// Nacelle does not support the value yet.
    #[error("{field} is {value:?}, which Nacelle does not support yet: {instead}")]
    NotYet {
        /// The field's path in the request.
        field: &'static str,
        /// The value, truncated.
        value: String,
        /// The advice for the user.
        instead: &'static str,
    },
    /// The field requests a namespace of the node.
    #[error(
        "{field} is NODE, a namespace of the host, which this node's configuration refuses: a machine cannot share it; \
         sandbox.host_namespaces = \"run-on-host\" has such pods run without one"
    )]
    HostNamespace {
        /// The field's path in the request.
        field: &'static str,
    },
    /// The field requests something that a VM cannot share with the node.
    #[error(
        "{field} is {value:?}, which a VM cannot have: its mounts and devices are its own kernel's; run the pod by a handler \
         whose engine is host (this node has: {handlers}), or privileged, with sandbox.privileged = \"run-on-host\""
    )]
    NeedsHost {
        /// The field's path in the request.
        field: &'static str,
        /// The value.
        value: &'static str,
        /// The handlers that support it.
        handlers: String,
    },
    /// The field requests something that is not available to this pod.
    #[error("{field} is {value:?}: {why}")]
    NotHere {
        /// The field's path in the request.
        field: &'static str,
        /// The value, truncated.
        value: String,
        /// The reason and the advice.
        why: &'static str,
    },
    /// A container requests a namespace of the node that its pod does not have.
    #[error("{field} is NODE, but the pod has a namespace of its own: a container has its pod's")]
    NotThePods {
        /// The field's path in the request.
        field: &'static str,
    },
}

impl Classify for FieldError {
    fn kind(&self) -> FailureKind {
        match self {
            FieldError::Missing { .. } | FieldError::Bad { .. } => FailureKind::Invalid,
            FieldError::NotYet { .. } => FailureKind::Unsupported,
            FieldError::HostNamespace { .. }
            | FieldError::NotThePods { .. }
            | FieldError::NotHere { .. }
            | FieldError::NeedsHost { .. } => FailureKind::Conflict,
        }
    }
}

fn cut(value: impl ToString) -> String {
    value.to_string().chars().take(200).collect()
}

fn bad<T>(field: &'static str, value: impl ToString, rule: impl Into<String>) -> Result<T, FieldError> {
    Err(FieldError::Bad { field, value: cut(value), rule: rule.into() })
}

fn not_yet<T>(field: &'static str, value: impl ToString, instead: &'static str) -> Result<T, FieldError> {
    Err(FieldError::NotYet { field, value: cut(value), instead })
}

fn pairs(map: &HashMap<String, String>) -> StringMap {
    map.iter().map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// Checks a name: it must not be empty or contain control characters.
fn name(field: &'static str, value: &str) -> Result<String, FieldError> {
    if value.is_empty() {
        return Err(FieldError::Missing { field });
    }
    if value.chars().any(char::is_control) || value.len() > 253 {
        return bad(field, value, "1 to 253 bytes without control characters are allowed");
    }
    Ok(value.to_owned())
}

/// Returns the image name in a field.
fn name_of_image(field: &'static str, image: &cri::ImageSpec) -> Result<String, FieldError> {
    if image.image.is_empty() {
        return Err(FieldError::Missing { field });
    }
    if image.image.len() > 1024 {
        return bad(field, &image.image, "at most 1024 bytes are allowed");
    }
    Ok(image.image.clone())
}

/// Checks a user id or group id: it must be valid on Linux.
fn id_number(field: &'static str, value: i64) -> Result<u32, FieldError> {
    match u32::try_from(value) {
        Ok(id) if id != u32::MAX => Ok(id),
        _ => bad(field, value, "0 to 4294967294 are allowed"),
    }
}
