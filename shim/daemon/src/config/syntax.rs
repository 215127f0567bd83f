//! Describes an error of TOML without the line that has it: the line may contain the password of a proxy.

use std::fmt;

/// A place in a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TextPosition {
    /// The line, from 1.
    pub(super) line: usize,
    /// The column in characters, from 1.
    pub(super) column: usize,
}

impl TextPosition {
    /// Returns the place of the byte at `offset`.
    pub(super) fn new(text: &str, offset: usize) -> TextPosition {
        let before = text.get(..offset).unwrap_or(text);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        TextPosition { line: before.matches('\n').count() + 1, column: before[line_start..].chars().count() + 1 }
    }

    /// Returns the place of the parser's error.
    pub(super) fn of_error(text: &str, error: &toml::de::Error) -> TextPosition {
        TextPosition::new(text, error.span().map_or(0, |span| span.start))
    }
}

impl fmt::Display for TextPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}", self.line, self.column)
    }
}

/// Where a TOML text is wrong, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{position}: {message}")]
pub struct SyntaxError {
    position: TextPosition,
    message: String,
}

impl SyntaxError {
    /// Describes the parser's error about this text.
    pub(super) fn new(error: &toml::de::Error, text: &str) -> SyntaxError {
        SyntaxError { position: TextPosition::of_error(text, error), message: describe(error.message()) }
    }
}

/// Names of Rust's types in serde's messages, and what they mean in a file.
const TYPE_NAMES: [(&str, &str); 9] = [
    ("u16", "a whole number of at most 65535"),
    ("u32", "a whole number of at most 4294967295"),
    ("u64", "a whole number"),
    ("usize", "a whole number"),
    ("a sequence", "an array"),
    ("a boolean", "true or false"),
    ("a string", "text in quotes"),
    ("path string", "a path in quotes"),
    ("a map", "a section"),
];

/// Returns serde's message without the value, which may be secret, and without names of Rust's types.
pub(super) fn describe(message: &str) -> String {
    let message = message.trim_end();
    let Some((found, expected)) = message.rsplit_once(", expected ") else { return message.to_owned() };
    let hidden = ["invalid type: string ", "invalid value: string "].into_iter().find(|kind| found.starts_with(kind));
    let found = hidden.map_or(found, str::trim_end);
    let known = TYPE_NAMES.iter().find(|(name, _)| *name == expected).map(|(_, meaning)| *meaning);
    let section = expected.starts_with("struct ").then_some("a section");
    format!("{found}, expected {}", known.or(section).unwrap_or(expected))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_no_value_and_no_type_of_rust() {
        for (message, expected) in [
            (
                "invalid type: string \"s3cret\", expected u32",
                "invalid type: string, expected a whole number of at most 4294967295",
            ),
            ("invalid value: integer `-1`, expected usize", "invalid value: integer `-1`, expected a whole number"),
            (
                "invalid type: integer `1`, expected struct PathSettings",
                "invalid type: integer `1`, expected a section",
            ),
            ("unknown field `a`, expected `b`", "unknown field `a`, expected `b`"),
            ("invalid table header", "invalid table header"),
        ] {
            assert_eq!(describe(message), expected);
        }
        assert_eq!(TextPosition::new("a\nbc", 3), TextPosition { line: 2, column: 2 });
    }
}
