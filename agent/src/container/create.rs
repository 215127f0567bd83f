//! Creates a container up to, and without, the first instruction of its program.
//!
//! `prepare` makes root, specification and mounts on a blocking thread; then the zygote makes the first process with
//! libcontainer. If a step fails, the cgroup, the huge pages and the root of the attempt are removed before the error is
//! returned.

use libcontainer::oci_spec::runtime::LinuxNamespaceType;
use nacelle_base::undo::UndoStack;
use nacelle_proto::common::CreateContainerResponse;
use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use super::abandon::MAX_ABANDONED_EXECS;
use super::devices;
use super::error::AgentError;
use super::options::CreateOptions;
use super::pod::{AgentPod, check_id};
use super::prepare::{PreparedContainer, prepare_container};
use super::process::ProcessRole;
use super::record::GuestContainer;
use super::remove::KILL_TIMEOUT;
use super::spawn::StdioOptions;
use super::spec::{OciSpecError, PidNamespace};
use super::{limits, mapped_mounts, root};
use crate::rootfs::{RootError, proc_mount_points};
use crate::zygote::{CreateCommand, ZygoteRequest};
use crate::{cgroup, sys};

impl AgentPod {
    /// Creates a container. For an id that exists already, returns the answer of its creation.
    pub async fn create_container(
        self: Arc<Self>,
        options: CreateOptions,
    ) -> Result<CreateContainerResponse, AgentError> {
        check_id(&options.id)?;
        let id = options.id.clone();
        self.with_container_lock(&id, self.create_under_lock(options)).await
    }

    /// Creates a container whose lock the caller holds.
    async fn create_under_lock(
        self: &Arc<Self>,
        options: CreateOptions,
    ) -> Result<CreateContainerResponse, AgentError> {
        if let Ok(existing) = self.find_container(&options.id) {
            return Ok(existing.created.clone());
        }
        let id = options.id.clone();
        let pid = self.choose_pid_namespace(&id, &options.pid_of, options.pid_mode).await?;
        let namespace = pid.clone();
        // Dropped after `undo`: processes of a failed attempt have the agent's rights until `undo` has killed them.
        let mut trace_guard = None;
        let mut undo = UndoStack::new();
        undo.push("root", {
            let id = id.clone();
            move || root::remove_root(&id)
        });
        undo.push("huge pages", {
            let (pod, id) = (Arc::clone(self), id.clone());
            move || pod.huge_pages.release(&id)
        });
        undo.push("cgroup", {
            let path = cgroup::container_path(&id);
            move || cgroup::kill_and_remove(&path, KILL_TIMEOUT)
        });
        let pod = Arc::clone(self);
        let stdin = options.stdin;
        let created = async {
            let prepared = tokio::task::spawn_blocking(move || prepare_container(&pod, &options, pid)).await??;
            trace_guard = self.freeze_tracers(&id, &namespace).await?;
            let created = self.create_first_process(&id, prepared, stdin, namespace).await?;
            // The container has mounted the copies by now. Releasing them releases the mounts that they copy.
            let copies = id.clone();
            let unmounted = tokio::task::spawn_blocking(move || mapped_mounts::unmount_copies(&copies)).await?;
            unmounted.map_err(|RootError { what, path, source }| AgentError::file(what, &path, &id)(source))?;
            Ok(created)
        };
        let container = match created.await {
            Ok(container) => container,
            Err(error) => {
                // Dropped on a thread where it may block. The stack logs what it could not undo.
                tokio::task::spawn_blocking(move || drop(undo)).await?;
                return Err(error);
            }
        };
        undo.keep();
        drop(trace_guard);
        let response = container.created.clone();
        self.lock_state().containers.insert(id, Arc::new(container));
        Ok(response)
    }

    /// Makes the first process by the zygote, then attaches the device rules, sets the terminal size and limits the CPU time, which
    /// libcontainer does not.
    async fn create_first_process(
        self: &Arc<Self>,
        id: &str,
        prepared: PreparedContainer,
        stdin: bool,
        namespace: PidNamespace,
    ) -> Result<GuestContainer, AgentError> {
        let PreparedContainer { spec, image, late_mounts, cpu_limit, response } = prepared;
        let missing = |part| AgentError::Spec { id: id.to_owned(), source: OciSpecError::Missing { part } };
        let process = spec.process().clone().ok_or_else(|| missing("process"))?;
        let linux = spec.linux().clone().ok_or_else(|| missing("linux"))?;
        let tty = process.terminal().unwrap_or(false);
        let path = cgroup::container_path(id);

        let spawn_guard = self.begin_spawn();
        let in_proc = proc_mount_points(&spec);
        let request = ZygoteRequest::Create(CreateCommand { id: id.to_owned(), tty, in_proc, late: late_mounts });
        let stdio = StdioOptions { tty, stdin, owner: (response.uid, response.gid) };
        let (created, stdio) = self.spawn_process(id, request, vec![], stdio).await?;
        let role = ProcessRole::First { kills_cgroup_on_exit: namespace != PidNamespace::Own };
        let init = self.register_process(created, stdio, path.clone(), role);
        drop(spawn_guard);
        let rules = linux.resources().as_ref().and_then(|resources| resources.devices().clone()).unwrap_or_default();
        devices::attach_rules(&path, &rules).map_err(AgentError::file("limit the devices of the cgroup", &path, id))?;
        if let (Some(terminal), Some(size)) = (&init.stdio.terminal, process.console_size()) {
            let saturate = |number: u64| u16::try_from(number).unwrap_or(u16::MAX);
            sys::set_window_size(terminal, saturate(size.width()), saturate(size.height()))
                .map_err(AgentError::io("size the terminal", id))?;
        }
        if let Some(limit) = cpu_limit {
            limits::change_limits(&path, Path::new("/proc"), &[limit], None)
                .map_err(|source| AgentError::Limits { id: id.to_owned(), source })?;
        }
        let namespaces = linux.namespaces().as_deref().unwrap_or_default();
        Ok(GuestContainer {
            id: id.to_owned(),
            process,
            seccomp: linux.seccomp().clone(),
            has_cgroup_namespace: namespaces.iter().any(|namespace| namespace.typ() == LinuxNamespaceType::Cgroup),
            pid_namespace: namespace,
            cgroup: path,
            image,
            created: response,
            init,
            started: AtomicBool::new(false),
            suspended: Mutex::new(None),
            execs: Mutex::new(HashMap::new()),
            abandoned_execs: Arc::new(tokio::sync::Semaphore::new(MAX_ABANDONED_EXECS)),
        })
    }
}
