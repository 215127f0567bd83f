//! Exports the records of a store to a file, and replaces a store by such a file. An export reads the copy while a daemon serves, and
//! changes nothing. An import needs the store for itself, and is complete or has changed nothing that the next daemon sees.

use crate::Contents;
use crate::copy::{CopyPaths, RestoredCopy, read_copy, read_export, write_export};
use crate::database::{
    SCHEMA, StoredRow, create_database, decode_rows, describe_unreadable, migrate, open_database_within, read_commits,
    read_rows, read_schema,
};
use crate::error::{OpenFailure, StoreError};
use crate::recovery::{
    SetAside, draft_path, lock_database_file, lock_out_others, new_file_failure, set_aside, set_copy_aside,
    sync_directory_of,
};
use nacelle_base::Chain;
use nacelle_base::files::{FileError, at, ensure_replaceable, remove_if_there};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

/// How often the copy is read again that a daemon writes meanwhile.
const MAX_READS: u32 = 20;
const READ_PAUSE: Duration = Duration::from_millis(50);

/// The number of records of an export or import.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreCounts {
    /// Pods.
    pub pods: usize,
    /// Containers.
    pub containers: usize,
    /// Persistent VMs.
    pub vms: usize,
}

impl StoreCounts {
    fn of(contents: &Contents) -> StoreCounts {
        let Contents { pods, containers, vms, .. } = contents;
        StoreCounts { pods: pods.len(), containers: containers.len(), vms: vms.len() }
    }
}

/// The records of a store.
struct StoreRecords {
    rows: Vec<StoredRow>,
    schema: u32,
    commits: u64,
}

/// Writes the records of the store `database` to the file `to`, which is created with mode 0600, because records contain the
/// environment of containers, and replaced if it exists. A daemon may serve with the store: the export then has each commit that
/// the daemon has answered before, unless the copy could not be written, which the daemon's log reports. Fails if neither the
/// database nor its copy is intact. Blocks.
pub fn export_store(database: &Path, to: &Path) -> Result<StoreCounts, StoreError> {
    if CopyPaths::of(database).is_of_store(database, to) {
        let why = format!("{} is a file of the store itself", to.display());
        return Err(StoreError::NotExportable { path: database.to_owned(), why });
    }
    ensure_replaceable(to)?;
    let image = read_records(database)?;
    let (contents, unreadable) = decode_rows(&image.rows);
    if !unreadable.is_empty() && image.schema == SCHEMA {
        let why = describe_unreadable(&unreadable);
        return Err(StoreError::NotExportable { path: database.to_owned(), why });
    }
    write_export(to, &image.rows, image.schema, image.commits)?;
    Ok(StoreCounts::of(&contents))
}

/// Makes the records of the file `from` those of the store `database`, which must not be in use. An existing database and its copy
/// are set aside if `replace` is set, and otherwise the import fails. The next daemon ends pods and containers that run without a
/// record. Blocks.
pub fn import_store(from: &Path, database: &Path, replace: bool) -> Result<StoreCounts, StoreError> {
    let export = read_export(from)?;
    if export.schema > SCHEMA {
        return Err(StoreError::NewerExport { path: from.to_owned(), found: export.schema, supported: SCHEMA });
    }
    let _lock = lock_out_others(database)?;
    let exists = database.try_exists().map_err(at("find", database))?;
    let copy = CopyPaths::of(database);
    let has_copy = copy.snapshot().exists() || !copy.generations()?.is_empty();
    if (exists || has_copy) && !replace {
        return Err(StoreError::Exists { path: database.to_owned() });
    }
    let old = exists.then(|| lock_database_file(database, Duration::ZERO)).transpose()?;
    let draft = draft_path(database);
    // Of a process that was killed.
    remove_if_there(&draft)?;
    let copied = read_copy(&copy)?.and_then(|copy| copy.commits).unwrap_or_default();
    let counts = write_draft(&draft, from, &export, copied).inspect_err(|_| {
        // The first error is reported; the next import removes the draft.
        let _ = remove_if_there(&draft);
    })?;
    // From here on the path has the old or the new database at any moment. The old copy is not ahead of the new database.
    let aside = old.as_ref().map(|file| set_aside(database, file, SetAside::Replaced)).transpose()?;
    std::fs::rename(&draft, database).map_err(at("write", database))?;
    sync_directory_of(database)?;
    if has_copy {
        set_copy_aside(&copy, SetAside::Replaced)?;
    }
    if let Some(aside) = aside {
        tracing::info!(set_aside = %aside.display(), "the state store was replaced by an import");
    }
    Ok(counts)
}

