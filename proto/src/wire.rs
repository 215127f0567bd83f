//! Bounds what a message takes before it is decoded. Every RPC of this crate uses [`Codec`], which `build.rs` names to the code
//! generator, and framed messages go through [`decode`]; `cargo xtask rules` forbids any other decoder.
//!
//! A message is scanned once over its bytes, without an allocation, and the memory that its decoded form will take is added up:
//! an empty element of a list has two bytes on the wire and can have some hundred in memory.

use prost::Message;
use std::marker::PhantomData;
use tonic::Status;
use tonic::codec::{DecodeBuf, EncodeBuf};

/// The longest message between the daemon, a pod process and its agent, in bytes.
pub const MESSAGE: usize = 1 << 20;
/// The longest answer to ExecSync, which has both streams of a command, and the longest request for a container, which has the
/// user data of a machine.
pub const LARGE: usize = 40 << 20;
/// The longest request for a command.
const COMMAND: usize = 4 << 20;
/// The longest message between the daemon and its clients: the picture of a machine's screen.
const CLIENT: usize = 80 << 20;
/// What a message may take in memory beyond its own length, in bytes.
pub const MEMORY: usize = 8 << 20;
/// The same of messages between the daemon and its clients, all of them root's: they list all pods of the node.
const CLIENT_MEMORY: usize = 256 << 20;
/// Messages inside each other. Those of this crate have at most 10.
const DEPTH: usize = 32;
/// What an entry of a map takes beside its texts, at most: a hash map may be less than half full.
const MAP_ENTRY: usize = 128;
/// What a text takes beside its bytes: its place in a list that may be half empty, and the allocator's own.
const TEXT: usize = 64;
/// What a number in a list takes at most, in a list that may be half empty.
const NUMBER: usize = 16;

/// What is known of a message's fields before it is decoded.
#[derive(Debug)]
pub struct Shape {
    /// The full name of the message.
    pub name: &'static str,
    /// Bytes of its Rust type.
    pub size: usize,
    /// Its fields by number, ascending.
    pub fields: &'static [(u32, Field)],
}

/// What a field takes in memory.
#[derive(Debug)]
pub enum Field {
    /// A number in the message itself.
    Scalar,
    /// A list of numbers.
    Scalars,
    /// A string or bytes, or a list of them.
    Text,
    /// A message, or a list or map of them.
    Message(&'static Shape),
}

/// A message of this crate.
pub trait Shaped {
    /// Its shape.
    fn shape() -> &'static Shape;
}

/// Why a message is not decoded.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// More bytes than messages of this type may have.
    #[error("{name} has {length} bytes; at most {limit} are allowed")]
    TooLong {
        /// The message.
        name: &'static str,
        /// Its length.
        length: usize,
        /// The limit.
        limit: usize,
    },
    /// Too many elements for its length.
    #[error("{name} of {length} bytes would take more than {limit} bytes of memory; it has too many elements")]
    TooLarge {
        /// The message.
        name: &'static str,
        /// Its length.
        length: usize,
        /// The limit.
        limit: usize,
    },
    /// The bytes are no message.
    #[error("{name} is damaged: {why}")]
    Damaged {
        /// The message.
        name: &'static str,
        /// The rule that they break.
        why: &'static str,
    },
    /// The bytes are another message.
    #[error("cannot decode {name}")]
    Decode {
        /// The message.
        name: &'static str,
        /// Why.
        source: prost::DecodeError,
    },
}

impl From<WireError> for Status {
    fn from(error: WireError) -> Self {
        let text = match &error {
            WireError::Decode { source, .. } => format!("{error}: {source}"),
            _ => error.to_string(),
        };
        match error {
            WireError::TooLong { .. } | WireError::TooLarge { .. } => Status::resource_exhausted(text),
            WireError::Damaged { .. } | WireError::Decode { .. } => Status::internal(text),
        }
    }
}

/// What a scan found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// An upper bound of the bytes of memory that the decoded message takes.
    pub memory: usize,
    /// Fields that were looked at.
    pub steps: usize,
}

/// The longest message of this name, and what it may take beyond that.
fn limits(name: &str) -> (usize, usize) {
    match name {
        "nacelle.pod.v1.ExecSyncResponse" => (LARGE, MEMORY),
        "nacelle.pod.v1.CreateContainerRequest" | "nacelle.agent.v1.CreateContainerRequest" => (LARGE, MEMORY),
        "nacelle.pod.v1.ExecSyncRequest" | "nacelle.pod.v1.ExecRequest" | "nacelle.agent.v1.ExecRequest" => {
            (COMMAND, MEMORY)
        }
        _ if ["nacelle.pod.", "nacelle.agent.", "nacelle.common."].iter().any(|package| name.starts_with(package)) => {
            (MESSAGE, MEMORY)
        }
        _ => (CLIENT, CLIENT_MEMORY),
    }
}

