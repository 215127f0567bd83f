//! DELs that are owed: those of pods that are gone and whose plugins failed. A pod's end never waits for a plugin longer than
//! its limit; what the plugins hold (an address, a rule) stays with them, and DEL is tried again, by this daemon and the next
//! ones, until it succeeds. The pod's record in the cache says that it is owed, and has all that DEL needs.

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

/// How often DEL is tried before the pod goes without it, and the pauses in between. A plugin that is not installed, or did not
/// end within its deadline, is not tried again at once.
const PAUSES: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(2)];
/// Between attempts at an owed DEL: the first pause, which doubles, and the longest.
const RETRY: (Duration, Duration) = (Duration::from_secs(15), Duration::from_secs(600));
/// The longest text of an error that is kept, in characters.
const ERROR_LENGTH: usize = 1000;

/// A DEL that is owed, as it is shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwedDelete {
    /// The pod, which is gone.
    pub pod: PodId,
    /// The name of the network whose plugins have something of it.
    pub network: String,
    /// When DEL failed first, in seconds since 1970.
    pub since: u64,
    /// How often it was tried.
    pub attempts: u32,
    /// Why it failed last.
    pub error: String,
}

/// What this process knows of owed DELs.
#[derive(Debug, Default)]
pub(super) struct Debts {
    of: BTreeMap<PodId, Due>,
    /// Configurations and plugins as they were at the last look: a change may be what DEL has waited for.
    seen: Option<Vec<(OsString, SystemTime)>>,
}

#[derive(Debug)]
struct Due {
    at: Instant,
    pause: Duration,
}

impl Cni {
    /// Detaches a pod that ends, within `limit`; what its plugins do not give back by then is owed: the answer is why.
    pub async fn release(&self, id: &PodId, limit: Duration) -> Option<CniError> {
        let too_slow = CniError::TooSlow { command: "DEL", seconds: limit.as_secs() };
        let Err(error) = timeout(limit, self.del_some_times(id)).await.unwrap_or(Err(too_slow)) else {
            self.debts().of.remove(id);
            return None;
        };
        // Recorded before it can be settled, which removes the record.
        self.note(id, &error).await;
        let (pause, seen) = (RETRY.0, self.look().await);
        {
            let mut debts = self.debts();
            // What changes from now on may mend it.
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

    /// Takes over what daemons before this one owe for pods that are still known.
    pub async fn take_over_debts(&self) -> Result<(), CniError> {
        for owed in self.owed().await? {
            self.debts().of.entry(owed.pod).or_insert(Due { at: Instant::now(), pause: RETRY.0 });
        }
        Ok(())
    }

    /// Tries the owed DELs whose time has come; all of them if configurations or plugins have changed. Each has `limit`.
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

    /// Writes into the pod's record that DEL is owed. Best effort: without it the next daemon finds a record without a pod,
    /// and does the same.
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

    /// All DELs that are owed, by their records.
    pub async fn owed(&self) -> Result<Vec<OwedDelete>, CniError> {
        let mut all = Vec::new();
        for pod in self.ids().await? {
            match self.read(&pod).await {
                Ok(Some((Record { owed: Some(owed), .. }, network))) => {
                    let Owed { since, attempts, error } = owed;
                    all.push(OwedDelete { pod, network: network.name, since, attempts, error });
                }
                Ok(_) => {}
                // It may be owed, or belong to a pod that runs; the others are shown all the same.
                Err(error) => tracing::warn!(%pod, error = %Chain(&error), "a CNI record cannot be read"),
            }
        }
        Ok(all)
    }

    /// The configurations and plugins as they are.
    async fn look(&self) -> Vec<(OsString, SystemTime)> {
        let directories: Vec<PathBuf> = self.exec.bin_dirs.iter().chain([&self.conf_dir]).cloned().collect();
        run_blocking("list the CNI plugins", move || look(&directories)).await.unwrap_or_default()
    }

    fn debts(&self) -> MutexGuard<'_, Debts> {
        // Changed by single inserts and removals: a panic in between leaves it whole.
        self.debts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The files in these directories and when they were changed; a directory that cannot be read has none.
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
