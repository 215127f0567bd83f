//! Names a key of the configuration file, and finds it in the file.

use std::fmt;
use std::ops::Range;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// A key with its sections, such as `images.registries."r.example:5000".http`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyPath(Vec<String>);

impl From<&str> for KeyPath {
    /// Splits a key at its dots.
    fn from(key: &str) -> KeyPath {
        KeyPath(key.split('.').map(str::to_owned).collect())
    }
}

impl fmt::Display for KeyPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_bare = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        for (index, part) in self.0.iter().enumerate() {
            let dot = if index == 0 { "" } else { "." };
            match !part.is_empty() && part.chars().all(is_bare) {
                true => write!(f, "{dot}{part}")?,
                false => write!(f, "{dot}{part:?}")?,
            }
        }
        Ok(())
    }
}

impl KeyPath {
    /// Returns the key `name` in the section of this name.
    pub(super) fn child(&self, name: &str) -> KeyPath {
        KeyPath([&self.0[..], &[name.to_owned()]].concat())
    }

    /// Returns whether both keys are in the same section.
    pub(super) fn is_beside(&self, other: &KeyPath) -> bool {
        let section = |key: &KeyPath| key.0.split_last().map(|(_, section)| section.to_vec());
        section(self) == section(other)
    }

    /// Returns the key whose name or value has this offset in the text.
    pub(super) fn at(table: &DeTable<'_>, offset: usize) -> Option<KeyPath> {
        let mut parts = Vec::new();
        find(table, offset, &mut parts).then_some(KeyPath(parts))
    }

    /// Returns where the value is in the text; the section's name if there is no such key, and `None` if there is no section.
    pub(super) fn span(&self, table: &DeTable<'_>) -> Option<Range<usize>> {
        let (mut table, mut span) = (table, None);
        for part in &self.0 {
            let Some((key, value)) = table.get_key_value(part.as_str()) else { break };
            match value.get_ref() {
                DeValue::Table(inner) => (table, span) = (inner, Some(key.span())),
                _ => return Some(value.span()),
            }
        }
        span
    }

    /// Returns whether the key's name has this offset in the text.
    pub(super) fn has_name_at(&self, table: &DeTable<'_>, offset: usize) -> bool {
        let (mut table, mut span) = (table, None);
        for part in &self.0 {
            let Some((key, value)) = table.get_key_value(part.as_str()) else { return false };
            span = Some(key.span());
            if let DeValue::Table(inner) = value.get_ref() {
                table = inner;
            }
        }
        span.is_some_and(|span| span.contains(&offset))
    }

    /// Removes the key from a table. Returns whether it was there.
    pub(super) fn remove_from(&self, mut table: &mut DeTable<'_>) -> bool {
        let Some((last, sections)) = self.0.split_last() else { return false };
        for section in sections {
            match table.get_mut(section.as_str()).map(Spanned::get_mut) {
                Some(DeValue::Table(inner)) => table = inner,
                _ => return false,
            }
        }
        table.remove(last.as_str()).is_some()
    }
}

/// Adds the parts of the key at an offset, and returns whether there is one. Values of inner tables come first: a table may
/// contain the whole text of its keys.
fn find(table: &DeTable<'_>, offset: usize, parts: &mut Vec<String>) -> bool {
    for (key, value) in table.iter() {
        parts.push(key.get_ref().to_string());
        let inner = matches!(value.get_ref(), DeValue::Table(inner) if find(inner, offset, parts));
        if inner || key.span().contains(&offset) || value.span().contains(&offset) {
            return true;
        }
        parts.pop();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_found_by_name_and_by_place() {
        let text = "a = 1\n[s]\nb = 2\n[r.\"h:1\"]\nc = { d = 3 }\n";
        let mut file = DeTable::parse(text).unwrap();
        let at = |needle: &str| KeyPath::at(file.get_ref(), text.find(needle).unwrap()).map(|key| key.to_string());
        assert_eq!(at("1\n").as_deref(), Some("a"));
        assert_eq!(at("2").as_deref(), Some("s.b"));
        assert_eq!(at("b =").as_deref(), Some("s.b"));
        assert_eq!(at("3").as_deref(), Some("r.\"h:1\".c.d"));
        let key = KeyPath::from("r").child("h:1").child("c").child("d");
        let span = |key: &KeyPath| key.span(file.get_ref()).map(|span| &text[span]);
        assert_eq!(span(&key), Some("3"));
        assert_eq!(span(&KeyPath::from("s.none")), Some("s"));
        assert_eq!(span(&KeyPath::from("none")), None);
        assert!(key.has_name_at(file.get_ref(), text.find("d =").unwrap()));
        assert!(!key.has_name_at(file.get_ref(), text.find('3').unwrap()));
        assert!(key.is_beside(&KeyPath::from("r").child("h:1").child("c").child("e")));
        assert!(key.remove_from(file.get_mut()) && !key.remove_from(file.get_mut()));
    }
}
