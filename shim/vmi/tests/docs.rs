//! Owns: that docs/vm.md names every annotation, field and refusal as the code has them: the tables below are parts of the page,
//! word for word.

use nacelle_vmi::spec::InstanceSpec;
use nacelle_vmi::{annotations, refused, schema};
use serde_json::Value;
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

fn rows(schema: &Value, at: &str, table: &mut String) {
    for (name, of) in schema["properties"].as_object().into_iter().flatten() {
        let list = of["type"] == "array";
        let of_items = if list { &of["items"] } else { of };
        let at = format!("{at}{}{name}{}", if at.is_empty() { "" } else { "." }, if list { "[]" } else { "" });
        let what = of["description"].as_str().unwrap_or_default().replace('\n', " ");
        let words: Vec<String> =
            of["enum"].as_array().into_iter().flatten().map(|word| format!("`{}`", word.as_str().unwrap())).collect();
        let words = if words.is_empty() { String::new() } else { format!(" One of {}.", words.join(", ")) };
        writeln!(table, "| `{at}` | {what}{words} |").unwrap();
        rows(of_items, &at, table);
    }
}

#[test]
fn every_field_is_there() {
    let mut table = String::from("| field | what it says |\n|---|---|\n");
    rows(&schema::of::<InstanceSpec>(), "", &mut table);
    in_page(&table);
}
