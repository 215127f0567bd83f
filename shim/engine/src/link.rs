//! Owns: the guest link over our vsock device, and its end with the machine.
//! Threads: any; the device has its own.

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nacelle_vmm::vsock::{Listener, Vsock};

use crate::LinkError;
use crate::machine::{BOOT_PORT, GuestLink, Incoming};

/// How often somebody who waits for the guest looks whether the machine is still there. The device itself does not
/// know: to it, a driver has gone and another one may come.
const LOOK: Duration = Duration::from_millis(250);

/// The link of one machine.
pub(crate) struct Link {
    vsock: Vsock,
    /// The boot port, until somebody listens there.
    boot: Mutex<Option<Listener>>,
    ended: Arc<AtomicBool>,
}

impl Link {
    /// Made before the guest runs, so that it finds the boot port open however soon it calls.
    pub fn new(vsock: Vsock) -> Result<Link, LinkError> {
        let boot = Mutex::new(Some(vsock.listen(BOOT_PORT)?));
        Ok(Link { vsock, boot, ended: Arc::default() })
    }

    fn take_boot(&self) -> Option<Listener> {
        self.boot.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// The machine has ended: whoever waits is told so.
    pub fn end(&self) {
        self.ended.store(true, Ordering::SeqCst);
        // Requests that came between the front end's end and this line would wait for a guest that never comes. An
        // error means that the device has gone, and they with it.
        let _ = self.vsock.reset_transport();
    }

    fn living(&self) -> Result<(), LinkError> {
        if self.ended.load(Ordering::SeqCst) { Err(LinkError::Stopped) } else { Ok(()) }
    }
}

impl GuestLink for Link {
    fn connect(&self, port: u32, timeout: Duration) -> Result<UnixStream, LinkError> {
        self.living()?;
        let result = self.vsock.connect(port, timeout);
        if result.is_err() {
            self.living()?;
        }
        result
    }

    fn listen(&self, port: u32) -> Result<Box<dyn Incoming>, LinkError> {
        self.living()?;
        let early = if port == BOOT_PORT { self.take_boot() } else { None };
        let listener = match early {
            Some(listener) => listener,
            None => self.vsock.listen(port)?,
        };
        Ok(Box::new(Port { listener, ended: Arc::clone(&self.ended), port }))
    }
}

struct Port {
    listener: Listener,
    ended: Arc<AtomicBool>,
    port: u32,
}

impl Incoming for Port {
    fn accept(&self, timeout: Duration) -> Result<UnixStream, LinkError> {
        let until = Instant::now() + timeout.min(Duration::from_secs(86_400));
        loop {
            // In this order: what the guest sent before its end is still handed out.
            let ended = self.ended.load(Ordering::SeqCst);
            let left = until.saturating_duration_since(Instant::now());
            match self.listener.accept(if ended { Duration::ZERO } else { left.min(LOOK) }) {
                Err(LinkError::Timeout { .. }) if ended => return Err(LinkError::Stopped),
                Err(LinkError::Timeout { .. }) if left.is_zero() => {
                    return Err(LinkError::Timeout { port: self.port, limit: timeout });
                }
                Err(LinkError::Timeout { .. }) => {}
                other => return other,
            }
        }
    }
}
