//! Processes one request to a block device: reads, checks and performs it and writes the status. The queue's thread calls it;
//! each request works on one view of the slot.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::SECTOR;
use super::device::{MAX_DISCARD_SECTORS, MAX_RANGES, MAX_ZEROES_SECTORS};
use super::slot::{SERIAL, Shared, View};
use super::table::{Here, Source, Table};
use crate::virtio::Memory;
use crate::virtio::pieces::{BadChain, Buffers, Pieces};
use crate::virtio::ring::Request;
use crate::{guest_warn, sys};
use nacelle_base::retry::retry_interrupted;
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::sync::atomic::{AtomicU64, Ordering};
use vm_memory::Permissions;

const HEADER: usize = 16;
const RANGE: usize = 16;

/// The maximum data size of a read or write in bytes. Linux sends at most 4 MiB.
const MAX_DATA: usize = 64 << 20;

const STATUS_OK: u8 = 0;
const STATUS_FAILED: u8 = 1;
const STATUS_UNSUPPORTED: u8 = 2;

/// The operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ask {
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
enum Patience {
    /// The read only copies from the page cache.
    None,
    Any,
}

/// One range of a discard or write-zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    sector: u64,
    sectors: u32,
    flags: u32,
}

/// The reason for which a request failed.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("a request without room for its status")]
    NoStatus,
    #[error("a request without a whole header")]
    NoHeader,
    #[error("a request of the unknown type {0}")]
    Unknown(u32),
    #[error("a request with the flags {0:#x}")]
    Flags(u32),
    #[error("a request of {0} bytes")]
    Length(usize),
    #[error("a request for {sectors} sectors from {sector}, beyond the end")]
    Beyond { sector: u64, sectors: u64 },
    #[error("a write to what is only to be read")]
    ReadOnly,
    #[error("a flush of what was lost before")]
    Lost,
    #[error("a request with {0}")]
    Chain(#[from] BadChain),
    #[error("a request that the host cannot fulfil: {0}")]
    Host(#[from] io::Error),
}

impl Ask {
    fn parse(header: &[u8; HEADER]) -> Ask {
        let [a, b, c, d, _, _, _, _, sector @ ..] = *header;
        let sector = u64::from_le_bytes(sector);
        match u32::from_le_bytes([a, b, c, d]) {
            0 => Ask::Read { sector },
            1 => Ask::Write { sector },
            4 => Ask::Flush,
            8 => Ask::Serial,
            11 => Ask::Discard,
            13 => Ask::WriteZeroes,
            other => Ask::Unknown(other),
        }
    }
}

impl Range {
    fn parse(bytes: &[u8; RANGE]) -> Range {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = *bytes;
        Range {
            sector: u64::from_le_bytes([a, b, c, d, e, f, g, h]),
            sectors: u32::from_le_bytes([i, j, k, l]),
            flags: u32::from_le_bytes([m, n, o, p]),
        }
    }
}

/// A parsed request.
pub(crate) struct Job {
    ask: Ask,
    /// The buffers without header and status.
    buffers: Buffers,
    status: Pieces,
}

/// Performs a request if that does not block, and returns the number of bytes written to the guest. Otherwise returns the job
/// for [`finish`].
pub(crate) fn begin(shared: &Shared, memory: &Memory, request: Request) -> Result<u32, Job> {
    let Buffers { mut readable, mut writable } = request.buffers;
    let Some(status) = writable.take_back(1) else {
        return Ok(failed(shared, &Failure::NoStatus));
    };
    let mut header = [0; HEADER];
    let found = match readable.take_front(HEADER) {
        Some(front) => front.read(memory, &mut header).map_err(Failure::from),
        None => Err(Failure::NoHeader),
    };
    if let Err(failure) = found {
        return Ok(answer(shared, memory, &status, Err(failure)));
    }
    let job = Job { ask: Ask::parse(&header), buffers: Buffers { readable, writable }, status };
    match job.ask {
        Ask::Read { .. } if shared.unsure.load(Ordering::Relaxed) => Err(job),
        Ask::Read { sector } => match read(shared, memory, sector, &job.buffers.writable, Patience::None) {
            Err(Failure::Host(error)) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                shared.unsure.store(true, Ordering::Relaxed);
                Err(job)
            }
            // This includes partial reads: `finish` reads the whole request again and reports an error if there is one.
            Err(Failure::Host(_)) => Err(job),
            result => Ok(answer(shared, memory, &job.status, result)),
        },
        _ => Err(job),
    }
}

