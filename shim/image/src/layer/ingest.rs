//! Turns the stream of one layer into a blob and an index in one pass: hash, decompress, hash, tar, blob.
//!
//! Two blocking threads work on a layer, so that decompressing and writing overlap: the caller's, and one that `ingest` starts
//! and that ends with it. Both end soon after the budget's caller has cancelled. In memory are one entry, the pieces in transit,
//! and the encoded index; all of it is charged to the budget.

use super::index::{DeviceNumber, FileAttributes, FileData, IndexWriter, LayerEntry, LayerEntryKind, MAX_FILE_CHUNKS};
use super::tar::{EntryHeader, EntryType, TarError, TarReader};
use super::{BLOCK, MAX_NAME, MAX_PATH, split_clean};
use crate::budget::{Budget, BudgetError, Cancel};
use nacelle_model::digest::Digest;
use sha2::{Digest as _, Sha256};
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

/// The maximum bytes of extended attributes of one file, so that they fit behind its inode.
const MAX_XATTRS: usize = 128 << 10;
/// The size in bytes of the pieces that pass between the threads and to the disk.
const PIECE: usize = 256 << 10;
/// The maximum number of pieces in transit between the threads.
const MAX_PIECES_IN_TRANSIT: usize = 8;
/// The memory in bytes that a layer takes whatever its content is: the pieces and buffers of both threads, the pieces of a
/// download (16 of at most 408 KiB, hyper's largest), the headers before one entry in raw and parsed form, and the map of one
/// sparse file.
pub const FIXED_MEMORY: u64 = 32 << 20;
/// The bytes at the beginning of a stream that identify the compression: the magic number and the longest header of a zstd frame
/// (RFC 8878, section 3.1.1.1), which is longer than the magic number of gzip.
const MAGIC_BYTES: usize = 4 + 14;
/// The window charged for a zstd stream whose first frame does not ask for a larger one, as a power of two: the largest that the
/// encoders of image builders use. A larger one is charged as well.
const DEFAULT_WINDOW_LOG: u32 = 25;
/// The largest window, as a power of two: that of `zstd --ultra`.
const MAX_WINDOW_LOG: u32 = 27;

/// The limits of one layer.
#[derive(Clone, Copy, Debug)]
pub struct LayerLimits {
    /// The maximum size in bytes of the unpacked layer.
    pub bytes: u64,
    /// The maximum number of entries.
    pub entries: u64,
}

