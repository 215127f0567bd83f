//! Parses untrusted text to a tree of values: YAML or JSON, bounded in size, depth and number of values, without anchors, merges,
//! tags and duplicate keys.

use crate::cause::{Causes, Rule};
use nacelle_base::yaml::{self, NumberStyle, YamlLimits};
use serde_json::Value;
use serde_saphyr::{Error, Options};

/// The maximum size of a document in bytes: Kubernetes' limit for all annotations of an object.
pub const MAX_BYTES: usize = 256 * 1024;
/// The maximum nesting depth of a document.
pub const MAX_DEPTH: usize = 32;
/// The maximum number of values and keys of a document.
pub const MAX_NODES: usize = 20_000;
/// The maximum number of documents in a file.
pub const MAX_DOCUMENTS: usize = 256;

fn limits(documents: usize) -> YamlLimits {
    YamlLimits { bytes: MAX_BYTES, depth: MAX_DEPTH, values: MAX_NODES, documents }
}

fn options(documents: usize) -> Options {
    yaml::options(limits(documents), NumberStyle::Plain)
}

/// Parses a text with one document. `field` is the path of the text in causes.
pub fn one(text: &str, field: &str) -> Result<Value, Causes> {
    size(text, field)?;
    serde_saphyr::from_str_with_options::<Value>(text, options(1)).map_err(|error| broken(&error, 1, field))
}

/// Parses a text with several documents. Skips empty ones.
pub fn all(text: &str, field: &str) -> Result<Vec<Value>, Causes> {
    size(text, field)?;
    let documents = serde_saphyr::from_multiple_with_options::<Value>(text, options(MAX_DOCUMENTS));
    let documents = documents.map_err(|error| broken(&error, MAX_DOCUMENTS, field))?;
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

fn broken(error: &Error, documents: usize, field: &str) -> Causes {
    let mut causes = Causes::default();
    let message = format!("is not a valid document: {}", yaml::describe_error(error, limits(documents)));
    causes.forbidden(Rule("document-syntax"), field, message);
    causes
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
        assert!(refused("a: 1\n---\nb: 1").ends_with("there must be one document"));
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
