//! Processes one request to a block device: reads, checks and performs it and writes the status. The queue's thread calls it;
//! each request works on one view of the slot.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::SECTOR;
use super::device::{MAX_DISCARD_SECTORS, MAX_RANGES, MAX_ZEROES_SECTORS};
use super::extent_map::{ExtentMap, FileRange, SlotContent};
use super::slot::{SERIAL, SlotInner, SlotView};
use crate::sys;
use crate::virtio::Memory;
use crate::virtio::buffers::{ChainError, MemoryRanges, RequestBuffers};
use crate::virtio::ring::Request;
use nacelle_base::guest_warn;
use nacelle_base::retry::retry_interrupted;
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::sync::atomic::{AtomicU64, Ordering};
use vm_memory::Permissions;

const HEADER_BYTES: usize = 16;
const RANGE_BYTES: usize = 16;

/// The maximum data size of a read or write in bytes. Linux sends at most 4 MiB.
const MAX_DATA: usize = 64 << 20;

const STATUS_OK: u8 = 0;
const STATUS_FAILED: u8 = 1;
const STATUS_UNSUPPORTED: u8 = 2;

/// The operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BlockOperation {
    Read { sector: u64 },
    Write { sector: u64 },
    Flush,
    Serial,
    Discard,
    WriteZeroes,
    Unknown(u32),
}

/// Whether a read may block.
#[derive(Clone, Copy, Debug)]
enum ReadMode {
    /// The read only copies from the page cache.
    CachedOnly,
    /// The read may wait for the disk.
    MayBlock,
}

/// One range of a discard or write-zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DiscardRange {
    sector: u64,
    sectors: u32,
    flags: u32,
}

