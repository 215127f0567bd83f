//! Serializes the parts of errors that a worker reports to the daemon. What is decoded comes from a process that may be compromised:
//! texts become short and printable, and an I/O error becomes one of few kinds.

use serde::{Deserialize, Deserializer};
use std::borrow::Cow;

/// The maximum number of characters of a text.
const MAX_TEXT: usize = 300;

/// Decodes a text for an error message.
pub fn text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Cow<'static, str>, D::Error> {
    string(deserializer).map(Cow::Owned)
}

/// Decodes a text for an error message.
pub fn string<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Ok(clean_text(&String::deserialize(deserializer)?))
}

/// Returns the beginning of a text, without control characters.
pub fn clean_text(text: &str) -> String {
    text.chars().filter(|char| !char.is_control()).take(MAX_TEXT).collect()
}

/// I/O errors, for `#[serde(with)]`.
pub mod io_error {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use std::io::{self, ErrorKind};

    /// The kinds that workers report, besides errors of the operating system.
    const KINDS: [ErrorKind; 6] = [
        ErrorKind::UnexpectedEof,
        ErrorKind::InvalidData,
        ErrorKind::InvalidInput,
        ErrorKind::FileTooLarge,
        ErrorKind::BrokenPipe,
        ErrorKind::OutOfMemory,
    ];

    #[derive(Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct WireIoError {
        os: Option<i32>,
        /// The place in `KINDS`.
        kind: Option<usize>,
        text: String,
    }

    /// Serializes an error.
    pub fn serialize<S: Serializer>(error: &io::Error, serializer: S) -> Result<S::Ok, S::Error> {
        let kind = KINDS.iter().position(|kind| *kind == error.kind());
        let text = super::clean_text(&error.to_string());
        WireIoError { os: error.raw_os_error(), kind, text }.serialize(serializer)
    }

    /// Deserializes an error.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<io::Error, D::Error> {
        let wire = WireIoError::deserialize(deserializer)?;
        Ok(match (wire.os, wire.kind) {
            (Some(number), _) => io::Error::from_raw_os_error(number),
            (None, kind) => {
                let kind = kind.and_then(|kind| KINDS.get(kind)).copied().unwrap_or(ErrorKind::Other);
                io::Error::new(kind, super::clean_text(&wire.text))
            }
        })
    }
}
