//! Runs a command in the guest itself and not in a container: a shell with which an operator looks at the guest.
//!
//! The command has its programs from the image of a container, which may have exited, and is an exec of that container: it has its
//! streams, its signals and its end. It has a cgroup of its own, in which it is killed with all its children when it ends or when the
//! container is removed.

use libcontainer::oci_spec::runtime::{Process, User};
use std::path::PathBuf;
use std::sync::Arc;

use super::error::AgentError;
use super::options::ExecOptions;
use super::pod::{AgentPod, check_id};
use super::process::{ContainerProcess, ProcessRole};
use super::record::GuestContainer;
use super::remove::KILL_TIMEOUT;
use super::spawn::StdioOptions;
use crate::zygote::{ExecCommand, ExecTarget, ZygoteRequest};
use crate::{cgroup, paths};

/// The adjustment of the OOM killer's score: if the guest runs out of memory, the command is killed before any container.
const OOM_SCORE_ADJ: i32 = 1000;

impl AgentPod {
    /// Starts a process in the guest. Succeeds without effect if an exec of that id was started before.
    pub async fn start_guest_shell(self: Arc<Self>, options: ExecOptions) -> Result<(), AgentError> {
        check_id(&options.id)?;
        check_id(&options.exec_id)?;
        if options.args.first().is_none_or(String::is_empty) {
            return Err(AgentError::NoProgram);
        }
        let (id, exec_id) = (options.id.clone(), options.exec_id.clone());
        // Under the lock, so that the container is not removed before the process can be found and killed.
        self.with_container_lock(&id, async {
            let container = self.find_container(&id)?;
            self.start_exec_once(&container, &id, exec_id, self.create_guest_shell(&container, options)).await
        })
        .await
    }

    async fn create_guest_shell(
        self: &Arc<Self>,
        container: &GuestContainer,
        options: ExecOptions,
    ) -> Result<Arc<ContainerProcess>, AgentError> {
        let cgroup = cgroup::container_shells_path(&options.id).join(&options.exec_id);
        let path = cgroup.clone();
        let created = tokio::task::spawn_blocking(move || std::fs::create_dir_all(path)).await?;
        created.map_err(AgentError::file("create the cgroup", &cgroup, &options.id))?;
        let request = ZygoteRequest::Exec(Box::new(ExecCommand {
            process: shell_process(options.args, options.tty),
            seccomp: None,
            // No container sees the agent's PID namespace.
            may_be_traced: false,
            target: ExecTarget::Guest { image: container.image.clone() },
            cgroup: cgroup.display().to_string(),
            init_cgroup: None,
            size: options.size,
        }));
        let _spawn_guard = self.begin_spawn();
        let stdio = StdioOptions { tty: options.tty, stdin: options.stdin, owner: (0, 0) };
        match self.spawn_process(&options.id, request, Vec::new(), stdio).await {
            Ok((created, stdio)) => {
                let process = self.register_process(created, stdio, cgroup.clone(), ProcessRole::GuestShell);
                let ended = Arc::clone(&process);
                tokio::spawn(async move {
                    ended.wait_for_exit().await;
                    remove_cgroup(cgroup).await;
                });
                Ok(process)
            }
            Err(error) => {
                remove_cgroup(cgroup).await;
                Err(error)
            }
        }
    }
}

/// Kills what is left in the cgroup of a command, and removes it.
async fn remove_cgroup(cgroup: PathBuf) {
    let removed = tokio::task::spawn_blocking(move || cgroup::kill_and_remove(&cgroup, KILL_TIMEOUT)).await;
    if let Err(error) = removed.map_err(std::io::Error::other).and_then(|removed| removed) {
        tracing::warn!(%error, "cannot remove the cgroup of a command in the guest");
    }
}

/// Returns the process of a command in the guest: root with all capabilities. It has no variable of a container: by a path in /proc, PATH
/// could lead to a program that a container has written.
fn shell_process(args: Vec<String>, tty: bool) -> Process {
    let mut env = vec![format!("PATH={}", paths::DEFAULT_SEARCH_PATH), "HOME=/root".to_owned()];
    if tty {
        env.push("TERM=xterm".to_owned());
    }
    let mut process = Process::default();
    process
        .set_args(Some(args))
        .set_env(Some(env))
        .set_terminal(Some(tty))
        .set_cwd("/".into())
        .set_user(User::default())
        .set_oom_score_adj(Some(OOM_SCORE_ADJ))
        // Those of the agent, which has all.
        .set_capabilities(None)
        .set_rlimits(None)
        .set_no_new_privileges(Some(false));
    process
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn a_command_in_the_guest_has_the_rights_of_the_agent_and_a_fixed_path() {
        let process = shell_process(vec!["sh".to_owned()], true);
        let path = format!("PATH={}", paths::DEFAULT_SEARCH_PATH);
        assert_eq!(process.env().as_deref().unwrap(), [path.as_str(), "HOME=/root", "TERM=xterm"]);
        assert!(
            paths::DEFAULT_SEARCH_PATH
                .split(':')
                .all(|directory| directory.starts_with("/usr/") || directory.ends_with("bin"))
        );
        assert_eq!((process.user().uid(), process.user().gid()), (0, 0));
        assert!(process.user().additional_gids().is_none() && process.capabilities().is_none());
        assert!(process.rlimits().is_none() && process.apparmor_profile().is_none());
        assert_eq!((process.no_new_privileges(), process.cwd().as_path()), (Some(false), Path::new("/")));
        let without_terminal = shell_process(vec!["sh".to_owned()], false);
        assert_eq!(without_terminal.env().as_deref().unwrap(), [path.as_str(), "HOME=/root"]);
    }
}