/// The reason for which a request failed.
#[derive(Debug, thiserror::Error)]
enum RequestFailure {
    #[error("a request without a status buffer")]
    NoStatus,
    #[error("a request without a complete header")]
    NoHeader,
    #[error("a request of the unknown type {0}")]
    Unknown(u32),
    #[error("a request with the flags {0:#x}")]
    Flags(u32),
    #[error("a request of {0} bytes")]
    Length(usize),
    #[error("a request for {sectors} sectors from {sector}, beyond the end")]
    Beyond { sector: u64, sectors: u64 },
    #[error("a write to a read-only range")]
    ReadOnly,
    #[error("a flush after written data was lost")]
    Lost,
    #[error("a request with {0}")]
    Chain(#[from] ChainError),
    #[error("a request that failed on the host: {0}")]
    Host(#[from] io::Error),
}

impl BlockOperation {
    fn parse(header: &[u8; HEADER_BYTES]) -> BlockOperation {
        let [a, b, c, d, _, _, _, _, sector @ ..] = *header;
        let sector = u64::from_le_bytes(sector);
        match u32::from_le_bytes([a, b, c, d]) {
            0 => BlockOperation::Read { sector },
            1 => BlockOperation::Write { sector },
            4 => BlockOperation::Flush,
            8 => BlockOperation::Serial,
            11 => BlockOperation::Discard,
            13 => BlockOperation::WriteZeroes,
            other => BlockOperation::Unknown(other),
        }
    }
}

impl DiscardRange {
    fn parse(bytes: &[u8; RANGE_BYTES]) -> DiscardRange {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = *bytes;
        DiscardRange {
            sector: u64::from_le_bytes([a, b, c, d, e, f, g, h]),
            sectors: u32::from_le_bytes([i, j, k, l]),
            flags: u32::from_le_bytes([m, n, o, p]),
        }
    }
}

/// A parsed request.
pub(crate) struct BlockRequest {
    operation: BlockOperation,
    /// The buffers without header and status.
    buffers: RequestBuffers,
    status: MemoryRanges,
}

/// Performs a request if that does not block, and returns the number of bytes written to the guest. Otherwise returns the job
/// for [`serve`].
pub(crate) fn try_serve(inner: &SlotInner, memory: &Memory, request: Request) -> Result<u32, BlockRequest> {
    let RequestBuffers { mut readable, mut writable } = request.buffers;
    let Some(status) = writable.split_back(1) else {
        return Ok(record_failure(inner, &RequestFailure::NoStatus));
    };
    let mut header = [0; HEADER_BYTES];
    let found = match readable.split_front(HEADER_BYTES) {
        Some(front) => front.read(memory, &mut header).map_err(RequestFailure::from),
        None => Err(RequestFailure::NoHeader),
    };
    if let Err(failure) = found {
        return Ok(write_status(inner, memory, &status, Err(failure)));
    }
    let request = BlockRequest {
        operation: BlockOperation::parse(&header),
        buffers: RequestBuffers { readable, writable },
        status,
    };
    match request.operation {
        BlockOperation::Read { .. } if inner.no_cached_reads.load(Ordering::Relaxed) => Err(request),
        BlockOperation::Read { sector } => {
            match read_sectors(inner, memory, sector, &request.buffers.writable, ReadMode::CachedOnly) {
                Err(RequestFailure::Host(error)) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                    inner.no_cached_reads.store(true, Ordering::Relaxed);
                    Err(request)
                }
                // This includes partial reads: `serve` reads the whole request again and reports an error if there is one.
                Err(RequestFailure::Host(_)) => Err(request),
                result => Ok(write_status(inner, memory, &request.status, result)),
            }
        }
        _ => Err(request),
    }
}

/// Performs a request, which may block. Returns the number of bytes written to the guest.
pub(crate) fn serve(inner: &SlotInner, memory: &Memory, request: &BlockRequest) -> u32 {
    write_status(inner, memory, &request.status, execute(inner, memory, request))
}

/// Writes the status of a request. Returns the number of bytes written to the guest, including the status.
fn write_status(
    inner: &SlotInner,
    memory: &Memory,
    status: &MemoryRanges,
    result: Result<usize, RequestFailure>,
) -> u32 {
    let (code, data) = match result {
        Ok(written) => (STATUS_OK, written),
        Err(failure) => {
            record_failure(inner, &failure);
            let unsupported = matches!(failure, RequestFailure::Unknown(_) | RequestFailure::Flags(_));
            (if unsupported { STATUS_UNSUPPORTED } else { STATUS_FAILED }, 0)
        }
    };
    match status.write(memory, &[code]) {
        // A chain has at most 4 GiB - 1 bytes in all.
        Ok(_) => u32::try_from(data).unwrap_or(u32::MAX - 1) + 1,
        Err(error) => record_failure(inner, &error.into()),
    }
}

fn record_failure(inner: &SlotInner, failure: &RequestFailure) -> u32 {
    count(&inner.metrics.failures, 1);
    guest_warn!(disk = inner.serial, "the guest sent {failure}");
    0
}

fn count(counter: &AtomicU64, by: usize) {
    counter.fetch_add(by as u64, Ordering::Relaxed);
}

/// Performs the operation. Returns the number of bytes written to the guest's buffers.
fn execute(inner: &SlotInner, memory: &Memory, request: &BlockRequest) -> Result<usize, RequestFailure> {
    let RequestBuffers { readable, writable } = &request.buffers;
    let view = inner.view();
    let metrics = &inner.metrics;
    match request.operation {
        BlockOperation::Read { sector } => read_sectors(inner, memory, sector, writable, ReadMode::MayBlock),
        BlockOperation::Write { sector } => {
            let length = readable.len();
            let at = check_range(&view, sector, length)?;
            let mut pieces = readable.clone();
            for WriteTarget { file, at, length, .. } in write_targets(&view, at, length as u64)? {
                let count = usize::try_from(length).unwrap_or(usize::MAX);
                let part = pieces.split_front(count).ok_or(RequestFailure::Length(count))?;
                sys::write_at(file, part.slices(memory, Permissions::Read)?, at)?;
            }
            count(&metrics.writes, 1);
            count(&metrics.written_bytes, length);
            Ok(0)
        }
        BlockOperation::Flush => {
            match &view {
                SlotView::ReadOnly(_) => {}
                SlotView::Volumes(extents) => flush(extents)?,
                SlotView::ReadWrite { file, .. } => file.sync_data()?,
            }
            count(&metrics.flushes, 1);
            Ok(0)
        }
        BlockOperation::Serial => {
            let mut serial = [0; SERIAL];
            serial.iter_mut().zip(inner.serial.bytes()).for_each(|(to, byte)| *to = byte);
            Ok(writable.write(memory, &serial)?)
        }
        BlockOperation::Discard => {
            for (at, length, _) in discard_ranges(&view, memory, readable.clone(), MAX_DISCARD_SECTORS, 0)? {
                if view.must_keep(at, length) {
                    continue;
                }
                for target in write_targets(&view, at, length)? {
                    discard(&target)?;
                }
            }
            count(&metrics.discards, 1);
            Ok(0)
        }
        BlockOperation::WriteZeroes => {
            for (at, length, flags) in discard_ranges(&view, memory, readable.clone(), MAX_ZEROES_SECTORS, 1)? {
                for target in write_targets(&view, at, length)? {
                    zero_range(target.file, target.at, target.length, flags & 1 != 0)?;
                }
            }
            count(&metrics.discards, 1);
            Ok(0)
        }
        BlockOperation::Unknown(number) => Err(RequestFailure::Unknown(number)),
    }
}

/// A range of a file to be changed.
struct WriteTarget<'v> {
    file: &'v File,
    at: u64,
    length: u64,
    /// The file is that of a volume, which may be a block device.
    volume: bool,
}

