//! Opens the database of the store. One that is damaged is set aside, and one that is missing or was set aside is restored from its
//! copy. Without a copy, the readable records of the damaged file are taken; without those the store begins empty.

use crate::Contents;
use crate::copy::{CopyPaths, RestoredCopy, read_copy};
use crate::database::{
    SCHEMA, StoredRow, decode_rows, describe_unreadable, migrate, open_database, read_rows, read_schema, write_new,
    write_rows,
};
use crate::error::{OpenFailure, StoreError};
use nacelle_base::Chain;
use nacelle_base::draft::Draft;
use nacelle_base::files::{FileError, at, remove_if_there};
use redb::Database;
use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The number of backups from before migrations that are kept.
const MAX_BACKUPS: usize = 3;
/// The number of damaged databases that are kept.
const MAX_DAMAGED: usize = 3;
/// Time to wait for the lock of a damaged file.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// Where the contents of a store come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ContentsOrigin {
    /// The database.
    #[default]
    Database,
    /// The copy of a database that was damaged or missing.
    Copy,
    /// The records of a damaged database that could be read.
    Damaged,
    /// Nothing: there is no database and no copy, or none that can be read.
    Nothing,
}

/// Opens or restores the database `path`, and reads it.
pub(crate) fn open_or_restore(path: &Path, copy: &CopyPaths) -> Result<(Database, Contents), StoreError> {
    let (why, readable) = match load(path) {
        Ok(Some((database, contents))) => return Ok((database, contents)),
        Ok(None) => ("it is missing".to_owned(), None),
        Err(LoadFailure::Unusable(error)) => return Err(error),
        Err(LoadFailure::Damaged { why, readable }) => (why, Some(readable)),
    };
    let restored = read_copy(copy).unwrap_or_else(|error| {
        tracing::warn!(error = %Chain(&error), "the copy of the state store cannot be used");
        None
    });
    if let Some(newer) = restored.as_ref().map(|copy| copy.schema).filter(|schema| *schema > SCHEMA) {
        return Err(newer_than_this(path, newer));
    }
    let is_damaged = readable.is_some();
    let set_aside = if is_damaged { Some(set_aside(path)?) } else { None };
    let (mut rows, schema, origin, copied) = match (restored, readable) {
        (Some(RestoredCopy { rows, schema, changed_at, cut }), _) => {
            (rows, schema, ContentsOrigin::Copy, Some((changed_at, cut)))
        }
        (None, Some(rows)) if !rows.is_empty() => (rows, SCHEMA, ContentsOrigin::Damaged, None),
        (None, _) => (Vec::new(), SCHEMA, ContentsOrigin::Nothing, None),
    };
    rows.retain(StoredRow::can_be_written);
    let database = open_database(path).map_err(|failure| new_file_failure(path, failure))?;
    // The tables, by which a complete database is recognized, come with the rows.
    write_new(&database, &rows, schema)?;
    if schema < SCHEMA {
        migrate(&database, schema)?;
    }
    let rows = read_rows(path, &database).map_err(|failure| new_file_failure(path, failure))?;
    let (mut contents, unreadable) = decode_rows(&rows);
    contents.origin = origin;
    if !unreadable.is_empty() {
        let removals: Vec<_> = unreadable.iter().map(|(row, _)| StoredRow { value: None, ..row.clone() }).collect();
        write_rows(&database, &removals)?;
    }
    if is_damaged || origin != ContentsOrigin::Nothing {
        let found = Found { path, why, set_aside, origin, copied };
        found.warn(&contents, &describe_unreadable(&unreadable));
    }
    Ok((database, contents))
}

/// What was found instead of a database, for the log.
struct Found<'a> {
    path: &'a Path,
    why: String,
    set_aside: Option<PathBuf>,
    origin: ContentsOrigin,
    /// The time of the last change that the copy has, and why it may end early.
    copied: Option<(SystemTime, Option<String>)>,
}

impl Found<'_> {
    fn warn(&self, contents: &Contents, unreadable: &str) {
        let Found { path, why, set_aside, origin, copied } = self;
        let (path, why) = (path.display(), why.as_str());
        let set_aside = set_aside.as_ref().map_or("none".to_owned(), |path| path.display().to_string());
        let (pods, containers, vms) = (contents.pods.len(), contents.containers.len(), contents.vms.len());
        match (origin, copied) {
            (ContentsOrigin::Copy, Some((changed_at, cut))) => {
                let last_change_age = changed_at.elapsed().unwrap_or_default().as_secs();
                let lacks = cut.as_deref().unwrap_or("at most the change that was being written");
                tracing::warn!(
                    %path, why, set_aside, pods, containers, vms, last_change_age, lacks, unreadable,
                    "the state store was restored from its copy; last_change_age is the time in seconds since the copy's last change, and pods and containers without a record are ended"
                );
            }
            (ContentsOrigin::Damaged, _) => tracing::warn!(
                %path, why, set_aside, pods, containers, vms, unreadable,
                "the state store is damaged and has no copy; its readable records are kept, and pods and containers without a record are ended"
            ),
            _ => tracing::warn!(
                %path, why, set_aside,
                "the state store is damaged and has no copy: it begins empty, and all pods are ended"
            ),
        }
    }
}

/// A new file that cannot be opened is not damaged: the disk may be full.
fn new_file_failure(path: &Path, failure: OpenFailure) -> StoreError {
    match failure {
        OpenFailure::Unusable(error) => error,
        OpenFailure::Damaged(why) => {
            StoreError::Open { path: path.to_owned(), source: Box::new(redb::Error::Corrupted(why)) }
        }
    }
}

