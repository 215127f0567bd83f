//! Checks what every Rust file must have: a first line that says what the module does, and no `unsafe` unless the
//! file is listed in `ci/unsafe.txt`.

use crate::Finding;
use std::collections::BTreeSet;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

const DIRECTORIES: [&str; 5] = ["proto", "shim", "agent", "guest", "ci"];

/// All Rust files: their places below `root` and their texts.
pub fn read_rust(root: &Path) -> Result<Vec<(String, String)>, Box<dyn Error>> {
    let mut found = Vec::new();
    for path in
        project_files(root)?.into_iter().filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
    {
        found.push((relative_path(root, &path)?, fs::read_to_string(&path)?));
    }
    Ok(found)
}

/// Returns all protocol files: their paths below `root` and their texts without comments.
pub fn read_protocols(root: &Path) -> Result<Vec<(String, String)>, Box<dyn Error>> {
    let mut found = Vec::new();
    for path in
        project_files(root)?.into_iter().filter(|path| path.extension().is_some_and(|extension| extension == "proto"))
    {
        let text = fs::read_to_string(&path)?;
        let code = text.lines().map(|line| line.split_once("//").map_or(line, |(code, _)| code));
        found.push((relative_path(root, &path)?, code.collect::<Vec<_>>().join("\n")));
    }
    Ok(found)
}

/// All shell scripts: their places below `root` and their texts. A script has the ending `.sh`, or its first line names a shell.
pub fn read_scripts(root: &Path) -> Result<Vec<(String, String)>, Box<dyn Error>> {
    let mut found = Vec::new();
    for path in project_files(root)? {
        let bytes = fs::read(&path)?;
        if path.extension().is_some_and(|extension| extension == "sh") || names_shell(&bytes) {
            found.push((relative_path(root, &path)?, String::from_utf8_lossy(&bytes).into_owned()));
        }
    }
    Ok(found)
}

pub fn check(root: &Path, files: &[(String, String)]) -> Result<Vec<Finding>, Box<dyn Error>> {
    let list = fs::read_to_string(root.join("ci/unsafe.txt"))?;
    let mut listed: BTreeSet<&str> = list.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    let mut found = Vec::new();
    for (place, text) in files {
        found.extend(missing_header(text).map(|rule| Finding { place: place.clone(), rule: rule.to_owned() }));
        let allowed = listed.remove(place.as_str());
        found.extend(
            misplaced_unsafe(text, allowed).map(|rule| Finding { place: place.clone(), rule: rule.to_owned() }),
        );
    }
    found.extend(listed.into_iter().map(|place| Finding {
        place: place.to_owned(),
        rule: "is listed in ci/unsafe.txt and is not there".to_owned(),
    }));
    Ok(found)
}

/// All files below the directories of the project, in order.
fn project_files(root: &Path) -> Result<Vec<PathBuf>, Box<dyn Error>> {
    let mut paths = Vec::new();
    for directory in DIRECTORIES {
        collect_files(&root.join(directory), &mut paths)?;
    }
    paths.sort();
    Ok(paths)
}

fn collect_files(directory: &Path, files: &mut Vec<PathBuf>) -> Result<(), Box<dyn Error>> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            if path.file_name().is_some_and(|name| name != "target") {
                collect_files(&path, files)?;
            }
        } else if path.is_file() {
            files.push(path);
        }
    }
    Ok(())
}

fn relative_path(root: &Path, path: &Path) -> Result<String, Box<dyn Error>> {
    Ok(path.strip_prefix(root)?.to_string_lossy().into_owned())
}

/// Whether the first line of a file names a shell that runs it.
fn names_shell(bytes: &[u8]) -> bool {
    let line = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let line = String::from_utf8_lossy(line);
    let mut words = line.strip_prefix("#!").unwrap_or_default().split_whitespace();
    words.any(|word| matches!(word.rsplit('/').next(), Some("sh" | "bash")))
}

fn missing_header(text: &str) -> Option<&'static str> {
    (!text.starts_with("//! ")).then_some("does not open with `//!` and a sentence that says what the module does")
}

fn misplaced_unsafe(text: &str, listed: bool) -> Option<&'static str> {
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
    fn a_script_names_its_shell() {
        for text in ["#!/bin/bash\nset -e", "#!/bin/sh -e\n", "#!/usr/bin/env bash", "#!/busybox sh\n"] {
            assert!(names_shell(text.as_bytes()), "{text}");
        }
        for text in ["", "#!/usr/bin/perl\n", "echo /bin/sh\n", "#!/usr/bin/python3\n#!/bin/sh\n"] {
            assert!(!names_shell(text.as_bytes()), "{text}");
        }
    }

    #[test]
    fn a_file_says_what_it_does() {
        assert_eq!(missing_header("//! Forwards frames.\n"), None);
        assert!(missing_header("use std::fs;\n").is_some());
    }

    #[test]
    fn unsafe_has_an_address() {
        let block = format!("let x = {} {{ f() }};", "unsafe");
        assert!(misplaced_unsafe(&block, false).is_some());
        assert_eq!(misplaced_unsafe(&block, true), None);
        assert!(misplaced_unsafe("fn f() {}", true).is_some());
        assert_eq!(misplaced_unsafe(&format!("// {block}"), false), None);
        assert_eq!(misplaced_unsafe("#![deny(unsafe_code)]", false), None);
    }
}
