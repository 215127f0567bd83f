//! Makes a process by the zygote, with pipes or a terminal as its streams.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::error::AgentError;
use super::pod::AgentPod;
use crate::stdio::Stdio;
use crate::zygote::{NewProcess, ZygoteRequest};

/// The streams that a new process gets.
pub(super) struct StdioOptions {
    /// A terminal instead of pipes.
    pub tty: bool,
    /// Keep the stdin open; otherwise it is /dev/null.
    pub stdin: bool,
    /// The user and group of the process inside its user namespace, to which the pipes belong.
    pub owner: (u32, u32),
}

impl AgentPod {
    /// Makes a process by a request to the zygote. `fds` precede the streams. The caller holds a `SpawnGuard`.
    pub(super) async fn spawn_process(
        self: &Arc<Self>,
        id: &str,
        request: ZygoteRequest,
        mut fds: Vec<OwnedFd>,
        options: StdioOptions,
    ) -> Result<(NewProcess, Stdio), AgentError> {
        let failed = AgentError::io("set up the streams", id);
        let StdioOptions { tty, stdin, owner: (uid, gid) } = options;
        let mut stdio = Stdio::default();
        let (uid, gid) = self.users.as_ref().map_or((uid, gid), |users| users.to_outer_ids(uid, gid));
        if !tty {
            let (ours, theirs) = Stdio::pipes(stdin, uid, gid).map_err(&failed)?;
            stdio = ours;
            fds.extend(theirs);
        }
        let pod = Arc::clone(self);
        let call = move || pod.zygote.call(&request, &fds.iter().collect::<Vec<_>>());
        let created = tokio::task::spawn_blocking(call).await?;
        let mut created = created.map_err(|source| AgentError::Zygote { id: id.to_owned(), source })?;
        if let Some(master) = created.terminal.take() {
            stdio = Stdio::of_terminal(master, stdin).map_err(&failed)?;
        }
        Ok((created, stdio))
    }
}