/// Reasons that a layer is rejected.
#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    /// The source failed: the download, or the file.
    #[error("cannot read the layer")]
    Source(#[source] io::Error),
    /// The compressed stream is damaged.
    #[error("cannot decompress the layer")]
    Decompress(#[source] io::Error),
    /// The stream is not a tar archive that is supported.
    #[error("the layer is not a supported tar archive")]
    Tar(#[from] TarError),
    /// The archive has an entry that is not supported.
    #[error("cannot unpack the layer's entry {path:?}: {why}")]
    Entry {
        /// The entry's path.
        path: String,
        /// The rule that the entry violates.
        why: &'static str,
    },
    /// The layer exceeds a limit.
    #[error("the layer has more than {limit} {what}")]
    TooLarge {
        /// "bytes" or "entries".
        what: &'static str,
        /// The limit.
        limit: u64,
    },
    /// The layer exceeds its budget.
    #[error("the layer cannot be unpacked")]
    Budget(#[from] BudgetError),
    /// The blob cannot be written.
    #[error("cannot write the layer's data")]
    Write(#[source] io::Error),
}

/// A layer that was read to its end. The caller still has to compare the digests with the expected ones.
#[derive(Debug)]
pub struct IngestedLayer {
    /// The digest of the stream as received.
    pub digest: Digest,
    /// The digest of the unpacked tar.
    pub diff_id: Digest,
    /// The index, as `LayerIndex` reads it.
    pub index: Vec<u8>,
}

/// Reads a layer from `source` (gzip, zstd or plain, detected by its first bytes) and writes the files' data into `blob`, which
/// is synced at the end. The index is charged to the budget for the lifetime of the budget.
pub fn ingest_layer(
    source: impl Read,
    blob: &File,
    limits: LayerLimits,
    budget: &mut Budget,
) -> Result<IngestedLayer, LayerError> {
    let cancel = budget.cancel().clone();
    budget.charge(FIXED_MEMORY)?;
    let mut source = HashingReader::new(source, &cancel);
    // One read may return less than `MAGIC_BYTES` bytes.
    let mut start = Vec::with_capacity(MAGIC_BYTES);
    let read = (&mut source).take(MAGIC_BYTES as u64).read_to_end(&mut start);
    read.map_err(|error| stream_error(error, &cancel, LayerError::Source))?;
    let compression = Compression::detect(&start);
    let source = BufReader::with_capacity(PIECE, io::Cursor::new(start).chain(source));
    if let Compression::Zstd { window_log } = compression {
        budget.charge(1 << window_log)?;
    }
    let (sender, receiver) = sync_channel(MAX_PIECES_IN_TRANSIT);
    std::thread::scope(|scope| {
        let unpacking = scope.spawn(move || unpack_tar(receiver, blob, limits, budget));
        let fed = decompress_and_hash(source, compression, sender, &cancel);
        let unpacked = unpacking.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        // If the unpacking thread stopped, its error is the cause; the feeder only saw that the channel was closed.
        match (fed, unpacked) {
            // Either thread may see the cancellation first; the other one only sees the consequences.
            (Err(_), _) | (_, Err(_)) if cancel.is_cancelled() => Err(BudgetError::Cancelled.into()),
            (_, Err(error @ LayerError::Budget(_))) => Err(error),
            (Err(DecompressError::Failed(error)), _) => Err(error),
            (_, Err(LayerError::Tar(TarError::Read { source, .. })))
                if source.kind() == io::ErrorKind::FileTooLarge =>
            {
                Err(LayerError::TooLarge { what: "bytes", limit: limits.bytes })
            }
            (_, Err(error)) => Err(error),
            (Err(DecompressError::ReceiverClosed), Ok(_)) => {
                Err(LayerError::Decompress(io::ErrorKind::BrokenPipe.into()))
            }
            (Ok(digest), Ok((diff_id, index))) => Ok(IngestedLayer { digest, diff_id, index }),
        }
    })
}

enum DecompressError {
    Failed(LayerError),
    ReceiverClosed,
}

/// Converts an error of a stream, which may be the cancellation.
fn stream_error(error: io::Error, cancel: &Cancel, what: impl FnOnce(io::Error) -> LayerError) -> LayerError {
    if cancel.is_cancelled() { BudgetError::Cancelled.into() } else { what(error) }
}

/// The compression of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Compression {
    Uncompressed,
    Gzip,
    /// The largest window that frames may have, as a power of two.
    Zstd {
        window_log: u32,
    },
}

impl Compression {
    /// Detects the compression by the first bytes of a stream.
    fn detect(start: &[u8]) -> Compression {
        match start {
            [0x1f, 0x8b, ..] => Compression::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, frame @ ..] => Compression::Zstd {
                window_log: zstd_window_log(frame)
                    .unwrap_or(DEFAULT_WINDOW_LOG)
                    .clamp(DEFAULT_WINDOW_LOG, MAX_WINDOW_LOG),
            },
            [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Compression::Zstd { window_log: DEFAULT_WINDOW_LOG },
            _ => Compression::Uncompressed,
        }
    }
}

/// Returns the window that the header of a frame asks for, rounded up to a power of two (RFC 8878, section 3.1.1.1).
fn zstd_window_log(frame: &[u8]) -> Option<u32> {
    let (&descriptor, rest) = frame.split_first()?;
    // A single segment: the window is the whole content. The content size follows the dictionary id.
    if descriptor & 0x20 != 0 {
        let (dictionary, field) = (descriptor & 3, descriptor >> 6);
        let size = rest.get((1 << dictionary >> 1)..)?.get(..1 << field)?;
        let mut bytes = [0; 8];
        bytes.iter_mut().zip(size).for_each(|(to, from)| *to = *from);
        let least = if field == 1 { 256 } else { 0 };
        let size = u64::from_le_bytes(bytes).saturating_add(least);
        return Some(size.checked_next_power_of_two().map_or(u64::BITS, u64::trailing_zeros));
    }
    let &value = rest.first()?;
    Some(10 + u32::from(value >> 3) + u32::from(value & 7 != 0))
}

/// The first thread: hashes the stream and sends it decompressed to the second.
fn decompress_and_hash<R: Read>(
    mut source: BufReader<io::Chain<io::Cursor<Vec<u8>>, HashingReader<R>>>,
    compression: Compression,
    sender: SyncSender<Vec<u8>>,
    cancel: &Cancel,
) -> Result<Digest, DecompressError> {
    let sent = match compression {
        Compression::Uncompressed => send_pieces(&mut source, &sender, cancel),
        Compression::Gzip => send_pieces(flate2::bufread::MultiGzDecoder::new(&mut source), &sender, cancel),
        Compression::Zstd { window_log } => zstd::stream::read::Decoder::with_buffer(&mut source)
            .and_then(|mut decoder| decoder.window_log_max(window_log).map(|()| decoder))
            .map_err(Some)
            .and_then(|decoder| send_pieces(decoder, &sender, cancel)),
    };
    let of_source = |error| DecompressError::Failed(stream_error(error, cancel, LayerError::Source));
    sent.map_err(|error| match error {
        None => DecompressError::ReceiverClosed,
        Some(error) if compression == Compression::Uncompressed || source.get_ref().get_ref().1.failed => {
            of_source(error)
        }
        Some(error) => DecompressError::Failed(stream_error(error, cancel, LayerError::Decompress)),
    })?;
    drop(sender);
    // Bytes after the compressed data belong to the digest.
    io::copy(&mut source, &mut io::sink()).map_err(of_source)?;
    let (_start, hashing) = source.into_inner().into_inner();
    Ok(Digest(hashing.hash.finalize().into()))
}

/// Sends everything. Returns no error if the receiver has gone.
fn send_pieces(mut stream: impl Read, sender: &SyncSender<Vec<u8>>, cancel: &Cancel) -> Result<(), Option<io::Error>> {
    loop {
        if cancel.is_cancelled() {
            return Err(Some(io::ErrorKind::Interrupted.into()));
        }
        let mut piece = Vec::with_capacity(PIECE);
        let got = (&mut stream).take(PIECE as u64).read_to_end(&mut piece).map_err(Some)?;
        if got == 0 {
            return Ok(());
        }
        sender.send(piece).map_err(|_closed| None)?;
    }
}

/// A stream that is hashed while it is read.
struct HashingReader<R> {
    stream: R,
    hash: Sha256,
    bytes_read: u64,
    failed: bool,
    cancel: Cancel,
}

impl<R> HashingReader<R> {
    fn new(stream: R, cancel: &Cancel) -> Self {
        HashingReader { stream, hash: Sha256::new(), bytes_read: 0, failed: false, cancel: cancel.clone() }
    }
}

impl<R: Read> Read for HashingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.cancel.is_cancelled() {
            self.failed = true;
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        let got = self.stream.read(buffer).inspect_err(|_| self.failed = true)?;
        self.hash.update(buffer.get(..got).unwrap_or_default());
        self.bytes_read += got as u64;
        Ok(got)
    }
}

/// The pieces from the first thread, as a stream.
struct PieceReader {
    receiver: Receiver<Vec<u8>>,
    piece: io::Cursor<Vec<u8>>,
}

impl Read for PieceReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let got = self.piece.read(buffer)?;
            if got > 0 || buffer.is_empty() {
                return Ok(got);
            }
            match self.receiver.recv() {
                Ok(piece) => self.piece = io::Cursor::new(piece),
                Err(_ended) => return Ok(0),
            }
        }
    }
}

