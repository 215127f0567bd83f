//! Implements the guest link over Nacelle's vsock device, and fails its calls after the VM has ended. Any thread may call
//! it; the device has threads of its own.

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nacelle_vmm::vsock::{Vsock, VsockListener};

use crate::LinkError;
use crate::machine::{BOOT_PORT, GuestLink, LinkListener};

/// The interval at which a thread that waits for the guest checks whether the VM still runs. The device does not know: a
/// driver may disconnect and another one connect.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// The link of one VM.
pub(crate) struct VsockLink {
    vsock: Vsock,
    /// The boot port, until the host listens there.
    boot: Mutex<Option<VsockListener>>,
    ended: Arc<AtomicBool>,
}

impl VsockLink {
    /// Creates the link before the guest runs, so that the boot port is open however early the guest connects.
    pub fn new(vsock: Vsock) -> Result<VsockLink, LinkError> {
        let boot = Mutex::new(Some(vsock.listen(BOOT_PORT)?));
        Ok(VsockLink { vsock, boot, ended: Arc::default() })
    }

    fn take_boot_listener(&self) -> Option<VsockListener> {
        self.boot.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Marks the VM as ended; waiting calls fail with `Stopped`.
    pub fn mark_ended(&self) {
        self.ended.store(true, Ordering::SeqCst);
        // Requests that came between the end of the front end and this line would wait for a guest that never comes. An
        // error means that the device is gone, and the requests with it.
        let _ = self.vsock.reset_transport();
    }

    fn check_running(&self) -> Result<(), LinkError> {
        if self.ended.load(Ordering::SeqCst) { Err(LinkError::Stopped) } else { Ok(()) }
    }
}

impl GuestLink for VsockLink {
    fn connect(&self, port: u32, timeout: Duration) -> Result<UnixStream, LinkError> {
        self.check_running()?;
        let result = self.vsock.connect(port, timeout);
        if result.is_err() {
            self.check_running()?;
        }
        result
    }

    fn listen(&self, port: u32) -> Result<Box<dyn LinkListener>, LinkError> {
        self.check_running()?;
        let early = if port == BOOT_PORT { self.take_boot_listener() } else { None };
        let listener = match early {
            Some(listener) => listener,
            None => self.vsock.listen(port)?,
        };
        Ok(Box::new(PortListener { listener, ended: Arc::clone(&self.ended), port }))
    }
}

struct PortListener {
    listener: VsockListener,
    ended: Arc<AtomicBool>,
    port: u32,
}

impl LinkListener for PortListener {
    fn accept(&self, timeout: Duration) -> Result<UnixStream, LinkError> {
        let until = Instant::now() + timeout.min(Duration::from_secs(86_400));
        loop {
            // The flag is read before accept, so that connections that the guest made before its end are still returned.
            let ended = self.ended.load(Ordering::SeqCst);
            let left = until.saturating_duration_since(Instant::now());
            match self.listener.accept(if ended { Duration::ZERO } else { left.min(POLL_INTERVAL) }) {
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
