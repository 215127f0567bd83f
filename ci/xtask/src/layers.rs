//! Checks that the dependencies between the crates are those of `ci/layers.toml`, and that libraries have typed errors.

use crate::Finding;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::Path;
use std::process::Command;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rules {
    layers: BTreeMap<String, BTreeSet<String>>,
    no_anyhow: NoAnyhow,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NoAnyhow {
    crates: BTreeSet<String>,
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    kind: Option<String>,
}

fn ours(name: &str) -> Option<&str> {
    if name == "xtask" { Some(name) } else { name.strip_prefix("nacelle-") }
}

pub fn check(root: &Path) -> Result<Vec<Finding>, Box<dyn Error>> {
    let rules: Rules = toml::from_str(&std::fs::read_to_string(root.join("ci/layers.toml"))?)?;
    let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["metadata", "--no-deps", "--format-version=1", "--offline"])
        .current_dir(root)
        .output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into());
    }
    let metadata: Metadata = serde_json::from_slice(&output.stdout)?;
    Ok(compare(&rules, &metadata))
}

fn compare(rules: &Rules, metadata: &Metadata) -> Vec<Finding> {
    let mut found = Vec::new();
    for package in &metadata.packages {
        let Some(name) = ours(&package.name) else {
            found.push(finding(&package.name, "is not named nacelle-*"));
            continue;
        };
        let Some(allowed) = rules.layers.get(name) else {
            found.push(finding(name, "has no entry in ci/layers.toml"));
            continue;
        };
        let used: BTreeSet<_> = package
            .dependencies
            .iter()
            .filter(|dependency| dependency.kind.is_none())
            .filter_map(|dependency| ours(&dependency.name))
            .map(str::to_owned)
            .collect();
        for extra in used.difference(allowed) {
            found.push(finding(name, &format!("uses {extra}, an arrow that ci/layers.toml does not allow")));
        }
        for unused in allowed.difference(&used) {
            found.push(finding(name, &format!("may use {unused} by ci/layers.toml and does not: take the arrow out")));
        }
        for dependency in &package.dependencies {
            if dependency.kind.as_deref() == Some("dev") && dependency.name == "nacelle-daemon" {
                found.push(finding(name, "its tests use the daemon"));
            }
            if dependency.kind.is_none() && dependency.name == "anyhow" && rules.no_anyhow.crates.contains(name) {
                found.push(finding(name, "uses anyhow; its errors must be typed"));
            }
        }
    }
    found
}

fn finding(place: &str, rule: &str) -> Finding {
    Finding { place: place.to_owned(), rule: rule.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(layers: &str, packages: &str) -> Vec<String> {
        let rules = toml::from_str(&format!("[layers]\n{layers}\n[no_anyhow]\ncrates = [\"a\"]")).unwrap();
        let metadata = serde_json::from_str(&format!("{{\"packages\": [{packages}]}}")).unwrap();
        compare(&rules, &metadata).into_iter().map(|found| format!("{}: {}", found.place, found.rule)).collect()
    }

    #[test]
    fn an_unlisted_arrow_and_an_unused_one_are_found() {
        let a = r#"{"name": "nacelle-a", "dependencies": [{"name": "nacelle-b", "kind": null}]}"#;
        assert_eq!(findings("a = [\"b\"]", a), Vec::<String>::new());
        assert!(findings("a = []", a)[0].contains("uses b"));
        assert!(findings("a = [\"b\", \"c\"]", a)[0].contains("may use c"));
        assert!(findings("b = []", a)[0].contains("no entry"));
    }

    #[test]
    fn anyhow_in_a_library_is_found() {
        let a = r#"{"name": "nacelle-a", "dependencies": [{"name": "anyhow", "kind": null}]}"#;
        assert!(findings("a = []", a)[0].contains("anyhow"));
    }
}
