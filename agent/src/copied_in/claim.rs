//! Ensures that a volume is written or removed by one request at a time.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

/// The names of the volumes that are being written or removed.
#[derive(Clone, Debug, Default)]
pub(super) struct ClaimedNames(Arc<Mutex<BTreeSet<String>>>);

/// The right to write or remove a volume, which one request at a time has. Dropping it gives the right up.
#[derive(Debug)]
pub(super) struct VolumeClaim {
    pub name: String,
    claimed: ClaimedNames,
}

impl ClaimedNames {
    /// Claims a volume; `None` if it is claimed already.
    pub fn claim(&self, name: &str) -> Option<VolumeClaim> {
        let is_free = self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned());
        is_free.then(|| VolumeClaim { name: name.to_owned(), claimed: self.clone() })
    }
}

impl Drop for VolumeClaim {
    fn drop(&mut self) {
        self.claimed.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.name);
    }
}
