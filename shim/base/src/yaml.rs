//! Configures the YAML parser for texts that other programs and users write, and describes its errors on one line. Size, depth and
//! number of values are bounded before anything is decoded; aliases and merges, with which a few lines can mean billions, are
//! rejected.

use serde_saphyr::budget::BudgetBreach;
use serde_saphyr::options::{DuplicateKeyPolicy, MergeKeyPolicy, NonFiniteFloatPolicy};
use serde_saphyr::{Error, Options};

/// The limits of a text.
#[derive(Clone, Copy, Debug)]
pub struct YamlLimits {
    /// The maximum size in bytes.
    pub bytes: usize,
    /// The maximum nesting depth.
    pub depth: usize,
    /// The maximum number of values and keys.
    pub values: usize,
    /// The maximum number of documents.
    pub documents: usize,
}

/// The meaning of numbers that YAML 1.1 and 1.2 read differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumberStyle {
    /// `010` and `1_000` are strings, as they look.
    Plain,
    /// `0660` is octal, as for Go's libraries.
    LegacyOctal,
}

/// Returns the parser's options.
pub fn options(limits: YamlLimits, numbers: NumberStyle) -> Options {
    let plain = numbers == NumberStyle::Plain;
    serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_reader_input_bytes: Some(limits.bytes),
            max_events: limits.values * 3,
            max_aliases: 0,
            max_anchors: 0,
            max_depth: limits.depth,
            flow_nesting_limit: limits.depth,
            max_documents: limits.documents,
            max_nodes: limits.values,
            max_total_scalar_bytes: limits.bytes,
            max_merge_keys: 0,
        },
        duplicate_keys: DuplicateKeyPolicy::Error,
        merge_keys: MergeKeyPolicy::Error,
        underscored_numbers_as_strings: plain,
        leading_zero_numbers_as_strings: plain,
        legacy_octal_numbers: !plain,
        strict_booleans: true,
        reject_unsupported_tags: true,
        non_finite_float_policy: NonFiniteFloatPolicy::Reject,
        with_snippet: false,
    }
}

/// Returns the position and the reason of an error on one line: it becomes part of a gRPC status or a log line.
pub fn describe_error(error: &Error, limits: YamlLimits) -> String {
    let error = error.without_snippet();
    let why = match error {
        Error::Budget { breach, .. } => describe_breach(breach, limits),
        Error::MergeKeyNotAllowed { .. } => "merges (<<) are not read".to_owned(),
        Error::DuplicateMappingKey { key, .. } => match key {
            Some(key) => format!("the key {key:?} is there twice"),
            None => "a key is there twice".to_owned(),
        },
        Error::MultipleDocuments { .. } => too_many_documents(limits),
        other => {
            let text = other.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
            // The position is at the start of the message.
            text.rsplit_once(" at line ").map_or(text.clone(), |(text, _)| text.to_owned())
        }
    };
    error.location().map_or_else(|| why.clone(), |at| format!("line {} column {}: {why}", at.line(), at.column()))
}

fn describe_breach(breach: &BudgetBreach, limits: YamlLimits) -> String {
    match breach {
        BudgetBreach::Anchors { .. } | BudgetBreach::Aliases { .. } => "anchors and aliases are not read".to_owned(),
        BudgetBreach::MergeKeys { .. } => "merges (<<) are not read".to_owned(),
        BudgetBreach::Documents { .. } => too_many_documents(limits),
        BudgetBreach::Depth { .. } => format!("it is nested deeper than {}", limits.depth),
        BudgetBreach::Nodes { .. } | BudgetBreach::Events { .. } => {
            format!("it has more than {} values", limits.values)
        }
        _ => "it is larger than what is read".to_owned(),
    }
}

fn too_many_documents(limits: YamlLimits) -> String {
    match limits.documents {
        1 => "there must be one document".to_owned(),
        most => format!("there are more than {most} documents"),
    }
}
