//! Checks what every Rust file must have: a first line that says what the module does, and no `unsafe` unless the
//! file is listed in `ci/unsafe.txt`.

use crate::Finding;
use std::collections::BTreeSet;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

const FOLDERS: [&str; 5] = ["proto", "shim", "agent", "guest", "ci"];

/// All Rust files: their places below `root` and their texts.
pub fn all(root: &Path) -> Result<Vec<(String, String)>, Box<dyn Error>> {
    let mut paths = Vec::new();
    for folder in FOLDERS {
        collect(&root.join(folder), &mut paths)?;
    }
    paths.sort();
    let read = |path: PathBuf| {
        let place = path.strip_prefix(root)?.to_string_lossy().into_owned();
        Ok((place, fs::read_to_string(&path)?))
    };
    paths.into_iter().map(read).collect()
}

pub fn check(root: &Path, files: &[(String, String)]) -> Result<Vec<Finding>, Box<dyn Error>> {
    let list = fs::read_to_string(root.join("ci/unsafe.txt"))?;
    let mut listed: BTreeSet<&str> = list.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    let mut found = Vec::new();
    for (place, text) in files {
        found.extend(header(text).map(|rule| Finding { place: place.clone(), rule: rule.to_owned() }));
        let allowed = listed.remove(place.as_str());
        found.extend(unsafety(text, allowed).map(|rule| Finding { place: place.clone(), rule: rule.to_owned() }));
    }
    found.extend(listed.into_iter().map(|place| Finding {
        place: place.to_owned(),
        rule: "is listed in ci/unsafe.txt and is not there".to_owned(),
    }));
    Ok(found)
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), Box<dyn Error>> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            if path.file_name().is_some_and(|name| name != "target") {
                collect(&path, files)?;
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

fn header(text: &str) -> Option<&'static str> {
    (!text.starts_with("//! ")).then_some("does not open with `//!` and a sentence that says what the module does")
}

fn unsafety(text: &str, listed: bool) -> Option<&'static str> {
    let says = text.lines().map(str::trim_start).filter(|line| !line.starts_with("//")).any(has_unsafe);
    match (says, listed) {
        (true, false) => Some("says `unsafe` and is not listed in ci/unsafe.txt"),
        (false, true) => Some("is listed in ci/unsafe.txt and has no `unsafe`: take it out of the list"),
        _ => None,
    }
}

/// Whether a line of code opens an unsafe block, function, impl or extern.
fn has_unsafe(line: &str) -> bool {
    ["{", "fn ", "impl ", "extern ", "impl<"].iter().any(|next| line.contains(&format!("{} {next}", "unsafe")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_says_what_it_does() {
        assert_eq!(header("//! Forwards frames.\n"), None);
        assert!(header("use std::fs;\n").is_some());
    }

    #[test]
    fn unsafe_has_an_address() {
        let block = format!("let x = {} {{ f() }};", "unsafe");
        assert!(unsafety(&block, false).is_some());
        assert_eq!(unsafety(&block, true), None);
        assert!(unsafety("fn f() {}", true).is_some());
        assert_eq!(unsafety(&format!("// {block}"), false), None);
        assert_eq!(unsafety("#![deny(unsafe_code)]", false), None);
    }
}
