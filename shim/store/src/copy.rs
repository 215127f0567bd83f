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
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The largest number of a file of changes: one that no daemon reaches. Files with larger ones are not of a store.
const MAX_GENERATION: u64 = 1 << 62;
/// The largest number of commits that a file may name: more than any store reaches.
const MAX_COMMITS: u64 = 1 << 62;

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
    /// The number of commits that the database had when the file began. Each line of changes is one more.
    #[serde(default)]
    commits: Option<u64>,
}

/// The state of the files of a copy ([`CopyPaths::identity`]).
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct CopyIdentity {
    snapshot: Option<(u64, i64, i64)>,
    generations: Vec<u64>,
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

    /// Returns what changes when a snapshot is replaced or a file of changes begins: the snapshot's inode and time, and the numbers of
    /// the files of changes.
    pub fn identity(&self) -> Result<CopyIdentity, FileError> {
        let path = self.snapshot();
        let snapshot = match std::fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            found => {
                let metadata = found.map_err(at("read", &path))?;
                Some((metadata.ino(), metadata.mtime(), metadata.mtime_nsec()))
            }
        };
        Ok(CopyIdentity { snapshot, generations: self.generations()? })
    }

    /// Returns whether a path is that of the database or of a file of its copy.
    pub fn is_of_store(&self, database: &Path, path: &Path) -> bool {
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let resolve = |path: &Path| path.canonicalize().ok();
        let is_beside = resolve(directory).is_some_and(|found| resolve(&self.directory) == Some(found));
        let name = path.file_name().unwrap_or_default();
        let is_changes = name.to_str().is_some_and(|name| name.starts_with(&format!("{}.changes.", self.stem)));
        let is_named = Some(name) == database.file_name() || Some(name) == self.snapshot().file_name() || is_changes;
        is_beside && is_named
    }

    /// Returns the numbers of the files of changes that exist, in ascending order.
    pub fn generations(&self) -> Result<Vec<u64>, FileError> {
        let prefix = format!("{}.changes.", self.stem);
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&self.directory).map_err(at("read", &self.directory))? {
            let name = entry.map_err(at("read", &self.directory))?.file_name();
            found.extend(name.to_str().and_then(|name| name.strip_prefix(&prefix)?.parse::<u64>().ok()));
        }
        found.retain(|number| *number <= MAX_GENERATION);
        found.sort_unstable();
        Ok(found)
    }

    /// Returns the largest number that the snapshot or a file of changes has; 0 without any.
    pub fn last_generation(&self) -> Result<u64, FileError> {
        let path = self.snapshot();
        let mut line = Vec::new();
        let read =
            open_at_once(&path).and_then(|file| BufReader::new(file).take(MAX_LINE).read_until(b'\n', &mut line));
        match read {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(at("read", &path)(error)),
            _ => {}
        }
        let named = match decode_line(&line) {
            Some(CopyLine::Begin(header)) if header.generation <= MAX_GENERATION => header.generation,
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

/// Opens a file for reading. Does not wait for a writer if it is a FIFO.
pub(crate) fn open_at_once(path: &Path) -> io::Result<File> {
    File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)
}

/// Writes one line; fails if it is longer than a reader accepts.
fn write_line(to: &mut impl Write, json: &[u8]) -> io::Result<u64> {
    // Checksum, space and line feed.
    if u64::try_from(json.len() + 10).is_ok_and(|length| length > MAX_LINE) {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, "a commit is longer than a line of the copy may be"));
    }
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
    commits: Option<u64>,
) -> Result<(), StoreError> {
    let path = paths.snapshot();
    let mut draft = Draft::create(&path)?;
    let mut to = BufWriter::new(&mut draft.file);
    let begin = encode_line(&CopyLine::Begin(CopyHeader { format: FORMAT, schema: SCHEMA, generation, commits }));
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
    /// The directory entry of the file is on the disk.
    is_linked: bool,
}

