//! Defines the protocol of socket volumes between guest and node: limits, paths and port in the guest, and the header by which
//! the agent names the socket of a connection. It performs no I/O. docs/contributor/volumes.md describes the whole.
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

/// The directory in which the agent creates the sockets of volumes; each volume is `DIRECTORY/NAME`.
pub const DIRECTORY: &str = "/run/nacelle/sockets";
/// The name that the only socket has in the directory of a volume that is a socket itself.
pub const SINGLE: &str = "socket";
/// The vsock port of the host to which the agent connects for each connection of a container.
pub const PORT: u32 = 1027;
/// The maximum number of sockets of a volume; the first ones in the order of their names exist in the guest.
pub const MAX_SOCKETS: usize = 64;
/// The maximum length of a socket's name in bytes: that of the path in `sockaddr_un`.
pub const MAX_NAME: usize = 107;
/// The maximum number of connections of a pod at once.
pub const MAX_CONNECTIONS: usize = 128;
/// The buffer of a connection in bytes, for each direction.
pub const BUFFER: usize = 16 << 10;
/// The length of a token in bytes.
pub const TOKEN: usize = 16;
/// The length of the part of a header that every header has, in bytes: the token, the client's user and group, and the length of the
/// name.
pub const FIXED_HEADER: usize = TOKEN + SocketClient::LENGTH + 1;

/// Identifies a socket volume. It is random and known to agent and pod process only, because any process of the guest can connect to
/// [`PORT`]: a container cannot use the volume of another one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SocketToken([u8; TOKEN]);

impl SocketToken {
    /// Takes random bytes.
    pub fn new(bytes: [u8; TOKEN]) -> SocketToken {
        SocketToken(bytes)
    }

    /// Reads a token of exactly [`TOKEN`] bytes.
    pub fn from_slice(bytes: &[u8]) -> Option<SocketToken> {
        bytes.try_into().ok().map(SocketToken)
    }

    /// Returns the bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl std::fmt::Debug for SocketToken {
    /// Prints no byte, so that the token is in no log.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SocketToken")
    }
}

/// The user and the group of the process of the guest that connects, outside of its container's user namespace. The server on the
/// node gets them as SO_PEERCRED.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketClient {
    uid: u32,
    gid: u32,
}

impl SocketClient {
    /// The length of an encoded client in bytes.
    pub const LENGTH: usize = 8;

    /// Returns `None` for the id 2^32 - 1, which is that of no user and means "unchanged" in system calls.
    pub fn new(uid: u32, gid: u32) -> Option<SocketClient> {
        (uid != u32::MAX && gid != u32::MAX).then_some(SocketClient { uid, gid })
    }

    /// Returns the user's id.
    pub fn uid(self) -> u32 {
        self.uid
    }

    /// Returns the group's id.
    pub fn gid(self) -> u32 {
        self.gid
    }

    /// Encodes the ids, user first, little-endian.
    pub fn encode(self) -> [u8; SocketClient::LENGTH] {
        let ([a, b, c, d], [e, f, g, h]) = (self.uid.to_le_bytes(), self.gid.to_le_bytes());
        [a, b, c, d, e, f, g, h]
    }

    /// Decodes the ids; returns `None` if they are invalid.
    pub fn decode(bytes: [u8; SocketClient::LENGTH]) -> Option<SocketClient> {
        let [a, b, c, d, e, f, g, h] = bytes;
        SocketClient::new(u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]))
    }
}

/// Returns whether a directory can have a socket of this name, and the relay accepts it.
pub fn is_name(name: &[u8]) -> bool {
    (1..=MAX_NAME).contains(&name.len())
        && name != b"."
        && name != b".."
        && !name.iter().any(|byte| matches!(byte, b'/' | 0))
}

/// The beginning of a connection of the agent to [`PORT`]. Bytes of the container follow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketHeader {
    /// The volume.
    pub token: SocketToken,
    /// The process that connects.
    pub client: SocketClient,
    /// The name of the socket in the volume; empty for a volume that is a socket itself.
    pub name: Vec<u8>,
}

