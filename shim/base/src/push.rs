//! Owns: what the programs that take part in pushed volumes agree on: how much is pushed and where the guest has it, and the
//! words between the pod process, which asks, and the process that has the files (`nacelle-fs`), which reads them. Pure.

/// Where the agent keeps pushed volumes; each is `FOLDER/NAME`.
pub const FOLDER: &str = "/run/nacelle/pushed";
/// The link that names the folder with a volume's present files, and by whose change all of them change at once.
pub const DATA: &str = "..data";
/// The most files, folders and links of a volume.
pub const MAX_ENTRIES: usize = 65_536;
/// The most bytes of all its files.
pub const MAX_BYTES: u64 = 32 << 20;
/// The longest path in it.
pub const MAX_PATH: usize = 4096;
/// The most folders in one another.
pub const MAX_DEPTH: usize = 64;
/// A part of a volume is ended when it has so many bytes; it has at most twice as many.
pub const PART: usize = 128 << 10;
/// The longest word. Each stands behind its length, as little-endian 32 bits.
pub const MAX_WORD: usize = 512 << 10;

/// What the pod process asks. Answers come in the order of the questions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    /// The volume at this place (`CONTAINER/n`) gets this number; if it is `live`, its changes are told.
    Open {
        /// Its number.
        id: u32,
        /// It has a [`DATA`] link, which is followed and watched; otherwise it is read as it is.
        live: bool,
        /// Below the folder in which the daemon mounts what is pushed.
        place: String,
    },
    /// The first part of the volume as it is now; if not `afresh`, without the folder that was read to its end before.
    Begin {
        /// Its number.
        id: u32,
        /// All of it.
        afresh: bool,
    },
    /// The next part.
    Next {
        /// Its number.
        id: u32,
    },
    /// Forget it.
    Close {
        /// Its number.
        id: u32,
    },
}

/// What `nacelle-fs` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Told {
    /// The answer to Open and Close.
    Done {
        /// The volume's number.
        id: u32,
    },
    /// The answer to Begin and Next.
    Part {
        /// The volume's number.
        id: u32,
        /// The volume is whole.
        last: bool,
        /// An encoded `agent.v1.Tree`.
        tree: Vec<u8>,
    },
    /// Why there is no other answer.
    Failed {
        /// The volume's number.
        id: u32,
        /// What it means.
        why: Why,
        /// For people.
        text: String,
    },
    /// No answer: the volume is not what it was at the last Begin. Told once until the next.
    Changed {
        /// Its number.
        id: u32,
    },
}

/// Why a volume is not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It changed meanwhile: begin anew.
    Changed,
    /// There is more of it than is pushed.
    TooMuch,
    /// There is something in it that is not pushed.
    Odd,
    /// It is not there.
    Missing,
    /// Reading failed.
    Failed,
}

impl Why {
    /// All of them; a word has the place in this list.
    pub const ALL: [Why; 5] = [Why::Changed, Why::TooMuch, Why::Odd, Why::Missing, Why::Failed];
}

fn word(kind: u8, id: u32, flag: u8, rest: &[u8]) -> Vec<u8> {
    [&[kind], id.to_le_bytes().as_slice(), &[flag], rest].concat()
}

/// Kind, number, flag, and the rest of a word.
fn parts(word: &[u8]) -> Option<(u8, u32, u8, &[u8])> {
    let (kind, rest) = word.split_first()?;
    let (id, rest) = rest.split_at_checked(4)?;
    let (flag, rest) = rest.split_first()?;
    Some((*kind, u32::from_le_bytes(id.try_into().ok()?), *flag, rest))
}

impl Ask {
    /// As a word.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Ask::Open { id, live, place } => word(1, *id, u8::from(*live), place.as_bytes()),
            Ask::Begin { id, afresh } => word(2, *id, u8::from(*afresh), &[]),
            Ask::Next { id } => word(3, *id, 0, &[]),
            Ask::Close { id } => word(4, *id, 0, &[]),
        }
    }

    /// Of a word, if it is one.
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
    /// As a word.
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

    /// Of a word, if it is one.
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
