//! Keeps the output of the guest's console: the newest part in memory, and more in a file of bounded size. The bytes come
//! from the guest, so they may be anything and of any length.

use nacelle_base::files::FileError;
use nacelle_base::jailed::{JailedDir, JailedFile};
use nacelle_base::machine::ConsoleKind;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// The text that the guest kernel prints when it panics. The beginning of that line ("Kernel panic - ") may be mixed with
/// the output of a program, because a panicking kernel does not wait for the lock of the port.
pub(crate) const PANIC_MESSAGE: &str = "not syncing: ";
/// The number of bytes that are kept in memory and reported with the machine's end.
pub(crate) const TAIL_BYTES: usize = 8 << 10;
/// The maximum size of the file in bytes.
pub(crate) const MAX_LOG_BYTES: u64 = 1 << 20;

/// Returns the kernel parameters that select the console. A virtio console is found late; until then the kernel prints on
/// the serial port by its early console.
pub(crate) fn kernel_parameters(kind: ConsoleKind) -> &'static [&'static str] {
    match kind {
        ConsoleKind::Serial => &["console=ttyS0"],
        ConsoleKind::Virtio => &["earlycon=uart8250,io,0x3f8", "console=hvc0", "8250.nr_uarts=0"],
    }
}

/// The console of one VM.
pub(crate) struct ConsoleLog {
    log: File,
    written: u64,
    tail: Vec<u8>,
    file_failed: bool,
}

impl ConsoleLog {
    /// Opens the log file and truncates it.
    pub fn create(path: &Path) -> io::Result<ConsoleLog> {
        let log = OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o600).open(path)?;
        Ok(ConsoleLog { log, written: 0, tail: Vec::with_capacity(2 * TAIL_BYTES), file_failed: false })
    }

    /// Appends output of the guest.
    pub fn append(&mut self, bytes: &[u8]) {
        self.tail.extend_from_slice(last_bytes(bytes, TAIL_BYTES));
        if self.tail.len() >= 2 * TAIL_BYTES {
            self.tail.drain(..self.tail.len() - TAIL_BYTES);
        }
        // A full disk must not end the VM: from then on only the tail in memory is kept.
        if !self.file_failed
            && let Err(error) = self.append_to_file(bytes)
        {
            tracing::warn!(%error, "cannot write the console log of a VM: it is incomplete from here on");
            self.file_failed = true;
        }
    }

    fn append_to_file(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            if self.written >= MAX_LOG_BYTES {
                self.keep_newest_half()?;
            }
            let free = usize::try_from(MAX_LOG_BYTES - self.written).unwrap_or(usize::MAX);
            let (now, rest) = bytes.split_at(bytes.len().min(free));
            self.log.write_all(now)?;
            self.written += now.len() as u64;
            bytes = rest;
        }
        Ok(())
    }

    fn keep_newest_half(&mut self) -> io::Result<()> {
        let mut half = Vec::new();
        self.log.seek(SeekFrom::Start(self.written / 2))?;
        self.log.read_to_end(&mut half)?;
        self.log.set_len(0)?;
        self.log.rewind()?;
        self.log.write_all(&half)?;
        self.written = half.len() as u64;
        Ok(())
    }

    /// Returns the newest complete lines, without control characters.
    pub fn tail(&self) -> String {
        printable_tail(&self.tail, TAIL_BYTES)
    }

    /// Returns whether the newest output contains this text.
    pub fn contains(&self, text: &str) -> bool {
        self.tail.windows(text.len()).any(|window| window == text.as_bytes())
    }
}

fn last_bytes(bytes: &[u8], count: usize) -> &[u8] {
    bytes.get(bytes.len().saturating_sub(count)..).unwrap_or_default()
}

/// Returns the newest lines of a console's log, at most `limit` bytes, without control characters; `None` if there is no
/// log. The process that writes the file is not trusted.
pub fn log_tail(dir: &JailedDir, log: JailedFile, limit: usize) -> Result<Option<String>, FileError> {
    // One byte more than the limit shows that the text was cut.
    let bytes = dir.tail(log, limit as u64 + 1)?;
    Ok(bytes.map(|bytes| printable_tail(&bytes, limit)))
}

/// Returns the last `limit` bytes as text without control characters, beginning with a whole line if the text was cut.
pub(crate) fn printable_tail(bytes: &[u8], limit: usize) -> String {
    let newest = last_bytes(bytes, limit);
    let whole = match newest.iter().position(|byte| *byte == b'\n') {
        Some(end) if newest.len() < bytes.len() => newest.get(end + 1..).unwrap_or_default(),
        _ => newest,
    };
    let text = String::from_utf8_lossy(whole);
    let printable = text.chars().filter_map(|c| match c {
        char::REPLACEMENT_CHARACTER => Some('?'),
        '\n' | '\t' => Some(c),
        _ => (!c.is_control()).then_some(c),
    });
    printable.collect::<String>().trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_tail_has_whole_printable_lines() {
        assert_eq!(printable_tail(b"one\ntwo\r\nth\x1b[mree\xff\n", 100), "one\ntwo\nth[mree?");
        assert_eq!(printable_tail(b"one\ntwo\nthree", 9), "three");
        assert_eq!(printable_tail(b"one long line", 4), "line");
        assert_eq!(printable_tail(b"", 4), "");
    }

    #[test]
    fn the_log_of_a_machine_is_read_from_its_end() {
        let directory = tempfile::tempdir().unwrap();
        let (dir, log) = (JailedDir::new(directory.path()), JailedFile::new("console.log"));
        let tail = |limit| log_tail(&dir, log, limit);
        assert_eq!(tail(9).unwrap(), None);
        std::fs::write(directory.path().join("console.log"), "one\ntwo\nthree\n").unwrap();
        let tails = [100, 11, 10].map(|limit| tail(limit).unwrap().unwrap());
        assert_eq!(tails, ["one\ntwo\nthree", "two\nthree", "three"]);
        std::fs::remove_file(directory.path().join("console.log")).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", directory.path().join("console.log")).unwrap();
        assert!(tail(9).is_err());
    }

    #[test]
    fn the_log_file_is_bounded_and_keeps_the_newest_output() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("console.log");
        let mut console = ConsoleLog::create(&path).unwrap();
        for n in 0..5_000 {
            console.append(format!("{n:->500}\n").as_bytes());
        }
        console.append(&vec![b'x'; 3 << 20]);
        console.append(b"\nthe end\n");
        let text = std::fs::read(&path).unwrap();
        assert!(text.len() as u64 <= MAX_LOG_BYTES, "{}", text.len());
        assert!(text.ends_with(b"xxx\nthe end\n"));
        assert_eq!(console.tail(), "the end");
        assert!(console.contains("the end") && !console.contains("panic"));
        assert!(console.tail.capacity() <= 4 * TAIL_BYTES);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]
        #[test]
        fn any_amount_of_output_is_bounded(pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..9000), 0..8)) {
            let directory = tempfile::tempdir().unwrap();
            let mut console = ConsoleLog::create(&directory.path().join("log")).unwrap();
            for piece in &pieces {
                console.append(piece);
                prop_assert!(console.tail.len() <= 3 * TAIL_BYTES);
                let tail = console.tail();
                prop_assert!(tail.len() <= TAIL_BYTES && !tail.contains('\x1b'));
            }
        }
    }
}
