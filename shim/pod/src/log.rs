//! Writes a container's log file in CRI's format: one line `TIME STREAM TAG TEXT` for each entry; tag `F` marks the end of
//! a line of the container, `P` a line that continues in the next entry.
//!
//! The pumps of one container share a [`ContainerLog`] with the requests of the daemon, which opens the files by name and sends the
//! descriptors; its lock is held for one write.

use crate::broadcast::OutputBroadcast;
use std::fs::File;
use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};

/// The maximum text of one entry in bytes; longer lines are split.
pub const MAX_TEXT: usize = 16 << 10;

/// The stream from which a line came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogStream {
    /// Standard output, or the terminal.
    Stdout,
    /// Standard error.
    Stderr,
}

impl LogStream {
    fn name(self) -> &'static str {
        match self {
            LogStream::Stdout => "stdout",
            LogStream::Stderr => "stderr",
        }
    }
}

/// The log of one container; output is discarded while it has no file.
#[derive(Debug, Default)]
pub struct ContainerLog(Mutex<Option<OpenLog>>);

#[derive(Debug)]
struct OpenLog {
    file: File,
    /// The last write failed and was reported.
    failing: bool,
    /// The file ends within an entry, so the next entry must begin on a new line.
    within_entry: bool,
}

impl OpenLog {
    fn new(file: File) -> OpenLog {
        OpenLog { file, failing: false, within_entry: false }
    }

    /// Writes as much as possible.
    fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.file.write(bytes) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    let (done, rest) = bytes.split_at(count.min(bytes.len()));
                    self.within_entry = !done.ends_with(b"\n");
                    bytes = rest;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl ContainerLog {
    /// Closes the file and continues in this one. Blocks while a write is in progress.
    pub fn set(&self, file: File) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(OpenLog::new(file));
    }

    /// Appends complete entries. A full disk must not stop the container: entries that cannot be written are lost, which is
    /// reported once.
    pub fn append(&self, entries: &[u8]) {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(open) = open.as_mut() else { return };
        let written = if open.within_entry { open.write(b"\n") } else { Ok(()) }.and_then(|()| open.write(entries));
        match &written {
            Err(error) if !open.failing => {
                tracing::warn!(%error, "cannot write a container's output to its log; the output is lost")
            }
            _ => {}
        }
        open.failing = written.is_err();
    }
}

/// Splits the bytes of one stream into entries.
#[derive(Debug)]
pub struct LogSplitter {
    source: LogStream,
    /// The incomplete line, at most [`MAX_TEXT`] bytes.
    line: Vec<u8>,
}

impl LogSplitter {
    /// Returns the splitter of one stream.
    pub fn new(source: LogStream) -> Self {
        Self { source, line: Vec::new() }
    }

    /// Takes bytes and appends all entries that are complete to `out`.
    pub fn push(&mut self, mut bytes: &[u8], time: &str, out: &mut Vec<u8>) {
        while !bytes.is_empty() {
            let free = MAX_TEXT - self.line.len();
            let end = bytes.iter().take(free + 1).position(|byte| *byte == b'\n');
            match end {
                Some(end) => {
                    let (text, rest) = bytes.split_at(end);
                    self.append_entry(text, time, b'F', out);
                    bytes = rest.get(1..).unwrap_or_default();
                }
                None if bytes.len() > free => {
                    let (text, rest) = bytes.split_at(free);
                    self.append_entry(text, time, b'P', out);
                    bytes = rest;
                }
                None => {
                    self.line.extend_from_slice(bytes);
                    return;
                }
            }
        }
    }

    /// Ends the stream: a last line without a newline becomes a partial entry.
    pub fn finish(&mut self, time: &str, out: &mut Vec<u8>) {
        if !self.line.is_empty() {
            self.append_entry(&[], time, b'P', out);
        }
    }

    fn append_entry(&mut self, text: &[u8], time: &str, tag: u8, out: &mut Vec<u8>) {
        out.extend_from_slice(time.as_bytes());
        out.push(b' ');
        out.extend_from_slice(self.source.name().as_bytes());
        out.extend_from_slice(&[b' ', tag, b' ']);
        out.append(&mut self.line);
        out.extend_from_slice(text);
        out.push(b'\n');
    }
}

/// Reads one stream to its end into the log and the attached clients. Blocks, so it runs on its own thread. A broken stream
/// counts as ended.
pub fn pump(mut stream: impl io::Read, source: LogStream, log: &ContainerLog, broadcast: &OutputBroadcast) {
    let mut splitter = LogSplitter::new(source);
    let mut buffer = vec![0; 32 << 10];
    let mut out = Vec::new();
    loop {
        let bytes = match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => buffer.get(..count).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_broken_stream) => break,
        };
        splitter.push(bytes, &rfc3339(crate::now_nanos()), &mut out);
        if !out.is_empty() {
            log.append(&out);
            out.clear();
            out.shrink_to(64 << 10);
        }
        broadcast.send(bytes);
    }
    broadcast.end();
    splitter.finish(&rfc3339(crate::now_nanos()), &mut out);
    if !out.is_empty() {
        log.append(&out);
    }
}

