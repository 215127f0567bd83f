//! Tests a ring against a model of a queue: which requests are popped, returned and interrupted for, in any order of operations.

use super::ring::Ring;
use super::{Interrupt, Memory};
use crate::fuzz::memory;
use crate::testing::Driver;
use nix::sys::eventfd::EventFd;
use proptest::prelude::*;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use virtio_queue::{Queue, QueueState};
use vm_memory::{Bytes, GuestAddress};

const SIZE: u16 = 8;
const AT: u64 = 0x10000;

#[derive(Default)]
struct InterruptCount(AtomicU32);

impl Interrupt for InterruptCount {
    fn notify_queue(&self, _index: u16) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn notify_config(&self) {}
}

fn ring(memory: Arc<Memory>, state: QueueState, count: Arc<InterruptCount>) -> Ring {
    let kick = EventFd::new().unwrap().into();
    Ring::new(0, Queue::try_from(state).unwrap(), memory, kick, count).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_ring_behaves_like_a_queue(
        steps in prop::collection::vec((0..11u8, 0..8usize), 1..300),
        start in prop_oneof![Just(0), Just(0u16.wrapping_sub(20)), any::<u16>()],
        event_indexes: bool,
    ) {
        let mut driver = Driver::starting_at(memory(), 0, SIZE, start);
        let (desc_table, avail_ring, used_ring) = driver.addresses();
        let state = QueueState {
            max_size: SIZE, size: SIZE, ready: true, desc_table, avail_ring, used_ring,
            next_avail: start, next_used: start, event_idx_enabled: event_indexes,
        };
        let count = Arc::<InterruptCount>::default();
        let mut ring = ring(driver.memory.clone(), state, count.clone());
        // The available, popped and returned requests; the request popped last; the index of the used ring now and at the last
        // signal; the index after which the guest wants an interrupt.
        let (mut waiting, mut popped, mut used) = (VecDeque::new(), Vec::new(), VecDeque::new());
        let mut last = None;
        let (mut now, mut notified, mut event, mut silent) = (start, start, 0u16, false);
        for (step, choice) in steps {
            match step {
                0 | 1 if driver.free() > 0 => waiting.push_back(driver.submit(&[(AT, 1, false)])),
                2 | 3 => {
                    last = waiting.pop_front();
                    prop_assert_eq!(ring.pop().map(|request| request.head), last);
                    popped.extend(last);
                }
                4 => if let Some(head) = last.take() {
                    ring.undo_pop();
                    popped.retain(|other| *other != head);
                    waiting.push_front(head);
                },
                5 if !popped.is_empty() => {
                    let head: u16 = popped.remove(choice % popped.len());
                    last = last.filter(|other| *other != head);
                    ring.complete(head, choice as u32);
                    used.push_back((head, choice as u32));
                    now = now.wrapping_add(1);
                }
                6 => {
                    let passed = now.wrapping_sub(event).wrapping_sub(1) < now.wrapping_sub(notified);
                    ring.notify_guest();
                    let wanted = if event_indexes { passed } else { now != notified && !silent };
                    prop_assert_eq!(count.0.swap(0, Ordering::Relaxed), u32::from(wanted));
                    notified = now;
                }
                7 => prop_assert_eq!(driver.take_used(), used.pop_front()),
                8 => {
                    driver.want_next_interrupt();
                    event = driver.taken();
                    ring.disable_kicks();
                    prop_assert_eq!(ring.enable_kicks(), !waiting.is_empty());
                }
                9 if popped.is_empty() => {
                    let state = ring.into_state();
                    prop_assert_eq!(state.next_used, now);
                    ring = self::ring(driver.memory.clone(), state, count.clone());
                    notified = now;
                    last = None;
                }
                10 => {
                    // Only has an effect without event indexes.
                    silent = choice % 2 == 1;
                    driver.memory.write_obj(u16::from(silent), GuestAddress(avail_ring)).unwrap();
                }
                _ => {}
            }
            prop_assert!(!ring.is_broken());
        }
        prop_assert_eq!(count.0.load(Ordering::Relaxed), 0);
    }
}
