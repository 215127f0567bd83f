//! Collects everything that is wrong with a specification: one cause for each field and rule, in the format of Kubernetes' field
//! errors.

use nacelle_base::{Classify, FailureKind};
use serde::Serialize;
use std::fmt;

/// The maximum number of causes that are reported.
pub const MAX_CAUSES: usize = 100;
/// The maximum length of a value in a cause.
const MAX_VALUE: usize = 120;

/// The kind of a fault. The labels are those of Kubernetes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, schemars::JsonSchema)]
pub enum Problem {
    /// A required field is not set.
    #[serde(rename = "FieldValueRequired")]
    Required,
    /// The value is invalid.
    #[serde(rename = "FieldValueInvalid")]
    Invalid,
    /// The value must be unique, and another field has it.
    #[serde(rename = "FieldValueDuplicate")]
    Duplicate,
    /// The value is not one of a list.
    #[serde(rename = "FieldValueNotSupported")]
    Unsupported,
    /// The field is not allowed here, or has no meaning here.
    #[serde(rename = "FieldValueForbidden")]
    Forbidden,
    /// The value has the wrong type.
    #[serde(rename = "FieldValueTypeInvalid")]
    Type,
    /// The value is too long or too large.
    #[serde(rename = "FieldValueTooLong")]
    TooLong,
    /// The field does not exist.
    #[serde(rename = "FieldUnknown")]
    Unknown,
    /// Two sources set different values.
    #[serde(rename = "FieldConflict")]
    Conflict,
}

impl Problem {
    fn label(self) -> &'static str {
        match self {
            Problem::Required => "Required value",
            Problem::Invalid => "Invalid value",
            Problem::Duplicate => "Duplicate value",
            Problem::Unsupported => "Unsupported value",
            Problem::Forbidden => "Forbidden",
            Problem::Type => "Wrong type",
            Problem::TooLong => "Too long",
            Problem::Unknown => "Unknown field",
            Problem::Conflict => "Conflict",
        }
    }
}

/// The name of a rule: stable, for tests and for programs that parse the JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, schemars::JsonSchema)]
#[serde(transparent)]
pub struct Rule(pub &'static str);

/// One fault.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Cause {
    /// The path of the field, as `spec.domain.devices.disks[1].name` or `metadata.annotations[vm.nacelle.dev/cpus]`.
    pub field: String,
    /// The kind of the fault.
    pub reason: Problem,
    /// The field's value, if it is useful in the message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// The rule that is violated.
    pub rule: Rule,
    /// The text of the rule.
    pub message: String,
    /// The annotation, instance type, preference or preset that the value came from, if not from the document.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
}

impl Cause {
    /// Returns the message without the field's path, as Kubernetes formats it after a path of its own.
    pub fn detail(&self) -> String {
        Detail(self).to_string()
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, Detail(self))
    }
}

struct Detail<'a>(&'a Cause);

impl fmt::Display for Detail<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Detail(cause) = self;
        f.write_str(cause.reason.label())?;
        if let Some(value) = &cause.value {
            write!(f, ": {value}")?;
        }
        if !cause.message.is_empty() {
            write!(f, ": {}", cause.message)?;
        }
        match &cause.from {
            Some(from) => write!(f, " (from {from})"),
            None => Ok(()),
        }
    }
}

/// Everything that is wrong with a specification.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, schemars::JsonSchema, thiserror::Error)]
#[serde(transparent)]
pub struct Causes(Vec<Cause>);

impl Classify for Causes {
    fn kind(&self) -> FailureKind {
        FailureKind::Invalid
    }
}

/// Joins the complete texts of all causes.
impl fmt::Display for Causes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, cause) in self.0.iter().enumerate() {
            let between = if index == 0 { "" } else { "; " };
            write!(f, "{between}{cause}")?;
        }
        Ok(())
    }
}

impl Causes {
    /// Returns the causes.
    pub fn list(&self) -> &[Cause] {
        &self.0
    }

    /// Returns whether there are no causes.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the first causes in about `most` bytes, and the number of the others.
    pub fn brief(&self, most: usize) -> String {
        let mut text = String::new();
        for (index, cause) in self.0.iter().enumerate() {
            let one = cause.to_string();
            if index > 0 && text.len() + one.len() > most {
                let more = self.0.len() - index;
                return format!("{text}; and {more} more: `nacelle vm validate` lists all");
            }
            let between = if index == 0 { "" } else { "; " };
            text = text + between + &one;
        }
        text
    }

    /// Returns `Ok` if there are no causes.
    pub fn into_result(self) -> Result<(), Causes> {
        if self.is_empty() { Ok(()) } else { Err(self) }
    }

    pub(crate) fn add(&mut self, cause: Cause) {
        if self.0.len() < MAX_CAUSES && !self.0.contains(&cause) {
            self.0.push(cause);
        }
    }

