//! Tests the copies of memory that changes meanwhile: with entries of a pagemap that the test writes, because not every kernel notes writes,
//! and with those of this process.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use super::*;
use nacelle_base::{Classify, FailureKind};
use proptest::prelude::*;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{Bytes, FileOffset, GuestAddress};

const MIB: u64 = 1 << 20;
/// The regions of the memory: address and size. A file is behind the first two.
const REGIONS: [(u64, u64); 3] = [(0, 3 * MIB), (1 << 32, MIB), (1 << 33, MIB)];
const PAGES: u64 = 5 * MIB / PAGE as u64;
const FIRST_ANONYMOUS: u64 = 4 * MIB / PAGE as u64;
/// Entries of a page of the process's own, of one that is in swap, and of the page of zeros.
const OWN: u64 = 1 << 63 | 1 << 56;
const SWAPPED: u64 = 1 << 62;
const ZEROS: u64 = 1 << 63;
const DIRTY: u64 = 1 << 55;
static NEVER: AtomicBool = AtomicBool::new(false);

/// A memory with two regions of a file and one of its own, and the entries of its pages.
struct World {
    directory: tempfile::TempDir,
    memory: Memory,
    source: Vec<u8>,
    pagemap: File,
}

impl World {
    fn new() -> World {
        let directory = tempfile::tempdir().unwrap();
        let file = File::create_new(directory.path().join("source")).unwrap();
        file.set_len(4 * MIB).unwrap();
        let mut source = vec![0; (PAGES as usize) * PAGE];
        for page in [0, 1, 255, 256, 700, 768, 1023] {
            let content = vec![page as u8 | 1; PAGE];
            file.write_all_at(&content, page * PAGE as u64).unwrap();
            source[page as usize * PAGE..][..PAGE].copy_from_slice(&content);
        }
        let file = File::open(directory.path().join("source")).unwrap();
        let mut at = 0;
        let regions = REGIONS.map(|(start, size)| {
            let (mapped, anonymous) = (at < 4 * MIB, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let flags = if mapped { libc::MAP_PRIVATE } else { anonymous };
            let mut region = MmapRegionBuilder::new(size as usize)
                .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
                .with_mmap_flags(flags | libc::MAP_NORESERVE);
            if mapped {
                region = region.with_file_offset(FileOffset::new(file.try_clone().unwrap(), at));
            }
            at += size;
            GuestRegionMmap::new(region.build().unwrap(), GuestAddress(start)).unwrap()
        });
        let pagemap =
            File::options().read(true).write(true).create_new(true).open(directory.path().join("pagemap")).unwrap();
        pagemap.set_len((1 << 47) / PAGE as u64 * 8).unwrap(); // addresses of processes are below
        World { memory: Memory::from_regions(regions.into()).unwrap(), directory, source, pagemap }
    }

    /// Returns the guest's address of a page.
    fn address(page: u64) -> GuestAddress {
        let mut at = page * PAGE as u64;
        for (start, size) in REGIONS {
            if at < size {
                return GuestAddress(start + at);
            }
            at -= size;
        }
        panic!("no page {page}");
    }

    fn set_entry(&self, page: u64, entry: u64) {
        let address = self.memory.get_host_address(World::address(page)).unwrap().addr();
        self.pagemap.write_all_at(&entry.to_le_bytes(), (address / PAGE * 8) as u64).unwrap();
    }

    fn write(&self, page: u64, byte: u8, entry: u64) {
        self.memory.write_slice(&[byte; PAGE], World::address(page)).unwrap();
        self.set_entry(page, entry);
    }

    /// Gives a page its first content again, as after MADV_DONTNEED. If it is then read, an anonymous page is that of zeros.
    fn release(&self, page: u64, then_read: bool) {
        let content = &self.source[page as usize * PAGE..][..PAGE];
        self.memory.write_slice(content, World::address(page)).unwrap();
        self.set_entry(page, if then_read && page >= FIRST_ANONYMOUS { ZEROS } else { 0 });
    }

    fn content(&self) -> Vec<u8> {
        let mut all = vec![0; PAGES as usize * PAGE];
        for (page, bytes) in (0..).zip(all.chunks_mut(PAGE)) {
            self.memory.read_slice(bytes, World::address(page)).unwrap();
        }
        all
    }

    fn tracker(&self, tracks_writes: bool) -> PageTracker {
        let clear_refs = tracks_writes.then(|| tempfile::tempfile().unwrap());
        PageTracker::of_files(self.pagemap.try_clone().unwrap(), clear_refs)
    }

    fn files(&self) -> SnapshotFiles {
        let path = self.directory.path().join("saved");
        std::fs::create_dir_all(&path).unwrap();
        SnapshotFiles::create(&path).unwrap()
    }
}

fn saved(files: &SnapshotFiles) -> Vec<u8> {
    let mut all = vec![0; files.memory.metadata().unwrap().len() as usize];
    files.memory.read_exact_at(&mut all, 0).unwrap();
    all
}

#[derive(Clone, Copy, Debug)]
enum Change {
    Write { page: u64, byte: u8, entry: u64 },
    Release { page: u64, then_read: bool },
}

/// Changes of all pages, and often of the same few, at both sides of a border of two copies.
fn changes() -> impl Strategy<Value = Vec<Change>> {
    let page = || prop_oneof![0..PAGES, 254_u64..258, FIRST_ANONYMOUS..FIRST_ANONYMOUS + 4];
    let write = (page(), 0_u8..3, prop_oneof![Just(OWN), Just(SWAPPED)])
        .prop_map(|(page, byte, entry)| Change::Write { page, byte, entry });
    let release = (page(), any::<bool>()).prop_map(|(page, then_read)| Change::Release { page, then_read });
    proptest::collection::vec(prop_oneof![2 => write, 1 => release], 0..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn the_copy_is_the_memory_at_the_pause(
        before in changes(),
        meanwhile in changes(),
        after in changes(),
        tracks_writes: bool,
    ) {
        let world = World::new();
        let apply = |changes: &[Change], dirty| for change in changes {
            match *change {
                Change::Write { page, byte, entry } => world.write(page, byte, entry | dirty),
                Change::Release { page, then_read } => world.release(page, then_read),
            }
        };
        let (tracker, files) = (world.tracker(tracks_writes), world.files());
        apply(&before, 0);
        let copy = LiveCopy::begin(&world.memory, &files, &tracker, &NEVER).unwrap();
        apply(&meanwhile, DIRTY);
        let content = world.content();
        let captured = copy.capture().unwrap();
        apply(&after, DIRTY);
        let pages = captured.finish().unwrap();
        prop_assert!(saved(&files) == content);
        let most = if tracks_writes { (before.len() + meanwhile.len()) as u64 } else { pages.private };
        prop_assert!(pages.paused <= most);
    }
}

#[test]
fn zeros_are_not_written_and_more_than_is_kept_in_memory_is() {
    let world = World::new();
    let (tracker, files) = (world.tracker(false), world.files());
    for page in 0..PAGES {
        world.write(page, 0, OWN);
    }
    let copy = LiveCopy::begin(&world.memory, &files, &tracker, &NEVER).unwrap();
    let pages = copy.capture().unwrap().finish().unwrap();
    assert_eq!(pages, SavedPages { private: PAGES, paused: PAGES });
    assert_eq!(files.memory.metadata().unwrap().blocks(), 0, "all of it is a hole");
    assert!(saved(&files).iter().all(|byte| *byte == 0));

    let memory = Memory::from_ranges(&[(GuestAddress(0), MAX_KEPT + 2 * MAX_RUN_BYTES)]).unwrap();
    let content = vec![7; MAX_KEPT + 2 * MAX_RUN_BYTES];
    memory.write_slice(&content, GuestAddress(0)).unwrap();
    let tracker = PageTracker::of_files(File::open("/proc/self/pagemap").unwrap(), None);
    let captured = LiveCopy::begin(&memory, &files, &tracker, &NEVER).unwrap().capture().unwrap();
    assert_eq!(captured.kept.iter().map(|(_, bytes)| bytes.len()).sum::<usize>(), MAX_KEPT);
    memory.write_slice(&[8; PAGE], GuestAddress(0)).unwrap();
    captured.finish().unwrap();
    assert!(saved(&files) == content);
}

#[test]
fn the_kernels_entries_lead_to_what_was_written() {
    let world = World::new();
    let (tracker, files) = (PageTracker::open().unwrap(), world.files());
    let write = |page: u64, byte| world.memory.write_slice(&[byte; PAGE], World::address(page)).unwrap();
    [(1, 9), (2, 9), (300, 9), (1100, 9)].into_iter().for_each(|(page, byte)| write(page, byte));
    let copy = LiveCopy::begin(&world.memory, &files, &tracker, &NEVER).unwrap();
    [(1, 8), (256, 8), (1200, 8)].into_iter().for_each(|(page, byte)| write(page, byte));
    let content = world.content();
    let captured = copy.capture().unwrap();
    [(1, 7), (2, 7), (3, 7), (1201, 7)].into_iter().for_each(|(page, byte)| write(page, byte));
    let pages = captured.finish().unwrap();
    assert!(saved(&files) == content);
    if tracker.tracks_writes() {
        assert!(pages.paused < pages.private, "{pages:?}");
    }
}

#[test]
fn a_stop_ends_each_step_and_a_file_that_fails_is_an_error() {
    let world = World::new();
    world.write(3, 9, OWN);
    let (tracker, files, stop) = (world.tracker(true), world.files(), AtomicBool::new(true));
    let stopped = |result: Result<(), SnapshotError>| assert!(matches!(result, Err(SnapshotError::Stopped)));
    let begin = || LiveCopy::begin(&world.memory, &files, &tracker, &stop);
    stopped(begin().map(drop));
    stop.store(false, Ordering::Relaxed);
    let copy = begin().unwrap();
    world.write(4, 9, OWN | DIRTY);
    stop.store(true, Ordering::Relaxed);
    stopped(copy.capture().map(drop));
    stop.store(false, Ordering::Relaxed);
    let captured = begin().unwrap().capture().unwrap();
    stop.store(true, Ordering::Relaxed);
    stopped(captured.finish().map(drop));

    let failing = SnapshotFiles { memory: File::options().read(true).write(true).open("/dev/full").unwrap(), ..files };
    let failing = SnapshotFiles { directory: Path::new("/dir").to_owned(), ..failing };
    let error = LiveCopy::begin(&world.memory, &failing, &tracker, &NEVER).err().expect("it has no length");
    assert_eq!((error.to_string().as_str(), error.kind()), ("cannot truncate /dir/memory", FailureKind::Internal));
}
