//! Checks that the reference pages list every annotation and every rejected field as in the code: the tables that these tests
//! print are parts of the pages, word for word.

use nacelle_vmi::{annotations, refused};
use std::fmt::Write;

/// The path of a page and its text.
type Page = (&'static str, &'static str);

const ANNOTATIONS: Page =
    ("docs/reference/vm-annotations.md", include_str!("../../../docs/reference/vm-annotations.md"));
const REFUSED: Page =
    ("docs/reference/vm-refused-fields.md", include_str!("../../../docs/reference/vm-refused-fields.md"));
const CONVERT: Page =
    ("docs/user/vm/migrating-from-kubevirt.md", include_str!("../../../docs/user/vm/migrating-from-kubevirt.md"));

fn assert_page_contains((path, text): Page, table: &str) {
    assert!(text.contains(table), "{path} should have\n{table}");
}

#[test]
fn every_annotation_is_there() {
    let mut table = String::from("| annotation | what it says |\n|---|---|\n");
    for (name, what) in annotations::ALL {
        writeln!(table, "| `{name}` | {what} |").unwrap();
    }
    assert_page_contains(ANNOTATIONS, &table);
}

#[test]
fn every_refusal_is_there() {
    let mut table = String::from("| refused | because |\n|---|---|\n");
    for (field, why) in refused::FIELDS {
        writeln!(table, "| `{field}` | {why} |").unwrap();
    }
    for (end, word, why) in refused::WORDS {
        writeln!(table, "| `{word}` of `…{end}` | {why} |").unwrap();
    }
    assert_page_contains(REFUSED, &table);
}

#[test]
fn every_refused_kind_and_annotation_is_there() {
    let mut table = String::from("| refused | because |\n|---|---|\n");
    for (kind, why) in refused::KINDS {
        writeln!(table, "| `kind: {kind}` | {why} |").unwrap();
    }
    for (key, why) in refused::ANNOTATIONS {
        writeln!(table, "| annotation `{key}` | {why} |").unwrap();
    }
    assert_page_contains(CONVERT, &table);
}
