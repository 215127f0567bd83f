//! Checks by the headers of an initramfs whether it is one, and whole. Reads no content of its files; of a compressed one it knows the
//! first bytes only.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// The size of a header of a cpio archive in the formats "newc" and "crc".
const HEADER: usize = 110;
/// The name of a cpio archive's last entry.
const TRAILER: &[u8] = b"TRAILER!!!\0";
/// The maximum number of entries whose headers are read; an archive with more is taken for whole.
const MAX_ENTRIES: usize = 4096;
/// The first bytes of the compressed formats that Linux unpacks.
const COMPRESSED: [&[u8]; 7] =
    [b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\0", b"BZh", b"\x02\x21\x4c\x18", b"\x89LZO\0", b"\x5d\0\0"];

/// The reason why a file cannot be an initramfs.
#[derive(Debug, thiserror::Error)]
pub enum InitrdError {
    /// The file cannot be read.
    #[error("cannot read the file")]
    Read(#[from] io::Error),
    /// The file is none of the formats that Linux unpacks.
    #[error("the file is neither a cpio archive nor compressed")]
    Format,
    /// The archive ends in the middle.
    #[error("the archive is cut off after {length} bytes")]
    Truncated {
        /// The size of the file in bytes.
        length: u64,
    },
}

/// Rejects a file that no guest can unpack as its initramfs. Blocks for the reads of some headers.
pub fn check_initrd(file: &File) -> Result<(), InitrdError> {
    let length = file.metadata()?.len();
    let truncated = || InitrdError::Truncated { length };
    let mut start = [0; 6];
    let got = file.read_at(&mut start, 0)?;
    if COMPRESSED.iter().any(|magic| start.get(..got).is_some_and(|start| start.starts_with(magic))) {
        return Ok(());
    }
    let mut at = 0_u64;
    for _ in 0..MAX_ENTRIES {
        let mut entry = [0; HEADER + TRAILER.len()];
        let got = read_full(file, &mut entry, at)?;
        let (header, name) = entry.split_at(HEADER);
        if !header.starts_with(b"070701") && !header.starts_with(b"070702") {
            return Err(if at == 0 || got == HEADER + TRAILER.len() { InitrdError::Format } else { truncated() });
        }
        if got < HEADER {
            return Err(truncated());
        }
        if name == TRAILER && got == HEADER + TRAILER.len() {
            return Ok(());
        }
        let number = |range| header.get(range).and_then(|digits| std::str::from_utf8(digits).ok());
        let number = |range| number(range).and_then(|digits| u64::from_str_radix(digits, 16).ok());
        let (Some(size), Some(name_size)) = (number(54..62), number(94..102)) else { return Err(InitrdError::Format) };
        // Both are less than 2^32, and `at` is at most the file's length.
        at = (at + HEADER as u64 + name_size).next_multiple_of(4);
        at = (at + size).next_multiple_of(4);
        if at >= length {
            return Err(truncated());
        }
    }
    Ok(())
}

/// Reads until the buffer is full or the file ends; returns the number of bytes.
fn read_full(file: &File, buffer: &mut [u8], at: u64) -> io::Result<usize> {
    let mut done = 0;
    while let Some(rest) = buffer.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, at + done as u64) {
            Ok(0) => break,
            Ok(got) => done += got,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn entry(name: &str, content: &[u8]) -> Vec<u8> {
        let mut bytes = b"070701".to_vec();
        let fields = [0, 0o100_644, 0, 0, 1, 0, content.len(), 0, 0, 0, 0, name.len() + 1, 0];
        fields.iter().for_each(|field| bytes.extend(format!("{field:08x}").bytes()));
        bytes.extend(name.bytes().chain([0]));
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes.extend(content);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn check(bytes: &[u8]) -> Result<(), InitrdError> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        check_initrd(&file)
    }

    #[test]
    fn a_whole_archive_is_accepted_and_no_part_of_it_is() {
        let whole = [entry("dev", b""), entry("init", &[7; 301]), entry("TRAILER!!!", b"")].concat();
        check(&whole).unwrap();
        // Further archives may follow.
        check(&[&whole[..], b"\x1f\x8b"].concat()).unwrap();
        let needed = whole.len() - (HEADER + TRAILER.len()).next_multiple_of(4) + HEADER + TRAILER.len();
        check(&whole[..needed]).unwrap();
        for length in 0..needed {
            let error = check(&whole[..length]).unwrap_err();
            let is_expected = match error {
                InitrdError::Format => length < 6,
                InitrdError::Truncated { .. } => length >= 6,
                InitrdError::Read(_) => false,
            };
            assert!(is_expected, "{length}: {error}");
        }
    }

    #[test]
    fn other_files_are_no_initramfs() {
        for bytes in [&b""[..], b"\x7fELF and more than six bytes of it", &[9; 5000]] {
            assert!(matches!(check(bytes), Err(InitrdError::Format)));
        }
        let mut lies = entry("init", b"");
        lies[54..62].copy_from_slice(b"-0000001");
        assert!(matches!(check(&lies), Err(InitrdError::Format)));
        COMPRESSED.iter().for_each(|magic| check(magic).unwrap());
    }
}
