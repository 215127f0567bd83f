//! Parses the size limits of emptyDirs, which CRI does not contain: `NAME=SIZE,NAME=SIZE`. Nodes use them for volumes
//! (docs/contributor/volumes.md); here they are only validated.

use crate::Quantity;
use crate::names::is_dns_label;
use nacelle_model::empty_dir::{MAX_QUOTA, MIN_QUOTA};
use std::collections::BTreeMap;

/// The maximum number of volumes of a pod.
pub const MANY: usize = 64;
/// The rule, for causes.
pub const RULE: &str = "NAME=SIZE,NAME=SIZE is expected: names of the pod's volumes, each once and at most 64; sizes of 16Mi to 4Ti, \
                        whole bytes, as Kubernetes writes quantities";

/// Returns the volumes and their sizes in bytes, or `None` if the text violates the rule.
pub fn limits(text: &str) -> Option<BTreeMap<String, u64>> {
    let mut found = BTreeMap::new();
    for entry in text.split(',') {
        let (name, size) = entry.split_once('=')?;
        let size = Quantity::parse(size).ok()?.bytes()?;
        let right = is_dns_label(name) && (MIN_QUOTA..=MAX_QUOTA).contains(&size) && found.len() < MANY;
        if !right || found.insert(name.to_owned(), size).is_some() {
            return None;
        }
    }
    Some(found)
}
