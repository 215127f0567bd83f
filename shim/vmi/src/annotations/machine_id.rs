//! Parses the annotation `vm.nacelle.dev/machine-id`: the id that a pod expects of its persistent VM.

/// The longest machine id in bytes.
const MAX_BYTES: usize = 63;

/// The rule of the annotation, for messages.
pub(super) const RULE: &str = "must be ID or ID,new, where ID has 1 to 63 letters, digits, '-', '_' and '.', and begins and ends with a letter or a digit";

/// The machine id that a pod expects of the persistent VM that it names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpectedMachineId {
    /// The id: a text that [`is_machine_id`] accepts, usually a UUID.
    pub id: String,
    /// The VM may be created, if the node has none of this name.
    pub may_create: bool,
}

/// Returns whether a text is a machine id: its characters are safe in messages, JSON and file names, and its length is bounded.
pub fn is_machine_id(text: &str) -> bool {
    let alphanumeric = |byte: Option<u8>| byte.is_some_and(|b| b.is_ascii_alphanumeric());
    let inner = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    text.len() <= MAX_BYTES
        && text.bytes().all(inner)
        && alphanumeric(text.bytes().next())
        && alphanumeric(text.bytes().next_back())
}

/// Parses the value of the annotation; `None` if it is invalid.
pub(super) fn parse(text: &str) -> Option<ExpectedMachineId> {
    let (id, may_create) = match text.split_once(',') {
        None => (text, false),
        Some((id, "new")) => (id, true),
        Some(_) => return None,
    };
    is_machine_id(id).then(|| ExpectedMachineId { id: id.to_owned(), may_create })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_read_with_or_without_permission_to_create() {
        let id = "8b0d4a52-7c1e-4e0b-9a57-3f6f0f7f2d11";
        assert_eq!(parse(id), Some(ExpectedMachineId { id: id.to_owned(), may_create: false }));
        assert_eq!(parse(&format!("{id},new")), Some(ExpectedMachineId { id: id.to_owned(), may_create: true }));
        assert!(parse(&"a".repeat(63)).is_some() && parse("a").is_some() && parse("A_b.c-9").is_some());
    }

    #[test]
    fn every_other_text_is_invalid() {
        let long = "a".repeat(64);
        let escapes = ["a\nb", "a\0b", "a/b", "../a", "ä", "a\u{1b}[0m"];
        let forms = ["", ",", ",new", "a,", "a,New", "a,new,new", "a, new", " a", "a ", "a,b", "-a", "a-", ".a", "a_"];
        for text in escapes.into_iter().chain(forms).chain([long.as_str(), &format!("{long},new")]) {
            assert_eq!(parse(text), None, "{text:?}");
        }
    }
}