/// Performs a request, which may block. Returns the number of bytes written to the guest.
pub(crate) fn finish(shared: &Shared, memory: &Memory, job: &Job) -> u32 {
    answer(shared, memory, &job.status, execute(shared, memory, job))
}

/// Writes the status of a request. Returns the number of bytes written to the guest, including the status.
fn answer(shared: &Shared, memory: &Memory, status: &Pieces, result: Result<usize, Failure>) -> u32 {
    let (code, data) = match result {
        Ok(written) => (STATUS_OK, written),
        Err(failure) => {
            failed(shared, &failure);
            let unsupported = matches!(failure, Failure::Unknown(_) | Failure::Flags(_));
            (if unsupported { STATUS_UNSUPPORTED } else { STATUS_FAILED }, 0)
        }
    };
    match status.write(memory, &[code]) {
        // A chain has at most 4 GiB - 1 bytes in all.
        Ok(_) => u32::try_from(data).unwrap_or(u32::MAX - 1) + 1,
        Err(error) => failed(shared, &error.into()),
    }
}

fn failed(shared: &Shared, failure: &Failure) -> u32 {
    count(&shared.metrics.failures, 1);
    guest_warn!(disk = shared.serial, "the guest sent {failure}");
    0
}

fn count(counter: &AtomicU64, by: usize) {
    counter.fetch_add(by as u64, Ordering::Relaxed);
}

/// Performs the operation. Returns the number of bytes written to the guest's buffers.
fn execute(shared: &Shared, memory: &Memory, job: &Job) -> Result<usize, Failure> {
    let Buffers { readable, writable } = &job.buffers;
    let view = shared.view();
    let metrics = &shared.metrics;
    match job.ask {
        Ask::Read { sector } => read(shared, memory, sector, writable, Patience::Any),
        Ask::Write { sector } => {
            let length = readable.len();
            let at = check(&view, sector, length)?;
            let mut pieces = readable.clone();
            for Target { file, at, length, .. } in targets(&view, at, length as u64)? {
                let count = usize::try_from(length).unwrap_or(usize::MAX);
                let part = pieces.take_front(count).ok_or(Failure::Length(count))?;
                sys::write_at(file, part.slices(memory, Permissions::Read)?, at)?;
            }
            count(&metrics.writes, 1);
            count(&metrics.written_bytes, length);
            Ok(0)
        }
        Ask::Flush => {
            match &view {
                View::ReadOnly(_) => {}
                View::Volumes(table) => flush(table)?,
                View::ReadWrite { file, .. } => file.sync_data()?,
            }
            count(&metrics.flushes, 1);
            Ok(0)
        }
        Ask::Serial => {
            let mut serial = [0; SERIAL];
            serial.iter_mut().zip(shared.serial.bytes()).for_each(|(to, byte)| *to = byte);
            Ok(writable.write(memory, &serial)?)
        }
        Ask::Discard => {
            for (at, length, _) in ranges(&view, memory, readable.clone(), MAX_DISCARD_SECTORS, 0)? {
                for target in targets(&view, at, length)? {
                    discard(&target)?;
                }
            }
            count(&metrics.discards, 1);
            Ok(0)
        }
        Ask::WriteZeroes => {
            for (at, length, flags) in ranges(&view, memory, readable.clone(), MAX_ZEROES_SECTORS, 1)? {
                for target in targets(&view, at, length)? {
                    zero(target.file, target.at, target.length, flags & 1 != 0)?;
                }
            }
            count(&metrics.discards, 1);
            Ok(0)
        }
        Ask::Unknown(number) => Err(Failure::Unknown(number)),
    }
}