/// Returns the file ranges behind a range of the disk, which the caller may change then: marks them as written, and lets a copy of the disk
/// have what they hold. Fails if any of them is read-only.
fn write_targets(view: &SlotView, mut at: u64, length: u64) -> Result<Vec<WriteTarget<'_>>, RequestFailure> {
    let extents = match view {
        SlotView::ReadOnly(_) => return Err(RequestFailure::ReadOnly),
        SlotView::ReadWrite { file, copy, .. } => {
            if let Some(copy) = copy {
                copy.preserve(at, length);
            }
            return Ok(vec![WriteTarget { file, at, length, volume: false }]);
        }
        SlotView::Volumes(extents) => extents,
    };
    let (mut found, mut left) = (Vec::with_capacity(1), length);
    while left > 0 {
        // A hole is not writable.
        let SlotContent::File(FileRange { file, writes: Some(writes), .. }, offset, file_length) =
            extents.content_at(at)
        else {
            return Err(RequestFailure::ReadOnly);
        };
        writes.pending.store(true, Ordering::Relaxed);
        let length = left.min(file_length);
        found.push(WriteTarget { file, at: offset, length, volume: true });
        at = at.saturating_add(length);
        left -= length;
    }
    Ok(found)
}

/// Flushes the written data of all volumes. A flush request does not name a volume, so lost data of one volume fails every flush.
fn flush(extents: &ExtentMap) -> Result<(), RequestFailure> {
    let mut lost = None;
    for source in extents.sources() {
        let Some(writes) = &source.writes else { continue };
        if writes.pending.swap(false, Ordering::Relaxed)
            && let Err(error) = source.file.sync_data()
        {
            writes.lost.store(true, Ordering::Relaxed);
            lost = Some(RequestFailure::Host(error));
        } else if writes.lost.load(Ordering::Relaxed) {
            lost = lost.or(Some(RequestFailure::Lost));
        }
    }
    lost.map_or(Ok(()), Err)
}

/// Checks that `length` bytes from `sector` lie on the disk. Returns their offset in bytes.
fn check_range(view: &SlotView, sector: u64, length: usize) -> Result<u64, RequestFailure> {
    if length > MAX_DATA || !(length as u64).is_multiple_of(SECTOR) {
        return Err(RequestFailure::Length(length));
    }
    sector_offset(view, sector, length as u64 / SECTOR)
}

fn sector_offset(view: &SlotView, sector: u64, sectors: u64) -> Result<u64, RequestFailure> {
    let end = sector.checked_add(sectors).filter(|end| *end <= view.capacity() / SECTOR);
    // No disk is so large that a sector on it overflows in bytes.
    end.map(|_| sector.saturating_mul(SECTOR)).ok_or(RequestFailure::Beyond { sector, sectors })
}

fn read_sectors(
    inner: &SlotInner,
    memory: &Memory,
    sector: u64,
    to: &MemoryRanges,
    mode: ReadMode,
) -> Result<usize, RequestFailure> {
    let view = inner.view();
    let length = to.len();
    let at = check_range(&view, sector, length)?;
    match &view {
        SlotView::ReadWrite { file, .. } => read_file(file, memory, at, to, mode)?,
        SlotView::ReadOnly(extents) | SlotView::Volumes(extents) => read_placed(extents, memory, at, to, mode)?,
    }
    count(&inner.metrics.reads, 1);
    count(&inner.metrics.read_bytes, length);
    Ok(length)
}

