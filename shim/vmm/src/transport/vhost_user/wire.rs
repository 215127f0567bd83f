//! Reads, parses and writes the messages of the vhost-user protocol. It trusts no byte of a message.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use nacelle_base::descriptors::{MAX_DESCRIPTORS, try_receive_with_descriptors};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

const HEADER_BYTES: usize = 12;
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

/// The maximum length of a body in bytes.
const MAX_BODY: usize = 4096;
/// The maximum size of a configuration space in bytes.
const MAX_CONFIG: usize = 256;
/// The flag in a queue's number that marks a message without a descriptor.
const NO_FD: u64 = 1 << 8;

/// The connection to a front end must be closed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VhostUserProtocolError {
    #[error("the connection failed")]
    Io(#[from] io::Error),
    #[error("the connection ended within a message")]
    Cut,
    #[error("invalid message header: flags {flags:#x}, {size} bytes")]
    Header { flags: u32, size: u32 },
    #[error("too many descriptors came with a message")]
    Descriptors,
    #[error("unknown message {request}")]
    Unknown { request: u32 },
    #[error("invalid message {request}: {bytes} bytes and {fds} descriptors")]
    Body { request: u32, bytes: usize, fds: usize },
    #[error("queue {index} does not exist")]
    NoQueue { index: u32 },
    #[error("invalid {what} of a queue: {value:#x}")]
    BadValue { what: &'static str, value: u64 },
    #[error("cannot use memory at {address:#x} ({length} bytes): {why}")]
    Memory { address: u64, length: u64, why: &'static str },
    #[error("cannot map memory at {address:#x} ({length} bytes)")]
    Map { address: u64, length: u64, source: vm_memory::mmap::MmapRegionError },
    #[error("the memory regions overlap")]
    Regions(#[from] vm_memory::GuestRegionCollectionError),
    #[error("queue {index} is not in guest memory: {source}")]
    Queue { index: u16, source: virtio_queue::Error },
    #[error("cannot start a queue")]
    Start(#[from] crate::StartError),
}

/// The header of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MessageHeader {
    pub request: u32,
    pub flags: u32,
}

/// A received message, not yet parsed.
#[derive(Debug)]
pub(crate) struct RawMessage {
    pub header: MessageHeader,
    pub body: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

/// A region of guest memory that the front end shares.
#[derive(Debug)]
pub(crate) struct FrontEndRegion {
    pub guest: u64,
    pub length: u64,
    pub user: u64,
    pub offset: u64,
    pub fd: OwnedFd,
}

/// The addresses of the parts of a queue, in the front end's address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueAddresses {
    pub descriptors: u64,
    pub used: u64,
    pub available: u64,
}

/// A parsed request of the front end.
#[derive(Debug)]
pub(crate) enum VhostUserRequest {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    Reset,
    SetMemory(Vec<FrontEndRegion>),
    SetSize { index: u32, size: u32 },
    SetAddresses { index: u32, addresses: QueueAddresses },
    SetBase { index: u32, base: u32 },
    GetBase { index: u32 },
    SetKick { index: u32, fd: Option<OwnedFd> },
    SetCall { index: u32, fd: Option<OwnedFd> },
    SetError,
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueCount,
    SetEnabled { index: u32, enabled: bool },
    SetBackendChannel(OwnedFd),
    GetConfig { offset: u32, size: u32 },
    SetConfig { offset: u32, data: Vec<u8> },
}

/// The reply to a message, if the protocol defines one.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum VhostUserReply {
    Acknowledged,
    Number(u64),
    Base { index: u32, base: u32 },
    Config { offset: u32, data: Vec<u8> },
}

/// Reads one message. `ready` waits for bytes and returns whether to continue. Returns `None` at the end of the stream.
pub(crate) fn receive(
    stream: &UnixStream,
    ready: impl Fn() -> bool,
) -> Result<Option<RawMessage>, VhostUserProtocolError> {
    let mut head = [0; HEADER_BYTES];
    let mut fds = Vec::new();
    match fill(stream, &mut head, &mut fds, &ready)? {
        FillResult::Complete => {}
        FillResult::Empty => return Ok(None),
        FillResult::Partial => return Err(VhostUserProtocolError::Cut),
    }
    let mut numbers = FieldReader(&head);
    let (request, flags, size) = (numbers.u32(), numbers.u32(), numbers.u32());
    let (Some(request), Some(flags), Some(size)) = (request, flags, size) else {
        return Err(VhostUserProtocolError::Cut);
    };
    let length = usize::try_from(size).ok().filter(|length| *length <= MAX_BODY);
    let (Some(length), VERSION, 0) = (length, flags & VERSION_MASK, flags & REPLY) else {
        return Err(VhostUserProtocolError::Header { flags, size });
    };
    let mut body = vec![0; length];
    if length > 0 && fill(stream, &mut body, &mut fds, &ready)? != FillResult::Complete {
        return Err(VhostUserProtocolError::Cut);
    }
    Ok(Some(RawMessage { header: MessageHeader { request, flags }, body, fds }))
}

#[derive(PartialEq, Eq)]
enum FillResult {
    Complete,
    Partial,
    Empty,
}

fn fill(
    stream: &UnixStream,
    bytes: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    ready: impl Fn() -> bool,
) -> Result<FillResult, VhostUserProtocolError> {
    let mut done = 0;
    while done < bytes.len() {
        if !ready() {
            return Ok(FillResult::Empty);
        }
        let rest = bytes.get_mut(done..).unwrap_or_default();
        match receive_bytes(stream, rest, fds) {
            Ok(0) if done == 0 => return Ok(FillResult::Empty),
            Ok(0) => return Ok(FillResult::Partial),
            Ok(count) => done += count,
            Err(VhostUserProtocolError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(FillResult::Complete)
}

fn receive_bytes(
    stream: &UnixStream,
    bytes: &mut [u8],
    fds: &mut Vec<OwnedFd>,
) -> Result<usize, VhostUserProtocolError> {
    let (count, received) = try_receive_with_descriptors(stream, bytes).map_err(|error| match error.kind() {
        io::ErrorKind::InvalidData => VhostUserProtocolError::Descriptors,
        _ => VhostUserProtocolError::Io(error),
    })?;
    fds.extend(received);
    if fds.len() > MAX_DESCRIPTORS {
        return Err(VhostUserProtocolError::Descriptors);
    }
    Ok(count)
}

/// Reads numbers from the front of a byte slice.
struct FieldReader<'b>(&'b [u8]);

impl FieldReader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (front, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*front)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_ne_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_ne_bytes)
    }
}

/// Parses a message. On success the form of every field has been checked.
pub(crate) fn parse(message: RawMessage) -> Result<VhostUserRequest, VhostUserProtocolError> {
    let RawMessage { header: MessageHeader { request, .. }, body, fds } = message;
    let body_error = VhostUserProtocolError::Body { request, bytes: body.len(), fds: fds.len() };
    let allows_fds = matches!(request, 5 | 12 | 13 | 14 | 21);
    if !allows_fds && !fds.is_empty() {
        return Err(body_error);
    }
    let mut fields = FieldReader(&body);
    let request = match request {
        1 => Some(VhostUserRequest::GetFeatures),
        2 => fields.u64().map(VhostUserRequest::SetFeatures),
        3 => Some(VhostUserRequest::SetOwner),
        4 | 34 => Some(VhostUserRequest::Reset),
        5 => return regions(&body, fds).ok_or(body_error).map(VhostUserRequest::SetMemory),
        8 => fields.u32().zip(fields.u32()).map(|(index, size)| VhostUserRequest::SetSize { index, size }),
        9 => addresses(&mut fields),
        10 => fields.u32().zip(fields.u32()).map(|(index, base)| VhostUserRequest::SetBase { index, base }),
        11 => fields.u32().zip(fields.u32()).map(|(index, _)| VhostUserRequest::GetBase { index }),
        12 => queue_fd(&mut fields, fds).map(|(index, fd)| VhostUserRequest::SetKick { index, fd }),
        13 => queue_fd(&mut fields, fds).map(|(index, fd)| VhostUserRequest::SetCall { index, fd }),
        14 => queue_fd(&mut fields, fds).map(|_| VhostUserRequest::SetError),
        15 => Some(VhostUserRequest::GetProtocolFeatures),
        16 => fields.u64().map(VhostUserRequest::SetProtocolFeatures),
        17 => Some(VhostUserRequest::GetQueueCount),
        18 => fields.u32().zip(fields.u32()).and_then(|(index, enabled)| match enabled {
            0 | 1 => Some(VhostUserRequest::SetEnabled { index, enabled: enabled == 1 }),
            _ => None,
        }),
        21 => single_descriptor(fds).map(VhostUserRequest::SetBackendChannel),
        24 | 25 => return config(&body).map(|build| build(request == 25)).ok_or(body_error),
        _ => return Err(VhostUserProtocolError::Unknown { request }),
    };
    request.filter(|_| fields.0.is_empty()).ok_or(body_error)
}

fn single_descriptor(fds: Vec<OwnedFd>) -> Option<OwnedFd> {
    let [fd] = <[OwnedFd; 1]>::try_from(fds).ok()?;
    Some(fd)
}

fn queue_fd(fields: &mut FieldReader<'_>, fds: Vec<OwnedFd>) -> Option<(u32, Option<OwnedFd>)> {
    let value = fields.u64()?;
    let index = u32::try_from(value & (NO_FD - 1)).ok()?;
    match value & !(NO_FD - 1) {
        0 => single_descriptor(fds).map(|fd| (index, Some(fd))),
        NO_FD if fds.is_empty() => Some((index, None)),
        _ => None,
    }
}

fn addresses(fields: &mut FieldReader<'_>) -> Option<VhostUserRequest> {
    let (index, _flags) = (fields.u32()?, fields.u32()?);
    let (descriptors, used, available, _log) = (fields.u64()?, fields.u64()?, fields.u64()?, fields.u64()?);
    Some(VhostUserRequest::SetAddresses { index, addresses: QueueAddresses { descriptors, used, available } })
}

fn regions(body: &[u8], fds: Vec<OwnedFd>) -> Option<Vec<FrontEndRegion>> {
    let mut fields = FieldReader(body);
    let (count, _padding) = (fields.u32()?, fields.u32()?);
    if fds.is_empty() || usize::try_from(count).ok()? != fds.len() {
        return None;
    }
    let mut found = Vec::with_capacity(fds.len());
    for fd in fds {
        let (guest, length, user, offset) = (fields.u64()?, fields.u64()?, fields.u64()?, fields.u64()?);
        found.push(FrontEndRegion { guest, length, user, offset, fd });
    }
    fields.0.is_empty().then_some(found)
}

/// Parses the body of the two messages about the configuration space, which have the same form. The returned function takes
/// whether the message is SET_CONFIG.
fn config(body: &[u8]) -> Option<impl FnOnce(bool) -> VhostUserRequest> {
    let mut fields = FieldReader(body);
    let (offset, size, _flags) = (fields.u32()?, fields.u32()?, fields.u32()?);
    let data = fields.0.to_vec();
    if usize::try_from(size).ok()? != data.len() || data.len() > MAX_CONFIG {
        return None;
    }
    Some(
        move |set| {
            if set {
                VhostUserRequest::SetConfig { offset, data }
            } else {
                VhostUserRequest::GetConfig { offset, size }
            }
        },
    )
}

/// Sends the reply to a message. A message without one is acknowledged if that is negotiated and requested.
pub(crate) fn send_reply(
    mut stream: &UnixStream,
    header: MessageHeader,
    reply: VhostUserReply,
    replies_on_request: bool,
) -> Result<(), VhostUserProtocolError> {
    let body = match reply {
        VhostUserReply::Acknowledged if replies_on_request && header.flags & NEED_REPLY != 0 => {
            0u64.to_ne_bytes().to_vec()
        }
        VhostUserReply::Acknowledged => return Ok(()),
        VhostUserReply::Number(number) => number.to_ne_bytes().to_vec(),
        VhostUserReply::Base { index, base } => [index.to_ne_bytes(), base.to_ne_bytes()].concat(),
        VhostUserReply::Config { offset, data } => {
            let size = u32::try_from(data.len()).unwrap_or(0); // at most MAX_CONFIG
            let mut body = [offset.to_ne_bytes(), size.to_ne_bytes(), [0; 4]].concat();
            body.extend(data);
            body
        }
    };
    let message = encode(header.request, VERSION | REPLY, &body);
    Ok(stream.write_all(&message)?)
}

/// Encodes a message.
pub(crate) fn encode(request: u32, flags: u32, body: &[u8]) -> Vec<u8> {
    let size = u32::try_from(body.len()).unwrap_or(u32::MAX);
    let mut message = [request.to_ne_bytes(), flags.to_ne_bytes(), size.to_ne_bytes()].concat();
    message.extend_from_slice(body);
    message
}

/// Encodes `VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`, without a request for a reply.
pub(crate) fn config_change() -> Vec<u8> {
    encode(2, VERSION, &[])
}
