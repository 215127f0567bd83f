//! Owns: the border between CRI and the daemon: requests become checked nouns here, records become answers here.
//! No other module of the daemon sees a CRI type except the services that call these functions.

mod container;
mod device;
mod empty_dirs;
pub mod metrics;
mod pod;
pub mod report;
mod resources;
mod selinux;
mod shape;
pub mod stats;
mod users;
mod volume;

pub use container::{container_config, seccomp_profile};
pub use device::with_edits;
pub use empty_dirs::{LIMITS as EMPTY_DIR_LIMITS, empty_dirs};
pub use pod::pod_config;
pub use resources::{pod_resources_change, resources_change};
pub use selinux::{container_label, node_has_selinux, pod_label};
pub use shape::shape;
pub use volume::for_a_guest;

#[cfg(test)]
pub(crate) use pod::tests::sample;

use nacelle_base::{Classify, Kind};
use nacelle_model::StringMap;
use nacelle_proto::cri;
use std::collections::HashMap;

/// A field of a request that cannot be taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FieldError {
    /// It is not there.
    #[error("{field} is missing")]
    Missing {
        /// Its path in the request.
        field: &'static str,
    },
    /// Its value breaks a rule.
    #[error("{field} is {value:?}: {rule}")]
    Bad {
        /// Its path in the request.
        field: &'static str,
        /// Its value, cut.
        value: String,
        /// What is allowed.
        rule: String,
    },
    /// It asks for something that Nacelle does not do yet.
    #[error("{field} is {value:?}, which Nacelle does not support yet: {instead}")]
    NotYet {
        /// Its path in the request.
        field: &'static str,
        /// Its value, cut.
        value: String,
        /// What to do instead.
        instead: &'static str,
    },
    /// It asks for a namespace of the node.
    #[error(
        "{field} is NODE, a namespace of the host, which this node's configuration refuses: a machine cannot share it; \
         sandbox.host_namespaces = \"run-on-host\" has such pods run without one"
    )]
    HostNamespace {
        /// Its path in the request.
        field: &'static str,
    },
    /// It asks for what a machine cannot share with the node.
    #[error(
        "{field} is {value:?}, which a VM cannot have: its mounts and devices are its own kernel's; run the pod by a handler \
         whose engine is host (this node has: {handlers}), or privileged, with sandbox.privileged = \"run-on-host\""
    )]
    NeedsHost {
        /// Its path in the request.
        field: &'static str,
        /// Its value.
        value: &'static str,
        /// The handlers that could run it.
        handlers: String,
    },
    /// It asks for what this pod cannot have here.
    #[error("{field} is {value:?}: {why}")]
    NotHere {
        /// Its path in the request.
        field: &'static str,
        /// Its value, cut.
        value: String,
        /// Why, and what to do.
        why: &'static str,
    },
    /// A container asks for a namespace of the node that its pod does not have.
    #[error("{field} is NODE, but the pod has a namespace of its own: a container has its pod's")]
    NotThePods {
        /// Its path in the request.
        field: &'static str,
    },
}

impl Classify for FieldError {
    fn kind(&self) -> Kind {
        match self {
            FieldError::Missing { .. } | FieldError::Bad { .. } => Kind::Invalid,
            FieldError::NotYet { .. } => Kind::Unsupported,
            FieldError::HostNamespace { .. }
            | FieldError::NotThePods { .. }
            | FieldError::NotHere { .. }
            | FieldError::NeedsHost { .. } => Kind::Conflict,
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

/// A name: something, without control characters.
fn name(field: &'static str, value: &str) -> Result<String, FieldError> {
    if value.is_empty() {
        return Err(FieldError::Missing { field });
    }
    if value.chars().any(char::is_control) || value.len() > 253 {
        return bad(field, value, "1 to 253 bytes without control characters are allowed");
    }
    Ok(value.to_owned())
}

/// The image that a field names.
fn name_of_image(field: &'static str, image: &cri::ImageSpec) -> Result<String, FieldError> {
    if image.image.is_empty() {
        return Err(FieldError::Missing { field });
    }
    if image.image.len() > 1024 {
        return bad(field, &image.image, "at most 1024 bytes are allowed");
    }
    Ok(image.image.clone())
}

/// A number that Linux takes for a user or a group.
fn id_number(field: &'static str, value: i64) -> Result<u32, FieldError> {
    match u32::try_from(value) {
        Ok(id) if id != u32::MAX => Ok(id),
        _ => bad(field, value, "0 to 4294967294 are allowed"),
    }
}

/// Profiles of AppArmor: the guest's kernel has none, which is what RuntimeDefault and Unconfined come to.
fn apparmor(
    field: &'static str,
    profile: Option<&cri::SecurityProfile>,
    old_field: &'static str,
    old: &str,
) -> Result<(), FieldError> {
    if let Some(profile) = profile.filter(|p| p.profile_type() == cri::security_profile::ProfileType::Localhost) {
        return not_yet(field, &profile.localhost_ref, "the guest's kernel has no AppArmor; leave it out");
    }
    if !matches!(old, "" | "runtime/default" | "unconfined") {
        return not_yet(old_field, old, "the guest's kernel has no AppArmor; leave it out");
    }
    Ok(())
}
