//! Implements disk loops over a block device or file: sequential reads and writes of 1 MiB, random reads of 4 KiB by several
//! threads.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

/// The size of a sequential request in bytes.
const SEQUENTIAL_SIZE: usize = 1 << 20;
/// The size of a random request in bytes.
const RANDOM_SIZE: usize = 4096;

/// A buffer with the alignment that direct I/O requires.
struct AlignedBuffer {
    bytes: Vec<u8>,
    start: usize,
    length: usize,
}

impl AlignedBuffer {
    fn new(length: usize) -> AlignedBuffer {
        let bytes = vec![0x5a; length + RANDOM_SIZE];
        let start = bytes.as_ptr().align_offset(RANDOM_SIZE).min(RANDOM_SIZE);
        AlignedBuffer { bytes, start, length }
    }

    fn aligned(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.length]
    }
}

/// Opens a device or file for one loop. `direct` bypasses the page cache.
fn open(path: &Path, write: bool, direct: bool) -> io::Result<(File, u64)> {
    let flags = if direct { libc::O_DIRECT } else { 0 };
    let mut file = OpenOptions::new().read(true).write(write).custom_flags(flags).open(path)?;
    let length = file.seek(SeekFrom::End(0))?;
    if length < SEQUENTIAL_SIZE as u64 {
        return Err(io::Error::other(format!("{} has {length} bytes, less than {SEQUENTIAL_SIZE}", path.display())));
    }
    Ok((file, length))
}

/// Reads repeatedly from begin to end for `time`; returns bytes per second.
pub fn read(path: &Path, direct: bool, time: Duration) -> io::Result<f64> {
    let (file, length) = open(path, false, direct)?;
    sequential(length, time, |buffer, offset| file.read_exact_at(buffer, offset))
}

/// Writes repeatedly from begin to end for `time`, and flushes; returns bytes per second including the flush.
pub fn write(path: &Path, direct: bool, time: Duration) -> io::Result<f64> {
    let (file, length) = open(path, true, direct)?;
    let start = Instant::now();
    let rate = sequential(length, time, |buffer, offset| file.write_all_at(buffer, offset))?;
    let bytes = rate * start.elapsed().as_secs_f64();
    file.sync_data()?;
    Ok(bytes / start.elapsed().as_secs_f64())
}

fn sequential(
    length: u64,
    time: Duration,
    mut transfer: impl FnMut(&mut [u8], u64) -> io::Result<()>,
) -> io::Result<f64> {
    let mut buffer = AlignedBuffer::new(SEQUENTIAL_SIZE);
    let (start, mut offset, mut bytes) = (Instant::now(), 0, 0.0);
    loop {
        transfer(buffer.aligned(), offset)?;
        bytes += SEQUENTIAL_SIZE as f64;
        offset = if offset + 2 * SEQUENTIAL_SIZE as u64 <= length { offset + SEQUENTIAL_SIZE as u64 } else { 0 };
        let took = start.elapsed();
        if took >= time {
            return Ok(bytes / took.as_secs_f64());
        }
    }
}

/// Reads blocks of 4 KiB at random offsets with this number of threads for `time`; returns reads per second.
pub fn random_reads(path: &Path, direct: bool, threads: u32, time: Duration) -> io::Result<f64> {
    let start = Instant::now();
    let read_randomly = |seed: u64| -> io::Result<u64> {
        let (file, length) = open(path, false, direct)?;
        let (mut buffer, mut done, mut state) =
            (AlignedBuffer::new(RANDOM_SIZE), 0, 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed));
        // At least one read, however late the thread begins.
        loop {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            file.read_exact_at(buffer.aligned(), state % (length / RANDOM_SIZE as u64) * RANDOM_SIZE as u64)?;
            done += 1;
            if start.elapsed() >= time {
                return Ok(done);
            }
        }
    };
    let done = std::thread::scope(|scope| {
        let readers: Vec<_> = (0..threads).map(|n| scope.spawn(move || read_randomly(u64::from(n) + 1))).collect();
        let joined = readers.into_iter().map(|reader| reader.join());
        joined
            .map(|done| done.unwrap_or_else(|_panic| Err(io::Error::other("a reader panicked"))))
            .sum::<io::Result<u64>>()
    })?;
    Ok(done as f64 / start.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_and_written() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let time = Duration::from_millis(5);
        assert!(read(file.path(), false, time).is_err(), "it is empty");
        file.as_file().set_len(3 << 20).unwrap();
        for figure in [
            read(file.path(), false, time).unwrap(),
            write(file.path(), false, time).unwrap(),
            random_reads(file.path(), false, 2, time).unwrap(),
        ] {
            assert!(figure > 0.0, "{figure}");
        }
        assert_eq!(file.as_file().metadata().unwrap().len(), 3 << 20, "it does not grow");
    }
}
