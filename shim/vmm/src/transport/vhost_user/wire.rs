//! Reads, parses and writes the messages of the vhost-user protocol. It trusts no byte of a message.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use nacelle_base::descriptors::{MAX_DESCRIPTORS, try_receive_with_descriptors};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

const HEADER: usize = 12;
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
pub(crate) enum WireError {
    #[error("the connection failed")]
    Io(#[from] io::Error),
    #[error("the connection ended within a message")]
    Cut,
    #[error("a message with the flags {flags:#x} and {size} bytes")]
    Header { flags: u32, size: u32 },
    #[error("too many descriptors came with a message")]
    Descriptors,
    #[error("message {request} is not known")]
    Unknown { request: u32 },
    #[error("message {request} with {bytes} bytes and {fds} descriptors")]
    Body { request: u32, bytes: usize, fds: usize },
    #[error("queue {index} does not exist")]
    NoQueue { index: u32 },
    #[error("a queue cannot be set to {what} {value:#x}")]
    BadValue { what: &'static str, value: u64 },
    #[error("memory at {address:#x} ({length} bytes) cannot be used: {why}")]
    Memory { address: u64, length: u64, why: &'static str },
    #[error("memory at {address:#x} ({length} bytes) cannot be mapped")]
    Map { address: u64, length: u64, source: vm_memory::mmap::MmapRegionError },
    #[error("the memory regions do not fit together")]
    Regions(#[from] vm_memory::GuestRegionCollectionError),
    #[error("queue {index} is not in memory: {source}")]
    Queue { index: u16, source: virtio_queue::Error },
    #[error("a queue was not started")]
    Start(#[from] crate::StartError),
}

/// The header of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub request: u32,
    pub flags: u32,
}

/// A received message, not yet parsed.
#[derive(Debug)]
pub(crate) struct Message {
    pub header: Header,
    pub body: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

/// A region of guest memory that the front end shares.
#[derive(Debug)]
pub(crate) struct Region {
    pub guest: u64,
    pub length: u64,
    pub user: u64,
    pub offset: u64,
    pub fd: OwnedFd,
}

/// The addresses of the parts of a queue, in the front end's address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Addresses {
    pub descriptors: u64,
    pub used: u64,
    pub available: u64,
}

/// A parsed request of the front end.
#[derive(Debug)]
pub(crate) enum Ask {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    Reset,
    SetMemory(Vec<Region>),
    SetSize { index: u32, size: u32 },
    SetAddresses { index: u32, addresses: Addresses },
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
pub(crate) enum Answer {
    Done,
    Number(u64),
    Base { index: u32, base: u32 },
    Config { offset: u32, data: Vec<u8> },
}

/// Reads one message. `ready` waits for bytes and returns whether to continue. Returns `None` at the end of the stream.
pub(crate) fn receive(stream: &UnixStream, ready: impl Fn() -> bool) -> Result<Option<Message>, WireError> {
    let mut head = [0; HEADER];
    let mut fds = Vec::new();
    match fill(stream, &mut head, &mut fds, &ready)? {
        Filled::Whole => {}
        Filled::Nothing => return Ok(None),
        Filled::Part => return Err(WireError::Cut),
    }
    let mut numbers = Fields(&head);
    let (request, flags, size) = (numbers.u32(), numbers.u32(), numbers.u32());
    let (Some(request), Some(flags), Some(size)) = (request, flags, size) else { return Err(WireError::Cut) };
    let length = usize::try_from(size).ok().filter(|length| *length <= MAX_BODY);
    let (Some(length), VERSION, 0) = (length, flags & VERSION_MASK, flags & REPLY) else {
        return Err(WireError::Header { flags, size });
    };
    let mut body = vec![0; length];
    if length > 0 && fill(stream, &mut body, &mut fds, &ready)? != Filled::Whole {
        return Err(WireError::Cut);
    }
    Ok(Some(Message { header: Header { request, flags }, body, fds }))
}

#[derive(PartialEq, Eq)]
enum Filled {
    Whole,
    Part,
    Nothing,
}

fn fill(
    stream: &UnixStream,
    bytes: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    ready: impl Fn() -> bool,
) -> Result<Filled, WireError> {
    let mut done = 0;
    while done < bytes.len() {
        if !ready() {
            return Ok(Filled::Nothing);
        }
        let rest = bytes.get_mut(done..).unwrap_or_default();
        match receive_some(stream, rest, fds) {
            Ok(0) if done == 0 => return Ok(Filled::Nothing),
            Ok(0) => return Ok(Filled::Part),
            Ok(count) => done += count,
            Err(WireError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(Filled::Whole)
}

fn receive_some(stream: &UnixStream, bytes: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<usize, WireError> {
    let (count, received) = try_receive_with_descriptors(stream, bytes).map_err(|error| match error.kind() {
        io::ErrorKind::InvalidData => WireError::Descriptors,
        _ => WireError::Io(error),
    })?;
    fds.extend(received);
    if fds.len() > MAX_DESCRIPTORS {
        return Err(WireError::Descriptors);
    }
    Ok(count)
}

/// Reads numbers from the front of a byte slice.
struct Fields<'b>(&'b [u8]);

impl Fields<'_> {
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
pub(crate) fn parse(message: Message) -> Result<Ask, WireError> {
    let Message { header: Header { request, .. }, body, fds } = message;
    let wrong = WireError::Body { request, bytes: body.len(), fds: fds.len() };
    let takes_fds = matches!(request, 5 | 12 | 13 | 14 | 21);
    if !takes_fds && !fds.is_empty() {
        return Err(wrong);
    }
    let mut fields = Fields(&body);
    let ask = match request {
        1 => Some(Ask::GetFeatures),
        2 => fields.u64().map(Ask::SetFeatures),
        3 => Some(Ask::SetOwner),
        4 | 34 => Some(Ask::Reset),
        5 => return regions(&body, fds).ok_or(wrong).map(Ask::SetMemory),
        8 => fields.u32().zip(fields.u32()).map(|(index, size)| Ask::SetSize { index, size }),
        9 => addresses(&mut fields),
        10 => fields.u32().zip(fields.u32()).map(|(index, base)| Ask::SetBase { index, base }),
        11 => fields.u32().zip(fields.u32()).map(|(index, _)| Ask::GetBase { index }),
        12 => queue_fd(&mut fields, fds).map(|(index, fd)| Ask::SetKick { index, fd }),
        13 => queue_fd(&mut fields, fds).map(|(index, fd)| Ask::SetCall { index, fd }),
        14 => queue_fd(&mut fields, fds).map(|_| Ask::SetError),
        15 => Some(Ask::GetProtocolFeatures),
        16 => fields.u64().map(Ask::SetProtocolFeatures),
        17 => Some(Ask::GetQueueCount),
        18 => fields.u32().zip(fields.u32()).and_then(|(index, enabled)| match enabled {
            0 | 1 => Some(Ask::SetEnabled { index, enabled: enabled == 1 }),
            _ => None,
        }),
        21 => one(fds).map(Ask::SetBackendChannel),
        24 | 25 => return config(&body).map(|ask| ask(request == 25)).ok_or(wrong),
        _ => return Err(WireError::Unknown { request }),
    };
    ask.filter(|_| fields.0.is_empty()).ok_or(wrong)
}

fn one(fds: Vec<OwnedFd>) -> Option<OwnedFd> {
    let [fd] = <[OwnedFd; 1]>::try_from(fds).ok()?;
    Some(fd)
}

fn queue_fd(fields: &mut Fields<'_>, fds: Vec<OwnedFd>) -> Option<(u32, Option<OwnedFd>)> {
    let value = fields.u64()?;
    let index = u32::try_from(value & (NO_FD - 1)).ok()?;
    match value & !(NO_FD - 1) {
        0 => one(fds).map(|fd| (index, Some(fd))),
        NO_FD if fds.is_empty() => Some((index, None)),
        _ => None,
    }
}

fn addresses(fields: &mut Fields<'_>) -> Option<Ask> {
    let (index, _flags) = (fields.u32()?, fields.u32()?);
    let (descriptors, used, available, _log) = (fields.u64()?, fields.u64()?, fields.u64()?, fields.u64()?);
    Some(Ask::SetAddresses { index, addresses: Addresses { descriptors, used, available } })
}

fn regions(body: &[u8], fds: Vec<OwnedFd>) -> Option<Vec<Region>> {
    let mut fields = Fields(body);
    let (count, _padding) = (fields.u32()?, fields.u32()?);
    if fds.is_empty() || usize::try_from(count).ok()? != fds.len() {
        return None;
    }
    let mut found = Vec::with_capacity(fds.len());
    for fd in fds {
        let (guest, length, user, offset) = (fields.u64()?, fields.u64()?, fields.u64()?, fields.u64()?);
        found.push(Region { guest, length, user, offset, fd });
    }
    fields.0.is_empty().then_some(found)
}

/// Parses the body of the two messages about the configuration space, which have the same form. The returned function takes
/// whether the message is SET_CONFIG.
fn config(body: &[u8]) -> Option<impl FnOnce(bool) -> Ask> {
    let mut fields = Fields(body);
    let (offset, size, _flags) = (fields.u32()?, fields.u32()?, fields.u32()?);
    let data = fields.0.to_vec();
    if usize::try_from(size).ok()? != data.len() || data.len() > MAX_CONFIG {
        return None;
    }
    Some(move |set| if set { Ask::SetConfig { offset, data } } else { Ask::GetConfig { offset, size } })
}

/// Sends the reply to a message. A message without one is acknowledged if that is negotiated and requested.
pub(crate) fn reply(
    mut stream: &UnixStream,
    header: Header,
    answer: Answer,
    acknowledges: bool,
) -> Result<(), WireError> {
    let body = match answer {
        Answer::Done if acknowledges && header.flags & NEED_REPLY != 0 => 0u64.to_ne_bytes().to_vec(),
        Answer::Done => return Ok(()),
        Answer::Number(number) => number.to_ne_bytes().to_vec(),
        Answer::Base { index, base } => [index.to_ne_bytes(), base.to_ne_bytes()].concat(),
        Answer::Config { offset, data } => {
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
