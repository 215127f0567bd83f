//! Reads and writes the frames of the boot handshake, of stream preambles and of the zygote: a little-endian u32 length, which is limited,
//! and that many bytes.

use nacelle_proto::wire::{self, MessageError, Shaped};
use prost::Message;
use std::io::{self, Read, Write};

/// The longest payload of a frame between the pod process and the agent, in bytes.
pub const MAX: u32 = 1 << 20;
/// The longest payload of a frame between the agent and its zygote, in bytes. It holds the arguments and the environment of a program
/// as JSON, which come from a gRPC request of at most that size.
pub const MAX_ZYGOTE: u32 = wire::MAX_LARGE_MESSAGE as u32;
/// The buffer for a payload in bytes; beyond that it grows with the bytes that arrive, not with the announced length.
const FIRST_BYTES: usize = 4 << 10;

/// Reasons a frame cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum AgentFrameError {
    /// The peer has closed the connection or is too slow.
    #[error("cannot {what} a frame")]
    Io {
        /// The operation: "read" or "write".
        what: &'static str,
        /// The system call's error.
        source: io::Error,
    },
    /// The length is beyond the limit.
    #[error("a frame of {length} bytes is longer than {max}")]
    TooLong {
        /// The length in the frame, or of the payload.
        length: usize,
        /// The limit.
        max: u32,
    },
    /// The payload is not the message expected.
    #[error("a frame does not contain the expected message")]
    Decode(#[from] MessageError),
}

impl AgentFrameError {
    /// Whether the peer has closed the connection, between frames or within one.
    pub fn is_hung_up(&self) -> bool {
        use io::ErrorKind as E;
        let AgentFrameError::Io { source, .. } = self else { return false };
        matches!(
            source.kind(),
            E::UnexpectedEof | E::ConnectionReset | E::ConnectionAborted | E::BrokenPipe | E::NotConnected
        )
    }
}

fn io_error(what: &'static str) -> impl FnOnce(io::Error) -> AgentFrameError {
    move |source| AgentFrameError::Io { what, source }
}

/// Returns the length in a frame's first four bytes, if it is allowed.
pub fn parse_length(head: [u8; 4], max: u32) -> Result<usize, AgentFrameError> {
    let length = u32::from_le_bytes(head);
    let size = usize::try_from(length).unwrap_or(usize::MAX);
    if length > max { Err(AgentFrameError::TooLong { length: size, max }) } else { Ok(size) }
}

/// Returns the bytes of a frame with this payload.
pub fn encode_frame(payload: &[u8], max: u32) -> Result<Vec<u8>, AgentFrameError> {
    let length = u32::try_from(payload.len()).ok().filter(|length| *length <= max);
    let length = length.ok_or(AgentFrameError::TooLong { length: payload.len(), max })?;
    let mut bytes = Vec::with_capacity(payload.len() + 4);
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(payload);
    Ok(bytes)
}

/// Reads one frame's payload.
pub fn read_bytes(from: &mut impl Read, max: u32) -> Result<Vec<u8>, AgentFrameError> {
    let mut head = [0; 4];
    from.read_exact(&mut head).map_err(io_error("read"))?;
    let length = parse_length(head, max)?;
    let mut payload = Vec::with_capacity(length.min(FIRST_BYTES));
    from.take(length as u64).read_to_end(&mut payload).map_err(io_error("read"))?;
    require_length(payload, length)
}

/// Returns the payload, unless the peer has closed the connection before its end.
fn require_length(payload: Vec<u8>, length: usize) -> Result<Vec<u8>, AgentFrameError> {
    let cut = || AgentFrameError::Io { what: "read", source: io::ErrorKind::UnexpectedEof.into() };
    Some(payload).filter(|payload| payload.len() == length).ok_or_else(cut)
}

/// Reads one framed message.
pub fn read<M: Message + Shaped + Default>(from: &mut impl Read) -> Result<M, AgentFrameError> {
    Ok(wire::decode(&read_bytes(from, MAX)?)?)
}

/// Writes one frame.
pub fn write_bytes(to: &mut impl Write, payload: &[u8], max: u32) -> Result<(), AgentFrameError> {
    to.write_all(&encode_frame(payload, max)?).map_err(io_error("write"))
}

/// Writes one framed message.
pub fn write<M: Message>(to: &mut impl Write, message: &M) -> Result<(), AgentFrameError> {
    write_bytes(to, &message.encode_to_vec(), MAX)
}

/// Reads one framed message from an asynchronous stream.
pub async fn read_async<M: Message + Shaped + Default>(
    from: &mut (impl tokio::io::AsyncRead + Unpin),
) -> Result<M, AgentFrameError> {
    use tokio::io::AsyncReadExt;
    let mut head = [0; 4];
    from.read_exact(&mut head).await.map_err(io_error("read"))?;
    let length = parse_length(head, MAX)?;
    let mut payload = Vec::with_capacity(length.min(FIRST_BYTES));
    from.take(length as u64).read_to_end(&mut payload).await.map_err(io_error("read"))?;
    Ok(wire::decode(&require_length(payload, length)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacelle_proto::agent::{StreamOpen, WaitRequest};
    use proptest::prelude::*;

    #[test]
    fn a_frame_is_read_as_it_was_written() {
        let sent = StreamOpen {
            id: "a".into(),
            exec_id: "b".into(),
            stream: 2,
            keep_open: true,
            port: 7,
            device: String::new(),
        };
        let mut bytes = Vec::new();
        write(&mut bytes, &sent).unwrap();
        assert_eq!(read::<StreamOpen>(&mut bytes.as_slice()).unwrap(), sent);
    }

    #[test]
    fn a_closed_connection_is_distinguished_from_invalid_bytes() {
        let error = |bytes: &[u8]| read::<WaitRequest>(&mut &*bytes).unwrap_err();
        assert!(error(&[]).is_hung_up() && error(&[9, 0, 0, 0, 1]).is_hung_up());
        assert!(!error(&[0xff; 4]).is_hung_up() && !error(&[1, 0, 0, 0, 0xff]).is_hung_up());
        let slow = AgentFrameError::Io { what: "read", source: io::ErrorKind::WouldBlock.into() };
        assert!(!slow.is_hung_up());
    }

    #[test]
    fn a_too_long_frame_is_rejected_before_its_memory_is_allocated() {
        let error = read_bytes(&mut [0xff_u8; 8].as_slice(), MAX_ZYGOTE).unwrap_err();
        assert!(matches!(error, AgentFrameError::TooLong { .. }), "{error}");
        assert!(encode_frame(&vec![0; 1 << 21], MAX).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn any_bytes_are_read_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = read::<WaitRequest>(&mut bytes.as_slice());
        }
    }
}
