//! Finds the paths that a file names, in `use` items and in expressions. Braces in a `use` item are expanded to one path each.

use crate::source::{Token, group_end, text_at};

/// A path of two names or more, or one that a `use` item brings.
pub struct NamedPath<'a> {
    /// The modules with a body in the same file that the path stands in, outermost first.
    pub inside: Vec<&'a str>,
    pub names: Vec<&'a str>,
}

pub fn named_paths<'a>(tokens: &[Token<'a>]) -> Vec<NamedPath<'a>> {
    let mut found = Vec::new();
    let mut modules = OpenModules::default();
    let mut at = 0;
    while let Some(token) = tokens.get(at) {
        let before = at.checked_sub(1).map_or("", |before| text_at(tokens, before));
        match token.text {
            "mod" if text_at(tokens, at + 2) == "{" => {
                modules.open_module(text_at(tokens, at + 1));
                at += 3;
            }
            "{" => {
                modules.open_brace();
                at += 1;
            }
            "}" => {
                modules.close_brace();
                at += 1;
            }
            // A visibility names a module without a use of it.
            "pub" if text_at(tokens, at + 1) == "(" && text_at(tokens, at + 2) == "in" => {
                at = group_end(tokens, at + 1)
            }
            // `use<'a>` is a bound.
            "use" if text_at(tokens, at + 1) != "<" => {
                let rest = tokens.get(at + 1..).unwrap_or_default();
                let length = rest.iter().position(|token| token.text == ";").unwrap_or(rest.len());
                let paths = expand(rest.get(..length).unwrap_or_default()).into_iter();
                let paths = paths.filter(|names| !names.is_empty());
                found.extend(paths.map(|names| NamedPath { inside: modules.names(), names }));
                at += 1 + length;
            }
            // After `as` a path may begin with `::`.
            _ if token.is_name() && token.text != "as" && !matches!(before, "::" | ".") => {
                let names = path_at(tokens, at);
                at += 2 * names.len() - 1;
                if names.len() > 1 {
                    found.push(NamedPath { inside: modules.names(), names });
                }
            }
            _ => at += 1,
        }
    }
    found
}

/// The modules with a body around a place in a file.
#[derive(Default)]
struct OpenModules<'a> {
    /// Braces that are open.
    depth: usize,
    /// Each module with the depth inside of it.
    open: Vec<(usize, &'a str)>,
}

impl<'a> OpenModules<'a> {
    fn open_module(&mut self, name: &'a str) {
        self.open_brace();
        self.open.push((self.depth, name));
    }

    fn open_brace(&mut self) {
        self.depth += 1;
    }

    fn close_brace(&mut self) {
        let depth = self.depth;
        self.open.retain(|(inside, _)| *inside != depth);
        self.depth = depth.saturating_sub(1);
    }

    fn names(&self) -> Vec<&'a str> {
        self.open.iter().map(|(_, name)| *name).collect()
    }
}

/// Returns the names of the path that begins at `at`.
fn path_at<'a>(tokens: &[Token<'a>], mut at: usize) -> Vec<&'a str> {
    let mut names = vec![text_at(tokens, at)];
    while let (true, Some(name)) = (text_at(tokens, at + 1) == "::", tokens.get(at + 2)) {
        if !name.is_name() {
            break;
        }
        names.push(name.text);
        at += 2;
    }
    names
}

/// Returns the paths of a tree of a `use` item. The name that `as` gives and the `*` of a glob are left out.
fn expand<'a>(tree: &[Token<'a>]) -> Vec<Vec<&'a str>> {
    let mut path: Vec<&'a str> = Vec::new();
    for (number, token) in tree.iter().enumerate() {
        match token.text {
            "::" => {}
            "{" => {
                let inner = tree.get(number + 1..tree.len() - 1).unwrap_or_default();
                let mut depth = 0_i32;
                let parts = inner.split(|token| {
                    depth += i32::from(token.text == "{") - i32::from(token.text == "}");
                    token.text == "," && depth == 0
                });
                let rests = parts.filter(|part| !part.is_empty()).flat_map(expand);
                return rests.map(|rest| path.iter().copied().chain(rest).collect()).collect();
            }
            "as" | "*" => break,
            name => path.push(name),
        }
    }
    vec![path]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::tokens;

    /// The paths, each with the modules around it and a `/`.
    fn paths(code: &str) -> Vec<String> {
        let tokens = tokens(code);
        let found = named_paths(&tokens).into_iter();
        found.map(|path| format!("{}/{}", path.inside.join("::"), path.names.join("::"))).collect()
    }

    #[test]
    fn use_items_are_expanded() {
        assert_eq!(
            paths("use crate::a::{self, b::{C, d::*}, e as f};"),
            ["/crate::a::self", "/crate::a::b::C", "/crate::a::b::d", "/crate::a::e"]
        );
        assert_eq!(paths("pub(crate) use super::super::a;"), ["/super::super::a"]);
        assert_eq!(paths("use {crate::a, crate::b,};"), ["/crate::a", "/crate::b"]);
        assert_eq!(paths("use a;"), ["/a"]);
    }

    #[test]
    fn paths_in_expressions_are_found() {
        assert_eq!(
            paths("let a: crate::b::C = self::d(super::e::<F>(), a.b::<c::D>());"),
            ["/crate::b::C", "/self::d", "/super::e", "/c::D"]
        );
        assert_eq!(paths("<crate::A as ::std::B>::c(d)"), ["/crate::A"]);
        assert_eq!(paths("fn f() -> impl A + use<'a> { crate::b() }"), ["/crate::b"]);
        assert!(paths("pub(crate) fn f(self) { self.a; super_b(); Self }").is_empty());
        assert_eq!(paths("pub(in crate::a) struct B(pub (crate::c::D));"), ["/crate::c::D"]);
    }

    #[test]
    fn modules_around_a_path_are_noted() {
        let code =
            "crate::a(); mod b { use super::c; mod d { fn e() { super::f(); } } fn g() { self::h(); } } crate::i();";
        let expected = ["/crate::a", "b/super::c", "b::d/super::f", "b/self::h", "/crate::i"];
        assert_eq!(paths(code), expected);
    }
}
