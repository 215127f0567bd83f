//! Writes the log of a pod process to standard error and bounds the file behind it: a pod lives for months, and its log lies in memory
//! (`/run`). The process beside it that serves files (`nacelle-fs`) is forked from it and bounds its own part in the same way.

use nacelle_base::retry::retry_interrupted;
use nix::sys::uio::pread;
use nix::unistd::ftruncate;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::Mutex;
use std::sync::PoisonError;
use tracing_subscriber::fmt::MakeWriter;

/// The bytes that a process writes before it drops the older half.
const LIMIT: u64 = 1 << 20;

/// A log of bounded size. `F` is a file that is open for reading and appending; anything else is written without a bound.
pub(crate) struct BoundedLog<F> {
    file: F,
    limit: u64,
    /// The bytes that this process has written since the log was last shortened.
    written: Mutex<u64>,
}

impl BoundedLog<io::Stderr> {
    /// Returns the log on standard error.
    pub fn stderr() -> BoundedLog<io::Stderr> {
        BoundedLog::new(io::stderr(), LIMIT)
    }
}

impl<F: AsFd> BoundedLog<F> {
    fn new(file: F, limit: u64) -> BoundedLog<F> {
        BoundedLog { file, limit, written: Mutex::new(0) }
    }

    /// Keeps the newest whole lines, half of the limit at most.
    fn shorten(&self) -> io::Result<u64> {
        let file = self.file.as_fd();
        // The writes of other processes are not counted: the end is where nothing can be read any more.
        let mut bytes = Vec::new();
        let mut buffer = vec![0; 64 << 10];
        loop {
            let offset = i64::try_from(bytes.len()).map_err(io::Error::other)?;
            let count = retry_interrupted(|| pread(file, &mut buffer, offset))?;
            if count == 0 || bytes.len() as u64 > 4 * self.limit {
                break;
            }
            bytes.extend_from_slice(buffer.get(..count).unwrap_or_default());
        }
        let from = bytes.len().saturating_sub(usize::try_from(self.limit / 2).unwrap_or(usize::MAX));
        let newest = bytes.get(from..).unwrap_or_default();
        let whole = newest.iter().position(|byte| *byte == b'\n').and_then(|end| newest.get(end + 1..));
        let kept = whole.unwrap_or_default();
        retry_interrupted(|| ftruncate(file, 0))?;
        write_all(file, kept)?;
        Ok(kept.len() as u64)
    }
}

fn write_all(file: impl AsFd, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let count = retry_interrupted(|| nix::unistd::write(&file, bytes))?;
        bytes = bytes.get(count..).unwrap_or_default();
    }
    Ok(())
}

impl<F: AsFd> Write for &BoundedLog<F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // The count is right after each statement, so a panic leaves it consistent.
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        *written = written.saturating_add(bytes.len() as u64);
        if *written > self.limit {
            // A pipe or a terminal has no size.
            *written = self.shorten().unwrap_or(0);
        }
        Ok(retry_interrupted(|| nix::unistd::write(&self.file, bytes))?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a, F: AsFd + 'a> MakeWriter<'a> for BoundedLog<F> {
    type Writer = &'a BoundedLog<F>;

    fn make_writer(&'a self) -> Self::Writer {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::OpenOptions;

    #[test]
    fn a_log_keeps_its_newest_lines() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pod.log");
        let open = || OpenOptions::new().read(true).append(true).create(true).open(&path).unwrap();
        let log = BoundedLog::new(open(), 1000);
        for number in 0..500 {
            (&log).write_all(format!("line {number}\n").as_bytes()).unwrap();
            assert!(std::fs::metadata(&path).unwrap().len() <= 1010);
        }
        // Another process writes to the same file.
        open().write_all(&[b'x'; 900]).unwrap();
        for number in 500..600 {
            (&log).write_all(format!("line {number}\n").as_bytes()).unwrap();
        }
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.ends_with("line 598\nline 599\n") && text.len() <= 1010, "{text}");
        assert!(text.lines().all(|line| line.starts_with("line ")), "{text}");
    }

    #[test]
    fn a_pipe_is_written_without_a_bound() {
        let (mut reader, writer) = io::pipe().unwrap();
        let log = BoundedLog::new(writer, 10);
        (&log).write_all(b"more than ten bytes").unwrap();
        drop(log);
        assert_eq!(io::read_to_string(&mut reader).unwrap(), "more than ten bytes");
    }
}
