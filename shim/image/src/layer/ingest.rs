//! Turns the tar stream of one layer into a blob and an index in one pass. In memory are one entry and the encoded index, which is charged
//! to the budget.

use super::index::{DeviceNumber, FileAttributes, FileData, IndexWriter, LayerEntry, LayerEntryKind, MAX_FILE_CHUNKS};
use super::tar::{EntryHeader, EntryType, TarError, TarReader};
use super::{BLOCK, MAX_NAME, MAX_PATH, PIECE, drain, split_clean};
use crate::budget::{Budget, BudgetError};
use crate::wire;
use nacelle_base::{Classify, FailureKind};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::FileExt;

/// The maximum bytes of extended attributes of one file, so that they fit behind its inode.
const MAX_XATTRS: usize = 128 << 10;
/// The memory in bytes that a layer takes whatever its content is: the buffers of the daemon and of both workers, the pieces of a
/// download (16 of at most 408 KiB, hyper's largest), the headers before one entry in raw and parsed form, and the map of one
/// sparse file.
pub const FIXED_MEMORY: u64 = 32 << 20;

/// The maximum size of the chunks of a sparse file, as a power of two of blocks.
const MAX_CHUNK_BITS: u8 = 20;
/// The maximum size in bytes of the chunks of a sparse file.
pub const MAX_CHUNK: u64 = BLOCK << MAX_CHUNK_BITS;

/// The limits of one layer.
#[derive(Clone, Copy, Debug)]
pub struct LayerLimits {
    /// The maximum size in bytes of the unpacked layer.
    pub bytes: u64,
    /// The maximum number of entries.
    pub entries: u64,
}

impl LayerLimits {
    /// Returns the maximum length in bytes of the blob: each file may waste a part of a block, and a sparse file a part of a chunk.
    pub fn max_blob_length(self) -> u64 {
        self.bytes.saturating_add(self.entries.saturating_mul(BLOCK)).saturating_add(MAX_CHUNK)
    }
}

/// Reasons that a layer is rejected. A worker reports them.
#[derive(Debug, thiserror::Error, Serialize, Deserialize)]
pub enum LayerError {
    /// The compressed stream is damaged.
    #[error("cannot decompress the layer")]
    Decompress(
        #[source]
        #[serde(with = "wire::io_error")]
        io::Error,
    ),
    /// The stream is not a tar archive that is supported.
    #[error("the layer is not a supported tar archive")]
    Tar(#[from] TarError),
    /// The archive has an entry that is not supported.
    #[error("cannot unpack the layer's entry {path:?}: {why}")]
    Entry {
        /// The entry's path.
        #[serde(deserialize_with = "wire::string")]
        path: String,
        /// The rule that the entry violates.
        #[serde(deserialize_with = "wire::text")]
        why: Cow<'static, str>,
    },
    /// The layer exceeds a limit.
    #[error("the layer has more than {limit} {what}")]
    TooLarge {
        /// "bytes" or "entries".
        #[serde(deserialize_with = "wire::text")]
        what: Cow<'static, str>,
        /// The limit.
        limit: u64,
    },
    /// The layer exceeds its budget.
    #[error("the layer cannot be unpacked")]
    Budget(#[from] BudgetError),
    /// The blob cannot be written.
    #[error("cannot write the layer's data")]
    Write(
        #[source]
        #[serde(with = "wire::io_error")]
        io::Error,
    ),
}

impl Classify for LayerError {
    fn kind(&self) -> FailureKind {
        match self {
            LayerError::Decompress(_) | LayerError::Tar(_) | LayerError::Entry { .. } => FailureKind::Invalid,
            LayerError::TooLarge { .. } => FailureKind::Exhausted,
            LayerError::Budget(error) => error.kind(),
            LayerError::Write(error) => FailureKind::from(error.kind()),
        }
    }
}

impl LayerError {
    /// The layer has more bytes than the limit.
    pub fn too_many_bytes(limit: u64) -> LayerError {
        LayerError::TooLarge { what: "bytes".into(), limit }
    }
}

/// A layer that was read to its end.
#[derive(Debug)]
pub struct IndexedLayer {
    /// The index, as `LayerIndex` reads it.
    pub index: Vec<u8>,
    /// The length of the blob in bytes.
    pub blob_length: u64,
    /// The number of entries.
    pub entries: u64,
}

/// Reads a tar stream to its end and writes the files' data into `blob`, which the caller syncs. The index is charged to the budget for
/// the lifetime of the budget.
pub fn index_layer(
    source: impl Read,
    blob: &File,
    limits: LayerLimits,
    budget: &mut Budget,
) -> Result<IndexedLayer, LayerError> {
    unpack_tar(source, blob, limits, budget).map_err(|error| match error {
        LayerError::Tar(TarError::Read { source, .. }) if source.kind() == io::ErrorKind::FileTooLarge => {
            LayerError::too_many_bytes(limits.bytes)
        }
        error => error,
    })
}

fn unpack_tar(
    source: impl Read,
    blob: &File,
    limits: LayerLimits,
    budget: &mut Budget,
) -> Result<IndexedLayer, LayerError> {
    let limited = LimitedReader { stream: source, left: limits.bytes };
    let mut archive = TarReader::new(BufReader::with_capacity(PIECE, limited));
    let mut writer = BlobWriter { file: blob, buffer: Vec::new(), start: 0, end: 0, limits };
    let mut index = IndexWriter::new();
    while let Some(header) = archive.next_entry()? {
        budget.step(1)?;
        if index.count() >= limits.entries {
            return Err(LayerError::TooLarge { what: "entries".into(), limit: limits.entries });
        }
        if let Some(entry) = convert_entry(header, &mut archive, &mut writer)? {
            index.push(&entry, budget)?;
        }
    }
    let mut rest = archive.into_inner();
    let at = limits.bytes - rest.get_ref().left;
    drain(&mut rest).map_err(|source| TarError::Read { at, source })?;
    let (blob_length, entries) = (writer.finish()?, index.count());
    Ok(IndexedLayer { index: index.finish(blob_length), blob_length, entries })
}

/// A stream that fails when it is longer than allowed.
struct LimitedReader<R> {
    stream: R,
    left: u64,
}

impl<R: Read> Read for LimitedReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.stream.read(buffer)?;
        self.left = self.left.checked_sub(got as u64).ok_or(io::ErrorKind::FileTooLarge)?;
        Ok(got)
    }
}

