//! Retries owed DELs: those of removed pods whose plugins failed. The end of a pod never waits for a plugin longer
//! than its time limit. Until DEL succeeds, the plugins keep the pod's resources (an address, a rule), and this daemon and later
//! ones retry. The pod's attachment record marks DEL as owed and has all that DEL needs.

use super::attachment_store::{AttachmentRecord, OwedDeleteState};
use super::{Cni, CniError};
use nacelle_base::task::run_blocking;
use nacelle_base::{Chain, PodId};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};
use tokio::time::{sleep, timeout};

/// The pauses between the attempts at DEL before the pod ends without it. If a plugin is not installed or exceeded its deadline,
/// there is no immediate retry.
const PAUSES: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(2)];
/// The pause between attempts at an owed DEL: the first pause, which doubles, and the maximum.
const RETRY: (Duration, Duration) = (Duration::from_secs(15), Duration::from_secs(600));
/// The maximum length of a recorded error text in characters.
const ERROR_LENGTH: usize = 1000;

/// An owed DEL, for display.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwedDelete {
    /// The pod, which is gone.
    pub pod: PodId,
    /// The name of the network whose plugins hold resources of the pod.
    pub network: String,
    /// When DEL first failed, in seconds since 1970.
    pub since: u64,
    /// The number of attempts.
    pub attempts: u32,
    /// The error of the last attempt.
    pub error: String,
}

/// The state of owed DELs in this process.
#[derive(Debug, Default)]
pub(super) struct OwedDeletes {
    next_attempts: BTreeMap<PodId, NextAttempt>,
    /// The configurations and plugins at the last check. If they have changed, DEL may succeed now.
    plugin_files: Option<Vec<(OsString, SystemTime)>>,
}

#[derive(Debug)]
struct NextAttempt {
    at: Instant,
    pause: Duration,
}

impl Cni {
    /// Detaches a pod that ends, within `limit`. If DEL does not succeed by then, it is owed, and the error is returned.
    pub async fn release(&self, id: &PodId, limit: Duration) -> Option<CniError> {
        let too_slow = CniError::TooSlow { command: "DEL", seconds: limit.as_secs() };
        let Err(error) = timeout(limit, self.del_with_retries(id)).await.unwrap_or(Err(too_slow)) else {
            self.lock_owed_deletes().next_attempts.remove(id);
            return None;
        };
        // Recorded before `retry_owed_deletes` can succeed, which removes the record.
        self.record_owed_delete(id, &error).await;
        let (pause, seen) = (RETRY.0, self.list_plugin_files().await);
        {
            let mut owed_deletes = self.lock_owed_deletes();
            // Changes from now on may help DEL.
            if owed_deletes.next_attempts.is_empty() {
                owed_deletes.plugin_files = Some(seen);
            }
            owed_deletes.next_attempts.insert(id.clone(), NextAttempt { at: Instant::now() + pause, pause });
        }
        Some(error)
    }

    async fn del_with_retries(&self, id: &PodId) -> Result<(), CniError> {
        for pause in PAUSES {
            match self.del(id).await {
                done @ (Ok(()) | Err(CniError::NoPlugin { .. } | CniError::Timeout { .. } | CniError::Busy { .. })) => {
                    return done;
                }
                Err(error) => tracing::warn!(pod = %id, error = %Chain(&error), "CNI DEL failed; it will be retried"),
            }
            sleep(pause).await;
        }
        self.del(id).await
    }

    /// Loads the owed DELs that earlier daemons recorded.
    pub async fn load_owed_deletes(&self) -> Result<(), CniError> {
        for owed in self.owed_deletes().await? {
            self.lock_owed_deletes()
                .next_attempts
                .entry(owed.pod)
                .or_insert(NextAttempt { at: Instant::now(), pause: RETRY.0 });
        }
        Ok(())
    }

