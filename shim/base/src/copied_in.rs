//! Defines the protocol of copied-in volumes and of socket volumes: limits, paths in the guest, and the messages between the
//! pod process, which sends requests, and the file-server process (`nacelle-fs`), which reads files and connects to sockets.
//! It performs no I/O.

use crate::sockets::SocketClient;

/// The directory in which the agent keeps copied-in volumes; each is `DIRECTORY/NAME`.
pub const DIRECTORY: &str = "/run/nacelle/pushed";
/// The symbolic link to the directory with a volume's present files. Replacing the link changes all of them atomically.
pub const DATA: &str = "..data";
/// The maximum number of files, directories and links of a volume.
pub const MAX_ENTRIES: usize = 65_536;
/// The maximum total size of the files of a volume in bytes.
pub const MAX_BYTES: u64 = 32 << 20;
/// The maximum length of a path in a volume, in bytes.
pub const MAX_PATH: usize = 4096;
/// The maximum nesting depth of directories.
pub const MAX_DEPTH: usize = 64;
/// The maximum number of bytes of a file that are returned to the node: kubelet reads as many from the end of a termination log
/// (MaxContainerTerminationMessageLength).
pub const MAX_RETURNED: usize = 4096;
/// A part of a volume ends when it has at least so many bytes; it has at most twice as many.
pub const PART_BYTES: usize = 128 << 10;
/// The maximum length of a message in bytes. Each message follows its length, as a little-endian u32.
pub const MAX_COPY_IN_MESSAGE: usize = 512 << 10;

/// A request of the pod process. Replies come in the order of the requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CopyInRequest {
    /// Opens the volume at this path (`CONTAINER/n`) under this number.
    Open {
        /// The volume's number.
        id: u32,
        /// How the volume is read.
        kind: CopyInKind,
        /// The path below the directory in which the daemon mounts copied-in volumes.
        path: String,
    },
    /// Reads the first part of the volume's present content; unless `full`, without the [`DATA`] directory if it was read
    /// completely before.
    Begin {
        /// The volume's number.
        id: u32,
        /// The whole volume is read.
        full: bool,
    },
    /// Reads the next part.
    Next {
        /// The volume's number.
        id: u32,
    },
    /// Closes the volume.
    Close {
        /// The volume's number.
        id: u32,
    },
    /// Connects a socket to one of the sockets of a volume of the kind [`CopyInKind::Sockets`], without waiting. The socket to
    /// connect comes with the message (SCM_RIGHTS): `nacelle-fs` cannot create any.
    Connect {
        /// The volume's number.
        id: u32,
        /// The process as which `nacelle-fs` connects.
        client: SocketClient,
        /// The name of the socket in the volume; empty for a volume that is a socket itself.
        name: Vec<u8>,
    },
}

/// How `nacelle-fs` reads a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyInKind {
    /// The directory or file is read as it is, and not watched.
    Once,
    /// The volume has a [`DATA`] link, which is followed and watched: changes are reported.
    Live,
    /// Only the UNIX sockets of the directory are listed, or the volume is one. Changes are reported.
    Sockets,
}

impl CopyInKind {
    /// All kinds; a message contains the index in this list.
    pub const ALL: [CopyInKind; 3] = [CopyInKind::Once, CopyInKind::Live, CopyInKind::Sockets];
}

/// A message of `nacelle-fs`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CopyInMessage {
    /// The reply to Open, Close and Connect.
    Done {
        /// The volume's number.
        id: u32,
    },
    /// The reply to Begin and Next.
    Part {
        /// The volume's number.
        id: u32,
        /// This part completes the volume.
        last: bool,
        /// An encoded `agent.v1.Tree`.
        tree: Vec<u8>,
    },
    /// The reply to a request that failed.
    Failed {
        /// The volume's number.
        id: u32,
        /// The kind of the failure.
        reason: CopyInFailure,
        /// The error message.
        text: String,
    },
    /// A notification, not a reply: the volume has changed since the last Begin. Sent once until the next Begin.
    Changed {
        /// The volume's number.
        id: u32,
    },
}

/// The reason why a volume cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyInFailure {
    /// The volume changed while it was read; the pod process must begin again.
    Changed,
    /// The volume exceeds a limit.
    LimitExceeded,
    /// The volume contains an entry of a type that is not copied.
    UnsupportedEntry,
    /// The volume does not exist.
    Missing,
    /// Reading failed.
    Failed,
}

impl CopyInFailure {
    /// All reasons; a message contains the index in this list.
    pub const ALL: [CopyInFailure; 5] = [
        CopyInFailure::Changed,
        CopyInFailure::LimitExceeded,
        CopyInFailure::UnsupportedEntry,
        CopyInFailure::Missing,
        CopyInFailure::Failed,
    ];
}

fn encode_message(kind: u8, id: u32, flag: u8, rest: &[u8]) -> Vec<u8> {
    [&[kind], id.to_le_bytes().as_slice(), &[flag], rest].concat()
}

