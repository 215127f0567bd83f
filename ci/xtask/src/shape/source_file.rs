//! The Rust files of the tree without their tests: files that contain nothing but tests are left out, and so are the items for tests
//! in the others.

use super::cfg_test::{self, TestItems};
use crate::source::{blank_literals, tokens};
use std::ops::RangeInclusive;

/// A file that is not for tests only.
pub struct SourceFile<'a> {
    /// Path below the root of the repository.
    pub place: &'a str,
    /// Number of lines, tests included.
    pub lines: usize,
    /// The code without tests, comments, strings and characters. Each token is on the line on which it is in the file.
    pub code: String,
    text: &'a str,
    /// Lines of the items for tests, in order.
    test_lines: Vec<RangeInclusive<usize>>,
}

impl<'a> SourceFile<'a> {
    /// Returns the lines that do not belong to tests, with their comments.
    pub fn production(&self) -> impl Iterator<Item = &'a str> {
        let in_tests = move |line: usize| self.test_lines.iter().any(|range| range.contains(&line));
        let numbered = self.text.lines().enumerate();
        numbered.filter(move |(before, _)| !in_tests(before + 1)).map(|(_, line)| line)
    }
}

/// Returns those of the files (paths and texts) that are not for tests only, in the same order.
pub fn production_files(files: &[(String, String)]) -> Vec<SourceFile<'_>> {
    let (mut found, mut test_modules) = (Vec::new(), Vec::new());
    for (place, text) in files {
        let (file, items) = parse(place, text);
        test_modules.extend(items.modules.iter().map(|name| module_file(place, name)));
        if !items.whole_file && !is_test(place) {
            found.push(file);
        }
    }
    found.retain(|file: &SourceFile<'_>| !test_modules.iter().any(|module| is_module(file.place, module)));
    found
}

fn parse<'a>(place: &'a str, text: &'a str) -> (SourceFile<'a>, TestItems) {
    let blanked = blank_literals(text);
    let tokens = tokens(&blanked);
    let items = cfg_test::find(&tokens);
    let (mut code, mut test_lines, mut from) = (String::with_capacity(blanked.len()), Vec::new(), 0);
    for range in &items.ranges {
        let (Some(first), Some(last)) = (tokens.get(range.start), tokens.get(range.end - 1)) else {
            continue;
        };
        let end = last.at + last.text.len();
        code.push_str(blanked.get(from..first.at).unwrap_or_default());
        let tests = blanked.get(first.at..end).unwrap_or_default();
        code.extend(tests.chars().filter(|c| *c == '\n'));
        test_lines.push(first.line..=last.line);
        from = end;
    }
    code.push_str(blanked.get(from..).unwrap_or_default());
    (SourceFile { place, lines: text.lines().count(), code, text, test_lines }, items)
}

/// Whether a file's path says that it is for tests only.
pub fn is_test(place: &str) -> bool {
    let name = place.rsplit('/').next().unwrap_or_default();
    place.split('/').any(|part| part == "tests") || name == "tests.rs" || name.ends_with("_tests.rs")
}

/// Returns the path of a module that `parent` declares, without `.rs` or `/mod.rs`.
fn module_file(parent: &str, module: &str) -> String {
    match parent.rsplit_once('/') {
        Some((directory, "lib.rs" | "main.rs" | "mod.rs")) => format!("{directory}/{module}"),
        _ => format!("{}/{module}", parent.trim_end_matches(".rs")),
    }
}

/// Whether a file is that module or lies inside of it.
fn is_module(place: &str, module: &str) -> bool {
    place.strip_prefix(module).is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(files: &[(&str, &str)]) -> Vec<(String, String)> {
        files.iter().map(|(place, text)| ((*place).to_owned(), (*text).to_owned())).collect()
    }

    #[test]
    fn files_for_tests_are_left_out() {
        let files = files(&[
            ("a/src/lib.rs", "#[cfg(test)]\nmod examples;\nmod b;\n"),
            ("a/src/b.rs", "#[cfg(test)]\nmod common;\n"),
            ("a/src/b/common.rs", ""),
            ("a/src/b/common_more.rs", ""),
            ("a/src/examples.rs", ""),
            ("a/src/examples/more.rs", ""),
            ("a/src/c_tests.rs", ""),
            ("a/src/c/tests.rs", ""),
            ("a/src/d.rs", "#![cfg(test)]\n"),
            ("a/tests/e.rs", ""),
        ]);
        let places: Vec<_> = production_files(&files).iter().map(|file| file.place).collect();
        assert_eq!(places, ["a/src/lib.rs", "a/src/b.rs", "a/src/b/common_more.rs"]);
    }

    #[test]
    fn items_for_tests_are_left_out() {
        let text = "//! A.\nfn f() {}\n\n#[cfg(test)]\nmod tests {\n    fn g() {}\n}\nfn h() {}\n";
        let (file, _) = parse("a/src/b.rs", text);
        assert_eq!(file.lines, 8);
        assert_eq!(file.production().collect::<Vec<_>>(), ["//! A.", "fn f() {}", "", "fn h() {}"]);
        let code = tokens(&file.code);
        let places: Vec<_> = code.iter().filter(|token| token.text == "fn").map(|token| token.line).collect();
        assert_eq!(places, [2, 8]);
        assert!(!file.code.contains('g'));
    }
}
