//! Reads `ci/stages.tsv`: the types that describe a mount, a device or the resources of a container from the CRI request to its OCI
//! specification. `shape` counts them; `rules` checks that each exists, and that none is missing.

use crate::Finding;
use crate::source::{text_at, tokens};
use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::path::Path;

/// Lists the types that describe a device, a mount or resources between the CRI request and the OCI specification, in the order in which
/// data passes through them.
const STAGES_FILE: &str = "ci/stages.tsv";
const CONCEPTS: [&str; 3] = ["device", "mount", "resources"];
/// A concept for types that are no stage.
const OTHER: &str = "-";

/// The directories that a container request passes through.
const PLACES: [&str; 7] = [
    "shim/model/src/",
    "shim/daemon/src/cri/",
    "shim/daemon/src/lifecycle/",
    "shim/daemon/src/oci/",
    "agent/src/container/",
    "proto/agent/v1/",
    "proto/pod/v1/",
];
/// A type is expected in the table if its name contains one of these.
const NAME_PARTS: [&str; 5] = ["Device", "Mount", "Volume", "EmptyDir", "Resources"];
/// A type is not expected in the table if its name ends with one of these: a failure, a call, an option.
const OTHER_ENDS: [&str; 6] = ["Error", "Request", "Response", "Option", "Form", "Policy"];

/// Returns the number of stages of each concept, in the order of their names.
pub fn count(root: &Path) -> Result<Vec<(String, usize)>, Box<dyn Error>> {
    let table = fs::read_to_string(root.join(STAGES_FILE))?;
    let lines: Vec<_> = rows(&table).filter_map(|(_, line)| stage(line)).collect();
    let of = |concept: &str| lines.iter().filter(|(other, ..)| *other == concept).count();
    Ok(CONCEPTS.iter().map(|concept| ((*concept).to_owned(), of(concept))).collect())
}

/// Checks the table. `files` are the paths and the code of Rust and protocol files, without comments and tests.
pub fn check(root: &Path, files: &[(String, String)]) -> Result<Vec<Finding>, Box<dyn Error>> {
    Ok(violations(&fs::read_to_string(root.join(STAGES_FILE))?, files))
}

fn violations(table: &str, files: &[(String, String)]) -> Vec<Finding> {
    let mut defined: BTreeMap<(&str, &str), bool> = BTreeMap::new();
    for (place, text) in files.iter().filter(|(place, _)| PLACES.iter().any(|start| place.starts_with(start))) {
        defined.extend(types(text).into_iter().map(|name| ((place.as_str(), name), false)));
    }
    let mut found = Vec::new();
    for (number, line) in rows(table) {
        let mut report =
            |rule: &str| found.push(Finding { place: format!("{STAGES_FILE}:{number}"), rule: rule.to_owned() });
        match stage(line) {
            None => report("is not a concept (device, mount, resources or -), a file and a type, separated by tabs"),
            Some((_, file, name)) => match defined.get_mut(&(file, name)) {
                Some(listed) if !*listed => *listed = true,
                Some(_) => report("is listed twice"),
                None => report("names a type that this file does not define"),
            },
        }
    }
    let is_stage = |name: &str| {
        NAME_PARTS.iter().any(|part| name.contains(part)) && !OTHER_ENDS.iter().any(|end| name.ends_with(end))
    };
    let missing = defined.into_iter().filter(|((_, name), listed)| !listed && is_stage(name));
    found.extend(missing.map(|((place, name), _)| Finding {
        place: place.to_owned(),
        rule: format!("defines {name}: list it in {STAGES_FILE}"),
    }));
    found
}

/// Returns the rows with their line numbers.
fn rows(table: &str) -> impl Iterator<Item = (usize, &str)> {
    (1..).zip(table.lines()).filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
}

/// Returns concept, file and type of a row.
fn stage(line: &str) -> Option<(&str, &str, &str)> {
    match line.split('\t').collect::<Vec<_>>()[..] {
        [concept, file, name] if CONCEPTS.contains(&concept) || concept == OTHER => Some((concept, file, name)),
        _ => None,
    }
}

/// Returns the names of structs, enums and messages in code without comments.
fn types(code: &str) -> Vec<&str> {
    let tokens = tokens(code);
    let keyword = |at: usize| matches!(text_at(&tokens, at), "struct" | "enum" | "message");
    let named = tokens.iter().enumerate().skip(1).filter(|(at, token)| keyword(at - 1) && token.is_name());
    named.map(|(_, token)| token.text).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(table: &str) -> Vec<String> {
        let file = |place: &str, text: &str| (place.to_owned(), text.to_owned());
        let files = [
            file(
                "shim/model/src/a.rs",
                "pub struct DeviceRequest;\npub struct Device { volume: u8 }\nenum DeviceError {}\n",
            ),
            file("proto/pod/v1/pod.proto", "message EmptyDir { message Part {} }\nmessage VolumeRequest {}\n"),
            file("shim/net/src/a.rs", "pub struct Device;\n"),
        ];
        violations(table, &files).into_iter().map(|found| format!("{}: {}", found.place, found.rule)).collect()
    }

    #[test]
    fn all_stages_are_listed_once() {
        let whole = "# a comment\ndevice\tshim/model/src/a.rs\tDevice\n-\tproto/pod/v1/pod.proto\tEmptyDir\n";
        assert_eq!(findings(whole), [""; 0]);
        assert_eq!(
            findings("device\tshim/model/src/a.rs\tDevice\n"),
            ["proto/pod/v1/pod.proto: defines EmptyDir: list it in ci/stages.tsv"]
        );
        for (line, rule) in [
            ("device\tshim/model/src/a.rs\tDevice", "is listed twice"),
            ("device\tshim/model/src/a.rs\tGone", "names a type that this file does not define"),
            ("card\tshim/model/src/a.rs\tDevice", "is not a concept"),
            ("device shim/model/src/a.rs Device", "is not a concept"),
        ] {
            let found = findings(&format!("{whole}{line}\n"));
            assert!(matches!(&found[..], [one] if one.starts_with(&format!("ci/stages.tsv:4: {rule}"))), "{found:?}");
        }
    }
}
