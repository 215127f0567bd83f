//! Encodes and decodes the index of a layer: the content of the tar without the files' data, in the compact form of the store. It
//! is written and read entry by entry, so that no layer is in memory in another form. The bytes come from our own disk, but they
//! are read as if they were hostile.

use super::{BLOCK, MAX_PATH};
use crate::budget::{Budget, BudgetError};
use crate::wire;
use nacelle_model::digest::Digest;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

const MAGIC: &[u8; 8] = b"NACLAYR1";

/// The maximum number of chunks of a sparse file; larger files have larger chunks.
pub const MAX_FILE_CHUNKS: u64 = 1 << 16;

/// The bytes reserved for a number that is known only at the end.
const PADDED_NUMBER_BYTES: usize = 10;
/// The bytes before the entries: the magic, the length of the blob and the number of entries.
const HEADER_BYTES: usize = MAGIC.len() + 2 * PADDED_NUMBER_BYTES;
/// The length in bytes of the checksum at the end: the SHA-256 of all bytes before it.
pub const CHECKSUM_BYTES: usize = 32;
/// The length in bytes of an index without entries.
pub const MIN_INDEX_BYTES: u64 = (HEADER_BYTES + CHECKSUM_BYTES) as u64;
/// The least number of bytes by which the buffer of an index grows.
const MIN_GROWTH_BYTES: usize = 64 << 10;

/// One entry of the tar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerEntry {
    /// The path without `/` at either end and without `.` and `..`; empty for the root.
    pub path: Vec<u8>,
    /// The owner, the times and the extended attributes.
    pub meta: FileAttributes,
    /// The kind of the entry.
    pub kind: LayerEntryKind,
}

/// The attributes that every file has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileAttributes {
    /// The permissions with setuid, setgid and sticky, without the file type.
    pub mode: u16,
    /// The owner's UID.
    pub uid: u32,
    /// The group's GID.
    pub gid: u32,
    /// The modification time in seconds since 1970.
    pub mtime: i64,
    /// The nanoseconds of the modification time.
    pub nanos: u32,
    /// The extended attributes, full names and values, sorted by name, each name once.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// The kinds of an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LayerEntryKind {
    /// A directory.
    Directory,
    /// A file.
    File(FileData),
    /// A symbolic link and its target.
    Symlink(Vec<u8>),
    /// One more name of the file at this path, which is as clean as `LayerEntry::path`.
    Hardlink(Vec<u8>),
    /// A character device.
    Char(DeviceNumber),
    /// A block device.
    Block(DeviceNumber),
    /// A named pipe.
    Fifo,
    /// The path does not exist in the layers below.
    Whiteout,
    /// The directory hides all entries that it has in the layers below.
    Opaque,
}

/// A device number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceNumber {
    /// The major number, 12 bits.
    pub major: u32,
    /// The minor number, 20 bits.
    pub minor: u32,
}

/// The position of a file's data in the blob.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileData {
    /// The data are in one piece.
    Flat {
        /// The size in bytes.
        size: u64,
        /// The first block of the blob; 0 if the file is empty.
        block: u32,
    },
    /// The data are in chunks of equal size. Ranges without a chunk are zeros.
    Chunks {
        /// The size in bytes, including the holes.
        size: u64,
        /// The binary logarithm of the chunk size in blocks: a chunk has `BLOCK << bits` bytes.
        bits: u8,
        /// The number of the chunk and its first block in the blob, in ascending order of numbers.
        chunks: Vec<(u32, u32)>,
    },
}

impl FileData {
    /// Returns whether any of the data are in the blob.
    pub fn has_stored_bytes(&self) -> bool {
        match self {
            FileData::Flat { size, .. } => *size > 0,
            FileData::Chunks { chunks, .. } => !chunks.is_empty(),
        }
    }

