//! Sends requests to pod processes, each with a time limit.

use super::error::{LifecycleError, StepError, at};
use nacelle_base::{Classify, FailureKind};
use nacelle_pod::client::ClientError;
use std::time::Duration;
use tokio::time::timeout;

/// Sends a request to a pod process, with a time limit.
pub(crate) async fn ask<T>(
    step: &'static str,
    limit: Duration,
    call: impl Future<Output = Result<T, ClientError>>,
) -> Result<T, LifecycleError> {
    timeout(limit, call).await.map_err(|_elapsed| LifecycleError::TooSlow { step, limit })?.map_err(at(step))
}

/// Returns whether the pod process does not know the container.
pub(crate) fn is_unknown(error: &LifecycleError) -> bool {
    matches!(error, LifecycleError::Step { source: StepError::Pod(_), .. }) && error.kind() == FailureKind::NotFound
}
