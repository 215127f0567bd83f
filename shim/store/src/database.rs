//! Reads and writes the redb file: its tables, and the rows in them. It opens files of any content: damage is reported and never
//! panics the caller.

use crate::error::{OpenFailure, StoreError, access, open_failure};
use crate::{Change, Contents};
use nacelle_base::Chain;
use nacelle_model::record::{ContainerRecord, PodRecord, RecordError, VmRecord};
use redb::{
    Database, DatabaseError, ReadTransaction, ReadableDatabase, ReadableTable, TableDefinition, TableError,
    TableHandle, WriteTransaction,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

const PODS: TableDefinition<&str, &[u8]> = TableDefinition::new("pods");
const CONTAINERS: TableDefinition<&str, &[u8]> = TableDefinition::new("containers");
const VMS: TableDefinition<&str, &[u8]> = TableDefinition::new("machines");
const SETTINGS: TableDefinition<&str, &str> = TableDefinition::new("settings");

/// Describes the file itself: its schema.
const META: TableDefinition<&str, u32> = TableDefinition::new("meta");
const SCHEMA_KEY: &str = "schema";
/// The schema that this program writes. It changes with each change of the tables, and of the version of a record. Files before
/// schema 2 do not say theirs.
pub(crate) const SCHEMA: u32 = 2;
/// Counts the commits, so that a database that has lost one is recognized by its copy. Files of earlier versions do not have it.
const COUNTERS: TableDefinition<&str, u64> = TableDefinition::new("counters");
const COMMITS_KEY: &str = "commits";
/// The setting that marks a store as restored until the caller has kept what belongs to lost records.
const RECORDS_LOST: &str = "records_lost";

/// Time to wait for the lock of a killed daemon, which may outlive its process for a moment.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);
const OPEN_PAUSE: Duration = Duration::from_millis(20);

/// A table of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum StoreTable {
    Pods,
    Containers,
    Vms,
    Settings,
}

/// A row to write: its value is JSON; without a value the row is removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredRow {
    pub table: StoreTable,
    pub key: String,
    pub value: Option<Vec<u8>>,
}

impl StoredRow {
    /// Encodes a change.
    pub fn encode(change: &Change) -> Result<StoredRow, RecordError> {
        let (table, key, value) = match change {
            Change::Pod(record) => (StoreTable::Pods, record.id.to_string(), Some(record.encode()?)),
            Change::Container(record) => (StoreTable::Containers, record.id.to_string(), Some(record.encode()?)),
            Change::ForgetPod(id) => (StoreTable::Pods, id.to_string(), None),
            Change::ForgetContainer(id) => (StoreTable::Containers, id.to_string(), None),
            Change::Vm(record) => (StoreTable::Vms, record.id.clone(), Some(record.encode()?)),
            Change::ForgetVm(id) => (StoreTable::Vms, id.clone(), None),
            Change::Setting(name, value) => (
                StoreTable::Settings,
                (*name).to_owned(),
                Some(serde_json::Value::from(value.as_str()).to_string().into()),
            ),
            Change::LostRecordsHandled => (StoreTable::Settings, RECORDS_LOST.to_owned(), None),
        };
        Ok(StoredRow { table, key, value })
    }

    /// Returns whether the row has a value that its table can hold. Records may be unreadable all the same.
    pub fn can_be_written(&self) -> bool {
        let Some(value) = &self.value else { return false };
        self.table != StoreTable::Settings || decode_setting(&self.key, value).is_ok()
    }
}

/// Opens an existing database, and verifies the checksums of all its pages. Waits while another process has the file open.
pub(crate) fn open_database(path: &Path) -> Result<Database, OpenFailure> {
    open_database_within(path, OPEN_TIMEOUT)
}

/// As [`open_database`], with another limit of the time to wait.
pub(crate) fn open_database_within(path: &Path, timeout: Duration) -> Result<Database, OpenFailure> {
    let deadline = Instant::now() + timeout;
    loop {
        let open = || Database::builder().set_check_integrity_on_open(true).open(path);
        match without_panic(open)? {
            Ok(database) => return Ok(database),
            Err(DatabaseError::DatabaseAlreadyOpen) if Instant::now() < deadline => std::thread::sleep(OPEN_PAUSE),
            Err(error) => return Err(open_failure(path, error.into())),
        }
    }
}

