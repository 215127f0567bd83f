//! Reads an untrusted tar stream: ustar, GNU and pax headers, long names, and all forms of sparse files. Nothing here allocates
//! more than the limits below, whatever the headers contain.

use crate::wire;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::io::{self, Read};

/// The maximum size in bytes of one pax header or long name.
const MAX_EXTENSION_BYTES: u64 = 1 << 20;
/// The maximum size in bytes of all pax headers and long names before one entry.
const MAX_EXTENSIONS_BYTES: u64 = 4 << 20;
/// The maximum number of pieces of one sparse file.
const MAX_SPARSE_PIECES: usize = 1 << 18;
/// The maximum number of extended attributes of one entry: the number that Linux allows users on the files of kernfs
/// (KERNFS_MAX_USER_XATTRS in include/linux/kernfs.h). Their names are then far below the 64 KiB that listxattr(2) returns
/// (XATTR_LIST_MAX).
const MAX_XATTRS: usize = 128;
/// The size in bytes of the blocks of an archive.
pub const BLOCK: u64 = 512;

/// Reasons that a stream is not a supported tar archive.
#[derive(Debug, thiserror::Error, Serialize, Deserialize)]
pub enum TarError {
    /// The stream failed or ended inside an entry.
    #[error("cannot read the archive at byte {at}")]
    Read {
        /// The offset in the stream.
        at: u64,
        /// The reason.
        #[serde(with = "wire::io_error")]
        source: io::Error,
    },
    /// A header violates a rule.
    #[error("the header before byte {at} of the archive is invalid: {why}")]
    Header {
        /// The offset in the stream.
        at: u64,
        /// The rule that the header violates.
        #[serde(deserialize_with = "wire::text")]
        why: Cow<'static, str>,
    },
}

/// The kind of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryType {
    /// A regular file.
    File,
    /// A hard link to `EntryHeader::link`.
    Hardlink,
    /// A symbolic link to `EntryHeader::link`.
    Symlink,
    /// A character device.
    Char,
    /// A block device.
    Block,
    /// A directory.
    Directory,
    /// A named pipe.
    Fifo,
}

/// One entry as the archive names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntryHeader {
    /// The path as in the archive: it may be absolute or contain `..`.
    pub path: Vec<u8>,
    /// The target of a link.
    pub link: Vec<u8>,
    /// The kind of the entry.
    pub kind: EntryType,
    /// The lower 12 bits of the mode.
    pub mode: u16,
    /// The owner's UID.
    pub uid: u32,
    /// The group's GID.
    pub gid: u32,
    /// The modification time in seconds since 1970.
    pub mtime: i64,
    /// The nanoseconds of the modification time.
    pub nanos: u32,
    /// The major and minor device number.
    pub device: (u32, u32),
    /// The size in bytes of the unpacked file.
    pub size: u64,
    /// The `SCHILY.xattr` records in the archive's order.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// For a sparse file, the pieces (offset, length) that have data, ascending. The data follow one another in the stream.
    pub sparse: Option<Vec<(u64, u64)>>,
    /// The offset of the data in the stream.
    pub data_at: u64,
}

/// A tar stream. `next` returns an entry, `read` its data.
pub struct TarReader<R> {
    stream: R,
    at: u64,
    /// The bytes of data of the current entry that have not been read.
    remaining: u64,
    /// The padding in bytes from the end of the data to the next block.
    padding: u64,
}

impl<R: Read> Read for TarReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let want = buffer.len().min(usize::try_from(self.remaining).unwrap_or(usize::MAX));
        let Some(part) = buffer.get_mut(..want).filter(|part| !part.is_empty()) else { return Ok(0) };
        let got = self.stream.read(part)?;
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.at += got as u64;
        self.remaining -= got as u64;
        Ok(got)
    }
}

impl<R: Read> TarReader<R> {
    /// Returns an archive that begins at the position of the stream.
    pub fn new(stream: R) -> Self {
        TarReader { stream, at: 0, remaining: 0, padding: 0 }
    }

