//! The state store: one redb file with records of pods and containers as tagged JSON, and one thread that writes it. It knows
//! neither pod processes nor CRI. The writer thread owns the database, and `Store` is a handle on its queue. A commit is on the
//! disk when it returns. Beside the database is a copy of it, which has each commit before the caller knows of it, and from which
//! `Store::open` restores a database that is damaged or missing.

mod copy;
mod copy_writer;
mod database;
mod error;
mod recovery;
#[cfg(test)]
mod tests;
mod transfer;

use copy::CopyPaths;
use copy_writer::{CopyPolicy, CopyWriter};
use database::{SCHEMA, StoredRow, open_database, read_commits, read_schema, write_rows};
use error::OpenFailure;
use nacelle_base::{ContainerId, PodId};
use nacelle_model::record::{ContainerRecord, PodRecord, VmRecord};
use redb::Database;
use std::ops::ControlFlow;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot};

pub use error::StoreError;
pub use recovery::ContentsOrigin;
pub use transfer::{StoreCounts, export_store, import_store};

/// Capacity of the writer's queue in commits; further callers wait.
const QUEUE_CAPACITY: usize = 256;

/// One step of a commit.
#[derive(Clone, Debug)]
pub enum Change {
    /// Writes a pod.
    Pod(Box<PodRecord>),
    /// Writes a container.
    Container(Box<ContainerRecord>),
    /// Removes a pod.
    ForgetPod(PodId),
    /// Removes a container.
    ForgetContainer(ContainerId),
    /// Writes a persistent VM.
    Vm(Box<VmRecord>),
    /// Removes a persistent VM, by namespace and name.
    ForgetVm(String),
    /// Writes a setting of the node.
    Setting(&'static str, String),
    /// Removes the mark of [`Contents::records_lost`].
    LostRecordsHandled,
}

/// The moment of a commit at which the [`CommitObserver`] is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommitPhase {
    /// Nothing of the commit is written yet.
    Before,
    /// The commit is on the disk. The caller does not know yet.
    After,
    /// The commit has failed. The caller does not know yet.
    Failed,
}

/// Called before and after each commit with the commit's number, which counts from 1. `Break` makes the writer close the file and
/// answer no further request, as if the process had been killed at that moment. For tests of crashes.
pub type CommitObserver = Box<dyn FnMut(u64, CommitPhase) -> ControlFlow<()> + Send>;

struct Commit {
    changes: Vec<Change>,
    done: oneshot::Sender<Result<(), StoreError>>,
}

/// A handle on the store.
#[derive(Clone)]
pub struct Store {
    queue: Arc<mpsc::Sender<Commit>>,
}

/// The contents of the store.
#[derive(Debug, Default)]
pub struct Contents {
    /// The pods.
    pub pods: Vec<PodRecord>,
    /// The containers.
    pub containers: Vec<ContainerRecord>,
    /// The persistent VMs.
    pub vms: Vec<VmRecord>,
    /// The settings of the node.
    pub settings: std::collections::BTreeMap<String, String>,
    /// The source of the contents.
    pub origin: ContentsOrigin,
    /// Records may be missing, because this daemon or an earlier one restored the store. It is set at each start until
    /// [`Change::LostRecordsHandled`] is committed.
    pub records_lost: bool,
}

impl Store {
    /// Opens or creates the store, reads it, and starts its writer. A damaged database is set aside, and restored from the copy, as a
    /// missing one is; the log says so, and `Contents::origin`. Fails if both are damaged beyond use, or if the disk cannot read
    /// them. Blocks; retries while another process holds the file.
    pub fn open(path: &Path, observer: Option<CommitObserver>) -> Result<(Store, Contents), StoreError> {
        Store::open_with(path, observer, CopyPolicy::default())
    }

    fn open_with(
        path: &Path,
        observer: Option<CommitObserver>,
        policy: CopyPolicy,
    ) -> Result<(Store, Contents), StoreError> {
        let paths = CopyPaths::of(path);
        let (database, contents, commits) = recovery::open_or_restore(path, &paths)?;
        let failed = |error| StoreError::Open { path: path.to_owned(), source: Box::new(redb::Error::Io(error)) };
        // Records contain the environment of containers, in which users keep passwords.
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(failed)?;
        let copy = CopyWriter::start(paths, policy, &database);
        let (queue, requests) = mpsc::channel(QUEUE_CAPACITY);
        let writer = std::thread::Builder::new().name("store".into());
        let file = StoreFile { path: path.to_owned(), database: Some(database), commits, copy };
        writer.spawn(move || write_all(file, requests, observer)).map_err(failed)?;
        Ok((Store { queue: Arc::new(queue) }, contents))
    }

