//! Owns: what is wrong with a specification: one cause for each field and rule, all of them at once, in the words of
//! Kubernetes' field errors.

use nacelle_base::{Classify, Kind};
use serde::Serialize;
use std::fmt;

/// How many causes are told; what is wrong in more places is wrong in one way.
pub const MAX_CAUSES: usize = 100;
/// How much of a value is told.
const MAX_VALUE: usize = 120;

/// In which way a field is wrong. The words are those of Kubernetes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum Problem {
    /// It must say something.
    #[serde(rename = "FieldValueRequired")]
    Required,
    /// Its value is wrong.
    #[serde(rename = "FieldValueInvalid")]
    Invalid,
    /// Another has this value, and only one may.
    #[serde(rename = "FieldValueDuplicate")]
    Duplicate,
    /// Its value is none of a list.
    #[serde(rename = "FieldValueNotSupported")]
    Unsupported,
    /// It may not be said here, or cannot mean anything here.
    #[serde(rename = "FieldValueForbidden")]
    Forbidden,
    /// It has the wrong type.
    #[serde(rename = "FieldValueTypeInvalid")]
    Type,
    /// It is more than there may be.
    #[serde(rename = "FieldValueTooLong")]
    TooLong,
    /// Nobody knows such a field.
    #[serde(rename = "FieldUnknown")]
    Unknown,
    /// Two places say different things of it.
    #[serde(rename = "FieldConflict")]
    Conflict,
}

impl Problem {
    fn words(self) -> &'static str {
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

/// The name of a rule: stable, for tests and for programs that read the JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Rule(pub &'static str);

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Cause {
    /// The field, as `spec.domain.devices.disks[1].name` or `metadata.annotations[vm.nacelle.dev/cpus]`.
    pub field: String,
    /// In which way it is wrong.
    pub reason: Problem,
    /// The value that it has, if it has one that is worth telling.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// The rule that it breaks.
    pub rule: Rule,
    /// What the rule says.
    pub message: String,
    /// The annotation, instance type, preference or preset that the value came from, if not from the document.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
}

impl Cause {
    /// What is wrong, without the field: as Kubernetes tells it of a field that it names itself.
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
        f.write_str(cause.reason.words())?;
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
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, thiserror::Error)]
#[serde(transparent)]
pub struct Causes(Vec<Cause>);

impl Classify for Causes {
    fn kind(&self) -> Kind {
        Kind::Invalid
    }
}

/// Texts one after the other, each told whole.
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
    /// The causes.
    pub fn list(&self) -> &[Cause] {
        &self.0
    }

    /// Whether nothing is wrong.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The first of them, in about so many bytes, and how many there are besides.
    pub fn brief(&self, most: usize) -> String {
        let mut text = String::new();
        for (index, cause) in self.0.iter().enumerate() {
            let one = cause.to_string();
            if index > 0 && text.len() + one.len() > most {
                let more = self.0.len() - index;
                return format!("{text}; and {more} more: `nacelle vm validate` tells all");
            }
            let between = if index == 0 { "" } else { "; " };
            text = text + between + &one;
        }
        text
    }

    /// Nothing wrong is `Ok`.
    pub fn done(self) -> Result<(), Causes> {
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

    pub(crate) fn each(&mut self, change: impl FnMut(&mut Cause)) {
        self.0.iter_mut().for_each(change);
    }

    fn push(&mut self, rule: Rule, field: impl Into<String>, reason: Problem, value: Option<String>, message: String) {
        // Strangers choose names, which are parts of fields: one line stays one line.
        let line = |text: String| text.replace(|c: char| c.is_control(), " ");
        self.add(Cause { field: line(field.into()), reason, value, rule, message: line(message), from: None });
    }

    /// A field must say something.
    pub(crate) fn required(&mut self, rule: Rule, field: impl Into<String>, message: impl Into<String>) {
        self.push(rule, field, Problem::Required, None, message.into());
    }

    /// A field's value is wrong.
    pub(crate) fn invalid(
        &mut self,
        rule: Rule,
        field: impl Into<String>,
        value: impl Serialize,
        message: impl Into<String>,
    ) {
        self.push(rule, field, Problem::Invalid, Some(told(value)), message.into());
    }

    /// A second one has the same value.
    pub(crate) fn duplicate(
        &mut self,
        rule: Rule,
        field: impl Into<String>,
        value: impl Serialize,
        message: impl Into<String>,
    ) {
        self.push(rule, field, Problem::Duplicate, Some(told(value)), message.into());
    }

    /// A value is none of those that there are.
    pub(crate) fn unsupported(&mut self, rule: Rule, field: impl Into<String>, value: impl Serialize, words: &[&str]) {
        let words: Vec<String> = words.iter().map(told).collect();
        let message = format!("supported values: {}", words.join(", "));
        self.push(rule, field, Problem::Unsupported, Some(told(value)), message);
    }

    /// A field may not be said.
    pub(crate) fn forbidden(&mut self, rule: Rule, field: impl Into<String>, message: impl Into<String>) {
        self.push(rule, field, Problem::Forbidden, None, message.into());
    }

    /// A value has the wrong type.
    pub(crate) fn wrong_type(&mut self, rule: Rule, field: impl Into<String>, value: impl Serialize, wanted: &str) {
        self.push(rule, field, Problem::Type, Some(told(value)), format!("must be {wanted}"));
    }

    /// A value is too long.
    pub(crate) fn too_long(&mut self, rule: Rule, field: impl Into<String>, message: impl Into<String>) {
        self.push(rule, field, Problem::TooLong, None, message.into());
    }

    /// Nobody knows the field.
    pub(crate) fn unknown(&mut self, rule: Rule, field: impl Into<String>, message: impl Into<String>) {
        self.push(rule, field, Problem::Unknown, None, message.into());
    }

    /// Two places differ.
    pub(crate) fn conflict(
        &mut self,
        rule: Rule,
        field: impl Into<String>,
        value: impl Serialize,
        message: impl Into<String>,
    ) {
        self.push(rule, field, Problem::Conflict, Some(told(value)), message.into());
    }
}

/// A value as JSON writes it, cut where it gets long.
pub(crate) fn told(value: impl Serialize) -> String {
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
    fn a_cause_is_told_as_kubernetes_tells_it() {
        let mut causes = Causes::default();
        causes.invalid(Rule("x"), "spec.a", 0, "must be at least 1");
        causes.required(Rule("x"), "spec.b", "");
        causes.unsupported(Rule("x"), "spec.c", "ide", &["sata", "virtio"]);
        assert_eq!(
            causes.to_string(),
            "spec.a: Invalid value: 0: must be at least 1; spec.b: Required value; \
             spec.c: Unsupported value: \"ide\": supported values: \"sata\", \"virtio\""
        );
        assert_eq!(causes.kind(), Kind::Invalid);
        causes.unknown(Rule("x"), "a[b\nc]", "d\re");
        assert!(!causes.to_string().contains(['\n', '\r']));
    }

    #[test]
    fn the_same_is_told_once_and_long_values_are_cut() {
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
