//! Checks that no name and no number of CRI v1 changes by accident.

use prost::Message;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet};
use std::fmt::Write;

/// Returns one fact a line, sorted: `rpc`, `enum` and `field` with everything that is visible on the wire.
fn facts(file: &FileDescriptorProto) -> String {
    let mut lines = Vec::new();
    for service in &file.service {
        for rpc in &service.method {
            let stream = if rpc.server_streaming() { "stream " } else { "" };
            assert!(!rpc.client_streaming());
            let (input, output) = (local(rpc.input_type()), local(rpc.output_type()));
            lines.push(format!("rpc {}.{} ({input}) -> {stream}{output}", service.name(), rpc.name()));
        }
    }
    for one in &file.enum_type {
        enumeration("", one, &mut lines);
    }
    for one in &file.message_type {
        message("", one, &mut lines);
    }
    lines.sort();
    lines.iter().fold(String::new(), |mut text, line| {
        writeln!(text, "{line}").expect("a String takes everything");
        text
    })
}

fn local(name: &str) -> &str {
    name.trim_start_matches(".runtime.v1.")
}

fn enumeration(scope: &str, one: &EnumDescriptorProto, lines: &mut Vec<String>) {
    for value in &one.value {
        lines.push(format!("enum {scope}{} {} {}", one.name(), value.number(), value.name()));
    }
}

fn message(scope: &str, one: &DescriptorProto, lines: &mut Vec<String>) {
    let name = format!("{scope}{}", one.name());
    if one.field.is_empty() {
        lines.push(format!("empty {name}"));
    }
    for field in &one.field {
        lines.push(format!("field {name} {} {} {}", field.number(), kind(one, field), field.name()));
    }
    for inner in one.nested_type.iter().filter(|inner| !is_map_entry(inner)) {
        message(&format!("{name}."), inner, lines);
    }
    for inner in &one.enum_type {
        enumeration(&format!("{name}."), inner, lines);
    }
}

fn is_map_entry(one: &DescriptorProto) -> bool {
    one.options.as_ref().is_some_and(|options| options.map_entry())
}

fn kind(owner: &DescriptorProto, field: &FieldDescriptorProto) -> String {
    let map = owner.nested_type.iter().find(|inner| is_map_entry(inner) && field.type_name().ends_with(inner.name()));
    if let Some(entry) = map {
        return format!("map<{}, {}>", kind(entry, &entry.field[0]), kind(entry, &entry.field[1]));
    }
    let one = match field.r#type() {
        Type::Message | Type::Enum => local(field.type_name()).to_owned(),
        simple => simple.as_str_name().trim_start_matches("TYPE_").to_lowercase(),
    };
    match field.label() {
        Label::Repeated => format!("repeated {one}"),
        _ => one,
    }
}

fn compiled() -> FileDescriptorProto {
    let set = FileDescriptorSet::decode(nacelle_proto::DESCRIPTORS).expect("our own descriptors decode");
    set.file.into_iter().find(|file| file.package() == "runtime.v1").expect("CRI is among them")
}

#[test]
fn every_name_and_number_is_as_written_down() {
    let now = facts(&compiled());
    let held = include_str!("cri-v1.txt");
    let missing: Vec<_> = held.lines().filter(|line| !now.lines().any(|other| other == *line)).collect();
    let added: Vec<_> = now.lines().filter(|line| !held.lines().any(|other| other == *line)).collect();
    assert!(missing.is_empty() && added.is_empty(), "gone from the contract: {missing:#?}\nnew: {added:#?}");
}

#[test]
fn the_interface_has_43_calls() {
    let file = compiled();
    let calls: usize = file.service.iter().map(|service| service.method.len()).sum();
    assert_eq!((file.service.len(), calls), (2, 43));
}

#[test]
fn a_request_has_the_bytes_that_other_clients_send() {
    // field 1, length 2, "id"; field 2, varint 3
    let request = nacelle_proto::cri::StopContainerRequest { container_id: "id".into(), timeout: 3 };
    assert_eq!(request.encode_to_vec(), [0x0a, 2, b'i', b'd', 0x10, 3]);
}
