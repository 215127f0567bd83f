//! Checks that the tables of the reference pages follow from the code. `cargo xtask docs` runs these tests with
//! `NACELLE_WRITE_DOCS`: they then write the tables that differ.

use nacelle_vmi::{annotations, refused};
use std::fmt::Write;
use std::path::Path;

const ANNOTATIONS: &str = "docs/reference/vm-annotations.md";
const REFUSED: &str = "docs/reference/vm-refused-fields.md";
const CONVERT: &str = "docs/user/vm/migrating-from-kubevirt.md";

/// Checks the table of a page that has the same two header lines as `table`.
fn check_page(page: &str, table: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(page);
    let text = std::fs::read_to_string(&path).unwrap();
    if text.contains(table) {
        return;
    }
    assert!(
        std::env::var_os("NACELLE_WRITE_DOCS").is_some(),
        "the table of {page} differs from the code; `cargo xtask docs` writes it"
    );
    let (header, _) =
        table.match_indices('\n').nth(1).map(|(end, _)| table.split_at(end + 1)).expect("two header lines");
    let (before, rest) =
        text.split_once(header).unwrap_or_else(|| panic!("{page} has no table with the header {header}"));
    let rows: usize = rest.split_inclusive('\n').take_while(|line| line.starts_with('|')).map(str::len).sum();
    std::fs::write(path, [before, table, &rest[rows..]].concat()).unwrap();
}

#[test]
fn the_annotation_reference_matches_the_code() {
    let mut table = String::from("| annotation | what it says |\n|---|---|\n");
    for (name, what) in annotations::ALL {
        writeln!(table, "| `{name}` | {what} |").unwrap();
    }
    check_page(ANNOTATIONS, &table);
}

#[test]
fn the_refused_fields_page_matches_the_code() {
    let mut table = String::from("| refused | because |\n|---|---|\n");
    for (field, why) in refused::FIELDS {
        writeln!(table, "| `{field}` | {why} |").unwrap();
    }
    for (end, word, why) in refused::WORDS {
        writeln!(table, "| `{word}` of `…{end}` | {why} |").unwrap();
    }
    check_page(REFUSED, &table);
}

#[test]
fn the_conversion_page_matches_the_code() {
    let mut table = String::from("| refused | because |\n|---|---|\n");
    for (kind, why) in refused::KINDS {
        writeln!(table, "| `kind: {kind}` | {why} |").unwrap();
    }
    for (key, why) in refused::ANNOTATIONS {
        writeln!(table, "| annotation `{key}` | {why} |").unwrap();
    }
    check_page(CONVERT, &table);
}
