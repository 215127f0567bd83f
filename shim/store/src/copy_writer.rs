//! Keeps the copy of the store current: appends each commit to the file of changes, and now and then begins a new snapshot, which a
//! thread of its own writes. A failure of the copy never fails a commit; it is logged, and the copy ends before the failed change
//! until the next snapshot.

use crate::copy::{ChangeLog, CopyPaths, write_snapshot};
use crate::database::{StoredRow, commits_of};
use crate::error::{StoreError, access};
use nacelle_base::Chain;
use nacelle_base::files::remove_if_there;
use redb::{Database, ReadableDatabase};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Decides when a new snapshot begins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopyPolicy {
    /// The shortest time between the beginnings of two snapshots.
    pub pause: Duration,
    /// The length in bytes of the file of changes from which on a snapshot begins at the next commit.
    pub changes: u64,
}

impl Default for CopyPolicy {
    fn default() -> CopyPolicy {
        CopyPolicy { pause: Duration::from_secs(10), changes: 1 << 20 }
    }
}

/// The number of files of changes that may wait for a snapshot. Further changes are not copied until one succeeds.
const MAX_CHANGE_FILES: u64 = 16;

/// The writer of the copy.
pub(crate) struct CopyWriter {
    paths: CopyPaths,
    policy: CopyPolicy,
    /// The number of the present file of changes.
    generation: u64,
    /// The present file of changes; `None` after a failure.
    log: Option<ChangeLog>,
    /// The first file of changes that lacks a change or its end: without a later snapshot, the files after it are useless.
    broken_at: Option<u64>,
    /// The generation of the last snapshot that was written.
    copied: u64,
    /// The snapshot that is being written, and its generation.
    running: Option<(u64, JoinHandle<Result<(), StoreError>>)>,
    started: Instant,
}

impl CopyWriter {
    /// Begins a copy of this database with a snapshot. Blocks until that is on the disk. If that fails, the copy of the earlier daemon
    /// stays, and the next commits try again.
    pub fn start(paths: CopyPaths, policy: CopyPolicy, database: &Database) -> CopyWriter {
        let generation = paths.last_generation().unwrap_or_else(|error| {
            tracing::warn!(error = %Chain(&error), "cannot read the earlier copy of the state store; a new one replaces it");
            0
        });
        let mut writer = CopyWriter {
            paths,
            policy,
            generation,
            log: None,
            broken_at: Some(generation),
            copied: generation,
            running: None,
            started: Instant::now(),
        };
        writer.begin(database);
        writer.finish();
        writer
    }

    /// Adds a commit that the database has.
    pub fn add(&mut self, rows: &[StoredRow], database: &Database) {
        if let Some(log) = &mut self.log
            && let Err(error) = log.append(rows)
        {
            self.break_off();
            let error = Chain(&error);
            tracing::warn!(%error, "the copy of the state store lacks the latest changes until it is written anew, which is tried again");
        }
        if self.running.as_ref().is_some_and(|(_, thread)| thread.is_finished()) {
            self.finish();
        }
        let is_long = self.log.as_ref().is_some_and(|log| log.written >= self.policy.changes);
        if (is_long || self.broken_at.is_some())
            && self.running.is_none()
            && self.started.elapsed() >= self.policy.pause
        {
            self.begin(database);
        }
    }

    /// Ends the copy before a commit that it lacks, until the next snapshot.
    pub fn break_off(&mut self) {
        self.log = None;
        self.broken_at = self.broken_at.or(Some(self.generation));
    }

    /// Begins a snapshot and the file of changes that applies to it.
    fn begin(&mut self, database: &Database) {
        self.started = Instant::now();
        // Files of failed attempts.
        if let Some(broken_at) = self.broken_at {
            for generation in broken_at + 1..=self.generation {
                let _ = remove_if_there(&self.paths.changes(generation));
            }
        }
        let may_end = self.generation.saturating_sub(self.copied) < MAX_CHANGE_FILES;
        let ended = self.log.take().filter(|_| may_end).map(ChangeLog::end);
        if !matches!(ended, Some(Ok(()))) {
            self.broken_at = self.broken_at.or(Some(self.generation));
        }
        self.generation += 1;
        let generation = self.generation;
        let transaction = database.begin_read().map_err(access("read"));
        let begun = transaction.and_then(|transaction| {
            let commits = commits_of(&transaction)?;
            self.log = Some(ChangeLog::create(&self.paths, generation, commits)?);
            Ok((transaction, commits))
        });
        let (transaction, commits) = match begun {
            Ok(begun) => begun,
            Err(error) => {
                self.broken_at = self.broken_at.or(Some(generation));
                tracing::warn!(error = %Chain(&error), "cannot begin a new copy of the state store; it is tried again");
                return;
            }
        };
        let paths = self.paths.clone();
        // The transaction keeps the lock of the database until the files are in place.
        let write = move || write_snapshot(&paths, &transaction, generation, commits);
        match std::thread::Builder::new().name("store-copy".into()).spawn(write) {
            Ok(thread) => self.running = Some((generation, thread)),
            Err(error) => warn_of(&StoreError::Access {
                what: "start the thread that copies",
                source: Box::new(redb::Error::Io(error)),
            }),
        }
    }

    /// Waits for the snapshot that is being written.
    pub fn finish(&mut self) {
        let Some((generation, thread)) = self.running.take() else { return };
        match thread.join() {
            Ok(Ok(())) => {
                self.copied = generation;
                if self.broken_at.is_some_and(|broken_at| broken_at < generation) {
                    self.broken_at = self.log.is_none().then_some(self.generation);
                }
            }
            Ok(Err(error)) => warn_of(&error),
            Err(_panic) => tracing::error!("BUG: the thread that copies the state store panicked"),
        }
    }
}

fn warn_of(error: &StoreError) {
    tracing::warn!(error = %Chain(error), "cannot write a new copy of the state store; it is tried again, and the earlier copy and the changes since then stay");
}