/// Formats nanoseconds since 1970 as `2006-01-02T15:04:05.000000000Z`.
pub fn rfc3339(nanos: i64) -> String {
    let seconds = nanos.div_euclid(1_000_000_000);
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    // Days since 0000-03-01, so that the leap day is the last day of a year; 146097 days are 400 years.
    let day = days + 719_468;
    let (era, day) = (day.div_euclid(146_097), day.rem_euclid(146_097));
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next_year) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    format!(
        "{:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{:09}Z",
        era * 400 + year + next_year,
        second / 3_600,
        second / 60 % 60,
        second % 60,
        nanos.rem_euclid(1_000_000_000)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TIME: &str = "T";

    fn split(pieces: &[&[u8]]) -> Vec<u8> {
        let (mut lines, mut out) = (LogSplitter::new(LogStream::Stdout), Vec::new());
        for piece in pieces {
            lines.push(piece, TIME, &mut out);
        }
        lines.finish(TIME, &mut out);
        out
    }

    /// Joins entries to the bytes that the container wrote.
    fn joined(entries: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for entry in entries.split_inclusive(|byte| *byte == b'\n') {
            let text = entry.strip_prefix(b"T stdout ").unwrap().strip_suffix(b"\n").unwrap();
            assert!(text.len() <= MAX_TEXT + 2);
            let (tag, text) = text.split_at(2);
            bytes.extend_from_slice(text);
            if tag == b"F " {
                bytes.push(b'\n');
            } else {
                assert_eq!(tag, b"P ");
            }
        }
        bytes
    }

    #[test]
    fn entries_have_the_format_of_cri() {
        assert_eq!(split(&[b"a\nb", b"c\n\nd"]), b"T stdout F a\nT stdout F bc\nT stdout F \nT stdout P d\n");
        assert_eq!(split(&[b"\xff\xfe\n"]), b"T stdout F \xff\xfe\n");
        assert_eq!(split(&[b""]), b"");
    }

    #[test]
    fn lines_of_exactly_the_limit_stay_whole() {
        for (length, tags) in [(MAX_TEXT, vec!['F']), (MAX_TEXT + 1, vec!['P', 'F']), (MAX_TEXT * 2, vec!['P', 'F'])] {
            let mut line = vec![b'x'; length];
            line.push(b'\n');
            let out = split(&[&line[..7], &line[7..]]);
            let text = String::from_utf8(out.clone()).unwrap();
            let got: Vec<char> = text.lines().map(|entry| entry.chars().nth(9).unwrap()).collect();
            assert_eq!(got, tags, "{length}");
            assert_eq!(joined(&out), line);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn no_byte_is_lost_or_added(
            pieces in prop::collection::vec(prop_oneof![
                prop::collection::vec(prop_oneof![Just(b'\n'), any::<u8>()], 0..200),
                (any::<u8>(), 0usize..40_000).prop_map(|(byte, count)| vec![byte; count]),
            ], 0..8)
        ) {
            let pieces: Vec<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
            prop_assert!(joined(&split(&pieces)) == pieces.concat());
        }

        #[test]
        fn times_sort_like_their_texts(a in 0i64..4_102_444_800_000_000_000, b in 0i64..4_102_444_800_000_000_000) {
            prop_assert_eq!(a.cmp(&b), rfc3339(a).cmp(&rfc3339(b)));
        }
    }

    #[test]
    fn times_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00"),
            (951_782_400, "2000-02-29T00:00:00"),
            (1_735_689_599, "2024-12-31T23:59:59"),
            (4_107_542_400, "2100-03-01T00:00:00"),
        ] {
            assert_eq!(rfc3339(seconds * 1_000_000_000 + 5), format!("{text}.000000005Z"));
        }
    }

    #[test]
    fn after_a_rotation_the_log_continues_in_a_new_file() {
        let world = tempfile::tempdir().unwrap();
        let path = world.path().join("0.log");
        let log = ContainerLog::default();
        log.set(File::create(&path).unwrap());
        log.append(b"one\n");
        std::fs::rename(&path, world.path().join("0.log.1")).unwrap();
        log.append(b"two\n");
        log.set(File::create(&path).unwrap());
        pump(&b"three\nfour"[..], LogStream::Stderr, &log, &OutputBroadcast::default());
        assert_eq!(std::fs::read_to_string(world.path().join("0.log.1")).unwrap(), "one\ntwo\n");
        let text = std::fs::read_to_string(&path).unwrap();
        let texts: Vec<&str> = text.lines().map(|line| line.split_once(' ').unwrap().1).collect();
        assert_eq!(texts, ["stderr F three", "stderr P four"]);
    }

    #[test]
    fn an_entry_after_an_incomplete_one_has_a_line_of_its_own() {
        let world = tempfile::tempdir().unwrap();
        let path = world.path().join("0.log");
        let log = ContainerLog::default();
        log.set(File::create(&path).unwrap());
        // The part of an entry that a full disk leaves.
        log.append(b"T stdout F ha");
        log.append(b"T stdout F whole\n");
        log.append(b"T stdout F next\n");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "T stdout F ha\nT stdout F whole\nT stdout F next\n");
    }

    #[test]
    fn without_a_file_output_is_read_and_dropped() {
        let mut output = &b"x\n"[..];
        pump(&mut output, LogStream::Stdout, &ContainerLog::default(), &OutputBroadcast::default());
        assert!(output.is_empty());
    }
}
