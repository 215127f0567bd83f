//! Checks names, paths and references of all specifications and annotations. Pure.

use crate::cause::{Causes, Rule};
use std::collections::BTreeMap;

/// The rule of a DNS label.
pub const LABEL_RULE: &str =
    "must be at most 63 lower case letters, digits and '-', and begin and end with a letter or a digit";

/// Returns whether a name is a DNS label.
pub fn is_dns_label(name: &str) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    !name.is_empty() && name.len() <= 63 && name.bytes().all(inner) && !name.starts_with('-') && !name.ends_with('-')
}

/// The rule of a DNS subdomain.
pub const SUBDOMAIN_RULE: &str = "must be at most 253 lower case letters, digits, '-' and '.', as names of objects are";

/// Returns whether a name is a DNS subdomain.
pub fn is_dns_subdomain(name: &str) -> bool {
    name.len() <= 253 && name.split('.').all(is_dns_label)
}

/// The rules for the names of a list.
pub struct NameRules {
    /// The name must be set.
    pub required: Rule,
    /// The name must be well formed.
    pub well_formed: Rule,
    /// The name must be unique in the list.
    pub unique: Rule,
}

/// Checks the names of a list, and returns the index of each.
pub fn check_names<'a>(
    list: impl Iterator<Item = &'a str>,
    at: &str,
    rules: &NameRules,
    causes: &mut Causes,
) -> BTreeMap<&'a str, usize> {
    let mut known = BTreeMap::new();
    for (index, name) in list.enumerate() {
        let field = format!("{at}[{index}].name");
        if name.is_empty() {
            causes.required(rules.required, field, "must have a name");
        } else if !is_dns_label(name) {
            causes.invalid(rules.well_formed, field, name, LABEL_RULE);
        } else if let Some(first) = known.get(name) {
            causes.duplicate(rules.unique, field, name, format!("{at}[{first}] has this name"));
        } else {
            known.insert(name, index);
        }
    }
    known
}

/// Returns whether a path is absolute and has no `..`.
pub fn is_absolute_path(path: &str) -> bool {
    path.starts_with('/') && path.len() <= 4096 && !path.contains('\0') && path.split('/').all(|part| part != "..")
}

/// The rule of `is_absolute_path`.
pub const ABSOLUTE_PATH_RULE: &str = "must be an absolute path of at most 4096 bytes without '..'";

/// Returns whether a text has only printable characters and blanks.
pub fn is_printable(text: &str) -> bool {
    text.chars().all(|c| c.is_ascii_graphic() || c == ' ')
}

/// Returns whether a text is a plausible image reference.
pub fn is_image_reference(text: &str) -> bool {
    text.len() <= 512 && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"./:@_-".contains(&b))
}

/// The rule of `is_image_reference`.
pub const IMAGE_RULE: &str = "must be a reference of an image of at most 512 characters";
