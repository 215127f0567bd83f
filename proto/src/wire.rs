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
pub const MAX_MESSAGE: usize = 1 << 20;
/// The maximum length of an ExecSync response, which has both streams of a command, and of a request to create a container, which
/// has the user data of a VM.
pub const MAX_LARGE_MESSAGE: usize = 40 << 20;
/// The maximum length of a request to run a command.
const MAX_COMMAND_REQUEST: usize = 4 << 20;
/// The maximum length of a message between the daemon and its clients; the largest is a screenshot of a VM.
const MAX_CLIENT_MESSAGE: usize = 80 << 20;
/// The maximum memory in bytes that a message may take beyond its own length.
pub const MAX_EXTRA_MEMORY: usize = 8 << 20;
/// The same for messages between the daemon and its clients, which are all root: they list all pods of the node.
const MAX_CLIENT_EXTRA_MEMORY: usize = 256 << 20;
/// The maximum nesting depth of messages. Those of this crate have at most 10.
const MAX_DEPTH: usize = 32;
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
    /// A number, which takes no memory beyond the Rust type of its message.
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
pub enum MessageError {
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

impl From<MessageError> for Status {
    fn from(error: MessageError) -> Self {
        let text = match &error {
            MessageError::Decode { source, .. } => format!("{error}: {source}"),
            _ => error.to_string(),
        };
        match error {
            MessageError::TooLong { .. } | MessageError::TooLarge { .. } => Status::resource_exhausted(text),
            MessageError::Damaged { .. } | MessageError::Decode { .. } => Status::internal(text),
        }
    }
}

/// The result of a scan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScanCost {
    /// An upper bound of the memory of the decoded message in bytes.
    pub memory: usize,
    /// The number of fields that were visited.
    pub steps: usize,
}

/// Returns the maximum length of a message of this name, and the maximum memory beyond that.
fn limits(name: &str) -> (usize, usize) {
    match name {
        "nacelle.pod.v1.ExecSyncResponse" => (MAX_LARGE_MESSAGE, MAX_EXTRA_MEMORY),
        "nacelle.pod.v1.CreateContainerRequest" | "nacelle.agent.v1.CreateContainerRequest" => {
            (MAX_LARGE_MESSAGE, MAX_EXTRA_MEMORY)
        }
        "nacelle.pod.v1.ExecSyncRequest" | "nacelle.pod.v1.ExecRequest" | "nacelle.agent.v1.ExecRequest" => {
            (MAX_COMMAND_REQUEST, MAX_EXTRA_MEMORY)
        }
        _ if ["nacelle.pod.", "nacelle.agent.", "nacelle.common."].iter().any(|package| name.starts_with(package)) => {
            (MAX_MESSAGE, MAX_EXTRA_MEMORY)
        }
        _ => (MAX_CLIENT_MESSAGE, MAX_CLIENT_EXTRA_MEMORY),
    }
}

/// Scans a message without decoding it, and fails as soon as it is known to take more than `limit` bytes of memory. The number of
/// steps is at most the number of bytes.
pub fn scan(shape: &'static Shape, bytes: &[u8], limit: usize) -> Result<ScanCost, MessageError> {
    let name = shape.name;
    let damaged = |why| MessageError::Damaged { name, why };
    let mut reader = Reader { bytes, position: 0 };
    let mut cost = ScanCost { memory: shape.size, steps: 0 };
    // The current message, its end, the number of the previous field, and the enclosing messages.
    let (mut shape, mut end, mut before) = (shape, bytes.len(), 0);
    let mut outer_messages = Vec::with_capacity(MAX_DEPTH);
    loop {
        if cost.memory > limit {
            return Err(MessageError::TooLarge { name, length: bytes.len(), limit });
        }
        if reader.position == end {
            match outer_messages.pop() {
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
        if key & 7 != 2 && matches!(field, Some(Field::Message(_) | Field::Text)) {
            // prost reads a map as if its type were right, and would see other fields than this scan.
            return Err(damaged("a message, a map or a text has the type of a number"));
        }
        let mut inner = None;
        let length = match key & 7 {
            0 => {
                reader.varint().ok_or_else(|| damaged("a number is truncated"))?;
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
        let field_end =
            reader.position.checked_add(length).filter(|field_end| *field_end <= end && reader.position <= end);
        let field_end = field_end.ok_or_else(|| damaged("a field ends after its message"))?;
        match inner {
            Some(child) => {
                // A list starts with a capacity of four elements, and doubles it when it is full.
                let capacity = if number == before { 2 } else { 4 };
                cost.memory = cost.memory.saturating_add(capacity * child.size);
                if outer_messages.len() == MAX_DEPTH {
                    return Err(damaged("too many messages are inside each other"));
                }
                outer_messages.push((shape, end, number));
                (shape, end, before) = (child, field_end, 0);
            }
            None => {
                reader.position = field_end;
                before = number;
            }
        }
    }
}

/// Decodes a message, unless it exceeds the length or the memory limit of its type.
pub fn decode<M: Message + Shaped + Default>(bytes: &[u8]) -> Result<M, MessageError> {
    check::<M>(bytes)?;
    M::decode(bytes).map_err(|source| MessageError::Decode { name: M::shape().name, source })
}

fn check<M: Shaped>(bytes: &[u8]) -> Result<(), MessageError> {
    let shape = M::shape();
    let (max_length, memory) = limits(shape.name);
    if bytes.len() > max_length {
        return Err(MessageError::TooLong { name: shape.name, length: bytes.len(), limit: max_length });
    }
    scan(shape, bytes, bytes.len() + memory).map(drop)
}

struct Reader<'b> {
    bytes: &'b [u8],
    position: usize,
}

impl Reader<'_> {
    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..70).step_by(7) {
            let byte = *self.bytes.get(self.position)?;
            self.position += 1;
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