/// Why a database cannot be loaded.
enum LoadFailure {
    /// It is damaged; these rows can be read.
    Damaged { why: String, readable: Vec<StoredRow> },
    /// It may be intact.
    Unusable(StoreError),
}

impl From<OpenFailure> for LoadFailure {
    fn from(failure: OpenFailure) -> LoadFailure {
        match failure {
            OpenFailure::Damaged(why) => LoadFailure::Damaged { why, readable: Vec::new() },
            OpenFailure::Unusable(error) => LoadFailure::Unusable(error),
        }
    }
}

/// Opens and reads the database; `None` if there is none, or one whose creation was cut.
fn load(path: &Path) -> Result<Option<(Database, Contents)>, LoadFailure> {
    match std::fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(LoadFailure::Unusable(at("find", path)(error).into())),
        Ok(file) if file.len() == 0 => return Ok(None),
        Ok(_) => {}
    }
    let mut database = open_database(path)?;
    match read_schema(path, &database)? {
        None => return Ok(None),
        Some(SCHEMA) => {}
        Some(newer) if newer > SCHEMA => return Err(LoadFailure::Unusable(newer_than_this(path, newer))),
        Some(older) => {
            // A clean shutdown of the database first, so that the backup is complete.
            drop(database);
            let backup = back_up(path, older).map_err(|error| LoadFailure::Unusable(error.into()))?;
            database = open_database(path)?;
            migrate(&database, older).map_err(LoadFailure::Unusable)?;
            tracing::info!(
                from = older, to = SCHEMA, backup = %backup.display(),
                "migrated the state store; the backup is the file as it was before"
            );
        }
    }
    let rows = read_rows(path, &database)?;
    let (contents, mut unreadable) = decode_rows(&rows);
    if let Some(other) = unreadable.iter().position(|(_, error)| error.other_version.is_some()) {
        return Err(LoadFailure::Unusable(unreadable.swap_remove(other).1.into()));
    }
    if !unreadable.is_empty() {
        let why = describe_unreadable(&unreadable);
        return Err(LoadFailure::Damaged { why, readable: rows });
    }
    Ok(Some((database, contents)))
}

/// Returns the path of the backup of a database with this schema.
fn backup_path(path: &Path, schema: u32) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".v{schema}"));
    path.with_file_name(name)
}

fn newer_than_this(path: &Path, found: u32) -> StoreError {
    let backup = Some(backup_path(path, SCHEMA)).filter(|backup| backup.exists());
    StoreError::Newer { path: path.to_owned(), found, supported: SCHEMA, backup }
}

/// Copies the closed database to `NAME.vSCHEMA`, durably, and removes the backups of the oldest schemas.
pub(crate) fn back_up(path: &Path, schema: u32) -> Result<PathBuf, FileError> {
    let backup = backup_path(path, schema);
    let mut draft = Draft::create(&backup)?;
    let mut from = File::open(path).map_err(at("open", path))?;
    io::copy(&mut from, &mut draft.file).map_err(at("write", &backup))?;
    draft.commit()?;
    let mut older: Vec<_> =
        (0..schema).rev().map(|schema| backup_path(path, schema)).filter(|path| path.exists()).collect();
    older.drain(..(MAX_BACKUPS - 1).min(older.len()));
    older.iter().try_for_each(|old| remove_if_there(old))?;
    Ok(backup)
}

/// Renames the damaged database to `NAME.damaged-SECONDS`, and removes the oldest of such files. The lock keeps another daemon out
/// that is about to do the same.
fn set_aside(path: &Path) -> Result<PathBuf, StoreError> {
    let deadline = Instant::now() + LOCK_TIMEOUT;
    let file = File::open(path).map_err(at("open", path))?;
    loop {
        match file.try_lock() {
            Ok(()) => break,
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => std::thread::sleep(LOCK_PAUSE),
            Err(TryLockError::WouldBlock) => return Err(StoreError::InUse { path: path.to_owned() }),
            Err(TryLockError::Error(error)) => return Err(at("lock", path)(error).into()),
        }
    }
    let of = |file: std::fs::Metadata| (file.dev(), file.ino());
    if file.metadata().map(of).ok() != std::fs::metadata(path).map(of).ok() {
        // The other daemon has set it aside and serves.
        return Err(StoreError::InUse { path: path.to_owned() });
    }
    file.set_permissions(std::fs::Permissions::from_mode(0o600)).map_err(at("change the mode of", path))?;
    Ok(keep_as(path, "damaged", MAX_DAMAGED, |from, to| std::fs::rename(from, to))?)
}

/// Keeps a database as `NAME.KIND-SECONDS`, durably, and removes the oldest files of that kind beyond `max`.
pub(crate) fn keep_as(
    path: &Path,
    kind: &str,
    max: usize,
    keep: impl FnOnce(&Path, &Path) -> io::Result<()>,
) -> Result<PathBuf, FileError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let prefix = format!("{name}.{kind}-");
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut kept = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(at("read", directory))? {
        let name = entry.map_err(at("read", directory))?.file_name();
        kept.extend(name.to_str().and_then(|name| name.strip_prefix(&prefix)?.parse::<u64>().ok()));
    }
    kept.sort_unstable();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    // Also after the clock was set back, the new file is the last one.
    let seconds = kept.last().map_or(now, |last| now.max(last + 1));
    let to = directory.join(format!("{prefix}{seconds}"));
    keep(path, &to).map_err(at("keep", path))?;
    File::open(directory).and_then(|directory| directory.sync_all()).map_err(at("write", directory))?;
    for old in kept.iter().take((kept.len() + 1).saturating_sub(max)) {
        remove_if_there(&directory.join(format!("{prefix}{old}")))?;
    }
    Ok(to)
}
