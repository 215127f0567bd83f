//! Tests that this version has every stable name that the last release had: keys of the configuration, annotations, commands with
//! their options, exit codes, fields of JSON, and metrics. docs/reference/interfaces.txt lists those of the release;
//! docs/contributor/versioning.md says how a release writes it.

use super::checkpoint::CheckpointView;
use super::exit::ExitStatus;
use super::finding::CheckReport;
use super::help::{command, tests as commands};
use super::image::views::{ImageView, LoadedView, PulledView, VerificationView};
use super::machines::views::{ExportView, ImportView, SnapshotView, VmView, VolumeView};
use super::templates::{TemplateKeys, TemplateList};
use crate::config::tests::all_keys;
use crate::metrics::family::FAMILIES;
use clap::{Arg, Command};
use nacelle_vmi::annotations;
use schemars::{Schema, schema_for};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

const RELEASED: &str = include_str!("../../../../docs/reference/interfaces.txt");
const COMMANDS_PAGE: &str = include_str!("../../../../docs/reference/cli.md");

/// The environment variable with the path where `the_names_of_the_last_release_exist` writes the names of now.
const WRITE_TO: &str = "NACELLE_WRITE_INTERFACES";

/// The JSON of each command that has any, by the command's words.
fn results() -> BTreeMap<&'static str, Schema> {
    BTreeMap::from([
        ("check", schema_for!(CheckReport)),
        ("check --overhead", schema_for!(super::overhead::OverheadReport)),
        ("checkpoint create", schema_for!(CheckpointView)),
        ("checkpoint ls", schema_for!(Vec<CheckpointView>)),
        ("config check", schema_for!(super::config::ConfigReport)),
        ("image load", schema_for!(Vec<LoadedView>)),
        ("image ls", schema_for!(Vec<ImageView>)),
        ("image pull", schema_for!(PulledView)),
        ("image verify", schema_for!(VerificationView)),
        ("log", schema_for!(super::log::LogFilterView)),
        ("pods", schema_for!(super::pods::PodList)),
        ("pods --timeline", schema_for!(super::timeline::PodTimeline)),
        ("store export", schema_for!(super::store::StoreCountsView)),
        ("store import", schema_for!(super::store::StoreCountsView)),
        ("templates build", schema_for!(TemplateKeys)),
        ("templates ls", schema_for!(TemplateList)),
        ("templates rm", schema_for!(TemplateKeys)),
        ("top", schema_for!(super::top::TopView)),
        ("version", schema_for!(super::version::VersionView)),
        ("vm describe", schema_for!(VmView)),
        ("vm export", schema_for!(ExportView)),
        ("vm import", schema_for!(ImportView)),
        ("vm ls", schema_for!(Vec<VmView>)),
        ("vm snapshots", schema_for!(Vec<SnapshotView>)),
        ("vm validate", schema_for!(Vec<super::vm::DocumentReport>)),
        ("vm volumes", schema_for!(Vec<VolumeView>)),
        ("vm watch", schema_for!(VmView)),
    ])
}

/// Adds the paths of the fields of a schema, as `pods[].usage.cpuSeconds`.
fn add_fields(schema: &Value, root: &Value, path: &str, into: &mut BTreeSet<String>) {
    if let Some(name) = schema["$ref"].as_str() {
        let definition = root.pointer(name.trim_start_matches('#')).expect("the reference exists");
        return add_fields(definition, root, path, into);
    }
    for choice in ["anyOf", "oneOf", "allOf"] {
        for schema in schema[choice].as_array().into_iter().flatten() {
            add_fields(schema, root, path, into);
        }
    }
    for value in schema["enum"].as_array().into_iter().flatten().chain(schema.get("const")).filter_map(Value::as_str) {
        into.insert(format!("{path}={value}"));
    }
    if schema["items"].is_object() {
        add_fields(&schema["items"], root, &format!("{path}[]"), into);
    }
    for (name, schema) in schema["properties"].as_object().into_iter().flatten() {
        let path = format!("{path}.{name}");
        into.insert(path.clone());
        add_fields(schema, root, &path, into);
    }
}

fn fields(schema: &Schema) -> BTreeSet<String> {
    let mut fields = BTreeSet::new();
    add_fields(schema.as_value(), schema.as_value(), "", &mut fields);
    fields
}

