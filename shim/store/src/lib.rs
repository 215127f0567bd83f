//! The state store: one redb file with records of pods and containers as tagged JSON, and one thread that writes it. It knows
//! neither pod processes nor CRI. The writer thread owns the database, and `Store` is a handle on its queue. A commit is on the
//! disk when it returns.

use nacelle_base::{Classify, ContainerId, FailureKind, PodId};
use nacelle_model::record::{ContainerRecord, PodRecord, RecordError, VmRecord};
use redb::{Database, DatabaseError, ReadableDatabase, ReadableTable, TableDefinition};
use std::ops::ControlFlow;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};

const PODS: TableDefinition<&str, &[u8]> = TableDefinition::new("pods");
const CONTAINERS: TableDefinition<&str, &[u8]> = TableDefinition::new("containers");
const VMS: TableDefinition<&str, &[u8]> = TableDefinition::new("machines");
const SETTINGS: TableDefinition<&str, &str> = TableDefinition::new("settings");

/// Capacity of the writer's queue in commits; further callers wait.
const QUEUE_CAPACITY: usize = 256;
/// Time to wait for the lock of a killed daemon, which may outlive its process for a moment.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);

/// Why the store cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file cannot be opened or created.
    #[error("cannot open the state store {path}", path = path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: Box<redb::Error>,
    },
    /// Another process has the file open.
    #[error("the state store {path} is in use: another nacelle serve runs with this root", path = path.display())]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// The file cannot be read or written: the disk is full, for example.
    #[error("cannot {what} the state store")]
    Access {
        /// The operation: "read", "write".
        what: &'static str,
        /// The cause.
        source: Box<redb::Error>,
    },
    /// A record in the file is invalid.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The writer has ended.
    #[error("the state store is closed")]
    Closed,
}

impl Classify for StoreError {
    fn kind(&self) -> FailureKind {
        match self {
            StoreError::InUse { .. } => FailureKind::Conflict,
            StoreError::Access { source, .. } | StoreError::Open { source, .. } => match source.as_ref() {
                redb::Error::Io(error) => FailureKind::from(error.kind()),
                _ => FailureKind::Internal,
            },
            StoreError::Record(_) | StoreError::Closed => FailureKind::Internal,
        }
    }
}

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
}

/// The moment of a commit at which the [`CommitObserver`] is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommitPhase {
    /// Nothing of the commit is written yet.
    Before,
    /// The commit is on the disk, or has failed. The caller does not know yet.
    After,
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
}

impl Store {
    /// Opens or creates the store, reads it, and starts its writer. Blocks; retries while another process holds the file.
    pub fn open(path: &Path, observer: Option<CommitObserver>) -> Result<(Store, Contents), StoreError> {
        let database = open_retrying(path)?;
        // Records contain the environment of containers, in which users keep passwords.
        let private = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(path, private)
            .map_err(|error| StoreError::Open { path: path.to_owned(), source: Box::new(redb::Error::Io(error)) })?;
        let contents = read(&database)?;
        let (queue, commits) = mpsc::channel(QUEUE_CAPACITY);
        let writer = std::thread::Builder::new().name("store".into());
        let file = File { path: path.to_owned(), database: Some(database) };
        let spawned = writer.spawn(move || write_all(file, commits, observer));
        spawned
            .map_err(|error| StoreError::Open { path: path.to_owned(), source: Box::new(redb::Error::Io(error)) })?;
        Ok((Store { queue: Arc::new(queue) }, contents))
    }

    /// Commits these changes, all or none. They are on the disk when this returns.
    pub async fn commit(&self, changes: Vec<Change>) -> Result<(), StoreError> {
        let (done, answer) = oneshot::channel();
        self.queue.send(Commit { changes, done }).await.map_err(|_closed| StoreError::Closed)?;
        answer.await.map_err(|_closed| StoreError::Closed)?
    }
}

fn open_retrying(path: &Path) -> Result<Database, StoreError> {
    let deadline = Instant::now() + OPEN_TIMEOUT;
    loop {
        match Database::create(path) {
            Ok(database) => return Ok(database),
            Err(DatabaseError::DatabaseAlreadyOpen) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(DatabaseError::DatabaseAlreadyOpen) => return Err(StoreError::InUse { path: path.to_owned() }),
            Err(error) => {
                return Err(StoreError::Open { path: path.to_owned(), source: Box::new(error.into()) });
            }
        }
    }
}

