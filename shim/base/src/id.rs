//! Defines the ids of pods and containers: 64 lower-case hexadecimal digits, as the tools of CRI expect.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The text is not an id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not an id: 64 characters from 0-9a-f are expected")]
pub struct IdError {
    /// The text, cut after 80 characters.
    pub text: String,
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// Returns the 64 digits.
            pub fn as_str(&self) -> &str {
                &self.0
            }

            /// Returns the first 13 digits, as crictl prints them.
            pub fn short(&self) -> &str {
                self.0.get(..13).unwrap_or(&self.0)
            }

            /// Returns the id with these 32 bytes, which should be random.
            pub fn from_bytes(bytes: [u8; 32]) -> Self {
                Self(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
            }
        }

        impl FromStr for $name {
            type Err = IdError;

            fn from_str(text: &str) -> Result<Self, IdError> {
                if text.len() == 64 && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)) {
                    Ok(Self(text.to_owned()))
                } else {
                    Err(IdError { text: text.chars().take(80).collect() })
                }
            }
        }

        impl TryFrom<String> for $name {
            type Error = IdError;

            fn try_from(text: String) -> Result<Self, IdError> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({})", stringify!($name), self.short())
            }
        }
    };
}

id! {
    /// The id of a PodSandbox.
    PodId
}
id! {
    /// The id of a container.
    ContainerId
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_64_lower_case_digits_are_an_id() {
        let good = "0123456789abcdef".repeat(4);
        assert_eq!(good.parse::<PodId>().unwrap().short(), "0123456789abc");
        for bad in ["", "abc", &good.to_uppercase(), &good[1..], &format!("{good}0"), &good.replace('0', "/")] {
            assert!(bad.parse::<ContainerId>().is_err(), "{bad}");
        }
    }

    #[test]
    fn json_rejects_what_parse_rejects() {
        assert!(serde_json::from_str::<PodId>("\"../x\"").is_err());
        let id = PodId::from_bytes([7; 32]);
        let text = serde_json::to_string(&id).unwrap();
        assert_eq!(serde_json::from_str::<PodId>(&text).unwrap(), id);
    }
}
