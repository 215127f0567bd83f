//! Checks the rules about language that a program can check: the headers of files, words that the project no longer uses, names of
//! public types, and titles of commits.
//!
//! `ci/words.tsv` holds how often a word may still occur and `ci/names.txt` the names that several public types still share. Both lists
//! only get shorter.

use crate::Finding;
use crate::shape;
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::Path;
use std::process::Command;

const WORDS_FILE: &str = "ci/words.tsv";
const NAMES_FILE: &str = "ci/names.txt";

/// The prefixes of headers that the project no longer uses.
const OLD_HEADERS: [&str; 3] = ["//! Owns:", "//! May use:", "//! Threads:"];

/// The last commit whose title need not follow the rule.
const LAST_FREE_TITLE: &str = "da877ab286cf6e9177a7946c9c3441dc6f3ac85b";

/// The longest title of a commit.
const MAX_TITLE: usize = 72;

/// `files` are all Rust files: their paths and their texts.
pub fn check(root: &Path, files: &[(String, String)]) -> Result<Vec<Finding>, Box<dyn Error>> {
    let language = shape::language(root)?;
    let mut found = old_headers(files);
    found.extend(frequent_words(&std::fs::read_to_string(root.join(WORDS_FILE))?, &language.words));
    found.extend(shared_names(&std::fs::read_to_string(root.join(NAMES_FILE))?, &language.types));
    found.extend(commit_titles(root)?);
    Ok(found)
}

fn finding(place: impl Into<String>, rule: String) -> Finding {
    Finding { place: place.into(), rule }
}

fn old_headers(files: &[(String, String)]) -> Vec<Finding> {
    let old = |text: &str| text.lines().find_map(|line| OLD_HEADERS.into_iter().find(|old| line.starts_with(old)));
    let wrong = files.iter().filter_map(|(path, text)| Some((path, old(text)?)));
    wrong.map(|(path, old)| finding(path, format!("has a header with {old:?}: write plain sentences"))).collect()
}

fn frequent_words(list: &str, counts: &[(String, usize)]) -> Vec<Finding> {
    let lines = list.lines().filter_map(|line| line.split_once('\t'));
    let most: BTreeMap<&str, usize> = lines.filter_map(|(word, most)| Some((word, most.parse().ok()?))).collect();
    let wrong = counts.iter().filter_map(|(words, count)| match most.get(words.as_str()) {
        Some(most) if count <= most => None,
        Some(most) => {
            Some(format!("{words}: {count} times, and at most {most} are allowed: use the term of the field"))
        }
        None => Some(format!("{words}: has no line with the number that is allowed")),
    });
    wrong.map(|rule| finding(WORDS_FILE, rule)).collect()
}

fn shared_names(list: &str, places: &BTreeMap<String, Vec<String>>) -> Vec<Finding> {
    let listed: BTreeSet<&str> = list.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    let shared = |name: &str| places.get(name).is_some_and(|places| places.len() > 1);
    let new = places.iter().filter(|(name, places)| places.len() > 1 && !listed.contains(name.as_str()));
    let new = new.map(|(name, places)| {
        let rule = format!("{name} is the name of several public types ({}): give each its own", places.join(", "));
        finding(NAMES_FILE, rule)
    });
    let gone = listed.iter().filter(|name| !shared(name));
    let gone = gone.map(|name| finding(NAMES_FILE, format!("{name} is not shared any more: take it out of the list")));
    new.chain(gone).collect()
}

/// The titles of the commits since [`LAST_FREE_TITLE`], in a clone that has their history.
fn commit_titles(root: &Path) -> Result<Vec<Finding>, Box<dyn Error>> {
    if !root.join(".git").exists() {
        return Ok(Vec::new());
    }
    let git = |arguments: &[&str]| Command::new("git").arg("-C").arg(root).args(arguments).output();
    if !git(&["cat-file", "-e", LAST_FREE_TITLE])?.status.success() {
        return Ok(Vec::new()); // a shallow clone
    }
    let log = git(&["log", "--no-merges", "--format=%h %s", &format!("{LAST_FREE_TITLE}..HEAD")])?;
    if !log.status.success() {
        return Err(String::from_utf8_lossy(&log.stderr).into());
    }
    let log = String::from_utf8(log.stdout)?;
    let wrong = log.lines().filter_map(|line| line.split_once(' ')).filter(|(_, title)| !is_title(title));
    let rule = || format!("has a title that is not `component: imperative` with at most {MAX_TITLE} characters");
    Ok(wrong.map(|(commit, _)| finding(format!("commit {commit}"), rule())).collect())
}

/// Components are words of lower-case letters, digits, `-` and `/`; several are separated by ", ".
fn is_title(title: &str) -> bool {
    let Some((components, subject)) = title.split_once(": ") else { return false };
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '/' | '.');
    let component = |text: &str| !text.is_empty() && text.chars().all(plain);
    title.chars().count() <= MAX_TITLE && !subject.trim().is_empty() && components.split(", ").all(component)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(found: Vec<Finding>) -> Vec<String> {
        found.into_iter().map(|found| format!("{}: {}", found.place, found.rule)).collect()
    }

    #[test]
    fn old_headers_are_found() {
        let file = |path: &str, text: &str| (path.to_owned(), text.to_owned());
        let old = format!("{} devices.\n", OLD_HEADERS[0]);
        let later = format!("//! Serves devices.\n//!\n{} any.\n", OLD_HEADERS[2]);
        let files = [file("a.rs", &old), file("b.rs", "//! Serves devices.\n"), file("c.rs", &later)];
        let places: Vec<_> = old_headers(&files).into_iter().map(|found| found.place).collect();
        assert_eq!(places, ["a.rs", "c.rs"]);
    }

    #[test]
    fn words_do_not_become_more() {
        let counts = [("told".to_owned(), 3), ("folder".to_owned(), 4), ("beside".to_owned(), 0)];
        let found = rules(frequent_words("told\t3\nfolder\t3\n", &counts));
        assert!(found.len() == 2 && found[0].contains("folder: 4 times") && found[1].contains("beside"), "{found:?}");
    }

    #[test]
    fn a_shared_name_is_listed_and_a_listed_name_is_shared() {
        let places = |n: usize| (0..n).map(|n| format!("{n}.rs:1")).collect();
        let names = [("Place", 2), ("Way", 2), ("Own", 1)].map(|(name, n)| (name.to_owned(), places(n)));
        let found = rules(shared_names("# comment\nPlace\nOwn\n", &names.into()));
        assert!(
            found.len() == 2 && found[0].contains("Way is the name") && found[1].contains("Own is not"),
            "{found:?}"
        );
    }

    #[test]
    fn titles_have_a_component() {
        for title in ["net: undo the tap", "model, pod: name events alike", "ci/test: print budgets"] {
            assert!(is_title(title), "{title}");
        }
        let long = format!("net: {}", "x".repeat(MAX_TITLE));
        for title in ["undo the tap", "net:", "net: ", "Net: undo", "the net: undo", long.as_str()] {
            assert!(!is_title(title), "{title}");
        }
    }
}
