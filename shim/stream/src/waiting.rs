//! Bounds the connections that have not presented a token yet. When they are too many, the oldest one is closed: a client with a
//! token sends it at once, so connections that say nothing cannot keep it away. Never blocks.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::oneshot;

#[derive(Default)]
struct Inner {
    next: u64,
    clients: BTreeMap<u64, oneshot::Sender<()>>,
}

/// The connections that wait, oldest first.
#[derive(Clone)]
pub(crate) struct WaitingClients {
    limit: usize,
    inner: Arc<Mutex<Inner>>,
}

/// A connection that waits. Dropping it makes room for another one.
pub(crate) struct WaitingClient {
    number: u64,
    evicted: oneshot::Receiver<()>,
    all: WaitingClients,
}

impl WaitingClients {
    /// Returns an empty list of at most `limit` connections.
    pub fn new(limit: usize) -> WaitingClients {
        WaitingClients { limit, inner: Arc::default() }
    }

    /// Adds a connection, and evicts the oldest one if there are too many.
    pub fn enter(&self) -> WaitingClient {
        let (evict, evicted) = oneshot::channel();
        // A panic between the changes leaves a connection too many or too few, which ends by its timeout.
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let number = inner.next;
        inner.next += 1;
        inner.clients.insert(number, evict);
        if inner.clients.len() > self.limit
            && let Some((_, oldest)) = inner.clients.pop_first()
        {
            // Its connection may have ended at this moment.
            let _ = oldest.send(());
        }
        WaitingClient { number, evicted, all: self.clone() }
    }
}

impl WaitingClient {
    /// Returns when the connection must be closed to make room.
    pub async fn evicted(&mut self) {
        if (&mut self.evicted).await.is_err() {
            // The sender is dropped only together with this client.
            std::future::pending().await
        }
    }
}

impl Drop for WaitingClient {
    fn drop(&mut self) {
        self.all.inner.lock().unwrap_or_else(PoisonError::into_inner).clients.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_oldest_makes_room() {
        let all = WaitingClients::new(2);
        let [mut first, mut second] = [all.enter(), all.enter()];
        let mut third = all.enter();
        first.evicted().await;
        drop(first);
        assert_eq!(all.inner.lock().unwrap().clients.len(), 2);
        drop(third);
        third = all.enter();
        assert!(second.evicted.try_recv().is_err() && third.evicted.try_recv().is_err());
        let _fourth = all.enter();
        second.evicted().await;
    }
}
