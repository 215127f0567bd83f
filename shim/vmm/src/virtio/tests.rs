//! Tests how rings and requests handle hostile drivers.

use super::block::{self, Slot};
use super::pieces::{BadChain, Buffers, MAX_PIECES};
use crate::fuzz::{memory, ring};
use crate::testing::{Driver, INDIRECT, NEXT, WRITE};
use vm_memory::{Bytes, GuestAddress};

const AT: u64 = 0x10000;

fn driver() -> Driver {
    Driver::new(memory(), 0, 16)
}

/// Collects the chain at `head`, alone in its queue.
fn collect(driver: &mut Driver, head: u16) -> Result<Buffers, BadChain> {
    use virtio_queue::{Queue, QueueOwnedT, QueueState};
    driver.offer(head);
    let (desc_table, avail_ring, used_ring) = driver.addresses();
    let state =
        QueueState { max_size: 16, size: 16, ready: true, desc_table, avail_ring, used_ring, ..Default::default() };
    let mut queue = Queue::try_from(state).unwrap();
    let chain = queue.iter(&*driver.memory).unwrap().last().unwrap();
    Buffers::collect(&driver.memory, chain)
}

#[test]
fn a_good_chain_is_put_together() {
    let mut driver = driver();
    driver.memory.write_slice(b"abcdef", GuestAddress(AT)).unwrap();
    driver.describe(0, AT, 2, NEXT, 3);
    driver.describe(3, AT + 2, 0, NEXT, 1);
    driver.describe(1, AT + 2, 4, NEXT, 2);
    driver.describe(2, AT + 100, 10, WRITE, 0);
    let mut buffers = collect(&mut driver, 0).unwrap();
    assert_eq!((buffers.readable.len(), buffers.writable.len()), (6, 10));
    let mut bytes = [0; 8];
    assert_eq!(buffers.readable.read(&driver.memory, &mut bytes), Ok(6));
    assert_eq!(&bytes, b"abcdef\0\0");
    assert_eq!(buffers.readable.take_front(7), None);
    assert_eq!(buffers.readable.take_front(3).unwrap().read(&driver.memory, &mut bytes), Ok(3));
    assert_eq!(buffers.readable.take_back(1).unwrap().read(&driver.memory, &mut bytes), Ok(1));
    assert_eq!(bytes[0], b'f');
    assert_eq!(buffers.readable.len(), 2);
    assert_eq!(buffers.writable.write(&driver.memory, &[7; 20]), Ok(10));
}

#[test]
fn an_indirect_chain_is_put_together_and_a_bad_one_is_not() {
    let mut good = driver();
    good.describe_in(AT, 0, AT + 0x1000, 5, NEXT, 1);
    good.describe_in(AT, 1, AT + 0x2000, 6, WRITE, 0);
    good.describe(0, AT, 32, INDIRECT, 0);
    let buffers = collect(&mut good, 0).unwrap();
    assert_eq!((buffers.readable.len(), buffers.writable.len()), (5, 6));

    let bad = |write: &dyn Fn(&Driver)| {
        let mut driver = driver();
        write(&driver);
        collect(&mut driver, 0).unwrap_err()
    };
    assert_eq!(bad(&|driver| driver.describe(0, AT, 33, INDIRECT, 0)), BadChain::Empty, "half a descriptor");
    assert_eq!(bad(&|driver| driver.describe(0, AT, 0, INDIRECT, 0)), BadChain::Empty, "an empty table");
    assert_eq!(bad(&|driver| driver.describe(0, 1 << 40, 32, INDIRECT, 0)), BadChain::Empty, "outside memory");
    let nested = |driver: &Driver| {
        driver.describe_in(AT, 0, AT, 32, INDIRECT, 0);
        driver.describe(0, AT, 32, INDIRECT, 0);
    };
    assert_eq!(bad(&nested), BadChain::Empty, "a table in a table");
    let looping = |driver: &Driver| {
        driver.describe_in(AT, 0, AT, 1, NEXT, 1);
        driver.describe_in(AT, 1, AT, 1, NEXT, 0);
        driver.describe(0, AT, 32, INDIRECT, 0);
    };
    assert_eq!(bad(&looping), BadChain::Endless);
    let long = |driver: &Driver| {
        for index in 0..2000 {
            driver.describe_in(AT, index, AT, 1, NEXT, index + 1);
        }
        driver.describe(0, AT, 2000 * 16, INDIRECT, 0);
    };
    const { assert!(MAX_PIECES < 2000) };
    assert_eq!(bad(&long), BadChain::TooLong);
}

