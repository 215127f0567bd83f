//! Tests how rings and requests handle hostile drivers.

use super::block::{self, Slot};
use super::buffers::{ChainError, MAX_BUFFERS, RequestBuffers};
use crate::fuzz::{memory, ring};
use crate::testing::{Driver, INDIRECT, NEXT, WRITE};
use vm_memory::{Bytes, GuestAddress};

const AT: u64 = 0x10000;

fn driver() -> Driver {
    Driver::new(memory(), 0, 16)
}

/// Collects the chain at `head`, alone in its queue.
fn collect(driver: &mut Driver, head: u16) -> Result<RequestBuffers, ChainError> {
    use virtio_queue::{Queue, QueueOwnedT, QueueState};
    driver.offer(head);
    let (desc_table, avail_ring, used_ring) = driver.addresses();
    let state =
        QueueState { max_size: 16, size: 16, ready: true, desc_table, avail_ring, used_ring, ..Default::default() };
    let mut queue = Queue::try_from(state).unwrap();
    let chain = queue.iter(&*driver.memory).unwrap().last().unwrap();
    RequestBuffers::collect(&driver.memory, chain)
}

#[test]
fn a_valid_chain_is_collected() {
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
    assert_eq!(buffers.readable.split_front(7), None);
    assert_eq!(buffers.readable.split_front(3).unwrap().read(&driver.memory, &mut bytes), Ok(3));
    assert_eq!(buffers.readable.split_back(1).unwrap().read(&driver.memory, &mut bytes), Ok(1));
    assert_eq!(bytes[0], b'f');
    assert_eq!(buffers.readable.len(), 2);
    assert_eq!(buffers.writable.write(&driver.memory, &[7; 20]), Ok(10));
}

#[test]
fn valid_indirect_chains_are_collected() {
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
    assert_eq!(bad(&|driver| driver.describe(0, AT, 33, INDIRECT, 0)), ChainError::Empty, "half a descriptor");
    assert_eq!(bad(&|driver| driver.describe(0, AT, 0, INDIRECT, 0)), ChainError::Empty, "an empty table");
    assert_eq!(bad(&|driver| driver.describe(0, 1 << 40, 32, INDIRECT, 0)), ChainError::Empty, "outside memory");
    let nested = |driver: &Driver| {
        driver.describe_in(AT, 0, AT, 32, INDIRECT, 0);
        driver.describe(0, AT, 32, INDIRECT, 0);
    };
    assert_eq!(bad(&nested), ChainError::Empty, "a table in a table");
    let looping = |driver: &Driver| {
        driver.describe_in(AT, 0, AT, 1, NEXT, 1);
        driver.describe_in(AT, 1, AT, 1, NEXT, 0);
        driver.describe(0, AT, 32, INDIRECT, 0);
    };
    assert_eq!(bad(&looping), ChainError::Endless);
    let long = |driver: &Driver| {
        for index in 0..2000 {
            driver.describe_in(AT, index, AT, 1, NEXT, index + 1);
        }
        driver.describe(0, AT, 2000 * 16, INDIRECT, 0);
    };
    const { assert!(MAX_BUFFERS < 2000) };
    assert_eq!(bad(&long), ChainError::TooLong);
}

#[test]
fn invalid_chains_have_specific_errors() {
    let bad = |write: &dyn Fn(&Driver), head| {
        let mut driver = driver();
        write(&driver);
        collect(&mut driver, head).unwrap_err()
    };
    let looping = |driver: &Driver| {
        driver.describe(0, AT, 1, NEXT, 1);
        driver.describe(1, AT, 1, NEXT, 0);
    };
    assert_eq!(bad(&looping, 0), ChainError::Endless);
    assert_eq!(bad(&|driver| driver.describe(0, AT, 1, NEXT, 0), 0), ChainError::Endless, "itself");
    assert_eq!(bad(&|driver| driver.describe(0, AT, 1, NEXT, 16), 0), ChainError::Endless, "an index out of range");
    assert_eq!(bad(&|_| {}, 16), ChainError::Empty, "a head out of range");
    assert_eq!(bad(&|_| {}, u16::MAX), ChainError::Empty);
    let order = |driver: &Driver| {
        driver.describe(0, AT, 1, NEXT | WRITE, 1);
        driver.describe(1, AT, 1, 0, 0);
    };
    assert_eq!(bad(&order, 0), ChainError::Order);
    for (address, length) in [(0x1ffff, 2), (0x20000, 1), (u64::MAX, 1), (u64::MAX, u32::MAX), (0, u32::MAX)] {
        let found = bad(&|driver| driver.describe(0, address, length, 0, 0), 0);
        assert_eq!(found, ChainError::Outside { address, length: length as usize });
    }
}

#[test]
fn an_invalid_chain_is_returned_and_the_next_is_served() {
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
fn a_broken_ring_is_no_longer_served() {
    // More requests than the queue has entries.
    let mut driver = driver();
    driver.set_available(17);
    let mut broken = ring(&driver, 0);
    assert!(broken.pop().is_none() && broken.is_broken());
    assert!(!broken.enable_kicks(), "a caller must not poll in a loop");
    // A head out of range cannot be returned to the guest.
    driver.offer(99);
    let mut broken = ring(&driver, 0);
    assert!(broken.pop().is_none() && broken.is_broken());
    assert_eq!(driver.count_used(), 0);
}

#[test]
fn an_undone_pop_is_popped_again() {
    let mut driver = driver();
    driver.describe(6, AT, 1, 0, 0);
    driver.offer(6);
    let mut ring = ring(&driver, 0);
    assert_eq!(ring.pop().unwrap().head, 6);
    ring.undo_pop();
    assert_eq!(ring.pop().unwrap().head, 6);
    assert!(ring.pop().is_none() && !ring.is_broken());
}

#[test]
fn malformed_disk_requests_are_answered_if_possible() {
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
        let Ok(written) = block::try_serve(slot.inner(), &driver.memory, request) else {
            panic!("{readable} {writable}: nothing of this waits for the disk");
        };
        let status: u8 = driver.memory.read_obj(GuestAddress(AT + 0x100)).unwrap();
        assert_eq!((written, (status != 0xff).then_some(status)), expected, "{readable} {writable}");
    }
}