fn access<E: Into<redb::Error>>(what: &'static str) -> impl Fn(E) -> StoreError {
    move |error| StoreError::Access { what, source: Box::new(error.into()) }
}

fn read(database: &Database) -> Result<Contents, StoreError> {
    // The first transaction creates the tables, so that reads find them.
    write(database, &[])?;
    let mut contents = Contents::default();
    let transaction = database.begin_read().map_err(access("read"))?;
    let pods = transaction.open_table(PODS).map_err(access("read"))?;
    for row in pods.iter().map_err(access("read"))? {
        let (id, bytes) = row.map_err(access("read"))?;
        contents.pods.push(PodRecord::decode(id.value(), bytes.value())?);
    }
    let containers = transaction.open_table(CONTAINERS).map_err(access("read"))?;
    for row in containers.iter().map_err(access("read"))? {
        let (id, bytes) = row.map_err(access("read"))?;
        contents.containers.push(ContainerRecord::decode(id.value(), bytes.value())?);
    }
    let vms = transaction.open_table(VMS).map_err(access("read"))?;
    for row in vms.iter().map_err(access("read"))? {
        let (id, bytes) = row.map_err(access("read"))?;
        contents.vms.push(VmRecord::decode(id.value(), bytes.value())?);
    }
    let settings = transaction.open_table(SETTINGS).map_err(access("read"))?;
    for row in settings.iter().map_err(access("read"))? {
        let (name, value) = row.map_err(access("read"))?;
        contents.settings.insert(name.value().to_owned(), value.value().to_owned());
    }
    Ok(contents)
}

fn write(database: &Database, changes: &[Change]) -> Result<(), StoreError> {
    let transaction = database.begin_write().map_err(access("write"))?;
    {
        let mut pods = transaction.open_table(PODS).map_err(access("write"))?;
        let mut containers = transaction.open_table(CONTAINERS).map_err(access("write"))?;
        let mut vms = transaction.open_table(VMS).map_err(access("write"))?;
        let mut settings = transaction.open_table(SETTINGS).map_err(access("write"))?;
        for change in changes {
            match change {
                Change::Pod(record) => {
                    pods.insert(record.id.as_str(), record.encode()?.as_slice()).map_err(access("write"))?;
                }
                Change::Container(record) => {
                    containers.insert(record.id.as_str(), record.encode()?.as_slice()).map_err(access("write"))?;
                }
                Change::ForgetPod(id) => {
                    pods.remove(id.as_str()).map_err(access("write"))?;
                }
                Change::ForgetContainer(id) => {
                    containers.remove(id.as_str()).map_err(access("write"))?;
                }
                Change::Vm(record) => {
                    vms.insert(record.id.as_str(), record.encode()?.as_slice()).map_err(access("write"))?;
                }
                Change::ForgetVm(id) => {
                    vms.remove(id.as_str()).map_err(access("write"))?;
                }
                Change::Setting(name, value) => {
                    settings.insert(*name, value.as_str()).map_err(access("write"))?;
                }
            }
        }
    }
    transaction.commit().map_err(access("write"))
}

/// The writer's database. After an error of the disk redb rejects all operations until the file is opened again, and a full disk
/// may have free space later.
struct File {
    path: PathBuf,
    database: Option<Database>,
}

impl File {
    fn write(&mut self, changes: &[Change]) -> Result<(), StoreError> {
        let database = match self.database.take() {
            Some(database) => database,
            None => open_retrying(&self.path)?,
        };
        let written = write(&database, changes);
        self.database = match &written {
            Err(StoreError::Access { source, .. })
                if matches!(source.as_ref(), redb::Error::Io(_) | redb::Error::PreviousIo) =>
            {
                // Opened at once, so that no second daemon takes the file meanwhile; if that fails, the next commit tries again.
                drop(database);
                open_retrying(&self.path).ok()
            }
            _ => Some(database),
        };
        written
    }
}

/// Runs the writer: one transaction per commit, in order.
fn write_all(mut file: File, mut commits: mpsc::Receiver<Commit>, mut observer: Option<CommitObserver>) {
    let mut number = 0;
    let mut notify =
        |number, phase| observer.as_mut().map_or(ControlFlow::Continue(()), |observe| observe(number, phase));
    while let Some(Commit { changes, done }) = commits.blocking_recv() {
        number += 1;
        if notify(number, CommitPhase::Before).is_break() {
            return stop_answering(file, commits, done);
        }
        let written = file.write(&changes);
        if notify(number, CommitPhase::After).is_break() {
            return stop_answering(file, commits, done);
        }
        // The caller may have dropped its request; the state is written all the same.
        let _ = done.send(written);
    }
}