    /// Returns the stream at its current position.
    pub fn into_inner(self) -> R {
        self.stream
    }

    /// Returns the next entry, or `None` at the end of the archive. Skips unread data of the previous one.
    pub fn next_entry(&mut self) -> Result<Option<EntryHeader>, TarError> {
        let mut extra = ExtendedFields::default();
        let mut left = MAX_EXTENSIONS_BYTES;
        loop {
            self.skip_to_next_header()?;
            let Some(raw) = self.read_header()? else { return Ok(None) };
            let size = raw.parse_number(124, 12).and_then(|size| u64::try_from(size).ok());
            let size = size.ok_or_else(|| self.header_error("the size is not a number"))?;
            if matches!(raw.type_flag(), b'x' | b'L' | b'K') {
                let fewer = left.checked_sub(size);
                left =
                    fewer.ok_or_else(|| self.header_error("its pax headers and long names are longer than 4 MiB"))?;
            }
            match raw.type_flag() {
                b'x' => extra.apply_pax(&self.read_extension(size)?).map_err(|why| self.header_error(why))?,
                b'L' => extra.path = Some(until_nul(&self.read_extension(size)?).to_vec()),
                b'K' => extra.link = Some(until_nul(&self.read_extension(size)?).to_vec()),
                b'g' => self.begin_data(size),
                _ => return self.convert_entry(&raw, size, extra).map(Some),
            }
        }
    }

    fn header_error(&self, why: &'static str) -> TarError {
        TarError::Header { at: self.at, why: why.into() }
    }

    fn begin_data(&mut self, size: u64) {
        self.remaining = size;
        self.padding = size.wrapping_neg() % BLOCK;
    }

    /// Skips to the header after the current entry. An archive may end with the data of its last entry, without padding and blocks of
    /// zeros: `umoci insert` writes such layers, and other runtimes accept them. Missing data are an error.
    fn skip_to_next_header(&mut self) -> Result<(), TarError> {
        io::copy(self, &mut io::sink()).map_err(|source| TarError::Read { at: self.at, source })?;
        let padding = std::mem::take(&mut self.padding);
        let skipped = io::copy(&mut self.stream.by_ref().take(padding), &mut io::sink());
        self.at += skipped.map_err(|source| TarError::Read { at: self.at, source })?;
        Ok(())
    }

