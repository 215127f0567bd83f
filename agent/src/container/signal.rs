//! Sends signals to the processes of containers. A signal to a process that has ended, or never existed, succeeds.

use std::io;
use std::sync::atomic::Ordering;

use super::error::AgentError;
use super::pod::{AgentPod, check_id};
use super::record::GuestContainer;
use crate::{cgroup, sys};

impl AgentPod {
    /// Sends a signal to the exec `exec_id`, to the container's first process if `exec_id` is empty, or with `all` to every
    /// process of the container. SIGKILL to an exec that does not exist yet prevents its start.
    pub fn send_signal(&self, id: &str, exec_id: &str, signal: u32, all: bool) -> Result<(), AgentError> {
        let number = i32::try_from(signal).ok().filter(|number| (1..=64).contains(number));
        let number = number.ok_or(AgentError::Signal { signal })?;
        let failed = AgentError::io("signal a process", id);
        if all {
            return match self.find_container(id) {
                Ok(container) => signal_all(&container, number).map_err(failed),
                Err(_) => Ok(()),
            };
        }
        if number == libc::SIGKILL
            && check_id(exec_id).is_ok()
            && let Ok(container) = self.find_container(id)
        {
            // Set before the process is looked up: an exec that is being made, or is requested later, sees it.
            self.exec_entry(&container, exec_id).killed.store(true, Ordering::SeqCst);
        }
        match self.find_process(id, exec_id) {
            Ok(process) => process.send_signal(number).map_err(failed),
            Err(_) => Ok(()),
        }
    }

    /// Kills all processes of all containers and those in the guest that were requested, before the VM is powered off.
    pub fn kill_all_containers(&self) -> io::Result<()> {
        cgroup::kill_processes(&cgroup::guest_shells_path()).and(cgroup::kill_processes(&cgroup::pod_path()))
    }
}

fn signal_all(container: &GuestContainer, signal: i32) -> io::Result<()> {
    if signal == libc::SIGKILL {
        return cgroup::kill_processes(&container.cgroup);
    }
    for pid in cgroup::list_processes(&container.cgroup)? {
        match sys::pidfd_open(pid).and_then(|pidfd| sys::pidfd_signal(pidfd, signal)) {
            Err(error) if error.raw_os_error() != Some(libc::ESRCH) => return Err(error),
            _ => {}
        }
    }
    Ok(())
}
