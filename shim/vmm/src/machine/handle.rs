//! Defines the handle of a VM, which pauses, resumes, saves and ends it.

use super::legacy::SerialPort;
use super::memory::GuestMemory;
use super::state::{self, MachineState};
use super::vcpu::VcpuControl;
use super::{Error, VmConfig};
use crate::Memory;
use crate::mmio::Transport;
use kvm_ioctls::{VcpuFd, VmFd};
use nacelle_base::guest_error;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// The reason for which a VM ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VmExit {
    /// The guest requested a reset: it rebooted, powered off or panicked; its console shows which.
    Reset,
    /// A vCPU had a fault that no handler of the guest handles.
    TripleFault {
        /// The vCPU, and its registers if KVM has kept them.
        what: String,
    },
    /// KVM or a thread of this process failed.
    Failed {
        /// The vCPU and the details of the failure.
        what: String,
    },
    /// [`VmHandle::kill`] ended the VM.
    Killed,
}

impl std::fmt::Display for VmExit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            VmExit::Reset => f.write_str("the guest requested a reset"),
            VmExit::TripleFault { what } => write!(f, "a triple fault on {what}"),
            VmExit::Failed { what } => f.write_str(what),
            VmExit::Killed => f.write_str("killed"),
        }
    }
}

/// A VM that runs, is paused or has ended. Dropping it kills the VM and releases everything: threads, descriptors and memory.
pub struct VmHandle {
    pub(super) config: VmConfig,
    pub(super) control: Arc<VcpuControl>,
    pub(super) threads: Mutex<Vec<JoinHandle<()>>>,
    pub(super) vcpus: Vec<Arc<Mutex<VcpuFd>>>,
    pub(super) transports: Vec<Arc<Transport>>,
    pub(super) serial: Option<Arc<SerialPort>>,
    pub(super) vm: Arc<VmFd>,
    /// Dropped last.
    pub(super) memory: GuestMemory,
}

impl VmHandle {
    /// Returns the configuration that the VM was created from.
    pub fn config(&self) -> &VmConfig {
        &self.config
    }

    /// Returns the VM's memory. A caller that keeps the reference must drop it before this [`VmHandle`]; otherwise the memory is
    /// never unmapped.
    pub fn memory(&self) -> &Arc<Memory> {
        self.memory.memory()
    }

    /// Returns the VM's devices, in the order in which they were attached.
    pub fn transports(&self) -> &[Arc<Transport>] {
        &self.transports
    }

    /// Pauses all vCPUs, then all queues. On return the guest does nothing. May be repeated.
    pub fn pause(&self) -> Result<(), Error> {
        self.control.pause()?;
        self.transports.iter().for_each(|transport| transport.pause());
        Ok(())
    }

    /// Resumes queues and vCPUs. May be repeated.
    pub fn resume(&self) -> Result<(), Error> {
        for transport in &self.transports {
            transport.resume().map_err(|source| Error::Resume { device: transport.kind(), source })?;
        }
        if self.control.is_paused() {
            self.notify_paused();
        }
        self.control.resume()
    }

    /// Notifies the guest on each vCPU that it was paused, so that its watchdogs do not fire. Impossible for a vCPU without a
    /// paravirtual clock.
    fn notify_paused(&self) {
        for vcpu in &self.vcpus {
            if let Err(error) = vcpu.lock().unwrap_or_else(PoisonError::into_inner).kvmclock_ctrl() {
                tracing::debug!(%error, "cannot notify a guest that it was paused");
            }
        }
    }

    /// Returns how the VM ended, or `None` while a vCPU still runs.
    pub fn exit(&self) -> Option<VmExit> {
        self.control.exit()
    }

    /// Waits until the VM has ended. Returns `None` after `timeout`. After the end it always returns the same value.
    pub fn wait(&self, timeout: Duration) -> Option<VmExit> {
        self.control.wait(timeout)
    }

    /// Ends the VM. If it has ended already, its exit reason does not change. On return no vCPU runs.
    pub fn kill(&self) -> Result<VmExit, Error> {
        self.control.request_end(VmExit::Killed);
        let timeout_error = Error::Stuck { seconds: 60 };
        if !self.control.wait_for_threads() {
            return Err(timeout_error);
        }
        self.control.exit().ok_or(timeout_error)
    }

    /// Returns the whole state of a paused VM except its memory. The VM stays paused.
    pub fn save(&self) -> Result<MachineState, Error> {
        if !self.control.is_paused() {
            return Err(Error::NotPaused);
        }
        state::save(&self.config, &self.vm, &self.vcpus, &self.transports, self.serial.as_deref())
    }
}

impl Drop for VmHandle {
    fn drop(&mut self) {
        if let Err(error) = self.kill() {
            guest_error!(%error, "cannot end a VM");
        }
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            if thread.join().is_err() {
                guest_error!("BUG: a vCPU thread has panicked");
            }
        }
    }
}