    /// Checks that all of the data are in a blob of `blocks` blocks. Returns the rule that they violate.
    pub fn check(&self, blocks: u64) -> Result<(), &'static str> {
        match self {
            FileData::Flat { size, block } if u64::from(*block) + size.div_ceil(BLOCK) > blocks => {
                Err("its data are not in the blob")
            }
            FileData::Flat { .. } => Ok(()),
            FileData::Chunks { size, bits, chunks } => {
                let chunk =
                    BLOCK.checked_shl(u32::from(*bits)).filter(|_| *bits <= 31).ok_or("its chunks are too big")?;
                let ascending = chunks.windows(2).all(|pair| matches!(pair, [a, b] if a.0 < b.0));
                let inside = chunks.iter().all(|&(number, block)| {
                    u64::from(number) < size.div_ceil(chunk) && u64::from(block) + chunk / BLOCK <= blocks
                });
                if ascending && inside && size.div_ceil(chunk) <= MAX_FILE_CHUNKS {
                    Ok(())
                } else {
                    Err("its chunks are not in the blob or not in order")
                }
            }
        }
    }
}

/// Reasons that bytes are not a valid index.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum IndexError {
    /// Another version wrote the index, or it is truncated or corrupt.
    #[error("its magic number or checksum is wrong")]
    Damaged,
    /// The checksum matches but an entry is invalid.
    #[error("entry {entry} is invalid: {why}")]
    Entry {
        /// The entry's number.
        entry: u64,
        /// The rule that the entry violates.
        #[serde(deserialize_with = "wire::text")]
        why: Cow<'static, str>,
    },
}

/// An index that is being written.
#[derive(Debug)]
pub struct IndexWriter {
    bytes: Vec<u8>,
    count: u64,
}

impl IndexWriter {
    /// Returns an index without entries.
    pub fn new() -> Self {
        IndexWriter { bytes: vec![0; HEADER_BYTES], count: 0 }
    }

    /// Adds an entry. The memory for it is charged first.
    pub fn push(&mut self, entry: &LayerEntry, budget: &mut Budget) -> Result<(), BudgetError> {
        self.grow(encoded_length(entry), budget)?;
        encode_entry(&mut self.bytes, entry);
        self.count += 1;
        Ok(())
    }

    fn grow(&mut self, more: usize, budget: &mut Budget) -> Result<(), BudgetError> {
        let needed = self.bytes.len() + more + CHECKSUM_BYTES;
        if needed > self.bytes.capacity() {
            let capacity = needed + (needed / 4).max(MIN_GROWTH_BYTES);
            budget.charge((capacity - self.bytes.capacity()) as u64)?;
            self.bytes.reserve_exact(capacity - self.bytes.len());
        }
        Ok(())
    }

    /// The number of entries so far.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the complete index of a layer whose blob has `blob_length` bytes.
    pub fn finish(mut self, blob_length: u64) -> Vec<u8> {
        let mut head = MAGIC.to_vec();
        encode_padded_number(&mut head, blob_length);
        encode_padded_number(&mut head, self.count);
        if let Some(place) = self.bytes.get_mut(..HEADER_BYTES) {
            place.copy_from_slice(&head);
        }
        let sum = Digest::of(&self.bytes);
        self.bytes.extend_from_slice(&sum.0);
        self.bytes
    }
}

/// An index whose checksum has been verified. Its entries are decoded one by one.
#[derive(Clone, Copy, Debug)]
pub struct LayerIndex<'a> {
    /// The length of the blob in bytes, a multiple of `BLOCK`.
    pub blob_length: u64,
    count: u64,
    entries: &'a [u8],
}

impl<'a> LayerIndex<'a> {
    /// Verifies everything that `IndexWriter` wrote except the entries.
    pub fn open(bytes: &'a [u8]) -> Result<Self, IndexError> {
        let (body, sum) = bytes.split_last_chunk::<CHECKSUM_BYTES>().ok_or(IndexError::Damaged)?;
        if Digest::of(body).0 != *sum {
            return Err(IndexError::Damaged);
        }
        let mut reader = IndexReader(body.strip_prefix(MAGIC).ok_or(IndexError::Damaged)?);
        match (reader.read_number(), reader.read_number()) {
            (Some(blob_length), Some(count)) if blob_length % BLOCK == 0 => {
                Ok(LayerIndex { blob_length, count, entries: reader.0 })
            }
            _ => Err(IndexError::Damaged),
        }
    }

    /// Returns the entries in the order of the tar. The iterator ends after the first invalid entry.
    pub fn entries(&self) -> LayerEntries<'a> {
        LayerEntries { reader: IndexReader(self.entries), blocks: self.blob_length / BLOCK, at: 0, count: self.count }
    }
}

