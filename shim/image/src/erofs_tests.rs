//! Tests the EROFS writer without a kernel. The tests that mount are in `tests/store`.

use super::*;
use crate::budget::{Cancel, MemoryPool};
use crate::layer::index::{FileAttributes, LayerEntry, LayerEntryKind};
use crate::tree::tests::{layer, measured, merge};
use proptest::prelude::*;

fn merged(names: &[String]) -> MergedTree {
    let entry = |name: &String| LayerEntry {
        path: name.as_bytes().to_vec(),
        meta: FileAttributes { mode: 0o644, ..FileAttributes::default() },
        kind: LayerEntryKind::File(FileData::Flat { size: 1, block: 0 }),
    };
    merge([&layer(names.iter().map(entry).collect())]).unwrap()
}

fn written(tree: &MergedTree, blobs: &[LayerBlob]) -> Result<ErofsMetadata, ErofsError> {
    write_erofs(tree, blobs, &mut Budget::image(&MemoryPool::new(1 << 30), &Cancel::default(), 1 << 20))
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + N].iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

/// Returns the names in the root directory, parsed according to the format.
fn root_names(bytes: &[u8]) -> Vec<Vec<u8>> {
    let meta = number::<4>(bytes, SUPERBLOCK_OFFSET + 40) as usize * BLOCK_SIZE;
    let inode = meta + number::<2>(bytes, SUPERBLOCK_OFFSET + 14) as usize * INODE_UNIT;
    let (format, size) = (number::<2>(bytes, inode), number::<8>(bytes, inode + 8) as usize);
    let at = if format >> 1 == 2 { inode + INODE_SIZE } else { number::<4>(bytes, inode + 16) as usize * BLOCK_SIZE };
    let mut names = Vec::new();
    for start in (0..size).step_by(BLOCK_SIZE) {
        let block = &bytes[at + start..at + size.min(start + BLOCK_SIZE)];
        let count = number::<2>(block, 8) as usize / DIRENT_SIZE;
        for entry in 0..count {
            let from = number::<2>(block, entry * DIRENT_SIZE + 8) as usize;
            let to = if entry + 1 < count {
                number::<2>(block, (entry + 1) * DIRENT_SIZE + 8) as usize
            } else {
                block.len()
            };
            names.push(block[from..to].split(|&byte| byte == 0).next().unwrap().to_vec());
        }
    }
    names
}

#[test]
fn the_device_table_says_where_the_blobs_are() {
    let blob = LayerBlob { diff_id: Digest([0xab; 32]), length: 5 * BLOCK };
    let metadata = written(&merged(&["a".into()]), &[blob]).unwrap();
    let bytes = &metadata.bytes;
    assert_eq!(number::<4>(bytes, SUPERBLOCK_OFFSET), u64::from(MAGIC));
    assert_eq!(
        (number::<2>(bytes, SUPERBLOCK_OFFSET + 86), number::<2>(bytes, SUPERBLOCK_OFFSET + 88)),
        (1, FIRST_DEVICE_SLOT as u64)
    );
    let slot = FIRST_DEVICE_SLOT * DEVICE_SLOT_SIZE;
    assert_eq!(&bytes[slot..slot + 64], "ab".repeat(32).as_bytes());
    assert_eq!((number::<4>(bytes, slot + 64), number::<4>(bytes, slot + 68)), (5, bytes.len() as u64 / BLOCK));
    assert_eq!(metadata.used, [0]);
}

#[test]
fn unreferenced_blobs_are_left_out() {
    let tree = merge([&layer(Vec::new())]).unwrap();
    let metadata = written(&tree, &[LayerBlob { diff_id: Digest([1; 32]), length: BLOCK }]).unwrap();
    assert!(metadata.used.is_empty());
    assert_eq!(root_names(&metadata.bytes), [b".".as_slice(), b".."]);
}

#[test]
fn more_than_16_tib_are_refused() {
    let blob = LayerBlob { diff_id: Digest([1; 32]), length: u64::from(u32::MAX) * BLOCK };
    assert_eq!(written(&merged(&["a".into()]), &[blob]).unwrap_err(), ErofsError::Oversize);
}

#[test]
fn holes_cannot_make_the_metadata_huge() {
    let hole = |number: u32| LayerEntry {
        path: number.to_string().into_bytes(),
        meta: FileAttributes::default(),
        kind: LayerEntryKind::File(FileData::Chunks { size: 1 << 28, bits: 0, chunks: vec![] }),
    };
    let tree = merge([&layer((0..2100).map(hole).collect())]).unwrap();
    assert_eq!(written(&tree, &[]).unwrap_err(), ErofsError::MetadataTooLarge);
}

#[test]
fn what_does_not_fit_the_budget_is_not_written() {
    let names: Vec<_> = (0..20_000).map(|n| format!("{n:0200}")).collect();
    let (tree, budget) = measured([&layer(
        names.iter().map(|name| crate::tree::tests::entry(name, LayerEntryKind::Directory)).collect(),
    )]);
    let (tree, needed) = (tree.unwrap(), budget.peak());
    let mut budget = Budget::image(&MemoryPool::new(needed / 4), &Cancel::default(), 1 << 20);
    assert!(matches!(write_erofs(&tree, &[], &mut budget), Err(ErofsError::Budget(BudgetError::Memory { .. }))));
    let mut budget = Budget::image(&MemoryPool::new(64 << 20), &Cancel::default(), 1 << 20);
    let written = write_erofs(&tree, &[], &mut budget).unwrap();
    assert!(budget.peak() > written.bytes.len() as u64 && budget.steps() < 120_000);
}

#[test]
fn device_numbers_have_linuxs_form() {
    assert_eq!(encode_device_number(DeviceNumber { major: 259, minor: 0x12345 }), 0x1231_0345);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn directories_hold_their_names_in_order(names in prop::collection::btree_set("[ -.0-9a-zA-Z\u{e9}]{1,120}", 0..150)) {
        let mut names: Vec<String> = names.into_iter().filter(|name| name != "." && name != "..").collect();
        let metadata = written(&merged(&names), &[LayerBlob { diff_id: Digest([1; 32]), length: BLOCK }]).unwrap();
        names.extend([".".to_owned(), "..".to_owned()]);
        let mut names: Vec<_> = names.into_iter().map(String::into_bytes).collect();
        names.sort();
        prop_assert_eq!(root_names(&metadata.bytes), names);
        prop_assert_eq!(metadata.bytes.len() % BLOCK_SIZE, 0);
    }
}
