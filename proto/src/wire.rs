//! Bounds the memory of a message before it is decoded. Every RPC of this crate uses [`Codec`], which `build.rs` passes to the
//! code generator, and framed messages go through [`decode`]; `cargo xtask rules` forbids any other decoder.
//!
//! A message is scanned once without an allocation, and the memory of its decoded form is added up: an empty element of a list
//! has two bytes on the wire and can have several hundred in memory.

use prost::Message;
use std::marker::PhantomData;
use tonic::Status;
use tonic::codec::{DecodeBuf, EncodeBuf};

/// The maximum length in bytes of a message between the daemon, a pod process and its agent.
pub const MESSAGE: usize = 1 << 20;
/// The maximum length of an ExecSync response, which has both streams of a command, and of a request to create a container, which
/// has the user data of a VM.
pub const LARGE: usize = 40 << 20;
/// The maximum length of a request to run a command.
const COMMAND: usize = 4 << 20;
/// The maximum length of a message between the daemon and its clients; the largest is a screenshot of a VM.
const CLIENT: usize = 80 << 20;
/// The maximum memory in bytes that a message may take beyond its own length.
pub const MEMORY: usize = 8 << 20;
/// The same for messages between the daemon and its clients, which are all root: they list all pods of the node.
const CLIENT_MEMORY: usize = 256 << 20;
/// The maximum nesting depth of messages. Those of this crate have at most 10.
const DEPTH: usize = 32;
/// The maximum memory of a map entry in addition to its strings: a hash map may be less than half full.
const MAP_ENTRY: usize = 128;
/// The maximum memory of a string in addition to its bytes: its element in a list that may be half empty, and the allocator's
/// overhead.
const TEXT: usize = 64;
/// The maximum memory of a number in a list that may be half empty.
const NUMBER: usize = 16;

/// The fields of a message as the scan needs them.
#[derive(Debug)]
pub struct Shape {
    /// The full name of the message.
    pub name: &'static str,
    /// The size of the Rust type in bytes.
    pub size: usize,
    /// The fields by number, ascending.
    pub fields: &'static [(u32, Field)],
}

/// The memory of a field.
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
    /// Returns the message's shape.
    fn shape() -> &'static Shape;
}

/// Reasons that a message is not decoded.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The message exceeds the maximum length of its type.
    #[error("{name} has {length} bytes; at most {limit} are allowed")]
    TooLong {
        /// The message.
        name: &'static str,
        /// The message's length in bytes.
        length: usize,
        /// The limit in bytes.
        limit: usize,
    },
    /// The message has too many elements for its length.
    #[error("{name} of {length} bytes would take more than {limit} bytes of memory; it has too many elements")]
    TooLarge {
        /// The message.
        name: &'static str,
        /// The message's length in bytes.
        length: usize,
        /// The limit in bytes.
        limit: usize,
    },
    /// The bytes are not a valid message.
    #[error("{name} is damaged: {why}")]
    Damaged {
        /// The message.
        name: &'static str,
        /// The rule that they violate.
        why: &'static str,
    },
    /// The bytes do not match the message type.
    #[error("cannot decode {name}")]
    Decode {
        /// The message.
        name: &'static str,
        /// The reason.
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

/// The result of a scan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// An upper bound of the memory of the decoded message in bytes.
    pub memory: usize,
    /// The number of fields that were visited.
    pub steps: usize,
}

/// Returns the maximum length of a message of this name, and the maximum memory beyond that.
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

/// Scans a message without decoding it, and fails as soon as it is known to take more than `limit` bytes of memory. The number of
/// steps is at most the number of bytes.
pub fn scan(shape: &'static Shape, bytes: &[u8], limit: usize) -> Result<Cost, WireError> {
    let name = shape.name;
    let damaged = |why| WireError::Damaged { name, why };
    let mut reader = Reader { bytes, at: 0 };
    let mut cost = Cost { memory: shape.size, steps: 0 };
    // The current message, its end, the number of the previous field, and the enclosing messages.
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
                    // Packed: each number takes at least one byte.
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
                // A list starts with a capacity of four elements, and doubles it when it is full.
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

/// Decodes a message, unless it exceeds the length or the memory limit of its type.
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

/// The codec of every RPC: prost's codec after [`scan`].
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

/// Encodes messages.
#[derive(Debug, Clone)]
pub struct Encoder<T>(PhantomData<T>);

impl<T: Message> tonic::codec::Encoder for Encoder<T> {
    type Item = T;
    type Error = Status;

    fn encode(&mut self, item: T, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        // The buffer grows as needed.
        item.encode(buffer).map_err(|error| Status::internal(error.to_string()))
    }
}

/// Decodes messages within the limits.
#[derive(Debug, Clone)]
pub struct Decoder<U>(PhantomData<U>);

impl<U: Message + Shaped + Default> tonic::codec::Decoder for Decoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        use prost::bytes::Buf;
        // The bytes of one message, which tonic has in one piece, so this does not copy.
        let bytes = buffer.copy_to_bytes(buffer.remaining());
        Ok(Some(decode(&bytes)?))
    }
}

include!(concat!(env!("OUT_DIR"), "/shapes.rs"));
