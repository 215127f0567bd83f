//! Reads specifications of the Container Device Interface, versions 0.3.0 to 1.1.0: finds a device by its name in directories of
//! the node, and returns the edits for a container that requests it. `find_edits` blocks on files that other programs have written.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod edits;
mod lookup;
mod names;
mod spec;

#[cfg(any(test, feature = "fuzz"))]
pub(crate) use spec::SpecFormat;

use edits::apply_edits;
use lookup::{SpecFile, find_device, read_specs};
use nacelle_base::{Classify, FailureKind};
use nacelle_model::device::DeviceRequest;
use nacelle_model::mount::Propagation;
use names::split_name;
use std::collections::BTreeSet;
use std::path::PathBuf;

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
    #[error("the CDI device {name} of {} requests {what}, which Nacelle does not support: use a specification without it", path.display())]
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
    /// Device nodes. A later one replaces an earlier one at the same path.
    pub devices: Vec<DeviceRequest>,
    /// Directories and files of the node. A later one replaces an earlier one at the same path.
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
    /// The directions in which further mounts propagate.
    pub propagation: Propagation,
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
    specs: &[Vec<SpecFile>],
    searched: impl FnOnce() -> (Vec<PathBuf>, Vec<String>),
) -> Result<CdiEdits, CdiError> {
    let mut edits = CdiEdits::default();
    let mut used = BTreeSet::new();
    for name in names {
        let unknown_form = || CdiError::Name { name: name.chars().take(200).collect() };
        let (kind, device) = split_name(name).ok_or_else(unknown_form)?;
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

/// Reads the bytes as a specification, and returns the edits of at most [`MAX_NAMES`] of its devices. For the fuzz harness.
#[cfg(any(test, feature = "fuzz"))]
pub(crate) fn find_edits_in(bytes: &[u8], format: SpecFormat) -> std::io::Result<Result<CdiEdits, CdiError>> {
    let spec = spec::CdiSpec::parse(bytes, format)?;
    let devices = spec.devices.iter().take(MAX_NAMES);
    let names: Vec<_> = devices.map(|device| format!("{}={}", spec.kind, device.name)).collect();
    Ok(merge_edits(&names, &[vec![("test".into(), spec)]], Default::default))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]
mod tests;
