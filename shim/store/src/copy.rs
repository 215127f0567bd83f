//! Reads and writes the copy of the store, from which the state is restored when the database is damaged or missing. The copy is a
//! snapshot, `state.copy`, and the changes since then, `state.changes.N`: one line of JSON with a checksum for each commit. The
//! snapshot names the first file of changes that applies to it; a file of changes that ends with its number of lines is continued
//! by the next one.

use crate::database::{SCHEMA, StoreTable, StoredRow, for_each_row};
use crate::error::StoreError;
use nacelle_base::draft::Draft;
use nacelle_base::files::{FileError, at, remove_if_there};
use redb::ReadTransaction;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The version of the format of both files.
const FORMAT: u32 = 1;
/// The longest line in bytes. A commit has a few records, each of which a request of at most 16 MiB has made.
const MAX_LINE: u64 = 64 << 20;

/// The content of a line.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum CopyLine {
    /// The first line.
    Begin(CopyHeader),
    /// The rows of one commit: table, key, and the value or null.
    Rows(Vec<(StoreTable, String, Option<serde_json::Value>)>),
    /// The last line of a file that is complete: the number of lines between the first and this one.
    End(u64),
}

/// The first line of both files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct CopyHeader {
    format: u32,
    /// The schema of the rows.
    schema: u32,
    /// The number of the file of changes that applies to the snapshot, or of this file of changes.
    generation: u64,
}

/// The paths of the copy of a database.
#[derive(Clone, Debug)]
pub(crate) struct CopyPaths {
    directory: PathBuf,
    stem: String,
}

impl CopyPaths {
    /// Returns the paths beside this database: `state.redb` has `state.copy` and `state.changes.N`.
    pub fn of(database: &Path) -> CopyPaths {
        let directory = match database.parent() {
            Some(directory) if !directory.as_os_str().is_empty() => directory.to_owned(),
            _ => PathBuf::from("."),
        };
        CopyPaths { directory, stem: database.file_stem().unwrap_or_default().to_string_lossy().into_owned() }
    }

    /// Returns the path of the snapshot.
    pub fn snapshot(&self) -> PathBuf {
        self.directory.join(format!("{}.copy", self.stem))
    }

    /// Returns the path of a file of changes.
    pub fn changes(&self, generation: u64) -> PathBuf {
        self.directory.join(format!("{}.changes.{generation}", self.stem))
    }

    /// Returns the numbers of the files of changes that exist, in ascending order.
    pub fn generations(&self) -> Result<Vec<u64>, FileError> {
        let prefix = format!("{}.changes.", self.stem);
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&self.directory).map_err(at("read", &self.directory))? {
            let name = entry.map_err(at("read", &self.directory))?.file_name();
            found.extend(name.to_str().and_then(|name| name.strip_prefix(&prefix)?.parse::<u64>().ok()));
        }
        found.sort_unstable();
        Ok(found)
    }

    /// Returns the largest number that the snapshot or a file of changes has; 0 without any.
    pub fn last_generation(&self) -> Result<u64, FileError> {
        let path = self.snapshot();
        let mut line = Vec::new();
        let read = File::open(&path).and_then(|file| BufReader::new(file).take(MAX_LINE).read_until(b'\n', &mut line));
        match read {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(at("read", &path)(error)),
            _ => {}
        }
        let named = match decode_line(&line) {
            Some(CopyLine::Begin(header)) => header.generation,
            _ => 0,
        };
        Ok(self.generations()?.last().copied().unwrap_or_default().max(named))
    }

    /// Removes the files of changes before this one.
    pub fn remove_changes_before(&self, generation: u64) -> Result<(), FileError> {
        let old = self.generations()?.into_iter().filter(|number| *number < generation);
        old.map(|number| remove_if_there(&self.changes(number))).fold(Ok(()), Result::and)
    }
}

/// Writes one line.
fn write_line(to: &mut impl Write, json: &[u8]) -> io::Result<u64> {
    let checksum = format!("{:08x} ", crc32fast::hash(json));
    to.write_all(&[checksum.as_bytes(), json, b"\n"].concat())?;
    Ok(u64::try_from(checksum.len() + json.len() + 1).unwrap_or(u64::MAX))
}

