//! Makes text of less trusted processes safe to log and to pass on.

/// Makes text of a less trusted process fit for messages: one line, no control characters, at most `max_chars` characters.
pub fn printable(text: &str, max_chars: usize) -> String {
    text.chars().take(max_chars).map(|c| if c.is_control() { ' ' } else { c }).collect::<String>().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_text_is_shortened_and_has_no_control_characters() {
        assert_eq!(printable("a\nb\u{1b}[0m\0", 5), "a b [0".trim_end_matches('0'));
        assert_eq!(printable(&"é".repeat(9), 3), "ééé");
    }
}