    /// Returns the next 512 bytes, or `None` if the stream ends here.
    fn read_block(&mut self) -> Result<Option<HeaderBlock>, TarError> {
        let mut raw = [0; 512];
        let mut filled = 0;
        while let Some(rest) = raw.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match self.stream.read(rest) {
                Ok(0) if filled == 0 => return Ok(None),
                Ok(0) => {
                    return Err(TarError::Read { at: self.at, source: io::ErrorKind::UnexpectedEof.into() });
                }
                Ok(got) => filled += got,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(TarError::Read { at: self.at, source }),
            }
        }
        self.at += 512;
        Ok(Some(HeaderBlock(raw)))
    }

    /// Returns the next header, or `None` at the end: a block of zeros, or the end of the stream.
    fn read_header(&mut self) -> Result<Option<HeaderBlock>, TarError> {
        let Some(raw) = self.read_block()? else { return Ok(None) };
        if raw.0.iter().all(|&byte| byte == 0) {
            return Ok(None);
        }
        if raw.has_valid_checksum() { Ok(Some(raw)) } else { Err(self.header_error("the checksum is wrong")) }
    }

    /// Reads the content of a pax header or long name.
    fn read_extension(&mut self, size: u64) -> Result<Vec<u8>, TarError> {
        if size > MAX_EXTENSION_BYTES {
            return Err(self.header_error("a pax header or long name is longer than 1 MiB"));
        }
        self.begin_data(size);
        let mut content = Vec::new();
        self.read_to_end(&mut content).map_err(|source| TarError::Read { at: self.at, source })?;
        Ok(content)
    }

    fn convert_entry(
        &mut self,
        raw: &HeaderBlock,
        stored: u64,
        extra: ExtendedFields,
    ) -> Result<EntryHeader, TarError> {
        let path = extra.sparse.name.or(extra.path).unwrap_or_else(|| raw.full_path());
        let link = extra.link.unwrap_or_else(|| until_nul(raw.field(157, 100)).to_vec());
        let (kind, old_sparse) = match raw.type_flag() {
            b'0' | 0 | b'7' if path.ends_with(b"/") => (EntryType::Directory, false),
            b'0' | 0 | b'7' => (EntryType::File, false),
            b'S' => (EntryType::File, true),
            b'1' => (EntryType::Hardlink, false),
            b'2' => (EntryType::Symlink, false),
            b'3' => (EntryType::Char, false),
            b'4' => (EntryType::Block, false),
            b'5' => (EntryType::Directory, false),
            b'6' => (EntryType::Fifo, false),
            _ => return Err(self.header_error("the type of the entry is unknown")),
        };
        let stored = extra.size.unwrap_or(stored);
        let sparse = if old_sparse {
            let map = self.read_old_sparse_map(raw)?;
            let size = raw.parse_number(483, 12).and_then(|size| u64::try_from(size).ok());
            self.begin_data(stored);
            Some((map, size))
        } else if kind == EntryType::File {
            self.begin_data(stored);
            match extra.sparse.version {
                Some(_) => Some((self.read_sparse_map()?, extra.sparse.size)),
                None => extra.sparse.map.map(|map| (map, extra.sparse.size)),
            }
        } else {
            self.begin_data(0); // Other kinds have no data, whatever their size field says.
            None
        };
        let (sparse, size) = match sparse {
            Some((map, size)) => {
                let size = size.ok_or_else(|| self.header_error("a sparse file has no size"))?;
                self.check_sparse_map(&map, size)?;
                (Some(map), size)
            }
            None => (None, self.remaining),
        };
        let id = |value: Option<i64>| value.and_then(|value| u32::try_from(value).ok());
        let uid =
            extra.uid.or(id(raw.parse_number(108, 8))).ok_or_else(|| self.header_error("the owner is not a number"))?;
        let gid =
            extra.gid.or(id(raw.parse_number(116, 8))).ok_or_else(|| self.header_error("the group is not a number"))?;
        let mode = raw.parse_number(100, 8).ok_or_else(|| self.header_error("the mode is not a number"))? & 0o7777;
        let mtime = raw.parse_number(136, 12).ok_or_else(|| self.header_error("the time is not a number"))?;
        let (mtime, nanos) = extra.mtime.unwrap_or((mtime, 0));
        let device = match kind {
            EntryType::Char | EntryType::Block => id(raw.parse_number(329, 8))
                .zip(id(raw.parse_number(337, 8)))
                .filter(|&(major, minor)| major < 1 << 12 && minor < 1 << 20)
                .ok_or_else(|| self.header_error("a device number is out of range"))?,
            _ => (0, 0),
        };
        let mode = u16::try_from(mode).unwrap_or(0);
        let (xattrs, data_at) = (extra.xattrs, self.at);
        Ok(EntryHeader { path, link, kind, mode, uid, gid, mtime, nanos, device, size, xattrs, sparse, data_at })
    }

    /// Reads the map in an old GNU header and in the blocks that extend it.
    fn read_old_sparse_map(&mut self, raw: &HeaderBlock) -> Result<Vec<(u64, u64)>, TarError> {
        let mut map = Vec::new();
        let mut more = raw.add_sparse_pieces(386, 4, &mut map).map_err(|why| self.header_error(why))?
            && raw.0.get(482) == Some(&1);
        while more {
            let block = self.read_block()?.ok_or_else(|| self.header_error("the map of a sparse file is truncated"))?;
            more = block.add_sparse_pieces(0, 21, &mut map).map_err(|why| self.header_error(why))?
                && block.0.get(504) == Some(&1);
            if map.len() > MAX_SPARSE_PIECES {
                return Err(self.header_error("a sparse file has too many pieces"));
            }
        }
        Ok(map)
    }

    /// Reads the map of pax format 1.0: decimal numbers, one a line, before the data, padded to a block.
    fn read_sparse_map(&mut self) -> Result<Vec<(u64, u64)>, TarError> {
        let start = self.remaining;
        let count = usize::try_from(self.read_decimal_line()?).ok().filter(|&count| count <= MAX_SPARSE_PIECES);
        let count = count.ok_or_else(|| self.header_error("a sparse file has too many pieces"))?;
        let mut map = Vec::new();
        for _ in 0..count {
            map.push((self.read_decimal_line()?, self.read_decimal_line()?));
        }
        let rest = (start - self.remaining).wrapping_neg() % BLOCK;
        let mut rest_of_block = [0; BLOCK as usize];
        let rest = rest_of_block.get_mut(..usize::try_from(rest).unwrap_or(0)).unwrap_or_default();
        self.read_exact(rest).map_err(|source| TarError::Read { at: self.at, source })?;
        Ok(map)
    }

    fn read_decimal_line(&mut self) -> Result<u64, TarError> {
        let mut value: u64 = 0;
        for position in 0..21 {
            let mut byte = [0];
            self.read_exact(&mut byte).map_err(|source| TarError::Read { at: self.at, source })?;
            let [byte] = byte;
            if byte == b'\n' && position > 0 {
                return Ok(value);
            }
            let digit = byte.is_ascii_digit().then(|| u64::from(byte - b'0'));
            let next = digit.and_then(|digit| value.checked_mul(10)?.checked_add(digit));
            value = next
                .ok_or_else(|| self.header_error("the map of a sparse file contains something other than numbers"))?;
        }
        Err(self.header_error("the map of a sparse file contains something other than numbers"))
    }

    fn check_sparse_map(&self, map: &[(u64, u64)], size: u64) -> Result<(), TarError> {
        let mut end = 0;
        let mut stored = 0u64;
        for &(offset, length) in map {
            if offset < end {
                return Err(self.header_error("the pieces of a sparse file are not in order"));
            }
            end = offset
                .checked_add(length)
                .filter(|&end| end <= size)
                .ok_or_else(|| self.header_error("a piece of a sparse file ends after the file"))?;
            stored = stored.saturating_add(length);
        }
        if stored == self.remaining {
            Ok(())
        } else {
            Err(self.header_error("the pieces of a sparse file are not its data"))
        }
    }
}