/// The iterator of [`LayerIndex::entries`].
pub struct LayerEntries<'a> {
    reader: IndexReader<'a>,
    blocks: u64,
    at: u64,
    count: u64,
}

impl Iterator for LayerEntries<'_> {
    type Item = Result<LayerEntry, IndexError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.at == self.count {
            // Bytes after the last entry make the index invalid.
            return (!std::mem::take(&mut self.reader.0).is_empty()).then_some(Err(IndexError::Damaged));
        }
        let wrong = |why: &'static str| IndexError::Entry { entry: self.at, why: why.into() };
        let entry = self.reader.read_entry().ok_or(wrong("it is truncated or has an unknown kind"));
        let entry = entry.and_then(|entry| check_entry(&entry, self.blocks).map_err(wrong).map(|()| entry));
        self.at += 1;
        if entry.is_err() {
            (self.at, self.reader.0) = (self.count, &[]);
        }
        Some(entry)
    }
}

/// Checks the rules that the later stages rely on.
fn check_entry(entry: &LayerEntry, blocks: u64) -> Result<(), &'static str> {
    let is_clean = |path: &[u8]| path.is_empty() || super::split_clean(path).join(&b'/') == path;
    if !is_clean(&entry.path) || entry.path.len() > MAX_PATH {
        return Err("its path is not clean");
    }
    if entry.meta.mode > 0o7777 || entry.meta.nanos > 999_999_999 {
        return Err("mode or time is out of range");
    }
    match &entry.kind {
        LayerEntryKind::Hardlink(target) if !is_clean(target) => Err("its target is not clean"),
        LayerEntryKind::Symlink(target) if target.is_empty() || target.len() > MAX_PATH => {
            Err("its target is empty or too long")
        }
        LayerEntryKind::File(data) => data.check(blocks),
        _ => Ok(()),
    }
}

fn encode_number(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Writes a number in exactly `PADDED_NUMBER_BYTES` bytes.
fn encode_padded_number(out: &mut Vec<u8>, value: u64) {
    for digit in 0..PADDED_NUMBER_BYTES {
        let bits = (value >> (7 * digit) & 0x7f) as u8;
        out.push(if digit + 1 < PADDED_NUMBER_BYTES { bits | 0x80 } else { bits });
    }
}

/// Returns an upper bound of the bytes that `encode_entry` writes.
fn encoded_length(entry: &LayerEntry) -> usize {
    let texts =
        entry.meta.xattrs.iter().map(|(name, value)| name.len() + value.len() + 2 * PADDED_NUMBER_BYTES).sum::<usize>();
    let content = match &entry.kind {
        LayerEntryKind::Symlink(target) | LayerEntryKind::Hardlink(target) => target.len(),
        LayerEntryKind::File(FileData::Chunks { chunks, .. }) => chunks.len() * 10,
        _ => 0,
    };
    entry.path.len() + texts + content + 10 * PADDED_NUMBER_BYTES
}

fn encode_bytes(out: &mut Vec<u8>, value: &[u8]) {
    encode_number(out, value.len() as u64);
    out.extend_from_slice(value);
}

fn encode_entry(out: &mut Vec<u8>, entry: &LayerEntry) {
    let meta = &entry.meta;
    encode_bytes(out, &entry.path);
    encode_number(out, u64::from(meta.mode));
    encode_number(out, u64::from(meta.uid));
    encode_number(out, u64::from(meta.gid));
    out.extend_from_slice(&meta.mtime.to_le_bytes());
    encode_number(out, u64::from(meta.nanos));
    encode_number(out, meta.xattrs.len() as u64);
    for (name, value) in &meta.xattrs {
        encode_bytes(out, name);
        encode_bytes(out, value);
    }
    match &entry.kind {
        LayerEntryKind::Directory => out.push(0),
        LayerEntryKind::File(FileData::Flat { size, block }) => {
            out.push(1);
            encode_number(out, *size);
            encode_number(out, u64::from(*block));
        }
        LayerEntryKind::File(FileData::Chunks { size, bits, chunks }) => {
            out.push(2);
            encode_number(out, *size);
            out.push(*bits);
            encode_number(out, chunks.len() as u64);
            for (at, block) in chunks {
                encode_number(out, u64::from(*at));
                encode_number(out, u64::from(*block));
            }
        }
        LayerEntryKind::Symlink(target) => {
            out.push(3);
            encode_bytes(out, target);
        }
        LayerEntryKind::Hardlink(target) => {
            out.push(4);
            encode_bytes(out, target);
        }
        LayerEntryKind::Char(device) | LayerEntryKind::Block(device) => {
            out.push(if matches!(entry.kind, LayerEntryKind::Char(_)) { 5 } else { 6 });
            encode_number(out, u64::from(device.major));
            encode_number(out, u64::from(device.minor));
        }
        LayerEntryKind::Fifo => out.push(7),
        LayerEntryKind::Whiteout => out.push(8),
        LayerEntryKind::Opaque => out.push(9),
    }
}

struct IndexReader<'a>(&'a [u8]);

