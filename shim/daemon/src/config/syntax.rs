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
            message: without_value(error.message()),
        }
    }
}

/// Removes the value from serde's message about a text where something else belongs.
fn without_value(message: &str) -> String {
    for kind in ["invalid type: string ", "invalid value: string "] {
        if let Some((_, expected)) = message.strip_prefix(kind).and_then(|rest| rest.rsplit_once(", expected ")) {
            return format!("{}, expected {expected}", kind.trim_end());
        }
    }
    message.to_owned()
}