fn encode_line(line: &CopyLine) -> Vec<u8> {
    // Numbers and strings only: this cannot fail, and an empty line would end the copy there.
    serde_json::to_vec(line).unwrap_or_default()
}

/// Encodes the rows of a commit. Their values are JSON already; a value that is not, which only a damaged database has, is an error.
fn encode_rows(rows: &[StoredRow]) -> io::Result<Vec<u8>> {
    let mut line = b"{\"rows\":[".to_vec();
    for (number, row) in rows.iter().enumerate() {
        let value = row.value.as_deref().unwrap_or(b"null");
        serde_json::from_slice::<serde::de::IgnoredAny>(value)?;
        if number > 0 {
            line.push(b',');
        }
        line.push(b'[');
        serde_json::to_writer(&mut line, &row.table)?;
        line.push(b',');
        serde_json::to_writer(&mut line, &row.key)?;
        line.push(b',');
        line.extend(value.iter().filter(|byte| **byte != b'\n'));
        line.push(b']');
    }
    line.extend(b"]}");
    Ok(line)
}

/// Writes a snapshot of the database, durably and whole, and removes the files of changes before `generation`. Blocks.
pub(crate) fn write_snapshot(
    paths: &CopyPaths,
    transaction: &ReadTransaction,
    generation: u64,
) -> Result<(), StoreError> {
    let path = paths.snapshot();
    let mut draft = Draft::create(&path)?;
    let mut to = BufWriter::new(&mut draft.file);
    let begin = encode_line(&CopyLine::Begin(CopyHeader { format: FORMAT, schema: SCHEMA, generation }));
    write_line(&mut to, &begin).map_err(at("write", &path))?;
    let mut count = 0;
    for_each_row(transaction, |row| {
        count += 1;
        encode_rows(&[row]).and_then(|line| write_line(&mut to, &line)).map_err(at("write", &path))?;
        Ok::<(), StoreError>(())
    })?;
    write_line(&mut to, &encode_line(&CopyLine::End(count))).map_err(at("write", &path))?;
    to.flush().map_err(at("write", &path))?;
    drop(to);
    draft.commit()?;
    Ok(paths.remove_changes_before(generation)?)
}

/// A file of changes that is being written.
#[derive(Debug)]
pub(crate) struct ChangeLog {
    path: PathBuf,
    file: File,
    /// The length in bytes.
    pub written: u64,
    count: u64,
}

impl ChangeLog {
    /// Creates the file, and replaces an existing one.
    pub fn create(paths: &CopyPaths, generation: u64) -> Result<ChangeLog, FileError> {
        let path = paths.changes(generation);
        let opened = File::options().write(true).create(true).truncate(true).mode(0o600).open(&path);
        let file = opened.map_err(at("create", &path))?;
        let mut log = ChangeLog { path, file, written: 0, count: 0 };
        log.write(&encode_line(&CopyLine::Begin(CopyHeader { format: FORMAT, schema: SCHEMA, generation })))?;
        Ok(log)
    }

    /// Appends the rows of a commit. They survive the end of this process, but not that of the node until the node's kernel has
    /// written them: no pod survives that either. After a failure the file ends before the commit.
    pub fn append(&mut self, rows: &[StoredRow]) -> Result<(), FileError> {
        let line = encode_rows(rows).map_err(at("write", &self.path))?;
        self.write(&line)?;
        self.count += 1;
        // A persistent VM outlives the node's kernel.
        match rows.iter().any(|row| row.table == StoreTable::Vms) {
            true => self.file.sync_data().map_err(at("write", &self.path)),
            false => Ok(()),
        }
    }

    /// Appends the last line: the next file of changes continues this one.
    pub fn end(mut self) -> Result<(), FileError> {
        self.write(&encode_line(&CopyLine::End(self.count)))
    }

    fn write(&mut self, json: &[u8]) -> Result<(), FileError> {
        match write_line(&mut self.file, json) {
            Ok(bytes) => {
                self.written += bytes;
                Ok(())
            }
            Err(error) => {
                // Half a line is recognized, too, if it cannot be removed.
                let _ = self.file.set_len(self.written);
                Err(at("write", &self.path)(error))
            }
        }
    }
}