/// Scans a message, without decoding it, and ends as soon as it is known to take more than `limit` bytes of memory. The number of
/// steps is at most the number of bytes.
pub fn scan(shape: &'static Shape, bytes: &[u8], limit: usize) -> Result<Cost, WireError> {
    let name = shape.name;
    let damaged = |why| WireError::Damaged { name, why };
    let mut reader = Reader { bytes, at: 0 };
    let mut cost = Cost { memory: shape.size, steps: 0 };
    // The message that is being read, where it ends, the number of the field before, and those around it.
    let (mut shape, mut end, mut before) = (shape, bytes.len(), 0);
    let mut around = Vec::with_capacity(DEPTH);
    loop {
        if cost.memory > limit {
            return Err(WireError::TooLarge { name, length: bytes.len(), limit });
        }
        if reader.at == end {
            match around.pop() {
                Some(outer) => (shape, end, before) = outer,
                None => return Ok(cost),
            }
            continue;
        }
        cost.steps += 1;
        let key = reader.varint().ok_or_else(|| damaged("a field has no number"))?;
        let number = u32::try_from(key >> 3).map_err(|_cause| damaged("the number of a field is too large"))?;
        let field = shape.fields.binary_search_by_key(&number, |field| field.0).ok();
        let field = field.and_then(|at| shape.fields.get(at)).map(|field| &field.1);
        let mut inner = None;
        let length = match key & 7 {
            0 => {
                reader.varint().ok_or_else(|| damaged("a number is cut"))?;
                0
            }
            1 => 8,
            5 => 4,
            2 => {
                let length = reader.varint().and_then(|length| usize::try_from(length).ok());
                let length = length.ok_or_else(|| damaged("a field has no length"))?;
                match field {
                    Some(Field::Message(child)) => inner = Some(*child),
                    Some(Field::Text) => cost.memory = cost.memory.saturating_add(TEXT).saturating_add(length),
                    // Packed: each number has a byte or more.
                    Some(Field::Scalars) => cost.memory = cost.memory.saturating_add(length.saturating_mul(NUMBER)),
                    Some(Field::Scalar) | None => {}
                }
                length
            }
            _ => return Err(damaged("it has a group or an unknown type")),
        };
        if key & 7 != 2 && matches!(field, Some(Field::Scalars)) {
            cost.memory = cost.memory.saturating_add(NUMBER);
        }
        let field_end = reader.at.checked_add(length).filter(|field_end| *field_end <= end && reader.at <= end);
        let field_end = field_end.ok_or_else(|| damaged("a field ends after its message"))?;
        match inner {
            Some(child) => {
                // A list has room for four elements at first, then doubles it when it is full.
                let room = if number == before { 2 } else { 4 };
                cost.memory = cost.memory.saturating_add(room * child.size);
                if around.len() == DEPTH {
                    return Err(damaged("too many messages are inside each other"));
                }
                around.push((shape, end, number));
                (shape, end, before) = (child, field_end, 0);
            }
            None => {
                reader.at = field_end;
                before = number;
            }
        }
    }
}

/// Decodes a message, if it is not longer than messages of its type may be, and does not take more memory than it may.
pub fn decode<M: Message + Shaped + Default>(bytes: &[u8]) -> Result<M, WireError> {
    check::<M>(bytes)?;
    M::decode(bytes).map_err(|source| WireError::Decode { name: M::shape().name, source })
}

fn check<M: Shaped>(bytes: &[u8]) -> Result<(), WireError> {
    let shape = M::shape();
    let (longest, memory) = limits(shape.name);
    if bytes.len() > longest {
        return Err(WireError::TooLong { name: shape.name, length: bytes.len(), limit: longest });
    }
    scan(shape, bytes, bytes.len() + memory).map(drop)
}

struct Reader<'b> {
    bytes: &'b [u8],
    at: usize,
}

impl Reader<'_> {
    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..70).step_by(7) {
            let byte = *self.bytes.get(self.at)?;
            self.at += 1;
            value |= u64::from(byte & 0x7f).checked_shl(shift).unwrap_or(0);
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }
}

/// The codec of every RPC: prost's, after [`scan`].
#[derive(Debug, Clone)]
pub struct Codec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for Codec<T, U> {
    fn default() -> Self {
        Codec(PhantomData)
    }
}

impl<T, U> tonic::codec::Codec for Codec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Shaped + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = Encoder<T>;
    type Decoder = Decoder<U>;

    fn encoder(&mut self) -> Encoder<T> {
        Encoder(PhantomData)
    }

    fn decoder(&mut self) -> Decoder<U> {
        Decoder(PhantomData)
    }
}

/// Writes messages.
#[derive(Debug, Clone)]
pub struct Encoder<T>(PhantomData<T>);

impl<T: Message> tonic::codec::Encoder for Encoder<T> {
    type Item = T;
    type Error = Status;

    fn encode(&mut self, item: T, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        // The buffer grows as it is needed.
        item.encode(buffer).map_err(|error| Status::internal(error.to_string()))
    }
}

/// Reads messages that are not too large.
#[derive(Debug, Clone)]
pub struct Decoder<U>(PhantomData<U>);

impl<U: Message + Shaped + Default> tonic::codec::Decoder for Decoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        use prost::bytes::Buf;
        // The bytes of one message, which tonic has in one piece: no copy.
        let bytes = buffer.copy_to_bytes(buffer.remaining());
        Ok(Some(decode(&bytes)?))
    }
}

include!(concat!(env!("OUT_DIR"), "/shapes.rs"));
