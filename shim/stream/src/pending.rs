//! Bounds the connections that have not presented a token yet. When they are too many, the oldest one is closed: a client with a
//! token sends it at once, so connections that say nothing cannot keep it away. Never blocks.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::oneshot;

#[derive(Default)]
struct Pending {
    next: u64,
    connections: BTreeMap<u64, oneshot::Sender<()>>,
}

/// The connections without a token, oldest first.
#[derive(Clone)]
pub(crate) struct PendingConnections {
    limit: usize,
    inner: Arc<Mutex<Pending>>,
}

/// A connection without a token. Dropping it makes room for another one.
pub(crate) struct PendingConnection {
    number: u64,
    evicted: oneshot::Receiver<()>,
    all: PendingConnections,
}

impl PendingConnections {
    /// Returns an empty list of at most `limit` connections.
    pub fn new(limit: usize) -> PendingConnections {
        PendingConnections { limit, inner: Arc::default() }
    }

    /// Adds a connection, and evicts the oldest one if there are too many.
    pub fn add(&self) -> PendingConnection {
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
        PendingConnection { number, evicted, all: self.clone() }
    }
}

impl PendingConnection {
    /// Returns when the connection must be closed to make room.
    pub async fn evicted(&mut self) {
        if (&mut self.evicted).await.is_err() {
            // The sender is dropped only together with this connection.
            std::future::pending().await
        }
    }
}

impl Drop for PendingConnection {
    fn drop(&mut self) {
        self.all.inner.lock().unwrap_or_else(PoisonError::into_inner).connections.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_oldest_makes_room() {
        let all = PendingConnections::new(2);
        let [mut first, mut second] = [all.add(), all.add()];
        let mut third = all.add();
        first.evicted().await;
        drop(first);
        assert_eq!(all.inner.lock().unwrap().connections.len(), 2);
        drop(third);
        third = all.add();
        assert!(second.evicted.try_recv().is_err() && third.evicted.try_recv().is_err());
        let _fourth = all.add();
        second.evicted().await;
    }
}
