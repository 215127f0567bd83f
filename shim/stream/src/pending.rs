//! Bounds the connections that have not sent their request yet. When they are too many, the oldest one is closed: a client with a
//! token sends it at once, so connections that say nothing cannot keep it away. Never blocks.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::oneshot;

#[derive(Default)]
struct Pending {
    next: u64,
    connections: BTreeMap<u64, oneshot::Sender<()>>,
}

/// The connections without a request, oldest first.
#[derive(Clone)]
pub(crate) struct PendingConnections {
    limit: usize,
    inner: Arc<Mutex<Pending>>,
}

/// A connection without a request. Dropping it makes room for another one.
pub(crate) struct PendingConnection {
    number: u64,
    all: PendingConnections,
}

/// Announces that a connection must be closed.
pub(crate) struct Eviction(oneshot::Receiver<()>);

impl PendingConnections {
    /// Returns an empty list of at most `limit` connections.
    pub fn new(limit: usize) -> PendingConnections {
        PendingConnections { limit, inner: Arc::default() }
    }

    /// Adds a connection, and evicts the oldest one if there are too many.
    pub fn add(&self) -> (PendingConnection, Eviction) {
        let (evict, evicted) = oneshot::channel();
        // If a panic interrupts a change, at most one entry is wrong; its connection ends by its timeout.
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let number = inner.next;
        inner.next += 1;
        inner.connections.insert(number, evict);
        if inner.connections.len() > self.limit
            && let Some((_, oldest)) = inner.connections.pop_first()
        {
            // Its connection may have ended at this moment.
            let _ = oldest.send(());
        }
        (PendingConnection { number, all: self.clone() }, Eviction(evicted))
    }
}

impl PendingConnection {
    /// Leaves the list, because the request has arrived. Returns false if the connection has been evicted.
    pub fn leave(&self) -> bool {
        self.all.inner.lock().unwrap_or_else(PoisonError::into_inner).connections.remove(&self.number).is_some()
    }
}

impl Drop for PendingConnection {
    fn drop(&mut self) {
        self.leave();
    }
}

impl Eviction {
    /// Returns when the connection must be closed to make room; never if it has left the list.
    pub async fn wait(self) {
        if self.0.await.is_err() {
            std::future::pending().await
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_oldest_makes_room() {
        let all = PendingConnections::new(2);
        let [(first, evict_first), (second, evict_second)] = [all.add(), all.add()];
        let _third = all.add();
        evict_first.wait().await;
        assert!(!first.leave() && second.leave());
        // It has left: neither it nor the third one must make room.
        let (fourth, mut evict_fourth) = all.add();
        assert!(evict_fourth.0.try_recv().is_err() && all.inner.lock().unwrap().connections.len() == 2);
        drop(evict_second);
        drop(fourth);
        assert_eq!(all.inner.lock().unwrap().connections.len(), 1);
    }
}
