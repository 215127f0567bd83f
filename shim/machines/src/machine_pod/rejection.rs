//! Defines why a valid specification cannot be run by this version. Pure.

use nacelle_base::{Classify, FailureKind};

/// Probes that kubelet runs and the runtime ignores.
pub(super) const PROBES: [&str; 2] = ["livenessProbe", "readinessProbe"];

/// Why a valid specification cannot be run by this version.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecRejection {
    /// The specification contains unsupported fields.
    #[error(
        "this version of Nacelle does not support {} in machine pods: remove them (docs/reference/vm-fields.md){}",
        fields.join(", "),
        fields.iter().find_map(|field| unsupported_reason(field)).map(|why| format!("; {why}")).unwrap_or_default()
    )]
    Fields {
        /// The fields' paths.
        fields: Vec<String>,
    },
    /// The value is not supported.
    #[error("{field} is {value:?}, which this version of Nacelle does not support: {instead}")]
    Value {
        /// The field's path.
        field: String,
        /// The value.
        value: String,
        /// A supported alternative.
        instead: &'static str,
    },
    /// A required field is missing.
    #[error("{field} is missing: {rule}")]
    Missing {
        /// The field's path.
        field: &'static str,
        /// The reason.
        rule: &'static str,
    },
    /// A value breaks a rule that only the conversion checks.
    #[error("{field} is invalid: {rule}")]
    Invalid {
        /// The field's path.
        field: String,
        /// The broken rule.
        rule: &'static str,
    },
}

impl SpecRejection {
    /// Returns the field of the rejected value, with which the error text begins.
    pub fn field(&self) -> &str {
        match self {
            SpecRejection::Fields { .. } => "",
            SpecRejection::Missing { field, .. } => field,
            SpecRejection::Value { field, .. } | SpecRejection::Invalid { field, .. } => field,
        }
    }
}

impl Classify for SpecRejection {
    fn kind(&self) -> FailureKind {
        match self {
            SpecRejection::Fields { .. } | SpecRejection::Value { .. } => FailureKind::Unsupported,
            SpecRejection::Missing { .. } | SpecRejection::Invalid { .. } => FailureKind::Invalid,
        }
    }
}

pub(super) fn reject_value<T>(
    field: impl Into<String>,
    value: impl ToString,
    instead: &'static str,
) -> Result<T, SpecRejection> {
    Err(SpecRejection::Value { field: field.into(), value: value.to_string(), instead })
}

/// Returns why the field is not supported, where a reason is known.
pub fn unsupported_reason(field: &str) -> Option<&'static str> {
    let probe = field.strip_prefix("spec.").is_some_and(|field| PROBES.contains(&field));
    probe.then_some(
        "kubelet runs probes, and a runtime cannot report their results to it: define them in the pod's container (nacelle vm convert puts them there)",
    )
}