impl ChangeLog {
    /// Creates the file, and replaces an existing one.
    pub fn create(paths: &CopyPaths, generation: u64, commits: Option<u64>) -> Result<ChangeLog, FileError> {
        let path = paths.changes(generation);
        let opened = File::options().write(true).create(true).truncate(true).mode(0o600).open(&path);
        let file = opened.map_err(at("create", &path))?;
        let mut log = ChangeLog { path, file, written: 0, count: 0, is_linked: false };
        log.write(&encode_line(&CopyLine::Begin(CopyHeader { format: FORMAT, schema: SCHEMA, generation, commits })))?;
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
            true => self.sync(),
            false => Ok(()),
        }
    }

    /// Appends the last line: the next file of changes continues this one. Durable, so that the changes of the next file, which may
    /// be of a persistent VM, are reached after a power cut.
    pub fn end(mut self) -> Result<(), FileError> {
        self.write(&encode_line(&CopyLine::End(self.count)))?;
        self.sync()
    }

    /// Writes the file, and its entry in the directory, to the disk.
    fn sync(&mut self) -> Result<(), FileError> {
        self.file.sync_data().map_err(at("write", &self.path))?;
        if !self.is_linked {
            let directory = self.path.parent().unwrap_or(Path::new("."));
            File::open(directory).and_then(|directory| directory.sync_all()).map_err(at("write", directory))?;
            self.is_linked = true;
        }
        Ok(())
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
    /// The number of commits of the database that the rows have; `None` if the copy is of a version that did not count them.
    pub commits: Option<u64>,
    /// The time of the last change that the copy has, or of the snapshot.
    pub changed_at: SystemTime,
    /// The reason why later changes may be missing; `None` if the last file of changes is readable to its end.
    pub cut: Option<String>,
    /// The damage of the snapshot, from which any rows may be missing; `None` if it is intact.
    pub damage: Option<String>,
}

/// Reads the intact lines of the copy; `None` if there is none. Fails if the disk cannot read a file. Blocks.
pub(crate) fn read_copy(paths: &CopyPaths) -> Result<Option<RestoredCopy>, FileError> {
    let mut rows = BTreeMap::new();
    let generations = paths.generations()?;
    let snapshot = read_lines(&paths.snapshot(), &mut rows, None)?;
    let damage = match &snapshot {
        None => Some(format!("{} is missing", paths.snapshot().display())),
        Some(snapshot) if snapshot.ended => None,
        Some(snapshot) => Some(snapshot.cut.clone().unwrap_or_else(|| {
            let lacks = if snapshot.header.is_some() { "last" } else { "first" };
            format!("{} lacks its {lacks} line", paths.snapshot().display())
        })),
    };
    let begin = snapshot.as_ref().and_then(|snapshot| snapshot.header);
    let Some(mut generation) = begin.map(|begin| begin.generation).or(generations.first().copied()) else {
        // Without a snapshot and changes there is no copy.
        let damaged = |snapshot: ReadLines| RestoredCopy {
            rows: Vec::new(),
            schema: SCHEMA,
            commits: None,
            changed_at: snapshot.modified,
            cut: None,
            damage,
        };
        return Ok(snapshot.map(damaged));
    };
    let mut schema = begin.map(|begin| begin.schema);
    let mut commits = begin.and_then(|begin| begin.commits);
    let mut changed_at = snapshot.as_ref().map_or(SystemTime::UNIX_EPOCH, |snapshot| snapshot.modified);
    let mut cut = None;
    loop {
        let expected = ExpectedHeader { generation, schema, commits };
        let Some(changes) = read_lines(&paths.changes(generation), &mut rows, Some(expected))? else {
            if generations.iter().any(|later| *later > generation) {
                cut = Some(format!("{} is missing", paths.changes(generation).display()));
            }
            break;
        };
        changed_at = changed_at.max(changes.modified);
        if let Some(header) = changes.header {
            schema = Some(header.schema);
            commits = header.commits.map(|commits| commits + changes.count);
        }
        if !changes.ended {
            let is_continued = generations.iter().any(|later| *later > generation);
            let unfinished = || format!("{} lacks its last line", paths.changes(generation).display());
            cut = changes.cut.or_else(|| is_continued.then(unfinished));
            break;
        }
        generation += 1;
    }
    if snapshot.is_none() && rows.is_empty() && cut.is_none() {
        return Ok(None);
    }
    let rows = rows.into_iter().map(|((table, key), value)| StoredRow { table, key, value: Some(value) });
    let schema = schema.unwrap_or(SCHEMA);
    Ok(Some(RestoredCopy { rows: rows.collect(), schema, commits, changed_at, cut, damage }))
}

