//! Writes the software bill of materials of the package (`cargo xtask sbom`): the crates that are linked into the programs, and the
//! guest kernel's source, as CycloneDX 1.6 (<https://cyclonedx.org/docs/1.6/json/>). The same tree gives the same bytes.

use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::Path;
use std::process::{Command, ExitCode};

/// The packages whose programs are installed.
const PROGRAMS: [&str; 2] = ["nacelle-agent", "nacelle-daemon"];
const PLATFORM: &str = "x86_64-unknown-linux-gnu";

/// Prints the bill of materials.
pub fn print(root: &Path) -> ExitCode {
    match bill(root) {
        Ok(bill) => {
            println!("{bill:#}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: cannot write the bill of materials: {error}");
            ExitCode::FAILURE
        }
    }
}

fn bill(root: &Path) -> Result<Value, Box<dyn Error>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut metadata = Command::new(cargo);
    metadata.args(["metadata", "--locked", "--offline", "--format-version", "1", "--filter-platform", PLATFORM]);
    let output = metadata.current_dir(root).output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into());
    }
    let metadata = serde_json::from_slice(&output.stdout)?;
    let lock = toml::from_str(&std::fs::read_to_string(root.join("Cargo.lock"))?)?;
    describe(&metadata, &lock, &std::fs::read_to_string(root.join("guest/versions.lock"))?)
}

/// Describes what `cargo metadata`, `Cargo.lock` and the list of the guest's sources have.
fn describe(metadata: &Value, lock: &toml::Table, guest: &str) -> Result<Value, Box<dyn Error>> {
    let linked = linked_packages(metadata)?;
    let packages = metadata["packages"].as_array().ok_or("cargo metadata lists no packages")?;
    let ids: BTreeMap<_, _> = packages.iter().filter_map(|package| Some((package["id"].as_str()?, package))).collect();
    let checksums = checksums(lock);
    let mut components = BTreeMap::new();
    for id in &linked {
        let package = ids.get(id.as_str()).ok_or_else(|| format!("cargo metadata does not describe {id}"))?;
        let (name, version) = (text(package, "name")?, text(package, "version")?);
        if package["source"].is_null() {
            continue;
        }
        let purl = format!("pkg:cargo/{name}@{version}");
        let mut component = json!({"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl});
        if let Some(license) = package["license"].as_str() {
            // Cargo still accepts the slash of earlier years.
            component["licenses"] = json!([{"expression": license.replace(" / ", " OR ").replace('/', " OR ")}]);
        }
        let checksum = checksums.get(&(name.to_owned(), version.to_owned()));
        let checksum = checksum.ok_or_else(|| format!("Cargo.lock has no checksum of {name} {version}"))?;
        component["hashes"] = json!([{"alg": "SHA-256", "content": checksum}]);
        components.insert(purl, component);
    }
    for line in guest.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [name, version, checksum] = fields[..] else {
            return Err(format!("guest/versions.lock has an invalid line: {line}").into());
        };
        let purl = format!("pkg:deb/debian/{name}@{version}?arch=source");
        let component = json!({
            "type": "operating-system", "bom-ref": purl, "name": name, "version": version, "purl": purl,
            "licenses": [{"expression": "GPL-2.0-only WITH Linux-syscall-note"}],
            "hashes": [{"alg": "SHA-256", "content": checksum}],
        });
        components.insert(purl, component);
    }
    let daemon =
        packages.iter().find(|package| package["name"] == "nacelle-daemon").ok_or("no package nacelle-daemon")?;
    let version = text(daemon, "version")?;
    let references: Vec<_> = components.keys().cloned().collect();
    let components: Vec<_> = components.into_values().collect();
    let nacelle = format!("nacelle@{version}");
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "application", "bom-ref": nacelle, "name": "nacelle", "version": version}},
        "components": components,
        "dependencies": [{"ref": nacelle, "dependsOn": references}],
    }))
}