impl<R: io::Seek> TarReader<io::BufReader<R>> {
    /// Seeks past the data of the current entry without reading them.
    pub fn seek_past_data(&mut self) -> Result<(), TarError> {
        let length = self.remaining.saturating_add(std::mem::take(&mut self.padding));
        self.remaining = 0;
        let jumped = i64::try_from(length).map_err(|_cause| io::ErrorKind::UnexpectedEof.into());
        let jumped = jumped.and_then(|length| self.stream.seek_relative(length));
        jumped.map_err(|source| TarError::Read { at: self.at, source })?;
        self.at = self.at.saturating_add(length);
        Ok(())
    }
}

/// The values that pax and GNU headers before an entry set for it.
#[derive(Default)]
struct ExtendedFields {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u32>,
    gid: Option<u32>,
    mtime: Option<(i64, u32)>,
    xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    sparse: SparseFields,
}

#[derive(Default)]
struct SparseFields {
    /// Format 1.0: the map precedes the data.
    version: Option<()>,
    name: Option<Vec<u8>>,
    size: Option<u64>,
    map: Option<Vec<(u64, u64)>>,
    /// Format 0.0: an offset whose length has not been read yet.
    offset: Option<u64>,
}

impl ExtendedFields {
    /// Parses the records `LENGTH KEY=VALUE\n` of a pax header.
    fn apply_pax(&mut self, mut content: &[u8]) -> Result<(), &'static str> {
        while !content.is_empty() {
            let (key, value, rest) = split_record(content).ok_or("a pax record is not LENGTH KEY=VALUE")?;
            content = rest;
            self.apply_record(key, value)?;
        }
        Ok(())
    }

    fn apply_record(&mut self, key: &[u8], value: &[u8]) -> Result<(), &'static str> {
        let present = !value.is_empty();
        let name = || {
            if value.contains(&0) { Err("a pax path contains a NUL") } else { Ok(present.then(|| value.to_vec())) }
        };
        let whole = || match parse_decimal(value) {
            None if present => Err("a pax number is not a number"),
            number => Ok(number),
        };
        let id = || match whole()?.map(u32::try_from) {
            Some(Err(_)) => Err("a pax owner or group is out of range"),
            other => Ok(other.and_then(Result::ok)),
        };
        match key {
            b"path" => self.path = name()?,
            b"linkpath" => self.link = name()?,
            b"size" => self.size = whole()?,
            b"uid" => self.uid = id()?,
            b"gid" => self.gid = id()?,
            b"mtime" => {
                self.mtime = if present { Some(parse_time(value).ok_or("a pax time is invalid")?) } else { None }
            }
            b"GNU.sparse.name" => self.sparse.name = name()?,
            b"GNU.sparse.size" | b"GNU.sparse.realsize" => self.sparse.size = whole()?,
            b"GNU.sparse.major" if value == b"1" => self.sparse.version = Some(()),
            b"GNU.sparse.major" if value != b"0" => return Err("the sparse format is unknown"),
            b"GNU.sparse.map" => {
                self.sparse.map =
                    Some(parse_pairs(value).ok_or("a sparse map is not pairs of numbers, or has more than 262144")?)
            }
            b"GNU.sparse.numblocks" => self.sparse.map = Some(Vec::new()),
            b"GNU.sparse.offset" => self.sparse.offset = whole()?,
            b"GNU.sparse.numbytes" => {
                let piece = self.sparse.offset.take().zip(whole()?).ok_or("a sparse piece has no offset")?;
                self.sparse.map.get_or_insert_default().push(piece); // Headers of 4 MiB bound their number.
            }
            _ => {
                if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                    // An empty value deletes the record, as for every key (POSIX, pax): tar has no empty attributes.
                    if !present {
                        self.xattrs.retain(|(known, _)| known != name);
                        return Ok(());
                    }
                    if self.xattrs.len() >= MAX_XATTRS {
                        return Err("an entry has more than 128 extended attributes");
                    }
                    self.xattrs.push((name.to_vec(), value.to_vec()));
                }
            }
        }
        Ok(())
    }
}