#[test]
fn chains_that_break_the_rules_are_named() {
    let bad = |write: &dyn Fn(&Driver), head| {
        let mut driver = driver();
        write(&driver);
        collect(&mut driver, head).unwrap_err()
    };
    let looping = |driver: &Driver| {
        driver.describe(0, AT, 1, NEXT, 1);
        driver.describe(1, AT, 1, NEXT, 0);
    };
    assert_eq!(bad(&looping, 0), BadChain::Endless);
    assert_eq!(bad(&|driver| driver.describe(0, AT, 1, NEXT, 0), 0), BadChain::Endless, "itself");
    assert_eq!(bad(&|driver| driver.describe(0, AT, 1, NEXT, 16), 0), BadChain::Endless, "an index out of range");
    assert_eq!(bad(&|_| {}, 16), BadChain::Empty, "a head out of range");
    assert_eq!(bad(&|_| {}, u16::MAX), BadChain::Empty);
    let order = |driver: &Driver| {
        driver.describe(0, AT, 1, NEXT | WRITE, 1);
        driver.describe(1, AT, 1, 0, 0);
    };
    assert_eq!(bad(&order, 0), BadChain::Order);
    for (address, length) in [(0x1ffff, 2), (0x20000, 1), (u64::MAX, 1), (u64::MAX, u32::MAX), (0, u32::MAX)] {
        let found = bad(&|driver| driver.describe(0, address, length, 0, 0), 0);
        assert_eq!(found, BadChain::Outside { address, length: length as usize });
    }
}

#[test]
fn a_bad_chain_comes_back_empty_and_the_next_is_served() {
    let mut driver = driver();
    driver.describe(5, 1 << 40, 1, 0, 0);
    driver.offer(5);
    driver.describe(6, AT, 1, 0, 0);
    driver.offer(6);
    let mut ring = ring(&driver, 0);
    assert_eq!(ring.pop().unwrap().head, 6);
    assert!(!ring.is_broken());
    assert_eq!(driver.take_used(), Some((5, 0)));
    assert_eq!(driver.take_used(), None);
}

#[test]
fn a_broken_ring_is_served_no_more() {
    // More requests than the queue has entries.
    let mut driver = driver();
    driver.set_available(17);
    let mut broken = ring(&driver, 0);
    assert!(broken.pop().is_none() && broken.is_broken());
    assert!(!broken.rearm(), "nobody waits in a loop");
    // A head out of range cannot be returned to the guest.
    driver.offer(99);
    let mut broken = ring(&driver, 0);
    assert!(broken.pop().is_none() && broken.is_broken());
    assert_eq!(driver.count_used(), 0);
}

#[test]
fn a_request_put_back_is_the_next_one_again() {
    let mut driver = driver();
    driver.describe(6, AT, 1, 0, 0);
    driver.offer(6);
    let mut ring = ring(&driver, 0);
    assert_eq!(ring.pop().unwrap().head, 6);
    ring.unpop();
    assert_eq!(ring.pop().unwrap().head, 6);
    assert!(ring.pop().is_none() && !ring.is_broken());
}

#[test]
fn disk_requests_of_the_wrong_shape_are_answered_as_far_as_can_be() {
    let slot = Slot::read_only("images").unwrap();
    // (readable bytes, writable bytes) -> (bytes written, status)
    for (readable, writable, expected) in
        [(16, 0, (0, None)), (15, 1, (1, Some(1))), (0, 1, (1, Some(1))), (0, 0, (0, None))]
    {
        let mut driver = driver();
        driver.memory.write_obj(0xffu8, GuestAddress(AT + 0x100)).unwrap();
        driver.submit(&[(AT, readable, false), (AT + 0x100, writable, true)]);
        let mut ring = ring(&driver, 0);
        let request = ring.pop().unwrap();
        let Ok(written) = block::begin(slot.shared(), &driver.memory, request) else {
            panic!("{readable} {writable}: nothing of this waits for the disk");
        };
        let status: u8 = driver.memory.read_obj(GuestAddress(AT + 0x100)).unwrap();
        assert_eq!((written, (status != 0xff).then_some(status)), expected, "{readable} {writable}");
    }
}
