//! Checks the table of attacks in docs/contributor/security.md: each row names tests, and the tests exist.

use crate::Finding;
use std::error::Error;
use std::path::Path;

const PAGE: &str = "docs/contributor/security.md";
const SECTION: &str = "## Attacks";

/// `files` are all Rust files: their places and their texts.
pub fn check(root: &Path, files: &[(String, String)]) -> Result<Vec<Finding>, Box<dyn Error>> {
    let page = std::fs::read_to_string(root.join(PAGE))?;
    Ok(compare(&page, files))
}

fn compare(page: &str, files: &[(String, String)]) -> Vec<Finding> {
    let section =
        page.split_once(SECTION).map(|(_, rest)| rest.split("\n## ").next().unwrap_or(rest)).unwrap_or_default();
    // The line of titles is not an attack.
    let rows: Vec<&str> = section.lines().filter(|line| line.starts_with("| ")).skip(1).collect();
    let finding = |rule: String| Finding { place: PAGE.to_owned(), rule };
    if rows.is_empty() {
        return vec![finding(format!("has no table of attacks below {SECTION:?}"))];
    }
    let mut found = Vec::new();
    for row in rows {
        let cell = row.trim_end_matches([' ', '|']).rsplit('|').next().unwrap_or_default();
        let mut text = None;
        let mut tests = 0;
        for word in cell.split('`').skip(1).step_by(2) {
            if word.ends_with(".rs") {
                text = files.iter().find(|(place, _)| place == word).map(|(_, text)| text);
                if text.is_none() {
                    found.push(finding(format!("names {word}, which does not exist")));
                }
            } else if text.is_some_and(|text| has_test(text, word)) {
                tests += 1;
            } else {
                found.push(finding(format!("names the test {word}, which the file before it does not contain")));
            }
        }
        if tests == 0 {
            found.push(finding(format!("has an attack without a test: {row}")));
        }
    }
    found
}

/// Returns whether a file has a test of this name: a function, or an entry in the list of a program that is its own harness.
fn has_test(text: &str, name: &str) -> bool {
    text.contains(&format!("fn {name}(")) || text.contains(&format!("\"{name}\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_names_a_test_that_exists() {
        let files = [("a.rs".to_owned(), "fn one() {} (\"two\", run)".to_owned())];
        let page = |cell: &str| {
            format!("# P\n\n{SECTION}\n\n| attack | test |\n|---|---|\n| x | {cell} |\n\n## Next\n| y | `no` |\n")
        };
        let broken = |cell: &str| compare(&page(cell), &files).len();
        assert_eq!(broken("`a.rs` `one`, `two`"), 0);
        assert_eq!(broken("`a.rs` `three`"), 2);
        assert_eq!(broken("`b.rs` `one`"), 3);
        assert_eq!(broken("`a.rs`"), 1);
        assert_eq!(broken("none"), 1);
        assert_eq!(broken("`a.rs` `on`"), 2);
        assert_eq!(compare("# P\n", &files).len(), 1);
    }
}
