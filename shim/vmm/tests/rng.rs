//! Tests the entropy device behind its vhost-user server.

#[allow(dead_code, reason = "each test file uses a part of it")]
mod guest;

use guest::Machine;
use nacelle_vmm::rng::{MAX_BYTES, Rng};
use vm_memory::{Bytes, GuestAddress};

#[test]
fn a_guest_gets_entropy_and_not_too_much_at_once() {
    let mut machine = Machine::new(Rng::new().device(), 1);
    let at = machine.allocate(64 << 10);
    let mut ask = |length: u32| {
        machine.memory.write_slice(&vec![0; 64 << 10], GuestAddress(at)).unwrap();
        machine.queues[0].driver.submit(&[(at, 7, true), (at + 7, length - 7, true)]);
        machine.queues[0].kick();
        let (_, written) = machine.queues[0].wait_used();
        let mut bytes = vec![0; 64 << 10];
        machine.memory.read_slice(&mut bytes, GuestAddress(at)).unwrap();
        assert!(bytes[written as usize..].iter().all(|byte| *byte == 0));
        bytes.truncate(written as usize);
        bytes
    };
    let (one, two) = (ask(64), ask(64));
    assert_eq!((one.len(), two.len()), (64, 64));
    assert_ne!(one, two);
    assert_eq!(ask(64 << 10).len(), MAX_BYTES);
    // A request without writable buffers is returned.
    machine.queues[0].driver.submit(&[(at, 64, false)]);
    machine.queues[0].kick();
    assert_eq!(machine.queues[0].wait_used().1, 0);
}
