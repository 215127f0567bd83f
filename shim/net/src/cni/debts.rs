//! Retries pending DELs: those of pods that are gone and whose plugins failed. The end of a pod never waits for a plugin longer
//! than its time limit. Until DEL succeeds, the plugins keep the pod's resources (an address, a rule), and this daemon and later
//! ones retry. The pod's record in the cache marks DEL as pending and has all that DEL needs.

use super::cache::{Owed, Record};
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
/// The pause between attempts at a pending DEL: the first pause, which doubles, and the maximum.
const RETRY: (Duration, Duration) = (Duration::from_secs(15), Duration::from_secs(600));
/// The maximum length of a recorded error text in characters.
const ERROR_LENGTH: usize = 1000;

/// A pending DEL, for display.
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

/// The state of pending DELs in this process.
#[derive(Debug, Default)]
pub(super) struct Debts {
    of: BTreeMap<PodId, Due>,
    /// The configurations and plugins at the last check. If they have changed, DEL may succeed now.
    seen: Option<Vec<(OsString, SystemTime)>>,
}

#[derive(Debug)]
struct Due {
    at: Instant,
    pause: Duration,
}

impl Cni {
    /// Detaches a pod that ends, within `limit`. If DEL does not succeed by then, it is pending, and the error is returned.
    pub async fn release(&self, id: &PodId, limit: Duration) -> Option<CniError> {
        let too_slow = CniError::TooSlow { command: "DEL", seconds: limit.as_secs() };
        let Err(error) = timeout(limit, self.del_some_times(id)).await.unwrap_or(Err(too_slow)) else {
            self.debts().of.remove(id);
            return None;
        };
        // Recorded before `settle` can succeed, which removes the record.
        self.note(id, &error).await;
        let (pause, seen) = (RETRY.0, self.look().await);
        {
            let mut debts = self.debts();
            // Changes from now on may help DEL.
            if debts.of.is_empty() {
                debts.seen = Some(seen);
            }
            debts.of.insert(id.clone(), Due { at: Instant::now() + pause, pause });
        }
        Some(error)
    }

    async fn del_some_times(&self, id: &PodId) -> Result<(), CniError> {
        for pause in PAUSES {
            match self.del(id).await {
                done @ (Ok(()) | Err(CniError::NoPlugin { .. } | CniError::Timeout { .. } | CniError::Busy { .. })) => {
                    return done;
                }
                Err(error) => tracing::warn!(pod = %id, error = %Chain(&error), "CNI DEL failed; it is tried again"),
            }
            sleep(pause).await;
        }
        self.del(id).await
    }

    /// Takes over the pending DELs of earlier daemons.
    pub async fn take_over_debts(&self) -> Result<(), CniError> {
        for owed in self.owed().await? {
            self.debts().of.entry(owed.pod).or_insert(Due { at: Instant::now(), pause: RETRY.0 });
        }
        Ok(())
    }

    /// Retries the pending DELs that are due, or all if configurations or plugins have changed. Each may take `limit`.
    pub async fn settle(&self, limit: Duration) {
        if self.debts().of.is_empty() {
            return;
        }
        let seen = self.look().await;
        let due: Vec<PodId> = {
            let mut debts = self.debts();
            let changed = debts.seen.replace(seen.clone()).is_some_and(|before| before != seen);
            let now = Instant::now();
            debts.of.iter().filter(|(_, due)| changed || due.at <= now).map(|(id, _)| id.clone()).collect()
        };
        for id in due {
            let too_slow = CniError::TooSlow { command: "DEL", seconds: limit.as_secs() };
            match timeout(limit, self.del(&id)).await.unwrap_or(Err(too_slow)) {
                Ok(()) => {
                    self.debts().of.remove(&id);
                    tracing::info!(pod = %id, "an owed CNI DEL has succeeded");
                }
                Err(error) => {
                    if let Some(due) = self.debts().of.get_mut(&id) {
                        due.pause = (due.pause * 2).min(RETRY.1);
                        due.at = Instant::now() + due.pause;
                        tracing::warn!(
                            pod = %id, error = %Chain(&error), again_in = ?due.pause,
                            "a CNI DEL is still owed: its network keeps what the pod had"
                        );
                    }
                    self.note(&id, &error).await;
                }
            }
        }
    }

    /// Records in the pod's record that DEL is pending. Best effort: without the mark the next daemon finds a record without a
    /// pod, and does the same.
    async fn note(&self, id: &PodId, error: &CniError) {
        let record = match self.read(id).await {
            Ok(Some((record, _))) => record,
            Ok(None) => return,
            Err(error) => return tracing::warn!(pod = %id, error = %Chain(&error), "a CNI record cannot be read"),
        };
        let (since, before) = record.owed.as_ref().map_or((now(), 0), |owed| (owed.since, owed.attempts));
        let error = Chain(error).to_string().chars().take(ERROR_LENGTH).collect();
        let owed = Some(Owed { since, attempts: before.saturating_add(1), error });
        if let Err(error) = self.write(&Record { owed, ..record }).await {
            tracing::warn!(pod = %id, error = %Chain(&error), "a CNI record cannot be written");
        }
    }

    /// Returns all pending DELs, from the records.
    pub async fn owed(&self) -> Result<Vec<OwedDelete>, CniError> {
        let mut all = Vec::new();
        for pod in self.ids().await? {
            match self.read(&pod).await {
                Ok(Some((Record { owed: Some(owed), .. }, network))) => {
                    let Owed { since, attempts, error } = owed;
                    all.push(OwedDelete { pod, network: network.name, since, attempts, error });
                }
                Ok(_) => {}
                // This record may be of a pending DEL or of a running pod. The others are returned all the same.
                Err(error) => tracing::warn!(%pod, error = %Chain(&error), "a CNI record cannot be read"),
            }
        }
        Ok(all)
    }

    /// Returns the current state of configurations and plugins.
    async fn look(&self) -> Vec<(OsString, SystemTime)> {
        let directories: Vec<PathBuf> = self.exec.bin_dirs.iter().chain([&self.conf_dir]).cloned().collect();
        run_blocking("list the CNI plugins", move || look(&directories)).await.unwrap_or_default()
    }

    fn debts(&self) -> MutexGuard<'_, Debts> {
        // The map changes by single inserts and removals, so a panic in between leaves it consistent.
        self.debts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the files in these directories and their modification times. An unreadable directory counts as empty.
fn look(directories: &[PathBuf]) -> Vec<(OsString, SystemTime)> {
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
