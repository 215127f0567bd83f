//! Defines the sha256 digests that name images and layers.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A sha256 digest, printed as `sha256:` and 64 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(pub [u8; 32]);

/// The id of an image: the digest of its configuration.
pub type ImageId = Digest;

/// The text is not a digest.
#[derive(Debug, thiserror::Error)]
#[error("{text:?} is not a digest: a digest is sha256: and 64 characters from 0-9a-f")]
pub struct DigestError {
    /// The text, cut after 300 characters.
    pub text: String,
}

impl Digest {
    /// Computes the digest of these bytes.
    pub fn of(bytes: &[u8]) -> Digest {
        use sha2::Digest as _;
        Digest(sha2::Sha256::digest(bytes).into())
    }

    /// Returns the 64 hexadecimal digits without `sha256:`.
    pub fn hex(&self) -> String {
        hex::encode(self.0)
    }

    /// Parses 64 lower-case hexadecimal digits.
    pub fn from_hex(text: &str) -> Option<Digest> {
        let mut bytes = [0; 32];
        let lower = text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
        (lower && hex::decode_to_slice(text, &mut bytes).is_ok()).then_some(Digest(bytes))
    }
}

impl FromStr for Digest {
    type Err = DigestError;

    fn from_str(text: &str) -> Result<Self, DigestError> {
        text.strip_prefix("sha256:")
            .and_then(Digest::from_hex)
            .ok_or_else(|| DigestError { text: text.chars().take(300).collect() })
    }
}

impl TryFrom<String> for Digest {
    type Error = DigestError;

    fn try_from(text: String) -> Result<Self, DigestError> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> String {
        digest.to_string()
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
