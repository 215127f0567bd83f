//! Does the handshake with the host: hello, configuration, report. The connection is vsock in a VM, and on the node a socket that the
//! pod process made.
//!
//! A host that ends before it has sent the configuration is one under which the VM was saved and not restored: the hello is
//! repeated to the new host.

use nacelle_base::retry::retry_interrupted;
use nacelle_proto::agent::{AgentHello, BootConfig};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, VsockAddr, connect, setsockopt, socket, sockopt};
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use super::error::BootError;
use super::ports::HANDSHAKE_PORT;
use crate::frame::{self, AgentFrameError};

/// The time in which the host must send the configuration. CNI plugins run meanwhile.
const CONFIGURATION_TIMEOUT: Duration = Duration::from_secs(600);
/// The time in which the host must listen.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);

/// Returns the time since the kernel started its clock, in nanoseconds; 0 if the clock cannot be read.
pub(super) fn monotonic_nanos() -> u64 {
    let time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).map(Duration::from);
    time.map_or(0, |time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

/// Connects to the host and sends the hello. A host that ends before it has accepted the hello is tried again.
pub(super) fn connect_and_greet(started_nanos: u64) -> Result<File, BootError> {
    let deadline = Instant::now() + CONNECT_TIMEOUT;
    loop {
        let mut host = File::from(connect_to_host(deadline)?);
        match send_hello(&mut host, started_nanos) {
            Ok(()) => return Ok(host),
            Err(error) if error.is_hung_up() && Instant::now() < deadline => continue,
            Err(source) => return Err(BootError::Handshake { source }),
        }
    }
}

/// Returns the version of the agent and the release of the kernel.
pub fn versions() -> (String, String) {
    let release = nix::sys::utsname::uname().map(|name| name.release().to_string_lossy().into_owned());
    (env!("CARGO_PKG_VERSION").to_owned(), release.unwrap_or_default())
}

pub(super) fn send_hello(host: &mut File, started_nanos: u64) -> Result<(), AgentFrameError> {
    let (agent_version, kernel_release) = versions();
    let hello = AgentHello { protocol: 1, agent_version, kernel_release, started_nanos, sent_nanos: monotonic_nanos() };
    frame::write(host, &hello)
}

/// Receives the configuration. If the connection ends before, connects again and repeats the hello.
pub(super) fn receive_configuration(mut host: File, started_nanos: u64) -> Result<(File, BootConfig), BootError> {
    loop {
        match frame::read(&mut host) {
            Ok(config) => return Ok((host, config)),
            Err(error) if error.is_hung_up() => {
                tracing::info!("the host has closed the connection: connecting to a new one");
                host = connect_and_greet(started_nanos)?;
            }
            Err(source) => return Err(BootError::Handshake { source }),
        }
    }
}

pub(super) fn open_vsock() -> nix::Result<OwnedFd> {
    socket(AddressFamily::Vsock, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)
}

fn connect_to_host(deadline: Instant) -> Result<OwnedFd, BootError> {
    loop {
        let connected = open_vsock().and_then(|fd| {
            setsockopt(
                &fd,
                sockopt::ReceiveTimeout,
                &nix::sys::time::TimeVal::new(CONFIGURATION_TIMEOUT.as_secs().cast_signed(), 0),
            )?;
            let host = VsockAddr::new(libc::VMADDR_CID_HOST, HANDSHAKE_PORT);
            retry_interrupted(|| connect(fd.as_raw_fd(), &host))?;
            Ok(fd)
        });
        match connected {
            Ok(fd) => return Ok(fd),
            Err(source) if Instant::now() >= deadline => return Err(BootError::Connect { source }),
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}
