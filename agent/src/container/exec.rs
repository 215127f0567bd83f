//! Runs a further process in a running container.
//!
//! Entries of execs are created by the first request that names them, be it a signal: a client that gives up an exec sends
//! SIGKILL, which may arrive before the exec itself.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::error::AgentError;
use super::lock::release_entry;
use super::options::ExecOptions;
use super::pod::{AgentPod, check_id};
use super::process::{ContainerProcess, ProcessRole};
use super::record::{ExecEntry, GuestContainer};
use super::spawn::StdioOptions;
use super::spec::{PidNamespace, derive_exec_process};
use crate::cgroup;
use crate::zygote::{ExecCommand, ExecTarget, ZygoteRequest};

/// The most execs of a container that are remembered after their end.
const MAX_ENDED_EXECS: usize = 256;

impl AgentPod {
    /// Starts a process in a running container. Succeeds without effect if an exec of that id was started before.
    pub async fn start_exec(self: Arc<Self>, options: ExecOptions) -> Result<(), AgentError> {
        check_id(&options.exec_id)?;
        if options.args.first().is_none_or(String::is_empty) {
            return Err(AgentError::NoProgram);
        }
        let container = self.find_container(&options.id)?;
        if !container.is_running() {
            return Err(AgentError::NotRunning { id: options.id });
        }
        let (id, exec_id) = (options.id.clone(), options.exec_id.clone());
        self.start_exec_once(&container, &id, exec_id, self.create_exec_process(&container, options)).await
    }

    /// Creates the process of an exec by `create`, unless it was created before. If SIGKILL was requested before, an exec without a
    /// process gets none, and a new process is killed.
    pub(super) async fn start_exec_once(
        &self,
        container: &GuestContainer,
        id: &str,
        exec_id: String,
        create: impl Future<Output = Result<Arc<ContainerProcess>, AgentError>>,
    ) -> Result<(), AgentError> {
        let entry = self.exec_entry(container, &exec_id);
        let created = entry.process.get_or_try_init(|| async {
            // The client has given the exec up already, and its signal overtook this request.
            if entry.killed.load(Ordering::SeqCst) {
                return Err(AgentError::Killed { id: id.to_owned(), exec_id: exec_id.clone() });
            }
            create.await
        });
        match created.await {
            Ok(process) if entry.killed.load(Ordering::SeqCst) => {
                process.send_signal(libc::SIGKILL).map_err(AgentError::io("kill a command", &container.id))
            }
            Ok(_) => Ok(()),
            Err(error) => {
                let mut execs = container.lock_execs();
                // A repeated request may be making the process now: later requests must find its entry.
                release_entry(&mut execs, &exec_id, entry, |entry| entry.process.initialized());
                Err(error)
            }
        }
    }

    /// Returns the entry of an exec, which it creates if there is none. Forgets the oldest of more than `MAX_ENDED_EXECS` that
    /// are over.
    pub(super) fn exec_entry(&self, container: &GuestContainer, exec_id: &str) -> Arc<ExecEntry> {
        let sequence = {
            let mut state = self.lock_state();
            state.exec_sequence += 1;
            state.exec_sequence
        };
        let mut execs = container.lock_execs();
        let over: Vec<(u64, String)> = execs
            .iter()
            .filter(|(_, entry)| entry.has_ended())
            .map(|(id, entry)| (entry.sequence, id.clone()))
            .collect();
        if over.len() > MAX_ENDED_EXECS
            && let Some((_, oldest)) = over.iter().min()
        {
            execs.remove(oldest);
        }
        Arc::clone(execs.entry(exec_id.to_owned()).or_insert_with(|| Arc::new(ExecEntry::new(sequence))))
    }

    async fn create_exec_process(
        self: &Arc<Self>,
        container: &GuestContainer,
        options: ExecOptions,
    ) -> Result<Arc<ContainerProcess>, AgentError> {
        let not_running = || AgentError::NotRunning { id: options.id.clone() };
        let pidfd = container.init.pidfd.as_ref().ok_or_else(not_running)?;
        let pidfd = pidfd.try_clone().map_err(AgentError::io("refer to the first process", &options.id))?;
        let process = derive_exec_process(&container.process, options.args, options.tty);
        let owner = (process.user().uid(), process.user().gid());
        // Until the program runs, its container must not be frozen, and no container that may trace it may start.
        let _no_freeze = self.trace_lock.read().await;
        let request = ZygoteRequest::Exec(Box::new(ExecCommand {
            process,
            seccomp: container.seccomp.clone(),
            may_be_traced: !self.find_tracers(&container.joinable_pid_namespace()).is_empty(),
            target: ExecTarget::Container {
                user_namespace: self.users.is_some(),
                cgroup_namespace: container.has_cgroup_namespace,
            },
            cgroup: container.cgroup.display().to_string(),
            init_cgroup: cgroup::cgroup_of_process(container.init.pid, &container.cgroup),
            size: options.size,
        }));
        let _spawn_guard = self.begin_spawn();
        let stdio = StdioOptions { tty: options.tty, stdin: options.stdin, owner };
        let created = self.spawn_process(&options.id, request, vec![pidfd], stdio).await;
        // If the container has ended meanwhile, that is the reason, whatever error the zygote saw.
        let (created, stdio) =
            created.map_err(|error| if container.init.exit().is_some() { not_running() } else { error })?;
        let process = self.register_process(created, stdio, container.cgroup.clone(), ProcessRole::Exec);
        // Without a PID namespace of the container's, the process may have entered the cgroup after all others were killed.
        if container.init.exit().is_some() && container.pid_namespace != PidNamespace::Own {
            cgroup::kill_processes(&container.cgroup).map_err(AgentError::io("kill a command", &container.id))?;
        }
        Ok(process)
    }
}
