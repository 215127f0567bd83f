//! Tests the balloon with a driver that can break any rule.

use super::Balloon;
use super::requests::{DEFLATE, INFLATE, MAX_PAGES, STATISTICS};
use crate::fuzz::ring;
use crate::virtio::scripted::{Scripted, eventually};
use crate::virtio::{DeviceState, Memory, StateError};
use proptest::prelude::*;
use std::sync::atomic::Ordering::Relaxed;
use vm_memory::{Bytes, GuestAddress};

const REPORTING: u16 = 3;
const STATS_VQ: u64 = 1 << 1;
/// Guest memory consists of two regions with a hole. Queues and lists lie at its start, the pages for the balloon from `PAGES` on.
const LISTS: u64 = 0x20000;
const PAGES: u64 = 0x80000;
const FIRST_END: u64 = 0x100000;
const SECOND: u64 = 0x400000;
const SECOND_END: u64 = 0x480000;

struct BalloonGuest {
    balloon: Balloon,
    inner: Scripted,
}

impl BalloonGuest {
    fn new() -> BalloonGuest {
        let ranges = [(GuestAddress(0), FIRST_END as usize), (GuestAddress(SECOND), (SECOND_END - SECOND) as usize)];
        let balloon = Balloon::new();
        BalloonGuest { inner: Scripted::new(balloon.device(), &ranges), balloon }
    }

    fn request(&mut self, index: u16, buffers: &[(u64, u32, bool)]) {
        assert_eq!(self.inner.request(index, buffers), 0);
    }

    fn inflate(&mut self, pages: &[u32]) {
        let bytes: Vec<u8> = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
        self.inner.memory.write_slice(&bytes, GuestAddress(LISTS)).unwrap();
        self.request(INFLATE, &[(LISTS, bytes.len() as u32, false)]);
    }

    fn fill(&self) {
        for (from, to) in [(PAGES, FIRST_END), (SECOND, SECOND_END)] {
            self.inner.memory.write_slice(&vec![0xaa; (to - from) as usize], GuestAddress(from)).unwrap();
        }
    }

    /// Returns whether a page still has the content that `fill` wrote; otherwise it must be zero.
    fn has_content(&self, page: u64) -> bool {
        let mut bytes = [0; 4096];
        self.inner.memory.read_slice(&mut bytes, GuestAddress(page)).unwrap();
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "half a page at {page:#x}");
        bytes[0] != 0
    }

    fn released_pages(&self) -> Vec<u64> {
        let pages = (PAGES..FIRST_END).step_by(4096).chain((SECOND..SECOND_END).step_by(4096));
        pages.filter(|page| !self.has_content(*page)).collect()
    }

    fn count(&self, what: impl Fn(&super::BalloonMetrics) -> &std::sync::atomic::AtomicU64) -> u64 {
        what(self.balloon.metrics()).load(Relaxed)
    }
}

fn number(page: u64) -> u32 {
    (page / 4096) as u32
}

#[test]
fn inflated_pages_are_released_to_the_host() {
    let mut guest = BalloonGuest::new();
    guest.fill();
    // Two runs and a single page, unordered, one page twice.
    let pages = [PAGES + 0x2000, PAGES, PAGES + 0x1000, SECOND, PAGES + 0x9000, SECOND];
    guest.inflate(&pages.map(number));
    assert_eq!(guest.released_pages(), [PAGES, PAGES + 0x1000, PAGES + 0x2000, PAGES + 0x9000, SECOND]);
    assert_eq!(guest.count(|metrics| &metrics.inflated_pages), 6);
    assert_eq!(guest.count(|metrics| &metrics.freed_bytes), 5 * 4096);
    assert_eq!(guest.count(|metrics| &metrics.refused), 0);

    guest.request(DEFLATE, &[(LISTS, 24, false)]);
    assert_eq!(guest.count(|metrics| &metrics.deflated_pages), 6);
    guest.fill();
    assert!(guest.released_pages().is_empty());
}