impl SocketHeader {
    /// Encodes the header; returns `None` if the name is too long.
    pub fn encode(&self) -> Option<Vec<u8>> {
        let length = u8::try_from(self.name.len()).ok().filter(|length| usize::from(*length) <= MAX_NAME)?;
        Some([self.token.as_bytes(), &self.client.encode(), &[length], &self.name].concat())
    }

    /// Reads the fixed part of a header: the token, the client, and the length of the name that follows. Returns `None` if the client
    /// is invalid or the name too long.
    pub fn decode_fixed(bytes: &[u8; FIXED_HEADER]) -> Option<(SocketToken, SocketClient, usize)> {
        let (token, rest) = bytes.split_at_checked(TOKEN)?;
        let (client, length) = rest.split_first_chunk()?;
        let length = usize::from(*length.first()?);
        (length <= MAX_NAME).then_some((SocketToken::from_slice(token)?, SocketClient::decode(*client)?, length))
    }

    /// Joins the parts of a header; returns `None` if the name is invalid.
    pub fn from_parts(token: SocketToken, client: SocketClient, name: Vec<u8>) -> Option<SocketHeader> {
        (name.is_empty() || is_name(&name)).then_some(SocketHeader { token, client, name })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn decode(bytes: &[u8]) -> Option<SocketHeader> {
        let (fixed, rest) = bytes.split_first_chunk()?;
        let (token, client, length) = SocketHeader::decode_fixed(fixed)?;
        SocketHeader::from_parts(token, client, rest.get(..length)?.to_vec())
    }

    #[test]
    fn names_stay_in_their_directory() {
        for name in ["a", "...", "..a", ".hidden", &"n".repeat(MAX_NAME)] {
            assert!(is_name(name.as_bytes()), "{name}");
        }
        for name in ["", ".", "..", "a/b", "/", "a\0", &"n".repeat(MAX_NAME + 1)] {
            assert!(!is_name(name.as_bytes()), "{name}");
        }
    }

    #[test]
    fn the_id_that_changes_nothing_is_no_client() {
        assert_eq!((SocketClient::new(u32::MAX, 1), SocketClient::new(1, u32::MAX)), (None, None));
        assert_eq!(SocketClient::decode([0xff, 0xff, 0xff, 0xff, 1, 0, 0, 0]), None);
        let client = SocketClient::new(0x0102_0304, 7).unwrap();
        assert_eq!(SocketClient::decode(client.encode()), Some(client));
    }

    #[test]
    fn a_token_is_not_printed() {
        assert_eq!(format!("{:?}", SocketToken::new([b'k'; TOKEN])), "SocketToken");
        assert_eq!(SocketToken::from_slice(&[0; TOKEN + 1]), None);
    }

    #[test]
    fn a_name_that_is_too_long_is_not_encoded() {
        let client = SocketClient::new(1, 2).unwrap();
        let header = |length| SocketHeader { token: SocketToken::new([1; TOKEN]), client, name: vec![b'n'; length] };
        assert!(header(MAX_NAME).encode().is_some());
        assert!(header(MAX_NAME + 1).encode().is_none() && header(300).encode().is_none());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]
        #[test]
        fn decoded_bytes_are_the_canonical_encoding(
            token in any::<[u8; TOKEN]>(), ids in any::<[u8; 8]>(), length in 0..=130u8, rest in prop::collection::vec(any::<u8>(), 0..140),
        ) {
            let bytes = [token.as_slice(), &ids, &[length], &rest].concat();
            match decode(&bytes) {
                Some(header) => {
                    prop_assert!(header.name.is_empty() || is_name(&header.name));
                    prop_assert_eq!(&header.encode().unwrap(), &bytes[..FIXED_HEADER + header.name.len()]);
                }
                None => {
                    let name = rest.get(..usize::from(length));
                    let is_client = SocketClient::decode(ids).is_some();
                    prop_assert!(!is_client || name.is_none_or(|name| !name.is_empty() && !is_name(name)));
                }
            }
        }
    }
}
