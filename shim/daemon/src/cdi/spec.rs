//! Defines the format of a CDI specification, in JSON or YAML, and reads it with bounds. What the format does not have makes a file
//! invalid, as does a field that is newer than the version which the file states (CDI specification, "Released versions").

use super::names::{is_device_name, is_kind};
use nacelle_base::json::{self, MAX_VALUES};
use nacelle_base::yaml::{self, NumberStyle, YamlLimits};
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io;

/// The largest file in bytes.
pub(super) const MAX_FILE: usize = 1 << 20;
/// The limits of a YAML file. A specification has six levels.
const LIMITS: YamlLimits = YamlLimits { bytes: MAX_FILE, depth: 32, values: MAX_VALUES, documents: 1 };
/// The released versions, oldest first; 0.1.0 and 0.2.0 never were.
const VERSIONS: [&str; 8] = ["0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0"];

/// The format of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SpecFormat {
    Json,
    Yaml,
}

/// Keys and values that have no effect on a container.
type Annotations = BTreeMap<String, IgnoredAny>;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct CdiSpec {
    cdi_version: String,
    pub kind: String,
    #[serde(default, deserialize_with = "or_default")]
    annotations: Annotations,
    #[serde(default, deserialize_with = "or_default")]
    pub devices: Vec<CdiDevice>,
    #[serde(default, deserialize_with = "or_default")]
    pub container_edits: ContainerEdits,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct CdiDevice {
    pub name: String,
    #[serde(default, deserialize_with = "or_default")]
    annotations: Annotations,
    #[serde(default, deserialize_with = "or_default")]
    pub container_edits: ContainerEdits,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct ContainerEdits {
    #[serde(deserialize_with = "or_default")]
    pub env: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub device_nodes: Vec<CdiDeviceNode>,
    #[serde(deserialize_with = "or_default")]
    pub net_devices: Vec<CdiNetDevice>,
    #[serde(deserialize_with = "or_default")]
    pub hooks: Vec<CdiHook>,
    #[serde(deserialize_with = "or_default")]
    pub mounts: Vec<SpecMount>,
    /// Fields of the CPU's resource control, of any version.
    pub intel_rdt: Option<BTreeMap<String, Value>>,
    #[serde(deserialize_with = "or_default")]
    pub additional_gids: Vec<u32>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct CdiDeviceNode {
    pub path: String,
    #[serde(default, deserialize_with = "or_default")]
    pub host_path: String,
    #[serde(default, deserialize_with = "or_default", rename = "type")]
    pub kind: String,
    #[serde(default, deserialize_with = "or_default")]
    pub major: i64,
    #[serde(default, deserialize_with = "or_default")]
    pub minor: i64,
    pub file_mode: Option<u32>,
    #[serde(default, deserialize_with = "or_default")]
    pub permissions: String,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct SpecMount {
    pub host_path: String,
    pub container_path: String,
    #[serde(default, deserialize_with = "or_default")]
    pub options: Vec<String>,
    #[serde(default, deserialize_with = "or_default", rename = "type")]
    pub kind: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct CdiHook {
    pub hook_name: String,
    pub path: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct CdiNetDevice {
    pub host_interface_name: String,
}

/// Reads `null` as an absent field, as Go does.
fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(deserializer: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

impl CdiSpec {
    /// Reads and checks a file of at most [`MAX_FILE`] bytes.
    pub fn parse(bytes: &[u8], format: SpecFormat) -> io::Result<CdiSpec> {
        if bytes.len() > MAX_FILE {
            return Err(io::Error::other(format!("more than {MAX_FILE} bytes")));
        }
        let spec: CdiSpec = match format {
            SpecFormat::Json => json::read(bytes).map_err(|error| {
                let text = error.to_string();
                match text.rsplit_once(" at line ") {
                    Some((why, position)) => io::Error::other(format!("{} at line {position}", cut(why))),
                    None => io::Error::other(cut(&text)),
                }
            })?,
            SpecFormat::Yaml => {
                let text = std::str::from_utf8(bytes).map_err(io::Error::other)?;
                serde_saphyr::from_str_with_options(text, yaml::options(LIMITS, NumberStyle::LegacyOctal))
                    .map_err(|error| io::Error::other(cut(&yaml::describe_error(&error, LIMITS))))?
            }
        };
        spec.check().map_err(io::Error::other)?;
        Ok(spec)
    }

    /// Checks names and the version.
    fn check(&self) -> Result<(), String> {
        let stated = self.cdi_version.strip_prefix('v').unwrap_or(&self.cdi_version);
        let Some(stated) = VERSIONS.iter().position(|version| *version == stated) else {
            return Err(format!("cdiVersion is {:?}: 0.3.0 to 1.1.0 are read", cut(&self.cdi_version)));
        };
        if !is_kind(&self.kind) {
            return Err(format!("kind is {:?}: VENDOR/CLASS is expected", cut(&self.kind)));
        }
        if let Some(device) = self.devices.iter().find(|device| !is_device_name(&device.name)) {
            return Err(format!("a device has the name {:?}, which is not allowed", cut(&device.name)));
        }
        if self.devices.is_empty() {
            return Err("it has no devices".to_owned());
        }
        let newer = |needed: &&str| VERSIONS.iter().position(|version| version == needed) > Some(stated);
        match self.features().into_iter().find(|(used, needed, _)| *used && newer(needed)) {
            Some((_, needed, what)) => {
                Err(format!("cdiVersion is {:?}, and {what} needs {needed} at least", self.cdi_version))
            }
            None => Ok(()),
        }
    }

    /// Returns what the versions after 0.3.0 added: whether it is used, the version, and its name.
    fn features(&self) -> [(bool, &'static str, &'static str); 9] {
        let some = |used: fn(&ContainerEdits) -> bool| {
            used(&self.container_edits) || self.devices.iter().any(|device| used(&device.container_edits))
        };
        let annotated =
            !self.annotations.is_empty() || self.devices.iter().any(|device| !device.annotations.is_empty());
        let class = self.kind.split_once('/').map_or("", |(_, class)| class);
        [
            (some(|edits| !edits.net_devices.is_empty()), "1.1.0", "netDevices"),
            (some(has_new_rdt_fields), "1.1.0", "schemata or enableMonitoring of intelRdt"),
            (some(|edits| edits.intel_rdt.is_some()), "0.7.0", "intelRdt"),
            (some(|edits| !edits.additional_gids.is_empty()), "0.7.0", "additionalGids"),
            (annotated, "0.6.0", "annotations"),
            (class.contains('.'), "0.6.0", "a dot in the class of kind"),
            (
                self.devices.iter().any(|device| starts_with_digit(&device.name)),
                "0.5.0",
                "a name that begins with a digit",
            ),
            (
                some(|edits| edits.device_nodes.iter().any(|node| !node.host_path.is_empty())),
                "0.5.0",
                "hostPath of deviceNodes",
            ),
            (some(|edits| edits.mounts.iter().any(|mount| !mount.kind.is_empty())), "0.4.0", "type of mounts"),
        ]
    }
}

fn has_new_rdt_fields(edits: &ContainerEdits) -> bool {
    let field = |name| edits.intel_rdt.as_ref().and_then(|fields| fields.get(name));
    field("schemata").is_some_and(|value| !value.is_null()) || field("enableMonitoring") == Some(&Value::Bool(true))
}

fn starts_with_digit(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_digit())
}

/// Returns the start of a text of a file, for an error.
pub(super) fn cut(text: &str) -> String {
    text.chars().take(100).collect()
}