    /// Commits these changes, all or none. They are on the disk when this returns.
    pub async fn commit(&self, changes: Vec<Change>) -> Result<(), StoreError> {
        let (done, answer) = oneshot::channel();
        self.queue.send(Commit { changes, done }).await.map_err(|_closed| StoreError::Closed)?;
        answer.await.map_err(|_closed| StoreError::Closed)?
    }
}

/// The writer's database and copy. After an error of the disk redb rejects all operations until the file is opened again, and a
/// full disk may have free space later.
struct StoreFile {
    path: PathBuf,
    database: Option<Database>,
    /// The number of commits that the database has at least.
    commits: u64,
    copy: CopyWriter,
}

impl StoreFile {
    fn write(&mut self, changes: &[Change]) -> Result<(), StoreError> {
        let rows = changes.iter().map(StoredRow::encode).collect::<Result<Vec<_>, _>>()?;
        let database = match self.database.take() {
            Some(database) => database,
            None => self.open_again()?,
        };
        let written = write_rows(&database, &rows);
        self.database = match &written {
            Err(StoreError::Access { source, .. })
                if matches!(source.as_ref(), redb::Error::Io(_) | redb::Error::PreviousIo) =>
            {
                // Its transaction keeps the file open.
                self.copy.finish();
                // The database may have the commit after all, and the copy does not.
                self.copy.break_off();
                // Opened at once, so that no second daemon takes the file meanwhile; if that fails, the next commit tries again.
                drop(database);
                self.open_again().ok()
            }
            _ => Some(database),
        };
        if let (Ok(commits), Some(database)) = (&written, &self.database) {
            self.commits = *commits;
            self.copy.add(&rows, database);
        }
        written.map(drop)
    }

    /// Opens the database of this running daemon again. If the file was removed, replaced or damaged meanwhile, this fails, and the
    /// next daemon restores it.
    fn open_again(&self) -> Result<Database, StoreError> {
        let path = &self.path;
        let open = || {
            let database = open_database(path)?;
            let schema = read_schema(path, &database)?;
            let commits = read_commits(path, &database)?.unwrap_or_default();
            match schema == Some(SCHEMA) && commits >= self.commits {
                true => Ok(database),
                false => Err(OpenFailure::Damaged("it is not the database that this daemon wrote".to_owned())),
            }
        };
        open().map_err(|failure| match failure {
            OpenFailure::Unusable(error) => error,
            OpenFailure::Damaged(why) => {
                StoreError::Open { path: path.clone(), source: Box::new(redb::Error::Corrupted(why)) }
            }
        })
    }
}

/// Ends the daemon when the writer panics: one that cannot record anything must not go on, and the next one finds its pods again.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!("BUG: the writer of the state store panicked; the daemon ends");
            std::process::abort();
        }
    }
}

/// Runs the writer: one transaction per commit, in order.
fn write_all(mut file: StoreFile, mut commits: mpsc::Receiver<Commit>, mut observer: Option<CommitObserver>) {
    let _abort = AbortOnPanic;
    let mut number = 0;
    let mut notify =
        |number, phase| observer.as_mut().map_or(ControlFlow::Continue(()), |observe| observe(number, phase));
    while let Some(Commit { changes, done }) = commits.blocking_recv() {
        number += 1;
        if notify(number, CommitPhase::Before).is_break() {
            return stop_answering(file, commits, done);
        }
        let written = file.write(&changes);
        let phase = if written.is_ok() { CommitPhase::After } else { CommitPhase::Failed };
        if notify(number, phase).is_break() {
            return stop_answering(file, commits, done);
        }
        // The caller may have dropped its request; the state is written all the same.
        let _ = done.send(written);
    }
    file.copy.finish();
}

/// Behaves as after a kill: closes the file, and leaves callers without an answer until they are dropped.
fn stop_answering(file: StoreFile, mut commits: mpsc::Receiver<Commit>, done: oneshot::Sender<Result<(), StoreError>>) {
    drop(file);
    let mut unanswered = vec![done];
    while let Some(commit) = commits.blocking_recv() {
        unanswered.push(commit.done);
    }
}