/// Writes rows as a file of their own, which has the format of a snapshot, durably and whole. Replaces an existing file. Blocks.
pub(crate) fn write_export(to: &Path, rows: &[StoredRow], schema: u32, commits: u64) -> Result<(), FileError> {
    let mut draft = Draft::create(to)?;
    let write = |file: &mut File| {
        let mut file = BufWriter::new(file);
        let header = CopyHeader { format: FORMAT, schema, generation: 0, commits: Some(commits) };
        write_line(&mut file, &encode_line(&CopyLine::Begin(header)))?;
        let mut count = 0;
        for row in rows {
            write_line(&mut file, &encode_rows(std::slice::from_ref(row))?)?;
            count += 1;
        }
        write_line(&mut file, &encode_line(&CopyLine::End(count)))?;
        file.flush()
    };
    write(&mut draft.file).map_err(at("write", to))?;
    draft.commit()
}

/// Reads a file of [`write_export`], whole or not at all. Blocks.
pub(crate) fn read_export(path: &Path) -> Result<RestoredCopy, StoreError> {
    let invalid = |why: String| StoreError::InvalidExport { path: path.to_owned(), why };
    let mut rows = BTreeMap::new();
    let read = read_lines(path, &mut rows, None)?.ok_or_else(|| invalid("it does not exist".to_owned()))?;
    let header = read.header.ok_or_else(|| {
        let reason = if read.cut.as_deref().is_some_and(|cut| cut.ends_with("is not a file")) {
            "it is not a file"
        } else {
            "its first line is invalid"
        };
        invalid(reason.to_owned())
    })?;
    if !read.ended {
        return Err(invalid(read.cut.unwrap_or_else(|| "its end is missing".to_owned())));
    }
    if header.generation != 0 {
        return Err(invalid("it is the snapshot or a part of a copy, which may lack changes".to_owned()));
    }
    let rows = rows.into_iter().map(|((table, key), value)| StoredRow { table, key, value: Some(value) }).collect();
    let ReadLines { modified: changed_at, .. } = read;
    Ok(RestoredCopy { rows, schema: header.schema, commits: header.commits, changed_at, cut: None, damage: None })
}

/// The header that a file of changes must have; what is `None` is not known.
struct ExpectedHeader {
    generation: u64,
    schema: Option<u32>,
    commits: Option<u64>,
}

impl ExpectedHeader {
    fn allows(&self, header: CopyHeader) -> bool {
        header.generation == self.generation
            && self.schema.is_none_or(|schema| schema == header.schema)
            && self.commits.zip(header.commits).is_none_or(|(expected, commits)| expected == commits)
    }
}

/// The lines that were read of a file.
struct ReadLines {
    header: Option<CopyHeader>,
    /// The number of lines with rows.
    count: u64,
    /// The last line says that the file is complete.
    ended: bool,
    /// The reason why the reading stopped before the end of the file.
    cut: Option<String>,
    modified: SystemTime,
}

/// Applies the rows of a file until its end or its first invalid line, none if the header is another one than expected; `None` if
/// there is no file.
fn read_lines(
    path: &Path,
    rows: &mut BTreeMap<(StoreTable, String), Vec<u8>>,
    expected: Option<ExpectedHeader>,
) -> Result<Option<ReadLines>, FileError> {
    let file = match open_at_once(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(at("open", path))?,
    };
    let metadata = file.metadata().map_err(at("read", path))?;
    let modified = metadata.modified().map_err(at("read", path))?;
    let mut read = ReadLines { header: None, count: 0, ended: false, cut: None, modified };
    if !metadata.is_file() {
        read.cut = Some(format!("{} is not a file", path.display()));
        return Ok(Some(read));
    }
    let (mut from, mut line, mut number) = (BufReader::new(file), Vec::new(), 0_u64);
    loop {
        line.clear();
        from.by_ref().take(MAX_LINE).read_until(b'\n', &mut line).map_err(at("read", path))?;
        if line.is_empty() {
            break;
        }
        number += 1;
        match (decode_line(&line), read.header, read.ended) {
            (Some(CopyLine::Begin(header)), None, _)
                if header.format == FORMAT
                    && header.commits.is_none_or(|commits| commits <= MAX_COMMITS)
                    && expected.as_ref().is_none_or(|expected| expected.allows(header)) =>
            {
                read.header = Some(header);
            }
            (Some(CopyLine::Rows(changed)), Some(_), false) => {
                read.count += 1;
                for (table, key, value) in changed {
                    match value {
                        Some(value) => drop(rows.insert((table, key), value.to_string().into())),
                        None => drop(rows.remove(&(table, key))),
                    }
                }
            }
            (Some(CopyLine::End(lines)), Some(_), false) if lines == read.count => read.ended = true,
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
