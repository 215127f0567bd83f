//! Describes CNI DELs of removed pods that are still to be done.

use super::units::{format_seconds, format_unix_seconds};
use nacelle_net::OwedDelete;
use serde::Serialize;
use std::time::{SystemTime, UNIX_EPOCH};

/// An owed CNI DEL in the output of commands.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(super) struct OwedDeleteView {
    pod_id: String,
    network: String,
    /// When DEL first failed.
    since: Option<String>,
    attempts: u32,
    error: String,
    #[serde(skip)]
    since_seconds: u64,
}

impl OwedDeleteView {
    pub(super) fn new(owed: &OwedDelete) -> OwedDeleteView {
        OwedDeleteView {
            pod_id: owed.pod.to_string(),
            network: owed.network.clone(),
            since: format_unix_seconds(owed.since),
            attempts: owed.attempts,
            error: owed.error.clone(),
            since_seconds: owed.since,
        }
    }

    /// Returns the line that reports it.
    pub(super) fn line(&self) -> String {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let since = format_seconds(now.saturating_sub(self.since_seconds) as f64);
        let pod = self.pod_id.get(..super::pods::SHORT).unwrap_or(&self.pod_id);
        let tried = if self.attempts == 1 { "once".to_owned() } else { format!("{} times", self.attempts) };
        format!(
            "pod {pod} was removed, but its CNI DEL from network {:?} has failed for {since} (tried {tried}, will be retried): {}",
            self.network, self.error
        )
    }
}