/// The state that the copy has.
#[derive(Debug)]
pub(crate) struct RestoredCopy {
    /// The rows.
    pub rows: Vec<StoredRow>,
    /// Their schema.
    pub schema: u32,
    /// The time of the last change that the copy has, or of the snapshot.
    pub changed_at: SystemTime,
    /// Why later changes may be missing; `None` if the last file of changes is readable to its end.
    pub cut: Option<String>,
}

/// Why a copy cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {path}: {why}", path = path.display())]
pub(crate) struct CopyDamage {
    path: PathBuf,
    why: String,
}

/// Reads the copy; `None` if there is no snapshot. Blocks.
pub(crate) fn read_copy(paths: &CopyPaths) -> Result<Option<RestoredCopy>, CopyDamage> {
    let path = paths.snapshot();
    let damage = |why: String| CopyDamage { path: path.clone(), why };
    let mut rows = BTreeMap::new();
    let snapshot = match read_lines(&path, &mut rows) {
        Ok(Some(snapshot)) => snapshot,
        Ok(None) => return Ok(None),
        Err(error) => return Err(damage(error.to_string())),
    };
    let Some(CopyHeader { schema, mut generation, .. }) = snapshot.header else {
        return Err(damage(snapshot.cut.unwrap_or_else(|| "it has no first line".to_owned())));
    };
    if !snapshot.ended {
        return Err(damage(snapshot.cut.unwrap_or_else(|| "its last line is missing".to_owned())));
    }
    let (mut changed_at, mut cut) = (snapshot.modified, None);
    loop {
        let changes = match read_lines(&paths.changes(generation), &mut rows) {
            Ok(Some(changes)) => changes,
            Ok(None) => break,
            Err(error) => {
                cut = Some(error.to_string());
                break;
            }
        };
        changed_at = changed_at.max(changes.modified);
        let is_expected =
            changes.header.is_some_and(|header| (header.generation, header.schema) == (generation, schema));
        if !is_expected || !changes.ended {
            cut = changes.cut;
            break;
        }
        generation += 1;
    }
    let rows = rows.into_iter().map(|((table, key), value)| StoredRow { table, key, value: Some(value) });
    Ok(Some(RestoredCopy { rows: rows.collect(), schema, changed_at, cut }))
}

/// What was read of a file.
struct ReadLines {
    header: Option<CopyHeader>,
    /// The last line says that the file is complete.
    ended: bool,
    /// Why the reading stopped before the end of the file.
    cut: Option<String>,
    modified: SystemTime,
}

/// Applies the rows of a file until its end or its first invalid line; `None` if there is no file.
fn read_lines(path: &Path, rows: &mut BTreeMap<(StoreTable, String), Vec<u8>>) -> Result<Option<ReadLines>, FileError> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(at("open", path))?,
    };
    let modified = file.metadata().and_then(|file| file.modified()).map_err(at("read", path))?;
    let mut read = ReadLines { header: None, ended: false, cut: None, modified };
    let (mut from, mut line, mut number, mut count) = (BufReader::new(file), Vec::new(), 0_u64, 0_u64);
    loop {
        line.clear();
        from.by_ref().take(MAX_LINE).read_until(b'\n', &mut line).map_err(at("read", path))?;
        if line.is_empty() {
            break;
        }
        number += 1;
        match (decode_line(&line), read.header, read.ended) {
            (Some(CopyLine::Begin(header)), None, _) if header.format == FORMAT => read.header = Some(header),
            (Some(CopyLine::Rows(changed)), Some(_), false) => {
                count += 1;
                for (table, key, value) in changed {
                    match value {
                        Some(value) => drop(rows.insert((table, key), value.to_string().into())),
                        None => drop(rows.remove(&(table, key))),
                    }
                }
            }
            (Some(CopyLine::End(lines)), Some(_), false) if lines == count => read.ended = true,
            _ => {
                read.ended = false;
                read.cut = Some(format!("line {number} of {} is invalid", path.display()));
                break;
            }
        }
    }
    Ok(Some(read))
}

fn decode_line(line: &[u8]) -> Option<CopyLine> {
    let line = line.strip_suffix(b"\n")?;
    let (checksum, json) = (line.get(..8)?, line.get(9..)?);
    let checksum = u32::from_str_radix(std::str::from_utf8(checksum).ok()?, 16).ok()?;
    (crc32fast::hash(json) == checksum).then(|| serde_json::from_slice(json).ok())?
}