    pub(crate) fn extend(&mut self, others: Causes) {
        for cause in others.0 {
            self.add(cause);
        }
    }

    pub(crate) fn for_each_mut(&mut self, change: impl FnMut(&mut Cause)) {
        self.0.iter_mut().for_each(change);
    }

    fn add_new(
        &mut self,
        rule: Rule,
        field: impl Into<String>,
        reason: Problem,
        value: Option<String>,
        message: String,
    ) {
        // Clients choose names, which are parts of paths: control characters must not break the line.
        let line = |text: String| text.replace(|c: char| c.is_control(), " ");
        self.add(Cause { field: line(field.into()), reason, value, rule, message: line(message), from: None });
    }

    /// Adds: a required field is not set.
    pub(crate) fn required(&mut self, rule: Rule, field: impl Into<String>, message: impl Into<String>) {
        self.add_new(rule, field, Problem::Required, None, message.into());
    }

    /// Adds: a field's value is invalid.
    pub(crate) fn invalid(
        &mut self,
        rule: Rule,
        field: impl Into<String>,
        value: impl Serialize,
        message: impl Into<String>,
    ) {
        self.add_new(rule, field, Problem::Invalid, Some(json_excerpt(value)), message.into());
    }

    /// Adds: a second field has the same value.
    pub(crate) fn duplicate(
        &mut self,
        rule: Rule,
        field: impl Into<String>,
        value: impl Serialize,
        message: impl Into<String>,
    ) {
        self.add_new(rule, field, Problem::Duplicate, Some(json_excerpt(value)), message.into());
    }

    /// Adds: a value is not one of the supported ones.
    pub(crate) fn unsupported(
        &mut self,
        rule: Rule,
        field: impl Into<String>,
        value: impl Serialize,
        supported: &[&str],
    ) {
        let supported: Vec<String> = supported.iter().map(json_excerpt).collect();
        let message = format!("supported values: {}", supported.join(", "));
        self.add_new(rule, field, Problem::Unsupported, Some(json_excerpt(value)), message);
    }

    /// Adds: a field is not allowed.
    pub(crate) fn forbidden(&mut self, rule: Rule, field: impl Into<String>, message: impl Into<String>) {
        self.add_new(rule, field, Problem::Forbidden, None, message.into());
    }

    /// Adds: a value has the wrong type.
    pub(crate) fn wrong_type(&mut self, rule: Rule, field: impl Into<String>, value: impl Serialize, wanted: &str) {
        self.add_new(rule, field, Problem::Type, Some(json_excerpt(value)), format!("must be {wanted}"));
    }

    /// Adds: a value is too long.
    pub(crate) fn too_long(&mut self, rule: Rule, field: impl Into<String>, message: impl Into<String>) {
        self.add_new(rule, field, Problem::TooLong, None, message.into());
    }

    /// Adds: a field does not exist.
    pub(crate) fn unknown(&mut self, rule: Rule, field: impl Into<String>, message: impl Into<String>) {
        self.add_new(rule, field, Problem::Unknown, None, message.into());
    }

    /// Adds: two sources set different values.
    pub(crate) fn conflict(
        &mut self,
        rule: Rule,
        field: impl Into<String>,
        value: impl Serialize,
        message: impl Into<String>,
    ) {
        self.add_new(rule, field, Problem::Conflict, Some(json_excerpt(value)), message.into());
    }
}

/// Formats a value as JSON, truncated if it is long.
pub(crate) fn json_excerpt(value: impl Serialize) -> String {
    let mut text = serde_json::to_string(&value).unwrap_or_default();
    if text.len() > MAX_VALUE {
        let mut end = MAX_VALUE;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push_str("...");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_has_the_format_of_kubernetes() {
        let mut causes = Causes::default();
        causes.invalid(Rule("x"), "spec.a", 0, "must be at least 1");
        causes.required(Rule("x"), "spec.b", "");
        causes.unsupported(Rule("x"), "spec.c", "ide", &["sata", "virtio"]);
        assert_eq!(
            causes.to_string(),
            "spec.a: Invalid value: 0: must be at least 1; spec.b: Required value; \
             spec.c: Unsupported value: \"ide\": supported values: \"sata\", \"virtio\""
        );
        assert_eq!(causes.kind(), FailureKind::Invalid);
        causes.unknown(Rule("x"), "a[b\nc]", "d\re");
        assert!(!causes.to_string().contains(['\n', '\r']));
    }

    #[test]
    fn duplicates_are_dropped_and_long_values_are_shortened() {
        let mut causes = Causes::default();
        for _ in 0..2 {
            causes.invalid(Rule("x"), "a", "é".repeat(1000), "");
        }
        assert_eq!(causes.list().len(), 1);
        assert!(causes.to_string().len() < 200);
        for number in 0..1000 {
            causes.invalid(Rule("x"), format!("a[{number}]"), number, "");
        }
        assert_eq!(causes.list().len(), MAX_CAUSES);
    }
}
