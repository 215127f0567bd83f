//! Records what a conversion to an older version loses, as edits that restore it. An edit is only applied if the older document
//! still has the value that it had, so that later changes by a user are not undone.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// An edit that restores one lost value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Edit {
    /// The path.
    at: Vec<Step>,
    /// The value in the older document; null if it is missing there.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    was: Value,
    /// The correct value; null if the field must be missing.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    is: Value,
}

/// A step of a path.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
enum Step {
    /// A field.
    Key(String),
    /// The index in a list whose items have no names.
    Place(usize),
    /// The item of a list that has this name.
    Item { name: String },
}

/// Returns the edits that turn `old` into `new`.
pub(super) fn difference(new: &Value, old: &Value) -> Vec<Edit> {
    let mut edits = Vec::new();
    compare(new, old, &mut Vec::new(), &mut edits);
    edits
}

fn compare(new: &Value, old: &Value, at: &mut Vec<Step>, edits: &mut Vec<Edit>) {
    match (new, old) {
        (Value::Object(new), Value::Object(old)) => fields(new, old, at, edits),
        (Value::Array(new), Value::Array(old)) if new.len() == old.len() => {
            let named = unique(new).filter(|names| unique(old).as_ref() == Some(names));
            for (place, (new, old)) in new.iter().zip(old).enumerate() {
                let name = named.as_ref().and_then(|names| names.get(place)).copied();
                at.push(name.map_or(Step::Place(place), |name| Step::Item { name: name.to_owned() }));
                compare(new, old, at, edits);
                at.pop();
            }
        }
        (new, old) if new == old => {}
        (new, old) => edits.push(Edit { at: at.clone(), was: old.clone(), is: new.clone() }),
    }
}

fn fields(new: &Map<String, Value>, old: &Map<String, Value>, at: &mut Vec<Step>, edits: &mut Vec<Edit>) {
    let gone = old.keys().filter(|key| !new.contains_key(*key));
    for key in new.keys().chain(gone) {
        at.push(Step::Key(key.clone()));
        compare(new.get(key).unwrap_or(&Value::Null), old.get(key).unwrap_or(&Value::Null), at, edits);
        at.pop();
    }
}

/// Returns the names of a list's items, if all have distinct names.
fn unique(list: &[Value]) -> Option<Vec<&str>> {
    let names: Option<Vec<&str>> = list.iter().map(|item| item.get("name").and_then(Value::as_str)).collect();
    let names = names?;
    let mut sorted = names.clone();
    sorted.sort_unstable();
    sorted.windows(2).all(|two| two.first() != two.last()).then_some(names)
}

/// Applies the edits that still match.
pub(super) fn apply(value: &mut Value, edits: Vec<Edit>) {
    for edit in edits {
        let Some((last, above)) = edit.at.split_last() else { continue };
        let parent = above.iter().try_fold(&mut *value, |value, step| below(value, step));
        match (parent, last) {
            (Some(Value::Object(fields)), Step::Key(key)) => {
                if fields.get(key).unwrap_or(&Value::Null) != &edit.was {
                    continue;
                }
                if edit.is.is_null() {
                    fields.remove(key);
                } else {
                    fields.insert(key.clone(), edit.is);
                }
            }
            (Some(parent), last) => {
                if let Some(there) = below(parent, last).filter(|there| **there == edit.was) {
                    *there = edit.is;
                }
            }
            (None, _) => {}
        }
    }
}

fn below<'a>(value: &'a mut Value, step: &Step) -> Option<&'a mut Value> {
    match (value, step) {
        (Value::Object(fields), Step::Key(key)) => fields.get_mut(key),
        (Value::Array(items), Step::Place(place)) => items.get_mut(*place),
        (Value::Array(items), Step::Item { name }) => {
            items.iter_mut().find(|item| item.get("name").and_then(Value::as_str) == Some(name))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_was_changed_meanwhile_stays_changed() {
        let new =
            json!({ "a": 1, "b": { "c": [ { "name": "x", "more": 1 }, { "name": "y", "more": 2 } ] }, "d": "Once" });
        let old = json!({ "b": { "c": [ { "name": "x" }, { "name": "y" } ] }, "d": "Always" });
        let edits = difference(&new, &old);
        let mut same = old.clone();
        apply(&mut same, edits.clone());
        assert_eq!(same, new);
        // One item is gone and the others have moved; and a user has stopped it.
        let mut changed = json!({ "b": { "c": [ { "name": "z" }, { "name": "y" } ] }, "d": "Halted" });
        apply(&mut changed, edits);
        assert_eq!(
            changed,
            json!({ "a": 1, "b": { "c": [ { "name": "z" }, { "name": "y", "more": 2 } ] }, "d": "Halted" })
        );
    }
}
