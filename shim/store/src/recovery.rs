//! Opens the database of the store. One that is damaged is set aside, and one that is missing or was set aside is restored from its
//! copy. Without an intact copy, the readable records of the damaged database are taken, or else those of the copy; without those
//! the store is refused. It begins empty only if there is neither a database nor a copy.

use crate::Contents;
use crate::copy::{CopyPaths, RestoredCopy, open_at_once, read_copy};
use crate::database::{
    SCHEMA, StoredRow, create_database, decode_rows, describe_unreadable, migrate, open_database, read_commits,
    read_rows, read_schema, write_rows,
};
use crate::error::{OpenFailure, StoreError};
use nacelle_base::Chain;
use nacelle_base::draft::Draft;
use nacelle_base::files::{FileError, at, remove_if_there, remove_tree_if_there};
use nacelle_base::lock::{LockError, PathLock};
use redb::Database;
use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The number of backups from before migrations that are kept.
const MAX_BACKUPS: usize = 3;
/// The number of databases, and of copies, that are kept of those that were set aside for one reason.
const MAX_SET_ASIDE: usize = 3;
/// Time to wait for the lock of a damaged file.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// The source of the contents of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ContentsOrigin {
    /// The database.
    #[default]
    Database,
    /// The copy of a database that was damaged or missing.
    Copy,
    /// The records of a damaged database that could be read.
    Damaged,
    /// Nothing: there is no database and no copy.
    Nothing,
}

/// Opens or restores the database `path`, and reads it. Returns also the number of its commits.
pub(crate) fn open_or_restore(path: &Path, copy: &CopyPaths) -> Result<(Database, Contents, u64), StoreError> {
    if let Examined::Intact(opened) = examine(path, copy)? {
        return Ok(*opened);
    }
    // Another daemon may do the same.
    let _lock = lock_out_others(path)?;
    match examine(path, copy)? {
        Examined::Intact(opened) => Ok(*opened),
        Examined::Lost(loss) => restore(path, copy, loss),
    }
}

/// The state of the database.
enum Examined {
    Intact(Box<(Database, Contents, u64)>),
    Lost(Loss),
}

/// The reason why the database cannot be used, and what there is instead.
struct Loss {
    why: String,
    /// The rows of a damaged database that can be read; `None` if there is no database.
    readable: Option<Vec<StoredRow>>,
    copy: Option<RestoredCopy>,
}

/// Opens the database, and compares it with its copy: after an unclean end redb takes back a damaged last commit without an error.
fn examine(path: &Path, copy: &CopyPaths) -> Result<Examined, StoreError> {
    let (why, readable) = match load(path) {
        Ok(Some((database, contents, commits))) => {
            let intact_copy = match read_copy(copy) {
                Ok(Some(RestoredCopy { damage: Some(damage), .. })) => Err(damage),
                Ok(copied) => Ok(copied),
                Err(error) => Err(Chain(&error).to_string()),
            };
            let copied = intact_copy.or_else(|damage| {
                tracing::warn!(damage, "the copy of the state store cannot be used; the state store itself is intact");
                set_copy_aside(copy, SetAside::Damaged).map(|()| None)
            })?;
            let ahead = copied.as_ref().and_then(|copied| copied.commits?.checked_sub(commits?)).unwrap_or_default();
            if ahead == 0 {
                return Ok(Examined::Intact(Box::new((database, contents, commits.unwrap_or_default()))));
            }
            drop(database);
            let why = format!("it lacks its last {ahead} commits, which the copy has");
            return Ok(Examined::Lost(Loss { why, readable: Some(Vec::new()), copy: copied }));
        }
        Ok(None) => ("it is missing".to_owned(), None),
        Err(LoadFailure::Unusable(error)) => return Err(error),
        Err(LoadFailure::Damaged { why, readable }) => (why, Some(readable)),
    };
    Ok(Examined::Lost(Loss { why, readable, copy: read_copy(copy)? }))
}