/// Returns the index of an element of a list of all values.
fn list_index<T: PartialEq>(all: &[T], value: &T) -> u8 {
    all.iter().position(|known| known == value).and_then(|index| u8::try_from(index).ok()).unwrap_or(0)
}

/// Splits a message into kind, number, flag and payload.
fn split_message(message: &[u8]) -> Option<(u8, u32, u8, &[u8])> {
    let (kind, rest) = message.split_first()?;
    let (id, rest) = rest.split_at_checked(4)?;
    let (flag, rest) = rest.split_first()?;
    Some((*kind, u32::from_le_bytes(id.try_into().ok()?), *flag, rest))
}

impl CopyInRequest {
    /// Encodes the request as a message.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            CopyInRequest::Open { id, kind, path } => {
                encode_message(1, *id, list_index(&CopyInKind::ALL, kind), path.as_bytes())
            }
            CopyInRequest::Begin { id, full } => encode_message(2, *id, u8::from(*full), &[]),
            CopyInRequest::Next { id } => encode_message(3, *id, 0, &[]),
            CopyInRequest::Close { id } => encode_message(4, *id, 0, &[]),
            CopyInRequest::Connect { id, client, name } => {
                encode_message(5, *id, 0, &[client.encode().as_slice(), name].concat())
            }
        }
    }

    /// Decodes a message; returns `None` if it is not a request.
    pub fn decode(bytes: &[u8]) -> Option<CopyInRequest> {
        Some(match split_message(bytes)? {
            (1, id, kind, path) => CopyInRequest::Open {
                id,
                kind: *CopyInKind::ALL.get(usize::from(kind))?,
                path: std::str::from_utf8(path).ok()?.to_owned(),
            },
            (2, id, full @ 0..=1, []) => CopyInRequest::Begin { id, full: full == 1 },
            (3, id, 0, []) => CopyInRequest::Next { id },
            (4, id, 0, []) => CopyInRequest::Close { id },
            (5, id, 0, rest) => {
                let (client, name) = rest.split_first_chunk()?;
                CopyInRequest::Connect { id, client: SocketClient::decode(*client)?, name: name.to_vec() }
            }
            _ => return None,
        })
    }
}

impl CopyInMessage {
    /// Encodes the message.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            CopyInMessage::Done { id } => encode_message(1, *id, 0, &[]),
            CopyInMessage::Part { id, last, tree } => encode_message(2, *id, u8::from(*last), tree),
            CopyInMessage::Failed { id, reason, text } => {
                encode_message(3, *id, list_index(&CopyInFailure::ALL, reason), text.as_bytes())
            }
            CopyInMessage::Changed { id } => encode_message(4, *id, 0, &[]),
        }
    }

    /// Decodes a message; returns `None` if it is invalid.
    pub fn decode(bytes: &[u8]) -> Option<CopyInMessage> {
        Some(match split_message(bytes)? {
            (1, id, 0, []) => CopyInMessage::Done { id },
            (2, id, last @ 0..=1, tree) => CopyInMessage::Part { id, last: last == 1, tree: tree.to_vec() },
            (3, id, reason, text) => CopyInMessage::Failed {
                id,
                reason: *CopyInFailure::ALL.get(usize::from(reason))?,
                text: std::str::from_utf8(text).ok()?.to_owned(),
            },
            (4, id, 0, []) => CopyInMessage::Changed { id },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn messages_are_decoded_as_they_were_encoded() {
        for request in [
            CopyInRequest::Open { id: 7, kind: CopyInKind::Live, path: "c/0".into() },
            CopyInRequest::Open { id: u32::MAX, kind: CopyInKind::Once, path: String::new() },
            CopyInRequest::Open { id: 0, kind: CopyInKind::Sockets, path: "c/1".into() },
            CopyInRequest::Connect { id: 8, client: SocketClient::new(5, 6).unwrap(), name: vec![b'a', 0xff] },
            CopyInRequest::Begin { id: 1, full: true },
            CopyInRequest::Next { id: 2 },
            CopyInRequest::Close { id: 3 },
        ] {
            assert_eq!(CopyInRequest::decode(&request.encode()), Some(request));
        }
        let failed = CopyInFailure::ALL.map(|reason| CopyInMessage::Failed { id: 4, reason, text: "x".into() });
        let part = CopyInMessage::Part { id: 5, last: true, tree: vec![0, 1, 2] };
        for message in failed.into_iter().chain([CopyInMessage::Done { id: 1 }, CopyInMessage::Changed { id: 2 }, part])
        {
            assert_eq!(CopyInMessage::decode(&message.encode()), Some(message));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]
        #[test]
        fn decoded_bytes_are_the_canonical_encoding(bytes in prop::collection::vec(any::<u8>(), 0..32)) {
            if let Some(request) = CopyInRequest::decode(&bytes) {
                prop_assert_eq!(request.encode(), bytes.clone());
            }
            if let Some(message) = CopyInMessage::decode(&bytes) {
                prop_assert_eq!(message.encode(), bytes);
            }
        }
    }
}
