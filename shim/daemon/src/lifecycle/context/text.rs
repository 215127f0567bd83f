//! Bounds texts that come from pod processes, and orders error texts for kubelet.

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

/// The reason that kubelet expects at the beginning of an error of CreateContainer (`ErrImageVolumeMountFailed` of cri-api).
const IMAGE_VOLUME_MOUNT_FAILED: &str = "ImageVolumeMountFailed: ";

/// Returns an error text with kubelet's reason moved from the cause that states it to the beginning; kubelet looks only there.
pub(crate) fn lead_with_reason(text: &str) -> String {
    match text.split_once(&format!(": {IMAGE_VOLUME_MOUNT_FAILED}")) {
        Some((before, after)) => format!("{IMAGE_VOLUME_MOUNT_FAILED}{before}: {after}"),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_of_kubelet_is_at_the_beginning() {
        for (text, expected) in [
            (
                "cannot mount a volume of container c: ImageVolumeMountFailed: the image has no \"x\"",
                "ImageVolumeMountFailed: cannot mount a volume of container c: the image has no \"x\"",
            ),
            ("ImageVolumeMountFailed: no room", "ImageVolumeMountFailed: no room"),
            ("cannot mount \"ImageVolumeMountFailed: x\"", "cannot mount \"ImageVolumeMountFailed: x\""),
            ("", ""),
        ] {
            assert_eq!(lead_with_reason(text), expected);
        }
    }
}
