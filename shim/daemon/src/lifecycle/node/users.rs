//! Assigns the users of pod processes: each pod has one of a configured range for itself. A user is free again when the record of
//! its pod is removed, which comes after the removal of all files that belong to it.

use crate::config::JailSettings;
use crate::lifecycle::context::error::LifecycleError;
use std::collections::BTreeMap;

/// The users of a range, and those that pods have. Without a range, pod processes are root.
#[derive(Debug, Default)]
pub(crate) struct PodUsers {
    first: u32,
    count: u32,
    /// The number of pods that have each user: two only if an earlier daemon could not record a pod and used its user again.
    used: BTreeMap<u32, u32>,
}

impl PodUsers {
    /// Returns the range of the configuration; `used` are the users of the pods that exist.
    pub(crate) fn new(settings: &JailSettings, used: impl IntoIterator<Item = u32>) -> PodUsers {
        let (first, count) = settings.pod_users();
        let mut users = PodUsers { first, count, used: BTreeMap::new() };
        used.into_iter().for_each(|user| users.count(user));
        if let Some(worker) = settings.worker_user().filter(|worker| users.used.contains_key(worker)) {
            tracing::warn!(
                user = worker,
                "image workers have the user of a pod that runs since before a change of jail.first_user"
            );
        }
        users
    }

    /// Assigns a user to a new pod. The search begins at a place that `seed` determines, so that a user whose pod has just been removed
    /// is not the next one.
    pub(crate) fn assign(&mut self, seed: u32) -> Result<Option<u32>, LifecycleError> {
        if self.count == 0 {
            return Ok(None);
        }
        let start = seed % self.count;
        let offsets = (start..self.count).chain(0..start);
        let free = offsets.map(|offset| self.first.saturating_add(offset)).find(|user| !self.used.contains_key(user));
        let user = free.ok_or(LifecycleError::NoUser { count: self.count })?;
        self.count(user);
        Ok(Some(user))
    }

    fn count(&mut self, user: u32) {
        *self.used.entry(user).or_default() += 1;
    }

    /// Makes the user of a removed pod free.
    pub(crate) fn release(&mut self, user: Option<u32>) {
        let Some(user) = user else { return };
        match self.used.get_mut(&user) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(self.used.remove(&user)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_base::{Classify, FailureKind};

    fn users(count: u32, used: &[u32]) -> PodUsers {
        let settings =
            JailSettings { first_user: 999, user_count: count + u32::from(count > 0), ..JailSettings::default() };
        PodUsers::new(&settings, used.iter().copied())
    }

    #[test]
    fn no_user_belongs_to_two_pods() {
        let mut users = users(4, &[1001]);
        let mut assigned: Vec<u32> = (0..3).map(|_| users.assign(3).unwrap().unwrap()).collect();
        assert_eq!(assigned, [1003, 1000, 1002]);
        let error = users.assign(0).unwrap_err();
        assert_eq!(error.kind(), FailureKind::Exhausted);
        assert!(error.to_string().contains("jail.user_count"), "{error}");
        users.release(assigned.pop());
        assert_eq!(users.assign(0).unwrap(), Some(1002));
    }

    #[test]
    fn a_user_of_two_pods_is_free_when_both_are_removed() {
        let mut users = users(1, &[1000, 1000]);
        users.release(Some(1000));
        assert!(users.assign(0).is_err());
        users.release(Some(1000));
        assert_eq!(users.assign(0).unwrap(), Some(1000));
    }

    #[test]
    fn without_a_range_pod_processes_are_root() {
        assert_eq!(users(0, &[]).assign(7).unwrap(), None);
    }

    #[test]
    fn a_pod_from_before_a_change_of_the_range_keeps_its_user() {
        let mut users = users(1, &[5]);
        assert_eq!(users.assign(7).unwrap(), Some(1000));
        users.release(Some(5));
        assert!(users.assign(7).is_err());
    }
}
