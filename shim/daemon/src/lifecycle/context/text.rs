//! Bounds texts that come from pod processes.

/// Texts of pod processes are cut to this number of bytes.
pub(crate) const CLIP: usize = 2000;

/// Returns an untrusted text on one line and with limited length.
pub(crate) fn clip(text: &str) -> String {
    let mut short = String::new();
    for c in text.chars().map(|c| if c.is_control() { ' ' } else { c }) {
        if short.len() + c.len_utf8() > CLIP {
            short.push('…');
            break;
        }
        short.push(c);
    }
    short
}