/// Writes the database of an import and verifies all its records.
fn write_draft(draft: &Path, from: &Path, export: &RestoredCopy, copied: u64) -> Result<StoreCounts, StoreError> {
    let invalid = |why: String| StoreError::InvalidExport { path: from.to_owned(), why };
    if let Some(row) = export.rows.iter().find(|row| !row.can_be_written()) {
        return Err(invalid(format!("the value of {:?} is invalid", row.key)));
    }
    // One more than the copy: a database that lacks commits is replaced by its copy.
    let commits = export.commits.unwrap_or_default().max(copied.saturating_add(1));
    let database = create_database(draft, &export.rows, export.schema, commits)?;
    if export.schema < SCHEMA {
        migrate(&database, export.schema)?;
    }
    let rows = read_rows(draft, &database).map_err(|failure| new_file_failure(draft, failure))?;
    let (contents, unreadable) = decode_rows(&rows);
    if !unreadable.is_empty() {
        return Err(invalid(describe_unreadable(&unreadable)));
    }
    std::fs::set_permissions(draft, std::fs::Permissions::from_mode(0o600)).map_err(at("write", draft))?;
    Ok(StoreCounts::of(&contents))
}

/// Reads the records of a store: of its database, or of its copy if a daemon has the database or the database is behind.
fn read_records(path: &Path) -> Result<StoreRecords, StoreError> {
    let failed = |why: String| StoreError::NotExportable { path: path.to_owned(), why };
    let copy = CopyPaths::of(path);
    let (image, why) = match read_database(path) {
        Ok(image) => (Some(image), String::new()),
        Err(OpenFailure::Unusable(StoreError::InUse { .. })) => (None, "the daemon has its database".to_owned()),
        Err(OpenFailure::Damaged(why)) => (None, format!("its database is damaged ({why})")),
        // The disk may be read-only, and the copy is.
        Err(OpenFailure::Unusable(error)) => (None, Chain(&error).to_string()),
    };
    let copied = match read_stable_copy(&copy) {
        Ok(copied) => copied,
        Err(unstable) => match image {
            Some(image) => return Ok(image),
            None => return Err(failed(format!("{why}, and {unstable}"))),
        },
    };
    match image {
        Some(image) if copied.commits.is_none_or(|commits| commits <= image.commits) => Ok(image),
        _ => {
            let commits = copied.commits.unwrap_or_default();
            Ok(StoreRecords { rows: copied.rows, schema: copied.schema, commits })
        }
    }
}

fn read_database(path: &Path) -> Result<StoreRecords, OpenFailure> {
    match std::fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(OpenFailure::Damaged("it is missing".to_owned()));
        }
        Err(error) => return Err(StoreError::from(at("find", path)(error)).into()),
        Ok(metadata) if !metadata.is_file() => return Err(OpenFailure::Damaged("it is not a regular file".to_owned())),
        Ok(_) => {}
    }
    let database = open_database_within(path, Duration::ZERO)?;
    let schema = read_schema(path, &database)?;
    let schema = schema.ok_or_else(|| OpenFailure::Damaged("it has no tables".to_owned()))?;
    let rows = read_rows(path, &database)?;
    let commits = read_commits(path, &database)?.unwrap_or_default();
    Ok(StoreRecords { rows, schema, commits })
}

/// Reads the copy, again while a daemon writes it at the same time. The error is the reason why it cannot be used.
fn read_stable_copy(copy: &CopyPaths) -> Result<RestoredCopy, String> {
    let failed = |error: FileError| Chain(&error).to_string();
    let mut why = String::new();
    for _ in 0..MAX_READS {
        let before = copy.identity().map_err(failed)?;
        let read = read_copy(copy).map_err(failed)?;
        match read {
            // A new snapshot replaces the old one and its changes, in several steps.
            _ if copy.identity().map_err(failed)? != before => why = "its copy changes all the time".to_owned(),
            None => return Err("it has no copy".to_owned()),
            Some(RestoredCopy { damage: Some(damage), .. }) => why = format!("its copy is damaged: {damage}"),
            Some(RestoredCopy { cut: Some(cut), .. }) => why = format!("its copy is incomplete: {cut}"),
            Some(intact) => return Ok(intact),
        }
        std::thread::sleep(READ_PAUSE);
    }
    Err(why)
}
