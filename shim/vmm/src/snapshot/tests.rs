//! Tests the snapshot format: a written snapshot is read back unchanged, and any other bytes are rejected.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use super::*;
use nacelle_base::{Classify, FailureKind};
use proptest::prelude::*;
use std::os::unix::fs::{FileExt, MetadataExt};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestRegionMmap};

const MIB: usize = 1 << 20;

type Layout = Vec<(GuestAddress, usize)>;

fn write<S: Serialize>(dir: &Path, state: &S, memory: &Memory) -> Result<(), SnapshotError> {
    let directory = SnapshotDirectory::create(dir)?;
    super::write(
        directory.files(),
        &Document { memory_mib: 8, hotplug_mib: 0, working_set: WorkingSet::default(), machine: state },
        memory,
    )?;
    directory.commit()
}

fn read<S: DeserializeOwned>(dir: &Path) -> Result<Snapshot<S>, SnapshotError> {
    super::read(SnapshotFiles::open(dir)?)
}

/// Maps a snapshot's whole memory privately.
fn map<S>(saved: &Snapshot<S>) -> Memory {
    let mut at = 0;
    let regions = layout().into_iter().map(|(start, size)| {
        let file = FileOffset::new(saved.memory.try_clone().unwrap(), at);
        at += size as u64;
        let mapping = MmapRegionBuilder::new(size)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_PRIVATE)
            .with_file_offset(file);
        GuestRegionMmap::new(mapping.build().unwrap(), start).unwrap()
    });
    Memory::from_regions(regions.collect()).unwrap()
}

fn layout() -> Layout {
    vec![(GuestAddress(0), 5 * MIB), (GuestAddress(1 << 32), 3 * MIB)]
}

/// Returns memory with data at its ends and across the border of two pieces, and holes between.
fn memory() -> Memory {
    let memory = Memory::from_ranges(&layout()).unwrap();
    memory.write_slice(b"first", GuestAddress(0)).unwrap();
    memory.write_slice(&[7; 3 * 4096], GuestAddress(MIB as u64 - 4096)).unwrap();
    memory.write_slice(&[0; 4096], GuestAddress(3 * MIB as u64)).unwrap();
    memory.write_slice(b"last", GuestAddress((1 << 32) + 3 * MIB as u64 - 4)).unwrap();
    memory
}

fn bytes(memory: &Memory) -> Vec<u8> {
    let mut all = vec![0; 8 * MIB];
    let (low, high) = all.split_at_mut(5 * MIB);
    memory.read_slice(low, GuestAddress(0)).unwrap();
    memory.read_slice(high, GuestAddress(1 << 32)).unwrap();
    all
}

fn entries(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_written_snapshot_is_read_back() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().join("s1");
    let memory = memory();
    write(&dir, &vec!["a state"], &memory).unwrap();
    assert_eq!(entries(directory.path()), ["s1"]);
    assert_eq!(entries(&dir), [MEMORY_FILE, STATE_FILE]);

    let saved: Snapshot<Vec<String>> = read(&dir).unwrap();
    assert_eq!(saved.document.machine, ["a state"]);
    let file = std::fs::metadata(dir.join(MEMORY_FILE)).unwrap();
    assert_eq!((file.len(), file.mode() & 0o777), (8 * MIB as u64, 0o600));
    assert!(file.blocks() * 512 < 4 * MIB as u64, "{} blocks: zeros are holes", file.blocks());

    // Two VMs from one snapshot: a write of one is visible neither to the other nor in the file.
    let [one, two] = [(); 2].map(|()| map(&saved));
    assert!(bytes(&one) == bytes(&memory));
    one.write_slice(b"changed", GuestAddress(2 * MIB as u64)).unwrap();
    assert!(bytes(&two) == bytes(&memory));

    // A restored VM can be saved again; the pages that it never touched are only in the file.
    let again = directory.path().join("s2");
    let three = map(&saved);
    three.write_slice(b"changed", GuestAddress(2 * MIB as u64)).unwrap();
    write(&again, &(), &three).unwrap();
    let saved: Snapshot<()> = read(&again).unwrap();
    assert!(bytes(&map(&saved)) == bytes(&one));
}

