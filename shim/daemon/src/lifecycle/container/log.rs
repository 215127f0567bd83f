//! Opens the log file of a container, and sends it to the pod process.

use crate::lifecycle::context::NodeServices;
use crate::lifecycle::context::error::{LifecycleError, at};
use crate::lifecycle::context::request::ask;
use nacelle_base::ContainerId;
use nacelle_base::task::run_blocking_or_panic as blocking;
use nacelle_model::record::{ContainerRecord, PodRecord};
use nacelle_pod::client::{PodClient, open_log};
use std::path::PathBuf;

/// The log file of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ContainerLog {
    /// The log directory of its pod.
    directory: PathBuf,
    /// The path of the file, below the directory.
    path: PathBuf,
}

impl ContainerLog {
    /// Returns the log file of a container; `None` if its output is discarded.
    pub fn of(pod: &PodRecord, container: &ContainerRecord) -> Option<ContainerLog> {
        let directory = pod.config.log_directory.clone()?;
        Some(ContainerLog { directory, path: container.log_path.clone()? })
    }

    /// Opens the file, which is created if it is missing, and makes the pod process write the output of the container to it from now on.
    pub async fn open(
        self,
        services: &NodeServices,
        client: &PodClient,
        id: &ContainerId,
    ) -> Result<(), LifecycleError> {
        let file = blocking(move || open_log(&self.directory, &self.path)).await.map_err(at("open the log"))?;
        ask("send the log to the pod process", services.request_timeout(), client.set_log(id.as_str(), file)).await
    }
}