/// Writes a new database with the best rows that there are, which replaces the damaged one.
fn restore(path: &Path, copy: &CopyPaths, loss: Loss) -> Result<(Database, Contents, u64), StoreError> {
    let Loss { why, readable, copy: restored } = loss;
    if let Some(newer) = restored.as_ref().map(|copy| copy.schema).filter(|schema| *schema > SCHEMA) {
        return Err(newer_than_this(path, newer));
    }
    let is_damaged = readable.is_some();
    let copy_damage = restored.as_ref().and_then(|copy| copy.damage.clone());
    let mut readable = readable.unwrap_or_default();
    let (records, _) = decode_rows(&readable);
    if records.pods.is_empty() && records.containers.is_empty() && records.vms.is_empty() {
        // Settings alone would end all pods.
        readable.clear();
    }
    let (mut rows, schema, origin, commits, copied) = match restored {
        Some(RestoredCopy { rows, schema, changed_at, cut, commits, damage })
            if damage.is_none() || readable.is_empty() && !rows.is_empty() =>
        {
            (rows, schema, ContentsOrigin::Copy, commits.unwrap_or_default(), Some((changed_at, damage.or(cut))))
        }
        _ if !readable.is_empty() => (readable, SCHEMA, ContentsOrigin::Damaged, 0, None),
        None if !is_damaged => (Vec::new(), SCHEMA, ContentsOrigin::Nothing, 0, None),
        _ => {
            let copy = copy_damage.unwrap_or_else(|| "it has no copy".to_owned());
            return Err(StoreError::Lost { path: path.to_owned(), why, copy });
        }
    };
    rows.retain(StoredRow::can_be_written);
    let draft = draft_path(path);
    // Of a daemon that was killed.
    remove_if_there(&draft)?;
    let database = create_database(&draft, &rows, schema, commits)?;
    if schema < SCHEMA {
        migrate(&database, schema)?;
    }
    let rows = read_rows(&draft, &database).map_err(|failure| new_file_failure(path, failure))?;
    let (mut contents, unreadable) = decode_rows(&rows);
    contents.origin = origin;
    let mut commits = commits;
    if !unreadable.is_empty() {
        let removals: Vec<_> = unreadable.iter().map(|(row, _)| StoredRow { value: None, ..row.clone() }).collect();
        commits = write_rows(&database, &removals)?;
    }
    std::fs::set_permissions(&draft, std::fs::Permissions::from_mode(0o600)).map_err(at("write", &draft))?;
    // From here on the path has the damaged or the new database at any moment.
    let damaged = is_damaged.then(|| lock_database_file(path, LOCK_TIMEOUT)).transpose()?;
    let set_aside = damaged.as_ref().map(|file| set_aside(path, file, SetAside::Damaged)).transpose()?;
    std::fs::rename(&draft, path).map_err(at("write", path))?;
    sync_directory_of(path)?;
    if copy_damage.is_some() {
        set_copy_aside(copy, SetAside::Damaged)?;
    }
    if is_damaged || origin != ContentsOrigin::Nothing {
        let found = Found { path, why, set_aside, origin, copied };
        found.warn(&contents, &describe_unreadable(&unreadable));
    }
    Ok((database, contents, commits))
}

/// Returns the path of a new database until it is complete.
pub(crate) fn draft_path(path: &Path) -> PathBuf {
    let mut draft = path.as_os_str().to_owned();
    draft.push(".new");
    PathBuf::from(draft)
}

/// Locks out other processes that create, restore or replace the database.
pub(crate) fn lock_out_others(path: &Path) -> Result<PathLock, StoreError> {
    PathLock::acquire(&PathLock::path_beside(path), LOCK_TIMEOUT).map_err(|error| match error {
        LockError::File(error) => StoreError::from(error),
        LockError::Held { .. } => StoreError::InUse { path: path.to_owned() },
    })
}

/// The findings of a restore, for the log.
struct Found<'a> {
    path: &'a Path,
    why: String,
    set_aside: Option<PathBuf>,
    origin: ContentsOrigin,
    /// The time of the last change that the copy has, and the reason why it may lack some.
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
            _ => tracing::warn!(
                %path, why, set_aside, pods, containers, vms, unreadable,
                "the state store is damaged and has no intact copy; its readable records are kept, and pods and containers without a record are ended"
            ),
        }
    }
}

/// A new file that cannot be opened is not damaged: the disk may be full.
pub(crate) fn new_file_failure(path: &Path, failure: OpenFailure) -> StoreError {
    match failure {
        OpenFailure::Unusable(error) => error,
        OpenFailure::Damaged(why) => {
            StoreError::Open { path: path.to_owned(), source: Box::new(redb::Error::Corrupted(why)) }
        }
    }
}

/// The reason why a database cannot be loaded.
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