#[test]
fn only_guest_memory_is_released() {
    let mut guest = BalloonGuest::new();
    guest.fill();
    // Pages in the hole between the regions, behind the last one and at the largest page number; and one valid page.
    let wrong = [FIRST_END, SECOND - 4096, SECOND_END, u64::from(u32::MAX) * 4096];
    let mut list: Vec<u32> = wrong.map(number).to_vec();
    list.push(number(PAGES));
    guest.inflate(&list);
    assert_eq!(guest.released_pages(), [PAGES]);
    assert_eq!(guest.count(|metrics| &metrics.refused), 4);
    assert_eq!(guest.count(|metrics| &metrics.freed_bytes), 4096);
    // A run that continues behind the end of its region.
    guest.inflate(&[number(FIRST_END - 4096), number(FIRST_END)]);
    assert_eq!(guest.released_pages(), [PAGES, FIRST_END - 4096]);
    assert_eq!(guest.count(|metrics| &metrics.refused), 5);
}

#[test]
fn malformed_lists_are_harmless() {
    let mut guest = BalloonGuest::new();
    guest.fill();
    guest.inner.memory.write_slice(&[0xff; 7], GuestAddress(LISTS)).unwrap();
    guest.request(INFLATE, &[(LISTS, 3, false)]);
    guest.request(INFLATE, &[(LISTS, 7, false)]);
    guest.request(INFLATE, &[(LISTS, 4096, true)]);
    assert!(guest.released_pages().is_empty());
    assert_eq!(guest.count(|metrics| &metrics.inflated_pages), 1);
    // A list longer than any driver's, which repeats the same megabyte: only its first pages count.
    let buffers = [(0, FIRST_END as u32, false); 8];
    guest.request(INFLATE, &buffers);
    assert_eq!(guest.count(|metrics| &metrics.inflated_pages), 1 + MAX_PAGES as u64);
}

#[test]
fn reported_ranges_are_released_as_whole_pages() {
    let mut guest = BalloonGuest::new();
    guest.fill();
    guest.request(
        REPORTING,
        &[(PAGES, 0x3000, true), (PAGES + 0x4800, 0x2000, true), (PAGES + 0x8010, 0x20, true), (SECOND, 0x2000, true)],
    );
    assert_eq!(
        guest.released_pages(),
        [PAGES, PAGES + 0x1000, PAGES + 0x2000, PAGES + 0x5000, SECOND, SECOND + 0x1000]
    );
    assert_eq!(guest.count(|metrics| &metrics.reported_bytes), 0x3000 + 0x2000 + 0x20 + 0x2000);
    // A device-readable buffer is not free memory.
    guest.request(REPORTING, &[(PAGES + 0x10000, 0x1000, false)]);
    assert!(guest.has_content(PAGES + 0x10000));
}

#[test]
fn without_statistics_the_reporting_queue_is_queue_2() {
    let mut guest = BalloonGuest::new();
    guest.inner.device.acknowledge(guest.inner.device.features() & !STATS_VQ);
    guest.fill();
    guest.request(STATISTICS, &[(PAGES, 0x1000, true)]);
    assert_eq!(guest.released_pages(), [PAGES]);
}

#[test]
fn shared_pages_are_released_for_all_mappings() {
    use nix::sys::memfd::{MFdFlags, memfd_create};
    use std::os::unix::fs::MetadataExt;
    let file = std::fs::File::from(memfd_create(c"guest", MFdFlags::MFD_CLOEXEC).unwrap());
    file.set_len(1 << 20).unwrap();
    let part = Some(vm_memory::FileOffset::new(file.try_clone().unwrap(), 0));
    let memory = Memory::from_ranges_with_files([(GuestAddress(0), 1 << 20, part)]).unwrap();
    memory.write_slice(&[1; 0x8000], GuestAddress(0)).unwrap();
    let before = file.metadata().unwrap().blocks();
    super::discard::discard(&super::BalloonMetrics::default(), &memory, 0x1000..0x5000);
    assert_eq!(before - file.metadata().unwrap().blocks(), 0x4000 / 512);
    assert_eq!(memory.read_obj::<u8>(GuestAddress(0x1000)).unwrap(), 0);
    assert_eq!(memory.read_obj::<u8>(GuestAddress(0x5000)).unwrap(), 1);
}

