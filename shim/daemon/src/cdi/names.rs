//! Defines the names of CDI devices: VENDOR/CLASS=NAME.

/// The longest part of a name in bytes.
const MAX_PART: usize = 253;

/// Splits the name of a device into kind and name; `None` if it is none.
pub(super) fn split_name(name: &str) -> Option<(&str, &str)> {
    let (kind, device) = name.split_once('=')?;
    (is_kind(kind) && is_device_name(device)).then_some((kind, device))
}

/// Returns whether this is VENDOR/CLASS.
pub(super) fn is_kind(kind: &str) -> bool {
    kind.split_once('/').is_some_and(|(vendor, class)| is_word(vendor, "_-.") && is_word(class, "_-."))
}

/// Returns whether a device may have this name in its specification.
pub(super) fn is_device_name(name: &str) -> bool {
    is_word(name, "_-.:")
}

/// Returns whether a text has only ASCII letters, digits and, inside, the further characters.
fn is_word(text: &str, further: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric();
    let ends = text.starts_with(plain) && text.ends_with(plain);
    ends && text.len() <= MAX_PART && text.chars().all(|c| plain(c) || further.contains(c))
}
