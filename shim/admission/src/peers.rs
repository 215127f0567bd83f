//! Limits the open connections of each client address, so that one client cannot take all of them. Never blocks.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

/// The number of open connections of each address that has any.
#[derive(Clone, Default)]
pub(crate) struct PeerConnections(Arc<Mutex<HashMap<IpAddr, usize>>>);

/// One open connection. Dropping it makes room for another one of the same address.
pub(crate) struct PeerConnection {
    all: PeerConnections,
    address: IpAddr,
}

impl PeerConnections {
    /// Counts a connection; `None` if the address has `limit` connections already.
    pub fn open(&self, address: IpAddr, limit: usize) -> Option<PeerConnection> {
        let address = address.to_canonical();
        // Each change is a single insert or removal, so a panic in between leaves the map consistent.
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(address).or_default();
        if *count >= limit {
            return None;
        }
        *count += 1;
        Some(PeerConnection { all: self.clone(), address })
    }
}

impl Drop for PeerConnection {
    fn drop(&mut self) {
        let mut counts = self.all.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_address_has_its_own_limit() {
        let peers = PeerConnections::default();
        let [one, other]: [IpAddr; 2] = ["10.0.0.1".parse().unwrap(), "::ffff:10.0.0.2".parse().unwrap()];
        let first = peers.open(one, 2).unwrap();
        let _second = peers.open(one, 2).unwrap();
        assert!(peers.open(one, 2).is_none());
        // An IPv4 address is the same client in its IPv6 form.
        let mapped = peers.open(other, 1);
        assert!(mapped.is_some() && peers.open("10.0.0.2".parse().unwrap(), 1).is_none());
        drop(first);
        assert!(peers.open(one, 2).is_some());
        drop(mapped);
        assert_eq!(peers.0.lock().unwrap().len(), 1);
    }
}
