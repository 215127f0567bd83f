//! Determines which fields of a valid specification this version of Nacelle does not support, for RunPodSandbox, the admission
//! server and `nacelle vm validate` alike.

pub mod container_pod;

use crate::machine_pod;
use nacelle_vmi::admit::Admitted;
use nacelle_vmi::preset::Catalogue;
use nacelle_vmi::spec::SpecKind;
use serde::Serialize;
use std::fmt;

/// A valid setting that nodes of this version reject.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct UnsupportedSetting {
    /// A field with the annotation that sets it, or the value of a field.
    pub what: String,
    /// The reason.
    pub message: String,
}

impl fmt::Display for UnsupportedSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.what, self.message)
    }
}

/// Returns what RunPodSandbox rejects of a valid specification: all unsupported fields, and the first unsupported value. What
/// depends on the runtime handler is not included.
pub fn unsupported_settings(admitted: &Admitted) -> Vec<UnsupportedSetting> {
    let (fields, value, reason): (_, _, fn(&str) -> Option<&'static str>) = match admitted.kind() {
        SpecKind::Machine => (
            machine_pod::unsupported_fields(admitted),
            machine_pod::first_unsupported_value(admitted),
            machine_pod::unsupported_reason,
        ),
        SpecKind::Container => (container_pod::unsupported_fields(admitted), None, container_pod::unsupported_reason),
    };
    let message = || format!("is not run by nodes with Nacelle {}: they refuse the pod", env!("CARGO_PKG_VERSION"));
    let why = |what: &str| reason(what).map(|why| format!("; {why}")).unwrap_or_default();
    let fields = fields.into_iter().map(|what| UnsupportedSetting { message: message() + &why(&what), what });
    let value = value.map(|rejection| {
        let (what, text) = (rejection.field().to_owned(), rejection.to_string());
        UnsupportedSetting { message: text.strip_prefix(&what).unwrap_or(&text).trim_start().to_owned(), what }
    });
    fields.chain(value).collect()
}

/// Returns the names of instance types, preferences and presets that nodes do not know and that no webhook has expanded.
pub fn unknown_presets(admitted: &Admitted) -> Vec<UnsupportedSetting> {
    let nodes = Catalogue::default();
    let applied = admitted.applied();
    let types = applied.instancetype.iter().filter(|name| !nodes.instancetypes.contains_key(*name));
    let types = types.map(|name| format!("instance type {name}"));
    let preferences = applied.preference.iter().filter(|name| !nodes.preferences.contains_key(*name));
    let preferences = preferences.map(|name| format!("preference {name}"));
    let presets = applied.presets.iter().filter(|name| !nodes.presets.contains_key(*name));
    let presets = presets.map(|name| format!("preset {name}"));
    let all = types.chain(preferences).chain(presets);
    all.map(|what| UnsupportedSetting {
        what,
        message: "is not known to nodes: have /mutate asked before, too".to_owned(),
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_vmi::admit;
    use nacelle_vmi::spec::InstanceSpec;
    use serde_json::Value;
    use std::fmt::Write;

    #[test]
    fn all_unsupported_fields_and_the_first_unsupported_value_are_listed() {
        let spec = "{domain: {memory: {guest: 4Gi}, machine: {type: microvm}, devices: {disks: [{name: a}]}, clock: {timezone: Europe/Rome}}, \
                    volumes: [{name: a, emptyDisk: {capacity: 1Gi}}], livenessProbe: {exec: {command: [a]}}}";
        let annotations = [("vm.nacelle.dev/kind", "machine"), ("vm.nacelle.dev/spec", spec)];
        let annotations = annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let admitted = admit::pod(&annotations, &Catalogue::default()).unwrap().unwrap();
        let settings: Vec<String> = unsupported_settings(&admitted).iter().map(ToString::to_string).collect();
        assert!(
            settings[0].starts_with("spec.domain.clock.timezone is not run by nodes with Nacelle "),
            "{settings:?}"
        );
        let last = "spec.domain.machine.type is \"microvm\", which this version of Nacelle does not support: a machine pod's board is q35 or pc, or, with \
                    kernelBoot, microvm";
        assert_eq!(settings.last().unwrap(), last);
        let probes: Vec<_> = settings.iter().filter(|text| text.starts_with("spec.livenessProbe")).collect();
        assert!(probes.len() == 1 && probes[0].ends_with("(nacelle vm convert puts them there)"), "{settings:?}");
        assert!(settings.iter().all(|text| !text.contains("guest ")), "{settings:?}");
    }

    /// The page, and the marks around the table that the test compares with the code.
    const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/vm-fields.md");
    const TABLE_BEGIN: &str = "<!-- begin: written by `cargo xtask docs` -->\n\n";
    const TABLE_END: &str = "\n<!-- end: written by `cargo xtask docs` -->\n";

    /// Adds the rows of a schema; returns the number of leaf fields, and how many of them machine pods and container pods honour.
    fn rows(schema: &Value, at: &str, table: &mut String) -> [usize; 3] {
        let mut all = [0; 3];
        for (name, of) in schema["properties"].as_object().into_iter().flatten() {
            let list = of["type"] == "array";
            let of_items = if list { &of["items"] } else { of };
            let at = format!("{at}{}{name}{}", if at.is_empty() { "" } else { "." }, if list { "[]" } else { "" });
            let what = of["description"].as_str().unwrap_or_default().replace('\n', " ");
            let words: Vec<String> = of["enum"]
                .as_array()
                .into_iter()
                .flatten()
                .map(|word| format!("`{}`", word.as_str().unwrap()))
                .collect();
            let words = if words.is_empty() { String::new() } else { format!(" One of {}.", words.join(", ")) };
            let mut below = String::new();
            let mut counts = rows(of_items, &at, &mut below);
            if counts[0] == 0 {
                let shapes = container_pod::supports_field(&format!("spec.{at}"));
                counts = [1, usize::from(machine_pod::supports_field(&at)), usize::from(shapes)];
            }
            let describe = |supported: usize| match supported {
                0 => "",
                supported if supported == counts[0] => "yes",
                _ => "in part",
            };
            writeln!(table, "| `{at}` | {what}{words} | {} | {} |", describe(counts[1]), describe(counts[2])).unwrap();
            table.push_str(&below);
            for (sum, count) in all.iter_mut().zip(counts) {
                *sum += count;
            }
        }
        all
    }

    #[test]
    fn the_field_reference_matches_the_code() {
        let mut table = String::from("| field | what it says | machine pod | container pod |\n|---|---|---|---|\n");
        let [all, machine, containers] = rows(&nacelle_vmi::schema::of::<InstanceSpec>(), "", &mut table);
        assert!(all > machine && machine > containers && containers > 5, "{all} {machine} {containers}");
        let page = std::fs::read_to_string(PAGE).unwrap();
        let (before, rest) = page.split_once(TABLE_BEGIN).expect("the page has the mark before the table");
        let (written, after) = rest.split_once(TABLE_END).expect("the page has the mark after the table");
        if written == table {
            return;
        }
        assert!(
            std::env::var_os("NACELLE_WRITE_DOCS").is_some(),
            "the table of docs/reference/vm-fields.md differs from the code; `cargo xtask docs` writes it"
        );
        std::fs::write(PAGE, [before, TABLE_BEGIN, &table, TABLE_END, after].concat()).unwrap();
    }
}