#[test]
fn snapshots_are_written_atomically() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().join("s");
    write(&dir, &1, &memory()).unwrap();
    let error = write(&dir, &2, &memory()).unwrap_err();
    assert_eq!(error.kind(), FailureKind::AlreadyExists, "{error}");
    assert_eq!(read::<i32>(&dir).unwrap().document.machine, 1, "the old one stays");

    // The target directory appears while the snapshot is written.
    let partial = SnapshotDirectory::create(&directory.path().join("late")).unwrap();
    super::write(
        partial.files(),
        &Document { memory_mib: 8, hotplug_mib: 0, working_set: WorkingSet::default(), machine: 6 },
        &memory(),
    )
    .unwrap();
    std::fs::create_dir_all(directory.path().join("late/x")).unwrap();
    assert_eq!(partial.commit().unwrap_err().kind(), FailureKind::AlreadyExists);

    drop(SnapshotDirectory::create(&directory.path().join("never")).unwrap());
    assert_eq!(entries(directory.path()), ["late", "s"]);

    // An empty target directory is accepted.
    std::fs::create_dir(directory.path().join("empty")).unwrap();
    write(&directory.path().join("empty"), &3, &memory()).unwrap();
    assert_eq!(read::<i32>(&directory.path().join("empty")).unwrap().document.machine, 3);

    let nothing = directory.path().join("nothing");
    let error = SnapshotDirectory::create(&nothing).unwrap().commit().unwrap_err();
    assert!(matches!(error, SnapshotError::NotASnapshot { .. }), "nothing was saved: {error}");
    assert!(!nothing.exists());
    let full = SnapshotError::Io { what: "write", path: nothing, source: std::io::ErrorKind::StorageFull.into() };
    assert_eq!(full.kind(), FailureKind::Exhausted);

    for place in ["/", "..", ""] {
        assert_eq!(write(Path::new(place), &4, &memory()).unwrap_err().kind(), FailureKind::Invalid, "{place}");
    }
    assert_eq!(read::<i32>(&directory.path().join("none")).unwrap_err().kind(), FailureKind::NotFound);
}

/// Descriptors that processes share have one file position.
#[test]
fn shared_files_are_read_and_written_at_any_position() {
    let [state, memory_file] = [(); 2].map(|()| tempfile::tempfile().unwrap());
    let files = SnapshotFiles { state, memory: memory_file, directory: "/templates/x".into(), pagemap: None };
    let share = || files.try_clone().unwrap();
    let document = |machine| Document { memory_mib: 8, hotplug_mib: 0, working_set: WorkingSet::default(), machine };
    let before = Memory::from_ranges(&layout()).unwrap();
    before.write_slice(&[3; 2 * MIB], GuestAddress(2 * MIB as u64)).unwrap();
    super::write(&share(), &document("a longer state"), &before).unwrap();
    super::write(&share(), &document("a state"), &memory()).unwrap();
    for _ in 0..2 {
        let saved: Snapshot<String> = super::read(share()).unwrap();
        assert_eq!(saved.document.machine, "a state");
        assert!(bytes(&map(&saved)) == bytes(&memory()), "nothing is left of the first snapshot");
    }
    files.state.set_len(5).unwrap();
    let error = super::read::<String>(share()).unwrap_err();
    assert_eq!(error.to_string(), "/templates/x/state is not the state file of a snapshot");
    files.state.set_len(MAX_STATE_BYTES + 1).unwrap();
    assert!(matches!(super::read::<String>(share()).unwrap_err(), SnapshotError::TooLarge { .. }));
}

#[test]
fn a_memory_file_of_the_wrong_length_is_rejected() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().join("s");
    write(&dir, &1, &memory()).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(dir.join(MEMORY_FILE)).unwrap();
    for length in [0, (8 << 20) - 1, (8 << 20) + 1, 1 << 40] {
        file.set_len(length).unwrap();
        let error = read::<i32>(&dir).unwrap_err();
        assert!(matches!(error, SnapshotError::Length { got, expected, .. } if (got, expected) == (length, 8 << 20)));
    }
    std::fs::remove_file(dir.join(MEMORY_FILE)).unwrap();
    assert_eq!(read::<i32>(&dir).unwrap_err().kind(), FailureKind::NotFound);
}

fn decode(bytes: &[u8]) -> Result<Vec<u64>, SnapshotError> {
    envelope::decode(bytes, Path::new("state"))
}

