//! Lengths of files and of functions, in lines and without tests.

use super::source_file::SourceFile;
use crate::source::{Token, group_end, text_at, tokens};
use serde::Serialize;

/// Functions above so many lines are counted.
pub const FUNCTION_LIMIT: usize = 60;
/// So many of the longest are named.
const MAX_LISTED: usize = 10;

#[derive(Serialize)]
pub struct FileLengths {
    pub count: usize,
    pub median: usize,
    pub p90: usize,
    pub maximum: usize,
    pub longest: Vec<FileLength>,
}

#[derive(Serialize)]
pub struct FileLength {
    pub place: String,
    pub lines: usize,
    pub lines_with_tests: usize,
}

#[derive(Serialize)]
pub struct FunctionLengths {
    pub count: usize,
    pub above_limit: usize,
    pub longest: Vec<FunctionLength>,
}

#[derive(Serialize)]
pub struct FunctionLength {
    pub name: String,
    /// File and line.
    pub place: String,
    pub lines: usize,
}

pub fn measure_files(files: &[SourceFile<'_>]) -> FileLengths {
    let measured = files.iter().map(|file| FileLength {
        place: file.place.to_owned(),
        lines: file.production().count(),
        lines_with_tests: file.lines,
    });
    let mut longest: Vec<_> = measured.collect();
    longest.sort_by(|a, b| b.lines.cmp(&a.lines).then_with(|| a.place.cmp(&b.place)));
    let mut sorted: Vec<_> = longest.iter().map(|file| file.lines).collect();
    sorted.reverse();
    longest.truncate(MAX_LISTED);
    FileLengths {
        count: sorted.len(),
        median: quantile(&sorted, 50),
        p90: quantile(&sorted, 90),
        maximum: quantile(&sorted, 100),
        longest,
    }
}

pub fn measure_functions(files: &[SourceFile<'_>]) -> FunctionLengths {
    let mut longest: Vec<_> = files.iter().flat_map(functions_of).collect();
    let (count, above_limit) = (longest.len(), longest.iter().filter(|one| one.lines > FUNCTION_LIMIT).count());
    longest.sort_by(|a, b| b.lines.cmp(&a.lines).then_with(|| a.place.cmp(&b.place)));
    longest.truncate(MAX_LISTED);
    FunctionLengths { count, above_limit, longest }
}

/// Returns the value at a rank of `percent` of sorted values.
fn quantile(sorted: &[usize], percent: usize) -> usize {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default()
}

/// Returns the functions of a file that have a body, with their lengths from `fn` to the closing brace.
fn functions_of(file: &SourceFile<'_>) -> Vec<FunctionLength> {
    let tokens = tokens(&file.code);
    let mut found = Vec::new();
    for (at, token) in tokens.iter().enumerate().filter(|(_, token)| token.text == "fn") {
        let Some(name) = tokens.get(at + 1).filter(|name| name.is_name()) else {
            continue;
        };
        let Some(last) = body_start(&tokens, at + 2).and_then(|body| tokens.get(group_end(&tokens, body) - 1)) else {
            continue;
        };
        let place = format!("{}:{}", file.place, token.line);
        found.push(FunctionLength { name: name.text.to_owned(), place, lines: last.line - token.line + 1 });
    }
    found
}

/// Returns the index of the brace that opens a function's body; `at` lies in its signature.
fn body_start(tokens: &[Token<'_>], mut at: usize) -> Option<usize> {
    loop {
        match text_at(tokens, at) {
            "{" => return Some(at),
            ";" | "" => return None,
            "(" | "[" => at = group_end(tokens, at),
            _ => at += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::source_file::production_files;
    use super::*;

    #[test]
    fn quantiles_are_values_of_the_list() {
        let ten: Vec<usize> = (1..=10).collect();
        assert_eq!([50, 90, 100].map(|percent| quantile(&ten, percent)), [5, 9, 10]);
        assert_eq!(quantile(&[7], 50), 7);
        assert_eq!(quantile(&[], 50), 0);
    }

    #[test]
    fn functions_are_measured_from_name_to_brace() {
        let text = "\
trait A {
    fn declared(a: [u8; 2]) -> [u8; 2];
    fn given() {
        let f: fn(u8) -> u8 = g;
    }
}
fn long<const N: usize>(a: [u8; 4]) -> impl Fn() -> u8
where
    A: B,
{
    // }
    let brace = '}';
    fn inner() {}
}
#[cfg(test)]
mod tests {
    fn left_out() {}
}
";
        let tree = [("a/src/b.rs".to_owned(), text.to_owned())];
        let found = measure_functions(&production_files(&tree));
        let lines: Vec<_> =
            found.longest.iter().map(|one| (one.name.as_str(), one.place.as_str(), one.lines)).collect();
        let expected = [("long", "a/src/b.rs:7", 8), ("given", "a/src/b.rs:3", 3), ("inner", "a/src/b.rs:13", 1)];
        assert_eq!(lines, expected);
        assert_eq!((found.count, found.above_limit), (3, 0));
    }

    #[test]
    fn files_are_measured_without_tests() {
        let text = |lines: usize| format!("{}#[cfg(test)]\nmod tests {{\n}}\n", "fn f() {}\n".repeat(lines));
        let tree: Vec<_> = (1..=12).map(|lines| (format!("a/src/f{lines}.rs"), text(lines))).collect();
        let found = measure_files(&production_files(&tree));
        assert_eq!((found.count, found.median, found.p90, found.maximum), (12, 6, 11, 12));
        let first = &found.longest[0];
        assert_eq!((first.place.as_str(), first.lines, first.lines_with_tests), ("a/src/f12.rs", 12, 15));
        assert_eq!(found.longest.len(), 10);
    }
}
