//! Finds running containers and ready pods for streams, commands and consoles.

use super::Node;
use crate::lifecycle::container::log::LogPath;
use crate::lifecycle::context::error::LifecycleError;
use crate::lifecycle::context::view::View;
use nacelle_base::task::run_blocking_or_panic as blocking;
use nacelle_base::{Chain, ContainerId, PodId};
use nacelle_model::record::ContainerRecord;
use nacelle_model::state;
use nacelle_pod::client::PodClient;
use std::sync::Arc;
use tokio::sync::watch;

/// The number of bytes of a console that an error shows.
const CONSOLE_SHOWN: usize = 4 << 10;

/// A running container, for streams and commands.
pub(crate) struct Running {
    /// The container's id.
    pub id: ContainerId,
    /// The client of its pod process.
    pub client: PodClient,
    /// The container has a terminal.
    pub tty: bool,
    /// The container has a standard input.
    pub stdin: bool,
    /// The standard input is closed when the first attached client ends.
    pub stdin_once: bool,
    /// The path of its log file.
    pub log: Option<LogPath>,
    view: watch::Receiver<Arc<View>>,
}

impl Running {
    /// Waits until the container no longer runs.
    pub async fn ended(mut self) {
        let runs = |view: &Arc<View>| view.containers.get(&self.id).map(|record| record.state);
        // A removed pod publishes nothing more.
        let _ = self.view.wait_for(|view| runs(view) != Some(state::ContainerState::Running)).await;
    }
}

/// Describes how a container has ended, for the end of a message.
fn describe_end(record: &ContainerRecord) -> String {
    let message = Some(record.message.as_str()).filter(|message| !message.is_empty());
    let message = message.map(|message| format!(": {message}")).unwrap_or_default();
    format!(": it ended with exit code {}{message}", record.exit_code)
}

impl Node {
    /// Returns a running container.
    pub(crate) fn running(&self, id: &str) -> Result<Running, LifecycleError> {
        let (id, handle, view) = self.table.find_container(id)?;
        match (&view.client, view.containers.get(&id)) {
            (Some(client), Some(record)) if record.state == state::ContainerState::Running => {
                let config = &record.config;
                let (tty, stdin, stdin_once) = (config.tty, config.stdin, config.stdin_once);
                let log = LogPath::of(&view.pod, record);
                Ok(Running { id, client: client.clone(), tty, stdin, stdin_once, log, view: handle.view })
            }
            (_, record) => {
                let why = record.filter(|record| record.state == state::ContainerState::Exited).map(describe_end);
                Err(LifecycleError::NotRunning { id: id.to_string(), why: why.unwrap_or_default() })
            }
        }
    }

    /// Returns a ready pod and its client.
    pub(crate) fn ready(&self, id: &str) -> Result<(Arc<View>, PodClient), LifecycleError> {
        let (id, handle) = self.table.find(id)?;
        let view = Arc::clone(&handle.view.borrow());
        match view.client.clone() {
            Some(client) if view.pod.state == state::PodState::Ready => Ok((view, client)),
            _ => Err(LifecycleError::NotReady { id: id.to_string(), why: format!("it is {:?}", view.pod.state) }),
        }
    }

    /// Completes when a pod is not ready, or does not exist.
    pub(crate) fn not_ready(&self, id: &PodId) -> impl Future<Output = ()> + Send + 'static {
        let view = self.table.find(id.as_str()).ok().map(|(_, handle)| handle.view);
        async move {
            let Some(mut view) = view else { return };
            // The view is closed if the pod is gone.
            let _ = view.wait_for(|view| view.pod.state != state::PodState::Ready).await;
        }
    }

    /// Returns the end of the guest's console output; empty if there is no console.
    pub async fn console(&self, pod: &PodId) -> String {
        let jailed = nacelle_pod::jailed(&self.services.pod_dir(pod));
        let tail = blocking(move || nacelle_engine::log_tail(&jailed, nacelle_pod::CONSOLE_FILE, CONSOLE_SHOWN));
        match tail.await {
            Ok(text) => text.unwrap_or_default(),
            Err(error) => {
                tracing::warn!(%pod, "the console's log cannot be shown: {}", Chain(&error));
                String::new()
            }
        }
    }
}
