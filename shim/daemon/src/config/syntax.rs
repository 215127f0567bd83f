//! Describes an error of TOML without the line that has it: the line may contain the password of a proxy.

/// Where a TOML text is wrong, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: {message}")]
pub struct SyntaxError {
    line: usize,
    column: usize,
    message: String,
}

impl SyntaxError {
    /// Describes the parser's error about this text.
    pub(super) fn new(error: &toml::de::Error, text: &str) -> SyntaxError {
        let start = error.span().map_or(0, |span| span.start);
        let before = text.get(..start).unwrap_or(text);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        SyntaxError {
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
            message: error.message().to_owned(),
        }
    }
}