/// The names of now, as lines of the list.
#[derive(Default)]
struct StableNames {
    /// What the next release lists.
    listed: BTreeSet<String>,
    /// Earlier names, which are still accepted.
    earlier: BTreeSet<String>,
}

impl StableNames {
    fn of_this_version() -> StableNames {
        let mut names = StableNames::default();
        names.listed.extend(all_keys().into_iter().map(|key| format!("config {key}")));
        names.earlier.extend(crate::config::old_keys().map(|key| format!("config {key}")));
        names
            .listed
            .extend(annotations::ALL.iter().map(|(name, _)| format!("annotation {}{name}", annotations::PREFIX)));
        names.listed.extend(ExitStatus::ALL.iter().map(|(status, _)| format!("exit-code {}", status.code())));
        names.listed.extend(FAMILIES.iter().flat_map(|family| {
            let labels = family.labels.iter().map(|label| format!("metric {} {label}", family.name));
            labels.chain([format!("metric {}", family.name)])
        }));
        for (words, schema) in results() {
            names.listed.extend(fields(&schema).into_iter().map(|field| format!("json {words} {field}")));
        }
        names.add_commands(&command(), "command nacelle");
        names
    }

    fn add_commands(&mut self, command: &Command, words: &str) {
        self.listed.insert(words.to_owned());
        for option in command.get_arguments().filter(|option| !option.is_hide_set()) {
            let long = option.get_long().map(|name| format!("--{name}"));
            let short = option.get_short().map(|name| format!("-{name}"));
            self.listed.extend(long.into_iter().chain(short).map(|name| format!("{words} {name}")));
            let aliases = Arg::get_all_aliases(option).unwrap_or_default();
            self.earlier.extend(aliases.into_iter().map(|name| format!("{words} --{name}")));
        }
        for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
            self.add_commands(inner, &format!("{words} {}", inner.get_name()));
            self.earlier.extend(inner.get_all_aliases().map(|name| format!("{words} {name}")));
        }
    }

    fn has(&self, line: &str) -> bool {
        self.listed.contains(line) || self.earlier.contains(line)
    }
}

fn released() -> impl Iterator<Item = &'static str> {
    RELEASED.lines().filter(|line| !line.is_empty() && !line.starts_with('#'))
}

#[test]
fn the_names_of_the_last_release_exist() {
    let names = StableNames::of_this_version();
    if let Some(path) = std::env::var_os(WRITE_TO) {
        let head =
            format!("# The stable names of Nacelle {}: docs/contributor/versioning.md.\n", env!("CARGO_PKG_VERSION"));
        let lines: String = names.listed.iter().map(|line| format!("{line}\n")).collect();
        std::fs::write(path, head + &lines).expect("the list can be written");
    }
    assert!(released().count() > 500, "the list is cut off");
    let missing: Vec<&str> = released().filter(|line| !names.has(line)).collect();
    assert!(missing.is_empty(), "these were stable in the last release (docs/contributor/versioning.md): {missing:#?}");
}

#[test]
fn every_command_that_prints_data_is_in_the_list() {
    let results = results();
    // `vm watch` has no other format than JSON.
    let chooses_format = |words: &&str| !words.contains("--") && *words != "vm watch";
    let mut without: BTreeSet<&str> = results.keys().copied().filter(chooses_format).collect();
    commands::walk(&command(), "", &mut |words, command| {
        if commands::prints_data(words, command) {
            assert!(without.remove(words), "results() lacks {words}");
        }
    });
    assert!(without.is_empty(), "these print no data: {without:?}");
}

/// The page lists the fields of each command, and calls them stable.
#[test]
fn the_page_of_commands_names_every_field() {
    for (words, schema) in results() {
        if words == "vm validate" {
            continue; // docs/reference/vm-commands.md has its fields
        }
        let row = COMMANDS_PAGE
            .lines()
            .filter(|line| line.starts_with('|'))
            .find(|line| line.split('|').nth(1).is_some_and(|cell| cell.contains(&format!("`{words}"))))
            .unwrap_or_else(|| panic!("docs/reference/cli.md has no row for {words}"));
        for path in fields(&schema) {
            let name = path.rsplit(['.', '=']).next().unwrap_or_default();
            assert!(row.contains(&format!("`{name}`")) || described_below(name), "{words}: the row lacks {name}");
        }
    }
}

/// `pods` describes this field in the paragraph below the table's section.
fn described_below(name: &str) -> bool {
    name == "otherVersion"
}
