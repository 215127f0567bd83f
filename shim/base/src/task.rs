//! Runs closures that block on the blocking pool of the async runtime, and names the work whose task did not finish. Only with the
//! feature `task`, which needs tokio.

use crate::{Classify, FailureKind};
use tokio::task::{JoinError, spawn_blocking};

/// A task of the async runtime ended without a result. `what` completes the sentence "cannot …".
#[derive(Debug, thiserror::Error)]
pub enum TaskError {
    /// The work panicked.
    #[error("BUG: cannot {what}: the task panicked: {message}")]
    Panicked {
        /// The work, as an infinitive.
        what: &'static str,
        /// The panic message.
        message: String,
    },
    /// The runtime is shutting down, or the task was aborted.
    #[error("cannot {what}: the task was cancelled")]
    Cancelled {
        /// The work, as an infinitive.
        what: &'static str,
    },
}

impl TaskError {
    /// Names the work of a task that could not be joined.
    pub fn new(what: &'static str, error: JoinError) -> TaskError {
        match error.try_into_panic() {
            Err(_cancelled) => TaskError::Cancelled { what },
            Ok(panic) => {
                let text = panic.downcast_ref::<&str>().copied();
                let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
                TaskError::Panicked { what, message: text.unwrap_or("no message").to_owned() }
            }
        }
    }
}

impl Classify for TaskError {
    fn kind(&self) -> FailureKind {
        FailureKind::Internal
    }
}

/// Runs a closure on the blocking pool. It runs to its end even if the future is dropped after its first poll.
pub async fn run_blocking<T: Send + 'static>(
    what: &'static str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, TaskError> {
    spawn_blocking(work).await.map_err(|error| TaskError::new(what, error))
}

/// Runs a closure on the blocking pool and resumes its panic in the caller. Never completes if the runtime shuts down first.
pub async fn run_blocking_or_panic<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_cancelled) => std::future::pending().await,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_error_names_the_work_and_the_panic() {
        assert_eq!(run_blocking("count", || 7).await.unwrap(), 7);
        let number = 3;
        let error = run_blocking("count", move || assert!(number < 3, "{number} sheep")).await.unwrap_err();
        assert_eq!(error.to_string(), "BUG: cannot count: the task panicked: 3 sheep");
        let error = run_blocking("count", || panic!("no sheep")).await.unwrap_err();
        assert_eq!(error.to_string(), "BUG: cannot count: the task panicked: no sheep");
        let task = tokio::spawn(std::future::pending::<()>());
        task.abort();
        let error = TaskError::new("wait", task.await.unwrap_err());
        assert_eq!(error.to_string(), "cannot wait: the task was cancelled");
    }

    #[tokio::test]
    #[should_panic(expected = "no sheep")]
    async fn a_panic_is_resumed_in_the_caller() {
        run_blocking_or_panic(|| panic!("no sheep")).await
    }
}
