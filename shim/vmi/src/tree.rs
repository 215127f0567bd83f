//! Assembles a specification from several sources: a tree that records the source of each field. Two sources that set a field to
//! different values are a conflict that names both.

use crate::cause::{Causes, Rule, json_excerpt};
use crate::shape::field;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// A specification that is being assembled.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tree {
    /// The fields of an `InstanceSpec`.
    pub value: Map<String, Value>,
    /// The path and source of each field that does not come from the document.
    pub from: BTreeMap<String, String>,
}

/// The path of the tree's root in causes.
pub const ROOT: &str = "spec";
/// The document, as a source.
const DOCUMENT: &str = "the specification";

impl Tree {
    /// Returns the tree of a document whose shape was checked.
    pub fn of(value: Value) -> Tree {
        let value = match value {
            Value::Object(fields) => fields,
            _ => Map::new(),
        };
        Tree { value, from: BTreeMap::new() }
    }

    /// Returns the value of a field.
    pub fn get(&self, path: &[&str]) -> Option<&Value> {
        let (first, rest) = path.split_first()?;
        rest.iter().try_fold(self.value.get(*first)?, |value, key| value.get(key))
    }

    /// Sets a field. Adds a conflict if another source has set it to another value.
    pub fn set(&mut self, path: &[&str], value: Value, from: &str, rule: Rule, causes: &mut Causes) {
        let Some((last, above)) = path.split_last() else { return };
        let at = path.iter().fold(ROOT.to_owned(), |at, key| field(&at, key));
        let Some(fields) = self.object(above) else { return };
        match fields.get(*last) {
            None => {
                fields.insert((*last).to_owned(), value);
                self.from.insert(at, from.to_owned());
            }
            Some(current) if *current == value => {}
            Some(current) => {
                let current = json_excerpt(current);
                let other = self.source(&at);
                causes.conflict(rule, at, value, format!("{other} sets {current}, and {from} sets another value"));
            }
        }
    }

    /// Appends a named item to a list. Adds a conflict if another source has added the same name.
    pub fn push(&mut self, path: &[&str], item: Value, from: &str, rule: Rule, causes: &mut Causes) {
        let at = path.iter().fold(ROOT.to_owned(), |at, key| field(&at, key));
        let Some((last, above)) = path.split_last() else { return };
        let Some(fields) = self.object(above) else { return };
        let list = fields.entry((*last).to_owned()).or_insert_with(|| Value::Array(Vec::new()));
        let Some(list) = list.as_array_mut() else { return };
        let name = item.get("name").cloned();
        match list.iter().position(|item| item.get("name").is_some() && item.get("name") == name.as_ref()) {
            Some(index) => {
                let at = format!("{at}[{index}].name");
                let other = self.source(&at);
                let message = format!("{other} and {from} both have an item of this name");
                causes.conflict(rule, at, name.unwrap_or_default(), message);
            }
            None => {
                let at = format!("{at}[{}]", list.len());
                list.push(item);
                self.from.insert(at, from.to_owned());
            }
        }
    }

    /// Returns the source of a field.
    pub fn source(&self, at: &str) -> String {
        self.explicit_source(at).map_or_else(|| DOCUMENT.to_owned(), str::to_owned)
    }

    /// Returns the source of a field or of a field above it, if it is not the document.
    pub fn explicit_source(&self, at: &str) -> Option<&str> {
        explicit_source(&self.from, at)
    }

    fn object(&mut self, path: &[&str]) -> Option<&mut Map<String, Value>> {
        path.iter().try_fold(&mut self.value, |fields, key| {
            let below = fields.entry((*key).to_owned()).or_insert_with(|| Value::Object(Map::new()));
            below.as_object_mut()
        })
    }

    /// Merges the fields of another tree that are not set. Where both are set, they must be equal. Lists are merged as a whole.
    pub fn merge(&mut self, other: &Map<String, Value>, above: &[&str], from: &str, rule: Rule, causes: &mut Causes) {
        for (key, value) in other {
            let mut path = above.to_vec();
            path.push(key);
            match value.as_object() {
                Some(fields) if !fields.is_empty() => self.merge(fields, &path, from, rule, causes),
                _ => self.set(&path, value.clone(), from, rule, causes),
            }
        }
    }
}

/// Returns the source of a field or of a field above it, if it is recorded.
pub fn explicit_source<'f>(from: &'f BTreeMap<String, String>, at: &str) -> Option<&'f str> {
    let mut end = at.len();
    loop {
        let part = at.get(..end)?;
        if let Some(from) = from.get(part) {
            return Some(from);
        }
        end = part.rfind(['.', '['])?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_conflict_names_both_sources() {
        let mut tree = Tree::of(json!({ "domain": { "cpu": { "model": "a" } } }));
        let mut causes = Causes::default();
        let model = ["domain", "cpu", "model"];
        tree.set(&model, json!("a"), "x", Rule("r"), &mut causes);
        assert!(causes.is_empty());
        tree.set(&model, json!("b"), "x", Rule("r"), &mut causes);
        tree.set(&["domain", "cpu", "cores"], json!(1), "x", Rule("r"), &mut causes);
        tree.set(&["domain", "cpu", "cores"], json!(2), "y", Rule("r"), &mut causes);
        assert_eq!(
            causes.to_string(),
            "spec.domain.cpu.model: Conflict: \"b\": the specification sets \"a\", and x sets another value; \
             spec.domain.cpu.cores: Conflict: 2: x sets 1, and y sets another value"
        );
    }
}