/// Checks one entry and stores its data. Returns `None` for the private marks of AUFS.
fn convert_entry<R: Read>(
    header: EntryHeader,
    archive: &mut TarReader<R>,
    writer: &mut BlobWriter,
) -> Result<Option<LayerEntry>, LayerError> {
    let wrong = |why: &'static str| LayerError::Entry {
        path: String::from_utf8_lossy(&header.path).chars().take(300).collect(),
        why: why.into(),
    };
    if header.path.contains(&0) || header.link.contains(&0) {
        return Err(wrong("the name contains a NUL"));
    }
    let mut parts = split_clean(&header.path);
    if parts.iter().any(|part| part.len() > MAX_NAME) || header.path.len() > MAX_PATH {
        return Err(wrong("a part of the path is longer than 255 bytes or the whole longer than 4095"));
    }
    let mut meta = FileAttributes {
        mode: header.mode,
        uid: header.uid,
        gid: header.gid,
        mtime: header.mtime,
        nanos: header.nanos,
        xattrs: header.xattrs.clone(),
    };
    clean_xattrs(&mut meta.xattrs).map_err(wrong)?;
    let name = parts.last().copied().unwrap_or_default();
    let kind = if name == b".wh..wh..opq" {
        parts.pop();
        LayerEntryKind::Opaque
    } else if name.starts_with(b".wh..wh.") {
        return Ok(None);
    } else if let Some(name) = name.strip_prefix(b".wh.") {
        if matches!(name, b"" | b"." | b"..") {
            return Err(wrong("a whiteout names no file"));
        }
        parts.pop();
        parts.push(name);
        LayerEntryKind::Whiteout
    } else {
        match header.kind {
            _ if parts.is_empty() && header.kind != EntryType::Directory => {
                return Err(wrong("the root is not a directory"));
            }
            EntryType::Directory => LayerEntryKind::Directory,
            EntryType::File => LayerEntryKind::File(match &header.sparse {
                None => writer.write_flat(header.size, archive)?,
                Some(pieces) => writer.write_sparse(header.size, pieces, archive)?,
            }),
            EntryType::Symlink if header.link.is_empty() || header.link.len() > MAX_PATH => {
                return Err(wrong("the target of the link is empty or longer than 4095 bytes"));
            }
            EntryType::Symlink => LayerEntryKind::Symlink(header.link.clone()),
            EntryType::Hardlink => LayerEntryKind::Hardlink(split_clean(&header.link).join(&b'/')),
            EntryType::Char => LayerEntryKind::Char(DeviceNumber { major: header.device.0, minor: header.device.1 }),
            EntryType::Block => LayerEntryKind::Block(DeviceNumber { major: header.device.0, minor: header.device.1 }),
            EntryType::Fifo => LayerEntryKind::Fifo,
        }
    };
    Ok(Some(LayerEntry { path: parts.join(&b'/'), meta, kind }))
}

/// Sorts the attributes; the last of a name wins. Removes those that the guest's overlay would interpret and those that EROFS
/// cannot store.
fn clean_xattrs(xattrs: &mut Vec<(Vec<u8>, Vec<u8>)>) -> Result<(), &'static str> {
    xattrs.retain(|(name, _)| {
        let overlay = name.starts_with(b"trusted.overlay.") || name.starts_with(b"user.overlay.");
        let kept = [b"user.".as_slice(), b"trusted.", b"security."]
            .iter()
            .any(|p| name.len() > p.len() && name.starts_with(p));
        let acl = matches!(name.as_slice(), b"system.posix_acl_access" | b"system.posix_acl_default");
        (kept || acl) && !overlay
    });
    xattrs.reverse();
    xattrs.sort_by(|a, b| a.0.cmp(&b.0));
    xattrs.dedup_by(|a, b| a.0 == b.0);
    if xattrs.iter().any(|(name, value)| name.len() > MAX_NAME || name.contains(&0) || value.len() > 0xffff) {
        return Err("the name or value of an extended attribute is too long");
    }
    if xattrs.iter().map(|(name, value)| name.len() + value.len() + 8).sum::<usize>() > MAX_XATTRS {
        return Err("it has more than 128 KiB of extended attributes");
    }
    Ok(())
}