/// Behaves as after a kill: closes the file, and leaves callers without an answer until they are dropped.
fn stop_answering(file: File, mut commits: mpsc::Receiver<Commit>, done: oneshot::Sender<Result<(), StoreError>>) {
    drop(file);
    let mut unanswered = vec![done];
    while let Some(commit) = commits.blocking_recv() {
        unanswered.push(commit.done);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_model::testing::{container, pod};

    #[tokio::test]
    async fn what_was_committed_is_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.redb");
        let (store, contents) = Store::open(&path, None).unwrap();
        assert!(contents.pods.is_empty());
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let (pod, container) = (pod(1), container(2, 1));
        let changes = vec![Change::Pod(pod.clone().into()), Change::Container(container.clone().into())];
        store.commit(changes).await.unwrap();
        store.commit(vec![Change::Setting("pod_cidr", "10.0.0.0/24".into())]).await.unwrap();
        drop(store);
        let (store, contents) = Store::open(&path, None).unwrap();
        assert_eq!((contents.pods, contents.containers), (vec![pod.clone()], vec![container.clone()]));
        assert_eq!(contents.settings["pod_cidr"], "10.0.0.0/24");
        store.commit(vec![Change::ForgetContainer(container.id), Change::ForgetPod(pod.id)]).await.unwrap();
        drop(store);
        let (_, contents) = Store::open(&path, None).unwrap();
        assert!(contents.pods.is_empty() && contents.containers.is_empty());
    }

    /// A small tmpfs. `new` returns `None` if this process may not mount one.
    struct Small(tempfile::TempDir);

    impl Small {
        fn new() -> Option<Small> {
            let dir = tempfile::tempdir().unwrap();
            let none = nix::mount::MsFlags::empty();
            nix::mount::mount(Some("tmpfs"), dir.path(), Some("tmpfs"), none, Some("size=16m")).ok()?;
            Some(Small(dir))
        }
    }

    impl Drop for Small {
        fn drop(&mut self) {
            let _ = nix::mount::umount2(self.0.path(), nix::mount::MntFlags::MNT_DETACH);
        }
    }

    #[tokio::test]
    async fn a_disk_that_was_full_once_is_written_again() {
        let Some(disk) = Small::new() else {
            return println!("skipped: no right to mount");
        };
        let path = disk.0.path().join("s.redb");
        let (store, _) = Store::open(&path, None).unwrap();
        store.commit(vec![Change::Pod(pod(1).into())]).await.unwrap();
        let filler = disk.0.path().join("filler");
        let _ = std::fs::write(&filler, vec![1; 16 << 20]);
        let long = || "x".repeat(4 << 20);
        let error = store.commit(vec![Change::Setting("long", long())]).await.unwrap_err();
        assert!(error.to_string().contains("write"), "{error}");
        std::fs::remove_file(&filler).unwrap();
        store.commit(vec![Change::Setting("long", long()), Change::Pod(pod(2).into())]).await.unwrap();
        drop(store);
        let contents = Store::open(&path, None).unwrap().1;
        assert_eq!((contents.pods.len(), contents.settings.len()), (2, 1));
    }

    #[test]
    fn a_file_that_is_no_store_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.redb");
        std::fs::write(&path, "hello, I am a text").unwrap();
        let error = Store::open(&path, None).err().unwrap();
        assert!(error.to_string().contains("s.redb"), "{error}");
    }

    #[tokio::test]
    async fn a_commit_cut_before_it_is_not_there_and_cut_after_it_is() {
        for phase in [CommitPhase::Before, CommitPhase::After] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("s.redb");
            let cut = move |number: u64, current: CommitPhase| match number == 2 && current == phase {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            };
            let (store, _) = Store::open(&path, Some(Box::new(cut))).unwrap();
            store.commit(vec![Change::Pod(pod(1).into())]).await.unwrap();
            let second = tokio::spawn({
                let store = store.clone();
                async move { store.commit(vec![Change::Pod(pod(2).into())]).await }
            });
            let (_store, contents) =
                tokio::task::spawn_blocking(move || Store::open(&path, None)).await.unwrap().unwrap();
            assert_eq!(contents.pods.len(), if phase == CommitPhase::After { 2 } else { 1 });
            assert!(!second.is_finished());
            second.abort();
        }
    }
}
