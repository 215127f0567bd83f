//! Reads specifications of the Container Device Interface, versions 0.3.0 to 1.1.0: finds a device by its name in directories of
//! the node, and returns the edits for a container that requests it. `find` blocks on files that other programs have written.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use nacelle_base::json;
use nacelle_base::{Classify, FailureKind};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The largest file in bytes.
const MAX_FILE: u64 = 1 << 20;
/// The largest number of files that are read from one directory.
const MAX_FILES: usize = 256;
/// The largest number of names that one container may request.
pub const MAX_NAMES: usize = 64;

/// Why a CDI device is not available.
#[derive(Debug, thiserror::Error)]
pub enum CdiError {
    #[error("{name:?} is not a CDI device name: VENDOR/CLASS=NAME is expected")]
    Name { name: String },
    #[error("{count} CDI devices are too many for one container")]
    TooMany { count: usize },
    #[error("no CDI specification has the device {name}: searched {}{}", directories(looked), skipped(skipped_files))]
    Unknown { name: String, looked: Vec<PathBuf>, skipped_files: Vec<String> },
    #[error("the CDI device {name} is in both {} and {}", one.display(), other.display())]
    Ambiguous { name: String, one: PathBuf, other: PathBuf },
    #[error("the CDI device {name} of {} requests {what}, which Nacelle does not support", path.display())]
    Unsupported { name: String, path: PathBuf, what: String },
    #[error("the CDI device {name} of {}: {rule}", path.display())]
    Rule { name: String, path: PathBuf, rule: String },
}

impl Classify for CdiError {
    fn kind(&self) -> FailureKind {
        match self {
            CdiError::Unsupported { .. } => FailureKind::Unsupported,
            _ => FailureKind::Invalid,
        }
    }
}

fn directories(list: &[PathBuf]) -> String {
    list.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

fn skipped(skipped_files: &[String]) -> String {
    if skipped_files.is_empty() { String::new() } else { format!(" ({})", skipped_files.join("; ")) }
}

/// The changes that CDI devices make to a container.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct CdiEdits {
    /// Environment variables: names and values.
    pub env: Vec<(String, String)>,
    /// Host path, container path and permissions of each device.
    pub devices: Vec<(String, String, String)>,
    /// Directories and files of the node.
    pub mounts: Vec<CdiMount>,
    /// Additional groups of the container's processes.
    pub groups: Vec<u32>,
}