/// A range of a file to be changed.
struct Target<'v> {
    file: &'v File,
    at: u64,
    length: u64,
    /// The file is that of a volume, which may be a block device.
    volume: bool,
}

/// Returns the file ranges behind a range of the disk and marks them as written. Fails if any of them is read-only.
fn targets(view: &View, mut at: u64, length: u64) -> Result<Vec<Target<'_>>, Failure> {
    let table = match view {
        View::ReadOnly(_) => return Err(Failure::ReadOnly),
        View::ReadWrite { file, .. } => return Ok(vec![Target { file, at, length, volume: false }]),
        View::Volumes(table) => table,
    };
    let (mut found, mut left) = (Vec::with_capacity(1), length);
    while left > 0 {
        // A hole is not writable.
        let Here::File(Source { file, writes: Some(writes), .. }, offset, there) = table.at(at) else {
            return Err(Failure::ReadOnly);
        };
        writes.pending.store(true, Ordering::Relaxed);
        let length = left.min(there);
        found.push(Target { file, at: offset, length, volume: true });
        at = at.saturating_add(length);
        left -= length;
    }
    Ok(found)
}

/// Flushes the written data of all volumes. A flush request does not name a volume, so lost data of one volume fails every flush.
fn flush(table: &Table) -> Result<(), Failure> {
    let mut lost = None;
    for source in table.sources() {
        let Some(writes) = &source.writes else { continue };
        if writes.pending.swap(false, Ordering::Relaxed)
            && let Err(error) = source.file.sync_data()
        {
            writes.lost.store(true, Ordering::Relaxed);
            lost = Some(Failure::Host(error));
        } else if writes.lost.load(Ordering::Relaxed) {
            lost = lost.or(Some(Failure::Lost));
        }
    }
    lost.map_or(Ok(()), Err)
}

/// Checks that `length` bytes from `sector` lie on the disk. Returns their offset in bytes.
fn check(view: &View, sector: u64, length: usize) -> Result<u64, Failure> {
    if length > MAX_DATA || !(length as u64).is_multiple_of(SECTOR) {
        return Err(Failure::Length(length));
    }
    within(view, sector, length as u64 / SECTOR)
}

fn within(view: &View, sector: u64, sectors: u64) -> Result<u64, Failure> {
    let end = sector.checked_add(sectors).filter(|end| *end <= view.capacity() / SECTOR);
    // No disk is so large that a sector on it overflows in bytes.
    end.map(|_| sector.saturating_mul(SECTOR)).ok_or(Failure::Beyond { sector, sectors })
}

fn read(shared: &Shared, memory: &Memory, sector: u64, to: &Pieces, patience: Patience) -> Result<usize, Failure> {
    let view = shared.view();
    let length = to.len();
    let at = check(&view, sector, length)?;
    match &view {
        View::ReadWrite { file, .. } => read_file(file, memory, at, to, patience)?,
        View::ReadOnly(table) | View::Volumes(table) => read_placed(table, memory, at, to, patience)?,
    }
    count(&shared.metrics.reads, 1);
    count(&shared.metrics.read_bytes, length);
    Ok(length)
}

fn read_placed(table: &Table, memory: &Memory, mut at: u64, to: &Pieces, patience: Patience) -> Result<(), Failure> {
    let mut pieces = to.clone();
    while !pieces.is_empty() {
        let here = table.at(at);
        let (Here::File(.., length) | Here::Hole(length)) = here;
        let count = pieces.len().min(usize::try_from(length).unwrap_or(usize::MAX));
        let part = pieces.take_front(count).ok_or(Failure::Length(count))?;
        match here {
            Here::File(source, offset, _) => read_file(&source.file, memory, offset, &part, patience)?,
            Here::Hole(_) => part.zero(memory)?,
        }
        at = at.saturating_add(count as u64);
    }
    Ok(())
}

fn read_file(file: &File, memory: &Memory, at: u64, to: &Pieces, patience: Patience) -> Result<(), Failure> {
    let slices = to.slices(memory, Permissions::Write)?;
    match patience {
        Patience::None => sys::read_cached(file, &slices, at)?,
        Patience::Any => sys::read_at(file, slices, at)?,
    }
    Ok(())
}

