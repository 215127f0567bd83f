//! Defines the protocol of copied-in volumes: limits, paths in the guest, and the messages between the pod process, which
//! sends requests, and the file-server process (`nacelle-fs`), which reads the files. It performs no I/O.

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
/// A part of a volume ends when it has at least so many bytes; it has at most twice as many.
pub const PART: usize = 128 << 10;
/// The maximum length of a message in bytes. Each message follows its length, as a little-endian u32.
pub const MAX_WORD: usize = 512 << 10;

/// A request of the pod process. Replies come in the order of the requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Opens the volume at this place (`CONTAINER/n`) under this number; changes of a `live` volume are reported.
    Open {
        /// The volume's number.
        id: u32,
        /// The volume has a [`DATA`] link, which is followed and watched; otherwise the directory is read as it is.
        live: bool,
        /// The path below the directory in which the daemon mounts copied-in volumes.
        place: String,
    },
    /// Reads the first part of the volume's present content; unless `afresh`, without the [`DATA`] directory if it was read
    /// completely before.
    Begin {
        /// The volume's number.
        id: u32,
        /// The whole volume is read.
        afresh: bool,
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
}

/// A message of `nacelle-fs`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Told {
    /// The reply to Open and Close.
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
        why: Why,
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
pub enum Why {
    /// The volume changed while it was read; the pod process must begin again.
    Changed,
    /// The volume exceeds a limit.
    TooMuch,
    /// The volume contains an entry of a type that is not copied.
    Odd,
    /// The volume does not exist.
    Missing,
    /// Reading failed.
    Failed,
}

impl Why {
    /// All reasons; a message contains the index in this list.
    pub const ALL: [Why; 5] = [Why::Changed, Why::TooMuch, Why::Odd, Why::Missing, Why::Failed];
}

fn word(kind: u8, id: u32, flag: u8, rest: &[u8]) -> Vec<u8> {
    [&[kind], id.to_le_bytes().as_slice(), &[flag], rest].concat()
}

/// Splits a message into kind, number, flag and payload.
fn parts(word: &[u8]) -> Option<(u8, u32, u8, &[u8])> {
    let (kind, rest) = word.split_first()?;
    let (id, rest) = rest.split_at_checked(4)?;
    let (flag, rest) = rest.split_first()?;
    Some((*kind, u32::from_le_bytes(id.try_into().ok()?), *flag, rest))
}

impl Ask {
    /// Encodes the request as a message.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Ask::Open { id, live, place } => word(1, *id, u8::from(*live), place.as_bytes()),
            Ask::Begin { id, afresh } => word(2, *id, u8::from(*afresh), &[]),
            Ask::Next { id } => word(3, *id, 0, &[]),
            Ask::Close { id } => word(4, *id, 0, &[]),
        }
    }

    /// Decodes a message; returns `None` if it is not a request.
    pub fn decode(bytes: &[u8]) -> Option<Ask> {
        Some(match parts(bytes)? {
            (1, id, live @ 0..=1, place) => {
                Ask::Open { id, live: live == 1, place: std::str::from_utf8(place).ok()?.to_owned() }
            }
            (2, id, afresh @ 0..=1, []) => Ask::Begin { id, afresh: afresh == 1 },
            (3, id, 0, []) => Ask::Next { id },
            (4, id, 0, []) => Ask::Close { id },
            _ => return None,
        })
    }
}

impl Told {
    /// Encodes the message.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Told::Done { id } => word(1, *id, 0, &[]),
            Told::Part { id, last, tree } => word(2, *id, u8::from(*last), tree),
            Told::Failed { id, why, text } => {
                let place = Why::ALL.iter().position(|known| known == why).unwrap_or(0);
                word(3, *id, u8::try_from(place).unwrap_or(0), text.as_bytes())
            }
            Told::Changed { id } => word(4, *id, 0, &[]),
        }
    }

    /// Decodes a message; returns `None` if it is invalid.
    pub fn decode(bytes: &[u8]) -> Option<Told> {
        Some(match parts(bytes)? {
            (1, id, 0, []) => Told::Done { id },
            (2, id, last @ 0..=1, tree) => Told::Part { id, last: last == 1, tree: tree.to_vec() },
            (3, id, why, text) => Told::Failed {
                id,
                why: *Why::ALL.get(usize::from(why))?,
                text: std::str::from_utf8(text).ok()?.to_owned(),
            },
            (4, id, 0, []) => Told::Changed { id },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn words_are_read_as_they_were_written() {
        for ask in [
            Ask::Open { id: 7, live: true, place: "c/0".into() },
            Ask::Open { id: u32::MAX, live: false, place: String::new() },
            Ask::Begin { id: 1, afresh: true },
            Ask::Next { id: 2 },
            Ask::Close { id: 3 },
        ] {
            assert_eq!(Ask::decode(&ask.encode()), Some(ask));
        }
        let failed = Why::ALL.map(|why| Told::Failed { id: 4, why, text: "x".into() });
        let part = Told::Part { id: 5, last: true, tree: vec![0, 1, 2] };
        for told in failed.into_iter().chain([Told::Done { id: 1 }, Told::Changed { id: 2 }, part]) {
            assert_eq!(Told::decode(&told.encode()), Some(told));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]
        #[test]
        fn bytes_are_one_word_or_none(bytes in prop::collection::vec(any::<u8>(), 0..32)) {
            if let Some(ask) = Ask::decode(&bytes) {
                prop_assert_eq!(ask.encode(), bytes.clone());
            }
            if let Some(told) = Told::decode(&bytes) {
                prop_assert_eq!(told.encode(), bytes);
            }
        }
    }
}
