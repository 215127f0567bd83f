//! Provides the fuzz harness of the vhost-user messages: a session with a device that does nothing.

use super::session::VhostUserSession;
use super::wire::{MessageHeader, RawMessage, parse};
use crate::virtio::{COMMON_FEATURES, Device, DeviceKind, DeviceState, Ring, StartError, StateError, read_config};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::fs::File;
use std::os::fd::OwnedFd;
use virtio_queue::QueueState;

/// The maximum number of messages in one conversation.
const MAX_MESSAGES: usize = 64;

/// Creates a memfd that cannot shrink, as a front end shares it.
pub(crate) fn memfd(bytes: u64) -> File {
    let flags = MFdFlags::MFD_ALLOW_SEALING | MFdFlags::MFD_CLOEXEC;
    let file = File::from(memfd_create(c"fuzz", flags).expect("a memfd"));
    file.set_len(bytes).expect("memory");
    fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK)).expect("a seal");
    file
}

#[derive(Default)]
struct IdleDevice {
    rings: [Option<Ring>; 2],
}

impl Device for IdleDevice {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Rng
    }

    fn features(&self) -> u64 {
        COMMON_FEATURES
    }

    fn queue_sizes(&self) -> &[u16] {
        &[16, 16]
    }

    fn read_config(&self, offset: u32, data: &mut [u8]) {
        read_config(&[1, 2, 3, 4], offset, data);
    }

    fn start(&mut self, ring: Ring) -> Result<(), StartError> {
        let slot = &mut self.rings[usize::from(ring.index())];
        assert!(slot.is_none(), "a queue is started twice");
        *slot = Some(ring);
        Ok(())
    }

    fn stop(&mut self, index: u16) -> Option<QueueState> {
        self.rings[usize::from(index)].take().map(Ring::into_state)
    }

    fn reset(&mut self) {
        self.rings = [None, None];
    }

    fn save(&self) -> DeviceState {
        DeviceState::Rng
    }

    fn restore(&mut self, _state: DeviceState) -> Result<(), StateError> {
        Ok(())
    }
}

/// Runs a conversation made of these bytes until its end or the first error.
pub(crate) fn run_messages(data: &[u8]) {
    let mut device = IdleDevice::default();
    let mut session = VhostUserSession::new(&mut device);
    let mut rest = data;
    for _ in 0..MAX_MESSAGES {
        let Some(([request, fds, length], after)) = rest.split_first_chunk() else { return };
        let (body, after) = after.split_at(after.len().min(usize::from(*length)));
        rest = after;
        let fds = (0..fds % 3).map(|_| OwnedFd::from(memfd(1 << 16))).collect();
        let header = MessageHeader { request: (*request).into(), flags: 1 };
        let handled =
            parse(RawMessage { header, body: body.to_vec(), fds }).and_then(|request| session.handle(request));
        if handled.is_err() {
            return;
        }
    }
}
