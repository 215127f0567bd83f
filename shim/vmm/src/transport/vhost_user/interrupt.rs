//! Delivers notifications to the front end: by the call descriptors of the queues and by the backend channel. The devices'
//! threads use it, and the server's thread changes it; each lock is held for at most one non-blocking write.

use super::wire;
use crate::virtio::Interrupt;
use nacelle_base::retry::retry_interrupted;
use nacelle_base::{guest_error, guest_warn};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{MsgFlags, send};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

#[derive(Debug)]
pub(super) struct VhostUserInterrupt {
    call_eventfds: Vec<Mutex<Option<OwnedFd>>>,
    /// For each queue, whether a copy of the call descriptor has been requested.
    was_copied: Vec<AtomicBool>,
    backend_channel: Mutex<Option<OwnedFd>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl VhostUserInterrupt {
    pub(super) fn new(queues: usize) -> VhostUserInterrupt {
        VhostUserInterrupt {
            call_eventfds: (0..queues).map(|_| Mutex::new(None)).collect(),
            was_copied: (0..queues).map(|_| AtomicBool::new(false)).collect(),
            backend_channel: Mutex::new(None),
        }
    }

    /// Returns whether a copy of queue `index`'s call descriptor has been requested. If so, the queue must be restarted when
    /// the descriptor changes, so that the holder of the copy receives the new one.
    pub(super) fn is_call_copied(&self, index: u16) -> bool {
        self.was_copied.get(usize::from(index)).is_some_and(|copied| copied.load(Ordering::Acquire))
    }

    /// Sets the call descriptor of queue `index` and signals it once, so that no earlier notification is lost.
    pub(super) fn set_call(&self, index: u16, call: Option<OwnedFd>) -> io::Result<()> {
        if let Some(call) = &call {
            let flags = OFlag::from_bits_retain(fcntl(call, FcntlArg::F_GETFL)?);
            fcntl(call, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        }
        if let Some(slot) = self.call_eventfds.get(usize::from(index)) {
            *lock(slot) = call;
        }
        self.notify_queue(index);
        Ok(())
    }

    pub(super) fn set_channel(&self, backend_channel: OwnedFd) {
        *lock(&self.backend_channel) = Some(backend_channel);
    }
}

impl Interrupt for VhostUserInterrupt {
    fn notify_queue(&self, index: u16) {
        let Some(slot) = self.call_eventfds.get(usize::from(index)) else { return };
        if let Some(call) = lock(slot).as_ref() {
            match retry_interrupted(|| nix::unistd::write(call, &1u64.to_ne_bytes())) {
                Ok(_) | Err(Errno::EAGAIN) => {} // EAGAIN: a call is pending already
                Err(error) => guest_warn!(queue = index, "cannot notify a vhost-user front end: {error}"),
            }
        }
    }

    fn interrupt_eventfd(&self, index: u16) -> Option<OwnedFd> {
        self.was_copied.get(usize::from(index))?.store(true, Ordering::Release);
        let copy = lock(self.call_eventfds.get(usize::from(index))?).as_ref()?.try_clone();
        copy.inspect_err(|error| guest_error!("cannot duplicate the call descriptor of a queue: {error}")).ok()
    }

    fn notify_config(&self) {
        let backend_channel = lock(&self.backend_channel);
        let Some(backend_channel) = backend_channel.as_ref() else { return };
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        if let Err(error) = retry_interrupted(|| send(backend_channel.as_raw_fd(), &wire::config_change(), flags)) {
            guest_warn!("cannot notify a vhost-user front end of a configuration change: {error}");
        }
    }
}
