//! Generates completion scripts of shells and man pages from the definition of the command line.

use super::output::print_bytes;
use super::{ExitStatus, help};
use anyhow::Context;
use clap_complete::Shell;
use std::path::Path;

/// Prints the script of a shell.
pub(super) fn print_script(shell: Shell) -> anyhow::Result<ExitStatus> {
    print_bytes(&script(shell))?;
    Ok(ExitStatus::Success)
}

fn script(shell: Shell) -> Vec<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut help::command(), "nacelle", &mut script);
    script
}

/// Writes a man page for each command: nacelle.1, nacelle-image.1, nacelle-image-ls.1 and so on.
pub(super) fn write_man_pages(directory: &Path) -> anyhow::Result<ExitStatus> {
    clap_mangen::generate_to(help::command(), directory)
        .with_context(|| format!("cannot write man pages into {}", directory.display()))?;
    Ok(ExitStatus::Success)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    /// Returns the words of all visible commands, such as ["image", "ls"].
    fn visible_commands(command: &clap::Command, words: &[String], into: &mut Vec<Vec<String>>) {
        for command in command.get_subcommands().filter(|command| !command.is_hide_set()) {
            let words = [words, &[command.get_name().to_owned()]].concat();
            visible_commands(command, &words, into);
            into.push(words);
        }
    }

    fn commands() -> Vec<Vec<String>> {
        let mut found = Vec::new();
        visible_commands(&help::command(), &[], &mut found);
        assert!(found.contains(&vec!["image".to_owned(), "ls".to_owned()]));
        found
    }

    #[test]
    fn every_shell_completes_every_command_and_option() {
        for shell in Shell::value_variants() {
            let script = String::from_utf8(script(*shell)).unwrap();
            for word in commands().iter().flatten() {
                assert!(script.contains(word.as_str()), "{shell}: {word}");
            }
            assert!(script.contains("timeline") && script.contains("output"), "{shell}");
        }
    }

    #[test]
    fn every_command_has_a_man_page() {
        let directory = tempfile::tempdir().unwrap();
        write_man_pages(directory.path()).unwrap();
        for words in commands() {
            let path = directory.path().join(format!("nacelle-{}.1", words.join("-")));
            let page = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            assert!(page.contains("Examples"), "{} has no examples", path.display());
        }
        let page = std::fs::read_to_string(directory.path().join("nacelle.1")).unwrap();
        assert!(page.contains("Exit codes") && !page.contains("nacelle\\-man"), "{page}");
        assert!(write_man_pages(Path::new("/nonexistent")).is_err());
    }
}
