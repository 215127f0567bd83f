//! Owns: machines as they are stored: a document of some version, read whichever it is, and written in the newest.

use super::{Version, decode, encode};
use crate::cause::Causes;
use crate::read;
use crate::spec::VirtualMachine;
use serde_json::json;

/// The version that is written.
pub const STORED: Version = Version::V1;

/// A stored machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    /// The machine.
    pub machine: VirtualMachine,
    /// It was stored in an older version: it should be written again.
    pub old: bool,
}

/// What is stored of a machine.
pub fn write(machine: &VirtualMachine) -> String {
    encode(machine, STORED).to_string()
}

/// Reads what was stored by this or any earlier version.
pub fn read(text: &str) -> Result<Stored, Causes> {
    let value = read::one(text, "record")?;
    let newest = json!(format!("{}/{}", super::GROUP, STORED.word()));
    let old = value["apiVersion"] != newest;
    Ok(Stored { machine: decode(value)?, old })
}