/// Opens and reads the database, with the number of its commits; `None` if there is none.
fn load(path: &Path) -> Result<Option<(Database, Contents, Option<u64>)>, LoadFailure> {
    match std::fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(LoadFailure::Unusable(at("find", path)(error).into())),
        Ok(file) if !file.is_file() => {
            let error = io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file");
            return Err(LoadFailure::Unusable(at("open", path)(error).into()));
        }
        Ok(file) if file.len() == 0 => return Err(OpenFailure::Damaged("it is empty".to_owned()).into()),
        Ok(_) => {}
    }
    let mut database = open_database(path)?;
    match read_schema(path, &database)? {
        None => return Err(OpenFailure::Damaged("it has no tables".to_owned()).into()),
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
    let commits = read_commits(path, &database)?;
    Ok(Some((database, contents, commits)))
}

/// Returns the path of the backup of a database with this schema.
fn backup_path(path: &Path, schema: u32) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".v{schema}"));
    path.with_file_name(name)
}

pub(crate) fn newer_than_this(path: &Path, found: u32) -> StoreError {
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

/// The reason why a file is set aside, which its new name has.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SetAside {
    /// It cannot be read.
    Damaged,
    /// An import replaces it.
    Replaced,
}

/// Opens the file of the database and locks it, which keeps out a daemon that has it open or opens it. Waits for at most `timeout`.
pub(crate) fn lock_database_file(path: &Path, timeout: Duration) -> Result<File, StoreError> {
    let deadline = Instant::now() + timeout;
    let file = open_at_once(path).map_err(at("open", path))?;
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
        // Another daemon has replaced it and serves.
        return Err(StoreError::InUse { path: path.to_owned() });
    }
    Ok(file)
}

/// Links the locked database as `NAME.damaged-SECONDS` or `NAME.replaced-SECONDS`, and removes the oldest of such files.
pub(crate) fn set_aside(path: &Path, locked: &File, reason: SetAside) -> Result<PathBuf, StoreError> {
    locked.set_permissions(std::fs::Permissions::from_mode(0o600)).map_err(at("change the mode of", path))?;
    let to = path_aside(path, reason)?;
    std::fs::hard_link(path, &to).map_err(at("keep", path))?;
    sync_directory_of(path)?;
    Ok(to)
}

/// Moves the files of a copy into a directory `NAME.damaged-SECONDS` or `NAME.replaced-SECONDS`, and removes the oldest of such
/// directories.
pub(crate) fn set_copy_aside(copy: &CopyPaths, reason: SetAside) -> Result<(), FileError> {
    let to = path_aside(&copy.snapshot(), reason)?;
    std::fs::DirBuilder::new().mode(0o700).create(&to).map_err(at("create", &to))?;
    let changes = copy.generations()?.into_iter().map(|generation| copy.changes(generation));
    for file in changes.chain([copy.snapshot()]) {
        match std::fs::rename(&file, to.join(file.file_name().unwrap_or_default())) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            renamed => renamed.map_err(at("move", &file))?,
        }
    }
    tracing::warn!(set_aside = %to.display(), "the copy of the state store was set aside; a new one is written");
    sync_directory_of(&to)
}

/// Returns the path for a file that is set aside, and removes the oldest files of this kind.
fn path_aside(path: &Path, reason: SetAside) -> Result<PathBuf, FileError> {
    let reason = match reason {
        SetAside::Damaged => "damaged",
        SetAside::Replaced => "replaced",
    };
    let prefix = format!("{}.{reason}-", path.file_name().unwrap_or_default().to_string_lossy());
    let directory = directory_of(path);
    let mut kept = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(at("read", directory))? {
        let name = entry.map_err(at("read", directory))?.file_name();
        kept.extend(name.to_str().and_then(|name| name.strip_prefix(&prefix)?.parse::<u64>().ok()));
    }
    kept.sort_unstable();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    // Also after the clock was set back, the new file is the last one.
    let seconds = kept.last().map_or(now, |last| now.max(last + 1));
    for old in kept.iter().take((kept.len() + 1).saturating_sub(MAX_SET_ASIDE)) {
        remove_tree_if_there(&directory.join(format!("{prefix}{old}")))?;
    }
    Ok(directory.join(format!("{prefix}{seconds}")))
}

fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

pub(crate) fn sync_directory_of(path: &Path) -> Result<(), FileError> {
    let directory = directory_of(path);
    File::open(directory).and_then(|directory| directory.sync_all()).map_err(at("write", directory))
}
