//! Compiles the contracts to Rust without an installed protoc, and generates the shape of every message: which of its fields
//! allocate, and how much. `src/wire.rs` uses the shapes before it decodes.

use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, FieldDescriptorProto, FileDescriptorSet};
use std::fmt::Write;

/// The package of messages that other packages refer to.
const COMMON: &str = "nacelle.common.v1";

/// The packages and the modules of `src/lib.rs` that include them.
const PACKAGES: [(&str, &str); 6] = [
    ("runtime.v1", "cri"),
    (COMMON, "common"),
    ("nacelle.agent.v1", "agent"),
    ("nacelle.pod.v1", "pod"),
    ("nacelle.node.v1", "node"),
    ("nacelle.vm.v1", "vm"),
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = [
        "cri/v1/api.proto",
        "common/v1/common.proto",
        "agent/v1/agent.proto",
        "pod/v1/pod.proto",
        "node/v1/node.proto",
        "vm/v1/vm.proto",
    ];
    for file in files {
        println!("cargo::rerun-if-changed={file}");
    }
    let descriptors = protox::compile(files, ["."])?;
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), prost::Message::encode_to_vec(&descriptors))?;
    std::fs::write(out.join("shapes.rs"), shapes(&descriptors)?)?;
    // prost generates no types for a package that has a Rust path, so the common package is compiled a second time without one.
    let generator = || tonic_prost_build::configure().codec_path("crate::wire::Codec");
    let common = descriptors.file.iter().filter(|file| file.package() == COMMON).cloned().collect();
    generator().extern_path(format!(".{COMMON}"), "crate::common").compile_fds(descriptors)?;
    generator().compile_fds(FileDescriptorSet { file: common })?;
    Ok(())
}

/// Returns the shapes of all messages as Rust code.
fn shapes(descriptors: &FileDescriptorSet) -> Result<String, Box<dyn std::error::Error>> {
    let mut text = String::new();
    for file in &descriptors.file {
        let module = PACKAGES.iter().find(|(package, _)| *package == file.package());
        let (package, module) = module.ok_or_else(|| format!("package {} has no module", file.package()))?;
        for message in &file.message_type {
            shape(&mut text, &format!(".{package}"), &format!("crate::{module}"), message)?;
        }
    }
    Ok(text)
}

/// Appends the shape of a message and of its nested messages. `scope` is the full name of its parent, `module` the Rust path.
fn shape(text: &mut String, scope: &str, module: &str, message: &DescriptorProto) -> std::fmt::Result {
    let name = format!("{scope}.{}", message.name());
    let path = format!("{module}::{}", upper_camel(message.name()));
    let entry = message.options.as_ref().is_some_and(|options| options.map_entry());
    let size = if entry { "MAP_ENTRY".to_owned() } else { format!("std::mem::size_of::<{path}>()") };
    let mut fields: Vec<&FieldDescriptorProto> = message.field.iter().collect();
    fields.sort_by_key(|field| field.number());
    let fields: Vec<String> =
        fields.iter().map(|field| format!("({}, {})", field.number(), field_kind(field))).collect();
    let own = name.strip_prefix('.').unwrap_or(&name);
    writeln!(
        text,
        "pub static {}: Shape = Shape {{ name: {own:?}, size: {size}, fields: &[{}] }};",
        constant(&name),
        fields.join(", ")
    )?;
    if !entry {
        writeln!(text, "impl Shaped for {path} {{ fn shape() -> &'static Shape {{ &{} }} }}", constant(&name))?;
    }
    let inner = format!("{module}::{}", snake(message.name()));
    message.nested_type.iter().try_for_each(|nested| shape(text, &name, &inner, nested))
}

fn field_kind(field: &FieldDescriptorProto) -> String {
    match field.r#type() {
        Type::Message | Type::Group => format!("Field::Message(&{})", constant(field.type_name())),
        Type::String | Type::Bytes => "Field::Text".to_owned(),
        _ if field.label() == Label::Repeated => "Field::Scalars".to_owned(),
        _ => "Field::Scalar".to_owned(),
    }
}

/// Returns the name of a message's static.
fn constant(name: &str) -> String {
    name.trim_start_matches('.').replace('.', "_").to_ascii_uppercase()
}

/// Splits a name into words as prost does.
fn words(name: &str) -> Vec<String> {
    let characters: Vec<char> = name.chars().collect();
    let (mut words, mut lower) = (vec![String::new()], false);
    for (at, &c) in characters.iter().enumerate() {
        let next_is_lower = characters.get(at + 1).is_some_and(|next| next.is_ascii_lowercase());
        let begins = c == '_' || c.is_ascii_uppercase() && at > 0 && (lower || next_is_lower);
        if begins && words.last().is_some_and(|word| !word.is_empty()) {
            words.push(String::new());
        }
        if c.is_ascii_alphabetic() {
            lower = c.is_ascii_lowercase();
        }
        if let Some(word) = words.last_mut().filter(|_| c != '_') {
            word.push(c.to_ascii_lowercase());
        }
    }
    words
}

fn upper_camel(name: &str) -> String {
    let capital =
        |word: &String| word.chars().take(1).map(|c| c.to_ascii_uppercase()).chain(word.chars().skip(1)).collect();
    words(name).iter().map(capital).collect::<Vec<String>>().concat()
}

fn snake(name: &str) -> String {
    words(name).join("_")
}
