//! Names of public types that are used more than once in the workspace. Public is what has any `pub`; aliases are no types.

use super::source_file::SourceFile;
use crate::source::{Token, group_end, text_at, tokens};
use serde::Serialize;
use std::collections::BTreeMap;

/// So many of the most frequent names are listed.
const MAX_LISTED: usize = 10;

#[derive(Serialize)]
pub struct TypeNames {
    pub types: usize,
    /// Types that share their name with another one.
    pub sharing: usize,
    /// The names that these share.
    pub shared_names: usize,
    pub most_frequent: Vec<SharedName>,
}

#[derive(Serialize)]
pub struct SharedName {
    pub name: String,
    pub places: Vec<String>,
}

/// Returns where each name of a public type stands.
pub fn definitions(files: &[SourceFile<'_>]) -> BTreeMap<String, Vec<String>> {
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for file in files {
        for (name, line) in public_types(&tokens(&file.code)) {
            places.entry(name.to_owned()).or_default().push(format!("{}:{line}", file.place));
        }
    }
    places
}

pub fn count_shared(files: &[SourceFile<'_>]) -> TypeNames {
    let places = definitions(files);
    let types = places.values().map(Vec::len).sum();
    let shared = places.into_iter().filter(|(_, places)| places.len() > 1);
    let mut shared: Vec<SharedName> = shared.map(|(name, places)| SharedName { name, places }).collect();
    // The names are in order; this keeps them so where they are equally frequent.
    shared.sort_by_key(|one| std::cmp::Reverse(one.places.len()));
    let (sharing, shared_names) = (shared.iter().map(|one| one.places.len()).sum(), shared.len());
    shared.truncate(MAX_LISTED);
    TypeNames { types, sharing, shared_names, most_frequent: shared }
}

/// Returns the names of the public types, with their lines.
fn public_types<'a>(tokens: &[Token<'a>]) -> Vec<(&'a str, usize)> {
    let mut found = Vec::new();
    for (at, token) in tokens.iter().enumerate().filter(|(_, token)| token.text == "pub") {
        let mut keyword = at + 1;
        if text_at(tokens, keyword) == "(" {
            keyword = group_end(tokens, keyword);
        }
        if text_at(tokens, keyword) == "unsafe" {
            keyword += 1;
        }
        let is_type = matches!(text_at(tokens, keyword), "struct" | "enum" | "union" | "trait");
        if let Some(name) = tokens.get(keyword + 1).filter(|name| is_type && name.is_name()) {
            found.push((name.text, token.line));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::source_file::production_files;
    use super::*;

    #[test]
    fn public_types_are_found() {
        let code = "pub struct A; pub(crate) enum B {} pub(in crate::c) union C {} pub unsafe trait D {} struct E; \
                    pub type F = A; pub fn struct_g() {} pub struct H { pub union: u8, pub a: u8 }";
        let found: Vec<_> = public_types(&tokens(code)).into_iter().map(|(name, _)| name).collect();
        assert_eq!(found, ["A", "B", "C", "D", "H"]);
    }

    #[test]
    fn shared_names_are_counted() {
        let file = |place: &str, text: &str| (place.to_owned(), text.to_owned());
        let files = [
            file("a/src/b.rs", "pub struct Place;\npub struct Own;\npub enum Way {}\n"),
            file("c/src/d.rs", "pub enum Way {}\npub trait Place {}\n"),
            file("c/src/e.rs", "pub struct Way;\n#[cfg(test)]\nmod tests { pub struct Own; }\n"),
        ];
        let found = count_shared(&production_files(&files));
        assert_eq!((found.types, found.sharing, found.shared_names), (6, 5, 2));
        let names: Vec<_> = found.most_frequent.iter().map(|one| (one.name.as_str(), one.places.len())).collect();
        assert_eq!(names, [("Way", 3), ("Place", 2)]);
        assert_eq!(found.most_frequent[1].places, ["a/src/b.rs:1", "c/src/d.rs:2"]);
    }
}