/// The second thread: reads the tar and writes the blob.
fn unpack_tar(
    receiver: Receiver<Vec<u8>>,
    blob: &File,
    limits: LayerLimits,
    budget: &mut Budget,
) -> Result<(Digest, Vec<u8>), LayerError> {
    let pieces = PieceReader { receiver, piece: io::Cursor::default() };
    let counted = LimitedReader { stream: pieces, left: limits.bytes };
    let hashing = HashingReader::new(counted, budget.cancel());
    let mut archive = TarReader::new(BufReader::with_capacity(PIECE, hashing));
    let mut writer = BlobWriter { file: blob, buffer: Vec::new(), start: 0, end: 0, limit: limits.bytes };
    let mut index = IndexWriter::new();
    while let Some(header) = archive.next_entry()? {
        budget.step(1)?;
        if index.count() >= limits.entries {
            return Err(LayerError::TooLarge { what: "entries", limit: limits.entries });
        }
        if let Some(entry) = convert_entry(header, &mut archive, &mut writer)? {
            index.push(&entry, budget)?;
        }
    }
    let mut rest = archive.into_inner();
    let at = rest.get_ref().bytes_read;
    io::copy(&mut rest, &mut io::sink()).map_err(|source| TarError::Read { at, source })?;
    let diff_id = Digest(rest.into_inner().hash.finalize().into());
    let blob_length = writer.finish()?;
    Ok((diff_id, index.finish(blob_length)))
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
    let wrong =
        |why| LayerError::Entry { path: String::from_utf8_lossy(&header.path).chars().take(300).collect(), why };
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
    limit: u64,
}

impl BlobWriter<'_> {
    /// Reserves whole blocks for `size` bytes and returns their offset.
    fn reserve(&mut self, size: u64) -> Result<u64, LayerError> {
        let too_large = LayerError::TooLarge { what: "bytes", limit: self.limit };
        let end = size.checked_next_multiple_of(BLOCK).and_then(|size| self.end.checked_add(size));
        // Small files waste up to a block each; the number of entries bounds that.
        match end.filter(|end| end / BLOCK <= u64::from(u32::MAX) && size <= self.limit) {
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
            if bits > 20 {
                return Err(LayerError::TooLarge {
                    what: "bytes in one sparse file",
                    limit: (BLOCK << 20) * MAX_FILE_CHUNKS,
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
                    if self.end > self.limit.saturating_add(chunk) {
                        return Err(LayerError::TooLarge { what: "bytes", limit: self.limit });
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
        self.file.set_len(self.end).and_then(|()| self.file.sync_all()).map_err(LayerError::Write)?;
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
