//! Translates between the ids by which the host knows containers and those that they have in the guest.
//!
//! A container keeps the id with which it was created: its cgroup and its directories have that name. When its VM is restored as another
//! pod, the host gives it another id. Only the service knows ids of the host; everything behind it uses those of the guest.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The containers whose ids differ, by the id of the host.
#[derive(Debug, Default)]
pub struct HostIds(Mutex<BTreeMap<String, String>>);

impl HostIds {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the id in the guest; empty, which no container has, for one that only the guest still uses.
    pub fn in_guest(&self, id: String) -> String {
        let ids = self.lock();
        match ids.get(&id) {
            Some(in_guest) => in_guest.clone(),
            None if ids.values().any(|in_guest| *in_guest == id) => String::new(),
            None => id,
        }
    }

    /// Returns the id on the host.
    pub fn on_host(&self, id: String) -> String {
        let ids = self.lock();
        let found = ids.iter().find(|(_, in_guest)| **in_guest == id);
        found.map_or(id, |(on_host, _)| on_host.clone())
    }

    /// Replaces all translations: the ids of the guest by those of the host.
    pub(super) fn replace(&self, ids: BTreeMap<String, String>) {
        *self.lock() = ids;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_translated_both_ways() {
        let ids = HostIds::default();
        assert_eq!((ids.in_guest("a".into()), ids.on_host("a".into())), ("a".into(), "a".into()));
        ids.replace([("new".to_owned(), "a".to_owned())].into());
        assert_eq!((ids.in_guest("new".into()), ids.on_host("a".into())), ("a".into(), "new".into()));
        assert_eq!((ids.in_guest("b".into()), ids.on_host("b".into())), ("b".into(), "b".into()));
        assert_eq!(ids.in_guest("a".into()), "", "the host has no container of this id");
    }
}