#[test]
fn the_configuration_space_carries_target_and_actual_size() {
    let balloon = Balloon::new();
    let mut device = balloon.device();
    balloon.set_target(0x0102_0304);
    let mut config = [0xff; 12];
    device.read_config(0, &mut config);
    assert_eq!(config, [4, 3, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
    device.write_config(4, &7u32.to_le_bytes());
    assert_eq!(balloon.actual(), 7);
    // Byte by byte, across the borders of the field, and beyond.
    device.write_config(5, &[1]);
    assert_eq!(balloon.actual(), 0x107);
    device.write_config(0, &[0xff; 5]);
    device.write_config(u32::MAX, &[0xff; 8]);
    device.write_config(7, &[0, 0xff, 0xff]);
    assert_eq!((balloon.target(), balloon.actual()), (0x0102_0304, 0x1ff));
    device.reset();
    assert_eq!((balloon.target(), balloon.actual()), (0x0102_0304, 0));
}

#[test]
fn statistics_arrive_on_request() {
    let mut guest = BalloonGuest::new();
    let entry = |tag: u16, value: u64| [&tag.to_le_bytes()[..], &value.to_le_bytes()].concat();
    let send_statistics = |guest: &mut BalloonGuest, free: u64| {
        let list = [entry(4, free), entry(99, 5), entry(5, 1 << 30), vec![1, 2, 3]].concat();
        guest.inner.memory.write_slice(&list, GuestAddress(LISTS)).unwrap();
        guest.inner.drivers[usize::from(STATISTICS)].submit(&[(LISTS, list.len() as u32, false)]);
    };
    send_statistics(&mut guest, 1000);
    guest.inner.start(STATISTICS);
    let balloon = guest.balloon.clone();
    let free = || balloon.statistics().and_then(|statistics| statistics.free);
    eventually("statistics", || free() == Some(1000));
    assert_eq!(guest.balloon.statistics().and_then(|statistics| statistics.total), Some(1 << 30));
    // The device keeps the buffer until statistics are requested.
    assert_eq!(guest.inner.drivers[usize::from(STATISTICS)].take_used(), None);
    guest.balloon.request_statistics();
    guest.inner.wait(STATISTICS);
    guest.inner.stop(STATISTICS);
    // A buffer that the device keeps when the queue stops is processed again.
    send_statistics(&mut guest, 2000);
    for _ in 0..2 {
        guest.inner.start(STATISTICS);
        eventually("statistics", || free() == Some(2000));
        guest.inner.stop(STATISTICS);
    }
}

#[test]
fn a_reset_in_flight_ends_the_thread() {
    let mut guest = BalloonGuest::new();
    for _ in 0..20 {
        for index in 0..4 {
            guest.inner.renew(index);
            for _ in 0..8 {
                guest.inner.drivers[usize::from(index)].submit(&[(PAGES, 0x4000, index == REPORTING)]);
            }
            guest.inner.start(index);
        }
        assert!(guest.inner.device.start(ring(&guest.inner.drivers[0], 0)).is_err());
        assert!(guest.inner.device.start(ring(&guest.inner.drivers[0], 4)).is_err());
        guest.inner.device.reset();
        assert!(guest.inner.device.stop(0).is_none());
    }
}

#[test]
fn target_and_actual_size_survive_a_restore() {
    let one = Balloon::new();
    one.set_target(512);
    let mut device = one.device();
    device.write_config(4, &[9, 0, 0, 0]);
    let other = Balloon::new();
    let mut there = other.device();
    there.restore(device.save()).unwrap();
    assert_eq!((other.target(), other.actual()), (512, 9));
    assert!(matches!(there.restore(DeviceState::Rng), Err(StateError::FailureKind { .. })));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn exactly_the_listed_pages_are_released(
        pages in prop::collection::vec(prop_oneof![
            8 => number(PAGES)..number(FIRST_END) + 4,
            4 => number(SECOND) - 2..number(SECOND_END) + 2,
            1 => number(SECOND_END)..u32::MAX,
        ], 1..200),
    ) {
        let mut guest = BalloonGuest::new();
        guest.fill();
        guest.inflate(&pages);
        let mut right: Vec<u64> = pages.iter().map(|page| u64::from(*page) * 4096).collect();
        right.retain(|page| (PAGES..FIRST_END).contains(page) || (SECOND..SECOND_END).contains(page));
        right.sort_unstable();
        right.dedup();
        prop_assert_eq!(guest.released_pages(), right.clone());
        prop_assert_eq!(guest.count(|metrics| &metrics.freed_bytes), right.len() as u64 * 4096);
    }

    #[test]
    fn parsing_statistics_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        super::Statistics::parse(&bytes);
    }
}