/// Runs code of redb on a file that may be damaged. redb does not promise that it never panics on one.
fn without_panic<T>(work: impl FnOnce() -> T) -> Result<T, OpenFailure> {
    // The database is not used again after a panic.
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
        OpenFailure::Damaged(format!("the database panicked: {}", text.unwrap_or("no reason")))
    })
}

/// Returns the schema of the database; `None` if it has no tables, which are created with the first rows.
pub(crate) fn read_schema(path: &Path, database: &Database) -> Result<Option<u32>, OpenFailure> {
    let read = || -> Result<Option<u32>, redb::Error> {
        let transaction = database.begin_read()?;
        if !transaction.list_tables()?.any(|table| table.name() == PODS.name()) {
            return Ok(None);
        }
        match transaction.open_table(META) {
            Ok(meta) => Ok(Some(meta.get(SCHEMA_KEY)?.map_or(1, |schema| schema.value()))),
            Err(TableError::TableDoesNotExist(_)) => Ok(Some(1)),
            Err(error) => Err(error.into()),
        }
    };
    without_panic(read)?.map_err(|error| open_failure(path, error))
}

/// Returns the number of commits that the database has; `None` if it is of a version that did not count them.
pub(crate) fn read_commits(path: &Path, database: &Database) -> Result<Option<u64>, OpenFailure> {
    let read = || commits_of(&database.begin_read()?);
    without_panic(read)?.map_err(|error| open_failure(path, error))
}

