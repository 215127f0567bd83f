//! Parses untrusted text to a tree of values: YAML or JSON, bounded in size, depth and number of values, without anchors, merges,
//! tags and duplicate keys.

use crate::cause::{Causes, Rule};
use serde_json::Value;
use serde_saphyr::budget::BudgetBreach;
use serde_saphyr::options::{DuplicateKeyPolicy, MergeKeyPolicy, NonFiniteFloatPolicy};
use serde_saphyr::{Error, Options};

/// The maximum size of a document in bytes: Kubernetes' limit for all annotations of an object.
pub const MAX_BYTES: usize = 256 * 1024;
/// The maximum nesting depth of a document.
pub const MAX_DEPTH: usize = 32;
/// The maximum number of values and keys of a document.
pub const MAX_NODES: usize = 20_000;
/// The maximum number of documents in a file.
pub const MAX_DOCUMENTS: usize = 256;

fn options(documents: usize) -> Options {
    serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_reader_input_bytes: Some(MAX_BYTES),
            max_events: MAX_NODES * 3,
            // Aliases repeat what they name: a few lines can mean billions. A specification does not need them.
            max_aliases: 0,
            max_anchors: 0,
            max_depth: MAX_DEPTH,
            flow_nesting_limit: MAX_DEPTH,
            max_documents: documents,
            max_nodes: MAX_NODES,
            max_total_scalar_bytes: MAX_BYTES,
            max_merge_keys: 0,
        },
        duplicate_keys: DuplicateKeyPolicy::Error,
        merge_keys: MergeKeyPolicy::Error,
        underscored_numbers_as_strings: true,
        leading_zero_numbers_as_strings: true,
        strict_booleans: true,
        reject_unsupported_tags: true,
        non_finite_float_policy: NonFiniteFloatPolicy::Reject,
        with_snippet: false,
    }
}

/// Parses a text with one document. `field` is the path of the text in causes.
pub fn one(text: &str, field: &str) -> Result<Value, Causes> {
    size(text, field)?;
    serde_saphyr::from_str_with_options::<Value>(text, options(1)).map_err(|error| broken(&error, field))
}

/// Parses a text with several documents. Skips empty ones.
pub fn all(text: &str, field: &str) -> Result<Vec<Value>, Causes> {
    size(text, field)?;
    let documents = serde_saphyr::from_multiple_with_options::<Value>(text, options(MAX_DOCUMENTS));
    let documents = documents.map_err(|error| broken(&error, field))?;
    Ok(documents.into_iter().filter(|document| !document.is_null()).collect())
}

fn size(text: &str, field: &str) -> Result<(), Causes> {
    let mut causes = Causes::default();
    if text.len() > MAX_BYTES {
        let message = format!("has {} bytes, and at most {MAX_BYTES} are read", text.len());
        causes.too_long(Rule("document-bytes"), field, message);
    }
    causes.into_result()
}

fn broken(error: &Error, field: &str) -> Causes {
    let error = error.without_snippet();
    let why = match error {
        Error::Budget { breach, .. } => over(breach),
        Error::MergeKeyNotAllowed { .. } => "merges (<<) are not read".to_owned(),
        Error::DuplicateMappingKey { key, .. } => match key {
            Some(key) => format!("the key {key:?} is there twice"),
            None => "a key is there twice".to_owned(),
        },
        Error::MultipleDocuments { .. } => "there must be one document".to_owned(),
        other => {
            // The message of a gRPC status and a log line must be one line.
            let text = other.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
            // The position is at the start of the message.
            text.rsplit_once(" at line ").map_or(text.clone(), |(text, _)| text.to_owned())
        }
    };
    let place = error.location().map_or_else(String::new, |at| format!("line {} column {}: ", at.line(), at.column()));
    let mut causes = Causes::default();
    let message = format!("is not a valid document: {place}{why}");
    causes.forbidden(Rule("document-syntax"), field, message);
    causes
}

fn over(breach: &BudgetBreach) -> String {
    match breach {
        BudgetBreach::Anchors { .. } | BudgetBreach::Aliases { .. } => "anchors and aliases are not read".to_owned(),
        BudgetBreach::MergeKeys { .. } => "merges (<<) are not read".to_owned(),
        BudgetBreach::Documents { .. } => "there are too many documents".to_owned(),
        BudgetBreach::Depth { .. } => format!("it is nested deeper than {MAX_DEPTH}"),
        BudgetBreach::Nodes { .. } | BudgetBreach::Events { .. } => format!("it has more than {MAX_NODES} values"),
        _ => "it is larger than what is read".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn values_are_what_they_look_like() {
        let text = "{a: 1, b: yes, c: true, d: 1_000, e: 010, f: 1Gi, g: ~, h: 2.5, i: '1', j: on, k: null}";
        let value = json!({ "a": 1, "b": "yes", "c": true, "d": "1_000", "e": "010", "f": "1Gi", "g": null, "h": 2.5,
            "i": "1", "j": "on", "k": null });
        assert_eq!(one(text, "x"), Ok(value));
        let json = "{\n\t\"a\": [1, \"\\ud83d\\ude00\\/\"],\n\t\"b\": {}\n}";
        assert_eq!(one(json, "x"), Ok(json!({ "a": [1, "\u{1f600}/"], "b": {} })));
    }

    #[test]
    fn there_is_an_end_to_everything() {
        let refused = |text: &str| one(text, "x").unwrap_err().to_string();
        assert_eq!(refused(&"x".repeat(MAX_BYTES + 1)), "x: Too long: has 262145 bytes, and at most 262144 are read");
        for bomb in ["a: &a [1,1]\nb: &b [*a,*a]\nc: [*b,*b]", "a: &a {b: 1}\nc: {<<: *a}"] {
            assert!(refused(bomb).ends_with("anchors and aliases are not read"), "{}", refused(bomb));
        }
        assert!(refused("{<<: {a: 1}}").ends_with("merges (<<) are not read"));
        assert!(refused("{a: 1, a: 2}").ends_with("the key \"a\" is there twice"));
        assert!(refused("a: 1\n---\nb: 1").ends_with("too many documents"));
        assert!(refused(&"- ".repeat(60)).contains("nested deeper than 32"), "{}", refused(&"- ".repeat(60)));
        assert!(one(&"[".repeat(100_000), "x").is_err());
        assert!(refused(&"- a\n".repeat(30_000)).contains("more than 20000 values"));
        assert!(one("!!python/object a", "x").is_err());
        assert!(one("a: .inf", "x").is_err());
    }

    #[test]
    fn a_file_has_several() {
        assert_eq!(all("a: 1\n---\n---\nb: 2\n", "x"), Ok(vec![json!({ "a": 1 }), json!({ "b": 2 })]));
        assert!(all(&"---\na: 1\n".repeat(300), "x").is_err());
    }

    proptest::proptest! {
        #[test]
        fn no_text_breaks_it(text in "[-a-c0-9:,{}\\[\\]&*<>|!'\"#%@` \n\t?~.]{0,200}") {
            let _ = one(&text, "x");
            let _ = all(&text, "x");
        }
    }
}
