//! Frames the content of one file as a tar archive, so that a file of an artifact becomes a layer of the store. The archive depends on
//! nothing but path and content: owner, mode and time are fixed. The content is hashed while it is read.

use super::tar::BLOCK as TAR_BLOCK;
use nacelle_model::digest::Digest;
use sha2::{Digest as _, Sha256};
use std::io::{self, Read};

/// The mode of the file: readable for all, executable for none.
const MODE: u64 = 0o444;
/// The largest number that an octal field of 12 bytes holds.
const MAX_OCTAL_SIZE: u64 = 0o777_7777_7777;
/// The most bytes of an archive beside the content: headers, records with the longest path, padding and end.
pub const MAX_FRAME: u64 = 16 << 10;
/// The bytes of the two blocks of zeros that end an archive.
const END_BYTES: u64 = 2 * TAR_BLOCK;

/// A stream of `size` bytes as an archive with one file. A shorter or longer stream is an error.
pub struct FileTar<R> {
    content: R,
    head: io::Cursor<Vec<u8>>,
    /// The bytes of the content that have not been read.
    left: u64,
    /// The zeros after the content that have not been read.
    zeros: u64,
    ended: bool,
    hash: Sha256,
}

impl<R: Read> FileTar<R> {
    /// `path` is relative, has no `.` or `..` and no NUL.
    pub fn new(path: &str, size: u64, content: R) -> FileTar<R> {
        let records = pax_record("path", path) + &pax_record("size", &size.to_string());
        let mut head = header(b'x', records.len() as u64).to_vec();
        head.extend_from_slice(records.as_bytes());
        head.resize(head.len().next_multiple_of(TAR_BLOCK as usize), 0);
        head.extend_from_slice(&header(b'0', size));
        let zeros = size.wrapping_neg() % TAR_BLOCK + END_BYTES;
        FileTar { content, head: io::Cursor::new(head), left: size, zeros, ended: false, hash: Sha256::new() }
    }

    /// Returns the digest of the content that was read so far.
    pub fn content_digest(self) -> Digest {
        Digest(self.hash.finalize().into())
    }

    /// Fails if the content is longer than announced.
    fn expect_end(&mut self) -> io::Result<()> {
        if !self.ended {
            if self.content.read(&mut [0])? > 0 {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "it is longer than its descriptor says"));
            }
            self.ended = true;
        }
        Ok(())
    }
}

impl<R: Read> Read for FileTar<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.head.read(buffer)?;
        if got > 0 || buffer.is_empty() {
            return Ok(got);
        }
        let most = |left: u64| buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        if self.left > 0 {
            let most = most(self.left);
            let part = buffer.get_mut(..most).unwrap_or_default();
            let got = self.content.read(part)?;
            if got == 0 {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it is shorter than its descriptor says"));
            }
            self.hash.update(part.get(..got).unwrap_or_default());
            self.left -= got as u64;
            return Ok(got);
        }
        self.expect_end()?;
        let got = most(self.zeros);
        buffer.get_mut(..got).unwrap_or_default().fill(0);
        self.zeros -= got as u64;
        Ok(got)
    }
}

/// Returns a record of a pax header, `LENGTH KEY=VALUE\n`. The length counts its own digits.
fn pax_record(key: &str, value: &str) -> String {
    let rest = key.len() + value.len() + " =\n".len();
    let mut length = rest;
    while length != rest + length.to_string().len() {
        length = rest + length.to_string().len();
    }
    format!("{length} {key}={value}\n")
}

/// Returns a header of POSIX.1-2001. A size that does not fit is in a pax record as well, which takes precedence.
fn header(kind: u8, size: u64) -> [u8; TAR_BLOCK as usize] {
    let mut block = [0; TAR_BLOCK as usize];
    let mut put = |at: usize, bytes: &[u8]| {
        for (to, from) in block.iter_mut().skip(at).zip(bytes) {
            *to = *from;
        }
    };
    put(0, b"file");
    for (at, digits, number) in
        [(100, 7, MODE), (108, 7, 0), (116, 7, 0), (124, 11, size.min(MAX_OCTAL_SIZE)), (136, 11, 0)]
    {
        put(at, format!("{number:0digits$o}").as_bytes());
    }
    put(148, b"        ");
    put(156, &[kind]);
    put(257, b"ustar\x0000");
    let sum: u64 = block.iter().map(|byte| u64::from(*byte)).sum();
    let sum = format!("{sum:06o}\0");
    for (to, from) in block.iter_mut().skip(148).zip(sum.as_bytes()) {
        *to = *from;
    }
    block
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layer::tar::{EntryType, TarReader};
    use proptest::prelude::*;

    #[test]
    fn large_files_have_their_size() {
        let size = (20 << 30) + 1;
        let mut archive = TarReader::new(FileTar::new("model", size, io::repeat(7)));
        let entry = archive.next_entry().unwrap().unwrap();
        assert_eq!((entry.size, entry.path.as_slice()), (size, &b"model"[..]));
    }

    #[test]
    fn content_of_another_length_is_an_error() {
        for (content, words) in [("ab", "shorter"), ("abcd", "longer")] {
            let error = FileTar::new("a", 3, content.as_bytes()).read_to_end(&mut Vec::new()).unwrap_err();
            assert!(error.to_string().contains(words), "{error}");
        }
    }

    proptest! {
        #[test]
        fn a_file_is_read_back(path in "[^\0/]{1,300}(/[^\0/]{1,300}){0,3}", content: Vec<u8>, piece in 1..700usize) {
            let mut framed = FileTar::new(&path, content.len() as u64, content.as_slice());
            let (mut bytes, mut buffer) = (Vec::new(), vec![0; piece]);
            loop {
                match framed.read(&mut buffer).unwrap() {
                    0 => break,
                    got => bytes.extend_from_slice(&buffer[..got]),
                }
            }
            prop_assert_eq!(bytes.len() % 512, 0);
            prop_assert!((bytes.len() - content.len()) as u64 <= MAX_FRAME);
            prop_assert_eq!(framed.content_digest(), Digest::of(&content));
            let mut archive = TarReader::new(bytes.as_slice());
            let entry = archive.next_entry().unwrap().unwrap();
            prop_assert_eq!((entry.path.as_slice(), entry.kind), (path.as_bytes(), EntryType::File));
            prop_assert_eq!((entry.mode, entry.uid, entry.gid, entry.mtime), (0o444, 0, 0, 0));
            let mut read = Vec::new();
            archive.read_to_end(&mut read).unwrap();
            prop_assert_eq!(read, content);
            prop_assert!(archive.next_entry().unwrap().is_none());
        }
    }
}