/// Splits off the first record: key, value, and the rest.
fn split_record(content: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let space = content.iter().take(8).position(|&byte| byte == b' ')?;
    let length = usize::try_from(parse_decimal(content.get(..space)?)?).ok()?;
    let (record, rest) = content.split_at_checked(length)?;
    let record = record.get(space + 1..)?.strip_suffix(b"\n")?;
    let equals = record.iter().position(|&byte| byte == b'=')?;
    Some((record.get(..equals)?, record.get(equals + 1..)?, rest))
}

fn parse_decimal(text: &[u8]) -> Option<u64> {
    if text.is_empty() || text.len() > 20 || !text.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(text).ok()?.parse().ok()
}

fn parse_pairs(text: &[u8]) -> Option<Vec<(u64, u64)>> {
    if text.is_empty() {
        return Some(Vec::new());
    }
    let mut numbers = text.split(|&byte| byte == b',').map(parse_decimal);
    let mut map = Vec::new();
    while let Some(offset) = numbers.next() {
        if map.len() >= MAX_SPARSE_PIECES {
            return None;
        }
        map.push((offset?, numbers.next()??));
    }
    Some(map)
}

/// Parses `SECONDS` or `SECONDS.FRACTION`; it may be negative.
fn parse_time(text: &[u8]) -> Option<(i64, u32)> {
    let (negative, text) = match text.strip_prefix(b"-") {
        Some(text) => (true, text),
        None => (false, text),
    };
    let mut parts = text.splitn(2, |&byte| byte == b'.');
    let seconds = i64::try_from(parse_decimal(parts.next()?)?).ok()?;
    let fraction = parts.next().unwrap_or_default();
    if !fraction.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let digits = fraction.iter().chain(std::iter::repeat(&b'0')).take(9);
    let nanos = digits.fold(0u32, |nanos, digit| nanos * 10 + u32::from(digit - b'0'));
    match (negative, nanos) {
        (false, _) => Some((seconds, nanos)),
        (true, 0) => Some((-seconds, 0)),
        (true, _) => Some((-seconds - 1, 1_000_000_000 - nanos)),
    }
}

