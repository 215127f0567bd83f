//! Runs the zygote, which forks a child for each request, and the child, which reads the request and serves it.
//!
//! Each of these processes has one thread, always.

use nacelle_base::Chain;
use nacelle_base::retry::Timed;
use nix::sys::socket::MsgFlags;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::error::ZygoteError;
use super::message::{Refusal, ZygoteReply, ZygoteRequest};
use super::wire::{hand_over_process, receive_with_descriptors, send_reply};
use super::{create, exec, pause};
use crate::{frame, sys};

/// The time in which the zygote reads a request that it must refuse. It does nothing else meanwhile.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(1);

/// Serves until the agent has ended.
pub(super) fn run(control: OwnedFd) -> ! {
    // The programs of containers inherit these dispositions and limits.
    let set = sys::set_signal(libc::SIGPIPE, false)
        .and_then(|()| sys::set_signal(libc::SIGCHLD, true))
        .and_then(|()| sys::limit_files(1024, 1 << 19));
    if let Err(error) = set {
        tracing::error!(%error, "the zygote cannot set up its signals");
    }
    // Forks inherit the flag: until they run a program, no process of a container may inspect them.
    if let Err(error) = nix::sys::prctl::set_dumpable(false) {
        tracing::error!(%error, "the zygote cannot make itself undumpable");
        std::process::exit(1);
    }
    loop {
        // Nothing is received when the agent has ended.
        let fds = match receive_with_descriptors(&control, MsgFlags::empty()) {
            Ok((bytes, fds)) if !bytes.is_empty() => fds,
            _ => std::process::exit(0),
        };
        match sys::fork() {
            Ok(None) => {
                // A process that enters a container must not have this socket.
                drop(control);
                let code = if serve_request(fds).is_ok() { 0 } else { 1 };
                std::process::exit(code);
            }
            Ok(Some(_)) => {}
            Err(error) => refusal_for(fds, &error),
        }
    }
}

/// Refuses a request because no child could be forked for it.
pub(super) fn refusal_for(fds: Vec<OwnedFd>, error: &io::Error) {
    let refusal = Refusal::fork_failed("fork a child of the zygote", error);
    tracing::error!("{refusal}");
    let Some(peer) = fds.into_iter().next() else { return };
    let mut peer = UnixStream::from(peer);
    // The agent has begun to write. If its request stayed unread, its write would fail before it could read the refusal.
    if let Err(error) = frame::read_bytes(&mut Timed::new(&peer, REFUSAL_TIMEOUT), frame::MAX_ZYGOTE) {
        tracing::warn!(error = %Chain(&error), "cannot read a request that is refused");
    }
    if let Err(error) = send_reply(&mut peer, &ZygoteReply::Refused(refusal), &[]) {
        tracing::warn!(error = %Chain(&error), "cannot send a refusal to the agent");
    }
}

fn serve_request(fds: Vec<OwnedFd>) -> Result<(), ZygoteError> {
    let connection_failed = |source| ZygoteError::Talk { source };
    // libcontainer and exec wait for their own children.
    sys::set_signal(libc::SIGCHLD, false).map_err(connection_failed)?;
    let mut fds = fds.into_iter();
    let Some(peer) = fds.next() else { return Ok(()) };
    let mut peer = UnixStream::from(peer);
    let request = serde_json::from_slice(&frame::read_bytes(&mut peer, frame::MAX_ZYGOTE)?)?;
    let made = match request {
        ZygoteRequest::Create(request) => create::create_container(&request, fds.collect()),
        ZygoteRequest::Exec(request) => exec::start_exec(&request, fds.collect()),
        ZygoteRequest::Pause { user_namespace } => pause::start_holder(user_namespace),
    };
    match made {
        Ok(made) => hand_over_process(&mut peer, &made),
        Err(refusal) => send_reply(&mut peer, &ZygoteReply::Refused(refusal), &[]),
    }
}
