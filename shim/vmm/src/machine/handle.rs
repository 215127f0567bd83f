//! Defines the handle of a VM, which pauses, resumes, saves and ends it.

use super::legacy::SerialPort;
use super::memory::GuestMemory;
use super::state::{self, MachineState};
use super::vcpu::Control;
use super::{Config, Error};
use crate::Memory;
use crate::mmio::Transport;
use kvm_ioctls::{VcpuFd, VmFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// The reason for which a VM ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exit {
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
    /// [`Machine::kill`] ended the VM.
    Killed,
}

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Exit::Reset => f.write_str("the guest asked for a reset"),
            Exit::TripleFault { what } => write!(f, "a triple fault on {what}"),
            Exit::Failed { what } => f.write_str(what),
            Exit::Killed => f.write_str("killed"),
        }
    }
}

/// A VM that runs, is paused or has ended. Dropping it kills the VM and releases everything: threads, descriptors and memory.
pub struct Machine {
    pub(super) config: Config,
    pub(super) control: Arc<Control>,
    pub(super) threads: Mutex<Vec<JoinHandle<()>>>,
    pub(super) vcpus: Vec<Arc<Mutex<VcpuFd>>>,
    pub(super) transports: Vec<Arc<Transport>>,
    pub(super) serial: Option<Arc<SerialPort>>,
    pub(super) vm: Arc<VmFd>,
    /// Dropped last.
    pub(super) memory: GuestMemory,
}

impl Machine {
    /// Returns the configuration that the VM was created from.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the VM's memory. A caller that keeps the reference must drop it before this [`Machine`]; otherwise the memory is
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
            self.tell_pause();
        }
        self.control.resume()
    }

    /// Notifies the guest on each vCPU that it was paused, so that its watchdogs do not fire. Impossible for a vCPU without a
    /// paravirtual clock.
    fn tell_pause(&self) {
        for vcpu in &self.vcpus {
            if let Err(error) = vcpu.lock().unwrap_or_else(PoisonError::into_inner).kvmclock_ctrl() {
                tracing::debug!(%error, "a guest is not told that it stood still");
            }
        }
    }

    /// Returns how the VM ended, or `None` while a vCPU still runs.
    pub fn exit(&self) -> Option<Exit> {
        self.control.exit()
    }

    /// Waits until the VM has ended. Returns `None` after `timeout`. After the end it always returns the same value.
    pub fn wait(&self, timeout: Duration) -> Option<Exit> {
        self.control.wait(timeout)
    }

    /// Ends the VM. If it has ended already, its exit reason does not change. On return no vCPU runs.
    pub fn kill(&self) -> Result<Exit, Error> {
        self.control.end(Exit::Killed);
        let stuck = Error::Stuck { seconds: 60 };
        if !self.control.reap() {
            return Err(stuck);
        }
        self.control.exit().ok_or(stuck)
    }

    /// Returns the whole state of a paused VM except its memory. The VM stays paused.
    pub fn save(&self) -> Result<MachineState, Error> {
        if !self.control.is_paused() {
            return Err(Error::NotPaused);
        }
        state::save(&self.vm, &self.vcpus, &self.transports, self.serial.as_deref())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if let Err(error) = self.kill() {
            tracing::error!(%error, "a machine cannot be ended");
        }
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("a processor's thread has panicked");
            }
        }
    }
}
