//! Writes and reads the stored records of persistent VMs: a document of any version is read, and the newest version is written.

use super::{Version, decode, encode};
use crate::cause::Causes;
use crate::read;
use crate::spec::VirtualMachine;
use serde_json::json;

/// The version that is written.
pub const STORED: Version = Version::V1;

/// A stored VM.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    /// The VM.
    pub machine: VirtualMachine,
    /// The record has an older version and should be written again.
    pub old: bool,
}

/// Returns the record of a VM.
pub fn write(machine: &VirtualMachine) -> String {
    encode(machine, STORED).to_string()
}

/// Reads a record of this or any earlier version.
pub fn read(text: &str) -> Result<Stored, Causes> {
    let value = read::one(text, "record")?;
    let newest = json!(format!("{}/{}", super::GROUP, STORED.word()));
    let old = value["apiVersion"] != newest;
    Ok(Stored { machine: decode(value)?, old })
}
