//! Serialises the operations on one container, so that creation, start, update and removal never overlap.

use std::collections::HashMap;
use std::sync::Arc;

use super::error::AgentError;
use super::pod::AgentPod;

impl AgentPod {
    /// Runs `work` while no other operation on the container runs.
    pub(super) async fn with_container_lock<T>(
        &self,
        id: &str,
        work: impl Future<Output = Result<T, AgentError>>,
    ) -> Result<T, AgentError> {
        let lock = Arc::clone(self.lock_state().container_locks.entry(id.to_owned()).or_default());
        let result = {
            let _held = lock.lock().await;
            work.await
        };
        let mut state = self.lock_state();
        let exists = state.containers.contains_key(id);
        release_entry(&mut state.container_locks, id, lock, |_| exists);
        result
    }
}

/// Drops a handle on an entry of a table, and removes the entry if no other handle exists and `keep` returns false for it.
pub(super) fn release_entry<T>(
    table: &mut HashMap<String, Arc<T>>,
    key: &str,
    handle: Arc<T>,
    keep: impl FnOnce(&T) -> bool,
) {
    drop(handle);
    if table.get(key).is_some_and(|entry| Arc::strong_count(entry) == 1 && !keep(entry)) {
        table.remove(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_stays_while_another_handle_is_held() {
        let mut table = HashMap::from([("a".to_owned(), Arc::new(()))]);
        let (first, second) = (Arc::clone(&table["a"]), Arc::clone(&table["a"]));
        release_entry(&mut table, "a", first, |()| false);
        assert!(table.contains_key("a"));
        let kept = Arc::clone(&second);
        release_entry(&mut table, "a", second, |()| true);
        release_entry(&mut table, "a", kept, |()| true);
        assert!(table.contains_key("a"));
        let last = Arc::clone(&table["a"]);
        release_entry(&mut table, "a", last, |()| false);
        assert!(table.is_empty());
    }
}
