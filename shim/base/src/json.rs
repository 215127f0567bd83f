//! Reads JSON whose number of values is bounded before any of it is decoded, because two bytes of text can become a value
//! of a hundred bytes in memory. serde_json bounds the nesting depth (128); the caller must bound the length of the text.
//!
//! `cargo xtask rules` forbids other readers of JSON outside the files that `ci/decoders.txt` lists with a reason.

use serde::de::{DeserializeOwned, Error as _};

/// The bound for documents that have no larger bound of their own. Image manifests, results of CNI plugins and OCI
/// specifications have a few thousand values.
pub const MAX_VALUES: usize = 100_000;

/// Decodes a text of at most [`MAX_VALUES`] values.
pub fn read<T: DeserializeOwned>(text: &[u8]) -> Result<T, serde_json::Error> {
    read_limited(text, MAX_VALUES)
}

/// Decodes a text of at most `max` values.
pub fn read_limited<T: DeserializeOwned>(text: &[u8], max: usize) -> Result<T, serde_json::Error> {
    if count_values(text) > max {
        return Err(serde_json::Error::custom(format_args!("the document has more than {max} values")));
    }
    serde_json::from_slice(text)
}

/// Counts values and keys of the text in one pass without allocation; never less than the text has. For text that is not
/// JSON the result is arbitrary.
pub fn count_values(text: &[u8]) -> usize {
    let (mut count, mut quoted, mut escaped) = (1, false, false);
    for &byte in text {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b',' | b':' | b'[' | b'{' if !quoted => count += 1,
            _ => {}
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    /// Counts the values and keys of a document.
    fn values(value: &Value) -> usize {
        match value {
            Value::Array(items) => 1 + items.iter().map(values).sum::<usize>(),
            Value::Object(fields) => 1 + fields.values().map(|value| 1 + values(value)).sum::<usize>(),
            _ => 1,
        }
    }

    #[test]
    fn documents_with_too_many_values_are_rejected() {
        let array_of = |values: usize| format!("[{}0]", "0,".repeat(values - 2));
        assert_eq!(read_limited::<Value>(array_of(1000).as_bytes(), 1000).unwrap().as_array().map(Vec::len), Some(999));
        let refused = read_limited::<Value>(array_of(1001).as_bytes(), 1000).unwrap_err().to_string();
        assert!(refused.contains("the document has more than 1000 values"), "{refused}");
        for text in ["[".repeat(1000), "{} {}".to_owned(), String::new(), "1e999".to_owned(), "\u{0}".to_owned()] {
            assert!(read::<Value>(text.as_bytes()).is_err());
        }
    }

    #[test]
    fn delimiters_in_strings_are_not_counted() {
        let text = json!({ "a,b": "[[[{,:\\\"," }).to_string();
        assert_eq!(count_values(text.as_bytes()), 3);
    }

    fn document() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            "[a,:\\[{\"\\\\]{0,6}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 64, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::btree_map("[a,\"\\\\{]{0,4}", inner, 0..6)
                    .prop_map(|fields| Value::Object(fields.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn no_value_is_missed_by_the_count(value in document()) {
            let text = value.to_string();
            prop_assert!(count_values(text.as_bytes()) >= values(&value));
            prop_assert_eq!(read::<Value>(text.as_bytes()).unwrap(), value);
        }

        #[test]
        fn reads_the_same_value_as_serde_json(text in "[\\[\\]{}:,\"a0-9.e -]{0,40}|\\{\"[a-c]\":[0-9]{1,25}(\\.[0-9])?\\}") {
            let plain = serde_json::from_str::<Value>(&text).ok();
            prop_assert_eq!(read::<Value>(text.as_bytes()).ok(), plain);
        }
    }
}