/// A directory or file of the node that is mounted.
#[derive(Debug, PartialEq, Eq)]
pub struct CdiMount {
    /// The path on the node.
    pub host_path: String,
    /// The path in the container.
    pub container_path: String,
    /// Mount options: "ro", "nosuid" and others.
    pub options: Vec<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct CdiSpec {
    kind: String,
    #[serde(default)]
    devices: Vec<CdiDevice>,
    #[serde(default)]
    container_edits: ContainerEdits,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct CdiDevice {
    name: String,
    #[serde(default)]
    container_edits: ContainerEdits,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct ContainerEdits {
    env: Vec<String>,
    device_nodes: Vec<CdiDeviceNode>,
    mounts: Vec<SpecMount>,
    #[serde(rename = "additionalGids")]
    additional_gids: Vec<u32>,
    /// Unknown fields, which are rejected: no edit is ignored silently.
    #[serde(flatten)]
    others: serde_json::Map<String, Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct CdiDeviceNode {
    path: String,
    #[serde(default)]
    host_path: String,
    #[serde(default)]
    permissions: String,
    file_mode: Option<Value>,
    uid: Option<Value>,
    gid: Option<Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SpecMount {
    host_path: String,
    container_path: String,
    #[serde(default)]
    options: Vec<String>,
    #[serde(default, rename = "type")]
    kind: String,
}

/// Returns the edits for a container that requests these devices. Later directories take precedence.
pub fn find_edits(names: &[String], directories: &[PathBuf]) -> Result<CdiEdits, CdiError> {
    if names.len() > MAX_NAMES {
        return Err(CdiError::TooMany { count: names.len() });
    }
    let mut skipped_files = Vec::new();
    let specs: Vec<_> = directories.iter().rev().map(|directory| read_specs(directory, &mut skipped_files)).collect();
    merge_edits(names, &specs, || (directories.to_vec(), skipped_files))
}

/// Returns the edits of these devices. `specs` are the specifications of each directory, `searched` the directories and the files that
/// were skipped.
fn merge_edits(
    names: &[String],
    specs: &[Vec<(PathBuf, CdiSpec)>],
    searched: impl FnOnce() -> (Vec<PathBuf>, Vec<String>),
) -> Result<CdiEdits, CdiError> {
    let mut edits = CdiEdits::default();
    let mut used = BTreeSet::new();
    for name in names {
        let (kind, device) = split_name(name)?;
        let found = specs.iter().find_map(|specs| find_device(specs, name, kind, device).transpose()).transpose()?;
        let Some((path, spec, device)) = found else {
            let (looked, skipped_files) = searched();
            return Err(CdiError::Unknown { name: name.clone(), looked, skipped_files });
        };
        if used.insert((path.clone(), None)) {
            apply_edits(&mut edits, &spec.container_edits, name, path)?;
        }
        if used.insert((path.clone(), Some(device.name.clone()))) {
            apply_edits(&mut edits, &device.container_edits, name, path)?;
        }
    }
    Ok(edits)
}

/// Returns the only device of this name in a directory.
fn find_device<'a>(
    specs: &'a [(PathBuf, CdiSpec)],
    name: &str,
    kind: &str,
    device: &str,
) -> Result<Option<(&'a PathBuf, &'a CdiSpec, &'a CdiDevice)>, CdiError> {
    let of_kind = specs.iter().filter(|(_, spec)| spec.kind == kind);
    let mut found = of_kind.flat_map(|(path, spec)| spec.devices.iter().map(move |device| (path, spec, device)));
    let mut found = found.by_ref().filter(|(_, _, found)| found.name == device);
    match (found.next(), found.next()) {
        (Some((one, ..)), Some((other, ..))) => {
            Err(CdiError::Ambiguous { name: name.to_owned(), one: one.clone(), other: other.clone() })
        }
        (first, _) => Ok(first),
    }
}

/// Splits a device's name into kind and name.
fn split_name(name: &str) -> Result<(&str, &str), CdiError> {
    let word = |text: &str, further: &str| {
        let known = |c: char| c.is_ascii_alphanumeric() || further.contains(c);
        let ends = text.starts_with(|c: char| c.is_ascii_alphanumeric())
            && text.ends_with(|c: char| c.is_ascii_alphanumeric());
        ends && text.len() <= 253 && text.chars().all(known)
    };
    let split = || {
        let (kind, device) = name.split_once('=')?;
        let (vendor, class) = kind.split_once('/')?;
        (word(vendor, "_-.") && word(class, "_-.") && word(device, "_-.:")).then_some((kind, device))
    };
    split().ok_or_else(|| CdiError::Name { name: name.chars().take(200).collect() })
}

/// Returns the specifications in a directory, sorted by file name. Invalid files are skipped and added to `skipped_files`.
fn read_specs(directory: &Path, skipped_files: &mut Vec<String>) -> Vec<(PathBuf, CdiSpec)> {
    let mut paths: Vec<PathBuf> =
        fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.sort();
    let mut specs = Vec::new();
    for path in paths {
        let why = match path.extension().and_then(|extension| extension.to_str()) {
            Some("json") if specs.len() < MAX_FILES => match read_spec(&path) {
                Ok(spec) => {
                    specs.push((path, spec));
                    continue;
                }
                Err(error) => error.to_string(),
            },
            Some("json") => format!("more than {MAX_FILES} files"),
            Some("yaml" | "yml") => "YAML is not read, only JSON".to_owned(),
            _ => continue,
        };
        if skipped_files.len() < 8 {
            skipped_files.push(format!("skipped {}: {why}", path.display()));
        }
    }
    specs
}

fn read_spec(path: &Path) -> io::Result<CdiSpec> {
    // Opening a pipe would block without this flag.
    let file = File::options().read(true).custom_flags(nix::fcntl::OFlag::O_NONBLOCK.bits()).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    let mut text = Vec::new();
    file.take(MAX_FILE + 1).read_to_end(&mut text)?;
    if u64::try_from(text.len()).unwrap_or(u64::MAX) > MAX_FILE {
        return Err(io::Error::other(format!("more than {MAX_FILE} bytes")));
    }
    Ok(json::read(&text)?)
}

fn apply_edits(edits: &mut CdiEdits, requested: &ContainerEdits, name: &str, path: &Path) -> Result<(), CdiError> {
    let empty = |value: &Value| value.is_null() || value.as_array().is_some_and(Vec::is_empty);
    if let Some((what, _)) = requested.others.iter().find(|(_, value)| !empty(value)) {
        let what = what.chars().take(100).collect();
        return Err(CdiError::Unsupported { name: name.to_owned(), path: path.to_owned(), what });
    }
    let rule = |rule: String| CdiError::Rule { name: name.to_owned(), path: path.to_owned(), rule };
    for line in &requested.env {
        let (key, value) = line.split_once('=').ok_or_else(|| rule(format!("{line:?} is not NAME=VALUE")))?;
        edits.env.push((key.to_owned(), value.to_owned()));
    }
    for node in &requested.device_nodes {
        // Type and numbers come from the node's device, and so do these fields.
        for (field, value) in [("fileMode", &node.file_mode), ("uid", &node.uid), ("gid", &node.gid)] {
            if value.as_ref().is_some_and(|value| !empty(value)) {
                let what = format!("deviceNodes.{field}");
                return Err(CdiError::Unsupported { name: name.to_owned(), path: path.to_owned(), what });
            }
        }
        let host_path = if node.host_path.is_empty() { &node.path } else { &node.host_path };
        let permissions = if node.permissions.is_empty() { "rwm" } else { &node.permissions };
        edits.devices.push((host_path.clone(), node.path.clone(), permissions.to_owned()));
    }
    for mount in &requested.mounts {
        if !matches!(mount.kind.as_str(), "" | "bind" | "none") {
            let what = format!("a mount of type {}", mount.kind.chars().take(40).collect::<String>());
            return Err(CdiError::Unsupported { name: name.to_owned(), path: path.to_owned(), what });
        }
        // Options that every volume has.
        let usual = ["bind", "rbind", "private", "rprivate", "rw"];
        edits.mounts.push(CdiMount {
            host_path: mount.host_path.clone(),
            container_path: mount.container_path.clone(),
            options: mount.options.iter().filter(|option| !usual.contains(&option.as_str())).cloned().collect(),
        });
    }
    edits.groups.extend(&requested.additional_gids);
    Ok(())
}

/// Reads the bytes as a specification, and returns the edits of at most [`MAX_NAMES`] of its devices. For the fuzz harness.
#[cfg(any(test, feature = "fuzz"))]
pub(crate) fn find_edits_in(bytes: &[u8]) -> io::Result<Result<CdiEdits, CdiError>> {
    let spec: CdiSpec = json::read(bytes)?;
    let devices = spec.devices.iter().take(MAX_NAMES);
    let names: Vec<_> = devices.map(|device| format!("{}={}", spec.kind, device.name)).collect();
    Ok(merge_edits(&names, &[vec![("test.json".into(), spec)]], Default::default))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn directory(files: &[(&str, Value)]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for (name, content) in files {
            fs::write(directory.path().join(name), content.to_string()).unwrap();
        }
        directory
    }

    fn ask(names: &[&str], directories: &[&tempfile::TempDir]) -> Result<CdiEdits, CdiError> {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        find_edits(&names, &directories.iter().map(|directory| directory.path().to_owned()).collect::<Vec<_>>())
    }

    fn spec(kind: &str, device: &str, edits: Value) -> Value {
        json!({ "cdiVersion": "0.6.0", "kind": kind, "devices": [{ "name": device, "containerEdits": edits }] })
    }

    #[test]
    fn devices_bring_what_their_specification_says() {
        let mut whole = spec(
            "vendor.com/gpu",
            "0",
            json!({
                "deviceNodes": [{ "path": "/dev/gpu0", "hostPath": "/dev/zero", "permissions": "rw", "major": 1 },
                                { "path": "/dev/null" }],
                "mounts": [{ "hostPath": "/lib/gpu", "containerPath": "/gpu", "options": ["ro", "rbind", "nosuid"] }],
                "additionalGids": [44],
                "hooks": [],
            }),
        );
        whole["containerEdits"] = json!({ "env": ["GPU=a=b"] });
        whole["devices"].as_array_mut().unwrap().push(json!({ "name": "1" }));
        let directory = directory(&[("gpu.json", whole), ("notes.txt", json!("x"))]);
        let edits = ask(&["vendor.com/gpu=0", "vendor.com/gpu=1", "vendor.com/gpu=0"], &[&directory]).unwrap();
        let node = |host: &str, at: &str, permissions: &str| (host.to_owned(), at.to_owned(), permissions.to_owned());
        assert_eq!(
            edits,
            CdiEdits {
                env: vec![("GPU".into(), "a=b".into())],
                devices: vec![node("/dev/zero", "/dev/gpu0", "rw"), node("/dev/null", "/dev/null", "rwm")],
                mounts: vec![CdiMount {
                    host_path: "/lib/gpu".into(),
                    container_path: "/gpu".into(),
                    options: vec!["ro".into(), "nosuid".into()],
                }],
                groups: vec![44],
            }
        );
        assert_eq!(ask(&[], &[&directory]).unwrap(), CdiEdits::default());
    }

    #[test]
    fn later_directories_go_before_and_a_name_has_one_meaning() {
        let env = |value: &str| spec("v/c", "d", json!({ "env": [format!("A={value}")] }));
        let (first, second) = (directory(&[("a.json", env("first"))]), directory(&[("b.json", env("second"))]));
        assert_eq!(ask(&["v/c=d"], &[&first, &second]).unwrap().env[0].1, "second");
        let both = directory(&[("a.json", env("1")), ("b.json", env("2"))]);
        assert!(matches!(ask(&["v/c=d"], &[&both]), Err(CdiError::Ambiguous { .. })));
    }

    #[test]
    fn what_cannot_be_had_is_refused_by_name() {
        let hooked = spec("v/c", "hook", json!({ "hooks": [{ "hookName": "createContainer", "path": "/x" }] }));
        let mounted =
            spec("v/m", "tmp", json!({ "mounts": [{ "hostPath": "x", "containerPath": "/x", "type": "tmpfs" }] }));
        let owned = spec("v/o", "owned", json!({ "deviceNodes": [{ "path": "/dev/null", "uid": 5 }] }));
        let environment = spec("v/e", "bad", json!({ "env": ["A"] }));
        let directory = directory(&[
            ("hook.json", hooked),
            ("mount.json", mounted),
            ("env.json", environment),
            ("owned.json", owned),
            ("broken.json", json!("x")),
            ("other.yaml", json!({})),
        ]);
        std::os::unix::fs::symlink("/dev/zero", directory.path().join("endless.json")).unwrap();
        for (name, kind, words) in [
            ("v/c=hook", FailureKind::Unsupported, &["v/c=hook", "hooks", "hook.json"][..]),
            ("v/o=owned", FailureKind::Unsupported, &["deviceNodes.uid"]),
            ("v/m=tmp", FailureKind::Unsupported, &["tmpfs"]),
            ("v/e=bad", FailureKind::Invalid, &["\"A\" is not NAME=VALUE"]),
            (
                "v/c=none",
                FailureKind::Invalid,
                &["v/c=none", "YAML", "broken.json", "endless.json: not a regular file"],
            ),
        ] {
            let error = ask(&[name], &[&directory]).unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            assert!(words.iter().all(|word| error.to_string().contains(word)), "{error}");
        }
        for name in ["", "v", "v/c", "v=d", "/c=d", "v/=d", "v/c=", "v/c=d d", "../c=d", "v/c=d\n", "v/-c=d"] {
            assert!(matches!(ask(&[name], &[&directory]), Err(CdiError::Name { .. })), "{name:?}");
        }
        assert!(matches!(ask(&["v/c=d"; MAX_NAMES + 1], &[&directory]), Err(CdiError::TooMany { .. })));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn no_file_is_a_danger(bytes in proptest::collection::vec(any::<u8>(), 0..200), name in ".{0,40}") {
            let directory = tempfile::tempdir().unwrap();
            fs::write(directory.path().join("a.json"), &bytes).unwrap();
            let _ = ask(&[&name, "v/c=d"], &[&directory]);
            prop_assert!(ask(&["v/c=d"], &[&directory]).is_err());
        }
    }
}
