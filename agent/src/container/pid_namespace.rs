//! Chooses the PID namespace of a new container, and creates the pod's shared one when the first container needs it.

use nacelle_proto::agent::PidMode;
use std::path::Path;
use std::sync::Arc;

use super::error::AgentError;
use super::pod::AgentPod;
use super::spec::PidNamespace;
use crate::zygote::{ZygoteError, ZygoteRequest};
use crate::{paths, userns};

impl AgentPod {
    /// Returns the PID namespace in which container `id` runs: that of container `pid_of` unless that is empty, otherwise
    /// the one of `mode`.
    pub(super) async fn choose_pid_namespace(
        self: &Arc<Self>,
        id: &str,
        pid_of: &str,
        mode: PidMode,
    ) -> Result<PidNamespace, AgentError> {
        if !pid_of.is_empty() {
            let target = self.find_container(pid_of)?;
            if target.init.exit().is_some() {
                return Err(AgentError::NotRunning { id: pid_of.to_owned() });
            }
            return Ok(target.joinable_pid_namespace());
        }
        if self.node_pid && mode == PidMode::Pod {
            return Ok(PidNamespace::Node);
        }
        if !self.shared_pid || mode == PidMode::Container {
            return Ok(PidNamespace::Own);
        }
        let holder = *self.pause.get_or_try_init(|| self.start_pause_process(id)).await?;
        Ok(if self.users.is_some() { PidNamespace::Named } else { PidNamespace::Of(holder) })
    }

    /// Starts the process that holds the shared PID namespace, and returns its PID. `id`: the container that needs it.
    async fn start_pause_process(self: &Arc<Self>, id: &str) -> Result<i32, AgentError> {
        let failed = |source: ZygoteError| AgentError::Zygote { id: id.to_owned(), source };
        let pod = Arc::clone(self);
        let user_namespace = self.users.is_some();
        let hold = move || pod.zygote.call(&ZygoteRequest::Pause { user_namespace }, &[]);
        let holder = tokio::task::spawn_blocking(hold).await?.map_err(failed)?;
        if user_namespace {
            let named = userns::bind_namespace(&format!("/proc/{}/ns/pid", holder.pid), paths::PID_NAMESPACE);
            named.map_err(AgentError::file("bind the PID namespace to", Path::new(paths::PID_NAMESPACE), id))?;
        }
        // The process lives as long as the agent, which never signals it.
        Ok(holder.release().0)
    }
}