/// Returns the number of commits that a transaction sees; `None` if the database is of a version that did not count them.
pub(crate) fn commits_of(transaction: &ReadTransaction) -> Result<Option<u64>, redb::Error> {
    match transaction.open_table(COUNTERS) {
        Ok(counters) => Ok(counters.get(COMMITS_KEY)?.map(|commits| commits.value())),
        Err(TableError::TableDoesNotExist(_)) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Migrates the database from an older schema to the present one, in one transaction.
pub(crate) fn migrate(database: &Database, from: u32) -> Result<(), StoreError> {
    let transaction = database.begin_write().map_err(access("migrate"))?;
    for step in from..SCHEMA {
        migrate_step(&transaction, step)?;
    }
    transaction.commit().map_err(access("migrate"))
}

/// Migrates from a schema to the next one.
fn migrate_step(transaction: &WriteTransaction, from: u32) -> Result<(), StoreError> {
    // From schema 1: the records stay as they are, and the file says its schema.
    let mut meta = transaction.open_table(META).map_err(access("migrate"))?;
    meta.insert(SCHEMA_KEY, from + 1).map_err(access("migrate"))?;
    Ok(())
}

/// Returns all rows of the database.
pub(crate) fn read_rows(path: &Path, database: &Database) -> Result<Vec<StoredRow>, OpenFailure> {
    let read = || -> Result<Vec<StoredRow>, redb::Error> {
        let mut rows = Vec::new();
        for_each_row(&database.begin_read()?, |row| {
            rows.push(row);
            Ok::<(), redb::Error>(())
        })?;
        Ok(rows)
    };
    without_panic(read)?.map_err(|error| open_failure(path, error))
}

/// Calls `visit` with each row, in the order of tables and keys.
pub(crate) fn for_each_row<E: From<redb::Error>>(
    transaction: &ReadTransaction,
    mut visit: impl FnMut(StoredRow) -> Result<(), E>,
) -> Result<(), E> {
    for (table, definition) in [(StoreTable::Pods, PODS), (StoreTable::Containers, CONTAINERS), (StoreTable::Vms, VMS)]
    {
        let rows = transaction.open_table(definition).map_err(redb::Error::from)?;
        for row in rows.iter().map_err(redb::Error::from)? {
            let (key, value) = row.map_err(redb::Error::from)?;
            visit(StoredRow { table, key: key.value().to_owned(), value: Some(value.value().to_owned()) })?;
        }
    }
    let settings = transaction.open_table(SETTINGS).map_err(redb::Error::from)?;
    for row in settings.iter().map_err(redb::Error::from)? {
        let (key, value) = row.map_err(redb::Error::from)?;
        let value = serde_json::Value::from(value.value()).to_string().into();
        visit(StoredRow { table: StoreTable::Settings, key: key.value().to_owned(), value: Some(value) })?;
    }
    Ok(())
}

/// Creates a database of a store that is restored: it has these rows, the schema, the counter of commits, and the mark that records
/// may be lost. The file must not exist.
pub(crate) fn create_database(
    path: &Path,
    rows: &[StoredRow],
    schema: u32,
    commits: u64,
) -> Result<Database, StoreError> {
    let failed = |error: DatabaseError| StoreError::Open { path: path.to_owned(), source: Box::new(error.into()) };
    let database = Database::create(path).map_err(failed)?;
    let transaction = database.begin_write().map_err(access("write"))?;
    put_rows(&transaction, rows)?;
    let mark = serde_json::Value::from("true").to_string().into();
    put_rows(
        &transaction,
        &[StoredRow { table: StoreTable::Settings, key: RECORDS_LOST.to_owned(), value: Some(mark) }],
    )?;
    transaction.open_table(META).map_err(access("write"))?.insert(SCHEMA_KEY, schema).map_err(access("write"))?;
    transaction.open_table(COUNTERS).map_err(access("write"))?.insert(COMMITS_KEY, commits).map_err(access("write"))?;
    transaction.commit().map_err(access("write"))?;
    Ok(database)
}

/// Writes these rows in one transaction, and returns the number of commits that the database has then.
pub(crate) fn write_rows(database: &Database, rows: &[StoredRow]) -> Result<u64, StoreError> {
    let transaction = database.begin_write().map_err(access("write"))?;
    put_rows(&transaction, rows)?;
    let mut counters = transaction.open_table(COUNTERS).map_err(access("write"))?;
    let commits =
        counters.get(COMMITS_KEY).map_err(access("write"))?.map_or(0, |commits| commits.value()).saturating_add(1);
    counters.insert(COMMITS_KEY, commits).map_err(access("write"))?;
    drop(counters);
    transaction.commit().map_err(access("write"))?;
    Ok(commits)
}

fn put_rows(transaction: &WriteTransaction, rows: &[StoredRow]) -> Result<(), StoreError> {
    let mut pods = transaction.open_table(PODS).map_err(access("write"))?;
    let mut containers = transaction.open_table(CONTAINERS).map_err(access("write"))?;
    let mut vms = transaction.open_table(VMS).map_err(access("write"))?;
    let mut settings = transaction.open_table(SETTINGS).map_err(access("write"))?;
    for row in rows {
        let key = row.key.as_str();
        let records = match row.table {
            StoreTable::Pods => &mut pods,
            StoreTable::Containers => &mut containers,
            StoreTable::Vms => &mut vms,
            StoreTable::Settings => {
                match &row.value {
                    // Rows of a copy are read from a file.
                    Some(value) => {
                        let value = decode_setting(key, value)?;
                        settings.insert(key, value.as_str()).map_err(access("write"))?;
                    }
                    None => drop(settings.remove(key).map_err(access("write"))?),
                }
                continue;
            }
        };
        match &row.value {
            Some(value) => drop(records.insert(key, value.as_slice()).map_err(access("write"))?),
            None => drop(records.remove(key).map_err(access("write"))?),
        }
    }
    Ok(())
}

fn decode_setting(key: &str, value: &[u8]) -> Result<String, RecordError> {
    let failed = |source| RecordError { what: "setting", id: key.to_owned(), source, other_version: None };
    serde_json::from_slice(value).map_err(failed)
}

/// Decodes rows, and returns with the contents the errors of those that are unreadable.
pub(crate) fn decode_rows(rows: &[StoredRow]) -> (Contents, Vec<(StoredRow, RecordError)>) {
    let (mut contents, mut unreadable) = (Contents::default(), Vec::new());
    for row in rows {
        let Some(value) = &row.value else { continue };
        let decoded = match row.table {
            StoreTable::Pods => PodRecord::decode(&row.key, value).map(|record| contents.pods.push(record)),
            StoreTable::Containers => {
                ContainerRecord::decode(&row.key, value).map(|record| contents.containers.push(record))
            }
            StoreTable::Vms => VmRecord::decode(&row.key, value).map(|record| contents.vms.push(record)),
            StoreTable::Settings => {
                decode_setting(&row.key, value).map(|value| drop(contents.settings.insert(row.key.clone(), value)))
            }
        };
        if let Err(error) = decoded {
            unreadable.push((row.clone(), error));
        }
    }
    contents.records_lost = contents.settings.remove(RECORDS_LOST).is_some();
    (contents, unreadable)
}

/// Describes unreadable rows for a log, the first of them with its cause.
pub(crate) fn describe_unreadable(unreadable: &[(StoredRow, RecordError)]) -> String {
    match unreadable {
        [] => "none".to_owned(),
        [(_, error)] => Chain(error).to_string(),
        [(_, error), more @ ..] => format!("{}; and {} more", Chain(error), more.len()),
    }
}