/// Returns the ids of the packages that are linked into the programs, themselves included.
fn linked_packages(metadata: &Value) -> Result<BTreeSet<String>, Box<dyn Error>> {
    let nodes = metadata["resolve"]["nodes"].as_array().ok_or("cargo metadata has no dependencies")?;
    let dependencies: BTreeMap<&str, &Value> =
        nodes.iter().filter_map(|node| Some((node["id"].as_str()?, &node["deps"]))).collect();
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let programs = packages.filter(|package| PROGRAMS.iter().any(|name| package["name"] == *name));
    let mut open: Vec<&str> = programs.filter_map(|package| package["id"].as_str()).collect();
    let is_macro = |package: &&Value| {
        let targets = package["targets"].as_array().into_iter().flatten();
        targets.flat_map(|target| target["kind"].as_array().into_iter().flatten()).any(|kind| kind == "proc-macro")
    };
    // Macros run while the programs are built, and with them all that only they need.
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let macros: BTreeSet<&str> = packages.filter(is_macro).filter_map(|package| package["id"].as_str()).collect();
    let mut linked = BTreeSet::new();
    while let Some(id) = open.pop() {
        if macros.contains(id) || !linked.insert(id.to_owned()) {
            continue;
        }
        for dependency in dependencies.get(id).and_then(|deps| deps.as_array()).into_iter().flatten() {
            let kinds = dependency["dep_kinds"].as_array().into_iter().flatten();
            // A dependency without a kind is neither one of tests nor of build scripts.
            if kinds.into_iter().any(|kind| kind["kind"].is_null()) {
                open.extend(dependency["pkg"].as_str());
            }
        }
    }
    Ok(linked)
}

/// Returns the checksums of crates by name and version.
fn checksums(lock: &toml::Table) -> BTreeMap<(String, String), String> {
    let packages = lock.get("package").and_then(toml::Value::as_array).into_iter().flatten();
    let entries = packages.filter_map(|package| {
        let field = |name: &str| Some(package.get(name)?.as_str()?.to_owned());
        Some(((field("name")?, field("version")?), field("checksum")?))
    });
    entries.collect()
}

fn text<'a>(package: &'a Value, field: &str) -> Result<&'a str, Box<dyn Error>> {
    package[field].as_str().ok_or_else(|| format!("a package has no {field}").into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bill_has_what_is_linked_with_licence_and_checksum() {
        let package = |id: &str, source: Value, license: Value| json!({"id": id, "name": id, "version": "1.0.0", "source": source, "license": license});
        let registry = || json!("registry");
        let metadata = json!({
            "packages": [
                package("nacelle-daemon", Value::Null, json!("Apache-2.0")),
                package("nacelle-agent", Value::Null, json!("Apache-2.0")),
                package("linked", registry(), json!("MIT/Apache-2.0")),
                package("below", registry(), Value::Null),
                package("of-tests", registry(), json!("MIT")),
                json!({"id": "derive", "name": "derive", "version": "1.0.0", "source": "registry", "targets": [{"kind": ["proc-macro"]}]}),
            ],
            "resolve": {"nodes": [
                {"id": "nacelle-daemon", "deps": [
                    {"pkg": "linked", "dep_kinds": [{"kind": null}]},
                    {"pkg": "derive", "dep_kinds": [{"kind": null}]},
                    {"pkg": "of-tests", "dep_kinds": [{"kind": "dev"}, {"kind": "build"}]},
                ]},
                {"id": "nacelle-agent", "deps": []},
                {"id": "linked", "deps": [{"pkg": "below", "dep_kinds": [{"kind": "dev"}, {"kind": null}]}]},
                {"id": "below", "deps": []},
                {"id": "of-tests", "deps": []},
            ]},
        });
        let crates = ["linked", "below"]
            .map(|name| format!("[[package]]\nname = \"{name}\"\nversion = \"1.0.0\"\nchecksum = \"sum of {name}\"\n"));
        let lock = toml::from_str(&crates.concat()).expect("TOML");
        let bill = describe(&metadata, &lock, "# a comment\nlinux-source-6 6.1-1 abc\n").expect("a bill");
        let rows: Vec<_> = bill["components"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|component| {
                let license = component["licenses"][0]["expression"].as_str().unwrap_or("-");
                format!(
                    "{} {license} {}",
                    component["purl"].as_str().expect("a purl"),
                    component["hashes"][0]["content"]
                )
            })
            .collect();
        assert_eq!(
            rows,
            [
                "pkg:cargo/below@1.0.0 - \"sum of below\"",
                "pkg:cargo/linked@1.0.0 MIT OR Apache-2.0 \"sum of linked\"",
                "pkg:deb/debian/linux-source-6@6.1-1?arch=source GPL-2.0-only WITH Linux-syscall-note \"abc\"",
            ]
        );
        assert_eq!(bill["metadata"]["component"]["version"], "1.0.0");
        let lock = toml::from_str("").expect("TOML");
        assert!(describe(&metadata, &lock, "").expect_err("no checksum").to_string().contains("no checksum of"));
    }
}
