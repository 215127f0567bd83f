//! Owns: that docs/vm.md names every annotation and refusal as the code has them: the tables below are parts of the page,
//! word for word.

use nacelle_vmi::{annotations, refused};
use std::fmt::Write;

const PAGE: &str = include_str!("../../../docs/vm.md");

fn in_page(table: &str) {
    assert!(PAGE.contains(table), "docs/vm.md should have\n{table}");
}

#[test]
fn every_annotation_is_there() {
    let mut table = String::from("| annotation | what it says |\n|---|---|\n");
    for (name, what) in annotations::ALL {
        writeln!(table, "| `{name}` | {what} |").unwrap();
    }
    in_page(&table);
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
    in_page(&table);
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
    in_page(&table);
}
