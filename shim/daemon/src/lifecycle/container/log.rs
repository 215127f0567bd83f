//! Opens the log file of a container, and sends it to the pod process.

use crate::lifecycle::context::NodeServices;
use crate::lifecycle::context::error::{LifecycleError, at};
use crate::lifecycle::context::request::ask;
use nacelle_base::ContainerId;
use nacelle_base::task::run_blocking_or_panic as blocking;
use nacelle_model::record::{ContainerRecord, PodRecord};
use nacelle_pod::client::{PodClient, open_log};
use std::path::PathBuf;
use tokio::time::timeout;

/// The path of a container's log file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LogPath {
    /// The log directory of its pod.
    directory: PathBuf,
    /// The absolute path of the file, which is below `directory`.
    path: PathBuf,
}

impl LogPath {
    /// Returns the path of a container's log file; `None` if its output is discarded.
    pub fn of(pod: &PodRecord, container: &ContainerRecord) -> Option<LogPath> {
        let directory = pod.config.log_directory.clone()?;
        Some(LogPath { directory, path: container.log_path.clone()? })
    }

    /// Opens the file, which is created if it is missing, and makes the pod process write the output of the container to it from now on.
    pub async fn open_and_send(
        self,
        services: &NodeServices,
        client: &PodClient,
        id: &ContainerId,
    ) -> Result<(), LifecycleError> {
        let (step, limit) = ("prepare the log of the container", services.request_timeout());
        let opened = timeout(limit, blocking(move || open_log(&self.directory, &self.path))).await;
        let file = opened.map_err(|_elapsed| LifecycleError::TooSlow { step, limit })?.map_err(at(step))?;
        ask("send the log to the pod process", services.request_timeout(), client.set_log(id.as_str(), file)).await
    }
}
