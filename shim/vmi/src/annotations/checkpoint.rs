//! Checks the names of checkpoints from which pods continue. Nodes use them (docs/user/checkpoints.md); here they are only validated.

/// The longest name in bytes.
const MAX: usize = 63;
/// The rule, for causes.
pub const RULE: &str = "the name of a checkpoint is expected: 1 to 63 lower-case letters, digits and -, with a letter or digit at both ends";

/// Returns whether this can be the name of a checkpoint, or of a namespace: a DNS label, so that it is the name of a directory, too.
pub fn is_name(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let ends = [text.bytes().next(), text.bytes().next_back()];
    text.len() <= MAX
        && ends.into_iter().all(|end| end.is_some_and(is_plain))
        && text.bytes().all(|byte| is_plain(byte) || byte == b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_a_dns_label() {
        for name in ["a", "7", "web-1", &"a".repeat(63)] {
            assert!(is_name(name), "{name}");
        }
        for text in ["", "-a", "a-", ".", "..", "a.b", "a/b", "/a", "A", "a b", "a\0", "\u{e4}", &"a".repeat(64)] {
            assert!(!is_name(text), "{text:?}");
        }
    }
}
