//! Checks that no code outside of a jail opens by path what lies in a directory that a jailed process writes, except the files in
//! `ci/jailed.txt`, and these through `nacelle_base::jailed` only.

use crate::Finding;
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::Path;

const LIST_FILE: &str = "ci/jailed.txt";

/// Calls that follow links, wait for a writer, or read without a bound. Of an open file they are methods with other names.
const PATH_CALLS: [&str; 28] = [
    "fs::read(",
    "fs::read_to_string",
    "fs::read_dir",
    "fs::read_link",
    "fs::metadata",
    "fs::symlink_metadata",
    "fs::exists",
    "fs::try_exists",
    "fs::canonicalize",
    "fs::copy",
    "fs::rename",
    "fs::hard_link",
    "fs::remove_",
    "fs::set_permissions",
    "fs::write",
    "File::open",
    "File::create",
    "File::options",
    "OpenOptions::new",
    "UnixStream::connect",
    ".exists()",
    ".try_exists()",
    ".is_file()",
    ".is_dir()",
    ".is_symlink()",
    ".read_dir()",
    ".read_link()",
    ".canonicalize()",
];

/// What names a path in a pod's jail, or in the directory of a VM's disks, which its pod writes.
const JAIL_PATHS: [&str; 5] = ["jail_dir(", ".in_jail(", "vms.directory(", "\"jail\"", "\"jail/"];

/// What the list allows.
#[derive(Default)]
struct List<'a> {
    reads: BTreeMap<&'a str, Vec<&'a str>>,
    names: BTreeSet<&'a str>,
}

/// `files` are all Rust files: their places and their texts.
pub fn check(root: &Path, files: &[(String, String)]) -> Result<Vec<Finding>, Box<dyn Error>> {
    let text = std::fs::read_to_string(root.join(LIST_FILE))?;
    let mut list = parse(&text)?;
    let mut found = Vec::new();
    for (place, text) in files {
        if place.contains("/tests/") || place.starts_with("ci/") {
            continue;
        }
        let reads = list.reads.remove(place.as_str());
        let names = list.names.remove(place.as_str());
        let rules = violations(text, reads.as_deref(), names).into_iter();
        found.extend(rules.map(|rule| Finding { place: place.clone(), rule }));
    }
    let gone = list.reads.into_keys().chain(list.names);
    found.extend(
        gone.map(|place| Finding {
            place: place.to_owned(),
            rule: format!("is listed in {LIST_FILE} and is not there"),
        }),
    );
    Ok(found)
}

fn parse(text: &str) -> Result<List<'_>, String> {
    let mut list = List::default();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let mut words = line.split_whitespace();
        match (words.next(), words.next()) {
            (Some("reads"), Some(file)) => list.reads.entry(file).or_default().extend(words),
            (Some("names"), Some(file)) => list.names.extend([file]),
            _ => return Err(format!("{LIST_FILE}: {line:?} is neither \"reads FILE\" nor \"names FILE\"")),
        }
    }
    Ok(list)
}

/// The rules that a file breaks. Its tests may do anything.
fn violations(text: &str, reads: Option<&[&str]>, names: bool) -> Vec<String> {
    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
    let lines = code.lines().enumerate().filter(|(_, line)| !line.trim_start().starts_with("//"));
    let mut unused: Vec<&str> = reads.unwrap_or_default().to_vec();
    let mut found = Vec::new();
    for (number, line) in lines {
        let place = format!("line {}", number + 1);
        unused.retain(|word| !line.contains(word));
        if let Some(allowed) = reads {
            let calls = PATH_CALLS.iter().filter(|call| line.contains(**call) && !allowed.contains(call));
            found.extend(
                calls.map(|call| format!("{place}: `{call}` where a jailed process writes: use nacelle_base::jailed")),
            );
        }
        if !names && JAIL_PATHS.iter().any(|name| line.contains(name)) {
            found
                .push(format!("{place}: names a path in a pod's jail: use `nacelle_pod::jailed` (or see {LIST_FILE})"));
        }
    }
    // A word that is not needed hides a call that is added later.
    found.extend(unused.iter().map(|word| format!("may call `{word}` by {LIST_FILE} and does not: take the word out")));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listed_file_opens_nothing_by_path() {
        for line in [
            "let bytes = std::fs::read(&path)?;",
            "let file = File::open(dir.join(name))?;",
            "tokio::fs::metadata(&path).await?;",
            "if path.exists() {",
            "UnixStream::connect(&socket)?;",
        ] {
            assert_eq!(violations(line, Some(&[]), false).len(), 1, "{line}");
            assert!(violations(line, None, false).is_empty(), "not listed: {line}");
            assert!(violations(&format!("    // {line}"), Some(&[]), false).is_empty());
            assert!(
                violations(&format!("fn f() {{}}\n#[cfg(test)]\nmod tests {{ {line} }}"), Some(&[]), false).is_empty()
            );
        }
        assert!(violations("let file = dir.open(name)?.metadata();", Some(&[]), false).is_empty());
    }

    #[test]
    fn an_exception_is_for_one_call_and_must_be_needed() {
        assert!(violations("File::open(own)?;", Some(&["File::open"]), false).is_empty());
        assert_eq!(violations("File::open(own)?; fs::copy(a, b)?;", Some(&["File::open"]), false).len(), 1);
        assert!(violations("fn f() {}", Some(&["File::open"]), false)[0].contains("take the word out"));
    }

    #[test]
    fn a_path_in_a_jail_is_named_by_listed_files_only() {
        for line in [
            "let part = nacelle_pod::jail_dir(&dir);",
            "SOCKET_FILE.in_jail(&dir)",
            "std::fs::read(parts.vms.directory(&record).join(name))",
            "parts.pod_dir(&id).join(\"jail/state.json\")",
        ] {
            assert_eq!(violations(line, None, false).len(), 1, "{line}");
            assert!(violations(line, None, true).is_empty());
        }
        assert!(violations("nacelle_pod::create_jail(&dir)?; nacelle_pod::jailed(&dir)", None, false).is_empty());
    }

    #[test]
    fn a_line_of_the_list_that_is_no_rule_is_an_error() {
        assert!(parse("# a comment\n\nreads a.rs File::open\nnames b.rs\n").is_ok());
        assert!(parse("a.rs\n").is_err());
    }
}
