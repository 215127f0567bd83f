//! Describes what is wrong in a configuration file, and where.

use super::key::KeyPath;
use super::syntax::TextPosition;
use serde::Serialize;
use std::fmt;

/// One mistake in a configuration file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ConfigProblem {
    /// The line, from 1; `None` if the file does not have the key.
    pub line: Option<usize>,
    /// The column in characters, from 1.
    pub column: Option<usize>,
    /// The key with its sections; `None` if the text is no TOML there.
    pub key: Option<String>,
    /// The value; `None` if the message has it, or if it may be secret.
    pub value: Option<String>,
    /// What is wrong, and what is allowed.
    pub message: String,
}

impl ConfigProblem {
    pub(super) fn new(position: Option<TextPosition>, key: Option<&KeyPath>, message: String) -> ConfigProblem {
        ConfigProblem {
            line: position.map(|position| position.line),
            column: position.map(|position| position.column),
            key: key.map(KeyPath::to_string),
            value: None,
            message,
        }
    }

    /// Returns key, value and message, without the place.
    pub fn reason(&self) -> String {
        match (&self.key, &self.value) {
            (Some(key), Some(value)) => format!("{key} = {value}: {}", self.message),
            (Some(key), None) => format!("{key}: {}", self.message),
            (None, _) => self.message.clone(),
        }
    }
}

impl fmt::Display for ConfigProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let (Some(line), Some(column)) = (self.line, self.column) {
            write!(f, "line {line}, column {column}: ")?;
        }
        f.write_str(&self.reason())
    }
}

/// All mistakes in a configuration file, in the order of their lines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ConfigProblems(Vec<ConfigProblem>);

impl ConfigProblems {
    pub(super) fn new(mut problems: Vec<ConfigProblem>) -> ConfigProblems {
        problems.sort_by_key(|problem| (problem.line, problem.column));
        ConfigProblems(problems)
    }

    /// Returns the mistakes.
    pub fn list(&self) -> &[ConfigProblem] {
        &self.0
    }
}

impl std::error::Error for ConfigProblems {}

impl fmt::Display for ConfigProblems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { "; " };
            write!(f, "{separator}{problem}")?;
        }
        Ok(())
    }
}
