//! Tests that docs/reference/cri-coverage.md lists exactly the RPCs of CRI and the fields of their requests, and that RPCs that
//! are "not yet" return that error.

use prost::Message;
use prost_types::field_descriptor_proto::Type;
use prost_types::{DescriptorProto, FileDescriptorProto, FileDescriptorSet};
use std::collections::{BTreeMap, BTreeSet};

const PAGE: &str = include_str!("../../../docs/reference/cri-coverage.md");

fn cri() -> FileDescriptorProto {
    let set = FileDescriptorSet::decode(nacelle_proto::DESCRIPTORS).unwrap();
    set.file.into_iter().find(|file| file.package() == "runtime.v1").unwrap()
}

/// Returns the rows of a table whose first cell has this form.
fn rows(is_field: bool) -> BTreeMap<String, String> {
    let rows = PAGE.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` | "));
    let rows = rows.filter(|(name, _)| name.contains('.') == is_field);
    let mut table = BTreeMap::new();
    for (name, rest) in rows {
        let verdict = rest.split(" |").next().unwrap().to_owned();
        assert!(table.insert(name.to_owned(), verdict).is_none(), "{name} stands twice");
    }
    table
}

/// Collects every field that is reachable from a message.
fn fields(
    messages: &BTreeMap<String, DescriptorProto>,
    from: &str,
    into: &mut BTreeSet<String>,
    seen: &mut BTreeSet<String>,
) {
    let Some(message) = messages.get(from) else { return };
    if !seen.insert(from.to_owned()) {
        return;
    }
    let is_map = message.options.as_ref().is_some_and(|options| options.map_entry());
    for field in &message.field {
        if !is_map {
            into.insert(format!("{}.{}", message.name(), field.name()));
        }
        if field.r#type() == Type::Message {
            fields(messages, field.type_name(), into, seen);
        }
    }
}

#[test]
fn the_page_names_every_field_of_every_request_and_no_other() {
    let file = cri();
    let mut messages = BTreeMap::new();
    for message in &file.message_type {
        let name = format!(".runtime.v1.{}", message.name());
        for nested in &message.nested_type {
            messages.insert(format!("{name}.{}", nested.name()), nested.clone());
        }
        messages.insert(name, message.clone());
    }
    let mut all = BTreeSet::new();
    let mut seen = BTreeSet::new();
    for method in file.service.iter().flat_map(|service| &service.method) {
        fields(&messages, method.input_type(), &mut all, &mut seen);
    }
    let page = rows(true);
    let named: BTreeSet<String> = page.keys().cloned().collect();
    assert_eq!(all, named);
    for (field, verdict) in &page {
        assert!(["honoured", "refused", "not yet", "not applicable"].contains(&verdict.as_str()), "{field}: {verdict}");
    }
}

#[test]
fn the_page_names_every_rpc_and_whether_it_works() {
    let file = cri();
    let methods = file.service.iter().flat_map(|service| &service.method);
    let all: BTreeSet<String> = methods.map(|method| method.name().to_owned()).collect();
    assert_eq!(all.len(), 43);
    let page = rows(false);
    assert_eq!(all, page.keys().cloned().collect());
    // The server rejects RPCs by `not_yet("Name")` only.
    let server = include_str!("../src/cri/mod.rs");
    for (rpc, verdict) in page {
        let refused = server.contains(&format!("not_yet(\"{rpc}\")"));
        assert_eq!(verdict, if refused { "not yet" } else { "works" }, "{rpc}");
    }
}
