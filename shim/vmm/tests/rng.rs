//! Tests the entropy device behind its vhost-user server.

#[allow(dead_code, reason = "each test file uses a part of it")]
mod guest;

use guest::FrontEnd;
use nacelle_vmm::rng::{MAX_BYTES, Rng};
use vm_memory::{Bytes, GuestAddress};

#[test]
fn entropy_per_request_is_bounded() {
    let mut front_end = FrontEnd::new(Rng::new().device(), 1);
    let at = front_end.allocate(64 << 10);
    let mut request_entropy = |length: u32| {
        front_end.memory.write_slice(&vec![0; 64 << 10], GuestAddress(at)).unwrap();
        front_end.queues[0].driver.submit(&[(at, 7, true), (at + 7, length - 7, true)]);
        front_end.queues[0].kick();
        let (_, written) = front_end.queues[0].wait_used();
        let mut bytes = vec![0; 64 << 10];
        front_end.memory.read_slice(&mut bytes, GuestAddress(at)).unwrap();
        assert!(bytes[written as usize..].iter().all(|byte| *byte == 0));
        bytes.truncate(written as usize);
        bytes
    };
    let (one, two) = (request_entropy(64), request_entropy(64));
    assert_eq!((one.len(), two.len()), (64, 64));
    assert_ne!(one, two);
    assert_eq!(request_entropy(64 << 10).len(), MAX_BYTES);
    // A request without writable buffers is returned.
    front_end.queues[0].driver.submit(&[(at, 64, false)]);
    front_end.queues[0].kick();
    assert_eq!(front_end.queues[0].wait_used().1, 0);
}
