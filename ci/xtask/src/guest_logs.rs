//! Checks that code which serves guests logs by the macros of `nacelle_base::guest_log`, which limit the rate: a guest that can cause an
//! event can cause a million.

use crate::Finding;

/// The directories of this code.
const DIRECTORIES: [&str; 2] = ["shim/vmm/src/", "shim/fs/src/"];
/// The macros without a limit. Debug messages are off by default.
const UNLIMITED: [&str; 3] = ["error!", "warn!", "info!"];

/// `files` are all Rust files: their paths and their texts.
pub fn check(files: &[(String, String)]) -> Vec<Finding> {
    let mut found = Vec::new();
    for (path, text) in files.iter().filter(|(path, _)| DIRECTORIES.iter().any(|start| path.starts_with(start))) {
        for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim_start().starts_with("//")) {
            let unlimited = UNLIMITED.into_iter().find(|name| {
                line.match_indices(name).any(|(at, _)| {
                    let before = line.get(..at).and_then(|before| before.chars().next_back());
                    !before.is_some_and(|before| before.is_alphanumeric() || before == '_')
                })
            });
            found.extend(unlimited.map(|name| Finding {
                place: format!("{path}:{number}"),
                rule: format!("logs by {name} without a limit: use guest_warn! or guest_error! of nacelle_base"),
            }));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_of_guest_code_are_limited() {
        let file = |path: &str, text: &str| (path.to_owned(), text.to_owned());
        let files = [
            file("shim/vmm/src/a.rs", "    tracing::warn!(\"a\");\n    guest_warn!(\"a\");\n    // error!(\n"),
            file("shim/fs/src/b.rs", "    error!(\"a\");\n    tracing::debug!(\"a\");\n"),
            file("shim/pod/src/c.rs", "    tracing::warn!(\"a\");\n"),
        ];
        let found: Vec<_> = check(&files).into_iter().map(|finding| finding.place).collect();
        assert_eq!(found, ["shim/vmm/src/a.rs:1", "shim/fs/src/b.rs:1"]);
    }
}
