//! Checks that bytes of others are decoded within bounds: JSON by `nacelle_base::json` and protobuf by `nacelle_proto::wire`, which
//! count before they decode. A file that calls a decoder itself is listed in `ci/decoders.txt`, with the reason.
//!
//! Tests are left out: what stands in `tests` directories, in files of tests, and after the first line of a file that ends in `mod tests {`.

use crate::Finding;
use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::path::Path;

const LIST_FILE: &str = "ci/decoders.txt";
/// Calls that decode without a bound.
const JSON_DECODERS: [&str; 4] =
    ["serde_json::from_slice", "serde_json::from_str", "serde_json::from_reader", "serde_json::Deserializer"];

pub fn check(root: &Path, files: &[(String, String)]) -> Result<Vec<Finding>, Box<dyn Error>> {
    let list = fs::read_to_string(root.join(LIST_FILE))?;
    Ok(compare(&list, files))
}

/// `files` are all Rust files: their places and their texts.
fn compare(list: &str, files: &[(String, String)]) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut listed = BTreeMap::new();
    for line in list.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        match line.split_once(' ').map(|(place, reason)| (place, reason.trim())) {
            Some((place, reason)) if !reason.is_empty() => drop(listed.insert(place, reason)),
            _ => found.push(finding(line, "is listed in ci/decoders.txt without a reason")),
        }
    }
    for (place, text) in files.iter().filter(|(place, _)| !is_test(place)) {
        match (unbounded_decoder(text), listed.remove(place.as_str()).is_some()) {
            (Some(call), false) => found.push(finding(
                place,
                &format!(
                    "calls {call}: bytes of others are decoded by nacelle_base::json::read or nacelle_proto::wire::decode; bytes that only \
                     root or this program writes: list the file in ci/decoders.txt, with the reason"
                ),
            )),
            (None, true) => found.push(finding(place, "is listed in ci/decoders.txt and decodes nothing: take it out of the list")),
            _ => {}
        }
    }
    found.extend(listed.into_keys().map(|place| finding(place, "is listed in ci/decoders.txt and is not there")));
    found
}

fn is_test(place: &str) -> bool {
    place.split('/').any(|part| part == "tests" || part.ends_with("tests.rs")) || place.starts_with("ci/")
}

/// The decoder that the code calls without a bound.
fn unbounded_decoder(text: &str) -> Option<String> {
    let code = text.lines().take_while(|line| !line.ends_with("mod tests {"));
    let code: Vec<&str> = code.filter(|line| !line.trim_start().starts_with("//")).collect();
    let calls = |call: &str| code.iter().any(|line| line.contains(call));
    if let Some(call) = JSON_DECODERS.iter().find(|call| calls(call)) {
        return Some((*call).to_owned());
    }
    if calls("ProstCodec") {
        return Some("prost's codec".to_owned());
    }
    // A decoder of prost needs its trait.
    let prost = calls("prost::Message") || calls("use prost::");
    let unbounded = code.iter().any(|line| {
        let own = ["wire::decode", "CopyInRequest::decode", "CopyInMessage::decode", "SharedVirtqueue::decode"];
        line.contains("::decode(") && !own.iter().any(|own| line.contains(own))
    });
    (prost && unbounded || calls("decode_length_delimited")).then(|| "prost's decode".to_owned())
}

fn finding(place: &str, rule: &str) -> Finding {
    Finding { place: place.to_owned(), rule: rule.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(list: &str, text: &str) -> Vec<String> {
        let files = [("shim/a/src/b.rs".to_owned(), text.to_owned())];
        compare(list, &files).into_iter().map(|found| format!("{}: {}", found.place, found.rule)).collect()
    }

    #[test]
    fn decoders_without_a_bound_are_found() {
        for call in ["serde_json::from_slice(b)", "serde_json::from_str::<A>(t)", "ProstCodec::default()"] {
            let found = findings("", &format!("fn f() {{ {call} }}\n"));
            assert!(found.len() == 1 && found[0].starts_with("shim/a/src/b.rs: calls"), "{call}: {found:?}");
            assert!(findings("shim/a/src/b.rs root writes it", &format!("fn f() {{ {call} }}\n")).is_empty());
        }
        let prost = "use prost::Message;\nfn f() { proto::Tree::decode(bytes); }\n";
        assert_eq!(findings("", prost).len(), 1);
        assert!(findings("", "use prost::Message;\nfn f() { wire::decode(bytes); }\n").is_empty());
    }

    #[test]
    fn tests_and_comments_decode_what_they_like() {
        assert!(
            findings("", "// serde_json::from_slice(b)\n#[cfg(test)]\nmod tests {\n    serde_json::from_str(t)\n}\n")
                .is_empty()
        );
        assert!(
            is_test("shim/a/tests/b.rs") && is_test("shim/a/src/tree_tests.rs") && !is_test("shim/a/src/attests_of.rs")
        );
    }

    #[test]
    fn the_list_is_kept_short() {
        assert!(findings("shim/a/src/b.rs", "")[0].contains("without a reason"));
        assert!(findings("shim/a/src/b.rs a reason", "fn f() {}")[0].contains("decodes nothing"));
        assert!(findings("shim/gone.rs a reason", "fn f() {}")[0].contains("is not there"));
    }
}