impl<'a> IndexReader<'a> {
    fn take_bytes(&mut self, length: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(head)
    }

    fn read_byte(&mut self) -> Option<u8> {
        self.take_bytes(1)?.first().copied()
    }

    fn read_number(&mut self) -> Option<u64> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.read_byte()?;
            let bits = u64::from(byte & 0x7f);
            value |= bits.checked_shl(shift).filter(|shifted| shifted >> shift == bits)?;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn read_bounded<T: TryFrom<u64>>(&mut self) -> Option<T> {
        T::try_from(self.read_number()?).ok()
    }

    fn read_bytes(&mut self) -> Option<Vec<u8>> {
        let length = self.read_bounded()?;
        Some(self.take_bytes(length)?.to_vec())
    }

    fn read_entry(&mut self) -> Option<LayerEntry> {
        let path = self.read_bytes()?;
        let (mode, uid, gid) = (self.read_bounded()?, self.read_bounded()?, self.read_bounded()?);
        let mtime = i64::from_le_bytes(self.take_bytes(8)?.try_into().ok()?);
        let nanos = self.read_bounded()?;
        let count = self.read_number()?;
        let xattrs = (0..count).map(|_| Some((self.read_bytes()?, self.read_bytes()?))).collect::<Option<_>>()?;
        let meta = FileAttributes { mode, uid, gid, mtime, nanos, xattrs };
        let kind = match self.read_byte()? {
            0 => LayerEntryKind::Directory,
            1 => LayerEntryKind::File(FileData::Flat { size: self.read_number()?, block: self.read_bounded()? }),
            2 => {
                let (size, bits, count) = (self.read_number()?, self.read_byte()?, self.read_number()?);
                let chunks =
                    (0..count).map(|_| Some((self.read_bounded()?, self.read_bounded()?))).collect::<Option<_>>()?;
                LayerEntryKind::File(FileData::Chunks { size, bits, chunks })
            }
            3 => LayerEntryKind::Symlink(self.read_bytes()?),
            4 => LayerEntryKind::Hardlink(self.read_bytes()?),
            5 => LayerEntryKind::Char(DeviceNumber { major: self.read_bounded()?, minor: self.read_bounded()? }),
            6 => LayerEntryKind::Block(DeviceNumber { major: self.read_bounded()?, minor: self.read_bounded()? }),
            7 => LayerEntryKind::Fifo,
            8 => LayerEntryKind::Whiteout,
            9 => LayerEntryKind::Opaque,
            _ => return None,
        };
        Some(LayerEntry { path, meta, kind })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::{Cancel, MemoryPool};
    use proptest::prelude::*;

    fn device() -> impl Strategy<Value = DeviceNumber> {
        (0..4096u32, 0..1_048_576u32).prop_map(|(major, minor)| DeviceNumber { major, minor })
    }

    fn path() -> impl Strategy<Value = Vec<u8>> {
        prop::collection::vec("[a-z\u{e9}]{1,8}", 0..4).prop_map(|parts| parts.join("/").into_bytes())
    }

    fn kind() -> impl Strategy<Value = LayerEntryKind> {
        prop_oneof![
            Just(LayerEntryKind::Directory),
            (0..100_000u64).prop_map(|size| LayerEntryKind::File(FileData::Flat { size, block: 3 })),
            Just(LayerEntryKind::File(FileData::Chunks { size: 1 << 30, bits: 2, chunks: vec![(0, 8), (7, 0)] })),
            "[a-z/.]{1,20}".prop_map(|target| LayerEntryKind::Symlink(target.into_bytes())),
            path().prop_map(LayerEntryKind::Hardlink),
            device().prop_map(LayerEntryKind::Char),
            device().prop_map(LayerEntryKind::Block),
            Just(LayerEntryKind::Fifo),
            Just(LayerEntryKind::Whiteout),
            Just(LayerEntryKind::Opaque),
        ]
    }

    prop_compose! {
        fn entry()(
            path in path(), kind in kind(), mode in 0..0o10000u16, uid: u32, gid: u32, mtime: i64,
            nanos in 0..1_000_000_000u32, xattr in prop::option::of(prop::collection::vec(any::<u8>(), 0..20)),
        ) -> LayerEntry {
            let xattrs = xattr.map(|value| (b"user.x".to_vec(), value)).into_iter().collect();
            LayerEntry { path, meta: FileAttributes { mode, uid, gid, mtime, nanos, xattrs }, kind }
        }
    }

    fn encode(blob_length: u64, entries: &[LayerEntry]) -> Vec<u8> {
        let mut budget = Budget::layer(&MemoryPool::new(1 << 30), &Cancel::default());
        let mut writer = IndexWriter::new();
        for entry in entries {
            let before = writer.bytes.len();
            writer.push(entry, &mut budget).unwrap();
            assert!(writer.bytes.len() - before <= encoded_length(entry));
        }
        assert!(budget.peak() + MIN_GROWTH_BYTES as u64 >= writer.bytes.capacity() as u64);
        writer.finish(blob_length)
    }

    fn decode(bytes: &[u8]) -> Result<Vec<LayerEntry>, IndexError> {
        LayerIndex::open(bytes)?.entries().collect()
    }

    fn sealed(mut body: Vec<u8>) -> Vec<u8> {
        let sum = Digest::of(&body);
        body.extend_from_slice(&sum.0);
        body
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn an_index_comes_back(entries in prop::collection::vec(entry(), 0..20)) {
            let bytes = encode(40 * BLOCK, &entries);
            prop_assert_eq!(LayerIndex::open(&bytes).unwrap().blob_length, 40 * BLOCK);
            prop_assert_eq!(decode(&bytes).unwrap(), entries);
        }

        #[test]
        fn changed_bytes_are_refused(entries in prop::collection::vec(entry(), 1..5), at: prop::sample::Index, bit in 0..8u32) {
            let mut bytes = encode(40 * BLOCK, &entries);
            *at.get_mut(&mut bytes) ^= 1u8 << bit;
            prop_assert_eq!(decode(&bytes), Err(IndexError::Damaged));
        }

        #[test]
        fn any_sealed_bytes_are_read_without_harm(entries in prop::collection::vec(entry(), 1..5), at: prop::sample::Index, byte: u8, noise in prop::collection::vec(any::<u8>(), 0..64)) {
            let mut body = encode(40 * BLOCK, &entries);
            body.truncate(body.len() - 32);
            *at.get_mut(&mut body) = byte;
            let _ = decode(&sealed(body));
            let _ = decode(&sealed([MAGIC.as_slice(), &noise].concat()));
        }
    }

    #[test]
    fn data_outside_the_blob_are_refused() {
        for data in [
            FileData::Flat { size: BLOCK * 2 + 1, block: 0 },
            FileData::Flat { size: u64::MAX, block: 0 },
            FileData::Chunks { size: 1 << 20, bits: 0, chunks: vec![(0, 2)] },
            FileData::Chunks { size: 1 << 20, bits: 60, chunks: vec![] },
            FileData::Chunks { size: 1 << 20, bits: 0, chunks: vec![(5, 0), (4, 0)] },
            FileData::Chunks { size: 4096, bits: 0, chunks: vec![(1, 0)] },
        ] {
            let entry =
                LayerEntry { path: b"a".to_vec(), meta: FileAttributes::default(), kind: LayerEntryKind::File(data) };
            let bytes = encode(2 * BLOCK, &[entry]);
            assert!(matches!(decode(&bytes), Err(IndexError::Entry { entry: 0, .. })));
        }
    }
}
