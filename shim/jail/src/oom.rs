//! Takes away the daemon's protection from the node's OOM killer, which its children inherit.

use std::path::Path;

/// The OOM score adjustment of this process, which its children inherit (proc_pid_oom_score_adj(5)).
const OOM_SCORE: &str = "/proc/self/oom_score_adj";

/// Raises a negative OOM score adjustment of this process to 0. A higher one stays. If it cannot be changed, that is only logged.
pub fn drop_oom_protection() {
    drop_protection_in(Path::new(OOM_SCORE));
}

fn drop_protection_in(file: &Path) {
    let score = std::fs::read_to_string(file).ok().and_then(|text| text.trim().parse::<i32>().ok());
    if score.is_some_and(|score| score < 0)
        && let Err(error) = std::fs::write(file, "0")
    {
        tracing::warn!(%error, "cannot raise the OOM score of this process; the OOM killer spares it as it does the daemon");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_negative_oom_score_is_raised() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (before, after) in [("-999\n", "0"), ("0\n", "0\n"), ("300\n", "300\n")] {
            std::fs::write(file.path(), before).unwrap();
            drop_protection_in(file.path());
            assert_eq!(std::fs::read_to_string(file.path()).unwrap(), after);
        }
    }
}
