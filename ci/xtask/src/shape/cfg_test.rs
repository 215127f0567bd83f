//! Finds the items of a file that are compiled for tests only: those under `#[cfg(test)]`, or under a `cfg` that names `test` inside of
//! `any` or `all`.

use crate::source::{Token, group_end, text_at};
use std::ops::Range;

/// Words that begin an item. Anything else under an attribute is a field, a variant, an arm or a statement.
const ITEM_KEYWORDS: [&str; 16] = [
    "async",
    "const",
    "enum",
    "extern",
    "fn",
    "impl",
    "macro_rules",
    "mod",
    "pub",
    "static",
    "struct",
    "trait",
    "type",
    "union",
    "unsafe",
    "use",
];

/// What a file contains for tests only.
#[derive(Default)]
pub struct TestItems {
    /// Ranges of tokens, in order and without overlaps.
    pub ranges: Vec<Range<usize>>,
    /// Names of the modules for tests that lie in files of their own.
    pub modules: Vec<String>,
    /// Whether `#![cfg(test)]` applies to the whole file.
    pub whole_file: bool,
}

pub fn find(tokens: &[Token<'_>]) -> TestItems {
    let mut found = TestItems::default();
    let mut at = 0;
    while at < tokens.len() {
        let inner = text_at(tokens, at + 1) == "!";
        let bracket = at + 1 + usize::from(inner);
        if text_at(tokens, at) != "#" || text_at(tokens, bracket) != "[" {
            at += 1;
            continue;
        }
        let end = group_end(tokens, bracket);
        if !is_cfg_test(tokens.get(bracket + 1..end).unwrap_or_default()) {
            at = end;
        } else if inner {
            found.whole_file = true;
            at = end;
        } else {
            let item = skip_attributes(tokens, end);
            let after = item_end(tokens, item);
            found.modules.extend(module_in_file(tokens.get(item..after).unwrap_or_default()));
            found.ranges.push(at..after);
            at = after;
        }
    }
    found
}

/// Whether an attribute's tokens are a `cfg` that holds in tests only. `not` turns the meaning round.
fn is_cfg_test(attribute: &[Token<'_>]) -> bool {
    let has = |word: &str| attribute.iter().any(|token| token.text == word);
    text_at(attribute, 0) == "cfg" && has("test") && !has("not")
}

/// Returns the index after the attributes that begin at `at`.
fn skip_attributes(tokens: &[Token<'_>], mut at: usize) -> usize {
    while text_at(tokens, at) == "#" && text_at(tokens, at + 1) == "[" {
        at = group_end(tokens, at + 1);
    }
    at
}

/// Returns the index after the item, field, variant or statement that begins at `start`.
fn item_end(tokens: &[Token<'_>], start: usize) -> usize {
    let mut first = start;
    if text_at(tokens, first) == "pub" {
        first += 1;
        if text_at(tokens, first) == "(" {
            first = group_end(tokens, first);
        }
    }
    let word = text_at(tokens, first);
    let is_item = ITEM_KEYWORDS.contains(&word);
    let is_constant = word == "const" && !["async", "extern", "fn", "unsafe"].contains(&text_at(tokens, first + 1));
    // Braces do not end these.
    let needs_semicolon = is_constant || ["let", "static", "type", "use"].contains(&word);
    let mut at = first;
    while let Some(token) = tokens.get(at) {
        match token.text {
            "(" | "[" => at = group_end(tokens, at),
            "{" => {
                at = group_end(tokens, at);
                if !needs_semicolon {
                    return at;
                }
            }
            ";" => return at + 1,
            "," if !is_item => return at + 1,
            ")" | "]" | "}" => return at,
            _ => at += 1,
        }
    }
    at
}

/// Returns the name of the module that an item declares without a body.
fn module_in_file(item: &[Token<'_>]) -> Option<String> {
    if item.last()?.text != ";" {
        return None;
    }
    let keyword = item.iter().position(|token| token.text == "mod")?;
    Some(text_at(item, keyword + 1).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::tokens;

    /// The code that stays when the items for tests are taken out, without blanks.
    fn rest(code: &str) -> String {
        let tokens = tokens(code);
        let ranges = find(&tokens).ranges;
        let kept = tokens.iter().enumerate().filter(|(at, _)| !ranges.iter().any(|range| range.contains(at)));
        kept.map(|(_, token)| token.text).collect()
    }

    #[test]
    fn items_for_tests_are_found() {
        for item in [
            "mod tests { fn g() { h() } }",
            "mod tests;",
            "pub(crate) use record::tests as other;",
            "use a::{b, c};",
            "#[allow(x)] mod tests {}",
            "fn g<A, B>(a: [u8; 4]) -> C { d }",
            "const A: B = B { c: 1 };",
            "pub const fn a() -> u8 { 1 }",
            "impl A { fn b() {} }",
            "struct A { b: C, d: E }",
            "let a = B { c };",
        ] {
            assert_eq!(rest(&format!("fn f() {{}} #[cfg(test)] {item} fn i() {{}}")), "fnf(){}fni(){}", "{item}");
        }
        assert_eq!(rest("#[cfg(any(test, feature = x))] mod testing; fn f() {}"), "fnf(){}");
    }

    #[test]
    fn parts_of_items_are_found() {
        assert_eq!(rest("struct A { b: u8, #[cfg(test)] c: u8, d: u8 }"), "structA{b:u8,d:u8}");
        assert_eq!(rest("struct A { #[cfg(test)] c: u8 }"), "structA{}");
        assert_eq!(rest("match a { #[cfg(test)] B => c, D => e }"), "matcha{D=>e}");
    }

    #[test]
    fn other_attributes_are_code() {
        for code in
            ["#[cfg(not(test))] fn f() {}", "#[cfg(unix)] fn f() {}", "#[derive(A)] struct B;", "#[test] fn f() {}"]
        {
            assert!(find(&tokens(code)).ranges.is_empty(), "{code}");
        }
    }

    #[test]
    fn modules_in_files_and_whole_files_are_noted() {
        let code = "#[cfg(test)] mod examples; #[cfg(test)] mod tests { mod inner {} } #[cfg(test)] use a::b;";
        let found = find(&tokens(code));
        assert_eq!(found.modules, ["examples"]);
        assert!(!found.whole_file);
        assert!(find(&tokens("#![cfg(test)] fn f() {}")).whole_file);
    }
}
