//! Owns: a running machine as others hold it.

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

/// How a machine has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The guest asked for a reset: it rebooted, powered off or panicked; its console says which.
    Reset,
    /// A processor met a fault that nothing in the guest handles.
    TripleFault {
        /// Which processor, and its registers where KVM has kept them.
        what: String,
    },
    /// KVM or a thread of ours could not go on.
    Failed {
        /// Which processor, and all that is known.
        what: String,
    },
    /// We ended it.
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

/// A machine that runs, stands still or has ended. Dropping it kills it and leaves nothing behind: no thread, no
/// descriptor, no memory.
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
    /// What it was made from.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Its memory. Whoever keeps this must drop it before the machine, otherwise it stays mapped for ever.
    pub fn memory(&self) -> &Arc<Memory> {
        self.memory.memory()
    }

    /// Its devices, in the order in which they were attached.
    pub fn transports(&self) -> &[Arc<Transport>] {
        &self.transports
    }

    /// Stops all processors, then all queues. On return nothing of the guest runs. May be repeated.
    pub fn pause(&self) -> Result<(), Error> {
        self.control.pause()?;
        self.transports.iter().for_each(|transport| transport.pause());
        Ok(())
    }

    /// Lets queues and processors run again. May be repeated.
    pub fn resume(&self) -> Result<(), Error> {
        for transport in &self.transports {
            transport.resume().map_err(|source| Error::Resume { device: transport.kind(), source })?;
        }
        if self.control.is_paused() {
            self.tell_pause();
        }
        self.control.resume()
    }

    /// Tells each processor's guest that it stood still, lest its watchdogs bark. One without a paravirtual clock
    /// cannot be told.
    fn tell_pause(&self) {
        for vcpu in &self.vcpus {
            if let Err(error) = vcpu.lock().unwrap_or_else(PoisonError::into_inner).kvmclock_ctrl() {
                tracing::debug!(%error, "a guest is not told that it stood still");
            }
        }
    }

    /// How it has ended, if it has: no processor runs any more then.
    pub fn exit(&self) -> Option<Exit> {
        self.control.exit()
    }

    /// Waits until it has ended; `None` after `timeout`. Once it has ended, always the same answer.
    pub fn wait(&self, timeout: Duration) -> Option<Exit> {
        self.control.wait(timeout)
    }

    /// Ends it; one that has ended already stays as it ended. On return no processor runs any more.
    pub fn kill(&self) -> Result<Exit, Error> {
        self.control.end(Exit::Killed);
        let stuck = Error::Stuck { seconds: 60 };
        if !self.control.reap() {
            return Err(stuck);
        }
        self.control.exit().ok_or(stuck)
    }

    /// All that the machine is beside its memory, while it is paused. It stays so.
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