fn read_placed(
    extents: &ExtentMap,
    memory: &Memory,
    mut at: u64,
    to: &MemoryRanges,
    mode: ReadMode,
) -> Result<(), RequestFailure> {
    let mut pieces = to.clone();
    while !pieces.is_empty() {
        let here = extents.content_at(at);
        let (SlotContent::File(.., length) | SlotContent::Hole(length)) = here;
        let count = pieces.len().min(usize::try_from(length).unwrap_or(usize::MAX));
        let part = pieces.split_front(count).ok_or(RequestFailure::Length(count))?;
        match here {
            SlotContent::File(source, offset, _) => read_file(&source.file, memory, offset, &part, mode)?,
            SlotContent::Hole(_) => part.zero(memory)?,
        }
        at = at.saturating_add(count as u64);
    }
    Ok(())
}

fn read_file(file: &File, memory: &Memory, at: u64, to: &MemoryRanges, mode: ReadMode) -> Result<(), RequestFailure> {
    let slices = to.slices(memory, Permissions::Write)?;
    match mode {
        ReadMode::CachedOnly => sys::read_cached(file, &slices, at)?,
        ReadMode::MayBlock => sys::read_at(file, slices, at)?,
    }
    Ok(())
}

/// Reads and checks the ranges of a discard or write-zeroes. Returns offset and length in bytes, and flags.
fn discard_ranges(
    view: &SlotView,
    memory: &Memory,
    mut readable: MemoryRanges,
    max_sectors: u32,
    allowed_flags: u32,
) -> Result<Vec<(u64, u64, u32)>, RequestFailure> {
    let length = readable.len();
    if length == 0 || !length.is_multiple_of(RANGE_BYTES) || length / RANGE_BYTES > MAX_RANGES as usize {
        return Err(RequestFailure::Length(length));
    }
    let mut found = Vec::with_capacity(length / RANGE_BYTES);
    while let Some(next) = readable.split_front(RANGE_BYTES) {
        let mut bytes = [0; RANGE_BYTES];
        next.read(memory, &mut bytes)?;
        let DiscardRange { sector, sectors, flags } = DiscardRange::parse(&bytes);
        if flags & !allowed_flags != 0 {
            return Err(RequestFailure::Flags(flags));
        }
        let at = sector_offset(view, sector, sectors.into())?;
        if sectors > max_sectors {
            return Err(RequestFailure::Beyond { sector, sectors: sectors.into() });
        }
        found.push((at, u64::from(sectors) * SECTOR, flags));
    }
    Ok(found)
}

/// Discards a range. This is only a hint: a device or file system without support is no error.
fn discard(target: &WriteTarget<'_>) -> io::Result<()> {
    let &WriteTarget { file, at, length, volume } = target;
    if volume && file.metadata()?.file_type().is_block_device() {
        return match sys::discard_blocks(file, at, length) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EINVAL)) => Ok(()),
            done => done,
        };
    }
    match punch_hole(file, at, length) {
        Err(Errno::EOPNOTSUPP) => Ok(()),
        done => done.map_err(io::Error::from),
    }
}

fn punch_hole(file: &File, at: u64, length: u64) -> Result<(), Errno> {
    fallocate_range(file, FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE, at, length)
}

fn fallocate_range(file: &File, how: FallocateFlags, at: u64, length: u64) -> Result<(), Errno> {
    if length == 0 {
        return Ok(());
    }
    let number = |value: u64| i64::try_from(value).map_err(|_wide| Errno::EFBIG);
    let (at, length) = (number(at)?, number(length)?);
    // On tmpfs any signal interrupts fallocate.
    retry_interrupted(|| fallocate(file, how, at, length))
}

/// Zeroes a range: by punching a hole if allowed, otherwise by allocated zeros; if neither is supported, by writing zeros.
fn zero_range(file: &File, at: u64, length: u64, may_unmap: bool) -> io::Result<()> {
    let keep = FallocateFlags::FALLOC_FL_ZERO_RANGE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    let done = if may_unmap { punch_hole(file, at, length) } else { fallocate_range(file, keep, at, length) };
    match done {
        Ok(()) => return Ok(()),
        // EINVAL: the device's blocks are larger than the range.
        Err(Errno::EOPNOTSUPP | Errno::EINVAL) => {}
        Err(error) => return Err(error.into()),
    }
    // Not a constant, because that would occupy memory in every pod's process for a rare case.
    let zeros = vec![0; 64 << 10];
    let (mut at, mut left) = (at, length);
    while left > 0 {
        let count = left.min(zeros.len() as u64);
        file.write_all_at(zeros.get(..count as usize).unwrap_or(&zeros), at)?; // at most 64 KiB
        at = at.saturating_add(count);
        left -= count;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, reason = "tests")]