#[test]
fn each_kind_of_damage_has_its_error() {
    let good = envelope::encode(&vec![1_u64, 2, 3]).unwrap();
    assert_eq!(decode(&good).unwrap(), [1, 2, 3]);
    assert!(matches!(decode(&good[..31]).unwrap_err(), SnapshotError::NotASnapshot { .. }));
    assert!(matches!(decode(&good[..good.len() - 1]).unwrap_err(), SnapshotError::Length { .. }));
    assert!(matches!(decode(&[&good[..], b" "].concat()).unwrap_err(), SnapshotError::Length { .. }));
    let decode_with_byte = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        decode(&bytes).unwrap_err()
    };
    assert!(matches!(decode_with_byte(0, b'X'), SnapshotError::NotASnapshot { .. }));
    let newer = decode_with_byte(8, 3);
    assert_eq!(newer.to_string(), "state has format version 3; this Nacelle reads 1 to 2");
    assert_eq!(newer.kind(), FailureKind::Unsupported);
    assert!(matches!(decode_with_byte(8, 0), SnapshotError::Version { got: 0, .. }));
    assert!(matches!(decode_with_byte(12, !good[12]), SnapshotError::Checksum { .. }));
    assert!(matches!(decode_with_byte(8, 1), SnapshotError::Checksum { .. }), "another version");
    assert!(matches!(decode_with_byte(33, 4), SnapshotError::Checksum { .. }));
    let longer = envelope::add_header(2, &[&good[32..], &[0]].concat()).unwrap();
    let error = decode(&longer).unwrap_err();
    assert!(matches!(error, SnapshotError::Decode { .. }));
    assert!(nacelle_base::Chain(&error).to_string().ends_with("1 bytes follow the document"));
    for strange in [&b"\x9f"[..], b"\x9b\xff\xff\xff\xff\xff\xff\xff\xff\x01", &[0x81; 1000]] {
        let bytes = envelope::add_header(2, strange).unwrap();
        assert!(matches!(decode(&bytes).unwrap_err(), SnapshotError::Decode { .. }));
    }
    let other = envelope::encode(&"text").unwrap();
    assert!(matches!(decode(&other).unwrap_err(), SnapshotError::Decode { .. }));
    let large = vec![0; MAX_STATE_BYTES as usize + 1];
    assert!(matches!(decode(&large).unwrap_err(), SnapshotError::TooLarge { .. }));
    assert!(matches!(envelope::encode(&large).unwrap_err(), SnapshotError::TooLarge { .. }));
}

#[test]
fn each_version_is_decoded_and_the_last_one_is_encoded_unchanged() {
    let first = b"NACELLE\x1a\x01\x00\x00\x00\xbb\x02\x08\xca\x07\x00\x00\x00\x00\x00\x00\x00\0\0\0\0\0\0\0\0[1,2,3]";
    assert_eq!(decode(first).unwrap(), [1, 2, 3]);
    let second =
        b"NACELLE\x1a\x02\x00\x00\x00\xce\x98\x16\x72\x04\x00\x00\x00\x00\x00\x00\x00\0\0\0\0\0\0\0\0\x83\x01\x02\x03";
    let encoded = envelope::encode(&[1, 2, 3]).unwrap();
    assert_eq!(decode(&encoded).unwrap(), [1, 2, 3]);
    assert_eq!(encoded[..], second[..]);
}

/// The state of a VM with one vCPU and an entropy device, as each version wrote it.
#[test]
fn vm_states_of_all_versions_are_decoded() {
    let golden: [(u32, &[u8]); 2] = [
        (1, include_bytes!("../../tests/corpus/snapshot/document")),
        (2, include_bytes!("../../tests/corpus/snapshot/document-2")),
    ];
    for (version, golden) in golden {
        let bytes = envelope::add_header(version, golden).unwrap();
        let document: Document<MachineState> = envelope::decode(&bytes, Path::new("state")).unwrap();
        assert_eq!((document.memory_mib, document.machine.vcpus.len()), (16, 1));
        assert_eq!(document.machine.devices[0].device.kind(), DeviceKind::Rng);
        let encoded = envelope::encode(&document).unwrap();
        assert!(
            encoded[32..] == *include_bytes!("../../tests/corpus/snapshot/document-2"),
            "a change that needs a version of its own"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_changed_byte_is_detected(at in 0..36_usize, by in 1..=255_u8) {
        let mut bytes = envelope::encode(&[1, 2, 3]).unwrap();
        prop_assert_eq!(bytes.len(), 36);
        // The last eight bytes of the header are reserved and not checked.
        prop_assume!(!(24..32).contains(&at));
        bytes[at] ^= by;
        prop_assert!(decode(&bytes).is_err());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn memory_is_written_and_read_back(pages in proptest::collection::vec((0..768_u64, any::<u8>()), 0..20)) {
        let directory = tempfile::tempdir().unwrap();
        let layout: Layout = vec![(GuestAddress(0), 3 * MIB)];
        let memory = Memory::from_ranges(&layout).unwrap();
        for (page, byte) in pages {
            memory.write_slice(&[byte; 4096], GuestAddress(page * 4096)).unwrap();
        }
        let file = std::fs::File::options().read(true).write(true).create_new(true).open(directory.path().join("m")).unwrap();
        let pagemap = std::fs::File::open("/proc/self/pagemap").ok();
        memory::write(&file, &memory, pagemap.as_ref()).unwrap();
        let (mut expected, mut got) = (vec![0; 3 * MIB], vec![0; 3 * MIB]);
        memory.read_slice(&mut expected, GuestAddress(0)).unwrap();
        file.read_exact_at(&mut got, 0).unwrap();
        prop_assert!(expected == got);
    }
}