fn until_nul(field: &[u8]) -> &[u8] {
    field.split(|&byte| byte == 0).next().unwrap_or_default()
}

/// A block of 512 bytes: a header, or the continuation of a sparse map.
struct HeaderBlock([u8; 512]);

impl HeaderBlock {
    fn field(&self, at: usize, length: usize) -> &[u8] {
        self.0.get(at..at + length).unwrap_or_default()
    }

    fn type_flag(&self) -> u8 {
        self.0.get(156).copied().unwrap_or_default()
    }

    fn has_valid_checksum(&self) -> bool {
        let bytes = || self.0.iter().enumerate().map(|(at, &byte)| if (148..156).contains(&at) { b' ' } else { byte });
        let unsigned: i64 = bytes().map(i64::from).sum();
        let signed: i64 = bytes().map(|byte| i64::from(byte.cast_signed())).sum();
        self.parse_number(148, 8).is_some_and(|sum| sum == unsigned || sum == signed)
    }

    /// Returns the name, with the prefix field of the POSIX format.
    fn full_path(&self) -> Vec<u8> {
        let name = until_nul(self.field(0, 100));
        let prefix = until_nul(self.field(345, 155));
        if self.field(257, 6) == b"ustar\0" && !prefix.is_empty() {
            [prefix, b"/", name].concat()
        } else {
            name.to_vec()
        }
    }

    /// Parses a number: octal text between spaces and NULs (empty is 0), or base 256 if the first bit is set.
    fn parse_number(&self, at: usize, length: usize) -> Option<i64> {
        let field = self.field(at, length);
        let (&first, rest) = field.split_first()?;
        if first & 0x80 != 0 {
            let start = if first & 0x40 != 0 { i128::from(first.cast_signed()) } else { i128::from(first & 0x7f) };
            let value = rest.iter().try_fold(start, |value, &byte| value.checked_mul(256)?.checked_add(byte.into()));
            return value.and_then(|value| i64::try_from(value).ok());
        }
        let blank = |byte: &u8| matches!(byte, b' ' | 0);
        let digits = field.iter().skip_while(|byte| blank(byte)).take_while(|byte| !blank(byte));
        digits.into_iter().try_fold(0i64, |value, &digit| {
            (b'0'..=b'7').contains(&digit).then(|| value.checked_mul(8)?.checked_add(i64::from(digit - b'0')))?
        })
    }

    /// Adds `count` pieces of an old sparse map. Returns false if the map ends here.
    fn add_sparse_pieces(&self, at: usize, count: usize, map: &mut Vec<(u64, u64)>) -> Result<bool, &'static str> {
        for piece in 0..count {
            let place = at + piece * 24;
            if self.0.get(place).is_none_or(|&first| first == 0) {
                return Ok(false);
            }
            let number = |at| self.parse_number(at, 12).and_then(|number| u64::try_from(number).ok());
            map.push(number(place).zip(number(place + 12)).ok_or("a sparse piece is not a pair of numbers")?);
        }
        Ok(true)
    }
}

#[cfg(test)]
#[path = "tar_tests.rs"]
mod tests;