    /// Retries the owed DELs that are due, or all if configurations or plugins have changed. Each may take `limit`.
    pub async fn retry_owed_deletes(&self, limit: Duration) {
        if self.lock_owed_deletes().next_attempts.is_empty() {
            return;
        }
        let seen = self.list_plugin_files().await;
        let due: Vec<PodId> = {
            let mut owed_deletes = self.lock_owed_deletes();
            let changed = owed_deletes.plugin_files.replace(seen.clone()).is_some_and(|before| before != seen);
            let now = Instant::now();
            owed_deletes
                .next_attempts
                .iter()
                .filter(|(_, due)| changed || due.at <= now)
                .map(|(id, _)| id.clone())
                .collect()
        };
        for id in due {
            let too_slow = CniError::TooSlow { command: "DEL", seconds: limit.as_secs() };
            match timeout(limit, self.del(&id)).await.unwrap_or(Err(too_slow)) {
                Ok(()) => {
                    self.lock_owed_deletes().next_attempts.remove(&id);
                    tracing::info!(pod = %id, "an owed CNI DEL has succeeded");
                }
                Err(error) => {
                    if let Some(due) = self.lock_owed_deletes().next_attempts.get_mut(&id) {
                        due.pause = (due.pause * 2).min(RETRY.1);
                        due.at = Instant::now() + due.pause;
                        tracing::warn!(
                            pod = %id, error = %Chain(&error), again_in = ?due.pause,
                            "a CNI DEL is still owed: its plugins keep the pod's address and rules"
                        );
                    }
                    self.record_owed_delete(&id, &error).await;
                }
            }
        }
    }

    /// Records in the pod's record that DEL is owed. Best effort: without the mark the next daemon finds a record without a
    /// pod, and does the same.
    async fn record_owed_delete(&self, id: &PodId, error: &CniError) {
        let record = match self.read_record(id).await {
            Ok(Some((record, _))) => record,
            Ok(None) => return,
            Err(error) => return tracing::warn!(pod = %id, error = %Chain(&error), "a CNI record cannot be read"),
        };
        let (since, before) = record.owed.as_ref().map_or((now(), 0), |owed| (owed.since, owed.attempts));
        let error = Chain(error).to_string().chars().take(ERROR_LENGTH).collect();
        let owed = Some(OwedDeleteState { since, attempts: before.saturating_add(1), error });
        if let Err(error) = self.write_record(&AttachmentRecord { owed, ..record }).await {
            tracing::warn!(pod = %id, error = %Chain(&error), "a CNI record cannot be written");
        }
    }

    /// Returns the number of owed DELs that `retry_owed_deletes` will retry.
    pub fn count_owed_deletes(&self) -> usize {
        self.lock_owed_deletes().next_attempts.len()
    }

    /// Returns all owed DELs, from the records.
    pub async fn owed_deletes(&self) -> Result<Vec<OwedDelete>, CniError> {
        let mut all = Vec::new();
        for pod in self.ids().await? {
            match self.read_record(&pod).await {
                Ok(Some((AttachmentRecord { owed: Some(owed), .. }, network))) => {
                    let OwedDeleteState { since, attempts, error } = owed;
                    all.push(OwedDelete { pod, network: network.name, since, attempts, error });
                }
                Ok(_) => {}
                // This record may be of an owed DEL or of a running pod. The others are returned all the same.
                Err(error) => tracing::warn!(%pod, error = %Chain(&error), "a CNI record cannot be read"),
            }
        }
        Ok(all)
    }

    /// Returns the files of configurations and plugins with their modification times.
    async fn list_plugin_files(&self) -> Vec<(OsString, SystemTime)> {
        let directories: Vec<PathBuf> = self.runner.bin_dirs.iter().chain([&self.conf_dir]).cloned().collect();
        run_blocking("list the CNI plugins", move || list_plugin_files(&directories)).await.unwrap_or_default()
    }

    fn lock_owed_deletes(&self) -> MutexGuard<'_, OwedDeletes> {
        // The map changes by single inserts and removals, so a panic in between leaves it consistent.
        self.owed_deletes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the files in these directories and their modification times. An unreadable directory counts as empty.
fn list_plugin_files(directories: &[PathBuf]) -> Vec<(OsString, SystemTime)> {
    let entries = |directory: &PathBuf| std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut all: Vec<_> = directories
        .iter()
        .flat_map(entries)
        .map(|entry| {
            let changed = std::fs::metadata(entry.path()).and_then(|found| found.modified());
            (entry.path().into_os_string(), changed.unwrap_or(SystemTime::UNIX_EPOCH))
        })
        .collect();
    all.sort();
    all
}

fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}