/// Writes the blob. Data begin at block boundaries; gaps are holes or zeros.
struct BlobWriter<'a> {
    file: &'a File,
    /// Bytes from `start` on that are not written yet.
    buffer: Vec<u8>,
    start: u64,
    /// The end of the reserved range, a multiple of `BLOCK`.
    end: u64,
    limits: LayerLimits,
}

impl BlobWriter<'_> {
    /// Reserves whole blocks for `size` bytes and returns their offset.
    fn reserve(&mut self, size: u64) -> Result<u64, LayerError> {
        let too_large = LayerError::too_many_bytes(self.limits.bytes);
        let end = size.checked_next_multiple_of(BLOCK).and_then(|size| self.end.checked_add(size));
        let most = self.limits.max_blob_length().min(u64::from(u32::MAX) * BLOCK);
        match end.filter(|end| *end <= most && size <= self.limits.bytes) {
            Some(end) => Ok(std::mem::replace(&mut self.end, end)),
            None => Err(too_large),
        }
    }

    fn write_flat<R: Read>(&mut self, size: u64, archive: &mut TarReader<R>) -> Result<FileData, LayerError> {
        let at = self.reserve(size)?;
        self.copy_data(at, size, archive)?;
        Ok(FileData::Flat { size, block: if size == 0 { 0 } else { block_number(at) } })
    }

    fn write_sparse<R: Read>(
        &mut self,
        size: u64,
        pieces: &[(u64, u64)],
        archive: &mut TarReader<R>,
    ) -> Result<FileData, LayerError> {
        let mut bits = 0u8;
        while size.div_ceil(BLOCK << bits) > MAX_FILE_CHUNKS {
            bits += 1;
            if bits > MAX_CHUNK_BITS {
                return Err(LayerError::TooLarge {
                    what: "bytes in one sparse file".into(),
                    limit: MAX_CHUNK * MAX_FILE_CHUNKS,
                });
            }
        }
        let chunk = BLOCK << bits;
        let mut chunks: Vec<(u32, u32)> = Vec::new();
        let mut place = 0;
        for &(mut offset, mut length) in pieces {
            while length > 0 {
                let number = u32::try_from(offset / chunk).unwrap_or(u32::MAX); // At most MAX_FILE_CHUNKS.
                if chunks.last().is_none_or(|last| last.0 != number) {
                    place = self.reserve(chunk)?;
                    if self.end > self.limits.bytes.saturating_add(chunk) {
                        return Err(LayerError::too_many_bytes(self.limits.bytes));
                    }
                    chunks.push((number, block_number(place)));
                }
                let within = offset % chunk;
                let now = length.min(chunk - within);
                self.copy_data(place + within, now, archive)?;
                offset += now;
                length -= now;
            }
        }
        Ok(FileData::Chunks { size, bits, chunks })
    }

    fn copy_data<R: Read>(&mut self, at: u64, mut size: u64, archive: &mut TarReader<R>) -> Result<(), LayerError> {
        if size == 0 {
            return Ok(());
        }
        let end = self.start + self.buffer.len() as u64;
        match at.checked_sub(end) {
            Some(gap) if gap < BLOCK => self.buffer.resize(self.buffer.len() + usize::try_from(gap).unwrap_or(0), 0),
            _ => {
                self.flush()?;
                self.start = at;
            }
        }
        while size > 0 {
            let room = PIECE.saturating_sub(self.buffer.len());
            if room == 0 {
                self.flush()?;
                continue;
            }
            let want = size.min(room as u64);
            let got = io::Read::take(&mut *archive, want)
                .read_to_end(&mut self.buffer)
                .map_err(|source| TarError::Read { at, source })?;
            size = size.saturating_sub(got as u64);
            if got == 0 {
                return Err(TarError::Read { at, source: io::ErrorKind::UnexpectedEof.into() }.into());
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), LayerError> {
        self.file.write_all_at(&self.buffer, self.start).map_err(LayerError::Write)?;
        self.start += self.buffer.len() as u64;
        self.buffer.clear();
        Ok(())
    }

    fn finish(mut self) -> Result<u64, LayerError> {
        self.flush()?;
        self.file.set_len(self.end).map_err(LayerError::Write)?;
        Ok(self.end)
    }
}

/// Returns the number of the block at this offset. `reserve` has made sure that it fits.
fn block_number(at: u64) -> u32 {
    u32::try_from(at / BLOCK).unwrap_or(u32::MAX)
}

#[cfg(test)]
#[path = "ingest_tests.rs"]
mod tests;
