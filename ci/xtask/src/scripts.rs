//! Checks that each shell script parses: a script that nothing in `ci/test` runs would otherwise fail at its next user.

use crate::{Finding, files};
use std::error::Error;
use std::io;
use std::path::Path;
use std::process::Command;

pub fn check(root: &Path) -> Result<Vec<Finding>, Box<dyn Error>> {
    let mut found = Vec::new();
    for (place, text) in files::read_scripts(root)? {
        if let Some(message) = syntax_error(&text)? {
            found.push(Finding { place, rule: format!("does not parse: {message}") });
        }
    }
    Ok(found)
}

/// Returns the first line of the shell's syntax error, if there is one.
fn syntax_error(text: &str) -> io::Result<Option<String>> {
    let shell = if text.starts_with("#!/bin/sh") { "sh" } else { "bash" };
    let parsed = Command::new(shell).args(["-n", "-c", text]).output()?;
    Ok((!parsed.status.success())
        .then(|| String::from_utf8_lossy(&parsed.stderr).lines().next().unwrap_or_default().into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_that_does_not_parse_is_found() {
        for shell in ["#!/bin/sh", "#!/bin/bash"] {
            let script = |text: &str| syntax_error(&format!("{shell}\n{text}\n")).unwrap();
            assert_eq!(script("names='a b'\nshow() { echo \"$names\"; }"), None);
            assert!(script("names='Debian's b'\nshow() { echo \"$names\"; }").is_some());
        }
    }
}