mod tests {
    use super::super::extent_map::WriteState;
    use super::*;
    use std::sync::Arc;

    /// Tries all requests on all disks of at most four sectors, and those whose numbers overflow.
    #[test]
    fn no_request_reaches_beyond_the_disk() {
        let numbers = (0..6).chain([u64::MAX / SECTOR - 1, u64::MAX / SECTOR, u64::MAX - 1, u64::MAX]);
        for capacity in 0..=4 {
            let view = SlotView::ReadOnly(Arc::new(ExtentMap::default().grown(capacity * SECTOR)));
            for sector in numbers.clone() {
                for sectors in numbers.clone() {
                    let is_inside = u128::from(sector) + u128::from(sectors) <= u128::from(capacity);
                    match sector_offset(&view, sector, sectors) {
                        Ok(offset) => assert!(is_inside && offset == sector * SECTOR, "{sector} {sectors} {capacity}"),
                        Err(_beyond) => assert!(!is_inside, "{sector} {sectors} {capacity}"),
                    }
                }
            }
        }
    }

    /// Tries all ranges of all disks of six sectors with two files of at most three sectors at all places.
    #[test]
    fn no_write_leaves_the_range_of_a_file() {
        const SECTORS: u64 = 6;
        let file = Arc::new(File::open("/dev/null").unwrap());
        let places = || (0..SECTORS).flat_map(|at| (1..=3).map(move |length| (at, length)));
        let range = |offset: u64, length: u64| FileRange {
            file: file.clone(),
            offset: offset * SECTOR,
            length: length * SECTOR,
            writes: Some(Arc::new(WriteState::default())),
        };
        for (first_at, first_length) in places() {
            for (second_at, second_length) in places() {
                let extents = ExtentMap::default().grown(SECTORS * SECTOR);
                let first = extents.with(first_at * SECTOR, vec![range(10, first_length)]).unwrap();
                let Ok(both) = first.with(second_at * SECTOR, vec![range(20, second_length)]) else { continue };
                // The sector of a file that a sector of the disk lies on.
                let sector_of = |sector: u64| {
                    let inside = |at: u64, length: u64, offset: u64| {
                        (at..at + length).contains(&sector).then(|| offset + sector - at)
                    };
                    inside(first_at, first_length, 10).or_else(|| inside(second_at, second_length, 20))
                };
                let view = SlotView::Volumes(Arc::new(both));
                for at in 0..SECTORS {
                    for length in 1..=SECTORS - at {
                        let expected: Option<Vec<u64>> = (at..at + length).map(sector_of).collect();
                        let found = write_targets(&view, at * SECTOR, length * SECTOR).ok().map(|targets| {
                            let sectors =
                                |target: &WriteTarget<'_>| target.at / SECTOR..(target.at + target.length) / SECTOR;
                            targets.iter().flat_map(sectors).collect::<Vec<u64>>()
                        });
                        assert_eq!(found, expected, "{at} {length}");
                    }
                }
            }
        }
    }

    #[test]
    fn lost_writes_fail_every_flush_until_the_volume_is_removed() {
        let source = |path: &str| FileRange {
            file: Arc::new(File::options().read(true).write(true).open(path).unwrap()),
            offset: 0,
            length: SECTOR,
            writes: Some(Arc::new(WriteState::default())),
        };
        let directory = tempfile::tempdir().unwrap();
        let good = directory.path().join("good");
        std::fs::write(&good, [0; 512]).unwrap();
        // /dev/zero cannot be synchronized, so that written data counts as lost.
        let extents = ExtentMap::default().replaced(0, source(good.to_str().unwrap())).unwrap();
        let extents = extents.replaced(SECTOR, source("/dev/zero")).unwrap();
        flush(&extents).unwrap();
        let view = SlotView::Volumes(Arc::new(extents.clone()));
        assert_eq!(write_targets(&view, 0, SECTOR).unwrap().len(), 1);
        flush(&extents).unwrap();
        assert_eq!(write_targets(&view, 0, 2 * SECTOR).unwrap().len(), 2);
        assert!(matches!(flush(&extents), Err(RequestFailure::Host(_))));
        assert!(matches!(flush(&extents), Err(RequestFailure::Lost)));
        flush(&extents.without(SECTOR).unwrap()).unwrap();
    }
}
