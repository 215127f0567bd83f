//! Splits Rust code into tokens. Comments, strings and characters become blanks first, so that what they contain is not read as code.

/// A word or a sign of a program.
pub struct Token<'a> {
    pub text: &'a str,
    /// Offset in the code, in bytes.
    pub at: usize,
    /// Line, counted from 1.
    pub line: usize,
}

impl Token<'_> {
    pub fn is_name(&self) -> bool {
        self.text.starts_with(|first: char| first.is_alphabetic() || first == '_')
    }
}

/// Splits code into tokens. `::` is one token; any other sign is a token of its own.
pub fn tokens(code: &str) -> Vec<Token<'_>> {
    let mut tokens = Vec::new();
    let (mut at, mut line) = (0, 1);
    while let Some(rest) = code.get(at..).filter(|rest| !rest.is_empty()) {
        let word = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        let length = match word {
            0 if rest.starts_with("::") => 2,
            0 => rest.chars().next().map_or(1, char::len_utf8),
            word => word,
        };
        let text = rest.get(..length).unwrap_or_default();
        if !text.trim().is_empty() {
            tokens.push(Token { text, at, line });
        }
        line += usize::from(text == "\n");
        at += length;
    }
    tokens
}

/// Returns the text of the token at an index, or an empty text after the end.
pub fn text_at<'a>(tokens: &[Token<'a>], at: usize) -> &'a str {
    tokens.get(at).map_or("", |token| token.text)
}

/// Returns the index after the bracket that closes the one at `at`, or the number of tokens if none closes it.
pub fn group_end(tokens: &[Token<'_>], at: usize) -> usize {
    let mut depth = 0_usize;
    for (number, token) in tokens.iter().enumerate().skip(at) {
        match token.text {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    return number + 1;
                }
            }
            _ => {}
        }
    }
    tokens.len()
}

/// Returns a program with blanks in place of comments, strings and characters. Offsets and line numbers stay as they are.
pub fn blank_literals(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    let mut in_name = false;
    while let Some(first) = rest.chars().next() {
        let Some(length) = literal_length(rest, in_name) else {
            code.push(first);
            in_name = first.is_alphanumeric() || first == '_';
            rest = rest.get(first.len_utf8()..).unwrap_or_default();
            continue;
        };
        let (blank, after) = rest.split_at_checked(length).unwrap_or((rest, ""));
        code.extend(blank.bytes().map(|byte| if byte == b'\n' { '\n' } else { ' ' }));
        in_name = false;
        rest = after;
    }
    code
}

/// Returns the length of the comment, string or character that `rest` begins with, if it begins with one. `in_name`: the character
/// before belongs to a name, so that an `r` here does not begin a raw string.
fn literal_length(rest: &str, in_name: bool) -> Option<usize> {
    if rest.starts_with("//") {
        Some(rest.find('\n').unwrap_or(rest.len()))
    } else if rest.starts_with("/*") {
        Some(block_comment(rest))
    } else if rest.starts_with('"') {
        Some(find_closing(rest, '"'))
    } else if rest.starts_with('\'') && is_character(rest) {
        Some(find_closing(rest, '\''))
    } else if in_name {
        None
    } else {
        raw_string(rest)
    }
}

/// Returns the length of a block comment with all comments inside of it.
fn block_comment(rest: &str) -> usize {
    let (mut depth, mut at) = (0_usize, 0);
    while let Some(left) = rest.get(at..).filter(|left| !left.is_empty()) {
        if left.starts_with("/*") {
            depth += 1;
            at += 2;
        } else if left.starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += left.chars().next().map_or(1, char::len_utf8);
        }
    }
    rest.len()
}

/// Returns the length of a raw string (`r"…"`, `br#"…"#`), if `rest` begins with one.
fn raw_string(rest: &str) -> Option<usize> {
    let marked = ["r", "br", "cr"].into_iter().find_map(|prefix| rest.strip_prefix(prefix))?;
    let quoted = marked.trim_start_matches('#');
    let inner = quoted.strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(marked.len() - quoted.len()));
    let start = rest.len() - inner.len();
    Some(inner.find(&end).map_or(rest.len(), |at| start + at + end.len()))
}

/// Whether a quotation mark begins a character, and not a lifetime.
fn is_character(rest: &str) -> bool {
    let mut chars = rest.chars().skip(1);
    matches!((chars.next(), chars.next()), (Some('\\'), _) | (Some(_), Some('\'')))
}

/// Returns the length of a text up to and with its closing mark.
fn find_closing(rest: &str, mark: char) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == mark => return at + c.len_utf8(),
            _ => {}
        }
    }
    rest.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        tokens(&blank_literals(text)).iter().map(|token| token.text.to_owned()).collect()
    }

    #[test]
    fn comments_are_no_code() {
        assert_eq!(words("a // b\nc"), ["a", "c"]);
        assert_eq!(words("a /* b /* c */ d */ e"), ["a", "e"]);
        assert_eq!(words("/// doc `x`\n//! doc\n/** doc */ f"), ["f"]);
        assert_eq!(words("a /* no end"), ["a"]);
    }

    #[test]
    fn strings_and_characters_are_no_code() {
        assert_eq!(words(r#"a "b \" c" d"#), ["a", "d"]);
        assert_eq!(words("a r\"b\\\" c"), ["a", "c"]);
        assert_eq!(words("a r##\"b \"# c\"## d"), ["a", "d"]);
        assert_eq!(words("a br#\"b\"# c cr\"d\" e"), ["a", "c", "e"]);
        assert_eq!(words(r"a '\'' b '{' c '\u{7d}' d"), ["a", "b", "c", "d"]);
        assert_eq!(words("a \"// no comment\" b"), ["a", "b"]);
    }

    #[test]
    fn lifetimes_and_raw_names_are_code() {
        assert_eq!(words("fn f<'a>(x: &'a str)").len(), 14);
        assert_eq!(words("r#type bar \"x\""), ["r", "#", "type", "bar"]);
    }

    #[test]
    fn lines_and_offsets_stay() {
        let text = "a\n\"é\n\"\n/* x\n*/ b::c";
        let code = blank_literals(text);
        assert_eq!(code.len(), text.len());
        let places: Vec<_> = tokens(&code).iter().map(|token| (token.text.to_owned(), token.line)).collect();
        let expected = [("a", 1), ("b", 5), ("::", 5), ("c", 5)].map(|(text, line)| (text.to_owned(), line));
        assert_eq!(places, expected);
    }

    #[test]
    fn a_group_ends_at_its_bracket() {
        let code = tokens("( a [ b ] { c } ) d");
        assert_eq!(group_end(&code, 0), 9);
        assert_eq!(group_end(&code, 2), 5);
        assert_eq!(group_end(&tokens("( a"), 0), 2);
    }
}