/// Reads and checks the ranges of a discard or write-zeroes. Returns offset and length in bytes, and flags.
fn ranges(
    view: &View,
    memory: &Memory,
    mut readable: Pieces,
    max_sectors: u32,
    known_flags: u32,
) -> Result<Vec<(u64, u64, u32)>, Failure> {
    let length = readable.len();
    if length == 0 || !length.is_multiple_of(RANGE) || length / RANGE > MAX_RANGES as usize {
        return Err(Failure::Length(length));
    }
    let mut found = Vec::with_capacity(length / RANGE);
    while let Some(next) = readable.take_front(RANGE) {
        let mut bytes = [0; RANGE];
        next.read(memory, &mut bytes)?;
        let Range { sector, sectors, flags } = Range::parse(&bytes);
        if flags & !known_flags != 0 {
            return Err(Failure::Flags(flags));
        }
        let at = within(view, sector, sectors.into())?;
        if sectors > max_sectors {
            return Err(Failure::Beyond { sector, sectors: sectors.into() });
        }
        found.push((at, u64::from(sectors) * SECTOR, flags));
    }
    Ok(found)
}

/// Discards a range. This is only a hint: a device or file system without support is no error.
fn discard(target: &Target<'_>) -> io::Result<()> {
    let &Target { file, at, length, volume } = target;
    if volume && file.metadata()?.file_type().is_block_device() {
        return match sys::discard_blocks(file, at, length) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EINVAL)) => Ok(()),
            done => done,
        };
    }
    match punch(file, at, length) {
        Err(Errno::EOPNOTSUPP) => Ok(()),
        done => done.map_err(io::Error::from),
    }
}

fn punch(file: &File, at: u64, length: u64) -> Result<(), Errno> {
    allocate(file, FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE, at, length)
}

fn allocate(file: &File, how: FallocateFlags, at: u64, length: u64) -> Result<(), Errno> {
    if length == 0 {
        return Ok(());
    }
    let number = |value: u64| i64::try_from(value).map_err(|_wide| Errno::EFBIG);
    let (at, length) = (number(at)?, number(length)?);
    // On tmpfs any signal interrupts fallocate.
    retry_interrupted(|| fallocate(file, how, at, length))
}

/// Zeroes a range: by punching a hole if allowed, otherwise by allocated zeros; if neither is supported, by writing zeros.
fn zero(file: &File, at: u64, length: u64, may_unmap: bool) -> io::Result<()> {
    let keep = FallocateFlags::FALLOC_FL_ZERO_RANGE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    let done = if may_unmap { punch(file, at, length) } else { allocate(file, keep, at, length) };
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
    use super::super::table::Writes;
    use super::*;
    use std::sync::Arc;

    #[test]
    fn what_a_volume_has_lost_is_told_at_each_flush_until_it_is_gone() {
        let source = |path: &str| Source {
            file: Arc::new(File::options().read(true).write(true).open(path).unwrap()),
            offset: 0,
            length: SECTOR,
            writes: Some(Arc::new(Writes::default())),
        };
        let directory = tempfile::tempdir().unwrap();
        let good = directory.path().join("good");
        std::fs::write(&good, [0; 512]).unwrap();
        // /dev/zero cannot be synchronized, so that written data counts as lost.
        let table = Table::default().replaced(0, source(good.to_str().unwrap())).unwrap();
        let table = table.replaced(SECTOR, source("/dev/zero")).unwrap();
        flush(&table).unwrap();
        let view = View::Volumes(Arc::new(table.clone()));
        assert_eq!(targets(&view, 0, SECTOR).unwrap().len(), 1);
        flush(&table).unwrap();
        assert_eq!(targets(&view, 0, 2 * SECTOR).unwrap().len(), 2);
        assert!(matches!(flush(&table), Err(Failure::Host(_))));
        assert!(matches!(flush(&table), Err(Failure::Lost)));
        flush(&table.without(SECTOR).unwrap()).unwrap();
    }
}
